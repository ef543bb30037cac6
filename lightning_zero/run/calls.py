"""`StepCalls`: the user's calls of `optimizer.step`: enters and leaves what the engine does around each."""

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from types import FrameType
from typing import Any, final

import torch
from torch.optim import Optimizer

from lightning_zero.shards.optimizer import PieceStepper

Contexts = Sequence[Callable[[], AbstractContextManager[None]]]


_IGNORES = (
    "{}.step() has not called the closure that it was given: every rank has stepped whole parameters, keeps state of "
    "all of them, and no on_before_optimizer_step was called. Begin it with `if closure is not None: closure()`."
)


class _Abandoned(Exception):
    """Leads out of a step without any collective."""


@final
class StepCalls:
    """The calls of one optimizer's `step`: the one under way, and those inside of it. `then` is called after each.
    Hooks tell of them (`StepHooks`).

    torch calls hooks around the `step` of every class that there has been an instance of. So where an optimizer's class
    calls `super().step()`, they may be called once more from within. The engine's step ends with the outermost call,
    and so includes what the class does after `super().step()`.
    """

    def __init__(self, stepper: PieceStepper, then: Callable[[], None]) -> None:
        self._stepper = stepper
        self._then = then
        self._entered = ExitStack()
        self._depth = 0  # number of calls under way, one inside another
        self._outermost: FrameType | None = None  # frame of the outermost of these calls
        self._thread = 0  # thread of the outermost call
        self._waits = False  # the outermost call has a closure, and is entered when that is called
        self._has_warned = False

    def interrupt(self) -> None:
        """Ends a call that an error has left, without completing the step."""
        self._depth = 0
        self._stepper.is_interrupted = True
        self._entered.close()
        self._stepper.is_interrupted = False

    def abandon(self) -> None:
        """Ends a call that an error has left, without a word to other ranks."""
        with suppress(_Abandoned), self._entered:
            raise _Abandoned

    def recover(self) -> None:
        """Ends a call that an error has left, if there is one: torch calls no hook in that case."""
        if self._depth and not self._is_under_way:
            self.interrupt()
            self._then()

    def before(self, around: Contexts, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call begins: it runs inside what `around` returns, outermost first, but not the closure that it may call.
        Returns the arguments to call with, if they are others."""
        self.recover()
        if not self._depth:
            if self._stepper.is_stepping:  # the stepper itself calls `step`, for parameters that it steps apart
                return None
            self._outermost, self._thread = _caller(), threading.get_ident()
            self._waits = True
        self._depth += 1

        def enter() -> None:
            self._waits = False
            if self._stepper.is_stepping:
                return  # an outer call has entered
            with ExitStack() as entered:
                for context in around:
                    entered.enter_context(context())
                self._entered = entered.pop_all()

        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            enter()
            return None

        @torch.compiler.disable
        def closure_outside_step() -> Any:
            self._stepper.refuse_if_partial()
            self._entered.close()  # an optimizer may call its closure several times: leave the step again
            result = closure()
            enter()
            return result

        if len(args) > 1:
            return (args[0], closure_outside_step, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_outside_step}

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """A call has ended."""
        # After a call inside that failed, the depth is too large: torch has called no hook for it.
        if self._depth == 1 or (self._depth and _caller() is self._outermost):
            self._depth, self._outermost = 0, None
            if self._waits and not self._has_warned and any(slot.group.is_cut for slot in self._stepper.slots):
                self._has_warned = True
                warnings.warn(_IGNORES.format(type(optimizer).__name__), stacklevel=2)
            self._entered.close()
            self._then()
        elif self._depth:
            self._depth -= 1

    @property
    def _is_under_way(self) -> bool:
        if threading.get_ident() != self._thread:
            return True  # the backward of its closure runs in a thread of autograd's, as on a GPU
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._outermost:
            frame = frame.f_back
        return frame is not None


def _caller() -> FrameType:
    """Returns the frame from which torch calls the hooks. It lives as long as the call of `step` does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch._dynamo"):
        frame = frame.f_back
    assert frame is not None
    return frame
