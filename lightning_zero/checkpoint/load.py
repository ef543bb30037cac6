"""Reading a checkpoint: as tensors that are read when they are needed (`ZeroStrategy`), or all at once (anybody)."""

import io
import math
import os
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lightning_zero.checkpoint.folder import CheckpointError, Folder
from lightning_zero.checkpoint.manifest import Entry, Manifest, ObjectsFile, ReadmeFile, read_manifest
from lightning_zero.checkpoint.shard import ShardReader, open_shard
from lightning_zero.checkpoint.tree import Decoder, parted
from lightning_zero.run.states import failing_together
from lightning_zero.shards.extents import Extent
from lightning_zero.views.lazy import LazyTensor, Stored
from lightning_zero.wire.comm import Comm

_WORTH_SHARING = 1 << 16  # bytes; of a smaller part, the blocks that it shares with others would cost too much

# Beginnings of the names of what ranks read by range, or not at all.
RESUMED = ("model:", "average:", "state_dict/", "optimizer ", "optimizer_states/")


@final
class StoredTensor(Stored):
    """A tensor of a checkpoint."""

    def __init__(self, entry: Entry, checkpoint: "StoredCheckpoint") -> None:
        super().__init__(entry.name, entry.shape, entry.dtype)
        self._entry, self._checkpoint = entry, checkpoint

    def for_loading(self, target: Tensor) -> Tensor:
        together = self._checkpoint.together
        return super().for_loading(target) if together is None else together.read(self, target)

    def for_shard(self, extent: Extent, into: Tensor) -> None:
        together = self._checkpoint.together
        if together is None:
            self.read(extent, into)
        else:
            together.attempt(self, extent.start, into)

    def whole(self) -> Tensor:
        self._checkpoint.reader.open(self._entry)  # before memory is asked for: a manifest may claim any size
        found = torch.empty(self.shape, dtype=self.dtype)
        self.read(Extent.of_whole(self.name, self.shape), found.view(-1))
        return found

    def read(self, extent: Extent, into: Tensor) -> None:
        self._checkpoint.reader.read(self._entry, extent, into)


