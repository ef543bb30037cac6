"""`ZeroStrategy`: the stages under `lightning.Trainer`."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property, partial, wraps
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero import config
from lightning_zero.checkpoint import randomness
from lightning_zero.config import ActivationCheckpointing, Checkpoint, Offload
from lightning_zero.pl import other_name
from lightning_zero.pl.callbacks import OwnCallbacks
from lightning_zero.pl.checkpointing import CheckpointingStrategy
from lightning_zero.pl.elsewhere import answers
from lightning_zero.pl.ema import ZeroEMA
from lightning_zero.pl.fitting import refuse_to_fit, tell_of_foreign, warn_of_undivided, what_needs_gradients
from lightning_zero.pl.precision import adapt, guard_schedulers
from lightning_zero.pl.ranks import (
    mesh_of,
    options_on_machine,
    sampler_kwargs,
    start_method_here,
    unshare,
    warn_of_shared_store,
    whole_copies_that_fit,
)
from lightning_zero.pl.reading import Readings
from lightning_zero.pl.table import table_of, told_of_whole
from lightning_zero.run.construction import constructing
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.modes import NAMES as MODES
from lightning_zero.stage import STAGES
from lightning_zero.tiers.disk import DiskError
from lightning_zero.wire.board import AgreementError
from lightning_zero.wire.comm import Comm, RankTimeoutError
from lightning_zero.wire.mesh import shape_of
from lightning_zero.wire.native import make_comm

GRACE = timedelta(seconds=3)  # for other ranks to come, after an error
DEFAULT_TIMEOUT = 1800.0  # s; torch's own for gloo


def named() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Names of strategies, what they are, and their arguments."""
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("", "", {}),
        ("_full", ", checkpoints in one file", {"checkpoint": "full"}),
        ("_offload", ", optimizer state in host memory", {"offload": Offload(optimizer="cpu")}),
    ]
    for prefix, stage, (suffix, told, others) in itertools.product(("", "ddp_"), (1, 2, 3), kinds):
        yield f"{prefix}zero_stage_{stage}{suffix}", f"ZeRO stage {stage}{told}", {"stage": stage, **others}


def _inside(context: Callable[[Any], AbstractContextManager[None]], theirs: Callable[..., Any]) -> Any:
    """A method that calls Lightning's inside of a context."""

    @wraps(theirs)
    def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        with context(self):
            return theirs(self, *args, **kwargs)

    return ours


