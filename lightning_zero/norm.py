"""Global norm and clipping of gradients that are spread over ranks."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.comm import Comm
from lightning_zero.gradient import GradientShard

Owned = tuple[GradientShard, int]  # a parameter that has a gradient: its shard, and its index there


class GradNorm(NamedTuple):
    total: Tensor  # 0-d, fp32, the same on every rank
    finite: bool


def total_norm(gradients: Iterable[Owned], comm: Comm, norm_type: float = 2.0) -> GradNorm:
    """The norm of all gradients as if they were one vector. A collective: one small reduction.

    Powers are summed per parameter in float64, so the result does not depend on where ranks cut (ZeRO section 5).

    Args:
        gradients: parameters with a gradient, in the same order on every rank, each once.
        comm: over which the gradients are partitioned.
        norm_type: p of the p-norm; ``inf`` for the largest magnitude.
    """
    norms = norm_of_each(gradients, comm, norm_type)
    if not norms.numel():
        return GradNorm(torch.tensor(0.0), finite=True)
    total = norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum().pow(1.0 / norm_type)
    return GradNorm(total.float(), finite=bool(total.isfinite()))


def norm_of_each(gradients: Iterable[Owned], comm: Comm, norm_type: float = 2.0) -> Tensor:
    """The norm of every gradient by itself, float64 on the host. A collective, as `total_norm`."""
    owned = list(gradients)
    if not owned:
        return torch.zeros(0, dtype=torch.float64)
    pieces = [shard.piece(index) for shard, index in owned]
    pieces = [piece.abs() if piece.is_complex() else piece for piece in pieces]
    partitioned = owned[0][0].group.partition.optimizer
    if norm_type == float("inf"):
        largest = torch.stack([_largest(piece) for piece in pieces]).cpu()
        return comm.all_reduce(largest, "norm", "max") if partitioned else largest
    norms = torch.stack([torch.linalg.vector_norm(p, norm_type, dtype=torch.float64) for p in pieces])
    powers = norms.pow(norm_type).cpu()
    return (comm.all_reduce(powers, "norm") if partitioned else powers).pow(1.0 / norm_type)


def _largest(piece: Tensor) -> Tensor:
    return piece.abs().max().double() if piece.numel() else piece.new_zeros((), dtype=torch.float64)


def clip_by_norm_(gradients: Iterable[Owned], comm: Comm, max_norm: float, norm_type: float = 2.0) -> GradNorm:
    """Scales all gradients so that their global norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`."""
    owned = list(gradients)
    norm = total_norm(owned, comm, norm_type)
    factor = torch.clamp(max_norm / (norm.total + 1e-6), max=1.0)
    for shard, index in owned:
        piece = shard.piece(index)
        piece.mul_(factor.to(piece.device))
    return norm


def clip_by_value_(gradients: Iterable[Owned], clip_value: float) -> None:
    """Clamps every element to ``[-clip_value, clip_value]``; local."""
    for shard, index in gradients:
        shard.piece(index).clamp_(-clip_value, clip_value)
