"""ZeRO for PyTorch Lightning."""

import importlib
import os
import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"  # read by pyproject.toml

__all__ = [
    "ActivationCheckpointing",
    "Checkpoint",
    "CheckpointError",
    "Offload",
    "ZeroEMA",
    "ZeroMonitor",
    "ZeroStrategy",
    "consolidate",
    "export_safetensors",
    "rehearse",
    "serve_pytorch_lightning",
    "verify",
]

# The command `lightning-zero` imports these names only when they are used: its help does not need torch and Lightning.
_comes_later = "_comes_later" not in globals() and (
    "".join(sys.argv[:1]).rpartition(os.sep)[2] == "lightning-zero" or sys.orig_argv[1:3] == ["-m", "lightning_zero"]
)

if TYPE_CHECKING or not _comes_later:
    from lightning_zero import clone
    from lightning_zero.checkpoint import CheckpointError, verify
    from lightning_zero.checkpoint.export import consolidate, export_safetensors
    from lightning_zero.config import ActivationCheckpointing, Checkpoint, Offload
    from lightning_zero.pl import automatic, interop
    from lightning_zero.pl.ema import ZeroEMA
    from lightning_zero.pl.monitor import ZeroMonitor
    from lightning_zero.pl.other_name import serve_pytorch_lightning
    from lightning_zero.pl.strategy import ZeroStrategy
    from lightning_zero.rehearsal import choosing
    from lightning_zero.rehearsal.rehearsal import rehearse

    automatic.install(choosing.choose)
    clone.install()
    interop.install()
else:

    def __getattr__(name: str) -> object:
        """Imports one of the names above: modules that are unpickled with the objects of a checkpoint may use them."""
        if name not in __all__ or not _comes_later:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.reload(sys.modules[__name__]), name)
