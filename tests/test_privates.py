"""What the package uses of others that they have not promised: each name stands here, and in one module per package, or
two: names of `torch.distributed` have one of their own.

There it has a text: why, since when, what breaks without it. Another name fails here. Look for a public way first;
where there is none, add it to that module. `make test-floors` and `make test-newest` tell in which versions each is.
"""

import ast
import functools
import inspect
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor, nn

import lightning_zero.pl
from lightning_zero import distributed_private, torch_private
from lightning_zero.pl import lightning_private, precision, sharded_module
from lightning_zero.pl.fabric import FabricZeroStrategy
from lightning_zero.pl.strategy import ZeroStrategy

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "lightning_zero").rglob("*.py"))
NAMED_TUPLES = {"_asdict", "_replace", "_fields"}  # public, in spite of their names

TORCH = set(
    """
    _CachedTorchDispatchMode _CachingTorchDispatchMode _checkpoint_internal _get_current_dispatch_mode_stack
    _len_torch_dispatch_stack _pop_mode _push_mode _user_hooks
    _TorchDispatchModeKey _get_dispatch_mode _python_dispatch
    _C _apply _autograd _backward_hooks _base _buffers _call_impl _cdata
    _compiled_call_impl _compiler_ctx _current_graph_task_id
    _DisableFuncTorch _execution_engine _foreach_mul_ _forward_hooks _forward_pre_hooks
    _get_tracing_state _init_group _is_view _make_wrapper_subclass _metadata
    _non_persistent_buffers_set _optimizer_load_state_dict_post_hooks _optimizer_step_post_hooks
    _optimizer_step_pre_hooks _orig_mod _parameters
    _per_optimizer_states _post_accumulate_grad_hooks
    _pytree _save _schema _set_tracing_state
    _storage_Use_Count _swap_tensor_impl _top_saved_tensors_default_hooks _use_count _version
    _will_engine_execute_node _functorch
    """.split()
)
DISTRIBUTED = set(
    """
    _c10d_functional _clear_sharding_prop_cache _coalescing_manager _EmptyStateDictLoadPlanner _fsspec_filesystem
    _functional_collectives _get_default_store _local_tensor _spec
    """.split()
)
LIGHTNING = set(
    """
    _accelerator_connector _batches_that_stepped _broadcast_sigterm_tensor _call_callback_hooks
    _convert_stateful_objects_in_state _data_source _device_mesh _EvaluationLoop _find_last_checkpoints _fs
    _last_checkpoint_saved _layer_sync _log_model _logger_connector _max_depth _ModelCheckpoint__resolve_ckpt_dir
    _optimizers_to_device _original_handlers _parse_ckpt_path _results _should_accumulate _signal_connector
    _slurm_sigusr_handler_fn _store_dataloader_outputs _TrainingEpochLoop _unwrap_compiled _update_properties
    """.split()
)
ALL = TORCH | DISTRIBUTED | LIGHTNING
# Methods and attributes of Lightning's classes that those over them define: where Lightning looks for them.
OVERRIDDEN = {
    "_after_closure": "clips where Lightning clips",
    "_wrap_closure": "the same",
    "_backward_sync_control": "serves `Fabric.no_backward_sync`",
}
OTHERS = {
    "_strip_protocol": "fsspec: a path without the name of its file system",
    "_getframe": "Python: who calls, where a hook does not say it",
    "_init_weights": "transformers: a model computes what no file has of it",
    "_keys_to_ignore_on_load_unexpected": "transformers: a model names what older files have and it does not need",
    "_target_": "Hydra: the class that a config names",
    "_return_value": "Hydra: what a job has returned, also where it has failed",
    "BasicLauncherConf": "Hydra: whether a launcher is the default one",
    "BasicSweeperConf": "Hydra: whether a sweeper is the default one",
    "get_args_parser": "Hydra: the command line, to look at it before Hydra does",
}
PRIVATE = {
    Path(str(torch_private.__file__)): TORCH,
    Path(str(distributed_private.__file__)): DISTRIBUTED,
    Path(str(lightning_private.__file__)): LIGHTNING,
}


@functools.cache
def parsed() -> list[tuple[Path, list[ast.AST]]]:
    """The nodes of each module."""
    return [(path, [*ast.walk(ast.parse(path.read_text()))]) for path in MODULES]


@functools.cache
def own_names() -> set[str]:
    """Private names that the package gives itself, and may use."""
    found: set[str] = set()
    for _, nodes in parsed():
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_itself(node):
                found.add(node.attr)
    return found - ALL


