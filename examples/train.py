"""Trains a byte-level GPT, or what `experiment=` names, with ZeRO; `python examples/train.py --help` shows how."""

import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_info
from omegaconf import DictConfig

from lightning_zero.sweeps.summary import read_summary, update_summary


def train(cfg: DictConfig, folder: Path) -> float:
    """Runs the job and returns its validation loss."""
    L.seed_everything(cfg.seed, workers=True)
    data = instantiate(cfg.data)
    model = instantiate(cfg.model)
    trainer: L.Trainer = instantiate(cfg.trainer)

    untrained = _validate(trainer, model, data)
    rank_zero_info("before training: " + ", ".join(f"{name} {value:.4g}" for name, value in untrained.items()))
    trainer.fit(model, data, ckpt_path=_unfinished(folder))
    trained = _validate(trainer, model, data)

    told = {
        "strategy": HydraConfig.get().runtime.choices.get("strategy"),
        "batch_size": cfg.data.get("batch_size"),
        "steps": trainer.global_step,
        **trained,
        **{f"untrained_{name}": value for name, value in untrained.items()},
    }
    if hasattr(model, "generate"):
        told["sample"] = model.generate(cfg.prompt, cfg.sample_bytes, seed=cfg.seed)
    if trainer.is_global_zero:
        update_summary(folder, **told)
        show(read_summary(folder), metrics=list(trained))
        print(f"Logs and results: {os.path.relpath(folder)}")
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


def show(summary: dict[str, Any], metrics: list[str]) -> None:
    """Prints what was learnt, and the sample of a model that makes one. (What it cost, `ZeroMonitor` has told.)"""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"strategy={summary['strategy']}, {summary['steps']} steps")
    for name in ("validation", "before training", "after"):
        table.add_column(name, justify="left" if name == "validation" else "right")
    for name in metrics:
        table.add_row(name, f"{summary[f'untrained_{name}']:.4g}", f"{summary[name]:.4g}")
    if isinstance(sys.stdout, TextIOWrapper):  # a sample may hold what its encoding has not
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console()
    console.print(table)
    if "sample" in summary:
        console.print(Panel(Text(summary["sample"]), title="a sample"))


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> float:
    return train(cfg, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    main()
