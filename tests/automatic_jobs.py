"""Fits whose stage is chosen when they begin, on ranks that say how much memory they have."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import jobs
from lightning_zero import ZeroEMA, ZeroStrategy
from lightning_zero.pl import automatic

WIDTH, LAYERS = 512, 6


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.make()

    def make(self) -> None:
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = layer(x).tanh()
        self.losses.append(x.detach().square().mean())
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Late(Model):
    def make(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            super().make()


class Curious(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 1e9 else 0 * loss


class TwoLoaders(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["one"], batch_idx) + super().training_step(batch["other"][:1], batch_idx)


class Stream(IterableDataset[tuple[Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return iter([(torch.ones(WIDTH),)] * 8)


def loader() -> DataLoader[Any]:
    rows = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)


def fit(
    strategy: Any,
    make: type[Model] = Model,
    device_bytes: Sequence[int] = (10**9, 10**9),
    averages: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Trains, and tells what was chosen, what that takes, and what came of it."""
    L.seed_everything(3, verbose=False)
    module = make()
    given = ZeroStrategy(**strategy) if isinstance(strategy, dict) else strategy
    run = jobs.trainer(given, 2, limit_val_batches=0, **kwargs)
    data: Any = {"one": loader(), "other": loader()} if make is TwoLoaders else loader()
    found = {}

    def free(*_: Any) -> int:  # of the machine, on which both ranks are
        return 2 * device_bytes[run.global_rank]

    class Reports(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if isinstance(trainer.strategy, ZeroStrategy):
                found["at_rest"] = dict(trainer.strategy.memory_report())

    run.callbacks += [Reports(), *([ZeroEMA(decay=0.5)] if averages else [])]  # type: ignore[attr-defined]
    with patch.object(automatic, "available_host_bytes", free), jobs.listening() as said:
        run.fit(module, data)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    chosen = {name: getattr(run.strategy, name, None) for name in ("stage", "offload", "activation_checkpointing")}
    return {"losses": module.losses, "weights": weights, "said": said, **chosen, **found}


def error_of(strategy: Mapping[str, Any], device_bytes: int, streams: bool = False) -> str | None:
    """Returns the error of a fit."""
    run = jobs.trainer(ZeroStrategy(**strategy), 2)
    data: Any = DataLoader(Stream(), batch_size=4) if streams else loader()
    try:
        with patch.object(automatic, "available_host_bytes", lambda: 2 * device_bytes):
            run.fit(Model(), data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def evaluate_and_fit(device_bytes: int) -> list[int]:
    """Returns the stage of an evaluation, and that of the fit after it."""
    run, module, stages = jobs.trainer(ZeroStrategy("auto"), 2), Model(), []
    module.validation_step = module.training_step  # type: ignore[method-assign]
    with patch.object(automatic, "available_host_bytes", lambda: 2 * device_bytes):
        run.validate(module, loader(), verbose=False)
        stages.append(run.strategy.stage)  # type: ignore[attr-defined]
        run.fit(module, loader())
    return [*stages, run.strategy.stage]  # type: ignore[attr-defined]
