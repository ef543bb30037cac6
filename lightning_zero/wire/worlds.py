"""What is made once in a world of torch.distributed: process groups, which keep sockets and threads for good."""

import itertools
from collections.abc import Callable, MutableMapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
import torch.distributed as dist

Made = TypeVar("Made")

# Default process group -> what is made in its world, and ends with it.
_MADE: MutableMapping[Any, dict[Any, Any]] = WeakKeyDictionary()


def once_per_world(key: Any, make: Callable[[], Made]) -> Made:
    """Returns what `make` returned the first time in this world."""
    made = _MADE.setdefault(dist.group.WORLD, {})
    if key not in made:
        made[key] = make()
    return made[key]


def forget(thing: Any) -> None:
    """Has `once_per_world` make a thing anew, as this one is spoilt."""
    made = _MADE.get(dist.group.WORLD, {})
    for key in [key for key, known in made.items() if known is thing]:
        del made[key]


class Held:
    """What torch has made in this world: a process group, or the store. It is let go when the world is destroyed; who
    asks for it afterwards is told so. A store that somebody still has answers in the next world at the same port, and
    its ranks would wait for the addresses that ranks had in this one."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        if dist.is_initialized():  # not in tests of parts alone
            once_per_world("held", _all_held).add(self)

    @property
    def has_ended(self) -> bool:
        return isinstance(self.thing, _Ended)


def _all_held() -> WeakSet[Held]:
    """Makes the set of what is held in this world, and let go with it."""
    held: WeakSet[Held] = WeakSet()
    finalize(dist.group.WORLD, _let_go, held).atexit = False
    return held


def _let_go(held: WeakSet[Held]) -> None:
    for each in held:
        each.thing = _Ended()


class _Ended:
    """Stands where something was that has ended with its world."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "torch.distributed.destroy_process_group() has ended the world of ranks that this strategy has trained in. "
            "Save, or read what is sharded, before it; a new fit makes a new one."
        )


def next_number() -> int:
    """Returns 0, 1, 2, ...: a number of its own for each communicator. All ranks make the same ones, in one order."""
    return next(once_per_world("numbers", itertools.count))


def group_of(rank: int, groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """Returns the group that `rank` is in."""
    return next(ranks for ranks in groups if rank in ranks)


def own_group(
    backend: str,
    ranks: Sequence[int] | None = None,
    *,
    timeout: timedelta | None = None,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """Returns our process group of `ranks` (None: all), of which this rank is one.

    Args:
        backend: of torch: ``"gloo"``, ``"nccl"``, ...
        ranks: of the world. Only they take part.
        timeout: after which the backend itself gives up a collective; None is torch's own.
        device: that the group is bound to, if it works on one alone.
    """
    key = ("group", backend, None if ranks is None else tuple(ranks))
    bound: dict[str, Any] = {} if device is None else {"device_id": device}
    if ranks is not None:
        # Otherwise all ranks would have to make the groups of all others; and where the default group is bound to a
        # GPU, torch would split that group for ranks that are in none, which gloo cannot.
        bound["use_local_synchronization"] = True
    return once_per_world(key, lambda: dist.new_group(ranks, backend=backend, timeout=timeout, **bound))
