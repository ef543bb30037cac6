"""Checkpoints that the version before the rooms wrote load, and go on with the same bits.

``tests/data/before_rooms`` holds checkpoints of `checkpoint_jobs.Everything` after an epoch, and beside them the same
states as Lightning's single files, from which ddp goes on: the expectation is computed where the test runs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_jobs
from lightning_zero import verify
from ranks import RankPool
from test_engine import assert_same_bits

SAVED = Path(__file__).parent / "data" / "before_rooms"
DDP = "ddp_find_unused_parameters_true"


def go_on(ranks: RankPool, strategy: Any, path: Path, precision: str) -> dict[str, Any]:
    return ranks.run(checkpoint_jobs.fit, strategy, ranks.world, 2, resume=path, precision=precision)[0]


@pytest.mark.parametrize("folder", sorted(path.name for path in SAVED.iterdir() if path.is_dir()))
def test_a_checkpoint_of_the_version_before_is_whole(folder: str) -> None:
    assert verify(SAVED / folder) == []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("folder", "file", "world", "precision"),
    [
        ("stage-0", "two-ranks", 2, "32-true"),
        ("stage-1", "two-ranks", 2, "32-true"),
        ("stage-2", "two-ranks", 2, "32-true"),
        ("stage-3", "two-ranks", 2, "32-true"),
        ("stage-2-bf16-mixed", "two-ranks-bf16-mixed", 2, "bf16-mixed"),
        ("stage-3-bf16-mixed", "two-ranks-bf16-mixed", 2, "bf16-mixed"),
        ("stage-3-three-ranks", "three-ranks", 2, "32-true"),
    ],
)
def test_a_checkpoint_of_the_version_before_goes_on_with_the_same_bits(
    folder: str, file: str, world: int, precision: str, stage: int, pool_of: Any, tmp_path: Path
) -> None:
    found = go_on(pool_of(world), {"stage": stage}, SAVED / folder, precision)
    expected = go_on(pool_of(world), DDP, SAVED / f"{file}.pt", precision)
    assert len(found["losses"]) == checkpoint_jobs.STEPS
    assert found["losses"] == expected["losses"]
    assert found["step"] == 2 * checkpoint_jobs.STEPS
    assert_same_bits(found["weights"], expected["weights"])


def test_weights_of_the_version_before_load_in_a_plain_process() -> None:
    model = checkpoint_jobs.Everything.load_from_checkpoint(SAVED / "stage-3-weights-only", map_location="cpu")
    expected = torch.load(SAVED / "two-ranks.pt", weights_only=False)["state_dict"]
    assert_same_bits(dict(model.state_dict()), expected)
