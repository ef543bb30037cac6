"""torchrun starts a job again that lost a rank or a machine: it goes on from its last checkpoint, by itself."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import checkpoint_jobs
import warm
from ranks import RankPool, free_port

ROOT = Path(__file__).parents[1]
APP = str(ROOT / "tests" / "elastic_app.py")


def slowness() -> float:
    """How many times longer than on an idle machine a process computes here, now."""
    began, until = time.monotonic(), time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    return (time.monotonic() - began) / 0.1


def quickly() -> str:
    """A machine that is gone is noticed by its silence; torchrun's own patience, 15 s, is for real clusters.

    Where cores are busy, one that lives may be silent for three seconds, too. The other takes it for gone, and ranks
    are started once more than the test is about, which took a minute where each went on alone (now ten seconds, see
    `elastic_app`). So on a busy machine the silence is longer. Without such restarts the test takes 15 s.
    """
    silence = max(1, round(slowness() / 2))  # s, three times; beside lanes of the tests it is 1
    timeouts = f"last_call_timeout={2 * silence},keep_alive_interval={silence},keep_alive_max_attempt=3"
    return f"--rdzv-conf={timeouts},join_timeout=300"


def start(folder: Path, who: str, *options: str, **variables: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", *options, APP, str(folder), who]
    # Without the second, ranks of a second attempt may connect to ranks of the first (ZeroStrategy says so).
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **variables}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with warm.starts():
        return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **streams)


def losses_in(folder: Path) -> dict[int, float]:
    """By step; of a step that was taken twice, the later."""
    lines = [line.split() for line in (folder / "losses.txt").read_text().splitlines()]
    return {int(step): float(loss) for step, _, loss in lines}


def worlds_in(folder: Path) -> list[str]:
    return [line.split()[1] for line in (folder / "losses.txt").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(two_ranks: RankPool) -> dict[int, float]:
    losses = two_ranks.run(checkpoint_jobs.logged_losses, {"stage": 2}, 2, 3)[0]
    return dict(enumerate(losses, start=1))


def test_r44_a_killed_rank_is_started_again_and_the_losses_are_the_same(
    undisturbed: dict[int, float], tmp_path: Path
) -> None:
    job = start(tmp_path, "rank", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    output, _ = job.communicate(timeout=600)
    assert job.returncode == 0, output
    assert (tmp_path / "killed").exists()
    assert losses_in(tmp_path) == undisturbed
    assert len(worlds_in(tmp_path)) == 15 + 2  # steps 6 and 7 were taken twice


def test_r44_a_job_that_lost_a_machine_goes_on_with_fewer_ranks(undisturbed: dict[int, float], tmp_path: Path) -> None:
    options = (
        *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=10", "--rdzv-backend=c10d"),
        f"--rdzv-endpoint=localhost:{free_port()}",
    )
    conf = quickly()
    machines = [  # the first holds the rendezvous, as the address of a cluster does, and stays
        start(tmp_path, "machine", *options, f"{conf},is_host=true"),
        start(tmp_path, "machine", *options, f"{conf},is_host=false", DOOMED="yes"),
    ]
    try:
        ended = [machine.communicate(timeout=600)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    codes = sorted(machine.returncode for machine in machines)
    assert codes == [-9, 0], "\n".join(ended)
    losses = losses_in(tmp_path)
    assert losses.keys() == undisturbed.keys()
    assert list(losses.values()) == pytest.approx(list(undisturbed.values()), rel=1e-6)
    assert worlds_in(tmp_path)[-10:] == ["1"] * 10  # from the checkpoint of step 5 on
