"""Converts checkpoints from and to folders of torch.distributed.checkpoint (DCP), as users of FSDP have them.

Both directions go through the memory of one process. DCP pickles its plan and all values that are no tensors: import
only what you trust.
"""

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from importlib import metadata
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from lightning_zero.checkpoint.folder import CheckpointError, Folder
from lightning_zero.checkpoint.load import StoredCheckpoint
from lightning_zero.checkpoint.resume import KEY, PARAMETERS
from lightning_zero.checkpoint.save import Saver
from lightning_zero.distributed_private import plan_of_all, remote_reader, remote_writer
from lightning_zero.wire.local import LocalComm

META = "meta.pt"  # here Lightning's FSDP and ModelParallel strategies put what is neither model nor optimizer
_MODEL_KEYS = ("model", "state_dict")  # of FSDPStrategy and torch's examples; of ModelParallelStrategy
_OPTIMIZER_KEY = re.compile(r"optim(?:izer)?(?:_(\d+))?")


def import_dcp(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Imports a DCP folder as a checkpoint.

    Args:
        source: the folder; its ``.metadata`` is unpickled.
        out: the checkpoint's folder.

    Raises:
        CheckpointError: when `source` is no DCP folder, holds no model, or an optimizer's state is flattened.
    """
    Folder(out).parent.refuse_inside_checkpoint()  # `out` itself may be a checkpoint, which is replaced
    folder = Folder(source)
    if not folder.fs.isfile(folder.file(".metadata")):
        raise CheckpointError(f"{source} is not a folder of torch.distributed.checkpoint: it has no .metadata.")
    # Lightning resumes from no checkpoint that lacks the version that wrote it.
    tree: dict[str, Any] = {"epoch": 0, "global_step": 0, "pytorch-lightning_version": metadata.version("lightning")}
    with warnings.catch_warnings(), _failing_as(f"{source} cannot be read"):
        warnings.simplefilter("ignore")  # DCP warns that there is one process
        reader = dcp.FileSystemReader(folder.path) if folder.is_local else remote_reader(str(folder))
        planner = plan_of_all()
        dcp.load({}, storage_reader=reader, planner=planner, no_dist=True)
        found = planner.original_state_dict
        if folder.fs.isfile(folder.file(META)):
            with folder.open(META) as stream:
                tree |= torch.load(stream, map_location="cpu", weights_only=False)
    model_key = next((key for key in _MODEL_KEYS if key in found), None)
    if model_key is None:
        raise CheckpointError(f"{source} has none of {list(_MODEL_KEYS)} at its top, but {list(found)[:5]}.")
    tree["state_dict"] = found[model_key]
    matches = [matched for key in found if (matched := _OPTIMIZER_KEY.fullmatch(key))]
    optimizers = [found[matched[0]] for matched in sorted(matches, key=lambda matched: int(matched[1] or 0))]
    if optimizers:  # without this key, Lightning says that the checkpoint has only a model
        names = [_parameter_names(optimizer, source) for optimizer in optimizers]
        numbers = [{name: number for number, name in enumerate(known)} for known in names]
        tree["optimizer_states"] = list(map(_renamed, optimizers, numbers))
        tree[PARAMETERS] = names
        tree.setdefault("lr_schedulers", [])
    Saver(LocalComm().board).save(tree, os.fspath(out), {"step": tree["global_step"], "imported_from": str(source)})


def export_dcp(url: str | os.PathLike[str], out: str | os.PathLike[str]) -> list[str]:
    """Exports a checkpoint as a DCP folder with the layout of Lightning's `FSDPStrategy`.

    Args:
        url: the checkpoint's folder.
        out: the folder to write; must not exist, or be empty.

    Returns:
        The classes of pickled objects, which were left out.

    Raises:
        CheckpointError: when the checkpoint is damaged, or `out` is a file or not empty.
    """
    folder = Folder(out)
    folder.refuse_inside_checkpoint()
    if folder.is_file:
        raise CheckpointError(f"{out} is a file. Name a new folder.")
    if folder.names():
        raise CheckpointError(f"{out} is not empty. Name a new folder.")
    with closing(StoredCheckpoint(url)) as checkpoint:
        tree = checkpoint.load()
    imported = tree.pop(PARAMETERS, [])
    names = tree.pop(KEY, {}).get(PARAMETERS) or imported
    optimizers = tree.pop("optimizer_states", [])
    if len(names) != len(optimizers):
        raise CheckpointError(f"{url} does not say which parameters its {len(optimizers)} optimizers have.")
    state = {"model": tree.pop("state_dict")}
    for number, (optimizer, known) in enumerate(zip(optimizers, names, strict=True)):
        state[f"optimizer_{number}"] = _renamed(optimizer, dict(enumerate(known)))
    with warnings.catch_warnings(), _failing_as(f"{out} cannot be written"):
        warnings.simplefilter("ignore")  # DCP warns that there is one process
        writer = dcp.FileSystemWriter(folder.path) if folder.is_local else remote_writer(str(folder))
        dcp.save(state, storage_writer=writer, no_dist=True)
        with folder.fs.open(folder.file(META), "wb") as stream:
            torch.save(tree, stream)
    return checkpoint.left_out


@contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Turns errors of DCP into a CheckpointError. DCP wraps them in one that `except Exception` does not catch."""
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:
        reason = next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error
        raise CheckpointError(f"{what}: {type(reason).__name__}: {reason}") from error


def _parameter_names(optimizer: Mapping[str, Any], source: Any) -> list[str]:
    if "param_groups" not in optimizer:
        raise CheckpointError(
            f"{source} has an optimizer's state by the keys {list(optimizer)[:2]}...: it was flattened, and which "
            "parameters form a group is lost. Save it without flatten_optimizer_state_dict."
        )
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    if strange := sorted(optimizer.get("state", {}).keys() - set(names)):
        raise CheckpointError(f"{source} has an optimizer's state of {strange[0]!r}, which is in none of its groups.")
    return names


def _renamed(optimizer: Mapping[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns an optimizer's state with a new name or number for each parameter. Leaves out frozen parameters, which
    have an empty name and no state."""
    return {
        "state": {new[key]: state for key, state in optimizer.get("state", {}).items() if new[key] != ""},
        "param_groups": [
            {**group, "params": [new[key] for key in group["params"] if new[key] != ""]}
            for group in optimizer["param_groups"]
        ],
    }