@final
class ReadingTogether:
    """Ranks that load the same model read its tensors together, each a part, and gather them: between them they read
    the file once."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm.host
        self._turn = 0
        self._targets: set[tuple[int, str]] = set()  # tied parameters are loaded once for each name
        self.failed: Exception | None = None

    def read(self, tensor: StoredTensor, target: Tensor) -> Tensor:
        """The values of `tensor`, which every rank asks for; `target` itself where it has them already. A rank that
        cannot read goes on, so that none waits for it: the others hear of it when all have come to the end."""
        if (id(target), tensor.name) in self._targets:
            return target
        self._targets.add((id(target), tensor.name))
        numel, size = math.prod(tensor.shape), self._comm.size
        if numel * tensor.dtype.itemsize < size * _WORTH_SHARING:  # one rank reads it, another the next
            reads, self._turn = self._turn, (self._turn + 1) % size
            values = torch.zeros(numel, dtype=tensor.dtype)
            self.attempt(tensor, 0, values if reads == self._comm.rank else values[:0])
            self._comm.broadcast(values, f"load {tensor.name}", source=reads)
            return values.view(tensor.shape)
        rows = torch.zeros(size, -(-numel // size), dtype=tensor.dtype)
        start = self._comm.rank * rows.shape[1]
        self.attempt(tensor, start, rows[self._comm.rank, : max(numel - start, 0)])
        self._comm.all_gather(rows, rows[self._comm.rank], f"load {tensor.name}").wait()
        return rows.view(-1)[:numel].view(tensor.shape)

    def attempt(self, tensor: StoredTensor, start: int, into: Tensor) -> None:
        """Reads elements from `start` on. Who cannot goes on, so that no rank waits: see `failed`."""
        try:
            tensor.read(Extent.of_whole(tensor.name, tensor.shape, start, start + into.numel()), into)
        except Exception as error:
            self.failed = error


@final
class StoredCheckpoint:
    """A checkpoint in its folder.

    Args:
        url: of the folder.

    Raises:
        CheckpointError: see `read_manifest`.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.folder = Folder(url).real
        self.manifest: Manifest = read_manifest(self.folder)
        self.reader = ShardReader(self.folder, self.manifest)
        self.left_out: list[str] = []  # classes of objects that the last `tree` did not read
        self.together: ReadingTogether | None = None  # while all ranks load a model

    def tree(self, *, objects: bool = False, lazy: Collection[str] | None = None) -> dict[str, Any]:
        """What was saved, with a `LazyTensor` for every tensor; the same one wherever the same tensor stood.

        Args:
            objects: unpickle what had to be pickled, which runs whatever code it names; otherwise it is left out.
            lazy: the entries that this is for; those of the others are in memory. None: all.
        """
        with self._believing():
            later, now = (self.manifest.tree, {}) if lazy is None else parted(self.manifest.tree, lazy)
        return self._decode(now, later, objects)

    def load(self, *, objects: bool = False) -> dict[str, Any]:
        """What was saved, with all tensors in memory; tied ones are one tensor."""
        return self.tree(objects=objects, lazy=())

    def model(self) -> dict[str, Any]:
        """The entry "state_dict" of `tree`. Nothing else is looked at."""
        return self._decode({}, self.manifest.tree.get("state_dict", {}), objects=False)

    @property
    def told_left_out(self) -> str | None:
        """What to tell the user of objects that the last `tree` or `load` did not read."""
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

    def _decode(self, now: Any, later: Any, objects: bool) -> dict[str, Any]:
        """Two encoded dictionaries as one, in which the tensors of the first are in memory, the others lazy."""
        raw = self._whole_file(self.manifest.objects) if objects else None
        opened = [] if raw is None else list(torch.load(io.BytesIO(raw), map_location="cpu", weights_only=False))
        stored = {name: StoredTensor(entry, self) for name, entry in self.manifest.tensors.items()}
        read, lazy = cache(lambda name: stored[name].whole()), cache(lambda name: LazyTensor(stored[name]))
        tree: dict[str, Any] = {}
        self.left_out = []
        for encoded, tensor in ((now, read), (later, lazy)):
            decoder = Decoder(tensor, self.manifest.partials, opened if objects else None)
            with self._believing():
                tree |= decoder.decode(encoded)
            self.left_out += decoder.left_out
        return tree

    @contextmanager
    def _believing(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{self.folder}: its tree cannot be believed: {error}.") from error

    def _whole_file(self, file: ObjectsFile | ReadmeFile | None) -> bytes | None:
        if file is None:
            return None
        try:
            raw = self.folder.read(file.name)
        except FileNotFoundError:
            raise CheckpointError(f"{self.folder}: {file.name} is missing.") from None
        if zlib.crc32(raw) != file.crc32:
            raise CheckpointError(f"{self.folder.file(file.name)} is damaged: its checksum does not match.")
        return raw

    def verify_rest(self, part: int, parts: int) -> None:
        """Checks share `part`, of `parts` that ranks divide among them, of what a resume does not read: the shards'
        headers, pickled objects, what single ranks left.

        Raises:
            CheckpointError: for the first file that is not what it was.
        """
        for number in range(part, len(self.manifest.files), parts):
            self.reader.check_header(number)
        rest = [entry for name, entry in self.manifest.tensors.items() if not name.startswith(RESUMED)]
        for entry in rest[part::parts]:
            StoredTensor(entry, self).whole()
        if part == 0:
            self._whole_file(self.manifest.objects)

    @contextmanager
    def reading_together(self, comm: Comm) -> Iterator[None]:
        """Inside, all ranks load the same model as `ReadingTogether`; at the end they verify what they have not read.

        Raises:
            RuntimeError: on every rank the same, when one cannot read.
        """
        self.together = ReadingTogether(comm)
        try:
            yield
            failed = self.together.failed
        finally:
            self.together = None
        with failing_together(comm, "reading the model"):
            if failed is not None:
                raise failed
            self.verify_rest(comm.rank, comm.size)

    def verify(self) -> list[str]:
        """What is wrong: a sentence for each file that is missing, short or altered."""
        rest = [partial(self._whole_file, file) for file in (self.manifest.objects, self.manifest.readme)]
        checks: list[Callable[[], Any]] = [*rest, self.tree]
        problems = []
        for check in [partial(self.reader.check_file, number) for number in range(len(self.manifest.files))] + checks:
            try:
                check()
            except CheckpointError as error:
                problems.append(str(error))
        return problems

    def close(self) -> None:
        self.reader.close()


def verify(url: str | os.PathLike[str]) -> list[str]:
    """What is wrong with a checkpoint: nothing, or a sentence for each file that is missing, short or altered."""
    try:
        with closing(StoredCheckpoint(url)) as checkpoint:
            return checkpoint.verify()
    except CheckpointError as error:
        return [str(error)]


class Found(NamedTuple):
    """The newest complete checkpoint of a folder, and what was passed over because it is not complete."""

    newest: Folder | None
    saved_at: float  # when that was, in seconds since 1970
    skipped: list[str]


def find_newest(url: str | os.PathLike[str]) -> Found:
    """Looks among the checkpoints in a folder for the one saved last. Only manifests and sizes are looked at."""
    parent = Folder(url)
    found: list[tuple[float, bool, str]] = []
    skipped = []
    for name in parent.names():
        folder = parent.inside(name)
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
