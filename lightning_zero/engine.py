"""`Engine`: the stages for one module and its optimizers. Knows nothing of Lightning.

engine = Engine(module, [optimizer], stage=2, comm=comm, options=Options())
loss(module(batch)).backward()      # gradients are reduced when backward ends
optimizer.step()                    # steps this rank's pieces, and publishes
engine.close()                      # the module is whole again
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_zero import norm, units
from lightning_zero.comm import Comm
from lightning_zero.gradient import Bucket, BucketPool, GradientShard
from lightning_zero.group import Kind, Setting, ShardGroup
from lightning_zero.ledger import Category, Ledger
from lightning_zero.optimizer import PieceStepper, set_grad_dtype
from lightning_zero.parameter import Access
from lightning_zero.schedule import Resident, Schedule
from lightning_zero.stage import STAGES, Partition

MIB = 2**20
HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How an engine works; none of it changes results, except the two dtypes.

    Args:
        unit_classes: see `units.find_units`.
        bucket_bytes: largest collective.
        prefetch: units gathered ahead at stage 3.
        overlap: let reductions run while backward goes on.
        accumulation: reduce every backward into the shard, or keep full gradients until the last one.
        param_dtype: in which floating-point parameters rest and compute; None leaves it to `autocast_dtype`.
        autocast_dtype: weights that autocast casts at each use rest in it already (decision of `*-mixed`).
        reduce_dtype: of gradients; None is fp32, or the parameter's dtype where that is wider.
    """

    unit_classes: tuple[type | str, ...] | None = None
    bucket_bytes: int = 25 * MIB
    prefetch: int = 1
    overlap: bool = True
    accumulation: Literal["sharded", "local"] = "sharded"
    param_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


