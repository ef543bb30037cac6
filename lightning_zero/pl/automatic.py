"""``ZeroStrategy(stage="auto")``: when a fit begins, rank 0 chooses arguments, and all ranks take them."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.strategies import DDPStrategy

from lightning_zero.device import free_bytes, is_host
from lightning_zero.tiers.host_memory import available_host_bytes

OF_THE_TRAINER = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
UNKNOWN = 2**62  # bytes, where the system does not say


# Plans for a Trainer, with the arguments that the user has written and those of `_least_of_all`. Returns arguments of
# `ZeroStrategy`, and a line that tells why these.
Chooser = Callable[..., tuple[Mapping[str, Any], str]]
_choosers: list[Chooser] = []


def install(chooser: Chooser) -> None:
    """Makes `chooser` the one that chooses. It is in a layer above this one."""
    _choosers[:] = [chooser]


def chosen(strategy: DDPStrategy, trainer: "pl.Trainer", written: Mapping[str, Any]) -> Mapping[str, Any]:
    """Has rank 0 choose what `written` leaves at its default, tells it in a line, and returns all arguments.

    Collective.

    Raises:
        ValueError: on every rank, where rank 0 could not choose.
    """
    fixed = beside_defaults(type(strategy), written)
    fixed = {name: value for name, value in fixed.items() if name not in ("stage", *OF_THE_TRAINER)}
    means = _least_of_all(strategy)
    told: tuple[Mapping[str, Any], str] | str = ""
    if strategy.global_rank == 0:
        try:
            told = _choosers[0](trainer, fixed, **means)
        except Exception as error:  # the others wait for what this rank says
            told = f"{error} Or write stage=1, 2 or 3."
    told = DDPStrategy.broadcast(strategy, told)
    if isinstance(told, str):
        raise ValueError(f"stage='auto' cannot be chosen: {told}")
    arguments, reason = told
    rank_zero_info(reason)
    return {**written, **arguments}


def beside_defaults(kind: type[DDPStrategy], written: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that are not what they are anyway. A config of Hydra writes all of them."""
    defaults = {name: one.default for name, one in signature(kind.__init__).parameters.items()}
    return {name: value for name, value in written.items() if value != defaults[name]}


def _least_of_all(strategy: DDPStrategy) -> dict[str, Any]:
    """Returns what each rank has at least."""
    device = strategy.root_device
    host = available_host_bytes()
    host = UNKNOWN if host is None else host // max(1, strategy.num_processes)
    own = torch.tensor((host, UNKNOWN) if is_host(device) else (free_bytes(device), host), device=device)
    least = DDPStrategy.all_gather(strategy, own).view(-1, 2).amin(0).tolist()
    bytes_of = dict(zip(("device_bytes", "host_bytes"), least, strict=True))
    return {"ranks": strategy.world_size, **bytes_of, "host_is_apart": not is_host(device)}
