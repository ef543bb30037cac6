"""Tensor parallelism under Trainer: Lightning's documented example, what each rank sees, precisions, and resuming at
another degree."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import jobs
import tensor_training_jobs
from compare import assert_same_bits
from lightning_zero import consolidate
from lightning_zero.checkpoint import StoredCheckpoint
from lightning_zero.checkpoint.load import verify
from offload_jobs import GoesBack
from ranks import RankPool

STAGES = [0, 1, 2, 3]
TO_ROUNDING = {"rel": 1e-6}

Pools = Callable[[int], RankPool]


def mean_losses(runs: list[dict[str, Any]], tensor: int) -> list[float]:
    """Over data-parallel ranks; those that share modules have the same."""
    for at, run in enumerate(runs):
        assert run["losses"] == runs[at // tensor * tensor]["losses"]
    return torch.tensor([run["losses"] for run in runs[::tensor]], dtype=torch.float64).mean(0).tolist()


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def data_parallel(two_ranks: RankPool) -> list[dict[str, Any]]:
    """The same batches on two ranks that share nothing."""
    return two_ranks.run(tensor_training_jobs.fit, 0, 2, 1, epochs=2)


@pytest.fixture(scope="module")
def data_parallel_once(two_ranks: RankPool) -> list[dict[str, Any]]:
    """One epoch of that."""
    return two_ranks.run(tensor_training_jobs.fit, 0, 2, 1)


class Trained(NamedTuple):
    path: Path  # of the checkpoint that was written in the end
    runs: list[dict[str, Any]]


@pytest.fixture(scope="module")
def trained(pool_of: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Pairs that share modules, each run made once: of one pair two epochs, the second at another learning rate; of two
    pairs one epoch, from which others go on."""
    made: dict[tuple[Any, ...], Trained] = {}

    def train(stage: int, world: int = 4, sequence: bool = True, kind: str = "sharded") -> Trained:
        if (stage, world, sequence, kind) not in made:
            path = tmp_path_factory.mktemp("trained") / "in pairs.ckpt"
            how: dict[str, Any] = {"strategy": {"checkpoint": {"format": kind}}, "model": {"sequence": sequence}}
            epochs = 1 if world == 4 else 2
            runs = pool_of(world).run(tensor_training_jobs.fit, stage, world, 2, epochs=epochs, save=path, **how)
            made[stage, world, sequence, kind] = Trained(path, runs)
        return made[stage, world, sequence, kind]

    return train


@pytest.mark.parametrize("stage", STAGES)
def test_the_documented_example_of_model_parallel_strategy_runs_with_one_line_changed(
    stage: int, two_ranks: RankPool
) -> None:
    lightnings = two_ranks.once(tensor_training_jobs.fit_documented, None)
    for found, expected in zip(two_ranks.run(tensor_training_jobs.fit_documented, stage), lightnings, strict=True):
        assert found["losses"] == pytest.approx(expected["losses"], **TO_ROUNDING)
        assert_same_weights(found["weights"], expected["weights"])


@pytest.mark.parametrize("stage", STAGES)
def test_the_documented_example_on_one_rank_has_the_bits_of_one_device(stage: int, pool_of: Pools) -> None:
    (found,), (expected,) = (pool_of(1).once(tensor_training_jobs.fit_alone, at) for at in (stage, None))
    assert found["losses"] == expected["losses"]
    assert_same_bits(found["weights"], expected["weights"])


