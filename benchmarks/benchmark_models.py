"""The models that the benchmarks train: a plain GPT, in sizes that differ in what costs the most, and small modules."""

from argparse import Namespace
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Size:
    vocabulary: int
    width: int
    depth: int  # blocks
    heads: int  # none: a stack of small modules
    length: int  # tokens per sequence
    batch: int  # sequences per rank
    parameters: int  # what the above amounts to; `model_of` checks it

    @property
    def flops(self) -> float:
        """Floating-point operations of a step on one rank, forward and backward: 6 for each token and weight that
        multiplies it, and those of attention, which are 12 x depth x width x length for each token."""
        weights = self.parameters - (self.vocabulary + (self.length if self.heads else 0)) * self.width
        attention = 12 * self.depth * self.width * self.length if self.heads else 0
        return float(self.batch * self.length * (6 * weights + attention))

    def with_layers(self, depth: int) -> "Size":
        """Returns the same with so many blocks, of `heads`."""
        block = 12 * self.width**2 + 13 * self.width  # four matrices and their biases, and two norms
        return replace(self, depth=depth, parameters=self.parameters + (depth - self.depth) * block)


SIZES = {
    # For GPUs: what one of them trains with a billion parameters.
    "billion": Size(vocabulary=32_000, width=2048, depth=18, heads=16, length=1024, batch=4, parameters=1_039_622_144),
    # Few tokens for many parameters: communication and the optimizer count.
    "large": Size(vocabulary=8192, width=768, depth=12, heads=12, length=64, batch=2, parameters=97_688_064),
    # Many tokens for few parameters: compute counts.
    "small": Size(vocabulary=4096, width=512, depth=8, heads=8, length=128, batch=4, parameters=29_479_936),
    # 15 modules of 11 kB: messages and Python count.
    "modules": Size(vocabulary=53, width=53, depth=14, heads=0, length=1, batch=4, parameters=42_877),
    # Seconds for a test of the benchmark itself.
    "tiny": Size(vocabulary=256, width=64, depth=2, heads=2, length=16, batch=2, parameters=133_888),
}


def size_of(options: Namespace) -> Size:
    """The size that was asked for, with as many `layers` as were asked for (None: its own)."""
    size = SIZES[options.size]
    return size if options.layers is None else size.with_layers(options.layers)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.projection = nn.Linear(size.width, size.width)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, width)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, length) -> (batch, length, vocabulary)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


class Stack(nn.Sequential):
    def __init__(self, size: Size) -> None:
        layers = [module for _ in range(size.depth) for module in (nn.Tanh(), nn.Linear(size.width, size.width))]
        super().__init__(nn.Embedding(size.vocabulary, size.width), *layers)


def model_of(size: Size) -> nn.Module:
    """Takes tokens ``(batch, length)``, returns logits ``(batch, length, vocabulary)``."""
    model = GPT(size) if size.heads else Stack(size)
    assert sum(p.numel() for p in model.parameters()) == size.parameters
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model of `model_of` that FSDP2 takes as units, in order: its blocks, or its small modules."""
    modules = model.blocks if isinstance(model, GPT) else model.children()
    return [module for module in modules if any(True for _ in module.parameters())]
