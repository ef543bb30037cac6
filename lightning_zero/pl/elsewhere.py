"""Tells users of other strategies what to write here in place of the arguments that they know."""

import tomllib
from collections.abc import Callable
from functools import cache, wraps
from importlib.resources import files
from inspect import Parameter, signature
from typing import Any, TypeVar

import lightning.pytorch as pl

from lightning_zero.config import did_you_mean

Made = TypeVar("Made", bound=Callable[..., None])


@cache
def elsewhere() -> dict[str, str]:
    """Returns what to write in place of each argument of another strategy, by its name."""
    table = tomllib.loads(files("lightning_zero.pl").joinpath("elsewhere.toml").read_text("utf-8"))
    return {name: answer["write"] for answer in table["answers"] for name in answer["to"]}


def _answer_to(name: str, known: list[str]) -> str:
    if name in elsewhere():
        return f". {elsewhere()[name]}"
    if name in signature(pl.Trainer.__init__).parameters:
        return f". The Trainer has it: Trainer({name}=...)."
    return did_you_mean(name, known)


def answers(init: Made) -> Made:
    """Decorates an `__init__`, to answer unknown arguments with what to write instead. Keeps what the user has written
    as `_arguments`, for the object's repr and for one like it: all that may be written by position, and of the others
    those that were.

    Raises:
        TypeError: for an unknown argument.
    """
    known = {name: one for name, one in signature(init).parameters.items() if name != "self"}
    by_position = {name: one.default for name, one in known.items() if one.kind is Parameter.POSITIONAL_OR_KEYWORD}

    @wraps(init)
    def answering(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{type(self).__name__} has no argument {name!r}{_answer_to(name, list(known))}")
        self._arguments = {**by_position, **dict(zip(by_position, args, strict=False)), **kwargs}
        init(self, *args, **kwargs)

    return answering  # type: ignore[return-value]
