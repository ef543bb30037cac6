"""`FabricZeroStrategy`: the stages under `lightning.Fabric`, with the arguments and the engine of `ZeroStrategy`.

    fabric = lightning.Fabric(devices=2, strategy=ZeroStrategy(stage=2))        or strategy="zero_stage_2"
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

One strategy cannot be a Trainer's and Fabric's at once: Lightning gives methods of one name other arguments. So
`interop` hands Fabric, in place of a `ZeroStrategy`, one of these made of it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, TypeVar, cast

from lightning.fabric.plugins import BitsandbytesPrecision, CheckpointIO, MixedPrecision, Precision
from lightning.fabric.plugins import TransformerEnginePrecision as TransformerEngine
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy, Strategy
from lightning.fabric.strategies.strategy import _validate_keys_for_strict_loading
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.fabric.wrappers import _unwrap_objects
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint import CheckpointKeeper, resume
from lightning_zero.pl.precision import SkippedStep, refuse_endless, tell_skipped
from lightning_zero.pl.ranks import options_on_machine, warn_of_shared_store, whole_copies_that_fit
from lightning_zero.pl.reading import Readings
from lightning_zero.pl.sharded_module import ShardedModule, SyncControl
from lightning_zero.pl.single_file import (
    format_beside,
    is_folder_of_shards,
    is_plugin,
    read_single_file,
    write_single_file,
)
from lightning_zero.pl.strategy import ZeroStrategy, named
from lightning_zero.pl.table import table_of, told_of_whole
from lightning_zero.run.construction import constructing
from lightning_zero.run.engine import Engine
from lightning_zero.run.modes import NAMES as MODES
from lightning_zero.run.replicated import broadcast_states
from lightning_zero.run.states import failing_together
from lightning_zero.shards.managed import foreign_parameters
from lightning_zero.shards.norm import Overflow
from lightning_zero.stage import STAGES
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.mesh import Mesh
from lightning_zero.wire.native import make_comm

T = TypeVar("T")


class FabricZeroStrategy(Readings, DDPStrategy):
    """See the module's docstring.

    Every module that is set up has an engine of its own, made as soon as its optimizers are known: by `Fabric.setup`,
    or after `setup_module` and `setup_optimizers` in the first forward. `Fabric.save` writes a folder of shards, which
    loads on any number of ranks, under Fabric's other strategies too.

    Args:
        of: the arguments.

    Raises:
        ValueError: for arguments that are Fabric's own.
        NotImplementedError: for what is not there under Fabric.
    """

    def __init__(self, of: ZeroStrategy) -> None:
        if of._precision_plugin is not None:
            raise ValueError("Fabric has its own plugins: write Fabric(plugins=...) in place of precision_plugin=.")
        if of.checkpoint.async_save:
            raise NotImplementedError(
                "Checkpoint(async_save=True) is there under a Trainer alone: Fabric does not say when a run ends, and "
                "nobody would wait for the last save. Leave it out."
            )
        if of._options.tensor_parallel_size > 1:
            raise NotImplementedError("tensor_parallel_size is there under a Trainer alone. Leave it out.")
        super().__init__(
            accelerator=of._accelerator,
            parallel_devices=of.parallel_devices,
            cluster_environment=of.cluster_environment,
            process_group_backend=of._process_group_backend,
            timeout=of._timeout,
            start_method=of._start_method,
        )
        self._of = of
        self.stage, self.checkpoint = of.stage, of.checkpoint
        if of._checkpoint_io is not None:
            self.checkpoint_io = of._checkpoint_io
        self._backward_sync_control = SyncControl()
        self._modules: list[ShardedModule] = []
        self._optimizers: list[Optimizer] = []
        self._steps = 0  # of all optimizers
        self._overflows: dict[Optimizer, Overflow] = {}  # of the steps that come
        self._in_a_row: tuple[SkippedStep, ...] = ()  # up to now
        self.skipped_steps = 0  # that overflowed in fp16

    # -- ranks

    @override
    def setup_environment(self) -> None:
        warn_of_shared_store()
        super().setup_environment()

    @cached_property
    def _comm(self) -> Comm:
        of = self._of
        return make_comm(self.root_device, of._wait_timeout, backend=self._process_group_backend, sanitize=of._sanitize)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:  # type: ignore[override]
        """One rank draws its data as one device does, or it could not equal `SingleDeviceStrategy`."""
        return None if self.world_size == 1 else super().distributed_sampler_kwargs

    def _end_rendezvous(self) -> None:
        """Waits for ranks that still evaluate, and serves them; before collectives that are not the engines'."""
        for engine in self._engines:
            engine.rendezvous.meet_before_collective()

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._end_rendezvous()
        super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        self._end_rendezvous()
        return super().broadcast(obj, src)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self._end_rendezvous()
        return super().all_gather(tensor, group, sync_grads)

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        self._end_rendezvous()
        return super().all_reduce(tensor, group, reduce_op)

    # -- precision

    @property
    @override
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        if isinstance(precision, BitsandbytesPrecision | TransformerEngine):
            raise ValueError(
                f"ZeroStrategy does not work with {type(precision).__name__}. Use Fabric(precision=...) with "
                "'32-true', '64-true', 'bf16-mixed', 'bf16-true', '16-mixed' or '16-true'."
            )
        self._precision = precision

    @property
    def _scaler(self) -> Any:
        return getattr(self.precision, "scaler", None)

    # -- set up

    @override
    def module_to_device(self, module: Module) -> None:
        """Where parameters rest as shards, what trains moves there when it is set up, unit by unit: it may be larger
        than the device. Fabric moves models in `setup` by the same call as a loss network of the user's."""
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if not (STAGES[self.stage].parameter and trains):
            super().module_to_device(module)

    @override
    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where parameters rest as shards, what is built inside is never whole."""
        shards = constructing(stage=self.stage, comm=self._comm, options=self._of._options)
        with super().module_init_context(empty_init), shards:
            yield

    @override
    def setup_module(self, module: Module) -> ShardedModule:  # type: ignore[override]
        sharded = ShardedModule(module, self._make_engine)
        mesh = Mesh.of(self._comm, self._of._options.replicate_size)
        broadcast_states(module, foreign_parameters(module), mesh)  # users may copy it before the engine is there
        self._modules.append(sharded)
        return sharded

    @override
    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Module, list[Optimizer], Any]:
        sharded = ShardedModule(module, self._make_engine)
        self._modules.append(sharded)
        for optimizer in optimizers:
            self.setup_optimizer(optimizer)
        assert sharded.engine is not None
        return sharded, optimizers, scheduler

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Its modules may have been set up before, or are so later.

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
            if sharded.made is not None and self._is_over(optimizer, sharded):
                self._leave(sharded)
        self._optimizers.append(optimizer)
        return optimizer

    @staticmethod
    def _is_over(optimizer: Optimizer, sharded: ShardedModule) -> bool:
        own = {id(parameter) for parameter in sharded.parameters()}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def _optimizers_over(self, sharded: ShardedModule) -> list[Optimizer]:
        return [optimizer for optimizer in self._optimizers if self._is_over(optimizer, sharded)]

    def _leave(self, sharded: ShardedModule) -> None:
        """The engine was made for evaluation; one that trains is to follow."""
        engine = sharded.engine
        if engine.optimizers:
            raise RuntimeError(
                "An optimizer is set up for a module that trains with others already. Set up all of them first: "
                "model, optimizer_1, optimizer_2 = fabric.setup(model, optimizer_1, optimizer_2)."
            )
        if not self._fits_whole(engine):
            raise RuntimeError(
                "The module was used before its optimizer was set up, and whole copies of it do not fit into host "
                "memory. Call fabric.setup_optimizers before the first forward."
            )
        engine.close()
        sharded.made = None

    def _fits_whole(self, engine: Engine) -> bool:
        return whole_copies_that_fit(engine, self.root_device, self.num_processes) > 0

    def _make_engine(self, sharded: ShardedModule) -> Engine:
        mixed = self.precision.precision if isinstance(self.precision, MixedPrecision) else None
        optimizers = self._optimizers_over(sharded)
        if STAGES[self.stage].parameter and (told := told_of_whole(sharded.module, "fabric.init_module()")):
            rank_zero_info(told)
        engine = Engine(
            sharded.module,
            optimizers,
            stage=self.stage,
            comm=self._comm,
            device=self.root_device,
            options=options_on_machine(self._of._options, mixed, self.num_processes),
        )
        if optimizers:
            if self._of.offload is None:
                _optimizers_to_device(optimizers, self.root_device)
            rank_zero_info(table_of(engine, self.stage, optimizers))
        for optimizer in optimizers:  # users load what `Fabric.load` has returned, whole
            vars(optimizer)["load_state_dict"] = partial(self._load_optimizer, optimizer)
        return engine

    # -- steps

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if optimizer not in self._stepped_in:
            raise RuntimeError(
                f"{type(optimizer).__name__} has no parameter of a module that was set up. Call fabric.setup(model, "
                "optimizer), or fabric.setup_module(model) before the first step."
            )
        self._unscale(optimizer)
        output = super().optimizer_step(optimizer, **kwargs)
        self._steps += 1
        self._note(self._overflows.pop(optimizer, None))
        return output

    def _unscale(self, optimizer: Optimizer) -> None:
        """Once between two steps: `Averages.unscale_` leaves to a plugin's own scaler what is left to do."""
        scaler = self._scaler
        if scaler is not None and scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            averages = self._stepped_in[optimizer].averages
            self._overflows[optimizer] = averages.unscale_(scaler, optimizer)

    def _note(self, overflow: Overflow | None) -> None:
        if overflow is None or not overflow.ranks:
            self._in_a_row = ()
            return
        self.skipped_steps += 1
        self._in_a_row += (SkippedStep(self._steps, None, overflow),)
        scale = self._scaler.get_scale()
        tell_skipped(self._in_a_row[-1], scale)
        refuse_endless(self._in_a_row, self._of.max_skipped_steps, scale)

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self._prepare_clipping(optimizer)
        averages = self._stepped_in[optimizer].averages
        norm = averages.clip_by_norm_(
            optimizer, float(max_norm), norm_type=float(norm_type), error_if_nonfinite=error_if_nonfinite
        )
        return norm.total.to(self.root_device)

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float) -> None:
        self._prepare_clipping(optimizer)
        self._stepped_in[optimizer].averages.clip_by_value_(optimizer, float(clip_val))

    def _prepare_clipping(self, optimizer: Optimizer) -> None:
        if self._scaler is None:
            self.precision.unscale_gradients(optimizer)  # of a plugin of the user's own
        else:
            self._unscale(optimizer)

    # -- what users read; see `Readings`

    @override
    def _engine_of(self, what: Module | Parameter | None) -> Engine:
        wanted = _unwrap_objects(what)
        found = [sharded for sharded in self._modules if what is None or sharded.has(wanted)]
        if len(found) != 1:
            told = f"{len(found)} of the modules that were set up have it" if what is not None else "say which"
            raise ValueError(f"{len(self._modules)} modules were set up with Fabric; {told}. Pass one of them.")
        return found[0].engine

    @property
    @override
    def _engines(self) -> list[Engine]:
        return [sharded.made for sharded in self._modules if sharded.made is not None]

    @property
    @override
    def _stepped_in(self) -> dict[Optimizer, Engine]:
        stepped: dict[Optimizer, Engine] = {}
        for sharded in self._modules:  # what none of them steps has no engine yet, and may get optimizers
            optimizers = self._optimizers_over(sharded) if sharded.made is None else sharded.made.optimizers
            if optimizers:
                stepped |= dict.fromkeys(optimizers, sharded.engine)
        return stepped

    # -- checkpoints

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self.checkpoint = format_beside(io, self.checkpoint, may_choose=self._of._may_choose_format)
        self._checkpoint_io = io

    @cached_property
    def _keeper(self) -> CheckpointKeeper:
        return CheckpointKeeper(self._comm, in_background=False, warn=rank_zero_warn)

    @override
    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Writes a folder of shards, or in the format "full" a single file. Call it on every rank.

        Raises:
            CheckpointError: on every rank, when one cannot write; says what is there now.
        """
        saver, is_full = self._keeper.saver, self.checkpoint.format == "full"
        if storage_options is not None and not is_full:
            raise TypeError("storage_options go to a CheckpointIO plugin; checkpoints are folders of shards here.")
        self._end_rendezvous()
        saver.muster()
        states = {key: self._state_of(key, value) for key, value in state.items()}
        tree = self._convert_stateful_objects_in_state(states, filter or {})
        if is_full:
            whole = [key for key, value in states.items() if value is not state[key]]
            io, is_writer = self.checkpoint_io, self.is_global_zero
            write_single_file(saver, io, tree, path, storage_options, is_writer=is_writer, whole=whole)
        else:
            self._keeper.save(tree, str(path), self._steps, {"stage": self.stage})

    def _state_of(self, key: str, value: Any) -> Any:
        """That of a module or an optimizer; everything else as it is."""
        is_full = self.checkpoint.format == "full"
        if isinstance(value, ShardedModule):
            engine = value.engine
            engine.loans.settle()
            engine.rendezvous.expect_nothing()
            if is_full:
                return engine.states.full_model(copy=self.is_global_zero)
            return engine.states.spread_model(key=key)
        if isinstance(value, Optimizer) and value in self._stepped_in:
            states = self._stepped_in[value].states
            return states.full_optimizer(value) if is_full else states.spread_optimizer(value, key)
        return value

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole, as one device would have it. Call it on every rank."""
        return self.full_optimizer_state(optimizer)

    @override
    def load_checkpoint(
        self,
        path: Any,
        state: Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """A checkpoint of any strategy. Of a folder of shards each rank reads what it owns. Call it on every rank."""
        self._end_rendezvous()
        entries: dict[str, Any] = state if isinstance(state, dict) else {}
        lazy = [key for key, value in entries.items() if isinstance(value, ShardedModule | Optimizer)]
        if is_plugin(self.checkpoint_io) and not is_folder_of_shards(str(path)):
            checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        else:
            opened = self._keeper.open(str(path), lazy=lazy, objects=weights_only is False)
            checkpoint = read_single_file(self.checkpoint_io, str(path), weights_only) if opened is None else opened
        if isinstance(state, Module | Optimizer):
            self._load(state, checkpoint, strict)
            checkpoint = {}
        elif state:
            _validate_keys_for_strict_loading(state.keys(), checkpoint.keys(), strict=strict)
            for name in [name for name in state if name in checkpoint]:
                found = checkpoint.pop(name)
                if hasattr(state[name], "load_state_dict"):
                    self._load(state[name], found, strict)
                else:
                    state[name] = found
        with failing_together(self._comm, "verifying"):
            self._keeper.verify_rest()
        self._keeper.forget()
        return checkpoint

    def _load(self, into: Any, found: Mapping[str, Any], strict: bool) -> None:
        if isinstance(into, Module):
            self.load_module_state_dict(into, cast(dict[str, Any], found), strict)
        else:
            into.load_state_dict(found)

    @override
    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        if not isinstance(module, ShardedModule):
            super().load_module_state_dict(module, state_dict, strict)
            return
        engine = module.engine  # made here, if nobody has: what is loaded is noted in its shards
        left = resume.load_state_dict(module.module, state_dict, strict=strict)
        engine.states.load_noted(_nothing)
        if any(left):
            rank_zero_warn(f"strict=False: {left}. These stay as they are.")

    def _load_optimizer(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """`optimizer.load_state_dict`, of the whole state. Call it on every rank."""
        stepped_in = self._stepped_in
        if optimizer in stepped_in:
            stepped_in[optimizer].states.load_optimizer(optimizer, state_dict)
        else:
            type(optimizer).load_state_dict(optimizer, cast(dict[str, Any], state_dict))

    # -- the end

    @override
    def teardown(self) -> None:
        """Makes all modules whole that fit. Fabric does not call it; call it to go on without shards."""
        for sharded in self._modules:
            if sharded.made is not None and self._fits_whole(sharded.made):
                sharded.made.close()
        self._modules.clear()
        for optimizer in self._optimizers:
            vars(optimizer).pop("load_state_dict", None)
        self._optimizers.clear()
        super().teardown()

    def __repr__(self) -> str:
        return f"<ZeroStrategy(stage={self.stage}) of Fabric>"

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """The names of a Trainer's strategies."""
        for name, told, arguments in named():
            strategy_registry.register(name, _of_arguments, told, override=True, **arguments)


def _of_arguments(**arguments: Any) -> FabricZeroStrategy:
    return FabricZeroStrategy(ZeroStrategy(**arguments))


def for_fabric(init: Callable[..., None], connector: Any, *args: Any, strategy: Any = "auto", **kwargs: Any) -> None:
    """The constructor of what chooses Fabric's strategy, which is given one of these for a `ZeroStrategy`."""
    if isinstance(strategy, ZeroStrategy):
        strategy = FabricZeroStrategy(strategy)
    init(connector, *args, strategy=cast(Strategy, strategy), **kwargs)


def _nothing() -> None: ...


FabricZeroStrategy.register_strategies(STRATEGY_REGISTRY)
