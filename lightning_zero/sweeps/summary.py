"""`summary.json`, which each run leaves in its folder, and the table and the picture of all summaries of a sweep."""

import csv
import json
import logging
import math
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import fill, wrap
from typing import Any, NamedTuple

from lightning_zero.pl.table import aligned

log = logging.getLogger(__name__)

SUMMARY = "summary.json"
RUNNING, FINISHED, FAILED = "running", "finished", "failed"
HATCHES = {"host": "///", "disk": "xxx"}  # of bars in the picture, by tier; bytes on the device have none
BASELINES = ("DDPStrategy", "SingleDeviceStrategy")  # Lightning's strategies, with which the others are compared
LABEL = 32  # characters in a line of a job's name, in the picture


class Measure(NamedTuple):
    """A value that is shown of each job."""

    key: str  # in the job's summary; a nested key is written as in `sweep.csv`
    column: str  # in the table
    title: str | None = None  # of the panel in the picture; None: no panel
    is_bytes: bool = False


# Each row shows the first of its measures that any job has, or none.
MEASURES = (
    (
        Measure("loss", "loss", "validation loss"),
        Measure("return_value", "returned", "value that the job returned"),
        Measure("metrics.val_loss", "val_loss", "val_loss"),
    ),
    (
        Measure("seconds_per_step", "s/step", "seconds per step"),
        Measure("seconds", "seconds", "seconds of the whole job"),
    ),
    (Measure("memory_bytes", "at rest", "at rest on rank 0", is_bytes=True),),
    (
        Measure("peak_device_bytes", "peak", None, is_bytes=True),
        Measure("peak_resident_bytes", "peak", None, is_bytes=True),
    ),
    (Measure("wire_bytes_per_step", "sent", "sent per step by rank 0", is_bytes=True),),
)


def read_summary(folder: Path) -> dict[str, Any]:
    """Returns the summary of the run in `folder`; empty when there is none."""
    try:
        return json.loads((folder / SUMMARY).read_text())
    except FileNotFoundError:
        return {}


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Replaces the summary atomically, so that a job killed meanwhile leaves the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{SUMMARY}.partial"
    partial.write_text(json.dumps(summary, indent=2, default=_plain) + "\n")
    partial.replace(folder / SUMMARY)


def _plain(value: Any) -> Any:
    """Returns the number in a tensor or an array of one element, as logged metrics are, and the text of all else."""
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):
        if isinstance(number := value.item(), int | float):
            return number
    return str(value)


def open_summary(folder: Path, job: int | None, overrides: Sequence[str]) -> None:
    """Writes the first summary of a run that starts in `folder`."""
    write_summary(folder, {"job": job, "overrides": overrides, "status": RUNNING})


def update_summary(folder: Path, **values: Any) -> None:
    """Adds `values` to the summary of the run in `folder`; call it on rank 0.

    `sweep.csv` has a column for every number and text. The printed table and the picture show ``loss`` (or the value
    that the job returned), and the values from `ZeroMonitor`: ``seconds_per_step`` (or the job's ``seconds``),
    ``memory_bytes`` (category -> bytes), ``wire_bytes_per_step``.
    """
    write_summary(folder, read_summary(folder) | values)


def collect(sweep_dir: Path) -> list[dict[str, Any]]:
    """Returns the summaries of all jobs in a sweep's folder, in the order of the jobs, each with its folder's name.
    Skips files of that name that other programs have written."""
    found: list[dict[str, Any]] = []
    for folder in (path.parent for path in sweep_dir.rglob(SUMMARY)):
        with suppress(ValueError):
            summary = read_summary(folder)
            if isinstance(summary, dict) and summary.keys() >= {"job", "status", "overrides"}:
                found.append(summary | {"folder": str(folder.relative_to(sweep_dir))})
    return sorted(found, key=lambda job: (job["job"] is None, job["job"], job["folder"]))


def report(jobs: Sequence[Mapping[str, Any]], sweep_dir: Path) -> None:
    """Writes `sweep.csv` and, where matplotlib is installed, `sweep.png`, and prints the table."""
    if not jobs:
        return
    labels = distinct_labels([job["overrides"] for job in jobs])
    table, picture = sweep_dir / "sweep.csv", sweep_dir / "sweep.png"
    write_csv(jobs, table)
    try:
        draw(jobs, labels, picture)
    except ModuleNotFoundError as missing:
        log.warning("No picture: %s is not installed (pip install 'lightning-zero[plots]')", missing.name)
    print_table(jobs, labels)
    if picture.exists():
        log.info("Table and picture: %s, %s", table, picture)
    else:
        log.info("Table: %s", table)


