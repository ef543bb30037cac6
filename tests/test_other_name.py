"""Packages that import `pytorch_lightning` train with this strategy: one code base, under either name."""

import subprocess
import sys
from pathlib import Path

import warm

PACKAGE = """
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.seed import seed_everything
from pytorch_lightning.callbacks.early_stopping import EarlyStopping
from pytorch_lightning.utilities import rank_zero_only


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(strategy):
    seed_everything(1, verbose=False)
    model = Model()
    how = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, callbacks=[EarlyStopping("loss")], **how
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))
    return model.losses
"""


def run(folder: Path, script: str) -> "subprocess.CompletedProcess[str]":
    """Beside a package that has not heard of us."""
    (folder / "package.py").write_text(PACKAGE)
    (folder / "script.py").write_text(script)
    with warm.starts():
        return subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=600)


def test_a_package_of_the_old_name_trains_with_the_numbers_of_one_device(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "import lightning_zero\n"
        "import lightning.pytorch\n"
        "own = lightning.pytorch.__spec__\n"
        "lightning_zero.serve_pytorch_lightning()\n"
        "import sys, package\n"
        "finders = [*sys.meta_path]\n"
        "lightning_zero.serve_pytorch_lightning()\n"
        "assert sys.meta_path == finders\n"
        "assert package.pl is lightning.pytorch\n"
        "assert lightning.pytorch.__spec__ is own and lightning.pytorch.callbacks.__name__.startswith('lightning.')\n"
        "expected = package.fit('auto')\n"
        "assert len(set(expected)) == 4\n"
        "assert package.fit('zero_stage_2') == expected\n"
        "assert package.fit(lightning_zero.ZeroStrategy(stage=3)) == expected\n"
        "try:\n"
        "    import pytorch_lightning.nothing_of_this_name\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error)\n",
    )
    assert done.returncode == 0, done.stderr
    assert "nothing_of_this_name" in done.stdout


def test_a_trainer_of_the_copy_says_what_to_call(tmp_path: Path) -> None:
    done = run(tmp_path, "import package\nimport lightning_zero\npackage.fit(lightning_zero.ZeroStrategy(stage=2))\n")
    assert done.returncode == 1
    assert "call lightning_zero.serve_pytorch_lightning() before importing it" in done.stderr.splitlines()[-1]


def test_a_call_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "import package\nimport lightning_zero\nlightning_zero.serve_pytorch_lightning()\n")
    assert done.returncode == 1
    told = "serve_pytorch_lightning() comes too late: somebody has imported lightning_fabric and pytorch_lightning"
    assert told in done.stderr.splitlines()[-1]
