"""Collectives that users call themselves, and that edit what they are given without raising its version."""

import torch
import torch.distributed as dist

_NAMES = ("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "recv", "irecv", "scatter")

INTERCEPTED = {getattr(dist, name) for name in _NAMES}
"""A class of tensors intercepts them, as it does torch's functions: since torch 2.13 all of them, `all_reduce` before.
What they return may still be awaited."""

OPERATORS = {
    getattr(torch.ops.c10d, name).default
    for name in ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "recv_", "recv_any_source_", "scatter_")
}
"""What the others come to, below autograd. Their schemas do not say that they edit."""
