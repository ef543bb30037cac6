"""Accelerators: streams, copies, pinned memory, statistics. No other module names a kind of device.

All of it comes from `torch.get_device_module`, so that CUDA, ROCm, XPU and devices of other vendors are used alike; a
device without streams, or without pinned memory, works without them. The package is tested on CPUs, on NVIDIA's GPUs
and on a simulated device (`tests/sim`).

A device works asynchronously: the host launches work into a *stream*, which does it later, in order. One stream is
current. Two streams are ordered only where one waits for the other, and the host only where it waits for a stream. So
every copy between host and device is made here, and says what has to be waited for:

    to_device     the host's values must not change before the stream has read them (`stays`, or it is waited for)
    to_host       values are there after `CopyToHost.wait`
"""

import mmap
import time
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.torch_private import exchange

HOST = torch.device("cpu")
_SPIN_S = 0.002  # s that a wait of the host looks at its event without a pause
_PAUSE_S = 0.0002  # s between its looks after that
_OWN_REGION = 2**20  # bytes of page-locked memory from which on a tensor has a region of memory to itself
TESTED = ("cpu", "cuda")


class Event(Protocol):
    """A place in a stream's work; `torch.cuda.Event` and its like."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


def module_of(device: torch.device) -> Any:
    """Returns torch's module for a kind of device: `torch.cuda`, `torch.xpu`, ..."""
    return torch.get_device_module(device)


def is_host(device: torch.device) -> bool:
    return device.type == HOST.type


@cache
def has_streams(kind: str) -> bool:
    """Whether devices of this kind (``"cuda"``) work asynchronously, in streams that code can choose."""
    if kind in (HOST.type, "meta"):
        return False
    module = module_of(torch.device(kind))
    return all(hasattr(module, name) for name in ("Stream", "Event", "stream", "current_stream"))


@cache
def can_pin(kind: str) -> bool:
    """Whether host memory can be page-locked for devices of this kind, so that copies need not wait for the host."""
    if not has_streams(kind):
        return False
    try:
        return torch.empty(1, pin_memory=True, device=HOST).is_pinned()
    except RuntimeError:
        return False


def numbered(device: torch.device) -> torch.device:
    """Returns a device with its number, as its tensors have it: to torch, ``cuda`` is not ``cuda:0``."""
    return torch.empty(0, device=device).device


def untested(device: torch.device) -> str | None:
    """Returns a sentence for a kind of device that the package was never tried on; None for the others."""
    if device.type in TESTED:
        return None
    return f"lightning_zero was never tried on {device.type!r} devices: compare a short run with ddp before a long one."


# -- streams


@final
class SideStream:
    """A stream beside the current one, on which a device copies and adds while it computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = module_of(device)
        self._stream = self._module.Stream(device)

    @classmethod
    def of(cls, device: torch.device) -> "SideStream | None":
        """Returns a new stream; None for a device without streams."""
        return cls(device) if has_streams(device.type) else None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Inside, work goes to this stream, after all that the current stream has been given so far."""
        self._stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._stream):
            yield

    def record(self) -> Event:
        """Returns the place that this stream has come to, for `wait_for`."""
        return self._stream.record_event()

    def keep(self, tensor: Tensor) -> None:
        """Keeps the memory of a tensor, which another stream has allocated, until this stream has come here."""
        tensor.record_stream(self._stream)

    def join(self) -> None:
        """Lets the current stream wait for all that this stream has been given so far."""
        self._module.current_stream(self.device).wait_stream(self._stream)


def wait_for(event: Event, device: torch.device) -> None:
    """Lets the current stream of `device` wait for an event."""
    module_of(device).current_stream(device).wait_event(event)


def record(device: torch.device, *, timing: bool = False) -> Event:
    """Returns the place that the current stream of `device` has come to."""
    module = module_of(device)
    event = module.Event(enable_timing=True) if timing else module.Event()
    event.record(module.current_stream(device))
    return event


