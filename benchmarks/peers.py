"""How each contestant of `step_time.py` trains: the stages of this package, and its peers.

All train the same model from the same seed on the same tokens with `AdamW`, in fp32, so that their losses agree. Those
of "Lightning" and "ours" run under `lightning.Trainer`, which starts the ranks; the others in a plain loop, whose ranks
`torch.distributed.run` starts. Each process has imported Lightning, so that memory differs by what is trained.
"""

import argparse
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmark_models import Size, blocks_of, model_of, size_of
from meter import WARM_UP, Meter, loopback_bytes

WHOLE = ":tensor"
RATE = 1e-4

Step = Callable[[Tensor], Tensor]  # tokens (batch, length) -> this rank's loss, a scalar; trains one step


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """Somebody who trains. Exactly one of `strategy` and `loop` is given."""

    family: str  # "ours", "Lightning", "torch", "DeepSpeed" or "limit"
    told: str
    strategy: Callable[[int], Any] | None = None  # number of devices -> what the Trainer is given
    loop: Callable[[nn.Module, torch.device, Size], Step] | None = None  # the model is on the device
    shards_itself: bool = False  # the module divides its model in `configure_model`
    is_limit: bool = False  # no peer: ranks train apart, so that what it has learnt is not what others have
    package: str = "torch"  # has to be installed

    def train(self, options: argparse.Namespace) -> None:
        """Trains on this rank, and writes what it measured into the folder `options.child`."""
        if self.loop:
            train_in_a_loop(self.loop, options)
        else:
            assert self.strategy
            with device_of(options):
                task = (ShardedTask if self.shards_itself else Task)(size_of(options))
            if options.compile:
                task.model.compile()
            train_under_lightning(self.strategy(options.devices), task, options)

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


# --- the model and the data of all


