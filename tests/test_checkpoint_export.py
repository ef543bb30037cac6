"""A checkpoint's folder goes wherever a file goes: to one Lightning file, to safetensors, to Lightning's loaders."""

import functools
import inspect
import json
import os
import subprocess
import sys
import warnings
import zipfile
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy
import pytest
import torch
import transformers
from lightning.pytorch.core import saving
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import buckets
import jobs
import warm
from lightning_zero import CheckpointError, consolidate, export_safetensors, interop, verify
from lightning_zero.checkpoint import Folder, Saver
from lightning_zero.checkpoint.dcp import export_dcp
from lightning_zero.checkpoint.export import INDEX
from lightning_zero.wire.local import LocalComm
from ranks import RankPool

DDP = "ddp_find_unused_parameters_true"
MB = 10**6


class Twins(NamedTuple):
    """The same training, saved by two strategies."""

    folder: Path
    ddp: Path


@pytest.fixture(scope="module")
def twins(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    place = tmp_path_factory.mktemp("twins")
    twins = Twins(place / "sharded", place / "ddp.ckpt")
    two_ranks.run(jobs.save_at, twins.folder, {"stage": 2}, 2)
    two_ranks.run(jobs.save_at, twins.ddp, DDP, 2)
    return twins


def save(folder: Path, state_dict: dict[str, Any], **rest: Any) -> Path:
    """A checkpoint by one rank."""
    Saver(LocalComm().board, warn=lambda _: None).save({"state_dict": state_dict, **rest}, str(folder), {"step": 1})
    return folder


def assert_equal(found: Any, expected: Any, place: str = "") -> None:
    """Bit for bit, whatever the containers."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), place
        for key in expected:
            assert_equal(found[key], expected[key], f"{place}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_equal(*pair, f"{place}/{number}")
    elif isinstance(expected, Tensor):
        assert (found.dtype, found.shape, found.device) == (expected.dtype, expected.shape, expected.device), place
        assert torch.equal(found, expected), place
    else:
        assert found == expected, place


def run_script(folder: Path, *lines: str, is_warm: bool = False) -> str:
    """What a fresh process prints that runs `lines` in `folder`; no process group, no strategy, no test's module."""
    (folder / "script.py").write_text("\n".join(("import json, sys, torch", *lines)))
    with warm.starts() if is_warm else nullcontext():
        command = [sys.executable, "script.py"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- one Lightning file


@pytest.mark.parametrize("how", [{"weights_only": True}, {"weights_only": False}, {"weights_only": True, "mmap": True}])
def test_r03_a_consolidated_file_holds_what_ddps_own_holds(how: dict[str, Any], twins: Twins, tmp_path: Path) -> None:
    out = tmp_path / "one.ckpt"
    assert consolidate(twins.folder, out) == []
    found = torch.load(out, **how)
    expected = torch.load(twins.ddp, weights_only=True)
    assert {"state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters", "loops"} <= expected.keys()
    assert found.keys() - expected.keys() == {"lightning_zero"}
    assert_equal({key: found[key] for key in expected}, expected)


def test_r03_a_consolidated_file_is_read_where_lightning_zero_is_not(twins: Twins, tmp_path: Path) -> None:
    consolidate(twins.folder, tmp_path / "one.ckpt")
    told = run_script(
        tmp_path,
        "sys.modules['lightning_zero'] = None",
        "saved = torch.load('one.ckpt', weights_only=True)",
        "print(len(saved['state_dict']), saved['optimizer_states'][0]['param_groups'][0]['weight_decay'])",
    )
    assert told.split() == [str(len(torch.load(twins.ddp, weights_only=True)["state_dict"])), "0.1"]


def test_r03_a_consolidated_file_is_a_zip_file_that_other_tools_believe(twins: Twins, tmp_path: Path) -> None:
    """Checksums are right, which torch does not look at; values lie where they can be mapped."""
    out = tmp_path / "one.ckpt"
    consolidate(twins.folder, out)
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    records = torch._C.PyTorchFileReader(str(out))
    assert {records.get_record_offset(name) % 64 for name in records.get_all_records()} == {0}


@pytest.mark.parametrize("strategy", ["auto", DDP, {"stage": 3}], ids=["auto", "ddp", "zero"])
@pytest.mark.parametrize("form", ["folder", "zero://folder", "file"])
def test_r03_any_strategy_goes_on_with_the_same_losses(
    form: str, strategy: Any, twins: Twins, tmp_path: Path, pool_of: Callable[[int], RankPool]
) -> None:
    source: Any = {"folder": twins.folder, "zero://folder": f"zero://{twins.folder}"}.get(form, tmp_path / "one.ckpt")
    if form == "file":
        consolidate(twins.folder, source)
    devices = 1 if strategy == "auto" else 2
    found = pool_of(devices).run(jobs.resume_from, source, strategy, devices)
    expected = pool_of(devices).once(jobs.resume_from, twins.ddp, "auto" if strategy == "auto" else DDP, devices)
    assert len(expected[0]["losses"]) == jobs.SAMPLES // 4 // devices
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert_equal(mine["weights"], theirs["weights"])


def test_tied_tensors_share_their_storage_in_a_consolidated_file(twins: Twins, tmp_path: Path) -> None:
    consolidate(twins.folder, tmp_path / "one.ckpt")
    for how in ({}, {"mmap": True}):
        state = torch.load(tmp_path / "one.ckpt", weights_only=True, **how)["state_dict"]
        assert state["again.weight"].data_ptr() == state["net.3.0.weight"].data_ptr()
        assert state["again.bias"].data_ptr() != state["net.3.0.bias"].data_ptr()


KINDS = {
    "bool": torch.tensor([True, False]),
    "int64": torch.tensor([2**40 + 1]),
    "bf16": torch.arange(300).bfloat16(),
    "fp8": torch.arange(5.0).to(torch.float8_e4m3fn),
    "uint16": torch.tensor([1, 65535]).to(torch.uint16),
    "complex": torch.tensor([1 + 2j]),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 3),
    "cube": torch.arange(24).view(2, 3, 4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_becomes_what_torch_save_makes_of_it(kind: str, tmp_path: Path) -> None:
    consolidate(save(tmp_path / "folder", {"value": KINDS[kind]}), tmp_path / "one.ckpt")
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]["value"]
    expected = KINDS[kind]
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert torch.equal(bytes_of(found), bytes_of(expected))


def bytes_of(tensor: Tensor) -> Tensor:
    """Not every dtype can be compared."""
    return tensor.reshape(-1).view(torch.uint8)


class Tokenizer:
    """An object of the user's own, with values of its own and one that the model has, too."""

    def __init__(self, shared: Tensor) -> None:
        self.table = torch.arange(5.0)
        self.shared = shared


@pytest.mark.parametrize(
    "container",
    [
        lambda values: Namespace(values=values),
        lambda values: deque([values]),
        lambda values: {values},
        lambda values: OrderedDict(values=values),
        lambda values: {3: (values, [values])},
    ],
    ids=["namespace", "deque", "set", "ordered", "nested"],
)
def test_values_arrive_whatever_container_they_are_in(container: Callable[[Tensor], Any], tmp_path: Path) -> None:
    values = torch.arange(1.0, 4.0)
    consolidate(save(tmp_path / "folder", {}, extra=container(values)), tmp_path / "one.ckpt")
    extra = torch.load(tmp_path / "one.ckpt", weights_only=False)["extra"]
    plain = vars(extra) if isinstance(extra, Namespace) else extra
    found = next(iter(plain.values() if isinstance(plain, dict) else plain))
    assert torch.equal(found[0] if isinstance(found, tuple) else found, values)


def test_arrays_of_numpy_are_arrays_in_a_consolidated_file(tmp_path: Path) -> None:
    consolidate(save(tmp_path / "folder", {}, table=numpy.arange(4, dtype="int16")), tmp_path / "one.ckpt")
    found = torch.load(tmp_path / "one.ckpt", weights_only=False)["table"]
    assert (found.dtype, found.tolist()) == (numpy.dtype("int16"), [0, 1, 2, 3])


def test_pickled_objects_are_left_out_and_named_or_included_with_their_values(tmp_path: Path) -> None:
    shared = torch.ones(3)
    folder = save(tmp_path / "folder", {"shared": shared}, tokenizer=Tokenizer(shared))
    assert consolidate(folder, tmp_path / "without.ckpt") == [f"{__name__}.Tokenizer"]
    assert "tokenizer" not in torch.load(tmp_path / "without.ckpt", weights_only=True)
    assert consolidate(folder, tmp_path / "with.ckpt", objects=True) == []
    tokenizer = torch.load(tmp_path / "with.ckpt", weights_only=False)["tokenizer"]
    assert_equal([tokenizer.table, tokenizer.shared], [torch.arange(5.0), shared])


def test_a_file_takes_the_place_of_one_that_was_there(tmp_path: Path) -> None:
    out = tmp_path / "not there yet" / "one.ckpt"
    for value in (1.0, 2.0):
        consolidate(save(tmp_path / "folder", {"value": torch.tensor(value)}), out)
        assert torch.load(out, weights_only=True)["state_dict"]["value"].item() == value
        assert [path.name for path in out.parent.iterdir()] == ["one.ckpt"]


def damage(folder: Path) -> None:
    """Alters the last byte of the last shard."""
    shard = sorted(folder.glob("*.safetensors"))[-1]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)


@pytest.mark.parametrize("write", [consolidate, export_safetensors])
@pytest.mark.parametrize("was_there", [True, False])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_left_of_the_try(
    was_there: bool, write: Callable[..., Any], tmp_path: Path
) -> None:
    folder = save(tmp_path / "folder", {"first": torch.ones(8), "last": torch.ones(3, dtype=torch.int8)})
    out = tmp_path / "out" / ("one.ckpt" if write is consolidate else "")
    if was_there:
        write(folder, out)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").rglob("*")}
    damage(folder)
    with pytest.raises(CheckpointError, match="is damaged"):
        write(folder, out)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").rglob("*")} == before


def test_a_folder_is_no_place_for_a_file_nor_a_file_for_a_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "folder", {"value": torch.ones(2)})
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match=r"there is no file; name the file to write, such as .*/model.ckpt"):
        consolidate(folder, tmp_path / "there")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is a file; name the folder"):
        export_safetensors(folder, tmp_path / "file")


