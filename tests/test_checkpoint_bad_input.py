"""What is no checkpoint, or not of this model, or cannot be written: one error, the same on all ranks, in seconds."""

import io
import json
import os
import pickle
import re
import shutil
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import nn

import jobs
from jobs import Classifier, loader, state_of
from lightning_zero import Checkpoint, ZeroStrategy, consolidate
from lightning_zero.checkpoint import StoredCheckpoint, verify
from lightning_zero.checkpoint.save import _advice_for
from lightning_zero.run import construction
from ranks import AT_ONCE, HANGS, PATIENCE, RankPool, run_alone

SHARDED: dict[str, Any] = {"stage": 3, "wait_timeout": PATIENCE}
FULL: dict[str, Any] = {**SHARDED, "checkpoint": {"format": "full"}}
FORMATS = pytest.mark.parametrize("strategy", [SHARDED, FULL], ids=["sharded", "full"])
QUICK: dict[str, Any] = {"limit_train_batches": 2}


# -- what ranks do


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def fitted(strategy: Any, model: str = "Classifier", **kwargs: Any) -> L.Trainer:
    L.seed_everything(1, verbose=False)
    run = jobs.trainer(strategy, 2, **QUICK, **kwargs)
    run.fit(MODELS[model](), loader())
    return run


class Saves(L.Callback):
    """Saves in the middle of training, so that every rank writes what it owns.

    Args:
        path: to which.
        ranks: those that do.
    """

    def __init__(self, path: Any, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.path = path
        self.ranks = ranks

    def on_train_batch_end(self, run: L.Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.global_rank in self.ranks and batch_idx == 1:
            run.save_checkpoint(self.path)


def save(strategy: Any, path: Any, model: str = "Classifier") -> None:
    fitted(strategy, model, callbacks=[Saves(path)])


def errors_of_saving(strategy: Any, paths: list[Any], *, unprivileged: bool = False) -> list[tuple[str | None, float]]:
    """Of one save to each path: its error and its seconds."""
    run = fitted(strategy)
    found = []
    for path in paths:
        started = time.monotonic()
        with nobody(unprivileged):
            error = error_of(run.save_checkpoint, path)
        found.append((error, time.monotonic() - started))
    return found


class nobody:
    """Inside, a process of root has no more rights than others, whose files' permissions mean nothing to it."""

    def __init__(self, really: bool) -> None:
        self._really = really and os.geteuid() == 0

    def __enter__(self) -> None:
        if self._really:
            os.seteuid(65534)

    def __exit__(self, *_: Any) -> None:
        if self._really:
            os.seteuid(0)


def errors_of_resuming(strategy: Any, paths: list[Any], model: str = "Classifier", **kwargs: Any) -> list[Any]:
    """Of one fit from each path: its error and its seconds."""
    found = []
    for path in paths:
        run = jobs.trainer(strategy, 2, **QUICK, max_epochs=2)
        started = time.monotonic()
        error = error_of(run.fit, MODELS[model](), loader(), ckpt_path=path, **kwargs)
        found.append((error, time.monotonic() - started))
    return found


class GoesBack(L.Callback):
    """Loads a checkpoint in the midst of training, as Lightning's finders of a learning rate and a batch size do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
        run.strategy.load_model_state_dict(run.strategy.load_checkpoint(self.path))


def error_of_going_back(strategy: Any, path: Path) -> list[Any]:
    started = time.monotonic()
    return [(error_of(fitted, strategy, callbacks=[GoesBack(path)]), time.monotonic() - started)]


class Other(Classifier):
    """Has another width, another name and one layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.Linear(jobs.FEATURES, 23)
        self.net[1] = nn.BatchNorm1d(23)
        self.net[3] = nn.Sequential(nn.Linear(23, 19), nn.LayerNorm(19))
        self.again = nn.Linear(19, 19)
        self.renamed = self.unused
        del self.unused
        self.more = nn.ModuleList([nn.Linear(3, 3)])


class Lenient(Other):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False


class TwoOptimizers(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.SGD([self.temperature], lr=0.1)]


class OtherGroups(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.1)


class Tokenizer:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.words = ["a", "b"]


class HasTokenizer(Classifier):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tokenizer"] = Tokenizer()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tokenizer = checkpoint.get("tokenizer")


class BuiltInShards(Classifier):
    """Cut while it is built, and so is what it loads."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.save_hyperparameters({"lr": 1e-2})
        self.losses, self.norms = [], []

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        with patch.object(construction, "LEAST_BYTES", 600):
            made = Classifier()
        for name, child in made.named_children():
            self.add_module(name, child)
        self.temperature = made.temperature


MODELS: dict[str, type[Classifier]] = {
    model.__name__: model
    for model in (Classifier, Other, Lenient, TwoOptimizers, OtherGroups, HasTokenizer, BuiltInShards)
}


# -- what is in their way


@pytest.fixture(scope="module")
def saved(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one sharded checkpoint, `a.ckpt`, and one full one, `full.ckpt`."""
    folder = tmp_path_factory.mktemp("saved")
    two_ranks.run(save, SHARDED, folder / "a.ckpt")
    two_ranks.run(save, FULL, folder / "full.ckpt")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "saved"))


