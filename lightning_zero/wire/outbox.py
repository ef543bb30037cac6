"""`Outbox`: datagrams to the other ranks of this machine, sent at once or when there is room for them."""

import socket
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from threading import Lock
from typing import Any, final


@final
class Outbox:
    """Sends datagrams over `sockets`, by peer, and never waits: if the threads of two ranks waited for room in their
    sockets, neither would read what the other has sent. What finds no room is left to the thread, which reads `woken`.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = sockets
        self._lock = Lock()
        self._waiting: defaultdict[int, deque[bytes]] = defaultdict(deque)  # by peer, and none of them empty
        self._wake, self.woken = socket.socketpair()
        for link in (*sockets.values(), self._wake):
            link.setblocking(False)
        # Python would close them by itself, but with a ResourceWarning, which is an error where users have made it one.
        self.close = weakref.finalize(self, _close_all, [*sockets.values(), self._wake, self.woken])
        self.close.atexit = False  # until the process is gone, peers would be told that this rank has failed

    def post(self, peer: int, header: bytes, payload: Any = b"") -> None:
        """Sends a datagram now, or leaves it to the thread. Raises OSError if the peer is gone."""
        with self._lock:
            if peer not in self._waiting:
                with suppress(BlockingIOError):
                    self._sockets[peer].sendmsg([header, payload])
                    return
            self._waiting[peer].append(header + bytes(payload))
        self.wake()

    def wake(self, word: bytes = b".") -> None:
        """Wakes the thread, and tells it a word."""
        with suppress(BlockingIOError):  # the thread has not even read that it was woken before
            self._wake.send(word)

    @property
    def peers(self) -> list[int]:
        """Those for whom something waits."""
        return [*self._waiting]

    def flush(self, peer: int) -> None:
        """Sends what waits for a peer, as far as there is room."""
        with self._lock:
            box = self._waiting.pop(peer, deque())
            try:
                while box:
                    self._sockets[peer].send(box[0])
                    box.popleft()
            except BlockingIOError:
                self._waiting[peer] = box
            except OSError:
                return  # the peer is gone, as the thread is about to read


def _close_all(links: Iterable[socket.socket]) -> None:
    for link in links:
        link.close()
