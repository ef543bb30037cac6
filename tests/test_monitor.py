"""`ZeroMonitor`: the table at the start, what loggers get, and the summary at the end."""

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_avg_fn

import monitor_jobs as jobs
from jobs import Classifier, loader, trainer
from lightning_zero import Offload, ZeroEMA, ZeroMonitor
from lightning_zero.pl import monitor
from lightning_zero.pl.advice import BESIDE, asked_bytes, options_beside_ddp
from lightning_zero.pl.monitor import MemoryAdvice, _formula, bytes_at_rest, watch_trainers
from lightning_zero.pl.table import WIDTH, MemoryReport, _uncast_lines, sized, table_of
from lightning_zero.run.average import Average, room_for_average
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.forecast import Forecast, bytes_to_save, bytes_under_ddp, forecast
from lightning_zero.shards.assembly import Uncast
from lightning_zero.shards.offload import Machine
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from models import seeded
from ranks import RankPool
from thread_world import ThreadWorld

BF16 = torch.bfloat16
DDP = "ddp_find_unused_parameters_true"


def model(width: int = 64) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Embedding(10, width), nn.Linear(width, 10 * width), nn.LayerNorm(10 * width))
    )


FROZEN = 64 * 640 + 640  # elements of the second layer of `model(64)`


def begin(comm: Comm, stage: int, width: int = 64, **options: Any) -> tuple[Engine, torch.optim.Optimizer]:
    module = model(width)
    optimizer = torch.optim.AdamW(module.parameters())
    return Engine(module, [optimizer], stage=stage, comm=comm, options=Options(**options)), optimizer


def table_on(ranks: int, stage: int, width: int = 64, **options: Any) -> list[str]:
    """The table of rank 0."""

    def job(comm: Comm) -> str:
        engine, _ = begin(comm, stage, width, **options)
        return table_of(engine, stage)

    return ThreadWorld(ranks).run(job)[0].splitlines()


# --- bytes


