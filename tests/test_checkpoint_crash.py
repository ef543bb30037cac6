"""A checkpoint is complete or absent, and the one before it is safe: whatever is killed, fails or races, and when."""

import dataclasses
import errno
import fcntl
import itertools
import math
import os
import random
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import buckets  # noqa: F401  registers bucket://
import crash_jobs as jobs
from crash_jobs import Job, Nth, Strip, disk, save, save_on_threads, version_at
from lightning_zero.checkpoint import (
    CheckpointError,
    CheckpointKeeper,
    Folder,
    Saver,
    StoredCheckpoint,
    find_newest,
    verify,
)
from lightning_zero.checkpoint.folder import hidden_beside
from lightning_zero.checkpoint.manifest import read_manifest
from lightning_zero.views.lazy import LazyTensor, OfOneRank, Partial
from lightning_zero.wire.board import AgreementError, Board
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from ranks import AT_ONCE, HANGS
from thread_world import ThreadWorld

UNTOUCHED = "What was there before is untouched."
SCENARIOS = ["first", "again", "link"]  # what is at the path: nothing, a checkpoint, a link to one


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 at `again`, version 2 at `other`, and `link`, which shows the other; nothing at `first`."""
    folder = tmp_path_factory.mktemp("template")
    assert save_on_threads(folder / "again", 1) == [None, None]
    assert save_on_threads(folder / "other", 2) == [None, None]
    (folder / "link").symlink_to("other")
    return folder


@pytest.fixture
def fresh(template: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes copies of the template."""
    made = iter(range(10_000))
    return lambda: Path(shutil.copytree(template, tmp_path / str(next(made)), symlinks=True))


BEFORE = {"first": None, "again": 1, "link": 2}  # versions


def litter_in(folder: Path) -> list[str]:
    """What is neither checkpoint nor link, and files of a checkpoint that its manifest does not know."""
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    for path in folder.iterdir():
        if (path / "manifest.json").exists():
            known = (path / "manifest.json").read_text()
            hidden += [f"{path.name}/{name}" for name in os.listdir(path) if name not in known + "manifest.json"]
    return hidden


def assert_next_save_works(path: Path) -> None:
    assert save_on_threads(path, 9) == [None, None]
    assert version_at(path) == 9
    assert version_at(path.parent / "other") == 2
    assert litter_in(path.parent) == []


# -- killed


PAUSE = 0.01  # s per call to the file system


@pytest.mark.parametrize("scenario", ["first", "again"])
def test_r02_a_rank_killed_at_twenty_random_points_of_a_save_costs_no_checkpoint(
    scenario: str, fresh: Callable[[], Path]
) -> None:
    job = Job(3, jobs.save_until_killed, fresh() / scenario, 3, PAUSE)
    assert job.outcomes() == [None] * 3
    assert job.store is not None
    calls = [int(dist.PrefixStore("job", job.store).get(f"calls/{rank}")) for rank in range(3)]
    assert min(calls) > 5
    draw = random.Random(f"{scenario} 2")

    def kill_one(victim: int, number: int) -> str | None:
        path = fresh() / scenario
        job = Job(3, jobs.save_until_killed, path, 3, PAUSE, victim, number, wait_timeout=4.0)
        outcomes = job.outcomes()
        found = version_at(path)
        assert found in (BEFORE[scenario], 3)
        assert version_at(path.parent / "other") == 2
        for rank, outcome in enumerate(outcomes):
            if rank != victim and outcome is not None:
                assert re.search(r"\[[012](, [012])*\]", outcome)  # on a busy machine who was only slow, too, or alone
                assert found == BEFORE[scenario] or "What is there is complete" in outcome
        if any(outcome is None for outcome in outcomes):
            assert found == 3
        assert_next_save_works(path)
        return outcomes[victim]

    victims = [draw.randrange(3) for _ in range(20)]
    with ThreadPoolExecutor(8) as executor:
        found = list(executor.map(kill_one, victims, [draw.randrange(calls[victim]) for victim in victims]))
    assert found.count("killed") >= 10  # on a busy machine a save may fail before, as a rank was slow


def run_until_killed(function: Callable[..., Any], *args: Any) -> bool:
    """Whether a process that calls it is killed."""
    process = jobs.CONTEXT.Process(target=function, args=args, daemon=True)
    process.start()
    process.join(HANGS)
    assert process.exitcode in (0, -9, 255)  # the fork server has not always seen how
    return process.exitcode != 0


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_r02_a_job_killed_before_any_call_to_the_file_system_costs_no_checkpoint(
    scenario: str, fresh: Callable[[], Path]
) -> None:
    def kill_before(number: int) -> tuple[bool, int | None]:
        path = fresh() / scenario
        was_killed = run_until_killed(jobs.until_call, number, path.parent, save_on_threads, path, 3)
        found = version_at(path)
        assert found in (BEFORE[scenario], 3) or (scenario == "link" and not path.exists())
        assert version_at(path.parent / "other") == 2
        if not was_killed:
            assert litter_in(path.parent) == []
        assert_next_save_works(path)
        return was_killed, found

    calls = calls_of(fresh() / scenario)
    with ThreadPoolExecutor(2) as executor:
        found = list(executor.map(kill_before, range(calls + 1)))
    assert [was_killed for was_killed, _ in found] == [True] * calls + [False]
    versions = [version for _, version in found]
    assert versions == sorted(versions, key=lambda version: version == 3)  # once it is there, it stays
    assert versions[0] == BEFORE[scenario]
    assert versions[-1] == 3


def calls_of(path: Path) -> int:
    """To the file system, by a save."""
    made: list[str] = []
    with disk(path.parent, lambda call, _: made.append(call)):
        assert save_on_threads(path, 3) == [None, None]
    return len(made)


# -- an error at every call to the system


