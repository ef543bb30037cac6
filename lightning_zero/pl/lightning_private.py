"""Lightning's private interfaces: all that the package uses of Lightning, and Lightning has not promised. No other
module names any.

Each has a text: what it is for, why no public way does the same, and what breaks without it. All of them are in
Lightning 2.6.0, the lowest version that `pyproject.toml` allows, and in 2.6.6. What is missing in another version fails
loudly: at import, or in its first use, by its name.
"""

import signal
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import lightning
import lightning.pytorch as pl
from lightning.fabric.plugins.io import torch_io
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.wrappers import _unwrap_compiled
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.core import saving
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from torch.distributed.device_mesh import DeviceMesh

TESTED = "2.6.0 to 2.6.6"


# -- functions that `interop` wraps


class Place(NamedTuple):
    """Where Lightning keeps a function."""

    holder: Any
    name: str

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces the function by `wrapper(function)`.

        Raises:
            ImportError: where there is none of this name.
        """
        if not hasattr(self.holder, self.name):
            raise ImportError(
                f"Lightning {lightning.__version__} has no {self.holder.__name__}.{self.name}. lightning_zero "
                f"replaces it, and was tested with Lightning {TESTED}."
            )
        setattr(self.holder, self.name, wrapper(getattr(self.holder, self.name)))


READ_FOR_MODULE = Place(saving, "pl_load")
"""Reads the file of `MyModule.load_from_checkpoint`, which has no plugin for it. Without it that would not read folders
of shards. Private: `pl_load`."""

READ_FOR_STRATEGY = Place(torch_io, "pl_load")
"""Reads a file for strategies other than ours. Without it ``Trainer(strategy="ddp")`` would not go on from a folder of
shards. Private: `pl_load`."""

FIND_LAST = Place(ModelCheckpoint, "_find_last_checkpoints")
"""Finds what ``ckpt_path="last"`` means, before any hook is called. Without it that would take a checkpoint whose save
was killed, and no folder in an object store. Private: `_find_last_checkpoints`."""

PARSE_CKPT_PATH = Place(LightningCLI, "_parse_ckpt_path")
"""Reads a model's arguments from the file in ``--ckpt_path``. Users override no part of it. Without it folders of
shards would give none. Private: `_parse_ckpt_path`."""

CALL_CALLBACKS = Place(call, "_call_callback_hooks")
"""Calls one hook of all callbacks. Those in `trainer.callbacks` are the user's list, which is saved and shown. Without
it ranks would not stop together. Private: `_call_callback_hooks`."""

BROADCAST_SIGTERM = Place(_TrainingEpochLoop, "_broadcast_sigterm_tensor")
"""Broadcasts in each batch whether rank 0 was told to stop, past the strategy. Without it a rank would wait for one
that has failed as long as `timeout`, without a message. Private: `_TrainingEpochLoop`, `_broadcast_sigterm_tensor`."""

STORE_METRICS = Place(_EvaluationLoop, "_store_dataloader_outputs")
"""Synchronises what an evaluation has logged, before any hook after its last batch. Without it ranks with fewer batches
would begin to while others still gather. Private: `_EvaluationLoop`, `_store_dataloader_outputs`."""


# -- checkpoints


def folder_of(callback: ModelCheckpoint, trainer: "pl.Trainer") -> str:
    """Returns the folder that ``ckpt_path="last"`` looks into; `dirpath` is not there yet when Lightning asks. Without
    it the newest checkpoint could not be found among all. Private: `_ModelCheckpoint__resolve_ckpt_dir`."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]


def file_system_of(callback: ModelCheckpoint) -> Any:
    """Returns the file system of that folder. Lightning's paths do not name it. Without it checkpoints in an object
    store would not be found. Private: `_fs`."""
    return callback._fs


def saved_last(callback: ModelCheckpoint) -> str:
    """Returns the checkpoint that a callback has saved last. Its public paths name the best one, and the last one's
    copy. Without it ``save_last=True`` would write each checkpoint twice. Private: `_last_checkpoint_saved`."""
    return callback._last_checkpoint_saved


def uploads_checkpoints(logger: Any) -> Any:
    """Returns what a logger was given as `log_model`, False for one that uploads nothing: loggers of W&B and MLflow,
    and those of others that follow them, keep it under this name. Without it users would not be told that nothing is
    uploaded. Private: `_log_model`."""
    return getattr(logger, "_log_model", False)


