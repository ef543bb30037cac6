"""`Phases`: the phase that an engine is in, and which phases may begin during it."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import final


class Phase(Enum):
    """A phase of an engine; see `Engine` for what happens in each."""

    RESTING = auto()
    FORWARD = auto()
    BACKWARD = auto()
    STEP = auto()
    CLOSED = auto()


_MAY_BEGIN_IN = {
    Phase.RESTING: {Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.CLOSED},
    # Manual optimization runs all of a step inside `training_step`.
    Phase.FORWARD: {Phase.FORWARD, Phase.BACKWARD, Phase.STEP},
}


@final
class Phases:
    """The current phase of an engine, and the phases that it interrupts, with checked transitions."""

    def __init__(self) -> None:
        self._stack = [Phase.RESTING]

    @property
    def now(self) -> Phase:
        return self._stack[-1]

    def enter(self, phase: Phase) -> None:
        """Begins `phase`. Raises RuntimeError if it cannot begin in the current one."""
        if phase not in _MAY_BEGIN_IN.get(self.now, ()):
            raise RuntimeError(f"The engine cannot begin {phase.name} while it is in {self.now.name}.")
        self._stack.append(phase)

    def exit(self, phase: Phase) -> None:
        """Returns to the phase that `phase` has interrupted; does nothing if `phase` is already over."""
        if self.now is phase:
            self._stack.pop()

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Is in `phase` inside; ends it, and every phase that was left open in it, on the way out."""
        self.enter(phase)
        depth = len(self._stack)
        try:
            yield
        finally:
            del self._stack[depth - 1 :]

    def close(self) -> None:
        self._stack = [Phase.CLOSED]
