"""`ZeroStrategy`: the strategy of `lightning.Trainer`."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from lightning_zero import config
from lightning_zero.config import ActivationCheckpointing, Checkpoint, Offload
from lightning_zero.device import HOST
from lightning_zero.pl import other_name
from lightning_zero.pl.automatic import chosen
from lightning_zero.pl.checkpointing import trainer_of
from lightning_zero.pl.elsewhere import answers
from lightning_zero.pl.engine_strategy import EngineStrategy
from lightning_zero.pl.lightning_private import show_mesh
from lightning_zero.pl.ranks import after_meeting, seed_workers, start_method_here, unshare
from lightning_zero.pl.settings import UNTIL_CHOSEN, Settings
from lightning_zero.pl.single_file import CheckpointFormat
from lightning_zero.run.engine import Options
from lightning_zero.stage import STAGES
from lightning_zero.wire.mesh import shape_of


def _in_forward(theirs: Callable[..., Any]) -> Any:
    """Returns a method that calls `theirs`, a step of Lightning's without gradients, in the engine's forward."""

    @wraps(theirs)
    def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._forward(trains=False):
            return theirs(self, *args, **kwargs)

    return ours


class ZeroStrategy(EngineStrategy):
    """Trains with ZeRO (arXiv 1910.02054): the results of DDP, with the model states partitioned over the ranks.

    Users call `full_parameters`, `full_grad`, `grad_norms`, `full_optimizer_state`, `load_pretrained`, `no_sync`,
    `memory_report`, `communication_report`, `program`, `device_mesh` and `finish_saves`. Lightning, or this package,
    calls every other method.

    For `lightning.Trainer` and `lightning.Fabric`; `fabric.strategy` has the reports below, too.

    Args:
        stage: what rests as shards, 1/N on each of N ranks: 1 the optimizer state, 2 also the gradients, 3 also the
            parameters; 0 nothing (DDP by this package's engine). ``"auto"``: when a fit begins, rehearsals choose the
            stage, `offload`, `prefetch` and `activation_checkpointing`, as far as these have their defaults: the
            fastest that fit with a tenth of the device left. Bits are DDP's all the same (`docs/rehearsal.md`).
            Evaluations before the first fit have stage 2.
        units: stage 3: classes (or names, or import paths) of modules, each of which is a unit: its parameters are
            gathered together. ``"modules"``: the elements of module lists are units, and modules outside of lists one
            by one. ``"auto"``: the same, but small neighbours are gathered together, up to `bucket_size_mb`, and of
            what would be gathered for longest at most 1 MiB (all of a model that is no larger) stays whole on every
            rank.
        bucket_size_mb: the largest collective, in MiB. ``"auto"``: 25, and from 200 ranks on 128 KiB for each of them.
            Small models use less.
        prefetch: stage 3: how many units are gathered ahead.
        overlap: whether gradients are reduced while backward still runs.
        offload: see `Offload`; ``"cpu"`` is ``Offload(optimizer="cpu")``.
        activation_checkpointing: see `ActivationCheckpointing`; ``True`` is the one without arguments.
        tensor_parallel_size: number of neighbouring ranks that share each module which `configure_model` parallelizes
            with ``self.device_mesh["tensor_parallel"]`` (under Fabric ``fabric.strategy.device_mesh``); they see the
            same batches and random numbers. Such parameters, their `.grad` and their entries in
            ``module.state_dict()`` are DTensors (``.full_tensor()`` is the whole); checkpoints hold whole tensors.
            `communication_report` does not count what torch sends for them.
        replicate_size: number of groups of ranks that each hold all shards (hybrid sharding).
        param_dtype: None: under ``*-mixed`` the weights that autocast casts at each use are kept in its dtype, which
            changes no bit; ``torch.float32``: none is; another dtype: all parameters are kept and compute in it.
        reduce_dtype: dtype of gradients on the wire and at rest; None is fp32, or the parameter's dtype if wider.
        accumulation: ``"sharded"`` reduces every micro-batch into the shard (stages 2 and 3): it sums averages where
            DDP averages sums, so the last bits of losses and weights differ from DDP's. ``"local"`` keeps full
            gradients and reduces once per step, with DDP's bits. (With Fabric every backward inside of
            ``no_backward_sync`` is "local", and every other one "sharded".)
        granularity: what optimizers step on a rank: ``"element"``, the pieces that the rank owns; ``"block"``, pieces
            that never part a block of 256 elements (8-bit state); ``"tensor"``, whole tensors, which are sent for the
            step to the one rank that steps them; ``"auto"``, pieces with torch's own element-wise optimizers, and with
            any other one what it needs when tried on small tensors. Neither torchao's nor bitsandbytes' 8-bit
            optimizers are part of the tests; those that keep small tensors in 32 bits are stepped whole.
        broadcast_buffers: whether ranks take rank 0's buffers before a training forward, as under DDP.
        checkpoint: see `Checkpoint`; ``"full"`` is ``Checkpoint(format="full")``. None: each fit chooses, and its first
            save says what: a single file where the states of model and optimizers are at most 1 GB, or a `CheckpointIO`
            plugin of the user's writes files; otherwise shards.
        step_in_backward: whether each group of parameters is stepped in backward, as soon as its gradients are
            averaged: there are never more than two buckets of gradients. Not with clipping, accumulation or several
            optimizers; stages 2 and 3.
        max_skipped_steps: how many steps in a row may overflow in fp16 before an error.
        timeout: of the process group, in seconds or as a `timedelta`; the default is torch's own for gloo.
        wait_timeout: how long a rank waits for another one before it says who is missing, in seconds.
        sanitize: whether ranks first compare the signature of every collective (slow; for debugging).
        process_group_backend: ``"gloo"``, ``"nccl"``, ``"xccl"``; None chooses by device.
        start_method: how processes start on one machine; see Lightning's `DDPStrategy`. In a notebook ``"popen"``, the
            default, is ``"fork"``.
        accelerator: this and all following arguments are those of `DDPStrategy`; the Trainer sets them.

    Raises:
        ValueError: for a value that is not among those above.
        TypeError: for an unknown argument, or a policy mapping with an unknown key.
        NotImplementedError: for an argument whose feature is not there yet.
    """

    _has_trainer = False  # a Trainer has been made with it
    _arguments: dict[str, Any]  # what the user has written: see `answers`

    @answers
    def __init__(
        self,
        stage: int | Literal["auto"] = 2,
        *,
        units: Any = "auto",
        bucket_size_mb: float | Literal["auto"] = "auto",
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
        timeout: timedelta | float = 1800.0,
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
        timeout, starts_by = config.seconds_from(timeout, "timeout"), start_method_here(start_method)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=cast(Any, starts_by),
            timeout=timeout,
        )
        config.one_of("process_group_backend", process_group_backend, (None, "gloo", "nccl", "xccl"))
        is_open = stage == "auto"
        options = Options(
            unit_classes=config.classes_from(units, "units"),
            merges_units=units == "auto",
            bucket_bytes=None if bucket_size_mb == "auto" else config.bytes_from_mib(bucket_size_mb, "bucket_size_mb"),
            prefetch=prefetch,
            overlap=overlap,
            accumulation=accumulation,
            tensor_parallel_size=tensor_parallel_size,
            replicate_size=replicate_size,
            param_dtype=config.dtype_from(param_dtype, "param_dtype"),
            reduce_dtype=config.dtype_from(reduce_dtype, "reduce_dtype"),
            broadcast_buffers=broadcast_buffers,
            offload=config.policy_from(Offload, offload, "offload"),
            activation_checkpointing=config.policy_from(
                ActivationCheckpointing, activation_checkpointing, "activation_checkpointing"
            ),
            granularity=granularity,
            step_in_backward=step_in_backward,
        )
        self._settings = Settings(
            stage=UNTIL_CHOSEN if is_open else config.stage_from(stage, STAGES, "auto"),
            is_open=is_open,
            options=options,
            max_skipped_steps=max_skipped_steps,
            wait_timeout=config.seconds_from(wait_timeout, "wait_timeout"),
            timeout=timeout,
            sanitize=sanitize,
            start_method=starts_by,
        )
        self._format = CheckpointFormat(config.policy_from(Checkpoint, checkpoint, "checkpoint"))
        self.checkpoint_io = checkpoint_io
        self._is_blocked = False  # Lightning accumulates: the next backward is not the last of its step
        self._undo = ExitStack()

    # -- set up

    @override
    def setup_distributed(self) -> None:
        """Keeps the random state of a single rank, so that it equals a single device. DDP seeds every rank anew."""
        with isolate_rng() if self.num_nodes * self.num_processes == 1 else nullcontext():
            super().setup_distributed()

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        self._choose()
        with super().model_sharded_context():
            yield

    @override
    def setup_environment(self) -> None:
        """Also sets `LightningModule.device_mesh`, before `configure_model`, as ModelParallelStrategy does."""
        module, options = self.lightning_module, self._settings.options
        assert module is not None
        unshare(module, self._settings.start_method)
        super().setup_environment()
        shape_of(self.world_size, options.replicate_size, options.tensor_parallel_size)  # raises where it must
        if options.tensor_parallel_size > 1 or self._may_parallelize(module):
            show_mesh(module, self.device_mesh)

    def _may_parallelize(self, module: "pl.LightningModule") -> bool:
        return is_overridden("configure_model", module)

    def _choose(self) -> None:
        """Takes what rank 0 has chosen, if the user has left the stage open. Collective."""
        module = self.lightning_module
        if not self._settings.is_open or module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return
        self._settings = ZeroStrategy(**chosen(self, module.trainer, self._arguments))._settings

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self._place_in_data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Seeds workers alike on ranks that share tensor-parallel modules. Lightning would seed them by rank."""
        seed_workers(dataloader, self._place_in_data["rank"])
        return super().process_dataloader(dataloader)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)  # comes first: a stage is chosen by the memory that is free on the device
        self._choose()
        super().setup(trainer)

    # -- steps

    def _forward(self, *, trains: bool) -> AbstractContextManager[None]:
        if self.engine is not None and self.engine.closed:
            return nullcontext()  # the module is whole, and no engine is left in it
        reduces = trains and not self._is_blocked and cast(Any, self.lightning_module).automatic_optimization
        return self._running_engine.forward(reduces=reduces)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step. A rank that returns None contributes zeros to the average over all ranks; if all return
        None, nothing is stepped. (Lightning refuses None on several ranks: under DDP the others would wait for this
        one.)"""
        with self._forward(trains=True):
            output = super().training_step(*args, **kwargs)
        if output is None and self.world_size > 1 and cast(Any, self.lightning_module).automatic_optimization:
            return torch.zeros((), device=self.root_device, requires_grad=True)
        return output

    validation_step = _in_forward(DDPStrategy.validation_step)
    test_step = _in_forward(DDPStrategy.test_step)
    predict_step = _in_forward(DDPStrategy.predict_step)
    barrier = after_meeting(DDPStrategy.barrier)
    reduce = after_meeting(DDPStrategy.reduce)
    broadcast = after_meeting(DDPStrategy.broadcast)
    all_gather = after_meeting(DDPStrategy.all_gather)

    @override
    def _prepare_collective(self, name: str) -> None:
        """Meets, then has the ranks wait for each other in a collective of this package, which says after
        `wait_timeout` who is missing. Lightning's own waits as long as `timeout`, without a message."""
        own = self._own_callbacks
        trainer = None if self._live_engine is None else trainer_of(self.lightning_module)
        if own is not None and trainer is not None and (trainer.evaluating or trainer.predicting):
            own.preemption.meet(trainer)
        else:
            self._meet_before_collective()
        if self._live_engine is not None:
            self.comm.all_reduce(torch.zeros(1, dtype=torch.uint8, device=HOST), f"before Strategy.{name}")

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Surrounds each micro-batch of a step but the last."""
        self._is_blocked = True
        try:
            with self._running_engine.accumulating():
                yield
        finally:
            self._is_blocked = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside accumulate on this rank only; the first one outside reduces what they left."""
        return self._running_engine.no_sync()

    def for_trainer(self) -> "ZeroStrategy":
        """Returns this strategy for the first Trainer that it is given to, and for any other one a new strategy with
        the same arguments: a Trainer leaves in it what belongs to that Trainer. Packages keep Trainer arguments, and
        make several Trainers with them."""
        strategy = self
        if self._has_trainer:
            strategy = copy.copy(self)
            ZeroStrategy.__init__(strategy, **self._arguments)
        strategy._has_trainer = True
        return strategy

    def __getstate__(self) -> dict[str, Any]:
        """Returns what can be copied, and sent to another process: all but what belongs to the ranks of this run."""
        state = super().__getstate__()
        state.pop("device_mesh", None)
        for name in ("_comm", "engine", "_fit", "_construction", "_keeper", "_resumed_state", "_own_callbacks"):
            state[name] = None
        return {**state, "_undo": ExitStack()}

    def __repr__(self) -> str:
        written = ", ".join(f"{name}={value!r}" for name, value in self._arguments.items())
        return f"{type(self).__name__}({written}){other_name.advice()}"


ZeroStrategy.register_strategies(StrategyRegistry)
