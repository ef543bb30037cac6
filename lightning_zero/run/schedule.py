"""When things happen: around modules' calls, at each gradient, and at the end of backward."""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_zero.run.loans import Loans
from lightning_zero.run.reductions import Reductions
from lightning_zero.run.surrounding import Surrounding
from lightning_zero.shards.assembly import Assembly
from lightning_zero.shards.gradient import GradientShard
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.slot import Slot, no_interception, slot_of
from lightning_zero.shards.unit import Unit


@final
class Schedule:
    """Calls gather, release, collect and reduce at the right moments, and `begin_backward` and `end_backward` around a
    backward if its caller does not say that it is one (`bracket`). Weights in `late` may be behind a step."""

    def __init__(
        self,
        assembly: Assembly,
        reductions: Reductions,
        loans: Loans,
        begin_backward: Callable[[], None],
        end_backward: Callable[[], None],
        *,
        late: Module | None = None,
    ) -> None:
        self._cache = loans.cache
        self._rendezvous = loans.rendezvous
        self._reductions = reductions
        self._loans = loans
        self._saved = loans.saved
        self._begin_backward = begin_backward
        self._end_backward = end_backward
        self._bracketed = False  # a backward is under way whose end its caller tells
        self._end: weakref.ref[Callable[[], None]] | None = None  # ... or whose end autograd tells: alive until then
        self._casts = _Casts()
        self._collectors: list[tuple[Parameter, int]] = []  # and the id of its hook
        self._handles: list[Any] = []
        self._late = late
        self._surround_late(reductions.shards)
        for module in assembly.cast_modules:
            self._surround_cast_module(module)
        for unit in assembly.units:  # last, and so outermost: the values must be there
            for module in unit.modules:
                if module in unit.traced:  # dynamo goes straight to a forward without hooks, past what we do
                    self._handles.append(module.register_forward_hook(_nothing))
                before, after = partial(self._before_forward, unit), partial(self._after_forward, unit)
                self._handles.append(Surrounding(module, before, after))
        for module, unit in assembly.entrances:
            self._handles.append(Surrounding(module, partial(self._show_entrance, unit), _nothing))
        self._hook_gradients(assembly.shards)

    def detach(self) -> None:
        """Removes all hooks."""
        for handle in reversed(self._handles):  # a module may be surrounded twice
            handle.remove()
        self._handles.clear()

    def add(self, shards: Iterable[GradientShard]) -> None:
        """These train from here on."""
        self._hook_gradients(shards)
        self._surround_late(shards)

    # -- parameters: gathered before use, and again where backward looks for them

    def _before_forward(self, unit: Unit) -> None:
        if any(self._loans.is_lent(group) for group in unit.groups):
            self._loans.settle()  # the copy may have been edited; gather what it is now
        self._rendezvous.use(unit)
        self._cache.pin(unit)
        if not self._saved.push():
            self._loans.hold(unit)  # where autograd cannot be told how to find the values again, they must stay

    def _after_forward(self, unit: Unit, *_: object) -> None:
        self._saved.pop()
        self._cache.unpin(unit)

    def _show_entrance(self, unit: Unit) -> None:
        """Shows a unit's parameters to the module around it, which looks at them before it calls the unit."""
        self._rendezvous.use(unit)
        self._cache.show(unit)

    def bring(self, unit: Unit) -> None:
        """Backward, or somebody who looks at a graph, asks for values of the unit."""
        if torch._C._current_graph_task_id() != -1:
            self._enter_backward()
        self._rendezvous.use(unit)
        unit.wait()

    @contextmanager
    def noting_saved(self) -> Iterator[None]:
        """Around a forward: also parameters that are read outside their units' forward are gathered again for backward.
        Without it autograd saves the parameter itself, and finds nothing there if its loan has ended meanwhile (a
        checkpoint is saved between forward and backward)."""
        notes = bool(self._cache.units) and torch.is_grad_enabled()
        if notes:
            self._saved.push()
        try:
            yield
        finally:
            if notes:
                self._saved.pop()

    def _surround_late(self, shards: Iterable[GradientShard]) -> None:
        """Modules whose weights, of those that train, may be late."""
        groups = {shard.group for shard in shards if shard.group.stays_full}
        for module in () if self._late is None else self._late.modules():
            self._surround_late_module(module, groups)

    def _surround_late_module(self, module: Module, among: Container[ShardGroup]) -> None:
        """Around its calls: kernels may look at late weights past torch. So may those of a module around it, which
        hands its children's weights to one kernel."""
        leaves = [child for child in module.children() if not any(True for _ in child.children())]
        slots = [slot_of(parameter) for near in (module, *leaves) for parameter in near.parameters(recurse=False)]
        groups = dict.fromkeys(slot.group for slot in slots if slot is not None and slot.group in among)
        if groups:
            self._handles.append(Surrounding(module, partial(self._catch_up, groups), _nothing))

    def _catch_up(self, groups: Iterable[ShardGroup]) -> None:
        for group in groups:
            self._loans.catch_up(group)

    def _surround_cast_module(self, module: Module) -> None:
        """Torch's own forward sees the weights as they rest; hooks on the module, before and after, as declared."""
        own = {name: (p, slot_of(p)) for name, p in module.named_parameters(recurse=False)}
        groups = {slot.group for _, slot in own.values() if slot is not None}
        resting, device = next((group.kind.resting, group.setting.places.gathered.device.type) for group in groups)

        @torch.compiler.disable(recursive=False)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._catch_up(groups)
            if any(self._loans.is_lent(group) for group in groups):
                self._loans.settle_in_pass()  # the copy may have been edited, and what rests would be stale
            shown = {}
            if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == resting:
                for name, (parameter, slot) in own.items():
                    is_there = slot is not None and slot.group.full_param is not None
                    if is_there and module._parameters.get(name) is parameter:  # not pruned since
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

    # -- gradients

    def _hook_gradients(self, shards: Iterable[GradientShard]) -> None:
        """They are collected as they come."""
        with no_interception():
            for shard in shards:
                for slot in shard.group.slots if shard.is_collected else ():
                    self._hook_gradient(slot)

    def _hook_gradient(self, slot: Slot) -> None:
        # torch does not show Python's collector of cycles what such a hook holds. Holding this schedule, it would keep
        # the engine, and so the parameter that has the hook, for good, unless somebody closed the engine.
        schedule_ref, slot_ref = weakref.ref(self), weakref.ref(slot)

        def collect(_: Tensor) -> None:
            schedule, its_slot = schedule_ref(), slot_ref()
            if schedule is not None and its_slot is not None:
                schedule._collect(its_slot)

        parameter, trains_now = slot.parameter, slot.parameter.requires_grad
        parameter.requires_grad_(True)  # torch hooks only what trains; `toggle_optimizer` may thaw it later
        handle = parameter.register_post_accumulate_grad_hook(collect)
        self._handles.append(handle)
        self._collectors.append((parameter, handle.id))
        parameter.requires_grad_(trains_now)

    def _collect(self, slot: Slot) -> None:
        with no_interception():
            if slot.parameter.grad is None:
                return  # a hook of the user's has had it
        self._enter_backward(slot)
        if self._reductions.collect(slot):
            self._rendezvous.start_reductions(self._reductions.count_complete())

    # -- the beginning and the end of backward

    @contextmanager
    def bracket(self) -> Iterator[None]:
        """Around a backward whose beginning and end the caller knows."""
        self._bracketed = True
        try:
            yield
        finally:
            self._bracketed = False

    def _enter_backward(self, slot: Slot | None = None) -> None:
        """A backward is under way: it has come to a unit, or to the gradient of `slot`."""
        if not self.backward_is_known:
            with nullcontext() if slot is None else slot.gradient.kept_apart(slot):  # type: ignore[union-attr]
                self._begin_backward()
            end = partial(self._end_backward)  # autograd calls it when backward has ended well, and drops it otherwise
            self._end = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    @property
    def backward_is_known(self) -> bool:
        """Whether the backward that has begun is still under way; one that has failed is not."""
        return self._bracketed or (self._end is not None and self._end() is not None)

    def start_pass(self) -> None:
        """A new forward or backward begins."""
        self._end = None if not self.backward_is_known else self._end
        self._casts.of_this_pass.clear()
        with no_interception():
            for parameter, own in self._collectors:  # hooks that users have added since see the gradient before us
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
        self.of_this_pass: dict[Parameter, Tensor] = {}

    def of(self, parameter: Parameter) -> Tensor:
        with no_interception():
            shares = torch.is_autocast_cache_enabled() and torch.is_grad_enabled() and parameter.requires_grad
            if not shares or torch._C._current_graph_task_id() != -1:
                return parameter.view_as(parameter)
            if parameter not in self.of_this_pass:
                self.of_this_pass[parameter] = parameter.view_as(parameter)
            return self.of_this_pass[parameter]


def _nothing(*_: Any) -> None:
    pass
