"""A checkpoint in one file: there at once or never, verified before it is read, and known to the command line."""

import itertools
import os
import random
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from safetensors.torch import load_file

import checkpoint_jobs
import crash_jobs
from compare import assert_same_bits
from lightning_zero import cli, consolidate
from lightning_zero.checkpoint import CheckpointError, CheckpointKeeper, Folder, verify
from lightning_zero.checkpoint.folder import hidden_beside
from lightning_zero.checkpoint.resume import KEY
from lightning_zero.checkpoint.single import names_entry, problems_in, read_plain, write_at_once
from lightning_zero.pl.single_file import CheckpointFormat, refuse_place
from lightning_zero.wire.local import LocalComm
from ranks import RankPool

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


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = crash_jobs.noted(monkeypatch)
    path = save(tmp_path / "a.ckpt")
    written, *then = [(did, place) for did, place in done if place.parent in (tmp_path, tmp_path.parent)]
    assert written == ("synced", hidden_beside(path, "writing"))
    assert then == [("moved", path), ("synced", tmp_path)]
    done.clear()
    consolidate(path, tmp_path / "copy.ckpt")
    assert [did for did, place in done if place.parent == tmp_path] == ["synced", "moved"]


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


# -- which runs write one


SMALL = "Checkpoints are single files: the states of model and optimizers take "
ALIKE = "ddp_find_unused_parameters_true"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_small_model_is_saved_as_the_file_that_ddp_writes(stage: int, two_ranks: RankPool, tmp_path: Path) -> None:
    found = two_ranks.run(checkpoint_jobs.fit_and_tell, {"stage": stage, "checkpoint": None}, tmp_path / "zero")
    two_ranks.run(checkpoint_jobs.fit_keeping, ALIKE, 2, tmp_path / "ddp", every_n_train_steps=5, save_top_k=-1)
    (told,) = found[0]["said"]
    assert re.fullmatch(rf"{SMALL}[\d.]+ kB, and up to 1 GB goes into one file. For shards write .*", told)
    assert found[1]["said"] == []
    assert found[0]["are files"] == {"epoch=0-step=5.ckpt": True, "epoch=1-step=10.ckpt": True}
    for name in found[0]["are files"]:
        mine, theirs = (torch.load(tmp_path / kind / name, weights_only=True) for kind in ("zero", "ddp"))
        assert mine.pop(KEY)["random"].keys() == {0, 1}
        assert list(mine) == list(theirs)
        assert_same_bits(mine["state_dict"], theirs["state_dict"])
        for index, state in theirs["optimizer_states"][0]["state"].items():
            assert_same_bits(mine["optimizer_states"][0]["state"][index], state)


def test_a_larger_model_is_saved_in_shards_and_so_is_a_run_that_goes_on_from_some(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    chooses, folder = {"stage": 2, "checkpoint": None}, tmp_path / "kept"
    first = two_ranks.run(checkpoint_jobs.fit_and_tell, chooses, folder, 1000, uploads=True)[0]
    (told,) = first["said"]
    assert "Checkpoints are folders of shards: " in told
    assert "and more than 1 kB is sharded. For single files write checkpoint='full'." in told
    assert len(first["warned"]) == 1
    assert set(first["are files"].values()) == {False}
    again = two_ranks.run(checkpoint_jobs.fit_and_tell, chooses, folder, epochs=3, resume="last")[0]
    assert again["said"] == [
        "Checkpoints are folders of shards: the run goes on from one. For single files write checkpoint='full'."
    ]
    assert set(again["are files"].values()) == {False}
    assert again["warned"] == []
    anew = two_ranks.run(checkpoint_jobs.fit_and_tell, chooses, tmp_path / "anew")[0]
    assert set(anew["are files"].values()) == {True}


def test_a_file_of_any_name_is_the_last_that_a_fit_goes_on_from(two_ranks: RankPool, tmp_path: Path) -> None:
    chooses, kept, how = {"stage": 3, "checkpoint": None}, tmp_path / "kept", {"dropout": 0.3}
    straight = two_ranks.run(checkpoint_jobs.fit_and_tell, chooses, tmp_path / "straight", epochs=3, **how)
    two_ranks.run(checkpoint_jobs.fit_and_tell, chooses, kept, **how)
    torch.save(CONTENT, kept / "foreign.ckpt")  # newer, and another program's
    again = two_ranks.run(checkpoint_jobs.fit_and_tell, chooses, kept, epochs=3, resume="last", seed=7, **how)
    for mine, theirs in zip(again, straight, strict=True):
        assert mine["losses"] == theirs["losses"][2 * checkpoint_jobs.STEPS :]


def test_each_fit_says_once_what_it_saves_and_files_take_the_place_of_shards(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    said, said_on_rank_1 = two_ranks.run(checkpoint_jobs.save_twice_and_fit_again, tmp_path)
    assert said == ["Checkpoints are single files"] * 2
    assert said_on_rank_1 == []
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert verify(tmp_path / "a.ckpt") == []
    assert torch.load(tmp_path / "a.ckpt")["epoch"] == 3  # of the last fit


def test_a_single_file_is_not_written_in_the_place_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a folder .*Remove it"):
        refuse_place(tmp_path, replaces_shards=False)


def test_a_single_file_is_not_written_inside_of_a_checkpoint(tmp_path: Path) -> None:
    """Said before any rank writes: they would wait for rank 0."""
    keeper = CheckpointKeeper(LocalComm(), in_background=False, warn=print)
    keeper.save(crash_jobs.tree_of(1, 0, 1), str(tmp_path / "shards"), 1, {})
    with pytest.raises(CheckpointError, match="shards"):
        refuse_place(tmp_path / "shards" / "a.ckpt", replaces_shards=True)


def test_a_fit_that_begins_anew_does_not_go_on_from_shards_as_the_one_before_it() -> None:
    chosen = CheckpointFormat(None)
    chosen.goes_on_from_shards = True
    assert "the run goes on from one" in chosen.choose(1)
    chosen.begin_fit(TorchCheckpointIO())
    assert chosen.policy is None
    assert "Checkpoints are single files" in chosen.choose(1)


def test_a_single_file_takes_the_place_of_no_folder_of_something_else(tmp_path: Path) -> None:
    """Of shards alone, where each run chooses: what is replaced is deleted."""
    (tmp_path / "cat.jpeg").touch()
    with pytest.raises(CheckpointError, match=r"is a folder that is not a checkpoint \(it holds cat\.jpeg\)"):
        refuse_place(tmp_path, replaces_shards=True)