@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        *(("again", error) for error in (errno.ENOSPC, errno.EIO, errno.EACCES, errno.ENOENT)),
        *((scenario, errno.EACCES) for scenario in ("first", "link")),
    ],
)
def test_an_error_at_any_call_to_the_system_reaches_all_ranks_and_costs_no_checkpoint(
    scenario: str, error: int, fresh: Callable[[], Path]
) -> None:
    endings = set()
    for rank in range(2):
        for number in itertools.count():
            path = fresh() / scenario
            old = set(os.listdir(path)) if path.exists() else set()
            trouble = Nth(number, jobs.raising(error))
            started = time.monotonic()
            with disk(path.parent, trouble, thread=f"rank {rank}"):
                outcomes = save_on_threads(path, 3)
            if trouble.call is None:
                assert outcomes == [None, None]
                break
            where = f"{trouble.call} {trouble.path}: {outcomes[0]}"
            assert time.monotonic() - started < AT_ONCE, where  # nobody waits for the other
            assert outcomes[0] == outcomes[1], where
            endings.add(ending := check_one_failure(path, scenario, outcomes[0], trouble))
            if ending == "in doubt" and scenario == "again":  # a loss of power may bring the old manifest back
                assert old <= set(os.listdir(path)), where
            assert_next_save_works(path)
    assert endings == {"refused", "failed", "in doubt", "saved"}


def check_one_failure(path: Path, scenario: str, outcome: str | None, trouble: Nth) -> str:
    """What a save with one error in it came to."""
    where = f"{trouble.call} {trouble.path}: {outcome}"
    assert version_at(path.parent / "other") == 2, where
    # What cannot be cleared away stays; so does a lock of which it cannot be told whose it is.
    is_of_lock = trouble.call == "stat" and trouble.path.endswith(".lock")
    is_cleaning = is_of_lock or trouble.call in ("unlink", "remove", "rmdir")
    assert is_cleaning or [name for name in litter_in(path.parent) if name.startswith(".")] == [], where
    if outcome is None:
        assert version_at(path) == 3, where
        return "saved"
    assert outcome.startswith("CheckpointError: "), where
    if "is saved, but the disk does not confirm" in outcome:
        assert version_at(path) == 3, where
        return "in doubt"
    assert version_at(path) == BEFORE[scenario], where
    assert path.is_symlink() == (scenario == "link"), where
    assert is_cleaning or litter_in(path.parent) == [], where
    return "failed" if UNTOUCHED in outcome else "refused"


def test_a_disk_that_is_gone_in_the_middle_of_a_save_costs_no_checkpoint(fresh: Callable[[], Path]) -> None:
    for number in itertools.count():
        path = fresh() / "again"
        trouble = Nth(number, jobs.raising(errno.EROFS), lasts=True)
        with disk(path.parent, trouble, thread="rank 0"):
            outcomes = save_on_threads(path, 3)
        if trouble.call is None:
            break
        where = f"{trouble.call} {trouble.path}: {outcomes[0]}"
        assert outcomes[0] == outcomes[1], where
        if outcomes[0] is None or "is saved, but" in outcomes[0]:
            assert version_at(path) == 3, where
        else:
            assert version_at(path) == 1, where
        assert_next_save_works(path)


def test_what_one_write_does_not_take_the_next_one_does(tmp_path: Path) -> None:
    with disk(tmp_path, most_bytes=1000):
        assert save_on_threads(tmp_path / "a", 3) == [None, None]
    assert version_at(tmp_path / "a") == 3


