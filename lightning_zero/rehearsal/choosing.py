"""What ``ZeroStrategy(stage="auto")`` becomes: the fastest of the strategies that fit, by rehearsals."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero.pl.automatic import UNKNOWN
from lightning_zero.pl.ema import ZeroEMA
from lightning_zero.pl.lightning_private import train_source
from lightning_zero.pl.table import sized
from lightning_zero.rehearsal.hollow import NeedsValuesError
from lightning_zero.rehearsal.planning import MARGIN, Plan, plan
from lightning_zero.rehearsal.rehearsal import isolated
from lightning_zero.tiers.host_memory import available_host_bytes
from lightning_zero.torch_private import tree_map

# Arguments of a Trainer that change a step.
OF_TRAINER = ("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
COMPUTED = 8  # times the bytes of parameters: what a step takes of the host, about, and as much again


def choose(trainer: "pl.Trainer", fixed: Mapping[str, Any], **means: Any) -> tuple[dict[str, Any], str]:
    """Plans for the module and the first batch of a Trainer whose fit begins. Returns arguments of its strategy, and a
    line that tells why these.

    Args:
        trainer: whose data and module are set up.
        fixed: arguments of the strategy that the user has written.
        means: what each rank has, as `plan` takes it; bytes may be `UNKNOWN`.

    Raises:
        ValueError: if nothing fits, or there is no batch to rehearse with.
    """
    if trainer.accumulate_grad_batches > 1 and "accumulation" not in fixed:
        fixed = {**fixed, "accumulation": "local"}  # DDP's bits, which sharded gradients have not (docs/numerics.md)
    setting: dict[str, Any] = {name: getattr(trainer, name) for name in OF_TRAINER}
    setting["callbacks"] = [one for one in trainer.callbacks if isinstance(one, ZeroEMA)]  # type: ignore[attr-defined]
    with isolated():
        loaders = train_source(trainer).dataloader()
    setting |= {"fixed": fixed, "thorough": False, "divides": False}
    find = partial(plan, trainer.lightning_module, batch_from(loaders), **means, **setting)
    try:
        found = find()
    except NeedsValuesError as error:
        if not _can_compute(trainer.lightning_module):
            raise ValueError(f"{error} This machine has too little memory for a step of the model.") from error
        found = find(on_cpu=True)
    return {**fixed, **found.best.strategy}, _told(found)


def _can_compute(module: "pl.LightningModule") -> bool:
    """Whether the host has the memory for a step of one rank."""
    nbytes, free = sum(parameter.nbytes for parameter in module.parameters()), available_host_bytes()
    return nbytes > 0 and (free is None or COMPUTED * nbytes < free)


def _told(found: Plan) -> str:
    best = found.best
    faster = len(found.faster(best))
    peak = sized(best.rehearsal.peak.nbytes)
    room = "" if found.device_bytes == UNKNOWN else f" of the {sized(found.device_bytes)} that are free"
    others = f"; {faster} faster {'one does' if faster == 1 else 'ones do'} not fit" if faster else ""
    return f'stage="auto" is {best}: {peak}{room} on each rank at most, and {MARGIN:.0%} left over{others}.'


def batch_from(loaders: Any) -> Any:
    """Returns a batch such as training will get from data loaders. Neither their samplers nor their workers are asked
    for it, so that training draws the same batches as without it.

    Raises:
        ValueError: for data that can be read only in its order.
    """
    with isolated():
        return tree_map(_batch_of, loaders.iterables if isinstance(loaders, CombinedLoader) else loaders)


def _batch_of(loader: Any) -> Any:
    dataset = getattr(loader, "dataset", None)
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset) or size is None:
        raise ValueError(
            f"It is rehearsed with a batch, and the training data ({type(loader).__name__}) may give each one once. "
            "Find the stage with `lightning-zero plan MODEL --batch SHAPES`."
        )
    items = [dataset[index] for index in range(min(size, len(dataset)))]  # type: ignore[index, arg-type]
    return loader.collate_fn(items)
