"""Jobs of ranks that share one GPU, over NCCL, for tests/test_nccl.py."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

import jobs
import sim_jobs
import tensor_training_jobs
from lightning_zero.wire.native import make_comm


def on_one_gpu(job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A job on ranks that all compute on the first GPU, each as if it were alone on a machine of its own.

    NCCL refuses two ranks with the same GPU on one machine; so each has a name of its own for the machine, and they
    talk by TCP, as machines do. What comes back is on the host.
    """
    rank = os.environ["RANK"]
    os.environ.update(
        LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=rank,
        NCCL_HOSTID=f"machine-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1",
    )  # fmt: skip
    return tree_map_only(Tensor, Tensor.cpu, job(*args, **kwargs))


def on_gpu(**kwargs: Any) -> dict[str, Any]:
    """What a Trainer is told, beside `world=1`: each machine has one device."""
    return {"accelerator": "gpu", "num_nodes": int(os.environ["WORLD_SIZE"]), "deterministic": "warn", **kwargs}


def fit(strategy: Any, **kwargs: Any) -> dict[str, Any]:
    return on_one_gpu(lambda: jobs.fit(strategy, 1, **on_gpu(**kwargs)))


def save_at(path: Path, strategy: Any, **kwargs: Any) -> dict[str, Any]:
    return on_one_gpu(lambda: jobs.save_at(path, strategy, 1, **on_gpu(**kwargs)))


def resume_from(path: Path, strategy: Any, **kwargs: Any) -> dict[str, Any]:
    return on_one_gpu(lambda: jobs.resume_from(path, strategy, 1, **on_gpu(**kwargs)))


def fit_looking_once(strategy: Any) -> dict[str, Any]:
    """Rank 0 alone reads a weight, between clipping and the step."""

    def job() -> dict[str, Any]:
        L.seed_everything(1, verbose=False)
        model = jobs.LooksOnceClipped()
        jobs.trainer(strategy, 1, gradient_clip_val=0.05, **on_gpu()).fit(model, jobs.loader())
        return {"losses": model.losses, "weights": jobs.state_of(model), "seen": model.seen}

    return on_one_gpu(job)


def fit_tensor_parallel(stage: int, tensor: int, **strategy: Any) -> dict[str, Any]:
    def job() -> dict[str, Any]:
        strategy_of = {"stage": stage, "tensor_parallel_size": tensor, **strategy}
        L.seed_everything(1, verbose=False)
        model = tensor_training_jobs.Language()
        run = jobs.trainer(strategy_of, 1, limit_val_batches=0, **on_gpu())
        data = int(os.environ["WORLD_SIZE"]) // tensor
        run.fit(model, tensor_training_jobs.loader(data))
        weights = {name: tensor_training_jobs.whole(value).clone() for name, value in model.state_dict().items()}
        return {"losses": model.losses, "weights": weights}

    return on_one_gpu(job)


def train_with_buffers(stage: int, micro: int) -> dict[str, Any]:
    """Micro-batches whose gradients are all reduced, of a model whose forward changes its buffers."""

    def job() -> dict[str, Any]:
        if not dist.is_initialized():
            dist.init_process_group("nccl")
        device = torch.device("cuda", 0)
        comm = make_comm(device, sim_jobs.SOON, backend="nccl")
        return sim_jobs.train(device, comm, sim_jobs.averaging_tower(), stage=stage, micro=micro, steps=5)

    return on_one_gpu(job)


def fall_silent(strategy: Any, how: str) -> None:
    """Rank 1 sleeps or dies in the third batch."""

    class Silent(jobs.Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_rank == 1 and batch_idx == 2:
                time.sleep(60 if how == "sleeps" else 0)
                os._exit(1)
            return super().training_step(batch, batch_idx)

    on_one_gpu(lambda: jobs.trainer(strategy, 1, **on_gpu()).fit(Silent(), jobs.loader()))
