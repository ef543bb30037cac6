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
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, final

from typing_extensions import override

from lightning_zero.checkpoint.folder import MANIFEST, OURS, CheckpointError, Folder, hidden_beside, sync_names

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
        self._raw = raw
        self._path = path
        self._has_disk = has_disk
        self._unsynced = 0

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
    them, and calls `close` at last.

    Args:
        folder: where the checkpoint is to be.
        token: eight hexadecimal digits, in the names of all its files and of no other checkpoint's.
    """

    def __init__(self, folder: Folder, token: str) -> None:
        self.folder = folder
        self.token = token
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
            raw = self._open(path)
        stream = Stream(raw, path, has_disk=self.folder.is_local)
        try:
            yield stream
            stream.sync()
        finally:
            with _naming(path):
                raw.close()

    @abstractmethod
    def _open(self, path: str) -> IO[bytes]:
        """An empty file to write to."""

    @property
    @abstractmethod
    def written(self) -> Folder:
        """Where the files are before `commit`."""

    def commit(self, manifest: bytes) -> str | None:
        """The files become the checkpoint, in one step.

        Returns:
            None, or what went wrong after that step: the new checkpoint is in its place all the same.

        Raises:
            InDoubtError: what is there is the old checkpoint or the new one, whole.
            Exception: what went wrong before that step: everything is as it was.
        """
        old = self._replace(manifest)
        self.is_committed = True
        doubt = self._confirm()
        if doubt is None:
            self._superfluous = old
        return doubt

    @abstractmethod
    def _replace(self, manifest: bytes) -> list[str]:
        """The step. Returns the names of files that it made superfluous."""

    def _confirm(self) -> str | None:
        """Why the step may be lost with the power: then the files that it would come back to must stay."""
        return None

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
        """Never raises."""

    def _is_in_place(self, manifest: bytes) -> bool:
        """Whether the step was done although the system said that it failed; network file systems may.

        Raises:
            InDoubtError: when that cannot be told. Then nothing may be cleared away.
        """
        try:
            return self.folder.read(MANIFEST) == manifest
        except (FileNotFoundError, NotADirectoryError):
            return False
        except Exception as error:
            raise InDoubtError(f"the last step failed, and whether it was done cannot be told: {error}") from error


@final
class LocalDraft(Draft):
    """On a disk: a hidden folder beside the place, until a rename."""

    def __init__(self, folder: Folder, token: str) -> None:
        super().__init__(folder, token)
        self._target = Path(folder.path)
        self._beside = hidden_beside(self._target, "saving")
        self._lock: IO[Any] | None = None

    @override
    def _begin(self) -> None:
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._acquire()
            shutil.rmtree(self._beside, ignore_errors=True)  # what a killed job left: nobody else is writing
            self._beside.mkdir()
        except OSError:
            self._release()
            raise

    def _acquire(self) -> IO[Any]:
        """Holds a lock file that the system lets go of when this process dies."""
        path = hidden_beside(self._target, "lock")
        while True:
            with contextlib.ExitStack() as unless_held:
                lock = unless_held.enter_context(path.open("a"))
                if sys.platform == "win32":
                    unless_held.pop_all()
                    return lock
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise CheckpointError(
                        f"another job is saving to {self.folder} at this moment. Give each job a path of its own."
                    ) from None
                except OSError:  # a file system without locks
                    unless_held.pop_all()
                    return lock
                with contextlib.suppress(FileNotFoundError):  # its last holder took it away in between
                    if os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
                        unless_held.pop_all()
                        return lock

    def _release(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                Path(self._lock.name).unlink()
            self._lock.close()
            self._lock = None

    @override
    def _open(self, path: str) -> IO[bytes]:
        return io.FileIO(path, "w")

    @property
    @override
    def written(self) -> Folder:
        return Folder(self._beside)

    @override
    def _replace(self, manifest: bytes) -> list[str]:
        with self.create(MANIFEST) as stream:
            stream.write(manifest)
        sync_names(self._beside)
        joins = self._is_folder and self.folder.is_checkpoint
        return self._join(manifest) if joins else self._rename(manifest)

    @property
    def _is_folder(self) -> bool:
        """Whether there is one in the place itself: joining one that a link shows would replace another checkpoint."""
        try:
            return stat.S_ISDIR(self._target.lstat().st_mode)
        except FileNotFoundError:
            return False

    def _join(self, manifest: bytes) -> list[str]:
        """The new files join the old ones; then the manifest changes over."""
        old = [name for name in self.folder.names() if name != MANIFEST]
        new = [path.name for path in self._beside.iterdir() if path.name != MANIFEST]
        try:
            for name in new:
                (self._beside / name).rename(self._target / name)
            sync_names(self._target)
            (self._beside / MANIFEST).replace(self._target / MANIFEST)
        except OSError:
            if not self._is_in_place(manifest):
                for name in new:
                    with contextlib.suppress(OSError):
                        (self._target / name).unlink()
                raise
        with contextlib.suppress(OSError):
            self._beside.rmdir()
        return old

    def _rename(self, manifest: bytes) -> list[str]:
        """The new folder takes the place of nothing, of an empty folder or of a link."""
        shown = self._target.readlink() if self._target.is_symlink() else None
        try:
            if shown is not None:
                self._target.unlink()  # what it showed stays where it is
            self._beside.rename(self._target)
        except OSError:
            if not self._is_in_place(manifest):
                if shown is not None and not self._target.is_symlink():
                    self._target.symlink_to(shown)
                raise
        return []

    @override
    def _confirm(self) -> str | None:
        try:
            sync_names(self._target)
            sync_names(self._target.parent)
        except OSError as error:
            return f"the disk does not confirm that it will last ({error})"
        return None

    @override
    def _clear_away(self) -> None:
        if not self.is_committed:
            shutil.rmtree(self._beside, ignore_errors=True)
        self._release()


@final
class UploadedDraft(Draft):
    """On an object store: files in their place, where nothing is a checkpoint without its manifest."""

    @override
    def _begin(self) -> None:
        self.folder.fs.makedirs(self.folder.path, exist_ok=True)

    @override
    def _open(self, path: str) -> IO[bytes]:
        return self.folder.fs.open(path, "wb")

    @property
    @override
    def written(self) -> Folder:
        return self.folder

    @override
    def _replace(self, manifest: bytes) -> list[str]:
        old = [name for name in self.folder.names() if OURS.fullmatch(name)]  # those of killed saves, too
        try:
            self.folder.fs.pipe_file(self.folder.file(MANIFEST), manifest)
        except Exception:
            if not self._is_in_place(manifest):
                raise
        kept = manifest.decode()
        return [name for name in old if name != MANIFEST and name not in kept]

    @override
    def _clear_away(self) -> None:
        with contextlib.suppress(Exception):
            if not self._has_manifest:
                self._remove([name for name in self.folder.names() if f"-{self.token}." in name])

    @property
    def _has_manifest(self) -> bool:
        try:
            return self.token in self.folder.read(MANIFEST).decode()
        except FileNotFoundError:
            return False
