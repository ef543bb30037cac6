"""When things happen: hooks on modules and parameters, and the beginning and end of backward."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_iter

from lightning_zero.gradient import GradientShard
from lightning_zero.parameter import Access, access_of
from lightning_zero.reduction import Reductions
from lightning_zero.rendezvous import Rendezvous
from lightning_zero.saved import SavedParameters
from lightning_zero.surrounding import Surrounding

_no_interception = torch._C.DisableTorchFunctionSubclass


@dataclass(eq=False)
class Resident:
    """A unit at run time: a module, and access to the groups that its forward needs."""

    name: str
    module: Module
    accesses: list[Access]
    is_traced: bool = False  # its calls lie inside a compiled region
    users: int = 0  # forwards under way
    awaited: int = 0  # forwards whose backward has not come past their inputs yet
    leaked: bool = False  # its forward returned a view of a parameter, whose storage is then left to the user

    def is_gathered(self) -> bool:
        return not any(access.group.is_released for access in self.accesses)

    def serve(self, keep: bool) -> None:
        """See `Rendezvous`."""
        for access in self.accesses:
            access.group.serve(keep)


@final
class Schedule:
    """Hooks on modules and parameters that call gather, release, collect and reduce at the right moments.

    Args:
        residents: units whose groups are gathered before use (stage 3); empty otherwise.
        cast_modules: modules whose two-byte weights enter forward as they rest, while autocast is on.
        entrances: modules that look at the weights of a unit before they call it, and that unit.
        reductions: of all gradients.
        rendezvous: through which residents are gathered.
        saved: notes what autograd saves of the residents' parameters.
        settle: takes back what was lent; see `Loans.settle_within_pass`.
    """

    def __init__(
        self,
        residents: list[Resident],
        cast_modules: list[Module],
        entrances: list[tuple[Module, Resident]],
        *,
        reductions: Reductions,
        rendezvous: Rendezvous,
        saved: SavedParameters,
        settle: Callable[[], None],
    ) -> None:
        self._residents = residents
        self._reductions = reductions
        self._rendezvous = rendezvous
        self._saved = saved
        self._settle = settle
        self._numbers = {
            resident: rendezvous.enroll(resident.name or "the model", resident.serve, resident.is_gathered)
            for resident in residents
        }
        rendezvous.count_complete, rendezvous.start_reductions = reductions.count_complete, reductions.start
        self._entered: set[Resident] = set()  # units whose backward has begun
        self._bracketed = False  # a backward is under way whose end its caller tells
        self._end: weakref.ref[_EndOfBackward] | None = None  # ... or whose end autograd tells: alive until then
        self._is_unfinished = False  # a backward has begun and not been finished: under way, or it has failed
        self._keeps_graph = False  # this backward makes a graph of its own, which saves views of parameters
        self._casts = _Casts()
        self._collectors: list[tuple[Parameter, int]] = []  # and the id of its hook
        self._handles: list[Any] = []
        for module in cast_modules:
            self._surround_cast_module(module)
        for resident in residents:  # last, and so outermost: the values must be there
            self._surround_unit(resident)
        for module, first in entrances:
            self._surround_entrance(module, first)
        for shard in reductions.shards:
            self._hook_gradients(shard)

    def detach(self) -> None:
        """Removes all hooks."""
        for handle in reversed(self._handles):  # a module may be surrounded twice
            handle.remove()
        self._handles.clear()

    # -- parameters: gather before use, release after

    def _surround_unit(self, resident: Resident) -> None:
        if resident.is_traced:  # dynamo goes straight to the forward of a module that has no hooks, past what we do
            self._handles.append(resident.module.register_forward_hook(_nothing))
        self._handles.append(
            Surrounding(
                resident.module,
                lambda: self._before_forward(resident),
                lambda inputs, output: self._after_forward(resident, inputs, output),
            )
        )

    def _surround_entrance(self, module: Module, first: Resident) -> None:
        def show() -> None:
            self._gather(first)

        self._handles.append(Surrounding(module, show, lambda *_: None))

    def _before_forward(self, resident: Resident) -> None:
        self.recover()
        resident.users += 1
        if any(access.lends_copy for access in resident.accesses):
            self._settle()  # the copy may have been edited; gather what it is now
        self._gather(resident)
        # Where autograd cannot be told how to find the values again, they must stay.
        resident.leaked |= not self._saved.push()

    def _after_forward(self, resident: Resident, inputs: Any, output: Any) -> None:
        self._saved.pop()
        resident.users -= 1
        if resident.users or _in_backward():
            return  # a recomputation: its backward follows at once, and releases
        full_params = [access.group.full_param for access in resident.accesses]
        resident.leaked |= any(_shares_storage(output, full_param) for full_param in full_params)
        if torch.is_grad_enabled():
            self._await_backward(resident, inputs, output)
        if not resident.leaked:
            self._release(resident)

    def _await_backward(self, resident: Resident, inputs: Any, output: Any) -> None:
        """Gathers at the first gradient of an output; what does not train is done with at the gradients of all inputs
        (what trains when it has its own)."""
        outputs = _with_gradient(output)
        for tensor in outputs:
            tensor.register_hook(lambda _grad: self._before_backward(resident))
        if outputs and not all(access.group.kind.trainable for access in resident.accesses):
            resident.awaited += 1
            self._call_at_all_gradients(_with_gradient(inputs), lambda: self._after_backward(resident))

    @staticmethod
    def _call_at_all_gradients(inputs: list[Tensor], call: Callable[[], None]) -> None:
        """Calls when the gradients of all have come; leaves out leaves, whose hooks would pile up over the steps."""
        within = [tensor for tensor in inputs if tensor.grad_fn is not None]
        missing = number = len(within)

        def count(_: Tensor) -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                missing = number  # for the next backward through a retained graph
                call()

        for tensor in within:
            tensor.register_hook(count)

    def _before_backward(self, resident: Resident) -> None:
        self._enter_backward()
        if resident not in self._entered or not resident.is_gathered():
            self._entered.add(resident)
            self._gather(resident)

    def _after_backward(self, resident: Resident) -> None:
        resident.awaited = max(0, resident.awaited - 1)
        if not (resident.awaited or resident.users):
            for access in resident.accesses:
                if not access.group.kind.trainable:
                    self._release_group(resident, access)

    def _gather(self, resident: Resident) -> None:
        number = self._numbers[resident]
        if self._rendezvous.is_ahead(number) or not resident.is_gathered():
            self._rendezvous.want(number)
        for access in resident.accesses:
            access.group.gather()
            if not access.upcasts:
                access.show()

    def _release(self, resident: Resident) -> None:
        for access in resident.accesses:
            self._release_group(resident, access)
        resident.leaked = False

    def _release_group(self, resident: Resident, access: Access) -> None:
        if access.lends_full_param:
            return  # somebody reads it; it goes when the loan ends
        access.hide()
        if resident.leaked or self._keeps_graph:
            access.group.abandon()
        else:
            access.group.release()

    def _surround_cast_module(self, module: Module) -> None:
        """Torch's own forward sees the weights as they rest; hooks on the module, before and after, as declared."""
        own = dict(module.named_parameters(recurse=False))
        accesses = [access_of(parameter) for parameter in own.values()]
        kind = accesses[0].group.kind

        @torch.compiler.disable(recursive=False)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if any(access.lends_copy for access in accesses):
                self._settle()  # the copy may have been edited, and what rests would be stale
            device = kind.device.type
            shown = {}
            if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == kind.resting:
                for name, parameter in own.items():
                    if module._parameters.get(name) is parameter and _has_values(parameter):  # not pruned since
                        shown[name] = self._casts.of(parameter)
            vars(module).update(shown)
            try:
                return type(module).forward(module, *args, **kwargs)
            finally:
                for name in shown:
                    vars(module).pop(name, None)

        def enter() -> None:
            vars(module).setdefault("forward", forward)  # unless users have put one there since

        def leave(*_: Any) -> None:
            if vars(module).get("forward") is forward:
                del module.forward

        self._handles.append(Surrounding(module, enter, leave))

    # -- gradients: collect

    def _hook_gradients(self, shard: GradientShard) -> None:
        for index, parameter in enumerate(shard.group.parameters):
            with _no_interception():
                trains_now = parameter.requires_grad
                parameter.requires_grad_(True)  # torch hooks only what trains; `toggle_optimizer` may thaw it later
                handle = parameter.register_post_accumulate_grad_hook(self._collecting(shard, index))
                self._handles.append(handle)
                self._collectors.append((parameter, handle.id))
                parameter.requires_grad_(trains_now)

    def _collecting(self, shard: GradientShard, index: int) -> Callable[[Tensor], None]:
        def collect(_: Tensor) -> None:
            with _no_interception():
                if shard.group.parameters[index].grad is None:
                    return  # a hook of the user's has had it
            self._enter_backward()
            was_complete = shard.is_complete
            if was_complete and self._reductions.has_started(shard):
                raise RuntimeError(
                    f"Parameter {shard.group.layout.spans[index].name!r} received a second gradient in one backward, "
                    "after its first was sent to the other ranks: it is used in several reentrant activation "
                    "checkpoints. Write checkpoint(..., use_reentrant=False), or ZeroStrategy(overlap=False)."
                )
            with _no_interception():
                shard.collect(index, local=not self._reductions.is_on)
            if shard.is_complete and not was_complete:
                self._complete(shard)

        return collect

    def _complete(self, shard: GradientShard) -> None:
        """All uses of the group's parameters are behind us."""
        for resident in self._residents:
            for access in resident.accesses:
                if access.group is shard.group and not (resident.users or resident.leaked):
                    self._release_group(resident, access)
        self._reductions.note_complete(shard)
        if not self._residents:  # else ranks agree on it, at the next gather
            self._reductions.start(self._reductions.count_complete())

    # -- the end of backward

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward whose end the caller knows."""
        self._start_backward()
        self._bracketed = True
        try:
            yield
        finally:
            self._bracketed = False
        self.finish_backward()

    def _enter_backward(self) -> None:
        if not self._backward_is_known:
            self._start_backward()
            end = _EndOfBackward(self.finish_backward)
            self._end = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        self._keeps_graph |= torch.is_grad_enabled()

    @property
    def _backward_is_known(self) -> bool:
        return self._bracketed or (self._end is not None and self._end() is not None)

    def _start_backward(self) -> None:
        self.recover()
        self._collect_last()
        self._is_unfinished = True
        self._casts.clear()

    def recover(self) -> None:
        """After a backward that failed (on every rank alike): forgets what it left half done."""
        if not self._is_unfinished or self._backward_is_known:
            return
        self._reductions.forget()
        self._clear_backward()

    def _clear_backward(self) -> None:
        self._is_unfinished = self._keeps_graph = False
        self._end = None
        self._reductions.clear()
        self._entered.clear()
        for resident in self._residents:
            resident.awaited = 0

    def finish_backward(self) -> None:
        """Reduces what is left and shows the averaged gradients; the last thing in every backward."""
        with _no_interception(), torch.no_grad():
            if self._reductions.is_on:
                if not self._residents:
                    self._reductions.start_all()
                with self._rendezvous.ended():
                    self._reductions.finish()
            else:
                self._reductions.end_unreduced()
        self.release_all()
        self._clear_backward()

    def release_all(self) -> None:
        """Nothing stays gathered past a boundary."""
        for resident in self._residents:
            if not (resident.users or self._rendezvous.is_ahead(self._numbers[resident])):
                self._release(resident)

    @contextmanager
    def noting_saved(self) -> Iterator[None]:
        """Around a forward: also parameters that are read outside their units' forward are gathered again for backward.
        Without it autograd saves the parameter itself, and finds its storage empty if its loan has ended meanwhile (a
        checkpoint is saved between forward and backward)."""
        if not self._residents or not torch.is_grad_enabled():
            yield
            return
        self._saved.push()
        try:
            yield
        finally:
            self._saved.pop()

    def start_pass(self) -> None:
        """A new forward begins."""
        self.recover()
        self._casts.clear()
        self._collect_last()

    def _collect_last(self) -> None:
        """Hooks that users have added since see the gradient before us."""
        with _no_interception():
            for parameter, own in self._collectors:
                hooks: Any = parameter._post_accumulate_grad_hooks
                if next(reversed(hooks)) != own:
                    hooks[own] = hooks.pop(own)  # not move_to_end: autograd goes by the order of the plain dict


@final
class _Casts:
    """Two-byte weights as the modules that autocast serves see them: views, each a node of the graph.

    An autocast with a cache casts a weight once and uses the copy again, so the gradients of several uses are summed
    in two bytes before they become fp32: its uses share a node, for a pass. Without a cache (Lightning's) each use has
    a node of its own, and the sum is fp32's.
    """

    def __init__(self) -> None:
        self._of_this_pass: dict[Parameter, Tensor] = {}

    def of(self, parameter: Parameter) -> Tensor:
        with _no_interception():
            shares = torch.is_autocast_cache_enabled() and torch.is_grad_enabled() and parameter.requires_grad
            if not shares or _in_backward():
                return parameter.view_as(parameter)
            if parameter not in self._of_this_pass:
                self._of_this_pass[parameter] = parameter.view_as(parameter)
            return self._of_this_pass[parameter]

    def clear(self) -> None:
        self._of_this_pass.clear()


@final
class _EndOfBackward:
    """What autograd calls when a backward has ended well; it lets go of it when one fails."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def __call__(self) -> None:
        self._finish()


def _nothing(*_: Any) -> None:
    pass


def _with_gradient(nested: Any) -> list[Tensor]:
    """The tensors in a nest of containers that are part of a graph."""
    return [item for item in tree_iter(nested) if isinstance(item, Tensor) and item.requires_grad]


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
