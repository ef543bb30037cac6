"""The memory that a rank shares with the other ranks of its machine: its `Desk`, which tensors pass in parts, and its
`Segments`, one for each tensor that peers read where it lies.

It has no name, and is no file that could be found: only a process that is sent the open file can read it, and only its
owner can write to it.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Lock
from typing import final

from lightning_zero.wire.landing import Arrival, Payload

DESK_BYTES = 2**23  # bytes of what is on its way to all peers
SLOTS = 2  # for each peer: one is written while the other is read
_PAGE = mmap.PAGESIZE
# Of Linux. Many builds of Python, made for all its versions, lack the names.
_CLOEXEC, _ALLOW_SEALING = 1, 2  # of memfd_create
_ADD_SEALS, _GET_SEALS = 1033, 1034  # of fcntl
_SEAL, _SHRINK, _GROW, _FUTURE_WRITE = 1, 2, 4, 16  # what is not possible any more; the last one since Linux 5.1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value  # of mmap
_BOTH = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 16  # of mmap


@final
class Memory:
    """A whole file as memory of this process. A forked process does not have it, unless it is `inherited`."""

    def __init__(self, file: int, rights: int, *, inherited: bool = False) -> None:
        """Raises OSError where the system refuses that."""
        self.nbytes = os.fstat(file).st_size
        self.start = _libc.mmap(None, self.nbytes, rights, mmap.MAP_SHARED, file, 0)
        if self.start == _FAILED:
            raise _last_error()
        self.close = weakref.finalize(self, _libc.munmap, self.start, self.nbytes)
        self.close.atexit = False  # the thread may be at work until the process ends
        if not inherited:
            _MEMORIES.add(self)

    def address_of(self, offset: int, nbytes: int) -> int:
        """Returns the address of a range."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        return int(self.start) + offset


@final
class Desk:
    """This rank's desk: a page that begins with a `mark`, and slots for each peer."""

    def __init__(self, peers: Sequence[int], slot: int, mark: bytes) -> None:
        """Makes slots of `slot` bytes. Raises OSError where the system has no such memory."""
        self.slot = slot
        starts = range(_PAGE, _PAGE + SLOTS * len(peers) * slot, slot)
        self.free = {peer: deque(starts[number :: len(peers)]) for number, peer in enumerate(peers)}  # offsets of slots
        self.file, self._memory = _create(starts.stop)
        ctypes.memmove(self._memory.start, mark, len(mark))

    def close_file(self) -> None:
        """Closes the file, once all peers have it. The memory stays."""
        os.close(self.file)

    def put(self, offset: int, address: int, nbytes: int) -> None:
        """Copies what lies at an address into a slot."""
        ctypes.memmove(self._memory.address_of(offset, nbytes), address, nbytes)


@final
class Segment:
    """Memory of a tensor that peers read where it lies. `start` is its place among all segments of this rank.

    A forked process has a copy, as of other memory, that it may write to. But where it has not, it sees what this
    process writes later.
    """

    def __init__(self, start: int, nbytes: int) -> None:
        """Raises OSError where the system has no such memory."""
        self.start, self.nbytes = start, nbytes
        self.readers: set[int] = set()  # peers that were sent the file
        self.file, self._memory = _create(nbytes, inherited=True)
        self.address = self._memory.address_of(0, nbytes)
        self._close_file = weakref.finalize(self, os.close, self.file)
        _SEGMENTS.add(self)

    def close(self) -> None:
        """Gives the memory back to the system, once no peer has it either."""
        self._memory.close()
        self._close_file()

    def leave_to_parent(self) -> None:
        """Makes the memory a copy, in a forked process."""
        if self._memory.close.alive:  # otherwise something else may lie there
            _libc.mmap(self.address, self.nbytes, _BOTH, mmap.MAP_PRIVATE | _MAP_FIXED, self.file, 0)
            self._close_file()


