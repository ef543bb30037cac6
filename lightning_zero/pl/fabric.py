"""`FabricZeroStrategy`: the strategy of `lightning.Fabric`, with the arguments and the engine of `ZeroStrategy`.

    fabric = lightning.Fabric(devices=2, strategy=ZeroStrategy(stage=2))        or strategy="zero_stage_2"
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

One class cannot be the strategy of a Trainer and of Fabric, because Lightning gives methods of the same name different
arguments. So `interop` gives Fabric a `FabricZeroStrategy` made from the user's `ZeroStrategy`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, cast

from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_zero.checkpoint import randomness
from lightning_zero.pl.advice import advise, advise_on_uncaught, tell_once
from lightning_zero.pl.fabric_checkpointing import FabricCheckpointing
from lightning_zero.pl.fitting import warn_of_undivided
from lightning_zero.pl.precision import ShardedGradients, SkippedSteps, refuse_in_fabric
from lightning_zero.pl.ranks import after_meeting, seed_workers
from lightning_zero.pl.settings import refuse_of_trainers
from lightning_zero.pl.sharded_module import ShardedModule, SyncControl, unwrapped
from lightning_zero.pl.single_file import is_plugin
from lightning_zero.pl.strategy import ZeroStrategy
from lightning_zero.run.engine import Engine
from lightning_zero.run.forecast import bytes_to_save
from lightning_zero.run.modes import NAMES as MODES
from lightning_zero.run.replicated import broadcast_states
from lightning_zero.shards.managed import foreign_parameters
from lightning_zero.shards.norm import Overflow
from lightning_zero.stage import STAGES
from lightning_zero.torch_private import scaling_of
from lightning_zero.wire.mesh import Mesh, shape_of


class FabricZeroStrategy(FabricCheckpointing):
    """Strategy of Fabric, with an engine for every module that is set up, made as soon as its optimizers are known: by
    `Fabric.setup`, or in the first forward after `setup_module` and `setup_optimizers`. `Fabric.save` writes a folder
    of shards, which loads on any number of ranks, and under Fabric's other strategies.

    Args:
        of: has the user's arguments.
        arguments: the user's, for a `ZeroStrategy` that is made here.

    Raises:
        ValueError: for arguments that Fabric itself takes.
        NotImplementedError: for features that only a Trainer has.
    """

    def __init__(self, of: ZeroStrategy | None = None, **arguments: Any) -> None:
        of = of or ZeroStrategy(**arguments)
        if isinstance(of.precision_plugin, ShardedGradients):
            raise ValueError("Fabric has its own plugins: write Fabric(plugins=...) in place of precision_plugin=.")
        refuse_of_trainers(of._settings)
        super().__init__(
            accelerator=of.accelerator,
            parallel_devices=of.parallel_devices,
            cluster_environment=of.cluster_environment,
            process_group_backend=of.process_group_backend,
            timeout=of._settings.timeout,
            start_method=cast(Any, of._settings.start_method),
        )
        self._settings, self._format = of._settings, copy(of._format)
        if is_plugin(of.checkpoint_io):
            self.checkpoint_io = of.checkpoint_io
        self._backward_sync_control = cast(Any, SyncControl())  # where Fabric looks for it
        self._modules = []  # users may name modules or optimizers first
        self._optimizers: list[Optimizer] = []
        self._skipped = SkippedSteps(of._settings.max_skipped_steps)
        self._overflows: dict[Optimizer, Overflow] = {}  # of gradients that are unscaled, and not stepped yet
        advise_on_uncaught(self)

    # -- ranks

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:  # type: ignore[override]
        """Arguments of `DistributedSampler`; None on one rank, which then draws its data as `SingleDeviceStrategy`."""
        return None if self.world_size == 1 else self._place_in_data

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        options = self._settings.options
        shape_of(self.world_size, options.replicate_size, options.tensor_parallel_size)  # raises where it must

    @override
    def process_dataloader(self, dataloader: DataLoader) -> DataLoader:
        seed_workers(dataloader, self._place_in_data["rank"])
        return super().process_dataloader(dataloader)

    barrier = after_meeting(DDPStrategy.barrier)
    broadcast = after_meeting(DDPStrategy.broadcast)
    all_gather = after_meeting(DDPStrategy.all_gather)
    all_reduce = after_meeting(DDPStrategy.all_reduce)

    # -- precision

    @DDPStrategy.precision.setter  # type: ignore[attr-defined]
    def precision(self, precision: Precision | None) -> None:
        refuse_in_fabric(precision)
        DDPStrategy.precision.fset(self, precision)  # type: ignore[attr-defined]

    @property
    def _scaler(self) -> Any:
        return getattr(self.precision, "scaler", None)

    # -- set up

    @override
    def module_to_device(self, module: Module) -> None:
        """Moves a module to the device, except one that trains at stage 3: it may be larger than the device.

        The engine moves that one unit by unit. Fabric calls this for models in `setup`, and for others, such as a loss
        network, which only this call moves.
        """
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if not (STAGES[self.stage].parameter and trains):
            super().module_to_device(module)

    @override
    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Surrounds the construction of a module. At stage 3 it builds a module that is never whole."""
        with super().module_init_context(empty_init), self._constructing():
            yield

    @override
    def setup_module(self, module: Module) -> ShardedModule:  # type: ignore[override]
        options = self._settings.options
        mesh = Mesh.of(self._ensure_comm(), options.replicate_size, options.tensor_parallel_size)
        broadcast_states(module, foreign_parameters(module), mesh)  # users may copy it before the engine is made
        self._modules.append(sharded := ShardedModule(module, self._make_engine))
        return sharded

    @override
    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Module, list[Optimizer], Any]:
        self._modules.append(sharded := ShardedModule(module, self._make_engine))
        for optimizer in optimizers:
            self.setup_optimizer(optimizer)
        sharded.ensure_engine()  # here, where all ranks are, and not in the first forward
        return sharded, optimizers, scheduler

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Adds an optimizer, before or after the modules of its parameters.

        Raises:
            NotImplementedError: for optimizers that move weights in methods of their own.
            RuntimeError: for a second optimizer of a module that trains already.
        """
        if all(callable(getattr(optimizer, name, None)) for name in MODES) and STAGES[self.stage].optimizer:
            raise NotImplementedError(
                f"{type(optimizer).__name__} moves weights in train() and eval(), which Fabric calls on a copy of it "
                "that knows nothing of shards. Use a Trainer, or stage=0."
            )
        for sharded in self._modules:
            if sharded.made is not None and sharded.is_stepped_by(optimizer):
                self._discard_engine(sharded)
        self._optimizers.append(optimizer)
        return optimizer

    def _discard_engine(self, sharded: ShardedModule) -> None:
        """Closes an engine that was made for evaluation, so that the next one trains."""
        engine = sharded.ensure_engine()
        if engine.optimizers:
            raise RuntimeError(
                "An optimizer is set up for a module that trains with others already. Set up all of them first: "
                "model, optimizer_1, optimizer_2 = fabric.setup(model, optimizer_1, optimizer_2). To set the module up "
                "anew, call fabric.strategy.teardown() before."
            )
        if not self._copies_that_fit(engine):
            raise RuntimeError(
                "The module was used before its optimizer was set up, and whole copies of it do not fit into host "
                "memory. Call fabric.setup_optimizers before the first forward."
            )
        engine.close()
        sharded.made = None

    def _make_engine(self, sharded: ShardedModule) -> Engine:
        optimizers = self._optimizers_of(sharded)
        self._refuse_several_models(optimizers)
        builder, number = "fabric.init_module()", self._modules.index(sharded)
        engine = self._new_engine(sharded.module, optimizers, self.precision, builder, number=number)
        randomness.share(engine.mesh.tensor, self.root_device)
        warn_of_undivided(engine)
        if optimizers:
            sharded.bytes_to_save = bytes_to_save(sharded.module, optimizers)
            self._begin_training(engine)
            self._print_table(engine)
        for optimizer in optimizers:  # users call it with the whole state that `Fabric.load` has returned
            vars(optimizer)["load_state_dict"] = partial(engine.states.load_optimizer, optimizer)
        return engine

    def _refuse_several_models(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises NotImplementedError for an optimizer of several models: each has an engine, which would step it."""
        for optimizer in optimizers:
            if (count := sum(sharded.is_stepped_by(optimizer) for sharded in self._modules)) > 1:
                raise NotImplementedError(
                    f"{type(optimizer).__name__} has parameters of {count} models that are set up. Give each model an "
                    "optimizer of its own, or set up one module that holds them all and calls them in its forward."
                )

    @override
    def _engine_of(self, what: Module | Parameter | None) -> Engine:
        found = [sharded for sharded in self._modules if sharded.has(what)]
        if len(found) != 1:
            told = f"{len(found)} of the modules that were set up have it" if what is not None else "say which"
            raise ValueError(f"{len(self._modules)} modules were set up with Fabric; {told}. Pass one of them.")
        return found[0].ensure_engine()

    @property
    @override
    def _engines(self) -> list[Engine]:
        return [sharded.made for sharded in self._modules if sharded.made is not None]

    @override
    def _stepped_in(self) -> dict[Optimizer, Engine]:
        # A module without optimizers may get some later: no engine is made for it here.
        return {one: sharded.ensure_engine() for sharded in self._modules for one in self._optimizers_of(sharded)}

    def _optimizers_of(self, sharded: ShardedModule) -> list[Optimizer]:
        """Returns the optimizers that step a module."""
        if sharded.made is not None:
            return sharded.made.optimizers
        return [optimizer for optimizer in self._optimizers if sharded.is_stepped_by(optimizer)]

    # -- steps

    @property
    def skipped_steps(self) -> int:
        """Number of optimizer steps that were skipped because a gradient overflowed in fp16."""
        return self._skipped.total

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if optimizer not in self._stepped_in():
            raise RuntimeError(
                f"{type(optimizer).__name__} has no parameter of a module that was set up. Call fabric.setup(model, "
                "optimizer), or fabric.setup_module(model) before the first step."
            )
        self._unscale(optimizer)
        with self._stepped_in()[optimizer].calling_step():
            output = super().optimizer_step(optimizer, **kwargs)
        self._steps += 1
        self._skipped.note(self._steps, self._overflows.pop(optimizer, None), self._scaler)
        return output

    def _unscale(self, optimizer: Optimizer) -> None:
        """Unscales gradients in fp16, once between two steps: when they are clipped, or else in the step. The scaler
        itself finds nothing left to unscale. Collective."""
        if self._scaler is not None and scaling_of(self._scaler, optimizer)["stage"] is OptState.READY:
            gradients = self._stepped_in()[optimizer].gradients
            self._overflows[optimizer] = gradients.unscale_(self._scaler, optimizer)

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        optimizer = unwrapped(optimizer)
        engine = self._unscaled_in(optimizer)
        if engine is None:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        norm = engine.gradients.clip_by_norm_(
            optimizer, float(max_norm), norm_type=float(norm_type), error_if_nonfinite=error_if_nonfinite
        )
        return norm.to(self.root_device)

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float) -> None:
        optimizer = unwrapped(optimizer)
        engine = self._unscaled_in(optimizer)
        if engine is None:
            super().clip_gradients_value(module, optimizer, clip_val)
        else:
            engine.gradients.clip_by_value_(optimizer, float(clip_val))

    def _unscaled_in(self, optimizer: Optimizer) -> Engine | None:
        """Unscales what an optimizer steps, to be clipped. Returns its engine; None if no module that is set up has its
        parameters."""
        if optimizer not in self._stepped_in():
            return None
        if self._scaler is None:
            self.precision.unscale_gradients(optimizer)  # the user's plugin may have its own way
        else:
            self._unscale(optimizer)
        return self._stepped_in()[optimizer]

    # -- the end

    def advise_on(self, error: BaseException) -> None:
        """Says, if memory has run out, what has grown, and which options free most; of each error once."""
        where = f"on rank {self.global_rank}, in step {self._steps}"
        module = next((sharded.module for sharded in self._modules), None)
        tell_once(error, lambda: advise(self, error, where, module))

    @override
    def teardown(self) -> None:
        """Finishes saves, and makes whole what fits. Fabric does not call it; call it to go on without shards."""
        self.finish_saves()
        for engine in self._engines:
            if self._copies_that_fit(engine):
                engine.close()
        for optimizer in self._optimizers:
            vars(optimizer).pop("load_state_dict", None)
        self._modules, self._optimizers = [], []
        super().teardown()

    def __deepcopy__(self, memo: dict[int, Any]) -> "FabricZeroStrategy":
        """Returns itself: copies of what Fabric has wrapped refer to it, and connections between ranks have no copy."""
        return self

    def __repr__(self) -> str:
        return f"<ZeroStrategy(stage={self.stage}) of Fabric>"


FabricZeroStrategy.register_strategies(STRATEGY_REGISTRY)
