"""Real ranks: processes that stay alive and run one function after another, so that a test pays no start-up.

    pool.run(function, *args)       every rank calls it (an importable function); results in rank order

A function runs with torch.distributed's environment set as torchrun would, so a Trainer inside launches nothing.

Ranks are forked from a server that has imported everything already, and end with the test session, however it ends.
What they print is the test's own output: pytest shows it if that fails.
"""

import gc
import io
import itertools
import multiprocessing as mp
import os
import random
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, reduction
from typing import Any

import numpy
import torch

import rank_server

HANGS = 300.0  # s, after which ranks are given up; a busy machine takes its time
PATIENCE = 120.0  # s, that a rank waits for one that comes; a test has a shorter limit only where one does not come
SHORT = 8  # s, that a rank waits for one that does not come; others may be late by seconds, which they take to import
AT_ONCE = 60.0  # s, that something takes at most on a busy machine, in which nobody has waited in vain

CONTEXT = mp.get_context("forkserver")


# Below those that systems hand out by themselves (from 32768 on Linux, 49152 elsewhere): between the moment when a port
# is chosen and that when a rank listens, a process of another lane would be given it now and then. Each process begins
# at another one.
_ports = itertools.cycle(range(10_000, 30_000))
for _ in range(97 * os.getpid() % 20_000):
    next(_ports)


def free_port() -> int:
    while True:
        port = next(_ports)
        with socket.socket() as server, suppress(OSError):  # in use
            server.bind(("127.0.0.1", port))
            return port


def seed() -> None:
    """Before each test, and each job of ranks: whatever ran before in the process, it draws the same numbers."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


class RankFailed(AssertionError):
    """A function raised on a rank."""


class Output:
    """What processes print, in a file without a name that all of them have open."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # as long as the processes
        self._shown = 0  # bytes

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._file.fileno())

    def __setstate__(self, inherited: Any) -> None:
        self._file = os.fdopen(inherited.detach(), "wb", buffering=0)

    def take_over(self) -> None:
        """Has this process, and what it starts, print there."""
        for stream in (1, 2):
            os.dup2(self._file.fileno(), stream)

    def show(self) -> None:
        """Prints, in the process that has made it, what has come since the last call."""
        told = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size - self._shown, self._shown)
        self._shown += len(told)
        print(told.decode(errors="replace"), end="")


def die_with_parent() -> None:
    """Ends this process when the one that started it has ended, by a signal or otherwise. The system's own signal would
    not do: the server that forks ranks lives as long as they do."""
    session = mp.parent_process()
    assert session is not None

    def watch() -> None:
        connection.wait([session.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="watches the session", daemon=True).start()


def _packed(value: Any) -> bytes:
    """For a pipe. What torch has registered with multiprocessing instead sends an open file for every tensor, each by a
    connection of its own: a third of what a small fit costs."""
    packed = io.BytesIO()
    torch.save(value, packed)
    return packed.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)


def _rank_main(rank: int, world: int, port: int, inbox: Any, outbox: Any, output: Output) -> None:
    output.take_over()
    import frugal  # noqa: F401  # both are there already, where the server that this is forked from has them
    import watched  # noqa: F401

    gc.freeze()  # the jobs, too, that the server has imported
    die_with_parent()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    environment = dict(os.environ)
    while (task := inbox.get()) is not None:
        seed()
        try:
            function, args, kwargs = _unpacked(task)
            outcome = (rank, _packed(function(*args, **kwargs)), None)
        except BaseException:
            outcome = (rank, None, traceback.format_exc())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        outbox.put(outcome)
        for name in os.environ.keys() - environment.keys():  # a seed for workers, say: it is not for the next job
            del os.environ[name]
        os.environ.update((name, value) for name, value in environment.items() if os.environ.get(name) != value)
    os._exit(0)  # all that it has is the system's to free: an interpreter takes seconds to take itself apart


class RankPool:
    """`world` processes that share one process group for as long as the pool lives."""

    def __init__(self, world: int) -> None:
        self.world = world
        rank_server.start()
        port = free_port()
        self._inboxes = [CONTEXT.SimpleQueue() for _ in range(world)]
        self._outbox = CONTEXT.Queue()
        self._output = Output()
        self.processes = [
            CONTEXT.Process(target=_rank_main, args=(rank, world, port, inbox, self._outbox, self._output), daemon=True)
            for rank, inbox in enumerate(self._inboxes)
        ]
        for process in self.processes:
            process.start()
        self._known: dict[str, list[Any]] = {}

    def once(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As `run`, or what that returned for the same arguments before: for the reference of many tests, which none of
        them may change. Arguments are told apart by their `repr`."""
        key = f"{function.__module__}.{function.__qualname__} {args} {sorted(kwargs.items())}"
        if key not in self._known:
            self._known[key] = self.run(function, *args, **kwargs)
        return self._known[key]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = HANGS, **kwargs: Any) -> list[Any]:
        """Results in rank order.

        Raises:
            RankFailed: with the tracebacks of all ranks that raised: one may have failed as another one did.
        """
        results, errors = self.outcomes(function, *args, timeout=timeout, **kwargs)
        if told := [f"rank {rank} of {self.world}:\n{error}" for rank, error in enumerate(errors) if error is not None]:
            raise RankFailed("\n".join(told))
        return results

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = HANGS, **kwargs: Any) -> Any:
        """Results and tracebacks (or None), both in rank order."""
        self.begin(function, *args, **kwargs)
        results: list[Any] = [None] * self.world
        errors: list[str | None] = [None] * self.world
        for _ in range(self.world):
            rank, results[rank], errors[rank] = self.next_outcome(timeout)
        return results, errors

    def next_outcome(self, timeout: float = HANGS) -> tuple[int, Any, str | None]:
        """Of what has begun: the rank that ends next, its result and its traceback."""
        try:
            rank, packed, error = self._outbox.get(timeout=timeout)
        finally:
            self._output.show()
        return rank, None if packed is None else _unpacked(packed), error

    def begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Ranks call it, and nobody waits for them all: they are to be killed."""
        task = _packed((function, args, kwargs))
        for inbox in self._inboxes:
            inbox.put(task)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._output.show()

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def run_alone(world: int, function: Callable[..., Any], *args: Any, timeout: float = HANGS) -> tuple[list, list]:
    """Ranks of their own, for tests that break them: results and errors; dead ranks leave None in both."""
    pool = RankPool(world)
    try:
        return pool.outcomes(function, *args, timeout=timeout)
    finally:
        pool.kill()
