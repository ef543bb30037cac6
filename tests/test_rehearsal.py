"""What a rehearsal says of a training is what that training takes, to the byte."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rehearsal_jobs
from lightning_zero.rehearsal.memory import Phase
from lightning_zero.rehearsal.rehearsal import Rehearsal, rehearse
from ranks import RankPool

UNITS = {"units": "modules"}  # a small model stays whole at stage 3 otherwise

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
    for rank in {0, ranks - 1}:
        real = found[rank]
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


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (4, 2), (4, 3)])
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
