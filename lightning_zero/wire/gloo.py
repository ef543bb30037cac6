"""gloo, message by message, straight into place.

gloo's own reduce-scatter is an all-reduce inside (twice the bytes), its all-gather is slower than sending to each peer,
and its all-reduce of a few bytes takes three times as long as the messages here.
"""

import itertools
import pickle
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.wire.board import Board
from lightning_zero.wire.comm import Combine, Comm, Gather, RankTimeoutError, Work, place_of
from lightning_zero.wire.links import Links, Message

_MADE = itertools.count()  # communicators of this process; all ranks make the same ones, in the same order
_GRACE_S = 3.0  # s, after a timed-out wait: how long to listen for what the other ranks report

# Begins the row of a rank that diverges. Such rows are gathered anew before anybody reads them, so values that happen
# to look like this cost time and nothing else.
_DIVERGES = 0x5AFE_C0DE_0D1F_FE25
_WORD = torch.int64

_FAILED = " failed: "  # in what a rank reports of an error of its own
_NOISE = re.compile(r"^\[[^]]*\] *|\. This is typically .*|\.$")  # a place in gloo's source; its advice
_CLOSED = re.compile(r"connection (closed|reset)|broken pipe", re.IGNORECASE)  # what gloo says of a peer that has gone

_Pending = list[tuple[int, dist.Work | Message]]  # messages under way, each with the peer that it is to or from


