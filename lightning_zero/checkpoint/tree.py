"""Encodes a checkpoint's containers as JSON, and decodes them; tensors go to the shards, and nothing is pickled here.

Values that JSON has are written as they are. Any other value becomes an object whose key ``"$"`` names its kind:

    {"$": "tensor", "name": "model:net.0.weight"}               its values are in the shards
    {"$": "tuple", "items": [1, 2]}                             likewise set, deque, dict whose keys are no strings ...
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
from pkgutil import resolve_name
from typing import Any, NamedTuple, final

import numpy
import torch
from torch import Tensor
from torch.serialization import get_safe_globals

from lightning_zero.checkpoint.spread import WHOLE
from lightning_zero.tiers.composed import is_composed, taken_apart
from lightning_zero.torch_private import VERSIONS, storage_key, versions_of
from lightning_zero.views.lazy import LazyTensor, OfOneRank, Partial, Source, Spread, materialize

TAG = "$"
OBJECTS = "objects"  # the kind of a pickled object, which is read only on opt-in

# numpy's names of the dtypes that every machine and torch have. (Long doubles have no JSON; others are not plain.)
_NUMPY = {"bool", "complex64", "complex128", "float16", "float32", "float64"} | {
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}

_TORCHAO = "torchao.optim"  # importing it tells torch which of its classes may be loaded
_CLASSES = {  # classes of hyper-parameters, by the name that Lightning files under "hparams_type"
    "lightning.fabric.utilities.data.AttributeDict",
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
}


def full_name(kind: type) -> str:
    """Returns a class's name with its module, such as ``"torch.nn.modules.linear.Linear"``."""
    return f"{kind.__module__}.{kind.__qualname__}"


def dtype_named(name: str) -> torch.dtype:
    """Returns `torch.float32` for ``"float32"``; raises ValueError when torch has no such dtype."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return found


def _device(name: Any) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:  # `Decoder.decode` cannot catch this class: a damaged checkpoint is a RuntimeError, too
        raise ValueError(f"{name!r} is not a device of torch") from None


def _class(name: str) -> Any:
    """Returns one of `_CLASSES`."""
    if name not in _CLASSES:
        raise ValueError(f"a checkpoint may not name the class {name!r}")
    return resolve_name(name)


def _class_of_tensors(name: str) -> Any:
    """Returns a class of composed tensors, if an imported package has told torch that it may be loaded."""
    if name.startswith(_TORCHAO + "."):
        with suppress(ImportError):
            importlib.import_module(_TORCHAO)
    for known in get_safe_globals():
        if isinstance(known, type) and issubclass(known, Tensor) and full_name(known) == name:
            return known
    raise ValueError(f"a tensor of the class {name!r} can be read when its package has been imported")


@final
class _ComposedSource(Source):
    """Makes a composed tensor when its values are needed: only those who use it need the package of its class."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, parts: Any, context: Any) -> None:
        super().__init__(name + WHOLE, shape, dtype)
        self._class_name, self._parts, self._context = name, parts, context

    def whole(self) -> Tensor:
        parts, made_by = materialize(self._parts), _class_of_tensors(self._class_name)
        stride = torch.empty(self.shape, device="meta").stride()
        return made_by.__tensor_unflatten__(parts, self._context, self.shape, stride)


def _instance(name: str, of: Any) -> Any:
    made_by = _class(name)
    try:
        return made_by(of)
    except Exception as error:  # a constructor may raise anything for contents that no instance had
        raise ValueError(f"this is no instance of {name}: {error}") from error


def _plain(value: Any) -> Any:
    """Returns the contents of a configuration object as plain containers; interpolations stay as they were written."""
    if hasattr(value, "_get_node"):
        return importlib.import_module("omegaconf").OmegaConf.to_container(value, resolve=False)
    return dict(value)


def _number(dtype: str, value: Any) -> Any:
    if dtype not in _NUMPY:  # numpy.void(10**10) would allocate as many bytes
        raise ValueError(f"{dtype!r} is not a dtype of numbers")
    return numpy.dtype(dtype).type(value)


