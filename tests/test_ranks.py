"""The ranks that tests run on."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from lightning_zero.wire.comm import Comm
from older import NO_NAMES_OF_THREADS
from ranks import AT_ONCE, RankPool, free_port, run_alone
from thread_world import ThreadWorld

SESSION = """
import time
from multiprocessing import forkserver
from ranks import CONTEXT, RankPool

if __name__ == "__main__":
    CONTEXT.set_forkserver_preload(["torch"])  # all that they need here
    pool = RankPool(2)
    pool.run(int)  # they are up
    print(forkserver._forkserver._forkserver_pid, *[process.pid for process in pool.processes], flush=True)
    time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_ranks_end_with_a_session_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "session.py").write_text(SESSION)
    (tmp_path / "frugal.py").touch()  # found first: these ranks train nothing, and need no Lightning
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, tmp_path / "session.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as session:
        assert session.stdout is not None
        started = [int(pid) for pid in session.stdout.readline().split()]  # the server, and its ranks
        assert len(started) == 3
        assert all(map(is_alive, started))
        session.send_signal(signal.SIGKILL)
    until = time.monotonic() + 60
    while any(map(is_alive, started)):
        assert time.monotonic() < until
        time.sleep(0.1)


def niceness_of_receivers() -> list[int]:
    dist.init_process_group("gloo")
    threads = [thread for thread in Path("/proc/self/task").iterdir() if "gloo_tcp" in (thread / "comm").read_text()]
    return [os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in threads]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such priorities")
@pytest.mark.skipif(bool(NO_NAMES_OF_THREADS), reason=NO_NAMES_OF_THREADS)
def test_threads_that_receive_leave_the_cores_to_ranks() -> None:
    (first, second), errors = run_alone(2, niceness_of_receivers)
    assert errors == [None, None]
    assert set(first) == set(second) == {19}


def speak() -> None:
    print("on stdout")
    print("on stderr", file=sys.stderr)
    os.system("echo by a child")


def test_what_ranks_print_is_the_output_of_the_test(two_ranks: RankPool, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        two_ranks.run(speak)
        said = capfd.readouterr()
        assert [said.out.count(line) for line in ("on stdout", "on stderr", "by a child")] == [2, 2, 2]
        assert said.err == ""


def ask_for_random_states_among_garbage(_: Comm) -> None:
    if hasattr(os, "sched_setaffinity"):  # on one core a thread is seldom interrupted there
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    for _ in range(4000):
        parameter: Any = torch.nn.Parameter(torch.ones(2))
        parameter.register_post_accumulate_grad_hook(lambda _: None)
        parameter.itself = parameter
        torch.get_rng_state()


def collect_often() -> None:
    gc.set_threshold(20)
    ThreadWorld(2).run(ask_for_random_states_among_garbage)


def test_ranks_that_are_threads_do_not_stand_still_where_garbage_is_collected() -> None:
    assert run_alone(1, collect_often, timeout=AT_ONCE) == ([None], [None])


def draw_and_leave_something_behind() -> tuple[float, bool]:
    found = float(torch.rand(1)), "LEFT_BEHIND" in os.environ
    os.environ["LEFT_BEHIND"] = "by an earlier job"
    return found


def test_a_job_finds_random_numbers_and_the_environment_as_the_first_one_did(pool_of: Any) -> None:
    first, second = (pool_of(1).run(draw_and_leave_something_behind) for _ in range(2))
    assert first == second
    assert not first[0][1]


def test_a_port_is_none_that_the_system_gives_to_another_process() -> None:
    ports = [free_port() for _ in range(3)]
    assert len(set(ports)) == 3
    assert max(ports) < 32_768


def test_examples_are_the_same_in_every_run_and_have_no_time_limit() -> None:
    assert settings().derandomize
    assert settings().deadline is None


@pytest.mark.usefixtures("ranks_in_turn")
def test_of_ranks_in_turn_one_runs_until_it_waits_for_another() -> None:
    running: list[int] = []
    together: list[list[int]] = []

    def rank_main(comm: Comm) -> None:
        for number in range(3):
            running.append(comm.rank)
            time.sleep(0.01)  # lets other threads run
            together.append([*running])
            running.remove(comm.rank)
            comm.all_reduce(torch.ones(1), f"sum {number}")

    ThreadWorld(3).run(rank_main)
    assert sorted(together) == sorted([[rank] for rank in range(3)] * 3)
