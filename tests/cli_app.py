"""An app of somebody else's that is run by LightningCLI; and what the tests call of it on real ranks."""

import io
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Model(L.LightningModule):
    def __init__(self, hidden: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.linspace(0, 1, 32).view(8, 4), batch_size=self.batch_size)

    test_dataloader = train_dataloader


def cli(folder: Path, *arguments: str, **kwargs: Any) -> LightningCLI:
    defaults = {
        "accelerator": "cpu",
        "callbacks": [ModelCheckpoint(folder, filename="saved", enable_version_counter=False)],
        "default_root_dir": folder,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
        "max_epochs": 1,
    }
    return LightningCLI(
        Model,
        Data,
        args=list(arguments),
        trainer_defaults=defaults,
        save_config_kwargs={"overwrite": True},
        seed_everything_default=1,
        **kwargs,
    )


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """What became of the model, and the arguments that it was made of."""
    ran = cli(folder, *arguments)
    weights = {name: value.detach().clone() for name, value in ran.model.state_dict().items()}
    stage = getattr(ran.trainer.strategy, "stage", None)
    return {"weights": weights, "hidden": ran.model.hparams["hidden"], "stage": stage}


def texts_beside_checkpoints(folder: Path, strategy: str) -> dict[str, str]:
    """Of a run whose logger writes to the folder of its checkpoints: all text files there, without what differs."""
    csv = ("CSVLogger", f"save_dir={folder}", "name=", "version=")
    arguments = [f"--trainer.strategy={strategy}", "--trainer.devices=2", "--trainer.log_every_n_steps=1"]
    ran = cli(folder, "fit", *arguments, f"--trainer.logger={csv[0]}", *(f"--trainer.logger.{one}" for one in csv[1:]))
    ran.trainer.strategy.barrier()
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and ".ckpt" not in str(path)]
    texts = {path.name: path.read_text() for path in paths}
    return {name: text.replace(str(folder), "").replace(f"strategy: {strategy}", "") for name, text in texts.items()}


def printed(folder: Path, *arguments: str) -> str:
    """What is printed in place of a run."""
    said = io.StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        cli(folder, *arguments)
    return said.getvalue()
