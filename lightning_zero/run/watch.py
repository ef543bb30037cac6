"""`Watch`: notices the edits that user code makes in values that it can reach: shown in parameters, or lent to it.

torch's count of edits tells most of them, and another address tells `p.data = t` (`Edits.are_made`). Where users
reach values past both, as through `p.data`, a fingerprint is taken before they can write there. Who owns the master of
what they have edited in parameters that always have their values takes it over at the next boundary (`keep_edits`).
"""

import math
from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor

from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.slot import no_interception

Fingerprint = tuple[int, int]


@final
class Watch:
    """Watches `groups`."""

    def __init__(self, groups: Iterable[ShardGroup]) -> None:
        self._plain: list[ShardGroup] = []  # of which users can always edit the parameters
        self._fingerprints: dict[ShardGroup, Fingerprint | None] = {}  # at the first look; None: edited since
        self.add(groups)

    def add(self, groups: Iterable[ShardGroup]) -> None:
        """Watches more groups. Plain ones show their latest values."""
        for group in groups:
            if group.is_plain:
                self._plain.append(group)
                group.edits.note_versions()

    # -- looks past versions, until the next boundary

    def look(self, group: ShardGroup) -> None:
        """Notes that users are about to reach the values that parameters show, if these are there."""
        if group.full_param is not None and not group.publish.is_due:
            with torch.no_grad(), no_interception():
                self.note(group, group.full_param)

    def note(self, group: ShardGroup, full: Tensor) -> None:
        """Notes that users can reach the values of a group in `full`."""
        if group not in self._fingerprints:
            self._fingerprints[group] = fingerprint_of(full)

    def note_edit(self, group: ShardGroup) -> None:
        """Notes that a call has edited values of a group, which nothing else tells."""
        self._fingerprints[group] = None

    def note_kept(self, group: ShardGroup, full: Tensor) -> None:
        """Notes that what has been edited in `full` is kept by now, though users can still reach it."""
        if group in self._fingerprints:
            self._fingerprints[group] = fingerprint_of(full)

    def tells_edit(self, group: ShardGroup, full: Tensor) -> bool:
        """Whether users have edited values that they have reached in `full`."""
        return group in self._fingerprints and self._fingerprints[group] != fingerprint_of(full)

    def forget(self, group: ShardGroup) -> None:
        """Forgets a look after which no edits are kept."""
        self._fingerprints.pop(group, None)

    def forget_all(self) -> None:
        """Forgets all looks, at a boundary."""
        self._fingerprints.clear()

    def keep_used(self, group: ShardGroup, first: Callable[[], None]) -> None:
        """Keeps edits of a unit's values, at the end of its use; calls `first` if there are any."""
        full, is_looked_at = group.full_param, group in self._fingerprints
        group.edits.keep(is_edited=is_looked_at and full is not None and self.tells_edit(group, full), first=first)
        if is_looked_at:
            self.forget(group)  # the next use may gather them into other memory

    # -- boundaries

    def keep_edits(self) -> None:
        """Keeps edits of parameters that always have their values, unless a step is to come that overwrites them."""
        for group in self._plain:
            self.keep_edits_of(group)

    def keep_edits_of(self, group: ShardGroup) -> None:
        """Does what `keep_edits` does, for one group."""
        if group.publish.is_due or not group.is_plain:
            return
        if group.is_apart:
            self._keep_edits_apart(group)
        else:
            group.edits.adopt_assigned()

    def _keep_edits_apart(self, group: ShardGroup) -> None:
        full = group.full_param
        assert full is not None
        group.edits.keep(is_edited=self.tells_edit(group, full))
        group.edits.note_versions()


def fingerprint_of(values: Tensor) -> Fingerprint:
    """Returns two numbers that tell whether values have been edited in any way, also past torch: sums of their bits."""
    bits = values.view(torch.int64)
    matrix = bits.view(-1, math.gcd(bits.numel(), 4096))
    first, second = (
        int((sums * torch.arange(1, sums.numel() + 1, device=sums.device)).sum())
        for sums in (matrix.sum(0), matrix.sum(1))
    )
    return first, second
