"""Step time, memory and bytes on the wire of each ZeRO stage beside its peers, in one run.

    python benchmarks/step_time.py                                              # everybody who is installed
    python benchmarks/step_time.py --size small --contestants ddp,2,3,fsdp2     # or, as ever, --stages

Every contestant is a process tree of its own, and they take turns, round after round, so that whatever else the machine
does meets all of them. Ratios hold better than seconds. All train the same model from the same seed on the same tokens,
and one whose last loss is not that of "ddp" is told. fp32, AdamW. On a GPU, steps are timed by CUDA events and memory
is the CUDA allocator's.

A stage with ":tensor" steps whole tensors (`granularity="tensor"`) with the same arithmetic, so that its ratio to the
stage alone is what an optimizer that looks at whole tensors costs beside its own arithmetic: --stages 2,2:tensor
--devices 4.

What is made: a table, a JSON file with all rounds, beside it the table as CSV and, with matplotlib, a picture.

Contestants:
"""

import argparse
import contextlib
import csv
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmark_models import SIZES, size_of
from peers import CONTESTANTS, USUAL, WHOLE

SAME_LOSS = 1e-4  # relative; sums in another order differ by some 1e-6
SHORT = 1_000_000  # parameters of a model whose steps take milliseconds
SHORT_STEPS = 200  # of such a model; 10 would measure the scheduler of the system
PER_PARAMETER = 20  # bytes: parameter, gradient, AdamW's two states, and ddp's bucket
PER_PROCESS = 600_000_000  # bytes on the host: Python, torch, Lightning, activations; measured of `ddp`


def main() -> int:
    options = parse()
    if options.child:
        CONTESTANTS[options.contestants[0]].train(options)
        return 0
    if refusals := refusals_of(options):
        print("\n".join(f"Error: {line}" for line in refusals))
        return 2
    for line in warnings_for(options):
        print(f"Warning: {line}")
    skipped = not_installed(options.contestants)
    for line in told_skipped(skipped):
        print(line, flush=True)
    rows = measure([name for name in options.contestants if name not in skipped], options)
    table = summarize({name: found for name, found in rows.items() if found}, size_of(options).flops)
    show(table, options)
    for line in disagreements(table):
        print(line)
    write({"setting": setting(options), "skipped": skipped, "table": table, "rounds": rows}, options.json)
    return int(any(len(found) < options.rounds for found in rows.values()))


