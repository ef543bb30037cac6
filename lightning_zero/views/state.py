"""`RestingState`: optimizer state that rests on disk, or in another dtype than it is stepped in.

It has shape and dtype, is read when it is used, and keeps edits.
"""

from typing import Any, final

import torch
from torch import Tensor

from lightning_zero.shards.staging import StateElsewhere
from lightning_zero.tiers.array import ALL, Array
from lightning_zero.torch_private import make_wrapper
from lightning_zero.views.intercept import Lent, call


@final
class RestingState(StateElsewhere):
    """`optimizer.state[p][name]` between steps, whose values are in `array`."""

    _lent: Tensor | None  # values of which users may hold, and edit, views

    @staticmethod
    def __new__(cls, array: Array, shape: tuple[int, ...], dtype: torch.dtype) -> "RestingState":
        with torch.inference_mode(False):
            self = make_wrapper(cls, shape, dtype=dtype, device=torch.device("cpu"))
        self.array, self._lent = array, None
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kept = f"{self.array.dtype} in the tier {self.array.place.tier}"
        return f"RestingState(shape={tuple(self.shape)}, dtype={self.dtype}, kept as {kept})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._read().clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.detach:
            return args[0]
        return call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call(func, args, kwargs)

    def borrow(self) -> Lent:
        return Lent(self, self._read(), _end)

    def keep_edits(self) -> None:
        if self._lent is not None:
            self.array.write(ALL, self._lent.view(-1))
            self._lent = None

    def _read(self) -> Tensor:
        with torch.inference_mode(False):
            return self.array.read().view(self.shape).to(self.dtype) if self._lent is None else self._lent


def _end(loan: Lent, result: Any) -> None:
    state = loan.tensor
    assert isinstance(state, RestingState)
    if loan.is_visible_in(result):
        state._lent = loan.values
    elif loan.is_edited:
        state.array.write(ALL, loan.values.reshape(-1))
