"""`Window`: parameters of an optimizer that are stepped together, as the pieces that this rank owns.

What rests in memory is stepped where it is. What rests on disk is read before its step and written after it, while
other windows are stepped. So three windows are in memory at a time: one is read, one is stepped, one is written.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_zero.device import HOST, is_host, on_host, point_at
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.moment import VERDICT
from lightning_zero.shards.probe import steps_nothing
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.shards.sparse import sparse_of
from lightning_zero.tiers.alignment import ALIGNMENT_BYTES, round_up
from lightning_zero.tiers.array import ALL, Array, OnDisk, empty
from lightning_zero.tiers.composed import is_composed
from lightning_zero.tiers.disk import Disk, Move
from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier

FUSED = (SGD, Adagrad, Adam, AdamW)  # torch has a fused kernel for CPU tensors, which it uses only on request
FUSABLE = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


class StateElsewhere(Tensor):
    """A tensor of optimizer state whose values rest on disk, or in a narrower dtype than its own; see `views.state`."""

    array: Array

    def settle(self) -> None:
        """Writes edits that were made through views of the values to where the values rest."""


MakeResting = Callable[[Array, tuple[int, ...], torch.dtype], StateElsewhere]  # given array, shape, dtype


@dataclass
class _Staged:
    """The tensors of a slot that are in memory only while it is stepped."""

    master: Tensor | None  # None where it is stepped where it rests
    grad: Tensor | None
    state: dict[str, Tensor]
    narrow: dict[str, Tensor]  # the state as it is on disk, where that is narrower
    resting: dict[str, StateElsewhere]  # what stands for the state between steps


NOT_STAGED = _Staged(None, None, {}, {}, {})


class _Shown(NamedTuple):
    """What a parameter was before it became its piece."""

    values: Tensor
    grad: Tensor | None
    kind: type[Parameter]  # plain, or a parameter whose values are elsewhere
    has_gradient: bool  # whether the piece has one


@final
class Staging:
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


class Window:
    """`slots` of an optimizer, all in one tier, that are stepped at a time.

    A `late` window is stepped when its values are needed. All of its slots have an averaged gradient, which is read
    from where it rests, whatever becomes of `p.grad` meanwhile.
    """

    def __init__(self, optimizer: Optimizer, slots: Sequence[Slot], staging: Staging, *, late: bool = False) -> None:
        self.slots = slots
        self.is_late = late
        self._optimizer = optimizer
        self._steps_empty = steps_nothing(optimizer)
        self._staging = staging
        self._room: Tensor | None = None
        self._taken = 0  # bytes of the room
        self._moves: list[Move] = []  # from or to the disk, which begin together
        self._reads: list[Future[None]] = []
        self._writes: list[Future[None]] = []
        self._staged: dict[Slot, _Staged] = {}
        self._shown: dict[Slot, _Shown] = {}
        self._stand_ins: dict[Parameter, Parameter] = {}  # stepped in place of parameters that are no plain tensors
        self._options: list[dict[str, Any]] = []  # the user's, of each parameter group, where a step changes them
        self._verdict: dict[str, Tensor] = {}  # of a scaler, as it was told

    def postpone(self, step: Callable[[], None]) -> None:
        """Has this rank call `step`, which steps the window, before it reads the group's values."""
        self.slots[0].group.postpone(step)

    @property
    def is_begun(self) -> bool:
        return self._room is not None

    @property
    def is_staged(self) -> bool:
        """Whether it is stepped elsewhere, or in another dtype, than it rests."""
        return self._is_on_disk or any(slot.group.places.state_dtype is not None for slot in self.slots)

    @property
    def _is_on_disk(self) -> bool:
        return isinstance(self.slots[0].group.master, OnDisk) if self.slots else False

    # -- staged

    def begin(self) -> None:
        """Takes room for what is staged, and starts to read what rests on disk."""
        if self.is_begun or not self.is_staged:
            return
        with no_interception():
            resting = {slot: self._state_of(slot) for slot in self.slots}
            self._room = self._staging.take(sum(self._bytes_of(slot, resting[slot]) for slot in self.slots))
            for slot in self.slots:
                part, gradient = slot.piece.in_shard, self._gradient_of(slot)
                state = {name: self._take(one.numel(), one.dtype) for name, one in resting[slot].items()}
                self._staged[slot] = _Staged(
                    master=self._read(slot.group.master, part) if self._is_on_disk else None,
                    grad=None if gradient is None else self._read(gradient, part),
                    state=state,
                    narrow={name: self._bring(one, state[name]) for name, one in resting[slot].items()},
                    resting=resting[slot],
                )
            self._begin_moves(Disk.begin_read, self._reads)

    def _state_of(self, slot: Slot) -> dict[str, StateElsewhere]:
        state = state_of(self._optimizer, slot.parameter)
        found = {name: value for name, value in state.items() if isinstance(value, StateElsewhere)}
        for value in found.values():
            value.settle()
        return found

    def _bytes_of(self, slot: Slot, resting: dict[str, StateElsewhere]) -> int:
        """Bytes of the room that `begin` takes for a slot."""
        sizes = [one.numel() * one.dtype.itemsize for one in resting.values()]
        if self._is_on_disk:
            narrow = [one for one in resting.values() if one.array.dtype != one.dtype]
            sizes += [one.numel() * one.array.dtype.itemsize for one in narrow]
            arrays = [slot.group.master, self._gradient_of(slot)]
            sizes += [slot.piece.numel * array.dtype.itemsize for array in arrays if array is not None]
        return sum(round_up(size, ALIGNMENT_BYTES) for size in sizes)

    def _gradient_of(self, slot: Slot) -> Array | None:
        """Returns the gradient that has to be read from disk; None where it is in memory, or there is none."""
        assert slot.gradient is not None
        has_any = self.is_late or slot.local.grad is not None
        return slot.gradient.owned_grad if has_any and slot.gradient.is_on_disk else None

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
        self._moves.append((array.at(part), values))
        return values

    def _bring(self, resting: StateElsewhere, wide: Tensor) -> Tensor:
        """Brings state to `wide`, where it is stepped. Returns the tensor that is read into: `wide`, or a narrower one
        that `prepare` widens."""
        array = resting.array
        if isinstance(array, OnDisk):
            return self._read(array, ALL, wide if array.dtype == wide.dtype else None)
        return wide.copy_(array.read())

    def _begin_moves(
        self, begin: Callable[[Disk, Sequence[Move]], Future[None]], under_way: list[Future[None]]
    ) -> None:
        """Begins what was collected, in one task: each has two threads wait for each other and for the interpreter."""
        moves, self._moves = self._moves, []
        if moves:
            disk = self.slots[0].group.places.optimizer.disk
            assert disk is not None
            under_way.append(begin(disk, moves))

    def finish(self) -> None:
        """Waits until what was stepped is written, and gives the room back."""
        for write in self._writes:
            write.result()
        self._writes.clear()
        if self._room is not None:
            self._staging.give_back(self._room)
            self._room = None

    # -- as pieces

    def prepare(self) -> None:
        """Waits for what was read, so that all that is stepped is in memory."""
        for read in self._reads:
            read.result()
        self._reads.clear()
        for slot, staged in self._staged.items():
            for name, values in staged.state.items():
                if staged.narrow[name] is not values:
                    values.copy_(staged.narrow[name])
                state_of(self._optimizer, slot.parameter)[name] = values.view(slot.state_shape)

    @property
    def swapped(self) -> list[Slot]:
        """The slots that are not their pieces already."""
        return [s for s in self.slots if not is_its_piece(s) or (s.is_sparse and _has_dense_gradient(s))]

    def take_optimizer(self, *, is_all: bool, fuses: bool) -> None:
        """Has the optimizer step what is shown, until `give_back_optimizer`: only the parameters of this window, unless
        `is_all`. With `fuses` it may use torch's fused kernels, where the host steps for a device."""
        self._stand_ins = {s.parameter: s.local.stepped for s in self.slots if s.local.stepped is not s.parameter}
        for parameter, stand_in in self._stand_ins.items():
            _move_state(self._optimizer, parameter, stand_in)
        wanted, groups = {slot.parameter for slot in self.slots}, by_group(self.slots)
        fuses &= bool(groups) and all(g.places.steps_on_host and g.kind.declared in FUSABLE for g in groups)
        for group in self._optimizer.param_groups:
            own = {"params": group["params"]}
            if self._stand_ins or not is_all:
                group["params"] = [self._stand_ins.get(p, p) for p in own["params"] if is_all or p in wanted]
            if fuses and may_fuse(self._optimizer, group):
                own["fused"], group["fused"] = group["fused"], True
            self._options.append(own)
        self._bring_verdict()

    def _bring_verdict(self) -> None:
        """Shows host kernels on the host what a `GradScaler` has told the optimizer. A fused kernel would itself copy
        it from the device, and read it before it has come."""
        device = self.slots[0].group.master.place.device if self.slots else HOST
        own = vars(self._optimizer)
        told = {name: own[name] for name in VERDICT if isinstance(own.get(name), Tensor)}
        if is_host(device) and any(not is_host(value.device) for value in told.values()):
            own.update({name: on_host(value) for name, value in told.items()})
            self._verdict = told

    def show_piece(self, slot: Slot) -> None:
        """Makes a parameter its piece, until `show_whole`."""
        parameter = slot.local.stepped
        with no_interception():
            shown = slot.local.grad
            piece, grad = self._stepped(slot, shown)
            if grad is not None and slot.is_sparse:
                grad = sparse_of(grad)
            # Not its `data`: a look at that of one whose master is elsewhere has edits searched for.
            self._shown[slot] = _Shown(parameter.detach(), shown, type(parameter), grad is not None)
            parameter.grad = None
            parameter.__class__ = Parameter
            point_at(parameter, piece)
            set_grad_dtype(parameter, piece.dtype)
            parameter.grad = grad

    def _stepped(self, slot: Slot, shown: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the piece that stands for a parameter, and its gradient; `shown` is what `p.grad` was."""
        staged, gradient = self._staged.get(slot, NOT_STAGED), slot.gradient
        assert gradient is not None
        shape, master, grad = slot.stepped_shape, staged.master, staged.grad
        piece = slot.stepped(slot.group.master) if master is None else master.view(shape)
        if not ((self.is_late or shown is not None) and self._steps(slot)):
            return piece, None
        if grad is None and gradient.travels:
            grad = gradient.piece(slot)
        else:
            whole = shown if grad is None else grad
            assert whole is not None
            grad = whole.view(shape)
        return piece, grad.to(piece.device, piece.dtype)

    def _steps(self, slot: Slot) -> bool:
        """Whether the optimizer is given the gradient of a slot: of an empty piece too, if it can step that. The state
        of the parameter then has the same keys and the same counts on every rank."""
        return slot.steps_any or self._steps_empty

    def give_back_optimizer(self) -> None:
        """Undoes `take_optimizer`."""
        for group, own in zip(self._optimizer.param_groups, self._options, strict=True):
            group.update(own)
        self._options.clear()
        vars(self._optimizer).update(self._verdict)
        self._verdict = {}
        for parameter, stand_in in self._stand_ins.items():
            _move_state(self._optimizer, stand_in, parameter)
        # A gradient that was cleared inside stays so.
        cleared = {slot: slot.local.stepped.grad is None for slot, shown in self._shown.items() if shown.has_gradient}
        are_all_cleared = bool(cleared) and all(cleared.values())  # for slots of which this rank has no piece
        for slot, shown in self._shown.items():
            if cleared.get(slot, are_all_cleared):
                self._shown[slot] = shown._replace(grad=None)

    @property
    def shown(self) -> list[Slot]:
        """The slots that are shown as their pieces."""
        return [*self._shown]

    def show_whole(self, slot: Slot) -> None:
        """Gives a parameter back what its users see."""
        parameter, gradient, shown = slot.parameter, slot.gradient, self._shown[slot]
        assert gradient is not None
        with no_interception():
            if parameter in self._stand_ins:  # only the stand-in was changed
                slot.local.stepped.grad = None
                return
            parameter.grad = None
            point_at(parameter, shown.values)
            set_grad_dtype(parameter, gradient.dtype)
            parameter.grad = shown.grad
            parameter.__class__ = shown.kind

    def put_state(self, rest: MakeResting, is_cut: Callable[[str], bool]) -> None:
        """Writes the state for which `_may_rest` to where it rests. `is_cut` tells by its name whether state is cut as
        its parameter is, and `rest` makes the tensor that stands for it between steps."""
        for slot, staged in self._staged.items():
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
        self._begin_moves(Disk.begin_write, self._writes)

    def put_values(self) -> None:
        """Writes the new values to where they rest."""
        if not self._is_on_disk:
            for group, slots in by_group(self.slots).items():
                group.take_masters(slots)
        masters = {slot: staged.master for slot, staged in self._staged.items() if staged.master is not None}
        for slot, master in masters.items():
            self._write(slot.group.master, slot.piece.in_shard, master)
        self._begin_moves(Disk.begin_write, self._writes)
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
        self._moves.append((array.at(part), values))

    def forget(self) -> None:
        """Lets go of what was staged: in the optimizer's state, what stands for it takes its place again."""
        for slot, staged in self._staged.items():
            state_of(self._optimizer, slot.parameter).update(staged.resting)
        self._moves.clear()  # of a step that has failed before they began
        self._staged.clear()
        self._shown.clear()


def _may_rest(slot: Slot, values: Tensor, is_cut: bool) -> bool:
    """Whether a state tensor goes to the tier and the dtype that offloading asks for. It does if it is as large as the
    parameter and cut as it is, except for scalars. For whole tensors the shape alone decides: a rank may step too few
    of them to tell by the name, and how many it steps must not decide what is rounded."""
    is_as_large = values.numel() == slot.piece.numel if slot.stepper is None else values.shape == slot.shape
    is_any = bool(slot.shape) and values.numel() > 0
    return is_any and is_as_large and (is_cut or slot.stepper is not None) and not is_composed(values)


def _has_dense_gradient(slot: Slot) -> bool:
    with no_interception():
        return slot.local.grad is not None and not slot.local.grad.is_sparse


def may_fuse(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether there is a fused kernel, and the user has left the choice of the kernel to torch."""
    is_open = group.get("fused", True) is None and group.get("foreach") is None
    return type(optimizer) in FUSED and is_open and not group.get("differentiable")


def by_group(slots: Iterable[Slot]) -> dict[ShardGroup, list[Slot]]:
    """Returns the slots of each group, in their order."""
    found: dict[ShardGroup, list[Slot]] = {}
    for slot in slots:
        found.setdefault(slot.group, []).append(slot)
    return found


def state_of(optimizer: Optimizer, parameter: Parameter) -> dict[str, Any]:
    """Returns what an optimizer keeps for a parameter, without taking postponed steps."""
    return dict.get(optimizer.state, parameter, {})


def _move_state(optimizer: Optimizer, one: Parameter, other: Parameter) -> None:
    """Moves what an optimizer keeps for one parameter to another."""
    state = dict.pop(optimizer.state, one, None)
    if state is not None:
        dict.__setitem__(optimizer.state, other, state)


def is_its_piece(slot: Slot) -> bool:
    """Whether a step needs no swap: the whole parameter is stepped where it is, with its gradient as it is."""
    group, gradient = slot.group, slot.gradient
    if group.is_cut:
        return False
    assert gradient is not None
    is_whole = group.stays_full and slot.local.stepped is slot.parameter
    is_as_declared = group.master is group.owned_param and gradient.dtype == group.kind.declared
    return is_whole and is_as_declared and not gradient.is_spread


def set_grad_dtype(parameter: Parameter, dtype: torch.dtype) -> None:
    """Lets `p.grad` have the accumulation dtype where the parameter rests in a narrower one. Then autograd sums the
    gradients of several uses in it too, bit-equal to autocast over fp32 weights."""
    if parameter.grad_dtype != dtype:
        parameter.grad_dtype = dtype
