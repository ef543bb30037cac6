"""What a parameter shows while its values are not there: reading one gathers; nobody meets empty storage.

Between uses at stage 3 a parameter's storage is empty, and a weight that rests in two bytes is not what the user
declared. For that time the object's class is `RestingParameter` (the object stays the same, so optimizers and
modules notice nothing). Anything but a question about metadata borrows the values first. Unit hooks are the fast
path; this is the one that makes tied heads, `F.linear(x, self.emb.weight)`, parameters of the LightningModule
itself, `print`, `deepcopy` and `torch.save` work without a wrapping policy.
"""

import copy
import functools
import types
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.group import ShardGroup
from lightning_zero.lazy import METADATA, LazyTensor

_no_interception = torch._C.DisableTorchFunctionSubclass

_BY_IDENTITY = {torch.autograd.grad, torch.autograd.backward}  # parameters name nodes of the graph here

_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


@final
class Access:
    """Shows and hides the values of one group's parameters, and lends them to whoever reads one in between.

    Args:
        group: whose parameters.
        borrowed: shared by all groups of an engine; a group that lends its values enters itself here, and the
            engine calls `take_back` at the next boundary (end of backward, before a step).
        as_declared: readers see the declared dtype where the parameters rest in another; False shows them as they
            rest, everywhere (``param_dtype``).
    """

    def __init__(self, group: ShardGroup, borrowed: "dict[Access, None]", *, as_declared: bool = True) -> None:
        self.group = group
        self.upcasts = group.kind.is_cast and as_declared
        self._borrowed = borrowed
        self._lent_master: Tensor | None = None  # (N * S,) declared dtype, while lent
        self._classes = [type(parameter) for parameter in group.parameters]  # Parameter, or a plain subclass of it
        self._versions: list[int] | None = None  # of the parameters when they were shown
        self.is_lost = False  # a rank failed: the values are spread over ranks that no longer answer
        for index, parameter in enumerate(group.parameters):
            _ACCESS[parameter] = (self, index)

    @property
    def dtype(self) -> torch.dtype:
        """Of the values that readers see."""
        return self.group.kind.declared if self.upcasts else self.group.kind.resting

    @property
    def is_needed(self) -> bool:
        """Whether these parameters ever rest as something else than what the user declared."""
        return self.group.partition.parameter or self.upcasts

    @property
    def lends_full_param(self) -> bool:
        """Whether somebody reads the group's own full_param, and not a copy in the declared dtype."""
        return not self.upcasts and self in self._borrowed

    @property
    def lends_copy(self) -> bool:
        """Whether somebody reads, and may have edited, a copy of the values in the declared dtype."""
        return self._lent_master is not None

    def plain_class(self, index: int) -> type[Parameter]:
        """What the user made parameter `index` an instance of."""
        return self._classes[index]

    def show(self) -> None:
        """The parameters are plain ones again; their values must be there."""
        for parameter, plain in zip(self.group.parameters, self._classes, strict=True):
            parameter.__class__ = plain
        if self._versions is None:
            self._versions = [parameter._version for parameter in self.group.parameters]

    def hide(self) -> None:
        """The reverse of `show`; keeps what a module's own forward has done to its weights (`clamp_`, `max_norm`)."""
        if not self.is_needed:
            return
        if self._edited_while_shown():
            self._keep_edits()
        self._versions = None
        for parameter, plain in zip(self.group.parameters, self._classes, strict=True):
            parameter.__class__ = _resting(plain)

    def _edited_while_shown(self) -> bool:
        if self._versions is None or self.group.is_released:
            return False
        with _no_interception():
            return any(
                parameter._version != version or parameter.data_ptr() != view.data_ptr()
                for parameter, view, version in zip(
                    self.group.parameters, self.group.views, self._versions, strict=True
                )
            )

    def _keep_edits(self) -> None:
        with torch.no_grad(), _no_interception():
            self.group.adopt_assigned()
            self.group.store_edits(self.group.full_param)

    def restore(self) -> None:
        """Leaves the parameters for good: plain again, whole, in their declared dtype, each in storage of its own.
        A collective where their values are spread."""
        whole = self.group.whole_values(copy=True)
        self.show()
        for parameter, values in zip(self.group.parameters, whole, strict=True):
            _ACCESS.pop(parameter, None)
            parameter.grad = None
            parameter.data = values
        self.group.free()

    def lend(self, index: int) -> Tensor:
        """Parameter `index` with its values, in its declared dtype, connected to autograd."""
        group = self.group
        if self.is_lost:
            raise RuntimeError(
                f"Parameter {group.layout.spans[index].name!r} cannot be read: training ended with an error, and its "
                "values are spread over the ranks. Load the latest checkpoint into a new model; to have one of the "
                "moment that a run fails, add Lightning's OnExceptionCheckpoint callback."
            )
        self._borrowed[self] = None
        parameter = group.parameters[index]
        if not self.upcasts:
            group.gather()
            self.show()
            return parameter
        if self._lent_master is None:
            self._lent_master = group.full_master()
        view = group.view_of(self._lent_master, index)
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return view
        with _no_interception():
            return _AsDeclared.apply(parameter, view)

    def give_up(self) -> None:
        """Ends the loan without looking for edits."""
        self._lent_master = None
        if self._borrowed.pop(self, ()) is None and not self.group.is_released:
            self._versions = None
            self.hide()
            self.group.abandon()

    def take_back(self) -> bool:
        """Ends the loan, keeps the edits that were made meanwhile, and says whether other ranks must hear of them.

        The storage is left to whoever still holds a view of what was lent.
        """
        group, lent = self.group, self._lent_master
        self._lent_master = None
        if lent is not None:
            group.show_edits(lent)
            return group.partition.optimizer and group.store(lent)
        if not group.is_released:
            self._keep_edits()
            self._versions = None
            self.hide()
            group.abandon()
        return False


