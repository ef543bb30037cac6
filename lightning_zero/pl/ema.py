"""`ZeroEMA`: Lightning's `EMAWeightAveraging`, sharded."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn
from typing_extensions import override

from lightning_zero.device import HOST
from lightning_zero.pl.checkpointing import CheckpointingStrategy
from lightning_zero.run.average import Average, room_for_average
from lightning_zero.run.engine import Engine
from lightning_zero.tiers.ledger import Category, Tier


class ZeroEMA(EMAWeightAveraging):
    """Keeps an exponential moving average of the weights, 1/N of it on each of N ranks.

    It equals Lightning's `EMAWeightAveraging` to the bit, and does the same at the same time: the average is updated
    after optimizer steps, swapped in for validation, and becomes the module's own weights when fit ends (so `test` uses
    it too). In checkpoints it is the "state_dict", which `load_from_checkpoint`, ``lightning-zero consolidate`` and
    other evaluation read; the weights that train are beside it. Checkpoints resume at any stage, on any number of
    ranks, and with `EMAWeightAveraging`, whose checkpoints resume here. Under any strategy but `ZeroStrategy` this is
    `EMAWeightAveraging` itself.

    Where the optimizer's state is offloaded, the average is kept with it. Weights declared in two bytes are averaged in
    fp32. A weight that is frozen, and in no optimizer, is its own average, and takes no memory (Lightning's drifts by
    rounding).

    Args:
        device: where the average is kept, and updated: None, beside the weights that the optimizer steps, or
            ``"cpu"``.
        use_buffers: average buffers as well, as Lightning does; integer ones are rounded down each time. Otherwise the
            average has the latest buffers.
        decay: of the average, 0 to 1: ``average = decay * average + (1 - decay) * weights``. The first update copies
            the weights.
        update_every_n_steps: optimizer steps between updates.
        update_starting_at_step: the first optimizer step, from 0, after which the average is updated. Until then it is
            the model at the start of fit, as in Lightning, and that is what is validated and saved.
        update_starting_at_epoch: the first epoch, from 0, at the end of which it is updated once more.

    Raises:
        ValueError: for a decay outside of 0 to 1; at the start of fit, for another device.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        super().__init__(
            device, use_buffers, decay, update_every_n_steps, update_starting_at_step, update_starting_at_epoch
        )
        self._rule = get_ema_avg_fn(decay)
        self._average_model: Any = None  # an `Average` in training under ZeroStrategy, else Lightning's own
        self._saved: Mapping[str, Any] | None = None  # the checkpoint that fit resumes from
        self._updates: int | None = None  # number of updates of the average that is in the module since fit ended

    @property
    @override
    def state_key(self) -> str:
        """The key of Lightning's own callback, so that each reads the other's checkpoints."""
        return EMAWeightAveraging.__qualname__

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if not isinstance(trainer.strategy, CheckpointingStrategy):
            super().setup(trainer, pl_module, stage)
        elif stage == "fit":
            self._average_model = self._saved = self._updates = None

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Begins the average, now that the engine is made and the module is loaded from the checkpoint."""
        strategy = trainer.strategy
        if not isinstance(strategy, CheckpointingStrategy):
            return
        assert strategy.engine is not None
        average = Average(
            strategy.engine, self._rule, use_buffers=self._use_buffers, on_host=self._rests_on_host(pl_module.device)
        )
        if self._saved is not None:
            average.load(self._saved["state_dict"], int(self._saved["averaging_state"]["n_averaged"]))
        self._average_model, self._saved = average, None

    def room(self, engine: Engine) -> dict[tuple[Category, Tier], int]:
        """Returns the bytes that the average will take on this rank, by tier."""
        return room_for_average(engine, on_host=self._rests_on_host(engine.device))

    def _rests_on_host(self, device: torch.device) -> bool:
        wanted = None if self._device is None else torch.device(self._device)
        if wanted is not None and wanted.type not in ("cpu", device.type):
            raise ValueError(
                f"ZeroEMA(device={str(wanted)!r}): each rank averages its own part of the weights, on its own device "
                "or on the host. Leave device out, or write device='cpu'."
            )
        return wanted is not None and wanted.type == "cpu"

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if isinstance(self._average_model, Average):
            self._average_model.drop_loaded()

    @override
    def _swap_models(self, pl_module: "pl.LightningModule") -> None:
        if isinstance(self._average_model, Average):
            self._average_model.swap()
        else:
            super()._swap_models(pl_module)

    @override
    def _copy_average_to_current(self, pl_module: "pl.LightningModule") -> None:
        """Makes the average the module's weights for good."""
        if not isinstance(self._average_model, Average):
            super()._copy_average_to_current(pl_module)
            return
        if not self._average_model.updates:
            rank_zero_warn(
                "ZeroEMA was never updated: training ended before update_starting_at_step or _epoch. The average, "
                "which the module has now, is the model as it was at the start of fit."
            )
        self._average_model.swap()
        self._updates, self._average_model = self._average_model.updates, None

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """Returns `module.state_dict()` with the averaged values, whole, on the host; in training, between two steps.
        After fit they are the module's own. Call it on every rank.

        Raises:
            RuntimeError: outside of training.
        """
        if self._average_model is None:
            raise RuntimeError("ZeroEMA averages in training. After fit, the module's weights are the average.")
        if isinstance(self._average_model, Average):
            return self._average_model.full()
        return {name: value.detach().clone() for name, value in self._average_model.module.state_dict().items()}

    @override
    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Adds Lightning's entries: the average becomes the "state_dict", with the module's own weights beside it."""
        average, strategy = self._average_model, trainer.strategy
        if not isinstance(strategy, CheckpointingStrategy):
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            return
        updates = self._updates if average is None else average.updates
        if updates is None:
            return
        own = averaged = checkpoint["state_dict"]
        if average is not None:
            averaged = average.full() if strategy.saves_single_file() else average.spread()
            if average.is_swapped:  # an evaluation has failed, and this checkpoint is to rescue the training
                own, averaged = averaged, own
        checkpoint["current_model_state"], checkpoint["state_dict"] = own, averaged
        checkpoint["averaging_state"] = {"n_averaged": torch.tensor(updates, device=HOST)}

    @override
    def on_load_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Loads the weights that trained, for training to go on. Any other run has the average in its module already,
        which is the "state_dict" of the checkpoint."""
        strategy = trainer.strategy
        if not isinstance(strategy, CheckpointingStrategy):
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
        elif trainer.state.fn != TrainerFn.FITTING:
            self._updates = None
        elif "current_model_state" in checkpoint and "averaging_state" in checkpoint:
            own = {"state_dict": checkpoint["current_model_state"]}
            strategy.load_model_state_dict(own, strict=pl_module.strict_loading)
            self._saved = checkpoint
        else:
            rank_zero_warn(
                "The checkpoint was saved without ZeroEMA or EMAWeightAveraging: the average begins with its weights."
            )
