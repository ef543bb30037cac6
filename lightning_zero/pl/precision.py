"""Adapts Lightning's precision plugins to gradients that are spread over ranks.

Unchanged, they would silently clip by the norm of the gradients that one rank owns, and each rank would decide by
itself whether an fp16 step overflowed.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, final

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import BitsandbytesPrecision, TransformerEnginePrecision
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_zero.device import HOST, Late
from lightning_zero.run.engine import Engine
from lightning_zero.shards.norm import Overflow
from lightning_zero.wording import few_of

KNOWN = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
USABLE = "'32-true', '64-true', 'bf16-mixed', 'bf16-true', '16-mixed' or '16-true'"


@final
class SkippedSteps:
    """Counts optimizer steps that were skipped because a gradient overflowed in fp16, and ends a run that skips more
    than `most` in a row."""

    def __init__(self, most: int = 20) -> None:
        self.total = 0  # since training began, in whatever run
        self._most = most
        self._in_a_row: list[str] = []  # up to now, each in words

    def note(self, step: int, overflow: Overflow | None, scaler: Any, loss: float | None = None) -> None:
        """Takes note of a step, which was skipped if a gradient overflowed on any rank. Warns if it was.

        Raises:
            RuntimeError: for more than `most` skipped steps in a row.
        """
        if overflow is None or not overflow.ranks:
            self._in_a_row.clear()
            return
        names, scale = overflow.parameters, scaler.get_scale()
        seen = "" if loss is None else f"loss {loss}, "
        self._in_a_row.append(f"step {step}: {seen}non-finite gradients on ranks {overflow.ranks} in {few_of(names)}")
        self.total += 1
        rank_zero_warn(f"Skipped an optimizer step, {self._in_a_row[-1]}. The loss scale is {scale:g}.")
        if len(self._in_a_row) > self._most:
            told = "\n  ".join(self._in_a_row)
            raise RuntimeError(
                f"{len(self._in_a_row)} optimizer steps in a row overflowed in fp16 (max_skipped_steps={self._most}):\n"
                f"  {told}\nThe loss scale is {scale:g}. Look at the parameters named above, lower the learning rate, "
                "or use precision='bf16-mixed'."
            )


def refuse_in_fabric(plugin: FabricPrecision | None) -> None:
    """Raises ValueError for a plugin of Fabric's that stores parameters in a way of its own."""
    if isinstance(plugin, BitsandbytesPrecision | TransformerEnginePrecision):
        raise ValueError(
            f"ZeroStrategy does not work with {type(plugin).__name__}. Use Fabric(precision=...) with {USABLE}."
        )


