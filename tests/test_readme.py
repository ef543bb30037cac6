"""What the README says is checked against the code."""

import importlib
import re
from pathlib import Path
from types import FunctionType

import pytest

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.stage import STAGES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
PLACES = re.findall(r"^\|[^|]+\| `([\w/]+\.(?:py|yaml))(?::(\w+))?` \|$", ARCHITECTURE, flags=re.MULTILINE)


def test_readme_is_short_enough_to_read() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize(("file", "symbol"), PLACES)
def test_where_is_names_a_symbol_that_is_there(file: str, symbol: str) -> None:
    assert (ROOT / file).is_file()
    if symbol:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        assert getattr(module, symbol).__module__ == module.__name__ if symbol != "STAGES" else module.STAGES is STAGES


def test_where_is_covers_every_module() -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_zero").rglob("*.py")}
    modules = {module for module in modules if not Path(module).stem.startswith("__")}
    assert len(PLACES) > 15
    assert modules == {file for file, _ in PLACES if file.startswith("lightning_zero/") and file.endswith(".py")}


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", README)) <= targets


def test_methods_in_the_readme_exist() -> None:
    named = re.findall(r"strategy\.(\w+)\(", README)
    assert len(named) >= 5
    assert not [name for name in named if not hasattr(ZeroStrategy, name)]


def test_public_names_are_all_of_them_and_importable() -> None:
    assert sorted(lightning_zero.__all__) == lightning_zero.__all__
    for name in lightning_zero.__all__:
        assert getattr(lightning_zero, name).__doc__
    public = {name for name, value in vars(lightning_zero).items() if isinstance(value, type | FunctionType)}
    assert public == set(lightning_zero.__all__)


def test_session_in_the_readme_is_python_that_names_our_arguments() -> None:
    (session,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    compile(session, "README.md", "exec")
    assert len(session.strip().splitlines()) <= 10
