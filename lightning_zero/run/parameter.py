"""`RestingParameter`: a parameter while its values are not there; reading it gathers them.

Between uses at stage 3 a parameter has no values, and a weight that rests in two bytes is not what the user declared.
For that time the object's class is a `RestingParameter`. The object stays the same, so optimizers and modules notice
nothing. Anything but a question about metadata borrows the values first. Calls of the unit's modules take a faster way.
This one makes tied heads, `F.linear(x, self.emb.weight)`, parameters of the LightningModule itself, `print`, `deepcopy`
and `torch.save` work without a wrapping policy.

From the end of backward until ranks have agreed on which parameters were used, all that train are of this class:
reading `p.grad` of one makes the ranks agree.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.slot import Slot, no_interception, slot_of
from lightning_zero.torch_private import FOREACH_IN_PLACE, UNVERSIONED, tree_iter
from lightning_zero.views.intercept import (
    METADATA,
    METHODS_OF_DTENSOR,
    SET_DATA,
    STRIDES,
    UNWATCHED,
    Lent,
    asks_for_dtype,
    call,
    subclass_of,
)
from lightning_zero.views.lazy import stored_in, values_of

if TYPE_CHECKING:
    from lightning_zero.run.loans import Loans

_DIFFERENTIATE = {torch.autograd.grad, torch.autograd.backward}
_GRADIENT = {getattr(Tensor.grad, name) for name in ("__get__", "__set__")}
_EDITS_UNSEEN = UNWATCHED | UNVERSIONED | FOREACH_IN_PLACE  # these of a DTensor, or what is edited through them
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class _Intercepting(Parameter):
    """Never instantiated: `Interception` makes subclasses, which have a lender."""

    lender: ClassVar["Loans"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        return copy.deepcopy(_as_made(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_made(self).__reduce_ex__(protocol)


class WatchedParameter(_Intercepting):
    """A parameter that has its values, whose masters are elsewhere: in another tier, or the shards of a unit in use.
    Edits reach them only if they are noticed. Those through `p.data` do not raise a version, so its lender is told of
    each look at it."""

    @property
    def data(self) -> Tensor:
        self.lender.watch(_slot(self).group)
        return _GET_DATA(self)

    @data.setter
    def data(self, values: Tensor) -> None:
        SET_DATA(self, values_of(values))


class WatchedDTensor(_Intercepting):
    """As `WatchedParameter`, for a DTensor. More than `p.data` edits one unseen: its version is not that of the local
    tensor, and torch's own functions that edit lists raise neither. Other calls must not cost anything: a look at
    values is told before the call, and never while a graph is made or `torch.compile` traces, as the weights that a
    module reads in its forward are no edit."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DIFFERENTIATE:
            return _differentiate(func, *args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            if func in _EDITS_UNSEEN:
                for value in tree_iter((args, kwargs)):
                    if isinstance(value, WatchedDTensor) and (slot := slot_of(value)) is not None:
                        cls.lender.watch(slot.group)
            if any(hasattr(kind, "borrow") for kind in types):
                return NotImplemented  # beside it is a tensor without values, whose class brings them
        with no_interception():
            return func(*args, **(kwargs or {}))


class RestingParameter(_Intercepting):
    """See the module's docstring."""

    @classmethod
    @torch.compiler.disable  # what brings values has effects, and is no part of a graph of the user's
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GRADIENT:
            cls.lender.settle_gradients()
        if func in _DIFFERENTIATE:
            return _differentiate(func, *args, **(kwargs or {}))
        if func in METADATA:
            with no_interception():
                return func(*args, **(kwargs or {}))
        if func in STRIDES:
            return func(torch.empty(args[0].shape, device="meta"), *args[1:], **(kwargs or {}))
        if asks_for_dtype(func):
            return _slot(args[0]).group.kind.shown
        if func is Tensor.copy_ and (stored := stored_in(args[1])) and args[0].shape == stored.shape:
            args[0].lender.load(_slot(args[0]), stored)
            return args[0]
        if func == SET_DATA and isinstance(args[0], RestingParameter):
            if isinstance(args[0], DTensor):
                return None  # as torch: what is assigned to the `p.data` of one changes no value
            slot, values = _slot(args[0]), values_of(args[1])
            slot.check_assigned(values, slot.group.kind.shown)
            with torch.no_grad():
                if slot.group.kind.upcasts:
                    cls.lender.assign(slot, values.clone())
                    return None
                values = values.clone() if cls.lender.is_lent(values) else values
                call(_GET_DATA, (args[0],), None)  # lends values until the boundary, which adopts the assigned ones
            with no_interception():
                return func(args[0], values)
        return call(func, args, kwargs)

    def set_(self, *source: Any) -> Tensor:
        """torch intercepts no call of it; `torch.nn.utils.parametrize` gives weights their values by it."""
        self.data = torch.empty(0, dtype=self.dtype, device=self.device).set_(*source)
        return self

    def borrow(self) -> Lent:
        return self.lender.lend(_slot(self))


def _differentiate(
    func: Callable[..., Any], roots: Sequence[Any], inputs: Sequence[Any] | None = None, **options: Any
) -> Any:
    """Calls `torch.autograd.grad` or `backward` with nodes of the graph in place of parameters, which only name these.
    Given the parameters, it would go past interception in all that hooks and recomputed blocks do meanwhile."""
    given = inputs or ()
    named = [one for one in given if isinstance(one, _Intercepting)]
    if any(isinstance(root, _Intercepting) for root in roots) or not all(one.requires_grad for one in named):
        with no_interception():
            return func(roots, inputs=inputs, **options)
    with no_interception():
        nodes = [get_gradient_edge(one) if isinstance(one, _Intercepting) else one for one in given]
    fills = options.pop("materialize_grads", False)  # torch cannot for a node
    found = func(roots, inputs=nodes, **options)
    if not fills:
        return found
    return tuple(
        torch.zeros_like(one, requires_grad=options["create_graph"]) if grad is None else grad
        for one, grad in zip(given, found, strict=True)
    )


def _borrowing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method borrow values, where it would read them past `__torch_function__`."""

    @wraps(method)
    def borrow_first(*args: Any, **kwargs: Any) -> Any:
        return call(method, args, kwargs)

    return borrow_first


def _told(method: Callable[..., Any]) -> Callable[..., Any]:
    """Has a method of a DTensor tell of a look at values, unless a graph is made of them: what that edits in place, the
    version of the local tensor tells."""

    @wraps(method)
    def tell_first(self: WatchedDTensor, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            self.lender.watch(_slot(self).group)
        return method(self, *args, **kwargs)

    return tell_first


def _slot(parameter: Tensor) -> Slot:
    slot = slot_of(parameter)  # type: ignore[arg-type]
    assert slot is not None
    return slot


def _as_made(parameter: _Intercepting) -> Parameter:
    """Makes a parameter with the values, and the class and attributes that the user gave this one, to be copied."""
    with torch.no_grad():
        made = Parameter(parameter.clone(), parameter.requires_grad)
    made.__class__ = _slot(parameter).plain_class
    vars(made).update(vars(parameter))
    return made


@final
class Interception:
    """Switches parameters between the class that the user gave them and the one that borrows their values.

    `find_lender` returns from whom. It is called once there are parameters to hide, which is after all is made: what
    lends values gathers them, and so is made of what shows and hides them.
    """

    def __init__(self, find_lender: Callable[[], "Loans"]) -> None:
        self._find_lender = find_lender
        self._classes: dict[tuple[type[Parameter], bool], type[Parameter]] = {}  # of a plain one, whether it rests

    @property
    def lender(self) -> "Loans":
        return self._find_lender()

    def begin(self, group: ShardGroup) -> None:
        """Shows or hides the parameters, as they rest."""
        if group.is_plain:
            self.show(group)
        else:
            self.hide(group)

    def show(self, group: ShardGroup) -> None:
        """Makes the parameters plain ones, or watched. Their values must be there."""
        if group.is_apart or not group.stays_full:  # a unit's masters are other memory than what is gathered
            self._put_class(group, rests=False)
        else:
            leave(group)

    def hide(self, group: ShardGroup) -> None:
        """Makes the parameters borrow their values, until `show`."""
        self._put_class(group, rests=True)

    def _put_class(self, group: ShardGroup, *, rests: bool) -> None:
        """Gives parameters the class of those that rest, or are watched. Done for each use of a unit."""
        for slot in group.slots:
            made = self._classes.get((slot.plain_class, rests))
            slot.parameter.__class__ = self._make_class(slot.plain_class, rests=rests) if made is None else made

    def _make_class(self, plain: type[Parameter], *, rests: bool) -> type[Parameter]:
        if not issubclass(plain, DTensor):
            made = subclass_of(plain, RestingParameter if rests else WatchedParameter, lender=self.lender)
        elif rests:
            reading = METHODS_OF_DTENSOR | {"__repr__": DTensor.__repr__}
            made = self._of_dtensor(plain, RestingParameter, _borrowing, reading)
        else:
            made = self._of_dtensor(plain, WatchedDTensor, _told, METHODS_OF_DTENSOR)
        self._classes[plain, rests] = made
        return made

    def _of_dtensor(
        self,
        plain: type[Parameter],
        base: type[Parameter],
        around: Callable[[Callable[..., Any]], Callable[..., Any]],
        methods: Mapping[str, Callable[..., Any]],
    ) -> type[Parameter]:
        """Makes a class for a DTensor, with something `around` the methods that it does not intercept."""

        def unflatten(*parts: Any) -> Any:
            """Makes what stands for such a parameter when `torch.compile` traces. It must be of the same class."""
            made = plain.__tensor_unflatten__(*parts)  # type: ignore[attr-defined]  # a DTensor has it
            made.__class__ = watching
            return made

        content: dict[str, Any] = {name: around(method) for name, method in methods.items()}
        content["__tensor_unflatten__"] = staticmethod(unflatten)
        content["__slots__"] = ()  # another layout could not take the place of torch's
        watching = subclass_of(plain, base, lender=self.lender, **content)
        return watching


def leave(group: ShardGroup) -> None:
    """Makes the parameters of a group plain ones for good."""
    for slot in group.slots:
        slot.parameter.__class__ = slot.plain_class


class AsDeclared(torch.autograd.Function):
    """Shows a two-byte parameter in the dtype that the user declared. Its gradient is the parameter's."""

    generate_vmap_rule = True  # and a `setup_context`: transforms of torch.func take no function without

    @staticmethod
    def forward(parameter: Tensor, declared: Tensor) -> Tensor:
        return declared.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
