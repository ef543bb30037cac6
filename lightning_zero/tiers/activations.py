"""Activation checkpoints: the inputs of blocks, kept from forward to recomputation (ZeRO-R, section 6.1).

A block's input of A bytes, which all M ranks of a tensor-parallel group have alike, takes on each of them:

    policy                  on the device   on the host   sent by each rank, per checkpoint
    (none)                  A               -             -
    offload                 -               A             -
    partition (P_a)         A / M           -             (M - 1) A / M: one all-gather, before recomputation
    both (P_a+cpu)          -               A / M         the same

Without a policy a checkpoint is a reference to the tensor, as autograd keeps. Otherwise its bytes are copied, once if
several blocks are given the tensor (an attention mask). Some tensors are references under every policy: parameters,
tiny tensors, tensors of other layouts and devices; under P_a also tensors that differ between the ranks, since sequence
parallelism has divided them already.
"""

import hashlib
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_zero.device import Event, SideStream, to_device, to_host, wait_for
from lightning_zero.distributed_private import awaited
from lightning_zero.tiers.composed import is_made_of_others, taken_apart
from lightning_zero.tiers.ledger import Category, Ledger, Place
from lightning_zero.tiers.stack import Stack
from lightning_zero.torch_private import edits_of, storage_key, tree_flatten, tree_unflatten
from lightning_zero.wire.comm import Comm

TINY = 256  # bytes; to move or to gather less costs more than it saves


class Kept(ABC):
    """A tensor that is kept from forward to the recomputations that need it."""

    is_shared = False  # whether several calls were given it

    def prefetch(self) -> None:  # noqa: B027  # does nothing if the values are on the device
        """Starts to copy the values to the device."""

    @abstractmethod
    def values(self) -> Tensor:
        """Returns another tensor with the same values, strides and `requires_grad`, detached from the graph."""


