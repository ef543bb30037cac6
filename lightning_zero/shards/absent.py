"""`AbsentState`: optimizer state of what other ranks alone step."""

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.shards.known import KnownState
from lightning_zero.shards.moment import state_of, wrapped_in
from lightning_zero.shards.probe import is_element_wise
from lightning_zero.shards.slot import Slot


@final
class AbsentState:
    """Gives each parameter that other ranks alone have stepped the state of one that this rank has stepped, of the same
    group and if possible as many dimensions: the same keys and counts, with empty tensors. An optimizer that
    `is_element_wise` has made it by itself."""

    def __init__(self, optimizer: Optimizer, known: KnownState) -> None:
        self._optimizer = optimizer
        self._known = known
        self._absent: list[Slot] = []

    def note(self, stepped: Iterable[Slot]) -> None:
        """Notes what is stepped next, on any rank."""
        self._absent = [] if is_element_wise(self._optimizer) else [slot for slot in stepped if not slot.steps_any]

    def fill(self, slots: Mapping[Parameter, Slot]) -> None:
        """Makes the state of what was noted, once all of it is stepped. `slots` are all that the optimizer has."""
        absent, self._absent = set(self._absent), []
        optimizers = wrapped_in(self._optimizer)
        for group in self._optimizer.param_groups if absent else ():
            own = [slot for parameter in group["params"] if (slot := slots.get(parameter)) is not None]
            stepped = [s for s in own if s.steps_any and any(state_of(one, s.parameter) for one in optimizers)]
            alike = {len(slot.shape): slot for slot in reversed(stepped)}
            for slot in own if stepped else ():
                like = alike.get(len(slot.shape), stepped[0])
                for one in optimizers if slot in absent else ():
                    state = {name: self._emptied(name, value) for name, value in state_of(one, like.parameter).items()}
                    if state:
                        dict.__setitem__(one.state, slot.parameter, state)

    def _emptied(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_piece = value.dim() or self._known.is_cut(name)
        return torch.empty(0, dtype=value.dtype, device=value.device) if is_piece else value.clone()
