"""Step time, memory and bytes on the wire of each ZeRO stage beside Lightning's own strategy, in one run.

    python benchmarks/step_time.py --size large --stages ddp,1,2,3 --rounds 3

Every configuration is a process tree of its own under `lightning.Trainer`, and the configurations take turns,
round after round, so that whatever else the machine does meets all of them. Ratios hold better than seconds.
The peer "ddp" is Lightning's `ddp`, and on one device the plain single-device strategy ("auto"). A stage with ":tensor"
steps whole tensors (`granularity="tensor"`) with the same arithmetic, so that its ratio to the stage alone is what an
optimizer that looks at whole tensors costs beside its own arithmetic: --stages 2,2:tensor --devices 4.
fp32, AdamW. On a GPU, steps are timed by CUDA events and memory is the CUDA allocator's.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmark_models import SIZES, Size, model_of

WARM_UP = 3  # steps before anything is measured
WHOLE = ":tensor"


def main() -> int:
    options = parse()
    if options.child:
        train(options)
        return 0
    rows: dict[str, list[dict[str, Any]]] = {stage: [] for stage in options.stages}
    failed = False
    for number in range(options.rounds):
        for stage in options.stages:
            measured = run(stage, options)
            failed |= measured is None
            if measured is not None:
                rows[stage].append({"round": number, **measured})
                print(f"round {number + 1}/{options.rounds}  {stage:>8}  {measured['seconds']:.3f} s/step", flush=True)
    table = summarize({stage: found for stage, found in rows.items() if found})
    show(table, options)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"setting": setting(options), "table": table, "rounds": rows}, indent=2) + "\n")
    print(f"written to {options.json}")
    return int(failed)


def parse() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--stages", type=lambda text: text.split(","), default=["ddp", "1", "2", "3"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="measured steps per round")
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() if on_gpu else 2)
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="gpu" if on_gpu else "cpu")
    parser.add_argument("--json", type=Path, default=None, help="default: outputs/step_time-SIZE.json")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds one configuration may take in one round")
    parser.add_argument("--child", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.json = options.json or Path("outputs") / f"step_time-{options.size}.json"
    if unknown := set(options.stages) - {"ddp", *"0123", *(f"{stage}{WHOLE}" for stage in "123")}:
        parser.error(f"--stages has {sorted(unknown)}; write some of ddp,0,1,2,3,1{WHOLE},2{WHOLE},3{WHOLE}")
    return options


# --- the parent: one process tree per configuration ---


def run(stage: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Trains one configuration and returns the worst rank's figures, or None when it failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", folder, "--stages", stage, "--size", options.size]
        command += ["--steps", str(options.steps), "--devices", str(options.devices)]
        command += ["--accelerator", options.accelerator]
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
        print(f"{stage} failed ({process.returncode}, {len(ranks)} of {options.devices} ranks):\n{output[-3000:]}")
        return None
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def end_group(process: subprocess.Popen[str]) -> None:
    """Ranks that outlived the first one must not slow down the next configuration."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def summarize(rows: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds; `x_ddp` is the median of the ratios within each round, `x_pieces` that of a stage that
    steps whole tensors to the stage alone."""
    table = {}
    peer = {row["round"]: row["seconds"] for row in rows.get("ddp", [])}
    for stage, found in rows.items():
        table[stage] = {key: statistics.median(row[key] for row in found) for key in found[0] if key != "round"}
        ratios = [row["seconds"] / peer[row["round"]] for row in found if row["round"] in peer]
        if ratios:
            table[stage] |= {"x_ddp": statistics.median(ratios), "x_ddp_min": min(ratios), "x_ddp_max": max(ratios)}
        pieces = {row["round"]: row["seconds"] for row in rows.get(stage.removesuffix(WHOLE), [])}
        if stage.endswith(WHOLE) and pieces:
            ratios = [row["seconds"] / pieces[row["round"]] for row in found if row["round"] in pieces]
            table[stage]["x_pieces"] = statistics.median(ratios)
    return table


def setting(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "size": options.size,
        "parameters": SIZES[options.size].parameters,
        "devices": options.devices,
        "device": torch.cuda.get_device_name() if options.accelerator == "gpu" else f"cpu, {os.cpu_count()} cores",
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
    ddp = f"{'x ddp':>8}{'(min - max)':>16}"
    print(f"{'stage':<10}{'s/step':>9}{ddp}{'rest MB':>10}{'peak MB':>10}{'wire':>8}{'loss':>10}")
    for stage, row in table.items():
        ratio = f"{row['x_ddp']:>8.2f}{row['x_ddp_min']:>9.2f} - {row['x_ddp_max']:.2f}" if "x_ddp" in row else " " * 24
        print(
            f"{stage:<10}{row['seconds']:>9.3f}{ratio}{row['rest_mb']:>10.0f}{row['peak_mb']:>10.0f}"
            f"{row['wire']:>8.2f}{row['loss']:>10.4f}"
        )
        if "x_pieces" in row:
            print(f"{'':<10}{row['x_pieces']:.2f} x the same stage that steps pieces")
    print("rest, peak: MB of the largest rank; wire: bytes that all ranks send per step / bytes of the parameters")


# --- the child: one rank of one configuration ---


def train(options: argparse.Namespace) -> None:
    size = SIZES[options.size]
    steps = WARM_UP + options.steps
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=strategy_for(options.stages[0], options.devices),
        max_steps=steps,
        callbacks=[Meter(size, options)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Task(size), DataLoader(RandomTokens(size, steps * options.devices), batch_size=size.batch))


def strategy_for(stage: str, devices: int) -> Any:
    if stage == "ddp":
        return "ddp" if devices > 1 else "auto"
    from lightning_zero import ZeroStrategy  # here, so that the peer's memory holds nothing of ours

    number, is_whole = int(stage.removesuffix(WHOLE)), stage.endswith(WHOLE)
    return ZeroStrategy(stage=number, granularity="tensor" if is_whole else "auto")


class RandomTokens(Dataset[Tensor]):
    def __init__(self, size: Size, batches: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(size.vocabulary, (batches * size.batch, size.length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class Task(L.LightningModule):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = model_of(size)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Meter(L.Callback):
    """Times whole steps, from one batch's end to the next one's, and writes what this rank saw."""

    def __init__(self, size: Size, options: argparse.Namespace) -> None:
        self.parameter_bytes = 4 * size.parameters
        self.folder: Path = options.child
        self.steps: int = options.steps
        self.marks: list[Any] = []
        self.wire_before = 0

    def on_train_batch_end(
        self, trainer: L.Trainer, task: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        on_gpu = trainer.strategy.root_device.type == "cuda"
        if trainer.global_step == WARM_UP:
            self.wire_before = bytes_sent(trainer)
        if trainer.global_step >= WARM_UP:
            self.marks.append(cuda_mark() if on_gpu else time.perf_counter())
        if trainer.global_step == WARM_UP + self.steps:
            wire = (bytes_sent(trainer) - self.wire_before) / self.steps / self.parameter_bytes
            found = {
                "seconds": median_interval(self.marks),
                "wire": wire,
                "loss": float(outputs["loss"]),
                **memory(on_gpu),
            }
            (self.folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(found))


def cuda_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def median_interval(marks: list[Any]) -> float:
    if isinstance(marks[0], float):
        return statistics.median(after - before for before, after in itertools.pairwise(marks))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(a) / 1000 for b, a in itertools.pairwise(marks))


def memory(on_gpu: bool) -> dict[str, float]:
    """What this rank holds between two steps, and the most it ever held, in MB."""
    if on_gpu:
        return {"rest_mb": torch.cuda.memory_allocated() / 1e6, "peak_mb": torch.cuda.max_memory_allocated() / 1e6}
    kilobytes = {
        line.split(":")[0]: line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if "kB" in line
    }
    return {"rest_mb": int(kilobytes["VmRSS"]) * 1024 / 1e6, "peak_mb": int(kilobytes["VmHWM"]) * 1024 / 1e6}


def bytes_sent(trainer: L.Trainer) -> int:
    """By all ranks so far. Ours do not use the network on one machine, and count themselves."""
    if hasattr(trainer.strategy, "communication_report"):
        return sum(trainer.strategy.communication_report().values()) * trainer.world_size
    return loopback_bytes()


def loopback_bytes() -> int:
    """Bytes sent over the loopback device since boot, by any process; 0 where the kernel does not tell."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return 0


if __name__ == "__main__":
    sys.exit(main())
