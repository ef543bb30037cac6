"""`ConstructedParameter`: a parameter while its module is being built in shards; reading one brings its values.

From the moment a module registers it until an engine takes it over, a parameter's class is a `ConstructedParameter`
(the object stays the same). Its values are here, or rest as rows over the ranks (`shards.early`). Initialising,
editing, copying or tying it brings them here, and keeps what was done to them.
"""

import copy
import sys
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.shards.early import early_of
from lightning_zero.views.intercept import SET_DATA, STRIDES, Lent, call
from lightning_zero.views.lazy import stored_in

if TYPE_CHECKING:
    from lightning_zero.run.construction import Construction

_MAKES_PARAMETER = Parameter.__new__.__code__


class ConstructedParameter(Parameter):
    """See the module's docstring. Never instantiated: parameters become instances of subclasses that have a keeper."""

    keeper: ClassVar["Construction"]  # has the values, and brings them

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA and isinstance(args[0], ConstructedParameter):
            cls.keeper.assign(args[0], args[1])
            return None
        if func in STRIDES and (early := early_of(args[0])) and not early.is_whole:  # rows are of contiguous values
            return func(torch.empty(args[0].shape, device="meta"), *args[1:], **(kwargs or {}))
        if func is Tensor.copy_ and (stored := stored_in(args[1])) and args[0].shape == stored.shape:
            cls.keeper.load(args[0], stored)
            return args[0]
        if func is Tensor.detach and _is_called_by_parameter():
            return cls.keeper.alias(args[0])
        return call(func, args, kwargs)

    def borrow(self) -> Lent:
        return self.keeper.lend(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        with self.keeper.as_made(self):
            made = copy.deepcopy(self, memo)
        self.keeper.watch(made, "copy")
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        with self.keeper.as_made(self):
            return self.__reduce_ex__(protocol)  # that of the class that the user gave it


def _is_called_by_parameter() -> bool:
    """Whether the caller is ``Parameter(p)``, which needs a tensor of the class of `p`, and makes that a parameter."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:  # a mode's, such as a device's
        frame = frame.f_back
    return frame.f_code is _MAKES_PARAMETER