@pytest.mark.parametrize("autocast", [None, BF16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_told_at_the_start_is_what_rests_after_a_step(stage: int, autocast: torch.dtype | None) -> None:
    def job(comm: Comm) -> tuple[Forecast, dict[str, int]]:
        engine, optimizer = begin(comm, stage, autocast_dtype=autocast)
        expected = forecast(engine, [optimizer])
        with torch.autocast("cpu", dtype=BF16, enabled=autocast is not None):
            loss = engine.module(torch.arange(10)).float().square().mean()
        loss.backward()
        optimizer.step()
        found = engine.bytes_by_category()
        under_way = [forecast(engine, [optimizer]).here]
        optimizer.zero_grad()
        under_way.append(forecast(engine, [optimizer]).here)
        assert all(here == {**expected.here, **found} for here in under_way), "what is there counts once"
        return expected, found

    for expected, found in ThreadWorld(2).run(job):
        counts = 4 * 5  # AdamW counts the steps of each of the five parameters
        assert 0 <= found.pop("optimizer state") - expected.here["optimizer state"] <= counts
        assert all(expected.here[category] == nbytes for category, nbytes in found.items())
        psi = expected.numel
        assert psi == 10 * 64 + 64 * 640 + 640 + 2 * 640
        assert dict(expected.ddp) == {
            "parameter": 4 * psi,
            "gradient": 4 * psi,
            "optimizer state": 8 * psi,
            "bucket": 4 * psi,
        }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_that_has_frozen_parameters_is_told_to_make_no_state_of_them(stage: int, ranks: int) -> None:
    """As of a fine-tuning that gives all parameters to the optimizer."""

    def job(comm: Comm) -> tuple[Forecast, dict[str, int]]:
        module = model(64)
        module[1].requires_grad_(False)
        optimizer = torch.optim.AdamW(module.parameters())
        engine = Engine(module, [optimizer], stage=stage, comm=comm)
        expected = forecast(engine, [optimizer])
        engine.module(torch.arange(10)).square().mean().backward()
        optimizer.step()
        return expected, engine.bytes_by_category()

    for expected, found in ThreadWorld(ranks).run(job) if ranks > 1 else [job(LocalComm())]:
        counts = 4 * 5  # AdamW counts the steps of each parameter
        assert 0 <= found["optimizer state"] - expected.here["optimizer state"] <= counts
        assert expected.ddp["optimizer state"] == 8 * (expected.numel - FROZEN)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_a_checkpoint_takes_is_counted_alike_on_every_rank_and_at_every_stage(stage: int) -> None:
    def job(comm: Comm) -> list[int]:
        engine, optimizer = begin(comm, stage, autocast_dtype=BF16)
        engine.module.register_buffer("running", torch.zeros(5))
        found = [bytes_to_save(engine.module, [optimizer]), bytes_to_save(engine.module, [])]
        engine.close()
        return [*found, bytes_to_save(engine.module, [optimizer])]

    psi = 10 * 64 + 64 * 640 + 640 + 2 * 640
    assert ThreadWorld(2).run(job) == [[12 * psi + 20, 4 * psi + 20, 12 * psi + 20]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_average_is_told_at_the_start_as_it_will_rest(stage: int, dtype: torch.dtype) -> None:
    def job(comm: Comm) -> tuple[Forecast, dict[str, int]]:
        module = model().to(dtype)
        optimizer = torch.optim.AdamW(module.parameters())
        engine = Engine(module, [optimizer], stage=stage, comm=comm, options=Options(autocast_dtype=BF16))
        for name, kind in (("running", dtype), ("seen", torch.int64)):
            engine.module.register_buffer(name, torch.zeros(5, dtype=kind))
        expected = forecast(engine, [optimizer], [room_for_average(engine)])
        of_two = forecast(engine, [optimizer], [room_for_average(engine)] * 2)
        assert of_two.here["average"] == 2 * expected.here["average"]
        average = Average(engine, get_ema_avg_fn(0.9))
        found = engine.bytes_by_category()
        assert not average.updates
        return expected, found

    for expected, found in ThreadWorld(2).run(job):
        assert expected.here["average"] == found["average"] > 0
        assert expected.ddp["average"] == dtype.itemsize * (expected.numel + 5) + 8 * 5


def test_the_table_sets_bytes_beside_ddps_and_fits_into_60_columns() -> None:
    lines = table_on(2, 3, autocast_dtype=BF16)
    assert lines[0] == "ZeRO stage 3 on 2 ranks"
    assert max(map(len, lines)) <= WIDTH
    text = " ".join(" ".join(lines).split())
    assert "2 shards; 43,520 parameters, groups: 3, gathered in 3 units" in text
    rows = {line.strip()[:15].strip(): line.split()[-4:] for line in lines}
    assert rows["optimizer state"] == ["348", "kB", "174", "kB"]
    assert rows["model states"][:2] == ["696", "kB"]
    assert "16.0 -> 9.0 bytes per parameter" in text
    assert "1,280 stay in float32, not bfloat16: LayerNorm (autocast does not cast its weights)" in text
    assert "640 stay in float32, not bfloat16: Embedding (autocast does not cast its weights)" in text


class Own(nn.Linear):
    """With a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def test_each_reason_for_fp32_is_told() -> None:
    def job(comm: Comm) -> list[tuple[str, str, int]]:
        kinds = {"own": Own(3, 3), "one": nn.Linear(4, 4), "frozen": nn.Linear(5, 5), "plain": nn.Linear(6, 6)}
        with pytest.warns(FutureWarning):
            module = nn.ModuleDict(kinds | {"parametrized": nn.utils.weight_norm(nn.Linear(7, 7))})
        module["two"] = copy.deepcopy(kinds["one"])
        module["two"].weight = kinds["one"].weight
        module["frozen"].requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
        engine = Engine(module, [optimizer], stage=2, comm=comm, options=Options(autocast_dtype=BF16))
        return [tuple(uncast) for uncast in engine.parts.assembly.resting.uncast]

    assert ThreadWorld(1).run(job)[0] == [
        ("Linear", "hooks compute its weights", 49 + 7 + 7),
        ("Linear", "it does not train", 25 + 5),
        ("Linear", "modules share its weights", 16 + 4 + 4),
        ("Own", "its forward is not torch's own", 9 + 3),
    ]


def test_of_many_reasons_the_rest_is_counted() -> None:
    uncast = [Uncast(f"Kind{n}", "as it is", 10**n) for n in range(6)]
    parts = SimpleNamespace(assembly=SimpleNamespace(resting=SimpleNamespace(uncast=uncast)))
    engine: Any = SimpleNamespace(options=Options(autocast_dtype=BF16), parts=parts)
    told = _uncast_lines(engine)
    assert told[0] == "1 stay in float32, not bfloat16: Kind0 (as it is)"
    assert told[-1] == "110,000 more do, in other modules"


def offloaded_table(optimizers: int = 1, apart: bool = True, **offload: Any) -> str:
    """Of AdamW, whose state is offloaded; the last parameters are in a group of their own."""

    def job(comm: Comm) -> str:
        module = model()
        first, *others = module.parameters()
        made = [torch.optim.AdamW([{"params": [first], "betas": (0.5, 0.9)}, {"params": others[:2]}])]
        if optimizers == 2:
            made.append(torch.optim.AdamW(others[2:]))
        else:
            made[0].add_param_group({"params": others[2:], "betas": (0.5, 0.9)})
        options = Options(offload=Offload(**offload), machine=Machine(host_is_apart=apart))
        return table_of(Engine(module, made, stage=2, comm=comm, options=options), 2, can_step_in_backward=True)

    return " ".join(ThreadWorld(2).run(job)[0].split())


def test_what_is_said_of_an_offloaded_step_is_true_of_all_groups_and_optimizers(tmp_path: Path) -> None:
    hint = "step_in_backward=True) hides the offloaded step"
    told = offloaded_table(optimizer="nvme", path=tmp_path, state_dtype="bf16")
    assert "Averages with beta 0.999 cannot fall there" in told
    assert hint in told
    assert "moves nothing" not in told
    assert hint not in offloaded_table(2, optimizer="cpu")  # backward steps with one optimizer
    assert hint not in offloaded_table(apart=False, optimizer="cpu")  # nothing waits for the next forward


def test_gradients_that_backward_steps_take_no_memory_between_steps() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    engine = Engine(module, [optimizer], stage=2, comm=LocalComm(), options=Options(step_in_backward=True))
    expected = forecast(engine, [optimizer]).here
    with engine.backward():
        module(torch.arange(10)).sum().backward()
    optimizer.step()
    assert expected["gradient"] == engine.bytes_by_category()["gradient"] == 0


# --- settings that bring nothing


@pytest.mark.parametrize(
    ("ranks", "options", "told"),
    [
        (1, {}, "One rank divides nothing: every stage is the same here. Trainer(devices=2) or more divides"),
        (2, {"replicate_size": 2}, "replicate_size=2 is all ranks: nothing is sharded. Leave it out, or lower it"),
        (2, {"offload": {"optimizer": "cpu"}}, "Offload moves nothing: the model is in host memory already"),
        (2, {"width": 2}, "The model is so small that buckets outweigh what is saved: ddp takes"),
        (2, {"width": 256}, None),
    ],
)
def test_a_setting_that_brings_nothing_is_told_in_a_sentence(ranks: int, options: dict, told: str | None) -> None:
    if "offload" in options:
        options = {"offload": Offload(**options["offload"])}
    lines = table_on(ranks, 2, **options)
    text = " ".join(" ".join(lines).split())
    assert text.startswith(f"ZeRO stage 2 on {ranks} rank{'s' if ranks > 1 else ''} ")
    every = ("divides nothing", "nothing is sharded", "moves nothing", "outweigh")
    assert sum(sign in text for sign in every) == (told is not None), text
    assert ("in host memory, and is stepped by" in text) == ("offload" in options)
    assert told is None or told in text


# --- the report


def test_a_memory_report_is_a_dictionary_that_prints_as_a_table() -> None:
    report = MemoryReport({"parameter": 1_234_000, "gradient": 0, "optimizer state (host)": 5})
    assert report == {"parameter": 1_234_000, "gradient": 0, "optimizer state (host)": 5}
    assert str(report).splitlines() == [
        "parameter               1.23 MB",
        "optimizer state (host)      5 B",
        "all                     1.23 MB",
    ]
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [(0, "0 B"), (999, "999 B"), (999_600, "1 MB"), (2.5e9, "2.5 GB"), (1.234e12, "1.23 TB"), (1.234e15, "1,234 TB")],
)
def test_bytes_are_told_in_three_digits(nbytes: float, told: str) -> None:
    assert sized(nbytes) == told


# --- whole runs


@pytest.fixture(scope="module")
def zero(two_ranks: RankPool) -> list[dict[str, Any]]:
    return two_ranks.run(jobs.watch, {"stage": 2}, gradient_clip_val=1.0)


@pytest.fixture(scope="module")
def ddp(two_ranks: RankPool) -> list[dict[str, Any]]:
    return two_ranks.run(jobs.watch, DDP)


def test_a_run_with_a_monitor_has_one_table_and_one_summary(zero: Any, ddp: Any) -> None:
    assert [zero[0]["monitors"], ddp[0]["monitors"]] == [1, 1]
    for run in (zero[0], ddp[0]):
        assert sum("bytes per rank" in said for said in run["said"]) == 1
        assert sum(said.startswith("Trained 3 steps.") for said in run["said"]) == 1
    assert not any("bytes per rank" in said or "Trained" in said for said in zero[1]["said"])
    (summary,) = [said for said in zero[0]["said"] if said.startswith("Trained")]
    assert "s per step" in summary
    assert "sent per step" in summary
    assert max(map(len, summary.splitlines())) <= WIDTH


def test_loggers_get_bytes_seconds_and_norms_of_each_step(zero: Any) -> None:
    run = zero[0]
    assert run["steps"] == [0, 1, 2]  # the rows of what Lightning logs of each step
    last = run["logged"][-1]
    assert last.keys() == {
        *(f"zero/bytes/{category.replace(' ', '_')}" for category in run["report"]),
        "zero/peak_bytes",
        "zero/wire_bytes",
        "zero/wait_seconds",
        "zero/step_seconds",
        "zero/grad_norm",
    }
    assert last["zero/bytes/optimizer_state"] == run["report"]["optimizer state"]
    assert last["zero/wire_bytes"] > 0
    assert 0 < last["zero/wait_seconds"] < last["zero/step_seconds"]
    assert last["zero/peak_bytes"] > 1e8
    assert last["zero/grad_norm"] > 0
    assert run["metrics"].keys() == {"loss", "loss_step", "loss_epoch"}


def test_what_a_step_costs_is_that_of_all_its_micro_batches(two_ranks: RankPool) -> None:
    how = {"accumulate_grad_batches": 2, "max_steps": 1}
    run, _ = two_ranks.run(jobs.watch, {"stage": 2}, **how)  # at this stage each of them is reduced
    (logged,), (told,) = run["logged"], run["costs"]
    assert logged["zero/wire_bytes"] == told["wire_bytes_per_step"]
    assert logged["zero/wait_seconds"] == pytest.approx(told["wait_seconds_per_step"])
    assert logged["zero/step_seconds"] == pytest.approx(told["seconds_per_step"])  # twice the median of two
    assert logged["zero/wait_seconds"] < logged["zero/step_seconds"]


def test_each_fit_is_told_of_by_itself(two_ranks: RankPool) -> None:
    (told, alone), _ = two_ranks.run(jobs.watch_in_turn, [{"stage": 3, "units": "modules"}, {"stage": 1}])
    assert told[1:] == alone
    assert told[0] != told[1]


def test_ddps_gradients_that_are_views_of_its_buckets_take_no_memory_beside_them() -> None:
    wrapped: Any = object.__new__(DistributedDataParallel)
    module, found = model(), {}
    for wrapped.__dict__["gradient_as_bucket_view"] in (False, True):
        run: Any = SimpleNamespace(strategy=SimpleNamespace(model=wrapped), callbacks=[], optimizers=[])
        found[wrapped.gradient_as_bucket_view] = bytes_at_rest(run, module)
    assert found[False] == found[True] | {"bucket": found[True]["gradient"]}
    assert found[True]["bucket"] == 0


def test_the_peak_that_is_told_is_that_of_the_rank_with_most(zero: Any) -> None:
    (told,) = zero[0]["costs"]
    assert told["peak_resident_bytes"] >= max(run["logged"][-1]["zero/peak_bytes"] for run in zero)


def test_a_rank_sends_what_the_formula_says_under_ddp_and_no_more_here(
    zero: Any, two_ranks: RankPool, ddp: Any
) -> None:
    (told,) = ddp[0]["costs"]
    trainable = 12 * 19 + 19 + 2 * 19 + 19 * 19 + 19 + 2 * 19 + 19 * 5 + 5 + 19 + 1 + 4 * 3 + 3
    assert told["wire_bytes_per_step"] == 2 * 4 * trainable // 2
    assert told["memory_bytes"]["gradient"] == told["memory_bytes"]["bucket"] == 4 * trainable
    assert told["memory_bytes"]["optimizer state"] >= 8 * (trainable - 15)  # one layer is never used
    assert told["seconds_per_step"] > 0
    assert told["stage"] is None
    assert ddp[1]["costs"] == []


@pytest.fixture(scope="module")
def folder_of_ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_a_monitor_loggers_and_metrics_get_what_they_get_under_ddp(
    stage: int, precision: str, two_ranks: RankPool, tmp_path: Path, folder_of_ddp: Path
) -> None:
    how: dict[str, Any] = {"asked": False, "precision": precision, "enable_checkpointing": True}
    expected = two_ranks.once(jobs.watch, DDP, default_root_dir=folder_of_ddp / precision, **how)
    found = two_ranks.run(jobs.watch, {"stage": stage}, default_root_dir=tmp_path, **how)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["received"] == theirs["received"]
        assert mine["metrics"] == theirs["metrics"] != {}
    kinds = [kind for kind, *_ in expected[0]["received"]]
    assert kinds[:2] == ["hyperparams", "graph"]
    assert {*kinds} == {"hyperparams", "graph", "metrics", "save", "saved", "end"}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"enable_model_summary": True}, True),
        ({"enable_model_summary": False}, False),
        ({"summary": 1}, True),
        ({"summary": 0}, False),
    ],
    ids=str,
)
def test_table_and_summary_are_printed_where_lightning_summarises_the_model(
    how: Any, says: bool, two_ranks: RankPool
) -> None:
    run = two_ranks.run(jobs.watch, {"stage": 2}, asked=False, **how)[0]
    assert [sum(sign in said for said in run["said"]) for sign in ("bytes per rank", "Trained 3 steps.")] == [says] * 2


def test_a_run_without_loggers_says_the_same(two_ranks: RankPool) -> None:
    run = two_ranks.run(jobs.watch, {"stage": 3}, logger=False, precision="16-mixed")[0]
    assert run["metrics"]["zero/skipped_steps"] == 0
    assert run["metrics"]["zero/loss_scale"] == 2048  # it has grown once, after three steps
    assert sum("bytes per rank" in said for said in run["said"]) == 1
    assert "model states" not in run["printed"]
    assert run["printed"].splitlines()[-1].startswith("all ")


def test_lightnings_average_counts_where_there_is_no_zero_strategy() -> None:
    told: list[dict[str, Any]] = []
    monitor = ZeroMonitor(log=False)
    monitor.listeners.append(lambda **costs: told.append(costs))
    module = Classifier()
    run = trainer("auto", 1, callbacks=[monitor, ZeroEMA()], max_steps=1)
    with jobs.listening("lightning.pytorch") as said:
        run.fit(module, loader())
    held = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    assert told[0]["memory_bytes"]["average"] == held
    assert f"average {sized(held)}" in " ".join(" ".join(said).split())
    under = bytes_under_ddp(module, run.optimizers, averages=1)
    whole, _, _ = options_beside_ddp(under, 2, 7)
    assert whole.nbytes == (sum(under.values()) - under["bucket"]) // 2


def test_a_trainer_that_is_watched_has_one_monitor_which_may_be_the_users_own() -> None:
    def monitors_of(run: Any) -> list[ZeroMonitor]:
        return [callback for callback in run.callbacks if isinstance(callback, ZeroMonitor)]

    mine = ZeroMonitor()
    unwatch = watch_trainers(print)
    try:
        with_mine, without = trainer("auto", 1, callbacks=[mine]), trainer("auto", 1)
    finally:
        unwatch()
    assert monitors_of(with_mine) == [mine]
    (ours,) = monitors_of(without)
    assert mine.listeners == ours.listeners == [print]
    assert monitors_of(trainer("auto", 1)) == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_a_step_sends_is_told_by_a_formula_under_ddp_alone(ranks: int) -> None:
    module = nn.Linear(7, 1)
    bytes_of_gradients = 4 * 8
    under_ddp: Any = SimpleNamespace(world_size=ranks, strategy=DDPStrategy())
    other: Any = SimpleNamespace(world_size=ranks, strategy=SimpleNamespace())
    assert _formula(under_ddp, module) == 2 * (ranks - 1) * bytes_of_gradients // ranks  # type: ignore[arg-type]
    assert _formula(other, module) == (0 if ranks == 1 else None)  # type: ignore[arg-type]


def test_what_has_grown_in_fit_is_told_without_a_zero_strategy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bytes beside those in categories, which were there in part before."""
    beside, told = iter([100, 130]), list[Any]()
    for name, value in {
        "_beside_ddp": lambda *_: next(beside),
        "bytes_under_ddp": lambda *_, **__: {},
        "bytes_at_rest": lambda *_: {},
        "command_for": lambda *_: "",
        "options_beside_ddp": lambda under, ranks, missing: told.append(missing),
        "advice_for": lambda error, where, held, *_: told.append(held) or "",
    }.items():
        monkeypatch.setattr(monitor, name, value)
    run: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        optimizers=[],
        world_size=2,
        callbacks=[],
        global_rank=0,
        global_step=3,
    )
    module, error = Classifier(), MemoryError()
    advice = MemoryAdvice()
    advice.on_fit_start(run, module)
    assert advice._advice(run, module, error) == ""
    missing, held = told
    assert held.grown == {BESIDE: 30}
    assert missing == 30 + asked_bytes(error)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Trainer after three steps, of which only what a monitor asks is there."""
    monkeypatch.setattr(monitor, "bytes_at_rest", lambda *_: {"parameter": 7})
    return SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda number, reduce_op: number + 1),
        accumulate_grad_batches=1,
        world_size=2,
        global_step=3,
        callback_metrics={"loss": torch.tensor(2.0), "each": torch.ones(3), "zero/loss_scale": torch.tensor(8.0)},
        precision_plugin=None,
        is_global_zero=True,
    )


def test_metrics_that_are_told_are_numbers_and_the_users_own(stub: Any) -> None:
    assert ZeroMonitor().costs(stub, nn.Linear(1, 1))["metrics"] == {"loss": 2.0}  # type: ignore[arg-type]


@pytest.mark.parametrize("is_first", [True, False])
def test_all_ranks_compare_their_peaks_and_one_tells_the_largest(is_first: bool, stub: Any) -> None:
    asked, told = list[str](), list[dict[str, Any]]()
    stub.strategy.reduce = lambda number, reduce_op: asked.append(reduce_op) or torch.tensor(11)
    stub.is_global_zero = is_first
    mine = ZeroMonitor()
    mine.listeners.append(lambda **costs: told.append(costs))
    mine.on_train_end(stub, nn.Linear(1, 1))  # type: ignore[arg-type]
    assert asked == ["max"]
    assert [costs["peak_resident_bytes"] for costs in told] == [11] * is_first


def test_a_batch_is_told_what_was_sent_since_it_began(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what validation has sent before, say."""
    reports = iter([(100, 1.0), (130, 1.5), (1000, 2.0), (1040, 2.25)])
    monkeypatch.setattr(monitor, "_communicated", lambda _: next(reports))
    monkeypatch.setattr(monitor, "accumulates", lambda _: False)
    mine = ZeroMonitor(log=False)
    for _ in range(2):
        mine.on_train_batch_start(stub)
        mine.on_train_batch_end(stub, nn.Linear(1, 1))  # type: ignore[arg-type]
    assert (mine._sent, mine._waited) == (70, 0.75)


def test_a_logger_that_takes_no_metrics_is_told_of_once_and_left_alone(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, asked = list[str](), list[int]()

    def refuse(metrics: Any, step: int) -> None:
        asked.append(step)
        raise NotImplementedError

    monkeypatch.setattr(monitor, "rank_zero_warn", told.append)
    monkeypatch.setattr(monitor, "logged_step", lambda _: 5)
    stub.loggers = [SimpleNamespace(log_metrics=refuse)]
    mine = ZeroMonitor()
    for _ in range(2):
        mine._log(stub, {"zero/peak_bytes": 1.0})
    assert asked == [5]
    assert told == ["SimpleNamespace takes no metrics: ZeroMonitor writes none to it."]
