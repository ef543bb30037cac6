"""8-bit state, kept in blocks of 256 elements, trains as under DDP: pieces never part a block."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine_checkpoints import (
    Everything,
    Place,
    differences,
    resumed_at,
    train_and_save,
)
from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.layout import Layout
from lightning_zero.shards.probe import BLOCK, BY_BLOCK, BY_TENSOR, find
from lightning_zero.tiers.ledger import Category
from lightning_zero.wire.comm import Comm
from models import seeded
from test_offload import assert_differs, assert_same_run, on_ranks
from thread_world import ThreadWorld


def dynamic_map(*, signed: bool) -> Tensor:
    """The 256 values of dynamic quantization: fewer exponents, more fraction (Dettmers et al., arXiv 2110.02861)."""
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1, dtype=torch.float64)
        means = 10.0 ** (exponent - 6) * (bounds[:-1] + bounds[1:]) / 2
        values += [*means.tolist(), *((-means).tolist() if signed else [])]
    return torch.tensor(sorted(values), dtype=torch.float64)


SIGNED, UNSIGNED = dynamic_map(signed=True), dynamic_map(signed=False)


def packed(values: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in the shape of the values, and a scale for each block."""
    flat = nn.functional.pad(values.reshape(-1), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = flat.abs().amax(1)
    code = code.to(values.dtype)
    codes = torch.bucketize(flat / scales.clamp(min=1e-30)[:, None], (code[1:] + code[:-1]) / 2)
    return codes.view(-1)[: values.numel()].view(values.shape).to(torch.uint8), scales


def unpacked(codes: Tensor, scales: Tensor, code: Tensor) -> Tensor:
    return code.to(scales.dtype)[codes.int()] * scales.repeat_interleave(BLOCK)[: codes.numel()].view(codes.shape)


class Adam8(Optimizer):
    """Adam whose moments are two bytes an element; those of fewer elements than `small` four bytes each."""

    def __init__(self, parameters: Any, lr: float = 0.01, small: int = 0) -> None:
        super().__init__(parameters, {"lr": lr, "small": small})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.change(p, self.state[p], group)

    def change(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        if "state1" in state:
            m = unpacked(state["state1"], state["absmax1"], SIGNED)
            v = unpacked(state["state2"], state["absmax2"], UNSIGNED)
        elif "m" in state:
            m, v = state["m"], state["v"]
        m, v = 0.9 * m + 0.1 * p.grad, 0.99 * v + 0.01 * p.grad**2
        state["step"] = state.get("step", 0) + 1
        p.sub_(group["lr"] * (m / (1 - 0.9 ** state["step"])) / ((v / (1 - 0.99 ** state["step"])).sqrt() + 1e-8))
        if p.numel() < group["small"]:
            state["m"], state["v"] = m, v
            return
        state["state1"], state["absmax1"] = packed(m, SIGNED)
        state["state2"], state["absmax2"] = packed(v, UNSIGNED)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch casts all state to the dtype of its parameter."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state |= {name: value.to(torch.uint8) for name, value in state.items() if name in ("state1", "state2")}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adam8(model: nn.Module) -> tuple[Optimizer, None]:
    return Adam8(trainable(model)), None


def test_r64_eight_bit_state_is_found_to_need_blocks_and_small_tensors_in_full_to_need_more() -> None:
    shapes = [(30, 20), (20,), (3, 4, 5), ()]
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    assert find(Adam8(parameters)).why_not_in_pieces == BY_BLOCK
    assert find(Adam8(parameters, small=4096)).why_not_in_pieces == BY_TENSOR


def test_pieces_begin_and_end_with_blocks() -> None:
    layout = Layout.pack([("a", (7, 300)), ("b", (5,)), ("c", (1000,))], ranks=3, bucket_numel=2000, alignment=BLOCK)
    pieces = [layout.piece(index, rank) for index in range(3) for rank in range(3)]
    assert all(piece.start % BLOCK == 0 for piece in pieces if piece.numel)
    assert layout.shard_numel <= (2100 + 5 + 1000) / 3 + 5 * BLOCK


def test_pieces_that_part_blocks_would_be_wrong() -> None:
    expected, _ = on_ranks(2, 0, adam8)
    with pytest.warns(UserWarning, match="Adam8 looks at blocks of 256 elements, and steps pieces: not DDP's"):
        found, _ = on_ranks(2, 2, adam8, granularity="element")
    assert_differs(found, expected)


def test_blocks_may_be_asked_for() -> None:
    expected, _ = on_ranks(2, 0)
    found, _ = on_ranks(2, 2, granularity="block")
    assert_same_run(found, expected)


class Larger(Everything):
    """With matrices of several blocks, and a last one that is not full."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.Parameter(torch.randn(37, 41))

    def forward(self, signal: Tensor) -> Tensor:
        return super().forward(signal) + (self.many.square().sum() * 0.01).tanh()


@pytest.mark.parametrize("world", [2, 3])
def test_r64_eight_bit_adam_trains_as_under_ddp(world: int, tmp_path: Path) -> None:
    expected, _ = on_ranks(world, 0, adam8, clip="norm")
    start = seeded(Larger)

    def make(model: nn.Module) -> list[Optimizer]:
        return [adam8(model)[0]]

    of_larger = train_and_save(start, make, Place(0, world), tmp_path / "0", steps=4)
    state = of_larger["optimizer_states"][0]["state"]
    assert max(len(entries["absmax1"]) for entries in state.values()) == 6
    for stage in (1, 2, 3):
        found, _ = on_ranks(world, stage, adam8, clip="norm")
        assert_same_run(found, expected)
        found_of_larger = train_and_save(start, make, Place(stage, world), tmp_path / f"{stage}", steps=4)
        assert differences(found_of_larger, of_larger) == []


@pytest.mark.parametrize("saved_at", [Place(0, 2), Place(1, 3), Place(2, 4, replicate_size=2)])
def test_r64_a_checkpoint_of_eight_bit_state_is_resumed_at_any_stage_and_world(saved_at: Place, tmp_path: Path) -> None:
    start = seeded(Larger)

    def make(model: nn.Module) -> list[Optimizer]:
        return [adam8(model)[0]]

    saved = train_and_save(start, make, saved_at, tmp_path / "ckpt")

    for place in (Place(0, 1), Place(2, 3), Place(3, 4, replicate_size=2)):
        for found in resumed_at(place, start, make, tmp_path / "ckpt"):
            assert differences(found, saved) == []


def test_eight_bit_state_is_two_bytes_and_a_little_of_an_nth_of_the_elements() -> None:
    world, numel = 4, 6 * 64 * 64

    def run(comm: Comm) -> int:
        model = seeded(lambda: nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)]))
        optimizer = Adam8(model.parameters())
        engine = Engine(model, [optimizer], stage=1, comm=comm, options=Options())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        nbytes = engine.ledger.live[Category.OPTIMIZER_STATE]
        engine.close()
        return nbytes

    assert ThreadWorld(world).run(run) == [(2 + 2 * 4 / BLOCK) * numel / world] * world
