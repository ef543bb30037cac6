"""`Regrouping`: has parameters that begin to train between two steps averaged, sharded and stepped from then on."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero.run.loans import Loans
from lightning_zero.run.module_hooks import ModuleHooks
from lightning_zero.run.reductions import Reductions
from lightning_zero.run.replicated import broadcast_new
from lightning_zero.shards import assembly
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.managed import are_all_in, newly_trainable
from lightning_zero.shards.optimizer import PieceStepper
from lightning_zero.shards.options import Options
from lightning_zero.shards.setting import Setting
from lightning_zero.shards.whole import Imbalance, deal


@final
@dataclass(eq=False)
class Regrouping:
    """Knows which parameters of the module are averaged, and takes in others that have begun to train. A module that is
    replaced stays in its group, with a gradient of zeros, as long as the engine lives."""

    module: Module
    steppers: Mapping[Optimizer, PieceStepper]
    steps_whole: Collection[Optimizer]  # those of `steppers` that step whole tensors
    setting: Setting
    options: Options
    module_hooks: ModuleHooks
    reductions: Reductions
    loans: Loans
    listeners: list[Callable[[Sequence[ShardGroup]], None]] = field(default_factory=list)  # told of groups that train
    imbalance: Imbalance | None = None  # of the whole tensors that were dealt last

    def __post_init__(self) -> None:
        self._trained = {id(slot.parameter) for gradient in self.reductions.gradients for slot in gradient.group.slots}
        # At set-up. Kept alive, so that ids stay theirs; those that are taken in later live in their groups.
        self._known = {id(p): p for p in self.module.parameters()}

    def newly_trainable(self) -> dict[str, Parameter]:
        """Returns, by name, parameters that train and have not been taken in."""
        if not self.steppers or are_all_in(self.module, self._trained):
            return {}
        return newly_trainable(self.module, self.steppers, self._trained)

    def take_in(self, newly: Mapping[str, Parameter]) -> None:
        """Puts `newly_trainable` parameters into groups that train. Collective, between a step and the next forward.

        Parameters made since set-up take rank 0's values; all others keep every bit.
        """
        broadcast_new(newly, self._known, self.setting.mesh)
        added = assembly.add(newly, self.reductions.pools, self.setting, self.options)
        groups = [gradient.group for gradient in added.gradients]
        self.loans.add(added.groups, groups)
        self.reductions.add(added.gradients, added.pools)
        self.loans.runner.hooks.add(added.gradients)
        self.module_hooks.surround_late(added.gradients)
        self._trained |= {id(slot.parameter) for group in groups for slot in group.slots}
        for stepper in self.steppers.values():
            stepper.note_parameters()
        for listener in self.listeners:
            listener(groups)

    def deal(self) -> None:
        """Chooses a rank for each whole tensor that no rank steps yet: at set-up for all of them, later for those that
        an optimizer has been given since."""
        whole = [[slot for slot in self.steppers[one].slots if slot.stepper is None] for one in self.steps_whole]
        if any(whole):
            is_lazy = any(stepper.is_lazy for stepper in self.steppers.values())
            self.imbalance = deal(whole, self.setting, is_lazy=is_lazy)

    def refuse_strangers(self, foreign: Collection[str]) -> None:
        """Raises RuntimeError for a parameter that began to train in the middle of this step, as its gradient is not
        averaged. `foreign` are the names of parameters that are tensors of a kind of their own."""
        if are_all_in(self.module, self._trained):
            return
        for name, parameter in self.module.named_parameters():
            if id(parameter) in self._trained or parameter.grad is None:
                continue
            if id(parameter) not in self._known:
                raise RuntimeError(
                    f"Parameter {name!r} was made in the middle of a step, and has a gradient that is not averaged "
                    "over ranks. Make modules between steps (in on_train_epoch_start or on_train_batch_start), or "
                    "before fit."
                )
            if name in foreign:
                raise RuntimeError(
                    f"Parameter {name!r} is a {type(parameter).__name__}, a tensor of its own kind, and trains since "
                    "set-up: its gradient is not averaged over ranks. Keep it frozen."
                )
            if any(parameter is stepped for stepper in self.steppers.values() for stepped in stepper.parameters):
                raise RuntimeError(
                    f"Parameter {name!r} was thawed in the middle of a step, and its gradient is not averaged over "
                    "ranks. Thaw it, and call add_param_group, between steps (in on_train_epoch_start or "
                    "on_train_batch_start)."
                )
