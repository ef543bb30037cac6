"""lightly: losses, heads and helpers, in modules as its documentation writes them, around a backbone of torchvision."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightly.loss import DINOLoss, NTXentLoss
from lightly.models.modules import DINOProjectionHead, SimCLRProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet

from jobs import state_of, trainer
from watch import Watch, as_user, kept


def backbone() -> nn.Module:
    """Its last block has weights of nine megabytes each."""
    return nn.Sequential(*list(ResNet(BasicBlock, [1, 1, 1, 1]).children())[:-1])


def pictures() -> DataLoader:
    """Two views of 24 pictures, as a transform would give them."""
    made = torch.Generator().manual_seed(1)
    views = [torch.randn(24, 3, 16, 16, generator=made) for _ in range(2)]
    return DataLoader(TensorDataset(*views), batch_size=4, shuffle=True, drop_last=True)


class SimCLR(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = backbone()
        self.projection_head = SimCLRProjectionHead(512, 512, 128)
        self.criterion = NTXentLoss(gather_distributed=True)  # negatives of all ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.criterion(self(batch[0]), self(batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.06)


class DINO(pl.LightningModule):
    """The teacher is a running average of the student, made in each step from the weights of both."""

    def __init__(self) -> None:
        super().__init__()
        self.student_backbone = backbone()
        self.student_head = DINOProjectionHead(512, 512, 64, 1024, freeze_last_layer=1)
        self.teacher_backbone = copy.deepcopy(self.student_backbone)
        self.teacher_head = DINOProjectionHead(512, 512, 64, 1024)
        deactivate_requires_grad(self.teacher_backbone)
        deactivate_requires_grad(self.teacher_head)
        self.criterion = DINOLoss(output_dim=1024, warmup_teacher_temp_epochs=5)

    def forward(self, x: Tensor) -> Tensor:
        return self.student_head(self.student_backbone(x).flatten(start_dim=1))

    def forward_teacher(self, x: Tensor) -> Tensor:
        return self.teacher_head(self.teacher_backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.student_backbone, self.teacher_backbone, m=momentum)
        update_momentum(self.student_head, self.teacher_head, m=momentum)
        views = [view.to(self.device) for view in batch]
        teacher_out = [self.forward_teacher(view) for view in views[:2]]
        student_out = [self.forward(view) for view in views]
        return self.criterion(teacher_out, student_out, epoch=self.current_epoch)

    def on_after_backward(self) -> None:
        self.student_head.cancel_last_layer_gradients(current_epoch=self.current_epoch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.001)


def fit(strategy: Any, folder: Path, name: str, options: dict[str, Any], compiled: bool = False) -> dict[str, Any]:
    """An epoch, a second one from its checkpoint, and the weights that plain Lightning loads."""
    found: dict[str, Any] = {"losses": []}
    for epochs, key, path in ((1, "weights", None), (2, "resumed", folder / "last.ckpt")):
        pl.seed_everything(1, verbose=False)
        kinds = {"SimCLR": SimCLR, "DINO": DINO}
        model: Any = kinds[name]()
        if compiled:  # blocks, as it is advised at stage 3
            for block in (model.backbone[-2], model.projection_head):
                block.compile()
        watch = Watch()
        run = trainer(
            strategy=as_user(strategy),
            world=2,
            max_epochs=epochs,
            enable_checkpointing=True,
            **{"callbacks": [watch, ModelCheckpoint(folder, save_last=True)], **options},
        )
        run.fit(model, pictures(), ckpt_path=path)
        found |= {key: kept(model, run.global_rank), "in shards": watch.in_shards}
        found["losses"] += watch.losses
    kind = type(model)
    return {**found, "loaded": state_of(kind.load_from_checkpoint(folder / "last.ckpt", map_location="cpu"))}
