"""`Board`: a few words between ranks through the store of the process group, never through a collective.

Saving a checkpoint needs agreements: that every rank has come, and that every rank has written. They must hold when
ranks are slow, dead, or not there at all, next to collectives under way, and from a background thread. So every rank
writes one key, rank 0 reads them all, and one key carries its verdict back:

    rank 1   post ------------.            .--> verdict
    rank 0   post -> all there? -> decide -+--> verdict         missing after `wait_timeout`: the verdict says who
    rank 2   post ------------'            '--> verdict
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, final

from torch.distributed import DistError, PrefixStore, Store

Record = dict[str, Any]  # plain data, small
Decide = Callable[[list[Record]], Record]

_LOOK_AGAIN = 0.002  # s; grows up to _LOOK_SLOWLY
_GROWS = 1.25  # a pause is then at most a fourth of the wait before it: who waits for a save of 0.2 s loses little
_LOOK_SLOWLY = 0.25  # s
_LONGEST_WORK = 1800.0  # s; for so long work is believed in that cannot tell how it gets on
_BEATS_IN_TIMEOUT = 5  # so that one late beat is not taken for death


class AgreementError(RuntimeError):
    """What ranks wanted to do together did not happen: one was missing, or one had an error. The same on all ranks."""

    is_verdict = False  # what rank 0 decided. Otherwise rank 0 was lost, and nobody knows what it decided, if anything


@final
class Board:
    """One rank's view of the store that all ranks share. A rank that shows no sign of life for `wait_timeout` is taken
    for dead."""

    def __init__(self, store: Store, rank: int, size: int, wait_timeout: timedelta) -> None:
        self._store, self.rank, self.size, self._wait_timeout = store, rank, size, wait_timeout
        self._beat_seconds = wait_timeout.total_seconds() / _BEATS_IN_TIMEOUT
        self._beats = 0
        self._last_beat = -math.inf
        self._waits_at = ""  # the topic
        self._heard: str | None = None  # the latest verdict's key
        self._has_given_up = False  # and left word of it

    def clone(self, wait_timeout: timedelta | None = None) -> "Board":
        """A board for another thread of each rank, or for another patience: a store answers one thread at a time. The
        signs of life are its own, too, or a rank whose other thread goes on would seem alive here."""
        store = PrefixStore("clone", self._store.clone())  # type: ignore[attr-defined]
        return Board(store, self.rank, self.size, wait_timeout or self._wait_timeout)

    def agree(self, topic: str, record: Record, decide: Decide, absent: str = "ranks {missing} never came") -> Record:
        """Every rank calls it with its record; rank 0 calls `decide(records)`; every rank returns what that returns.

        Args:
            topic: names this agreement; never used before.
            record: what this rank has to say. Under the key "error" it says why there is nothing to decide.
            decide: called on rank 0 once all records are there, in rank order, and none has an error.
            absent: says, with ``{missing}``, what it means that ranks did not come.

        Raises:
            AgreementError: on every rank that came, with the same words, when a rank shows no life for
                `wait_timeout`, when a record has an error, or when `decide` raises.
        """
        self._waits_at, self._last_beat = topic, -math.inf
        try:
            self.beat()
            if self._has_given_up:  # a user has caught that error: it must not be named as the cause of a later one
                self._store.delete_key(f"lost/{self.rank}")
                self._has_given_up = False
            self._store.set(f"{topic}/{self.rank}", json.dumps(record))
            if self.rank == 0:
                verdict = self._decide(topic, decide, absent)
            else:
                self._wait_for({0: f"{topic}/verdict"}, topic, absent)
                verdict = json.loads(self._store.get(f"{topic}/verdict"))
        except DistError as error:  # rank 0's process holds the store, unless a launcher does
            raise AgreementError(f"rank 0 has died, or its store does not answer ({type(error).__name__})") from error
        finally:
            self._waits_at = ""
        if "refused" in verdict:
            refusal = AgreementError(verdict["refused"])
            refusal.is_verdict = True
            raise refusal
        return verdict

    def beat(self) -> None:
        """Says that this rank is alive; to be called in the course of long work. Costs a few messages a timeout."""
        now = time.monotonic()
        if now - self._last_beat >= self._beat_seconds:
            self._last_beat = now
            self._beats += 1
            self._store.set(f"beat/{self.rank}", f"{self._beats} {self._waits_at}")

    def raise_flag(self, name: str) -> None:
        """Leaves word for ranks that look at `has_flag`, until one of them lowers it."""
        self._store.set(f"flag/{name}", "up")

    def has_flag(self, name: str) -> bool:
        """Whether a rank has raised it. One message to rank 0; False where that does not answer."""
        with suppress(DistError):
            return self.size > 1 and self._has(f"flag/{name}")
        return False

    def lower_flag(self, name: str) -> None:
        """The reverse of `raise_flag`, whoever has raised it."""
        self._store.delete_key(f"flag/{name}")

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Says that this rank is alive in the course of work that cannot call `beat`. Nothing inside may use the board.

        Nobody sees whether such work gets on: after half an hour it says nothing more.
        """
        if self.size == 1:
            yield
            return
        done = threading.Event()
        thread = threading.Thread(target=self._beat_until, args=(done,), name="lightning_zero beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _beat_until(self, done: threading.Event) -> None:
        end = time.monotonic() + _LONGEST_WORK
        while not done.wait(self._beat_seconds) and time.monotonic() < end:
            with suppress(DistError):  # the agreement that follows will say so
                self.beat()

    def _decide(self, topic: str, decide: Decide, absent: str) -> Record:
        keys = {rank: f"{topic}/{rank}" for rank in range(self.size)}
        records: list[Record] = []
        try:
            self._wait_for(keys, topic, absent)
            records += [json.loads(self._store.get(key)) for key in keys.values()]
            errors = _errors_of(records)
            verdict = {"refused": errors} if errors else decide(records)
        except AgreementError as error:
            verdict = {"refused": str(error)}
        except Exception as error:  # every rank must hear of it
            verdict = {"refused": f"{type(error).__name__}: {error}"}
        self._store.set(f"{topic}/verdict", json.dumps(verdict))
        for key in keys.values():
            self._store.delete_key(key)
        if records and self._heard is not None:  # all have come, so all have heard the one before
            self._store.delete_key(self._heard)
        self._heard = f"{topic}/verdict"
        return verdict

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _wait_for(self, keys: dict[int, str], topic: str, absent: str) -> None:
        """Until each of these ranks has posted its key, or one of them has shown no life for too long."""
        pause = _LOOK_AGAIN
        beats: dict[int, str] = {}
        seen: dict[int, float] = {}  # rank -> when it last showed life
        ranks = set(keys)
        while ranks := {rank for rank in ranks if not self._has(keys[rank])}:
            self.beat()
            now = time.monotonic()
            for rank in ranks:
                key = f"beat/{rank}"
                beat = self._store.get(key).decode() if self._has(key) else ""
                # Who waits elsewhere will not come: without this, two ranks that wait at two topics would take each
                # other's signs of life for work, and wait for ever.
                is_elsewhere = beat.partition(" ")[2] not in ("", topic)
                if rank not in seen or (beats[rank] != beat and not is_elsewhere):
                    seen[rank] = now
                beats[rank] = beat
            if lost := {rank for rank in ranks if now - seen[rank] > self._wait_timeout.total_seconds()}:
                self._give_up(topic, lost, alive=ranks - lost, absent=absent)
            time.sleep(pause)
            pause = min(_GROWS * pause, _LOOK_SLOWLY)

    def _give_up(self, topic: str, lost: set[int], alive: set[int], absent: str) -> None:
        """Raises, and leaves word for ranks that wait for this one elsewhere."""
        # Of those that this rank has not watched, who posted nothing is missing too.
        silent = {rank for rank in range(self.size) if not self._has(f"{topic}/{rank}")}
        told = absent.format(missing=sorted(silent - alive) or sorted(lost))
        self._store.set(f"lost/{self.rank}", told)
        self._has_given_up = True
        raise AgreementError(told)


def _errors_of(records: list[Record]) -> str:
    """Who said what; what several ranks say alike, once."""
    said: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        if "error" in record:
            said.setdefault(record["error"], []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {told}" for told, ranks in said.items()
    )
