"""Processes that end with their session."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import warm
from lightning_zero.sweeps.session import TAIL_LINES, alone_in, run_in_session, sigterm_as_exit
from opened import opened
from ranks import AT_ONCE

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


def test_what_a_failed_job_has_left_is_not_waited_for():
    fails = "import subprocess, sys; subprocess.Popen(['sleep', '600']); sys.exit(3)"
    before = time.monotonic()
    assert run_in_session([sys.executable, "-S", "-c", fails], os.environ, grace_s=2 * AT_ONCE).code == 3
    assert time.monotonic() - before < AT_ONCE


def test_an_interrupted_sweep_interrupts_its_job_and_lets_it_end_by_itself(tmp_path):
    pid_file, saved = tmp_path / "pid", tmp_path / "saved"
    job = f"""
import os, time, pathlib
try:
    pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(0.5)
    pathlib.Path({str(saved)!r}).touch()
"""
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
    assert saved.exists()


@pytest.fixture
def interrupts_raise():
    """Also where the tests run in the background of a shell, which has them ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_raise")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("ignores", [False, True])
def test_a_signal_that_comes_as_a_job_starts_ends_it_once_it_has_started(ignores, number, monkeypatch):
    """Also a job that takes no notice of an interrupt."""
    started = []
    popen = subprocess.Popen

    def interrupted(*args, **kwargs):
        signal.raise_signal(number)
        before = signal.getsignal(signal.SIGINT)
        if ignores:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a process hands on to those it starts
        started.append(popen(*args, **kwargs))
        signal.signal(signal.SIGINT, before)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises((SystemExit, KeyboardInterrupt)), sigterm_as_exit():
        run_in_session([sys.executable, "-S", "-c", "import time; time.sleep(20)"], os.environ, grace_s=0.1)
    assert started[0].returncode  # of the signal; or an error, where Python was about to start
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_a_job_may_run_beside_the_main_thread():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_in_session, [sys.executable, "-S", "-c", ""], os.environ).result().code == 0


def test_what_a_job_writes_to_stderr_is_passed_on_and_its_last_lines_are_kept(monkeypatch):
    class Slow(io.StringIO):
        def write(self, text):
            time.sleep(0.01)
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", Slow())
    writes = "import os; os.write(2, b''.join(b'line %d \\xff\\n' % number for number in range(70)))"
    end = run_in_session([sys.executable, "-S", "-c", writes], os.environ)
    lines = [f"line {number} \ufffd" for number in range(70)]
    assert sys.stderr.getvalue().splitlines() == lines
    assert end.stderr_tail == "\n".join(lines[-TAIL_LINES:])


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
    folder = tmp_path / "sweep" / "job"
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
