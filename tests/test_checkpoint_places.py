"""Checkpoints on every kind of file system (R49), with everything that `ModelCheckpoint` asks for."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.http import HTTPFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.trainer.states import TrainerFn

import buckets  # registers bucket://
import checkpoint_jobs as jobs
from lightning_zero.checkpoint import CheckpointError, Folder, Saver, StoredCheckpoint, find_newest, verify
from lightning_zero.checkpoint.export import consolidate
from lightning_zero.pl import interop
from lightning_zero.pl.checkpointing import _call_it_the_last
from lightning_zero.wire.local import LocalComm
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


def last_for(function: TrainerFn, folder: Path) -> set[str]:
    """What ``ckpt_path="last"`` may mean."""
    strategy, state = SimpleNamespace(broadcast=lambda value: value), SimpleNamespace(fn=function)
    trainer: Any = SimpleNamespace(loggers=[], default_root_dir=folder, strategy=strategy, state=state)
    return ModelCheckpoint(dirpath=folder)._find_last_checkpoints(trainer)


SETTINGS = {"monitor": "improving", "save_top_k": 2, "save_last": True, "every_n_train_steps": 2}


def checkpoints_in(url: str) -> list[str]:
    return [name for name in Folder(url).names() if Folder(url).joinpath(name).is_checkpoint]


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
    straight = pool.once(jobs.fit, {"stage": 2}, world, 3)
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
    assert len(Folder("bucket://run/a.ckpt").names()) == 6  # two shards, their checksums, the text, the manifest
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
    found = last_for(TrainerFn.FITTING, tmp_path)
    assert found == {str(tmp_path / ("last.ckpt" if later == "file" else "epoch=1.ckpt"))}


# -- what another process does in a bucket, while this one remembers what it has listed


@contextmanager
def another_process() -> Iterator[None]:
    remembered = dict(buckets.BucketFileSystem.listed)
    yield
    buckets.BucketFileSystem.listed.clear()
    buckets.BucketFileSystem.listed.update(remembered)


def save(url: str, value: float) -> None:
    Saver(LocalComm().board).save({"state_dict": {"w": torch.full((3,), float(value))}}, url, {"step": int(value)})


def value_at(url: str) -> float:
    with closing(StoredCheckpoint(url)) as found:
        return float(found.load()["state_dict"]["w"].mean())


def test_r49_a_checkpoint_that_another_process_has_completed_is_found(bucket: Path) -> None:
    save("bucket://run/a.ckpt", 1)
    with another_process():
        save("bucket://run/b.ckpt", 2)
    manifest = next(path for path in bucket.iterdir() if path.name.endswith("b.ckpt|manifest.json"))
    manifest.rename(manifest.with_suffix(".part"))
    assert str(find_newest("bucket://run").newest) == "bucket://run/a.ckpt"  # and lists the one that is not complete
    manifest.with_suffix(".part").rename(manifest)
    assert str(find_newest("bucket://run").newest) == "bucket://run/b.ckpt"


def test_r49_what_another_process_has_saved_over_is_read_as_it_is_now(bucket: Path) -> None:
    save("bucket://run/a.ckpt", 1)
    assert Folder("bucket://run").names() == ["a.ckpt"]
    assert value_at("bucket://run/a.ckpt") == 1
    with another_process():
        save("bucket://run/a.ckpt", 2)
    assert value_at("bucket://run/a.ckpt") == 2
    assert verify("bucket://run/a.ckpt") == []


@pytest.mark.parametrize("saves", [1, 2])
def test_r49_a_last_step_that_was_done_though_it_failed_counts(
    saves: int, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(saves - 1):
        save("bucket://run/a.ckpt", version)

    def fail(store: Any, path: str, value: bytes, **_: Any) -> None:
        with another_process():  # no listing is forgotten
            store._file(path).write_bytes(value)
        raise OSError("time-out")

    monkeypatch.setattr(buckets.BucketFileSystem, "pipe_file", fail)
    save("bucket://run/a.ckpt", 7)
    assert value_at("bucket://run/a.ckpt") == 7
    assert verify("bucket://run/a.ckpt") == []


def test_r49_a_first_save_that_fails_at_the_last_step_leaves_a_free_place(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("time-out")

    with monkeypatch.context() as patch:
        patch.setattr(buckets.BucketFileSystem, "pipe_file", fail)
        with pytest.raises(CheckpointError, match="time-out"):
            save("bucket://run/a.ckpt", 1)
    assert Folder("bucket://run/a.ckpt").names() == []
    save("bucket://run/a.ckpt", 2)
    assert value_at("bucket://run/a.ckpt") == 2


# -- what is removed from a bucket, and what not


@pytest.mark.parametrize("name", ["lr=*", "lr=?", "lr=[1]", "lr=1"])
def test_r49_nothing_but_the_checkpoint_itself_is_removed(name: str, bucket: Path) -> None:
    for number in (1, 2):
        save(f"bucket://runs/lr={number}/e.ckpt", number)
    others = [file.name for file in bucket.iterdir() if not file.name.startswith(f"runs|{name}|")]
    save(f"bucket://runs/{name}/e.ckpt", 3)
    Folder(f"bucket://runs/{name}/e.ckpt").remove()
    assert sorted(file.name for file in bucket.iterdir()) == sorted(others)


@pytest.mark.parametrize(("url", "removed"), [("bucket://run/a.ckpt", ["run/a.ckpt"]), ("bucket://run", [])])
def test_r49_a_checkpoint_goes_with_its_folder_and_never_with_the_bucket(
    url: str, removed: list[str], bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[str] = []
    monkeypatch.setattr(buckets.BucketFileSystem, "rmdir", lambda store, path: gone.append(path))
    save(url, 1)
    Folder(url).remove()
    assert Folder(url).names() == []
    assert gone == removed


def test_r49_a_file_that_cannot_be_removed_keeps_no_other_one(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("bucket://run/a.ckpt", 1)
    names = Folder("bucket://run/a.ckpt").names()
    kept = next(name for name in names if name.endswith(".crc32"))
    remove = buckets.BucketFileSystem.rm_file

    def refuse(store: Any, path: str) -> None:
        if path.endswith(kept):
            raise PermissionError("403 Forbidden")
        remove(store, path)

    with monkeypatch.context() as patch:
        patch.setattr(buckets.BucketFileSystem, "rm_file", refuse)
        Folder("bucket://run/a.ckpt").remove()
    assert Folder("bucket://run/a.ckpt").names() == [kept]
    save("bucket://run/a.ckpt", 2)
    assert value_at("bucket://run/a.ckpt") == 2


def test_r49_single_files_in_a_bucket_come_and_go_and_the_last_is_found(bucket: Path, two_ranks: RankPool) -> None:
    strategy = {"stage": 2, "checkpoint": {"format": "full"}}
    two_ranks.run(in_bucket, jobs.fit_keeping, bucket, strategy, 2, "bucket://run/kept", **SETTINGS)
    assert Folder("bucket://run/kept").names() == ["epoch=1-step=10.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"]
    again = two_ranks.run(in_bucket, jobs.resume_from_last, bucket, strategy, 2, "bucket://run/kept")
    assert [len(run["losses"]) for run in again] == [jobs.STEPS] * 2


def test_r35_a_save_takes_the_place_of_what_a_killed_one_left_in_a_bucket(bucket: Path, two_ranks: RankPool) -> None:
    settings = {"every_n_train_steps": 5, "save_top_k": -1}
    url = "bucket://run/kept"
    two_ranks.run(in_bucket, jobs.fit_keeping, bucket, {"stage": 2}, 2, url, **settings)
    fsspec.filesystem("bucket").rm_file(f"{url}/epoch=1-step=10.ckpt/manifest.json")
    left = Folder(f"{url}/epoch=1-step=10.ckpt").names()
    two_ranks.run(in_bucket, jobs.fit_keeping, bucket, {"stage": 2}, 2, url, resume="last", **settings)
    assert Folder(url).names() == ["epoch=0-step=5.ckpt", "epoch=1-step=10.ckpt"]
    assert set(left) & set(Folder(f"{url}/epoch=1-step=10.ckpt").names()) == {"README.txt"}
    assert verify(f"{url}/epoch=1-step=10.ckpt") == []


# -- behind a web server


class Ranges(SimpleHTTPRequestHandler):
    """Serves parts of files, as servers of files do; Python's own sends whole ones."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        raw, asked = path.read_bytes(), self.headers.get("Range")
        first, last = (int(end) for end in asked.removeprefix("bytes=").split("-")) if asked else (0, len(raw) - 1)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(raw)}")
        self.send_header("Content-Length", str(len(raw[first : last + 1])))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        self.wfile.write(raw[first : last + 1])

    def log_message(self, *_: Any) -> None:
        pass


