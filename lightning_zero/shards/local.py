"""What this rank has of a parameter: all of it, or where tensor-parallel ranks share it, its part.

A parameter of torch's tensor parallelism is a `DTensor`: an object of the whole shape that holds this rank's values in
`_local_tensor`. Everything below looks at it through `Local`, so that groups, gradients and pieces are plain tensors,
and only this module knows what shows them to the user.

    whole    (8, 6)           what the user sees as `p.shape`, and what checkpoints hold
    local    (4, 6)           this rank's rows, for Shard(0) over two ranks: what is packed, reduced and stepped
    box      rows 4 to 8      where they are in the whole
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn import Parameter

from lightning_zero.shards.extents import Extent
from lightning_zero.wire.comm import Comm


class Box(NamedTuple):
    """Which part of a whole tensor is here."""

    whole: tuple[int, ...]  # its shape
    offset: tuple[int, ...]
    shape: tuple[int, ...]  # of the part

    @classmethod
    def of(cls, tensor: Tensor) -> "Box":
        """Where what this rank has of a tensor lies: all of it, unless it is a `DTensor` on one axis."""
        whole = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(whole, (0,) * len(whole), whole)
        shape, dim = tuple(tensor._local_tensor.shape), _dim_of(tensor)
        at = tensor.device_mesh.get_local_rank()
        return cls(whole, tuple(at * size if own == dim else 0 for own, size in enumerate(shape)), shape)

    def extent(self, name: str, start: int = 0, stop: int | None = None) -> Extent:
        """Elements ``[start, stop)`` of the part; all of them by default."""
        stop = math.prod(self.shape) if stop is None else stop
        return Extent(name=name, shape=self.whole, box_offset=self.offset, box_shape=self.shape, start=start, stop=stop)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's of something of the whole shape, a view."""
        if isinstance(whole, DTensor):
            return whole._local_tensor
        for dim, (start, length) in enumerate(zip(self.offset, self.shape, strict=True)):
            whole = whole.narrow(dim, start, length)
        return whole


class Local(ABC):
    """One of the user's parameters, as this rank has it."""

    is_divided: bool  # tensor-parallel ranks hold different values

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self.box = Box.of(parameter)

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """What it holds here."""

    @values.setter
    @abstractmethod
    def values(self, values: Tensor) -> None: ...

    @property
    @abstractmethod
    def grad(self) -> Tensor | None:
        """Of the values, summed over tensor-parallel ranks where each has a share of it: that is a collective of
        theirs."""

    @grad.setter
    @abstractmethod
    def grad(self, grad: Tensor | None) -> None: ...

    @property
    @abstractmethod
    def stepped(self) -> Parameter:
        """What optimizers are given of it."""

    @abstractmethod
    def gathered(self, local: Tensor) -> Tensor:
        """The whole of something that is cut as the parameter is. A collective of tensor-parallel ranks."""


@final
class Plain(Local):
    """A parameter of torch's own kind."""

    is_divided = False

    @property
    def values(self) -> Tensor:
        return self.parameter

    @values.setter
    def values(self, values: Tensor) -> None:
        self.parameter.data = values

    @property
    def grad(self) -> Tensor | None:
        return self.parameter.grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        self.parameter.grad = grad

    @property
    def stepped(self) -> Parameter:
        return self.parameter

    def gathered(self, local: Tensor) -> Tensor:
        return local


@final
class TensorParallel(Local):
    """A `DTensor` over the tensor-parallel ranks of `comm`."""

    parameter: DTensor  # type: ignore[assignment]  # torch makes parameters of them without another class

    def __init__(self, parameter: DTensor, comm: Comm) -> None:
        super().__init__(parameter)  # type: ignore[arg-type]
        self._comm = comm
        self._dim = _dim_of(parameter)
        self.is_divided = self._dim is not None and comm.size > 1
        self._stepped: Parameter | None = None

    @property
    def values(self) -> Tensor:
        return self.parameter._local_tensor

    @values.setter
    def values(self, values: Tensor) -> None:
        self.parameter._local_tensor = values

    @property
    def grad(self) -> Tensor | None:
        grad = self.parameter.grad
        if grad is None:
            return None
        assert isinstance(grad, DTensor)  # torch lets nothing else be put there
        if grad.placements != self.parameter.placements:
            # What torch leaves of the norms of sequence parallelism: each rank's share of a sum.
            grad = grad.redistribute(placements=self.parameter.placements)
        return grad._local_tensor

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        self.parameter.grad = None if grad is None else as_dtensor(grad, self.parameter)

    @property
    def stepped(self) -> Parameter:
        """A stand-in: torch's optimizers cannot step DTensors and plain tensors together, and a piece is none."""
        if self._stepped is None:
            self._stepped = Parameter(self.values.detach(), requires_grad=self.parameter.requires_grad)
        return self._stepped

    def gathered(self, local: Tensor) -> Tensor:
        if not self.is_divided:
            return local
        own = local.detach().to(self.parameter.device).contiguous().view(-1)  # where collectives find it
        rows = own.new_empty(self._comm.size, own.numel())
        self._comm.all_gather(rows, own, "tensor-parallel parts").wait()
        assert self._dim is not None
        return torch.cat([row.view(local.shape) for row in rows], self._dim)


def _dim_of(tensor: DTensor) -> int | None:
    """The dimension that is divided over the ranks of its one axis."""
    (placement,) = tensor.placements
    return placement.dim if isinstance(placement, Shard) else None


def as_dtensor(local: Tensor, like: DTensor) -> DTensor:
    """A `DTensor` of which this rank has `local`, and which is divided as another one."""
    meta = like._spec.tensor_meta
    assert meta is not None
    spec = DTensorSpec(like._spec.mesh, like._spec.placements, TensorMeta(meta.shape, meta.stride, local.dtype))
    with torch.inference_mode(False):  # not `from_local`, which looks at values, and those of gradients are elsewhere
        return DTensor(local, spec, requires_grad=False)


def whole_of(tensor: Any) -> Any:
    """A tensor that ranks have parts of, put together; anything else as it is. A collective of theirs."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_of(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def make_local(parameter: Parameter, comm: Comm) -> Local:
    return TensorParallel(parameter, comm) if isinstance(parameter, DTensor) else Plain(parameter)


def refuse_other_meshes(name: str, parameter: Tensor, ranks: Sequence[int]) -> None:
    """Raises ValueError for a `DTensor` that is not cut evenly, on one axis, over these tensor-parallel ranks."""
    if not isinstance(parameter, DTensor):
        return
    mesh, placements = parameter.device_mesh, parameter.placements
    told = f"Parameter {name!r} is a DTensor"
    if mesh.ndim != 1 or mesh.mesh.tolist() != list(ranks):
        raise ValueError(
            f"{told} on {mesh} of ranks {mesh.mesh.tolist()}, and ranks {list(ranks)} share modules here "
            f"(tensor_parallel_size={len(ranks)}). Parallelize with self.device_mesh['tensor_parallel']; what "
            "data-parallel ranks divide among them is ZeroStrategy's part (no fully_shard)."
        )
    (placement,) = placements
    if type(placement) not in (Shard, Replicate):
        raise ValueError(f"{told} with placement {placement}. Make it Shard or Replicate.")
    if isinstance(placement, Shard) and parameter.shape[placement.dim] % len(ranks):
        raise ValueError(
            f"{told} of shape {tuple(parameter.shape)}, whose dimension {placement.dim} cannot be divided evenly among "
            f"{len(ranks)} tensor-parallel ranks. Choose a size that can, or leave this module out of the plan."
        )
