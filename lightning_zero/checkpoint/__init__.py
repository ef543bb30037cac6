"""Checkpoints: a folder of safetensors shards and a JSON manifest, complete or absent, for any number of ranks."""

from lightning_zero.checkpoint.folder import CheckpointError, Folder
from lightning_zero.checkpoint.keeper import CheckpointKeeper
from lightning_zero.checkpoint.load import StoredCheckpoint, find_newest, reads_objects, verify
from lightning_zero.checkpoint.save import Saver, pickle_on_all_ranks

__all__ = [
    "CheckpointError",
    "CheckpointKeeper",
    "Folder",
    "Saver",
    "StoredCheckpoint",
    "find_newest",
    "pickle_on_all_ranks",
    "reads_objects",
    "verify",
]
