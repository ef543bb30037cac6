"""`WeightViews`: two-byte weights as the forwards that read them get them, each a node of the graph."""

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zero.shards.early import nothing
from lightning_zero.shards.local import local_of
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.torch_private import backward_number, set_local_tensor


@final
class WeightViews:
    """Views of two-byte weights.

    An autocast with a cache casts a weight once in a pass, so gradients of several uses are summed in two bytes before
    they become fp32: here, these uses share a view, unless the weight was edited between them. Without a cache (as in
    Lightning), or where the module cuts the weight first, each use has a view of its own, and their gradients are
    summed in fp32.
    """

    def __init__(self) -> None:
        self._shared: dict[Slot, tuple[int, Tensor]] = {}  # each with `taken_back` of its group
        self._emptied: set[Slot] = set()  # whose shared view shows no values now

    def of(self, slot: Slot, *, is_cut: bool) -> Tensor:
        """Returns a view of a weight whose values are there; `is_cut`: the module cuts it first."""
        with no_interception():
            parameter, taken_back = slot.parameter, slot.group.edits.taken_back
            shares = torch.is_autocast_cache_enabled() and torch.is_grad_enabled() and parameter.requires_grad
            if not shares or is_cut or backward_number() != -1:
                return parameter.view_as(parameter)
            before, shared = self._shared.get(slot, (-1, parameter))
            if before == taken_back:
                self._fill(slot, shared)
            elif before == -1 or slot in self._emptied or not torch.equal(local_of(shared), slot.local.values):
                self._emptied.discard(slot)
                shared = parameter.view_as(parameter)
            self._shared[slot] = taken_back, shared
            return shared

    def empty(self, slots: Iterable[Slot]) -> None:
        """Takes the values from the shared views of some weights, whose memory is to be used for others: a view would
        keep it until the pass is over. Graphs that have saved one have values, or a place, of their own."""
        if not self._shared:
            return
        for slot in slots:
            if slot in self._shared and slot not in self._emptied:
                self._emptied.add(slot)
                _, shared = self._shared[slot]
                _point(shared, nothing(slot.local.box.shape, local_of(shared).dtype, local_of(shared).device))

    def clear(self) -> None:
        """Forgets the views, as a pass begins."""
        self._shared.clear()
        self._emptied.clear()

    def _fill(self, slot: Slot, shared: Tensor) -> None:
        if slot in self._emptied:
            self._emptied.remove(slot)
            _point(shared, slot.local.values.detach())


def _point(view: Tensor, values: Tensor) -> None:
    if isinstance(view, DTensor):
        set_local_tensor(view, values)
    else:
        view.data = values
