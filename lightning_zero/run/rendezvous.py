"""`Rendezvous`: makes all ranks issue the same gathers and reductions in the same order, also where they diverge.

It has two modes: ranks follow a plan (`course`), or ask each other (`serving`).

A gather needs every rank. A *round* is the time from one meeting of all ranks to the next; in training, it is a step.
Ranks that have used the same units in an earlier round follow its plan (`plan.Plan`), and send only the gathers. A rank
that needs something else *diverges*: it marks a gather. Once all ranks have learnt of the mark, each says what it wants
before it gathers, and all take part in everything that any rank wants. A rank that has come to the end of the round
serves the others until they have, too:

    rank 0   block.0   block.1   head.a    done      done
    rank 1   block.0   block.1   head.b    head.c    done
    served   block.0   block.1   both      head.c    (no rank wants anything: the round is over)

Where there are no units, a plan is of calls and of the first reduction of each backward. Beside it travels a mark
(`readiness`), which ranks read where they first wait for a reduction. If a rank has diverged, the others serve it
there. Their reductions under way wait for those that it begins when it comes to them.

All this is among ranks that share shards. Where there are no units, replicas (`mesh`) go one way with them. Where there
are, a gather tells another replica nothing: each goes its own way (`replicas`), and they agree at each meeting. Between
micro-batches, marks beside their reductions tell whether all have gradients of the same parameters; else they meet.
Tensor-parallel ranks have the same batches, and so gradients of the same parameters: they agree at each step.

Micro-batches that are reduced make one round where ranks have gradients of the same parameters as in the last such
round. A rank that has others diverges at the end of a backward, so before the next one all have heard if any does.

So a head that only one rank uses, uneven evaluation, `generate` of different lengths, and a sample that only rank 0
draws all work.
"""

from typing import final

import torch

from lightning_zero.run.cache import UnitCache
from lightning_zero.run.course import Course
from lightning_zero.run.journal import Journal
from lightning_zero.run.plan import ASK, END, NEXT_BACKWARD, REDUCE
from lightning_zero.run.program import Cause
from lightning_zero.run.readiness import Readiness
from lightning_zero.run.reductions import GradientState, Reductions
from lightning_zero.run.replicas import Replicas
from lightning_zero.run.serving import Heard, RoundEnd, Serving
from lightning_zero.shards.slot import no_interception
from lightning_zero.wire.mesh import Mesh


