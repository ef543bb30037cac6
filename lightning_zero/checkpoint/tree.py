"""A checkpoint's nested containers as JSON and back; tensors leave it for the shards, and nothing is pickled.

What JSON knows is written as it is. Everything else is an object with the key ``"$"`` that says what it stands for:

    {"$": "tensor", "name": "model:net.0.weight"}      values in the shards
    {"$": "tuple", "items": [1, 2]}                            and set, deque, dict with other keys than strings ...
    {"$": "objects", "number": 0, "class": "app.Tokenizer"}     pickled in a file of its own, read on opt-in only
"""

import argparse
import base64
import importlib
import json
import math
import pathlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any, final

import numpy
import torch
from torch import Tensor

from lightning_zero.views.lazy import LazyTensor, OfOneRank, Partial, Spread

TAG = "$"
OBJECTS = "objects"  # the kind of leaf that needs the opt-in

# What numpy calls its dtypes that every machine has, and torch too. (Long doubles have no JSON; others are not plain.)
_NUMPY = {"bool", "complex64", "complex128", "float16", "float32", "float64"} | {
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}

_CLASSES = {  # of hyper-parameters, by the name that Lightning files under "hparams_type"
    "lightning.fabric.utilities.data.AttributeDict",
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
}


def full_name(kind: type) -> str:
    """Such as ``"torch.nn.modules.linear.Linear"``."""
    return f"{kind.__module__}.{kind.__qualname__}"