def the_same(told: list[list[tuple[str | None, float]]]) -> list[str]:
    """What all ranks say alike, each time within seconds."""
    for of_rank in told:
        for _, seconds in of_rank:
            assert seconds < AT_ONCE  # nobody has waited for another rank
        assert [error for error, _ in of_rank] == [error for error, _ in told[0]]
    return [error or "" for error, _ in told[0]]


def test_what_is_no_place_for_a_checkpoint_is_named_on_all_ranks(folder: Path, two_ranks: RankPool) -> None:
    (folder / "photos").mkdir()
    (folder / "photos" / "cat.jpeg").touch()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    paths = {
        folder / "full.ckpt": f"{folder}/full.ckpt is a file, and a sharded checkpoint is a folder. Remove it,",
        folder / "photos": f"{folder}/photos is a folder that is not a checkpoint (it holds cat.jpeg).",
        folder: f"{folder} is a folder that is not a checkpoint (it holds a.ckpt, full.ckpt, photos).",
        folder / "full.ckpt" / "below": f"cannot write to {folder}/full.ckpt: ",
        folder / "a.ckpt" / "manifest.json": f"{folder}/a.ckpt/manifest.json is a file, and a sharded",
        folder / "a.ckpt/best/b.ckpt": f"{folder}/a.ckpt is a checkpoint, and nothing else may be written there.",
        "/proc/nowhere/a.ckpt": "cannot write to /proc/nowhere: ",
    }
    told = the_same(two_ranks.run(errors_of_saving, SHARDED, list(paths)))
    for error, expected in zip(told, paths.values(), strict=True):
        assert error.startswith(f"CheckpointError: {expected}")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_single_file_does_not_take_the_place_of_a_folder(folder: Path, two_ranks: RankPool) -> None:
    paths = [folder / "a.ckpt", folder / "a.ckpt" / "b.ckpt"]
    told, inside = the_same(two_ranks.run(errors_of_saving, FULL, paths))
    assert told.startswith("CheckpointError: rank 0: ")
    assert f"{folder}/a.ckpt is a folder" in told
    assert f"{folder}/a.ckpt is a checkpoint, and nothing else may be written there." in inside
    assert verify(folder / "a.ckpt") == []
    assert not [name for name in os.listdir(folder / "a.ckpt") if name.startswith("tmp")]


