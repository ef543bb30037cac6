"""Models that people really train, made tiny: transformers and peft from configuration objects, torch's own, a ResNet.

Every model takes a batch as keyword arguments and returns something with a `loss` and `logits`, as transformers do.
"""

from typing import Any, NamedTuple

import lightning as L
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from jobs import clip_by_exact_norm, state_of, trainer
from models import recurrent_kernels

VOCABULARY, LENGTH, CLASSES, EXPERTS = 50, 8, 5, 4
STEPS, BATCH_SIZE = 3, 2
UNCLIPPED = 2  # steps: at stage 3 the second is the first that follows a plan
NEW_TOKENS = 4
MAX_NORM = 0.01  # below every gradient here


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


# -- transformers


def bert(dropout: float = 0.0) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForMaskedLM(config)


def bert_classifier() -> nn.Module:
    """A head on the pooled first token: the pooler trains, and no weight is tied."""
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**{**bert().config.to_dict(), "num_labels": CLASSES, "classifier_dropout": 0.0})
    )


def gpt2(dropout: float = 0.0) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=2 * LENGTH,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        **no_special_tokens(),
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **no_special_tokens(),
    )
    return transformers.LlamaForCausalLM(config)


def t5(dropout: float = 0.0) -> nn.Module:
    """One table for the encoder, the decoder and the head; position biases that every layer shares."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=dropout,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def albert() -> nn.Module:
    """One layer's weights, used three times."""
    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=12,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=LENGTH,
        classifier_dropout_prob=0.0,
    )
    return transformers.AlbertForMaskedLM(config)


def mixtral(experts: str = "grouped_mm") -> nn.Module:
    """Two of four experts per token; all experts of a layer are one parameter, whichever of them are used."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        output_router_logits=True,
        experts_implementation=experts,
        **no_special_tokens(),
    )
    return transformers.MixtralForCausalLM(config)


def mixtral_expert_by_expert() -> nn.Module:
    return mixtral("eager")


def switch() -> nn.Module:
    """One of four experts per token; each expert is a module, whose forward does not run where it has no token."""
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=2,
        num_experts=EXPERTS,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.SwitchTransformersForConditionalGeneration(config)


def no_special_tokens() -> dict[str, Any]:
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


# -- peft


def lora() -> nn.Module:
    """A frozen GPT-2 that trains only low-rank updates of its attention."""
    import peft  # ranks have it already, and lanes of the tests need it for nothing

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)  # zeros would leave the other factor without a gradient
    return model


# -- torch


class Block(nn.Module):
    """Two convolutions around which the input passes by; the second block halves the picture."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.bypass = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.body(x) + self.bypass(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Block(6, 6, stride=1), Block(6, 10, stride=2))
        self.head = nn.Linear(10, CLASSES)

    def forward(self, pixels: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.blocks(self.stem(pixels)).mean((2, 3)))
        return Output(cross_entropy(logits, labels), logits)


class Encoder(nn.Module):
    """torch's encoder, which in evaluation computes whole layers in one fused call that takes the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Output:
        padding = None if attention_mask is None else attention_mask == 0
        logits = self.head(self.encoder(self.embedding(input_ids), src_key_padding_mask=padding))
        return Output(cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class Pooled(nn.Module):
    """An encoder layer and an attention that stand alone, and not in a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.pool = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        hidden = self.layer(self.embedding(input_ids))
        logits = self.head(self.pool(hidden, hidden, hidden, need_weights=False)[0])
        return Output(cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class Attentive(nn.Module):
    """Attention of every kind: of a token to others (as in a vision transformer), with its weights and masked, to
    another sequence, to one of another width, used twice in a step; and a recurrent cell."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.LayerNorm(16)
        self.own = nn.MultiheadAttention(16, 2, batch_first=True)
        self.across = nn.MultiheadAttention(16, 2, batch_first=True, add_bias_kv=True)
        self.wider = nn.MultiheadAttention(16, 2, batch_first=True, kdim=12, vdim=20, bias=False)
        self.keys, self.values = nn.Linear(16, 12), nn.Linear(16, 20)
        self.cell = nn.GRUCell(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        tokens = self.norm(self.embedding(input_ids))
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        hidden = tokens + self.own(tokens, tokens, tokens, need_weights=False)[0]
        hidden = hidden + self.own(hidden, hidden, hidden, attn_mask=mask)[0]  # in fp32: torch's kernel is for these
        hidden = hidden + self.across(hidden, tokens, tokens)[0]
        hidden = hidden + self.wider(hidden, self.keys(tokens), self.values(tokens))[0]
        state = torch.zeros_like(hidden[:, 0])
        for at in range(LENGTH):
            state = self.cell(hidden[:, at], state)
        logits = self.head(hidden + state[:, None])
        return Output(cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class Translator(nn.Module):
    """torch's encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        heard, said = self.embedding(input_ids), self.embedding(labels[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(said.shape[1])
        logits = self.head(self.transformer(heard, said, tgt_mask=mask, tgt_is_causal=True))
        return Output(cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()), logits)


