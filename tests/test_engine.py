"""Parity first: every stage against DDP, on ranks as threads of this process."""

import functools
import gc
import re
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_same_bits
from lightning_zero import ActivationCheckpointing, Offload, ZeroStrategy
from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.slot import slot_of
from lightning_zero.tiers.ledger import Category, Tier
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from models import Maker, adamw, assorted, clone, loss_of, sgd, weights
from reference import Run, ddp
from thread_world import ThreadWorld

MAKERS: dict[str, Maker] = {"adamw": adamw, "sgd": sgd}
STEPS = 3


def train(
    model: nn.Module,
    make: Maker,
    comm: Comm,
    stage: int,
    *,
    accumulate: int = 1,
    clip: str | None = None,
    steps: int = STEPS,
    **options: Any,
) -> Run:
    model, run = clone(model), Run()
    if comm.rank:  # another initialisation must not matter
        for parameter in model.parameters():
            parameter.data.add_(comm.rank)
    optimizer, scheduler = make(model)
    engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(**options))
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate - 1):
            with engine.accumulating():
                (loss_of(model, comm.rank, step, micro) / accumulate).backward()
        loss = loss_of(model, comm.rank, step, accumulate - 1) / accumulate
        loss.backward()
        run.losses.append(loss.item())
        if clip == "norm":
            run.grad_norms.append(engine.gradients.clip_by_norm_(optimizer, 0.5).item())
        if clip == "value":
            engine.gradients.clip_by_value_(optimizer, 0.01)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    run.optimizer = engine.states.full_optimizer(optimizer)
    engine.close()
    run.weights = weights(model)
    return run


def on_ranks(world: int, stage: int, make: Maker, model: nn.Module | None = None, **kwargs: Any) -> Run:
    """Rank 0's run; all ranks must have ended with the same weights."""
    model = assorted() if model is None else model
    if world == 1:
        return train(model, make, LocalComm(), stage, **kwargs)
    runs = ThreadWorld(world).run(lambda comm: train(model, make, comm, stage, **kwargs))
    for run in runs[1:]:
        assert_same_bits(run.weights, runs[0].weights)
    return runs[0]


@functools.cache
def outcome(world: int, stage: int, maker: str, accumulate: int = 1, clip: str | None = None, **options: Any) -> Run:
    """As `on_ranks`, of the model that all tests share: each run once, which none of them may change."""
    return on_ranks(world, stage, MAKERS[maker], accumulate=accumulate, clip=clip, **options)


@functools.cache
def reference(maker: str, world: int, accumulate: int, clip: str | None) -> Run:
    return ddp(assorted(), MAKERS[maker], world=world, accumulate=accumulate, clip=clip, steps=STEPS)


