"""Shards: every bit comes back, every flipped bit is found, and nobody reads more than it needs."""

import contextlib
import copy
import io
import itertools
import math
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from engine_checkpoints import Place, resume, tree_of
from lightning_zero.checkpoint import CheckpointError, Saver, StoredCheckpoint, find_newest, verify
from lightning_zero.checkpoint.draft import Stream
from lightning_zero.checkpoint.folder import MANIFEST, README, Folder
from lightning_zero.checkpoint.manifest import BLOCK_BYTES, Entry, Manifest, ShardFile
from lightning_zero.checkpoint.shard import ShardReader, chunks_of, header_of, read_header, write_shard
from lightning_zero.checkpoint.spread import SpreadPart
from lightning_zero.distributed_private import leave_imagined_world
from lightning_zero.run.engine import Engine
from lightning_zero.shards.extents import Extent
from lightning_zero.views.lazy import Range
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from models import seeded
from opened import opened

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(
        torch.float8_e4m3fnuz,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
    ),
    *(torch.uint64, torch.bool, torch.complex64, torch.complex128),
]
NOT_IN_SAFETENSORS = {torch.complex128, torch.float8_e4m3fnuz}


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Any value that the dtype has, and NaNs of every kind."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(tuple(shape)) if nbytes else torch.empty(tuple(shape), dtype=dtype)


def bits(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def stream_to(raw: Any) -> Stream:
    return Stream(raw, "somewhere", has_disk=False)


def write(folder: Path, shards: Sequence[Sequence[Range]]) -> ShardReader:
    """Writes shards as so many ranks would, and opens what they come to."""
    folder.mkdir(exist_ok=True)
    files: list[ShardFile] = []
    tensors: dict[str, Entry] = {}
    for number, ranges in enumerate(shards):
        shard, checks = folder / f"{number}.safetensors", folder / f"{number}.crc32"
        with shard.open("wb") as raw, checks.open("wb") as raw_checks:
            streams = stream_to(raw), stream_to(raw_checks)
            written = write_shard(*streams, ranges, {"rank": number}, beat=lambda: None)
        assert written.nbytes == shard.stat().st_size
        files.append(ShardFile(shard.name, written.nbytes, checks.name, written.checks_crc32))
        header = read_header(Folder(folder), shard.name, number)
        assert header.partials == {"rank": number}
        for dtype, piece in header.pieces:
            name, shape = piece.extent.name, piece.extent.shape
            entry = tensors.setdefault(name, Entry(name, dtype, shape, ()))
            tensors[name] = entry._replace(pieces=(*entry.pieces, piece))
    manifest = Manifest(about={}, files=tuple(files), tensors=tensors, tree={}, partials={}, objects=None)
    return ShardReader(Folder(folder), manifest)


def cut(name: str, values: Tensor, bounds: Sequence[int]) -> list[Range]:
    flat = values.reshape(-1)
    return [
        Range(Extent.of_whole(name, tuple(values.shape), start, stop), flat[start:stop])
        for start, stop in itertools.pairwise(bounds)
    ]


@st.composite
def saved_tensors(draw: Any) -> tuple[dict[str, Tensor], list[list[Range]]]:
    """Tensors, and how some ranks divide them: small ones, and some that take several blocks."""
    shards: list[list[Range]] = [[] for _ in range(draw(st.integers(1, 3)))]
    tensors = {}
    for name in draw(st.lists(st.text(max_size=4), unique=True, min_size=1, max_size=4)):
        small = st.lists(st.integers(0, 5), max_size=3)
        shape = draw(small | st.tuples(st.integers(1, 4), st.sampled_from([1023, 1024, 4097])).map(list))
        tensors[name] = random_bits(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
        numel = tensors[name].numel()
        bounds = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=3))})
        for part in cut(name, tensors[name], bounds if numel else [0, 0]):
            shards[draw(st.integers(0, len(shards) - 1))].append(part)
    return tensors, shards


