"""``stage="auto"``: what it chooses fits, is the same on all ranks, and trains as `ddp` does."""

from typing import Any

import lightning as L
import pytest
import torch

import automatic_jobs
from compare import assert_same_bits
from lightning_zero import ZeroStrategy
from lightning_zero.rehearsal.planning import Plan, plan
from lightning_zero.rehearsal.rehearsal import rehearse
from ranks import PATIENCE, RankPool

FIXED = {"wait_timeout": PATIENCE}
AUTO = {"stage": "auto", **FIXED}
PLENTY = 10**9


def batch_of() -> list[torch.Tensor]:
    return [torch.zeros(4, automatic_jobs.WIDTH)]


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(automatic_jobs.Model, batch_of, ranks=2, device_bytes=PLENTY, host_is_apart=False, fixed=FIXED)


def chosen_line(found: list[dict[str, Any]]) -> str:
    (line,) = [said for said in found[0]["said"] if said.startswith("stage=")]
    return line


@pytest.mark.parametrize(
    ("make", "trainer"),
    [
        (automatic_jobs.Model, {}),
        (automatic_jobs.Late, {}),
        (automatic_jobs.Curious, {}),
        (automatic_jobs.TwoLoaders, {}),
        (automatic_jobs.Model, {"accumulate_grad_batches": 2}),
    ],
    ids=["plain", "configure_model", "asks for values", "two loaders", "accumulated"],
)
def test_a_chosen_stage_trains_to_the_bits_of_ddp(make: Any, trainer: dict[str, Any], two_ranks: RankPool) -> None:
    expected = two_ranks.run(automatic_jobs.fit, "ddp", make, **trainer)
    found = two_ranks.run(automatic_jobs.fit, AUTO, make, **trainer)
    assert len(found[0]["losses"]) == len(expected[0]["losses"]) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_bits(dict(enumerate(ours["losses"])), dict(enumerate(theirs["losses"])))
        assert_same_bits(ours["weights"], theirs["weights"])


def test_where_all_fit_the_simplest_of_the_fastest_is_chosen_and_told_in_a_line(
    two_ranks: RankPool, planned: Plan
) -> None:
    found = two_ranks.run(automatic_jobs.fit, AUTO)
    assert [one["stage"] for one in found] == [planned.best.strategy["stage"]] * 2
    assert chosen_line(found).startswith(f'stage="auto" is {planned.best}: ')
    assert "not fit" not in chosen_line(found)
    assert not [said for said in found[1]["said"] if said.startswith("stage=")]


def test_the_rank_with_the_least_memory_decides_for_all(two_ranks: RankPool, planned: Plan) -> None:
    least = min(planned.candidates, key=lambda one: one.device_bytes)
    assert least.device_bytes < planned.best.device_bytes
    found = two_ranks.run(automatic_jobs.fit, AUTO, device_bytes=(PLENTY, least.device_bytes))
    assert "not fit" in chosen_line(found)
    for one in found:
        assert one["stage"] == least.strategy["stage"]
        assert sum(one["at_rest"].values()) <= least.device_bytes


def test_what_was_chosen_takes_what_was_rehearsed(two_ranks: RankPool, planned: Plan) -> None:
    found = two_ranks.run(automatic_jobs.fit, AUTO)
    assert found[0]["at_rest"] == planned.best.rehearsal.at_rest


def test_what_the_user_has_written_is_not_chosen(two_ranks: RankPool) -> None:
    found = two_ranks.run(automatic_jobs.fit, {**AUTO, "offload": {"optimizer": "cpu", "parameters": "cpu"}})
    for one in found:
        assert one["stage"] == 3  # the only one whose parameters can be offloaded
        assert one["offload"].parameters == "cpu"


def test_what_a_config_writes_as_the_default_is_chosen_all_the_same(two_ranks: RankPool, planned: Plan) -> None:
    least = min(planned.candidates, key=lambda one: one.device_bytes)
    written = {"offload": None, "prefetch": 1, "activation_checkpointing": None, "accumulation": "sharded"}
    found = two_ranks.run(automatic_jobs.fit, {**AUTO, **written}, device_bytes=(least.device_bytes,) * 2)
    assert [one["stage"] for one in found] == [least.strategy["stage"]] * 2


def test_where_nothing_fits_every_rank_hears_what_would(two_ranks: RankPool, planned: Plan) -> None:
    errors = two_ranks.run(automatic_jobs.error_of, AUTO, 10**6)
    assert errors[0] == errors[1]
    assert errors[0].startswith("ValueError: stage='auto' cannot be chosen: Nothing fits on 2 ranks of 1 MB.")
    assert "The smallest device on which this model can be trained has" in errors[0]
    assert errors[0].endswith("Or write stage=1, 2 or 3.")


def test_data_that_can_be_read_once_are_not_touched(two_ranks: RankPool) -> None:
    errors = two_ranks.run(automatic_jobs.error_of, AUTO, PLENTY, streams=True)
    assert errors[0] == errors[1]
    assert "may give each one once" in errors[0]
    assert "lightning-zero plan MODEL" in errors[0]


def test_an_evaluation_before_the_first_fit_does_not_choose(two_ranks: RankPool, planned: Plan) -> None:
    least = min(planned.candidates, key=lambda one: one.device_bytes)
    assert two_ranks.run(automatic_jobs.evaluate_and_fit, least.device_bytes) == [[2, least.strategy["stage"]]] * 2


def test_a_strategy_keeps_what_was_written_for_other_trainers() -> None:
    strategy = ZeroStrategy("auto", prefetch=2)
    assert repr(strategy).startswith("ZeroStrategy(stage='auto', prefetch=2)")
    named = L.Trainer(accelerator="cpu", devices=1, strategy="zero_auto", logger=False).strategy
    assert repr(named).startswith("ZeroStrategy(stage='auto')")
    strategy.for_trainer()
    assert repr(strategy.for_trainer()).startswith("ZeroStrategy(stage='auto', prefetch=2)")


def test_fabric_and_rehearsals_want_a_stage() -> None:
    with pytest.raises(NotImplementedError, match="Write a stage"):
        L.Fabric(accelerator="cpu", devices=1, strategy=ZeroStrategy(stage="auto")).launch()
    with pytest.raises(ValueError, match="plan"):
        rehearse(automatic_jobs.Model, batch_of, ZeroStrategy(stage="auto"))
