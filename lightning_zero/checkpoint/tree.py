"""A checkpoint's nested containers as JSON and back; tensors leave it for the shards, and nothing is pickled.

What JSON knows is written as it is. Everything else is an object with the key ``"$"`` that says what it stands for:

    {"$": "tensor", "name": "model:net.0.weight"}      values in the shards
    {"$": "tuple", "items": [1, 2]}                            and set, deque, dict with other keys than strings ...
    {"$": "composed", "name": "torchao...", "parts": {}, ...}   8-bit state: codes, scales and a table
    {"$": "objects", "number": 0, "class": "app.Tokenizer"}     pickled in a file of its own, read on opt-in only
"""

import argparse
import base64
import importlib
import json
import math
import pathlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, final

import numpy
import torch
from torch import Tensor
from torch.serialization import get_safe_globals

from lightning_zero.run.spread import WHOLE
from lightning_zero.tiers.composed import is_composed, taken_apart
from lightning_zero.views.lazy import LazyTensor, OfOneRank, Partial, Source, Spread, materialize

TAG = "$"
VERSIONS = "_metadata"  # of modules, which torch keeps beside a `state_dict`
OBJECTS = "objects"  # the kind of leaf that needs the opt-in
COMPOSED = "composed"  # a tensor that is made of others, of a class that torch may load too

# What numpy calls its dtypes that every machine has, and torch too. (Long doubles have no JSON; others are not plain.)
_NUMPY = {"bool", "complex64", "complex128", "float16", "float32", "float64"} | {
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}

_TORCHAO = "torchao.optim"  # tells torch what may be loaded of it when it is imported
_CLASSES = {  # of hyper-parameters, by the name that Lightning files under "hparams_type"
    "lightning.fabric.utilities.data.AttributeDict",
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
}


def full_name(kind: type) -> str:
    """Such as ``"torch.nn.modules.linear.Linear"``."""
    return f"{kind.__module__}.{kind.__qualname__}"


