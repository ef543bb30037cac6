"""The frozen policies that a user passes to `ZeroStrategy`, and checks of its other arguments.

A policy may also be given as a plain mapping (a Hydra or OmegaConf node). All checks happen at construction: the error
for an unknown key or an impossible combination says what was found and what to write.
"""

import difflib
import importlib
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

Tier = Literal["cpu", "nvme"]
Policy = TypeVar("Policy")

_FULL_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
_DTYPES = {name: getattr(torch, full) for short, full in _FULL_NAMES.items() for name in (short, full)}


@dataclass(frozen=True)
class Offload:
    """Where tensors are kept between uses (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857).

    Args:
        optimizer: tier of the masters, the optimizer state, and at stages 2 and 3 the gradients. ``"cpu"`` is host
            memory, ``"nvme"`` a file in `path`, ``None`` the device.
        parameters: tier of the parameter shards (stage 3); ``None`` is the device.
        path: folder of the ``"nvme"`` tier, on any file system. Required by that tier, and only by it. No file remains
            in it.
        fraction: share of the optimizer state that is offloaded, in (0, 1], to the nearest parameter. The last
            parameters of the model are chosen, since the next forward needs them last.
        pin_memory: page-lock host memory, so that copies to and from the device overlap its computation.
        state_dtype: ``torch.bfloat16`` keeps offloaded optimizer state, but not masters, in that dtype. The optimizer
            still steps in its own dtype; the state is rounded to nearest after each step. With Adam, masters and state
            take 8 bytes per parameter instead of 12. As bfloat16 has 8 bits, an average that keeps more than 0.996 of
            itself in a step stops falling: write ``betas=(0.9, 0.95)``. None rounds nothing.

    Raises:
        ValueError: for an unknown tier, a `path` without ``"nvme"``, ``"nvme"`` without a `path`, a `fraction` outside
            (0, 1], or a `state_dtype` that is not bfloat16 or comes without `optimizer`.
    """

    optimizer: Tier | None = None
    _: KW_ONLY
    parameters: Tier | None = None
    path: str | Path | None = None
    fraction: float = 1.0
    pin_memory: bool = True
    state_dtype: torch.dtype | str | None = None

    def __post_init__(self) -> None:
        state_dtype = self.state_torch_dtype
        if state_dtype not in (None, torch.bfloat16) or (state_dtype and self.optimizer is None):
            raise ValueError(
                f"Offload(state_dtype={state_dtype}, optimizer={self.optimizer!r}): offloaded state is kept in the "
                "dtype that the optimizer made it in, or in bfloat16. Write state_dtype='bfloat16' with "
                "optimizer='cpu' or 'nvme', or leave it out."
            )
        for name in ("optimizer", "parameters"):
            tier = getattr(self, name)
            if tier not in (None, "cpu", "nvme"):
                raise ValueError(
                    f"Offload({name}={tier!r}) is not a tier. Write {name}='cpu', {name}='nvme' or leave it out."
                )
        if (self.path is not None) != ("nvme" in (self.optimizer, self.parameters)):
            raise ValueError(
                f"Offload(path={self.path!r}) does not match its tiers (optimizer={self.optimizer!r}, "
                f"parameters={self.parameters!r}). Give `path` exactly when a tier is 'nvme'."
            )
        if self.path is not None and not isinstance(self.path, str | os.PathLike):
            raise TypeError(f"Offload(path={self.path!r}) is not the path of a folder.")
        is_switch("Offload: pin_memory", self.pin_memory)
        if not _is_positive(self.fraction) or self.fraction > 1.0:
            raise ValueError(f"Offload(fraction={self.fraction!r}) must lie in (0, 1]. Leave it out to offload all.")

    @property
    def state_torch_dtype(self) -> torch.dtype | None:
        """`state_dtype` as a dtype, even if it was given by name."""
        return dtype_from(self.state_dtype, "Offload(state_dtype)")


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Which modules recompute their activations in backward, and where the checkpoints are kept (ZeRO-R, section 6.1).

    When gradients are recorded, such a module keeps only its inputs, and backward computes it again with the same
    random numbers and buffers: no bit changes.

    Args:
        modules: module classes, their names or import paths. ``"auto"`` chooses the elements of module lists that
            consist of several modules. If a chosen module contains another, only the outer one recomputes.
        partition: each rank of a tensor-parallel group keeps a part of each checkpoint, and the parts are gathered
            before they are needed (P_a). Needs tensor parallelism.
        offload: keep checkpoints in host memory (with `partition`: P_a+cpu).
        contiguous: keep checkpoints in one array, allocated once (MD).

    Raises:
        TypeError: for `modules` that are not module classes, or another argument that is neither True nor False.
        ValueError: for an import path that cannot be imported.
    """

    modules: Any = "auto"
    _: KW_ONLY
    partition: bool = False
    offload: bool = False
    contiguous: bool = False

    def __post_init__(self) -> None:
        classes_from(self.modules, "ActivationCheckpointing: modules")
        for name in ("partition", "offload", "contiguous"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"ActivationCheckpointing({name}={getattr(self, name)!r}) is neither True nor False.")

    @property
    def why_not_partitioned(self) -> str:
        """The error message for `partition` without tensor parallelism."""
        return (
            f"{self} divides what the ranks of a tensor-parallel group have alike, and there is no such group: "
            "data-parallel ranks have activations of their own samples. Write offload=True in place of partition=True, "
            "which takes checkpoints off the device on any number of ranks, or set tensor_parallel_size."
        )


@dataclass(frozen=True)
class Checkpoint:
    """How `Trainer.save_checkpoint` writes. Either format is there complete or not at all, even if ranks are killed
    while they write, and is resumed at any stage and on any number of ranks. Without a policy (``checkpoint=None``)
    each run chooses: a single file where the states of model and optimizers are at most 1 GB, shards where they are
    more, or where the run goes on from shards.

    Args:
        format: ``"sharded"`` is a folder to which every rank writes its shards. ``"full"`` is Lightning's ordinary
            single file, for which every rank gathers the whole model.
        async_save: write a copy in the background while training continues (sharded only).

    Raises:
        ValueError: for an unknown format, or ``async_save`` with ``"full"``.
    """

    format: Literal["sharded", "full"] = "sharded"
    _: KW_ONLY
    async_save: bool = False

    def __post_init__(self) -> None:
        if self.format not in ("sharded", "full"):
            raise ValueError(f"Checkpoint(format={self.format!r}) is unknown. Write format='sharded' or format='full'.")
        if not isinstance(self.async_save, bool):
            raise ValueError(f"Checkpoint(async_save={self.async_save!r}) is neither True nor False.")
        if self.async_save and self.format == "full":
            raise ValueError(
                "Checkpoint(format='full', async_save=True): single files are written at once. Leave async_save out, "
                "or use Lightning's AsyncCheckpointIO plugin."
            )


# Words that may be given in place of a policy.
_IN_SHORT: dict[type, dict[Any, Mapping[str, Any] | None]] = {
    Offload: {"cpu": {"optimizer": "cpu"}, "nvme": {"optimizer": "nvme"}},
    ActivationCheckpointing: {True: {}, False: None},
    Checkpoint: {"sharded": {"format": "sharded"}, "full": {"format": "full"}},
}


def policy_from(kind: type[Policy], value: Any, argument: str) -> Policy | None:
    """Returns `value` as a policy of class `kind`. It may be one, a plain mapping, a word for one (``"cpu"``,
    ``"full"``, ``True``), or None. Raises TypeError for another type or an unknown key."""
    in_short = _IN_SHORT.get(kind, {})
    if isinstance(value, str | bool) and value in in_short:
        value = in_short[value]
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        words = "".join(f"{word!r}, " for word in in_short)
        raise TypeError(f"{argument}={value!r} must be {kind.__name__}(...), a mapping with its keys, {words}or None.")
    allowed = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in value:
        if key not in allowed:
            raise TypeError(f"{argument} has no key {key!r}{did_you_mean(str(key), allowed)} Allowed: {allowed}.")
    return kind(**{str(key): item for key, item in value.items()})


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Returns the end of an error message: `; did you mean 'x'?` if an allowed word is close, or a full stop."""
    close = difflib.get_close_matches(word, list(allowed), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


def dtype_from(value: torch.dtype | str | None, argument: str) -> torch.dtype | None:
    """Returns the floating-point dtype given as ``torch.bfloat16``, ``"bf16"``, ``"bfloat16"``, ``"torch.bfloat16"``
    and so on. Raises ValueError for anything else but None."""
    if value is None:
        return None
    found = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{argument}={value!r} is not a floating-point dtype. Write one of {sorted(_DTYPES)} or None.")
    return found


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def seconds_from(value: timedelta | float, argument: str) -> timedelta:
    """Returns seconds, or a `timedelta`, as a `timedelta`. Raises ValueError unless it is positive and finite."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not _is_positive(seconds):
        raise ValueError(f"{argument}={value!r} must be a positive duration: seconds, or a timedelta.")
    return timedelta(seconds=seconds)


def bytes_from_mib(value: Any, argument: str) -> int:
    """Converts MiB to bytes. Raises ValueError unless they are a positive number of at most a TiB."""
    if not _is_positive(value):
        raise ValueError(f"{argument}={value!r} must be a positive number of MiB, or 'auto'; start with 25.")
    if value > 2**20:
        raise ValueError(
            f"{argument}={value!r} is more than a TiB: it counts MiB, not bytes or elements. Start with 25."
        )
    return int(value * 2**20)


def one_of(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    """Raises ValueError unless `value` is among `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown. Write one of {list(allowed)}.")


def stage_from(value: Any, stages: Collection[int], *others: str) -> int:
    """Returns `value`, which may be text, as one of `stages`. Raises ValueError for anything else, which names `others`
    as well."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    found = int(value) if is_number or (isinstance(value, str) and value.isdecimal()) else None
    if found is None or found not in stages:
        raise ValueError(f"stage={value!r} does not exist. Write one of {[*stages, *others]}.")
    return found


def is_switch(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is neither True nor False.")


def at_least(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}.")


def classes_from(value: Any, argument: str) -> tuple[type | str, ...] | None:
    """Returns module classes given as classes or import paths, and bare class names (to be matched later) as they are.
    Returns None for ``"auto"`` and ``"modules"``, which name no class."""
    if value in ("auto", "modules"):
        return None
    items = [value] if isinstance(value, str | type) else value
    if not isinstance(items, Iterable):
        raise TypeError(
            f"{argument}={value!r} must be 'auto', 'modules', or module classes, their names or import paths."
        )
    return tuple(_class_from(item, argument) for item in items)


def _class_from(item: Any, argument: str) -> type | str:
    if isinstance(item, type) and issubclass(item, torch.nn.Module):
        return item
    if not isinstance(item, str):
        raise TypeError(f"{argument} has {item!r}, which is not a torch.nn.Module class, its name or import path.")
    module, _, name = item.rpartition(".")
    if not module:
        return item
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{argument} names {item!r}, which cannot be imported: {error}.") from error
    return _class_from(found, argument)
