"""What offload trains, and at what price: the largest GPT under a limit of memory, and seconds per step beside a bound.

    python benchmarks/offload_model.py largest --limit-gb 24 --ways none,2,2+cpu,2+nvme,3+cpu
    python benchmarks/offload_model.py seconds --billions 1,3,7 --ways 2,2+cpu,3+cpu

One device, AdamW, batch 1, clipped to norm 1, on a GPU under bf16 autocast. A way is a stage, or a stage and the tier
of its optimizer state (at stage 3 of its parameters, too); "none" is torch alone. Every trial is a process of its own,
so that one which runs out of memory takes no other along. On a GPU the limit is the CUDA allocator's; on a CPU it is
what the process may take beyond what it has before the model is made (buffers for a disk are 12 buckets: --bucket-mb).

`seconds` measures each rate in the same process and tells the bound: the slowest of forward and backward, the
optimizer's step in its tier, and the copies of gradients and weights between the tiers.
"""

import argparse
import ctypes
import errno
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmark_models import GPT, Size
from lightning_zero.config import Offload, policy_from
from lightning_zero.run.engine import Engine, Options
from lightning_zero.wire.local import LocalComm

WAYS = ("none", "0", "1", "2", "3", "1+cpu", "2+cpu", "3+cpu", "1+nvme", "2+nvme", "3+nvme")
OUT_OF_MEMORY = 3  # exit status of a trial
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
AUTOCAST = torch.bfloat16 if DEVICE.type == "cuda" else None  # which CPUs may only emulate


def main() -> int:
    options = parse()
    if options.child:
        return trial(options)
    found = largest(options) if options.what == "largest" else seconds(options)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    machine = torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor() or platform.machine()
    setting = {"machine": machine, "torch": torch.__version__, "length": options.length, "width": options.width}
    options.json.write_text(json.dumps({"setting": setting, "found": found}, indent=2) + "\n")
    print(f"written to {options.json}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["largest", "seconds"])
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["none", "2", "2+cpu", "3+cpu", "2+nvme"])
    parser.add_argument("--limit-gb", type=float, default=None, help="of memory, 10^9 bytes; default: the device's own")
    parser.add_argument(
        "--billions", type=lambda text: [float(one) for one in text.split(",")], default=[1.0, 3.0, 7.0]
    )
    parser.add_argument("--steps", type=int, default=4, help="measured ones; two more come before")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--width", type=int, default=2048, help="of the model; blocks of 12 x width^2 parameters")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--path", type=Path, default=None, help="folder of the disk; default: the system's")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a trial may take")
    parser.add_argument("--json", type=Path, default=None, help="default: outputs/offload_model-WHAT.json")
    parser.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)  # way and number of blocks
    options = parser.parse_args()
    options.json = options.json or Path("outputs") / f"offload_model-{options.what}.json"
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"--ways has {sorted(unknown)}; write some of {','.join(WAYS)}")
    return options


# --- the parent: which trials ---