@settings(max_examples=150)
@given(saved=saved_tensors(), data=st.data())
def test_any_range_of_any_tensor_comes_back_in_every_bit(
    tmp_path_factory: pytest.TempPathFactory, saved: tuple[dict[str, Tensor], list[list[Range]]], data: st.DataObject
) -> None:
    tensors, shards = saved
    with contextlib.closing(write(tmp_path_factory.mktemp("shards"), shards)) as reader:
        for number in range(len(shards)):
            reader.check_file(number)
        for name, values in tensors.items():
            entry = reader.manifest.tensors[name]
            assert (entry.dtype, entry.shape, entry.nbytes) == (values.dtype, tuple(values.shape), values.nbytes)
            ranges = [(0, values.numel()), sorted(data.draw(st.tuples(*[st.integers(0, values.numel())] * 2)))]
            for start, stop in ranges:
                found = random_bits((stop - start,), values.dtype, 100)
                reader.read(entry, Extent.of_whole(name, entry.shape, start, stop), found)
                assert torch.equal(bits(found), bits(values.reshape(-1)[start:stop]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_a_range_is_read_into_whatever_dtype_the_reader_has(dtype: torch.dtype, tmp_path: Path) -> None:
    values = (torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    with contextlib.closing(write(tmp_path, [cut("w", values, [0, 1234]), cut("w", values, [1234, 5000])])) as reader:
        for into in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64):
            found = torch.empty(4000, dtype=into)
            reader.read(reader.manifest.tensors["w"], Extent.of_whole("w", (5000,), 500, 4500), found)
            assert torch.equal(found, values[500:4500].to(into))


def test_boxes_of_tensor_parallel_ranks_come_back_as_the_whole_and_as_other_boxes(tmp_path: Path) -> None:
    whole = torch.arange(6.0 * 50 * 60).view(6, 50, 60)

    def box(*ranges: tuple[int, int]) -> tuple[Tensor, dict[str, Any]]:
        inside = whole[tuple(slice(*bounds) for bounds in ranges)]
        offset = tuple(start for start, _ in ranges)
        return inside.reshape(-1), {
            "name": "w",
            "shape": (6, 50, 60),
            "box_offset": offset,
            "box_shape": tuple(inside.shape),
        }

    shards = []
    for columns in ((0, 25), (25, 60)):
        for rows in ((0, 20), (20, 50)):
            values, place = box((0, 6), rows, columns)
            middle = values.numel() // 3
            bounds = [(0, middle), (middle, values.numel())]
            shards += [[Range(Extent(**place, start=start, stop=stop), values[start:stop])] for start, stop in bounds]
    with contextlib.closing(write(tmp_path, shards)) as reader:
        entry = reader.manifest.tensors["w"]
        for ranges in [
            ((0, 6), (0, 50), (0, 60)),
            ((1, 3), (0, 50), (0, 60)),
            ((0, 6), (10, 30), (0, 60)),
            ((2, 5), (5, 45), (20, 30)),
        ]:
            values, place = box(*ranges)
            found = torch.full_like(values, -1)
            reader.read(entry, Extent(**place, start=0, stop=values.numel()), found)
            assert torch.equal(found, values)
            part = torch.full((values.numel() // 2,), -1.0)
            reader.read(entry, Extent(**place, start=7, stop=7 + part.numel()), part)
            assert torch.equal(part, values[7 : 7 + part.numel()])


def test_what_is_larger_than_a_chunk_is_written_and_read_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_zero.checkpoint.shard.CHUNK_BYTES", 2 * BLOCK_BYTES)
    beats = []
    values = random_bits((10_000,), torch.float64, 3)
    assert [len(chunk) for chunk in chunks_of(values)] == [2 * BLOCK_BYTES] * 4 + [80_000 - 8 * BLOCK_BYTES]
    with contextlib.closing(write(tmp_path, [cut("w", values, [0, 3333, 10_000])])) as reader:
        for start, stop in [(0, 10_000), (1, 9999), (3000, 3400), (5000, 5001), (7, 7)]:
            found = torch.empty(stop - start, dtype=torch.float64)
            reader.read(reader.manifest.tensors["w"], Extent.of_whole("w", (10_000,), start, stop), found)
            assert torch.equal(bits(found), bits(values[start:stop]))
        reader.check_file(0)
    ranges = cut("w", values, [0, 10_000])
    sinks = stream_to(io.BytesIO()), stream_to(io.BytesIO())
    write_shard(*sinks, ranges, {}, beat=lambda: beats.append(1))
    assert len(beats) == 5  # whoever waits hears that this rank lives


def test_views_and_conjugates_are_written_as_the_values_they_show(tmp_path: Path) -> None:
    signal = torch.randn(6, 4, dtype=torch.complex64)
    shown = {
        "transposed": signal.t(),
        "every second": signal[::2, 1:3],
        "conjugate": signal.conj(),
        "negative": signal.conj().imag,
        "one negative number": signal.conj().imag[0, 0],
        "expanded": torch.ones(1).expand(5),
    }
    Saver(LocalComm().board).save(shown, str(tmp_path / "ckpt"), {})
    for name, values in StoredCheckpoint(tmp_path / "ckpt").load().items():
        assert torch.equal(values, shown[name])


# -- for other tools


def test_shards_open_with_the_safetensors_library(tmp_path: Path) -> None:
    wholes = {str(dtype): random_bits((3, 5), dtype, at) for at, dtype in enumerate(DTYPES)}
    wholes |= {"no dimensions": torch.tensor(1.5), "empty": torch.empty(0, 4), "name of its own": torch.ones(3)}
    long = torch.arange(100)
    ranges = [part for name, values in wholes.items() for part in cut(name, values, [0, values.numel()])]
    ranges += [*cut("long", long, [10, 20]), *cut("long", long, [50, 100])]
    write(tmp_path, [ranges]).close()
    with safe_open(tmp_path / "0.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert set(file.keys()) == {*wholes, "long", "long#2"}
        for name, values in wholes.items():
            found = file.get_tensor(name)
            if values.dtype in NOT_IN_SAFETENSORS:
                assert found.dtype == torch.uint8
            else:
                assert (found.dtype, found.shape) == (values.dtype, values.shape)
            assert torch.equal(bits(found), bits(values))
        assert torch.equal(file.get_tensor("long"), long[10:20])
        assert torch.equal(file.get_tensor("long#2"), long[50:])


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=8))
def test_every_tensor_lies_at_a_multiple_of_its_elements_size(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]]
) -> None:
    """So that a file can be mapped, and its tensors used where they are."""
    ranges = [
        part
        for at, (dtype, shape) in enumerate(kinds)
        for part in cut(f"{at}", random_bits(shape, dtype, 0), [0, math.prod(shape)])
    ]
    reader = write(tmp_path_factory.mktemp("aligned"), [ranges])
    assert all(
        piece.offset % min(entry.dtype.itemsize, 8) == 0
        for entry in reader.manifest.tensors.values()
        for piece in entry.pieces
    )
    folder = Path(str(reader.folder))
    with safe_open(folder / "0.safetensors", "pt") as file:
        assert len(file.keys()) == len(kinds)


@pytest.mark.parametrize("name", ["__metadata__", "", "a#2", "a b/ä\n", "\ud800", "#2", "x" * 5000])
def test_a_tensor_may_have_any_name(name: str, tmp_path: Path) -> None:
    Saver(LocalComm().board).save({name: torch.ones(3), "a": torch.zeros(2)}, str(tmp_path / "ckpt"), {})
    found = StoredCheckpoint(tmp_path / "ckpt").load()
    assert torch.equal(found[name], torch.ones(3))
    assert torch.equal(found["a"], torch.zeros(2))
    assert verify(tmp_path / "ckpt") == []


def test_a_header_is_padded_and_counts_bytes_as_the_format_says() -> None:
    head = header_of([("a", torch.float32, (2, 3)), ("b", torch.complex128, (2,))], {"format": "pt"})
    assert len(head) % 8 == 0
    assert int.from_bytes(head[:8], "little") == len(head) - 8
    assert b'"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}' in head
    assert b'"b":{"dtype":"U8","shape":[32],"data_offsets":[24,56]}' in head


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{}", b"\x05" + b"\0" * 7 + b"nope!", b"\x02\0"]
)
def test_a_file_that_is_no_shard_of_ours_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is not a shard"):
        read_header(Folder(tmp_path), "x.safetensors", 0)


