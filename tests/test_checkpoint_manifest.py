"""The manifest: what is written is read, what is damaged is found, and what comes from anywhere is not believed."""

import copy
import itertools
import json
import math
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero.checkpoint import CheckpointError, Saver, StoredCheckpoint
from lightning_zero.checkpoint.folder import MANIFEST, Folder
from lightning_zero.checkpoint.manifest import (
    Entry,
    Manifest,
    ObjectsFile,
    ShardFile,
    StoredRange,
    parse_manifest,
    read_manifest,
    refuse_gaps,
)
from lightning_zero.shards.extents import Extent
from lightning_zero.wire.board import Board
from lightning_zero.wire.local import LocalComm

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.complex128, torch.bool, torch.float8_e4m3fn]


def seal(text: str) -> bytes:
    """A manifest of this text, with the right checksum."""
    body = text.rstrip()[:-1].encode()
    return body + f',"crc32":"{zlib.crc32(body):08x}"}}\n'.encode()


def sealed(plain: Any) -> bytes:
    return seal(json.dumps(plain))


def plain_of(manifest: Manifest) -> dict[str, Any]:
    plain = json.loads(manifest.to_bytes())
    del plain["crc32"]
    return dict(plain)


# -- random ones


@st.composite
def grids(draw: Any, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes that tensor-parallel ranks have: every dimension cut at some places."""
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    sides = [list(itertools.pairwise(places)) if len(places) > 1 else [(0, 0)] for places in cuts]
    return [
        (tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))
        for cell in itertools.product(*sides)
    ]


@st.composite
def manifests(draw: Any) -> Manifest:
    """Tensors in boxes and ranges over some files, as any number of ranks may have written them."""
    ends = [draw(st.integers(8, 64)) for _ in range(draw(st.integers(1, 3)))]
    tensors = {}
    for name in draw(st.lists(st.text(max_size=5), unique=True, max_size=4)):
        shape, dtype = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple)), draw(st.sampled_from(DTYPES))
        pieces = []
        for offset, box in draw(grids(shape)) if draw(st.booleans()) else [((0,) * len(shape), shape)]:
            numel = math.prod(box)
            bounds = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=3))})
            for start, stop in itertools.pairwise(bounds):
                extent = Extent(name=name, shape=shape, box_offset=offset, box_shape=box, start=start, stop=stop)
                file = draw(st.integers(0, len(ends) - 1))
                pieces.append(StoredRange(extent, file, ends[file], extent.numel * dtype.itemsize))
                ends[file] += pieces[-1].nbytes
        tensors[name] = Entry(name, dtype, shape, tuple(draw(st.permutations(pieces))))
    return Manifest(
        about=draw(st.dictionaries(st.sampled_from(["step", "epoch", "stage"]), st.integers())),
        files=tuple(ShardFile(f"shard-{at}", end, f"shard-{at}.crc32", at) for at, end in enumerate(ends)),
        tensors=tensors,
        tree=draw(st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5))),
        partials={},
        objects=draw(st.none() | st.just(ObjectsFile("objects.pt", 5, 6, ["app.Tokenizer"]))),
    )


@given(manifests())
def test_what_is_written_is_read(manifest: Manifest) -> None:
    raw = manifest.to_bytes()
    found = parse_manifest(raw, "somewhere")
    assert found == manifest
    assert found.to_bytes() == raw


@given(manifests(), st.data())
def test_every_flipped_bit_is_found(manifest: Manifest, data: st.DataObject) -> None:
    raw = bytearray(manifest.to_bytes())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CheckpointError, match=r"^somewhere: manifest\.json is damaged"):
        parse_manifest(bytes(raw), "somewhere")


@given(manifests(), st.data())
def test_a_manifest_that_was_cut_short_or_written_over_is_found(manifest: Manifest, data: st.DataObject) -> None:
    raw = manifest.to_bytes()
    at, length = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(1, 40))
    for damaged in (raw[:at], raw[at + 1 :], raw + b"\n", raw[:at] + b"\0" * length + raw[at + length :]):
        with pytest.raises(CheckpointError, match="damaged"):
            parse_manifest(damaged, "somewhere")


@given(manifests())
def test_blocks_are_numbered_by_their_place_in_the_file(manifest: Manifest) -> None:
    for number in range(len(manifest.files)):
        block = 1
        for piece in manifest.pieces_by_file[number]:
            if piece.nbytes:  # the place of one without bytes is never asked for
                assert manifest.first_blocks[number, piece.offset] == block
            block += piece.num_blocks


# -- hostile ones


@pytest.fixture
def example() -> dict[str, Any]:
    """A small manifest: a tensor in two files, a matrix in two boxes, one without dimensions, an empty one."""

    def piece(
        name: str, shape: tuple[int, ...], file: int, offset: int, start: int, stop: int, *box: Any
    ) -> StoredRange:
        box_offset, box_shape = box or ((0,) * len(shape), shape)
        extent = Extent(name=name, shape=shape, box_offset=box_offset, box_shape=box_shape, start=start, stop=stop)
        return StoredRange(extent, file, offset, 4 * (stop - start))

    pieces = {
        "cut": [piece("cut", (10,), 0, 100, 0, 6), piece("cut", (10,), 1, 100, 6, 10)],
        "boxed": [
            piece("boxed", (2, 4), 0, 124, 0, 4, (0, 0), (2, 2)),
            piece("boxed", (2, 4), 1, 116, 0, 4, (0, 2), (2, 2)),
        ],
        "scalar": [piece("scalar", (), 0, 140, 0, 1)],
        "empty": [piece("empty", (3, 0), 0, 144, 0, 0)],
    }
    manifest = Manifest(
        about={"step": 7, "saved_at": 1.5},
        files=(ShardFile("a.safetensors", 144, "a.crc32", 1), ShardFile("b.safetensors", 132, "b.crc32", 2)),
        tensors={
            name: Entry(name, torch.float32, found[0].extent.shape, tuple(found)) for name, found in pieces.items()
        },
        tree={"x": {"$": "tensor", "name": "cut"}},
        partials={},
        objects=ObjectsFile("objects.pt", 10, 3, ["app.Tokenizer"]),
    )
    assert parse_manifest(manifest.to_bytes(), "here") == manifest
    return plain_of(manifest)


def refused(plain: Any, told: str) -> None:
    """That it is, with `told` in the words, at once and without memory."""
    raw = sealed(plain)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"^here(: manifest.json cannot be believed: | has ).*{told}"):
            parse_manifest(raw, "here")
        assert tracemalloc.get_traced_memory()[1] < 2**20 + 40 * len(raw)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../x",
            "..",
            ".",
            "",
            "/etc/passwd",
            "a/b",
            "a\\b",
            "C:\\x",
            "a\0b",
            ".hidden",
            "~",
            "-rf",
            "a\n",
            " a",
            "a b",
        ),
        *("s3://bucket/x", "file:x", "ä", 5, None, ["a"], {"a": 1}, True),
    ],
)
@pytest.mark.parametrize("where", ["name", "checks", "objects"])
def test_a_file_name_that_leads_elsewhere_is_refused(example: dict[str, Any], where: str, name: Any) -> None:
    place = example["objects"] if where == "objects" else example["files"][1]
    place["name" if where == "objects" else where] = name
    refused(example, "is no name of a file in this folder")


NO_COUNTS = [-1, 1.0, 1.5, "1", None, True, [1], {}, float("inf"), float("nan")]


@pytest.mark.parametrize("value", NO_COUNTS)
@pytest.mark.parametrize(
    "path",
    [
        ("files", 0, "bytes"),
        ("files", 0, "checks_crc32"),
        ("objects", "nbytes"),
        ("objects", "crc32"),
        ("tensors", "cut", "shape", 0),
        ("tensors", "cut", "pieces", 0, 0),
        ("tensors", "cut", "pieces", 0, 1),
        ("tensors", "cut", "pieces", 0, 2),
        ("tensors", "cut", "pieces", 0, 3),
        ("tensors", "boxed", "pieces", 0, 4, 0),
        ("tensors", "boxed", "pieces", 0, 5, 0),
    ],
)
def test_what_is_no_count_is_refused(example: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    replace(example, path, value)
    refused(example, "is no count")


def replace(plain: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        plain = plain[key]
    plain[path[-1]] = value


HUGE = 10**30
HOSTILE: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    # name: (where, what, what must be told)
    "more than torch counts": (("tensors", "cut", "shape"), [HUGE], "does not exist"),
    "more than torch counts, and none": (("tensors", "empty", "shape"), [HUGE, 0], "does not exist"),
    "a product that torch does not count": (("tensors", "empty", "shape"), [2**40, 2**40, 0], "does not exist"),
    "a hundred thousand dimensions": (("tensors", "cut", "shape"), [HUGE] * 100_000, "100000 dimensions"),
    "more than its pieces": (("tensors", "cut", "shape"), [10**12], "hold 10 elements, and it has 1000000000000"),
    "fewer than its pieces": (("tensors", "cut", "shape"), [9], "outside of the tensor"),
    "no pieces": (("tensors", "cut", "pieces"), [], "hold 0 elements"),
    "a piece less": (("tensors", "cut", "pieces"), [[0, 100, 0, 6]], "hold 6 elements, and it has 10"),
    "a piece twice": (("tensors", "cut", "pieces"), [[0, 100, 0, 5], [1, 100, 0, 5]], "two pieces of 'cut' overlap"),
    "a piece around one without elements": (
        ("tensors", "cut", "pieces"),
        [[0, 100, 0, 6], [0, 100, 3, 3], [1, 100, 4, 8]],
        "two pieces of 'cut' overlap",
    ),
    "a piece behind the end": (("tensors", "cut", "pieces", 1), [1, 100, 7, 11], "outside of the tensor"),
    "a piece that ends before it starts": (("tensors", "cut", "pieces", 1), [1, 100, 10, 6], "outside of the tensor"),
    "a piece behind the file": (("tensors", "cut", "pieces", 1, 1), 117, r"lies outside of b\.safetensors"),
    "a piece far behind the file": (("tensors", "cut", "pieces", 1, 1), HUGE, r"lies outside of b\.safetensors"),
    "a file that is not there": (("tensors", "cut", "pieces", 1, 0), 2, "file 2 of 2"),
    "a file far away": (("tensors", "cut", "pieces", 1, 0), HUGE, "file 10+ of 2"),
    "bytes that two pieces share": (("tensors", "boxed", "pieces", 0, 1), 122, r"share bytes of a\.safetensors"),
    "a byte that two pieces share": (("tensors", "boxed", "pieces", 0, 1), 123, r"share bytes of a\.safetensors"),
    "three numbers": (("tensors", "cut", "pieces", 0), [0, 100, 0], "."),
    "half a box": (("tensors", "boxed", "pieces", 0), [0, 124, 0, 4, [0, 0]], "."),
    "three quarters of a box": (("tensors", "boxed", "pieces", 0), [0, 124, 0, 4, [0, 0], [2, 2], 0], "."),
    "a box outside": (("tensors", "boxed", "pieces", 0, 4), [0, 3], "a box of 'boxed' lies outside"),
    "a box of other dimensions": (("tensors", "boxed", "pieces", 0, 5), [4], "outside of the tensor"),
    "a box twice": (("tensors", "boxed", "pieces", 1, 4), [0, 0], "boxes of 'boxed' do not tile it"),
    "boxes that overlap": (("tensors", "boxed", "pieces", 1, 4), [0, 1], "boxes of 'boxed' do not tile it"),
    "a range of a box twice": (
        ("tensors", "boxed", "pieces"),
        [[0, 124, 0, 2, [0, 0], [2, 2]], [0, 132, 1, 3, [0, 0], [2, 2]], [1, 116, 0, 4, [0, 2], [2, 2]]],
        "two pieces of 'boxed' overlap",
    ),
    "a dtype of nobody": (("tensors", "cut", "dtype"), "float33", "'float33' is not a dtype"),
    "a dtype that is a module": (("tensors", "cut", "dtype"), "nn", "'nn' is not a dtype"),
    "a dtype that is a number": (("tensors", "cut", "dtype"), 32, "32 is not a dtype"),
    "a quantised dtype": (("tensors", "cut", "dtype"), "qint32", "quantised"),
    "a dtype of bits": (("tensors", "cut", "dtype"), "int1", "torch.int1.*less than a byte"),
    "another format": (("format",), "torch", "its format is 'torch'"),
    "other blocks": (("block_bytes",), 1, "its blocks have 1 bytes"),
    "a date that is none": (("about", "saved_at"), "yesterday", "saved at 'yesterday'"),
    "a date that is no number": (("about", "saved_at"), math.nan, "saved at nan"),
    "a date without end": (("about", "saved_at"), math.inf, "saved at inf"),
    "a date of no calendar": (("about", "saved_at"), 2**63, "saved at 9223372036854775808"),
    "classes that are no names": (("objects", "classes"), [["os"]], "names of classes"),
    "objects without a name": (("objects",), {"nbytes": 1, "crc32": 1, "classes": []}, "name"),
    "objects with more": (("objects", "evil"), 1, "evil"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_nonsense_is_refused_and_named(example: dict[str, Any], kind: str) -> None:
    path, value, told = HOSTILE[kind]
    replace(example, path, value)
    refused(example, told)


def test_boxes_that_overlap_far_apart_are_found(example: dict[str, Any]) -> None:
    """In the order of their offsets one lies between the two."""
    example["files"][0]["bytes"] = 10_000
    boxes = [([0, 0], [2, 2]), ([0, 2], [2, 2]), ([1, 0], [2, 2])]
    pieces = [[0, 200 + 16 * at, 0, 4, *box] for at, box in enumerate(boxes)]
    example["tensors"]["boxed"] = {"dtype": "float32", "shape": [3, 4], "pieces": pieces}
    refused(example, "boxes of 'boxed' do not tile it")


@pytest.mark.parametrize("value", [None, 5, 1.5, "text", True, [], [[]], {}, {"a": 1}, [None], [{"a": 1}]])
@pytest.mark.parametrize(
    "path",
    [
        *(("files",), ("files", 0), ("tensors",), ("tensors", "cut"), ("tensors", "cut", "shape")),
        *(("tensors", "cut", "pieces"), ("tensors", "cut", "pieces", 0), ("tensors", "boxed", "pieces", 0, 4)),
        *(("tensors", "cut", "dtype"), ("tree",), ("partials",), ("about",), ("objects",), ("format",), ("version",)),
        ("block_bytes",),
    ],
)
def test_values_of_other_types_are_refused_unless_they_mean_the_same(
    example: dict[str, Any], path: tuple[Any, ...], value: Any
) -> None:
    replace(example, path, value)
    is_dict_of_anything = path in (("tree",), ("partials",), ("about",)) and isinstance(value, dict)
    if is_dict_of_anything or (path, value) in [(("tensors",), {}), (("objects",), None), (("version",), True)]:
        parse_manifest(sealed(example), "here")
    else:
        refused(example, ".")


@pytest.mark.parametrize(
    "key", ["format", "version", "about", "block_bytes", "files", "tensors", "tree", "partials", "objects"]
)
def test_a_missing_key_is_named(example: dict[str, Any], key: str) -> None:
    del example[key]
    refused(example, key)


@pytest.mark.parametrize("text", ["[1, 2]", "5", '"text"', "null", "{}", "", "{", "[" * 100_000 + "]" * 100_000])
def test_what_is_no_manifest_at_all_is_refused_with_a_right_checksum_too(text: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be believed"):
        parse_manifest(seal(text + " "), "here")


def test_deep_nesting_is_refused(example: dict[str, Any]) -> None:
    for opening, closing in ("[]", ("[[", "]]"), ('{"a":', "}")):
        nested = opening * 100_000 + "0" + closing * 100_000
        text = json.dumps({**example, "tree": "HERE"}).replace('"HERE"', nested)
        with pytest.raises(CheckpointError, match="cannot be believed"):
            parse_manifest(seal(text), "here")


@pytest.mark.parametrize("version", [2, 1_000_000, 0, -1, "2", 1.5, None, [2]])
def test_another_version_is_named_beside_the_one_that_is_read(example: dict[str, Any], version: Any) -> None:
    example["version"] = version
    with pytest.raises(CheckpointError) as raised:
        parse_manifest(sealed(example), "here")
    assert f"here has format version {version}, and this lightning_zero reads version 1" in str(raised.value)


def test_a_future_version_is_told_before_anything_else_is_looked_at() -> None:
    with pytest.raises(CheckpointError, match="format version 2"):
        parse_manifest(sealed({"format": "lightning_zero", "version": 2, "tensors": "in some other way"}), "here")


def test_a_manifest_of_many_pieces_is_read_in_no_time(example: dict[str, Any]) -> None:
    """Nothing in it is compared pair by pair."""
    rows = 30_000
    example["files"][0]["bytes"] = 200 + 8 * rows
    example["tensors"]["boxed"] = {
        "dtype": "float32",
        "shape": [rows, 2],
        "pieces": [[0, 200 + 8 * row, 0, 2, [row, 0], [1, 2]] for row in range(rows)],
    }
    raw = sealed(example)
    assert len(parse_manifest(raw, "here").tensors["boxed"].pieces) == rows


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=4,
)


@settings(max_examples=300)
@given(manifests(), st.data())
def test_whatever_stands_somewhere_is_read_or_refused(manifest: Manifest, data: st.DataObject) -> None:
    """And what is read has tensors of which every element was written once."""
    plain = plain_of(manifest)
    place: Any = plain
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        if not (isinstance(place[key], dict | list) and place[key] and data.draw(st.integers(0, 4))):
            break
        place = place[key]
    place[key] = data.draw(json_values)
    try:
        found = parse_manifest(sealed(plain), "here")
    except CheckpointError:
        return
    for entry in found.tensors.values():
        written = torch.zeros(entry.shape)
        for extent in (piece.extent for piece in entry.pieces):
            box = tuple(slice(a, a + b) for a, b in zip(extent.box_offset, extent.box_shape, strict=True))
            flat = written[box].clone().view(-1)
            flat[extent.start : extent.stop] += 1
            written[box] = flat.view(extent.box_shape)
        assert bool((written == 1).all())


# -- gaps


def entry_of(ranges: list[tuple[int, int]], numel: int = 10, dtype: torch.dtype = torch.float32) -> Entry:
    extents = [Extent.of_whole("w", (numel,), *bounds) for bounds in ranges]
    return Entry("w", dtype, (numel,), tuple(StoredRange(e, 0, 0, e.numel * 4) for e in extents))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted).map(tuple), max_size=6))
def test_pieces_are_believed_exactly_when_they_tile_the_tensor(ranges: list[tuple[int, int]]) -> None:
    counts = torch.zeros(6)
    for start, stop in ranges:
        counts[start:stop] += 1
    if bool((counts == 1).all()):
        refuse_gaps(entry_of(ranges, 6))
    else:
        with pytest.raises(ValueError, match="'w'"):
            refuse_gaps(entry_of(ranges, 6))


def test_pieces_that_ranks_wrote_of_other_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="several shapes or dtypes"):
        refuse_gaps(entry_of([(0, 5), (5, 10)], dtype=torch.float64))
    one, other = entry_of([(0, 5)]), entry_of([(5, 10)], 20)
    with pytest.raises(ValueError, match="several shapes or dtypes"):
        refuse_gaps(one._replace(pieces=one.pieces + other.pieces))


# -- in a folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one tensor."""
    board: Board = LocalComm().board
    Saver(board).save({"w": torch.arange(6.0), "n": 1}, str(tmp_path / "ckpt"), {"step": 3})
    return tmp_path / "ckpt"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    plain = plain_of(read_manifest(Folder(folder)))
    change(plain)
    (folder / MANIFEST).write_bytes(sealed(plain))


def test_a_checkpoint_that_claims_to_be_huge_takes_no_memory_to_refuse(folder: Path) -> None:
    def claim(plain: dict[str, Any]) -> None:
        plain["files"][0]["bytes"] = 10**15
        plain["tensors"]["w"] = {"dtype": "float32", "shape": [10**14], "pieces": [[0, 100, 0, 10**14]]}

    rewrite(folder, claim)
    found = StoredCheckpoint(folder)
    assert found.tree()["w"].shape == (10**14,)
    for use in (found.load, found.check_sizes, found.tree()["w"].sum):
        with pytest.raises(CheckpointError, match="bytes and should have 1000000000000000"):
            use()
    assert len(found.verify()) == 1


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"x": {"$": "tensor", "name": "absent"}}, "no tensor 'absent'"),
        ({"x": {"$": "unknown"}}, "'unknown' is not a kind"),
        ({"x": {"$": "class", "name": "os.system"}}, "may not name the class"),
        ({"$": "tuple", "items": [1, 2]}, "cannot be believed"),
        ({"$": "set", "items": []}, None),
        ({"$": "bytes", "value": "abcd"}, "cannot be believed"),
        ({"$": "float", "value": "1"}, "cannot be believed"),
        ({"x": {"$": "partial", "name": "p"}}, "cannot be believed"),
    ],
)
def test_a_tree_that_makes_no_sense_is_refused_when_it_is_read(folder: Path, tree: Any, told: str | None) -> None:
    rewrite(folder, lambda plain: plain.update(tree=copy.deepcopy(tree)))
    for read in (StoredCheckpoint(folder).tree, StoredCheckpoint(folder).load):
        if told is None:
            assert read() == {}
            continue
        with pytest.raises(CheckpointError, match=told):
            read()


def test_a_tree_too_deep_to_walk_is_refused_when_it_is_read(folder: Path) -> None:
    depth = 900 if sys.version_info < (3, 12) else 3000  # that JSON's parser, which is C, goes down to
    plain = plain_of(read_manifest(Folder(folder)))
    text = json.dumps({**plain, "tree": "HERE"}).replace('"HERE"', '{"a":' * depth + "0" + "}" * depth)
    (folder / MANIFEST).write_bytes(seal(text))
    with pytest.raises(CheckpointError, match="cannot be believed"):
        StoredCheckpoint(folder).tree()
