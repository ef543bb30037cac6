"""The ranks that tests run on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
