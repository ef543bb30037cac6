"""How a module's parameters become units, groups, gradient shards and buckets; the engine's set-up."""

import itertools
import warnings
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_zero.config import ActivationCheckpointing, Offload, at_least, is_switch, one_of
from lightning_zero.shards import units
from lightning_zero.shards.arena import Arena
from lightning_zero.shards.early import class_of, early_of, take_over
from lightning_zero.shards.gradient import Bucket, BucketPool, GradientShard
from lightning_zero.shards.group import Kind, Setting, ShardGroup, slot_of
from lightning_zero.shards.local import local_of, refuse_other_meshes
from lightning_zero.shards.offload import Machine, choose_offloaded
from lightning_zero.shards.probe import BLOCK, BY_ALL, BY_BLOCK, BY_TENSOR, NOTHING, why_not_in_pieces
from lightning_zero.shards.unit import Unit
from lightning_zero.shards.units import UnitSpec
from lightning_zero.shards.window import set_grad_dtype

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Options:
    """How an engine works; none of it changes results, except the two dtypes. Raises ValueError for what cannot be."""

    unit_classes: tuple[type | str, ...] | None = None  # see `units.find_units`
    bucket_bytes: int = 25 * MIB  # largest collective
    prefetch: int = 1  # units gathered ahead at stage 3
    overlap: bool = True  # let reductions run while backward goes on
    accumulation: Literal["sharded", "local"] = "sharded"  # reduce each backward, or keep full gradients till the last
    param_dtype: torch.dtype | None = None  # floating-point parameters rest and compute in it; None: `autocast_dtype`
    autocast_dtype: torch.dtype | None = None  # weights that autocast casts at each use rest in it already (`*-mixed`)
    tensor_parallel_size: int = 1  # ranks, neighbours, that share each tensor-parallel module
    replicate_size: int = 1  # groups of ranks that each hold all shards
    reduce_dtype: torch.dtype | None = None  # of gradients; None: fp32, or the parameter's where that is wider
    broadcast_buffers: bool = True  # take rank 0's buffers before a training forward
    offload: Offload | None = None  # see `ZeroStrategy`
    late_publish_bytes: int = 32 * MIB  # models of at least so many wait for new weights when they want them
    # What optimizers step: what each needs, pieces, pieces of whole blocks, or whole tensors.
    granularity: Literal["auto", "element", "block", "tensor"] = "auto"
    step_in_backward: bool = False  # step each group as soon as its gradients are averaged, and keep none
    machine: Machine = field(default_factory=Machine)  # what offload may count on
    activation_checkpointing: ActivationCheckpointing | None = None  # see `ZeroStrategy`
    merges_units: bool = False  # if `unit_classes` is None: small neighbours are one unit, and what is tiny stays whole

    def __post_init__(self) -> None:
        for name in ("overlap", "broadcast_buffers", "step_in_backward"):
            is_switch(name, getattr(self, name))
        one_of("accumulation", self.accumulation, ("sharded", "local"))
        one_of("granularity", self.granularity, ("auto", "element", "block", "tensor"))
        at_least("prefetch", self.prefetch, 0)
        at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        at_least("replicate_size", self.replicate_size, 1)
        policy = self.activation_checkpointing
        if policy is not None and policy.partition and self.tensor_parallel_size == 1:
            raise ValueError(policy.why_not_partitioned)


class Uncast(NamedTuple):
    """Parameters that rest in fp32 although autocast computes in another dtype."""

    kind: str  # class of the modules that hold them
    why: str
    numel: int


class Resting(NamedTuple):
    """In which dtypes parameters rest."""

    cast_modules: list[Module]  # that see their weights as they rest
    dtypes: dict[int, torch.dtype]  # by id of the parameter, where it is not the declared one
    uncast: list[Uncast]


