"""Checkpoints: a folder of safetensors shards and a JSON manifest, complete or absent, for any number of ranks."""

from lightning_zero.checkpoint.folder import CheckpointError, Folder
from lightning_zero.checkpoint.load import StoredCheckpoint, find_newest, verify
from lightning_zero.checkpoint.save import Saver
from lightning_zero.checkpoint.tree import Partial

__all__ = ["CheckpointError", "Folder", "Partial", "Saver", "StoredCheckpoint", "find_newest", "verify"]
