"""The user's own optimizer, stepping the pieces that this rank owns.

No optimizer is wrapped and no Parameter replaced. For the duration of the step alone `.data` is the piece of the
master and `.grad` its gradient, so the optimizer's state takes the piece's shape and its keys stay the user's
parameters.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.shards.group import ShardGroup, Slot, no_interception, point_at_nothing, slot_of
from lightning_zero.shards.ledger import Category, Ledger


class _Shown(NamedTuple):
    """A parameter as users see it, while it is its piece."""

    grad: Tensor | None
    kind: type[Parameter]  # plain, or that of a parameter whose values are elsewhere


@final
class PieceStepper:
    """Swaps the parameters of one of the user's optimizers to pieces, and back."""

    def __init__(self, optimizer: Optimizer, ledger: Ledger) -> None:
        self.optimizer = optimizer
        # Name of a state tensor -> whether it is cut as its parameter is; from the step on that made it.
        self.cut: dict[str, bool] = {}
        self._ledger = ledger
        self._slots = {parameter: slot for parameter in self.parameters if (slot := training_slot(parameter))}
        # Integer tables and tensors of their own kind, which `self.parameters()` lists too: they have no gradient.
        self._left_alone = {parameter for parameter in self.parameters if parameter not in self._slots}
        self._shown: dict[Slot, _Shown] | None = None  # during a step

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def slots(self) -> list[Slot]:
        """Of what it steps, each once, also after the engine has let go of it."""
        stepped = dict.fromkeys(self.parameters)
        return [self.slot(parameter) for parameter in stepped if parameter not in self._left_alone]

    def holds(self, parameter: Parameter) -> bool:
        """Whether the engine holds it; otherwise each rank has, and steps, all of it."""
        return parameter not in self._left_alone

    def slot(self, parameter: Parameter) -> Slot:
        slot = self._slots.get(parameter) or training_slot(parameter)
        if slot is None:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not the "
                "module's, or was added after set-up. Give the optimizer the LightningModule's own parameters in "
                "configure_optimizers()."
            )
        return slot

    @property
    def is_stepping(self) -> bool:
        return self._shown is not None

    def enter(self, slots: Sequence[Slot]) -> None:
        """From here to `exit` every parameter of the optimizer is its piece; `slots` are all of theirs."""
        shown = {}
        for slot in slots:
            if _is_its_piece(slot):
                continue
            parameter, piece = slot.parameter, slot.stepped(slot.group.master)
            with no_interception():
                grad = parameter.grad
                shown[slot] = _Shown(grad, type(parameter))
                parameter.grad = None
                parameter.__class__ = Parameter
                parameter.data = piece
                set_grad_dtype(parameter, piece.dtype)
                if grad is not None and slot.steps_any:
                    gradient = slot.gradient
                    assert gradient is not None
                    # On one rank what is stepped of a gradient is `grad` itself.
                    parameter.grad = (slot.stepped(gradient.owned_grad) if gradient.travels else grad).to(piece.dtype)
        self._shown = shown

    def exit(self) -> list[ShardGroup]:
        """Back to the parameters that users see. Returns the groups whose masters may have changed."""
        shown, self._shown = self._shown, None
        assert shown is not None
        for slot, (grad, kind) in shown.items():
            parameter, full = slot.parameter, slot.group.full_param
            with no_interception():
                parameter.grad = None
                if full is None:
                    point_at_nothing(slot)
                else:
                    parameter.data = slot.view(full)
                set_grad_dtype(parameter, slot.gradient.dtype)  # type: ignore[union-attr]
                parameter.grad = grad
                parameter.__class__ = kind
        # On every rank, whatever it owned: a graph that saved the old values must end in torch's error everywhere.
        increment_version([slot.parameter for slot, was in shown.items() if was.grad is not None])
        self._note_state()
        return list(dict.fromkeys(slot.group for slot in shown))

    def _note_state(self) -> None:
        """Books new state, and notes of each name whether it is cut. A piece may have the shape of a tensor that is
        whole by chance, so one that fits nowhere else decides for all of its name."""
        names = set(self.cut)
        for parameter, state in self.optimizer.state.items():
            assert isinstance(parameter, Parameter)
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                self._ledger.adopt(Category.OPTIMIZER_STATE, value)
                if name not in names and self.holds(parameter) and (slot := self.slot(parameter)).steps_any:
                    self.cut[name] = self.cut.get(name, True) and value.shape == slot.stepped_shape


def training_slot(parameter: Parameter) -> Slot | None:
    """Where a parameter lives, if it is among those whose gradients are averaged."""
    slot = slot_of(parameter)
    return None if slot is None or slot.gradient is None else slot


def _is_its_piece(slot: Slot) -> bool:
    """Whether there is nothing to swap: all of it is stepped where it is, with the gradient as it is."""
    group, gradient = slot.group, slot.gradient
    assert gradient is not None
    return group.is_plain and not group.is_cut and gradient.dtype == group.kind.declared == group.kind.resting


def set_grad_dtype(parameter: Parameter, dtype: torch.dtype) -> None:
    """Lets `p.grad` have the accumulation dtype where the parameter rests in a narrower one, so that autograd sums
    the gradients of several uses in it too (bit-equal to autocast over fp32 weights)."""
    if parameter.grad_dtype != dtype:
        parameter.grad_dtype = dtype
