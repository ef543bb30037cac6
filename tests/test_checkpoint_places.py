"""Checkpoints on every kind of file system (R49), with everything that `ModelCheckpoint` asks for."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import buckets  # noqa: F401  registers bucket://
import checkpoint_jobs as jobs
from lightning_zero.checkpoint import Folder, Saver, StoredCheckpoint, find_newest, verify
from lightning_zero.checkpoint.export import consolidate
from lightning_zero.comm import LocalComm
from ranks import RankPool


def in_bucket(function: Any, root: Path, *args: Any, **kwargs: Any) -> Any:
    """On a rank: with the bucket's file system at hand."""
    os.environ["BUCKETS"] = str(root)
    __import__("buckets")
    return function(*args, **kwargs)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BUCKETS", str(tmp_path))
    return tmp_path


SETTINGS = {"monitor": "improving", "save_top_k": 2, "save_last": True, "every_n_train_steps": 2}


def checkpoints_in(url: str) -> list[str]:
    return [name for name in Folder(url).names() if Folder(url).inside(name).is_checkpoint]


@pytest.mark.parametrize("place", ["memory", "disk", "bucket"])
def test_r49_save_keep_resume_consolidate_and_find_the_last(
    place: str, bucket: Path, pool_of: Callable[[int], RankPool]
) -> None:
    """In memory there is one process, and two elsewhere."""
    url = {"memory": "memory://run/kept", "disk": f"{bucket}/kept", "bucket": "bucket://run/kept"}[place]
    world = 1 if place == "memory" else 2
    pool = pool_of(world)
    run = pool.run(in_bucket, jobs.fit_keeping, bucket, {"stage": 2}, world, url, **SETTINGS)[0]
    if place == "memory":  # ... which is not this one
        kept = pool.run(checkpoints_in, url)[0]
    else:
        kept = checkpoints_in(url)
        assert [problem for name in kept for problem in verify(f"{url}/{name}")] == []
    assert kept == ["epoch=1-step=10.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"]
    assert run["step"] == 10
    again = pool.run(in_bucket, jobs.resume_from_last, bucket, {"stage": 3}, world, url)
    straight = pool.run(jobs.fit, {"stage": 2}, world, 3)
    assert [run["losses"] for run in again] == [run["losses"][10:] for run in straight]


def test_r49_a_file_url_is_a_path(two_ranks: RankPool, tmp_path: Path) -> None:
    """(Not as a `dirpath` of `ModelCheckpoint`: Lightning itself takes that for a path relative to where it runs.)"""
    url = f"file://{tmp_path}/a.ckpt"
    two_ranks.run(jobs.fit, {"stage": 1}, 2, 1, save=url)
    assert verify(tmp_path / "a.ckpt") == verify(url) == []
    assert len(two_ranks.run(jobs.fit, {"stage": 2}, 2, 2, resume=url)[0]["losses"]) == jobs.STEPS


def test_r49_a_checkpoint_in_a_bucket_becomes_a_file_in_a_bucket(bucket: Path, two_ranks: RankPool) -> None:
    two_ranks.run(in_bucket, jobs.fit, bucket, {"stage": 3}, 2, 1, save="bucket://run/a.ckpt")
    consolidate("bucket://run/a.ckpt", "bucket://run/one.ckpt")
    with fsspec.open("bucket://run/one.ckpt") as file:
        single = torch.load(file, weights_only=True)
    saved = StoredCheckpoint("bucket://run/a.ckpt").load()
    assert all(torch.equal(single["state_dict"][name], value) for name, value in saved["state_dict"].items())


def test_r49_what_is_saved_twice_to_a_bucket_leaves_nothing_of_the_first(bucket: Path, two_ranks: RankPool) -> None:
    for _ in range(2):
        two_ranks.run(in_bucket, jobs.fit, bucket, {"stage": 1}, 2, 1, save="bucket://run/a.ckpt")
    assert len(Folder("bucket://run/a.ckpt").names()) == 5  # two shards, their checksums, the manifest
    assert verify("bucket://run/a.ckpt") == []


def test_r49_without_its_manifest_nothing_in_a_bucket_is_a_checkpoint(bucket: Path, two_ranks: RankPool) -> None:
    two_ranks.run(in_bucket, jobs.fit, bucket, {"stage": 1}, 2, 1, save="bucket://run/a.ckpt")
    two_ranks.run(in_bucket, jobs.fit, bucket, {"stage": 1}, 2, 1, save="bucket://run/b.ckpt")
    fsspec.filesystem("bucket").rm_file("bucket://run/b.ckpt/manifest.json")
    newest, _, skipped = find_newest("bucket://run")
    assert str(newest) == "bucket://run/a.ckpt"
    (problem,) = skipped
    assert "b.ckpt is not a checkpoint" in problem


def test_r35_the_last_checkpoint_is_found_when_its_link_leads_nowhere(two_ranks: RankPool, tmp_path: Path) -> None:
    """A kill between deleting an old checkpoint and moving the link."""
    run = two_ranks.run(jobs.fit_keeping, {"stage": 2}, 2, tmp_path, **SETTINGS)[0]
    (tmp_path / "last.ckpt").unlink()
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    (tmp_path / "half.ckpt").mkdir()
    newest, _, skipped = find_newest(tmp_path)
    assert newest is not None
    assert newest.path == run["best"]
    assert sorted(problem.partition(" ")[0].rpartition("/")[2] for problem in skipped) == ["half.ckpt", "last.ckpt"]
    again = two_ranks.run(jobs.resume_from_last, {"stage": 2}, 2, tmp_path)
    assert [len(run["losses"]) for run in again] == [5, 5]


@pytest.mark.parametrize("asynchronously", [False, True])
def test_r35_old_checkpoints_go_when_the_next_is_complete(
    asynchronously: bool, two_ranks: RankPool, tmp_path: Path
) -> None:
    strategy = {"stage": 2, "checkpoint": {"async_save": asynchronously}}
    two_ranks.run(jobs.fit_keeping, strategy, 2, tmp_path, **{**SETTINGS, "save_top_k": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=1-step=10.ckpt", "last.ckpt"]
    assert (tmp_path / "last.ckpt").resolve() == tmp_path / "epoch=1-step=10.ckpt"
    assert verify(tmp_path / "last.ckpt") == []


@pytest.mark.parametrize("later", ["file", "folder"])
def test_r35_the_last_checkpoint_is_the_later_of_files_and_folders(later: str, tmp_path: Path) -> None:
    """A run that went from `format="full"` or `ddp` to shards, or back."""

    def save(kind: str) -> None:
        if kind == "file":
            torch.save({"state_dict": {}}, tmp_path / "last.ckpt")
        else:
            Saver(LocalComm().board).save({"state_dict": {}}, str(tmp_path / "epoch=1.ckpt"), {})

    save("folder" if later == "file" else "file")
    time.sleep(0.05)
    save(later)
    trainer: Any = SimpleNamespace(
        loggers=[], default_root_dir=tmp_path, strategy=SimpleNamespace(broadcast=lambda value: value)
    )
    found = ModelCheckpoint(dirpath=tmp_path)._find_last_checkpoints(trainer)
    assert found == {str(tmp_path / ("last.ckpt" if later == "file" else "epoch=1.ckpt"))}
