"""What the README says is checked against the code."""

import importlib
import re
import tomllib
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import docs_jobs
import lightning_zero
from lightning_zero import ZeroStrategy, cli, verify
from lightning_zero.run.estimate import states_of
from lightning_zero.stage import STAGES
from ranks import RankPool

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
WHERE_IS = (ROOT / "docs" / "where-is.md").read_text()
PLACES = re.findall(r"^\|[^|]+\| `([\w/]+\.(?:py|yaml))(?::(\w+))?` \|$", WHERE_IS, flags=re.MULTILINE)
WALKED = sorted(set(re.findall(r"`(?!tests/)(\w+/\w+)\.py(?::([\w.]+))?`", ARCHITECTURE)))


def test_readme_is_short_enough_to_read() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize(("file", "symbol"), PLACES)
def test_where_is_names_a_symbol_that_is_there(file: str, symbol: str) -> None:
    assert (ROOT / file).is_file()
    if symbol:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        assert getattr(module, symbol).__module__ == module.__name__ if symbol != "STAGES" else module.STAGES is STAGES


@pytest.mark.parametrize(("module", "symbol"), WALKED)
def test_the_walks_call_what_is_there(module: str, symbol: str) -> None:
    found: Any = importlib.import_module(f"lightning_zero.{module.replace('/', '.')}")
    for name in symbol.split(".") if symbol else ():
        found = getattr(found, name)


def test_the_picture_shows_the_ladder_that_is_checked() -> None:
    picture = re.findall(r"```\n(.*?)```", ARCHITECTURE, flags=re.DOTALL)[0]
    drawn = [set(re.findall(r"\w+", line[:21])) for line in picture.splitlines()]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [rooms for rooms in drawn if rooms] == [set(layer.split(" | ")) for layer in contracts[0]["layers"]]


def test_where_is_covers_every_module() -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_zero").rglob("*.py")}
    modules = {module for module in modules if not Path(module).stem.startswith("__")}
    assert len(PLACES) > 15
    assert modules == {file for file, _ in PLACES if file.startswith("lightning_zero/") and file.endswith(".py")}


def test_methods_in_the_readme_exist() -> None:
    pages = [README, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))]
    named = [name for page in pages for name in re.findall(r"strategy\.(\w+)\(", page)]
    assert len(set(named)) >= 7
    assert not [name for name in named if not hasattr(ZeroStrategy, name)]


def test_public_names_are_all_of_them_and_importable() -> None:
    assert sorted(lightning_zero.__all__) == lightning_zero.__all__
    for name in lightning_zero.__all__:
        assert getattr(lightning_zero, name).__doc__
    public = {name for name, value in vars(lightning_zero).items() if isinstance(value, type | FunctionType)}
    assert public == set(lightning_zero.__all__)


def test_session_in_the_readme_prints_what_it_shows(two_ranks: RankPool, tmp_path: Path) -> None:
    session = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    shown = re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL)[0]
    assert len(session.strip().splitlines()) <= 10
    printed, _ = two_ranks.run(docs_jobs.run_session, session, tmp_path)
    assert shown.strip() in printed
    assert verify(tmp_path / "model.ckpt") == []


def test_commands_in_the_readme_print_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(r"^\$ lightning-zero (.*?)\n(.*?)```", README, flags=re.DOTALL | re.MULTILINE)
    assert len(shown) == 1
    for command, output in shown:
        assert cli.main(command.split()) == 0
        assert capsys.readouterr().out == output


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_per_parameter_in_the_readme_are_those_that_are_counted(stage: int, precision: str) -> None:
    row = next(line for line in README.splitlines() if line.startswith(f"| {stage} | "))
    told = row.split("|")[3 if precision == "32-true" else 4].strip()
    whole, _, divided = told.rpartition("/N")[0].rpartition(" + ") if "/N" in told else (told, "", "0")
    for ranks in (2, 8, 64):
        counted = sum(states_of(64_000, stage=stage, ranks=ranks, precision=precision).values())
        assert counted == (int(whole or 0) + int(divided) / ranks) * 64_000


def test_what_it_was_tested_on_is_said() -> None:
    assert "**It has never run on several GPUs.**" in README
