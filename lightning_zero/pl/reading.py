"""`ReadingStrategy`: what users read from a strategy: whole values, gradients, reports, the mesh of ranks."""

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import is_initialized
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero.pl.settings import Settings
from lightning_zero.pl.table import MemoryReport
from lightning_zero.run.engine import Engine
from lightning_zero.run.program import Program
from lightning_zero.wire.mesh import shape_of, torch_mesh


class ReadingStrategy:
    """The part of both strategies that users ask. A Trainer's strategy has one engine, Fabric's has one for each
    module."""

    root_device: torch.device  # of `DDPStrategy`, as the two properties
    _settings: Settings

    if TYPE_CHECKING:

        @property
        def world_size(self) -> int: ...

        @property
        def global_rank(self) -> int: ...

    def _engine_of(self, what: Module | Parameter | None) -> Engine:
        """Returns the engine of the model that `what` is part of; for None the only engine. Raises ValueError when it
        is part of none, or of several."""
        raise NotImplementedError

    @property
    def _engines(self) -> list[Engine]:
        """All engines that have been made."""
        raise NotImplementedError

    def _stepped_in(self) -> Mapping[Optimizer, Engine]:
        """Returns the optimizers that may be asked for their state, each with its engine. Under Fabric these are made
        where they are not there yet: collective then."""
        raise NotImplementedError

    # -- what users read

    def full_parameters(self, module: Module | None = None, write: bool = False) -> AbstractContextManager[None]:
        """All parameters of `module` (default: the whole model) hold their values inside. Enter it on every rank.

        In-place edits persist without it where torch can see them. It cannot see edits through `.numpy()`; outside of
        ``write=True`` such edits may be lost.

        Args:
            module: whose parameters.
            write: keep edits made inside; make the same ones on every rank.
        """
        return self._engine_of(module).full_parameters(module, write=write)

    def full_optimizer_state(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """`optimizer.state_dict()` as one device would have it, on the host of every rank; in training and after fit.

        The optimizer's own `state` and `state_dict()` hold what this rank steps: a flat piece of each parameter, which
        is empty where other ranks have all of it. Call it on every rank.

        Args:
            optimizer: one of those of the latest fit; None where there is only one.

        Raises:
            RuntimeError: before the first fit.
            ValueError: when None could be any of several, or the optimizer is of no fit.
        """
        stepped = self._stepped_in()
        # Lightning wraps them, and some wrap another one themselves.
        wanted = (optimizer, getattr(optimizer, "optimizer", optimizer))
        found = [one for one in stepped if optimizer is None or any(one is other for other in wanted)]
        if len(found) != 1:
            kinds = ", ".join(type(one).__name__ for one in stepped)
            raise ValueError(f"full_optimizer_state(optimizer={optimizer!r}) is to be one of this fit's: {kinds}.")
        return stepped[found[0]].states.full_optimizer(found[0])

    def full_grad(self, parameter: Parameter) -> Tensor | None:
        """The averaged gradient of a parameter in its shape (whole for a DTensor), or None. Call it on every rank."""
        return self._engine_of(parameter).gradients.full(parameter)

    def grad_norms(self, norm_type: float = 2.0, module: Module | None = None) -> dict[str, Tensor]:
        """Parameter name -> norm of its averaged gradient, for those that have one; one small reduction for all.
        Call it on every rank.

        Args:
            norm_type: p of the p-norm; ``inf`` for the largest magnitude.
            module: with Fabric, which of the modules that were set up; None where there is only one.
        """
        return self._engine_of(module).gradients.norms(norm_type)

    def memory_report(self) -> MemoryReport:
        """Bytes at rest on this rank's device by category, in a dictionary that prints as a table.

        The categories are parameter, gradient, master, optimizer state, average, bucket, gathered and activation
        checkpoint. Offloaded bytes are in ``"optimizer state (host)"``, ``"... (disk)"`` and so on. Activation
        checkpoints count as the most that a step has kept. After fit the report is that of its end.
        """
        report: Counter[str] = Counter()
        for engine in self._engines or [self._engine_of(None)]:  # without an engine, raises and says so
            report.update(engine.bytes_by_category())
        return MemoryReport(report)

    def communication_report(self) -> dict[str, int]:
        """Bytes this rank has sent, by operation, and by what they cross: ``replicate ...`` between shard groups."""
        sent: Counter[str] = Counter()
        for engine in self._engines:  # they share a world, and may each have more communicators
            shared = engine.mesh.world.bytes_sent if sent else {}
            for kind, nbytes in engine.mesh.bytes_sent.items():
                sent[kind] += nbytes - shared.get(kind, 0)
        return dict(sent)

    def program(self, module: Module | None = None) -> Program:
        """Returns the last training step as data: what user code did, and what this package does at each such use.

        It prints as a line for each use. `Program.ops` are the same as records, `Program.messages` counts the small
        messages that ranks wait for, and `Program.bytes_sent` what a rank sends of parameters and gradients: 2 or 3
        times its parameters (ZeRO section 7.2). After fit it is that of the last step.

        Args:
            module: with Fabric, the module, if several are trained.

        Raises:
            RuntimeError: before a step has been taken.
        """
        engines = self._engines  # after fit, too
        engine = engines[0] if module is None and len(engines) == 1 else self._engine_of(module)
        return engine.program()

    # -- ranks

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The ranks as a torch mesh with the axes "replicate", "data_parallel" and "tensor_parallel", for
        ``parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)`` in `configure_model`, or before
        ``fabric.setup``. The first access makes process groups: make it on every rank.

        Raises:
            RuntimeError: before Lightning has connected the processes, which it does at the start of fit.
        """
        if not is_initialized():
            raise RuntimeError("There is no mesh yet: use it in configure_model, or later; with Fabric after launch().")
        options = self._settings.options
        shape = shape_of(self.world_size, options.replicate_size, options.tensor_parallel_size)
        return torch_mesh(self.root_device.type, shape)

    @property
    def _place_in_data(self) -> dict[str, int]:
        """Arguments of `DistributedSampler`: ranks that share tensor-parallel modules get the same batches."""
        sharing = self._settings.options.tensor_parallel_size
        return {"num_replicas": self.world_size // sharing, "rank": self.global_rank // sharing}
