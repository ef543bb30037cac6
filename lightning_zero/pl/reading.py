"""`Readings`: what users read of a strategy: whole parameters, gradients and state; bytes at rest and sent."""

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
    """Reading methods of a strategy. That of a Trainer has one engine, that of Fabric one for each module."""

    def _engine_of(self, what: Module | Parameter | None) -> Engine:
        """Returns the engine of the model that `what` is part of; for None the only engine."""
        raise NotImplementedError

    @property
    def _engines(self) -> list[Engine]:
        """All engines that have been made."""
        raise NotImplementedError

    @property
    def _stepped_in(self) -> Mapping[Optimizer, Engine]:
        """Optimizers that may be asked for their state, each with its engine."""
        raise NotImplementedError

    def full_parameters(self, module: Module | None = None, write: bool = False) -> AbstractContextManager[None]:
        """All parameters of `module` (default: the whole model) hold their values inside. Enter it on every rank.

        In-place edits persist without it where torch can see them. It cannot see edits through `.numpy()`, or through
        `.data` inside a module's own forward; outside of ``write=True`` such edits may be lost.

        Args:
            module: whose parameters.
            write: keep edits made inside; make the same ones on every rank.
        """
        return self._engine_of(module).full_parameters(module, write=write)

    def full_optimizer_state(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """`optimizer.state_dict()` as one device would have it, on the host of every rank; in training and after fit.

        The optimizer's own `state` and `state_dict()` hold what this rank steps: a flat piece of each parameter, and
        nothing of some (``optimizer.state[p]`` is empty then). Call it on every rank.

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
        """The averaged gradient of a parameter in its shape (whole for a DTensor), or None. Call it on every rank."""
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
