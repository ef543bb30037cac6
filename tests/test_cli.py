"""The command line: what a person reads, and what a script can go by."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import jobs
import warm
from lightning_zero import __version__ as VERSION
from lightning_zero import cli
from lightning_zero.checkpoint import Saver, StoredCheckpoint
from lightning_zero.checkpoint.shard import ShardReader
from lightning_zero.run.estimate import PRECISIONS
from lightning_zero.wire.local import LocalComm
from ranks import RankPool

SCRIPT = str(Path(sys.executable).with_name("lightning-zero"))
COMMANDS = ["inspect", "verify", "consolidate", "import", "export", "plan", "rehearse"]


class Tokenizer:
    """What has to be pickled."""


@pytest.fixture(scope="module")
def trained(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "epoch=0.ckpt"
    two_ranks.run(jobs.save_at, path, {"stage": 2}, 2)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small"
    tree = {"state_dict": {"model.a": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}, "tokenizer": Tokenizer()}
    Saver(LocalComm().board, warn=lambda _: None).save(tree, str(path), {"step": 5})
    return path


def run(*arguments: Any) -> int:
    return cli.main([str(argument) for argument in arguments])


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Printed so far, with single spaces."""
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]


# -- as a program


@pytest.mark.parametrize("program", [[SCRIPT], [sys.executable, "-m", "lightning_zero"]], ids=["script", "module"])
def test_it_runs_as_a_script_and_as_a_module(program: list[str], trained: Path, tmp_path: Path) -> None:
    done = subprocess.run([*program, "verify", trained, "there"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        f"{trained}: complete, every checksum matches",
        f"{tmp_path / 'there'} is not a checkpoint: there is no such folder.",
    ]


def test_a_reader_who_has_seen_enough_is_no_error(trained: Path) -> None:
    """As in `lightning-zero inspect DIR | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        command = [sys.executable, SCRIPT, "inspect", str(trained)]
        with warm.starts():
            done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("program", [[SCRIPT], [sys.executable, "-m", "lightning_zero"]], ids=["script", "module"])
def test_help_and_version_wait_for_no_torch(program: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    for option, told in (("--help", "usage: lightning-zero [-h] COMMAND"), ("--version", f"lightning-zero {VERSION}")):
        done = subprocess.run([*program, option], capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.stdout.startswith(told)
        imported = re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE)
        assert "lightning_zero.cli" in imported
        assert not {"torch", "lightning", "fsspec", "numpy"} & set(imported)


def test_a_module_of_the_users_finds_every_name_in_the_command_line_too(tmp_path: Path) -> None:
    """What `consolidate --objects` unpickles may import them."""
    found = (
        "import sys; sys.argv = ['lightning-zero']; import lightning_zero; early = 'torch' in sys.modules; "
        "from lightning_zero import *; print(early, lightning_zero.ZeroStrategy is ZeroStrategy, "
        "hasattr(lightning_zero, 'nothing'), {*lightning_zero.__all__} <= {*vars()})"
    )
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "False True False True\n", done.stderr


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    told = capsys.readouterr().out
    listed = re.findall(r"^    lightning-zero (\w+) ", told, re.MULTILINE)
    assert list(dict.fromkeys(listed)) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(command, "--help")
    told = capsys.readouterr().out
    assert told.startswith(f"usage: lightning-zero {command} ")
    assert ("DCP" in told) == (command in ("import", "export"))
    assert ("--safetensors" in told) == (command == "consolidate")


def test_the_commands_are_the_ones_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("convert", "x")
    said = capsys.readouterr().err
    assert "invalid choice: 'convert'" in said
    assert re.findall(r"\w+", said.rpartition("choose from")[2]) == COMMANDS


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["plan", "--parameters", "7e9"], "the following arguments are required: --ranks"),
        (["plan", "--parameters", "7 billion", "--ranks", "8"], "7 billion is not a positive number"),
        (["plan", "--parameters", "B", "--ranks", "8"], "is not a positive number"),
        (["plan", "--parameters", "7e9", "--ranks", "0"], "argument --ranks: 0 is not a whole number of at least 1"),
        (
            ["plan", "--parameters", "7e9", "--ranks", "8", "--replicas", "3"],
            "8 ranks cannot be divided into 3 replicas",
        ),
        (["plan", "--parameters", "7e9", "--ranks", "8", "--averages", "-1"], "-1 is not a whole number of at least 0"),
        (
            ["plan", "--parameters", "7e9", "--ranks", "8", "--replicate-size", "2"],
            "unrecognized arguments: --replicate",
        ),
        (["plan", "--ranks", "8"], "write either MODEL or --parameters"),
        (["plan", "a:b", "--parameters", "7e9", "--ranks", "8"], "write either MODEL or --parameters"),
        (["rehearse", "a:b", "--ranks", "-1"], "argument --ranks: -1 is not a whole number of at least 1"),
        (
            ["rehearse", "a:b", "--ranks", "2", "--accumulate", "0"],
            "--accumulate: 0 is not a whole number of at least 1",
        ),
        (["plan", "--parameters", "7", "--ranks", "8", "--stage", "2", "--offload-parameters", "cpu"], "at stage 3"),
        (["inspect"], "the following arguments are required: DIR"),
        (["import", "a"], "the following arguments are required: DIR"),
        (["inspect", "nosuch://x"], "nosuch://x: Protocol not known: nosuch"),
        (["consolidate", "a", "b", "--prefix", "model."], "--prefix and --shard-gb go with --safetensors"),
        (["consolidate", "a", "b", "--shard-gb", "1"], "--prefix and --shard-gb go with --safetensors"),
        (["consolidate", "a", "b", "--safetensors", "--objects"], "--objects has nothing to do with --safetensors"),
        (["consolidate", "a", "b", "--safetensors", "--shard-gb", "0"], "0 is not a positive number"),
        (["consolidate", "a", "b", "--safetensors", "--shard-gb", "nan"], "nan is not a positive number"),
        (["consolidate", "a", "b", "--safetensors", "--shard-gb", "two"], "two is not a positive number"),
    ],
    ids=" ".join,
)
def test_a_command_line_that_makes_no_sense_is_told_with_its_usage(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)
    said = capsys.readouterr().err
    assert said.startswith("usage: lightning-zero ")
    assert told in said


# -- wrong paths


def wrong_paths(trained: Path, tmp_path: Path) -> dict[str, tuple[Path, str]]:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    (tmp_path / "file.ckpt").touch()
    return {
        "nowhere": (tmp_path / "nowhere", "there is no such folder."),
        "below a file": (tmp_path / "file.ckpt" / "x", "there is no such folder."),
        "empty": (tmp_path / "empty", "the folder is empty."),
        "of something else": (tmp_path / "other", "it has no manifest.json: a save that was not finished, or another"),
        "a file": (tmp_path / "file.ckpt", "it is a file, and "),
        "inside": (trained / "manifest.json", f"it is a file of the checkpoint {trained}; pass that folder."),
        "above": (trained.parent, "it is a folder of checkpoints; pass one of them: epoch=0.ckpt."),
    }


@pytest.mark.parametrize("command", ["inspect", "verify", "consolidate", "consolidate --safetensors", "export"])
def test_a_wrong_path_is_told_without_a_traceback_and_nothing_is_written(
    command: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, told in wrong_paths(trained, tmp_path).values():
        outs = [] if command in ("inspect", "verify") else [tmp_path / "out"]
        assert run(*command.split(), path, *outs) == 1
        captured = capsys.readouterr()
        said = captured.out if command == "verify" else captured.err.removeprefix("error: ")
        assert said.startswith(f"{path} is not a checkpoint: {told}")
        assert (captured.err if command == "verify" else captured.out) == ""
        assert not (tmp_path / "out").exists()


def test_a_wrong_path_of_dcp_is_told_without_a_traceback(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, _ in wrong_paths(trained, tmp_path).values():
        assert run("import", path, tmp_path / "out") == 1
        told = "is not a folder of torch.distributed.checkpoint: it has no .metadata."
        assert capsys.readouterr().err == f"error: {path} {told}\n"
        assert not (tmp_path / "out").exists()


def test_what_the_system_refuses_is_told_without_a_traceback(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for command in (["consolidate"], ["consolidate", "--safetensors"], ["export"]):
        assert run(*command, trained, tmp_path / "file" / "out") == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert str(tmp_path / "file") in said


# -- inspect


def test_inspect_reads_the_manifest_and_no_shard(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a shard was looked at")

    for name in ("read", "_stream", "_table"):
        monkeypatch.setattr(ShardReader, name, refuse)
    assert run("inspect", trained) == 0
    told = lines(capsys)
    assert told[0] == str(trained)
    assert told[1].startswith("step 6, epoch 1, stage 2, world 2, saved 20")
    assert re.fullmatch(r"2 shards, \d+ tensors, [\d.]+ kB", told[2])
    assert "model int64 1 1 8 B" in told
    assert "optimizer 0, exp_avg float32 12 823 3.3 kB" in told
    assert "net.0.weight float32 19x12 912 B" in told
    assert "temperature float32 scalar 4 B" in told
    assert "again.weight float32 19x19 1.4 kB" in told
    assert sum(line.startswith(tuple(jobs.Classifier().state_dict())) for line in told) == 20


def test_inspect_needs_no_shard_of_arrays_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"state_dict": {"w": torch.ones(3)}, "mine": numpy.arange(4)}
    Saver(LocalComm().board).save(tree, str(tmp_path / "a"), {})
    for shard in (tmp_path / "a").glob("shard-*"):
        shard.unlink()
    assert run("inspect", tmp_path / "a") == 0
    assert "w float32 3 12 B" in lines(capsys)


def test_inspect_shows_a_folder_as_the_file_that_zero_makes_of_it(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", f"zero://{trained}") == 0
    told = lines(capsys)
    assert told[1] == "step 6, epoch 1, in one file, as Lightning writes it: torch.load reads it"
    assert "net.0.weight float32 19x12 912 B" in told


def test_inspect_names_what_had_to_be_pickled(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", small) == 0
    told = lines(capsys)
    assert told[2].startswith("1 shard, 2 tensors, ")
    assert told[3] == f"pickled objects, left out unless asked for: {__name__}.Tokenizer"


def test_inspect_tells_programs_the_same(trained: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", trained, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["path"] == str(trained)
    about = {key: told["about"][key] for key in ("step", "epoch", "stage", "world")}
    assert about == {"step": 6, "epoch": 1, "stage": 2, "world": 2}
    assert told["shards"] == sorted(path.name for path in trained.glob("*.safetensors"))
    assert told["bytes"] == sum(path.stat().st_size for path in trained.glob("*.safetensors"))
    exp_avg = {"part": "optimizer 0, exp_avg", "dtype": "float32", "tensors": 12, "elements": 823, "bytes": 3292}
    assert exp_avg in told["parts"]
    assert told["model"]["net.0.weight"] == {"dtype": "float32", "shape": [19, 12], "bytes": 912}
    assert told["model"].keys() == jobs.Classifier().state_dict().keys()
    assert run("inspect", small, "--json") == 0
    assert json.loads(capsys.readouterr().out)["pickled"] == [f"{__name__}.Tokenizer"]


# -- verify


def test_verify_tells_of_each_checkpoint_and_names_each_file_that_is_not_whole(
    trained: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", trained, small) == 0
    assert lines(capsys) == [f"{path}: complete, every checksum matches" for path in (trained, small)]
    shard, pickled = next(small.glob("*.safetensors")), next(small.glob("*.pt"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    pickled.unlink()
    assert run("verify", small, trained) == 1
    told = lines(capsys)
    assert [str(shard) in told[0], pickled.name in told[1]] == [True, True]
    assert "does not match at byte" in told[0]
    assert told[1].endswith("is missing.")
    assert told[2] == f"{trained}: complete, every checksum matches"


# -- consolidate


def test_consolidate_writes_a_lightning_file(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "one.ckpt"
    assert run("consolidate", trained, out) == 0
    assert capsys.readouterr() == (f"wrote {out}\n", "")
    saved = torch.load(out, weights_only=True)
    assert len(saved["optimizer_states"][0]["state"]) == 12


def test_consolidate_says_what_it_left_out_and_how_to_have_it(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "one.ckpt"
    assert run("consolidate", small, out) == 0
    said = capsys.readouterr()
    assert said.out == f"wrote {out}\n"
    assert said.err.startswith(f"left out what had been pickled ({__name__}.Tokenizer); --objects includes")
    assert run("consolidate", small, out, "--objects") == 0
    assert capsys.readouterr() == (f"wrote {out}\n", "")
    assert isinstance(torch.load(out, weights_only=False)["tokenizer"], Tokenizer)


def test_consolidate_writes_safetensors(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "hf"
    assert run("consolidate", small, out, "--safetensors", "--prefix", "model.") == 0
    assert capsys.readouterr() == (f"wrote model.safetensors to {out}\n", "")
    assert list(load_file(out / "model.safetensors")) == ["a"]
    assert run("consolidate", "--safetensors", "--shard-gb", "3.5e-8", small, out) == 0  # GB are not GiB
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert capsys.readouterr().out == f"wrote {', '.join(names)} to {out}\n"
    assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"] == {"total_size": 36}


# -- import and export


def test_export_and_import_say_what_they_wrote(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("export", trained, tmp_path / "dcp") == 0
    assert run("import", tmp_path / "dcp", tmp_path / "back") == 0
    assert capsys.readouterr() == (f"wrote {tmp_path / 'dcp'}\nwrote {tmp_path / 'back'}\n", "")
    assert run("inspect", tmp_path / "back") == 0
    told = lines(capsys)
    assert told[1].startswith(f"step 6, imported_from {tmp_path / 'dcp'}, world 1, saved 20")
    assert "optimizer 0, exp_avg float32 12 823 3.3 kB" in told
    assert len(StoredCheckpoint(tmp_path / "back").load()["state_dict"]) == 20
    assert run("export", trained, tmp_path / "dcp") == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'dcp'} is not empty. Name a new folder.\n"


def test_export_says_what_it_left_out(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", small, tmp_path / "dcp") == 0
    assert f"left out what had been pickled ({__name__}.Tokenizer)" in capsys.readouterr().err
    assert dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata.keys() == {
        "model.model.a",
        "model.b",
    }


def test_what_is_printed_fits_a_stream_that_is_no_terminal(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain ASCII, no colours, nothing wider than the names make it."""
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)
    assert run("inspect", trained) == 0
    assert printed.getvalue().isascii()
    assert max(map(len, printed.getvalue().splitlines()[3:])) < 80


