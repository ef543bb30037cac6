"""LightningModules that do to a sharded model what cannot work, and some that only look like it."""

import io
import logging
import os
import sys
import traceback
import warnings
from contextlib import redirect_stderr
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs import CLASSES, FEATURES, loader, state_of, trainer
from kind_jobs import SAMPLES, WIDTH, Kind, OnQuantised, Quantised
from lightning_zero.wire.comm import CollectiveMismatchError

# -- other optimizers


class OptimizersMadeAnew(Kind):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)


class OptimizerReplaced(Kind):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.optimizers = [torch.optim.AdamW(self.parameters())]


class SeveralBackwards(Kind):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class BackwardOfTheSum(Kind):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss + loss).backward()


# -- other dtypes


class Halved(Kind):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.half()


class HalvedInTrainingStep(Kind):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.last.to(torch.bfloat16)
        hidden = torch.tanh(self.first(batch[0]))
        return self.last(hidden.to(self.last.weight.dtype)).float().square().mean()


class HalvedInValidation(Kind):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_step:
            self.half()


class Doubled(Kind):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.last.double()


class DoubledAfterBackward(Kind):
    def on_after_backward(self) -> None:
        self.last.double()


class DoubledAtTheEnd(Kind):
    def on_train_end(self) -> None:
        self.last.double()


# -- other parameters


def made_alike(inputs: int, outputs: int) -> nn.Linear:
    """With the same values on every rank: under DDP nobody sends them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Linear(inputs, outputs)


class ReplacedInTrainingStep(Kind):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.last = nn.Linear(WIDTH, CLASSES)
        return super().training_step(batch, batch_idx)


class Growing(Kind):
    def inside(self, hidden: Tensor) -> Tensor:
        return self.more(hidden).float() if hasattr(self, "more") else hidden


class AddedInTrainingStep(Growing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.more = nn.Linear(WIDTH, WIDTH)
        return super().training_step(batch, batch_idx)


class Frozen(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden + self.extra(hidden).float()


class ThawedInTrainingStep(Frozen):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.extra.requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.extra.parameters())})
        return super().training_step(batch, batch_idx)


# -- what cannot be sharded


class Foreign(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.quantised = nn.Parameter(Quantised.of(torch.randn(WIDTH, WIDTH)))


class ForeignThawed(OnQuantised):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.adapted.base.weight.requires_grad_(True)


class TiedByData(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(FEATURES, WIDTH)
        self.more.weight.data = self.first.weight.data


class OverlapsByData(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(self.first.weight.data[1:])


class KeptInABuffer(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", self.first.weight.data)


class KeptInABufferAndFrozen(KeptInABuffer):
    """The optimizer has the parameter, which a callback may thaw."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class InTheGaps(Kind):
    """Two parameters in one tensor, and no element in both; and a buffer of what does not train."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.ones(WIDTH, 2)
        self.even, self.odd = nn.Parameter(both[:, 0]), nn.Parameter(both[:, 1])
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("kept", self.fixed.data)


class OnlySaysSo(Kind):
    """Its optimizer is a wrapper that torch has not made, and whose `__class__` says that it has."""

    def configure_optimizers(self) -> Any:
        return SaysItIsOne(torch.optim.SGD(self.parameters(), lr=1e-2))


class SaysItIsOne:
    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self.wrapped = wrapped
        self.defaults, self.state, self.param_groups = wrapped.defaults, wrapped.state, wrapped.param_groups
        self.state_dict, self.load_state_dict = wrapped.state_dict, wrapped.load_state_dict
        self.zero_grad = wrapped.zero_grad

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return torch.optim.Optimizer

    def step(self, closure: Any = None) -> Any:
        return self.wrapped.step(closure)


class InTwoGroups(Kind):
    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.first.weight]}, {"params": [self.first.weight, self.last.weight]}]
        return torch.optim.Adam(groups, lr=1e-2)


class AveragesItself(Kind):
    """Its optimizer averages what DDP has averaged, as one does that was written for a loop without DDP."""

    def configure_optimizers(self) -> Any:
        return Averaging(self.parameters(), lr=1e-2)


class Averaging(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        super().step()
        return loss


# -- what looks like it


class Moved(Kind):
    """To where everything is already."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.to("cpu").cpu().float().to(torch.float32)
        self.last.to(self.device, torch.float32)


