"""`Folder`: the folder of a checkpoint, on any file system that fsspec supports.

DIR/
  shard-00000-of-00002-5f3a9c1e.safetensors   the pieces of rank 0; the safetensors library opens it
  shard-00000-of-00002-5f3a9c1e.crc32         its checksums
  ...
  README.txt                                  says what the folder is
  manifest.json                               written last: without it there is no checkpoint
"""

import contextlib
import errno
import os
import posixpath
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, final

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

MANIFEST = "manifest.json"
README = "README.txt"
README_TEXT = b"""\
This folder is one checkpoint of lightning_zero, ZeRO for PyTorch Lightning. Keep its files together.

manifest.json         what is inside and where, as JSON; without it there is no checkpoint
shard-*.safetensors   tensors: each rank wrote the parts that it owned. Any safetensors library opens these
                      files; the manifest says which parts make a tensor, and the commands below join them
shard-*.crc32         checksums of the shards
objects-*.pt          where there is one: objects that had to be pickled, read only with weights_only=False

It is complete, and depends on no number of ranks, stage or strategy. After `pip install lightning-zero`:

    trainer.fit(model, ckpt_path="this folder")               go on training, optimizer and all
    MyModule.load_from_checkpoint("this folder")              one process; import lightning_zero first
    lightning-zero inspect DIR                                parameters, shapes, dtypes, sizes
    lightning-zero verify DIR                                 is every file there, and as it was written?
    lightning-zero consolidate DIR model.ckpt                 one ordinary file of Lightning
    lightning-zero consolidate DIR hf --safetensors           the weights, as Hugging Face writes them
"""
OURS = re.compile(  # the names of all files in a checkpoint
    r"shard-\d{5}-of-\d{5}-[0-9a-f]{8}\.(safetensors|crc32)|objects-[0-9a-f]{8}\.pt|manifest\.json|README\.txt"
    r"|\.nfs[0-9a-f]+"  # how NFS keeps a file that was deleted while a process reads it
)
# Errors of file systems that cannot sync a folder: nothing more can be done there.
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the file, and says what to do."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is nothing at the path. A FileNotFoundError, too, as Lightning's own strategies raise."""


@contextmanager
def writing(path: Any, absent: str = "") -> Iterator[None]:
    """Turns errors of the system into a CheckpointError that names the file: those of an open file do not name it, nor
    does that of a full disk. `absent` ends the message where a folder is missing."""
    try:
        yield
    except OSError as error:
        hint = absent if isinstance(error, FileNotFoundError) else ""
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}{hint}") from error


