"""What a rank measures of its training steps: seconds, memory and bytes on the wire."""

import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3  # steps before anything is measured


class Meter:
    """Times whole steps, from the end of one to the end of the next, and writes what this rank saw.

    Args:
        folder: gets `rank-R.json` after the last step.
        steps: measured ones, after `WARM_UP` others.
        parameter_bytes: of the whole model, for what is sent in relation to it.
        sent: bytes that all ranks have sent so far.
    """

    def __init__(
        self, folder: Path, *, rank: int, steps: int, parameter_bytes: int, on_gpu: bool, sent: Callable[[], int]
    ) -> None:
        self.file = folder / f"rank-{rank}.json"
        self.steps = steps
        self.parameter_bytes = parameter_bytes
        self.on_gpu = on_gpu
        self.sent = sent
        self.marks: list[Any] = []
        self.worked: list[float] = []  # s of the processor, in all threads
        self.rests: list[float] = []  # MB at the end of each step
        self.sent_before = 0
        self.began = 0.0  # s, of `time.monotonic`

    def end_step(self, number: int, loss: Tensor) -> None:
        """Is called at the end of each step; the first is number 1. `loss` is this rank's, a scalar."""
        if number == WARM_UP:
            self.sent_before, self.began = self.sent(), time.monotonic()
        if number >= WARM_UP:
            self.marks.append(cuda_mark() if self.on_gpu else time.perf_counter())
            self.worked.append(time.process_time())
            self.rests.append(memory(self.on_gpu)["rest_mb"])
        if number == WARM_UP + self.steps:
            sent = (self.sent() - self.sent_before) / self.steps
            found = {
                "seconds": median_interval(self.marks),
                "processor": median_interval(self.worked),
                "began": self.began,
                "ended": time.monotonic(),
                "wire": sent / self.parameter_bytes,
                "loss": float(loss),
                **memory(self.on_gpu),
                "rest_mb": statistics.mean(self.rests),
            }
            self.file.write_text(json.dumps(found))


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
    """What this rank holds now, between two steps, and the most it ever held, in MB."""
    if on_gpu:
        return {"rest_mb": torch.cuda.memory_allocated() / 1e6, "peak_mb": torch.cuda.max_memory_allocated() / 1e6}
    kilobytes = {
        line.split(":")[0]: line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if "kB" in line
    }
    return {"rest_mb": int(kilobytes["VmRSS"]) * 1024 / 1e6, "peak_mb": int(kilobytes["VmHWM"]) * 1024 / 1e6}


def loopback_bytes() -> int:
    """Bytes sent over the loopback device since boot, by any process; 0 where the kernel does not tell."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return 0