def is_of_itself(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls", "super()")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NAMED_TUPLES


def names_in(nodes: list[ast.AST]) -> dict[str, int]:
    """Private names that a module uses of others, each with a line."""
    own, found = own_names(), {}
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            names = [] if is_of_itself(node) else [node.attr]
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("hydra._internal"):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("lightning_zero"):
            names = [*str(node.module).split("."), *(name.name for name in node.names)]
            names = [name for name in names if is_private(name)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [part for part in node.value.split(".") if part in ALL]
        elif isinstance(node, ast.keyword) and node.arg in ALL:
            names = [str(node.arg)]
        found.update(dict.fromkeys(names, getattr(node, "lineno", 0)))
    return found


def test_one_module_names_what_is_private_to_torch_and_one_what_is_to_lightning() -> None:
    elsewhere = {
        name: f"{path.relative_to(ROOT)}:{line}"
        for path, nodes in parsed()
        if path not in PRIVATE
        for name, line in names_in(nodes).items()
        if name not in OTHERS
    }
    assert elsewhere == {}, "look for a public way; where there is none, add it to the module for it, and say why"


@pytest.mark.parametrize("path", PRIVATE, ids=lambda path: path.stem)
def test_each_private_name_is_listed_here_and_has_a_text_that_says_what_breaks_without_it(path: Path) -> None:
    nodes = next(nodes for found, nodes in parsed() if found == path)
    used = names_in(nodes).keys()
    assert used == PRIVATE[path], "look for a public way first"
    bodies = [node.value.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    texts = [text for text in bodies if isinstance(text, str) and "Private:" in text]
    told = {name for text in texts for name in re.findall(r"\w+", text.partition("Private:")[2])}
    assert used - told <= {"_C", "_autograd"}  # the doors to others
    # A name in a string is found above only if it is listed. Of these functions all names with such a beginning count.
    assert {name for name in told if is_private(name)} - {"_foreach_", "_fused_", "_amp_"} <= used
    for text in texts:
        assert re.search(r"Without\s+(it|them)\s", text), text


def test_names_of_others_are_used() -> None:
    assert {name for _, nodes in parsed() for name in names_in(nodes)} >= OTHERS.keys()


@pytest.mark.parametrize(
    "kind", [ZeroStrategy, FabricZeroStrategy, precision.ShardedGradients, sharded_module.ShardedModule]
)
def test_classes_over_lightnings_use_none_of_their_private_attributes(kind: type) -> None:
    theirs = [base for base in kind.__mro__ if base.__module__.startswith(("lightning.", "torch."))]
    defined = {
        name for base in theirs for name in re.findall(r"self\.(_\w+)(?:: [^=\n]+)? = ", inspect.getsource(base))
    }
    defined |= {name for base in theirs for name in vars(base)}
    ours = [base for base in kind.__mro__ if base.__module__.startswith(lightning_zero.pl.__name__)]
    used = {
        name
        for base in ours
        for name in re.findall(r"self\.(_\w+)|def (_\w+)", inspect.getsource(base))
        for name in name
    }
    assert {name for name in used & defined if is_private(name)} <= OVERRIDDEN.keys()


def test_the_versions_that_errors_tell_are_those_that_pyproject_allows() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    low, high = torch_private.TESTED.split(" to ")
    major, minor = high.split(".")
    assert f"torch>={low},<{major}.{int(minor) + 1}" in dependencies
    low, high = lightning_private.TESTED.split(" to ")
    assert any(wanted.startswith(f"lightning>={low.removesuffix('.0')},") for wanted in dependencies)
    assert tuple(map(int, lightning.__version__.split(".")[:3])) <= tuple(map(int, high.split(".")))


def test_what_is_missing_fails_at_import_with_its_name_and_the_versions_that_were_tested() -> None:
    with pytest.raises(
        ImportError, match=rf"torch {re.escape(torch.__version__)} has no torch\.gone or went.*2\.11 to"
    ):
        torch_private.find(torch, "gone", "went")
    with pytest.raises(ImportError, match=r"has no Trainer\._gone\. lightning_zero replaces it.*2\.6\.0 to"):
        lightning_private.Place(pl.Trainer, "_gone").wrap(lambda theirs: theirs)


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_what_torch_has_made_public_is_not_asked_for_by_its_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    warns = "torch.distributed.checkpoint._fsspec_filesystem"  # as it is imported
    monkeypatch.delitem(sys.modules, warns, raising=False)
    assert type(distributed_private.remote_reader("memory://folder")).__name__ == "FsspecReader"
    assert type(distributed_private.remote_writer("memory://folder")).__name__ == "FsspecWriter"


def test_names_that_are_asked_for_where_they_may_be_missing_are_there() -> None:
    module = nn.Linear(1, 1)
    assert "_compiler_ctx" in vars(pl.LightningModule())
    assert torch_private.VERSIONS in vars(module.state_dict())
    assert torch_private.compiled_in(torch.compile(module)) is module  # type: ignore[arg-type]
    assert any(torch_private.IN_COMPILED in name for name in torch.compile(module).state_dict())  # type: ignore[attr-defined]
    assert vars(torch.optim.SGD(module.parameters())).keys() >= torch_private.OPTIMIZER_HOOKS
    assert "self._log_model = log_model" in inspect.getsource(WandbLogger.__init__)
    names = {function.__name__ for function in torch_private.UNVERSIONED | torch_private.FOREACH_IN_PLACE}
    assert {"_fused_adamw_", "_amp_foreach_non_finite_check_and_unscale_", "_foreach_add_"} <= names
    values: Any = Tensor([1.0])
    assert torch_private.edits_of(values.add_(1)) == 1
