"""Checkpoints in Lightning's own format, a single file: when it is written, where it may be, and how it is read."""

import os
import pickle
import zipfile
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_zero.checkpoint import CheckpointError, Folder
from lightning_zero.config import Checkpoint


def is_plugin(io: CheckpointIO) -> bool:
    """Whether `io` is a plugin of the user's own, and not Lightning's default."""
    return type(io) is not TorchCheckpointIO


def is_read_by_plugin(io: CheckpointIO, path: str) -> bool:
    """Whether `io`, a plugin of the user's own, reads the checkpoint at `path`: it does unless that is a folder of
    shards."""
    if not is_plugin(io):
        return False
    try:
        return not Folder(path).is_checkpoint
    except ValueError:  # fsspec does not know the scheme; the plugin may
        return True


def format_beside(io: CheckpointIO | None, policy: Checkpoint, *, may_choose: bool) -> Checkpoint:
    """Returns how to save where `io` writes: as `policy` says, but if `io` is a plugin of the user's own and the policy
    `may_choose`, because the user has left it open, as single files.

    Raises:
        ValueError: when the user has asked for folders of shards, and `io` writes single files.
    """
    if policy.format == "full" or io is None or not is_plugin(io):
        return policy
    if may_choose:
        rank_zero_info(
            f"{type(io).__name__} writes single files, so checkpoints are single files, and not folders of shards. "
            "To have this unsaid, write checkpoint='full'."
        )
        return Checkpoint(format="full")
    raise ValueError(
        f"{type(io).__name__} writes single files, and checkpoints are folders of shards. Leave it out (for "
        "saves in the background there is Checkpoint(async_save=True)), or choose single files: "
        "ZeroStrategy(checkpoint=Checkpoint(format='full'))."
    )


def refuse_place(path: Any) -> None:
    """Raises CheckpointError where Lightning's writer would do the wrong thing: it moves its file into a folder of that
    name, and ignores a lack of permission."""
    place = Folder(path)
    if not place.is_local:
        return
    if place.fs.isdir(place.path):
        raise CheckpointError(
            f"{path} is a folder (a sharded checkpoint?), and format='full' writes a single file. Remove it, "
            "or choose another path."
        )
    effective = os.access in os.supports_effective_ids
    parent = place.parent.path
    if place.fs.isdir(parent) and not os.access(parent, os.W_OK, effective_ids=effective):
        raise CheckpointError(f"cannot write {path}: Permission denied")


def read_single_file(io: CheckpointIO, path: str, weights_only: bool | None) -> Any:
    """Returns the content of the checkpoint file at `path`. Torch's files are mapped into memory: ranks of a machine
    share the mapping, and each reads only what it owns.

    Raises:
        CheckpointError: for a file that is no checkpoint, for which torch raises errors of many classes.
    """
    is_zip = False
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        return io.load_checkpoint(path, weights_only=weights_only)
    except Exception as error:
        if is_zip and isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):
            raise  # torch's message says how to allow classes of the user's own
        raise CheckpointError(f"ckpt_path={path!r} is not a Lightning checkpoint: {error}") from error