@pytest.mark.parametrize(
    "strategy",
    [
        SHARDED,
        FULL,
    ],
    ids=["sharded", "full"],
)
def test_without_permission_to_write_all_ranks_say_so(strategy: Any, two_ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "writable").mkdir(mode=0o777)
        (folder / "writable").chmod(0o777)
        (folder / "mine").mkdir(mode=0o555)
        paths = [folder / "writable" / "a.ckpt", folder / "mine" / "a.ckpt"]
        told = the_same(two_ranks.run(errors_of_saving, strategy, paths, unprivileged=True))
        assert told[0] == ""
        assert told[1].startswith("CheckpointError: ")
        assert "Permission denied" in told[1]
        assert str(folder / "mine") in told[1]
        assert os.listdir(folder / "mine") == []
        (folder / "mine").chmod(0o755)


# -- what is no checkpoint to go on from


def test_what_is_no_checkpoint_to_go_on_from_is_named_on_all_ranks(folder: Path, two_ranks: RankPool) -> None:
    (folder / "empty").mkdir()
    (folder / "runs").mkdir()
    (folder / "runs" / "notes.txt").write_text("notes")
    torch.save({"weights": torch.zeros(2)}, folder / "weights.ckpt")
    (folder / "empty.ckpt").touch()
    (folder / "short.ckpt").write_bytes((folder / "full.ckpt").read_bytes()[:-1000])
    (folder / "nowhere.ckpt").symlink_to("gone.ckpt")
    shard = next((folder / "a.ckpt").glob("*.safetensors"))
    lightnings = "is not a Lightning checkpoint: "
    paths = {
        folder: f"{folder} is not a checkpoint: it is a folder of checkpoints; pass one of them: a.ckpt.",
        folder / "empty": "is not a checkpoint: the folder is empty.",
        folder / "runs": "is not a checkpoint: it has no manifest.json: a save that was not finished, or another kind",
        folder / "missing.ckpt": f"{folder}/missing.ckpt",
        folder / "nowhere.ckpt": f"{folder}/nowhere.ckpt",
        folder / "a.ckpt" / "manifest.json": f"it is a file of the checkpoint {folder}/a.ckpt; pass that folder.",
        shard: f"it is a file of the checkpoint {folder}/a.ckpt; pass that folder.",
        folder / "weights.ckpt": f"{lightnings}it has no 'state_dict'. Pass what Trainer.save_checkpoint wrote.",
        folder / "empty.ckpt": lightnings,
        folder / "short.ckpt": lightnings,
    }
    told = the_same(two_ranks.run(errors_of_resuming, SHARDED, list(paths)))
    for error, (path, expected) in zip(told, paths.items(), strict=True):
        kind = "CheckpointError" if path.exists() else "CheckpointNotFoundError"
        assert error.startswith(f"{kind}: "), path
        assert expected in error, path
        assert str(path) in error, path


