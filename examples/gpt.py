"""A small GPT over bytes, and the LightningModule that trains it."""

import math

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchmetrics.text import Perplexity

VOCABULARY = 256  # one token per byte


class Attention(nn.Module):
    """Causal self-attention. The rows of `qkv` are those of one head after the other, so that ranks can divide them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width) -> (batch, time, width)
        qkv = self.qkv(x)  # of all heads, or of those that this tensor-parallel rank has
        q, k, v = qkv.view(*qkv.shape[:2], -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers, four times as wide between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One transformer layer, normalised before each part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, logits over the next byte out.

    Raises:
        ValueError: when `width` cannot be divided among `heads`.
    """

    def __init__(self, *, width: int, depth: int, heads: int, context: int, tie_head: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"model.width={width} is no multiple of model.heads={heads}. Change one of them.")
        self.context = context
        self.heads = heads
        self.sequence_ranks = 1  # a batch's sequences must be as long as a multiple of it
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tie_head:
            self.head.weight = self.token.weight
        self.apply(self._initialise)
        for name, weight in self.named_parameters():
            if name.endswith(
                ("attention.out.weight", "mlp.down.weight")
            ):  # the residual stream adds 2 * depth of these
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * depth))

    def parallelize(self, mesh: DeviceMesh, *, sequence: bool = False) -> None:
        """Divides the layers among tensor-parallel ranks, as Megatron-LM does: columns of the first matrix of each part
        of a block, rows of the second, so that ranks talk once per part and direction (its operators f and g).

        Args:
            mesh: with one axis.
            sequence: what lies between (norms, the residual stream) is divided along the sequence.

        Raises:
            ValueError: for sizes that the ranks cannot divide.
        """
        for name, size in (("heads", self.heads), ("context", self.context)):
            if size % mesh.size():
                raise ValueError(
                    f"model.{name}={size} cannot be divided among {mesh.size()} tensor-parallel ranks. Change "
                    f"model.{name} or strategy.tensor_parallel_size."
                )
        between = Shard(1) if sequence else Replicate()
        plan: dict[str, ParallelStyle] = {
            "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "position": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(0) if sequence else Replicate()
            ),
            "blocks.*.attention.qkv": ColwiseParallel(input_layouts=between),
            "blocks.*.attention.out": RowwiseParallel(output_layouts=between),
            "blocks.*.mlp.up": ColwiseParallel(input_layouts=between),
            "blocks.*.mlp.down": RowwiseParallel(output_layouts=between),
            "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
        }
        if sequence:
            plan |= {name: SequenceParallel() for name in ("blocks.*.norm1", "blocks.*.norm2", "norm")}
            self.sequence_ranks = mesh.size()
        is_tied = self.head.weight is self.token.weight
        parallelize_module(self, mesh, plan)
        if is_tied:  # torch has made two of it, divided alike
            self.head.weight = self.token.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        # Small, so that an untrained model knows nothing: a perplexity of about 256.
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, VOCABULARY)
        if tokens.shape[1] % self.sequence_ranks:
            raise ValueError(f"{tokens.shape[1]} tokens cannot be divided among {self.sequence_ranks} ranks. Pad them.")
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LanguageModel(L.LightningModule):
    """Trains a `GPT` with AdamW, a linear warm-up and a cosine decay to a tenth."""

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        heads: int,
        context: int,
        tie_head: bool = False,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.gpt = GPT(width=width, depth=depth, heads=heads, context=context, tie_head=tie_head)
        self.sequence_parallel = sequence_parallel
        self.perplexity = Perplexity()

    def configure_model(self) -> None:
        mesh = None if self.device_mesh is None else self.device_mesh["tensor_parallel"]
        is_divided = isinstance(self.gpt.head.weight, DTensor)  # in an earlier run of the trainer
        if mesh is not None and mesh.size() > 1 and not is_divided:
            self.gpt.parallelize(mesh, sequence=self.sequence_parallel)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        tokens, following = batch
        loss = _cross_entropy(self.gpt(tokens), following)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        tokens, following = batch
        logits = self.gpt(tokens).float()
        self.perplexity.update(logits, following)
        self.log("val_perplexity", self.perplexity, prog_bar=True)
        self.log("val_loss", _cross_entropy(logits, following), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._rate(step, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _rate(self, step: int, total: int) -> float:
        """The learning rate at `step`, as a share of the highest."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, total - self.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    @torch.no_grad()
    def generate(self, prompt: str, length: int, *, temperature: float = 0.8, seed: int = 0) -> str:
        """Continues `prompt` by `length` bytes.

        Every rank must call it with the same arguments: where parameters are sharded, ranks gather them together.
        """
        device = self.gpt.token.weight.device
        dice = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt.encode()) or [0]], device=device)
        for _ in range(length):
            window = tokens[:, -self.gpt.context :]
            padded = F.pad(
                window, (0, -window.shape[1] % self.gpt.sequence_ranks)
            )  # nobody attends to what comes later
            logits = self.gpt(padded)[:, window.shape[1] - 1]
            chances = torch.softmax(logits.float().cpu() / temperature, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=dice).to(device)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def _cross_entropy(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())
