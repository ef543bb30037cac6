"""`Disk`: a file of this rank that keeps tensors, and the threads that read ahead and write behind.

It is an ordinary file, read and written with `preadv` and `pwritev`, so any file system will do and nothing is
compiled. It has no name from the moment it is open, so nothing is left, however the process ends.
"""

import errno
import os
import tempfile
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

AT_MOST = 2**30  # bytes read or written by one call; Linux moves no more than 2 GiB

# A start in the file, and the contiguous host tensor that is read from there or written to it.
Move = tuple[int, Tensor]


class DiskError(RuntimeError):
    """The disk of the disk tier is full, or has failed. Fatal to the run: tensors that were kept there are lost."""


class Disk:
    """A file in `folder`, which must exist. Reading and writing may raise `DiskError`; work in the background raises it
    when it is waited for."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 -- open as long as this is
        except OSError as error:
            raise DiskError(f"Offload(path={str(folder)!r}): no file can be made there: {_said(error)}.") from error
        weakref.finalize(self, self._file.close)  # else Python warns of a file that was left open
        self.size = 0  # bytes
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # bytes -> starts of free ranges of that size
        self._reader = ThreadPoolExecutor(1, "read ahead")
        self._writer = ThreadPoolExecutor(1, "write behind")
        self._writes: list[Future[None]] = []

    @property
    def free_bytes(self) -> int:
        """Bytes that the file system has left for this process."""
        found = os.statvfs(self._file.fileno())
        return found.f_bavail * found.f_frsize

    def reserve(self, nbytes: int) -> int:
        """Reserves a range of the file, and returns its start. Raises DiskError if the disk has no room. After this,
        writing into the range cannot find the disk full."""
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        start, free = self.size, self.free_bytes
        if nbytes:
            try:
                self._allocate(start, nbytes)
            except OSError as error:
                raise DiskError(
                    f"Offload(path={str(self.folder)!r}): {nbytes:,} bytes more are needed there, and {free:,} are "
                    f"free ({_said(error)}). Choose a larger disk, or offload less."
                ) from error
        self.size += nbytes
        return start

    def _allocate(self, start: int, nbytes: int) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file.fileno(), start, nbytes)
        elif nbytes > self.free_bytes:  # macOS cannot reserve: another program may still fill the disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            os.ftruncate(self._file.fileno(), start + nbytes)

    def give_back(self, start: int, nbytes: int) -> None:
        """Frees a range, for the next `reserve` of the same size."""
        self._free[nbytes].append(start)

    def read(self, start: int, into: Tensor) -> None:
        """Fills a contiguous host tensor from the file at `start`, after all pending writes."""
        self.drain()
        self._move(os.preadv, "reading", start, into)

    def write(self, start: int, values: Tensor) -> None:
        """Writes a contiguous host tensor to the file at `start`, after all pending writes."""
        self.drain()
        self._move(os.pwritev, "writing", start, values)

    def begin_read(self, moves: Sequence[Move]) -> "Future[None]":
        """Starts to `read` tensors in the background, one after the other, and does not wait for pending writes."""
        return self._reader.submit(self._move_all, os.preadv, "reading", deque(moves))

    def begin_write(self, moves: Sequence[Move]) -> "Future[None]":
        """Starts to `write` tensors in the background. They must not change until all is done, or until `drain`."""
        write = self._writer.submit(self._move_all, os.pwritev, "writing", deque(moves))
        # At stage 1 nothing is read in between, and nobody drains. What has failed stays, to be raised.
        self._writes = [*(one for one in self._writes if not one.done() or one.exception()), write]
        return write

    def drain(self) -> None:
        """Waits for all pending writes."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()

    def close(self, *, drains: bool = True) -> None:
        """Ends the threads. Tensors in the file can still be read. Unless `drains`, pending writes may be lost without
        an error."""
        if drains:
            self.drain()
        for threads in (self._reader, self._writer):
            threads.shutdown(wait=drains)

    def _move_all(self, call: Callable[..., int], doing: str, moves: deque[Move]) -> None:
        """Lets go of each tensor when it is there: a thread keeps what it was given a moment longer than the one who
        waits for it."""
        while moves:
            self._move(call, doing, *moves.popleft())

    def _move(self, call: Callable[..., int], doing: str, start: int, values: Tensor) -> None:
        flat = values.detach().as_strided((values.numel(),), (1,))  # whatever the stride of a single element is
        view = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        done = 0
        while done < len(view):
            try:
                moved = call(self._file.fileno(), [view[done : done + AT_MOST]], start + done)
            except OSError as error:
                raise DiskError(
                    f"Offload(path={str(self.folder)!r}): {doing} {len(view):,} bytes failed: {_said(error)}. What "
                    "was kept there is lost; go on from the last checkpoint."
                ) from error
            if not moved:
                raise DiskError(f"Offload(path={str(self.folder)!r}): {doing} ended early: the file was cut short.")
            done += moved


def _said(error: OSError) -> str:
    return error.strerror or str(error)
