"""How a strategy does on more ranks and fewer."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import rehearsal_jobs
from lightning_zero.rehearsal.comparison import GROWING, RANKS, Scaled, growth_of
from lightning_zero.rehearsal.cost import Rates
from lightning_zero.rehearsal.memory import Phase, phases_of
from lightning_zero.rehearsal.planning import MARGIN
from lightning_zero.rehearsal.rehearsal import Rehearsal, rehearse

STRATEGY = {"stage": 3, "units": "modules", "bucket_size_mb": 0.05}
ROOM = 3 * 10**6


def rehearsed(strategy: dict[str, Any], ranks: int, batch: int = 4) -> Rehearsal:
    def words() -> Tensor:
        return rehearsal_jobs.batch_of().repeat(batch // 4, 1)

    return rehearse(rehearsal_jobs.Model, words, strategy, ranks=ranks, device_bytes=ROOM)


@pytest.fixture(scope="module")
def growth() -> tuple[Scaled, ...]:
    chosen = rehearsed(STRATEGY, 4)
    return growth_of(rehearsal_jobs.Model, rehearsal_jobs.batch_of, STRATEGY, chosen, ranks=4, device_bytes=ROOM)


def test_each_number_of_ranks_is_rehearsed_beside_the_chosen_one(growth: tuple[Scaled, ...]) -> None:
    assert [one.ranks for one in growth] == sorted({*RANKS, 4})
    for one in growth:
        again = rehearsed(STRATEGY, one.ranks)
        assert one.rehearsal.peak == again.peak
        assert one.seconds == again.timing(Rates()).seconds


def test_numbers_that_a_strategy_cannot_be_on_are_left_out() -> None:
    strategy = {"stage": 2, "replicate_size": 4}
    chosen = rehearsed(strategy, 8)
    found = growth_of(rehearsal_jobs.Model, rehearsal_jobs.batch_of, strategy, chosen, ranks=8)
    assert [one.ranks for one in found] == [8, 64, 1024]


def test_the_batch_grows_into_the_memory_that_ranks_free(growth: tuple[Scaled, ...]) -> None:
    """Up to 64 ranks: on 1024 a model that is so small is mostly padding."""
    fitting = [one.batches or 0 for one in growth if one.ranks <= 64]
    for before, after in itertools.pairwise(fitting):
        assert 0 < before < after


@pytest.mark.parametrize("batch", [8, 16])
def test_a_larger_batch_takes_what_is_modelled(batch: int) -> None:
    """But for temporary tensors in backward that are gradients of weights, which do not grow: it takes less."""
    small, large = rehearsed(STRATEGY, 8), rehearsed(STRATEGY, 8, batch)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        moment = small.peaks[phase]
        grows = sum(moment.device.get(name, 0) for name in GROWING)
        modelled = moment.nbytes + (batch / 4 - 1) * grows
        assert 0.93 * modelled <= large.peaks[phase].nbytes <= modelled
    room = int(large.peak.nbytes / (1 - MARGIN))
    batches = Scaled(replace(small, device_bytes=room), 0.0).batches
    assert batches is not None
    assert batches <= batch / 4


def test_throughput_is_that_of_a_step_whose_passes_alone_have_grown(growth: tuple[Scaled, ...]) -> None:
    """One rank sends nothing, so its step takes what its work takes."""
    told = replace(growth[0].rehearsal, device_bytes=4 * ROOM)
    one, phases = Scaled(told, 0.0), phases_of(told.program)
    seconds = dict.fromkeys((True, False), 0.0)  # of forward and backward, and of the step
    for use, done in told.work.items():
        seconds[phases[use] is not Phase.STEP] += done.flops / Rates().flops + done.nbytes / Rates().memory
    assert min(seconds.values()) > 0.1 * max(seconds.values())
    assert one.batches is not None
    assert one.throughput is not None
    assert one.batches > 2
    assert one.batches / one.throughput == pytest.approx(seconds[True] * one.batches + seconds[False], rel=1e-6)


def test_nothing_is_said_of_a_device_that_is_not_known_or_that_holds_no_batch(growth: tuple[Scaled, ...]) -> None:
    told = growth[0].rehearsal
    unknown, tiny = (Scaled(replace(told, device_bytes=room), 0.0) for room in (None, 1000))
    assert (unknown.batches, unknown.throughput) == (None, None)
    assert (tiny.batches, tiny.throughput) == (0, None)
