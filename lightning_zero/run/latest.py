"""`Latest`: has groups catch up with postponed steps before anything reads them, and reads whole groups."""

from collections.abc import Iterable
from functools import partial
from typing import final

import torch
from torch import Tensor

from lightning_zero.run.cache import UnitCache
from lightning_zero.run.journal import Journal
from lightning_zero.run.parameter import Interception
from lightning_zero.run.program import Cause
from lightning_zero.run.rendezvous import Rendezvous
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.slot import no_interception
from lightning_zero.tiers.array import Array
from lightning_zero.tiers.ledger import Category
from lightning_zero.torch_private import outside_transforms


@final
class Latest:
    """The latest values of the groups of an engine. Ranks that own parts of a group catch up with it, and read all of
    it, together: one that needs it alone is served by the others (`serving`)."""

    def __init__(
        self,
        groups: list[ShardGroup],
        cache: UnitCache,
        rendezvous: Rendezvous,
        interception: Interception,
        journal: Journal,
    ) -> None:
        self.groups = groups
        self._rendezvous = rendezvous
        self._journal = journal
        self._interception = interception
        self._is_forward = bool(cache.units)  # groups of a model without units are made in the order of backward
        self._calls = {
            group: rendezvous.serving.enroll(f"the all-gather of {names_of(group)}", partial(self._serve, group))
            for group in groups
            if group.is_cut and not group.is_plain
        }
        self._publishing: dict[ShardGroup, int] = {}
        self._enroll(groups)

    def _enroll(self, groups: Iterable[ShardGroup]) -> None:
        for group in groups:
            may_wait = group.places.optimizer != group.places.gathered or not group.is_plain
            if group.is_cut and may_wait and group not in self._publishing:
                serve = partial(self._serve_publishing, group)
                self._publishing[group] = self._rendezvous.serving.enroll(f"publish {group.name}", serve)

    def add(self, groups: Iterable[ShardGroup], trained: Iterable[ShardGroup]) -> None:
        """Adds new groups, whose parameters are shown plain. Those that have begun to train (`trained`) are postponed
        from now on where they are offloaded."""
        self.groups.extend(groups)
        self._enroll(trained)
        for group in groups:
            self._interception.show(group)

    @property
    def published(self) -> dict[int, ShardGroup]:
        """The groups that ranks catch up with together, by the number of the call."""
        return {number: group for group, number in self._publishing.items()}

    # -- postponed steps

    def catch_up(self, *groups: ShardGroup) -> None:
        """Takes the postponed steps of groups, and publishes their values. Collective where ranks own parts of them."""
        for group in groups:
            if not (group.publish.is_due or group.needs_all):
                continue
            with outside_transforms():  # of torch.func, which would make what ranks send its own tensors
                if group in self._publishing and not group.publish.is_arriving:
                    self._rendezvous.course.call(self._publishing[group])
                    continue
                # Its values are on their way already, or all of them are stepped on this rank.
                self._journal.note(Cause.READ, group)
                with no_interception():
                    group.catch_up()
                self._end_publish(group)

    def catch_up_all(self) -> None:
        """Takes all postponed steps of all groups, in the order in which forward needs them."""
        for group in self.groups if self._is_forward else reversed(self.groups):
            self.catch_up(group)
            group.catch_up()

    def _serve_publishing(self, group: ShardGroup, _: bool) -> None:
        """Publishes a group together with all ranks. A plan may have that done where nothing has been stepped since;
        then each rank has the values, unless they are on their way yet, and its user code may have edited them."""
        if group.publish.is_arriving:
            self._end_publish(group)
        if group.publish.is_due or group.needs_all or not group.stays_full:
            with no_interception():
                group.catch_up()
                with torch.no_grad():
                    group.publish.begin()
            self._end_publish(group)
        else:
            with torch.no_grad(), no_interception():
                group.pass_by(group.owned_param, "publish")

    def _end_publish(self, group: ShardGroup) -> None:
        """Waits for the values of other ranks, if they are on their way, and shows the latest ones."""
        with no_interception():
            with torch.no_grad():
                group.publish.end()
            if group.is_plain:
                self._interception.show(group)
                group.edits.note_versions()

    # -- whole values

    def declared(self, group: ShardGroup) -> Tensor:
        """Returns all values of a group in the declared dtype, ``(N * S,)``, not to be written to. Collective, unless
        they rest in full on this rank."""
        self.catch_up(group)
        group.catch_up()  # also where nothing is published after it
        if not group.is_cut:
            return group.master.read().to(group.places.gathered.device)
        if group.full_param is not None and group.stays_full and not group.kind.is_cast:
            return group.full_param
        if group not in self._calls:  # only all ranks together read them
            return self.full_array(group, group.master)
        return self._rendezvous.course.call(self._calls[group])

    def _serve(self, group: ShardGroup, keep: bool) -> Tensor | None:
        group.catch_up()
        if keep:
            return self.full_array(group, group.master)
        group.pass_by(group.master, "gather master")
        return None

    @staticmethod
    def full_array(group: ShardGroup, shard: Array, purpose: str = "gather master") -> Tensor:
        """Returns the full array ``(N * S,)`` of which each rank has a `shard`. Collective."""
        setting = group.setting
        full = setting.ledger.allocate(Category.GATHERED, group.layout.numel, shard.dtype, group.places.gathered)
        for gather in group.all_gather(full, shard, purpose):
            gather.wait()
        return full


def names_of(group: ShardGroup) -> str:
    """Names the parameters of a group, for messages."""
    first, *others = (slot.name for slot in group.slots)
    return f"{first} and {len(others)} more parameters" if others else first
