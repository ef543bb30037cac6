"""Bytes are asserted, not claimed: on the wire by the kernel's counter, at rest by category, at peak by the kernel."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import jobs
from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.assembly import bucket_bytes_for
from lightning_zero.tiers.ledger import Category
from lightning_zero.wire.comm import Comm
from models import clone
from ranks import RankPool, run_alone
from thread_world import ThreadWorld

STAGES = [0, 1, 2, 3]
# The units that forward has used last are still there when backward begins, which looks at no weights of the first.
KEPT = 2


def psi_sent(stage: int, layers: int = 6) -> float:
    """Elements on the wire per step, in (N - 1) Psi."""
    return 3 - (KEPT + 1) / layers if stage == 3 else 2


@functools.cache
def tower() -> nn.Module:
    """Psi = 6 * (96 * 96 + 96) = 55,872, in twelve parameters that 64 divides."""
    return nn.Sequential(*[nn.ModuleList([nn.Linear(96, 96)])[0] for _ in range(6)])


PSI = 6 * (96 * 96 + 96)


def step_on(
    comm: Comm, stage: int, *, autocast: bool = False, steps: int = 2, frozen: int = 0, **options: Any
) -> dict[str, Any]:
    model = clone(tower())
    for layer in list(model)[:frozen]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    dtype = torch.bfloat16 if autocast else None
    engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(autocast_dtype=dtype, **options))
    sent = []
    for step in range(steps):
        comm.bytes_sent.clear()
        batch = torch.randn(4, 96, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(batch).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sent.append(sum(comm.bytes_sent.values()))
    by_operation = engine.mesh.bytes_sent
    return {
        "by operation": by_operation,
        "sent": sent[-1],
        "rests": engine.bytes_by_category(),
        "buckets": engine.ledger.peak[Category.BUCKET],
    }


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_every_rank_sends_its_share_of_two_or_three_psi(stage: int, world: int) -> None:
    runs = ThreadWorld(world).run(lambda comm: step_on(comm, stage))
    total = sum(run["sent"] for run in runs) / 4
    assert total == pytest.approx(psi_sent(stage) * (world - 1) * PSI, rel=0.05)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_frozen_layers_that_an_optimizer_has_send_nothing(stage: int) -> None:
    runs = ThreadWorld(2).run(lambda comm: step_on(comm, stage, frozen=2))
    assert sum(run["sent"] for run in runs) / 4 == pytest.approx(2 * PSI * 4 / 6, rel=0.05)


def test_at_stage_3_only_the_values_of_frozen_layers_travel() -> None:
    all_train, some_do = (
        sum(run["sent"] for run in ThreadWorld(2).run(lambda comm, frozen=frozen: step_on(comm, 3, frozen=frozen)))
        for frozen in (0, 2)
    )
    # No gradient, and no gather in backward, which ends before it comes to them.
    assert (all_train - some_do) / 4 == pytest.approx(PSI * 2 / 6 + PSI * 2 / 6, rel=0.05)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_rank_has_as_much_state_beside_frozen_layers_that_an_optimizer_has(stage: int, world: int) -> None:
    for run in ThreadWorld(world).run(lambda comm: step_on(comm, stage, frozen=3)):
        assert run["rests"]["optimizer state"] == pytest.approx(8 * PSI / 2 / world, rel=0.02)
        gradient = 4 * PSI / 2 / (world if stage >= 2 else 1)
        assert run["rests"]["gradient"] == pytest.approx(gradient, rel=0.02)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sharding_sends_a_shards_part_of_the_gradient_between_groups(stage: int) -> None:
    """Two groups of two: inside, as on two ranks; across, each rank exchanges its half of the gradient."""
    runs = ThreadWorld(4).run(lambda comm: step_on(comm, stage, replicate_size=2))
    alone = ThreadWorld(2).run(lambda comm: step_on(comm, stage))
    for run, rests in zip(runs, [two["rests"] for two in alone * 2], strict=True):
        across = sum(sent for kind, sent in run["by operation"].items() if kind.startswith("replicate"))
        assert across / 2 == pytest.approx(4 * PSI / 2, rel=0.01)  # of two steps
        assert {**run["rests"], "bucket": 0} == {**rests, "bucket": 0}


def test_two_byte_weights_travel_in_two_bytes() -> None:
    for stage, expected in (
        (2, 4 + 2),
        (3, 4 + 2 * (psi_sent(3) - 1)),
    ):  # the gradient in fp32; the weight once, or twice
        runs = ThreadWorld(2).run(lambda comm, stage=stage: step_on(comm, stage, autocast=True))
        assert sum(run["sent"] for run in runs) == pytest.approx(expected * PSI, rel=0.05)


def test_reduce_dtype_halves_the_gradients_wire_and_rest() -> None:
    runs = ThreadWorld(2).run(lambda comm: step_on(comm, 2, reduce_dtype=torch.bfloat16))
    assert sum(run["sent"] for run in runs) == pytest.approx((2 + 4) * PSI, rel=0.05)
    assert runs[0]["rests"]["gradient"] == pytest.approx(2 * PSI / 2, rel=0.01)


def formula(stage: int, world: int, *, autocast: bool) -> dict[str, float]:
    """Bytes per rank: AdamW in fp32, gradients in fp32, resting weights in two bytes under autocast."""
    optimizer, gradient, parameter = (1 / world if stage >= least else 1 for least in (1, 2, 3))
    return {
        "parameter": (2 if autocast else 4) * PSI * parameter,
        "gradient": 4 * PSI * gradient,
        "master": (4 * PSI * optimizer) if autocast else 0,
        "optimizer state": 8 * PSI * optimizer,
        "gathered": (2 if autocast else 4) * PSI * KEPT / 6 if stage == 3 else 0,  # the arena
        "activation checkpoint": 0,
    }


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_what_rests_on_each_rank_is_the_formula_within_one_percent(stage: int, world: int, autocast: bool) -> None:
    for run in ThreadWorld(world).run(lambda comm: step_on(comm, stage, autocast=autocast)):
        for category, expected in formula(stage, world, autocast=autocast).items():
            assert run["rests"][category] == pytest.approx(expected, rel=0.01), category


def test_buckets_are_two_of_constant_size_whatever_the_model() -> None:
    """Two buckets of N rows, room for N - 1 incoming, and one row for the sum: 2 * 2 N rows."""
    for bucket_bytes in (2**14, 2**15):
        runs = ThreadWorld(2).run(lambda comm, size=bucket_bytes: step_on(comm, 2, bucket_bytes=size))
        assert runs[0]["buckets"] <= 2 * 2 * bucket_bytes
        assert runs[0]["rests"]["bucket"] == runs[0]["buckets"]


@pytest.mark.parametrize(
    ("given", "ranks", "mib"), [(None, 2, 25), (None, 200, 25), (None, 256, 32), (None, 1024, 128), (2**20, 1024, 1)]
)
def test_buckets_that_the_user_has_not_chosen_grow_with_many_ranks(given: int | None, ranks: int, mib: int) -> None:
    with torch.device("meta"):
        large = nn.Linear(2**16, 2**16)
    assert bucket_bytes_for([*large.parameters()], Options(bucket_bytes=given), ranks) == mib * 2**20


@pytest.mark.alone
def test_the_loopback_device_sees_two_or_three_psi() -> None:
    """Counted by the kernel, headers and all, where ranks have no links; DDP moves 2.00 by the same counter."""
    psi_bytes, pool = 4 * jobs.WIDE_PSI, RankPool(2)
    try:
        for stage in STAGES:
            moved = pool.run(jobs.bytes_on_loopback, {"stage": stage}, 4)[0]
            assert moved == pytest.approx(psi_sent(stage, layers=4) * psi_bytes, rel=0.05), stage
    finally:
        pool.close()


def test_r24_a_higher_stage_never_peaks_higher() -> None:
    peaks = {}
    for name, strategy in [("ddp", "ddp"), (1, {"stage": 1}), (2, {"stage": 2}), (3, {"stage": 3})]:
        results, errors = run_alone(2, jobs.peak_resident_bytes, strategy)
        assert errors == [None, None]
        peaks[name] = max(results)
    assert peaks[3] <= peaks[2] <= peaks[1] <= peaks["ddp"], peaks
