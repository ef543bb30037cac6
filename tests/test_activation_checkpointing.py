"""Blocks that recompute: the bits of no checkpointing, and the bytes that were promised."""

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import activation_jobs as jobs
from activation_jobs import Adapted, Awkward
from compare import assert_same_bits
from lightning_zero import ActivationCheckpointing, Offload, ZeroStrategy
from lightning_zero.run import recompute
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.recompute import Buffers, Recompute
from lightning_zero.shards.offload import Machine
from lightning_zero.tiers.activations import ActivationStore
from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier
from lightning_zero.tiers.stack import Stack
from lightning_zero.torch_private import tree_iter
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from models import seeded
from ranks import RankPool
from thread_world import ThreadWorld
from unit_jobs import on_engine, on_one_device, state_of

STAGES = [0, 1, 2, 3]
APART = Machine(host_is_apart=True)
HERE = Place(torch.device("cpu"))
HOST = Place(torch.device("cpu"), Tier.HOST)
KEPT = Category.ACTIVATION_CHECKPOINT

POLICIES = {
    "recompute": {},
    "offload": {"offload": True},
    "contiguous": {"contiguous": True},
    "offload contiguous": {"offload": True, "contiguous": True},
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
each_stage = pytest.mark.parametrize("stage", STAGES)


def batch(step: int = 0, rows: int = 16, width: int = 8) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


def train(model: Any, engine: Engine | None, optimizer: Any, comm: Comm | None, *, seed: int = 5) -> dict[str, Tensor]:
    """Losses, weights and buffers, and what is drawn after each step."""
    seen = {}
    if comm is None or comm.size == 1:  # ranks as threads share the random generator
        torch.manual_seed(seed)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        seen[f"loss {step}"] = loss.detach()
        if comm is None or comm.size == 1:
            seen[f"drawn {step}"] = torch.rand(1)
    return seen | state_of(model, engine)


# --- bits


@each_policy
@each_stage
def test_recomputation_changes_no_bit(stage: int, policy: dict[str, Any]) -> None:
    """Dropout masks, statistics of BatchNorm, other buffers, and the random state after each step."""
    start = seeded(Awkward)
    expected = on_one_device(start, train)
    options = {"activation_checkpointing": ActivationCheckpointing(**policy), "machine": APART}
    (found,) = on_engine(start, train, stage, world=1, **options)
    assert_same_bits(found, expected)


BESIDE: dict[str, Callable[[int], dict[str, Any]]] = {
    "nothing": lambda stage: {},
    "units": lambda stage: {"unit_classes": ("Layer",)},
    "offload": lambda stage: {"offload": Offload(optimizer="cpu")},
    "steps in backward": lambda stage: {"step_in_backward": stage > 1},
}


def on_two_ranks(stage: int, beside: str, **options: Any) -> list[dict[str, Tensor]]:
    settings = {"machine": APART, "bucket_bytes": 2**10, **BESIDE[beside](stage), **options}
    return on_engine(seeded(lambda: Awkward(dropout=0.0)), train, stage, **settings)


on_two_ranks_that_keep_all = functools.cache(on_two_ranks)  # once for all policies


@each_policy
@each_stage
def test_recomputation_changes_no_bit_on_two_ranks(stage: int, policy: dict[str, Any]) -> None:
    checkpointing = ActivationCheckpointing(**policy)
    for beside in BESIDE:
        expected = on_two_ranks_that_keep_all(stage, beside)
        for found, as_ever in zip(
            on_two_ranks(stage, beside, activation_checkpointing=checkpointing), expected, strict=True
        ):
            assert_same_bits(found, as_ever)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@each_stage
def test_a_fit_has_the_bits_of_one_that_keeps_all(stage: int, precision: str, two_ranks: RankPool) -> None:
    """Under Trainer, with dropout, clipping, accumulation and validation."""
    given = {"stage": stage, "accumulation": "local" if precision == "bf16-mixed" else "sharded"}
    expected = two_ranks.run(jobs.fit, given, precision)
    found = two_ranks.run(jobs.fit, {**given, "activation_checkpointing": {"contiguous": stage == 1}}, precision)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine.pop("state"), theirs.pop("state"))
        assert mine == theirs


def test_a_fit_equals_ddp_which_keeps_all(two_ranks: RankPool) -> None:
    found = two_ranks.run(jobs.fit, {"stage": 3, "activation_checkpointing": {"offload": True}}, "32-true")
    expected = two_ranks.run(jobs.fit, "ddp", "32-true")
    assert found[0]["drawn"] == expected[0]["drawn"]
    assert found[0]["losses"] == pytest.approx(expected[0]["losses"], rel=1e-5)  # micro-batches are averaged first


def test_r28_frozen_parts_adapters_and_tied_weights_train_as_without() -> None:
    """Beside stage 3, with any units: no `CheckpointError`, and every bit of no checkpointing."""
    for kind in ("frozen", "adapted", "tied"):
        start = seeded(lambda kind=kind: Adapted(kind))
        expected = on_one_device(start, train)
        for units in (None, ("Block",), ("Linear",)):
            for policy in ({}, {"offload": True, "contiguous": True}):
                checkpointing = ActivationCheckpointing(modules={jobs.Block}, **policy)
                options = {"activation_checkpointing": checkpointing, "machine": APART, "unit_classes": units}
                for found in on_engine(start, train, 3, **options):
                    assert_same_bits(found, {name: expected[name] for name in found})


