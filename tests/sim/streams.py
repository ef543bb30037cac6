"""Streams whose work is done as late, or as early, as a device may do it; events; what the host has waited for."""

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import Any, NamedTuple

import torch

PRIVATE_USE = int(torch._C._autograd.DeviceType.PrivateUse1)
HANG_S = 10.0  # s that the host waits for a stream before it calls that a hang

LOCK = threading.RLock()  # of everything that is simulated
CHANGED = threading.Condition(LOCK)  # notified of each launch

BLOCKED = object()  # what the work of a launch returns when it cannot run yet


class Clock(dict[int, int]):
    """Actor (a stream, or a rank's host) -> how many of its actions are known to have ended; of others, none."""

    def learn(self, other: "Clock") -> None:
        for actor, number in other.items():
            if number > self.get(actor, 0):
                self[actor] = number


class Hang(RuntimeError):
    """The host waits for a stream that will never get there."""


class Policy(Enum):
    LATE = auto()  # every stream runs when somebody needs it
    SIDES_AT_ONCE = auto()  # streams other than default ones run at once


@dataclass(eq=False)
class Host:
    """The threads of one rank, which launch work and wait for it."""

    name: str = "rank 0"
    clock: Clock = field(default_factory=Clock)  # what it knows to have ended; another one when it knows more
    waits: Counter[str] = field(default_factory=Counter)  # why, and where in the package -> how often
    at: float = 0.0  # s, of simulated time

    def __post_init__(self) -> None:
        self.actor = -next(_hosts)
        self.collectives = Collectives()
        self.default = Stream(default_of=self)

    def acts(self) -> int:
        """Counts an action of the host itself, and returns its number."""
        number = self.clock.get(self.actor, 0) + 1
        self.learn(Clock({self.actor: number}))
        return number

    def learn(self, clock: Clock) -> None:
        self.clock = Clock(self.clock)
        self.clock.learn(clock)


class Collectives:
    """What a rank has launched, by all its communicators: the latest collective, or messages that are a batch."""

    def __init__(self) -> None:
        self._latest: list[Event] = []
        self._earlier: list[Event] = []  # what the latest batch comes after
        self._is_batch = False

    def before(self, batches: bool) -> "list[Event]":
        """Returns what has to end before the next one, which may belong to a batch, begins."""
        return [*(self._earlier if batches and self._is_batch else self._latest)]

    def add(self, event: "Event", batches: bool) -> None:
        if batches and self._is_batch:
            self._latest.append(event)
        else:
            self._earlier, self._latest, self._is_batch = self._latest, [event], batches


@dataclass(frozen=True)
class _Launch:
    number: int
    name: str
    work: Callable[[], Any]  # returns BLOCKED if it cannot run yet, or the simulated time before which it cannot begin
    waits_for: "Stream | None"
    cost: float  # s, of simulated time
    host_at: float  # s, when it was launched


class Span(NamedTuple):
    """A piece of work in simulated time, s."""

    rank: str
    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What simulated work costs."""

    flops: float  # per s, of matrix products
    memory: float  # bytes per s that kernels read and write
    copies: float  # bytes per s between host and device
    link: float  # bytes per s to another rank
    host: float  # bytes per s that the host's own kernels read and write
    launch: float = 5e-6  # s that the host takes for a launch
    latency: float = 20e-6  # s of a collective


class State:
    """What tests choose, and what they look at."""

    policy = Policy.LATE
    rates: Rates | None = None  # None: work takes no time
    spans: list[Span] = []  # noqa: RUF012


def note_span(rank: str, lane: str, name: str, start: float, end: float) -> None:
    if end > start:
        State.spans.append(Span(rank, lane, name, start, end))


class Stream(torch.Stream):
    """A queue of work. torch's class, so that `Tensor.record_stream` takes it."""

    known: dict[int, "Stream"] = {}  # noqa: RUF012 -- by stream_id

    def __new__(cls, device: Any = None, priority: int = 0, *, default_of: Host | None = None) -> "Stream":
        made = super().__new__(cls, stream_id=len(cls.known), device_index=0, device_type=PRIVATE_USE)
        cls.known[made.stream_id] = made
        made.host = default_of
        made.queue, made.launched, made.clock, made.is_running = deque[_Launch](), 0, Clock(), False
        made.heard = Clock()
        made.at, made.lane = 0.0, "beside compute" if default_of is None else "compute"
        made.rank = (default_of or this_host()).name
        return made

    def __init__(self, *_: Any, **__: Any) -> None: ...

    host: Host | None  # whose default stream it is
    queue: deque[_Launch]
    launched: int  # number of the latest launch
    clock: Clock  # what has ended before the next launch begins
    heard: Clock  # of the host that has launched last: `clock` has it already
    is_running: bool
    at: float  # s, of simulated time
    lane: str  # in a trace
    rank: str

    def launch(
        self,
        name: str,
        work: Callable[[], Any],
        accesses: Iterable[Any] = (),
        waits_for: "Stream | None" = None,
        cost: float = 0.0,
    ) -> int:
        """Queues `work`, which has these `memory.Access`es. Returns its number."""
        with LOCK:
            host = this_host()
            if self.heard is not host.clock:
                self.clock.learn(host.clock)
                self.heard = host.clock
            host.at += State.rates.launch if State.rates is not None else 0.0
            self.launched += 1
            self.clock[self.stream_id] = self.launched
            for access in accesses:
                access.check(self.stream_id, self.launched, self.clock, name)
            self.queue.append(_Launch(self.launched, name, work, waits_for, cost, host.at))
            CHANGED.notify_all()
            if State.policy is Policy.SIDES_AT_ONCE and self.host is None:
                self.run(self.launched)
            return self.launched

    def run(self, until: int) -> bool:
        """Does the work up to number `until`. Returns False if some of it has to wait for another rank."""
        with LOCK:
            while self.queue and self.queue[0].number <= until:
                if self.is_running:  # streams that wait for each other in a circle
                    return False
                launch, self.is_running = self.queue[0], True
                self.at = max(self.at, launch.host_at)
                try:
                    result = launch.work()
                    if result is BLOCKED:
                        return False
                    self.queue.popleft()
                except BaseException:
                    self.queue.popleft()
                    raise
                finally:
                    self.is_running = False
                start = max(self.at, result) if isinstance(result, float) else self.at
                self.at = start + launch.cost
                note_span(self.rank, self.lane, launch.name, start, self.at)
            return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        if (stream := event.stream) is not None and stream is not self:
            with LOCK:
                self.clock.learn(event.clock)
                number, later = event.number, event

                def pass_by() -> Any:
                    return later.at if stream.run(number) else BLOCKED

                self.launch("wait", pass_by, waits_for=stream)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return self.run(self.launched)

    @property
    def stays_at(self) -> str:
        """Where it cannot go on, through all streams that wait for each other."""
        if not self.queue:
            return "the end"
        head = self.queue[0]
        return head.name if head.waits_for is None or head.waits_for is self else head.waits_for.stays_at

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __repr__(self) -> str:
        return f"stream {self.stream_id}" if self.host is None else f"default stream of {self.host.name}"


