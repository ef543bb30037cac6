"""`EngineStrategy`: makes the engine of each run of a Trainer in `setup`, and closes it in `teardown`."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint import randomness
from lightning_zero.pl.callbacks import OwnCallbacks
from lightning_zero.pl.checkpointing import CheckpointingStrategy, Fit, trainer_of
from lightning_zero.pl.ema import ZeroEMA
from lightning_zero.pl.fitting import refuse_to_fit, tell_of_foreign, warn_of_undivided, what_needs_gradients
from lightning_zero.pl.lightning_private import show_device, sync_layers, use_sampler
from lightning_zero.pl.precision import adapt, guard_schedulers
from lightning_zero.pl.ranks import failed_alike
from lightning_zero.pl.refusals import tell_refusal
from lightning_zero.run.engine import Engine
from lightning_zero.run.forecast import bytes_to_save
from lightning_zero.run.modes import NAMES as MODES
from lightning_zero.tiers.disk import DiskError
from lightning_zero.wire.comm import RankTimeoutError

# After these, messages of the operation may still arrive, or the process is about to be killed: ranks cannot go on.
FATAL = (RankTimeoutError, SystemExit)


class EngineStrategy(CheckpointingStrategy):
    """The part of `ZeroStrategy` between a run's set-up and its teardown: makes an engine where Lightning's own
    strategy wraps the module in DDP, and makes the module whole again, after an error as far as ranks still can."""

    _is_setting_up = False  # a run has begun, and its engine is not made yet
    _own_callbacks: OwnCallbacks | None = None  # those of the run under way
    _undo: ExitStack  # what `teardown` undoes in module and Trainer

    # -- set up

    @DDPStrategy.precision_plugin.setter  # type: ignore[attr-defined]
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        adapted = None if precision_plugin is None else adapt(precision_plugin)
        DDPStrategy.precision_plugin.fset(self, adapted)  # type: ignore[attr-defined]

    @DDPStrategy.optimizers.setter  # type: ignore[attr-defined]
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        known = [] if self._live_engine is None else self._live_engine.optimizers
        strangers = [type(one).__name__ for one in optimizers if one not in known] if known else []
        if strangers:
            raise RuntimeError(
                f"Optimizers ({', '.join(strangers)}) were made in the middle of fit: they would step whole "
                "parameters, and keep whole state. Keep those that fit began with: optimizer.state.clear() begins "
                "their state anew, param_groups and add_param_group change what they step, and how."
            )
        DDPStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        self._is_setting_up = True
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._format.begin_fit(self.checkpoint_io)
        super().setup_environment()

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        """Surrounds `configure_model`. At stage 3 it builds a model that is never whole."""
        with self._constructing() as self._construction:
            yield

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        module = self.lightning_module
        assert module is not None
        if self.world_size == 1:  # one rank draws its data as one device does, or it could not equal strategy="auto"
            use_sampler(trainer, False)
        self._own_callbacks = OwnCallbacks(self, trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        is_whole = self._close_engine() is not None
        if is_whole or self.engine is None or self.engine.module is not module:
            self._make_engine(trainer, module, fitting)
        elif fitting:
            raise RuntimeError(
                "The model is still in shards since the run before: whole copies do not fit into host memory, and new "
                "optimizers need them. Save a checkpoint, make the model anew, and fit(model, ckpt_path=...)."
            )
        self.precision_plugin.begin_run(self.engine, self._settings.max_skipped_steps)
        self._is_setting_up = False

    def _make_engine(self, trainer: "pl.Trainer", module: "pl.LightningModule", fitting: bool) -> None:
        """Does what Lightning's own `setup` does, but makes an engine where that wraps the module in DDP."""
        assert self.model is not None
        if fitting:
            self.model = sync_layers(self, self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        comm = self._ensure_comm()  # before user code runs: with it, other ranks hear of an error on this one
        if self._failure is not None:
            comm.report(None)  # the failure of the run before is not the reason for one from here on
        if fitting:
            self.setup_optimizers(trainer)
            refuse_to_fit(trainer, self._settings.options)
        optimizers = self.optimizers if fitting else []
        self.engine = engine = self._new_engine(module, optimizers, self.precision_plugin, "configure_model()")
        show_device(module, device=self.root_device)  # sets `module.device`, as `module.to` would
        randomness.share(engine.mesh.tensor, self.root_device)
        warn_of_undivided(engine)
        self._failure, self._runs = None, self._runs + 1
        self.setup_precision_plugin()
        if fitting:
            self._fit = Fit(engine, bytes_to_save(module, optimizers))
            self._begin_fit(trainer, engine)

    def _begin_fit(self, trainer: "pl.Trainer", engine: Engine) -> None:
        """Prepares Lightning's schedulers, optimizers and loggers for a fit, and prints the table if that is wanted."""
        module = trainer.lightning_module
        self._undo.callback(guard_schedulers(self.precision_plugin, module, lambda: self.lr_scheduler_configs))
        found: Any = pl.LightningModule.optimizers(module)  # not the user's own method, which may do more
        wrappers: list[Any] = found if isinstance(found, list) else [found]
        for wrapper in wrappers:  # they have the class's methods, not those of this one object
            methods = vars(wrapper.optimizer)
            vars(wrapper).update({name: methods[name] for name in MODES if name in methods})
        self._warn_of_loggers(trainer.loggers)
        self._begin_training(engine)
        assert self._own_callbacks is not None
        if self._own_callbacks.summarises:
            averages = [one.room(engine) for one in trainer.callbacks if isinstance(one, ZeroEMA)]  # type: ignore[attr-defined]
            self._print_table(engine, averages=averages, can_step_in_backward=not what_needs_gradients(trainer))
            tell_of_foreign(engine)

    # -- steps

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._live_engine is None else self._live_engine.calling_step():
            return super().optimizer_step(*args, **kwargs)

    # -- the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failure = type(exception)
        if self._is_setting_up:
            tell_refusal(exception, self.global_rank)
        if self.engine is not None:
            self._notices.note_outside_batches()
        if isinstance(exception, RankTimeoutError):
            exception.moment = _moment_of(self.lightning_module)
            if self.engine is not None and self._notices.place:
                exception.add_note(f"Rank {self.global_rank} was {self._notices.place}.")
        else:
            self._report(exception)
        if isinstance(exception, DiskError):
            latest = None if self._keeper is None else self._keeper.latest_complete
            exception.add_note(f"The last complete checkpoint of this run: {latest or 'none was saved'}.")
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._undo.close()
        if self._live_engine is not None:
            self._notices.ends = True
        if self._own_callbacks is not None and self.lightning_module is not None:
            self._own_callbacks.preemption.tell(self.lightning_module.trainer)
            self._own_callbacks = None
        try:
            self._end_saves()
        finally:
            gradients = self._close_engine()
            if gradients is not None and self._settings.options.tensor_parallel_size == 1:
                super().teardown()
                for parameter, grad in gradients.items():
                    parameter.grad = grad
            else:  # not Lightning's teardown, which moves the model to the CPU: it is in shards, or on a device mesh
                for name in ("cluster_environment", "precision_plugin", "accelerator", "checkpoint_io"):
                    getattr(self, name).teardown()

    def _can_meet_after(self, failure: type[BaseException], engine: Engine) -> bool:
        """Whether the other ranks have failed with this one, and take part in collectives."""
        return not issubclass(failure, FATAL) and failed_alike(engine, self.board, self._runs)

    def _close_engine(self) -> Mapping[Parameter, Tensor] | None:
        """Makes the model whole when all ranks are there and it fits. Returns the gradients of a fit's last step, whole
        on the host, as far as they fit too; None where the model is not whole."""
        engine, gradients = self._live_engine, dict[Parameter, Tensor]()
        if engine is None:
            return gradients
        failure = self._failure
        if failure is not None and engine.mesh.world.size > 1 and not self._can_meet_after(failure, engine):
            engine.close(whole=False)
            self._comm = self._keeper = None  # messages may still be under way: the next run has its own of both
            return None
        copies = self._copies_that_fit(engine)
        if not copies:
            rank_zero_info(
                "The model stays sharded: whole copies do not fit into host memory. Reading a parameter gathers it "
                "(on every rank); Trainer.save_checkpoint works."
            )
            return None
        if failure is None and copies > 1 and self._fit is not None and engine is self._fit.engine:
            gradients = engine.gradients.whole_on_host()
        engine.close()
        return gradients


def _moment_of(module: "pl.LightningModule | None") -> str:
    """Returns what the trainer does now, for messages, such as "step 12"."""
    trainer = trainer_of(module)
    if trainer is None:
        return ""
    stage = trainer.state.stage
    return f"{'' if trainer.training or stage is None else f'{stage.value} after '}step {trainer.global_step}"
