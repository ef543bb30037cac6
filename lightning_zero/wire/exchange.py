"""`Exchange`: sends tensors to other ranks of this machine, and receives theirs.

    sender     offer: tag, address, bytes  ->                       <-  taken: tag
    receiver                                   process_vm_readv  ---'

One thread per rank receives, while the rank computes.
"""

import ctypes
import errno
import os
import selectors
import socket
import struct
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, final

from torch import Tensor

INLINE = 2**15  # bytes, at most, of a tensor in a datagram: up to here a copy takes less time than an answer
_HEADER = struct.Struct("=cQQQ")  # kind, tag, address, bytes
_PAYLOAD, _OFFER, _TAKEN = b"p", b"o", b"t"
_QUIT = b"q"
_CLOSED = "connection closed by peer"  # matches `gloo._CLOSED`

_Key = tuple[int, int]  # peer and tag; messages with the same key arrive in the order in which they are sent
_libc = ctypes.CDLL(None, use_errno=True)


class _IoVec(ctypes.Structure):
    """C's `struct iovec`: a range of memory."""

    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read(pid: int, address: int, into: int, nbytes: int) -> None:
    """Copies `nbytes` from `address` in another process to `into` in this one. Raises OSError if the kernel refuses."""
    done = 0
    while done < nbytes:  # one call copies at most 2 GiB
        mine, theirs = (_IoVec(start + done, nbytes - done) for start in (into, address))
        copied = _libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if copied <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done += copied


@final
class Message:
    """A contiguous tensor that is being sent or received. `give_up` is called if a wait for it times out."""

    def __init__(self, tensor: Tensor, give_up: Callable[[], None]) -> None:
        assert tensor.is_contiguous()
        self.address, self.nbytes = tensor.data_ptr(), tensor.nbytes
        self._tensor = tensor  # kept alive, since the other end reads or this one writes its memory
        self._give_up = give_up
        self._is_over = threading.Event()
        self._error: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nobody reads or writes the tensor any more."""
        return self._is_over.is_set()

    def end(self, error: str | None = None) -> None:
        self._error = error
        self._is_over.set()

    def wait(self, timeout: timedelta) -> None:
        """Waits until a received tensor is filled, or a sent one may change. Raises RuntimeError if that failed."""
        if not self._is_over.wait(min(timeout.total_seconds(), threading.TIMEOUT_MAX)):
            self.end()
            self._give_up()
            raise RuntimeError(f"timed out after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise RuntimeError(self._error)


class _Arrival(NamedTuple):
    """A datagram from a peer: the bytes of a tensor, or their address in the peer's memory."""

    payload: bytes | None
    address: int
    nbytes: int


