"""A BERT that tells praise from blame in film reviews, and a study of it: with and without ZeRO-3 and offload.

The study takes BERT-base and BERT-large and batches of 8 and 16, plain Lightning and stage 3 with everything offloaded
to host memory, and compares time per step, peak memory and losses. It is a sweep of examples/train.py, then a report:

    python examples/train.py -m experiment=bert_imdb_small     two to three minutes on two CPU cores
    python examples/bert_imdb.py multirun/DATE/TIME            prints the table, writes loss.png and speedup.png there

On a CPU offload moves nothing, because everything is in host memory already: the small study shows that the losses are
equal up to rounding, and what the strategy itself costs. The speed-up and the memory are a question for a GPU:

    python examples/train.py -m experiment=bert_imdb trainer.precision=bf16-mixed

Weights are random and reviews made up unless a folder, or a name to fetch from the hub, is given:

    ... model.size=large model.weights=~/bert-large-uncased data.path=~/aclImdb
    ... model.size=large model.weights=hub:bert-large-uncased data.path=hub:stanfordnlp/imdb
"""

import argparse
import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, PreTrainedModel

from imdb import PAD, source_of
from lightning_zero.sweeps.summary import FINISHED, collect, distinct_labels

LABELS = 2  # which is also what a BertConfig says by itself
POSITIONS = 512  # of every BERT that was published
ON_CPU = "These jobs ran on a CPU, where offload moves nothing."


class Size(NamedTuple):
    width: int
    depth: int
    heads: int


# As published, with 4.4M (tiny) to 335M parameters (large); but for micro, which is for two CPU cores.
SIZES = {
    "micro": Size(width=64, depth=2, heads=2),
    "tiny": Size(width=128, depth=2, heads=2),
    "mini": Size(width=256, depth=4, heads=4),
    "small": Size(width=512, depth=4, heads=8),
    "medium": Size(width=512, depth=8, heads=8),
    "base": Size(width=768, depth=12, heads=12),
    "large": Size(width=1024, depth=24, heads=16),
}


def bert(size: str, vocabulary: int) -> PreTrainedModel:
    """A BERT of random weights.

    Raises:
        ValueError: when there is no such size.
    """
    if size not in SIZES:
        raise ValueError(f"model.size={size!r} is none of {', '.join(SIZES)}. Choose one of them.")
    width, depth, heads = SIZES[size]
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=POSITIONS,
            pad_token_id=PAD,
        )
    )


def pretrained_classifier(weights: str) -> PreTrainedModel:
    """The network of a folder or `hub:NAME`, with a new layer for the labels where it has none."""
    source = source_of(weights)
    network = AutoModelForSequenceClassification.from_pretrained(
        source.name, local_files_only=source.is_local, num_labels=LABELS, dtype=torch.float32
    )
    return network.train()  # it comes set to evaluation


