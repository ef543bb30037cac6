"""`StepsInBackward`: steps averaged gradients in the middle of a backward (`step_in_backward`)."""

from collections.abc import Callable, Sequence
from typing import final

from lightning_zero.shards.gradient import GradientShard
from lightning_zero.shards.slot import Slot


@final
class StepsInBackward:
    """Has `step` step the gradients of one group while the next is being reduced, so that only two have gradients."""

    def __init__(self, step: Callable[[Sequence[Slot]], None]) -> None:
        self._step = step
        self._waiting: list[GradientShard] = []  # complete on this rank, and being reduced
        self._stepped: set[GradientShard] = set()  # in this backward

    def follow(self, shard: GradientShard) -> None:
        """Steps what was reduced before, while the reduction of `shard` is under way; and that one next, if it is
        complete on this rank."""
        self._step_waiting()
        if shard.is_complete:
            self._waiting.append(shard)

    def step_rest(self, shard: GradientShard, slots: Sequence[Slot]) -> None:
        """Steps a group at the end of backward, unless it has been. `slots` have a gradient on any rank."""
        if shard in self._waiting:
            self._step_waiting()
        elif shard not in self._stepped and not shard.group.kind.is_idle:
            self.step(shard, slots)

    def step(self, shard: GradientShard, slots: Sequence[Slot]) -> None:
        """Waits for the average of a group, steps `slots` of it, and drops it."""
        shard.wait()
        self._stepped.add(shard)
        if slots:
            self._step(slots)
        shard.averaged.drop()

    def _step_waiting(self) -> None:
        for shard in self._waiting:
            self.step(shard, shard.group.slots)
        self._waiting.clear()

    def clear(self) -> None:
        """Makes ready for the next backward."""
        self._waiting.clear()
        self._stepped.clear()


def nothing_left_for(doing: str) -> RuntimeError:
    """Returns the error of an action that needs gradients after backward, where backward steps them."""
    return RuntimeError(
        f"step_in_backward=True takes each gradient as it comes, and there is nothing left for {doing}. Leave "
        "step_in_backward out."
    )
