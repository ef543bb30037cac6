import fcntl
import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import rank_server

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores

# These come first, in this order: a lane takes the next file when it has come to the end of one. Files whose tests wait
# (for the end of a time limit, or the disk) are beside files of short tests that keep the cores busy; and a long file
# that came last would keep its lane busy after the end of the others.
FIRST = """
    test_checkpoint_crash test_tensor_training test_edits test_rendezvous
    test_bytes test_device test_rehearsal_matrix test_left test_checkpoint_promises test_user_code
    test_pretrained test_packaging test_example test_construction test_tensor_parallel test_resume test_regroup
    test_paper test_sweep test_elastic test_kinds test_checkpoint_bad_input test_real_models test_benchmarks
    test_rehearsal test_pairs test_loops test_promises
""".split()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no":  # who hands tests out would import for five seconds, and its lanes wait
        gc.disable()  # until all is imported and collected, of which nothing would be freed: see lane.py
        config.pluginmanager.import_plugin("lane")
    else:
        rank_server.share()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))


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