class BertClassifier(L.LightningModule):
    """Trains all of a BERT with AdamW, a linear warm-up and a learning rate that then falls to zero.

    Args:
        size: one of `SIZES`, for random weights; without a meaning when `weights` are given.
        weights: a folder or `hub:NAME` of pretrained weights; None makes random ones.
        vocabulary: tokens that random weights know.
        context: tokens per review.
        learning_rate: the highest.
        weight_decay: of every parameter.
        warmup_share: of all steps, those in which the learning rate rises.

    Raises:
        FileNotFoundError: when `weights` is neither a folder nor `hub:NAME`.
        ValueError: when there is no such size, or a review is longer than the network's positions.
    """

    def __init__(
        self,
        *,
        size: str = "large",
        weights: str | None = None,
        vocabulary: int = 30_522,
        context: int = 512,
        learning_rate: float,
        weight_decay: float,
        warmup_share: float,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_share = warmup_share
        self.network = pretrained_classifier(weights) if weights else bert(size, vocabulary)
        positions = self.network.config.max_position_embeddings
        if context > positions:
            raise ValueError(f"data.context={context} is more than the model's {positions} positions. Give fewer.")
        self.accuracy = MulticlassAccuracy(LABELS, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        tokens, labels = batch
        loss = F.cross_entropy(self._logits(tokens), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        tokens, labels = batch
        logits = self._logits(tokens)
        self.accuracy.update(logits, labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)

    def _logits(self, tokens: Tensor) -> Tensor:  # (batch, context) -> (batch, LABELS)
        mask = tokens.ne(self.network.config.pad_token_id)
        logits: Tensor = self.network(input_ids=tokens, attention_mask=mask).logits
        return logits.float()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        total = int(self.trainer.estimated_stepping_batches)
        warmup = max(1, round(self.warmup_share * total))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, max(0.0, (total - step) / max(1, total - warmup)))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# --- what the study shows


class Job(NamedTuple):
    """A job of the sweep, of which only `summary["status"]` is sure to be there."""

    setting: str  # what the job shares with those it is compared with: `size=large batch_size=8`
    strategy: str
    summary: Mapping[str, Any]
    losses: Mapping[int, float]  # of the training batch, by step

    @property
    def is_baseline(self) -> bool:
        return self.summary.get("stage", 0) is None  # no strategy of lightning_zero

    def cost(self, name: str, unit: float = 1.0) -> float | None:
        value = self.summary.get(name)
        return None if value is None else value / unit


def read_jobs(sweep_dir: Path) -> list[Job]:
    """The jobs in a sweep's folder."""
    summaries = collect(sweep_dir)
    if not summaries:
        raise SystemExit(f"No job has left a summary.json in {str(sweep_dir)!r}. Give the folder of a sweep.")
    apart = [[item for item in summary["overrides"] if not _is_of_strategy(item)] for summary in summaries]
    labels = distinct_labels(apart) if any(own != apart[0] for own in apart) else ["" for _ in apart]
    return [
        Job(
            setting=re.sub(r"(?<!\S)[\w./]*[./](?=\w+=)", "", label),  # without groups: model.size=large
            strategy=_strategy(summary),
            summary=summary,
            losses=_read_losses(sweep_dir / summary["folder"] / "csv" / "metrics.csv"),
        )
        for label, summary in zip(labels, summaries, strict=True)
    ]


def _is_of_strategy(override: str) -> bool:
    return re.match(r"\+*strategy[=./]", override) is not None


def _strategy(summary: Mapping[str, Any]) -> str:
    told = [item.removeprefix("strategy=") for item in summary["overrides"] if _is_of_strategy(item)]
    return " ".join(told) or str(summary.get("strategy"))


def _read_losses(path: Path) -> dict[int, float]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(file) if row.get("train_loss")}


def speed_up(job: Job, jobs: Iterable[Job]) -> float | None:
    """How many times faster than the baseline of the same setting its steps are."""
    own = job.cost("seconds_per_step")
    for other in jobs:
        time = other.cost("seconds_per_step")
        if other.is_baseline and other.setting == job.setting and own and time:
            return time / own
    return None


def report(sweep_dir: Path) -> None:
    """Prints the table of the study in `sweep_dir` and writes `loss.png` and `speedup.png` there."""
    jobs = read_jobs(sweep_dir)
    print_table(jobs)
    draw_losses(jobs, sweep_dir / "loss.png")
    draw_speed_ups(jobs, sweep_dir / "speedup.png")
    print(f"Pictures: {sweep_dir / 'loss.png'}, {sweep_dir / 'speedup.png'}")


def _on_cpu(jobs: Iterable[Job]) -> bool:
    return all(job.summary.get("peak_device_bytes") is None for job in jobs)


def print_table(jobs: Sequence[Job]) -> None:
    """Prints time, memory and losses of all jobs."""
    from rich.console import Console
    from rich.table import Table

    on_cpu = _on_cpu(jobs)
    table = Table("job", "strategy", title="BERT on IMDB", caption=ON_CPU if on_cpu else None)
    numbers: dict[str, Callable[[Job], float | None]] = {
        "million\nparameters": lambda job: job.cost("parameters", 1e6),
        "seconds\nper step": lambda job: job.cost("seconds_per_step"),
        "speed-up": lambda job: speed_up(job, jobs),
        "peak MB\non the GPU": lambda job: job.cost("peak_device_bytes", 1e6),
        "peak MB\non the host": lambda job: job.cost("peak_resident_bytes", 1e6),
        "training loss,\nlast tenth": lambda job: _last_tenth(list(job.losses.values())),
        "validation\nloss": lambda job: job.cost("loss"),
        "validation\naccuracy": lambda job: job.cost("accuracy"),
    }
    if on_cpu:
        del numbers["peak MB\non the GPU"]
    for title in numbers:
        table.add_column(title, justify="right")
    for job in jobs:
        values = [number(job) for number in numbers.values()]
        ended = "" if job.summary["status"] == FINISHED else f" ({job.summary['status']})"
        table.add_row(
            job.setting, job.strategy + ended, *("-" if value is None else f"{value:.4g}" for value in values)
        )
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console = Console(width=160)
    console.print(table)


def _last_tenth(losses: Sequence[float]) -> float | None:
    last = losses[-math.ceil(len(losses) / 10) :]
    return sum(last) / len(last) if last else None


def draw_losses(jobs: Sequence[Job], path: Path) -> None:
    """Draws the training losses, a panel for each setting: every step faintly, and their running mean."""
    settings = list(dict.fromkeys(job.setting for job in jobs))
    strategies = list(dict.fromkeys(job.strategy for job in jobs))
    columns = min(2, len(settings))
    rows = math.ceil(len(settings) / columns)
    figure = _figure(width=5.5 * columns, height=1.0 + 2.8 * rows)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for panel, setting in zip(panels.flat, settings, strict=False):
        for job in jobs:
            if job.setting == setting and job.losses:
                _draw_loss(panel, job, order=strategies.index(job.strategy))
        panel.set(title=setting, xlabel="step", ylabel="training loss (nats)")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.label_outer(remove_inner_ticks=False)
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(settings) :]:
        panel.set_axis_off()
    drawn = {line.get_label(): line for panel in panels.flat for line in panel.get_lines()}
    figure.legend(
        [drawn[name] for name in strategies if name in drawn],
        [name for name in strategies if name in drawn],
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    figure.savefig(path, dpi=120)


def _draw_loss(panel: Any, job: Job, order: int) -> None:
    steps, losses = list(job.losses), list(job.losses.values())
    span = max(1, len(losses) // 15)
    means = [sum(losses[max(0, end - span) : end]) / min(end, span) for end in range(1, len(losses) + 1)]
    # Equal losses lie on each other: the first strategy is a broad line, and the next ones are dashes on it.
    style: dict[str, Any] = {"linewidth": 4.5, "alpha": 0.45} if order == 0 else {"linewidth": 1.6, "dashes": (5, 2)}
    panel.plot(steps, losses, color=f"C{order}", linewidth=0.7, alpha=0.3, label="_each step")
    panel.plot(steps, means, color=f"C{order}", label=job.strategy, **style)


def draw_speed_ups(jobs: Sequence[Job], path: Path) -> None:
    """Draws how many times faster than the baseline each strategy's steps are, against the number of parameters."""
    lines: dict[tuple[str, int], dict[int, float]] = {}
    for job in jobs:
        ratio = speed_up(job, jobs)
        if ratio is not None and not job.is_baseline:
            line = lines.setdefault((job.strategy, job.summary["batch_size"]), {})
            line[job.summary["parameters"]] = ratio
    baseline = next((job.strategy for job in jobs if job.is_baseline), "baseline")
    figure = _figure(width=7, height=4.5)
    panel = figure.subplots()
    panel.axhline(1.0, color="black", linewidth=1, linestyle=":", label=f"{baseline}, same batch")
    for (strategy, batch), line in sorted(lines.items()):
        sizes = sorted(line)
        panel.plot(sizes, [line[size] for size in sizes], marker="o", label=f"{strategy}, batch {batch}")
    sizes = sorted({size for line in lines.values() for size in line})
    panel.set_xscale("log")
    panel.set_xticks(sizes, [f"{size / 1e6:.3g}" for size in sizes])
    panel.set_xticks([], minor=True)
    panel.margins(x=0.15)
    panel.set_ylim(0, 1.25 * max([1.0, *(ratio for line in lines.values() for ratio in line.values())]))
    panel.set(xlabel="parameters (millions)", ylabel=f"speed-up (seconds per step, {baseline} / strategy)")
    panel.set_title(ON_CPU if _on_cpu(jobs) else "Above 1, a step takes less time", fontsize="medium")
    panel.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=120)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints the study's table and writes loss.png and speedup.png.")
    parser.add_argument("sweep_dir", type=Path, help="the folder of the sweep: multirun/DATE/TIME")
    report(parser.parse_args().sweep_dir)


if __name__ == "__main__":
    main()
