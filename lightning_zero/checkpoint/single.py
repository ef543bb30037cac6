"""A checkpoint in one file, as torch and Lightning write it: there at once or never, and verified before it is read.

torch writes a checksum of every record into its files, which are zip archives, and does not look at it when it reads.
"""

import contextlib
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.folder import CheckpointError, Folder, hidden_beside, sync_names, writing
from lightning_zero.checkpoint.resume import KEY

_CHUNK_BYTES = 1 << 22  # that are verified at a time
_MAGIC = b"PK\x03\x04"  # of zip archives, by which torch.load tells them, too


def write_at_once(place: Folder, write: Callable[[str], None]) -> None:
    """Calls `write` with the path of a file to write, which then becomes `place` in one step; a link or a sharded
    checkpoint that is there is replaced. On an object store that is `place` itself, where a file appears when it is
    whole. Raises CheckpointError for errors of the system.

    Shards and the file that replaces them are not exchanged in one step: a kill in between leaves neither at the place.
    On a disk the old ones are beside it then, hidden.
    """
    with writing(place):
        if not place.is_local:
            if place.is_checkpoint:
                place.remove()
            write(str(place))
            return
        target = Path(place.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        coming = hidden_beside(target, "writing")
        try:
            write(str(coming))
            with coming.open("rb") as file:
                os.fsync(file.fileno())
            delete_replaced = place.unlink() if target.is_dir() and not place.is_link else lambda: None
            coming.replace(target)
            sync_names(target.parent)
            delete_replaced()
        finally:
            coming.unlink(missing_ok=True)


def is_single_file(place: Folder) -> bool:
    """Whether a file, which is no file of a sharded checkpoint, is at this path."""
    return place.is_file and not place.parent.is_checkpoint


def refuse_other_files(file: Folder) -> None:
    """Raises CheckpointError for a file that does not begin as torch's archives do."""
    with file.fs.open(file.path, "rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise CheckpointError(f"{file} is not a checkpoint: it is a file, and not one that torch.save writes.")


def problems_in(file: Folder, part: int = 0, parts: int = 1) -> list[str]:
    """Returns a sentence for each record in share `part`, of `parts`, that is not as it was written. Files of other
    kinds have no checksums: for these there is nothing to say. Nothing is unpickled."""
    problems = []
    with file.fs.open(file.path, "rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            return []
        try:
            archive = zipfile.ZipFile(stream)
        except Exception as error:  # zipfile believes what it finds, and so may fail in any way
            return [f"{file} is damaged, or not whole: {error}."]
        with archive:
            for record in archive.infolist()[part::parts]:
                if record.CRC == 0:  # empty, or written after torch.serialization.set_crc32_options(False)
                    continue
                try:
                    with archive.open(record) as content:
                        while content.read(_CHUNK_BYTES):
                            pass
                except Exception as error:
                    problems.append(f"{file} is damaged: {error}.")
    return problems


def names_entry(file: Folder) -> bool:
    """Whether this package has written a single file: its pickle names the entry `KEY`. Nothing is unpickled."""
    unreadable = contextlib.suppress(zipfile.BadZipFile, OSError)
    with unreadable, file.fs.open(file.path, "rb") as stream, zipfile.ZipFile(stream) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return any(KEY.encode() in archive.read(name) for name in pickles)
    return False


def read_plain(file: Folder) -> dict[str, Any]:
    """Returns what is in a single file that holds tensors and plain values alone.

    Raises:
        CheckpointError: for a file that is damaged, is no checkpoint, or holds pickled objects.
    """
    refuse_other_files(file)
    if problems := problems_in(file):
        raise CheckpointError(problems[0])
    try:
        if file.is_local:  # a tensor is read when it is used
            found = torch.load(file.path, map_location="cpu", mmap=True, weights_only=True)
        else:
            with file.fs.open(file.path, "rb") as stream:
                found = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many classes
        told = str(error).splitlines()[0]
        raise CheckpointError(
            f"{file} cannot be read without unpickling objects, or is no checkpoint: {told} If you trust it, "
            "torch.load(..., weights_only=False) in Python reads it."
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("state_dict"), dict):
        raise CheckpointError(f"{file} is not a Lightning checkpoint: it has no 'state_dict'.")
    return found


def model_in(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of the model in what `read_plain` has returned."""
    return {name: value for name, value in found["state_dict"].items() if isinstance(value, Tensor)}
