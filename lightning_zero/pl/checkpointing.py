"""`CheckpointingStrategy`: saves and resumes a Trainer's run, whose model and optimizer states rest as shards."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint import CheckpointError, Folder, resume
from lightning_zero.checkpoint.resume import ResumeEntry
from lightning_zero.pl.lightning_private import saved_last, uploads_checkpoints
from lightning_zero.pl.sharded_strategy import ShardedStrategy
from lightning_zero.pl.single_file import is_plugin
from lightning_zero.run.construction import Construction
from lightning_zero.run.engine import Engine
from lightning_zero.run.forecast import bytes_to_save
from lightning_zero.run.notices import Notice, Notices
from lightning_zero.run.pretrained import load_pretrained
from lightning_zero.shards.local import local_of, whole_of
from lightning_zero.shards.units import renamed
from lightning_zero.wire.board import Board
from lightning_zero.wire.comm import Comm

log = logging.getLogger(__name__)


class Fit(NamedTuple):
    """The latest fit, whose states are saved after it, too."""

    engine: Engine  # knows the optimizers' pieces
    nbytes: int  # that the states of model and optimizers take in a checkpoint


class CheckpointingStrategy(ShardedStrategy, DDPStrategy):
    """The part of `ZeroStrategy` that saves and resumes. `EngineStrategy` makes the engine, and closes it."""

    engine: Engine | None = None  # of the run under way, or of the last one
    _fit: Fit | None = None  # None before the first one
    _construction: Construction | None = None  # what `configure_model` has built in shards
    _runs = 0  # engines that were made
    _failure: type[BaseException] | None = None  # kind of the error that the run has ended with
    _resumed_state: dict[str, Any] | None = None  # the checkpoint's `ResumeEntry`

    @property
    def _live_engine(self) -> Engine | None:
        """The engine; None once it is closed, and the module is whole."""
        return None if self.engine is None or self.engine.closed else self.engine

    @property
    def _running_engine(self) -> Engine:
        if self.engine is None:
            raise RuntimeError(
                "Nothing is set up yet: use this inside trainer.fit, validate, test or predict. With Fabric, ask "
                "fabric.strategy."
            )
        return self.engine

    @override
    def _engine_of(self, what: Module | Parameter | None) -> Engine:
        return self._running_engine

    @property
    @override
    def _engines(self) -> list[Engine]:
        return [] if self.engine is None else [self.engine]

    @override
    def _stepped_in(self) -> dict[Optimizer, Engine]:
        if self._fit is None:
            raise RuntimeError("No optimizer is set up yet: use this inside of trainer.fit, or after it.")
        return dict.fromkeys(self.optimizers, self._fit.engine)

    def _meet(self) -> None:
        """Serves other ranks until all have come here, and exchanges their notices. Collective."""
        self._running_engine.runner.meet()

    def _report(self, failure: BaseException) -> None:
        """Tells other ranks why this one fails, if they come to wait for it."""
        if self._comm is not None:
            self._comm.report(f"{type(failure).__name__}: {failure}".splitlines()[0])

    @property
    def comm(self) -> Comm:
        """Communicator of all ranks for small messages between hosts."""
        return self._ensure_comm().host

    @property
    def board(self) -> Board:
        """Agreements between ranks through the store, without a collective."""
        return self._ensure_comm().board

    @property
    def _notices(self) -> Notices:
        """What ranks have noticed, such as a signal."""
        return self._running_engine.runner.reductions.notices

    def _warn_of_loggers(self, loggers: Iterable[Any]) -> None:
        """Warns of loggers that Lightning has upload checkpoints, where these are folders: it skips those silently."""
        is_sharded = self.checkpoint is not None and self.checkpoint.format == "sharded"
        for logger in loggers if is_sharded else ():
            if (asked := uploads_checkpoints(logger)) in (True, "all"):  # not a mock's
                rank_zero_warn(
                    f"{type(logger).__name__}(log_model={asked!r}) uploads single files, and checkpoints "
                    "are folders of shards: nothing will be uploaded. Write ZeroStrategy(checkpoint='full'), or upload "
                    "the folder yourself."
                )

    @override
    def saves_single_file(self) -> bool:
        """See `ShardedStrategy.saves_single_file`; also warns of loggers that will upload nothing."""
        is_open, is_single = self.checkpoint is None, super().saves_single_file()
        trainer = trainer_of(self.lightning_module)
        if is_open and trainer is not None:
            self._warn_of_loggers(trainer.loggers)
        return is_single

    @override
    def _bytes_to_save(self) -> int:
        assert self.lightning_module is not None
        return bytes_to_save(self.lightning_module, []) if self._fit is None else self._fit.nbytes

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the model in its declared dtypes: as lazy entries, or for a single file whole on every rank."""
        assert self.lightning_module is not None
        self._meet_before_collective()  # single ranks may have read parameters in hooks
        self._checkpoints.saver.muster()
        engine = self._live_engine
        if engine is None:
            state = renamed(self.lightning_module.state_dict())
            state.update({name: whole_of(value) for name, value in state.items()})
            return state
        return self._model_to_save(engine)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._fit is None:  # an OnExceptionCheckpoint saves a set-up that was refused, and must not hide the reason
            return super().optimizer_state(optimizer)
        return self._optimizer_to_save(self._fit.engine, optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a folder of shards, or Lightning's single file. Call it on every rank.

        Raises:
            CheckpointError: on every rank, when one cannot write; says what is there now.
        """
        self._meet_before_collective()  # single ranks may have looked at lazy entries in hooks
        is_single = self.saves_single_file()
        if self.engine is not None and self.engine.mesh.tensor.size > 1:
            checkpoint = self.engine.states.spread_others(checkpoint, full=is_single)
        trainer, path = trainer_of(self.lightning_module), os.fspath(filepath)
        is_plain = is_single and self._format.is_written  # the file is to be Lightning's, and no more
        if trainer is not None and "optimizer_states" in checkpoint and not is_plain:
            checkpoint[resume.KEY] = self._state_of_run(trainer, is_single=is_single)
        if is_single:
            self._save_single_file(checkpoint, filepath, storage_options, ("state_dict", "optimizer_states"))
            if not is_plugin(self.checkpoint_io):  # which may have places of its own
                self._checkpoints.note(path, 0 if trainer is None else trainer.global_step)
            return
        if storage_options is not None:
            raise TypeError("storage_options go to a CheckpointIO plugin; checkpoints are folders of shards here.")
        step, epoch = checkpoint.get("global_step", 0), checkpoint.get("epoch", 0)
        # A ModelCheckpoint that saves `path` as its last checkpoint has just saved the same state elsewhere: link to
        # that. With save_last="link" Lightning makes links by itself, so a call for `path` means to save it.
        saved = [saved_last(s) for s in self._savers if s.save_last is True and s.last_model_path == path]
        if saved and self._checkpoints.link_latest(path, saved[0], step):
            return
        self._checkpoints.save(checkpoint, path, step, {"epoch": epoch, "stage": self.stage})
        # After the run nothing would raise its errors; and a SLURM job that is told to stop is requeued at once.
        if self._live_engine is None or Notice.STOP in self._notices.anywhere:
            self.finish_saves()

    @property
    def _savers(self) -> list[ModelCheckpoint]:
        trainer = trainer_of(self.lightning_module)
        callbacks = [] if trainer is None else trainer.checkpoint_callbacks  # in the process that starts the ranks
        return [saver for saver in callbacks if isinstance(saver, ModelCheckpoint)]

    def _state_of_run(self, trainer: "pl.Trainer", *, is_single: bool) -> dict[str, Any]:
        """Returns the entry `resume.KEY` of a checkpoint. Collective for a single file, which rank 0 writes."""
        return self._resume_entry.capture(
            trainer.global_step,
            [] if self._fit is None else self._fit.engine.states.optimizer_parameters,
            self.comm if is_single else None,
            is_mid_epoch=not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch,
            skipped_steps=cast(Any, self.precision_plugin).skipped.total,
        )

    @property
    def _resume_entry(self) -> ResumeEntry:
        tensor = 1 if self.engine is None else self.engine.mesh.tensor.size
        return ResumeEntry(self.global_rank, self.world_size, tensor, self.root_device, rank_zero_info)

    def _is_saving(self, path: str) -> bool:
        """Whether `path` is the checkpoint saved last, which in the background may not be there yet."""
        return self._keeper is not None and self._keeper.is_latest(path)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if is_plugin(self.checkpoint_io):
            super().remove_checkpoint(filepath)
        else:
            self._checkpoints.remove(os.fspath(filepath))
            if self._live_engine is None:  # in a callback's teardown, after the strategy's: leave no thread behind
                self._checkpoints.saver.wait()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint of any strategy. Of a sharded one this reads what is small; tensors are read when they are
        loaded, by each rank the part that it owns."""
        self._resumed_state = None
        path = os.fspath(checkpoint_path)
        # Entries with large tensors. Lightning's WeightAveraging saves the model beside its average in the third.
        lazy = ("state_dict", "optimizer_states", "current_model_state", resume.KEY)
        checkpoint = self._read_checkpoint(path, lazy, weights_only)
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise CheckpointError(
                f"ckpt_path={path!r} is not a Lightning checkpoint: it has no 'state_dict'. "
                "Pass what Trainer.save_checkpoint wrote."
            )
        self._resumed_state = checkpoint.pop(resume.KEY, None)  # hooks are to see what they see under DDP
        if self._format.goes_on_from_shards and Folder(path).is_link:
            _call_it_the_last(checkpoint, Path(path).name, self._savers)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """See `resume.load_state_dict`. With ``strict=False``, leaves and tells what does not match."""
        assert self.lightning_module is not None
        engine = self._live_engine
        keeper, module = self._checkpoints, self.lightning_module
        with keeper.reading_together(module) if engine is None else engine.states.loading(keeper.verify_rest):
            construction = self._construction if engine is None else None
            with nullcontext() if construction is None else construction.loading(module):
                left = resume.load_state_dict(module, checkpoint["state_dict"], strict=strict)
        if any(left):
            rank_zero_warn(f"strict_loading=False: {left}. These stay as they are.")

    def load_pretrained(
        self,
        path: str | os.PathLike[str],
        module: Module | None = None,
        *,
        rename: Callable[[str], str | None] | None = None,
        strict: bool = True,
    ) -> None:
        """Loads parameters and persistent buffers of `module` from safetensors files, each in its own dtype.

        Where parameters rest as shards, every rank reads its part. Call it on every rank: in `configure_model`, where
        the module may be on the meta device, or from `on_fit_start` on.

        Args:
            path: a ``.safetensors`` file, or a folder of Hugging Face's.
            module: whose `state_dict` has the names in the files, or a model of transformers, for which they are
                converted as its `from_pretrained` does; the LightningModule by default.
            rename: called with each name in the files; returns the module's, or None to leave the tensor out.
            strict: raise an error for tensors that are missing in the files or in the module. Otherwise warn.

        Raises:
            RuntimeError: the same on every rank, with the names of all tensors that do not fit; see
                `run.pretrained.load_pretrained`.
        """
        module = self.lightning_module if module is None else module
        assert module is not None
        if any(local_of(parameter) is not parameter for parameter in module.parameters()):
            raise RuntimeError(
                "load_pretrained reads whole tensors, and tensor-parallel ranks have parts of these. Call it in "
                "configure_model, before parallelize_module."
            )
        left = load_pretrained(
            module,
            path,
            comm=self._ensure_comm(),
            engine=self._live_engine,
            construction=self._construction,
            device=self.root_device,
            rename=rename,
            strict=strict,
        )
        if any(left):
            rank_zero_warn(f"load_pretrained(strict=False): {left}. These stay as they are.")

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.engine is not None
        states = checkpoint["optimizer_states"]
        if states and len(states) != len(self.optimizers):  # empty, where a hook has taken them out
            raise ValueError(
                f"The checkpoint has the state of {len(states)} optimizers; configure_optimizers() returns "
                f"{len(self.optimizers)}. Resume with the optimizers it was saved with."
            )
        if states:
            self.engine.regroup()  # callbacks that thaw have added the groups that the saved optimizers had
            self.engine.states.load_optimizers(states)
        if self._resumed_state is not None:
            cast(Any, self.precision_plugin).skipped.total = self._resumed_state.get("skipped_steps", 0)
            self._resume_entry.restore_random(self._resumed_state)

    def _before_batch(self) -> None:
        """Begins a training batch. In the first one after a resume, restores the random state once more.

        A run that resumes in the middle of an epoch makes its data loader anew, which draws random numbers that the
        saved run did not draw.
        """
        self._notices.are_current = False
        saved, self._resumed_state = self._resumed_state, None
        if saved is not None and saved["is_mid_epoch"]:
            self._resume_entry.restore_random(saved)
        if self._keeper is not None:
            self._keeper.close_resumed()
            here = self._notices.here
            (here.add if self._keeper.saver.has_failed else here.discard)(Notice.UNSAVED)

    def _end_saves(self) -> None:
        """Finishes the saves of a run: all ranks together, or after a failure, which others may not have survived,
        this rank alone."""
        self._resumed_state = None
        if self._keeper is None:
            return
        self._keeper.close_resumed()
        if self._failure is None:
            self.finish_saves()
            return
        try:
            self._keeper.saver.wait()
        except (CheckpointError, OSError) as error:
            log.error("%s", error)  # the error that ended the run is being raised already


def trainer_of(module: "pl.LightningModule | None") -> "pl.Trainer | None":
    """Returns the trainer of a module; None where there is none, as in the process that starts the ranks."""
    try:
        return None if module is None else module.trainer
    except RuntimeError:
        return None


def _call_it_the_last(checkpoint: Mapping[str, Any], name: str, savers: Iterable[ModelCheckpoint]) -> None:
    """Names, in the states of `savers` that call their last checkpoint so, the link that the checkpoint is loaded by.

    The checkpoint was saved before the link was made. Without this a `ModelCheckpoint` that resumes from ``last.ckpt``
    would take the link for a file of another run, leave it, and write ``last-v1.ckpt``. One whose last checkpoint has
    another name removes what its state names when it saves the next one: that must not be this link.
    """
    for saver in savers:
        state = checkpoint.get("callbacks", {}).get(saver.state_key)
        is_its_name = saver.save_last and name.startswith(saver.CHECKPOINT_NAME_LAST.partition("{")[0])
        if is_its_name and isinstance(state, dict) and "last_model_path" in state:
            state["last_model_path"] = str(Path(state.get("dirpath") or "") / name)
