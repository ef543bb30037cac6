"""Writes a checkpoint in other formats: Lightning's single file, and Hugging Face's safetensors.

Tensors are streamed: a chunk is in memory at a time. Only composed tensors, such as 8-bit state, are read whole.
"""

import json
import os
import pickle
import posixpath
import re
import secrets
import shutil
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast, final

import fsspec
import torch
from torch import Tensor
from torch.storage import UntypedStorage

from lightning_zero.checkpoint.folder import CheckpointError, Folder, writing
from lightning_zero.checkpoint.load import StoredCheckpoint
from lightning_zero.checkpoint.shard import CHUNK_BYTES, SAFE_NAMES, chunks_of, header_of
from lightning_zero.checkpoint.single import is_single_file, model_in, problems_in, read_plain, refuse_other_files
from lightning_zero.device import HOST
from lightning_zero.shards.extents import Extent
from lightning_zero.torch_private import save_to
from lightning_zero.views.lazy import LazyTensor, Stored

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
_EXPORTED = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX))


def consolidate(url: str | os.PathLike[str], out: str | os.PathLike[str], *, objects: bool = False) -> list[str]:
    """Writes a checkpoint as one ordinary Lightning file, with the optimizers. Reading it does not need lightning_zero.

    Args:
        url: the checkpoint's folder; or a single file, which is copied.
        out: path or URL of the file, which is written whole or not at all.
        objects: whether to include the pickled objects (this unpickles them).

    Returns:
        The classes of pickled objects that were left out.

    Raises:
        CheckpointError: when the checkpoint is damaged, or `out` is a folder.
    """
    place = Folder(out)
    place.refuse_inside_checkpoint()
    if place.exists and not place.is_file:
        raise CheckpointError(f"{out} is no file; name the file to write, such as {place.joinpath('model.ckpt')}.")
    if is_single_file(single := Folder(url)):
        refuse_other_files(single)
        if problems := problems_in(single):
            raise CheckpointError(problems[0])
        with _arriving(place) as scratch, single.fs.open(single.path, "rb") as stream, scratch.open("wb") as file:
            shutil.copyfileobj(stream, file)
        return []
    with closing(StoredCheckpoint(url)) as checkpoint:
        with _arriving(place) as scratch, scratch.open("wb") as file:
            write_single_file(checkpoint, file, objects=objects)
        return checkpoint.left_out


@contextmanager
def _arriving(place: Folder) -> Iterator[Path]:
    """Yields the path of a file to write. It becomes `place` when the context ends, or is deleted if that raises."""
    place.parent.fs.makedirs(place.parent.path, exist_ok=True)
    beside = Path(place.path).parent if place.is_local else Path(tempfile.gettempdir())
    scratch = beside / f".{posixpath.basename(place.path)}.{secrets.token_hex(4)}.tmp"
    try:
        with writing(place):
            yield scratch
            if place.is_local:
                with scratch.open("rb") as file:
                    os.fsync(file.fileno())
                scratch.replace(place.path)
            else:
                place.fs.put_file(str(scratch), place.path)
    finally:
        scratch.unlink(missing_ok=True)


def write_single_file(checkpoint: StoredCheckpoint, stream: IO[bytes], *, objects: bool = False) -> None:
    """Writes to `stream` the file that `torch.save` would write of a checkpoint, without holding its tensors.

    This is torch's own code, with another writer of zip files: torch's takes only whole tensors.
    (`torch.serialization.skip_data` makes torch leave room for the values, but does not say which tensor belongs where,
    and the file then lacks the checksums that other readers of zip files verify.)
    """
    scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=HOST)
    with zipfile.ZipFile(stream, "w") as archive:

        def write_record(name: str, content: str | bytes | UntypedStorage, nbytes: int) -> None:
            if isinstance(content, _UnreadStorage):
                _add(archive, name, _chunks_of_lazy(content.tensor, scratch))
            elif isinstance(content, UntypedStorage):  # of a tensor in a pickled object, or of part of a composed one
                _add(archive, name, chunks_of(torch.empty(0, dtype=torch.uint8, device=HOST).set_(content)))
            else:
                _add(archive, name, [content.encode() if isinstance(content, str) else content])

        writer, pickling = SimpleNamespace(write_record=write_record), SimpleNamespace(Pickler=_Pickler)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # every file of `torch.save` has it
            save_to(writer, checkpoint.tree(objects=objects), pickling)
        _add(archive, "version", [b"3\n"])