@final
@dataclass(eq=False)
class KeptArguments:
    """The arguments `(args, kwargs)` of one call, as a flat pytree whose tensors are `Kept`."""

    leaves: list[Any]
    spec: Any
    before: "weakref.ref[KeptArguments] | None"  # the arguments of the call before this one; backward needs them next

    def prefetch(self) -> None:
        for leaf in self.leaves:
            if isinstance(leaf, Kept):
                leaf.prefetch()

    def fetch(self) -> Any:
        """Returns the arguments for a recomputation, and starts to fetch those of the next one."""
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():
            self.prefetch()
            before = None if self.before is None else self.before()
            if before is not None:
                before.prefetch()
            # A tensor that came twice becomes one tensor again. Ranks gather parts in the order of the leaves.
            values = cache(lambda kept: kept.values())
            leaves = [values(leaf) if isinstance(leaf, Kept) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


@final
class ActivationStore:
    """Keeps the arguments of calls until the graphs that refer to their `KeptArguments` are gone.

    Args:
        ledger: books the checkpoints.
        here: the device that calls the blocks.
        rests: where checkpoints are kept.
        comm: the ranks that have the same activations and divide them; a world of one if none do.
        contiguous: copies are kept in one array.
    """

    def __init__(self, ledger: Ledger, here: Place, rests: Place, comm: Comm, *, contiguous: bool = False) -> None:
        self.ledger = ledger
        self.here = here
        self.comm = comm
        self.room = Stack(ledger, rests, contiguous=contiguous)
        self.is_away = rests != here
        self._copies = contiguous or self.is_away or comm.size > 1
        self._known = WeakTensorKeyDictionary()  # tensor -> its state, and a weak reference to its `Kept`
        self._is_alike: dict[str, bool] = {}  # argument of a block -> whether all ranks have the same values
        self._holds: weakref.WeakValueDictionary[int, _Hold] = weakref.WeakValueDictionary()  # by storage
        self._last: weakref.ref[KeptArguments] | None = None
        self._aside = SideStream.of(here.device) if self.is_away else None
        self._leaving: list[Tensor] = []  # tensors that the other stream is copying from the device

    def keep(self, name: str, arguments: Any) -> KeptArguments:
        """Keeps the arguments of a call of the block `name`. Call `join` after it."""
        leaves, spec = tree_flatten(arguments)
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():
            kept = [self._keep(f"{name} (argument {at})", leaf) for at, leaf in enumerate(leaves)]
        result = KeptArguments(kept, spec, self._last)
        self._last = weakref.ref(result)
        return result

    def _keep(self, name: str, leaf: Any) -> Any:
        """Returns a `Kept` for a tensor, and any other leaf itself."""
        if not isinstance(leaf, Tensor):
            return leaf
        if is_made_of_others(leaf) and not isinstance(leaf, Parameter):
            awaited(leaf)
            parts, context = taken_apart(leaf)
            return _Wrapper(leaf, {key: self._keep(f"{name}.{key}", part) for key, part in parts.items()}, context)
        if not _is_plain(leaf):
            return _Reference(name, leaf, leaf)
        now = (version_of(leaf), leaf.data_ptr(), leaf.requires_grad)
        then, kept = self._known.get(leaf, (None, lambda: None))
        shared = kept() if then == now else None
        if shared is not None:
            shared.is_shared = True
            return shared
        made = self._make_kept(name, leaf)
        self._known[leaf] = now, weakref.ref(made)
        return made

    def _make_kept(self, name: str, tensor: Tensor) -> Kept:
        if self._copies and tensor.nbytes > TINY and tensor.device.type == self.here.device.type:
            geometry = _Geometry(tensor)
            memory = geometry.memory_of(tensor)
            is_parted = self.comm.size > 1 and self._all_have(name, memory)
            if is_parted or self.is_away or self.comm.size == 1:
                return _Copy(self, name, geometry, memory, is_parted=is_parted)
        return _Reference(name, tensor, tensor.detach(), self._hold(tensor))

    def _all_have(self, name: str, memory: Tensor) -> bool:
        """Whether all ranks have the same values of this argument. Ranks compare the first values only."""
        if name not in self._is_alike:
            digest = hashlib.blake2b(memory.cpu().numpy().tobytes()).hexdigest()
            self._is_alike[name] = len(set(self.comm.all_gather_object(digest, "same activations"))) == 1
        return self._is_alike[name]

    def _hold(self, tensor: Tensor) -> "_Hold | None":
        """Books the storage that a reference keeps alive, unless it is booked. Returns the owner of that booking."""
        storage = tensor.untyped_storage()
        if self.ledger.has_booked(storage):
            return None
        hold = self._holds.get(storage_key(storage))
        if hold is None:
            hold = self._holds[storage_key(storage)] = _Hold()
            self.ledger.book(Category.ACTIVATION_CHECKPOINT, self.here.tier, storage.nbytes(), hold)
        return hold

    # -- copies, on a stream of their own where the device has streams

    def store(self, target: Tensor, source: Tensor) -> None:
        """Copies `source` to `target`, where checkpoints are kept. `source` must not change until `join`."""
        if self._aside is None:
            target.copy_(source)
            return
        with self._aside.after_current():
            to_host(target, source)  # `fetch` reads it on the same stream
        self._leaving.append(source)

    def join(self) -> None:
        """Lets the current stream wait for the copies that `keep` has started: then it may change their sources."""
        if self._leaving:
            assert self._aside is not None
            self._aside.join()
            self._leaving.clear()

    def room_here(self, nbytes: int) -> Tensor:
        """Allocates memory ``(nbytes,)`` uint8 on the device for a checkpoint that is brought back."""
        return self.ledger.allocate(Category.GATHERED, nbytes, torch.uint8, self.here)

    def fetch(self, memory: Tensor) -> tuple[Tensor, Event | None]:
        """Returns a copy of `memory` on the device, and the event that ends the copying (None: it has ended)."""
        target = self.room_here(memory.numel())
        if self._aside is None:
            return target.copy_(memory), None
        with self._aside.after_current():  # which may still use the memory of `target`
            to_device(target, memory, stays=True)
            self._aside.keep(target)
            return target, self._aside.record()


@final
class _Hold:
    """The owner of the booking of one storage."""


@final
class _Geometry:
    """The layout of a plain tensor in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.requires_grad = tensor.requires_grad
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        # An expanded tensor spans fewer elements than it has, a slice of a larger tensor more.
        self._is_dense = reach < tensor.numel()
        self._numel = 1 + reach if self._is_dense else tensor.numel()

    def memory_of(self, tensor: Tensor) -> Tensor:
        """Returns the bytes of all values, ``(nbytes,)``: the tensor's own memory if that has no gaps."""
        values = tensor.detach()
        flat = values.as_strided((self._numel,), (1,)) if self._is_dense else values.reshape(-1)
        return flat.view(torch.uint8)

    def tensor_of(self, memory: Tensor) -> Tensor:
        """Returns the tensor whose bytes are `memory`, which may be longer."""
        flat = memory[: self._numel * self.dtype.itemsize].view(self.dtype)
        if self._is_dense:
            return flat.as_strided(self.shape, self.stride)
        spread = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=memory.device)
        return spread.copy_(flat.view(self.shape))


