"""What the package's own code says of devices: one module names their kinds, and every new tensor says where it is."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreign_device import MAKERS

PACKAGE = Path(__file__).parents[1] / "lightning_zero"
DEVICES = PACKAGE / "device.py"
MODULES = sorted(PACKAGE.rglob("*.py"))


def calls_in(module: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call):
            yield node


def named(module: Path) -> Iterator[str]:
    """The dotted names in a module, such as ``torch.cuda.Stream``."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_one_module_names_kinds_of_devices() -> None:
    kinds = ("torch.cuda", "torch.xpu", "torch.mps", "torch.hpu", "torch.accelerator", "torch.get_device_module")
    found = {module.name: name for module in MODULES for name in named(module) if name.startswith(kinds)}
    assert set(found) == {DEVICES.name}


def test_one_module_copies_without_waiting() -> None:
    found = [
        f"{module.name}:{call.lineno}"
        for module in MODULES
        if module != DEVICES
        for call in calls_in(module)
        for keyword in call.keywords
        if keyword.arg == "non_blocking"
    ]
    assert found == []


def test_every_tensor_that_the_package_makes_says_on_which_device() -> None:
    """Within `trainer.init_module()` the default is the accelerator: a message to other hosts would be made there.
    What makes one is called with its device, or given to another function, such as `partial`, together with it."""
    makers = {f"torch.{name}" for name in MAKERS}
    found = []
    for module in MODULES:
        nodes = [*ast.walk(ast.parse(module.read_text()))]
        placed = {
            maker
            for call in nodes
            if isinstance(call, ast.Call) and any(keyword.arg in ("device", None) for keyword in call.keywords)
            for maker in (call.func, *call.args)
        }
        found += [
            f"{module.name}:{node.lineno}"
            for node in nodes
            if isinstance(node, ast.Attribute) and ast.unparse(node) in makers and node not in placed
        ]
    assert found == []


@pytest.mark.parametrize(("place", "device"), [("lightning_zero/x.py", "meta"), ("tests/x.py", "cpu")])
def test_under_a_foreign_device_only_what_the_package_makes_is_there(place: str, device: str) -> None:
    code = f"""
import foreign_device
import torch
foreign_device.install()
made = {{}}
exec(compile("made = torch.ones(2)", {str(PACKAGE.parent / place)!r}, "exec"), {{"torch": torch}}, made)
print(made["made"].device.type)
"""
    environment = {"FOREIGN_DEVICE": "meta", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [device]


def test_under_a_foreign_device_torch_compiles_scripts_that_make_tensors(tmp_path: Path) -> None:
    """As it does when `torch.distributed.optim` is imported."""
    code = """
import foreign_device
import torch
from torch import Tensor
foreign_device.install()

def made(like: Tensor) -> Tensor:
    return torch.zeros(2) + torch.tensor(1.0) + torch.empty(2).fill_(1) + torch.full((2,), 1.0) + like

print(torch.jit.script(made)(torch.ones(2)).tolist())
"""
    (tmp_path / "script.py").write_text(code)  # what is compiled is read from its file
    environment = {"FOREIGN_DEVICE": "meta", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[4.0, 4.0]"
