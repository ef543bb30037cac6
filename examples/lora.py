"""LoRA: a frozen transformer from `transformers`, and the small adapters of `peft` that are all that trains."""

import warnings

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torchmetrics.text import Perplexity
from transformers import GPT2Config, GPT2LMHeadModel

from gpt import VOCABULARY

ADAPTED = ["c_attn", "c_proj", "c_fc", "lm_head"]  # every matrix of GPT-2 but the embeddings


def adapted_gpt2(*, width: int, depth: int, heads: int, context: int, rank: int) -> PeftModel:
    """A frozen GPT-2 over bytes, with adapters of `rank` beside its matrices.

    It is built from its configuration, so nothing is downloaded and the frozen weights are random; with
    `GPT2LMHeadModel.from_pretrained(...)` in their place the rest of this file stays as it is.
    """
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=context,
        n_embd=width,
        n_layer=depth,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,  # an adapter of the head would be one of the embedding as well
        use_cache=False,
    )
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ADAPTED, fan_in_fan_out=True)
    with warnings.catch_warnings():
        # That the head, alone, is a Linear and not GPT-2's Conv1D; and of peft's own use of an old name.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to True")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        return get_peft_model(GPT2LMHeadModel(config), adapters)


class LoraLanguageModel(L.LightningModule):
    """Trains the adapters of a frozen GPT-2 with AdamW and a learning rate that falls to zero."""

    def __init__(
        self, *, width: int, depth: int, heads: int, context: int, rank: int, learning_rate: float, weight_decay: float
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.network = adapted_gpt2(width=width, depth=depth, heads=heads, context=context, rank=rank)
        self.perplexity = Perplexity()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        tokens, following = batch
        loss = F.cross_entropy(self._logits(tokens).flatten(0, 1), following.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        tokens, following = batch
        logits = self._logits(tokens).float()
        self.perplexity.update(logits, following)
        self.log("val_perplexity", self.perplexity, prog_bar=True)
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), following.flatten()), sync_dist=True)

    def _logits(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, VOCABULARY)
        return self.network(input_ids=tokens).logits

    def configure_optimizers(self) -> OptimizerLRScheduler:
        adapters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=self.learning_rate, weight_decay=self.weight_decay)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
