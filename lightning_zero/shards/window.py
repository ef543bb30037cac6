"""`Window`: parameters of an optimizer that are stepped together; in a `PieceWindow`, the pieces that this rank owns.

What rests in memory, in the dtype in which it is stepped, is stepped where it is. All else is `Staged`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_zero.device import HOST, is_host, on_host, point_at
from lightning_zero.shards.counting import StepCounts
from lightning_zero.shards.gradient import averaged_of, set_grad_dtype
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.moment import VERDICT, Moment, options_on_host
from lightning_zero.shards.probe import is_element_wise
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.shards.sparse import sparse_of
from lightning_zero.shards.staging import NOT_STAGED, Staged, StagingPool
from lightning_zero.torch_private import edits_of

WITH_FUSED_KERNEL = (SGD, Adagrad, Adam, AdamW)  # of torch, for CPU tensors too, which it uses only on request
FUSABLE = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


class _Shown(NamedTuple):
    """What a parameter was before it became its piece."""

    values: Tensor
    grad: Tensor | None
    kind: type[Parameter]  # plain, or a parameter whose values are elsewhere
    has_gradient: bool  # whether the piece has one
    edits: int  # torch's count of those of the parameter


class Changes(NamedTuple):
    """What a step has changed of the elements that this rank alone steps, or its replicas."""

    parameters: int  # of which it has changed some
    of: int  # of which it was to change some
    in_state: bool  # anything


# Of all parameters in each step: in calls of C alone.
_NO_STATE: dict[str, Any] = {}
_PARAMETER, _VALUES = attrgetter("parameter"), methodcaller("values")
_IS_TENSOR, _IS_COUNT = (partial(type.__instancecheck__, kind) for kind in (Tensor, int))


class Window(ABC):
    """`slots` of an optimizer, all in one tier, that are stepped at a time.

    A `late` window is stepped when its values are needed. All of its slots have an averaged gradient, which is read
    from where it rests, whatever becomes of `p.grad` meanwhile.
    """

    def __init__(self, optimizer: Optimizer, slots: Sequence[Slot], pool: StagingPool, *, late: bool = False) -> None:
        self.slots = slots
        self.is_late = late
        self.staged = Staged(optimizer, slots, pool, late=late)
        self._optimizer = optimizer
        self._steps_empty = is_element_wise(optimizer)
        self._shown: dict[Slot, _Shown] = {}
        self._stand_ins: dict[Parameter, Parameter] = {}  # stepped in place of parameters that are no plain tensors
        self._hidden: dict[Slot, Tensor | None] = {}  # gradients of parameters of which this rank has nothing
        self._counts: list[Tensor] = []  # of steps, in the state of those
        self._options: list[dict[str, Any]] = []  # the user's, of each parameter group, where a step changes them
        self._verdict: dict[str, Tensor] = {}  # of a scaler, as it was told

    @abstractmethod
    def postpone(self, step: Callable[[], None]) -> None:
        """Has this rank call `step`, which steps the window, before it reads the group's values."""

    def prepare(self) -> None:
        """Waits for what was read, so that all that is stepped is in memory."""
        self.staged.arrive()

    @property
    def swapped(self) -> list[Slot]:
        """The slots that are not their pieces already."""
        return [s for s in self.slots if not is_its_piece(s) or (s.is_sparse and _has_dense_gradient(s))]

    def take_optimizer(self, part_of: Moment | None, *, steps: bool) -> None:
        """Has the optimizer step what is shown, until `give_back_optimizer`. It lists all of its parameters, or, of
        those that it had at the moment `part_of`, this window's alone. If it `steps` on the host for a device, it has
        its options there."""
        self._stand_ins = {s.parameter: s.local.stepped for s in self.slots if s.local.stepped is not s.parameter}
        for parameter, stand_in in self._stand_ins.items():
            _move_state(self._optimizer, parameter, stand_in)
        groups, param_groups = by_group(self.slots), self._optimizer.param_groups
        steps &= bool(groups) and all(group.places.steps_on_host for group in groups)
        fuses = steps and all(group.kind.declared in FUSABLE for group in groups)
        lists = [own["params"] for own in param_groups] if part_of is None else part_of.listed(self.slots)
        for group, params in zip(param_groups, lists, strict=True):
            own = {"params": group["params"]}
            group["params"] = [self._stand_ins.get(p, p) for p in params] if self._stand_ins else params
            if fuses and may_fuse(self._optimizer, group):
                own["fused"], group["fused"] = group["fused"], True
            if steps and params:
                own |= self._bring_options(group, part_of)
            self._options.append(own)
        self._bring_verdict()

    def _bring_options(self, group: dict[str, Any], then: Moment | None) -> dict[str, Any]:
        """Shows the host's kernels a parameter group as they take it: without `capturable`, which they refuse, and with
        tensors of the host; a fused one would read those of a device before they have come. Returns the user's own."""
        shown = options_on_host(group, then, self.slots[0].group.master.place.limit)
        if group.get("capturable"):
            shown["capturable"] = False
        own = {name: group[name] for name in shown}
        group.update(shown)
        return own

    def _bring_verdict(self) -> None:
        """Shows host kernels on the host what a `GradScaler` has told the optimizer. A fused kernel would itself copy
        it from the device, and read it before it has come."""
        device = self.slots[0].group.master.place.device if self.slots else HOST
        own = vars(self._optimizer)
        told = {name: own[name] for name in VERDICT if isinstance(own.get(name), Tensor)}
        if is_host(device) and any(not is_host(value.device) for value in told.values()):
            own.update({name: on_host(value) for name, value in told.items()})
            self._verdict = told

    def show_piece(self, slot: Slot, *, counts: StepCounts | None) -> None:
        """Makes a parameter its piece, until `show_whole`. One of which this rank has nothing is hidden, if the
        optimizer is about to step and only `counts` such steps."""
        if counts is not None and not slot.steps_any and (own := counts.of_hidden(slot)) is not None:
            self._hide(slot, own)
            return
        parameter = slot.local.stepped
        with no_interception():
            shown = slot.local.read_grad()
            piece, grad = self._stepped(slot, shown)
            if grad is not None and slot.is_sparse:
                grad = sparse_of(grad)
            # Not its `data`: a look at that of one whose master is elsewhere has edits searched for.
            self._shown[slot] = _Shown(
                parameter.detach(), shown, type(parameter), grad is not None, edits_of(parameter)
            )
            parameter.grad = None
            parameter.__class__ = Parameter
            point_at(parameter, piece)
            set_grad_dtype(parameter, piece.dtype)
            parameter.grad = grad

    def _hide(self, slot: Slot, counts: list[Tensor]) -> None:
        """Hides the gradient of a parameter from the optimizer, which then leaves the parameter alone."""
        with no_interception():
            grad = slot.parameter.grad
            if self.is_late or grad is not None:
                self._counts += counts
            self._hidden[slot] = grad
            slot.parameter.grad = None

    def count(self) -> None:
        """Counts a step that is done, for those that were hidden from it."""
        for count in self._counts:
            count.add_(1)

    @abstractmethod
    def _stepped(self, slot: Slot, shown: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the tensor that stands for a parameter, and its gradient; `shown` is what `p.grad` was."""

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
        with no_interception():  # none of these is cleared: the optimizers of `StepCounts` clear nothing
            for slot, grad in self._hidden.items():
                slot.parameter.grad = grad

    @property
    def stepped(self) -> Sequence[Slot]:
        """The slots that are not hidden from the optimizer."""
        if not self._hidden:
            return self.slots
        return [slot for slot in self.slots if slot not in self._hidden]

    def changes(self, state_edits: int, *, is_done: bool) -> Changes:
        """Returns what a step has changed; `state_edits` is what they were before. Of a step that `is_done`, whether
        there is anything to change says enough."""
        own = ((slot, shown) for slot, shown in self._shown.items() if shown.has_gradient and is_part(slot))
        if is_done:
            return Changes(1, 1, True) if any(own) else Changes(0, 0, False)
        changed = [edits_of(slot.local.stepped) != shown.edits for slot, shown in own]
        return Changes(sum(changed), len(changed), self.state_edits != state_edits)

    @property
    def state_edits(self) -> int:
        """Torch's counts of edits of the state of what is shown, and counts of steps that are no tensors, added up.
        What is staged shares a count, with gradients too."""
        keys = [*map(_PARAMETER, self._shown)]
        if self._stand_ins:
            keys = [self._stand_ins.get(key, key) for key in keys]
        states = map(dict.get, repeat(self._optimizer.state), keys, repeat(_NO_STATE))
        values = [*chain.from_iterable(map(_VALUES, states))]
        return sum(map(edits_of, filter(_IS_TENSOR, values))) + sum(filter(_IS_COUNT, values))

    @property
    def shown(self) -> list[Slot]:
        """The slots that are shown as their pieces."""
        return [*self._shown]

    def show_whole(self, slot: Slot) -> None:
        """Gives a parameter back what its users see."""
        parameter, shown = slot.parameter, self._shown[slot]
        with no_interception():
            if parameter in self._stand_ins:  # only the stand-in was changed
                slot.local.stepped.grad = None
                return
            parameter.grad = None
            point_at(parameter, shown.values)
            set_grad_dtype(parameter, averaged_of(slot).dtype)
            parameter.grad = shown.grad
            parameter.__class__ = shown.kind

    def put_values(self) -> None:
        """Writes the stepped masters to where they and the parameters rest."""
        if self.staged.is_on_disk:
            self.staged.put_masters()
            return
        for group, slots in by_group(self.slots).items():
            group.take_masters(slots)

    def clear(self) -> None:
        """Lets go of what was stepped."""
        self.staged.unstage()
        self._shown.clear()
        self._hidden.clear()
        self._counts.clear()


@final
class PieceWindow(Window):
    """Parameters of which each rank steps the piece that it owns."""

    def postpone(self, step: Callable[[], None]) -> None:
        self.slots[0].group.postpone(step)

    def _stepped(self, slot: Slot, shown: Tensor | None) -> tuple[Tensor, Tensor | None]:
        staged, averaged = self.staged.tensors.get(slot, NOT_STAGED), averaged_of(slot)
        shape, master, grad = slot.stepped_shape, staged.master, staged.grad
        piece = slot.stepped(slot.group.master) if master is None else master.view(shape)
        if not ((self.is_late or shown is not None) and self._steps(slot)):
            return piece, None
        if grad is None and averaged.travels:
            grad = averaged.piece(slot)
        else:
            whole = shown if grad is None else grad
            assert whole is not None
            grad = whole.view(shape)
        return piece, grad.to(piece.device, piece.dtype)


def is_part(slot: Slot) -> bool:
    """Whether this rank steps elements of a parameter that others do not step."""
    return (slot.group.is_cut or slot.local.is_divided) and slot.steps_any and slot.numel > 0


def _has_dense_gradient(slot: Slot) -> bool:
    with no_interception():
        grad = slot.parameter.grad
        return grad is not None and not grad.is_sparse


def may_fuse(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether there is a fused kernel, and the user has left the choice of the kernel to torch."""
    is_open = group.get("fused", True) is None and group.get("foreach") is None
    return type(optimizer) in WITH_FUSED_KERNEL and is_open and not group.get("differentiable")


@contextmanager
def without_empty_groups(optimizer: Optimizer) -> Iterator[None]:
    """Inside, an optimizer of torch's has only the groups that list a parameter, as it steps each group by itself. With
    a group for each layer (learning rates that decay by layer) a window has few, and the others take as long."""
    if type(optimizer) not in WITH_FUSED_KERNEL:  # `param_groups` of a wrapper may be a property
        yield
        return
    own = optimizer.param_groups
    optimizer.param_groups = [group for group in own if group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = own


def by_group(slots: Iterable[Slot]) -> dict[ShardGroup, list[Slot]]:
    """Returns the slots of each group, in their order."""
    found: dict[ShardGroup, list[Slot]] = {}
    for slot in slots:
        found.setdefault(slot.group, []).append(slot)
    return found


def _move_state(optimizer: Optimizer, one: Parameter, other: Parameter) -> None:
    """Moves what an optimizer keeps for one parameter to another."""
    state = dict.pop(optimizer.state, one, None)
    if state is not None:
        dict.__setitem__(optimizer.state, other, state)


def is_its_piece(slot: Slot) -> bool:
    """Whether a step needs no swap: the whole parameter is stepped where it is, with its gradient as it is."""
    group = slot.group
    if group.is_cut:
        return False
    averaged = averaged_of(slot)
    is_whole = group.stays_full and slot.local.stepped is slot.parameter
    is_as_declared = group.master is group.owned_param and averaged.dtype == group.kind.declared
    return is_whole and is_as_declared and not averaged.is_spread
