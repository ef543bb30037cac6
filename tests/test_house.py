"""What lies where: the folders of the repository, and one room of the package per outside world, who may name a
collective, Lightning or Hydra. (The ladder itself: `make ladder`.)"""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_zero"
MODULES = sorted(PACKAGE.rglob("*.py"))

COLLECTIVE = re.compile(
    r"(all_|batch_)?(reduce|gather|scatter|broadcast|all_to_all|send|recv|isend|irecv|isend_irecv)"
    r"(_scatter)?(_into_tensor|_tensor|_single|_multigpu|_coalesced|_object|_object_list)*"
    r"|P2POp|barrier|monitored_barrier|_functional_collectives|c10d_functional|_c10d_functional"
)


def test_the_top_level_is_what_was_agreed() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert {"lightning_zero", "conf", "examples", "tests"} <= folders
    assert {"pyproject.toml", "README.md"} <= {path.name for path in ROOT.iterdir() if path.is_file()}


def test_conf_holds_every_config_group_and_no_other_folder_holds_one() -> None:
    groups = {"strategy", "hydra", "data", "model", "trainer", "experiment"}
    assert {path.name for path in (ROOT / "conf").iterdir()} - {"__pycache__"} == {
        *groups,
        "__init__.py",
        "train.yaml",
        "paper.yaml",
    }
    assert [path for folder in ("lightning_zero", "examples") for path in (ROOT / folder).rglob("*.yaml")] == []
    assert [path for path in (PACKAGE / "conf", ROOT / "examples" / "conf") if path.exists()] == []


def names_in(source: str) -> set[str]:
    """Every dotted name that `source` imports or uses, with its aliases resolved: ``torch.distributed.send``."""
    tree = ast.parse(source)
    found: set[str] = set()
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                found.add(item.name)
                aliases[item.asname or item.name.split(".")[0]] = item.name if item.asname else item.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for item in node.names:
                found.add(f"{node.module}.{item.name}")
                aliases[item.asname or item.name] = f"{node.module}.{item.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (path := _dotted(node)):
            head, _, tail = path.partition(".")
            if head in aliases:
                found.add(f"{aliases[head]}.{tail}")
    return found


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := _dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def collectives_in(source: str) -> set[str]:
    """Names of torch's collectives; a method of our own `Comm` is none of them."""
    torch_names = {
        name
        for name in names_in(source)
        if name.startswith(("torch.distributed.", "torch.ops.", "torch._C._distributed"))
    }
    nn = {name for name in torch_names if name.startswith("torch.distributed.nn")}
    return nn | {name for name in torch_names if any(COLLECTIVE.fullmatch(part) for part in name.split("."))}


