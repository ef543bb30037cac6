"""One decision on overflow for all ranks (fp16 loss scaling)."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_zero.comm import Comm
from lightning_zero.norm import Owned


class Overflow(NamedTuple):
    """Where a step's gradients were not finite."""

    ranks: list[int]  # whose part of the gradients
    parameters: list[str]


def unscale_(scaler: GradScaler, optimizer: Optimizer, gradients: Iterable[Owned], comm: Comm) -> Overflow:
    """`GradScaler.unscale_` for gradients that are spread over ranks: every rank comes to the same verdict.

    The scaler's own would look at what this rank owns alone, and ranks would then disagree on whether to step.

    Args:
        scaler: the user's; its state for `optimizer` is as after its own `unscale_`.
        optimizer: whose gradients.
        gradients: its parameters with a gradient.
        comm: over which they are partitioned.
    """
    owned = list(gradients)
    scale = scaler.get_scale()
    bad = [bool((~torch.isfinite(shard.piece(index))).any()) for shard, index in owned]
    for shard, index in owned:
        shard.piece(index).mul_(1.0 / scale)
    everywhere = comm.all_gather_object([at for at, is_bad in enumerate(bad) if is_bad], "overflow")
    names = [shard.group.layout.spans[index].name for shard, index in owned]
    overflow = Overflow(
        ranks=[rank for rank, found in enumerate(everywhere) if found],
        parameters=[names[at] for at in sorted({at for found in everywhere for at in found})],
    )
    device = owned[0][0].group.kind.device if owned else torch.device("cpu")
    state: dict[str, Any] = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {device: torch.tensor(float(bool(overflow.ranks)), device=device)}
    state["stage"] = OptState.UNSCALED
    return overflow
