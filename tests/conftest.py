import fcntl
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores

import pytest
import torch
import torch.distributed as dist

pytest.register_assert_rewrite("compare", "engine_checkpoints", "unit_jobs")

import frugal  # noqa: E402, F401
from ranks import RankPool  # noqa: E402

# Files with tests that run alone, which wait for the end of what other lanes run: before the long ones.
ALONE = ["test_bytes.py", "test_checkpoint_crash.py", "test_packaging.py", "test_pretrained.py"]
# Long files: one that came last would keep its lane busy after the end of the others.
LONG = [
    "test_construction.py",
    "test_elastic.py",
    "test_example.py",
    "test_paper.py",
    "test_sweep.py",
    "test_tensor_training.py",
    "test_user_code.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (item.path.name not in ALONE, item.path.name not in LONG))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()  # what the modules of the tests have imported stays


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, how)
        yield  # closing lets go of it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test marked `alone` runs while no other lane of this session runs one, or sets one up."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    folder = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]  # that of all lanes
    how = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with ExitStack() as held:
        # Who waits for the others holds the door, or they would go round and never let go at the same time.
        with _locked(folder / "door", fcntl.LOCK_EX):
            held.enter_context(_locked(folder / "lanes", how))
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A fit in this process leaves its group, which goes on listening, and the port of that in the environment: later
    fits, and scripts that a test starts, would take the same one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "PL_GLOBAL_SEED"):
        os.environ.pop(name, None)


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
