"""What autograd saves of gathered parameters: their place in a group, not a view of storage that is emptied behind it.

The gradients of a unit's outputs announce its backward, and it is gathered then. But a graph may come back to a unit's
operations by another way: an auxiliary loss that a block leaves on itself, an output of a kind nobody looks into. So
around the forward of a unit a pair of saved-tensor hooks notes where a saved tensor lies, and gathers the group when
autograd asks for the values.

Hooks do not stack in torch: only the innermost pair is called. Ours hand on what is not a parameter to the pair that
was there before, so that activation checkpointing and offloading around a unit work as ever.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.group import ShardGroup

_hooks_are_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_no_interception = torch._C.DisableTorchFunctionSubclass


class _Place(NamedTuple):
    """A view of a group's full_param, and the state of the parameter that it shows."""

    group: ShardGroup
    parameter: Parameter
    version: int
    shard: Tensor  # the group's owned_param then
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements of `dtype`


class _Saved(NamedTuple):
    """Any other tensor."""

    tensor: Tensor
    version: int


@final
class SavedParameters:
    """The pairs of hooks that are in place, innermost last.

    Args:
        storages: which group a storage belongs to; see `Setting`.
    """

    def __init__(self, storages: dict[int, ShardGroup]) -> None:
        self._storages = storages
        self._pushed: list[bool] = []

    def push(self) -> bool:
        """Notes places until `pop`; False where torch allows no hooks (inside `torch.func` transforms)."""
        allowed = _hooks_are_allowed()
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False) if allowed else None
        needed = allowed and not (outer is not None and isinstance(outer[0], _Pack))
        if needed:
            pack, unpack = outer or (_keep, _give_back)
            torch._C._autograd._push_saved_tensors_default_hooks(_Pack(self._storages, pack), _Unpack(unpack))
        self._pushed.append(needed)
        return allowed

    def pop(self) -> None:
        if self._pushed.pop():
            torch._C._autograd._pop_saved_tensors_default_hooks()


@final
class _Pack:
    def __init__(self, storages: dict[int, ShardGroup], otherwise: Callable[[Tensor], Any]) -> None:
        self._storages = storages
        self._otherwise = otherwise

    def __call__(self, tensor: Tensor) -> Any:
        with _no_interception():
            place = self._place_of(tensor)
        return self._otherwise(tensor) if place is None else place

    def _place_of(self, tensor: Tensor) -> _Place | None:
        if not (type(tensor) is Tensor or isinstance(tensor, Parameter)) or tensor.layout != torch.strided:
            return None
        group = self._storages.get(tensor.untyped_storage()._cdata)
        if group is None or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            return None
        offset = int(tensor.storage_offset())
        parameter = group.parameters[group.layout.index_at(offset * tensor.itemsize // group.full_param.itemsize)]
        state = (parameter, parameter._version, group.owned_param)
        return _Place(group, *state, tensor.dtype, tensor.shape, tuple(tensor.stride()), offset)


@final
class _Unpack:
    def __init__(self, otherwise: Callable[[Any], Tensor]) -> None:
        self._otherwise = otherwise

    def __call__(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Place):
            return self._otherwise(saved)
        with _no_interception():
            _check_version(saved.parameter, saved.version)
        if saved.shard is saved.group.owned_param:
            saved.group.gather()
            full = saved.group.full_param
        else:
            full = saved.group.gather_saved(saved.shard)
        return full.view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)


def _keep(tensor: Tensor) -> Any:
    # Detached: a graph that holds its own output would never be freed.
    return _Saved(tensor.detach(), 0 if tensor.is_inference() else tensor._version)


def _give_back(saved: _Saved) -> Tensor:
    if not saved.tensor.is_inference():
        _check_version(saved.tensor, saved.version)
    return saved.tensor


def _check_version(tensor: Tensor, version: int) -> None:
    """Torch leaves this check to the hooks, where there are any."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead."
        )
