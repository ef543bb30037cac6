"""Arguments of the strategies that users come from, and what to write here instead."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from lightning_zero.config import did_you_mean

Made = TypeVar("Made", bound=Callable[..., None])

_AS_IT_IS = "It is always so here; leave it out."
_STAGE = "Write stage=1 (optimizer state), stage=2 (also gradients) or stage=3 (also parameters)."
_HOST = "Write offload=Offload(optimizer='cpu'), at stage 3 also parameters='cpu'."
_DISK = "Write offload=Offload(optimizer='nvme', path='/a/folder/on/it'), at stage 3 also parameters='nvme'."
_UNITS = "Models need no wrapping. To choose what is gathered together at stage 3, write units={Block}."
_BUCKET = "Write bucket_size_mb=25."
_TRAINER = "The Trainer has it: Trainer(precision='bf16-mixed' or '16-mixed')."
_RECOMPUTE = "Write activation_checkpointing=ActivationCheckpointing(modules={Block})."

ELSEWHERE = {
    # FSDP
    "sharding_strategy": f"FULL_SHARD is stage=3, SHARD_GRAD_OP is stage=2, HYBRID_SHARD is replicate_size=. {_STAGE}",
    "cpu_offload": _HOST,
    "offload_policy": _HOST,
    "auto_wrap_policy": _UNITS,
    "activation_checkpointing_policy": _RECOMPUTE,
    "mixed_precision": _TRAINER,
    "reshard_after_forward": "True is stage=3; False is stage=2.",
    "state_dict_type": "Write checkpoint='sharded' or checkpoint='full'.",
    "use_orig_params": _AS_IT_IS,
    "sync_module_states": _AS_IT_IS,
    "limit_all_gathers": _AS_IT_IS,
    "backward_prefetch": "Write prefetch=1: units gathered ahead.",
    "forward_prefetch": "Write prefetch=1: units gathered ahead.",
    "ignored_modules": "Freeze what is not to train; modules of other kinds of tensors stay whole by themselves.",
    "device_mesh": "Write replicate_size= and tensor_parallel_size=; strategy.device_mesh is made from them.",
    "data_parallel_size": "It is what is left: ranks / (replicate_size x tensor_parallel_size).",
    "save_distributed_checkpoint": "Write checkpoint='sharded' (the default) or checkpoint='full'.",
    # DeepSpeed, and Accelerate's names for it
    "config": "There is no configuration file: every setting is an argument of ZeroStrategy.",
    "zero_stage": _STAGE,
    "zero_optimization": _STAGE,
    "offload_optimizer": _HOST,
    "offload_parameters": _HOST,
    "offload_optimizer_device": _HOST,
    "offload_param_device": _HOST,
    "offload_params_device": _HOST,
    "remote_device": _HOST,
    "nvme_path": _DISK,
    "pin_memory": "Write offload=Offload(..., pin_memory=True).",
    "reduce_bucket_size": f"{_BUCKET} It counts MiB, not elements.",
    "allgather_bucket_size": f"{_BUCKET} It counts MiB, not elements.",
    "stage3_prefetch_bucket_size": "Write prefetch=1: units gathered ahead.",
    "overlap_comm": "Write overlap=True, which is the default.",
    "contiguous_gradients": _AS_IT_IS,
    "allgather_partitions": _AS_IT_IS,
    "reduce_scatter": _AS_IT_IS,
    "sub_group_size": "Offloaded state is stepped bucket by bucket: bucket_size_mb=25.",
    "partition_activations": f"{_RECOMPUTE} With partition=True where there is tensor parallelism.",
    "cpu_checkpointing": f"{_RECOMPUTE} With offload=True.",
    "contiguous_memory_optimization": f"{_RECOMPUTE} With contiguous=True.",
    "load_full_weights": "Checkpoints load on any number of ranks; trainer.fit(ckpt_path=) reads either format.",
    "zero3_save_16bit_model": "Write checkpoint='full', or `lightning-zero consolidate` a sharded one.",
    "exclude_frozen_parameters": "Frozen parameters are saved once, and cost no gradient and no optimizer state.",
    "gradient_clipping": "The Trainer has it: Trainer(gradient_clip_val=1.0).",
    "gradient_accumulation_steps": "The Trainer has it: Trainer(accumulate_grad_batches=4).",
    "train_micro_batch_size_per_gpu": "The DataLoader has it: batch_size=.",
    "loss_scale": _TRAINER,
    "initial_scale_power": _TRAINER,
    "loss_scale_window": _TRAINER,
    "min_loss_scale": _TRAINER,
    "hysteresis": _TRAINER,
    # DDP
    "find_unused_parameters": "Unused parameters are always found; leave it out.",
    "static_graph": _AS_IT_IS,
    "gradient_as_bucket_view": _AS_IT_IS,
    "bucket_cap_mb": _BUCKET,
    "ddp_comm_hook": "Gradients in bf16 on the wire are reduce_dtype='bf16'; there are no other hooks.",
    "process_group": "Write process_group_backend='gloo' or 'nccl'.",
}


def answers(init: Made) -> Made:
    """For an `__init__`: who writes an argument that it has not is told what to write instead. What was written by
    keyword is noted as `_written`.

    Raises:
        TypeError: as without it, with an answer.
    """
    known = [name for name in signature(init).parameters if name != "self"]

    @wraps(init)
    def answering(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                answer = f". {ELSEWHERE[name]}" if name in ELSEWHERE else did_you_mean(name, known)
                raise TypeError(f"{type(self).__name__} has no argument {name!r}{answer}")
        init(self, *args, **kwargs)
        self._written = kwargs  # for its repr

    return answering  # type: ignore[return-value]
