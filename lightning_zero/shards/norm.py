"""Global norm, clipping and overflow of gradients that are spread over ranks.

The host waits for the device once: `Measured.of` brings one number per parameter to the host. Norm, clipping and the
decision to skip a step are computed from these numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.shards.gradient import GradientShard
from lightning_zero.shards.slot import Slot
from lightning_zero.wire.comm import Comm, Reduction
from lightning_zero.wire.mesh import Mesh


class GradNorm(NamedTuple):
    total: Tensor  # 0-d, fp32, the same on every rank
    finite: bool


class Overflow(NamedTuple):
    """Where the gradients of a step were not finite."""

    ranks: list[int]  # whose part of the gradients was not
    parameters: list[str]


def gradient_of(slot: Slot) -> GradientShard:
    """Returns the gradients of the group of a parameter that trains."""
    assert slot.gradient is not None, slot.name
    return slot.gradient


def versions_of(slots: Sequence[Slot]) -> tuple[int, ...]:
    """Returns the versions of the averaged gradients."""
    return tuple(gradient_of(slot).version(slot) for slot in slots)


@dataclass(frozen=True)
class Measured:
    """This rank's measurements of averaged gradients."""

    slots: tuple[Slot, ...]  # parameters with a gradient, in the same order on every rank, each once
    norm_type: float  # p of the p-norm; inf for the largest magnitude
    parts: Tensor  # of each, this rank's part of the sum of p-th powers, or its largest magnitude; float64, on the host
    versions: tuple[int, ...]  # of the gradients when they were measured

    @classmethod
    def of(cls, slots: Sequence[Slot], norm_type: float = 2.0) -> "Measured":
        """Measures this rank's pieces, in float64: the result must not depend on where ranks cut (ZeRO section 5)."""
        norms: list[Tensor] = []
        for slot in slots:
            piece = gradient_of(slot).piece(slot)
            piece = piece.abs() if piece.is_complex() else piece
            if norm_type == inf:
                norms.append((piece.abs().max() if piece.numel() else piece.new_zeros(())).double())
            else:
                norms.append(torch.linalg.vector_norm(piece, norm_type, dtype=torch.float64))
        parts = torch.zeros(len(norms), dtype=torch.float64)
        for device in {norm.device for norm in norms}:
            at = [place for place, norm in enumerate(norms) if norm.device == device]
            parts[at] = torch.stack([norms[place] for place in at]).cpu()
        parts = parts if norm_type == inf else parts.pow(norm_type)
        return cls(tuple(slots), norm_type, parts, versions_of(slots))

    def is_of(self, slots: Sequence[Slot], norm_type: float) -> bool:
        """Whether measuring these gradients now would give the same."""
        are_same = (self.norm_type, self.slots) == (norm_type, tuple(slots))
        return are_same and self.versions == versions_of(slots)

    def norms(self, mesh: Mesh) -> Tensor:
        """Returns the norm of each gradient, float64 on the host. Collective where gradients are spread."""
        parts = self.parts
        reduction: Reduction = "max" if self.norm_type == inf else "sum"
        if self.slots and self.slots[0].group.is_cut:
            parts = mesh.shard.all_reduce(parts, "norm", reduction)
        if mesh.tensor.size > 1:
            if mesh.tensor.rank:  # a gradient that each tensor-parallel rank has whole counts once
                parts = parts * torch.tensor([slot.local.is_divided for slot in self.slots], dtype=parts.dtype)
            parts = mesh.tensor.all_reduce(parts, "norm", reduction)
        return parts if self.norm_type == inf else parts.pow(1.0 / self.norm_type)

    def total_norm(self, mesh: Mesh) -> GradNorm:
        """Returns the norm of all gradients as one vector. Collective as `norms` is."""
        norms, p = self.norms(mesh), self.norm_type
        if not norms.numel():
            return GradNorm(torch.tensor(0.0), finite=True)
        total = norms.max() if p == inf else norms.pow(p).sum().pow(1.0 / p)
        return GradNorm(total.float(), finite=bool(total.isfinite()))

    def overflow(self, comm: Comm) -> Overflow:
        """Returns which gradients are not finite on any rank, the same on every rank. Collective."""
        bad = ~self.parts.isfinite()
        flags = torch.zeros(comm.size + len(self.slots), dtype=torch.uint8)
        flags[comm.rank] = bad.any()
        flags[comm.size :] = bad
        ranks, parameters = comm.all_reduce(flags, "overflow", "max").split([comm.size, len(self.slots)])
        return Overflow(
            ranks=ranks.nonzero().flatten().tolist(),
            parameters=[self.slots[at].name for at in parameters.nonzero().flatten().tolist()],
        )


def scale_(slots: Sequence[Slot], factor: Tensor) -> None:
    """Multiplies all gradients by a 0-d tensor."""
    by_device: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for slot in slots:
        with gradient_of(slot).edit_piece(slot) as piece:
            if gradient_of(slot).is_on_disk:  # at once, so that only one piece is in memory at a time
                piece.mul_(factor)
            else:
                by_device.setdefault((piece.device, piece.dtype), []).append(piece)
    for (device, _), pieces in by_device.items():
        torch._foreach_mul_(pieces, factor.to(device))


def clip_by_norm_(measured: Measured, mesh: Mesh, max_norm: float, *, error_if_nonfinite: bool = False) -> GradNorm:
    """Scales all gradients so that their global norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`."""
    norm = measured.total_norm(mesh)
    if error_if_nonfinite and not norm.finite:
        raise RuntimeError(
            f"The gradient norm is {norm.total.item()}, and nothing was clipped. To go on all the same, write "
            "error_if_nonfinite=False."
        )
    scale_(measured.slots, torch.clamp(max_norm / (norm.total + 1e-6), max=1.0))
    return norm


def clip_by_value_(slots: Sequence[Slot], clip_value: float) -> None:
    """Clamps every element to ``[-clip_value, clip_value]``. No collective."""
    for slot in slots:
        with gradient_of(slot).edit_piece(slot) as piece:
            piece.clamp_(-clip_value, clip_value)
