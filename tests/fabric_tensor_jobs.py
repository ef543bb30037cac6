"""Loops written with Fabric that train tensor-parallel models, for tests/test_fabric_tensor.py."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fabric_jobs import fabric
from models import seeded
from tensor_jobs import Towers, parallelize, trainable, whole
from tensor_training_jobs import loader


def train(
    stage: int, world: int, tensor: int, *, clips: bool = False, drops: float = 0.0, save: Path | None = None,
    load: Path | None = None, module_first: bool = False, shuffle: bool = False, **strategy: Any,
) -> dict[str, Any]:  # fmt: skip
    """An epoch, from a checkpoint if there is one to load, and saved in the end."""
    made = fabric({"stage": stage, "tensor_parallel_size": tensor, **strategy}, world)
    towers = seeded(Towers, made.global_rank // tensor)  # all take rank 0's
    if tensor > 1:
        parallelize(towers, made.strategy.device_mesh["tensor_parallel"], sequence=True)
    torch.manual_seed(made.global_rank)
    optimizer: Any = torch.optim.AdamW(trainable(towers), lr=1e-2, eps=1e-3)
    model: Any
    if module_first:
        model = made.setup_module(towers)
        optimizer = made.setup_optimizers(optimizer)
    else:
        model, optimizer = made.setup(towers, optimizer)
    states = {"model": model, "optimizer": optimizer}
    if load is not None:
        made.load(load, states)
    told: dict[str, Any] = {"losses": [], "norms": [], "seen": []}
    for (tokens,) in made.setup_dataloaders(loader(world // tensor, shuffle=shuffle)):
        logits = F.dropout(model(tokens[:, :-1]), drops)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        made.backward(loss)
        if clips:
            told["norms"].append(float(made.clip_gradients(model, optimizer, max_norm=0.1)))
        optimizer.step()
        optimizer.zero_grad()
        told["losses"].append(loss.item())
        told["seen"].append(tokens)
    weights = {name: whole(values).clone() for name, values in model.module.state_dict().items()}
    if save is not None:
        made.save(save, states)
    made.strategy.teardown()
    return {**told, "seen": torch.cat(told["seen"]), "weights": weights}


def saves_a_copy_of_its_own(stage: int, world: int, path: Path, kind: str) -> dict[str, Any]:
    """Weights, which are saved as a dictionary of tensors that users have made, too."""
    made = fabric({"stage": stage, "tensor_parallel_size": 2, "checkpoint": {"format": kind}}, world)
    towers = seeded(Towers)
    parallelize(towers, made.strategy.device_mesh["tensor_parallel"], sequence=True)
    model, _ = made.setup(towers, torch.optim.AdamW(trainable(towers)))
    copies = {name: values.detach().clone() for name, values in model.module.state_dict().items()}
    made.save(path, {"model": model, "copies": copies})
    weights = {name: whole(values).clone() for name, values in copies.items()}
    made.strategy.teardown()
    return weights


def seed_of_workers(world: int, tensor: int) -> int:
    """By which rank Lightning is to seed the workers of a loader."""
    made = fabric({"stage": 2, "tensor_parallel_size": tensor}, world)
    made.seed_everything(1, workers=True, verbose=False)
    try:
        batches: Any = made.setup_dataloaders(loader(world // tensor))
        return batches._dataloader.worker_init_fn.keywords["rank"]
    finally:
        del os.environ["PL_SEED_WORKERS"]
        made.strategy.teardown()


def told_of_a_model_that_nobody_has_parallelized() -> list[str]:
    made = fabric({"stage": 2, "tensor_parallel_size": 2}, 2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made.setup(model := nn.Linear(2, 2), torch.optim.AdamW(model.parameters()))
    made.strategy.teardown()
    return [str(one.message) for one in warned if "tensor_parallel_size" in str(one.message)]
