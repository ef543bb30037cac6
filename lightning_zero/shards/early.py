"""`EarlyParameter`: a parameter sharded before there is an engine. It is whole, or each rank keeps a row of its values.

Tensors (N ranks, the parameter's values in C order):

    whole    (numel,)            the parameter's own memory, as the user made it or as it was gathered
    row      (ceil(numel / N),)  what this rank keeps while the parameter has no values; the last rows may be shorter

A row is no part of a shard: groups are laid out only when there is an engine, and they cut parameters elsewhere. So
`ShardGroup` gathers one parameter after the other, and takes over its whole values.
"""

import math
from typing import final

import torch
from torch import DisableTorchFunctionSubclass as no_interception
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from lightning_zero.device import HOST, point_at
from lightning_zero.shards.extents import Extent
from lightning_zero.tiers.ledger import Category, Ledger, Place
from lightning_zero.torch_private import count_users, is_saved, storage_key
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.mesh import Mesh

_EARLY = WeakIdKeyDictionary()  # Parameter -> EarlyParameter


def early_of(parameter: Tensor) -> "EarlyParameter | None":
    """Returns the `EarlyParameter` of a parameter that waits for an engine; None for others."""
    return _EARLY.get(parameter)


def class_of(parameter: Parameter) -> type[Parameter]:
    """Returns the class that the user gave the parameter."""
    early = early_of(parameter)
    return type(parameter) if early is None else early.plain_class


@final
class EarlyParameter:
    """A parameter that waits for an engine. Holds it weakly: the user may drop it before."""

    def __init__(
        self, parameter: Parameter, number: int, label: str, mesh: Mesh, ledger: Ledger, rests_on: torch.device | None
    ) -> None:
        self.number = number  # the same on all ranks: collectives are matched by it
        self.label = f"{label} {tuple(parameter.shape)} (parameter {number})"  # for messages
        self.plain_class = type(parameter)
        self.row: Tensor | None = None  # while the parameter has no values
        self.may_differ = True  # the values may differ between ranks; then rank 0's count
        self.pins = 0  # calls that are using the values
        self._nothing = 0  # address that the parameter has while it has no values
        self._parameter = TensorWeakRef(parameter)
        self._mesh = mesh
        self._ledger = ledger
        self._rests_on = rests_on  # device of the row; None: the parameter's
        _EARLY[parameter] = self

    @property
    def parameter(self) -> Parameter | None:
        """The parameter; None once it has been freed."""
        return self._parameter()

    @property
    def may_leave(self) -> bool:
        """Whether the values can be taken away unnoticed: no view of them exists, no graph has saved the parameter."""
        parameter = self.parameter
        if parameter is None or self.pins:
            return False
        with no_interception():
            is_movable = parameter.is_contiguous() and parameter.grad is None
            return _count_holders(parameter) == _HOLDERS and is_movable and not is_saved(parameter)

    def release(self) -> None:
        """Cuts the values into rows; rank 0's values, where ranks may differ. Collective: call it on every rank."""
        parameter = self._alive()
        with torch.no_grad(), no_interception():
            flat = parameter.detach().view(-1)
            if self.may_differ:
                self._take_rows(flat)
            row = self.make_row()
            row.copy_(flat[self._own])
            del flat
            self.rest_as(row)

    def gather(self) -> None:
        """Undoes `release`: the parameter has its values again. Collective: call it on every rank."""
        parameter, row = self._alive(), self.row
        assert row is not None
        ranks, device = self._mesh.shard.size, parameter.device
        with torch.no_grad(), no_interception():
            flat = self._ledger.allocate(Category.GATHERED, ranks * self._width, row.dtype, Place(device))
            rows = flat.view(ranks, self._width)
            own = rows[self._mesh.shard.rank]
            own[: row.numel()].copy_(row)
            del row
            self.row = None  # freed before the other rows arrive, so that no two copies of it are resident
            _comm_for(self._mesh.shard, device).all_gather(rows, own, f"early parameter {self.number}").wait()
            point_at(parameter, flat[: parameter.numel()].view(parameter.shape))

    def make_row(self) -> Tensor:
        """Allocates this rank's row, uninitialised."""
        parameter, own = self._alive(), self._own
        place = Place(self._rests_on or parameter.device)
        return self._ledger.allocate(Category.PARAMETER, own.stop - own.start, parameter.dtype, place)

    def rest_as(self, row: Tensor) -> None:
        """Takes the values from the parameter; `row` is this rank's part of them."""
        parameter = self._alive()
        with torch.no_grad(), no_interception():
            point_at(parameter, nothing(parameter.shape, parameter.dtype, parameter.device))
            self._nothing = parameter.data_ptr()
        self.row = row

    @property
    def is_whole(self) -> bool:
        """Whether the parameter has its values. `Tensor.set_`, which cannot be intercepted, may have given it some."""
        with no_interception():
            if self.row is not None and self._alive().data_ptr() != self._nothing:
                self.row, self.may_differ = None, True
        return self.row is None

    def extent(self, name: str) -> Extent:
        """Returns the extent of a tensor called `name` that `row` holds."""
        return Extent.of_whole(name, self._alive().shape, self._own.start, self._own.stop)

    def leave(self) -> None:
        """Gives the parameter back to the user, plain, with the values that it has on this rank."""
        parameter = self._alive()
        assert self.row is None
        parameter.__class__ = self.plain_class
        del _EARLY[parameter]

    def _take_rows(self, flat: Tensor) -> None:
        """Overwrites this rank's row of `flat` with rank 0's values."""
        comm, ranks = _comm_for(self._mesh.world, flat.device), range(self._mesh.world.size)
        rows = [flat[self._part(rank % self._mesh.shard.size)] for rank in ranks]
        received = [rows[comm.rank] if source == 0 else flat[:0] for source in ranks]
        sent = rows if comm.rank == 0 else [flat[:0] for _ in ranks]
        comm.all_to_all(received, sent, f"early parameter {self.number}")
        self.may_differ = False

    @property
    def _width(self) -> int:
        """Elements of a row. The last rows may be shorter."""
        return -(-self._alive().numel() // self._mesh.shard.size)

    @property
    def _own(self) -> slice:
        return self._part(self._mesh.shard.rank)

    def _part(self, rank: int) -> slice:
        """Returns the elements that a rank of a shard group keeps."""
        width, numel = self._width, self._alive().numel()
        return slice(min(rank * width, numel), min((rank + 1) * width, numel))

    def _alive(self) -> Parameter:
        parameter = self.parameter
        assert parameter is not None, self.label
        return parameter


def take_over(parameter: Parameter) -> None:
    """Makes an early parameter plain, with the same whole values on all ranks: a collective. Leaves others alone."""
    early = early_of(parameter)
    if early is None:
        return
    if not early.is_whole:
        early.gather()
    elif early.may_differ:
        with torch.no_grad(), no_interception():
            values = parameter.detach().contiguous()
            _comm_for(early._mesh.world, values.device).broadcast(values, f"early parameter {early.number}")
            parameter.copy_(values)
    early.leave()


def nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the tensor that a parameter without values points at: all NaN, in the memory of one element."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device=device)
    missing = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), missing, dtype=dtype, device=device).expand(shape)


def _comm_for(comm: Comm, device: torch.device) -> Comm:
    return comm.host if device.type == "cpu" else comm


def _count_holders(tensor: Tensor) -> int:
    return count_users(storage_key(tensor.untyped_storage()))


with torch.inference_mode(False):
    # Of a parameter whose memory nothing else refers to.
    _HOLDERS = _count_holders(Parameter(torch.empty(1, device=HOST)))
