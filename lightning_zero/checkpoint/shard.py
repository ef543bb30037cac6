"""Writes and reads shards: the pieces that one rank writes, as a safetensors file with a checksum for every block."""

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
from lightning_zero.views.lazy import Range

METADATA_KEY = "lightning_zero"
CHUNK_BYTES = 1 << 24  # copied at a time between device, host and disk
LONGEST_HEADER = 100_000_000  # bytes; the safetensors library's own limit
_MOST_STREAMS = 32  # open at a time; a process may have some hundreds, and a checkpoint thousands of shards

# https://github.com/huggingface/safetensors#format; tensors of other dtypes are written as bytes.
SAFE_NAMES = (
    {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64"}
    | {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL"}
    | {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
    | {torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"}
)


class Header(NamedTuple):
    """The contents of a shard, as its header tells them."""

    pieces: list[tuple[torch.dtype, StoredRange]]
    partials: dict[str, Any]


def header_of(named: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str]) -> bytes:
    """Returns the header of a safetensors file of tensors with these names, dtypes and shapes, in this order."""
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
    """Yields the bytes of a tensor, a chunk of whole blocks at a time. A tensor on the host is not copied."""
    flat = values.detach().resolve_conj().resolve_neg().reshape(-1)
    step = CHUNK_BYTES // flat.itemsize
    for start in range(0, flat.numel(), step):
        host = flat[start : start + step].cpu().contiguous()
        yield host.view(torch.uint8).numpy().data


def write_shard(
    stream: Stream, checks: Stream, ranges: Sequence[Range], partials: dict[str, Any], beat: Callable[[], None]
) -> ShardFile:
    """Writes a rank's safetensors file and its checksums; `partials` has its encoded items of each `Partial`."""
    ranges = sorted(ranges, key=lambda item: -item.values.dtype.itemsize)  # so that every tensor is aligned
    named: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    extents: dict[str, list[Any]] = {}
    for extent, values in ranges:
        name, number = extent.name, 1
        while name in extents or name == "__metadata__":  # a rank may own several pieces; the format uses this key
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
    """Returns the checksum of a block, as it stands in the file of a shard's checksums."""
    return zlib.crc32(block).to_bytes(4, "little")


def read_header(folder: Folder, name: str, number: int) -> Header:
    """Reads the header of a shard, `number` of `Manifest.files`; raises CheckpointError when the file is none."""
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
            begin, end = plain[key]["data_offsets"]
            pieces.append((dtype_named(dtype), StoredRange(extent, number, 8 + length + begin, end - begin)))
        return Header(pieces, metadata["partials"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder.file(name)} is not a shard: {type(error).__name__}: {error}.") from error


class ShardReader:
    """Reads extents of a checkpoint's tensors, and verifies every block that it reads."""

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
        """Fills a flat tensor ``(extent.numel,)`` of any dtype and device with an extent of `entry`."""
        assert extent.shape == entry.shape, (extent, entry.shape)  # otherwise part of `into` would stay uninitialised
        size = entry.dtype.itemsize
        for piece in entry.pieces:
            for run in extent.overlaps(piece.extent):
                first, last = run.theirs * size, (run.theirs + run.numel) * size  # bytes in the piece
                for at in range(first - first % BLOCK_BYTES, last, CHUNK_BYTES):
                    skip = max(first - at, 0)  # bytes of the first block that are before the run
                    chunk = self._blocks(piece, at, min(at + CHUNK_BYTES, last))[skip:]
                    start = run.mine + (at + skip - first) // size
                    values = torch.frombuffer(chunk, dtype=entry.dtype)
                    into[start : start + values.numel()].copy_(values)

    def _blocks(self, piece: StoredRange, begin: int, end: int) -> memoryview:
        """Returns bytes ``[begin, end)`` of a piece, valid until the next call. `begin` must be the start of a block;
        the last block is read and verified to its end."""
        nbytes = min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, piece.nbytes) - begin
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
        return chunk[: end - begin]

    def check_header(self, number: int) -> None:
        """Raises CheckpointError unless the header of a shard is as it was written."""
        pieces = self.manifest.pieces_by_file[number]
        head = bytearray(pieces[0].offset if pieces else self.manifest.files[number].nbytes)
        self._read_at(number, 0, memoryview(head))
        if _check(head) != self._table(number)[:4]:
            raise CheckpointError(f"{self._path(number)} is damaged: the checksum of its header differs.")

    def check_file(self, number: int) -> None:
        """Raises CheckpointError unless every byte of a shard is as it was written."""
        self.check_header(number)
        pieces = self.manifest.pieces_by_file[number]
        for piece in pieces:
            for begin in range(0, piece.nbytes, CHUNK_BYTES):
                self._blocks(piece, begin, min(begin + CHUNK_BYTES, piece.nbytes))
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
        """Fills `into` with the bytes of a shard from `offset` on."""
        stream = self._stream(number)
        stream.seek(offset)
        self.bytes_read += len(into)
        fill(into, stream, f"{self._path(number)} ends too early.")

    def _table(self, number: int) -> bytes:
        """Returns the checksums of a shard, four bytes for each block."""
        if number not in self._tables:
            file = self.manifest.files[number]
            table = self.folder.read_checked(file.checks, file.checks_crc32, "its own checksum does not match")
            if len(table) != self.manifest.checks_nbytes(number):
                raise CheckpointError(f"{self.folder.file(file.checks)} has checksums of another file.")
            self.bytes_read += len(table)
            self._tables[number] = table
        return self._tables[number]


def fill(into: memoryview, stream: Any, ends_early: str) -> None:
    """Fills `into` from a stream, which may give less at a time; raises CheckpointError(ends_early) at its end."""
    while into:
        got = stream.readinto(into)
        if not got:
            raise CheckpointError(ends_early)
        into = into[got:]


def open_shard(folder: Folder, file: ShardFile) -> Any:
    """Opens a shard; raises CheckpointError when it is missing, or has another size than the manifest says."""
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