def is_on_default_stream(device: torch.device) -> bool:
    module = module_of(device)
    return bool(module.current_stream(device) == module.default_stream(device))


# -- copies


class Limit(NamedTuple):
    """How long the host waits for a device, which may itself wait for other ranks in a collective."""

    seconds: float
    explain: Callable[[], BaseException]  # returns what to raise then: who is missing


@final
class CopyToHost:
    """Values on their way to the host. Until `wait` has returned, nothing may read them."""

    def __init__(self, event: Event | None = None) -> None:
        self._event = event

    def wait(self, limit: Limit | None = None) -> None:
        """Waits, on the host, until the values are there. Raises what `limit` says if they do not come in time."""
        event, self._event = self._event, None
        if event is not None:
            wait_on_host(event, limit)

    @property
    def is_over(self) -> bool:
        """Whether the values are there."""
        return self._event is None or self._event.query()


def wait_on_host(event: Event, limit: Limit | None = None) -> None:
    """Waits, on the host, until the device has come to an event. A hung collective would keep a wait of torch's own for
    ever, so this one looks again and again; the first looks, in which most waits end, follow at once."""
    if limit is None:
        event.synchronize()
        return
    started = time.monotonic()
    while not event.query():
        passed = time.monotonic() - started
        if passed > limit.seconds:
            raise limit.explain()
        if passed > _SPIN_S:
            time.sleep(_PAUSE_S)


def to_host(target: Tensor, source: Tensor) -> CopyToHost:
    """Starts to copy `source`, of any device, to the host tensor `target`."""
    is_async = target.is_pinned() and has_streams(source.device.type) and _is_alike(target, source)
    target.copy_(source, non_blocking=is_async)
    return CopyToHost(record(source.device) if is_async else None)


