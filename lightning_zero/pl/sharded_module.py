"""`ShardedModule`: wraps a module under Fabric, as DDP does."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, cast, final

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.wrappers import is_wrapped
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero.run.engine import Engine
from lightning_zero.torch_private import tree_iter


@final
class ShardedModule(Module):
    """Wrapper that Fabric calls instead of the user's module, as it calls DDP's. It calls `make` when the engine is
    first used: only then are all optimizers known."""

    def __init__(self, module: Module, make: Callable[["ShardedModule"], Engine]) -> None:
        super().__init__()
        self.module = module
        self.made: Engine | None = None
        self.bytes_to_save = 0  # of the module and its optimizers, once it trains
        self._make = make
        self._is_blocked = False  # the next backward is not the last of its step

    def ensure_engine(self) -> Engine:
        """Returns the engine, which is made here if there is none. Collective then."""
        if self.made is None:
            with torch.inference_mode(False), torch.enable_grad():  # the tensors made here are trained later
                self.made = self._make(self)
        return self.made

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        """Returns a copy of the module, which no engine knows: for averages of weights and the like. Fabric then calls
        it as a model that has no wrapper."""
        return deepcopy(self.module, memo)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _warn_uncompiled()
        return self._run_forward(*args, **kwargs)

    @torch.compiler.disable
    def _run_forward(self, *args: Any, **kwargs: Any) -> Any:
        reduces = torch.is_grad_enabled() and not self._is_blocked
        with self.ensure_engine().forward(reduces=reduces):
            output = self.module(*args, **kwargs)
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._begin_backward)
        return output

    def _begin_backward(self, _: Tensor) -> None:
        """Backward begins here: hooks on gradients that users have added since the forward come before the engine's.
        The strategy's `backward` would not do: where a strategy has one, Fabric refuses `loss.backward()`."""
        if self.made is not None:
            self.made.runner.hooks.begin_pass()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Surrounds forward and backward of each micro-batch of a step but the last: whole gradients stay on this rank.
        `Options.accumulation` is for the Trainer, which surrounds micro-batches without being asked."""
        self._is_blocked = True
        try:
            with self.ensure_engine().no_sync():
                yield
        finally:
            self._is_blocked = False

    def has(self, what: Module | Parameter | None) -> bool:
        """Whether `what` is this module, also in Fabric's wrapper, or one of its modules or parameters, or None."""
        wanted: Any = what.module if isinstance(what, Module) and is_wrapped(what) else what
        parts = self.modules() if isinstance(wanted, Module) else self.parameters()
        return what is None or any(one is wanted for one in parts)

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` has a parameter of this module."""
        own = set(self.parameters())
        return any(not own.isdisjoint(group["params"]) for group in optimizer.param_groups)


@final
class SyncControl:
    """Serves `Fabric.no_backward_sync`."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled or not isinstance(module, ShardedModule):  # a copy, whose gradients are never averaged
            return nullcontext()
        return module.accumulating()


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns the user's optimizer, also from the wrapper of Fabric, which its own strategies take as well."""
    return cast(Any, optimizer).optimizer if is_wrapped(optimizer) else optimizer


@torch.compiler.disable
def _warn_uncompiled() -> None:
    """Warns that the user has compiled the wrapper, and with it the engine, which cannot be traced."""
    rank_zero_warn(
        "A model compiled after fabric.setup runs uncompiled with ZeroStrategy. Compile it before: "
        "fabric.setup(torch.compile(model), ...)."
    )
