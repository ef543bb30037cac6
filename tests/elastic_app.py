"""A script as torchrun starts it: it goes on from its last checkpoint, and loses a rank (or a machine) on the way.

elastic_app.py FOLDER WHO     WHO kills itself at step 7 of the first attempt: "rank" (with the agent still there),
                              "machine" (agent and all), or "nobody"
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_jobs import Everything, data, trainer


class Record(L.Callback):
    """Writes the loss of every global batch."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
        if run.is_global_zero:
            with self.file.open("a") as out:
                print(run.global_step, run.world_size, run.callback_metrics["loss"].item(), file=out)


class Kill(L.Callback):
    """SIGKILL, in the middle of a step, once."""

    def __init__(self, who: str, marker: Path) -> None:
        self.who, self.marker = who, marker

    def on_before_optimizer_step(self, run: L.Trainer, *_: Any) -> None:
        is_doomed = {"rank": run.global_rank == 1, "machine": "DOOMED" in os.environ, "nobody": False}[self.who]
        if run.global_step == 7 and is_doomed and not self.marker.exists():
            self.marker.touch()
            if self.who == "machine":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, who: str) -> None:
    L.seed_everything(1, verbose=False)
    world = int(os.environ["WORLD_SIZE"])
    nodes = world // int(os.environ["LOCAL_WORLD_SIZE"])
    if who == "machine" and nodes == 1 and not (folder / "killed").exists():
        # The other machine was late for the first call, and torchrun starts both again as soon as it hears of it. It
        # may not hear of it, where each has taken the other for gone: after a failure it looks for both.
        time.sleep(10)
        raise TimeoutError("the other machine has not come")
    keep = ModelCheckpoint(dirpath=folder / "kept", every_n_train_steps=5, save_last=True)
    run = trainer(
        {"stage": 2},
        world // nodes,
        num_nodes=nodes,
        max_epochs=3,
        callbacks=[keep, Record(folder / "losses.txt"), Kill(who, folder / "killed")],
        enable_checkpointing=True,
    )
    run.fit(Everything(), data(world), ckpt_path="last")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
