"""What a checkpoint's containers become: plain JSON, and the same values of the same types when it is read."""

import argparse
import enum
import fractions
import importlib
import json
import math
import pathlib
import pickle
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.data import AttributeDict
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor, nn

from lightning_zero.checkpoint.tree import Decoder, Encoder, dtype_named, merge
from lightning_zero.shards.extents import Extent
from lightning_zero.views.lazy import LazyTensor, Partial, Range, Spread, Stored


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Pair(namedtuple("Pair", "left right")):
    pass


class InFile(Stored):
    def __init__(self, name: str, values: Tensor) -> None:
        super().__init__(name, tuple(values.shape), values.dtype)
        self.values = values

    def whole(self) -> Tensor:
        return self.values.clone()

    def read(self, extent: Extent, into: Tensor) -> None:
        into.copy_(self.values.reshape(-1)[extent.start : extent.stop])


class OverRanks(Spread):
    def whole(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype)

    def pieces(self) -> list[Range]:
        return []


def lazy(name: str) -> LazyTensor:
    return LazyTensor(OverRanks(name, (3,), torch.float32))


def through_json(encoded: Any) -> Any:
    return json.loads(json.dumps(encoded, allow_nan=False))


def decoder_of(encoder: Encoder, *, opted_in: bool = False) -> Decoder:
    objects = [value for _, value in encoder.objects] if opted_in else None
    partials = {name: merge([through_json(items)]) for name, items in encoder.partials.items()}
    return Decoder(encoder.tensors.__getitem__, partials, objects)


def there_and_back(value: Any, *, opted_in: bool = False) -> Any:
    encoder = Encoder()
    encoded = through_json(encoder.encode(value))
    return decoder_of(encoder, opted_in=opted_in).decode(encoded)


def decode(encoded: Any, partials: dict[str, Any] | None = None, objects: list[Any] | None = None) -> Any:
    """A tree that names no tensor that is there."""
    nowhere: dict[str, Tensor] = {}
    return Decoder(nowhere.__getitem__, partials or {}, objects).decode(encoded)


def alike(found: Any, expected: Any) -> bool:
    """The same type all the way down, and the same bits."""
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    if type(found) is not type(expected):
        return False
    if isinstance(expected, float):
        return math.copysign(1, found) == math.copysign(1, expected) and repr(found) == repr(expected)
    if isinstance(expected, numpy.ndarray):
        return found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()
    if isinstance(expected, numpy.generic):
        return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()
    if isinstance(expected, dict):
        pairs = zip(found.items(), expected.items(), strict=True)
        return len(found) == len(expected) and all(alike(f, e) for f, e in pairs)
    if isinstance(expected, list | tuple | deque):
        same_bound = not isinstance(expected, deque) or found.maxlen == expected.maxlen
        return same_bound and len(found) == len(expected) and all(map(alike, found, expected))
    return bool(found == expected) or repr(found) == repr(expected)


