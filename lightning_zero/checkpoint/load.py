"""Reads a checkpoint: tensors when they are needed (`ZeroStrategy`), or all at once (any other reader)."""

import io
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Module

from lightning_zero.checkpoint.folder import README, CheckpointError, Folder
from lightning_zero.checkpoint.manifest import Entry, Manifest, read_manifest
from lightning_zero.checkpoint.shard import ShardReader, open_shard
from lightning_zero.checkpoint.single import is_single_file, problems_in, refuse_other_files
from lightning_zero.checkpoint.tree import Decoder, parted
from lightning_zero.device import HOST
from lightning_zero.shards.extents import Extent
from lightning_zero.views.lazy import LazyTensor, Stored
from lightning_zero.wire.comm import Comm, RankTimeoutError, failing_together

_WORTH_SHARING = 1 << 16  # bytes that a rank reads of a tensor; less would cost too much in blocks that ranks share

# Ranks that resume read tensors whose names begin so by extents, or not at all: `verify_rest` leaves them out.
_RESUMED = ("model:", "average:", "state_dict/", "optimizer ", "optimizer_states/")


def reads_objects(weights_only: bool | None) -> bool:
    """Tells whether pickled objects are to be read, as torch decides it for a file: a variable of the environment may
    forbid it, or ask for it where the caller has said nothing."""
    forbidden, asked = (
        os.environ.get(name, "0").lower() in ("1", "y", "yes", "true")
        for name in ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    )
    return not forbidden and (asked if weights_only is None else not weights_only)


@final
class StoredTensor(Stored):
    """A tensor in a checkpoint."""

    def __init__(self, entry: Entry, checkpoint: "StoredCheckpoint") -> None:
        super().__init__(entry.name, entry.shape, entry.dtype)
        self._entry, self._checkpoint = entry, checkpoint

    def for_loading(self, target: Tensor) -> Tensor:
        together = self._checkpoint.together
        return together.read(self) if together is not None and together.fills(target) else super().for_loading(target)

    def for_shard(self, extent: Extent, into: Tensor) -> None:
        together = self._checkpoint.together
        if together is None:
            self.read(extent, into)
        else:
            together.attempt(self, extent, into)

    def whole(self) -> Tensor:
        self._checkpoint.reader.open(self._entry)  # before memory is allocated: a manifest may claim any size
        found = torch.empty(self.shape, dtype=self.dtype, device=HOST)
        self.read(Extent.of_whole(self.name, self.shape), found.view(-1))
        return found

    def read(self, extent: Extent, into: Tensor) -> None:
        self._checkpoint.reader.read(self._entry, extent, into)


