"""The benchmarks run, and measure the models they say they measure."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import warm

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("size", "millions"), [("large", 97.688), ("small", 29.48), ("modules", 0.043)])
def test_gpt_has_the_number_of_parameters_its_size_states(size: str, millions: float) -> None:
    models = load("benchmark_models")
    with torch.device("meta"):
        model = models.model_of(models.SIZES[size])
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 3) == millions


def test_step_time_compares_a_stage_with_ddp_in_one_run(tmp_path: Path) -> None:
    options = "--size tiny --stages ddp,2,2:tensor --rounds 1 --steps 4 --devices 2 --accelerator cpu"
    command = [sys.executable, BENCHMARKS / "step_time.py", *options.split(), "--json", tmp_path / "found.json"]
    with warm.starts():
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((tmp_path / "found.json").read_text())["table"]
    assert table.keys() == {"ddp", "2", "2:tensor"}
    assert table["ddp"]["x_ddp"] == 1.0
    assert table["2"]["loss"] == pytest.approx(table["ddp"]["loss"], rel=1e-6)
    assert table["2:tensor"]["loss"] == table["2"]["loss"]
    assert table["2:tensor"]["x_pieces"] > 0
    for row in table.values():
        assert 0 < row["seconds"] < 10
        assert 100 < row["rest_mb"] <= row["peak_mb"]
        assert row["wire"] > 1.9  # at least; the counter is the machine's, and others may use it


def test_checkpoint_io_loads_what_each_contestant_saved(tmp_path: Path) -> None:
    """It checks the values itself."""
    options = "--mb 24 --ranks 2 --rounds 1 --dir place --json found.json"
    command = [sys.executable, BENCHMARKS / "checkpoint_io.py", *options.split()]
    with warm.starts():
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["table"].keys() == {"torch", "dcp", "zero", "zero-nocrc", "zero-async"}
    assert found["rounds"][0]["nbytes"] == 24_000_000
    for row in found["table"].values():
        assert 0 < row["blocks"] <= row["save"] < 60
        assert 0 < row["load"] < 60
    assert list((tmp_path / "place").iterdir()) == []


def test_offload_step_tells_the_price_of_each_tier_and_the_bound_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--millions", "2", "--rounds", "1", "--path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["offload_step.py", *options])
    assert load("offload_step").main() == 0
    told = capsys.readouterr().out
    assert all(f"{way:<18}" in told for way in ("fused, in memory", "offload='cpu'", "offload='nvme'"))
    assert "GB/s written; bound of 'nvme'" in told
    assert list(tmp_path.iterdir()) == []


def test_offload_model_finds_the_largest_model_under_a_limit_of_memory(tmp_path: Path) -> None:
    options = (
        "largest --limit-gb 0.15 --ways none,3+nvme --length 8 --width 512 --vocabulary 64 --steps 1 --bucket-mb 1"
    )
    found = run_offload_model(options, tmp_path)
    assert found["3+nvme"]["parameters"] > 2 * found["none"]["parameters"] > 0


def test_offload_model_tells_the_bound_of_a_step(tmp_path: Path) -> None:
    options = "seconds --billions 0.002 --ways none,2+cpu --length 8 --width 256 --vocabulary 64 --steps 1"
    found = run_offload_model(options, tmp_path)
    assert found.keys() == {"0.002B none", "0.002B 2+cpu"}
    assert found["0.002B none"]["bound"].keys() == {"compute"}
    assert found["0.002B 2+cpu"]["bound"].keys() == {"compute", "step"}
    assert all(row["seconds"] > 0 and row["bound"]["compute"] > 0 for row in found.values())


def run_offload_model(options: str, folder: Path) -> Any:
    command = [sys.executable, BENCHMARKS / "offload_model.py", *options.split(), "--json", folder / "found.json"]
    with warm.starts():
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())["found"]


def test_calibration_sets_what_is_modelled_beside_what_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "calibration.py", *"--size tiny --steps 2 --lines 1".split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rates, _, line = done.stdout.splitlines()[-3:]
    assert rates.startswith("Rates(flops=")
    assert re.fullmatch(r" +2 +\d\.\d{3} s +\d\.\d{3} s +[+-][\d.]+%  {'stage': 1}", line)


def test_two_nodes_says_why_it_cannot_make_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["two_nodes.py"])
    assert load("two_nodes").main() == 0
    assert re.match(r"Skipped: two network namespaces .* cannot be made here. `ip` is not", capsys.readouterr().out)
