"""One rank alone may look at weights and gradients in any hook of Lightning; no number changes, and nobody waits."""

from pathlib import Path
from typing import Any

import pytest

import hook_jobs
from ranks import PATIENCE, RankPool

MANY_BUCKETS = {"wait_timeout": PATIENCE, "bucket_size_mb": 0.0006}


# At stage 3 every weight travels when it is read; at stages 1 and 2 those that are kept in two bytes, and gradients.
@pytest.mark.parametrize(
    ("stage", "precision", "places"),
    [
        (3, "32-true", [place for place in hook_jobs.PLACES if place.startswith("callback")]),
        (2, "bf16-mixed", [place for place in hook_jobs.PLACES if place.startswith("module")][::2]),
        (1, "bf16-mixed", [place for place in hook_jobs.PLACES if place.startswith("module")][1::2]),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, list) else None,
)
def test_rank_0_may_look_in_every_hook(
    stage: int, precision: str, places: list[str], two_ranks: RankPool, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"stage": stage, **MANY_BUCKETS}
    first, second = two_ranks.run(hook_jobs.look_everywhere, given, places, tmp_path, precision=precision)
    assert first == second
    assert {place: found for place, found in first.items() if found != (None, True)} == {}
    assert len(first) > 0.9 * len(places)  # the rest is called in runs that resume
