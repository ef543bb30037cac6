"""`SavedParameters`: has autograd save where gathered values lie in a unit, not views of a buffer that is reused.

Around the forward of a unit, and around whole training forwards, a pair of saved-tensor hooks notes where a saved
tensor lies, and gathers the unit again when autograd asks for the values. This is the only way in which backward
gathers. So backward gathers nothing that it does not read, and by whatever way a graph leads back to a unit (an
auxiliary loss, a second backward, a recomputation), the values are there.

torch does not stack hooks: it calls only the innermost pair. Ours pass what is not a parameter on to the pair that was
there before, so activation checkpointing and offloading around a unit keep working. Torch's checkpoint counts what is
saved, and recomputes when any of it is asked for, so it is told of parameters, too, but not given their values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_zero.distributed_private import layout_of
from lightning_zero.run.cache import UnitCache
from lightning_zero.run.lasting import LastingLoans
from lightning_zero.run.runner import Runner
from lightning_zero.shards.early import nothing
from lightning_zero.shards.local import local_of
from lightning_zero.shards.slot import Edition, Slot, no_interception, slot_of
from lightning_zero.shards.unit import Unit
from lightning_zero.torch_private import accumulates, backward_number, edits_of, hide_behind, innermost_saved_hooks

RECOMPUTES = torch.utils.checkpoint.__name__  # the module of the hooks that recompute


class _Place(NamedTuple):
    """A view of a parameter's values, and the state that the parameter was in."""

    unit: Unit
    slot: Slot
    version: int
    is_recomputed: bool  # by torch's checkpoint: backward reads the values that the parameter has then
    edition: Edition | None  # otherwise: those that it has now
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements of `dtype`, from the first one of the parameter
    layout: Any  # of the DTensor, or None whose local part it is: tensor-parallel ranks share the parameter
    checkpointed: Any = None  # what torch's checkpoint has made of it


class _Itself(NamedTuple):
    """A parameter that autograd has saved itself, as it does for batch norm, and not a view of it. Backward reads the
    values that the parameter has then, even if `p.data` was replaced meanwhile."""

    unit: Unit
    slot: Slot
    version: int
    is_recomputed: bool
    checkpointed: Any = None


class _Ours(partial[Any]):
    """A hook of ours, which its type tells from others. Torch's selective checkpoint is told to look for users' hooks
    behind it: what it keeps itself is no parameter, and torch's checkpoint inside of ours does not count it."""


