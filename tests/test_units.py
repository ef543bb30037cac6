import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.casting import Reader, readers_of, why_not_cast
from lightning_zero.shards.units import (
    fill_buckets,
    find_blocks,
    find_units,
    merge_small,
    renamed,
    too_small_to_shard,
    whole_model,
)
from lightning_zero.wire.local import CountingComm
from models import Assorted, assorted, seeded
from unit_jobs import assert_same_bits, on_engine, on_one_device, state_of, x

OWN = ("weight", "bias")


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


def test_a_block_that_stands_at_two_places_is_named_by_the_first() -> None:
    block = Block()
    model = nn.ModuleDict({"first": nn.ModuleList([block]), "second": nn.ModuleList([block, Block()])})
    assert list(find_blocks(model, (Block,), "modules")) == ["first.0", "second.1"]


def test_a_compiled_model_is_named_and_versioned_as_the_one_that_was_written() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    compiled = nn.Sequential(plain[0], torch.compile(plain[1]))
    assert list(compiled.state_dict()) != list(plain.state_dict())
    state = renamed(compiled.state_dict())
    assert list(state) == list(plain.state_dict())
    assert state._metadata["1"] == plain.state_dict()._metadata["1"] == {"version": 2}  # type: ignore[attr-defined]
    assert names(find_units(compiled, None)) == ["0", "1"]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 240))
def test_small_neighbours_become_one_unit_up_to_a_size(widths: list[int], nbytes: int) -> None:
    specs = find_units(nn.Sequential(*[nn.Linear(width, 1, bias=False) for width in widths]), None)
    merged = merge_small(specs, nbytes)
    assert [module for spec in merged for module in spec.modules] == [m for spec in specs for m in spec.modules]
    assert [name for spec in merged for name in spec.parameters] == [n for spec in specs for n in spec.parameters]
    assert all(spec.nbytes <= nbytes or len(spec.modules) == 1 for spec in merged)
    assert all(one.nbytes + other.nbytes > nbytes for one, other in itertools.pairwise(merged))


def test_what_lies_around_other_units_is_not_merged_with_them() -> None:
    assert names(merge_small(find_units(Transformer(), None), 10**6)) == ["", "embedding to blocks.2"]


def test_a_tiny_model_stays_whole_and_of_others_what_would_be_gathered_longest() -> None:
    specs = find_units(Transformer(), None)
    nbytes = sum(spec.nbytes for spec in specs)
    assert names(too_small_to_shard(specs, nbytes)) == names(specs)
    assert names(too_small_to_shard(specs, nbytes - 1)) == [""]  # its token, used by the forward that calls all others
    assert names(too_small_to_shard(specs, 4)) == []


class Around(nn.Module):
    """A vector of its own around another module."""

    def __init__(self, numel: int, inside: nn.Module) -> None:
        super().__init__()
        self.own, self.inside = nn.Parameter(torch.zeros(numel)), inside


def test_of_what_would_be_gathered_longest_the_smallest_stays_whole_first() -> None:
    specs = find_units(Around(64, Around(4, nn.ModuleList([Block(), Block()]))), None)
    assert names(specs) == ["", "inside", "inside.inside.0", "inside.inside.1"]
    assert names(too_small_to_shard(specs, 100)) == ["inside"]
    assert names(too_small_to_shard(specs, 4 * 4)) == ["inside"], "it may take all that there is room for"
    assert names(too_small_to_shard(specs, 4 * 4 - 1)) == []


