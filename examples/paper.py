"""The tables of the ZeRO paper (arXiv 1910.02054), beside what this package holds and sends; draws Figure 1.

    python examples/paper.py                                  on a laptop; a minute
    python examples/paper.py every_cell=true                  no cell of Table 1 is calculated from another one
    python examples/paper.py tables=false largest.run=true    the largest models of C1 to C5, on four ranks

Ours are no formulas: the engine is set up and takes a step, as rank 0 of so many, in a rehearsal, and its ledger says
what rests on the device. Counted are model states, as in the paper: parameters, gradients, masters, optimizer state.
"""

import functools
import math
from collections.abc import Callable, Iterable
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import Tensor, nn

from gpt import GPT, VOCABULARY
from lightning_zero.rehearsal.rehearsal import Rehearsal, rehearse
from paper_largest import Trial, measure, show_rehearsed

GB = 10**9
STATES = {"parameters": ["parameter"], "gradients": ["gradient"], "optimizer": ["master", "optimizer state"]}
STAGES = {0: "baseline", 1: "P_os", 2: "P_os+g", 3: "P_os+g+p"}
WIDTH = 40_000  # of a `Stack`: its squares, and one rectangle, add up to each of the paper's sizes

MODELS = {"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 1_000_000_000_000}
MOST_RANKS = 1024

# GB on each of so many ranks, as printed, for P_os, P_os+g and P_os+g+p.
TABLE_1: dict[int, dict[str, tuple[str, str, str]]] = {
    1: {"7.5B": ("120", "120", "120"), "128B": ("2048", "2048", "2048"), "1T": ("16000", "16000", "16000")},
    4: {"7.5B": ("52.5", "41.3", "30"), "128B": ("896", "704", "512"), "1T": ("7000", "5500", "4000")},
    16: {"7.5B": ("35.6", "21.6", "7.5"), "128B": ("608", "368", "128"), "1T": ("4750", "2875", "1000")},
    64: {"7.5B": ("31.4", "16.6", "1.88"), "128B": ("536", "284", "32"), "1T": ("4187", "2218", "250")},
    256: {"7.5B": ("30.4", "15.4", "0.47"), "128B": ("518", "263", "8"), "1T": ("4046", "2054", "62.5")},
    1024: {"7.5B": ("30.1", "15.1", "0.12"), "128B": ("513", "257", "2"), "1T": ("4011", "2013", "15.6")},
}
FIGURE_1 = ("120", "31.4", "16.6", "1.9")  # GB, of 7.5B on 64 ranks, by stage
# The largest model, by the degree of tensor parallelism and by stage. There are 64 data-parallel ranks in each row.
TABLE_2: dict[int, tuple[str, str, str, str]] = {
    1: ("2B", "7.6B", "14.4B", "128B"),
    2: ("4B", "15.2B", "28.8B", "256B"),
    4: ("8B", "30.4B", "57.6B", "0.5T"),
    8: ("16B", "60.8B", "115.2B", "1T"),
    16: ("32B", "121.6B", "230.4B", "2T"),
}
DATA_RANKS, DEVICE_BYTES = 64, 32 * GB  # of Table 2
VOLUMES = (2, 2, 2, 3)  # elements that a rank sends in a step, for each parameter, by stage


class Stack(L.LightningModule):
    """Linear layers without biases, with exactly so many parameters.

    Raises:
        ValueError: when squares and a rectangle of that width have not that many elements.
    """

    def __init__(self, numel: int, width: int = WIDTH) -> None:
        super().__init__()
        squares, rest = divmod(numel, width**2)
        if rest % width:
            raise ValueError(f"{numel} parameters are no multiple of width={width}. Choose another width.")
        outputs = [width] * squares + [rest // width] * (rest > 0)
        self.layers = nn.Sequential(*(nn.Linear(width, each, bias=False) for each in outputs))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.layers(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Language(L.LightningModule):
    """A real transformer: with embeddings, biases and norms."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.gpt = GPT(width=width, depth=depth, heads=width // 128, context=context)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return nn.functional.cross_entropy(self.gpt(batch).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


# -- what is rehearsed


def rehearsed(
    make: Callable[[], L.LightningModule],
    batch: Callable[[], Tensor],
    *,
    stage: int,
    ranks: int,
    steps: int = 1,  # optimizer state comes into being in the first one
    bucket_size_mb: int = 8000,  # large, because a tensor that is cut into fewer chunks is rehearsed sooner
) -> Rehearsal:
    """As in the paper: weights and gradients of two bytes, and Adam with masters."""
    strategy = {"stage": stage, "reduce_dtype": "bfloat16", "bucket_size_mb": bucket_size_mb}
    return rehearse(make, batch, strategy, ranks=ranks, precision="bf16-mixed", steps=steps)


@functools.cache
def stack_of(numel: int, stage: int, ranks: int) -> Rehearsal:
    """One step of a `Stack`."""
    return rehearsed(lambda: Stack(numel), lambda: torch.zeros(1, WIDTH), stage=stage, ranks=ranks)


@functools.cache
def gpt_of(width: int, depth: int, stage: int, ranks: int, context: int = 128) -> Rehearsal:
    """One step of a GPT."""
    return rehearsed(
        lambda: Language(width, depth, context),
        lambda: torch.arange(context).view(1, -1) % VOCABULARY,
        stage=stage,
        ranks=ranks,
    )


def states_of(rehearsal: Rehearsal) -> dict[str, int]:
    """Returns the bytes of model states on a rank, in the paper's three parts."""
    return {part: sum(rehearsal.at_rest.get(one, 0) for one in names) for part, names in STATES.items()}


def total(rehearsal: Rehearsal) -> int:
    return sum(states_of(rehearsal).values())


def cell(model: str, stage: int, ranks: int, *, rehearses: bool) -> int:
    """Returns a cell of Table 1, in bytes. One that is not rehearsed is in proportion to that of 7.5B, which is."""
    if rehearses:
        return total(stack_of(MODELS[model], stage, ranks))
    return total(stack_of(MODELS["7.5B"], stage, ranks)) * MODELS[model] // MODELS["7.5B"]


def largest(stage: int) -> Decimal:
    """Returns the parameters of the largest model whose states fit into a device of Table 2, for each tensor-parallel
    rank."""
    numel = MODELS["7.5B"]
    return Decimal(DEVICE_BYTES) * numel / total(stack_of(numel, stage, DATA_RANKS))


LAYER = 4096**2  # parameters of a layer, and bytes of a bucket: at stage 3 a layer is not gathered with others


def sent(stage: int, depth: int, *, ranks: int = 64) -> int:
    """Returns how many elements a rank sends in a step of a stack of `depth` layers, in the paper's units: of N-1 parts
    of N that it does send, it counts N."""
    width = math.isqrt(LAYER)
    make, batch = lambda: Stack(depth * LAYER, width), lambda: torch.zeros(1, width)
    # A first step learns what follows what; the last of three is counted.
    found = rehearsed(make, batch, stage=stage, ranks=ranks, steps=3, bucket_size_mb=LAYER // 2**20)
    nbytes = sum(found.sent[kind].nbytes for kind in ("reduce_scatter", "all_gather"))
    elements = Fraction(nbytes, 2) * ranks / (ranks - 1)
    assert elements.denominator == 1
    return int(elements)


# -- what is printed


def as_printed(nbytes: int, like: str, *, truncates: bool) -> str:
    """Returns GB with as many digits as `like`. The paper rounds 7.5B's column of Table 1, truncates the rest."""
    rounding = ROUND_DOWN if truncates else ROUND_HALF_UP
    return str((Decimal(nbytes) / GB).quantize(Decimal(like), rounding))


class Size(NamedTuple):
    """A number of parameters as the paper prints it."""

    numel: Decimal
    digit: Decimal  # what one more in the last digit is

    @classmethod
    def of(cls, text: str) -> "Size":
        unit, value = {"B": 10**9, "T": 10**12}[text[-1]], Decimal(text[:-1])
        return cls(value * unit, Decimal(1).scaleb(int(value.as_tuple().exponent)) * unit)


def show(title: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(each.rjust(width) for each, width in zip(line, widths, strict=True)))


def show_table_1(every_cell: bool) -> None:
    rows = []
    for model in MODELS:
        for ranks, printed in TABLE_1.items():
            for stage, told in enumerate(printed[model], start=1):
                rehearses = every_cell or model == "7.5B" or ranks == MOST_RANKS  # a trillion takes seconds
                nbytes = cell(model, stage, ranks, rehearses=rehearses)
                ours = as_printed(nbytes, told, truncates=model != "7.5B")
                rows.append([model, f"{ranks}", STAGES[stage], told, ours, f"{Decimal(ours) - Decimal(told)}"])
    show("Table 1: GB of model states per rank", ["model", "ranks", "", "paper", "ours", "difference"], rows)


def show_figure_1() -> None:
    rows = []
    for stage, told in enumerate(FIGURE_1):
        ours = as_printed(total(stack_of(MODELS["7.5B"], stage, 64)), told, truncates=False)
        rows.append([STAGES[stage], told, ours, f"{Decimal(ours) - Decimal(told)}"])
    show("Figure 1: GB of model states per rank, 7.5B on 64 ranks", ["", "paper", "ours", "difference"], rows)


def show_table_2() -> None:
    rows = []
    for tensor_ranks, printed in TABLE_2.items():
        for stage, told in enumerate(printed):
            paper, ours = Size.of(told).numel, largest(stage) * tensor_ranks
            difference = f"{100 * (ours / paper - 1):+.1f} %"
            rows.append([f"{tensor_ranks}", STAGES[stage], told, f"{ours / GB:.1f}B", difference])
    head = ["tensor-parallel", "", "paper", "ours", "difference"]
    show(f"Table 2, theory: the largest model with 32 GB, on {DATA_RANKS} data-parallel ranks", head, rows)
    print("The paper truncates its first row, and multiplies it: 121.6B is 16 times 7.6B.")


def show_volumes(depth: int = 12) -> None:
    rows = []
    for stage, told in enumerate(VOLUMES):
        whole = sent(stage, depth)
        each = Fraction(sent(stage, depth + 1) - whole, LAYER)
        rows.append(
            [STAGES[stage], f"{told}", f"{float(each):g}", f"{float(each - told):g}", f"{whole / (depth * LAYER):.3f}"]
        )
    head = ["", "paper", "ours, of one more layer", "difference", f"of {depth} layers"]
    show("Elements that a rank sends in a step, for each parameter", head, rows)
    print(
        "At P_os+g+p what forward has used last is still there in backward, and nothing wants the first weight there."
    )


def show_gpt() -> None:
    rows = []
    for stage in (1, 2, 3):
        ours, stack = gpt_of(8192, 9, stage, 64), stack_of(MODELS["7.5B"], stage, 64)
        each, simple = total(ours) / ours.numel, total(stack) / stack.numel
        rows.append([STAGES[stage], f"{simple:.4f}", f"{each:.4f}", f"{100 * (each / simple - 1):+.2f} %"])
    title = f"A GPT of {ours.numel / GB:.2f}B beside the stack of Linears: bytes per parameter on 64 ranks"
    show(title, ["", "stack", "GPT", "difference"], rows)
    print("What autocast reads in fp32 (embeddings, norms) rests in four bytes, and needs no master.")


def draw_figure_1(path: Path) -> None:
    """Draws the bars of Figure 1, and a mark at each of the paper's numbers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    found = [states_of(stack_of(MODELS["7.5B"], stage, 64)) for stage in STAGES]
    lefts = [0.0] * len(found)
    for part, color in zip(STATES, ("#4c78a8", "#f58518", "#54a24b"), strict=True):
        sizes = [each[part] / GB for each in found]
        panel.barh(range(len(found)), sizes, left=lefts, label=part, color=color)
        lefts = [left + size for left, size in zip(lefts, sizes, strict=True)]
    for at, (ours, told) in enumerate(zip(lefts, FIGURE_1, strict=True)):
        panel.text(ours + 2, at, f"{ours:.1f} GB", va="center")
        panel.plot(
            [float(told)] * 2, [at - 0.4, at + 0.4], color="black", label="the paper's total" if at == 0 else None
        )
    panel.set_yticks(range(len(found)), STAGES.values())
    panel.invert_yaxis()
    panel.set(xlabel="GB of model states per rank", title="7.5B parameters on 64 ranks", xlim=(0, 140))
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120)


@hydra.main(version_base="1.3", config_path="../conf", config_name="paper")
def main(cfg: DictConfig) -> None:
    if cfg.tables:
        show_table_1(cfg.every_cell)
        show_figure_1()
        show_table_2()
        show_volumes()
        show_gpt()
        path = Path(HydraConfig.get().runtime.output_dir) / "figure1.png"
        draw_figure_1(path)
        print(f"\nFigure 1: {path}")
        show_rehearsed()
    if cfg.largest.run:
        setting = {name: value for name, value in cfg.largest.items() if name != "run"}
        measure(Trial(**setting))


if __name__ == "__main__":
    main()
