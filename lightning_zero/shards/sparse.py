"""Sparse gradients, as embeddings have with ``sparse=True``: what travels is dense, and tells the rows that have one.

SparseAdam leaves the rows alone that no rank has used. So a dense gradient has -0.0 where there is none: that is the
one value which changes no other that it is added to, and that no sum with another value gives. It costs no message.
"""

import torch
from torch import Tensor

from lightning_zero.shards.slot import Slot

NOTHING = -0.0


def nothing_of(slot: Slot) -> float:
    """Returns what a rank contributes that has no gradient of a parameter."""
    return NOTHING if slot.is_sparse else 0.0


def as_dense(grad: Tensor, slot: Slot) -> Tensor:
    """Returns a gradient as it travels. Raises RuntimeError if it is dense, and the parameter's optimizer takes sparse
    ones alone."""
    if grad.is_sparse:
        return dense_of(grad) if slot.is_sparse else grad.to_dense()
    if slot.is_sparse:
        raise RuntimeError(
            f"SparseAdam does not support dense gradients, and parameter {slot.name!r} has one. Give it embeddings "
            "that are made with sparse=True, or consider Adam."
        )
    return grad


def dense_of(grad: Tensor) -> Tensor:
    """Returns a sparse gradient in a dense tensor, with `NOTHING` elsewhere."""
    grad = grad.coalesce()
    dense = torch.full(grad.shape, NOTHING, dtype=grad.dtype, device=grad.device)
    dense[tuple(grad.indices())] = grad.values() + 0.0  # its zeros are gradients
    return dense


def sparse_of(dense: Tensor) -> Tensor:
    """Returns a sparse tensor of what a dense gradient has beside `NOTHING`: each element by itself, as a part of a
    parameter has no rows."""
    indices = ((dense != 0) | ~dense.signbit()).nonzero().t()
    return torch.sparse_coo_tensor(indices, dense[tuple(indices)], dense.shape, is_coalesced=True)
