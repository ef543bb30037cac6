"""Serves `lightning-zero plan`: model states per rank at each stage, before there is a model."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_zero.config import Offload
from lightning_zero.pl.table import bytes_table, wrapped
from lightning_zero.run.estimate import states_of, states_under_ddp
from lightning_zero.stage import STAGES

DDP = "ddp"


def plans_for(numel: int, stages: Sequence[int], **setting: Any) -> dict[str, Mapping[str, int]]:
    """Returns bytes by category under ``"ddp"``, ``"stage 1"`` and so on.

    `setting` has arguments of `states_of`, which may raise ValueError. Where stages are compared, those below 3 offload
    no parameters.
    """
    common = {name: setting[name] for name in ("precision", "state_tensors", "averages") if name in setting}
    offload: Offload | None = setting.pop("offload", None)
    plans = {DDP: states_under_ddp(numel, **common)}
    for stage in stages:
        here = offload
        if offload is not None and len(stages) > 1 and not STAGES[stage].parameter:
            here = Offload(optimizer=offload.optimizer, path=offload.path if offload.optimizer == "nvme" else None)
        plans[f"stage {stage}"] = states_of(numel, stage=stage, offload=here, **setting)
    return plans


def plan_text(numel: int, stages: Sequence[int], **setting: Any) -> str:
    """Returns a table of `plans_for`, and notes on what it leaves out."""
    plans = plans_for(numel, stages, **setting)
    precision = setting.get("precision", "32-true")
    head = f"{numel:,} parameters, {setting['ranks']} ranks, {precision}"
    beside = (
        "Beside these: a few buckets of at most 25 MiB, at stage 3 room for two of the largest units, and "
        "activations, which no stage divides. "
    )
    if precision.endswith("-mixed"):
        beside += "Under *-mixed all weights count as those of Linear and Conv; others stay in 4 bytes. "
    beside += "The table at the start of fit has the true numbers."
    return "\n  ".join([head, *bytes_table(numel, **plans), *wrapped(beside)])