# -- damage


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three ranks, with tensors of several blocks and an object."""
    path = tmp_path_factory.mktemp("damage") / "ckpt"

    def on_rank(comm: Comm) -> None:
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = Engine(model, [optimizer], stage=2, comm=comm)
        model(torch.ones(2, 70)).sum().backward()
        optimizer.step()
        tree = {
            "state_dict": engine.states.spread_model(),
            "optimizer_states": [engine.states.spread_optimizer(optimizer)],
            "callbacks": {"tensor": torch.arange(5), "object": Fraction(1, 3)},
        }
        Saver(comm.board, warn=lambda _: None).save(tree, str(path), {"step": 1})

    start = seeded(lambda: nn.Sequential(nn.Linear(70, 90), nn.BatchNorm1d(90)))
    Place(2, 3).run(on_rank)
    assert verify(path) == []
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".crc32", ".json", ".pt", ".txt"}
    return path


def positions(path: Path, sampled: int) -> Iterator[tuple[Path, int]]:
    """Bits of all files of a checkpoint: some of each file, and for the rest by size."""
    chance = random.Random(0)
    files = sorted(path.iterdir())
    each = [file for file in files for _ in range(5)]
    weighted = chance.choices(files, [file.stat().st_size for file in files], k=sampled - len(each))
    for file in [*each, *weighted]:
        yield file, chance.randrange(8 * file.stat().st_size)


@contextlib.contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    content = file.read_bytes()
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    file.write_bytes(damaged)
    yield
    file.write_bytes(content)


def test_a_flipped_bit_in_any_file_is_found_and_named(checkpoint: Path) -> None:
    for file, bit in positions(checkpoint, 200):
        with flipped(file, bit):
            problems = verify(checkpoint)
        assert len(problems) == 1
        assert file.stem in problems[0]
        assert "damaged" in problems[0]
    assert verify(checkpoint) == []


def resume_from(path: Path) -> None:
    """Reads what one rank would."""
    with contextlib.closing(StoredCheckpoint(path)) as found:
        found.load()
        found.verify_rest(0, 1)


def test_a_flipped_bit_in_any_file_is_found_by_whoever_resumes(checkpoint: Path) -> None:
    for file, bit in positions(checkpoint, 200):
        if file.name != README:
            with flipped(file, bit), pytest.raises(CheckpointError, match=f"{file.stem}.*is damaged"):
                resume_from(checkpoint)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_what_nobody_reads_who_resumes_is_verified_by_one_rank(parts: int, tmp_path: Path) -> None:
    tree = {"callbacks": {name: torch.arange(5) for name in "abcd"}, "random": torch.ones(3), "mine": Fraction(1, 3)}
    Saver(LocalComm().board, warn=lambda _: None).save(tree, str(tmp_path / "a"), {})
    manifest = StoredCheckpoint(tmp_path / "a").manifest
    shard, objects = (next((tmp_path / "a").glob(f"*.{kind}")) for kind in ("safetensors", "pt"))
    damages = [(shard, 8 * 40), (objects, 8 * 40)]
    damages += [(shard, 8 * entry.pieces[0].offset) for entry in manifest.tensors.values()]
    assert len(damages) == 7
    for file, bit in damages:
        with flipped(file, bit):
            told = [error_of_part(tmp_path / "a", part, parts) for part in range(parts)]
        (problem,) = [error for error in told if error is not None]
        assert f"{file.name} is damaged" in problem
    assert [error_of_part(tmp_path / "a", part, parts) for part in range(parts)] == [None] * parts


def error_of_part(path: Path, part: int, parts: int) -> str | None:
    with contextlib.closing(StoredCheckpoint(path)) as found:
        try:
            found.verify_rest(part, parts)
        except CheckpointError as error:
            return str(error)
    return None


def test_what_is_left_out_is_told_of_the_last_reading_alone(checkpoint: Path) -> None:
    with contextlib.closing(StoredCheckpoint(checkpoint)) as found:
        for _ in range(2):
            found.load()
            assert found.left_out == ["fractions.Fraction"]
        found.load(objects=True)
        assert found.told_left_out is None


def test_the_text_that_says_what_the_folder_is_is_nobodys_data(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    text = (folder / README).read_text()
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 120
    commands = set(re.findall(r"lightning-zero (\w+) DIR", text))
    assert commands == {"inspect", "verify", "consolidate"}
    (folder / README).unlink()
    assert verify(folder) == [f"{folder}: README.txt is missing."]
    resume_from(folder)
    assert str(find_newest(tmp_path).newest) == str(folder)


CHANGES: dict[str, Callable[[bytes], bytes] | None] = {
    "missing": None,
    "a byte short": lambda raw: raw[:-1],
    "half of it": lambda raw: raw[: len(raw) // 2],
    "empty": lambda raw: b"",
    "a byte long": lambda raw: raw + b"\0",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("suffix", [".safetensors", ".crc32", ".json", ".pt"])
def test_a_file_that_is_missing_short_or_long_is_named(
    checkpoint: Path, suffix: str, change: str, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    file = sorted((tmp_path / "copy").glob(f"*{suffix}"))[-1]
    make = CHANGES[change]
    file.unlink() if make is None else file.write_bytes(make(file.read_bytes()))
    (problem,) = verify(tmp_path / "copy")
    assert file.stem in problem
    with pytest.raises(CheckpointError, match=file.stem):
        resume_from(tmp_path / "copy")


def test_a_missing_shard_is_told_with_how_many_are_there(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    next((tmp_path / "copy").glob("shard-00001-*.safetensors")).unlink()
    with pytest.raises(
        CheckpointError, match=r"shard-00001-of-00003-\w+\.safetensors is missing. 2 of 3 shards are there"
    ):
        StoredCheckpoint(tmp_path / "copy").load()


BLOCK = BLOCK_BYTES // 4  # elements of float32


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor of ten blocks and a half, the fourth of which has a flipped bit."""
    folder = tmp_path_factory.mktemp("block")
    reader = write(folder, [cut("w", torch.arange(10.5 * BLOCK), [0, int(10.5 * BLOCK)])])
    piece = reader.manifest.tensors["w"].pieces[0]
    content = bytearray((folder / "0.safetensors").read_bytes())
    content[piece.offset + 3 * BLOCK_BYTES + 77] ^= 4
    (folder / "0.safetensors").write_bytes(content)
    (folder / "manifest.json").write_bytes(reader.manifest.to_bytes())
    reader.close()
    return folder


