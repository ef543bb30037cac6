"""`Exchange`: sends tensors to other ranks of this machine, and receives theirs.

A small tensor is one datagram. A larger one passes the sender's desk in parts:

    sender     offer: tag, bytes  ->                  part: offset, bytes  ->                        <-  free: offset
    receiver                          <-  wanted: tag                        reads it from the desk  ---'

One that lies in a segment of the sender (see `empty`) is read there, if the receiver can:

    sender     offer: tag, bytes, place  ->                            <-  read: tag
    receiver                                 reads it from the segment  ---'

One thread per rank sends and receives, while the rank computes.
"""

import ctypes
import os
import select
import selectors
import socket
import struct
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

from torch import Tensor

from lightning_zero.wire.desk import Desk, Memory, Segments
from lightning_zero.wire.landing import CLOSED, Arrival, Landing, Message, Part, Unusable
from lightning_zero.wire.outbox import Outbox

INLINE = 2**15  # bytes, at most, of a tensor in a datagram: up to here a copy takes less time than an answer
_HEADER = struct.Struct("=cQQQ")  # kind, tag, offset, bytes
_PAYLOAD, _OFFER, _WANTED, _PART, _FREE = b"p", b"o", b"w", b"s", b"f"
_READ, _SEGMENT, _GONE = b"r", b"m", b"g"
_QUIT = b"q"

_Match = tuple[int, Landing, int, Arrival]  # peer, what it fills, tag, and what has arrived
_Key = tuple[int, int]  # peer and tag; messages with the same key arrive in the order in which they are sent


