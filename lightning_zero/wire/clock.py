"""`Clock`: seconds of what is measured again and again, on the host or on a device that works behind it."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar, final

import torch

T = TypeVar("T")
Mark = float | torch.cuda.Event | None  # a moment; None: one that is not measured


class _Span(NamedTuple):
    """Two marks in a device's stream."""

    begin: torch.cuda.Event
    end: torch.cuda.Event


@final
class Clock:
    """Adds up seconds, and never waits for a device: what it has not come to yet counts later.

    Args:
        device: whose default stream is measured, while it is the current one: other streams work beside it. None, and
            any that is not a GPU: the host.
        keeps: how many of the latest durations stay in `latest`.
    """

    def __init__(self, device: torch.device | None = None, *, keeps: int = 0) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._seconds = 0.0
        self._spans: deque[_Span] = deque()  # that the device is still to come to
        self._latest: deque[float] = deque(maxlen=keeps)

    def start(self) -> Mark:
        """Begins a measurement, which `stop` ends."""
        return time.perf_counter() if self._device is None else self._mark(self._device)

    def stop(self, started: Mark) -> None:
        if isinstance(started, float):
            self._add(time.perf_counter() - started)
        elif self._device is not None and started is not None:
            ended = self._mark(self._device)
            if ended is not None:
                self._spans.append(_Span(started, ended))
            self._settle()

    def time(self, what: Callable[[], T]) -> T:
        """Measures a call."""
        started = self.start()
        result = what()
        self.stop(started)
        return result

    @property
    def seconds(self) -> float:
        """All that is known to be over."""
        self._settle()
        return self._seconds

    @property
    def latest(self) -> list[float]:
        """Durations that are known, s, the latest last."""
        self._settle()
        return list(self._latest)

    @staticmethod
    def _mark(device: torch.device) -> torch.cuda.Event | None:
        stream = torch.cuda.current_stream(device)
        if stream != torch.cuda.default_stream(device):
            return None
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(stream)
        return mark

    def _add(self, seconds: float) -> None:
        self._seconds += seconds
        self._latest.append(seconds)

    def _settle(self) -> None:
        while self._spans and self._spans[0].end.query():
            span = self._spans.popleft()
            self._add(span.begin.elapsed_time(span.end) / 1000)