def outside_worlds_in(source: str) -> set[str]:
    return {name.split(".")[0] for name in names_in(source)}


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.all_gather_into_tensor(x, y)",
        "from torch import distributed\ndef f():\n    return distributed.reduce_scatter_single(x, y)",
        "from torch.distributed import batch_isend_irecv as exchange",
        "def f():\n    from torch.distributed import P2POp",
        "from torch.distributed.distributed_c10d import broadcast",
        "import torch.distributed as dist\nops = [(dist.isend, 1)]",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "import torch.distributed as dist\ndist.barrier()",
        "import torch.distributed._functional_collectives as funcol",
        "from torch.distributed.nn import functional",
        "import torch\ntorch.ops._c10d_functional.all_reduce(x, 'sum', 'g')",
    ],
)
def test_a_collective_is_found_however_it_is_spelt(source: str) -> None:
    assert collectives_in(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.is_initialized(); dist.get_rank(); dist.init_process_group()",
        "from torch.distributed import DeviceMesh, ReduceOp",
        "from lightning_zero.wire.comm import Comm\ndef f(comm: Comm):\n    comm.all_gather(x); comm.reduce_scatter(x)",
        "import torch\ntorch.gather(x, 0, y); x.scatter_(0, y, z)",
    ],
)
def test_what_is_not_a_collective_is_left_alone(source: str) -> None:
    assert not collectives_in(source)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_only_wire_names_a_collective(module: Path) -> None:
    result = "torch.distributed._functional_collectives.AsyncCollectiveTensor"  # of one that users have called
    if module.parent.name != "wire":
        assert collectives_in(module.read_text()) <= ({result} if module.stem == "distributed_private" else set())


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_only_pl_and_rehearsal_import_lightning(module: Path) -> None:
    if module.parent.name not in ("pl", "rehearsal"):
        assert not outside_worlds_in(module.read_text()) & {"lightning", "pytorch_lightning", "lightning_fabric"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_only_sweeps_imports_hydra(module: Path) -> None:
    if module.parent.name != "sweeps":
        assert not outside_worlds_in(module.read_text()) & {"hydra", "omegaconf"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_nothing_imports_sweep(module: Path) -> None:
    assert not any(name.startswith("lightning_zero.sweeps.sweep") for name in names_in(module.read_text()))


ACTS = re.compile(  # what steps an optimizer, or has ranks wait for each other
    r"catch_up\w*|_?(all_)?gather|_?reduce_scatter|_?all_reduce|_?all_to_all|_?broadcast|all_gather_object|pass_by|_?publish"
    r"|read_grad|redistribute|full_tensor|whole_of"
    r"|begin|end|end_all|_?exchange|meet\w*|_?settle\w*|_?serve\w*|lend\w*|wait|call|use|step\w*_now|postpone"
)


def properties_that_act(source: str) -> list[str]:
    """Properties that step or communicate: in their own body, or in that of methods of their class which they use."""
    found = []
    for made in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        methods = {node.name: node for node in made.body if isinstance(node, ast.FunctionDef)}
        for name, method in methods.items():
            if not any("property" in ast.unparse(decorator) for decorator in method.decorator_list):
                continue
            reached, left = set[str](), [name]
            while left:
                if (of := left.pop()) in methods and of not in reached:
                    reached.add(of)
                    nodes = [*ast.walk(methods[of])]
                    left += [n.attr for n in nodes if isinstance(n, ast.Attribute) and _dotted(n) == f"self.{n.attr}"]
                    called = (_dotted(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call))
                    found += [f"{made.name}.{name}: {act}" for act in called if ACTS.fullmatch(act)]
    return found


@pytest.mark.parametrize(
    "body",
    ["self.group.catch_up()", "return self.comm.all_gather(full, own)", "return self._read()", "return self._latest"],
)
def test_a_property_that_steps_or_communicates_is_found(body: str) -> None:
    others = "def _read(self): self.rendezvous.course.call(1)\n @property\n def _latest(self): return self._read()"
    assert properties_that_act(f"class Group:\n @property\n def master(self): {body}\n {others}")


# Not in `views`: what user code reads there, as `p.grad`, is a use like any other, and does what the values need.
@pytest.mark.parametrize("room", ["wire", "tiers", "shards", "checkpoint", "run", "pl"])
def test_no_property_steps_or_communicates(room: str) -> None:
    assert [
        found for module in (PACKAGE / room).glob("*.py") for found in properties_that_act(module.read_text())
    ] == []


# What reduces gradients, has ranks agree on them, or publishes new values: for `Runner` and its parts to call.
DUE = {
    "begin_reduce", "start_all", "come_to_reduce", "exchange", "settle_last_backward", "settle_alike", "settle_alone",
    "publish.begin", "publish.end", "step_now",
}  # fmt: skip
PARTS = ("runner", "rendezvous", "course", "serving", "readiness", "replicas", "reductions", "latest", "stepping")
RUNNER = {f"run/{name}.py" for name in PARTS}


def callers_of(names: set[str], module: Path) -> set[str]:
    calls = [_dotted(node.func) for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call)]
    return {name for name in names if any(call.endswith(f".{name}") for call in calls)}


def test_nothing_but_the_runner_and_its_parts_reduces_agrees_or_publishes() -> None:
    called = {
        str(module.relative_to(PACKAGE)): callers_of(DUE, module)
        for module in MODULES
        if module.parent.name not in ("wire", "shards")
    }
    assert {module for module, names in called.items() if names} <= RUNNER | {"run/placing.py"}
    assert set().union(*called.values()) == DUE, "a name that nobody calls any more"


MOST_LINES, MOST_ARGUMENTS, MOST_ATTRIBUTES = 60, 8, 15


@cache
def nodes_of(kind: type[ast.AST]) -> list[tuple[str, Any]]:
    """All of a kind in the package, each with where it stands."""
    trees = {str(module.relative_to(PACKAGE)): ast.parse(module.read_text()) for module in MODULES}
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree) if isinstance(node, kind)]
    return [(f"{file}:{getattr(node, 'name', '')}", node) for file, node in nodes]


