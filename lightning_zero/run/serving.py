"""`Serving`: how ranks that do not go by a plan take part in what any of them wants; see `rendezvous`."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, NamedTuple, final

import torch

from lightning_zero.run.cache import UnitCache
from lightning_zero.run.plan_cache import Past
from lightning_zero.run.readiness import Readiness
from lightning_zero.run.reductions import GradientState, Reductions
from lightning_zero.run.replicas import Replicas
from lightning_zero.run.statement import Statement
from lightning_zero.shards.slot import no_interception
from lightning_zero.wire.comm import Comm, RankTimeoutError

# The others may wait in a reduction for gradients that this rank has not got yet, and cannot serve it.
_IN_BACKWARD = (
    "A hook in backward cannot read this on one rank alone once gradients are being reduced: read it there on every "
    "rank, or on one rank before or after backward, or give ZeroStrategy(overlap=False)"
)


class RoundEnd(Enum):
    """What a rank comes to that wants nothing more in this round."""

    STEP = auto()  # a step, or anything else that all ranks come to
    MICRO_BATCH = auto()  # another micro-batch of the same step
    EARLY = auto()  # something that it may want alone: it meets the others once more before the step
    STAYS = auto()  # nothing new: it waits for a rank that was early


class _Call(NamedTuple):
    """A collective that a rank may want alone, beside the gathers of units. It is never done ahead."""

    label: str  # for messages
    serve: Callable[[bool], Any]  # issues it, and returns its result; told whether this rank wants that
    is_of_all: bool  # done once no rank wants anything else that others serve: they will come to it as well


class Heard(NamedTuple):
    """What all ranks have said in one exchange; the same on all of them."""

    wants: list[int]  # numbers that any rank wants, in order; empty if all have come to the end of the round
    agree: bool  # all want the same, have used the same before, and know the same of it
    early: bool  # a rank will meet the others once more before the step
    steps: bool  # a rank has come to a step, and not only to the gradients of a micro-batch
    alike: bool  # all have gradients of the same parameters
    ended: bool  # a rank has come to the end of the round
    statement: Statement


@final
class Serving:
    """Exchanges what the ranks in `comm` want next, and does it. Each unit has its number in the cache; calls, and last
    the reductions of a backward, have the numbers after those."""

    def __init__(
        self, comm: Comm, cache: UnitCache, reductions: Reductions, replicas: Replicas, readiness: Readiness
    ) -> None:
        self._comm = comm.host
        self._cache = cache
        self._units = cache.units
        self._reductions = reductions
        self._replicas = replicas  # starts reductions, where all ranks are ready for them
        self._readiness = readiness
        self._calls: list[_Call] = []
        self._result: Any = None  # of the latest call that this rank has wanted
        self.is_waiting = False  # this rank wants nothing but that the others come to where it is

    def enroll(self, label: str, serve: Callable[[bool], Any], *, is_of_all: bool = False) -> int:
        """Returns the number of a call; see `_Call`."""
        self._calls.append(_Call(label, serve, is_of_all))
        return len(self._units) + len(self._calls) - 1

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(call.label for call in self._calls)

    @property
    def of_all(self) -> tuple[int, ...]:
        """The places in `labels` of the calls that are of all ranks."""
        return tuple(at for at, call in enumerate(self._calls) if call.is_of_all)

    @property
    def may_be_wanted(self) -> bool:
        """Whether there is anything that one rank can want alone."""
        return bool(self._units or self._calls)

    @property
    def to_reduce(self) -> int:
        """The number that a rank wants when it is about to reduce gradients."""
        return len(self._units) + len(self._calls)

    @property
    def to_settle(self) -> int:
        """The number that a rank wants when it must know which parameters have gradients on the others."""
        return self.to_reduce + 1

    # -- together

    def serve(self, wants: Sequence[int], own: int | None, *, early: bool = False) -> None:
        """Takes part in everything that is wanted and due, and keeps the results of what this rank wants (`own`).
        `early` is a rank that will come to what the others want."""
        for want in wants:
            if not self.is_due(want, wants, early=early):
                continue
            if want == self.to_reduce:
                if len(wants) == 1:  # of the others: this rank has no gradients, and contributes zeros
                    self._reductions.forget_settled()
                    self._reductions.start(len(self._reductions.gradients))
                    self._replicas.drain()
            elif want == self.to_settle:
                pass  # all have settled as they heard of it
            elif want >= len(self._units):
                result = self._calls[want - len(self._units)].serve(want == own)
                if want == own:
                    self._result = result
            elif want == own:
                self._cache.gather(want)
            else:
                self._units[want].pass_by()

    def is_due(self, want: int, wants: Sequence[int], *, early: bool) -> bool:
        """Whether what is wanted is done now; see `_Call`."""
        at = want - len(self._units)
        if not (0 <= at < len(self._calls) and self._calls[at].is_of_all):
            return True
        return not early and all(other in (want, self.to_reduce) for other in wants)

    def take_result(self) -> Any:
        """Returns the result of the latest call that this rank has wanted, once."""
        result, self._result = self._result, None
        return result

    def until_all_reduce(self, past: Past) -> Heard:
        """Serves the others until all are about to reduce gradients, or have come to the end of the round."""
        with self._waiting(), no_interception(), torch.no_grad():
            while (heard := self.exchange(self.to_reduce, past)).wants != [self.to_reduce]:
                self.serve(heard.wants, self.to_reduce, early=heard.early)
        return heard

    def until_settled(self, past: Past, *, follows: bool) -> bool:
        """Asks which parameters have gradients on the others, and serves them until all have settled those of the last
        backward: the others come to an exchange before they reduce again. Returns whether all asked, of which each
        `follows` a plan, or none."""
        agree = True
        with self._waiting(), no_interception(), torch.no_grad():
            while self._readiness.settles_alone:
                heard = self.exchange(self.to_settle, past, follows=follows)
                self.serve(heard.wants, self.to_settle, early=heard.early)
                agree &= heard.agree
        return agree

    def until_end(self, past: Past, at: RoundEnd) -> Heard:
        """Serves the others until all have come to the end of the round, as this rank has; see `Rendezvous.meet`."""
        with self._waiting():
            while (heard := self.exchange(at, past)).wants:
                self.serve(heard.wants, None, early=heard.early)
        return heard

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False

    # -- what is said

    def exchange(self, want: int | RoundEnd, past: Past, *, follows: bool = False) -> Heard:
        """Says what this rank wants, by its number, or that it has come to the end of the round; hears the same of the
        others. `past` is what it has done in this round; it `follows` its plan after this, if all agree. Collective."""
        end = self.to_settle + 1
        number = want if isinstance(want, int) else end
        wants = bytearray(end + 1)
        wants[number] = 1
        is_unsettled = self._reductions.state is GradientState.UNSETTLED
        same = self._state(number + (want is RoundEnd.MICRO_BATCH), past, follows=follows)
        pattern = self._reductions.pattern.to_bytes(8, "little")
        collects = self._readiness.settles_alone and not is_unsettled
        is_early, is_step = want is RoundEnd.EARLY, want is RoundEnd.STEP
        told = bytes([is_early, is_step, self._readiness.knew_all, collects])
        own = bytes(self._reductions.statement())
        parts = [bytes(wants), *_with_complement(same), *_with_complement(pattern), told, own]
        try:
            heard = self._comm.all_reduce_bytes(b"".join(parts), "rendezvous")
        except RankTimeoutError as error:
            self._explain(error, number)
            raise
        self._readiness.end_mark()
        each = io.BytesIO(heard)
        wanted, one, other, first, second, anybody, said = (each.read(len(part)) for part in parts)
        statement = self._reductions.read(said)
        wants_of_any = [at for at, flag in enumerate(wanted[:end]) if flag]
        if wants_of_any and self._units:  # else the rest starts together, when gradients are settled
            self._replicas.start(statement.complete)
        agree, alike = one == _complement(other), first == _complement(second)
        early, steps, all_known, collects = (bool(flag) for flag in anybody)
        # A rank that reduces again, while this one has not settled the last backward, has settled it alone.
        settles = wanted[self.to_settle] or wanted[self.to_reduce]
        if settles and self._readiness.settles_alone and not collects:
            self._readiness.settle_alone(None if all_known else statement)
        return Heard(wants_of_any, agree, early, steps, alike, bool(wanted[end]), statement)

    def _state(self, want: int, past: Past, *, follows: bool) -> bytes:
        """What is the same on all ranks if they agree."""
        state = self._reductions.state
        began_on = past.begins is not None and past.begins[1]  # on a rank that evaluates first, it may not be
        is_collecting, is_unsettled = state is GradientState.COLLECTING, state is GradientState.UNSETTLED
        modes = (torch.is_grad_enabled(), is_collecting, is_unsettled, past.has_failed, began_on, follows)
        flags = sum(mode << at for at, mode in enumerate(modes))
        return b"".join(
            value.to_bytes(8, "little") for value in (want, len(past.uses), past.digest, past.counts, flags)
        )

    def _explain(self, error: RankTimeoutError, want: int) -> None:
        """Adds to the error what this rank waits for."""
        labels = [f"the all-gather of {unit.name or 'the model'}" for unit in self._units]
        labels += [*self.labels, "the reductions of a backward", "the agreement on the gradients of a backward"]
        labels += ["the agreement that ends a step or an evaluation"]
        error.place = f"{labels[want]}, on rank {self._comm.rank}"
        if self._readiness.all_reduce and want < self.to_reduce:
            error.details.append(_IN_BACKWARD)


_COMPLEMENTS = bytes(range(255, -1, -1))


def _complement(value: bytes) -> bytes:
    return value.translate(_COMPLEMENTS)


def _with_complement(value: bytes) -> tuple[bytes, bytes]:
    """Returns bytes of which the maximum over ranks tells whether all have the same: only then are both maxima still
    complements of each other."""
    return value, _complement(value)
