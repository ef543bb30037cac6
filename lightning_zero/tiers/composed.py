"""Tensors that are made of other tensors: quantized state is codes, scales and a table in one tensor."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def is_made_of_others(value: Any) -> bool:
    """Whether `value` is a tensor that tells, by torch's protocol, which other tensors it is made of."""
    kind = type(value)
    return issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def is_composed(value: Any) -> bool:
    """Whether `value` is a tensor made of others. A DTensor is not: each tensor-parallel rank has a part of it."""
    return is_made_of_others(value) and not isinstance(value, DTensor)


def taken_apart(tensor: Any) -> tuple[dict[str, Tensor], Any]:
    """Returns the parts of a composed tensor, and the context from which its class makes a tensor of them."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors that a tensor is made of, through all levels; a plain tensor itself."""
    if not is_composed(tensor):
        return [tensor]
    parts, _ = taken_apart(tensor)
    return [part for inner in parts.values() for part in plain_parts(inner)]