def dtype_named(name: str) -> torch.dtype:
    """`torch.float32` of ``"float32"``; raises ValueError when torch has no such dtype."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return found


def _device(name: Any) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:  # not for `Decoder.decode` to catch: a damaged checkpoint is one too
        raise ValueError(f"{name!r} is not a device of torch") from None


def _class(name: str) -> Any:
    """One of the few classes that a checkpoint may name; a plain container where its package is not installed."""
    if name not in _CLASSES:
        raise ValueError(f"a checkpoint may not name the class {name!r}")
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError:
        return list if attribute == "ListConfig" else dict


def _class_of_tensors(name: str) -> Any:
    """A class of composed tensors, if a package that has been imported has told torch that it may be loaded."""
    if name.startswith(_TORCHAO + "."):
        with suppress(ImportError):
            importlib.import_module(_TORCHAO)
    for known in get_safe_globals():
        if isinstance(known, type) and issubclass(known, Tensor) and full_name(known) == name:
            return known
    raise ValueError(f"a tensor of the class {name!r} can be read when its package has been imported")


class _Stored(NamedTuple):
    """A composed tensor as it is written."""

    name: str  # of its class
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[str, Tensor]
    context: Any


@final
class _ComposedSource(Source):
    """Makes a composed tensor when it is wanted: only who goes on with it needs its package."""

    def __init__(self, place: str, stored: _Stored) -> None:
        super().__init__(place + WHOLE, stored.shape, stored.dtype)
        self._stored = stored

    def whole(self) -> Tensor:
        parts = {name: materialize(part) for name, part in self._stored.parts.items()}
        made_by, shape = _class_of_tensors(self._stored.name), self._stored.shape
        stride = torch.empty(shape, device="meta").stride()
        made: Tensor = made_by.__tensor_unflatten__(parts, self._stored.context, shape, stride)
        return made


def _instance(name: str, of: Any) -> Any:
    made_by = _class(name)
    try:
        return made_by(of)
    except Exception as error:  # whatever a constructor raises for what it would never have made
        raise ValueError(f"this is no instance of {name}: {error}") from error


def _plain(value: Any) -> Any:
    """The contents of a configuration object as plain containers, interpolations as they were written."""
    if hasattr(value, "_get_node"):
        return importlib.import_module("omegaconf").OmegaConf.to_container(value, resolve=False)
    return dict(value)


def _number(dtype: str, value: Any) -> Any:
    if dtype not in _NUMPY:  # numpy.void(10**10) would be memory
        raise ValueError(f"{dtype!r} is not a dtype of numbers")
    return numpy.dtype(dtype).type(value)


class _Kind(NamedTuple):
    """How a value becomes an object of JSON, and comes back."""

    fits: type | Callable[[Any], bool]  # values of this very type, or for which this is true
    fields: Sequence[str]  # of the object, beside "$"
    split: Callable[[Any], Sequence[Any]]  # value -> what the fields hold, each to be encoded in its turn
    join: Callable[..., Any]  # the reverse

    def holds(self, value: Any) -> bool:
        return type(value) is self.fits if isinstance(self.fits, type) else self.fits(value)


_KINDS = {
    # Only those that JSON lacks; repr hides the sign of NaN.
    "float": _Kind(float, ["value"], lambda v: [("-" if math.copysign(1, v) < 0 else "") + repr(abs(v))], float),
    "bytes": _Kind(bytes, ["value"], lambda v: [base64.b64encode(v).decode()], base64.b64decode),
    "complex": _Kind(complex, ["value"], lambda v: [repr(v)], complex),
    "timedelta": _Kind(timedelta, ["value"], lambda v: [[v.days, v.seconds, v.microseconds]], lambda v: timedelta(*v)),
    "path": _Kind(lambda v: isinstance(v, pathlib.PurePath), ["value"], lambda v: [str(v)], pathlib.Path),
    "dtype": _Kind(torch.dtype, ["value"], lambda v: [str(v).removeprefix("torch.")], dtype_named),
    "device": _Kind(torch.device, ["value"], lambda v: [str(v)], _device),
    "tuple": _Kind(tuple, ["items"], lambda v: [list(v)], tuple),
    "size": _Kind(torch.Size, ["items"], lambda v: [list(v)], torch.Size),
    "deque": _Kind(deque, ["items", "maxlen"], lambda v: [list(v), v.maxlen], deque),
    "set": _Kind(set, ["items"], lambda v: [sorted(v, key=repr)], set),
    "frozenset": _Kind(frozenset, ["items"], lambda v: [sorted(v, key=repr)], frozenset),
    "namespace": _Kind(argparse.Namespace, ["of"], lambda v: [vars(v)], lambda of: argparse.Namespace(**of)),
    "numpy": _Kind(
        lambda v: isinstance(v, numpy.generic) and v.dtype.name in _NUMPY,
        ["dtype", "value"],
        lambda v: [v.dtype.name, v.item()],
        _number,
    ),
    "array": _Kind(
        lambda v: type(v) is numpy.ndarray and v.dtype.name in _NUMPY and v.dtype.isnative,
        ["of"],
        lambda v: [torch.from_numpy(v.copy())],
        lambda tensor: tensor.numpy(),
    ),
    "class": _Kind(
        lambda v: isinstance(v, type) and full_name(v) in _CLASSES, ["name"], lambda v: [full_name(v)], _class
    ),
    "instance": _Kind(
        lambda v: full_name(type(v)) in _CLASSES, ["class", "of"], lambda v: [full_name(type(v)), _plain(v)], _instance
    ),
}
_MAPPINGS = {"dict": dict, "ordered": OrderedDict}  # written as pairs


@final
class Encoder:
    """Turns values into JSON, and gathers what does not fit in."""

    def __init__(self) -> None:
        # By name; one found in several places, as the same object or over the same memory, has one name.
        self.tensors: dict[str, Tensor] = {}
        self.partials: dict[str, Any] = {}  # what was found as `Partial`, encoded, by name
        self.objects: list[tuple[str, Any]] = []  # what nothing else fits, with the place where it was found
        self._names: dict[Any, str] = {}  # what `_identity` says -> the name it has
        self._in_partial = False

    def encode(self, value: Any, place: str = "") -> Any:
        """`value` as JSON. `place` says where it stands, for names and messages."""
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return value
        if type(value) is list:
            return [self.encode(item, f"{place}/{number}") for number, item in enumerate(value)]
        if type(value) is dict and TAG not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, f"{place}/{key}" if place else key) for key, item in value.items()}
        if type(value) is Partial:
            return self._partial(value, place)
        for kind, mapping in _MAPPINGS.items():
            if type(value) is mapping:
                versions = {VERSIONS: dict(vars(value)[VERSIONS])} if VERSIONS in getattr(value, "__dict__", ()) else {}
                return {TAG: kind, "items": self._items(value, place), **versions}
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        for kind, row in _KINDS.items():
            if row.holds(value):
                parts = zip(row.fields, row.split(value), strict=True)
                return {TAG: kind, **{field: self.encode(part, place) for field, part in parts}}
        return self._object(value, place)

    def _items(self, value: Mapping[Any, Any], place: str) -> list[Any]:
        return [[self.encode(key, place), self.encode(item, f"{place}/{key}")] for key, item in value.items()]

    def _partial(self, value: Partial, place: str) -> Any:
        names, self._names, self._in_partial = self._names, {}, True
        try:
            self.partials[value.name] = self._items(value, place)
        finally:
            self._names, self._in_partial = names, False
        return {TAG: "partial", "name": value.name}

    def _tensor(self, tensor: Tensor, place: str) -> Any:
        if isinstance(tensor, LazyTensor) and isinstance(tensor.source, Spread):
            return self._spread(tensor)
        if is_composed(tensor) and type(tensor) in get_safe_globals():
            return {TAG: COMPOSED, **self._parts(tensor, place)}
        if not (isinstance(tensor, LazyTensor) or _is_plain(tensor)):
            return self._object(tensor, place)
        identity = _identity(tensor)
        if identity not in self._names:
            name, number = place, 1
            while name in self.tensors:  # two places may be written alike: {"a/b": x, "a": {"b": y}}
                number += 1
                name = f"{place}#{number}"
            if self._in_partial:  # it is of this rank alone: rank 0, which writes plain tensors, may not have it
                values = tensor.source.whole() if isinstance(tensor, LazyTensor) else tensor.detach()
                tensor = LazyTensor(OfOneRank(name, values))
            self._names[identity] = name
            self.tensors[name] = tensor
        return {TAG: "tensor", "name": self._names[identity]}

    def _parts(self, tensor: Tensor, place: str) -> dict[str, Any]:
        parts, context = taken_apart(tensor)
        stored = _Stored(full_name(type(tensor)), tuple(tensor.shape), tensor.dtype, parts, context)
        return {field: self.encode(value, place) for field, value in stored._asdict().items()}

    def _spread(self, tensor: LazyTensor) -> Any:
        """All ranks write it, and must agree on its name."""
        name = tensor.source.name
        held = self.tensors.setdefault(name, tensor)
        if not (isinstance(held, LazyTensor) and isinstance(held.source, Spread)):
            raise ValueError(f"the checkpoint has a tensor under the key {name!r}, which names a part of the model")
        return {TAG: "tensor", "name": name}

    def _object(self, value: Any, place: str) -> Any:
        if self._in_partial:  # rank 0 pickles its own, and would count others' in
            raise TypeError(f"{place} is a {full_name(type(value))}, and what single ranks have must be plain data")
        self.objects.append((place, value))
        return {TAG: OBJECTS, "number": len(self.objects) - 1, "class": full_name(type(value))}


def _is_plain(tensor: Tensor) -> bool:
    """Whether shape, dtype and values say all about it."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _identity(tensor: Tensor) -> Any:
    """The same for tensors that are one: tied ones, of which `Module.state_dict` gives a view for each place."""
    if isinstance(tensor, LazyTensor):
        return id(tensor.source)
    return (
        *(tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()),
        *(tensor.dtype, tensor.is_conj(), tensor.is_neg()),
    )


