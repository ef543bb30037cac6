"""The checkpoints of one run: what links show, what goes when, and that all ranks go on from the same one."""

import argparse
import errno
import os
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.data import AttributeDict
from torch import Tensor

import crash_jobs as jobs
from lightning_zero.checkpoint import CheckpointError, CheckpointKeeper, Folder, Saver
from lightning_zero.checkpoint.draft import Draft, LocalDraft
from lightning_zero.checkpoint.load import StoredCheckpoint
from lightning_zero.checkpoint.shard import ShardReader
from lightning_zero.views.lazy import LazyTensor
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from ranks import PATIENCE
from thread_world import ThreadWorld

IN_BACKGROUND = pytest.mark.parametrize("in_background", [False, True])


def on_ranks(
    do: Callable[[CheckpointKeeper, Comm], Any], *, in_background: bool = False, timeout: float = PATIENCE
) -> list:
    """What `do` returns on two ranks, each with a keeper."""

    def rank_main(comm: Comm) -> Any:
        return do(CheckpointKeeper(comm, in_background=in_background, warn=warnings.append), comm)

    warnings.clear()
    return ThreadWorld(2, wait_timeout=timeout).run(rank_main)


warnings: list[str] = []  # of the latest `on_ranks`


def save(keeper: CheckpointKeeper, comm: Comm, path: Path, step: int) -> None:
    keeper.save(jobs.tree_of(step, comm.rank, 2), str(path), step, {})


def shown_by(link: Path) -> str:
    return str(link.readlink())


@IN_BACKGROUND
def test_a_link_shows_the_latest_checkpoint_when_that_is_the_one_saved_before_at_this_step(
    in_background: bool, tmp_path: Path
) -> None:
    def do(keeper: CheckpointKeeper, comm: Comm) -> list[bool]:
        link = str(tmp_path / "last")
        save(keeper, comm, tmp_path / "a", 3)
        save(keeper, comm, tmp_path / "b", 3)
        made = [
            keeper.link_latest(link, str(tmp_path / "a"), 3),  # another callback's: older than what is asked for
            keeper.link_latest(link, str(tmp_path / "b"), 4),
            keeper.link_latest(str(tmp_path / "b"), str(tmp_path / "b"), 3),  # the last is called as the best
            keeper.link_latest(str(tmp_path / "elsewhere" / "last"), str(tmp_path / "b"), 3),
            keeper.link_latest(link, str(tmp_path / "b"), 3),
        ]
        keeper.saver.wait()
        return made

    (tmp_path / "elsewhere").mkdir()
    assert on_ranks(do, in_background=in_background) == [[False, False, False, False, True]] * 2
    assert shown_by(tmp_path / "last") == "b"
    assert jobs.version_at(tmp_path / "b") == 3


@IN_BACKGROUND
def test_no_link_shows_what_was_removed(in_background: bool, tmp_path: Path) -> None:
    def do(keeper: CheckpointKeeper, comm: Comm) -> list[Any]:
        link = tmp_path / "last"
        save(keeper, comm, tmp_path / "a", 3)
        keeper.link_latest(str(link), str(tmp_path / "a"), 3)
        save(keeper, comm, tmp_path / "b", 4)
        keeper.remove(str(tmp_path / "a"))
        keeper.saver.together("wait", keeper.saver.wait)
        shown = shown_by(link)
        keeper.saver.together("look", keeper.saver.wait)
        keeper.remove(str(tmp_path / "b"))
        made = keeper.link_latest(str(link), str(tmp_path / "b"), 4)
        keeper.saver.together("wait", keeper.saver.wait)
        return [shown, made, os.path.lexists(link)]

    assert on_ranks(do, in_background=in_background) == [["b", False, False]] * 2


def test_a_link_to_another_checkpoint_than_the_one_removed_is_left_alone(tmp_path: Path) -> None:
    def do(keeper: CheckpointKeeper, comm: Comm) -> None:
        save(keeper, comm, tmp_path / "a", 3)
        keeper.link_latest(str(tmp_path / "last"), str(tmp_path / "a"), 3)
        save(keeper, comm, tmp_path / "b", 4)
        save(keeper, comm, tmp_path / "c", 5)
        keeper.remove(str(tmp_path / "b"))

    on_ranks(do)
    assert shown_by(tmp_path / "last") == "a"


