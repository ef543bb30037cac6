"""The ZeRO paper's configurations C1 to C5 (arXiv 1910.02054, table 3): the largest GPT of each under one limit.

    python examples/paper.py                                        rehearsed, in the paper's proportions
    python examples/paper.py largest.run=true largest.limit_mb=8    trained on four ranks

Rehearsed is one rank of the paper's 400, 16 of them tensor-parallel, and counted is every tensor on its device. Trained
are four ranks on this machine's CPU: two tensor-parallel, times two data-parallel. There counted is what the engine's
ledger books on the device of the rank that has most: model states, buckets and activation checkpoints, with host memory
as a tier of its own, as beside a GPU. (Not what one block computes between its checkpoint and the next, which is the
same for all five.) Each can be trained: python examples/train.py experiment=c1 and so on, up to c5.
"""

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gpt import GPT, VOCABULARY, Block
from lightning_zero import ActivationCheckpointing
from lightning_zero.rehearsal.rehearsal import Rehearsal, rehearse
from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.offload import Machine
from lightning_zero.tiers.ledger import Tier
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.native import make_comm

TENSOR_RANKS, DATA_RANKS = 2, 2
MIB = 2**20
FOUND = "found.json"
BUCKET_BYTES = MIB // 16  # constant buffers (CB), small beside a small limit


@dataclass(frozen=True)
class Configuration:
    stage: int
    partition: bool  # P_a
    offload: bool  # P_a+cpu
    billions: int  # the paper's largest model, figure 6: 400 GPUs of 32 GB, 16 of them tensor-parallel

    @property
    def checkpointing(self) -> ActivationCheckpointing:
        return ActivationCheckpointing(modules={Block}, partition=self.partition, offload=self.offload, contiguous=True)

    @property
    def told(self) -> str:
        """Its columns in a table."""
        marks = "".join(f"{'x' if is_on else '-':>6}" for is_on in (self.partition, self.offload))
        return f"{self.stage:>6}{marks}"


PAPER = {
    "C1": Configuration(stage=1, partition=False, offload=False, billions=40),
    "C2": Configuration(stage=1, partition=True, offload=False, billions=60),
    "C3": Configuration(stage=2, partition=False, offload=False, billions=50),
    "C4": Configuration(stage=2, partition=True, offload=False, billions=140),
    "C5": Configuration(stage=2, partition=True, offload=True, billions=150),
}


# --- rehearsed


class Scale(NamedTuple):
    """The size of a run: of its model but for its depth, of its batch, and of its ranks."""

    width: int
    context: int  # tokens of a sequence
    batch: int  # sequences of each data-parallel rank
    tensor_ranks: int
    data_ranks: int


# The paper's, but for the width and the tokens, which are 8192 and 1024 there. Each matrix and activation of a block is
# a 64th of the paper's, and so is the device: as many blocks fit as there.
FACTOR = 64
SMALL = Scale(width=1024, context=128, batch=16, tensor_ranks=16, data_ranks=25)
DEVICE_BYTES = 32 * 10**9 // FACTOR
DEPTHS = (4, 8)  # that are rehearsed: each block takes as much as another


