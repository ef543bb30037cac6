"""How much memory of the host a process has, and may still take: of the machine, and of the container around it."""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # unit of getrusage's ru_maxrss
_UNLIMITED = 2**60  # bytes; cgroups of version 1 write a number near 2**63 where there is no limit


def available_host_bytes(root: Path = _ROOT) -> int | None:
    """Returns the bytes that this process may still allocate, or None where the system does not say (it does on Linux).

    Of the machine's free memory and what is left of each control group around the process (a container, a SLURM job),
    the least counts: a process that goes beyond it is killed without a word.
    """
    found = [*_of_groups(root)]
    if (nbytes := _field(root / "proc/meminfo", "MemAvailable:")) is not None:
        found.append(nbytes * 1024)
    return max(0, min(found)) if found else None


def resident_bytes() -> int:
    """Returns the bytes that this process has in memory; the most that it has had where the system does not say."""
    fields = next(iter(_lines(_ROOT / "proc/self/statm")), "").split()
    return int(fields[1]) * resource.getpagesize() if fields else peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Returns the most that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES


def _of_groups(root: Path) -> Iterator[int]:
    """Yields what is left of each control group: its limit, without what it uses and could not give back."""
    for line in _lines(root / "proc/self/cgroup"):  # "0::/a/b" in version 2, "4:memory:/a/b" in version 1
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        limits, uses = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        top = root / "sys/fs/cgroup" / controllers
        inner = top / path.lstrip("/")
        # Inside a container the path is often that of the machine, and its own group is the top one.
        for folder in [inner, *inner.parents]:
            limit = _number(folder / f"memory.{limits}") if folder.is_relative_to(top) else None
            if limit is not None and limit < _UNLIMITED:
                cached = _field(folder / "memory.stat", "inactive_file") or 0  # files, which the system drops first
                yield limit - (_number(folder / f"memory.{uses}") or 0) + cached


def _field(path: Path, name: str) -> int | None:
    """Returns the number that stands behind a name, on a line of its own."""
    lines = (line.split() for line in _lines(path))
    return next((int(line[1]) for line in lines if line[:1] == [name]), None)


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "max")
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
