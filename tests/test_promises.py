"""Rows of the acceptance list that concern the core, each by its number."""

import itertools
import re
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import jobs
from lightning_zero import ZeroStrategy
from ranks import AT_ONCE, HANGS, PATIENCE, SHORT, RankPool, run_alone

DDP = "ddp_find_unused_parameters_true"
STAGES = [1, 2, 3]


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where its runs, each made once, save."""
    return tmp_path_factory.mktemp("ddp")


@pytest.mark.parametrize("stage", STAGES)
def test_r13_overflow_on_one_rank_skips_the_step_everywhere_and_says_so(stage: int, two_ranks: RankPool) -> None:
    runs = two_ranks.run(jobs.fit_with_overflow, stage, (2,))
    for run in runs:
        assert run["error"] is None
        assert run["skipped"] == 1
        assert run["finite"]
        # 6 batches; the scheduler stands still for the third step, once
        assert run["scheduler"] == [0, 1, 2, 2, 3, 4]
    (warning,) = runs[0]["warned"]
    assert "step 2" in warning
    assert "net.4.weight" in warning
    assert "ranks [" in warning
    assert runs[0]["scale"] == runs[1]["scale"]


def test_r37_too_many_overflows_in_a_row_end_with_parameters_ranks_and_losses(two_ranks: RankPool) -> None:
    runs = two_ranks.run(jobs.fit_with_overflow, 2, (1, 2, 3, 4), 2)
    for run in runs:
        assert run["error"] is not None
        assert run["error"].startswith("3 optimizer steps in a row overflowed in fp16 (max_skipped_steps=2)")
        assert run["error"].count("net.4.weight") == 3
        assert run["error"].count("loss ") >= 3
        assert "ranks [" in run["error"]
        assert run["scale"] == 2.0**10 / 2**3  # halved by each overflow
        assert run["precision_state"]["scale"] == run["scale"]
    for run in two_ranks.run(jobs.fit_with_overflow, 2, (0, 1, 3, 4), 2):  # four, and never three in a row
        assert run["error"] is None
        assert run["skipped"] == 4


def test_r37_the_loss_scale_is_saved_under_lightnings_own_name(two_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "scaled.ckpt"
    two_ranks.run(jobs.save_at, path, {"stage": 2}, 2, precision="16-mixed")
    saved = jobs.read_checkpoint(path)["MixedPrecision"]
    assert saved["scale"] == 2.0**12  # grown twice in 6 steps, every 3
    two_ranks.run(jobs.resume_from, path, DDP, 2, precision="16-mixed")


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_r16_mixed_precision_leaves_the_batch_alone_and_keeps_fp32_masters(
    stage: int, precision: str, two_ranks: RankPool
) -> None:
    steps = 60  # fewer than 20 and no loss scale would have overflowed
    runs = two_ranks.run(jobs.fit_precisely, {"stage": stage}, precision, steps)
    seen = torch.cat([tensor for run in runs for tensor in run["seen"]])
    assert seen.dtype == torch.float32
    assert torch.equal(seen.sort(dim=0).values, runs[0]["sent"].sort(dim=0).values)  # Lightning's sampler shuffles
    # bf16 has a spacing of 2**-8 below 1.0: without a master the weight would never move
    rounding = steps * 2.0**-24  # of fp32 below 1.0, once per update
    assert runs[0]["weight"] == pytest.approx(1.0 - (steps - runs[0]["skipped"]) * 1e-4, abs=rounding)


def test_r16_the_dtypes_are_printed_when_fit_starts(two_ranks: RankPool) -> None:
    said, by_rank_1 = two_ranks.run(jobs.what_fit_says, {"stage": 2}, "bf16-mixed")
    assert by_rank_1 == []
    (table,) = [message for message in said if "storage" in message]
    lines = table.splitlines()
    assert lines[0] == "ZeRO stage 2 on 2 ranks"
    head = next(at for at, line in enumerate(lines) if "storage" in line)
    assert lines[head].split() == ["elements", "storage", "compute", "reduce", "master"]
    dtypes = sorted(line.split()[1:] for line in lines[head + 1 : head + 3])
    assert dtypes == [["bfloat16", "bfloat16", "float32", "float32"], ["float32", "float32", "float32", "float32"]]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_r29_tied_weights_train_save_and_resume_as_under_ddp(
    stage: int, precision: str, two_ranks: RankPool, tmp_path: Path, of_ddp: Path
) -> None:
    found = two_ranks.run(jobs.fit_retied, {"stage": stage}, tmp_path / "a.ckpt", precision)
    expected = two_ranks.once(jobs.fit_retied, "ddp", of_ddp / f"retied-{precision}.ckpt", precision)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["tied"]
        assert mine["losses"] == theirs["losses"]
        assert all(torch.equal(mine["weights"][name], value) for name, value in theirs["weights"].items())


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_r30_small_gradients_are_not_lost_in_bf16(stage: int, precision: str, two_ranks: RankPool) -> None:
    total = two_ranks.run(jobs.sum_micro_gradients, {"stage": stage}, precision)[0]
    assert total.dtype == torch.float32
    small = float(torch.tensor(1e-3).bfloat16()) if precision == "bf16-true" else 1e-3  # what autograd was given
    assert total.flatten().tolist() == pytest.approx([1.0 + (jobs.MICRO - 1) * small] * 4, rel=1e-5)


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_r38_error_if_nonfinite_raises_on_all_ranks_at_the_same_step(stage: int, two_ranks: RankPool) -> None:
    found = two_ranks.run(jobs.fit_until_not_finite, {"stage": stage})
    expected = two_ranks.once(jobs.fit_until_not_finite, DDP)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["error"] is not None
        assert "non-finite" in mine["error"]
        assert mine["steps"] == theirs["steps"] == 3
        assert mine["norms"][:2] == pytest.approx(theirs["norms"][:2], rel=1e-5)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_r43_buffers_keep_dtype_and_follow_ddp(
    stage: int, precision: str, two_ranks: RankPool, tmp_path: Path, of_ddp: Path
) -> None:
    # "local": sums micro-batches in DDP's order, so that even the statistics of activations agree in every bit
    found = two_ranks.run(jobs.fit_buffers, {"stage": stage, "accumulation": "local"}, tmp_path / "a.ckpt", precision)
    expected = two_ranks.once(jobs.fit_buffers, DDP, of_ddp / f"buffers-{precision}.ckpt", precision)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["buffers"].keys() == theirs["buffers"].keys()
        for name, value in theirs["buffers"].items():
            assert mine["buffers"][name].dtype == value.dtype
            assert torch.equal(mine["buffers"][name], value), name
        assert mine["saved"].keys() == theirs["saved"].keys()
        assert "scratch" not in mine["saved"]


@pytest.mark.parametrize("arguments", [{"stage": 1}, {"stage": 3}])
def test_r60_only_the_strategy_changes(arguments: dict[str, Any], two_ranks: RankPool) -> None:
    """Batch size, precision, clipping, accumulation and sampling come from the Trainer, and ranks start from rank 0."""
    found, expected = two_ranks.run(jobs.where_batches_go, arguments), two_ranks.once(jobs.where_batches_go, DDP)
    assert found == expected
    assert not set(found[0]) & set(found[1])
    assert len(found[0]) + len(found[1]) == jobs.SAMPLES
    started = two_ranks.run(jobs.start_differently, arguments)
    reference = two_ranks.once(jobs.start_differently, DDP)
    for mine, theirs in zip(started, reference, strict=True):
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def test_r60_registered_names_make_the_strategy() -> None:
    for stage, prefix in itertools.product(STAGES, ("", "ddp_")):  # some programs look for "ddp" in the name
        strategy = L.Trainer(accelerator="cpu", strategy=f"{prefix}zero_stage_{stage}", logger=False).strategy
        assert isinstance(strategy, ZeroStrategy)
        assert strategy.stage == stage
    full = L.Trainer(accelerator="cpu", strategy="zero_stage_3_full", logger=False).strategy
    assert full.checkpoint.format == "full"
    offloading = L.Trainer(accelerator="cpu", strategy="zero_stage_2_offload", logger=False).strategy
    assert offloading.offload.optimizer == "cpu"
    ddp = L.Trainer(accelerator="cpu", strategy="ddp", logger=False).strategy
    assert type(ddp).__name__ == "DDPStrategy"  # importing us leaves Lightning's names alone


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"stage": 4}, ValueError, r"stage=4 does not exist. Write one of \[0, 1, 2, 3, 'auto'\]"),
        ({"stage": "4"}, ValueError, "stage='4' does not exist"),
        ({"stage": True}, ValueError, "stage=True does not exist"),
        ({"stge": 2}, TypeError, "stge"),
        ({"find_unused_parameters": True}, TypeError, "find_unused_parameters"),
        ({"bucket_size_mb": 0}, ValueError, "bucket_size_mb=0 must be a positive number of MiB"),
        ({"prefetch": -1}, ValueError, "prefetch=-1 must be an integer of at least 0"),
        (
            {"accumulation": "global"},
            ValueError,
            r"accumulation='global' is unknown. Write one of \['sharded', 'local'\]",
        ),
        ({"reduce_dtype": "int8"}, ValueError, "reduce_dtype='int8' is not a floating-point dtype"),
        ({"wait_timeout": 0}, ValueError, "wait_timeout=0 must be a positive duration"),
        ({"offload": {"optimiser": "cpu"}}, TypeError, "no key 'optimiser'; did you mean 'optimizer'"),
        ({"offload": {"optimizer": "disk"}}, ValueError, "optimizer='disk'.* is not a tier"),
        ({"offload": {"path": "/x"}}, ValueError, "Give `path` exactly when a tier is 'nvme'"),
        ({"offload": 3}, TypeError, r"offload=3 must be Offload\(\.\.\.\)"),
        ({"checkpoint": {"format": "zip"}}, ValueError, "format='zip'"),
        ({"checkpoint": {"async_save": 1}}, ValueError, r"async_save=1\) is neither True nor False"),
        ({"units": "torch.nn.Lineer"}, ValueError, "cannot be imported"),
        ({"units": 3}, TypeError, "units=3 must be 'auto'"),
        ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size=0 must be an integer of at least 1"),
        ({"stage": "automatic"}, ValueError, "Write one of"),
    ],
)
def test_r60_bad_arguments_raise_at_construction(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ZeroStrategy(**arguments)


def test_unsupported_precision_is_refused_with_the_supported_ones() -> None:
    from lightning.pytorch.plugins.precision import FSDPPrecision

    with pytest.raises(ValueError, match=r"FSDPPrecision.*'bf16-mixed'"):
        ZeroStrategy(precision_plugin=FSDPPrecision("32-true"))


def test_misuse_ends_in_one_clear_error_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    not_a_checkpoint = tmp_path / "notes.ckpt"
    not_a_checkpoint.write_text("hello")
    no_state = tmp_path / "no_state.ckpt"
    torch.save({"epoch": 1}, no_state)
    for stage in STAGES:
        foreign = two_ranks.run(jobs.try_to_fit, {"stage": stage}, "foreign optimizer")
        assert all("that is not the module's" in error for error in foreign)
        unreadable = two_ranks.run(jobs.try_to_fit, {"stage": stage}, "checkpoint", not_a_checkpoint)
        assert all("notes.ckpt' is not a Lightning checkpoint" in error for error in unreadable)
        stateless = two_ranks.run(jobs.try_to_fit, {"stage": stage}, "checkpoint", no_state)
        assert all("it has no 'state_dict'" in error for error in stateless)
    unit = two_ranks.run(jobs.try_to_fit, {"stage": 3, "units": "Transformer"}, "units")
    assert all("units='Transformer': the model has no such module" in error for error in unit)
    assert two_ranks.run(jobs.try_to_fit, {"stage": 3}, "nothing") == [None, None]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_raises_leaves_no_other_rank_hanging(stage: int) -> None:
    started = time.monotonic()
    _, errors = run_alone(2, jobs.raise_on_rank_1, {"stage": stage, "wait_timeout": SHORT})
    assert "rank 1 has had enough" in errors[1]
    # Who, what, when and where, by the model's names; then what is known besides. No error is behind another one.
    assert re.search("Rank 1 failed during step 2, in .*Rank 1 failed: ValueError: rank 1 has had enough", errors[0])
    assert errors[0].count("Traceback (most recent call last)") == 1
    assert time.monotonic() - started < HANGS / 2  # of which most is starting Python twice


@pytest.mark.parametrize(
    ("job", "stage", "told"),
    [
        (jobs.sleep_on_rank_1, 2, r"did not come within wait_timeout=8 s during step 2, in the agreement that ends"),
        (jobs.die_on_rank_1, 3, r"died \(connection \w+\) during step 2, in the all-gather of the parameters of \w+"),
    ],
)
def test_a_rank_that_does_not_come_is_named(job: Any, stage: int, told: str) -> None:
    pool = RankPool(2)
    try:
        pool.begin(job, {"stage": stage, "wait_timeout": SHORT if job is jobs.sleep_on_rank_1 else PATIENCE})
        if job is jobs.die_on_rank_1:
            pool.processes[1].join(HANGS)
        died = time.monotonic()
        rank, _, error = pool.next_outcome()
    finally:
        for process in pool.processes:
            process.kill()
    assert rank == 0
    assert re.search(f"RankTimeoutError: Rank 1 {told}", error)
    assert error.count("Traceback (most recent call last)") == 1
    if job is jobs.die_on_rank_1:  # at once: Lightning's launcher, which looks every few seconds, kills who could tell
        assert time.monotonic() - died < AT_ONCE
