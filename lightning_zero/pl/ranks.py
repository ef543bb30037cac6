"""What the strategies need to know of ranks and machines: store, start method, collectives, common failures."""

import itertools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_zero.run.engine import Engine
from lightning_zero.wire.board import AgreementError, Board

_GRACE = timedelta(seconds=3)  # how long a rank that failed waits for the others


def warn_of_shared_store() -> None:
    """Warns of torchrun's shared store. Call it before processes connect."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        rank_zero_warn(
            "torchrun's shared store keeps the addresses of dead ranks, and ranks that are started again may "
            "connect to those (pytorch issue 135712). Start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
        )


def start_method_here(asked: str) -> str:
    """Returns how ranks start. In a notebook "popen" becomes "fork", as under Lightning's own ``strategy="auto"``:
    "popen" runs the program again, and a notebook is none."""
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)  # as Lightning decides
    return "fork" if asked == "popen" and is_interactive else asked


@torch.no_grad()
def unshare(module: Module, start_method: str) -> None:
    """Gives this rank its own copy of a module on the host that "forkserver" has put into memory shared by all ranks:
    each would write to the others' buffers. (Lightning copies for "spawn" alone, and DDP trains wrongly.) Call it
    before ranks connect, and so before any of them writes."""
    for tensor in itertools.chain(module.parameters(), module.buffers()) if start_method == "forkserver" else ():
        if type(tensor) in (Tensor, Parameter) and tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()


def seed_workers(loader: Any, rank: int) -> None:
    """Seeds the workers of a loader as those of the data-parallel `rank`, where Lightning is to seed workers and users
    do not. It would go by the rank in the world: ranks that share tensor-parallel modules would get other batches."""
    given = getattr(loader, "worker_init_fn", loader)
    is_lightnings = given is None or (isinstance(given, partial) and given.func is pl_worker_init_function)
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and is_lightnings:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)


def after_meeting(theirs: Callable[..., Any]) -> Any:
    """Returns a method that calls `theirs`, a collective of Lightning's, once all ranks have come to it.

    Ranks that still evaluate may need this one for a gather, in which it could not take part from inside of a
    collective of Lightning's.
    """

    @wraps(theirs)
    def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._prepare_collective(theirs.__name__)
        return theirs(self, *args, **kwargs)

    return ours


def failed_alike(engine: Engine, board: Board, run: int) -> bool:
    """Whether all ranks failed after the same collectives, so that they can still make the model whole: in a notebook
    that goes on after an error of all. Waits for a moment only: a rank that failed alone must end its process, so that
    the others stop waiting for it."""
    mesh = engine.mesh
    calls = [dict(comm.calls) for comm in (mesh.world, mesh.shard, mesh.replicate, mesh.data)]

    def compare(records: list[dict[str, Any]]) -> dict[str, Any]:
        return {"same": all(record["calls"] == records[0]["calls"] for record in records)}

    try:
        verdict = board.clone(_GRACE).agree(f"failed in run {run}", {"calls": calls}, compare)
    except AgreementError:
        return False
    return bool(verdict["same"])