def test_a_write_that_takes_nothing_ends_the_save(tmp_path: Path) -> None:
    with disk(tmp_path, most_bytes=0):
        for outcome in save_on_threads(tmp_path / "a", 3):
            assert "wrote nothing of" in outcome
            assert UNTOUCHED in outcome
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_r02_files_and_their_names_are_on_the_disk_before_the_step_that_counts(
    name: str, fresh: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fresh() / name
    done = jobs.noted(monkeypatch)
    assert save_on_threads(path, 3) == [None, None]
    step = max(at for at, each in enumerate(done) if each in (("moved", path), ("moved", path / "manifest.json")))
    before, after = done[:step], done[step + 1 :]
    beside = hidden_beside(path, "saving")
    assert {beside / found for found in os.listdir(path)} <= {place for did, place in before if did == "synced"}
    assert before[-1] == ("synced", path if name == "again" else beside)
    assert ("synced", path) in after
    assert ("synced", path.parent) in after


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_file_system_that_cannot_sync_folders_will_do(number: int, tmp_path: Path) -> None:
    real = os.fsync

    def fsync(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").is_dir():
            raise OSError(number, os.strerror(number))
        real(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        assert save_on_threads(tmp_path / "a", 3) == [None, None]
    assert version_at(tmp_path / "a") == 3


def told_by(function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args, pipe)` sends from a process of its own."""
    mine, theirs = jobs.CONTEXT.Pipe(duplex=False)
    process = jobs.CONTEXT.Process(target=function, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    assert mine.poll(HANGS), "hangs"
    told = mine.recv()
    process.join()
    return told


def test_a_file_that_may_not_become_so_long_ends_the_save_on_all_ranks(fresh: Callable[[], Path]) -> None:
    for limit in (0, 100, 50_000):
        path = fresh() / "again"
        said = told_by(jobs.save_with_limit, path, 3, limit)
        assert said[0] == said[1]
        assert "File too large" in said[0]
        assert UNTOUCHED in said[0]
        assert version_at(path) == 1
        assert_next_save_works(path)


def test_r02_a_full_disk_ends_the_save_on_all_ranks_and_costs_no_checkpoint(tmp_path: Path) -> None:
    told = told_by(jobs.save_until_full, tmp_path)
    if told is None:
        pytest.skip("this system lets nobody mount a small disk")
    version, said, again, there, after, found = told
    assert version > 5
    for outcome in (*said, *again):
        assert "No space left on device" in outcome
        assert UNTOUCHED in outcome
    assert there == {str(number): number for number in range(1, version)}
    assert after == [None, None]
    assert found == version


# -- ranks that are lost


BUSY = 3.0  # s, in which a rank that lives shows it, on a machine that has other things to do, too


def test_a_rank_killed_while_the_others_wait_is_named_within_the_timeout(tmp_path: Path) -> None:
    for victim in (1, 2):
        job = Job(3, jobs.die_while_writing, tmp_path / "a", 3, victim, wait_timeout=BUSY)
        job.wait_until_saving()
        started = time.monotonic()
        outcomes = job.outcomes()
        assert time.monotonic() - started < AT_ONCE
        assert outcomes[victim] == "killed"
        for rank in {0, 1, 2} - {victim}:
            assert f"ranks [{victim}] stopped while they saved" in outcomes[rank]
            assert UNTOUCHED in outcomes[rank]
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("has_store", [False, True], ids=["launcher has the store", "rank 0 has the store"])
def test_rank_0_killed_after_the_commit_leaves_the_new_checkpoint(has_store: bool, fresh: Callable[[], Path]) -> None:
    path = fresh() / "again"
    job = Job(3, jobs.die_between_commit_and_verdict, path, 3, wait_timeout=BUSY, store_on_rank_0=has_store)
    job.wait_until_saving()
    started = time.monotonic()
    outcomes = job.outcomes()
    assert time.monotonic() - started < AT_ONCE
    assert outcomes[0] == "killed"
    for outcome in outcomes[1:]:
        assert outcome.startswith("CheckpointError: ")
        assert ("rank 0 has died" if has_store else "ranks [0] stopped") in outcome
        assert UNTOUCHED not in outcome
        assert "What is there is complete" in outcome
    assert version_at(path) == 3
    assert_next_save_works(path)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_job_killed_while_it_saves_in_the_background_costs_no_checkpoint(
    in_background: bool, fresh: Callable[[], Path]
) -> None:
    found = set()
    for moment in (0.05, 0.2, 0.35, 0.5):
        path = fresh() / "again"
        job = Job(2, jobs.save_slowly, path, 3, 0.01, in_background)
        job.wait_until_saving()
        time.sleep(moment)
        for rank in (1, 0):
            job.kill(rank)
        job.outcomes()
        found.add(version_at(path))
        assert version_at(path.parent / "other") == 2
        assert_next_save_works(path)
    assert found <= {1, 3}


# -- objects instead of files


BUCKET = "bucket://run"


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that holds a bucket with version 1 at `again` and version 2 at `other`."""
    monkeypatch.setenv("BUCKETS", str(tmp_path))
    assert save_on_threads(f"{BUCKET}/again", 1) == [None, None]
    assert save_on_threads(f"{BUCKET}/other", 2) == [None, None]
    return tmp_path


def litter_in_bucket(name: str) -> list[str]:
    folder = Folder(f"{BUCKET}/{name}")
    known = folder.read("manifest.json").decode() if folder.is_checkpoint else ""
    return [name for name in folder.names() if name not in known + "manifest.json"]


@pytest.mark.parametrize("name", ["first", "again"])
def test_r02_a_job_killed_before_any_call_to_an_object_store_costs_no_checkpoint(name: str, bucket: Path) -> None:
    url = f"{BUCKET}/{name}"
    versions = []
    was_killed = True
    while was_killed:
        was_killed = run_until_killed(
            jobs.in_bucket, bucket, jobs.until_call, len(versions), bucket, save_on_threads, url, 3
        )
        versions.append(version_at(url))
        assert version_at(f"{BUCKET}/other") == 2
        Folder(url).remove() if name == "first" else save_on_threads(url, 1)
    assert set(versions) == {BEFORE[name], 3}
    assert versions == sorted(versions, key=lambda version: version == 3)
    assert len(versions) > 10
    assert save_on_threads(url, 9) == [None, None]
    assert litter_in_bucket(name) == []


@pytest.mark.parametrize("name", ["first", "again"])
def test_an_error_at_any_call_to_an_object_store_leaves_nothing_behind(name: str, bucket: Path) -> None:
    url = f"{BUCKET}/{name}"
    for rank in range(2):
        for number in itertools.count():
            trouble = Nth(number, jobs.raising(errno.EIO))
            with disk(bucket, trouble, thread=f"rank {rank}"):
                outcomes = save_on_threads(url, 3)
            where = f"{trouble.call} {trouble.path}: {outcomes[0]}"
            assert outcomes[0] == outcomes[1], where
            assert version_at(url) == (3 if outcomes[0] is None else BEFORE[name]), where
            if trouble.call != "unlink":
                assert litter_in_bucket(name) == [], where
            Folder(url).remove() if name == "first" else save_on_threads(url, 1)
            if trouble.call is None:
                break


# -- two at once


def test_a_second_job_that_saves_to_the_same_path_is_refused_on_every_rank(fresh: Callable[[], Path]) -> None:
    for path in (fresh() / "first", fresh() / "again"):
        told = path.parent / "told"
        job = Job(2, jobs.save_when_told, path, 3, told)
        wait_for(path.with_name(f".{path.name}.saving"))
        said = f"CheckpointError: another job is saving to {path} at this moment. Give each job a path of its own."
        assert save_on_threads(path, 4, world=3) == [said] * 3
        told.touch()
        assert job.outcomes() == [None, None]
        told.unlink()
        assert version_at(path) == 3
        assert_next_save_works(path)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + HANGS
    while not path.exists():
        assert time.monotonic() < deadline


def test_the_lock_of_a_killed_job_does_not_block_the_next_one(fresh: Callable[[], Path]) -> None:
    path = fresh() / "again"
    job = Job(2, jobs.save_slowly, path, 3, 0.03)
    job.wait_until_saving()
    wait_for(path.with_name(".again.saving"))
    for rank in (0, 1):
        job.kill(rank)
    assert job.outcomes() == ["killed", "killed"]
    assert {".again.lock", ".again.saving"} <= set(litter_in(path.parent))
    assert_next_save_works(path)


def test_a_save_that_is_interrupted_by_hand_leaves_its_place_free(fresh: Callable[[], Path]) -> None:
    """As by Ctrl-C, after which the process may go on: the lock is not to outlive the save."""
    path = fresh() / "again"

    def interrupt() -> None:
        raise KeyboardInterrupt

    trouble = Nth(10, interrupt)
    with disk(path.parent, trouble), pytest.raises(KeyboardInterrupt) as held:  # its frames would hold the lock
        save(LocalComm().board, path, 3)
    assert ".again.saving" in str(trouble.path)
    assert litter_in(path.parent) == []
    assert save_on_threads(path, 4) == [None, None]
    assert version_at(path) == 4
    del held


def test_a_lock_that_another_job_removes_as_it_is_taken_is_taken_anew(tmp_path: Path) -> None:
    path, lock = tmp_path / "a", tmp_path / ".a.lock"
    did: list[str] = []

    def meanwhile(call: str, at: Any) -> None:
        if not did and call == "flock":
            did.append("removed")
            lock.unlink()  # by its last holder, between this one's open and its lock
        elif len(did) == 1 and ".saving" in str(at):
            did.append("saved")
            told.append(save_on_threads(path, 4, world=1)[0])

    told: list[str | None] = []
    with disk(tmp_path, meanwhile, thread="MainThread"):
        save(LocalComm().board, path, 3)
    assert did == ["removed", "saved"]
    assert "another job is saving" in str(told[0])
    assert version_at(path) == 3
    assert litter_in(tmp_path) == []


def test_a_lock_is_removed_by_who_holds_it(tmp_path: Path) -> None:
    """Otherwise it might be that of another job, which has taken it in between."""
    held: list[bool] = []

    def look(call: str, at: Any) -> None:
        if call == "unlink" and str(at).endswith(".lock"):
            with Path(at).open("a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held.append(True)

    with disk(tmp_path, look):
        assert save_on_threads(tmp_path / "a", 3) == [None, None]
    assert held == [True]


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_what_users_put_beside_the_files_while_they_are_saved_over_stays(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root = request.getfixturevalue("bucket") if kind == "bucket" else tmp_path
    url = f"{BUCKET}/again" if kind == "bucket" else str(tmp_path / "again")
    notes = root / "run|again|notes.txt" if kind == "bucket" else tmp_path / "again" / "notes.txt"
    assert save_on_threads(url, 1) == [None, None]
    put = Nth(12, lambda: notes.write_text("the learning rate was too high"))
    with disk(root, put, thread="rank 0"):
        assert save_on_threads(url, 3) == [None, None]
    assert notes.read_text()
    assert version_at(url) == 3
    assert (
        litter_in_bucket("again") == ["notes.txt"] if kind == "bucket" else litter_in(tmp_path) == ["again/notes.txt"]
    )


def test_many_jobs_that_save_to_one_path_leave_one_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for _ in range(2):
        with ThreadPoolExecutor(6) as executor:
            outcomes = list(executor.map(lambda version: save_on_threads(path, version), range(6)))
        saved = [version for version, said in enumerate(outcomes) if said == [None, None]]
        assert saved
        assert version_at(path) in saved
        assert all("another job is saving" in said[0] for said in outcomes if said[0] is not None)
        assert litter_in(tmp_path) == []


@pytest.mark.parametrize("removes", [True, False], ids=["removed", "replaced"])
def test_a_reader_of_what_is_taken_away_gets_right_values_or_an_error(removes: bool, tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert save_on_threads(path, 0) == [None, None]
    told = tmp_path / ".told"
    process = jobs.CONTEXT.Process(target=jobs.save_one_after_the_other, args=(path, 60, removes, told), daemon=True)
    process.start()
    seen: set[int] = set()
    while process.is_alive():
        with suppress(CheckpointError, FileNotFoundError):
            seen.add(jobs.version_of(StoredCheckpoint(path).load()))
        if len(seen) > 2:
            told.touch()
    process.join()
    assert process.exitcode == 0
    assert len(seen) > 2
    told.unlink()
    assert version_at(path) >= 59
    assert litter_in(tmp_path) == []


def test_who_reads_already_reads_on_when_the_checkpoint_is_removed(fresh: Callable[[], Path]) -> None:
    path = fresh() / "again"
    checkpoint = StoredCheckpoint(path)
    checkpoint.check_sizes()
    lazy = checkpoint.tree()["state_dict"]
    lazy["weight"].source.whole()
    Folder(path).remove()
    for name, value in jobs.values_of(1).items():
        assert torch.equal(lazy[name].source.whole(), value)


def test_a_removal_killed_before_any_call_leaves_all_or_nothing_and_the_next_one_clears_up(
    fresh: Callable[[], Path],
) -> None:
    seen = []
    for number in itertools.count():
        path = fresh() / "again"
        was_killed = run_until_killed(jobs.until_call, number, path.parent, jobs.remove, path)
        assert version_at(path) in (None, 1)
        seen.append(version_at(path))
        assert find_newest(path.parent).newest is not None
        if not was_killed:
            break
        Folder(path.parent / "other").remove()
        assert litter_in(path.parent) == []
    assert set(seen) == {None, 1}


def test_a_link_killed_before_any_call_shows_the_old_or_the_new_one(fresh: Callable[[], Path]) -> None:
    for number in itertools.count():
        path = fresh() / "link"
        was_killed = run_until_killed(jobs.until_call, number, path.parent, jobs.link, path, path.with_name("again"))
        assert version_at(path) in (1, 2)
        jobs.link(path, path.with_name("again"))
        assert version_at(path) == 1
        assert litter_in(path.parent) == []
        if not was_killed:
            break
    assert number > 2


# -- what is no checkpoint


def test_folders_of_something_else_are_not_replaced(tmp_path: Path) -> None:
    folders = {
        "photos": ["cat.jpeg"],
        "application": ["manifest.json"],  # every web application has one
        "both": ["manifest.json", "index.html"],
        "torn": ["shard-00000-of-00001-00000000.safetensors"],
        "hidden": [".gitignore"],
    }
    for name, files in folders.items():
        path = tmp_path / name
        path.mkdir()
        for file in files:
            (path / file).write_text("mine")
        for outcome in save_on_threads(path, 1):
            assert f"{path} is a folder that is not a checkpoint (it holds {sorted(files)[0]}" in outcome
        with pytest.raises(CheckpointError, match="is a folder that is not a checkpoint"):
            Folder(path).link_to(Folder(tmp_path / "other"))
        assert {file.name: file.read_text() for file in path.iterdir()} == dict.fromkeys(files, "mine")
    assert sorted(os.listdir(tmp_path)) == sorted(folders)


def test_what_a_save_may_find_in_its_way_is_replaced(template: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    shutil.copytree(template / "again", tmp_path / "read by NFS")
    (tmp_path / "read by NFS" / ".nfs0000000000ab12cd").touch()
    shutil.copytree(template / "again", tmp_path / "damaged")
    (tmp_path / "damaged" / "manifest.json").write_bytes(b"\0" * 100)
    (tmp_path / ".empty.saving").mkdir()
    (tmp_path / ".empty.saving" / "shard").touch()
    (tmp_path / ".empty.lock").touch()
    for name in ("empty", "dangling", "read by NFS", "damaged"):
        assert save_on_threads(tmp_path / name, 3) == [None, None], name
        assert version_at(tmp_path / name) == 3
        assert not (tmp_path / name).is_symlink()
    assert litter_in(tmp_path) == []


def test_what_stands_where_a_save_keeps_its_files_is_named(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious").touch()
    (tmp_path / ".linked.saving").symlink_to(mine)
    (tmp_path / ".taken.saving").touch()
    for name in ("linked", "taken"):
        for outcome in save_on_threads(tmp_path / name, 1):
            assert f"cannot write to {tmp_path}: [Errno 17] File exists: '{tmp_path}/.{name}.saving'" in outcome
    assert os.listdir(mine) == ["precious"]


# -- finding the newest


def test_the_newest_complete_checkpoint_is_found_and_what_was_passed_over_is_told(tmp_path: Path) -> None:
    for version in range(8):
        assert save_on_threads(tmp_path / f"step={version}.ckpt", version) == [None, None]
    shards = {version: sorted((tmp_path / f"step={version}.ckpt").glob("*.safetensors")) for version in range(8)}
    with shards[7][1].open("r+b") as file:
        file.truncate(100)
    shards[6][0].unlink()
    (tmp_path / "step=5.ckpt" / "manifest.json").write_bytes(b"{}")
    (tmp_path / "step=4.ckpt" / "manifest.json").unlink()
    checks = {
        version: tmp_path / f"step={version}.ckpt" / read_manifest(Folder(shards[version][0].parent)).files[1].checks
        for version in (2, 3)
    }
    checks[3].unlink()
    checks[2].write_bytes(checks[2].read_bytes()[:-1])
    (tmp_path / "last.ckpt").symlink_to("step=8.ckpt")  # which never came to be
    (tmp_path / "to the newest.ckpt").symlink_to("step=1.ckpt")  # which is found by its own name
    (tmp_path / ".step=8.ckpt.saving").mkdir()
    (tmp_path / "step=9.ckpt").mkdir()
    (tmp_path / "notes.txt").touch()
    newest, _, skipped = find_newest(tmp_path)
    assert str(newest) == str(tmp_path / "step=1.ckpt")
    expected = {
        "step=3.ckpt": f"{checks[3].name} is missing",
        "step=2.ckpt": f"{checks[2].name} has",
        "step=7.ckpt": "has 100 bytes and should have",
        "step=6.ckpt": "is missing. 1 of 2 shards are there.",
        "step=5.ckpt": "manifest.json is damaged",
        "step=4.ckpt": "has no manifest.json",
        "last.ckpt": "there is no such folder",
        ".step=8.ckpt.saving": "a save that was not finished",
        "step=9.ckpt": "the folder is empty",
    }
    assert len(skipped) == len(expected)
    for name, reason in expected.items():
        assert [problem for problem in skipped if f"{tmp_path}/{name}" in problem and reason in problem], name


def test_nothing_but_damaged_checkpoints_is_none_found(tmp_path: Path) -> None:
    assert find_newest(tmp_path / "nowhere") == (None, -math.inf, [])
    assert save_on_threads(tmp_path / "a", 1) == [None, None]
    (tmp_path / "a" / "manifest.json").unlink()
    assert find_newest(tmp_path).newest is None


@pytest.mark.parametrize("damage", ["loop", "folder", "unreadable", "broken disk", "unreadable shard"])
def test_no_damage_keeps_the_newest_of_the_others_from_being_found(damage: str, tmp_path: Path) -> None:
    for version in range(2):
        assert save_on_threads(tmp_path / str(version), version) == [None, None]
    (tmp_path / "link").symlink_to("1")
    manifest = tmp_path / "1" / "manifest.json"
    if damage == "loop":
        shutil.rmtree(tmp_path / "1")
        (tmp_path / "1").symlink_to("link")
    elif damage == "folder":
        manifest.unlink()
        manifest.mkdir()
    number = errno.EIO if damage == "broken disk" else errno.EACCES
    failing = {"unreadable": "manifest.json", "broken disk": "manifest.json", "unreadable shard": ".safetensors"}

    def fail(call: str, path: Any) -> None:
        if damage in failing and call == "open" and "/0/" not in str(path) and str(path).endswith(failing[damage]):
            raise OSError(number, os.strerror(number))

    with disk(tmp_path, fail):
        newest, _, skipped = find_newest(tmp_path)
    assert str(newest) == str(tmp_path / "0")
    assert len(skipped) == 2
    if damage in failing:
        assert all("cannot read" in problem and os.strerror(number) in problem for problem in skipped)


@pytest.mark.parametrize("change", ["missing", "short", "long"])
@pytest.mark.parametrize("kind", ["crc32", "pt"])
def test_a_checkpoint_whose_checksums_or_objects_are_not_as_written_is_not_the_newest(
    kind: str, change: str, tmp_path: Path
) -> None:
    for version in range(2):
        path = tmp_path / str(version)
        Saver(LocalComm().board, warn=lambda _: None).save({"epoch": 0, "mine": Strange()}, str(path), {})
    file = next((tmp_path / "1").glob(f"*.{kind}"))
    if change == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:3] if change == "short" else file.read_bytes() + b"\0")
    assert str(find_newest(tmp_path).newest) == str(tmp_path / "0")


# -- agreements


class Strange:
    """What JSON does not know."""


def on_boards(world: int, wait_timeout: float, function: Callable[[Board], Any]) -> list[Any]:
    """What the function returns on every rank, or its error's words."""

    def rank_main(comm: Comm) -> Any:
        try:
            return function(comm.board)
        except AgreementError as error:
            return str(error)

    return ThreadWorld(world, wait_timeout=wait_timeout).run(rank_main)


def test_ranks_that_wait_at_different_places_do_not_wait_for_ever() -> None:
    def meet(board: Board) -> Any:
        topic = "there" if board.rank == 1 else "here"
        return board.agree(topic, {}, lambda _: {}, "not here: {missing}")

    started = time.monotonic()
    said = on_boards(3, 1.0, meet)
    assert time.monotonic() - started < AT_ONCE
    assert said == ["not here: [1]", "not here: [0, 2]", "not here: [1]"]


def test_of_a_dead_and_a_slow_rank_the_dead_one_is_named() -> None:
    def meet(board: Board) -> Any:
        if board.rank == 1:
            return None
        for _ in range(30 if board.rank == 2 else 0):
            time.sleep(0.1)
            board.beat()
        return board.agree("here", {}, lambda _: {}, "not here: {missing}")

    assert on_boards(3, 2.0, meet) == ["not here: [1]", None, "not here: [1]"]


def test_a_rank_that_comes_late_hears_what_was_decided_without_it() -> None:
    def meet(board: Board) -> Any:
        time.sleep(3.0 * board.rank)
        return board.agree("here", {}, lambda _: {}, "not here: {missing}")

    assert on_boards(2, 0.4, meet) == ["not here: [1]"] * 2


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_what_a_rank_cannot_prepare_is_heard_by_all_before_anything_is_written(
    victim: int, in_background: bool, tmp_path: Path
) -> None:
    class Broken(Strip):
        def pieces(self) -> list[Any]:
            raise MemoryError("no room for a copy")

    def rank_main(comm: Comm) -> list[str | None]:
        saver = Saver(comm.board, in_background=in_background)
        tree = jobs.tree_of(1, comm.rank, 2)
        if comm.rank == victim:
            tree["state_dict"]["weight"] = LazyTensor(Broken("weight", torch.zeros(4), comm.rank, 2))
        said = [jobs.error_of(lambda: saver.save(tree, str(tmp_path / "a"), {}))]
        return [
            *said,
            jobs.error_of(lambda: (saver.save(jobs.tree_of(2, comm.rank, 2), str(tmp_path / "a"), {}), saver.wait())),
        ]

    for said in ThreadWorld(2).run(rank_main):
        assert said == [f"CheckpointError: rank {victim}: MemoryError: no room for a copy", None]
    assert version_at(tmp_path / "a") == 2
    assert litter_in(tmp_path) == []


@pytest.mark.parametrize(("key", "drops"), [("weight", 0), ("weight", 1), ("owned", 1)])
def test_an_entry_that_a_hook_deletes_on_one_rank_only_is_an_error_on_all(key: str, drops: int, tmp_path: Path) -> None:
    def rank_main(comm: Comm) -> str | None:
        tree = jobs.tree_of(1, comm.rank, 2)
        tree["state_dict"]["owned"] = LazyTensor(Strip("owned", torch.arange(4.0), 0, 1 if comm.rank else 10**9))
        if comm.rank == drops:
            del tree["state_dict"][key]
        return jobs.error_of(lambda: Saver(comm.board).save(tree, str(tmp_path / "a"), {}))

    found = ThreadWorld(2).run(rank_main)
    assert found[0] == found[1]
    assert repr(key) in found[0]
    assert "must do so alike on every rank" in found[0]
    assert UNTOUCHED in found[0]
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_whose_tree_names_what_is_not_there_is_not_whole(tmp_path: Path) -> None:
    Saver(LocalComm().board).save({"state_dict": {"w": torch.ones(3)}}, str(tmp_path / "a"), {})
    manifest = StoredCheckpoint(tmp_path / "a").manifest
    tree = {"state_dict": {"w": {"$": "tensor", "name": "gone"}}}
    (tmp_path / "a" / "manifest.json").write_bytes(dataclasses.replace(manifest, tree=tree).to_bytes())
    (problem,) = verify(tmp_path / "a")
    assert "there is no tensor 'gone'" in problem


def test_a_step_that_may_have_been_done_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert save_on_threads(tmp_path / "a", 1) == [None, None]
    replace, read = Path.replace, Folder.read

    def replace_and_fail(path: Path, target: Path) -> Path:
        replace(path, target)
        monkeypatch.setattr(Folder, "read", unreadable)
        raise OSError(errno.EIO, "Input/output error")

    def unreadable(folder: Folder, name: str) -> bytes:
        if name == "manifest.json":
            raise CheckpointError("cannot read it")
        return read(folder, name)

    monkeypatch.setattr(Path, "replace", replace_and_fail)
    for said in save_on_threads(tmp_path / "a", 2):
        assert "What is there is complete: what was there before, or the new checkpoint." in said
        assert UNTOUCHED not in said
    monkeypatch.undo()
    assert version_at(tmp_path / "a") == 2


def test_objects_that_cannot_be_pickled_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    def rank_main(comm: Comm) -> str | None:
        tree = {"mine": threading.Lock()}
        return jobs.error_of(lambda: Saver(comm.board, warn=lambda _: None).save(tree, str(tmp_path / "a"), {}))

    for said in ThreadWorld(2).run(rank_main):
        assert said == (
            "CheckpointError: ranks 0, 1: the checkpoint holds objects that are no plain data: mine (lock); and they "
            "cannot be pickled: cannot pickle '_thread.lock' object"
        )
    assert os.listdir(tmp_path) == []


def test_objects_are_saved_in_the_background_as_they_were_when_save_was_called(tmp_path: Path) -> None:
    mine = Strange()
    mine.word = "before"
    saver = Saver(LocalComm().board, in_background=True, warn=lambda _: None)
    with disk(tmp_path, lambda *_: time.sleep(0.01)):
        saver.save({"mine": mine}, str(tmp_path / "a"), {})
        mine.word = "after"
        saver.wait()
    assert StoredCheckpoint(tmp_path / "a").load(objects=True)["mine"].word == "before"


def test_tensors_are_saved_in_the_background_as_they_were_when_save_was_called(tmp_path: Path) -> None:
    """Whoever holds them: ranks together, rank 0 for all, or one rank its own."""
    spread, plain, own = torch.ones(8), torch.ones(3), torch.ones(2)
    tree = {
        "state_dict": {"spread": LazyTensor(Strip("spread", spread, 0, 1)), "plain": plain},
        "own": Partial("own", {0: {"kept": LazyTensor(OfOneRank("own", own))}}),
    }
    saver = Saver(LocalComm().board, in_background=True)
    edited, before = threading.Event(), set(threading.enumerate())
    with disk(tmp_path, lambda *_: edited.wait(HANGS), thread="lightning_zero saver"):
        saver.save(tree, str(tmp_path / "a"), {})
        for tensor in (spread, plain, own):
            tensor.fill_(7.0)
        edited.set()
        saver.wait()
    assert set(threading.enumerate()) <= before
    found = StoredCheckpoint(tmp_path / "a").load()
    for value in (*found["state_dict"].values(), found["own"][0]["kept"]):
        assert torch.equal(value, torch.ones_like(value))


def test_the_copy_that_is_saved_in_the_background_is_gone_as_the_save_is_complete(tmp_path: Path) -> None:
    copies: list[weakref.ref[Tensor]] = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = super().__torch_function__(func, types, args, kwargs)
            if func is Tensor.to:
                copies.append(weakref.ref(made))
            return made

    strip = Strip("w", torch.ones(8).as_subclass(Watched), 0, 1)
    saver = Saver(LocalComm().board, in_background=True)
    are_alive: list[list[bool]] = []

    def look(*_: Any) -> None:
        are_alive.append([copy() is not None for copy in copies])

    watching = threading.Event()
    with disk(tmp_path, lambda *_: watching.wait(HANGS), thread="lightning_zero saver"):
        saver.save({"state_dict": {"w": LazyTensor(strip)}}, str(tmp_path / "a"), {})
        look()
        saver._futures[-1].add_done_callback(look)  # called in the thread, before the executor forgets the task
        watching.set()
        saver.wait()
    assert are_alive == [[True], [False]]


def test_a_rank_whose_disk_stops_in_the_background_counts_as_lost_though_its_other_thread_lives(
    tmp_path: Path,
) -> None:
    released = threading.Event()

    def stop(_: str, path: Any) -> None:
        if "shard-00001" in str(path):
            released.wait(6 * BUSY)

    def rank_main(comm: Comm) -> str | None:
        saver = Saver(comm.board, in_background=True)
        saver.save(jobs.tree_of(1, comm.rank, 2), str(tmp_path / "a"), {})
        if comm.rank == 0:
            saver._futures[-1].add_done_callback(lambda _: released.set())
        return jobs.error_of(saver.muster)

    with disk(tmp_path, stop, thread="lightning_zero saver"):
        found = ThreadWorld(2, wait_timeout=BUSY).run(rank_main)
    assert found[0] == found[1]
    assert "ranks [1] stopped while they saved" in str(found[0])
    assert UNTOUCHED in str(found[0])


@pytest.mark.parametrize(
    ("topic", "expected", "version"),
    [("save/verdict", "rank 0 has died", 1), ("is written/verdict", "The new checkpoint is complete.", 2)],
)
def test_rank_0_that_cannot_tell_the_others_says_what_is_there_and_clears_up(
    topic: str, expected: str, version: int, tmp_path: Path
) -> None:
    def fail(_: str, key: str) -> None:
        if key.endswith(topic):
            raise dist.DistNetworkError("the connection is closed")

    assert save_on_threads(tmp_path / "a", 1, world=1) == [None]
    board = LocalComm().board
    board._held.thing = jobs.Announced(board._store, fail)  # type: ignore[assignment]
    told = jobs.error_of(lambda: save(board, tmp_path / "a", 2))
    assert told is not None
    assert expected in told
    assert version_at(tmp_path / "a") == version
    assert litter_in(tmp_path) == []


@pytest.mark.parametrize(("slow", "rank"), [("open", 0), ("write", 1)], ids=["rank 0 reads headers", "rank 1 writes"])
def test_a_rank_that_works_on_a_slow_disk_longer_than_the_timeout_is_not_lost(
    slow: str, rank: int, tmp_path: Path
) -> None:
    calls = []

    def sleep(call: str, path: Any) -> None:
        if call == slow and "shard-" in str(path):
            calls.append(path)
            time.sleep(BUSY / 3)

    with disk(tmp_path, sleep, thread=f"rank {rank}"):
        assert save_on_threads(tmp_path / "a", 3, world=4, wait_timeout=BUSY) == [None] * 4
    assert len(calls) > 3
    assert version_at(tmp_path / "a") == 3


@pytest.mark.parametrize("nbytes", [100, 50_000])
def test_a_shard_that_rank_0_does_not_see_to_its_end_is_no_part_of_a_checkpoint(nbytes: int, tmp_path: Path) -> None:
    def cut(call: str, path: Any) -> None:
        if call == "stat" and "shard-00001" in str(path) and str(path).endswith(".safetensors"):
            os.truncate(path, nbytes)

    with disk(tmp_path, cut, thread="rank 0"):
        found = save_on_threads(tmp_path / "a", 3)
    assert found[0] == found[1]
    assert "is shorter than rank 1 wrote it" in str(found[0])
    assert UNTOUCHED in str(found[0])
    assert os.listdir(tmp_path) == []


def test_a_tensor_that_ranks_hold_in_other_dtypes_is_an_error_on_all(tmp_path: Path) -> None:
    """Those of one size, too: the bytes of one would be read as the other."""

    def rank_main(comm: Comm) -> str | None:
        dtype = torch.bfloat16 if comm.rank else torch.float16
        tree = {"w": LazyTensor(Strip("w", torch.ones(8, dtype=dtype), comm.rank, 2))}
        return jobs.error_of(lambda: Saver(comm.board).save(tree, str(tmp_path / "a"), {}))

    found = ThreadWorld(2).run(rank_main)
    assert found[0] == found[1]
    assert "the pieces of 'w' are of several dtypes: torch.float16, torch.bfloat16" in str(found[0])
    assert UNTOUCHED in str(found[0])
    assert os.listdir(tmp_path) == []


def test_a_save_in_the_background_that_fails_keeps_what_was_to_go(fresh: Callable[[], Path]) -> None:
    path = fresh() / "again"

    def rank_main(comm: Comm) -> list[str | None]:
        saver = Saver(comm.board, in_background=True)

        def save(version: int) -> None:
            saver.save(jobs.tree_of(version, comm.rank, 2), str(path.with_name("new")), {})
            if comm.rank == 0:
                saver.link(Folder(path.with_name("link")), Folder(path.with_name("new")))
                saver.remove(Folder(path))

        said = []
        for version in (3, 4):
            save(version)
            said.append(jobs.error_of(saver.wait))
            saver.wait()  # for what was to be done after the save
            assert not saver.has_failed
            if comm.rank == 0:
                there.append((version_at(path), version_at(path.with_name("link"))))
        return said

    there: list[tuple[int | None, int | None]] = []

    with disk(path.parent, Nth(3, jobs.raising(errno.ENOSPC)), thread="lightning_zero saver"):
        found = ThreadWorld(2).run(rank_main)
    assert found[0] == found[1]
    assert "No space left on device" in found[0][0]
    assert found[0][1] is None
    assert there == [(1, 2), (None, 4)]
    assert version_at(path.with_name("other")) == 2


def test_once_the_failure_of_a_save_is_known_checkpoints_are_removed_again(fresh: Callable[[], Path]) -> None:
    path = fresh() / "again"

    def rank_main(comm: Comm) -> str | None:
        saver = Saver(comm.board, in_background=True)
        saver.save(jobs.tree_of(3, comm.rank, 2), str(path.with_name("new")), {})
        said = jobs.error_of(saver.wait)
        if comm.rank == 0:
            saver.remove(Folder(path))
        saver.wait()
        return said

    with disk(path.parent, Nth(3, jobs.raising(errno.ENOSPC)), thread="lightning_zero saver"):
        found = ThreadWorld(2).run(rank_main)
    assert all("No space left on device" in said for said in found)
    assert not path.exists()


def test_a_link_or_a_removal_that_fails_on_rank_0_is_heard_of_by_all(fresh: Callable[[], Path]) -> None:
    folder = fresh()
    (folder / "last").mkdir()
    (folder / "last" / "cat.jpeg").touch()
    said = f"CheckpointError: rank 0: {folder}/last is a folder that is not a checkpoint (it holds cat.jpeg)."

    def in_front(comm: Comm) -> str | None:
        keeper = CheckpointKeeper(comm, in_background=False, warn=print)
        keeper.save(jobs.tree_of(3, comm.rank, 2), str(folder / "new"), 3, {})
        return jobs.error_of(lambda: keeper.link_latest(str(folder / "last"), str(folder / "new"), 3))

    def behind(comm: Comm) -> str | None:
        keeper = CheckpointKeeper(comm, in_background=True, warn=print)
        keeper.save(jobs.tree_of(4, comm.rank, 2), str(folder / "new"), 4, {})
        keeper.link_latest(str(folder / "last"), str(folder / "new"), 4)
        return jobs.error_of(lambda: keeper.save(jobs.tree_of(5, comm.rank, 2), str(folder / "newer"), 5, {}))

    for ranks in (in_front, behind):
        for error in ThreadWorld(2).run(ranks):
            assert error is not None
            assert error.startswith(said)
    assert version_at(folder / "new") == 4
    assert version_at(folder / "newer") is None
    assert (folder / "last" / "cat.jpeg").exists()


def test_what_all_ranks_say_alike_is_said_once() -> None:
    def meet(board: Board) -> Any:
        record = [{}, {"error": "no space"}, {"error": "no permission"}, {"error": "no permission"}][board.rank]
        return board.agree("here", record, lambda _: {})

    assert on_boards(4, 5.0, meet) == ["rank 1: no space; ranks 2, 3: no permission"] * 4
