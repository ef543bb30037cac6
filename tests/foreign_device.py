"""A default device that is not the host, as within `trainer.init_module()`: for what the package makes itself.

With `FOREIGN_DEVICE=meta` in the environment, a tensor that the package makes without naming a device is on that one,
and so has no values. `make test-device` runs all tests like that. What tests and models make is where it always was.
"""

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.jit import _builtins
from torch.utils import _device

PACKAGE = str(Path(__file__).parents[1] / "lightning_zero")
MAKERS = (
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
)  # fmt: skip


def install() -> None:
    foreign = os.environ.get("FOREIGN_DEVICE")
    if foreign is None:
        return
    _device._device_constructors()  # torch keeps what it finds: `with torch.device(...)` is about the ones below ours
    for name in MAKERS:
        setattr(torch, name, _away(getattr(torch, name), foreign))


def _away(make: Any, foreign: str) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if "device" not in kwargs and sys._getframe(1).f_code.co_filename.startswith(PACKAGE):
            kwargs["device"] = foreign
        return make(*args, **kwargs)

    if operation := _builtins._find_builtin(make):
        _builtins._register_builtin(made, operation)  # for what torch.jit compiles
    return made
