"""`LazyTensor`: stands in a checkpoint for a tensor whose values are elsewhere, spread over ranks or in a file.

It has shape and dtype, and can be deleted, renamed, moved or replaced like any entry of a `state_dict`. Whoever looks
at its values gets them (`Source.whole`). Code that knows it, the writer and the reader of checkpoints, takes only the
ranges it needs and never asks for the whole.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map

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
class LazyTensor(Tensor):
    """See the module's docstring."""

    source: Source

    @staticmethod
    def __new__(cls, source: Source) -> "LazyTensor":
        with torch.inference_mode(False):
            host = torch.device("cpu")
            self = torch.Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.dtype, device=host)
        self.source = source
        return self

    def __init__(self, source: Source) -> None:
        super().__init__()

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
            return LazyTensor(args[0].source)
        if func is Tensor.copy_ and _take(args[0], args[1]):
            return args[0]
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs or {}))


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
