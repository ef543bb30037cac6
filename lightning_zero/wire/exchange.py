"""`Exchange`: sends tensors to other ranks of this machine, and receives theirs.

A small tensor is one datagram. A larger one passes the sender's desk in parts:

    sender     offer: tag, bytes  ->                  part: offset, bytes  ->                        <-  free: offset
    receiver                          <-  wanted: tag                        reads it from the desk  ---'

One that lies in a room of the sender (see `empty`) is read there, if the receiver can:

    sender     offer: tag, bytes, place  ->                            <-  read: tag
    receiver                                 reads it from the room  ---'

One thread per rank sends and receives, while the rank computes.
"""

import ctypes
import mmap
import os
import select
import selectors
import socket
import struct
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, final

import numpy
import torch
from torch import Tensor

from lightning_zero.wire.desk import Desk, Memory, Room, open_desk

INLINE = 2**15  # bytes, at most, of a tensor in a datagram: up to here a copy takes less time than an answer
_HEADER = struct.Struct("=cQQQ")  # kind, tag, offset, bytes
_PAYLOAD, _OFFER, _WANTED, _PART, _FREE = b"p", b"o", b"w", b"s", b"f"
_READ, _ROOM, _GONE = b"r", b"m", b"g"
_QUIT = b"q"
_CLOSED = "connection closed by peer"  # matches `gloo._CLOSED`
_SERIAL = 2**14  # elements that torch adds without threads of its own; here it would start more of them
_BY_NUMPY = torch.float32, torch.float64

_Key = tuple[int, int]  # peer and tag; messages with the same key arrive in the order in which they are sent


