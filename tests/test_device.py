"""The engine on a device with streams: the CPU's bits, no race, and no wait of the host that is not named here.

The device is the simulated one (`sim`), whose streams run as late as a device may, or side streams at once. On it every
access that no wait orders is an error, so each of these tests is also one of all waits on its way.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sim
import sim_jobs
from compare import differing
from cover import name_of, pairwise
from lightning_zero.config import Offload
from ranks import RankPool

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(bool(sim.WHY_NOT), reason=sim.WHY_NOT)


@pytest.fixture(scope="module")
def process() -> Iterator[RankPool]:
    """A process of its own, in which torch knows the simulated device."""
    pool = RankPool(1)
    yield pool
    pool.close()


def offload_of(tier: str, stage: int, folder: Path) -> Offload | None:
    match tier:
        case "host":
            return Offload("cpu")
        case "host, and parameters":
            return Offload("cpu", parameters="cpu" if stage == 3 else None)
        case "disk":
            return Offload("nvme", path=folder)
    return None


CASES = pairwise(
    [0, 1, 2, 3],
    ["device", "host", "host, and parameters", "disk"],
    ["32-true", "bf16-mixed", "16-mixed"],
    [False, True],
    [1, 2, 4],
    [1, 2],
    ["LATE", "SIDES_AT_ONCE"],
)


@pytest.mark.parametrize(("stage", "tier", "precision", "clips", "ranks", "micro", "policy"), CASES, ids=name_of)
def test_a_training_has_the_cpus_bits(
    stage: int, tier: str, precision: str, clips: bool, ranks: int, micro: int, policy: str, process: RankPool,
    tmp_path: Path,
) -> None:  # fmt: skip
    start = sim_jobs.tower()
    setting: dict[str, Any] = {"stage": stage, "precision": precision, "clips": clips, "micro": micro}
    setting["offload"] = offload_of(tier, stage, tmp_path)
    (found,) = process.run(sim_jobs.on_sim, policy, sim_jobs.train_on_ranks, ranks, start, **setting)
    expected = sim_jobs.train_on_ranks(CPU, ranks, start, **setting)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert differing(mine["weights"], theirs["weights"]) == []
