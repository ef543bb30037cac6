"""Saving: every rank writes a shard of what it owns, and rank 0 makes a checkpoint of them once all are there.

all ranks   agree to look at their states now                     (Board)
all ranks   agree to save: path and name of this checkpoint       (Board)
each rank   its shard and checksums, beside the place             no rank gathers, no plan is exchanged
all ranks   agree that all is written                             (Board)
rank 0      manifest from the shards' own headers, then one rename
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
from lightning_zero.checkpoint.shard import Header, Range, read_header, write_shard
from lightning_zero.checkpoint.tree import Encoder, full_name, merge
from lightning_zero.shards.extents import Extent
from lightning_zero.views.lazy import LazyTensor, Spread
from lightning_zero.wire.board import AgreementError, Board, Record

_T = TypeVar("_T")
_Decide = Callable[[list[Record]], Record]

_OBJECTS = "objects-{}.pt"  # token
_ABSENT = "save_checkpoint must be called on all ranks; missing: {missing}"
_ONE_OF_BOTH = "What is there is complete: what was there before, or the new checkpoint."
_STOPPED = "ranks {missing} stopped while they saved: they were killed, or their disk does not answer"


class _Job(NamedTuple):
    """What this rank has to write."""

    ranges: list[Range]
    partials: dict[str, Any]
    names: frozenset[str]  # of all tensors in this rank's tree
    objects: bytes  # pickled, on rank 0
    classes: list[str]  # of these objects
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
        self.in_background = in_background
        self._executor: ThreadPoolExecutor | None = None  # while something is under way
        self._futures: deque[Future[None]] = deque()
        self._warn = warn
        self._agreements = 0
        self._saving: Future[None] | None = None  # the latest save in the background, until its failure is known

    def muster(self) -> None:
        """Waits until all ranks are about to save, and the save before is complete.

        Raises:
            CheckpointError: on every rank that came, when one does not, or something in the background has failed.
        """
        self._agree("muster", self.finish, None, _ABSENT)

    def together(self, doing: str, work: Callable[[], Record], decide: _Decide | None = None) -> Record:
        """Every rank calls `work`, and all of them hear when it fails on one.

        Args:
            doing: says what, such as "remove a file".
            work: may take its time, and not wait for other ranks.
            decide: makes, of what `work` returned on the ranks, what this returns; without it that is what rank 0 has.

        Raises:
            CheckpointError: on every rank the same.
        """
        return self._agree(doing, work, decide, f"ranks {{missing}} did not come to {doing}")

    def save(self, tree: dict[str, Any], url: str, about: dict[str, Any]) -> None:
        """Writes `tree` to the folder `url`; where that holds a checkpoint, the new one takes its place in one step.

        Call it on every rank. Plain values and whole tensors are taken from rank 0; of a `LazyTensor` whose values are
        spread, every rank writes its pieces.

        Args:
            tree: containers, plain values and tensors.
            url: rank 0's counts.
            about: what `inspect` tells beside.

        Raises:
            CheckpointError: the same on every rank; says whether what was there before is untouched.
        """
        jobs: list[_Job] = []
        begun: list[Draft] = []  # on rank 0

        def prepare() -> Record:
            self.wait()  # where nobody has mustered
            jobs.append(self._prepare(tree, about))
            return {}

        def begin(_: list[Record]) -> Record:
            draft = Draft.of(Folder(url), secrets.token_hex(4))
            draft.begin()
            begun.append(draft)
            return {"url": str(url), "token": draft.token}

        try:  # the same place and name on every rank
            found = self._agree("save", prepare, begin, _ABSENT)
        except BaseException:
            for draft in begun:  # its verdict has reached nobody
                draft.close()
            raise
        draft = begun[0] if begun else Draft.of(Folder(found["url"]), found["token"])
        if self.in_background:
            self._saving = self._submit(self._write, draft, jobs)
        else:
            self._write(draft, jobs)

    def _prepare(self, tree: dict[str, Any], about: dict[str, Any]) -> _Job:
        """Everything that looks at the values of `tree`, so that they may change as soon as `save` returns."""
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
        """What rank 0 writes; nothing on the others."""
        packed = io.BytesIO()
        try:
            pickle_on_all_ranks([value for _, value in objects], packed if self._board.rank == 0 else None)
        except Exception as error:
            told = (
                f"the checkpoint holds objects that are no plain data: {_places(objects)}; and they cannot be pickled"
            )
            raise CheckpointError(f"{told}: {error}") from error
        if self._board.rank == 0:
            self._warn(
                f"The checkpoint holds objects that are no plain data: {_places(objects)}. They are pickled into a "
                f"file of their own, and read again only with weights_only=False.{_advice_for(objects)}"
            )
        return packed.getvalue()

    def remove(self, folder: Folder) -> None:
        """Removes a checkpoint: now, but for what takes its time, or if there are saves in the background, after the
        one under way is complete, and not at all if that fails. What cannot be removed is told, and stays."""
        told = f"{folder} could not be removed"
        if self.in_background:
            self._now_or_later(partial(self._warned, told, folder.remove))
            return
        with self._board.alive():
            rest = self._warned(told, folder.hide)
        if rest is not None:
            self._submit(rest)

    def link(self, link: Folder, target: Folder) -> None:
        """Makes `link` show `target`: now, or if there are saves in the background, when that is complete."""
        self._now_or_later(partial(link.link_to, target))

    def move_link(self, link: Folder, target: Folder) -> None:
        """As `link`, for one rank alone: what fails is told, and raised nowhere."""
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
        """Later, and not at all if the save that is under way fails, when there are saves in the background."""
        if not self.in_background:
            task()
        else:
            saving = self._saving
            self._submit(lambda: None if saving is not None and saving.exception() is not None else task())

    @property
    def has_agreed(self) -> bool:
        """Whether ranks have done something together: the same on all of them."""
        return self._agreements > 0

    @property
    def has_failed(self) -> bool:
        """Whether something in the background has failed that `wait` has not raised yet."""
        return any(future.done() and future.exception() is not None for future in self._futures)

    def wait(self) -> None:
        """Until nothing is under way any more, and no thread is left; raises what failed."""
        while self._futures:
            future = self._futures.popleft()
            if future.exception() is not None and future is self._saving:
                self._saving = None  # what is removed from now on, is removed by somebody who knows
            future.result()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def finish(self) -> Record:
        """`wait`, for `together`."""
        self.wait()
        return {}

    def _submit(self, task: Callable[..., None], *args: Any) -> Future[None]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "lightning_zero saver")
        self._futures.append(self._executor.submit(task, *args))
        return self._futures[-1]

    def _agree(self, doing: str, work: Callable[[], Record], decide: _Decide | None, absent: str) -> Record:
        """As `together`; `absent` says what it means that ranks did not come."""
        with self._board.alive():
            record = _told(work)
        self._agreements += 1
        try:
            return self._board.agree(f"{self._agreements}: {doing}", record, _in_words(decide), absent)
        except AgreementError as error:
            told = str(error)
        raise CheckpointError(told)  # out here: an error that made users save is told, and not ours behind this one

    def _write(self, draft: Draft, jobs: list[_Job]) -> None:
        # Taken out, so that the copy in it is free when this returns: the executor holds arguments for a moment after
        # it has told that all is done, and the next save's copy would come on top.
        job = jobs.pop()
        board = self._thread_board
        try:
            record = _told(partial(_write_files, draft, job, board))
            decide = _in_words(partial(_commit, draft, job, board.beat))
            done = board.agree(f"{draft.token} is written", record, decide, _STOPPED)
        except AgreementError as error:
            there = "What was there before is untouched." if error.is_verdict else _ONE_OF_BOTH
            if draft.is_committed:  # on rank 0, which could not tell the others any more
                there = "The new checkpoint is complete."
            done = {"problem": f"Saving {draft.folder} failed: {error}. {there}"}
        finally:
            if board.rank == 0:
                draft.close()
        if "problem" in done:
            raise CheckpointError(done["problem"])


def pickle_on_all_ranks(value: Any, packed: io.BytesIO | None) -> None:
    """Call it on every rank: of a module in `value`, such as a hyper-parameter, the parameters may be spread over all
    of them, and are gathered when they are read.

    Args:
        value: to pickle.
        packed: where to; None for nowhere.
    """
    with Path(os.devnull).open("wb") as nowhere:
        torch.save(value, nowhere if packed is None else packed)


def _told(doing: Callable[[], Record]) -> Record:
    """What it returns, or its error as a record that the other ranks hear of."""
    try:
        return doing()
    except Exception as error:
        return {"error": str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"}


def _in_words(decide: _Decide | None) -> _Decide:
    """`decide` whose errors of ours are told without the name of their class; without one, what rank 0 has counts."""

    def told(records: list[Record]) -> Record:
        try:
            return records[0] if decide is None else decide(records)
        except CheckpointError as error:
            raise AgreementError(str(error)) from error

    return told


def _ranges_of(name: str, tensor: Any, is_first: bool) -> list[Range]:
    """What this rank writes of a tensor."""
    if isinstance(tensor, LazyTensor) and isinstance(tensor.source, Spread):
        return [Range(extent, values) for extent, values in tensor.source.pieces()]
    if not is_first:
        return []
    whole = tensor.source.whole() if isinstance(tensor, LazyTensor) else tensor.detach()
    return [Range(Extent.of_whole(name, tuple(whole.shape)), whole.reshape(-1))]


def _advice_for(objects: list[tuple[str, Any]]) -> str:
    """What to do about hyperparameters, also where the module's code is somebody else's."""
    names = [place.split("/")[1] for place, _ in objects if place.startswith("hyper_parameters/")]
    if not names:
        return ""
    return (
        f" To leave one out, call model.hparams.pop({names[0]!r}) before fit, and pass {names[0]}= to "
        "load_from_checkpoint; in a module of your own, write self.save_hyperparameters(ignore="
        f"{list(dict.fromkeys(names))}). The parameters of a module are in the checkpoint in any case."
    )


def _places(objects: list[tuple[str, Any]]) -> str:
    shown = [f"{place} ({type(value).__name__})" for place, value in objects[:5]]
    return ", ".join(shown) + (f" and {len(objects) - 5} more" if len(objects) > 5 else "")


def _write_files(draft: Draft, job: _Job, board: Board) -> Record:
    name = f"shard-{board.rank:05}-of-{board.size:05}-{draft.token}"
    with draft.create(f"{name}.safetensors") as shard, draft.create(f"{name}.crc32") as checks:
        written = write_shard(shard, checks, job.ranges, job.partials, board.beat)
    if job.objects:
        with draft.create(_OBJECTS.format(draft.token)) as stream:
            stream.write(job.objects)
    return written._asdict()


def _commit(draft: Draft, job: _Job, beat: Callable[[], None], records: list[Record]) -> Record:
    """On rank 0: what all ranks wrote becomes the checkpoint."""
    files = tuple(ShardFile(**record) for record in records)
    pieces: dict[str, list[StoredRange]] = {}
    dtypes: dict[str, torch.dtype] = {}
    partials: dict[str, list[Any]] = {}
    for rank, file in enumerate(files):
        beat()  # thousands of shards on a slow disk take their time
        header = _header_of(draft, file, rank)
        for dtype, extent, offset in header.pieces:
            dtypes[extent.name] = dtype
            pieces.setdefault(extent.name, []).append(StoredRange(extent, rank, offset, extent.numel * dtype.itemsize))
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
    """Raises CheckpointError unless all ranks have the tensors that rank 0 has, whole between them, or more."""
    told = "A hook or callback that changes checkpoint['state_dict'] must do so alike on every rank."
    if nobodys := sorted(names - tensors.keys()):
        raise CheckpointError(f"rank 0 saves {nobodys[0]!r}, and the ranks that hold it do not. {told}")
    for entry in tensors.values():
        try:
            refuse_gaps(entry)
        except ValueError as error:
            raise CheckpointError(f"{error}. {told}") from error


def _header_of(draft: Draft, file: ShardFile, rank: int) -> Header:
    """What a shard says that it holds, once rank 0 sees it whole."""
    try:
        if draft.written.size(file.name) != file.nbytes:
            raise CheckpointError(f"{file.name} is shorter than rank {rank} wrote it")
        return read_header(draft.written, file.name)
    except FileNotFoundError:
        raise CheckpointError(
            f"rank 0 does not see {file.name}, which rank {rank} wrote. Save to a file system that all machines share"
        ) from None
