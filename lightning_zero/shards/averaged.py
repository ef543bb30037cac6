"""`Averaged`: the averaged gradients of a group, from their reduction to the step.

    full_grad     (N * S,)   accumulation dtype; only where gradients rest in full, or accumulate locally
    owned_grad    (owned,)   accumulation dtype; reduced and averaged; a view of full_grad at stages 0 and 1, else in
                             the tier that the optimizer state is offloaded to

On one rank, unless gradients rest in another tier, there are no arrays: the gradient is what autograd has left in
`p.grad`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn, final

import torch
from torch import Tensor

from lightning_zero.device import is_host
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.shards.squares import Squares
from lightning_zero.tiers.array import Array, InMemory, zeros
from lightning_zero.tiers.ledger import Category, Tier
from lightning_zero.torch_private import edits_of


class AveragedGradient(Tensor):
    """The `p.grad` of a parameter after a reduction, if its values rest as shards; see `run.sharded_gradient`."""

    def is_of(self, slot: Slot) -> bool:
        """Whether it is the gradient of the parameter at `slot`, of its latest backward."""
        raise NotImplementedError

    def refuse_as_given(self) -> NoReturn:
        """Raises RuntimeError, where the user has put it in place of the gradient that it is not."""
        raise NotImplementedError


@final
class Averaged:
    """The averaged gradients of one trainable group, in `dtype`. Unless the group's gradients `travels`, they are what
    autograd has left in `p.grad`."""

    def __init__(self, group: ShardGroup, dtype: torch.dtype, *, travels: bool) -> None:
        self._group = group
        self.dtype = dtype
        self.travels = travels
        self.is_sharded = travels and group.setting.partition.gradient  # owned_grad is a shard, in an array of its own
        # They are elsewhere than in `p.grad`: in shards, or in another tier.
        self.is_spread = travels and (group.is_cut or self.is_sharded)
        self.full_grad: Tensor | None = None
        self.owned_grad = self._make_owned(0)
        self.squares: Squares | None = None
        if not group.kind.is_idle:
            self.make_room()
        self.editions = [0] * len(group.slots)  # how often another average has taken the place of each one

    @property
    def ranks(self) -> int:
        """Of how many ranks it is the mean."""
        return self._group.comm.size * self._group.setting.mesh.replicate.size

    # -- arrays

    def make_room(self) -> None:
        """Allocates what keeps averages until the step, unless it is there."""
        group = self._group
        if self.is_sharded and group.setting.keeps_gradients and not self.owned_grad.numel:
            self.owned_grad = self._make_owned(group.layout.shard_numel)
            leaves = not is_host(group.places.gathered.device) and is_host(group.places.gradient.device)
            self.squares = Squares(self.owned_grad) if leaves and not self.dtype.is_complex else None
        elif self.travels and not self.is_sharded and self.full_grad is None:
            self.make_full()

    def make_shard(self) -> None:
        """Allocates the shard for one reduction, where each group is stepped at once, and `drop` frees it."""
        self.owned_grad = self._make_owned(self._group.layout.shard_numel)

    def _make_owned(self, numel: int) -> Array:
        group = self._group
        return zeros(Category.GRADIENT, numel, self.dtype, group.places.gradient, group.setting.ledger)

    def make_full(self) -> Tensor:
        """Allocates full_grad, filled with zeros, until `drop_full`. Returns it."""
        group, place = self._group, self._group.places.gathered
        self.full_grad = group.setting.ledger.allocate(Category.GRADIENT, group.layout.numel, self.dtype, place).zero_()
        if not self.is_sharded:
            self.owned_grad = InMemory(self.full_grad[group.own_range], place)
        return self.full_grad

    def drop_full(self) -> None:
        """Frees what has accumulated on this rank, where averages rest as shards."""
        if self.is_sharded:
            self.full_grad = None

    def drop(self) -> None:
        """Frees the averages, which have been stepped."""
        if self.is_sharded:
            self.owned_grad = self._make_owned(0)
        for slot in self._group.slots:
            with no_interception():
                slot.local.set_grad(None)

    def free(self) -> None:
        """Frees everything permanently, after training."""
        self.full_grad = self.squares = None
        place = self._group.places.gathered
        self.owned_grad = InMemory(torch.empty(0, dtype=self.dtype, device=place.device), place)

    # -- one parameter

    def piece(self, slot: Slot) -> Tensor:
        """Returns the averaged gradient of what this rank steps, in `Slot.stepped_shape`. Read-only."""
        if self.travels:
            return self.owned_grad.read(slot.piece.in_shard).view(slot.stepped_shape)
        grad = slot.local.read_grad()
        assert grad is not None
        return grad.detach()

    def edit_piece(self, slot: Slot) -> AbstractContextManager[Tensor]:
        """Gives out the values of `piece`, and keeps the edits made inside."""
        self._group.catch_up_alone()  # a postponed step is to see the gradient as it was before the edit
        return self.owned_grad.edit(slot.piece.in_shard) if self.travels else nullcontext(self.piece(slot))

    @property
    def is_on_disk(self) -> bool:
        return self.owned_grad.place.tier is Tier.DISK

    def version(self, slot: Slot) -> tuple[int, int]:
        """Returns numbers of which one differs after each change of the parameter's averaged gradient. Torch counts no
        edit where ranks write an average into the memory of the one before."""
        edits = self.owned_grad.version if self.travels else edits_of(self.piece(slot))
        return self.editions[slot.index], edits

    def is_shown(self, slot: Slot, grad: Tensor) -> bool:
        """Whether `grad` shows the averaged gradient, and is no tensor that a user has put into `p.grad`."""
        if not self.travels:
            return True
        if isinstance(grad, AveragedGradient):
            return grad.is_of(slot)
        return self.full_grad is not None and grad.data_ptr() == slot.view(self.full_grad).data_ptr()

    def is_accumulated(self, grad: Tensor) -> bool:
        """Whether a `p.grad` is not reduced yet: it is this rank's own, where averages rest as shards."""
        return self.is_sharded and not isinstance(grad, AveragedGradient)

    def replace(self, slot: Slot, grad: Tensor) -> None:
        """Does `write` for another gradient in place of the average."""
        self.editions[slot.index] += 1
        self.write(slot, grad)

    def write(self, slot: Slot, grad: Tensor) -> None:
        """Replaces this rank's piece by the one of `grad`, a whole gradient."""
        self._group.catch_up_alone()
        self.make_room()  # the parameter may be idle
        self.owned_grad.write(slot.piece.in_shard, grad.reshape(-1)[slot.piece.start : slot.piece.stop])

    def full(self, slot: Slot, *, is_lost: bool) -> Tensor | None:
        """Returns the whole averaged gradient of one parameter, in its shape; None on all ranks if a part `is_lost` on
        any: a later backward has written over it, where gradients rest whole. Collective: all-gathers its slice."""
        layout, comm = self._group.layout, self._group.comm
        of = layout.slice_of(slot.index)
        ledger, place = self._group.setting.ledger, self._group.places.gathered
        rows = ledger.allocate(Category.GATHERED, layout.ranks * of.width, self.dtype, place)
        rows = rows.view(layout.ranks, of.width)
        own = self.owned_grad.copy_to(of.in_shard, rows[comm.rank])
        name, tells = f"read gradient {slot.name}", None if self.is_sharded else is_lost
        gather = comm.all_gather(rows, own, name, diverges=tells)
        gather.wait()
        if gather.has_divergence():
            return None
        start = slot.offset - of.start
        return rows.view(-1)[start : start + slot.numel].view(slot.shape)
