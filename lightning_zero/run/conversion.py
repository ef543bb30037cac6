"""`Conversion`: makes of the tensors in a published model's files those of transformers' present class of it.

Since transformers 5 many of its models have tensors of other names than their files: one of all experts, or three that
lie in one. It knows which (`get_model_conversion_mapping`), and its own `from_pretrained` converts them whole. Nearly
all are made of others that lie one after another. Of these each rank reads what it keeps:

    files   experts.0.gate (I, H)   experts.0.up (I, H)   experts.1.gate   ...
    model   experts.gate_up (E, 2 I, H):   gate 0 | up 0 | gate 1 | up 1   ...
"""

import copy
import importlib
import math
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Module

from lightning_zero.run.pretrained_files import InFile, PretrainedTensor
from lightning_zero.shards.extents import Extent

_LOADING = "transformers.core_model_loading"  # since transformers 5
_MODELS = "transformers.modeling_utils"
_UNEXPECTED = {  # by how the name of a buffer ends: names that older files have for it, and that nobody needs
    "rotary_emb.inv_freq": r"rotary_emb\.inv_freq",
    "position_ids": r"(^|\.)position_ids$",
}


class _Run(NamedTuple):
    """Elements ``[start, start + numel)`` of a tensor in a file, in C order."""

    tensor: PretrainedTensor
    start: int
    numel: int


