"""When things happen: module hooks, the order of gathers and reductions, and the end of backward.

Every rank issues its collectives in the same order, whatever became ready first. Reductions follow an agreed order
of groups; it starts as the reverse of the model's and is then learnt from rank 0's first backward, so that overlap
survives models whose backward runs in another order than their modules stand in.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_iter

from lightning_zero.comm import Comm
from lightning_zero.gradient import BucketPool, GradientShard
from lightning_zero.parameter import Access, RestingParameter, access_of

_no_interception = torch._C.DisableTorchFunctionSubclass


@dataclass(eq=False)
class Resident:
    """A unit at run time: a module, and access to the groups that its forward needs."""

    name: str
    module: Module
    accesses: list[Access]
    users: int = 0  # forwards under way
    leaked: bool = False  # its forward returned a view of a parameter, whose storage is then left to the user


@final
class GatherOrder:
    """Predicts which unit is used next from the order of the previous pass."""

    def __init__(self) -> None:
        self._previous: list[Resident] = []
        self._current: list[Resident] = []

    def restart(self) -> None:
        if self._current:
            self._previous, self._current = self._current, []

    def after(self, resident: Resident, depth: int) -> list[Resident]:
        """Notes the use of `resident`; returns the next `depth` ones, if the pass goes as the previous one did."""
        at = len(self._current)
        self._current.append(resident)
        if at < len(self._previous) and self._previous[at] is resident:
            return self._previous[at + 1 : at + 1 + depth]
        return []


@final
class Schedule:
    """Hooks on modules and parameters that call gather, release, collect and reduce at the right moments.

    Args:
        residents: units whose groups are gathered before use (stage 3); empty otherwise.
        cast_modules: modules whose two-byte weights enter forward as they rest, while autocast is on.
        shards: the gradients of all trainable groups.
        pools: the buckets they travel in.
        comm: for the small messages at the end of backward.
        settle: takes back what was lent; see `Engine.settle`.
        prefetch: units gathered ahead.
        overlap: let reductions run while backward goes on.
    """

    def __init__(
        self,
        residents: list[Resident],
        cast_modules: list[Module],
        shards: list[GradientShard],
        pools: list[BucketPool],
        *,
        comm: Comm,
        settle: Callable[[], None],
        prefetch: int,
        overlap: bool,
    ) -> None:
        self._residents = residents
        self._order = shards
        self._pools = pools
        self._comm = comm
        self._settle = settle
        self._prefetch = prefetch
        self._overlap = overlap
        self._launched = 0  # how many of self._order
        self._ready_order: list[GradientShard] = []
        self._order_learnt = False
        self._forward_order, self._backward_order = GatherOrder(), GatherOrder()
        self._entered: set[Resident] = set()  # units whose backward has begun
        self._backward = _Backward.NONE
        self.reduces = True  # whether the next end of backward reduces
        self._handles: list[Any] = []
        for resident in residents:
            self._hook_unit(resident)
        for module in cast_modules:
            self._hook_cast_module(module)
        for shard in shards:
            self._hook_gradients(shard)

    def detach(self) -> None:
        """Removes all hooks, and lets go of the buckets."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._pools = []

    # -- parameters: gather before use, release after

    def _hook_unit(self, resident: Resident) -> None:
        module = resident.module
        self._handles += [
            module.register_forward_pre_hook(lambda *_: self._before_forward(resident), prepend=True),
            module.register_forward_hook(
                lambda _module, _args, output: self._after_forward(resident, output), always_call=True
            ),
        ]

    def _before_forward(self, resident: Resident) -> None:
        resident.users += 1
        if any(access.lends_copy for access in resident.accesses):
            self._settle()  # the copy may have been edited; gather what it is now
        self._gather(resident, self._backward_order if _in_backward() else self._forward_order)

    def _after_forward(self, resident: Resident, output: Any) -> None:
        resident.users -= 1
        if resident.users or _in_backward():
            return  # a recomputation: its backward follows at once, and releases
        full_params = [access.group.full_param for access in resident.accesses]
        resident.leaked |= any(_shares_storage(output, full_param) for full_param in full_params)
        needed_again = resident.leaked
        if torch.is_grad_enabled():
            tensors = [tensor for tensor in tree_iter(output) if isinstance(tensor, Tensor) and tensor.requires_grad]
            for tensor in tensors:
                tensor.register_hook(lambda _grad: self._before_backward(resident))
            needed_again |= not tensors  # an output we cannot see into: its backward would meet empty storage
        if not needed_again:
            self._release(resident)

    def _before_backward(self, resident: Resident) -> None:
        self._enter_backward()
        if resident not in self._entered or any(access.group.is_released for access in resident.accesses):
            self._entered.add(resident)
            self._gather(resident, self._backward_order)

    def _gather(self, resident: Resident, order: GatherOrder) -> None:
        for access in resident.accesses:
            access.group.gather()
            if not access.upcasts:
                access.show()
        for following in order.after(resident, self._prefetch):
            for access in following.accesses:
                access.group.begin_gather()

    def _release(self, resident: Resident) -> None:
        leaked, resident.leaked = resident.leaked, False
        for access in resident.accesses:
            if access.lends_full_param:
                continue  # somebody reads it; it goes when the loan ends
            access.hide()
            if leaked:
                access.group.abandon()
            else:
                access.group.release()

    def _hook_cast_module(self, module: Module) -> None:
        own = list(module.parameters(recurse=False))
        accesses = [access_of(parameter) for parameter in own]

        def show(*_: Any) -> None:
            if any(access.lends_copy for access in accesses):
                self._settle()  # the copy may have been edited, and what rests would be stale
            if torch.is_autocast_enabled(own[0].device.type):
                for parameter in own:
                    if _has_values(parameter):
                        parameter.__class__ = Parameter

        def hide(*_: Any) -> None:
            for parameter in own:
                parameter.__class__ = RestingParameter

        self._handles += [
            module.register_forward_pre_hook(show),
            module.register_forward_hook(hide, always_call=True),
        ]

    # -- gradients: collect, reduce

    def _hook_gradients(self, shard: GradientShard) -> None:
        for index, parameter in enumerate(shard.group.parameters):
            with _no_interception():
                trains_now = parameter.requires_grad
                parameter.requires_grad_(True)  # torch hooks only what trains; `toggle_optimizer` may thaw it later
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._collecting(shard, index)))
                parameter.requires_grad_(trains_now)

    def _collecting(self, shard: GradientShard, index: int) -> Callable[[Tensor], None]:
        def collect(_: Tensor) -> None:
            self._enter_backward()
            with _no_interception():
                shard.collect(index, local=not self.reduces)
            if shard.is_complete:
                self._complete(shard)

        return collect

    def _complete(self, shard: GradientShard) -> None:
        """All uses of the group's parameters are behind us."""
        for resident in self._residents:
            if any(access.group is shard.group for access in resident.accesses) and not resident.users:
                self._release_group(resident, shard)
        self._ready_order.append(shard)
        if self.reduces and self._overlap:
            while self._launched < len(self._order) and self._order[self._launched].is_complete:
                self._order[self._launched].begin_reduce()
                self._launched += 1

    def _release_group(self, resident: Resident, shard: GradientShard) -> None:
        for access in resident.accesses:
            if access.group is shard.group and not (access.lends_full_param or resident.leaked):
                access.hide()
                access.group.release()

    # -- the end of backward

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward whose end the caller knows."""
        self._backward = _Backward.BRACKETED
        self._forward_order.restart()
        try:
            yield
        except BaseException:
            self._backward = _Backward.NONE
            raise
        self.finish_backward()

    def _enter_backward(self) -> None:
        if self._backward == _Backward.NONE:
            self._backward = _Backward.BARE
            self._forward_order.restart()
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)

    def finish_backward(self) -> None:
        """Reduces what is left and shows the averaged gradients; the last thing in every backward."""
        self._backward = _Backward.NONE
        self._entered.clear()
        self._backward_order.restart()
        with _no_interception(), torch.no_grad():
            if self.reduces:
                self._reduce_rest()
            else:
                for shard in self._order:
                    shard.end_backward_unreduced()
        self._launched = 0
        self._ready_order = []
        self.release_all()

    def _reduce_rest(self) -> None:
        # All launches before the first wait: another rank may be out of buckets, waiting for one of ours.
        for shard in self._order[self._launched :]:
            shard.begin_reduce()
        used = self._agree_on_used()
        for pool in self._pools:
            pool.drain()
        for shard in self._order:
            shard.finish_reduce(used[shard])
        self._learn_order()

    def _agree_on_used(self) -> dict[GradientShard, set[int]]:
        """Which parameters had a gradient on any rank; one small message."""
        counts = [len(shard.group.parameters) for shard in self._order]
        mine = torch.zeros(sum(counts), dtype=torch.uint8)
        start = 0
        for shard, count in zip(self._order, counts, strict=True):
            mine[[start + index for index in shard.used]] = 1
            start += count
        anywhere = self._comm.all_reduce(mine, "used parameters", "max") if self._comm.size > 1 else mine
        return {
            shard: set(flags.nonzero().flatten().tolist())
            for shard, flags in zip(self._order, anywhere.split(counts), strict=True)
        }

    def _learn_order(self) -> None:
        if self._order_learnt:  # nothing that differs between ranks may decide whether a message is sent
            return
        self._order_learnt = True
        ready = [self._order.index(shard) for shard in self._ready_order]
        rest = [at for at in range(len(self._order)) if at not in set(ready)]
        agreed = torch.tensor(ready + rest)
        self._comm.broadcast(agreed, "reduction order")
        self._order = [self._order[at] for at in agreed.tolist()]

    def release_all(self) -> None:
        """Nothing stays gathered past a boundary."""
        for resident in self._residents:
            if not resident.users:
                self._release(resident)

    def start_pass(self) -> None:
        """A new forward begins; the order of gathers starts anew."""
        self._forward_order.restart()


class _Backward:
    """Who will call `finish_backward`: nobody, the caller of `Schedule.backward`, or a callback of autograd."""

    NONE, BRACKETED, BARE = range(3)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _has_values(parameter: Parameter) -> bool:
    with _no_interception():
        return parameter.untyped_storage().nbytes() > 0 or not parameter.numel()


def _shares_storage(output: Any, full: Tensor) -> bool:
    storage = full.untyped_storage().data_ptr()
    if not storage:
        return False
    with _no_interception():
        return any(
            isinstance(item, Tensor) and item.layout == torch.strided and item.untyped_storage().data_ptr() == storage
            for item in tree_iter(output)
        )