def test_a_folder_behind_http_is_read_as_one(tmp_path: Path) -> None:
    save(str(tmp_path / "a.ckpt"), 3)
    torch.save({"state_dict": {"w": torch.ones(3)}}, tmp_path / "b.ckpt")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert value_at(f"{url}/a.ckpt") == 3
        assert saving.pl_load(f"{url}/a.ckpt")["state_dict"]["w"].tolist() == [3, 3, 3]
        assert interop._folder_of_checkpoint(f"{url}/b.ckpt") is None  # Lightning's own business
        server.shutdown()


def test_a_web_server_that_does_not_answer_in_time_is_left_to_lightnings_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait(*_: Any, **__: Any) -> bool:
        raise FSTimeoutError

    monkeypatch.setattr(HTTPFileSystem, "isfile", wait)
    assert interop._folder_of_checkpoint("http://127.0.0.1/a.ckpt") is None


# -- on a disk


def test_the_last_is_what_is_called_so_and_for_a_fit_the_newest_if_that_is_another(tmp_path: Path) -> None:
    save(str(tmp_path / "a.ckpt"), 1)
    a, b, last = ({str(tmp_path / f"{name}.ckpt")} for name in ("a", "b", "last"))
    evaluations = (TrainerFn.VALIDATING, TrainerFn.TESTING)

    assert last_for(TrainerFn.VALIDATING, tmp_path) == set()  # as under any other strategy
    assert last_for(TrainerFn.FITTING, tmp_path) == a
    (tmp_path / "last.ckpt").mkdir()  # of a save that was killed
    assert last_for(TrainerFn.VALIDATING, tmp_path) == set()
    (tmp_path / "last.ckpt").rmdir()
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    assert all(last_for(function, tmp_path) == last for function in (*evaluations, TrainerFn.FITTING))
    save(str(tmp_path / "b.ckpt"), 2)
    assert all(last_for(function, tmp_path) == last for function in evaluations)
    assert last_for(TrainerFn.FITTING, tmp_path) == b


