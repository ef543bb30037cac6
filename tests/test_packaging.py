"""What a user installs: a source distribution, and of it a wheel and an editable install, used by an app that knows
nothing but the installed package.

Nothing is downloaded. Each scratch environment sees the packages of the one that runs the tests, but not its
`lightning_zero`: that comes from the scratch environment's own site-packages, and the tests check that it does.
"""

import ast
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import lightning_zero

REPOSITORY = Path(__file__).parent.parent
TESTS = Path(__file__).parent


BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
NOT_SOURCE = ".* __pycache__ build dist outputs multirun *.egg-info lightning_logs".split()  # or not to be tested


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked. It is made of a copy: building leaves folders behind, and an old build/ would
    leak into the wheel."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(REPOSITORY, folder / "copy", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    run(sys.executable, "-c", BUILD, folder, cwd=folder / "copy")
    (packed,) = folder.glob("*.tar.gz")
    run("tar", "-xzf", packed, cwd=folder)  # Python's tarfile warns without a filter, and 3.11.2 knows none
    return folder / packed.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, source)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = scratch_environment(tmp_path_factory.mktemp("wheel-venv"))
    pip("--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    return python


@pytest.fixture(scope="module")
def editable_python(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = scratch_environment(tmp_path_factory.mktemp("editable-venv"))
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    pip("--python", python, "install", *options, "--editable", source)
    return python


@pytest.fixture(params=["wheel", "editable"])
def python(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_python")


def scratch_environment(folder: Path) -> Path:
    venv.create(folder, symlinks=os.name != "nt")
    (site_packages,) = folder.glob("lib/python*/site-packages")
    outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site_packages / "outer.pth").write_text("\n".join(outer) + "\n")  # its own .pth files are not followed
    return folder / "bin" / "python"


def pip(*arguments: object) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments, cwd=Path.home())


def run(*command: object, cwd: Path, stdin: str | None = None, **environment: str) -> str:
    """Runs `command` as from a shell that knows nothing of this checkout, and returns what it printed."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, input=stdin, env=clean | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


# --- what is in the source distribution


def test_source_distribution_has_what_its_tests_need_and_runs_them(source: Path) -> None:
    for name in ("benchmarks", "conf", "docs", "examples", "lightning_zero", "tests"):
        files = {path.relative_to(REPOSITORY) for path in (REPOSITORY / name).rglob("*") if path.is_file()}
        kinds = (".css", ".js", ".md", ".py", ".safetensors", ".svg", ".toml", ".typed", ".yaml")
        files = {path for path in files if path.suffix in kinds}
        assert not [path for path in files if not (source / path).is_file()]
    for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", "mkdocs.yml"):
        assert (source / name).read_bytes() == (REPOSITORY / name).read_bytes()
    tests = ["tests/test_house.py", "tests/test_readme.py"]
    trains = "tests/test_readme.py::test_session_in_the_readme_prints_what_it_shows"  # on ranks that are started for it
    options = ["-q", "-p", "no:cacheprovider", "--deselect", trains]
    printed = run(sys.executable, "-m", "pytest", *options, *tests, cwd=source)
    assert re.search(r"^\d+ passed, 1 deselected in", printed, re.MULTILINE)


# --- what is in the wheel


def test_wheel_holds_every_module_and_the_configs_that_an_app_has_not_for_itself(wheel: Path) -> None:
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "lightning_zero").rglob("*.py")}
    groups = [path for group in ("hydra", "strategy") for path in (REPOSITORY / "conf" / group).rglob("*.yaml")]
    configs = {f"lightning_zero/{path.relative_to(REPOSITORY)}" for path in groups}
    assert "lightning_zero/conf/strategy/zero2.yaml" in configs
    of_the_page = {f"lightning_zero/rehearsal/page.{kind}" for kind in ("css", "js")}
    answers = "lightning_zero/pl/elsewhere.toml"
    kinds = (".py", ".toml", ".yaml", ".css", ".js")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(kinds)}
    assert shipped == modules | configs | of_the_page | {answers, "lightning_zero/conf/__init__.py"}


def test_what_composes_configs_and_sweeps_is_installed_with_the_package_and_only_the_picture_asks_for_more(
    wheel: Path,
) -> None:
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    wanted = re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", zipfile.ZipFile(wheel).read(metadata).decode(), re.MULTILINE)
    plain = {name for name, rest in wanted if "extra ==" not in rest}
    assert {"lightning", "torch", "torchmetrics", "hydra-core", "omegaconf"} <= plain
    assert [name for name, rest in wanted if 'extra == "plots"' in rest] == ["matplotlib"]


def test_wheel_holds_py_typed_and_the_licence_and_nothing_foreign(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "lightning_zero/py.typed" in names
    assert [name for name in names if re.fullmatch(r"lightning_zero-[^/]*\.dist-info/licenses/LICENSE", name)]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lightning_zero"}


def test_r33_wheel_has_nothing_to_compile(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")


def test_version_stands_in_one_place(wheel: Path) -> None:
    assert wheel.name.split("-")[1] == lightning_zero.__version__


# --- what make installs


def test_make_installs_every_extra_but_the_peers_and_pins_all_that_they_name() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras.pop("peers")  # for those who ask for it: only benchmarks compare with them
    assert f"EXTRAS := {','.join(extras)}\n" in (REPOSITORY / "Makefile").read_text()
    pinned = set(re.findall(r"^([\w.-]+)==", (REPOSITORY / "constraints.txt").read_text(), flags=re.MULTILINE))
    named = {re.split(r"[<>=!\[]", wanted)[0] for wanted in sum(extras.values(), project["dependencies"])}
    assert named <= pinned


def test_environments_for_some_tests_have_all_that_each_lane_imports() -> None:
    """`make test-floors` and `make test-clients` install less than the others, and load tests/conftest.py as well."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    made = (REPOSITORY / "Makefile").read_text()
    runners = set(re.findall(r"^RUNNERS := (.*)$", made, flags=re.MULTILINE)[0].split())
    for environment in ("FLOORS", "CLIENTS"):
        recipe = made.partition(f"\n$({environment})/installed:")[2].partition("\n\n")[0]
        assert "pip" in recipe
        assert "$(RUNNERS)" in recipe
    there = {re.split(r"[<>=!\[]", wanted)[0] for wanted in project["dependencies"]} | runners | {"lightning_zero"}
    assert imported_by(["conftest", "lane"]) <= there | sys.stdlib_module_names


def imported_by(tests: list[str]) -> set[str]:
    """What modules of this folder import of others, by themselves and through each other, whenever they do."""
    found: set[str] = set()
    for name in (todo := [*tests]):  # grows
        for node in ast.walk(ast.parse((REPOSITORY / f"tests/{name}.py").read_text())):
            if isinstance(node, ast.Import):
                imported = [alias.name.partition(".")[0] for alias in node.names]
            else:
                imported = [str(node.module).partition(".")[0]] if isinstance(node, ast.ImportFrom) else []
            ours = [one for one in imported if (REPOSITORY / f"tests/{one}.py").is_file()]
            found.update(set(imported) - set(ours))
            todo += [one for one in dict.fromkeys(ours) if one not in todo]
    return found


# --- a foreign app

# Makes a strategy, runs the app, and composes with a search path that is a plugin's, where no compiler can be found.
APP = """
import json, runpy, shutil, sys
import lightning_zero
has_hydra = "hydra" in sys.modules
import hydra, lightning_zero.conf
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

class OfTheApp(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        search_path.append("app", "pkg://lightning_zero.conf")

assert type(hydra.utils.instantiate(json.load(sys.stdin))) is lightning_zero.ZeroStrategy
places = [lightning_zero.__file__, *lightning_zero.conf.__path__]
compilers = [name for name in ("cc", "gcc", "g++", "clang", "c++", "nvcc", "ninja") if shutil.which(name)]
print(json.dumps({"places": places, "compilers": compilers, "has_hydra": has_hydra}))
runpy.run_path("foreign_app.py", run_name="__main__")
Plugins.instance().register(OfTheApp)
with hydra.initialize(version_base="1.3", config_path=None):
    composed = hydra.compose(overrides=["+strategy=zero3", "strategy/offload=cpu"]).strategy
print(json.dumps({"class": composed._target_, "stage": composed.stage, "offload": composed.offload.optimizer}))
"""


class Found(NamedTuple):
    """What a process sees of an installed package."""

    places: list[Path]
    compilers: list[str]
    has_hydra: bool  # once lightning_zero is imported
    strategy: dict[str, Any]  # as an app has composed it
    by_plugin: dict[str, Any]  # the same of an app whose search path is a plugin's


def used_by(python: Path, folder: Path) -> Found:
    shutil.copy(TESTS / "foreign_app.py", folder)
    shutil.copytree(TESTS / "foreign_conf", folder / "foreign_conf")
    (folder / "bin").mkdir()
    strategy = json.dumps({"_target_": "lightning_zero.ZeroStrategy", "stage": 2})
    unset = dict.fromkeys(("CC", "CXX", "CUDA_HOME", "CUDA_PATH"), "")
    printed = run(python, "-c", APP, cwd=folder, stdin=strategy, PATH=str(folder / "bin"), **unset)
    told, *_, composed, by_plugin = map(json.loads, (line for line in printed.splitlines() if line.startswith("{")))
    places = [Path(path) for path in told["places"]]
    return Found(places, told["compilers"], told["has_hydra"], composed, by_plugin)


@pytest.fixture(scope="module")
def wheel_use(wheel_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return used_by(wheel_python, tmp_path_factory.mktemp("wheel-use"))


@pytest.fixture(scope="module")
def editable_use(editable_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return used_by(editable_python, tmp_path_factory.mktemp("editable-use"))


@pytest.mark.parametrize("install", ["wheel", "editable"])
def test_foreign_app_composes_zero2_from_the_installed_package(install: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(f"{install}_use")
    assert found.strategy == {"class": "ZeroStrategy", "stage": 2}
    assert found.by_plugin == {"class": "lightning_zero.ZeroStrategy", "stage": 3, "offload": "cpu"}


def test_importing_the_package_imports_no_hydra(wheel_use: Found) -> None:
    assert not wheel_use.has_hydra


def test_mypy_resolves_both_installs(python: Path, tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text("from lightning_zero import ZeroStrategy\n")
    options = ("--follow-imports=skip", "--python-executable", python, "--cache-dir", tmp_path / "cache")
    printed = run(sys.executable, "-m", "mypy", *options, "use.py", cwd=tmp_path)
    assert printed == "Success: no issues found in 1 source file\n"


def test_wheel_install_stands_alone(wheel_python: Path, wheel_use: Found) -> None:
    assert len(wheel_use.places) == 2
    for path in wheel_use.places:
        assert path.is_relative_to(wheel_python.parent.parent)


def test_editable_install_is_the_source_itself_as_if_it_were_in_pythonpath(
    source: Path, editable_python: Path, editable_use: Found
) -> None:
    assert editable_use.places == [source / "lightning_zero" / "__init__.py", source / "conf"]
    (path,) = editable_python.parent.parent.glob("lib/python*/site-packages/__editable__*")
    assert path.read_text().strip() == str(source)


# --- R33: importing

# Each of three processes that have imported Lightning, and nothing else, imports the rest. It tells seconds of the
# processor, of which other lanes of the tests take none.
IMPORT_TIME = """
import os, time
import lightning.pytorch
for _ in range(3):
    if os.fork() == 0:
        start = time.process_time()
        import lightning_zero
        print(time.process_time() - start, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_r33_import_takes_less_than_a_second_beyond_lightning(wheel_python: Path, tmp_path: Path) -> None:
    seconds = [float(line) for line in run(wheel_python, "-c", IMPORT_TIME, cwd=tmp_path).splitlines()]
    assert len(seconds) == 3
    assert statistics.median(seconds) < 1.0


def test_r33_import_needs_no_compiler(wheel_use: Found) -> None:
    assert wheel_use.compilers == []
