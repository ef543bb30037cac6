"""Before and after a module, without hooks on it."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch.nn import Module

from lightning_zero.views.intercept import untraced


@final
class _InPlaceOfCall:
    """What torch calls in place of a module. Of a module that is copied or pickled nothing but None goes along: torch
    leaves it behind, and Lightning's module, which has a `__getstate__` of its own, would take it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _unseen(function: Callable[..., None]) -> Callable[..., None]:
    """`function`, of which neither a compiler nor a tracer takes notice."""

    def unseen(*args: Any) -> None:
        with untraced():
            function(*args)

    disabled: Callable[..., None] = torch.compiler.disable(unseen)
    return disabled


@final
class Surrounding:
    """Does something before and after each call of a module, its hooks and all.

    Not by hooks: torch's transformer layers leave their fused path when any module inside has one, `module.compile()`
    would trace them, and a copy of the module would take them along. Torch calls `_compiled_call_impl` in place of a
    module, where there is one; copies and pickles leave it behind.

    Args:
        module: the user's.
        before: called with nothing.
        after: called with the arguments of the call and its result (None if it raised).
    """

    def __init__(self, module: Module, before: Callable[[], None], after: Callable[[Any, Any], None]) -> None:
        self._module = module
        self._previous = module._compiled_call_impl
        inner = self._previous or module._call_impl

        @torch.compiler.disable(recursive=False)  # a compiler would trace our collectives
        def call(*args: Any, **kwargs: Any) -> Any:
            unseen_before()
            output = None
            try:
                output = inner(*args, **kwargs)
            finally:
                unseen_after((args, kwargs), output)
            return output

        unseen_before, unseen_after = _unseen(before), _unseen(after)
        module._compiled_call_impl = _InPlaceOfCall(call)

    def remove(self) -> None:
        self._module._compiled_call_impl = self._previous


@final
class Around:
    """Calls `around(inner, args, kwargs)` in place of each call of a module; `inner` is that call, its hooks and all.
    As `Surrounding`, and for modules whose callers nobody compiles."""

    def __init__(self, module: Module, around: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        self._module = module
        self._previous = module._compiled_call_impl
        inner = self._previous or module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            return around(inner, args, kwargs)

        module._compiled_call_impl = _InPlaceOfCall(call)

    def remove(self) -> None:
        self._module._compiled_call_impl = self._previous
