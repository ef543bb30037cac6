"""Checkpoints that are single files: Lightning's own, written by rank 0 and read by every rank."""

import os
import pickle
import zipfile
from collections.abc import Collection
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_zero.checkpoint import CheckpointError, Folder, pickle_on_all_ranks
from lightning_zero.checkpoint.save import Saver
from lightning_zero.config import Checkpoint


def is_plugin(io: CheckpointIO) -> bool:
    """Whether a `CheckpointIO` of the user's own writes and reads single files."""
    return type(io) is not TorchCheckpointIO


def is_folder_of_shards(path: str) -> bool:
    try:
        return Folder(path).is_checkpoint
    except ValueError:  # a scheme that fsspec does not know; a plugin may
        return False


def format_beside(io: CheckpointIO | None, policy: Checkpoint, *, may_choose: bool) -> Checkpoint:
    """How to save where `io` writes.

    Args:
        io: of the user's own, or Lightning's.
        policy: how to save otherwise.
        may_choose: the user has left it out.

    Raises:
        ValueError: for folders of shards beside an `io` that writes files.
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


def write_single_file(
    saver: Saver,
    io: CheckpointIO,
    checkpoint: dict[str, Any],
    path: Any,
    storage_options: Any,
    *,
    is_writer: bool,
    whole: Collection[str],
) -> None:
    """Rank 0, the writer, writes `checkpoint`. Call it on every rank: modules among users' own entries may be spread.

    Args:
        saver: of all ranks.
        io: writes the file.
        checkpoint: the same entries on every rank.
        path: of the file.
        storage_options: for `io`.
        is_writer: on rank 0.
        whole: the entries that are whole tensors already.

    Raises:
        CheckpointError: on every rank the same, when it cannot.
    """

    def look() -> dict[str, Any]:
        if is_writer and not is_plugin(io):
            _refuse_place(path)
        return {}

    def write() -> dict[str, Any]:
        if is_writer:
            io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        else:
            pickle_on_all_ranks({key: value for key, value in checkpoint.items() if key not in whole}, None)
        return {}

    # Two steps: where rank 0 found out only now that it must not write, others would wait for it in a gather.
    saver.together("look at the place", look)
    saver.together("write a single file", write)


def _refuse_place(path: Any) -> None:
    """Lightning's own writer moves its file into a folder of that name, and passes over a lack of permission."""
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
    """What is in torch's file at `path`. It is mapped into memory: the ranks of a machine share it, and read of it what
    they own.

    Raises:
        CheckpointError: for bytes that are no pickle, of which torch raises whatever it stumbles on.
    """
    is_zip = False
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        return io.load_checkpoint(path, weights_only=weights_only)
    except Exception as error:
        if is_zip and isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):
            raise  # torch says how to opt in to objects of one's own
        raise CheckpointError(f"ckpt_path={path!r} is not a Lightning checkpoint: {error}") from error
