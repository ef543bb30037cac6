"""What an engine is doing, and what may begin while it does."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import final


class Phase(Enum):
    """See `Engine`."""

    RESTING = auto()
    FORWARD = auto()
    BACKWARD = auto()
    STEP = auto()
    CLOSED = auto()


_WITHIN = {
    Phase.RESTING: {Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.CLOSED},
    # Manual optimization runs all of a step inside `training_step`.
    Phase.FORWARD: {Phase.FORWARD, Phase.BACKWARD, Phase.STEP},
}


@final
class Phases:
    """The phase of an engine, with checked transitions; one may interrupt another."""

    def __init__(self) -> None:
        self._stack = [Phase.RESTING]

    @property
    def now(self) -> Phase:
        return self._stack[-1]

    def enter(self, phase: Phase) -> None:
        """Raises RuntimeError when `phase` cannot begin now."""
        if phase not in _WITHIN.get(self.now, ()):
            raise RuntimeError(f"The engine cannot begin {phase.name} while it is in {self.now.name}.")
        self._stack.append(phase)

    def leave(self, phase: Phase) -> None:
        """Goes on with what `phase` has interrupted; nothing if it is over already."""
        if self.now is phase:
            self._stack.pop()

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        self.enter(phase)
        depth = len(self._stack)
        try:
            yield
        finally:
            del self._stack[depth - 1 :]

    def close(self) -> None:
        self._stack = [Phase.CLOSED]