@final
class Message:
    """A contiguous tensor that is being sent, or received. `give_up` is called if a wait for it times out."""

    def __init__(self, tensor: Tensor, give_up: Callable[[], None]) -> None:
        assert tensor.is_contiguous()
        self.address, self.nbytes = tensor.data_ptr(), tensor.nbytes
        self.passed = 0  # bytes of a sent one that are, or have been, on the desk
        self._tensor: Tensor | None = tensor  # kept alive, since it is read or written meanwhile
        self._give_up = give_up
        self._is_over = threading.Event()
        self._error: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nobody reads or writes the tensor any more."""
        return self._is_over.is_set()

    def end(self, error: str | None = None) -> None:
        self._error = error
        self._tensor = None  # before the waiting thread goes on: it may allocate, and count, the same memory again
        self._is_over.set()

    def wait(self, timeout: timedelta) -> None:
        """Waits until a received tensor is filled, or a sent one may change. Raises RuntimeError if that failed."""
        if not self._is_over.wait(min(timeout.total_seconds(), threading.TIMEOUT_MAX)):
            self._is_over.set()
            self._give_up()
            raise RuntimeError(f"timed out after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise RuntimeError(self._error)


@final
class Landing:
    """A tensor that is being received: a peer's, or the sum of `terms`, which are tensors of this rank and, by their
    numbers, of peers. Terms are added in this order, and the sum is divided by `divisor`: part by part, as long as a
    part is in a cache."""

    def __init__(
        self, into: Tensor, terms: Sequence[int | Tensor], give_up: Callable[[int], None], divisor: int = 1
    ) -> None:
        self._into, self._terms, self._divisor = into.view(-1), terms, divisor
        self.nbytes = into.nbytes
        self.messages = {peer: Message(into, partial(give_up, peer)) for peer in terms if isinstance(peer, int)}
        self.arrivals: dict[int, _Arrival] = {}  # of the peers whose tensors have arrived
        self.parts: dict[int, deque[_Part]] = {peer: deque() for peer in self.messages}  # that lie on the peers' desks
        self.left = dict.fromkeys(self.messages, self.nbytes)  # bytes that are not on the peers' desks yet
        self._filled = 0  # bytes

    @property
    def has_failed(self) -> bool:
        """Whether the wait for a peer has ended before the tensor was filled: then it is the user's again."""
        return any(message.is_over for message in self.messages.values())

    def fill(self, found: Mapping[int, int], nbytes: int) -> None:
        """Fills the next `nbytes`, which lie at these addresses, by peer."""
        if nbytes:
            self._fill_part(found, nbytes)
        self._filled += nbytes

    def end_if_filled(self, lost: Collection[int] = ()) -> None:
        """Ends all waits when the tensor is filled, with an error those for peers that are `lost`."""
        if self._filled == self.nbytes:
            del self._into, self._terms  # as in `Message.end`
            for peer, message in self.messages.items():
                message.end(_CLOSED if peer in lost else None)

    def _fill_part(self, found: Mapping[int, int], nbytes: int) -> None:
        dtype = self._into.dtype
        part = slice(self._filled // dtype.itemsize, (self._filled + nbytes) // dtype.itemsize)
        into = self._into[part]
        if len(self._terms) == 1:
            (address,) = found.values()
            ctypes.memmove(into.data_ptr(), address, nbytes)
        else:
            terms = [t[part] if isinstance(t, Tensor) else _view(found[t], nbytes, dtype) for t in self._terms]
            _average(terms, into, self._divisor)


class _Unusable(Exception):
    """What a peer sends cannot be used."""


_Payload = ctypes.Array[ctypes.c_char]


class _Arrival(NamedTuple):
    """A tensor that a peer sends: with its bytes, unless it lies in a room of the peer, or is to pass the desk."""

    nbytes: int
    payload: _Payload | None
    place: int  # among the rooms of the peer; 0: it is in none


class _Part(NamedTuple):
    """Where a part lies on the desk of a peer."""

    offset: int
    nbytes: int


@final
class Exchange:
    """Matches arriving datagrams with the calls of `receive` and `sum`. One thread does `run`; other threads call the
    rest.

    No thread ever waits for room in a socket: if the threads of two ranks did, neither would read what the other has
    sent. A datagram that finds no room waits in the outbox of its peer.

    Nor does a tensor lie on the desk before its receiver wants it: it would keep out another, which the receiver wants
    first. Of a sum all terms are wanted at once: so all desks come to the same sum next.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], desk: Desk, desks: Mapping[int, Memory]) -> None:
        self._sockets = sockets  # by peer
        self._desk = desk
        self._desks = desks  # of the peers
        self._lock = threading.Lock()
        self._copying = threading.Lock()  # held while a received tensor is written to, or a sent one read
        self._arrived: defaultdict[_Key, deque[_Arrival]] = defaultdict(deque)  # before `receive` was called
        self._awaited: defaultdict[_Key, deque[Landing]] = defaultdict(deque)  # received, and not arrived yet
        self._offered: defaultdict[_Key, deque[Message]] = defaultdict(deque)  # sent, and not wanted by the peer yet
        self._offers: set[Landing] = set()  # sums of which some terms are offered, and not all
        self._landing: defaultdict[int, deque[Landing]] = defaultdict(deque)  # passing the desk of a peer, in order
        self._wanted: defaultdict[int, deque[Message]] = defaultdict(deque)  # passing the desk here, by peer, in order
        self._matched: deque[tuple[_Key, Landing, _Arrival]] = deque()  # to be taken by the thread
        self._rooms: dict[int, Room] = {}  # of this rank, by their starts
        self._next_room = mmap.PAGESIZE  # the start of the next one; none is 0
        self._gone: deque[Room] = deque()  # whose tensors are no more; to be told by the thread
        self._seen: dict[int, dict[int, Memory]] = {peer: {} for peer in sockets}  # rooms of the peers, by their starts
        self._outbox: defaultdict[int, deque[bytes]] = defaultdict(deque)  # datagrams to send, by peer; none is empty
        self._closed: set[int] = set()  # peers with whom the link is closed
        self._wake, self._woken = socket.socketpair()  # wakes the thread
        for link in (*sockets.values(), self._wake):
            link.setblocking(False)
        _EXCHANGES.add(self)

    def receive(self, peer: int, into: Tensor, tag: int) -> Message:
        return self._await(Landing(into, [peer], self._drop), tag)[peer]

    def sum(self, into: Tensor, terms: Sequence[int | Tensor], tag: int, divisor: int = 1) -> dict[int, Message]:
        """Fills `into` with what the `terms` give; see `Landing`. Returns a message for each peer."""
        return self._await(Landing(into, terms, self._drop, divisor), tag)

    def _await(self, landing: Landing, tag: int) -> dict[int, Message]:
        with self._lock:
            for peer, message in landing.messages.items():
                key = peer, tag
                if key in self._arrived:
                    self._matched.append((key, landing, _pop(self._arrived, key)))
                elif peer in self._closed:
                    message.end(_CLOSED)
                else:
                    self._awaited[key].append(landing)
        if self._matched:
            self._wake_thread()
        return landing.messages

    def empty(self, nbytes: int) -> "_Payload | None":
        """Returns memory, as long as anything refers to it, for a tensor that peers are to read where it lies. Returns
        None where the system has none. The first use takes the time of a copy, so it is for what is sent often."""
        with self._lock:
            start = self._next_room
            self._next_room += nbytes
        try:
            room = self._rooms[start] = Room(start, nbytes)
        except OSError:
            return None
        memory = (ctypes.c_char * nbytes).from_address(room.address)
        weakref.finalize(memory, self._close_room, start).atexit = False
        return memory

    def _close_room(self, start: int) -> None:
        """Gives the memory back. It may be called anywhere, even while this thread holds the lock."""
        room = self._rooms.pop(start)
        room.close()
        self._gone.append(room)
        with suppress(OSError):  # in a forked process, which has no sockets
            self._wake_thread()

    def _place_for(self, peer: int, message: Message) -> int:
        """Returns the place of a tensor among the rooms of this rank, of which the peer gets the file first. Returns 0
        if it lies in none, or the file cannot be sent now."""
        for start, room in [*self._rooms.items()]:
            if room.address <= message.address < room.address + room.nbytes:
                if peer not in room.readers:
                    try:
                        socket.send_fds(self._sockets[peer], [_HEADER.pack(_ROOM, 0, start, 0)], [room.file])
                    except OSError:
                        return 0
                    room.readers.add(peer)
                return start + message.address - room.address
        return 0

    def send(self, peer: int, tensor: Tensor, tag: int) -> Message:
        message, is_small = Message(tensor, partial(self._drop, peer)), tensor.nbytes <= INLINE
        place = 0 if is_small else self._place_for(peer, message)
        header = _HEADER.pack(_PAYLOAD if is_small else _OFFER, tag, place, message.nbytes)
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

    def _tell(self, peer: int, kind: bytes, *, tag: int = 0, offset: int = 0, nbytes: int = 0) -> None:
        with suppress(OSError):  # the peer is gone, as the thread is about to read
            self._post(peer, _HEADER.pack(kind, tag, offset, nbytes))

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
                    self._take(*self._matched.popleft())  # no name here may hold a tensor while the thread waits
                while self._gone:
                    self._tell_readers(self._gone.popleft())
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
            size = _HEADER.size + INLINE
            datagram, files, _, _ = socket.recv_fds(self._sockets[peer], size, 1, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, ConnectionResetError):  # after a reset there may still be datagrams
            return True
        except OSError:
            datagram = b""
        if not datagram:
            self._close(peer)
            return False
        kind, tag, offset, nbytes = _HEADER.unpack_from(datagram)
        if kind == _PART:
            self._take_part(peer, _Part(offset, nbytes))
        elif kind == _FREE:
            self._desk.free[peer].append(offset)
            self._fill_desk(peer)
        elif kind == _WANTED:
            self._begin_to_pass((peer, tag))
        elif kind == _READ:
            self._end_offered((peer, tag))
        elif kind == _ROOM:
            self._see_room(peer, offset, files)
        elif kind == _GONE:
            self._seen[peer].pop(offset, None)
        else:
            is_small = kind == _PAYLOAD
            payload = (ctypes.c_char * nbytes).from_buffer_copy(datagram, _HEADER.size) if is_small else None
            self._match((peer, tag), _Arrival(nbytes, payload, offset))
        return True

    def _match(self, key: _Key, arrival: _Arrival) -> None:
        with self._lock:
            if key in self._awaited:
                self._matched.append((key, _pop(self._awaited, key), arrival))
            else:
                self._arrived[key].append(arrival)

    # -- the thread: what arrives

    def _land(self, peer: int, landing: Landing, take: Callable[[], None]) -> None:
        """Calls `take`, unless nobody waits for the tensor any more. Closes the link if that fails."""
        try:
            with self._copying:
                if landing.has_failed:
                    raise _Unusable(_CLOSED)
                take()
        except _Unusable as failure:
            landing.messages[peer].end(str(failure))
            self._drop(peer)  # tells it

    def _take(self, key: _Key, landing: Landing, arrival: _Arrival) -> None:
        """Takes a tensor that a peer sends, or says that it is wanted on the desk, once all terms of the sum have
        arrived."""
        self._land(key[0], landing, partial(self._take_now, key, landing, arrival))

    def _take_now(self, key: _Key, landing: Landing, arrival: _Arrival) -> None:
        peer, tag = key
        if arrival.nbytes != landing.nbytes:
            raise _Unusable(f"rank {peer} sent {arrival.nbytes} bytes where {landing.nbytes} were expected")
        if arrival.payload is None and peer in self._closed:
            raise _Unusable(_CLOSED)
        landing.arrivals[peer] = arrival
        if len(landing.arrivals) < len(landing.messages):
            if arrival.payload is None:
                self._offers.add(landing)
            return
        self._offers.discard(landing)
        arrivals = landing.arrivals.items()
        payloads = {one: theirs.payload for one, theirs in arrivals if theirs.payload is not None}
        if payloads:  # of all peers: their tensors have the same size
            landing.fill({one: ctypes.addressof(payload) for one, payload in payloads.items()}, landing.nbytes)
            landing.end_if_filled()
            return
        addresses = {one: self._address_of(one, theirs) for one, theirs in arrivals}
        found = {one: address for one, address in addresses.items() if address is not None}
        if len(found) == len(addresses):
            self._read_rooms(landing, found, tag)
            return
        for one in landing.messages:
            self._landing[one].append(landing)
            self._tell(one, _WANTED, tag=tag)

    def _read_rooms(self, landing: Landing, found: Mapping[int, int], tag: int) -> None:
        """Reads tensors where they lie, by peer."""
        for start in range(0, landing.nbytes, self._desk.slot):  # of several terms, what a cache holds
            part = {peer: address + start for peer, address in found.items()}
            landing.fill(part, min(self._desk.slot, landing.nbytes - start))
        # A peer that has given up may have changed its tensor meanwhile. It has closed the link before that.
        landing.end_if_filled(lost=[peer for peer in found if _is_hung_up(self._sockets[peer])])
        for peer in found:
            self._tell(peer, _READ, tag=tag)

    def _see_room(self, peer: int, start: int, files: Sequence[int]) -> None:
        """Maps a room of a peer. What lies there passes the desk if that fails."""
        for file in files:
            with suppress(OSError):
                room = open_desk(file)
                if room is not None:
                    self._seen[peer][start] = room

    def _address_of(self, peer: int, arrival: _Arrival) -> int | None:
        """Returns where a tensor lies in a room of the peer; None if it cannot be read there."""
        for start, room in self._seen[peer].items():
            if start <= arrival.place and arrival.place - start + arrival.nbytes <= room.nbytes:
                return room.at(arrival.place - start, arrival.nbytes)
        return None

    def _take_part(self, peer: int, part: _Part) -> None:
        """Takes a part from the desk of a peer, once the same part of all terms of the sum is there."""
        if self._landing[peer]:  # otherwise the link was closed while the part was on its way
            landing = self._landing[peer][0]
            self._land(peer, landing, partial(self._take_part_now, peer, landing, part))

    def _take_part_now(self, peer: int, landing: Landing, part: _Part) -> None:
        landing.parts[peer].append(part)
        landing.left[peer] -= part.nbytes
        if not landing.left[peer]:  # the next part is of another tensor, even if this one waits for other terms
            self._landing[peer].popleft()
        if all(landing.parts.values()):
            parts = {one: waiting.popleft() for one, waiting in landing.parts.items()}
            landing.fill({one: self._desks[one].at(*there) for one, there in parts.items()}, part.nbytes)
            landing.end_if_filled()
            for one, there in parts.items():
                self._tell(one, _FREE, offset=there.offset)

    # -- the thread: what leaves

    def _tell_readers(self, room: Room) -> None:
        """Has peers give up a room, whose memory the system gets back only then."""
        for peer in room.readers:
            self._tell(peer, _GONE, offset=room.start)

    def _end_offered(self, key: _Key) -> None:
        """Ends the wait for a peer that has read a tensor where it lies."""
        with self._lock:
            if key in self._offered:  # otherwise the link was closed while this answer was on its way
                _pop(self._offered, key).end()

    def _begin_to_pass(self, key: _Key) -> None:
        """Begins to put a sent tensor on the desk, for the peer that wants it."""
        peer, _ = key
        with self._copying, self._lock:
            if key in self._offered:  # otherwise the link was closed while this answer was on its way
                self._wanted[peer].append(_pop(self._offered, key))
        self._fill_desk(peer)

    def _fill_desk(self, peer: int) -> None:
        """Puts the next parts of what a peer wants into its free slots."""
        free, wanted = self._desk.free[peer], self._wanted[peer]
        with self._copying:
            while free and wanted:
                sent, offset = wanted[0], free.popleft()
                nbytes = min(self._desk.slot, sent.nbytes - sent.passed)
                self._desk.put(offset, sent.address + sent.passed, nbytes)
                sent.passed += nbytes
                if sent.passed == sent.nbytes:
                    wanted.popleft().end()
                self._tell(peer, _PART, offset=offset, nbytes=nbytes)

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
            self._seen[peer].clear()
            offered = {landing for landing in self._offers if peer in landing.arrivals}
            self._offers -= offered
            ended = [landing.messages[peer] for landing in (*offered, *self._landing.pop(peer, ()))]
            ended += self._wanted.pop(peer, ())
            for key in [key for key in self._offered if key[0] == peer]:
                ended += self._offered.pop(key)
            for key in [key for key in self._awaited if key[0] == peer]:
                ended += [landing.messages[peer] for landing in self._awaited.pop(key)]
            for message in ended:
                message.end(_CLOSED)

    def leave_to_parent(self) -> None:
        """Closes the sockets in a forked process: while it has them, nobody would notice the end of its parent."""
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


def _is_hung_up(link: socket.socket) -> bool:
    """Whether the other end is closed, even if there is still something to read."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    return bool(poll.poll(0))


def _view(address: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)


def _average(terms: Sequence[Tensor], into: Tensor, divisor: int) -> None:
    """Adds in this order, and divides the sum, in the calling thread: torch would start more threads here, beside those
    that compute."""
    if into.dtype in _BY_NUMPY:
        array, first, second, *others = (tensor.numpy() for tensor in (into, *terms))
        numpy.add(first, second, out=array)
        for other in others:
            numpy.add(array, other, out=array)
        if divisor != 1:
            numpy.divide(array, divisor, out=array)
        return
    for start in range(0, into.numel(), _SERIAL):
        some = slice(start, start + _SERIAL)
        total = torch.add(terms[0][some], terms[1][some], out=into[some])
        for term in terms[2:]:
            total.add_(term[some])
        if divisor != 1:
            total.div_(divisor)
