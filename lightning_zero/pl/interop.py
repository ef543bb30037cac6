"""Wraps functions of Lightning so that they know sharded checkpoints and engines; `import lightning_zero` is enough.

`install` lists them, and nothing else of Lightning is changed. Why each is needed: see the function that replaces it,
and `lightning_private`.
"""

import functools
import inspect
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_zero.checkpoint import CheckpointError, Folder, StoredCheckpoint, find_newest, reads_objects
from lightning_zero.checkpoint.export import ZeroFileSystem
from lightning_zero.checkpoint.folder import MANIFEST
from lightning_zero.checkpoint.manifest import what_was_meant
from lightning_zero.checkpoint.single import names_entry
from lightning_zero.pl import lightning_private as private
from lightning_zero.pl.callbacks import PREEMPTED, OwnCallbacks
from lightning_zero.pl.fabric import FabricZeroStrategy
from lightning_zero.pl.lightning_private import Place
from lightning_zero.pl.strategy import ZeroStrategy
from lightning_zero.torch_private import tree_map_only
from lightning_zero.views.lazy import materialize


def read_file_or_folder(
    load: Callable[..., Any], path: Any, map_location: Any = None, weights_only: bool | None = None
) -> Any:
    """Does what Lightning's loader of files does, and also reads the folder of a sharded checkpoint. (Where nobody has
    imported this package, ``zero://folder`` does the same through fsspec.)"""
    folder = _folder_of_checkpoint(path)
    if folder is None:
        return load(path, map_location=map_location, weights_only=weights_only)
    if not folder.is_checkpoint:
        raise CheckpointError(f"{path} is not a checkpoint: {what_was_meant(folder)}")
    with closing(StoredCheckpoint(path)) as found:
        tree = found.load(objects=reads_objects(weights_only))
        found.verify_rest(0, 1)
    if left_out := found.told_left_out:
        rank_zero_warn(left_out)
    if not isinstance(map_location, str | torch.device):
        return tree
    moved = tree_map_only(Tensor, lambda tensor: tensor.to(map_location), tree)
    if isinstance(tree.get("state_dict"), OrderedDict):
        vars(moved["state_dict"]).update(vars(tree["state_dict"]))  # the versions of modules
    return moved


def _folder_of_checkpoint(path: Any) -> Folder | None:
    """Returns the folder at `path` if it is to be read, or refused, here; None for a path that Lightning reads."""
    if not isinstance(path, str | os.PathLike) or str(path).startswith("zero://"):
        return None
    if str(path).startswith(("http://", "https://")):
        try:
            folder = Folder(path)
            return folder if folder.is_checkpoint else None
        except (ImportError, OSError):  # fsspec reads URLs with aiohttp; Lightning's loader asks for this file alone
            return None
    folder = Folder(path)
    is_ours = folder.is_checkpoint or folder.parent.is_checkpoint or (folder.is_local and folder.fs.isdir(folder.path))
    return folder if is_ours else None


def find_complete(find: Callable[..., set[str]], callback: ModelCheckpoint, trainer: Any) -> set[str]:
    """Finds what ``ckpt_path="last"`` means, as Lightning does, but takes only complete checkpoints."""
    file_system = private.file_system_of(callback)
    if trainer.state.fn != TrainerFn.FITTING and isinstance(file_system, LocalFileSystem):
        # In an evaluation "last" is the checkpoint of that name; in a fit it is the newest of any name.
        return {path for path in find(callback, trainer) if Path(path).is_file() or Folder(path).is_checkpoint}
    parent = private.folder_of(callback, trainer)
    newest, saved_at, skipped = find_newest(parent)  # comes first: it drops outdated listings of the file system
    folder = Folder(parent)
    candidates = find(callback, trainer)
    for problem in skipped:
        rank_zero_warn(f"ckpt_path='last' passes over {problem}")
    files = [path for path in candidates if file_system.isfile(path)]
    if not folder.is_local:  # Lightning's paths do not name the file system
        files = [file_system.unstrip_protocol(path) for path in files]
    others = [file for file in folder.files() if file.path.endswith(callback.FILE_EXTENSION) and not file.is_link]
    files += [str(file) for file in others if names_entry(file) or file == folder.joinpath(PREEMPTED)]
    newer = {path for path in files if file_system.modified(path).timestamp() > saved_at}
    if newest is None or newer:
        return newer
    # Lightning asks for, tells and keeps the path that it resumes from: its own "last.ckpt" where that is a link to it.
    if links := {path for path in candidates if Folder(path).is_link and Folder(path).real == newest.real}:
        return links
    # Lightning asks for the time of modification, which an object store has for files only.
    return {str(newest) if newest.is_local else f"{newest}/{MANIFEST}"}


def exists_or_is_saved(exists: Callable[..., bool], callback: ModelCheckpoint, filepath: Any, trainer: Any) -> bool:
    """Whether a path is taken, as soon as a save to it is under way: Lightning asks before it chooses one for a
    checkpoint."""
    if not isinstance(trainer.strategy, ZeroStrategy):
        return exists(callback, filepath, trainer)
    if trainer.strategy._is_saving(str(filepath)):
        return True
    # The remains of a killed save are not in the way: this save replaces them, and nothing else would remove them.
    return exists(callback, filepath, trainer) and not trainer.strategy.broadcast(Folder(filepath).is_leftover)


