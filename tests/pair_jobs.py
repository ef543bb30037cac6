"""Short runs of every kind (`pairs.Case`), under our strategy and as a reference, called on real ranks."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import fabric_jobs
import jobs
from lightning_zero import ZeroEMA
from lightning_zero.pl import sharded_strategy
from lightning_zero.pl.lightning_private import show_mesh
from lightning_zero.shards.offload import Machine
from models import seeded
from pairs import Case
from tensor_jobs import whole
from zoo import WHOLE, made

WIDTH = 8
STEPS = 2  # of an epoch
EPOCHS = 2
LR = 0.05
CLIP_NORM, CLIP_VALUE = 0.5, 0.02
DDP = "ddp_find_unused_parameters_true"


@dataclass(frozen=True)
class Leg:
    """Some epochs of a run, from one checkpoint to the next."""

    epochs: range
    world: int
    tensor: int = 1  # ranks that share modules
    replicas: int = 1

    @property
    def data(self) -> int:
        """Ranks that see batches of their own."""
        return self.world // self.tensor


def legs_of(case: Case) -> list[Leg]:
    world = 4 if case.tensor_parallel or case.hybrid else 2
    tensor, replicas = 1 + case.tensor_parallel, 1 + case.hybrid
    if case.resume is None:
        return [Leg(range(EPOCHS), world, tensor, replicas)]
    last = Leg(range(1, EPOCHS), world, tensor, replicas)
    return [Leg(range(1), world // 2) if case.resume == "other" else Leg(range(1), world, tensor, replicas), last]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Net(L.LightningModule):
    """Blocks, and two experts of which ranks use one, the other one or none where they diverge."""

    def __init__(self, case: Case, leg: Leg, rank: int) -> None:
        super().__init__()
        self.case, self.leg, self.data_rank = case, leg, rank // leg.tensor
        self.automatic_optimization = case.loop != "manual"
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        if not case.constructs:
            self.build()

    def build(self) -> None:
        self.first, self.last = (seeded(partial(nn.Linear, WIDTH, WIDTH), seed) for seed in (1, 2))
        self.blocks = nn.ModuleList([seeded(Block, seed) for seed in (3, 4)])
        self.experts = nn.ModuleList([seeded(partial(nn.Linear, WIDTH, WIDTH), seed) for seed in (5, 6)])

    def configure_model(self) -> None:
        if self.case.constructs and not hasattr(self, "first"):  # Lightning calls it for each run
            self.build()
        mesh = None if self.leg.tensor == 1 or self.device_mesh is None else self.device_mesh["tensor_parallel"]
        for block in self.blocks:
            if mesh is not None and not isinstance(block.up.weight, DTensor):
                parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if self.case.compiles:
            self.blocks[1].compile(backend="eager")

    def forward(self, step: int, micro: int) -> Tensor:
        """The loss of a batch of this data-parallel rank."""
        case, rank = self.case, self.data_rank
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
        signal, aim = torch.randn(2, 4, WIDTH, generator=generator, dtype=torch.float32).unbind()
        hidden = self.first(signal.to(self.first.weight.dtype))
        for block in self.blocks:
            hidden = block(hidden)
        expert = (rank + step) % 3 if case.diverges else 0
        hidden = hidden + (self.experts[expert](hidden) if expert < 2 else 0)
        return 4 * (self.last(hidden).float() - aim).square().mean()

    def training_loss(self, step: int, micro: int) -> Tensor:
        loss = self(step, micro)
        self.losses.append(loss.item())
        is_bad = self.case.precision == "16-mixed" and (step, micro, self.data_rank) == (1, 0, 0)
        return loss * torch.inf if is_bad else loss  # an overflow, which all ranks skip

    # -- under a Trainer

    def training_step(self, place: tuple[int, int], _: int) -> Tensor | None:
        step, micro = (place[0] + STEPS * self.current_epoch, place[1])
        if self.automatic_optimization:
            return self.training_loss(step, micro)
        for micro in range(micros_of(self.case)):
            with self.alone() if micro < micros_of(self.case) - 1 else nullcontext():
                self.manual_backward(self.training_loss(step, micro) / micros_of(self.case))
        mine = self.optimizers()
        for optimizer in mine if isinstance(mine, list) else [mine]:
            if self.case.clip is not None:
                self.clip_gradients(optimizer, **clipping_of(self.case))
            optimizer.step()
            optimizer.zero_grad()
        return None

    def alone(self) -> AbstractContextManager[None]:
        strategy: Any = self.trainer.strategy
        return strategy.no_sync() if hasattr(strategy, "engine") else strategy.model.no_sync()

    def on_before_optimizer_step(self, _: Any) -> None:
        edit_gradients(self)

    def on_train_batch_end(self, _: Any, place: tuple[int, int], __: int) -> None:
        if place[1] == micros_of(self.case) - 1 or not self.automatic_optimization:
            edit_weights(self)

    def validation_step(self, number: int, _: int) -> None:
        self.evaluated.append(self(number, 9).item())

    def configure_optimizers(self) -> Any:
        return optimizers_of(self)


def micros_of(case: Case) -> int:
    return 1 if case.accumulation is None else 2


def clipping_of(case: Case) -> dict[str, Any]:
    if case.clip is None:
        return {}
    how = {"norm": CLIP_NORM, "value": CLIP_VALUE}
    return {"gradient_clip_val": how[case.clip], "gradient_clip_algorithm": case.clip}


def optimizers_of(model: Net) -> list[Optimizer]:
    """The same kernel wherever things rest; and a large epsilon, or gradients that are rounding alone would step."""
    parameters, number = list(model.parameters()), model.case.optimizers
    shares = [parameters[at::number] for at in range(number)]
    if model.case.whole_tensors and model.case.precision == "16-mixed":  # in fp16 Adafactor divides zero by zero
        return [made("Unheard", WHOLE["LAMB"])(share, lr=LR) for share in shares]
    if model.case.whole_tensors:
        return [torch.optim.Adafactor(share, lr=LR) for share in shares]
    return [torch.optim.AdamW(share, lr=LR, eps=0.1, fused=False) for share in shares]


def evaluations_of(model: Net) -> Iterable[int]:
    return range(1 + 2 * model.data_rank * model.case.evaluates_unevenly)


@torch.no_grad()
def edit_gradients(model: Net) -> None:
    if model.case.edits == "gradients":
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        if model.first.weight.grad is not None:  # another optimizer may have cleared it
            model.first.weight.grad[0] = 0.0


@torch.no_grad()
def edit_weights(model: Net) -> None:
    if model.case.edits == "weights":
        model.blocks[0].up.weight.mul_(0.9)
        model.last.weight[0] = 0.25
        model.first.bias.data.clamp_(-0.1, 0.1)
    elif model.case.edits == "data":
        for parameter in (model.last.weight, model.blocks[1].down.weight, model.blocks[1].norm.bias):
            if isinstance(parameter, DTensor):  # of which torch ignores it
                parameter.mul_(0.9)
            else:
                parameter.data = parameter.data * 0.9


# -- how they run


def strategy_of(case: Case, leg: Leg, folder: Path, *, is_ours: bool) -> Any:
    dtype = {"param_dtype": torch.bfloat16 if case.precision == "param_dtype" else None}
    if not is_ours:  # what `ddp` has not, stage 0 has: nothing partitioned
        return {"stage": 0, **dtype} if case.precision in ("bf16-true", "param_dtype") else DDP
    offloads: dict[Any, Any] = {
        "cpu": {"optimizer": "cpu"},
        "nvme": {"optimizer": "nvme", "path": str(folder)},
        "parameters": {"optimizer": "cpu", "parameters": "cpu"},
        "fraction": {"optimizer": "cpu", "fraction": 0.5},
    }
    how = case.recomputes if case.recomputes != "partition" or leg.tensor > 1 else "plain"
    recomputes = None if how is None else {"modules": [Block], **({} if how == "plain" else {how: True})}
    return {
        "stage": case.stage,
        "accumulation": "local" if case.accumulation == "local" else "sharded",
        "offload": offloads.get(case.offload),
        "checkpoint": "full" if case.resume == "same" else "sharded",
        "activation_checkpointing": recomputes,
        "tensor_parallel_size": leg.tensor,
        "replicate_size": leg.replicas,
        "step_in_backward": case.step_in_backward,
        **dtype,
    }


def train(case: Case, leg: Leg, folder: Path, *, is_ours: bool) -> dict[str, Any]:
    """The losses, and the weights in the end; goes on from the leg before, and saves for the next one. The reference
    is not compiled: this backend calls the same kernels."""
    case = replace(case, compiles=case.compiles and is_ours)
    if case.compiles:
        torch._dynamo.reset()
    run: Callable[..., Net] = train_with_fabric if case.loop == "fabric" else train_with_a_trainer
    path = folder / ("ours.ckpt" if is_ours else "reference.ckpt")
    with patch.object(sharded_strategy, "Machine", partial(Machine, host_is_apart=True)):  # as beside a GPU
        model = run(case, leg, strategy_of(case, leg, folder, is_ours=is_ours), path)
    weights = {name: whole(value).detach().clone() for name, value in model.state_dict().items()}
    return {"losses": model.losses, "evaluated": model.evaluated, "weights": weights}


def train_with_a_trainer(case: Case, leg: Leg, strategy: Any, path: Path) -> Net:
    average = EMAWeightAveraging if strategy == DDP else ZeroEMA
    accumulates = {"accumulate_grad_batches": 2} if case.accumulation in ("local", "sharded") else {}
    clips = clipping_of(case) if case.loop == "automatic" else {}
    run = jobs.trainer(
        strategy,
        leg.world,
        precision="32-true" if case.precision == "param_dtype" else case.precision,
        max_epochs=leg.epochs.stop,
        callbacks=[average(decay=0.5)] if case.averages else [],
        use_distributed_sampler=False,
        limit_val_batches=1.0,
        num_sanity_val_steps=0,
        **accumulates,
        **clips,
    )
    L.seed_everything(1, verbose=False)
    model = Net(case, leg, run.global_rank)
    micros = 1 if case.loop == "manual" else micros_of(case)
    batches = [(step, micro) for step in range(STEPS) for micro in range(micros)]
    resumed = path if leg.epochs.start else None
    run.fit(model, loader(batches), loader(evaluations_of(model)), ckpt_path=resumed, weights_only=False)
    if leg.epochs.stop < EPOCHS:
        run.save_checkpoint(path)
    return model


def loader(places: Iterable[Any]) -> DataLoader:
    return DataLoader(list(places), batch_size=None, collate_fn=lambda place: place)


def train_with_fabric(case: Case, leg: Leg, strategy: Any, path: Path) -> Net:
    fabric = fabric_jobs.fabric(strategy, leg.world, "32-true" if case.precision == "param_dtype" else case.precision)
    fabric.seed_everything(1, verbose=False)
    with fabric.init_module() if case.constructs else nullcontext():
        model = Net(case, leg, fabric.global_rank)
        if leg.tensor > 1:
            show_mesh(model, fabric.strategy.device_mesh)
        model.configure_model()
    wrapped, *optimizers = fabric.setup(model, *optimizers_of(model))
    wrapped.mark_forward_method("training_loss")
    state = {"model": wrapped, **{f"optimizer {at}": optimizer for at, optimizer in enumerate(optimizers)}}
    if leg.epochs.start:
        fabric.load(path, state)
    for step in range(STEPS * leg.epochs.start, STEPS * leg.epochs.stop):
        for micro in range(micros_of(case)):
            with fabric.no_backward_sync(wrapped, enabled=micro < micros_of(case) - 1):
                fabric.backward(wrapped.training_loss(step, micro) / micros_of(case))
        edit_gradients(model)
        for optimizer in optimizers:
            if case.clip is not None:
                limit = {"max_norm": CLIP_NORM} if case.clip == "norm" else {"clip_val": CLIP_VALUE}
                fabric.clip_gradients(wrapped, optimizer, **limit, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
        edit_weights(model)
        if step % STEPS == STEPS - 1:
            wrapped.eval()
            with torch.no_grad():
                model.evaluated += [wrapped(number, 9).item() for number in evaluations_of(model)]
            wrapped.train()
    if leg.epochs.stop < EPOCHS:
        fabric.save(path, state)
    fabric.strategy.teardown()
    return model
