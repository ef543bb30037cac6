"""`Links`: messages between ranks of one machine that bypass the network.

TCP copies each byte twice and cuts it into packets. A link sends a small tensor in one datagram of a Unix socket. Of a
large one it sends where it lies, in memory that this rank shares with that peer (Linux). See `exchange`.

Ranks without a link to each other (on different machines, in containers that share no network, on macOS) send through
gloo.
"""

import os
import secrets
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple, final

from lightning_zero.wire.comm import Comm
from lightning_zero.wire.desk import Desk, Memory, open_desk, slot_for
from lightning_zero.wire.exchange import Exchange

ONLY_TCP = "LIGHTNING_ZERO_ONLY_TCP"  # environment variable: "1" turns links off
_TIMEOUT_S = 60.0  # of a peer's answer at set-up


class _Card(NamedTuple):
    """What a rank tells the others of itself."""

    name: bytes  # of its socket, which every process of the machine can see
    proof: bytes  # 16 bytes that only ranks know; whoever shows them is this rank


@final
class Links:
    """This rank's links to the ranks of `comm` on its machine. Two ranks have a link if each can read what the other
    shares. Collective: construct it on every rank.

    `peer in links` says whether there is one; `send` and `receive` use it. Messages with the same tag arrive in order.
    If there is any, `empty` returns memory for a tensor of this rank that those peers read where it lies.
    """

    def __init__(self, comm: Comm) -> None:
        card = _Card(b"\0lightning_zero-" + secrets.token_hex(16).encode(), secrets.token_bytes(16))
        listener = _listen(card.name)
        cards = comm.all_gather_object(None if listener is None else card, "links")
        others = {peer: theirs for peer, theirs in enumerate(cards) if listener is not None and theirs is not None}
        sockets = {}
        for peer, theirs in others.items():
            if peer < comm.rank and (link := _connect(theirs.name, card.proof)) is not None:  # once for each pair
                sockets[peer] = link
        connected = comm.all_gather_object([*sockets], "connected links")
        if listener is not None:
            proofs = {others[peer].proof: peer for peer, reached in enumerate(connected) if comm.rank in reached}
            sockets |= _accept(listener, proofs)
        of_each = [len(reached) + sum(rank in theirs for theirs in connected) for rank, reached in enumerate(connected)]
        desk, desks = _share(sockets, max(of_each), card, others)
        readers = comm.all_gather_object([*desks], "readable links")
        self._links = {peer: sockets[peer] for peer in desks if comm.rank in readers[peer]}
        if desk is not None and self._links:
            exchange = Exchange(self._links, desk, desks)
            self.receive, self.send, self.sum = exchange.receive, exchange.send, exchange.sum
            self.empty = exchange.segments.empty
            threading.Thread(target=exchange.run, name="lightning_zero links", daemon=True).start()
            weakref.finalize(self, exchange.quit)

    def __contains__(self, peer: int) -> bool:
        return peer in self._links


def _listen(name: bytes) -> socket.socket | None:
    """Opens the socket to which other ranks of this machine connect. Returns None where there can be no links."""
    if sys.platform != "linux" or os.environ.get(ONLY_TCP) == "1":
        return None
    try:
        listener = _new_socket()
    except OSError:  # a sandbox refuses such sockets
        return None
    listener.bind(name)  # begins with "\0": it is no file, and is gone with the process
    listener.listen(socket.SOMAXCONN)
    return listener


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)  # a process of this machine answers at once, or there is no link
    return made


def _connect(name: bytes, proof: bytes) -> socket.socket | None:
    """Connects to the rank that listens at `name`. Returns None if it is on another machine."""
    link = _new_socket()
    with suppress(OSError):
        link.connect(name)
        if _is_own_user(link):
            link.send(proof)
            return link
    link.close()
    return None


def _accept(listener: socket.socket, awaited: dict[bytes, int]) -> dict[int, socket.socket]:
    """Returns the links of the ranks that have connected, given their proofs, and closes the listener. All of them are
    there already: it waits for none, and for no other process that has connected."""
    links = {}
    with listener, suppress(OSError):  # none is left, or no more files can be opened
        while awaited:
            link, _ = listener.accept()
            link.setblocking(False)
            with suppress(OSError):
                peer = awaited.pop(link.recv(16), None) if _is_own_user(link) else None
                if peer is not None:
                    links[peer] = link
                    continue
            link.close()
    return links


def _is_own_user(link: socket.socket) -> bool:
    """Whether the process at the other end runs as the same user."""
    credentials = struct.Struct("3i")
    _, user, _ = credentials.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return bool(user == os.geteuid())


def _share(
    sockets: Mapping[int, socket.socket], most: int, card: _Card, others: Mapping[int, _Card]
) -> tuple[Desk | None, dict[int, Memory]]:
    """Makes the desk, and swaps the files of desks over the sockets. Returns it, and the peers' that can be read.
    `most` is the largest number of sockets that any rank has."""
    try:
        desk = Desk([*sockets], slot_for(most), card.proof) if sockets else None
    except OSError:  # such memory does not exist here, or may not be had
        desk = None
    if desk is None:
        for link in sockets.values():
            link.close()
        return None, {}
    for link in sockets.values():
        with suppress(OSError):
            socket.send_fds(link, [b"desk"], [desk.file])
    desk.close_file()
    found = {}
    for peer, link in sockets.items():
        link.settimeout(_TIMEOUT_S)
        with suppress(OSError):
            _, files, _, _ = socket.recv_fds(link, 4, 1, socket.MSG_CMSG_CLOEXEC)
            for file in files:
                found[peer] = open_desk(file, others[peer].proof)
    return desk, {peer: theirs for peer, theirs in found.items() if theirs is not None}
