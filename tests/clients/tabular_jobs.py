"""pytorch_tabular: a configuration makes the Trainer, and the best checkpoint is opened by fsspec after training,
on rank 0 alone."""

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import FTTransformerConfig

from watch import Watch, as_user, kept


def table(rows: int = 96) -> pandas.DataFrame:
    random = np.random.default_rng(1)
    x, y = random.normal(size=rows), random.normal(size=rows)
    return pandas.DataFrame({"x": x, "y": y, "name": [f"{n % 5}" for n in range(rows)], "z": np.sin(x) + y * y})


def fit_transformer(strategy: Any, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """In a working folder for each rank: there the package counts its models, to name checkpoints by their number, and
    two ranks that count in one file may come to two names."""
    working = folder / os.environ["RANK"]
    working.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(working):
        return fit_here(as_user(strategy), folder, options)


def fit_here(strategy: Any, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Two epochs, the best weights as the package loads them, what they predict, and what its saved model predicts."""
    watch = Watch()
    model = TabularModel(
        data_config=DataConfig(target=["z"], continuous_cols=["x", "y"], categorical_cols=["name"], num_workers=0),
        model_config=FTTransformerConfig(
            task="regression",
            learning_rate=1e-4,
            input_embed_dim=256,
            num_heads=4,
            num_attn_blocks=2,
            ff_hidden_multiplier=4,
        ),
        optimizer_config=OptimizerConfig(optimizer="AdamW"),
        trainer_config=TrainerConfig(
            batch_size=8,
            max_epochs=2,
            accelerator="cpu",
            devices=2,
            seed=1,
            progress_bar="none",
            checkpoints="valid_loss",
            checkpoints_name="best",
            checkpoints_path=str(folder),
            load_best=True,
            early_stopping=None,
            trainer_kwargs={
                "strategy": strategy,
                "enable_model_summary": False,
                "default_root_dir": str(folder),
            },
            **options,
        ),
        verbose=False,
    )
    rows = table()
    trainer = model.fit(train=rows[:64], validation=rows[64:], callbacks=[watch], handle_oom=False)
    rank = trainer.global_rank
    model.save_model(str(folder / "saved"))
    trainer.strategy.barrier()
    again = TabularModel.load_model(str(folder / "saved"))
    return {
        "best": kept(model.model, rank),
        "losses": watch.losses,
        "in shards": watch.in_shards,
        "best is a file": Path(trainer.checkpoint_callback.best_model_path).is_file(),
        "predicted": model.predict(rows).to_numpy(),
        "predicted by what was saved": again.predict(rows).to_numpy(),
    }
