"""To and from folders of torch.distributed.checkpoint (DCP), which FSDP's users have, Lightning's and torch's own.

Both go through the memory of one process. DCP keeps its plan and all that is no tensor as pickles: import only what you
trust.
"""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lightning_zero.checkpoint.folder import CheckpointError, Folder
from lightning_zero.checkpoint.load import StoredCheckpoint
from lightning_zero.checkpoint.save import Saver
from lightning_zero.comm import LocalComm

META = "meta.pt"  # where Lightning's FSDP and ModelParallel strategies put what is neither model nor optimizer
_MODEL_KEYS = ("model", "state_dict")  # FSDPStrategy's and torch's examples, ModelParallelStrategy's


def import_dcp(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Makes a checkpoint of a DCP folder.

    Args:
        source: the folder; its ``.metadata`` is unpickled.
        out: the checkpoint's folder.

    Raises:
        CheckpointError: when `source` is no DCP folder, or holds no model.
    """
    if not (Folder(source).fs.isfile(Folder(source).file(".metadata"))):
        raise CheckpointError(f"{source} is not a folder of torch.distributed.checkpoint: it has no .metadata.")
    found: dict[str, Any] = {}
    _load_state_dict(
        found,
        storage_reader=dcp.FileSystemReader(source),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    model_key = next((key for key in _MODEL_KEYS if key in found), None)
    if model_key is None:
        raise CheckpointError(f"{source} has none of {list(_MODEL_KEYS)} at its top, but {list(found)[:5]}.")
    meta = Folder(source)
    tree: dict[str, Any] = {"epoch": 0, "global_step": 0, "lr_schedulers": []}
    if meta.fs.isfile(meta.file(META)):
        with meta.open(META) as stream:
            tree |= torch.load(stream, map_location="cpu", weights_only=False)
    tree["state_dict"] = found[model_key]
    optimizers = [found[key] for key in sorted(found) if key.startswith(("optimizer_", "optim"))]
    names = [_parameter_names(optimizer) for optimizer in optimizers]
    tree["optimizer_states"] = [_by_number(state, known) for state, known in zip(optimizers, names, strict=True)]
    Saver(LocalComm().board).save(tree, os.fspath(out), {"step": tree["global_step"], "imported_from": str(source)})


def export_dcp(url: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Writes a checkpoint as a DCP folder, laid out as Lightning's `FSDPStrategy` does.

    Args:
        url: the checkpoint's folder.
        out: the folder to write; must not exist, or be empty.

    Raises:
        CheckpointError: when the checkpoint is damaged, or there is something at `out`.
    """
    if Folder(out).names():
        raise CheckpointError(f"{out} is not empty. Name a new folder.")
    checkpoint = StoredCheckpoint(url)
    tree = checkpoint.load()
    names = tree.pop("lightning_zero", {}).get("optimizer_parameters", [])
    state = {"model": tree.pop("state_dict")} | {
        f"optimizer_{number}": _by_name(optimizer, names[number])
        for number, optimizer in enumerate(tree.pop("optimizer_states", []))
    }
    with warnings.catch_warnings():  # it says that there is one process
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(out), no_dist=True)
    torch.save(tree, os.path.join(out, META))  # noqa: PTH118


def _parameter_names(optimizer: Mapping[str, Any]) -> list[str]:
    return [name for group in optimizer["param_groups"] for name in group["params"]]


def _by_number(optimizer: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state by the place of parameters instead of their names."""
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "state": {numbers[name]: state for name, state in optimizer["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in optimizer["param_groups"]
        ],
    }


def _by_name(optimizer: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {
        "state": {names[number]: state for number, state in optimizer["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in optimizer["param_groups"]
        ],
    }
