"""Draws a rehearsal: bytes per rank at each stage by category (the ZeRO paper's figure 1, for your model), and bytes on
the device over the places of a step, and how both change with the number of ranks."""

import math
import os
from collections.abc import Sequence
from typing import Any

from lightning_zero.pl.table import ranks_told
from lightning_zero.rehearsal.comparison import COLOURS, OTHER, Comparison, Scaled, in_order
from lightning_zero.rehearsal.memory import Phase
from lightning_zero.rehearsal.rehearsal import Rehearsal

SHADES = {Phase.FORWARD: "#f2f6fa", Phase.BACKWARD: "#fdf3f4", Phase.STEP: "#f1f7f2"}


def draw(path: str | os.PathLike[str], shown: Comparison) -> None:
    """Draws the stages, and beside them the step of the chosen strategy, and that strategy on more ranks and fewer.
    Raises ImportError without matplotlib, which the extra "plots" installs."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A picture needs matplotlib: pip install 'lightning-zero[plots]'.") from error
    chosen = shown.chosen
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    grid = figure.add_gridspec(1, 3, width_ratios=(len(shown.stages), 6, 4))
    states, step = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    _draw_peaks(states, shown)
    states.set_title(f"Most bytes on the device of one of {ranks_told(chosen.ranks)}", fontsize=10)
    _draw_course(step, chosen)
    step.set_title(f"Over a step of {chosen.strategy}", fontsize=10)
    for axes in (states, step):
        axes.set_ylabel("GB")
        axes.spines[["top", "right"]].set_visible(False)
        if chosen.device_bytes is not None:
            axes.axhline(chosen.device_bytes / 1e9, color="black", linewidth=0.8, linestyle="--")
    _draw_growth(figure, grid[2], shown.growth)
    figure.savefig(path, dpi=130)


def _draw_growth(figure: Any, place: Any, growth: Sequence[Scaled]) -> None:
    """Draws a panel for each of bytes, seconds and, if the device is known, throughput, below one another."""
    panels = {
        "GB on the device": [one.rehearsal.peak.nbytes / 1e9 for one in growth],
        "s/step (model)": [one.seconds for one in growth],
    }
    if any(one.throughput is not None for one in growth):
        panels["batches/s of a rank,\ndevice filled (model)"] = [one.throughput or math.nan for one in growth]
    for row, (name, values) in zip(place.subgridspec(len(panels), 1), panels.items(), strict=True):
        axes = figure.add_subplot(row)
        axes.plot([one.ranks for one in growth], values, marker="o", markersize=4, color="#4477aa")
        axes.set_xscale("log", base=2)
        axes.set_xticks([one.ranks for one in growth], [str(one.ranks) for one in growth], fontsize=8)
        axes.set_xlim(0.7 * growth[0].ranks, 1.4 * growth[-1].ranks)
        axes.set_ylim(0, 1.1 * max([value for value in values if value > 0], default=1))  # nan is not
        axes.set_ylabel(name, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ranks, each with the same batch")


def _draw_peaks(axes: Any, shown: Comparison) -> None:
    bars = {name.replace(", ", "\n"): one.peak for name, one in shown.stages.items()}
    below = [0.0] * len(bars)
    for name in shown.categories:
        heights = [peak.device.get(name, 0) / 1e9 for peak in bars.values()]
        if max(heights) > 0.005 * max(peak.nbytes / 1e9 for peak in bars.values()):
            axes.bar(list(bars), heights, bottom=below, label=name, color=COLOURS.get(name, OTHER), width=0.7)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.legend(fontsize=8, frameon=False)
    axes.tick_params(axis="x", labelsize=8)


def _draw_course(axes: Any, chosen: Rehearsal) -> None:
    names = in_order(name for one in chosen.course for name in one.device)
    heights = [[one.device.get(name, 0) / 1e9 for one in chosen.course] for name in names]
    colours = [COLOURS.get(name, OTHER) for name in names]
    axes.stackplot(range(len(chosen.course)), heights, colors=colours, step="mid", linewidth=0)
    axes.set_ylim(0, 1.1 * max([1e-9, *(one.nbytes / 1e9 for one in chosen.course)]))
    axes.set_xlabel("where the rank is, one module after the other")
    for phase, shade in SHADES.items():
        at = [number for number, one in enumerate(chosen.course) if one.phase is phase]
        if at:
            axes.axvspan(min(at) - 0.5, max(at) + 0.5, color=shade, zorder=0)
            axes.annotate(
                str(phase),
                ((min(at) + max(at)) / 2, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, -10),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