@final
class Exchange:
    """Matches arriving datagrams with the calls of `receive`. One thread does `run`; other threads call the rest.

    No thread ever waits for room in a socket: if the threads of two ranks did, neither would read what the other has
    sent. A datagram that finds no room waits in the outbox of its peer.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], pids: Mapping[int, int]) -> None:
        self._sockets = sockets  # by peer
        self._pids = pids  # by peer
        self._lock = threading.Lock()
        self._copying = threading.Lock()  # held while a received tensor is written to
        self._arrived: defaultdict[_Key, deque[_Arrival]] = defaultdict(deque)  # before `receive` was called
        self._awaited: defaultdict[_Key, deque[Message]] = defaultdict(deque)  # received, and not arrived yet
        self._offered: defaultdict[_Key, deque[Message]] = defaultdict(deque)  # sent, and not copied by the peer yet
        self._matched: deque[tuple[_Key, Message, _Arrival]] = deque()  # to be copied by the thread
        self._outbox: defaultdict[int, deque[bytes]] = defaultdict(deque)  # datagrams to send, by peer; none is empty
        self._closed: set[int] = set()  # peers with whom the link is closed
        self._wake, self._woken = socket.socketpair()  # wakes the thread
        for link in (*sockets.values(), self._wake):
            link.setblocking(False)
        _EXCHANGES.add(self)

    def receive(self, peer: int, into: Tensor, tag: int) -> Message:
        message, key = Message(into, partial(self._drop, peer)), (peer, tag)
        with self._lock:
            if key in self._arrived:
                self._matched.append((key, message, _pop(self._arrived, key)))
            elif peer in self._closed:
                message.end(_CLOSED)
            else:
                self._awaited[key].append(message)
        if self._matched:
            self._wake_thread()
        return message

    def send(self, peer: int, tensor: Tensor, tag: int) -> Message:
        message, is_small = Message(tensor, partial(self._drop, peer)), tensor.nbytes <= INLINE
        header = _HEADER.pack(_PAYLOAD if is_small else _OFFER, tag, message.address, message.nbytes)
        payload = (ctypes.c_char * (message.nbytes if is_small else 0)).from_address(message.address)
        with self._lock:
            if peer in self._closed:
                message.end(_CLOSED)
            elif not is_small:
                self._offered[peer, tag].append(message)
        if not message.is_over:
            try:
                self._post(peer, header, payload)
                if is_small:
                    message.end()
            except OSError as error:
                message.end(f"connection closed ({error})")
        return message

    def _post(self, peer: int, header: bytes, payload: Any = b"") -> None:
        """Sends a datagram now, or leaves it to the thread if there is no room for it yet."""
        with self._lock:
            if peer not in self._outbox:
                with suppress(BlockingIOError):
                    self._sockets[peer].sendmsg([header, payload])
                    return
            self._outbox[peer].append(header + bytes(payload))
        self._wake_thread()

    def _wake_thread(self, word: bytes = b".") -> None:
        with suppress(BlockingIOError):  # the thread has not even read that it was woken before
            self._wake.send(word)

    # -- the thread

    def quit(self) -> None:
        """Ends the thread. A forked process, which has none, must not end its parent's."""
        if self in _EXCHANGES:
            with suppress(OSError):
                self._wake_thread(_QUIT)

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for peer, link in self._sockets.items():
                selector.register(link, selectors.EVENT_READ, peer)
            while True:
                for key, events in selector.select():
                    if key.data is None:
                        if _QUIT in self._woken.recv(4096):
                            return
                        continue
                    if events & selectors.EVENT_WRITE:
                        self._flush(key.data)
                        selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
                    if events & selectors.EVENT_READ and not self._read_datagram(key.data):
                        selector.unregister(key.fileobj)
                while self._matched:
                    self._copy(*self._matched.popleft())
                for peer in [*self._outbox]:
                    if self._sockets[peer] in selector.get_map():
                        selector.modify(self._sockets[peer], selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

    def _flush(self, peer: int) -> None:
        """Sends what is in an outbox, as far as there is room."""
        with self._lock:
            box = self._outbox.pop(peer, deque())
            try:
                while box:
                    self._sockets[peer].send(box[0])
                    box.popleft()
            except BlockingIOError:
                self._outbox[peer] = box
            except OSError:
                return  # the peer is gone, as the thread is about to read

    def _read_datagram(self, peer: int) -> bool:
        """Reads one datagram. Returns False if the link is closed."""
        try:
            datagram = self._sockets[peer].recv(_HEADER.size + INLINE)
        except (BlockingIOError, ConnectionResetError):  # after a reset there may still be datagrams
            return True
        except OSError:
            datagram = b""
        if not datagram:
            self._close(peer)
            return False
        kind, tag, address, nbytes = _HEADER.unpack_from(datagram)
        key = peer, tag
        with self._lock:
            if kind == _TAKEN:
                if key in self._offered:  # otherwise the link was closed while this answer was on its way
                    _pop(self._offered, key).end()
                return True
            arrival = _Arrival(datagram[_HEADER.size :] if kind == _PAYLOAD else None, address, nbytes)
            if key in self._awaited:
                self._matched.append((key, _pop(self._awaited, key), arrival))
            else:
                self._arrived[key].append(arrival)
        return True

    def _copy(self, key: _Key, message: Message, arrival: _Arrival) -> None:
        (peer, tag), error = key, None
        with self._copying:
            if message.is_over:  # its wait has timed out, and the tensor is the user's again
                return
            try:
                if arrival.nbytes != message.nbytes:
                    error = f"rank {peer} sent {arrival.nbytes} bytes where {message.nbytes} were expected"
                elif arrival.payload is not None:
                    ctypes.memmove(message.address, arrival.payload, message.nbytes)
                elif peer in self._closed:  # its memory may have other values by now
                    error = _CLOSED
                else:
                    read(self._pids[peer], arrival.address, message.address, message.nbytes)
                    self._post(peer, _HEADER.pack(_TAKEN, tag, 0, 0))
            except OSError as failure:
                is_gone = failure.errno in (errno.ESRCH, errno.EPIPE, errno.ECONNRESET)
                what = "connection closed" if is_gone else f"the memory of rank {peer} is out of reach"
                error = f"{what} ({failure})"
            message.end(error)
        if error is not None:
            self._drop(peer)  # tells it

    # -- the end of a link

    def _drop(self, peer: int) -> None:
        """Closes a link after a failure, as TCP does: what comes too late is an error there, and touches no tensor
        here."""
        with self._copying:
            self._close(peer)
        with suppress(OSError):
            self._sockets[peer].shutdown(socket.SHUT_RDWR)

    def _close(self, peer: int) -> None:
        with self._lock:
            self._closed.add(peer)
            self._outbox.pop(peer, None)
            for messages in (self._awaited, self._offered):
                for key in [key for key in messages if key[0] == peer]:
                    for message in messages.pop(key):
                        message.end(_CLOSED)

    def leave_to_parent(self) -> None:
        """Closes the files in a forked process: while it has them, nobody would notice the end of its parent."""
        for link in (*self._sockets.values(), self._wake, self._woken):
            link.close()


_EXCHANGES: "weakref.WeakSet[Exchange]" = weakref.WeakSet()  # of this process


def _leave_to_parent() -> None:
    for exchange in [*_EXCHANGES]:
        exchange.leave_to_parent()
    _EXCHANGES.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _pop(queues: defaultdict[_Key, deque[Any]], key: _Key) -> Any:
    first = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return first
