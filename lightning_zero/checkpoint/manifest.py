"""The manifest: which tensors and values a checkpoint holds, and where; plain data, in JSON that any tool can read.

    {"format": "lightning_zero", "version": 1, "about": {...}, "block_bytes": 8192,
     "files":    [{"name", "bytes", "checks", "checks_crc32"}, ...],
     "tensors":  {name: {"dtype", "shape", "pieces": [[file, offset, start, stop], ...]}, ...},
     "tree":     the checkpoint as Lightning knows it, tensors by name (`tree.Encoder`),
     "partials": {name: a dictionary merged from all ranks' items, such as an optimizer's state, encoded as the tree},
     "objects":  null, or the file of pickled objects,
     "readme":   the file that says what the folder is; older manifests have none,
     "crc32":    of everything before it}

A piece holds elements ``[start, stop)`` of the whole tensor, in C order. One that a tensor-parallel rank wrote holds
elements of a box, whose offset and shape are two more entries. Nothing depends on the stage, the number of ranks or the
optimizer: every reader takes the extents it needs. A manifest may come from anywhere; it is checked before it is used.
"""

import itertools
import json
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lightning_zero.checkpoint.folder import MANIFEST, README, README_TEXT, CheckpointError, Folder
from lightning_zero.checkpoint.tree import dtype_named
from lightning_zero.shards.extents import Extent
from lightning_zero.wording import few_of

FORMAT = "lightning_zero"
VERSION = 1
# The unit of verification. Readers read whole blocks, so an extent costs up to two blocks more than its own bytes: with
# blocks of 1 MiB, eight ranks that resume from a checkpoint of 64 MB would read it several times over.
BLOCK_BYTES = 8192
_MOST_DIMENSIONS = 64  # checked before their sizes are multiplied
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]*")
_NO_VALUES = re.compile(r"torch\.(q|bits|u?int[1-7]$)")  # quantised dtypes, and those without operations in torch
_END_OF_TIME = 253402300800  # 10000-01-01 in seconds since 1970; calendars end there
_SEAL = ',"crc32":"%08x"}\n'
_SEAL_BYTES = len(_SEAL % 0)

_Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape


