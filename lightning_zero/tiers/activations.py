"""Activation checkpoints: the inputs of blocks from their forward to their recomputation (ZeRO-R, section 6.1).

Where one rests, for a block's input of A bytes on each of the M ranks of a tensor-parallel group, which all have it:

    policy                  on the device   on the host   sent by each rank, per checkpoint
    (none)                  A               -             -
    offload                 -               A             -
    partition (P_a)         A / M           -             (M - 1) A / M: one all-gather, before recomputation
    both (P_a+cpu)          -               A / M         the same

On the device and whole, a checkpoint is a reference, as autograd's own. Otherwise the bytes of its memory are copied; a
tensor that several blocks are given (an attention mask) once. What stays a reference under any policy: parameters,
tensors of other layouts and devices, tiny ones, and of P_a those which are not the same on all ranks (sequence
parallelism divides them already).
"""

import hashlib
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_zero.tiers.ledger import Category, Ledger, Place
from lightning_zero.tiers.stack import Loose, Room, Stack
from lightning_zero.wire.comm import Comm

TINY = 256  # bytes; to move or to gather less costs more than it saves


class Kept(ABC):
    """A tensor, from a forward to the recomputations of those that were given it."""

    is_shared = False  # by several calls

    def begin(self) -> None:  # noqa: B027  # nothing, where the values are here
        """Starts to bring the values."""

    @abstractmethod
    def values(self) -> Tensor:
        """Another tensor with the same values, strides and `requires_grad`, detached from the graph."""


