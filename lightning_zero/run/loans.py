"""Values that are lent to user code, and what becomes of the edits that it makes in them.

Whoever reads a parameter or a gradient that rests as something else borrows its values. What a call has left no view of
goes back at once; the rest at the next boundary: before a forward, before a step. Edits are taken over by value, each
rank's where it owns them, so all ranks must make the same.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor

from lightning_zero.run.cache import UnitCache
from lightning_zero.run.rendezvous import Rendezvous
from lightning_zero.shards.group import ShardGroup, publish
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.shards.unit import Unit
from lightning_zero.tiers.array import Array
from lightning_zero.tiers.ledger import Category
from lightning_zero.views.gradient import GradientLender
from lightning_zero.views.intercept import Lent
from lightning_zero.views.lazy import Stored
from lightning_zero.views.parameter import AsDeclared, Interception, Lender
from lightning_zero.views.saved import SavedParameters


@final
class Loans(Lender, GradientLender):
    """What is lent of an engine's values."""

    def __init__(self, groups: list[ShardGroup]) -> None:
        self.groups = groups
        self._declared: dict[ShardGroup, Tensor] = {}  # (N * S,) in the declared dtype, lent
        self._in_blocks: dict[ShardGroup, Tensor] = {}  # of those, what blocks that recompute have read in this pass
        self._pinned: dict[Unit, None] = {}  # of whose values views may be held
        self._gradients: dict[Slot, Tensor] = {}  # whole ones, of which views may be held
        self._noted: dict[Slot, Stored] = {}  # what parameters are to have the values of
        self._served: Tensor | None = None  # what the latest call for values, or a gradient, has brought
        for group in groups:
            if group.is_plain:
                group.note_versions()

    def join(
        self, cache: UnitCache, rendezvous: Rendezvous, saved: SavedParameters, interception: Interception
    ) -> None:
        """Says where the values come from."""
        self._interception = interception
        self.cache = cache
        self.rendezvous = rendezvous
        self.saved = saved
        self._units = {group: unit for unit in cache.units for group in unit.groups}
        self._numbers = {
            group: rendezvous.enroll(f"the all-gather of {_told_of(group)}", partial(self._serve, group))
            for group in self.groups
            if group.is_cut and not group.is_plain
        }
        self._averages: dict[Slot, int] = {}
        self.offer_gradients(self.groups)
        self._publishing: dict[ShardGroup, int] = {}
        self._offer_publishing(self.groups)

    def offer_gradients(self, groups: Iterable[ShardGroup]) -> None:
        """Ranks may ask for averaged gradients of these, each for itself."""
        for slot in (slot for group in groups for slot in group.slots):
            if slot.gradient is not None and slot.gradient.is_spread:
                serve = partial(self._serve_gradient, slot)
                self._averages[slot] = self.rendezvous.enroll(f"the gradient of {slot.name}", serve)

    def _offer_publishing(self, groups: Iterable[ShardGroup]) -> None:
        for group in groups:
            if group.is_cut and group.places.optimizer != group.places.gathered:
                self._publishing[group] = self.rendezvous.enroll(f"publish {group.name}", partial(self._publish, group))

    def add(self, groups: Sequence[ShardGroup], trained: Iterable[ShardGroup]) -> None:
        """New groups, which are plain; and all that train since the others."""
        self.groups.extend(groups)
        for group in groups:
            group.note_versions()
        self._offer_publishing(groups)
        self.offer_gradients(trained)

    # -- steps that have been postponed

    def catch_up(self, group: ShardGroup) -> None:
        """What is there in full is not behind any more. A collective where ranks own parts of it."""
        if not (group.is_behind or group.needs_all):
            return
        if group in self._publishing and not group.is_arriving:
            self.rendezvous.call(self._publishing[group])
        else:
            self._publish(group)

    def catch_up_all(self) -> None:
        """No step is postponed any longer."""
        # In the order of forward: groups of whole models are made last first.
        for group in self.groups if self.cache.units else reversed(self.groups):
            self.catch_up(group)
            group.catch_up()

    def _publish(self, group: ShardGroup, keep: bool = True) -> None:
        with no_interception():
            group.catch_up()
            publish([group])
            if group.is_plain:
                self._interception.show(group)
                group.note_versions()

    # -- whole values

    def _serve(self, group: ShardGroup, keep: bool) -> None:
        if keep:
            self._served = self.gather(group, group.master)
        else:
            group.pass_by(group.master, "gather master")

    @staticmethod
    def gather(group: ShardGroup, shard: Array, purpose: str = "gather master") -> Tensor:
        """The full array ``(N * S,)`` of which ranks have a shard each. A collective."""
        setting = group.setting
        full = setting.ledger.allocate(Category.GATHERED, group.layout.numel, shard.dtype, group.places.gathered)
        for gather in group.all_gather(full, shard, purpose):
            gather.wait()
        return full

    def declared(self, group: ShardGroup) -> Tensor:
        """All values of a group in the declared dtype, flat ``(N * S,)``, not to be written to. A collective, unless
        they rest here in full."""
        self.catch_up(group)
        if not group.is_cut:
            return group.master.read().to(group.places.gathered.device)
        if group.full_param is not None and group.stays_full and not group.kind.is_cast:
            return group.full_param
        if group not in self._numbers:  # nobody reads them but all ranks together
            return self.gather(group, group.master)
        self.rendezvous.call(self._numbers[group])
        full, self._served = self._served, None
        assert full is not None
        return full

    def gather_old(self, group: ShardGroup, shard: Array) -> Tensor:
        """The full array as it was when `shard` was owned_param. A collective."""
        return self.gather(group, shard, "gather for backward")

    # -- parameters

    def lend(self, slot: Slot) -> Lent:
        group = slot.group
        if group.is_lost:
            raise RuntimeError(
                f"Parameter {slot.name!r} cannot be read: training ended with an error, and its values are spread over "
                "the ranks. Load the latest checkpoint into a new model; to have one of the moment that a run fails, "
                "add Lightning's OnExceptionCheckpoint callback."
            )
        self.catch_up(group)
        if group.upcasts or group.stays_full:
            values = self._lend_declared(slot) if group.upcasts else slot.parameter
            return Lent(slot.parameter, values, _keep_until_boundary)
        unit = self._units[group]
        self.rendezvous.use(unit)
        self.cache.pin(unit)
        # Activation checkpointing counts what is saved, and layers that it computes again come here where their first
        # forward did not: it must see parameters both times. What it keeps of them it lets go of in the same backward.
        notes = not self.saved.is_inside_others
        recomputes = not notes and torch._C._current_graph_task_id() != -1
        if notes and not self.saved.push():
            self.hold(unit)
        return Lent(slot.parameter, slot.parameter, lambda *_: self._end_call(unit, notes, recomputes))

    def _lend_declared(self, slot: Slot) -> Tensor:
        view = slot.view(self._borrow_declared(slot.group))
        if not (slot.parameter.requires_grad and torch.is_grad_enabled()):
            return view
        with no_interception():
            return AsDeclared.apply(slot.parameter, view)

    def _borrow_declared(self, group: ShardGroup) -> Tensor:
        if group not in self._declared:
            again = self._in_blocks.get(group)
            self._declared[group] = self.declared(group) if again is None else again
        # Where nothing is gathered in backward, ranks do not come together in its middle: who recomputes finds there
        # what its forward has read.
        if group.stays_full and torch.is_grad_enabled() and self.saved.is_inside_others:
            self._in_blocks[group] = self._declared[group]
        return self._declared[group]

    def _end_call(self, unit: Unit, notes: bool, recomputes: bool) -> None:
        """Ends a loan to one call, unless its result is a view."""
        if notes:
            self.saved.pop()
        if unit.is_shared and not recomputes:
            self.hold(unit)
        self.cache.unpin(unit)

    def hold(self, unit: Unit) -> None:
        """Somebody has a view of the values, or will look for them where they are now: they stay until the boundary."""
        if unit not in self._pinned:
            self._pinned[unit] = None
            self.cache.pin(unit)

    def is_lent(self, group: ShardGroup) -> bool:
        """Whether somebody reads, and may have edited, a copy of the values in the declared dtype."""
        return group in self._declared

    @contextmanager
    def all_of(self, groups: Collection[ShardGroup], *, write: bool) -> Iterator[None]:
        """The values of all these are here; edits inside, the same on every rank, are kept if `write`. A collective."""
        self.settle()
        for group in groups:
            if group.upcasts:
                self._borrow_declared(group)
            elif not group.stays_full:
                self.rendezvous.use(self._units[group])
                self.hold(self._units[group])
        try:
            yield
        finally:
            for group in () if write else groups:  # without a look at what was edited
                self._declared.pop(group, None)
                unit = self._units.get(group)
                if unit in self._pinned:
                    del self._pinned[unit]
                    self.cache.unpin(unit, keeps_edits=False)
            self.settle()

    def load(self, slot: Slot, source: Stored) -> None:
        self._noted[slot] = source

    def read_noted(self) -> None:
        """Reads what this rank steps into the masters; all ranks must `publish` then."""
        noted, self._noted = self._noted, {}
        with torch.no_grad():
            for slot, source in noted.items():
                extent = slot.local.box.extent(source.name, slot.piece.start, slot.piece.stop)
                with slot.group.master.edit(slot.piece.in_shard) as piece:
                    source.read(extent, piece)
            for group in {slot.group for slot in noted}:
                group.take_masters()

    # -- gradients

    def settle_gradients(self) -> None:
        self.rendezvous.settle_gradients()

    def lend_gradient(self, slot: Slot) -> Tensor:
        if slot in self._gradients:
            return self._gradients[slot]
        self.settle_gradients()  # nobody has asked the parameter, if it is shown plain
        self.rendezvous.call(self._averages[slot])  # one rank may look alone, until the step
        gradient, self._served = self._served, None
        assert gradient is not None
        return gradient

    def _serve_gradient(self, slot: Slot, keep: bool) -> None:
        assert slot.gradient is not None
        with no_interception(), torch.no_grad():
            gradient = slot.gradient.gather(slot)
        if keep:
            self._served = gradient

    def take_gradient(self, slot: Slot, gradient: Tensor, *, is_visible: bool) -> None:
        assert slot.gradient is not None
        slot.gradient.write(slot, gradient)
        if is_visible:
            self._gradients[slot] = gradient

    def take_back_gradients(self) -> None:
        """Ends all loans of gradients, with what was edited through views of them."""
        for slot, gradient in self._gradients.items():
            if slot.parameter.grad is not None:
                self.take_gradient(slot, gradient, is_visible=False)
        self._gradients.clear()

    # -- boundaries

    def settle_in_pass(self) -> None:
        """`settle` in the middle of a forward: its backward is still to come."""
        in_blocks = dict(self._in_blocks)
        self.settle()
        self._in_blocks = in_blocks

    def settle(self) -> None:
        """Ends all loans, with the edits that were made meanwhile."""
        with torch.no_grad(), no_interception():
            self.take_back_gradients()
            for group in self.groups:
                if group.is_behind:
                    continue
                if group.is_plain and group.rest.master is not group.rest.owned_param:
                    group.keep_edits()
                    group.note_versions()
                elif group.is_plain:
                    group.adopt_assigned()
            for group, full in self._declared.items():
                if group in self._units and self._units[group].is_gathered:
                    self._units[group].wait()  # what is under way would undo the edit
                group.take_edits(full)
            self._declared.clear()
            self._in_blocks.clear()
            for unit in self._pinned:
                for group in unit.groups:
                    if not group.upcasts and group.full_param is not None:
                        group.adopt_assigned()
                        group.take_edits(group.full_param)
                self.cache.unpin(unit)
            self._pinned.clear()


def _told_of(group: ShardGroup) -> str:
    """For messages: its parameters."""
    first, *others = (slot.name for slot in group.slots)
    return f"{first} and {len(others)} more parameters" if others else first


def _keep_until_boundary(*_: object) -> None:
    """Ends a call's loan: `settle` looks at what was edited."""
