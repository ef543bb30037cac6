"""Saves checkpoints: every rank writes its pieces as a shard, and rank 0 then makes the shards a checkpoint.

all ranks   agree that all are about to take their states         (Board)
all ranks   agree to save: path and token of this checkpoint      (Board)
each rank   writes its shard and checksums to the draft           no rank gathers, no plan is exchanged
all ranks   agree that all is written                             (Board)
rank 0      writes the manifest from the shards' own headers, then renames the draft
"""

import io
import os
import secrets
import time
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import torch

from lightning_zero.checkpoint.draft import Draft, InDoubtError
from lightning_zero.checkpoint.folder import CheckpointError, Folder
from lightning_zero.checkpoint.manifest import Entry, Manifest, ObjectsFile, ShardFile, StoredRange, refuse_gaps
from lightning_zero.checkpoint.shard import Header, read_header, write_shard
from lightning_zero.checkpoint.tree import Encoder, full_name, merge
from lightning_zero.shards.extents import Extent
from lightning_zero.views.lazy import LazyTensor, Range, Spread
from lightning_zero.wire.board import AgreementError, Board, Decide, Record
from lightning_zero.wording import few_of

_T = TypeVar("_T")
_Work = Callable[[], Record | None]

_OBJECTS = "objects-{}.pt"  # with the token of the draft
_ALIKE = "A hook or callback that changes checkpoint['state_dict'] must do so alike on every rank."
_ABSENT = "save_checkpoint must be called on all ranks; missing: {missing}"
_ONE_OF_BOTH = "What is there is complete: what was there before, or the new checkpoint."
_STOPPED = "ranks {missing} stopped while they saved: they were killed, or their disk does not answer"


class _Job(NamedTuple):
    """Everything that this rank has to write for one checkpoint."""

    ranges: list[Range]
    partials: dict[str, Any]
    names: frozenset[str]  # of all tensors in this rank's tree
    objects: bytes  # pickled, on rank 0; empty on the others
    classes: list[str]  # of these objects
    tree: Any  # encoded, on rank 0; None on the others
    about: dict[str, Any]


