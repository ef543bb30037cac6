"""What needs a CUDA device; `make test-gpu` runs it. One GPU is enough."""

import datetime
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from safetensors.torch import save_file
from torch import nn

import jobs
import sim_jobs
import tensor_training_jobs
import test_device
from compare import assert_same_bits
from cover import name_of
from lightning_zero import ZeroEMA
from lightning_zero.checkpoint import verify
from lightning_zero.config import ActivationCheckpointing, Offload
from lightning_zero.run.construction import constructing
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.pretrained import load_pretrained
from lightning_zero.run.recompute import store_for
from lightning_zero.shards.early import early_of
from lightning_zero.shards.offload import Machine, host_of
from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.gloo import GlooComm
from lightning_zero.wire.local import LocalComm
from lightning_zero.wire.native import NativeComm
from models import Assorted, adamw, assorted, clone
from ranks import PATIENCE, free_port
from thread_world import ThreadWorld

pytestmark = pytest.mark.gpu


def allocated() -> int:
    """Bytes of the device, without what is left of tests before, and with the workspaces of cuBLAS: 32 MiB on an H100
    for each thread that multiplies, of torch's allocator. Lightning gives them back at the end of every run."""
    gc.collect()
    layer = nn.Linear(8, 8, device="cuda")
    layer(torch.ones(8, 8, device="cuda")).sum().backward()
    del layer
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def fit_on_gpu(strategy: Any, precision: str, **kwargs: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = jobs.Classifier(tied=precision != "bf16-true")
    if precision == "16-mixed":  # nothing may overflow: a skipped step does not move the learning rate here
        kwargs["plugins"] = [MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cuda", init_scale=2.0**10))]
    else:
        kwargs["precision"] = precision
    run = L.Trainer(
        accelerator="gpu", devices=1, strategy=jobs.strategy_from(strategy), max_epochs=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        deterministic="warn", **kwargs,
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    run.fit(model, jobs.loader(shuffle=True), jobs.loader(seed=1))
    return {"losses": model.losses, "weights": jobs.state_of(model), "peak": torch.cuda.max_memory_allocated()}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_gpu_equals_the_plain_strategy_bit_for_bit(stage: int, precision: str) -> None:
    found, expected = fit_on_gpu({"stage": stage}, precision), fit_on_gpu("auto", precision)
    assert found["losses"] == expected["losses"]
    assert all(torch.equal(found["weights"][name], value) for name, value in expected["weights"].items())


GPU, CPU = torch.device("cuda"), torch.device("cpu")
ON_ONE_RANK = [(*case, micro) for *case, ranks, micro, _ in test_device.CASES if ranks == 1]


@pytest.mark.parametrize(("stage", "tier", "precision", "clips", "micro"), ON_ONE_RANK, ids=name_of)
def test_trainings_of_the_simulated_device_run_on_a_gpu(
    stage: int, tier: str, precision: str, clips: bool, micro: int, tmp_path: Path
) -> None:
    """The same jobs as there, on one rank. Kernels of a GPU round otherwise than those of the host."""
    setting = {"stage": stage, "precision": precision, "clips": clips, "micro": micro}
    offload = test_device.offload_of(tier, stage, tmp_path)
    (found,), (expected,) = (
        sim_jobs.train_on_ranks(device, 1, sim_jobs.tower(), **setting, offload=offload) for device in (GPU, CPU)
    )
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3 if precision == "32-true" else 5e-2)


@pytest.mark.parametrize(
    ("event", "tier"),
    [("a step fails", "device"), ("a checkpoint is saved", "device"), ("layers are thawed", "host, and parameters")],
)
def test_what_happens_in_the_middle_of_a_training_happens_on_a_gpu(event: str, tier: str, tmp_path: Path) -> None:
    setting: dict[str, Any] = {"stage": 3, "event": event, "offload": test_device.offload_of(tier, 3, tmp_path)}
    (found,), (expected,) = (
        sim_jobs.train_on_ranks(device, 1, sim_jobs.tower(), **setting, path=tmp_path / device.type)
        for device in (GPU, CPU)
    )
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_the_average_of_a_gpu_is_lightnings_and_may_rest_on_the_host(device: str | None, offload: str | None) -> None:
    strategy = {"stage": 3, "offload": offload}
    found = fit_on_gpu(strategy, "32-true", callbacks=[ZeroEMA(device, decay=0.8)])
    expected = fit_on_gpu(strategy, "32-true", callbacks=[EMAWeightAveraging(device or "cuda", decay=0.8)])
    trained = {name for name in found["weights"] if "frozen" not in name}  # a frozen parameter is its own average here
    assert_same_bits(*({name: one["weights"][name] for name in trained} for one in (found, expected)))


def fit_with_checkpoints(
    strategy: Any, folder: Path, epochs: int, accelerator: str = "gpu", resume: Path | None = None
) -> dict[str, Any]:
    """Saves in the middle of fit, after every epoch."""
    L.seed_everything(1, verbose=False)
    model = jobs.Classifier()
    keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    run = L.Trainer(
        accelerator=accelerator, devices=1, strategy=jobs.strategy_from(strategy), max_epochs=epochs, callbacks=[keep],
        logger=False, enable_progress_bar=False, enable_model_summary=False, deterministic="warn",
    )  # fmt: skip
    run.fit(model, jobs.loader(), ckpt_path=resume)
    return {"losses": model.losses, "weights": jobs.state_of(model)}


@pytest.mark.parametrize("asynchronously", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_of_the_device_goes_on_there_bit_for_bit_and_on_the_host(
    stage: int, asynchronously: bool, tmp_path: Path
) -> None:
    strategy = {"stage": stage, "checkpoint": {"async_save": asynchronously}}
    straight = fit_with_checkpoints(strategy, tmp_path / "straight", 2)
    first = tmp_path / "straight" / "epoch=0.ckpt"
    assert verify(first) == []
    again = fit_with_checkpoints(strategy, tmp_path / "again", 2, resume=first)
    steps = len(straight["losses"]) // 2
    assert again["losses"] == straight["losses"][steps:]
    assert all(torch.equal(again["weights"][name], value) for name, value in straight["weights"].items())
    dist.destroy_process_group()  # NCCL's: Lightning would average the metrics of the host over it
    on_host = fit_with_checkpoints(strategy, tmp_path / "host", 2, "cpu", resume=first)
    assert on_host["losses"] == pytest.approx(straight["losses"][steps:], rel=1e-4)


def test_the_engine_holds_on_the_device_what_the_ledger_says() -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    before = allocated()
    engine = Engine(model, [optimizer], stage=2, comm=LocalComm(on_device=True), device=torch.device("cuda"))
    model(torch.ones(2, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    held = torch.cuda.memory_allocated() - before
    assert sum(engine.bytes_by_category().values()) == pytest.approx(held, rel=0.05)
    engine.close()


def test_parameters_move_to_the_device_with_their_values() -> None:
    start = assorted()
    model = clone(start)
    optimizer, _ = adamw(model)
    Engine(model, [optimizer], stage=3, comm=LocalComm(on_device=True), device=torch.device("cuda"))
    for found, expected in zip(model.parameters(), start.parameters(), strict=True):
        assert found.is_cuda
        assert torch.equal(found.detach().cpu(), expected)


@pytest.fixture
def nccl() -> Iterator[NativeComm]:
    """NCCL on one rank: every collective runs for real, with nobody else."""
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    control = GlooComm(dist.new_group(backend="gloo"), datetime.timedelta(seconds=PATIENCE))
    yield NativeComm(dist.new_group(backend="nccl"), control, torch.device("cuda", 0))
    dist.destroy_process_group()


@pytest.mark.parametrize("diverges", [None, False, True])
def test_nccl_gathers_rows_and_tells_who_diverges_in_the_same_launch(nccl: NativeComm, diverges: bool | None) -> None:
    full = torch.zeros(1, 4, device="cuda")
    gather = nccl.all_gather(full, torch.arange(4.0, device="cuda"), "rows", diverges=diverges)
    gather.wait()
    assert full.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert gather.has_divergence() is bool(diverges)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nccl_reduces_in_the_dtype_of_the_gradients(nccl: NativeComm, dtype: torch.dtype) -> None:
    total = torch.zeros(3, device="cuda", dtype=dtype)
    full = torch.full((1, 3), 1.5, device="cuda", dtype=dtype)
    nccl.reduce_scatter(total, full, total.new_empty(0, 3), "sum").wait()
    assert total.tolist() == [1.5, 1.5, 1.5]


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.uint16, torch.bool, torch.float8_e4m3fn, torch.complex64], ids=str
)
def test_nccl_sends_what_it_cannot_sum(nccl: NativeComm, dtype: torch.dtype) -> None:
    values, rows = torch.ones(4, device="cuda").to(dtype), torch.zeros(1, 4, device="cuda").to(dtype)
    nccl.broadcast(values, "values")
    nccl.all_gather(rows, values, "rows", diverges=False).wait()
    assert torch.equal(rows[0].view(torch.uint8), values.view(torch.uint8))


def test_nccl_sends_small_host_messages_over_gloo(nccl: NativeComm) -> None:
    assert nccl.all_reduce(torch.tensor([3.0]), "control").tolist() == [3.0]
    assert nccl.all_gather_object({"a": 1}, "object") == [{"a": 1}]
    for device in ("cuda", "cpu"):
        sent = torch.ones(2, device=device)
        nccl.broadcast(sent, "values")
        assert sent.tolist() == [1.0, 1.0]


# -- offload


def tower_on_gpu(
    offload: Offload | None, stage: int, steps: int = 4, caches: bool | None = None, **options: Any
) -> dict[str, Any]:
    """A few clipped steps of a tower of layers, and what they left and took on the device; in an autocast that `caches`
    or does not, or in none."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.ModuleList([nn.Linear(512, 512)])[0] for _ in range(8)])
    start = clone(model).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=None if offload is None else True)
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    options = {"offload": offload, "bucket_bytes": 2**21, **options}
    engine = Engine(
        model,
        [optimizer],
        stage=stage,
        comm=LocalComm(on_device=True),
        device=torch.device("cuda"),
        options=Options(**options),
    )
    losses = []
    for step in range(steps):
        batch = torch.randn(4, 512, generator=torch.Generator().manual_seed(step)).cuda()
        casts = torch.autocast("cuda", torch.bfloat16, enabled=caches is not None, cache_enabled=bool(caches))
        with engine.forward(), casts:
            loss = model(batch).square().mean()
        optimizer.zero_grad()
        with engine.backward():
            loss.backward()
        if "step_in_backward" not in options:
            engine.gradients.clip_by_norm_(optimizer, 0.5)
        optimizer.step()
        losses.append(loss.item())
    engine.catch_up()
    optimizer.zero_grad()  # of what is not offloaded, gradients are autograd's own
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    told = engine.ledger.tiers[Tier.DEVICE]
    engine.close()
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    moved = sum(float((now - was.to(now.device)).abs().sum()) for now, was in pairs)
    return {"losses": losses, "held": held, "peak": peak, "told": told, "moved": moved}


OFFLOADS = {
    "optimizer on the host": ({"optimizer": "cpu"}, 2),
    "half of it": ({"optimizer": "cpu", "fraction": 0.5}, 2),
    "optimizer on disk": ({"optimizer": "nvme"}, 2),
    "all on the host": ({"optimizer": "cpu", "parameters": "cpu"}, 3),
    "all on disk": ({"optimizer": "nvme", "parameters": "nvme"}, 3),
}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("tiers", OFFLOADS)
def test_offload_trains_as_without_it(tiers: str, in_backward: bool, tmp_path: Path) -> None:
    """Up to rounding: the host's kernel sums in another order than the device's."""
    offload, stage = OFFLOADS[tiers]
    path = tmp_path if "nvme" in offload.values() else None
    options = {"step_in_backward": True} if in_backward else {}
    expected = tower_on_gpu(None, stage, **options)
    found = tower_on_gpu(Offload(**offload, path=path), stage, **options)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["moved"] == pytest.approx(expected["moved"], rel=1e-3)


@pytest.mark.parametrize("optimizer", ["AdamW", "NAdam"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_step_on_the_host_takes_what_is_meant_for_the_device(fraction: float, optimizer: str) -> None:
    """The learning rate of AdamW is a tensor of the device; NAdam could be captured there."""
    kernel = "options on the device" if optimizer == "AdamW" else "capturable"
    setting = {"stage": 2, "optimizer": optimizer, "kernel": kernel, "offload": Offload("cpu", fraction=fraction)}
    (found,), (expected,) = (
        sim_jobs.train_on_ranks(device, 1, sim_jobs.tower(), **setting, steps=6) for device in (GPU, CPU)
    )
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)


@pytest.mark.parametrize("state_dtype", [None, "bfloat16"])
def test_late_steps_on_the_host_give_the_bits_of_steps_at_once(
    state_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = Offload(optimizer="cpu", state_dtype=state_dtype)
    late = tower_on_gpu(offload, 2)
    monkeypatch.setattr("lightning_zero.shards.offload.why_serial", lambda *_: "to compare with")
    assert tower_on_gpu(offload, 2) == {**late, "peak": pytest.approx(late["peak"], rel=0.2)}


@pytest.mark.parametrize("tiers", OFFLOADS)
def test_the_device_holds_what_the_ledger_says_and_no_more(tiers: str, tmp_path: Path) -> None:
    offload, stage = OFFLOADS[tiers]
    path = tmp_path if "nvme" in offload.values() else None
    without, found = tower_on_gpu(None, stage), tower_on_gpu(Offload(**offload, path=path), stage)
    assert found["held"] < without["held"]
    assert found["told"] == pytest.approx(found["held"], rel=0.03)


@pytest.mark.parametrize("offload", [None, Offload(optimizer="cpu", parameters="cpu")], ids=["resting", "offloaded"])
def test_an_autocast_that_caches_takes_no_more_of_the_device_than_one_that_does_not(offload: Offload | None) -> None:
    options = {"autocast_dtype": torch.bfloat16}
    peaks = [tower_on_gpu(offload, 3, caches=caches, **options)["peak"] for caches in (False, True)]
    assert peaks[1] <= 1.05 * peaks[0]


def test_the_host_copies_are_page_locked_if_so_asked() -> None:
    for pins in (True, False):
        model = nn.Linear(64, 64)
        offload = Offload(optimizer="cpu", pin_memory=pins)
        options, device = Options(offload=offload), torch.device("cuda")
        engine = Engine(
            model,
            [torch.optim.AdamW(model.parameters())],
            stage=2,
            comm=LocalComm(on_device=True),
            device=device,
            options=options,
        )
        assert all(group.master.read().is_pinned() is pins for group in engine.groups)
        engine.close()


def test_page_locked_memory_that_outlives_its_ledger_is_given_back_by_the_next() -> None:
    place = Place(CPU, Tier.HOST, pinned=True)
    for _ in range(3):  # the system gives the same address again
        left, ledger = Ledger().allocate(Category.MASTER, 2**20, torch.float32, place), Ledger()
        assert left.is_pinned()
        del left
        again = ledger.allocate(Category.MASTER, 2**20, torch.float32, place)
        assert again.is_pinned()
        del again
        ledger.pinned.give_back()


def test_memory_that_cannot_be_page_locked_fails_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would tell of it once more, at the next kernel."""
    runtime = torch.cuda.cudart()

    class Refuses:
        @staticmethod
        def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
            runtime.cudaHostRegister(address, nbytes, flags)
            error = runtime.cudaHostRegister(address, nbytes, flags)
            runtime.cudaHostUnregister(address)
            return int(error)

    monkeypatch.setattr("lightning_zero.device._runtime", lambda: Refuses)
    with pytest.raises(MemoryError, match="could not be page-locked"):
        Ledger().allocate(Category.MASTER, 2**20, torch.float32, Place(CPU, Tier.HOST, pinned=True))
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_training_with_offload_under_trainer_ends_with_a_whole_model(tmp_path: Path) -> None:
    for offload in ({"optimizer": "cpu", "parameters": "cpu"}, {"optimizer": "nvme", "path": str(tmp_path)}):
        found = fit_on_gpu({"stage": 3, "offload": offload}, "bf16-mixed")
        assert all(bool(torch.isfinite(loss)) for loss in map(torch.tensor, found["losses"]))
        assert all(value.isfinite().all() for value in found["weights"].values() if value.is_floating_point())


# -- models that are built in shards, by ranks that are threads on one device


def layers() -> nn.Module:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, number)
    return model


@pytest.mark.parametrize("offload", [None, Offload(optimizer="cpu", parameters="cpu")])
def test_a_model_built_in_shards_rests_where_its_parameters_do(offload: Offload | None) -> None:
    device, options = torch.device("cuda"), Options(offload=offload)

    def rank_main(comm: Comm) -> dict[str, torch.Tensor]:
        with device, constructing(stage=3, comm=comm, options=options):
            model = layers()
        rows = [early.row for early in map(early_of, model.parameters()) if early is not None]
        assert len(rows) == 16
        assert {row.device.type for row in rows if row is not None} == {"cpu" if offload else "cuda"}
        assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
        engine = Engine(model, [], stage=3, comm=comm, device=device, options=options)
        return {name: value.cpu() for name, value in engine.states.full_model().items()}

    for found in ThreadWorld(2).run(rank_main):
        assert all(found[name].equal(value) for name, value in layers().state_dict().items())


def test_building_in_shards_takes_a_share_of_the_device_and_the_largest_module() -> None:
    before, kept = allocated(), []
    torch.cuda.reset_peak_memory_stats()

    def rank_main(comm: Comm) -> None:
        with torch.device("cuda"), constructing(stage=3, comm=comm):
            kept.append(layers())

    ThreadWorld(2).run(rank_main)
    nbytes = 8 * 4 * (512 * 512 + 512)
    assert torch.cuda.memory_allocated() - before <= 1.1 * nbytes  # of both ranks
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * (nbytes + 2 * 2 * nbytes / 8)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_of_a_file_go_to_the_device(stage: int, world: int, tmp_path: Path) -> None:
    start, device = assorted(), torch.device("cuda")
    state = {name: value.clone() for name, value in start.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")

    def rank_main(comm: Comm) -> dict[str, torch.Tensor]:
        with constructing(stage=stage, comm=comm) as construction:
            with torch.device("meta"):
                model = Assorted()
            load_pretrained(model, tmp_path, comm=comm, construction=construction, device=device)
        assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
        engine = Engine(model, [], stage=stage, comm=comm, device=device)
        load_pretrained(model, tmp_path, comm=comm, engine=engine)
        return {name: value.cpu() for name, value in engine.states.full_model().items()}

    for found in [rank_main(LocalComm())] if world == 1 else ThreadWorld(world).run(rank_main):
        assert all(found[name].equal(value) for name, value in state.items())


# --- activation checkpointing


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(width, 4 * width), nn.Dropout(0.1), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(nn.functional.gelu(self.up(x))))


def large_blocks() -> Counter[str]:
    """How many blocks of 1 MiB or more the device's allocator has given out since its history is recorded, by their
    size and the lines of Python that have asked for them."""
    found: Counter[str] = Counter()
    for block in (block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]):
        if block["state"] == "active_allocated" and block["size"] >= 2**20 and block.get("frames"):
            lines = [f"{Path(frame['filename']).name}:{frame['line']}" for frame in block["frames"][:6]]
            found[f"{block['size']} by {' < '.join(lines)}"] += 1
    return found


def deep_on_gpu(checkpointing: ActivationCheckpointing | None, depth: int = 8) -> dict[str, Any]:
    """A few steps of blocks with dropout: 8 MiB of input each, and some 80 MiB of all that backward needs."""
    device, rows, width = torch.device("cuda"), 2048, 1024
    torch.manual_seed(0)
    model = nn.Sequential(*[Wide(width) for _ in range(depth)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = Options(activation_checkpointing=checkpointing)
    engine = Engine(model, [optimizer], stage=2, comm=LocalComm(on_device=True), device=device, options=options)
    batch, losses, after_forward, kept = torch.randn(rows, width, device=device), [], 0, Counter[str]()
    for _ in range(3):
        before = allocated()
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
        torch.cuda.reset_peak_memory_stats()
        loss = model(batch).square().mean()
        after_forward, kept = torch.cuda.memory_allocated() - before, large_blocks()
        torch.cuda.memory._record_memory_history(enabled=None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    drawn = float(torch.rand(1, device=device))
    told = engine.bytes_by_category()
    store = None if engine.parts.recompute is None else engine.parts.recompute.store
    is_pinned = None if store is None else store.room.take(8).memory.is_pinned()
    engine.close()
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return {
        "losses": losses,
        "drawn": drawn,
        "weights": weights,
        "after forward": after_forward,
        "kept": kept,
        "peak": torch.cuda.max_memory_allocated() - before,
        "told": told,
        "is pinned": is_pinned,
    }


ACTIVATIONS = {
    "recompute": {},
    "offload": {"offload": True},
    "contiguous": {"contiguous": True},
    "offload contiguous": {"offload": True, "contiguous": True},
}


@pytest.mark.parametrize("policy", ACTIVATIONS)
def test_recomputation_on_a_gpu_changes_no_bit(policy: str) -> None:
    """Dropout masks come from the device's random numbers; copies to the host and back run beside its work."""
    expected, found = deep_on_gpu(None), deep_on_gpu(ActivationCheckpointing(**ACTIVATIONS[policy]))
    assert (found["losses"], found["drawn"]) == (expected["losses"], expected["drawn"])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found["weights"], expected["weights"], strict=True))


def test_recomputation_on_a_gpu_edits_buffers_once_also_through_their_data() -> None:
    expected, found = sim_jobs.buffers_edited_through_data(GPU)
    assert found == expected


def test_offloaded_checkpoints_leave_the_device_for_page_locked_memory() -> None:
    depth, size = 8, 2048 * 1024 * 4
    keeps_all, recomputes = deep_on_gpu(None, depth), deep_on_gpu(ActivationCheckpointing(), depth)
    offloads = deep_on_gpu(ActivationCheckpointing(offload=True), depth)
    told = f"kept with recomputation: {recomputes['kept']}\nwithout: {keeps_all['kept']}"
    assert recomputes["after forward"] < keeps_all["after forward"] / 4, told
    assert recomputes["after forward"] - offloads["after forward"] == pytest.approx((depth - 1) * size, rel=0.05)
    # The peak is at the end of backward, where gradients are, and checkpoints no more: but for one on its way back.
    assert recomputes["peak"] < keeps_all["peak"]
    assert offloads["peak"] <= recomputes["peak"] + size
    assert offloads["told"]["activation checkpoint (host)"] == depth * size
    assert offloads["is pinned"] is True


def test_an_input_that_is_edited_after_its_block_has_been_copied_before() -> None:
    """The copy to the host is done when the block's forward is, as far as the device's work goes."""
    device = torch.device("cuda")
    store = store_for(ActivationCheckpointing(offload=True), Ledger(), device, host_of(device, Machine()), LocalComm())
    for _ in range(20):
        given = torch.randn(4096, 4096, device=device)
        expected = given.clone()
        kept = store.keep("block", ((given,), {}))
        store.join()
        given.zero_()
        (found,), _ = kept.fetch()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_dtensors_on_one_gpu_train_as_plain_parameters(stage: int) -> None:
    found, expected = (tensor_training_jobs.fit_alone(at, accelerator="gpu") for at in (stage, None))
    assert found["losses"] == expected["losses"]
    assert_same_bits(found["weights"], expected["weights"])
