"""`Gradients`: clips, measures and reads averaged gradients between backward and step."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.nn import Module, Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lightning_zero.device import HOST
from lightning_zero.run.given import adopt
from lightning_zero.run.loans import Loans
from lightning_zero.run.program import Cause
from lightning_zero.run.reductions import Reductions
from lightning_zero.shards import norm
from lightning_zero.shards.gradient import averaged_of
from lightning_zero.shards.local import local_of, whole_of
from lightning_zero.shards.optimizer import training_slot
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.torch_private import scaling_of
from lightning_zero.wire.mesh import Mesh


@final
@dataclass(eq=False)
class Gradients:
    """The averaged gradients of an engine's module. Call the same methods on every rank."""

    module: Module
    device: torch.device
    mesh: Mesh
    loans: Loans
    reductions: Reductions
    _measured: norm.Measured | None = field(default=None, init=False)  # by `unscale_`, and used again for clipping

    def slots_with_gradients(
        self,
        parameters: Iterable[Parameter] | Optimizer,
        cause: Cause | None = None,
        *,
        meets: bool = False,
        steps: bool = False,
    ) -> list[Slot]:
        """Returns the slots of the parameters that have a gradient, each once; see `Runner.look`, and `adopt` for
        gradients that are to be stepped (`steps`)."""
        self.loans.runner.look(cause, meets=meets)
        if isinstance(parameters, Optimizer):
            parameters = [parameter for group in parameters.param_groups for parameter in group["params"]]
        with no_interception(), torch.no_grad():
            found = [p for p in dict.fromkeys(parameters) if p.grad is not None]
            slots = [slot for slot in map(training_slot, found) if slot is not None]
            wait = None if meets else self.loans.runner.wait_to_edit_gradients
            adopt(self.reductions, slots, steps=steps, wait=wait)
        return slots

    def _measure(self, slots: list[Slot], norm_type: float) -> norm.Measured:
        if self._measured is not None and self._measured.is_of(slots, norm_type):
            return self._measured
        return norm.Measured.of(slots, norm_type)

    def forget(self) -> None:
        """Forgets what was measured of gradients, as a step has taken them."""
        self._measured = None
        for gradient in self.reductions.gradients:
            if gradient.averaged.squares is not None:
                gradient.averaged.squares.forget()

    def clip_by_norm_(
        self,
        parameters: Iterable[Parameter] | Optimizer,
        max_norm: float,
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scales gradients so that their global p-norm is at most `max_norm`. Returns that norm. Those of a backward
        that has only accumulated them (`no_sync`) each rank clips for itself, as under DDP. Collective.

        Raises:
            RuntimeError: on every rank, if `error_if_nonfinite` and the norm is not finite. Nothing is scaled then.
        """
        self.reductions.refuse_stepped("clipping")
        if self.reductions.are_accumulated:
            own = self._accumulated(parameters)
            if self.mesh.tensor.size > 1:
                raise RuntimeError(
                    "Beside tensor parallelism gradients that have only accumulated on a rank (no_sync) cannot be "
                    "clipped by their norm. Clip after the backward that reduces them."
                )
            total = clip_grad_norm_(own, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
            return total.float()
        measured = self._measure(self.slots_with_gradients(parameters, Cause.CLIP, meets=True), norm_type)
        return norm.clip_by_norm_(measured, self.mesh, max_norm, error_if_nonfinite=error_if_nonfinite)

    def clip_by_value_(self, parameters: Iterable[Parameter] | Optimizer, clip_value: float) -> None:
        """Clamps every element to ``[-clip_value, clip_value]``; see `clip_by_norm_`. Collective."""
        self.reductions.refuse_stepped("clipping")
        if self.reductions.are_accumulated:
            for parameter in self._accumulated(parameters):
                local_of(parameter.grad).clamp_(-clip_value, clip_value)  # type: ignore[arg-type]
            return
        # It meets, as a rank may still read old values.
        norm.clip_by_value_(self.slots_with_gradients(parameters, Cause.LOOK, meets=True), clip_value)

    def _accumulated(self, parameters: Iterable[Parameter] | Optimizer) -> list[Parameter]:
        """Returns the parameters with a gradient, none of which is reduced here; see `Beside` for those with an average
        in it."""
        slots = self.slots_with_gradients(parameters, Cause.LOOK, meets=True)
        return [slot.parameter for slot in slots]

    def whole_on_host(self) -> dict[Parameter, Tensor]:
        """Returns host copies of the gradients that exist on all ranks, each in its parameter's dtype. Collective."""
        with torch.no_grad():
            self.slots_with_gradients(self.module.parameters(), meets=True)
            with no_interception():
                trained = [slot for slot in map(training_slot, self.module.parameters()) if slot is not None]
                found = [slot.parameter.grad is not None for slot in trained]
                has = torch.tensor(found, dtype=torch.uint8, device=HOST)
            everywhere = self.mesh.world.host.all_reduce(has, "gradients at the end", "min").tolist()
            left = {}
            for slot in itertools.compress(trained, everywhere):  # one at a time: all may not fit on the device
                if (grad := self.full(slot.parameter)) is not None:
                    left[slot.parameter] = grad.to("cpu", slot.parameter.dtype, copy=True)
            return left

    def unscale_(self, scaler: GradScaler, optimizer: Optimizer) -> norm.Overflow:
        """Does `GradScaler.unscale_`, with the same verdict on every rank. Collective.

        The scaler's own method would check only what this rank owns, and ranks would disagree on whether to step. The
        scaler's state for `optimizer` is the same as after its own method.
        """
        self.reductions.refuse_stepped("a gradient scaler")
        slots = self.slots_with_gradients(optimizer, Cause.UNSCALE, meets=True, steps=True)
        scale: Tensor = scaler.scale(torch.ones((), device=self.device))  # on the device: `get_scale` waits for it
        norm.scale_(slots, scale.double().reciprocal().float(), self.mesh.world.limit)
        self._measured = norm.Measured.of(slots)
        overflow = self._measured.overflow(self.mesh.world)
        state = scaling_of(scaler, optimizer)
        # On the host, where the verdict is, so that the scaler reads it without synchronising with the device.
        state["found_inf_per_device"] = {self.device: torch.tensor(float(bool(overflow.ranks)), device=HOST)}
        state["stage"] = OptState.UNSCALED
        return overflow

    def norms(self, norm_type: float = 2.0) -> dict[str, Tensor]:
        """Returns the norm of each averaged gradient (0-d, fp32, on the device), by the name of its parameter; of those
        that have only accumulated (`no_sync`), this rank's own. Collective."""
        slots = self.slots_with_gradients(self.module.parameters(), Cause.MEASURE, meets=True)
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        if self.reductions.are_accumulated:
            own = {names[slot.parameter]: whole_of(slot.parameter.grad) for slot in slots}
            return {name: torch.linalg.vector_norm(grad, norm_type).float() for name, grad in own.items()}
        norms = self._measure(slots, norm_type).norms(self.mesh)
        return {names[slot.parameter]: found for slot, found in zip(slots, norms.float().unbind(), strict=True)}

    def full(self, parameter: Parameter) -> Tensor | None:
        """Returns the averaged gradient of one parameter in its whole shape, or None if it has none; this rank's own if
        it has only accumulated (`no_sync`). Collective."""
        slots = self.slots_with_gradients([parameter])
        if not slots:
            return parameter.grad
        (slot,) = slots
        if self.reductions.are_accumulated:
            return whole_of(parameter.grad).clone()
        averaged = averaged_of(slot)
        local = self.loans.lend_gradient(slot) if averaged.is_spread else averaged.piece(slot)
        return slot.local.gathered(local.clone())
