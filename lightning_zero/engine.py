"""`Engine`: the stages for one module and its optimizers. Knows nothing of Lightning.

engine = Engine(module, [optimizer], stage=2, comm=comm, options=Options())
loss(module(batch)).backward()      # gradients are reduced when backward ends
optimizer.step()                    # steps this rank's pieces, and publishes
engine.close()                      # the module is whole again
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero import norm
from lightning_zero.assembly import (
    Options,
    assemble,
    foreign_parameters,
    managed_parameters,
    refuse_whole_tensor_optimizers,
    trainable_of,
)
from lightning_zero.comm import Comm
from lightning_zero.gradient import GradientShard
from lightning_zero.group import Kind, publish
from lightning_zero.ledger import Category, Ledger
from lightning_zero.loans import Loans
from lightning_zero.mesh import Mesh
from lightning_zero.optimizer import PieceStepper
from lightning_zero.reduction import Reductions
from lightning_zero.rendezvous import Rendezvous
from lightning_zero.saved import SavedParameters
from lightning_zero.schedule import Schedule
from lightning_zero.stage import STAGES, Partition
from lightning_zero.states import States

__all__ = ["Engine", "Options"]

HOST = torch.device("cpu")


@final
class Engine:
    """Partitions `module` over the ranks of `comm` as `stage` says.

    All ranks start from rank 0's parameters and buffers. Without optimizers only parameters are partitioned.

    Args:
        module: whose parameters; the Parameter objects stay the same from here to `close`.
        optimizers: over the module's parameters; stepped as ever.
        stage: 0, 1, 2 or 3.
        comm: all ranks.
        device: where the engine's tensors live; parameters move there group by group, so that a model larger than
            the device's memory can be set up at stage 3. Everything else of the module moves there at once.
        options: see `Options`.

    Raises:
        ValueError: for a `replicate_size` that does not divide the ranks, an optimizer over parameters that are not
            the module's, a parameter without a shape yet, or a trainable one of a kind that cannot be sharded.
    """

    def __init__(
        self,
        module: Module,
        optimizers: Sequence[Optimizer],
        *,
        stage: int,
        comm: Comm,
        device: torch.device = HOST,
        options: Options | None = None,
    ) -> None:
        self.module = module
        self.device = device
        self.closed = False
        self.options = options or Options()
        self.mesh = Mesh.of(comm, self.options.replicate_size)
        self.comm = self.mesh.shard  # who owns what; replicas have the same values, and decide alike
        shard_size = comm.size // self.options.replicate_size
        self.partition: Partition = STAGES[stage if shard_size > 1 else 0]
        self.ledger = Ledger()
        self.rendezvous = Rendezvous(self.mesh, self.options.prefetch)
        managed = managed_parameters(module, optimizers)
        self.foreign_parameters = foreign_parameters(module)
        self._known = {id(parameter): parameter for parameter in module.parameters()}  # kept alive: ids stay theirs
        if self.partition.optimizer:
            refuse_whole_tensor_optimizers(optimizers)
        self._broadcast_states()
        assembly = assemble(
            module,
            managed,
            trainable_of(managed, optimizers),
            partition=self.partition,
            mesh=self.mesh,
            ledger=self.ledger,
            device=device,
            options=self.options,
            rendezvous=self.rendezvous,
        )
        self._accesses = [access for resident in assembly.residents for access in resident.accesses]
        self._shards = assembly.shards
        self.loans = Loans(self._accesses, assembly.borrowed, self.partition, self.mesh, self.rendezvous)
        self._move_the_rest()
        self._homes = {
            parameter: (shard, index)
            for shard in self._shards
            for index, parameter in enumerate(shard.group.parameters)
        }
        self.reductions = Reductions(assembly.shards, assembly.pools, comm, overlap=self.options.overlap)
        self.schedule = Schedule(
            assembly.residents if self.partition.parameter else [],
            assembly.cast_modules,
            assembly.entrances if self.partition.parameter else [],
            reductions=self.reductions,
            rendezvous=self.rendezvous,
            saved=SavedParameters(assembly.storages),
            settle=self.loans.settle_within_pass,
        )
        self._steppers = {
            optimizer: PieceStepper(
                optimizer, self._homes, before=self._before_step, after=self._publish, ledger=self.ledger
            )
            for optimizer in optimizers
        }
        groups = [access.group for access in self._accesses]
        self.states = States(module, groups, self._steppers, self.mesh, self.rendezvous)
        for access in self._accesses:
            access.group.release()
            access.hide()

    # -- assembly

    def _broadcast_states(self) -> None:
        """Every rank takes rank 0's values, as under DDP: otherwise each would hold the shard of another model."""
        if self.mesh.world.size == 1:
            return
        for name, tensor in itertools.chain(self.module.named_parameters(), self.module.named_buffers()):
            if (isinstance(tensor, Parameter) and name not in self.foreign_parameters) or type(tensor) is Tensor:
                values = tensor.detach().contiguous()
                self.mesh.world.broadcast(values, f"initial {name}")
                with torch.no_grad():
                    tensor.copy_(values)

    def _move_the_rest(self) -> None:
        """Buffers, metrics and parameters that no group holds. Grouped parameters must not even be passed by: modules
        that look at their weights when they move (RNNs) would meet empty storage."""
        grouped = {parameter for access in self._accesses for parameter in access.group.parameters}
        with torch._C.DisableTorchFunctionSubclass():
            for module in self.module.modules():
                moves_by_itself = type(module)._apply is not Module._apply
                if moves_by_itself and grouped.isdisjoint(module.parameters()):
                    module._apply(lambda tensor: tensor.to(self.device))
                    continue
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(self.device)
                for parameter in module._parameters.values():
                    if parameter is not None and parameter not in grouped:
                        parameter.data = parameter.data.to(self.device)

    # -- training

    def backward(self) -> Any:
        """Context around a backward; without it the end of backward is found by a callback of autograd."""
        return self.schedule.backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate, on this rank; the first one after reduces what they left."""
        before, self.reductions.is_on = self.reductions.is_on, False
        try:
            yield
        finally:
            self.reductions.is_on = before

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around the backwards of all but the last micro-batch; communicates if gradients accumulate in shards."""
        if self.partition.gradient and self.options.accumulation == "sharded":
            yield
        else:
            with self.no_sync():
                yield

    def _before_step(self) -> None:
        """What is gathered when the master changes would be stale afterwards."""
        self._refuse_strangers()
        self.loans.settle()  # which meets: who draws a sample meanwhile must not mix what was and what will be
        self.schedule.release_all()

    def _refuse_strangers(self) -> None:
        """Raises for a parameter that trains only since set-up: nobody averages its gradient."""
        stepped = {parameter for stepper in self._steppers.values() for parameter in stepper.parameters}
        for name, parameter in self.module.named_parameters():
            if parameter.grad is None or parameter in self._homes:
                continue
            if id(parameter) not in self._known:
                raise RuntimeError(
                    f"Parameter {name!r} was not there at set-up, and has a gradient that is not averaged over ranks. "
                    "Make modules in __init__ or configure_model(), before fit."
                )
            if name in self.foreign_parameters:
                raise RuntimeError(
                    f"Parameter {name!r} is a {type(parameter).__name__}, a tensor of its own kind, and trains since "
                    "set-up: its gradient is not averaged over ranks. Keep it frozen."
                )
            if parameter in stepped:
                raise RuntimeError(
                    f"Parameter {name!r} was frozen, and was added after set-up to what an optimizer steps: its "
                    "gradient is not averaged over ranks. Give it to the optimizer in configure_optimizers() already, "
                    "frozen (requires_grad_(False)) until it is to train."
                )

    def _publish(self, shards: list[GradientShard]) -> None:
        with self.rendezvous.undisturbed():
            publish(shard.group for shard in shards)

    def broadcast_buffers(self) -> None:
        """Every rank takes rank 0's buffers, as DDP before a training forward."""
        if self.mesh.world.size == 1:
            return
        with self.rendezvous.ended():
            for name, buffer in self.module.named_buffers():
                values = buffer.detach().contiguous()
                self.mesh.world.broadcast(values, f"buffer {name}")
                if values.data_ptr() != buffer.data_ptr():
                    buffer.detach().copy_(values)

    # -- gradients

    def gradients(self, parameters: Iterable[Parameter] | Optimizer) -> list[norm.Owned]:
        """The parameters that have a gradient, each once, as (shard, index)."""
        if isinstance(parameters, Optimizer):
            parameters = [parameter for group in parameters.param_groups for parameter in group["params"]]
        with_grad = [parameter for parameter in dict.fromkeys(parameters) if parameter.grad is not None]
        homes = [self._homes[parameter] for parameter in with_grad]
        for shard, index in homes:
            shard.adopt(index)
        return homes

    def clip_by_norm_(self, parameters: Iterable[Parameter] | Optimizer, max_norm: float) -> norm.GradNorm:
        return norm.clip_by_norm_(self.gradients(parameters), self.comm, max_norm)

    def clip_by_value_(self, parameters: Iterable[Parameter] | Optimizer, clip_value: float) -> None:
        norm.clip_by_value_(self.gradients(parameters), clip_value)

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, Tensor]:
        """Parameter name -> norm of its averaged gradient (0-d, fp32), for those that have one. A collective."""
        named = {name: p for name, p in self.module.named_parameters() if p in self._homes and p.grad is not None}
        norms = norm.norm_of_each(self.gradients(named.values()), self.comm, norm_type)
        return dict(zip(named, norms.float().unbind(), strict=True))

    def full_grad(self, parameter: Parameter) -> Tensor | None:
        """The averaged gradient of one parameter, in its shape; None where it has none. A collective."""
        if parameter.grad is None or parameter not in self._homes:
            return parameter.grad
        shard, index = self._homes[parameter]
        shard.adopt(index)
        if shard.group.partition.optimizer:
            return shard.gather(index)
        return shard.group.view_of(shard.full_grad, index).clone()  # type: ignore[arg-type]

    # -- whole values

    @contextmanager
    def full_parameters(self, module: Module | None = None, *, write: bool = False) -> Iterator[None]:
        """All parameters of `module` (default: the whole model) hold their values inside. A collective.

        Args:
            module: whose.
            write: keep edits that are made inside; every rank must make the same.
        """
        wanted = {id(parameter) for parameter in (module or self.module).parameters()}
        lent = [
            access
            for access in self._accesses
            if access.is_needed and any(id(parameter) in wanted for parameter in access.group.parameters)
        ]
        self.loans.settle()
        for access in lent:
            access.lend(0)
        try:
            yield
        finally:
            if not write:
                for access in lent:
                    access.give_up()
            self.loans.settle()

    # -- reports

    def bytes_by_category(self) -> dict[str, int]:
        """Bytes that rest on this rank, by `Category`; after `close`, as they were before."""
        if self.closed:
            return self._bytes_at_close
        live = {str(category): numel for category, numel in self.ledger.live.items()}
        grouped = {id(parameter) for access in self._accesses for parameter in access.group.parameters}
        live[Category.PARAMETER] += sum(
            p.nbytes for p in self.module.parameters() if id(p) not in grouped and p.layout == torch.strided
        )
        return live

    def dtype_table(self) -> list[tuple[int, Kind, torch.dtype | None]]:
        """Elements, kind and gradient dtype of every sort of parameter in the engine."""
        grads = {shard.group: shard.dtype for shard in self._shards}
        rows: dict[tuple[Kind, torch.dtype | None], int] = {}
        for access in self._accesses:
            key = (access.group.kind, grads.get(access.group))
            rows[key] = rows.get(key, 0) + sum(span.numel for span in access.group.layout.spans)
        return [(numel, kind, dtype) for (kind, dtype), numel in rows.items()]

    # -- the end

    def close(self, *, whole: bool = True) -> None:
        """Leaves module and optimizers.

        Args:
            whole: the module gets its values back, in the declared dtypes (a collective). Without it (a rank failed,
                others may be gone) only the hooks go; parameters that rest as shards raise when they are read.
        """
        self._bytes_at_close = self.bytes_by_category()
        self.closed = True
        for stepper in self._steppers.values():
            stepper.detach(publish=whole)
        self.schedule.detach()
        self.reductions.let_go()
        if not whole:
            for access in self._accesses:
                access.is_lost = True
            return
        self.loans.settle()  # which meets: nobody must ask for what is let go of below
        self.rendezvous.forget()
        for shard in self._shards:  # first, so that whole parameters take their place and not more
            shard.free()
        for access in self._accesses:
            access.restore()
        self.rendezvous.meet()
