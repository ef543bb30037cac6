"""`ShardedGradient`: `p.grad` where gradients rest as shards. It has the full shape and is gathered when it is read;
edits in place reach the shard. Reading it is a collective: do it on every rank.
"""

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, final

import torch
from torch import Tensor

from lightning_zero.shards.averaged import AveragedGradient
from lightning_zero.shards.slot import Slot
from lightning_zero.torch_private import FOREACH_IN_PLACE, backward_number, make_wrapper, schema_of
from lightning_zero.views.intercept import Lent, call, lend_any
from lightning_zero.wire import editing

if TYPE_CHECKING:
    from lightning_zero.run.loans import Loans

T = TypeVar("T")
OPERATOR = type(torch.ops.aten.detach.default)
ZEROING = {Tensor.zero_, torch.zero_, *(one for one in FOREACH_IN_PLACE if one.__name__ == "_foreach_zero_")}


@final
class ShardedGradient(AveragedGradient):
    """The averaged gradient of the parameter at `slot`; see the module's docstring.

    It holds the engine's parts weakly: torch does not tell Python's garbage collector what `p.grad` holds, so an engine
    that it held would never be freed."""

    _slot: weakref.ref[Slot]
    _lender: weakref.ref["Loans"]
    _parameter: str
    _edition: int  # see `Averaged.editions`

    @staticmethod
    def __new__(cls, slot: Slot, lender: "Loans") -> "ShardedGradient":
        assert slot.gradient is not None
        place = slot.group.places.gathered
        with torch.inference_mode(False):
            self = make_wrapper(cls, slot.shape, dtype=slot.gradient.dtype, device=place.device)
        self._slot, self._lender, self._parameter = weakref.ref(slot), weakref.ref(lender), slot.name
        self._edition = slot.gradient.averaged.editions[slot.index]
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient({self._parameter!r}, shape={tuple(self.shape)}, dtype={self.dtype}; reading gathers)"

    def is_of(self, slot: Slot) -> bool:
        gradient = slot.gradient
        is_latest = gradient is not None and gradient.averaged.editions[slot.index] == self._edition
        return is_latest and self._slot() is slot

    @property
    def slot(self) -> Slot:
        return self._there(self._slot)

    @property
    def lender(self) -> "Loans":
        return self._there(self._lender)

    def _there(self, held: "weakref.ref[T]") -> T:
        it = held()
        if it is None:
            raise RuntimeError(
                f"The averaged gradient of {self._parameter!r} rested as shards in an engine that is gone. "
                "Read gradients while the engine is there, and set p.grad to None after it."
            )
        return it

    def refuse_as_given(self) -> NoReturn:
        """Raises RuntimeError, where it is in the `p.grad` of another parameter, or of a later backward."""
        raise RuntimeError(
            f"The gradient of {self._parameter!r} rests in shards, and was put into the p.grad of another parameter, "
            "or of a later backward than its own. Put a copy there: q.grad = p.grad.clone(), made before p.grad is "
            "cleared."
        )

    def _refuse_if_replaced(self) -> None:
        if not self.is_of(self.slot):
            raise RuntimeError(
                f"What was p.grad of {self._parameter!r} in an earlier backward is there no more: its shards have the "
                "gradient of a later one. Keep copies of gradients that you use later: p.grad.clone()."
            )

    def _again(self) -> "ShardedGradient":
        again = ShardedGradient(self.slot, self.lender)
        again._edition = self._edition
        return again

    @property
    def data(self) -> "ShardedGradient":
        return self._again()

    @data.setter
    def data(self, values: Tensor) -> None:
        self.copy_(values)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `torch.compile` looks at the storage of all tensors that it finds, gradients among them. A DTensor whose local
        # part this is calls operators, below autograd.
        if func is Tensor.untyped_storage or isinstance(func, OPERATOR):
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in ZEROING:  # by `zero_grad(set_to_none=False)`
            return call(func, args, kwargs, lambda one: one._borrow_zeros() if isinstance(one, cls) else lend_any(one))
        return call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Handles what autograd does with it, past `__torch_function__`."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]._again()
        if func is torch.ops.aten.add_.Tensor and backward_number() != -1:
            args[0].slot.gradient.beside.add(args[0].slot, args[1])  # autograd accumulates
            return args[0]
        is_edited = schema_of(func).is_mutable or func in editing.OPERATORS  # the version stays as it is below autograd
        return call(func, args, kwargs, lambda value: value.borrow(is_edited) if isinstance(value, cls) else None)

    def borrow(self, is_edited: bool = False) -> Lent:
        """Lends its values to one call. With `is_edited` they count as edited, whatever their version.

        Raises:
            RuntimeError: if its shards have the average of a later backward.
        """
        self._refuse_if_replaced()
        with torch.inference_mode(False):
            return Lent(self, self.lender.lend_gradient(self.slot), partial(_end, is_edited=is_edited))

    def _borrow_zeros(self) -> Lent:
        """Does `borrow` for a call that makes zeros of it."""
        self._refuse_if_replaced()
        with torch.inference_mode(False):
            return Lent(self, self.lender.lend_zeros(self.slot), partial(_end, is_edited=True))


def _end(loan: Lent, result: Any, *, is_edited: bool) -> None:
    gradient, is_visible = loan.tensor, loan.is_visible_in(result)
    assert isinstance(gradient, ShardedGradient)
    is_edited |= loan.is_edited
    if is_edited or is_visible:
        edited_by = loan.call if is_edited else None
        gradient.lender.take_gradient(
            gradient.slot,
            loan.values,
            edited_by=edited_by,
            is_visible=is_visible,
            is_arriving=loan.is_arriving_in(result),
        )