@final
class Segments:
    """The segments of this rank, and those of its peers, by their starts. `wakes` is called after one of this rank has
    gone. It is held weakly: the exchange that holds the segments closes its sockets when nothing else refers to it."""

    def __init__(self, peers: Iterable[int], wakes: "weakref.WeakMethod[Callable[[], None]]") -> None:
        self._lock = Lock()
        self._wakes = wakes
        self._own: dict[int, Segment] = {}
        self._next = mmap.PAGESIZE  # the start of the next one; none is 0
        self.gone: deque[Segment] = deque()  # whose tensors are no more; the peers are to be told
        self._seen: dict[int, dict[int, Memory]] = {peer: {} for peer in peers}

    def empty(self, nbytes: int) -> Payload | None:
        """Returns memory, as long as anything refers to it, for a tensor that peers are to read where it lies. Returns
        None where the system has none. The first use takes the time of a copy, so it is for what is sent often."""
        with self._lock:
            start = self._next
            self._next += nbytes
        try:
            segment = self._own[start] = Segment(start, nbytes)
        except OSError:
            return None
        memory = (ctypes.c_char * nbytes).from_address(segment.address)
        weakref.finalize(memory, self._close, start).atexit = False
        return memory

    def _close(self, start: int) -> None:
        """Gives the memory back. It may be called anywhere, even while this thread holds a lock."""
        segment = self._own.pop(start)
        segment.close()
        self.gone.append(segment)
        if (wake := self._wakes()) is not None:
            with suppress(OSError):  # in a forked process, which has no sockets
                wake()

    def holding(self, address: int) -> Segment | None:
        """Returns the segment of this rank in which an address lies."""
        segments = [*self._own.values()]
        return next((each for each in segments if each.address <= address < each.address + each.nbytes), None)

    def see(self, peer: int, start: int, files: Sequence[int]) -> None:
        """Maps a segment of a peer. What lies there passes the desk if that fails."""
        for file in files:
            with suppress(OSError):
                segment = open_desk(file)
                if segment is not None:
                    self._seen[peer][start] = segment

    def drop(self, peer: int, start: int | None = None) -> None:
        """Gives up a segment of a peer, or all of them."""
        for one in [*self._seen[peer]] if start is None else [start]:
            self._seen[peer].pop(one, None)

    def address_of(self, peer: int, arrival: Arrival) -> int | None:
        """Returns where a tensor lies in a segment of the peer; None if it cannot be read there."""
        for start, segment in self._seen[peer].items():
            if start <= arrival.place and arrival.place - start + arrival.nbytes <= segment.nbytes:
                return segment.address_of(arrival.place - start, arrival.nbytes)
        return None


def slot_for(peers: int) -> int:
    """Returns the bytes of a slot where ranks have up to that many peers. It must be the same on all ranks: terms of a
    sum come part by part."""
    return max(DESK_BYTES // (SLOTS * peers) // _PAGE, 16) * _PAGE


def open_desk(file: int, mark: bytes = b"") -> Memory | None:
    """Returns a peer's desk, given its file, which it closes, and the mark at its beginning; or a peer's segment, which
    has no mark. Returns None if it is another file, or one that its owner could make shorter, which would end this
    process. Raises OSError as `Memory`."""
    try:
        is_sealed = fcntl.fcntl(file, _GET_SEALS) & _SHRINK
        return Memory(file, mmap.PROT_READ) if is_sealed and os.pread(file, len(mark), 0) == mark else None
    finally:
        os.close(file)


def _create(nbytes: int, *, inherited: bool = False) -> tuple[int, Memory]:
    """Returns an open file that only memory holds, and the one mapping by which it can ever be written to."""
    file = _create_file()
    try:
        os.ftruncate(file, nbytes)
        memory = Memory(file, _BOTH, inherited=inherited)
        fcntl.fcntl(file, _ADD_SEALS, _SHRINK | _GROW | _FUTURE_WRITE | _SEAL)
    except OSError:
        os.close(file)
        raise
    return file, memory


def _create_file() -> int:
    if not hasattr(_libc, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    file = int(_libc.memfd_create(b"lightning_zero", _CLOEXEC | _ALLOW_SEALING))
    if file < 0:
        raise _last_error()
    return file


def _last_error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_MEMORIES: "weakref.WeakSet[Memory]" = weakref.WeakSet()  # of this process
_SEGMENTS: "weakref.WeakSet[Segment]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for memory in [*_MEMORIES]:
        memory.close()
    for segment in [*_SEGMENTS]:
        segment.leave_to_parent()
    _SEGMENTS.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
