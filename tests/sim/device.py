"""Makes the device known to torch, under the name "sim". Importing this is enough."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils._device
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from . import autocast, kernels, memory, streams
from .kernels import aten, fallback, leaves_of

_LEFT: list[BaseException] = []  # errors of hooks, see `_Guard`


class DeviceModule:
    """What `torch.get_device_module("sim")` gives: the functions of `torch.cuda` that code for any device may use."""

    Stream, Event = streams.Stream, streams.Event
    stream = staticmethod(streams.on)
    current_stream, default_stream = staticmethod(streams.current_stream), staticmethod(streams.default_stream)
    set_stream, synchronize = staticmethod(streams.set_stream), staticmethod(streams.synchronize)
    is_initialized = is_available = staticmethod(lambda: True)
    current_device, device_count = staticmethod(lambda: 0), staticmethod(lambda: 1)
    set_device = staticmethod(lambda device: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    # Kernels draw from the host's generator: so a model on the device has the host's dropout masks.
    manual_seed = manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    memory_allocated = staticmethod(lambda device=None: memory.HEAP.levels()["allocated"].now)
    max_memory_allocated = staticmethod(lambda device=None: memory.HEAP.levels()["allocated"].most)
    reset_peak_memory_stats = staticmethod(lambda device=None: memory.HEAP.levels(again=True))
    mem_get_info = staticmethod(lambda device=None: (2**33 - DeviceModule.memory_allocated(), 2**33))
    cudart = staticmethod(lambda: memory.Runtime)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        levels = memory.HEAP.levels().items()
        return {
            f"{name}_bytes.all.{at}": n for name, it in levels for at, n in (("current", it.now), ("peak", it.most))
        }


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    """Torch asks it for the type of the device also while the error of a hook in backward leaves C++, and would end the
    process if the answer failed. No call of Python succeeds in that moment. So the error is put aside, and raised again
    where backward returns."""

    def type_(self) -> Any:
        try:
            sys.getrecursionlimit()
        except SystemError as failed:  # "returned a result with an exception set"
            _LEFT[:] = [failed.__cause__ or failed]
        return torch._C._autograd.DeviceType.PrivateUse1


def _raising_what_was_left(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return run_backward(*args, **kwargs)
        except SystemError:
            if not _LEFT:
                raise
            # It stays: ranks that are threads may fail at the same moment, in one thread of autograd's.
            raise _LEFT[-1] from None

    return run


class HostWatch(TorchDispatchMode):
    """Notes what the host itself does to pinned memory, which the device may still copy from or to."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap each call in two more; nothing is compiled here

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if memory.any_is_pinned() or streams.State.rates is not None:
            self._note(op, args, kwargs)
        return op(*args, **kwargs)

    def _note(self, op: Any, args: Any, kwargs: Any) -> None:
        leaves = [leaf for leaf in leaves_of([args, kwargs]) if isinstance(leaf, Tensor)]
        schema = kernels.schema_of(op)
        if schema.is_view or any(map(memory.of_device, leaves)):
            return
        touched = [leaf for leaf in leaves if memory.is_pinned(leaf)]
        if touched:
            given = [args[key] if isinstance(key, int) else kwargs[key] for key in schema.written]
            written = {id(leaf) for leaf in leaves_of(given)}
            for leaf in touched:
                memory.host_touches(leaf, str(op), writes=id(leaf) in written)
        if (rates := streams.State.rates) is not None:
            host = streams.this_host()
            nbytes = sum(leaf.nbytes for leaf in leaves)
            streams.note_span(host.name, "host", str(op), host.at, host.at + nbytes / rates.host)
            host.at += nbytes / rates.host


def _pinning(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        found = function(*args, **kwargs)
        return memory.pin(found) if pin_memory else found

    return made


def forget() -> None:
    """Makes the device as it was before a test."""
    streams.forget()
    memory.HEAP.forget()
    _LEFT.clear()


def _install() -> torch.device:
    _setup_privateuseone_for_python_backend("sim", DeviceModule(), _Hooks(), _Guard())
    for key, function in (("PrivateUse1", fallback), ("AutocastPrivateUse1", torch.library.fallthrough_kernel)):
        library = torch.library.Library("_", "IMPL")
        library.fallback(function, key)
        _KEPT.append(library)
    library = torch.library.Library("aten", "IMPL")
    _KEPT.append(library)
    # Torch would take these apart on a device that has no kernel for them, with other bits than the host's.
    for name in ("_stack", "mish_backward", "native_layer_norm", "native_group_norm", "addr", "silu_backward"):
        library.impl(name, partial(fallback, getattr(aten, name).default), "PrivateUse1")
    # Convolutions of devices that torch does not know have operators of their own.
    library.impl("convolution_overrideable", partial(fallback, aten.convolution.default), "PrivateUse1")
    library.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    autocast.install(library)
    # Pinned memory is torch's own only for devices with an allocator in C++.
    torch.utils._device._device_constructors()  # looks up the functions before they are replaced
    torch.empty = _pinning(torch.empty)
    torch.Tensor.is_pinned = lambda self, device=None: memory.is_pinned(self)  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, device=None: memory.pin(self.clone())  # type: ignore[method-assign]
    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = _raising_what_was_left(module._engine_run_backward)
    return torch.device("sim", 0)


def _attention(
    query: Any, key: Any, value: Any, mask: Any = None, p: float = 0.0, is_causal: bool = False, **kwargs: Any
) -> Any:
    """By the kernel that torch chooses on the CPU."""
    kwargs.pop("enable_gqa", None)
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, p, is_causal, attn_mask=mask, **kwargs)[
        0
    ]


def _convolution_backward(
    grad: Any, input: Any, weight: Any, stride: Any, padding: Any, dilation: Any, transposed: Any, output_padding: Any,
    groups: Any, mask: Any,
) -> Any:  # fmt: skip
    biases = [weight.size(0)]
    rest = (stride, padding, dilation, transposed, output_padding, groups, mask)
    return fallback(aten.convolution_backward.default, grad, input, weight, biases, *rest)


_KEPT: list[torch.library.Library] = []  # a library that is dropped takes its kernels along
kernels.DEVICE = DEVICE = _install()