def parse() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    everybody = "\n".join(f"    {name:<16} {contestant.told}" for name, contestant in CONTESTANTS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{everybody}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument(
        "--contestants", "--stages", metavar="NAMES", type=lambda text: text.split(","), default=USUAL,
        help=f"default: {','.join(USUAL)}",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, default=None, help="blocks of the GPT; default: as --size has")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=None,
        help=f"measured steps per round; default: 10, and {SHORT_STEPS} of a model whose steps take milliseconds",
    )  # fmt: skip
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() if on_gpu else 2)
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="gpu" if on_gpu else "cpu")
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true")
    parser.add_argument("--compile", action="store_true", help="the model by torch.compile")
    parser.add_argument("--json", type=Path, default=None, help="default: outputs/step_time-SIZE.json")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds one contestant may take in one round")
    parser.add_argument("--child", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps is None:
        options.steps = SHORT_STEPS if size_of(options).parameters < SHORT else 10
    options.json = options.json or Path("outputs") / f"step_time-{options.size}.json"
    if options.layers is not None and not SIZES[options.size].heads:
        parser.error(f"--layers is of a GPT, and --size {options.size} is none")
    if unknown := [name for name in options.contestants if name not in CONTESTANTS]:
        parser.error(f"--contestants has {unknown}; write some of {','.join(CONTESTANTS)}")
    return options


# --- before anything runs


def refusals_of(options: argparse.Namespace) -> list[str]:
    """Why this machine cannot hold the run. Estimated are the bytes of `ddp`; some peers take a third more."""
    from lightning_zero.pl.table import sized
    from lightning_zero.tiers.host_memory import available_host_bytes

    states = PER_PARAMETER * size_of(options).parameters
    if options.accelerator == "gpu":
        if options.devices > torch.cuda.device_count():
            return [f"--devices {options.devices}, and there are {torch.cuda.device_count()} GPUs"]
        free = [torch.cuda.mem_get_info(device)[0] for device in range(options.devices)]
        needed, available, place = states, min(free), "on each GPU"
    else:
        needed = (states + PER_PROCESS) * options.devices
        available, place = available_host_bytes() or needed, f"of memory for {options.devices} ranks"
    if needed <= available:
        return []
    smaller = [name for name, size in SIZES.items() if size.parameters < size_of(options).parameters]
    advice = f"take fewer --devices or --size {' or '.join(smaller)}" if smaller else "take fewer --devices"
    return [f"--size {options.size} takes some {sized(needed)} {place}, and {sized(available)} are free: {advice}"]


def warnings_for(options: argparse.Namespace) -> list[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if options.accelerator == "gpu" or options.devices <= cores:
        return []
    return [f"{options.devices} ranks share {cores} cores: what is hidden behind computing elsewhere takes time here"]


def not_installed(names: list[str]) -> dict[str, str]:
    """The package that is missing, by contestant."""
    return {name: CONTESTANTS[name].package for name in names if not CONTESTANTS[name].is_installed}


def told_skipped(skipped: dict[str, str]) -> list[str]:
    by_package = defaultdict(list)
    for name, package in skipped.items():
        by_package[package].append(name)
    extra = "pip install 'lightning-zero[peers]'"
    return [
        f"Skipped: {', '.join(names)}: {package} is not installed ({extra})" for package, names in by_package.items()
    ]


# --- the parent: one process tree per contestant


def measure(names: list[str], options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What each contestant measured, a row for each round in which it did not fail."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names:
            measured = run(name, options)
            if measured is not None:
                rows[name].append({"round": number, **measured})
                print(f"round {number + 1}/{options.rounds}  {name:>16}  {measured['seconds']:.3f} s/step", flush=True)
    return rows


def run(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Trains one contestant and returns the worst rank's figures, or None when it failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if CONTESTANTS[name].loop:  # Lightning starts its ranks itself
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.devices}"]
        command += [__file__, "--child", folder, "--contestants", name, "--size", options.size]
        command += ["--steps", str(options.steps), "--devices", str(options.devices)]
        command += ["--accelerator", options.accelerator, "--precision", options.precision]
        command += ["--compile"] * options.compile
        command += [] if options.layers is None else ["--layers", str(options.layers)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            output = f"no end after {options.timeout:.0f} s"
        finally:
            end_group(process)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
    if process.returncode != 0 or len(ranks) != options.devices:
        print(f"{name} failed ({process.returncode}, {len(ranks)} of {options.devices} ranks):\n{output[-3000:]}")
        return None
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def end_group(process: subprocess.Popen[str]) -> None:
    """Ranks that outlived the first one must not slow down the next contestant."""
    if process.poll() is None:  # `torch.distributed.run` ends its ranks, which are in sessions of their own
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def summarize(rows: dict[str, list[dict[str, Any]]], flops: float) -> dict[str, dict[str, float]]:
    """Medians over the rounds; `x_ddp` is the median of the ratios within each round, `x_pieces` that of a stage that
    steps whole tensors to the stage alone, and what ends in `_min` and `_max` their spread. `tflops` are what the model
    asks of a rank (`flops` per step) in a second."""
    table = {}
    for name, found in rows.items():
        row = {key: statistics.median(one[key] for one in found) for key in found[0] if key != "round"}
        row |= {"tflops": flops / row["seconds"] / 1e12, **spread("seconds", [one["seconds"] for one in found])}
        if ratios := ratios_of(found, rows.get("ddp", [])):
            row |= {"x_ddp": statistics.median(ratios), **spread("x_ddp", ratios)}
        if name.endswith(WHOLE) and (ratios := ratios_of(found, rows.get(name.removesuffix(WHOLE), []))):
            row["x_pieces"] = statistics.median(ratios)
        table[name] = row
    return table


def spread(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}_min": min(values), f"{name}_max": max(values)}


def ratios_of(found: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[float]:
    """Seconds in relation to those of another contestant, for each round in which both have run."""
    beside = {row["round"]: row["seconds"] for row in others}
    return [row["seconds"] / beside[row["round"]] for row in found if row["round"] in beside]


def disagreements(table: dict[str, dict[str, float]]) -> list[str]:
    """A line for each contestant that has trained something else than `ddp`, so that nobody is fast by being wrong."""
    if "ddp" not in table:
        return []
    expected = table["ddp"]["loss"]
    return [
        f"{name} does not train as ddp does: after the last step its loss is {row['loss']:.6f}, and ddp's "
        f"{expected:.6f}. Its time says nothing until the cause is known."
        for name, row in table.items()
        if not CONTESTANTS[name].is_limit and not math.isclose(row["loss"], expected, rel_tol=SAME_LOSS)
    ]


def setting(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "size": options.size,
        "layers": size_of(options).depth,
        "parameters": size_of(options).parameters,
        "devices": options.devices,
        "device": torch.cuda.get_device_name() if options.accelerator == "gpu" else f"cpu, {os.cpu_count()} cores",
        "precision": options.precision,
        "compiled": options.compile,
        "peer": "single device" if options.devices == 1 else "ddp",
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "1"),
        "rounds": options.rounds,
        "steps": options.steps,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
    }


def show(table: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    print(f"\n{setting(options)}\n")
    told = f"{'s/step':>9}{'(min - max)':>16}{'x ddp':>8}{'(min - max)':>14}"
    print(f"{'':<16}{told}{'cpu s':>8}{'rest MB':>10}{'peak MB':>10}{'wire':>8}{'TFLOP/s':>9}{'loss':>10}")
    for name, row in table.items():
        ratio = f"{row['x_ddp']:>8.2f}{row['x_ddp_min']:>7.2f} - {row['x_ddp_max']:.2f}" if "x_ddp" in row else " " * 22
        print(
            f"{name:<16}{row['seconds']:>9.3f}{row['seconds_min']:>8.3f} - {row['seconds_max']:.3f}{ratio}"
            f"{row['processor']:>8.3f}{row['rest_mb']:>10.0f}{row['peak_mb']:>10.0f}{row['wire']:>8.2f}"
            f"{row['tflops']:>9.3g}{row['loss']:>10.4f}"
        )
        if "x_pieces" in row:
            print(f"{'':<16}{row['x_pieces']:.2f} x the same stage that steps pieces")
    print("cpu: time of the processor in all threads of a rank, per step, without the time that others had it")
    print("rest, peak: MB of the largest rank, rest the mean between steps; wire: bytes that all ranks send per step")
    print("for each of the parameters, as the kernel counts them on the loopback device; our stages use none on one")
    print("machine, and count themselves; TFLOP/s: what forward and backward of the model ask of one rank")


# --- what is kept


def write(report: dict[str, Any], path: Path) -> None:
    """Writes the report, the table as CSV, and a picture where matplotlib is installed; says where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    table, picture = path.with_suffix(".csv"), path.with_suffix(".svg")
    write_csv(report["table"], table)
    print(f"written to {path}, {table}")
    try:
        from step_time_picture import draw
    except ModuleNotFoundError as missing:
        print(f"no picture: {missing.name} is not installed (pip install 'lightning-zero[plots]')")
        return
    draw(report, picture)
    print(f"drawn in {picture}")


def write_csv(table: dict[str, dict[str, float]], path: Path) -> None:
    """A row for each contestant, and a column for each value that any of them has."""
    columns = dict.fromkeys(key for row in table.values() for key in row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["contestant", *columns], restval="")
        writer.writeheader()
        writer.writerows({"contestant": name, **row} for name, row in table.items())


if __name__ == "__main__":
    sys.exit(main())
