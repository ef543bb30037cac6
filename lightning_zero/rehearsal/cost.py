"""The time of a step, modelled: its program is laid out on lanes, each as fast as stated.

Work of a use takes ``flops / rates.flops + bytes / rates.memory`` seconds; a collective ``latency + bytes / link``; a
window of what is offloaded its bytes by the rate of the host. Lanes run beside each other, and what stands
on one lane comes one after the other. A use begins when the ops that it waits for are done; collectives of the model's
own, as those of tensor parallelism, are waited for where they are called. `Timing` has the
sums, and where each use and op lies on its lane.

What it leaves out: the time that Python takes, kernels that are slow for their size, and links that are shared.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, final

from lightning_zero.config import is_switch
from lightning_zero.distributed_private import COLLECTIVES
from lightning_zero.rehearsal.hollow import tensors_in
from lightning_zero.run.program import LOCAL, Among, Kind, Op, Program
from lightning_zero.torch_private import flop_registry, schema_of

_SENDS = {"all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_to_all_single": 1}
CYCLES = 3  # the first step has nothing left from a step before
STEPPED = 3  # master and two tensors of state: what a window of Adam moves, for each element
MASTER_BYTES = 4


class Work(NamedTuple):
    """What operations do."""

    flops: int = 0
    nbytes: int = 0  # read and written
    messages: int = 0  # collectives of the model's own, as DTensor's, which it waits for
    sent: int = 0  # bytes of these

    def __add__(self, other: tuple[int, ...]) -> "Work":  # type: ignore[override]
        return Work(*(one + more for one, more in zip(self, other, strict=True)))


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Returns the work of one operation of torch, by the shapes of its tensors."""
    space, _, name = schema_of(func).name.partition("::")
    if space == COLLECTIVES:  # sends the larger of what goes in and comes out, and an all-reduce both ways
        nbytes = max((tensor.nbytes for tensor in tensors_in((args, kwargs, result))), default=0)
        return Work(messages=int(name in _SENDS), sent=_SENDS.get(name, 0) * nbytes)
    formula = flop_registry.get(func.overloadpacket)
    flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
    return Work(flops, sum(tensor.nbytes for tensor in tensors_in((args, kwargs, result))))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast the device of one rank is, and what leads to it. The defaults are about those of an A100 with NVLink."""

    flops: float = 150e12  # per second
    memory: float = 1.2e12  # bytes per second, read and written
    link: float = 100e9  # bytes per second that a rank sends
    latency: float = 30e-6  # seconds of a collective, beside its bytes
    host: float = 20e9  # bytes per second between the device and where the optimizer is offloaded to
    shares: bool = False  # what is sent and moved takes the device's time, as between ranks that are CPU cores

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "shares":
                is_switch(name, value)
            elif not isinstance(value, int | float) or not value >= 0 or not (value or name == "latency"):
                raise ValueError(f"Rates({name}={value!r}) is to be a number above 0.")


class Lane(StrEnum):
    """What does one thing after the other."""

    DEVICE = "device"
    LINK = "link"
    HOST = "host"  # between the device and where the optimizer is offloaded to


class Span(NamedTuple):
    """Where a use, or an op that begins at it, lies on its lane."""

    lane: Lane
    begin: float  # seconds since the step began
    end: float  # may be in the step after
    use: int
    op: int | None  # number of the op; None: the work of the use itself
    nbytes: int  # that the device reads and writes, the link sends or the host moves


@final
@dataclass(frozen=True)
class Timing:
    """Seconds of a step in which another one came before and comes after."""

    seconds: float
    compute: float  # of the device
    sent: float  # of the link
    moved: float  # between the device and where the optimizer is offloaded to
    waited: float  # in which the device had nothing to do
    spans: tuple[Span, ...]  # of that step, in the order in which they were laid out

    def __str__(self) -> str:
        beside = f"; {self.sent:.3g} s of sending" if self.sent else ""
        beside += f"; {self.moved:.3g} s of moving to and from the host" if self.moved else ""
        hidden = f", of both {self.hidden:.0%} hidden" if self.sent and self.moved else f", {self.hidden:.0%} hidden"
        return f"{self.seconds:.3g} s per step: {self.compute:.3g} s of computing{beside}{hidden if beside else ''}"

    @property
    def hidden(self) -> float:
        """The part of what is sent and moved that runs beside work."""
        beside = self.sent + self.moved
        return 1.0 - min(1.0, self.waited / beside) if beside else 1.0


def timing_of(program: Program, work: Mapping[int, Work], rates: Rates) -> Timing:
    """Lays the program out on lanes; see the module's docstring."""
    begins: dict[int, list[tuple[int, Op]]] = defaultdict(list)
    awaited: dict[int, list[tuple[int, int]]] = defaultdict(list)  # use -> op, and of how many cycles before
    for number, op in enumerate(program.ops):
        begins[op.at].append((number, op))
        if op.by is not None:
            awaited[op.by].append((number, int(op.by < op.at)))
    placed = [_place_of(op, program, rates) for op in program.ops]
    done: dict[tuple[int, int], float] = {}
    free: dict[Lane, float] = defaultdict(float)
    spans: list[Span] = []
    now = start = waited = 0.0
    for cycle in range(CYCLES):
        start, waited = now, 0.0
        spans.clear()
        for use in range(len(program.uses)):
            for number, op in begins[use]:
                ready = [done.get((cycle, other), done.get((cycle - 1, other), 0.0)) for other in op.after]
                lane, seconds, nbytes = placed[number]
                begin = max([now, free[lane], *ready])
                free[lane] = done[cycle, number] = begin + seconds
                spans.append(Span(lane, begin - start, begin + seconds - start, use, number, nbytes))
                if lane is Lane.DEVICE:  # what it comes after must be there now
                    waited, now = waited + begin - now, begin
                elif rates.shares:
                    waited, now = waited + seconds, max(now, begin + seconds)
            until = max([now, *(done.get((cycle - ago, number), 0.0) for number, ago in awaited[use])])
            waited += until - now
            here = work.get(use, Work())
            now = until + _seconds_of(here, rates) + _seconds_to_send(here, rates)
            waited += _seconds_to_send(here, rates)
            spans.append(Span(Lane.DEVICE, until - start, now - start, use, None, here.nbytes))
    lanes: dict[Lane, float] = defaultdict(float)
    for lane, seconds, _ in placed:
        lanes[lane] += seconds
    compute = sum(_seconds_of(one, rates) for one in work.values())
    sent = lanes[Lane.LINK] + sum(_seconds_to_send(one, rates) for one in work.values())
    return Timing(now - start, compute, sent, lanes[Lane.HOST], waited, tuple(spans))


def _seconds_of(work: Work, rates: Rates) -> float:
    return work.flops / rates.flops + work.nbytes / rates.memory


def _seconds_to_send(work: Work, rates: Rates) -> float:
    return work.messages * rates.latency + work.sent / rates.link


def _place_of(op: Op, program: Program, rates: Rates) -> tuple[Lane, float, int]:
    """Returns the lane of an op, how long it takes there, and the bytes that it moves."""
    if op.kind in (Kind.FETCH, Kind.PUT):
        group = program.facts.groups[op.target]
        nbytes = STEPPED * MASTER_BYTES * group.shard / max(1, program.facts.windows_of(op.target))
        return Lane.HOST, nbytes / rates.host, round(nbytes)
    if op.kind in LOCAL:
        return Lane.DEVICE, 0.0, 0
    is_sent = program.facts.ranks > 1 or op.among is not Among.SHARD
    return Lane.LINK, rates.latency + op.nbytes / rates.link if is_sent else 0.0, op.nbytes
