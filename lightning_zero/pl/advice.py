"""Advice when memory has run out: what has grown, and which option frees most."""

import re
import traceback
from collections.abc import Mapping
from typing import NamedTuple

import torch

from lightning_zero.pl.table import sized
from lightning_zero.run.engine import Engine
from lightning_zero.run.forecast import Forecast
from lightning_zero.stage import STAGES
from lightning_zero.tiers.ledger import Category

BESIDE = "activations and what else a step makes"
_AROUND_STEP = ("wrapper", "profile_hook_step", "_use_grad")  # functions of torch that call an optimizer's step
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of a GPU or of the host has run out; for the host torch has no class of errors."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    told = r"can't allocate memory|not enough memory|out of memory"
    return isinstance(error, RuntimeError) and re.search(told, str(error)) is not None


def asked_bytes(error: BaseException) -> int:
    """Returns the bytes that could not be allocated, or 0 where the error does not say."""
    found = re.search(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", str(error), flags=re.IGNORECASE)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def asked_for(error: BaseException) -> str:
    """Returns the category of what could not be allocated: in an optimizer's own step its state, else `BESIDE`."""
    frames = traceback.extract_tb(error.__traceback__)
    in_step = any("/torch/optim/" in frame.filename and frame.name not in _AROUND_STEP for frame in frames)
    return Category.OPTIMIZER_STATE if in_step and not any(f.name == "closure" for f in frames) else BESIDE


class Held(NamedTuple):
    """Bytes of a rank at one moment."""

    by_category: Mapping[str, int]  # as in memory reports
    beside: int  # other bytes of the device, or without a GPU of the process


class Option(NamedTuple):
    """Something that a user may write, and the bytes that it frees on one rank."""

    write: str
    nbytes: int


def advice_for(error: BaseException, where: str, before: Held, now: Held, options: list[Option]) -> str:
    """Returns at most five lines.

    Args:
        error: says what could not be allocated.
        where: the rank and the step, in words.
        before: bytes at the start of fit.
        now: bytes when memory ran out.
        options: see `options_of`.
    """
    grown = {category: nbytes - before.by_category.get(category, 0) for category, nbytes in now.by_category.items()}
    grown[BESIDE] = now.beside - before.beside
    asked, category = asked_bytes(error), asked_for(error)
    grown[category] = grown.get(category, 0) + asked
    most = max(grown, key=lambda name: grown[name])
    rests = [f"{name} {sized(nbytes)}" for name, nbytes in now.by_category.items() if nbytes]
    best = sorted((option for option in options if option.nbytes > 0), key=lambda option: -option.nbytes)[:2]
    lines = [
        f"Out of memory {where}" + (f": {sized(asked)} more were asked for" if asked else ""),
        f"  grew most: {most}, by {sized(max(grown[most], 0))}",
        f"  here: {', '.join(rests) or 'nothing yet'}",
        *(
            f"  {what}: {option.write}, about {sized(option.nbytes)} on each rank"
            for what, option in zip(("frees most", "or"), best, strict=False)
        ),
    ]
    return "\n".join(lines if best else [*lines, "  frees most: a smaller batch"])


def options_of(engine: Engine, stage: int, expected: Forecast, beside: int) -> list[Option]:
    """Returns what is left to divide, to offload or to compute again; `beside` are bytes of activations."""
    here, offload, ranks = expected.here, engine.options.offload, engine.mesh.shard.size
    # An average of the model rests beside the masters.
    states = sum(here.get(one, 0) for one in (Category.MASTER, Category.OPTIMIZER_STATE, Category.AVERAGE))
    gradient, parameter = here.get(Category.GRADIENT, 0), here.get(Category.PARAMETER, 0)
    parts = {"optimizer": states, "gradient": gradient, "parameter": parameter}
    options = []
    for higher in range(stage + 1, max(STAGES) + 1):
        newly = [name for name in parts if getattr(STAGES[higher], name) and not getattr(engine.partition, name)]
        options.append(Option(f"stage={higher}", int(sum(parts[name] for name in newly) * (1 - 1 / ranks))))
    if ranks == 1:
        options.append(Option("Trainer(devices=2) and stage=3", (states + gradient + parameter) // 2))
    tier = "optimizer='nvme', path=..." if engine.device.type == "cpu" else "optimizer='cpu'"
    if offload is None or offload.optimizer is None:
        moved = states + (gradient if engine.partition.gradient else 0)
        options.append(Option(f"offload=Offload({tier})", moved))
    if engine.parts.recompute is None:
        options.append(Option("activation_checkpointing=True or a smaller batch", beside))
    return options


def options_beside_ddp(under_ddp: Mapping[str, int], ranks: int, beside: int) -> list[Option]:
    """Returns the options of a user who trains without `ZeroStrategy`."""
    states = under_ddp[Category.OPTIMIZER_STATE] + under_ddp.get(Category.AVERAGE, 0)
    whole = states + under_ddp[Category.GRADIENT] + under_ddp[Category.PARAMETER]
    return [
        Option(f"strategy='zero_stage_3' on {max(ranks, 2)} ranks", int(whole * (1 - 1 / max(ranks, 2)))),
        Option("strategy='zero_stage_2_offload'", states),
        Option("activation checkpoints or a smaller batch", beside),
    ]