@pytest.mark.parametrize(("world", "sequence"), [(2, True), (4, True), (4, False)])
@pytest.mark.parametrize("stage", STAGES)
def test_training_is_that_of_data_parallel_ranks_on_the_same_batches(
    stage: int, world: int, sequence: bool, trained: Callable[..., Trained], data_parallel: list[dict[str, Any]],
    data_parallel_once: list[dict[str, Any]],
) -> None:  # fmt: skip
    _, runs = trained(stage, world, sequence)
    expected = data_parallel_once if world == 4 else data_parallel
    assert mean_losses(runs, 2) == pytest.approx(mean_losses(expected, 1), **TO_ROUNDING)
    assert runs[0]["mesh"] == {"replicate": 1, "data_parallel": world // 2, "tensor_parallel": 2}
    for run in runs:
        assert run["to save"] == expected[0]["to save"]
        assert_same_weights(run["weights"], expected[0]["weights"])
        assert run["val_loss"] == pytest.approx(expected[0]["val_loss"], **TO_ROUNDING)


def test_ranks_that_share_modules_see_the_same_batches_and_the_others_see_others(pool_of: Pools) -> None:
    seen = [run["seen"] for run in pool_of(4).run(tensor_training_jobs.fit, 2, 4, 2, shuffle=True, validates=False)]
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    rows = {tuple(row) for row in torch.cat([seen[0], seen[2]]).tolist()}
    assert len(rows) == tensor_training_jobs.SAMPLES


def test_ranks_that_share_modules_draw_the_same_even_if_nobody_has_seeded_them(pool_of: Pools) -> None:
    runs = pool_of(4).run(tensor_training_jobs.fit_unseeded, 2, 4, 2)
    mean_losses(runs, 2)
    assert runs[0]["losses"] != runs[2]["losses"]


def test_workers_of_loaders_draw_the_same_for_ranks_that_share_modules(pool_of: Pools) -> None:
    assert pool_of(4).run(tensor_training_jobs.seed_of_workers, 4, 2) == [0, 0, 1, 1]
    assert pool_of(4).run(tensor_training_jobs.seed_of_workers, 4, 1) == [0, 1, 2, 3]


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_clipped_by_the_norm_of_all_ranks(stage: int, pool_of: Pools, two_ranks: RankPool) -> None:
    how = {"gradient_clip_val": 0.1, "validates": False}
    expected = two_ranks.once(tensor_training_jobs.fit, 0, 2, 1, **how)
    runs = pool_of(4).run(tensor_training_jobs.fit, stage, 4, 2, **how)
    assert mean_losses(runs, 2) == pytest.approx(mean_losses(expected, 1), **TO_ROUNDING)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_precisions_train_to_their_rounding(
    stage: int, precision: str, pool_of: Pools, data_parallel: list[dict[str, Any]]
) -> None:
    # The third step is the first that has seen the optimizer's state, and comes after validation.
    runs = pool_of(4).run(tensor_training_jobs.fit, stage, 4, 2, epochs=2, max_steps=3, precision=precision)
    # Two bytes keep 8 bits (bf16) of each activation.
    assert mean_losses(runs, 2) == pytest.approx(mean_losses(data_parallel, 1)[:3], rel=2 * 2.0**-8)


# -- checkpoints

EPOCH = tensor_training_jobs.SAMPLES // 8  # steps


@pytest.fixture(scope="module")
def saved_without(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """A checkpoint after an epoch of ranks that share nothing, made once for a strategy."""
    paths: dict[str, Path] = {}

    def save(strategy: Any) -> Path:
        if str(strategy) not in paths:
            paths[str(strategy)] = path = tmp_path_factory.mktemp("saved") / "at 2 x 1.ckpt"
            two_ranks.run(tensor_training_jobs.save_without, strategy, path)
        return paths[str(strategy)]

    return save


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1), (2, 1), (1, 2)], ids="{0[0]} x {0[1]}".format)
@pytest.mark.parametrize(("stage", "kind"), [(1, "sharded"), (3, "sharded"), (2, "full")])
def test_a_run_goes_on_at_any_other_degree_with_the_same_losses(
    stage: int, kind: str, shape: tuple[int, int], pool_of: Pools, data_parallel: list[dict[str, Any]],
    trained: Callable[..., Trained],
) -> None:  # fmt: skip
    path, _ = trained(stage, kind=kind)
    data, tensor = shape
    how = {"epochs": 2, "resume": path, "validates": False}
    runs = pool_of(data * tensor).run(tensor_training_jobs.fit, stage, data * tensor, tensor, **how)
    assert mean_losses(runs, tensor) == pytest.approx(mean_losses(data_parallel, 1)[EPOCH:], **TO_ROUNDING)
    assert_same_weights(runs[0]["weights"], data_parallel[0]["weights"])


