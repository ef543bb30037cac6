"""Steps on whole tensors, for optimizers that look at more than each element (Muon, LAMB, Adafactor, ...).

Values and gradients rest in shards as ever. For the step, one rank gets all of a tensor: the ranks send it their pieces
of gradient and value, it steps, and sends the new values back, so that the arithmetic of a tensor is done once in the
world. Its state rests whole on that rank. What travels is 3/N of the parameters per rank, beside the 2 or 3 of a step.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.shards.group import Setting, Slot
from lightning_zero.shards.layout import fill
from lightning_zero.shards.window import Rest, Staging, Window
from lightning_zero.tiers.ledger import Place


def rounds(slots: Iterable[Slot], setting: Setting) -> list[Sequence[Slot]]:
    """Tensors that are stepped at a time, of one dtype and tier: about a bucket on each rank."""
    alike: dict[tuple[torch.dtype, Place], list[Slot]] = defaultdict(list)
    for slot in slots:
        alike[slot.group.kind.declared, slot.group.places.optimizer].append(slot)
    found: list[Sequence[Slot]] = []
    for (dtype, _), some in alike.items():
        runs = fill([slot.numel * dtype.itemsize for slot in some], setting.bucket_bytes * setting.mesh.shard.size)
        found += [some[run.start : run.stop] for run in runs]
    return found


def deal(slots: Iterable[Slot], setting: Setting) -> float:
    """Chooses the rank that steps each tensor: in every round the largest first, to whom has least so far. Returns how
    much more than the mean the rank with most has, of all elements."""
    loads = [(0, rank) for rank in range(setting.mesh.shard.size)]
    for run in rounds(slots, setting):
        for slot in sorted(run, key=lambda slot: -slot.numel):
            load, slot.stepper = heapq.heappop(loads)
            heapq.heappush(loads, (load + slot.numel, slot.stepper))
    total = sum(load for load, _ in loads)
    return max(loads)[0] * len(loads) / total - 1 if total else 0.0


@final
class WholeWindow(Window):
    """Parameters of one round, each stepped whole by its `Slot.stepper`; all ranks step at the same time."""

    may_be_late = False

    def __init__(self, optimizer: Optimizer, slots: Sequence[Slot], staging: Staging) -> None:
        super().__init__(optimizer, slots, staging)
        self._brought: dict[Slot, tuple[Tensor, Tensor]] | None = None  # value and gradient of what is stepped here

    @property
    def is_begun(self) -> bool:
        return self._brought is not None

    def begin(self) -> None:
        """Brings gradients and values to where they are stepped."""
        if self._brought is not None:
            return
        self._brought = {}
        arrived = _exchange(self.slots, [_value_and_gradient(slot) for slot in self.slots], to_stepper=True)
        for slot in (slot for slot in self.slots if slot.steps_any):
            master, layout = slot.group.rest.master, slot.group.layout
            value, grad = (torch.empty(slot.numel, dtype=master.dtype, device=master.place.device) for _ in range(2))
            for rank, theirs in enumerate(arrived):
                piece = layout.piece(slot.index, rank)
                for whole in (value, grad):
                    whole[piece.start : piece.stop] = theirs.take(piece.numel)
            self._brought[slot] = (value.view(slot.shape), grad.view(slot.shape))

    def _stepped(self, slot: Slot, shown: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert self._brought is not None
        if slot in self._brought:
            return self._brought[slot]
        master = slot.group.rest.master
        return torch.empty(0, dtype=master.dtype, device=master.place.device), None

    def put(self, rest: Rest, is_cut: Callable[[str], bool]) -> None:
        """The new values go back to the ranks that own them."""
        assert self._brought is not None
        new = [[self._brought[slot][0].view(-1)] if slot.steps_any else [] for slot in self.slots]
        arrived = _exchange(self.slots, new, to_stepper=False)
        for slot in self.slots:
            assert slot.stepper is not None
            slot.group.rest.master.write(slot.piece.in_shard, arrived[slot.stepper].take(slot.piece.numel))
        for group in dict.fromkeys(slot.group for slot in self.slots):
            group.take_masters()

    def forget(self) -> None:
        super().forget()
        self._brought = {}


class _Arrived:
    """What has come from a rank, taken piece by piece."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._taken = 0

    def take(self, numel: int) -> Tensor:
        self._taken += numel
        return self._values[self._taken - numel : self._taken]


def _value_and_gradient(slot: Slot) -> list[Tensor]:
    """What this rank owns of them."""
    assert slot.gradient is not None
    value = slot.group.rest.master.read(slot.piece.in_shard)
    return [value, slot.gradient.piece(slot).view(-1).to(value.device, value.dtype)]


def _exchange(slots: Sequence[Slot], mine: Sequence[Sequence[Tensor]], *, to_stepper: bool) -> list[_Arrived]:
    """Sends pieces to the rank that steps each of `slots`, or what it has stepped to those that own pieces; `mine` is
    what this rank has of each: value and gradient, or the new value if it has stepped it."""
    group = slots[0].group
    comm, device, dtype = group.comm, group.places.gathered.device, group.rest.master.dtype
    nothing = torch.empty(0, dtype=dtype, device=device)
    sent: list[Tensor] = []
    received: list[Tensor] = []
    for rank in range(comm.size):
        theirs = [slot.group.layout.piece(slot.index, rank) for slot in slots]
        if to_stepper:
            parts = [part for slot, own in zip(slots, mine, strict=True) if slot.stepper == rank for part in own]
            numel = 2 * sum(piece.numel for slot, piece in zip(slots, theirs, strict=True) if slot.steps_any)
        else:
            parts = [own[0][piece.start : piece.stop] for own, piece in zip(mine, theirs, strict=True) if own]
            numel = sum(slot.piece.numel for slot in slots if slot.stepper == rank)
        sent.append(torch.cat([nothing, *(part.to(device) for part in parts)]))
        received.append(torch.empty(numel, dtype=dtype, device=device))
    comm.all_to_all(received, sent, f"whole tensors from {slots[0].name}")
    return [_Arrived(tensor) for tensor in received]
