"""The manifest: what a checkpoint holds and where, as plain data; JSON that any tool can read.

    {"format": "lightning_zero", "version": 1, "about": {...}, "block_bytes": 8192,
     "files":    [{"name", "bytes", "checks", "checks_crc32"}, ...],
     "tensors":  {name: {"dtype", "shape", "pieces": [[file, offset, start, stop], ...]}, ...},
     "tree":     the checkpoint as Lightning knows it, tensors by name (`tree.Encoder`),
     "objects":  null, or the file of what had to be pickled,
     "crc32":    of everything before it}

A piece is elements ``[start, stop)``, in C order, of the whole tensor; where a tensor-parallel rank wrote it, of a box
(two more entries: its offset and its shape). Nothing depends on stage, ranks or optimizer: whoever reads takes the
ranges it needs. Everything is checked before it is believed, for a manifest may come from anywhere.
"""

import itertools
import json
import math
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lightning_zero.checkpoint.folder import MANIFEST, CheckpointError, Folder
from lightning_zero.checkpoint.tree import dtype_named
from lightning_zero.extents import Extent

FORMAT = "lightning_zero"
VERSION = 1
# The unit of verification. A reader takes whole blocks, so a rank's range costs up to two blocks more than it holds:
# with blocks of 1 MiB, eight ranks that resume a checkpoint of 64 MB would read it several times over.
BLOCK_BYTES = 8192
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]*")
_SEAL = ',"crc32":"%08x"}\n'
_SEAL_BYTES = len(_SEAL % 0)