def _add(archive: zipfile.ZipFile, name: str, content: Iterable[bytes | memoryview]) -> None:
    """Adds a file whose bytes start at a multiple of 64, as torch aligns them, so that tensors can be mapped."""
    info = zipfile.ZipInfo(f"archive/{name}")
    assert archive.fp is not None
    start = archive.fp.tell() + 30 + len(info.filename) + 4 + 20  # header, name, this extra field and the one of zip64
    info.extra = struct.pack("<2sH", b"FB", -start % 64) + b"Z" * (-start % 64)
    with archive.open(info, "w", force_zip64=True) as file:
        file.writelines(content)


@final
class _Pickler(pickle.Pickler):
    """Pickles a lazy tensor as torch pickles one in memory, but over an `_UnreadStorage`."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return NotImplemented
        if not isinstance(value.source, Stored):  # a composed tensor, whose parts are read whole
            return value.source.whole().__reduce_ex__(2)
        rebuild, (storage, _, _, _, *rest) = torch.empty(0, dtype=value.dtype, device=HOST).__reduce_ex__(2)
        unread = _UnreadStorage(0)
        unread.tensor = value
        # Dtypes without a typed storage, which are newer, are written as bytes.
        typed = torch.TypedStorage(wrap_storage=unread, dtype=getattr(storage, "dtype", torch.uint8))
        return rebuild, (typed, 0, value.shape, torch.empty(value.shape, device="meta").stride(), *rest)


class _UnreadStorage(UntypedStorage):
    """Stands for the storage of a lazy tensor: has its size, and no memory."""

    tensor: LazyTensor

    def nbytes(self) -> int:
        return self.tensor.nbytes


def _chunks_of_lazy(tensor: LazyTensor, scratch: Tensor) -> Iterator[memoryview]:
    """Yields the verified bytes of a stored tensor in C order, a chunk at a time; each is valid until the next one.

    All tensors share `scratch`, ``(CHUNK_BYTES,)`` uint8: memory allocated for each chunk would be returned to the
    system late, and resident memory would grow by several chunks.
    """
    source = cast(Stored, tensor.source)
    numel, step = tensor.numel(), CHUNK_BYTES // source.dtype.itemsize
    for start in range(0, numel, step):
        values = scratch.view(source.dtype)[: min(step, numel - start)]
        source.read(Extent.of_whole(source.name, source.shape, start, start + values.numel()), values)
        yield from chunks_of(values)


def export_safetensors(
    url: str | os.PathLike[str], out: str | os.PathLike[str], *, prefix: str = "", shard_bytes: int = 5 * 10**9
) -> list[str]:
    """Writes the model of a checkpoint as Hugging Face does: `model.safetensors`, or several files and an index.

    Args:
        url: the checkpoint's folder, or a single file.
        out: the folder to write to. An earlier export is replaced; other files, such as ``config.json``, may be there.
        prefix: only names that begin so are written, without it (``"model."`` for a transformers model held as
            ``self.model``). The default writes all names as they are.
        shard_bytes: the largest size of a file; a larger tensor has a file to itself.

    Returns:
        Names of the files, without the index.

    Raises:
        CheckpointError: when the checkpoint is damaged, has no name with that prefix or a dtype that safetensors lacks,
            or `out` is a file.
    """
    with _model_at(Folder(url)) as model:
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in model.items()
            if isinstance(tensor, Tensor) and name.startswith(prefix)
        }
        if not tensors:
            raise CheckpointError(f"{url} has no tensor whose name begins with {prefix!r}.")
        for name, lazy in tensors.items():
            if lazy.dtype not in SAFE_NAMES:
                raise CheckpointError(f"safetensors has no {lazy.dtype}, which {name!r} of {url} is.")
        files = _divide(tensors, shard_bytes)
        target = Folder(out)
        target.refuse_inside_checkpoint()
        if target.is_file:
            raise CheckpointError(f"{out} is a file; name the folder to write to.")
        # No file gets its name if one cannot be written. The index, which readers trust, gets it last.
        with ExitStack() as arriving:
            index = arriving.enter_context(_arriving(target.joinpath(INDEX))) if len(files) > 1 else None
            for name, group in files.items():
                _write_safetensors(group, arriving.enter_context(_arriving(target.joinpath(name))))
            if index is not None:
                total = sum(lazy.nbytes for lazy in tensors.values())
                weight_map = {key: name for name, group in files.items() for key in group}
                index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
                if INDEX in target.names():  # wherever this may be cut off, no two exports are read as one model
                    target.fs.rm_file(target.file(INDEX))
    written = {*files} if index is None else {*files, INDEX}
    for name in target.names():
        if _EXPORTED.fullmatch(name) and name not in written:  # of an earlier export: transformers might prefer it
            target.fs.rm_file(target.file(name))
    return list(files)


@contextmanager
def _model_at(place: Folder) -> Iterator[dict[str, Any]]:
    """Yields the model of a checkpoint: of a sharded one as lazy tensors."""
    if is_single_file(place):
        yield model_in(read_plain(place))
        return
    with closing(StoredCheckpoint(place.url)) as checkpoint:
        yield checkpoint.model()


def _write_safetensors(group: dict[str, Tensor], path: Path) -> None:
    scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=HOST)
    with path.open("wb") as file:
        file.write(header_of([(name, lazy.dtype, lazy.shape) for name, lazy in group.items()], {"format": "pt"}))
        for lazy in group.values():
            file.writelines(_chunks_of_lazy(lazy, scratch) if isinstance(lazy, LazyTensor) else chunks_of(lazy))


def _divide(tensors: dict[str, Tensor], shard_bytes: int) -> dict[str, dict[str, Tensor]]:
    """Divides tensors among files; returns those of each file by its name."""
    groups: list[dict[str, Tensor]] = [{}]
    held = 0  # bytes
    for name, lazy in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):  # so that all are aligned
        if groups[-1] and held + lazy.nbytes > shard_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = lazy
        held += lazy.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, start=1)}


class ZeroFileSystem(fsspec.AbstractFileSystem):
    """The file system ``zero://``: ``zero://DIR`` reads a checkpoint's folder as one ordinary Lightning file, and a
    checkpoint that is one file as it is.

    Opening a folder first writes the file to a temporary place. fsspec finds this class by entry point: nothing need be
    imported.
    """

    protocol = "zero"
    cachable = False

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if not self.exists(path):
            raise FileNotFoundError(path)
        return {"name": path, "size": None, "type": "file"}  # the size is unknown until it is opened

    def exists(self, path: str, **_: Any) -> bool:
        place = Folder(self._strip_protocol(path))
        return place.is_checkpoint or is_single_file(place)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "rb":
            raise CheckpointError("zero:// is for reading; save to the folder itself.")
        place = Folder(self._strip_protocol(path))
        if is_single_file(place):
            return place.fs.open(place.path, "rb")
        with closing(StoredCheckpoint(place.url)) as checkpoint, tempfile.NamedTemporaryFile() as single:
            write_single_file(checkpoint, single)
            single.flush()
            if left_out := checkpoint.told_left_out:
                warnings.warn(left_out, stacklevel=2)
            return Path(single.name).open("rb")  # the name is removed now, the file when it is closed
