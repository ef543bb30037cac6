"""`Readiness`: whether all ranks reduce the gradients of a backward, as far as this one knows; see `rendezvous`."""

from typing import final

from lightning_zero.run.reductions import Reductions
from lightning_zero.run.statement import Statement
from lightning_zero.wire.comm import Comm, Told


@final
class Readiness:
    """What this rank knows of the reductions of the others in a backward: from an exchange, or from marks.

    Marks travel beside the first reduction of a backward that all ranks expect. They tell, before any reduction is
    waited for, whether a rank diverges there.
    """

    def __init__(self, comm: Comm, reductions: Reductions, *, gathers: bool) -> None:
        self._comm = comm
        self._reductions = reductions
        self._gathers = gathers  # the gathers of units tell when all are ready
        self.all_reduce = False  # all ranks are known to reduce the gradients of this backward
        self.settles_alone = False  # ... each has some of its own, and needs no other rank to settle them
        self.knew_all = False  # this rank has settled gradients alone: each parameter had one on it
        self.marks: Told | None = None  # of all ranks, until they tell who diverges
        self._sent: Told | None = None  # the mark of this rank, which diverges, until the others come to an exchange

    def reset(self) -> None:
        self.all_reduce = self.settles_alone = False

    def note_that_all_reduce(self, *, each: bool) -> None:
        """Notes that no rank wants anything before it reduces. `each` has gradients of its own."""
        self.all_reduce, self.knew_all = True, False
        self.settles_alone = self._reductions.may_settle_alone and each

    def settle_alone(self, statement: Statement | None) -> None:
        """Settles gradients whose reductions all ranks have started; see `Reductions.settle_alone`."""
        self._reductions.settle_alone(statement)
        self.reset()

    # -- marks

    @property
    def marks_reductions(self) -> bool:
        """Whether ranks that expect to reduce start without asking, and a mark travels beside the first reduction of
        each backward. Not where a collective waits for those before it, or is compared with what other ranks issue:
        what a rank that diverges wants could not pass the reductions that wait for it. Nor where backward steps, as the
        values that it wants would change."""
        steps, in_order = self._reductions.steps is not None, self._comm.keeps_order or self._comm.sanitize
        return self._comm.size > 1 and not (self._gathers or in_order or steps)

    def send_mark(self, *, diverges: bool) -> None:
        """Tells all ranks whether this one diverges before the first reduction of a backward. Those that do not begin
        to reduce, and hear of one that does before they wait. It joins their reductions when they have served it."""
        mark = self._comm.host.tell(int(diverges), f"reduce {self._reductions.gradients[0].group.name}")
        if diverges:
            self._sent = mark
        else:
            self.marks = mark

    def hear_marks(self) -> bool:
        """Returns whether a rank has diverged before the first reduction of this backward. If not, all reduce."""
        marks, self.marks = self.marks, None
        assert marks is not None
        marks.wait()
        if any(marks.numbers):
            return True
        self.note_that_all_reduce(each=True)
        return False

    def end_mark(self) -> None:
        """Waits until the mark of this rank has been sent: all have sent theirs, as they have come to an exchange."""
        if self._sent is not None:
            self._sent.wait()
            self._sent = None
