"""What a rehearsal says is what real training takes, to the byte: every stage, tier and activation option meet.

On two ranks every activation option meets every tier at every stage. On one rank and on four, whose trainings take
longer, every two values of stage, tier and option do. Activations are parted among ranks that share layers, which
one rank has not.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rehearsal_jobs
from cover import covering
from ranks import RankPool
from test_rehearsal import UNITS, assert_rank_told

TIERS: dict[str, dict[str, str]] = {
    "on the device": {},
    "optimizer on the host": {"optimizer": "cpu"},
    "optimizer on disk": {"optimizer": "nvme"},
    "all on the host": {"optimizer": "cpu", "parameters": "cpu"},
    "all on disk": {"optimizer": "nvme", "parameters": "nvme"},
}
ACTIVATIONS: dict[str, dict[str, bool] | bool] = {
    "kept": False,
    "recomputed": True,
    "from the host": {"offload": True},
    "from one array": {"contiguous": True},
    "from parts": {"partition": True},
    "from parts on the host": {"partition": True, "offload": True},
    "from parts in one array": {"partition": True, "offload": True, "contiguous": True},
}


class Setting(NamedTuple):
    stage: int
    tier: str  # of `TIERS`
    kept: str  # of `ACTIVATIONS`: where inputs of blocks, or all activations, wait for backward

    def run(self, folder: Path) -> rehearsal_jobs.Run:
        """Returns the strategy that has it, and the module."""
        offload, kept = TIERS[self.tier], ACTIVATIONS[self.kept]
        strategy: dict[str, Any] = {"stage": self.stage, "activation_checkpointing": kept}
        if self.stage == 3:
            strategy |= UNITS
        if offload:
            strategy["offload"] = {**offload, **({"path": str(folder)} if "nvme" in offload.values() else {})}
        if not is_parted(self.kept):
            return rehearsal_jobs.Run(strategy, rehearsal_jobs.Small)
        return rehearsal_jobs.Run({**strategy, "tensor_parallel_size": 2}, rehearsal_jobs.SmallDivided)


def is_parted(kept: str) -> bool:
    return "parts" in kept


def clash(one: Any, other: Any) -> bool:
    """Whether a stage and a tier do not go together: parameters stay on the device below stage 3."""
    stage, tier = (one, other) if isinstance(one, int) else (other, one)
    return stage in (0, 1, 2) and "parameters" in TIERS.get(tier, {})


def every(kinds: Sequence[str]) -> list[Setting]:
    return [
        Setting(stage, tier, kept) for stage in range(4) for tier in TIERS if not clash(stage, tier) for kept in kinds
    ]


def every_pair(kinds: Sequence[str]) -> list[Setting]:
    return [Setting(*row) for row in covering([range(4), [*TIERS], [*kinds]], clash, lambda *_: True)]


SETTINGS = {
    1: every_pair([kept for kept in ACTIVATIONS if not is_parted(kept)]),
    2: every([*ACTIVATIONS]),
    4: every_pair([*ACTIVATIONS]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what rests on disk."""
    return tmp_path_factory.mktemp("disk")


@pytest.mark.parametrize(
    ("ranks", "setting"),
    [(ranks, setting) for ranks, settings in SETTINGS.items() for setting in settings],
    ids=lambda value: ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value} ranks",
)
def test_a_rehearsal_has_the_bytes_of_every_setting(
    ranks: int, setting: Setting, pool_of: Callable[[int], RankPool], folder: Path
) -> None:
    beside = [one for one in SETTINGS[ranks] if one.stage == setting.stage]  # trained in one job
    trained = pool_of(ranks).once(rehearsal_jobs.train_each, [one.run(folder) for one in beside], ranks)
    at, run = beside.index(setting), setting.run(folder)
    rank = at % ranks  # which has told it
    assert_rank_told(trained[rank][at], run.strategy, ranks, rank, make=run.make)