def merge(partials: Iterable[list[Any]]) -> Any:
    """The encoded items of a `Partial` from each rank, in rank order, as one encoded dictionary; what several have is
    taken from the first."""
    merged: dict[Any, dict[str, list[Any]]] = {}
    others: dict[str, Any] = {}  # by keys that are no numbers, as some optimizers count
    for items in partials:
        for key, state in items:
            if isinstance(key, str):
                others.setdefault(key, state)
                continue
            held = merged.setdefault(key, {})
            for name, leaf in _items_of(state):
                held.setdefault(json.dumps(name), [name, leaf])
    entries = [[key, _dict_of(list(merged[key].values()))] for key in sorted(merged)]
    return {TAG: "dict", "items": [*map(list, others.items()), *entries]}


def _items_of(encoded: Mapping[str, Any]) -> list[Any]:
    """Of an encoded dictionary, whichever way it was written."""
    return encoded["items"] if TAG in encoded else [[key, item] for key, item in encoded.items()]


def _dict_of(items: list[Any]) -> dict[str, Any]:
    is_simple = all(isinstance(key, str) and key != TAG for key, _ in items)
    return dict(items) if is_simple else {TAG: "dict", "items": items}


def parted(encoded: Mapping[str, Any], keys: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of an encoded dictionary the entries with these keys, and the others; both encoded too."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for key, value in _items_of(encoded):
        parts[0 if isinstance(key, str) and key in keys else 1].append([key, value])
    return _dict_of(parts[0]), _dict_of(parts[1])


@final
class Decoder:
    """The reverse of `Encoder`."""

    def __init__(self, tensor: Callable[[str], Tensor], partials: Mapping[str, Any], objects: list[Any] | None) -> None:
        self._tensor = tensor  # makes the tensor of a name
        self._partials = dict(partials)  # encoded dictionaries by the name of the `Partial` they were
        self._decoded_partials: dict[str, Any] = {}
        self._objects = objects  # what was pickled, by number; None where the user has not opted in
        self.left_out: list[str] = []  # classes of objects that were not read

    def decode(self, value: Any) -> Any:
        """The value that was encoded; raises ValueError for what no `Encoder` writes.

        Objects that are not read are left out of the dictionary or set that held them. In a sequence None stands for
        them: the others keep their places.
        """
        if isinstance(value, list):
            return [self.decode(item) if self._is_there(item) else None for item in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.decode(item) for key, item in value.items() if self._is_there(item)}
        try:
            return self._decode_kind(value[TAG], value)
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"this is no {value[TAG]}: {type(error).__name__}: {error}") from error

    def _decode_kind(self, kind: Any, value: dict[str, Any]) -> Any:
        if kind == "tensor":
            return self._named_tensor(value)
        if kind == "partial":
            return self._partial(value["name"])
        if kind == COMPOSED:
            stored = _Stored(**{field: self.decode(value[field]) for field in _Stored._fields})
            return LazyTensor(_ComposedSource(stored.name, stored))
        if kind == OBJECTS:
            return None if self._objects is None else self._objects[value["number"]]
        if not (isinstance(kind, str) and (kind in _KINDS or kind in _MAPPINGS)):
            raise ValueError(f"{kind!r} is not a kind of value that this version knows")
        if kind in _MAPPINGS:
            there = [(key, item) for key, item in value["items"] if self._is_there(key) and self._is_there(item)]
            made = _MAPPINGS[kind]((self.decode(key), self.decode(item)) for key, item in there)
            if VERSIONS in value and isinstance(made, OrderedDict):
                vars(made)[VERSIONS] = OrderedDict((name, dict(version)) for name, version in value[VERSIONS].items())
            return made
        if kind in ("set", "frozenset"):
            value = {**value, "items": [item for item in value["items"] if self._is_there(item)]}
        row = _KINDS[kind]
        return row.join(*(self.decode(value[field]) for field in row.fields))

    def _is_there(self, item: Any) -> bool:
        if self._objects is not None or not isinstance(item, dict) or item.get(TAG) != OBJECTS:
            return True
        self.left_out.append(str(item.get("class")))
        return False

    def _named_tensor(self, value: dict[str, Any]) -> Tensor:
        try:
            return self._tensor(value["name"])
        except KeyError:
            raise ValueError(f"there is no tensor {value.get('name')!r}") from None

    def _partial(self, name: str) -> Any:
        if name not in self._decoded_partials:  # taken out first: one inside itself is not found
            self._decoded_partials[name] = self.decode(self._partials.pop(name))
        return self._decoded_partials[name]
