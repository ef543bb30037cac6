"""Gathers in company: ranks go the same way at full speed, and may go apart at any time.

A gather needs every rank. Ranks mostly want the same ones in the same order, so the order of the last *round* (from one
collective of another kind to the next: in training, a step) is what they expect of this one. While a rank finds its
expectation met it gathers ahead, and sends a *signal* with each gather: it goes on. A rank that wants something else
signals that it goes another way, and takes part in what the others have begun meanwhile. From there to the end of the
round every rank says what it wants before it gathers; all serve all that is wanted, and a rank that has come to the end
serves the others until they have too.

    rank 0   block.0   block.1   head.a    done      done
    rank 1   block.0   block.1   head.b    head.c    done
    served   block.0   block.1   both      head.c    (nobody wants any: the round is over)

So a head that one rank does not use, uneven evaluation, `generate` of other lengths and a sample that only rank 0 draws
all come to their end; and whatever happens, all ranks issue the same collectives in the same order.

Signals and wishes also say how many groups of gradients their sender has complete. The reductions that all ranks can
start are started by all at the same place of the order: none can wait in one for a rank that waits for a gather.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

from lightning_zero.comm import RankTimeoutError, Work
from lightning_zero.mesh import Mesh

_DONE = -1


class _Gather(NamedTuple):
    """Something that can be wanted."""

    label: str  # for messages
    serve: Callable[[bool], None]  # gathers; told whether this rank keeps the result
    is_held: Callable[[], bool] | None  # whether its result is there; None for what must not be gathered ahead


class _Signal(NamedTuple):
    """On its way from all ranks: one row each, (goes another way, complete groups)."""

    rows: Tensor
    work: Work


@dataclass
class _Round:
    """What this rank knows of the time since ranks have met."""

    key: tuple[int, bool] = (_DONE, False)  # how it began: what was wanted first, and whether gradients are
    expected: list[int] = field(default_factory=list)  # what is wanted, if it goes on as the last such; else empty
    issued: int = 0  # how many of the expected are begun
    wanted: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)  # begun and not wanted yet
    signal: _Signal | None = None  # of the last want
    agree: bool = True  # as far as is known, all ranks want the same
    dropped: int | None = None  # what was begun ahead in vain: it was still in use


@final
class Rendezvous:
    """Agrees on what is gathered next, among the ranks that share shards.

    Args:
        mesh: the ranks.
        prefetch: gathers begun ahead.
    """

    def __init__(self, mesh: Mesh, prefetch: int) -> None:
        self._mesh = mesh
        self._prefetch = prefetch
        self._gathers: list[_Gather] = []
        self._rounds: dict[tuple[int, bool], list[int]] = {}  # how a round began -> what was wanted in the last such
        self._not_ahead: set[int] = set()  # was still in use when it was gathered ahead
        self.count_complete: Callable[[], int] = lambda: 0  # gradient groups, from the first of the agreed order
        self.start_reductions: Callable[[int], None] = lambda number: None  # of so many groups of that order
        self.went_apart = False  # since its user has last looked
        self.is_open = False  # a pass has begun, or anything was wanted, since ranks have met
        self._round = _Round()
        self._guard(self.meet)

    def enroll(self, label: str, serve: Callable[[bool], None], is_held: Callable[[], bool] | None = None) -> int:
        """Returns the number under which `want` asks for it; enroll the same on every rank. See `_Gather`."""
        self._gathers.append(_Gather(label, serve, is_held))
        return len(self._gathers) - 1

    def is_ahead(self, number: int) -> bool:
        """Whether it has been begun and waits to be wanted."""
        return number in self._round.ahead

    def open(self) -> None:
        """Ranks may go ways of their own from here on, until they meet."""
        self.is_open = True

    def want(self, number: int) -> None:
        """Returns when this rank has been served."""
        if self._mesh.shard.size == 1:
            self._gathers[number].serve(True)
            return
        self.open()
        with self.undisturbed():
            if self._round.expected and self._follow(number):
                return
            self._ask(number)

    def meet(self) -> None:
        """Ends the round: serves the others until all have come here. A collective, where anything can be wanted.

        Any other collective of ours but a reduction of gradients does so first; see `ended`.
        """
        self.is_open = False
        if self._mesh.shard.size == 1 or not self._gathers:
            return
        with self.undisturbed():
            if self._round.expected and not self._others_part() and len(self._round.wanted) < len(self._round.expected):
                self._part()
            while any(want != _DONE for want in self._exchange(_DONE)):
                pass
        if self._round.wanted and self._round.agree:
            self._rounds[self._round.key] = self._round.wanted
            if self._round.dropped is not None:  # on all ranks, as they have wanted the same
                self._not_ahead.add(self._round.dropped)
        self._round = _Round()

    def forget(self) -> None:
        """Expects nothing from here on: what was wanted in earlier rounds is about to be let go of."""
        self._rounds.clear()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Meets, once, and then leaves the collectives inside alone."""
        self.meet()
        with self.undisturbed():
            yield

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Leaves the collectives inside alone: they are the rendezvous itself, or follow one at once.

        What fails inside is fatal (a lost rank): no `finally`, or what comes after would meet, and wait once more.
        """
        before = self._mesh.shard.before_next
        self._guard(None)
        yield
        self._guard(before)

    def _guard(self, before_next: Callable[[], None] | None) -> None:
        for comm in (self._mesh.world, self._mesh.shard):
            comm.before_next = before_next

    # -- the same way

    def _follow(self, number: int) -> bool:
        """Goes on as expected; False where ranks go, or this one wants to go, another way."""
        if self._others_part():
            return False
        at = len(self._round.wanted)
        is_expected = at < len(self._round.expected) and self._round.expected[at] == number
        if is_expected and self.is_ahead(number) and not self._take(number):
            self._round.dropped, is_expected = number, False
        if not is_expected:
            self._part()
            return False
        self._round.wanted.append(number)
        self._issue(at, keep=True)
        self._send_signal(at, parts=False)
        return True

    def _take(self, number: int) -> bool:
        """Takes what was begun ahead; whether it is there."""
        self._round.ahead.remove(number)
        is_held = self._gathers[number].is_held
        return is_held is not None and is_held()

    def _issue(self, at: int, *, keep: bool) -> None:
        """Begins what all ranks begin when they want the gather `at`: this one, and those that follow it."""
        while self._round.issued < len(self._round.expected) and self._round.issued <= at + self._prefetch:
            number = self._round.expected[self._round.issued]
            if self._round.issued > at and not self._may_be_ahead(number, at):
                break
            self._gathers[number].serve(keep)
            if keep and self._round.issued > at:
                self._round.ahead.append(number)
            self._round.issued += 1

    def _may_be_ahead(self, number: int, at: int) -> bool:
        """The same on every rank."""
        is_in_use = number in self._not_ahead or number in self._round.expected[at : self._round.issued]
        return self._gathers[number].is_held is not None and not is_in_use

    def _part(self) -> None:
        """Tells the others, and takes part in what they begin before they hear of it."""
        at = len(self._round.wanted)
        if at < len(self._round.expected):
            self._issue(at, keep=False)
            self._send_signal(at, parts=True)
            self._others_part()
        self._round.expected = []

    def _send_signal(self, at: int, *, parts: bool) -> None:
        label = self._gathers[self._round.expected[at]].label
        rows = torch.empty(self._mesh.shard.size, 2, dtype=torch.int64)
        mine = torch.tensor([parts, self.count_complete()])
        self._round.signal = _Signal(rows, self._mesh.shard.all_gather_host(rows, mine, f"signal at {label}"))

    def _others_part(self) -> bool:
        """Hears the signals of the last want."""
        signal, self._round.signal = self._round.signal, None
        if signal is None:
            return False
        signal.work.wait()
        parting, complete = signal.rows.unbind(1)
        self.start_reductions(int(complete.min()))
        if not parting.any():
            return False
        self._round.expected = []
        return True

    # -- apart

    def _ask(self, number: int) -> None:
        if self.is_ahead(number) and self._take(number):  # begun before ranks went apart
            self._round.wanted.append(number)
            return
        begins = not self._round.wanted
        self._exchange(number)
        self._round.wanted.append(number)
        if begins and self._round.agree:
            self._round.expected = self._rounds.pop(self._round.key, [])
            self._round.issued = min(1, len(self._round.expected))
            self._issue(0, keep=True)

    def _exchange(self, number: int) -> list[int]:
        """Says what this rank wants, hears what the others want, and serves it."""
        comm = self._mesh.shard
        rows = torch.empty(comm.size, 4, dtype=torch.int64)
        mine = torch.tensor([number, len(self._round.wanted), torch.is_grad_enabled(), self.count_complete()])
        try:
            comm.all_gather_host(rows, mine, "rendezvous").wait()
        except RankTimeoutError as error:
            what = "had done" if number == _DONE else f"wanted {self._gathers[number].label}"
            raise RankTimeoutError(f"Rank {comm.rank} {what}. {error}") from error
        if not self._round.wanted:
            self._round.key = (number, torch.is_grad_enabled())
        self._round.agree &= bool((rows[:, :3] == rows[0, :3]).all())
        self.went_apart |= not self._round.agree
        self.start_reductions(int(rows[:, 3].min()))
        wants = rows[:, 0].tolist()
        for want in sorted(set(wants) - {_DONE}):
            self._gathers[want].serve(want == number)
        return wants