def adapt(plugin: Precision) -> Precision:
    """Returns a copy of `plugin`, with the user's scaler, that steps sharded optimizers.

    Its class keeps the plugin's name, under which Lightning saves the scaler's state: a checkpoint must load without
    this package. Overrides in a class of the user's own are called first, and their `super()` is `ShardedGradients`.

    Raises:
        TypeError: for an object that is no plugin.
        ValueError: for a plugin that stores parameters in a way of its own.
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
            f"own. Use Trainer(precision=...) with {USABLE}, or a plugin of your own over one of these."
        )
    adapted = copy.copy(plugin)
    kept = {"__qualname__": base.__qualname__, "__module__": base.__module__}
    # In the MRO, `ShardedGradients` comes behind a user's class, and before Lightning's.
    bases = (ShardedGradients, lightnings) if base is lightnings else (base, ShardedGradients, lightnings)
    adapted.__class__ = type(base.__name__, bases, kept)
    return adapted


class ShardedGradients(Precision):
    """Ends backward with the reduction, clips by the global norm, and under a scaler (16-mixed) decides on overflow
    once for all ranks."""

    engine: Engine | None = None
    scaler: Any = None
    skipped = SkippedSteps()  # for all plugins before their first run; `begin_run` makes another one
    skipped_last = False  # whether the latest step was: its learning rate schedulers do not move either
    _late_norms: list[Late]
    grad_norm: Tensor | None = None  # of the latest step, if it was clipped by norm; 0-d, on the device
    _has_clipped = False  # since backward
    _warned_of_nan = False

    def __reduce__(self) -> Any:
        """Pickles the plugin that was adapted (``start_method="spawn"`` sends the strategy to every rank)."""
        plain = self._adapted.__new__(self._adapted)
        vars(plain).update(vars(self), engine=None)
        return adapt, (plain,)

    @property
    def _adapted(self) -> type[Precision]:
        """The class of the plugin that was adapted."""
        kinds = (base for base in type(self).__mro__[1:] if issubclass(base, Precision))
        return next(base for base in kinds if not issubclass(base, ShardedGradients))

    def begin_run(self, engine: Engine, max_skipped_steps: int) -> None:
        self.engine, self.skipped = engine, SkippedSteps(max_skipped_steps)
        self.skipped_last, self.grad_norm, self._late_norms = False, None, []

    @property
    def _live_engine(self) -> Engine | None:
        """The engine of the run under way. After a run, the user's own calls do what they do without one."""
        return None if self.engine is None or self.engine.closed else self.engine

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: "pl.LightningModule", optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        engine = self._live_engine
        inside: Any = nullcontext()
        if engine is not None:
            inside = engine.backward() if _is_lightnings(model, "backward") else engine.backward_of_users()
        with inside:
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def _wrap_closure(  # type: ignore[override]
        self, model: "pl.LightningModule", optimizer: Optimizer, closure: Callable[[], Any]
    ) -> Any:
        """Runs the closure and clips, which is the last thing before the step unless users have written how to clip."""
        self._has_clipped = False
        result = super()._wrap_closure(model, optimizer, closure)
        if self._has_clipped and not self._is_clipped_by_users(model):
            assert self.engine is not None
            self.engine.runner.expect_step()
        return result

    def _is_clipped_by_users(self, model: "pl.LightningModule") -> bool:
        """Whether users have written how to clip, in the module (or around its methods), in a plugin, or in the closure
        of manual optimization, which hooks follow: then code of theirs may come before the step."""
        is_lightnings = self._adapted.__module__.startswith("lightning.") and model.automatic_optimization
        return not is_lightnings or any(
            not _is_lightnings(model, name) for name in ("configure_gradient_clipping", "clip_gradients")
        )

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        engine = self._live_engine
        if engine is None:
            super().clip_grad_by_norm(optimizer, clip_val)
            return
        self.grad_norm = engine.gradients.clip_by_norm_(self.main_params(optimizer), float(clip_val))
        self._has_clipped = True
        if not self._warned_of_nan and self.scaler is None:
            self._late_norms.append(Late(self.grad_norm))
            self._warn_of_nan()

    def _warn_of_nan(self) -> None:
        """Warns, once, of a gradient norm that is not finite. On a device it is read when it has come by itself, maybe
        steps later: to wait for it would stop the device."""
        while self._late_norms and self._late_norms[0].is_here:
            total = self._late_norms.pop(0).read()
            if total.isfinite() or self._warned_of_nan:
                continue
            self._warned_of_nan = True
            rank_zero_warn(
                f"The gradient norm is {total.item()}; the step is taken all the same, as under DDP. "
                "Only precision='16-mixed' skips steps. This is said once."
            )

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        engine = self._live_engine
        if engine is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            engine.gradients.clip_by_value_(self.main_params(optimizer), float(clip_val))
            self._has_clipped = True

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        engine = self._live_engine
        if not isinstance(self, MixedPrecision) or self.scaler is None or engine is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "precision='16-mixed' does not work with LBFGS: its closure runs several backwards a step."
            )
        loss = closure()
        if loss is None and model.automatic_optimization:
            self.skipped_last = False
            self._after_closure(model, optimizer)
            return None  # training_step returned None, and there was no backward
        overflow = engine.gradients.unscale_(self.scaler, optimizer)
        self._after_closure(model, optimizer)
        step_output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        self.skipped_last = bool(overflow.ranks)
        value = float(loss) if self.skipped_last and isinstance(loss, Tensor) else None
        self.skipped.note(model.trainer.global_step, overflow, self.scaler, value)
        return step_output

    def scaling(self) -> dict[str, Tensor]:
        """Returns the number of skipped steps and the loss scale under a scaler, otherwise nothing."""
        if self.scaler is None:
            return {}
        skipped, scale = float(self.skipped.total), self.scaler.get_scale()
        return {
            "zero/skipped_steps": torch.tensor(skipped, device=HOST),
            "zero/loss_scale": torch.tensor(scale, device=HOST),
        }


def _is_lightnings(model: "pl.LightningModule", name: str) -> bool:
    """Whether a method is Lightning's own. Its `is_overridden` looks through `functools.wraps`, and misses wrappers."""
    return getattr(getattr(model, name), "__func__", None) is getattr(pl.LightningModule, name)


def guard_schedulers(
    plugin: ShardedGradients, module: "pl.LightningModule", configs: Callable[[], Sequence[LRSchedulerConfig]]
) -> Callable[[], None]:
    """Keeps learning rate schedulers with ``interval="step"`` from moving in a skipped fp16 step (a declared deviation
    from DDP). Returns a function that undoes this. `configs` returns the schedulers of then: the learning rate finder
    replaces them."""
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
