"""What a parameter shows while its values are not there: reading one gathers; nobody meets missing memory.

Between uses at stage 3 a parameter has no values, and a weight that rests in two bytes is not what the user declared.
For that time the object's class is a `RestingParameter` (the object stays the same, so optimizers and modules notice
nothing). Anything but a question about metadata borrows the values first. Calls of the unit's modules are the fast
path; this is the one that makes tied heads, `F.linear(x, self.emb.weight)`, parameters of the LightningModule itself,
`print`, `deepcopy` and `torch.save` work without a wrapping policy.

From the end of backward until ranks agree on which parameters were used, all that train are of this class: whoever asks
one of them for its gradient makes them agree.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.slot import Slot, no_interception, slot_of
from lightning_zero.views.intercept import METADATA, STRIDES, Lent, asks_for_dtype, call
from lightning_zero.views.lazy import LazyTensor, Stored

_BY_IDENTITY = {torch.autograd.grad, torch.autograd.backward}  # parameters name nodes of the graph here
_GRADIENT = {getattr(Tensor.grad, name) for name in ("__get__", "__set__")}
_METHODS_OF_DTENSOR = ("to_local", "full_tensor", "redistribute", "__repr__")
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class Lender(ABC):
    """Who has the values, and takes them back with what was edited."""

    @abstractmethod
    def lend(self, slot: Slot) -> Lent:
        """A parameter's values, in the dtype that readers see, connected to autograd."""

    @abstractmethod
    def load(self, slot: Slot, source: Stored) -> None:
        """The parameter is to take values that are in a file."""

    @abstractmethod
    def settle_gradients(self) -> None:
        """Ranks agree on which parameters have gradients, if they have not yet."""


class RestingParameter(Parameter):
    """The class of a parameter between uses; see the module's docstring. Never instantiated, and only `Interception`
    makes subclasses."""

    lender: ClassVar[Lender]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GRADIENT:
            cls.lender.settle_gradients()
        if func in METADATA or func in _BY_IDENTITY:
            with no_interception():
                return func(*args, **(kwargs or {}))
        if func in STRIDES:
            return func(torch.empty(args[0].shape, device="meta"), *args[1:], **(kwargs or {}))
        if asks_for_dtype(func):
            return _slot(args[0]).group.dtype
        if func is Tensor.copy_ and isinstance(args[1], LazyTensor) and isinstance(args[1].source, Stored):
            args[0].lender.load(_slot(args[0]), args[1].source)
            return args[0]
        if func == _SET_DATA and isinstance(args[0], RestingParameter):
            slot = _slot(args[0])
            slot.group.check_assigned(slot, args[1], slot.group.dtype)
            with torch.no_grad():
                if slot.group.upcasts or isinstance(args[0], DTensor):
                    args[0].copy_(args[1])
                    return None
                call(_GET_DATA, (args[0],), None)  # whoever has looked at it may assign to it, until the boundary
            with no_interception():
                return func(*args)
        return call(func, args, kwargs)

    def borrow(self) -> Lent:
        """Its values, for one call."""
        return self.lender.lend(_slot(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        return memo.setdefault(id(self), copy.deepcopy(_as_made(self)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_made(self).__reduce_ex__(protocol)


def _borrowing(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that looks at values past `__torch_function__`, made to borrow them."""

    @wraps(method)
    def borrow_first(*args: Any, **kwargs: Any) -> Any:
        return call(method, args, kwargs)

    return borrow_first


def _slot(parameter: Tensor) -> Slot:
    slot = slot_of(parameter)  # type: ignore[arg-type]
    assert slot is not None
    return slot


def _as_made(parameter: RestingParameter) -> Parameter:
    """A parameter with its values and the class and attributes that the user gave it, to be copied from."""
    with torch.no_grad():
        made = Parameter(parameter.clone(), parameter.requires_grad)
    made.__class__ = _slot(parameter).plain_class
    vars(made).update(vars(parameter))
    return made


@final
class Interception:
    """Switches parameters between the class that the user gave them and the one that borrows their values."""

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self._classes: dict[type[Parameter], type[Parameter]] = {}  # plain -> resting

    def show(self, group: ShardGroup) -> None:
        """The parameters are plain ones; their values must be there."""
        for slot in group.slots:
            slot.parameter.__class__ = slot.plain_class

    def hide(self, group: ShardGroup) -> None:
        """The reverse of `show`."""
        for slot in group.slots:
            slot.parameter.__class__ = self._resting(slot.plain_class)

    def _resting(self, plain: type[Parameter]) -> type[Parameter]:
        """What the user gave the class (methods, `isinstance`) stays."""
        if plain not in self._classes:
            bases = (RestingParameter,) if plain is Parameter else (RestingParameter, plain)
            content: dict[str, Any] = {"lender": self._lender}
            if issubclass(plain, DTensor):
                content |= {name: _borrowing(getattr(DTensor, name)) for name in _METHODS_OF_DTENSOR}
                content["__slots__"] = ()  # another layout could not take the place of torch's
            self._classes[plain] = type(plain.__name__, bases, content)
        return self._classes[plain]


class AsDeclared(torch.autograd.Function):
    """A two-byte parameter as the user declared it; its gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, declared: Tensor) -> Tensor:
        return declared.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
