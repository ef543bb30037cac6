"""A checkpoint in other formats: Lightning's single file, Hugging Face's safetensors. Written as a stream: of the
tensors no more than a chunk is in memory at a time."""

import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from lightning_zero.checkpoint.folder import CheckpointError, Folder
from lightning_zero.checkpoint.load import StoredCheckpoint
from lightning_zero.checkpoint.manifest import Entry
from lightning_zero.checkpoint.shard import chunks_of, header_of
from lightning_zero.extents import Extent
from lightning_zero.lazy import LazyTensor

_CHUNK_BYTES = 1 << 24
INDEX = "model.safetensors.index.json"


def consolidate(url: str | os.PathLike[str], out: str | os.PathLike[str], *, objects: bool = False) -> None:
    """Writes a checkpoint as one ordinary Lightning file, optimizer and all, that needs nothing of ours to be read.

    Args:
        url: the checkpoint's folder.
        out: path or URL of the file.
        objects: include what had to be pickled (this unpickles it).

    Raises:
        CheckpointError: when the checkpoint is damaged, or `out` is a folder.
    """
    checkpoint = StoredCheckpoint(url)
    place = Folder(out)
    if place.fs.isdir(place.path):
        raise CheckpointError(f"{out} is a folder; name the file to write, such as {out}/model.ckpt.")
    beside = str(Path(place.path).parent) if place.is_local else None
    with tempfile.NamedTemporaryFile(dir=beside, prefix="consolidating-", suffix=".tmp", delete=False) as scratch:
        try:
            write_single_file(checkpoint, scratch.name, objects=objects)
            if place.is_local:
                Path(scratch.name).chmod(0o666 & ~_umask())
                Path(scratch.name).replace(place.path)
            else:
                place.fs.put_file(scratch.name, place.path)
        finally:
            Path(scratch.name).unlink(missing_ok=True)
            checkpoint.close()


def write_single_file(checkpoint: StoredCheckpoint, path: str, *, objects: bool = False) -> None:
    """`torch.save` of a checkpoint without its values, and then these, each to its place in the file."""
    entries = {}
    with FakeTensorMode():

        def fake(name: str) -> Tensor:
            entry = checkpoint.manifest.tensors[name]
            if name not in entries:
                entries[name] = torch.empty(entry.shape, dtype=entry.dtype)
            return entries[name]

        tree = checkpoint.decode(fake, objects)
    with skip_data(materialize_fake_tensors=True):
        torch.save(tree, path)
    with FakeTensorMode():  # tells where the values of each tensor are to be
        saved = torch.load(path, weights_only=False)
    places = _places(tree, saved)
    with Path(path).open("r+b") as file:
        for name, tensor in entries.items():
            if id(tensor) in places:
                file.seek(places[id(tensor)])
                for chunk in chunks(checkpoint, checkpoint.manifest.tensors[name]):
                    file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _places(tree: Any, saved: Any) -> dict[int, int]:
    """id of a tensor in `tree` -> offset in the file of the one that stands in the same place of `saved`."""
    pairs = zip(_tensors(tree), _tensors(saved), strict=True)
    return {id(one): int(other.untyped_storage()._checkpoint_offset or 0) for one, other in pairs if one.numel()}


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from itertools.chain.from_iterable(map(_tensors, tree.values()))
    elif isinstance(tree, list | tuple):
        yield from itertools.chain.from_iterable(map(_tensors, tree))


def chunks(checkpoint: StoredCheckpoint, entry: Entry) -> Iterator[memoryview]:
    """The bytes of a tensor in C order, checked, a chunk at a time."""
    numel, step = entry.nbytes // entry.dtype.itemsize, _CHUNK_BYTES // entry.dtype.itemsize
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        values = torch.empty(stop - start, dtype=entry.dtype)
        checkpoint.reader.read(entry, Extent.of_whole(entry.name, entry.shape, start, stop), values)
        yield from chunks_of(values)


def export_safetensors(
    url: str | os.PathLike[str], out: str | os.PathLike[str], *, prefix: str = "", shard_bytes: int = 5 * 10**9
) -> list[str]:
    """Writes the model of a checkpoint as Hugging Face does: `model.safetensors`, or several and an index.

    Args:
        url: the checkpoint's folder.
        out: the folder to write to.
        prefix: of the names to write (``"model."`` for a transformers model held as ``self.model``); it is cut off.
            The default writes all names as they are.
        shard_bytes: the most that one file holds; a larger tensor has one to itself.

    Returns:
        Names of the files, without the index.
    """
    checkpoint = StoredCheckpoint(url)
    entries = {
        name.removeprefix(prefix): checkpoint.manifest.tensors[lazy.source.name]
        for name, lazy in checkpoint.tree()["state_dict"].items()
        if isinstance(lazy, LazyTensor) and name.startswith(prefix)
    }
    if not entries:
        raise CheckpointError(f"{url} has no tensor whose name begins with {prefix!r}.")
    groups = _fill(entries, shard_bytes)
    names = [f"model-{at:05}-of-{len(groups):05}.safetensors" for at in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else ["model.safetensors"]
    target = Folder(out)
    target.fs.makedirs(target.path, exist_ok=True)
    for name, group in zip(names, groups, strict=True):
        with target.fs.open(target.file(name), "wb") as file:
            file.write(header_of([(key, e.dtype, e.shape) for key, e in group.items()], {"format": "pt"}))
            for entry in group.values():
                for chunk in chunks(checkpoint, entry):
                    file.write(chunk)
    if len(names) > 1:
        total = sum(entry.nbytes for entry in entries.values())
        weight_map = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        target.fs.pipe_file(target.file(INDEX), json.dumps(index, indent=2).encode())
    checkpoint.close()
    return names


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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class ZeroFileSystem(fsspec.AbstractFileSystem):
    """``zero://DIR``: a checkpoint's folder as one ordinary Lightning file, for whatever reads files through fsspec.

    Reading one writes the file to a temporary place first. Registered by entry point: nothing need be imported.
    """

    protocol = "zero"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path if isinstance(path, list) else str(path).removeprefix("zero://")

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        checkpoint = StoredCheckpoint(self._strip_protocol(path))
        return {"name": path, "size": checkpoint.manifest.nbytes, "type": "file"}

    def exists(self, path: str, **_: Any) -> bool:
        return Folder(self._strip_protocol(path)).is_checkpoint

    def modified(self, path: str) -> Any:
        folder = Folder(self._strip_protocol(path))
        return folder.fs.modified(folder.file("manifest.json"))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "rb":
            raise CheckpointError("zero:// is for reading; save to the folder itself.")
        with tempfile.TemporaryDirectory() as folder:
            single = str(Path(folder) / "checkpoint.ckpt")
            write_single_file(StoredCheckpoint(self._strip_protocol(path)), single)
            return Path(single).open("rb")  # its name goes away, the file stays until it is closed
