"""`Links`: messages between ranks of one machine that bypass the network.

TCP copies each byte twice and cuts it into packets. A link sends a small tensor in one datagram of a Unix socket. For a
large tensor it sends only the address: the receiver copies the bytes straight out of the sender's memory (Linux,
`process_vm_readv`), and then answers. See `exchange`.

Ranks without a link to each other (on different machines, in containers whose memory may not be read, on macOS) send
through gloo.
"""

import ctypes
import os
import secrets
import socket
import struct
import sys
import threading
import weakref
from contextlib import suppress
from typing import NamedTuple, final

from lightning_zero.wire.comm import Comm
from lightning_zero.wire.exchange import Exchange, read

ONLY_TCP = "LIGHTNING_ZERO_ONLY_TCP"  # environment variable: "1" turns links off
_TIMEOUT_S = 60.0  # of connecting at set-up
_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, ctypes.c_ulong(2**64 - 1)  # from prctl.h


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
        exchange = Exchange(mutual, pids)
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
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)
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
        read(pid, card.address, ctypes.addressof(found), len(card.token))
    return found.raw == card.token