def test_r28_partitioned_and_offloaded_activations_reproduce_dropout_masks(two_ranks: RankPool) -> None:
    """On ranks that have the same activations: two processes, gloo."""
    for offload in (False, True):
        for found, expected, kept in two_ranks.run(jobs.partitioned_with_dropout, offload):
            assert_same_bits(found, expected)
            inputs, mask, tiny = 5 * 16 * 8 * 4, 16 * 8 * 4, 0 if offload else 5 * 4
            assert kept == (inputs + mask) // 2 + tiny


class Island(nn.Module):
    """Computes in full precision inside of autocast, and then as it says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([jobs.Block(nn.Linear(8, 8)) for _ in range(2)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        for layer in self.layers if uses else ():
            with torch.autocast("cpu", enabled=False):
                x = layer(x.float())
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_block_that_reads_two_byte_weights_in_full_precision_is_recomputed_with_what_it_read(stage: int) -> None:
    """Also where the other rank's backward comes to no block, and gathers nothing."""

    def act_with(recomputes: bool) -> Any:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[dict[str, Tensor], int]:
            for step in range(2):
                with engine.forward(), torch.autocast("cpu", torch.bfloat16):
                    loss = model(batch(step + comm.rank), comm.rank == 0 or step == 0).square().mean()
                before = comm.calls["all_gather"]
                with engine.backward():
                    loss.backward()
                gathers = comm.calls["all_gather"] - before
                optimizer.step()
                optimizer.zero_grad()
            return state_of(model, engine), gathers

        checkpointing = ActivationCheckpointing() if recomputes else None
        options = {"autocast_dtype": torch.bfloat16, "activation_checkpointing": checkpointing}
        return on_engine(seeded(Island), act, stage, **options)

    for (found, gathers), (expected, _) in zip(act_with(True), act_with(False), strict=True):
        assert_same_bits(found, expected)
        assert gathers == 0 or stage == 3


# --- calls of every kind


def forwards_and_backwards(model: Any, engine: Engine | None, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
    """Two forwards before one backward, a backward for each of two forwards in the other order, a kept graph."""
    torch.manual_seed(2)
    one, two = model(batch(0)), model(batch(1))
    (one.square().mean() + two.square().mean()).backward()
    one, two = model(batch(2)), model(batch(3))
    one.square().mean().backward()
    two.square().mean().backward(retain_graph=True)
    two.mean().backward()
    optimizer.step()
    return {"drawn": torch.rand(1)} | state_of(model, engine)


@each_policy
@each_stage
def test_forwards_and_backwards_in_any_number_and_order(stage: int, policy: dict[str, Any]) -> None:
    start = seeded(Awkward)
    expected = on_one_device(start, forwards_and_backwards)
    options = {"activation_checkpointing": ActivationCheckpointing(**policy), "machine": APART}
    (found,) = on_engine(start, forwards_and_backwards, stage, world=1, **options)
    if stage >= 2:  # each backward is reduced by itself, and added to those before
        without = on_engine(start, forwards_and_backwards, stage, world=1)[0]
        assert_same_bits(found, without)
    else:
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_gradients(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        x = batch().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        assert x.grad is not None
        seen = {"slope": slope.detach(), "x": x.grad.clone()}
        optimizer.step()
        return seen | state_of(model, engine)

    start = seeded(lambda: Adapted("tied"))
    expected = on_one_device(start, act)
    for policy in POLICIES.values():
        options = {"activation_checkpointing": ActivationCheckpointing(**policy), "machine": APART}
        for found in on_engine(start, act, stage, **options):
            assert_same_bits(found, expected)


@pytest.mark.parametrize("is_second_order", [True, False])
@each_policy
@each_stage
def test_a_call_with_other_weights_is_recomputed_with_them(
    stage: int, policy: dict[str, Any], is_second_order: bool
) -> None:
    """As MAML does: a step of weights that are not the model's, inside of the forward."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, Tensor]:
        for step in range(2):
            named = {name: p for name, p in model.named_parameters() if p.requires_grad}
            loss = model(batch(step)).square().mean()
            grads = torch.autograd.grad(loss, [*named.values()], create_graph=is_second_order, allow_unused=True)
            fast = {name: p if g is None else p - 0.1 * g for (name, p), g in zip(named.items(), grads, strict=True)}
            torch.func.functional_call(model, fast, (batch(step + 5),)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, engine)

    start = seeded(lambda: Awkward(dropout=0.0))
    (found,) = on_engine(
        start, act, stage, world=1, activation_checkpointing=ActivationCheckpointing(**policy), machine=APART
    )
    assert_same_bits(found, on_one_device(start, act))


def test_other_weights_of_a_block_itself_and_of_layers_deep_inside_are_there_when_it_is_recomputed() -> None:
    start = nn.Sequential(nn.Linear(8, 8), jobs.Block(jobs.Block(nn.Linear(8, 8))))
    model = copy.deepcopy(start)
    attached(model, {nn.Linear, jobs.Block})
    assert_same_bits(*(gradients_of_doubled(one) for one in (model, start)))


def gradients_of_doubled(model: nn.Module) -> dict[str, Tensor]:
    others = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, others, (batch(),)).sum().backward()
    return {name: other.grad for name, other in others.items() if other.grad is not None}


class Inner(nn.Module):
    """Takes a gradient inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())])

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            probe = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.layers[0](probe).sum(), probe)
        return self.layers[0](x) + slope


def test_a_block_may_take_gradients_inside_its_forward() -> None:
    start = seeded(lambda: nn.ModuleList([nn.Sequential(nn.ModuleList([Inner()])[0], nn.Linear(8, 8))])[0])
    expected = on_one_device(start, train)
    options = {"activation_checkpointing": ActivationCheckpointing(modules="Inner")}
    assert_same_bits(on_engine(start, train, 2, world=1, **options)[0], expected)