@final
class Saver:
    """Writes checkpoints, one at a time.

    Args:
        board: of all ranks.
        in_background: `save` returns when the values have been copied, and a thread writes the copy.
        may_end: the run may end after any `save`, without a `wait`: the end of a process waits for the thread. The
            thread of rank 0 then warns at once of what fails, and stays until the others know how the save has ended.
        warn: called on rank 0 with messages for the user.
    """

    def __init__(
        self,
        board: Board,
        *,
        in_background: bool = False,
        may_end: bool = False,
        warn: Callable[[str], None] = print,
    ) -> None:
        self._board = board
        self._thread_board = board.clone() if in_background else board
        self.in_background = in_background
        self._may_end = in_background and may_end
        self._executor: ThreadPoolExecutor | None = None  # while tasks are under way
        self._futures: deque[Future[None]] = deque()
        self._warn = warn
        self._agreements = 0
        self._saving: Future[None] | None = None  # the latest save in the background, until its failure is known

    def muster(self) -> None:
        """Waits until all ranks are about to save, and the previous save is complete. Raises CheckpointError on every
        rank that came, when one does not, or a task in the background has failed."""
        self.together("muster", self.wait, absent=_ABSENT)

    def together(self, doing: str, work: _Work, decide: Decide | None = None, absent: str | None = None) -> Record:
        """Calls `work`, and raises the same CheckpointError on all ranks when it fails on one. Call it on every rank.

        Args:
            doing: names the work in messages, such as "remove a file".
            work: may take long, but must not wait for other ranks. None stands for an empty record.
            decide: called on rank 0 with what `work` returned on all ranks; returns the result for all of them. By
                default that is what `work` returned on rank 0.
            absent: the message when ranks do not come, with ``{missing}`` for them.
        """
        with self._board.alive():
            record = _told(work)
        self._agreements += 1
        absent = absent or f"ranks {{missing}} did not come to {doing}"
        try:
            return self._board.agree(f"{self._agreements}: {doing}", record, _in_words(decide), absent)
        except AgreementError as error:
            told = str(error)
        raise CheckpointError(told)  # not in `except`: its context is to be the error that made the user save

    def save(self, tree: dict[str, Any], url: str, about: dict[str, Any]) -> None:
        """Writes `tree` to the folder `url`, where it replaces an older checkpoint in one step. Call it on every rank.

        Plain values and whole tensors are taken from rank 0. A `LazyTensor` whose source is `Spread` is written by all
        ranks, each its pieces.

        Args:
            tree: containers, plain values and tensors.
            url: that of rank 0 counts.
            about: values that `inspect` shows.

        Raises:
            CheckpointError: the same on every rank; says whether what was there before is untouched.
        """
        jobs: list[_Job] = []
        begun: list[Draft] = []  # on rank 0

        def prepare() -> None:
            self.wait()  # `muster` may not have been called
            jobs.append(self._prepare(tree, about))

        def begin(_: list[Record]) -> Record:
            draft = Draft.of(Folder(url), secrets.token_hex(4))
            draft.claim()
            begun.append(draft)
            return {"url": str(url), "token": draft.token}

        try:  # the same place and name on every rank
            found = self.together("save", prepare, begin, _ABSENT)
        except BaseException:
            for draft in begun:  # no other rank knows of it
                draft.close()
            raise
        draft = begun[0] if begun else Draft.of(Folder(found["url"]), found["token"])
        if self.in_background:
            self._saving = self._submit(self._write_draft, draft, jobs)
        else:
            self._write_draft(draft, jobs)

    def _prepare(self, tree: dict[str, Any], about: dict[str, Any]) -> _Job:
        """Does everything that reads the values of `tree`, so that they may change as soon as `save` returns."""
        encoder, is_first = Encoder(), self._board.rank == 0
        encoded = encoder.encode(tree)
        ranges = [item for tensor in encoder.tensors.items() for item in _ranges_of(*tensor, is_first)]
        if self.in_background:
            ranges = [Range(each.extent, each.read().to("cpu", copy=True)) for each in ranges]
        objects = self._pickle(encoder.objects) if encoder.objects else b""
        return _Job(
            ranges,
            encoder.partials,
            frozenset(encoder.tensors),
            objects,
            sorted({full_name(type(value)) for _, value in encoder.objects}),
            encoded if is_first else None,
            {**about, "world": self._board.size, "saved_at": time.time()},
        )

    def _pickle(self, objects: list[tuple[str, Any]]) -> bytes:
        """Pickles objects on all ranks. Returns the bytes on rank 0, and none on the others."""
        packed = io.BytesIO()
        try:
            pickle_on_all_ranks([value for _, value in objects], packed if self._board.rank == 0 else None)
        except Exception as error:
            told = f"the checkpoint holds objects that are no plain data: {_places(objects)}"
            raise CheckpointError(f"{told}; and they cannot be pickled: {error}") from error
        if self._board.rank == 0:
            self._warn(
                f"The checkpoint holds objects that are no plain data: {_places(objects)}. They are pickled into a "
                f"file of their own, and read again only with weights_only=False.{_advice_for(objects)}"
            )
        return packed.getvalue()

    def remove(self, folder: Folder) -> None:
        """Removes a checkpoint; warns if it cannot. With saves in the background this happens when the one under way is
        complete, and not at all if that fails. Otherwise only what takes long is left to a thread."""
        told = f"{folder} could not be removed"
        if self.in_background:
            self._now_or_later(partial(self._warned, told, folder.remove))
            return
        with self._board.alive():
            rest = self._warned(told, folder.unlink)
        if rest is not None:
            self._submit(rest)

    def link(self, link: Folder, target: Folder) -> None:
        """Makes `link` point to `target`: now, or with saves in the background when `target` is complete."""
        self._now_or_later(partial(link.link_to, target))

    def move_link(self, link: Folder, target: Folder) -> None:
        """As `link`, for one rank alone: a failure is a warning, and not raised."""
        told = f"{link} could not be made to show {target}"
        with self._board.alive():
            self._now_or_later(partial(self._warned, told, partial(link.link_to, target)))

    def _warned(self, told: str, task: Callable[[], _T]) -> _T | None:
        try:
            return task()
        except Exception as error:
            self._warn(f"{told}: {error}")
            return None

    def _now_or_later(self, task: Callable[[], None]) -> None:
        """Calls `task`. With saves in the background, does so when the one under way is complete, unless that fails."""
        if not self.in_background:
            task()
        else:
            saving = self._saving
            self._submit(lambda: None if saving is not None and saving.exception() is not None else task())

    @property
    def has_agreed(self) -> bool:
        """Whether `together` has been called; the same on all ranks."""
        return self._agreements > 0

    @property
    def has_failed(self) -> bool:
        """Whether a task in the background has failed, and `wait` has not raised it yet."""
        return any(future.done() and future.exception() is not None for future in self._futures)

    def wait(self) -> None:
        """Waits for all tasks in the background, and ends their thread; raises what failed."""
        while self._futures:
            future = self._futures.popleft()
            if future.exception() is not None and future is self._saving:
                self._saving = None  # the caller hears of it, so later removals need not be skipped
            future.result()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _submit(self, task: Callable[..., None], *args: Any) -> Future[None]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "lightning_zero saver")
        self._futures.append(self._executor.submit(task, *args))
        return self._futures[-1]

    def _write_draft(self, draft: Draft, jobs: list[_Job]) -> None:
        # Popped, so that its copy of the values is freed when this returns. The executor keeps the arguments for a
        # moment after the task is done, and the next save's copy would be made meanwhile.
        job = jobs.pop()
        board = self._thread_board
        try:
            record = _told(partial(_write_files, draft, job, board))
            decide = _in_words(partial(_commit, draft, job, board.beat))
            done = board.agree(f"{draft.token} is written", record, decide, _STOPPED)
        except AgreementError as error:
            there = "What was there before is untouched." if error.is_verdict else _ONE_OF_BOTH
            if draft.is_committed:  # on rank 0, which could not tell the others
                there = "The new checkpoint is complete."
            done = {"problem": f"Saving {draft.folder} failed: {error}. {there}"}
        finally:
            if board.rank == 0:
                draft.close()
        if "problem" in done:
            if self._may_end and board.rank == 0:
                self._warn(done["problem"])
            raise CheckpointError(done["problem"])
        if self._may_end:
            board.part(f"{draft.token} is known")


