"""`ShardedStrategy`: what the strategies of Trainer and Fabric share: settings, communicator, engines, checkpoints."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.plugins import MixedPrecision
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.checkpoint import CheckpointKeeper, Folder, pickle_on_all_ranks, reads_objects
from lightning_zero.checkpoint.single import write_at_once
from lightning_zero.config import ActivationCheckpointing, Checkpoint, Offload
from lightning_zero.device import HOST, free_bytes, is_host, untested
from lightning_zero.pl.advice import bytes_beside
from lightning_zero.pl.lightning_private import move_states
from lightning_zero.pl.ranks import warn_of_shared_store
from lightning_zero.pl.reading import ReadingStrategy
from lightning_zero.pl.single_file import CheckpointFormat, is_plugin, is_read_by_plugin, read_single_file, refuse_place
from lightning_zero.pl.table import table_of, told_of_whole
from lightning_zero.run.construction import Construction, constructing
from lightning_zero.run.engine import Engine
from lightning_zero.shards.local import local_of
from lightning_zero.shards.offload import Machine
from lightning_zero.stage import STAGES
from lightning_zero.tiers import host_memory
from lightning_zero.tiers.ledger import Ledger
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.native import make_comm

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class ShardedStrategy(ReadingStrategy):
    """Base of both strategies, placed before Lightning's `DDPStrategy`."""

    num_processes: int  # ranks on this machine; this one and the next two are of `DDPStrategy`
    process_group_backend: str | None
    is_global_zero: bool
    _format: CheckpointFormat
    _comm: Comm | None = None
    _keeper: CheckpointKeeper | None = None
    _may_end = False  # whether the run may end after any save without a call that says so; see `Saver`
    _beside_before: Mapping[torch.device, int] = {}  # bytes that no engine has booked, before training

    @property
    def stage(self) -> int:
        """The stage; where a fit is to choose it, until then that of evaluations."""
        return self._settings.stage

    @property
    def offload(self) -> Offload | None:
        """Which tensors are kept in other tiers."""
        return self._settings.options.offload

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing | None:
        """Which modules recompute their activations."""
        return self._settings.options.activation_checkpointing

    @property
    def checkpoint(self) -> Checkpoint | None:
        """How checkpoints are saved; None until `saves_single_file` has chosen."""
        return self._format.policy

    # -- ranks

    def setup_environment(self) -> None:
        """Connects the processes."""
        warn_of_shared_store()
        super().setup_environment()  # type: ignore[misc]

    def _ensure_comm(self) -> Comm:
        """Returns the communicator of all ranks. The first call makes it; make that one on every rank."""
        if self._comm is not None and self._comm.has_ended:
            self._comm = self._keeper = None
        if self._comm is None:
            self._comm = make_comm(
                self.root_device,
                self._settings.wait_timeout,
                backend=self.process_group_backend,
                timeout=self._settings.timeout,
                sanitize=self._settings.sanitize,
            )
        return self._comm

    def _meet_before_collective(self) -> None:
        """Serves the gathers of ranks that still evaluate, until all ranks have come here.

        Call it on every rank, before a collective that is not the engines' own.
        """
        for engine in self._engines:
            if not engine.closed:
                engine.runner.meet_before_collective()

    def _prepare_collective(self, name: str) -> None:
        """Makes ranks meet before Lightning's collective `name`; see `after_meeting`."""
        self._meet_before_collective()

    # -- engines

    def _constructing(self) -> AbstractContextManager[Construction | None]:
        """Returns a context in which models are built in shards at stage 3. Collective; see `constructing`."""
        return constructing(stage=self.stage, comm=self._ensure_comm(), options=self._settings.options)

    def _new_engine(
        self, module: Module, optimizers: Sequence[Optimizer], precision: Any, builder: str, *, number: int = 0
    ) -> Engine:
        """Makes an engine; without optimizers one for evaluation. Collective: call it on every rank. `precision` is
        Lightning's plugin; `builder` names, for messages, where the model would be built in shards; `number` is the
        model's among several."""
        comm, options = self._ensure_comm(), self._settings.options
        comm = comm.for_model(number + 1) if number else comm
        if STAGES[self.stage].parameter and comm.size > 1 and (told := told_of_whole(module, builder)):
            rank_zero_info(told)
        if told := untested(self.root_device):
            rank_zero_warn(told)
        casts = isinstance(precision, MixedPrecision | FabricMixedPrecision) and options.param_dtype is None
        options = replace(
            options,
            autocast_dtype=_AUTOCAST[precision.precision] if casts else None,
            param_dtype=None if options.param_dtype == torch.float32 else options.param_dtype,
            machine=self._machine(),
        )
        ledger, device = self._new_ledger(), self.root_device
        engine = Engine(module, optimizers, stage=self.stage, comm=comm, device=device, options=options, ledger=ledger)
        report = engine.bytes_by_category()
        self._beside_before = {memory: bytes_beside(report, device, memory) for memory in (HOST, device)}
        return engine

    def _machine(self) -> Machine:
        """Returns what each rank of this machine may use of it."""
        available, ranks = host_memory.available_host_bytes(), self.num_processes
        return Machine(host_bytes=None if available is None else available // ranks, ranks=ranks)

    def _new_ledger(self) -> Ledger:
        """Returns what books the bytes of an engine."""
        return Ledger()

    def _begin_training(self, engine: Engine) -> None:
        """Moves optimizer state to the device, unless it is offloaded."""
        if engine.options.offload is None:
            move_states(engine.optimizers, self.root_device)

    def _print_table(self, engine: Engine, **about: Any) -> None:
        """Prints `table_of` the engine."""
        rank_zero_info(table_of(engine, self.stage, **about))

    def _copies_that_fit(self, engine: Engine) -> int:
        """Returns how many whole copies of the model every rank of this machine can hold in host memory, 0 to 2.

        One is for the weights, the second for the gradients of the last step, which DDP leaves. With tensor
        parallelism, counts copies of this rank's part of the model on its device. Collective: one answer for all ranks.
        """
        available, copies = host_memory.available_host_bytes(), self.num_processes
        if engine.mesh.tensor.size > 1 and not is_host(self.root_device):
            available, copies = free_bytes(self.root_device), 1
        needed = copies * sum(
            local_of(parameter).numel() * parameter.dtype.itemsize for parameter in engine.module.parameters()
        )
        whole = not engine.partition.parameter
        copies_that_fit = 2 if available is None or 2 * needed < available else int(whole or needed < available)
        fits = torch.tensor(copies_that_fit, device=HOST)
        engine.runner.meet_before_collective()
        return int(engine.mesh.world.all_reduce(fits, "fits in host memory", "min"))

    # -- checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Lightning's plugin that writes and reads single files."""
        return super().checkpoint_io  # type: ignore[misc]

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._format.take_plugin(io)
        super(ShardedStrategy, type(self)).checkpoint_io.fset(self, io)  # type: ignore[misc]

    @property
    def _checkpoints(self) -> CheckpointKeeper:
        """Checkpoints of this run."""
        if self._keeper is None:
            comm, in_background = self._ensure_comm(), self.checkpoint is not None and self.checkpoint.async_save
            may_end = self._may_end
            self._keeper = CheckpointKeeper(comm, in_background=in_background, may_end=may_end, warn=rank_zero_warn)
        return self._keeper

    def saves_single_file(self) -> bool:
        """Whether checkpoints are single files, and not folders of shards. Where the user has left that open, the first
        call chooses, for as long as the run lasts: make it on every rank."""
        if self.checkpoint is None:
            nbytes = self._bytes_to_save()  # the same everywhere; rank 0's counts, as ranks must not go different ways
            chosen = self._checkpoints.saver.together("choose a format", lambda: {"nbytes": nbytes})
            rank_zero_info(self._format.choose(int(chosen["nbytes"])))
        assert self.checkpoint is not None
        return self.checkpoint.format == "full"

    def _bytes_to_save(self) -> int:
        """Returns the bytes of the states of all models and optimizers."""
        raise NotImplementedError

    def finish_saves(self) -> None:
        """Waits for saves in the background. Call it on every rank: all of them raise what failed on one."""
        if self._keeper is None:
            return
        saver = self._keeper.saver
        if saver.has_agreed:
            self._meet_before_collective()  # single ranks may have read parameters in hooks
            saver.together("finish what is being saved", saver.wait)
        else:  # nothing was saved: this rank has at most removed checkpoints
            saver.wait()

    def _save_single_file(self, tree: dict[str, Any], path: Any, storage_options: Any, whole: Collection[str]) -> None:
        """Writes a single file on rank 0. Call it on every rank: in entries that are not `whole` already users may have
        modules whose parameters rest as shards, and all ranks must gather those.

        Raises:
            TypeError: for `storage_options`, without a plugin that would take them.
            CheckpointError: the same on every rank, when rank 0 cannot write.
        """
        io, saver = self.checkpoint_io, self._checkpoints.saver
        if storage_options is not None and not is_plugin(io):  # Lightning's writer says so on rank 0 alone
            raise TypeError("storage_options go to a CheckpointIO plugin, and there is none: plugins=[...].")

        def look() -> None:
            if self.is_global_zero and not is_plugin(io):
                refuse_place(path, replaces_shards=not self._format.is_written)

        def write() -> None:
            if self.is_global_zero and is_plugin(io):
                io.save_checkpoint(tree, path, storage_options=storage_options)
            elif self.is_global_zero:
                save = partial(io.save_checkpoint, tree, storage_options=storage_options)
                write_at_once(Folder(path), save)
            else:
                pickle_on_all_ranks({key: value for key, value in tree.items() if key not in whole}, None)

        # Two steps: if rank 0 found out only in `write` that it must not write, others would wait for it in a gather.
        saver.together("look at the place", look)
        saver.together("write a single file", write)

    def _read_checkpoint(self, path: str, lazy: Collection[str], weights_only: bool | None) -> Any:
        """Returns what was saved to `path`, with lazy tensors in the entries `lazy` of a folder of shards. Call it on
        every rank. Raises as `CheckpointKeeper.open` and `read_single_file`."""
        io, self._format.goes_on_from_shards = self.checkpoint_io, False
        if is_read_by_plugin(io, path):
            return io.load_checkpoint(path, weights_only=weights_only)
        sharded = self._checkpoints.open(path, lazy=lazy, objects=reads_objects(weights_only))
        self._format.goes_on_from_shards = sharded is not None
        return read_single_file(io, path, weights_only) if sharded is None else sharded

    def _model_to_save(self, engine: Engine, key: str | None = None) -> dict[str, Any]:
        """Returns the state of the engine's module as the chosen format has it: whole, or as lazy entries.

        Call it on every rank. `key` is the entry of the checkpoint, where one holds several models.
        """
        engine.loans.end_all()
        engine.runner.course.drop()
        if self.saves_single_file():
            return engine.states.full_model()
        return engine.states.spread_model(key=key)

    def _optimizer_to_save(self, engine: Engine, optimizer: Optimizer, key: str | None = None) -> dict[str, Any]:
        """Returns the state of an optimizer, as `_model_to_save` does that of a module."""
        if self.saves_single_file():
            return engine.states.full_optimizer(optimizer)
        return engine.states.spread_optimizer(optimizer, key)

    # -- names

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the names that ``strategy=`` understands, each also with "ddp_" before it, for programs that look
        for "ddp" in it. DDP's own method, which this replaces, would register "ddp" again."""
        kinds: list[tuple[str, str, dict[str, Any]]] = [
            ("", "", {}),
            ("_full", ", checkpoints in one file", {"checkpoint": "full"}),
            ("_offload", ", optimizer state in host memory", {"offload": Offload(optimizer="cpu")}),
        ]
        for prefix, stage, (suffix, told, others) in itertools.product(("", "ddp_"), (1, 2, 3), kinds):
            name, description = f"{prefix}zero_stage_{stage}{suffix}", f"ZeRO stage {stage}{told}"
            strategy_registry.register(name, cls, description, override=True, stage=stage, **others)
        for prefix in ("", "ddp_"):
            told = "ZeRO, the stage chosen when a fit begins"
            strategy_registry.register(f"{prefix}zero_auto", cls, told, override=True, stage="auto")