@final
class Joined(InFile):
    """A tensor whose elements, in C order, are `runs` of others, joined."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, runs: Sequence[_Run]) -> None:
        super().__init__(name, shape, dtype, runs[0].tensor.place)
        self.runs = runs

    @classmethod
    def of(cls, tensor: PretrainedTensor) -> "Joined":
        return cls(tensor.name, tensor.shape, tensor.dtype, [_Run(tensor, 0, math.prod(tensor.shape))])

    def read(self, extent: Extent, into: Tensor) -> None:
        begin = 0
        for tensor, start, numel in self.runs:
            low, high = max(extent.start, begin), min(extent.stop, begin + numel)
            if low < high:
                at = start + low - begin
                part = Extent.of_whole(tensor.name, tensor.shape, at, at + high - low)
                tensor.read(part, into[low - extent.start : high - extent.start])
            begin += numel


@final
class Converted(InFile):
    """A tensor that transformers makes of others, which it needs whole."""

    def __init__(self, name: str, shape: tuple[int, ...], made_by: "_Converter") -> None:
        first = made_by.first
        super().__init__(name, shape, first.dtype, first.place)
        self._made_by = made_by

    def read(self, extent: Extent, into: Tensor) -> None:
        made = self._made_by.convert()[self.name]
        if tuple(made.shape) != self.shape:
            told = f"{self.name!r} is {self.shape} in the module"
            raise RuntimeError(f"{told}, and transformers makes {tuple(made.shape)} of what is in the files")
        into.copy_(made.view(-1)[extent.start : extent.stop])


@final
class Conversion:
    """What transformers does to the tensors in the files of `model`, which has tensors of these shapes, by name."""

    def __init__(self, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._loading: Any = sys.modules[_LOADING]
        transforms = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
        self._renamings = [each for each in transforms if isinstance(each, self._loading.WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, self._loading.WeightConverter)]
        self._model = model
        self._shapes = shapes

    @classmethod
    def of(cls, module: Module, shapes: Mapping[str, tuple[int, ...]]) -> "Conversion | None":
        """Returns that of a model of transformers 5 or newer; None for any other module."""
        is_there = {_LOADING, _MODELS} <= sys.modules.keys()
        is_known = is_there and isinstance(module, sys.modules[_MODELS].PreTrainedModel)
        return cls(module, shapes) if is_known else None

    def convert(self, files: Mapping[str, PretrainedTensor]) -> dict[str, InFile]:
        """Returns tensors of the model, by name, and those in the files that it has none for."""
        found: dict[str, InFile] = {}
        converters: dict[str, _Converter] = {}
        latest: dict[str, dict[str, Tensor]] = {}
        for name in sorted(files, key=self._loading.dot_natural_key):  # in which order experts are stacked
            target, converter, pattern = self._target_of(name)
            if converter is None:
                found.setdefault(target, files[name])
                continue
            if target not in converters:
                converters[target] = _Converter(target, converter, self._model, latest)
            converters[target].add(pattern, name, files[name])
        for each in converters.values():
            found |= each.made(self._shapes)
        return {
            name: tensor for name, tensor in found.items() if name in self._shapes or not self._is_passed_over(name)
        }

    def _target_of(self, name: str) -> tuple[str, Any, str]:
        """Returns the name in the model, and if the tensor is converted, the converter and the pattern by which that
        knows it."""
        target, knows, pattern = name, None, ""
        for renaming in self._renamings:
            target, _ = renaming.rename_source_key(target)
        for converter in self._converters:
            target, found = converter.rename_source_key(target)
            if found is not None:
                knows, pattern = converter, found
                break
        target = self._with_prefix(target)
        if target not in self._shapes and (as_is := self._with_prefix(name)) in self._shapes:
            return as_is, None, ""
        return target, knows, pattern

    def _with_prefix(self, name: str) -> str:
        """Adds or takes away the name of the base model, where the files are of a model with or without a head."""
        prefix = f"{self._model.base_model_prefix}."
        bare = name.removeprefix(prefix)
        return next((it for it in (name, bare, prefix + name) if it in self._shapes), name)

    def _is_passed_over(self, name: str) -> bool:
        """Whether it is one of those that no model needs, which `from_pretrained` does not count as surplus either."""
        buffers = [name for name, _ in self._model.named_buffers()]
        patterns = [*(self._model._keys_to_ignore_on_load_unexpected or ())]
        patterns += [old for end, old in _UNEXPECTED.items() if any(buffer.endswith(end) for buffer in buffers)]
        return any(re.search(pattern, name) for pattern in patterns)


@final
class _Converter:
    """What is made of some tensors by one of transformers' converters; `target` is the first that is made. The `latest`
    that was made whole, by target, is kept for the others that are made with it, and no other: it takes memory."""

    def __init__(self, target: str, converter: Any, model: Any, latest: dict[str, dict[str, Tensor]]) -> None:
        self._target, self._converter, self._model, self._latest = target, converter, model, latest
        self._sources: defaultdict[str, dict[str, PretrainedTensor]] = defaultdict(dict)  # by pattern and name

    def add(self, pattern: str, name: str, tensor: PretrainedTensor) -> None:
        self._sources[pattern][name] = tensor

    @property
    def first(self) -> PretrainedTensor:
        return next(tensor for sources in self._sources.values() for tensor in sources.values())

    def made(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, InFile]:
        """Returns what is made, by name. Where it has to be made whole, it has the shape that the model wants."""
        names = self._names(shapes)
        joined = self._join()
        if joined is not None and len(joined) == len(names):
            return {name: Joined(name, it.shape, it.dtype, it.runs) for name, it in zip(names, joined, strict=True)}
        return {name: Converted(name, shapes[name], self) for name in names if name in shapes}

    def _names(self, known: Collection[str]) -> list[str]:
        first, *others = self._converter.target_patterns
        before, found, after = self._target.partition(first)
        names = [self._target, *(before + other + after for other in others if found)]
        return names if all(name in known for name in names) else [self._target]

    def convert(self) -> dict[str, Tensor]:
        """Returns all that is made, by name."""
        if self._target not in self._latest:
            self._latest.clear()
            converter = copy.deepcopy(self._converter)
            for pattern, sources in self._sources.items():
                for name, tensor in sources.items():
                    converter.add_tensor(self._target, name, pattern, tensor.whole())
            made = converter.convert(self._target, model=self._model, config=self._model.config)
            plain = {name: it[0] if isinstance(it, list) else it for name, it in made.items()}
            self._latest[self._target] = {name: it.contiguous() for name, it in plain.items()}
        return self._latest[self._target]

    def _join(self) -> list[Joined] | None:
        """Returns what is made as runs of what is in the files; None if it is none."""
        patterns = [pattern for pattern in self._converter.source_patterns if pattern in self._sources]
        values = [[Joined.of(tensor) for tensor in self._sources[pattern].values()] for pattern in patterns]
        for operation in self._converter.operations:
            match type(operation).__name__, operation:
                case "MergeModulelist", merge if merge.dim == 0:
                    joined = [_stacked(tensors) for tensors in values]
                case "Concatenate", concatenate:
                    joined = [_concatenated([tensor for tensors in values for tensor in tensors], concatenate.dim)]
                case "Chunk", chunk if (
                    chunk.dim == 0 and len(values) == 1 and not getattr(chunk, "num_shards_attribute", None)
                ):
                    joined = _chunked(values[0][0], len(self._converter.target_patterns))
                case _:
                    return None
            values = [[it] for it in joined if it is not None]
            if len(values) < len(joined):
                return None
        return [tensor for tensors in values for tensor in tensors]


def _is_one_kind(tensors: Sequence[Joined], dim: int | None = None) -> bool:
    """Whether all have one dtype and one shape, but for the size of `dim`."""
    kinds = {(it.dtype, tuple(size for at, size in enumerate(it.shape) if at != dim)) for it in tensors}
    return len(kinds) == 1


def _stacked(tensors: Sequence[Joined]) -> Joined | None:
    if not _is_one_kind(tensors):
        return None
    first, runs = tensors[0], [run for tensor in tensors for run in tensor.runs]
    return Joined(first.name, (len(tensors), *first.shape), first.dtype, runs)


def _concatenated(tensors: Sequence[Joined], dim: int) -> Joined | None:
    """Concatenates along `dim`. In C order, the tensors take turns with each index of the dimensions before."""
    turns = math.prod(tensors[0].shape[:dim])
    if not _is_one_kind(tensors, dim) or any(len(tensor.runs) % turns for tensor in tensors):
        return None
    each = [len(tensor.runs) // turns for tensor in tensors]
    runs = [
        run
        for turn in range(turns)
        for tensor, count in zip(tensors, each, strict=True)
        for run in tensor.runs[turn * count : (turn + 1) * count]
    ]
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return Joined(tensors[0].name, tuple(shape), tensors[0].dtype, runs)


def _chunked(tensor: Joined, number: int) -> list[Joined | None]:
    """Cuts a tensor along its first dimension, evenly."""
    if len(tensor.runs) > 1 or tensor.shape[0] % number:
        return [None]
    (source, start, numel), shape = tensor.runs[0], (tensor.shape[0] // number, *tensor.shape[1:])
    bounds = accumulate([numel // number] * number, initial=start)
    return [Joined(tensor.name, shape, tensor.dtype, [_Run(source, at, stop - at)]) for at, stop in pairwise(bounds)]
