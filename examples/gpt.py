"""A small GPT over bytes, and the LightningModule that trains it."""

import math

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics.text import Perplexity

VOCABULARY = 256  # one token per byte


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width) -> (batch, time, width)
        batch, time, width = x.shape
        per_head = (batch, time, self.heads, width // self.heads)
        q, k, v = (part.view(per_head).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


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

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        # Small, so that an untrained model knows nothing: a perplexity of about 256.
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, VOCABULARY)
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
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.gpt = GPT(width=width, depth=depth, heads=heads, context=context, tie_head=tie_head)
        self.perplexity = Perplexity()

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
            logits = self.gpt(tokens[:, -self.gpt.context :])[:, -1]
            chances = torch.softmax(logits.float().cpu() / temperature, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=dice).to(device)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def _cross_entropy(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())