@given(st.tuples(*[st.integers(0, int(10.5 * BLOCK))] * 2).map(sorted))
@example([0, 3 * BLOCK])
@example([4 * BLOCK, int(10.5 * BLOCK)])
@example([4 * BLOCK - 1, 4 * BLOCK])
@example([3 * BLOCK, 3 * BLOCK + 1])
@example([3 * BLOCK + 5, 3 * BLOCK + 5])
def test_a_range_is_refused_exactly_when_it_touches_a_damaged_block(damaged: Path, bounds: list[int]) -> None:
    start, stop = bounds
    checkpoint = StoredCheckpoint(damaged)
    found = torch.empty(stop - start)
    touches = start < stop and start < 4 * BLOCK and stop > 3 * BLOCK
    with pytest.raises(CheckpointError, match="'w' does not match") if touches else contextlib.nullcontext():
        checkpoint.reader.read(
            checkpoint.manifest.tensors["w"], Extent.of_whole("w", (int(10.5 * BLOCK),), start, stop), found
        )
        assert torch.equal(found, torch.arange(float(start), float(stop)))
    checkpoint.close()


def test_checksums_of_another_file_are_refused(checkpoint: Path) -> None:
    found = StoredCheckpoint(checkpoint)
    first, second, *rest = found.manifest.files
    swapped = first._replace(checks=second.checks, checks_crc32=second.checks_crc32)
    vars(found.manifest)["files"] = (swapped, second, *rest)
    with pytest.raises(CheckpointError, match=r"\.crc32 has checksums of another file|is damaged"):
        found.load()


