"""`GlooComm`: collectives out of single gloo messages, which arrive directly where their values belong.

gloo's own reduce-scatter is an all-reduce inside (twice the bytes), its all-gather is slower than sending to each peer,
and its all-reduce of a few bytes takes three times as long as the messages here.
"""

import pickle
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.device import HOST, can_pin, is_host
from lightning_zero.distributed_private import default_store
from lightning_zero.wire.board import Board
from lightning_zero.wire.comm import Combine, Comm, Gather, RankTimeoutError, Work, copy_unless_same, in_tree, place_of
from lightning_zero.wire.exchange import INLINE
from lightning_zero.wire.landing import Message, apart
from lightning_zero.wire.links import Links
from lightning_zero.wire.worlds import Held, group_of, next_number, own_group

_GRACE_S = 3.0  # s, after a wait that timed out: how long to listen to what the other ranks report

# The first word of the row of a rank that diverges. Rows are then gathered again before anything reads them, so real
# values that look like this cost time and nothing else.
_DIVERGES = 0x5AFE_C0DE_0D1F_FE25
_WORD = torch.int64

_FAILED = " failed: "  # in the report of a rank that had an error of its own
_NOISE = re.compile(r"^\[[^]]*\] *|\. This is typically .*|\.$")  # in gloo's errors: a place in its source; its advice
# Of gloo's errors when a peer is gone, and of NCCL's.
_CLOSED = re.compile(r"connection (closed|reset)|broken pipe|remote process exited", re.IGNORECASE)

_Pending = list[tuple[int, dist.Work | Message]]  # messages under way, each with the peer at its other end


