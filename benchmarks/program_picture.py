"""Draws what a rank does in one training step at stages 1, 2, 3 and 3 with offload, as `ZeroStrategy.program` says.

    python benchmarks/program_picture.py            # writes docs/program.svg
    python benchmarks/program_picture.py --print    # writes the programs themselves

A column is a use: what user code does. The picture says what is done when, not how long it takes. The ranks are
imagined: a program needs none.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from torch import nn

from lightning_zero import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.program import Cause, Kind, Op, Program
from lightning_zero.wire.local import CountingComm

BLOCKS, WIDTH, RANKS = 5, 64, 8
WARM_UP = 4  # steps before one is like the next
# What is done in which lane, from top to bottom.
LANES = {
    "agree": {Kind.AGREE, Kind.MARK, Kind.NORM, Kind.VERDICT},
    "gather": {Kind.UNSHARD, Kind.PUBLISH, Kind.GATHER},
    "reduce": {Kind.REDUCE},
    "step": {Kind.STEP},
    "disk": {Kind.FETCH, Kind.PUT},
}
COLORS = {
    Kind.AGREE: "#b04a5a", Kind.MARK: "#cf8d97", Kind.NORM: "#b04a5a", Kind.VERDICT: "#b04a5a",
    Kind.UNSHARD: "#3f6fb5", Kind.PUBLISH: "#7aa6dd", Kind.GATHER: "#7aa6dd", Kind.REDUCE: "#e0913a",
    Kind.STEP: "#5b9e6f", Kind.FETCH: "#8a6fb5", Kind.PUT: "#b9a6d8",
}  # fmt: skip
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lightning_zero",
    "font.family": "sans-serif",
    "font.size": 9,
}


class Blocks(nn.Module):
    """Layers of one width, each a unit at stage 3 and a bucket before it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.block:
            x = torch.tanh(block(x))
        return x


def programs(folder: Path) -> dict[str, Program]:
    """Returns the program of each panel, by its title. `folder` is for what is offloaded."""
    return {
        "stage 1": program_of(1, late_publish_bytes=0),
        "stage 2": program_of(2),
        "stage 3": program_of(3),
        "stage 3, optimizer on disk, clipped": program_of(3, clips=True, offload=Offload("nvme", path=folder)),
    }


def program_of(stage: int, *, clips: bool = False, **options: Any) -> Program:
    """Trains a small model until every step is like the last one."""
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    setting = Options(bucket_bytes=4 * WIDTH**2, unit_classes=("Linear",) if stage == 3 else None, **options)
    engine = Engine(model, [optimizer], stage=stage, comm=CountingComm(0, RANKS), options=setting)
    for _ in range(WARM_UP):
        with engine.forward():
            loss = model(torch.randn(2, WIDTH)).square().mean()
        with engine.backward():
            loss.backward()
        if clips:
            engine.gradients.clip_by_norm_(optimizer, 1.0)
            engine.runner.expect_step()
        optimizer.step()
        optimizer.zero_grad()
    program = engine.program()
    engine.close(whole=False)
    return program


def draw(path: Path, folder: Path) -> None:
    with rc_context(STYLE):
        found = programs(folder)
        figure = Figure(figsize=(9, 2.3 * len(found)), layout="constrained")
        axes = figure.subplots(len(found), 1)
        for axis, (title, program) in zip(axes, found.items(), strict=True):
            draw_program(axis, title, program)
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def draw_program(axis: Axes, title: str, program: Program) -> None:
    lanes = [lane for lane, kinds in LANES.items() if any(op.kind in kinds for op in program.ops)]
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.set_xlim(-0.5, len(program.uses) - 0.5)
    axis.set_xticks(range(len(program.uses)), [named(program, at) for at in range(len(program.uses))], rotation=60,
                    ha="right", rotation_mode="anchor")  # fmt: skip
    axis.tick_params(length=0, labelsize=7)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)
    for at in range(len(program.uses)):
        axis.axvline(at, color="#eeeeee", zorder=0)
    for row, lane in enumerate(lanes):
        for op, start, width in placed(program, lane):
            axis.barh(row, width, left=start, height=0.62, color=COLORS[op.kind], edgecolor="white", linewidth=0.8)
            axis.text(start + width / 2, row, short(program, op), ha="center", va="center", fontsize=6, color="white")


def named(program: Program, at: int) -> str:
    use = program.uses[at]
    if use.cause is Cause.UNIT:
        return program.facts.units[use.number].name
    if use.cause in (Cause.GRADIENT, Cause.READ):
        return f"{use.cause} {number_of(program, use.number)}"
    return str(use.cause)


def number_of(program: Program, group: int) -> str:
    """The number of the block whose weight a group is."""
    return program.facts.groups[group].holds.split(".")[1]


def short(program: Program, op: Op) -> str:
    if op.target < 0:
        return {Kind.AGREE: "", Kind.NORM: "norm"}.get(op.kind, str(op.kind))
    group = program.facts.units[op.target].groups[0] if op.kind is Kind.UNSHARD else op.target
    return number_of(program, group) + "'" * op.lag


def placed(program: Program, lane: str) -> Iterator[tuple[Op, float, float]]:
    """Yields the ops of a lane with place and width: ops that begin at one use share its column."""
    for at in range(len(program.uses)):
        ops = [op for op in program.at(at) if op.kind in LANES[lane]]
        for place, op in enumerate(ops):
            yield op, at - 0.48 + 0.96 * place / len(ops), 0.96 / len(ops)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", type=Path, default=Path(__file__).parent.parent / "docs" / "program.svg")
    parser.add_argument("--print", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.print:
            for title, program in programs(Path(folder)).items():
                print(f"\n{title}\n\n{program}")
        else:
            draw(options.path, Path(folder))
            print(f"written to {options.path}")


if __name__ == "__main__":
    main()
