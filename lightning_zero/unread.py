"""Parameters that are to have the values of a checkpoint, and do not have them yet.

`load_state_dict` only notes where the values are (`lazy.receiving`), because each rank will read only the ranges it
owns, once that is known. Until then code of the user's runs: hooks after loading, `on_load_checkpoint`,
`configure_optimizers`. Whatever it touches is read before, whole and by the rank that asks, and from then on what is in
the parameter counts and no more what is in the checkpoint. Some of torch looks at tensors past `__torch_function__`
(`torch.tensor(p)`, `torch.func`, TorchScript) and finds NaN: that shows, where initial values would not.
"""

import copy
import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.lazy import LazyTensor, Stored, asks_for_metadata

_no_interception = torch._C.DisableTorchFunctionSubclass


class Noted(NamedTuple):
    """What `UnreadParameters` knew of a model."""

    sources: dict[Parameter, Stored]  # of all parameters that were noted
    read: set[Parameter]  # those of them whose values are here


@final
class UnreadParameters:
    """The parameters of one model, while their class is `UnreadParameter`."""

    def __init__(self) -> None:
        self._sources: dict[Parameter, Stored] = {}

    def __bool__(self) -> bool:
        return bool(self._sources)

    def note(self, parameter: Parameter, source: Stored) -> None:
        """`parameter` is to have the values of `source`."""
        self._sources[parameter] = _SOURCES[parameter] = source
        _hide(parameter)
        if _has_views(parameter):  # whose holder would see no difference
            _read(parameter)
        elif parameter.is_floating_point() or parameter.is_complex():
            with torch.no_grad(), _no_interception():
                parameter.fill_(torch.nan)

    def read(self) -> None:
        """All that was noted and is not read yet."""
        for parameter in self._sources:
            _read(parameter)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, the parameters are plain ones with whatever values they have: for what converts all of them."""
        unread = [parameter for parameter in self._sources if isinstance(parameter, UnreadParameter)]
        for parameter in unread:
            _show(parameter)
        try:
            yield
        finally:
            for parameter in unread:
                _hide(parameter)

    def take(self) -> Noted:
        """What was noted, and nothing is from now on: the parameters are plain ones, whether they were read or not."""
        sources, self._sources = self._sources, {}
        read = {parameter for parameter in sources if not isinstance(parameter, UnreadParameter)}
        for parameter in sources:
            _SOURCES.pop(parameter, None)
            _show(parameter)
        return Noted(sources, read)


_SOURCES = WeakIdKeyDictionary()  # Parameter -> Stored


class UnreadParameter(Parameter):
    """See the module's docstring. Never instantiated, and only `_unread` makes subclasses."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if asks_for_metadata(func):
            with _no_interception():
                return func(*args, **kwargs)
        if func is Tensor.copy_ and isinstance(args[1], LazyTensor):  # to be noted anew
            return NotImplemented
        return func(*tree_map(_read, args), **tree_map(_read, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_read(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _read(self).__reduce_ex__(protocol)


@functools.cache
def _unread(plain: type[Parameter]) -> type[Parameter]:
    return UnreadParameter if plain is Parameter else types.new_class(plain.__name__, (UnreadParameter, plain))


def _plain(parameter: Parameter) -> type[Parameter]:
    """The class that the user gave it."""
    if not isinstance(parameter, UnreadParameter):
        return type(parameter)
    return Parameter if type(parameter) is UnreadParameter else type(parameter).__bases__[1]


def _has_views(parameter: Parameter) -> bool:
    """Whether something else than the parameter and this question holds on to its memory."""
    with _no_interception():
        return torch._C._storage_Use_Count(parameter.untyped_storage()._cdata) > 2


def _show(parameter: Parameter) -> None:
    parameter.__class__ = _plain(parameter)


def _hide(parameter: Parameter) -> None:
    parameter.__class__ = _unread(_plain(parameter))


def _read(value: Any) -> Any:
    if isinstance(value, UnreadParameter):
        values = _SOURCES[value].whole()
        del _SOURCES[value]
        _show(value)
        with torch.no_grad(), _no_interception():
            value.copy_(values)
    return value