class Wrapped(Frozen):
    """A module is put into another one, and one that does not train is replaced."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.first = nn.Sequential(self.first, nn.Dropout(0.0))
        if batch_idx == 2:
            self.extra = nn.Linear(WIDTH, WIDTH).requires_grad_(False)


class Removed(Growing):
    """A module goes; the optimizer keeps its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(WIDTH, WIDTH)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            del self.more


class ThawedButNotStepped(Frozen):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.extra.requires_grad_(True)


class ModuleReplaced(Kind):
    """The optimizer keeps the old one."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.last = made_alike(WIDTH, CLASSES)


class ModuleReplacedBeforeTheFirstStep(Kind):
    def on_fit_start(self) -> None:
        self.last = made_alike(WIDTH, CLASSES)


class WeightReplaced(Kind):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.last.weight = nn.Parameter(torch.zeros(CLASSES, WIDTH))


class Added(Growing):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.more = made_alike(WIDTH, WIDTH)


class AddedToTheOptimizer(Kind):
    """A group of parameters that asked for gradients all along."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.optimizers().add_param_group({"params": list(self.last.parameters())})

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.first.parameters(), lr=1e-2)


class FrozenInTheOptimizer(OnQuantised):
    """Everything goes to the optimizer, integers and quantised weights too; state is made for all at construction."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


class ListedTwice(Kind):
    def configure_optimizers(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.optim.SGD([*self.parameters(), self.first.weight], lr=0.1, momentum=0.9)


def fit(strategy: Any, name: str, precision: str = "32-true") -> dict[str, Any]:
    """The losses and weights, or the error."""
    L.seed_everything(1 + int(os.environ["RANK"]), verbose=False)
    model = globals()[name]()
    try:
        data = loader(samples=SAMPLES), loader(seed=1, samples=8)
        trainer(strategy, 2, precision=precision, num_sanity_val_steps=0).fit(model, *data)
    except (RuntimeError, ValueError) as error:
        return {"error": str(error)}
    return {"losses": model.losses, "weights": state_of(model)}


# -- collectives that differ


class Disagreeing(Kind):
    """Each rank issues a collective of its own in the second batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        comm, rank, twins = strategy.comm, self.global_rank, torch.ones(2)
        ways = {
            "name": lambda: comm.all_reduce(twins, f"of rank {rank}"),
            "size": lambda: comm.all_reduce(torch.ones(2 + rank), "mine"),
            "dtype": lambda: comm.all_reduce(twins.double() if rank else twins, "mine"),
            "kind": lambda: comm.broadcast(twins, "mine") if rank else comm.all_reduce(twins, "mine"),
            "object": lambda: comm.all_gather_object(1, "mine") if rank else comm.all_reduce(twins, "mine"),
            "method": lambda: strategy.barrier() if rank else strategy.reduce(twins),
        }
        if batch_idx == 1:
            ways[self.how]()


def disagree(strategy: Any, how: str) -> str | None:
    try:
        trainer({**strategy, "sanitize": True}, 2).fit(Disagreeing(how), loader(samples=SAMPLES))
    except CollectiveMismatchError as error:
        return str(error)
    return None


# -- how an error is told


class Mistaken(Kind):
    """Fails in code of the user's, at set-up."""

    def configure_optimizers(self) -> Any:
        raise ValueError("the user's own")


def told_of(name: str) -> dict[str, Any]:
    """What is logged of an error, what Python prints of it, and the packages whose calls are in its traceback."""
    logged: list[str] = []
    logger, listener = logging.getLogger("lightning_zero"), logging.Handler()
    listener.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(listener)
    before, printed = sys.excepthook, io.StringIO()
    try:
        trainer({"stage": 2}, 2).fit(globals()[name](), loader())
    except Exception as error:
        with redirect_stderr(printed):
            sys.excepthook(type(error), error, error.__traceback__)
        calls = [call.f_globals["__name__"].partition(".")[0] for call, _ in traceback.walk_tb(error.__traceback__)]
        return {"logged": logged, "printed": printed.getvalue(), "calls": calls, "error": str(error)}
    finally:
        sys.excepthook = before
        logger.removeHandler(listener)
    raise AssertionError("it trained")
