"""Arguments of the strategies that users come from, and what to write here instead."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import lightning.pytorch as pl

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
_FORMAT = "Write checkpoint='sharded' (the default) or checkpoint='full'."
_WHOLE_FILE = "Write checkpoint='full', or `lightning-zero consolidate` a sharded one."
_CONFIG = "There is no configuration file: every setting is an argument of ZeroStrategy."
_FSDP = f"full_shard is stage=3, shard_grad_op is stage=2, hybrid_shard is replicate_size=. {_STAGE}"
_FROZEN = "Freeze what is not to train; modules of other kinds of tensors stay whole by themselves."
_BUILD = (
    "Build the model in configure_model: at stage 3 it is never whole. strategy.load_pretrained(path) reads weights."
)
_PREFETCH = "Write prefetch=1: units gathered ahead."
_NO_KNOB = "Nothing has to be set here for it; leave it out."
_HOOK = "Gradients in bf16 on the wire are reduce_dtype='bf16'; there are no other hooks."
_NO_FP8 = "fp8 is not there; bf16 is Trainer(precision='bf16-mixed')."

ELSEWHERE = {
    # FSDP
    "sharding_strategy": f"FULL_SHARD is stage=3, SHARD_GRAD_OP is stage=2, HYBRID_SHARD is replicate_size=. {_STAGE}",
    "fsdp": _FSDP,
    "fsdp_config": _FSDP,
    "fsdp_version": _FSDP,
    "cpu_offload": _HOST,
    "offload_policy": _HOST,
    "auto_wrap_policy": _UNITS,
    "min_num_params": _UNITS,
    "transformer_cls_names_to_wrap": _UNITS,
    "transformer_layer_cls_to_wrap": _UNITS,
    "activation_checkpointing_policy": _RECOMPUTE,
    "activation_checkpointing_offload": f"{_RECOMPUTE} With offload=True.",
    "gradient_checkpointing": _RECOMPUTE,
    "mixed_precision": _TRAINER,
    "mixed_precision_policy": _TRAINER,
    "mp_policy": _TRAINER,
    "reshard_after_forward": "True is stage=3; False is stage=2.",
    "state_dict_type": _FORMAT,
    "state_dict_config": _FORMAT,
    "optim_state_dict_config": _FORMAT,
    "use_orig_params": _AS_IT_IS,
    "sync_module_states": _AS_IT_IS,
    "limit_all_gathers": _AS_IT_IS,
    "backward_prefetch": _PREFETCH,
    "forward_prefetch": _PREFETCH,
    "ignored_modules": _FROZEN,
    "ignored_params": _FROZEN,
    "ignored_states": _FROZEN,
    "cpu_ram_efficient_loading": _BUILD,
    "param_init_fn": _BUILD,
    "device_mesh": "Write replicate_size= and tensor_parallel_size=; strategy.device_mesh is made from them.",
    "data_parallel_size": "It is what is left: ranks / (replicate_size x tensor_parallel_size).",
    "save_distributed_checkpoint": _FORMAT,
    # DeepSpeed, and Accelerate's names for it
    "config": _CONFIG,
    "deepspeed_config": _CONFIG,
    "hf_ds_config": _CONFIG,
    "zero_stage": _STAGE,
    "zero_optimization": _STAGE,
    "offload_optimizer": _HOST,
    "offload_parameters": _HOST,
    "offload_optimizer_device": _HOST,
    "offload_param_device": _HOST,
    "offload_params_device": _HOST,
    "remote_device": _HOST,
    "nvme_path": _DISK,
    "offload_optimizer_nvme_path": _DISK,
    "offload_param_nvme_path": _DISK,
    "params_buffer_count": _NO_KNOB,
    "params_buffer_size": _NO_KNOB,
    "max_in_cpu": _NO_KNOB,
    "optimizer_buffer_count": _NO_KNOB,
    "block_size": _NO_KNOB,
    "queue_depth": _NO_KNOB,
    "single_submit": _NO_KNOB,
    "overlap_events": _NO_KNOB,
    "thread_count": _NO_KNOB,
    "pin_memory": "Write offload=Offload(..., pin_memory=True).",
    "reduce_bucket_size": f"{_BUCKET} It counts MiB, not elements.",
    "allgather_bucket_size": f"{_BUCKET} It counts MiB, not elements.",
    "stage3_prefetch_bucket_size": _PREFETCH,
    "stage3_max_live_parameters": _PREFETCH,
    "stage3_max_reuse_distance": _PREFETCH,
    "stage3_param_persistence_threshold": "With units='auto' (the default) small ones stay whole by themselves.",
    "overlap_comm": "Write overlap=True, which is the default.",
    "contiguous_gradients": _AS_IT_IS,
    "allgather_partitions": _AS_IT_IS,
    "reduce_scatter": _AS_IT_IS,
    "round_robin_gradients": _NO_KNOB,
    "sub_group_size": "Offloaded state is stepped bucket by bucket: bucket_size_mb=25.",
    "partition_activations": f"{_RECOMPUTE} With partition=True where there is tensor parallelism.",
    "cpu_checkpointing": f"{_RECOMPUTE} With offload=True.",
    "contiguous_memory_optimization": f"{_RECOMPUTE} With contiguous=True.",
    "load_full_weights": "Checkpoints load on any number of ranks; trainer.fit(ckpt_path=) reads either format.",
    "zero3_save_16bit_model": _WHOLE_FILE,
    "stage3_gather_16bit_weights_on_model_save": _WHOLE_FILE,
    "zero3_init_flag": _BUILD,
    "transformer_moe_cls_names": "Ranks may go different ways through the model; leave it out.",
    "synchronize_checkpoint_boundary": _NO_KNOB,
    "zero_allow_untested_optimizer": "Any optimizer may be given; leave it out.",
    "logging_batch_size_per_gpu": _NO_KNOB,
    "logging_level": _NO_KNOB,
    "enable_msamp": _NO_FP8,
    "msamp_opt_level": _NO_FP8,
    "exclude_frozen_parameters": "Frozen parameters are saved once, and cost no gradient and no optimizer state.",
    "gradient_clipping": "The Trainer has it: Trainer(gradient_clip_val=1.0).",
    "gradient_accumulation_steps": "The Trainer has it: Trainer(accumulate_grad_batches=4).",
    "train_micro_batch_size_per_gpu": "The DataLoader has it: batch_size=.",
    "fp16": _TRAINER,
    "bf16": _TRAINER,
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
    "ddp_comm_hook": _HOOK,
    "comm_hook": _HOOK,
    "process_group": "Write process_group_backend='gloo' or 'nccl'.",
    "backend": "Write process_group_backend='gloo' or 'nccl'.",
}


def _answer_to(name: str, known: list[str]) -> str:
    if name in ELSEWHERE:
        return f". {ELSEWHERE[name]}"
    if name in signature(pl.Trainer.__init__).parameters:
        return f". The Trainer has it: Trainer({name}=...)."
    return did_you_mean(name, known)


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
                raise TypeError(f"{type(self).__name__} has no argument {name!r}{_answer_to(name, known)}")
        init(self, *args, **kwargs)
        self._written = kwargs  # for its repr

    return answering  # type: ignore[return-value]