def test_nothing_is_written_into_a_checkpoint(tmp_path: Path) -> None:
    """The next save to it would refuse to touch a file that it does not know."""
    folder = save(tmp_path / "folder", {"value": torch.ones(2)})
    names = sorted(path.name for path in folder.iterdir())
    for write, out in (
        (consolidate, folder),
        (consolidate, folder / "one.ckpt"),
        (export_safetensors, folder),
        (export_safetensors, folder / "model"),
        (consolidate, folder / "deep" / "one.ckpt"),
        (export_safetensors, folder / "deep" / "er" / "model"),
        (export_dcp, folder / "dcp"),
    ):
        with pytest.raises(CheckpointError, match=f"{folder} is a checkpoint, and nothing else may be written there"):
            write(folder, out)
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_manifest_of_some_other_program_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    consolidate(save(tmp_path / "folder", {"value": torch.ones(2)}), tmp_path / "one.ckpt")
    assert (tmp_path / "one.ckpt").exists()


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=r"pipe is no file; name the file to write"):
        consolidate(save(tmp_path / "folder", {"value": torch.ones(2)}), tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_no_two_exports_are_read_as_one_model(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one ends in the middle of arriving, after a file of it is there."""
    monkeypatch.setenv("BUCKETS", str(tmp_path / "bucket"))
    (tmp_path / "bucket").mkdir()
    out = tmp_path / "out" if kind == "disk" else "bucket://run/out"
    folders = [
        save(tmp_path / f"{value}", {name: torch.full((9,), float(value)) for name in "abc"}) for value in (1, 2)
    ]
    export_safetensors(folders[0], out, shard_bytes=36)
    arrived = []

    def second_fails(arrive: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            arrived.append(args)
            if len(arrived) == 2:
                raise OSError(28, "No space left on device")
            return arrive(*args, **kwargs)

        return wrapped

    owner, name = (Path, "replace") if kind == "disk" else (buckets.BucketFileSystem, "put_file")
    monkeypatch.setattr(owner, name, second_fails(getattr(owner, name)))
    with pytest.raises(CheckpointError, match="No space left on device"):
        export_safetensors(folders[1], out, shard_bytes=36)
    assert INDEX not in Folder(out).names()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MB in tensors of 64 MB, and many small ones."""
    state = {f"large.{number}": torch.full((16 * MB,), float(number)) for number in range(3)}
    state |= {f"small.{number}": torch.full((MB // 4,), float(number)) for number in range(16)}
    return save(tmp_path_factory.mktemp("large") / "folder", state)


@pytest.mark.parametrize("write", ["consolidate", "export_safetensors"])
def test_r46_consolidate_and_export_take_a_chunk_of_memory_and_not_the_checkpoint(
    write: str, large: Path, tmp_path: Path
) -> None:
    small = save(tmp_path / "small", {"weight": torch.ones(1)})
    script = (
        "from lightning_zero import consolidate, export_safetensors",
        "def peak():",
        "    lines = open('/proc/self/status').read().splitlines()",
        "    return 1024 * int(next(line for line in lines if line.startswith('VmHWM')).split()[1])",
        f"{write}('{small}', 'first')",  # code of libraries counts as well, where it is used first
        "before = peak()",
        f"{write}('{large}', 'out')",
        "print(peak() - before)",
    )
    taken = int(run_script(tmp_path, *script, is_warm=True))
    written = tmp_path / "out"
    size = sum(path.stat().st_size for path in written.iterdir()) if written.is_dir() else written.stat().st_size
    assert size > 200 * MB
    assert taken <= 64 * MB  # the promise has the largest tensor beside


# -- safetensors


def test_safetensors_hold_the_modules_state_dict_name_by_name(twins: Twins, tmp_path: Path) -> None:
    assert export_safetensors(twins.folder, tmp_path / "out") == ["model.safetensors"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = torch.load(twins.ddp, weights_only=True)["state_dict"]
    assert found.keys() == expected.keys()
    assert {"again.weight", "net.3.0.weight"} <= found.keys()  # tied, and both are there
    assert found["net.1.num_batches_tracked"].dtype == torch.int64
    assert_equal({name: found[name] for name in expected}, expected)
    model = jobs.Classifier()
    model.load_state_dict(found)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_safetensors_of_every_dtype_come_back_by_the_library(tmp_path: Path) -> None:
    state = {name: value for name, value in KINDS.items() if name != "complex"}
    export_safetensors(save(tmp_path / "folder", state), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(bytes_of(found[name]), bytes_of(value))


def test_a_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path / "folder", {"plain": torch.ones(2), "phase": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match=r"no torch.complex128, which 'phase'"):
        export_safetensors(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_hold_what_they_are_told_to_and_the_index_knows_where(tmp_path: Path) -> None:
    sizes = {"a": 10, "b": 60, "c": 30, "d": 250, "e": 10, "f": 60}  # of 4 bytes
    state = {name: torch.full((size,), float(size)) for name, size in sizes.items()}
    names = export_safetensors(save(tmp_path / "folder", state), tmp_path / "out", shard_bytes=400)
    assert names == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*names, INDEX]
    held = [sorted(load_file(tmp_path / "out" / name)) for name in names]
    assert held == [["a", "b", "c"], ["d"], ["e", "f"]]  # up to 400 bytes; what is larger has a file to itself
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 4 * sum(sizes.values())}
    assert index["weight_map"] == {key: name for name, keys in zip(names, held, strict=True) for key in keys}


def test_the_index_comes_when_all_that_it_names_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = []
    replace = Path.replace

    def note(path: Path, target: Any) -> Path:
        arrived.append(Path(target).name)
        return replace(path, target)

    folder = save(tmp_path / "folder", {"a": torch.ones(9), "b": torch.ones(9)})
    monkeypatch.setattr(Path, "replace", note)
    names = export_safetensors(folder, tmp_path / "out", shard_bytes=36)
    assert arrived[-1] == INDEX
    assert sorted(arrived[:-1]) == names


def test_an_earlier_export_gives_way_and_other_files_stay(tmp_path: Path) -> None:
    """transformers reads `model.safetensors` before it looks for an index: an old one would win."""
    out = tmp_path / "out"
    folder = save(tmp_path / "folder", {"a": torch.ones(9), "b": torch.ones(9)})
    out.mkdir()
    for name in (others := {"config.json", "my-model.safetensors", "model.safetensors.md"}):
        (out / name).touch()
    for shard_bytes, expected in ((99, 1), (36, 3), (99, 1)):
        export_safetensors(folder, out, shard_bytes=shard_bytes)
        names = {path.name for path in out.iterdir()}
        assert others < names
        assert len(names) == expected + len(others)


def tiny(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=31, n_positions=12)
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=24, vocab_size=31
    )
    return transformers.BertForMaskedLM(config).eval()


@pytest.mark.parametrize("shard_bytes", [10**9, 9000])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_r03_transformers_reads_a_model_that_was_held_as_self_model(
    kind: str, shard_bytes: int, tmp_path: Path
) -> None:
    model = tiny(kind)
    held = nn.ModuleDict({"model": model, "head": nn.Linear(2, 2)})
    folder = save(tmp_path / "folder", dict(held.state_dict()))
    names = export_safetensors(folder, tmp_path / "out", prefix="model.", shard_bytes=shard_bytes)
    assert (len(names) > 1) == (shard_bytes == 9000)
    model.config.save_pretrained(tmp_path / "out")
    again, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_equal(dict(again.state_dict()), dict(model.state_dict()))
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    tokens = torch.arange(12)[None]
    assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)


def test_of_a_name_only_its_beginning_is_left_out(tmp_path: Path) -> None:
    folder = save(tmp_path / "folder", {"model.model.a": torch.ones(2), "model.b": torch.ones(2)})
    export_safetensors(folder, tmp_path / "out", prefix="model.")
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["b", "model.a"]


def test_a_prefix_that_nothing_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor whose name begins with 'module'"):
        export_safetensors(save(tmp_path / "folder", {"model.a": torch.ones(2)}), tmp_path / "out", prefix="module")


def test_r49_file_systems_of_other_kinds_take_both_formats(twins: Twins) -> None:
    memory = fsspec.filesystem("memory")
    consolidate(twins.folder, "memory://made/one.ckpt")
    names = export_safetensors(twins.folder, "memory://made/model", shard_bytes=2000)
    expected = torch.load(twins.ddp, weights_only=True)["state_dict"]
    with memory.open("memory://made/one.ckpt") as file:
        assert_equal(dict(torch.load(file, weights_only=True)["state_dict"]), dict(expected))
    assert sorted(memory.ls("/made/model", detail=False)) == [f"/made/model/{name}" for name in (*names, INDEX)]
    assert sorted(memory.ls("/made", detail=False)) == ["/made/model", "/made/one.ckpt"]
    memory.rm("/made", recursive=True)


# -- Lightning's own loaders


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module's file alone: it imports Lightning and torch."""
    place = tmp_path_factory.mktemp("app")
    lines = [
        "from typing import Any",
        "import lightning as L",
        "import torch",
        "from lightning.pytorch.utilities import grad_norm",
        "from torch import Tensor, nn",
        f"FEATURES, CLASSES = {jobs.FEATURES}, {jobs.CLASSES}",
        inspect.getsource(jobs.Classifier),
    ]
    (place / "app.py").write_text("\n".join(lines))
    return place


@pytest.mark.parametrize(
    ("imported", "scheme"), [("import lightning_zero", ""), ("", "zero://")], ids=["imported", "zero://"]
)
def test_r03_load_from_checkpoint_reads_a_folder_in_a_plain_process(
    imported: str, scheme: str, app: Path, twins: Twins, tmp_path: Path
) -> None:
    out = tmp_path / "state.pt"
    told = run_script(
        app,
        imported,
        "from app import Classifier",
        "assert ('lightning_zero' in sys.modules) == " + str(bool(imported)),
        f"model = Classifier.load_from_checkpoint('{scheme}{twins.folder}', tied=True)",
        "assert not torch.distributed.is_initialized()",
        f"torch.save(model.state_dict(), '{out}')",
        "print(json.dumps({**model.hparams, 'tied': model.again.weight is model.net[3][0].weight}))",
        is_warm=bool(imported),
    )
    assert json.loads(told) == {"lr": 1e-2, "tied": True}
    expected = torch.load(twins.ddp, weights_only=True)["state_dict"]
    assert_equal(dict(torch.load(out, weights_only=True)), dict(expected))


@pytest.mark.parametrize("scheme", ["", "zero://"])
def test_r03_load_from_checkpoint_puts_values_where_it_is_told(scheme: str, twins: Twins) -> None:
    """ "meta" is a device that every machine has, and that is not the default."""
    path = f"{scheme}{twins.folder}"
    assert {value.device.type for value in saving.pl_load(path, map_location="meta")["state_dict"].values()} == {"meta"}
    plain, moved = (saving.pl_load(path, map_location=where)["state_dict"] for where in (None, "cpu"))
    assert vars(moved) == vars(plain) != {}  # the versions of modules, by which some read what older ones have saved
    for where in ("cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, location: storage):
        model = jobs.Classifier.load_from_checkpoint(path, map_location=where)
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("scheme", ["", "zero://"])
def test_r03_a_path_beside_the_checkpoint_names_the_right_one(scheme: str, twins: Twins, tmp_path: Path) -> None:
    shard = next(twins.folder.glob("*.safetensors"))
    for inner in (twins.folder / "manifest.json", shard):
        with pytest.raises(CheckpointError, match=rf"it is a file of the checkpoint {twins.folder}; pass that folder"):
            jobs.Classifier.load_from_checkpoint(f"{scheme}{inner}")
    with pytest.raises(CheckpointError, match=f"a folder of checkpoints; pass one of them: {twins.folder.name}"):
        jobs.Classifier.load_from_checkpoint(f"{scheme}{twins.folder.parent}")
    with pytest.raises(CheckpointError, match="the folder is empty"):
        jobs.Classifier.load_from_checkpoint(f"{scheme}{tmp_path}")
    with pytest.raises((CheckpointError, FileNotFoundError), match=r"no such folder|No such file"):
        jobs.Classifier.load_from_checkpoint(f"{scheme}{tmp_path}/nowhere")


@pytest.mark.parametrize("beside", ["parent", "inner file"])
def test_r03_trainers_ckpt_path_beside_the_checkpoint_names_the_right_one(
    beside: str, twins: Twins, two_ranks: RankPool
) -> None:
    path = twins.folder.parent if beside == "parent" else twins.folder / "manifest.json"
    _, errors = two_ranks.outcomes(jobs.resume_from, path, DDP, 2)
    told = "pass one of them: sharded" if beside == "parent" else f"it is a file of the checkpoint {twins.folder};"
    assert all(error is not None and told in error for error in errors)


def test_r03_a_damaged_folder_is_not_loaded(twins: Twins, tmp_path: Path) -> None:
    folder = save(tmp_path / "folder", {"value": torch.ones(4)}, hyper_parameters={})
    damage(folder)
    assert len(verify(folder)) == 1
    for scheme in ("", "zero://"):
        with pytest.raises(CheckpointError, match="is damaged"):
            jobs.Classifier.load_from_checkpoint(f"{scheme}{folder}", strict=False)


def test_what_load_from_checkpoint_left_out_is_named_and_read_on_opt_in(twins: Twins, tmp_path: Path) -> None:
    state = torch.load(twins.ddp, weights_only=True)["state_dict"]
    settings = {"lr": 0.5, "tied": True, "tokenizer": Tokenizer(torch.ones(1))}
    folder = save(tmp_path / "folder", dict(state), hyper_parameters=settings, **{"pytorch-lightning_version": "2.6.6"})
    with pytest.warns(UserWarning, match=r"not read \(.*Tokenizer\)\. If you trust it, pass weights_only=False"):
        model = jobs.Classifier.load_from_checkpoint(folder)
    assert (model.hparams.lr, "tokenizer" in model.hparams) == (0.5, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        jobs.Classifier.load_from_checkpoint(folder, weights_only=False)


def test_lightnings_functions_are_wrapped_once_whoever_has_wrapped_them_too() -> None:
    def plain() -> int:
        return 1

    def one_more(function: Callable[[], int]) -> int:
        return function() + 1

    @functools.wraps(plain)
    def theirs() -> int:
        return plain() + 1

    ours = interop.wrapped_once(theirs, one_more)
    assert ours() == 3
    assert interop.wrapped_once(ours, one_more) is ours

    @functools.wraps(ours)
    def theirs_again() -> int:
        return ours() + 1

    assert interop.wrapped_once(theirs_again, one_more) is theirs_again
