"""Advice when memory has run out: what has grown, what is held beside what was planned, and which options free most.

    Out of memory on rank 1, in step 0: 1.07 GB more were asked for
      grew most: activations and what else a step makes, by 61.2 GB
      holds parameter 2.5 GB, gradient 625 MB, optimizer state 0 B of 1.25 GB to come; 60.2 GB beside them, of 80 GB
      frees most: activation_checkpointing=True (at most 61.2 GB), half the batch with ... (30.6 GB), stage=3 (1.77 GB)
      to try without a GPU: lightning-zero plan my.models:GPT --batch ... --ranks 4 --device-memory 80GB

It is computed from what engines have booked, when an error is there, and allocates nothing on a device.
"""

import logging
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

from lightning_zero.device import HOST, held_bytes, is_host, total_bytes
from lightning_zero.pl.table import ranks_told, sized
from lightning_zero.run.engine import Engine
from lightning_zero.run.forecast import bytes_to_rest
from lightning_zero.shards.assembly import unit_bytes
from lightning_zero.shards.offload import host_of
from lightning_zero.shards.units import find_blocks
from lightning_zero.stage import STAGES
from lightning_zero.tiers.host_memory import resident_bytes
from lightning_zero.tiers.ledger import Category, Place, Tier, category_in
from lightning_zero.wire.comm import RankTimeoutError

log = logging.getLogger(__name__)

BESIDE = "activations and what else a step makes"
SHOWN = 3  # options
_AROUND_STEP = ("wrapper", "profile_hook_step", "_use_grad")  # functions of torch that call an optimizer's step
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_TOLD = "_advised_by_lightning_zero"
_STATES = (Category.MASTER, Category.OPTIMIZER_STATE, Category.AVERAGE)  # an average rests beside the masters


# -- errors


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of a GPU or of the host has run out on this rank; for the host torch has no class of errors."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RankTimeoutError):  # it may quote another rank's error
        return False
    told = r"can't allocate memory|not enough memory|out of memory"
    return isinstance(error, RuntimeError) and re.search(told, str(error)) is not None


def tell_once(error: BaseException, advise: Callable[[], str]) -> None:
    """Logs advice on an error, unless it is another error, or has been advised on. Raises nothing: an error in here
    must not replace the one of the run."""
    with suppress(Exception):
        if is_out_of_memory(error) and not hasattr(error, _TOLD):
            vars(error)[_TOLD] = True
            log.error(advise())


class Adviser(Protocol):
    """Says something on an error."""

    def advise_on(self, error: BaseException) -> None: ...


_advisers: WeakKeyDictionary[Adviser, None] = WeakKeyDictionary()  # the newest last


def advise_on_uncaught(adviser: Adviser) -> None:
    """Has `adviser`, as long as it is there, asked about the exception that ends this process, before its traceback is
    printed."""
    _advisers[adviser] = None
    otherwise = sys.excepthook
    if hasattr(otherwise, _TOLD):
        return

    def excepthook(kind: type[BaseException], exception: BaseException, raised: TracebackType | None) -> None:
        for adviser in reversed([*_advisers]):  # an older one may be that of a run which has ended
            adviser.advise_on(exception)
        otherwise(kind, exception, raised)

    vars(excepthook)[_TOLD] = True
    sys.excepthook = excepthook


