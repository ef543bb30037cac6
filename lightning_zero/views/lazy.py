"""`LazyTensor`: stands in a checkpoint for a tensor whose values are spread over ranks or in a file.

It has shape and dtype, and can be deleted, renamed, moved or replaced like any entry of a `state_dict`. Reading it
brings all values (`Source.whole`), and edits in place are kept. The writer and the reader of checkpoints know it: they
take only the ranges that they need, and never ask for the whole.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zero.device import HOST
from lightning_zero.shards.extents import Extent
from lightning_zero.shards.local import Box, as_dtensor
from lightning_zero.tiers.array import LatePart
from lightning_zero.torch_private import make_wrapper, tree_map_only
from lightning_zero.views.intercept import Lent, call


@dataclass(eq=False)
class Source(ABC):
    """Where the values of a `LazyTensor` are."""

    name: str  # of the values, not of an entry in the checkpoint: two entries of one name hold the same tensor
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype

    @abstractmethod
    def whole(self) -> Tensor:
        """Returns all values, on the host, in storage of their own. May be a collective."""


class Range(NamedTuple):
    """Values to write: a flat tensor, and its extent in a tensor of the checkpoint."""

    extent: Extent
    values: Tensor | LatePart

    def read(self) -> Tensor:
        return self.values.read() if isinstance(self.values, LatePart) else self.values


class Spread(Source):
    """Values that are spread over the ranks of an engine."""

    @abstractmethod
    def pieces(self) -> list[Range]:
        """Returns what this rank writes. The pieces of all ranks tile the tensor."""


@final
class OfOneRank(Spread):
    """A small tensor that this rank alone writes, such as its random state, or optimizer state that is not cut as its
    parameter is."""

    def __init__(self, name: str, values: Tensor) -> None:
        super().__init__(name, tuple(values.shape), values.dtype)
        self._values = values

    def whole(self) -> Tensor:
        return self._values.to("cpu", copy=True)

    def pieces(self) -> list[Range]:
        return [Range(Extent.of_whole(self.name, self.shape), self._values.reshape(-1))]


class Stored(Source):
    """Values that are in a file."""

    @abstractmethod
    def read(self, extent: Extent, into: Tensor) -> None:
        """Reads one range of the values into a flat tensor of any dtype and device."""

    def for_shard(self, extent: Extent, into: Tensor) -> None:
        """Reads what this rank keeps of a parameter that all ranks load."""
        self.read(extent, into)

    def for_loading(self, target: Tensor) -> Tensor:
        """Returns the values for `target`, which all ranks load: all of them, or this rank's part as a `DTensor` if
        `target` is one."""
        if not isinstance(target, DTensor):
            return self.whole()
        box = Box.of(target)
        part = torch.empty(box.shape, dtype=self.dtype, device=HOST)
        self.read(box.extent(self.name), part.view(-1))
        return as_dtensor(part, target)


@final
class Partial(dict[Any, Any]):
    """A dictionary of which each rank has some items, such as the state of an optimizer. The writer merges what ranks
    have under one `name`."""

    def __init__(self, name: str, items: Mapping[Any, Any]) -> None:
        super().__init__(items)
        self.name = name


@final
class _Edited(Source):
    """Values that users have edited, or may edit through a view that they hold."""

    def __init__(self, name: str, values: Tensor) -> None:
        super().__init__(name, tuple(values.shape), values.dtype)
        self.values = values

    def whole(self) -> Tensor:
        return self.values.detach().clone()


# What a tensor on the host answers, where its values will be.
_ON_HOST = {
    **{getattr(Tensor, name).__get__: told for name, told in (("device", HOST), ("is_cpu", True), ("is_meta", False))},
    Tensor.get_device: -1,
}


@final
class LazyTensor(Tensor):
    """See the module's docstring."""

    _held: list[Source]  # one source, in a list that the results of `detach` share: they are the same tensor

    @staticmethod
    def __new__(cls, source: Source) -> "LazyTensor":
        with torch.inference_mode(False):
            # torch refuses to assign a tensor of this device to the `p.data` of a plain parameter. Of another one it
            # would assign the memory, which is not there: whatever reads `p` next would end the process.
            self = make_wrapper(cls, source.shape, dtype=source.dtype, device=torch.device("meta"))
        self._held = [source]
        return self

    @property
    def source(self) -> Source:
        return self._held[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor({self.source.name!r}, shape={self.source.shape}, dtype={self.source.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.source.whole().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.source.whole()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.detach:
            alias = LazyTensor(args[0].source)
            alias._held = args[0]._held
            return alias
        if func in _ON_HOST:
            return _ON_HOST[func]
        if func is Tensor.copy_ and (stored := stored_in(args[1])):
            values = stored.for_loading(args[0])
            if isinstance(args[0], DTensor) and not isinstance(values, DTensor):
                values = as_dtensor(Box.of(args[0]).part(values), args[0])
            return args[0].copy_(values)
        return call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call(func, args, kwargs)

    def borrow(self) -> Lent:
        with torch.inference_mode(False):  # inference tensors have no version
            values = self.source.values if isinstance(self.source, _Edited) else self.source.whole()
            return Lent(self, values, _end)


def _end(loan: Lent, result: Any) -> None:
    """Keeps values in memory that a call has edited, or has returned a view of, in place of the source: hooks may edit
    the checkpoint that they are given."""
    if not (loan.is_edited or loan.is_visible_in(result)):
        return
    tensor, values = loan.tensor, loan.values
    assert isinstance(tensor, LazyTensor)
    if (values.shape, values.dtype) != (tensor.shape, tensor.dtype):
        raise RuntimeError(
            f"{tensor} has another shape or dtype now, which cannot be done in place. Put a new tensor into the "
            "checkpoint: state_dict[name] = ..."
        )
    tensor._held[0] = _Edited(tensor.source.name, values)


def stored_in(value: Any) -> Stored | None:
    """Returns the source of a lazy tensor whose values are in a file; None for anything else."""
    return value.source if isinstance(value, LazyTensor) and isinstance(value.source, Stored) else None


def values_of(tensor: Tensor) -> Tensor:
    """Returns the values of a lazy tensor; anything else unchanged."""
    return tensor.source.whole() if isinstance(tensor, LazyTensor) else tensor


def materialize(tree: Any) -> Any:
    """Returns the same containers, with the values of the lazy tensors in them."""
    return tree_map_only(LazyTensor, values_of, tree)
