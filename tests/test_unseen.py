"""What a class records outside of its objects is as before, after its optimizer was tried."""

from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ClassVar
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from lightning_zero.pl.table import table_of
from lightning_zero.run.engine import Engine
from lightning_zero.shards.probe import Findings, calls_closure_again, find, state_tensors_of
from lightning_zero.shards.unseen import unseen
from lightning_zero.wire.comm import Comm
from thread_world import ThreadWorld

CALLS: list[str] = ["one of before"]
NUMBER = 3


class Book:
    def __init__(self) -> None:
        self.pages, self.entries = 0, [["first"]]


BOOK = Book()


def write_down() -> None:
    global NUMBER
    NUMBER += 1
    CALLS.append("a step")
    BOOK.pages += 1
    BOOK.entries[0].append("another")


class ByItself(SGD):
    """Records in every place of its class that a test would look at."""

    count = 0
    calls: ClassVar[list[str]] = []
    by_kind: ClassVar[Counter[str]] = Counter()
    latest: ClassVar[deque[int]] = deque([1, 2], maxlen=2)
    recorder = Mock()

    def step(self, closure: Any = None) -> Any:
        ByItself.count += 1
        type(self).anew = 1  # type: ignore[attr-defined]
        self.calls.append("step")
        self.by_kind["step"] += 1
        self.latest.append(3)
        self.recorder.step(closure)
        write_down()
        return super().step(closure)


def recorded() -> Any:
    kind = ByItself
    of_class = (kind.count, list(kind.calls), dict(kind.by_kind), list(kind.latest), hasattr(kind, "anew"))
    of_mock = (kind.recorder.mock_calls, kind.recorder.step.call_count)
    return of_class, of_mock, list(CALLS), NUMBER, BOOK.pages, [list(entry) for entry in BOOK.entries]


def by_names_around() -> tuple[type[SGD], Callable[[], Any]]:
    """Of a test's function: a list, a number, a mock, and a decorator."""
    calls: list[int] = []
    mock, number = MagicMock(), 0

    def counted(step: Any) -> Any:
        @wraps(step)
        def wrapper(self: Any, closure: Any = None) -> Any:
            nonlocal number
            number += 1
            return step(self, closure)

        return wrapper

    class Around(SGD):
        @counted
        def step(self, closure: Any = None) -> Any:
            calls.append(1)
            mock(closure)
            return super().step(closure)

    return Around, lambda: (list(calls), mock.call_count, mock.mock_calls, number)


class ByItsBase(ByItself):
    """Its base class records."""


REACHED: list[str] = []


class Slotted:
    __slots__ = ()


class InOtherWays(SGD):
    """By a method of the class and by a function inside of another, in containers of all sorts."""

    slotted = Slotted()
    nested: ClassVar[tuple[list[int], int]] = ([1], 2)
    kinds: ClassVar[set[str]] = {"a"}
    names: ClassVar[dict[str, int]] = {"first": 0}

    @classmethod
    def note(cls) -> None:
        REACHED.append(cls.__name__)

    def step(self, closure: Any = None) -> Any:
        self.nested[0].append(2)
        self.kinds.symmetric_difference_update({"a", "b"})
        self.names["second"] = self.names.pop("first")
        self.note()
        (lambda: CALLS.append("a step"))()
        return super().step(closure)


def recorded_in_other_ways() -> Any:
    kind = InOtherWays
    return list(kind.nested[0]), set(kind.kinds), dict(kind.names), list(REACHED), list(CALLS)


def by_a_function_around() -> tuple[type[SGD], Callable[[], Any]]:
    number, later = 0, 1

    def note() -> None:
        nonlocal number
        number += 1

    class Helped(SGD):
        def step(self, closure: Any = None) -> Any:
            note()
            with suppress(NameError):
                print(later)  # noqa: F821
            return super().step(closure)

    del later  # a name may have no value, or none yet
    return Helped, lambda: number


RECORDS = {
    "its base class": lambda: (ByItsBase, recorded),
    "other ways": lambda: (InOtherWays, recorded_in_other_ways),
    "a function around": by_a_function_around,
}


@pytest.mark.parametrize("case", RECORDS)
def test_what_a_class_records_is_put_back_wherever_it_does(case: str) -> None:
    kind, look = RECORDS[case]()
    optimizer = kind([Parameter(torch.ones(3, 4))], lr=0.1)
    before = look()
    with unseen([kind]):
        optimizer.step()
        assert look() != before, "it does record"
    assert look() == before


class Fixed(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError(f"{cls.__name__} is not to be changed")


def test_a_class_that_records_nothing_is_not_written_to() -> None:
    class Closed(metaclass=Fixed):
        count = 1

    with unseen([Closed]):
        pass
    assert Closed.count == 1


TRIED: list[Callable[[Any], Any]] = [find, state_tensors_of, calls_closure_again]


@pytest.mark.parametrize("tried", TRIED, ids=lambda tried: tried.__name__)
@pytest.mark.parametrize("case", ["by itself", "by names around"])
def test_no_record_of_a_class_tells_that_its_optimizer_was_tried(case: str, tried: Callable[[Any], Any]) -> None:
    kind, look = (ByItself, recorded) if case == "by itself" else by_names_around()
    optimizer = kind([Parameter(torch.ones(3, 4))], lr=0.1, momentum=0.9)
    before = look()
    assert tried(optimizer) == {"find": Findings(), "state_tensors_of": 1, "calls_closure_again": False}[tried.__name__]
    assert look() == before
    with unseen([kind]):
        optimizer.step()
        assert look() != before, "it does record"
    assert look() == before


def test_a_mocked_step_is_no_step_to_try() -> None:
    optimizer = ByItself([Parameter(torch.ones(2))], lr=0.1)
    with patch.object(ByItself, "step") as step:
        assert state_tensors_of(optimizer) == 2  # as of most
        assert find(optimizer).why_not_in_pieces is not None
        assert not calls_closure_again(optimizer)
    assert not step.called


def test_records_are_put_back_after_an_error_too() -> None:
    with suppress(ZeroDivisionError), unseen([ByItself]):
        ByItself.calls.append("lost")
        raise ZeroDivisionError
    assert ByItself.calls == []


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_fit_begins_without_a_step_of_torchs_own_optimizers(kind: type[SGD]) -> None:
    def job(comm: Comm) -> None:
        module = nn.Linear(3, 3)
        optimizer = kind(module.parameters(), lr=0.1)
        table_of(Engine(module, [optimizer], stage=2, comm=comm), 2)

    with patch.object(kind, "step", autospec=True) as step:
        ThreadWorld(2).run(job)
    assert not step.called
