"""Pieces of optimizer state that are there before an engine is: whether they are of use to it."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.shards.probe import is_element_wise
from lightning_zero.shards.slot import Slot


def places(slot: Slot | None) -> Any:
    """Returns what tells which part of the state of a parameter each rank has."""
    if slot is None:
        return None
    layout, block = slot.group.layout, slot.group.setting.block
    return slot.stepper, slot.offset, slot.local.box, layout.slice_of(slot.index), layout.ranks, block


def refuse_pieces(
    optimizer: Optimizer, states: Iterable[tuple[Slot | None, Mapping[str, Any]]], *, but_own: bool = False
) -> None:
    """Raises ValueError for state that users have given to an optimizer, and that is a rank's piece: of which rank, and
    how it was cut, cannot be told. This rank's own may be (`but_own`).

    Nothing can be told of an optimizer that is not known: its state may have any shape.
    """
    for slot, state in states if is_element_wise(optimizer) else ():
        if slot is None:
            continue
        whole = slot.local.box.whole
        fits = [whole, *([slot.state_shape if slot.steps_any else (0,)] if but_own else [])]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and tuple(value.shape) not in fits:
                raise ValueError(
                    f"{type(optimizer).__name__} was given {name!r} of shape {tuple(value.shape)} for {slot.name}, "
                    f"whose shape is {whole}: a piece, which optimizer.state_dict() has on one rank while shards "
                    "train. Load what strategy.full_optimizer_state() gives, or a checkpoint."
                )
