"""Takes out of the processes that import it what costs the tests much and changes nothing that they see.

Preloaded where ranks and warm scripts are forked, so that all of them have it; and in the lanes of the tests.
"""

import ctypes
import functools
import gc
import inspect
import os
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from lightning.fabric.utilities import registry
from torch.optim import Optimizer

import foreign_device
from lightning_zero.device import HOST
from lightning_zero.shards import granularity
from lightning_zero.shards.probe import ELEMENT_WISE, Findings
from lightning_zero.torch_private import STEP_HOOKS
from lightning_zero.wire.comm import Comm
from models import RANDOM_NUMBERS
from thread_world import ThreadWorld

_LIBC = ctypes.CDLL(None)
_PR_SET_TIMERSLACK = 29

foreign_device.install()

# For every Trainer, Lightning reads the metadata of all installed packages: a sixth of a small fit.
registry.entry_points = functools.cache(registry.entry_points)

# For each kind of device that might be there, torch notes who has set a seed: all of the stack, with its source, three
# times for each `torch.manual_seed`. It is kept for the moment when the device is first used.
for _kind in (torch.cuda, torch.xpu, torch.mtia):
    if not _kind._is_compiled():
        _kind.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]


def _yield_to_senders() -> None:
    """Lets the threads in which gloo receives run only where nobody else wants to.

    Such a thread tries the lock of its peer, and tries again at once while a sender holds it. Woken by a message, it
    takes the core from that very sender: on two cores, half of what a fit at stage 3 cost was spent so.
    """
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if (thread / "comm").read_text().startswith("gloo"):
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))  # takes no core on waking up
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)


def _yielding(make_group: Any) -> Any:
    @functools.wraps(make_group)
    def make(*args: Any, **kwargs: Any) -> Any:
        try:
            return make_group(*args, **kwargs)
        finally:
            _yield_to_senders()

    return make


@functools.cache
def _device_of(process: int) -> Any:  # one that is forked later has threads of its own
    if not sys.platform.startswith("linux"):
        return c10d.ProcessGroupGloo.create_default_device()
    # The thread that receives looks for nothing but news of its sockets, a hundred times a second; a limit of time that
    # the system may keep late by 40 ms makes that twenty. Who closes a group waits for its next look, hence no more.
    _LIBC.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(40_000_000), 0, 0, 0)  # ns; threads that start have it from this one
    try:
        return c10d.ProcessGroupGloo.create_default_device()
    finally:
        _LIBC.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(0), 0, 0, 0)  # the usual one


def _receiving_in_one_thread(init: Any) -> Any:
    """Gives all groups of a process one thread of gloo's that receives, not one each: every such thread wakes up a
    hundred times a second for as long as its group lives. Pools of ranks live long and have many: a fifteenth of what
    all tests cost was spent so."""

    @functools.wraps(init)
    def make(
        group: Any, store: Any, rank: int, size: int, timeout: Any = c10d.default_pg_timeout, **others: bool
    ) -> None:
        assert not any(others.values())  # torch 2.15 asks whether ranks may come and go, which these do not
        options = c10d.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [_device_of(os.getpid())], 2, timeout
        init(group, store, rank, size, options)

    return make


c10d.ProcessGroupGloo.__init__ = _receiving_in_one_thread(c10d.ProcessGroupGloo.__init__)

if hasattr(os, "SCHED_BATCH"):  # Linux
    c10d._new_process_group_helper = _yielding(c10d._new_process_group_helper)


def take_one_core() -> None:
    """Keeps this thread, and those that it starts, on one core; lanes of the tests share the cores out.

    For ranks that are threads. Only one of them has the interpreter, and every operation of torch lets go of it: on two
    cores each time wakes the other core up, which finds it taken again. That was a third of what they cost.
    """
    if hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, {_CORES[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % len(_CORES)]})


def _taking_turns(run: Any) -> Any:
    @functools.wraps(run)
    def run_on_one_core(world: ThreadWorld, function: Any) -> Any:
        def on_rank(comm: Comm) -> Any:
            take_one_core()
            return function(comm)

        return run(world, on_rank)

    return run_on_one_core


_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
ThreadWorld.run = _taking_turns(ThreadWorld.run)  # type: ignore[method-assign]

_try = granularity.find
_TRIED: weakref.WeakKeyDictionary[type, dict[Any, Findings]] = weakref.WeakKeyDictionary()


def _all_that_is_tried(optimizer: Optimizer) -> tuple[Any, ...] | None:
    """Of an optimizer of some class, what a trial of it on small tensors copies; None where that does not show."""
    left_out = ("state", "param_groups", "step", *STEP_HOOKS)
    own = {name: value for name, value in vars(optimizer).items() if name not in left_out}
    dims = [{min(p.dim(), 4) for p in group["params"]} for group in optimizer.param_groups]
    options = [{**group, "params": None} for group in optimizer.param_groups]
    told = repr((own, options))
    hides = any(sign in told for sign in ("Parameter", " at 0x", "...", "\n"))
    if hides or any(isinstance(name, str) for name in optimizer.state):
        return None
    return inspect.unwrap(type(optimizer).step).__code__, repr(dims), told


def _tried_once(optimizer: Optimizer, device: torch.device = HOST) -> Findings:
    """An engine tries an optimizer that it does not know: half of what a small run on threads costs. Each process tries
    the same one once."""
    if type(optimizer) in ELEMENT_WISE:
        return _try(optimizer, device)
    with RANDOM_NUMBERS:  # a trial puts them back
        known, key = _TRIED.setdefault(type(optimizer), {}), _all_that_is_tried(optimizer)
        if key is None or key not in known:
            known[key] = _try(optimizer, device)
        return known[key]


granularity.find = _tried_once

gc.freeze()  # what has been imported stays: no collection looks at it again, nor copies what is shared
gc.set_threshold(5_000, 20, 20)  # fewer collections: each looks at all of what a test has made
