"""Processes that end with their session."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from lightning_zero.sweeps.session import alone_in, run_in_session, sigterm_as_exit
from opened import opened

ROOT = Path(__file__).resolve().parents[1]


def test_r59_twenty_jobs_leave_no_files_threads_or_processes(tmp_path):
    # Each job leaves a child behind that would outlive it.
    environment = {"PATH": "/bin:/usr/bin", "MARK": str(tmp_path)}
    leaky = f"import subprocess; subprocess.Popen(['sleep', '600'], env={environment!r})"
    before = opened()
    for _ in range(20):
        assert run_in_session([sys.executable, "-S", "-c", leaky], os.environ, grace_s=0.05).code == 0
    until = time.monotonic() + 30.0  # a thread that has nothing more to do takes its time on a busy machine
    while opened() - before and time.monotonic() < until:
        time.sleep(0.05)
    assert sorted(opened() - before) == []
    assert processes_with_environment(f"MARK={tmp_path}") == []


def test_a_rank_that_is_a_little_later_than_rank_zero_is_not_killed(tmp_path):
    late = f"sleep 1; touch {tmp_path}/done"
    rank_zero = f"import subprocess; subprocess.Popen(['sh', '-c', {late!r}])"
    assert run_in_session([sys.executable, "-c", rank_zero], os.environ).code == 0
    assert (tmp_path / "done").exists()


def test_an_interrupted_sweep_ends_its_job_too(tmp_path):
    pid_file = tmp_path / "pid"
    job = f"import os, time, pathlib; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    sweeping = tmp_path / "sweeping.py"
    sweeping.write_text(
        "import os, sys; from lightning_zero.sweeps import session\n"
        "with session.sigterm_as_exit(): session.run_in_session([sys.executable, '-c', sys.argv[1]], os.environ)"
    )
    with warm.starts():
        parent = subprocess.Popen([sys.executable, sweeping, job], env={**os.environ, "PYTHONPATH": str(ROOT)})
    pid = int(next(text for text in polled(lambda: pid_file.read_text() if pid_file.exists() else "") if text))
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(30) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{pid}").exists()


def test_a_signal_that_comes_as_a_job_starts_ends_it_once_it_has_started(monkeypatch):
    started = []
    popen = subprocess.Popen

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        started.append(popen(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(SystemExit), sigterm_as_exit():
        run_in_session([sys.executable, "-S", "-c", "import time; time.sleep(20)"], os.environ, grace_s=0.1)
    assert started[0].returncode < 0


def processes_with_environment(entry: str) -> list[int]:
    def environment(path: Path) -> str:
        try:
            return (path / "environ").read_bytes().decode(errors="replace")
        except OSError:  # ended meanwhile, or not ours
            return ""

    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if entry in environment(path)]


def polled(question, seconds: float = 60) -> Iterator:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield question()
        time.sleep(0.05)
    raise TimeoutError(f"no answer in {seconds} s")


def test_a_folder_is_free_as_soon_as_its_holder_is_killed_and_keeps_no_file_of_it(tmp_path):
    folder = tmp_path / "job"
    holds = (
        "import time; from pathlib import Path; from lightning_zero.sweeps.session import alone_in\n"
        f"with alone_in(Path({str(folder)!r}), print): print('held', flush=True); time.sleep(600)"
    )
    with warm.starts(), subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        waited = []
        with alone_in(folder, lambda: waited.append(holder.kill())):
            assert waited == [None], "it was held until its holder was killed"
    with alone_in(folder, lambda: pytest.fail("it is free again")):
        assert list(folder.iterdir()) == []
