"""`GroupGradient`: collects the gradients of a group in backward, and reduces them.

A gradient takes one route: autograd writes `p.grad` -> `collect` -> (the last of the group) `begin_reduce` ->
`Comm.reduce_scatter` -> `owned_grad` (of `Averaged`). Where gradients rest in full they accumulate in `full_grad`, and
`p.grad` is a view of it. Where they rest as shards, `p.grad` becomes an `AveragedGradient`, which gathers when it is
read. On one rank, unless gradients rest in another tier, nothing is reduced.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.device import is_host
from lightning_zero.shards.averaged import Averaged, AveragedGradient
from lightning_zero.shards.beside import Beside
from lightning_zero.shards.bucket import Bucket, BucketPool
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.layout import Chunk, overlap
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.shards.sparse import as_dense, nothing_of
from lightning_zero.tiers.array import InMemory
from lightning_zero.wire.comm import Work


def travels(group: ShardGroup) -> bool:
    """Whether gradients leave `p.grad`: they are reduced over ranks, or rest in another tier."""
    return group.comm.size > 1 or group.places.gradient != group.places.gathered


def is_packed(group: ShardGroup) -> bool:
    """Whether gradients are copied into buckets: those that rest as shards, and those larger than a bucket."""
    is_sharded = travels(group) and group.setting.partition.gradient
    return is_sharded or not all(chunk.is_whole for chunk in group.layout.chunks)


@final
class GroupGradient:
    """The gradients of one trainable group. They are reduced and accumulated in `dtype`, and travel in the buckets of
    `pool`, which are wide enough for the largest chunk."""

    def __init__(self, group: ShardGroup, dtype: torch.dtype, pool: BucketPool) -> None:
        self.group = group
        self.dtype = dtype
        self.pool = pool
        self.travels = travels(group)
        self.averaged = Averaged(group, dtype, travels=self.travels)  # what has been reduced
        self.ready: set[int] = set()  # indices of parameters that have a gradient in this backward
        self.used: set[int] = set()  # ... or have had one since the last reduction, on this rank
        self._buckets: list[Bucket] = []  # of the reductions under way
        self._held: dict[int, Tensor] = {}  # gradients that wait for the rest of their group, by index
        self.beside = Beside(self.averaged)  # gradients that wait to be added to averages
        self._carries: set[int] = set()  # parameters whose next average is added to the one in owned_grad
        self._written_over: set[int] = set()  # parameters of which a gradient since lies where their average was
        for slot in group.slots:
            slot.gradient = self

    def has_written_over(self, slot: Slot) -> bool:
        """Whether a backward that is not reduced yet has put gradients where the average of a parameter was."""
        return slot.index in self._written_over or (bool(self._buckets) and not self.averaged.is_sharded)

    def begin_having_gradients(self) -> None:
        """Notes that parameters, which were idle, have gradients from now on, on any rank."""
        self.group.begin_having_gradients()
        self.averaged.make_room()

    @property
    def is_collected(self) -> bool:
        """Whether each gradient is to be collected as it comes; tensor-parallel ranks may have to sum it."""
        setting = self.group.setting
        return self.travels or not setting.keeps_gradients or setting.mesh.tensor.size > 1

    # -- collect

    def begin_backward(self) -> dict[int, Tensor]:
        """Forgets gradients that earlier backwards have only accumulated on this rank, and that users have dropped
        since, as `zero_grad` does. Returns copies of what users have put in their place, by index."""
        if not (self.used or self.beside.kept or self.beside.viewed):
            return {}  # as nearly always
        self.beside.end_views()
        slots, averaged = self.group.slots, self.averaged
        grads = {index: slots[index].local.read_grad() for index in {*self.used, *self.beside.kept}}
        for index in self.beside.kept.keys() - {at for at, grad in grads.items() if isinstance(grad, AveragedGradient)}:
            self.beside.drop(index)
        plain = {at: grad for at, grad in grads.items() if grad is not None and not isinstance(grad, AveragedGradient)}
        self.used = {*plain, *self.beside.kept}  # what users have written into an average is there already
        return {at: grad.clone() for at, grad in plain.items() if not averaged.is_shown(slots[at], grad)}

    def replace_accumulated(self, given: Mapping[int, Tensor]) -> None:
        """Has this backward add to what users have put in place of accumulated gradients."""
        for index, grad in given.items():
            slot = self.group.slots[index]
            self._accumulate_locally(slot, as_dense(grad, slot), carried=False)

    @contextmanager
    def kept_apart(self, slot: Slot) -> Iterator[None]:
        """Keeps the gradient that this backward has put into `p.grad`, while an earlier backward is settled inside."""
        with no_interception():
            local: Any = slot.local
            fresh = local.read_grad()
            if isinstance(fresh, AveragedGradient):
                yield
                return
            local.set_grad(None)
            yield
            if isinstance(local.read_grad(), AveragedGradient):
                self.beside.add(slot, fresh)
            else:
                local.set_grad(fresh)

    def collect(self, slot: Slot, *, local: bool) -> bool:
        """Takes the gradient that autograd has just put into `p.grad`. If `local`, this backward does not reduce it.
        Returns whether it completes the group."""
        index, grad, averaged = slot.index, slot.local.read_grad(), self.averaged
        assert grad is not None
        slot.check_assigned(slot.parameter, self.group.kind.resting)
        again = index in self.ready  # a weight used in several reentrant checkpoints gets a gradient from each
        self.ready.add(index)
        self.used.add(index)
        carried = False
        if isinstance(grad, AveragedGradient):
            if not grad.is_of(slot):
                grad.refuse_as_given()
            grad, carried = self.beside.take(index)
        elif self.beside.fresh or self.beside.kept:
            self.beside.drop_all(index)
        if not (carried or again):
            averaged.editions[index] += 1
        if grad.is_sparse or slot.is_sparse:
            grad = as_dense(grad, slot)
        if not self.travels:
            slot.local.set_grad(grad)
        elif local and carried:
            self.beside.keep(slot, grad)
        elif local or not averaged.is_sharded or averaged.full_grad is not None:  # after one that was not reduced, too
            self._accumulate_locally(slot, grad, carried=carried)
        else:
            if again:
                grad = self._held[index] + grad
            else:
                self._carry(index, carried)
            self._held[index] = grad
            slot.local.set_grad(None)
        return self.is_complete and not again

    def note_taken(self, slot: Slot) -> None:
        """Notes that a hook of the user's has taken the gradient out of `p.grad` before it was collected."""
        self.beside.drop_all(slot.index)
        self.used.discard(slot.index)

    def _carry(self, index: int, carried: bool) -> None:
        """Notes whether the next average of a parameter is added to the one in owned_grad, or replaces it."""
        (self._carries.add if carried else self._carries.discard)(index)

    def _accumulate_locally(self, slot: Slot, grad: Tensor, *, carried: bool) -> None:
        averaged = self.averaged
        if not averaged.is_sharded:
            self._written_over.add(slot.index)
        view = slot.view(averaged.make_full() if averaged.full_grad is None else averaged.full_grad)
        if grad.data_ptr() == view.data_ptr() and grad.numel():
            return  # autograd has added in place
        if carried and not averaged.is_sharded:
            self._keep_average(slot, view)
            view.add_(grad)
        else:
            self._carry(slot.index, carried)
            view.copy_(grad)
        slot.local.set_grad(view)

    def _keep_average(self, slot: Slot, view: Tensor) -> None:
        """Turns an averaged gradient into contributions whose mean it is, so that the next reduction adds to it (stage
        1, without `zero_grad` since). Only the owner's part of full_grad holds the average. Elsewhere are gradients
        that it contains already, and that must not count again."""
        average = self.averaged.owned_grad.read(slot.piece.in_shard).clone()
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
        self._prepare_unused()
        self._collect_beside()
        averaged, comm = self.averaged, self.group.comm
        if averaged.is_sharded and not self.group.setting.keeps_gradients:
            averaged.make_shard()
        lands = self._lands_in_place
        with self.pool.beside():
            for chunk in self.group.layout.chunks:
                bucket = self.pool.take()
                self._buckets.append(bucket)
                bucket.holder = self
                if averaged.full_grad is not None and chunk.is_whole:  # contiguous: it is sent from where it is
                    full = self.group.matrix(averaged.full_grad, chunk.of)
                else:
                    full = self._pack(chunk, bucket)
                scratch = bucket.scratch[: comm.scratch_rows * chunk.width].view(-1, chunk.width)
                name = f"reduce {self.group.name}[{chunk.of.start}+{chunk.start}]"
                total = averaged.owned_grad.editable(chunk.in_shard) if lands else bucket.total[: chunk.width]
                work = comm.reduce_scatter(total, full, scratch, name, divisor=comm.size if lands else 1)
                kept = None if lands else total
                bucket.finish = partial(self._store, work, kept, chunk, frozenset(self._carries), name)
        self.pool.keep([*self._held.values()])
        self._held.clear()

    @property
    def _lands_in_place(self) -> bool:
        """Whether the average that is being reduced replaces the one in owned_grad, in the same memory: then it needs
        no copy more. Where work is asynchronous, earlier work that is under way may still read owned_grad."""
        group, owned = self.group, self.averaged.owned_grad
        replaces = self.averaged.is_spread and not self._carries and group.setting.mesh.replicate.size == 1
        is_there = isinstance(owned, InMemory) and is_host(owned.place.device) and is_host(group.places.gathered.device)
        return replaces and is_there and not group.comm.is_asynchronous

    def _prepare_unused(self) -> None:
        """Prepares the parameters that this rank did not use. Each contributes what its `p.grad` holds: nothing, what
        an earlier backward left there and nobody cleared, or what the user has put there."""
        averaged = self.averaged
        for slot in self.group.slots:
            if slot.index in self.used:
                continue
            grad = slot.local.read_grad()
            carried = isinstance(grad, AveragedGradient)
            averaged.editions[slot.index] += not carried
            if averaged.is_sharded:
                self._carry(slot.index, carried)
            elif averaged.full_grad is not None and carried:
                self._keep_average(slot, slot.view(averaged.full_grad))
            if averaged.full_grad is not None and grad is None:
                slot.view(averaged.full_grad).fill_(nothing_of(slot))
            elif grad is not None and not averaged.is_shown(slot, grad):  # it stays in `p.grad` unless others use it
                given = as_dense(grad, slot)
                if averaged.full_grad is None:
                    self._held[slot.index] = given
                else:
                    slot.view(averaged.full_grad).copy_(given)

    def _collect_beside(self) -> None:
        """Collects what is beside averages that this backward has added nothing to, unless users have dropped those
        since it has failed."""
        for index in [*self.beside.kept]:
            slot, (grad, carried) = self.group.slots[index], self.beside.take_kept(index)
            if not isinstance(slot.local.read_grad(), AveragedGradient):
                continue
            self.averaged.editions[index] += not carried
            if self.averaged.is_sharded and self.averaged.full_grad is None:
                self._carry(index, carried)
                self._held[index] = grad
            else:
                self._accumulate_locally(slot, grad, carried=carried)

    def _pack(self, chunk: Chunk, bucket: Bucket) -> Tensor:
        """Copies what this rank sends of a chunk into a bucket, ``(N, width)``. Between and after the gradients are
        zeros: padding must not carry NaNs."""
        group, of = self.group, chunk.of
        packed = bucket.full[: group.layout.ranks * chunk.width].view(-1, chunk.width)
        full_grad = self.averaged.full_grad
        if full_grad is not None:
            return packed.copy_(group.matrix(full_grad, of)[:, chunk.start : chunk.stop])
        if not chunk.is_whole:  # such a slice holds one parameter
            index = of.parameters.start
            if index in self._held:
                _pack_columns(packed, self._held[index], chunk)
            else:
                packed.fill_(nothing_of(group.slots[index]))
            return packed
        flat, end = packed.view(-1), 0
        for index in of.parameters:
            held, span = self._held.get(index), group.layout.spans[index]
            start = span.offset - of.start
            if start > end:
                flat[end:start].zero_()
            end = start + span.numel
            if held is None:
                flat[start:end].fill_(nothing_of(group.slots[index]))
            else:
                flat[start:end].view(span.shape).copy_(held)
        flat[end:].zero_()
        return packed

    def _store(self, work: Work, total: Tensor | None, chunk: Chunk, carries: frozenset[int], name: str) -> None:
        """Waits for the reduction of a chunk, and stores the average, unless it has landed there (None)."""
        work.wait()
        if total is None:
            return
        group, averaged = self.group, self.averaged
        if group.setting.mesh.replicate.size > 1:
            group.sum_over_replicas(total, name)
        contributions = averaged.ranks
        if not averaged.is_spread:
            assert averaged.full_grad is not None
            rows = group.matrix(averaged.full_grad, chunk.of)
            torch.div(total, contributions, out=rows[group.comm.rank, chunk.start : chunk.stop])
            if chunk.stop == chunk.of.width:  # the slice's last
                group.comm.all_gather(rows, rows[group.comm.rank], f"gradient {group.name}[{chunk.of.start}]").wait()
        elif carries:
            with averaged.owned_grad.edit(chunk.in_shard) as owned:
                for slot in group.slots:
                    if slot.index not in carries:
                        stale = overlap(slot.piece.in_shard, chunk.in_shard)
                        within = slice(stale.start - chunk.in_shard.start, stale.stop - chunk.in_shard.start)
                        owned[within].fill_(nothing_of(slot))
                owned.add_(total.div_(contributions).to(owned.device))
        elif isinstance(averaged.owned_grad, InMemory) and averaged.owned_grad.place.device == total.device:
            with averaged.owned_grad.edit(chunk.in_shard) as owned:
                torch.div(total, contributions, out=owned)  # without a copy after it
        elif averaged.squares is not None:
            averaged.squares.write(chunk, total.div_(contributions), group.slots)
        else:
            averaged.owned_grad.write(chunk.in_shard, total.div_(contributions))

    def wait(self) -> None:
        """Waits until all reductions under way are stored."""
        if self.travels:
            # Not those that have gone to another group since: it is being reduced while this one is stepped.
            self.pool.drain([bucket for bucket in self._buckets if bucket.holder is self])
            self._buckets.clear()

    def end_reduce(self) -> None:
        """Makes ready for the next backward, once all reductions are stored."""
        self._buckets.clear()
        self.ready.clear()
        self.used.clear()
        self._written_over.clear()
        self.averaged.drop_full()

    def end_backward_unreduced(self) -> None:
        """Makes ready for the next backward, after one that has only accumulated on this rank."""
        self.ready.clear()

    def drop_accumulated(self, slot: Slot) -> None:
        """Drops what backwards have accumulated on this rank, as another gradient has taken its place: the next
        reduction is not to add it once more."""
        self.beside.drop(slot.index)
        self._written_over.discard(slot.index)
        if self.averaged.is_sharded and self.averaged.full_grad is not None:
            self.used.discard(slot.index)
            slot.view(self.averaged.full_grad).fill_(nothing_of(slot))

    def forget(self) -> None:
        """Drops what a failed backward has collected and not reduced."""
        self.ready.clear()
        self.used.clear()
        self._held.clear()
        self.beside.clear()

    def free(self) -> None:
        """Frees gradients and buckets permanently, after training."""
        for slot in self.group.slots:
            with no_interception():
                slot.local.set_grad(None)
                slot.parameter.grad_dtype = self.group.kind.declared  # the dtype that its values have again at once
        self.averaged.free()
        self.pool = BucketPool([], self.group.setting)


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


def gradient_of(slot: Slot) -> GroupGradient:
    """Returns the gradients of the group of a parameter that trains."""
    assert slot.gradient is not None, slot.name
    return slot.gradient


def averaged_of(slot: Slot) -> Averaged:
    """Returns the averaged gradients of the group of a parameter that trains."""
    assert slot.gradient is not None, slot.name
    return slot.gradient.averaged


def set_grad_dtype(parameter: Parameter, dtype: torch.dtype) -> None:
    """Lets `p.grad` have the accumulation dtype where the parameter rests in a narrower one. Then autograd sums the
    gradients of several uses in it too, bit-equal to autocast over fp32 weights."""
    if parameter.grad_dtype != dtype:
        parameter.grad_dtype = dtype
