"""What the package uses of others that they have not promised: each name, what for, and what would be lost without it.

Another one fails here. Look for a public way first; where there is none, say here why. `make test-floors` and
`make test-newest` tell in which versions each is there.
"""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "lightning_zero").rglob("*.py"))
AS_ABOVE = "as above"
NAMED_TUPLES = {"_asdict", "_replace", "_fields"}  # public, in spite of their names

TORCH = {
    # -- tensors
    "_C": "the door to those below that torch keeps in C++",
    "_cdata": "tells storages apart, as views of one memory are booked once",
    "_storage_Use_Count": "whether a user holds a view of a buffer; without it buffers could not be used again",
    "_use_count": "whether a graph has saved a parameter that is being built; without it none could be cut early",
    "_swap_tensor_impl": "points a parameter at another device's memory, where torch refuses `p.data =`",
    "_has_compatible_shallow_copy_type": "tells where torch refuses that",
    "_make_subclass": "a parameter of a class of its own, with the values that a module registers",
    "_make_wrapper_subclass": "a tensor with a shape, and without values",
    "_foreach_mul_": "scales all gradients in one launch",
    "_ops": "names an operation for what is shown of a gradient",
    "_schema": "which arguments an operation writes to",
    "_metadata": "versions of modules in a state dict, as torch's own has them",
    "DisableTorchFunctionSubclass": "reads a parameter that is watched without being watched",
    "is_traceable_wrapper_subclass": "finds the plain tensors in one that is composed of some",
    # -- autograd
    "_current_graph_task_id": "whether a backward is under way, in this thread",
    "_autograd": "the stack of hooks for saved tensors, where the context manager cannot span two calls",
    "_push_saved_tensors_default_hooks": AS_ABOVE,
    "_pop_saved_tensors_default_hooks": AS_ABOVE,
    "_top_saved_tensors_default_hooks": "whether hooks of an activation checkpoint are around",
    "_saved_tensors_hooks_is_enabled": "whether hooks are allowed, as they are not in some transforms",
    "_execution_engine": "calls back at the end of a backward that nobody has announced",
    "_post_accumulate_grad_hooks": "keeps our hook behind the users'",
    "_is_tracing": "leaves a trace of the user's alone",
    "_get_tracing_state": AS_ABOVE,
    "_set_tracing_state": AS_ABOVE,
    # -- modules
    "_parameters": "a parameter by the name that its module has for it, also while something else is shown",
    "_buffers": "moves a buffer in place",
    "_apply": "whether a class moves its tensors in a way of its own",
    "_call_impl": "the call of a module with all its hooks",
    "_compiled_call_impl": "runs code around a call, without a hook, and inside of what is compiled",
    "_orig_mod": "the module in a compiled one",
    "_forward_hooks": "whether torch may hand a layer's weights to one kernel",
    "_forward_pre_hooks": AS_ABOVE,
    "_non_persistent_buffers_set": "which buffers a checkpoint has none of",
    "_register_load_state_dict_pre_hook": "notes what is loaded into a model that is being built",
    "_IncompatibleKeys": "what `load_state_dict` returns",
    # -- distributed
    "_coalescing_manager": "all messages of an exchange in one launch",
    "_get_default_store": "the store in which lost ranks are told",
    "_local_tensor": "this rank's part of a DTensor, without a graph",
    "_spec": "how a DTensor is divided",
    "DTensorSpec": AS_ABOVE,
    "TensorMeta": AS_ABOVE,
    "FsspecReader": "reads and writes torch's own sharded checkpoints, wherever they are",
    "FsspecWriter": AS_ABOVE,
    "_EmptyStateDictLoadPlanner": "reads one without its model",
    "_load_state_dict": "as above, in one process",
    "_check_scale_growth_tracker": "the scale of a GradScaler that may not have been used yet",
    "_per_optimizer_states": "tells a GradScaler that gradients are unscaled, and what was found",
    "tree_flatten": "torch's containers of tensors, as torch itself walks through them",
    "tree_iter": AS_ABOVE,
    "tree_map": AS_ABOVE,
    "tree_map_only": AS_ABOVE,
    "tree_unflatten": AS_ABOVE,
}
LIGHTNING = {
    # -- what is wrapped: `pl/interop.py` says what for
    "_Connector": "Fabric's choice of a strategy",
    "_AcceleratorConnector": "the Trainer's choice of a strategy",
    "_EvaluationLoop": "the end of an evaluation's batches",
    "_TrainingEpochLoop": "the broadcast of whether a rank was told to stop",
    "_unwrap_compiled": "the module in a compiled one, with the settings",
    "_unwrap_objects": "the module in what Fabric has set up",
    "_ModelCheckpoint__resolve_ckpt_dir": "the folder that `ckpt_path='last'` looks into",
    "_fs": "the file system of a ModelCheckpoint",
    "_last_checkpoint_saved": "links the last checkpoint, and does not write it again",
    # -- what a strategy has to do as Lightning's own do it
    "_BackwardSyncControl": "serves `Fabric.no_backward_sync`",
    "_validate_keys_for_strict_loading": "the same error for a missing entry",
    "_convert_stateful_objects_in_state": "saves what has a state of its own",
    "_update_properties": "the device that a LightningModule says it is on",
    "_optimizers_to_device": "moves the state of optimizers that Lightning moves",
    "_auto_add_worker_init_fn": "seeds the workers of loaders as under `ddp`",
    "_CallbackConnector": "the order in which callbacks are called",
    "_IS_INTERACTIVE": "starts ranks in a notebook",
    "_layer_sync": "`sync_batchnorm=True`",
    "_lightning_optimizers": "wrappers of optimizers, which keep methods of their own",
    "_device_mesh": "`self.device_mesh` in `configure_model`",
    "_trainer": "whether a module has a trainer, without the error where it has none",
    "_accelerator_connector": "whether a plugin or a strategy was chosen by the user",
    "_signal_connector": "SIGTERM and SIGUSR1, which save the same step on all ranks",
    "_original_handlers": AS_ABOVE,
    "_slurm_sigusr_handler_fn": AS_ABOVE,
    "_results": "whether a metric waits to be synchronised",
    "_should_accumulate": "whether this batch ends in a step",
    "_logger_connector": "whether this step is logged",
    "_batches_that_stepped": "the step under which Lightning logs",
    "_max_depth": "`enable_model_summary=False`",
    "_log_model": "whether a logger uploads checkpoints, which it skips where they are folders",
    "_after_closure": "clips where Lightning clips",
    "_wrap_closure": AS_ABOVE,
    "_clip_gradients": AS_ABOVE,
    "_start_method": "how ranks are started",
    "_accelerator": "what the user has given a strategy that becomes Fabric's",
    "_timeout": AS_ABOVE,
}
OTHERS = {
    "_strip_protocol": "fsspec: a path without the name of its file system",
    "_getframe": "Python: who calls, where a hook does not say it",
    "_target_": "Hydra: the class that a config names",
    "_return_value": "Hydra: what a job has returned, also where it has failed",
    "BasicLauncherConf": "Hydra: whether a launcher is the default one",
    "BasicSweeperConf": "Hydra: whether a sweeper is the default one",
    "get_args_parser": "Hydra: the command line, to look at it before Hydra does",
}
REASONS = TORCH | LIGHTNING | OTHERS


