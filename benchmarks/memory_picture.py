"""Draws the README's picture: model states per GPU under ddp and at each stage, as `lightning-zero plan` counts them.

    python benchmarks/memory_picture.py            # writes docs/memory.svg

The numbers are arithmetic and no measurement; tests/test_estimate.py holds the arithmetic to what an engine allocates.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_zero import Offload
from lightning_zero.pl.table import DDP, plans_for, sized
from lightning_zero.run.forecast import STATES, states_in
from lightning_zero.tiers.ledger import Category

PARAMETERS, RANKS, PRECISION = 7_000_000_000, 8, "bf16-mixed"
OFFLOADED = "stage 3, offload"
COLORS = {
    Category.PARAMETER: "#3f6fb5",
    Category.GRADIENT: "#e0913a",
    Category.MASTER: "#7aa6dd",
    Category.OPTIMIZER_STATE: "#5b9e6f",
    Category.BUCKET: "#b9b9b9",
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lightning_zero",
    "font.family": "sans-serif",
    "font.size": 11,
}


def bars() -> dict[str, Mapping[str, int]]:
    """Bytes by category and tier, a bar each."""
    common = {"ranks": RANKS, "precision": PRECISION}
    plans = plans_for(PARAMETERS, (1, 2, 3), **common)
    plans[OFFLOADED] = plans_for(PARAMETERS, (3,), offload=Offload(optimizer="cpu"), **common)["stage 3"]
    return plans


def label_of(name: str, plan: Mapping[str, int]) -> str:
    """What is written beside a bar."""
    beside = {
        DDP: f" and {sized(plan.get(Category.BUCKET, 0))} of buckets",
        OFFLOADED: f" and {sized(sum(n for category, n in plan.items() if '(host)' in category))} of host memory",
    }
    return sized(states_in(plan)) + beside.get(name, "")


def draw(path: Path) -> None:
    plans = bars()
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.7), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        panel = figure.add_subplot()
        for at, (name, plan) in enumerate(plans.items()):
            left = 0.0
            for category in (*STATES, Category.BUCKET):
                width = plan.get(category, 0) / 1e9
                hatch = "////" if category is Category.BUCKET else None
                panel.barh(at, width, left=left, height=0.62, color=COLORS[category], hatch=hatch, edgecolor="white")
                left += width
            panel.text(left + 1.5, at, label_of(name, plan), va="center")
        panel.axvline(80, color="#444444", linestyle=(0, (4, 3)), linewidth=1, zorder=0)
        panel.text(81, len(plans) - 0.55, "80 GB", color="#444444", va="bottom", fontsize=9)
        panel.set_yticks(range(len(plans)), list(plans))
        panel.set_ylim(len(plans) - 0.4, -0.6)
        panel.set_xlim(0, 190)
        panel.set_xlabel("GB on each GPU")
        panel.set_title(f"{PARAMETERS / 1e9:.0f} billion parameters, AdamW, {PRECISION}, {RANKS} GPUs", loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
        kinds = [Patch(facecolor=color, label=str(category)) for category, color in COLORS.items()]
        panel.legend(handles=kinds, loc="lower right", frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "memory.svg")
    out = parser.parse_args().out
    draw(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
