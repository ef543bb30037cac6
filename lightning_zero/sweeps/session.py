"""`run_in_session`: runs a process in a session of its own, passes signals on to it, and kills all that it started.
`alone_in`: in a folder that no other sweep uses meanwhile."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

TAIL_LINES = 60  # enough for two chained tracebacks through Lightning
GRACE_S = 10.0  # seconds for a job's processes to end by themselves, after an interrupt or the end of rank 0


class End(NamedTuple):
    """How a process ended."""

    code: int  # exit code; -N when signal N killed the process
    stderr_tail: str

    def describe(self) -> str:
        if self.code < 0:
            return f"Rank 0 was killed by {signal.Signals(-self.code).name}."
        return f"Rank 0 exited with {self.code}."


def run_in_session(command: Sequence[str], environment: Mapping[str, str], grace_s: float = GRACE_S) -> End:
    """Runs `command` in a session of its own, and kills what is left of the session when the command ends.

    After an exit code of 0, the other processes of the session have `grace_s` seconds to end by themselves.
    """
    process = echo = None
    last: deque[bytes] = deque(maxlen=TAIL_LINES)
    try:
        with _signals_deferred():  # a signal between fork and assignment would leave the job running
            process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE)
            echo = threading.Thread(target=_echo, args=(process.stderr, last))
            echo.start()
        if process.wait() == 0:
            _await_session(process.pid, grace_s)
    except BaseException:  # pass it on: the terminal's Ctrl-C, or our SIGTERM, does not reach another session
        if process is not None:
            _signal_session(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        raise
    finally:
        if process is not None:
            _signal_session(process.pid, signal.SIGKILL)
            process.wait()
        if echo is not None:
            echo.join()  # its pipe ends with the last process of the session
    return End(process.returncode, b"".join(last).decode(errors="replace").strip())


def _echo(stream: IO[bytes], last: deque[bytes]) -> None:
    """Copies a stream to our stderr, and keeps its last lines."""
    with stream:
        for line in stream:
            last.append(line)
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()


def _signal_session(leader: int, number: signal.Signals) -> None:
    # All processes of the session (the ranks, and their data loaders' workers) are in its one process group.
    with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
        os.killpg(leader, number)


def _await_session(leader: int, seconds: float) -> None:
    """Waits until the session has no process left, but not longer than so many seconds."""
    end = time.monotonic() + seconds
    with suppress(ProcessLookupError, PermissionError):  # raised when no process is left
        while time.monotonic() < end:
            os.killpg(leader, 0)
            time.sleep(0.05)


@contextmanager
def alone_in(folder: Path, when_taken: Callable[[], None]) -> Iterator[None]:
    """Holds `folder`; calls `when_taken` first and waits where another process does. It is free when its holder ends,
    however that ends: the lock is the system's, on the folder itself, and leaves no file."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without such locks: sweeps there know nothing of each other
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                when_taken()
                fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def sigterm_as_exit() -> AbstractContextManager[None]:
    """Has SIGTERM raise SystemExit inside, so that a running job is ended too."""
    return _handling({signal.SIGTERM}, lambda number, _: sys.exit(128 + number))


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Delivers SIGINT and SIGTERM after the block instead of inside it."""
    pending: list[int] = []
    with _handling({signal.SIGINT, signal.SIGTERM}, lambda number, _: pending.append(number)):
        yield
    for number in pending:
        signal.raise_signal(number)


@contextmanager
def _handling(numbers: set[signal.Signals], handler: Callable[[int, Any], Any]) -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()  # only this thread may set handlers
    previous = {number: signal.signal(number, handler) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