@dataclass(frozen=True)
class StoredRange:
    """A piece of a tensor, and where its bytes are."""

    extent: Extent
    file: int  # of `Manifest.files`
    offset: int  # bytes from the start of the file
    nbytes: int

    @property
    def num_blocks(self) -> int:
        """The number of its blocks, and so of its checksums; blocks never span two pieces."""
        return -(-self.nbytes // BLOCK_BYTES)

    def to_list(self) -> list[Any]:
        """Returns the piece as it stands in the manifest."""
        extent = self.extent
        box = [extent.box_offset, extent.box_shape] if extent.box_shape != extent.shape else []
        return [self.file, self.offset, extent.start, extent.stop, *box]


class Entry(NamedTuple):
    """A tensor of the checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredRange, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardFile(NamedTuple):
    """A safetensors file and its checksums: that of the header, then those of the blocks of its pieces, by offset."""

    name: str
    nbytes: int
    checks: str  # the file that holds them, four bytes each
    checks_crc32: int


class ObjectsFile(NamedTuple):
    """The file of pickled objects."""

    name: str
    nbytes: int
    crc32: int
    classes: list[str]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest as plain data; see the module's docstring."""

    about: dict[str, Any]  # step, epoch, stage and world: shown to users, and not needed to read the checkpoint
    files: tuple[ShardFile, ...]
    tensors: dict[str, Entry]
    tree: Any
    partials: dict[str, Any]
    objects: ObjectsFile | None
    readme_crc32: int | None = zlib.crc32(README_TEXT)  # of the text for people; only `verify` reads it

    def to_bytes(self) -> bytes:
        plain = {
            "format": FORMAT,
            "version": VERSION,
            "about": self.about,
            "block_bytes": BLOCK_BYTES,
            "files": [dict(zip(_SHARD_FILE, file, strict=True)) for file in self.files],
            "tensors": {
                entry.name: {
                    "dtype": str(entry.dtype).removeprefix("torch."),
                    "shape": entry.shape,
                    "pieces": [piece.to_list() for piece in entry.pieces],
                }
                for entry in self.tensors.values()
            },
            "tree": self.tree,
            "partials": self.partials,
            "objects": self.objects and self.objects._asdict(),
            "readme": None if self.readme_crc32 is None else {"name": README, "crc32": self.readme_crc32},
        }
        body = json.dumps(plain, separators=(",", ":"), allow_nan=False)[:-1].encode()
        return body + (_SEAL % zlib.crc32(body)).encode()

    @cached_property
    def pieces_by_file(self) -> list[list[StoredRange]]:
        """For each shard, its pieces by offset."""
        found: list[list[StoredRange]] = [[] for _ in self.files]
        for entry in self.tensors.values():
            for piece in entry.pieces:
                found[piece.file].append(piece)
        return [sorted(pieces, key=lambda piece: (piece.offset, piece.nbytes)) for pieces in found]

    def checks_nbytes(self, file: int) -> int:
        """Returns the size of a shard's file of checksums."""
        return 4 * (1 + sum(piece.num_blocks for piece in self.pieces_by_file[file]))  # the header's comes first

    @cached_property
    def first_blocks(self) -> dict[tuple[int, int], int]:
        """Maps (file, offset) of a piece to the index of its first checksum."""
        found = {}
        for number, pieces in enumerate(self.pieces_by_file):
            block = 1  # the header's comes first
            for piece in pieces:
                found[number, piece.offset] = block
                block += piece.num_blocks
        return found

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def read_manifest(folder: Folder) -> Manifest:
    """Reads the manifest of a checkpoint; raises CheckpointError when it is missing, damaged, too new or nonsense."""
    try:
        raw = folder.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CheckpointError(f"{folder} is not a checkpoint: {what_was_meant(folder)}") from None
    return parse_manifest(raw, str(folder))


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Reads what `Manifest.to_bytes` returned; raises as `read_manifest`. `where` is for messages."""
    if raw[-_SEAL_BYTES:] != (_SEAL % zlib.crc32(raw[:-_SEAL_BYTES])).encode():
        raise CheckpointError(f"{where}: {MANIFEST} is damaged (its checksum does not match, or its end is missing).")
    try:
        plain = json.loads(raw)
        if plain["format"] != FORMAT:
            raise ValueError(f"its format is {plain['format']!r}")
        if plain["version"] != VERSION:
            raise CheckpointError(
                f"{where} has format version {plain['version']}, and this lightning_zero reads version {VERSION}. "
                "Install the version of lightning_zero that wrote it, or a later one."
            )
        if plain["block_bytes"] != BLOCK_BYTES:
            raise ValueError(f"its blocks have {plain['block_bytes']} bytes")
        return _from_plain(plain)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{where}: {MANIFEST} cannot be believed: {error or type(error).__name__}.") from error


def _from_plain(plain: dict[str, Any]) -> Manifest:
    about, tree, partials = (_dict(plain[key], key) for key in ("about", "tree", "partials"))
    saved_at = about.get("saved_at", 0.0)
    if type(saved_at) not in (int, float) or not 0 <= saved_at < _END_OF_TIME:
        raise ValueError(f"it was saved at {about['saved_at']!r}")
    files = tuple(ShardFile(*(check(file[key]) for key, check in _SHARD_FILE.items())) for file in plain["files"])
    tensors = {name: _entry(name, entry, files) for name, entry in _dict(plain["tensors"], "tensors").items()}
    manifest = Manifest(
        about=about,
        files=files,
        tensors=tensors,
        tree=tree,
        partials=partials,
        objects=None if plain["objects"] is None else _objects(**plain["objects"]),
        readme_crc32=None if plain.get("readme") is None else _count(plain["readme"]["crc32"]),
    )
    for file, held in zip(files, manifest.pieces_by_file, strict=True):
        for one, other in itertools.pairwise(piece for piece in held if piece.nbytes):
            if one.offset + one.nbytes > other.offset:
                raise ValueError(f"two pieces share bytes of {file.name}")
    return manifest


def _entry(name: str, plain: dict[str, Any], files: tuple[ShardFile, ...]) -> Entry:
    dtype, shape = dtype_named(plain["dtype"]), _shape(plain["shape"])
    if _NO_VALUES.match(str(dtype)):
        raise ValueError(f"{name!r} is {dtype}: quantised tensors, and elements of less than a byte, are not kept")
    pieces = []
    for number, offset, start, stop, *box in plain["pieces"]:
        _count(number), _count(offset), _count(start), _count(stop)
        if number >= len(files):
            raise ValueError(f"a piece of {name!r} is in file {number} of {len(files)}")
        box_offset, box_shape = map(_shape, box) if box else ((0,) * len(shape), shape)
        if not len(box_offset) == len(box_shape) == len(shape) or not start <= stop <= math.prod(box_shape):
            raise ValueError(f"a piece of {name!r} lies outside of the tensor")
        if any(a + b > c for a, b, c in zip(box_offset, box_shape, shape, strict=True)):
            raise ValueError(f"a box of {name!r} lies outside of the tensor")
        nbytes = (stop - start) * dtype.itemsize
        if offset + nbytes > files[number].nbytes:
            raise ValueError(f"a piece of {name!r} lies outside of {files[number].name}")
        extent = Extent(name=name, shape=shape, box_offset=box_offset, box_shape=box_shape, start=start, stop=stop)
        pieces.append(StoredRange(extent, number, offset, nbytes))
    return refuse_gaps(Entry(name, dtype, shape, tuple(pieces)))


def refuse_gaps(entry: Entry) -> Entry:
    """Returns `entry`; raises ValueError unless its pieces hold every element once. A gap would stay uninitialised."""
    extents = [piece.extent for piece in entry.pieces if piece.extent.numel]
    held = sum(extent.numel for extent in extents)
    if held != math.prod(entry.shape):
        raise ValueError(f"the pieces of {entry.name!r} hold {held} elements, and it has {math.prod(entry.shape)}")
    if any(e.shape != entry.shape for e in extents) or sum(piece.nbytes for piece in entry.pieces) != entry.nbytes:
        raise ValueError(f"the pieces of {entry.name!r} are of tensors of several shapes or dtypes")
    by_box: dict[_Box, list[Extent]] = {}
    for extent in extents:
        by_box.setdefault((extent.box_offset, extent.box_shape), []).append(extent)
    if extents and not _is_grid(list(by_box), entry.shape):
        raise ValueError(f"the boxes of {entry.name!r} do not tile it")
    for inside in by_box.values():  # as many elements as the boxes have: a gap in one were an overlap in another
        bounds = sorted((extent.start, extent.stop) for extent in inside)
        if any(start < stop for (_, stop), (start, _) in itertools.pairwise(bounds)):
            raise ValueError(f"two pieces of {entry.name!r} overlap")
    return entry


def _is_grid(boxes: list[_Box], shape: tuple[int, ...]) -> bool:
    """Whether distinct boxes are the cells of a grid: every dimension cut at some places, as tensor parallelism does. A
    grid fills the tensor without overlap, so boxes need not be compared pair by pair."""
    cells = 1
    for dimension, size in enumerate(shape):
        cuts = sorted({(offset[dimension], box[dimension]) for offset, box in boxes})
        ends = [0, *(start + length for start, length in cuts)]
        if [start for start, _ in cuts] != ends[:-1] or ends[-1] != size:
            return False
        cells *= len(cuts)
    return cells == len(boxes)


def _name(value: Any) -> str:
    """Returns `value`; raises ValueError unless it is a plain file name, which cannot lead out of the folder."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} is no name of a file in this folder")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


