"""Counts calls on the way of a value through the package, from the running code: what `ARCHITECTURE.md` shows.

A walk is every function of the package that is on the stack where the value moves: read, packed, sent, stored. A call
from a lower room to a higher one is a call *back up*.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import CodeType
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning_zero

PACKAGE = Path(lightning_zero.__file__).parent
ROOMS = ("wire", "tiers", "shards", "views", "checkpoint", "run", "pl", "cli", "sweeps")  # from below


class Call(NamedTuple):
    file: str
    function: str

    @property
    def room(self) -> int:
        folder = self.file.partition("/")[0]
        return ROOMS.index(folder) if folder in ROOMS else -1


@dataclass
class Walk:
    """Calls, in the order in which they were first seen; and those that a lower room has made to a higher one."""

    calls: dict[Call, None] = field(default_factory=dict)
    back_up: dict[tuple[Call, Call], None] = field(default_factory=dict)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Calls, files, and calls back up."""
        return len(self.calls), len({call.file for call in self.calls}), len(self.back_up)

    def note(self, stack: list[Call | None]) -> None:
        """Adds a stack, outermost first; None stands for code that is not the package's."""
        self.calls.update(dict.fromkeys(call for call in stack if call is not None))
        for caller, called in itertools.pairwise(stack):
            if caller is not None and called is not None and caller.room < called.room:
                self.back_up[caller, called] = None


@contextmanager
def walking(moves: Mapping[Any, tuple[str, ...]], is_on: Callable[[], bool]) -> Iterator[Walk]:
    """Notes the stack of each call of `moves`, functions of classes and modules, on threads on which it `is_on`."""
    walk, lock = Walk(), Lock()
    with ExitStack() as stack:
        for kind, names in moves.items():
            for name in names:
                stack.enter_context(patch.object(kind, name, _noting(getattr(kind, name), walk, lock, is_on)))
        yield walk


def _noting(method: Any, walk: Walk, lock: Lock, is_on: Callable[[], bool]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        if is_on():
            with lock:
                walk.note([*_stack(), _call_of(method.__code__)])
        return method(*args, **kwargs)

    return noted


def _stack() -> list[Call | None]:
    found: list[Call | None] = []
    frame = sys._getframe(2)
    while frame is not None:
        call = _call_of(frame.f_code)
        if found[-1:] != [call] and "tests/walks" not in frame.f_code.co_filename:
            found.append(call)
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1]


def _call_of(code: CodeType) -> Call | None:
    """Returns a function of the package; what is defined inside of one counts as that one."""
    path = Path(code.co_filename)
    if not path.is_relative_to(PACKAGE) or path.name == "threads.py":  # ranks that are threads start there
        return None
    return Call(path.relative_to(PACKAGE).as_posix(), code.co_qualname.partition(".<locals>")[0])
