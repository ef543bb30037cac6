"""`Ddp`: what DDP does, to compare an engine with."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_zero.torch_private import scaling_of
from lightning_zero.wire.comm import Comm
from random_plans import Plan


class Ddp:
    """What DDP does, with unused parameters found, in an engine's clothes: nothing partitioned, nothing overlapped."""

    def __init__(self, module: nn.Module, optimizers: list[Optimizer], plan: Plan, comm: Comm) -> None:
        self.module, self.plan, self.comm = module, plan, comm
        self.reduces = True
        self._is_stale = True  # the buffers
        self._before: dict[nn.Parameter, Tensor | None] | None = None  # gradients of earlier windows of the step
        self._broadcast([*module.parameters(), *module.buffers()])
        self._trained: dict[nn.Parameter, str] = {}
        self._masters: dict[nn.Parameter, Tensor] = {}  # of those that rest in another dtype
        if plan.param_dtype is not None:
            self._masters = {p: p.detach().clone() for p in module.parameters()}
            self._round()
        self._take_in()
        self._is_stepping = False  # parameters and gradients have the dtypes in which they are stepped
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(lambda *_: self._end_step())

    def _take_in(self) -> None:
        """What trains by now."""
        newly = {p: name for name, p in self.module.named_parameters() if p.requires_grad and p not in self._trained}
        self._broadcast(list(newly))
        self._trained |= newly
        for parameter in newly:
            parameter.grad_dtype = self._grad_dtype(parameter)

    def _grad_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        declared = self._masters.get(parameter, parameter).dtype
        return self.plan.reduce_dtype or torch.promote_types(declared, torch.float32)

    # -- a step

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A closure finds everything as it is outside of a step."""
        closures = args[1:]

        def closure() -> Any:
            self._end_step()
            loss = closures[0]()
            self._begin_step()
            return loss

        if not closures:
            self._begin_step()
        return (*args[:1], *([closure] if closures else [])), kwargs

    def _begin_step(self) -> None:
        """Casts to what optimizers step; the sum goes on from the gradients as they are."""
        self._keep_edits()
        self._summed = {parameter: parameter.grad for parameter in self._trained}
        for parameter, grad in self._summed.items():
            parameter.grad = None
            parameter.data = self._masters.get(parameter, parameter.data)
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if grad is None else grad.to(parameter.dtype)
        self._is_stepping = True

    def _end_step(self) -> None:
        if self._is_stepping:
            for parameter in self._summed:
                parameter.grad = None
            self._round()
            for parameter, grad in self._summed.items():
                parameter.grad_dtype = self._grad_dtype(parameter)
                parameter.grad = grad
        self._is_stepping = False

    # -- masters

    def _round(self) -> None:
        for parameter, master in self._masters.items():
            assert self.plan.param_dtype is not None
            parameter.data = master.to(self.plan.param_dtype, copy=True)

    def _keep_edits(self) -> None:
        """Only what differs: the others keep all bits of their masters."""
        for parameter, master in self._masters.items():
            own = parameter.detach()
            master.copy_(torch.where(own != master.to(own), own.to(master), master))

    def _broadcast(self, tensors: list[Any]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                values = tensor.clone()
                self.comm.broadcast(values, "ddp state")
                tensor.copy_(values)

    @contextmanager
    def forward(self, *, reduces: bool) -> Iterator[None]:
        if torch.is_grad_enabled():
            self._take_in()
        if self._is_stale:
            self._broadcast(list(self.module.buffers()))
        yield
        self._is_stale = reduces and self.plan.broadcast_buffers

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.reduces = False
        yield
        self.reduces = True

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext() if self.plan.is_reduced("accumulate") else self.no_sync()

    @contextmanager
    def backward(self) -> Iterator[None]:
        if self._before is None:
            self._before = {parameter: parameter.grad for parameter in self._trained}
            if self.plan.averages_first:
                for parameter in self._trained:
                    parameter.grad = None
        yield
        if self.reduces:
            for number, parameter in enumerate(self._trained):
                parameter.grad = self._average(parameter, self._before[parameter], f"{number}")
            self._before = None

    def _average(self, parameter: nn.Parameter, before: Tensor | None, name: str) -> Tensor | None:
        grad = parameter.grad
        mine = torch.zeros_like(parameter, dtype=self._grad_dtype(parameter)) if grad is None else grad
        used = self.comm.all_reduce(torch.tensor([grad is not None], dtype=torch.uint8), f"used {name}", "max")
        rows = mine.new_empty(self.comm.size, mine.numel())
        self.comm.all_gather(rows, mine.reshape(-1), f"average {name}").wait()
        if not used.item():
            return before if self.plan.averages_first else None
        total = rows[0].clone()
        for row in rows[1:]:
            total.add_(row)
        average = total.div_(self.comm.size).view_as(parameter)
        return before + average if self.plan.averages_first and before is not None else average

    @property
    def gradients(self) -> Any:
        return self

    def clip_by_norm_(self, parameters: Any, max_norm: float) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return
        norm = torch.stack([grad.double().norm() for grad in gradients]).norm().float()
        for grad in gradients:
            grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))

    def clip_by_value_(self, parameters: Any, clip_value: float) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.clamp_(-clip_value, clip_value)

    def unscale_(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
            scaler.unscale_(optimizer)
        else:  # the scaler would refuse to step
            found = {"found_inf_per_device": {torch.device("cpu"): torch.zeros(())}, "stage": OptState.UNSCALED}
            scaling_of(scaler, optimizer).update(found)

    def forget(self) -> None:
        """A backward has failed, and users have dropped what there was."""
        self._before = None

    # -- what an engine has for whole values

    def full_parameters(self, *, write: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def loans(self) -> Any:
        return self

    def end_all(self) -> None:
        """There is nothing to end."""

    @property
    def states(self) -> Any:
        return self

    def full_model(self) -> dict[str, Tensor]:
        self._keep_edits()
        state = self.module.state_dict(keep_vars=True)
        return {name: self._masters.get(value, value) for name, value in state.items()}

    def full_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._begin_step()  # it casts to the dtypes of parameters
        optimizer.load_state_dict(state)
        self._end_step()
