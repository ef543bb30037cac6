"""litgpt: its own pretraining on Fabric. Its command chooses FSDP itself, so what is called is what that calls next,
with a Fabric of ours; `ddp` needs the same."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.pretrain import main
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from watch import as_user, in_shards

LENGTH = 16


class Tokens(DataModule):
    """As many rows as ranks read; a rank has every second one."""

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        self.batch_size = batch_size

    def rows(self, seed: int) -> DataLoader:
        made = torch.Generator().manual_seed(seed)
        return DataLoader(torch.randint(0, 1000, (64, LENGTH + 1), generator=made), batch_size=self.batch_size)  # type: ignore[arg-type]

    def train_dataloader(self) -> DataLoader:
        return self.rows(1)

    def val_dataloader(self) -> DataLoader:
        return self.rows(2)


class Losses:
    """What litgpt logs, on rank 0, and what is in shards meanwhile."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric, self.losses, self.in_shards = fabric, [], 0

    def log(self, metrics: Any, step: int | None = None) -> None:
        self.losses += [float(metrics[name]) for name in ("loss", "val_loss") if name in metrics]
        self.in_shards = in_shards(self.fabric.strategy)


def pretrain(
    strategy: Any, folder: Path, tied: bool, accumulate: int, max_norm: float, compiled: bool = False
) -> dict[str, Any]:
    """Four steps, and the weights of the last checkpoint. litgpt compiles the model; what it has compiled runs only if
    it is to be `compiled`."""
    sys.argv = ["litgpt", "small"]  # of its command, which it keeps beside each checkpoint
    fabric = Fabric(accelerator="cpu", devices=2, strategy=as_user(strategy), precision="32-true")
    fabric.launch()
    seen = Losses(fabric)
    fabric.log_dict = seen.log  # type: ignore[method-assign]
    config = Config(
        name="small",
        block_size=LENGTH,
        vocab_size=1000,
        padded_vocab_size=1024,
        n_layer=2,
        n_head=4,
        n_embd=288,
        intermediate_size=1152,
        bias=not tied,
        lm_head_bias=False,
    )
    tokens = 4 * accumulate * 2 * 4 * LENGTH
    torch._dynamo.reset()  # or the graphs of the last training serve this one
    counters.clear()
    stance = contextlib.nullcontext() if compiled else torch.compiler.set_stance("force_eager")
    with contextlib.redirect_stdout(None), stance:
        main(
            fabric=fabric,
            devices=2,
            seed=1,
            initial_checkpoint_dir=None,
            resume=False,
            config=config,
            data=Tokens(),
            out_dir=folder,
            tokenizer_dir=None,
            tokenizer=None,
            train=TrainArgs(
                save_interval=2,
                log_interval=1,
                global_batch_size=2 * 4 * accumulate,
                micro_batch_size=4,
                max_tokens=tokens,
                max_norm=max_norm,
                lr_warmup_steps=1,
                tie_embeddings=tied,
                min_lr=1e-4,
            ),
            eval=EvalArgs(interval=2, max_iters=2, final_validation=False),
            optimizer="AdamW",
        )
    saved = folder / "final" / "lit_model.pth"
    return {
        "weights": torch.load(saved, weights_only=False)["model"] if fabric.global_rank == 0 else {},
        "losses": seen.losses,
        "graphs": counters["stats"]["unique_graphs"],
        "in shards": seen.in_shards,
        "saved is a file": saved.is_file(),
    }
