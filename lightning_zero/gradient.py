"""`GradientShard`: collect and reduce, the life of a group's gradients; and the buckets they travel in.

A gradient flows down once: autograd writes `p.grad` -> `collect` -> (last one in) `begin_reduce` ->
`Comm.reduce_scatter` -> `owned_grad`. Where gradients rest in full they accumulate in `full_grad`, and `p.grad` is a
view of it; where they rest as shards, `p.grad` is afterwards a `ShardedGradient`, which gathers when it is read.

    full_grad     (N * S,)   accumulation dtype; only where gradients rest in full, or accumulate locally
    owned_grad    (owned,)   accumulation dtype; reduced and averaged; a view of full_grad at stages 0 and 1
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_iter, tree_map

from lightning_zero.comm import Work
from lightning_zero.extents import Piece
from lightning_zero.group import ShardGroup
from lightning_zero.ledger import Category, Ledger


@final
class Bucket:
    """Constant-size room for one collective (CB, ZeRO section 6.2).

    Args:
        numel: elements of the largest slice, N rows of it.
        ranks: N.
        dtype: of the gradients.
        device: of the gradients.
        ledger: books it.
    """

    def __init__(self, numel: int, ranks: int, dtype: torch.dtype, device: torch.device, ledger: Ledger) -> None:
        shard = numel // ranks
        self.full = ledger.allocate(Category.BUCKET, numel, dtype, device)  # what this rank sends, and its own row
        self.incoming = ledger.allocate(Category.BUCKET, numel - shard, dtype, device)  # the others' rows for this one
        self.total = ledger.allocate(Category.BUCKET, shard, dtype, device)  # their sum
        self.finish: Callable[[], None] | None = None

    def settle(self) -> None:
        """Waits for the operation that this bucket carries, if any, and stores its result."""
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()


@final
class BucketPool:
    """A fixed number of buckets, allocated once; when all are in flight, the oldest is waited for."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._next = 0

    def take(self) -> Bucket:
        bucket = self._buckets[self._next]
        self._next = (self._next + 1) % len(self._buckets)
        bucket.settle()
        return bucket

    def drain(self) -> None:
        """Settles all, oldest first."""
        for _ in self._buckets:
            self.take()