def asked_bytes(error: BaseException) -> int:
    """Returns the bytes that could not be allocated, or 0 where the error does not say."""
    found = re.search(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", str(error), flags=re.IGNORECASE)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def memory_of(error: BaseException, device: torch.device) -> torch.device:
    """Returns whose memory has run out in a training on `device`: that device's, or the host's."""
    is_hosts = isinstance(error, MemoryError) or "CPUAllocator" in str(error)
    return HOST if is_hosts else device


def asked_for(error: BaseException) -> str:
    """Returns the category of what could not be allocated: in an optimizer's own step its state, else `BESIDE`."""
    frames = traceback.extract_tb(error.__traceback__)
    in_step = any("/torch/optim/" in frame.filename and frame.name not in _AROUND_STEP for frame in frames)
    return Category.OPTIMIZER_STATE if in_step and not any(f.name == "closure" for f in frames) else BESIDE


# -- what is held


@dataclass(frozen=True)
class Held:
    """Bytes of a rank when memory ran out."""

    by_category: Mapping[str, int]  # as in memory reports
    grown: Mapping[str, int]  # by category, since they rested; `BESIDE` is what no category has
    beside: int  # other bytes of the device, or without a GPU of the process
    planned: Mapping[str, int] = field(default_factory=dict)  # by category, that rest once training is under way
    total: int | None = None  # that the device has


def bytes_beside(by_category: Mapping[str, int], device: torch.device, memory: torch.device) -> int:
    """Returns the bytes in `memory`, which is `device` or the host, that are in no category of a memory report. Of the
    host this process counts."""
    there = resident_bytes() if is_host(memory) else held_bytes(memory)
    tier = "" if memory == device else "(host)"
    booked = sum(nbytes for name, nbytes in by_category.items() if name.endswith(tier) and (tier or "(" not in name))
    return max(there - booked, 0)


def held_by(engines: Iterable[Engine], device: torch.device, memory: torch.device, before: int) -> Held:
    """Returns what engines hold now, together; `before` is what `bytes_beside` was before they trained."""
    by_category: Counter[str] = Counter()
    grown: Counter[str] = Counter()
    planned: Counter[str] = Counter()
    for engine in engines:
        by_category.update(engine.bytes_by_category())
        grown.update(engine.bytes_grown())
        planned.update(bytes_to_rest(engine, engine.optimizers, HOST))
    beside = bytes_beside(by_category, device, memory)
    grown[BESIDE] = max(beside - before, 0)
    return Held(by_category, grown, beside, planned, None if is_host(memory) else total_bytes(memory))


# -- options


class Option(NamedTuple):
    """Something that a user may write, and the bytes that it frees on one rank."""

    write: str
    nbytes: int
    is_most: bool = False  # it frees no more than that, and nobody knows how much less

    def __str__(self) -> str:
        return f"{self.write} ({'at most ' if self.is_most else ''}{sized(self.nbytes)})"


def options_of(
    engine: Engine, stage: int, planned: Mapping[str, int], activations: int, *, trains: bool = True
) -> list[Option]:
    """Returns what frees memory of the device and is not on yet: what is left to divide, to offload, to compute again,
    or to make smaller. `planned` are the bytes by category that will rest on this rank, see `forecast.bytes_to_rest`;
    `activations` are bytes, too. `trains` says whether there will be a backward."""
    options = [*_stages_of(engine, stage, planned), *_offloads_of(engine, planned), *_rooms_of(engine)]
    if not trains:
        return [*options, Option("a smaller batch", activations, is_most=True)]
    half = Option("half the batch with twice the accumulate_grad_batches", activations // 2)
    return [*options, *_recompute_of(engine, activations), half]


def _stages_of(engine: Engine, stage: int, planned: Mapping[str, int]) -> list[Option]:
    ranks = engine.mesh.shard.size
    parts = {
        "optimizer": sum(planned.get(one, 0) for one in _STATES),
        "gradient": planned.get(Category.GRADIENT, 0),
        "parameter": planned.get(Category.PARAMETER, 0),
    }
    if ranks == 1:
        return [Option(f"Trainer(devices={2 * engine.mesh.world.size}) and stage=3", sum(parts.values()) // 2)]
    options = []
    for higher in range(stage + 1, max(STAGES) + 1):
        newly = [name for name in parts if getattr(STAGES[higher], name) and not getattr(engine.partition, name)]
        divided, needed = sum(parts[name] for name in newly), 0
        if "gradient" in newly:  # which then are packed into the buckets
            pools = [pool for pool in engine.parts.assembly.pools if not pool.packs]
            needed = sum(pool.size * ranks * pool.row_bytes for pool in pools)
        if STAGES[higher].parameter:
            try:
                sizes = unit_bytes(engine.module, engine.parts.setting, engine.options)
            except ValueError:  # the stage would be refused
                continue
            divided, needed = divided - sizes.resident, needed + sizes.buffers
        options.append(Option(f"stage={higher}", int(divided * (1 - 1 / ranks)) - needed))
    return options


def _offloads_of(engine: Engine, planned: Mapping[str, int]) -> list[Option]:
    offload, device = engine.options.offload, engine.device
    is_one = host_of(device, engine.options.machine) == Place(device)  # host and device are one memory
    tier = "'nvme', path=..." if is_one else "'cpu'"
    gradient = planned.get(Category.GRADIENT, 0) if engine.partition.gradient else 0
    states = gradient + sum(planned.get(one, 0) for one in _STATES)
    if offload is None or offload.optimizer is None:
        return [Option(f"offload=Offload(optimizer={tier})", states)]
    if offload.fraction < 1:
        return [Option("Offload(fraction=1)", states)]
    if engine.partition.parameter and offload.parameters is None:
        whole = [group for group in engine.groups if group.stays_full]
        resident = sum(group.layout.numel * group.kind.resting.itemsize for group in whole)
        return [Option(f"Offload(parameters={tier})", planned.get(Category.PARAMETER, 0) - resident)]
    return []


def _recompute_of(engine: Engine, activations: int) -> list[Option]:
    if engine.parts.recompute is not None:
        return []
    try:
        find_blocks(engine.module, None, "activation_checkpointing")
    except ValueError:  # it has no blocks, and the option would be refused
        return []
    return [Option("activation_checkpointing=True", activations, is_most=True)]


def _rooms_of(engine: Engine) -> list[Option]:
    """Returns smaller buckets, and fewer buffers for units."""
    bucket, ledger = engine.parts.setting.bucket_bytes, engine.ledger
    booked = ledger.live_in[Category.BUCKET, Tier.DEVICE]
    widest = max((pool.row_bytes for pool in engine.parts.assembly.pools), default=0) * engine.mesh.shard.size
    options = []
    if widest >= 2 * 2**20:
        options.append(Option(f"bucket_size_mb={min(widest, bucket) / 2**21:.3g}", booked // 2))
    arena = engine.parts.assembly.arena
    if arena.count > 1:
        options.append(Option("prefetch=0", (arena.count - 1) * arena.nbytes))
    return options


def host_options_of(engine: Engine, held: Mapping[str, int]) -> list[Option]:
    """Returns what frees memory of the host, beside a device that has its own."""
    offload = engine.options.offload
    name_of = {category: category_in(category, Tier.HOST) for category in Category}
    states = sum(held.get(name_of[one], 0) for one in (*_STATES, Category.GRADIENT))
    options = [Option("Offload(optimizer='nvme', path=...)", states)]
    if offload is not None and offload.parameters is not None:
        options.append(Option("Offload(parameters='nvme', path=...)", held.get(name_of[Category.PARAMETER], 0)))
    kept = held.get(name_of[Category.ACTIVATION_CHECKPOINT], 0)
    return [*options, Option("ActivationCheckpointing(offload=False)", kept)]


def options_beside_ddp(under_ddp: Mapping[str, int], ranks: int, activations: int) -> list[Option]:
    """Returns the options of a user who trains without `ZeroStrategy`."""
    states = under_ddp[Category.OPTIMIZER_STATE] + under_ddp.get(Category.AVERAGE, 0)
    whole = states + under_ddp[Category.GRADIENT] + under_ddp[Category.PARAMETER]
    return [
        Option(f"strategy='zero_stage_3' on {ranks_told(max(ranks, 2))}", int(whole * (1 - 1 / max(ranks, 2)))),
        Option("strategy='zero_stage_2_offload'", states),
        Option("activation checkpoints or a smaller batch", activations, is_most=True),
    ]


# -- the lines


def advice_for(error: BaseException, where: str, held: Held, options: Sequence[Option], command: str) -> str:
    """Returns at most five lines. `where` is rank and step in words; `command`, of a shell, tells what fits."""
    asked = asked_bytes(error)
    grown = Counter(held.grown)
    grown[asked_for(error)] += asked
    most = max(grown, key=lambda name: grown[name])
    best = sorted((option for option in options if option.nbytes > 0), key=lambda option: -option.nbytes)[:SHOWN]
    lines = [
        f"Out of memory {where}" + (f": {sized(asked)} more were asked for" if asked else ""),
        f"grew most: {most}, by {sized(max(grown[most], 0))}",
        f"holds {_told(held)}",
        f"frees most: {', '.join(map(str, best)) or 'a smaller batch'}",
        f"to try without a GPU: {command}",
    ]
    return "\n  ".join(lines)


def _told(held: Held) -> str:
    """Returns what is held by category, beside what was planned where that is still to come."""
    told = []
    for name in dict.fromkeys([*held.by_category, *held.planned]):
        here, planned = held.by_category.get(name, 0), held.planned.get(name, 0)
        if planned > 1.01 * here:
            told.append(f"{name} {sized(here)} of {sized(planned)} to come")
        elif here:
            told.append(f"{name} {sized(here)}")
    of = f", of {sized(held.total)}" if held.total else " in this process"
    return f"{', '.join(told) or 'nothing yet'}; {sized(held.beside)} beside them{of}"


def command_for(module: Module | None, ranks: int, device: torch.device) -> str:
    """Returns the command that rehearses strategies for a model."""
    kind = type(module)
    known = module is not None and kind.__module__ != "__main__" and "<" not in kind.__qualname__
    model = f"{kind.__module__}:{kind.__qualname__}" if known else "MODEL"
    memory = "..." if is_host(device) else f"{total_bytes(device) / 1e9:.3g}GB"
    return f"lightning-zero plan {model} --batch ... --ranks {ranks} --device-memory {memory}"


def advise(strategy: Any, error: BaseException, where: str, module: Module | None, *, trains: bool = True) -> str:
    """Returns advice on an error of one of this package's strategies; `trains` says whether a backward would follow."""
    engines = [engine for engine in strategy._engines if not engine.closed]
    device = strategy.root_device
    command = command_for(module, strategy.world_size, device)
    if not engines:  # nothing has rested yet
        return f"Out of memory {where}, at set-up\n  to try without a GPU: {command}"
    memory = memory_of(error, device)
    held = held_by(engines, device, memory, strategy._beside_before.get(memory, 0))
    activations = held.grown[BESIDE] + (asked_bytes(error) if asked_for(error) == BESIDE else 0)
    engine = max(engines, key=lambda each: sum(each.ledger.live.values()))
    if memory == device:
        planned = bytes_to_rest(engine, engine.optimizers, HOST)
        options = options_of(engine, strategy.stage, planned, activations, trains=trains)
    else:
        options = host_options_of(engine, held.by_category)
    return advice_for(error, where, held, options, command)
