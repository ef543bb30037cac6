"""`Modes`: the `train` and `eval` of an optimizer, which move weights to other values and back, by its state."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NoReturn, final

from torch.optim import Optimizer

NAMES = ("train", "eval")


@final
class Modes:
    """Has the two run on pieces, where an optimizer has them (schedule-free ones, arXiv 2405.15682).

    Args:
        optimizer: the user's; the methods of this one object are replaced, until `remove`.
        change: what has them change parameters and state.
        is_cut: state is in pieces, and stays so.
    """

    def __init__(self, optimizer: Optimizer, change: Callable[[Callable[[], Any]], Any], *, is_cut: bool) -> None:
        self._optimizer = optimizer
        self._is_cut = is_cut
        kind: Any = type(optimizer)
        has_both = all(callable(getattr(kind, name, None)) for name in NAMES)
        self._methods = {name: getattr(kind, name) for name in NAMES if has_both}
        for name, method in self._methods.items():
            self._replace(name, partial(self._run, method, change))

    def _replace(self, name: str, by: Callable[..., Any]) -> None:
        vars(self._optimizer)[name] = wraps(self._methods[name])(by)

    def _run(self, method: Any, change: Callable[[Callable[[], Any]], Any], *args: Any, **kwargs: Any) -> Any:
        return change(partial(method, self._optimizer, *args, **kwargs))

    def remove(self) -> None:
        """Where state is in pieces, and the weights are whole from here on: what is in the wanted mode stays in it, and
        anything else is refused."""
        for name, method in self._methods.items():
            if self._is_cut:
                self._replace(name, partial(self._run_without_state, name, method))
            else:
                del vars(self._optimizer)[name]

    def _run_without_state(self, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = self._optimizer
        state, optimizer.state = optimizer.state, _Refused(f"{type(optimizer).__name__}.{name}()")
        try:
            return method(optimizer, *args, **kwargs)
        finally:
            optimizer.state = state


class _Refused(defaultdict[Any, Any]):
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
