"""What the pages under docs/ say is checked against the code; what they show is made by it."""

import ast
import builtins
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir

import lightning_zero
from lightning_zero import Offload, ZeroStrategy, cli
from lightning_zero.pl.elsewhere import elsewhere
from lightning_zero.pl.table import plans_for, sized
from lightning_zero.run.forecast import states_in
from lightning_zero.run.program import Kind
from test_benchmarks import load

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[Any]:
    """The code in the pages, each block a parameter of its own."""
    return [
        pytest.param(code, id=f"{page.stem}-{at}")
        for page in PAGES
        for at, (kind, code) in enumerate(FENCE.findall(page.read_text()))
        if kind == language
    ]


def table_cells(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text().splitlines() if line.startswith("|") and not line.startswith("|-")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# -- Python


class Names(dict[str, Any]):
    """What a block imports, and for what it leaves to the reader a module class of that name."""

    def __missing__(self, name: str) -> Any:
        if not name[0].isupper():
            raise KeyError(name)
        return type(name, (torch.nn.Module,), {})


def names_of(tree: ast.Module) -> Names:
    found = Names(ZeroStrategy=ZeroStrategy, L=L, torch=torch)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                found[item.asname or item.name.partition(".")[0]] = importlib.import_module(item.name)
        elif isinstance(node, ast.ImportFrom) and node.module and importlib.util.find_spec(node.module.split(".")[0]):
            module = importlib.import_module(node.module)
            found.update({item.asname or item.name: getattr(module, item.name) for item in node.names})
    found.update({name: getattr(lightning_zero, name) for name in lightning_zero.__all__})
    return found


def called_by(function: ast.expr, names: Names) -> Any:
    """What a call in the docs calls, where it can be told; `strategy` and `trainer` are what they are everywhere."""
    path = ast.unparse(function).split(".")
    owners = {"strategy": ZeroStrategy, "trainer": L.Trainer}
    if path[0] in owners and len(path) > 1:
        return getattr(owners[path[0]], path[1]) if len(path) == 2 else None
    if path[0] not in names:
        return None
    found = names[path[0]]
    for name in path[1:]:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("code", blocks("python"))
def test_python_imports_what_is_there_and_passes_arguments_that_are_there(code: str) -> None:
    tree = ast.parse(code)
    names = names_of(tree)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        target = called_by(call.func, names)
        if target is None or target.__module__ == "torch" or isinstance(target, type(len)):  # no signature in Python
            continue
        parameters = inspect.signature(target).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            known = {parameter.name for parameter in parameters}
            assert {keyword.arg for keyword in call.keywords} - {None} <= known, ast.unparse(call)


@pytest.mark.parametrize("code", blocks("python"))
def test_what_is_constructed_can_be(code: str) -> None:
    """Strategies, policies and callbacks, with the arguments that the page gives them."""
    tree = ast.parse(code)
    names = names_of(tree)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in lightning_zero.__all__ and call.func.id[0].isupper():
            eval(compile(ast.Expression(call), "docs", "eval"), {"__builtins__": {}}, names)


def test_what_users_write_in_the_model_is_a_method_of_lightnings() -> None:
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block.values[0])):
            if isinstance(node, ast.ClassDef):
                methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
                assert all(hasattr(L.LightningModule, name) for name in methods)


# -- the shell, YAML


def test_every_command_of_ours_is_understood() -> None:
    parser, seen = cli._parser(), set()
    for page in PAGES:
        for _, code in FENCE.findall(page.read_text()):
            for line in code.splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True) if "lightning-zero " in line else []
                if words[:1] == ["lightning-zero"]:
                    parser.parse_args(words[1:])
                    seen.add(words[1])
    assert {"plan", "inspect", "verify", "consolidate", "import", "export"} <= seen


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    told = {name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)}
    assert {"demo", "bench"} <= told <= targets


def test_contributing_says_of_each_target_for_those_who_work_here_when_it_is_run() -> None:
    made = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    rows = [cells for cells in table_cells(ROOT / "CONTRIBUTING.md") if cells[0].startswith("`make ")]
    told = {cells[0].strip("`").removeprefix("make ") for cells in rows}
    assert told == made - {"help", "demo", "sweep", "setup", "constraints", "clean"}
    assert all(len(cells) == 3 and all(cells) for cells in rows)