@final
class Encoder:
    """Turns values into JSON, and gathers what does not fit in.

    Attributes:
        tensors: name -> tensor; one that is found in several places, as the same object or over the same memory, has
            one name.
        partials: what was found as `Partial`, encoded, by name.
        objects: what nothing else fits, with the place where it was found.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.partials: dict[str, Any] = {}
        self.objects: list[tuple[str, Any]] = []
        self._names: dict[Any, str] = {}  # what `_identity` says -> the name it has
        self._in_partial = False

    def encode(self, value: Any, place: str = "") -> Any:
        """`value` as JSON. `place` says where it stands, for names and messages."""
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {TAG: "float", "value": _sign_of(value) + repr(abs(value))}
        for kind, write in self._writers:
            if type(value) is kind:
                return write(self, value, place)
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if isinstance(value, pathlib.PurePath):
            return {TAG: "path", "value": str(value)}
        if isinstance(value, numpy.generic) and value.dtype.name in _NUMPY:
            return {TAG: "numpy", "dtype": value.dtype.name, "value": self.encode(value.item(), place)}
        if type(value) is numpy.ndarray and value.dtype.name in _NUMPY and value.dtype.isnative:
            return {TAG: "array", "of": self._tensor(torch.from_numpy(value.copy()), place)}
        if isinstance(value, type) and full_name(value) in _CLASSES:
            return {TAG: "class", "name": full_name(value)}
        if full_name(type(value)) in _CLASSES:
            return {TAG: "instance", "class": full_name(type(value)), "of": self.encode(_plain(value), place)}
        return self._object(value, place)

    def _tensor(self, tensor: Tensor, place: str) -> Any:
        if isinstance(tensor, LazyTensor) and isinstance(tensor.source, Spread):
            return self._spread(tensor)
        if not (isinstance(tensor, LazyTensor) or _is_plain(tensor)):
            return self._object(tensor, place)
        identity = _identity(tensor)
        if identity not in self._names:
            name = self._names[identity] = self._free_name(place)
            # What stands in a `Partial` is of this rank alone: rank 0, which writes plain tensors, may not have it.
            self.tensors[name] = LazyTensor(OfOneRank(name, _values(tensor))) if self._in_partial else tensor
        return {TAG: "tensor", "name": self._names[identity]}

    def _spread(self, tensor: LazyTensor) -> Any:
        """All ranks write it, and must agree on its name."""
        name = tensor.source.name
        held = self.tensors.setdefault(name, tensor)
        if not (isinstance(held, LazyTensor) and isinstance(held.source, Spread)):
            raise ValueError(f"the checkpoint has a tensor under the key {name!r}, which names a part of the model")
        return {TAG: "tensor", "name": name}

    def _free_name(self, place: str) -> str:
        """Two places may be written alike: ``{"a/b": x, "a": {"b": y}}``."""
        number = 1
        free = place
        while free in self.tensors:
            number += 1
            free = f"{place}#{number}"
        return free

    def _object(self, value: Any, place: str) -> Any:
        if self._in_partial:  # rank 0 pickles its own, and would count others' in
            raise TypeError(f"{place} is a {full_name(type(value))}, and what single ranks have must be plain data")
        self.objects.append((place, value))
        return {TAG: OBJECTS, "number": len(self.objects) - 1, "class": full_name(type(value))}

    def _dict(self, value: Mapping[Any, Any], place: str) -> Any:
        if TAG not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, f"{place}/{key}" if place else key) for key, item in value.items()}
        return {TAG: "dict", "items": self._items(value, place)}

    def _items(self, value: Mapping[Any, Any], place: str) -> list[Any]:
        return [[self.encode(key, place), self.encode(item, f"{place}/{key}")] for key, item in value.items()]

    def _sequence(self, value: Iterable[Any], place: str) -> list[Any]:
        return [self.encode(item, f"{place}/{number}") for number, item in enumerate(value)]

    def _partial(self, value: Partial, place: str) -> Any:
        names, self._names, self._in_partial = self._names, {}, True
        try:
            self.partials[value.name] = self._items(value, place)
        finally:
            self._names, self._in_partial = names, False
        return {TAG: "partial", "name": value.name}

    _writers: tuple[tuple[type, Callable[["Encoder", Any, str], Any]], ...] = (
        (dict, _dict),
        (list, _sequence),
        (Partial, _partial),
        (tuple, lambda self, value, place: {TAG: "tuple", "items": self._sequence(value, place)}),
        (OrderedDict, lambda self, value, place: {TAG: "ordered", "items": self._items(value, place)}),
        (set, lambda self, value, place: {TAG: "set", "items": self._sequence(sorted(value, key=repr), place)}),
        (
            frozenset,
            lambda self, value, place: {TAG: "frozenset", "items": self._sequence(sorted(value, key=repr), place)},
        ),
        (
            deque,
            lambda self, value, place: {
                TAG: "deque",
                "items": self._sequence(value, place),
                "maxlen": value.maxlen,
            },
        ),
        (argparse.Namespace, lambda self, value, place: {TAG: "namespace", "of": self._dict(vars(value), place)}),
        (bytes, lambda self, value, place: {TAG: "bytes", "value": base64.b64encode(value).decode()}),
        (complex, lambda self, value, place: {TAG: "complex", "value": repr(value)}),
        (
            timedelta,
            lambda self, value, place: {TAG: "timedelta", "value": [value.days, value.seconds, value.microseconds]},
        ),
        (torch.Size, lambda self, value, place: {TAG: "size", "items": list(value)}),
        (torch.dtype, lambda self, value, place: {TAG: "dtype", "value": str(value).removeprefix("torch.")}),
        (torch.device, lambda self, value, place: {TAG: "device", "value": str(value)}),
    )


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


def _values(tensor: Tensor) -> Tensor:
    return tensor.source.whole() if isinstance(tensor, LazyTensor) else tensor.detach()


def _plain(value: Any) -> Any:
    """The contents of a configuration object as plain containers, interpolations as they were written."""
    if hasattr(value, "_get_node"):
        return importlib.import_module("omegaconf").OmegaConf.to_container(value, resolve=False)
    return dict(value)


def merge(partials: Iterable[list[Any]]) -> Any:
    """The items that ranks have of a `Partial`, as one encoded dictionary; what several have is taken from the first.

    Args:
        partials: the encoded items of each rank, in rank order.
    """
    merged: dict[Any, dict[str, list[Any]]] = {}
    for items in partials:
        for key, state in items:
            held = merged.setdefault(key, {})
            for name, leaf in _items_of(state):
                held.setdefault(json.dumps(name), [name, leaf])
    return {TAG: "dict", "items": [[key, _dict_of(list(merged[key].values()))] for key in sorted(merged)]}


def _items_of(encoded: dict[str, Any]) -> list[Any]:
    """Of an encoded dictionary, whichever way it was written."""
    return encoded["items"] if encoded.get(TAG) == "dict" else [[key, item] for key, item in encoded.items()]


def _sign_of(value: float) -> str:
    return "-" if math.copysign(1, value) < 0 else ""  # also of NaN, whose repr hides it


def _dict_of(items: list[Any]) -> dict[str, Any]:
    is_simple = all(isinstance(key, str) and key != TAG for key, _ in items)
    return dict(items) if is_simple else {TAG: "dict", "items": items}


def parted(encoded: Mapping[str, Any], keys: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of an encoded dictionary the entries with these keys, and the others; both encoded too."""
    if TAG not in encoded:
        within = {key: value for key, value in encoded.items() if key in keys}
        return within, {key: value for key, value in encoded.items() if key not in keys}
    parts: tuple[list[Any], list[Any]] = ([], [])
    for key, value in encoded["items"]:
        parts[0 if isinstance(key, str) and key in keys else 1].append([key, value])
    return _dict_of(parts[0]), _dict_of(parts[1])


