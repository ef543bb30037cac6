"""`Replicas`: keeps reductions of ranks that hold the same shard from waiting for ranks that have no gradients."""

from typing import final

import torch

from lightning_zero.run.reductions import Reductions
from lightning_zero.shards.slot import no_interception
from lightning_zero.wire.comm import Comm, Gather


@final
class Replicas:
    """Starts reductions, which replicas, the ranks that hold the same shard, may have to wait for together.

    Where units are gathered (`gathers`), replicas go their own ways between two meetings, and one whose ranks have no
    gradients would not come to a reduction that another one waits in. So each tells the others, once in each round,
    whether it starts reductions early: beside the first of them, or at the end. It never waits for what they tell
    before the end. Elsewhere replicas agree with all others, before the first reduction, that they come to all.
    """

    def __init__(self, comm: Comm, reductions: Reductions, *, gathers: bool) -> None:
        self._comm = comm
        self._reductions = reductions
        self._gathers = gathers
        self._told: Gather | None = None  # whether any starts early in this round; None until this one has told

    def begin_round(self) -> None:
        self._told = None

    def start(self, number: int) -> None:
        """Starts the first `number` reductions. Collective among the ranks that share shards."""
        if number > self._reductions.started and self._waits:
            self._tell(starts=True)
        self._reductions.start(number)

    def come_to_end(self) -> None:
        """Tells the others, if it is certain, that this replica starts no reductions before it has agreed with them:
        this rank has come to the end of the round, and has no gradients."""
        if self._waits and not self._reductions.has_gradients:
            self._tell(starts=False)

    def reduce_if_awaited(self) -> None:
        """Does the reductions of this round that another replica may wait in, before anything else waits for it."""
        if not self._waits:
            return
        told = self._tell(starts=False)
        told.wait()
        if told.has_divergence():
            self._reductions.start_all()
            self.drain()

    def drain(self) -> None:
        """Waits for all reductions under way: replicas sum what each has reduced where they wait for it, together."""
        if self._comm.size > 1:
            with no_interception(), torch.no_grad():
                for pool in self._reductions.pools:
                    pool.drain()

    @property
    def _waits(self) -> bool:
        """Whether a reduction may wait, before the end of backward, for the ranks that hold the same shard."""
        return self._gathers and self._comm.size > 1 and self._reductions.may_wait

    def _tell(self, *, starts: bool) -> Gather:
        if self._told is None:
            self._told = self._comm.host.mark("replicas", diverges=starts)
        return self._told
