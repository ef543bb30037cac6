"""gluonts: an estimator that makes the Trainer, and loads the best checkpoint by `torch.load` after training."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch.model.deepar import DeepAREstimator

from watch import Watch, as_user, files, kept


def hours(steps: int = 120) -> ListDataset:
    time = np.arange(steps)
    series = [5 + number + np.sin(time / (3 + number)) for number in range(4)]
    return ListDataset([{"start": "2024-01-01", "target": each.astype(np.float32)} for each in series], freq="h")


def fit_deepar(strategy: Any, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What the estimator returns: a predictor of the best weights. The norm of gradients is clipped at 10, as the
    package has it, and stays below."""
    pl.seed_everything(1, verbose=False)
    watch, kept_by = Watch(), Kept()
    estimator = DeepAREstimator(
        "h",
        prediction_length=6,
        context_length=12,
        hidden_size=320,
        num_layers=2,
        lags_seq=[1, 2, 3],
        batch_size=8,
        num_batches_per_epoch=4,
        num_parallel_samples=5,
        trainer_kwargs={
            "accelerator": "cpu",
            "devices": 2,
            "strategy": as_user(strategy),
            "max_epochs": 2,
            **options,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            "callbacks": [watch, kept_by],
        },
    )
    trained = estimator.train_model(hours(), validation_data=hours())
    rank = trained.trainer.global_rank
    pl.seed_everything(2, verbose=False)
    predicted = np.stack([forecast.samples for forecast in trained.predictor.to("cpu").predict(hours())])
    return {
        "last": kept_by.weights,
        "best": kept(trained.trained_net, rank),
        "predicted": predicted,
        "losses": watch.losses,
        "in shards": watch.in_shards,
        "files": files(folder, rank),
        "best is a file": Path(trained.trainer.checkpoint_callback.best_model_path).is_file(),
    }


class Kept(pl.Callback):
    """The weights of the last step, which those of the best checkpoint replace."""

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self.weights = kept(module, trainer.global_rank)
