"""`Replicas`: keeps ranks that hold the same shard from waiting for each other where they go different ways."""

from typing import final

import torch

from lightning_zero.run.reductions import GradientState, Reductions
from lightning_zero.shards.slot import no_interception
from lightning_zero.wire.comm import Comm, Told

_MEETS = -1  # told in place of a pattern


@final
class Replicas:
    """Starts and settles reductions, in which replicas, the ranks that hold the same shard, wait for each other.

    Where units are gathered (`gathers`), replicas go their own ways between two meetings, and one whose ranks have no
    gradients would not come to a reduction that another one waits in. So each tells the others two things, once for
    each backward that is reduced: whether it starts reductions early, beside the first of them or at the end; and
    which parameters have gradients, where it would settle them by its plan, or that it comes to a meeting. It never
    waits for the first before it meets, and for the second when it waits for the reductions anyway. Elsewhere replicas
    agree with all others, before the first reduction, that they come to all.
    """

    def __init__(self, comm: Comm, reductions: Reductions, *, gathers: bool) -> None:
        self._comm = comm
        self._reductions = reductions
        self._part = gathers and comm.size > 1  # replicas may go different ways
        # Where collectives are compared, what is told would stand at another place among the sums of one that meets.
        self.may_settle_alike = not (self._part and comm.sanitize)
        # Of this backward; None until this one has told.
        self._starts: Told | None = None  # whether any starts early
        self._settles: Told | None = None  # `Reductions.pattern` of each, or that it meets the others

    def begin_backward(self) -> None:
        """Notes that the last backward is settled, and what was told of it is heard."""
        for told in (self._starts, self._settles):
            if told is not None:
                told.wait()
        self._starts = self._settles = None

    def start(self, number: int) -> None:
        """Starts the first `number` reductions. Collective among the ranks that share shards."""
        if number > self._reductions.started and self._part:
            self._tell_start(starts=True)
        self._reductions.start(number)

    def settle_alike(self) -> bool:
        """Waits for the reductions of a backward, and settles them if all replicas do so here, with gradients of the
        same parameters. Otherwise they meet; returns False. Collective among the ranks that share shards, which all
        have gradients of the same parameters."""
        if not self.may_settle_alike:
            return False
        if self._part:
            told = self._tell_end(self._reductions.pattern)
            self.drain()  # one that meets joins, as it hears that this one has started
            told.wait()
            if len(set(told.numbers)) > 1:
                return False
            self.begin_backward()
        self._reductions.settle_alike()
        return True

    def come_to_end(self) -> None:
        """Tells the others that this replica meets them. This rank has come to the end of the round: if it has no
        gradients to reduce, it is certain that the replica starts no reductions before."""
        if self._part:
            if self._reductions.state is GradientState.CLEAR or not self._reductions.has_gradients:
                self._tell_start(starts=False)
            if self.may_settle_alike:
                self._tell_end(_MEETS)

    def reduce_if_awaited(self) -> None:
        """Does the reductions of this round that another replica may wait in, before anything else waits for it."""
        if not self._part:
            return
        told = self._tell_start(starts=False)
        told.wait()
        if any(told.numbers):
            self._reductions.start_all()
            self.drain()

    def hear(self, said: bytes) -> bytes:
        """Combines what this replica has said in a meeting with what the others have."""
        return self._comm.host.all_reduce_bytes(said, "settle") if self._part else said

    def drain(self) -> None:
        """Waits for all reductions under way: replicas sum what each has reduced where they wait for it, together."""
        if self._comm.size > 1:
            with no_interception(), torch.no_grad():
                for pool in self._reductions.pools:
                    pool.drain()

    def _tell_start(self, *, starts: bool) -> Told:
        if self._starts is None:
            self._starts = self._comm.host.tell(int(starts), "replicas")
        return self._starts

    def _tell_end(self, pattern: int) -> Told:
        if self._settles is None:
            self._settles = self._comm.host.tell(pattern, "settle")
        return self._settles
