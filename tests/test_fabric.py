"""`Fabric(strategy=ZeroStrategy(...))` beside Fabric's own strategies, on real processes."""

import functools
import math
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

import fabric_jobs
import warm
from compare import assert_same_bits
from jobs import Classifier
from lightning_zero import Checkpoint, ZeroStrategy, consolidate, verify
from lightning_zero.checkpoint import Folder
from lightning_zero.checkpoint.manifest import read_manifest
from lightning_zero.pl.fabric import FabricZeroStrategy
from ranks import PATIENCE, SHORT, RankPool, run_alone

STAGES = [1, 2, 3]
DDP = "ddp_find_unused_parameters_true"


def assert_same_run(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    assert found["val"] == expected["val"]
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert_same_bits(found["weights"], expected["weights"])
    for index, state in expected["state"]["state"].items():
        assert_same_bits(found["state"]["state"][index], state)


@pytest.fixture(scope="module")
def ddp(two_ranks: RankPool) -> Any:
    """DDP's runs on two ranks, each made once."""
    return functools.partial(two_ranks.once, fabric_jobs.train, DDP, 2)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        *((stage, "32-true") for stage in (0, *STAGES)),
        (1, "bf16-mixed"),
        (3, "bf16-mixed"),
        (2, "16-mixed"),
        (3, "16-mixed"),
    ],
)
def test_two_ranks_equal_fabrics_ddp_bit_for_bit(stage: int, precision: str, two_ranks: RankPool, ddp: Any) -> None:
    kwargs = {"precision": precision, "clip": "value"}
    found = two_ranks.run(fabric_jobs.train, {"stage": stage}, 2, **kwargs)
    for mine, theirs in zip(found, ddp(**kwargs), strict=True):
        assert_same_run(mine, theirs)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_by_norm_and_accumulation_equal_fabrics_ddp(stage: int, two_ranks: RankPool, ddp: Any) -> None:
    for kwargs in ({"clip": "norm"}, {"clip": "none", "accumulate": 3, "step": "training_step"}):
        found = two_ranks.run(fabric_jobs.train, {"stage": stage}, 2, **kwargs)
        for mine, theirs in zip(found, ddp(**kwargs), strict=True):
            if kwargs["clip"] == "norm":
                assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-6)
                assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
            else:
                assert_same_run(mine, theirs)


def test_clipping_by_another_norm_equals_fabrics_ddp(two_ranks: RankPool, ddp: Any) -> None:
    found = two_ranks.run(fabric_jobs.train, {"stage": 2}, 2, norm_type=math.inf)
    for mine, theirs in zip(found, ddp(norm_type=math.inf), strict=True):
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-6)
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_clipped_after_each_micro_batch_are_those_of_fabrics_ddp(
    stage: int, two_ranks: RankPool, ddp: Any
) -> None:
    """Each rank clips its own, until a backward reduces them."""
    how: dict[str, Any] = {"accumulate": 3, "clips_each": True}
    found = two_ranks.run(fabric_jobs.train, {"stage": stage}, 2, clip="value", **how)
    for mine, theirs in zip(found, ddp(clip="value", **how), strict=True):
        assert_same_run(mine, theirs)
    found = two_ranks.run(fabric_jobs.train, {"stage": stage}, 2, clip="norm", **how)
    for mine, theirs in zip(found, ddp(clip="norm", **how), strict=True):
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-6)
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_on_gradients_that_come_between_forward_and_backward_see_them_before_they_are_taken(
    stage: int, two_ranks: RankPool
) -> None:
    expected = two_ranks.once(fabric_jobs.hooked_between, DDP, 2)
    found = two_ranks.run(fabric_jobs.hooked_between, {"stage": stage}, 2)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("stage", STAGES)
def test_no_backward_sync_saves_the_reductions_of_all_micro_batches_but_the_last(
    stage: int, two_ranks: RankPool
) -> None:
    sent = [
        two_ranks.run(fabric_jobs.train, {"stage": stage}, 2, clip="none", accumulate=accumulate)[0]["sent"]
        for accumulate in (1, 3)
    ]
    assert sent[0]["reduce_scatter"] == 3 * sent[1]["reduce_scatter"] > 0