class ZeroStrategy(Readings, CheckpointingStrategy):
    """ZeRO (arXiv 1910.02054) as a strategy: DDP's numbers, with model states partitioned over the ranks.

    Users call `full_parameters`, `full_grad`, `grad_norms`, `full_optimizer_state`, `load_pretrained`, `no_sync`,
    `memory_report`, `communication_report`, `device_mesh` and `finish_saves`. Every other method is a hook that
    Lightning calls, or the package's own.

    For `lightning.Trainer`, and for `lightning.Fabric`, whose `fabric.strategy` then has the reports below.

    Args:
        stage: what is sharded at rest, 1/N on each of N ranks: 1 the optimizer state, 2 also the gradients, 3 also the
            parameters; 0 nothing (the engine's own DDP).
        units: stage 3: classes (or names, or import paths) of modules whose parameters are gathered together.
            ``"modules"`` takes the elements of module lists, and what is outside them module by module; ``"auto"``
            the same, with small neighbours gathered together up to `bucket_size_mb`, and at most 1 MiB of what would be
            gathered for longest (all of a model that is no larger) whole on every rank.
        bucket_size_mb: the largest collective, in MiB. Small models use less.
        prefetch: stage 3: how many units are gathered ahead.
        overlap: whether gradients are reduced while backward goes on.
        offload: see `Offload`; ``"cpu"`` is ``Offload(optimizer="cpu")``.
        activation_checkpointing: see `ActivationCheckpointing`; ``True`` is the one without arguments.
        tensor_parallel_size: ranks, neighbours, that share each module which `configure_model` parallelizes with
            ``self.device_mesh["tensor_parallel"]``; they see the same batches and random numbers. Such
            parameters, their `.grad` and what ``module.state_dict()`` has of them are DTensors (``.full_tensor()`` is
            the whole); checkpoints hold whole tensors. `communication_report` does not count what torch sends for them.
        replicate_size: groups of ranks that each hold all shards (hybrid sharding).
        param_dtype: None: under ``*-mixed`` the weights that autocast casts at each use are kept in its dtype,
            which changes no bit; ``torch.float32``: none is; another dtype: all parameters are kept and compute in it.
        reduce_dtype: of gradients on the wire and at rest; None is fp32, or the parameter's dtype if wider.
        accumulation: ``"sharded"`` reduces every micro-batch into the shard (stages 2 and 3): averages are summed where
            DDP averages sums, so the last bits of losses and weights differ from DDP's; ``"local"`` keeps full
            gradients and reduces once per step, with DDP's bits.
        granularity: what of a parameter an optimizer steps on a rank: ``"element"``, the piece that the rank owns;
            ``"block"``, the same, with blocks of 256 elements never parted (8-bit state); ``"tensor"``, all of some
            parameters, which travel there for the step; ``"auto"``, pieces with torch's own element-wise optimizers,
            and with any other one what it needs when tried on small tensors. Neither torchao's nor bitsandbytes' 8-bit
            optimizers are part of the tests; those that keep small tensors in 32 bits are stepped whole.
        broadcast_buffers: take rank 0's buffers before a training forward, as DDP.
        checkpoint: see `Checkpoint`; ``"full"`` is ``Checkpoint(format="full")``. None: sharded, and full beside a
            `CheckpointIO` of somebody else's, which writes files.
        step_in_backward: step each group of parameters in backward, as soon as its gradients are averaged: never more
            than two buckets of gradients are there. Without clipping, accumulation and several optimizers; stages 2, 3.
        max_skipped_steps: fp16 overflows in a row before an error.
        timeout: of the process group, in seconds or as a `timedelta`.
        wait_timeout: how long a rank waits for another one before it says who is missing, in seconds.
        sanitize: compare the signature of every collective across ranks first (slow; for debugging).
        process_group_backend: ``"gloo"``, ``"nccl"``; None chooses by device.
        start_method: how processes start on one machine; see Lightning's `DDPStrategy`. In a notebook ``"popen"``, the
            default, is ``"fork"``.
        accelerator: like what follows it, as in `DDPStrategy`; the Trainer sets them.

    Raises:
        ValueError: for a value outside what is said above.
        TypeError: for an unknown argument, or a policy mapping with an unknown key.
        NotImplementedError: for an argument whose feature is not there yet.
    """

    @answers
    def __init__(
        self,
        stage: int | Literal["auto"] = 2,
        *,
        units: Any = "auto",
        bucket_size_mb: float = 25.0,
        prefetch: int = 1,
        overlap: bool = True,
        offload: Offload | Mapping[str, Any] | str | None = None,
        activation_checkpointing: ActivationCheckpointing | Mapping[str, Any] | bool | None = None,
        tensor_parallel_size: int = 1,
        replicate_size: int = 1,
        param_dtype: torch.dtype | str | None = None,
        reduce_dtype: torch.dtype | str | None = None,
        accumulation: Literal["sharded", "local"] = "sharded",
        granularity: Literal["auto", "element", "block", "tensor"] = "auto",
        broadcast_buffers: bool = True,
        checkpoint: Checkpoint | Mapping[str, Any] | str | None = None,
        step_in_backward: bool = False,
        max_skipped_steps: int = 20,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        wait_timeout: timedelta | float = 60.0,
        sanitize: bool = False,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=cast(Any, start_method_here(start_method)),
            timeout=config.seconds_from(timeout, "timeout"),
        )
        config.is_switch("sanitize", sanitize)
        config.one_of("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
        config.one_of("process_group_backend", process_group_backend, (None, "gloo", "nccl"))
        config.at_least("max_skipped_steps", max_skipped_steps, 1)
        if stage == "auto":
            raise NotImplementedError("stage='auto' is not there yet. Write stage=1, 2 or 3.")
        self.stage = config.stage_from(stage, STAGES)
        self.offload = config.policy_from(Offload, offload, "offload")
        if self.offload is not None and self.offload.parameters is not None and not STAGES[self.stage].parameter:
            raise ValueError(
                f"{self.offload} offloads parameters, which are whole on every rank at stage={self.stage}. Write "
                "stage=3, or leave parameters out."
            )
        self.activation_checkpointing = config.policy_from(
            ActivationCheckpointing, activation_checkpointing, "activation_checkpointing"
        )
        self.checkpoint = config.policy_from(Checkpoint, checkpoint, "checkpoint") or Checkpoint()
        self._may_choose_format = checkpoint is None
        self.checkpoint_io = checkpoint_io  # the property has its say
        self.max_skipped_steps = max_skipped_steps
        self._options = Options(
            unit_classes=config.classes_from(units, "units"),
            merges_units=units == "auto",
            bucket_bytes=config.bytes_from_mib(bucket_size_mb, "bucket_size_mb"),
            prefetch=prefetch,
            overlap=overlap,
            accumulation=accumulation,
            tensor_parallel_size=tensor_parallel_size,
            replicate_size=replicate_size,
            param_dtype=config.dtype_from(param_dtype, "param_dtype"),
            reduce_dtype=config.dtype_from(reduce_dtype, "reduce_dtype"),
            broadcast_buffers=broadcast_buffers,
            offload=self.offload,
            activation_checkpointing=self.activation_checkpointing,
            granularity=granularity,
            step_in_backward=step_in_backward,
        )
        self._wait_timeout = config.seconds_from(wait_timeout, "wait_timeout")
        self._sanitize = sanitize
        self._comm: Comm | None = None
        self._failed_for_good = False
        self._left_gradients: dict[Parameter, Tensor] = {}  # of the last step, whole, on the host
        self._blocked = False  # Lightning accumulates: the next backward is not the last of its step
        self._undo = ExitStack()  # what `teardown` takes out of the module again
        self._own_callbacks: OwnCallbacks | None = None  # of the run under way

    # -- set up

    @DDPStrategy.precision_plugin.setter  # type: ignore[attr-defined]
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else adapt(precision_plugin)

    @override
    def setup_distributed(self) -> None:
        """DDP seeds every rank anew here. One rank keeps its random state, so that it equals a single device."""
        warn_of_shared_store()
        with isolate_rng() if self.num_nodes * self.num_processes == 1 else nullcontext():
            super().setup_distributed()

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        """Around `configure_model`: where parameters rest as shards, they do so from the moment that they are made."""
        with constructing(stage=self.stage, comm=self._ensure_comm(), options=self._options) as self._construction:
            yield

    @override
    def setup_environment(self) -> None:
        """`LightningModule.device_mesh` is there before `configure_model`, as under ModelParallelStrategy."""
        module = self.lightning_module
        assert module is not None
        unshare(module, self._start_method)
        super().setup_environment()
        shape_of(self.world_size, self._options.replicate_size, self._options.tensor_parallel_size)
        if self._options.tensor_parallel_size > 1 or is_overridden("configure_model", module):
            module._device_mesh = self.device_mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that share tensor-parallel modules see the same batches."""
        return sampler_kwargs(self._options, self.world_size, self.global_rank)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """The workers of ranks that share modules draw the same, too; Lightning would seed them by rank."""
        _auto_add_worker_init_fn(dataloader, self.distributed_sampler_kwargs["rank"])
        return super().process_dataloader(dataloader)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        self.accelerator.setup(trainer)
        if self.world_size == 1:  # one rank draws its data as one device does, or it could not equal strategy="auto"
            trainer._accelerator_connector.use_distributed_sampler = False
        self._own_callbacks = OwnCallbacks(self, trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._close_engine() or self.engine is None or self.engine.module is not module:
            self._make_engine(trainer, module, fitting)
        elif fitting:
            raise RuntimeError(
                "The model is still in shards since the run before: whole copies do not fit into host memory, and new "
                "optimizers need them. Save a checkpoint, make the model anew, and fit(model, ckpt_path=...)."
            )
        self.precision_plugin.begin(self.engine, self.max_skipped_steps)

    def _make_engine(self, trainer: "pl.Trainer", module: "pl.LightningModule", fitting: bool) -> None:
        """As Lightning's own `setup`, with an engine where DDP wraps the module."""
        assert self.model is not None
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        comm = self._ensure_comm()
        if self._failed:
            comm.report(None)  # it is not what ranks fail of from here on
        if fitting:
            self._prepare_fit(trainer)
        plugin, optimizers = self.precision_plugin, self.optimizers if fitting else []
        mixed = plugin.precision if isinstance(plugin, MixedPrecision) else None
        options = options_on_machine(self._options, mixed, self.num_processes)
        if STAGES[self.stage].parameter and comm.size > 1 and (told := told_of_whole(module)):
            rank_zero_info(told)
        engine = Engine(module, optimizers, stage=self.stage, comm=comm, device=self.root_device, options=options)
        self.engine = engine
        _update_properties(module, device=self.root_device)  # `module.device`, as `module.to` does, which nobody calls
        randomness.share(engine.mesh.tensor, self.root_device)
        warn_of_undivided(engine, module)
        self._failed, self._runs, self._left_gradients = False, self._runs + 1, {}
        self.setup_precision_plugin()
        if fitting:
            self._trained = engine
            self._begin_fit(trainer, module)

    def _prepare_fit(self, trainer: "pl.Trainer") -> None:
        self.setup_optimizers(trainer)
        # Lightning's broadcast of each batch, which `Preemption` has replaced: in it a rank would wait for one
        # that has failed as long as `timeout`, and without a word.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]
        self._undo.callback(vars(trainer.fit_loop.epoch_loop).pop, "_broadcast_sigterm_tensor", None)
        refuse_to_fit(trainer, self._options, self.precision_plugin.scaler)

    def _begin_fit(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        """With the engine there."""
        engine, scaler = self._running_engine, self.precision_plugin.scaler
        if self.offload is None:
            _optimizers_to_device(self.optimizers, self.root_device)
        guard = guard_schedulers(self.precision_plugin, module, lambda: self.lr_scheduler_configs)
        self._undo.callback(guard)
        for lightnings in self._lightning_optimizers:  # they inherit from the optimizer's class, and not from it
            methods = vars(lightnings.optimizer)
            vars(lightnings).update({name: methods[name] for name in MODES if name in methods})
        self._warn_of_loggers(trainer.loggers)
        averages = [one.room(engine) for one in trainer.callbacks if isinstance(one, ZeroEMA)]  # type: ignore[attr-defined]
        is_free = not what_needs_gradients(trainer, scaler)
        rank_zero_info(table_of(engine, self.stage, self.optimizers, averages, can_step_in_backward=is_free))
        tell_of_foreign(engine)

    @override
    def _ensure_comm(self) -> Comm:
        if self._comm is None:
            backend = self._process_group_backend
            self._comm = make_comm(self.root_device, self._wait_timeout, backend=backend, sanitize=self._sanitize)
        return self._comm

    # -- steps

    def _forward(self, *, trains: bool = False) -> AbstractContextManager[None]:
        if self.engine is not None and self.engine.closed:
            return nullcontext()  # the module is whole, and its own
        reduces = trains and not self._blocked and cast(Any, self.lightning_module).automatic_optimization
        return self._running_engine.forward(reduces=reduces)

    @contextmanager
    def _after_rendezvous(self, *, name: str) -> Iterator[None]:
        """A collective of Lightning's waits as long as `timeout`, and without a word. So ranks come together first."""
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        is_evaluating = trainer is not None and (trainer.evaluating or trainer.predicting)
        if self._live_engine is None or self._own_callbacks is None or trainer is None or not is_evaluating:
            self._end_rendezvous()
        else:
            self._own_callbacks.before_collective(trainer)
        if self._live_engine is not None:
            self.comm.all_reduce(torch.zeros(1, dtype=torch.uint8), f"before Strategy.{name}")
        yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """A rank that returns None contributes zeros to the average over all ranks; where all do, nothing is stepped.
        (Lightning refuses None where there are several ranks: under DDP the others would wait for this one.)"""
        with self._forward(trains=True):
            output = super().training_step(*args, **kwargs)
        if output is None and self.world_size > 1 and cast(Any, self.lightning_module).automatic_optimization:
            return torch.zeros((), device=self.root_device, requires_grad=True)
        return output

    validation_step = _inside(_forward, DDPStrategy.validation_step)
    test_step = _inside(_forward, DDPStrategy.test_step)
    predict_step = _inside(_forward, DDPStrategy.predict_step)
    barrier = _inside(partial(_after_rendezvous, name="barrier"), DDPStrategy.barrier)
    reduce = _inside(partial(_after_rendezvous, name="reduce"), DDPStrategy.reduce)
    broadcast = _inside(partial(_after_rendezvous, name="broadcast"), DDPStrategy.broadcast)
    all_gather = _inside(partial(_after_rendezvous, name="all_gather"), DDPStrategy.all_gather)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters it for all micro-batches of a step but the last."""
        self._blocked = True
        try:
            with self._running_engine.accumulating():
                yield
        finally:
            self._blocked = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside accumulate on this rank only; the first one outside reduces what they left."""
        return self._running_engine.no_sync()

    # -- what users read; see `Readings` for the rest

    @override
    def _engine_of(self, what: Module | Parameter | None) -> Engine:
        return self._running_engine

    @property
    @override
    def _engines(self) -> list[Engine]:
        return [] if self.engine is None else [self.engine]

    @property
    @override
    def _stepped_in(self) -> dict[Optimizer, Engine]:
        if self._trained is None:
            raise RuntimeError("No optimizer is set up yet: use this inside of trainer.fit, or after it.")
        return dict.fromkeys(self.optimizers, self._trained)

    def __getstate__(self) -> dict[str, Any]:
        """What can be copied, and sent to another process: without what belongs to the ranks of this one."""
        state = super().__getstate__()
        state.pop("device_mesh", None)
        for name in ("_comm", "engine", "_trained", "_construction", "_keeper", "_resumed_state", "_own_callbacks"):
            state[name] = None
        return {**state, "_undo": ExitStack()}

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The ranks as a torch mesh with the axes "replicate", "data_parallel" and "tensor_parallel", for
        ``parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)`` in `configure_model`. The first
        look makes process groups: take it on every rank.

        Raises:
            RuntimeError: before Lightning has connected the processes, which it does at the start of fit.
        """
        return mesh_of(self._options, self.world_size, self.root_device)

    # -- the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        # Messages of that operation may still come, or the process is about to be killed.
        self._failed_for_good = isinstance(exception, RankTimeoutError | SystemExit)
        if self.engine is not None:
            self._notices.leave()
        if isinstance(exception, RankTimeoutError):
            exception.moment = _moment_of(self.lightning_module)
        elif self._comm is not None:
            self._comm.report(f"{type(exception).__name__}: {exception}".splitlines()[0])
        if isinstance(exception, RankTimeoutError) and self.engine is not None and self._notices.place:
            exception.add_note(f"Rank {self.global_rank} was {self._notices.place}.")
        if isinstance(exception, DiskError):
            latest = None if self._keeper is None else self._keeper.latest_complete
            exception.add_note(f"The last complete checkpoint of this run: {latest or 'none was saved'}.")
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._undo.close()
        if self._own_callbacks is not None and self.lightning_module is not None:
            self._own_callbacks.close(self.lightning_module.trainer)
            self._own_callbacks = None
        try:
            self._end_saves()
        finally:
            is_whole = self._close_engine()
            if is_whole and self._options.tensor_parallel_size == 1:
                super().teardown()
                for parameter, grad in self._left_gradients.items():
                    parameter.grad = grad
                self._left_gradients = {}
            else:  # Lightning's would move the model to the CPU: parameters whose values, or whose mesh, are elsewhere
                for name in ("cluster_environment", "precision_plugin", "accelerator", "checkpoint_io"):
                    getattr(self, name).teardown()

    def _close_engine(self) -> bool:
        """Makes the model whole when all ranks are there and it fits; says whether it is."""
        engine = self._live_engine
        if engine is None:
            return True
        if self._failed and engine.mesh.world.size > 1 and not self._has_failed_everywhere(engine):
            engine.close(whole=False)
            self._comm = self._keeper = None  # messages may be under way that nobody takes: another run has its own
            return False
        copies = whole_copies_that_fit(engine, self.root_device, self.num_processes)
        if not copies:
            rank_zero_info(
                "The model stays sharded: whole copies do not fit into host memory. Reading a parameter gathers it "
                "(on every rank); Trainer.save_checkpoint works."
            )
            return False
        if not self._failed and copies > 1 and engine is self._trained:
            self._left_gradients = engine.averages.whole_on_host()
        engine.close()
        return True

    def _has_failed_everywhere(self, engine: Engine) -> bool:
        """Whether all ranks came here after the same collectives, so that they can make the model whole: an error of
        all alike, in a notebook that goes on. Waits for a moment only: a rank that failed alone is to end its process,
        and with it the others' wait."""
        if self._failed_for_good:
            return False
        calls = [dict(comm.calls) for comm in (engine.mesh.world, engine.mesh.shard, engine.mesh.replicate)]

        def compare(records: list[dict[str, Any]]) -> dict[str, Any]:
            return {"same": all(record["calls"] == records[0]["calls"] for record in records)}

        try:
            verdict = self.board.clone(GRACE).agree(f"failed in run {self._runs}", {"calls": calls}, compare)
        except AgreementError:
            return False
        return bool(verdict["same"])

    def __repr__(self) -> str:
        written = {"stage": self.stage, **vars(self).get("_written", {})}  # not there yet while it is made
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in written.items())}){other_name.advice()}"

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the names that `Trainer(strategy=...)` understands, each also with "ddp_" before it, for programs
        that look for "ddp" in it; DDP's own registers "ddp" again."""
        for name, told, arguments in named():
            strategy_registry.register(name, cls, told, override=True, **arguments)


ZeroStrategy.register_strategies(StrategyRegistry)


def _nothing() -> None: ...


def _moment_of(module: "pl.LightningModule | None") -> str:
    """What the trainer does now, for messages: "step 12"."""
    if module is None or module._trainer is None:
        return ""
    trainer, stage = module.trainer, module.trainer.state.stage
    return f"{'' if trainer.training or stage is None else f'{stage.value} after '}step {trainer.global_step}"
