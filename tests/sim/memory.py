"""Memory of the device and pinned memory of the host: who touches which bytes, and whether a wait orders them.

Vector clocks: every access has an actor and that actor's number of it. A later access is ordered after an earlier one
if the clock of its actor has come to that number, by events or by the host. Otherwise, if one of the two writes, they
race.
"""

import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .streams import LOCK, Clock, Event, Stream, current_stream, this_host

GRAIN = 512  # bytes; sizes of blocks are multiples of it
POISON = 255  # of every byte: NaN in every floating-point dtype


class RaceError(RuntimeError):
    """Two accesses to the same memory that no wait orders."""


class _Done(NamedTuple):
    """An access that was launched."""

    access: "Access"
    number: int
    name: str


class Access:
    """Bytes of a block that a launch reads or writes."""

    def __init__(self, block: "Block", tensor: Tensor, *, writes: bool) -> None:
        self.block, self.writes = block, writes
        self._size, self._stride, self._item = tuple(tensor.size()), tensor.stride(), tensor.element_size()
        reach = tensor.numel()
        if not tensor.is_contiguous():
            reach = sum((size - 1) * step for size, step in zip(self._size, self._stride, strict=True)) + 1
        self.low = tensor.storage_offset() * self._item
        self.high = self.low + (reach * self._item if tensor.numel() else 0)
        self.is_dense = self.high - self.low == tensor.numel() * self._item
        self.key = (self.low, self.high, writes, () if self.is_dense else (self._size, self._stride))

    def check(self, actor: int, number: int, clock: Clock, name: str) -> None:
        """Raises RaceError if this access of `actor`, which knows of what `clock` says, races with an earlier one."""
        if self.low == self.high:
            return
        history, covers = self.block.history, self.writes and self.is_dense
        for (key, other), (old, then, what) in [*history.items()]:
            if not (self.writes or old.writes):
                continue
            if other != actor and then > clock.get(other, 0) and self._overlaps(old):
                verbs = {True: "writes", False: "reads"}
                raise RaceError(
                    f"{name} on {_named(actor)} {verbs[self.writes]} what {what} on {_named(other)} "
                    f"{verbs[old.writes]}, and nothing waits in between."
                )
            if covers and self.low <= old.low and old.high <= self.high:
                del history[key, other]  # what is ordered after this write is ordered after that, too
        history[self.key, actor] = _Done(self, number, name)

    def _overlaps(self, other: "Access") -> bool:
        if self.low >= other.high or other.low >= self.high:
            return False
        return (self.is_dense and other.is_dense) or not self._bytes().isdisjoint(other._bytes())

    def _bytes(self) -> set[int]:
        starts = torch.arange(self.high - self.low).as_strided(self._size, [step * self._item for step in self._stride])
        return set((starts.reshape(-1, 1) + torch.arange(self._item) + self.low).flatten().tolist())


def _named(actor: int) -> str:
    return "the host" if actor < 0 else repr(Stream.known[actor])


class Block:
    """Memory with a history: of the device, or (without memory of its own) of a pinned host tensor."""

    def __init__(self, nbytes: int = 0, stream: Stream | None = None) -> None:
        self.stream = stream  # that it was allocated on
        self.memory = torch.full((nbytes,), POISON, dtype=torch.uint8, device="cpu")
        self.users: set[Stream] = set()  # from `record_stream`
        self.history: dict[tuple[Any, int], _Done] = {}

    @property
    def is_in_use(self) -> bool:
        """Whether a stream has not come to an access yet."""
        pending = {actor: Stream.known[actor].queue for _, actor in self.history if actor >= 0}
        return any(
            actor >= 0 and pending[actor] and pending[actor][0].number <= number
            for (_, actor), (_, number, _) in self.history.items()
        )


@dataclass
class Level:
    """Bytes now, and the most that there have been."""

    now: int = 0
    most: int = 0

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)


BLOCKS: dict[int, Block] = {}  # of the device, by address of a live storage
PINNED: dict[int, Block] = {}  # of the host, by address of a live storage
REGISTERED: dict[int, Block] = {}  # of the host, by the address where the memory begins