@final
class KeptArguments:
    """The arguments of one call, `(args, kwargs)`: a pytree, of which tensors are kept and the rest is as it was."""

    def __init__(self, leaves: list[Any], spec: Any, before: "weakref.ref[KeptArguments] | None") -> None:
        self._leaves = leaves
        self._spec = spec
        self._before = before  # those of the call before this one: the next that backward will come to

    def begin(self) -> None:
        """Starts to bring the values."""
        for leaf in self._leaves:
            if isinstance(leaf, Kept):
                leaf.begin()

    def bring(self) -> Any:
        """The arguments, for a recomputation; starts to bring those of the next one."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self.begin()
            before = None if self._before is None else self._before()
            if before is not None:
                before.begin()
            kept = dict.fromkeys(leaf for leaf in self._leaves if isinstance(leaf, Kept))  # ranks gather in this order
            brought = {leaf: leaf.values() for leaf in kept}  # what was one tensor is one again
            leaves = [brought[leaf] if isinstance(leaf, Kept) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._spec)


@final
class ActivationStore:
    """Keeps the arguments of calls, until what holds them (a graph) is gone.

    Args:
        ledger: where all is booked.
        here: where calls are made.
        rests: where checkpoints rest.
        comm: the ranks that have the same activations, and divide them; of one rank where none do.
        contiguous: all that is copied lies in one array.
    """

    def __init__(self, ledger: Ledger, here: Place, rests: Place, comm: Comm, *, contiguous: bool = False) -> None:
        self.ledger = ledger
        self.here = here
        self.comm = comm
        self.room: Room = (Stack if contiguous else Loose)(ledger, rests)
        self.is_away = rests != here
        self._copies = contiguous or self.is_away or comm.size > 1
        self._known = WeakTensorKeyDictionary()  # tensor -> its state, and a reference to what is kept of it
        self._is_alike: dict[str, bool] = {}  # argument of a block -> whether all ranks have the same
        self._holds: weakref.WeakValueDictionary[int, _Hold] = weakref.WeakValueDictionary()  # storage -> its booking
        self._last: weakref.ref[KeptArguments] | None = None
        self._aside = torch.cuda.Stream(here.device) if self.is_away and here.device.type == "cuda" else None
        self._leaving: list[Tensor] = []  # what is being copied from here on the other stream

    def keep(self, name: str, arguments: Any) -> KeptArguments:
        """Keeps the arguments of a call of the block `name`; `settle` must follow."""
        leaves, spec = tree_flatten(arguments)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            kept = [self._keep(f"{name} (argument {at})", leaf) for at, leaf in enumerate(leaves)]
        result = KeptArguments(kept, spec, self._last)
        self._last = weakref.ref(result)
        return result

    def _keep(self, name: str, leaf: Any) -> Any:
        """What is kept of a leaf: of a tensor a `Kept`."""
        is_made_of_others: bool = is_traceable_wrapper_subclass(leaf)
        if not isinstance(leaf, Tensor):
            return leaf
        if is_made_of_others and not isinstance(leaf, Parameter):
            return self._keep_wrapper(name, leaf)
        if not _is_plain(leaf):
            return _Reference(name, leaf, leaf)
        now = (version_of(leaf), leaf.data_ptr(), leaf.requires_grad)
        then, kept = self._known.get(leaf, (None, lambda: None))
        shared = kept() if then == now else None
        if shared is not None:
            shared.is_shared = True
            return shared
        made = self._make(name, leaf)
        self._known[leaf] = now, weakref.ref(made)
        return made

    def _keep_wrapper(self, name: str, tensor: Any) -> Kept:
        _arrived(tensor)
        names, context = tensor.__tensor_flatten__()
        return _Wrapper(tensor, {key: self._keep(f"{name}.{key}", getattr(tensor, key)) for key in names}, context)

    def _make(self, name: str, tensor: Tensor) -> Kept:
        is_copied = self._copies and tensor.nbytes > TINY and tensor.device.type == self.here.device.type
        if not is_copied:
            return _Reference(name, tensor, tensor.detach(), self._hold(tensor))
        geometry = _Geometry(tensor)
        memory = geometry.memory_of(tensor)
        is_parted = self.comm.size > 1 and self._all_have(name, memory)
        if self.comm.size > 1 and not is_parted and not self.is_away:
            return _Reference(name, tensor, tensor.detach(), self._hold(tensor))
        return _Copy(self, name, geometry, memory, is_parted=is_parted)

    def _all_have(self, name: str, memory: Tensor) -> bool:
        """Whether all ranks have this argument alike, as they had the first time."""
        if name not in self._is_alike:
            digest = hashlib.blake2b(memory.cpu().numpy().tobytes()).hexdigest()
            self._is_alike[name] = len(set(self.comm.all_gather_object(digest, "same activations"))) == 1
        return self._is_alike[name]

    def _hold(self, tensor: Tensor) -> "_Hold | None":
        """Books what a reference keeps alive, a storage once."""
        storage = tensor.untyped_storage()
        if self.ledger.has_booked(storage):
            return None
        hold = self._holds.get(storage._cdata)
        if hold is None:
            hold = self._holds[storage._cdata] = _Hold()
            self.ledger.book(Category.ACTIVATION_CHECKPOINT, self.here.tier, storage.nbytes(), hold)
        return hold

    # -- copies, beside the device's work where there is another stream

    def leave(self, target: Tensor, source: Tensor) -> None:
        """Copies to where checkpoints rest. `source` must stay as it is until `settle`."""
        if self._aside is None:
            target.copy_(source)
            return
        self._aside.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._aside):
            target.copy_(source, non_blocking=True)
        self._leaving.append(source)

    def settle(self) -> None:
        """What comes after on this stream may change what `keep` was given."""
        if self._leaving:
            assert self._aside is not None
            torch.cuda.current_stream(self._leaving[0].device).wait_stream(self._aside)
            self._leaving.clear()

    def room_here(self, nbytes: int) -> Tensor:
        """Memory ``(nbytes,)`` for what comes back."""
        return self.ledger.allocate(Category.GATHERED, nbytes, torch.uint8, self.here)

    def fetch(self, memory: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """A copy of what rests elsewhere, and when it will be there."""
        target = self.room_here(memory.numel())
        if self._aside is None:
            return target.copy_(memory), None
        self._aside.wait_stream(torch.cuda.current_stream(target.device))  # whoever had the memory before is done
        with torch.cuda.stream(self._aside):
            target.copy_(memory, non_blocking=True)
            target.record_stream(self._aside)
            return target, self._aside.record_event()


@final
class _Hold:
    """The owner of a booking."""


@final
class _Geometry:
    """How a plain tensor lies in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.requires_grad = tensor.requires_grad
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        # Expanded tensors reach over fewer elements than they have, slices of larger ones over more.
        self._is_dense = reach < tensor.numel()
        self._numel = 1 + reach if self._is_dense else tensor.numel()

    def memory_of(self, tensor: Tensor) -> Tensor:
        """The bytes of all values, ``(nbytes,)``: the tensor's own memory where it has no gaps."""
        if self._is_dense:
            flat = tensor.detach().as_strided((self._numel,), (1,), tensor.storage_offset())
        else:
            flat = tensor.detach().reshape(-1)
        return flat.view(torch.uint8)

    def tensor_of(self, memory: Tensor) -> Tensor:
        """The reverse; `memory` may be longer."""
        flat = memory[: self._numel * self.dtype.itemsize].view(self.dtype)
        if self._is_dense:
            return flat.as_strided(self.shape, self.stride)
        spread = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=memory.device)
        return spread.copy_(flat.view(self.shape))


