"""Runs code around the calls of a module, without putting hooks on it.

Hooks would do harm: torch's transformer layers leave their fused path when any module inside has one,
`module.compile()` would trace them, and a copy of the module would take them along.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch
from torch.nn import Module

from lightning_zero.torch_private import call_of, replace_call
from lightning_zero.views.intercept import untraced


class _InPlace(ABC):
    """Is called in place of `module`, until `remove`.

    `_call` is what torch would have called: the module with all its hooks. Torch leaves this behind when the module is
    copied or pickled. A module with a `__getstate__` of its own, as Lightning's, would take it along, so a copy or a
    pickle of this object is None.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._call = call_of(module)
        self._previous = replace_call(module, self)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    def remove(self) -> None:
        replace_call(self._module, self._previous)


@final
class Around(_InPlace):
    """Calls `around(call, args, kwargs)` in place of each call of `module`; `call` calls it."""

    def __init__(self, module: Module, around: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        super().__init__(module)
        self._around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._call, args, kwargs)


@final
class Surround(_InPlace):
    """Calls `before` before each call of `module`, and `after` after it, also when it raises. Unlike `Around`, this may
    be used where the calls are compiled."""

    def __init__(self, module: Module, before: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
        super().__init__(module)
        # A compiler would trace our collectives.
        self._before, self._after = torch.compiler.disable(before), torch.compiler.disable(after)

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with untraced():
            self._before()
        try:
            return self._call(*args, **kwargs)
        finally:
            with untraced():
                self._after()
