"""`Placed`: what the engine does in a step, placed so far, use by use. Integers only; see `placing`."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

from lightning_zero.run.program import Among, Facts, Kind, Op, Use


@final
class Placed:
    """The ops of a step, in the order in which they are done, up to the use `at`."""

    def __init__(self, facts: Facts, uses: Sequence[Use]) -> None:
        self.facts, self.uses = facts, uses
        self.ops: list[Op] = []
        self.at = 0

    def add(
        self,
        kind: Kind,
        target: int = -1,
        part: int = 0,
        *,
        by: int | None = None,
        after: Iterable[int] = (),
        lag: int = 0,
        nbytes: int = 0,
        among: Among = Among.SHARD,
    ) -> int:
        """Adds an op, and returns its number; see `Op`."""
        self.ops.append(Op(kind, target, self.at, part, by, tuple(sorted(after)), lag, nbytes, among))
        return len(self.ops) - 1

    def sent(self, elements: int, itemsize: int) -> int:
        """Bytes that this rank sends in a collective in which each rank has so many elements."""
        return (self.facts.ranks - 1) * elements * itemsize


class _Flight(NamedTuple):
    """A reduction under way."""

    group: int
    part: int
    reduce: int  # number of its op


@final
class PlacedReductions:
    """The reductions of a step, on their way through buckets."""

    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self._facts = placed.facts
        self._pools = [deque[_Flight | None]([None] * count) for count in placed.facts.buckets]
        self._stores: dict[int, list[int]] = {}  # group -> the ops that have stored its gradient

    def stores_of(self, group: int) -> list[int]:
        return self._stores.get(group, [])

    @property
    def stores(self) -> list[int]:
        return [op for stores in self._stores.values() for op in stores]

    def reduce(self, group: int) -> None:
        facts = self._facts.groups[group]
        for part, width in enumerate(facts.chunks):
            pool = self._pools[facts.pool]
            self._take(pool)
            sent = self._placed.sent(width, facts.reduced_itemsize)
            pool[-1] = _Flight(group, part, self._placed.add(Kind.REDUCE, group, part, nbytes=sent))

    def drain(self) -> None:
        """Stores all that is under way."""
        for pool in self._pools:
            for _ in range(len(pool)):
                self._take(pool)

    def drain_until(self, group: int) -> None:
        """Stores what is under way, up to the last of a group."""
        pool = self._pools[self._facts.groups[group].pool] if self._facts.groups[group].chunks else deque()
        own = [bucket for bucket, flight in enumerate(pool) if flight is not None and flight.group == group]
        for bucket in range(own[-1] + 1 if own else 0):
            self._store(pool, bucket)

    def _take(self, pool: deque[_Flight | None]) -> None:
        """Empties the bucket that was taken longest ago. It is the last one then."""
        pool.rotate(-1)
        self._store(pool, len(pool) - 1)

    def _store(self, pool: deque[_Flight | None], bucket: int) -> None:
        flight, pool[bucket] = pool[bucket], None
        if flight is None:
            return
        facts, replicas = self._facts.groups[flight.group], self._facts.replicas
        reduced = flight.reduce
        if replicas > 1:  # reduce-scattered, and all-gathered again
            sent = 2 * (replicas - 1) * facts.chunks[flight.part] // replicas * facts.reduced_itemsize
            reduced = self._placed.add(
                Kind.SUM, flight.group, flight.part, after=[reduced], nbytes=sent, among=Among.REPLICAS
            )
        stored = self._placed.add(Kind.STORE, flight.group, flight.part, after=[reduced])
        if self._facts.gathers_gradients and flight.part == len(facts.chunks) - 1:
            sent = self._placed.sent(facts.shard, facts.reduced_itemsize)
            stored = self._placed.add(Kind.GATHER, flight.group, after=[stored], nbytes=sent)
        self._stores.setdefault(flight.group, []).append(stored)
