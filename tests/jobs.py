"""LightningModules and whole Trainer runs that the tests of the strategy call on real ranks."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroStrategy

SAMPLES, FEATURES, CLASSES = 48, 12, 5


class Classifier(L.LightningModule):
    """BatchNorm, a tied layer, a frozen one, an unused one and a parameter of the LightningModule's own."""

    def __init__(self, lr: float = 1e-2, tied: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 19),
            nn.BatchNorm1d(19),
            nn.Tanh(),
            nn.Sequential(nn.Linear(19, 19), nn.LayerNorm(19)),
            nn.Linear(19, CLASSES),
        )
        self.again = nn.Linear(19, 19)
        if tied:
            self.again.weight = self.net[3][0].weight
        self.frozen = nn.Linear(FEATURES, FEATURES)
        self.frozen.requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Linear(4, 3)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[3](self.net[:3](self.frozen(x)))
        return self.net[4](hidden + self.again(hidden)) * self.temperature

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))

    def configure_optimizers(self) -> Any:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(seed: int = 0, batch_size: int = 4, shuffle: bool = False, samples: int = SAMPLES) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


def strategy_from(given: Any) -> Any:
    """A name, or the arguments of ZeroStrategy; made on the rank, since strategies do not travel."""
    return ZeroStrategy(**given) if isinstance(given, dict) else given


def trainer(strategy: Any, world: int, **kwargs: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if kwargs.get("precision") == "16-mixed":  # Lightning would make it bf16 on a CPU
        kwargs.pop("precision")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        kwargs["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    return L.Trainer(strategy=strategy_from(strategy), **{**defaults, **kwargs})


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def fit(strategy: Any, world: int, shuffle: bool = True, **kwargs: Any) -> dict[str, Any]:
    """One fit from a seed; everything a parity test compares."""
    L.seed_everything(1, verbose=False)
    # A weight used twice has its two gradients summed in fp32 under bf16-true: a declared deviation from DDP.
    model = Classifier(tied=kwargs.get("precision") != "bf16-true")
    run = trainer(strategy, world, **kwargs)
    run.fit(model, loader(shuffle=shuffle), loader(seed=1))
    return {
        "losses": model.losses,
        "norms": model.norms,
        "weights": state_of(model),
        "val_loss": float(run.callback_metrics["val_loss"]),
        "lr": [group["lr"] for group in run.optimizers[0].param_groups],
    }


def save_at(path: Path, strategy: Any, world: int, **kwargs: Any) -> dict[str, Any]:
    """Fits for one epoch, saves, and fits for a second."""
    L.seed_everything(1, verbose=False)
    model = Classifier()
    run = trainer(strategy, world, **kwargs)
    run.fit(model, loader())
    run.save_checkpoint(path)
    return {"weights": state_of(model)}


def resume_from(path: Path, strategy: Any, world: int, **kwargs: Any) -> dict[str, Any]:
    L.seed_everything(2, verbose=False)
    model = Classifier()
    run = trainer(strategy, world, **{**kwargs, "max_epochs": 2})
    run.fit(model, loader(), ckpt_path=path)
    return {"losses": model.losses, "weights": state_of(model)}


def whole_life(strategy: Any, world: int) -> dict[str, Any]:
    """validate, fit, test, predict, save, fit again, in one process."""
    L.seed_everything(1, verbose=False)
    model = Classifier()
    calls: list[int] = []
    model.net[0].register_forward_hook(lambda *_: calls.append(1))
    run = trainer(strategy, world)
    run.validate(model, loader(seed=1), verbose=False)
    run.fit(model, loader(), loader(seed=1))
    test_loss = run.test(model, loader(seed=2), verbose=False)[0]["test_loss"]
    predictions = run.predict(model, loader(seed=3))
    path = Path(run.strategy.broadcast(f"/tmp/lightning_zero_{id(model)}.ckpt"))
    run.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=False)
    run.strategy.barrier()
    if run.is_global_zero:
        path.unlink()
    run.fit_loop.max_epochs = 2
    run.fit(model, loader(shuffle=True))
    assert predictions is not None
    return {
        "test_loss": test_loss,
        "predictions": torch.cat([torch.as_tensor(p) for p in predictions]),
        "losses": model.losses,
        "checkpoint": checkpoint["state_dict"] | _flatten(checkpoint["optimizer_states"][0]),
        "user_hook_calls": len(calls),
    }


def _flatten(optimizer_state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, state in optimizer_state["state"].items()
        for name, value in state.items()
    }


class ClippedClassifier(Classifier):
    """Clips by hand, through Lightning's own helper, in the hook that Lightning offers for it."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


def fit_clipped(strategy: Any, world: int, clip: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = ClippedClassifier() if clip == "override" else Classifier()
    after: list[float] = []

    class NormAfterClipping(L.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            norm = grad_norm(model, 2)
            after.append(float(norm["grad_2.0_norm_total"]) if norm else 0.0)

    settings = {} if clip == "override" else {"gradient_clip_val": 0.05, "gradient_clip_algorithm": clip}
    trainer(strategy, world, callbacks=[NormAfterClipping()], **settings).fit(model, loader())
    return {"losses": model.losses, "norms_after": after}
