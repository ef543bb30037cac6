"""Intercepts calls of torch functions on tensors whose values are elsewhere.

The function is called with the values instead, which are *lent* to the call. After the call it is known whether it has
edited them, and whether its result is a view through which they may be edited later.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_zero import torch_private
from lightning_zero.distributed_private import local_tensor, set_local_tensor
from lightning_zero.shards.local import local_of
from lightning_zero.tiers.activations import version_of
from lightning_zero.torch_private import (
    FOREACH_IN_PLACE,
    UNVERSIONED,
    is_wrapped,
    set_tracing_state,
    tracing_state,
    tree_iter,
    tree_map,
)
from lightning_zero.wire import editing

# A tensor answers these without its values.
_ATTRIBUTES = """
    shape device requires_grad grad grad_fn grad_dtype is_leaf ndim layout is_cuda is_meta is_sparse is_quantized
    is_mkldnn is_cpu is_nested retains_grad output_nr itemsize nbytes
""".split()
_METHODS = """
    size dim numel nelement ndimension requires_grad_ register_hook register_post_accumulate_grad_hook is_floating_point
    is_complex element_size __len__ retain_grad storage_offset get_device is_inference is_conj is_neg
""".split()
METADATA = {
    *torch_private.METADATA,
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
    *(getattr(Tensor, name) for name in _METHODS),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}


def _as_view(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of DTensor whose result holds a view of the values where it would hold the tensor of the DTensor
    itself: nothing would tell that users hold the values, or edit them."""

    def read(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        result = method(tensor, *args, **kwargs)
        local = local_tensor(tensor)
        if result is local:
            return local.view_as(local)
        if local_of(result) is local:
            set_local_tensor(result, local.view_as(local))
        return result

    return read


METHODS_OF_DTENSOR: dict[str, Callable[..., Any]] = {  # which are functions of Python's, that nothing intercepts
    "to_local": _as_view(DTensor.to_local),  # torch 2.11 returns that very tensor outside of graphs
    "full_tensor": DTensor.full_tensor,
    "redistribute": _as_view(DTensor.redistribute),  # so does it, if the result is divided as before
}
_UNVERSIONED = UNVERSIONED | editing.INTERCEPTED
# Through what these return, values are edited without raising their version.
UNWATCHED = {
    *editing.INTERCEPTED,  # which return what has yet to arrive
    *(Tensor.data.__get__, Tensor.detach, torch.detach, Tensor.numpy),  # type: ignore[attr-defined]
    *METHODS_OF_DTENSOR.values(),
}
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_numbers = itertools.count()  # of calls
STRIDES = {Tensor.stride, Tensor.is_contiguous}  # values that are elsewhere are in C order


def asks_for_dtype(func: Any) -> bool:
    return bool(func == Tensor.dtype.__get__)  # type: ignore[attr-defined]  # made anew by each look-up


@contextmanager
def untraced() -> Iterator[None]:
    """Hides what is done inside from `torch.jit.trace`: bringing values is no part of a model's graph."""
    state = tracing_state()
    if state is None:
        yield
        return
    set_tracing_state(None)
    try:
        yield
    finally:
        set_tracing_state(state)


@final
@dataclass(eq=False)
class Lent:
    """A loan of values to one call."""

    tensor: Tensor  # what the call was made with
    values: Tensor
    end: Callable[["Lent", Any], None]  # called with this loan and the call's result, which is None if it has raised
    is_unversioned: bool = False  # the call may edit the values without raising their version
    is_unwatched: bool = False  # so may users, through what the call returns
    call: int = -1  # its number: a call may borrow several tensors

    def __post_init__(self) -> None:
        self._was = _state_of(self.values)

    @property
    def is_edited(self) -> bool:
        return self.is_unversioned or _state_of(self.values) != self._was

    def is_visible_in(self, result: Any) -> bool:
        """Whether `result` holds a view of the values, or is a collective that may still write to them."""
        return any(
            isinstance(item, numpy.ndarray | dist.Work) or (isinstance(item, Tensor) and self._shares_memory_with(item))
            for item in tree_iter(result)
        )

    @staticmethod
    def is_arriving_in(result: Any) -> bool:
        """Whether `result` is a collective that may still write to the values."""
        return any(isinstance(item, dist.Work) for item in tree_iter(result))

    def _shares_memory_with(self, item: Tensor) -> bool:
        if item is self.tensor:
            return False
        item, values = local_of(item), local_of(self.values)  # of a DTensor, the tensor that has its memory
        if type(item).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return False
        with torch.DisableTorchFunctionSubclass():
            if item.layout != torch.strided or not item.numel() or is_wrapped(item) or is_wrapped(values):
                return False
            return item.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()


def _state_of(values: Tensor) -> tuple[int, int]:
    """Returns version and address, both of which edits in place may change."""
    with torch.DisableTorchFunctionSubclass():
        return version_of(values), values.data_ptr() if values.layout == torch.strided and not is_wrapped(values) else 0


def lend_any(value: Any) -> Lent | None:
    """Returns a loan of a tensor whose values are elsewhere, None for anything else. One call may mix their kinds."""
    borrow = getattr(type(value), "borrow", None) if isinstance(value, Tensor) else None
    return None if borrow is None else borrow(value)


def call(func: Callable[..., Any], args: Any, kwargs: Any, lend: Callable[[Any], Lent | None] = lend_any) -> Any:
    """Calls torch's `func` with values in place of each argument that `lend` returns a loan for; a question about
    metadata needs none. Where the result is lent values, edited in place, returns the intercepted tensor itself."""
    kwargs = kwargs or {}
    if func in METADATA or func in STRIDES or asks_for_dtype(func):
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    lent: dict[int, Lent] = {}
    number = next(_numbers)
    listed = {id(value) for value in args[0] if isinstance(value, DTensor)} if func in FOREACH_IN_PLACE else ()

    def give(value: Any) -> Any:
        with untraced():
            loan = lent.get(id(value)) or lend(value)
        if loan is None:
            return value
        lent[id(value)], loan.call = loan, number
        loan.is_unversioned, loan.is_unwatched = func in _UNVERSIONED or id(value) in listed, func in UNWATCHED
        return loan.values

    result = None
    try:
        given, kwargs = tree_map(give, (args, kwargs))
        with torch.DisableTorchFunctionSubclass():
            result = func(*given, **kwargs)
        if isinstance(result, list | tuple):  # that of an edit of many is the very list of them
            result = next((own for own, lists in zip(args, given, strict=True) if lists is result), result)
        for loan in lent.values():
            if result is loan.values and loan.is_edited:
                result = loan.tensor
    finally:
        with untraced():
            for loan in lent.values():
                loan.end(loan, result)
    return result


def subclass_of(plain: type[Parameter], base: type[Parameter], **attributes: Any) -> type[Parameter]:
    """Makes a class that intercepts as `base` does, and keeps what users gave `plain` (methods, `isinstance`)."""
    return type(plain.__name__, (base,) if plain is Parameter else (base, plain), attributes)
