"""`torch.compile` of models, blocks and LightningModules: the same graphs, breaks and numbers as without sharding."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import user_jobs
from cover import name_of, pairwise
from lightning_zero.wire.comm import Comm
from models import seeded
from ranks import RankPool
from unit_jobs import WIDTH, assert_same_bits, on_engine, on_one_device, state_of, x

DTYPES = [None, torch.bfloat16]  # of autocast

pytestmark = pytest.mark.usefixtures("ranks_in_turn")


@pytest.fixture(scope="module")
def ddp(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return two_ranks.run(user_jobs.fit_compiled, "ddp", tmp_path_factory.mktemp("compiled") / "ddp.ckpt")[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.layer(hidden))


def blocks() -> nn.Module:
    return seeded(lambda: nn.Sequential(*[Block() for _ in range(3)]))


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def each_block(model: Any) -> nn.Module:
    for at in range(3):
        model[at] = torch.compile(model[at], backend="aot_eager")
    return model


def each_block_in_place(model: Any) -> nn.Module:
    for block in model:
        block.compile(backend="aot_eager")
    return model


WAYS = [whole, each_block, each_block_in_place]


def graphs_and_breaks(run: Any) -> tuple[Any, int, int]:
    """What `run` returns, how many graphs were made and how many breaks there were."""
    torch._dynamo.reset()
    counters.clear()
    result = run()
    return result, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


# Autocast wraps the call from outside of what is compiled, whichever way and stage that is.
@pytest.mark.parametrize(("stage", "way", "dtype"), pairwise([0, 1, 2, 3], WAYS, DTYPES), ids=name_of)
def test_compiled_models_train_with_no_further_graph_or_break_pairwise(
    stage: int, way: Any, dtype: torch.dtype | None
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
                loss = model(x(1.0 + step)).float().square().mean()
            loss.backward()
            optimizer.step()
        return {name.replace("_orig_mod.", ""): value for name, value in state_of(model, engine).items()}

    def compiled(model: Any, *rest: Any) -> dict[str, Tensor]:
        return act(way(model), *rest)

    expected, graphs, breaks = graphs_and_breaks(lambda: on_one_device(blocks(), compiled))
    assert graphs >= 1
    runs, found_graphs, found_breaks = graphs_and_breaks(
        lambda: on_engine(blocks(), act, stage, prepare=way, autocast_dtype=dtype)
    )
    for found in runs:
        assert_same_bits(found, expected)
    if (stage, way) != (3, whole):  # gathers lie between the blocks: they cannot be part of one graph
        assert found_breaks == breaks == 0
        assert found_graphs <= 2 * graphs  # each of the two ranks makes its own


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_r51_a_compiled_lightning_module_equals_ddp_and_its_checkpoint_is_an_eager_ones(
    stage: int, ddp: Any, two_ranks: RankPool, tmp_path: Path
) -> None:
    found = two_ranks.run(user_jobs.fit_compiled, {"stage": stage}, tmp_path / "zero.ckpt")[0]
    assert found["losses"] == ddp["losses"]
    assert found["breaks"] <= ddp["breaks"]
    assert found["graphs"] == ddp["graphs"]
    assert not any("_orig_mod" in name for name in found["saved"])
    eager = user_jobs.CompiledBlocks(compiles=False)
    eager.load_state_dict(found["saved"])
    resumed = two_ranks.run(user_jobs.resume_compiled, {"stage": stage}, tmp_path / "zero.ckpt", compiles=False)[0]
    again = two_ranks.run(user_jobs.resume_compiled, {"stage": stage}, tmp_path / "zero.ckpt", compiles=True)[0]
    assert resumed == again


def test_a_lightning_module_compiled_as_a_whole_trains(two_ranks: RankPool) -> None:
    expected = two_ranks.once(user_jobs.fit_compiled_module, "ddp")[0]
    for stage in (1, 3):
        assert two_ranks.run(user_jobs.fit_compiled_module, {"stage": stage})[0] == expected


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_method_that_is_compiled_trains_as_under_ddp(precision: str, two_ranks: RankPool) -> None:
    """Nothing tells at set-up that it is, or whose weights it will read."""
    expected = two_ranks.run(user_jobs.fit_compiled_method, "ddp", precision)[0]
    for stage in (1, 2, 3):
        assert two_ranks.run(user_jobs.fit_compiled_method, {"stage": stage}, precision)[0] == expected


def test_in_place_compilation_is_the_users_again_after_close() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> None:
        compiled = [block._compiled_call_impl for block in model]
        engine.close()
        assert all(block._compiled_call_impl is not now for block, now in zip(model, compiled, strict=True))
        calls = dict(comm.calls)
        model(x()).sum().backward()
        assert dict(comm.calls) == calls
        copy.deepcopy(model)(x())

    on_engine(blocks(), act, 3, prepare=each_block_in_place)
