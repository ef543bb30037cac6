"""What needs a CUDA device; `make test-gpu` runs it. One GPU is enough."""

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import jobs
from lightning_zero.checkpoint import verify
from lightning_zero.run.engine import Engine
from lightning_zero.wire.gloo import GlooComm
from lightning_zero.wire.local import LocalComm
from lightning_zero.wire.native import NativeComm
from models import adamw, assorted, clone
from ranks import free_port

pytestmark = pytest.mark.gpu


def fit_on_gpu(strategy: Any, precision: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = jobs.Classifier(tied=precision != "bf16-true")
    run = L.Trainer(
        accelerator="gpu", devices=1, strategy=jobs.strategy_from(strategy), precision=precision, max_epochs=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        deterministic="warn",
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
    on_host = fit_with_checkpoints(strategy, tmp_path / "host", 2, "cpu", resume=first)
    assert on_host["losses"] == pytest.approx(straight["losses"][steps:], rel=1e-4)


def test_the_engine_holds_on_the_device_what_the_ledger_says() -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine = Engine(model, [optimizer], stage=2, comm=LocalComm(), device=torch.device("cuda"))
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
    Engine(model, [optimizer], stage=3, comm=LocalComm(), device=torch.device("cuda"))
    for found, expected in zip(model.parameters(), start.parameters(), strict=True):
        assert found.is_cuda
        assert torch.equal(found.detach().cpu(), expected)


@pytest.fixture
def nccl() -> Iterator[NativeComm]:
    """NCCL on one rank: every collective runs for real, with nobody else."""
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    control = GlooComm(dist.new_group(backend="gloo"), datetime.timedelta(seconds=20))
    yield NativeComm(dist.new_group(backend="nccl"), control)
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


def test_nccl_sends_small_host_messages_over_gloo(nccl: NativeComm) -> None:
    assert nccl.all_reduce(torch.tensor([3.0]), "control").tolist() == [3.0]
    assert nccl.all_gather_object({"a": 1}, "object") == [{"a": 1}]
    for device in ("cuda", "cpu"):
        sent = torch.ones(2, device=device)
        nccl.broadcast(sent, "values")
        assert sent.tolist() == [1.0, 1.0]
