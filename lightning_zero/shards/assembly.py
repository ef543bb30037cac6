"""`assemble`: makes units, groups, their gradients and buckets of a module's parameters, for the engine's set-up."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import Module, Parameter

from lightning_zero.shards import units
from lightning_zero.shards.arena import Arena
from lightning_zero.shards.bucket import Bucket, BucketPool
from lightning_zero.shards.casting import Reader, readers_of, why_not_cast
from lightning_zero.shards.early import take_over
from lightning_zero.shards.gradient import GroupGradient, is_packed, set_grad_dtype, travels
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.local import local_of
from lightning_zero.shards.offload import choose_offloaded
from lightning_zero.shards.options import MIB, Options
from lightning_zero.shards.setting import Kind, Setting
from lightning_zero.shards.slot import slot_of
from lightning_zero.shards.unit import Unit
from lightning_zero.shards.units import UnitSpec


class Uncast(NamedTuple):
    """Parameters that rest in fp32 although autocast computes in another dtype."""

    kind: str  # class of the modules that hold them
    why: str
    numel: int


class Resting(NamedTuple):
    """The dtypes in which parameters rest."""

    readers: list[Reader]  # modules whose forward reads weights that rest in autocast's dtype
    dtypes: dict[int, torch.dtype]  # by id of the parameter, where it is not the declared one
    uncast: list[Uncast]


@dataclass(frozen=True)
class Assembly:
    """The parts that `assemble` makes of a module."""

    units: list[Unit]  # gathered for each use
    resident: int  # elements that stay whole on every rank although parameters are sharded
    entrances: list[tuple[Module, Unit]]  # a module, and a unit whose weights it reads before it calls the unit
    resting: Resting
    groups: list[ShardGroup]  # of all parameters, in the order of forward where units are gathered
    gradients: list[GroupGradient]  # of trainable groups, in the order in which backward should reach them
    pools: list[BucketPool]  # that gradients travel in
    arena: Arena  # that units are gathered in

    def free(self) -> None:
        """Frees the buckets and the arena, which nothing uses any more."""
        self.pools.clear()
        self.arena.close()


_BUCKET_BYTES = 25 * MIB
# Of a bucket, for each rank. Ranks send each other their parts in turn, and each message takes some 5 us to start, in
# which a link of 25 GB/s carries so many bytes. Smaller parts would wait more than they travel.
_BYTES_PER_RANK = 2**17


def bucket_bytes_for(managed: Sequence[Parameter], options: Options, ranks: int) -> int:
    """Returns the size of a bucket that is divided over `ranks`: less for a small model, which its buckets must not
    outgrow, and more for many ranks, unless the user has chosen it."""
    most = max(_BUCKET_BYTES, ranks * _BYTES_PER_RANK) if options.bucket_bytes is None else options.bucket_bytes
    return min(most, max(MIB, sum(local_of(parameter).nbytes for parameter in managed) // 16))


def assemble(
    module: Module, managed: Sequence[Parameter], trainable: set[int], setting: Setting, options: Options
) -> Assembly:
    """Takes over the values of `managed` and points the parameters at them. `trainable` are ids of those that train."""
    resting = _choose_resting(module, managed, trainable, options)
    known = {id(parameter) for parameter in managed}
    # On one rank all values are always there, unless they are offloaded.
    is_elsewhere = setting.mesh.shard.size > 1 or setting.places.parameter != setting.places.gathered
    is_sharded = setting.partition.parameter and is_elsewhere
    offloaded = choose_offloaded(options.offload, dict(module.named_parameters()), trainable & known)
    specs, resident = _choose_units(module, setting, options) if is_sharded else ([], units.whole_model(module))
    traced = units.modules_in_compiled_regions(module, roots=False)
    made, groups = [], []
    for spec in [*specs, *resident]:
        mine = {name: parameter for name, parameter in spec.parameters.items() if id(parameter) in known}
        kinds = units.split_by_kind(mine, trainable, resting.dtypes, offloaded, as_declared=options.param_dtype is None)
        stays_full = spec in resident
        own = _make_groups(spec.name, kinds, setting, stays_full=stays_full)
        groups += own
        if own and not stays_full:
            inside = traced.intersection(spec.modules)
            made.append(Unit(spec.name, spec.modules, own, traced=inside, is_leaf=spec.is_leaf))
    gradients, pools = _make_gradients([group for group in groups if group.kind.trainable], setting, options)
    if is_sharded:
        gradients.reverse()  # units stand in the order of forward; the groups of whole models are made last first
    gradients.sort(key=lambda gradient: gradient.group.kind.is_idle)
    by_module = {inner: unit for unit in made for inner in unit.modules}
    encoders = [encoder for encoder in module.modules() if isinstance(encoder, nn.TransformerEncoder)]
    # Units around other units are in use for longer than those, and have room of their own.
    sizes = [unit.nbytes for unit in made if unit.is_leaf]
    room = min(1 + options.prefetch, len(sizes))
    return Assembly(
        units=made,
        resident=sum(slot.numel for group in groups if is_sharded and group.stays_full for slot in group.slots),
        entrances=[(each, by_module[each.layers[0]]) for each in encoders if each.layers[0] in by_module],
        resting=resting,
        groups=groups,
        gradients=gradients,
        pools=pools,
        arena=Arena(room, max(sizes, default=0), setting.ledger, setting.places.gathered, setting.mesh.shard),
    )


def _choose_resting(module: Module, managed: Sequence[Parameter], trainable: set[int], options: Options) -> Resting:
    """Chooses the parameters that rest in another dtype than they were made in."""
    if options.param_dtype is not None:
        for name, parameter in module.named_parameters():
            if local_of(parameter) is not parameter:
                raise ValueError(
                    f"param_dtype={options.param_dtype} keeps parameters in another dtype than they were made in, "
                    f"and {name!r} is a DTensor, which shows one alone. Leave param_dtype out, or make the model in "
                    "that dtype (precision='bf16-true')."
                )
        return Resting([], _asked_dtypes(managed, options), [])
    if options.autocast_dtype is None:
        return Resting([], {}, [])
    reasons = why_not_cast(module, trainable)
    readers = readers_of(module, reasons)
    dtypes = {id(parameter): options.autocast_dtype for reader in readers for *_, parameter in reader.parameters}
    return Resting(readers, dtypes, _count_uncast(reasons))


def _asked_dtypes(parameters: Iterable[Parameter], options: Options) -> dict[int, torch.dtype]:
    """Returns `param_dtype` by the ids of the parameters that are to rest in it."""
    asked = options.param_dtype
    return {} if asked is None else {id(parameter): asked for parameter in parameters if parameter.is_floating_point()}


def _count_uncast(reasons: Mapping[Module, str | None]) -> list[Uncast]:
    """Counts elements that modules hold in fp32, by class and reason, largest first. A shared parameter counts once."""
    counted: set[int] = set()
    numels: Counter[tuple[str, str]] = Counter()
    for module, why in reasons.items():
        for parameter in module.parameters(recurse=False) if why is not None else ():
            if parameter.dtype == torch.float32 and id(parameter) not in counted:
                counted.add(id(parameter))
                numels[type(module).__name__, why or ""] += local_of(parameter).numel()
    return [Uncast(kind, why, numel) for (kind, why), numel in numels.most_common()]


def _choose_units(module: Module, setting: Setting, options: Options) -> tuple[list[UnitSpec], list[UnitSpec]]:
    """Returns the units that are gathered, and those (at most one) that stay whole on every rank."""
    specs, resident = units.without_scripted(module, units.find_units(module, options.unit_classes))
    if options.unit_classes is None and options.merges_units:
        small = units.too_small_to_shard(specs, units.RESIDENT_BYTES)
        specs = units.merge_small([spec for spec in specs if spec not in small], setting.bucket_bytes)
        resident = [*small, *resident]
    return specs, [units.as_one(resident)] if resident else []


class UnitBytes(NamedTuple):
    """Bytes of a model whose parameters are sharded, in the dtypes in which they rest."""

    resident: int  # of what stays whole on every rank
    buffers: int  # that units are gathered into


def unit_bytes(module: Module, setting: Setting, options: Options) -> UnitBytes:
    """Returns what would stay whole, and what units would be gathered into, if the parameters of `module`, which an
    engine trains at another stage, were sharded. Raises ValueError where its units cannot be found."""
    specs, resident = _choose_units(module, setting, options)
    sizes = [sum(map(_resting_bytes, spec.parameters.values())) for spec in specs if spec.is_leaf]
    kept = sum(_resting_bytes(parameter) for spec in resident for parameter in spec.parameters.values())
    return UnitBytes(kept, min(1 + options.prefetch, len(sizes)) * max(sizes, default=0))


def _resting_bytes(parameter: Parameter) -> int:
    slot = slot_of(parameter)
    return local_of(parameter).nbytes if slot is None else slot.numel * slot.group.kind.resting.itemsize


def _make_groups(
    unit: str, kinds: Mapping[Kind, Mapping[str, Parameter]], setting: Setting, stays_full: bool
) -> list[ShardGroup]:
    """Makes the groups of a unit: one of each kind if it is gathered, otherwise groups of at most a bucket. What stays
    full and neither trains nor is cast is in no group: it rests as the user left it."""
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
        words += " offloaded" * kind.is_offloaded + " idle" * kind.is_idle
        for number, run in enumerate(runs):
            groups.append(ShardGroup(f"{unit or 'model'}/{words}/{number}", run, kind, setting, stays_full=stays_full))
    return groups


def _make_gradients(
    groups: Iterable[ShardGroup], setting: Setting, options: Options, there: Iterable[BucketPool] = ()
) -> tuple[list[GroupGradient], list[BucketPool]]:
    """Makes the gradients of groups. Those of each dtype travel in one of the pools that are `there`, or in a new one;
    returns the new ones, too. With `overlap` a pool has two buckets, one to fill while the other travels; but no more
    than there are chunks."""
    dtypes = {one: options.reduce_dtype or torch.promote_types(one.kind.declared, torch.float32) for one in groups}
    pools, new = dict[torch.dtype, BucketPool](), list[BucketPool]()
    for dtype in sorted({dtype for group, dtype in dtypes.items() if travels(group)}, key=str):
        alike = [group for group in dtypes if dtypes[group] == dtype]
        widths = [chunk.width for group in alike for chunk in group.layout.chunks]
        packs = any(map(is_packed, alike))
        pool = next((pool for pool in there if pool.fits(max(widths), dtype, packs=packs)), None)
        if pool is None:
            count = min(2 if options.overlap else 1, len(widths))
            pool = BucketPool([Bucket(max(widths), dtype, setting, packs=packs) for _ in range(count)], setting)
            new.append(pool)
        pools[dtype] = pool
    for slot, dtype in ((slot, dtype) for group, dtype in dtypes.items() for slot in group.slots):
        set_grad_dtype(slot.parameter, dtype)
    none = BucketPool([], setting)  # of what does not travel
    return [GroupGradient(group, dtype, pools.get(dtype, none)) for group, dtype in dtypes.items()], new


class Addition(NamedTuple):
    """The parts that an engine gains when more parameters train."""

    groups: list[ShardGroup]  # new ones, of parameters that no group held
    gradients: list[GroupGradient]  # of the new groups, and of groups that did not train before
    pools: list[BucketPool]


def add(newly: Mapping[str, Parameter], pools: Iterable[BucketPool], setting: Setting, options: Options) -> Addition:
    """Takes in parameters that begin to train. If a group holds one already, the whole group trains from now on. Others
    form groups of their own, which stay full at every stage. Gradients travel in those of `pools` that fit. Of what is
    taken in, as much is offloaded as of what trained at set-up."""
    trainable = set(map(id, newly.values()))
    offloaded = choose_offloaded(options.offload, newly, trainable)
    trains_now = list(dict.fromkeys(slot.group for p in newly.values() if (slot := slot_of(p)) is not None))
    for group in trains_now:
        group.begin_training(is_offloaded=any(id(slot.parameter) in offloaded for slot in group.slots))
    others = {name: parameter for name, parameter in newly.items() if slot_of(parameter) is None}
    asked = _asked_dtypes(others.values(), options)
    kinds = units.split_by_kind(others, trainable, asked, offloaded, as_declared=options.param_dtype is None)
    groups = _make_groups(next(iter(others), ""), kinds, setting, stays_full=True)
    return Addition(groups, *_make_gradients([*trains_now, *groups], setting, options, pools))
