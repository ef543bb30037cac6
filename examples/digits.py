"""Handwritten digits, and a small convolutional network that reads them.

digits.csv.gz has a line for each image: its 64 pixels and its label. It is the test set of "Optical Recognition of
Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, 1998, doi:10.24432/C50P49), which may
be passed on under CC BY 4.0.
"""

from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

DATA = Path(__file__).with_name("digits.csv.gz")
DIGITS = 10
TRAINING_IMAGES, VALIDATION_IMAGES = 1437, 360
BRIGHTEST = 16.0  # pixels are 0 to 16


class DigitsData(L.LightningDataModule):
    """Images of 8 x 8 pixels, one in five held out.

    Args:
        batch_size: images per rank and step.
        num_workers: processes per rank that load data.
    """

    def __init__(self, *, batch_size: int = 32, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.train: Dataset | None = None
        self.validation: Dataset | None = None

    def setup(self, stage: str) -> None:
        table = torch.from_numpy(np.loadtxt(DATA, np.int64, delimiter=","))  # (1797, 65)
        images, labels = table[:, :-1].float().view(-1, 1, 8, 8) / BRIGHTEST, table[:, -1]
        # The same split on every rank, in every run.
        self.train, self.validation = random_split(
            TensorDataset(images, labels),
            [TRAINING_IMAGES, VALIDATION_IMAGES],
            generator=torch.Generator().manual_seed(0),
        )

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.validation, shuffle=False)

    def _loader(self, images: Dataset | None, *, shuffle: bool) -> DataLoader:
        assert images is not None, "setup() comes first"
        return DataLoader(
            images,
            self.batch_size,
            shuffle=shuffle,
            drop_last=shuffle,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )


class ConvBlock(nn.Module):
    """3 x 3 convolution, batch normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:  # (batch, inputs, 8, 8) -> (batch, outputs, 8, 8)
        return F.relu(self.norm(self.conv(x)))


class DigitsClassifier(L.LightningModule):
    """Trains three `ConvBlock`s and a linear layer with AdamW and a learning rate that falls to zero."""

    def __init__(self, *, width: int, learning_rate: float, weight_decay: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.network = nn.Sequential(
            ConvBlock(1, width),
            ConvBlock(width, 2 * width),
            nn.MaxPool2d(2),
            ConvBlock(2 * width, 4 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, DIGITS),
        )
        self.accuracy = MulticlassAccuracy(DIGITS, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        images, labels = batch
        logits = self.network(images)
        self.accuracy.update(logits, labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
