"""Checks at the start of fit: errors for settings that would train wrongly, and notes beside the table."""

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging

from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.local import shares_modules
from lightning_zero.wording import few_of


def what_needs_gradients(trainer: "pl.Trainer") -> list[str]:
    """Returns the settings in use that need gradients after backward."""
    plugin: Any = trainer.precision_plugin
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    schedules = [each for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
    # An epoch more, forward only, fills batch norms. At its end Lightning steps with gradients of the one before it.
    averages = any(isinstance(each, StochasticWeightAveraging) for each in callbacks)
    has_norms = StochasticWeightAveraging.pl_module_contains_batch_norm(trainer.lightning_module)
    needed = {
        f"Trainer(gradient_clip_val={trainer.gradient_clip_val})": bool(trainer.gradient_clip_val),
        f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})": trainer.accumulate_grad_batches != 1,
        "GradientAccumulationScheduler": any(each.going_to_accumulate_grad_batches() for each in schedules),
        "StochasticWeightAveraging of batch norms": averages and has_norms,
        "precision='16-mixed'": plugin.scaler is not None,
        "manual optimization": not trainer.lightning_module.automatic_optimization,
    }
    return [name for name, is_used in needed.items() if is_used]


def refuse_to_fit(trainer: "pl.Trainer", options: Options) -> None:
    """Raises ValueError for settings that would train something else than what was asked for.

    They are `step_in_backward`, which keeps no gradients, beside a setting that needs them after backward; and tensor
    parallelism beside a callback that copies the model before `configure_model` divides it among the ranks.
    """
    needing = what_needs_gradients(trainer)
    if needing and options.step_in_backward:
        raise ValueError(
            f"step_in_backward=True takes each gradient as it comes, and {needing[0]} needs them all after "
            "backward. Leave one of the two out."
        )
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if options.tensor_parallel_size > 1 and any(isinstance(c, StochasticWeightAveraging) for c in callbacks):
        raise ValueError(
            "StochasticWeightAveraging averages a copy of the model that it makes before configure_model divides "
            "it among tensor-parallel ranks. Use Lightning's WeightAveraging or EMAWeightAveraging."
        )


def warn_of_undivided(engine: Engine) -> None:
    """Warns if tensor-parallel ranks share no parameter."""
    size = engine.mesh.tensor.size
    if size > 1 and not shares_modules(engine.module):
        rank_zero_warn(
            f"tensor_parallel_size={size}, and no module was parallelized: {size} ranks at a time do the same work on "
            "the same batches. Call parallelize_module(..., self.device_mesh['tensor_parallel'], plan) in "
            "configure_model (with fabric.strategy.device_mesh before fabric.setup), or leave tensor_parallel_size out."
        )


def tell_of_foreign(engine: Engine) -> None:
    """Names the parameters that no stage shards."""
    if foreign := engine.parts.foreign:
        kinds = ", ".join(sorted({type(parameter).__name__ for parameter in foreign.values()}))
        rank_zero_info(f"Tensors of their own kind ({kinds}) stay whole on every rank, as they are: {few_of(foreign)}")