def parse_ckpt_path(parse: Callable[..., None], cli: LightningCLI) -> None:
    """Has LightningCLI read hyperparameters from the checkpoint to resume: it knows files, so this writes one."""
    command = cli.config.get("subcommand")
    path = cli.config[command].get("ckpt_path") if command else None
    folder = _folder_of_checkpoint(path) if path else None
    if folder is None or not folder.is_checkpoint:
        parse(cli)
        return
    with closing(StoredCheckpoint(folder.url)) as found, tempfile.NamedTemporaryFile(suffix=".ckpt") as file:
        torch.save({"hyper_parameters": materialize(found.tree().get("hyper_parameters", {}))}, file)
        file.flush()
        cli.config[command].ckpt_path = file.name
        parse(cli)
        cli.config[command].ckpt_path = path
        if left_out := found.told_left_out:
            rank_zero_warn(f"The model may be made without some of its arguments: {left_out}")


def _own_callbacks(trainer: Any) -> OwnCallbacks | None:
    """Returns the strategy's own callbacks in a run of `ZeroStrategy`. The trainer may be a mock."""
    return trainer.strategy._own_callbacks if isinstance(trainer.strategy, ZeroStrategy) else None


def call_with_own(
    call: Callable[..., None],
    trainer: Any,
    hook_name: str,
    *args: Any,
    monitoring_callbacks: bool | None = None,
    **kwargs: Any,
) -> None:
    """Calls one hook of all callbacks, as Lightning does, and of the strategy's own; see `OwnCallbacks.around`."""
    own = _own_callbacks(trainer)
    inside = nullcontext() if own is None else own.around(trainer, hook_name, monitoring_callbacks, *args, **kwargs)
    with inside:
        call(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)


def broadcast_sigterm(broadcast: Callable[..., None], loop: Any) -> None:
    """Skips Lightning's broadcast where `Preemption` replaces it. In a broadcast a rank would wait for one that has
    failed as long as `timeout`, without a message."""
    if _own_callbacks(loop.trainer) is None:
        broadcast(loop)


def make_with(
    serve: Callable[[ZeroStrategy], Any], init: Callable[..., None], made: Any, *args: Any, **kwargs: Any
) -> None:
    """Replaces the constructor of `Fabric`, which gets a `FabricZeroStrategy` in place of a `ZeroStrategy`, and that of
    `Trainer`; see `ZeroStrategy.for_trainer`."""
    if isinstance(strategy := kwargs.get("strategy"), ZeroStrategy):
        kwargs["strategy"] = serve(strategy)
    init(made, *args, **kwargs)


def set_up(
    setup: Callable[..., Any], fabric: Fabric, module: Any, *args: Any, _reapply_compile: bool = True, **kwargs: Any
) -> Any:
    """Sets up ``torch.compile(model)`` with Fabric as a model that is compiled in place, with the same settings: Fabric
    compiles what it has set up, and an engine cannot be traced."""
    if isinstance(fabric.strategy, FabricZeroStrategy) and _reapply_compile:
        module, settings = private.unwrap_compiled(module)
        if settings is not None:
            module.compile(**settings)
    return setup(fabric, module, *args, _reapply_compile=_reapply_compile, **kwargs)


def store_when_all_have_come(store: Callable[..., None], loop: Any) -> None:
    """Synchronises what an evaluation has logged for one loader, once all ranks have finished their batches."""
    own = _own_callbacks(loop.trainer)
    if own is not None:
        own.before_metrics(loop.trainer)
    store(loop)


def install() -> None:
    """Wraps the functions, once. Registers ``zero://``, which has no entry point if the package is not installed."""
    fsspec.register_implementation("zero", ZeroFileSystem, clobber=True)
    for place, ours in (
        (private.READ_FOR_MODULE, read_file_or_folder),
        (private.READ_FOR_STRATEGY, read_file_or_folder),
        (Place(ModelCheckpoint, "file_exists"), exists_or_is_saved),
        (private.FIND_LAST, find_complete),
        (private.PARSE_CKPT_PATH, parse_ckpt_path),
        (Place(Fabric, "__init__"), partial(make_with, FabricZeroStrategy)),
        (Place(Fabric, "setup"), set_up),
        (Place(Fabric, "setup_module"), set_up),
        (Place(Trainer, "__init__"), partial(make_with, ZeroStrategy.for_trainer)),
        (private.CALL_CALLBACKS, call_with_own),
        (private.BROADCAST_SIGTERM, broadcast_sigterm),
        (private.STORE_METRICS, store_when_all_have_come),
    ):
        place.wrap(partial(wrapped_once, ours=ours))


def wrapped_once(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `ours` with `theirs` as its first argument; or `theirs`, if it is such a function
    already, perhaps wrapped by other packages."""

    def is_ours(function: Any) -> bool:
        return hasattr(function, "_wrapped_by_lightning_zero")

    if is_ours(inspect.unwrap(theirs, stop=is_ours)):
        return theirs

    @functools.wraps(theirs)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    vars(wrapped)["_wrapped_by_lightning_zero"] = True
    return wrapped