class _Kind(NamedTuple):
    """How values of one kind are written as an object of JSON, and read back."""

    fits: type | Callable[[Any], bool]  # the exact type of these values, or a function that recognises them
    fields: Sequence[str]  # of the object, besides "$"
    split: Callable[[Any], Sequence[Any]]  # value -> contents of the fields, which are encoded in their turn
    join: Callable[..., Any]  # decoded contents of the fields -> value

    def matches(self, value: Any) -> bool:
        return type(value) is self.fits if isinstance(self.fits, type) else self.fits(value)


_KINDS = {
    # Infinities and NaN, which JSON lacks. repr hides the sign of NaN.
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
    # A tensor that is made of others, if torch may load its class.
    "composed": _Kind(
        lambda v: is_composed(v) and type(v) in get_safe_globals(),
        ["name", "shape", "dtype", "parts", "context"],
        lambda v: [full_name(type(v)), tuple(v.shape), v.dtype, *taken_apart(v)],
        lambda *fields: LazyTensor(_ComposedSource(*fields)),
    ),
}
_MAPPINGS = {"dict": dict, "ordered": OrderedDict}  # these are written as pairs


@final
class Encoder:
    """Encodes values as JSON, and collects the tensors and objects in them that JSON cannot hold."""

    def __init__(self) -> None:
        # By name. A tensor that stands in several places, as one object or over the same memory, has one name.
        self.tensors: dict[str, Tensor] = {}
        self.partials: dict[str, Any] = {}  # by name, the encoded items of each `Partial`
        self.objects: list[tuple[str, Any]] = []  # values of no known kind, each with the place where it stands
        self._names: dict[Any, str] = {}  # by `_identity` of a tensor
        self._in_partial = False

    def encode(self, value: Any, place: str = "") -> Any:
        """Returns `value` as JSON. `place` says where it stands in the checkpoint, for names and messages."""
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return value
        if type(value) is list:
            return [self.encode(item, f"{place}/{number}") for number, item in enumerate(value)]
        if type(value) is dict and TAG not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, f"{place}/{key}" if place else key) for key, item in value.items()}
        if type(value) is Partial:
            # A tensor that also stands outside gets a second name: this rank must write what its partial names.
            outside, self._names, self._in_partial = self._names, {}, True
            self.partials[value.name] = self._items(value, place)
            self._names, self._in_partial = outside, False
            return {TAG: "partial", "name": value.name}
        for kind, mapping in _MAPPINGS.items():
            if type(value) is mapping:
                versions = versions_of(value)
                told = {} if versions is None else {VERSIONS: dict(versions)}
                return {TAG: kind, "items": self._items(value, place), **told}
        for kind, row in _KINDS.items():
            if row.matches(value):
                parts = zip(row.fields, row.split(value), strict=True)
                return {TAG: kind, **{field: self.encode(part, place) for field, part in parts}}
        if isinstance(value, LazyTensor) or _is_plain_tensor(value):
            return {TAG: "tensor", "name": self._name_of(value, place)}
        if self._in_partial:  # rank 0 numbers and pickles its own objects, and knows nothing of other ranks'
            raise TypeError(f"{place} is a {full_name(type(value))}, and what single ranks have must be plain data")
        self.objects.append((place, value))
        return {TAG: OBJECTS, "number": len(self.objects) - 1, "class": full_name(type(value))}

    def _items(self, value: Mapping[Any, Any], place: str) -> list[Any]:
        return [[self.encode(key, place), self.encode(item, f"{place}/{key}")] for key, item in value.items()]

    def _name_of(self, tensor: Tensor, place: str) -> str:
        """Notes a tensor to be written, and returns its name in the checkpoint."""
        if isinstance(tensor, LazyTensor) and isinstance(tensor.source, Spread):
            name = tensor.source.name  # all ranks write the tensor together, and must agree on its name
            held = self.tensors.setdefault(name, tensor)
            if not (isinstance(held, LazyTensor) and isinstance(held.source, Spread)):
                raise ValueError(f"the checkpoint has a tensor under the key {name!r}, which names a part of the model")
            return name
        identity = _identity(tensor)
        if identity not in self._names:
            name, number = place, 1
            while name in self.tensors:  # different places may have one text: {"a/b": x, "a": {"b": y}}
                number += 1
                name = f"{place}#{number}"
            if self._in_partial:  # rank 0, which writes plain tensors, may not have it: this rank writes it
                values = tensor.source.whole() if isinstance(tensor, LazyTensor) else tensor.detach()
                tensor = LazyTensor(OfOneRank(name, values))
            self._names[identity] = name
            self.tensors[name] = tensor
        return self._names[identity]


