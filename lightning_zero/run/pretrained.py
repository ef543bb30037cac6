"""Loads weights of a trained model from safetensors files, of which every rank reads what it keeps.

file      header | embed.weight | block.0.weight | ...         the header has names, dtypes, shapes and offsets
rank 0             ====           =======                      rows or pieces, at every stage that shards parameters
rank 1                 ====              =======
"""

import json
import math
import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_zero.checkpoint.export import INDEX, SINGLE
from lightning_zero.checkpoint.folder import CheckpointError, Folder
from lightning_zero.checkpoint.shard import LONGEST_HEADER, SAFE_NAMES, fill
from lightning_zero.device import HOST
from lightning_zero.run.construction import Construction, parameter_like
from lightning_zero.run.engine import Engine
from lightning_zero.shards.extents import Extent
from lightning_zero.shards.units import as_written
from lightning_zero.torch_private import buffers_in, edits_of, saved_tensors_in
from lightning_zero.views.lazy import LazyTensor, Stored
from lightning_zero.wire.comm import Comm, failing_together
from lightning_zero.wording import few_of

_DTYPES = {name: dtype for dtype, name in SAFE_NAMES.items()}
_SUFFIX = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CHUNK_BYTES = 1 << 20  # converted to another dtype or device at a time

Rename = Callable[[str], str | None]
_Place = tuple[MutableMapping[str, Any], str]  # a dictionary of tensors and a key


class Left(NamedTuple):
    """Names of tensors without a counterpart, which stay as they are without `strict`."""

    missing: list[str]  # in the module and not in the files
    surplus: list[str]  # in the files and not in the module


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
    """Loads the values in `path` into the parameters and persistent buffers of `module`, each in its own dtype. Call it
    on every rank. Where parameters rest as shards, every rank reads its part, and the model is never whole.

    Tensors on the meta device are replaced, as `Module.to_empty` does, so call it before optimizers are made. Buffers
    there that no file has get their values of the model's `_init_weights`, if it has one, as transformers' models do.

    Args:
        module: its `state_dict` has the names in the files. One name of a tied parameter is enough.
        path: a ``.safetensors`` file, or a folder: the files in its index (Hugging Face's ``*.index.json``), else its
            ``model.safetensors``, else all such files in it. On any file system that fsspec supports.
        comm: all ranks.
        engine: holds the parameters, if there is one.
        construction: holds the parameters until there is an engine. Replaces those on the meta device by shards.
        device: where tensors on the meta device are made without a construction.
        rename: called with each name in the files; returns the name in `module`, or None to leave the tensor out.
        strict: whether all tensors of the module and of the files must have a counterpart.

    Returns:
        The names of those that have none, without `strict`.

    Raises:
        RuntimeError: the same on every rank: for tensors that are missing, surplus, of another shape or of a dtype
            that cannot be cast (all of them are named), for files that are no safetensors, when one rank cannot read.
    """
    reading = nullcontext() if engine is None else engine.states.loading(lambda: None)
    with ExitStack() as opened, reading, failing_together(comm, "loading weights"):
        pairs, left = _match(module, Folder(path), opened, rename or (lambda name: name), strict)
        with HOST, torch.no_grad():  # as a model is made; it may be loaded under another default device
            _compute_unsaved(module, device)
        for target, source in sorted(pairs, key=lambda pair: pair[1].place):
            tensor = target.materialize(construction, device) if target.tensor.is_meta else target.tensor
            with torch.no_grad():
                tensor.copy_(LazyTensor(source))
    return left


# -- files