@final
class Folder:
    """A folder by its path or URL, such as ``memory://...`` or ``s3://...``."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = str(url)
        if "://" in self.url or self.url.startswith("file:"):
            self.fs, path = url_to_fs(self.url)
        else:  # `url_to_fs` would take "::" in a path for a file system inside another one
            self.fs, path = LocalFileSystem(), str(LocalFileSystem._strip_protocol(self.url))
        self.is_local = isinstance(self.fs, LocalFileSystem)
        if not self.is_local:  # object stores have files and no folders: there the manifest may stand for its folder
            path = path.rstrip("/").removesuffix(f"/{MANIFEST}")
        self.path: str = str(Path(path).absolute()) if self.is_local else path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and str(other) == str(self)

    def __str__(self) -> str:
        return self.path if self.is_local else self.fs.unstrip_protocol(self.path)

    @property
    def is_checkpoint(self) -> bool:
        return bool(self.refresh().isfile(self.file(MANIFEST)))

    @property
    def is_file(self) -> bool:
        return bool(self.refresh().isfile(self.path))

    @property
    def exists(self) -> bool:
        return bool(self.refresh().exists(self.path))

    @property
    def is_leftover(self) -> bool:
        """Whether a killed save or removal left this on an object store: files of a checkpoint, and no manifest."""
        names = [] if self.is_local or self.is_file else self.names()
        return bool(names) and MANIFEST not in names and all(OURS.fullmatch(name) for name in names)

    def refresh(self) -> Any:
        """Returns the file system, with no listing of this folder in its cache. Object stores keep listings for ever,
        and other processes write here: a stale one hides the newest checkpoint, or shows an old one."""
        if not self.is_local:
            self.fs.invalidate_cache(self.path)
        return self.fs

    @property
    def is_link(self) -> bool:
        return self.is_local and Path(self.path).is_symlink()

    @property
    def real(self) -> "Folder":
        """The folder that a link points to; otherwise this folder. A link may be moved while its target is read."""
        return Folder(Path(self.path).resolve()) if self.is_link and self.exists else self

    def file(self, name: str) -> str:
        return posixpath.join(self.path, name)

    def joinpath(self, name: str) -> "Folder":
        return Folder(posixpath.join(str(self), name))

    @property
    def parent(self) -> "Folder":
        return Folder(posixpath.dirname(str(self)))

    def names(self) -> list[str]:
        """Returns the names in the folder, sorted; none where there is no folder."""
        try:
            return sorted(posixpath.basename(path.rstrip("/")) for path in self.refresh().ls(self.path, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self) -> list["Folder"]:
        """Returns the files in the folder, each as a `Folder` with its path."""
        try:
            found = self.refresh().ls(self.path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = sorted(posixpath.basename(each["name"].rstrip("/")) for each in found if each["type"] == "file")
        return [self.joinpath(name) for name in names if not name.startswith(".")]

    def open(self, name: str) -> IO[bytes]:
        with self._reading(name):
            return self.refresh().open(self.file(name), "rb")

    def read(self, name: str) -> bytes:
        with self._reading(name), self.open(name) as stream:
            return stream.read()

    def read_checked(self, name: str, crc32: int, told: str = "its checksum does not match") -> bytes:
        """Reads a file; raises CheckpointError when it is missing, or has another checksum, which `told` says."""
        try:
            raw = self.read(name)
        except FileNotFoundError:
            raise CheckpointError(f"{self}: {name} is missing.") from None
        if zlib.crc32(raw) != crc32:
            raise CheckpointError(f"{self.file(name)} is damaged: {told}.")
        return raw

    def size(self, name: str) -> int:
        with self._reading(name):
            return int(self.refresh().size(self.file(name)))

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Turns errors of a disk into a CheckpointError that names the file. Callers explain that a file is missing."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise
        except OSError as error:
            raise CheckpointError(f"cannot read {self.file(name)}: {error.strerror or error}") from error

    def refuse_other_folder(self) -> None:
        """Raises CheckpointError when the folder holds something else than a checkpoint, which must not be lost."""
        names = self.names()
        strange = [name for name in names if not OURS.fullmatch(name)]
        has_shards = any(name.startswith("shard-") for name in names)
        # A killed save leaves shards without a manifest on an object store, but not on a disk. A manifest.json without
        # shards belongs to another program.
        is_ours = has_shards and (self.is_checkpoint or not self.is_local)
        if names and (strange or not is_ours):
            told = f"is a folder that is not a checkpoint (it holds {', '.join((strange or names)[:3])})"
            raise CheckpointError(f"{self} {told}. Choose another path, or empty it.")

    def refuse_inside_checkpoint(self) -> None:
        """Raises CheckpointError when this is, or would be, inside a checkpoint: the next save to that would refuse to
        touch a file that is not its own."""
        path = self.path
        while path not in ("", "/"):
            if self.fs.isfile(posixpath.join(path, MANIFEST)):
                outer = Folder(path if self.is_local else self.fs.unstrip_protocol(path))
                if any(name.startswith("shard-") for name in outer.names()):  # others have a manifest.json, too
                    raise CheckpointError(
                        f"{outer} is a checkpoint, and nothing else may be written there. Name another place."
                    )
            path = posixpath.dirname(path)

    def remove(self) -> None:
        """Removes the checkpoint, or only the link if this is one. Does nothing if nothing is there."""
        self.unlink()()

    def unlink(self) -> Callable[[], None]:
        """Does the first half of `remove`, which hides the checkpoint. Returns the other half: it may take long, and
        never fails."""
        if self.is_link or self.is_file:
            self.fs.rm_file(self.path)
        elif self.is_local and self.exists:
            hidden = hidden_beside(Path(self.path), "deleting")
            shutil.rmtree(hidden, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                Path(self.path).rename(hidden)
            return partial(self._delete_hidden, hidden)
        elif not self.is_local:
            if MANIFEST in (names := self.names()):
                self.fs.rm_file(self.file(MANIFEST))
            return partial(self._delete_uploaded, [self.file(name) for name in names if name != MANIFEST])
        return lambda: None

    def _delete_uploaded(self, files: list[str]) -> None:
        for file in files:  # not `rm`, which takes "*" and "[" in a path for patterns
            with contextlib.suppress(Exception):  # without a manifest it does no harm; the next save here tries again
                self.fs.rm_file(file)
        with contextlib.suppress(Exception):  # some object stores have no folders
            if "/" in self.path.strip("/"):  # not a bucket
                self.fs.rmdir(self.path)

    def _delete_hidden(self, hidden: Path) -> None:
        shutil.rmtree(hidden, ignore_errors=True)
        for left in hidden.parent.glob(".*.deleting"):  # of jobs that were killed here: nothing else removes them
            with contextlib.suppress(OSError):  # of another user
                if all(OURS.fullmatch(name) for name in Folder(left).names()):
                    shutil.rmtree(left, ignore_errors=True)

    @property
    def can_be_link(self) -> bool:
        """Whether the file system has symbolic links; some on removable disks and networks have none."""
        try:
            self._new_link("nowhere").unlink()
        except OSError:
            return False
        return True

    def link_to(self, target: "Folder") -> None:
        """Makes this path a link to a checkpoint beside it, in one step, in the place of any link or checkpoint here.
        Raises CheckpointError when this is a folder of something else."""
        path = Path(self.path)
        is_folder = path.is_dir() and not self.is_link
        if is_folder:
            self.refuse_other_folder()
        coming = self._new_link(os.path.relpath(target.path, path.parent))
        delete_replaced = self.unlink() if is_folder else lambda: None
        coming.replace(path)
        sync_names(path.parent)
        delete_replaced()

    def _new_link(self, target: str) -> Path:
        coming = hidden_beside(Path(self.path), "linking")
        coming.unlink(missing_ok=True)
        coming.symlink_to(target)
        return coming


def hidden_beside(path: Path, purpose: str) -> Path:
    """Returns a hidden path beside `path`, to prepare something there. It does not contain the name as it is: Lightning
    takes everything with ``hpc_ckpt_`` in its name for a checkpoint from which a SLURM job resumes."""
    return path.with_name(f".{path.name.replace('_', '+')}.{purpose}")


def sync_names(path: Path) -> None:
    """Syncs a folder to disk, so that the names in it survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)
