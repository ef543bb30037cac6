"""Ranks that something else than torchrun has started train as any."""

from pathlib import Path
from typing import Any

import pytest

import launch_jobs
from test_left import differing


@pytest.fixture(scope="module")
def under_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By "fork": under DDP the ranks that "forkserver" starts on CPUs write to one memory, and train wrongly."""
    return launch_jobs.start_ranks_and_go_on("fork", None, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize(("method", "stage"), [("fork", 1), ("forkserver", 2), ("forkserver", 3)])
def test_a_process_that_starts_its_ranks_goes_on_with_what_they_trained(
    method: str, stage: int, under_ddp: dict[str, Any], tmp_path: Path
) -> None:
    """Ranks that are spawned import everything anew, which takes too long for a test."""
    found = launch_jobs.start_ranks_and_go_on(method, stage, tmp_path)
    assert (tmp_path / "after.ckpt").is_dir()
    assert differing(found, under_ddp) == []
