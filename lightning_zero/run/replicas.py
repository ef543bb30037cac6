"""`Replicas`: keeps reductions of ranks that hold the same shard from waiting for ranks that have no gradients."""

from typing import final

import torch

from lightning_zero.run.reductions import Reductions
from lightning_zero.shards.slot import no_interception
from lightning_zero.wire.comm import Comm


@final
class Replicas:
    """Starts reductions, which replicas, the ranks that hold the same shard, may have to wait for together.

    Replicas gather on their own, and one whose ranks have no gradients would not come to a reduction that another
    one waits in. So they tell each other, once in each round: before the first reduction, or at the end.
    """

    def __init__(self, comm: Comm, reductions: Reductions) -> None:
        self._comm = comm
        self._reductions = reductions
        self._reduces: bool | None = None  # whether any does in this round; None until they have told each other

    def begin_round(self) -> None:
        self._reduces = None

    def start(self, number: int) -> None:
        """Starts the first `number` reductions. Collective among the ranks that share shards."""
        self.announce(number)
        self._reductions.start(number)

    def announce(self, number: int) -> None:
        """Tells the other replicas, before the first `number` reductions are started."""
        if number > self._reductions.started and self._waits:
            self._tell(reduces=True)

    def reduce_if_awaited(self, statement: bytes) -> None:
        """Does the reductions of this round that another replica may wait in, before anything else waits for it."""
        if self._waits and self._tell(reduces=self._reductions.has_gradients_in(statement)):
            self._reductions.start_all()
            with no_interception(), torch.no_grad():
                for pool in self._reductions.pools:
                    pool.drain()

    @property
    def _waits(self) -> bool:
        """Whether a reduction may wait, before the end of backward, for the ranks that hold the same shard."""
        return self._comm.size > 1 and self._reductions.may_wait

    def _tell(self, *, reduces: bool) -> bool:
        """Returns whether any replica reduces gradients in this round. Collective."""
        if self._reduces is None:
            self._reduces = bool(self._comm.host.all_reduce_bytes(bytes([reduces]), "replicas")[0])
        return self._reduces
