"""Processes in a session of their own: what they start is killed with them, and a signal to us reaches them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO, Any, NamedTuple

TAIL_LINES = 60  # two chained tracebacks through Lightning
GRACE_S = 10.0  # for a job's processes to end by themselves, once it was interrupted or rank 0 is through


class End(NamedTuple):
    """How a process ended."""

    code: int  # its exit code; -N when signal N killed it
    stderr_tail: str

    def describe(self) -> str:
        if self.code < 0:
            return f"Rank 0 was killed by {signal.Signals(-self.code).name}."
        return f"Rank 0 exited with {self.code}."


def run_in_session(command: Sequence[str], environment: Mapping[str, str], grace_s: float = GRACE_S) -> End:
    """Runs `command` in a session of its own, and kills what is left of the session when it ends.

    When it ends well, the other processes of the session have `grace_s` to end as well.
    """
    process = echo = None
    last: deque[bytes] = deque(maxlen=TAIL_LINES)
    try:
        with _signals_deferred():  # one that came between fork and assignment would leave the job to itself
            process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE)
            echo = threading.Thread(target=_echo, args=(process.stderr, last))
            echo.start()
        if process.wait() == 0:
            _await_session(process.pid, grace_s)
    except BaseException:  # the terminal's Ctrl-C, or our SIGTERM, does not reach another session: pass it on
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
    with stream:
        for line in stream:
            last.append(line)
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()


def _signal_session(leader: int, number: signal.Signals) -> None:
    # The session's processes are also its one process group: the ranks, and their data loaders' workers.
    with suppress(ProcessLookupError, PermissionError):  # the latter is macOS' word for a group of zombies
        os.killpg(leader, number)


def _await_session(leader: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    with suppress(ProcessLookupError, PermissionError):  # nobody is left
        while time.monotonic() < end:
            os.killpg(leader, 0)
            time.sleep(0.05)


def sigterm_as_exit() -> AbstractContextManager[None]:
    """Lets SIGTERM unwind the stack, so that the running job is ended too."""
    return _handling({signal.SIGTERM}, lambda number, _: sys.exit(128 + number))


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Delivers SIGINT and SIGTERM when the block is done, not within it."""
    pending: list[int] = []
    with _handling({signal.SIGINT, signal.SIGTERM}, lambda number, _: pending.append(number)):
        yield
    for number in pending:
        signal.raise_signal(number)


@contextmanager
def _handling(numbers: set[signal.Signals], handler: Callable[[int, Any], Any]) -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()  # signals are the main thread's
    previous = {number: signal.signal(number, handler) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
