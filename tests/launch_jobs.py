"""What a program does whose ranks Lightning starts out of its own process, by "spawn", "fork" or "forkserver".

As a script, one rank that somebody else has started: `launch_jobs.py STAGE FILE` writes the losses that it sees.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from jobs import Classifier, fit, loader, state_of, trainer
from lightning_zero import ZeroStrategy
from ranks import PATIENCE

BOTH = {"wait_timeout": PATIENCE, "units": "modules"}


class Seeded(Classifier):
    """A fork server that this process has already started knows no seed, or an older one: Lightning sends it none."""

    def setup(self, stage: str) -> None:
        os.environ["PL_GLOBAL_SEED"] = "1"


def start_ranks_and_go_on(method: Any, stage: int | None, folder: Path) -> dict[str, Any]:
    """Fits, saves, tests the best, and fits on with another trainer: all asked for by this process, which trains
    nothing itself. `stage` None is DDP."""

    def strategy() -> Any:
        if stage is None:
            return DDPStrategy(find_unused_parameters=True, start_method=method)
        checkpoint = "sharded" if stage > 1 else None  # a single file, as the model is small
        return ZeroStrategy(stage, start_method=method, checkpoint=checkpoint, **BOTH)

    L.seed_everything(1, verbose=False)
    model = Seeded()
    best = ModelCheckpoint(folder, monitor="val_loss")
    run = trainer(strategy(), 2, callbacks=[best], enable_checkpointing=True)
    run.fit(model, loader(), loader(seed=1))
    found = {"fitted": state_of(model), "val_loss": float(run.callback_metrics["val_loss"])}
    run.save_checkpoint(folder / "after.ckpt")
    (tested,) = run.test(model, loader(seed=2), ckpt_path="best", verbose=False)
    more = trainer(strategy(), 2, max_epochs=2)  # one trainer fits once: Lightning refuses a second time
    more.fit(model, loader(), loader(seed=1))
    left = sum(parameter.grad is not None for parameter in model.parameters())
    return {**found, **tested, "fitted again": state_of(model), "gradients": left, "steps": more.global_step}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(fit({"stage": int(sys.argv[1])}, 2)["losses"]))
