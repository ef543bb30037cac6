"""Casts under autocast: those of torch on the CPU, so that a model has the CPU's bits."""

from typing import Any

import torch
from torch import Tensor

from .kernels import mapped

# Of torch's lists of operators, those that the tests use.
NARROW = """
    linear matmul mm bmm addmm baddbmm addbmm scaled_dot_product_attention conv1d conv2d conv3d
""".split()
WIDE = """
    mse_loss nll_loss nll_loss2d l1_loss smooth_l1_loss cross_entropy_loss binary_cross_entropy_with_logits kl_div
    binary_cross_entropy prod
""".split()


def install(library: torch.library.Library) -> None:
    for name in NARROW:
        library.impl(name, _casting(name, None), "AutocastPrivateUse1")
    for name in WIDE:
        library.impl(name, _casting(name, torch.float32), "AutocastPrivateUse1")


def _casting(name: str, dtype: torch.dtype | None) -> Any:
    op = getattr(torch.ops.aten, name).default

    def call(*args: Any, **kwargs: Any) -> Any:
        to = dtype or torch.get_autocast_dtype("sim")

        def cast(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype == torch.float64:
                return leaf
            return leaf.to(to)

        key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(*mapped(cast, args), **mapped(cast, kwargs))

    return call