def test_files_that_are_named_exist() -> None:
    named = {
        name for page in PAGES for name in re.findall(r"`((?:examples|benchmarks|tests)/\w+\.py)", page.read_text())
    }
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_hydras_command_lines_compose() -> None:
    from test_hydra import composed

    lines = re.findall(r"^python examples/train\.py (.*)$", (DOCS / "hydra.md").read_text(), flags=re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        words = [word for word in shlex.split(line) if word != "-m"]
        for choice in range(max(word.count(",") for word in words) + 1):  # of a sweep, each job
            composed(*(_choose(word, choice) for word in words))


def test_the_recipe_for_an_app_of_ones_own_takes_the_pages_command_lines(tmp_path: Path) -> None:
    page = (DOCS / "hydra.md").read_text()
    ((_, recipe),) = [block for block in FENCE.findall(page) if block[0] == "yaml"]
    (tmp_path / "config.yaml").write_text(recipe)
    lines = re.findall(r"^python train\.py (.*)$", page, flags=re.MULTILINE)
    assert len(lines) == 2
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        for line in lines:
            words = [_choose(word, 1) for word in shlex.split(line) if word != "-m"]
            assert compose("config", words).strategy._target_ == "lightning_zero.ZeroStrategy"


def _choose(override: str, number: int) -> str:
    key, _, values = override.partition("=")
    options = values.split(",")
    return f"{key}={options[min(number, len(options) - 1)]}"


def test_lightning_cli_takes_the_strategy_of_the_page(tmp_path: Path) -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    text = (DOCS / "cli.md").read_text()
    ((_, config),) = [block for block in FENCE.findall(text) if block[0] == "yaml"]
    (tmp_path / "config.yaml").write_text(config)
    made = LightningCLI(
        BoringModel, args=["--config", str(tmp_path / "config.yaml")], run=False, seed_everything_default=1
    )
    strategy = made.trainer.strategy
    assert isinstance(strategy, ZeroStrategy)
    assert strategy.stage == yaml.safe_load(config)["trainer"]["strategy"]["init_args"]["stage"] == 3
    assert strategy.offload == lightning_zero.Offload(optimizer="cpu")
    assert strategy.activation_checkpointing == lightning_zero.ActivationCheckpointing(modules=["Block"])
    assert strategy.checkpoint.format == "full"
    words = ["--trainer.strategy", "lightning_zero.ZeroStrategy", "--trainer.strategy.stage", "1"]
    assert words[:3] == text[text.index("--trainer.strategy") :].split()[:3]
    made = LightningCLI(BoringModel, args=words, run=False)
    assert made.trainer.strategy.stage == 1


# -- tables


def test_a_cell_of_ours_names_a_test_that_is_there() -> None:
    rows = [cells for cells in table_cells(DOCS / "comparison.md") if cells[-1] != "held by"]
    promises = [cells for cells in table_cells(DOCS / "promises.md") if cells[-1] != "held by"]
    assert len(rows) > 40
    assert len(promises) > 60
    for ours, held in [(cells[1], cells[-1]) for cells in rows + promises]:
        if held == "-":
            assert ours.partition(";")[0] in ("no", "not measured") or ours.startswith("**never run**")
            continue
        file, _, name = held.strip("`").partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), held


def test_every_strategy_that_is_compared_with_has_its_promises() -> None:
    compared = table_cells(DOCS / "comparison.md")[0][2:-1]
    headings = re.findall(r"^## (\w+)$", (DOCS / "promises.md").read_text(), flags=re.MULTILINE)
    assert {"DDPStrategy", *compared} == set(headings)


def test_the_readmes_comparison_is_that_of_the_page() -> None:
    whole = {tuple(cells[:5]) for cells in table_cells(DOCS / "comparison.md")}
    readme = [tuple(cells) for cells in table_cells(ROOT / "README.md") if len(cells) == 5]
    shown = [cells for cells in readme if cells in whole]
    at = readme.index(("feature", "this package", "FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"))
    assert shown == readme[at : at + len(shown)]
    assert len(shown) > 15
    number = int(re.findall(r"All (\d+) rows", (ROOT / "README.md").read_text())[0])
    assert number == sum(len(cells) == 6 for cells in table_cells(DOCS / "comparison.md")) - 1  # the head


def test_every_argument_of_other_strategies_is_answered_on_the_page_as_by_the_error() -> None:
    told = {cells[0].strip("`"): cells[1] for cells in table_cells(DOCS / "coming-from.md") if len(cells) == 2}
    assert {name: told.get(name) for name in elsewhere()} == elsewhere()