def test_a_run_that_lost_a_machine_goes_on_at_other_degrees_with_the_same_losses(
    pool_of: Pools, data_parallel: list[dict[str, Any]], tmp_path: Path
) -> None:
    killed = RankPool(4)
    killed.begin(tensor_training_jobs.fit_until_killed, 3, 4, 2, tmp_path)
    killed.processes[1].join(60)
    assert killed.processes[1].exitcode == -signal.SIGKILL
    killed.kill()
    last = tmp_path / "last.ckpt"
    step = StoredCheckpoint(last).load()["global_step"]
    assert step == EPOCH
    for data, tensor in [(1, 4), (4, 1), (2, 1)]:
        runs = pool_of(data * tensor).run(tensor_training_jobs.fit, 3, data * tensor, tensor, epochs=2, resume=last)
        assert mean_losses(runs, tensor) == pytest.approx(mean_losses(data_parallel, 1)[step:], **TO_ROUNDING)
        assert_same_weights(runs[0]["weights"], data_parallel[0]["weights"])


@pytest.mark.parametrize("source", [{"stage": 2}, "ddp_find_unused_parameters_true"], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_of_ranks_that_share_nothing_goes_on_with_tensor_parallelism(
    stage: int, source: Any, pool_of: Pools, data_parallel: list[dict[str, Any]], saved_without: Callable[[Any], Path]
) -> None:
    runs = pool_of(4).run(tensor_training_jobs.fit, stage, 4, 2, epochs=2, resume=saved_without(source))
    assert mean_losses(runs, 2) == pytest.approx(mean_losses(data_parallel, 1)[EPOCH:], **TO_ROUNDING)


def test_ranks_that_share_modules_draw_the_same_after_a_resume_on_another_number_of_ranks(
    pool_of: Pools, saved_without: Callable[[Any], Path]
) -> None:
    how = {"epochs": 2, "resume": saved_without({"stage": 2}), "model": {"dropout": 0.5}, "validates": False}
    mean_losses(pool_of(4).run(tensor_training_jobs.fit, 2, 4, 2, **how), 2)


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_holds_the_whole_model_once(
    stage: int, sequence: bool, trained: Callable[..., Trained], tmp_path: Path
) -> None:
    path, (run, *_) = trained(stage, sequence=sequence)
    assert verify(path) == []
    plain = tensor_training_jobs.Language.load_from_checkpoint(path, map_location="cpu")
    assert_same_weights(plain.state_dict(), run["weights"])
    saved = StoredCheckpoint(path)
    nbytes = sum(entry.nbytes for name, entry in saved.manifest.tensors.items() if not name.startswith("rank "))
    weights = sum(value.nbytes for value in run["weights"].values())
    trained = sum(parameter.nbytes for parameter in tensor_training_jobs.trainable(plain))
    unused = sum(parameter.nbytes for parameter in plain.towers.unused.parameters())
    assert nbytes == pytest.approx(weights + 2 * (trained - unused), rel=0.01, abs=200)  # and a count for each
    consolidate(path, tmp_path / "file.ckpt")
    state = torch.load(tmp_path / "file.ckpt", weights_only=False)["optimizer_states"][0]["state"]
    shapes = [tuple(parameter.shape) for parameter in tensor_training_jobs.trainable(plain)]
    assert {tuple(value["exp_avg"].shape) == shapes[index] for index, value in state.items()} == {True}


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_read_their_boxes_into_a_model_that_is_in_shards(
    stage: int, pool_of: Pools, saved_without: Callable[[Any], Path]
) -> None:
    path = saved_without({"stage": 2})
    saved = jobs.read_checkpoint(path)
    expected = saved["state_dict"] | {
        f"{index} {name}": value
        for index, state in saved["optimizer_states"][0]["state"].items()
        for name, value in state.items()
    }
    for found in pool_of(4).run(tensor_training_jobs.load_into_engine, stage, path):
        assert found.keys() == expected.keys()
        assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(expected[name])) for name in expected)