@final
class Decoder:
    """The reverse of `Encoder`.

    Args:
        tensor: makes the tensor of a name.
        partials: encoded dictionaries by the name of the `Partial` they were.
        objects: what was pickled, by number; None where the user has not opted in.
    """

    def __init__(self, tensor: Callable[[str], Tensor], partials: Mapping[str, Any], objects: list[Any] | None) -> None:
        self._tensor = tensor
        self._partials = dict(partials)
        self._decoded_partials: dict[str, Any] = {}
        self._objects = objects
        self.left_out: list[str] = []  # classes of objects that were not read

    def decode(self, value: Any) -> Any:
        """The value that was encoded. Objects that are not read are left out of the dictionary or set that held them.

        Raises:
            ValueError: for what no `Encoder` writes.
        """
        if isinstance(value, list):
            return self._sequence(value)
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.decode(item) for key, item in value.items() if self._is_there(item)}
        kind = value[TAG]
        if not (isinstance(kind, str) and kind in self._readers):
            raise ValueError(f"{kind!r} is not a kind of value that this version knows")
        try:
            return self._readers[kind](self, value)
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"this is no {kind}: {type(error).__name__}: {error}") from error

    def _is_there(self, item: Any) -> bool:
        if self._objects is not None or not isinstance(item, dict) or item.get(TAG) != OBJECTS:
            return True
        self.left_out.append(str(item.get("class")))
        return False

    def _sequence(self, items: list[Any]) -> list[Any]:
        """None stands where something is left out: the others keep their places."""
        return [self.decode(item) if self._is_there(item) else None for item in items]

    def _members(self, items: list[Any]) -> list[Any]:
        return [self.decode(item) for item in items if self._is_there(item)]

    def _items(self, value: dict[str, Any]) -> list[tuple[Any, Any]]:
        there = [(key, item) for key, item in value["items"] if self._is_there(key) and self._is_there(item)]
        return [(self.decode(key), self.decode(item)) for key, item in there]

    def _named_tensor(self, value: dict[str, Any]) -> Tensor:
        try:
            return self._tensor(value["name"])
        except KeyError:
            raise ValueError(f"there is no tensor {value.get('name')!r}") from None

    def _partial(self, value: dict[str, Any]) -> Any:
        name = value["name"]
        if name not in self._decoded_partials:  # taken out first: one inside itself is not found
            self._decoded_partials[name] = self.decode(self._partials.pop(name))
        return self._decoded_partials[name]

    def _numpy(self, value: dict[str, Any]) -> Any:
        if value["dtype"] not in _NUMPY:  # numpy.void(10**10) would be memory
            raise ValueError(f"{value['dtype']!r} is not a dtype of numbers")
        return numpy.dtype(value["dtype"]).type(self.decode(value["value"]))

    def _instance(self, value: dict[str, Any]) -> Any:
        cls, of = _class(value["class"]), self.decode(value["of"])
        try:
            return cls(of)
        except Exception as error:  # whatever a constructor raises for what it would never have made
            raise ValueError(f"this is no instance of {value['class']}: {error}") from error

    _readers: Mapping[str, Callable[["Decoder", dict[str, Any]], Any]] = {
        "tensor": _named_tensor,
        "dict": lambda self, value: dict(self._items(value)),
        "ordered": lambda self, value: OrderedDict(self._items(value)),
        "partial": _partial,
        "tuple": lambda self, value: tuple(self._sequence(value["items"])),
        "set": lambda self, value: set(self._members(value["items"])),
        "frozenset": lambda self, value: frozenset(self._members(value["items"])),
        "deque": lambda self, value: deque(self._sequence(value["items"]), value["maxlen"]),
        "namespace": lambda self, value: argparse.Namespace(**self.decode(value["of"])),
        "float": lambda self, value: float(value["value"]),
        "bytes": lambda self, value: base64.b64decode(value["value"]),
        "complex": lambda self, value: complex(value["value"]),
        "timedelta": lambda self, value: timedelta(*value["value"]),
        "path": lambda self, value: pathlib.Path(value["value"]),
        "size": lambda self, value: torch.Size(value["items"]),
        "dtype": lambda self, value: dtype_named(value["value"]),
        "device": lambda self, value: _device(value["value"]),
        "numpy": _numpy,
        "array": lambda self, value: self._named_tensor(value["of"]).numpy(),
        "class": lambda self, value: _class(value["name"]),
        "instance": _instance,
        OBJECTS: lambda self, value: self._objects[value["number"]] if self._objects is not None else None,
    }


def dtype_named(name: str) -> torch.dtype:
    """`torch.float32` of ``"float32"``.

    Raises:
        ValueError: when torch has no such dtype.
    """
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
