"""`Training`: trains a random model as its plan says, under an engine or under what DDP does."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_zero.run.average import Average
from random_acts import ACTS, Moment
from random_changes import OF_DATA, OF_GRADIENTS, OF_WHAT_TRAINS, trained_by
from random_ddp import Ddp
from random_models import Model, Place
from random_optimizers import SCHEDULES
from random_plans import Micro, Plan

STEPS = 3
EVALUATION, MORE = 7, 8  # micro-batches of other forwards
RULE = get_ema_avg_fn(0.7)


class Training:
    """Notes every loss and, if the plan asks for them, every gradient."""

    def __init__(self, model: Model, engine: Any, optimizers: list[Optimizer], plan: Plan, rank: int) -> None:
        self.model, self.engine, self.optimizers, self.plan, self.rank = model, engine, optimizers, plan, rank
        self.seen: dict[str, Tensor] = {}
        self.step = 0
        self.steps_now = True  # this step calls the optimizers
        self.kept: dict[str, Any] = {}  # by acts
        self._passes = 0  # through the micro-batches of a step
        self._schedulers = [SCHEDULES[plan.schedule](one) for one in optimizers if plan.schedule is not None]
        self._scaler = None
        if plan.scale is not None:
            self._scaler = GradScaler("cpu", init_scale=plan.scale, backoff_factor=2.0**-6, growth_interval=1)
        self._losses: list[Tensor] = []
        self._average = self._make_average() if plan.averages else None
        if plan.hook is not None:
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            parameters[plan.hook % len(parameters)].register_hook(lambda grad: grad * 0.5)

    @property
    def is_ddp(self) -> bool:
        return isinstance(self.engine, Ddp)

    def run(self, micro: int, *, reduces: bool) -> list[Tensor]:
        place = Place(self.rank, self.step, micro)
        seed = 100 * place.step + 10 * place.micro + place.rank
        signal = torch.randn(3, self.model.head.in_features, generator=torch.Generator().manual_seed(seed))
        # As Lightning enters it; the cache would be one for all threads.
        autocast = torch.autocast(
            "cpu", self.plan.autocast, enabled=self.plan.autocast is not None, cache_enabled=False
        )
        with self.engine.forward(reduces=reduces), autocast:
            return self.model(signal, place)

    def evaluate(self, name: str) -> None:
        self.model.eval()
        with torch.no_grad():
            # With fresh buffers, as DDP, where the training forward before was the last of its step.
            self.seen[name] = self.run(EVALUATION, reduces=False)[-1]
        self.model.train()

    def act(self, moment: Moment) -> None:
        for act in self.plan.acts:
            if (act.moment, act.step) == (moment, self.step):
                ACTS[act.name](self, act.which)

    def take_all_steps(self) -> dict[str, Tensor]:
        for self.step in range(STEPS):
            self.steps_now = True
            change = dict(enumerate(self.plan.regroups, 1)).get(self.step)
            if change is not None:
                OF_WHAT_TRAINS[change](self.model, self.optimizers, self.rank)
            if self.plan.closes:
                for optimizer in self._stepping():
                    optimizer.step(self._closure)
                self._end_step()
                continue
            self._pass()
            if self.step == self.plan.fails:
                self.model.zero_grad()
                if self.is_ddp:
                    self.engine.forget()
            else:
                self._step()
                self._end_step()
        return self.seen | self._averaged()

    def _stepping(self) -> list[Optimizer]:
        turn = [self.optimizers[self.step % len(self.optimizers)]]
        return turn if self.plan.takes_turns else self.optimizers

    def _closure(self) -> Tensor:
        self._pass()
        self._change_gradients()
        return self._losses[-1].detach()

    def _pass(self) -> None:
        """All micro-batches of a step."""
        if self.step % self.plan.clears_every == 0:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=self.plan.set_to_none)
        micros: tuple[Micro, ...] = (*self.plan.earlier_micro_batches, "sync")
        for number, micro in enumerate(micros):
            self._micro_batch(number, micro)
        self._passes += 1

    def _micro_batch(self, number: int, micro: Micro) -> None:
        plan, engine, is_last = self.plan, self.engine, micro == "sync"
        way = {"accumulate": engine.accumulating, "no_sync": engine.no_sync, "sync": nullcontext}[micro]
        last_of_all = number == len(plan.earlier_micro_batches)
        with way():
            if number == 0 or not plan.shares_forward:
                if last_of_all:
                    self.act("before forward")
                self._losses = self.run(number, reduces=is_last)
            losses = self._losses
            chosen = {"last": losses[-1], "sum": torch.stack(losses).sum(), "in turn": losses[number % len(losses)]}
            loss = chosen[plan.loss]
            if plan.data_edit is not None and is_last:
                parameters = list(self.model.parameters())
                OF_DATA[plan.data_edit[0]](parameters[plan.data_edit[1] % len(parameters)])
            if last_of_all:
                self.act("before backward")
            looks = self._looking(loss) if plan.reads is not None and is_last else nullcontext()
            fails = self._failing() if self.step == plan.fails and last_of_all else nullcontext()
            with fails, looks, engine.backward() if plan.bracketed or self.is_ddp else nullcontext():
                self._scaled(loss).backward(retain_graph=plan.shares_forward and not last_of_all)
        self.seen[f"loss {self.step}.{self._passes}.{number}"] = loss.detach()

    def _scaled(self, loss: Tensor) -> Tensor:
        if self._scaler is None:
            return loss
        at, rank = self.plan.overflows or (None, 0)
        is_infinite = self.step == at and self.rank == rank % self.plan.world
        return self._scaler.scale(loss) * (torch.inf if is_infinite else 1)

    def _step(self) -> None:
        stepping = self._stepping()
        if self._scaler is not None:
            for optimizer in stepping:
                self.engine.gradients.unscale_(self._scaler, optimizer)
        self._change_gradients()
        for optimizer in stepping if self.steps_now else ():
            optimizer.step() if self._scaler is None else self._scaler.step(optimizer)
        if self._scaler is not None:
            self._scaler.update()
            self.seen[f"scale {self.step}"] = torch.tensor(self._scaler.get_scale())

    def _change_gradients(self) -> None:
        """What users and a Trainer do with gradients before a step."""
        plan, trained = self.plan, trained_by(self.optimizers)
        if plan.gradient_edit is not None:
            for parameter in trained:
                if parameter.grad is not None and parameter.numel():
                    OF_GRADIENTS[plan.gradient_edit](parameter.grad)
        self.act("before step")
        if plan.clip is not None:
            gradients, (how, limit) = self.engine.gradients, plan.clip
            {"norm": gradients.clip_by_norm_, "value": gradients.clip_by_value_}[how](trained, limit)
        if plan.reads_gradients:
            for name, parameter in self.model.named_parameters():
                if parameter in set(trained) and parameter.grad is not None:
                    self.seen[f"gradient {self._passes} {name}"] = parameter.grad.clone()

    def _end_step(self) -> None:
        for scheduler in self._schedulers:
            scheduler.step()
        if self._average is not None:
            self._average.update_parameters(self.model)
        self.act("after step")
        if self.plan.evaluates:
            self.evaluate(f"evaluation {self.step}")

    @contextmanager
    def _looking(self, loss: Tensor) -> Iterator[None]:
        """Around a backward: reads a weight before it, at its beginning or at its end, in a hook of a tensor."""
        assert self.plan.reads is not None
        when, which = self.plan.reads
        parameters, name = list(self.model.parameters()), f"weight {self.step}"

        def look(_: Any = None) -> None:
            found = parameters[which % len(parameters)].detach().sum()
            if not (self.plan.ways.steps_in_backward and when == "as it ends"):  # it may be stepped by then
                self.seen[name] = found

        if when == "before":
            look()
            yield
            return
        handle = (loss if when == "as it begins" else self.model.gain).register_hook(look)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Around a backward, which raises an error on every rank; users catch it."""
        head = self.model.head.weight
        begins = self.plan.loss != "in turn" and head.requires_grad and self.plan.bracketed
        handle = (head if begins else self.model.gain).register_hook(_raise)
        with suppress(ZeroDivisionError):
            yield
        handle.remove()

    # -- a running average

    def _make_average(self) -> Any:
        if self.is_ddp:
            return AveragedModel(self.model, avg_fn=RULE, use_buffers=True)
        return Average(self.engine, RULE)

    def _averaged(self) -> dict[str, Tensor]:
        """What is frozen is left out: torch's average of it drifts by rounding."""
        if self._average is None:
            return {}
        state = self._average.module.state_dict() if self.is_ddp else self._average.full()
        frozen = {name for name, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        return {f"average {name}": value.detach().clone() for name, value in state.items() if name not in frozen}


def _raise(grad: Tensor) -> None:
    raise ZeroDivisionError
