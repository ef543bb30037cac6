"""`Engine`: the stages for one module and its optimizers. Knows nothing of Lightning.

engine = Engine(module, [optimizer], stage=2, comm=comm, options=Options())
loss(module(batch)).backward()      # gradients are reduced when backward ends
optimizer.step()                    # steps this rank's pieces, and publishes
engine.close()                      # the module is whole again
"""

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
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
from lightning_zero.group import Kind, ShardGroup
from lightning_zero.lazy import LazyTensor, Stored
from lightning_zero.ledger import Category, Ledger
from lightning_zero.mesh import Mesh
from lightning_zero.optimizer import PieceStepper
from lightning_zero.parameter import Access
from lightning_zero.rendezvous import Rendezvous
from lightning_zero.saved import SavedParameters
from lightning_zero.schedule import Schedule
from lightning_zero.spread import SpreadParameter
from lightning_zero.stage import STAGES, Partition
from lightning_zero.units import as_written

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
        self._borrowed: dict[Access, None] = {}
        self._taken_back: dict[Access, bool] = {}  # since ranks last agreed on edits: whether it was edited here
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
            borrowed=self._borrowed,
        )
        self._accesses = [access for resident in assembly.residents for access in resident.accesses]
        self._shards = assembly.shards
        if self.partition.parameter:
            self._edits_number = self.rendezvous.enroll("edits", self._share_edits)
        self._move_the_rest()
        self._homes = {
            parameter: (shard, index)
            for shard in self._shards
            for index, parameter in enumerate(shard.group.parameters)
        }
        self.schedule = Schedule(
            assembly.residents if self.partition.parameter else [],
            assembly.cast_modules,
            assembly.shards,
            assembly.pools,
            entrances=assembly.entrances if self.partition.parameter else [],
            comm=comm,
            rendezvous=self.rendezvous,
            saved=SavedParameters(assembly.storages),
            settle=self._settle_within_pass,
            overlap=self.options.overlap,
        )
        self._steppers = {
            optimizer: PieceStepper(
                optimizer, self._homes, before=self._before_step, after=self._publish, ledger=self.ledger
            )
            for optimizer in optimizers
        }
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
        before, self.schedule.reduces = self.schedule.reduces, False
        try:
            yield
        finally:
            self.schedule.reduces = before

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
        self.settle()  # which meets: who draws a sample meanwhile must not mix what was and what will be
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

    def settle(self) -> None:
        """Takes back values that were lent to user code, with its edits. A collective, where there were loans."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for access in self._accesses:
                if not access.is_needed:  # the others' parameters can be reached only through a loan
                    access.group.adopt_assigned()
        self.take_back()
        self.rendezvous.meet()  # and hear of loans on other ranks
        if not self.partition.optimizer or not (self._taken_back or self.rendezvous.went_apart):
            return
        self.rendezvous.went_apart = False
        self._share_edits(settles=True)

    def _settle_within_pass(self) -> None:
        """As `settle`; what rests as shards waits for the next boundary where ranks go apart."""
        self.take_back()
        if self.partition.parameter and not self.rendezvous.went_apart:
            self.rendezvous.want(self._edits_number)

    def _share_edits(self, settles: bool) -> None:
        """Publishes what was edited on any rank, unless one of them does not settle now."""
        edits = [self._taken_back.get(access, False) for access in self._accesses]
        flags = torch.tensor([not settles, *edits], dtype=torch.uint8)
        must_wait, *anywhere = self.comm.all_reduce(flags, "edited parameters", "max").tolist()
        if must_wait:
            return
        self._taken_back.clear()
        groups = [access.group for access, is_edited in zip(self._accesses, anywhere, strict=True) if is_edited]
        for group in groups:
            group.release()  # what was gathered ahead of the edit is stale
            group.leave_to_graphs()
        self._publish_groups(groups)

    def take_back(self) -> None:
        """Ends all loans of this rank; other ranks hear of edits when they next `settle`."""
        borrowed = list(self._borrowed)
        self._borrowed.clear()
        with torch.no_grad():
            for access in borrowed:
                self._taken_back[access] = access.take_back() or self._taken_back.get(access, False)

    def _publish(self, shards: list[GradientShard]) -> None:
        self._publish_groups([shard.group for shard in shards])

    def _publish_groups(self, groups: Iterable[ShardGroup]) -> None:
        with torch.no_grad(), self.rendezvous.undisturbed():
            for work in [work for group in groups for work in group.begin_publish()]:
                work.wait()

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
        self.settle()
        for access in lent:
            access.lend(0)
        try:
            yield
        finally:
            if not write:
                for access in lent:
                    access.give_up()
            self.settle()

    def full_state_dict(self, *, copy: bool) -> dict[str, Any]:
        """`module.state_dict()` with whole values in their declared dtypes. A collective.

        Args:
            copy: give every entry storage of its own; a view would drag its whole group into a file.
        """
        state = self.module.state_dict(keep_vars=True)
        grouped = {id(parameter) for access in self._accesses for parameter in access.group.parameters}
        names: dict[int, list[str]] = {}  # a tied parameter has several
        for name, value in state.items():
            names.setdefault(id(value), []).append(name)
            if isinstance(value, Tensor) and id(value) not in grouped:
                state[name] = value.detach().clone() if copy else value.detach()
        for access in self._accesses:
            if any(id(parameter) in names for parameter in access.group.parameters):
                for parameter, whole in zip(access.group.parameters, access.group.whole_values(copy=copy), strict=True):
                    state.update(dict.fromkeys(names.get(id(parameter), ()), whole))
        return {as_written(name): value for name, value in state.items()}

    def spread_state_dict(self) -> dict[str, Any]:
        """`module.state_dict()` to be written by all ranks together: a `LazyTensor` for every parameter of a group."""
        lazy = {
            id(parameter): LazyTensor(SpreadParameter(access.group, index))
            for access in self._accesses
            for index, parameter in enumerate(access.group.parameters)
        }
        state = self.module.state_dict(keep_vars=True)
        for name, value in state.items():
            if id(value) in lazy:
                state[name] = lazy[id(value)]
            elif isinstance(value, Tensor):
                state[name] = value.detach()
        return {as_written(name): value for name, value in state.items()}

    def load(
        self, stored: Mapping[Parameter, Stored], verify: Callable[[], None], *, read: Container[Parameter] = ()
    ) -> None:
        """Parameters take the values of a checkpoint; each rank reads what it owns. A collective.

        Args:
            stored: where the values of the module's parameters are.
            verify: checks this rank's share of what is not read.
            read: those of `stored` whose values were read, and perhaps edited, before there was an engine. They stay as
                they are, if they were read on rank 0, which all ranks start from.

        Raises:
            RuntimeError: on every rank the same, when reading fails on one.
        """
        own = set(self.module.parameters())  # what users have put in the place of others is not in the checkpoint
        is_read = torch.tensor([p in read or p not in own for p in stored], dtype=torch.uint8)
        self.mesh.world.broadcast(is_read, "read before")
        stored = {parameter: stored[parameter] for parameter, was in zip(stored, is_read, strict=True) if not was}
        grouped = {parameter for group in self._groups for parameter in group.parameters}
        rest = [parameter for parameter in stored if parameter not in grouped]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), self._failing_together("reading the model"):
            for group in self._groups:
                group.load({at: stored[p] for at, p in enumerate(group.parameters) if p in stored})
            for parameter in rest if self.mesh.world.rank == 0 else []:
                parameter.copy_(stored[parameter].whole())
            verify()
        with torch.no_grad():
            for group in self._groups:
                group.release()
                group.publish_loaded()
            for number, parameter in enumerate(rest):  # every rank holds all of them
                values = parameter.detach().contiguous()
                self.mesh.world.broadcast(values, f"loaded {number}")
                parameter.copy_(values)

    @contextmanager
    def _failing_together(self, doing: str) -> Iterator[None]:
        """What fails on one rank inside fails on all; nothing inside may wait for other ranks."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        told = self.mesh.world.all_gather_object(None if failed is None else str(failed), doing)
        for rank, reason in enumerate(told):
            if reason is not None:
                raise RuntimeError(f"rank {rank}, {doing}: {reason}") from failed

    @property
    def _groups(self) -> list[ShardGroup]:
        return [access.group for access in self._accesses]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """`optimizer.state_dict()` as one device would have it. A collective. Works after `close` too."""
        with self.rendezvous.ended():
            return self._steppers[optimizer].full_state_dict(self.comm)

    def spread_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The same, to be written by all ranks together; see `PieceStepper.spread_state_dict`."""
        name = f"optimizer {list(self._steppers).index(optimizer)}"
        with self.rendezvous.ended():
            return self._steppers[optimizer].spread_state_dict(name, self.comm)

    @property
    def optimizer_parameters(self) -> list[list[str]]:
        """Of each optimizer, the names of its parameters in order."""
        return [stepper.parameter_names for stepper in self._steppers.values()]

    def load_optimizer_states(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Optimizers take the states of any strategy's checkpoint, in order. A collective.

        Raises:
            ValueError: when an optimizer has other groups of parameters.
            RuntimeError: on every rank the same, when reading fails on one.
        """
        steppers = list(self._steppers.values())
        for stepper, state in zip(steppers, state_dicts, strict=True):
            stepper.refuse_other_groups(state)
        with self._failing_together("reading the optimizers"):
            cut = [stepper.cut_state_dict(state) for stepper, state in zip(steppers, state_dicts, strict=True)]
        for stepper, state in zip(steppers, cut, strict=True):
            stepper.load_cut_state_dict(state)

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
        if not whole:
            for access in self._accesses:
                access.is_lost = True
            return
        self.settle()  # which meets: nobody must ask for what is let go of below
        self.rendezvous.forget()
        for shard in self._shards:  # first, so that whole parameters take their place and not more
            shard.free()
        for access in self._accesses:
            access.restore()
        self.rendezvous.meet()