class Divided(L.LightningModule):
    """A transformer whose layers are divided among tensor-parallel ranks."""

    def __init__(self, depth: int, scale: Scale) -> None:
        super().__init__()
        heads = max(scale.tensor_ranks, scale.width // 128)
        self.gpt = GPT(width=scale.width, depth=depth, heads=heads, context=scale.context)

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        self.gpt.parallelize(self.device_mesh["tensor_parallel"])

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return F.cross_entropy(self.gpt(batch).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def rehearsed(
    depth: int, stage: int, checkpointing: ActivationCheckpointing | None, scale: Scale = SMALL, steps: int = 2
) -> Rehearsal:
    """Two steps of a rank: the second one has optimizer state from its beginning. Weights, gradients and activations
    have two bytes, as in the paper."""
    strategy = {
        "stage": stage,
        "tensor_parallel_size": scale.tensor_ranks,
        "activation_checkpointing": checkpointing,
        "reduce_dtype": "bfloat16",
        "bucket_size_mb": 1,
    }
    return rehearse(
        lambda: Divided(depth, scale),
        lambda: torch.zeros(scale.batch, scale.context, dtype=torch.long),
        strategy,
        ranks=scale.tensor_ranks * scale.data_ranks,
        precision="bf16-true",
        steps=steps,
    )


class Largest(NamedTuple):
    """The largest model of a configuration."""

    depth: int
    billions: float  # parameters of its blocks, of the paper's width


@functools.cache
def configured(how: Configuration, depth: int) -> Rehearsal:
    return rehearsed(depth, how.stage, how.checkpointing)


def largest_rehearsed(how: Configuration) -> Largest:
    """Returns the deepest model that fits into `DEVICE_BYTES`, on the line through those of `DEPTHS`."""
    few, many = (configured(how, depth) for depth in DEPTHS)
    blocks = DEPTHS[1] - DEPTHS[0]
    each = (many.peak.nbytes - few.peak.nbytes) / blocks
    numel = (many.numel - few.numel) * SMALL.tensor_ranks * FACTOR / blocks
    depth = int(DEPTHS[0] + (DEVICE_BYTES - few.peak.nbytes) / each)
    return Largest(depth, depth * numel / 1e9)


def show_rehearsed() -> None:
    found = {name: largest_rehearsed(how) for name, how in PAPER.items()}
    print("\nThe largest models of C1 to C5 with 32 GB, on 400 ranks, 16 of them tensor-parallel")
    print(f"{'':4}{'stage':>6}{'P_a':>6}{'+cpu':>6}{'blocks':>8}{'ours':>7}{'paper':>7}{'x C1':>7}{'paper':>7}")
    for name, (depth, billions) in found.items():
        told = PAPER[name].billions
        ratios = f"{billions / found['C1'].billions:>7.2f}{told / PAPER['C1'].billions:>7.2f}"
        print(f"{name:4}{PAPER[name].told}{depth:>8}{billions:>6.0f}B{told:>6}B{ratios}")
    print("The paper's devices also held what a rehearsal does not count, and twelve bytes of optimizer, not four.")


# --- trained on four ranks


@dataclass(frozen=True)
class Trial:
    """What all five have in common."""

    limit_mb: float  # of memory on the device of each rank, MiB
    width: int
    context: int  # tokens of a sequence
    batch: int  # sequences per rank


def measure(setting: Trial) -> None:
    """Trains, and prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        # Forked: each rank finds imported what takes longer to import than a training takes.
        mp.start_processes(on_rank, (Path(folder), setting), TENSOR_RANKS * DATA_RANKS, start_method="fork")
        show(json.loads((Path(folder) / FOUND).read_text()), setting.limit_mb)


def show(found: dict[str, tuple[int, int, int]], limit: float) -> None:
    print(f"The largest GPT with at most {limit:g} MiB on each of {TENSOR_RANKS * DATA_RANKS} ranks")
    print(f"{'':4}{'stage':>6}{'P_a':>6}{'+cpu':>6}{'blocks':>8}{'parameters':>12}{'MiB':>8}{'x C1':>7}{'paper':>8}")
    for name, (depth, numel, peak) in found.items():
        how = PAPER[name]
        ratios = f"{numel / max(1, found['C1'][1]):>7.2f}{how.billions / PAPER['C1'].billions:>8.2f}"
        print(f"{name:4}{how.told}{depth:>8}{numel:>12,}{peak / MIB:>8.2f}{ratios}")


# --- ... on each rank


def on_rank(rank: int, folder: Path, setting: Trial) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=TENSOR_RANKS * DATA_RANKS)
    comm, found = make_comm(torch.device("cpu"), timedelta(seconds=60)), {}
    mesh = init_device_mesh("cpu", (DATA_RANKS, TENSOR_RANKS), mesh_dim_names=("data_parallel", "tensor_parallel"))
    for name, how in PAPER.items():

        def trial(depth: int, how: Configuration = how) -> tuple[int, int]:
            return train(depth, how, mesh["tensor_parallel"], comm, setting)

        found[name] = largest_within(trial, int(setting.limit_mb * MIB))
    if rank == 0:
        (folder / FOUND).write_text(json.dumps(found))
    dist.destroy_process_group()


def largest_within(trial: Callable[[int], tuple[int, int]], limit: int) -> tuple[int, int, int]:
    """Blocks, parameters and peak of the deepest model that stays within the limit. Every block takes as much as
    another, to within a tenth: so two models tell where to look, and one that would be far too deep is not tried."""
    peaks = {depth: trial(depth) for depth in (2, 6)}
    slope = max(1, (peaks[6][1] - peaks[2][1]) // 4)
    depth = max(1, 2 + (limit - peaks[2][1]) // slope)
    peaks[depth] = peaks.get(depth) or trial(depth)
    while peaks[depth][1] + 0.9 * slope <= limit:
        depth += 1
        peaks[depth] = peaks.get(depth) or trial(depth)
    while peaks[depth][1] > limit and depth > 1:
        depth -= 1
        peaks[depth] = peaks.get(depth) or trial(depth)
    return (depth, *peaks[depth]) if peaks[depth][1] <= limit else (0, 0, 0)


def train(depth: int, how: Configuration, tensor_mesh: DeviceMesh, comm: Comm, setting: Trial) -> tuple[int, int]:
    """Two steps; parameters, and bytes on the device of the rank that has most there."""
    torch.manual_seed(0)
    model = GPT(width=setting.width, depth=depth, heads=4, context=setting.context)
    numel = sum(parameter.numel() for parameter in model.parameters())
    model.parallelize(tensor_mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(
        model, [optimizer], stage=how.stage, comm=comm,
        options=Options(
            tensor_parallel_size=TENSOR_RANKS, activation_checkpointing=how.checkpointing,
            machine=Machine(host_is_apart=True), bucket_bytes=BUCKET_BYTES,
        ),
    )  # fmt: skip
    tokens = torch.randint(VOCABULARY, (setting.batch, setting.context + 1))
    for _ in range(2):
        with engine.forward():
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        with engine.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = comm.all_reduce(torch.tensor(engine.ledger.tier_peak[Tier.DEVICE]), "peak", "max")
    engine.close()
    return numel, int(peak)
