"""The benchmarks run, and measure the models they say they measure."""

import csv
import importlib.util
import io
import json
import re
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from matplotlib.text import Text
from torch.multiprocessing.spawn import start_processes

import ranks  # noqa: F401  whose server has imported everything
import warm
from lightning_zero.rehearsal import calibration
from lightning_zero.rehearsal.cost import Rates

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


@pytest.mark.parametrize("layers", [1, 3])
def test_a_gpt_may_have_other_layers_than_its_size(layers: int) -> None:
    models = load("benchmark_models")
    model = models.model_of(models.size_of(Namespace(size="tiny", layers=layers)))  # which checks the parameters
    assert len(model.blocks) == layers


def time_steps(options: str, folder: Path) -> str:
    """What `step_time.py` prints; `folder` gets found.json, found.csv and found.svg."""
    small = "--size tiny --layers 1 --rounds 1 --steps 4 --devices 2 --accelerator cpu"
    command = [sys.executable, BENCHMARKS / "step_time.py", *small.split(), *options.split()]
    command += ["--json", folder / "found.json"]
    with warm.starts():
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_step_time_compares_a_stage_with_ddp_in_one_run(tmp_path: Path) -> None:
    time_steps("--stages ddp,limit,2,2:tensor", tmp_path)
    table = json.loads((tmp_path / "found.json").read_text())["table"]
    assert table.keys() == {"ddp", "limit", "2", "2:tensor"}
    assert table["ddp"]["x_ddp"] == 1.0
    assert table["2"]["loss"] == pytest.approx(table["ddp"]["loss"], rel=1e-6)
    assert table["2:tensor"]["loss"] == table["2"]["loss"]
    assert table["2:tensor"]["x_pieces"] > 0
    del table["limit"]  # sends nothing
    for row in table.values():
        assert 0 < row["seconds"] < 10
        assert 0 < row["processor"] < 10
        assert 100 < row["rest_mb"] <= row["peak_mb"]
        assert row["wire"] > 1.9  # at least; the counter is the machine's, and others may use it


