"""`ShardedStrategy`: what the strategies of Trainer and Fabric share: settings, communicator, engines, checkpoints."""

import itertools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import wraps
from typing import Any, final

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.plugins import MixedPrecision
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.checkpoint import CheckpointKeeper
from lightning_zero.config import Checkpoint, Offload
from lightning_zero.pl import ranks
from lightning_zero.pl.reading import Readings
from lightning_zero.pl.single_file import format_beside, write_single_file
from lightning_zero.pl.table import table_of, told_of_whole
from lightning_zero.run.construction import Construction, constructing
from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.local import local_of
from lightning_zero.shards.offload import Machine
from lightning_zero.stage import STAGES
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.native import make_comm

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def after_meeting(theirs: Callable[..., Any]) -> Any:
    """Returns a method that calls `theirs`, a collective of Lightning's, once all ranks have come to it.

    Ranks that still evaluate may need this one for a gather, in which it could not take part from inside of a
    collective of Lightning's.
    """

    @wraps(theirs)
    def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._prepare_collective(theirs.__name__)
        return theirs(self, *args, **kwargs)

    return ours


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checked arguments of `ZeroStrategy`, which the strategy of Fabric takes over."""

    options: Options
    max_skipped_steps: int
    wait_timeout: timedelta
    sanitize: bool
    may_choose_format: bool  # the user has not written `checkpoint`


class ShardedStrategy(Readings):
    """Base of both strategies, placed before Lightning's `DDPStrategy`."""

    root_device: torch.device  # this one and the next two are of `DDPStrategy`
    num_processes: int  # ranks on this machine
    is_global_zero: bool
    stage: int
    checkpoint: Checkpoint  # how to save
    _process_group_backend: str | None  # of `DDPStrategy`
    _settings: Settings
    _comm: Comm | None = None
    _keeper: CheckpointKeeper | None = None

    def setup_environment(self) -> None:
        """Connects the processes."""
        ranks.warn_of_shared_store()
        super().setup_environment()  # type: ignore[misc]

    def _ensure_comm(self) -> Comm:
        """Returns the communicator of all ranks. The first call makes it; make that one on every rank."""
        if self._comm is None:
            timeout, sanitize = self._settings.wait_timeout, self._settings.sanitize
            self._comm = make_comm(self.root_device, timeout, backend=self._process_group_backend, sanitize=sanitize)
        return self._comm

    def _meet_before_collective(self) -> None:
        """Serves the gathers of ranks that still evaluate, until all ranks have come here.

        Call it on every rank, before a collective that is not the engines' own.
        """
        for engine in self._engines:
            if not engine.closed:
                engine.rendezvous.meet_before_collective()

    def _prepare_collective(self, name: str) -> None:
        """Makes ranks meet before Lightning's collective `name`; see `after_meeting`."""
        self._meet_before_collective()

    # -- engines

    def _constructing(self) -> AbstractContextManager[Construction | None]:
        """Returns a context in which models are built in shards at stage 3. Collective; see `constructing`."""
        return constructing(stage=self.stage, comm=self._ensure_comm(), options=self._settings.options)

    def _new_engine(self, module: Module, optimizers: Sequence[Optimizer], precision: Any, builder: str) -> Engine:
        """Makes an engine. Collective: call it on every rank.

        Args:
            module: whose parameters are sharded.
            optimizers: over parameters of `module`; none for evaluation.
            precision: Lightning's plugin.
            builder: names, for messages, where the model would be built in shards.
        """
        comm, options = self._ensure_comm(), self._settings.options
        if STAGES[self.stage].parameter and comm.size > 1 and (told := told_of_whole(module, builder)):
            rank_zero_info(told)
        casts = isinstance(precision, MixedPrecision | FabricMixedPrecision) and options.param_dtype is None
        available, local_ranks = ranks.available_host_bytes(), self.num_processes
        options = replace(
            options,
            autocast_dtype=_AUTOCAST[precision.precision] if casts else None,
            param_dtype=None if options.param_dtype == torch.float32 else options.param_dtype,
            machine=Machine(host_bytes=None if available is None else available // local_ranks, ranks=local_ranks),
        )
        return Engine(module, optimizers, stage=self.stage, comm=comm, device=self.root_device, options=options)

    def _begin_training(self, engine: Engine, **about: Any) -> None:
        """Moves optimizer state to the device, unless it is offloaded, and prints `table_of` the engine."""
        if engine.options.offload is None:
            _optimizers_to_device(engine.optimizers, self.root_device)
        rank_zero_info(table_of(engine, self.stage, engine.optimizers, **about))

    def _copies_that_fit(self, engine: Engine) -> int:
        """Returns how many whole copies of the model every rank of this machine can hold in host memory, 0 to 2.

        One is for the weights, the second for the gradients of the last step, which DDP leaves. With tensor
        parallelism, counts copies of this rank's part of the model on its device. Collective: one answer for all ranks.
        """
        available, copies = ranks.available_host_bytes(), self.num_processes
        if engine.mesh.tensor.size > 1 and self.root_device.type == "cuda":
            available, copies = torch.cuda.mem_get_info(self.root_device)[0], 1
        needed = copies * sum(
            local_of(parameter).numel() * parameter.dtype.itemsize for parameter in engine.module.parameters()
        )
        whole = not engine.partition.parameter
        fits = torch.tensor(2 if available is None or 2 * needed < available else int(whole or needed < available))
        engine.rendezvous.meet_before_collective()
        return int(engine.mesh.world.all_reduce(fits, "fits in host memory", "min"))

    # -- checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Lightning's plugin that writes and reads single files."""
        return super().checkpoint_io  # type: ignore[misc]

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self.checkpoint = format_beside(io, self.checkpoint, may_choose=self._settings.may_choose_format)
        self._checkpoint_io = io

    @property
    def _checkpoints(self) -> CheckpointKeeper:
        """Checkpoints of this run."""
        if self._keeper is None:
            in_background = self.checkpoint.async_save
            self._keeper = CheckpointKeeper(self._ensure_comm(), in_background=in_background, warn=rank_zero_warn)
        return self._keeper

    def _save_single_file(self, tree: dict[str, Any], path: Any, storage_options: Any, whole: Collection[str]) -> None:
        """See `write_single_file`. Call it on every rank."""
        saver, io, is_writer = self._checkpoints.saver, self.checkpoint_io, self.is_global_zero
        write_single_file(saver, io, tree, path, storage_options, is_writer=is_writer, whole=whole)

    def _model_to_save(self, engine: Engine, key: str | None = None) -> dict[str, Any]:
        """Returns the state of the engine's module as the chosen format has it: whole, or as lazy entries.

        Call it on every rank. `key` is the entry of the checkpoint, where one holds several models.
        """
        engine.loans.settle()
        engine.rendezvous.expect_nothing()
        if self.checkpoint.format == "full":
            return engine.states.full_model(copy=self.is_global_zero)
        return engine.states.spread_model(key=key)

    def _optimizer_to_save(self, engine: Engine, optimizer: Optimizer, key: str | None = None) -> dict[str, Any]:
        """Returns the state of an optimizer, as `_model_to_save` does that of a module."""
        if self.checkpoint.format == "full":
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
