"""A tiny two-rank Lightning job as a Hydra app, whose ranks fail on request: what tests/test_sweep.py sweeps over."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_zero.sweeps.summary import update_summary
from opened import left_open, opened

CONFIG = {
    "defaults": [
        "_self_",
        {"strategy": "zero2"},
        {"override hydra/callbacks": "lightning_zero"},
        {"override hydra/job_logging": "ranks"},
    ],
    "note": "",
    "numbers": [0],
    "fail": "nobody",  # or rank_0_raises, rank_1_raises, rank_0_is_killed, rank_1_is_killed
    "repaired": None,  # a file: once it exists, nobody fails
    "hydra": {"callbacks": {"probe": {"_target_": "__main__.Probe"}}},
}
ConfigStore.instance().store("sweep_app", CONFIG)


class Probe(Callback):
    """Writes down what the sweeping process holds, before the first job and after the last."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.before, self.variables = opened(), variables_of_ranks()

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        probe = {"left open": left_open(self.before), "before": self.variables, "after": variables_of_ranks()}
        Path(config.hydra.sweep.dir, "probe.json").write_text(json.dumps(probe))


def variables_of_ranks() -> dict[str, str]:
    names = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "WORLD_SIZE")
    return {name: os.environ[name] for name in names if name in os.environ}


class Line(L.LightningModule):
    def __init__(self, cfg: DictConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if index == 1 and not (self.cfg.repaired and Path(self.cfg.repaired).exists()):
            self.fail_if_asked()
        return self.layer(batch).square().mean()

    def fail_if_asked(self) -> None:
        if self.cfg.fail == f"rank_{self.global_rank}_raises":
            raise ValueError(f"rank {self.global_rank} was asked to fail")
        if self.cfg.fail == f"rank_{self.global_rank}_is_killed":
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@hydra.main(version_base="1.3", config_path="../conf", config_name="sweep_app")
def main(cfg: DictConfig) -> float:
    OmegaConf.resolve(cfg)
    folder = Path(HydraConfig.get().runtime.output_dir)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=instantiate(cfg.strategy),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)
    trainer.fit(Line(cfg), batches)
    loss = float(trainer.callback_metrics.get("loss", 1.0))
    if trainer.is_global_zero:
        values = OmegaConf.to_container(cfg)
        assert isinstance(values, dict)
        update_summary(folder, loss=loss, note=values["note"], numbers=values["numbers"])
    return loss


if __name__ == "__main__":
    main()
