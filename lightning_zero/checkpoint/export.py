"""A checkpoint in other formats: Lightning's single file, Hugging Face's safetensors. Written as a stream: of the
tensors no more than a chunk is in memory at a time."""

import json
import os
import pickle
import posixpath
import re
import secrets
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, final

import fsspec
import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage

from lightning_zero.checkpoint.folder import MANIFEST, CheckpointError, Folder
from lightning_zero.checkpoint.load import StoredCheckpoint
from lightning_zero.checkpoint.manifest import Entry
from lightning_zero.checkpoint.shard import CHUNK_BYTES, SAFE_NAMES, chunks_of, header_of
from lightning_zero.shards.extents import Extent
from lightning_zero.views.lazy import LazyTensor, Stored

INDEX = "model.safetensors.index.json"
_EXPORTED = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX))


def consolidate(url: str | os.PathLike[str], out: str | os.PathLike[str], *, objects: bool = False) -> list[str]:
    """Writes a checkpoint as one ordinary Lightning file, optimizer and all, that needs nothing of ours to be read.

    Args:
        url: the checkpoint's folder.
        out: path or URL of the file; it comes to be there whole or not at all.
        objects: include what had to be pickled (this unpickles it).

    Returns:
        The classes of pickled objects that were left out.

    Raises:
        CheckpointError: when the checkpoint is damaged, or `out` is a folder.
    """
    with closing(StoredCheckpoint(url)) as checkpoint:
        place = Folder(out)
        place.refuse_inside_checkpoint()
        if place.exists and not place.is_file:
            raise CheckpointError(f"{out} is no file; name the file to write, such as {place.inside('model.ckpt')}.")
        with _arriving(place) as scratch, scratch.open("wb") as file:
            write_single_file(checkpoint, file, objects=objects)
            file.flush()
            os.fsync(file.fileno())
        return checkpoint.left_out


