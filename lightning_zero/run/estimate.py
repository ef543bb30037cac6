"""Computes the bytes of model states on a rank from the number of parameters alone; `forecast` needs an engine."""

import math
from collections import Counter
from collections.abc import Mapping

from lightning_zero.config import Offload
from lightning_zero.stage import STAGES
from lightning_zero.tiers.ledger import Category, Tier, category_in

# Bytes per element: as parameters are declared and stepped, and as they rest and compute. Gradients take 4, or the
# declared bytes if these are more.
PRECISIONS = {
    "32-true": (4, 4),
    "bf16-mixed": (4, 2),
    "16-mixed": (4, 2),
    "bf16-true": (2, 2),
    "16-true": (2, 2),
    "64-true": (8, 8),
}
_TIERS = {None: Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


def states_of(
    numel: int,
    *,
    stage: int,
    ranks: int,
    precision: str = "32-true",
    offload: Offload | None = None,
    replicate_size: int = 1,
    state_tensors: int = 2,
    averages: int = 0,
) -> Mapping[str, int]:
    """Returns the bytes on each rank of `numel` parameters that all train, by category and tier as in memory reports.

    Buckets are left out, which do not grow with the model. So is all that does not grow with the number of parameters
    alone: at stage 3 the arena, which has room for the largest units; padding; parameters too small to be divided.

    Args:
        numel: parameters of the model. Under ``*-mixed`` all of them count as weights that autocast casts.
        stage: 0, 1, 2 or 3.
        ranks: number of ranks, over all replicas.
        precision: a key of `PRECISIONS`.
        offload: as given to `ZeroStrategy`.
        replicate_size: as given to `ZeroStrategy`.
        state_tensors: tensors of optimizer state for each parameter: two for Adam, one for momentum, none for SGD.
        averages: of all weights, as `ZeroEMA` keeps one. They rest where the masters do, and take 4 bytes or more.

    Raises:
        ValueError: where `replicate_size` does not divide `ranks`, or parameters are offloaded below stage 3.
    """
    if min(ranks, replicate_size) < 1 or ranks % replicate_size:
        raise ValueError(f"{ranks} ranks cannot be divided into {replicate_size} replicas. Change one of the two.")
    partition, offload, shards = STAGES[stage], offload or Offload(), ranks // replicate_size
    if offload.parameters is not None and not partition.parameter:
        raise ValueError(f"Parameters are whole on every rank at stage {stage}: offload them at stage 3.")
    declared, resting = PRECISIONS[precision]
    offloaded = round(numel * offload.fraction) if offload.optimizer is not None else 0
    parameter_tier = _TIERS[offload.parameters]
    states: Counter[str] = Counter()

    def add(category: Category, tier: Tier, elements: int, itemsize: int, is_divided: bool) -> None:
        states[category_in(category, tier)] += itemsize * math.ceil(elements / (shards if is_divided else 1))

    add(Category.PARAMETER, parameter_tier, numel, resting, partition.parameter)
    for elements, tier in ((offloaded, _TIERS[offload.optimizer]), (numel - offloaded, Tier.DEVICE)):
        gradient_tier = tier if partition.gradient else Tier.DEVICE
        add(Category.GRADIENT, gradient_tier, elements, max(declared, 4), partition.gradient)
        if resting != declared or tier is not parameter_tier:
            add(Category.MASTER, tier, elements, declared, partition.optimizer)
        narrow = offload.state_torch_dtype if tier is not Tier.DEVICE else None
        itemsize = declared if narrow is None else narrow.itemsize
        add(Category.OPTIMIZER_STATE, tier, elements, state_tensors * itemsize, partition.optimizer)
        add(Category.AVERAGE, tier, elements, averages * max(declared, 4), partition.optimizer)
    return {category: nbytes for category, nbytes in states.items() if nbytes}


def states_under_ddp(
    numel: int, *, precision: str = "32-true", state_tensors: int = 2, averages: int = 0
) -> Mapping[str, int]:
    """Returns the bytes on each rank under Lightning's `ddp`, which divides nothing. Its buckets are a second copy
    of all gradients, and an average a second one of the model."""
    declared, _ = PRECISIONS[precision]
    copies = {Category.PARAMETER: 1, Category.GRADIENT: 1, Category.OPTIMIZER_STATE: state_tensors, Category.BUCKET: 1}
    copies |= {Category.AVERAGE: averages} if averages else {}
    return {category: count * declared * numel for category, count in copies.items()}
