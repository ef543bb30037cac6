"""`Regrouping`: has parameters that begin to train between two steps averaged, sharded and stepped from then on."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import final

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero.run.loans import Loans
from lightning_zero.run.reductions import Reductions
from lightning_zero.run.replicated import broadcast_new
from lightning_zero.run.schedule import Schedule
from lightning_zero.shards import assembly
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.managed import newly_trainable
from lightning_zero.shards.optimizer import PieceStepper
from lightning_zero.shards.options import Options
from lightning_zero.shards.setting import Setting
from lightning_zero.shards.whole import Imbalance, deal


@final
class Regrouping:
    """Knows which parameters of the module the engine averages, and takes in others that have begun to train.

    A module that is replaced stays in its group as long as the engine lives, with a gradient of zeros.
    """

    def __init__(
        self,
        module: Module,
        steppers: Mapping[Optimizer, PieceStepper],
        steps_whole: Collection[Optimizer],  # those of `steppers` that step whole tensors
        setting: Setting,
        options: Options,
        schedule: Schedule,
        reductions: Reductions,
        loans: Loans,
    ) -> None:
        self._module = module
        self._steppers = steppers
        self._steps_whole = steps_whole
        self._setting = setting
        self._options = options
        self._schedule = schedule
        self._reductions = reductions
        self._loans = loans
        self._trained = {id(slot.parameter) for shard in reductions.shards for slot in shard.group.slots}
        self._known = {id(parameter): parameter for parameter in module.parameters()}  # alive, so that ids stay theirs
        self.listeners: list[Callable[[Sequence[ShardGroup]], None]] = []  # called with groups that begin to train

    def newly_trainable(self) -> dict[str, Parameter]:
        """Returns, by name, parameters that train and have not been taken in.

        Raises:
            RuntimeError: if there are any, and parameters are offloaded.
        """
        newly = newly_trainable(self._module, self._steppers, self._trained) if self._steppers else {}
        if newly and self._options.offload is not None and self._options.offload.parameters is not None:
            raise RuntimeError(
                f"{', '.join(list(newly)[:3])} began to train after set-up, and parameters are offloaded: not yet. "
                "Give them to the optimizer in configure_optimizers() already, frozen until they are to train."
            )
        return newly

    def take_in(self, newly: Mapping[str, Parameter]) -> None:
        """Puts `newly_trainable` parameters into groups that train. Collective, between a step and the next forward.

        Parameters made since set-up take rank 0's values; all others keep every bit.
        """
        broadcast_new(newly, self._known, self._setting.mesh)
        self._known |= {id(parameter): parameter for parameter in newly.values()}
        added = assembly.add(newly, self._reductions.pools, self._setting, self._options)
        groups = [shard.group for shard in added.shards]
        self._loans.add(added.groups, groups)
        self._reductions.add(added.shards, added.pools)
        self._schedule.add(added.shards)
        self._trained |= {id(slot.parameter) for group in groups for slot in group.slots}
        for stepper in self._steppers.values():
            stepper.note_parameters()
        for listener in self.listeners:
            listener(groups)

    def deal(self) -> Imbalance | None:
        """Chooses a rank for each whole tensor that no rank steps yet: at set-up for all of them, later for those that
        an optimizer has been given since. Returns None where there are none."""
        whole = [[slot for slot in self._steppers[one].slots if slot.stepper is None] for one in self._steps_whole]
        if not any(whole):
            return None
        return deal(whole, self._setting, is_lazy=any(stepper.is_lazy for stepper in self._steppers.values()))

    def refuse_strangers(self, foreign: Collection[str]) -> None:
        """Raises RuntimeError for a parameter that began to train in the middle of this step, as its gradient is not
        averaged. `foreign` are the names of parameters that are tensors of a kind of their own."""
        for name, parameter in self._module.named_parameters():
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
            if any(parameter is stepped for stepper in self._steppers.values() for stepped in stepper.parameters):
                raise RuntimeError(
                    f"Parameter {name!r} was thawed in the middle of a step, and its gradient is not averaged over "
                    "ranks. Thaw it, and call add_param_group, between steps (in on_train_epoch_start or "
                    "on_train_batch_start)."
                )
