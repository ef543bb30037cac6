"""ZeRO for PyTorch Lightning."""

from lightning_zero.config import ActivationCheckpointing, Checkpoint, Offload
from lightning_zero.strategy import ZeroStrategy

__all__ = ["ActivationCheckpointing", "Checkpoint", "Offload", "ZeroStrategy"]
