"""Tells users of other strategies what to write here in place of the arguments that they know."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import lightning.pytorch as pl

from lightning_zero.config import did_you_mean

Made = TypeVar("Made", bound=Callable[..., None])

_STAGE = "Write stage=1 (optimizer state), stage=2 (also gradients) or stage=3 (also parameters)."
_BUCKET = "Write bucket_size_mb=25."
_RECOMPUTE = "Write activation_checkpointing=ActivationCheckpointing(modules={Block})."
_TRAINER = "The Trainer has it: Trainer"

# What to write here -> arguments of FSDP, of DeepSpeed and Accelerate's names for them, and of DDP.
_ANSWERS = {
    _STAGE: "zero_stage zero_optimization",
    f"FULL_SHARD is stage=3, SHARD_GRAD_OP is stage=2, HYBRID_SHARD is replicate_size=. {_STAGE}": "sharding_strategy",
    f"full_shard is stage=3, shard_grad_op is stage=2, hybrid_shard is replicate_size=. {_STAGE}": (
        "fsdp fsdp_config fsdp_version"
    ),
    "True is stage=3; False is stage=2.": "reshard_after_forward",
    "Write offload=Offload(optimizer='cpu'), at stage 3 also parameters='cpu'.": (
        "cpu_offload offload_policy offload_optimizer offload_parameters offload_optimizer_device offload_param_device "
        "offload_params_device remote_device"
    ),
    "Write offload=Offload(optimizer='nvme', path='/a/folder/on/it'), at stage 3 also parameters='nvme'.": (
        "nvme_path offload_optimizer_nvme_path offload_param_nvme_path"
    ),
    "Write offload=Offload(..., pin_memory=True).": "pin_memory",
    "Offloaded state is stepped bucket by bucket: bucket_size_mb=25.": "sub_group_size",
    "Models need no wrapping. To choose what is gathered together at stage 3, write units={Block}.": (
        "auto_wrap_policy min_num_params transformer_cls_names_to_wrap transformer_layer_cls_to_wrap"
    ),
    "With units='auto' (the default) small ones stay whole by themselves.": "stage3_param_persistence_threshold",
    _BUCKET: "bucket_cap_mb",
    f"{_BUCKET} It counts MiB, not elements.": "reduce_bucket_size allgather_bucket_size",
    "Write prefetch=1: units gathered ahead.": (
        "backward_prefetch forward_prefetch stage3_prefetch_bucket_size stage3_max_live_parameters "
        "stage3_max_reuse_distance"
    ),
    "Write overlap=True, which is the default.": "overlap_comm",
    _RECOMPUTE: "activation_checkpointing_policy gradient_checkpointing",
    f"{_RECOMPUTE} With offload=True.": "activation_checkpointing_offload cpu_checkpointing",
    f"{_RECOMPUTE} With partition=True where there is tensor parallelism.": "partition_activations",
    f"{_RECOMPUTE} With contiguous=True.": "contiguous_memory_optimization",
    "Small models are saved in one file, others sharded; to choose, write checkpoint='sharded' or checkpoint='full'.": (
        "state_dict_type state_dict_config optim_state_dict_config save_distributed_checkpoint"
    ),
    "Write checkpoint='full', or `lightning-zero consolidate` a sharded one.": (
        "zero3_save_16bit_model stage3_gather_16bit_weights_on_model_save"
    ),
    "Checkpoints load on any number of ranks; trainer.fit(ckpt_path=) reads either format.": "load_full_weights",
    "Frozen parameters are saved once, and cost no gradient and no optimizer state.": "exclude_frozen_parameters",
    "Build the model in configure_model: at stage 3 it is never whole. strategy.load_pretrained(path) reads weights.": (
        "cpu_ram_efficient_loading param_init_fn zero3_init_flag"
    ),
    "Freeze what is not to train; modules of other kinds of tensors stay whole by themselves.": (
        "ignored_modules ignored_params ignored_states"
    ),
    "Write replicate_size= and tensor_parallel_size=; strategy.device_mesh is made from them.": "device_mesh",
    "It is what is left: ranks / (replicate_size x tensor_parallel_size).": "data_parallel_size",
    "Write process_group_backend='gloo' or 'nccl'.": "process_group backend",
    "There is no configuration file: every setting is an argument of ZeroStrategy.": (
        "config deepspeed_config hf_ds_config"
    ),
    f"{_TRAINER}(precision='bf16-mixed' or '16-mixed').": (
        "mixed_precision mixed_precision_policy mp_policy fp16 bf16 loss_scale initial_scale_power loss_scale_window "
        "min_loss_scale hysteresis"
    ),
    f"{_TRAINER}(gradient_clip_val=1.0).": "gradient_clipping",
    f"{_TRAINER}(accumulate_grad_batches=4).": "gradient_accumulation_steps",
    "The DataLoader has it: batch_size=.": "train_micro_batch_size_per_gpu",
    "fp8 is not there; bf16 is Trainer(precision='bf16-mixed').": "enable_msamp msamp_opt_level",
    "Gradients in bf16 on the wire are reduce_dtype='bf16'; there are no other hooks.": "ddp_comm_hook comm_hook",
    "Any optimizer may be given; leave it out.": "zero_allow_untested_optimizer",
    "Ranks may go different ways through the model; leave it out.": "transformer_moe_cls_names",
    "Unused parameters are always found; leave it out.": "find_unused_parameters",
    "It is always so here; leave it out.": (
        "use_orig_params sync_module_states limit_all_gathers contiguous_gradients allgather_partitions reduce_scatter "
        "static_graph gradient_as_bucket_view"
    ),
    "Nothing has to be set here for it; leave it out.": (
        "params_buffer_count params_buffer_size max_in_cpu optimizer_buffer_count block_size queue_depth single_submit "
        "overlap_events thread_count round_robin_gradients synchronize_checkpoint_boundary logging_batch_size_per_gpu "
        "logging_level"
    ),
}
ELSEWHERE = {name: answer for answer, names in _ANSWERS.items() for name in names.split()}


def _answer_to(name: str, known: list[str]) -> str:
    if name in ELSEWHERE:
        return f". {ELSEWHERE[name]}"
    if name in signature(pl.Trainer.__init__).parameters:
        return f". The Trainer has it: Trainer({name}=...)."
    return did_you_mean(name, known)


def answers(init: Made) -> Made:
    """Decorates an `__init__`, to answer unknown arguments with what to write instead. Keeps the arguments that were
    written by keyword as `_written`, for its repr and for a strategy like it.

    Raises:
        TypeError: for an unknown argument.
    """
    known = [name for name in signature(init).parameters if name != "self"]

    @wraps(init)
    def answering(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{type(self).__name__} has no argument {name!r}{_answer_to(name, known)}")
        init(self, *args, **kwargs)
        self._written = kwargs

    return answering  # type: ignore[return-value]
