"""`GradientShard`: collect and reduce, the life of a group's gradients; and the buckets they travel in.

A gradient flows down once: autograd writes `p.grad` -> `collect` -> (last one in) `begin_reduce` ->
`Comm.reduce_scatter` -> `owned_grad`. Where gradients rest in full they accumulate in `full_grad`, and `p.grad` is a
view of it; where they rest as shards, `p.grad` is afterwards an `AveragedGradient`, which gathers when it is read.

    full_grad     (N * S,)   accumulation dtype; only where gradients rest in full, or accumulate locally
    owned_grad    (owned,)   accumulation dtype; reduced and averaged; a view of full_grad at stages 0 and 1, else in
                             the tier that the optimizer state is offloaded to

On one rank nothing travels but to another tier: the gradient is what autograd has left in `p.grad`, and there are no
arrays.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from lightning_zero.shards.bucket import Bucket, BucketPool
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.layout import Chunk, Slice
from lightning_zero.shards.slot import Slot
from lightning_zero.tiers.array import Array, InMemory, zeros
from lightning_zero.tiers.ledger import Category, Tier
from lightning_zero.wire.comm import Work


class AveragedGradient(Tensor):
    """What `p.grad` is after a reduction, where the values rest as shards; see `views.gradient`."""

    def is_of(self, slot: Slot) -> bool:
        """Whether it is the gradient of the parameter at `slot`."""
        raise NotImplementedError


@final
class GradientShard:
    """The gradients of one trainable group: they travel, are summed and accumulate in `dtype`."""

    pool: BucketPool  # they travel in; wide enough for the group's largest chunk

    def __init__(self, group: ShardGroup, dtype: torch.dtype) -> None:
        self.group = group
        self.dtype = dtype
        self.travels = group.comm.size > 1 or group.places.gradient != group.places.gathered
        self.full_grad: Tensor | None = None
        self.owned_grad = self._make_owned(group.layout.shard_numel if self._keeps_shard else 0)
        if self.travels and not self._rests_cut:
            self._make_full()
        self.ready: set[int] = set()  # indices of parameters that have a gradient in this backward
        self.used: set[int] = set()  # ... or had one since the last reduction, on this rank
        self._buckets: list[Bucket] = []  # that carry what is being reduced
        self._held: dict[int, Tensor] = {}  # gradients that wait for the rest of their group
        self._added: dict[int, Tensor] = {}  # what autograd has added to an averaged gradient in this backward
        self._carries: set[int] = set()  # parameters whose owned_grad counts on: the next reduction adds to it
        for slot in group.slots:
            slot.gradient = self

    @property
    def _rests_cut(self) -> bool:
        return self.travels and self.group.setting.partition.gradient

    @property
    def is_collected(self) -> bool:
        """Whether gradients are wanted as they come: also those that tensor-parallel ranks may have to sum."""
        return self.travels or not self.group.setting.keeps_gradients or self.group.setting.mesh.tensor.size > 1

    @property
    def is_spread(self) -> bool:
        """Whether averaged gradients are elsewhere than in `p.grad`: in shards, or in another tier."""
        return self.travels and (self.group.is_cut or self._rests_cut)

    @property
    def _keeps_shard(self) -> bool:
        return self._rests_cut and self.group.setting.keeps_gradients

    def _make_owned(self, numel: int) -> Array:
        group = self.group
        return zeros(Category.GRADIENT, numel, self.dtype, group.places.gradient, group.setting.ledger)

    def _make_full(self) -> Tensor:
        group, place = self.group, self.group.places.gathered
        self.full_grad = group.setting.ledger.allocate(Category.GRADIENT, group.layout.numel, self.dtype, place).zero_()
        if not self._rests_cut:
            self.owned_grad = InMemory(self.full_grad[group.own_range], place)
        return self.full_grad

    @property
    def is_packed(self) -> bool:
        """Whether gradients are copied into buckets: where they rest as shards, and what is larger than a bucket."""
        return self._rests_cut or not all(chunk.is_whole for chunk in self.group.layout.chunks)

    # -- collect

    def add(self, slot: Slot, grad: Tensor) -> None:
        """Autograd adds to an averaged gradient, in backward; `collect` follows."""
        self._added[slot.index] = self._added[slot.index] + grad if slot.index in self._added else grad

    @contextmanager
    def kept_apart(self, slot: Slot) -> Iterator[None]:
        """While an earlier backward is settled, what this one has put into `p.grad` already is not to be lost."""
        with torch._C.DisableTorchFunctionSubclass():
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

    def collect(self, slot: Slot, *, local: bool) -> None:
        """Takes the gradient that autograd has just put into `p.grad`; `local` if it will not be reduced in this
        backward, or others of its window were not."""
        index, grad = slot.index, slot.local.grad
        assert grad is not None
        self.group.check_assigned(slot, slot.parameter, self.group.kind.resting)
        again = index in self.ready  # a weight of several reentrant checkpoints gets a gradient from each
        self.ready.add(index)
        self.used.add(index)
        carried = isinstance(grad, AveragedGradient)
        if carried:
            grad = self._added.pop(index)
        if grad.is_sparse:
            grad = grad.to_dense()
        if not self.travels:
            slot.local.grad = grad
        elif self.full_grad is None and not local:
            if again:
                grad = self._held[index] + grad
            else:
                (self._carries.add if carried else self._carries.discard)(index)
            self._held[index] = grad
            slot.local.grad = None
        else:
            self._accumulate_locally(slot, grad, carried)

    def _accumulate_locally(self, slot: Slot, grad: Tensor, carried: bool) -> None:
        view = slot.view(self._make_full() if self.full_grad is None else self.full_grad)
        if grad.data_ptr() == view.data_ptr() and grad.numel():
            return  # autograd has added in place
        if carried and not self._rests_cut:
            self._keep_average(slot, view)
            view.add_(grad)
        else:
            (self._carries.add if carried else self._carries.discard)(slot.index)
            view.copy_(grad)
        slot.local.grad = view

    def _keep_average(self, slot: Slot, view: Tensor) -> None:
        """Stage 1, a second reduction without `zero_grad` between: the averaged gradient lies in the owner's part of
        full_grad, and elsewhere lies what was summed already. Turns it into contributions whose mean it is."""
        average = self.owned_grad.read(slot.piece.in_shard).clone()
        view.zero_()
        view.view(-1)[slot.piece.start : slot.piece.stop] = average * self.group.comm.size

    # -- reduce

    @property
    def is_complete(self) -> bool:
        return len(self.ready) == len(self.group.slots)

    def begin_reduce(self) -> None:
        """Starts to reduce everything collected; parameters without a gradient here count as zeros."""
        if not self.travels:
            return
        self._settle_unused()
        if self._rests_cut and not self._keeps_shard:
            self.owned_grad = self._make_owned(self.group.layout.shard_numel)
        for chunk in self.group.layout.chunks:
            bucket = self.pool.take()
            self._buckets.append(bucket)
            full = self._contribution(chunk, bucket)
            total = bucket.total[: chunk.width]
            scratch = bucket.scratch[: self.group.comm.scratch_rows * chunk.width].view(-1, chunk.width)
            name = f"reduce {self.group.name}[{chunk.of.start}+{chunk.start}]"
            work = self.group.comm.reduce_scatter(total, full, scratch, name)
            bucket.finish = self._storing(work, total, chunk, frozenset(self._carries), name)
            aside = self.group.setting.aside
            if aside is not None and not self.is_on_disk:  # a disk would have the host wait for the reduction
                bucket.settle_on(aside)
        self._held.clear()

    def _settle_unused(self) -> None:
        """A parameter that this rank did not use contributes what its `p.grad` holds: nothing, or what an earlier
        backward left there and nobody cleared."""
        for slot in self.group.slots:
            if slot.index in self.used:
                continue
            grad = slot.local.grad
            counts_on = isinstance(grad, AveragedGradient)
            if self._rests_cut:
                (self._carries.add if counts_on else self._carries.discard)(slot.index)
            elif self.full_grad is not None and counts_on:
                self._keep_average(slot, slot.view(self.full_grad))
            elif self.full_grad is not None and grad is None:
                slot.view(self.full_grad).zero_()

    def _contribution(self, chunk: Chunk, bucket: Bucket) -> Tensor:
        """What this rank sends of a chunk: ``(N, width)``, contiguous; in place where it lies so already."""
        if self.full_grad is not None and chunk.is_whole:
            return self.group.matrix(self.full_grad, chunk.of)
        packed = bucket.full[: self.group.layout.ranks * chunk.width].view(-1, chunk.width)
        if self.full_grad is not None:
            return packed.copy_(self.group.matrix(self.full_grad, chunk.of)[:, chunk.start : chunk.stop])
        if chunk.is_whole:
            self._pack(packed.view(-1), chunk.of)
        else:  # of the one parameter in the slice
            _pack_columns(packed, self._held.get(chunk.of.parameters.start), chunk)
        return packed

    def _pack(self, flat: Tensor, of: Slice) -> None:
        """Copies the parameters of a slice to their places, and zeros between them: padding must not carry NaNs."""
        end = 0
        for index in of.parameters:
            held, span = self._held.get(index), self.group.layout.spans[index]
            start = span.offset - of.start
            if start > end:
                flat[end:start].zero_()
            end = start + span.numel
            if held is None:
                flat[start:end].zero_()
            else:
                flat[start:end].view(span.shape).copy_(held)
        flat[end:].zero_()

    def _storing(
        self, work: Work, total: Tensor, chunk: Chunk, carries: frozenset[int], name: str
    ) -> Callable[[], None]:
        def finish() -> None:
            work.wait()
            if self.group.replicate.size > 1:
                self._reduce_between_replicas(total, name)
            self._store(total, chunk, carries)

        return finish

    def _reduce_between_replicas(self, total: Tensor, name: str) -> None:
        """Sums `total` over the ranks that hold the same shard: 1/N of the gradient crosses between shard groups."""
        replicate = self.group.replicate
        rows = total.view(replicate.size, -1)
        mine, scratch = torch.empty_like(rows[0]), rows.new_empty(replicate.scratch_rows, rows.shape[1])
        replicate.reduce_scatter(mine, rows, scratch, name).wait()
        replicate.all_gather(rows, mine, name).wait()

    def _store(self, total: Tensor, chunk: Chunk, carries: frozenset[int]) -> None:
        """Stores the average of what all ranks' gradients sum up to."""
        group = self.group
        contributions = group.comm.size * group.replicate.size
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
                        start, stop = _overlap(slot.piece.in_shard, chunk.in_shard)
                        owned[start - chunk.in_shard.start : stop - chunk.in_shard.start].zero_()
                owned.add_(total.div_(contributions).to(owned.device))
        elif isinstance(self.owned_grad, InMemory) and self.owned_grad.place.device == total.device:
            with self.owned_grad.edit(chunk.in_shard) as owned:
                torch.div(total, contributions, out=owned)  # without a copy after it
        else:
            self.owned_grad.write(chunk.in_shard, total.div_(contributions))

    def wait(self) -> None:
        """All that has begun is stored."""
        while self._buckets:
            self._buckets.pop().settle()

    def let_go(self) -> None:
        """The averaged gradients have been stepped, and nobody wants them any more."""
        if self._rests_cut:
            self.owned_grad = self._make_owned(0)
        for slot in self.group.slots:
            with torch._C.DisableTorchFunctionSubclass():
                slot.local.grad = None

    def end_reduce(self) -> None:
        """All is stored: the next backward begins anew."""
        self._buckets.clear()
        self.ready.clear()
        self.used.clear()
        if self._rests_cut:
            self.full_grad = None

    def end_backward_unreduced(self) -> None:
        self.ready.clear()

    def forget(self) -> None:
        """Drops what a failed backward has collected and not reduced."""
        self.ready.clear()
        self.used.clear()
        self._held.clear()
        self._added.clear()

    def free(self) -> None:
        """Lets go of all gradients and of the buckets; after training."""
        for slot in self.group.slots:
            with torch._C.DisableTorchFunctionSubclass():
                slot.local.grad = None
                slot.parameter.grad_dtype = self.group.kind.declared  # which it has again at once
        self.full_grad = None
        self.owned_grad = InMemory(torch.empty(0, dtype=self.dtype), self.group.places.gathered)
        self.pool = BucketPool([])

    # -- averaged gradients

    def piece(self, slot: Slot) -> Tensor:
        """What this rank steps of an averaged gradient, in `Slot.stepped_shape`, not to be written to."""
        if self.travels:
            return slot.stepped(self.owned_grad)
        assert slot.local.grad is not None
        return slot.local.grad.detach()

    @contextmanager
    def edit_piece(self, slot: Slot) -> Iterator[Tensor]:
        """Inside, what `piece` gives; what becomes of it there stays."""
        self.group.catch_up_alone()  # a step that is still to be taken is of the gradient as it is
        if not self.travels:
            yield self.piece(slot)
            return
        with self.owned_grad.edit(slot.piece.in_shard) as piece:
            yield piece

    @property
    def is_on_disk(self) -> bool:
        return self.owned_grad.place.tier is Tier.DISK

    def version(self, slot: Slot) -> int:
        """Another one after each change of a parameter's averaged gradient."""
        return self.owned_grad.version if self.travels else self.piece(slot)._version

    def is_shown(self, slot: Slot, grad: Tensor) -> bool:
        """Whether `grad` shows the gradient that is here, and nothing that a user has put into `p.grad`."""
        if not self.travels:
            return True
        if isinstance(grad, AveragedGradient):
            return grad.is_of(slot)
        return self.full_grad is not None and grad.data_ptr() == slot.view(self.full_grad).data_ptr()

    def write(self, slot: Slot, grad: Tensor) -> None:
        """Replaces this rank's piece by its part of a whole gradient."""
        self.group.catch_up_alone()
        self.owned_grad.write(slot.piece.in_shard, grad.reshape(-1)[slot.piece.start : slot.piece.stop])

    def gather(self, slot: Slot) -> Tensor:
        """The whole averaged gradient of one parameter, in its shape. A collective, of the slice that it lies in."""
        layout, comm = self.group.layout, self.group.comm
        of = layout.slice_of(slot.index)
        rows = torch.empty(layout.ranks, of.width, dtype=self.dtype, device=self.group.places.gathered.device)
        own = rows[comm.rank].copy_(self.owned_grad.read(of.in_shard))
        comm.all_gather(rows, own, f"read gradient {slot.name}").wait()
        start = slot.offset - of.start
        return rows.view(-1)[start : start + slot.numel].view(slot.shape)


def _pack_columns(packed: Tensor, grad: Tensor | None, chunk: Chunk) -> None:
    """Fills ``(N, width)`` with columns of the matrix ``(N, slice width)`` that one gradient and zeros make up."""
    if grad is None:
        packed.zero_()
        return
    flat, width = grad.reshape(-1), chunk.of.width
    rows, rest = divmod(flat.numel(), width)
    packed[:rows] = flat[: rows * width].view(rows, width)[:, chunk.start : chunk.stop]
    packed[rows:].zero_()
    stop = max(chunk.start, min(rest, chunk.stop))
    packed[rows : rows + 1, : stop - chunk.start] = flat[rows * width + chunk.start : rows * width + stop]


def _overlap(one: slice, other: slice) -> tuple[int, int]:
    start = max(one.start, other.start)
    return start, max(start, min(one.stop, other.stop))
