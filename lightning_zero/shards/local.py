"""`Local`: this rank's part of a parameter, which is all of it unless tensor-parallel ranks share it.

torch's tensor parallelism makes a parameter a `DTensor`: an object of the whole shape that holds this rank's values, a
plain tensor. Groups, gradients and pieces see that, through `Local`. Only this module knows how a
`DTensor` shows them to the user.

    whole    (8, 6)           what the user sees as `p.shape`, and what checkpoints hold
    local    (4, 6)           this rank's rows, for Shard(0) over two ranks: what is packed, reduced and stepped
    box      rows 4 to 8      where they are in the whole
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Module, Parameter

from lightning_zero.device import point_at
from lightning_zero.distributed_private import layout_of, local_tensor, set_local_tensor
from lightning_zero.shards.extents import Extent
from lightning_zero.wire.comm import Comm


class Box(NamedTuple):
    """The place of this rank's part in a whole tensor."""

    whole: tuple[int, ...]  # shape of the whole tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]  # of the part

    @classmethod
    def of(cls, tensor: Tensor) -> "Box":
        """Returns the place of this rank's part of `tensor`: all of it, unless it is a `DTensor` on one axis."""
        whole = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(whole, (0,) * len(whole), whole)
        shape, dim = tuple(local_tensor(tensor).shape), _dim_of(tensor)
        at = tensor.device_mesh.get_local_rank()
        return cls(whole, tuple(at * size if own == dim else 0 for own, size in enumerate(shape)), shape)

    def extent(self, name: str, start: int = 0, stop: int | None = None) -> Extent:
        """Returns elements ``[start, stop)`` of the part; all of them by default."""
        stop = math.prod(self.shape) if stop is None else stop
        return Extent(name=name, shape=self.whole, box_offset=self.offset, box_shape=self.shape, start=start, stop=stop)

    def part(self, whole: Tensor) -> Tensor:
        """Returns this rank's part, a view, of a tensor that has the whole shape."""
        if isinstance(whole, DTensor):
            return local_tensor(whole)
        for dim, (start, length) in enumerate(zip(self.offset, self.shape, strict=True)):
            whole = whole.narrow(dim, start, length)
        return whole


@final
class Local:
    """This rank's part of one of the user's parameters; `comm` are the tensor-parallel ranks."""

    def __init__(self, parameter: Parameter, comm: Comm) -> None:
        self.parameter = parameter
        self.box = Box.of(parameter)
        self._comm = comm
        self._dim = _dim_of(parameter) if isinstance(parameter, DTensor) else None
        self._strides = self.values.stride()  # as the user made it; at rest the values are in C order
        self._stand_in: Parameter | None = None  # for a DTensor, see `stepped`
        self.nothing: Tensor | None = None  # what it points at without values, made once

    @property
    def is_divided(self) -> bool:
        """Whether tensor-parallel ranks hold different values."""
        return self._dim is not None and self._comm.size > 1

    @property
    def values(self) -> Tensor:
        """The values that this rank holds."""
        return local_of(self.parameter)

    @values.setter
    def values(self, values: Tensor) -> None:
        parameter = self.parameter
        if not isinstance(parameter, DTensor):
            point_at(parameter, values)
            return
        set_local_tensor(parameter, values)
        is_alike = values.numel() and values.dtype == parameter.dtype
        if is_alike and values.storage_offset() != parameter.storage_offset():
            point_at(parameter, as_dtensor(values, parameter))  # torch.compile fails where the offsets differ

    def read_grad(self) -> Tensor | None:
        """Returns the gradient of `values`. Collective among tensor-parallel ranks, where each has a share of a sum."""
        grad = self.parameter.grad
        if not isinstance(grad, DTensor):
            return grad
        assert isinstance(self.parameter, DTensor)
        if grad.placements != self.parameter.placements:
            # Sequence parallelism leaves each rank its share of the gradient of a norm's weight.
            grad = grad.redistribute(placements=self.parameter.placements)
        return local_tensor(grad)

    def set_grad(self, grad: Tensor | None) -> None:
        """Sets `p.grad` to a gradient of `values`."""
        if grad is not None and isinstance(self.parameter, DTensor):
            grad = as_dtensor(grad, self.parameter)
        self.parameter.grad = grad

    @property
    def stepped(self) -> Parameter:
        """The parameter that optimizers step. For a `DTensor` it is a plain stand-in: a piece is a plain tensor, and
        torch's optimizers cannot step DTensors and plain tensors together."""
        if not isinstance(self.parameter, DTensor):
            return self.parameter
        if self._stand_in is None:
            # `data` has a count of edits of its own; that of a view is one with those of all others in its group.
            self._stand_in = Parameter(self.values.data, requires_grad=self.parameter.requires_grad)
        return self._stand_in

    def copied(self, values: Tensor, device: torch.device) -> Tensor:
        """Returns a copy of these `values` of the parameter, in storage of its own and in the user's memory format."""
        made = torch.empty_strided(self.box.shape, self._strides, dtype=values.dtype, device=device)
        return made.copy_(values)

    def gathered(self, local: Tensor) -> Tensor:
        """Returns the whole of a tensor that is divided as the parameter is. Collective among tensor-parallel ranks."""
        if not self.is_divided:
            return local
        own = local.detach().to(self.parameter.device).contiguous().view(-1)  # collectives work on that device
        rows = own.new_empty(self._comm.size, own.numel())
        self._comm.all_gather(rows, own, "tensor-parallel parts").wait()
        assert self._dim is not None
        return torch.cat([row.view(local.shape) for row in rows], self._dim)


