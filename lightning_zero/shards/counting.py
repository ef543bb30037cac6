"""`StepCounts`: what a step changes of parameters of which this rank has nothing, with most optimizers of torch.

A rank steps 1/N of the elements, and so has no piece of most parameters where there are many ranks. Their state has the
same keys and counts on every rank, so that each can tell, and save, how often a parameter was stepped. An optimizer
keeps it so if it is given pieces without elements; but each of those costs it, in Python and in launches, what one with
elements costs. Here they are counted instead.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import final

from torch import Tensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Optimizer, RAdam, RMSprop, Rprop

from lightning_zero.device import is_host
from lightning_zero.shards.moment import VERDICT, state_of
from lightning_zero.shards.slot import Slot

# Without their subclasses. ASGD and NAdam keep more single numbers, which they compute from one another.
_COUNTING = {SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RAdam, RMSprop, Rprop}


@final
class StepCounts:
    """What the next step of an optimizer counts."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_sgd = type(optimizer) is SGD  # which keeps no count
        self._has_momentum = self._is_sgd and any(group["momentum"] for group in optimizer.param_groups)

    @classmethod
    def of(cls, optimizer: Optimizer, slots: Sequence[Slot]) -> "StepCounts | None":
        """Returns the counts of a step of `slots`; None if this rank has to step also those of which it has nothing.

        That is so with optimizers that do more with an empty tensor than to count, and where a `GradScaler` has one
        look at the gradients of others first. A rank that steps nothing would not notice what ends the step of others
        with an error. And where parameters share a count, as a user may set it, each sees how many were stepped before
        it.
        """
        if type(optimizer) not in _COUNTING or any(name in vars(optimizer) for name in VERDICT):
            return None
        if not any(slot.steps_any for slot in slots):
            return None
        found = cls(optimizer)
        if not found._is_sgd:
            states = map(dict.get, repeat(optimizer.state), (slot.parameter for slot in slots))
            counts = [id(state["step"]) for state in states if state and "step" in state]
            if len(set(counts)) < len(counts):
                return None
        return found

    def of_hidden(self, slot: Slot) -> list[Tensor] | None:
        """Returns the counts to which a step adds one, in the state of a parameter of which this rank has nothing.
        None: the step has to be taken, as the parameter has no state yet, or the counts are on a device, where a kernel
        for each takes longer than the step."""
        state = state_of(self._optimizer, slot.parameter)
        if self._is_sgd:
            is_made = not self._has_momentum or isinstance(state.get("momentum_buffer"), Tensor)
            return [] if is_made else None
        count = state.get("step")
        return [count] if isinstance(count, Tensor) and is_host(count.device) else None
