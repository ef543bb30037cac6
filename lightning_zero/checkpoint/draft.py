"""How a checkpoint comes to be there all at once or never: a kill at any moment leaves the old one or the new one.

A `Draft` is the checkpoint while it is written. On local disks that is a hidden folder beside DIR, and one rename makes
it the checkpoint. Where DIR holds one already, the new files (every save has names of its own) join it, and replacing
the manifest is the one step that counts. Object stores have no rename: files go to their place at once, and the
manifest is what counts there too.
"""

import contextlib
import io
import os
import posixpath
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, final

from typing_extensions import override

from lightning_zero.checkpoint.folder import (
    MANIFEST,
    OURS,
    README,
    README_TEXT,
    CheckpointError,
    Folder,
    hidden_beside,
    sync_names,
)

if sys.platform != "win32":  # there, two jobs that save to one path are not told apart
    import fcntl


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Errors of the system inside say which file they are about; those of an open file do not by themselves."""
    try:
        yield
    except OSError as error:
        hint = ""
        if isinstance(error, FileNotFoundError):
            hint = ". Rank 0 made its folder: save to a file system that all machines share"
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}{hint}") from error


@final
class Stream:
    """A file of a draft. `write` takes all it is given; `sync` makes sure that the disk has it."""

    SYNC_BYTES = 1 << 28  # let no more than this wait for the disk, so that the last sync is short

    def __init__(self, raw: Any, path: str, *, has_disk: bool) -> None:
        self.name = posixpath.basename(path)
        self._raw, self._path, self._has_disk = raw, path, has_disk
        self._unsynced = 0  # bytes

    def write(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
        with _naming(self._path):
            while rest:
                written = self._raw.write(rest)
                if not written:
                    raise OSError(f"wrote nothing of {len(rest)} bytes")
                self._unsynced += written
                rest = rest[written:]
        if self._unsynced >= self.SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        if self._has_disk:
            with _naming(self._path):
                os.fsync(self._raw.fileno())
        self._unsynced = 0


class InDoubtError(CheckpointError):
    """Whether a checkpoint was replaced cannot be told."""


class Draft(ABC):
    """A checkpoint while it is written. Rank 0 calls `begin`, then every rank may `create` files; rank 0 may `commit`
    them, and calls `close` at last."""

    def __init__(self, folder: Folder, token: str) -> None:
        self.folder = folder
        self.written = folder  # where the files are before `commit`
        self.token = token  # eight hexadecimal digits, in the names of all its files and of no other checkpoint's
        self.is_committed = False
        self._superfluous: list[str] = []  # names of files that go at last, when no rank waits for it any more

    @staticmethod
    def of(folder: Folder, token: str) -> "Draft":
        return LocalDraft(folder, token) if folder.is_local else UploadedDraft(folder, token)

    def begin(self) -> None:
        """Raises CheckpointError when something else than a checkpoint is in the place, or another job writes there;
        then there is nothing to close."""
        folder = self.folder
        if folder.is_file:
            raise CheckpointError(
                f"{folder} is a file, and a sharded checkpoint is a folder. Remove it, choose another path, or write "
                "single files: ZeroStrategy(checkpoint=Checkpoint(format='full'))."
            )
        try:
            folder.refuse_other_folder()
            self._begin()
        except OSError as error:
            raise CheckpointError(f"cannot write to {folder.parent}: {error}") from error

    @abstractmethod
    def _begin(self) -> None:
        """The place is free: makes what files are to be written into."""

    @contextmanager
    def create(self, name: str) -> Iterator[Stream]:
        """A new file, complete when the context ends."""
        path = posixpath.join(self.written.path, name)
        with _naming(path):
            raw = io.FileIO(path, "w") if self.folder.is_local else self.folder.fs.open(path, "wb")
        stream = Stream(raw, path, has_disk=self.folder.is_local)
        try:
            yield stream
            stream.sync()
        finally:
            with _naming(path):
                raw.close()

    def commit(self, manifest: bytes) -> str | None:
        """The files become the checkpoint, in one step.

        Returns:
            None, or what went wrong after that step: the new checkpoint is in its place all the same.

        Raises:
            InDoubtError: what is there is the old checkpoint or the new one, whole.
            Exception: what went wrong before that step: everything is as it was.
        """
        with self.create(README) as stream:
            stream.write(README_TEXT)
        old = self._replace(manifest)
        self.is_committed = True
        try:
            if self.folder.is_local:
                sync_names(Path(self.folder.path))
                sync_names(Path(self.folder.path).parent)
        except OSError as error:  # the step may be lost with the power: what it would come back to must stay
            return f"the disk does not confirm that it will last ({error})"
        self._superfluous = old
        return None

    @abstractmethod
    def _replace(self, manifest: bytes) -> list[str]:
        """The step. Returns the names of files that it made superfluous."""

    @contextmanager
    def _step(self, manifest: bytes, undo: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Inside, the step is done. What fails there is no failure if the step was done although the system said that
        it failed, as network file systems may; otherwise `undo` is called.

        Raises:
            InDoubtError: when that cannot be told. Then nothing may be cleared away.
        """
        try:
            yield
        except Exception:
            try:
                is_done = self.folder.read(MANIFEST) == manifest
            except (FileNotFoundError, NotADirectoryError):
                is_done = False
            except Exception as error:
                raise InDoubtError(f"the last step failed, and whether it was done cannot be told: {error}") from error
            if not is_done:
                undo()
                raise

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(Exception):  # the next save to this place tries again
                self.folder.fs.rm_file(self.folder.file(name))

    def close(self) -> None:
        """Nothing remains but what was committed. Never raises: no save fails for what it leaves behind."""
        self._remove(self._superfluous)
        self._clear_away()

    @abstractmethod
    def _clear_away(self) -> None:
        """Takes away what was not committed; never raises."""