class _AsDeclared(torch.autograd.Function):
    """A two-byte parameter as the user declared it; its gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, declared: Tensor) -> Tensor:
        return declared.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


_ACCESS = WeakIdKeyDictionary()  # Parameter -> (its Access, its index there)


class RestingParameter(Parameter):
    """The class of a parameter between uses; see the module's docstring. Never instantiated, and only `_resting`
    makes subclasses."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with _no_interception():
                return func(*args, **kwargs)
        if func == _DTYPE:  # slot wrappers are made anew at each look-up
            access, _ = _ACCESS[args[0]]
            return access.dtype
        if func is Tensor.copy_ and isinstance(args[1], LazyTensor):  # may only be noted; see `lazy.receiving`
            return NotImplemented
        if func == _SET_DATA and isinstance(args[0], RestingParameter):
            access, index = _ACCESS[args[0]]
            access.group.check_assigned(index, args[1], access.dtype)
            with torch.no_grad():
                return _lend(args[0]).copy_(args[1])
        if func in _BY_IDENTITY:
            with _no_interception():
                return func(*args, **kwargs)
        lent: dict[int, RestingParameter] = {}

        def lend(value: Any) -> Any:
            values = _lend(value)
            if values is not value:
                lent[id(values)] = value
            return values

        args, kwargs = tree_map(lend, args), tree_map(lend, kwargs)
        with _no_interception():
            result = func(*args, **kwargs)
        return lent.get(id(result), result)  # `weight *= 2` gives back the parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(_as_made(self))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_made(self).__reduce_ex__(protocol)


@functools.cache
def _resting(plain: type[Parameter]) -> type[Parameter]:
    """The class between uses of a parameter of class `plain`: what the user gave it (methods, `isinstance`) stays."""
    return RestingParameter if plain is Parameter else types.new_class(plain.__name__, (RestingParameter, plain))


def access_of(parameter: Parameter) -> Access:
    """The access to a parameter that some group holds."""
    access, _ = _ACCESS[parameter]
    return access


def _as_made(parameter: RestingParameter) -> Parameter:
    """A parameter with its values and the class and attributes that the user gave it, to be copied from."""
    access, index = _ACCESS[parameter]
    made = Parameter(access.lend(index).detach(), parameter.requires_grad)
    made.__class__ = access.plain_class(index)
    vars(made).update(vars(parameter))
    return made


def _lend(value: Any) -> Any:
    if not isinstance(value, RestingParameter):
        return value
    access, index = _ACCESS[value]
    return access.lend(index)