PLAIN: dict[str, Any] = {
    "nothing": None,
    "booleans": [True, False],
    "integers": [0, -1, 2**80, -(2**80)],
    "floats": [0.0, -0.0, 1e-320, 1.7976931348623157e308, math.pi],
    "floats that JSON lacks": [math.inf, -math.inf, math.nan],
    "texts": ["", "$", "ä\U0001f600", "\ud800", "line\nbreak\0"],
    "bytes": [b"", bytes(range(256))],
    "complex numbers": [1j, complex(-0.0, -0.0), complex(math.inf, -math.inf)],
    "tuples": [(), (1,), (1, (2, (3,)))],
    "sets": [set(), {1, "1", (1,)}, frozenset(), frozenset({frozenset({1}), 2})],
    "deques": [deque([1, 2]), deque([1, 2], maxlen=2), deque(maxlen=0)],
    "dictionaries": {"": 1, "b": 2, "a": {}},
    "dictionaries with other keys": {1: "int", "1": "text", None: 0, (1, 2): [], 2.5: {}, b"x": 1, False: 2},
    "dictionaries that look like ours": {"$": "tensor", "name": "x", "inner": {"$": {"$": 1}}},
    "ordered dictionaries": OrderedDict([("b", 1), ("a", OrderedDict())]),
    "namespaces": argparse.Namespace(lr=0.1, layers=[1, 2], inner=argparse.Namespace(), **{"$": 1}),
    "paths": pathlib.Path("some/where with spaces"),
    "durations": [timedelta(0), timedelta(-1, 0, 1), timedelta.max, timedelta.min, timedelta(300_000, 1, 1)],
    "sizes": torch.Size([2, 0, 3]),
    "dtypes": [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool],
    "devices": [torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")],
    "configuration of Lightning": AttributeDict(a=1, b=AttributeDict(c=[2])),
    "configuration of OmegaConf": OmegaConf.create({"a": [1, "${b}"], "b": "???", "c": None, "d": {"e": 2.5}}),
    "lists of OmegaConf": OmegaConf.create([1, {"x": [2]}, None]),
    "classes of configurations": [AttributeDict, DictConfig, ListConfig],
}  # fmt: skip


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_values_come_back_as_they_were(kind: str) -> None:
    encoder = Encoder()
    encoded = through_json(encoder.encode(PLAIN[kind]))
    assert alike(decoder_of(encoder).decode(encoded), PLAIN[kind])
    assert (encoder.tensors, encoder.objects, encoder.partials) == ({}, [], {})


NUMPY_DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numbers_and_arrays_of_numpy_come_back_as_they_were(dtype: str) -> None:
    rows = numpy.arange(6).reshape(2, 3)
    arrays = [rows.astype(dtype), rows.astype(dtype).T, rows.astype(dtype)[::-1, ::2]]
    arrays += [numpy.ones((), dtype), numpy.ones((0, 2), dtype)]
    numbers = [
        *numpy.array([0, 1], dtype),
        *numpy.array([numpy.inf, -0.0]).astype(dtype if "f" in dtype else "float64"),
    ]
    for value in [*arrays, *numbers]:
        assert alike(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        numpy.longdouble(1) / 3,
        numpy.ones(2, numpy.longdouble),
        numpy.ma.array([1, 2], mask=[False, True]),
        numpy.ones(2, ">f4"),
        numpy.array(["a"]),
        numpy.array([None]),
        numpy.datetime64("2020-01-01"),
        numpy.zeros(2, [("a", "i4")]),
    ],
    ids=repr,
)
def test_arrays_that_are_more_than_numbers_are_objects_and_lose_nothing(value: Any) -> None:
    assert there_and_back({"kept": 1, "array": value}) == {"kept": 1}
    assert there_and_back([value], opted_in=True)[0] is value


keys = st.text(max_size=3) | st.sampled_from(["$", "a/b", "a", "#2"])
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.timedeltas()
    | st.builds(
        torch.tensor, st.lists(st.integers(0, 9), max_size=3), dtype=st.sampled_from([torch.int8, torch.float32])
    )
    | st.sampled_from([numpy.float32(0.1), torch.float16, torch.Size([1, 2]), pathlib.Path("a/b")])
)
hashable = st.none() | st.integers() | st.text(max_size=3) | st.binary(max_size=3) | st.tuples(st.integers(), st.text())


