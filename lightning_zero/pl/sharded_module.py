"""`ShardedModule`: what Fabric calls in the place of a module."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast, final

import torch
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.nn import Module, Parameter
from typing_extensions import override

from lightning_zero.run.engine import Engine


@final
class ShardedModule(Module):
    """What Fabric calls in the place of a module, as it calls DDP's wrapper.

    Args:
        module: the user's.
        make: makes the engine, once all optimizers are known: when it is first asked for.
    """

    def __init__(self, module: Module, make: Callable[["ShardedModule"], Engine]) -> None:
        super().__init__()
        self.module = module
        self.made: Engine | None = None
        self._make = make
        self._is_blocked = False  # the next backward is not the last of its step

    @property
    def engine(self) -> Engine:
        if self.made is None:
            with torch.inference_mode(False), torch.enable_grad():  # what is made here trains later
                self.made = self._make(self)
        return self.made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _tell_uncompiled()
        return self._call(*args, **kwargs)

    @torch.compiler.disable
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        reduces = torch.is_grad_enabled() and not self._is_blocked
        with self.engine.forward(reduces=reduces):
            return self.module(*args, **kwargs)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around forward and backward of all but the last micro-batch."""
        self._is_blocked = True
        try:
            with self.engine.accumulating():
                yield
        finally:
            self._is_blocked = False

    def has(self, what: Module | Parameter) -> bool:
        return any(one is what for one in (self.modules() if isinstance(what, Module) else self.parameters()))


@final
class SyncControl(_BackwardSyncControl):
    @override
    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        return cast(ShardedModule, module).accumulating() if enabled else nullcontext()


@torch.compiler.disable
def _tell_uncompiled() -> None:
    """Fabric compiles what it calls, around the engine, which cannot be traced."""
    rank_zero_warn(
        "fabric.setup(torch.compile(model), ...) runs uncompiled with ZeroStrategy. Compile the model in place before: "
        "model.compile(); fabric.setup(model, ...)."
    )