@final
class Engine:
    """Partitions `module` over the ranks of `comm` as `stage` says.

    All ranks start from rank 0's parameters and buffers. Without optimizers only parameters are partitioned.

    Args:
        module: whose parameters; the Parameter objects stay the same from here to `close`.
        optimizers: over the module's parameters; stepped as ever.
        stage: 0, 1, 2 or 3.
        comm: the ranks.
        device: where the engine's tensors live; parameters move there group by group, so that a model larger than
            the device's memory can be set up at stage 3. Everything else of the module moves there at once.
        options: see `Options`.

    Raises:
        ValueError: for an optimizer over parameters that are not the module's, or a parameter without a shape yet.
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
        self.comm = comm
        self.options = options or Options()
        self.partition: Partition = STAGES[stage if comm.size > 1 else 0]
        self.ledger = Ledger()
        self._borrowed: dict[Access, None] = {}
        self._managed = _managed_parameters(module, optimizers)
        self._broadcast_states()
        trainable = {id(parameter) for parameter in self._managed if optimizers and _trains(parameter, optimizers)}
        self._residents = self._partition(trainable)
        self._move_the_rest()
        self._accesses = [access for resident in self._residents for access in resident.accesses]
        self._shards = self._make_gradients()
        self._homes = {
            parameter: (shard, index)
            for shard in self._shards
            for index, parameter in enumerate(shard.group.parameters)
        }
        self.schedule = Schedule(
            self._residents if self.partition.parameter else [],
            self._cast_modules,
            self._shards,
            self._make_pools(),
            comm=comm,
            prefetch=self.options.prefetch,
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
        if self.comm.size == 1:
            return
        for name, tensor in itertools.chain(self.module.named_parameters(), self.module.named_buffers()):
            if type(tensor) in (Tensor, Parameter):
                values = tensor.detach().contiguous()
                self.comm.broadcast(values, f"initial {name}")
                with torch.no_grad():
                    tensor.copy_(values)

    def _move_the_rest(self) -> None:
        """Buffers, metrics and parameters that no group holds."""
        grouped = {
            id(p) for resident in self._residents for access in resident.accesses for p in access.group.parameters
        }
        self.module._apply(lambda tensor: tensor if id(tensor) in grouped else tensor.to(self.device))

    def _partition(self, trainable: set[int]) -> list[Resident]:
        """Makes all groups; at stages 0-2 of at most one bucket and only of what trains."""
        options, managed = self.options, {id(parameter) for parameter in self._managed}
        total = sum(parameter.nbytes for parameter in self._managed)
        # Small models get small buckets: a bucket is memory that grows with nothing, and must not outgrow the model.
        bucket_bytes = min(options.bucket_bytes, max(MIB, total // 16))
        setting = Setting(self.partition, self.comm, self.ledger, bucket_bytes)
        self._cast_modules, resting = self._choose_resting(trainable)
        by_unit = self.partition.parameter
        found = units.find_units(self.module, options.unit_classes) if by_unit else units.whole_model(self.module)
        residents = []
        for unit in found:
            accesses = []
            for kind, parameters in units.split_by_kind(unit, trainable, resting, self.device).items():
                mine = {name: parameter for name, parameter in parameters.items() if id(parameter) in managed}
                if not mine or not (by_unit or kind.trainable or kind.is_cast):
                    continue
                numel = bucket_bytes // kind.declared.itemsize
                for number, run in enumerate([mine] if by_unit else units.fill_buckets(mine, numel)):
                    name = f"{unit.name or 'model'}/{_describe(kind)}/{number}"
                    group = ShardGroup(name, run, kind, setting)
                    accesses.append(Access(group, self._borrowed, as_declared=options.param_dtype is None))
                    accesses[-1].group.release()
            if accesses:
                residents.append(Resident(unit.name, unit.module, accesses))
        return residents

    def _choose_resting(self, trainable: set[int]) -> tuple[list[Module], dict[int, torch.dtype]]:
        """Which parameters rest in another dtype than they were declared in, and the modules that may see them so."""
        options = self.options
        if options.param_dtype is not None:
            chosen = {id(p): options.param_dtype for p in self._managed if p.is_floating_point()}
            return [], chosen
        if options.autocast_dtype is None:
            return [], {}
        modules = [
            module
            for module in units.modules_cast_by_autocast(self.module)
            if all(id(parameter) in trainable for parameter in module.parameters(recurse=False))
        ]
        return modules, {id(p): options.autocast_dtype for m in modules for p in m.parameters(recurse=False)}

    def _make_gradients(self) -> list[GradientShard]:
        shards = []
        for access in self._accesses:
            if access.group.kind.trainable:
                declared = access.group.kind.declared
                dtype = self.options.reduce_dtype or torch.promote_types(declared, torch.float32)
                shards.append(GradientShard(access.group, dtype))
                for parameter in access.group.parameters:
                    set_grad_dtype(parameter, dtype)
        return shards if not self.partition.parameter else shards[::-1]

    def _make_pools(self) -> list[BucketPool]:
        """A pool for each dtype and device of gradients: two buckets, so that one fills while the other travels."""
        if self.comm.size == 1:
            return []
        pools = []
        key: Callable[[GradientShard], Any] = lambda shard: (str(shard.dtype), str(shard.group.kind.device))  # noqa: E731
        for _, found in itertools.groupby(sorted(self._shards, key=key), key):
            shards = list(found)
            numel = max(shard.group.layout.largest_slice_numel for shard in shards)
            device, dtype = shards[0].group.kind.device, shards[0].dtype
            count = 2 if self.options.overlap else 1
            pool = BucketPool([Bucket(numel, self.comm.size, dtype, device, self.ledger) for _ in range(count)])
            pools.append(pool)
            for shard in shards:
                shard.pool = pool
        return pools

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
        self.settle()
        self.schedule.release_all()

    def settle(self) -> None:
        """Takes back values that were lent to user code, with its edits."""
        if not self._borrowed:
            return
        borrowed = list(self._borrowed)
        self._borrowed.clear()
        with torch.no_grad():
            edited = torch.tensor([access.take_back() for access in borrowed], dtype=torch.uint8)
        edited = self.comm.all_reduce(edited, "edited parameters", "max")
        self._publish_groups([access.group for access, is_edited in zip(borrowed, edited, strict=True) if is_edited])

    def _publish(self, shards: list[GradientShard]) -> None:
        self._publish_groups([shard.group for shard in shards])

    def _publish_groups(self, groups: Iterable[ShardGroup]) -> None:
        with torch.no_grad():
            for work in [work for group in groups for work in group.begin_publish()]:
                work.wait()

    def broadcast_buffers(self) -> None:
        """Every rank takes rank 0's buffers, as DDP before a training forward."""
        if self.comm.size == 1:
            return
        for name, buffer in self.module.named_buffers():
            values = buffer.detach().contiguous()
            self.comm.broadcast(values, f"buffer {name}")
            if values.data_ptr() != buffer.data_ptr():
                buffer.detach().copy_(values)

    # -- gradients

    def gradients(self, parameters: Iterable[Parameter] | Optimizer) -> list[norm.Owned]:
        """The parameters that have a gradient, each once, as (shard, index)."""
        if isinstance(parameters, Optimizer):
            parameters = [parameter for group in parameters.param_groups for parameter in group["params"]]
        with_grad = [parameter for parameter in dict.fromkeys(parameters) if parameter.grad is not None]
        return [self._homes[parameter] for parameter in with_grad]

    def clip_by_norm_(self, parameters: Iterable[Parameter] | Optimizer, max_norm: float) -> norm.GradNorm:
        return norm.clip_by_norm_(self.gradients(parameters), self.comm, max_norm)

    def clip_by_value_(self, parameters: Iterable[Parameter] | Optimizer, clip_value: float) -> None:
        norm.clip_by_value_(self.gradients(parameters), clip_value)

    def full_grad(self, parameter: Parameter) -> Tensor | None:
        """The averaged gradient of one parameter, in its shape; None where it has none. A collective."""
        if parameter.grad is None or parameter not in self._homes:
            return parameter.grad
        shard, index = self._homes[parameter]
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
        homes = {
            id(parameter): (access.group, index)
            for access in self._accesses
            for index, parameter in enumerate(access.group.parameters)
        }
        needed = dict.fromkeys(homes[id(value)][0] for value in state.values() if id(value) in homes)
        full = {group: group.full_master() for group in needed}
        for name, value in state.items():
            if id(value) in homes:
                group, index = homes[id(value)]
                state[name] = group.view_of(full[group], index).clone() if copy else group.view_of(full[group], index)
            elif isinstance(value, Tensor):
                state[name] = value.detach()
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """`optimizer.state_dict()` as one device would have it. A collective. Works after `close` too."""
        return self._steppers[optimizer].full_state_dict(self.comm)

    def load_optimizer_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._steppers[optimizer].load_full_state_dict(state_dict)

    @property
    def is_spread(self) -> bool:
        """Whether some parameter rests as something else than its whole, declared values."""
        return any(access.is_needed for access in self._accesses)

    # -- reports

    def bytes_by_category(self) -> dict[str, int]:
        """Bytes that rest on this rank, by `Category`; after `close`, as they were before."""
        if self.closed:
            return self._bytes_at_close
        live = {str(category): numel for category, numel in self.ledger.live.items()}
        grouped = {id(parameter) for access in self._accesses for parameter in access.group.parameters}
        live[Category.PARAMETER] += sum(p.nbytes for p in self.module.parameters() if id(p) not in grouped)
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
        self.settle()
        for shard in self._shards:  # first, so that whole parameters take their place and not more
            shard.free()
        for access in self._accesses:
            access.restore()


def _describe(kind: Kind) -> str:
    words = [str(kind.resting).removeprefix("torch."), "" if kind.trainable else "frozen"]
    return " ".join(word for word in words if word)


def _trains(parameter: Parameter, optimizers: Sequence[Optimizer]) -> bool:
    """Trainable is what an optimizer has, or asks for gradients: freezing for a while never regroups."""
    return parameter.requires_grad or any(
        parameter is candidate
        for optimizer in optimizers
        for group in optimizer.param_groups
        for candidate in group["params"]
    )


def _managed_parameters(module: Module, optimizers: Sequence[Optimizer]) -> list[Parameter]:
    """The parameters that the engine takes over: torch's own kind, each once."""
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise ValueError(f"Parameter {name!r} has no shape yet (a lazy module). Run one forward before fit.")
    known = {id(parameter) for parameter in named.values()}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise ValueError(
                        f"Optimizer {number} ({type(optimizer).__name__}) has a parameter of shape "
                        f"{tuple(parameter.shape)} that is not the module's. Give it parameters of the LightningModule "
                        "(self.parameters()), and register what it should train as a submodule or nn.Parameter."
                    )
    return [parameter for parameter in named.values() if type(parameter) is Parameter]
