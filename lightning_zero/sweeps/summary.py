"""What a run leaves in its folder, `summary.json`, and what becomes of all of a sweep: a table and a picture."""

import csv
import json
import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SUMMARY = "summary.json"
RUNNING, FINISHED, FAILED = "running", "finished", "failed"
# What is shown of each job: key in its summary, unit; in the table: title, digits; in the picture: title, or None.
MEASURES = (
    ("loss", 1.0, "loss", 4, "validation loss"),
    ("seconds_per_step", 1.0, "s/step", 4, "seconds per step"),
    ("memory_bytes", 1e6, "rest MB", 2, "MB resting on rank 0"),
    ("peak_resident_bytes", 1e6, "peak MB", 0, None),
    ("wire_bytes_per_step", 1e6, "sent MB", 2, "MB sent per step by rank 0"),
)


HATCHES = {"host": "///", "disk": "xxx"}  # of what rests in another tier than the device, in the picture


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of the run in `folder`; empty when there is none."""
    try:
        return json.loads((folder / SUMMARY).read_text())
    except FileNotFoundError:
        return {}


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Replaces the summary in one move, so that a job killed meanwhile leaves the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{SUMMARY}.partial"
    partial.write_text(json.dumps(summary, indent=2, default=str) + "\n")
    partial.replace(folder / SUMMARY)


def open_summary(folder: Path, job: int | None, overrides: Sequence[str]) -> None:
    """Begins the summary of a run that starts in `folder`."""
    write_summary(folder, {"job": job, "overrides": overrides, "status": RUNNING})


def update_summary(folder: Path, **values: Any) -> None:
    """Adds `values` to the summary of the run in `folder`; call it on rank 0.

    The sweep's table has a column for every number and text. Its picture draws ``loss``, ``seconds_per_step``,
    ``memory_bytes`` (category -> bytes) and ``wire_bytes_per_step``.
    """
    write_summary(folder, read_summary(folder) | values)


def collect(sweep_dir: Path) -> list[dict[str, Any]]:
    """The summaries of all jobs in a sweep's folder, in the order of the jobs, each with its folder's name. Other
    programs' files of that name are passed over."""
    found: list[dict[str, Any]] = []
    for folder in (path.parent for path in sweep_dir.rglob(SUMMARY)):
        with suppress(ValueError):
            summary = read_summary(folder)
            if isinstance(summary, dict) and summary.keys() >= {"job", "status", "overrides"}:
                found.append(summary | {"folder": str(folder.relative_to(sweep_dir))})
    return sorted(found, key=lambda job: (job["job"] is None, job["job"], job["folder"]))


def report(jobs: Sequence[Mapping[str, Any]], sweep_dir: Path) -> None:
    """Writes `sweep.csv` and `sweep.png` and prints the table."""
    if not jobs:
        return
    labels = distinct_labels([job["overrides"] for job in jobs])
    write_csv(jobs, sweep_dir / "sweep.csv")
    draw(jobs, labels, sweep_dir / "sweep.png")
    print_table(jobs, labels)
    log.info("Table and picture: %s, %s", sweep_dir / "sweep.csv", sweep_dir / "sweep.png")


def distinct_labels(overrides: Sequence[Sequence[str]]) -> list[str]:
    """What tells each job from the others: its overrides without those that all jobs have."""
    common = set(overrides[0]).intersection(*overrides)
    return [" ".join(item for item in own if item not in common) or f"#{index}" for index, own in enumerate(overrides)]


def write_csv(jobs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One row per job; a column for each value any job has, nested ones as `memory_bytes.gradient`."""
    rows = [_flattened(job) for job in jobs]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
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


def _parts(value: float | Mapping[str, float] | None, unit: float) -> dict[str, float]:
    """A number, or one number for each category, in `unit`; empty for what a job has not reported."""
    parts = value if isinstance(value, Mapping) else {"": value}
    return {category: part / unit for category, part in parts.items() if part is not None}


def print_table(jobs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> None:
    """Prints loss, time, memory and bytes of all jobs."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("#", title="sweep")
    table.add_column("job", min_width=14, overflow="fold")
    for name in ("status", *(title for _, _, title, _, _ in MEASURES)):
        table.add_column(name, justify="right", no_wrap=True)
    for job, label in zip(jobs, labels, strict=True):
        status = Text(job["status"], style="green" if job["status"] == FINISHED else "red")
        shown = [(_parts(job.get(key), unit), digits) for key, unit, _, digits, _ in MEASURES]
        numbers = [f"{sum(parts.values()):.{digits}f}" if parts else "-" for parts, digits in shown]
        table.add_row(str(job["job"]), Text(label), status, *numbers)
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console = Console(width=120)
    console.print(table)


def draw(jobs: Sequence[Mapping[str, Any]], labels: Sequence[str], path: Path) -> None:
    """Draws four panels, one bar per job in each: loss, seconds per step, resting memory by category, bytes sent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2.2 + 0.9 * len(jobs)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharey=True)
    endings = ["" if job["status"] == FINISHED else f" ({job['status']})" for job in jobs]
    names = [label + ending for label, ending in zip(labels, endings, strict=True)]
    drawn = [(key, unit, title) for key, unit, *_, title in MEASURES if title is not None]
    for panel, (key, unit, title) in zip(panels.flat, drawn, strict=True):
        _stack_bars(panel, [_parts(job.get(key), unit) for job in jobs])
        panel.set_title(title)
        panel.set_yticks(range(len(names)), names)
        right = panel.dataLim.x1
        panel.set_xlim(0, 1.25 * right if 0 < right < math.inf else 1.0)  # room for the numbers
    panels[0, 0].invert_yaxis()  # the first job on top; the panels share the axis
    figure.savefig(path, dpi=110)


def _stack_bars(panel: Any, jobs: Sequence[Mapping[str, float]]) -> None:
    """One bar per job, of its parts; what they add up to beside it."""
    lefts = [0.0] * len(jobs)
    categories = list(dict.fromkeys(category for parts in jobs for category, part in parts.items() if part))
    kinds = list(dict.fromkeys(category.partition(" (")[0] for category in categories))
    for category in categories or [""]:
        kind, _, tier = category.removesuffix(")").partition(" (")
        widths = [parts.get(category, 0.0) for parts in jobs]
        color = f"C{kinds.index(kind)}" if kinds else None
        bars = panel.barh(
            range(len(jobs)),
            widths,
            left=lefts,
            label=category,
            color=color,
            hatch=HATCHES.get(tier),
            edgecolor="white",
        )
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    told = [f"{total:.4g}" if parts else "not reported" for parts, total in zip(jobs, lefts, strict=True)]
    panel.bar_label(bars, told, padding=3)
    if any(categories):
        panel.legend(fontsize="small", ncols=3, loc="upper left", bbox_to_anchor=(0.0, 0.0), borderaxespad=2.5)
