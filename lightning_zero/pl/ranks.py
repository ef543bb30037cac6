"""What the strategies of Trainer and Fabric ask of their ranks alike: batches, mesh, options, room for a whole copy."""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed import is_initialized
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter

from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.local import local_of
from lightning_zero.shards.offload import Machine
from lightning_zero.wire.mesh import shape_of, torch_mesh

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def warn_of_shared_store() -> None:
    """Before processes connect."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        rank_zero_warn(
            "torchrun's shared store keeps the addresses of dead ranks, and ranks that are started again may "
            "connect to those (pytorch issue 135712). Start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
        )


def start_method_here(asked: str) -> str:
    """How ranks start: "popen" runs the program again, and a notebook is none. There they are forked, as Lightning's
    own ``strategy="auto"`` does."""
    return "fork" if asked == "popen" and _IS_INTERACTIVE else asked


@torch.no_grad()
def unshare(module: Module, start_method: str) -> None:
    """Gives this rank a copy of its own of a module on the host that "forkserver" has sent to all ranks in memory that
    they share: each would write to the others' buffers. (Lightning does so for "spawn" alone, and DDP trains wrongly.)
    To be called before ranks connect, and so before any of them writes."""
    for tensor in itertools.chain(module.parameters(), module.buffers()) if start_method == "forkserver" else ():
        if type(tensor) in (Tensor, Parameter) and tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()


def sampler_kwargs(options: Options, world: int, rank: int) -> dict[str, Any]:
    """Arguments of a `DistributedSampler`: ranks that share tensor-parallel modules see the same batches."""
    ranks = options.tensor_parallel_size
    return {"num_replicas": world // ranks, "rank": rank // ranks}


def mesh_of(options: Options, world: int, device: torch.device) -> DeviceMesh:
    """See `ZeroStrategy.device_mesh`."""
    if not is_initialized():
        raise RuntimeError("There is no mesh yet: use it in configure_model, or later; with Fabric after launch().")
    return torch_mesh(device.type, shape_of(world, options.replicate_size, options.tensor_parallel_size))


def options_on_machine(options: Options, mixed: str | None, local_ranks: int) -> Options:
    """What an engine is made with.

    Args:
        options: as the user has written them.
        mixed: of a plugin that runs autocast, its `precision`.
        local_ranks: processes of this machine.
    """
    autocast = _AUTOCAST[mixed] if mixed is not None and options.param_dtype is None else None
    available = available_host_bytes()
    return replace(
        options,
        autocast_dtype=autocast,
        param_dtype=None if options.param_dtype == torch.float32 else options.param_dtype,
        machine=Machine(host_bytes=None if available is None else available // local_ranks, ranks=local_ranks),
    )


def whole_copies_that_fit(engine: Engine, device: torch.device, local_ranks: int) -> int:
    """How many whole copies of the model every local rank can hold in host memory; with tensor parallelism, of its
    part, on its device: 2 with the gradients of the last step, which DDP leaves. One decision for all ranks, a
    collective."""
    available, copies = available_host_bytes(), local_ranks
    if engine.mesh.tensor.size > 1 and device.type == "cuda":
        available, copies = torch.cuda.mem_get_info(device)[0], 1
    sizes = [local_of(parameter).numel() * parameter.dtype.itemsize for parameter in engine.module.parameters()]
    needed = sum(sizes) * copies
    whole = not engine.partition.parameter
    fits = torch.tensor(2 if available is None or 2 * needed < available else int(whole or needed < available))
    engine.rendezvous.meet_before_collective()
    return int(engine.mesh.world.all_reduce(fits, "fits in host memory", "min"))


def available_host_bytes() -> int | None:
    """Memory that this machine can still give, where the system says (Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
