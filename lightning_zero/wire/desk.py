"""`Desk`: the memory that a rank shares with the other ranks of its machine. Tensors pass it in parts.

It has no name, and is no file that could be found: only a process that is sent the open file can read it, and only its
owner can write to it. No tensor lies in it.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import final

ROOM = 2**23  # bytes of what is on its way to all peers
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


@final
class Memory:
    """A whole file as memory of this process. A forked process does not have it."""

    def __init__(self, file: int, rights: int) -> None:
        """Raises OSError where the system refuses that."""
        self.nbytes = os.fstat(file).st_size
        self.start = _libc.mmap(None, self.nbytes, rights, mmap.MAP_SHARED, file, 0)
        if self.start == _FAILED:
            raise _last_error()
        self.close = weakref.finalize(self, _libc.munmap, self.start, self.nbytes)
        self.close.atexit = False  # the thread may be at work until the process ends
        _MEMORIES.add(self)

    def at(self, offset: int, nbytes: int) -> int:
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
        self.file = _create_file()
        try:
            os.ftruncate(self.file, starts.stop)
            self._memory = Memory(self.file, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(self.file, _ADD_SEALS, _SHRINK | _GROW | _FUTURE_WRITE | _SEAL)
        except OSError:
            os.close(self.file)
            raise
        ctypes.memmove(self._memory.start, mark, len(mark))

    def close_file(self) -> None:
        """Closes the file, once all peers have it. The memory stays."""
        os.close(self.file)

    def put(self, offset: int, address: int, nbytes: int) -> None:
        """Copies what lies at an address into a slot."""
        ctypes.memmove(self._memory.at(offset, nbytes), address, nbytes)


def slot_for(peers: int) -> int:
    """Returns the bytes of a slot where ranks have up to that many peers. It must be the same on all ranks: terms of a
    sum come part by part."""
    return max(ROOM // (SLOTS * peers) // _PAGE, 16) * _PAGE


def open_desk(file: int, mark: bytes) -> Memory | None:
    """Returns a peer's desk, given its file, which it closes, and the mark at its beginning. Returns None if it is
    another file, or one that its owner could make shorter, which would end this process. Raises OSError as `Memory`."""
    try:
        is_sealed = fcntl.fcntl(file, _GET_SEALS) & _SHRINK
        return Memory(file, mmap.PROT_READ) if is_sealed and os.pread(file, len(mark), 0) == mark else None
    finally:
        os.close(file)


def _create_file() -> int:
    """Returns an open file that only memory holds."""
    if not hasattr(_libc, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    file = int(_libc.memfd_create(b"lightning_zero", _CLOEXEC | _ALLOW_SEALING))
    if file < 0:
        raise _last_error()
    return file


def _last_error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_MEMORIES: "weakref.WeakSet[Memory]" = weakref.WeakSet()  # of this process


def _leave_to_parent() -> None:
    for memory in [*_MEMORIES]:
        memory.close()


os.register_at_fork(after_in_child=_leave_to_parent)
