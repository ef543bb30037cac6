"""Steps on whole tensors, for optimizers that look at more than each element (Muon, LAMB, Adafactor, ...).

Values and gradients rest in shards between steps. For the step, one rank gets all of a tensor: the other ranks send it
their pieces of gradient and value, it steps, and sends the new values back. So the arithmetic of a tensor is done once
in the world, and its state rests whole on that rank. In these two exchanges a rank sends 3/N of the parameters, beside
the 2 or 3 times the parameters that other collectives of a step send.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.shards.gradient import averaged_of
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.layout import Piece, fill
from lightning_zero.shards.setting import Setting
from lightning_zero.shards.slot import Slot
from lightning_zero.shards.staging import NOT_STAGED, StagingPool
from lightning_zero.shards.window import Window
from lightning_zero.tiers.ledger import Category, Place, Tier


class Imbalance(NamedTuple):
    """How much more the rank with most has than the mean of all ranks, as a fraction."""

    nbytes: float  # of values and state
    work: float  # where ranks wait for each other after each round


def deal(optimizers: Iterable[Sequence[Slot]], setting: Setting, *, is_lazy: bool) -> Imbalance:
    """Chooses the rank that steps each tensor of each optimizer.

    The largest tensors are dealt first. Each goes to the rank that has least so far, of bytes of all optimizers or of
    work of this optimizer, whichever is more. `is_lazy`: see `rounds`.
    """
    optimizers, ranks = list(optimizers), setting.mesh.shard.size
    nbytes, waited, worked = [0] * ranks, 0, 0
    most_bytes = max(1, sum(_nbytes_of(slot) for slots in optimizers for slot in slots))
    for slots in optimizers:
        _choose_steppers(slots, nbytes, most_bytes)
        worked += sum(map(_work_of, slots))
        for run in rounds(slots, setting, is_lazy=is_lazy):
            of_ranks: Counter[int | None] = Counter()
            for slot in run:
                of_ranks[slot.stepper] += _work_of(slot)
            waited += max(of_ranks.values())
    return Imbalance(max(nbytes) * ranks / most_bytes - 1, waited * ranks / max(1, worked) - 1)


def _choose_steppers(slots: Sequence[Slot], nbytes: list[int], most_bytes: int) -> None:
    """Deals the tensors of one optimizer. `nbytes` is what each rank has so far, and is added to."""
    work, most_work = [0] * len(nbytes), max(1, sum(map(_work_of, slots)))
    for slot in sorted(slots, key=lambda slot: -max(_nbytes_of(slot) / most_bytes, _work_of(slot) / most_work)):
        with_it = [
            ((of_bytes + _nbytes_of(slot)) / most_bytes, (of_work + _work_of(slot)) / most_work)
            for of_bytes, of_work in zip(nbytes, work, strict=True)
        ]
        slot.stepper = min(range(len(nbytes)), key=lambda rank: (max(with_it[rank]), sum(with_it[rank])))
        nbytes[slot.stepper] += _nbytes_of(slot)
        work[slot.stepper] += _work_of(slot)


def rounds(slots: Iterable[Slot], setting: Setting, *, is_lazy: bool) -> list[Sequence[Slot]]:
    """Divides tensors into rounds. A round has tensors of one dtype and tier, and about a bucket for each rank to step.
    With `is_lazy`, where steps may be postponed, it has tensors of one group, whose values are needed together."""
    alike: dict[tuple[torch.dtype, Place, ShardGroup | None], dict[int | None, list[Slot]]] = {}
    for slot in slots:
        group = slot.group
        key = group.kind.declared, group.places.optimizer, group if is_lazy and may_wait(group) else None
        alike.setdefault(key, {}).setdefault(slot.stepper, []).append(slot)
    found: list[Sequence[Slot]] = []
    for of_ranks in alike.values():
        filled = [
            [some[run.start : run.stop] for run in fill([_nbytes_of(slot) for slot in some], setting.bucket_bytes)]
            for some in of_ranks.values()
        ]
        found += [[*itertools.chain(*runs)] for runs in itertools.zip_longest(*filled, fillvalue=[])]
    return found


def may_wait(group: ShardGroup) -> bool:
    """Whether a step on whole tensors of the group may be postponed: values and gradients then wait in host memory,
    where they are stepped. Those of a group on disk would fill it."""
    places = group.places
    return places.optimizer != places.gathered and places.optimizer.tier is not Tier.DISK


def _nbytes_of(slot: Slot) -> int:
    return slot.numel * slot.group.kind.declared.itemsize


def _work_of(slot: Slot) -> int:
    """Estimates the cost of a step, for any optimizer: that of multiplying a matrix by its smaller side (Newton-Schulz,
    a preconditioner), and for other tensors their elements."""
    rows = slot.shape[0] if len(slot.shape) > 1 else 1
    return slot.numel * min(rows, slot.numel // max(1, rows)) if rows > 1 else slot.numel


@final
class WholeWindow(Window):
    """Parameters of one round, each stepped whole by its `Slot.stepper`.

    All ranks take part in two exchanges: gradients and values to the stepper, and new values back. Between them the
    stepper works alone. A `late` window, which has tensors of one group, makes the first exchange in the user's call of
    `step`. The stepper does the arithmetic when it needs the values or its state; the second exchange is made when
    ranks need the values, which they do together. Neither could be made in the middle of a backward: there ranks wait
    for each other's gradients and values, each in an order of its own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        slots: Sequence[Slot],
        pool: StagingPool,
        *,
        late: bool = False,
        with_gradients: bool = True,
    ) -> None:
        super().__init__(optimizer, slots, pool, late=late)
        self._with_gradients = with_gradients
        self._brought: dict[Slot, list[Tensor]] = {}  # value and gradient of what this rank steps

    def postpone(self, step: Callable[[], None]) -> None:
        """Brings tensors to their steppers; postpones `step` and the way back. Collective: call it on every rank."""
        self._bring_whole()
        (group,) = {slot.group for slot in self.slots}
        group.postpone(step)
        group.postpone(self._send_back, needs_all=True)

    def prepare(self) -> None:
        super().prepare()
        if not self.is_late:
            self._bring_whole()

    def _bring_whole(self) -> None:
        """Sends this rank's pieces, of value and gradient, to their steppers, and receives those that it steps."""
        sorts = ("value", "gradient") if self._with_gradients else ("value",)
        parts, numels = defaultdict[int, list[Tensor]](list), defaultdict[int, list[int]](list)
        for slot in self.slots:
            if slot.piece.numel:
                assert slot.stepper is not None
                parts[slot.stepper] += self._value_and_gradient(slot)
            for rank, piece in _stepped_pieces(slot):
                numels[rank] += [piece.numel for _ in sorts]
        arrived = self._exchange(parts, numels)
        del parts  # frees what was copied to be sent
        for slot in (slot for slot in self.slots if slot.steps_any):
            master, ledger = slot.group.master, slot.group.setting.ledger
            brought = [ledger.allocate(Category.GATHERED, slot.numel, master.dtype, master.place) for _ in sorts]
            for rank, piece in _stepped_pieces(slot):
                for whole in brought:
                    whole[piece.start : piece.stop] = next(arrived[rank])
            self._brought[slot] = [whole.view(slot.shape) for whole in brought]

    def _stepped(self, slot: Slot, shown: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if slot in self._brought:
            value, *grad = self._brought[slot]
            return value, grad[0] if grad else None
        master = slot.group.master
        nothing = torch.empty(0, dtype=master.dtype, device=master.place.device)
        return nothing, torch.empty_like(nothing) if self._with_gradients and self._steps(slot) else None

    def put_values(self) -> None:
        """Sends the new values to the ranks that own them. Those of a late window wait until all ranks need them."""
        if not self.is_late:
            self._send_back()

    def _send_back(self) -> None:
        parts, numels = defaultdict[int, list[Tensor]](list), defaultdict[int, list[int]](list)
        for slot in self.slots:
            assert slot.stepper is not None
            numels[slot.stepper].append(slot.piece.numel)
            for rank, piece in _stepped_pieces(slot):
                parts[rank].append(self._brought[slot][0].view(-1)[piece.start : piece.stop])
        arrived = self._exchange(parts, numels)
        for slot in self.slots:
            assert slot.stepper is not None
            values, master = next(arrived[slot.stepper]), self.staged.tensors.get(slot, NOT_STAGED).master
            if master is None:
                slot.group.master.write(slot.piece.in_shard, values)
            else:
                master.copy_(values)
        super().put_values()
        self._brought = {}

    def _exchange(self, parts: dict[int, list[Tensor]], numels: dict[int, list[int]]) -> list[Iterator[Tensor]]:
        """Sends flat `parts` to each rank, and receives parts of `numels` elements from each. Returns them by rank."""
        group = self.slots[0].group
        comm, device, dtype = group.comm, group.places.gathered.device, group.master.dtype
        nothing, ledger = torch.empty(0, dtype=dtype, device=device), group.setting.ledger
        sent = [torch.cat([nothing, *(part.to(device) for part in parts[rank])]) for rank in range(comm.size)]
        for tensor in sent:
            ledger.book_tensor(Category.GATHERED, tensor)
        needed = [sum(numels[rank]) for rank in range(comm.size)]
        received = [ledger.allocate(Category.GATHERED, numel, dtype, group.places.gathered) for numel in needed]
        comm.all_to_all(received, sent, f"whole tensors from {self.slots[0].name}")
        return [iter(received[rank].split(numels[rank])) for rank in range(comm.size)]

    def _value_and_gradient(self, slot: Slot) -> list[Tensor]:
        """Returns what this rank owns of a tensor, flat; the gradient only where it is needed."""
        staged = self.staged.tensors.get(slot, NOT_STAGED)
        value = slot.group.master.read(slot.piece.in_shard) if staged.master is None else staged.master
        if not self._with_gradients:
            return [value]
        grad = averaged_of(slot).piece(slot) if staged.grad is None else staged.grad
        return [value, grad.view(-1).to(value.device, value.dtype)]


def _stepped_pieces(slot: Slot) -> list[tuple[int, Piece]]:
    """Returns the pieces of a tensor that this rank steps, with the rank that owns each; none of other tensors."""
    layout = slot.group.layout
    return [(rank, layout.piece(slot.index, rank)) for rank in layout.owners(slot.index) if slot.steps_any]
