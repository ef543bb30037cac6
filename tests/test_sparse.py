"""SparseAdam over embeddings with sparse gradients: the rows that no rank has used stay as they are, as under DDP."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compare import assert_same_bits
from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.sparse import NOTHING, dense_of, sparse_of
from lightning_zero.wire.comm import Comm
from thread_world import ThreadWorld
from unit_jobs import assert_as_on_one_device, state_of

ROWS, STEPS = 23, 4


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(ROWS, 6, sparse=True), nn.Embedding(5, 6, sparse=True)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.words(tokens)
        if tokens[0] % 2:  # one rank may use it alone
            values = values + self.places(tokens % 5)
        return self.head(values).square().mean()


def words() -> Words:
    torch.manual_seed(0)
    return Words()


def optimizers_of(model: Any) -> list[torch.optim.Optimizer]:
    sparse = [*model.words.parameters(), *model.places.parameters()]
    return [torch.optim.SparseAdam(sparse, lr=0.1), torch.optim.Adam(model.head.parameters(), lr=0.1, foreach=False)]


def tokens_of(step: int, rank: int) -> Tensor:
    tokens = torch.randint(0, ROWS, (4,), generator=torch.Generator().manual_seed(10 * step + rank))
    tokens[1] = tokens[2]  # a row that one rank uses twice
    return tokens


def under_ddp(ranks: int) -> tuple[dict[str, Tensor], list[Any]]:
    """As DDP averages: sparse gradients are joined, and no rank's zeros count."""
    model = words()
    made = optimizers_of(model)
    for step in range(STEPS):
        found: list[dict[str, Tensor]] = []
        for rank in range(ranks):
            model.zero_grad()
            model(tokens_of(step, rank)).backward()
            found.append({n: p.grad.coalesce() if p.grad.is_sparse else p.grad for n, p in model.named_parameters()
                          if p.grad is not None})  # fmt: skip
        for name, parameter in model.named_parameters():
            grads = [of_rank[name] for of_rank in found if name in of_rank]
            parameter.grad = sum(grads[1:], grads[0]) / ranks if grads else None
        for optimizer in made:
            optimizer.step()
    return dict(model.state_dict()), [optimizer.state_dict()["state"] for optimizer in made]


@pytest.mark.parametrize("options", [{}, {"offload": Offload("cpu")}, {"accumulation": "local"}, {"bucket_bytes": 64}],
                         ids=["plain", "offload", "local", "many buckets"])  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sparse_adam_trains_as_under_ddp(stage: int, ranks: int, options: dict[str, Any]) -> None:
    def on_rank(comm: Comm) -> tuple[Any, Any]:
        model = copy.deepcopy(start)
        made = optimizers_of(model)
        engine = Engine(model, made, stage=stage, comm=comm, options=Options(**options))
        for step in range(STEPS):
            with engine.forward():
                loss = model(tokens_of(step, comm.rank))
            with engine.backward():
                loss.backward()
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
        weights = engine.states.full_model()
        states = [engine.states.full_optimizer(optimizer)["state"] for optimizer in made]
        engine.close()
        return weights, states

    start, (weights, states) = words(), under_ddp(ranks)
    for found, found_states in ThreadWorld(ranks).run(on_rank):
        assert_same_bits(found, weights)
        for state, expected in zip(found_states, states, strict=True):
            assert state.keys() == expected.keys()
            for index, entries in expected.items():
                assert int(state[index]["step"]) == int(entries["step"])
                assert_same_bits(*({k: v for k, v in e.items() if k != "step"} for e in (state[index], entries)))


@pytest.mark.parametrize("later", [False, True], ids=["at set-up", "thawed and given later"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_dense_gradient_is_refused_in_torchs_words(stage: int, later: bool) -> None:
    def on_rank(comm: Comm) -> None:
        model = nn.ModuleList([nn.Embedding(9, 5), nn.Embedding(9, 5, sparse=True)])
        dense, sparse = ([*embedding.parameters()] for embedding in model)
        model[0].requires_grad_(not later)
        optimizer = torch.optim.SparseAdam(sparse if later else sparse + dense)
        engine = Engine(model, [optimizer], stage=stage, comm=comm)
        if later:
            model[0].requires_grad_()
            optimizer.add_param_group({"params": dense})
        with engine.forward():
            loss = model[0](torch.tensor([1, 2])).sum()
        told = r"SparseAdam does not support dense gradients.*sparse=True"
        with pytest.raises(RuntimeError, match=told), engine.backward():
            loss.backward()

    ThreadWorld(2).run(on_rank)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_embeddings_that_the_optimizer_is_given_later_train_as_on_one_device(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for step in range(STEPS):
            if step == 1:
                optimizer.add_param_group({"params": list(model.words.parameters())})
            with nullcontext() if engine is None else engine.forward():
                loss = model(torch.tensor([2 * step + 1, 3, 5]))
            with nullcontext() if engine is None else engine.backward():
                loss.backward()
            optimizer.step()
            model.zero_grad()
        return state_of(model, engine)

    def over_places(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam([p for p in parameters if p.shape == (5, 6)], lr=0.1)

    assert_as_on_one_device(words(), act, stage, over_places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_travels_tells_the_rows_that_have_a_gradient_of_zero(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, -0.0], [1.0, 2.0], [-1.0, 3.0]], dtype=dtype)
    dense = dense_of(torch.sparse_coo_tensor([[1, 3, 3]], values, (5, 2)))
    nothing = torch.full((5, 2), NOTHING, dtype=dtype)
    assert dense.dtype == dtype
    for total in (dense, dense + nothing, nothing + dense, (dense + nothing) / 2):
        assert sorted(set(sparse_of(total).indices()[0].tolist())) == [1, 3]
        assert sparse_of(total).values().numel() == 4
    assert sparse_of(nothing + nothing).values().numel() == 0
