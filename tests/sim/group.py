"""Collectives as NCCL has them, for ranks that are threads of one process, each with streams of its own.

A collective is launched into the communicator's stream, after what the current stream has been given so far. It runs
when all ranks have launched it, and when what its rank has launched before has run, in whichever communicator: NCCL
promises to run several at once only where the device has room for all. `wait` lets the current stream wait, and not the
host. Ranks that launch different collectives are told so; a rank that launches none leaves the streams of the others
where they are.
"""

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg

from .kernels import below_torch, host_view
from .memory import Access, block_of
from .streams import BLOCKED, CHANGED, LOCK, Event, Hang, Host, State, Stream, become, current_stream, this_host

T = TypeVar("T")


DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}


class LaunchOrderError(RuntimeError):
    """Two ranks have launched different collectives at the same place."""


class _Part(NamedTuple):
    """What a rank contributes to a collective."""

    number: int  # of the launch, in its stream
    sent: list[Tensor]  # host views
    received: list[Tensor]
    host_at: float  # s, of simulated time
    before: list[Event]  # what its rank has launched before, in any communicator


class Communicator:
    """What the ranks of a group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.streams: dict[int, Stream] = {}
        self.launched: defaultdict[int, list[str]] = defaultdict(list)  # by rank, in order
        self.aborted: set[int] = set()  # ranks
        self._parts: defaultdict[int, dict[int, _Part]] = defaultdict(dict)  # place in the order -> rank -> part
        self._is_done: dict[int, float] = {}  # place -> when it began, s of simulated time

    def launch(
        self,
        rank: int,
        name: str,
        compute: Any,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        *,
        batches: bool = False,
    ) -> Event:
        """Launches a collective on a rank; `compute(sent, received)` does it for all ranks, given their tensors. One
        that `batches` runs beside others that do, launched next to it."""
        with LOCK:
            if unknown := {tensor.dtype for tensor in (*sent, *received)} - DTYPES:
                raise TypeError(f"NCCL has no {unknown}.")
            place, told = len(self.launched[rank]), f"{name} of {[tuple(tensor.shape) for tensor in sent or received]}"
            self.launched[rank].append(told)
            for other, order in self.launched.items():
                if place < len(order) and order[place] != told:
                    raise LaunchOrderError(
                        f"Rank {rank} launches {self.launched[rank]}, and rank {other} has launched {order}."
                    )
            stream = self.streams[rank]
            stream.wait_stream(current_stream())
            number, before = stream.launched + 1, this_host().collectives.before(batches)
            views = [*map(host_view, sent)], [*map(host_view, received)]
            self._parts[place][rank] = _Part(number, *views, this_host().at, before)
            accesses = [Access(block_of(tensor), tensor, writes=False) for tensor in sent]
            accesses += [Access(block_of(tensor), tensor, writes=True) for tensor in received]
            nbytes = max(sum(tensor.nbytes for tensor in tensors) for tensors in (sent, received))
            rates, crosses = State.rates, nbytes * (self.size - 1) / self.size
            cost = 0.0 if rates is None else rates.latency + crosses / rates.link
            stream.launch(name, partial(self._run, place, rank, compute), accesses, cost=cost)
            launched = stream.record_event()
            this_host().collectives.add(launched, batches)
            return launched

    def _run(self, place: int, rank: int, compute: Any) -> Any:
        parts = self._parts[place]
        if place in self._is_done or rank in self.aborted:
            return self._is_done.get(place)
        if not all(event.has_passed for part in parts.values() for event in part.before):
            return BLOCKED
        is_ready = len(parts) == self.size and all(
            # The streams of the other ranks have to come to it as well. One that is running waits in it already.
            stream.is_running or stream.run(parts[rank].number - 1)
            for rank, stream in self.streams.items()
        )
        if not is_ready:
            return BLOCKED
        if place not in self._is_done:
            self._is_done[place] = max(max(self.streams[one].at, part.host_at) for one, part in parts.items())
            ordered = [parts[rank] for rank in range(self.size)]
            with below_torch():
                compute([part.sent for part in ordered], [part.received for part in ordered])
        return self._is_done[place]


_COMMUNICATORS: dict[str, Communicator] = {}  # by name of the group


class _Work(dist._Work if hasattr(dist, "_Work") else torch._C._distributed_c10d.Work):  # type: ignore[misc, valid-type]
    def __init__(self, event: Event, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._event, self._tensors = event, [*tensors]  # kept until somebody has waited, as NCCL's work does

    def wait(self, timeout: Any = None) -> bool:
        self._event.wait()
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return self._event.query()


def _gather(sent: list[list[Tensor]], received: list[list[Tensor]]) -> None:
    for outputs in received:
        for at, output in enumerate(outputs):
            output.view(-1).copy_(torch.cat([theirs[at].reshape(-1) for theirs in sent]))


def _reduce_scatter(sent: list[list[Tensor]], received: list[list[Tensor]]) -> None:
    for rank, outputs in enumerate(received):
        for at, output in enumerate(outputs):
            rows = [theirs[at].view(len(sent), -1)[rank] for theirs in sent]
            output.view(-1).copy_(reduce(torch.add, rows))


def _all_reduce(op: Any, sent: list[list[Tensor]], received: list[list[Tensor]]) -> None:
    kinds = ((dist.ReduceOp.SUM, torch.add), (dist.ReduceOp.MAX, torch.maximum), (dist.ReduceOp.MIN, torch.minimum))
    combine = next(combine for kind, combine in kinds if op == kind)
    totals = [reduce(combine, tensors) for tensors in zip(*sent, strict=True)]
    for outputs in received:
        for output, total in zip(outputs, totals, strict=True):
            output.copy_(total)


def _broadcast(source: int, sent: list[list[Tensor]], received: list[list[Tensor]]) -> None:
    for outputs in received:
        for output, value in zip(outputs, sent[source], strict=True):
            output.copy_(value.clone())


class SimGroup(dist.ProcessGroup):
    """One rank of a communicator."""

    def __init__(self, group: str, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        with LOCK:
            self._shared = _COMMUNICATORS.setdefault(name, Communicator(size))
            self._shared.streams[rank] = Stream()
            self._shared.streams[rank].lane = "communication"
        self._group, self._name, self._rank, self._size = group, name, rank, size

    supports_splitting = False

    def _get_backend(self, device: torch.device) -> "SimGroup":
        return self

    def getBackendName(self) -> str:
        return "sim"

    @property
    def group_name(self) -> str:
        return self._group

    def _launch(self, name: str, compute: Any, sent: Sequence[Tensor], received: Sequence[Tensor]) -> _Work:
        return _Work(self._shared.launch(self._rank, name, compute, sent, received), [*sent, *received])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> _Work:
        return self._launch("all-gather", _gather, inputs, outputs)

    def all_gather_single(self, output: Tensor, input: Tensor, options: Any = None) -> _Work:
        return self._launch("all-gather", _gather, [input], [output])

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> _Work:
        return self._launch("reduce-scatter", _reduce_scatter, inputs, outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, options: Any = None) -> _Work:
        return self._launch("reduce-scatter", _reduce_scatter, [input], [output])

    def allreduce(self, tensors: Any, options: Any) -> _Work:
        return self._launch("all-reduce", partial(_all_reduce, options.reduceOp), tensors, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, options: Any) -> _Work:
        return self._launch("broadcast", partial(_broadcast, options.rootRank), tensors, tensors)

    def send(self, tensors: Any, to: int, tag: int = 0) -> _Work:
        return self._pair(self._rank, to, tensors, [])

    def recv(self, tensors: Any, source: int, tag: int = 0) -> _Work:
        return self._pair(source, self._rank, [], tensors)

    def _pair(self, source: int, to: int, sent: Any, received: Any) -> _Work:
        """A message of a batch: of its own stream, since messages of a batch do not wait for each other."""
        with LOCK:
            pair = _COMMUNICATORS.setdefault(f"{self._name}: {source} -> {to}", Communicator(2))
            rank = int(self._rank == to)
            pair.streams.setdefault(rank, Stream())
        return _Work(pair.launch(rank, "message", _deliver, sent, received, batches=True), [*sent, *received])

    def abort(self) -> None:
        """Ends, on this rank, what has not ended; its results are worth nothing."""
        with LOCK:
            self._shared.aborted.add(self._rank)
            CHANGED.notify_all()

    shutdown = abort


def _deliver(sent: list[list[Tensor]], received: list[list[Tensor]]) -> None:
    received[1][0].copy_(sent[0][0])


def _make(options: Any, _: Any) -> SimGroup:
    name = f"{options.group_id} of {options.global_ranks_in_group}"
    return SimGroup(options.group_id, name, options.group_rank, options.group_size)


dist.Backend.register_backend("sim", _make, extended_api=True, devices=["sim"])


def run_ranks(size: int, function: Callable[..., T], *args: Any) -> list[T]:
    """Calls `function(rank, *args)` on ranks that are threads, in a world of torch.distributed of their own. Returns
    the results in rank order, or raises the first error of a rank."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []
    store = dist.HashStore()

    def main(rank: int) -> None:
        become(Host(f"rank {rank}"))
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        try:
            # One thread of autograd serves a device of torch, and these ranks are one device for it.
            with torch.autograd.set_multithreading_enabled(False):
                dist.init_process_group("sim", rank=rank, world_size=size, store=store)
                results[rank] = function(rank, *args)
        except BaseException as error:
            with LOCK:
                errors.append(error)
                for communicator in _COMMUNICATORS.values():
                    communicator.aborted.update(range(communicator.size))
                CHANGED.notify_all()

    world, hook = dist.distributed_c10d._world, sys.excepthook
    dist.distributed_c10d._world = multi_threaded_pg.ThreadLocalWorld()
    _COMMUNICATORS.clear()
    threads = [threading.Thread(target=main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        dist.distributed_c10d._world, sys.excepthook = world, hook
    if errors:
        raise next((error for error in errors if not isinstance(error, Hang)), errors[0])
    return [results[rank] for rank in range(size)]
