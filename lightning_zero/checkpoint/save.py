"""Saving: every rank writes a shard of what it owns, and rank 0 makes a checkpoint of them once all are there.

all ranks   agree to come: path and name of this save             (Board)
each rank   its shard and checksums, beside the place             no rank gathers, no plan is exchanged
all ranks   agree that all is written                             (Board)
rank 0      manifest from the shards' own headers, then one rename
"""

import io
import secrets
import time
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, final

import torch

from lightning_zero.board import AgreementError, Board, Record
from lightning_zero.checkpoint.folder import CheckpointError, Draft, Folder
from lightning_zero.checkpoint.manifest import Entry, Manifest, ObjectsFile, Piece, ShardFile, refuse_gaps
from lightning_zero.checkpoint.shard import Range, read_header, write_shard
from lightning_zero.checkpoint.tree import Encoder, merge
from lightning_zero.extents import Extent
from lightning_zero.lazy import LazyTensor, Spread

_ABSENT = "save_checkpoint must be called on all ranks; missing: {missing}"


class _Job(NamedTuple):
    """What this rank has to write."""

    draft: Draft
    token: str
    ranges: list[Range]
    partials: dict[str, Any]
    objects: list[tuple[str, Any]]  # rank 0's
    tree: Any  # rank 0's, encoded
    about: dict[str, Any]


@final
class Saver:
    """Writes checkpoints, one at a time.

    Args:
        board: of all ranks.
        in_background: `save` returns when what it writes has been copied, and a thread writes the copy.
        warn: called on rank 0 with what the user should know.
    """

    def __init__(self, board: Board, *, in_background: bool = False, warn: Callable[[str], None] = print) -> None:
        self._board = board
        self._thread_board = board.clone() if in_background else board
        self._executor = ThreadPoolExecutor(1, "lightning_zero saver") if in_background else None
        self._futures: deque[Future[None]] = deque()
        self._warn = warn
        self._saves = 0
        self._musters = 0
        self._failed = False  # the latest save

    def muster(self) -> None:
        """Waits until all ranks are about to save.

        Raises:
            CheckpointError: on every rank that came, when one does not.
        """
        self._musters += 1
        self._agree(self._board, f"muster {self._musters}", {}, lambda _: {})

    def together(self, doing: str, write: Callable[[], None]) -> None:
        """Every rank calls `write`, and all of them hear when one fails."""
        self._saves += 1
        record: Record = {}
        try:
            write()
        except Exception as error:  # the other ranks must hear of it
            record = {"error": f"{type(error).__name__}: {error}"}
        self._agree(self._board, f"save {self._saves}: {doing}", record, lambda _: {})

    def save(self, tree: dict[str, Any], url: str, about: dict[str, Any]) -> None:
        """Writes `tree` to the folder `url`; where that holds a checkpoint, the new one takes its place in one step.

        Call it on every rank. Plain values and whole tensors are taken from rank 0; of a `LazyTensor` whose values are
        spread, every rank writes its pieces.

        Args:
            tree: containers, plain values and tensors.
            url: rank 0's counts.
            about: what `inspect` tells beside.

        Raises:
            CheckpointError: the same on every rank. What was there before is untouched.
        """
        self.wait()
        self._saves += 1
        encoder = Encoder()
        encoded = encoder.encode(tree)
        draft, token = self._begin(url)
        is_first = self._board.rank == 0
        job = _Job(
            draft,
            token,
            [item for tensor in encoder.tensors.items() for item in _ranges_of(*tensor, is_first)],
            encoder.partials,
            encoder.objects if is_first else [],
            encoded if is_first else None,
            {**about, "world": self._board.size, "saved_at": time.time()},
        )
        if job.objects:
            self._warn(
                f"The checkpoint holds objects that are no plain data: {_places(job.objects)}. They are pickled into a "
                "file of their own, and read again only with weights_only=False."
            )
        if self._executor is None:
            self._write(job)
        else:
            self._submit(self._write, job._replace(ranges=[Range(e, v.to("cpu", copy=True)) for e, v in job.ranges]))

    def remove(self, folder: Folder) -> None:
        """Removes a checkpoint, after the save under way is complete, and not at all if that fails."""
        if self._executor is None:
            folder.remove()
        else:
            self._submit(lambda: None if self._failed else folder.remove())

    def link(self, link: Folder, target: Folder) -> None:
        """Makes `link` show `target`, when that is complete."""
        if self._executor is None:
            link.link_to(target)
        else:
            self._submit(lambda: None if self._failed else link.link_to(target))

    def poll(self) -> None:
        """Raises what a save in the background has failed with; to be called now and then."""
        while self._futures and self._futures[0].done():
            self._futures.popleft().result()

    def wait(self) -> None:
        """Until nothing is under way any more; raises what failed."""
        while self._futures:
            self._futures.popleft().result()

    def _submit(self, task: Callable[..., None], *args: Any) -> None:
        assert self._executor is not None
        self._futures.append(self._executor.submit(task, *args))

    def _agree(self, board: Board, topic: str, record: Record, decide: Callable[[list[Record]], Record]) -> Record:
        try:
            return board.agree(topic, record, decide, _ABSENT)
        except AgreementError as error:
            raise CheckpointError(str(error)) from None

    def _begin(self, url: str) -> tuple[Draft, str]:
        """The same place and name on every rank."""
        mine: list[Draft] = []

        def decide(records: list[Record]) -> Record:
            mine.append(Draft(Folder(url)))
            mine[0].begin()
            return {"url": str(url), "token": secrets.token_hex(4)}

        found = self._agree(self._board, f"save {self._saves}", {}, decide)
        return mine[0] if mine else Draft(Folder(found["url"])), found["token"]

    def _write(self, job: _Job) -> None:
        board = self._thread_board
        try:
            record = _write_files(job, board)
        except Exception as error:  # the other ranks must hear of it
            record = {"error": f"{type(error).__name__}: {error}"}
        try:
            self._failed = True
            self._agree(board, f"save {self._saves} is written", record, partial(_commit, job))
            self._failed = False
        except CheckpointError as error:
            raise CheckpointError(
                f"Saving {job.draft.folder} failed: {error}. What was there before is untouched."
            ) from None
        finally:
            if self._failed and board.rank == 0:
                job.draft.discard()


