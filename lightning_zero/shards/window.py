"""`Window`: parameters of an optimizer that are stepped together, as the pieces that this rank owns.

What rests in memory is stepped where it is. What rests on disk is read before, and written behind, while other windows
are stepped; three windows are in memory at a time: one read, one stepped, one written.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.layout import round_up
from lightning_zero.shards.slot import Slot, no_interception, point_at_nothing
from lightning_zero.tiers.array import ALL, Array, OnDisk, empty
from lightning_zero.tiers.composed import is_composed
from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier

ALIGNMENT = 64  # bytes
FUSED = (SGD, Adagrad, Adam, AdamW)  # torch has a kernel for CPU tensors, which it takes only if it is asked to
FUSABLE = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


class StateElsewhere(Tensor):
    """A tensor of optimizer state that rests on disk, or in a narrower dtype than its own; see `views.state`."""

    array: Array

    def settle(self) -> None:
        """Edits that were made through views of the values are where they rest from here on."""


MakeResting = Callable[[Array, tuple[int, ...], torch.dtype], StateElsewhere]  # of an array, shape and dtype


@dataclass
class _Staged:
    """What is in memory of a slot, where it is stepped, and rests elsewhere or in another dtype."""

    master: Tensor | None  # None: stepped where it rests
    grad: Tensor | None
    state: dict[str, Tensor]
    narrow: dict[str, Tensor]  # of the state, as it is on disk where that is narrower
    resting: dict[str, StateElsewhere]  # what stands for the state while this is not stepped


class _Shown(NamedTuple):
    """A parameter as users see it, while it is its piece."""

    grad: Tensor | None
    kind: type[Parameter]  # plain, or that of a parameter whose values are elsewhere
    has_gradient: bool  # as a piece


@final
class Staging:
    """Room in host memory for what is staged there; it is used again, not allocated anew."""

    def __init__(self, ledger: Ledger, pinned: bool) -> None:
        self._ledger = ledger
        self._place = Place(torch.device("cpu"), Tier.HOST, pinned)
        self._free: list[Tensor] = []
        self._nbytes = 0

    def take(self, nbytes: int) -> Tensor:
        if nbytes > self._nbytes:  # rooms are of one size, that of the largest window there was
            self._nbytes = nbytes
            self._free.clear()
        if self._free:
            return self._free.pop()
        return self._ledger.allocate(Category.BUCKET, self._nbytes, torch.uint8, self._place)

    def give_back(self, room: Tensor) -> None:
        if room.numel() == self._nbytes:
            self._free.append(room)


class Window:
    """`slots` of an optimizer, all in one tier. With `late` they all have a gradient, where it is averaged, and what
    becomes of `p.grad` meanwhile does not matter."""

    def __init__(self, optimizer: Optimizer, slots: Sequence[Slot], staging: Staging, *, late: bool = False) -> None:
        self.slots = slots
        self._late = late
        self._optimizer = optimizer
        self._staging = staging
        self._room: Tensor | None = None
        self._taken = 0  # bytes of the room
        self._reads: list[Future[None]] = []
        self._writes: list[Future[None]] = []
        self._staged: dict[Slot, _Staged] = {}
        self._shown: dict[Slot, _Shown] = {}
        self._stand_ins: dict[Parameter, Parameter] = {}  # of parameters that are no plain tensors
        self._options: list[dict[str, Any]] = []  # that are not the user's while this is stepped, as they were

    @property
    def rests_on_disk(self) -> bool:
        return isinstance(self.slots[0].group.rest.master, OnDisk) if self.slots else False

    @property
    def is_late(self) -> bool:
        """Whether it is stepped when its values are wanted."""
        return self._late

    def postpone(self, step: Callable[[], None]) -> None:
        """`step`, of this window, is taken when it is wanted, by this rank alone."""
        self.slots[0].group.postpone(step)

    @property
    def is_begun(self) -> bool:
        return self._room is not None

    @property
    def is_staged(self) -> bool:
        """Whether it is stepped elsewhere, or in another dtype, than it rests."""
        return self.rests_on_disk or any(slot.group.places.state_dtype is not None for slot in self.slots)

    # -- staged

    def begin(self) -> None:
        """Starts to read what rests on disk, and has room for it."""
        if self.is_begun or not self.is_staged:
            return
        with no_interception():
            resting = {slot: self._state_of(slot) for slot in self.slots}
            self._room = self._staging.take(sum(self._bytes_of(slot, resting[slot]) for slot in self.slots))
            for slot in self.slots:
                part, gradient = slot.piece.in_shard, self._gradient_of(slot)
                state = {name: self._take(one.numel(), one.dtype) for name, one in resting[slot].items()}
                self._staged[slot] = _Staged(
                    master=self._read(slot.group.rest.master, part) if self.rests_on_disk else None,
                    grad=None if gradient is None else self._read(gradient, part),
                    state=state,
                    narrow={name: self._bring(one, state[name]) for name, one in resting[slot].items()},
                    resting=resting[slot],
                )

    def _state_of(self, slot: Slot) -> dict[str, StateElsewhere]:
        state = state_of(self._optimizer, slot.parameter)
        found = {name: value for name, value in state.items() if isinstance(value, StateElsewhere)}
        for value in found.values():
            value.settle()
        return found

    def _bytes_of(self, slot: Slot, resting: dict[str, StateElsewhere]) -> int:
        of_state, of_piece = [one.dtype for one in resting.values()], []
        if self.rests_on_disk:
            gradient = self._gradient_of(slot)
            of_piece = [slot.group.rest.master.dtype] + ([] if gradient is None else [gradient.dtype])
            of_state += [one.array.dtype for one in resting.values() if one.array.dtype != one.dtype]
        sizes = [slot.state_piece.numel * dtype.itemsize for dtype in of_state]
        sizes += [slot.piece.numel * dtype.itemsize for dtype in of_piece]
        return sum(round_up(size, ALIGNMENT) for size in sizes)

    def _gradient_of(self, slot: Slot) -> Array | None:
        """What is to be read of it; None where it is in memory, or there is none."""
        assert slot.gradient is not None
        has_any = self._late or slot.local.grad is not None
        return slot.gradient.owned_grad if has_any and slot.gradient.is_on_disk else None

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """So much of the room."""
        assert self._room is not None
        nbytes = numel * dtype.itemsize
        values = self._room[self._taken : self._taken + nbytes].view(dtype)
        self._taken += round_up(nbytes, ALIGNMENT)
        return values

    def _read(self, array: Array, part: slice, into: Tensor | None = None) -> Tensor:
        assert isinstance(array, OnDisk)
        start, stop, _ = part.indices(array.numel)
        values = self._take(stop - start, array.dtype) if into is None else into
        self._reads.append(array.disk.begin_read(array.at(part), values))
        return values

    def _bring(self, resting: StateElsewhere, wide: Tensor) -> Tensor:
        """State comes to where it is stepped, `wide`. Returns where it is as it rests, on disk: `wide` itself, or what
        is to be widened when it has been read."""
        array = resting.array
        if isinstance(array, OnDisk):
            return self._read(array, ALL, wide if array.dtype == wide.dtype else None)
        return wide.copy_(array.read())

    def finish(self) -> None:
        """What was stepped is on disk, and the room is somebody else's."""
        for write in self._writes:
            write.result()
        self._writes.clear()
        if self._room is not None:
            self._staging.give_back(self._room)
            self._room = None

    # -- as pieces

    def enter(self, *, is_all: bool, may_fuse: bool) -> None:
        """From here to `exit` every parameter is its piece; and unless this `is_all`, the optimizer's only ones."""
        self._await_reads()
        for slot, staged in self._staged.items():
            for name, values in staged.state.items():
                if staged.narrow[name] is not values:
                    values.copy_(staged.narrow[name])
                state_of(self._optimizer, slot.parameter)[name] = values.view(slot.state_shape)
        for slot in self.slots:
            if not is_its_piece(slot):
                self._show_piece(slot)
        self._stand_ins = {s.parameter: s.local.stepped for s in self.slots if s.local.stepped is not s.parameter}
        for parameter, stand_in in self._stand_ins.items():
            _move_state(self._optimizer, parameter, stand_in)
        wanted = {slot.parameter for slot in self.slots}
        for group in self._optimizer.param_groups:
            own = {"params": group["params"]}
            mine = own["params"] if is_all else [parameter for parameter in own["params"] if parameter in wanted]
            if self._stand_ins:
                mine = [self._stand_ins.get(parameter, parameter) for parameter in mine]
            if may_fuse and self._may_fuse(group):
                own["fused"], group["fused"] = group["fused"], True
            group["params"] = mine
            self._options.append(own)

    def _await_reads(self) -> None:
        for read in self._reads:
            read.result()
        self._reads.clear()

    def _show_piece(self, slot: Slot) -> None:
        parameter = slot.local.stepped
        with no_interception():
            shown = slot.local.grad
            piece, grad = self._stepped(slot, shown)
            self._shown[slot] = _Shown(shown, type(parameter), grad is not None)
            parameter.grad = None
            parameter.__class__ = Parameter
            parameter.data = piece
            set_grad_dtype(parameter, piece.dtype)
            parameter.grad = grad

    def _stepped(self, slot: Slot, shown: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the optimizer steps for a parameter, and its gradient."""
        staged, gradient = self._staged.get(slot), slot.gradient
        assert gradient is not None
        values = None if staged is None else staged.master
        piece = slot.stepped(slot.group.rest.master) if values is None else values.view(slot.stepped_shape)
        if not ((self._late or shown is not None) and slot.steps_any):
            return piece, None
        grad = None if staged is None else staged.grad
        if grad is None:
            grad = gradient.piece(slot) if gradient.travels else shown
        assert grad is not None
        return piece, grad.view(slot.stepped_shape).to(piece.device, piece.dtype)

    def _may_fuse(self, group: dict[str, Any]) -> bool:
        """Whether torch would step host tensors one by one, and does not have to."""
        fits = all(slot.group.kind.is_offloaded and slot.group.kind.declared in FUSABLE for slot in self.slots)
        return bool(self.slots) and fits and may_fuse(self._optimizer, group)

    def exit(self) -> None:
        """Back to the parameters that users see."""
        for group, own in zip(self._optimizer.param_groups, self._options, strict=True):
            group.update(own)
        self._options.clear()
        for parameter, stand_in in self._stand_ins.items():
            _move_state(self._optimizer, stand_in, parameter)
        cleared = {slot: slot.local.stepped.grad is None for slot, shown in self._shown.items() if shown.has_gradient}
        are_all_cleared = bool(cleared) and all(cleared.values())  # a rank has no gradient to clear without a piece
        for slot, shown in self._shown.items():
            is_cleared = cleared.get(slot, are_all_cleared)
            self._show_whole(slot, shown._replace(grad=None) if is_cleared else shown)

    def _show_whole(self, slot: Slot, shown: _Shown) -> None:
        parameter, full, gradient = slot.parameter, slot.group.full_param, slot.gradient
        assert gradient is not None
        with no_interception():
            if parameter in self._stand_ins:  # it has been as it is all the time
                slot.local.stepped.grad = None
                return
            parameter.grad = None
            if full is None:
                point_at_nothing(slot)
            else:
                parameter.data = slot.view(full)
            set_grad_dtype(parameter, gradient.dtype)
            parameter.grad = shown.grad
            parameter.__class__ = shown.kind

    def put(self, rest: MakeResting, is_cut: Callable[[str], bool]) -> None:
        """What has been stepped goes where it rests: of the state, what `is_cut` as the parameter is (see `_may_rest`).
        `rest` makes what stands for an array of it."""
        self.put_values()
        for slot, staged in self._staged.items():
            group, state = slot.group, state_of(self._optimizer, slot.parameter)
            for name, values in state.items():
                if isinstance(values, Tensor) and _may_rest(slot, values, is_cut(name)):
                    resting = staged.resting.get(name)
                    if resting is None or resting.dtype != values.dtype:
                        resting = rest(self._room_for(group, values), tuple(values.shape), values.dtype)
                    self._write(resting.array, ALL, values.reshape(-1), staged.narrow.get(name))
                    staged.resting[name] = resting

    def put_values(self) -> None:
        """The new values are where they rest."""
        if not self.rests_on_disk:
            for group, slots in by_group(self.slots).items():
                group.take_masters(slots)
        for slot, staged in self._staged.items():
            rest = slot.group.rest
            if staged.master is not None:
                self._write(rest.master, slot.piece.in_shard, staged.master)
                if rest.owned_param is not rest.master:
                    rest.owned_param.write(slot.piece.in_shard, staged.master)

    @staticmethod
    def _room_for(group: ShardGroup, values: Tensor) -> Array:
        """Where new state rests."""
        narrow = group.places.state_dtype if values.is_floating_point() else None
        return empty(
            Category.OPTIMIZER_STATE,
            values.numel(),
            narrow or values.dtype,
            group.places.optimizer,
            group.setting.ledger,
        )

    def _write(self, array: Array, part: slice, values: Tensor, narrow: Tensor | None = None) -> None:
        """Begins to write; by way of `narrow`, where the array is narrower than the values."""
        if not isinstance(array, OnDisk):
            array.write(part, values)
            return
        if values.dtype != array.dtype:
            values = values.to(array.dtype) if narrow is None else narrow.copy_(values)
        array.note_write()
        self._writes.append(array.disk.begin_write(array.at(part), values))

    def forget(self) -> None:
        """What is staged is not read any more."""
        for slot, staged in self._staged.items():
            state_of(self._optimizer, slot.parameter).update(staged.resting)
        self._staged.clear()
        self._shown.clear()


def _may_rest(slot: Slot, values: Tensor, is_cut: bool) -> bool:
    """Whether state rests where, and in the dtype that, it was asked to: what is as large as the parameter, if that is
    no scalar. Of whole tensors this rank may see too few to tell by the name, and what is rounded must not depend on
    how many there are: the shape decides for each."""
    is_as_large = values.numel() == slot.piece.numel if slot.stepper is None else values.shape == slot.shape
    return bool(slot.shape) and is_as_large and (is_cut or slot.stepper is not None) and not is_composed(values)


def may_fuse(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the user has left the choice of the kernel to torch, and there is a fused one."""
    is_open = group.get("fused", True) is None and group.get("foreach") is None
    return type(optimizer) in FUSED and is_open and not group.get("differentiable")


def by_group(slots: Iterable[Slot]) -> dict[ShardGroup, list[Slot]]:
    """In their order."""
    found: dict[ShardGroup, list[Slot]] = {}
    for slot in slots:
        found.setdefault(slot.group, []).append(slot)
    return found


def state_of(optimizer: Optimizer, parameter: Parameter) -> dict[str, Any]:
    """What an optimizer keeps for a parameter, whether or not a step of it is still to be taken."""
    return dict.get(optimizer.state, parameter, {})


def _move_state(optimizer: Optimizer, one: Parameter, other: Parameter) -> None:
    """What an optimizer keeps for one parameter, it keeps for another."""
    state = dict.pop(optimizer.state, one, None)
    if state is not None:
        dict.__setitem__(optimizer.state, other, state)


def is_its_piece(slot: Slot) -> bool:
    """Whether there is nothing to swap: all of it is stepped where it is, with the gradient as it is."""
    group, gradient = slot.group, slot.gradient
    assert gradient is not None
    is_apart = group.is_cut or gradient.is_spread or group.rest.master is not group.rest.owned_param
    is_apart |= slot.local.stepped is not slot.parameter
    return group.is_plain and not is_apart and gradient.dtype == group.kind.declared


def set_grad_dtype(parameter: Parameter, dtype: torch.dtype) -> None:
    """Lets `p.grad` have the accumulation dtype where the parameter rests in a narrower one, so that autograd sums
    the gradients of several uses in it too (bit-equal to autocast over fp32 weights)."""
    if parameter.grad_dtype != dtype:
        parameter.grad_dtype = dtype
