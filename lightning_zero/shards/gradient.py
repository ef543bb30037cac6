"""`GradientShard`: collects the gradients of a group, reduces them, and keeps the averages.

A gradient takes one route: autograd writes `p.grad` -> `collect` -> (the last of the group) `begin_reduce` ->
`Comm.reduce_scatter` -> `owned_grad`. Where gradients rest in full they accumulate in `full_grad`, and `p.grad` is a
view of it. Where they rest as shards, `p.grad` becomes an `AveragedGradient`, which gathers when it is read.

    full_grad     (N * S,)   accumulation dtype; only where gradients rest in full, or accumulate locally
    owned_grad    (owned,)   accumulation dtype; reduced and averaged; a view of full_grad at stages 0 and 1, else in
                             the tier that the optimizer state is offloaded to

On one rank, unless gradients rest in another tier, nothing is reduced and there are no arrays: the gradient is what
autograd has left in `p.grad`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from lightning_zero.device import is_host
from lightning_zero.shards.bucket import Bucket, BucketPool
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.layout import Chunk, overlap
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.shards.sparse import NOTHING, dense_of
from lightning_zero.shards.squares import Squares
from lightning_zero.tiers.array import Array, InMemory, zeros
from lightning_zero.tiers.ledger import Category, Tier
from lightning_zero.torch_private import edits_of
from lightning_zero.wire.comm import Work


class AveragedGradient(Tensor):
    """The `p.grad` of a parameter after a reduction, if its values rest as shards; see `run.gradient`."""

    def is_of(self, slot: Slot) -> bool:
        """Whether it is the gradient of the parameter at `slot`, of its latest backward."""
        raise NotImplementedError

    def refuse_as_given(self) -> NoReturn:
        """Raises RuntimeError, where the user has put it in place of the gradient that it is not."""
        raise NotImplementedError


@final
class GradientShard:
    """The gradients of one trainable group. They are reduced and accumulated in `dtype`."""

    pool: BucketPool  # whose buckets are wide enough for the group's largest chunk

    def __init__(self, group: ShardGroup, dtype: torch.dtype) -> None:
        self.group = group
        self.dtype = dtype
        setting = group.setting
        # Gradients leave `p.grad`: they are reduced over ranks, or rest in another tier.
        self.travels = group.comm.size > 1 or group.places.gradient != group.places.gathered
        self._is_sharded = self.travels and setting.partition.gradient  # owned_grad is a shard, in an array of its own
        self.full_grad: Tensor | None = None
        self.owned_grad = self._make_owned(0)
        self.squares: Squares | None = None
        if not group.kind.is_idle:
            self._make_room()
        self.ready: set[int] = set()  # indices of parameters that have a gradient in this backward
        self.used: set[int] = set()  # ... or have had one since the last reduction, on this rank
        self._buckets: list[Bucket] = []  # of the reductions under way
        self._held: dict[int, Tensor] = {}  # gradients that wait for the rest of their group, by index
        self._added: dict[int, Tensor] = {}  # gradients that autograd has added to an averaged one in this backward
        self._carries: set[int] = set()  # parameters whose next average is added to the one in owned_grad
        self.editions = [0] * len(group.slots)  # how often another average has taken the place of each one
        for slot in group.slots:
            slot.gradient = self

    @property
    def is_spread(self) -> bool:
        """Whether averaged gradients are elsewhere than in `p.grad`: in shards, or in another tier."""
        return self.travels and (self.group.is_cut or self._is_sharded)

    def _make_room(self) -> None:
        """Allocates what keeps averages until the step, unless it is there."""
        group = self.group
        if self._is_sharded and group.setting.keeps_gradients and not self.owned_grad.numel:
            self.owned_grad = self._make_owned(group.layout.shard_numel)
            leaves = not is_host(group.places.gathered.device) and is_host(group.places.gradient.device)
            self.squares = Squares(self.owned_grad) if leaves and not self.dtype.is_complex else None
        elif self.travels and not self._is_sharded and self.full_grad is None:
            self._make_full()

    def begin_having_gradients(self) -> None:
        """Notes that parameters, which were idle, have gradients from now on, on any rank."""
        self.group.begin_having_gradients()
        self._make_room()

    def _make_owned(self, numel: int) -> Array:
        group = self.group
        return zeros(Category.GRADIENT, numel, self.dtype, group.places.gradient, group.setting.ledger)

    def _make_full(self) -> Tensor:
        group, place = self.group, self.group.places.gathered
        self.full_grad = group.setting.ledger.allocate(Category.GRADIENT, group.layout.numel, self.dtype, place).zero_()
        if not self._is_sharded:
            self.owned_grad = InMemory(self.full_grad[group.own_range], place)
        return self.full_grad

    # -- collect

    def begin_backward(self) -> None:
        """Forgets gradients that earlier backwards have only accumulated on this rank, and that users have dropped
        since, as `zero_grad` does."""
        self.used = {index for index in self.used if self.group.slots[index].local.grad is not None}

    def add(self, slot: Slot, grad: Tensor) -> None:
        """Keeps a gradient that autograd adds to an averaged one in backward, until `collect` takes it."""
        self._added[slot.index] = self._added[slot.index] + grad if slot.index in self._added else grad

    @contextmanager
    def kept_apart(self, slot: Slot) -> Iterator[None]:
        """Keeps the gradient that this backward has put into `p.grad`, while an earlier backward is settled inside."""
        with no_interception():
            local: Any = slot.local
            fresh = local.grad
            if isinstance(fresh, AveragedGradient):
                yield
                return
            local.grad = None
            yield
            if isinstance(local.grad, AveragedGradient):
                self.add(slot, fresh)
            else:
                local.grad = fresh

    def collect(self, slot: Slot, *, local: bool) -> bool:
        """Takes the gradient that autograd has just put into `p.grad`. If `local`, this backward does not reduce it.
        Returns whether it completes the group."""
        index, grad = slot.index, slot.local.grad
        assert grad is not None
        slot.check_assigned(slot.parameter, self.group.kind.resting)
        again = index in self.ready  # a weight used in several reentrant checkpoints gets a gradient from each
        self.ready.add(index)
        self.used.add(index)
        carried = isinstance(grad, AveragedGradient)
        if isinstance(grad, AveragedGradient):
            if not grad.is_of(slot):
                grad.refuse_as_given()
            grad = self._added.pop(index)
        elif not again:
            self.editions[index] += 1
        if grad.is_sparse:
            grad = dense_of(grad) if slot.is_sparse else grad.to_dense()
        elif slot.is_sparse:
            raise RuntimeError(
                f"SparseAdam does not support dense gradients, and parameter {slot.name!r} has one. Give it embeddings "
                "that are made with sparse=True, or consider Adam."
            )
        if not self.travels:
            slot.local.grad = grad
        elif local or not self._is_sharded or self.full_grad is not None:  # after a backward that was not reduced, too
            self._accumulate_locally(slot, grad, carried)
        else:
            if again:
                grad = self._held[index] + grad
            else:
                self._carry(index, carried)
            self._held[index] = grad
            slot.local.grad = None
        return self.is_complete and not again

    def _carry(self, index: int, carried: bool) -> None:
        """Notes whether the next average of a parameter is added to the one in owned_grad, or replaces it."""
        (self._carries.add if carried else self._carries.discard)(index)

    def _accumulate_locally(self, slot: Slot, grad: Tensor, carried: bool) -> None:
        view = slot.view(self._make_full() if self.full_grad is None else self.full_grad)
        if grad.data_ptr() == view.data_ptr() and grad.numel():
            return  # autograd has added in place
        if carried and not self._is_sharded:
            self._keep_average(slot, view)
            view.add_(grad)
        else:
            self._carry(slot.index, carried)
            view.copy_(grad)
        slot.local.grad = view

    def _keep_average(self, slot: Slot, view: Tensor) -> None:
        """Turns an averaged gradient into contributions whose mean it is, so that the next reduction adds to it (stage
        1, without `zero_grad` since). Only the owner's part of full_grad holds the average. Elsewhere are gradients
        that it contains already, and that must not count again."""
        average = self.owned_grad.read(slot.piece.in_shard).clone()
        view.zero_()
        view.view(-1)[slot.piece.start : slot.piece.stop] = average * self.group.comm.size

    # -- reduce

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has a gradient in this backward."""
        return len(self.ready) == len(self.group.slots)

    def begin_reduce(self) -> None:
        """Starts to reduce all that was collected. A parameter without a gradient on this rank counts as zeros."""
        if not self.travels:
            return
        self._settle_unused()
        if self._is_sharded and not self.group.setting.keeps_gradients:
            self.owned_grad = self._make_owned(self.group.layout.shard_numel)
        lands, comm = self._lands_in_place, self.group.comm
        with self.pool.beside():
            for chunk in self.group.layout.chunks:
                bucket = self.pool.take()
                self._buckets.append(bucket)
                bucket.holder = self
                if self.full_grad is not None and chunk.is_whole:  # contiguous: it is sent from where it is
                    full = self.group.matrix(self.full_grad, chunk.of)
                else:
                    full = self._pack(chunk, bucket)
                scratch = bucket.scratch[: comm.scratch_rows * chunk.width].view(-1, chunk.width)
                name = f"reduce {self.group.name}[{chunk.of.start}+{chunk.start}]"
                total = self.owned_grad.editable(chunk.in_shard) if lands else bucket.total[: chunk.width]
                work = comm.reduce_scatter(total, full, scratch, name, divisor=comm.size if lands else 1)
                kept = None if lands else total
                bucket.finish = partial(self._store, work, kept, chunk, frozenset(self._carries), name)
        self.pool.keep([*self._held.values()])
        self._held.clear()

    @property
    def _lands_in_place(self) -> bool:
        """Whether the average that is being reduced replaces the one in owned_grad, in the same memory: then it needs
        no copy more. Where work is asynchronous, earlier work that is under way may still read owned_grad."""
        group, owned = self.group, self.owned_grad
        replaces = self.is_spread and not self._carries and group.setting.mesh.replicate.size == 1
        is_there = isinstance(owned, InMemory) and is_host(owned.place.device) and is_host(group.places.gathered.device)
        return replaces and is_there and not group.comm.is_asynchronous

    def _settle_unused(self) -> None:
        """Prepares the parameters that this rank did not use. Each contributes what its `p.grad` holds: nothing, or
        what an earlier backward left there and nobody cleared."""
        for slot in self.group.slots:
            if slot.index in self.used:
                continue
            grad = slot.local.grad
            carried = isinstance(grad, AveragedGradient)
            self.editions[slot.index] += not carried
            if self._is_sharded:
                self._carry(slot.index, carried)
            elif self.full_grad is not None and carried:
                self._keep_average(slot, slot.view(self.full_grad))
            if self.full_grad is not None and grad is None:
                slot.view(self.full_grad).fill_(_nothing_of(slot))

    def _pack(self, chunk: Chunk, bucket: Bucket) -> Tensor:
        """Copies what this rank sends of a chunk into a bucket, ``(N, width)``. Between and after the gradients are
        zeros: padding must not carry NaNs."""
        group, of = self.group, chunk.of
        packed = bucket.full[: group.layout.ranks * chunk.width].view(-1, chunk.width)
        if self.full_grad is not None:
            return packed.copy_(group.matrix(self.full_grad, of)[:, chunk.start : chunk.stop])
        if not chunk.is_whole:  # such a slice holds one parameter
            index = of.parameters.start
            if index in self._held:
                _pack_columns(packed, self._held[index], chunk)
            else:
                packed.fill_(_nothing_of(group.slots[index]))
            return packed
        flat, end = packed.view(-1), 0
        for index in of.parameters:
            held, span = self._held.get(index), group.layout.spans[index]
            start = span.offset - of.start
            if start > end:
                flat[end:start].zero_()
            end = start + span.numel
            if held is None:
                flat[start:end].fill_(_nothing_of(group.slots[index]))
            else:
                flat[start:end].view(span.shape).copy_(held)
        flat[end:].zero_()
        return packed

    def _store(self, work: Work, total: Tensor | None, chunk: Chunk, carries: frozenset[int], name: str) -> None:
        """Waits for the reduction of a chunk, and stores the average, unless it has landed there (None)."""
        work.wait()
        if total is None:
            return
        group = self.group
        if group.setting.mesh.replicate.size > 1:
            self._reduce_between_replicas(total, name)
        contributions = group.comm.size * group.setting.mesh.replicate.size
        if not self.is_spread:
            assert self.full_grad is not None
            rows = group.matrix(self.full_grad, chunk.of)
            torch.div(total, contributions, out=rows[group.comm.rank, chunk.start : chunk.stop])
            if chunk.stop == chunk.of.width:  # the slice's last
                group.comm.all_gather(rows, rows[group.comm.rank], f"gradient {group.name}[{chunk.of.start}]").wait()
        elif carries:
            with self.owned_grad.edit(chunk.in_shard) as owned:
                for slot in group.slots:
                    if slot.index not in carries:
                        stale = overlap(slot.piece.in_shard, chunk.in_shard)
                        within = slice(stale.start - chunk.in_shard.start, stale.stop - chunk.in_shard.start)
                        owned[within].fill_(_nothing_of(slot))
                owned.add_(total.div_(contributions).to(owned.device))
        elif isinstance(self.owned_grad, InMemory) and self.owned_grad.place.device == total.device:
            with self.owned_grad.edit(chunk.in_shard) as owned:
                torch.div(total, contributions, out=owned)  # without a copy after it
        elif self.squares is not None:
            self.squares.write(chunk, total.div_(contributions), group.slots)
        else:
            self.owned_grad.write(chunk.in_shard, total.div_(contributions))

    def _reduce_between_replicas(self, total: Tensor, name: str) -> None:
        """Sums `total` over the ranks that hold the same shard: 1/N of the gradient crosses between shard groups."""
        replicate, place = self.group.setting.mesh.replicate, self.group.places.gathered
        rows = total.view(replicate.size, -1)
        shape = (1 + replicate.scratch_rows, rows.shape[1])
        beside = self.group.setting.ledger.allocate(Category.BUCKET, math.prod(shape), rows.dtype, place).view(shape)
        mine = beside[0]
        replicate.reduce_scatter(mine, rows, beside[1:], name).wait()
        replicate.all_gather(rows, mine, name).wait()

    def wait(self) -> None:
        """Waits until all reductions under way are stored."""
        if self.travels:
            # Not those that have gone to another group since: it is being reduced while this one is stepped.
            self.pool.settle([bucket for bucket in self._buckets if bucket.holder is self])
            self._buckets.clear()

    def let_go(self) -> None:
        """Drops the averaged gradients, which have been stepped."""
        if self._is_sharded:
            self.owned_grad = self._make_owned(0)
        for slot in self.group.slots:
            with no_interception():
                slot.local.grad = None

    def end_reduce(self) -> None:
        """Makes ready for the next backward, once all reductions are stored."""
        self._buckets.clear()
        self.ready.clear()
        self.used.clear()
        if self._is_sharded:
            self.full_grad = None

    def end_backward_unreduced(self) -> None:
        """Makes ready for the next backward, after one that has only accumulated on this rank."""
        self.ready.clear()

    def forget(self) -> None:
        """Drops what a failed backward has collected and not reduced."""
        self.ready.clear()
        self.used.clear()
        self._held.clear()
        self._added.clear()

    def free(self) -> None:
        """Frees gradients and buckets permanently, after training."""
        for slot in self.group.slots:
            with no_interception():
                slot.local.grad = None
                slot.parameter.grad_dtype = self.group.kind.declared  # the dtype that its values have again at once
        self.full_grad = self.squares = None
        place = self.group.places.gathered
        self.owned_grad = InMemory(torch.empty(0, dtype=self.dtype, device=place.device), place)
        self.pool = BucketPool([])

    # -- averaged gradients

    def piece(self, slot: Slot) -> Tensor:
        """Returns the averaged gradient of what this rank steps, in `Slot.stepped_shape`. Read-only."""
        if self.travels:
            return self.owned_grad.read(slot.piece.in_shard).view(slot.stepped_shape)
        assert slot.local.grad is not None
        return slot.local.grad.detach()

    @contextmanager
    def edit_piece(self, slot: Slot) -> Iterator[Tensor]:
        """Gives out the values of `piece`, and keeps the edits made inside."""
        self.group.catch_up_alone()  # a postponed step is to see the gradient as it was before the edit
        with self.owned_grad.edit(slot.piece.in_shard) if self.travels else nullcontext(self.piece(slot)) as piece:
            yield piece

    @property
    def is_collected(self) -> bool:
        """Whether each gradient is to be collected as it comes; tensor-parallel ranks may have to sum it."""
        setting = self.group.setting
        return self.travels or not setting.keeps_gradients or setting.mesh.tensor.size > 1

    @property
    def is_packed(self) -> bool:
        """Whether gradients are copied into buckets: those that rest as shards, and those larger than a bucket."""
        return self._is_sharded or not all(chunk.is_whole for chunk in self.group.layout.chunks)

    @property
    def is_on_disk(self) -> bool:
        return self.owned_grad.place.tier is Tier.DISK

    def version(self, slot: Slot) -> int:
        """Returns a number that differs after each change of the parameter's averaged gradient."""
        return self.owned_grad.version if self.travels else edits_of(self.piece(slot))

    def is_shown(self, slot: Slot, grad: Tensor) -> bool:
        """Whether `grad` shows the averaged gradient, and is no tensor that a user has put into `p.grad`."""
        if not self.travels:
            return True
        if isinstance(grad, AveragedGradient):
            return grad.is_of(slot)
        return self.full_grad is not None and grad.data_ptr() == slot.view(self.full_grad).data_ptr()

    def replace(self, slot: Slot, grad: Tensor) -> None:
        """Does `write` for another gradient in place of the average."""
        self.editions[slot.index] += 1
        self.write(slot, grad)

    def write(self, slot: Slot, grad: Tensor) -> None:
        """Replaces this rank's piece by the one of `grad`, a whole gradient."""
        self.group.catch_up_alone()
        self._make_room()  # the parameter may be idle
        self.owned_grad.write(slot.piece.in_shard, grad.reshape(-1)[slot.piece.start : slot.piece.stop])

    def gather(self, slot: Slot) -> Tensor:
        """Returns the whole averaged gradient of one parameter, in its shape. Collective: all-gathers its slice."""
        layout, comm = self.group.layout, self.group.comm
        of = layout.slice_of(slot.index)
        ledger, place = self.group.setting.ledger, self.group.places.gathered
        rows = ledger.allocate(Category.GATHERED, layout.ranks * of.width, self.dtype, place)
        rows = rows.view(layout.ranks, of.width)
        own = self.owned_grad.copy_to(of.in_shard, rows[comm.rank])
        comm.all_gather(rows, own, f"read gradient {slot.name}").wait()
        start = slot.offset - of.start
        return rows.view(-1)[start : start + slot.numel].view(slot.shape)


def _nothing_of(slot: Slot) -> float:
    """Returns what a rank contributes that has no gradient of a parameter."""
    return NOTHING if slot.is_sparse else 0.0


def _pack_columns(packed: Tensor, grad: Tensor, chunk: Chunk) -> None:
    """Fills `packed` ``(N, width)`` with the columns of a chunk, whose slice holds one gradient padded with zeros."""
    flat, width = grad.reshape(-1), chunk.of.width
    rows, rest = divmod(flat.numel(), width)
    packed[:rows].copy_(flat[: rows * width].view(rows, width)[:, chunk.start : chunk.stop])
    if rows == len(packed):
        return
    packed[rows:].zero_()
    stop = max(chunk.start, min(rest, chunk.stop))
    packed[rows, : stop - chunk.start].copy_(flat[rows * width + chunk.start : rows * width + stop])