@final
class GradientShard:
    """The gradients of one trainable group.

    Args:
        group: whose gradients.
        dtype: in which they travel, are summed and accumulate.
    """

    pool: BucketPool  # where the buckets come from; wide enough for the group's largest slice

    def __init__(self, group: ShardGroup, dtype: torch.dtype) -> None:
        self.group = group
        self.dtype = dtype
        self.full_grad: Tensor | None = None
        if not group.partition.gradient:
            self.full_grad = self._allocate_full()
            self.owned_grad = group._owned(self.full_grad)
        else:
            self.owned_grad = self._allocate(group.layout.shard_numel)
        self.ready: set[int] = set()  # parameters that have a gradient in this backward
        self.used: set[int] = set()  # ... or had one since the last reduction, on this rank
        self._held: dict[int, Tensor] = {}  # gradients that wait for the rest of their group
        self._carries: set[int] = set()  # parameters whose owned_grad counts on: the next reduction adds to it

    def _allocate(self, numel: int) -> Tensor:
        group = self.group
        return group.ledger.allocate(Category.GRADIENT, numel, self.dtype, group.kind.device).zero_()

    def _allocate_full(self) -> Tensor:
        return self._allocate(self.group.layout.numel)

    @property
    def ranks(self) -> int:
        """How many contribute to an average."""
        return self.group.comm.size * self.group.replicate.size

    # -- collect

    def collect(self, index: int, *, local: bool) -> None:
        """Takes the gradient that autograd has just put into `p.grad`.

        Args:
            index: of the parameter.
            local: it will not be reduced in this backward, or others of its window were not.
        """
        parameter = self.group.parameters[index]
        grad = parameter.grad
        assert grad is not None
        self.group.check_assigned(index, parameter, self.group.kind.resting)
        again = index in self.ready  # a weight of several reentrant checkpoints gets a gradient from each
        self.ready.add(index)
        self.used.add(index)
        if isinstance(grad, ShardedGradient):
            grad, carried = grad.take_pending(), True
        else:
            carried = False
        if grad.is_sparse:
            grad = grad.to_dense()
        if self.full_grad is None and not local:
            if again:
                grad = self._held[index] + grad
            else:
                (self._carries.add if carried else self._carries.discard)(index)
            self._held[index] = grad
            parameter.grad = None
        else:
            self._accumulate_locally(index, grad, carried)

    def _accumulate_locally(self, index: int, grad: Tensor, carried: bool) -> None:
        if self.full_grad is None:
            self.full_grad = self._allocate_full()
        view = self.group.view_of(self.full_grad, index)
        if grad.data_ptr() == view.data_ptr() and grad.numel():
            return  # autograd has added in place
        if carried and self.group.partition.gradient:
            self._carries.add(index)
            view.copy_(grad)
        elif carried:
            self._keep_average(index, view)
            view.add_(grad)
        else:
            self._carries.discard(index)
            view.copy_(grad)
        self.group.parameters[index].grad = view

    def _keep_average(self, index: int, view: Tensor) -> None:
        """Stage 1, a second reduction without `zero_grad` between: the averaged gradient lies in the owner's part of
        full_grad, and elsewhere lies what was summed already. Turns it into contributions whose mean it is."""
        piece = self.group.piece(index)
        average = self.owned_grad[piece.shard_start : piece.shard_stop].clone()
        view.zero_()
        view.view(-1)[piece.start : piece.stop] = average * self.group.comm.size

    # -- reduce

    @property
    def is_complete(self) -> bool:
        return len(self.ready) == len(self.group.parameters)

    def begin_reduce(self) -> None:
        """Starts to reduce everything collected; parameters without a gradient here count as zeros."""
        group = self.group
        self._settle_unused()
        if group.comm.size == 1:
            return  # a world of one: the gradient is its own average
        for columns in group.layout.slices:
            bucket = self.pool.take()
            full = bucket.full[: len(columns) * group.layout.ranks].view(group.layout.ranks, len(columns))
            incoming = bucket.incoming[: full.numel() - len(columns)].view(-1, len(columns))
            total = bucket.total[: len(columns)]
            self._pack(full, columns)
            name = f"reduce {group.name}[{columns.start}:{columns.stop}]"
            work = group.comm.reduce_scatter(total, full, incoming, name)
            bucket.finish = self._storing(work, total, columns, scratch=bucket.full)
        self._held.clear()

    def _settle_unused(self) -> None:
        """A parameter that this rank did not use contributes what its `p.grad` holds: nothing, or what an earlier
        backward left there and nobody cleared."""
        for index, parameter in enumerate(self.group.parameters):
            if index in self.used:
                continue
            counts_on = isinstance(parameter.grad, ShardedGradient)
            if self.group.partition.gradient:
                (self._carries.add if counts_on else self._carries.discard)(index)
            elif self.full_grad is not None and (counts_on or parameter.grad is None):
                view = self.group.view_of(self.full_grad, index)
                if counts_on:
                    self._keep_average(index, view)
                else:
                    view.zero_()

    def _pack(self, full: Tensor, columns: range) -> None:
        """Fills a bucket ``(N, columns)`` with this rank's contribution."""
        if self.full_grad is not None:
            full.copy_(self.group.rows(self.full_grad)[:, columns.start : columns.stop])
            return
        flat = full.view(-1).zero_()
        for segment in self.group.layout.segments(columns):
            held = self._held.get(segment.index)
            if held is not None:
                stop = segment.bucket_start + segment.stop - segment.start
                flat[segment.bucket_start : stop] = held.reshape(-1)[segment.start : segment.stop]

    def _storing(self, work: Work, total: Tensor, columns: range, scratch: Tensor) -> Callable[[], None]:
        carries = frozenset(self._carries)

        def finish() -> None:
            work.wait()
            if self.group.replicate.size > 1:
                self._reduce_between_replicas(total, columns, scratch)
            self._store(total.div_(self.ranks), columns, carries)

        return finish

    def _reduce_between_replicas(self, total: Tensor, columns: range, scratch: Tensor) -> None:
        """Sums `total` over the ranks that hold the same shard: 1/N of the gradient crosses between shard groups."""
        replicate = self.group.replicate
        rows = total.view(replicate.size, -1)
        room = scratch[: rows.numel()].view_as(rows)  # the slice has left it
        name = f"{self.group.name}[{columns.start}:{columns.stop}]"
        replicate.reduce_scatter(room[0], rows, room[1:], f"reduce {name}").wait()
        replicate.all_gather(rows, room[0], f"gradient {name}").wait()

    def _store(self, average: Tensor, columns: range, carries: frozenset[int]) -> None:
        group, cut = self.group, slice(columns.start, columns.stop)
        if not group.partition.optimizer:
            assert self.full_grad is not None
            rows = group.rows(self.full_grad)[:, cut]
            rows[group.comm.rank].copy_(average)
            group.comm.all_gather(rows, rows[group.comm.rank], f"gradient {group.name}[{cut.start}:{cut.stop}]").wait()
        elif not carries:
            self.owned_grad[cut].copy_(average)
        else:
            for index in range(len(group.parameters)):
                piece = group.piece(index)
                if index not in carries:
                    self.owned_grad[piece.shard_start : piece.shard_stop][_within(piece, columns)].zero_()
            self.owned_grad[cut].add_(average)

    def finish_reduce(self, used: set[int]) -> None:
        """Shows the averaged gradients to the user, once the pool is drained.

        Args:
            used: parameters that had a gradient on any rank; the others' `p.grad` is left as it was.
        """
        for index in used:
            self.group.parameters[index].grad = self.averaged(index)
        self.ready.clear()
        self.used.clear()
        if self.group.partition.gradient:
            self.full_grad = None

    def averaged(self, index: int) -> Tensor:
        """What the user sees as `p.grad` after the reduction."""
        if not self.group.partition.optimizer:
            assert self.full_grad is not None
            return self.group.view_of(self.full_grad, index)
        return ShardedGradient(self, index)

    def end_backward_unreduced(self) -> None:
        self.ready.clear()

    def forget(self) -> None:
        """Drops what a failed backward has collected and not reduced."""
        self.ready.clear()
        self.used.clear()
        self._held.clear()

    def free(self) -> None:
        """Lets go of all gradients and of the buckets; after training."""
        for parameter in self.group.parameters:
            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
        self.full_grad = None
        self.owned_grad = self.owned_grad.new_empty(0)
        self.pool = BucketPool([])

    # -- reading and writing whole gradients

    def adopt(self, index: int) -> None:
        """Takes over a gradient that the user has put into `p.grad` in place of ours; the same one on every rank."""
        grad = self.group.parameters[index].grad
        if grad is None or (isinstance(grad, ShardedGradient) and grad.shard is self and grad.place == index):
            return
        if self.full_grad is not None and grad.data_ptr() == self.group.view_of(self.full_grad, index).data_ptr():
            return
        self.write(index, grad.detach().to(self.dtype))
        self.group.parameters[index].grad = self.averaged(index)

    def piece(self, index: int) -> Tensor:
        return self.group.piece_of(self.owned_grad, index)

    def gather(self, index: int) -> Tensor:
        """The whole averaged gradient of one parameter, in its shape. A collective, of no more than this parameter."""
        group, span = self.group, self.group.layout.spans[index]
        pieces = [group.layout.piece(index, rank) for rank in range(group.comm.size)]
        width = max(piece.numel for piece in pieces)
        mine, place = self.piece(index), pieces[group.comm.rank]
        owners = [rank for rank, piece in enumerate(pieces) if piece.numel]
        if len(owners) == 1:
            whole = mine.clone() if owners == [group.comm.rank] else mine.new_empty(width)
            group.comm.broadcast(whole, f"read gradient {span.name}", source=owners[0])
        else:  # most pieces are as wide as the widest
            rows = mine.new_empty(group.comm.size, width)
            rows[group.comm.rank, : place.numel] = mine
            group.comm.all_gather(rows, rows[group.comm.rank], f"read gradient {span.name}").wait()
            whole = torch.cat([row[: piece.numel] for row, piece in zip(rows, pieces, strict=True)])
        return whole.view(span.shape)

    def write(self, index: int, grad: Tensor) -> None:
        """Replaces this rank's piece by its part of a whole gradient."""
        piece = self.group.piece(index)
        self.owned_grad[piece.shard_start : piece.shard_stop] = grad.reshape(-1)[piece.start : piece.stop]


