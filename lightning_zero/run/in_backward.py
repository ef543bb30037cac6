"""`StepsInBackward`: steps averaged gradients in the middle of a backward (`step_in_backward`)."""

from collections.abc import Callable, Sequence
from typing import final

from lightning_zero.shards.gradient import GroupGradient
from lightning_zero.shards.slot import Slot


@final
class StepsInBackward:
    """Has `step` step the gradients of one group while the next is being reduced, so that only two have gradients."""

    def __init__(self, step: Callable[[Sequence[Slot]], None]) -> None:
        self._step = step
        self._waiting: list[GroupGradient] = []  # complete on this rank, and being reduced
        self._stepped: set[GroupGradient] = set()  # in this backward

    def follow(self, gradient: GroupGradient) -> None:
        """Steps what was reduced before, while the reduction of `gradient` is under way; and that one next, if it is
        complete on this rank."""
        self._step_waiting()
        if gradient.is_complete:
            self._waiting.append(gradient)

    def step_rest(self, gradient: GroupGradient, slots: Sequence[Slot]) -> None:
        """Steps a group at the end of backward, unless it has been. `slots` have a gradient on any rank."""
        if gradient in self._waiting:
            self._step_waiting()
        elif gradient not in self._stepped and not gradient.group.kind.is_idle:
            self.step(gradient, slots)

    def step(self, gradient: GroupGradient, slots: Sequence[Slot]) -> None:
        """Waits for the average of a group, steps `slots` of it, and drops it."""
        gradient.wait()
        self._stepped.add(gradient)
        if slots:
            self._step(slots)
        gradient.averaged.drop()

    def _step_waiting(self) -> None:
        for gradient in self._waiting:
            self.step(gradient, gradient.group.slots)
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
