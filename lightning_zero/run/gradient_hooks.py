"""`GradientHooks`: hooks on parameters that train, which autograd calls as soon as a gradient is in `p.grad`."""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

from torch import Tensor
from torch.nn import Parameter

from lightning_zero.shards.gradient import GroupGradient
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.torch_private import put_last


@final
class GradientHooks:
    """The engine's hooks, which call `collect` with the slot of the parameter.

    Autograd holds them, and Python's collector of cycles does not see what it holds. A strong reference to an engine
    there would keep it, and so the hooked parameter, alive until it is closed: `collect` must have none either.
    """

    def __init__(self, collect: Callable[["weakref.ref[Slot]", Tensor], None]) -> None:
        self._collect = collect
        self._hooked: list[tuple[Parameter, int]] = []  # each with the id of its hook
        self._handles: list[Any] = []

    def add(self, gradients: Iterable[GroupGradient]) -> None:
        """Hooks those parameters whose gradients are to be taken as they come."""
        with no_interception():
            for gradient in gradients:
                for slot in gradient.group.slots if gradient.is_collected else ():
                    parameter, trains_now = slot.parameter, slot.parameter.requires_grad
                    parameter.requires_grad_(True)  # torch hooks only what trains; `toggle_optimizer` may thaw it later
                    handle = parameter.register_post_accumulate_grad_hook(partial(self._collect, weakref.ref(slot)))
                    self._handles.append(handle)
                    self._hooked.append((parameter, handle.id))
                    parameter.requires_grad_(trains_now)

    def begin_pass(self) -> None:
        """Has hooks that users have added since the last pass see gradients before they are taken."""
        with no_interception():
            put_last(self._hooked)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
