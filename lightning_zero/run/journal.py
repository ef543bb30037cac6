"""`Journal`: what user code does in a step, in order, as the engine's hooks see it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

from lightning_zero.run.program import Cause, Use

LONGEST = 100_000  # uses of a step; a longer one is not kept
# An evaluation before one of these is over.
_TRAINING = {Cause.BACKWARD, Cause.UNSCALE, Cause.CLIP, Cause.LOOK, Cause.MEASURE, Cause.STEP, Cause.STEP_AFTER_CLIP}


@final
class Journal:
    """The uses of the step under way, and those of the last whole one. Evaluations are not in it."""

    def __init__(self) -> None:
        self._now: list[tuple[Cause, object]] = []
        self._last: list[tuple[Cause, object]] = []
        self.is_on = True  # False: an evaluation is under way

    def note(self, cause: Cause, what: object = 0) -> None:
        """Notes a use; `what` is its number, or the group or the optimizer that has the number."""
        self.is_on |= cause in _TRAINING
        if self.is_on and len(self._now) < LONGEST:
            self._now.append((cause, what))

    def end_step(self, optimizer: object) -> None:
        """Notes that an optimizer's arithmetic is done, with which a step ends."""
        self.note(Cause.STEPPED, optimizer)
        self._last, self._now = (self._now if len(self._now) < LONGEST else []), []

    @property
    def has_step(self) -> bool:
        """Whether a step has ended."""
        return bool(self._last)

    @property
    def latest(self) -> tuple[Cause, object] | None:
        """The latest use of the step under way, and what was used."""
        return self._now[-1] if self._now else None

    @property
    def count(self) -> int:
        """How many uses of the step under way there were so far."""
        return len(self._now)

    def forget(self) -> None:
        """Drops the step under way, which has failed."""
        self._now.clear()

    @contextmanager
    def dropping_what_fails(self) -> Iterator[None]:
        """Drops the step under way if it fails inside: what follows belongs to another one."""
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def last_step(self, numbers: Mapping[object, int]) -> list[Use]:
        """Returns the uses of the last whole step, in order; none if there is none. `numbers` are those of groups and
        optimizers."""
        return [Use(cause, what if isinstance(what, int) else numbers[what]) for cause, what in self._last]