def test_step_time_compares_with_peers_that_train_the_same_and_skips_those_that_are_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = ["raw_ddp", "zero_redundancy", "fsdp2", "fsdp2_keep", "model_parallel"]
    monkeypatch.syspath_prepend(BENCHMARKS)
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    told = time_steps(
        f"--contestants {','.join(['ddp', *peers, *([] if has_deepspeed else ['deepspeed2'])])}", tmp_path
    )
    table = json.loads((tmp_path / "found.json").read_text())["table"]
    assert list(table) == ["ddp", *peers]
    for row in table.values():
        assert row["loss"] == pytest.approx(table["ddp"]["loss"], rel=1e-6)
        assert row["wire"] > 1.9
    assert "does not train as ddp does" not in told
    assert has_deepspeed or "Skipped: deepspeed2: deepspeed is not installed (pip install" in told
    with (tmp_path / "found.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["contestant"] for row in rows] == list(table)
    assert all(float(row["x_ddp"]) == table[row["contestant"]]["x_ddp"] for row in rows)
    drawn = re.findall(r">([^<>]+)</text>", (tmp_path / "found.svg").read_text())
    assert set(table) <= set(drawn)


def test_the_picture_has_all_of_each_name_also_of_a_point_at_its_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    picture, right = load("step_time_picture"), []
    free_place = picture.free_place

    def noting(figure: Any, *rest: Any) -> Any:
        text = free_place(figure, *rest)
        right.append(figure.bbox.x1 - Text.get_window_extent(text).x1)
        return text

    monkeypatch.setattr(picture, "free_place", noting)
    row = {"seconds": 1.0, "seconds_min": 1.0, "seconds_max": 1.0}
    table = {"2": {**row, "rest_mb": 1000}, "model_parallel": {**row, "rest_mb": 2000}}
    picture.draw({"table": table, "setting": {"parameters": 1, "devices": 1, "device": "cpu"}}, io.BytesIO())
    assert min(right) > 0


@pytest.fixture
def step_time(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return load("step_time")


def test_step_time_says_who_trains_something_else(step_time: ModuleType) -> None:
    table = {"ddp": {"loss": 9.0}, "1": {"loss": 9.0 * (1 + 0.9e-4)}, "fsdp2": {"loss": 9.0 * (1 + 1.1e-4)}}
    (line,) = step_time.disagreements(table)
    assert line.startswith("fsdp2 does not train as ddp does: after the last step its loss is 9.000990, and ddp's 9.0")


def test_step_time_refuses_what_does_not_fit_and_warns_where_ranks_share_cores(
    step_time: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "step_time.py --accelerator cpu --size large --contestants ddp --devices"
    monkeypatch.setattr("lightning_zero.tiers.host_memory.available_host_bytes", lambda: 5_200_000_000)
    monkeypatch.setattr(sys, "argv", [*command.split(), "3"])
    assert step_time.main() == 2
    fits_not = "Error: --size large takes some 7.66 GB of memory for 3 ranks, and 5.2 GB are free: take fewer --devices"
    assert capsys.readouterr().out == f"{fits_not} or --size small or modules or tiny\n"
    monkeypatch.setattr(sys, "argv", [*command.split(), "2"])
    assert step_time.refusals_of(step_time.parse()) == []  # 5.1 GB
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert step_time.warnings_for(step_time.parse()) == []
    monkeypatch.setattr(sys, "argv", [*command.split(), "4"])
    assert step_time.warnings_for(step_time.parse())[0].startswith("4 ranks share 2 cores")


def test_the_limit_trains_no_model_of_ddps_and_nobody_says_so(step_time: ModuleType) -> None:
    rows = {"ddp": {"loss": 3.0}, "limit": {"loss": 4.0}}
    assert step_time.disagreements(rows) == []


PERF = """\
          python  11/11  100.000000:  ffffffff821f5127 exc_page_fault ([kernel.kallsyms])
          python  11/11  101.000000:      7fb96a226bab mkl_blas_def_sgemm_kernel_0_zen (/lib/torch/lib/libtorch_cpu.so)
          python  11/13  102.000000:      7f1ba318290d __memmove_avx512_unaligned_erms (/usr/lib/libc.so.6)
          python  11/13  103.000000:      7faeb0315560 FLOAT_add_X86_V3 (/lib/numpy/_core/_multiarray_umath.so)
          python  12/12  103.500000:      7f1ba32fb609 [unknown] (/usr/bin/python3.11)
          python  12/12  105.000000:      7f1ba32fb609 _PyEval_EvalFrameDefault (/lib/libpython3.11.so.1.0)
   a name: more  14/14  104.000000:  ffffffff821f5127 exc_page_fault ([kernel.kallsyms])
nothing that perf would say
"""


def test_a_profile_counts_each_sample_of_a_rank_in_one_place(step_time: ModuleType) -> None:
    profile = load("profile_step")
    samples = list(profile.samples_in(PERF))
    places = ["system", "arithmetic", "copies", "sums", "Python", "Python", "system"]
    assert [sample.place for sample in samples] == places
    spent = profile.spent_in(samples, {"seconds": 1.0, "began": 100.5, "ended": 103.5}, 2)
    each = 1 / (profile.RATE * 3 * 2)
    assert spent == {"copies": each, "sums": each, "Python": each, "system": 0, "arithmetic": each}


def test_a_profile_without_perf_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "profile_step.py"]
    with warm.starts():
        done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == "Error: perf is not installed. It is in the package linux-tools of most distributions.\n"


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
    for way in ("cpu", "nvme"):
        found = re.search(rf"^bound of '{way}' +(\d+\.\d) ms, of which it takes (\d+\.\d\d) x", told, re.MULTILINE)
        assert found is not None, told
        assert all(float(number) > 0 for number in found.groups())
    longest = re.search(r"bound of 'nvme' +(\S+) ms.*: the longest of compute (\S+), disk (\S+), cores (\S+) ms", told)
    assert longest is not None, told
    bound, *lanes = map(float, longest.groups())
    assert bound == max(lanes)  # of one round
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


def test_so_many_ranks_more_are_so_much_slower_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rates = Rates(flops=8.0, memory=4.0, link=2.0, latency=0.5, host=6.0)
    slower = Rates(flops=4.0, memory=2.0, link=1.0, latency=1.0, host=3.0)
    assert importlib.import_module("calibration").among(rates, 2) == slower


def test_calibration_sets_what_is_modelled_beside_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks have imported everything already: spawned ones are in `test_calibration.py`."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("calibration")
    for module in (benchmark, calibration):
        monkeypatch.setattr(module, "spawn", partial(start_processes, start_method="forkserver"))
    monkeypatch.setattr(sys, "argv", ["calibration.py", *"--size tiny --steps 2 --lines 1".split()])
    benchmark.main()
    rates, _, line = capsys.readouterr().out.splitlines()[-3:]
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