# -- Fabric

unwrap_compiled = _unwrap_compiled
"""Returns the module that ``torch.compile(model)`` is around, and with which settings, which torch does not keep.
Without it models that users compile would run uncompiled with Fabric. Private: `_unwrap_compiled`."""


def states_in(strategy: Any, state: dict[str, Any], filter: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is to be saved of objects that have a state of their own, as Fabric's strategies do it. Without it
    such objects would be pickled. Private: `_convert_stateful_objects_in_state`."""
    return strategy._convert_stateful_objects_in_state(state, filter)


# -- a Trainer

show_device = _update_properties
"""Sets `LightningModule.device`. The public `to` would move the parameters, which the engine moves unit by unit.
Without it ``self.device`` would be the host. Private: `_update_properties`."""

move_states = _optimizers_to_device
"""Moves the state of optimizers, all but counters of steps, which torch wants on the host. Without it state that was
loaded would stay where it was read. Private: `_optimizers_to_device`."""


def use_sampler(trainer: "pl.Trainer", wanted: bool) -> None:
    """Does what ``Trainer(use_distributed_sampler=)`` would have done. Without it one rank would draw other data than
    one device. Private: `_accelerator_connector`."""
    trainer._accelerator_connector.use_distributed_sampler = wanted


def sync_layers(strategy: Any, model: Any) -> Any:
    """Returns the model as ``Trainer(sync_batchnorm=True)`` has it; each strategy is to do it in its `setup`. Without
    it that argument would do nothing. Private: `_layer_sync`."""
    return model if strategy._layer_sync is None else strategy._layer_sync.apply(model)


def show_mesh(module: "pl.LightningModule", mesh: DeviceMesh) -> None:
    """Sets `LightningModule.device_mesh`, which only strategies of Lightning set. Without it `configure_model` could
    not parallelize. Private: `_device_mesh`."""
    module._device_mesh = mesh


def train_source(trainer: "pl.Trainer") -> Any:
    """Returns where the training data come from: what was given to `fit`, or the hook of a module or data module. Its
    `dataloader()` asks for them. Nothing public tells before the first epoch. Without it ``stage="auto"`` would have no
    batch to rehearse with. Private: `_data_source`."""
    return trainer.fit_loop._data_source


def handlers_before(trainer: "pl.Trainer") -> Any:
    """Returns the signal handlers that Lightning has replaced by its own. Without it handlers of users would not be
    called. Private: `_signal_connector`, `_original_handlers`."""
    return trainer._signal_connector._original_handlers


def note_sigterm(trainer: "pl.Trainer") -> None:
    """Sets `trainer.received_sigterm`, which users only read. Without it they would not see that ranks were told to
    stop. Private: `_signal_connector`."""
    trainer._signal_connector.received_sigterm = True


def save_and_requeue(trainer: "pl.Trainer") -> None:
    """Does what Lightning does when SLURM tells a job to requeue. Without it ranks would save at different steps.
    Private: `_signal_connector`, `_slurm_sigusr_handler_fn`."""
    trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]


def results_of(trainer: "pl.Trainer") -> Any:
    """Returns what was logged in the loop under way, None outside of loops. `callback_metrics` has it once it is
    synchronised. Without it a rank that has logged nothing would keep the others waiting. Private: `_results`."""
    return trainer._results


def accumulates(trainer: "pl.Trainer") -> bool:
    """Whether this batch does not end in a step. Its parts are public, and are put together in each version anew.
    Without it ranks could meet in different batches. Private: `_should_accumulate`."""
    return trainer.fit_loop._should_accumulate()


def should_log(trainer: "pl.Trainer") -> bool:
    """Whether this step is logged. Loggers do not know. Without it `ZeroMonitor` would log other steps. Private:
    `_logger_connector`."""
    return trainer._logger_connector.should_update_logs


def logged_step(trainer: "pl.Trainer") -> int:
    """Returns the step under which Lightning logs, which is not `global_step` with several optimizers. Without it
    `ZeroMonitor` would log under another. Private: `_batches_that_stepped`."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def depth_of(summary: ModelSummary) -> int:
    """Returns the `max_depth` that a summary was given; at 0 it prints nothing. Without it a table would be printed all
    the same. Private: `_max_depth`."""
    return summary._max_depth