def attributes_of(made: ast.ClassDef) -> set[str]:
    """The attributes that a class sets on itself in its methods."""
    stored = (node for node in ast.walk(made) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in stored if _dotted(node) == f"self.{node.attr}"}


def test_no_function_is_longer_than_a_page() -> None:
    """Without its docstring, which may be one of Lightning's users."""
    lengths = {
        name: node.end_lineno - node.body[bool(ast.get_docstring(node))].lineno + 2
        for name, node in nodes_of(ast.FunctionDef)
        if len(node.body) > bool(ast.get_docstring(node))
    }
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_a_constructor_takes_few_arguments_but_for_that_of_the_users() -> None:
    makers = [(name, node) for name, node in nodes_of(ast.FunctionDef) if node.name == "__init__"]
    counts = {name: len(node.args.args) + len(node.args.kwonlyargs) - 1 for name, node in makers}
    assert {name for name, count in counts.items() if count > MOST_ARGUMENTS} == {"pl/strategy.py:__init__"}


def test_a_class_has_few_attributes() -> None:
    counts = {node.name: len(attributes_of(node)) for _, node in nodes_of(ast.ClassDef)}
    assert {name: count for name, count in counts.items() if count > MOST_ATTRIBUTES} == {}


def _is_record(made: ast.ClassDef) -> bool:
    """Whether a class makes its constructor of what it declares."""
    return any("dataclass" in ast.unparse(one) for one in made.decorator_list) or "NamedTuple" in map(
        ast.unparse, made.bases
    )


def left_to_others(made: ast.ClassDef, below: list[ast.ClassDef]) -> set[str]:
    """Attributes that a class declares, and that neither its own constructor sets nor that of any of those `below`."""
    declared = {
        ast.unparse(node.target)
        for node in made.body
        if isinstance(node, ast.AnnAssign) and node.value is None and "ClassVar" not in ast.unparse(node.annotation)
    }
    constructors = [
        method
        for one in (made, *below)
        for method in one.body
        if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "__new__")
    ]
    found = (node for method in constructors for node in ast.walk(method) if isinstance(node, ast.Attribute))
    return declared - {node.attr for node in found if isinstance(node.ctx, ast.Store)}


def test_a_class_that_is_left_to_others_is_found() -> None:
    (waits, made) = ast.parse(
        "class Waits:\n use: int\n def __init__(self): self.it = 1\n"
        "class Made:\n use: int\n def __init__(self): self.use = 1"
    ).body
    assert isinstance(waits, ast.ClassDef)
    assert isinstance(made, ast.ClassDef)
    assert (left_to_others(waits, []), left_to_others(made, [])) == ({"use"}, set())


@pytest.mark.parametrize("room", ["tiers", "shards", "views", "run"])
def test_no_part_of_the_engine_waits_for_another_to_complete_it(room: str) -> None:
    classes, below = nodes_of(ast.ClassDef), defaultdict[str, list[ast.ClassDef]](list)
    for _, made in classes:
        for base in made.bases:
            below[ast.unparse(base)].append(made)
    found = {
        name: left
        for name, made in classes
        if name.startswith(f"{room}/") and not _is_record(made)
        if (left := left_to_others(made, below[made.name]))
    }
    assert found == {}, "make it after what it needs, or split off the part that needs it"
