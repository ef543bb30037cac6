"""`Regrouping`: what begins to train between two steps is averaged, sharded and stepped from there on."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import final

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero.run.loans import Loans
from lightning_zero.run.reductions import Reductions
from lightning_zero.run.replicated import broadcast_new, refuse_strangers
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
    """Of an engine that trains: knows which of the module's parameters it has taken in, and takes in others. A module
    that is replaced stays in its group, and its gradient is zeros there, as long as the engine lives."""

    def __init__(
        self,
        module: Module,
        steppers: Mapping[Optimizer, PieceStepper],
        steps_whole: Collection[Optimizer],  # of these, those that step whole tensors
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
        self._known = {id(parameter): parameter for parameter in module.parameters()}  # kept alive: ids stay theirs
        self.listeners: list[Callable[[Sequence[ShardGroup]], None]] = []  # hear of groups that train now

    def newly_trainable(self) -> dict[str, Parameter]:
        """What trains and has not been taken in, by name.

        Raises:
            RuntimeError: if there is any, and parameters are offloaded.
        """
        newly = newly_trainable(self._module, self._steppers, self._trained) if self._steppers else {}
        if newly and self._options.offload is not None and self._options.offload.parameters is not None:
            raise RuntimeError(
                f"{', '.join(list(newly)[:3])} began to train after set-up, and parameters are offloaded: not yet. "
                "Give them to the optimizer in configure_optimizers() already, frozen until they are to train."
            )
        return newly

    def take_in(self, newly: Mapping[str, Parameter]) -> None:
        """All that was there keeps every bit; of what was made anew ranks take rank 0's values. A collective, between
        a step and the next forward."""
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
        """Whole tensors that no rank steps yet have one from here on: all at set-up, later what an optimizer was given
        since. None where there are none."""
        whole = [[slot for slot in self._steppers[one].slots if slot.stepper is None] for one in self._steps_whole]
        if not any(whole):
            return None
        return deal(whole, self._setting, is_lazy=any(stepper.is_lazy for stepper in self._steppers.values()))

    def refuse_strangers(self, foreign: Collection[str]) -> None:
        """Raises RuntimeError for a parameter that trains since the middle of this step; `foreign`: names of those that
        are tensors of their own kind."""
        refuse_strangers(self._module, self._trained, self._known, foreign, self._steppers.values())