@final
class GlooComm(Comm):
    """Host memory. Tensors of another device are staged through it, because gloo sends only that.

    `group` is one of its own, so that tags cannot meet anybody else's. A wait for a peer that is longer than
    `wait_timeout` says who is missing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wait_timeout: timedelta,
        links: Links | None = None,
        *,
        sanitize: bool = False,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), sanitize=sanitize)
        self.scratch_rows = self.size - 1
        self._group = group
        self._links = links
        self._in_world = dist.get_process_group_ranks(group)
        self.wait_timeout = wait_timeout
        self._number = next(_MADE)
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]

    @cached_property
    def board(self) -> Board:
        return Board(self._store, self.rank, self.size, self.wait_timeout)

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        group = own_subgroup("gloo", self.rank, groups)
        return GlooComm(group, self.wait_timeout, self._links, sanitize=self.sanitize)

    # -- arrays

    def _all_gather(self, full: Tensor, shard: Tensor, key: str, diverges: bool | None) -> Gather:
        if full.device.type != "cpu":
            host = torch.empty(full.shape, dtype=full.dtype, pin_memory=full.is_cuda)
            gather = self._all_gather(host, shard.cpu(), key, diverges)

            def finish() -> None:
                gather.wait()
                full.copy_(host)

            return Gather(finish, gather.has_divergence)
        if diverges:
            shard = shard.clone()
            shard.view(_WORD)[0] = _DIVERGES
        if full[self.rank].data_ptr() != shard.data_ptr():
            full[self.rank].copy_(shard)
        pending = self._start({peer: full[peer] for peer in self._peers}, dict.fromkeys(self._peers, shard), key)
        look = (lambda: False) if diverges is None else (lambda: bool((full.view(_WORD)[:, 0] == _DIVERGES).any()))
        return Gather(lambda: self._wait(pending, key), look)

    def _reduce_scatter(self, shard: Tensor, full: Tensor, scratch: Tensor, key: str) -> Work:
        rows, landing = full, scratch
        if full.device.type != "cpu":
            rows, landing = full.cpu(), scratch.cpu()
        received = dict(zip(self._peers, landing, strict=True))
        pending = self._start(received, {peer: rows[peer] for peer in self._peers}, key)
        slots = received | {self.rank: rows[self.rank]}

        def finish() -> None:
            self._wait(pending, key)
            total = shard if shard.device == rows.device else torch.empty_like(rows[0])
            torch.add(slots[0], slots[1], out=total)  # in rank order: the sum does not depend on who came first
            for rank in range(2, self.size):
                total.add_(slots[rank])
            if total is not shard:
                shard.copy_(total)

        return Work(finish)

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], key: str) -> None:
        landing = {peer: received[peer].cpu() for peer in self._peers if received[peer].numel()}
        sends = {peer: sent[peer].cpu() for peer in self._peers if sent[peer].numel()}
        self._wait(self._start(landing, sends, key), key)
        for peer, tensor in landing.items():
            if tensor is not received[peer]:
                received[peer].copy_(tensor)

    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None:
        host = tensor.cpu()  # the tensor itself when it is on the host
        if self.rank == source:
            self._wait(self._start({}, dict.fromkeys(self._peers, host), key), key)
            return
        self._wait(self._start({source: host}, {}, key), key)
        if host is not tensor:
            tensor.copy_(host)

    # -- small agreements, in a tree

    def _all_reduce(self, value: Tensor, combine: Combine, key: str) -> Tensor:
        def swap(mine: Tensor | None, peer: int, receives: bool) -> Tensor | None:
            return self._exchange(mine, torch.empty_like(value) if receives else None, peer, key)

        return self._tree(value, combine, swap)

    def _merge(self, mine: dict[int, Any], key: str) -> dict[int, Any]:
        def swap(mine: dict[int, Any] | None, peer: int, receives: bool) -> dict[int, Any] | None:
            packed = None if mine is None else torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
            told = None if packed is None else torch.tensor([packed.numel()])
            length = self._exchange(
                told, torch.zeros(1, dtype=torch.int64) if receives else None, peer, f"length of {key}"
            )
            theirs = None if length is None else torch.empty(int(length), dtype=torch.uint8)
            self._exchange(packed, theirs, peer, key)
            self.bytes_sent["object"] += 0 if packed is None else packed.numel()
            return None if theirs is None else pickle.loads(theirs.numpy().tobytes())

        return self._tree(mine, lambda one, other: one | other, swap)

    def _exchange(self, mine: Tensor | None, theirs: Tensor | None, peer: int, key: str) -> Tensor | None:
        """Sends `mine` if it is there, and receives into `theirs` if there is room."""
        receives, sends = ({} if tensor is None else {peer: tensor} for tensor in (theirs, mine))
        self._wait(self._start(receives, sends, key), key)
        return theirs

    def _tree(self, value: Any, combine: Callable[[Any, Any], Any], swap: Callable[..., Any]) -> Any:
        """Recursive doubling: in round k, pairs at a distance of 2^k swap and combine, the lower rank's part first, so
        that all end with the same bits. Ranks beyond the largest power of two hand theirs in first, and are told last.

            rank 0  1  2  3 | 4         4 -> 0
                 0--1  2--3             distance 1
                 0-----2, 1-----3       distance 2
                 0                      0 -> 4
        """
        core = 1 << (self.size.bit_length() - 1)
        if self.rank >= core:
            swap(value, self.rank - core, False)
            return swap(None, self.rank - core, True)
        outside = self.rank + core if self.rank + core < self.size else None
        if outside is not None:
            value = combine(value, swap(None, outside, True))
        for number in range(core.bit_length() - 1):
            peer = self.rank ^ (1 << number)
            theirs = swap(value, peer, True)
            value = combine(value, theirs) if self.rank < peer else combine(theirs, value)
        if outside is not None:
            swap(value, outside, False)
        return value

    # -- messages

    def _start(self, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor], key: str) -> _Pending:
        """Starts a message from each peer of `receives` into its tensor, then one to each peer of `sends`."""
        pending = []
        # By number: a run that failed may have left messages that nobody has taken, in the group that all runs share.
        tag = zlib.crc32(f"{self._number} {key}".encode()) & 0x7FFFFFFF
        for begin, tensors in ((self._receive, receives), (self._send, sends)):
            for peer, tensor in tensors.items():
                with self.explaining(key, peer):  # fails where an earlier wait timed out and closed it
                    pending.append((peer, begin(peer, tensor, tag)))
        return pending

    def _receive(self, peer: int, into: Tensor, tag: int) -> dist.Work | Message:
        if self._links is not None and (linked := self._in_world[peer]) in self._links:
            return self._links.receive(linked, into, tag)
        return self._group.recv([into], peer, tag)

    def _send(self, peer: int, tensor: Tensor, tag: int) -> dist.Work | Message:
        if self._links is not None and (linked := self._in_world[peer]) in self._links:
            return self._links.send(linked, tensor, tag)
        return self._group.send([tensor], peer, tag)

    def _wait(self, pending: _Pending, key: str) -> None:
        for peer, work in pending:
            with self.explaining(key, peer):
                work.wait(self.wait_timeout)

    @property
    def _store(self) -> dist.Store:
        # By number: what an earlier one left there (the verdict on its first save) must not be taken for this one's.
        prefix = f"lightning_zero/{self._group.group_name}/{self._number}"
        return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())

    @contextmanager
    def explaining(self, key: str, awaited: int | None) -> Iterator[None]:
        """When a message of `key` to or from rank `awaited` (None: any other) fails: tells the others, through the
        store, that this rank waited for it, listens for where they wait, and raises all of it."""
        try:
            yield
        except RuntimeError as error:
            cause = _NOISE.sub("", str(error).splitlines()[0])
            raise self._lost_in(key, awaited, cause) from None  # the cause is told, and is no second traceback

    def _lost_in(self, key: str, awaited: int | None, cause: str) -> RankTimeoutError:
        waits_for = "the others" if awaited is None else f"rank {awaited}"
        closed, details = _CLOSED.search(cause), []
        # Who closes a connection has reported before; and Lightning's launcher kills this process soon after that one.
        until = time.monotonic() + _GRACE_S * (1.0 if closed is None else 0.1)
        try:
            store = self._store
            store.set(f"lost/{self.rank}", f"Rank {self.rank} was in {place_of(key)}, waiting for {waits_for}")
            heard = {peer: _hear(store, peer, until) for peer in self._peers}
        except Exception as unreachable:  # rank 0, which holds the store, may be the one that died
            heard = {}
            details.append(f"The store on rank 0 does not answer ({type(unreachable).__name__})")
        silent = [peer for peer, told in heard.items() if told is None]
        failed = [peer for peer, told in heard.items() if told is not None and _FAILED in told]
        suspects = failed or [peer for peer in silent if peer == awaited] or silent
        suspect = suspects[0] if suspects else awaited
        who = "Another rank" if suspect is None else f"Rank {suspect}"
        if failed:
            lost = f"{who} failed"
        elif closed is not None:  # who waits for too long closes what it has, too
            lost = f"{who} gave up" if suspect in heard.keys() - silent else f"{who} died ({closed[0].lower()})"
        else:
            lost = f"{who} did not come within wait_timeout={self.wait_timeout.total_seconds():g} s"
            details += [
                f"Rank {peer} reported nothing: it has died, or is busy outside any collective" for peer in silent
            ]
        details += [told for told in heard.values() if told is not None]
        return RankTimeoutError(lost, key, *details, f"Cause: {cause}")

    def report(self, told: str | None) -> None:
        with suppress(Exception):  # nobody may be there to hear it
            if told is None:
                self._store.delete_key(f"lost/{self.rank}")
            else:
                self._store.set(f"lost/{self.rank}", f"Rank {self.rank}{_FAILED}{told}")


def _hear(store: Any, rank: int, until: float) -> str | None:
    """What a rank says of why it has gone, or where it waits; None where it says nothing until then."""
    while not store.check([f"lost/{rank}"]):  # its `wait` would print warnings of its own
        if time.monotonic() > until:
            return None
        time.sleep(0.02)
    return store.get(f"lost/{rank}").decode()


Made = TypeVar("Made")
_OF_WORLD: dict[Any, tuple[Any, Any]] = {}  # what was asked for -> the world it was made in, and what was made


def once_per_world(key: Any, make: Callable[[], Made]) -> Made:
    """What `make` returned the first time in this world of ranks: groups hold sockets and threads while they live, and
    torch keeps them all."""
    world, made = _OF_WORLD.get(key, (None, None))
    if made is None or world is not dist.group.WORLD:
        made = make()
        _OF_WORLD[key] = (dist.group.WORLD, made)
    return made


def own_group(backend: str, ranks: Sequence[int] | None = None, **kwargs: Any) -> dist.ProcessGroup:
    """A group of `ranks` (None: all), made once per process and world."""
    key = (backend, None if ranks is None else tuple(ranks))
    return once_per_world(key, lambda: dist.new_group(ranks, backend=backend, **kwargs))


def own_subgroup(backend: str, rank: int, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """The one of `groups` that holds `rank`; torch wants every rank to make every group."""
    made = [(ranks, own_group(backend, ranks)) for ranks in groups]
    return next(group for ranks, group in made if rank in ranks)