def attached(model: nn.Module, modules: Any = "auto", comm: Comm | None = None, **kwargs: Any) -> Recompute:
    """Blocks of a model that recompute, without an engine."""
    rests = HOST if kwargs.pop("offload", False) else HERE
    recompute = Recompute(model, modules, ActivationStore(Ledger(), HERE, rests, comm or LocalComm(), **kwargs))
    recompute.install()
    return recompute


def kept_in(recompute: Recompute, tier: Tier = Tier.DEVICE) -> int:
    return recompute.store.ledger.live_in[KEPT, tier]


class Nested(nn.Module):
    """A list in which each element has a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList(
            [nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)) for _ in range(2)]
        )
        self.blocks = nn.ModuleList([jobs.Block(jobs.Block(nn.Linear(8, 8))) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("modules", ["auto", {jobs.Block}, "Block", ["activation_jobs.Block"]])
def test_of_blocks_inside_one_another_the_outermost_recompute(modules: Any) -> None:
    model = seeded(Nested)
    recompute = attached(model, modules)
    assert list(recompute.chosen.called.values()) == [f"blocks.{at}" for at in range(3)]
    model(batch().requires_grad_()).sum()
    graph = model(batch())
    assert kept_in(recompute) == 3 * batch().nbytes
    del graph
    assert kept_in(recompute) == 0


def test_nothing_is_kept_where_no_gradients_are_recorded() -> None:
    model = seeded(Nested)
    recompute = attached(model)
    with torch.no_grad():
        graphs = [model(batch())]
    model.requires_grad_(False)
    graphs.append(model(batch()))
    assert recompute.store.ledger.peak[KEPT] == 0
    model.requires_grad_(True).eval()
    graphs.append(model(batch()))
    assert kept_in(recompute) > 0


class Sums(nn.Module):
    """Of all tensors that it is given; it may edit one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.edits: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.edits is not None:
            self.edits.mul_(2)
        return torch.tanh(sum(leaf for leaf in tree_iter((args, kwargs))) * self.weight)


PLACES: dict[str, Callable[[Tensor], Any]] = {
    "argument": lambda x: ((x,), {}),
    "keyword argument": lambda x: ((batch(),), {"more": x}),
    "inside of one": lambda x: ((batch(),), {"more": {"x": [x]}}),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_frozen_block_recomputes_if_anything_it_is_given_has_gradients(place: str) -> None:
    block = Sums().requires_grad_(False)
    recompute = attached(nn.ModuleList([block]), "Sums")
    args, kwargs = PLACES[place](batch().requires_grad_())
    graph = block(*args, **kwargs)
    assert kept_in(recompute) > 0
    del graph


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_inside_transforms_of_torch_which_allow_no_hooks_blocks_do_not_recompute(transform: Any) -> None:
    plain = seeded(Nested)
    model = copy.deepcopy(plain)
    recompute = attached(model)
    x = batch(rows=2)
    found, expected = (transform(lambda x, model=one: model(x).square().sum())(x) for one in (model, plain))
    assert torch.equal(found, expected)
    assert recompute.store.ledger.peak[KEPT] == 0


def test_only_the_store_keeps_the_inputs_of_blocks() -> None:
    model = seeded(Nested)
    seen: list[Any] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0].untyped_storage())))
    recompute = attached(model, offload=True)
    loss = model(batch() + 0).sum()
    assert [storage() for storage in seen] == [None] * 3
    assert kept_in(recompute, Tier.HOST) == 3 * batch().nbytes
    loss.backward()
    gc.collect()
    assert kept_in(recompute, Tier.HOST) == kept_in(recompute) == 0


def test_a_module_is_the_users_again_in_the_end() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> None:
        again = pickle.loads(pickle.dumps(engine.module.layers[0])), copy.deepcopy(model).layers[0]
        assert all(layer._compiled_call_impl is None for layer in again)
        engine.close()
        assert all(layer._compiled_call_impl is None for layer in model.layers)

    on_engine(seeded(Awkward), act, 2, world=1, activation_checkpointing=ActivationCheckpointing())


# --- what would otherwise be silently wrong


@each_policy
def test_buffers_change_once_and_a_recomputation_sees_them_as_they_were(policy: dict[str, Any]) -> None:
    start = seeded(lambda: Awkward(dropout=0.0))
    plain, model = copy.deepcopy(start), copy.deepcopy(start)
    attached(model, **policy)
    for step in range(2):
        for one in (plain, model):
            one(batch(step)).sum().backward()
    assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))
    grads = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    assert_same_bits({name: dict(model.named_parameters())[name].grad for name in grads}, grads)


