"""Darts: models that make a Trainer of their own from what they are given, for each fit and for each forecast."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from darts import TimeSeries
from darts.models import NBEATSModel, TFTModel, TransformerModel
from darts.models.forecasting.torch_forecasting_model import TorchForecastingModel
from darts.utils.likelihood_models.base import LikelihoodType

from watch import Watch, as_user, files, kept

PAST, AHEAD = 24, 6
KINDS: dict[str, tuple[type[TorchForecastingModel], dict[str, Any]]] = {
    "NBEATS": (NBEATSModel, {"num_stacks": 2, "num_layers": 2, "layer_widths": 640}),
    "TFT": (TFTModel, {"hidden_size": 264, "add_relative_index": True, "dropout": 0.1}),
    "Transformer": (
        TransformerModel,
        {"d_model": 128, "num_encoder_layers": 2, "num_decoder_layers": 1, "dim_feedforward": 2560, "dropout": 0.1},
    ),
}

if sys.version_info < (3, 11, 4):  # an enum's member is pickled as a call of `getattr`, which darts refuses to load:
    # no TFT that was saved can be loaded there. From then on it is pickled by its value.
    LikelihoodType.__reduce_ex__ = lambda self, _: (LikelihoodType, (self.value,))


def waves(steps: int = 62) -> TimeSeries:
    """Two series in one: as many columns."""
    time = np.arange(steps)
    return TimeSeries.from_values(np.stack([np.sin(time / 3), np.cos(time / 5)], 1).astype(np.float32))


QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


def fit(strategy: Any, folder: Path, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two epochs, what the best checkpoint forecasts, and a third epoch from the last checkpoint."""
    pl.seed_everything(1, verbose=False)
    kind, sizes = KINDS[name]
    series, given = (
        waves(),
        {**QUIET, "default_root_dir": str(folder), "devices": 2, "strategy": as_user(strategy), **options},
    )
    watch, again = Watch(), Watch()
    (folder / name).mkdir(parents=True, exist_ok=True)  # darts looks first, which two ranks may do at a time
    model = kind(
        **{"input_chunk_length": PAST, "output_chunk_length": AHEAD, "batch_size": 4, "random_state": 1, **sizes},
        work_dir=str(folder),
        model_name=name,
        save_checkpoints=True,
        optimizer_kwargs={"lr": 1e-4},
        pl_trainer_kwargs=given,
    )
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # a rank that comes late finds the folder of a fit, and refuses to begin another
    model.trainer_params["callbacks"].append(watch)  # not in `given`, which is in every checkpoint of darts
    lent = {"val_series": series[-PAST - AHEAD - 8 :], "dataloader_kwargs": {"shuffle": True, "drop_last": True}}
    model.fit(series, epochs=2, **lent)
    rank = model.trainer.global_rank
    found = {"weights": kept(model.model, rank), "in shards": watch.in_shards, "files": files(folder, rank)}

    # Of classes that are neither torch's nor its own darts loads only what it is told to trust: a strategy that is an
    # object, but not one that is a name, nor anything that this package has put into a checkpoint.
    kept_here = {"work_dir": str(folder), "map_location": "cpu", "trusted": isinstance(strategy, dict)}
    ahead = pl.Trainer(accelerator="cpu", devices=1, barebones=True)
    best = kind.load_from_checkpoint(name, best=True, **kept_here)
    found["predicted"] = best.predict(AHEAD, series=series, trainer=ahead, verbose=False).values()
    last = kind.load_from_checkpoint(name, best=False, **kept_here)
    last.trainer_params = {**given, "strategy": as_user(strategy), "callbacks": [again]}
    last.fit(series, epochs=3, **lent)
    return {**found, "resumed": kept(last.model, rank), "losses": watch.losses + again.losses}
