"""Chooses the tier of what is offloaded, and checks that it fits (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity,
2104.07857)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero.config import Offload
from lightning_zero.device import HOST, Limit, can_pin, is_host
from lightning_zero.shards.gradient import GroupGradient
from lightning_zero.shards.probe import state_tensors_of
from lightning_zero.shards.setting import Places, Setting
from lightning_zero.shards.units import modules_in_compiled_regions
from lightning_zero.stage import Partition
from lightning_zero.tiers.disk import Disk
from lightning_zero.tiers.ledger import Place, Tier, keep_no_freed_memory


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources of a machine that offloading may use."""

    host_bytes: int | None = None  # of host memory for this rank; None where the system does not say
    ranks: int = 1  # on this machine, which share its disk
    host_is_apart: bool | None = None  # whether host and device are two tiers; None: unless the device is the CPU
    disk: type[Disk] = Disk  # how a file is kept


def places_for(
    offload: Offload | None, device: torch.device, partition: Partition, machine: Machine, limit: Limit | None = None
) -> Places:
    """Returns where the parts of offloaded groups rest. Gradients that rest as shards are where the optimizer steps.
    `limit` is of waits of the host for copies from and to the device."""
    here = Place(device)
    if offload is None:
        return Places(here, here, here, here)
    pinned = offload.pin_memory and can_pin(device.type)
    tiers = {None: here, "cpu": replace(host_of(device, machine, pins=offload.pin_memory), limit=limit)}
    if offload.path is not None:
        keep_no_freed_memory()  # users offload to disk because memory is scarce
        tiers["nvme"] = Place(HOST, Tier.DISK, pinned, machine.disk(offload.path))
    optimizer = tiers[offload.optimizer]
    gradient = optimizer if partition.gradient else here
    return Places(here, tiers[offload.parameters], gradient, optimizer, offload.state_torch_dtype)


def host_of(device: torch.device, machine: Machine, *, pins: bool = True) -> Place:
    """Returns the place that is host memory, or the device's where the two are one tier."""
    is_apart = not is_host(device) if machine.host_is_apart is None else machine.host_is_apart
    return Place(HOST, Tier.HOST, pins and can_pin(device.type)) if is_apart else Place(device)


def choose_offloaded(offload: Offload | None, named: Mapping[str, Parameter], trainable: set[int]) -> set[int]:
    """Returns the ids of the parameters whose optimizer state is offloaded: of those that train (`trainable`, ids) the
    last ones of the model, up to `offload.fraction`. Their values are needed last in the next forward."""
    if offload is None or offload.optimizer is None:
        return set()
    trained = [parameter for parameter in named.values() if id(parameter) in trainable]
    left, chosen = offload.fraction * sum(parameter.numel() for parameter in trained), set()
    for parameter in reversed(trained):
        if parameter.numel() <= 2 * left:  # nearer to the fraction with it than without
            chosen.add(id(parameter))
            left -= parameter.numel()
    return chosen


def why_serial(module: Module, gradients: Sequence[GroupGradient]) -> str | None:
    """Returns why offloaded steps cannot be postponed until values are needed; None if they can."""
    offloaded = [gradient for gradient in gradients if gradient.group.kind.is_offloaded]
    if all(gradient.group.places.optimizer == gradient.group.places.gathered for gradient in offloaded):
        return "it is kept where it is used"
    if not all(gradient.averaged.is_spread for gradient in offloaded):
        return "gradients are whole on every rank, and may be changed before the values are wanted"
    if modules_in_compiled_regions(module):
        return "compiled modules look at parameters past us"
    return None


def refuse_too_little_room(
    offload: Offload,
    gradients: Sequence[GroupGradient],
    optimizers: Sequence[Optimizer],
    setting: Setting,
    machine: Machine,
) -> None:
    """Raises ValueError unless the tiers have room for the state that the optimizers will make. Parameters, masters and
    those in `gradients` are there already, except for gradients of idle groups."""
    per_element = max(map(state_tensors_of, optimizers), default=0)
    groups = [gradient.group for gradient in gradients if gradient.group.kind.is_offloaded]
    dtypes = {group: group.places.state_dtype or group.master.dtype for group in groups}
    state_bytes = per_element * sum(group.master.numel * dtype.itemsize for group, dtype in dtypes.items())
    if setting.partition.gradient:
        idle = [gradient for gradient in gradients if gradient.group.kind.is_offloaded and gradient.group.kind.is_idle]
        state_bytes += sum(gradient.group.layout.shard_numel * gradient.dtype.itemsize for gradient in idle)
    place, taken = setting.places.optimizer, setting.ledger.tiers[Tier.HOST]
    needed = taken + (state_bytes if place.tier is Tier.HOST else 0)
    if needed and machine.host_bytes is not None and needed > machine.host_bytes:
        raise ValueError(
            f"{offload} needs {needed:,} bytes of host memory on each rank, and {machine.host_bytes:,} were there for "
            "it. Offload to 'nvme', lower fraction, or use more ranks."
        )
    if place.disk is not None and state_bytes * machine.ranks > place.disk.free_bytes:
        raise ValueError(
            f"Offload(path={str(place.disk.folder)!r}): the optimizer state of the ranks of this machine will take "
            f"{state_bytes * machine.ranks:,} bytes more there, and {place.disk.free_bytes:,} are free. Choose a "
            "larger disk, lower fraction, or use more machines."
        )