@final
class LocalDraft(Draft):
    """On a disk: a hidden folder beside the place, until a rename."""

    def __init__(self, folder: Folder, token: str) -> None:
        super().__init__(folder, token)
        self._target = Path(folder.path)
        self._beside = hidden_beside(self._target, "saving")
        self.written = Folder(self._beside)
        self._lock = contextlib.ExitStack()

    @override
    def _begin(self) -> None:
        self._target.parent.mkdir(parents=True, exist_ok=True)
        with self._acquire() as lock:
            shutil.rmtree(self._beside, ignore_errors=True)  # what a killed job left: nobody else is writing
            self._beside.mkdir()
            self._lock = lock.pop_all()

    def _acquire(self) -> contextlib.ExitStack:
        """Holds a lock file, until what this returns is closed; the system lets go of it when this process dies."""
        path = hidden_beside(self._target, "lock")
        while True:
            with contextlib.ExitStack() as unless_held:
                lock = unless_held.enter_context(path.open("a"))
                if self._holds(lock):
                    unless_held.callback(_unlink, path)  # before it is closed
                    return unless_held.pop_all()

    def _holds(self, lock: IO[Any]) -> bool:
        if sys.platform == "win32":
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            told = f"another job is saving to {self.folder} at this moment. Give each job a path of its own."
            raise CheckpointError(told) from None
        except OSError:  # a file system without locks
            return True
        with contextlib.suppress(FileNotFoundError):  # its last holder took it away in between
            return os.fstat(lock.fileno()).st_ino == Path(lock.name).stat().st_ino
        return False

    @override
    def _replace(self, manifest: bytes) -> list[str]:
        with self.create(MANIFEST) as stream:
            stream.write(manifest)
        sync_names(self._beside)
        # A checkpoint that a link shows is another one, and stays: the link is replaced.
        joins = not self._target.is_symlink() and self.folder.is_checkpoint
        return self._join(manifest) if joins else self._rename(manifest)

    def _join(self, manifest: bytes) -> list[str]:
        """The new files join the old ones; then the manifest changes over."""
        old = [name for name in self.folder.names() if name not in (MANIFEST, README)]
        new = [path.name for path in self._beside.iterdir() if path.name not in (MANIFEST, README)]
        with self._step(manifest, undo=lambda: self._remove(new)):
            for name in (*new, README):
                (self._beside / name).rename(self._target / name)
            sync_names(self._target)
            (self._beside / MANIFEST).replace(self._target / MANIFEST)
        with contextlib.suppress(OSError):
            self._beside.rmdir()
        return old

    def _rename(self, manifest: bytes) -> list[str]:
        """The new folder takes the place of nothing, of an empty folder or of a link."""
        shown = self._target.readlink() if self._target.is_symlink() else None

        def show_again() -> None:
            if shown is not None and not self._target.is_symlink():
                self._target.symlink_to(shown)

        with self._step(manifest, undo=show_again):
            if shown is not None:
                self._target.unlink()  # what it showed stays where it is
            self._beside.rename(self._target)
        return []

    @override
    def _clear_away(self) -> None:
        if not self.is_committed:
            shutil.rmtree(self._beside, ignore_errors=True)
        self._lock.close()


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@final
class UploadedDraft(Draft):
    """On an object store: files in their place, where nothing is a checkpoint without its manifest."""

    @override
    def _begin(self) -> None:
        self.folder.fs.makedirs(self.folder.path, exist_ok=True)

    @override
    def _replace(self, manifest: bytes) -> list[str]:
        old = [name for name in self.folder.names() if OURS.fullmatch(name)]  # those of killed saves, too
        with self._step(manifest):
            self.folder.fs.pipe_file(self.folder.file(MANIFEST), manifest)
        kept = manifest.decode()
        return [name for name in old if name != MANIFEST and name not in kept]

    @override
    def _clear_away(self) -> None:
        with contextlib.suppress(Exception):
            manifest = b""
            with contextlib.suppress(FileNotFoundError):
                manifest = self.folder.read(MANIFEST)
            if self.token not in manifest.decode():
                text = [] if manifest else [README]
                self._remove([name for name in self.folder.names() if f"-{self.token}." in name or name in text])