@dataclass(frozen=True)
class Assembly:
    """What `assemble` makes of a module."""

    units: list[Unit]  # that are gathered when they are used
    resident: int  # elements that stay whole on every rank although parameters are sharded
    entrances: list[
        tuple[Module, Unit]
    ]  # modules that look at the weights of a unit before they call it, and that unit
    cast_modules: list[Module]  # whose weights rest in autocast's dtype, and enter forward so
    uncast: list[Uncast]  # what rests in fp32 although autocast was asked for
    groups: list[ShardGroup]  # of all parameters, in the order of forward where units are gathered
    shards: list[GradientShard]  # gradients of the trainable groups, in the order in which backward should reach them
    pools: list[BucketPool]  # the buckets that gradients travel in
    arena: Arena  # where units are gathered


def bucket_bytes_for(managed: Sequence[Parameter], options: Options) -> int:
    """Small models get small buckets: a bucket is memory that grows with nothing, and must not outgrow the model."""
    return min(options.bucket_bytes, max(MIB, sum(local_of(parameter).nbytes for parameter in managed) // 16))


def assemble(
    module: Module, managed: Sequence[Parameter], trainable: set[int], setting: Setting, options: Options
) -> Assembly:
    """Takes over the values of `managed` (ids of those that train: `trainable`) and points the parameters at them."""
    resting = _choose_resting(module, managed, trainable, options)
    known = {id(parameter) for parameter in managed}
    # On one rank all is there always, unless it is offloaded.
    is_elsewhere = setting.mesh.shard.size > 1 or setting.places.parameter != setting.places.gathered
    is_sharded = setting.partition.parameter and is_elsewhere
    offloaded = choose_offloaded(options.offload, dict(module.named_parameters()), trainable & known)
    specs, resident = _choose_units(module, setting, options) if is_sharded else ([], units.whole_model(module))
    traced = units.modules_in_compiled_regions(module, roots=False)
    made, groups = [], []
    for spec in [*specs, *resident]:
        mine = {name: parameter for name, parameter in spec.parameters.items() if id(parameter) in known}
        kinds = units.split_by_kind(mine, trainable, resting.dtypes, offloaded)
        groups += (own := _make_groups(spec.name, kinds, setting, stays_full=spec in resident))
        if own and spec not in resident:
            inside = traced.intersection(spec.modules)
            made.append(Unit(spec.name, spec.modules, own, traced=inside, is_leaf=spec.is_leaf))
    shards = [_make_gradient(group, options.reduce_dtype) for group in groups if group.kind.trainable]
    if is_sharded:
        shards.reverse()  # units stand in the order of forward; the groups of whole models are made last first
    by_module = {inner: unit for unit in made for inner in unit.modules}
    encoders = [encoder for encoder in module.modules() if isinstance(encoder, nn.TransformerEncoder)]
    entrances: list[tuple[Module, Unit]] = [
        (encoder, by_module[encoder.layers[0]]) for encoder in encoders if encoder.layers[0] in by_module
    ]
    # Units around other units are used for longer than those, and have room of their own.
    sizes = [unit.nbytes for unit in made if unit.is_leaf]
    room = min(1 + options.prefetch, len(sizes))
    return Assembly(
        units=made,
        resident=sum(slot.numel for group in groups if is_sharded and group.stays_full for slot in group.slots),
        entrances=entrances,
        cast_modules=resting.cast_modules,
        uncast=resting.uncast,
        groups=groups,
        shards=shards,
        pools=_make_pools(shards, setting, 2 if options.overlap else 1),
        arena=Arena(room, max(sizes, default=0), setting.ledger, setting.places.gathered),
    )


def _choose_resting(module: Module, managed: Sequence[Parameter], trainable: set[int], options: Options) -> Resting:
    """What rests in another dtype than it was made in."""
    if options.param_dtype is not None:
        for name, parameter in module.named_parameters():
            if local_of(parameter) is not parameter:
                raise ValueError(
                    f"param_dtype={options.param_dtype} keeps parameters in another dtype than they were made in, "
                    f"and {name!r} is a DTensor, which shows one alone. Leave param_dtype out, or make the model in "
                    "that dtype (precision='bf16-true')."
                )
        return Resting([], {id(p): options.param_dtype for p in managed if p.is_floating_point()}, [])
    if options.autocast_dtype is None:
        return Resting([], {}, [])
    reasons = units.why_not_cast(module)
    for candidate, why in reasons.items():
        if why is None and not all(id(parameter) in trainable for parameter in candidate.parameters(recurse=False)):
            reasons[candidate] = "it does not train"
    modules = [candidate for candidate, why in reasons.items() if why is None]
    resting = {id(p): options.autocast_dtype for m in modules for p in m.parameters(recurse=False)}
    return Resting(modules, resting, _tell_uncast(reasons))


def _tell_uncast(reasons: Mapping[Module, str | None]) -> list[Uncast]:
    """What modules hold in fp32, by their class and the reason, largest first; what they share counts once."""
    counted: set[int] = set()
    numels: Counter[tuple[str, str]] = Counter()
    for module, why in reasons.items():
        for parameter in module.parameters(recurse=False) if why is not None else ():
            if parameter.dtype == torch.float32 and id(parameter) not in counted:
                counted.add(id(parameter))
                numels[type(module).__name__, why or ""] += local_of(parameter).numel()
    return [Uncast(kind, why, numel) for (kind, why), numel in numels.most_common()]


def _choose_units(module: Module, setting: Setting, options: Options) -> tuple[list[UnitSpec], list[UnitSpec]]:
    """What is gathered, and what stays."""
    specs, resident = units.without_scripted(module, units.find_units(module, options.unit_classes))
    if options.unit_classes is None and options.merges_units:
        small = units.too_small_to_shard(specs, units.RESIDENT_BYTES)
        specs = units.merge_small([spec for spec in specs if spec not in small], setting.bucket_bytes)
        resident = [*small, *resident]
    return specs, [units.as_one(resident)] if resident else []


def _make_groups(
    unit: str, kinds: Mapping[Kind, Mapping[str, Parameter]], setting: Setting, stays_full: bool
) -> list[ShardGroup]:
    """One group of each kind where a unit is gathered; else groups of at most a bucket, of what trains (what does not
    rests in full, as the user left it)."""
    groups = []
    for kind, parameters in kinds.items():
        if stays_full and not (kind.trainable or kind.is_cast):
            for parameter in parameters.values():
                take_over(parameter)
            continue
        numel = setting.bucket_bytes // kind.declared.itemsize
        is_divided = stays_full or not setting.keeps_gradients
        runs = units.fill_buckets(parameters, numel) if is_divided else [dict(parameters)]
        words = str(kind.resting).removeprefix("torch.") + ("" if kind.trainable else " frozen")
        words += " offloaded" if kind.is_offloaded else ""
        for number, run in enumerate(runs):
            groups.append(ShardGroup(f"{unit or 'model'}/{words}/{number}", run, kind, setting, stays_full=stays_full))
    return groups


def _make_gradient(group: ShardGroup, reduce_dtype: torch.dtype | None) -> GradientShard:
    dtype = reduce_dtype or torch.promote_types(group.kind.declared, torch.float32)
    for slot in group.slots:
        set_grad_dtype(slot.parameter, dtype)
    return GradientShard(group, dtype)


def _make_pools(
    shards: list[GradientShard], setting: Setting, buckets: int, there: Iterable[BucketPool] = ()
) -> list[BucketPool]:
    """A pool for each dtype of gradients, unless one that is `there` fits; with two buckets one fills while the other
    travels. No more buckets than there are collectives: a small model makes one."""
    pools = []
    for dtype in sorted({shard.dtype for shard in shards if shard.travels}, key=str):
        alike = [shard for shard in shards if shard.dtype == dtype]
        widths = [chunk.width for shard in alike for chunk in shard.group.layout.chunks]
        packs = any(shard.is_packed for shard in alike)
        pool = next((pool for pool in there if pool.fits(max(widths), dtype, packs=packs)), None)
        if pool is None:
            made = [Bucket(max(widths), dtype, setting, packs=packs) for _ in range(min(buckets, len(widths)))]
            pools.append(pool := BucketPool(made))
        for shard in alike:
            shard.pool = pool
    return pools


class Addition(NamedTuple):
    """What an engine that is there already gains."""

    groups: list[ShardGroup]  # new ones, of parameters that no group held
    shards: list[GradientShard]  # of those, and of groups that did not train before
    pools: list[BucketPool]


def add(newly: Mapping[str, Parameter], pools: Iterable[BucketPool], setting: Setting, options: Options) -> Addition:
    """Parameters that train only now. Where a group holds one already, all of the group trains from here on; the others
    rest whole at every stage, in groups of their own. They travel in the buckets of `pools` that fit."""
    trains_now = list(dict.fromkeys(slot.group for p in newly.values() if (slot := slot_of(p)) is not None))
    for group in trains_now:
        group.begin_training()
    others = {name: parameter for name, parameter in newly.items() if slot_of(parameter) is None}
    kinds = units.split_by_kind(others, set(map(id, others.values())), {}, set())
    groups = _make_groups(next(iter(others), ""), kinds, setting, stays_full=True)
    shards = [_make_gradient(group, options.reduce_dtype) for group in [*trains_now, *groups]]
    return Addition(groups, shards, _make_pools(shards, setting, 2 if options.overlap else 1, pools))


def newly_trainable(module: Module, optimizers: Iterable[Optimizer], trained: Container[int]) -> dict[str, Parameter]:
    """What asks for gradients, or is an optimizer's, and is not among those that are `trained` (ids)."""
    others = {name: parameter for name, parameter in module.named_parameters() if id(parameter) not in trained}
    if not others:
        return {}
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return {
        name: parameter
        for name, parameter in others.items()
        if (parameter.requires_grad or id(parameter) in stepped)
        and (parameter.is_floating_point() or parameter.is_complex())
        and (slot_of(parameter) is not None or (not is_lazy(parameter) and is_plain(parameter)))
    }


class Stepped(NamedTuple):
    """What of parameters is never parted for the optimizers' steps."""

    whole: list[Optimizer]  # that step whole tensors
    block: int  # elements that pieces never part, whoever steps them


def choose_stepped(optimizers: Sequence[Optimizer], options: Options, is_divided: bool) -> Stepped:
    """What optimizers step; where tensors are divided among tensor-parallel ranks, only element-wise ones can. Raises
    ValueError for those that cannot do with that, and warns of those that the user knows better."""
    whole, blocked, asked = [], [], options.granularity
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise ValueError(
                "SparseAdam steps sparse gradients alone, and averaged ones are dense. Use SGD or Adagrad, which leave "
                "rows without a gradient as they are, or Adam."
            )
        reason, kind = why_not_in_pieces(optimizer), type(optimizer).__name__
        if asked == "tensor" or (asked == "auto" and reason == BY_TENSOR):
            whole.append(optimizer)
        elif asked == "block" or (asked == "auto" and reason == BY_BLOCK):
            blocked.append(optimizer)
        if reason is not None and (asked == "element" or (asked == "block" and reason != BY_BLOCK)):
            told = f"{kind} {reason}, and steps pieces: not DDP's numbers. granularity='auto' gives it what it needs"
            warnings.warn(f"{told}; granularity={asked!r} was asked for.", stacklevel=2)
        elif reason == NOTHING and asked == "auto":
            warnings.warn(
                f"{kind} {NOTHING}: whether it looks at whole ones is not known, and it steps pieces. If it looks at "
                "whole ones, write granularity='tensor'.",
                stacklevel=2,
            )
        elif reason not in (None, BY_TENSOR, BY_BLOCK) and not (asked == "tensor" and reason != BY_ALL):
            raise ValueError(
                f"{kind} {reason}, and each rank steps only a part of them: the result would be wrong. Use stage=0, or "
                "another optimizer; or, if you know that it looks at one tensor at a time, granularity='tensor'."
            )
    if is_divided and (whole or blocked):
        raise ValueError(
            f"{type((whole + blocked)[0]).__name__} steps whole {'tensors' if whole else 'blocks'}, which "
            "tensor-parallel ranks have parts of: not yet. Use an element-wise optimizer (AdamW, SGD, RMSprop, ...), "
            "or no tensor parallelism."
        )
    if whole and options.step_in_backward:
        raise ValueError(
            f"{type(whole[0]).__name__} steps whole tensors, which travel to the rank that steps them: not in the "
            "middle of a backward, where ranks wait for each other's gradients. Leave step_in_backward=True out."
        )
    return Stepped(whole, BLOCK if blocked else 1)


def trainable_of(managed: Sequence[Parameter], optimizers: Sequence[Optimizer]) -> set[int]:
    """Ids of what an optimizer has, or what asks for gradients: freezing for a while never regroups."""
    if not optimizers:
        return set()
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    can_train = [parameter for parameter in managed if parameter.is_floating_point() or parameter.is_complex()]
    return {id(parameter) for parameter in can_train if parameter.requires_grad or id(parameter) in stepped}


def managed_parameters(module: Module, optimizers: Sequence[Optimizer], tensor_ranks: Sequence[int]) -> list[Parameter]:
    """The parameters that the engine takes over: torch's own kind, and DTensors over `tensor_ranks`; each once."""
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise ValueError(f"Parameter {name!r} has no shape yet (a lazy module). Run one forward before fit.")
    refuse_meta(module)
    known = {id(parameter) for parameter in named.values()}
    for number, optimizer in enumerate(optimizers):
        if "_optimizer_step_pre_hooks" not in vars(optimizer):
            raise ValueError(
                f"Optimizer {number} ({type(optimizer).__name__}) has none of torch's hooks, in which its parameters "
                "become what this rank owns. Have its __init__ call super().__init__(params, defaults) first."
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise ValueError(
                        f"Optimizer {number} ({type(optimizer).__name__}) has a parameter of shape "
                        f"{tuple(parameter.shape)} that is not the module's. Give it parameters of the LightningModule "
                        "(self.parameters()), and register what it should train as a submodule or nn.Parameter."
                    )
    for name, parameter in named.items():
        if slot_of(parameter) is not None:
            raise ValueError(
                f"Parameter {name!r} is in shards since an earlier run, which ended with an error; what other ranks "
                "had of it is lost. Make the model anew, and go on from a checkpoint: fit(model, ckpt_path=...)."
            )
        refuse_other_meshes(name, parameter, tensor_ranks)
        if not is_plain(parameter) and parameter.requires_grad:
            raise ValueError(
                f"Parameter {name!r} is a {type(parameter).__name__}, a tensor of its own kind, and trains: it cannot "
                "be sharded. Freeze it (requires_grad_(False)), or make it a torch.nn.Parameter."
            )
    managed = {name: parameter for name, parameter in named.items() if is_plain(parameter)}
    _refuse_shared_memory(managed)
    return list(managed.values())


def refuse_meta(module: Module) -> None:
    """Raises ValueError for what has a shape and no values."""
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    if names := [name for name, tensor in tensors if tensor.is_meta]:
        raise ValueError(
            f"{names} are on the meta device, and have no values. Give them some in configure_model(): "
            "strategy.load_pretrained(path), or of each module to_empty(device=..., recurse=False) and "
            "reset_parameters()."
        )


def _refuse_shared_memory(named: Mapping[str, Parameter]) -> None:
    """Two parameters over the same memory would part in silence."""
    owners: dict[int, str] = {}
    for name, parameter in named.items():
        if not parameter.numel() or early_of(parameter) is not None:  # those have memory of their own
            continue
        other = owners.setdefault(local_of(parameter).data_ptr(), name)
        if other != name and (parameter.requires_grad or named[other].requires_grad):
            raise ValueError(
                f"Parameters {other!r} and {name!r} are two that share their memory, and sharded they would part. Make "
                "them one (decoder.weight = encoder.weight), or give each its own values (.data.clone())."
            )


def foreign_parameters(module: Module) -> dict[str, Parameter]:
    """Quantised tensors and others of their own kind: every rank keeps them whole, as the user made them."""
    return {name: parameter for name, parameter in module.named_parameters() if not is_plain(parameter)}


def is_plain(parameter: Parameter) -> bool:
    """Whether it is an ordinary tensor, of torch's class or of one that only gives it a name, or has one here."""
    kind = class_of(parameter)
    if isinstance(parameter, DTensor):
        return True
    return (
        kind.__torch_function__ is Parameter.__torch_function__
        and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
        and parameter.layout == torch.strided
        and not parameter.is_quantized
    )
