"""What torch 2.11, the lowest version that is allowed, does otherwise than the one that tests are usually run with, and
in the build for CUDA where there is no GPU: only where tests would see it. All conditions on torch's version are here.
"""

import torch
from torch.optim.swa_utils import AveragedModel

BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

HELD_BY_BARRIERS = 1 if BEFORE_2_13 else 0
"""Bytes that torch holds since its first barrier. It gives each a tensor of one byte, in a variable that was static
(`ProcessGroup::barrier` in C++), and is none since. Nobody imagines barriers in a rehearsal."""

WRONG_INDICES = "Expected dtype int32/int64 for index" if BEFORE_2_13 else "Expected tensor for argument #1 'indices'"
"""How torch refuses indices of another dtype in a rehearsal."""

NO_NAMES_OF_THREADS = "torch does not name gloo's threads here" if BEFORE_2_13 else ""
"""Why those that receive are not told from others, and take the cores from ranks: tests take longer, no more."""


def _averages_other_dtypes() -> bool:
    averaged = AveragedModel(torch.nn.LayerNorm(1))  # which draws no random numbers
    try:
        for _ in range(2):  # the first is a copy
            averaged.update_parameters(torch.nn.LayerNorm(1).bfloat16())
    except RuntimeError:
        return False
    return True


NO_OTHER_DTYPE = "" if _averages_other_dtypes() else "torch's AveragedModel takes no weights of another dtype here"
"""Why an average in fp32 of weights in two bytes cannot be compared with ddp, which fails: torch 2.11 groups no tensors
of two dtypes. A `ZeroStrategy` shows the weights in fp32."""


def leave_guard_of_no_gpu() -> None:
    """Has torch put nothing in the place of its guard of CUDA's devices. Where it was built for CUDA and there is no
    GPU, the first thread that compiles does, and what it puts there goes with that thread: in torch 2.11 a later thread
    that compiles crashes the process, in which ranks are threads in tests. And it tells of a device, so autograd starts
    a thread for that, and ranks that are forked from here cannot run a backward."""
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        torch._C._ensureCUDADeviceGuardSet = lambda: None  # type: ignore[method-assign]
