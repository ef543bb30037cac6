"""Two published packages that train with Lightning, on small data of our own: what their users call, on one rank.

Each job fits for two epochs, saves, loads what was saved through the package's own call, and goes on for a third epoch
from the last checkpoint with a new trainer.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pandas
import torch
from chemprop import data, featurizers, models, nn
from lightning.pytorch.callbacks import ModelCheckpoint
from pytorch_forecasting import DeepAR, TemporalFusionTransformer, TimeSeriesDataSet
from torch import Tensor
from torch.utils.data import DataLoader

from jobs import state_of, trainer
from lightning_zero import consolidate

SMILES = [
    *(
        "C",
        "CC",
        "CCC",
        "CCO",
        "CCN",
        "c1ccccc1",
        "CC(=O)O",
        "CC(C)O",
        "C1CCCCC1",
        "Cc1ccccc1",
        "CCOC(=O)C",
        "OCC(O)CO",
    ),
    *("NCC(=O)O", "c1ccncc1", "CC#N", "C=CC=C", "CC(=O)Nc1ccc(O)cc1", "CN1C=NC2=C1C(=O)N(C)C(=O)N2C", "O=C=O", "ClCCl"),
    *(
        "CSC",
        "FC(F)F",
        "CC(C)(C)O",
        "OC1CCCCC1",
        "c1ccc2ccccc2c1",
        "BrCCBr",
        "CCCCCCCC",
        "O=Cc1ccccc1",
        "NC(N)=O",
        "CO",
    ),
    *("OCCO", "CCS"),
]


class Losses(pl.Callback):
    """Each step's loss, as the trainer has it. Each step draws its own random numbers: a resume restores them here, and
    under DDP goes on with those of the process."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        torch.manual_seed(2 * trainer.global_step + trainer.global_rank)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs["loss"].item())


def train(
    strategy: Any, folder: Path, model: pl.LightningModule, train: DataLoader, held_out: DataLoader, **kwargs: Any
) -> dict[str, Any]:
    """Two epochs, a test of the best one, and a third epoch from the last one."""
    losses, best = Losses(), ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    run = trainer(strategy, 2, max_epochs=2, callbacks=[losses, best], enable_checkpointing=True, **kwargs)
    run.fit(model, train, held_out)
    found = {"weights": kept(model), "val_loss": float(run.callback_metrics["val_loss"])}
    again = trainer(strategy, 2, max_epochs=3, callbacks=[losses], **kwargs)
    # Both packages keep objects of their own among the hyperparameters.
    again.fit(model, train, held_out, ckpt_path=best.last_model_path, weights_only=False)
    resumed = {"resumed": kept(model), "losses": losses.seen, "steps": again.global_step}
    return {**found, **resumed, "best": best.best_model_path}


def kept(model: pl.LightningModule) -> dict[str, Tensor]:
    """What a checkpoint has: buffers are each rank's own, and rank 0's are saved."""
    return state_of(model) if model.global_rank == 0 else {}


# -- chemprop


def molecules(shuffle: bool) -> DataLoader:
    featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
    points = [data.MoleculeDatapoint.from_smi(smiles, np.array([len(smiles) / 5])) for smiles in SMILES]
    return data.build_dataloader(data.MoleculeDataset(points, featurizer), batch_size=4, shuffle=shuffle, num_workers=0)


def fit_chemprop(strategy: Any, folder: Path) -> dict[str, Any]:
    """What chemprop loads from the best checkpoint, which it opens as one file, predicts."""
    pl.seed_everything(1, verbose=False)
    passing, aggregation = nn.BondMessagePassing(d_h=24, dropout=0.1), nn.MeanAggregation()
    model = models.MPNN(passing, aggregation, nn.RegressionFFN(input_dim=24, hidden_dim=16), batch_norm=True)
    found = train(strategy, folder, model, molecules(shuffle=True), molecules(shuffle=False))
    path = Path(found.pop("best"))
    if path.is_dir():
        whole = path.with_suffix(f".{model.global_rank}.whole")
        consolidate(path, whole, objects=True)  # its classes are among the hyperparameters
        path = whole
    for load in (models.MPNN.load_from_checkpoint, models.MPNN.load_from_file):
        loaded = load(path, map_location="cpu")
        predicted = trainer("auto", 1, barebones=True, num_sanity_val_steps=0).predict(loaded, molecules(shuffle=False))
        found[f"predicted after {load.__name__}"] = torch.cat(predicted)
    return found


# -- pytorch-forecasting


def series() -> tuple[TimeSeriesDataSet, TimeSeriesDataSet]:
    """What is trained on, and the last steps of the same four series."""
    steps, names = 30, "abcd"
    rows = [
        {"time": step, "name": name, "value": 5 + np.sin(step / (2 + number)) + number, "day": str(step % 7)}
        for number, name in enumerate(names)
        for step in range(steps)
    ]
    table = pandas.DataFrame(rows)
    trained = TimeSeriesDataSet(
        table[table.time < steps - 4],
        time_idx="time",
        target="value",
        group_ids=["name"],
        max_encoder_length=8,
        max_prediction_length=4,
        static_categoricals=["name"],
        time_varying_known_reals=["time"],
        time_varying_known_categoricals=["day"],
        time_varying_unknown_reals=["value"],
    )
    return trained, TimeSeriesDataSet.from_dataset(trained, table, predict=True, stop_randomization=True)


def predictions_of(model: Any, batches: DataLoader) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(x)["prediction"] for x, _ in batches])


def fit_forecaster(strategy: Any, folder: Path, name: str) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    trained, held_out = series()
    kinds: dict[str, Any] = {"DeepAR": DeepAR, "TemporalFusionTransformer": TemporalFusionTransformer}
    model = kinds[name].from_dataset(trained, learning_rate=0.01, hidden_size=8, dropout=0.1, log_interval=-1)
    batches = held_out.to_dataloader(train=False, batch_size=2, num_workers=0)
    found = train(
        strategy,
        folder,
        model,
        trained.to_dataloader(train=True, batch_size=8, num_workers=0),
        batches,
        gradient_clip_val=None,
        limit_train_batches=4,
    )
    loaded = kinds[name].load_from_checkpoint(found.pop("best")).eval()
    pl.seed_everything(2, verbose=False)
    return {**found, "predicted": predictions_of(loaded, batches)}
