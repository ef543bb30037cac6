"""One norm over gradients that are spread over ranks."""

import math
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.config import Offload
from lightning_zero.device import HOST
from lightning_zero.run.engine import Engine
from lightning_zero.shards import norm
from lightning_zero.shards.layout import Layout
from lightning_zero.shards.offload import Machine
from lightning_zero.shards.squares import Squares
from lightning_zero.tiers.array import zeros
from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.native import make_comm
from models import seeded
from ranks import PATIENCE, RankPool
from unit_jobs import on_engine, on_one_device, tower, x

STAGES = [0, 1, 2, 3]


def measure(norm_type: float, bucket_bytes: int | None = None) -> Any:
    """The norm, in float64 where nothing is sharded."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> float:
        model(x()).square().mean().backward()
        if engine is None:
            flat = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
            return float(torch.linalg.vector_norm(flat, norm_type))
        slots = engine.gradients.slots_with_gradients(optimizer)
        return float(norm.Measured.of(slots, norm_type).total_norm(engine.mesh))

    return act


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_that_of_all_gradients_as_one_vector(stage: int, norm_type: float) -> None:
    expected = on_one_device(tower(), measure(norm_type))
    for world in (1, 2, 3):
        assert on_engine(tower(), measure(norm_type), stage, world=world) == [pytest.approx(expected, rel=1e-6)] * world


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_no_cut_shows_in_a_single_bit(norm_type: float) -> None:
    found = {
        total
        for stage in STAGES
        for size in (64, 2**20)
        for total in on_engine(tower(), measure(norm_type), stage, bucket_bytes=size)
    }
    assert len(found) == 1


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_of_two_byte_gradients_shows_in_a_single_bit(seed: int) -> None:
    """Powers of pieces that were summed in two bytes would differ with the pieces."""
    start = seeded(lambda: nn.Sequential(nn.Linear(8, 37), nn.Tanh(), nn.Linear(37, 11)), seed)
    options = {"reduce_dtype": torch.bfloat16}
    found = {
        total
        for stage, size in ((0, 2**20), (2, 64), (3, 2**20))
        for total in on_engine(start, measure(2.0), stage, bucket_bytes=size, **options)
    }
    assert len(found) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_shows_on_every_rank(stage: int, bad: float) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> Tensor:
        loss = model(x()).square().mean()
        (loss * bad if comm.rank == 1 else loss).backward()
        slots = engine.gradients.slots_with_gradients(optimizer)
        measured = norm.Measured.of(slots)
        overflows.append(measured.overflow(comm))
        largest = norm.Measured.of(slots, math.inf)
        return torch.stack([measured.total_norm(engine.mesh), largest.total_norm(engine.mesh)])

    overflows: list[norm.Overflow] = []
    for found in on_engine(tower(), act, stage):
        assert not found.isfinite().any()
    for overflow in overflows:
        assert overflow.ranks == [0, 1]
        assert len(overflow.parameters) == len(list(tower().parameters()))


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_below_the_bound_are_left_alone_and_those_above_are_scaled_to_it(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> None:
        model(x()).square().mean().backward()
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        total = engine.gradients.clip_by_norm_(optimizer, 1e6)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad.clone(), before[name])
        engine.gradients.clip_by_norm_(optimizer, float(total) / 4)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.clone(), before[name] / 4, rtol=1e-5, atol=0)

    on_engine(tower(), act, stage)


@pytest.mark.parametrize("raises_version", [True, False])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_norm_is_measured_anew_where_gradients_were_edited_since_they_were_unscaled(
    stage: int, world: int, raises_version: bool, tmp_path: Path
) -> None:
    """As in `on_before_optimizer_step` under 16-mixed, which comes before clipping."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)  # more than fp16 holds; torch begins with 2**16
        scaler.scale(model(x()).square().mean()).backward()
        if engine is None:
            scaler.unscale_(optimizer)
        else:
            engine.gradients.unscale_(scaler, optimizer)
        for parameter in model.parameters():
            (parameter.grad if raises_version else parameter.grad.data).mul_(100)
        if engine is None:
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            total = engine.gradients.clip_by_norm_(optimizer, 0.5)
        return {"norm": total, **{name: p.grad.clone() for name, p in model.named_parameters()}}

    expected = on_one_device(tower(), act)
    on_disk = {"offload": Offload("nvme", path=tmp_path), "machine": Machine(host_is_apart=True)}
    for options in ({}, on_disk if stage >= 2 else {}):
        for found in on_engine(tower(), act, stage, world=world, **options):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_norm_is_that_of_its_own_step_and_a_whole_gradient_that_was_given_is_the_users(stage: int) -> None:
    """Only the first step has a scaler, which measures; the gradients of the second are in the same places."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> list[float]:
        scaler, norms = torch.amp.GradScaler("cpu", init_scale=1.0), []
        for step in range(2):
            (model(x()).square().mean() * (1 + step)).backward()
            if engine is None:
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
            else:
                if step == 0:
                    engine.gradients.unscale_(scaler, optimizer)
                for parameter in model.parameters():
                    engine.gradients.full(parameter).zero_()
                norms.append(float(engine.gradients.clip_by_norm_(optimizer, math.inf)))
            optimizer.step()
        return norms

    expected = on_one_device(tower(), act)
    assert expected[1] > 1.5 * expected[0]
    assert on_engine(tower(), act, stage) == [pytest.approx(expected, rel=1e-6)] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_values_are_clamped_as_torch_clamps_them(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, torch.Tensor]:
        model(x()).square().mean().backward()
        if engine is None:
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        else:
            engine.gradients.clip_by_value_(optimizer, 1e-3)
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = on_one_device(tower(), act)
    assert max(float(grad.max()) for grad in expected.values()) == pytest.approx(1e-3)
    for found in on_engine(tower(), act, stage):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("stage", STAGES)
def test_without_gradients_the_norm_is_zero(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> Tensor:
        return engine.gradients.clip_by_norm_(optimizer, 1.0)

    assert on_engine(tower(), act, stage) == [torch.tensor(0.0)] * 2


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.layer = nn.Linear(8, 8)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return (self.layer(signal) * self.phase).abs()


@pytest.mark.parametrize("stage", STAGES)
def test_complex_gradients_count_by_their_magnitude(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> float:
        model(x()).square().mean().backward()
        if engine is None:
            return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        return float(engine.gradients.clip_by_norm_(optimizer, 0.1))

    start = seeded(Waves)
    assert on_engine(start, act, stage) == [pytest.approx(on_one_device(start, act), rel=1e-6)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (norm._CHUNK,), (2, norm._CHUNK + 1)])
def test_the_host_sums_in_float64_chunk_by_chunk(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    piece = torch.randn(shape, dtype=dtype)
    found = norm._norm_of(piece.t() if len(shape) > 1 else piece, 2.0)
    assert found.dtype == torch.float64
    wide = piece.abs().double()
    assert found.item() == pytest.approx(wide.square().sum().sqrt().item(), rel=1e-12)


def test_a_sum_of_squares_of_which_an_edit_has_voided_a_part_is_not_known() -> None:
    layout = Layout.pack([("a", (8,))], ranks=1, bucket_numel=4)
    slot: Any = SimpleNamespace(index=0, piece=layout.piece(0, 0))
    array = zeros(Category.GRADIENT, 8, torch.float32, Place(HOST, Tier.HOST), Ledger())
    squares = Squares(array)
    for chunk in layout.chunks:
        squares.write(chunk, torch.full((4,), 2.0), [slot])
    assert squares.sum_of(slot) == 32
    first, second = layout.chunks
    squares.write(first, torch.ones(4), [slot])
    array.write(slice(0, 1), torch.zeros(1))
    squares.write(second, torch.ones(4), [slot])
    assert squares.sum_of(slot) is None


def measure_after_a_verdict(stage: int) -> list[float]:
    """The norms of two backwards. Ranks write the second average into the memory of the first, past torch's count of
    edits."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    comm = make_comm(HOST, timedelta(seconds=PATIENCE))
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, [optimizer], stage=stage, comm=comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    norms = []
    for factor in (1.0, 3.0):
        optimizer.zero_grad()
        (factor * model(x()).square().mean()).backward()
        if factor == 1.0:
            engine.gradients.unscale_(scaler, optimizer)
        norms.append(float(engine.gradients.clip_by_norm_(optimizer, 1e9)))
    engine.close()
    return norms


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_take_the_place_of_measured_ones_are_measured_anew(stage: int, two_ranks: RankPool) -> None:
    for first, second in two_ranks.run(measure_after_a_verdict, stage):
        assert second == pytest.approx(3 * first)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_listed_twice_counts_and_is_scaled_once(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> None:
        parameters = [*model.parameters()]
        model(x()).square().mean().backward()
        total = engine.gradients.clip_by_norm_(parameters, math.inf)
        assert engine.gradients.clip_by_norm_([*parameters, *parameters], float(total) / 2) == total
        assert float(engine.gradients.clip_by_norm_(parameters, math.inf)) == pytest.approx(float(total) / 2, rel=1e-5)

    on_engine(tower(), act, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_norm_of_what_has_only_accumulated_is_in_fp32_and_may_be_refused_as_any_other(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> None:
        with engine.no_sync():
            model(x().double()).square().mean().mul(math.nan).backward()
        assert engine.gradients.clip_by_norm_(model.parameters(), math.inf).dtype == torch.float32
        with pytest.raises(RuntimeError, match="non-finite"):
            engine.gradients.clip_by_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    on_engine(tower().double(), act, stage)


def test_the_norm_type_that_is_asked_for_is_the_one_that_is_clipped_by() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> float:
        model(x()).square().mean().backward()
        clip = torch.nn.utils.clip_grad_norm_ if engine is None else engine.gradients.clip_by_norm_
        return float(clip(model.parameters(), 1.0, norm_type=math.inf))

    assert on_engine(tower(), act, 2) == [on_one_device(tower(), act)] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_a_small_loss_are_unscaled_and_clipped_by_the_type_that_is_asked_for(stage: int) -> None:
    """A scale below 1 makes them larger; of what is unscaled the norm is known, but not that of every type."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> tuple[float, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=0.25)
        scaler.scale(model(x()).square().mean()).backward()
        if engine is None:
            scaler.unscale_(optimizer)
        else:
            engine.gradients.unscale_(scaler, optimizer)
        clip = torch.nn.utils.clip_grad_norm_ if engine is None else engine.gradients.clip_by_norm_
        largest = float(clip(model.parameters(), 1e9, norm_type=math.inf))
        return largest, float(clip(model.parameters(), 1e9))

    expected = on_one_device(tower(), act)
    assert on_engine(tower(), act, stage) == [pytest.approx(expected, rel=1e-6)] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_no_number_makes_all_that_are_clipped_none_as_in_torch(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> bool:
        first = next(model.parameters())
        (model(x()).square().mean() + math.nan * first.flatten()[0]).backward()
        clip = torch.nn.utils.clip_grad_norm_ if engine is None else engine.gradients.clip_by_norm_
        assert math.isnan(clip(model.parameters(), 1.0))
        return all(p.grad.isnan().all() for p in model.parameters() if p.grad is not None)

    assert on_one_device(tower(), act)
    assert on_engine(tower(), act, stage) == [True] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_has_only_accumulated_is_read_as_a_copy(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> None:
        weight = next(model.parameters())
        with engine.no_sync():
            model(x()).square().mean().backward()
        engine.gradients.full(weight).zero_()
        assert weight.grad.any()

    on_engine(tower(), act, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_left_in_the_dtype_of_their_parameters(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> None:
        model(x().to(torch.bfloat16)).square().mean().backward()
        left = engine.gradients.whole_on_host()
        assert {grad.dtype for grad in left.values()} == {torch.bfloat16}

    on_engine(tower().to(torch.bfloat16), act, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_is_told_of_the_ranks_of_all_replicas(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(x()).square().mean() * math.nan).backward()
        assert engine.gradients.unscale_(scaler, optimizer).ranks == [0, 1, 2, 3]

    on_engine(tower(), act, stage, world=4, replicate_size=2)
