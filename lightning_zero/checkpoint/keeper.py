"""`CheckpointKeeper`: the checkpoints of one run: the latest one, the links to it, and the one it goes on from."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, final

from torch.nn import Parameter

from lightning_zero.checkpoint.folder import CheckpointError, Folder
from lightning_zero.checkpoint.load import StoredCheckpoint
from lightning_zero.checkpoint.save import Saver
from lightning_zero.comm import Comm
from lightning_zero.lazy import Stored, materialize


@final
class CheckpointKeeper:
    """Saves, links and removes checkpoints of one run, and holds on to the one that it was resumed from.

    Args:
        comm: all ranks.
        in_background: see `Saver`.
        warn: called with what the user should know.
    """

    def __init__(self, comm: Comm, *, in_background: bool, warn: Callable[[str], None]) -> None:
        self._comm = comm
        self._warn = warn
        self.saver = Saver(comm.board, in_background=in_background, warn=warn)
        self._latest: tuple[Folder, int] | None = None  # and the step it was saved at
        self._resumed: StoredCheckpoint | None = None
        self.stored: dict[Parameter, Stored] = {}  # of the resumed one: what each parameter is to be

    # -- saving

    def save(self, tree: dict[str, Any], path: str, step: int, about: dict[str, Any]) -> None:
        """See `Saver.save`."""
        self.saver.save(tree, path, {"step": step, **about})
        self._latest = (Folder(path), step)

    def link_latest(self, path: str, step: int) -> bool:
        """Makes `path` a link to the latest checkpoint, if that was saved beside it at this very step. Call it on every
        rank: all of them hear when it fails."""
        link = Folder(path)
        if self._latest is None or not link.is_local:
            return False
        latest, saved_at = self._latest
        if saved_at != step or latest.path == link.path or str(latest.parent) != str(link.parent):
            return False
        is_first = self._comm.rank == 0
        self.saver.together("link", lambda: self.saver.link(link, latest) if is_first else None)
        return True

    def remove(self, path: str) -> None:
        """Removes a checkpoint. Links that showed it show the latest one from now on. Call it on rank 0."""
        folder = Folder(path)
        target = Path(folder.path)
        if folder.is_local and not target.is_symlink() and target.is_dir():
            links = [entry for entry in target.parent.iterdir() if entry.is_symlink()]
            for link in links:
                if (link.parent / link.readlink()) != target:
                    continue
                if self._latest is not None and self._latest[0].path != folder.path:
                    self.saver.link(Folder(link), self._latest[0])
                else:
                    self.saver.remove(Folder(link))
        self.saver.remove(folder)

    # -- going on from one

    def open(self, path: str, *, lazy: Collection[str], objects: bool) -> dict[str, Any] | None:
        """What was saved to the folder `path`; None for a file that is not of a sharded checkpoint.

        Args:
            path: of the folder.
            lazy: the entries whose tensors are to be read when they are needed, range by range.
            objects: see `StoredCheckpoint.tree`.

        Raises:
            CheckpointError: for a folder, or a file in one, that is not the checkpoint itself.
        """
        self.saver.wait()  # it may be the one that is being written
        folder = Folder(path)
        if folder.fs.isfile(folder.path) and not folder.parent.is_checkpoint:
            return None
        if not folder.fs.exists(folder.path):
            raise CheckpointError(f"ckpt_path={path!r} is not there.")
        self.close()
        self._resumed = StoredCheckpoint(path)
        tree = self._resumed.tree(objects=objects)
        if self._resumed.left_out:
            self._warn(
                f"The checkpoint holds pickled objects that were not read ({', '.join(self._resumed.left_out)}). If "
                "you trust it, pass weights_only=False."
            )
        return {key: value if key in lazy else materialize(value) for key, value in tree.items()}

    def receive(self, parameter: Parameter, source: Stored) -> None:
        """Notes what a parameter is to be."""
        self.stored[parameter] = source

    def take_stored(self) -> dict[Parameter, Stored]:
        """What was noted since; each is to be read once."""
        stored, self.stored = self.stored, {}
        return stored

    def verify_rest(self) -> None:
        """See `StoredCheckpoint.verify_rest`; each rank its share."""
        if self._resumed is not None:
            self._resumed.verify_rest(self._comm.rank, self._comm.size)

    @property
    def bytes_read(self) -> int:
        """By this rank, of the checkpoint that it was resumed from."""
        return 0 if self._resumed is None else self._resumed.reader.bytes_read

    def close(self) -> None:
        """Lets go of the files of the resumed checkpoint."""
        if self._resumed is not None:
            self._resumed.close()
