"""`Links`: messages between ranks of one machine that bypass the network.

TCP copies each byte twice and cuts it into packets. A link sends a small tensor in one datagram of a Unix socket. For a
large tensor it sends only the address: the receiver copies the bytes straight out of the sender's memory (Linux,
`process_vm_readv`), and then answers.

    sender     offer: tag, address, bytes  ->                       <-  taken: tag
    receiver                                   process_vm_readv  ---'

One thread per rank receives, while the rank computes. Ranks without a link to each other (on different machines, in
containers whose memory may not be read, on macOS) send through gloo.
"""

import ctypes
import errno
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, final

from torch import Tensor

from lightning_zero.wire.comm import Comm

ONLY_TCP = "LIGHTNING_ZERO_ONLY_TCP"  # environment variable: "1" turns links off
INLINE = 2**15  # bytes, at most, of a tensor in a datagram: up to here a copy takes less time than an answer
_TIMEOUT_S = 60.0  # of connecting at set-up
_HEADER = struct.Struct("=cQQQ")  # kind, tag, address, bytes
_PAYLOAD, _OFFER, _TAKEN = b"p", b"o", b"t"
_QUIT = b"q"
_CLOSED = "connection closed by peer"  # matches `gloo._CLOSED`
_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, ctypes.c_ulong(2**64 - 1)  # from prctl.h

_Key = tuple[int, int]  # peer and tag; messages with the same key arrive in the order in which they are sent
_libc = ctypes.CDLL(None, use_errno=True)


class _IoVec(ctypes.Structure):
    """C's `struct iovec`: a range of memory."""

    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _read(pid: int, address: int, into: int, nbytes: int) -> None:
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
class _Exchange:
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
                    _read(self._pids[peer], arrival.address, message.address, message.nbytes)
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


_EXCHANGES: "weakref.WeakSet[_Exchange]" = weakref.WeakSet()  # of this process


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


class _Card(NamedTuple):
    """The address of a rank for the other ranks of its machine."""

    token: bytes  # 16 random bytes: they name its socket, and prove that its memory can be read
    address: int  # of the token in its memory


@final
class Links:
    """This rank's links to the ranks of `comm` on its machine. Two ranks have a link if each can read the other's
    memory. Collective: construct it on every rank.

    `peer in links` says whether there is one; `send` and `receive` use it. Messages with the same tag arrive in order.
    """

    def __init__(self, comm: Comm) -> None:
        token = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
        listener = _listen(token.raw)
        card = None if listener is None else _Card(token.raw, ctypes.addressof(token))
        cards = comm.all_gather_object(card, "links")
        others = {peer: theirs for peer, theirs in enumerate(cards) if card is not None and theirs is not None}
        sockets = {}
        for peer, theirs in others.items():
            if peer < comm.rank and (link := _connect(theirs.token, token.raw)) is not None:  # once for each pair
                sockets[peer] = link
        connected = comm.all_gather_object([*sockets], "connected links")
        if listener is not None:
            awaited = {others[peer].token: peer for peer, reached in enumerate(connected) if comm.rank in reached}
            sockets |= _accept(listener, awaited)
        pids = {peer: _pid_of(link) for peer, link in sockets.items()}
        readable = {peer for peer, pid in pids.items() if _can_read(pid, others[peer])}
        readers = comm.all_gather_object(readable, "readable links")
        mutual = {peer: link for peer, link in sockets.items() if peer in readable and comm.rank in readers[peer]}
        exchange = _Exchange(mutual, pids)
        self._peers = mutual.keys()
        self.receive, self.send = exchange.receive, exchange.send
        if mutual:
            threading.Thread(target=exchange.run, name="lightning_zero links", daemon=True).start()
            weakref.finalize(self, exchange.quit)

    def __contains__(self, peer: int) -> bool:
        return peer in self._peers


def _listen(token: bytes) -> socket.socket | None:
    """Opens the socket to which other ranks of this machine connect. Returns None where there can be no links."""
    if sys.platform != "linux" or os.environ.get(ONLY_TCP) == "1":
        return None
    # Where Yama is (on Ubuntu, for example), only parents may read a process, unless it allows that by this call.
    _libc.prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(_name_of(token))
    listener.listen(socket.SOMAXCONN)
    listener.settimeout(_TIMEOUT_S)
    return listener


def _name_of(token: bytes) -> bytes:
    return b"\0lightning_zero-" + token.hex().encode()  # the "\0": a name without a file, gone with the process


def _connect(token: bytes, own_token: bytes) -> socket.socket | None:
    """Connects to the rank of a token. Returns None if it is on another machine."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(_TIMEOUT_S)
    try:
        link.connect(_name_of(token))
    except OSError:
        link.close()
        return None
    link.send(own_token)
    return link


def _accept(listener: socket.socket, awaited: dict[bytes, int]) -> dict[int, socket.socket]:
    """Returns the links of the ranks that connect, given their tokens. Waits for all of them."""
    links = {}
    with listener:
        while awaited:
            link, _ = listener.accept()
            link.settimeout(_TIMEOUT_S)
            peer = awaited.pop(link.recv(16), None)
            if peer is not None:  # otherwise some other process has connected
                links[peer] = link
    return links


def _pid_of(link: socket.socket) -> int:
    """Returns the id of the process at the other end, as seen from here: containers have ids of their own."""
    credentials = struct.Struct("3i")
    pid, _, _ = credentials.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return int(pid)


def _can_read(pid: int, card: _Card) -> bool:
    """Whether this process can read the memory of process `pid`, where the token of `card` must be."""
    found = ctypes.create_string_buffer(len(card.token))
    with suppress(OSError):
        _read(pid, card.address, ctypes.addressof(found), len(card.token))
    return found.raw == card.token
