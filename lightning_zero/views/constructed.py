"""What a parameter shows while its module is being built in shards: whoever touches it finds its values.

From the moment a module registers it until an engine takes it over, a parameter's class is a `ConstructedParameter`
(the object stays the same). Its values are here or rest as rows over the ranks (`shards.early`); an initialisation, an
edit, a copy or a tie finds them here, and what it leaves behind counts.
"""

import copy
import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.shards.early import early_of
from lightning_zero.views.intercept import STRIDES, Lent, call
from lightning_zero.views.lazy import LazyTensor, Stored

_MAKES_PARAMETER = Parameter.__new__.__code__
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class Keeper(ABC):
    """Who has the values of parameters that are not here."""

    @abstractmethod
    def lend(self, parameter: Parameter) -> Lent:
        """The values, for one call."""

    @abstractmethod
    def assign(self, parameter: Parameter, values: Tensor) -> None:
        """``parameter.data = values``, which may be of another shape, dtype and device."""

    @abstractmethod
    def load(self, parameter: Parameter, source: Stored) -> None:
        """The parameter takes values, of its shape, that are in a file."""

    @abstractmethod
    def as_made(self, parameter: Parameter) -> AbstractContextManager[None]:
        """Inside, the parameter has its values, and the class that the user gave it."""

    @abstractmethod
    def alias(self, parameter: Parameter) -> Parameter:
        """A second parameter over the same memory."""

    @abstractmethod
    def watch(self, parameter: Parameter, label: str) -> None:
        """Looks after one more parameter; `label` is for messages."""


class ConstructedParameter(Parameter):
    """See the module's docstring. Never instantiated; a keeper makes subclasses, and parameters their instances."""

    keeper: ClassVar[Keeper]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and isinstance(args[0], ConstructedParameter):
            cls.keeper.assign(args[0], args[1])
            return None
        if func in STRIDES and _is_elsewhere(args[0]):  # rows are of contiguous values
            return func(torch.empty(args[0].shape, device="meta"), *args[1:], **(kwargs or {}))
        if func is Tensor.copy_ and _is_stored(args[1]) and args[0].shape == args[1].shape:
            cls.keeper.load(args[0], args[1].source)
            return args[0]
        if func is Tensor.detach and _is_called_by_parameter():
            return cls.keeper.alias(args[0])
        return call(func, args, kwargs)

    def borrow(self) -> Lent:
        """Its values, for one call."""
        return self.keeper.lend(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        if id(self) not in memo:
            with self.keeper.as_made(self):
                memo[id(self)] = copy.deepcopy(self, memo)
            self.keeper.watch(memo[id(self)], "copy")
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with self.keeper.as_made(self):
            return self.__reduce_ex__(protocol)


def _is_called_by_parameter() -> bool:
    """Whether the call is of ``Parameter(p)``, which wants a tensor of the class of `p`, and makes that a parameter."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:  # of modes, such as a device's
        frame = frame.f_back
    return frame.f_code is _MAKES_PARAMETER


def _is_elsewhere(parameter: Tensor) -> bool:
    early = early_of(parameter)
    return early is not None and not early.is_whole


def _is_stored(value: Any) -> bool:
    return isinstance(value, LazyTensor) and isinstance(value.source, Stored)


class ConstructedClasses:
    """The class of each kind of parameter while it waits: what the user gave the kind (methods, `isinstance`) stays."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._made: dict[type[Parameter], type[Parameter]] = {}  # plain -> constructed

    def __getitem__(self, plain: type[Parameter]) -> type[Parameter]:
        if plain not in self._made:
            bases = (ConstructedParameter,) if plain is Parameter else (ConstructedParameter, plain)
            self._made[plain] = type(plain.__name__, bases, {"keeper": self._keeper})
        return self._made[plain]
