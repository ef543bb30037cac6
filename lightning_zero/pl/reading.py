"""What users read of a strategy that has engines: whole parameters, gradients and state; bytes at rest and sent."""

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero.pl.table import MemoryReport
from lightning_zero.run.engine import Engine


class Readings:
    """The strategy of a Trainer, which has one engine, and that of Fabric, which has one for each module."""

    def _engine_of(self, what: Module | Parameter | None) -> Engine:
        """The one that `what` is in; None: the only one."""
        raise NotImplementedError

    @property
    def _engines(self) -> list[Engine]:
        raise NotImplementedError

    @property
    def _stepped_in(self) -> Mapping[Optimizer, Engine]:
        """Optimizers that may be asked for their state, and the engine of each."""
        raise NotImplementedError

    def full_parameters(self, module: Module | None = None, write: bool = False) -> AbstractContextManager[None]:
        """All parameters of `module` (default: the whole model) hold their values inside. Enter it on every rank.

        Edits in place persist without it where torch can see them. It cannot where they go through `.numpy()`, or
        through `.data` inside a module's own forward; outside of ``write=True`` such edits may be lost.

        Args:
            module: whose parameters.
            write: keep edits made inside; make the same ones on every rank.
        """
        return self._engine_of(module).full_parameters(module, write=write)

    def full_optimizer_state(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """`optimizer.state_dict()` as one device would have it, on the host of every rank; in training and after fit.

        The optimizer's own `state`, and its `state_dict()`, have what this rank steps: of each parameter a flat piece,
        and of some nothing (``optimizer.state[p]`` is empty then). Call it on every rank.

        Args:
            optimizer: one of those of the latest fit; None where there is only one.

        Raises:
            RuntimeError: before the first fit.
            ValueError: when None could be any of several, or the optimizer is of no fit.
        """
        stepped = self._stepped_in
        wanted = getattr(optimizer, "optimizer", optimizer)  # Lightning wraps them
        found = [one for one in stepped if optimizer is None or one is wanted]
        if len(found) != 1:
            kinds = ", ".join(type(one).__name__ for one in stepped)
            raise ValueError(f"full_optimizer_state(optimizer={optimizer!r}) is to be one of this fit's: {kinds}.")
        return stepped[found[0]].states.full_optimizer(found[0])

    def full_grad(self, parameter: Parameter) -> Tensor | None:
        """The averaged gradient of a parameter in its shape, or None; of a DTensor the whole. Call it on every rank."""
        return self._engine_of(parameter).averages.full(parameter)

    def grad_norms(self, norm_type: float = 2.0, module: Module | None = None) -> dict[str, Tensor]:
        """Parameter name -> norm of its averaged gradient, for those that have one; one small reduction for all.
        Call it on every rank.

        Args:
            norm_type: p of the p-norm; ``inf`` for the largest magnitude.
            module: with Fabric, which of the modules that were set up; None where there is only one.
        """
        return self._engine_of(module).averages.norms(norm_type)

    def memory_report(self) -> MemoryReport:
        """Bytes at rest on this rank's device, by category (parameter, gradient, master, optimizer state, average,
        bucket, gathered, activation checkpoint), and what is offloaded as ``"optimizer state (host)"`` or
        ``"... (disk)"``: a dictionary that prints as a table. Of activation checkpoints the most that a step has kept.
        After fit: as they were when it ended."""
        report: Counter[str] = Counter()
        for engine in self._engines or [self._engine_of(None)]:  # which says that there is none yet
            report.update(engine.bytes_by_category())
        return MemoryReport(report)

    def communication_report(self) -> dict[str, int]:
        """Bytes this rank has sent, by operation, and by what they cross: ``replicate ...`` between shard groups."""
        sent: Counter[str] = Counter()
        for engine in self._engines:  # which share a world, and may have more communicators of their own
            shared = engine.mesh.world.bytes_sent if sent else {}
            for kind, nbytes in engine.mesh.bytes_sent.items():
                sent[kind] += nbytes - shared.get(kind, 0)
        return dict(sent)
