"""Tensors that are made of others, as quantized state is: codes, scales and a table, which together are one tensor."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Composed(NamedTuple):
    """What a tensor is made of, and what its class makes one from."""

    parts: dict[str, Tensor]
    context: Any


def is_composed(value: Any) -> bool:
    """Whether it is such a tensor. (Of what tensor-parallel ranks share, a DTensor, each has its own part.)"""
    return bool(is_traceable_wrapper_subclass(value)) and not isinstance(value, DTensor)


def taken_apart(tensor: Any) -> Composed:
    """The tensors that a composed one is made of."""
    names, context = tensor.__tensor_flatten__()
    return Composed({name: getattr(tensor, name) for name in names}, context)


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory of their own that it is made of in the end: itself, mostly."""
    if not is_composed(tensor):
        return [tensor]
    return [part for inner in taken_apart(tensor).parts.values() for part in plain_parts(inner)]
