"""`BucketPool`: buckets, the constant-size memory that gradients travel in (CB, ZeRO section 6.2)."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import torch

from lightning_zero.shards.setting import Setting
from lightning_zero.tiers.ledger import Category


@final
class Bucket:
    """Memory for the reduction of one chunk ``(N, width)``. With `packs` gradients are copied into it; otherwise they
    are reduced from where they are."""

    def __init__(self, width: int, dtype: torch.dtype, setting: Setting, *, packs: bool) -> None:
        comm, place = setting.mesh.shard, setting.places.gathered
        self.full, self.scratch, self.total = (
            setting.ledger.allocate(Category.BUCKET, rows * width, dtype, place)
            for rows in (comm.size if packs else 0, comm.scratch_rows, 1)
        )
        self.finish: Callable[[], None] | None = None  # waits for the reduction under way, and stores its result
        self._stored: torch.cuda.Event | None = None  # recorded by `settle_on`

    def settle(self) -> None:
        """Waits for the reduction in this bucket, if there is one, and stores its result."""
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()
        if self._stored is not None:
            torch.cuda.current_stream(self.total.device).wait_event(self._stored)
            self._stored = None

    def settle_on(self, stream: torch.cuda.Stream) -> None:
        """Waits and stores as `settle` does, on another stream of the device, whose work goes on meanwhile."""
        finish, self.finish = self.finish, None
        assert finish is not None
        stream.wait_stream(torch.cuda.current_stream(self.total.device))
        with torch.cuda.stream(stream):
            finish()
            self._stored = stream.record_event()


@final
class BucketPool:
    """A fixed number of buckets, allocated once. When all are in flight, the oldest is waited for."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self._buckets = deque(buckets)  # oldest first

    def fits(self, width: int, dtype: torch.dtype, *, packs: bool) -> bool:
        """Whether chunks of `width` can be reduced in the buckets; with `packs`, also be packed there."""
        bucket = self._buckets[0]
        is_wide = bucket.total.dtype == dtype and bucket.total.numel() >= width
        return is_wide and (bucket.full.numel() > 0 or not packs)

    @property
    def size(self) -> int:
        """Number of chunks that can be in flight."""
        return len(self._buckets)

    def take(self) -> Bucket:
        """Returns the oldest bucket, settled."""
        self._buckets.rotate(-1)
        self._buckets[-1].settle()
        return self._buckets[-1]

    def settle(self, buckets: Sequence[Bucket]) -> None:
        """Settles some buckets, and those before them: oldest first, as replicas wait for each other in each."""
        last = max((at for at, bucket in enumerate(self._buckets) if bucket in buckets), default=-1)
        for bucket in [*self._buckets][: last + 1]:
            bucket.settle()

    def drain(self) -> None:
        """Settles all buckets, oldest first."""
        for _ in range(len(self._buckets)):
            self.take()
