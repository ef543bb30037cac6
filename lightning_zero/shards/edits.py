"""`Edits`: what user code writes into the values of a group where it can reach them, noticed and kept.

Users edit parameters that show their values, assign other tensors to `p.data`, or edit a full array that was lent to
them. Each rank keeps edits of what it owns, so all ranks must make the same ones. How users come to the values, and
when their edits are kept: `run.loans`, `run.watch`.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from lightning_zero.device import HOST, is_host, on_host
from lightning_zero.shards.slot import Slot
from lightning_zero.torch_private import edits_of

if TYPE_CHECKING:
    from lightning_zero.shards.group import ShardGroup


@final
class Edits:
    """The edits of a group's values since users were shown them."""

    def __init__(self, group: "ShardGroup") -> None:
        self._group = group
        self._shown: list[tuple[int, int, int]] | None = None  # state of the parameters, while they are shown
        self.taken_back = 0  # how often a copy in the declared dtype was lent and may have been edited

    # -- in parameters

    def note_versions(self) -> None:
        """Notes that the parameters show full_param from now on, so that `keep` can tell what users edit."""
        group = self._group
        if not (group.stays_full and group.master is group.owned_param):  # else edits are in the masters already
            self._shown = self._states()

    def note_hidden(self) -> None:
        """Notes that the parameters are not shown any more: users cannot edit them."""
        self._shown = None

    @property
    def are_made(self) -> bool:
        """Whether users have edited the parameters since `note_versions`, as versions and `p.data` tell."""
        return self._shown is not None and self._group.full_param is not None and self._shown != self._states()

    def _states(self) -> list[tuple[int, int, int]]:
        """Returns the versions of the parameters and of what they hold here, which differ in a DTensor, and where."""
        shown = [(slot.parameter, slot.local.values) for slot in self._group.slots]
        return [(edits_of(parameter), edits_of(values), values.data_ptr()) for parameter, values in shown]

    def keep(self, *, is_edited: bool = False, first: Callable[[], None] | None = None) -> None:
        """Keeps edits that users have made in the parameters since `note_versions`, as versions and `p.data` tell. Pass
        `is_edited` if something else has told of them, and what is to be called `first` if there are any."""
        is_edited, self._shown = is_edited or self.are_made, None
        if is_edited:
            if first is not None:
                first()
            assert self._group.full_param is not None
            self.adopt_assigned()
            self.keep_lent(self._group.full_param)

    def adopt_assigned(self) -> bool:
        """Copies tensors that the user has assigned to `p.data` into full_param; returns whether there were any."""
        group, assigned = self._group, self.assigned
        assert group.full_param is not None
        if not assigned:
            return False
        for slot in assigned:
            slot.check_assigned(slot.parameter, group.full_param.dtype)
        self._replace(assigned, group.full_param)
        for slot, values in assigned.items():
            view = slot.view(group.full_param)
            view.copy_(values.view_as(view))
            slot.local.values = view
        return True

    @property
    def assigned(self) -> dict[Slot, Tensor]:
        """Tensors that the user has assigned to `p.data`, in place of what it shows of full_param."""
        full = self._group.full_param
        assert full is not None
        start, size = full.data_ptr(), full.itemsize
        return {
            slot: slot.local.values.detach()
            for slot in self._group.slots
            if slot.numel and slot.local.values.data_ptr() != start + slot.offset * size
        }

    def move(self, full: Tensor) -> None:
        """Makes `full`, a copy of full_param, the new full_param. What is assigned to `p.data` goes on being shown."""
        is_known = self._shown is not None and not self.are_made
        assigned = self.assigned
        self._group.set_full(full)
        for slot, values in assigned.items():
            slot.local.values = values
        if is_known:
            self.note_versions()

    def keep_shown(self) -> None:
        """Keeps what users have edited in the parameters, or assigned to `p.data`, which still shows their tensor."""
        for slot in self._group.slots:
            slot.check_assigned(slot.parameter, self._group.kind.resting)
            self._keep_resting(slot, slot.local.values.detach().reshape(-1)[slot.piece.start : slot.piece.stop])

    # -- in a full array that was lent

    def show(self, full: Tensor, as_lent: Tensor | None = None) -> bool:
        """Copies what users have edited in a full array of the declared dtype, which was lent to them, into the values
        gathered on this rank, and not into its shard. Returns whether there was anything that the resting dtype tells.
        `as_lent` are the resting values when it was lent, where this rank has them no more."""
        group = self._group
        self.taken_back += 1
        before, now = group.full_param if as_lent is None else as_lent, full.to(group.kind.resting)
        assert before is not None
        differ = _differ((slot.view(now), slot.view(before)) for slot in group.slots)
        edited = [slot for slot, is_edited in zip(group.slots, differ, strict=True) if is_edited]
        if edited:
            self._replace(edited, before)
            if group.full_param is not None:
                group.full_param.copy_(now)
        return bool(edited)

    def keep_lent(self, full: Tensor, as_lent: Tensor | None = None) -> None:
        """Keeps what users have edited in a full array that was lent to them, of the declared or the resting dtype; see
        `show` for `as_lent`."""
        group = self._group
        group.catch_up()
        declared = full.dtype == group.kind.declared
        if declared and group.kind.is_cast and not self.show(full, as_lent) and not self._differs(full):
            return
        for slot in group.slots:
            own = slot.own_part(full)
            if declared:
                group.master.write(slot.piece.in_shard, own)
                group.owned_param.write(slot.piece.in_shard, own)
            else:
                self._keep_resting(slot, own)

    def _differs(self, full: Tensor) -> bool:
        """Whether a full array of the declared dtype has other values than this rank's part of the masters."""
        master = self._group.master
        pairs = ((slot.own_part(full), master.read(slot.piece.in_shard)) for slot in self._group.slots)
        if is_host(master.place.device):  # one after the other, as copies from a device take room
            return any(not torch.equal(own.to(HOST), values) for own, values in pairs)
        return any(_differ(pairs))

    # -- into masters and full_param

    def _keep_resting(self, slot: Slot, own: Tensor) -> None:
        """Keeps edits in this rank's part of a parameter, in the resting dtype."""
        within = slot.piece.in_shard
        with self._group.master.edit(within) as master:
            # Only what differs: a two-byte weight that was not edited must keep all bits of its master.
            edited = (own != master.to(own)).to(master.device)
            master.copy_(torch.where(edited, own.to(master), master))
        self._group.owned_param.write(within, own)

    def _replace(self, slots: Iterable[Slot], before: Tensor) -> None:
        """Prepares for other values of some slots in place of those in the full array `before`. Graphs that saved the
        old values keep these, as they would keep the tensor that `p.data` was, and the copies that autocast makes."""
        if self._group.stays_full:
            self._group.catch_up()
            self._group.renew_full()
            return
        for slot in slots:
            slot.replace(slot.view(before))


def _differ(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[bool]:
    """Returns whether the tensors of each pair differ. For those of a device the host waits once, and not for each."""
    pairs = list(pairs)
    if all(is_host(one.device) for one, _ in pairs):
        return [not torch.equal(one, other) for one, other in pairs]
    return on_host(torch.stack([one.ne(other).any() for one, other in pairs])).tolist()
