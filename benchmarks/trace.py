"""Draws one training step, from its call of `optimizer.step` to the next: what a rank computes, sends and copies, and
what is hidden behind what.

    python benchmarks/trace.py --ways 1,2,3,3+cpu --ranks 2

A way is a stage, or a stage and the tier of its optimizer state; "3+cpu+parameters" has its parameters there, too.

Without a GPU the step runs on the simulated device of the tests (`tests/sim`), in simulated time: order and waits are
those of the engine, durations come from the rates below, which belong to no machine. With `--device cuda` torch's
profiler records a real step, on one GPU. Writes `trace.json`, for chrome://tracing or Perfetto, and `trace.png`.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from lightning_zero.wire.native import make_comm

ROOT = Path(__file__).parent.parent
LANES = ("host", "compute", "communication", "beside compute")  # from top to bottom
COLORS = {"host": "tab:green", "compute": "tab:blue", "communication": "tab:orange", "beside compute": "tab:purple"}
WARM_UP = 3  # steps before the one that is drawn: the order of modules is known then
SIZES_ON = {"sim": (64, 256), "cuda": (2048, 4096)}  # width and tokens: what keeps the device busy
# The simulated model is tiny, and so are the rates: compute and communication of a step take about as long as one
# another, as those of a large model do on GPUs.
RATES = {"flops": 8e9, "memory": 2e9, "copies": 1e8, "link": 1e8, "host": 1e9}


WAYS: dict[str, tuple[int, Offload | None]] = {
    **{str(stage): (stage, None) for stage in range(4)},
    **{f"{stage}+cpu": (stage, Offload("cpu")) for stage in range(1, 4)},
    "3+cpu+parameters": (3, Offload("cpu", parameters="cpu")),
}


class Span(NamedTuple):
    rank: str
    lane: str
    name: str
    start: float  # s
    end: float


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main() -> None:
    options = parse()
    record = on_gpu if options.device == "cuda" else on_sim
    steps = {way: record(way, options) for way in options.ways}
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "trace.json").write_text(json.dumps(as_chrome(steps)))
    unit = "ms" if options.device == "cuda" else "ms of simulated time"
    draw(steps, options.folder / "trace.png", unit)
    for way, spans in steps.items():
        print(f"{title_of(way)}\n{summary(spans)}")
    print(f"written to {options.folder / 'trace.json'} and trace.png")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["sim", "cuda"], default="sim")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["1", "2", "3", "3+cpu"])
    parser.add_argument("--ranks", type=int, default=2, help="simulated ones; a GPU is one rank")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=None, help="default: 64, and 2048 on a GPU")
    parser.add_argument("--tokens", type=int, default=None, help="default: 256, and 4096 on a GPU")
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "trace")
    options = parser.parse_args()
    if unknown := [way for way in options.ways if way not in WAYS]:
        parser.error(f"--ways has {unknown}; write some of {','.join(WAYS)}")
    width, tokens = SIZES_ON[options.device]
    options.width, options.tokens = options.width or width, options.tokens or tokens
    return options


def title_of(way: str) -> str:
    stage, *there = way.split("+")
    kept = {0: "", 1: ", optimizer on the host", 2: ", optimizer and parameters on the host"}
    return f"stage {stage}{kept[len(there)]}: one step of rank 0"


def train(
    device: torch.device, comm: Comm, way: str, options: argparse.Namespace, recording: Callable[[], Any]
) -> None:
    """Trains a few steps, and inside `recording()` from one call of `optimizer.step` to the next."""
    model = nn.Sequential(*(Block(options.width) for _ in range(options.blocks)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    stage, offload = WAYS[way]
    setting = Options(
        offload=offload,
        prefetch=options.prefetch,
        bucket_bytes=16 * options.width**2,  # half of a block's gradients
        unit_classes=(Block,),
        late_publish_bytes=0,  # as in a large model
    )
    engine = Engine(model, [optimizer], stage=stage, comm=comm, device=device, options=setting)
    data = torch.randn(options.tokens, options.width, pin_memory=True) if device.type == "cuda" else None

    def average() -> None:
        x = torch.randn(options.tokens, options.width, device=device) if data is None else data.to(device)
        with engine.forward():
            loss = model(x).square().mean()
        with engine.backward():
            loss.backward()
        if options.clip:
            engine.gradients.clip_by_norm_(optimizer, 1.0)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        average()
        step()
    average()
    with recording():  # the next forward hides what a step sends, and belongs to it
        step()
        average()
    step()
    engine.catch_up()
    engine.close()


# -- where the spans come from


def on_sim(way: str, options: argparse.Namespace) -> list[Span]:
    sys.path.insert(0, str(ROOT / "tests"))
    os.environ["LIGHTNING_ZERO_ONLY_TCP"] = "1"  # ranks that are threads cannot be told apart by their process
    from sim import device, group, streams  # type: ignore[import-not-found]

    found: list[Span] = []

    @contextmanager
    def recording() -> Iterator[None]:
        host = streams.this_host()
        began = host.at = max([host.at, *(stream.at for stream in streams.Stream.known.values())])
        yield
        ended = host.at
        streams.synchronize()
        found.extend(
            Span(span.rank, span.lane, span.name, span.start - began, span.end - began)
            for span in list(streams.State.spans)
            if span.rank == host.name and span.start >= began and span.start <= ended
        )

    def on_rank(_: int) -> None:
        comm = make_comm(device.DEVICE, timedelta(seconds=60), backend="sim")
        with device.HostWatch():
            train(device.DEVICE, comm, way, options, recording)

    streams.State.rates = streams.Rates(**RATES)
    group.run_ranks(options.ranks, on_rank)
    return [span for span in found if span.rank == "rank 0" and span.lane in LANES]


def on_gpu(way: str, options: argparse.Namespace) -> list[Span]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        torch.ones(1, device="cuda").add_(1).item()  # the first one in a process begins with a pause of some 60 ms
    profiler = torch.profiler.profile(activities=activities)
    train(torch.device("cuda"), LocalComm(on_device=True), way, options, lambda: profiler)
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    began = min(event.time_range.start for event in events)
    spans = []
    for event in events:
        lane = "communication" if "nccl" in event.name.lower() else "compute"
        lane = "beside compute" if "memcpy" in event.name.lower() else lane
        start, end = ((at - began) / 1e6 for at in (event.time_range.start, event.time_range.end))
        spans.append(Span("rank 0", lane, event.name, start, end))
    return spans


# -- what is made of them


def as_chrome(steps: dict[str, list[Span]]) -> dict[str, Any]:
    return {
        "traceEvents": [
            {
                "name": span.name, "ph": "X", "pid": f"{way}: {span.rank}", "tid": span.lane,
                "ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start),
            }
            for way, spans in steps.items()
            for span in spans
        ]
    }  # fmt: skip


def summary(spans: list[Span]) -> str:
    """How busy each lane is, and how much of it lies beside compute."""
    by_lane = defaultdict(list)
    for span in spans:
        by_lane[span.lane].append((span.start, span.end))
    length = max(span.end for span in spans)
    lines = [f"{'lane':16} {'busy, ms':>9} {'of the step':>12} {'beside compute':>15}"]
    for lane in LANES:
        merged = merge(by_lane[lane])
        busy = total(merged)
        hidden = total(intersect(merged, merge(by_lane["compute"])))
        beside = "" if lane == "compute" or not busy else f"{hidden / busy:15.0%}"
        lines.append(f"{lane:16} {1e3 * busy:9.2f} {busy / length:12.0%} {beside:>15}")
    return "\n".join(lines)


Intervals = list[tuple[float, float]]


def merge(intervals: Intervals) -> Intervals:
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(one: Intervals, other: Intervals) -> Intervals:
    found = [(max(a, c), min(b, d)) for a, b in one for c, d in other]
    return [(start, end) for start, end in found if start < end]


def total(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


def draw(steps: dict[str, list[Span]], path: Path, unit: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(
        len(steps), figsize=(12, 0.8 + 2.0 * len(steps)), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, (way, spans) in zip(rows.flat, steps.items(), strict=True):
        for row, lane in enumerate(LANES):
            bars = [(1e3 * span.start, 1e3 * (span.end - span.start)) for span in spans if span.lane == lane]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=COLORS[lane], edgecolor="white", linewidth=0.2)
        axes.set_yticks(range(len(LANES)), LANES)
        axes.invert_yaxis()
        axes.set_title(title_of(way), loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    rows.flat[-1].set_xlabel(unit)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
