"""`Moment`: an optimizer as it was when its user called `step`, kept for parameters that are stepped later."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.device import Late, Limit, is_host, on_host
from lightning_zero.shards.slot import Slot
from lightning_zero.torch_private import outside_transforms

VERDICT = ("found_inf", "grad_scale")  # by which a `GradScaler` tells a fused kernel of an overflow, for one call


def wrapped_in(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and those that it wraps, as Lookahead and SAM do."""
    found = [optimizer]
    for one in found:
        inner = {id(value): value for value in vars(one).values() if isinstance(value, Optimizer)}.values()
        found += [other for other in inner if not any(other is known for known in found)]
    return found


@dataclass(frozen=True)
class Moment:
    """The parameter groups of an optimizer, and the state and the counts of it and those it wraps, at one moment."""

    groups: list[dict[str, Any]]  # the user's own dictionaries
    contents: list[dict[str, Any]]  # what each of them held: its parameters and options
    states: list[Any]  # of each optimizer, the dictionary itself: who edits it takes postponed steps first
    numbers: list[dict[str, Any]]  # attributes of each optimizer that are numbers
    tables: list[dict[str, dict[Any, Any]]]  # what those that are dictionaries with numbers held
    counts: list[dict[Any, Any]]  # entries of each optimizer's state whose keys are no parameters
    default_dtype: torch.dtype  # of the scalars that a step makes; precision 64-true changes it during forward
    autocast: torch.dtype | None  # on the CPU; manual optimization under *-mixed calls `step` inside of it
    arriving: dict[int, Late]  # options that are tensors of a device, by id, on their way to the host

    @classmethod
    def of(cls, optimizer: Optimizer, *, clones: bool = False) -> "Moment":
        """Returns the optimizer as it is now. A moment that outlives the call needs `clones` of what is edited in
        place: lists of parameters, and options that are tensors, as a learning rate that a scheduler writes into. Of
        these it also begins to bring to the host what is on a device: a step that is taken later need not wait."""

        groups = [*optimizer.param_groups]
        contents = [{n: _clone(value) for n, value in group.items()} if clones else {**group} for group in groups]
        optimizers = wrapped_in(optimizer)
        states = [vars(one).get("state") for one in optimizers]
        numbers = [{n: value for n, value in vars(one).items() if _is_number(n, value)} for one in optimizers]
        tables = [{n: {**value} for n, value in vars(one).items() if _holds_counts(n, value)} for one in optimizers]
        counts = [copy.deepcopy(_counts_of(one)) for one in optimizers]
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        options = (value for content in contents for value in content.values()) if clones else ()
        away = {id(one): Late(one) for value in options for one in _tensors_of_device(value)}
        return cls(groups, contents, states, numbers, tables, counts, torch.get_default_dtype(), autocast, away)

    @contextmanager
    def back(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the optimizer is as it was at this moment. Parameters and their state have their latest values."""
        now = Moment.of(optimizer)
        self._put(optimizer)
        autocast = torch.autocast("cpu", self.autocast, enabled=self.autocast is not None, cache_enabled=False)
        try:
            with outside_transforms(), torch.inference_mode(False), torch.no_grad(), autocast:
                yield
        finally:
            now._count_as(self)
            now._put(optimizer)

    def _count_as(self, then: "Moment") -> None:
        """Takes over the numbers in groups that a step at the moment `then` has changed just now, where they are still
        as they were: in the user's call a group lists nothing that is stepped apart, and some count only in groups that
        list anything."""
        for group, was, now in zip(self.groups, then.contents, self.contents, strict=False):
            now |= {n: v for n, v in group.items() if v is not was.get(n) and _is_count(v) and now.get(n) == was.get(n)}

    def listed(self, slots: Iterable[Slot]) -> list[list[Parameter]]:
        """Returns, for each group, the parameters of `slots` that it had, in its order."""
        lists: list[list[Parameter]] = [[] for _ in self.groups]
        places = ((*place, s.parameter) for s in slots for place in self._places.get(id(s.parameter), ()))
        for _, group, parameter in sorted(places):
            lists[group].append(parameter)
        return lists

    @cached_property
    def _places(self) -> dict[int, list[tuple[int, int]]]:
        """Of each parameter, by its id: how many are listed before it, and the number of its group. One that is listed
        twice has two places."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        groups = ((number, p) for number, content in enumerate(self.contents) for p in content["params"])
        for before, (number, parameter) in enumerate(groups):
            found[id(parameter)].append((before, number))
        return found

    def _put(self, optimizer: Optimizer) -> None:
        optimizer.param_groups[:] = self.groups
        for group, content in zip(self.groups, self.contents, strict=True):
            group.clear()
            group.update(content)
        parts = zip(wrapped_in(optimizer), self.states, self.numbers, self.tables, self.counts, strict=True)
        for one, state, numbers, tables, counts in parts:
            own = vars(one)
            if own.get("state") is not state:  # the user has loaded another one, or set it
                own["state"] = state
            for name in [name for name, value in own.items() if _is_number(name, value)]:
                del own[name]
            own.update(numbers)
            for name in [name for name, value in own.items() if _holds_counts(name, value) and name not in tables]:
                del own[name]
            for name, held in tables.items():
                table = own.setdefault(name, {})
                table.clear()
                table.update(held)
            for key in _counts_of(one):
                dict.pop(one.state, key)
            dict.update(one.state, copy.deepcopy(counts))
        torch.set_default_dtype(self.default_dtype)


def options_on_host(group: dict[str, Any], then: Moment | None, limit: Limit | None) -> dict[str, Any]:
    """Returns the options of a parameter group that are, or have, tensors of a device, on the host: those of the moment
    `then`, which are on their way, and others. The host waits for them at most as long as `limit` says."""

    def bring(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(bring, value))
        if not isinstance(value, Tensor):
            return value
        late = None if then is None else then.arriving.get(id(value))
        return on_host(value, limit) if late is None else late.read(limit)

    return {name: bring(value) for name, value in group.items() if _tensors_of_device(value)}


def _tensors_of_device(option: Any) -> list[Tensor]:
    """Returns the tensors of a device that an option of an optimizer is, or has: a learning rate, or betas."""
    values = option if isinstance(option, tuple) else (option,)
    return [value for value in values if isinstance(value, Tensor) and not is_host(value.device)]


def _is_count(value: Any) -> bool:
    return type(value) in (int, float)


def _holds_counts(name: str, value: Any) -> bool:
    is_own = isinstance(value, dict) and name not in ("state", "defaults")
    return is_own and any(map(_is_count, value.values()))


def state_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Returns what an optimizer keeps for a parameter, without taking postponed steps."""
    return dict.get(optimizer.state, parameter, {})


def _counts_of(optimizer: Optimizer) -> dict[Any, Any]:
    """Returns the entries of its state whose keys are no parameters, without taking postponed steps."""
    state: dict[Any, Any] = optimizer.state
    # Few optimizers have any. Each window asks, so a loop of Python over all parameters would be a part of the step.
    if all(issubclass(kind, Tensor) for kind in set(map(type, dict.keys(state)))):
        return {}
    return {key: value for key, value in dict.items(state) if not isinstance(key, Tensor)}


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [*value] if isinstance(value, list) else value


def _is_number(name: str, value: Any) -> bool:
    """Whether an attribute belongs to a moment: a number, or what a `GradScaler` has told the optimizer."""
    return isinstance(value, int | float) or name in VERDICT


def _caught_up(name: str) -> Any:
    """Returns the method of `defaultdict` of that name, which takes the postponed steps first."""
    method = getattr(defaultdict, name)

    def catch_up_first(self: "CaughtUpState", *args: Any, **kwargs: Any) -> Any:
        self._catch_up()
        return method(self, *args, **kwargs)

    return catch_up_first


class CaughtUpState(defaultdict[Any, Any]):
    """`optimizer.state` where steps may be postponed: it calls `catch_up`, which takes them, before each look-up and
    before each edit."""

    def __init__(self, state: Mapping[Any, Any], catch_up: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self._catch_up = catch_up

    __getitem__ = _caught_up("__getitem__")
    __contains__ = _caught_up("__contains__")
    __iter__ = _caught_up("__iter__")
    __len__ = _caught_up("__len__")
    get = _caught_up("get")
    keys = _caught_up("keys")
    items = _caught_up("items")
    values = _caught_up("values")
    __setitem__ = _caught_up("__setitem__")
    __delitem__ = _caught_up("__delitem__")
    __ior__ = _caught_up("__ior__")
    setdefault = _caught_up("setdefault")
    update = _caught_up("update")
    pop = _caught_up("pop")
    popitem = _caught_up("popitem")
    clear = _caught_up("clear")

    def as_made(self) -> defaultdict[Any, Any]:
        """Returns the same state as a plain `defaultdict`, as torch makes it."""
        made: defaultdict[Any, Any] = defaultdict(dict)
        dict.update(made, dict.items(self))
        return made

    # `defaultdict` makes a copy by calling this class with its own arguments, which are others.

    def copy(self) -> Any:
        self._catch_up()
        return self.as_made()

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.items()))


def catch_up_before_use(optimizer: Optimizer, catch_up: Callable[[], None]) -> None:
    """Has an optimizer, and those that it wraps, call `catch_up` before anyone looks at or edits their state."""
    _replace_states(
        optimizer, lambda state: state if isinstance(state, CaughtUpState) else CaughtUpState(state, catch_up)
    )


def forget_to_catch_up(optimizer: Optimizer) -> None:
    """Undoes `catch_up_before_use`."""
    _replace_states(optimizer, lambda state: state.as_made() if isinstance(state, CaughtUpState) else state)


def _replace_states(optimizer: Optimizer, replaced: Callable[[Any], Any]) -> None:
    """Replaces the states of an optimizer and of those that it wraps. Those that share one go on sharing it."""
    own = [vars(one) for one in wrapped_in(optimizer) if isinstance(vars(one).get("state"), dict)]
    made = {id(each["state"]): replaced(each["state"]) for each in own}
    for each in own:
        each["state"] = made[id(each["state"])]
