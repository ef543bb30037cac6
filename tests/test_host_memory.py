"""How much host memory is left, by what the system and its control groups say."""

from pathlib import Path

import pytest

from lightning_zero.tiers.host_memory import available_host_bytes

MIB = 2**20


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:  {1000 * 1024} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_host_bytes(system(tmp_path, {})) == 1000 * MIB


def test_where_nothing_is_said_there_is_no_number(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("cgroup", "folder", "limit", "usage"),
    [
        ("0::/job/step\n", "sys/fs/cgroup/job", "memory.max", "memory.current"),
        ("0::/job/step\n", "sys/fs/cgroup/job/step", "memory.max", "memory.current"),
        ("0::/of/the/machine\n", "sys/fs/cgroup", "memory.max", "memory.current"),
        ("3:cpu:/\n7:memory:/job\n", "sys/fs/cgroup/memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_limit_of_a_group_around_the_process_counts_without_what_it_can_give_back(
    cgroup: str, folder: str, limit: str, usage: str, tmp_path: Path
) -> None:
    files = {f"{folder}/{limit}": f"{300 * MIB}\n", f"{folder}/{usage}": f"{200 * MIB}\n"}
    files |= {f"{folder}/memory.stat": f"anon 5\ninactive_file {50 * MIB}\n", "proc/self/cgroup": cgroup}
    assert available_host_bytes(system(tmp_path, files)) == 150 * MIB


@pytest.mark.parametrize("unlimited", ["max", str(2**63 - 4096)])
def test_a_group_without_a_limit_does_not_count(unlimited: str, tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": unlimited}
    assert available_host_bytes(system(tmp_path, files)) == 1000 * MIB


def test_a_group_beyond_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "5", "sys/fs/cgroup/memory.current": "7"}
    assert available_host_bytes(system(tmp_path, files)) == 0
