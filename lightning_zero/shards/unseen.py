"""`unseen`: calls methods of a user's class without a trace in what the class counts and records.

An optimizer is tried at set-up (`probe`) on a copy of the object. What its class keeps outside of the object would
still tell of steps that were never trained: a counter on the class, a list of calls in the module or in the function
that defines the class, a mock. What the methods reach by such names is put back afterwards. What they print or write to
files stays.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any, final

CONTAINERS = (list, dict, set, deque)
PLAIN = (int, float, complex, str, bytes, tuple, type(None), *CONTAINERS)
NOT_OF_USERS = ("torch", "builtins", "abc", "typing", "collections", "enum")  # packages


@contextmanager
def unseen(kinds: Iterable[type]) -> Iterator[None]:
    """Inside, methods of the classes may be called. Afterwards their records are as they were; see above."""
    records = _Records()
    for kind in kinds:
        records.note_class(kind)
    try:
        yield
    finally:
        records.put_back()


@final
class _Records:
    """What methods of classes may change outside of the object that they are called on."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # by id; held, so that no other object gets the id
        self._attributes: list[tuple[type, set[str]]] = []  # a class, and the names of its attributes
        self._values: list[tuple[Callable[[], Any], Callable[[Any], None], Any]] = []  # how to read and to write each
        self._contents: list[tuple[Any, Any]] = []  # a container, and a copy of it

    def note_class(self, kind: type) -> None:
        for base in kind.__mro__:
            module = base.__module__
            if module.partition(".")[0] in NOT_OF_USERS or not self._is_new(base):
                continue
            self._attributes.append((base, set(vars(base))))
            for name, value in list(vars(base).items()):
                self._note(value, partial(vars(base).get, name), partial(setattr, base, name), module)
                self._note_function(getattr(value, "__func__", value), module)

    def _note_function(self, function: Any, module: str) -> None:
        """Notes what a function of `module` reaches by the names around it, and what it wraps."""
        if not isinstance(function, FunctionType) or not self._is_new(function):
            return
        names = function.__globals__
        if names.get("__name__") == module:  # and not a wrapper of torch's
            for cell in function.__closure__ or ():
                if (value := _content_of(cell)) is not cell:
                    self._note(value, partial(_content_of, cell), partial(setattr, cell, "cell_contents"), module)
                    self._note_function(value, module)
            for name in _names_in(function.__code__) & names.keys():
                self._note(names[name], partial(names.get, name), partial(names.__setitem__, name), module)
                self._note_function(names[name], module)
        self._note_function(getattr(function, "__wrapped__", None), module)

    def _note(self, value: Any, read: Callable[[], Any], write: Callable[[Any], None], module: str) -> None:
        if isinstance(value, PLAIN):
            self._values.append((read, write, value))
        self._note_contents(value, module)

    def _note_contents(self, value: Any, module: str) -> None:
        """Notes containers, objects of the user's module, and mocks, with what is in them."""
        if not isinstance(value, PLAIN) and type(value).__module__ in (module, "unittest.mock"):
            value = getattr(value, "__dict__", None)
        if not isinstance(value, (*CONTAINERS, tuple)) or not self._is_new(value):
            return
        if not isinstance(value, tuple):
            self._contents.append((value, copy.copy(value)))
        for inner in list(value.values() if isinstance(value, dict) else value):
            self._note_contents(inner, module)

    def _is_new(self, value: Any) -> bool:
        is_new = id(value) not in self._seen
        self._seen[id(value)] = value
        return is_new

    def put_back(self) -> None:
        for base, names in self._attributes:
            for name in vars(base).keys() - names:
                delattr(base, name)
        for read, write, value in self._values:
            if read() is not value:
                write(value)
        for container, kept in self._contents:
            if not _are_same(container, kept):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(kept)


def _content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return cell


def _names_in(code: CodeType) -> set[str]:
    """Returns the names of globals and attributes in some code, and in that of functions inside of it."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _are_same(container: Any, kept: Any) -> bool:
    """Whether two containers have the same objects; tensors among them cannot be compared."""
    if isinstance(container, set):
        return bool(container == kept)
    if isinstance(container, dict):
        container, kept = ([*some, *some.values()] for some in (container, kept))
    return len(container) == len(kept) and all(one is other for one, other in zip(container, kept, strict=True))
