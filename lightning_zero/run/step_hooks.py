"""`StepHooks`: hooks on the user's optimizers, by which the engine does its part in `step`, `train` and `eval`."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_zero.run.modes import Modes
from lightning_zero.run.stepping import Stepping
from lightning_zero.torch_private import put_innermost

_INNERMOST = WeakKeyDictionary[Optimizer, tuple[int, int]]()  # the numbers of our hooks, before and after the step


@functools.cache  # once in a process, and not removed: another thread may be going through torch's list
def _begin_to_order_hooks() -> None:
    # torch calls what is on all optimizers first, when it does not go through the hooks of the one that steps yet.
    register_optimizer_step_pre_hook(torch.compiler.disable(_order_hooks))


def _order_hooks(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _INNERMOST:
        put_innermost(optimizer, *_INNERMOST[optimizer])


@final
class StepHooks:
    """Has each call of `step` run inside of what the functions `around` return for the optimizer, outermost first, and
    those of `train` and `eval` made by `change`; until `remove`.

    Users' own hooks on the step run outside of it, whenever they came in, and find whole parameters and gradients.
    """

    def __init__(
        self,
        stepping: Stepping,
        around: Sequence[Callable[[Optimizer], AbstractContextManager[None]]],
        change: Callable[[Optimizer, Callable[[], Any]], Any],
    ) -> None:
        self._handles: list[Any] = []
        for optimizer, calls in stepping.calls.items():
            before = partial(calls.before, [partial(context, optimizer) for context in around])
            hooks = [  # disabled, so that torch.compile(optimizer.step) leaves them to Python
                optimizer.register_step_pre_hook(torch.compiler.disable(before)),
                optimizer.register_step_post_hook(torch.compiler.disable(calls.after)),
            ]
            _INNERMOST[optimizer] = hooks[0].id, hooks[1].id
            _begin_to_order_hooks()
            is_cut = any(slot.group.is_cut for slot in stepping.steppers[optimizer].slots)
            self._handles += [*hooks, Modes(optimizer, partial(change, optimizer), is_cut=is_cut)]
        self._optimizers = list(stepping.calls)

    def remove(self) -> None:
        for optimizer in self._optimizers:
            _INNERMOST.pop(optimizer, None)
        for handle in self._handles:
            handle.remove()
