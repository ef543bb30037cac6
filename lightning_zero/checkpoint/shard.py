"""A shard: the pieces that one rank writes, as a safetensors file, with a checksum for every block of it."""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.draft import Stream
from lightning_zero.checkpoint.folder import CheckpointError, Folder
from lightning_zero.checkpoint.manifest import BLOCK_BYTES, Entry, Manifest, ShardFile, StoredRange, read_manifest
from lightning_zero.checkpoint.tree import dtype_named
from lightning_zero.shards.extents import Extent
from lightning_zero.tiers.array import Part

METADATA_KEY = "lightning_zero"
CHUNK_BYTES = 1 << 24  # moves at once, between device, host and disk
_MOST_STREAMS = 32  # open at a time; a process may have some hundreds, and a checkpoint thousands of shards
LONGEST_HEADER = 100_000_000  # bytes; the safetensors library's own limit

# https://github.com/huggingface/safetensors#format; what is not here is written as bytes.
SAFE_NAMES = (
    {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64"}
    | {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL"}
    | {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
    | {torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"}
)


class Range(NamedTuple):
    """Something to write: a flat tensor, and which elements of which tensor it is."""

    extent: Extent
    values: Tensor | Part

    def read(self) -> Tensor:
        return self.values.read() if isinstance(self.values, Part) else self.values


class Held(NamedTuple):
    """A range of a tensor in a shard."""

    dtype: torch.dtype
    extent: Extent
    offset: int  # bytes from the start of the file


class Header(NamedTuple):
    """What a shard says of itself."""

    pieces: list[Held]
    partials: dict[str, Any]


def header_of(named: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str]) -> bytes:
    """The head of a safetensors file whose tensors, given by name, dtype and shape, follow in this order."""
    plain: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, dtype, shape in named:
        nbytes = math.prod(shape) * dtype.itemsize
        safe, safe_shape = (SAFE_NAMES[dtype], list(shape)) if dtype in SAFE_NAMES else ("U8", [nbytes])
        plain[name] = {"dtype": safe, "shape": safe_shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(plain, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def chunks_of(values: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, a chunk of whole blocks at a time; what is on the host is not copied."""
    flat = values.detach().resolve_conj().resolve_neg().reshape(-1)
    step = CHUNK_BYTES // flat.itemsize
    for start in range(0, flat.numel(), step):
        host = flat[start : start + step].cpu().contiguous()
        yield host.view(torch.uint8).numpy().data


def write_shard(
    stream: Stream, checks: Stream, ranges: Sequence[Range], partials: dict[str, Any], beat: Callable[[], None]
) -> ShardFile:
    """Writes a safetensors file and its checksums: what a rank has, and its part of each `tree.Partial`, encoded."""
    ranges = sorted(ranges, key=lambda item: -item.values.dtype.itemsize)  # so that every tensor is aligned
    named: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    extents: dict[str, list[Any]] = {}
    for extent, values in ranges:
        name, number = extent.name, 1
        while name in extents or name == "__metadata__":  # a rank may own several ranges; the format's own key
            number += 1
            name = f"{extent.name}#{number}"
        is_whole = extent.numel == math.prod(extent.shape)
        named.append((name, values.dtype, extent.shape if is_whole else (extent.numel,)))
        dtype, box = str(values.dtype).removeprefix("torch."), (extent.box_offset, extent.box_shape)
        extents[name] = [extent.name, dtype, extent.shape, extent.start, extent.stop, *box]
    metadata = json.dumps({"extents": extents, "partials": partials}, separators=(",", ":"))
    head = header_of(named, {"format": "pt", METADATA_KEY: metadata})
    table = bytearray(_check(head))
    nbytes = len(head)
    stream.write(head)
    for each in ranges:
        for chunk in chunks_of(each.read()):
            table += b"".join(_check(chunk[at : at + BLOCK_BYTES]) for at in range(0, len(chunk), BLOCK_BYTES))
            stream.write(chunk)
            nbytes += len(chunk)
            beat()
    checks.write(table)
    return ShardFile(stream.name, nbytes, checks.name, zlib.crc32(table))


def _check(block: bytes | bytearray | memoryview) -> bytes:
    """A checksum as it stands in the file of a shard's checksums."""
    return zlib.crc32(block).to_bytes(4, "little")


def read_header(folder: Folder, name: str) -> Header:
    """The head of a shard that `write_shard` wrote; raises CheckpointError when it is not one."""
    with folder.open(name) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > LONGEST_HEADER:
            raise CheckpointError(f"{folder.file(name)} is not a shard: its header would have {length} bytes.")
        raw = stream.read(length)
    try:
        plain = json.loads(raw)
        metadata = json.loads(plain["__metadata__"][METADATA_KEY])
        pieces = []
        for key, (of, dtype, shape, start, stop, *box) in metadata["extents"].items():
            shape, box_offset, box_shape = map(tuple, (shape, *box))
            extent = Extent(name=of, shape=shape, box_offset=box_offset, box_shape=box_shape, start=start, stop=stop)
            pieces.append(Held(dtype_named(dtype), extent, 8 + length + plain[key]["data_offsets"][0]))
        return Header(pieces, metadata["partials"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder.file(name)} is not a shard: {type(error).__name__}: {error}.") from error


class ShardReader:
    """Reads ranges of a checkpoint's tensors, and checks every block that it touches."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.bytes_read = 0  # of shards and their checksums
        self._tables: dict[int, bytes] = {}
        self._streams: dict[int, Any] = {}  # the last used comes last
        self._buffer = bytearray()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._tables.clear()
        self._buffer = bytearray()

    def open(self, entry: Entry) -> None:
        """Raises CheckpointError when a file that holds part of `entry` is missing or short."""
        for piece in entry.pieces:
            self._stream(piece.file)

    def read(self, entry: Entry, extent: Extent, into: Tensor) -> None:
        """Fills a flat tensor ``(extent.numel,)`` of any dtype and device with a range of `entry`."""
        assert extent.shape == entry.shape, (extent, entry.shape)  # a part of it would stay as the memory was
        for piece in entry.pieces:
            for run in extent.overlaps(piece.extent):
                self._read_run(entry, piece, run.theirs, into[run.mine : run.mine + run.numel])

    def _read_run(self, entry: Entry, piece: StoredRange, start: int, into: Tensor) -> None:
        """Elements from `start` on of a piece, a chunk of whole blocks at a time."""
        size = entry.dtype.itemsize
        first, last = start * size, (start + into.numel()) * size
        done = 0
        for at in range(first // BLOCK_BYTES * BLOCK_BYTES, last, CHUNK_BYTES):
            chunk = self._blocks(piece, at, min(at + CHUNK_BYTES, -(-last // BLOCK_BYTES) * BLOCK_BYTES))
            mine = chunk[max(first - at, 0) : last - at]
            values = torch.frombuffer(mine, dtype=entry.dtype) if len(mine) else into.new_empty(0)
            into[done : done + values.numel()].copy_(values)
            done += values.numel()

    def _blocks(self, piece: StoredRange, begin: int, end: int) -> memoryview:
        """Bytes ``[begin, end)`` of a piece, which start at a block, checked; valid until the next call."""
        nbytes = min(end, piece.nbytes) - begin
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        chunk = memoryview(self._buffer)[:nbytes]
        self._read_at(piece.file, piece.offset + begin, chunk)
        table = self._table(piece.file)
        block = self.manifest.first_blocks[piece.file, piece.offset] + begin // BLOCK_BYTES
        for number, at in enumerate(range(0, nbytes, BLOCK_BYTES), start=block):
            if _check(chunk[at : at + BLOCK_BYTES]) != table[4 * number : 4 * number + 4]:
                raise CheckpointError(
                    f"{self._path(piece.file)} is damaged: the checksum of {piece.extent.name!r} does not match at "
                    f"byte {piece.offset + begin + at}. Resume from another checkpoint; `lightning-zero verify` tells "
                    "which are whole."
                )
        return chunk

    def check_header(self, number: int) -> None:
        """Raises CheckpointError unless the head of a shard is what was written."""
        pieces = self.manifest.pieces[number]
        head = bytearray(pieces[0].offset if pieces else self.manifest.files[number].nbytes)
        self._read_at(number, 0, memoryview(head))
        if _check(head) != self._table(number)[:4]:
            raise CheckpointError(f"{self._path(number)} is damaged: the checksum of its header differs.")

    def check_file(self, number: int) -> None:
        """Raises CheckpointError unless every byte of a shard is what was written."""
        self.check_header(number)
        pieces = self.manifest.pieces[number]
        for piece in pieces:
            for begin in range(0, piece.nbytes, CHUNK_BYTES):
                self._blocks(piece, begin, begin + CHUNK_BYTES)
        starts = [*(piece.offset for piece in pieces), self.manifest.files[number].nbytes]
        if starts[1:] != [piece.offset + piece.nbytes for piece in pieces]:
            raise CheckpointError(f"{self._path(number)} has bytes of no tensor.")

    def _path(self, number: int) -> str:
        return self.folder.file(self.manifest.files[number].name)

    def _stream(self, number: int) -> Any:
        stream = self._streams.pop(number, None) or open_shard(self.folder, self.manifest.files[number])
        self._streams[number] = stream
        if len(self._streams) > _MOST_STREAMS:
            self._streams.pop(next(iter(self._streams))).close()
        return stream

    def _read_at(self, number: int, offset: int, into: memoryview) -> None:
        """Fills `into` with a shard's bytes from `offset` on."""
        stream = self._stream(number)
        stream.seek(offset)
        self.bytes_read += len(into)
        while into:
            got = stream.readinto(into)
            if not got:
                raise CheckpointError(f"{getattr(stream, 'path', stream)} ends too early.")
            into = into[got:]

    def _table(self, number: int) -> bytes:
        """The checksums of a shard, four bytes for each block."""
        if number not in self._tables:
            file = self.manifest.files[number]
            try:
                table = self.folder.read(file.checks)
            except FileNotFoundError:
                raise CheckpointError(f"{self.folder}: {file.checks} is missing.") from None
            if zlib.crc32(table) != file.checks_crc32:
                raise CheckpointError(f"{self.folder.file(file.checks)} is damaged: its own checksum does not match.")
            if len(table) != self.manifest.checks_nbytes(number):
                raise CheckpointError(f"{self.folder.file(file.checks)} has checksums of another file.")
            self.bytes_read += len(table)
            self._tables[number] = table
        return self._tables[number]


def open_shard(folder: Folder, file: ShardFile) -> Any:
    """The shard, once it is known to have the bytes that it should."""
    try:
        found = folder.size(file.name)
        if found == file.nbytes:
            return folder.open(file.name)
    except FileNotFoundError:
        names, files = set(folder.names()), read_manifest(folder).files
        census = f"{sum(other.name in names for other in files)} of {len(files)} shards are there."
        if file not in files:
            census = "Another checkpoint was saved to its place in between: open that."
        raise CheckpointError(f"{folder}: {file.name} is missing. {census}") from None
    raise CheckpointError(f"{folder.file(file.name)} has {found} bytes and should have {file.nbytes}.")