def test_what_is_small_is_saved_in_one_file_and_what_is_larger_or_goes_on_from_shards_in_shards(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    weights = sum(values.nbytes for values in Classifier().state_dict().values())
    for small, told in (
        (10**9, "single files: "),
        (weights * 3 // 2, "folders of shards: "),  # there is the state of the optimizer, too
        (1000, "folders of shards: "),
    ):
        path = tmp_path / f"{small}.ckpt"
        first, second = two_ranks.run(fabric_jobs.save_and_tell, {"stage": 3, "checkpoint": None}, path, small)
        (expected, (said,)), (_, said_on_rank_1) = first, second
        assert told in said
        assert said_on_rank_1 == []
        assert path.is_file() == (small == 10**9)
        found, _ = two_ranks.run(fabric_jobs.load_and_go_on, {"stage": 2}, 2, path)
        assert_same_bits(found["weights"], expected["weights"])
        again = tmp_path / f"{small} again.ckpt"
        two_ranks.run(fabric_jobs.load_and_save, {"stage": 2, "checkpoint": None}, path, again)
        assert again.is_file() == path.is_file()


@pytest.mark.parametrize("how", ["apart", "optimizer first", "evaluated before"])
def test_module_and_optimizer_are_set_up_in_any_order(how: str, two_ranks: RankPool, ddp: Any) -> None:
    found = two_ranks.run(fabric_jobs.train, {"stage": 3}, 2, how, clip="value")
    for mine, theirs in zip(found, ddp(precision="32-true", clip="value"), strict=True):
        assert_same_run(mine, theirs)


@pytest.mark.parametrize("how", ["compiled in place", "compiled", "compiled, module first"])
def test_a_compiled_model_is_compiled_inside_of_the_engine_as_under_ddp(
    how: str, two_ranks: RankPool, ddp: Any
) -> None:
    found = two_ranks.run(fabric_jobs.train, {"stage": 2}, 2, how, clip="value")
    for mine, theirs in zip(found, ddp(how="compiled", clip="value"), strict=True):
        assert_same_run(mine, theirs)
        assert mine["graphs"] == theirs["graphs"] > 0
        assert not any("uncompiled" in told for told in mine["warned"])


def test_a_compiled_model_whose_blocks_are_gathered_is_compiled_block_by_block(two_ranks: RankPool) -> None:
    expected = two_ranks.run(fabric_jobs.train_compiled_blocks, DDP, 2)
    found = two_ranks.run(fabric_jobs.train_compiled_blocks, {"stage": 3}, 2)
    for (losses, graphs), (theirs, _) in zip(found, expected, strict=True):
        assert losses == theirs
        assert graphs > 0


def test_a_model_that_is_compiled_after_it_was_set_up_runs_uncompiled_and_says_so(
    two_ranks: RankPool, ddp: Any
) -> None:
    found = two_ranks.run(fabric_jobs.train, {"stage": 2}, 2, "compiled after", clip="value")
    for rank, theirs in enumerate(ddp(clip="value")):
        assert_same_run(found[rank], theirs)
        told = [one for one in found[rank]["warned"] if "compiled after fabric.setup runs uncompiled" in one]
        assert (len(told), found[rank]["graphs"]) == ((1, 0) if rank == 0 else (0, 0))


@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_equals_a_single_device(stage: int, pool_of: Any) -> None:
    one = pool_of(1)
    (found,) = one.run(fabric_jobs.train, {"stage": stage}, 1, clip="value")
    (expected,) = one.run(fabric_jobs.train, "auto", 1, clip="value")
    assert_same_run(found, expected)


def test_a_checkpoint_goes_on_at_any_stage_on_any_number_of_ranks(
    two_ranks: RankPool, pool_of: Any, tmp_path: Path
) -> None:
    expected = two_ranks.run(fabric_jobs.save_and_go_on, {"stage": 3}, 2, tmp_path / "saved")[0]
    assert (tmp_path / "saved").is_dir()
    for stage, how in ((3, "load"), (1, "load"), (2, "by hand")):
        found = two_ranks.run(fabric_jobs.load_and_go_on, {"stage": stage}, 2, tmp_path / "saved", how)[0]
        assert (found["epoch"], found["others"]) == (3, ["state_dict"])
        assert_same_bits(found["weights"], expected["weights"])
    theirs = two_ranks.run(fabric_jobs.load_and_go_on, DDP, 2, tmp_path / "saved")[0]
    assert_same_bits(theirs["weights"], expected["weights"])
    (alone,) = pool_of(1).run(fabric_jobs.load_and_go_on, {"stage": 2}, 1, tmp_path / "saved")
    assert alone["epoch"] == 3


def test_a_load_leaves_no_file_open_and_a_teardown_leaves_optimizers_as_they_were_made(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    for left, shapes in two_ranks.run(fabric_jobs.load_and_leave, {"stage": 3}, tmp_path / "saved"):
        assert left == []
        assert all(own == theirs for own, theirs in shapes)
        assert len(shapes) > 2


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_may_edit_what_it_loads_also_if_the_load_then_fails(
    stage: int, precision: str, fails: bool, two_ranks: RankPool, tmp_path: Path
) -> None:
    job = fabric_jobs.load_into_a_model_that_edits
    expected = two_ranks.run(job, DDP, tmp_path / "ddp", precision, fails)
    found = two_ranks.run(job, {"stage": stage, "units": "modules"}, tmp_path / "zero", precision, fails)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_hear_at_once_that_one_cannot_read(stage: int, two_ranks: RankPool, tmp_path: Path) -> None:
    strategy = {"stage": stage, "units": "modules", "wait_timeout": PATIENCE}
    first, second = two_ranks.run(fabric_jobs.load_where_rank_1_cannot_read, strategy, tmp_path / "saved")
    assert first.startswith("rank 1, reading the model: ")
    assert "the disk is gone" in second


def test_what_no_rank_reads_of_a_checkpoint_is_verified_too(two_ranks: RankPool, tmp_path: Path) -> None:
    told = two_ranks.run(fabric_jobs.load_what_is_damaged_where_nobody_reads, {"stage": 2}, tmp_path / "saved")
    assert all("is damaged" in error for error in told)


@pytest.mark.parametrize("stage", STAGES)
def test_two_models_with_an_optimizer_each_equal_fabrics_ddp(stage: int, two_ranks: RankPool) -> None:
    found = two_ranks.run(fabric_jobs.two_models, {"stage": stage}, 2)
    for mine, theirs in zip(found, two_ranks.once(fabric_jobs.two_models, DDP, 2), strict=True):
        assert mine["losses"] == theirs["losses"]
        assert_same_bits(mine["generator"], theirs["generator"])
        assert_same_bits(mine["critic"], theirs["critic"])
        assert (mine["gathered"], mine["told"]) == ([0, 1], 1)
        reported, sent = mine["sent"]
        # Both models send by the communicator of all ranks, whose bytes count once.
        assert reported == {kind: nbytes for kind, nbytes in sent.items() if nbytes}


def test_init_module_builds_in_shards(two_ranks: RankPool) -> None:
    found = two_ranks.run(fabric_jobs.built_inside, {"stage": 3}, 2)
    for mine, theirs in zip(found, two_ranks.once(fabric_jobs.built_inside, DDP, 2), strict=True):
        assert_same_run(mine, theirs)
        assert (mine["in_shards"], theirs["in_shards"]) == (True, False)
        whole = sum(value.nbytes for name, value in theirs["weights"].items() if "running" not in name)
        assert mine["memory"]["parameter"] <= 0.62 * whole  # padding: 1 KiB of 4


def test_an_overflow_on_one_rank_is_skipped_on_all(two_ranks: RankPool) -> None:
    found = two_ranks.run(fabric_jobs.overflows, {"stage": 2}, 2)
    for mine, theirs in zip(found, two_ranks.once(fabric_jobs.overflows, DDP, 2), strict=True):
        assert_same_bits(mine["weights"], theirs["weights"])
        assert mine["skipped"] == 1


def test_what_fabric_saves_is_read_by_others(two_ranks: RankPool, tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    expected = two_ranks.run(fabric_jobs.save_beside, {"stage": 3}, 2, folder)[0]
    assert_same_bits(Classifier.load_from_checkpoint(folder).state_dict(), expected["weights"])
    assert read_manifest(Folder(folder)).about["step"] == expected["steps"] > 0
    consolidate(folder, tmp_path / "consolidated")
    two_ranks.run(fabric_jobs.save_beside, {"stage": 3, "checkpoint": "full"}, 2, file)
    for single in (tmp_path / "consolidated", file):
        saved = torch.load(single, weights_only=True)
        assert_same_bits(saved["state_dict"], expected["weights"])
        assert all(not name.endswith("bias") for name in saved["weights"])
        for index, state in expected["state"].items():
            assert_same_bits(saved["optimizer"]["state"][index], state)


def test_a_module_that_is_saved_as_it_is_has_its_whole_values_in_a_single_file(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    strategy = {"stage": 3, "checkpoint": "full", "wait_timeout": SHORT}
    expected, _ = two_ranks.run(fabric_jobs.save_a_module_itself, strategy, tmp_path / "saved")
    saved = torch.load(tmp_path / "saved", weights_only=False)
    assert_same_bits(saved["net"][0].state_dict(), expected)


def test_each_rank_reads_its_part_of_the_state_of_an_optimizer(two_ranks: RankPool, tmp_path: Path) -> None:
    read = two_ranks.run(fabric_jobs.bytes_to_load, {"stage": 3}, tmp_path / "saved")
    assert max(read) < 0.6 * sum(file.stat().st_size for file in (tmp_path / "saved").iterdir())


def test_who_sets_up_too_little_is_told_so(two_ranks: RankPool) -> None:
    for told in two_ranks.run(fabric_jobs.refusals, 2):
        assert "Call fabric.setup(model, optimizer)" in told["stranger"]
        assert "nothing was clipped" in told["nan"]
        assert "Set up all of them first" in told["second"]
        assert "end it first: fabric.strategy.teardown()" in told["anew"]
        assert "SGD has parameters of 2 models that are set up" in told["both"]
        assert told["shapes"] == str([tuple(parameter.shape) for parameter in Classifier().parameters()])


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_that_is_copied_right_after_it_was_set_up_is_rank_zeros_on_every_rank(
    stage: int, two_ranks: RankPool
) -> None:
    first, second = two_ranks.run(fabric_jobs.copies_before_the_first_forward, {"stage": stage}, 2)
    assert_same_bits(second, first)
    assert first["1.running_mean"].eq(0).all()


@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_of_what_fabric_has_wrapped_averages_weights_as_under_ddp(
    stage: int, two_ranks: RankPool, tmp_path: Path
) -> None:
    expected = two_ranks.run(fabric_jobs.averages_in_a_copy, DDP, tmp_path / "ddp")
    found = two_ranks.run(fabric_jobs.averages_in_a_copy, {"stage": stage}, tmp_path / "here")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["seen"] == theirs["seen"]
        assert_same_bits(mine["weights"], theirs["weights"])
        assert_same_bits(mine["average"], theirs["average"])


@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_an_optimizer_that_was_not_set_up_is_clipped_saved_and_loaded_as_under_ddp(
    checkpoint: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    mine = two_ranks.run(fabric_jobs.beside_what_is_set_up, {"stage": 3, "checkpoint": checkpoint}, 2, tmp_path / "a")
    theirs = two_ranks.run(fabric_jobs.beside_what_is_set_up, DDP, 2, tmp_path / "b")
    for found, expected in zip(mine, theirs, strict=True):
        assert list(map(torch.equal, found["clipped"], expected["clipped"])) == [True, True]
        for weights in found["weights"]:
            assert_same_bits(weights, expected["weights"][0])
        for states in found["states"]:
            for index, state in expected["states"][0].items():
                assert_same_bits(states[index], state)


@pytest.mark.parametrize("stage", STAGES)
def test_the_strategy_clips_what_fabric_has_wrapped_as_its_own_strategies_do(stage: int, two_ranks: RankPool) -> None:
    mine = two_ranks.run(fabric_jobs.clips_through_the_strategy, {"stage": stage}, 2)
    for found, expected in zip(mine, two_ranks.run(fabric_jobs.clips_through_the_strategy, DDP, 2), strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


def test_what_fabric_has_itself_and_what_is_not_there_is_said_at_once() -> None:
    for arguments, error, told in (
        ({"precision_plugin": MixedPrecision("bf16-mixed", "cpu")}, ValueError, "Fabric(plugins=...)"),
        ({"stage": "auto"}, NotImplementedError, "Write a stage"),
    ):
        with pytest.raises(error, match=re.escape(told)):
            Fabric(strategy=ZeroStrategy(**arguments), accelerator="cpu", devices=1)


@pytest.mark.parametrize(
    ("methods", "stage", "is_refused"),
    [(("train", "eval"), 1, True), (("train", "eval"), 0, False), (("eval",), 1, False), ((), 3, False)],
)
def test_an_optimizer_that_moves_weights_in_train_and_eval_is_refused_where_it_has_shards(
    methods: tuple[str, ...], stage: int, is_refused: bool
) -> None:
    strategy: Any = Fabric(strategy=ZeroStrategy(stage=stage), accelerator="cpu", devices=1).strategy  # type: ignore[arg-type]
    own = type("Own", (torch.optim.SGD,), {name: lambda _: None for name in methods})
    told = pytest.raises(NotImplementedError, match=r"Own moves weights in train\(\) and eval\(\).*Use a Trainer, or")
    with told if is_refused else nullcontext():
        strategy.setup_optimizer(own([nn.Parameter(torch.ones(1))], 0.1))


@pytest.mark.parametrize(("stage", "trains", "moves"), [(3, True, False), (3, False, True), (2, True, True)])
def test_only_a_module_that_is_gathered_unit_by_unit_is_not_moved_to_the_device_as_a_whole(
    stage: int, trains: bool, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy: Any = Fabric(strategy=ZeroStrategy(stage=stage), accelerator="cpu", devices=1).strategy  # type: ignore[arg-type]
    moved: list[nn.Module] = []
    monkeypatch.setattr(DDPStrategy, "module_to_device", lambda _, module: moved.append(module))
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(trains), nn.BatchNorm1d(2, affine=False))
    module[0].requires_grad_(False)
    strategy.module_to_device(module)
    assert moved == [module] * moves


def test_one_strategy_serves_several_fabrics_which_each_choose_the_format_of_checkpoints() -> None:
    written = ZeroStrategy()
    first, second = (Fabric(strategy=written, accelerator="cpu", devices=1).strategy for _ in range(2))
    assert isinstance(first, FabricZeroStrategy)
    assert isinstance(second, FabricZeroStrategy)
    first.checkpoint_io = AsyncCheckpointIO()
    assert first.checkpoint == Checkpoint(format="full")
    assert second.checkpoint is None


SCRIPT = """
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
import lightning_zero

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="zero_stage_2")
    fabric.launch()
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    for batch in fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fabric.print(f"{fabric.strategy!r} on {fabric.world_size} ranks: {loss.item():.6f}")
"""


def run_script(script: str, folder: Path) -> str:
    """What it prints."""
    (folder / "script.py").write_text(script)
    with warm.starts():
        done = subprocess.run(
            [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=600, check=False
        )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    assert "TCPStore" not in done.stderr
    return done.stdout


def test_a_script_launches_its_ranks_by_itself(tmp_path: Path) -> None:
    assert "on 2 ranks" in run_script(SCRIPT, tmp_path)


SAVES_LAST = """
import time
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import save

def write_slowly(*args):
    time.sleep(1.0)
    return write_shard(*args)

if __name__ == "__main__":
    write_shard, save.write_shard = save.write_shard, write_slowly
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ZeroStrategy(stage=2, checkpoint={"async_save": True}))
    fabric.launch()
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    begun = time.monotonic()
    fabric.save("last.ckpt", {"model": model, "optimizer": optimizer})
    fabric.print("saving", time.monotonic() - begun < 1.0)
"""


def test_a_save_in_the_background_is_complete_when_the_script_has_ended(tmp_path: Path) -> None:
    assert "saving True" in run_script(SAVES_LAST, tmp_path)
    assert verify(tmp_path / "last.ckpt") == []


@pytest.mark.parametrize("stage", STAGES)
def test_what_changes_after_a_save_in_the_background_is_not_in_it(
    stage: int, two_ranks: RankPool, tmp_path: Path
) -> None:
    strategy = {"stage": stage, "checkpoint": {"async_save": True}}
    for before, loaded in two_ranks.run(fabric_jobs.overwrites_while_it_saves, strategy, tmp_path / "a.ckpt"):
        assert_same_bits(loaded, before)


def test_a_teardown_waits_for_a_save_in_the_background(two_ranks: RankPool, tmp_path: Path) -> None:
    strategy = {"stage": 2, "checkpoint": {"async_save": True}}
    assert two_ranks.run(fabric_jobs.tears_down_while_it_saves, strategy, tmp_path / "a.ckpt") == [[], []]


def test_a_save_in_the_background_that_fails_is_told_at_once_and_raised_by_the_next(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    strategy = {"stage": 2, "checkpoint": {"async_save": True}}
    told, *others = two_ranks.run(fabric_jobs.fails_while_it_saves, strategy, tmp_path / "a.ckpt")
    assert re.search(r"Saving .*a\.ckpt failed: rank 1: OSError: disk full", told["warned"])
    for each in (told, *others):
        assert "rank 1: OSError: disk full" in each["raised"]


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_whole_where_users_catch_the_error_of_a_step(stage: int, two_ranks: RankPool) -> None:
    for values, gradients, expected in two_ranks.run(fabric_jobs.shapes_where_an_error_is_caught, {"stage": stage}, 2):
        assert values == gradients == expected


def test_a_rank_that_uses_another_of_several_models_than_the_others_is_told_so() -> None:
    """Its messages were taken for those about the first model, whose layers have the same names: the losses were
    others, without a word."""
    results, errors = run_alone(2, fabric_jobs.evaluates_alone, 3, SHORT)
    assert results == [None, None]
    assert any("the agreement on what comes next, of model 2, waiting for rank 1" in error for error in errors)
