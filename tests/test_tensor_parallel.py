"""Tensor parallelism composed with every stage, on real ranks: 1 x 2 and 2 x 2, against one process on the batch of all
data-parallel ranks."""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensor_jobs
from compare import assert_same_bits
from cover import name_of, pairwise
from lightning_zero.tiers.ledger import Tier
from models import Maker, seeded, sgd
from ranks import RankPool
from reference import Run

STAGES = [0, 1, 2, 3]
TENSOR = 2

Pools = Callable[[int], RankPool]


@functools.cache
def expected(make: Maker, data: int, **how: Any) -> Run:
    return tensor_jobs.reference(make, data, **how)


def adam(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
    """A large epsilon: gradients that are rounding alone must not become steps."""
    return torch.optim.AdamW(tensor_jobs.trainable(model), lr=1e-2, eps=1e-3), None


def assert_alike(found: Run, wanted: Run) -> None:
    for mine, theirs in zip(found.losses, wanted.losses, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert found.weights.keys() == wanted.weights.keys()
    for name, value in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert found.optimizer["state"].keys() == wanted.optimizer["state"].keys()
    for index, state in wanted.optimizer["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(found.optimizer["state"][index][name], value, rtol=1e-5, atol=1e-6)


HOWS: list[dict[str, Any]] = [
    {},
    {"accumulate": 2},
    {"clip": "norm"},
    {"clip": "value", "accumulate": 2},
]


# Every stage meets every way to train. Where the norms' gradients are summed (inside of a module, by DTensor) and how
# many data-parallel ranks there are (how long a shard is) each act on either alone.
@pytest.mark.parametrize(
    ("stage", "how", "sequence", "world"), pairwise(STAGES, HOWS, [False, True], [2, 4]), ids=name_of
)
def test_stages_equal_one_process_to_rounding_pairwise(
    stage: int, how: dict[str, Any], sequence: bool, world: int, pool_of: Pools
) -> None:
    runs = pool_of(world).run(tensor_jobs.train, sgd, TENSOR, stage, sequence=sequence, **tensor_jobs.UNITS, **how)
    wanted = expected(sgd, world // TENSOR, **how)
    assert_alike(runs[0], wanted)
    assert runs[0].grad_norms == pytest.approx(wanted.grad_norms, rel=1e-6)
    for run in runs[1:]:
        assert run.grad_norms == runs[0].grad_norms
        assert all(torch.equal(run.weights[name], value) for name, value in runs[0].weights.items())


OPTIONS: list[dict[str, Any]] = [
    {"replicate_size": 2},
    {"accumulation": "local", "accumulate": 2},
    {"overlap": False, "bucket_bytes": 256},
    {"offload": {"optimizer": "cpu"}},
    {"offload": {"optimizer": "nvme"}},
    {"step_in_backward": True},
    {"late_publish_bytes": 0},
    {"recomputes": True},
    {"unit_classes": None},
    {"unit_classes": None, "merges_units": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
@pytest.mark.parametrize("stage", [2, 3])
def test_options_change_nothing(stage: int, options: dict[str, Any], pool_of: Pools, tmp_path: Path) -> None:
    options = {**tensor_jobs.UNITS, "folder": tmp_path, **options}
    run, *_ = pool_of(4).run(tensor_jobs.train, adam, TENSOR, stage, sequence=True, **options)
    assert_alike(run, expected(adam, 2, accumulate=options.get("accumulate", 1)))


@pytest.mark.parametrize("options", [{}, {"step_in_backward": True}, {"offload": {"optimizer": "cpu"}}], ids=name_of)
@pytest.mark.parametrize("stage", [2, 3])
def test_options_change_nothing_where_no_data_is_parallel(
    stage: int, options: dict[str, Any], two_ranks: RankPool
) -> None:
    run, *_ = two_ranks.run(tensor_jobs.train, adam, TENSOR, stage, sequence=True, **tensor_jobs.UNITS, **options)
    assert_alike(run, expected(adam, 1))


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    """Two replicas of two shards of two tensor-parallel ranks. With four ranks, replicas would hold whole parts, and be
    one group with those that would divide them."""
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_of_what_shards_and_tensor_parallel_ranks_divide_train_as_one_process(
    stage: int, eight_ranks: RankPool
) -> None:
    how: dict[str, Any] = {"accumulate": 2, "clip": "norm"}
    runs = eight_ranks.run(
        tensor_jobs.train, sgd, TENSOR, stage, sequence=True, replicate_size=2, **tensor_jobs.UNITS, **how
    )
    assert_alike(runs[0], expected(sgd, 4, **how))
    for run in runs[1:]:
        assert all(torch.equal(run.weights[name], value) for name, value in runs[0].weights.items())


def test_compiled_blocks_train_as_eager_ones(two_ranks: RankPool) -> None:
    """At stage 3; `test_pairs.py` has stage 2. Parameters lie one behind the other in one array."""
    run, *_ = two_ranks.run(tensor_jobs.train, adam, TENSOR, 3, compiles=True, **tensor_jobs.UNITS)
    assert_alike(run, expected(adam, 1))


@pytest.mark.parametrize("kernel", ["foreach", "fused"])
def test_kernels_of_optimizers_see_plain_pieces(kernel: str, two_ranks: RankPool) -> None:
    run, *_ = two_ranks.run(tensor_jobs.train, functools.partial(with_kernel, kernel), TENSOR, 2)
    assert_alike(run, expected(adam, 1))


def with_kernel(kernel: str, model: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
    return torch.optim.AdamW(tensor_jobs.trainable(model), lr=1e-2, eps=1e-3, **{kernel: True}), None


@pytest.mark.parametrize("stage", STAGES)
def test_every_state_is_divided_over_both_axes(stage: int, pool_of: Pools) -> None:
    elements = 8 * 64 * 64 + 4 * 64
    parameter, gradient, optimizer = (2 if stage >= least else 1 for least in (3, 2, 1))  # data-parallel ranks
    for found in pool_of(4).run(tensor_jobs.rests, TENSOR, stage):
        assert found["parameter"] == 4 * elements // TENSOR // parameter
        assert found["gradient"] == 4 * elements // TENSOR // gradient
        assert found["optimizer state"] == pytest.approx(8 * elements // TENSOR // optimizer, abs=100)  # step counts


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [2, 4])
def test_users_read_and_edit_parameters_and_gradients_as_dtensors(world: int, stage: int, pool_of: Pools) -> None:
    model = tensor_jobs.towers()
    optimizer, _ = tensor_jobs.torch_sgd(model)
    losses = [tensor_jobs.loss_of(model, rank, 0) for rank in range(world // TENSOR)]
    (sum(losses) / len(losses)).backward()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for grad in grads.values():
            if grad is not None:
                grad.mul_(0.5)
        model.blocks[0].up.weight.add_(1.0)
    optimizer.step()
    for seen in pool_of(world).run(tensor_jobs.what_users_see, TENSOR, stage, sequence=True):
        for name, value in weights.items():
            assert torch.equal(seen["full_tensor"][name], value), name
            assert torch.equal(seen["read"][name], value + 1), name
            assert seen["kinds"][name] is not (name.startswith("norm") or name == "scale"), name
        for name, grad in grads.items():
            for kind in ("grads", "full_grad"):
                found = seen[kind][name]
                assert (found is None) is (grad is None), name
                if grad is not None:
                    torch.testing.assert_close(found, grad * 2, rtol=1e-5, atol=1e-7)
        trained = {name: grad * 2 for name, grad in grads.items() if grad is not None}
        assert seen["norms"].keys() == trained.keys()
        for name, grad in trained.items():
            torch.testing.assert_close(seen["norms"][name], grad.norm(), rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(seen["largest"][name], grad.abs().max(), rtol=1e-5, atol=1e-7)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(seen["stepped"][name], parameter.detach(), rtol=1e-6, atol=1e-6)
        assert seen["placements"]
        assert seen["same objects"]
        assert "nan" not in seen["repr"]


@pytest.mark.parametrize(
    ("world", "stage", "tier"),
    [*((2, stage, "disk") for stage in STAGES), (4, 2, "disk"), (4, 3, "memory"), (4, 3, "disk")],
)
def test_every_way_to_edit_a_dtensor_counts_and_what_torch_ignores_does_not(
    world: int, stage: int, tier: str, pool_of: Pools, tmp_path: Path
) -> None:
    """Its version, which tells edits of other parameters, is not that of the local tensor."""
    for found in pool_of(world).run(tensor_jobs.edited, stage, tier, tmp_path):
        for when in tensor_jobs.WHENS:
            assert found[f"edited {when}"] == found[f"edited in place {when}"]
            assert found[f"assigned {when}"] == found["untouched"]


def test_what_a_dtensor_is_read_by_never_returns_the_tensor_that_it_holds(two_ranks: RankPool) -> None:
    """Nothing would tell that users hold it, so its memory would be given to others. torch 2.11 returns it."""
    for found in two_ranks.run(tensor_jobs.read_of_plain):
        assert found == dict.fromkeys(found, (False, True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_take_dtensors_of_the_class_that_notices_edits(
    backend: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    """Graphs check the class of what they are given."""
    eager = two_ranks.run(tensor_jobs.edited_compiled, 2, None, tmp_path)
    for mine, theirs in zip(two_ranks.run(tensor_jobs.edited_compiled, 2, backend, tmp_path), eager, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


def test_a_weight_that_rests_is_read_beside_one_whose_values_are_there(two_ranks: RankPool, tmp_path: Path) -> None:
    expected = two_ranks.run(tensor_jobs.tied_across_blocks, 1)
    offload = {"optimizer": "nvme", "parameters": "nvme"}  # else no weight rests, where no data is parallel
    for mine, theirs in zip(
        two_ranks.run(tensor_jobs.tied_across_blocks, 3, folder=tmp_path, offload=offload, **tensor_jobs.UNITS),
        expected,
        strict=True,
    ):
        assert mine == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_overflows_in_one_ranks_part_of_a_tensor_is_skipped_on_all(stage: int, two_ranks: RankPool) -> None:
    weight = seeded(lambda: torch.nn.Linear(4, 4, bias=False)).weight.detach()
    for found in two_ranks.run(tensor_jobs.overflow_on_one, stage):
        assert (found["overflow 0"], found["overflow 1"]) == ([1], [])
        assert (found["scale 0"], found["scale 1"]) == (8.0, 8.0)
        assert torch.equal(found["weight 0"], weight)
        torch.testing.assert_close(found["weight 1"], weight - 0.1)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_all_hear_of_a_step_that_one_rank_has_left_before_it_had_stepped_its_parts_of_all_tensors(
    stage: int, world: int, pool_of: Pools
) -> None:
    for rank, told in enumerate(pool_of(world).run(tensor_jobs.told_of_half_a_step, TENSOR, stage, {1})):
        assert len(told) == 1 + (rank == 1)  # and the optimizer's own
        assert re.search(
            r"on rank 1 Fails\.step\(\) had changed (\d) of (?!\1)\d+ parameters and some of their state\. ", told[-1]
        )


@pytest.mark.parametrize(
    ("kind", "tensor", "told"),
    [
        (
            "foreign mesh",
            2,
            r"'embedding.weight' is a DTensor on .* of ranks \[0, 1, 2, 3\], and ranks \[\d, \d\] share",
        ),
        ("two axes", 2, r"'head.weight' is a DTensor on .* \(no fully_shard\)"),
        ("uneven", 2, r"'head.weight' is a DTensor of shape \(13, 12\), whose dimension 0 cannot be divided evenly"),
        ("param_dtype", 2, r"param_dtype=torch.bfloat16 .* 'embedding.weight'.* Leave param_dtype out"),
        ("whole tensors", 2, r"Adafactor steps whole tensors, which tensor-parallel ranks have parts of"),
        ("size", 3, r"tensor_parallel_size=3 does not divide the 4 ranks. Write one of \[1, 2, 4\]"),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank(kind: str, tensor: int, told: str, pool_of: Pools) -> None:
    for message in pool_of(4).run(tensor_jobs.refused, kind, tensor):
        assert re.search(told, message)


# The plan's three parts are applied one by one, each to modules of its own.
@pytest.mark.parametrize(("stage", "sequence", "tie_head"), pairwise([1, 3], [False, True], [False, True]), ids=name_of)
def test_the_plan_of_the_examples_gpt_has_the_gradients_of_one_process_pairwise(
    stage: int, sequence: bool, tie_head: bool, pool_of: Pools
) -> None:
    model = tensor_jobs.example_gpt(tie_head)
    losses = [tensor_jobs.loss_of_gpt(model, rank) for rank in range(2)]
    (sum(losses) / 2).backward()
    runs = pool_of(4).run(tensor_jobs.gradients_of_gpt, TENSOR, stage, sequence=sequence, tie_head=tie_head)
    for rank, (loss, grads) in enumerate(runs):
        assert loss == pytest.approx(losses[rank // TENSOR].item(), rel=1e-6)
        assert grads.keys() == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-6)


POLICIES = [
    {},
    {"partition": True},
    {"partition": True, "offload": True},
    {"partition": True, "contiguous": True},
]


# Where a checkpoint rests is decided when it is kept, of whatever the block was given.
@pytest.mark.parametrize(
    ("place", "policy", "sequence"), pairwise([(2, 1), (2, 3), (4, 2), (4, 3)], POLICIES, [False, True]), ids=name_of
)
def test_recomputation_from_divided_checkpoints_changes_no_bit_pairwise(
    place: tuple[int, int], policy: dict[str, bool], sequence: bool, pool_of: Pools
) -> None:
    world, stage = place
    without = pool_of(world).once(tensor_jobs.recompute, TENSOR, stage, None, sequence=sequence)
    found = pool_of(world).once(tensor_jobs.recompute, TENSOR, stage, policy, sequence=sequence)
    for mine, theirs in zip(found, without, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert_same_bits(mine["weights"], theirs["weights"])


def test_divided_checkpoints_are_a_share_each_and_cost_one_gather_each(pool_of: Pools) -> None:
    """Section 8 of the paper: one all-gather of a block's input before it is computed again."""
    whole, part, away = (
        pool_of(2).once(tensor_jobs.recompute, TENSOR, 1, policy, sequence=False)[0] for policy in POLICIES[:3]
    )
    assert whole["kept"][Tier.DEVICE] > 0
    assert part["kept"] == {**whole["kept"], Tier.DEVICE: whole["kept"][Tier.DEVICE] // TENSOR}
    assert away["kept"] == {Tier.DEVICE: 0, Tier.HOST: whole["kept"][Tier.DEVICE] // TENSOR, Tier.DISK: 0}
    blocks = 2
    for run in (part, away):
        assert run["gathers"] - whole["gathers"] == blocks
        assert run["sent"] - whole["sent"] == whole["kept"][Tier.DEVICE] // TENSOR