def test_60_columns_are_enough(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        run("--help")
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 60
    assert "    lightning-zero export DIR DCP\n      to one\n" in told
    for offload in ([], ["--offload", "cpu", "--offload-parameters", "nvme"]):
        assert run("plan", "--parameters", "7e11", "--ranks", 8, "--precision", "bf16-mixed", *offload) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
    monkeypatch.setenv("COLUMNS", "40")
    assert run("inspect", trained) == 0
    name = capsys.readouterr().out.split("parameter or buffer\n")[1].splitlines()[1]
    assert name.strip() in StoredCheckpoint(str(trained)).model()


def test_names_that_a_stream_cannot_have_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"state_dict": {"naïve": torch.ones(3)}}
    Saver(LocalComm().board, warn=lambda _: None).save(tree, str(tmp_path / "x"), {"step": 5})
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", printed)
    assert run("inspect", tmp_path / "x") == 0
    printed.seek(0)
    assert "na\\xefve" in printed.read()


def test_an_average_is_a_part_of_a_checkpoint_by_itself() -> None:
    names = ("average:net.0.weight", "model:net.0.weight", "optimizer 0:net.0.weight:exp_avg", "rank 1/cuda")
    assert [cli._part_of(name) for name in names] == ["average", "model", "optimizer 0, exp_avg", "random state"]


