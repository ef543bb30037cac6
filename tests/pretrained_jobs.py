"""Weights of safetensors files in models under Trainer, and their memory; called on real ranks."""

import os
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import construction_jobs
from construction_jobs import Wide, few_bytes, measuring_peak, warmed
from jobs import Classifier, loader, state_of, trainer
from lightning_zero.run.construction import constructing
from lightning_zero.run.engine import Engine
from lightning_zero.run.pretrained import load_pretrained
from lightning_zero.run.pretrained_files import PretrainedTensor
from lightning_zero.wire.comm import Comm


def bytes_read(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Counts what each rank that is a thread reads of files from now on."""
    read: dict[int, int] = {}
    fill = PretrainedTensor._fill

    def count(self: PretrainedTensor, flat: Tensor) -> Tensor:
        read[threading.get_ident()] = read.get(threading.get_ident(), 0) + flat.nbytes
        return fill(self, flat)

    monkeypatch.setattr(PretrainedTensor, "_fill", count)
    return read


class OnMeta(construction_jobs.Inside):
    """Made without values, and loaded in configure_model."""

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        with torch.device("meta"):
            made = Classifier()
        for name, child in made.named_children():
            self.add_module(name, child)
        self.temperature = made.temperature
        self.trainer.strategy.load_pretrained(self.folder)


class LoadedLater(construction_jobs.Inside):
    """Made in configure_model, and loaded when fit starts."""

    def on_fit_start(self) -> None:
        self.trainer.strategy.load_pretrained(self.folder)


class LoadedBefore(construction_jobs.Inside):
    """Whole, with torch's own means."""

    def configure_model(self) -> None:
        super().configure_model()
        self.load_state_dict(load_file(self.folder / "model.safetensors"), strict=False)


KINDS = {kind.__name__: kind for kind in (OnMeta, LoadedLater, LoadedBefore)}


def fit(kind: str, strategy: Any, folder: Path, precision: str = "32-true") -> dict[str, Any]:
    with few_bytes():
        L.seed_everything(1 + int(os.environ["RANK"]), verbose=False)
        model = KINDS[kind](folder)
        run = trainer(strategy, int(os.environ["WORLD_SIZE"]), precision=precision)
        run.fit(model, loader(samples=24))
        run.strategy.barrier()
    return {"losses": model.losses, "weights": state_of(model)}


def fit_and_save(path: Path) -> None:
    run = trainer({"stage": 3}, 2)
    run.fit(Classifier(), loader())
    run.save_checkpoint(path)


def load_small(folder: Path, ranks: Comm) -> None:
    """So that what loading imports and maps the first time is there."""
    folder.mkdir()
    small = nn.Linear(600, 600)
    save_file(small.state_dict(), folder / "model.safetensors")
    load_pretrained(small, folder, comm=ranks)


def resident_bytes(path: Path) -> dict[str, int]:
    """What is resident more than before, at the peak, from a model on the meta device to an engine that holds it."""
    ranks = warmed()
    load_small(path / f"small on rank {ranks.rank}", ranks)
    with measuring_peak() as peak:
        with constructing(stage=3, comm=ranks) as construction:
            with torch.device("meta"):
                model = Wide()
            load_pretrained(model, path, comm=ranks, construction=construction)
        engine = Engine(model, [], stage=3, comm=ranks)
    units = [sum(parameter.nbytes for parameter in unit.parameters()) for unit in model.units]
    engine.close(whole=False)
    return {"peak": peak.nbytes, "model": sum(units), "unit": max(units)}