def test_two_colons_in_a_path_are_two_colons(tmp_path: Path) -> None:
    for number, name in enumerate(("a::b.ckpt", "a::c.ckpt")):
        save(str(tmp_path / name), number)
    assert sorted(os.listdir(tmp_path)) == ["a::b.ckpt", "a::c.ckpt"]
    assert value_at(str(tmp_path / "a::b.ckpt")) == 0


def test_a_link_may_move_while_what_it_showed_is_read(tmp_path: Path) -> None:
    for number in (1, 2):
        save(str(tmp_path / f"{number}.ckpt"), number)
    (tmp_path / "last.ckpt").symlink_to("1.ckpt")
    with closing(StoredCheckpoint(tmp_path / "last.ckpt")) as found:
        (tmp_path / "last.ckpt").unlink()
        (tmp_path / "last.ckpt").symlink_to("2.ckpt")
        assert float(found.load()["state_dict"]["w"].mean()) == 1


def test_a_checkpoint_that_was_saved_over_while_it_is_read_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    save(path, 1)
    with closing(StoredCheckpoint(path)) as found:
        save(path, 2)
        with pytest.raises(CheckpointError, match="Another checkpoint was saved to its place in between"):
            found.load()


@pytest.mark.parametrize(
    ("save_last", "pattern", "link", "is_named"),
    [
        (True, "last", "last.ckpt", True),
        ("link", "last", "last-v1.ckpt", True),
        (True, "newest-{epoch}", "newest-epoch=3.ckpt", True),
        (True, "newest-{epoch}", "last.ckpt", False),
        (None, "last", "last.ckpt", False),
    ],
)
def test_a_link_is_the_last_checkpoint_of_who_calls_its_last_so(
    save_last: Any, pattern: str, link: str, is_named: bool, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=save_last, save_top_k=-1)
    saver.CHECKPOINT_NAME_LAST = pattern
    state = {"dirpath": str(tmp_path), "last_model_path": "before"}
    _call_it_the_last({"callbacks": {saver.state_key: state, "another": {}}}, link, [saver, ModelCheckpoint("other")])
    assert state["last_model_path"] == (str(tmp_path / link) if is_named else "before")
