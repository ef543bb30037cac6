"""Global norm, clipping and overflow of gradients that are spread over ranks.

All of it stays on the device: the norm, the factor of clipping and the sums over ranks. The host reads only what it
must decide by: whether an fp16 step is skipped (`Measured.overflow`), and the factor for gradients that are offloaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.device import HOST, Limit, is_host, on_host
from lightning_zero.shards.gradient import averaged_of
from lightning_zero.shards.slot import Slot
from lightning_zero.torch_private import multiply_
from lightning_zero.wire.comm import Comm, Reduction
from lightning_zero.wire.mesh import Mesh

_CHUNK = 2**18  # elements that the host converts to float64 at a time: they stay in its caches


class Overflow(NamedTuple):
    """Where the gradients of a step were not finite."""

    ranks: list[int]  # whose part of the gradients was not
    parameters: list[str]


def versions_of(slots: Sequence[Slot]) -> tuple[tuple[int, int], ...]:
    """Returns the versions of the averaged gradients."""
    return tuple(averaged_of(slot).version(slot) for slot in slots)


@dataclass(frozen=True)
class Measured:
    """This rank's measurements of averaged gradients."""

    slots: tuple[Slot, ...]  # parameters with a gradient, in the same order on every rank, each once
    norm_type: float  # p of the p-norm; inf for the largest magnitude
    parts: Tensor  # of each, this rank's part of the sum of p-th powers, or its largest magnitude; float64
    versions: tuple[tuple[int, int], ...]  # of the gradients when they were measured

    @classmethod
    def of(cls, slots: Sequence[Slot], norm_type: float = 2.0) -> "Measured":
        """Measures this rank's pieces, in float64: the result must not depend on where ranks cut (ZeRO section 5)."""
        norms = [_norm_in(slot, norm_type) for slot in slots]
        device = slots[0].group.places.gathered.device if slots else HOST
        parts = _stacked(norms, device)
        parts = parts if norm_type == inf else parts.pow(norm_type)
        return cls(tuple(slots), norm_type, parts, versions_of(slots))

    def is_of(self, slots: Sequence[Slot], norm_type: float) -> bool:
        """Whether measuring these gradients now would surely give the same. Of those that rest whole, users have plain
        tensors, whose edits through `p.grad.data` raise no version."""
        are_same = (self.norm_type, self.slots) == (norm_type, tuple(slots))
        return are_same and all(averaged_of(slot).is_spread for slot in slots) and self.versions == versions_of(slots)

    def norms(self, mesh: Mesh) -> Tensor:
        """Returns the norm of each gradient, float64 on the host. Collective where gradients are spread."""
        parts = self.parts
        reduction: Reduction = "max" if self.norm_type == inf else "sum"
        if mesh.tensor.rank and self.slots:  # a gradient that each tensor-parallel rank has whole counts once
            each = zip(self.slots, parts.unbind(), strict=True)
            parts = torch.stack([part if slot.local.is_divided else torch.zeros_like(part) for slot, part in each])
        is_cut = bool(self.slots) and self.slots[0].group.is_cut
        comms = [mesh.shard] * is_cut + [mesh.tensor] * (mesh.tensor.size > 1)
        if len(comms) > 1 and mesh.replicate.size == 1:
            comms = [mesh.world]
        for comm in comms:
            parts = comm.all_reduce(parts, "norm", reduction)
        return parts if self.norm_type == inf else parts.pow(1.0 / self.norm_type)

    def total_norm(self, mesh: Mesh) -> Tensor:
        """Returns the norm of all gradients as one vector: 0-d, fp32, on the device, the same on every rank. Collective
        as `norms` is."""
        norms, p = self.norms(mesh), self.norm_type
        if not norms.numel():
            return torch.zeros((), device=norms.device)
        return (norms.max() if p == inf else norms.pow(p).sum().pow(1.0 / p)).float()

    def overflow(self, comm: Comm) -> Overflow:
        """Returns which gradients are not finite on any rank, the same on every rank. Collective; the host waits for
        the device."""
        bad = ~self.parts.isfinite()
        flags = torch.zeros(comm.size + len(self.slots), dtype=torch.uint8, device=bad.device)
        flags[comm.rank] = bad.any()
        flags[comm.size :] = bad
        heard = on_host(comm.all_reduce(flags, "overflow", "max"), comm.limit)
        ranks, parameters = heard.split([comm.size, len(self.slots)])
        return Overflow(
            ranks=ranks.nonzero().flatten().tolist(),
            parameters=[self.slots[at].name for at in parameters.nonzero().flatten().tolist()],
        )