def _dim_of(tensor: DTensor) -> int | None:
    """Returns the dimension that is divided over the ranks of its one axis."""
    (placement,) = tensor.placements
    return placement.dim if isinstance(placement, Shard) else None


def as_dtensor(local: Tensor, like: DTensor) -> DTensor:
    """Returns a `DTensor` that is divided as `like` is, and of which this rank holds `local`."""
    layout = layout_of(like)
    layout = replace(layout, tensor_meta=layout.tensor_meta._replace(dtype=local.dtype))
    with torch.inference_mode(False):  # not `from_local`: it reads the values, and would gather a sharded gradient
        return DTensor(local, layout, requires_grad=False)


def whole_of(tensor: Any) -> Any:
    """Returns the whole of a `DTensor`, a collective of the ranks that share it; returns anything else unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_of(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def shares_modules(module: Module) -> bool:
    """Whether tensor-parallel ranks share any parameter of a module."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def refuse_other_meshes(name: str, parameter: Tensor, ranks: Sequence[int]) -> None:
    """Raises ValueError for a `DTensor` that is not cut evenly, on one axis, over these tensor-parallel ranks."""
    if not isinstance(parameter, DTensor):
        return
    mesh = parameter.device_mesh
    told = f"Parameter {name!r} is a DTensor"
    if mesh.ndim != 1 or mesh.mesh.tolist() != list(ranks):
        raise ValueError(
            f"{told} on {mesh} of ranks {mesh.mesh.tolist()}, and ranks {list(ranks)} share modules here "
            f"(tensor_parallel_size={len(ranks)}). Parallelize with self.device_mesh['tensor_parallel']; what "
            "data-parallel ranks divide among them is ZeroStrategy's part (no fully_shard)."
        )
    (placement,) = parameter.placements
    if type(placement) not in (Shard, Replicate):
        raise ValueError(f"{told} with placement {placement}. Make it Shard or Replicate.")
    if isinstance(placement, Shard) and parameter.shape[placement.dim] % len(ranks):
        raise ValueError(
            f"{told} of shape {tuple(parameter.shape)}, whose dimension {placement.dim} cannot be divided evenly among "
            f"{len(ranks)} tensor-parallel ranks. Choose a size that can, or leave this module out of the plan."
        )
