"""A rehearsal of what a Hydra config trains."""

import re
from pathlib import Path

import pytest

from lightning_zero import ZeroStrategy, cli
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
    found = composed(CONFIG, [*SMALL, "strategy=zero3", "strategy.prefetch=2", "trainer.precision=bf16-mixed"])
    assert type(found.model()).__name__ == "LanguageModel"
    tokens, targets = found.batch()
    assert tokens.shape == targets.shape == (4, 128)
    assert found.strategy == {"stage": 3, "prefetch": 2}
    assert repr(ZeroStrategy(**found.strategy)) == "ZeroStrategy(stage=3, prefetch=2)"
    assert found.trainer["precision"] == "bf16-mixed"
    assert found.trainer["gradient_clip_val"] == 1.0


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


def test_a_config_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("model: {_target_: builtins.dict}\n")
    with pytest.raises(ValueError, match="has no data, strategy"):
        composed(str(tmp_path / "one.yaml"), [])
