"""Models whose blocks are awkward to recompute, and what the tests of activation checkpointing call on real ranks."""

import copy
import datetime
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import jobs
from lightning_zero.run.recompute import Recompute
from lightning_zero.tiers.activations import ActivationStore
from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier
from lightning_zero.wire.native import make_comm
from models import seeded
from ranks import PATIENCE
from unit_jobs import state_of

WIDTH = 8


class Drifting(nn.Module):
    """Buffers that every training forward changes and reads: one in place, one replaced, one made late."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("late", None)
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0).to(self.mean.dtype), 0.25)
                self.scale = 0.9 * self.scale + 0.1
                self.late = x.detach().mean(0) if self.late is None else self.late + 1
        return (x - self.mean) * self.scale + 0.01 * (0 if self.late is None else self.late)


class Layer(nn.Module):
    """Takes a tensor and keyword arguments, returns a tuple and a dict."""

    def __init__(self, dropout: float = 0.3, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, hidden), nn.BatchNorm1d(hidden)
        self.drop, self.drift, self.down = nn.Dropout(dropout), Drifting(), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor, extra: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = torch.tanh(self.norm(self.up(self.drift(x) * mask)))
        x = x + self.down(self.drop(hidden)) * extra["scales"][0]
        return x, {"auxiliary": hidden.square().mean(), "same": mask}


class Awkward(nn.Module):
    """One layer runs twice, two share a weight, one is frozen, the first input is no gradient's."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(dropout) for _ in range(4)])
        self.layers[2].up.weight = self.layers[0].up.weight
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.linspace(0.5, 1.5, x.numel()).view_as(x)
        auxiliary = []
        for at in (0, 1, 2, 2, 3):
            scale = x.new_full((), 0.5) if at < 2 else x.detach().abs().mean()
            x, more = self.layers[at](x, mask=mask, extra={"scales": [scale], "name": "x", "nothing": None})
            auxiliary.append(more["auxiliary"])
        return self.head(x) + torch.stack(auxiliary).sum()


class Low(nn.Module):
    """A frozen layer and its adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Adapted(nn.Module):
    """`kind`: "adapted", "tied" or "frozen", a frozen half under a trained one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        make = Low if kind == "adapted" else lambda: nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(make()) for _ in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)
        if kind == "tied":
            self.blocks[3].inner.weight = self.blocks[0].inner.weight
            self.head.weight = self.blocks[1].inner.weight
        if kind != "tied":
            self.into.requires_grad_(False)
        if kind == "adapted":
            for block in self.blocks:
                block.norm.requires_grad_(False)
        if kind == "frozen":
            self.blocks[:2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Lit(L.LightningModule):
    """A model with blocks, dropout and BatchNorm under Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(jobs.FEATURES, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(WIDTH, jobs.CLASSES)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        mask = torch.ones_like(x)
        for layer in self.layers:
            x, _ = layer(x, mask=mask, extra={"scales": [mask[0, 0]]})
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]).float(), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


LAYERS, TOKENS, HIDDEN = 3, (4, 32), 32
HIDDEN_BYTES = 4 * TOKENS[0] * TOKENS[1] * HIDDEN


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    special = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=32, n_embd=HIDDEN, n_layer=LAYERS, n_head=2, **special)
    )


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_attention_heads=2, num_key_value_heads=1, **sizes))


TRANSFORMERS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "llama": llama}


def train_on_tokens(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    tokens = torch.randint(0, 50, TOKENS, generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(tokens)
    padding[0, 20:] = 0
    seen = {}
    for step in range(2):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, attention_mask=padding, labels=tokens).loss
        loss.backward()
        optimizer.step()
        seen[f"loss {step}"] = loss.detach()
    return seen | state_of(model, engine)


def partitioned_with_dropout(offload: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Gradients with partitioned activations, gradients without, and the bytes that this rank has kept."""
    here = Place(torch.device("cpu"))
    rests = Place(torch.device("cpu"), Tier.HOST) if offload else here
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    store = ActivationStore(Ledger(), here, rests, make_comm(here.device, datetime.timedelta(seconds=PATIENCE)))
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(4))
    plain = seeded(Awkward)
    model = copy.deepcopy(plain)
    recompute = Recompute(model, "auto", store)
    recompute.install()
    found = []
    for one in (model, plain):
        torch.manual_seed(7)
        one(x).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None})
    return found[0], found[1], store.ledger.peak_in[Category.ACTIVATION_CHECKPOINT, rests.tier]


def tensors_made_of_others(offload: bool) -> None:
    """DTensors, and the result of a collective that may be under way, come back as they were."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    here = Place(torch.device("cpu"))
    rests = Place(torch.device("cpu"), Tier.HOST) if offload else here
    store = ActivationStore(Ledger(), here, rests, make_comm(here.device, datetime.timedelta(seconds=PATIENCE)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.arange(256.0).view(16, 16)
    replicated = DTensor.from_local(values.clone(), mesh, [Replicate()]).requires_grad_()
    sharded = DTensor.from_local(values + dist.get_rank(), mesh, [Shard(1)], run_check=False)
    local = DTensor.from_local(values + 0, mesh, [Partial()]).redistribute(mesh, [Replicate()], async_op=True)
    arriving = local.to_local()  # waits when it is used
    assert hasattr(arriving, "trigger_wait")
    given = (replicated, sharded, arriving)
    kept = store.keep("block", (given, {}))
    own = values.nbytes // 2 + values.nbytes + values.nbytes // 2  # only what all have is divided
    assert store.ledger.live_in[Category.ACTIVATION_CHECKPOINT, rests.tier] == own
    found, _ = kept.fetch()
    assert (found[0].placements, found[1].placements) == (replicated.placements, sharded.placements)
    assert [tensor.requires_grad for tensor in found] == [True, False, False]
    assert found[1].shape == sharded.shape
    for tensor, expected in zip(found, given, strict=True):
        one, other = (item.to_local() if isinstance(item, DTensor) else item + 0 for item in (tensor, expected))
        assert torch.equal(one, other)


def fit(strategy: Any, precision: str, **kwargs: Any) -> dict[str, Any]:
    """All that training has come to."""
    L.seed_everything(1, verbose=False)
    model = Lit()
    run = jobs.trainer(
        strategy, 2, precision=precision, accumulate_grad_batches=2, gradient_clip_val=0.1, max_epochs=2, **kwargs
    )
    run.fit(model, jobs.loader(shuffle=True, samples=32), jobs.loader(seed=1, samples=16))
    return {
        "losses": model.losses,
        "val_loss": float(run.callback_metrics["val_loss"]),
        "state": jobs.state_of(model),
        "drawn": float(torch.rand(1)),
    }
