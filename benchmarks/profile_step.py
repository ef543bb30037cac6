"""Where the processor's time of a training step goes: arithmetic, copies, sums, Python and the system, in ms per rank.

    python benchmarks/profile_step.py                                   # the limit, the stages and ddp
    python benchmarks/profile_step.py --size small --contestants 2,ddp

Each contestant of `step_time.py` trains once under `perf record` (Linux), which samples all threads of all ranks. Only
the measured steps count. Needs the tool perf, and a system that allows it.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmark_models import SIZES
from peers import CONTESTANTS

HERE = Path(__file__).parent
RATE = 299  # samples per second of each thread
# The first that matches the name of a function, and of the library that it is in, tells where a sample counts.
PLACES = {
    "copies": r"direct_copy_kernel|memmove|memcpy|_copy_(to|from)_iter",
    "sums": r"_multiarray_umath|FLOAT_(add|divide)",
    "Python": r"libpython|/python[\d.]*\)|libtorch_python|perf-\d+\.map|_(ctypes|socket|struct)\.cpython",
    "system": r"\[kernel",
    "arithmetic": "",
}
SAMPLE = re.compile(r"^\s*\S.*?\s+(?P<process>\d+)/\d+\s+(?P<at>[\d.]+):\s+[0-9a-f]+ (?P<where>.* \(.*\))$")


class Sample(NamedTuple):
    at: float  # s
    process: str
    place: str


def main() -> int:
    options = parse()
    if shutil.which("perf") is None:
        print("Error: perf is not installed. It is in the package linux-tools of most distributions.")
        return 2
    print(f"{'ms per step and rank':<22}" + "".join(f"{place:>12}" for place in PLACES) + f"{'all':>12}")
    for name in options.contestants:
        spent = profile(name, options)
        row = "".join(f"{1000 * spent[place]:>12.0f}" for place in PLACES)
        print(f"{name:<22}{row}{1000 * sum(spent.values()):>12.0f}", flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--contestants", type=lambda text: text.split(","), default=["limit", "1", "2", "3", "ddp"])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if unknown := [name for name in options.contestants if name not in CONTESTANTS]:
        parser.error(f"--contestants has {unknown}; write some of {','.join(CONTESTANTS)}")
    return options


def profile(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Returns seconds per step and rank, by place."""
    with tempfile.TemporaryDirectory() as folder:
        recorded, found = Path(folder, "perf.data"), Path(folder, "found.json")
        command = [sys.executable, str(HERE / "step_time.py"), "--contestants", name, "--rounds", "1"]
        command += ["--size", options.size, "--steps", str(options.steps), "--devices", str(options.devices)]
        command += ["--json", str(found)]
        clock = ["--clockid", "CLOCK_MONOTONIC"]  # that of `time.monotonic`, by which the ranks tell when they measured
        record = ["perf", "record", "--quiet", "--freq", str(RATE), *clock, "--output", str(recorded), "--", *command]
        subprocess.run(record, check=True, capture_output=True)
        told = json.loads(found.read_text())["table"][name]
        return spent_in(samples_in(script_of(recorded)), told, options.devices)


def script_of(recorded: Path) -> str:
    """Returns what perf has recorded as text, a line for each sample."""
    command = ["perf", "script", "--input", str(recorded), "--hide-call-graph"]
    command += ["--fields", "comm,pid,tid,time,ip,sym,dso"]
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace").stdout


def samples_in(script: str) -> Iterator[Sample]:
    for line in script.splitlines():
        if told := SAMPLE.match(line):
            place = next(place for place, pattern in PLACES.items() if re.search(pattern, told["where"]))
            yield Sample(float(told["at"]), told["process"], place)


def spent_in(samples: Iterable[Sample], told: Mapping[str, float], devices: int) -> dict[str, float]:
    """Counts the samples of the ranks, the processes that have worked the most, from the moment when they `began` to
    measure until they `ended`. `seconds` are those of a step."""
    known = [sample for sample in samples if told["began"] <= sample.at <= told["ended"]]
    ranks = [rank for rank, _ in Counter(sample.process for sample in known).most_common(devices)]
    counts = Counter(sample.place for sample in known if sample.process in ranks)
    each = told["seconds"] / (RATE * (told["ended"] - told["began"]) * devices)
    return {place: counts[place] * each for place in PLACES}


if __name__ == "__main__":
    sys.exit(main())
