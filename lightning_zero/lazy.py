"""`LazyTensor`: stands in a checkpoint for a tensor whose values are elsewhere, spread over ranks or in a file.

It has shape and dtype, and can be deleted, renamed, moved or replaced like any entry of a `state_dict`. Whoever looks
at its values gets them (`Source.whole`), and who edits them in place changes what counts. Code that knows it, the
writer and the reader of checkpoints, takes only the ranges it needs and never asks for the whole.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, final

import numpy
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_iter, tree_map

from lightning_zero.extents import Extent

_no_interception = torch._C.DisableTorchFunctionSubclass

# What can be asked of a tensor whose values are elsewhere without bringing them here.
METADATA = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            *(
                "shape",
                "device",
                "requires_grad",
                "grad",
                "grad_fn",
                "grad_dtype",
                "is_leaf",
                "ndim",
                "layout",
                "names",
            ),
            *("is_cuda", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_cpu", "is_nested", "retains_grad"),
            *("output_nr", "itemsize", "nbytes", "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "_base"),
        )
        if hasattr(Tensor, name)
    ),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad", "_backward_hooks")),
    *(
        getattr(Tensor, name)
        for name in (
            *("size", "dim", "numel", "nelement", "ndimension", "requires_grad_", "register_hook", "is_contiguous"),
            *("register_post_accumulate_grad_hook", "is_floating_point", "is_complex", "element_size", "__len__"),
            *("retain_grad", "stride", "storage_offset", "get_device", "is_inference"),
        )
    ),
}


def asks_for_metadata(func: Any) -> bool:
    """Whether a function of torch asks for what is known without the values, the dtype among it."""
    return func in METADATA or func == Tensor.dtype.__get__  # type: ignore[attr-defined]


class Source(ABC):
    """Where the values of a `LazyTensor` are.

    Args:
        name: of the values, not of the place in the checkpoint: two places of one name hold the same tensor.
        shape: of the whole tensor.
        dtype: of its values.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype

    @abstractmethod
    def whole(self) -> Tensor:
        """All values, on the host, in storage of their own. May be a collective."""


class Spread(Source):
    """Values that are spread over the ranks of an engine."""

    @abstractmethod
    def pieces(self) -> list[tuple[Extent, Tensor]]:
        """What this rank is to write: flat tensors, with the range of each. Over all ranks they tile the tensor."""


class Stored(Source):
    """Values that are in a file."""

    @abstractmethod
    def read(self, extent: Extent, into: Tensor) -> None:
        """Reads one range of the values into a flat tensor of any dtype and device."""


@final
class Partial(dict[Any, Any]):
    """A dictionary of which each rank has some of the items: the state of optimizers, whose parameters are spread.

    Args:
        name: the same on all ranks; the writer merges what they have under it.
        items: of this rank.
    """

    def __init__(self, name: str, items: Mapping[Any, Any]) -> None:
        super().__init__(items)
        self.name = name


@final
class _Edited(Source):
    """Values that users have edited, or may edit through a view that they were given."""

    def __init__(self, name: str, values: Tensor) -> None:
        super().__init__(name, tuple(values.shape), values.dtype)
        self.values = values

    def whole(self) -> Tensor:
        return self.values.detach().clone()


@final
class LazyTensor(Tensor):
    """See the module's docstring."""

    _held: list[Source]  # the one source; a list, because what `detach` gives is the same tensor

    @staticmethod
    def __new__(cls, source: Source) -> "LazyTensor":
        with torch.inference_mode(False):
            host = torch.device("cpu")
            self = torch.Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.dtype, device=host)
        self._held = [source]
        return self

    def __init__(self, source: Source) -> None:
        super().__init__()

    @property
    def source(self) -> Source:
        return self._held[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor({self.source.name!r}, shape={self.source.shape}, dtype={self.source.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.source.whole().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.source.whole())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if asks_for_metadata(func):
            with _no_interception():
                return func(*args, **kwargs)
        if func is Tensor.detach:
            alias = LazyTensor(args[0].source)
            alias._held = args[0]._held
            return alias
        if func is Tensor.copy_ and _take(args[0], args[1]):
            return args[0]
        return _run(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


class _Lent(NamedTuple):
    """The values of a lazy tensor, while a function has them."""

    tensor: LazyTensor
    values: Tensor
    version: int
    place: int

    @property
    def is_edited(self) -> bool:
        return self.values._version != self.version or self.values.data_ptr() != self.place

    def may_be_edited(self, result: Any) -> bool:
        """Whether they were, or whether a view of them is in `result`."""
        return self.is_edited or any(
            isinstance(item, numpy.ndarray) or (isinstance(item, Tensor) and _shares_memory(item, self.values))
            for item in tree_iter(result)
        )


def _run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `func` with values. If it edits them, or gives out a view through which they may be edited, they stay in
    memory and count from now on: hooks edit the checkpoint that they are given, as they would without us."""
    lent: dict[int, _Lent] = {}

    def lend(value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return value
        if id(value._held) not in lent:
            with torch.inference_mode(False):  # else there would be no version
                values = value.source.values if isinstance(value.source, _Edited) else value.source.whole()
            lent[id(value._held)] = _Lent(value, values, values._version, values.data_ptr())
        return lent[id(value._held)].values

    result = func(*tree_map(lend, args), **tree_map(lend, kwargs))
    for tensor, values, *_ in (it for it in lent.values() if it.may_be_edited(result)):
        if (values.shape, values.dtype) != (tensor.shape, tensor.dtype):
            raise RuntimeError(
                f"{tensor} has another shape or dtype now, which cannot be done in place. Put a new tensor into the "
                "checkpoint: state_dict[name] = ..."
            )
        tensor._held[0] = _Edited(tensor.source.name, values)
    return next((it.tensor for it in lent.values() if it.values is result and it.is_edited), result)


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    if isinstance(one, LazyTensor) or one.layout != torch.strided:
        return False
    return bool(one.numel()) and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _whole(value: Any) -> Any:
    return value.source.whole() if isinstance(value, LazyTensor) else value


def materialize(tree: Any) -> Any:
    """Containers with the values of the lazy tensors in them."""
    return tree_map(_whole, tree, is_leaf=lambda value: isinstance(value, LazyTensor))


_RECEIVER: ContextVar[Callable[[Parameter, Stored], None] | None] = ContextVar("receiver", default=None)


@contextmanager
def receiving(receiver: Callable[[Parameter, Stored], None] | None) -> Iterator[None]:
    """Inside, `parameter.copy_(lazy)` of stored values reads nothing: `receiver(parameter, source)` notes it instead.

    So `Module.load_state_dict`, with all that users do in its hooks, says what goes where, and each rank reads only the
    ranges it will own.
    """
    token = _RECEIVER.set(receiver)
    try:
        yield
    finally:
        _RECEIVER.reset(token)


def _take(target: Tensor, values: Any) -> bool:
    receiver = _RECEIVER.get()
    if receiver is None or not isinstance(target, Parameter) or not isinstance(values, LazyTensor):
        return False
    if not isinstance(values.source, Stored) or target.shape != values.shape:
        return False
    receiver(target, values.source)
    return True