_SHARD_FILE: dict[str, Callable[[Any], Any]] = {"name": _name, "bytes": _count, "checks": _name, "checks_crc32": _count}


def _shape(values: Any) -> tuple[int, ...]:
    """Returns a shape; raises ValueError unless torch can make a tensor of it, however wide its elements are."""
    if not isinstance(values, list):
        raise ValueError(f"{values!r} is no shape")
    shape = tuple(_count(value) for value in values)
    if len(shape) > _MOST_DIMENSIONS or math.prod(max(size, 1) for size in shape) >= 2**59:
        raise ValueError(f"a tensor of {len(shape)} dimensions, {shape[:3]}..., does not exist")
    return shape


def _dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what!r} is a {type(value).__name__}")
    return value


def _objects(name: Any, nbytes: Any, crc32: Any, classes: Any) -> ObjectsFile:
    if not isinstance(classes, list) or not all(isinstance(found, str) for found in classes):
        raise ValueError(f"{classes!r} are no names of classes")
    return ObjectsFile(_name(name), _count(nbytes), _count(crc32), classes)


def what_was_meant(folder: Folder) -> str:
    """Says, for a message, what the user may have meant by a path that holds no checkpoint."""
    if folder.is_file and folder.parent.is_checkpoint:
        return f"it is a file of the checkpoint {folder.parent}; pass that folder."
    if folder.is_file:
        return "it is a file, and a sharded checkpoint is a folder. (torch.load reads a single file as it is.)"
    names = folder.names()
    if not names:
        return "there is no such folder." if not folder.exists else "the folder is empty."
    inside = [name for name in names if folder.joinpath(name).is_checkpoint]
    if inside:
        return f"it is a folder of checkpoints; pass one of them: {few_of(inside)}."
    return f"it has no {MANIFEST}: a save that was not finished, or another kind of folder."