@final
class _Reference(Kept):
    """The values stay where they are. `kept` is detached, or what cannot be: it is then given again itself."""

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
    """A tensor that is made of others: a DTensor of its local one, or the result of a collective."""

    def __init__(self, tensor: Tensor, inner: Mapping[str, Any], context: Any) -> None:
        self._inner = inner
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._requires_grad = tensor.requires_grad
        self._kind: Any = type(tensor)
        self._context = context

    def begin(self) -> None:
        for part in self._inner.values():
            if isinstance(part, Kept):
                part.begin()

    def values(self) -> Tensor:
        parts = {key: part.values() if isinstance(part, Kept) else part for key, part in self._inner.items()}
        made = self._kind.__tensor_unflatten__(parts, self._context, self._shape, self._stride)
        return _arrived(made).detach().requires_grad_(self._requires_grad)


def _arrived(tensor: Tensor) -> Tensor:
    """The plain tensor, if it is the result of one of torch's collectives that may be under way."""
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


@final
class _Copy(Kept):
    """The bytes rest elsewhere, or this rank's part of them: ``(ceil(nbytes / M),)``."""

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
        store.leave(self._region.memory[: own.numel()], own)
        self._coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._here: Tensor | None = None  # what several calls share, from the first that wants it to the last

    def begin(self) -> None:
        if self._store.is_away and self._coming is None and self._here is None:
            self._coming = self._store.fetch(self._region.memory)

    def values(self) -> Tensor:
        values = self._here
        if values is None:
            values = self._geometry.tensor_of(self._bring())
            self._here = values if self.is_shared else None
        return values.detach().requires_grad_(self._geometry.requires_grad)

    def _bring(self) -> Tensor:
        """All bytes, in memory that is nobody else's."""
        memory = self._region.memory
        if self._store.is_away:
            self.begin()
            assert self._coming is not None
            (memory, arrives), self._coming = self._coming, None
            if arrives is not None:
                torch.cuda.current_stream(memory.device).wait_event(arrives)
        elif not self._is_parted:
            return memory.clone()  # users may hold on to what they are given, and the array is used again
        if not self._is_parted:
            return memory
        comm = self._store.comm
        full = self._store.room_here(comm.size * memory.numel())
        comm.all_gather(full.view(comm.size, -1), memory, f"activation checkpoint {self._name}").wait()
        return full


def version_of(tensor: Tensor) -> int:
    """Another one after each edit in place; 0 where torch counts none."""
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor.is_inference() else tensor._version


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values are bytes in memory, and nothing else is known of it."""
    is_strided = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized
    return is_strided and tensor.device.type != "meta" and not (tensor.is_conj() or tensor.is_neg())
