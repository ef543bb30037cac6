"""`Modes`: runs an optimizer's own `train` and `eval` on pieces."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NoReturn, final

from torch.optim import Optimizer

NAMES = ("train", "eval")


@final
class Modes:
    """The methods `train` and `eval` of an optimizer that has them, run on pieces. Schedule-free optimizers (arXiv
    2405.15682) have them: they move the weights to other values and back, by the optimizer's state.

    Args:
        optimizer: the user's; the methods of this one object are replaced, until `remove`.
        change: calls a function that changes parameters and state, with both in pieces.
        is_cut: the optimizer's state is in pieces, and stays so after `remove`.
    """

    def __init__(self, optimizer: Optimizer, change: Callable[[Callable[[], Any]], Any], *, is_cut: bool) -> None:
        self._optimizer = optimizer
        self._change = change
        self._is_cut = is_cut
        self._is_running = False
        kind: Any = type(optimizer)
        has_both = all(callable(getattr(kind, name, None)) for name in NAMES)
        self._methods = {name: getattr(kind, name) for name in NAMES if has_both}
        for name in self._methods:
            self._replace(name, self._run)

    def _replace(self, name: str, by: Callable[..., Any]) -> None:
        vars(self._optimizer)[name] = wraps(self._methods[name])(partial(by, name))

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._methods[name], self._optimizer, *args, **kwargs)
        if self._is_running:  # one calls the other: all are pieces already
            return call()
        self._is_running = True
        try:
            return self._change(call)
        finally:
            self._is_running = False

    def remove(self) -> None:
        """Gives the optimizer its own methods back. Where its state stays in pieces, while the weights are whole from
        here on, it gets methods that raise unless the optimizer is in the wanted mode already."""
        for name in self._methods:
            if self._is_cut:
                self._replace(name, self._run_without_state)
            else:
                del vars(self._optimizer)[name]

    def _run_without_state(self, name: str, *args: Any, **kwargs: Any) -> Any:
        optimizer = self._optimizer
        state, optimizer.state = optimizer.state, _Refused(f"{type(optimizer).__name__}.{name}()")
        try:
            return self._methods[name](optimizer, *args, **kwargs)
        finally:
            optimizer.state = state


class _Refused(defaultdict[Any, Any]):
    """Stands for an optimizer's state, and raises when it is looked at."""

    def __init__(self, caller: str) -> None:
        super().__init__(dict)
        self._caller = caller

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            f"{self._caller} changes weights by the optimizer's state, of which each rank has its pieces since fit. "
            "Call it before fit ends, as in on_train_end; or make the optimizer anew and load "
            "strategy.full_optimizer_state()."
        )

    __getitem__ = __contains__ = __iter__ = __len__ = get = keys = items = values = _refuse
