"""Folders of torch.distributed.checkpoint, as FSDP2 and Lightning's strategies write them, and back."""

import copy
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset

import jobs
from compare import assert_same_bits
from lightning_zero import CheckpointError, verify
from lightning_zero.checkpoint import Saver, StoredCheckpoint
from lightning_zero.checkpoint.dcp import META, export_dcp, import_dcp
from lightning_zero.wire.local import LocalComm
from ranks import RankPool

WIDTH, STEPS = 19, 6


class Net(L.LightningModule):
    """Sharded by FSDP2 when `configure_model` is given a mesh, which `ModelParallelStrategy` does."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.inner = nn.Linear(jobs.FEATURES, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, jobs.CLASSES, bias=False)
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.losses: list[float] = []
        self.is_split = False

    def split(self, mesh: Any) -> None:
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def configure_model(self) -> None:
        is_ours = self._trainer is not None and not isinstance(self.trainer.strategy, ModelParallelStrategy)
        mesh = None if is_ours else getattr(self, "_device_mesh", None)  # ours shards by itself
        if mesh is not None and not self.is_split:
            self.split(mesh["data_parallel"])
            self.is_split = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(self.norm(hidden))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.losses.append(loss.item())
        self.count += 1
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5), "interval": "step"}]

    def optimizer(self) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() <= 1], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)


class OwnLoop(Net):
    """No schedule: what is in a folder of torch's own says nothing of one."""

    def configure_optimizers(self) -> Any:
        return self.optimizer()


def data() -> DataLoader:
    """This rank's part, in the same order everywhere; Lightning's own sampler would shuffle it."""
    whole = jobs.loader().dataset
    return DataLoader(Subset(whole, range(int(os.environ["RANK"]), jobs.SAMPLES, 2)), batch_size=4)


def start_fsdp2() -> tuple[OwnLoop, torch.optim.Optimizer]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(4)
    model = OwnLoop()
    model.split(dist.device_mesh.init_device_mesh("cpu", (2,)))
    return model, model.optimizer()


def train(model: OwnLoop, optimizer: torch.optim.Optimizer) -> list[float]:
    model.losses = []
    for index, batch in enumerate(data()):
        optimizer.zero_grad()
        model.training_step(batch, index).backward()
        optimizer.step()
    return model.losses


