"""How a strategy does on more ranks and fewer: bytes and time of a step, and what the memory that is freed is good for.

Each number of ranks is rehearsed, with the batch of a rank as it is. What a larger batch would do is modelled: what
forward and backward make, and the work that they do, grow in proportion to it, and all else stays. So more ranks free
memory, the batch grows into it, and what is sent is a smaller part of a longer step: a rank then does more in a second
than one of fewer ranks. The ZeRO paper calls that super-linear.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from lightning_zero.pl.strategy import ZeroStrategy
from lightning_zero.rehearsal.cost import Work
from lightning_zero.rehearsal.memory import Other, Phase, phases_of
from lightning_zero.rehearsal.planning import MARGIN
from lightning_zero.rehearsal.rehearsal import Module, Rehearsal, rehearse
from lightning_zero.tiers.ledger import Category

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
        work = {
            use: _grown(done, batches) if phases[use] in PASSES else done for use, done in self.rehearsal.work.items()
        }
        return batches / replace(self.rehearsal, work=work).timing().seconds


def _grown(done: Work, batches: float) -> Work:
    flops, nbytes, sent = (round(amount * batches) for amount in (done.flops, done.nbytes, done.sent))
    return done._replace(flops=flops, nbytes=nbytes, sent=sent)


def growth_of(
    module: Module, batch: Any, strategy: ZeroStrategy | Mapping[str, Any] | int, chosen: Rehearsal, **setting: Any
) -> tuple[Scaled, ...]:
    """Rehearses a strategy on the numbers of `RANKS` that it can be on, and returns these and `chosen`, fewest ranks
    first.

    Args:
        module: as `rehearse` takes it.
        batch: of each rank.
        strategy: the one that `chosen` was rehearsed with.
        chosen: what was rehearsed before.
        setting: what `rehearse` was given besides; of each number, rank 0 rehearses.
    """
    told = [chosen]
    for ranks in RANKS:
        if ranks != chosen.ranks:
            try:
                told.append(rehearse(module, batch, strategy, **{**setting, "ranks": ranks, "rank": 0}))
            except (
                ValueError,
                NotImplementedError,
            ):  # a strategy may want at least so many ranks, or a multiple of a number
                continue
    return tuple(Scaled(one, one.timing().seconds) for one in sorted(told, key=lambda one: one.ranks))
