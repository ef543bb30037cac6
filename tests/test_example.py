"""The main job, examples/train.py, at a tiny size, and its other experiments; and the text it reads."""

import csv
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import warm
from lightning_zero.sweeps.summary import read_summary

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))

from text import TextData, read_text  # noqa: E402


def train(folder: Path, *overrides: str, experiment: str = "smoke", from_shell: bool = False) -> str:
    """Runs examples/train.py in `folder` and returns what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/train.py", f"experiment={experiment}", "trainer.accelerator=cpu", *overrides]
    command.append(f"hydra.run.dir={folder}")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with nullcontext() if from_shell else warm.starts():
        done = subprocess.run(command, cwd=ROOT, env=environment, text=True, timeout=600, **streams)
    assert done.returncode == 0, done.stdout
    return done.stdout


class Run(NamedTuple):
    strategy: str
    folder: Path
    output: str


class Weights(NamedTuple):
    before: dict[str, torch.Tensor]  # training
    after: dict[str, torch.Tensor]
    trainable: set[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    folders = {strategy: tmp_path_factory.mktemp(strategy) for strategy in ("ddp", "zero2")}

    def output(strategy: str) -> str:
        return train(folders[strategy], f"strategy={strategy}", "trainer.devices=2", from_shell=strategy == "zero2")

    return {strategy: Run(strategy, folder, output(strategy)) for strategy, folder in folders.items()}


@pytest.fixture(params=["ddp", "zero2"])
def run(request, runs) -> Run:
    return runs[request.param]


def test_a_run_has_one_folder_with_one_config_and_one_log_per_rank(run):
    _, folder, _ = run
    expected = [".hydra", "checkpoints", "csv", "rank_0.log", "rank_1.log", "summary.json", "tensorboard"]
    assert sorted(path.name for path in folder.iterdir()) == expected
    assert len(list(folder.rglob("config.yaml"))) == 1


def test_the_summary_says_what_was_learnt_and_what_it_cost(run):
    strategy, folder, _ = run
    summary = read_summary(folder)
    assert (summary["strategy"], summary["status"]) == (strategy, "finished")
    assert (summary["steps"], summary["world_size"]) == (4, 2)
    assert f"strategy={strategy}" in summary["overrides"]
    assert 240 < summary["untrained_perplexity"] < 275
    assert summary["perplexity"] < summary["untrained_perplexity"] - 10
    assert summary["return_value"] == summary["loss"]
    assert summary["seconds_per_step"] > 0
    assert summary["peak_resident_bytes"] > 100e6
    if strategy == "ddp":
        assert summary["memory_bytes"]["optimizer state"] >= 2 * summary["memory_bytes"]["parameter"]
        assert summary["wire_bytes_per_step"] == 2 * summary["memory_bytes"]["gradient"] // 2  # 2 (N-1)/N Psi
    else:
        assert summary["wire_bytes_per_step"] > 0
        assert 0 < summary["memory_bytes"]["optimizer state"] < 2 * summary["memory_bytes"]["parameter"]


def test_the_run_prints_a_table_and_a_sample(run):
    _, folder, output = run
    assert output.count("before training ") == 1, "rank 0 alone prints"
    assert output.count("bytes per rank") == output.count("Trained 4 steps") == 1
    assert "a sample" in output
    assert read_summary(folder)["sample"].startswith("def ")
    assert f"/{folder.name}\n" in output.partition("Logs and results: ")[2]


def test_the_run_logs_to_csv_and_tensorboard(run):
    _, folder, _ = run
    with (folder / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(bool(row["train_loss"]) for row in rows) == 4
    assert any(row["val_perplexity"] for row in rows)
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))


def test_zero_reaches_the_loss_of_ddp(runs):
    ddp, zero = (read_summary(runs[strategy].folder)["loss"] for strategy in ("ddp", "zero2"))
    assert zero == pytest.approx(ddp, rel=1e-6)


def test_r59_a_job_started_again_in_its_folder_continues_from_its_last_checkpoint(tmp_path):
    options = ("strategy=zero2", "trainer.precision=bf16-mixed")
    train(tmp_path, *options, "trainer.max_steps=4")
    output = train(tmp_path, *options, "trainer.max_steps=6")
    assert "continuing from" in output
    assert read_summary(tmp_path)["steps"] == 6
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        trained = [int(row["step"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert trained == [4, 5]


def test_a_sweep_over_activation_checkpointing_has_one_loss_and_tells_the_bytes(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/train.py", "-m", "experiment=smoke", "trainer.accelerator=cpu"]
    command += [
        "strategy=zero2,zero3",
        "strategy/activation_checkpointing=none,recompute",
        f"hydra.sweep.dir={tmp_path}",
    ]
    with warm.starts():
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["loss"] for row in rows}) == 1
    inputs_of_blocks = 2 * 4 * 32 * 32 * 4  # depth, batch, context, width, bytes
    kept = [int(row["memory_bytes.activation checkpoint"]) for row in rows]
    assert kept == [0, inputs_of_blocks, 0, inputs_of_blocks]


# --- the other experiments


def test_the_convolutional_net_learns_the_digits_on_two_ranks(tmp_path):
    steps = ("trainer.max_steps=66", "trainer.val_check_interval=66")
    output = train(tmp_path, "strategy=zero2", "trainer.devices=2", *steps, experiment="digits")
    summary = read_summary(tmp_path)
    assert (summary["steps"], summary["world_size"]) == (66, 2)
    assert summary["untrained_accuracy"] < 0.3
    assert summary["accuracy"] > 0.95
    assert output.count("before training ") == 1
    assert "a sample" not in output


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Path:
    """The folder of a short LoRA fine-tune at stage 3 on two ranks."""
    folder = tmp_path_factory.mktemp("lora")
    size = (
        "model.width=64",
        "model.depth=2",
        "data.context=32",
        "data.max_bytes=100_000",
        "data.validation_windows=16",
    )
    steps = ("trainer.max_steps=20", "trainer.val_check_interval=20")
    sharded = ("strategy=zero3", "strategy.units=modules")  # a model of this size would stay whole
    train(folder, *sharded, "trainer.devices=2", *size, *steps, experiment="lora")
    return folder


@pytest.fixture(scope="module")
def weights(adapted) -> Weights:
    from lora import LoraLanguageModel  # takes seconds

    checkpoint = torch.load(adapted / "checkpoints" / "latest.ckpt", weights_only=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # the seed in conf/train.yaml
        model = LoraLanguageModel(**checkpoint["hyper_parameters"])
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Weights(model.state_dict(), checkpoint["state_dict"], trainable)


def test_the_adapters_learn(adapted):
    summary = read_summary(adapted)
    assert (summary["steps"], summary["world_size"]) == (20, 2)
    assert summary["loss"] < summary["untrained_loss"] - 0.5


def test_only_adapters_change_and_the_frozen_base_keeps_every_bit(weights):
    assert weights.before.keys() == weights.after.keys()
    changed = {name for name in weights.before if not torch.equal(weights.before[name], weights.after[name])}
    assert changed == weights.trainable
    assert all("lora_" in name for name in changed)


def test_gradients_and_optimizer_state_take_memory_for_the_adapters_alone(adapted, weights):
    everything = sum(weight.numel() for weight in weights.before.values())
    trainable = sum(weights.before[name].numel() for name in weights.trainable)
    assert trainable < everything / 4
    held = read_summary(adapted)["memory_bytes"]
    assert held["parameter"] == pytest.approx(4 * everything / 2, rel=0.05)
    assert held["gradient"] == pytest.approx(4 * trainable / 2, rel=0.05)
    assert held["optimizer state"] == pytest.approx(8 * trainable / 2, rel=0.05)


# --- the text


def test_ranks_that_share_every_layer_learn_and_resume_as_one(tmp_path: Path) -> None:
    """And their checkpoint is that of a model that nobody has divided."""
    shared = ("strategy=zero3", "trainer.devices=2", "strategy.tensor_parallel_size=2", "model.sequence_parallel=true")
    train(tmp_path, *shared)
    summary = read_summary(tmp_path)
    assert summary["loss"] < summary["untrained_loss"]
    assert "continuing from" in train(tmp_path, "strategy=zero2", "trainer.max_steps=6", "trainer.val_check_interval=2")
    assert read_summary(tmp_path)["steps"] == 6


def test_the_default_text_is_the_standard_librarys_split_by_file():
    split = read_text(None, max_bytes=200_000)
    assert len(split.train) == 200_000
    assert len(split.validation) == 20_000
    assert re.search(rb"^def \w+\(", split.train, re.MULTILINE)
    assert read_text(None, max_bytes=200_000) == split, "the same text each time"


def test_a_folder_is_split_by_file(tmp_path):
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text(f"<{index}>")
    (tmp_path / "image.png").write_bytes(b"\0\1\2")
    split = read_text(tmp_path, max_bytes=10_000)
    train, validation = (set(re.findall(rb"<\d+>", part)) for part in split)
    assert len(train | validation) == 40
    assert not train & validation
    assert b"\1" not in split.train + split.validation


def test_a_single_file_is_split_by_position(tmp_path):
    (tmp_path / "book").write_bytes(bytes(range(1, 101)))
    split = read_text(tmp_path / "book", max_bytes=1000)
    assert (split.train, split.validation) == (bytes(range(1, 91)), bytes(range(91, 101)))


def test_windows_are_followed_by_their_next_bytes(tmp_path):
    (tmp_path / "book").write_bytes(bytes(range(200)))
    data = TextData(path=tmp_path / "book", context=8, batch_size=4, validation_windows=3)
    data.setup("fit")
    assert all((following - tokens).eq(1).all() for tokens, following in data.train)
    assert data.train[0][0].tolist() == list(range(8))
    assert len(data.validation) == 3
    assert data.validation[2][1][-1] == 199, "the last window ends with the text"


@pytest.mark.parametrize(
    ("content", "error", "advice"),
    [
        (None, FileNotFoundError, "is neither a file nor a folder. Give a text file"),
        ({}, FileNotFoundError, "holds 0 text"),
        ({"one": "text"}, FileNotFoundError, "training and validation need one each"),
        ({"one": "x" * 50, "two": "short"}, ValueError, "a smaller data.context"),
    ],
)
def test_text_that_cannot_be_used_is_refused_with_advice(tmp_path, content, error, advice):
    path = tmp_path / "text"
    if content is not None:
        path.mkdir()
        for name, text in content.items():
            (path / name).write_text(text)
    with pytest.raises(error, match=advice):
        TextData(path=path, context=16).setup("fit")


def test_a_training_that_changes_machines_twice_has_the_losses_of_one_that_does_not(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/resume_on_other_world.py", "--folder", str(tmp_path)]
    with warm.starts():
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split()[:3] == ["epoch", "validation", "loss"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    *legs, uninterrupted = (json.loads((tmp_path / f"leg{number}.json").read_text()) for number in range(4))
    told = [tuple(map(float, row.split()[-2:])) for row in rows]
    for (loss,), expected, of_row in zip(legs, uninterrupted, told, strict=True):
        assert loss == pytest.approx(expected, rel=2**-23)  # computed in float64, and logged in float32
        assert of_row == (pytest.approx(loss, abs=5e-7), pytest.approx(expected, abs=5e-7))
    assert all((tmp_path / f"leg{number}.ckpt").is_file() for number in range(3))  # small; the last is Lightning's own