@pytest.mark.parametrize("cut_to", [-4, None])
def test_checksums_of_more_or_fewer_blocks_are_those_of_another_file(
    cut_to: int | None, checkpoint: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    found = StoredCheckpoint(path)
    first, *rest = found.manifest.files
    table = (path / first.checks).read_bytes()[:cut_to] + (b"more" if cut_to is None else b"")
    (path / first.checks).write_bytes(table)
    vars(found.manifest)["files"] = (first._replace(checks_crc32=zlib.crc32(table)), *rest)
    with contextlib.closing(found), pytest.raises(CheckpointError, match=r"\.crc32 has checksums of another file"):
        found.verify_rest(0, 1)


def test_bytes_that_belong_to_no_tensor_are_told(tmp_path: Path) -> None:
    reader = write(tmp_path, [cut("w", torch.ones(5), [0, 5])])
    (file,) = reader.manifest.files
    with (tmp_path / file.name).open("ab") as raw:
        raw.write(b"more")
    vars(reader.manifest)["files"] = (file._replace(nbytes=file.nbytes + 4),)
    with pytest.raises(CheckpointError, match="bytes of no tensor"):
        reader.check_file(0)


# -- files that take or give less than they are asked for


class Reluctant(io.BytesIO):
    """Takes and gives at most three bytes, or seven, at a time."""

    calls = 0

    def write(self, data: Any) -> int:
        self.calls += 1
        return super().write(bytes(data[: 3 + 4 * (self.calls % 2)]))

    def readinto(self, into: Any) -> int:
        self.calls += 1
        return super().readinto(memoryview(into)[: 3 + 4 * (self.calls % 2)])


def test_short_writes_are_gone_on_with() -> None:
    values = random_bits((500,), torch.float64, 1)
    ranges = cut("w", values, [0, 500])
    written = []
    for kind in (io.BytesIO, Reluctant):
        raw, checks = kind(), kind()
        result = write_shard(stream_to(raw), stream_to(checks), ranges, {}, lambda: None)
        written.append((raw.getvalue(), checks.getvalue(), result))
    assert written[0] == written[1]


def test_a_disk_that_takes_nothing_more_is_an_error_and_not_a_loop() -> None:
    class Full(io.RawIOBase):
        def write(self, data: Any) -> int:
            return 0

    with pytest.raises(CheckpointError, match="cannot write somewhere: wrote nothing of 3 bytes"):
        stream_to(Full()).write(b"abc")


def test_what_waits_for_the_disk_is_synced_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the sync at the end is short, in which other ranks wait."""
    synced = []
    monkeypatch.setattr("lightning_zero.checkpoint.draft.os.fsync", lambda _: synced.append(raw.tell()))
    monkeypatch.setattr(Stream, "SYNC_BYTES", 100)
    with io.FileIO(tmp_path / "a", "w") as raw:
        stream = Stream(raw, str(tmp_path / "a"), has_disk=True)
        for _ in range(8):
            stream.write(bytes(60))
        stream.sync()
    assert synced == [120, 240, 360, 480, 480]


def test_short_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = random_bits((5000,), torch.float32, 1)
    reader = write(tmp_path, [cut("w", values, [0, 2000]), cut("w", values, [2000, 5000])])
    monkeypatch.setattr(Folder, "open", lambda self, name: Reluctant((tmp_path / name).read_bytes()))
    found = torch.empty(4000)
    reader.read(reader.manifest.tensors["w"], Extent.of_whole("w", (5000,), 500, 4500), found)
    assert torch.equal(bits(found), bits(values[500:4500]))
    reader.check_file(0)


def test_a_file_that_ends_while_it_is_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = write(tmp_path, [cut("w", torch.ones(5000), [0, 5000])])
    monkeypatch.setattr(Folder, "open", lambda self, name: io.BytesIO((tmp_path / name).read_bytes()[:9000]))
    with pytest.raises(CheckpointError, match="ends too early"):
        reader.read(reader.manifest.tensors["w"], Extent.of_whole("w", (5000,)), torch.empty(5000))


# -- bytes


class Large(nn.Module):
    """Almost 6 million parameters, of sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.randn(rows, 1009) * 0.01 for rows in (1501, 2003, 7, 1999, 1, 211)])
        self.biases = nn.ParameterList([torch.randn(1009) for _ in range(6)])

    def forward(self) -> Tensor:
        return sum((parameter.sum() for parameter in self.parameters()), start=torch.zeros(()))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("saved_by", "resumed_by"), [(4, 3), (2, 8), (3, 1)])
