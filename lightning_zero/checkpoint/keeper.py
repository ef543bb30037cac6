"""`CheckpointKeeper`: the checkpoints of one run: the latest one, the links to it, and the one it was resumed from."""

import itertools
import zlib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, final

from torch.nn import Module

from lightning_zero.checkpoint.folder import CheckpointError, CheckpointNotFoundError, Folder
from lightning_zero.checkpoint.load import StoredCheckpoint
from lightning_zero.checkpoint.save import Saver
from lightning_zero.checkpoint.single import is_single_file, problems_in
from lightning_zero.wire.board import Record
from lightning_zero.wire.comm import Comm

_END_BYTES = 65536  # of a single file, which tell it from other files


@final
class CheckpointKeeper:
    """Saves, links and removes the checkpoints of one run, and keeps open the one that it was resumed from.

    Args:
        comm: all ranks.
        in_background, may_end: see `Saver`.
        warn: called with messages for the user.
    """

    def __init__(self, comm: Comm, *, in_background: bool, may_end: bool = False, warn: Callable[[str], None]) -> None:
        self._comm = comm
        self._warn = warn
        self.saver = Saver(comm.board, in_background=in_background, may_end=may_end, warn=warn)
        self._latest: tuple[Folder, int] | None = None  # and the step it was saved at
        self._links: set[str] = set()  # paths of links that this object made
        self._resumed: StoredCheckpoint | None = None

    # -- saving

    def save(self, tree: dict[str, Any], path: str, step: int, about: dict[str, Any]) -> None:
        """Saves a checkpoint; see `Saver.save`."""
        self.saver.save(tree, path, {"step": step, **about})
        self._latest = (Folder(path), step)

    def note(self, path: str, step: int) -> None:
        """Notes that a single file was saved, which is the latest checkpoint now."""
        self._latest = (Folder(path), step)

    def is_latest(self, path: str) -> bool:
        return self._latest is not None and self._latest[0] == Folder(path)

    @property
    def latest_complete(self) -> str | None:
        """The checkpoint that was saved last, if it is complete; one that is saved in the background may not be yet."""
        if self._latest is None or not (self._latest[0].is_checkpoint or self._latest[0].is_file):
            return None
        return str(self._latest[0])

    def link_latest(self, path: str, saved: str, step: int) -> bool:
        """Makes `path` a link to the checkpoint `saved`, and returns True, if that is the latest one, was saved beside
        it at this step, and the file system has links. Call it on every rank: all of them raise what fails on one."""
        link, latest = Folder(path), Folder(saved)
        is_beside = link.is_local and latest != link and latest.parent == link.parent
        if not is_beside or self._latest != (latest, step):
            return False

        def make() -> Record:
            self.saver.wait()
            # The checkpoint is missing if the save in the background failed.
            if can_be_made := not self._comm.rank and latest.is_checkpoint and link.can_be_link:
                self.saver.link(link, latest)
            return {"made": can_be_made}

        made = bool(self.saver.together("link a checkpoint", make)["made"])
        if made:
            self._links.add(link.path)
        return made

    def remove(self, path: str) -> None:
        """Removes a checkpoint, and moves its links that this object made to the latest one. Call it on every rank."""
        folder = Folder(path)
        if self.is_latest(path):
            self._latest = None
        if self._comm.rank:
            return
        self._links.discard(folder.path)
        for link in map(Path, self._links):
            if link.is_symlink() and link.parent / link.readlink() == Path(folder.path):
                if self._latest is not None:
                    self.saver.move_link(Folder(link), self._latest[0])
                else:
                    self.saver.remove(Folder(link))
        self.saver.remove(folder)

    # -- resuming

    def open(self, path: str, *, lazy: Collection[str], objects: bool) -> dict[str, Any] | None:
        """Returns what was saved to the folder `path`; None when that is a single file. Call it on every rank.

        Args:
            path: of a folder or file.
            lazy: the entries whose tensors are to be read when they are needed.
            objects: see `StoredCheckpoint.tree`.

        Raises:
            CheckpointNotFoundError: on every rank the same, when one finds nothing there.
            CheckpointError: on every rank the same, when `path` is a folder that is no checkpoint, or a file of one, or
                when ranks find different checkpoints.
        """
        self.close_resumed()
        found = self.saver.together("resume", partial(self._look_at, path), _refuse_different)
        if "absent" in found:
            raise CheckpointNotFoundError(found["absent"])
        if (resumed := self._resumed) is None:
            return None
        read: dict[str, Any] = {}

        def read_all() -> None:
            read.update(resumed.tree(objects=objects, lazy=lazy))

        self.saver.together("read a checkpoint", read_all)
        if resumed.told_left_out:
            self._warn(resumed.told_left_out)
        return read

    def _look_at(self, path: str) -> Record:
        """Opens the checkpoint. Returns where it is, and what tells it from all others, or None if nothing is there."""
        self.saver.wait()  # this checkpoint may be under way
        folder = Folder(path)
        if is_single_file(folder):
            problems = problems_in(folder, self._comm.rank, self._comm.size)
            return {"path": str(folder), "is": _fingerprint(folder), "problems": problems}
        if not folder.exists:
            return {"path": path, "is": None}
        self._resumed = StoredCheckpoint(path)
        return {"path": str(folder), "is": [file.name for file in self._resumed.manifest.files[:1]]}

    def reading_together(self, module: Module) -> AbstractContextManager[None]:
        """See `StoredCheckpoint.reading_together`. Does nothing without a resumed checkpoint."""
        return nullcontext() if self._resumed is None else self._resumed.reading_together(module, self._comm)

    def verify_rest(self) -> None:
        """Verifies this rank's share of what it has not read of the resumed checkpoint, if there is one."""
        if self._resumed is not None:
            self._resumed.verify_rest(self._comm.rank, self._comm.size)

    def close_resumed(self) -> None:
        if self._resumed is not None:
            self._resumed.close()
            self._resumed = None


def _fingerprint(file: Folder) -> list[int]:
    """Returns the size of a single file, and a checksum of its end, where torch's files have those of all records."""
    size = file.fs.size(file.path)
    if size is None:  # a zero:// file, which is made when it is opened
        return []
    with file.fs.open(file.path, "rb") as stream:
        stream.seek(max(0, size - _END_BYTES))
        return [size, zlib.crc32(stream.read())]


def _refuse_different(records: list[Record]) -> Record:
    """Raises CheckpointError when ranks found different checkpoints, as they would train a mixture of two models; or
    damage in a single file, of which each has verified a share."""
    absent = [rank for rank, record in enumerate(records) if record["is"] is None]
    if absent:
        told = f"Checkpoint file not found: {records[absent[0]]['path']}"  # Lightning's own words, which users look for
        if len(absent) < len(records):
            told += f". It is missing on ranks {absent} alone: resume from a file system that all ranks share."
        return {"absent": told}
    for problem in itertools.chain(*(record.get("problems", ()) for record in records)):
        raise CheckpointError(f"ckpt_path={records[0]['path']!r} is not a Lightning checkpoint: {problem}")
    for rank, record in enumerate(records):
        if record["is"] != records[0]["is"]:
            raise CheckpointError(
                f"ranks would go on from different checkpoints: rank 0 from {records[0]['path']}, rank {rank} from "
                f"{record['path']}, which is not the same. Save to, and resume from, a file system that all share."
            )
    return {}
