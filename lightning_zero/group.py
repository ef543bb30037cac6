"""`ShardGroup`: parameters of one kind as one flat, evenly divided array.

Tensors of a group (N ranks, S = shard_numel; *owned* is S where the optimizer is partitioned, else N * S):

    full_param    (N * S,)   resting dtype; the module's parameters are views of it. Stage 3: its storage is empty
                             between uses
    owned_param   (owned,)   resting dtype; a view of full_param, at stage 3 a tensor of its own
    master        (owned,)   declared dtype, what the optimizer steps; owned_param itself where the dtypes agree
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.comm import Work
from lightning_zero.extents import Extent, Layout, Piece
from lightning_zero.lazy import Stored
from lightning_zero.ledger import Category, Ledger
from lightning_zero.mesh import Mesh
from lightning_zero.rendezvous import Rendezvous
from lightning_zero.stage import Partition

_no_interception = torch._C.DisableTorchFunctionSubclass

ALIGNMENT_BYTES = 64  # a cache line; what torch's own allocator gives each tensor on the host


@dataclass(frozen=True)
class Kind:
    """What the parameters of one group have in common. Groups never mix kinds."""

    declared: torch.dtype  # what the user made, what the optimizer steps and checkpoints hold
    resting: torch.dtype  # what rests, travels and enters forward
    device: torch.device
    trainable: bool

    @property
    def is_cast(self) -> bool:
        return self.resting != self.declared


@dataclass(frozen=True)
class Setting:
    """What every group of an engine shares."""

    partition: Partition
    mesh: Mesh
    ledger: Ledger
    bucket_bytes: int
    rendezvous: Rendezvous
    storages: "dict[int, ShardGroup]" = field(default_factory=dict)  # of full_params that rest as shards -> their group


@final
class ShardGroup:
    """Gather and release, publish: the life of parameters. Gradients live in `gradient.GradientShard`.

    Args:
        name: for messages and for matching collectives between ranks.
        parameters: name -> parameter, all of one kind; their values are taken over.
        kind: see `Kind`.
        setting: see `Setting`.
    """

    def __init__(self, name: str, parameters: dict[str, Parameter], kind: Kind, setting: Setting) -> None:
        self.name = name
        self.kind = kind
        self.comm = setting.mesh.shard
        self.replicate = setting.mesh.replicate
        self.partition = setting.partition
        self.ledger = setting.ledger
        self._storages = setting.storages
        self._rendezvous = setting.rendezvous
        if self.partition.parameter:
            self._param_number = self._rendezvous.enroll(name, self.serve)
        if self.partition.optimizer and (kind.is_cast or self.partition.parameter):
            self._master_number = self._rendezvous.enroll(name, self._serve_master)
        self.parameters = list(parameters.values())
        # Values rest in C order; these are the strides (channels_last and their like) that the user gets back.
        self._strides = [torch.empty_like(parameter, device="meta").stride() for parameter in self.parameters]
        self.layout = Layout.pack(
            [(parameter_name, tuple(parameter.shape)) for parameter_name, parameter in parameters.items()],
            ranks=self.comm.size,
            bucket_numel=setting.bucket_bytes // kind.declared.itemsize,
            # Every slice is divided once more between replicas.
            alignment=math.lcm(ALIGNMENT_BYTES // kind.resting.itemsize, self.replicate.size),
        )
        self._served_master: Tensor | None = None
        self.gathering: list[Work] | None = []  # under way; [] when finished, None when released
        self._allocate()

    def _allocate(self) -> None:
        layout, kind = self.layout, self.kind
        category = Category.GATHERED if self.partition.parameter else Category.PARAMETER
        self.full_param = self.ledger.allocate(category, layout.numel, kind.resting, kind.device)
        self.full_param.zero_()  # padding travels too, and must not carry NaNs into sums
        declared = self._declared_values() if kind.is_cast else None
        self.views = self._views(self.full_param)
        for view, parameter in zip(self.views, self.parameters, strict=True):
            view.copy_(parameter.detach())
        self.owned_param = self._owned(self.full_param)
        if self.partition.parameter:
            self._storages[self.full_param.untyped_storage()._cdata] = self
            shard = self.ledger.allocate(Category.PARAMETER, layout.shard_numel, kind.resting, kind.device)
            self.owned_param = shard.copy_(self.owned_param)
        self.master = self.owned_param if declared is None else declared
        self.point_at_full()

    def _declared_values(self) -> Tensor:
        full = torch.zeros(self.layout.numel, dtype=self.kind.declared, device=self.kind.device)
        for view, parameter in zip(self._views(full), self.parameters, strict=True):
            view.copy_(parameter.detach())
        owned = self._owned(full)
        master = self.ledger.allocate(Category.MASTER, owned.numel(), self.kind.declared, self.kind.device)
        return master.copy_(owned)

    # -- who owns what

    @property
    def _owned_range(self) -> slice:
        if not self.partition.optimizer:
            return slice(0, self.layout.numel)
        start = self.comm.rank * self.layout.shard_numel
        return slice(start, start + self.layout.shard_numel)

    def _owned(self, full: Tensor) -> Tensor:
        return full[self._owned_range]

    def piece(self, index: int) -> Piece:
        """What this rank steps of parameter `index`: its part, or all of it where the optimizer is not partitioned."""
        if self.partition.optimizer:
            return self.layout.piece(index, self.comm.rank)
        span = self.layout.spans[index]
        return Piece(start=0, stop=span.numel, shard_start=span.offset)

    def share(self, index: int) -> Piece:
        """What this rank writes of parameter `index`, in place in an owned array: of what it owns, its part among the
        replicas that own the same."""
        piece = self.layout.piece(index, self.comm.rank)
        parts, part = self.replicate.size, self.replicate.rank
        start, stop = (piece.start + piece.numel * at // parts for at in (part, part + 1))
        owned = self.piece(index)
        return Piece(start=start, stop=stop, shard_start=owned.shard_start + start - owned.start)

    def piece_of(self, owned: Tensor, index: int) -> Tensor:
        """The piece of parameter `index` in an owned array: flat, or in the parameter's shape when it is all of it
        by design (nothing partitioned), so that optimizers that look at shapes work there unchanged."""
        piece = self.piece(index)
        return owned[piece.shard_start : piece.shard_stop].view(self.piece_shape(index))

    def piece_shape(self, index: int) -> tuple[int, ...]:
        return (self.piece(index).numel,) if self.partition.optimizer else self.layout.spans[index].shape

    def rows(self, full: Tensor) -> Tensor:
        """A full flat array as ``(N, S)``, a row per rank."""
        return full.view(self.layout.ranks, self.layout.shard_numel)

    def view_of(self, full: Tensor, index: int) -> Tensor:
        span = self.layout.spans[index]
        return full[span.offset : span.offset + span.numel].view(span.shape)

    def _views(self, full: Tensor) -> list[Tensor]:
        return [self.view_of(full, index) for index in range(len(self.parameters))]

    def point_at_full(self) -> None:
        """Makes the module's parameters views of full_param; the Parameter objects stay the user's own.

        The views are made while the storage is there: torch refuses to make views of an empty one.
        """
        with _no_interception():
            for view, parameter in zip(self.views, self.parameters, strict=True):
                parameter.data = view

    def adopt_assigned(self) -> None:
        """Takes over tensors that the user has put into `p.data` in place of our views."""
        for index, (view, parameter) in enumerate(zip(self.views, self.parameters, strict=True)):
            self.check_assigned(index, parameter, view.dtype)
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach().view_as(view))
                parameter.data = view

    def check_assigned(self, index: int, values: Tensor, dtype: torch.dtype) -> None:
        """Raises RuntimeError for `p.data` in another dtype or on another device, as `.half()` and `.to()` leave it."""
        if values.dtype != dtype or values.device.type != self.kind.device.type:
            raise RuntimeError(
                f"Parameter {self.layout.spans[index].name!r} was {dtype} on {self.kind.device.type!r} at set-up and "
                f"would now be {values.dtype} on {values.device.type!r}. Call .to(), .half() and their like before "
                "fit, or choose Trainer(precision=...)."
            )

    # -- stage 3: gather before use, release after

    @property
    def is_released(self) -> bool:
        return self.partition.parameter and self.gathering is None

    def serve(self, keep: bool) -> None:
        """Starts to gather full_param, if it is to be kept here and is not there; else takes part for the others."""
        if not (keep and self.is_released):
            self._pass_by(self.owned_param, "gather")
            return
        self.ledger.resize(self.full_param, self.full_param.numel() * self.full_param.itemsize)
        self.gathering = self._all_gather(self.full_param, self.owned_param, "gather")

    def gather(self) -> None:
        """full_param holds all values from here to `release`."""
        if self.is_released:
            self._rendezvous.want(self._param_number)
        while self.gathering:
            self.gathering.pop().wait()

    def release(self) -> None:
        """Frees full_param by emptying its storage, not by dropping the tensor: autograd has saved views of it,
        and they must see the data again after the next gather."""
        if self.partition.parameter and not self.is_released:
            self.gather()  # a gather under way still writes into the storage
            self.gathering = None
            self.ledger.resize(self.full_param, 0)

    def abandon(self) -> None:
        """Releases full_param but leaves its storage to whoever else holds a view of it; the next gather makes a
        new one."""
        if self.partition.parameter and not self.is_released:
            self.gather()
            self.gathering = None
            del self._storages[self.full_param.untyped_storage()._cdata]
            self.full_param = self.ledger.allocate(
                Category.GATHERED, self.layout.numel, self.kind.resting, self.kind.device
            )
            self._storages[self.full_param.untyped_storage()._cdata] = self
            self.views = self._views(self.full_param)
            self.point_at_full()
            self.ledger.resize(self.full_param, 0)

    def gather_saved(self, shard: Tensor) -> Tensor:
        """full_param as it was when `shard`, since left to graphs, was owned_param. A collective."""
        full = self.ledger.allocate(Category.GATHERED, self.layout.numel, self.kind.resting, self.kind.device)
        for work in self._all_gather(full, shard, "gather for backward"):
            work.wait()
        return full

    # -- after the step, or an edit

    def leave_to_graphs(self) -> None:
        """New storage for values that are about to change by an edit of their declared copy: graphs keep the old ones,
        as they keep the copies that autocast makes. (Where parameters rest as declared, the edit was to themselves.)"""
        if not self.kind.is_cast:
            return
        resting = self.owned_param if self.partition.parameter else self.full_param
        resting = self.ledger.allocate(Category.PARAMETER, resting.numel(), self.kind.resting, self.kind.device)
        if self.partition.parameter:
            self.owned_param = resting
            return
        self.full_param, self.views = resting, self._views(resting)
        self.owned_param = self._owned(resting)
        self.point_at_full()

    def begin_publish(self) -> list[Work]:
        """Sends what the optimizer made of the master to where forward reads it."""
        if self.kind.is_cast:
            self.owned_param.copy_(self.master)
        if self.partition.parameter or not self.partition.optimizer:
            return []
        return self._all_gather(self.full_param, self.owned_param, "publish")

    def load(self, stored: Mapping[int, Stored]) -> None:
        """Reads what this rank owns of parameters into the master; `publish_loaded` must follow, on every rank.

        Args:
            stored: index of a parameter -> where its values are.
        """
        for index, source in stored.items():
            piece = self.layout.piece(index, self.comm.rank)
            start = piece.shard_start if self.partition.optimizer else self.layout.spans[index].offset + piece.start
            extent = Extent.of_whole(source.name, source.shape, piece.start, piece.stop)
            source.read(extent, self.master[start : start + piece.numel])

    def publish_loaded(self) -> None:
        """Every rank gets of what was loaded what it holds. A collective."""
        if not self.partition.optimizer:
            own = self.rows(self.master)[self.comm.rank]
            for work in self._all_gather(self.master, own, "loaded"):
                work.wait()
        for work in self.begin_publish():
            work.wait()

    # -- whole values in the declared dtype

    def full_master(self) -> Tensor:
        """All values in the declared dtype, flat ``(N * S,)``. A collective, unless they rest here in full.
        Not to be written to."""
        if not self.partition.optimizer:
            return self.master
        if not self.kind.is_cast and not self.partition.parameter:
            return self.full_param
        self._rendezvous.want(self._master_number)
        full, self._served_master = self._served_master, None
        assert full is not None
        return full

    def _serve_master(self, keep: bool) -> None:
        if not keep:
            self._pass_by(self.master, "gather master")
            return
        self._served_master = self.ledger.allocate(
            Category.GATHERED, self.layout.numel, self.kind.declared, self.kind.device
        )
        for work in self._all_gather(self._served_master, self.master, "gather master"):
            work.wait()

    def whole_values(self, *, copy: bool) -> list[Tensor]:
        """Every parameter's values in its shape and declared dtype. A collective, as `full_master`.

        Args:
            copy: in storage of its own, and in the memory format that the user made it in. What rests as shards is
                copied to the host in any case: a whole model may not fit on the device, and one group at a time does.
        """
        views = self._views(self.full_master())
        if not (copy or self.partition.parameter):
            return views
        device = torch.device("cpu") if self.partition.parameter else self.kind.device
        return [
            torch.empty_strided(view.shape, strides, dtype=view.dtype, device=device).copy_(view)
            for view, strides in zip(views, self._strides, strict=True)
        ]

    def store(self, full: Tensor) -> bool:
        """Takes over what differs in `full` (declared dtype, flat) from the values this group holds.

        Only what differs: a two-byte weight that nobody touched must keep all bits of its master.
        """
        own = self._owned(full)
        if torch.equal(own, self.master):
            return False
        self.master.copy_(own)
        return True

    def show_edits(self, full: Tensor) -> None:
        """Values that rest here in full become those of `full` (declared dtype, flat) at once; ranks edit alike."""
        if self.partition.parameter:
            return
        resting = full.to(self.kind.resting)
        if not torch.equal(resting, self.full_param):
            self.leave_to_graphs()
            self.full_param.copy_(resting)

    def store_edits(self, full_param: Tensor) -> None:
        """Takes over edits that were made to resting values, leaving the master's other elements alone."""
        own = self._owned(full_param)
        edited = own != self.owned_param
        if bool(edited.any()):
            self.master.copy_(torch.where(edited, own.to(self.kind.declared), self.master))
            self.owned_param.copy_(own)

    def free(self) -> None:
        """Lets go of all values; the layout stays, for what was made by it (optimizer state)."""
        self._storages.pop(self.full_param.untyped_storage()._cdata, None)
        self.full_param = self.owned_param = self.master = self.full_param.new_empty(0)
        self.views = []

    @property
    def is_freed(self) -> bool:
        return not self.views

    def _all_gather(self, full: Tensor, shard: Tensor, purpose: str) -> list[Work]:
        rows = self.rows(full)
        return [
            self._gather_slice(rows[:, columns.start : columns.stop], shard, columns, purpose)
            for columns in self.layout.slices
        ]

    def _pass_by(self, shard: Tensor, purpose: str) -> None:
        """Takes part in a gather without keeping it; one slice at a time is here in passing."""
        for columns in self.layout.slices:
            passing = shard.new_empty(self.layout.ranks, len(columns))
            self._gather_slice(passing, shard, columns, purpose).wait()

    def _gather_slice(self, rows: Tensor, shard: Tensor, columns: range, purpose: str) -> Work:
        name = f"{purpose} {self.name}[{columns.start}:{columns.stop}]"
        return self.comm.all_gather(rows, shard[columns.start : columns.stop], name)


def publish(groups: Iterable[ShardGroup]) -> None:
    """What the optimizer made of the masters is where forward reads it. A collective."""
    with torch.no_grad():
        for work in [work for group in groups for work in group.begin_publish()]:
            work.wait()
