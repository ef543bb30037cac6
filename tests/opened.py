"""What a process has open: for tests that nothing is left behind.

They ask what is new, and not how much there is: what earlier tests left behind may be collected, and so closed, at any
moment.
"""

import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


def opened() -> set[str]:
    """Files, threads and children of this process, each with what tells it from a later one of the same number."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the list itself
            found.add(f"file {file.name} {file.readlink()}")
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            since = (thread / "stat").read_text().rpartition(")")[2].split()[19]
            children = (thread / "children").read_text().split()
            found |= {f"thread {thread.name} since {since}", *(f"child {pid}" for pid in children)}
    return found


def left_open(before: Collection[str], seconds: float = 30.0) -> list[str]:
    """What is open that was not before, once threads that are about to end have ended."""
    end = time.monotonic() + seconds
    while (left := opened() - set(before)) and time.monotonic() < end:
        time.sleep(0.01)
    return sorted(left)
