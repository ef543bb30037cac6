"""`FabricCheckpointing`: saves and loads what users give to Fabric, whose states rest as shards."""

from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint import resume
from lightning_zero.pl.lightning_private import states_in
from lightning_zero.pl.sharded_module import ShardedModule, unwrapped
from lightning_zero.pl.sharded_strategy import ShardedStrategy
from lightning_zero.run.forecast import bytes_to_save
from lightning_zero.wire.comm import failing_together


class FabricCheckpointing(ShardedStrategy, DDPStrategy):
    """The part of `FabricZeroStrategy` that saves and loads."""

    _may_end = True  # Fabric does not say when a run ends
    _steps = 0  # of all optimizers
    _modules: list[ShardedModule]  # that are set up

    @override
    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Writes a folder of shards, or a single file. Call it on every rank.

        Raises:
            CheckpointError: on every rank, when one cannot write; says what is there now.
        """
        self._meet_before_collective()
        self._checkpoints.saver.muster()
        states = {key: self._state_to_save(key, value) for key, value in state.items()}
        tree, is_single = states_in(self, states, filter or {}), self.saves_single_file()
        if self._settings.options.tensor_parallel_size > 1 and self._engines:
            tree = self._engines[0].states.spread_others(tree, full=is_single)  # what users have made of DTensors
        if is_single:
            whole = [key for key, value in states.items() if value is not state[key]]
            self._save_single_file(tree, path, storage_options, whole)
        elif storage_options is not None:
            raise TypeError("storage_options go to a CheckpointIO plugin; checkpoints are folders of shards here.")
        else:
            self._checkpoints.save(tree, str(path), self._steps, {"stage": self.stage})

    @override
    def _bytes_to_save(self) -> int:
        return sum(sharded.bytes_to_save or bytes_to_save(sharded.module, []) for sharded in self._modules)

    def _state_to_save(self, key: str, value: Any) -> Any:
        """Returns the state of a module or optimizer that was set up, and any other value as it is."""
        if isinstance(value, ShardedModule):
            return self._model_to_save(value.ensure_engine(), key)
        if isinstance(value, Optimizer) and value in self._stepped_in():
            return self._optimizer_to_save(self._stepped_in()[value], value, key)
        return value

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the whole state, as one device would have it. Call it on every rank."""
        optimizer = unwrapped(optimizer)
        stepped = optimizer in self._stepped_in()
        return self.full_optimizer_state(optimizer) if stepped else super().get_optimizer_state(optimizer)

    @override
    def load_checkpoint(
        self,
        path: Any,
        state: Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint of any strategy; each rank reads what it owns of a folder of shards. Call it on every
        rank."""
        self._meet_before_collective()
        entries: dict[str, Any] = {"": state} if isinstance(state, Module | Optimizer) else state or {}
        lazy = [key for key, value in entries.items() if isinstance(value, ShardedModule | Optimizer)]
        checkpoint = self._read_checkpoint(str(path), lazy, weights_only)
        if isinstance(state, Module | Optimizer):  # whose state is all that was saved
            checkpoint = {"": checkpoint}
        if strict and (absent := [name for name in entries if name not in checkpoint]):
            raise KeyError(
                f"The requested state contains a key '{absent[0]}' that does not exist in the loaded checkpoint. "
                "To disable strict loading, set `strict=False`."
            )
        for name in [name for name in entries if name in checkpoint]:
            into, found = entries[name], checkpoint.pop(name)
            if isinstance(into, Module):
                self.load_module_state_dict(into, found, strict)
            elif hasattr(into, "load_state_dict"):
                into.load_state_dict(found)
            else:
                entries[name] = found
        with failing_together(self._ensure_comm(), "verifying"):
            self._checkpoints.verify_rest()
        self._checkpoints.close_resumed()
        return checkpoint

    @override
    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        if not isinstance(module, ShardedModule):
            super().load_module_state_dict(module, state_dict, strict)
            return
        with module.ensure_engine().states.loading(lambda: None):  # parameters only note what is loaded
            left = resume.load_state_dict(module.module, state_dict, strict=strict)
        if any(left):
            rank_zero_warn(f"strict=False: {left}. These stay as they are.")
