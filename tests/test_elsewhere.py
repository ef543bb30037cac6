"""Who comes from another strategy is told what to write here; natural spellings work, and nonsense is refused."""

import dataclasses
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from inspect import signature
from typing import Any

import pytest
import torch
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_zero import ActivationCheckpointing, Checkpoint, Offload, ZeroStrategy
from lightning_zero.pl import sharded_strategy
from lightning_zero.pl.elsewhere import elsewhere

OURS = signature(ZeroStrategy).parameters
# That have no counterpart, and that nobody types by hand: a module and its devices, sub-processes, file formats.
LIGHTNINGS = {"self", "args", "kwargs", "cluster_environment", "accelerator", "parallel_devices", "checkpoint_io"}


def arguments_elsewhere() -> Iterator[str]:
    for kind in (DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy):
        yield from signature(kind.__init__).parameters
    for kind in (FullyShardedDataParallel, DistributedDataParallel):
        yield from signature(kind.__init__).parameters
    for kind in (DeepSpeedPlugin, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin):  # Accelerate's
        yield from (field.name for field in dataclasses.fields(kind))
    yield from signature(fully_shard).parameters
    yield from ("zero_optimization", "stage3_param_persistence_threshold", "round_robin_gradients", "fp16", "bf16")
    yield from ("fsdp", "fsdp_config", "transformer_layer_cls_to_wrap", "gradient_checkpointing", "deepspeed_config")


UNANSWERED = {
    # Not chosen by hand under Lightning, or another word for what the type of an argument says.
    "module", "device_ids", "output_device", "dim", "check_reduction", "delay_all_reduce_named_params", "device_id",
    "param_to_hook_all_reduce", "skip_all_reduce_unused_params", "init_sync", "model_averaging_period",
    "ddp_comm_state", "ddp_comm_wrapper", "comm_wrapper", "comm_state_option", "precision_plugin", "mesh",
    "shard_placement_fn", "dp_mesh_dims", "batched_grad_copy", "bucket_cap_mb_list", "forward_sync_buffers",
    "is_train_batch_min",
}  # fmt: skip


def test_every_argument_of_other_strategies_is_ours_or_answered() -> None:
    asked = set(arguments_elsewhere()) - LIGHTNINGS - UNANSWERED
    assert sorted(asked - OURS.keys() - elsewhere().keys()) == []


def test_no_answer_is_to_an_argument_of_our_own() -> None:
    assert sorted(OURS.keys() & elsewhere().keys()) == []


def test_answers_name_arguments_that_are_there() -> None:
    others = {"ckpt_path", "batch_size", "parameters", "partition", "contiguous"}  # of trainers, loaders, policies
    for name, answer in elsewhere().items():
        alone = re.sub(r"(Trainer|Offload|ActivationCheckpointing)\([^)]*\)", "", answer)
        for named in re.findall(r"(?<![.(\w])(\w+)=", alone):
            assert named in OURS or named in others, (name, named)


@pytest.mark.parametrize(
    ("argument", "answer"),
    [
        ("sharding_strategy", "FULL_SHARD is stage=3"),
        ("cpu_offload", r"offload=Offload\(optimizer='cpu'\)"),
        ("find_unused_parameters", "always found"),
        ("lazy_bucket_allocation", "constant size"),  # DDP has it since torch 2.15
        ("reduce_bucket_size", "counts MiB"),
        ("zero_hpz_partition_size", "replicate_size="),  # of DeepSpeed's file
        ("optimizer", "configure_optimizers"),
        ("bucket_size", "did you mean 'bucket_size_mb'"),
        ("devices", r"The Trainer has it: Trainer\(devices=...\)"),
        ("precision", r"The Trainer has it: Trainer\(precision=...\)"),
        ("zzz", r"\.$"),
    ],
)
def test_an_argument_of_another_strategy_is_answered_with_what_to_write(argument: str, answer: str) -> None:
    with pytest.raises(TypeError, match=rf"^ZeroStrategy has no argument '{argument}'.*{answer}"):
        ZeroStrategy(**{argument: True})


def test_natural_spellings_mean_what_they_say() -> None:
    assert ZeroStrategy(stage="2").stage == 2  # type: ignore[arg-type]
    assert ZeroStrategy(offload="cpu").offload == Offload(optimizer="cpu")  # type: ignore[arg-type]
    assert ZeroStrategy(checkpoint="full").checkpoint == Checkpoint(format="full")  # type: ignore[arg-type]
    assert ZeroStrategy(checkpoint=None).checkpoint is None  # chosen when the size is known
    assert ZeroStrategy(activation_checkpointing=False).activation_checkpointing is None  # type: ignore[arg-type]
    assert Offload("cpu") == Offload(optimizer="cpu")
    assert Checkpoint("full") == Checkpoint(format="full")
    assert ActivationCheckpointing("Block") == ActivationCheckpointing(modules="Block")
    with pytest.raises(ValueError, match="Give `path` exactly when a tier is 'nvme'"):
        ZeroStrategy(offload="nvme")  # type: ignore[arg-type]


def test_in_a_notebook_ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ZeroStrategy()._start_method == "popen"
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert ZeroStrategy()._start_method == "fork"
    assert ZeroStrategy(start_method="spawn")._start_method == "spawn"


