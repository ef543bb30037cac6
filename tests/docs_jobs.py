"""What ranks do for the tests of the README and of the pages under docs/."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

EXAMPLES = Path(__file__).parent.parent / "examples"


class Data(L.LightningDataModule):
    """A batch of a few bytes for each rank."""

    def train_dataloader(self) -> DataLoader:
        tokens = torch.arange(2 * 17).view(2, 17) % 256
        return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=1)

    val_dataloader = test_dataloader = train_dataloader


def run_session(session: str, folder: Path) -> list[str]:
    """Runs the README's session in `folder` with the examples' GPT, and returns what it has said on this rank."""
    sys.path.insert(0, str(EXAMPLES))
    from gpt import LanguageModel

    class Model(LanguageModel):
        def __init__(self) -> None:
            size: dict[str, Any] = {"width": 512, "depth": 8, "heads": 8, "context": 128}
            super().__init__(**size, learning_rate=1e-3, weight_decay=0.1, warmup_steps=1)

        test_step = LanguageModel.validation_step

    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, listener = logging.getLogger("lightning.pytorch"), Listener()
    logger.addHandler(listener)
    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(session, "README.md", "exec"), {"MyLightningModule": Model, "MyDataModule": Data})
    finally:
        os.chdir(before)
        logger.removeHandler(listener)
        sys.path.remove(str(EXAMPLES))
    return said
