"""`Options`: how an engine works."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from lightning_zero.config import ActivationCheckpointing, Offload, at_least, is_switch, one_of
from lightning_zero.shards.offload import Machine

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Options:
    """How an engine works. Only `param_dtype` and `reduce_dtype` change results. Raises ValueError for wrong values."""

    unit_classes: tuple[type | str, ...] | None = None  # see `units.find_units`
    bucket_bytes: int | None = None  # largest collective; None: see `assembly.bucket_bytes_for`
    prefetch: int = 1  # units gathered ahead at stage 3
    overlap: bool = True  # reduce while backward is still running
    accumulation: Literal["sharded", "local"] = "sharded"  # reduce in each backward, or keep full gradients to the last
    param_dtype: torch.dtype | None = None  # floating-point parameters rest and compute in it; None: `autocast_dtype`
    autocast_dtype: torch.dtype | None = None  # weights that autocast casts at each use rest in it already (`*-mixed`)
    tensor_parallel_size: int = 1  # neighbouring ranks that share each tensor-parallel module
    replicate_size: int = 1  # groups of ranks that each hold all shards
    reduce_dtype: torch.dtype | None = None  # of gradients; None: fp32, or the parameter's where that is wider
    broadcast_buffers: bool = True  # take rank 0's buffers before a training forward
    offload: Offload | None = None  # see `ZeroStrategy`
    late_publish_bytes: int = 32 * MIB  # from this size on, a model waits for stepped weights only where it uses them
    # What optimizers step: what each of them needs; or pieces, pieces of whole blocks, whole tensors.
    granularity: Literal["auto", "element", "block", "tensor"] = "auto"
    step_in_backward: bool = False  # step each group as soon as its gradients are averaged, and keep no gradients
    machine: Machine = field(default_factory=Machine)  # what offload may use
    activation_checkpointing: ActivationCheckpointing | None = None  # see `ZeroStrategy`
    merges_units: bool = False  # without `unit_classes`: merge small neighbours, and keep tiny units whole on all ranks

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
