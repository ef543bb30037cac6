"""Where a checkpoint lies, on any file system that fsspec knows, and how it comes to be there all at once or never.

    DIR/
      shard-00000-of-00002-5f3a9c1e.safetensors   what rank 0 wrote; opens with the safetensors library
      shard-00000-of-00002-5f3a9c1e.crc32         its checksums
      ...
      manifest.json                               written last: without it there is no checkpoint

A `Draft` is the checkpoint while it is written. On local disks that is a hidden folder beside DIR, and one rename makes
it the checkpoint. Where DIR holds one already, the new files (every save has names of its own) join it, and replacing
the manifest is the one step that counts. Object stores have no rename: files go to their place at once, and the
manifest is what counts there too. So a kill at any moment leaves the old checkpoint or the new one.
"""

import contextlib
import fcntl
import io
import os
import posixpath
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, final

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

MANIFEST = "manifest.json"
_OURS = re.compile(r"(shard-\d{5}-of-\d{5}-[0-9a-f]{8}\.(safetensors|crc32)|objects-[0-9a-f]{8}\.pt|manifest\.json)")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; says which file, and what to do."""


@final
class Folder:
    """A folder by its path or URL.

    Args:
        url: what fsspec understands: a path, ``memory://...``, ``s3://...``.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = str(url)
        self.fs, path = url_to_fs(self.url)
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.path: str = str(Path(path).absolute()) if self.is_local else path.rstrip("/")

    def __str__(self) -> str:
        return self.path if self.is_local else self.fs.unstrip_protocol(self.path)

    @property
    def is_checkpoint(self) -> bool:
        return bool(self.fs.isfile(self.file(MANIFEST)))

    def file(self, name: str) -> str:
        return posixpath.join(self.path, name)

    def inside(self, name: str) -> "Folder":
        return Folder(posixpath.join(str(self), name))

    @property
    def parent(self) -> "Folder":
        return Folder(posixpath.dirname(str(self)))

    def names(self) -> list[str]:
        """Of what is inside; nothing where there is no folder."""
        self.fs.invalidate_cache(self.path)
        try:
            found = self.fs.ls(self.path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(posixpath.basename(path.rstrip("/")) for path in found)

    def open(self, name: str) -> IO[bytes]:
        return self.fs.open(self.file(name), "rb")

    def read(self, name: str) -> bytes:
        with self.open(name) as stream:
            return stream.read()

    def size(self, name: str) -> int:
        self.fs.invalidate_cache(self.path)
        return int(self.fs.size(self.file(name)))

    def remove(self) -> None:
        """Takes the checkpoint away: first from under its name, so that nobody finds half of one. A link only goes
        itself. Nothing happens where there is nothing."""
        if not self.is_local:
            if self.fs.exists(self.path):
                with contextlib.suppress(FileNotFoundError):
                    self.fs.rm_file(self.file(MANIFEST))
                self.fs.rm(self.path, recursive=True)
            return
        path = Path(self.path)
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            going = path.with_name(f".{path.name}.deleting")
            shutil.rmtree(going, ignore_errors=True)  # of an earlier run that was killed
            path.rename(going)
            shutil.rmtree(going, ignore_errors=True)

    def link_to(self, target: "Folder") -> None:
        """Makes this path a link to a checkpoint beside it, in one step, whatever link was there."""
        path = Path(self.path)
        if path.is_dir() and not path.is_symlink():
            self.remove()
        coming = path.with_name(f".{path.name}.linking")
        coming.unlink(missing_ok=True)
        coming.symlink_to(os.path.relpath(target.path, path.parent))
        coming.replace(path)
        _sync(path.parent)


@final
class Stream:
    """A file of a draft. `write` takes all it is given; leaving the context makes sure that the disk has it."""

    SYNC_BYTES = 1 << 28  # let no more than this wait for the disk, so that the last sync is short

    def __init__(self, raw: Any, *, has_disk: bool) -> None:
        self._raw = raw
        self._has_disk = has_disk
        self._unsynced = 0

    def write(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
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
            os.fsync(self._raw.fileno())
        self._unsynced = 0


@final
class Draft:
    """A checkpoint while it is written. Rank 0 calls `begin`, then every rank may `create` files, and rank 0 ends it
    with `commit` or `discard`.

    Args:
        folder: where the checkpoint is to be.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._lock: IO[Any] | None = None
        self._target = Path(folder.path)
        self._beside = self._target.with_name(f".{self._target.name}.saving")

    @property
    def _where(self) -> str:
        return str(self._beside) if self.folder.is_local else self.folder.path

    def begin(self) -> None:
        """Raises CheckpointError when something else than a checkpoint is in the place, or another job writes there."""
        folder = self.folder
        if folder.fs.isfile(folder.path):
            raise CheckpointError(
                f"{folder} is a file, and a sharded checkpoint is a folder. Remove it, choose another path, or write "
                "single files: ZeroStrategy(checkpoint=Checkpoint(format='full'))."
            )
        strange = [name for name in folder.names() if not _OURS.fullmatch(name)]
        if strange or (folder.is_local and folder.names() and not folder.is_checkpoint):
            shown = ", ".join(strange[:3] or folder.names()[:3])
            raise CheckpointError(
                f"{folder} is a folder that is not a checkpoint (it holds {shown}). Choose another path, or empty it."
            )
        if not folder.is_local:
            folder.fs.makedirs(folder.path, exist_ok=True)
            return
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._acquire()
            shutil.rmtree(self._beside, ignore_errors=True)  # what a killed job left: nobody else is writing
            self._beside.mkdir()
        except PermissionError as error:
            raise CheckpointError(f"no permission to write to {self._target.parent}: {error.strerror}") from error

    def _acquire(self) -> IO[Any]:
        """Holds a lock file that the system lets go of when this process dies."""
        path = self._target.with_name(f".{self._target.name}.lock")
        while True:
            lock = path.open("a")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"another job is saving to {self.folder} at this moment. Give each job a path of its own."
                ) from None
            except OSError:
                return lock  # a file system without locks
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
                    return lock
            lock.close()  # its last holder took it away in between

    def _release(self) -> None:
        if self._lock is not None:
            Path(self._lock.name).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    @contextmanager
    def create(self, name: str) -> Iterator[Stream]:
        """A new file, on the disk when the context ends."""
        path = posixpath.join(self._where, name)
        if not self.folder.is_local:
            with self.folder.fs.open(path, "wb") as raw:
                yield Stream(raw, has_disk=False)
            return
        with io.FileIO(path, "w") as raw:
            stream = Stream(raw, has_disk=True)
            yield stream
            stream.sync()

    def written(self) -> Folder:
        """Where the files are before `commit`."""
        return Folder(self._where) if self.folder.is_local else self.folder

    def commit(self, manifest: bytes) -> None:
        """The files become the checkpoint."""
        if not self.folder.is_local:
            self._commit_by_manifest(manifest)
            return
        with self.create(MANIFEST) as stream:
            stream.write(manifest)
        _sync(self._beside)
        if self._target.is_symlink():
            self._target.unlink()  # it gives way to a checkpoint of this name; what it showed stays where it is
        if self.folder.is_checkpoint:
            self._join()
        else:
            self._beside.rename(self._target)
        _sync(self._target.parent)
        self._release()

    def _join(self) -> None:
        """The new files join the old ones; then the manifest changes over."""
        before, new = self.folder.names(), [path for path in self._beside.iterdir() if path.name != MANIFEST]
        for path in new:
            path.rename(self._target / path.name)
        _sync(self._target)
        (self._beside / MANIFEST).replace(self._target / MANIFEST)
        _sync(self._target)
        for name in set(before) - {MANIFEST}:
            (self._target / name).unlink()
        self._beside.rmdir()

    def _commit_by_manifest(self, manifest: bytes) -> None:
        fs = self.folder.fs
        before = self.folder.names() if self.folder.is_checkpoint else []
        kept = manifest.decode()
        fs.pipe_file(self.folder.file(MANIFEST), manifest)
        for name in before:
            if name != MANIFEST and name not in kept:
                fs.rm_file(self.folder.file(name))

    def discard(self) -> None:
        """Nothing of it remains; the checkpoint that was there before is untouched."""
        if self.folder.is_local:
            shutil.rmtree(self._beside, ignore_errors=True)
            self._release()


def _sync(path: Path) -> None:
    """Makes the names inside a folder last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
