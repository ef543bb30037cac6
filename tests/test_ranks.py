"""The ranks that tests run on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SESSION = """
import time
from ranks import RankPool

if __name__ == "__main__":
    pool = RankPool(2)
    print(*[process.pid for process in pool.processes], flush=True)
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
        ranks = [int(pid) for pid in session.stdout.readline().split()]
        assert len(ranks) == 2
        assert all(is_alive(rank) for rank in ranks)
        session.send_signal(signal.SIGKILL)
    until = time.monotonic() + 60
    while any(is_alive(rank) for rank in ranks):
        assert time.monotonic() < until
        time.sleep(0.1)
