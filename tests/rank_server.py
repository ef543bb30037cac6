"""What ranks are forked from: a process that has imported everything already. Without torch, for who hands out tests.

Lanes share one. Each would import for five seconds of the processor.
"""

import os
import sys
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

# With transformers peft takes two seconds for each rank, what watches engines an eighth of one, and pytest, which some
# of the jobs import, more than a small save does.
JOBS = sorted(path.stem for path in Path(__file__).parent.glob("*_jobs.py"))
SHARED = "TESTS_FORK_RANKS_FROM"  # the variable with its address, for the lanes

forkserver.set_forkserver_preload(["lightning_zero", "peft", "frugal", "watched", *JOBS])


def start() -> None:
    """Starts it, if nobody has. It looks for modules where this process does."""
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # 3.11 gives it a path that it does not use
        forkserver.ensure_running()


def share() -> None:
    """Starts one for all processes that have this one's environment. It ends with this process."""
    start()
    os.environ[SHARED] = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]


def join() -> None:
    """Has this process use the one that is shared, if one is. What it starts in turn has servers of its own."""
    if address := os.environ.pop(SHARED, None):
        server = forkserver._forkserver  # type: ignore[attr-defined]
        server._forkserver_address = address
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # each rank is given it, and keeps none alive
        server.ensure_running = lambda: None
        forkserver.ensure_running = server.ensure_running