def train_under_fsdp2(folder: Path, flat: bool = False) -> dict[str, Any]:
    """Trains, saves as PyTorch's own tutorial does, and goes on."""
    model, optimizer = start_fsdp2()
    train(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
    saved = whole(model, optimizer)
    return {"saved": saved, "losses": train(model, optimizer), **whole(model, optimizer)}


def whole(model: OwnLoop, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    return copy.deepcopy({"model": state, "optimizer": get_optimizer_state_dict(model, optimizer, options=options)})


def resume_zero(folder: Path, strategy: Any, **kwargs: Any) -> dict[str, Any]:
    L.seed_everything(9, verbose=False)
    model = OwnLoop()
    run = jobs.trainer(strategy, 2, use_distributed_sampler=False, **kwargs)
    run.fit(model, data(), ckpt_path=folder)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {"losses": model.losses, "model": state, "step": run.global_step}


def load_into_fsdp2(folder: Path) -> dict[str, Any]:
    """What is exported, read by torch alone."""
    model, optimizer = start_fsdp2()
    state = {"model": get_model_state_dict(model), "optimizer_0": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    assert isinstance(state["model"]["head.weight"], DTensor)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer_0"])
    loaded = whole(model, optimizer)
    return {"loaded": loaded, "losses": train(model, optimizer)}


def fit_net(strategy: Any, epochs: int, *, resume: Any = None, save: Any = None) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    model = Net()
    if strategy == "model parallel":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run = jobs.trainer(strategy, 2, max_epochs=epochs, use_distributed_sampler=False)
    run.fit(model, data(), ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return {"losses": model.losses, "lr": run.optimizers[0].param_groups[0]["lr"], "step": run.global_step}


def by_name(state: dict[str, Any], names: list[str]) -> dict[str, Tensor]:
    """An optimizer's tensors, whatever its parameters are called by."""
    return {
        f"{names[key] if isinstance(key, int) else key}.{kind}": torch.as_tensor(value)
        for key, kinds in state["state"].items()
        for kind, value in kinds.items()
    }


# -- import


def test_what_fsdp2_saved_is_imported_bit_for_bit(two_ranks: RankPool, tmp_path: Path) -> None:
    saved = two_ranks.run(train_under_fsdp2, tmp_path / "dcp")[0]["saved"]
    import_dcp(tmp_path / "dcp", tmp_path / "ours")
    assert verify(tmp_path / "ours") == []
    found = StoredCheckpoint(tmp_path / "ours").load()
    assert_same_bits(found["state_dict"], saved["model"])
    (names,) = found["optimizer_parameters"]
    (optimizer,) = found["optimizer_states"]
    assert_same_bits(by_name(optimizer, names), by_name(saved["optimizer"], []))
    for group, expected in zip(optimizer["param_groups"], saved["optimizer"]["param_groups"], strict=True):
        assert [names[number] for number in group["params"]] == expected["params"]
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in expected.items() if k != "params"}
    assert [number for group in optimizer["param_groups"] for number in group["params"]] == list(range(len(names)))


@pytest.mark.parametrize("strategy", [{"stage": 1}, {"stage": 2}, {"stage": 3}, "ddp"], ids=str)
def test_a_fit_goes_on_from_an_import_as_fsdp2_would(strategy: Any, two_ranks: RankPool, tmp_path: Path) -> None:
    expected = two_ranks.run(train_under_fsdp2, tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "ours")
    found = two_ranks.run(resume_zero, tmp_path / "ours", strategy)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
        assert len(mine["losses"]) == mine["step"] == STEPS
        for name, value in theirs["model"].items():
            torch.testing.assert_close(mine["model"][name], value, rtol=0, atol=1e-6, msg=name)


def test_a_fit_goes_on_from_what_model_parallel_strategy_saved(two_ranks: RankPool, tmp_path: Path) -> None:
    """Loops, schedule and hyper-parameters too, which are in its `meta.pt`."""
    two_ranks.run(fit_net, "model parallel", 1, save=tmp_path / "theirs")
    assert (tmp_path / "theirs" / META).is_file()
    expected = two_ranks.run(fit_net, "model parallel", 2, resume=tmp_path / "theirs")
    import_dcp(tmp_path / "theirs", tmp_path / "ours")
    found = two_ranks.run(fit_net, {"stage": 2}, 2, resume=tmp_path / "ours")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
        assert len(mine["losses"]) == STEPS
        assert (mine["step"], mine["lr"]) == (theirs["step"], theirs["lr"]) == (2 * STEPS, 1e-2 * 0.5**3)


def write_dcp(folder: Path, state: dict[str, Any], meta: dict[str, Any] | None = None) -> Path:
    """By one process, as Lightning's `FSDPStrategy` lays it out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    if meta is not None:
        torch.save(meta, folder / META)
    return folder


def optimizer_of(*names: str) -> dict[str, Any]:
    return {
        "state": {name: {"exp_avg": torch.full((2,), float(at))} for at, name in enumerate(names)},
        "param_groups": [{"lr": 0.1, "params": list(names)}],
    }


def test_optimizers_keep_their_order_though_ten_comes_before_two(tmp_path: Path) -> None:
    names = [f"w{number}" for number in range(11)]
    state: dict[str, Any] = {"model": {name: torch.ones(2) for name in names}}
    state |= {f"optimizer_{number}": optimizer_of(name) for number, name in enumerate(names)}
    import_dcp(write_dcp(tmp_path / "dcp", state, {"epoch": 3, "global_step": 40}), tmp_path / "ours")
    found = StoredCheckpoint(tmp_path / "ours")
    assert found.load()["optimizer_parameters"] == [[name] for name in names]
    assert (found.load()["epoch"], found.manifest.about["step"]) == (3, 40)


def test_a_model_alone_is_imported_and_says_that_it_has_no_optimizer(tmp_path: Path) -> None:
    model = OwnLoop()
    import_dcp(write_dcp(tmp_path / "dcp", {"model": dict(model.state_dict())}), tmp_path / "ours")
    assert "optimizer_states" not in StoredCheckpoint(tmp_path / "ours").tree()
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        jobs.trainer("auto", 1).fit(OwnLoop(), jobs.loader(), ckpt_path=tmp_path / "ours")
    again = OwnLoop.load_from_checkpoint(tmp_path / "ours")
    assert_same_bits(dict(again.state_dict()), dict(model.state_dict()))


def test_a_flattened_optimizer_is_refused_with_the_way_out(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(train_under_fsdp2, tmp_path / "dcp", flat=True)
    with pytest.raises(CheckpointError, match="Save it without flatten_optimizer_state_dict"):
        import_dcp(tmp_path / "dcp", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda folder: None, "is not a folder of torch.distributed.checkpoint: it has no .metadata"),
        (lambda folder: folder.mkdir(), "is not a folder of torch.distributed.checkpoint: it has no .metadata"),
        (lambda folder: folder.touch(), "is not a folder of torch.distributed.checkpoint: it has no .metadata"),
        (lambda folder: write_dcp(folder, {"weights": {"a": torch.ones(2)}}), r"none of .* but \['weights'\]"),
    ],
    ids=["nothing", "empty", "file", "no model"],
)
def test_what_is_no_checkpoint_of_dcp_is_refused(make: Callable[[Path], Any], told: str, tmp_path: Path) -> None:
    make(tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=told):
        import_dcp(tmp_path / "dcp", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", META])
@pytest.mark.parametrize("how", ["emptied", "cut", "missing"])
def test_a_damaged_checkpoint_of_dcp_is_refused(file: str, how: str, tmp_path: Path) -> None:
    source = write_dcp(tmp_path / "dcp", {"model": {"a": torch.arange(999.0)}}, {"epoch": 1, "global_step": 1})
    raw = (source / file).read_bytes()
    (source / file).write_bytes(raw[: len(raw) // 2 if how == "cut" else 0])
    if how == "missing":
        (source / file).unlink()
    if (file, how) == (META, "missing"):
        return  # torch's own folders have none
    with pytest.raises(CheckpointError, match=f"{source} (cannot be read|is not a folder)"):
        import_dcp(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_an_import_does_not_touch_a_folder_of_something_else(tmp_path: Path) -> None:
    source = write_dcp(tmp_path / "dcp", {"model": {"a": torch.ones(2)}})
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    with pytest.raises(CheckpointError, match="thesis is a folder that is not a checkpoint"):
        import_dcp(source, tmp_path / "thesis")
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]


# -- export


@pytest.fixture(scope="module")
def ours(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by a fit of two ranks."""
    place = tmp_path_factory.mktemp("fit")
    two_ranks.run(train_under_fsdp2, place / "start")
    import_dcp(place / "start", place / "import")
    two_ranks.run(fit_and_save, place / "import", place / "ours")
    return place / "ours"


def fit_and_save(start: Path, path: Path) -> None:
    L.seed_everything(9, verbose=False)
    run = jobs.trainer({"stage": 2}, 2, use_distributed_sampler=False)
    run.fit(OwnLoop(), data(), ckpt_path=start)
    run.save_checkpoint(path)


def test_an_export_loads_into_fsdp2_bit_for_bit_and_goes_on(ours: Path, two_ranks: RankPool, tmp_path: Path) -> None:
    assert export_dcp(ours, tmp_path / "dcp") == []
    loaded = two_ranks.run(load_into_fsdp2, tmp_path / "dcp")
    saved = StoredCheckpoint(ours).load()
    assert_same_bits(loaded[0]["loaded"]["model"], saved["state_dict"])
    names = saved["lightning_zero"]["optimizer_parameters"][0]
    optimizer = loaded[0]["loaded"]["optimizer"]
    assert_same_bits(by_name(optimizer, []), by_name(saved["optimizer_states"][0], names))
    for group, expected in zip(optimizer["param_groups"], saved["optimizer_states"][0]["param_groups"], strict=True):
        assert (group["weight_decay"], group["betas"]) == (expected["weight_decay"], expected["betas"])
    again = two_ranks.run(resume_zero, ours, {"stage": 2}, max_epochs=2)
    for mine, theirs in zip(again, loaded, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-6)


def test_an_export_has_what_is_neither_model_nor_optimizer_beside(ours: Path, tmp_path: Path) -> None:
    export_dcp(ours, tmp_path / "dcp")
    meta = torch.load(tmp_path / "dcp" / META, weights_only=True)
    assert (meta["epoch"], meta["global_step"]) == (1, STEPS)
    assert {"loops", "callbacks", "lr_schedulers", "pytorch-lightning_version"} <= meta.keys()
    assert not {"state_dict", "optimizer_states", "lightning_zero"} & meta.keys()


def test_there_and_back_again_is_the_same_checkpoint(ours: Path, tmp_path: Path) -> None:
    """An import can be exported, too."""
    place = ours
    for number in range(2):
        export_dcp(place, tmp_path / f"dcp {number}")
        place = tmp_path / f"ours {number}"
        import_dcp(tmp_path / f"dcp {number}", place)
    found, expected = StoredCheckpoint(place).load(), StoredCheckpoint(ours).load()
    assert_same_bits(found["state_dict"], expected["state_dict"])
    assert found["optimizer_states"][0]["param_groups"] == expected["optimizer_states"][0]["param_groups"]
    names = [str(number) for number in range(99)]
    assert_same_bits(by_name(found["optimizer_states"][0], names), by_name(expected["optimizer_states"][0], names))
    assert found["loops"] == expected["loops"]


@pytest.mark.parametrize("occupied", ["folder", "file"])
def test_an_export_takes_nobodys_place(occupied: str, ours: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if occupied == "folder":
        out.mkdir()
    (out / "mine.txt" if occupied == "folder" else out).touch()
    told = "not empty" if occupied == "folder" else "a file"
    with pytest.raises(CheckpointError, match=rf"out is {told}\. Name a new folder"):
        export_dcp(ours, out)


def test_a_damaged_checkpoint_is_not_exported(ours: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(ours, tmp_path / "copied"))
    shard = sorted(copied.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match="is damaged"):
        export_dcp(copied, tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()


def test_optimizers_whose_parameters_are_not_known_are_refused(tmp_path: Path) -> None:
    tree = {"state_dict": {"a": torch.ones(2)}, "optimizer_states": [{"state": {}, "param_groups": []}]}
    Saver(LocalComm().board).save(tree, str(tmp_path / "ours"), {"step": 1})
    with pytest.raises(CheckpointError, match="does not say which parameters its 1 optimizers have"):
        export_dcp(tmp_path / "ours", tmp_path / "dcp")


def test_r49_both_ways_work_in_file_systems_of_other_kinds(tmp_path: Path) -> None:
    state = {"model": {"a": torch.arange(3.0)}, "optim": optimizer_of("a")}
    import_dcp(write_dcp(tmp_path / "dcp", state), "memory://dcp/ours")
    export_dcp("memory://dcp/ours", "memory://dcp/theirs")
    import_dcp("memory://dcp/theirs", tmp_path / "ours")
    found = StoredCheckpoint(tmp_path / "ours").load()
    assert torch.equal(found["state_dict"]["a"], torch.arange(3.0))
    assert found["optimizer_states"][0]["param_groups"] == [{"lr": 0.1, "params": [0]}]
    fsspec.filesystem("memory").rm("/dcp", recursive=True)


@pytest.mark.parametrize("state", [None, {}])
def test_an_optimizer_without_state_is_imported_as_that(state: Any, tmp_path: Path) -> None:
    groups = [{"lr": 0.1, "params": ["weight", "bias"]}]
    optimizer = {"param_groups": groups} if state is None else {"state": state, "param_groups": groups}
    save_to_dcp({"model": torch.nn.Linear(2, 2).state_dict(), "optimizer_0": optimizer}, tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "a.ckpt")
    (found,) = StoredCheckpoint(tmp_path / "a.ckpt").load()["optimizer_states"]
    assert found == {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}


def test_the_state_of_a_parameter_in_no_group_is_refused_with_its_name(tmp_path: Path) -> None:
    optimizer = {"state": {"other": {"m": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": ["weight"]}]}
    save_to_dcp({"model": torch.nn.Linear(2, 2).state_dict(), "optimizer_0": optimizer}, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="state of 'other', which is in none of its groups"):
        import_dcp(tmp_path / "dcp", tmp_path / "a.ckpt")


def save_to_dcp(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
