"""A Hydra app outside of this package that composes `strategy: zero2` from it: prints the trainer's strategy as JSON.

Run it as `python foreign_app.py [overrides]` with an interpreter that has lightning_zero installed, from any folder.
"""

import json

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="foreign_conf", config_name="app")
def main(cfg: DictConfig) -> None:
    trainer = instantiate(cfg.trainer)
    print(json.dumps({"class": type(trainer.strategy).__name__, "stage": cfg.strategy.stage}))


if __name__ == "__main__":
    main()
