"""`Draft`: a checkpoint while it is written. It replaces the old one in one step: a kill at any moment leaves either.

On local disks the draft is a hidden folder beside DIR, and one rename makes it the checkpoint. If DIR already holds a
checkpoint, the new files (whose names differ in every save) are moved there, and the step is to replace the manifest.
Object stores have no rename: files are written to their final place, and the step is to write the manifest.
"""

import contextlib
import fcntl
import io
import os
import posixpath
import shutil
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
    writing,
)

_ABSENT = ". Rank 0 made its folder: save to a file system that all machines share"


@final
class Stream:
    """A file of a draft. `write` writes all of its argument; `sync` waits until the disk has it."""

    SYNC_BYTES = 1 << 28  # at most so many bytes wait for the disk, so that the last sync is short

    def __init__(self, raw: Any, path: str, *, has_disk: bool) -> None:
        self.name = posixpath.basename(path)
        self._raw, self._path, self._has_disk = raw, path, has_disk
        self._unsynced = 0  # bytes

    def write(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
        with writing(self._path, _ABSENT):
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
            with writing(self._path, _ABSENT):
                os.fsync(self._raw.fileno())
        self._unsynced = 0


class InDoubtError(CheckpointError):
    """It is unknown whether a checkpoint was replaced."""


class Draft(ABC):
    """A checkpoint while it is written. Rank 0 calls `claim`, every rank may then `create` files, and rank 0 may
    `commit` them. In the end it calls `close`."""

    def __init__(self, folder: Folder, token: str) -> None:
        self.folder = folder
        self.written = folder  # where the files are before `commit`
        self.token = token  # eight hexadecimal digits in the names of all its files, and of no other checkpoint's
        self.is_committed = False
        self._superfluous: list[str] = []  # files that `close` removes, when no rank waits for rank 0

    @staticmethod
    def of(folder: Folder, token: str) -> "Draft":
        return LocalDraft(folder, token) if folder.is_local else UploadedDraft(folder, token)

    def claim(self) -> None:
        """Claims the place for new files. Raises CheckpointError when something else than a checkpoint is there, when
        it is inside of another one, or when another job writes there; then there is nothing to close."""
        folder = self.folder
        if folder.is_file:
            raise CheckpointError(
                f"{folder} is a file, and a sharded checkpoint is a folder. Remove it, choose another path, or write "
                "single files: ZeroStrategy(checkpoint=Checkpoint(format='full'))."
            )
        try:
            folder.parent.refuse_inside_checkpoint()
            folder.refuse_other_folder()
            self._claim()
        except OSError as error:
            raise CheckpointError(f"cannot write to {folder.parent}: {error}") from error

    @abstractmethod
    def _claim(self) -> None:
        """Does `claim` once the place is known to be free."""

    @contextmanager
    def create(self, name: str) -> Iterator[Stream]:
        """Opens a new file, which is complete when the context ends."""
        path = posixpath.join(self.written.path, name)
        with writing(path, _ABSENT):
            raw = io.FileIO(path, "w") if self.folder.is_local else self.folder.fs.open(path, "wb")
        stream = Stream(raw, path, has_disk=self.folder.is_local)
        try:
            yield stream
            stream.sync()
        finally:
            with writing(path, _ABSENT):
                raw.close()

    def commit(self, manifest: bytes) -> str | None:
        """Makes the files the checkpoint, in one step.

        Returns:
            None, or what went wrong after that step, when the new checkpoint is in its place.

        Raises:
            InDoubtError: when either the old checkpoint or the new one is there, whole.
            Exception: what went wrong before that step, when everything is as it was.
        """
        with self.create(README) as stream:
            stream.write(README_TEXT)
        old = self._commit(manifest)
        self.is_committed = True
        try:
            if self.folder.is_local:
                sync_names(Path(self.folder.path))
                sync_names(Path(self.folder.path).parent)
        except OSError as error:  # a loss of power may undo the step, so the old files must stay
            return f"the disk does not confirm that it will last ({error})"
        self._superfluous = old
        return None

    @abstractmethod
    def _commit(self, manifest: bytes) -> list[str]:
        """Does the step. Returns the names of files that it made superfluous."""

    @contextmanager
    def _committing(self, manifest: bytes, undo: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Surrounds the step. Ignores an error if the step was done all the same: network file systems may report that
        what they did has failed. Otherwise calls `undo`, and raises the error.

        Raises:
            InDoubtError: when it is unknown whether the step was done. Then nothing may be removed.
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
        """Removes all files that are not part of the checkpoint. Never raises: no save fails because files are left."""
        self._remove(self._superfluous)
        self._clear_away()

    @abstractmethod
    def _clear_away(self) -> None:
        """Removes files that were not committed. Never raises."""


@final
class LocalDraft(Draft):
    """A draft on a disk: a hidden folder beside the place, until it is renamed."""

    def __init__(self, folder: Folder, token: str) -> None:
        super().__init__(folder, token)
        self._target = Path(folder.path)
        self._beside = hidden_beside(self._target, "saving")
        self.written = Folder(self._beside)
        self._lock = contextlib.ExitStack()

    @override
    def _claim(self) -> None:
        self._target.parent.mkdir(parents=True, exist_ok=True)
        with self._acquire() as lock:
            shutil.rmtree(self._beside, ignore_errors=True)  # left by a killed job: no other job is writing
            self._beside.mkdir()
            self._lock = lock.pop_all()

    def _acquire(self) -> contextlib.ExitStack:
        """Locks a lock file until the returned stack is closed. The system unlocks it when this process dies."""
        path = hidden_beside(self._target, "lock")
        while True:
            with contextlib.ExitStack() as unless_held:
                lock = unless_held.enter_context(path.open("a"))
                if self._holds(lock):
                    unless_held.callback(_unlink, path)  # before it is closed
                    return unless_held.pop_all()

    def _holds(self, lock: IO[Any]) -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            told = f"another job is saving to {self.folder} at this moment. Give each job a path of its own."
            raise CheckpointError(told) from None
        except OSError:  # a file system without locks
            return True
        with contextlib.suppress(FileNotFoundError):  # its last holder removed it in between
            return os.fstat(lock.fileno()).st_ino == Path(lock.name).stat().st_ino
        return False

    @override
    def _commit(self, manifest: bytes) -> list[str]:
        with self.create(MANIFEST) as stream:
            stream.write(manifest)
        sync_names(self._beside)
        # The checkpoint that a link points to is another one, and stays: the link is replaced.
        joins = not self._target.is_symlink() and self.folder.is_checkpoint
        return self._join(manifest) if joins else self._rename(manifest)

    def _join(self, manifest: bytes) -> list[str]:
        """Moves the new files beside the old ones, then replaces the manifest."""
        # What others have put there since `claim` stays.
        old = [name for name in self.folder.names() if OURS.fullmatch(name) and name not in (MANIFEST, README)]
        new = [path.name for path in self._beside.iterdir() if path.name not in (MANIFEST, README)]
        with self._committing(manifest, undo=lambda: self._remove(new)):
            for name in (*new, README):
                (self._beside / name).rename(self._target / name)
            sync_names(self._target)
            (self._beside / MANIFEST).replace(self._target / MANIFEST)
        with contextlib.suppress(OSError):
            self._beside.rmdir()
        return old

    def _rename(self, manifest: bytes) -> list[str]:
        """Renames the new folder, in the place of nothing, an empty folder or a link."""
        linked = self._target.readlink() if self._target.is_symlink() else None

        def link_again() -> None:
            if linked is not None and not self._target.is_symlink():
                self._target.symlink_to(linked)

        with self._committing(manifest, undo=link_again):
            if linked is not None:
                self._target.unlink()  # its target stays
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
    """A draft on an object store: files in their final place, where they are no checkpoint without the manifest."""

    @override
    def _claim(self) -> None:
        self.folder.fs.makedirs(self.folder.path, exist_ok=True)

    @override
    def _commit(self, manifest: bytes) -> list[str]:
        old = [name for name in self.folder.names() if OURS.fullmatch(name)]  # also those of killed saves
        with self._committing(manifest):
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
