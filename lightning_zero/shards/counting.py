"""What a step changes of a parameter of which this rank has nothing: the count of steps, with most optimizers of torch.

A rank steps 1/N of the elements, and so has no piece of most parameters where there are many ranks. Their state has the
same keys and counts on every rank, so that each can tell, and save, how often a parameter was stepped. An optimizer
keeps it so if it is given pieces without elements; but each of those costs it, in Python and in launches, what one with
elements costs. Here they are counted instead.
"""

from collections.abc import Iterable
from itertools import repeat

from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Optimizer, RAdam, RMSprop, Rprop

from lightning_zero.device import is_host
from lightning_zero.shards.moment import VERDICT, state_of

# Without their subclasses. ASGD and NAdam keep more single numbers, which they compute from one another.
_COUNTING = {SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RAdam, RMSprop, Rprop}


def only_counts(optimizer: Optimizer, parameters: Iterable[Parameter]) -> bool:
    """Whether the next step of an optimizer does no more with an empty tensor that it has stepped before than to count.
    It may not even do that where a `GradScaler` has it look at the gradients of others first. Where several of the
    parameters share a count, as a user may set it, each sees how many were stepped before it."""
    if type(optimizer) not in _COUNTING or any(name in vars(optimizer) for name in VERDICT):
        return False
    if type(optimizer) is SGD:  # which keeps none
        return True
    states = map(dict.get, repeat(optimizer.state), parameters)
    counts = [id(state["step"]) for state in states if state and "step" in state]
    return len(set(counts)) == len(counts)


def counts_of(optimizer: Optimizer, parameter: Parameter) -> list[Tensor] | None:
    """Returns the counts, in the state of a parameter, to which a step adds one. None: the step has to be taken, as the
    parameter has no state yet, or the counts are on a device, where a kernel for each takes longer than the step."""
    state = state_of(optimizer, parameter)
    if type(optimizer) is SGD:
        is_made = isinstance(state.get("momentum_buffer"), Tensor)
        return [] if is_made or not any(group["momentum"] for group in optimizer.param_groups) else None
    count = state.get("step")
    return [count] if isinstance(count, Tensor) and is_host(count.device) else None