def test_r46_ranks_that_resume_read_a_checkpoint_once_between_them(
    stage: int, saved_by: int, resumed_by: int, tmp_path: Path
) -> None:
    path = tmp_path / "ckpt"
    start = seeded(Large)

    def save(comm: Comm) -> None:
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        engine = Engine(model, [optimizer], stage=stage, comm=comm)
        model().backward()
        optimizer.step()
        Saver(comm.board).save(tree_of(engine, [optimizer]), str(path), {})

    def resume_and_count(comm: Comm) -> int:
        model = copy.deepcopy(start)
        optimizers = [torch.optim.AdamW(model.parameters(), foreach=True)]
        checkpoint = StoredCheckpoint(path)
        resume(comm, model, optimizers, Place(stage, resumed_by), checkpoint)
        checkpoint.close()
        return checkpoint.reader.bytes_read

    Place(stage, saved_by).run(save)
    on_disk = sum(file.stat().st_size for file in path.iterdir())
    assert on_disk >= 64e6
    read = Place(stage, resumed_by).run(resume_and_count)
    assert sum(read) <= 1.05 * on_disk
    unread = sum((path / name).stat().st_size for name in (MANIFEST, README))
    assert sum(read) >= on_disk - unread  # all of it is read, and counted
    assert max(read) <= 1.1 * on_disk / resumed_by


