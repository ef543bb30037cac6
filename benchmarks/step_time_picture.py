"""Draws what `step_time.py` has measured: seconds per step against memory at rest, a point for each contestant.

python benchmarks/step_time_picture.py outputs/step_time-large.json       # writes outputs/step_time-large.svg
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from peers import CONTESTANTS

COLORS = {"ours": "#3f6fb5", "Lightning": "#7a4fa3", "torch": "#e0913a", "DeepSpeed": "#5b9e6f", "limit": "#8a8a8a"}
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11}
POINT = 6.0  # points: how far around a contestant nothing is written
# Where its name is tried, in points from it: beside it first, then farther.
PLACES = [(9 * far, dy) for far in (1, -1) for dy in (0, 8, -8, 16, -16, 26, -26, 38, -38)]


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws the report that `step_time.py` writes into `path`, a `.svg` or `.png`."""
    table, setting = report["table"], report["setting"]
    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, 5.6), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        panel = figure.add_subplot()
        for family, color in COLORS.items():
            rows = [row for name, row in table.items() if CONTESTANTS[name].family == family]
            if rows:
                x, y = [row["rest_mb"] for row in rows], [row["seconds"] for row in rows]
                ends = (
                    [row["seconds"] - row["seconds_min"] for row in rows],
                    [row["seconds_max"] - row["seconds"] for row in rows],
                )
                panel.errorbar(x, y, yerr=ends, fmt="o", color=color, elinewidth=1, label=family)
        panel.set_xlabel("MB of the largest rank between two steps")
        panel.set_ylabel("seconds per step")
        millions = setting["parameters"] / 1e6
        panel.set_title(f"{millions:.3g} million parameters on {setting['devices']} x {setting['device']}", loc="left")
        panel.margins(0.16, 0.12)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
        if table:
            figure.legend(frameon=False, loc="outside lower center", ncols=len(COLORS))
        write_names(figure, panel, table)
        figure.savefig(path, dpi=110)


def write_names(figure: Figure, panel: Any, table: dict[str, dict[str, float]]) -> None:
    """Writes each name beside its point, where no other name is, and no point with the bar of its rounds."""
    figure.draw_without_rendering()  # now it is known where points lie
    figure.set_layout_engine("none")
    around = POINT * figure.dpi / 72
    bars = [[(row["rest_mb"], row[end]) for end in ("seconds_min", "seconds_max")] for row in table.values()]
    taken = [Bbox(panel.transData.transform(bar)).padded(around) for bar in bars]
    for name, row in table.items():
        text = free_place(figure, panel, name, (row["rest_mb"], row["seconds"]), taken)
        taken.append(Text.get_window_extent(text))


def free_place(figure: Figure, panel: Any, name: str, at: tuple[float, float], taken: list[Bbox]) -> Text:
    """Writes the name at the first of `PLACES` in the figure where nothing is, or at the last."""
    color, label = COLORS[CONTESTANTS[name].family], f"stage {name}" if name[0].isdigit() else name
    for dx, dy in PLACES:
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.6} if abs(dy) > 8 else None
        text: Text = panel.annotate(
            label, at, (dx, dy), textcoords="offset points", ha="left" if dx > 0 else "right", va="center",
            color=color, arrowprops=line,
        )  # fmt: skip
        text.update_positions(figure.canvas.get_renderer())  # type: ignore[attr-defined]
        box = Text.get_window_extent(text)  # of the name alone, without its line
        is_inside = figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        if (dx, dy) == PLACES[-1] or (is_inside and not any(box.overlaps(other) for other in taken)):
            break
        text.remove()
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, default=None, help="default: beside the report")
    options = parser.parse_args()
    out = options.out or options.report.with_suffix(".svg")
    draw(json.loads(options.report.read_text()), out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
