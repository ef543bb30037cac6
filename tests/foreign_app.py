"""A Hydra app outside of this package that composes `strategy: zero2` from it: prints the trainer's strategy as JSON.
If `fits=true` it trains a small model.

Run it as `python foreign_app.py [overrides]` with an interpreter that has lightning_zero installed, from any folder.
"""

import json

import hydra
import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import DictConfig


class Wide(BoringModel):
    """Lightning's own example, with a layer that is worth dividing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 2000), torch.nn.Linear(2000, 2))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@hydra.main(version_base="1.3", config_path="foreign_conf", config_name="app")
def main(cfg: DictConfig) -> float | None:
    trainer = instantiate(cfg.trainer)
    print(json.dumps({"class": type(trainer.strategy).__name__, "stage": cfg.strategy.get("stage")}))
    if not cfg.fits:
        return None
    L.seed_everything(1)
    model = Wide()
    trainer.fit(model, model.train_dataloader())
    return float(trainer.callback_metrics.get("loss", 0.5)) if cfg.reports else None


if __name__ == "__main__":
    main()
