"""A rehearsal of what a Hydra config trains."""

import re
import shlex
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_zero import Checkpoint, ZeroStrategy, cli
from lightning_zero.rehearsal import planning
from lightning_zero.sweeps.composed import composed

ROOT = Path(__file__).resolve().parents[1]
CONFIG = str(ROOT / "conf" / "train.yaml")
SMALL = ["model.width=32", "model.depth=2", "data.batch_size=4", "data.path=../README.md"]


@pytest.fixture(autouse=True)
def in_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def overrides(*given: str) -> list[str]:
    return [part for one in (*SMALL, *given) for part in ("--override", one)]


def test_a_config_says_the_model_the_first_batch_the_strategy_and_what_the_trainer_is_given() -> None:
    given = {"precision": "bf16-mixed", "accumulate_grad_batches": 4, "gradient_clip_algorithm": "value"}
    to_trainer = [f"++trainer.{name}={value}" for name, value in given.items()]
    found = composed(CONFIG, [*SMALL, "strategy=zero3", "strategy.prefetch=2", *to_trainer])
    assert type(found.model()).__name__ == "LanguageModel"
    tokens, targets = found.batch()
    assert tokens.shape == targets.shape == (4, 128)
    assert found.strategy == {"stage": 3, "prefetch": 2}
    assert repr(ZeroStrategy(**found.strategy)) == "ZeroStrategy(stage=3, prefetch=2)"
    assert found.trainer == {**given, "gradient_clip_val": 1.0}


FIXED: list[dict[str, Any]] = [
    {"stage": 3, "offload": {"parameters": "cpu"}, "units": ["Block", "Head"]},
    {"stage": 3, "offload": {"optimizer": "cpu", "fraction": 0.5}, "units": [torch.nn.Linear]},
    {"stage": 2, "offload": {"optimizer": "nvme", "path": "/a folder"}, "bucket_size_mb": 5},
    {"stage": 2, "activation_checkpointing": {"modules": ["Block"], "offload": True}, "reduce_dtype": torch.bfloat16},
    {"stage": 2, "activation_checkpointing": False, "offload": None, "timeout": timedelta(minutes=3)},
    {"stage": 1, "checkpoint": Checkpoint(async_save=True)},
    {"stage": 1, "checkpoint": {"format": "full", "async_save": False}},
]


def test_the_overrides_of_a_strategy_that_was_planned_compose_to_it() -> None:
    """Also where users have fixed arguments of it."""
    for strategy in [*planning._strategies({}), *FIXED]:
        planned = planning.Candidate(strategy=strategy, rehearsal=Mock(), seconds=1.0, hidden=0.0)
        found = ZeroStrategy(**composed(CONFIG, [*SMALL, *shlex.split(planned.overrides)]).strategy)
        expected = ZeroStrategy(**strategy)
        assert found._settings == expected._settings, planned.overrides
        assert found._format.policy == expected._format.policy, planned.overrides


def test_the_command_line_rehearses_and_plans_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rehearse", CONFIG, "--ranks", "8", *overrides("strategy=zero3")]) == 0
    assert capsys.readouterr().out.startswith("ZeroStrategy(stage=3) on 8 ranks, rank 0: ")
    assert cli.main(["rehearse", CONFIG, "--ranks", "8", "--stage", "1", *overrides()]) == 0
    assert capsys.readouterr().out.startswith("ZeroStrategy(stage=1) on 8 ranks, rank 0: ")
    limits = ["--ranks", "8", "--device-memory", "1GB", "--stage", "1"]
    assert cli.main(["plan", CONFIG, *limits, *overrides("strategy.wait_timeout=30")]) == 0
    assert re.search(r"1\. ZeroStrategy\(stage=1, wait_timeout=30", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([CONFIG, "--override", "strategy=ddp"], "is a DDPStrategy. Write --override strategy=zero2"),
        ([CONFIG, "--override", "strategy=zer"], "cannot be composed"),
        ([CONFIG, "--arg", "width=3"], "--override model.NAME=VALUE"),
        (["gpt:LanguageModel", "--batch", "3", "--override", "a=1"], "--override is for a config"),
        (["nowhere.yaml"], "cannot be composed"),
    ],
)
def test_a_config_that_says_too_little_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["rehearse", *arguments, "--ranks", "2"])
    assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model: [1, 2", "cannot be composed: while parsing a flow sequence"),
        ("model: {_target_: nowhere.Model}", "model cannot be made: Error loading 'nowhere.Model'"),
        (
            "model: {_target_: rehearsal_jobs.Small, width: 3}",
            "model cannot be made: Small.__init__() got an unexpected",
        ),
        ("model: {}\ndata: {_target_: builtins.range, x: 1}", "data cannot be made: range() takes no keyword"),
    ],
)
def test_what_cannot_be_read_imported_or_made_is_told_in_one_error_without_a_traceback(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = "" if "data:" in text else "data: {}\n"
    path = tmp_path / "one.yaml"
    path.write_text(f"strategy: {{_target_: lightning_zero.ZeroStrategy}}\n{data}{text}\n")
    batch = [] if "data:" in text else ["--batch", "4x16:int64"]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["rehearse", str(path), "--ranks", "2", *batch])
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_config_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("model: {_target_: builtins.dict}\n")
    with pytest.raises(ValueError, match="has no data, strategy"):
        composed(str(tmp_path / "one.yaml"), [])
