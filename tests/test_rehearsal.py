"""What a rehearsal says of a training is what that training takes, to the byte."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rehearsal_jobs
from lightning_zero.rehearsal.memory import Phase
from lightning_zero.rehearsal.rehearsal import Rehearsal, rehearse
from ranks import RankPool

UNITS = {"units": "modules"}  # a small model stays whole at stage 3 otherwise

STATES = ["parameter", "gradient", "master", "optimizer state"]

LAST = 4 * rehearsal_jobs.WORDS * rehearsal_jobs.WIDTH // 2  # bytes of a rank's part of the embedding, of two


def rehearsed(strategy: dict[str, Any], ranks: int, rank: int = 0, **trainer: Any) -> Rehearsal:
    return rehearse(
        rehearsal_jobs.Model,
        rehearsal_jobs.batch_of,
        strategy,
        ranks=ranks,
        rank=rank,
        host_is_apart=False,
        **trainer,
    )


def assert_told(found: list[dict[str, Any]], strategy: dict[str, Any], ranks: int, **trainer: Any) -> None:
    for rank, real in enumerate(found):
        told = rehearsed(strategy, ranks, rank, **trainer)
        assert told.at_rest == real["at_rest"]
        assert told.sent == real["sent"]
        assert str(told.program) == real["program"]
        assert told.saved == real["saved"]
        for phase, moment in real["peaks"].items():
            if strategy.get("step_in_backward") and phase is Phase.STEP:
                # The wire still holds the average that it was the last to write.
                assert 0 <= moment.nbytes - told.peaks[phase].nbytes <= LAST, phase
            else:
                assert told.peaks[phase] == moment, phase


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_messages_and_program_are_those_of_real_ranks(
    ranks: int, stage: int, pool_of: Callable[[int], RankPool]
) -> None:
    strategy = {"stage": stage, **(UNITS if stage == 3 else {})}
    assert_told(pool_of(ranks).run(rehearsal_jobs.train, strategy, ranks), strategy, ranks)


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped": ({"stage": 2}, {"gradient_clip_val": 0.1}),
    "micro-batches": ({"stage": 3, **UNITS}, {"accumulate_grad_batches": 2}),
    "local micro-batches": ({"stage": 2, "accumulation": "local"}, {"accumulate_grad_batches": 2}),
    "two bytes": ({"stage": 3, **UNITS}, {"precision": "bf16-mixed"}),
    "small buckets": ({"stage": 1, "bucket_size_mb": 0.01}, {}),
    "optimizer on the host": ({"stage": 2, "offload": "cpu"}, {"precision": "bf16-mixed"}),
    "everything on disk": ({"stage": 3, **UNITS, "offload": {"optimizer": "nvme", "parameters": "nvme"}}, {}),
    "stepped in backward": ({"stage": 3, **UNITS, "step_in_backward": True}, {}),
    "recomputed": ({"stage": 3, **UNITS, "activation_checkpointing": True}, {}),
    "activations on the host": ({"stage": 2, "activation_checkpointing": {"offload": True}}, {}),
    "replicas": ({"stage": 3, **UNITS, "replicate_size": 2}, {}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_options_take_what_they_take_on_real_ranks(setting: str, two_ranks: RankPool, tmp_path: Path) -> None:
    strategy, trainer = SETTINGS[setting]
    if "nvme" in str(strategy):
        strategy = {**strategy, "offload": {**strategy["offload"], "path": str(tmp_path)}}
    assert_told(two_ranks.run(rehearsal_jobs.train, strategy, 2, **trainer), strategy, 2, **trainer)


class Drawn(L.LightningModule):
    """Layers of all kinds, some of them frozen."""

    def __init__(self, layers: list[tuple[str, int, bool]]) -> None:
        super().__init__()
        made: list[nn.Module] = [nn.Embedding(100, layers[0][1])]
        for (kind, width, frozen), (_, following, _) in zip(layers, [*layers[1:], layers[0]], strict=True):
            after = {"plain": nn.Identity(), "norm": nn.LayerNorm(following), "bias": nn.Linear(following, following)}
            block = nn.Sequential(nn.Linear(width, following, bias=False), after[kind])
            made.append(block.requires_grad_(not frozen))
        self.layers = nn.Sequential(*made)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.layers(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Frozen ones that an optimizer had would have room for gradients, too: they may train later.
        return torch.optim.AdamW(one for one in self.parameters() if one.requires_grad)


LAYERS = st.tuples(st.sampled_from(["plain", "norm", "bias"]), st.integers(100, 300), st.booleans())


@given(
    layers=st.lists(LAYERS, min_size=1, max_size=4),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    stage=st.sampled_from([1, 2, 3]),
    two_bytes=st.booleans(),
    reduces_two_bytes=st.booleans(),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_what_rests_falls_or_stays_from_stage_to_stage_and_with_twice_the_ranks(
    layers: list[tuple[str, int, bool]], ranks: int, stage: int, two_bytes: bool, reduces_two_bytes: bool
) -> None:
    """But for padding: a rank's part of each tensor is a multiple of 64 bytes in the dtype in which it rests."""

    def at_rest(stage: int, ranks: int) -> int:
        strategy = {"stage": stage, **(UNITS if stage == 3 else {})}
        if reduces_two_bytes:
            strategy["reduce_dtype"] = "bfloat16"
        precision = "bf16-mixed" if two_bytes else "32-true"
        told = rehearse(
            lambda: Drawn(layers), lambda: torch.arange(4), strategy, ranks=ranks, steps=1, precision=precision
        )
        return sum(told.at_rest.get(name, 0) for name in STATES)

    tensors = sum(1 for _ in Drawn(layers).parameters())
    padding = tensors * 2 * ranks * (64 // 2) * 16  # elements, and the most bytes that one has in all its states
    found = [at_rest(stage, ranks) for stage in range(4)]
    for before, after in itertools.pairwise(found):
        assert after <= before + padding
    assert at_rest(stage, 2 * ranks) <= found[stage] + padding
    if ranks > 1:
        assert found[3] < found[2] < found[1] < found[0]


def test_a_first_step_gathers_as_often_as_those_that_follow_a_plan() -> None:
    """Backward runs without gradients, as an evaluation does: a unit that it uses again begins no other batch."""
    first, last = (
        rehearse(rehearsal_jobs.Model, rehearsal_jobs.batch_of, {"stage": 3, **UNITS}, ranks=2, steps=steps)
        for steps in (1, 3)
    )
    assert first.sent["all_gather"].nbytes <= last.sent["all_gather"].nbytes
