"""`Notices`: events that one rank notices, and that all ranks must act upon together."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from lightning_zero.shards.window import Changes


class Notice(Enum):
    """An event or a condition that one rank tells the others."""

    STOP = auto()  # a signal has asked the run to stop
    REQUEUE = auto()  # that signal also asks SLURM to start the job again
    UNSAVED = auto()  # a save in the background has failed
    IN_BATCH = auto()  # this rank trains on a batch
    AT_EPOCH_END = auto()  # this rank has no more batches in this epoch
    STEPPED = auto()  # an optimizer has changed weights or its state on this rank, since ranks have met
    LEFT = auto()  # an optimizer's step has ended with an error on this rank, before it had changed all weights


_OF_STEP = {Notice.STEPPED, Notice.LEFT}


class TornStepError(RuntimeError):
    """A step has ended with an error when ranks had stepped some of their parts and not others. Raised on every rank,
    once, where ranks next meet."""


@dataclass
class Notices:
    """The notices of this rank, and of all ranks as of their last meeting (`Rendezvous.meet`). All ranks hear them at
    the same point: with the gradients of a backward, or at the latest after a batch, an evaluation or an epoch."""

    # Noticed on this rank. Changed only in place, by one call: a signal's handler may run in between, and add to it.
    here: set[Notice] = field(default_factory=set)
    anywhere: set[Notice] = field(default_factory=set)  # noticed on any rank, as of the last meeting
    are_current: bool = False  # ranks have met in the current batch, and since its last backward
    place: str = ""  # where this rank is in its run, in words
    left: str = ""  # what a step that has ended with an error has done here, in words
    ends: bool = False  # training ends, perhaps with the error of that step, which must stay the one that users see
    late_errors: list[BaseException] = field(default_factory=list)  # of steps taken late, to be raised to the user yet
    _of_step: set[Notice] = field(default_factory=set)  # what any rank has told of the step that was called last
    _is_told: bool = False  # that this step is torn

    def flags(self) -> list[bool]:
        """Returns one flag for each `Notice`, whether this rank has noticed it."""
        return [notice in self.here for notice in Notice]

    def hear(self, flags: Sequence[int]) -> None:
        """Takes the flags of all ranks: each is set if any rank has set it."""
        self.are_current = True
        self.anywhere = {notice for notice, flag in zip(Notice, flags, strict=True) if flag}
        self._of_step |= self.anywhere & _OF_STEP
        self.here.difference_update(_OF_STEP)

    def begin_step(self) -> None:
        """Notes that all ranks have come to a step, and have heard of all that earlier ones have done, also late."""
        self._of_step.clear()
        self._is_told = False

    def move(self, notice: Notice, place: str) -> None:
        """Notes that this rank begins a batch, or has reached the end of its epoch."""
        self.note_outside_batches()
        self.here.add(notice)
        self.place = place

    def note_outside_batches(self) -> None:
        """Notes that this rank is between epochs, or in an evaluation."""
        self.here.difference_update({Notice.IN_BATCH, Notice.AT_EPOCH_END})

    def note_step(self, name: str, changes: Changes) -> None:
        """Notes what a step of the optimizer of that name has changed here."""
        if changes.parameters or changes.in_state:
            self.here.add(Notice.STEPPED)
        if changes.parameters < changes.of:
            self.here.add(Notice.LEFT)
            state = " and some of their state" if changes.in_state else ""
            self.left = f"{name}.step() had changed {changes.parameters} of {changes.of} parameters{state}"

    @property
    def is_torn(self) -> bool:
        """Whether weights have been stepped in part, which nobody was told yet: had no rank stepped any of them, or
        each all of them, ranks could go on as one device can. Ranks may meet in between, where a part is stepped
        late."""
        return self._of_step == _OF_STEP and not self._is_told

    def refuse_torn_step(self, left: Sequence[str]) -> None:
        """Raises TornStepError, or warns where training ends. `left` has what each rank has done, by rank."""
        self.left, self._is_told = "", True
        told = "; ".join(f"on rank {rank} {what}" for rank, what in enumerate(left) if what)
        error = TornStepError(
            f"A step has ended with an error in the middle: {told}. Each rank steps parts of its own, so the weights "
            "are neither old nor new now. Load a checkpoint that was saved before, to go on. Where training is to "
            "survive an error, find it before the step, on every rank alike, and do not call step()."
        )
        if not self.ends:
            if self.late_errors:  # the user is told, and may load a checkpoint and train on
                error.__cause__ = self.late_errors[0]
                self.late_errors.clear()
            raise error
        warnings.warn(str(error), stacklevel=2)

    @property
    def are_apart(self) -> bool:
        """Whether one rank had no more batches while another one trained."""
        return {Notice.IN_BATCH, Notice.AT_EPOCH_END} <= self.anywhere
