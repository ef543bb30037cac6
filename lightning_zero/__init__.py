"""ZeRO for PyTorch Lightning."""

from lightning_zero.checkpoint import CheckpointError, verify
from lightning_zero.checkpoint.export import consolidate, export_safetensors
from lightning_zero.config import ActivationCheckpointing, Checkpoint, Offload
from lightning_zero.pl import interop
from lightning_zero.pl.ema import ZeroEMA
from lightning_zero.pl.monitor import ZeroMonitor
from lightning_zero.pl.other_name import serve_pytorch_lightning
from lightning_zero.pl.strategy import ZeroStrategy

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
    "serve_pytorch_lightning",
    "verify",
]

interop.install()
