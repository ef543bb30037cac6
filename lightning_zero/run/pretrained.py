"""Loads weights of a trained model from safetensors files, of which every rank reads what it keeps.

file      header | embed.weight | block.0.weight | ...         the header has names, dtypes, shapes and offsets
rank 0             ====           =======                      rows or pieces, at every stage that shards parameters
rank 1                 ====              =======
"""

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_zero.checkpoint.folder import CheckpointError, Folder
from lightning_zero.device import HOST
from lightning_zero.run.construction import Construction, parameter_like
from lightning_zero.run.conversion import Conversion
from lightning_zero.run.engine import Engine
from lightning_zero.run.pretrained_files import InFile, PretrainedTensor, open_all
from lightning_zero.shards.units import as_written
from lightning_zero.torch_private import buffers_in, edits_of, saved_tensors_in
from lightning_zero.views.lazy import LazyTensor
from lightning_zero.wire.comm import Comm, failing_together
from lightning_zero.wording import few_of

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
    What transformers 5 has otherwise in its models than in published files is converted, see `conversion`.

    Args:
        module: its `state_dict` has the names in the files, unless it is a model of transformers 5. One name of a tied
            parameter is enough.
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
) -> tuple[list[tuple[_Target, InFile]], Left]:
    """Pairs the tensors of a module with those in files; raises CheckpointError, with all names, if some do not fit."""
    files: dict[str, PretrainedTensor] = {}
    wrong = []
    for name, tensor in open_all(place, opened).items():
        renamed = rename(name)
        if renamed in files:
            wrong.append(f"{files[renamed].name!r} and {name!r} would both be {renamed!r}")
        elif renamed is not None:
            files[renamed] = tensor
    targets, pairs, missing = _targets(module), [], []
    conversion = Conversion.of(module, {name: tuple(it.tensor.shape) for it in targets for name in it.names})
    sources: Mapping[str, InFile] = files if conversion is None else conversion.convert(files)
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


def _misfits(name: str, own: Tensor, source: InFile) -> Iterator[str]:
    if tuple(own.shape) != source.shape:
        yield f"{name!r} is {source.shape} in the files and {tuple(own.shape)} in the module"
    elif not torch.can_cast(source.dtype, own.dtype):
        yield f"{name!r} is {source.dtype} in the files and {own.dtype} in the module"
