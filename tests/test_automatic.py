"""``stage="auto"``: what it chooses fits, is the same on all ranks, and trains as `ddp` does."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

import automatic_jobs
from compare import assert_same_bits
from lightning_zero import ZeroEMA, ZeroStrategy
from lightning_zero.pl.automatic import UNKNOWN
from lightning_zero.rehearsal import choosing
from lightning_zero.rehearsal.hollow import NeedsValuesError
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
        (automatic_jobs.Model, {"averages": True}),
    ],
    ids=["plain", "configure_model", "asks for values", "two loaders", "accumulated", "averaged"],
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


class Few(Dataset[torch.Tensor]):
    """Fewer items than a batch has. Each draws a random number, which training is to draw, too."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index)) + 0 * torch.rand(2)


def test_what_is_rehearsed_is_how_the_trainer_trains(monkeypatch: pytest.MonkeyPatch, planned: Plan) -> None:
    average, given = ZeroEMA(decay=0.9), list[dict[str, Any]]()

    def takes_down(_: Any, batch: torch.Tensor, **arguments: Any) -> Plan:
        given.append({"batch": batch.tolist(), **arguments})
        if not arguments.get("on_cpu"):
            raise NeedsValuesError("It asks for values.")
        return replace(planned, device_bytes=UNKNOWN)

    setting = {"precision": "bf16-mixed", "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    loader = CombinedLoader(DataLoader(Few(), batch_sampler=BatchSampler(SequentialSampler(Few()), 4, drop_last=False)))
    trainer = Mock(callbacks=[Mock(), average], accumulate_grad_batches=3, lightning_module=nn.Linear(2, 2), **setting)
    monkeypatch.setattr(choosing, "plan", takes_down)
    monkeypatch.setattr(choosing, "train_source", lambda _: Mock(dataloader=lambda: loader))
    random = torch.get_rng_state()
    arguments, told = choosing.choose(trainer, {"prefetch": 2}, ranks=2, device_bytes=UNKNOWN)
    assert torch.equal(torch.get_rng_state(), random)
    fixed = {"prefetch": 2, "accumulation": "local"}
    expected = {"batch": [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], "fixed": fixed, "thorough": False, "divides": False}
    expected |= {**setting, "accumulate_grad_batches": 3, "callbacks": [average], "ranks": 2, "device_bytes": UNKNOWN}
    assert given == [expected, {**expected, "on_cpu": True}]
    assert arguments == {**fixed, **planned.best.strategy}
    assert " on each rank at most" in told
    assert " that are free" not in told, "the system does not say"
    monkeypatch.setattr(choosing, "available_host_bytes", lambda: 8 * 6 * 4)  # eight times the parameters
    with pytest.raises(ValueError, match="too little memory for a step of the model"):
        choosing.choose(trainer, {"accumulation": "sharded"}, ranks=2, device_bytes=UNKNOWN)
    assert given[-1]["fixed"] == {"accumulation": "sharded"}
