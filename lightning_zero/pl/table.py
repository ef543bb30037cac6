"""What the start of fit says: what is stored, computed, reduced and stepped in which dtype, and what rests where."""

from collections.abc import Iterable

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.run.engine import Engine
from lightning_zero.shards.early import whole_bytes_of

WORTH_TELLING = 2**30  # bytes that are whole on every rank, and need not be


def table_of(engine: Engine, stage: int, optimizers: Iterable[Optimizer]) -> str:
    """The dtypes of every sort of parameter, for the start of fit."""
    rows = [["elements", "storage", "compute", "reduce", "master"]]
    for numel, kind, reduce in engine.dtype_table():
        cells = (f"{numel:,}", kind.resting, kind.resting, reduce or "-", kind.declared if reduce else "-")
        rows.append([str(cell).removeprefix("torch.") for cell in cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if engine.resident_numel:
        lines.append(f"{engine.resident_numel:,} stay whole on every rank: gathering them costs more than it saves")
    if engine.imbalance is not None:
        nbytes, work = engine.imbalance
        lines.append("Optimizers step whole tensors, in each call of step; the rank with most has, beyond the mean,")
        lines.append(
            f"{nbytes:.1%} of their bytes and {work:.1%} of the work, if a matrix costs what products of it cost"
        )
    if any(group.setting.block > 1 for group in engine.groups):
        lines.append("Pieces that optimizers step part no block of 256 elements")
    lines += _offload_lines(engine, optimizers) + _recompute_lines(engine)
    return "\n  ".join([f"ZeRO stage {stage} on {engine.mesh.world.size} ranks", *lines])


def _offload_lines(engine: Engine, optimizers: Iterable[Optimizer]) -> list[str]:
    """What is offloaded, where to, and how it is stepped."""
    offload = engine.options.offload
    if offload is None:
        return []
    rests = {"cpu": "in host memory", "nvme": f"on disk ({offload.path})"}
    lines = []
    if offload.parameters is not None:
        lines.append(f"Parameters rest {rests[offload.parameters]} between uses")
    if offload.optimizer is not None:
        kernel = "torch's fused kernel" if engine.fuses else "the optimizer's own kernels"
        when = (
            f"in each call of step: {engine.serial_because}" if engine.serial_because else "when its values are wanted"
        )
        narrow = "" if offload.state_torch_dtype is None else f", rounded to {offload.state_torch_dtype}"
        lines.append(f"Optimizer state of {engine.offloaded_numel:,} elements rests {rests[offload.optimizer]}{narrow}")
        lines.append(f"and is stepped by {kernel}, {when}")
        betas = {beta for one in optimizers for group in one.param_groups for beta in group.get("betas", ())}
        stuck = sorted(beta for beta in betas if _is_stuck(beta, offload.state_torch_dtype))
        if stuck:
            lines.append(f"Averages with beta {', '.join(map(str, stuck))} cannot fall there: write 0.99 or less")
    return lines


def _is_stuck(beta: float, dtype: torch.dtype | None) -> bool:
    """Whether ``beta * average`` may be rounded up to the average again."""
    return dtype is not None and 1 - beta <= torch.finfo(dtype).eps / 2


def told_of_whole(module: Module) -> str | None:
    """What to say where parameters are to rest as shards, of a large model that every rank has built whole."""
    nbytes = whole_bytes_of(module)
    if nbytes <= WORTH_TELLING:
        return None
    return f"{nbytes / 1e9:.1f} GB of the model are whole on every rank first: what configure_model() builds never is"


def _recompute_lines(engine: Engine) -> list[str]:
    """Which blocks recompute, and where their inputs rest."""
    policy = engine.options.activation_checkpointing
    if policy is None or engine.recompute is None:
        return []
    rests = "in host memory" if policy.offload else "on the device"
    how = (", each rank's part of it" if policy.partition else "") + (", in one array" if policy.contiguous else "")
    blocks = engine.recompute.chosen.blocks
    return [
        f"{len(blocks)} blocks ({blocks[0]}, ...) compute activations again in backward; their input rests {rests}{how}"
    ]
