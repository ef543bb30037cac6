"""`BucketPool`: buckets, the constant-size memory that gradients travel in (CB, ZeRO section 6.2)."""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch
from torch import Tensor

from lightning_zero.device import Event, wait_for
from lightning_zero.shards.setting import Setting
from lightning_zero.tiers.ledger import Category


@final
class Bucket:
    """Memory for the reduction of one chunk ``(N, width)``. With `packs` gradients are copied into it; otherwise they
    are reduced from where they are."""

    def __init__(self, width: int, dtype: torch.dtype, setting: Setting, *, packs: bool) -> None:
        comm, place = setting.mesh.shard, setting.places.gathered
        self.full, self.scratch, self.total = (
            setting.ledger.allocate(Category.BUCKET, rows * width, dtype, place, sender)
            for rows, sender in ((comm.size if packs else 0, comm), (comm.scratch_rows, None), (1, None))
        )
        self.finish: Callable[[], None] | None = None  # waits for the reduction under way, and stores its result
        self.holder: object = None  # whose reduction that is, or was
        self.before_wait: Callable[[], None] | None = None  # called before a reduction is waited for, if set

    def take_finish(self) -> Callable[[], None]:
        """Returns what waits for the reduction in this bucket and stores its result, to be called at once; what does
        nothing if there is none."""
        if self.finish is not None and self.before_wait is not None:
            self.before_wait()
        finish, self.finish = self.finish, None
        return finish or (lambda: None)


@final
class BucketPool:
    """A fixed number of buckets, allocated once. When all are in flight, the oldest is waited for.

    Where collectives are asynchronous, all this happens on the side stream of the device: inside `beside` gradients are
    packed, reduced and stored, and its compute waits for nothing until `join`.
    """

    def __init__(self, buckets: list[Bucket], setting: Setting) -> None:
        self._buckets = deque(buckets)  # oldest first
        self._is_asynchronous = setting.mesh.shard.is_asynchronous
        # A rehearsal of a device has no stream: nothing is copied, and gradients are kept all the same.
        self._aside = setting.aside if self._is_asynchronous else None
        self._clock = setting.mesh.shard.clock
        # Gradients that may still be read beside compute, each with the place where that ends.
        self._packed: deque[tuple[Event | None, list[Tensor]]] = deque()

    def fits(self, width: int, dtype: torch.dtype, *, packs: bool) -> bool:
        """Whether chunks of `width` can be reduced in the buckets; with `packs`, also be packed there."""
        bucket = self._buckets[0]
        is_wide = bucket.total.dtype == dtype and bucket.total.numel() >= width
        return is_wide and (self.packs or not packs)

    @property
    def size(self) -> int:
        """Number of chunks that can be in flight."""
        return len(self._buckets)

    @property
    def row_bytes(self) -> int:
        """Bytes of one rank's row of the widest chunk."""
        return self._buckets[0].total.nbytes

    @property
    def packs(self) -> bool:
        """Whether gradients are copied into the buckets."""
        return self._buckets[0].full.numel() > 0

    def wait_after(self, hear: Callable[[], None] | None) -> None:
        """Has `hear` called before any reduction is waited for; None ends that."""
        for bucket in self._buckets:
            bucket.before_wait = hear

    def beside(self) -> AbstractContextManager[None]:
        """Inside, work goes to the stream of the pool, after what the current one has been given so far."""
        return nullcontext() if self._aside is None else self._aside.after_current()

    def take(self) -> Bucket:
        """Returns the oldest bucket, drained. Call it inside `beside`."""
        self._buckets.rotate(-1)
        finish = self._buckets[-1].take_finish()
        finish()
        return self._buckets[-1]

    def keep(self, packed: list[Tensor]) -> None:
        """Keeps gradients that have been packed inside `beside` until compute is known to come after that: it would use
        their memory again."""
        if not self._is_asynchronous:
            return
        self._packed.append((None if self._aside is None else self._aside.record(), packed))
        if len(self._packed) > len(self._buckets):
            event, _ = self._packed.popleft()
            if event is not None and self._aside is not None:
                wait_for(event, self._aside.device)  # over long ago

    @contextmanager
    def draining(self, some: Collection[Bucket] | None = None) -> Iterator[Iterator[Callable[[], None]]]:
        """Gives what waits for each reduction under way and stores its result, to be called at once, oldest first: all,
        or those in `some` buckets and those before them, as replicas wait for each other in each. After it, compute
        finds what was stored."""
        wanted = self._buckets if some is None else some
        last = max((at for at, bucket in enumerate(self._buckets) if bucket in wanted), default=-1)
        with self.beside():
            yield (bucket.take_finish() for bucket in [*self._buckets][: last + 1])
        self.join()

    def drain(self, some: Collection[Bucket] | None = None) -> None:
        """Waits for reductions under way and stores their results; see `draining`."""
        with self.draining(some) as finishes:
            for finish in finishes:
                finish()

    def join(self) -> None:
        """Lets the current stream wait for all that was stored inside `beside`."""
        if self._aside is not None:
            self._clock.time(self._aside.join)
        self._packed.clear()