@contextmanager
def _arriving(place: Folder) -> Iterator[Path]:
    """A file to write, which becomes `place` when the context ends well and goes away when it does not."""
    place.parent.fs.makedirs(place.parent.path, exist_ok=True)
    beside = Path(place.path).parent if place.is_local else Path(tempfile.gettempdir())
    scratch = beside / f".{posixpath.basename(place.path)}.{secrets.token_hex(4)}.tmp"
    try:
        yield scratch
        if place.is_local:
            scratch.replace(place.path)
        else:
            place.fs.put_file(str(scratch), place.path)
    except OSError as error:  # of a full disk, which file it is about is not in it
        raise CheckpointError(f"cannot write {place}: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def write_single_file(checkpoint: StoredCheckpoint, stream: IO[bytes], *, objects: bool = False) -> None:
    """Writes to `stream` what `torch.save` would write of a checkpoint, without ever holding it.

    Torch does it, except that its own writer of zip files wants each tensor whole. (`torch.serialization.skip_data`
    leaves room for values in a file that torch writes, but does not tell what belongs where, nor has the file then the
    checksums that other readers of zip files look at.)
    """
    scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    with zipfile.ZipFile(stream, "w") as archive:

        def write_record(name: str, content: str | bytes | UntypedStorage, nbytes: int) -> None:
            if isinstance(content, _Unread):
                entry = checkpoint.manifest.tensors[content.tensor.source.name]
                _put(archive, name, stored_chunks_of(checkpoint, entry, scratch))
            elif isinstance(content, UntypedStorage):  # a pickled object brought it along
                _put(archive, name, chunks_of(torch.empty(0, dtype=torch.uint8).set_(content)))
            else:
                _put(archive, name, [content.encode() if isinstance(content, str) else content])

        writer, pickling = SimpleNamespace(write_record=write_record), SimpleNamespace(Pickler=_Pickler)
        torch.serialization._save(checkpoint.tree(objects=objects), writer, pickling, 2, False)
        _put(archive, "version", [b"3\n"])


def _put(archive: zipfile.ZipFile, name: str, content: Iterable[bytes | memoryview]) -> None:
    """Adds a file whose bytes start at a multiple of 64, as torch writes them: tensors can be mapped from there."""
    info = zipfile.ZipInfo(f"archive/{name}")
    assert archive.fp is not None
    start = archive.fp.tell() + 30 + len(info.filename) + 4 + 20  # header, name, this extra field and the one of zip64
    info.extra = struct.pack("<2sH", b"FB", -start % 64) + b"Z" * (-start % 64)
    with archive.open(info, "w", force_zip64=True) as file:
        file.writelines(content)


@final
class _Pickler(pickle.Pickler):
    """Pickles a lazy tensor as torch does one in memory, except that its storage is `_Unread`."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return NotImplemented
        if not isinstance(value.source, Stored):  # made of several: one at a time is in memory
            return value.source.whole().__reduce_ex__(2)
        rebuild, (storage, _, _, _, *rest) = torch.empty(0, dtype=value.dtype).__reduce_ex__(2)
        unread = _Unread(0)
        unread.tensor = value
        # Dtypes newer than typed storages go as bytes.
        typed = TypedStorage(wrap_storage=unread, dtype=getattr(storage, "dtype", torch.uint8), _internal=True)
        return rebuild, (typed, 0, value.shape, torch.empty(value.shape, device="meta").stride(), *rest)


class _Unread(UntypedStorage):
    """Stands for the storage of a lazy tensor: it knows the size, and takes no memory."""

    tensor: LazyTensor

    def nbytes(self) -> int:
        return self.tensor.nbytes


def stored_chunks_of(checkpoint: StoredCheckpoint, entry: Entry, scratch: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in C order, checked, a chunk at a time; each is valid until the next one.

    All tensors share `scratch`, ``(CHUNK_BYTES,)`` uint8: an allocation for each chunk is returned to the system late,
    and makes the process grow by several.
    """
    numel, step = entry.nbytes // entry.dtype.itemsize, CHUNK_BYTES // entry.dtype.itemsize
    for start in range(0, numel, step):
        values = scratch.view(entry.dtype)[: min(step, numel - start)]
        extent = Extent.of_whole(entry.name, entry.shape, start, start + values.numel())
        checkpoint.reader.read(entry, extent, values)
        yield from chunks_of(values)


def export_safetensors(
    url: str | os.PathLike[str], out: str | os.PathLike[str], *, prefix: str = "", shard_bytes: int = 5 * 10**9
) -> list[str]:
    """Writes the model of a checkpoint as Hugging Face does: `model.safetensors`, or several and an index.

    Args:
        url: the checkpoint's folder.
        out: the folder to write to. An earlier export gives way; other files, such as ``config.json``, may be there.
        prefix: of the names to write (``"model."`` for a transformers model held as ``self.model``); it is cut off.
            The default writes all names as they are.
        shard_bytes: the most that one file holds; a larger tensor has one to itself.

    Returns:
        Names of the files, without the index.

    Raises:
        CheckpointError: when the checkpoint is damaged, holds nothing of that prefix or a dtype that safetensors lacks,
            or `out` is a file.
    """
    with closing(StoredCheckpoint(url)) as checkpoint:
        entries = {
            name.removeprefix(prefix): checkpoint.manifest.tensors[lazy.source.name]
            for name, lazy in checkpoint.model().items()
            if isinstance(lazy, LazyTensor) and name.startswith(prefix)
        }
        if not entries:
            raise CheckpointError(f"{url} has no tensor whose name begins with {prefix!r}.")
        for name, entry in entries.items():
            if entry.dtype not in SAFE_NAMES:
                raise CheckpointError(f"safetensors has no {entry.dtype}, which {name!r} of {url} is.")
        groups = _fill(entries, shard_bytes)
        several = len(groups) > 1
        names = [f"model-{at + 1:05}-of-{len(groups):05}.safetensors" for at in range(len(groups))]
        files = dict(zip(names if several else ["model.safetensors"], groups, strict=True))
        target = Folder(out)
        target.refuse_inside_checkpoint()
        if target.is_file:
            raise CheckpointError(f"{out} is a file; name the folder to write to.")
        with ExitStack() as arriving:  # none comes if one cannot be written; the index, which readers trust, is last
            index = arriving.enter_context(_arriving(target.inside(INDEX))) if several else None
            for name, group in files.items():
                _write_safetensors(checkpoint, group, arriving.enter_context(_arriving(target.inside(name))))
            if index is not None:
                total = sum(entry.nbytes for entry in entries.values())
                weight_map = {key: name for name, group in files.items() for key in group}
                index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
                if INDEX in target.names():  # whatever ends this now, none reads files of two exports as one model
                    target.fs.rm_file(target.file(INDEX))
    for name in target.names():  # of an earlier export, which transformers might prefer to this one
        if _EXPORTED.fullmatch(name) and name not in files and not (several and name == INDEX):
            target.fs.rm_file(target.file(name))
    return list(files)


def _write_safetensors(checkpoint: StoredCheckpoint, group: dict[str, Entry], path: Path) -> None:
    scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    with path.open("wb") as file:
        file.write(header_of([(key, entry.dtype, entry.shape) for key, entry in group.items()], {"format": "pt"}))
        for entry in group.values():
            file.writelines(stored_chunks_of(checkpoint, entry, scratch))
        file.flush()
        os.fsync(file.fileno())


def _fill(entries: dict[str, Entry], shard_bytes: int) -> list[dict[str, Entry]]:
    groups: list[dict[str, Entry]] = [{}]
    held = 0
    for name, entry in sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize):  # so that all are aligned
        if groups[-1] and held + entry.nbytes > shard_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = entry
        held += entry.nbytes
    return groups


class ZeroFileSystem(fsspec.AbstractFileSystem):
    """``zero://DIR``: a checkpoint's folder as one ordinary Lightning file, for whatever reads files through fsspec.

    Reading one writes the file to a temporary place first. Registered by entry point: nothing need be imported.
    """

    protocol = "zero"
    cachable = False

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if not self.exists(path):
            raise FileNotFoundError(path)
        return {"name": path, "size": None, "type": "file"}  # it is not known before the file is written

    def exists(self, path: str, **_: Any) -> bool:
        return Folder(self._strip_protocol(path)).is_checkpoint

    def modified(self, path: str) -> Any:
        folder = Folder(self._strip_protocol(path))
        return folder.fs.modified(folder.file(MANIFEST))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "rb":
            raise CheckpointError("zero:// is for reading; save to the folder itself.")
        place = self._strip_protocol(path)
        with closing(StoredCheckpoint(place)) as checkpoint, tempfile.NamedTemporaryFile() as single:
            write_single_file(checkpoint, single)
            single.flush()
            if left_out := checkpoint.told_left_out:
                warnings.warn(left_out, stacklevel=2)
            return Path(single.name).open("rb")  # its name goes away, the file stays until it is closed