def to_device(target: Tensor, source: Tensor, *, stays: bool = False) -> Tensor:
    """Copies the host tensor `source` to `target`, of any device, and returns `target`. If `stays`, the caller leaves
    pinned values as they are until the device has read them; otherwise the host waits until it has."""
    return target.copy_(source, non_blocking=stays)


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Whether a copy is one of plain memory: all others are made by way of a second tensor."""
    return one.dtype == other.dtype and one.is_contiguous() and other.is_contiguous() and one.shape == other.shape


def on_host(values: Tensor, limit: Limit | None = None) -> Tensor:
    """Returns the values on the host, which waits for them; a tensor of the host itself."""
    if is_host(values.device):
        return values
    return Late(values).read(limit)


@final
class Late:
    """Values of a device, on their way to the host, that are read when they have come: a step later the host need not
    wait for them any more."""

    def __init__(self, values: Tensor) -> None:
        pins = can_pin(values.device.type)
        self._values = torch.empty(values.shape, dtype=values.dtype, device=HOST, pin_memory=pins)
        self._arrival = to_host(self._values, values.detach().contiguous())

    @property
    def is_here(self) -> bool:
        return self._arrival.is_over

    def read(self, limit: Limit | None = None) -> Tensor:
        """Returns the values, after a wait if they are not here."""
        self._arrival.wait(limit)
        return self._values


# -- page-locked memory


Region = tuple[int, mmap.mmap]  # page-locked, by its address

# Regions whose tensor and `PinnedMemory` are both no more, as after a fit that has failed. Were they not kept, the host
# would take them back, though the device has them, and the device would refuse the next region at such an address.
_orphans: list[Region] = []


@final
class PinnedMemory:
    """Page-locked memory of the host for what lasts as long as a training: each tensor has a region of its own size.

    Torch's allocator, which suits what comes and goes, would round it up to a power of two, and keep it when it is
    freed; and while a process forks (to load data), the system would make a second copy of all of it. A process that
    forks has none of these regions: it could not use the device either.
    """

    def __init__(self) -> None:
        self._left: list[Region] = []  # regions of tensors that are no more
        weakref.finalize(self, _orphans.extend, self._left).atexit = False

    def empty(self, numel: int, dtype: torch.dtype, *, lasts: bool) -> tuple[Tensor, int]:
        """Returns an uninitialised flat tensor ``(numel,)``, and the bytes of memory that it takes. One that is small,
        or does not last as long as a training, is torch's: a region takes the system time. Raises MemoryError where the
        system gives no page-locked memory."""
        runtime, nbytes = _runtime(), numel * dtype.itemsize
        if runtime is None or nbytes < _OWN_REGION or not lasts:
            next_power_of_two = 1 << (nbytes - 1).bit_length() if nbytes else 0
            return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=True), next_power_of_two
        region = mmap.mmap(-1, nbytes)
        region.madvise(mmap.MADV_DONTFORK)
        tensor = torch.frombuffer(region, dtype=dtype)
        address = tensor.data_ptr()
        if failed := int(runtime.cudaHostRegister(address, nbytes, 0)):
            _forget_error()
            raise MemoryError(
                f"{nbytes:,} bytes of host memory could not be page-locked (error {failed}). Raise the limit of locked "
                "memory (ulimit -l unlimited), or write Offload(..., pin_memory=False)."
            )
        # Not given back at once: copies may be under way, and to wait for them anywhere could be to wait for a rank
        # that waits for this one.
        leave = partial(_leave, weakref.ref(self), (address, region))
        weakref.finalize(tensor.untyped_storage(), leave).atexit = False
        return tensor, nbytes

    def give_back(self) -> None:
        """Gives the regions of tensors that are no more back to the system, once the device has done its work."""
        if not (self._left or _orphans):
            return  # without asking for CUDA's runtime, which raises where there is no driver, and in a fork
        runtime, accelerator = _runtime(), torch.accelerator.current_accelerator()
        if runtime is not None and accelerator is not None:
            module_of(accelerator).synchronize()
            for left in (self._left, _orphans):
                while left:
                    address, region = left.pop()
                    runtime.cudaHostUnregister(address)
                    del region  # only now may the system take it


def _leave(memory: weakref.ref[PinnedMemory], region: Region) -> None:
    owner = memory()
    (_orphans if owner is None else owner._left).append(region)


def _forget_error() -> None:
    """Has CUDA forget that a call has failed: it would tell it at the next kernel, as if that had."""
    with suppress(RuntimeError):
        torch.zeros(1, device=torch.accelerator.current_accelerator())


def _runtime() -> Any:
    """Returns CUDA's runtime, or ROCm's; None where there is none."""
    accelerator = torch.accelerator.current_accelerator()
    found = None if accelerator is None else getattr(module_of(accelerator), "cudart", None)
    return None if found is None else found()


# -- values of a parameter on another device

_elsewhere: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()  # what a parameter was on the other kind of device


def point_at(tensor: Tensor, values: Tensor) -> None:
    """Does ``tensor.data = values``, which may be on another device.

    Torch does that between the host and devices that it knows itself. Elsewhere the tensor becomes another one below
    Python, and later, with its hooks, the one that it was.
    """
    try:
        tensor.data = values
    except RuntimeError:
        if tensor.device.type == values.device.type:
            raise
        other = _elsewhere.pop(tensor, None)
        if other is None:
            other = Parameter(torch.empty(0, dtype=tensor.dtype, device=values.device), tensor.requires_grad)
        exchange(tensor, other)
        _elsewhere[tensor] = other
        tensor.data = values


# -- memory


def allocated_bytes(device: torch.device) -> int:
    """Returns the most bytes that tensors have had on a device."""
    return int(module_of(device).max_memory_allocated(device))


def held_bytes(device: torch.device) -> int:
    """Returns the bytes that tensors have on a device now."""
    return int(module_of(device).memory_allocated(device))


def total_bytes(device: torch.device) -> int:
    """Returns the bytes of a device."""
    return int(module_of(device).mem_get_info(device)[1])


def free_bytes(device: torch.device) -> int:
    """Returns the bytes of a device that are free."""
    return int(module_of(device).mem_get_info(device)[0])
