"""Blocks that recompute: the bits of no checkpointing, and the bytes that were promised."""

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import activation_jobs as jobs
from activation_jobs import Adapted, Awkward, Layer
from compare import assert_same_bits
from lightning_zero import ActivationCheckpointing, Offload, ZeroStrategy
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.recompute import Recompute
from lightning_zero.shards.offload import Machine
from lightning_zero.tiers.activations import ActivationStore
from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from lightning_zero.wire.threads import ThreadWorld
from models import seeded
from ranks import RankPool
from unit_jobs import on_engine, on_one_device, state_of

STAGES = [0, 1, 2, 3]
APART = Machine(host_is_apart=True)
HERE = Place(torch.device("cpu"))
HOST = Place(torch.device("cpu"), Tier.HOST)
KEPT = Category.ACTIVATION_CHECKPOINT

POLICIES = {
    "recompute": {},
    "offload": {"offload": True},
    "contiguous": {"contiguous": True},
    "offload contiguous": {"offload": True, "contiguous": True},
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
each_stage = pytest.mark.parametrize("stage", STAGES)


def batch(step: int = 0, rows: int = 16, width: int = 8) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


def train(model: Any, engine: Engine | None, optimizer: Any, comm: Comm | None, *, seed: int = 5) -> dict[str, Tensor]:
    """Losses, weights and buffers, and what is drawn after each step."""
    seen = {}
    if comm is None or comm.size == 1:  # ranks as threads share the random generator
        torch.manual_seed(seed)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        seen[f"loss {step}"] = loss.detach()
        if comm is None or comm.size == 1:
            seen[f"drawn {step}"] = torch.rand(1)
    return seen | state_of(model, engine)


# --- bits


@each_policy
@each_stage
def test_recomputation_changes_no_bit(stage: int, policy: dict[str, Any]) -> None:
    """Dropout masks, statistics of BatchNorm, other buffers, and the random state after each step."""
    start = seeded(Awkward)
    expected = on_one_device(start, train)
    options = {"activation_checkpointing": ActivationCheckpointing(**policy), "machine": APART}
    (found,) = on_engine(start, train, stage, world=1, **options)
    assert_same_bits(found, expected)


@each_policy
@each_stage
def test_recomputation_changes_no_bit_on_two_ranks(stage: int, policy: dict[str, Any]) -> None:
    start = seeded(lambda: Awkward(dropout=0.0))
    checkpointing = ActivationCheckpointing(**policy)
    for options in ({}, {"units": ("Layer",)}, {"offload": Offload(optimizer="cpu")}, {"step_in_backward": stage > 1}):
        settings: dict[str, Any] = {"machine": APART, "bucket_bytes": 2**10, "unit_classes": options.pop("units", None)}
        settings |= options
        expected = on_engine(start, train, stage, **settings)
        for found, as_ever in zip(
            on_engine(start, train, stage, activation_checkpointing=checkpointing, **settings), expected, strict=True
        ):
            assert_same_bits(found, as_ever)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@each_stage
def test_a_fit_has_the_bits_of_one_that_keeps_all(stage: int, precision: str, two_ranks: RankPool) -> None:
    """Under Trainer, with dropout, clipping, accumulation and validation."""
    for accumulation in ("sharded", "local"):
        given = {"stage": stage, "accumulation": accumulation}
        expected = two_ranks.run(jobs.fit, given, precision)
        for policy in ({}, {"offload": True, "contiguous": True}):
            found = two_ranks.run(jobs.fit, {**given, "activation_checkpointing": policy}, precision)
            for mine, theirs in zip(found, expected, strict=True):
                assert_same_bits(mine.pop("state"), theirs["state"])
                assert mine == {name: value for name, value in theirs.items() if name != "state"}


@pytest.mark.parametrize("kind", ["frozen", "adapted", "tied"])
@pytest.mark.parametrize("stage", [2, 3])
def test_r28_frozen_parts_adapters_and_tied_weights_train_as_without(stage: int, kind: str) -> None:
    """Activation checkpointing beside stage 3: no `CheckpointError`, every bit of no checkpointing."""
    start = seeded(lambda: Adapted(kind))
    expected = on_one_device(start, train)
    for policy in POLICIES.values():
        for units in (None, ("Layer",), ("Adapted",), ("Linear",)):
            options = {"activation_checkpointing": ActivationCheckpointing(**policy), "machine": APART}
            (alone,) = on_engine(start, train, stage, world=1, **options)
            assert_same_bits(alone, {name: alone[name] if "drawn" in name else value for name, value in expected.items()})
            if units == ("Adapted",):
                continue
            ranks = on_engine(start, train, stage, unit_classes=units, **options)
            assert_same_bits(ranks[0], {name: value for name, value in expected.items() if "drawn" not in name})
