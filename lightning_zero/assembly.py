"""How a module's parameters become units, groups, gradient shards and buckets; the engine's set-up."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_zero import units
from lightning_zero.comm import Comm
from lightning_zero.gradient import Bucket, BucketPool, GradientShard
from lightning_zero.group import Kind, Setting, ShardGroup
from lightning_zero.ledger import Ledger
from lightning_zero.mesh import Mesh
from lightning_zero.optimizer import set_grad_dtype
from lightning_zero.parameter import Access, RestingParameter
from lightning_zero.rendezvous import Rendezvous
from lightning_zero.schedule import Resident
from lightning_zero.stage import Partition

MIB = 2**20


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
        replicate_size: groups of ranks that each hold all shards.
        reduce_dtype: of gradients; None is fp32, or the parameter's dtype where that is wider.
    """

    unit_classes: tuple[type | str, ...] | None = None
    bucket_bytes: int = 25 * MIB
    prefetch: int = 1
    overlap: bool = True
    accumulation: Literal["sharded", "local"] = "sharded"
    param_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    replicate_size: int = 1
    reduce_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Assembly:
    """What `assemble` makes of a module."""

    residents: list[Resident]  # units, with access to their groups
    entrances: list[tuple[Module, Resident]]  # see `Schedule`
    cast_modules: list[Module]  # whose weights rest in autocast's dtype, and enter forward so
    shards: list[GradientShard]  # of the trainable groups, in the order in which backward should reach them
    pools: list[BucketPool]  # the buckets that gradients travel in
    storages: dict[int, ShardGroup]  # see `Setting`
    borrowed: dict[Access, None]  # see `Access`