def test_arguments_that_ddp_has_too_mean_what_they_mean_there() -> None:
    given: dict[str, Any] = {"process_group_backend": "gloo", "start_method": "spawn", "timeout": timedelta(seconds=5)}
    mine, theirs = ZeroStrategy(**given), DDPStrategy(**given)
    for name in ("_process_group_backend", "_start_method", "_timeout"):
        assert vars(mine)[name] == vars(theirs)[name]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"stage": 2.0}, "stage=2.0 does not exist"),
        ({"stage": True}, "stage=True does not exist"),
        ({"stage": "two"}, "stage='two' does not exist"),
        ({"overlap": "yes"}, "overlap='yes' is neither True nor False"),
        ({"sanitize": 1}, "sanitize=1 is neither True nor False"),
        ({"start_method": "threads"}, "start_method='threads' is unknown"),
        ({"process_group_backend": "nccll"}, "process_group_backend='nccll' is unknown"),
        ({"offload": "gpu"}, r"offload='gpu' must be Offload\(...\), a mapping with its keys, 'cpu', 'nvme', or None"),
        ({"checkpoint": True}, "checkpoint=True must be Checkpoint"),
        ({"offload": {"optimizer": "cpu", "fraction": "half"}}, r"fraction='half'\) must lie in \(0, 1\]"),
        ({"offload": {"optimizer": "cpu", "fraction": True}}, r"fraction=True\) must lie in \(0, 1\]"),
        ({"offload": {"optimizer": "cpu", "fraction": 1.5}}, r"fraction=1.5\) must lie in \(0, 1\]"),
        ({"offload": {"optimizer": "cpu", "fraction": 0}}, r"fraction=0\) must lie in \(0, 1\]"),
        ({"offload": {"optimizer": "cpu", "pin_memory": "yes"}}, "pin_memory='yes' is neither True nor False"),
        ({"offload": {"optimizer": "nvme", "path": 3}}, r"path=3\) is not the path of a folder"),
        ({"bucket_size_mb": 25_000_000}, "it counts MiB, not bytes or elements"),
        ({"precision_plugin": "fp16"}, "precision_plugin='fp16' is no plugin of Lightning's"),
    ],
)
def test_nonsense_is_refused_at_construction(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        ZeroStrategy(**arguments)


OTHERWISE = {
    "stage": 1,
    "units": "modules",
    "bucket_size_mb": 1,
    "prefetch": 2,
    "overlap": False,
    "offload": "cpu",
    "activation_checkpointing": True,
    "tensor_parallel_size": 2,
    "replicate_size": 2,
    "param_dtype": "bf16",
    "reduce_dtype": "bf16",
    "accumulation": "local",
    "granularity": "tensor",
    "broadcast_buffers": False,
    "checkpoint": "full",
    "step_in_backward": True,
    "max_skipped_steps": 1,
    "timeout": 1,
    "wait_timeout": 1,
    "sanitize": True,
    "process_group_backend": "gloo",
    "start_method": "spawn",
}


def test_no_argument_is_taken_and_left_out() -> None:
    def heeded(strategy: ZeroStrategy) -> Any:
        return strategy._settings, strategy.checkpoint, strategy.process_group_backend

    theirs = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
    assert OURS.keys() - theirs == OTHERWISE.keys()
    for name, value in OTHERWISE.items():
        assert heeded(ZeroStrategy(**{name: value})) != heeded(ZeroStrategy()), name


def test_ranks_are_connected_as_the_strategy_was_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(sharded_strategy, "make_comm", lambda *args, **kwargs: made.update(kwargs, args=args))
    asked: dict[str, Any] = {"wait_timeout": 5, "timeout": 7, "sanitize": True, "process_group_backend": "gloo"}
    cpu = torch.device("cpu")
    ZeroStrategy(parallel_devices=[cpu], **asked)._ensure_comm()
    limits = {"args": (cpu, timedelta(seconds=5)), "timeout": timedelta(seconds=7)}
    assert made == {**limits, "backend": "gloo", "sanitize": True}


def test_the_signature_is_still_that_of_the_strategy() -> None:
    assert next(iter(OURS)) == "stage"
    assert "kwargs" not in OURS


def test_its_repr_says_what_it_is() -> None:
    assert repr(ZeroStrategy()) == "ZeroStrategy(stage=2)"
    assert repr(ZeroStrategy(3, offload="cpu")) == "ZeroStrategy(stage=3, offload='cpu')"
    offload = Offload(optimizer="cpu")
    assert repr(ZeroStrategy(stage=1, offload=offload)) == f"ZeroStrategy(stage=1, offload={offload})"


def test_help_says_which_methods_are_for_users() -> None:
    own = {name for name in dir(ZeroStrategy) if not name.startswith("_")} - set(dir(DDPStrategy))
    told = set(re.findall(r"`(\w+)`", (ZeroStrategy.__doc__ or "").partition("Args:")[0]))
    assert len(told) >= 10
    assert told <= own
    for name in own - {"engine"}:  # None until there is one
        assert getattr(ZeroStrategy, name).__doc__, name