@final
class Exchange:
    """Matches arriving datagrams with the calls of `receive` and `sum`. One thread does `run`; other threads call the
    rest.

    No tensor lies on the desk before its receiver wants it: it would keep out another, which the receiver wants
    first. Of a sum all terms are wanted at once: so all desks come to the same sum next.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], desk: Desk, desks: Mapping[int, Memory]) -> None:
        self._sockets = sockets  # by peer
        self._desk = desk
        self._desks = desks  # of the peers
        self._lock = threading.Lock()
        self._copying = threading.Lock()  # held while a received tensor is written to, or a sent one read
        self._arrived: defaultdict[_Key, deque[Arrival]] = defaultdict(deque)  # before `receive` was called
        self._awaited: defaultdict[_Key, deque[Landing]] = defaultdict(deque)  # received, and not arrived yet
        self._offered: defaultdict[_Key, deque[Message]] = defaultdict(deque)  # sent, and not wanted by the peer yet
        self._offers: set[Landing] = set()  # sums of which some terms are offered, and not all
        self._landing: defaultdict[int, deque[Landing]] = defaultdict(deque)  # passing the desk of a peer, in order
        self._wanted: defaultdict[int, deque[Message]] = defaultdict(deque)  # passing the desk here, by peer, in order
        self._matched: deque[_Match] = deque()  # to be taken by the thread
        self._outbox = Outbox(sockets)
        self.segments = Segments(sockets, weakref.WeakMethod(self._outbox.wake))
        self._closed: set[int] = set()  # peers with whom the link is closed
        _EXCHANGES.add(self)

    def receive(self, peer: int, into: Tensor, tag: int) -> Message:
        return self.sum(into, [peer], tag)[peer]

    def sum(self, into: Tensor, terms: Sequence[int | Tensor], tag: int, divisor: int = 1) -> dict[int, Message]:
        """Fills `into` with what the `terms` give; see `Landing`. Returns a message for each peer."""
        landing, matched = Landing(into, terms, self._drop, divisor), list[_Match]()
        with self._lock:
            for peer, message in landing.messages.items():
                key = peer, tag
                if key in self._arrived:
                    matched.append((peer, landing, tag, _pop(self._arrived, key)))
                elif peer in self._closed:
                    message.complete(CLOSED)
                else:
                    self._awaited[key].append(landing)
        if all(arrival.payload is not None for *_, arrival in matched):
            for each in matched:  # here: it is a copy of a few bytes, and to wake the thread takes longer
                self._land(self._land_arrival, *each)
        else:
            self._matched.extend(matched)
            self._outbox.wake()
        return landing.messages

    def _place_for(self, peer: int, message: Message) -> int:
        """Returns the place of a tensor among the segments of this rank, of which the peer gets the file first. Returns
        0 if it lies in none, or the file cannot be sent now."""
        segment = self.segments.holding(message.address)
        if segment is None:
            return 0
        if peer not in segment.readers:
            try:
                socket.send_fds(self._sockets[peer], [_HEADER.pack(_SEGMENT, 0, segment.start, 0)], [segment.file])
            except OSError:
                return 0
            segment.readers.add(peer)
        return segment.start + message.address - segment.address

    def send(self, peer: int, tensor: Tensor, tag: int) -> Message:
        message, is_small = Message(tensor, partial(self._drop, peer)), tensor.nbytes <= INLINE
        place = 0 if is_small else self._place_for(peer, message)
        header = _HEADER.pack(_PAYLOAD if is_small else _OFFER, tag, place, message.nbytes)
        payload = (ctypes.c_char * (message.nbytes if is_small else 0)).from_address(message.address)
        with self._lock:
            if peer in self._closed:
                message.complete(CLOSED)
            elif not is_small:
                self._offered[peer, tag].append(message)
        if not message.is_over:
            try:
                self._outbox.post(peer, header, payload)
                if is_small:
                    message.complete()
            except OSError as error:
                message.complete(f"connection closed ({error})")
        return message

    def _post(self, peer: int, kind: bytes, *, tag: int = 0, offset: int = 0, nbytes: int = 0) -> None:
        with suppress(OSError):  # the peer is gone, as the thread is about to read
            self._outbox.post(peer, _HEADER.pack(kind, tag, offset, nbytes))

    # -- the thread

    def quit(self) -> None:
        """Ends the thread. A forked process, which has none, must not end its parent's."""
        if self in _EXCHANGES:
            with suppress(OSError):
                self._outbox.wake(_QUIT)

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._outbox.woken, selectors.EVENT_READ)
            for peer, link in self._sockets.items():
                selector.register(link, selectors.EVENT_READ, peer)
            while True:
                for key, events in selector.select():
                    if key.data is None:
                        if _QUIT in self._outbox.woken.recv(4096):
                            return
                        continue
                    if events & selectors.EVENT_WRITE:
                        self._outbox.flush(key.data)
                        selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
                    if events & selectors.EVENT_READ and not self._read_datagram(key.data):
                        selector.unregister(key.fileobj)
                while self._matched:  # no name here may hold a tensor while the thread waits
                    self._land(self._land_arrival, *self._matched.popleft())
                while self.segments.gone:
                    gone = self.segments.gone.popleft()
                    for peer in gone.readers:  # the system gets the memory back only when they give it up, too
                        self._post(peer, _GONE, offset=gone.start)
                for peer in self._outbox.peers:
                    if self._sockets[peer] in selector.get_map():
                        selector.modify(self._sockets[peer], selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

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
            if self._landing[peer]:  # otherwise the link was closed while the part was on its way
                self._land(self._take_part, peer, self._landing[peer][0], Part(offset, nbytes))
        elif kind == _FREE:
            self._desk.free[peer].append(offset)
            self._fill_desk(peer)
        elif kind == _WANTED:
            self._begin_to_pass((peer, tag))
        elif kind == _READ:
            self._end_offered((peer, tag))
        elif kind == _SEGMENT:
            self.segments.see(peer, offset, files)
        elif kind == _GONE:
            self.segments.drop(peer, offset)
        else:
            is_small = kind == _PAYLOAD
            payload = (ctypes.c_char * nbytes).from_buffer_copy(datagram, _HEADER.size) if is_small else None
            self._match(peer, tag, Arrival(nbytes, payload, offset))
        return True

    def _match(self, peer: int, tag: int, arrival: Arrival) -> None:
        key = peer, tag
        with self._lock:
            if key in self._awaited:
                self._matched.append((peer, _pop(self._awaited, key), tag, arrival))
            else:
                self._arrived[key].append(arrival)

    # -- the thread: what arrives

    def _land(self, take: Callable[..., None], peer: int, landing: Landing, *what: Any) -> None:
        """Has `take` take what a peer sends, unless nobody waits for it any more. Closes the link if that fails."""
        try:
            with self._copying:
                if landing.has_failed:
                    raise Unusable(CLOSED)
                take(peer, landing, *what)
        except Unusable as failure:
            landing.messages[peer].complete(str(failure))
            self._drop(peer)  # tells it

    def _land_arrival(self, peer: int, landing: Landing, tag: int, arrival: Arrival) -> None:
        """Takes a tensor that a peer sends, or says that it is wanted on the desk, once all terms of the sum have
        arrived."""
        if arrival.nbytes != landing.nbytes:
            raise Unusable(f"rank {peer} sent {arrival.nbytes} bytes where {landing.nbytes} were expected")
        if arrival.payload is None and peer in self._closed:
            raise Unusable(CLOSED)
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
        addresses = {one: self.segments.address_of(one, theirs) for one, theirs in arrivals}
        found = {one: address for one, address in addresses.items() if address is not None}
        if len(found) == len(addresses):
            self._read_segments(landing, found, tag)
            return
        for one in landing.messages:
            self._landing[one].append(landing)
            self._post(one, _WANTED, tag=tag)

    def _read_segments(self, landing: Landing, found: Mapping[int, int], tag: int) -> None:
        """Reads tensors where they lie, by peer."""
        for start in range(0, landing.nbytes, self._desk.slot):  # of several terms, what a cache holds
            part = {peer: address + start for peer, address in found.items()}
            landing.fill(part, min(self._desk.slot, landing.nbytes - start))
        # A peer that has given up may have changed its tensor meanwhile. It has closed the link before that.
        landing.end_if_filled(lost=[peer for peer in found if _is_hung_up(self._sockets[peer])])
        for peer in found:
            self._post(peer, _READ, tag=tag)

    def _take_part(self, peer: int, landing: Landing, part: Part) -> None:
        """Takes a part from the desk of a peer, once the same part of all terms of the sum is there."""
        landing.parts[peer].append(part)
        landing.left[peer] -= part.nbytes
        if not landing.left[peer]:  # the next part is of another tensor, even if this one waits for other terms
            self._landing[peer].popleft()
        if all(landing.parts.values()):
            parts = {one: waiting.popleft() for one, waiting in landing.parts.items()}
            landing.fill({one: self._desks[one].address_of(*there) for one, there in parts.items()}, part.nbytes)
            landing.end_if_filled()
            for one, there in parts.items():
                self._post(one, _FREE, offset=there.offset)

    # -- the thread: what leaves

    def _end_offered(self, key: _Key) -> None:
        """Ends the wait for a peer that has read a tensor where it lies."""
        with self._lock:
            if key in self._offered:  # otherwise the link was closed while this answer was on its way
                _pop(self._offered, key).complete()

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
                    wanted.popleft().complete()
                self._post(peer, _PART, offset=offset, nbytes=nbytes)

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
            self.segments.drop(peer)
            offered = {landing for landing in self._offers if peer in landing.arrivals}
            self._offers -= offered
            ended = [landing.messages[peer] for landing in (*offered, *self._landing.pop(peer, ()))]
            ended += self._wanted.pop(peer, ())
            for key in [key for key in self._offered if key[0] == peer]:
                ended += self._offered.pop(key)
            for key in [key for key in self._awaited if key[0] == peer]:
                ended += [landing.messages[peer] for landing in self._awaited.pop(key)]
            for message in ended:
                message.complete(CLOSED)


_EXCHANGES: "weakref.WeakSet[Exchange]" = weakref.WeakSet()  # of this process


def _leave_to_parent() -> None:
    for exchange in [*_EXCHANGES]:  # while a forked process has their sockets, nobody would notice its parent's end
        exchange._outbox.close()
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