class Counts(nn.Module):
    """A layer that goes by a buffer, which it changes: in place, where torch counts it or not, or by another; or its
    first call makes it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how
        if how != "registered":
            self.register_buffer("calls", None if how == "made" else torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        before = getattr(self, "calls", None)
        calls = torch.ones(()) if before is None else before.clone()
        if self.how == "in place":
            self.calls += 1
        elif self.how == "in place, uncounted":
            self.calls.data += 1
        else:
            self.register_buffer("calls", calls + 1)
        return torch.tanh(self.layer(x) * calls)


@pytest.mark.parametrize("how", ["in place", "in place, uncounted", "another", "made", "registered"])
def test_each_of_two_backwards_of_a_graph_recomputes_with_the_buffers_of_its_forward(how: str) -> None:
    start = nn.ModuleList([jobs.Block(seeded(lambda: Counts(how)))])
    model = copy.deepcopy(start)
    attached(model)
    output = model[0](batch()).sum()
    start[0](batch()).sum().backward()
    for _ in range(2):
        model.zero_grad()
        output.backward(retain_graph=True)
        assert_same_bits(gradients(model), gradients(start))


def with_scripted() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(8), torch.jit.script(nn.Linear(8, 8))) for _ in range(2)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_blocks_with_scripted_modules_recompute() -> None:
    """torch lets parameters and buffers of these be neither added nor removed, and none of its errors pass through."""
    plain, model = seeded(with_scripted), seeded(with_scripted)
    attached(model, modules={nn.Sequential})
    for one in (plain, model):
        one(batch()).square().sum().backward()
    assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert_same_bits(gradients(model), gradients(plain))


def test_of_buffers_only_those_that_a_call_has_changed_are_kept_until_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks and tables of positions are large."""
    made: list[Buffers] = []
    monkeypatch.setattr(recompute, "Buffers", lambda module: made.append(Buffers(module)) or made[-1])
    layers = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8).eval(), Counts("in place"))
    model = nn.ModuleList([jobs.Block(layers)])
    attached(model)
    graph = model[0](batch())
    (buffers,) = made
    changed = [*layers[0].buffers(), *layers[2].buffers()]
    assert sum(copied.nbytes for copied in buffers._values.values()) == sum(buffer.nbytes for buffer in changed)
    del graph


def test_torchs_own_checkpoint_updates_batch_norm_twice() -> None:
    """What we do better; should this fail, torch does it too."""
    layer = nn.BatchNorm1d(8)
    checkpoint(nn.Sequential(layer, nn.Tanh()), batch().requires_grad_(), use_reentrant=False).sum().backward()
    assert layer.num_batches_tracked == 2


