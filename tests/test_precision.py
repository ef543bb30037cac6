import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.amp import GradScaler

import jobs
from lightning_zero import ZeroStrategy
from lightning_zero.pl.precision import SkippedSteps, adapt, guard_schedulers
from lightning_zero.shards.norm import Overflow
from ranks import RankPool

PLUGINS: list[Precision] = [
    Precision(),
    DoublePrecision(),
    HalfPrecision("bf16-true"),
    MixedPrecision("bf16-mixed", "cpu"),
]


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: type(plugin).__name__)
def test_an_adapted_plugin_is_a_copy_that_keeps_type_and_name(plugin: Precision) -> None:
    adapted = adapt(plugin)
    assert isinstance(adapted, type(plugin))
    assert type(adapted) is not type(plugin)
    assert type(adapted).__qualname__ == type(plugin).__qualname__  # Lightning files the scaler's state under it
    assert adapt(adapted) is adapted
    assert vars(adapted) == vars(plugin)


def test_the_users_scaler_settings_carry_over() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
    adapted: Any = ZeroStrategy(precision_plugin=MixedPrecision("16-mixed", "cpu", scaler)).precision_plugin
    assert adapted.scaler is scaler


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: type(plugin).__name__)
def test_an_adapted_plugin_travels_to_spawned_ranks(plugin: Precision) -> None:
    travelled = pickle.loads(pickle.dumps(adapt(plugin)))
    assert type(travelled).__mro__[1:] == type(adapt(plugin)).__mro__[1:]
    assert vars(travelled) == vars(plugin) | {"engine": None}


def test_overflows_of_one_fit_do_not_count_in_the_next(two_ranks: RankPool) -> None:
    for first, second in two_ranks.run(jobs.fit_again_after_overflows, 2):
        assert "2 optimizer steps in a row overflowed" in first
        assert second is None


def test_steps_that_were_skipped_before_a_checkpoint_count_in_the_run_that_goes_on(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    assert two_ranks.run(jobs.skipped_before_and_after, tmp_path) == [[1, 2]] * 2


def test_in_a_skipped_step_schedulers_of_epochs_move_and_those_of_steps_do_not() -> None:
    by_step, by_epoch, moved = object(), object(), list[Any]()
    module: Any = SimpleNamespace(lr_scheduler_step=lambda scheduler, metric: moved.append(scheduler))
    plugin: Any = SimpleNamespace(scaler=object(), skipped_last=True)
    configs: Any = [
        SimpleNamespace(scheduler=scheduler, interval=interval)
        for scheduler, interval in ((by_step, "step"), (by_epoch, "epoch"))
    ]
    guard_schedulers(plugin, module, lambda: configs)
    for plugin.skipped_last in (True, False):
        module.lr_scheduler_step(by_step, None)
        module.lr_scheduler_step(by_epoch, None)
    assert moved == [by_epoch, by_step, by_epoch]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_what_users_have_put_on_the_module_stays(precision: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(jobs.keep_an_override, {"stage": 2}, precision) == [(True, 6)] * 2


def test_skipped_steps_end_a_run_only_where_they_follow_one_another() -> None:
    skipped, scaler = SkippedSteps(most=2), GradScaler("cpu")
    bad, good = Overflow([0], ["weight"]), Overflow([], [])
    for step, overflow in enumerate([bad, bad, good, bad, bad, None, bad, bad]):
        skipped.note(step, overflow, scaler)
    assert skipped.total == 6
    with pytest.raises(RuntimeError, match=r"3 optimizer steps in a row .*\n  step 6.*\n  step 7.*\n  step 8"):
        skipped.note(8, bad, scaler)


def test_a_step_without_a_loss_is_none_that_was_skipped() -> None:
    """Its schedulers move, as they do under Lightning's plugin."""
    plugin: Any = adapt(MixedPrecision("16-mixed", "cpu", GradScaler("cpu")))
    plugin.engine, plugin.skipped_last = SimpleNamespace(closed=False), True
    plugin._after_closure = lambda *_: None
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    assert plugin.optimizer_step(optimizer, SimpleNamespace(automatic_optimization=True), lambda: None) is None
    assert not plugin.skipped_last


def test_a_step_that_clips_nothing_is_not_taken_for_the_one_before_that_did() -> None:
    """Ranks that have met to clip do not meet again to step; these have not."""
    expected: list[int] = []
    plugin: Any = adapt(Precision())
    plugin.engine = SimpleNamespace(closed=False, runner=SimpleNamespace(expect_step=lambda: expected.append(1)))
    plugin._after_closure = lambda *_: None
    plugin._has_clipped = True
    plugin._wrap_closure(LightningModule(), None, lambda: None)
    assert expected == []
