"""Tensors that are made of other tensors: quantized state is codes, scales and a table in one tensor."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor


class Composed(NamedTuple):
    """The parts of a composed tensor, and the context from which its class makes a tensor of them."""

    parts: dict[str, Tensor]
    context: Any


def is_made_of_others(value: Any) -> bool:
    """Whether `value` is a tensor that tells, by torch's protocol, which other tensors it is made of."""
    kind = type(value)
    return issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def is_composed(value: Any) -> bool:
    """Whether `value` is a tensor made of others. A DTensor is not: each tensor-parallel rank has a part of it."""
    return is_made_of_others(value) and not isinstance(value, DTensor)


def taken_apart(tensor: Any) -> Composed:
    """Returns the tensors that a composed one is made of."""
    names, context = tensor.__tensor_flatten__()
    return Composed({name: getattr(tensor, name) for name in names}, context)


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors that a tensor is made of, through all levels; a plain tensor itself."""
    if not is_composed(tensor):
        return [tensor]
    return [part for inner in taken_apart(tensor).parts.values() for part in plain_parts(inner)]
