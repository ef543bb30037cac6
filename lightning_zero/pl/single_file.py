"""Checkpoints in Lightning's own format, a single file: when it is written, where it may be, and how it is read."""

import os
import pickle
import zipfile
from typing import Any, final

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_zero.checkpoint import CheckpointError, Folder
from lightning_zero.config import Checkpoint
from lightning_zero.pl.table import sized

SMALL_BYTES = 10**9  # of states of model and optimizers: unless the user chooses, checkpoints of more are sharded


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


@final
class CheckpointFormat:
    """How a strategy saves: as its user has written, as a plugin of the user's needs it, or as each run chooses."""

    def __init__(self, written: Checkpoint | None) -> None:
        self.policy = written  # None until it is chosen
        self.is_written = written is not None  # by the user
        self.goes_on_from_shards = False  # the run has resumed from a sharded checkpoint; its own may replace that one

    def take_plugin(self, io: CheckpointIO | None) -> None:
        """Saves single files if the user has left that open, and `io` is a plugin of the user's own, which writes them.

        Raises:
            ValueError: when the user has asked for folders of shards, and `io` writes single files.
        """
        if io is None or not is_plugin(io) or (self.policy is not None and self.policy.format == "full"):
            return
        if self.policy is not None:
            raise ValueError(
                f"{type(io).__name__} writes single files, and checkpoints are folders of shards. Leave it out (for "
                "saves in the background there is Checkpoint(async_save=True)), or choose single files: "
                "ZeroStrategy(checkpoint=Checkpoint(format='full'))."
            )
        rank_zero_info(
            f"{type(io).__name__} writes single files, so checkpoints are single files, and not folders of shards. "
            "To have this unsaid, write checkpoint='full'."
        )
        self.policy = Checkpoint(format="full")

    def begin_fit(self, io: CheckpointIO) -> None:
        """Leaves the format of a fit open, unless the user has written it, or `io` is a plugin of the user's own."""
        self.goes_on_from_shards = False
        if not (self.is_written or is_plugin(io)):
            self.policy = None

    def choose(self, nbytes: int) -> str:
        """Chooses for a run, and returns a message that says so. `nbytes` are those of the states of model and
        optimizers."""
        small = sized(SMALL_BYTES)
        why = f"the states of model and optimizers take {sized(nbytes)}"
        if nbytes <= SMALL_BYTES and not self.goes_on_from_shards:
            self.policy = Checkpoint(format="full")
            told = f"Checkpoints are single files: {why}, and up to {small} goes into one file."
            return f"{told} For shards write checkpoint='sharded'."
        self.policy = Checkpoint()
        why = "the run goes on from one" if self.goes_on_from_shards else f"{why}, and more than {small} is sharded"
        return f"Checkpoints are folders of shards: {why}. For single files write checkpoint='full'."


def refuse_place(path: Any, *, replaces_shards: bool) -> None:
    """Raises CheckpointError where a single file cannot be written: where there is a folder, unless it is a sharded
    checkpoint, which the file `replaces_shards`; inside of a checkpoint; and without permission, which Lightning's
    writer ignores."""
    place = Folder(path)
    place.parent.refuse_inside_checkpoint()
    if not place.is_local:
        return
    if place.fs.isdir(place.path) and replaces_shards:
        place.refuse_other_folder()
    elif place.fs.isdir(place.path):
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