# -- plan


def test_plan_sets_the_bytes_of_each_stage_beside_ddps(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--parameters", "7e9", "--ranks", 8, "--precision", "bf16-mixed") == 0
    told = lines(capsys)
    assert told[0] == "7,000,000,000 parameters, 8 ranks, bf16-mixed"
    assert told[1] == "bytes per rank ddp stage 1 stage 2 stage 3"
    assert "model states 112 GB 52.5 GB 28 GB 15.8 GB" in told
    assert "16.0 -> 7.5 -> 4.0 -> 2.2 bytes per parameter" in told


def test_plan_shows_what_offload_moves(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("plan", "--parameters", "3e9", "--ranks", 1, "--stage", 2, "--offload", "cpu", "--precision", "bf16-mixed")
        == 0
    )
    told = lines(capsys)
    assert "model states 48 GB 6 GB" in told
    assert "optimizer state (host) - 24 GB" in told
    assert run("plan", "--parameters", "8e9", "--ranks", 4, "--offload-parameters", "cpu", "--offload", "nvme") == 0
    assert "parameter (host) - - - 8 GB" in lines(capsys)  # at stage 3 alone


def test_plan_divides_by_the_ranks_that_hold_one_copy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--parameters", "1e9", "--ranks", 8, "--stage", 3, "--replicas", 2) == 0
    assert "model states 16 GB 4 GB" in lines(capsys)


def test_plan_counts_running_averages(capsys: pytest.CaptureFixture[str]) -> None:
    """As an engine holds them, says tests/test_estimate.py."""
    assert run("plan", "--parameters", "7e9", "--ranks", 8, "--averages", 1) == 0
    assert "average 28 GB 3.5 GB 3.5 GB 3.5 GB" in lines(capsys)


def test_plan_knows_the_precisions_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("plan", "--precision", "8-bit")
    assert re.findall(r"[\w-]+", capsys.readouterr().err.rpartition("choose from")[2]) == list(PRECISIONS)