@dataclass(frozen=True)
class Piece:
    """A range of a tensor, and where its bytes are."""

    extent: Extent
    file: int  # of `Manifest.files`
    offset: int  # bytes from the start of the file
    nbytes: int

    @property
    def blocks(self) -> int:
        """Checksums it has; blocks never span two pieces."""
        return -(-self.nbytes // BLOCK_BYTES)


class Entry(NamedTuple):
    """A tensor of the checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardFile(NamedTuple):
    """A safetensors file and its checksums: one of the header, then those of its pieces' blocks, by offset."""

    name: str
    nbytes: int
    checks: str  # the file that holds them, four bytes each
    checks_crc32: int


class ObjectsFile(NamedTuple):
    """What had to be pickled."""

    name: str
    nbytes: int
    crc32: int
    classes: list[str]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """See the module's docstring.

    Args:
        about: step, epoch, stage, world and versions: to be told, not to be read by.
        files: the shards.
        tensors: by name.
        tree: encoded.
        partials: what the ranks' `Partial`s came to, encoded, by name.
        objects: None where nothing was pickled.
    """

    about: dict[str, Any]
    files: tuple[ShardFile, ...]
    tensors: dict[str, Entry]
    tree: Any
    partials: dict[str, Any]
    objects: ObjectsFile | None

    def to_bytes(self) -> bytes:
        plain = {
            "format": FORMAT,
            "version": VERSION,
            "about": self.about,
            "block_bytes": BLOCK_BYTES,
            "files": [
                {"name": f.name, "bytes": f.nbytes, "checks": f.checks, "checks_crc32": f.checks_crc32}
                for f in self.files
            ],
            "tensors": {
                entry.name: {
                    "dtype": str(entry.dtype).removeprefix("torch."),
                    "shape": entry.shape,
                    "pieces": [_piece_to_list(piece) for piece in entry.pieces],
                }
                for entry in self.tensors.values()
            },
            "tree": self.tree,
            "partials": self.partials,
            "objects": self.objects and self.objects._asdict(),
        }
        body = json.dumps(plain, separators=(",", ":"), allow_nan=False)[:-1].encode()
        return body + (_SEAL % zlib.crc32(body)).encode()

    def pieces_of(self, file: int) -> list[Piece]:
        """What a shard holds, by offset."""
        return self._by_file[file]

    @cached_property
    def _by_file(self) -> list[list[Piece]]:
        found: list[list[Piece]] = [[] for _ in self.files]
        for entry in self.tensors.values():
            for piece in entry.pieces:
                found[piece.file].append(piece)
        return [sorted(pieces, key=lambda piece: (piece.offset, piece.nbytes)) for pieces in found]

    @cached_property
    def first_blocks(self) -> dict[tuple[int, int], int]:
        """(file, offset) of a piece -> the place of its first checksum."""
        found = {}
        for number, pieces in enumerate(self._by_file):
            block = 1  # the header's is the first
            for piece in pieces:
                found[number, piece.offset] = block
                block += piece.blocks
        return found

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def _piece_to_list(piece: Piece) -> list[Any]:
    extent = piece.extent
    plain: list[Any] = [piece.file, piece.offset, extent.start, extent.stop]
    is_boxed = extent.box_shape != extent.shape
    return [*plain, extent.box_offset, extent.box_shape] if is_boxed else plain


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: when `folder` holds none, or one that is damaged, of a future version, or claims nonsense.
    """
    try:
        raw = folder.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is not a checkpoint: {hint(folder)}") from None
    except PermissionError as error:
        raise CheckpointError(f"no permission to read {folder.file(MANIFEST)}") from error
    return parse_manifest(raw, str(folder))


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """`Manifest.to_bytes` and back; `where` is for messages."""
    if not raw.endswith(b'"}\n') or raw[-_SEAL_BYTES:] != (_SEAL % zlib.crc32(raw[:-_SEAL_BYTES])).encode():
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
    files = tuple(
        ShardFile(_name(f["name"]), _count(f["bytes"]), _name(f["checks"]), _count(f["checks_crc32"]))
        for f in plain["files"]
    )
    objects = plain["objects"] and ObjectsFile(**plain["objects"])
    if objects:
        _name(objects.name)
    tensors = {name: _entry(name, entry, files) for name, entry in plain["tensors"].items()}
    if sum(entry.nbytes for entry in tensors.values()) > sum(file.nbytes for file in files):
        raise ValueError("its tensors have more bytes than its files")
    return Manifest(
        about=dict(plain["about"]),
        files=files,
        tensors=tensors,
        tree=plain["tree"],
        partials=dict(plain["partials"]),
        objects=objects,
    )


def _entry(name: str, plain: dict[str, Any], files: tuple[ShardFile, ...]) -> Entry:
    dtype, shape = dtype_named(plain["dtype"]), _counts(plain["shape"])
    pieces = []
    for number, offset, start, stop, *box in plain["pieces"]:
        _count(number), _count(offset), _count(start), _count(stop)
        box_offset, box_shape = (_counts(box[0]), _counts(box[1])) if box else ((0,) * len(shape), shape)
        if not (len(box_offset) == len(box_shape) == len(shape)) or not start <= stop <= math.prod(box_shape):
            raise ValueError(f"a piece of {name!r} lies outside of the tensor")
        if any(a + b > c for a, b, c in zip(box_offset, box_shape, shape, strict=True)):
            raise ValueError(f"a box of {name!r} lies outside of the tensor")
        nbytes = (stop - start) * dtype.itemsize
        if offset + nbytes > files[number].nbytes:
            raise ValueError(f"a piece of {name!r} lies outside of {files[number].name}")
        extent = Extent(name=name, shape=shape, box_offset=box_offset, box_shape=box_shape, start=start, stop=stop)
        pieces.append(Piece(extent, number, offset, nbytes))
    entry = Entry(name, dtype, shape, tuple(pieces))
    refuse_gaps(entry)
    return entry


def refuse_gaps(entry: Entry) -> None:
    """Raises ValueError unless the pieces hold every element of the tensor once."""
    held = sum(piece.extent.numel for piece in entry.pieces)
    if held != math.prod(entry.shape):
        raise ValueError(f"the pieces of {entry.name!r} hold {held} elements, and it has {math.prod(entry.shape)}")
    in_order = sorted((piece.extent for piece in entry.pieces), key=lambda extent: (extent.box_offset, extent.start))
    for one, other in itertools.pairwise(in_order):
        if next(one.overlaps(other), None):
            raise ValueError(f"two pieces of {entry.name!r} overlap")


def _name(value: Any) -> str:
    """A plain file name: nothing that leads out of the folder."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} is no name of a file in this folder")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _counts(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)


def hint(folder: Folder) -> str:
    """What the user may have meant by a path that holds no checkpoint."""
    if folder.fs.isfile(folder.path):
        if folder.parent.is_checkpoint:
            return f"it is a file of the checkpoint {folder.parent}; pass that folder."
        return "it is a file, and a sharded checkpoint is a folder."
    names = folder.names()
    if not names:
        return "there is no such folder." if not folder.fs.exists(folder.path) else "the folder is empty."
    inside = [name for name in names if folder.inside(name).is_checkpoint]
    if inside:
        return f"it is a folder of checkpoints; pass one of them: {', '.join(inside[:5])}."
    return f"it has no {MANIFEST}: a save that was not finished, or another kind of folder."