class Wide(nn.Module):
    """Modules of 64 KiB, and a vector of the model's own."""

    def __init__(self, modules: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.into = nn.ModuleList([nn.Linear(8, 1024, bias=False) for _ in range(modules)])
        self.out = nn.ModuleList([nn.Linear(1024, 8, bias=False) for _ in range(modules)])

    def forward(self, batch: Tensor) -> Tensor:
        for into, out in zip(self.into, self.out, strict=True):
            batch = batch + torch.tanh(out(torch.tanh(into(batch)))) * self.scale
        return batch


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_r41_small_modules_take_collectives_by_the_bucket_and_not_by_the_module(stage: int) -> None:
    modules, bucket_bytes = 64, 2**20
    model, comm = seeded(lambda: Wide(modules)), CountingComm(0, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = Options(bucket_bytes=bucket_bytes, merges_units=True)
    engine = Engine(model, [optimizer], stage=stage, comm=comm, options=options)
    counts: list[int] = []
    for _ in range(5):
        before = comm.calls.total()
        model(x()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(comm.calls.total() - before)
    buckets = sum(p.nbytes for p in model.parameters()) / bucket_bytes
    passes = 3 if stage == 3 else 2  # gather, gather again, reduce; or reduce, publish
    assert engine.parts.assembly.resident == (8 if stage == 3 else 0)
    assert 0 < counts[-1] <= passes * buckets + 4


@pytest.mark.parametrize("modules", [2, 20])  # all of it stays whole, its vector alone does
def test_merged_and_resident_units_train_with_an_ordinary_models_bits(modules: int) -> None:
    def act(model: Any, engine: Engine | None, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        for step in range(4):
            optimizer.zero_grad()
            model(x(1.0 + step)).square().mean().backward()
            optimizer.step()
        return state_of(model, engine)

    start = seeded(lambda: Wide(modules))
    expected = on_one_device(start, act)
    for found in on_engine(start, act, 3, merges_units=True, bucket_bytes=2**18):
        assert_same_bits(found, expected)


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
    assert [module for module, why in why_not_cast(model).items() if why is None] == [model.plain, model.conv]


def names_of_cast(model: nn.Module) -> set[str]:
    cast = [parameter for reader in readers_of(model, why_not_cast(model)) for *_, parameter in reader.parameters]
    return {name for name, parameter in model.named_parameters() if any(parameter is one for one in cast)}


def test_weights_of_attention_layers_of_it_cells_and_transformers_conv1d_rest_in_two_bytes() -> None:
    model = nn.ModuleDict(
        {
            "own": nn.MultiheadAttention(4, 2),
            "other": nn.MultiheadAttention(4, 2, kdim=3, vdim=5, bias=False),
            "biased": nn.MultiheadAttention(4, 2, add_bias_kv=True),
            "layer": nn.TransformerEncoderLayer(4, 2, 6),
            "cell": nn.LSTMCell(3, 4),
            "conv": Conv1D(3, 4),
        }
    )
    uncast = {"biased.bias_k", "biased.bias_v", *(f"layer.norm{at}.{name}" for at in (1, 2) for name in OWN)}
    assert names_of_cast(model) == {name for name, _ in model.named_parameters()} - uncast


def test_an_attention_cuts_its_weights_unless_queries_keys_and_values_are_one_tensor() -> None:
    reader, one, other = Reader(nn.MultiheadAttention(4, 2), ()), torch.ones(1, 4), torch.ones(1, 4)
    assert not reader.cut_weights((one, one, one), {})
    assert not reader.cut_weights((one,), {"value": one, "key": one})
    for args, kwargs in (((one, one, other), {}), ((one, other, one), {}), ((one, one), {"value": other})):
        assert set(reader.cut_weights(args, kwargs)) == {"in_proj_weight", "in_proj_bias"}


def test_attention_that_is_not_torchs_own_keeps_what_it_reads() -> None:
    class Attention(nn.MultiheadAttention):
        pass

    class Layer(nn.TransformerEncoderLayer):
        def _ff_block(self, x: Tensor) -> Tensor:
            return super()._ff_block(x) * self.linear1.weight.norm()

    patched = nn.MultiheadAttention(4, 2)
    patched.forward = lambda *_: None  # type: ignore[method-assign]
    shared, projection = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)
    projection.out_proj = shared.out_proj
    model = nn.ModuleList([Attention(4, 2), Layer(4, 2, 6), patched, nn.ModuleList([shared, projection])])
    assert names_of_cast(model) == {f"3.{at}.in_proj_{name}" for at in (0, 1) for name in OWN}
    assert why_not_cast(model)[model[1].linear1] == "the forward of a layer around it is not torch's own"  # type: ignore[index]


def test_recurrent_layers_are_told_to_be_cast_at_each_time_step() -> None:
    assert set(why_not_cast(nn.GRU(3, 4)).values()) == {"autocast casts them anew at each time step"}


def test_a_tied_head_keeps_its_weight_whole() -> None:
    model = Assorted()
    assert why_not_cast(model)[model.head] == "modules share its weights"
    assert why_not_cast(model)[model.frozen] is None
