"""Ranks that something else than torchrun has started train as any."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jobs
import launch_jobs
import warm
from ranks import RankPool, free_port
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
    assert (tmp_path / "after.ckpt").is_dir() == (stage > 1)
    assert differing(found, under_ddp) == []


def test_ranks_that_slurm_has_started_train_as_any(two_ranks: RankPool, tmp_path: Path) -> None:
    """Lightning knows them by the variables that srun sets, here by hand."""
    job = {"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    job |= {"SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}
    tasks = []
    with warm.starts():
        for rank in "01":
            command = [sys.executable, launch_jobs.__file__, "3", str(tmp_path / rank)]
            environment = {**os.environ, **job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
            streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            tasks.append(subprocess.Popen(command, env=environment, text=True, **streams))
    told = [task.communicate(timeout=600)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(told)
    expected = two_ranks.run(jobs.fit, {"stage": 3}, 2)
    assert [json.loads((tmp_path / rank).read_text()) for rank in "01"] == [found["losses"] for found in expected]