@functools.cache
def parsed() -> list[tuple[Path, list[ast.AST]]]:
    """The nodes of each module."""
    return [(path, [*ast.walk(ast.parse(path.read_text()))]) for path in MODULES]


def own_names() -> set[str]:
    """Private names that the package gives itself, and may use."""
    found: set[str] = set()
    for _, nodes in parsed():
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                found.add(node.attr)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NAMED_TUPLES


def names_of_others() -> dict[str, str]:
    """Private names that the package uses of others, each with a place."""
    own, found = own_names() - {"_parameters", "_buffers"}, {}  # which stand-ins for modules have, too
    for path, nodes in parsed():
        for node in nodes:
            names = []
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("lightning_zero"):
                is_inside = any(is_private(part) for part in str(node.module).split("."))
                names = [name.name for name in node.names if is_inside or is_private(name.name)]
            found.update(dict.fromkeys(names, f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"))
    return found


def test_nothing_private_of_others_is_used_without_a_reason() -> None:
    unheard = {name: place for name, place in names_of_others().items() if name not in REASONS}
    assert unheard == {}, "look for a public way; where there is none, say why in this file"


def test_what_is_no_longer_used_has_no_reason_any_more() -> None:
    # What the package defines itself cannot be told from what it calls: methods that it overrides, and arguments.
    own = {"_after_closure", "_wrap_closure", "_clip_gradients", "_timeout", "_accelerator", "_start_method"}
    assert REASONS.keys() - names_of_others().keys() <= own


def test_each_reason_is_one_or_follows_one() -> None:
    for table in (TORCH, LIGHTNING, OTHERS):
        reasons = list(table.values())
        assert reasons[0] != AS_ABOVE
        assert all(len(reason) > 10 for reason in reasons if reason != AS_ABOVE)
