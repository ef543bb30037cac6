from datetime import timedelta
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lightning_zero import ActivationCheckpointing, Offload
from lightning_zero.config import bytes_from_mib, classes_from, dtype_from, policy_from, seconds_from


@pytest.mark.parametrize("given", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtypes_are_given_by_name_or_as_they_are(given: Any) -> None:
    assert dtype_from(given, "param_dtype") is torch.bfloat16


@pytest.mark.parametrize("given", ["int8", "half", "", torch.int64])
def test_what_is_no_floating_dtype_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a floating-point dtype\. Write one of"):
        dtype_from(given, "param_dtype")


def test_durations_are_seconds_or_timedeltas() -> None:
    assert seconds_from(1.5, "timeout") == seconds_from(timedelta(milliseconds=1500), "timeout")
    for wrong in (0, -1, float("inf"), float("nan"), True, "60"):
        with pytest.raises(ValueError, match="must be a positive duration"):
            seconds_from(wrong, "timeout")


def test_policies_are_built_from_mappings_of_hydra_too() -> None:
    node = OmegaConf.create({"optimizer": "nvme", "path": "/scratch"})
    assert policy_from(Offload, node, "offload") == Offload(optimizer="nvme", path="/scratch")
    assert policy_from(Offload, None, "offload") is None
    with pytest.raises(TypeError, match=r"no key 'partitions'; did you mean 'partition'\? Allowed: \['modules'"):
        policy_from(ActivationCheckpointing, {"partitions": True}, "activation_checkpointing")


def test_offloaded_state_rests_in_bfloat16_or_as_it_was_made() -> None:
    assert Offload(optimizer="cpu", state_dtype="bf16").state_torch_dtype is torch.bfloat16
    assert Offload(optimizer="cpu").state_torch_dtype is None
    for wrong in ({"optimizer": "cpu", "state_dtype": "float16"}, {"parameters": "cpu", "state_dtype": "bf16"}):
        with pytest.raises(ValueError, match="Write state_dtype='bfloat16' with optimizer='cpu' or 'nvme'"):
            Offload(**wrong)


def test_classes_are_given_as_classes_paths_or_names() -> None:
    assert classes_from("auto", "units") is None
    assert classes_from([nn.Linear, "torch.nn.Conv2d", "Block"], "units") == (nn.Linear, nn.Conv2d, "Block")
    with pytest.raises(TypeError, match=r"is not a torch\.nn\.Module class"):
        classes_from([int], "units")
    for path in ("torch.nn.Conv4d", "torch.nowhere.Conv2d"):
        with pytest.raises(ValueError, match=f"units names '{path}', which cannot be imported"):
            classes_from([path], "units")


def test_bucket_sizes_are_mebibytes() -> None:
    assert bytes_from_mib(0.5, "bucket_size_mb") == 2**19
    for wrong in (0, -1, True, "25", float("inf")):
        with pytest.raises(ValueError, match="must be a positive number of MiB"):
            bytes_from_mib(wrong, "bucket_size_mb")