class Asked(nn.Module):
    """Checkpoints for itself, in the manner of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self._gradient_checkpointing_func(self.layer.__call__, x)


def test_what_checkpoints_for_itself_uses_our_store_and_not_inside_of_a_block() -> None:
    model = nn.ModuleDict({"block": nn.ModuleList([jobs.Block(Asked())]), "alone": Asked()})
    recompute = attached(model)
    given = batch().requires_grad_()
    losses = [model["block"][0](given).sum(), model["alone"](given * 1).sum()]
    kept = kept_in(recompute)
    assert kept == 2 * given.nbytes
    sum(losses).backward()
    recompute.remove()
    assert isinstance(model["alone"]._gradient_checkpointing_func, functools.partial)


def test_what_has_been_told_to_checkpoint_no_more_does_not() -> None:
    asked = Asked()
    asked.gradient_checkpointing = False
    recompute = attached(nn.ModuleDict({"block": nn.ModuleList([jobs.Block(nn.Linear(8, 8))]), "alone": asked}))
    assert recompute.chosen.asked == {}


def test_what_checkpoints_for_itself_may_bind_arguments_and_call_layers_that_are_elsewhere() -> None:
    seen = []

    class Elsewhere(nn.BatchNorm1d):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            seen.append((args[1:], kwargs))
            return super().forward(args[0])

    layer, asked = Elsewhere(8), Asked()
    attached(nn.ModuleDict({"alone": asked, "block": nn.ModuleList([nn.Linear(8, 8)])}))
    bound = functools.partial(layer.__call__, batch(), 1, a=1, b=1)
    asked._gradient_checkpointing_func(bound, 2, b=2).sum().backward()
    assert seen == [((1, 2), {"a": 1, "b": 2})] * 2
    assert layer.num_batches_tracked == 1


@each_policy
def test_what_a_recomputation_was_given_may_be_held_on_to(policy: dict[str, Any]) -> None:
    model = seeded(Nested)
    given: list[Tensor] = []
    for block in model.blocks:
        block.norm.register_forward_pre_hook(lambda _, args: given.append(args[0].detach()))
    attached(model, **policy)
    values = []
    for step in range(3):
        loss = model(batch(step)).sum()
        values += [tensor.clone() for tensor in given[len(values) :]]
        loss.backward()
        values += [tensor.clone() for tensor in given[len(values) :]]
    assert len(given) == 3 * 2 * 3
    assert [torch.equal(tensor, value) for tensor, value in zip(given, values, strict=True)] == [True] * len(given)


class Edits(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([jobs.Block(nn.Linear(8, 8)) for _ in range(2)])
        if inside:
            self.layers[0].norm = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        return self.layers[1](self.layers[0](x)) + (0 if isinstance(self.layers[0].norm, nn.ReLU) else x.mul_(2))


@each_policy
def test_a_block_that_edits_its_input_in_place_is_an_error(policy: dict[str, Any]) -> None:
    model = Edits(inside=True)
    attached(model, **policy)
    with pytest.raises(RuntimeError, match=r"'layers.0' edits its input in place"):
        model(batch())


@pytest.mark.parametrize("place", PLACES)
def test_an_edit_of_anything_that_a_block_is_given_is_an_error(place: str) -> None:
    block, x = Sums(), batch()
    attached(nn.ModuleList([block]), "Sums")
    block.edits = x
    args, kwargs = PLACES[place](x)
    with pytest.raises(RuntimeError, match=r"'0' edits its input in place"):
        block(*args, **kwargs)


@each_policy
def test_an_input_that_is_edited_later_is_an_error_or_was_copied(policy: dict[str, Any]) -> None:
    start = Edits(inside=False)
    model = copy.deepcopy(start)
    attached(model, **policy)
    loss = model(batch()).sum()
    if policy:
        loss.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            start(batch()).sum().backward()  # autograd copies nothing
    else:
        with pytest.raises(
            RuntimeError, match=r"inplace operation: an input of layers.0 \(argument 0\).* at version 1; expected"
        ):
            loss.backward()


# --- tensors of every kind


class Recorded(nn.Module):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.child = nn.Identity()
        self.given: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.given.append((args, kwargs))
        return (self.child(args[0]).float().sum() * self.weight).exp()


LARGE = torch.arange(4 * 6 * 40, dtype=torch.float32).view(4, 6, 40)
TENSORS = {
    "plain": LARGE.clone(),
    "transposed": LARGE.transpose(0, 2),
    "channels last": LARGE.view(4, 6, 8, 5).contiguous(memory_format=torch.channels_last),
    "slice": LARGE[:, 1:5, ::2],
    "view with an offset": LARGE[1:],
    "expanded": LARGE[:1].expand(4, 6, 40),
    "overlapping": LARGE.view(-1).unfold(0, 10, 3),
    "whole numbers": torch.arange(300),
    "truth values": torch.arange(600) % 3 == 0,
    "bfloat16": LARGE.bfloat16(),
    "complex": torch.complex(LARGE, LARGE),
    "conjugate": torch.complex(LARGE, LARGE).conj(),
    "negative": torch.complex(LARGE, LARGE).conj().imag,
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
    "sparse": torch.eye(20).to_sparse(),
    "of no storage": torch.ones(20, 20, device="meta"),
    "parameter": nn.Parameter(LARGE.clone()),
}


@pytest.mark.parametrize("world", [1, 3])
@each_policy
@pytest.mark.parametrize("name", TENSORS)
def test_any_tensor_comes_back_as_it_was(name: str, policy: dict[str, Any], world: int) -> None:
    tensor = TENSORS[name]

    def rank_main(comm: Comm) -> None:
        settings = {**policy}
        store = ActivationStore(Ledger(), HERE, HOST if settings.pop("offload", 0) else HERE, comm, **settings)
        for requires_grad in {False, tensor.is_floating_point() and tensor.layout == torch.strided}:
            given = tensor if isinstance(tensor, nn.Parameter) else tensor.detach().requires_grad_(requires_grad)
            kept = store.keep("block", ((given, [given, "x"]), {"key": None}))
            for _ in range(2):
                (found, (again, word)), other = kept.fetch()
                assert found is again
                assert (word, other) == ("x", {"key": None})
                assert (found.shape, found.dtype, found.layout) == (given.shape, given.dtype, given.layout)
                assert found.requires_grad == given.requires_grad
                if tensor.layout == torch.strided and not tensor.is_meta:
                    assert found.stride() == given.stride()
                    assert torch.equal(found, given)
                assert (found is given) == isinstance(given, nn.Parameter) or name in (
                    "conjugate",
                    "negative",
                    "sparse",
                    "of no storage",
                )

    if world == 1:
        rank_main(LocalComm())
    else:
        ThreadWorld(world).run(rank_main)


@pytest.mark.parametrize("offload", [False, True])
def test_a_tensor_made_of_others_comes_back_as_it_was(offload: bool, two_ranks: RankPool) -> None:
    two_ranks.run(jobs.tensors_made_of_others, offload)


@pytest.mark.parametrize("offload", [False, True])
def test_each_part_of_a_tensor_made_of_others_is_divided_only_if_ranks_have_that_part_alike(offload: bool) -> None:
    def rank_main(comm: Comm) -> None:
        store = ActivationStore(Ledger(), HERE, HOST if offload else HERE, comm)
        given = TwoTensor(batch(), batch(1 + comm.rank))
        (found,) = store.keep("block", (given,)).fetch()
        assert torch.equal(found.a, given.a)
        assert torch.equal(found.b, given.b)

    ThreadWorld(2).run(rank_main)


def test_of_what_is_made_of_others_the_next_checkpoint_is_brought_back_in_time_too() -> None:
    ledger = Ledger()
    store = ActivationStore(ledger, HERE, HOST, LocalComm())
    first, second = (store.keep("block", (TwoTensor(batch(), batch(1)),)) for _ in range(2))
    (found,) = second.fetch()
    assert ledger.live[Category.GATHERED] == 2 * 2 * batch().nbytes
    del first, found


@each_policy
def test_what_a_collective_is_still_writing_is_kept_once_it_is_there(
    policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, arriving = batch(1), torch.zeros_like(batch())
    monkeypatch.setattr(AsyncCollectiveTensor, "trigger_wait", lambda one: one.elem.copy_(sent))
    settings = {**policy}
    store = ActivationStore(Ledger(), HERE, HOST if settings.pop("offload", 0) else HERE, LocalComm(), **settings)
    kept = store.keep("block", (AsyncCollectiveTensor(arriving),))
    assert torch.equal(arriving, sent)
    (found,) = kept.fetch()
    assert type(found) is Tensor
    assert torch.equal(found, sent)


def test_what_is_tiny_stays_where_it_is() -> None:
    ledger = Ledger()
    store = ActivationStore(ledger, HERE, HOST, LocalComm(), contiguous=True)
    kept = store.keep("block", (torch.ones(64), torch.ones(65)))
    assert (ledger.live_in[KEPT, Tier.DEVICE], ledger.live_in[KEPT, Tier.HOST]) == (256, 260)
    del kept


def test_what_several_blocks_are_given_is_kept_once_and_brought_back_once() -> None:
    ledger = Ledger()
    store = ActivationStore(ledger, HERE, HOST, LocalComm())
    mask = batch()
    calls = [store.keep("block", ((batch(at), mask), {})) for at in range(3)]
    assert ledger.live_in[KEPT, Tier.HOST] == 4 * mask.nbytes
    brought = [call.fetch()[0][1] for call in calls[::-1]]
    assert len({tensor.data_ptr() for tensor in brought}) == 1
    assert ledger.live[Category.GATHERED] == mask.nbytes
    mask.add_(1)
    (_, edited), _ = store.keep("block", ((batch(), mask), {})).fetch()
    assert torch.equal(edited, mask)
    assert torch.equal(brought[0] + 1, mask)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "edited": lambda tensor: tensor.add_(1),
    "of other data": lambda tensor: setattr(tensor, "data", tensor + 1),
    "with gradients": lambda tensor: tensor.requires_grad_(),
}


@each_policy
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_has_changed_between_two_calls_is_kept_as_each_was_given_it(
    change: str, policy: dict[str, Any]
) -> None:
    if change == "edited" and not policy:
        return  # it is an error
    settings = {**policy}
    store = ActivationStore(Ledger(), HERE, HOST if settings.pop("offload", 0) else HERE, LocalComm(), **settings)
    tensor = batch()
    first, before = store.keep("block", (tensor,)), tensor.clone()
    CHANGES[change](tensor)
    second = store.keep("block", (tensor,))
    ((one,), (other,)) = first.fetch(), second.fetch()
    assert torch.equal(one, before)
    assert torch.equal(other, tensor)
    assert (one.requires_grad, other.requires_grad) == (False, tensor.requires_grad)


def test_views_of_one_tensor_are_booked_once_where_they_are_no_copies() -> None:
    ledger, tensor = Ledger(), batch()
    kept = ActivationStore(ledger, HERE, HERE, LocalComm()).keep("block", (tensor[:8], tensor[8:], tensor))
    assert ledger.live[KEPT] == tensor.nbytes
    del kept


@each_policy
def test_a_tensor_of_inference_mode_comes_back(policy: dict[str, Any]) -> None:
    block, plain = Sums(), Sums()
    attached(nn.ModuleList([block]), "Sums", **policy)
    with torch.inference_mode():
        given = batch(1)
    for one in (block, plain):
        one(batch(), more=given).sum().backward()
    assert_same_bits(gradients(block), gradients(plain))


# --- bytes


def test_what_is_kept_is_in_the_books_by_tier() -> None:
    model = seeded(Nested)
    size = batch().nbytes
    for policy, device, host in (({}, 3, 0), ({"offload": True}, 0, 3), ({"contiguous": True}, 3, 0)):
        recompute = attached(copy.deepcopy(model), **policy)
        block_model = copy.deepcopy(model)
        recompute.remove()
        recompute = attached(block_model, **policy)
        loss = block_model(batch()).sum()
        assert (kept_in(recompute), kept_in(recompute, Tier.HOST)) == (device * size, host * size)
        loss.backward()
        assert recompute.store.ledger.live[KEPT] == 0


def test_brought_back_are_one_checkpoint_and_the_next() -> None:
    model = seeded(Nested)
    recompute = attached(model, offload=True)
    model(batch()).sum().backward()
    ledger = recompute.store.ledger
    assert ledger.peak[Category.GATHERED] == 2 * batch().nbytes
    assert ledger.live[Category.GATHERED] == 0


@pytest.mark.parametrize("offload", [False, True])
def test_the_array_is_allocated_once_and_filled_again(offload: bool) -> None:
    model = seeded(Nested)
    recompute = attached(model, offload=offload, contiguous=True)
    tier = Tier.HOST if offload else Tier.DEVICE
    allocated = []
    for step in range(4):
        loss = model(batch(step)).sum()
        room: Any = recompute.store.room
        allocated.append(room._array.data_ptr())
        loss.backward()
        assert room._ends == []
        assert kept_in(recompute, tier) == (3 * batch().nbytes if step else 0)
    assert allocated[0] == 0  # an empty tensor has no memory
    assert len(set(allocated[1:])) == 1
    model(batch(0, rows=32)).sum().backward()  # needs more than it has
    model(batch(0, rows=32)).sum().backward()
    assert kept_in(recompute, tier) == 6 * batch().nbytes


def test_regions_that_are_given_back_in_another_order_are_all_taken_again() -> None:
    stack = Stack(Ledger(), HERE, contiguous=True)
    regions = [stack.take(64) for _ in range(3)]
    regions.clear()  # the first step shows how much is needed
    regions = [stack.take(64) for _ in range(3)]
    starts = [region.memory.data_ptr() for region in regions]
    for _ in range(3):
        del regions[0]
    assert stack.take(64).memory.data_ptr() == starts[0]


def test_regions_of_any_size_lie_aligned_in_one_array_which_is_never_there_twice() -> None:
    ledger = Ledger()
    stack = Stack(ledger, HERE, contiguous=True)
    for nbytes in (7, 7, 1000, 1000):
        regions = [stack.take(nbytes) for _ in range(3)]
        starts = [region.memory.data_ptr() - regions[0].memory.data_ptr() for region in regions]
        del regions
    assert starts == [0, 1024, 2048]  # multiples of 64
    assert ledger.live[KEPT] == 3 * 1024
    assert ledger.peak[KEPT] == 3 * 64 + 3 * 1000  # while they did not fit into the first array


def test_what_is_booked_already_is_not_booked_as_kept() -> None:
    ledger, tensor = Ledger(), batch()
    ledger.book_tensor(Category.PARAMETER, tensor)
    kept = ActivationStore(ledger, HERE, HERE, LocalComm()).keep("block", ((tensor, batch()),))
    assert ledger.live[KEPT] == batch().nbytes
    del kept
    assert ledger.live[KEPT] == 0


def test_what_was_copied_from_a_device_is_let_go_of_when_the_call_is_over() -> None:
    store = ActivationStore(Ledger(), HERE, HOST, LocalComm())
    store._aside = MagicMock()
    tensor = batch()
    held = weakref.ref(tensor.untyped_storage())
    kept = store.keep("block", (tensor,))
    store.join()
    del tensor
    assert held() is None
    del kept


def test_ranks_ask_once_whether_they_have_an_argument_alike() -> None:
    def rank_main(comm: Comm) -> list[int]:
        model = seeded(Nested)
        recompute = attached(model, comm=comm)
        asked = []
        for step in range(3):
            model(batch(step)).sum().backward()
            asked.append(comm._issued["object same activations"])
        recompute.remove()
        return asked

    assert ThreadWorld(2).run(rank_main) == [[3, 3, 3]] * 2  # of its blocks


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Parted(NamedTuple):
    device: int
    host: int
    sent: int
    gathers: int
    gradients: dict[str, Tensor]


@functools.cache
def parted(world: int, offload: bool, contiguous: bool) -> list[Parted]:
    """Blocks on ranks that have the same activations, as in a tensor-parallel group."""

    def rank_main(comm: Comm) -> Parted:
        model = seeded(Nested)
        recompute = attached(model, comm=comm, offload=offload, contiguous=contiguous)
        loss = model(batch(rows=24)).sum()
        device, host = kept_in(recompute), kept_in(recompute, Tier.HOST)
        assert comm.calls["all_gather"] == 0
        loss.backward()
        return Parted(device, host, comm.bytes_sent["all_gather"], comm.calls["all_gather"], gradients(model))

    return ThreadWorld(world).run(rank_main)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_pa_divides_checkpoints_by_exactly_the_degree_for_one_all_gather_each(
    world: int, offload: bool, contiguous: bool
) -> None:
    """ZeRO, sections 6.1 and 8: of A bytes each rank keeps A / M, and sends (M - 1) A / M in one all-gather."""
    plain = seeded(Nested)
    plain(batch(rows=24)).sum().backward()
    checkpoints, size = 3, batch(rows=24).nbytes
    for found in parted(world, offload, contiguous):
        rests = checkpoints * size // world
        assert (found.device, found.host) == ((0, rests) if offload else (rests, 0))
        assert found.sent == checkpoints * size * (world - 1) // world
        assert found.gathers == checkpoints
        assert_same_bits(found.gradients, gradients(plain))


@pytest.mark.parametrize("offload", [False, True])
def test_pa_divides_nothing_that_ranks_have_differently(offload: bool) -> None:
    """Sequence parallelism has divided activations already."""

    def rank_main(comm: Comm) -> tuple[list[int], int, dict[str, Tensor]]:
        model = seeded(Nested)
        recompute = attached(model, comm=comm, offload=offload)
        loss = model(batch(comm.rank)).sum()
        kept = [kept_in(recompute, tier) for tier in (Tier.DEVICE, Tier.HOST)]
        loss.backward()
        return kept, comm.calls["all_gather"], gradients(model)

    whole = 3 * batch().nbytes
    for rank, (kept, gathers, found) in enumerate(ThreadWorld(2).run(rank_main)):
        plain = seeded(Nested)
        plain(batch(rank)).sum().backward()
        assert (kept, gathers) == ([0, whole] if offload else [whole, 0], 0)
        assert_same_bits(found, gradients(plain))


def test_what_ranks_have_differently_on_the_device_is_no_copy() -> None:
    def rank_main(comm: Comm) -> bool:
        given = batch(comm.rank)
        ((found,), _) = ActivationStore(Ledger(), HERE, HERE, comm).keep("block", ((given,), {})).fetch()
        return found.data_ptr() == given.data_ptr()

    assert ThreadWorld(2).run(rank_main) == [True, True]


def test_recomputation_gathers_as_torchs_own_checkpoint_at_stage_3() -> None:
    def count(checkpointing: ActivationCheckpointing | None, units: Any) -> tuple[int, int]:
        def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[int, int]:
            for step in range(3):
                comm.calls.clear()
                comm.bytes_sent.clear()
                hidden = batch(step)
                for block in model.blocks:
                    hidden = block(hidden) if checkpointing else checkpoint(block, hidden, use_reentrant=False)
                hidden.sum().backward()
                optimizer.step()
            return comm.calls["all_gather"], comm.bytes_sent["all_gather"]

        options: dict[str, Any] = {"activation_checkpointing": checkpointing, "unit_classes": units}
        return on_engine(seeded(lambda: Adapted("plain")), act, 3, **options)[0]

    for units in (None, ("Block",), ("Linear",)):
        assert count(ActivationCheckpointing(), units) == count(None, units)


def test_the_report_tells_the_most_that_a_step_has_kept() -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> dict[str, int]:
        model(batch()).sum().backward()
        return engine.bytes_by_category()

    options = {"activation_checkpointing": ActivationCheckpointing(offload=True)}
    size = 4 * batch().nbytes  # on a CPU the host is where things are
    assert on_engine(seeded(lambda: Adapted("plain")), act, 2, **options)[0]["activation checkpoint"] == size
    (report, _) = on_engine(seeded(lambda: Adapted("plain")), act, 2, machine=APART, **options)
    assert (report["activation checkpoint"], report["activation checkpoint (host)"]) == (0, size)


@pytest.mark.parametrize("contiguous", [False, True])
def test_between_steps_an_engine_has_the_array_of_contiguous_checkpoints_and_no_other(contiguous: bool) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> int:
        for _ in range(2):
            model(batch()).sum().backward()
        return engine.ledger.live[KEPT]

    options = {"activation_checkpointing": ActivationCheckpointing(contiguous=contiguous)}
    found = on_engine(seeded(lambda: Adapted("plain")), act, 2, world=1, **options)
    assert found == [4 * batch().nbytes if contiguous else 0]


# --- models of transformers, which have a checkpointing of their own


@pytest.mark.parametrize("is_on", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("name", jobs.TRANSFORMERS)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_of_transformers_recomputes_with_our_store(stage: int, name: str, is_on: bool) -> None:
    """Whether its own `gradient_checkpointing_enable` has been called or not."""
    start = seeded(jobs.TRANSFORMERS[name]).train()
    expected = on_one_device(start, jobs.train_on_tokens)
    if is_on:
        start.gradient_checkpointing_enable({"use_reentrant": False})

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> tuple[dict[str, Tensor], Any]:
        seen = jobs.train_on_tokens(model, engine, optimizer, comm)
        kept = {tier: engine.ledger.peak_in[KEPT, tier] for tier in (Tier.HOST, Tier.DEVICE)}
        layer = list(engine.parts.recompute.chosen.asked)[-1]
        copied = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
        weight = torch.full((2,), 3.0, requires_grad=True)
        copied._gradient_checkpointing_func(weight.mul, torch.ones(2)).sum().backward()  # the input has no gradient
        assert torch.equal(weight.grad, torch.ones(2))
        engine.close()
        assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules()) == is_on
        return seen, kept

    options = {"activation_checkpointing": ActivationCheckpointing(offload=True), "machine": APART}
    ((found, kept),) = on_engine(start, act, stage, world=1, **options)
    assert_same_bits(found, expected)
    assert kept[Tier.HOST] >= jobs.LAYERS * jobs.HIDDEN_BYTES
    assert kept[Tier.DEVICE] < jobs.HIDDEN_BYTES / 10  # what is tiny


# --- torch.compile


def compiled(model: Any, how: str) -> Any:
    for at in range(len(model.blocks)):
        if how == "in place":
            model.blocks[at].compile(backend="aot_eager")
        elif how == "wrapped":
            model.blocks[at] = torch.compile(model.blocks[at], backend="aot_eager")
    return torch.compile(model, backend="aot_eager") if how == "whole" else model


@pytest.mark.usefixtures("ranks_in_turn")
@pytest.mark.parametrize("modules", ["auto", "Block"])
@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_blocks_recompute(stage: int, how: str, modules: str) -> None:
    def normed() -> nn.Module:
        model = Adapted("plain")
        for block in model.blocks:
            block.norm = nn.BatchNorm1d(8)
        return model

    def names_as_written(seen: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace("_orig_mod.", ""): value for name, value in seen.items()}

    start = seeded(normed)
    expected = on_one_device(start, lambda model, *rest: train(compiled(model, how), *rest))
    checkpointing = ActivationCheckpointing(modules=modules, offload=True)
    options = {"activation_checkpointing": checkpointing, "machine": APART}
    for found in on_engine(start, train, stage, prepare=lambda model: compiled(model, how), **options):
        assert_same_bits(found, {name: names_as_written(expected)[name] for name in found})


def test_blocks_inside_of_what_is_compiled_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'blocks.0' \(Block\) lies inside of what torch.compile traces.*block.compile"
    ):
        attached(compiled(Adapted("plain"), "whole"))


def test_what_is_compiled_and_checkpoints_for_itself_is_refused() -> None:
    model = nn.ModuleDict({"block": nn.ModuleList([jobs.Block(nn.Linear(8, 8))]), "alone": Asked()})
    model["alone"].compile(backend="eager")
    with pytest.raises(
        ValueError, match=r"'alone' \(Asked\) lies inside .*without gradient checkpointing of their own"
    ):
        attached(model)


def test_a_layer_of_transformers_that_is_compiled_is_called_and_not_asked() -> None:
    """Asked, it would checkpoint within what is traced."""
    kind = type("GradientCheckpointingLayer", (jobs.Block,), {})
    model = nn.ModuleList([kind(nn.Linear(8, 8)) for _ in range(2)])
    model[0].compile(backend="eager")
    chosen = attached(model, {kind}).chosen
    assert (chosen.called, chosen.asked) == ({model[0]: "0"}, {model[1]: "1"})


# --- bad input


def test_modules_that_are_not_in_the_model_are_refused_at_set_up() -> None:
    with pytest.raises(
        ValueError, match=r"activation_checkpointing: modules='Blok': the model has no such module. It has"
    ):
        attached(Adapted("plain"), "Blok")
    with pytest.raises(ValueError, match=r"modules='auto' finds no block inside the model.*Name the classes"):
        attached(nn.Linear(2, 2))
    model = Adapted("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = Options(activation_checkpointing=ActivationCheckpointing(modules=[nn.LSTM]))
    with pytest.raises(ValueError, match="LSTM"):
        Engine(model, [optimizer], stage=3, comm=LocalComm(), options=options)
    Engine(model, [optimizer], stage=3, comm=LocalComm()).close()  # nothing has been done to it


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"modules": 3}, TypeError, "must be 'auto'"),
        ({"modules": "no.such.Block"}, ValueError, "'no.such.Block', which cannot be imported"),
        ({"modules": [int]}, TypeError, "not a torch.nn.Module class"),
        ({"offload": "cpu"}, TypeError, r"ActivationCheckpointing\(offload='cpu'\) is neither True nor False"),
        ({"partition": True}, ValueError, "no such group: .* Write offload=True in place of partition=True"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(given: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        ZeroStrategy(activation_checkpointing=given)