@final
class GlooComm(Comm):
    """Sends host memory, through `links` where there are any and through gloo elsewhere. Tensors of another device are
    copied to the host first, and back.

    `group` is used by nothing else, so that tags cannot clash. A wait of more than `wait_timeout` raises an error that
    names the missing rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wait_timeout: timedelta,
        links: Links | None = None,
        *,
        timeout: timedelta | None = None,
        sanitize: bool = False,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), sanitize=sanitize)
        self._held = Held(group)
        self._links = links
        self._in_world = dist.get_process_group_ranks(group)  # rank in `group` -> rank in the world, as in `links`
        self.wait_timeout = wait_timeout
        self.timeout = timeout  # of process groups
        self._number = next_number()
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        # Ranks of one machine add what they read. Otherwise terms first arrive in scratch.
        self._sums = links is not None and all(self._in_world[peer] in links for peer in self._peers)
        self.scratch_rows = 0 if self._sums else self.size - 1

    @property
    def has_ended(self) -> bool:
        return self._held.has_ended

    @cached_property
    def board(self) -> Board:
        return Board(self._torch_store, self.rank, self.size, self.wait_timeout)

    def split(self, groups: Sequence[Sequence[int]]) -> "GlooComm":
        group = own_group("gloo", group_of(self.rank, groups), timeout=self.timeout)
        return GlooComm(group, self.wait_timeout, self._links, timeout=self.timeout, sanitize=self.sanitize)

    # -- arrays

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory, links = None, self._links
        if links is not None and any(self._in_world[peer] in links for peer in self._peers) and is_host(device):
            memory = links.empty(numel * dtype.itemsize) if numel * dtype.itemsize > INLINE else None
        return super().empty(numel, dtype, device) if memory is None else torch.frombuffer(memory, dtype=dtype)

    def _all_gather(self, full: Tensor, shard: Tensor, key: str, diverges: bool | None) -> Gather:
        rows, mine = _landing(full), shard.cpu()
        if diverges:
            mine = mine.clone()
            mine.view(_WORD)[0] = _DIVERGES
        copy_unless_same(rows[self.rank], mine)
        # The row, and not the shard: a full array that many gathers fill lies where peers can read it.
        sends = dict.fromkeys(self._peers, rows[self.rank])
        pending = self._start_messages({peer: rows[peer] for peer in self._peers}, sends, key)

        def finish() -> None:
            self._wait(pending, key)
            _land(rows, full)

        def has_divergence() -> bool:
            return diverges is not None and bool((rows.view(_WORD)[:, 0] == _DIVERGES).any())

        return Gather(finish, has_divergence)

    def _reduce_scatter(self, shard: Tensor, full: Tensor, scratch: Tensor, key: str, divisor: int) -> Work:
        rows = full.cpu()  # `full` itself if it is on the host
        if self._sums:
            return self._sum_over_links(shard, rows, key, divisor)
        received = dict(zip(self._peers, _landing(scratch), strict=True))
        pending = self._start_messages(received, {peer: rows[peer] for peer in self._peers}, key)
        terms = received | {self.rank: rows[self.rank]}

        def finish() -> None:
            self._wait(pending, key)
            total = _landing(shard)
            if self.rank > 1:
                terms[self.rank] = apart(terms[self.rank], total)
            torch.add(terms[0], terms[1], out=total)  # in rank order: the bits do not depend on which came first
            for rank in range(2, self.size):
                total.add_(terms[rank])
            if divisor != 1:
                total.div_(divisor)
            _land(total, shard)

        return Work(finish)

    def _sum_over_links(self, shard: Tensor, rows: Tensor, key: str, divisor: int) -> Work:
        assert self._links is not None
        total = _landing(shard)
        terms = [rows[rank] if rank == self.rank else self._in_world[rank] for rank in range(self.size)]
        messages = self._links.sum(total, terms, self._tag(key), divisor)
        pending: _Pending = [(peer, messages[self._in_world[peer]]) for peer in self._peers]
        pending += self._start_messages({}, {peer: rows[peer] for peer in self._peers}, key)

        def finish() -> None:
            self._wait(pending, key)
            _land(total, shard)

        return Work(finish)

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], key: str) -> None:
        landing = {peer: _landing(received[peer]) for peer in self._peers if received[peer].numel()}
        sends = {peer: sent[peer].cpu() for peer in self._peers if sent[peer].numel()}
        self._wait(self._start_messages(landing, sends, key), key)
        for peer, tensor in landing.items():
            _land(tensor, received[peer])

    def _broadcast(self, tensor: Tensor, source: int, key: str) -> None:
        if self.rank == source:
            self._wait(self._start_messages({}, dict.fromkeys(self._peers, tensor.cpu()), key), key)
        else:
            host = _landing(tensor)
            self._wait(self._start_messages({source: host}, {}, key), key)
            _land(host, tensor)

    # -- small values, in a tree

    def _all_reduce(self, value: Tensor, combine: Combine, key: str) -> Tensor:
        def swap(mine: Tensor | None, peer: int, receives: bool) -> Tensor | None:
            return self._exchange(mine, torch.empty_like(value, device=HOST) if receives else None, peer, key)

        total: Tensor = in_tree(value.cpu(), combine, swap, self.rank, self.size)
        return total.to(value.device)

    def _merge(self, mine: dict[int, Any], key: str) -> dict[int, Any]:
        def swap(mine: dict[int, Any] | None, peer: int, receives: bool) -> dict[int, Any] | None:
            packed = None if mine is None else torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
            told = None if packed is None else torch.tensor([packed.numel()], device=HOST)
            hears = torch.zeros(1, dtype=torch.int64, device=HOST) if receives else None
            length = self._exchange(told, hears, peer, f"length of {key}")
            theirs = None if length is None else torch.empty(int(length), dtype=torch.uint8, device=HOST)
            self._exchange(packed, theirs, peer, key)
            self.bytes_sent["object"] += 0 if packed is None else packed.numel()
            return None if theirs is None else pickle.loads(theirs.numpy().tobytes())

        return in_tree(mine, lambda one, other: one | other, swap, self.rank, self.size)

    def _exchange(self, mine: Tensor | None, theirs: Tensor | None, peer: int, key: str) -> Tensor | None:
        """Sends `mine` to `peer` and receives into `theirs`, each unless it is None. Returns `theirs`."""
        receives, sends = ({} if tensor is None else {peer: tensor} for tensor in (theirs, mine))
        self._wait(self._start_messages(receives, sends, key), key)
        return theirs

    # -- messages

    def _start_messages(self, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor], key: str) -> _Pending:
        """Starts a message from each peer of `receives` into its tensor, then one to each peer of `sends`."""
        pending = []
        tag = self._tag(key)
        for is_sent, tensors in ((False, receives), (True, sends)):
            for peer, tensor in tensors.items():
                with self.explaining(key, peer):  # fails if an earlier wait timed out, which closed the connection
                    pending.append((peer, self._start_message(peer, tensor, tag, is_sent=is_sent)))
        return pending

    def _tag(self, key: str) -> int:
        # With the number: a run that failed may have left unreceived messages in the group, which all runs share.
        return zlib.crc32(f"{self._number} {key}".encode()) & 0x7FFFFFFF

    def _start_message(self, peer: int, tensor: Tensor, tag: int, *, is_sent: bool) -> dist.Work | Message:
        links, rank = self._links, self._in_world[peer]
        if links is not None and rank in links:
            return (links.send if is_sent else links.receive)(rank, tensor, tag)
        group = self._held.thing
        return (group.send if is_sent else group.recv)([tensor], peer, tag)

    def _wait(self, pending: _Pending, key: str) -> None:
        for peer, work in pending:
            with self.explaining(key, peer):
                work.wait(self.wait_timeout)

    @property
    def _torch_store(self) -> dist.Store:
        # With the number: keys of an earlier communicator (the verdict on its first save) must not be taken for ours.
        prefix = f"lightning_zero/{self._held.thing.group_name}/{self._number}"
        return dist.PrefixStore(prefix, default_store())

    @contextmanager
    def explaining(self, key: str, awaited: int | None) -> Iterator[None]:
        """Turns a failure of the body, which waits for a message of `key` to or from rank `awaited` (None: any other
        rank), into a `RankTimeoutError` that names the lost rank."""
        try:
            yield
        except RuntimeError as error:
            cause = _NOISE.sub("", str(error).splitlines()[0])
            raise self.explain(key, awaited, cause) from None  # its message has the cause: no second traceback

    def explain(self, key: str, awaited: int | None, cause: str) -> RankTimeoutError:
        """Returns the error of a wait for rank `awaited` (None: any other) that has failed for `cause`. Reports in the
        store which rank this one waited for, and finds out from the others' reports which is lost."""
        waits_for = "the others" if awaited is None else f"rank {awaited}"
        closed, details = _CLOSED.search(cause), []
        # A rank that closes a connection has reported before, so a short time is enough. It must be short: when a rank
        # has died, Lightning's launcher soon kills this one.
        until = time.monotonic() + _GRACE_S * (1.0 if closed is None else 0.1)
        try:
            store = self._torch_store
            store.set(f"lost/{self.rank}", f"Rank {self.rank} was in {place_of(key)}, waiting for {waits_for}")
            reports = {peer: _report_of(store, peer, until) for peer in self._peers}
        except Exception as unreachable:  # rank 0, which holds the store, may be the one that died
            reports = {}
            details.append(f"The store on rank 0 does not answer ({type(unreachable).__name__})")
        heard = {peer: report for peer, report in reports.items() if report is not None}
        silent = [peer for peer in reports if peer not in heard]
        failed = [peer for peer, report in heard.items() if _FAILED in report]
        suspects = failed or [peer for peer in silent if peer == awaited] or silent
        suspect = suspects[0] if suspects else awaited
        who = "Another rank" if suspect is None else f"Rank {suspect}"
        if failed:
            lost = f"{who} failed"
        elif closed is not None:  # a rank whose wait timed out closes its connections, too, and has reported
            lost = f"{who} gave up" if suspect in heard else f"{who} died ({closed[0].lower()})"
        else:
            lost = f"{who} did not come within wait_timeout={self.wait_timeout.total_seconds():g} s"
            details += [
                f"Rank {peer} reported nothing: it has died, or is busy outside any collective" for peer in silent
            ]
        return RankTimeoutError(lost, key, *details, *heard.values(), f"Cause: {cause}")

    def report(self, told: str | None) -> None:
        with suppress(Exception):  # the store may be gone
            if told is None:
                self._torch_store.delete_key(f"lost/{self.rank}")
            else:
                self._torch_store.set(f"lost/{self.rank}", f"Rank {self.rank}{_FAILED}{told}")


def _landing(tensor: Tensor) -> Tensor:
    """Returns the host tensor that a message for `tensor` arrives in: itself, if it is on the host."""
    if is_host(tensor.device):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=can_pin(tensor.device.type))


def _land(arrived: Tensor, tensor: Tensor) -> None:
    """Copies what has arrived to where it belongs."""
    if arrived is not tensor:
        tensor.copy_(arrived)


def _report_of(store: Any, rank: int, until: float) -> str | None:
    """Returns a rank's report of why it is lost or where it waits; None if it reports nothing until then."""
    while not store.check([f"lost/{rank}"]):  # the store's own `wait` would print warnings
        if time.monotonic() > until:
            return None
        time.sleep(0.02)
    return store.get(f"lost/{rank}").decode()