class Recurrent(nn.Module):
    """A two-layer LSTM whose recurrent weights are parametrized by norm and direction."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.lstm = nn.LSTM(12, 16, num_layers=2, batch_first=True)
        for name in ("weight_hh_l0", "weight_hh_l1"):
            nn.utils.parametrizations.weight_norm(self.lstm, name)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        with recurrent_kernels():
            hidden = self.lstm(self.embedding(input_ids))[0]
        logits = self.head(hidden)
        return Output(cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


MODELS = {
    "bert": bert,
    "bert classifier": bert_classifier,
    "gpt2": gpt2,
    "llama": llama,
    "t5": t5,
    "albert": albert,
    "mixtral": mixtral,
    "mixtral expert by expert": mixtral_expert_by_expert,
    "switch": switch,
    "lora": lora,
    "resnet": ResNet,
    "encoder": Encoder,
    "padded encoder": Encoder,
    "pooled": Pooled,
    "attentive": Attentive,
    "translator": Translator,
    "recurrent": Recurrent,
}
GENERATE = ("gpt2", "llama", "t5", "mixtral", "lora")
PADDED = ("bert", "bert classifier", "padded encoder")
MIXTURES = ("mixtral", "mixtral expert by expert", "switch")


def samples(name: str) -> list[dict[str, Tensor]]:
    """What STEPS steps of two ranks see."""
    generator = torch.Generator().manual_seed(0)

    def integers(below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=generator)

    def sample() -> dict[str, Tensor]:
        if name == "resnet":
            return {"pixels": torch.randn(3, 8, 8, generator=generator), "labels": integers(CLASSES)}
        tokens = integers(VOCABULARY, LENGTH)
        if name in MIXTURES:  # one word over and over goes to the same experts: others stay idle
            tokens = tokens[:1].expand(LENGTH).clone()
        if name in PADDED:
            mask = (torch.arange(LENGTH) < 5 + integers(4)).long()
            labels = integers(CLASSES) if name == "bert classifier" else tokens.where(mask == 1, torch.tensor(-100))
            return {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        return {"input_ids": tokens, "labels": tokens}

    return [sample() for _ in range(STEPS * 2 * BATCH_SIZE)]


class Trained(L.LightningModule):
    """Any of the models; keeps what a test compares. Clips by norm, from some step on or in all."""

    def __init__(self, model: nn.Module, *, generates: bool, clips_from: int, exact_norm: bool) -> None:
        super().__init__()
        self.model = model
        self.generates = generates
        self.clips_from = clips_from
        self.exact_norm = exact_norm
        self.losses: list[float] = []
        self.evaluated: list[Tensor] = []
        self.generated: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self.model(**batch)
        self.evaluated += [output.loss.clone(), output.logits.clone()]
        if self.generates:
            tokens = batch["input_ids"]
            settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
            found = self.model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **settings)
            self.generated.append(found)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.global_step < self.clips_from:
            return
        if self.exact_norm:
            clip_by_exact_norm(self, gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def note_experts(model: nn.Module) -> list[set[int]]:
    """The experts that have a token on this rank: one set per layer and forward."""
    used: list[set[int]] = []

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        chosen = args[1]  # numbers of experts, or flags
        used.append(set((chosen if chosen.shape[-1] == 2 else chosen.nonzero()[:, -1]).flatten().tolist()))

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(note)
    return used


def fit_model(
    model: nn.Module, name: str, strategy: Any, *, clips_from: int = 0, exact_norm: bool = False, **kwargs: Any
) -> dict[str, Any]:
    """Evaluates, fits STEPS steps, evaluates again; everything on this rank that a test compares."""
    module = Trained(model, generates=name in GENERATE, clips_from=clips_from, exact_norm=exact_norm)
    experts = note_experts(model) if name in MIXTURES else []
    before = state_of(module)
    data = DataLoader(samples(name), batch_size=BATCH_SIZE)  # type: ignore[arg-type]
    run = trainer(strategy, 2, limit_val_batches=1, num_sanity_val_steps=1, gradient_clip_val=MAX_NORM, **kwargs)
    run.fit(module, data, data)
    weights = state_of(module)
    return {
        "losses": module.losses,
        "evaluated": module.evaluated,
        "generated": module.generated,
        "weights": weights,
        "moved": {key for key in weights if not torch.equal(weights[key], before[key])},
        "parameters": [parameter_name for parameter_name, _ in module.named_parameters()],  # a tied one once
        "experts": experts,
    }


def fit(strategy: Any, name: str, **kwargs: Any) -> dict[str, Any]:
    """UNCLIPPED steps, and then with clipping."""
    L.seed_everything(1, verbose=False)
    return fit_model(MODELS[name](), name, strategy, clips_from=UNCLIPPED, **kwargs)


def fit_clipped(strategy: Any, name: str) -> dict[str, Any]:
    """All steps clipped by the Trainer."""
    L.seed_everything(1, verbose=False)
    return fit_model(MODELS[name](), name, strategy)


def fit_with_dropout(strategy: Any, name: str, **kwargs: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    return fit_model(MODELS[name](dropout=0.2), name, strategy, **kwargs)


def fit_with_recomputation(strategy: Any, name: str, *, reentrant: bool, **kwargs: Any) -> dict[str, Any]:
    """Layers are computed again in backward, as transformers does it."""
    L.seed_everything(1, verbose=False)
    model = MODELS[name]()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if name == "lora":
        model.enable_input_require_grads()  # as peft's users do: the frozen embedding's output asks for a gradient
    return fit_model(model, name, strategy, **kwargs)
