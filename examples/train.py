"""Trains a byte-level GPT, or what `experiment=` names, with ZeRO; `python examples/train.py --help` shows how."""

import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel

from lightning_zero.sweeps.summary import update_summary


class CostMeter(L.Callback):
    """Measures what training costs on this rank, while the strategy still has the model in its hands."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self.wire_bytes = 0
        self.memory_bytes: dict[str, int] = {}
        self.peak_resident_bytes = 0
        self.peak_device_bytes: int | None = None
        self._started = 0.0
        self._sent_before = 0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._sent_before = _sent_bytes(trainer)
        _finish_device_work(trainer)
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        _finish_device_work(trainer)
        self.step_seconds.append(time.perf_counter() - self._started)
        self.wire_bytes += _sent_bytes(trainer) - self._sent_before

    def on_train_end(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        self.memory_bytes = _memory_report(trainer, model)
        # Linux counts in KiB, macOS in bytes.
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        self.peak_resident_bytes = _largest(trainer, resident)
        if _on_gpu(trainer):
            self.peak_device_bytes = _largest(trainer, torch.cuda.max_memory_allocated(trainer.strategy.root_device))

    def costs(self, trainer: L.Trainer) -> dict[str, Any]:
        """The measurements, under the names that the sweep's table and picture know."""
        batches = len(self.step_seconds)
        per_step = trainer.accumulate_grad_batches
        reported = hasattr(trainer.strategy, "communication_report") and batches
        return {
            "seconds_per_step": statistics.median(self.step_seconds) * per_step if batches else None,
            "memory_bytes": self.memory_bytes,
            "peak_resident_bytes": self.peak_resident_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "wire_bytes_per_step": self.wire_bytes * per_step // batches if reported else None,
        }


def _on_gpu(trainer: L.Trainer) -> bool:
    return trainer.strategy.root_device.type == "cuda"


def _finish_device_work(trainer: L.Trainer) -> None:
    # A GPU works on while the host is ahead; a step's time is the time until its work is done.
    if _on_gpu(trainer):
        torch.cuda.synchronize(trainer.strategy.root_device)


def _largest(trainer: L.Trainer, value: int) -> int:
    """The largest value of any rank."""
    number = torch.tensor(value, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(number, reduce_op="max"))


def _sent_bytes(trainer: L.Trainer) -> int:
    report = getattr(trainer.strategy, "communication_report", dict)
    return sum(report().values())


def _memory_report(trainer: L.Trainer, model: L.LightningModule) -> dict[str, int]:
    """Bytes resting on this rank by category: the strategy's own report, or for strategies without one a count."""
    if hasattr(trainer.strategy, "memory_report"):
        return trainer.strategy.memory_report()
    state = [item for optimizer in trainer.optimizers for held in optimizer.state.values() for item in held.values()]
    parameters = list(model.parameters())
    # One gradient per parameter rests between backward and step, though zero_grad() may just have dropped it.
    gradient_bytes = sum(p.nbytes for p in parameters if p.requires_grad)
    wrapped = trainer.strategy.model
    # DDP's buckets are a second copy of all gradients, unless the gradients are views of them.
    has_buckets = isinstance(wrapped, DistributedDataParallel) and not wrapped.gradient_as_bucket_view
    return {
        "parameter": sum(p.nbytes for p in parameters),
        "gradient": gradient_bytes,
        "optimizer state": sum(item.nbytes for item in state if isinstance(item, torch.Tensor)),
        "bucket": gradient_bytes if has_buckets else 0,
    }


def train(cfg: DictConfig, folder: Path) -> float:
    """Runs the job and returns its validation loss."""
    L.seed_everything(cfg.seed, workers=True)
    data = instantiate(cfg.data)
    model = instantiate(cfg.model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trainer: L.Trainer = instantiate(cfg.trainer)
    meter = CostMeter()
    trainer.callbacks.append(meter)  # type: ignore[attr-defined]

    untrained = _validate(trainer, model, data)
    rank_zero_info("before training: " + ", ".join(f"{name} {value:.4g}" for name, value in untrained.items()))
    trainer.fit(model, data, ckpt_path=_unfinished(folder))
    trained = _validate(trainer, model, data)

    summary = {
        "strategy": HydraConfig.get().runtime.choices.get("strategy"),
        "stage": getattr(trainer.strategy, "stage", None),
        "world_size": trainer.world_size,
        "parameters": parameters,
        "batch_size": cfg.data.get("batch_size"),
        "steps": trainer.global_step,
        **trained,
        **{f"untrained_{name}": value for name, value in untrained.items()},
        **meter.costs(trainer),
    }
    if hasattr(model, "generate"):
        summary["sample"] = model.generate(cfg.prompt, cfg.sample_bytes, seed=cfg.seed)
    if trainer.is_global_zero:
        update_summary(folder, **summary)
    show(summary, metrics=list(trained))
    return trained["loss"]


def _validate(trainer: L.Trainer, model: L.LightningModule, data: L.LightningDataModule) -> dict[str, float]:
    """What the model logs in validation, `val_loss` as `loss`."""
    logged = trainer.validate(model, data, verbose=False)[0]
    return {name.removeprefix("val_"): value for name, value in logged.items()}


def _unfinished(folder: Path) -> Path | None:
    """The last checkpoint of an earlier attempt in the same folder, which this one continues."""
    checkpoint = folder / "checkpoints" / "latest.ckpt"
    if not checkpoint.exists():
        return None
    rank_zero_info(f"continuing from {checkpoint}")
    return checkpoint


@rank_zero_only
def show(summary: dict[str, Any], metrics: list[str]) -> None:
    """Prints the summary, and the sample of a model that makes one."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"strategy={summary['strategy']}, {summary['world_size']} rank(s)", show_header=False)
    for name in metrics:
        table.add_row(f"validation {name}", f"{summary[name]:.4g}")
        table.add_row("  before training", f"{summary[f'untrained_{name}']:.4g}")
    if summary["seconds_per_step"] is not None:
        table.add_row("seconds per step", f"{summary['seconds_per_step']:.3f}")
    for category, size in summary["memory_bytes"].items():
        if size:
            table.add_row(f"{category}, MB on rank 0", f"{size / 1e6:.2f}")
    table.add_row("peak resident MB, largest rank", f"{summary['peak_resident_bytes'] / 1e6:.0f}")
    if summary["peak_device_bytes"] is not None:
        table.add_row("peak MB on the GPU, largest rank", f"{summary['peak_device_bytes'] / 1e6:.0f}")
    wire = summary["wire_bytes_per_step"]
    table.add_row("MB sent per step and rank", "not counted by this strategy" if wire is None else f"{wire / 1e6:.2f}")
    console = Console()
    console.print(table)
    if "sample" in summary:
        console.print(Panel(Text(summary["sample"]), title="a sample"))


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> float:
    return train(cfg, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    main()
