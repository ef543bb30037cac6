"""`Landing`: a tensor that is received, or the sum of several, filled part by part; and `Message`, a wait for one."""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple, final

import numpy
import torch
from torch import Tensor

CLOSED = "connection closed by peer"  # matches `gloo._CLOSED`
_SERIAL = 2**14  # elements that torch adds without threads of its own; here it would start more of them
_BY_NUMPY = torch.float32, torch.float64

Payload = ctypes.Array[ctypes.c_char]


@final
class Message:
    """A contiguous tensor that is being sent, or received. `give_up` is called if a wait for it times out."""

    def __init__(self, tensor: Tensor, give_up: Callable[[], None]) -> None:
        assert tensor.is_contiguous()
        self.address, self.nbytes = tensor.data_ptr(), tensor.nbytes
        self.passed = 0  # bytes of a sent one that are, or have been, on the desk
        self._tensor: Tensor | None = tensor  # kept alive, since it is read or written meanwhile
        self._give_up = give_up
        self._is_over = threading.Event()
        self._error: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nobody reads or writes the tensor any more."""
        return self._is_over.is_set()

    def complete(self, error: str | None = None) -> None:
        self._error = error
        self._tensor = None  # before the waiting thread goes on: it may allocate, and count, the same memory again
        self._is_over.set()

    def wait(self, timeout: timedelta) -> None:
        """Waits until a received tensor is filled, or a sent one may change. Raises RuntimeError if that failed."""
        if not self._is_over.wait(min(timeout.total_seconds(), threading.TIMEOUT_MAX)):
            self._is_over.set()
            self._give_up()
            raise RuntimeError(f"timed out after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise RuntimeError(self._error)


@final
class Landing:
    """A tensor that is being received: a peer's, or the sum of `terms`, which are tensors of this rank and, by their
    numbers, of peers. Terms are added in this order, and the sum is divided by `divisor`: part by part, as long as a
    part is in a cache. A term of this rank may be the memory that is filled."""

    def __init__(
        self, into: Tensor, terms: Sequence[int | Tensor], give_up: Callable[[int], None], divisor: int = 1
    ) -> None:
        self._into, self._terms, self._divisor = into.view(-1), terms, divisor
        self.nbytes = into.nbytes
        self.messages = {peer: Message(into, partial(give_up, peer)) for peer in terms if isinstance(peer, int)}
        self.arrivals: dict[int, Arrival] = {}  # of the peers whose tensors have arrived
        self.parts: dict[int, deque[Part]] = {peer: deque() for peer in self.messages}  # that lie on the peers' desks
        self.left = dict.fromkeys(self.messages, self.nbytes)  # bytes that are not on the peers' desks yet
        self._filled = 0  # bytes

    @property
    def has_failed(self) -> bool:
        """Whether the wait for a peer has ended before the tensor was filled: then it is the user's again."""
        return any(message.is_over for message in self.messages.values())

    def fill(self, found: Mapping[int, int], nbytes: int) -> None:
        """Fills the next `nbytes`, which lie at these addresses, by peer."""
        if not nbytes:  # torch has no view of nothing
            return
        dtype = self._into.dtype
        part = slice(self._filled // dtype.itemsize, (self._filled + nbytes) // dtype.itemsize)
        into = self._into[part]
        if len(self._terms) == 1:
            (address,) = found.values()
            ctypes.memmove(into.data_ptr(), address, nbytes)
        else:
            terms = [t[part] if isinstance(t, Tensor) else _view(found[t], nbytes, dtype) for t in self._terms]
            _average([*terms[:2], *(apart(term, into) for term in terms[2:])], into, self._divisor)
        self._filled += nbytes

    def end_if_filled(self, lost: Collection[int] = ()) -> None:
        """Ends all waits when the tensor is filled, with an error those for peers that are `lost`."""
        if self._filled == self.nbytes:
            del self._into, self._terms  # as in `Message.complete`
            for peer, message in self.messages.items():
                message.complete(CLOSED if peer in lost else None)


class Unusable(Exception):
    """What a peer sends cannot be used."""


class Arrival(NamedTuple):
    """A tensor that a peer sends: with its bytes, unless it lies in a segment of the peer, or is to pass the desk."""

    nbytes: int
    payload: Payload | None
    place: int  # among the segments of the peer; 0: it is in none


class Part(NamedTuple):
    """Where a part lies on the desk of a peer."""

    offset: int
    nbytes: int


def _view(address: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)


def apart(term: Tensor, into: Tensor) -> Tensor:
    """Returns a term; a copy of it if it lies where the sum of those before it will."""
    return term.clone() if term.data_ptr() == into.data_ptr() else term


def _average(terms: Sequence[Tensor], into: Tensor, divisor: int) -> None:
    """Adds in this order, and divides the sum, in the calling thread: torch would start more threads here, beside those
    that compute."""
    if into.dtype in _BY_NUMPY:
        array, first, second, *others = (tensor.numpy() for tensor in (into, *terms))
        numpy.add(first, second, out=array)
        for other in others:
            numpy.add(array, other, out=array)
        if divisor != 1:
            numpy.divide(array, divisor, out=array)
        return
    for start in range(0, into.numel(), _SERIAL):
        some = slice(start, start + _SERIAL)
        total = torch.add(terms[0][some], terms[1][some], out=into[some])
        for term in terms[2:]:
            total.add_(term[some])
        if divisor != 1:
            total.div_(divisor)
