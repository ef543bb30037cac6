"""`Board`: agreements between ranks through the store of the process group, without any collective.

Saving a checkpoint needs the ranks to agree that all have come, and that all have written. This must work when ranks
are slow or dead, beside collectives under way, and from a background thread. So every rank posts a record under a key
of its own, rank 0 reads them all, and one key carries its verdict back:

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

from lightning_zero.wire.worlds import Held

Record = dict[str, Any]  # small and plain: it is sent as JSON
Decide = Callable[[list[Record]], Record]

_FIRST_PAUSE = 0.002  # s, between two looks at the store
_LONGEST_PAUSE = 0.25  # s
_GROWTH = 1.25  # of pauses: each is at most a fourth of the wait before it, so a save of 0.2 s is noticed soon
_LONGEST_WORK = 1800.0  # s, after which `alive` stops its beats
_BEATS_IN_TIMEOUT = 5  # so that one late beat does not count as death


class AgreementError(RuntimeError):
    """An agreement that failed: a rank was missing, or had an error. All ranks raise it with the same message."""

    is_verdict = False  # whether rank 0 decided this; otherwise rank 0 was lost, and its decision is unknown


@final
class Board:
    """One rank's view of the store that ranks share. A rank that shows no life for `wait_timeout` counts as dead."""

    def __init__(self, store: Store, rank: int, size: int, wait_timeout: timedelta) -> None:
        self.rank, self.size, self._wait_timeout = rank, size, wait_timeout
        self._held = Held(store)
        self._beat_seconds = wait_timeout.total_seconds() / _BEATS_IN_TIMEOUT
        self._last_beat = -math.inf
        self._waits_at = ""  # the topic of the agreement that this rank is in
        self._last_verdict: str | None = None  # the key of the latest verdict
        self._has_given_up = False  # and has posted why

    @property
    def _store(self) -> Store:
        return self._held.thing

    def clone(self, wait_timeout: timedelta | None = None) -> "Board":
        """Returns a board for another thread of each rank, or with another time limit. A store answers one thread at a
        time. The clone has beats of its own, because a rank whose other thread still works must not seem alive here."""
        store = PrefixStore("clone", self._store.clone())  # type: ignore[attr-defined]
        return Board(store, self.rank, self.size, wait_timeout or self._wait_timeout)

    def agree(self, topic: str, record: Record, decide: Decide, absent: str = "ranks {missing} never came") -> Record:
        """Returns rank 0's `decide(records)` on every rank. Collective: call it on every rank.

        Args:
            topic: names this agreement; never used before.
            record: what this rank contributes. Under the key "error" it says why there is nothing to decide.
            decide: called on rank 0 with the records in rank order, once all are there and none has an error.
            absent: the message when ranks, ``{missing}``, did not come.

        Raises:
            AgreementError: on every rank that came, with the same message, when a rank shows no life for
                `wait_timeout`, when a record has an error, or when `decide` raises.
        """
        self._waits_at, self._last_beat = topic, -math.inf
        try:
            self.beat()
            if self._has_given_up:  # the user has caught that error: it must not be named as the cause of a later one
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

    def part(self, topic: str) -> None:
        """Ends what ranks do here: rank 0, whose process may hold the store, returns when all others have called this,
        or seem dead; they return at once, and may not use the board again if rank 0 ends. `topic` as in `agree`."""
        keys = {rank: f"{topic}/{rank}" for rank in range(1, self.size)}
        if self.rank:
            self._store.set(keys[self.rank], "gone")
            return
        with suppress(AgreementError):
            self._wait_for(keys, topic, "ranks {missing} have stopped")
        for key in keys.values():
            self._store.delete_key(key)

    def beat(self) -> None:
        """Tells the other ranks that this one is alive. Call it during long work; it sends few messages per timeout."""
        now = time.monotonic()
        if now - self._last_beat >= self._beat_seconds:
            self._last_beat = now
            self._store.set(f"beat/{self.rank}", f"{now} {self._waits_at}")

    def raise_flag(self, name: str) -> None:
        """Sets a flag that `has_flag` shows to every rank, until any rank lowers it."""
        self._store.set(f"flag/{name}", "up")

    def has_flag(self, name: str) -> bool:
        """Whether any rank has raised the flag. Sends one message to rank 0; False if that does not answer."""
        with suppress(DistError):
            return self.size > 1 and self._has(f"flag/{name}")
        return False

    def lower_flag(self, name: str) -> None:
        """Removes the flag, whichever rank has raised it."""
        self._store.delete_key(f"flag/{name}")

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Beats in the background while the body runs, for work that cannot call `beat`. The body must not use this
        board.

        Nobody can see whether such work progresses, so the beats stop after half an hour.
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
            with suppress(DistError):  # the next agreement will raise it
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
        except Exception as error:  # must reach every rank
            verdict = {"refused": f"{type(error).__name__}: {error}"}
        self._store.set(f"{topic}/verdict", json.dumps(verdict))
        for key in keys.values():
            self._store.delete_key(key)
        if records and self._last_verdict is not None:  # all ranks have come here, so all have read it
            self._store.delete_key(self._last_verdict)
        self._last_verdict = f"{topic}/verdict"
        return verdict

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _wait_for(self, keys: dict[int, str], topic: str, absent: str) -> None:
        """Waits until each of these ranks has posted its key. Gives up when one has shown no life for too long."""
        pause = _FIRST_PAUSE
        beats: dict[int, str] = {}  # rank -> its latest beat
        seen: dict[int, float] = {}  # rank -> when it last showed life
        ranks = set(keys)
        while ranks := {rank for rank in ranks if not self._has(keys[rank])}:
            self.beat()
            now = time.monotonic()
            for rank in ranks:
                key = f"beat/{rank}"
                beat = self._store.get(key).decode() if self._has(key) else ""
                # A rank that waits at another topic will not come. If its beats counted, two ranks that wait at two
                # topics would wait for each other for ever.
                is_elsewhere = beat.partition(" ")[2] not in ("", topic)
                if rank not in seen or (beats[rank] != beat and not is_elsewhere):
                    seen[rank] = now
                beats[rank] = beat
            if lost := {rank for rank in ranks if now - seen[rank] > self._wait_timeout.total_seconds()}:
                self._give_up(topic, lost, alive=ranks - lost, absent=absent)
            time.sleep(pause)
            pause = min(_GROWTH * pause, _LONGEST_PAUSE)

    def _give_up(self, topic: str, lost: set[int], alive: set[int], absent: str) -> None:
        """Raises AgreementError, after posting its message for ranks that wait for this one in a collective."""
        # Ranks that this one did not watch are missing too if they posted nothing.
        silent = {rank for rank in range(self.size) if not self._has(f"{topic}/{rank}")}
        told = absent.format(missing=sorted(silent - alive) or sorted(lost))
        self._store.set(f"lost/{self.rank}", told)
        self._has_given_up = True
        raise AgreementError(told)


def _errors_of(records: list[Record]) -> str:
    """Returns the errors in the records with the ranks that had each, or an empty string."""
    ranks_of: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        if "error" in record:
            ranks_of.setdefault(record["error"], []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {error}" for error, ranks in ranks_of.items()
    )