def test_a_checkpoint_of_many_shards_is_read_with_few_files_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_zero.checkpoint.shard._MOST_STREAMS", 2)
    values = torch.arange(12.0)
    reader = write(tmp_path / "a", [cut("x", values, bounds) for bounds in itertools.pairwise(range(13))])
    before = opened()
    for _ in range(2):
        into = torch.zeros(12)
        reader.read(reader.manifest.tensors["x"], Extent.of_whole("x", (12,)), into)
        assert torch.equal(into, values)
    assert len(opened() - before) == 2
    reader.close()
    assert opened() - before == set()


def test_of_the_ranks_that_have_a_part_of_a_tensor_one_writes_it() -> None:
    """Replicas have it, as those with other shards do; and where it is not divided, all tensor-parallel ranks."""

    def writers_of(tensor: DTensor) -> list[tuple[int, ...]]:
        found = []
        for shard, replica, part in itertools.product(range(2), repeat=3):
            mesh: Any = Mock(shard=Mock(rank=shard), replicate=Mock(rank=replica), tensor=Mock(rank=part))
            found += [(shard, replica, part) for _ in SpreadPart("part", tensor, mesh).pieces()]
        return found

    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        two = init_device_mesh("cpu", (2,))
        for where, writers in ((Shard(0), [(0, 0, 0), (0, 0, 1)]), (Replicate(), [(0, 0, 0)])):
            assert writers_of(DTensor.from_local(torch.ones(2, 3), two, [where], run_check=False)) == writers
    finally:
        leave_imagined_world()
