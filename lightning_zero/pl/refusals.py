"""Errors of this package at set-up, which say what to write instead: told first, and without the calls in between.

    ZeroStrategy: LBFGS looks at all parameters together, ...           rank 0, before the traceback
    [rank0]: Traceback (most recent call last):                         from the user's line to `fit`, not further
    ...
    [rank1]: ValueError: LBFGS looks at all parameters together, ...    the other ranks

The exception itself is raised on every rank, and stays what it is. Its whole traceback is logged at level DEBUG.
"""

import logging
import sys
import traceback
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)

_KINDS = (ValueError, TypeError, NotImplementedError, RuntimeError)  # others are defects, whose traceback is needed
_PACKAGES = ("lightning", "pytorch_lightning", "lightning_zero")  # whose calls users need not see
_TOLD = "_told_by_lightning_zero"


def tell_refusal(exception: BaseException, rank: int) -> None:
    """Tells an exception that ended set-up on this rank, if this package has raised it."""
    calls = [call for call, _ in traceback.walk_tb(exception.__traceback__)]
    if not isinstance(exception, _KINDS) or not calls or _package_of(calls[-1]) != "lightning_zero":
        return
    log.debug("The whole traceback:", exc_info=exception)
    exception.__traceback__ = _without_packages(exception.__traceback__)
    if rank == 0:
        log.error("ZeroStrategy: %s", exception)
    elif not hasattr(sys.excepthook, _TOLD):
        sys.excepthook = _in_one_line(rank, sys.excepthook)
    vars(exception)[_TOLD] = True


def _package_of(call: Any) -> str:
    return str(call.f_globals.get("__name__", "")).partition(".")[0]


def _without_packages(raised: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the calls inside of `_PACKAGES`. Calls of user code stay, such as configure_model."""
    if raised is None:
        return None
    rest = _without_packages(raised.tb_next)
    if _package_of(raised.tb_frame) in _PACKAGES:
        return rest
    return TracebackType(rest, raised.tb_frame, raised.tb_lasti, raised.tb_lineno)


def _in_one_line(rank: int, otherwise: Any) -> Any:
    """Returns what Python calls with an exception that nobody catches: a line suffices where rank 0 says more."""

    def excepthook(kind: type[BaseException], exception: BaseException, raised: TracebackType | None) -> None:
        if not hasattr(exception, _TOLD):
            otherwise(kind, exception, raised)
            return
        told = "".join(traceback.format_exception_only(exception)).rstrip().replace("\n", f"\n[rank{rank}]: ")
        print(f"[rank{rank}]: {told}", file=sys.stderr)

    vars(excepthook)[_TOLD] = True
    return excepthook