@final
class _Reference(Kept):
    """A reference to a tensor, whose values stay where they are. `kept` is `tensor` detached, or, where that cannot be
    done, `tensor` itself, which `values` then returns."""

    def __init__(self, name: str, tensor: Tensor, kept: Tensor, hold: _Hold | None = None) -> None:
        self._name = name
        self._tensor = kept
        self._is_itself = kept is tensor
        self._requires_grad = tensor.requires_grad
        self._version = version_of(tensor)
        self._hold = hold

    def values(self) -> Tensor:
        if version_of(self._tensor) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"input of {self._name}, of shape {tuple(self._tensor.shape)}, from which its activations were to be "
                f"computed again, is at version {version_of(self._tensor)}; expected version {self._version} instead."
            )
        return self._tensor if self._is_itself else self._tensor.detach().requires_grad_(self._requires_grad)


@final
class _Wrapper(Kept):
    """A tensor that is made of others: a DTensor (of its local tensor), or the result of one of torch's collectives."""

    def __init__(self, tensor: Tensor, inner: Mapping[str, Any], context: Any) -> None:
        self._inner = inner
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._requires_grad = tensor.requires_grad
        self._kind: Any = type(tensor)
        self._context = context

    def prefetch(self) -> None:
        for part in self._inner.values():
            if isinstance(part, Kept):
                part.prefetch()

    def values(self) -> Tensor:
        parts = {key: part.values() if isinstance(part, Kept) else part for key, part in self._inner.items()}
        made = self._kind.__tensor_unflatten__(parts, self._context, self._shape, self._stride)
        return awaited(made).detach().requires_grad_(self._requires_grad)


@final
class _Copy(Kept):
    """A copy of a tensor's bytes where checkpoints are kept: of all, or of this rank's part ``(ceil(nbytes / M),)``."""

    def __init__(
        self, store: ActivationStore, name: str, geometry: _Geometry, memory: Tensor, *, is_parted: bool
    ) -> None:
        self._store = store
        self._name = name
        self._geometry = geometry
        self._is_parted = is_parted
        columns = math.ceil(memory.numel() / store.comm.size) if is_parted else memory.numel()
        start = store.comm.rank * columns if is_parted else 0
        own = memory[start : start + columns]
        self._region = store.room.take(columns)
        store.store(self._region.memory[: own.numel()], own)
        self._coming: tuple[Tensor, Event | None] | None = None
        self._here: Tensor | None = None  # the values on the device, once brought, if several calls share them

    def prefetch(self) -> None:
        if self._store.is_away and self._coming is None and self._here is None:
            self._coming = self._store.fetch(self._region.memory)

    def values(self) -> Tensor:
        values = self._here
        if values is None:
            values = self._geometry.tensor_of(self._fetch_whole())
            self._here = values if self.is_shared else None
        return values.detach().requires_grad_(self._geometry.requires_grad)

    def _fetch_whole(self) -> Tensor:
        """Returns all bytes, on the device, in memory of their own."""
        memory, comm = self._region.memory, self._store.comm
        if self._store.is_away:
            self.prefetch()
            assert self._coming is not None
            (memory, arrives), self._coming = self._coming, None
            if arrives is not None:
                wait_for(arrives, memory.device)
        if self._is_parted:
            full = self._store.room_here(comm.size * memory.numel())
            comm.all_gather(full.view(comm.size, -1), memory, f"activation checkpoint {self._name}").wait()
            return full
        # Users may keep a reference to what a block is given, and the region is reused.
        return memory if self._store.is_away else memory.clone()


def version_of(tensor: Tensor) -> int:
    """Returns torch's count of in-place edits of `tensor`; 0 for an inference tensor, which has none."""
    with torch.DisableTorchFunctionSubclass():
        return 0 if tensor.is_inference() else edits_of(tensor)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but a block of memory with a dtype, shape and strides."""
    is_strided = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized
    return is_strided and tensor.device.type != "meta" and not (tensor.is_conj() or tensor.is_neg())
