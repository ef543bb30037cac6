"""`Rooms`: the memory in which peers read tensors where they lie; see `desk`."""

import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Lock
from typing import final

from lightning_zero.wire.desk import Memory, Room, open_desk
from lightning_zero.wire.landing import Arrival, Payload


@final
class Rooms:
    """The rooms of this rank, and those of its peers, by their starts. `wakes` is called after one of this rank has
    gone. It is held weakly: the exchange that holds the rooms closes its sockets when nothing else refers to it."""

    def __init__(self, peers: Iterable[int], wakes: "weakref.WeakMethod[Callable[[], None]]") -> None:
        self._lock = Lock()
        self._wakes = wakes
        self._own: dict[int, Room] = {}
        self._next = mmap.PAGESIZE  # the start of the next one; none is 0
        self.gone: deque[Room] = deque()  # whose tensors are no more; the peers are to be told
        self._seen: dict[int, dict[int, Memory]] = {peer: {} for peer in peers}

    def empty(self, nbytes: int) -> Payload | None:
        """Returns memory, as long as anything refers to it, for a tensor that peers are to read where it lies. Returns
        None where the system has none. The first use takes the time of a copy, so it is for what is sent often."""
        with self._lock:
            start = self._next
            self._next += nbytes
        try:
            room = self._own[start] = Room(start, nbytes)
        except OSError:
            return None
        memory = (ctypes.c_char * nbytes).from_address(room.address)
        weakref.finalize(memory, self._close, start).atexit = False
        return memory

    def _close(self, start: int) -> None:
        """Gives the memory back. It may be called anywhere, even while this thread holds a lock."""
        room = self._own.pop(start)
        room.close()
        self.gone.append(room)
        if (wake := self._wakes()) is not None:
            with suppress(OSError):  # in a forked process, which has no sockets
                wake()

    def holding(self, address: int) -> Room | None:
        """Returns the room of this rank in which an address lies."""
        rooms = [*self._own.values()]
        return next((room for room in rooms if room.address <= address < room.address + room.nbytes), None)

    def see(self, peer: int, start: int, files: Sequence[int]) -> None:
        """Maps a room of a peer. What lies there passes the desk if that fails."""
        for file in files:
            with suppress(OSError):
                room = open_desk(file)
                if room is not None:
                    self._seen[peer][start] = room

    def forget(self, peer: int, start: int | None = None) -> None:
        """Gives up a room of a peer, or all of them."""
        for one in [*self._seen[peer]] if start is None else [start]:
            self._seen[peer].pop(one, None)

    def address_of(self, peer: int, arrival: Arrival) -> int | None:
        """Returns where a tensor lies in a room of the peer; None if it cannot be read there."""
        for start, room in self._seen[peer].items():
            if start <= arrival.place and arrival.place - start + arrival.nbytes <= room.nbytes:
                return room.at(arrival.place - start, arrival.nbytes)
        return None