@final
class SavedParameters:
    """Sets the saved-tensor hooks, and gathers what they have noted."""

    def __init__(self, cache: UnitCache, lasting: LastingLoans, runner: Runner) -> None:
        self._cache = cache
        self._lasting = lasting
        self._runner = runner
        self._pushed: list[saved_tensors_hooks | None] = []  # the hooks that each `push` has set, innermost last

    @property
    def is_inside_others(self) -> bool:
        """Whether what is saved now goes to hooks that are not ours."""
        innermost = innermost_saved_hooks(False)
        return innermost is not None and not isinstance(innermost[0], _Ours)

    @property
    def is_inside_checkpoint(self) -> bool:
        """Whether what is saved now goes to torch's checkpoint, which counts it, and to no hooks inside of it."""
        innermost = innermost_saved_hooks(False)
        return innermost is not None and getattr(innermost[0], "__module__", None) == RECOMPUTES

    def push(self) -> bool:
        """Sets our hooks, until `pop`. Returns False where torch allows none, inside `torch.func` transforms."""
        outer = innermost_saved_hooks(False)
        if outer is not None and isinstance(outer[0], _Ours):
            self._pushed.append(None)
            return True
        pack, unpack = outer or (_keep, _give_back)
        ours = saved_tensors_hooks(_Ours(self._pack, pack), _Ours(self._unpack, unpack))
        hide_behind(ours.pack_hook, outer)
        try:
            ours.__enter__()
        except RuntimeError:
            self._pushed.append(None)
            return False
        self._pushed.append(ours)
        return True

    def pop(self) -> None:
        """Undoes one `push`."""
        if (ours := self._pushed.pop()) is not None:
            ours.__exit__()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Around a forward: lets backward gather also parameters that are read outside their units' forwards. Else
        autograd saves the parameter itself, and finds no values in it if its loan has ended meanwhile (as when a
        checkpoint is saved between forward and backward)."""
        notes = bool(self._cache.units) and torch.is_grad_enabled()
        if notes:
            self.push()
        try:
            yield
        finally:
            if notes:
                self.pop()

    def _pack(self, otherwise: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        is_recomputed = getattr(otherwise, "__module__", None) == RECOMPUTES
        with no_interception():
            saved = self._itself(tensor, is_recomputed) or self._place_of(tensor, is_recomputed)
        if saved is not None and is_recomputed:
            return saved._replace(checkpointed=otherwise(nothing(tuple(tensor.shape), tensor.dtype, tensor.device)))
        return otherwise(tensor) if saved is None else saved

    def _itself(self, tensor: Tensor, is_recomputed: bool) -> _Itself | None:
        slot = slot_of(tensor) if isinstance(tensor, Parameter) and not isinstance(tensor, DTensor) else None
        if slot is None or (unit := self._cache.unit_of(slot.group)) is None:
            return None
        return _Itself(unit, slot, edits_of(tensor), is_recomputed)

    def _place_of(self, saved: Tensor, is_recomputed: bool) -> _Place | None:
        tensor = local_of(saved)
        if not (type(tensor) is Tensor or isinstance(tensor, Parameter)) or tensor.layout != torch.strided:
            return None
        unit = self._cache.unit_around(tensor)
        if unit is None or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            return None
        at = int(tensor.storage_offset()) * tensor.itemsize  # bytes
        group, start = unit.group_at(at)
        itemsize = group.kind.resting.itemsize
        slot = group.slots[group.layout.index_at((at - start) // itemsize)]
        offset, rest = divmod(at - start - slot.offset * itemsize, tensor.itemsize)
        if rest:
            return None  # items of another size, which do not begin with the parameter
        layout = layout_of(saved) if isinstance(saved, DTensor) else None
        dtype, shape, stride, version = tensor.dtype, tensor.shape, tuple(tensor.stride()), edits_of(slot.parameter)
        edition = None if is_recomputed else slot.edition
        return _Place(unit, slot, version, is_recomputed, edition, dtype, shape, stride, offset, layout)

    def _unpack(self, otherwise: Callable[[Any], Tensor], saved: Any) -> Tensor:
        if not isinstance(saved, _Place | _Itself):
            return otherwise(saved)
        parameter = saved.slot.parameter
        if saved.is_recomputed:
            otherwise(saved.checkpointed)  # recomputes, unless it has
        else:
            with no_interception():
                _check_version(parameter, saved.version)
        if isinstance(saved, _Itself):
            self._gather(saved.unit, saved.is_recomputed)
            if saved.slot.group.kind.upcasts:  # a function of the user's has saved it, and expects the declared dtype
                return parameter.lender.declared_of(saved.slot)  # type: ignore[attr-defined]
            with no_interception():
                return parameter.detach()
        flat, start = None if saved.edition is None else saved.edition.kept, 0
        if flat is None:
            self._gather(saved.unit, saved.is_recomputed)
            flat, start = saved.slot.group.full_param, saved.slot.offset
            assert flat is not None
        first = flat[start:start].view(saved.dtype)  # of another size of items: the whole may not divide into those
        values = first.as_strided(saved.shape, saved.stride, int(first.storage_offset()) + saved.offset)
        return values if saved.layout is None else DTensor(values, saved.layout, requires_grad=False)

    def _gather(self, unit: Unit, is_recomputed: bool) -> None:
        """Gathers a unit whose saved values are asked for, by a backward or by someone who inspects a graph. What is
        recomputed sees the latest edits, as the recomputation does."""
        if backward_number() != -1 and not self._runner.backward.is_known and _accumulates_in(unit):
            self._runner.notice_backward()
        self._runner.course.use(unit)
        if is_recomputed:
            self._lasting.show_edits(unit)
        unit.wait()


def _accumulates_in(unit: Unit) -> bool:
    """Whether the backward that has come to a unit accumulates gradients. `torch.autograd.grad` only looks at a graph:
    one rank alone may call it, and the others come to the end of no backward."""
    with no_interception():
        return any(
            slot.parameter.requires_grad and accumulates(slot.parameter)
            for group in unit.groups
            for slot in group.slots
        )


def _keep(tensor: Tensor) -> tuple[Tensor, int | None]:
    # Detached, because a graph that holds its own output would never be freed. A leaf stays itself, as without hooks:
    # backward reads what is put into its `.data` before.
    kept = tensor if tensor.is_leaf else tensor.detach()
    return kept, None if tensor.is_inference() else edits_of(tensor)


def _give_back(saved: tuple[Tensor, int | None]) -> Tensor:
    tensor, version = saved
    if version is not None:
        _check_version(tensor, version)
    with no_interception():
        return tensor.detach()


def _check_version(tensor: Tensor, version: int) -> None:
    """Makes the check that torch leaves to hooks, where there are any."""
    if edits_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)} is at version {edits_of(tensor)}; expected version {version} instead."
        )