def within(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(values, max_size=3)
    return (
        several
        | several.map(tuple)
        | st.builds(deque, several, st.none() | st.integers(3, 5))
        | st.dictionaries(keys, values, max_size=3)
        | st.dictionaries(hashable, values, max_size=3)
        | st.dictionaries(keys, values, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, values, max_size=3).map(lambda items: argparse.Namespace(**items))
        | st.sets(hashable, max_size=3)
        | st.frozensets(hashable, max_size=3)
    )


def contents(value: Any) -> Any:
    """Namespaces as dictionaries, all the way down, so that tensors in them can be compared."""
    if isinstance(value, argparse.Namespace):
        return ("namespace", contents(vars(value)))
    if isinstance(value, dict):
        return type(value)((key, contents(item)) for key, item in value.items())
    if isinstance(value, deque):
        return deque(map(contents, value), value.maxlen)
    return type(value)(map(contents, value)) if type(value) in (list, tuple) else value


@settings(max_examples=300)
@given(st.recursive(leaves, within, max_leaves=12))
def test_any_nesting_comes_back_as_it_was(value: Any) -> None:
    assert alike(contents(there_and_back(value)), contents(value))


def test_tied_tensors_have_one_name_and_come_back_as_one() -> None:
    weight = nn.Parameter(torch.randn(3, 2))
    encoder = Encoder()
    tree = {
        "encoder": weight,
        "nested": [{"decoder": weight}],
        "view": weight.detach(),
        "other": weight.detach().clone(),
    }
    encoded = through_json(encoder.encode(tree))
    assert list(encoder.tensors) == ["encoder", "other"]
    made = {name: tensor.detach().clone() for name, tensor in encoder.tensors.items()}
    found = Decoder(made.__getitem__, {}, None).decode(encoded)
    assert found["encoder"] is found["nested"][0]["decoder"] is found["view"]
    assert found["encoder"] is not found["other"]


def test_views_of_one_storage_are_tied_only_where_they_show_the_same() -> None:
    base = torch.arange(6.0)
    views = [base[:3], base[3:], base.view(2, 3), base.view(3, 2), base[::2], base.view(torch.int32), base]
    found = there_and_back(views)
    assert alike(found, views)
    complexes = [torch.ones(2, dtype=torch.complex64) * 1j]
    assert alike(there_and_back([complexes[0], complexes[0].conj()]), [complexes[0], complexes[0].conj()])


def test_places_that_are_written_alike_hold_what_they_held() -> None:
    tree = {"a/b": torch.zeros(1), "a": {"b": torch.ones(2)}, 1: torch.full((1,), 2.0), "1": torch.full((1,), 3.0)}
    assert alike(there_and_back(tree), tree)


def test_an_entry_of_an_earlier_checkpoint_is_not_taken_for_the_models_own() -> None:
    """A user keeps what the run started from, of which the names are those of what it is now."""
    start = LazyTensor(InFile("model:weight", torch.ones(3)))
    encoder = Encoder()
    encoded = encoder.encode(
        {"state_dict": {"weight": lazy("model:weight")}, "start": {"weight": start, "again": start}}
    )
    assert encoded["state_dict"]["weight"]["name"] == "model:weight"
    assert encoded["start"]["weight"] == encoded["start"]["again"] != encoded["state_dict"]["weight"]
    assert encoder.tensors[encoded["start"]["weight"]["name"]] is start


def test_a_tensor_that_ranks_write_together_gives_its_name_to_nothing_else() -> None:
    encoder = Encoder()
    assert encoder.encode([lazy("model:a"), lazy("model:a"), lazy("model:b")], "x") == [
        {"$": "tensor", "name": name} for name in ("model:a", "model:a", "model:b")
    ]
    with pytest.raises(ValueError, match="'model:a'"):
        Encoder().encode({"model:a": torch.ones(1), "state_dict": {"a": lazy("model:a")}})


def quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to leave them out
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


OBJECTS = {
    "enum": Colour.RED,
    "named tuple": Pair(1, 2),
    "instance": fractions.Fraction(1, 3),
    "function": math.sin,
    "class": dict,
    "counter": Counter("aab"),
    "default dictionary": defaultdict(list, a=[1]),
    "integer of its own": Level.LOW,
    "sparse tensor": torch.eye(2).to_sparse(),
    "meta tensor": torch.empty(2, device="meta"),
    "quantised tensor": quantised(),
    "tensor of its own": torch.ones(2).as_subclass(type("Own", (Tensor,), {})),
    "dtype of numpy": numpy.dtype("f4"),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_what_is_no_plain_data_is_an_object_left_out_unless_opted_in(kind: str) -> None:
    value = OBJECTS[kind]
    encoder = Encoder()
    encoded = through_json(encoder.encode({"a": {"b": value, "c": 1}, "d": [1, value, 2], "e": (value,)}))
    assert [place for place, _ in encoder.objects] == ["a/b", "d/1", "e/0"]
    without = decoder_of(encoder)
    assert without.decode(encoded) == {"a": {"c": 1}, "d": [1, None, 2], "e": (None,)}
    assert without.left_out == [f"{type(value).__module__}.{type(value).__qualname__}"] * 3
    found = decoder_of(encoder, opted_in=True).decode(encoded)
    assert found["a"]["b"] is found["d"][1] is found["e"][0] is value


def test_an_object_in_a_set_is_left_out_of_it() -> None:
    assert there_and_back({1, Colour.RED}) == {1}


def test_an_object_as_key_takes_its_item_with_it() -> None:
    by_colour = {Colour.RED: 1, Colour.BLUE: 2, "plain": 3}
    assert there_and_back(by_colour) == {"plain": 3}
    assert there_and_back(by_colour, opted_in=True) == by_colour


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "collections.OrderedDict", "", "lightning", "a.b.c"])
@pytest.mark.parametrize("kind", ["class", "instance"])
def test_a_class_that_is_not_in_the_short_list_is_refused_and_not_imported(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib, "import_module", None)
    with pytest.raises(ValueError, match=f"may not name the class '{name}'"):
        decode({"$": kind, "name": name, "class": name, "of": {"a": 1}})


