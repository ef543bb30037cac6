"""What a process that runs tests has, and one that hands them out to lanes does without: torch, and ranks."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("compare", "engine_checkpoints", "unit_jobs")

import frugal  # noqa: E402, F401
import rank_server  # noqa: E402
import watched  # noqa: E402, F401
from lightning_zero.wire.comm import Comm  # noqa: E402
from older import leave_guard_of_no_gpu  # noqa: E402
from ranks import RankPool, seed  # noqa: E402
from thread_world import ThreadComm, ThreadWorld  # noqa: E402

rank_server.join()

# The same examples in every run, and no limit of time: each would have 0.2 s, which a busy machine takes for anything.
settings.register_profile("suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        leave_guard_of_no_gpu()
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()  # what the modules of the tests have imported stays
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    seed()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A fit in this process leaves its group, which goes on listening, and the port of that in the environment: later
    fits, and scripts that a test starts, would take the same one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "PL_GLOBAL_SEED"):
        os.environ.pop(name, None)
    if nextitem is None or nextitem.path != item.path:  # what the tests of a file have left stays, too
        gc.collect()
        gc.freeze()


_POOLS: dict[int, RankPool] = {}


@pytest.fixture(scope="session")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    """`pool_of(world)`: ranks shared by the whole session, started when first asked for."""

    def get(world: int) -> RankPool:
        if world not in _POOLS:
            _POOLS[world] = RankPool(world)
        return _POOLS[world]

    yield get
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()


@pytest.fixture(scope="session")
def two_ranks(pool_of: Callable[[int], RankPool]) -> RankPool:
    return pool_of(2)


@pytest.fixture(scope="session")
def sim_process() -> Iterator[RankPool]:
    """A process of its own, in which torch knows the simulated device."""
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture
def ranks_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks that are threads one runs at a time, until it waits for another.

    For tests that compile. The cache of compiled code, which torch looks through at every call, has no lock of its own
    up to torch 2.13: where one thread adds to it while another one looks, the process may die. Users' ranks are
    processes.
    """
    turn, run, collect = threading.Lock(), ThreadWorld.run, ThreadComm._collect

    def run_in_turn(world: ThreadWorld, function: Callable[[Comm], Any]) -> list[Any]:
        def on_rank(comm: Comm) -> Any:
            with turn:
                return function(comm)

        return run(world, on_rank)

    def collect_out_of_turn(comm: ThreadComm, meeting: Any) -> list[Any]:
        turn.release()
        try:
            return collect(comm, meeting)
        finally:
            turn.acquire()

    monkeypatch.setattr(ThreadWorld, "run", run_in_turn)
    monkeypatch.setattr(ThreadComm, "_collect", collect_out_of_turn)
