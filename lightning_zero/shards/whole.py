"""Steps on whole tensors, for optimizers that look at more than each element (Muon, LAMB, Adafactor, ...).

Values and gradients rest in shards as ever. For the step, one rank gets all of a tensor: the ranks send it their pieces
of gradient and value, it steps, and sends the new values back, so that the arithmetic of a tensor is done once in the
world. Its state rests whole on that rank. What travels is 3/N of the parameters per rank, beside the 2 or 3 of a step.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.layout import fill
from lightning_zero.shards.setting import Setting
from lightning_zero.shards.slot import Slot
from lightning_zero.shards.window import Staging, Window
from lightning_zero.tiers.ledger import Category, Place, Tier


class Imbalance(NamedTuple):
    """How much more than the mean of all ranks the one with most has."""

    nbytes: float  # of values and state
    work: float  # where ranks wait for each other after each round


def deal(optimizers: Iterable[Sequence[Slot]], setting: Setting, *, is_lazy: bool) -> Imbalance:
    """Chooses the rank that steps each tensor of each optimizer: the largest first, to whom has least so far, in bytes
    of all optimizers or in work of this one, whichever is more. `is_lazy`: see `rounds`."""
    optimizers, ranks = list(optimizers), range(setting.mesh.shard.size)
    nbytes, waited, worked = [0] * len(ranks), 0, 0
    most_bytes = max(1, sum(_nbytes_of(slot) for slots in optimizers for slot in slots))
    for slots in optimizers:
        work, most_work = [0] * len(ranks), max(1, sum(map(_work_of, slots)))
        for slot in sorted(slots, key=lambda slot: -max(_nbytes_of(slot) / most_bytes, _work_of(slot) / most_work)):

            def filled(rank: int, slot: Slot = slot, work: list[int] = work, most: int = most_work) -> Any:
                shares = (nbytes[rank] + _nbytes_of(slot)) / most_bytes, (work[rank] + _work_of(slot)) / most
                return max(shares), sum(shares)

            slot.stepper = min(ranks, key=filled)
            nbytes[slot.stepper] += _nbytes_of(slot)
            work[slot.stepper] += _work_of(slot)
        worked += sum(work)
        for run in rounds(slots, setting, is_lazy=is_lazy):
            of_ranks: Counter[int | None] = Counter()
            for slot in run:
                of_ranks[slot.stepper] += _work_of(slot)
            waited += max(of_ranks.values())
    return Imbalance(max(nbytes) * len(ranks) / most_bytes - 1, waited * len(ranks) / max(1, worked) - 1)


def rounds(slots: Iterable[Slot], setting: Setting, *, is_lazy: bool) -> list[Sequence[Slot]]:
    """Tensors that are stepped at a time, of one dtype and tier: of each rank about a bucket of what it steps. Where
    steps are taken when their values are wanted (`is_lazy`), tensors of one group, which are wanted together."""
    alike: dict[tuple[torch.dtype, Place, ShardGroup | None], dict[int | None, list[Slot]]] = {}
    for slot in slots:
        group = slot.group
        key = group.kind.declared, group.places.optimizer, group if is_lazy and may_wait(group) else None
        of_ranks = alike.setdefault(key, {})
        of_ranks.setdefault(slot.stepper, []).append(slot)
    found: list[Sequence[Slot]] = []
    for of_ranks in alike.values():
        filled = [
            [some[run.start : run.stop] for run in fill([_nbytes_of(slot) for slot in some], setting.bucket_bytes)]
            for some in of_ranks.values()
        ]
        found += [[*itertools.chain(*runs)] for runs in itertools.zip_longest(*filled, fillvalue=[])]
    return found


def may_wait(group: ShardGroup) -> bool:
    """Whether a step on whole tensors of it may be postponed: values and gradients wait in the host's memory where they
    are stepped. Of what rests on disk they would fill it."""
    places = group.places
    return places.optimizer != places.gathered and places.optimizer.tier is not Tier.DISK


def _nbytes_of(slot: Slot) -> int:
    return slot.numel * slot.group.kind.declared.itemsize


def _work_of(slot: Slot) -> int:
    """What a step costs more or less, whatever optimizer it is of: that of a product of a matrix with its smaller side
    (Newton-Schulz, a preconditioner), or of elements one by one."""
    rows = slot.shape[0] if len(slot.shape) > 1 else 1
    return slot.numel * min(rows, slot.numel // max(1, rows)) if rows > 1 else slot.numel


@final
class WholeWindow(Window):
    """Parameters of one round, each stepped whole by its `Slot.stepper`.

    All ranks take part in two exchanges: gradients and values to the stepper, new values back. What is between them the
    stepper does alone. A `late` window, of one group, makes the first exchange in the user's call of `step`; the
    arithmetic is done when somebody looks at the values or at this rank's state, and the second exchange when ranks
    want the values, which they do together. In the middle of a backward neither could be made: there ranks wait for
    each other's gradients and values, in orders of their own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        slots: Sequence[Slot],
        staging: Staging,
        *,
        late: bool = False,
        with_gradients: bool = True,
    ) -> None:
        super().__init__(optimizer, slots, staging, late=late)
        self._with_gradients = with_gradients
        self._brought: dict[Slot, list[Tensor]] = {}  # value, and gradient, of what is stepped here

    def postpone(self, step: Callable[[], None]) -> None:
        """`step`, of this window, is taken when it is wanted. A collective."""
        self.bring()
        (group,) = {slot.group for slot in self.slots}
        group.postpone(step)
        group.postpone(self._send_back, needs_all=True)

    def enter(self, *, is_all: bool, may_fuse: bool) -> None:
        self._await_reads()
        if not self._late:
            self.bring()
        super().enter(is_all=is_all, may_fuse=may_fuse)

    def bring(self) -> None:
        """Gradients and values are where they are stepped."""
        arrived = self._exchange(to_stepper=True)
        for slot in (slot for slot in self.slots if slot.steps_any):
            master, layout, ledger = slot.group.rest.master, slot.group.layout, slot.group.setting.ledger
            brought = [
                ledger.allocate(Category.GATHERED, slot.numel, master.dtype, master.place)
                for _ in range(1 + self._with_gradients)
            ]
            for rank in layout.owners(slot.index):
                piece = layout.piece(slot.index, rank)
                for whole in brought:
                    whole[piece.start : piece.stop] = arrived[rank].take(piece.numel)
            self._brought[slot] = [whole.view(slot.shape) for whole in brought]

    def _stepped(self, slot: Slot, shown: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if slot in self._brought:
            value, *grad = self._brought[slot]
            return value, grad[0] if grad else None
        master = slot.group.rest.master
        return torch.empty(0, dtype=master.dtype, device=master.place.device), None

    def put_values(self) -> None:
        """The new values go back to the ranks that own them, and then where they rest; of a late window they wait."""
        if not self._late:
            self._send_back()

    def _send_back(self) -> None:
        arrived = self._exchange(to_stepper=False)
        for slot in self.slots:
            assert slot.stepper is not None
            values, staged = arrived[slot.stepper].take(slot.piece.numel), self._staged.get(slot)
            if staged is None or staged.master is None:
                slot.group.rest.master.write(slot.piece.in_shard, values)
            else:
                staged.master.copy_(values)
        super().put_values()
        self._brought = {}

    def _exchange(self, *, to_stepper: bool) -> "list[_Arrived]":
        """Sends this rank's pieces, value and gradient, to the ranks that step them; or what it has stepped to those
        that own pieces of it. Returns what has come, by rank."""
        group = self.slots[0].group
        comm, device, dtype = group.comm, group.places.gathered.device, group.rest.master.dtype
        nothing = torch.empty(0, dtype=dtype, device=device)
        parts: list[list[Tensor]] = [[nothing] for _ in range(comm.size)]
        expected = [0] * comm.size  # elements
        for slot in self.slots:
            assert slot.stepper is not None
            owners, layout = slot.group.layout.owners(slot.index), slot.group.layout
            theirs = {rank: layout.piece(slot.index, rank) for rank in owners} if slot.steps_any else {}
            if to_stepper:
                parts[slot.stepper] += self._value_and_gradient(slot) if slot.piece.numel else []
            else:
                expected[slot.stepper] += slot.piece.numel
            for rank, piece in theirs.items():
                if to_stepper:
                    expected[rank] += piece.numel * (1 + self._with_gradients)
                else:
                    parts[rank].append(self._brought[slot][0].view(-1)[piece.start : piece.stop])
        sent = [torch.cat([part.to(device) for part in some]) for some in parts]
        received = [torch.empty(numel, dtype=dtype, device=device) for numel in expected]
        comm.all_to_all(received, sent, f"whole tensors from {self.slots[0].name}")
        return [_Arrived(tensor) for tensor in received]

    def _value_and_gradient(self, slot: Slot) -> list[Tensor]:
        """What this rank owns of them; of the gradient, where it is wanted."""
        assert slot.gradient is not None
        staged = self._staged.get(slot)
        value = grad = None
        if staged is not None:
            value, grad = staged.master, staged.grad
        value = slot.group.rest.master.read(slot.piece.in_shard) if value is None else value
        if not self._with_gradients:
            return [value]
        grad = slot.gradient.piece(slot) if grad is None else grad
        return [value, grad.view(-1).to(value.device, value.dtype)]


class _Arrived:
    """What has come from a rank, taken piece by piece."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._taken = 0

    def take(self, numel: int) -> Tensor:
        self._taken += numel
        return self._values[self._taken - numel : self._taken]
