"""`Staged`: what is in memory only while it is stepped, in rooms of a `StagingPool`.

That is what rests on disk, and state that rests in a narrower dtype than it is stepped in. What rests on disk is read
before its step and written after it, while other windows are stepped. So three windows are in memory at a time: one is
read, one is stepped, one is written.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.device import HOST
from lightning_zero.shards.gradient import averaged_of
from lightning_zero.shards.moment import state_of
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.tiers.alignment import ALIGNMENT_BYTES, round_up
from lightning_zero.tiers.array import ALL, Array, OnDisk, empty
from lightning_zero.tiers.composed import is_composed
from lightning_zero.tiers.disk import Move
from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier


class StateElsewhere(Tensor):
    """A tensor of optimizer state whose values rest on disk, or in a narrower dtype than its own; see `views.state`."""

    array: Array

    def keep_edits(self) -> None:
        """Writes edits that were made through views of the values to where the values rest."""


MakeResting = Callable[[Array, tuple[int, ...], torch.dtype], StateElsewhere]  # given array, shape, dtype


@final
class StagingPool:
    """Rooms in host memory for windows that are staged. They are used again, not allocated anew."""

    def __init__(self, ledger: Ledger, pinned: bool) -> None:
        self._ledger = ledger
        self._place = Place(HOST, Tier.HOST, pinned)
        self._free: list[Tensor] = []
        self._nbytes = 0

    def take(self, nbytes: int) -> Tensor:
        if nbytes > self._nbytes:  # all rooms have the size of the largest window so far
            self._nbytes = nbytes
            self._free.clear()
        if self._free:
            return self._free.pop()
        return self._ledger.allocate(Category.BUCKET, self._nbytes, torch.uint8, self._place)

    def give_back(self, room: Tensor) -> None:
        if room.numel() == self._nbytes:
            self._free.append(room)


@dataclass
class StagedTensors:
    """The tensors of a slot that are in memory only while it is stepped."""

    master: Tensor | None  # None where it is stepped where it rests
    grad: Tensor | None
    state: dict[str, Tensor]
    narrow: dict[str, Tensor]  # the state as it is on disk, where that is narrower
    resting: dict[str, StateElsewhere]  # what stands for the state between steps


NOT_STAGED = StagedTensors(None, None, {}, {}, {})


@final
class Staged:
    """What is staged of the slots of a window. It is false if nothing is.

    The gradients of a `late` window are read from where they rest, whatever becomes of `p.grad` meanwhile.
    """

    def __init__(self, optimizer: Optimizer, slots: Sequence[Slot], pool: StagingPool, *, late: bool) -> None:
        self.slots = slots
        self.tensors: dict[Slot, StagedTensors] = {}  # while they are in memory
        self._optimizer = optimizer
        self._pool = pool
        self._is_late = late
        self._room: Tensor | None = None
        self._taken = 0  # bytes of the room
        self._moves: list[Move] = []  # from or to the disk, which begin together
        self._reads: list[Future[None]] = []
        self._writes: list[Future[None]] = []

    def __bool__(self) -> bool:
        """Whether anything is stepped elsewhere, or in another dtype, than it rests."""
        return self.is_on_disk or any(slot.group.places.state_dtype is not None for slot in self.slots)

    @property
    def is_on_disk(self) -> bool:
        """Whether the window rests on disk, all of which is staged; otherwise only state is."""
        return isinstance(self.slots[0].group.master, OnDisk) if self.slots else False

    @property
    def is_begun(self) -> bool:
        return self._room is not None

    # -- to memory

    def begin(self) -> None:
        """Takes room for what is staged, and starts to read what rests on disk."""
        if self.is_begun or not self:
            return
        with no_interception():
            resting = {slot: self._state_of(slot) for slot in self.slots}
            self._room = self._pool.take(sum(self._bytes_of(slot, resting[slot]) for slot in self.slots))
            for slot in self.slots:
                part, gradient = slot.piece.in_shard, self._gradient_of(slot)
                state = {name: self._take(one.numel(), one.dtype) for name, one in resting[slot].items()}
                self.tensors[slot] = StagedTensors(
                    master=self._read(slot.group.master, part) if self.is_on_disk else None,
                    grad=None if gradient is None else self._read(gradient, part),
                    state=state,
                    narrow={name: self._bring(one, state[name]) for name, one in resting[slot].items()},
                    resting=resting[slot],
                )
            self._begin_moves(writes=False)

    def _state_of(self, slot: Slot) -> dict[str, StateElsewhere]:
        state = state_of(self._optimizer, slot.parameter)
        found = {name: value for name, value in state.items() if isinstance(value, StateElsewhere)}
        for value in found.values():
            value.keep_edits()
        return found

    def _bytes_of(self, slot: Slot, resting: dict[str, StateElsewhere]) -> int:
        """Bytes of the room that `begin` takes for a slot."""
        sizes = [one.numel() * one.dtype.itemsize for one in resting.values()]
        if self.is_on_disk:
            narrow = [one for one in resting.values() if one.array.dtype != one.dtype]
            sizes += [one.numel() * one.array.dtype.itemsize for one in narrow]
            arrays = [slot.group.master, self._gradient_of(slot)]
            sizes += [slot.piece.numel * array.dtype.itemsize for array in arrays if array is not None]
        return sum(round_up(size, ALIGNMENT_BYTES) for size in sizes)

    def _gradient_of(self, slot: Slot) -> Array | None:
        """Returns the gradient that has to be read from disk; None where it is in memory, or there is none."""
        averaged = averaged_of(slot)
        has_any = self._is_late or slot.parameter.grad is not None
        return averaged.owned_grad if has_any and averaged.is_on_disk else None

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        assert self._room is not None
        nbytes = numel * dtype.itemsize
        values = self._room[self._taken : self._taken + nbytes].view(dtype)
        self._taken += round_up(nbytes, ALIGNMENT_BYTES)
        return values

    def _read(self, array: Array, part: slice, into: Tensor | None = None) -> Tensor:
        assert isinstance(array, OnDisk)
        start, stop, _ = part.indices(array.numel)
        values = self._take(stop - start, array.dtype) if into is None else into
        self._moves.append((array.offset_of(part), values))
        return values

    def _bring(self, resting: StateElsewhere, wide: Tensor) -> Tensor:
        """Brings state to `wide`, where it is stepped. Returns the tensor that is read into: `wide`, or a narrower one
        that `arrive` widens."""
        array = resting.array
        if isinstance(array, OnDisk):
            return self._read(array, ALL, wide if array.dtype == wide.dtype else None)
        return wide.copy_(array.read())

    def _begin_moves(self, *, writes: bool) -> None:
        """Begins what was collected, in one task: each has two threads wait for each other and for the interpreter."""
        moves, self._moves = self._moves, []
        if not moves:
            return
        disk = self.slots[0].group.places.optimizer.disk
        assert disk is not None
        if writes:
            self._writes.append(disk.begin_write(moves))
        else:
            self._reads.append(disk.begin_read(moves))

    def arrive(self) -> None:
        """Waits for what was read, and gives the optimizer its state."""
        for read in self._reads:
            read.result()
        self._reads.clear()
        for slot, staged in self.tensors.items():
            for name, values in staged.state.items():
                if staged.narrow[name] is not values:
                    values.copy_(staged.narrow[name])
                state_of(self._optimizer, slot.parameter)[name] = values.view(slot.state_shape)

    # -- back to where it rests

    def put_state(self, rest: MakeResting, is_cut: Callable[[str], bool]) -> None:
        """Writes the state for which `_may_rest` to where it rests. `is_cut` tells by its name whether state is cut as
        its parameter is, and `rest` makes the tensor that stands for it between steps."""
        for slot, staged in self.tensors.items():
            places, ledger = slot.group.places, slot.group.setting.ledger
            for name, values in state_of(self._optimizer, slot.parameter).items():
                if not isinstance(values, Tensor) or not _may_rest(slot, values, is_cut(name)):
                    continue
                resting = staged.resting.get(name)
                if resting is None or resting.dtype != values.dtype:
                    narrow = places.state_dtype if values.is_floating_point() else None
                    dtype = narrow or values.dtype
                    array = empty(Category.OPTIMIZER_STATE, values.numel(), dtype, places.optimizer, ledger)
                    resting = rest(array, tuple(values.shape), values.dtype)
                self._write(resting.array, ALL, values.reshape(-1), staged.narrow.get(name))
                staged.resting[name] = resting
        self._begin_moves(writes=True)

    def put_masters(self) -> None:
        """Writes the new values to where masters and parameters rest."""
        masters = {slot: staged.master for slot, staged in self.tensors.items() if staged.master is not None}
        for slot, master in masters.items():
            self._write(slot.group.master, slot.piece.in_shard, master)
        self._begin_moves(writes=True)
        for slot, master in masters.items():  # while those are written
            if slot.group.owned_param is not slot.group.master:
                slot.group.owned_param.write(slot.piece.in_shard, master)

    def _write(self, array: Array, part: slice, values: Tensor, narrow: Tensor | None = None) -> None:
        """Has values written when moves begin; by way of `narrow`, if given, where the array is narrower than they
        are."""
        if not isinstance(array, OnDisk):
            array.write(part, values)
            return
        if values.dtype != array.dtype:
            values = values.to(array.dtype) if narrow is None else narrow.copy_(values)
        array.note_write()
        self._moves.append((array.offset_of(part), values))

    def unstage(self) -> None:
        """Lets go of what was staged: in the optimizer's state, what stands for it takes its place again."""
        for slot, staged in self.tensors.items():
            state_of(self._optimizer, slot.parameter).update(staged.resting)
        self._moves.clear()  # of a step that has failed before they began
        self.tensors.clear()

    def finish(self) -> None:
        """Waits until what was stepped is written, and gives the room back."""
        for write in self._writes:
            write.result()
        self._writes.clear()
        if self._room is not None:
            self._pool.give_back(self._room)
            self._room = None


def _may_rest(slot: Slot, values: Tensor, is_cut: bool) -> bool:
    """Whether a state tensor goes to the tier and the dtype that offloading asks for. It does if it is as large as the
    parameter and cut as it is, except for scalars. For whole tensors the shape alone decides: a rank may step too few
    of them to tell by the name, and how many it steps must not decide what is rounded."""
    is_as_large = values.numel() == slot.piece.numel if slot.stepper is None else values.shape == slot.shape
    is_any = bool(slot.shape) and values.numel() > 0
    return is_any and is_as_large and (is_cut or slot.stepper is not None) and not is_composed(values)