class Event:
    """A place in a stream's queue."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **_: Any) -> None:
        self.stream: Stream | None = None
        self.number, self.clock, self._looks = 0, Clock(), 0
        self.at = 0.0  # s, of simulated time

    def record(self, stream: Stream | None = None) -> None:
        with LOCK:
            self.stream = stream or current_stream()
            self._looks = 0
            self.number = self.stream.launch("record", self._pass)
            self.clock = Clock(self.stream.clock)

    def _pass(self) -> None:
        assert self.stream is not None
        self.at = self.stream.at

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if self.stream is not None:
            host_waits(self, "synchronize")

    def query(self) -> bool:
        """Whether the place is passed. The first look comes too early, if it may: a device is never in a hurry."""
        if self.stream is None:
            return True
        with LOCK:
            self._looks += 1
            is_passed = not self.stream.queue or self.stream.queue[0].number > self.number
            host = this_host()
            if not is_passed and self._looks > 1:
                is_passed = self.stream.run(self.number)
                if sys._getframe(1).f_code.co_name == "wait_on_host":  # others look once, and go on
                    host.waits[f"look again in {_place()}"] += is_passed
            if is_passed:
                host.learn(self.clock)
                host.at = max(host.at, self.at)
            return is_passed

    @property
    def has_passed(self) -> bool:
        """Whether its stream has come to it, or comes to it now: asked by the device, of which no host learns."""
        return self.stream is None or self.stream.run(self.number)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds of simulated time."""
        return 1000 * (end.at - self.at)


def host_waits(event: Event, why: str) -> None:
    """Waits on the host until a stream has come to an event. Raises Hang if it never does."""
    host, stream, until = this_host(), event.stream, time.monotonic() + HANG_S
    assert stream is not None
    host.waits[f"{why} in {_place()}"] += 1
    with LOCK:
        while not stream.run(event.number):
            if not CHANGED.wait(until - time.monotonic()):
                raise Hang(f"{host.name} waits for {stream}, which stays at {stream.stays_at}.")
        host.learn(event.clock)
        note_span(host.name, "host waits", why, host.at, event.at)
        host.at = max(host.at, event.at)


def _place() -> str:
    """Names the innermost function of the package that waits; else of the caller."""
    frame = sys._getframe(2)
    first = None
    while frame is not None:
        path = frame.f_code.co_filename
        if "/lightning_zero/" in path and not path.endswith("/device.py"):  # who has asked `device` to wait
            return f"{path.rpartition('/lightning_zero/')[2]}:{frame.f_code.co_name}"
        if first is None and "/sim/" not in path and "/torch/" not in path:
            first = f"{path.rpartition('/')[2]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return first or "?"


# -- of each rank, or each thread. torch hands both on to the threads of autograd.

_hosts = count(1)
_MAIN = Host()


def this_host() -> Host:
    return torch._C._get_obj_in_tls("sim_host") if torch._C._is_key_in_tls("sim_host") else _MAIN


def become(host: Host) -> None:
    """Makes this thread, and those that autograd starts for it, threads of `host`: a rank with a device of its own."""
    torch._C._stash_obj_in_tls("sim_host", host)
    torch._C._stash_obj_in_tls("sim_stream", host.default)


def default_stream(device: Any = None) -> Stream:
    return this_host().default


def current_stream(device: Any = None) -> Stream:
    return torch._C._get_obj_in_tls("sim_stream") if torch._C._is_key_in_tls("sim_stream") else default_stream()


def set_stream(stream: Stream) -> None:
    torch._C._stash_obj_in_tls("sim_stream", stream)


@contextmanager
def on(stream: Stream | None) -> Iterator[None]:
    before = current_stream()
    set_stream(stream or before)
    try:
        yield
    finally:
        set_stream(before)


def forget() -> None:
    """Drops all work that was not waited for, and what is known of it: a test may have ended with an error."""
    with LOCK:
        for stream in Stream.known.values():
            stream.queue.clear()
            stream.at = 0.0
        _MAIN.waits.clear()
        _MAIN.at, State.rates, State.spans = 0.0, None, []


def synchronize(device: Any = None) -> None:
    """Waits for all streams of this rank."""
    rank = this_host().name
    for stream in [*Stream.known.values()]:
        if stream.rank == rank:
            stream.synchronize()