@final
class ReadingTogether:
    """Reads the tensors of a module that all ranks load: each rank reads a part, and the parts are all-gathered, so
    that the ranks together read every file once."""

    def __init__(self, module: Module, comm: Comm) -> None:
        self._comm = comm.host
        self._turn = 0
        self._targets = {id(tensor): tensor for tensor in itertools.chain(module.parameters(), module.buffers())}
        self.failed: Exception | None = None

    def fills(self, target: Tensor) -> bool:
        """Whether all ranks load `target`: a parameter or buffer of the module. User code may fill other tensors too,
        perhaps on one rank alone."""
        return id(target) in self._targets

    def read(self, tensor: StoredTensor) -> Tensor:
        """Returns the values of `tensor`. Collective: call it on every rank, except after one has not come. torch goes
        on to load the other tensors then, and this rank would wait for each of them."""
        if isinstance(self.failed, RankTimeoutError):
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=HOST)
        try:
            return self._read(tensor)
        except RankTimeoutError as error:
            self.failed = error
            raise

    def _read(self, tensor: StoredTensor) -> Tensor:
        numel, size = math.prod(tensor.shape), self._comm.size
        if numel * tensor.dtype.itemsize < size * _WORTH_SHARING:  # one rank reads it, another the next
            reads, self._turn = self._turn, (self._turn + 1) % size
            values = torch.zeros(numel, dtype=tensor.dtype, device=HOST)
            if reads == self._comm.rank:
                self.attempt(tensor, Extent.of_whole(tensor.name, tensor.shape), values)
            self._comm.broadcast(values, f"load {tensor.name}", source=reads)
            return values.view(tensor.shape)
        rows = torch.zeros(size, -(-numel // size), dtype=tensor.dtype, device=HOST)
        start = self._comm.rank * rows.shape[1]
        mine = rows[self._comm.rank, : max(numel - start, 0)]
        self.attempt(tensor, Extent.of_whole(tensor.name, tensor.shape, start, start + mine.numel()), mine)
        self._comm.all_gather(rows, rows[self._comm.rank], f"load {tensor.name}").wait()
        return rows.view(-1)[:numel].view(tensor.shape)

    def attempt(self, tensor: StoredTensor, extent: Extent, into: Tensor) -> None:
        """Reads an extent of `tensor`, or notes in `failed` why it could not: the rank must still call the collectives
        in which others wait for it. They hear of the failure when all have loaded the model."""
        try:
            tensor.read(extent, into)
        except Exception as error:
            self.failed = error


@final
class StoredCheckpoint:
    """An open checkpoint, of the folder `url`. Raises CheckpointError as `read_manifest` does."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.folder = Folder(url).real
        self.manifest: Manifest = read_manifest(self.folder)
        self.reader = ShardReader(self.folder, self.manifest)
        self.left_out: list[str] = []  # classes of objects that the last `tree` did not read
        self.together: ReadingTogether | None = None  # while all ranks load a model

    def tree(self, *, objects: bool = False, lazy: Collection[str] | None = None) -> dict[str, Any]:
        """Returns what was saved. Where one tensor stood in several places, one tensor stands there again.

        Args:
            objects: whether to unpickle the pickled objects, which runs whatever code they name, or to leave them out.
            lazy: the entries whose tensors are `LazyTensor`; those of the others are read now. None means all entries.
        """
        return self._decode(self.manifest.tree, objects=objects, lazy=lazy)

    def load(self, *, objects: bool = False) -> dict[str, Any]:
        """Returns what was saved, with all tensors in memory; see `tree`."""
        return self.tree(objects=objects, lazy=())

    def model(self) -> dict[str, Any]:
        """Returns the entry "state_dict" of `tree`, without a look at the others."""
        return self._decode(self.manifest.tree.get("state_dict", {}), objects=False, lazy=None)

    @property
    def told_left_out(self) -> str | None:
        """A message about the objects that the last `tree` or `load` did not read, if there were any."""
        told = f"{self.folder} holds pickled objects that were not read ({', '.join(self.left_out)})."
        return f"{told} If you trust it, pass weights_only=False." if self.left_out else None

    def check_sizes(self) -> None:
        """Raises CheckpointError when a file is missing or short."""
        for file in self.manifest.files:
            open_shard(self.folder, file).close()
        rest = [(file.checks, self.manifest.checks_nbytes(number)) for number, file in enumerate(self.manifest.files)]
        if (objects := self.manifest.objects) is not None:
            rest.append((objects.name, objects.nbytes))
        for name, nbytes in rest:
            try:
                found = self.folder.size(name)
            except FileNotFoundError:
                raise CheckpointError(f"{self.folder}: {name} is missing.") from None
            if found != nbytes:
                raise CheckpointError(f"{self.folder}: {name} has {found} of {nbytes} bytes.")

    def _decode(self, encoded: Any, *, objects: bool, lazy: Collection[str] | None) -> dict[str, Any]:
        """Decodes a dictionary; see `tree`."""
        raw = self._read_objects() if objects else None
        opened = [] if raw is None else list(torch.load(io.BytesIO(raw), map_location="cpu", weights_only=False))
        stored = {name: StoredTensor(entry, self) for name, entry in self.manifest.tensors.items()}
        make_lazy, read = cache(lambda name: LazyTensor(stored[name])), cache(lambda name: stored[name].whole())
        tree: dict[str, Any] = {}
        self.left_out = []
        try:
            later, now = (encoded, {}) if lazy is None else parted(encoded, lazy)
            for part, tensor in ((now, read), (later, make_lazy)):
                decoder = Decoder(tensor, self.manifest.partials, opened if objects else None)
                tree |= decoder.decode(part)
                self.left_out += decoder.left_out
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{self.folder}: its tree cannot be believed: {error}.") from error
        return tree

    def _read_objects(self) -> bytes | None:
        file = self.manifest.objects
        return None if file is None else self.folder.read_checked(file.name, file.crc32)

    def verify_rest(self, part: int, parts: int) -> None:
        """Verifies share `part`, of `parts`, of what ranks that resume do not read: shards' headers, pickled objects,
        and tensors of single ranks. Raises CheckpointError for the first file that is not as it was written."""
        for number in range(part, len(self.manifest.files), parts):
            self.reader.check_header(number)
        rest = [entry for name, entry in self.manifest.tensors.items() if not name.startswith(_RESUMED)]
        for entry in rest[part::parts]:
            StoredTensor(entry, self).whole()
        if part == 0:
            self._read_objects()

    @contextmanager
    def reading_together(self, module: Module, comm: Comm) -> Iterator[None]:
        """Shares the reading of a module that all ranks load inside, see `ReadingTogether`. At the end they verify what
        they have not read. Collective: call it on every rank. All raise a RuntimeError when one cannot read."""
        self.together = ReadingTogether(module, comm)
        try:
            yield
            failed = self.together.failed
        finally:
            self.together = None
        if isinstance(failed, RankTimeoutError):
            raise failed
        with failing_together(comm, "reading the model"):
            if failed is not None:
                raise failed
            self.verify_rest(comm.rank, comm.size)

    def verify(self) -> list[str]:
        """Returns a sentence for each file that is missing, short or altered."""
        checks: list[Callable[[], Any]]
        checks = [partial(self.reader.check_file, number) for number in range(len(self.manifest.files))]
        checks.append(self._read_objects)
        if (crc32 := self.manifest.readme_crc32) is not None:
            checks.append(partial(self.folder.read_checked, README, crc32))
        problems = []
        for check in [*checks, self.tree]:
            try:
                check()
            except CheckpointError as error:
                problems.append(str(error))
        return problems

    def close(self) -> None:
        self.reader.close()


def verify(url: str | os.PathLike[str]) -> list[str]:
    """Returns what is wrong with a checkpoint: a sentence for each file that is missing, short or altered; of a single
    file for each record."""
    try:
        if is_single_file(file := Folder(url)):
            refuse_other_files(file)
            return problems_in(file)
        with closing(StoredCheckpoint(url)) as checkpoint:
            return checkpoint.verify()
    except CheckpointError as error:
        return [str(error)]


class Found(NamedTuple):
    """The newest complete checkpoint in a folder."""

    newest: Folder | None
    saved_at: float  # in seconds since 1970
    skipped: list[str]  # messages about what is there and is no complete checkpoint


def find_newest(url: str | os.PathLike[str]) -> Found:
    """Finds the checkpoint in a folder that was saved last. Looks only at manifests and the sizes of files."""
    parent = Folder(url)
    found: list[tuple[float, bool, str]] = []
    skipped = []
    for name in parent.names():
        folder = parent.joinpath(name)
        if folder.is_file:
            continue
        if name.startswith("."):
            if name.endswith(".saving"):
                skipped.append(f"{folder}: a save that was not finished")
            continue
        try:
            checkpoint = StoredCheckpoint(folder.url)
            checkpoint.check_sizes()
            found.append((checkpoint.manifest.about.get("saved_at", 0.0), not folder.is_link, folder.url))
        except CheckpointError as error:
            skipped.append(str(error))
    saved_at, _, newest = max(found, default=(-math.inf, False, None))
    return Found(None if newest is None else Folder(newest), saved_at, skipped)
