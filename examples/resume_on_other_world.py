"""One training that changes machines twice: stage 3 on 4 ranks, then stage 1 on 2, then plain Lightning on one.

    python examples/resume_on_other_world.py

Every leg is a job of its own that goes on from the checkpoint of the one before, as after a crash or a queue that gives
other machines. Nothing is converted, and no flag says where the checkpoint comes from. What the script does itself is
keep the global batch: the batch of a rank is the global batch over the number of ranks, and one order of samples is
dealt out to all ranks. Then the losses are those of a job that was never interrupted, which the last column shows.

It trains in float64. Sums over 4, 8 and 16 windows round differently, and in float32 a hundred steps of AdamW carry
that into the sixth digit of the losses on some CPUs, where it would look like a difference.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, DistributedSampler

from gpt import LanguageModel
from lightning_zero import ZeroStrategy
from text import TextData

GLOBAL_BATCH = 16  # windows of text per optimizer step, over all ranks
EPOCHS = 3

LEGS: list[tuple[str, int, Any]] = [  # what is told, ranks, strategy
    ("stage 3 on 4 ranks", 4, {"stage": 3}),
    ("stage 1 on 2 ranks", 2, {"stage": 1}),
    ("plain Lightning on 1", 1, "auto"),
]
UNINTERRUPTED: tuple[str, int, Any] = ("never interrupted", 2, {"stage": 2})


class GlobalBatches(TextData):
    """The same global batches for any number of ranks."""

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        assert self.train is not None
        world, rank = self.trainer.world_size, self.trainer.global_rank
        sampler: DistributedSampler = DistributedSampler(self.train, world, rank, seed=0, drop_last=True)
        return DataLoader(self.train, GLOBAL_BATCH // world, sampler=sampler, drop_last=True)


class StopAfter(L.Callback):
    """Ends the job after an epoch; on a cluster, the end of its time does."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.losses: list[float] = []

    def on_validation_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.losses.append(trainer.callback_metrics["val_loss"].item())

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


def run(ranks: int, strategy: Any, *, until: int, start: str | None, out: Path) -> None:
    """Trains to the end of epoch `until`, from the checkpoint `start` if there is one, and saves to `out`.ckpt."""
    L.seed_everything(1, verbose=False)
    data = GlobalBatches(context=32, max_bytes=20_000, validation_windows=32, batch_size=8)
    model = LanguageModel(width=32, depth=2, heads=2, context=32, learning_rate=3e-3, weight_decay=0.1, warmup_steps=10)
    stop = StopAfter(until)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ZeroStrategy(**strategy) if isinstance(strategy, dict) else strategy,
        precision="64-true",
        max_epochs=EPOCHS,
        callbacks=[stop],
        use_distributed_sampler=False,  # the data module deals out samples itself
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(model, data, ckpt_path=start)
    trainer.save_checkpoint(f"{out}.ckpt")
    if trainer.is_global_zero:
        out.with_suffix(".json").write_text(json.dumps(stop.losses))


def run_job(number: int, folder: Path) -> list[float]:
    """A leg in processes of its own, as a scheduler would start it; validation losses of its epochs."""
    command = [sys.executable, __file__, "--leg", str(number), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    losses: list[float] = json.loads((folder / f"leg{number}.json").read_text())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where checkpoints go (default: a temporary folder)")
    parser.add_argument("--leg", type=int, help=argparse.SUPPRESS)  # the script calls itself with it
    options = parser.parse_args()
    if options.leg is not None:
        name, ranks, strategy = [*LEGS, UNINTERRUPTED][options.leg]
        is_leg = options.leg < len(LEGS)
        start = str(options.folder / f"leg{options.leg - 1}.ckpt") if is_leg and options.leg else None
        until = options.leg + 1 if is_leg else EPOCHS
        run(ranks, strategy, until=until, start=start, out=options.folder / f"leg{options.leg}")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        expected = run_job(len(LEGS), folder)
        print(f"{'epoch':>5}  {'':22}  {'validation loss':>15}  {UNINTERRUPTED[0]:>17}")
        for epoch, (name, _, _) in enumerate(LEGS):
            (loss,) = run_job(epoch, folder)
            print(f"{epoch:>5}  {name:22}  {loss:15.6f}  {expected[epoch]:17.6f}", flush=True)


if __name__ == "__main__":
    main()