def assert_close(found: Run, expected: Run, maker: str) -> None:
    """The design's tolerances where bits may differ: losses 1e-6 relative; weights 1e-6 under SGD."""
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    if maker == "sgd":
        for name, value in expected.weights.items():
            torch.testing.assert_close(found.weights[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_as_ddp(stage: int, world: int, accumulate: int, clip: str | None, maker: str) -> None:
    found = outcome(world, stage, maker, accumulate, clip)
    expected = reference(maker, world, accumulate, clip)
    in_other_order = stage >= 2 and accumulate > 1 and world > 1  # micro-batches are averaged before they are added
    if clip == "norm" or in_other_order:
        assert_close(found, expected, maker)
    else:
        assert found.losses == expected.losses
        assert_same_bits(found.weights, expected.weights)


@pytest.mark.parametrize("clip", [None, "norm"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (0, {"overlap": False}),
        (2, {"overlap": False}),
        (3, {"overlap": False}),
        (1, {"bucket_bytes": 256}),
        (2, {"bucket_bytes": 256}),
        (3, {"bucket_bytes": 256}),
        (3, {"prefetch": 0}),
        (3, {"prefetch": 4}),
        (3, {"unit_classes": ("ModuleDict",)}),
        (2, {"accumulation": "local", "accumulate": 3}),
        (3, {"accumulation": "local", "accumulate": 3}),
    ],
)
def test_bits_depend_on_no_stage_bucket_overlap_or_prefetch(
    stage: int, options: dict[str, Any], world: int, clip: str | None
) -> None:
    options = dict(options)
    accumulate = options.pop("accumulate", 1)
    found = outcome(world, stage, "adamw", accumulate, clip, **options)
    expected = outcome(world, 0, "adamw", accumulate, clip)
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    assert_same_bits(found.weights, expected.weights)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_param_dtype_casts_all_parameters_over_fp32_masters(stage: int) -> None:
    found, expected = (outcome(2, s, "sgd", param_dtype=torch.bfloat16) for s in (stage, 0))
    assert found.losses == expected.losses
    assert_same_bits(found.weights, expected.weights)
    assert all(value.dtype == torch.float32 for value in found.weights.values())
    in_fp32 = outcome(2, 0, "sgd", 1, None)
    assert found.losses != in_fp32.losses
    assert found.losses == pytest.approx(in_fp32.losses, rel=2**-6)  # bf16 has eight bits


@pytest.mark.parametrize("world", [2, 3])
def test_stages_2_and_3_agree_bit_for_bit_when_gradients_accumulate_in_shards(world: int) -> None:
    two, three = (outcome(world, stage, "adamw", 3, None) for stage in (2, 3))
    assert two.losses == three.losses
    assert_same_bits(two.weights, three.weights)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_state_gathers_to_what_one_device_has(stage: int) -> None:
    found = outcome(3, stage, "adamw", 1, None).optimizer
    expected = reference("adamw", 3, 1, None).optimizer
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert_same_bits(found["state"][index], state)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_r05_accumulated_micro_batches_equal_one_batch(stage: int) -> None:
    """k micro-batches against one backward over the mean of their losses."""
    start = assorted()
    for accumulate in (2, 5):

        def train_once(comm: Comm, accumulate: int = accumulate, together: bool = False) -> dict[str, torch.Tensor]:
            model = clone(start)  # not made here: threads share the random generator
            optimizer, _ = sgd(model)
            engine = Engine(model, [optimizer], stage=stage, comm=comm)
            for step in range(2):
                optimizer.zero_grad()
                losses = [loss_of(model, comm.rank, step, micro) / accumulate for micro in range(accumulate)]
                if together:
                    torch.stack(losses).sum().backward()
                else:
                    for loss in losses[:-1]:
                        with engine.accumulating():
                            loss.backward()
                    losses[-1].backward()
                optimizer.step()
            engine.close()
            return weights(model)

        apart = ThreadWorld(2).run(train_once)[0]
        together = ThreadWorld(2).run(functools.partial(train_once, together=True))[0]
        for name, value in together.items():
            torch.testing.assert_close(apart[name], value, rtol=0, atol=1e-6, msg=name)


def test_parameters_keep_their_identity_and_whole_values_after_close() -> None:
    model = clone(assorted())
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    optimizer, _ = adamw(model)
    listed = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    engine = Engine(model, [optimizer], stage=2, comm=LocalComm())
    loss_of(model, 0, 0).backward()
    optimizer.step()
    engine.close()
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert [id(parameter) for group in optimizer.param_groups for parameter in group["params"]] == listed
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


@pytest.mark.parametrize("options", [{}, {"offload": Offload("cpu")}], ids=["on the device", "optimizer on the host"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_on_a_cpu_a_build_of_torch_for_gpus_is_not_asked_for_one(
    stage: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pip install torch` brings on Linux. CUDA's runtime raises where there is no driver, and in a fork."""

    def refuse() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system")

    def is_built_for(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", is_built_for)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    train(assorted(), adamw, LocalComm(), stage, clip="norm", **options)


@pytest.mark.parametrize("end", ["closed", "closed after a rank was lost", "forgotten"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_is_left_of_a_model_and_an_engine_that_nobody_has_any_more(stage: int, end: str) -> None:
    def train_and_leave(comm: Comm) -> list[weakref.ref[Any]]:
        model = clone(assorted())
        optimizer, _ = adamw(model)
        engine = Engine(model, [optimizer], stage=stage, comm=comm)
        with engine.forward():
            loss = loss_of(model, 0, comm.rank)
        with engine.backward():
            loss.backward()
        optimizer.step()
        if end != "forgotten":
            engine.close(whole=end == "closed")
        return [weakref.ref(it) for it in (model, engine, *model.parameters(), *engine.groups)]

    left = ThreadWorld(2).run(train_and_leave)
    gc.collect()
    for refs in left:
        assert [type(it()).__name__ for it in refs if it() is not None] == []


def test_optimizer_over_foreign_parameters_is_refused_with_the_remedy() -> None:
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(7, 3))], lr=0.1)
    with pytest.raises(ValueError, match=r"Optimizer 0 \(SGD\).*shape \(7, 3\).*self\.parameters\(\)"):
        Engine(assorted(), [stranger], stage=2, comm=LocalComm())


def test_lazy_parameters_are_refused_with_the_remedy() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet.*Run one forward"):
        Engine(model, [], stage=3, comm=LocalComm())


def test_a_lazy_layer_that_is_added_in_training_is_taken_in_once_it_has_its_shape() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    engine = Engine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], stage=2, comm=LocalComm())
    model.append(nn.LazyLinear(3))
    for is_known in (False, True):
        engine.regroup()
        assert (slot_of(model[1].weight) is not None) == is_known
        with engine.forward():
            assert model(torch.ones(1, 2)).shape == (1, 3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_optimizers_nothing_is_trained_also_where_autograd_records(stage: int) -> None:
    def on_rank(comm: Comm) -> list[int]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine = Engine(model, [], stage=stage, comm=comm)
        with engine.forward():
            assert model(torch.ones(2, 4)).requires_grad
        return [engine.ledger.peak_in[category, Tier.DEVICE] for category in (Category.GRADIENT, Category.BUCKET)]

    assert ThreadWorld(2).run(on_rank) == [[0, 0]] * 2


def test_integer_parameters_rest_beside_the_optimizer_that_lists_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("table", nn.Parameter(torch.arange(5), requires_grad=False))

    def step(comm: Comm) -> torch.Tensor:
        mine = clone(model)
        optimizer = torch.optim.AdamW(mine.parameters())
        engine = Engine(mine, [optimizer], stage=3, comm=comm)
        mine(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return engine.states.full_model()["table"]

    assert torch.equal(ThreadWorld(2).run(step)[0], torch.arange(5))


@pytest.mark.parametrize(("world", "replicas"), [(4, 2), (6, 3), (2, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hybrid_sharding_equals_ddp(stage: int, world: int, replicas: int) -> None:
    expected = reference("sgd", world, 2, "norm")
    found = outcome(world, stage, "sgd", 2, "norm", replicate_size=replicas)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-5, atol=1e-6)


def test_replicas_that_do_not_divide_the_ranks_are_refused_on_every_rank() -> None:
    with pytest.raises(ValueError, match=r"replicate_size=3 does not divide the 4 ranks. Write one of \[1, 2, 4\]"):
        ThreadWorld(4).run(lambda comm: train(assorted(), sgd, comm, 2, replicate_size=3))


@pytest.mark.parametrize(
    "refused",
    [
        {"prefetch": -1},
        {"overlap": "yes"},
        {"accumulation": "global"},
        {"granularity": "row"},
        {"replicate_size": 0},
        {"activation_checkpointing": ActivationCheckpointing(partition=True)},
    ],
    ids=lambda refused: next(iter(refused)),
)
def test_options_refuse_what_the_strategy_refuses_in_its_words(refused: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="=") as told:
        ZeroStrategy(**refused)
    with pytest.raises(ValueError, match=re.escape(str(told.value))):
        Options(**refused)


@pytest.mark.parametrize(("broadcasts", "shared"), [(True, True), (False, False)])
def test_a_training_forward_begins_with_rank_0s_buffers_unless_told_otherwise(broadcasts: bool, shared: bool) -> None:
    def rank_main(comm: Comm) -> list[list[float]]:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        seen: list[list[float]] = []
        model[1].register_forward_pre_hook(lambda norm, _: seen.append(norm.running_mean.tolist()))
        options = Options(broadcast_buffers=broadcasts)
        engine = Engine(model, [sgd(model)[0]], stage=2, comm=comm, options=options)
        for _ in range(2):
            with engine.forward():
                model(torch.randn(8, 4) + comm.rank)
        return seen

    (zero_first, zero), (first, one) = ThreadWorld(2).run(rank_main)
    assert zero_first == first == [0.0] * 4
    assert (zero == one) is shared
    assert zero != zero_first


@pytest.mark.parametrize("stage", [1, 3])
def test_what_rank_0_has_sent_of_its_buffers_is_freed_before_the_forward(stage: int) -> None:
    """Else each forward without a step, as for maps of what a network looks at, would keep a copy of all of them."""

    def on_rank(comm: Comm) -> list[bool]:
        model, sent = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), []
        broadcast = comm.broadcast

        def note(tensor: torch.Tensor, name: str, source: int = 0) -> None:
            broadcast(tensor, name, source)
            if name.startswith("buffers"):
                sent.append(weakref.ref(tensor.untyped_storage()))

        vars(comm)["broadcast"] = note
        engine = Engine(model, [sgd(model)[0]], stage=stage, comm=comm)
        model.register_forward_pre_hook(lambda *_: kept.extend(one() is not None for one in sent))
        kept: list[bool] = []
        with engine.forward():
            model(torch.ones(8, 4))
        return kept

    assert ThreadWorld(2).run(on_rank) == [[False, False], [False, False]]  # of floats, and of counts


@pytest.mark.parametrize("trains", [True, False])
def test_an_evaluation_leaves_ranks_the_buffers_that_they_were_given_after_set_up(trains: bool) -> None:
    """As `WeightAveraging` does at the start of `trainer.validate`. Under DDP, a model that trains takes rank 0's."""

    def on_rank(comm: Comm) -> float:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
        engine = Engine(model, [sgd(model)[0]] if trains else [], stage=3, comm=comm)
        model[1].running_mean.data.fill_(comm.rank)
        with torch.no_grad(), engine.forward(reduces=False):
            model(torch.ones(2, 4))
        return float(model[1].running_mean[0])

    assert ThreadWorld(2).run(on_rank) == ([0.0, 0.0] if trains else [0.0, 1.0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_backward_may_be_of_two_forwards_between_which_buffers_are_broadcast(stage: int) -> None:
    """As that of a discriminator with BatchNorm, of real and made samples. Other ranks' buffers are written to."""

    def on_rank(comm: Comm) -> float:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        engine = Engine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], stage=stage, comm=comm)
        losses = []
        for sign in (1, -1):
            with engine.forward():
                losses.append(model(sign * torch.arange(8.0).view(2, 4)).sum())
        with engine.backward():
            sum(losses).backward()  # type: ignore[union-attr]
        return float(model[0].weight.grad.sum())

    first, second = ThreadWorld(2, 20).run(on_rank)
    assert first == second


class Drifting(nn.Module):
    """Each forward moves a buffer, which the next one uses. Every second one has a layer more on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.register_buffer("drift", torch.zeros(4))

    def forward(self, values: torch.Tensor, longer: bool) -> torch.Tensor:
        self.drift.mul_(0.5).add_(1.0)
        for layer in self.layers if longer else self.layers[1:]:
            values = torch.tanh(layer(values)) + self.drift
        return values


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 64}, {"merges_units": True}, {"replicate_size": 2}], ids=str)
@pytest.mark.parametrize("differs", ["looks at 0", "looks at 1", "longer"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_go_different_ways_use_the_buffers_of_their_own_forward(
    stage: int, differs: str, options: dict[str, Any]
) -> None:
    """One that comes to the next forward first waits, as another forward would have moved them already."""
    start = Drifting()

    def on_rank(comm: Comm) -> list[float]:
        model: Any = clone(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(**options))
        found = []
        for _ in range(4):
            for micro in range(3):
                with engine.forward():
                    loss = model(torch.ones(2, 4), differs != "longer" or (micro + comm.rank) % 2 == 0).sum()
                found.append(float(model.drift[0]))
                with engine.backward():
                    loss.backward()
                if differs == f"looks at {comm.rank}":
                    float(model.layers[micro].weight.grad.sum())
            optimizer.step()
            optimizer.zero_grad()
        return found

    world = 2 * options.get("replicate_size", 1)
    assert ThreadWorld(world, 20).run(on_rank) == [[2 - 0.5**moved for moved in range(12)]] * world


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_freeze_different_parameters_are_told_which_on_every_rank(stage: int) -> None:
    def set_up(comm: Comm) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[comm.rank].requires_grad_(False)
        with pytest.raises(ValueError, match="on some ranks") as told:
            Engine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], stage=stage, comm=comm)
        return str(told.value)

    (told,) = set(ThreadWorld(2).run(set_up))
    assert told == (
        "0.weight, 0.bias, 1.weight and others train on some ranks and are frozen on others. Freeze the same "
        "parameters on all ranks; one may still be without use, and without a gradient, on some."
    )
