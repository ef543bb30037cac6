"""The file in which tensors rest."""

import errno
import gc
import os
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.tiers.array import ALL, LatePart, OnDisk, _take_of, read_late, zeros
from lightning_zero.tiers.disk import Disk, DiskError
from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier

HOST = torch.device("cpu")


def place_on(disk: Disk) -> Place:
    return Place(HOST, Tier.DISK, disk=disk)


def test_what_is_written_is_read_whatever_is_still_under_way(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    start = disk.reserve(4000)
    for round_ in range(20):
        disk.begin_write([(start, torch.full((1000,), float(round_)))])
    found = torch.empty(1000)
    disk.read(start, found)
    assert found.eq(19.0).all()
    disk.close()


def test_a_disk_that_nobody_has_any_more_leaves_no_file_open(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        disk = Disk(tmp_path)
        disk.close()
        del disk
        gc.collect()
    assert not [warning for warning in caught if issubclass(warning.category, ResourceWarning)]


@pytest.mark.parametrize("numel", [0, 1, 2])
def test_a_part_of_a_tensor_with_gaps_is_written_however_small_it_is(numel: int, tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    values = torch.arange(8.0)[1::2][:numel]
    array = OnDisk(numel, torch.float32, place_on(disk))
    array.write(ALL, values)
    assert array.read().equal(values)
    disk.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
def test_every_dtype_comes_back_in_every_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    values = torch.randint(0, 2, (33,)).to(dtype)
    array = OnDisk(33, dtype, place_on(disk))
    array.write(ALL, values)
    assert array.read().equal(values)
    assert array.read(slice(3, 7)).equal(values[3:7])
    disk.close()


def test_room_is_had_or_refused_also_where_the_system_sets_none_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    disk = Disk(tmp_path)
    start, found = disk.reserve(400), torch.ones(100)
    disk.read(start, found)
    assert found.eq(0).all()
    with pytest.raises(DiskError, match="No space left on device"):
        disk.reserve(2 * disk.free_bytes)
    assert disk.size == 400
    disk.close()


def test_a_write_comes_after_those_that_are_still_under_way(tmp_path: Path) -> None:
    disk, held, found = Disk(tmp_path), threading.Event(), torch.empty(100)
    start = disk.reserve(400)
    disk._writer.submit(held.wait, 60)
    disk.begin_write([(start, torch.zeros(100))])
    threading.Timer(0.05, held.set).start()
    disk.write(start, torch.ones(100))
    disk.read(start, found)
    assert found.eq(1.0).all()


def test_of_writes_that_are_over_only_those_that_have_failed_are_kept(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    start = disk.reserve(400)
    for _ in range(3):
        disk.begin_write([(start, torch.ones(100))]).result()
    assert len(disk._writes) == 1
    disk._file.close()
    failed = disk.begin_write([(start, torch.ones(100))])
    assert failed.exception() is not None
    disk.begin_write([])
    assert failed in disk._writes


def test_room_is_zeros_also_where_something_else_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.tiers.array.ZEROS", 30)  # are written at a time
    disk, ledger = Disk(tmp_path), Ledger()
    array = zeros(Category.MASTER, 100, torch.float32, place_on(disk), ledger)
    assert array.read().eq(0).all()
    array.write(ALL, torch.ones(100))
    assert ledger.live_in[Category.MASTER, Tier.DISK] == 400
    del array
    assert ledger.live_in[Category.MASTER, Tier.DISK] == 0
    size = disk.size
    assert zeros(Category.MASTER, 100, torch.float32, place_on(disk), ledger).read().eq(0).all()
    assert disk.size == size  # the room is used again
    disk.close()


def test_copies_that_a_part_overlaps_anywhere_are_those_to_wait_for() -> None:
    copies = [(slice(0, 4), "a"), (slice(4, 8), "b"), (slice(8, 12), "c")]
    ranges = {(None, None): "abc", (3, 5): "ab", (5, 6): "b", (4, 8): "b", (8, 20): "c", (12, 16): ""}
    for (start, stop), expected in ranges.items():
        left = [*copies]
        taken = _take_of(left, slice(start, stop), 16)
        assert "".join(name for _, name in taken) == expected
        assert left == [copy for copy in copies if copy not in taken]


def test_edits_inside_stay_and_versions_tell_of_them(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    array = OnDisk(10, torch.float32, place_on(disk))
    array.write(ALL, torch.arange(10.0))
    before = array.version
    with array.edit(slice(2, 5)) as part:
        part.mul_(10)
    assert array.version != before
    assert array.read().tolist() == [0, 1, 20, 30, 40, 5, 6, 7, 8, 9]
    disk.close()


def test_calls_that_move_less_than_was_asked_for_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path)
    array = OnDisk(1000, torch.float32, place_on(disk))
    for name in ("preadv", "pwritev"):
        whole = getattr(os, name)
        monkeypatch.setattr(os, name, lambda file, views, at, whole=whole: whole(file, [views[0][:700]], at))
    values = torch.randn(1000)
    array.write(ALL, values)
    assert array.read().equal(values)
    disk.close()


def test_tensors_that_are_written_behind_are_let_go_of_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, alive = Disk(tmp_path), list[int]()
    moves = [(disk.reserve(40), torch.ones(10)) for _ in range(3)]
    held = [weakref.ref(values.untyped_storage()) for _, values in moves]
    goes, pwritev = threading.Event(), os.pwritev

    def counting(*given: Any) -> int:
        goes.wait()
        alive.append(sum(one() is not None for one in held))
        return pwritev(*given)

    monkeypatch.setattr(os, "pwritev", counting)
    disk.begin_write(moves)
    moves.clear()
    goes.set()
    disk.drain()
    assert alive == [3, 2, 1]
    disk.close()


def test_what_is_free_is_what_the_system_leaves_to_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs_result((4096, 1024, 1000, 500, 300, 0, 0, 0, 0, 255))  # of 500 blocks 200 are the system's own
    disk = Disk(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    assert disk.free_bytes == 300 * 1024
    disk.close()


@pytest.mark.parametrize("folder", ["absent", "a file"])
def test_a_folder_that_is_none_is_named(folder: str, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(DiskError, match=rf"path='{tmp_path / folder}'\): no file can be made there: No"):
        Disk(tmp_path / folder)


def test_a_failure_behind_is_told_when_it_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path)
    start = disk.reserve(40)

    def broken(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", broken)
    disk.begin_write([(start, torch.ones(10))])
    with pytest.raises(DiskError, match="writing 40 bytes failed: No space left on device"):
        disk.drain()
    monkeypatch.undo()
    disk.close()


def test_a_file_that_was_cut_short_is_told(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    array = OnDisk(10, torch.float32, place_on(disk))
    os.ftruncate(disk._file.fileno(), 8)
    with pytest.raises(DiskError, match="the file was cut short"):
        array.read()
    disk.close()


def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    disk = Disk(tmp_path)
    start = disk.reserve(40)
    disk.begin_write([(start, torch.ones(10))])
    disk.begin_read([(start, torch.ones(10))]).result()
    disk.close()
    assert set(threading.enumerate()) <= before  # those of earlier tests may end meanwhile


def test_what_rests_on_disk_is_not_read_before_it_is_needed(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    array = OnDisk(10, torch.float32, place_on(disk))
    late = read_late(array, slice(2, 4))
    assert isinstance(late, LatePart)
    array.write(ALL, torch.arange(10.0))
    assert late.read().tolist() == [2, 3]
    disk.close()
