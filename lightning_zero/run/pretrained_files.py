"""Safetensors files of a published model, and the tensors in them, of which every rank reads what it keeps.

file      header | embed.weight | block.0.weight | ...         the header has names, dtypes, shapes and offsets
"""

import json
import math
import os
from contextlib import ExitStack
from typing import IO, final

import torch
from torch import Tensor

from lightning_zero.checkpoint.export import INDEX, SINGLE
from lightning_zero.checkpoint.folder import CheckpointError, Folder
from lightning_zero.checkpoint.shard import LONGEST_HEADER, SAFE_NAMES, fill
from lightning_zero.device import HOST
from lightning_zero.shards.extents import Extent
from lightning_zero.views.lazy import Stored
from lightning_zero.wording import few_of

_DTYPES = {name: dtype for dtype, name in SAFE_NAMES.items()}
_SUFFIX = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CHUNK_BYTES = 1 << 20  # converted to another dtype or device at a time


class InFile(Stored):
    """A tensor that is in a file, or is made of such."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, place: tuple[str, int]) -> None:
        super().__init__(name, shape, dtype)
        self.place = place  # path of the file, offset in bytes; of several, the first

    def whole(self) -> Tensor:
        return self.for_loading(torch.empty(self.shape, dtype=self.dtype, device=HOST))

    def for_loading(self, target: Tensor) -> Tensor:
        """Reads into `target` itself if that is contiguous, so that the tensor is not in memory twice."""
        into = target.detach()
        if not into.is_contiguous():
            return self.whole()
        self.read(Extent.of_whole(self.name, self.shape), into.view(-1))
        return target


@final
class PretrainedTensor(InFile):
    """A tensor in a safetensors file."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, place: tuple[str, int], stream: IO[bytes]
    ) -> None:
        super().__init__(name, shape, dtype, place)
        self._stream = stream

    def read(self, extent: Extent, into: Tensor) -> None:
        self._stream.seek(self.place[1] + extent.start * self.dtype.itemsize)
        if into.device.type == "cpu" and into.dtype == self.dtype:
            self._fill(into)
            return
        for part in into.split(_CHUNK_BYTES // self.dtype.itemsize):
            part.copy_(self._fill(torch.empty(part.shape, dtype=self.dtype, device=HOST)))

    def _fill(self, flat: Tensor) -> Tensor:
        if flat.numel():
            fill(flat.view(torch.uint8).numpy().data, self._stream, f"{self.place[0]} ends within {self.name!r}.")
        return flat


def open_all(place: Folder, opened: ExitStack) -> dict[str, PretrainedTensor]:
    """Opens the files at a path, and returns their tensors by name."""
    folder = place.parent if place.is_file else place
    tensors: dict[str, PretrainedTensor] = {}
    files, listed = _choose_files(place)
    for file in files:
        path = folder.file(file)
        try:
            stream = opened.enter_context(folder.open(file))
        except FileNotFoundError:
            raise CheckpointError(f"{path}, which the index names, is missing.") from None
        for tensor in _read_header(path, stream, folder.size(file)):
            if listed is not None and listed.get(tensor.name) != file:
                continue
            if (first := tensors.setdefault(tensor.name, tensor)) is not tensor:
                raise CheckpointError(f"{tensor.name!r} is in two files, {first.place[0]} and {path}.")
    if absent := sorted(set(listed or ()) - set(tensors)):
        raise CheckpointError(f"{place}: {few_of(absent)} are in the index, and not in the files.")
    return tensors


def _choose_files(place: Folder) -> tuple[list[str], dict[str, str] | None]:
    """Returns the names of the files to read, and if there is an index, the file of each tensor."""
    if place.is_file:
        name = os.path.basename(place.path)  # noqa: PTH119
        if not name.endswith(_SUFFIX):
            raise CheckpointError(_refusal(place, [name]))
        return [name], None
    names = place.names()
    if indices := [name for name in names if name.endswith(f"{_SUFFIX}.index.json")]:
        index = INDEX if INDEX in indices else indices[0]
        try:
            listed = {str(name): str(file) for name, file in json.loads(place.read(index))["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{place.file(index)} is no index: {type(error).__name__}: {error}.") from error
        return sorted(set(listed.values())), listed
    if place.is_checkpoint or not (files := [name for name in names if name.endswith(_SUFFIX)]):
        raise CheckpointError(_refusal(place, names))
    # Files beside SINGLE hold the same tensors again, in another form.
    return [SINGLE] if SINGLE in files else files, None


def _refusal(place: Folder, names: list[str]) -> str:
    """Says why there is nothing to load at a path, and what to do."""
    if not place.exists:
        return f"{place} does not exist. For a model of a hub, give what huggingface_hub.snapshot_download() returns."
    if not place.is_file and place.is_checkpoint:
        return (
            f"{place} is a checkpoint of a run: go on from it with fit(ckpt_path=...), or write its weights with "
            f"`lightning-zero consolidate {place} OUT --safetensors`, and load OUT."
        )
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        return (
            f"{pickles} in {place.parent if place.is_file else place} are pickles, which can be read only whole. Write "
            "safetensors once, and load those: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
            "'model.safetensors')."
        )
    return f"{place} has no safetensors."


def _read_header(path: str, stream: IO[bytes], nbytes: int) -> list[PretrainedTensor]:
    """Reads which tensors are in a file of `nbytes`: https://github.com/huggingface/safetensors#format"""
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(LONGEST_HEADER, nbytes - 8):
        raise CheckpointError(f"{path} is not a safetensors file, or was not written to its end.")
    tensors = []
    try:
        plain = json.loads(stream.read(length))
        plain.pop("__metadata__", None)
        for name, entry in plain.items():
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            end = start + math.prod(shape) * dtype.itemsize
            if end != stop or end > nbytes:
                raise CheckpointError(f"{path} is damaged, or was not written to its end: {name!r} ends at {end}.")
            tensors.append(PretrainedTensor(name, shape, dtype, (path, start), stream))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {type(error).__name__}: {error}.") from error
    return tensors