def largest(options: argparse.Namespace) -> dict[str, Any]:
    """The number of blocks of each way, to within a sixteenth: doubled until one fails, then bisected."""
    found: dict[str, Any] = {}
    for way in options.ways:
        works, fails, best = 0, 0, None
        while not fails or fails - works > max(1, works // 16):
            depth = (works + fails) // 2 if fails else max(1, 2 * works)
            told = run(way, depth, options)
            if told is None:
                fails = depth
            else:
                works, best = depth, told
        found[way] = best
        print(f"{way:>7}  {'none fits' if best is None else say(best)}", flush=True)
    return found


def seconds(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for billions in options.billions:
        depth = max(1, round(billions * 1e9 / (12 * options.width**2)))
        for way in options.ways:
            told = run(way, depth, options)
            found[f"{billions:g}B {way}"] = told
            print(f"{billions:g}B {way:>7}  {'does not fit' if told is None else say(told)}", flush=True)
    return found


def say(told: dict[str, Any]) -> str:
    said = f"{told['parameters'] / 1e6:9.1f} M parameters, {told['peak'] / 1e9:6.2f} GB at the most"
    said += f", {told['seconds']:7.3f} s/step"
    if "bound" in told:
        parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in told["bound"].items())
        said += f": {told['seconds'] / max(told['bound'].values()):.2f} x the slowest of {parts} s"
    return said


def run(way: str, depth: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """One trial; None where it runs out of memory, or of time."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", way, str(depth)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
    except subprocess.TimeoutExpired:
        print(f"{way} with {depth} blocks took more than {options.timeout:.0f} s", flush=True)
        return None
    if done.returncode in (OUT_OF_MEMORY, -9):  # -9: the system's own answer
        return None
    if done.returncode:
        raise RuntimeError(f"{way} with {depth} blocks failed:\n{done.stdout}{done.stderr}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


# --- a child: one trial ---


def trial(options: argparse.Namespace) -> int:
    way, depth = options.child[0], int(options.child[1])
    limit(options.limit_gb)
    try:
        with tempfile.TemporaryDirectory(dir=options.path) as folder:
            print(json.dumps(measure(way, depth, Path(folder), options)))
    except (torch.OutOfMemoryError, MemoryError):
        return OUT_OF_MEMORY
    except (OSError, RuntimeError) as error:
        if not any(said in str(error) for said in TOO_LITTLE):
            raise
        return OUT_OF_MEMORY
    return 0


# What is said where memory runs out: by torch, by a thread that cannot be started, by the system, and by the engine.
TOO_LITTLE = "can't allocate memory", "can't start new thread", os.strerror(errno.ENOMEM), "needs"
M_ARENA_MAX = -8  # of malloc.h


def limit(gigabytes: float | None) -> None:
    if gigabytes is None:
        return
    if DEVICE.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / torch.cuda.mem_get_info()[1])
        return
    # Which of the threads that read and write allocates first, and has a heap of its own, must not decide what fits.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    status = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + int(gigabytes * 1e9),) * 2)


def measure(way: str, depth: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    model = build(depth, options)
    numel = sum(parameter.numel() for parameter in model.parameters())
    tokens = torch.randint(options.vocabulary, (1, options.length + 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    if way == "none":
        step, forward_and_backward, catch_up = plain(model, optimizer, tokens)
    else:
        engine_options = options_of(way, folder, int(options.bucket_mb * 2**20))
        step, forward_and_backward, catch_up = engine_of(model, optimizer, tokens, int(way[0]), engine_options)
    for _ in range(2):
        step()
    catch_up()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [timed(step) for _ in range(options.steps)]
    catch_up()
    peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else peak_of_process()
    told: dict[str, Any] = {"blocks": depth, "parameters": numel, "peak": peak, "seconds": statistics.mean(times)}
    if options.what == "seconds":
        compute = statistics.median(timed(forward_and_backward) for _ in range(2))
        del model, optimizer, step, forward_and_backward, catch_up
        gc.collect()
        told["bound"] = {"compute": compute} | (bound_of(numel) if "+" in way else {})
    return told


def build(depth: int, options: argparse.Namespace) -> nn.Module:
    """On the host, quickly: what values there are does not matter."""
    size = Size(
        vocabulary=options.vocabulary, width=options.width, depth=depth, heads=options.width // 64 or 1,
        length=options.length, batch=1, parameters=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT(size)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.detach().fill_(1.0 if parameter.dim() == 1 else 0.01)
    return model


Parts = tuple[Callable[[], None], Callable[[], None], Callable[[], None]]  # a step, a pass without one, catch up


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast(DEVICE.type, AUTOCAST, enabled=AUTOCAST is not None):
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Parts:
    model.to(DEVICE)

    def forward_and_backward() -> None:
        optimizer.zero_grad()
        loss_of(model, tokens).backward()

    def step() -> None:
        forward_and_backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step, forward_and_backward, lambda: None


def options_of(way: str, folder: Path, bucket_bytes: int) -> Options:
    stage, _, tier = way.partition("+")
    asked = {"optimizer": tier} | ({"parameters": tier} if stage == "3" else {})
    asked |= {"path": str(folder)} if tier == "nvme" else {}
    offload = policy_from(Offload, asked if tier else None, "offload")
    return Options(offload=offload, autocast_dtype=AUTOCAST, bucket_bytes=bucket_bytes)


def engine_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, stage: int, options: Options
) -> Parts:
    comm = LocalComm(on_device=DEVICE.type == "cuda")
    engine = Engine(model, [optimizer], stage=stage, comm=comm, device=DEVICE, options=options)

    def forward_and_backward() -> None:
        optimizer.zero_grad()
        with engine.forward():
            loss = loss_of(model, tokens)
        with engine.backward():
            loss.backward()

    def step() -> None:
        forward_and_backward()
        engine.gradients.clip_by_norm_(optimizer, 1.0)
        optimizer.step()

    return step, forward_and_backward, engine.catch_up


# --- what the hardware asks for ---


def timed(call: Callable[[], Any]) -> float:
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - begin


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def bound_of(numel: int) -> dict[str, float]:
    """Seconds of torch's fused AdamW on the host, and of the copies between it and a GPU."""
    sample = min(numel, 2**26)
    parameter = nn.Parameter(torch.zeros(sample))
    parameter.grad = torch.ones(sample)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    step = statistics.median(timed(optimizer.step) for _ in range(3)) * numel / sample
    return {"step": step} | ({"copies": copies(numel)} if DEVICE.type == "cuda" else {})


def copies(numel: int) -> float:
    """fp32 gradients to pinned memory of the host, and two-byte weights back: the slower of the two directions."""
    there, here = (
        torch.empty(2**26, dtype=torch.uint8, pin_memory=True),
        torch.empty(2**26, dtype=torch.uint8, device=DEVICE),
    )
    there.copy_(here)
    down = statistics.median(timed(lambda: there.copy_(here, non_blocking=True)) for _ in range(5))
    up = statistics.median(timed(lambda: here.copy_(there, non_blocking=True)) for _ in range(5))
    return max(4 * numel * down, 2 * numel * up) / here.numel()


def peak_of_process() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
