"""Lightning's precision plugins, made to know that gradients and optimizer state are spread over ranks.

Left alone, they would clip by the norm of what one rank owns, with no error, and let each rank decide by itself
whether an fp16 step overflowed.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_zero.run.engine import Engine
from lightning_zero.shards.norm import Overflow

KNOWN = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)


def adapt(plugin: Precision) -> Precision:
    """A copy of `plugin` (the user's scaler and all) that steps sharded optimizers.

    Its class keeps its name: Lightning files the scaler's state under it, and a checkpoint must load without us. What a
    class of the user's own overrides is called first, and its `super()` is ours.

    Raises:
        TypeError: for what is no plugin.
        ValueError: for a plugin whose way of storing parameters we do not know.
    """
    if isinstance(plugin, ShardedGradients):
        return plugin
    base = type(plugin)
    names = ("lightning.", "pytorch_lightning.")
    lightnings = next((kind for kind in base.__mro__ if kind.__module__.startswith(names)), None)
    if lightnings is None:
        raise TypeError(
            f"precision_plugin={plugin!r} is no plugin of Lightning's. Write Trainer(precision=...) instead."
        )
    if lightnings not in KNOWN:
        raise ValueError(
            f"ZeroStrategy does not work with {base.__name__}: {lightnings.__name__} stores parameters in a way of its "
            "own. Use Trainer(precision=...) with '32-true', '64-true', 'bf16-mixed', 'bf16-true', '16-mixed' or "
            "'16-true', or a plugin of your own over one of these."
        )
    adapted = copy.copy(plugin)
    kept = {"__qualname__": base.__qualname__, "__module__": base.__module__}
    bases = (_sharded(lightnings),) if base is lightnings else (base, _sharded(lightnings))
    adapted.__class__ = type(base.__name__, bases, kept)
    return adapted


@cache
def _sharded(lightnings: type[Precision]) -> type[Precision]:
    """Ours before one of Lightning's; behind a user's class, which inherits from Lightning's, it comes in between."""
    return type(f"Sharded{lightnings.__name__}", (ShardedGradients, lightnings), {})


class SkippedStep(NamedTuple):
    """An optimizer step that was not taken because a gradient overflowed in fp16."""

    step: int
    loss: float | None
    overflow: Overflow

    def __str__(self) -> str:
        names = self.overflow.parameters
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        loss = "" if self.loss is None else f"loss {self.loss}, "
        return f"step {self.step}: {loss}non-finite gradients on ranks {self.overflow.ranks} in {shown}"


def tell_skipped(step: SkippedStep, scale: float) -> None:
    """Warns of an optimizer step that was not taken."""
    rank_zero_warn(f"Skipped an optimizer step, {step}. The loss scale is {scale:g}.")


def refuse_endless(in_a_row: Sequence[SkippedStep], most: int, scale: float) -> None:
    """Raises RuntimeError when more than `most` steps in a row were not taken."""
    if len(in_a_row) > most:
        told = "\n  ".join(map(str, in_a_row))
        raise RuntimeError(
            f"{len(in_a_row)} optimizer steps in a row overflowed in fp16 (max_skipped_steps={most}):\n  {told}\n"
            f"The loss scale is {scale:g}. Look at the parameters named above, lower the learning rate, or use "
            "precision='bf16-mixed'."
        )


class ShardedGradients(Precision):
    """Ends backward with the reduction, clips by the global norm, and under a scaler (16-mixed) decides on overflow
    once for all ranks: skipped steps are told, counted and bounded."""

    engine: Engine | None = None
    scaler: Any = None
    max_skipped_steps = 20
    skipped_steps = 0  # since training began, in whatever run
    skipped_last = False  # the latest step, so that its scheduler does not move either
    grad_norm: Tensor | None = None  # of the latest step, where it was clipped by it; 0-d, on the host
    _in_a_row: Sequence[SkippedStep] = ()  # up to now
    _warned_of_nan = False

    def __reduce__(self) -> Any:
        """Pickles as the plugin it was made of (``start_method="spawn"`` sends the strategy to every rank)."""
        base = next(base for base in type(self).__mro__[1:] if not issubclass(base, ShardedGradients))
        plain = base.__new__(base)
        vars(plain).update(vars(self), engine=None)
        return adapt, (plain,)

    def begin(self, engine: Engine, max_skipped_steps: int) -> None:
        """A run starts."""
        self.engine, self.max_skipped_steps = engine, max_skipped_steps
        self.skipped_steps, self.skipped_last, self.grad_norm, self._in_a_row = 0, False, None, ()

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: "pl.LightningModule", optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        with nullcontext() if self.engine is None else self.engine.backward():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self.engine is not None
        norm = self.engine.averages.clip_by_norm_(self.main_params(optimizer), float(clip_val))
        self.grad_norm = norm.total
        if not norm.finite and not self._warned_of_nan and self.scaler is None:
            self._warned_of_nan = True
            rank_zero_warn(
                f"The gradient norm is {norm.total.item()}; the step is taken all the same, as under DDP. "
                "Only precision='16-mixed' skips steps. This is said once."
            )

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self.engine is not None
        self.engine.averages.clip_by_value_(self.main_params(optimizer), float(clip_val))

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if not isinstance(self, MixedPrecision) or self.scaler is None or self.engine is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "precision='16-mixed' does not work with LBFGS: its closure runs several backwards a step."
            )
        loss = closure()
        if loss is None and model.automatic_optimization:
            self._after_closure(model, optimizer)
            return None  # training_step returned None: there was no backward
        overflow = self.engine.averages.unscale_(self.scaler, optimizer)
        self._after_closure(model, optimizer)
        step_output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        self._note(model.trainer, overflow, loss)
        return step_output

    def _note(self, trainer: "pl.Trainer", overflow: Overflow, loss: Any) -> None:
        scale = self.scaler.get_scale()
        self.skipped_last = bool(overflow.ranks)
        if self.skipped_last:
            self.skipped_steps += 1
            value = float(loss) if isinstance(loss, Tensor) else None
            self._in_a_row = (*self._in_a_row, SkippedStep(trainer.global_step, value, overflow))
            tell_skipped(self._in_a_row[-1], scale)
        else:
            self._in_a_row = ()
        trainer.callback_metrics["zero/skipped_steps"] = torch.tensor(float(self.skipped_steps))
        trainer.callback_metrics["zero/loss_scale"] = torch.tensor(scale)
        refuse_endless(self._in_a_row, self.max_skipped_steps, scale)


def guard_schedulers(
    plugin: ShardedGradients, module: "pl.LightningModule", configs: Callable[[], Sequence[LRSchedulerConfig]]
) -> Callable[[], None]:
    """A skipped fp16 step does not move those of the schedulers that step with it (a declared deviation from DDP).
    `configs` tells them when asked: the learning rate finder puts others in their place. Returns what undoes it."""
    if plugin.scaler is None:
        return lambda: None
    step, own = module.lr_scheduler_step, vars(module).get("lr_scheduler_step")

    def step_unless_skipped(scheduler: Any, metric: Any) -> None:
        by_step = any(config.scheduler is scheduler and config.interval == "step" for config in configs())
        if not (plugin.skipped_last and by_step):
            step(scheduler, metric)

    module.lr_scheduler_step = step_unless_skipped  # type: ignore[method-assign]
    if own is None:
        return partial(delattr, module, "lr_scheduler_step")
    return partial(setattr, module, "lr_scheduler_step", own)