@final
class PretrainedTensor(Stored):
    """A tensor in a safetensors file."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, place: tuple[str, int], stream: IO[bytes]
    ) -> None:
        super().__init__(name, shape, dtype)
        self.place = place  # path of the file, offset in bytes
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

    def whole(self) -> Tensor:
        return self.for_loading(torch.empty(self.shape, dtype=self.dtype, device=HOST))

    def for_loading(self, target: Tensor) -> Tensor:
        """Reads into `target` itself if that is contiguous, so that the tensor is not in memory twice."""
        into = target.detach()
        if not into.is_contiguous():
            return self.whole()
        self.read(Extent.of_whole(self.name, self.shape), into.view(-1))
        return target


def _open_all(place: Folder, opened: ExitStack) -> dict[str, PretrainedTensor]:
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


# -- the module


@dataclass(eq=False)
class _Target:
    """A tensor of a module; a tied one has several names."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    places: list[_Place] = field(default_factory=list)

    def materialize(self, construction: Construction | None, device: torch.device) -> Tensor:
        """Replaces a tensor on the meta device by one with memory, which it returns."""
        meta = self.tensor
        made: Tensor
        if not isinstance(meta, Parameter):
            made = torch.empty_like(meta, device=device)
        elif construction is not None and meta.numel():
            made = construction.materialize(meta, device)
        else:
            made = parameter_like(meta, torch.empty_like(meta, device=device))
        for tensors, name in self.places:
            tensors[name] = made
        return made


def _targets(module: Module) -> list[_Target]:
    """Returns the tensors in `module.state_dict()`, without calling it: that would read their values."""
    found: dict[int, _Target] = {}
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for tensors, name, tensor in saved_tensors_in(inner):
            target = found.setdefault(id(tensor), _Target(tensor))
            target.names.append(as_written(f"{prefix}.{name}" if prefix else name))
            target.places.append((tensors, name))
    return list(found.values())


def _compute_unsaved(module: Module, device: torch.device, model: Any = None) -> list[_Place]:
    """Gives values to buffers on the meta device that no file has, of rotary frequencies, say: transformers' models
    compute them anew in `_init_weights`, which their own `from_pretrained` relies on. Returns where those are that
    nobody computes: they stay there.

    Comes before parameters have memory: what is done to those, too, has then no effect.
    """
    if callable(getattr(module, "_init_weights", None)):
        model = module
    unsaved = [place for child in module.children() for place in _compute_unsaved(child, device, model)]
    buffers, saved = buffers_in(module), {name for _, name, _ in saved_tensors_in(module)}
    unsaved += [(buffers, name) for name, it in buffers.items() if it is not None and it.is_meta and name not in saved]
    if not unsaved or model is None or not all(parameter.is_meta for parameter in module.parameters()):
        return unsaved
    metas = [tensors[name] for tensors, name in unsaved]
    made = [torch.empty_like(meta, device=device) for meta in metas]
    for (tensors, name), tensor in zip(unsaved, made, strict=True):
        tensors[name] = tensor
    model._init_weights(module)
    left = []
    for (tensors, name), tensor, meta in zip(unsaved, made, metas, strict=True):
        if tensors[name] is tensor and not edits_of(tensor):  # a class may do so in the module around, or not at all
            tensors[name] = meta
            left.append((tensors, name))
    return left


def _match(
    module: Module, place: Folder, opened: ExitStack, rename: Rename, strict: bool
) -> tuple[list[tuple[_Target, PretrainedTensor]], Left]:
    """Pairs the tensors of a module with those in files; raises CheckpointError, with all names, if some do not fit."""
    sources: dict[str, PretrainedTensor] = {}
    wrong = []
    for name, tensor in _open_all(place, opened).items():
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
            pairs.append((target, sources[here[-1]]))  # of a tied tensor the last, as in `load_state_dict`
        else:
            missing.append(target.names[0])
    known = {name for target in targets for name in target.names}
    surplus = [name for name in sources if name not in known]
    if strict:
        wrong += [f"missing in the files: {few_of(missing)}"] * bool(missing)
        wrong += [f"in the files, and not in the module: {few_of(surplus)}"] * bool(surplus)
    if wrong:
        advice = "rename= maps the names in the files to the module's (None leaves one out)"
        advice += "; strict=False passes over what is missing or surplus." if strict else "."
        raise CheckpointError(f"the module and {place} do not fit: {'; '.join(wrong)}. {advice}")
    return pairs, Left(missing, surplus)


def _misfits(name: str, own: Tensor, source: PretrainedTensor) -> Iterator[str]:
    if tuple(own.shape) != source.shape:
        yield f"{name!r} is {source.shape} in the files and {tuple(own.shape)} in the module"
    elif not torch.can_cast(source.dtype, own.dtype):
        yield f"{name!r} is {source.dtype} in the files and {own.dtype} in the module"