def test_a_link_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    def do(keeper: CheckpointKeeper, comm: Comm) -> None:
        save(keeper, comm, tmp_path / "a", 3)
        if comm.rank == 0:
            (tmp_path / "mine").symlink_to("a")
        save(keeper, comm, tmp_path / "b", 4)
        keeper.remove(str(tmp_path / "a"))
        keeper.saver.wait()

    on_ranks(do)
    assert shown_by(tmp_path / "mine") == "a"
    assert not (tmp_path / "a").exists()


def test_a_file_system_without_links_gets_no_link_and_all_ranks_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    def do(keeper: CheckpointKeeper, comm: Comm) -> bool:
        save(keeper, comm, tmp_path / "a", 3)
        return keeper.link_latest(str(tmp_path / "last"), str(tmp_path / "a"), 3)

    monkeypatch.setattr(Path, "symlink_to", refuse)
    assert on_ranks(do) == [False, False]
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("slow", ["removal", "removal in background", "link"])
def test_ranks_wait_for_one_that_works_longer_than_the_timeout(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "link_to" if slow == "link" else "_delete_hidden"
    original = getattr(Folder, method)

    def slowly(*args: Any) -> None:
        time.sleep(2.5)
        original(*args)

    def do(keeper: CheckpointKeeper, comm: Comm) -> None:
        save(keeper, comm, tmp_path / "a", 3)
        keeper.link_latest(str(tmp_path / "last"), str(tmp_path / "a"), 3)
        save(keeper, comm, tmp_path / "b", 4)
        keeper.remove(str(tmp_path / "a"))
        save(keeper, comm, tmp_path / "c", 5)
        keeper.saver.together("wait", keeper.saver.wait)

    monkeypatch.setattr(Folder, method, slowly)
    on_ranks(do, in_background=slow == "removal in background", timeout=2.0)
    assert sorted(os.listdir(tmp_path)) == ["b", "c", "last"]


@IN_BACKGROUND
def test_what_cannot_be_removed_is_told_and_the_job_goes_on(
    in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Folder) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    def do(keeper: CheckpointKeeper, comm: Comm) -> None:
        save(keeper, comm, tmp_path / "a", 3)
        keeper.remove(str(tmp_path / "a"))
        save(keeper, comm, tmp_path / "b", 4)
        keeper.saver.wait()

    monkeypatch.setattr(Folder, "unlink", refuse)
    on_ranks(do, in_background=in_background)
    (warning,) = warnings
    assert f"{tmp_path}/a could not be removed: [Errno 13] Permission denied" in warning
    assert jobs.version_at(tmp_path / "b") == 4


@pytest.mark.parametrize("kind", ["folder", "file", "file of the same size"])
def test_ranks_that_find_different_checkpoints_go_on_from_none(kind: str, tmp_path: Path) -> None:
    """Machines that do not share the folder, or a path that was replaced in between."""
    if kind != "folder":
        (tmp_path / "0").write_bytes(b"12" if kind == "file of the same size" else b"1")
        (tmp_path / "1").write_bytes(b"13")
    else:
        for number in (0, 1):
            assert jobs.save_on_threads(tmp_path / str(number), number) == [None, None]

    def do(keeper: CheckpointKeeper, comm: Comm) -> str | None:
        path = str(tmp_path / str(comm.rank))
        return jobs.error_of(lambda: keeper.open(path, lazy=(), objects=False))

    for told in on_ranks(do):
        assert told is not None
        assert f"rank 0 from {tmp_path}/0, rank 1 from {tmp_path}/1, which is not the same" in told


def test_ranks_may_find_one_checkpoint_at_different_paths(tmp_path: Path) -> None:
    assert jobs.save_on_threads(tmp_path / "0", 1) == [None, None]
    (tmp_path / "1").symlink_to("0")

    def do(keeper: CheckpointKeeper, comm: Comm) -> bool:
        return keeper.open(str(tmp_path / str(comm.rank)), lazy=(), objects=False) is not None

    assert on_ranks(do) == [True, True]


def test_a_single_file_that_is_opened_after_a_folder_is_not_taken_for_the_folder(tmp_path: Path) -> None:
    assert jobs.save_on_threads(tmp_path / "a", 1) == [None, None]
    torch.save({"state_dict": {}, "global_step": 2}, tmp_path / "b")

    def do(keeper: CheckpointKeeper, _: Comm) -> list[bool]:
        return [keeper.open(str(tmp_path / name), lazy=(), objects=False) is not None for name in "ab"]

    assert on_ranks(do) == [[True, False]] * 2


def test_of_what_no_rank_has_read_each_verifies_a_share(tmp_path: Path) -> None:
    def verify(keeper: CheckpointKeeper, _: Comm) -> str | None:
        keeper.open(str(tmp_path / "a"), lazy=["state"], objects=False)
        told = jobs.error_of(keeper.verify_rest)
        keeper.close_resumed()
        return told

    tree = {"state": {name: torch.ones(3) for name in "abcd"}}
    Saver(LocalComm().board, warn=lambda _: None).save(tree, str(tmp_path / "a"), {})
    (shard,) = (tmp_path / "a").glob("*.safetensors")
    content = shard.read_bytes()
    for entry in StoredCheckpoint(tmp_path / "a").manifest.tensors.values():
        damaged = bytearray(content)
        damaged[entry.pieces[0].offset] ^= 1
        shard.write_bytes(damaged)
        assert on_ranks(verify).count(None) == 1


def test_a_checkpoint_that_one_rank_does_not_see_is_an_error_on_all(tmp_path: Path) -> None:
    assert jobs.save_on_threads(tmp_path / "a", 1) == [None, None]

    def do(keeper: CheckpointKeeper, comm: Comm) -> str | None:
        path = str(tmp_path / ("a" if comm.rank == 0 else "b"))
        return jobs.error_of(lambda: keeper.open(path, lazy=(), objects=False))

    told = f"Checkpoint file not found: {tmp_path}/b. It is missing on ranks [1] alone: resume from a file system that"
    assert on_ranks(do) == [f"CheckpointNotFoundError: {told} all ranks share."] * 2


def test_a_checkpoint_that_one_rank_cannot_read_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert jobs.save_on_threads(tmp_path / "a", 1) == [None, None]
    read = ShardReader.read

    def fail(reader: ShardReader, *args: Any) -> None:
        if threading.current_thread().name == "rank 1":
            raise OSError(errno.EIO, "Input/output error")
        read(reader, *args)

    def do(keeper: CheckpointKeeper, comm: Comm) -> str | None:
        return jobs.error_of(lambda: keeper.open(str(tmp_path / "a"), lazy=(), objects=False))

    monkeypatch.setattr(ShardReader, "read", fail)
    assert on_ranks(do) == ["CheckpointError: rank 1: OSError: [Errno 5] Input/output error"] * 2


@pytest.mark.parametrize("keys", ["words", "numbers too"])
def test_what_is_not_read_by_range_is_in_memory_in_whatever_container(keys: str, tmp_path: Path) -> None:
    containers: list[Callable[[Tensor], Any]] = [
        *(lambda t: {"a": t}, lambda t: [t], lambda t: (t, 1), lambda t: deque([t]), lambda t: OrderedDict(a=t)),
        *(lambda t: argparse.Namespace(a=t), lambda t: AttributeDict(a=t), lambda t: {1: t}),
    ]
    tree: dict[Any, Any] = {
        "state_dict": {"w": torch.ones(2)},
        "callbacks": [make(torch.ones(3)) for make in containers],
    }
    Saver(LocalComm().board).save(tree | ({7: "seven"} if keys == "numbers too" else {}), str(tmp_path / "a"), {})
    keeper = CheckpointKeeper(LocalComm(), in_background=False, warn=warnings.append)
    found = keeper.open(str(tmp_path / "a"), lazy=("state_dict",), objects=False)
    assert found is not None
    assert isinstance(found["state_dict"]["w"], LazyTensor)
    for value in found["callbacks"]:
        values = vars(value) if isinstance(value, argparse.Namespace) else value
        held = next(iter(values.values() if isinstance(values, dict) else values))
        assert type(held) is Tensor
        assert torch.equal(held, torch.ones(3))


@pytest.mark.parametrize("objects", [False, True])
def test_pickled_objects_are_read_where_the_user_asks_for_them_and_otherwise_told_of(
    objects: bool, tmp_path: Path
) -> None:
    tree = {"mine": Fraction(1, 3), "epoch": 2}
    Saver(LocalComm().board, warn=lambda _: None).save(tree, str(tmp_path / "a"), {})

    def do(keeper: CheckpointKeeper, _: Comm) -> dict[str, Any] | None:
        return keeper.open(str(tmp_path / "a"), lazy=(), objects=objects)

    assert on_ranks(do) == [tree if objects else {"epoch": 2}] * 2
    assert len(warnings) == (0 if objects else 2)
    assert all("fractions.Fraction" in told for told in warnings)


def test_what_is_pickled_is_told_once_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    def do(keeper: CheckpointKeeper, comm: Comm) -> None:
        keeper.save({**jobs.tree_of(3, comm.rank, 2), "mine": Fraction(1, 3)}, str(tmp_path / "a"), 3, {})

    on_ranks(do)
    (told,) = warnings
    assert "no plain data: mine (Fraction)" in told


def test_a_missing_checkpoint_is_also_the_error_that_lightning_has_for_it(tmp_path: Path) -> None:
    def do(keeper: CheckpointKeeper, comm: Comm) -> str | None:
        with pytest.raises(FileNotFoundError) as caught:
            keeper.open(str(tmp_path / "a"), lazy=(), objects=False)
        return str(caught.value)

    with pytest.raises(FileNotFoundError) as of_lightning:
        TorchCheckpointIO().load_checkpoint(str(tmp_path / "a"))
    assert on_ranks(do) == [str(of_lightning.value)] * 2


def test_no_link_shows_what_could_not_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(draft: Draft, manifest: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def do(keeper: CheckpointKeeper, comm: Comm) -> list[Any]:
        save(keeper, comm, tmp_path / "a", 3)
        failed = jobs.error_of(keeper.saver.wait)
        return [failed, keeper.link_latest(str(tmp_path / "last"), str(tmp_path / "a"), 3)]

    monkeypatch.setattr(LocalDraft, "commit", fail)
    for failed, made in on_ranks(do, in_background=True):
        assert "No space left on device" in failed
        assert not made
    assert os.listdir(tmp_path) == []


def test_after_a_failed_save_that_was_told_of_old_checkpoints_go_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(draft: Draft, manifest: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def do(keeper: CheckpointKeeper, comm: Comm) -> str | None:
        save(keeper, comm, tmp_path / "a", 3)
        keeper.saver.together("wait", keeper.saver.wait)
        if comm.rank == 0:
            monkeypatch.setattr(LocalDraft, "commit", fail)
        keeper.saver.together("break", dict)
        save(keeper, comm, tmp_path / "b", 4)
        told = jobs.error_of(lambda: keeper.saver.together("wait", keeper.saver.wait))
        keeper.remove(str(tmp_path / "a"))
        keeper.saver.wait()
        return told

    assert all("No space left on device" in str(told) for told in on_ranks(do, in_background=True))
    assert os.listdir(tmp_path) == []


def test_a_link_is_moved_when_what_it_is_to_show_is_complete_and_not_if_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []

    def do(keeper: CheckpointKeeper, comm: Comm) -> str | None:
        save(keeper, comm, tmp_path / "a", 3)
        keeper.link_latest(str(tmp_path / "last"), str(tmp_path / "a"), 3)
        keeper.saver.together("wait", keeper.saver.wait)
        if comm.rank == 0:
            monkeypatch.setattr(LocalDraft, "commit", fail)
        keeper.saver.together("break", dict)
        save(keeper, comm, tmp_path / "b", 4)
        keeper.remove(str(tmp_path / "a"))
        return jobs.error_of(lambda: keeper.saver.together("wait", keeper.saver.wait))

    def fail(draft: Draft, manifest: bytes) -> None:
        time.sleep(0.2)  # in which a link that does not wait would be moved
        shown.append(shown_by(tmp_path / "last"))
        raise OSError(errno.ENOSPC, "No space left on device")

    for told in on_ranks(do, in_background=True):
        assert "No space left on device" in str(told)
    assert shown == ["a"]
    assert shown_by(tmp_path / "last") == "a"
    assert jobs.version_at(tmp_path / "a") == 3


def test_what_made_users_save_is_told_where_the_save_fails_too(tmp_path: Path) -> None:
    def do(keeper: CheckpointKeeper, comm: Comm) -> str | None:
        if comm.rank == 1:
            return None
        try:
            try:
                raise ValueError("the loss is not finite")
            except ValueError:
                save(keeper, comm, tmp_path / "a", 3)
        except CheckpointError as error:
            return "".join(traceback.format_exception(error))
        return None

    told = on_ranks(do, timeout=1.0)[0]
    assert told is not None
    assert "the loss is not finite" in told
    assert "missing: [1]" in told


def test_what_is_removed_is_gone_when_remove_returns(tmp_path: Path) -> None:
    def do(keeper: CheckpointKeeper, comm: Comm) -> bool:
        save(keeper, comm, tmp_path / "a", 3)
        keeper.remove(str(tmp_path / "a"))
        return comm.rank == 0 and (tmp_path / "a").exists()

    assert on_ranks(do) == [False, False]


def test_a_leftover_of_another_users_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Folder.names

    def refuse(folder: Folder) -> list[str]:
        if folder.path.endswith(".deleting"):
            raise PermissionError(errno.EACCES, "Permission denied", folder.path)
        return names(folder)

    def do(keeper: CheckpointKeeper, comm: Comm) -> str | None:
        save(keeper, comm, tmp_path / "a", 3)
        keeper.remove(str(tmp_path / "a"))
        return jobs.error_of(keeper.saver.wait)

    (tmp_path / ".b.deleting").mkdir()
    monkeypatch.setattr(Folder, "names", refuse)
    assert on_ranks(do) == [None, None]
    assert os.listdir(tmp_path) == [".b.deleting"]


def test_a_link_leaves_a_checkpoint_before_that_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    unlink = Folder.unlink

    def look(folder: Folder) -> Any:
        shown.append(shown_by(tmp_path / "last"))
        return unlink(folder)

    def do(keeper: CheckpointKeeper, comm: Comm) -> None:
        save(keeper, comm, tmp_path / "a", 3)
        keeper.link_latest(str(tmp_path / "last"), str(tmp_path / "a"), 3)
        save(keeper, comm, tmp_path / "b", 4)
        keeper.remove(str(tmp_path / "a"))

    monkeypatch.setattr(Folder, "unlink", look)
    on_ranks(do)
    assert shown == ["b"]


@IN_BACKGROUND
def test_a_link_that_cannot_be_moved_is_told_and_the_job_goes_on(
    in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Folder, target: Folder) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    def do(keeper: CheckpointKeeper, comm: Comm) -> None:
        save(keeper, comm, tmp_path / "a", 3)
        keeper.link_latest(str(tmp_path / "last"), str(tmp_path / "a"), 3)
        keeper.saver.together("wait", keeper.saver.wait)
        if comm.rank == 0:
            monkeypatch.setattr(Folder, "link_to", refuse)
        save(keeper, comm, tmp_path / "b", 4)
        keeper.remove(str(tmp_path / "a"))
        keeper.saver.together("wait", keeper.saver.wait)

    on_ranks(do, in_background=in_background)
    (warning,) = warnings
    assert f"{tmp_path}/last could not be made to show {tmp_path}/b: [Errno 13] Permission denied" in warning


def test_what_failed_in_the_background_is_heard_of_by_all_before_they_save_again(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("disk gone")

    def do(keeper: CheckpointKeeper, comm: Comm) -> list[str | None]:
        if comm.rank == 0:
            keeper.saver._submit(fail)
        return [jobs.error_of(keeper.saver.muster), jobs.error_of(keeper.saver.muster)]

    assert on_ranks(do, in_background=True) == [["CheckpointError: rank 0: OSError: disk gone", None]] * 2
