"""`Moment`: an optimizer as it was when its user called `step`, for what is stepped only later."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def wrapped_in(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, and those that it wraps, as Lookahead and SAM do."""
    found = [optimizer]
    for one in found:
        inner = [value for value in vars(one).values() if isinstance(value, Optimizer)]
        found += [other for other in inner if not any(other is known for known in found)]
    return found


@dataclass(frozen=True)
class Moment:
    """An optimizer's options, and what it and those that it wraps count by themselves, as they were when the user's
    call of `step` began."""

    options: list[dict[str, Any]]  # of each group
    numbers: list[dict[str, Any]]  # of each optimizer
    counts: list[dict[Any, Any]]  # in its state, under other keys than parameters
    default_dtype: torch.dtype  # of the scalars that it makes; 64-true changes it during forward

    @classmethod
    def of(cls, optimizer: Optimizer) -> "Moment":
        options = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        all_of_them = wrapped_in(optimizer)
        numbers = [{n: value for n, value in vars(one).items() if _is_number(n, value)} for one in all_of_them]
        counts = [copy.deepcopy(_counts_of(one)) for one in all_of_them]
        return cls(options, numbers, counts, torch.get_default_dtype())

    @classmethod
    def kept(cls, optimizer: Optimizer) -> "Moment":
        """As `of`, whatever becomes of the options: a scheduler writes into a learning rate that is a tensor."""
        moment = cls.of(optimizer)
        options = [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
            for group in moment.options
        ]
        return replace(moment, options=options)

    @contextmanager
    def back(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the optimizer is as it was at that moment; but for its parameters and their state."""
        now = Moment.of(optimizer)
        self._put(optimizer)
        try:
            with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
                yield
        finally:
            now._put(optimizer)

    def _put(self, optimizer: Optimizer) -> None:
        for group, options in zip(optimizer.param_groups, self.options, strict=False):
            parameters = group["params"]
            group.clear()
            group.update(params=parameters, **options)
        for one, numbers, counts in zip(wrapped_in(optimizer), self.numbers, self.counts, strict=True):
            own = vars(one)
            for name in [name for name, value in own.items() if _is_number(name, value)]:
                del own[name]
            own.update(numbers)
            for key in _counts_of(one):
                dict.pop(one.state, key)
            dict.update(one.state, copy.deepcopy(counts))
        torch.set_default_dtype(self.default_dtype)


def _counts_of(optimizer: Optimizer) -> dict[Any, Any]:
    """What is in its state under other keys than parameters, whether or not a step is still to be taken."""
    state: dict[Any, Any] = optimizer.state
    return {key: value for key, value in dict.items(state) if not isinstance(key, Tensor)}


def _is_number(name: str, value: Any) -> bool:
    """The two that are named tell a fused kernel of an overflow; a `GradScaler` puts them there for the call alone."""
    return isinstance(value, int | float) or name in ("found_inf", "grad_scale")


class CaughtUpState(defaultdict[Any, Any]):
    """`optimizer.state` where steps may be postponed: who looks at it finds it after them. `catch_up` takes them."""

    def __init__(self, state: Mapping[Any, Any], catch_up: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self._catch_up = catch_up

    def __getitem__(self, parameter: Any) -> Any:
        self._catch_up()
        return super().__getitem__(parameter)

    def __contains__(self, parameter: Any) -> bool:
        self._catch_up()
        return super().__contains__(parameter)

    def __iter__(self) -> Iterator[Any]:
        self._catch_up()
        return super().__iter__()

    def __len__(self) -> int:
        self._catch_up()
        return super().__len__()

    def get(self, parameter: Any, default: Any = None) -> Any:
        self._catch_up()
        return super().get(parameter, default)

    def keys(self) -> Any:
        self._catch_up()
        return super().keys()

    def items(self) -> Any:
        self._catch_up()
        return super().items()

    def values(self) -> Any:
        self._catch_up()
        return super().values()

    def as_made(self) -> defaultdict[Any, Any]:
        """As torch makes it."""
        made: defaultdict[Any, Any] = defaultdict(dict)
        dict.update(made, dict.items(self))
        return made

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.items()))