class Heap:
    """The allocator. Memory that was freed belongs to the stream that it was allocated on: the next allocation there
    may get it, and poisons it. Another stream must have been waited for by then, or named by `record_stream`."""

    def __init__(self) -> None:
        # By rank, as each has a device of its own: in blocks, and as asked for.
        self.allocated, self.requested = defaultdict[str, Level](Level), defaultdict[str, Level](Level)
        self._free: defaultdict[tuple[Stream, int], list[Block]] = defaultdict(list)
        self._leaving: list[tuple[list[Event], Block]] = []  # streams of `record_stream` still use these
        self._freed: deque[tuple[int, int, Block]] = deque()  # by whoever dropped them

    def take(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        with LOCK:
            stream, rounded = current_stream(), max(GRAIN, -(-nbytes // GRAIN) * GRAIN)
            self._collect()
            self._poison_freed(stream)
            free = self._free[stream, rounded]
            block = free.pop() if free else Block(rounded, stream)
            storage = torch._C._construct_storage_from_data_pointer(block.memory.data_ptr(), device, nbytes)
            BLOCKS[storage._cdata] = block
            self.allocated[stream.rank].add(rounded)
            self.requested[stream.rank].add(nbytes)
            # The storage may die anywhere, also where this lock must not be waited for.
            weakref.finalize(storage, self._freed.append, (storage._cdata, nbytes, block)).atexit = False
            return storage

    def _collect(self) -> None:
        while self._freed:
            key, nbytes, block = self._freed.popleft()
            if BLOCKS.get(key) is block:  # else a newer storage has its address
                del BLOCKS[key]
            self.allocated[block.stream.rank].add(-block.memory.numel())
            self.requested[block.stream.rank].add(-nbytes)
            self._leaving.append(([user.record_event() for user in block.users], block))
            block.users = set()

    def _poison_freed(self, stream: Stream) -> None:
        for entry in [*self._leaving]:
            events, block = entry
            if block.stream is stream and all(event.query() for event in events):
                self._leaving.remove(entry)
                memory = block.memory
                poison = partial(memory.fill_, POISON)
                stream.launch("a newer tensor", poison, [Access(block, memory, writes=True)])
                self._free[stream, memory.numel()].append(block)

    def forget(self) -> None:
        """Ends all that a test has left behind."""
        with LOCK:
            self._collect()
            self._leaving.clear()
            for block in (*BLOCKS.values(), *PINNED.values(), *REGISTERED.values()):
                block.history.clear()
            for level in (*self.allocated.values(), *self.requested.values()):
                level.most = level.now

    def levels(self, *, again: bool = False) -> dict[str, Level]:
        """Returns what this rank has on its device, and the most that it has had; `again`: since now."""
        with LOCK:
            self._collect()
            rank = this_host().name
            found = {"allocated": self.allocated[rank], "requested": self.requested[rank]}
            for level in found.values():
                level.most = level.now if again else level.most
            return found


HEAP = Heap()


def pin(tensor: Tensor) -> Tensor:
    """Makes the memory of a host tensor pinned."""
    storage = tensor.untyped_storage()
    if storage._cdata not in PINNED:
        PINNED[storage._cdata] = Block()
        weakref.finalize(storage, PINNED.pop, storage._cdata, None).atexit = False
    return tensor


def any_is_pinned() -> bool:
    return bool(PINNED or REGISTERED)


def is_pinned(tensor: Tensor) -> bool:
    if tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    return storage._cdata in PINNED or storage.data_ptr() in REGISTERED


class Runtime:
    """What `torch.cuda.cudart` gives of CUDA's runtime: memory of the host that is pinned where it lies."""

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        if address in REGISTERED:
            return 712  # cudaErrorHostMemoryAlreadyRegistered: the host has taken memory back that the device has
        REGISTERED[address] = Block()
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        clock = this_host().clock
        for (_, actor), (_, then, what) in REGISTERED.pop(address).history.items():
            if actor >= 0 and then > clock.get(actor, 0):
                raise RaceError(f"the host takes back memory that {what} on {_named(actor)} still uses.")
        return 0


def of_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "sim"


def block_of(tensor: Tensor) -> Block:
    key = tensor.untyped_storage()._cdata
    if of_device(tensor):
        return BLOCKS[key]
    return PINNED[key] if key in PINNED else REGISTERED[tensor.untyped_storage().data_ptr()]


def host_touches(tensor: Tensor, name: str, *, writes: bool) -> None:
    """Notes an access of the host to pinned memory. Raises RaceError if a stream still copies from or to it."""
    with LOCK:
        host = this_host()
        number = host.acts()
        Access(block_of(tensor), tensor, writes=writes).check(host.actor, number, host.clock, name)
