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
import errno
import io
import os
import posixpath
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, final

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

if sys.platform != "win32":  # there, two jobs that save to one path are not told apart
    import fcntl

MANIFEST = "manifest.json"
_OURS = re.compile(
    r"shard-\d{5}-of-\d{5}-[0-9a-f]{8}\.(safetensors|crc32)|objects-[0-9a-f]{8}\.pt|manifest\.json"
    r"|\.nfs[0-9a-f]+"  # how NFS keeps what was deleted while somebody reads it
)
# What a file system answers that cannot make the names in a folder last: there is nothing more to be done there.
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)


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
        if not self.is_local:  # an object store knows files, not folders: there the manifest stands for its folder
            path = path.rstrip("/").removesuffix(f"/{MANIFEST}")
        self.path: str = str(Path(path).absolute()) if self.is_local else path

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
        with self._reading(name):
            return self.fs.open(self.file(name), "rb")

    def read(self, name: str) -> bytes:
        with self._reading(name), self.open(name) as stream:
            return stream.read()

    def size(self, name: str) -> int:
        self.fs.invalidate_cache(self.path)
        with self._reading(name):
            return int(self.fs.size(self.file(name)))

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """A disk that fails says which file it is about, as damage does; that a file is not there, who asks for it
        explains."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise
        except OSError as error:
            raise CheckpointError(f"cannot read {self.file(name)}: {error.strerror or error}") from error

    def refuse_other_folder(self) -> None:
        """Raises CheckpointError when this is a folder of something else than a checkpoint, which is not to be lost."""
        names = self.names()
        strange = [name for name in names if not _OURS.fullmatch(name)]
        has_shards = any(name.startswith("shard-") for name in names)
        # A killed save leaves shards without a manifest on an object store, and on no disk; a manifest.json without
        # shards belongs to some other program.
        is_ours = has_shards and (self.is_checkpoint or not self.is_local)
        if names and (strange or not is_ours):
            shown = ", ".join((strange or names)[:3])
            raise CheckpointError(
                f"{self} is a folder that is not a checkpoint (it holds {shown}). Choose another path, or empty it."
            )

    def remove(self) -> None:
        """Takes the checkpoint away: first from under its name, so that nobody finds half of one. A link only goes
        itself. Nothing happens where there is nothing."""
        if not self.is_local:
            if MANIFEST in (names := self.names()):
                self.fs.rm_file(self.file(MANIFEST))
            if files := [self.file(name) for name in names if name != MANIFEST]:
                self.fs.rm(files, recursive=True)
            with contextlib.suppress(FileNotFoundError):  # an object store has no folder to remove
                self.fs.rm(self.path, recursive=True)
            return
        path = Path(self.path)
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            going = path.with_name(f".{path.name}.deleting")
            shutil.rmtree(going, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):  # somebody was faster
                path.rename(going)
            shutil.rmtree(going, ignore_errors=True)
            for left in path.parent.glob(".*.deleting"):  # by jobs that were killed here; nobody else looks for them
                if all(_OURS.fullmatch(name) for name in Folder(left).names()):
                    shutil.rmtree(left, ignore_errors=True)

    def link_to(self, target: "Folder") -> None:
        """Makes this path a link to a checkpoint beside it, in one step, whatever link was there.

        Raises:
            CheckpointError: when it is a folder of something else than a checkpoint.
        """
        path = Path(self.path)
        if path.is_dir() and not path.is_symlink():
            self.refuse_other_folder()
            self.remove()
        coming = path.with_name(f".{path.name}.linking")
        coming.unlink(missing_ok=True)
        coming.symlink_to(os.path.relpath(target.path, path.parent))
        coming.replace(path)
        _sync(path.parent)


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


@final
class Draft:
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
        self._lock: IO[Any] | None = None
        self._target = Path(folder.path)
        self._beside = self._target.with_name(f".{self._target.name}.saving")

    @property
    def _where(self) -> str:
        return str(self._beside) if self.folder.is_local else self.folder.path

    def begin(self) -> None:
        """Raises CheckpointError when something else than a checkpoint is in the place, or another job writes there;
        then there is nothing to close."""
        folder = self.folder
        if folder.fs.isfile(folder.path):
            raise CheckpointError(
                f"{folder} is a file, and a sharded checkpoint is a folder. Remove it, choose another path, or write "
                "single files: ZeroStrategy(checkpoint=Checkpoint(format='full'))."
            )
        try:
            folder.refuse_other_folder()
            if not folder.is_local:
                folder.fs.makedirs(folder.path, exist_ok=True)
                return
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._acquire()
            shutil.rmtree(self._beside, ignore_errors=True)  # what a killed job left: nobody else is writing
            self._beside.mkdir()
        except OSError as error:
            self._release()
            raise CheckpointError(f"cannot write to {folder.parent}: {error}") from error

    def _acquire(self) -> IO[Any]:
        """Holds a lock file that the system lets go of when this process dies."""
        path = self._target.with_name(f".{self._target.name}.lock")
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

    @contextmanager
    def create(self, name: str) -> Iterator[Stream]:
        """A new file, on the disk when the context ends."""
        path = posixpath.join(self._where, name)
        with _naming(path):
            raw = io.FileIO(path, "w") if self.folder.is_local else self.folder.fs.open(path, "wb")
        stream = Stream(raw, path, has_disk=self.folder.is_local)
        try:
            yield stream
            stream.sync()
        finally:
            with _naming(path):
                raw.close()

    def written(self) -> Folder:
        """Where the files are before `commit`."""
        return Folder(self._where) if self.folder.is_local else self.folder

    def commit(self, manifest: bytes) -> str | None:
        """The files become the checkpoint, in one step.

        Returns:
            None, or what went wrong after that step: the new checkpoint is in its place all the same.

        Raises:
            Exception: what went wrong before that step: everything is as it was.
        """
        if not self.folder.is_local:
            self._commit_by_manifest(manifest)
            return None
        with self.create(MANIFEST) as stream:
            stream.write(manifest)
        _sync(self._beside)
        joins = self._is_folder and self.folder.is_checkpoint
        old = self._join(manifest) if joins else self._replace(manifest)
        self.is_committed = True
        try:
            _sync(self._target)
            _sync(self._target.parent)
        except OSError as error:  # the step may be lost with the power: the files that it would come back to must stay
            return f"the disk does not confirm that it will last ({error})"
        for name in old:
            with contextlib.suppress(OSError):  # the next save to this place tries again
                (self._target / name).unlink()
        return None

    @property
    def _is_folder(self) -> bool:
        """Whether there is one in the place itself: joining one that a link shows would replace another checkpoint."""
        try:
            return stat.S_ISDIR(self._target.lstat().st_mode)
        except FileNotFoundError:
            return False

    def _join(self, manifest: bytes) -> set[str]:
        """The new files join the old ones; then the manifest changes over. Returns the names of the old ones."""
        old = set(self.folder.names()) - {MANIFEST}
        new = [path.name for path in self._beside.iterdir() if path.name != MANIFEST]
        try:
            for name in new:
                (self._beside / name).rename(self._target / name)
            _sync(self._target)
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

    def _replace(self, manifest: bytes) -> set[str]:
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
        return set()

    def _is_in_place(self, manifest: bytes) -> bool:
        """Whether the step was done although the system said that it failed; network file systems may.

        Raises:
            OSError: when that cannot be told. Then nothing may be cleared away.
        """
        try:
            return self.folder.read(MANIFEST) == manifest
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _commit_by_manifest(self, manifest: bytes) -> None:
        fs = self.folder.fs
        old = [name for name in self.folder.names() if _OURS.fullmatch(name)]  # those of killed saves, too
        try:
            fs.pipe_file(self.folder.file(MANIFEST), manifest)
        except Exception:
            if not self._is_in_place(manifest):
                raise
        self.is_committed = True
        kept = manifest.decode()
        for name in old:
            if name != MANIFEST and name not in kept:
                with contextlib.suppress(Exception):  # the next save to this place tries again
                    fs.rm_file(self.folder.file(name))

    def close(self) -> None:
        """Nothing remains of it but what was committed. Never raises: no save fails for what it leaves behind."""
        if not self.folder.is_local:
            with contextlib.suppress(Exception):
                self._remove_uploaded()
            return
        if not self.is_committed:
            shutil.rmtree(self._beside, ignore_errors=True)
        self._release()

    def _remove_uploaded(self) -> None:
        try:
            manifest = self.folder.read(MANIFEST).decode()
        except FileNotFoundError:
            manifest = ""
        if self.token not in manifest:
            for name in self.folder.names():
                if f"-{self.token}." in name:
                    self.folder.fs.rm_file(self.folder.file(name))


def _sync(path: Path) -> None:
    """Makes the names inside a folder last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)