def _is_plain_tensor(value: Any) -> bool:
    """Whether `value` is a tensor that shape, dtype and values describe completely."""
    return (
        type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


def _identity(tensor: Tensor) -> Any:
    """Returns the same for tied tensors, of which `Module.state_dict` gives a view for each place."""
    if isinstance(tensor, LazyTensor):
        return id(tensor.source)
    memory = storage_key(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()
    return *memory, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def merge(partials: Iterable[list[Any]]) -> Any:
    """Merges the encoded items of one `Partial` from all ranks, in rank order, into one encoded dictionary. Where
    several ranks have an entry, the first counts."""
    merged: dict[Any, dict[str, list[Any]]] = {}
    others: dict[str, Any] = {}  # items whose keys are no numbers, such as the counters of some optimizers
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
    """Returns the pairs of an encoded dictionary, whichever way it was written."""
    return encoded["items"] if TAG in encoded else [[key, item] for key, item in encoded.items()]


def _dict_of(items: list[Any]) -> dict[str, Any]:
    is_simple = all(isinstance(key, str) and key != TAG for key, _ in items)
    return dict(items) if is_simple else {TAG: "dict", "items": items}


def parted(encoded: Mapping[str, Any], keys: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits an encoded dictionary into the entries with these keys and the others; both stay encoded."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for key, value in _items_of(encoded):
        parts[0 if isinstance(key, str) and key in keys else 1].append([key, value])
    return _dict_of(parts[0]), _dict_of(parts[1])


@final
class Decoder:
    """Decodes what `Encoder` encoded."""

    def __init__(self, tensor: Callable[[str], Tensor], partials: Mapping[str, Any], objects: list[Any] | None) -> None:
        self._tensor = tensor  # returns the tensor of a name
        self._partials = dict(partials)  # encoded dictionaries by the name of their `Partial`
        self._decoded_partials: dict[str, Any] = {}
        self._objects = objects  # unpickled, by number; None without the user's opt-in
        self.left_out: list[str] = []  # classes of objects that were not read

    def decode(self, value: Any) -> Any:
        """Returns the value that was encoded; raises ValueError for what no `Encoder` writes.

        A dictionary or set loses its objects that are not read. A sequence gets None in their place, so that its other
        elements keep theirs.
        """
        if isinstance(value, list):
            return [self.decode(item) if self._reads(item) else None for item in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.decode(item) for key, item in value.items() if self._reads(item)}
        try:
            return self._decode_kind(value[TAG], value)
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"this is no {value[TAG]}: {type(error).__name__}: {error}") from error

    def _decode_kind(self, kind: Any, value: dict[str, Any]) -> Any:
        if kind == "tensor":
            try:
                return self._tensor(value["name"])
            except KeyError:
                raise ValueError(f"there is no tensor {value.get('name')!r}") from None
        if kind == "partial":
            name = value["name"]
            if name not in self._decoded_partials:  # popped before it is decoded: one that contains itself is not found
                self._decoded_partials[name] = self.decode(self._partials.pop(name))
            return self._decoded_partials[name]
        if kind == OBJECTS:
            return None if self._objects is None else self._objects[value["number"]]
        if not (isinstance(kind, str) and (kind in _KINDS or kind in _MAPPINGS)):
            raise ValueError(f"{kind!r} is not a kind of value that this version knows")
        if kind in _MAPPINGS:
            there = [(key, item) for key, item in value["items"] if self._reads(key) and self._reads(item)]
            made = _MAPPINGS[kind]((self.decode(key), self.decode(item)) for key, item in there)
            if VERSIONS in value and isinstance(made, OrderedDict):
                vars(made)[VERSIONS] = OrderedDict((name, dict(version)) for name, version in value[VERSIONS].items())
            return made
        if kind in ("set", "frozenset"):
            value = {**value, "items": [item for item in value["items"] if self._reads(item)]}
        row = _KINDS[kind]
        return row.join(*(self.decode(value[field]) for field in row.fields))

    def _reads(self, item: Any) -> bool:
        """Whether an encoded value is to be read: any but a pickled object without the opt-in, which is noted."""
        if self._objects is not None or not isinstance(item, dict) or item.get(TAG) != OBJECTS:
            return True
        self.left_out.append(str(item.get("class")))
        return False