def _norm_in(slot: Slot, norm_type: float) -> Tensor:
    """Returns the norm of this rank's piece of a gradient."""
    averaged = averaged_of(slot)
    known = averaged.squares.sum_of(slot) if averaged.squares is not None and norm_type == 2.0 else None
    return _norm_of(averaged.piece(slot), norm_type) if known is None else known.sqrt()


def _norm_of(piece: Tensor, norm_type: float) -> Tensor:
    piece = piece.abs() if piece.is_complex() else piece
    if norm_type == inf:
        return (piece.abs().max() if piece.numel() else piece.new_zeros(())).double()
    if is_host(piece.device) and norm_type == 2.0 and piece.dtype != torch.float64:
        return _norm_on_host(piece)
    return torch.linalg.vector_norm(piece, norm_type, dtype=torch.float64)


def _norm_on_host(piece: Tensor) -> Tensor:
    """Where torch sums in another dtype than it reads, it takes element after element there: ten times as long."""
    flat, sums = piece.flatten(), []
    room = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float64, device=HOST)  # used again: new memory is slow
    for chunk in flat.split(_CHUNK):
        wide = room[: chunk.numel()].copy_(chunk)
        sums.append(torch.dot(wide, wide))
    return torch.stack(sums).sum().sqrt()


def _stacked(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns 0-d tensors as one on `device`, where those of offloaded gradients, on the host, go in one copy."""
    if not norms:
        return torch.zeros(0, dtype=torch.float64, device=device)
    away = [norm for norm in norms if norm.device != device]
    if not away:
        return torch.stack(list(norms))
    arrived = iter(torch.stack(away).to(device).unbind())
    return torch.stack([norm if norm.device == device else next(arrived) for norm in norms])


def scale_(slots: Sequence[Slot], factor: Tensor, limit: Limit | None = None) -> None:
    """Multiplies all gradients by a 0-d tensor of the device. Where gradients are offloaded the host waits for it, at
    most as long as `limit` says."""
    by_device: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for slot in slots:
        with averaged_of(slot).edit_piece(slot) as piece:
            if averaged_of(slot).is_on_disk:  # at once, so that only one piece is in memory at a time
                piece.mul_(on_host(factor, limit))
            else:
                by_device.setdefault((piece.device, piece.dtype), []).append(piece)
    for (device, _), pieces in by_device.items():
        if not is_host(device):
            multiply_(pieces, factor.to(device))
        elif (known := on_host(factor, limit)) != 1.0:  # to the host, a pass over all gradients is half a step
            multiply_(pieces, known)


def clip_by_norm_(measured: Measured, mesh: Mesh, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
    """Scales all gradients so that their global norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`, and
    returns that norm. With `error_if_nonfinite` the host waits for the device."""
    norm = measured.total_norm(mesh)
    if error_if_nonfinite and not on_host(norm).isfinite():
        raise RuntimeError(
            f"The gradient norm is {norm.item()}, and nothing was clipped. To go on all the same, write "
            "error_if_nonfinite=False."
        )
    scale_(measured.slots, torch.clamp(max_norm / (norm + 1e-6), max=1.0), mesh.world.limit)
    return norm


def clip_by_value_(slots: Sequence[Slot], clip_value: float) -> None:
    """Clamps every element to ``[-clip_value, clip_value]``. No collective."""
    for slot in slots:
        with averaged_of(slot).edit_piece(slot) as piece:
            piece.clamp_(-clip_value, clip_value)
