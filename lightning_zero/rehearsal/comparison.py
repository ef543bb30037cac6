"""What the pictures of a rehearsal show: the chosen strategy beside the plain stages, and on more ranks and fewer.

Each number of ranks is rehearsed, with the batch of a rank as it is. What a larger batch would do is modelled: what
forward and backward make, and the work that they do, grow in proportion to it, and all else stays. So more ranks free
memory, the batch grows into it, and what is sent is a smaller part of a longer step: a rank then does more in a second
than one of fewer ranks. The ZeRO paper calls that super-linear.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from lightning_zero.pl.strategy import ZeroStrategy
from lightning_zero.rehearsal.memory import Other, Phase, phases_of
from lightning_zero.rehearsal.planning import MARGIN, REFUSALS
from lightning_zero.rehearsal.rehearsal import Module, Rehearsal, rehearse
from lightning_zero.tiers.ledger import Category

# By category of bytes on the device, from the bottom of a stack to its top.
COLOURS: dict[str, str] = {
    Category.PARAMETER: "#4477aa",
    Category.GRADIENT: "#ee6677",
    Category.MASTER: "#aa3377",
    Category.OPTIMIZER_STATE: "#228833",
    Category.AVERAGE: "#117766",
    Category.BUCKET: "#aaaaaa",
    Category.GATHERED: "#66ccee",
    Category.ACTIVATION_CHECKPOINT: "#cc7722",
    Other.ACTIVATION: "#ccbb44",
    Other.BUFFER: "#887766",
    Other.TEMPORARY: "#cccccc",
}
OTHER = "#888888"  # of a category that is not one of these
RANKS = (1, 8, 64, 1024)
GROWING = (Category.ACTIVATION_CHECKPOINT, Other.ACTIVATION, Other.BUFFER, Other.TEMPORARY)  # with the batch
PASSES = (Phase.FORWARD, Phase.BACKWARD)


@final
@dataclass(frozen=True)
class Scaled:
    """A strategy on a number of ranks."""

    rehearsal: Rehearsal
    seconds: float  # of a step, modelled

    @property
    def ranks(self) -> int:
        return self.rehearsal.ranks

    @property
    def batches(self) -> float | None:
        """How many times its batch fits on the device, a tenth of which stays free; 0: not even an empty one. None: it
        is not known what the device has."""
        told = self.rehearsal
        if told.device_bytes is None:
            return None
        room = told.device_bytes * (1 - MARGIN)
        found = []
        for phase, moment in told.peaks.items():
            grows = sum(moment.device.get(name, 0) for name in GROWING) if phase in (*PASSES, Phase.FIRST) else 0
            left = room - (moment.nbytes - grows)
            found.append(left / grows if grows and left >= 0 else float("inf") if left >= 0 else 0.0)
        return min(found)

    @property
    def throughput(self) -> float | None:
        """Batches per second of a rank, with as many in a step as fit. None: see `batches`, or none fits."""
        batches = self.batches
        if not batches or batches == float("inf"):
            return None
        phases = phases_of(self.rehearsal.program)
        work = dict(self.rehearsal.work)
        for use, done in work.items():
            if phases[use] in PASSES:
                flops, nbytes, sent = (round(amount * batches) for amount in (done.flops, done.nbytes, done.sent))
                work[use] = done._replace(flops=flops, nbytes=nbytes, sent=sent)
        return batches / replace(self.rehearsal, work=work).timing().seconds


@final
@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A rehearsal beside others."""

    chosen: Rehearsal
    stages: Mapping[str, Rehearsal]  # ``"stage 0"`` to ``"stage 3"``; then the chosen one, unless it is one of these
    growth: tuple[Scaled, ...]  # the chosen strategy on other numbers of ranks, fewest first

    @property
    def categories(self) -> list[str]:
        """Those that are on the device at the peak of any, in the order of `COLOURS`."""
        return in_order(name for one in self.stages.values() for name in one.peak.device)


def in_order(categories: Iterable[str]) -> list[str]:
    """Returns each category once, in the order of `COLOURS`."""
    known = list(COLOURS)
    return sorted(dict.fromkeys(categories), key=lambda name: known.index(name) if name in COLOURS else len(known))


def compare(module: Module, batch: Any, strategy: Mapping[str, Any], chosen: Rehearsal, **setting: Any) -> Comparison:
    """Rehearses the stages, and the chosen strategy on other numbers of ranks. `chosen` is what `rehearse` has returned
    for the other arguments; if it is a plain stage, that is not rehearsed again."""
    stages, size = {}, strategy.get("tensor_parallel_size", 1)
    of_the_model = {"tensor_parallel_size": size} if size > 1 else {}  # no choice: its own code divides it by that
    for stage in range(4):
        plain = {"stage": stage, **of_the_model}
        is_chosen = chosen.strategy == repr(ZeroStrategy(**plain))
        stages[f"stage {stage}"] = chosen if is_chosen else rehearse(module, batch, plain, **setting)
    if all(one is not chosen for one in stages.values()):
        stages[chosen.strategy.removeprefix("ZeroStrategy(").removesuffix(")")] = chosen
    growth = growth_of(module, batch, strategy, chosen, **setting)
    return Comparison(chosen=chosen, stages=stages, growth=growth)


def growth_of(
    module: Module, batch: Any, strategy: Mapping[str, Any], chosen: Rehearsal, **setting: Any
) -> tuple[Scaled, ...]:
    """Rehearses a strategy on the numbers of `RANKS` that it can be on; of each, rank 0 rehearses. Returns these and
    `chosen`, fewest ranks first. The arguments are those of `compare`; the batch is that of each rank."""
    told = [chosen]
    for ranks in RANKS:
        if ranks != chosen.ranks:
            try:
                told.append(rehearse(module, batch, strategy, **{**setting, "ranks": ranks, "rank": 0}))
            except REFUSALS:  # a strategy may want at least so many ranks, or a multiple of a number
                continue
    return tuple(Scaled(one, one.timing().seconds) for one in sorted(told, key=lambda one: one.ranks))