def pickle_on_all_ranks(value: Any, packed: io.BytesIO | None) -> None:
    """Pickles `value` to `packed`, or to nowhere. Call it on every rank: `value` may hold a module, such as a
    hyper-parameter, and reading its parameters is a collective when they are sharded."""
    with Path(os.devnull).open("wb") as nowhere:
        torch.save(value, nowhere if packed is None else packed)


def _told(doing: _Work) -> Record:
    """Returns what `doing` returns, or its error as a record, so that other ranks hear of it."""
    try:
        return doing() or {}
    except Exception as error:
        return {"error": str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"}


def _in_words(decide: Decide | None) -> Decide:
    """Wraps `decide`, so that a CheckpointError is told without the name of its class; None takes rank 0's record."""

    def told(records: list[Record]) -> Record:
        try:
            return records[0] if decide is None else decide(records)
        except CheckpointError as error:
            raise AgreementError(str(error)) from error

    return told


def _ranges_of(name: str, tensor: Any, is_first: bool) -> list[Range]:
    """Returns what this rank writes of a tensor."""
    if isinstance(tensor, LazyTensor) and isinstance(tensor.source, Spread):
        return tensor.source.pieces()
    if not is_first:
        return []
    whole = tensor.source.whole() if isinstance(tensor, LazyTensor) else tensor.detach()
    return [Range(Extent.of_whole(name, tuple(whole.shape)), whole.reshape(-1))]


def _advice_for(objects: list[tuple[str, Any]]) -> str:
    """Says what to do about hyper-parameters among the objects, also for modules whose code users cannot change."""
    names = [place.split("/")[1] for place, _ in objects if place.startswith("hyper_parameters/")]
    if not names:
        return ""
    return (
        f" To leave one out, call model.hparams.pop({names[0]!r}) before fit, and pass {names[0]}= to "
        "load_from_checkpoint; in a module of your own, write self.save_hyperparameters(ignore="
        f"{list(dict.fromkeys(names))}). The parameters of a module are in the checkpoint in any case."
    )


def _places(objects: list[tuple[str, Any]]) -> str:
    return few_of(f"{place} ({type(value).__name__})" for place, value in objects)


def _write_files(draft: Draft, job: _Job, board: Board) -> Record:
    name = f"shard-{board.rank:05}-of-{board.size:05}-{draft.token}"
    with draft.create(f"{name}.safetensors") as shard, draft.create(f"{name}.crc32") as checks:
        written = write_shard(shard, checks, job.ranges, job.partials, board.beat)
    if job.objects:
        with draft.create(_OBJECTS.format(draft.token)) as stream:
            stream.write(job.objects)
    return written._asdict()


def _commit(draft: Draft, job: _Job, beat: Callable[[], None], records: list[Record]) -> Record:
    """Makes the files of all ranks a checkpoint. Runs on rank 0; `records` are what `_write_files` returned."""
    files = tuple(ShardFile(**record) for record in records)
    pieces: dict[str, list[StoredRange]] = {}
    dtypes: dict[str, torch.dtype] = {}
    partials: dict[str, list[Any]] = {}
    for rank, file in enumerate(files):
        beat()  # thousands of shards on a slow disk take long
        header = _header_of(draft, file, rank)
        for dtype, piece in header.pieces:
            name = piece.extent.name
            if dtypes.setdefault(name, dtype) != dtype:  # of one size they would be read as one, in silence
                raise CheckpointError(
                    f"the pieces of {name!r} are of several dtypes: {dtypes[name]}, {dtype}. {_ALIKE}"
                )
            pieces.setdefault(name, []).append(piece)
        for name_of_partial, items in header.partials.items():
            partials.setdefault(name_of_partial, []).append(items)
    tensors = {name: Entry(name, dtypes[name], held[0].extent.shape, tuple(held)) for name, held in pieces.items()}
    _refuse_disagreement(job.names, tensors)
    objects = None
    if job.objects:
        objects = ObjectsFile(_OBJECTS.format(draft.token), len(job.objects), zlib.crc32(job.objects), job.classes)
    manifest = Manifest(
        about=job.about,
        files=files,
        tensors=tensors,
        tree=job.tree,
        partials={name: merge(items) for name, items in partials.items()},
        objects=objects,
    )
    try:
        doubt = draft.commit(manifest.to_bytes())
    except InDoubtError as error:
        return {"problem": f"Saving {draft.folder} failed: {error}. {_ONE_OF_BOTH}"}
    if doubt is not None:
        return {"problem": f"{draft.folder} is saved, but {doubt}. Do not remove older checkpoints yet."}
    return {}


def _refuse_disagreement(names: frozenset[str], tensors: dict[str, Entry]) -> None:
    """Raises CheckpointError unless the ranks wrote every tensor in rank 0's tree, and every tensor without gaps."""
    if nobodys := sorted(names - tensors.keys()):
        raise CheckpointError(f"rank 0 saves {nobodys[0]!r}, and the ranks that hold it do not. {_ALIKE}")
    for entry in tensors.values():
        try:
            refuse_gaps(entry)
        except ValueError as error:
            raise CheckpointError(f"{error}. {_ALIKE}") from error


def _header_of(draft: Draft, file: ShardFile, rank: int) -> Header:
    """Reads the header of a shard; raises CheckpointError when rank 0 does not see all of the file."""
    try:
        if draft.written.size(file.name) != file.nbytes:
            raise CheckpointError(f"{file.name} is shorter than rank {rank} wrote it")
        return read_header(draft.written, file.name, rank)
    except FileNotFoundError:
        raise CheckpointError(
            f"rank 0 does not see {file.name}, which rank {rank} wrote. Save to a file system that all machines share"
        ) from None