def test_a_file_of_anything_is_no_checkpoint_to_go_on_from(two_ranks: RankPool, tmp_path: Path) -> None:
    contents = [b"these are words", b"\x80\x02]q\x00.", b"\x80\x05\x95", b"PK\x03\x04 no zip file", bytes(range(256))]
    contents += [pickle.dumps([1, 2]), b'{"state_dict": 1}', b"cos\nsystem\n.", b"(lp0\nI1\na.", b"\xff" * 100]
    paths = [tmp_path / f"{number}.ckpt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    told = the_same(two_ranks.run(errors_of_resuming, SHARDED, paths))
    for path, error in zip(paths, told, strict=True):
        assert re.match(rf"CheckpointError: ckpt_path='{path}' .*is not a Lightning checkpoint: ", error)


def resealed(manifest: Path, **changes: Any) -> None:
    """Writes a manifest with other entries, and a checksum that is right."""
    plain = {**json.loads(manifest.read_text()), **changes}
    plain.pop("crc32")
    body = json.dumps(plain, separators=(",", ":"))[:-1].encode()
    manifest.write_bytes(body + b',"crc32":"%08x"}\n' % zlib.crc32(body))


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def shard_of(rank: int, path: Path) -> Path:
    return next(path.glob(f"shard-{rank:05}-*.safetensors"))


def place_of(name: str, rank: int, path: Path) -> int:
    """The first byte, in a rank's shard, of what that rank wrote of a tensor."""
    pieces = StoredCheckpoint(path).manifest.tensors[name].pieces
    return next(piece.offset for piece in pieces if piece.file == rank and piece.nbytes)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "manifest cut": (
        lambda path: os.truncate(path / "manifest.json", 300),
        "manifest.json is damaged (its checksum does not match, or its end is missing)",
    ),
    "manifest flipped": (lambda path: flip(path / "manifest.json", 200), "manifest.json is damaged"),
    "manifest zeroed": (
        lambda path: (path / "manifest.json").write_bytes(b"\0" * 5000),
        "manifest.json is damaged",
    ),
    "future": (
        lambda path: resealed(path / "manifest.json", version=2),
        "has format version 2, and this lightning_zero reads version 1. Install the version",
    ),
    "shard missing": (lambda path: shard_of(1, path).unlink(), "is missing. 1 of 2 shards are there."),
    "shard cut": (lambda path: os.truncate(shard_of(1, path), 500), "has 500 bytes and should have"),
    "shard of another": (
        lambda path: shutil.copy(shard_of(0, path), shard_of(1, path)),
        r"shard-00001\S* (has \d+ bytes and should have|is damaged)",
    ),
    "first weight flipped": (
        lambda path: flip(shard_of(0, path), place_of("model:net.0.weight", 0, path)),
        r"shard-00000\S* is damaged: the checksum of 'model:net.0.weight' does not match at byte \d+",
    ),
    "last weight flipped": (
        lambda path: flip(shard_of(1, path), place_of("model:again.bias", 1, path)),
        r"shard-00001\S* is damaged: the checksum of 'model:again.bias' does not match at byte \d+",
    ),
    "buffer flipped": (
        lambda path: flip(shard_of(0, path), place_of("state_dict/net.1.running_mean", 0, path)),
        r"shard-00000\S* is damaged: the checksum of 'state_dict/net.1.running_mean'",
    ),
    "header flipped": (lambda path: flip(shard_of(1, path), 40), r"shard-00001\S* is damaged: the checksum of its"),
    "checksums flipped": (
        lambda path: flip(shard_of(1, path).with_suffix(".crc32"), 5),
        r"shard-00001\S*crc32 is damaged: its own checksum does not match",
    ),
    "checksums missing": (
        lambda path: shard_of(0, path).with_suffix(".crc32").unlink(),
        r"shard-00000\S*crc32 is missing",
    ),
    "optimizer flipped": (lambda path: flip(shard_of(1, path), shard_of(1, path).stat().st_size - 1), "is damaged"),
}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_damaged_checkpoint_is_refused_on_all_ranks_whichever_reads_the_damage(
    stage: int, saved: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    paths = []
    for name, (damage, _) in DAMAGES.items():
        paths.append(Path(shutil.copytree(saved / "a.ckpt", tmp_path / name.replace(" ", "_"))))
        damage(paths[-1])
    told = the_same(two_ranks.run(errors_of_resuming, {**SHARDED, "stage": stage}, paths))
    for error, path, (name, (_, expected)) in zip(told, paths, DAMAGES.items(), strict=True):
        assert re.search(re.escape(expected) if "(" in expected and "\\" not in expected else expected, error), name
        assert str(path) in error, name


def test_damage_that_nobody_reads_is_found_where_training_goes_back_too(
    saved: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(saved / "a.ckpt", tmp_path / "damaged.ckpt"))
    DAMAGES["header flipped"][0](path)
    (told,) = the_same(two_ranks.run(error_of_going_back, SHARDED, path))
    assert re.search(DAMAGES["header flipped"][1], told)


def test_a_damaged_checkpoint_is_refused_on_all_ranks_by_a_model_that_is_built_in_shards(
    saved: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    paths = []
    for name in ("first weight flipped", "last weight flipped"):
        paths.append(Path(shutil.copytree(saved / "a.ckpt", tmp_path / name.replace(" ", "_"))))
        DAMAGES[name][0](paths[-1])
    told = the_same(two_ranks.run(errors_of_resuming, SHARDED, paths, model="BuiltInShards"))
    for error, name in zip(told, ("first weight flipped", "last weight flipped"), strict=True):
        assert re.search(DAMAGES[name][1], error), error


# -- a checkpoint of another model


def test_r47_a_checkpoint_of_another_model_names_every_key_in_one_error_on_all_ranks(
    saved: Path, two_ranks: RankPool
) -> None:
    for file in ("a.ckpt", "full.ckpt"):
        (told,) = the_same(two_ranks.run(errors_of_resuming, SHARDED, [saved / file], "Other"))
        for expected in (
            'Missing key(s) in state_dict: "renamed.weight", "renamed.bias", "more.0.weight", "more.0.bias"',
            'Unexpected key(s) in state_dict: "unused.weight", "unused.bias"',
            "size mismatch for net.0.weight: copying a param with shape torch.Size([19, 12]) from checkpoint",
            "size mismatch for net.1.running_mean",
            "size mismatch for net.3.0.weight",
        ):
            assert expected in told


def load_leniently(strategy: Any, path: Any) -> dict[str, Any]:
    """Validates a model of which the checkpoint fits in part; what it was, what it is then, and what was told."""
    L.seed_everything(7, verbose=False)
    model = Lenient()
    before = state_of(model)
    run = jobs.trainer(strategy, 2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run.validate(model, loader(seed=1), ckpt_path=path, verbose=False)
    told = [str(item.message) for item in warned if "strict_loading" in str(item.message)]
    return {"before": before, "after": state_of(model), "told": told}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("file", ["a.ckpt", "full.ckpt"])
def test_r47_strict_loading_false_loads_the_rest_and_tells_the_three_lists(
    file: str, stage: int, saved: Path, two_ranks: RankPool
) -> None:
    found = two_ranks.run(load_leniently, {**SHARDED, "stage": stage}, saved / file)
    values = jobs.read_checkpoint(saved / file)["state_dict"]
    missing = ["renamed.weight", "renamed.bias", "more.0.weight", "more.0.bias"]
    reshaped = [f"net.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
    reshaped += ["net.1.running_mean", "net.1.running_var", "net.3.0.weight"]
    (told,) = found[0]["told"]
    assert f"missing in the checkpoint {missing}, unexpected in it ['unused.weight', 'unused.bias']" in told
    assert sorted(re.findall(r"'(net[\w.]*)'", told)) == sorted(reshaped)
    for rank in found:
        for name, value in rank["after"].items():
            expected = rank["before"] if name in missing + reshaped else values
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("TwoOptimizers", "The checkpoint has the state of 1 optimizers; configure_optimizers() returns 2."),
        ("OtherGroups", "has groups of [4, 10] parameters, and there are groups of [10] now"),
    ],
)
def test_the_state_of_other_optimizers_is_refused_on_all_ranks(
    model: str, expected: str, saved: Path, two_ranks: RankPool
) -> None:
    for file in ("a.ckpt", "full.ckpt"):
        (told,) = the_same(two_ranks.run(errors_of_resuming, SHARDED, [saved / file], model))
        assert expected in told


# -- plugins


class Mine(TorchCheckpointIO):
    """A user's own."""

    saved: list[str] = []  # noqa: RUF012
    options: Any = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.saved.append(str(path))
        self.options = storage_options
        super().save_checkpoint(checkpoint, path)


@pytest.mark.parametrize("plugin", [Mine, AsyncCheckpointIO])
def test_a_checkpoint_io_plugin_is_refused_where_folders_were_asked_for(plugin: type[CheckpointIO]) -> None:
    folders = ZeroStrategy(checkpoint="sharded")
    with pytest.raises(ValueError, match=rf"{plugin.__name__} writes single files.*format='full'"):
        L.Trainer(strategy=folders, accelerator="cpu", devices=1, plugins=[plugin()], logger=False)
    with pytest.raises(ValueError, match=rf"{plugin.__name__} writes single files.*format='full'"):
        ZeroStrategy(checkpoint={"format": "sharded"}, checkpoint_io=plugin())
    ZeroStrategy(checkpoint=Checkpoint(format="full"), checkpoint_io=plugin())


def test_checkpoints_are_single_files_beside_a_plugin_that_writes_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run = L.Trainer(strategy=ZeroStrategy(), accelerator="cpu", devices=1, plugins=[Mine()], logger=False)
    assert run.strategy.checkpoint == Checkpoint(format="full")
    assert "Mine writes single files, so checkpoints are single files" in caplog.text
    assert ZeroStrategy(checkpoint_io=Mine()).checkpoint == Checkpoint(format="full")
    assert ZeroStrategy(checkpoint_io=TorchCheckpointIO()).checkpoint is None


def test_storage_options_go_to_the_plugin_that_writes_single_files(tmp_path: Path) -> None:
    mine = Mine()
    run = jobs.trainer({"checkpoint": "full"}, 1, **QUICK, plugins=[mine])
    run.fit(Classifier(), loader())
    run.save_checkpoint(tmp_path / "one.ckpt", storage_options={"endpoint": "mine"})
    assert mine.options == {"endpoint": "mine"}
    assert (tmp_path / "one.ckpt").is_file()
    sharded = jobs.trainer({}, 1, **QUICK)
    sharded.fit(Classifier(), loader())
    single = jobs.trainer({"checkpoint": "full"}, 1, **QUICK)
    single.fit(Classifier(), loader())
    for without in (sharded, single):
        with pytest.raises(TypeError, match="storage_options go to a CheckpointIO plugin"):
            without.save_checkpoint(tmp_path / "two.ckpt", storage_options={"endpoint": "mine"})


def test_a_logger_that_would_upload_nothing_is_named() -> None:
    logger = type("WandbLogger", (), {"_log_model": "all"})()
    with pytest.warns(UserWarning, match=r"WandbLogger\(log_model='all'\) uploads single files.*checkpoint='full'"):
        ZeroStrategy(checkpoint="sharded")._warn_of_loggers([logger])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ZeroStrategy(checkpoint="full")._warn_of_loggers([logger])
        ZeroStrategy(checkpoint="sharded")._warn_of_loggers([type("TensorBoardLogger", (), {})()])


class Elsewhere(TorchCheckpointIO):
    """A plugin whose paths only it understands."""

    def __init__(self) -> None:
        super().__init__()
        self.removed: list[str] = []

    def _place(self, path: Any) -> Path:
        return Path(str(path).removeprefix("mine://"))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, self._place(path), storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().load_checkpoint(self._place(path), *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.removed.append(str(path))
        super().remove_checkpoint(self._place(path))


def save_and_remove_elsewhere(path: str) -> tuple[list[str], Any]:
    plugin = Elsewhere()
    run = fitted(FULL, plugins=[plugin])
    run.save_checkpoint(path)
    epoch = run.strategy.load_checkpoint(path)["epoch"]
    run.strategy.barrier()
    run.strategy.remove_checkpoint(path)
    return plugin.removed, epoch


def test_a_checkpoint_io_plugin_writes_reads_and_removes_what_only_it_can_find(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    url = f"mine://{tmp_path}/a.ckpt"
    assert two_ranks.run(save_and_remove_elsewhere, url) == [([url], 1), ([], 1)]
    assert list(tmp_path.iterdir()) == []


def save_with_a_plugin(path: Any) -> list[str]:
    Mine.saved = []
    run = fitted(FULL, plugins=[Mine()])
    run.save_checkpoint(path)
    (resumed,) = errors_of_resuming(FULL, [path])
    assert resumed[0] is None
    return Mine.saved


def test_a_checkpoint_io_plugin_writes_single_files(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(save_with_a_plugin, tmp_path / "a.ckpt") == [[str(tmp_path / "a.ckpt")], []]
    assert "state_dict" in torch.load(tmp_path / "a.ckpt", weights_only=True)


# -- on one rank only


def save_alone(strategy: Any, rank: int, path: Any) -> tuple[str | None, float]:
    started = time.monotonic()
    run = jobs.trainer(strategy, 2, callbacks=[Saves(path, (rank,))])
    return error_of(run.fit, Classifier(), loader()), time.monotonic() - started


@FORMATS
@pytest.mark.parametrize("rank", [0, 1])
def test_r09_a_save_on_one_rank_only_ends_on_every_rank_with_the_names_of_the_missing(
    rank: int, strategy: Any, tmp_path: Path
) -> None:
    found, errors = run_alone(2, save_alone, {**strategy, "wait_timeout": 5}, rank, tmp_path / "a.ckpt")
    assert errors == [None, None]
    for error, seconds in found:
        assert f"save_checkpoint must be called on all ranks; missing: [{1 - rank}]" in error
        assert seconds < HANGS / 2  # most of it is the run before
    assert found[rank][0].startswith("CheckpointError: ")
    assert os.listdir(tmp_path) == []


def save_alone_then_together(strategy: Any, path: Any) -> list[str | None]:
    run, alone, told = fitted(strategy), None, Path(f"{path}.told")
    if run.global_rank == 0:
        alone = error_of(run.save_checkpoint, path)
        told.touch()
    while not told.exists():  # rank 0 has given up, and waits no longer for rank 1 than that for it
        time.sleep(0.01)
    return [alone, error_of(save, strategy, path)]


@FORMATS
def test_a_save_on_one_rank_only_does_not_spoil_those_of_the_next_trainer(
    strategy: Any, two_ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    alone, other = two_ranks.run(save_alone_then_together, {**strategy, "wait_timeout": 2}, path)
    assert alone == ["CheckpointError: save_checkpoint must be called on all ranks; missing: [1]", None]
    assert other == [None, None]
    assert two_ranks.run(errors_of_resuming, strategy, [path])[0][0][0] is None


# -- nothing is unpickled


class Unpickled(AssertionError):
    """A class was looked up by a pickle."""


def without_pickles(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function` where no pickle may name a class. torch's own reader of plain values is none of them."""

    def find_class(self: Any, module: str, name: str) -> Any:
        raise Unpickled(f"{module}.{name}")

    class Unpickler(pickle.Unpickler):
        pass

    Unpickler.find_class = find_class  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickle, "Unpickler", Unpickler)
        patch.setattr(pickle, "load", lambda *_, **__: find_class(None, "pickle", "load"))
        patch.setattr(torch.serialization, "_load", refusing(torch.serialization._load))
        return function(*args, **kwargs)


def refusing(load: Any) -> Any:
    def checked(zip_file: Any, map_location: Any, pickle_module: Any, *args: Any, **kwargs: Any) -> Any:
        if pickle_module is not torch._weights_only_unpickler:
            raise Unpickled("torch.load")
        return load(zip_file, map_location, pickle_module, *args, **kwargs)

    return checked


def live_without_pickles(strategy: Any, path: Any) -> dict[str, Any]:
    """Saves, resumes, loads and consolidates."""
    warned = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save(strategy, path, "HasTokenizer")
        model = HasTokenizer()
        resumed = jobs.trainer(strategy, 2, **QUICK, max_epochs=2)
        resumed.fit(model, loader(), ckpt_path=path)
        loaded = HasTokenizer.load_from_checkpoint(path)
        if resumed.is_global_zero:
            consolidate(path, f"{path}.single")
        warned = [str(item.message) for item in caught]
    return {"warned": warned, "tokenizers": [model.tokenizer, loaded.tokenizer], "loaded": state_of(loaded)}


def load_with_objects(strategy: Any, path: Any) -> list[Any]:
    model = HasTokenizer()
    jobs.trainer(strategy, 2, **QUICK, max_epochs=2).fit(model, loader(), ckpt_path=path, weights_only=False)
    loaded = HasTokenizer.load_from_checkpoint(path, weights_only=False)
    return [model.tokenizer.words, loaded.tokenizer.words]


def load_as_the_environment_says(strategy: Any, path: Any, name: str, weights_only: bool | None) -> list[Any]:
    """What a resume and `load_from_checkpoint` find of a pickled object."""
    model = HasTokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, "1")
        run = jobs.trainer(strategy, 2, **QUICK, max_epochs=2)
        run.fit(model, loader(), ckpt_path=path, weights_only=weights_only)
        loaded = HasTokenizer.load_from_checkpoint(path, weights_only=weights_only)
    return [model.tokenizer is not None, loaded.tokenizer is not None]


def test_pickled_objects_are_read_or_left_as_torchs_variables_of_the_environment_say(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    path, never, always = tmp_path / "a.ckpt", "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    two_ranks.run(save, SHARDED, path, "HasTokenizer")
    for name, weights_only, read in ((always, None, True), (always, True, False), (never, False, False)):
        found = two_ranks.run(load_as_the_environment_says, SHARDED, path, name, weights_only)
        assert found == [[read, read]] * 2, (name, weights_only)


def test_r50_nothing_is_unpickled_but_on_request(two_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    found = two_ranks.run(without_pickles, live_without_pickles, SHARDED, path)
    for rank in found:
        assert rank["tokenizers"] == [None, None]
    told = [message for message in found[0]["warned"] if "pickled" in message]
    assert "The checkpoint holds objects that are no plain data: tokenizer (Tokenizer)." in told[0]
    assert "read again only with weights_only=False" in told[0]
    assert len(list(path.glob("objects-*.pt"))) == 1
    assert all("weights_only=False" in message and "Tokenizer" in message for message in told[1:])
    assert len(told) >= 3
    single = torch.load(f"{path}.single", weights_only=True)
    assert "tokenizer" not in single
    for name, value in single["state_dict"].items():
        assert torch.equal(value, found[0]["loaded"][name]), name
    assert two_ranks.run(load_with_objects, SHARDED, path) == [[["a", "b"], ["a", "b"]]] * 2
    # The shards themselves and the manifest are no pickles.
    for shard in path.glob("shard-*"):
        assert not shard.read_bytes().startswith((b"PK", b"\x80"))
    assert json.loads((path / "manifest.json").read_text())["objects"]["classes"] == [
        f"{Tokenizer.__module__}.Tokenizer"
    ]


def test_what_to_do_about_pickled_hyperparameters_is_said_for_modules_of_others_too() -> None:
    told = _advice_for([("hyper_parameters/net", Tokenizer()), ("hyper_parameters/metrics/0", Tokenizer())])
    assert "call model.hparams.pop('net') before fit, and pass net= to load_from_checkpoint" in told
    assert "save_hyperparameters(ignore=['net', 'metrics'])" in told
    assert _advice_for([("tokenizer", Tokenizer())]) == ""


def test_r50_the_test_for_pickles_notices_one(tmp_path: Path) -> None:
    torch.save({"mine": Tokenizer()}, tmp_path / "a.pt")
    with pytest.raises(Unpickled):
        without_pickles(torch.load, tmp_path / "a.pt", weights_only=False)
    with pytest.raises(Unpickled):
        without_pickles(lambda: pickle.Unpickler(io.BytesIO(pickle.dumps(Tokenizer()))).load())