def assemble(
    module: Module,
    managed: Sequence[Parameter],
    trainable: set[int],
    *,
    partition: Partition,
    mesh: Mesh,
    ledger: Ledger,
    device: torch.device,
    options: Options,
    rendezvous: Rendezvous,
) -> Assembly:
    """Takes over the values of `managed` and points the module's parameters at them.

    Args:
        module: that the parameters belong to.
        managed: see `managed_parameters`.
        trainable: ids of those that receive gradients.
        partition: what rests as shards.
        mesh: the ranks.
        ledger: books all memory.
        device: where it lives.
        options: see `Options`.
        rendezvous: see `Rendezvous`.
    """
    total = sum(parameter.nbytes for parameter in managed)
    # Small models get small buckets: a bucket is memory that grows with nothing, and must not outgrow the model.
    bucket_bytes = min(options.bucket_bytes, max(MIB, total // 16))
    setting = Setting(partition, mesh, ledger, bucket_bytes, rendezvous)
    cast_modules, resting = _choose_resting(module, managed, trainable, options)
    residents = []
    borrowed: dict[Access, None] = {}
    traced = units.modules_in_compiled_regions(module, roots=False)
    by_id = {id(parameter) for parameter in managed}
    for unit in units.find_units(module, options.unit_classes) if partition.parameter else units.whole_model(module):
        mine = {name: parameter for name, parameter in unit.parameters.items() if id(parameter) in by_id}
        kinds = units.split_by_kind(mine, trainable, resting, device)
        as_declared = options.param_dtype is None
        accesses = [
            Access(group, borrowed, as_declared=as_declared) for group in _make_groups(unit.name, kinds, setting)
        ]
        if accesses:
            residents.append(Resident(unit.name, unit.module, accesses, is_traced=unit.module in traced))
    groups = [access.group for resident in residents for access in resident.accesses]
    shards = [_make_gradient(group, options.reduce_dtype) for group in groups if group.kind.trainable]
    if partition.parameter:
        shards.reverse()  # units stand in the order of forward; the groups of whole models are made last first
    pools = _make_pools(shards, mesh.shard, ledger, 2 if options.overlap else 1)
    by_module: dict[Any, Resident] = {resident.module: resident for resident in residents}
    entrances: list[tuple[Module, Resident]] = [
        (encoder, by_module[encoder.layers[0]])
        for encoder in module.modules()
        if isinstance(encoder, nn.TransformerEncoder) and encoder.layers[0] in by_module
    ]
    return Assembly(residents, entrances, cast_modules, shards, pools, setting.storages, borrowed)


def _choose_resting(
    module: Module, managed: Sequence[Parameter], trainable: set[int], options: Options
) -> tuple[list[Module], dict[int, torch.dtype]]:
    """The modules that may see their weights as they rest, and id -> dtype of parameters that rest in another one."""
    if options.param_dtype is not None:
        return [], {id(p): options.param_dtype for p in managed if p.is_floating_point()}
    if options.autocast_dtype is None:
        return [], {}
    modules = [
        candidate
        for candidate in units.modules_cast_by_autocast(module)
        if all(id(parameter) in trainable for parameter in candidate.parameters(recurse=False))
    ]
    return modules, {id(p): options.autocast_dtype for m in modules for p in m.parameters(recurse=False)}


def _make_groups(unit: str, kinds: Mapping[Kind, Mapping[str, Parameter]], setting: Setting) -> list[ShardGroup]:
    """One group of each kind where units are gathered; else groups of at most a bucket, of what trains (what does not
    rests in full, as the user left it)."""
    groups = []
    for kind, parameters in kinds.items():
        if not (setting.partition.parameter or kind.trainable or kind.is_cast):
            continue
        numel = setting.bucket_bytes // kind.declared.itemsize
        runs = [dict(parameters)] if setting.partition.parameter else units.fill_buckets(parameters, numel)
        for number, run in enumerate(runs):
            groups.append(ShardGroup(f"{unit or 'model'}/{_describe(kind)}/{number}", run, kind, setting))
            groups[-1].release()  # at once: at stage 3 no two units are whole at the same time, not even here
    return groups


def _describe(kind: Kind) -> str:
    words = [str(kind.resting).removeprefix("torch."), "" if kind.trainable else "frozen"]
    return " ".join(word for word in words if word)


def _make_gradient(group: ShardGroup, reduce_dtype: torch.dtype | None) -> GradientShard:
    dtype = reduce_dtype or torch.promote_types(group.kind.declared, torch.float32)
    for parameter in group.parameters:
        set_grad_dtype(parameter, dtype)
    return GradientShard(group, dtype)


def _make_pools(shards: list[GradientShard], comm: Comm, ledger: Ledger, buckets: int) -> list[BucketPool]:
    """A pool for each dtype of gradients; with two buckets one fills while the other travels. No more buckets than
    there are collectives: a small model makes one."""
    if comm.size == 1:
        return []
    pools = []
    by_dtype: Callable[[GradientShard], Any] = lambda shard: str(shard.dtype)  # noqa: E731
    for _, found in itertools.groupby(sorted(shards, key=by_dtype), by_dtype):
        alike = list(found)
        numel = max(shard.group.layout.largest_slice_numel for shard in alike)
        dtype, device = alike[0].dtype, alike[0].group.kind.device
        needed = min(buckets, sum(len(shard.group.layout.slices) for shard in alike))
        pools.append(BucketPool([Bucket(numel, comm.size, dtype, device, ledger) for _ in range(needed)]))
        for shard in alike:
            shard.pool = pools[-1]
    return pools


# Their step looks at whole tensors or at all of them (norms, factored moments, line search): pieces would be wrong.
WHOLE_TENSOR_OPTIMIZERS = {"Adafactor", "LAMB", "Lamb", "LARS", "Lars", "LBFGS", "Muon", "Shampoo", "SOAP"}


def refuse_whole_tensor_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raises ValueError for optimizers that cannot step pieces of parameters."""
    for optimizer in optimizers:
        if type(optimizer).__name__ in WHOLE_TENSOR_OPTIMIZERS:
            raise ValueError(
                f"{type(optimizer).__name__} looks at whole tensors, and each rank steps only pieces of them: the "
                "result would be wrong. Use stage=0, or an element-wise optimizer (AdamW, SGD, RMSprop, ...)."
            )


def trainable_of(managed: Sequence[Parameter], optimizers: Sequence[Optimizer]) -> set[int]:
    """Ids of what an optimizer has, or what asks for gradients: freezing for a while never regroups."""
    if not optimizers:
        return set()
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    can_train = [parameter for parameter in managed if parameter.is_floating_point() or parameter.is_complex()]
    return {id(parameter) for parameter in can_train if parameter.requires_grad or id(parameter) in stepped}


def managed_parameters(module: Module, optimizers: Sequence[Optimizer]) -> list[Parameter]:
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
    for name, parameter in named.items():
        if isinstance(parameter, RestingParameter):
            raise ValueError(
                f"Parameter {name!r} is in shards since an earlier run, which ended with an error; what other ranks "
                "had of it is lost. Make the model anew, and go on from a checkpoint: fit(model, ckpt_path=...)."
            )
        if not _is_plain(parameter) and parameter.requires_grad:
            raise ValueError(
                f"Parameter {name!r} is a {type(parameter).__name__}, a tensor of its own kind, and trains: it cannot "
                "be sharded. Freeze it (requires_grad_(False)), or make it a torch.nn.Parameter."
            )
    managed = {name: parameter for name, parameter in named.items() if _is_plain(parameter)}
    _refuse_shared_memory(managed)
    return list(managed.values())


def _refuse_shared_memory(named: Mapping[str, Parameter]) -> None:
    """Two parameters over the same memory would part in silence."""
    owners: dict[int, str] = {}
    for name, parameter in named.items():
        if parameter.device.type == "meta" or not parameter.numel():
            continue
        other = owners.setdefault(parameter.data_ptr(), name)
        if other != name and (parameter.requires_grad or named[other].requires_grad):
            raise ValueError(
                f"Parameters {other!r} and {name!r} are two that share their memory, and sharded they would part. Make "
                "them one (decoder.weight = encoder.weight), or give each its own values (.data.clone())."
            )


def foreign_parameters(module: Module) -> dict[str, Parameter]:
    """Quantised tensors and others of their own kind: every rank keeps them whole, as the user made them."""
    return {name: parameter for name, parameter in module.named_parameters() if not _is_plain(parameter)}


def _is_plain(parameter: Parameter) -> bool:
    """Whether it is an ordinary tensor, of torch's class or of one that only gives it a name."""
    kind = type(parameter)
    return (
        kind.__torch_function__ is Parameter.__torch_function__
        and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
        and parameter.layout == torch.strided
        and not parameter.is_quantized
    )
