"""What a run leaves in its folder, `summary.json`, and what becomes of all of a sweep: a table and a picture."""

import csv
import json
import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SUMMARY = "summary.json"
RUNNING, FINISHED, FAILED = "running", "finished", "failed"


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


def update_summary(folder: Path, **values: Any) -> None:
    """Adds `values` to the summary of the run in `folder`; call it on rank 0.

    The sweep's table has a column for every number and text. Its picture draws ``loss``, ``seconds_per_step``,
    ``memory_bytes`` (category -> bytes) and ``wire_bytes_per_step``.
    """
    write_summary(folder, read_summary(folder) | values)


def collect(sweep_dir: Path) -> list[dict[str, Any]]:
    """The summaries of all jobs in a sweep's folder, in the order of the jobs, each with its folder's name. Other
    programs' files of that name are passed over."""
    folders = [path.parent for path in sweep_dir.rglob(SUMMARY)]
    found = [
        summary | {"folder": str(folder.relative_to(sweep_dir))}
        for folder in folders
        if (summary := _summary_in(folder)) is not None
    ]
    return sorted(found, key=lambda job: (job["job"] is None, job["job"], job["folder"]))


def _summary_in(folder: Path) -> dict[str, Any] | None:
    try:
        found = read_summary(folder)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.keys() >= {"job", "status", "overrides"} else None


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


def memory_total(job: Mapping[str, Any]) -> int | None:
    """Bytes resting on a rank, all categories together."""
    return sum(job["memory_bytes"].values()) if job.get("memory_bytes") else None


def print_table(jobs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> None:
    """Prints loss, time, memory and bytes of all jobs."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("#", title="sweep")
    table.add_column("job", min_width=14, overflow="fold")
    for name in ("status", "loss", "s/step", "rest MB", "peak MB", "sent MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for job, label in zip(jobs, labels, strict=True):
        table.add_row(
            str(job["job"]),
            Text(label),
            Text(job["status"], style="green" if job["status"] == FINISHED else "red"),
            _shown(job.get("loss"), digits=4),
            _shown(job.get("seconds_per_step"), digits=4),
            _shown(memory_total(job), unit=1e6, digits=2),
            _shown(job.get("peak_resident_bytes"), unit=1e6, digits=0),
            _shown(job.get("wire_bytes_per_step"), unit=1e6, digits=2),
        )
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console = Console(width=120)
    console.print(table)


def _shown(value: float | None, *, digits: int, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def draw(jobs: Sequence[Mapping[str, Any]], labels: Sequence[str], path: Path) -> None:
    """Draws four panels, one bar per job in each: loss, seconds per step, resting memory by category, bytes sent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2.2 + 0.9 * len(jobs)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharey=True)
    endings = ["" if job["status"] == FINISHED else f" ({job['status']})" for job in jobs]
    names = [label + ending for label, ending in zip(labels, endings, strict=True)]
    _bars(panels[0, 0], names, "validation loss", [job.get("loss") for job in jobs])
    _bars(panels[0, 1], names, "seconds per step", [job.get("seconds_per_step") for job in jobs])
    _stacked_bars(panels[1, 0], names, "MB resting on rank 0", [job.get("memory_bytes") or {} for job in jobs])
    sent = [job.get("wire_bytes_per_step") for job in jobs]
    _bars(panels[1, 1], names, "MB sent per step by rank 0", [None if size is None else size / 1e6 for size in sent])
    panels[0, 0].invert_yaxis()  # the first job on top; the panels share the axis
    figure.savefig(path, dpi=110)


def _bars(panel: Any, names: Sequence[str], title: str, values: Sequence[float | None]) -> None:
    bars = panel.barh(range(len(names)), [value or 0.0 for value in values], color="tab:blue")
    panel.bar_label(bars, ["not reported" if value is None else f"{value:.4g}" for value in values], padding=3)
    _finish_panel(panel, names, title)


def _stacked_bars(panel: Any, names: Sequence[str], title: str, parts: Sequence[Mapping[str, float]]) -> None:
    lefts = [0.0] * len(names)
    for category in dict.fromkeys(category for part in parts for category in part):
        widths = [part.get(category, 0) / 1e6 for part in parts]
        panel.barh(range(len(names)), widths, left=lefts, label=category)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for row, (part, right) in enumerate(zip(parts, lefts, strict=True)):
        panel.text(right, row, f" {right:.4g}" if part else " not reported", va="center")
    if any(parts):
        panel.legend(fontsize="small", ncols=3, loc="upper left", bbox_to_anchor=(0.0, -0.1))
    _finish_panel(panel, names, title)


def _finish_panel(panel: Any, names: Sequence[str], title: str) -> None:
    panel.set_title(title)
    panel.set_yticks(range(len(names)), names)
    right = panel.dataLim.x1
    panel.set_xlim(0, 1.25 * right if 0 < right < math.inf else 1.0)  # room for the numbers