def _ranges_of(name: str, tensor: Any, is_first: bool) -> list[Range]:
    """What this rank writes of a tensor."""
    if isinstance(tensor, LazyTensor) and isinstance(tensor.source, Spread):
        return [Range(extent, values) for extent, values in tensor.source.pieces()]
    if not is_first:
        return []
    whole = tensor.source.whole() if isinstance(tensor, LazyTensor) else tensor.detach()
    return [Range(Extent.of_whole(name, tuple(whole.shape)), whole.reshape(-1))]


def _places(objects: list[tuple[str, Any]]) -> str:
    shown = [f"{place} ({type(value).__name__})" for place, value in objects[:5]]
    return ", ".join(shown) + (f" and {len(objects) - 5} more" if len(objects) > 5 else "")


def _shard_name(rank: int, world: int, token: str) -> str:
    return f"shard-{rank:05}-of-{world:05}-{token}"


def _write_files(job: _Job, board: Board) -> Record:
    name = _shard_name(board.rank, board.size, job.token)
    with job.draft.create(f"{name}.safetensors") as shard, job.draft.create(f"{name}.crc32") as checks:
        written = write_shard(shard, checks, job.ranges, job.partials, board.beat)
    record: Record = written._asdict()
    if job.objects:
        packed = io.BytesIO()
        torch.save([value for _, value in job.objects], packed)
        with job.draft.create(f"objects-{job.token}.pt") as stream:
            stream.write(packed.getbuffer())
        record["objects"] = [packed.getbuffer().nbytes, zlib.crc32(packed.getbuffer())]
    return record


def _commit(job: _Job, records: list[Record]) -> Record:
    """On rank 0: what all ranks wrote becomes the checkpoint."""
    files: list[ShardFile] = []
    tensors: dict[str, Entry] = {}
    partials: dict[str, list[Any]] = {}
    written = job.draft.written()
    for rank, record in enumerate(records):
        name = _shard_name(rank, len(records), job.token)
        files.append(ShardFile(f"{name}.safetensors", record["nbytes"], f"{name}.crc32", record["checks_crc32"]))
        try:
            if written.size(files[-1].name) != record["nbytes"]:
                raise CheckpointError(f"{files[-1].name} is shorter than rank {rank} wrote it")
            header = read_header(written, files[-1].name)
        except FileNotFoundError:
            raise CheckpointError(
                f"rank 0 does not see {files[-1].name}, which rank {rank} wrote. Save to a file system that all "
                "machines share"
            ) from None
        for dtype, extent, offset in header.pieces:
            entry = tensors.setdefault(extent.name, Entry(extent.name, dtype, extent.shape, ()))
            piece = Piece(extent, rank, offset, extent.numel * dtype.itemsize)
            tensors[extent.name] = entry._replace(pieces=(*entry.pieces, piece))
        for name_of_partial, items in header.partials.items():
            partials.setdefault(name_of_partial, []).append(items)
    for entry in tensors.values():
        refuse_gaps(entry)
    manifest = Manifest(
        about=job.about,
        files=tuple(files),
        tensors=tensors,
        tree=job.tree,
        partials={name: merge(items) for name, items in partials.items()},
        objects=_objects_of(job, records[0]),
    )
    job.draft.commit(manifest.to_bytes())
    return {}


def _objects_of(job: _Job, record: Record) -> ObjectsFile | None:
    if "objects" not in record:
        return None
    nbytes, crc32 = record["objects"]
    classes = sorted({f"{type(value).__module__}.{type(value).__qualname__}" for _, value in job.objects})
    return ObjectsFile(f"objects-{job.token}.pt", nbytes, crc32, classes)
