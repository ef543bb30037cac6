"""`ZeroStrategy`: the stages under `lightning.Trainer`."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_zero.config import (
    ActivationCheckpointing,
    Checkpoint,
    Offload,
    classes_from,
    dtype_from,
    policy_from,
    seconds_from,
)


class ZeroStrategy(DDPStrategy):
    def __init__(
        self,
        stage: int | Literal["auto"] = 2,
        *,
        units: Any = "auto",
        bucket_size_mb: float = 25.0,
        prefetch: int = 1,
        overlap: bool = True,
        offload: Offload | Mapping[str, Any] | None = None,
        activation_checkpointing: ActivationCheckpointing | Mapping[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        replicate_size: int = 1,
        param_dtype: torch.dtype | str | None = None,
        reduce_dtype: torch.dtype | str | None = None,
        accumulation: Literal["sharded", "local"] = "sharded",
        granularity: Literal["element", "tensor"] = "element",
        broadcast_buffers: bool = True,
        checkpoint: Checkpoint | Mapping[str, Any] | None = None,
        max_skipped_steps: int = 20,
        timeout: timedelta | float = 1800.0,
        wait_timeout: timedelta | float = 60.0,
        sanitize: bool = False,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io, precision_plugin=precision_plugin,
            process_group_backend=process_group_backend, start_method=start_method, timeout=seconds_from(timeout, "timeout"))
        policy_from(Offload, offload, "offload"); policy_from(ActivationCheckpointing, activation_checkpointing, "activation_checkpointing")
        policy_from(Checkpoint, checkpoint, "checkpoint"); classes_from(units, "units")
        dtype_from(reduce_dtype, "reduce_dtype")

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        pass

    def memory_report(self) -> dict[str, int]:
        return {}

    def communication_report(self) -> dict[str, int]:
        return {}
