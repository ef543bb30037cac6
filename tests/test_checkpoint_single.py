"""A checkpoint in one file: there at once or never, verified before it is read, and known to the command line."""

import itertools
import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import crash_jobs
from lightning_zero import cli, consolidate
from lightning_zero.checkpoint import CheckpointError, CheckpointKeeper, Folder, verify
from lightning_zero.checkpoint.resume import KEY
from lightning_zero.checkpoint.single import names_entry, problems_in, read_plain, write_at_once
from lightning_zero.wire.local import LocalComm

CONTENT = {
    "state_dict": {"w": torch.arange(600.0).view(20, 30), "b": torch.ones(3, dtype=torch.bfloat16)},
    "global_step": 7,
    "epoch": 1,
}


def save(path: Path, **others: Any) -> Path:
    write_at_once(Folder(path), lambda place: torch.save(CONTENT | others, place))
    return path


def value_at(path: Any) -> float:
    return float(torch.load(path)["state_dict"]["w"][1, 1])


# -- at once or never


def test_a_file_takes_the_place_of_a_file_of_a_link_and_of_shards(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(LocalComm(), in_background=False, warn=print)
    keeper.save(crash_jobs.tree_of(1, 0, 1), str(tmp_path / "shards"), 1, {})
    (tmp_path / "linked").mkdir()
    (tmp_path / "link").symlink_to("linked")
    (tmp_path / "file").write_bytes(b"old")
    for name in ("shards", "link", "file", "new/folder/file"):
        assert value_at(save(tmp_path / name)) == 31
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "linked", "new", "shards"]


def test_a_write_that_fails_leaves_what_was_there_and_is_told_by_its_name(tmp_path: Path) -> None:
    def fail(place: str) -> None:
        Path(place).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    for path in (save(tmp_path / "old"), tmp_path / "new"):
        with pytest.raises(CheckpointError, match=f"cannot write {path}: No space left on device"):
            write_at_once(Folder(path), fail)
    assert os.listdir(tmp_path) == ["old"]
    assert value_at(tmp_path / "old") == 31


def test_a_process_that_is_killed_while_it_writes_leaves_what_was_there(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt")

    def half(place: str) -> None:
        Path(place).write_bytes(path.read_bytes()[:1000])
        os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        write_at_once(Folder(path), half)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert verify(path) == []
    assert value_at(path) == 31
    save(path)
    assert os.listdir(tmp_path) == ["a.ckpt"], "the next save removes what was left"


def test_a_file_takes_the_place_of_shards_on_an_object_store() -> None:
    place = Folder("memory://single/a.ckpt")
    keeper = CheckpointKeeper(LocalComm(), in_background=False, warn=print)
    keeper.save(crash_jobs.tree_of(1, 0, 1), str(place), 1, {})
    write_at_once(place, lambda url: place.fs.pipe_file(Folder(url).path, b"whole"))
    assert place.is_file
    assert place.fs.cat_file(place.path) == b"whole"
    place.fs.rm("/single", recursive=True)


# -- verified


def test_no_flipped_bit_is_read_in_silence(tmp_path: Path) -> None:
    """torch does not look at the checksums in its own files."""
    whole, draw = save(tmp_path / "whole.ckpt").read_bytes(), random.Random(0)
    silent, told = 0, 0
    for _ in range(200):
        raw, at = bytearray(whole), draw.randrange(len(whole))
        raw[at] ^= 1 << draw.randrange(8)
        path = tmp_path / "flipped.ckpt"
        path.write_bytes(raw)
        if verify(path):
            told += 1
            continue
        with suppress(Exception):  # torch says so
            found = torch.load(path)["state_dict"]  # no checksum covers padding, and some fields of the archive
            silent += not all(torch.equal(found[name], value) for name, value in CONTENT["state_dict"].items())
    assert silent == 0
    assert told > 100


def test_what_is_wrong_is_told_record_by_record_and_shared_by_ranks(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt")
    raw = bytearray(path.read_bytes())
    for tensor in CONTENT["state_dict"].values():
        raw[raw.index(tensor.view(-1).view(torch.uint8).numpy().tobytes()) + 3] ^= 1
    path.write_bytes(raw)
    problems = problems_in(Folder(path))
    assert len(problems) == 2
    assert all(f"{path} is damaged: Bad CRC-32 for file" in problem for problem in problems)
    parts = [problems_in(Folder(path), part, 3) for part in range(3)]
    assert sorted(itertools.chain(*parts)) == sorted(problems)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_plain(Folder(path))
    with pytest.raises(CheckpointError, match="is damaged"):
        CheckpointKeeper(LocalComm(), in_background=False, warn=print).open(str(path), lazy=(), objects=False)


def test_a_file_without_checksums_is_read_as_it_is(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = save(tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert problems_in(Folder(path)) == []
    assert read_plain(Folder(path))["global_step"] == 7


def test_files_of_this_package_are_known_without_unpickling_them(tmp_path: Path) -> None:
    assert names_entry(Folder(save(tmp_path / "ours", **{KEY: {"step": 7}})))
    assert not names_entry(Folder(save(tmp_path / "another")))
    (tmp_path / "text").write_text(KEY)
    assert not names_entry(Folder(tmp_path / "text"))


# -- the command line, and other readers


def run(*arguments: Any) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_the_command_line_takes_a_single_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "a.ckpt")
    assert run("inspect", path) == 0
    told = capsys.readouterr().out
    assert "step 7, epoch 1, " in told
    assert "in one file, as Lightning writes it: torch.load reads it" in told
    assert [line.split() for line in told.splitlines()[-2:]] == [
        ["w", "float32", "20x30", "2.4", "kB"],
        ["b", "bfloat16", "3", "6", "B"],
    ]
    assert run("inspect", path, "--json") == 0
    assert '"shape": [' in capsys.readouterr().out
    assert run("verify", path) == 0
    assert capsys.readouterr().out == f"{path}: complete, every checksum matches\n"
    assert run("consolidate", path, tmp_path / "copy.ckpt") == 0
    assert (tmp_path / "copy.ckpt").read_bytes() == path.read_bytes()
    assert run("consolidate", path, tmp_path / "hf", "--safetensors") == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in CONTENT["state_dict"].items())
    capsys.readouterr()
    assert run("export", path, tmp_path / "dcp") == 1
    assert "it is a file, and a sharded checkpoint is a folder" in capsys.readouterr().err


def test_the_command_line_says_what_is_wrong_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("a text")
    torch.save([1, 2], tmp_path / "list")
    torch.save({"state_dict": {}, "hyper_parameters": Path("an object")}, tmp_path / "objects")
    for command, name, told in (
        ("verify", "text", "is not a checkpoint: it is a file, and not one that torch.save writes"),
        ("inspect", "list", "is not a Lightning checkpoint: it has no 'state_dict'"),
        ("inspect", "objects", "cannot be read without unpickling objects"),
    ):
        assert run(command, tmp_path / name) == 1
        said = capsys.readouterr()
        assert told in said.out + said.err
    raw = bytearray(save(tmp_path / "a.ckpt").read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / "a.ckpt").write_bytes(raw)
    with pytest.raises(CheckpointError, match="is damaged"):
        consolidate(tmp_path / "a.ckpt", tmp_path / "copy.ckpt")
    assert not (tmp_path / "copy.ckpt").exists()
