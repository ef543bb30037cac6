"""`Backward`: whether a backward is under way on this rank, as far as its callers and autograd tell."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import final

from lightning_zero.torch_private import call_after_backward


@final
class Backward:
    """A backward is known from where it is announced (`bracket`), or noticed by a hook (`notice`), until it has ended
    or failed."""

    def __init__(self) -> None:
        self.noticed = 0  # backwards that nobody has announced
        self._is_bracketed = False
        self._end: weakref.ref[Callable[[], None]] | None = None  # autograd's callback: alive while its backward runs

    @property
    def is_known(self) -> bool:
        return self._is_bracketed or (self._end is not None and self._end() is not None)

    @contextmanager
    def bracket(self) -> Iterator[None]:
        """Around a backward whose beginning and end the caller handles."""
        self._is_bracketed = True
        try:
            yield
        finally:
            self._is_bracketed = False

    def notice(self, end: Callable[[], None]) -> None:
        """Notes that a backward runs that nobody has announced, and has autograd call `end` at its end."""
        self.noticed += 1
        callback = partial(end)  # autograd drops it without a call if the backward fails
        self._end = weakref.ref(callback)
        call_after_backward(callback)
