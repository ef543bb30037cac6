"""Small models, data and optimizers that every test file shares."""

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

VOCABULARY = 13
RANDOM_NUMBERS = threading.RLock()  # held by whoever seeds them: ranks that are threads share them

M = TypeVar("M", bound=nn.Module)

Maker = Callable[[nn.Module], tuple[Optimizer, LRScheduler | None]]


def recurrent_kernels() -> AbstractContextManager[None]:
    """Around what runs an RNN: keeps oneDNN from those that it cannot run on this CPU."""
    # Without AVX-512 oneDNN has no LSTM under bf16, and torch asks it all the same: "could not create a primitive
    # descriptor for the LSTM forward propagation primitive", under plain DDP too.
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return nullcontext() if supported else torch.backends.mkldnn.flags(enabled=False)


class Assorted(nn.Module):
    """A bit of everything that used to need wrapping: tied, frozen, unused, scalar, direct and uneven parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 10)
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"up": nn.Linear(10, 17), "down": nn.Linear(17, 10)}) for _ in range(2)]
        )
        self.norm = nn.LayerNorm(10)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.frozen = nn.Linear(10, 10)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.head = nn.Linear(10, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block["down"](torch.tanh(block["up"](hidden)))
        return self.head(self.norm(self.frozen(hidden) + hidden) * self.scale)


def seeded(make: Callable[[], M], seed: int = 0) -> M:
    """The same model whoever makes it: one after another, because ranks as threads share the random generator."""
    with RANDOM_NUMBERS, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def assorted(seed: int = 0) -> Assorted:
    return seeded(Assorted, seed)


def batch(rank: int, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets ``(4, 6)``, the same for the same place whatever ran before."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    tokens = torch.randint(0, VOCABULARY, (4, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, rank: int, step: int, micro: int = 0) -> Tensor:
    tokens, targets = batch(rank, step, micro)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def adamw(model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
    """AdamW with two groups, and a scheduler."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=3)


def sgd(model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trainable, lr=0.05, momentum=0.9), None


def clone(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
