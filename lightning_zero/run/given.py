"""`adopt`: takes over gradients that users have put into `p.grad` in place of the averaged ones."""

from collections.abc import Callable, Collection, Iterator, Sequence

from torch import Tensor

from lightning_zero.run.reductions import Reductions
from lightning_zero.run.sharded_gradient import ShardedGradient
from lightning_zero.shards.gradient import averaged_of, gradient_of
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.torch_private import storage_key


def adopt(
    reductions: Reductions, slots: Sequence[Slot], *, steps: bool = False, wait: Callable[[], None] | None = None
) -> None:
    """Takes over gradients that the user has put into `p.grad` in place of ours, the same ones on every rank: `wait`
    waits for these, where they may not be here. If they are about to be stepped (`steps`), takes over those as well
    that backwards have only accumulated on this rank (`no_sync`), as the user has averaged them; until then, the next
    backward is to reduce them.

    Raises:
        RuntimeError: if one is an average that rests in shards, of another parameter or of an earlier backward; or
            if backward steps gradients.
    """
    if steps and reductions.are_accumulated:
        for slot in slots:
            gradient_of(slot).beside.move_to_average(slot)
    given = [*_given_in(reductions, slots, steps=steps)]
    if not given:
        return
    if wait is not None:
        wait()
    full_grads = [gradient.averaged.full_grad for gradient in reductions.gradients]
    ours = {storage_key(full_grad.untyped_storage()) for full_grad in full_grads if full_grad is not None}
    # Views of our memory, as after `p.grad, q.grad = q.grad, p.grad`, are read before anything is written there.
    read = {slot: grad.clone() for slot, grad in given if _is_in(grad, ours)}
    for slot, grad in given:
        averaged_of(slot).replace(slot, read.get(slot, grad).detach())
        gradient_of(slot).drop_accumulated(slot)
        reductions.show(slot)


def _given_in(reductions: Reductions, slots: Sequence[Slot], *, steps: bool) -> Iterator[tuple[Slot, Tensor]]:
    """Yields the parameters whose `p.grad` is to be taken over, with it."""
    takes_own = steps and reductions.are_accumulated
    for slot in slots:
        with no_interception():
            grad = slot.local.read_grad()
        if grad is not None:
            reductions.refuse_stepped(f"what you have put into {slot.name}.grad")
            averaged = averaged_of(slot)
            if not averaged.is_shown(slot, grad) or (takes_own and averaged.is_accumulated(grad)):
                yield slot, grad


def _is_in(grad: Tensor, storages: Collection[int]) -> bool:
    """Whether a gradient is in one of these storages.

    Raises:
        RuntimeError: if it is an average that rests in shards.
    """
    if isinstance(grad, ShardedGradient):
        grad.refuse_as_given()
    return storage_key(grad.untyped_storage()) in storages
