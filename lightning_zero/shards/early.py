"""A parameter that is sharded before there is an engine: whole, or this rank's row of its values.

Tensors (N ranks, the parameter's values in C order):

    whole    (numel,)            the parameter's own memory, as the user made it or as it was gathered
    row      (ceil(numel / N),)  what this rank keeps while the parameter has no values; the last rows may be shorter

Groups are laid out only when there is an engine, and divide memory in other places: `ShardGroup` takes one parameter
after the other over, whole.
"""

import math
from typing import final

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_interception
from torch.nn import Module, Parameter
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from lightning_zero.shards.extents import Extent
from lightning_zero.tiers.ledger import Category, Ledger, Place
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.mesh import Mesh

_EARLY = WeakIdKeyDictionary()  # Parameter -> EarlyParameter


def early_of(parameter: Tensor) -> "EarlyParameter | None":
    """What is known of a parameter that waits for an engine; None for others."""
    return _EARLY.get(parameter)


def class_of(parameter: Parameter) -> type[Parameter]:
    """What the user made it an instance of."""
    early = early_of(parameter)
    return type(parameter) if early is None else early.plain_class


@final
class EarlyParameter:
    """A parameter that waits for an engine. The parameter may die before: this does not hold it."""

    def __init__(
        self,
        parameter: Parameter,
        number: int,
        label: str,
        mesh: Mesh,
        ledger: Ledger,
        rests_on: torch.device | None,
    ) -> None:
        self.number = number  # the same on all ranks: collectives are matched by it
        self.label = f"{label} {tuple(parameter.shape)} (parameter {number})"  # for messages
        self.plain_class = type(parameter)
        self.row: Tensor | None = None  # while the parameter has no values
        self.may_differ = True  # ranks may have different values since they had the same ones; rank 0's count
        self.pins = 0  # calls that work on the values now
        self._nothing = 0  # where the parameter points meanwhile
        self._parameter = TensorWeakRef(parameter)
        self._mesh = mesh
        self._ledger = ledger
        self._rests_on = rests_on
        _EARLY[parameter] = self

    @property
    def parameter(self) -> Parameter | None:
        """None once nobody has it any more."""
        return self._parameter()

    @property
    def may_leave(self) -> bool:
        """Whether the values can be taken from the parameter without anybody noticing: no view of them, and no graph
        that the parameter is saved in."""
        parameter = self.parameter
        if parameter is None or self.pins or parameter.layout != torch.strided:
            return False
        with no_interception():
            holders = torch._C._storage_Use_Count(parameter.untyped_storage()._cdata)
            is_saved = parameter._use_count() > 1  # type: ignore[attr-defined]
            is_movable = parameter.is_contiguous() and parameter.grad is None
            return holders == _HOLDERS and is_movable and not is_saved

    def release(self) -> None:
        """Cuts the values into rows, rank 0's where they may differ. A collective."""
        parameter = self._alive()
        with torch.no_grad(), no_interception():
            flat = parameter.detach().view(-1)
            if self.may_differ:
                self._take_rows(flat)
            row = self.make_row()
            row.copy_(flat[self._own(parameter)])
            del flat
            self.rest_as(row)

    def gather(self) -> None:
        """The reverse of `release`. A collective."""
        parameter, row = self._alive(), self.row
        assert row is not None
        ranks, width = self._mesh.shard.size, self._width(parameter)
        device = parameter.device
        with torch.no_grad(), no_interception():
            flat = self._ledger.allocate(Category.GATHERED, ranks * width, row.dtype, Place(device))
            rows, own = flat.view(ranks, width), self._own(parameter)
            flat[own].copy_(row)
            del row
            self.row = None  # before the others' rows arrive, so that this one is not there twice
            mine = rows[self._mesh.shard.rank]
            _comm_for(self._mesh.shard, device).all_gather(rows, mine, f"early parameter {self.number}").wait()
            parameter.data = flat[: parameter.numel()].view(parameter.shape)

    def make_row(self) -> Tensor:
        """Room for this rank's row, uninitialised."""
        parameter = self._alive()
        own, device = self._own(parameter), self._rests_on or parameter.device
        return self._ledger.allocate(Category.PARAMETER, own.stop - own.start, parameter.dtype, Place(device))

    def rest_as(self, row: Tensor) -> None:
        """The parameter has no values from here on, and this rank's part of them is `row`."""
        parameter = self._alive()
        with torch.no_grad(), no_interception():
            parameter.data = nothing(parameter.shape, parameter.dtype, parameter.device)
            self._nothing = parameter.data_ptr()
        self.row = row

    @property
    def is_whole(self) -> bool:
        """Whether the parameter has its values. `Tensor.set_`, which nobody can intercept, may have given it some."""
        with no_interception():
            if self.row is not None and self._alive().data_ptr() != self._nothing:
                self.row, self.may_differ = None, True
        return self.row is None

    def extent(self, name: str) -> Extent:
        """What `row` is of a tensor called `name`."""
        parameter = self._alive()
        own = self._own(parameter)
        return Extent.of_whole(name, parameter.shape, own.start, own.stop)

    def leave(self) -> None:
        """The parameter waits no longer: it is what the user made, with the values that it has here."""
        parameter = self._alive()
        assert self.row is None
        parameter.__class__ = self.plain_class
        del _EARLY[parameter]

    def take_over(self) -> None:
        """As `leave`, with the values that all ranks have. A collective."""
        if not self.is_whole:
            self.gather()
        elif self.may_differ:
            with torch.no_grad(), no_interception():
                parameter = self._alive()
                values = parameter.detach().contiguous()
                _comm_for(self._mesh.world, values.device).broadcast(values, f"early parameter {self.number}")
                parameter.copy_(values)
        self.leave()

    def _take_rows(self, flat: Tensor) -> None:
        """Every rank has rank 0's values where it keeps them, in place."""
        comm, ranks = _comm_for(self._mesh.world, flat.device), range(self._mesh.world.size)
        rows = [flat[self._part(flat, rank % self._mesh.shard.size)] for rank in ranks]
        received = [rows[comm.rank] if source == 0 else flat[:0] for source in ranks]
        sent = rows if comm.rank == 0 else [flat[:0] for _ in ranks]
        comm.all_to_all(received, sent, f"early parameter {self.number}")
        self.may_differ = False

    def _width(self, parameter: Tensor) -> int:
        return -(-parameter.numel() // self._mesh.shard.size)

    def _own(self, parameter: Tensor) -> slice:
        return self._part(parameter, self._mesh.shard.rank)

    def _part(self, parameter: Tensor, rank: int) -> slice:
        """Elements that a rank of a shard group keeps."""
        width = self._width(parameter)
        start = min(rank * width, parameter.numel())
        return slice(start, min(start + width, parameter.numel()))

    def _alive(self) -> Parameter:
        parameter = self.parameter
        assert parameter is not None, self.label
        return parameter


def take_over(parameter: Parameter) -> None:
    """From here on the parameter is the caller's, whole. A collective where it has waited for that."""
    early = early_of(parameter)
    if early is not None:
        early.take_over()


def whole_bytes_of(module: Module) -> int:
    """Of parameters that are whole on this rank."""
    return sum(parameter.nbytes for parameter in module.parameters() if early_of(parameter) is None)


def nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a parameter without values points at: NaN, and no memory to speak of."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device=device)
    missing = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), missing, dtype=dtype, device=device).expand(shape)


def _comm_for(comm: Comm, device: torch.device) -> Comm:
    return comm.host if device.type == "cpu" else comm


def _count_holders() -> int:
    with torch.inference_mode(False):
        parameter = Parameter(torch.empty(1))
    return int(torch._C._storage_Use_Count(parameter.untyped_storage()._cdata))


_HOLDERS = _count_holders()  # of the memory of a parameter that nobody else looks at
