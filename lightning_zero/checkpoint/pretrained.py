"""Weights of a trained model from safetensors files, of which every rank reads what it keeps.

file      header | embed.weight | block.0.weight | ...         names, dtypes, shapes and places stand in the header
rank 0             ====           =======                      rows or pieces, at every stage that shards parameters
rank 1                 ====              =======
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_zero.checkpoint.export import INDEX
from lightning_zero.checkpoint.folder import CheckpointError, Folder
from lightning_zero.checkpoint.shard import LONGEST_HEADER, SAFE_NAMES
from lightning_zero.run.construction import Construction
from lightning_zero.run.engine import Engine
from lightning_zero.run.states import failing_together
from lightning_zero.shards.extents import Extent
from lightning_zero.shards.units import as_written
from lightning_zero.views.lazy import LazyTensor, Stored
from lightning_zero.wire.comm import Comm

HOST = torch.device("cpu")
_DTYPES = {name: dtype for dtype, name in SAFE_NAMES.items()}
_SUFFIX = ".safetensors"
_ONLY = "model.safetensors"  # where it is there, others beside it hold the same once more, in another form
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CHUNK_BYTES = 1 << 20  # that are converted at a time

Rename = Callable[[str], str | None]


class Left(NamedTuple):
    """What was left as it is, without `strict`."""

    missing: list[str]  # of the module, in the files
    surplus: list[str]  # of the files, in the module


def load_pretrained(
    module: Module,
    path: str | os.PathLike[str],
    *,
    comm: Comm,
    engine: Engine | None = None,
    construction: Construction | None = None,
    device: torch.device = HOST,
    rename: Rename | None = None,
    strict: bool = True,
) -> Left:
    """Parameters and persistent buffers of `module` take the values in `path`, each in its own dtype. Call it on every
    rank. Where parameters rest as shards, every rank reads its part, and the model is never whole.

    What is on the meta device is made anew, as `Module.to_empty` does: call it before optimizers are made.

    Args:
        module: whose tensors the names in the files are, as in its `state_dict`. A tied parameter needs one of its
            names.
        path: a ``.safetensors`` file, or a folder: what its index lists (Hugging Face's ``*.index.json``), else its
            ``model.safetensors``, else all such files in it. On any file system of fsspec.
        comm: all ranks.
        engine: that holds the parameters, if there is one.
        construction: that holds them until then; it also makes those that are on the meta device, in shards.
        device: where what is on the meta device is made without a construction.
        rename: called with each name in the files; returns the name in `module`, or None to leave the tensor out.
        strict: all tensors of the module and of the files must have found each other.

    Returns:
        What has not, without `strict`.

    Raises:
        RuntimeError: the same on every rank: for tensors that are missing, surplus, of another shape or of a dtype
            that cannot be cast (all of them are named), for files that are no safetensors, when one rank cannot read.
    """
    with ExitStack() as opened:
        with failing_together(comm, "loading weights"):
            match = _match(module, _Files(path, opened), rename or (lambda name: name), strict)
            for target, source in sorted(match.pairs, key=lambda pair: pair[1].place):
                tensor = target.materialize(construction, device) if target.tensor.is_meta else target.tensor
                with torch.no_grad():
                    tensor.copy_(LazyTensor(source))
        if engine is not None:
            engine.states.load_noted(lambda: None)
    return match.left


# -- files


class _Found(NamedTuple):
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


@final
class PretrainedTensor(Stored):
    """A tensor of a safetensors file."""

    def __init__(self, name: str, found: _Found, file: str, stream: IO[bytes]) -> None:
        super().__init__(name, found.shape, found.dtype)
        self.place = (file, found.offset)
        self._stream = stream

    def read(self, extent: Extent, into: Tensor) -> None:
        self._stream.seek(self.place[1] + extent.start * self.dtype.itemsize)
        if into.device.type == "cpu" and into.dtype == self.dtype:
            self._fill(into)
            return
        for part in into.split(_CHUNK_BYTES // self.dtype.itemsize):
            part.copy_(self._fill(torch.empty(part.shape, dtype=self.dtype)))

    def _fill(self, flat: Tensor) -> Tensor:
        rest = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
        while rest:
            got = self._stream.readinto(rest)  # type: ignore[attr-defined]
            if not got:
                raise CheckpointError(f"{self.place[0]} ends within {self.name!r}.")
            rest = rest[got:]
        return flat

    def whole(self) -> Tensor:
        return self.for_loading(torch.empty(self.shape, dtype=self.dtype))

    def for_loading(self, target: Tensor) -> Tensor:
        """Into `target` itself, so that nothing else is whole."""
        into = target.detach()
        if not into.is_contiguous():
            return self.whole()
        self.read(Extent.of_whole(self.name, self.shape), into.view(-1))
        return target


@final
class _Files:
    """The tensors of all files at a path, by name."""

    def __init__(self, path: str | os.PathLike[str], opened: ExitStack) -> None:
        self.tensors: dict[str, PretrainedTensor] = {}
        self.place = place = Folder(path)
        folder, names, listed = self._choose(place)
        for file in names:
            stream = opened.enter_context(self._open(folder, file))
            for name, found in _read_header(folder.file(file), stream, folder.size(file)).items():
                if listed is not None and listed.get(name) != file:
                    continue
                if name in self.tensors:
                    first = self.tensors[name].place[0]
                    raise CheckpointError(f"{name!r} is in two files, {first} and {folder.file(file)}.")
                self.tensors[name] = PretrainedTensor(name, found, folder.file(file), stream)
        if absent := sorted(set(listed or ()) - set(self.tensors)):
            raise CheckpointError(f"{place}: {absent} are in the index, and not in the files.")

    @staticmethod
    def _choose(place: Folder) -> tuple[Folder, list[str], dict[str, str] | None]:
        """The folder, the files to read in it, and which of them has what, where an index says so."""
        if place.is_file:
            name = os.path.basename(place.path)  # noqa: PTH119
            if not name.endswith(_SUFFIX):
                raise CheckpointError(_refusal(place, [name]))
            return place.parent, [name], None
        names = place.names()
        indices = [name for name in names if name.endswith(f"{_SUFFIX}.index.json")]
        if indices:
            index = INDEX if INDEX in indices else indices[0]
            try:
                listed = {str(name): str(file) for name, file in json.loads(place.read(index))["weight_map"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{place.file(index)} is no index: {type(error).__name__}: {error}.") from error
            return place, sorted(set(listed.values())), listed
        if place.is_checkpoint or not (files := [name for name in names if name.endswith(_SUFFIX)]):
            raise CheckpointError(_refusal(place, names))
        return place, [_ONLY] if _ONLY in files else files, None

    @staticmethod
    def _open(folder: Folder, file: str) -> IO[bytes]:
        try:
            return folder.open(file)
        except FileNotFoundError:
            raise CheckpointError(f"{folder.file(file)}, which the index names, is missing.") from None


def _refusal(place: Folder, names: list[str]) -> str:
    """Why there is nothing to load at a place, and what to do."""
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


def _read_header(path: str, stream: IO[bytes], nbytes: int) -> dict[str, _Found]:
    """https://github.com/huggingface/safetensors#format"""
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(LONGEST_HEADER, nbytes - 8):
        raise CheckpointError(f"{path} is not a safetensors file, or was not written to its end.")
    tensors = {}
    try:
        plain = json.loads(stream.read(length))
        plain.pop("__metadata__", None)
        for name, entry in plain.items():
            found = _Found(_DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            end = found.offset + math.prod(found.shape) * found.dtype.itemsize
            if end != 8 + length + entry["data_offsets"][1] or end > nbytes:
                raise CheckpointError(f"{path} is damaged, or was not written to its end: {name!r} ends at {end}.")
            tensors[name] = found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {type(error).__name__}: {error}.") from error
    return tensors


# -- the module


@dataclass(eq=False)
class _Target:
    """A tensor of a module, and where it stands; a tied one stands in several places."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def materialize(self, construction: Construction | None, device: torch.device) -> Tensor:
        """A tensor with memory in place of one on the meta device."""
        meta = self.tensor
        made: Tensor
        if not isinstance(meta, Parameter):
            made = torch.empty_like(meta, device=device)
        elif construction is not None and meta.numel():
            made = construction.materialize(meta, device)
        else:
            made = Parameter(torch.empty_like(meta, device=device), meta.requires_grad)
        for tensors, name in self.places:
            tensors[name] = made
        return made


class _Match(NamedTuple):
    pairs: list[tuple[_Target, PretrainedTensor]]
    left: Left


def _targets(module: Module) -> list[_Target]:
    """What `module.state_dict()` would hold of tensors; that itself would read them."""
    found: dict[int, _Target] = {}

    def note(inner: Module, prefix: str, name: str, tensors: dict[str, Any]) -> None:
        target = found.setdefault(id(tensors[name]), _Target(tensors[name]))
        target.names.append(as_written(f"{prefix}.{name}" if prefix else name))
        target.places.append((tensors, name))

    for prefix, inner in module.named_modules(remove_duplicate=False):
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                note(inner, prefix, name, inner._parameters)
        for name, buffer in inner._buffers.items():
            if buffer is not None and name not in inner._non_persistent_buffers_set:
                note(inner, prefix, name, inner._buffers)
    return list(found.values())


def _match(module: Module, files: _Files, rename: Rename, strict: bool) -> _Match:
    """Raises CheckpointError, with all names, for what does not fit."""
    sources: dict[str, PretrainedTensor] = {}
    wrong = []
    for name, tensor in files.tensors.items():
        renamed = rename(name)
        if renamed in sources:
            wrong.append(f"{sources[renamed].name!r} and {name!r} would both be {renamed!r}")
        elif renamed is not None:
            sources[renamed] = tensor
    targets, pairs, missing = _targets(module), [], []
    for target in targets:
        here = [name for name in target.names if name in sources]
        wrong += [told for name in here for told in _misfits(name, target.tensor, sources[name])]
        if here:
            pairs.append((target, sources[here[-1]]))  # as `load_state_dict` copies a tied one
        else:
            missing.append(target.names[0])
    known = {name for target in targets for name in target.names}
    surplus = [name for name in sources if name not in known]
    if strict:
        wrong += [f"missing in the files: {missing}"] * bool(missing)
        wrong += [f"in the files, and not in the module: {surplus}"] * bool(surplus)
    if wrong:
        raise CheckpointError(f"the module and {files.place} do not fit: {'; '.join(wrong)}. {_advice(strict)}")
    return _Match(pairs, Left(missing, surplus))


def _misfits(name: str, own: Tensor, source: PretrainedTensor) -> Iterator[str]:
    if tuple(own.shape) != source.shape:
        yield f"{name!r} is {source.shape} in the files and {tuple(own.shape)} in the module"
    elif not torch.can_cast(source.dtype, own.dtype):
        yield f"{name!r} is {source.dtype} in the files and {own.dtype} in the module"


def _advice(strict: bool) -> str:
    told = "rename= maps the names in the files to the module's (None leaves one out)"
    return f"{told}; strict=False passes over what is missing or surplus." if strict else f"{told}."
