"""Draws a rehearsal: bytes per rank at each stage by category (the ZeRO paper's figure 1, for your model), and bytes on
the device over the uses of a step."""

import os
from collections.abc import Mapping
from typing import Any

from lightning_zero.pl.table import ranks_told
from lightning_zero.rehearsal.memory import Phase
from lightning_zero.rehearsal.rehearsal import Module, Rehearsal, rehearse

COLOURS = {
    "parameter": "#4477aa",
    "gradient": "#ee6677",
    "master": "#aa3377",
    "optimizer state": "#228833",
    "bucket": "#bbbbbb",
    "gathered": "#66ccee",
    "activations": "#ccbb44",
    "temporary": "#dddddd",
}
SHADES = {Phase.FORWARD: "#f2f6fa", Phase.BACKWARD: "#fdf3f4", Phase.STEP: "#f1f7f2"}


def draw(path: str | os.PathLike[str], module: Module, batch: Any, chosen: Rehearsal, **setting: Any) -> None:
    """Rehearses the stages, and draws them beside `chosen`, whose step is the second picture.

    Args:
        path: of the picture, in a format that matplotlib writes.
        module: as `rehearse` takes it.
        batch: as `rehearse` takes it.
        chosen: what was rehearsed before.
        setting: what `rehearse` is given besides.

    Raises:
        ImportError: without matplotlib, which the extra "plots" installs.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A picture needs matplotlib: pip install 'lightning-zero[plots]'.") from error
    bars = {}
    for stage in range(4):
        is_chosen = chosen.strategy == f"ZeroStrategy(stage={stage})"
        bars[f"stage {stage}"] = chosen if is_chosen else rehearse(module, batch, stage, **setting)
    if chosen not in bars.values():
        bars[chosen.strategy.removeprefix("ZeroStrategy(").removesuffix(")").replace(", ", "\n")] = chosen
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    states, step = figure.subplots(1, 2, width_ratios=(len(bars), 6))
    _draw_peaks(states, {name: one.peak.device for name, one in bars.items()})
    states.set_title(f"Most bytes on the device of one of {ranks_told(chosen.ranks)}", fontsize=10)
    _draw_course(step, chosen)
    step.set_title(f"Over a step of {chosen.strategy}", fontsize=10)
    for axes in (states, step):
        axes.set_ylabel("GB")
        axes.spines[["top", "right"]].set_visible(False)
        if chosen.device_bytes is not None:
            axes.axhline(chosen.device_bytes / 1e9, color="black", linewidth=0.8, linestyle="--")
    figure.savefig(path, dpi=130)


def _draw_peaks(axes: Any, bars: Mapping[str, Mapping[str, int]]) -> None:
    names = list(dict.fromkeys(name for device in bars.values() for name in device))
    below = [0.0] * len(bars)
    for name in sorted(names, key=lambda name: list(COLOURS).index(name) if name in COLOURS else len(COLOURS)):
        heights = [device.get(name, 0) / 1e9 for device in bars.values()]
        if max(heights) > 0.005 * max(sum(device.values()) / 1e9 for device in bars.values()):
            axes.bar(list(bars), heights, bottom=below, label=name, color=COLOURS.get(name, "#888888"), width=0.7)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.legend(fontsize=8, frameon=False)
    axes.tick_params(axis="x", labelsize=8)


def _draw_course(axes: Any, chosen: Rehearsal) -> None:
    axes.step(range(len(chosen.course)), [nbytes / 1e9 for *_, nbytes in chosen.course], where="mid", color="#4477aa")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("where the rank is, one module after the other")
    for phase, shade in SHADES.items():
        at = [number for number, (one, *_) in enumerate(chosen.course) if one is phase]
        if at:
            axes.axvspan(min(at) - 0.5, max(at) + 0.5, color=shade, zorder=0)
            axes.annotate(
                str(phase),
                ((min(at) + max(at)) / 2, 0),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