def test_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was unpickled")

    tree = {**PLAIN, "tensor": torch.ones(2), "array": numpy.ones(2), "objects": list(OBJECTS.values())}
    encoder = Encoder()
    encoded = through_json(encoder.encode(tree))
    for name in ("loads", "load", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert decoder_of(encoder).decode(encoded).keys() == tree.keys()


# -- what each rank has some of


def test_partials_of_all_ranks_become_one_dictionary_in_the_order_of_its_keys() -> None:
    states: list[dict[int, Any]] = [
        {2: {"step": 1, "moment": lazy("m2")}, 0: {"step": 1.5, "moment": lazy("m0")}},
        {2: {"moment": lazy("m2")}, 1: {"step": None, "moment": lazy("m1")}},
        {},
    ]
    encoders = [Encoder() for _ in states]
    encoded = [
        through_json(encoder.encode({"state": Partial("states", state)}))
        for encoder, state in zip(encoders, states, strict=True)
    ]
    assert encoded[0] == encoded[1] == encoded[2] == {"state": {"$": "partial", "name": "states"}}
    merged = merge(through_json(encoder.partials["states"]) for encoder in encoders)
    tensors = {name: tensor for encoder in encoders for name, tensor in encoder.tensors.items()}
    found = Decoder(tensors.__getitem__, {"states": merged}, None).decode(encoded[0])["state"]
    assert list(found) == [0, 1, 2]
    assert [state["step"] for state in found.values()] == [1.5, None, 1]
    assert [state["moment"].source.name for state in found.values()] == ["m0", "m1", "m2"]


def test_of_what_several_ranks_have_that_of_the_first_counts() -> None:
    ranks: list[dict[Any, Any]] = [{"count": rank, 0: {"step": rank, rank: "own"}} for rank in range(3)]
    encoders = [Encoder() for _ in ranks]
    for encoder, items in zip(encoders, ranks, strict=True):
        encoder.encode(Partial("p", items))
    merged = through_json(merge(through_json(encoder.partials["p"]) for encoder in encoders))
    assert decode(merged) == {"count": 0, 0: {"step": 0, 0: "own", 1: "own", 2: "own"}}


def test_a_key_of_one_ranks_items_may_look_like_ours() -> None:
    encoder = Encoder()
    encoder.encode(Partial("p", {0: {"$": "tensor", "name": "none"}}))
    merged = through_json(merge([through_json(encoder.partials["p"])]))
    assert decode(merged) == {0: {"$": "tensor", "name": "none"}}


def test_a_tensor_before_and_behind_the_items_of_a_rank_is_written_once() -> None:
    encoder, tensor = Encoder(), torch.ones(2)
    encoded = encoder.encode({"before": tensor, "own": Partial("own", {0: {"kept": torch.ones(3)}}), "after": tensor})
    assert encoded["before"] == encoded["after"]
    assert len(encoder.tensors) == 2


def test_what_is_no_number_keeps_its_sign() -> None:
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        assert math.copysign(1, there_and_back(value)) == math.copysign(1, value)


def test_ranks_add_to_items_whatever_the_keys_are() -> None:
    ranks: list[dict[int, Any]] = [{0: {"$": 1, 2: "two"}}, {0: {"2": "text", (1, 2): 3}}]
    encoders = [Encoder() for _ in ranks]
    for encoder, items in zip(encoders, ranks, strict=True):
        encoder.encode(Partial("p", items))
    merged = through_json(merge(through_json(encoder.partials["p"]) for encoder in encoders))
    assert decode(merged) == {0: {"$": 1, 2: "two", "2": "text", (1, 2): 3}}


def test_tensors_inside_the_items_of_a_rank_are_written_by_that_rank() -> None:
    values = torch.arange(4.0)
    encoder = Encoder()
    encoded = encoder.encode(
        {"outside": values, "state": Partial("p", {3: {"history": [values, {"tied": values}]}})}, ""
    )
    name = encoder.partials["p"][0][1]["history"][0]["name"]
    assert encoder.partials["p"][0][1]["history"][1] == {"tied": {"$": "tensor", "name": name}}
    assert encoded["outside"]["name"] != name
    source = encoder.tensors[name].source  # type: ignore[attr-defined]
    assert isinstance(source, Spread)  # so its pieces are taken from whichever rank has them
    ((extent, written),) = source.pieces()
    assert extent == Extent.of_whole(name, (4,))
    assert torch.equal(written, values)


def test_an_object_inside_the_items_of_a_rank_is_refused_and_named() -> None:
    with pytest.raises(TypeError, match=r"optimizer/3/colour is a .*Colour.* must be plain data"):
        Encoder().encode({"optimizer": Partial("p", {3: {"colour": Colour.RED}})})


# -- what no encoder writes


@pytest.mark.parametrize(
    ("encoded", "told"),
    [
        ({"$": "unknown"}, "'unknown' is not a kind of value"),
        ({"$": None}, "None is not a kind"),
        ({"$": []}, r"\[\] is not a kind"),
        ({"$": {"$": "tuple"}}, "is not a kind"),
        ({"$": "_tensor"}, "is not a kind"),
        ({"$": "tensor", "name": "absent"}, "no tensor 'absent'"),
        ({"$": "tensor"}, "no tensor"),
        ({"$": "tensor", "name": [1]}, "no tensor"),
        ({"$": "array", "of": {"$": "tensor", "name": "absent"}}, "no tensor 'absent'"),
        ({"$": "array", "of": 5}, "no array"),
        ({"$": "dict"}, "no dict"),
        ({"$": "dict", "items": [[1, 2, 3]]}, "too many"),
        ({"$": "dict", "items": [[[], 2]]}, "no dict"),
        ({"$": "set", "items": [{}]}, "no set"),
        ({"$": "tuple", "items": 5}, "no tuple"),
        ({"$": "deque", "items": [], "maxlen": -1}, "maxlen"),
        ({"$": "deque", "items": [], "maxlen": 10**30}, "no deque"),
        ({"$": "namespace", "of": [1]}, "no namespace"),
        ({"$": "float", "value": "1.5.2"}, "1.5.2"),
        ({"$": "bytes", "value": "\xff"}, "ASCII"),
        ({"$": "complex", "value": []}, "no complex"),
        ({"$": "timedelta", "value": [10**30, 0, 0]}, "no timedelta"),
        ({"$": "path", "value": 1}, "no path"),
        ({"$": "size", "items": ["a"]}, "no size"),
        ({"$": "dtype", "value": "nn"}, "'nn' is not a dtype"),
        ({"$": "dtype", "value": 3}, "3 is not a dtype"),
        ({"$": "device", "value": "toaster"}, "'toaster' is not a device"),
        ({"$": "numpy", "dtype": "V", "value": 10**12}, "'V' is not a dtype"),
        ({"$": "numpy", "dtype": "object", "value": 1}, "'object' is not a dtype"),
        ({"$": "numpy", "dtype": "int8", "value": 10**30}, "no numpy"),
        ({"$": "class", "name": ["os.system"]}, "no class"),
        ({"$": "instance", "class": "omegaconf.dictconfig.DictConfig", "of": 5}, "Unsupported"),
        ({"$": "instance", "class": "lightning.fabric.utilities.data.AttributeDict", "of": 5}, "no instance"),
        ({"$": "partial", "name": "absent"}, "no partial"),
        ({"$": "partial", "name": "within itself"}, "no partial"),
    ],
)  # fmt: skip
def test_what_no_encoder_writes_is_refused(encoded: Any, told: str) -> None:
    partials = {"within itself": {"a": [{"$": "partial", "name": "within itself"}]}}
    with pytest.raises(ValueError, match=told):
        decode({"inside": [encoded]}, partials)


def test_an_object_that_is_not_in_its_file_is_refused() -> None:
    with pytest.raises(ValueError, match="no objects"):
        decode([{"$": "objects", "number": 0, "class": "x"}], objects=[])


def test_partials_inside_each_other_do_not_multiply() -> None:
    """Thirty levels of two would be a billion values."""
    partials = {
        f"{level}": {"both": [{"$": "partial", "name": f"{level + 1}"}] * 2} if level < 30 else {"end": 1}
        for level in range(31)
    }
    found = decode({"$": "partial", "name": "0"}, partials)
    for _ in range(30):
        assert found["both"][0] is found["both"][1]
        found = found["both"][0]
    assert found == {"end": 1}


@pytest.mark.parametrize("make", [RuntimeError, OSError])
def test_what_reading_a_tensor_fails_with_is_not_taken_for_a_strange_tree(make: Callable[[str], Exception]) -> None:
    def read(name: str) -> Tensor:
        raise make("the disk is gone")

    with pytest.raises(make, match="the disk is gone"):  # type: ignore[call-overload]
        Decoder(read, {}, None).decode({"a": {"$": "tuple", "items": [{"$": "tensor", "name": "x"}]}})


@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex128", "float8_e4m3fn", "bool", "uint64"])
def test_a_dtype_is_found_by_its_name(name: str) -> None:
    assert dtype_named(name) is getattr(torch, name)
