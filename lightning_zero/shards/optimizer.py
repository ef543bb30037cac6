"""`PieceStepper`: has the user's own optimizer step the pieces that this rank owns.

No optimizer is wrapped and no Parameter replaced. During a step, and only then, a parameter's `.data` is the piece of
the master and its `.grad` the piece of the gradient. So the optimizer's state takes the piece's shape, and its keys
stay the user's parameters. Where the pieces do not all rest in one tier, the user's call steps a first *window* of
parameters, and the same `step` is called again for each other window.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TypeVar, final

from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer, SparseAdam

from lightning_zero.shards.absent import AbsentState
from lightning_zero.shards.counting import StepCounts
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.known import KnownState
from lightning_zero.shards.layout import fill
from lightning_zero.shards.moment import Moment, catch_up_before_use, forget_to_catch_up, wrapped_in
from lightning_zero.shards.probe import calls_closure_again, is_element_wise
from lightning_zero.shards.setting import Setting
from lightning_zero.shards.slot import Slot, no_interception, slot_of
from lightning_zero.shards.staging import MakeResting, StagingPool
from lightning_zero.shards.tiles import stepping_in_tiles
from lightning_zero.shards.trial import unhooked
from lightning_zero.shards.whole import WholeWindow, may_wait, rounds
from lightning_zero.shards.window import (
    Changes,
    PieceWindow,
    Window,
    by_group,
    is_its_piece,
    is_part,
    without_empty_groups,
)

T = TypeVar("T")


@final
class PieceStepper:
    """Swaps the parameters of one optimizer to pieces for a step, and back. `rest` makes the tensor that stands for
    optimizer state that rests elsewhere. With `is_lazy` offloaded parameters are stepped when values are needed. `tell`
    is told what a step has changed."""

    def __init__(
        self,
        optimizer: Optimizer,
        setting: Setting,
        rest: MakeResting,
        tell: Callable[[Changes], None],
        *,
        is_lazy: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.known = KnownState(optimizer, setting.ledger)
        self._setting = setting
        self._rest = rest
        self._pool = StagingPool(setting.ledger, setting.places.optimizer.pinned)
        self._slots: dict[Parameter, Slot] = {}
        self._listed: tuple[list[int], list[Slot]] = [], []  # ids of `parameters`, and what `slots` is then
        self.note_parameters()
        self.is_stepping = False
        self.is_interrupted = False  # the step under way has failed and is only being left
        self.is_lazy = is_lazy
        self._tell = tell
        self._ahead: list[Window] = []  # not stepped yet
        self._written: Window | None = None  # stepped, and being written
        self._absent = AbsentState(optimizer, self.known)

    def note_parameters(self) -> None:
        """Takes note of the parameters that the optimizer has now."""
        for parameter in self.parameters:
            self._note(parameter)
        # Integer tables and quantised tensors, which a module's `parameters()` has too. They have no gradient.
        self._left_alone = {parameter for parameter in self.parameters if parameter not in self._slots}
        self._listed = [], []

    def _note(self, parameter: Parameter) -> Slot | None:
        """Keeps the slot of a parameter, which is known then also after the engine is closed."""
        slot = training_slot(parameter)
        if slot is not None:
            self._slots[parameter] = slot
            slot.is_sparse = isinstance(self.optimizer, SparseAdam)
        return slot

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def slots(self) -> list[Slot]:
        """The slots that the optimizer steps, each once. They stay known after the engine is closed."""
        parameters = self.parameters
        ids = [id(parameter) for parameter in parameters]
        if ids != self._listed[0]:  # asked several times in a step, and a hash of a tensor takes a while
            own = [p for p in dict.fromkeys(parameters) if p not in self._left_alone]
            self._listed = ids, [self.slot(parameter) for parameter in own]
        return self._listed[1]

    def without_idle(self, slots: Sequence[Slot]) -> list[Slot]:
        """Returns those of `slots` that a step may change; the same on all ranks. An optimizer that is not known may
        change what has no gradient, too."""
        if not is_element_wise(self.optimizer):
            return [*slots]
        with no_interception():  # users may have given some gradients of their own
            given = {slot.group for slot in slots if slot.parameter.grad is not None}
        return [slot for slot in slots if not slot.group.kind.is_idle or slot.group in given]

    def holds(self, parameter: Parameter) -> bool:
        """Whether the engine manages the parameter. Otherwise each rank has, and steps, all of it."""
        return parameter not in self._left_alone

    def slot(self, parameter: Parameter) -> Slot:
        slot = self._slots.get(parameter) or self._note(parameter)  # one that it was given later
        if slot is None:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not the "
                "module's, or was added in the middle of a step. Give the optimizer the LightningModule's own "
                "parameters, in configure_optimizers() or between steps (in on_train_epoch_start, "
                "on_train_batch_start)."
            )
        return slot

    @contextmanager
    def step(self, slots: Sequence[Slot], errors: list[BaseException]) -> Iterator[None]:
        """Surrounds the user's call of `optimizer.step`, inside which parameters are their pieces. Collective.

        Where the pieces rest in several tiers, or on disk, the call inside steps the first window of them. The other
        windows are stepped when the call ends; with `is_lazy`, when their values are needed. Each of them is stepped
        with the options of the user's call. `slots` are all that the optimizer steps, except what backward has stepped.

        Of a call that has failed, the other windows are not stepped, but all the same brought and sent where ranks step
        whole tensors: those on which it has not failed wait for them. For the same reason, an error that an optimizer
        raises in one of these windows is only put into `errors`, to be raised later.
        """
        if self.is_lazy:
            catch_up_before_use(self.optimizer, self._catch_up)
        with no_interception():
            stepped = [slot for slot in slots if slot.parameter.grad is not None]
        self._absent.note(stepped)
        first, others = self._divide(slots, stepped)
        if others and not any(window.staged for window in others) and self._calls_closure_again:
            # Around its closure such a step is left and entered again, so one window has all that it steps.
            whole = [slot for slot in stepped if slot.stepper is not None]
            first = WholeWindow(self.optimizer, whole, self._pool) if whole else self._window(slots)
            others = []
        if others:
            self._refuse_groups_apart()
        then = Moment.of(self.optimizer, clones=True) if others else None
        self._ahead = list(others)
        is_all = not others and len(slots) == len(self.slots)
        with self._stepping(first, part_of=None if is_all else then or Moment.of(self.optimizer)):
            yield
        # On every rank, whatever it owns: a graph that saved the old values must raise torch's error on all of them.
        increment_version([slot.parameter for slot in stepped if not is_its_piece(slot)])
        if then is None:
            if not self.is_interrupted:
                self._absent.fill(self._slots)
            return
        if self.is_interrupted:
            self._tell(Changes(0, sum(is_part(slot) for window in others for slot in window.slots), in_state=False))
        self._begin_next()
        for window in others:
            step_late = partial(self._step_late, window, then, errors, skips=self.is_interrupted)
            if window.is_late:
                window.postpone(step_late)
            else:
                step_late()
        if not self._ahead:
            self.finish()
            self._absent.fill(self._slots)

    @cached_property
    def _calls_closure_again(self) -> bool:
        return calls_closure_again(self.optimizer, self.slots[0].group.places.optimizer.device)

    def change(self, call: Callable[[], T]) -> T:
        """Lets `call` change parameters and state between two steps: once for each window, inside which parameters are
        pieces, or whole where they are stepped whole. Returns the first result. Collective: call it on every rank.
        Those that other ranks alone step, of which there is no state, are not listed: users look it up of all."""
        slots = self.slots
        absent = {slot.local.stepped for slot in slots if not slot.steps_any}

        def call_without_absent() -> T:
            for group in self.optimizer.param_groups:  # the windows give back the lists that there were
                group["params"] = [p for p in group["params"] if p not in absent]
            return call()

        first, others = self._divide(slots, slots, with_gradients=False)
        if others:
            self._refuse_groups_apart()
        then = Moment.of(self.optimizer, clones=True)
        with self._stepping(first, part_of=then if others else None, steps=False):
            result = call_without_absent()
        for window in others:
            window.staged.begin()
            with then.back(self.optimizer), self._stepping(window, part_of=then, steps=False):
                call_without_absent()
            window.staged.finish()
        increment_version([slot.parameter for slot in slots if not is_its_piece(slot)])
        return result

    def _refuse_groups_apart(self) -> None:
        """Raises RuntimeError if a wrapped optimizer has `param_groups` of its own. Where some parameters are stepped
        after the others, it would step all of its parameters each time."""
        shared = {id(group) for group in self.optimizer.param_groups}
        for inner in wrapped_in(self.optimizer):
            if any(id(group) not in shared for group in inner.param_groups):
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} wraps a {type(inner).__name__} with param_groups of its own, and "
                    "steps some parameters after the others: whole tensors, or what offload= or step_in_backward "
                    "has moved. Let the two share them (self.param_groups = inner.param_groups)."
                )

    def step_now(self, slots: Sequence[Slot], errors: list[BaseException]) -> None:
        """Steps some parameters in the middle of a backward. All of them must have averaged gradients. What the
        optimizer raises is put into `errors`, as ranks wait for each other until the backward has ended. From then on
        nothing is stepped in it."""
        self._refuse_groups_apart()
        self._absent.note(slots)
        then = Moment.of(self.optimizer, clones=True)
        for window in self._windows(slots, late=True):
            if errors:
                self._tell(Changes(0, sum(map(is_part, window.slots)), in_state=False))
            else:
                self._step_late(window, then, errors)
        self.finish()
        self._absent.fill(self._slots)

    def _step_late(self, window: Window, then: Moment, errors: list[BaseException], *, skips: bool = False) -> None:
        """Steps a window with the optimizer as it was at moment `then`, or `skips` that. `errors`: see `step`."""
        if window in self._ahead:
            self._ahead.remove(window)
        with then.back(self.optimizer):
            window.staged.begin()
            self._begin_next()
            with self._stepping(window, part_of=then, steps=not skips):
                try:
                    if not skips:
                        with without_empty_groups(self.optimizer):
                            unhooked(type(self.optimizer).step)(self.optimizer)
                except BaseException as error:
                    errors.append(error)
                    self.is_interrupted = True
            self.is_interrupted = self.is_interrupted and skips
            self.finish()
            self._written = window
            if window.is_late and not self._ahead:
                self._absent.fill(self._slots)

    def _begin_next(self) -> None:
        """Starts to read one window ahead: the next one, if values are needed in the order of the model."""
        if self._ahead:
            self._ahead[0].staged.begin()

    def _catch_up(self) -> None:
        """Takes the postponed steps of this rank. They may be taken in any order: no step reads another's state."""
        if not self.is_stepping:
            for group in by_group(slot for window in self._ahead for slot in window.slots):
                group.catch_up_alone()

    def leave(self) -> None:
        """Gives the optimizer back to the user as it was made."""
        forget_to_catch_up(self.optimizer)

    def finish(self) -> None:
        """Waits until the window that was stepped last is written."""
        written, self._written = self._written, None
        if written is not None:
            written.staged.finish()

    def refuse_if_partial(self) -> None:
        """Raises RuntimeError if the step under way is of a first window: it must not be left and entered again."""
        if self.is_stepping and self._ahead:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} calls its closure several times in a step, and steps some parameters "
                "after the others: what offload= has moved to disk, or to another dtype. Offload it to 'cpu' as it is."
            )

    def _divide(
        self, slots: Sequence[Slot], stepped: Sequence[Slot], *, with_gradients: bool = True
    ) -> tuple[Window, list[Window]]:
        """Returns the window that the user's call steps, and the windows that are stepped after it: of offloaded
        parameters, and of whole tensors in rounds. If they are stepped `with_gradients`, the latter may be late."""
        is_lazy = self.is_lazy and with_gradients
        others = self._apart([slot for slot in stepped if slot.stepper is None], late=is_lazy)
        whole = [slot for slot in stepped if slot.stepper is not None]
        for run in rounds(whole, self._setting, is_lazy=is_lazy):
            late = is_lazy and may_wait(run[0].group)
            window = WholeWindow(self.optimizer, run, self._pool, late=late, with_gradients=with_gradients)
            others.append(window)
        later = {slot for window in others for slot in window.slots}
        return self._window([slot for slot in slots if slot not in later]), others

    def _apart(self, slots: Iterable[Slot], *, late: bool = False) -> list[Window]:
        """Returns the windows of those that are offloaded, group by group."""
        groups = by_group(slot for slot in slots if slot.group.places.steps_apart)
        return [window for group in groups.values() for window in self._windows(group, late=late)]

    def windows_apart(self) -> list[Window]:
        """Returns the windows that are stepped apart from the user's call, if all parameters but idle ones have
        gradients."""
        stepped = [slot for slot in self.slots if not slot.group.kind.is_idle]
        if self._setting.keeps_gradients:
            return self._divide(self.slots, stepped)[1]
        own = set(stepped)  # in backward, group after group
        return self._apart((slot for group in by_group(stepped) for slot in group.slots if slot in own), late=True)

    def _windows(self, slots: Sequence[Slot], *, late: bool) -> list[Window]:
        """Returns a window of slots of one group; where it has to be staged, a window for each bucket of them."""
        window = self._window(slots, late=late)
        if not window.staged:
            return [window]
        sizes = [slot.piece.numel * slot.group.master.dtype.itemsize for slot in slots]
        runs = fill(sizes, self._setting.bucket_bytes)
        return [self._window(slots[run.start : run.stop], late=late) for run in runs]

    def _window(self, slots: Sequence[Slot], *, late: bool = False) -> Window:
        return PieceWindow(self.optimizer, slots, self._pool, late=late)

    def loading(self) -> Iterator[Sequence[Slot]]:
        """Yields the slots of one window after another. While a window is out, its parameters are their pieces; the
        optimizer has all of its parameters all the time."""
        slots = self.slots
        self.finish()
        if slots and slots[0].group.is_freed:  # after fit parameters are whole, and nothing is stepped
            yield slots
            return
        here = self._window([slot for slot in slots if not slot.group.places.steps_apart])
        for window in [here, *self._apart(slots)]:
            window.staged.begin()
            with self._stepping(window, part_of=None, steps=False):
                yield window.slots
            window.staged.finish()

    @contextmanager
    def _stepping(self, window: Window, *, part_of: Moment | None, steps: bool = True) -> Iterator[None]:
        """Inside, the parameters of a window are their pieces, which the optimizer steps, unless `steps` says that it
        does not. In the end they are written to where they rest. `part_of`: see `Window.take_optimizer`."""
        window.prepare()
        counts = StepCounts.of(self.optimizer, window.slots) if steps else None
        for slot in window.swapped:
            window.show_piece(slot, counts=counts)
        window.take_optimizer(part_of, steps=steps)
        state_edits = window.state_edits if steps else 0
        self.is_stepping, is_over = True, False
        try:
            with stepping_in_tiles(self.optimizer):
                yield
            is_over = True
        finally:
            is_done = is_over and not self.is_interrupted
            if steps:
                self._tell(window.changes(state_edits, is_done=is_done))
            window.give_back_optimizer()
            for slot in window.shown:
                window.show_whole(slot)
            self.is_stepping = False
            self.known.note(window.stepped, self._left_alone)
            if is_done:
                window.count()
            # Also of a step that has failed here: other ranks may send what they have stepped, and wait for this one.
            if is_over and window.slots:  # none, where all is stepped apart from the user's call
                window.put_values()
                window.staged.put_state(self._rest, self.known.is_cut)
            window.clear()


def groups_of(slots: Iterable[Slot]) -> list[ShardGroup]:
    """Returns the groups whose values a step of `slots` may change elsewhere than in the parameters themselves."""
    return list(dict.fromkeys(slot.group for slot in slots if slot.group.is_cut or not is_its_piece(slot)))


def training_slot(parameter: Parameter) -> Slot | None:
    """Returns the slot of a parameter whose gradients are averaged; None for any other parameter."""
    slot = slot_of(parameter)
    return None if slot is None or slot.gradient is None else slot