def test_users_are_told_in_words_that_the_field_has() -> None:
    """What ARCHITECTURE.md defines for the code is no word of the pages."""
    private = re.compile(
        r"\b(arena|rendezvous|ledger|publish\w*|postpone\w*|settle\w*|lend|lent|loan\w*|catch(es)? up)\b", re.I
    )
    for page in PAGES:
        if page.stem not in ("architecture", "where-is", "glossary", "changelog", "program"):
            assert private.findall(FENCE.sub("", page.read_text())) == [], page


# -- messages


@cache
def strings_in(folder: Path) -> str:
    """Every string in the code under a folder, one in a line; braces stand for what is filled in."""
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_messages_are_those_of_the_code() -> None:
    rows = [cells for page in (DOCS / "troubleshooting.md", ROOT / "README.md") for cells in table_cells(page)]
    lightnings = Path(L.__file__).parent / "pytorch" / "trainer" / "connectors"
    quoted = [row for row in rows if len(row) == 2 and re.fullmatch(r"`[^`]+`", row[0])]
    assert len(quoted) > 30
    for message, cause in quoted:
        if "=" in message and message.startswith("`Trainer"):
            continue
        if cause.startswith("Python's"):
            assert hasattr(builtins, message.strip("`"))
            continue
        source = lightnings if cause.startswith("Lightning's") else ROOT / "lightning_zero"
        source = Path(torch.__file__).parent / "_functorch" if cause.startswith("torch's") else source
        assert message.strip("`") in strings_in(source), message


# -- the picture


def test_the_pictures_numbers_are_those_of_the_arithmetic() -> None:
    picture = load("memory_picture")
    drawn = (DOCS / "memory.svg").read_text()
    for name, plan in picture.bars().items():
        assert f">{picture.label_of(name, plan)}<" in drawn
        for page in (ROOT / "README.md", DOCS / "index.md"):
            assert sized(states_in(plan)) in page.read_text()


def test_the_picture_is_drawn_by_its_command(tmp_path: Path) -> None:
    load("memory_picture").draw(tmp_path / "memory.svg")
    assert re.findall(r">([^<>]+)</text>", (tmp_path / "memory.svg").read_text()) == re.findall(
        r">([^<>]+)</text>", (DOCS / "memory.svg").read_text()
    )


def test_the_page_of_programs_shows_what_the_engine_does_and_so_does_its_picture(tmp_path: Path) -> None:
    picture = load("program_picture")
    page = (DOCS / "program.md").read_text()
    shown = [code.strip() for language, code in FENCE.findall(page) if language == "text"]
    assert shown == [str(program) for program in picture.programs(tmp_path).values()]
    picture.draw(tmp_path / "program.svg", tmp_path)
    texts = [re.findall(r">([^<>]+)</text>", (at / "program.svg").read_text()) for at in (tmp_path, DOCS)]
    assert texts[0] == texts[1]


def test_the_page_of_programs_explains_each_word() -> None:
    page = (DOCS / "program.md").read_text()
    assert all(f"`{kind}`" in page for kind in Kind if kind is not Kind.CALL)  # which is told by its own name


def test_the_bytes_of_the_recipes_are_those_of_the_arithmetic() -> None:
    text = (DOCS / "recipes.md").read_text()
    large = plans_for(7_000_000_000, (2, 3), ranks=8, precision="bf16-mixed")
    alone = plans_for(3_000_000_000, (2,), ranks=1, precision="bf16-mixed", offload=Offload(optimizer="cpu"))["stage 2"]
    host = sum(nbytes for category, nbytes in alone.items() if "(host)" in category)
    assert f"{sized(states_in(large['stage 3']))} of model states on each GPU at stage 3" in text
    assert f"{sized(states_in(large['stage 2']))} at stage 2" in text
    assert f"leave {sized(states_in(alone))} on the GPU and take {sized(host)} of host memory" in text


# -- the site


def test_the_site_builds_without_a_warning_and_asks_no_other_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(PAGES) - 2
    for page in pages:
        fetched = re.findall(
            r"<(?:script|img|iframe)[^>]+src=\"?(https?:[^\s\">]+)|<link[^>]+href=\"?(https?:[^\s\">]+)",
            page.read_text(),
        )
        assert fetched == [], page
    reference = (tmp_path / "site" / "reference.html").read_text()
    for name in lightning_zero.__all__:
        assert f'id="lightning_zero.{name}"' in reference, name