@final
class Rendezvous:
    """Where ranks meet, and agree on gradients. In between, `course` has what each of them uses. Numbers are those of
    `Serving`."""

    def __init__(self, mesh: Mesh, cache: UnitCache, reductions: Reductions, journal: Journal) -> None:
        self._cache = cache
        self._units = cache.units
        self._reductions = reductions
        self._journal = journal
        gathers = bool(cache.units)
        # The ranks that go one way together. Each gather tells of divergence those that share shards, and no others.
        self.comm = mesh.shard if gathers else mesh.data
        self._tensor = mesh.tensor
        self._replicas = Replicas(mesh.replicate, reductions, gathers=gathers)
        self.readiness = Readiness(self.comm, reductions, gathers=gathers)
        self.serving = Serving(self.comm, cache, reductions, self._replicas, self.readiness)
        self.course = Course(self.comm, cache, reductions, self._replicas, self.serving, self.readiness, journal)
        self.is_awaited = False  # the others wait for this rank to meet them once more, as it was early
        # A step reduces several backwards, as all ranks know: a mark tells of each, where ranks would meet for it.
        self._repeats = False

    @property
    def spans(self) -> bool:
        """Whether a round may span micro-batches."""
        return self._replicas.may_settle_alike

    # -- meeting

    def meet(self, at: RoundEnd = RoundEnd.STEP) -> None:
        """Ends the round: serves the other ranks until all have come here, and settles the gradients of a backward.
        Collective; collectives of the engine that are not issued above must come after a meeting. A rank that is early
        may want something alone before the step, and meets once more: until then, the others stay here.
        Tensor-parallel ranks agree where any rank comes to a step: in one step, they have gradients of the same
        parameters."""
        is_over = False
        while not is_over:
            if self.course.is_alone:
                early, steps, statement = False, at is RoundEnd.STEP, self._reductions.statement()
            else:
                heard = self._end_round(at)
                early, steps, statement = heard.early, heard.steps, heard.statement
            said = bytes([early, steps]) + bytes(statement)  # so far, of the ranks in `comm`
            said = self._replicas.hear(said)
            is_of_all = bool(said[1]) or self._tensor.size == 1
            if self._tensor.size > 1 and is_of_all:
                said = self._tensor.host.all_reduce_bytes(said, "settle")
            if (flags := self._reductions.hear(self._reductions.read(said[2:]), of_all=is_of_all)) is not None:
                self._reductions.settle(flags)
                self._reductions.learn_order()
            if self.course.forget_old_order():
                self._begin_round()
            stays = bool(said[0]) and self.serving.may_be_wanted and not self.course.is_alone
            is_over = at is RoundEnd.EARLY or not stays
            at = RoundEnd.STAYS if at is RoundEnd.MICRO_BATCH else at
        if self.is_awaited:  # those that stay here would take its next batch, or epoch, for one more than theirs
            self._reductions.notices.are_current = False

    def _end_round(self, at: RoundEnd) -> Heard:
        """Ends the round of the ranks in `comm`, and begins the next one; see `meet`."""
        self.course.diverge()
        self._replicas.come_to_end()
        past, groups = self.course.past, len(self._reductions.gradients)
        self.is_awaited = at is RoundEnd.EARLY and self.serving.may_be_wanted
        heard = self.serving.until_end(past, at)
        self._replicas.reduce_if_awaited()
        self._repeats |= not self._units and heard.agree and at is RoundEnd.MICRO_BATCH
        if self._repeats:
            settles_alone = self._reductions.may_settle_alone and not self._reductions.has_idle
            self._repeats = settles_alone and self.readiness.marks_reductions
        is_over = self.course.count_complete(heard.statement) == groups and END in past.uses
        is_over &= at is RoundEnd.MICRO_BATCH and not heard.early
        self.course.end_round(agree=heard.agree, continues=is_over and heard.alike and self.spans)
        self._begin_round()
        self._cache.discard_all()
        return heard

    def meet_for(self, number: int) -> None:
        """Meets, and then does a call that more ranks do than `comm` has. Collective: this rank has come to it."""
        self.course.note(number)
        self.meet()
        self.serving.serve([number], number)

    def meet_before_collective(self) -> None:
        """Meets, if a rank may want something alone that the others must serve first."""
        if self.serving.may_be_wanted:
            self.meet()

    def _begin_round(self) -> None:
        self.readiness.reset()
        self._replicas.begin_backward()

    # -- backward

    def come_to_reduce(self, number: int) -> bool:
        """Sees to it that all ranks come to the first `number` reductions, and returns whether to start them; not at
        stage 3, where gathers tell when all ranks are ready.

        A reduction may wait for another rank, which never comes if it wants something alone, or has no gradients. So
        ranks serve each other until all are about to reduce, or have come to the end of the round.
        """
        if self._units or number <= self._reductions.started:
            return False
        tells = self._reductions.may_wait or self._repeats
        if tells and not self.readiness.all_reduce and self.readiness.marks is None:
            past = self.course.past
            if self.course.follow(REDUCE):  # a mark is on its way
                self._reductions.wait_after(self.course.hear_marks)
            else:
                self.course.wait_until_all_reduce()
            if self.readiness.marks_reductions:
                past.begins = past.begins or (REDUCE, False)
                past.note(REDUCE)
            else:
                past.note_asked()
        return True

    def end_backward(self) -> None:
        """Notes the end of a backward among the uses of units. Where all ranks are known to come to all reductions
        before they want anything else, replicas sum here what is under way: each settles it at a time of its own."""
        if self._units:
            self.course.end_backward()
        elif self.readiness.all_reduce:
            self._replicas.drain()

    def settle_last_backward(self) -> None:
        """Settles the gradients of the backward before the one that begins: by what is known of the other ranks, and
        otherwise by meeting. Collective."""
        self.course.hear_marks()
        if self.readiness.settles_alone:
            self._settle_alone()
            return
        if self.course.expects(NEXT_BACKWARD):
            with no_interception(), torch.no_grad():
                if self.course.follow(NEXT_BACKWARD):
                    self.course.past.note(NEXT_BACKWARD)
                    return
        if not self._settles_by_leaving():
            self.meet(RoundEnd.MICRO_BATCH)

    def settle_gradients(self, *, meets: bool = False) -> None:
        """Makes ranks agree on which parameters have gradients, if they have not since the last backward. With `meets`,
        ranks also meet if one of them may have read gradients alone, so that another collective may follow."""
        self.course.hear_marks()
        is_unsettled = self._reductions.state is GradientState.UNSETTLED
        if not (is_unsettled or meets):
            return  # as nearly always: it is asked at each look at a `p.grad`
        if not meets:
            self._journal.note(Cause.READ_GRADIENT)
        with no_interception(), torch.no_grad():
            if meets and (is_unsettled or self.serving.may_be_wanted):
                self.meet()
            elif is_unsettled and self.readiness.settles_alone:
                self._settle_alone()
            elif is_unsettled and not self._settles_by_leaving():
                self.meet(RoundEnd.EARLY)

    def let_come(self, *, early: bool) -> None:
        """Lets others come to where this rank waits for all of them: settles the last backward, as they may wait for
        that, and meets one that is `early`."""
        with no_interception(), torch.no_grad():
            if early or self._reductions.state is GradientState.UNSETTLED:
                self.meet(RoundEnd.EARLY)

    def _settles_by_leaving(self) -> bool:
        """Leaves the plan. Returns whether the last backward is settled then, as the others begin the next one before
        they learn that this rank has left: they meet no more for it."""
        with no_interception(), torch.no_grad():
            self.course.diverge()
        return self._reductions.state is not GradientState.UNSETTLED and not self.is_awaited

    def _settle_alone(self) -> None:
        """Settles gradients whose reductions all ranks start by themselves, as each has said that it has some. If every
        parameter has one here, nothing is to be learnt from the others. Otherwise this rank asks, and all settle that
        have not yet."""
        if self._reductions.is_complete:
            self.readiness.settle_alone(None)
            self.readiness.knew_all = True
            return
        past = self.course.past
        follows = self.course.follow(ASK)
        if not self.serving.until_settled(past, follows=follows):
            self.course.drop()
        if self.readiness.marks_reductions:
            past.note(ASK)

    def forget_backward(self) -> None:
        """Forgets what was known of a backward, which has failed on every rank. Its plan would start reductions in the
        next one, before that has gradients; and a plan of this round would count its gradients. Where ranks start
        reductions by themselves, others may wait in some that this rank has not come to, or for it to come to any."""
        with no_interception(), torch.no_grad():
            self.course.diverge()
        number = len(self._reductions.gradients)
        if self._reductions.reduces and self._reductions.steps is None and self.come_to_reduce(number):
            self._reductions.start(number)
        self.readiness.reset()
        self.course.past.has_failed = True
