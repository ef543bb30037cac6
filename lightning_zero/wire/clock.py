"""`Clock`: adds up seconds that are measured again and again, on the host or on a device that works asynchronously."""

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar, final

import torch

from lightning_zero.device import Event, has_streams, is_on_default_stream, record

T = TypeVar("T")
Mark = float | Event | None  # a moment; None: one that is not measured


@final
class Clock:
    """Adds up seconds without ever waiting for a device: a measurement counts once the device has passed its end.

    Args:
        device: one with streams, whose default stream is measured while it is the current one, since other streams work
            beside it. None, or any other device, measures the host.
        keeps: how many of the latest durations `latest` keeps.
    """

    def __init__(self, device: torch.device | None = None, *, keeps: int = 0) -> None:
        self._device = device if device is not None and has_streams(device.type) else None
        self._seconds = 0.0
        self._running: deque[tuple[Event, Event]] = deque()  # begin and end, not passed yet
        self._latest: deque[float] = deque(maxlen=keeps)

    def start(self) -> Mark:
        """Begins a measurement, which `stop` ends."""
        if self._device is None:
            return time.perf_counter()
        return record(self._device, timing=True) if is_on_default_stream(self._device) else None

    def stop(self, started: Mark) -> None:
        ended = None if started is None else self.start()
        if started is None or ended is None:
            return
        if isinstance(started, float):
            assert isinstance(ended, float)
            self._add(ended - started)
        else:
            assert not isinstance(ended, float)
            self._running.append((started, ended))
            self._poll()

    def time(self, function: Callable[[], T]) -> T:
        """Calls `function`, measures the call, and returns its result."""
        started = self.start()
        result = function()
        self.stop(started)
        return result

    @property
    def seconds(self) -> float:
        """The sum of all finished measurements, s."""
        self._poll()
        return self._seconds

    @property
    def latest(self) -> list[float]:
        """The latest finished measurements, s, the newest last."""
        self._poll()
        return list(self._latest)

    def _add(self, seconds: float) -> None:
        self._seconds += seconds
        self._latest.append(seconds)

    def _poll(self) -> None:
        while self._running and self._running[0][1].query():
            begin, end = self._running.popleft()
            self._add(begin.elapsed_time(end) / 1000)