@pytest.fixture(scope="module")
def averaged(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of two ranks that share nothing, saved after an epoch and gone on for another."""
    path = tmp_path_factory.mktemp("averaged") / "at 2 x 1.ckpt"
    two_ranks.run(tensor_training_jobs.fit_averaged, 0, 2, 1, save=path)
    return two_ranks.run(tensor_training_jobs.fit_averaged, 0, 2, 1, epochs=2, resume=path)[0]["weights"]


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("stage", [1, 3])
def test_averages_of_weights_are_divided_saved_whole_and_go_on(
    stage: int, kind: str, pool_of: Pools, averaged: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path, strategy = tmp_path / "run.ckpt", {"checkpoint": {"format": kind}}
    run, *_ = pool_of(4).run(tensor_training_jobs.fit_averaged, stage, 4, 2, save=path, strategy=strategy)
    saved = jobs.read_checkpoint(path)
    assert_same_weights(saved["state_dict"], run["weights"])  # after fit the model has the averages
    for place in ("state_dict", "current_model_state"):
        assert {type(value) for value in saved[place].values()} == {torch.Tensor}
    if kind == "sharded":
        again, *_ = pool_of(4).run(tensor_training_jobs.fit_averaged, stage, 4, 2, epochs=2, resume=path)
        assert_same_weights(again["weights"], averaged)


class Averaged(NamedTuple):
    weights: dict[str, torch.Tensor]
    went_on: dict[str, torch.Tensor]  # the weights of a run from there


@pytest.fixture(scope="module")
def averaged_in_shards(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Averaged:
    """Two ranks that share nothing."""
    average, folder = tensor_training_jobs.fit_averaged_in_shards, tmp_path_factory.mktemp("averaged in shards")
    path, again = folder / "plain.ckpt", folder / "again.ckpt"
    run, _ = two_ranks.run(average, 2, 2, 1, epochs=2, midway=path)
    went_on, _ = two_ranks.run(average, 2, 2, 1, epochs=2, midway=again, resume=path)
    return Averaged(run["weights"], went_on["weights"])


@pytest.mark.parametrize("stage", [1, 3])
def test_r21_a_sharded_average_is_of_this_ranks_part_and_goes_on_at_another_degree(
    stage: int, pool_of: Pools, two_ranks: RankPool, averaged_in_shards: Averaged, tmp_path: Path
) -> None:
    average, divided = tensor_training_jobs.fit_averaged_in_shards, tmp_path / "divided.ckpt"
    found, *_ = pool_of(4).run(average, stage, 4, 2, epochs=2, midway=divided)
    assert_same_weights(found["weights"], averaged_in_shards.weights)
    lightnings, _ = two_ranks.once(tensor_training_jobs.fit_averaged, 0, 2, 1, epochs=2)
    assert_same_weights(averaged_in_shards.weights, lightnings["weights"])
    went_on, _ = two_ranks.run(average, 2, 2, 1, epochs=2, midway=tmp_path / "again.ckpt", resume=divided)
    assert_same_weights(went_on["weights"], averaged_in_shards.went_on)


def test_a_callback_that_copies_the_model_before_it_is_divided_is_refused(two_ranks: RankPool) -> None:
    _, errors = two_ranks.outcomes(tensor_training_jobs.fit_copied, 2)
    for error in errors:
        assert "StochasticWeightAveraging averages a copy" in error


def test_a_model_that_nobody_has_parallelized_is_told_in_one_warning(two_ranks: RankPool) -> None:
    (warned, table), (warned_on_rank_1, _) = two_ranks.run(
        tensor_training_jobs.told_at_start, tensor_training_jobs.Alike
    )
    assert warned == [
        "tensor_parallel_size=2, and no module was parallelized: 2 ranks at a time do the same work on the same "
        "batches. Call parallelize_module(..., self.device_mesh['tensor_parallel'], plan) in configure_model (with "
        "fabric.strategy.device_mesh before fabric.setup), or leave tensor_parallel_size out."
    ]
    assert warned_on_rank_1 == []
    assert table.startswith("ZeRO stage 2 on 2 ranks")
    assert "divide" not in table


def test_where_all_ranks_share_modules_the_table_says_that_none_is_left_to_divide_over(two_ranks: RankPool) -> None:
    (warned, table), _ = two_ranks.run(tensor_training_jobs.told_at_start, tensor_training_jobs.Language)
    assert warned == []
    assert "All 2 ranks share the same modules, and a stage has no others to divide over" in table
    assert "Trainer(devices=4) or more divides" in table
    assert "One rank" not in table


@pytest.mark.parametrize("stage", [1, 3])
def test_models_are_used_after_fit_and_saved_again(stage: int, pool_of: Pools, tmp_path: Path) -> None:
    first, *_ = pool_of(4).run(tensor_training_jobs.use_after_fit, stage, tmp_path)
    assert first["validated"] == pytest.approx(first["val_loss"], **TO_ROUNDING)
    assert first["from file"] == pytest.approx(first["val_loss"], **TO_ROUNDING)
    saved = jobs.read_checkpoint(tmp_path / "after.ckpt")["state_dict"]
    assert_same_weights(saved, first["weights"])


def test_r36_r56_parameters_keep_the_values_that_configure_model_gave_them(pool_of: Pools) -> None:
    """As far as tensor parallelism goes: initialisation after parallelize_module, on DTensors, is not lost."""
    for found in pool_of(4).run(tensor_training_jobs.initialised, 3):
        assert torch.equal(found["filled"], torch.full_like(found["filled"], 0.25))
        assert torch.equal(found["scaled"], found["expected"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size=3 does not divide the 4 ranks. Write one of \[1, 2, 4\]"),
        (
            {"tensor_parallel_size": 2, "replicate_size": 4},
            r"replicate_size=4 does not divide the 2 groups of tensor_parallel_size=2. Write one of \[1, 2\]",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_world_are_refused_before_anything_is_made(
    arguments: dict[str, Any], told: str, pool_of: Pools
) -> None:
    _, errors = pool_of(4).outcomes(tensor_training_jobs.fit, 2, 4, 2, strategy=arguments)
    for error in errors:
        assert re.search(told, error)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_one_rank_is_told_all_hear(stage: int, world: int, pool_of: Pools, tmp_path: Path) -> None:
    steps = pool_of(world).run(tensor_training_jobs.stopped, stage, world, tmp_path)
    assert len(set(steps)) == 1
    assert 0 < steps[0] < 3
    assert verify(tmp_path / "checkpoints" / "preempted.ckpt") == []


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_of_a_checkpoint_are_loaded_between_two_steps(stage: int, two_ranks: RankPool, tmp_path: Path) -> None:
    def run(name: str, stage: int, strategy: dict[str, Any]) -> list[dict[str, Any]]:
        callbacks = [GoesBack(tmp_path / name)]
        return two_ranks.run(tensor_training_jobs.fit, stage, 2, 2, epochs=2, callbacks=callbacks, strategy=strategy)

    expected = run("on the device", 1, {})
    straight = two_ranks.run(tensor_training_jobs.fit, 1, 2, 2, epochs=2)
    assert expected[0]["losses"][:3] == straight[0]["losses"][:3]
    assert expected[0]["losses"][3] != straight[0]["losses"][3]
    found = run("on disk", stage, {"offload": {"optimizer": "nvme", "path": str(tmp_path)}})
    assert [one["losses"] for one in found] == [one["losses"] for one in expected]
    assert_same_bits(found[0]["weights"], expected[0]["weights"])


@pytest.mark.parametrize("stages", [[2, 2], [1, 3]])
def test_an_optimizer_that_serves_two_fits_goes_on_with_its_parts_of_the_state(
    stages: list[int], two_ranks: RankPool
) -> None:
    steps = len(stages) * len(tensor_training_jobs.loader(1))
    for told in two_ranks.run(tensor_training_jobs.fit_in_turn, stages):
        assert len(told) > 10
        assert {(shape == of_state, count) for shape, of_state, count in told} == {(True, steps)}
