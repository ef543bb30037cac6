"""`WeightViews`: two-byte weights as the forwards that read them get them, each a node of the graph."""

import weakref
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zero.distributed_private import set_local_tensor
from lightning_zero.shards.early import nothing
from lightning_zero.shards.local import local_of
from lightning_zero.shards.slot import Edition, Slot, no_interception
from lightning_zero.torch_private import backward_number


class _Shared(NamedTuple):
    """A view that several uses of a weight share."""

    view: Tensor  # without values, unless the group stays full
    taken_back: int  # of the group, at the last use
    edition: "weakref.ref[Edition]"  # that the last use saw. A strong reference would have the values copied


@final
class WeightViews:
    """Views of two-byte weights.

    An autocast with a cache casts a weight once in a pass, so gradients of several uses are summed in two bytes before
    they become fp32: here, these uses share a view, unless the weight was edited between them. Without a cache (as in
    Lightning), or where the module cuts the weight first, each use has a view of its own, and their gradients are
    summed in fp32.
    """

    def __init__(self) -> None:
        self._shared: dict[Slot, _Shared] = {}

    def view_of(self, slot: Slot, *, is_cut: bool) -> Tensor:
        """Returns a view of a weight whose values are there; `is_cut`: the module cuts it first."""
        with no_interception():
            parameter, group = slot.parameter, slot.group
            shares = torch.is_autocast_cache_enabled() and torch.is_grad_enabled() and parameter.requires_grad
            if not shares or is_cut or backward_number() != -1:
                return parameter.view_as(parameter)
            known = self._shared.get(slot)
            view = parameter.view_as(parameter) if known is None or _is_edited(slot, known) else known.view
            self._shared[slot] = _Shared(view, group.edits.taken_back, weakref.ref(slot.edition))
            return view if group.stays_full else _use_of(view, slot.local.values.detach())

    def clear(self) -> None:
        """Forgets the views, as a pass begins."""
        self._shared.clear()


def _is_edited(slot: Slot, known: _Shared) -> bool:
    """Whether a weight has other values than at the last use."""
    if known.taken_back == slot.group.edits.taken_back:
        return False
    if slot.group.stays_full:
        return not torch.equal(local_of(known.view), slot.local.values)
    return known.edition() is not slot.edition


def _use_of(view: Tensor, values: Tensor) -> Tensor:
    """Returns gathered values as a view of `view`, which has none itself: it would keep their memory until the pass is
    over. What one use is given is not changed afterwards, as a graph, or a hook of the user's, may have saved it."""
    _point(view, values)
    use = view.view_as(view)
    _point(view, nothing(tuple(values.shape), values.dtype, values.device))
    return use


def _point(view: Tensor, values: Tensor) -> None:
    if isinstance(view, DTensor):
        set_local_tensor(view, values)
    else:
        view.data = values
