import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_zero.shards.units import fill_buckets, find_units, modules_cast_by_autocast, whole_model
from models import Assorted, assorted


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def names(units: list) -> list[str]:
    return [unit.name for unit in units]


def test_blocks_are_units_and_what_is_outside_goes_module_by_module() -> None:
    assert names(find_units(Transformer(), None)) == ["", "embedding", "blocks.0", "blocks.1", "blocks.2"]


def test_plain_layers_of_a_sequential_are_units_of_their_own() -> None:
    assert names(find_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), None)) == ["0", "2"]


def test_the_user_may_name_classes() -> None:
    assert names(find_units(Transformer(), ("Sequential", nn.Embedding))) == [
        "",
        "embedding",
        *[name for block in range(3) for name in (f"blocks.{block}.attention", f"blocks.{block}.mlp")],
    ]


def test_every_parameter_is_in_exactly_one_unit() -> None:
    for model in (assorted(), Transformer()):
        for units in (find_units(model, None), whole_model(model)):
            found = [id(parameter) for unit in units for parameter in unit.parameters.values()]
            assert sorted(found) == sorted({id(parameter) for parameter in model.parameters()})


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 60))
def test_buckets_hold_all_parameters_last_first_and_overflow_only_alone(sizes: list[int], bucket: int) -> None:
    parameters = {f"p{index}": nn.Parameter(torch.zeros(size)) for index, size in enumerate(sizes)}
    runs = fill_buckets(parameters, bucket)
    assert [name for run in runs for name in run] == list(reversed(parameters))
    assert all(len(run) == 1 or sum(p.numel() for p in run.values()) <= bucket for run in runs)


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.weight.sum()


def test_only_weights_that_autocast_casts_at_each_use_may_rest_in_two_bytes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.conv = nn.Linear(2, 2), nn.Conv2d(1, 1, 1)
            self.own, self.double = OwnForward(2, 2), nn.Linear(2, 2).double()
            self.norm, self.embedding = nn.LayerNorm(2), nn.Embedding(3, 2)
            self.tied = nn.Linear(2, 3, bias=False)
            self.tied.weight = self.embedding.weight
            self.patched = nn.Linear(2, 2)
            self.patched.forward = lambda x: x  # type: ignore[method-assign]

    model = Model()
    assert modules_cast_by_autocast(model) == [model.plain, model.conv]


def test_a_tied_head_keeps_its_weight_whole() -> None:
    model = Assorted()
    assert model.head not in modules_cast_by_autocast(model)
    assert model.frozen in modules_cast_by_autocast(model)