class RandomTokens(Dataset[Tensor]):
    def __init__(self, size: Size, batches: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(size.vocabulary, (batches * size.batch, size.length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


def loader_for(options: argparse.Namespace, rank: int) -> DataLoader[Tensor]:
    """This rank's part of the tokens, a batch for each step. Lightning's own sampler would shuffle them."""
    size = size_of(options)
    tokens = RandomTokens(size, (WARM_UP + options.steps) * options.devices)
    mine: DistributedSampler[Tensor] = DistributedSampler(tokens, options.devices, rank, shuffle=False)
    return DataLoader(tokens, batch_size=size.batch, sampler=mine)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def device_of(options: argparse.Namespace) -> torch.device:
    if options.accelerator == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def seed() -> None:
    L.seed_everything(1, verbose=False)


# --- under Lightning


class Task(L.LightningModule):
    def __init__(self, size: Size) -> None:
        super().__init__()
        seed()
        self.model = model_of(size)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        return loss_of(self.model(tokens), tokens)

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=RATE)


class ShardedTask(Task):
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        shard(self.model, self.device_mesh["data_parallel"], keep=False)


class Data(L.LightningDataModule):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options

    def train_dataloader(self) -> DataLoader[Tensor]:
        assert self.trainer is not None
        return loader_for(self.options, self.trainer.global_rank)


class MeterCallback(L.Callback):
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.meter: Meter | None = None

    def on_train_start(self, trainer: L.Trainer, task: L.LightningModule) -> None:
        self.meter = meter_of(
            self.options,
            trainer.global_rank,
            on_gpu=trainer.strategy.root_device.type == "cuda",
            sent=lambda: bytes_sent(trainer),
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, task: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        assert self.meter
        self.meter.end_step(trainer.global_step, outputs["loss"])


def meter_of(options: argparse.Namespace, rank: int, *, on_gpu: bool, sent: Callable[[], int]) -> Meter:
    nbytes = 4 * size_of(options).parameters
    return Meter(options.child, rank=rank, steps=options.steps, parameter_bytes=nbytes, on_gpu=on_gpu, sent=sent)


def bytes_sent(trainer: L.Trainer) -> int:
    """By all ranks so far. Ours do not use the network on one machine, and count themselves."""
    if hasattr(trainer.strategy, "communication_report"):
        return sum(trainer.strategy.communication_report().values()) * trainer.world_size
    return loopback_bytes()


def train_under_lightning(strategy: Any, task: Task, options: argparse.Namespace) -> None:
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=strategy,
        precision=options.precision,
        max_steps=WARM_UP + options.steps,
        use_distributed_sampler=False,
        callbacks=[MeterCallback(options)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, datamodule=Data(options))


def zero(stage: int, granularity: str = "auto") -> Callable[[int], Any]:
    def strategy(devices: int) -> Any:
        from lightning_zero import ZeroStrategy  # here, so that a peer's memory holds nothing of ours

        return ZeroStrategy(stage=stage, granularity=granularity)  # type: ignore[arg-type]

    return strategy


def model_parallel(devices: int) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)


# --- in a plain loop


def train_in_a_loop(loop: Callable[[nn.Module, torch.device, Size], Step], options: argparse.Namespace) -> None:
    """Trains on a rank that `torch.distributed.run` has started."""
    size, rank, on_gpu = size_of(options), int(os.environ["RANK"]), options.accelerator == "gpu"
    device, casts = device_of(options), options.precision == "bf16-mixed"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    seed()
    with device:
        model = model_of(size)
    if options.compile:
        model.compile()
    step = loop(model, device, size)
    meter = meter_of(options, rank, on_gpu=on_gpu, sent=loopback_bytes)
    for number, batch in enumerate(loader_for(options, rank), start=1):
        with torch.autocast(device.type, torch.bfloat16, enabled=casts):
            loss = step(batch.to(device))
        meter.end_step(number, loss)
    # All is written. Ranks with a ZeroRedundancyOptimizer were once seen to hang in destroy_process_group() over gloo.
    dist.barrier()
    os._exit(0)


def plain_step(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ddp_of(model: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def raw_ddp(model: nn.Module, device: torch.device, size: Size) -> Step:
    return plain_step(ddp_of(model, device), AdamW(model.parameters(), lr=RATE))


def zero_redundancy(model: nn.Module, device: torch.device, size: Size) -> Step:
    return plain_step(ddp_of(model, device), ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=RATE))


def fsdp2(keep: bool) -> Callable[[nn.Module, torch.device, Size], Step]:
    def loop(model: nn.Module, device: torch.device, size: Size) -> Step:
        shard(model, init_device_mesh(device.type, (dist.get_world_size(),)), keep=keep)
        return plain_step(model, AdamW(model.parameters(), lr=RATE))

    return loop


def apart(model: nn.Module, device: torch.device, size: Size) -> Step:
    """What no ZeRO can beat: the arithmetic of a rank, at once on all ranks, and nothing else. Each computes its
    gradients, sends none, and steps its 1/N of each parameter."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    parameters = [*model.parameters()]

    def mine(values: Tensor) -> Tensor:
        return values.flatten().tensor_split(world_size)[rank]

    pieces = [nn.Parameter(mine(parameter.detach())) for parameter in parameters]  # views
    optimizer = AdamW(pieces, lr=RATE)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model(tokens), tokens)
        model.zero_grad()
        loss.backward()
        for piece, parameter in zip(pieces, parameters, strict=True):
            assert parameter.grad is not None
            piece.grad = mine(parameter.grad)
        optimizer.step()
        return loss.detach()

    return step


def shard(model: nn.Module, mesh: DeviceMesh, *, keep: bool) -> None:
    """Divides each block and then what is left by FSDP2. With `keep` a block stays whole from forward to backward."""
    for module in (*blocks_of(model), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=not keep)


def deepspeed(stage: int) -> Callable[[nn.Module, torch.device, Size], Step]:
    def loop(model: nn.Module, device: torch.device, size: Size) -> Step:
        config = {
            "train_micro_batch_size_per_gpu": size.batch,
            "zero_optimization": {"stage": stage},
            # The optimizer of all others, and not a kernel of DeepSpeed's, which it would have to compile.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,  # left out, it clips to norm 1
        }
        optimizer = AdamW(model.parameters(), lr=RATE)
        initialize = importlib.import_module("deepspeed").initialize
        engine, *_ = initialize(model=model, optimizer=optimizer, config=config)

        def step(tokens: Tensor) -> Tensor:
            loss = loss_of(engine(tokens), tokens)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return loop


# --- who there is

CONTESTANTS = {
    "limit": Contestant(
        family="limit", told="the arithmetic alone: nothing is sent, a rank steps its part", loop=apart, is_limit=True
    ),
    "ddp": Contestant(
        family="Lightning",
        told="Lightning's `ddp`, on one device its single-device strategy",
        strategy=lambda devices: "ddp" if devices > 1 else "auto",
    ),
    **{str(n): Contestant(family="ours", told=f"ZeroStrategy(stage={n})", strategy=zero(n)) for n in range(4)},
    **{
        f"{n}{WHOLE}": Contestant(
            family="ours", told=f"ZeroStrategy(stage={n}, granularity='tensor')", strategy=zero(n, "tensor")
        )
        for n in (1, 2, 3)
    },
    "raw_ddp": Contestant(family="torch", told="DistributedDataParallel", loop=raw_ddp),
    "zero_redundancy": Contestant(
        family="torch", told="DistributedDataParallel and ZeroRedundancyOptimizer", loop=zero_redundancy
    ),
    "fsdp2": Contestant(family="torch", told="fully_shard per block, resharded after forward", loop=fsdp2(keep=False)),
    "fsdp2_keep": Contestant(
        family="torch", told="fully_shard per block, whole from forward to backward", loop=fsdp2(keep=True)
    ),
    "model_parallel": Contestant(
        family="Lightning",
        told="Lightning's ModelParallelStrategy, fully_shard per block in configure_model",
        strategy=model_parallel,
        shards_itself=True,
    ),
    **{
        f"deepspeed{n}": Contestant(
            family="DeepSpeed", told=f"DeepSpeed at stage {n}", loop=deepspeed(n), package="deepspeed"
        )
        for n in (1, 2, 3)
    },
}
USUAL = [name for name in CONTESTANTS if name != "0" and not name.endswith(WHOLE)]