def _within(piece: Piece, columns: range) -> slice:
    """The part of a piece that lies in these columns of the shard, relative to the piece."""
    start = min(max(columns.start - piece.shard_start, 0), piece.numel)
    stop = min(max(columns.stop - piece.shard_start, start), piece.numel)
    return slice(start, stop)


@final
class ShardedGradient(Tensor):
    """`p.grad` where gradients rest as shards: full shape, gathers when read, in-place writes reach the shard.

    Reading it is a collective: do it on every rank.
    """

    shard: GradientShard
    place: int  # of the parameter in its group
    _pending: Tensor | None

    @staticmethod
    def __new__(cls, shard: GradientShard, index: int) -> "ShardedGradient":
        parameter = shard.group.parameters[index]
        with torch.inference_mode(False):
            self = torch.Tensor._make_wrapper_subclass(
                cls, parameter.shape, dtype=shard.dtype, device=shard.group.kind.device
            )
        self.shard, self.place, self._pending = shard, index, None
        return self

    def __init__(self, shard: GradientShard, index: int) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = self.shard.group.layout.spans[self.place].name
        return f"ShardedGradient({name!r}, shape={tuple(self.shape)}, dtype={self.dtype}; reading gathers)"

    @property
    def data(self) -> "ShardedGradient":
        return ShardedGradient(self.shard, self.place)

    @data.setter
    def data(self, values: Tensor) -> None:
        self.copy_(values)

    def take_pending(self) -> Tensor:
        """What autograd has accumulated onto this gradient since."""
        pending, self._pending = self._pending, None
        assert pending is not None
        return pending

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return ShardedGradient(args[0].shard, args[0].place)
        if func is torch.ops.aten.add_.Tensor and torch._C._current_graph_task_id() != -1:
            args[0]._pending = args[1] if args[0]._pending is None else args[0]._pending + args[1]
            return args[0]
        flat, _ = tree_flatten((args, kwargs))
        whole = {id(item): item.shard.gather(item.place) for item in flat if isinstance(item, cls)}
        result = func(
            *tree_map(lambda item: whole.get(id(item), item), args),
            **tree_map(lambda item: whole.get(id(item), item), kwargs),
        )
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        targets = [item for item in tree_iter(written) if isinstance(item, cls)]
        for item in targets:
            item.shard.write(item.place, whole[id(item)])
        return targets[0] if len(targets) == 1 and func._schema.returns else result
