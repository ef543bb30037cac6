"""Values that are lent to user code, and what becomes of the edits that it makes in them.

Whoever reads a parameter that rests as something else borrows its values (`Access`). They go back at the next boundary:
before a forward, before a step. A rank may borrow alone, and so all ranks agree then on what was edited on any of them.
"""

from collections.abc import Sequence
from typing import final

import torch

from lightning_zero.group import publish
from lightning_zero.mesh import Mesh
from lightning_zero.parameter import Access
from lightning_zero.rendezvous import Rendezvous
from lightning_zero.stage import Partition


@final
class Loans:
    """What is lent of an engine's parameters.

    Args:
        accesses: to all groups.
        borrowed: those of them that are lent now; they enter themselves.
        partition: what rests as shards.
        mesh: the ranks.
        rendezvous: where they hear of each other's loans.
    """

    def __init__(
        self,
        accesses: Sequence[Access],
        borrowed: dict[Access, None],
        partition: Partition,
        mesh: Mesh,
        rendezvous: Rendezvous,
    ) -> None:
        self._accesses = accesses
        self._borrowed = borrowed
        self._partition = partition
        self._comm = mesh.shard
        self._rendezvous = rendezvous
        self._taken_back: dict[Access, bool] = {}  # since ranks last agreed on edits: whether it was edited here
        self._number = rendezvous.enroll("edits", self._share_edits) if partition.parameter else None

    def settle(self) -> None:
        """Takes back what is lent, with its edits. A collective, where there were loans."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for access in self._accesses:
                if not access.is_needed:  # the others' parameters can be reached only through a loan
                    access.group.adopt_assigned()
        self.take_back()
        self._rendezvous.meet()  # and hear of loans on other ranks
        if not self._partition.optimizer or not (self._taken_back or self._rendezvous.went_apart):
            return
        self._rendezvous.went_apart = False
        self._share_edits(settles=True)

    def settle_within_pass(self) -> None:
        """As `settle`; what rests as shards waits for the next boundary where ranks go apart."""
        self.take_back()
        if self._number is not None and not self._rendezvous.went_apart:
            self._rendezvous.want(self._number)

    def take_back(self) -> None:
        """Ends all loans of this rank; other ranks hear of edits when they next `settle`."""
        borrowed = list(self._borrowed)
        self._borrowed.clear()
        with torch.no_grad():
            for access in borrowed:
                self._taken_back[access] = access.take_back() or self._taken_back.get(access, False)

    def _share_edits(self, settles: bool) -> None:
        """Publishes what was edited on any rank, unless one of them does not settle now."""
        edits = [self._taken_back.get(access, False) for access in self._accesses]
        flags = torch.tensor([not settles, *edits], dtype=torch.uint8)
        must_wait, *anywhere = self._comm.all_reduce(flags, "edited parameters", "max").tolist()
        if must_wait:
            return
        self._taken_back.clear()
        groups = [access.group for access, is_edited in zip(self._accesses, anywhere, strict=True) if is_edited]
        for group in groups:
            group.release()  # what was gathered ahead of the edit is stale
            group.leave_to_graphs()
        with self._rendezvous.undisturbed():
            publish(groups)