def distinct_labels(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Returns a label for each job: its overrides, without those that all jobs have."""
    common = set(overrides[0]).intersection(*overrides)
    return [" ".join(item for item in own if item not in common) or f"#{index}" for index, own in enumerate(overrides)]


def write_csv(jobs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a row for each job, and a column for each value that any job has. A nested value's column is named like
    `memory_bytes.gradient`."""
    rows = [_flattened(job) for job in jobs]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _flattened(job: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in job.items():
        if isinstance(value, Mapping):
            row |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            row[key] = shlex.join(map(str, value)) if isinstance(value, list) else value
    return row


def parts_of(job: Mapping[str, Any], measure: Measure) -> dict[str, float]:
    """Returns a number for each category, or a single one under ""; nothing for what the job has not reported."""
    value = _value_of(job, measure)
    parts = value if isinstance(value, Mapping) else {"": value}
    numbers = {name: part for name, part in parts.items() if isinstance(part, int | float) and math.isfinite(part)}
    return {name: float(part) for name, part in numbers.items() if part or not name}


def _value_of(job: Mapping[str, Any], measure: Measure) -> Any:
    return _flattened(job).get(measure.key) if "." in measure.key else job.get(measure.key)


def _without_number(job: Mapping[str, Any], measure: Measure, absent: str) -> str:
    """Returns what is shown where `parts_of` has nothing: "nan" or "inf" of a job that has diverged, or `absent`."""
    return str(value) if isinstance(value := _value_of(job, measure), float) else absent


def measures_of(jobs: Sequence[Mapping[str, Any]]) -> list[Measure]:
    """Returns the measures to show: those that these jobs have reported, be it as NaN."""

    def is_reported(measure: Measure) -> bool:
        return any(parts_of(job, measure) or _without_number(job, measure, "") for job in jobs)

    found = (next(filter(is_reported, row), None) for row in MEASURES)
    return [measure for measure in found if measure is not None]


def scale_of(measure: Measure, jobs: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Returns the size and the name of the unit in which to show a measure."""
    largest = max((sum(parts_of(job, measure).values()) for job in jobs), default=0.0)
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (0.0, "B")) if measure.is_bytes else ((0.0, ""),)
    return next((size or 1.0, name) for size, name in units if largest >= size)


def baselines_of(jobs: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """Returns, for each job, the index of the job that trains the same under a strategy of Lightning, or None."""

    def others(job: Mapping[str, Any]) -> set[str]:
        return {item for item in job["overrides"] if not item.lstrip("+").startswith("strategy")}

    own = [at for at, job in enumerate(jobs) if job.get("strategy_class") in BASELINES and job["status"] == FINISHED]
    return [next((at for at in own if others(jobs[at]) == others(job)), None) for job in jobs]


def print_table(jobs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> None:
    """Prints loss, time, memory and bytes of each job: a line for each, or a paragraph if a line would be too long."""
    units = [(measure, *scale_of(measure, jobs)) for measure in measures_of(jobs)]
    rows = [["#", "job", "status", *(measure.column for measure, _, _ in units)]]
    for job, label in zip(jobs, labels, strict=True):
        totals = [(parts_of(job, measure), measure, size, unit) for measure, size, unit in units]
        numbers = [
            f"{sum(parts.values()) / size:.4g} {unit}".rstrip() if parts else _without_number(job, measure, "-")
            for parts, measure, size, unit in totals
        ]
        rows.append([str(job["job"]), label, job["status"], *numbers])
    width = shutil.get_terminal_size(fallback=(120, 24)).columns  # the fallback is for files and pipes
    lines = aligned(rows, left=2)
    if max(map(len, lines)) > width:
        lines = [line for row in rows[1:] for line in _paragraph(rows[0], row, width)]
    encoding = sys.stdout.encoding or "utf-8"  # it may lack characters of the overrides
    print("\n".join([title_of(jobs), *lines]).encode(encoding, "backslashreplace").decode(encoding))


def _paragraph(columns: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """Returns a row of the table in lines of at most `width`, without the values that the job lacks."""
    number, label, status, *values = row
    told = ", ".join(f"{name} {value}" for name, value in zip(columns[3:], values, strict=True) if value != "-")
    head = wrap(f"#{number} {label}: {status}", width, subsequent_indent="    ")
    return head + wrap(told, width, initial_indent="    ", subsequent_indent="    ")


def title_of(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the model's size and the number of ranks, as far as jobs have told them, or "sweep"."""
    told = []
    for key, noun in (("parameters", "parameter"), ("world_size", "rank")):
        if found := sorted({job[key] for job in jobs if isinstance(job.get(key), int)}):
            numbers = " to ".join(f"{number:,}" for number in dict.fromkeys((found[0], found[-1])))
            told.append(f"{numbers} {noun if found == [1] else noun + 's'}")
    return " on ".join(told) or "sweep"


def draw(jobs: Sequence[Mapping[str, Any]], labels: Sequence[str], path: Path) -> None:
    """Draws a panel of bars, one for each job, for each measure, and a panel of time against memory."""
    from matplotlib.figure import Figure

    measures = [measure for measure in measures_of(jobs) if measure.title is not None]
    by_key = {measure.key: measure for measure in measures}
    time, memory = by_key.get("seconds_per_step") or by_key.get("seconds"), by_key.get("memory_bytes")
    if not measures:
        return
    count = len(measures) + (time is not None and memory is not None)
    rows = math.ceil(count / 2)
    figure = Figure(figsize=(13, 0.8 + rows * (1.3 + 0.45 * len(jobs))), layout="constrained")
    figure.suptitle(title_of(jobs), fontsize="x-large")
    grid = figure.add_gridspec(rows, 2)
    places = [grid[at // 2, at % 2] for at in range(count)]
    if count % 2:
        places[-1] = grid[rows - 1, :]  # the last panel of an odd number takes the whole row
    panels = [figure.add_subplot(place) for place in places]
    numbers = [f"#{job['job']}" for job in jobs]
    endings = ["" if job["status"] == FINISHED else f" ({job['status']})" for job in jobs]
    names = [fill(f"{number} {label}{end}", LABEL) for number, label, end in zip(numbers, labels, endings, strict=True)]
    for at, measure in enumerate(measures):
        compares = measure.is_bytes or measure is time
        _draw_bars(panels[at], measure, jobs, baselines_of(jobs) if compares else [])
        panels[at].set_yticks(range(len(jobs)), numbers if at % 2 else names)
    if time is not None and memory is not None:
        _scatter(panels[-1], jobs, time, memory)
    figure.savefig(path, dpi=110)


def _draw_bars(
    panel: Any, measure: Measure, jobs: Sequence[Mapping[str, Any]], baselines: Sequence[int | None]
) -> None:
    """Draws one measure of all jobs, the first job on top: a bar for each, of its parts, and next to it their sum and
    its ratio to the job's baseline."""
    size, unit = scale_of(measure, jobs)
    scaled = [{name: part / size for name, part in parts_of(job, measure).items()} for job in jobs]
    lefts = [0.0] * len(jobs)
    categories = list(dict.fromkeys(category for parts in scaled for category, part in parts.items() if part))
    kinds = list(dict.fromkeys(category.partition(" (")[0] for category in categories))
    for category in categories or [""]:
        kind, _, tier = category.removesuffix(")").partition(" (")
        widths = [parts.get(category, 0.0) for parts in scaled]
        look = {"color": f"C{kinds.index(kind)}" if kinds else None, "hatch": HATCHES.get(tier), "edgecolor": "white"}
        bars = panel.barh(range(len(jobs)), widths, left=lefts, label=category, **look)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    told = [
        f"{total:.4g}" if parts else _without_number(job, measure, "not reported")
        for job, parts, total in zip(jobs, scaled, lefts, strict=True)
    ]
    beside = "ddp" if any(job.get("strategy_class") == BASELINES[0] for job in jobs) else "auto"
    for at, baseline in enumerate(baselines):
        if baseline is not None and baseline != at and scaled[at] and lefts[baseline]:
            told[at] += f"  ({lefts[at] / lefts[baseline]:.2f} x {beside})"
    panel.bar_label(bars, told, padding=3, fontsize="small")
    if any(categories):
        panel.legend(fontsize="small", ncols=3, loc="upper left", bbox_to_anchor=(0.0, 0.0), borderaxespad=2.5)
    panel.set_title(f"{measure.title}{', ' if unit else ''}{unit}")
    panel.invert_yaxis()
    right = panel.dataLim.x1
    panel.set_xlim(0, 1.6 * right if 0 < right < math.inf else 1.0)  # room for the numbers


def _scatter(panel: Any, jobs: Sequence[Mapping[str, Any]], time: Measure, memory: Measure) -> None:
    """Draws a point for each job that has both measures."""
    size, unit = scale_of(memory, jobs)
    points = [
        (sum(parts_of(job, memory).values()) / size, sum(parts_of(job, time).values()), f"#{job['job']}")
        for job in jobs
        if parts_of(job, memory) and parts_of(job, time)
    ]
    right = max((across for across, _, _ in points), default=0.0) or 1.0
    top = max((up for _, up, _ in points), default=0.0) or 1.0
    named: list[tuple[float, float, list[str]]] = []  # points that almost coincide share a label
    for across, up, name in points:
        panel.plot(across, up, "o", color="C0")
        near = (names for x, y, names in named if abs(x - across) < 0.04 * right and abs(y - up) < 0.08 * top)
        if (names := next(near, None)) is None:
            named.append((across, up, names := []))
        names.append(name)
    for across, up, names in named:
        label = fill(", ".join(names), LABEL)
        panel.annotate(label, (across, up), xytext=(6, 4), textcoords="offset points", fontsize="small")
    panel.set_title("time against memory")
    panel.set_xlabel(f"{memory.title}, {unit}")
    panel.set_ylabel(time.title)
    panel.set_xlim(0, 1.1 * right)
    panel.set_ylim(0, 1.2 * top)
