"""`ModuleHooks`: hooks on the calls of modules, which say to the `Runner` what user code does."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter

from lightning_zero.run.loans import Loans
from lightning_zero.run.reductions import GradientState
from lightning_zero.run.surrounding import Surround
from lightning_zero.shards.assembly import Assembly
from lightning_zero.shards.casting import Reader
from lightning_zero.shards.gradient import GroupGradient
from lightning_zero.shards.slot import Slot, no_interception, slot_of
from lightning_zero.shards.unit import Unit
from lightning_zero.torch_private import is_wrapped, outside_transforms, parameters_in


@final
class ModuleHooks:
    """Gathers and releases units around the calls of their modules.

    `late` is the module if its weights may be behind a step: then its modules catch up before each call.
    """

    def __init__(self, assembly: Assembly, loans: Loans, *, late: Module | None = None) -> None:
        self._runner = loans.runner
        self._course = loans.runner.course
        self._reductions = loans.runner.reductions
        self._cache = loans.cache
        self._loans = loans
        self._lasting = loans.lasting
        self._saved = loans.saved
        self._views = loans.runner.views
        self._handles: list[Any] = []
        self._late = late
        self.surround_late(self._reductions.gradients)
        for reader in assembly.resting.readers:
            self._surround_reader(reader)
        for unit in assembly.units:  # last, and so outermost: everything else needs the values
            for module in unit.modules:
                if module in unit.traced:  # dynamo traces `forward` itself, past us, unless the module has a hook
                    self._handles.append(module.register_forward_hook(lambda *_: None))
                before, after = partial(self._before_forward, unit), partial(self._after_forward, unit)
                self._handles.append(Surround(module, before, after))
        for module, unit in assembly.entrances:
            self._handles.append(Surround(module, partial(self._show_entrance, unit)))

    def detach(self) -> None:
        """Removes all hooks."""
        for handle in reversed(self._handles):  # a module may be surrounded twice
            handle.remove()
        self._handles.clear()

    def _before_forward(self, unit: Unit) -> None:
        if self._reductions.state is GradientState.COLLECTING and not self._runner.backward.is_known:
            self._runner.recover()  # before other ranks are told what is complete
        with outside_transforms():  # inside, what is gathered would be tensors of theirs
            self._course.use(unit)
            self._lasting.show_edits(unit)
            self._cache.pin(unit)
        if not self._saved.push():
            self._lasting.hold(unit)  # no saved-tensor hooks here: what autograd saves must stay gathered

    def _after_forward(self, unit: Unit) -> None:
        self._saved.pop()
        self._cache.unpin(unit)

    def _show_entrance(self, unit: Unit) -> None:
        """Shows the parameters of `unit` to the module around it, which reads them before it calls the unit."""
        self._course.use(unit)
        self._cache.show(unit)

    def surround_late(self, gradients: Iterable[GroupGradient]) -> None:
        """Has modules catch up with weights that have `gradients` before each call, as a kernel may read them past
        torch. So does a module around leaf modules, as it may hand their weights to one kernel; not `Sequential`, which
        only calls them, and would wait for the last one's weights before the first one is called."""
        groups = {gradient.group for gradient in gradients if gradient.group.stays_full}
        for module in () if self._late is None else self._late.modules():
            only_calls = type(module).forward is nn.Sequential.forward and "forward" not in vars(module)
            children = () if only_calls else module.children()
            leaves = [child for child in children if not any(True for _ in child.children())]
            slots = [slot_of(parameter) for near in (module, *leaves) for parameter in near.parameters(recurse=False)]
            own = dict.fromkeys(slot.group for slot in slots if slot is not None and slot.group in groups)
            if own:
                self._handles.append(Surround(module, partial(self._loans.latest.catch_up, *own)))

    def _surround_reader(self, reader: Reader) -> None:
        """Shows `forward` of a module, torch's own, the weights that it reads as they rest, where autocast would cast
        them to that dtype. Hooks on the module, which run before and after `forward`, read them in their declared
        dtype."""
        module = reader.module
        weights = [
            _ShownWeight(vars(holder), parameters_in(holder), name, slot, self._cache.unit_of(slot.group))
            for holder, name, parameter in reader.parameters
            if (slot := slot_of(parameter)) is not None
        ]
        groups = {weight.slot.group for weight in weights}
        resting, device = next((group.kind.resting, group.setting.places.gathered.device.type) for group in groups)

        # Also torch's own, inside: where a function of the user's is compiled that calls the module, the graph would
        # take the parameters themselves, and not what is shown.
        @torch.compiler.disable
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._loans.latest.catch_up(*groups)
            self._lasting.show_declared(groups)
            casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == resting
            there = [weight for weight in weights if weight.is_there]
            given = [*args, *kwargs.values()]
            if len(there) < len(weights):  # `functional_call` may have put others in their place
                given += [weight.parameters.get(weight.name) for weight in weights]
            # `torch.vmap` takes a layer apart before autocast sees it.
            casts &= not any(isinstance(one, Tensor) and is_wrapped(one) for one in given)
            if reader.tries_kernel:
                tensors = [self._plain(weight.slot, casts=casts) for weight in there]
            elif reader.casts and casts:
                cut = reader.cut_weights(args, kwargs)
                tensors = [self._views.view_of(weight.slot, is_cut=weight.name in cut) for weight in there]
            else:
                return type(module).forward(module, *args, **kwargs)
            before = [weight.holder.get(weight.name) for weight in there]  # what a layer around shows there
            for weight, tensor in zip(there, tensors, strict=True):
                weight.holder[weight.name] = tensor
            try:
                return type(module).forward(module, *args, **kwargs)
            finally:
                for weight, outer in zip(there, before, strict=True):
                    if outer is None:
                        weight.holder.pop(weight.name, None)
                    else:
                        weight.holder[weight.name] = outer

        def enter() -> None:
            vars(module).setdefault("forward", forward)  # unless users have put one there since

        def leave() -> None:
            if vars(module).get("forward") is forward:
                del module.forward

        self._handles.append(Surround(module, enter, leave))

    def _plain(self, slot: Slot, *, casts: bool) -> Tensor:
        """Returns the values of a weight as a plain tensor in its declared dtype. Where autocast `casts` it again,
        those that rest will do."""
        with no_interception():
            if casts:
                return slot.parameter.detach().to(slot.group.kind.declared)
        return self._loans.declared_of(slot)


class _ShownWeight(NamedTuple):
    """A weight that is shown to the forward that reads it."""

    holder: dict[str, Any]  # attributes of the module that holds it; one here hides the parameter
    parameters: Mapping[str, Parameter | None]  # of that module
    name: str
    slot: Slot
    unit: Unit | None  # that gathers it

    @property
    def is_there(self) -> bool:
        """Whether a forward around this one uses its values, and it has not been replaced (by pruning, say). Values
        that are merely gathered may be on their way still, ahead of another use, and void if a rank diverges."""
        is_used = self.unit is None or self.unit.pins > 0
        return is_used and self.parameters.get(self.name) is self.slot.parameter
