"""`Averages`: averaged gradients between backward and step, as users clip, measure and read them."""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero.run.loans import Loans
from lightning_zero.run.reductions import Reductions
from lightning_zero.shards import norm
from lightning_zero.shards.optimizer import training_slot
from lightning_zero.shards.slot import Slot, no_interception
from lightning_zero.wire.mesh import Mesh


@final
class Averages:
    """Those of an engine's module. All ranks call the same."""

    def __init__(self, module: Module, device: torch.device, mesh: Mesh, loans: Loans, reductions: Reductions) -> None:
        self._module = module
        self._device = device
        self._mesh = mesh
        self._loans = loans
        self._reductions = reductions
        self._measured: norm.Measured | None = None  # for an overflow, and good for clipping too

    def of(self, parameters: Iterable[Parameter] | Optimizer, *, meets: bool = False) -> list[Slot]:
        """Those of the parameters that have a gradient, each once. A collective after a backward; say so if one of the
        caller's (`meets`) follows."""
        self._loans.catch_up_all()
        if isinstance(parameters, Optimizer):
            parameters = [parameter for group in parameters.param_groups for parameter in group["params"]]
        rendezvous = self._loans.rendezvous
        if meets:
            rendezvous.meet_with_gradients()
        else:
            rendezvous.settle_gradients()
        with no_interception(), torch.no_grad():
            self._loans.take_back_gradients()
            found = [p for p in dict.fromkeys(parameters) if p.grad is not None]
            slots = [slot for slot in map(training_slot, found) if slot is not None]
            for slot in slots:
                self._reductions.adopt(slot)
        return slots

    def _measure(self, slots: list[Slot], norm_type: float = 2.0) -> norm.Measured:
        if self._measured is not None and self._measured.is_of(slots, norm_type):
            return self._measured
        return norm.Measured.of(slots, norm_type)

    def forget(self) -> None:
        """A step has taken them."""
        self._measured = None

    def refuse_stepped(self, doing: str) -> None:
        """Raises RuntimeError for what needs gradients after backward, where it steps them."""
        if self._reductions.step is not None:
            raise RuntimeError(
                f"step_in_backward=True takes each gradient as it comes, and there is nothing left for {doing}. Leave "
                "step_in_backward out."
            )

    def clip_by_norm_(
        self,
        parameters: Iterable[Parameter] | Optimizer,
        max_norm: float,
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> norm.GradNorm:
        """Scales gradients so that their global p-norm is at most `max_norm`. A collective.

        Raises:
            RuntimeError: if `error_if_nonfinite`, on every rank, for a norm that is not finite; nothing is scaled then.
        """
        self.refuse_stepped("clipping")
        slots = self.of(parameters, meets=True)
        measured = self._measure(slots, norm_type)
        return norm.clip_by_norm_(measured, self._mesh, max_norm, error_if_nonfinite=error_if_nonfinite)

    def clip_by_value_(self, parameters: Iterable[Parameter] | Optimizer, clip_value: float) -> None:
        """Clamps every element to ``[-clip_value, clip_value]``."""
        self.refuse_stepped("clipping")
        norm.clip_by_value_(self.of(parameters, meets=True), clip_value)  # a rank may still look at what they were

    def whole_on_host(self) -> dict[Parameter, Tensor]:
        """Copies of all that are there on every rank, each in the dtype of its parameter. A collective."""
        with torch.no_grad():
            self.of(self._module.parameters(), meets=True)
            with no_interception():
                trained = [slot for slot in map(training_slot, self._module.parameters()) if slot is not None]
                has = torch.tensor([slot.parameter.grad is not None for slot in trained], dtype=torch.uint8)
            here = self._mesh.world.host.all_reduce(has, "gradients at the end", "min").tolist()
            kept = [slot.parameter for slot, is_here in zip(trained, here, strict=True) if is_here]
            left = {}
            for parameter in kept:  # one after the other: a model's gradients may not fit on the device
                if (grad := self.full(parameter)) is not None:
                    left[parameter] = grad.to("cpu", parameter.dtype, copy=True)
            return left

    def unscale_(self, scaler: GradScaler, optimizer: Optimizer) -> norm.Overflow:
        """`GradScaler.unscale_` for gradients that are spread over ranks: every rank comes to the same verdict.

        The scaler's own would look at what this rank owns alone, and ranks would then disagree on whether to step. Its
        state for `optimizer` is as after its own `unscale_`.
        """
        self.refuse_stepped("a gradient scaler")
        slots = self.of(optimizer, meets=True)
        scale, _ = scaler._check_scale_growth_tracker("unscale_")
        norm.scale_(slots, scale.double().reciprocal().float())
        self._measured = norm.Measured.of(slots)
        overflow = self._measured.overflow(self._mesh.world.host)
        state: dict[str, Any] = scaler._per_optimizer_states[id(optimizer)]
        # On the host, where the verdict is: the scaler's question of it costs no look at the device.
        state["found_inf_per_device"] = {self._device: torch.tensor(float(bool(overflow.ranks)))}
        state["stage"] = OptState.UNSCALED
        return overflow

    def norms(self, norm_type: float = 2.0) -> dict[str, Tensor]:
        """Parameter name -> norm of its averaged gradient (0-d, fp32), for those that have one. A collective."""
        slots = self.of(self._module.parameters(), meets=True)
        norms = self._measure(slots, norm_type).norms(self._mesh)
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        return {names[slot.parameter]: found for slot, found in zip(slots, norms.float().unbind(), strict=True)}

    def full(self, parameter: Parameter) -> Tensor | None:
        """The averaged gradient of one parameter, in its whole shape; None where it has none. A collective."""
        slots = self.of([parameter])
        if not slots:
            return parameter.grad
        (slot,) = slots
        gradient = norm.gradient_of(slot)
        local = self._loans.lend_gradient(slot) if gradient.is_spread else gradient.piece(slot)
        return slot.local.gathered(local.clone())
