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
from lightning_zero.device import Late
from lightning_zero.pl import precision
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


class OwnClipping(LightningModule):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...


class OwnClip(LightningModule):
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None: ...


class Manual(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnPlugin(Precision):
    pass


@pytest.mark.parametrize(
    ("plugin", "module", "is_expected"),
    [
        (Precision, LightningModule, True),
        (Precision, OwnClipping, False),
        (Precision, OwnClip, False),
        (Precision, Manual, False),
        (OwnPlugin, LightningModule, False),
    ],
)
def test_a_step_is_expected_after_clipping_unless_code_of_users_may_come_before_it(
    plugin: type[Precision], module: type[LightningModule], is_expected: bool
) -> None:
    """Ranks that expect it do not meet again, and what such code reads on one of them would wait for the others."""
    expected: list[int] = []
    adapted: Any = adapt(plugin())
    adapted.engine = SimpleNamespace(closed=False, runner=SimpleNamespace(expect_step=lambda: expected.append(1)))
    adapted._after_closure = lambda *_: setattr(adapted, "_has_clipped", True)
    adapted._wrap_closure(module(), None, lambda: None)
    assert expected == [1] * is_expected


def test_a_run_knows_nothing_of_the_steps_of_the_one_before() -> None:
    plugin: Any = adapt(Precision())
    plugin.skipped_last, plugin.grad_norm = True, torch.ones(())
    plugin.begin_run(SimpleNamespace(), 20)
    assert (plugin.skipped_last, plugin.grad_norm) == (False, None)


@pytest.mark.parametrize("skips", [False, True])
def test_a_norm_that_is_not_finite_is_told_once_unless_its_step_is_skipped(
    skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(precision, "rank_zero_warn", told.append)
    plugin: Any = adapt(MixedPrecision("16-mixed", "cpu", GradScaler("cpu")) if skips else Precision())
    norm = torch.tensor(torch.nan)
    gradients = SimpleNamespace(clip_by_norm_=lambda *_: norm)
    plugin.begin_run(SimpleNamespace(closed=False, gradients=gradients), 20)
    plugin.main_params = lambda _: []
    plugin._late_norms += [] if skips else [Late(norm)]  # of the step before, as it is on a device
    plugin.clip_grad_by_norm(None, 1.0)
    plugin.clip_grad_by_norm(None, 1.0)
    assert [one[:24] for one in told] == ["The gradient norm is nan"] * (not skips)


@pytest.mark.parametrize("overflow", [Overflow([], []), Overflow([1], ["weight"])])
def test_a_step_of_manual_optimization_is_taken_though_its_closure_returns_nothing(overflow: Overflow) -> None:
    stepped: list[Any] = []
    scaler = SimpleNamespace(step=stepped.append, update=lambda: None, get_scale=lambda: 8.0)
    plugin: Any = adapt(MixedPrecision("16-mixed", "cpu", GradScaler("cpu")))
    plugin.begin_run(SimpleNamespace(closed=False, gradients=SimpleNamespace(unscale_=lambda *_: overflow)), 20)
    plugin.scaler, plugin._after_closure = scaler, lambda *_: None
    module = SimpleNamespace(automatic_optimization=False, trainer=SimpleNamespace(global_step=3))
    plugin.optimizer_step("optimizer", module, lambda: None)
    assert stepped == ["optimizer"]
    assert plugin.skipped_last == bool(overflow.ranks)


def test_the_warning_of_a_skipped_step_tells_its_loss() -> None:
    plugin: Any = adapt(MixedPrecision("16-mixed", "cpu", GradScaler("cpu")))
    gradients = SimpleNamespace(unscale_=lambda *_: Overflow([1], ["weight"]))
    plugin.begin_run(SimpleNamespace(closed=False, gradients=gradients), 20)
    plugin._after_closure, plugin.scaler = (
        lambda *_: None,
        SimpleNamespace(step=lambda _: None, update=lambda: None, get_scale=lambda: 8.0),
    )
    module = SimpleNamespace(automatic_optimization=True, trainer=SimpleNamespace(global_step=3))
    with pytest.warns(UserWarning, match=r"step 3: loss 2\.5, non-finite gradients on ranks \[1\] in weight\."):
        plugin.optimizer_step(None, module, lambda: torch.tensor(2.5))


def test_the_guard_of_schedulers_leaves_nothing_on_the_module() -> None:
    module, plugin = LightningModule(), SimpleNamespace(scaler=object(), skipped_last=False)
    guard_schedulers(plugin, module, list)()  # type: ignore[arg-type]
    assert "lr_scheduler_step" not in vars(module)
