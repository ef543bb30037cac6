"""Buckets: the constant-size memory that gradients travel in (CB, ZeRO section 6.2)."""

from collections import deque
from collections.abc import Callable
from typing import final

import torch

from lightning_zero.shards.setting import Setting
from lightning_zero.tiers.ledger import Category


@final
class Bucket:
    """Constant-size room for the reduction of a chunk of ``(N, width)`` (CB, ZeRO section 6.2). It `packs` where
    gradients are copied into it; otherwise they travel from where they are."""

    def __init__(self, width: int, dtype: torch.dtype, setting: Setting, *, packs: bool) -> None:
        comm, place = setting.mesh.shard, setting.places.gathered
        self.full, self.scratch, self.total = (
            setting.ledger.allocate(Category.BUCKET, rows * width, dtype, place)
            for rows in (comm.size if packs else 0, comm.scratch_rows, 1)
        )
        self.finish: Callable[[], None] | None = None
        self._stored: torch.cuda.Event | None = None  # on another stream

    def settle(self) -> None:
        """Waits for the operation that this bucket carries, if any, and stores its result."""
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()
        if self._stored is not None:
            torch.cuda.current_stream(self.total.device).wait_event(self._stored)
            self._stored = None

    def settle_on(self, stream: torch.cuda.Stream) -> None:
        """`settle`, on another stream, on which what is under way is waited for: the device goes on meanwhile."""
        finish, self.finish = self.finish, None
        assert finish is not None
        stream.wait_stream(torch.cuda.current_stream(self.total.device))
        with torch.cuda.stream(stream):
            finish()
            self._stored = stream.record_event()


@final
class BucketPool:
    """A fixed number of buckets, allocated once; when all are in flight, the oldest is waited for."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self._buckets = deque(buckets)  # oldest first

    def fits(self, width: int, dtype: torch.dtype, *, packs: bool) -> bool:
        """Whether chunks of `width` can travel in it; `packs`: also those that are put together there."""
        bucket = self._buckets[0]
        is_wide = bucket.total.dtype == dtype and bucket.total.numel() >= width
        return is_wide and (bucket.full.numel() > 0 or not packs)

    @property
    def size(self) -> int:
        """How many chunks can be in flight."""
        return len(self._buckets)

    def take(self) -> Bucket:
        self._buckets.rotate(-1)
        self._buckets[-1].settle()
        return self._buckets[-1]

    def drain(self) -> None:
        """Settles all, oldest first."""
        for _ in range(len(self._buckets)):
            self.take()
