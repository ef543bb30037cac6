"""The simulated device itself: torch runs on it with the CPU's bits, and mistakes that devices forgive are errors."""

from typing import Any

import pytest
import torch

import sim
import sim_jobs
from ranks import RankFailed, RankPool

POLICIES = ["LATE", "SIDES_AT_ONCE"]
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(bool(sim.WHY_NOT), reason=sim.WHY_NOT)


def run(sim_process: RankPool, policy: str, job: Any, *args: Any, **kwargs: Any) -> Any:
    (found,) = sim_process.run(sim_jobs.on_sim, policy, job, *args, **kwargs)
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kernels", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("casts", [False, True])
def test_a_training_has_the_cpus_bits(
    casts: bool, kernels: dict[str, bool], policy: str, sim_process: RankPool
) -> None:
    losses, weights = run(sim_process, policy, sim_jobs.small_training, casts=casts, **kernels)
    expected_losses, expected = sim_jobs.small_training(CPU, casts=casts, **kernels)
    assert losses == expected_losses
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


@pytest.mark.parametrize("kind", ["convolution", "attention", "embedding"])
def test_layers_have_the_cpus_gradients(kind: str, sim_process: RankPool) -> None:
    found, expected = run(sim_process, "LATE", sim_jobs.gradients_of, kind), sim_jobs.gradients_of(CPU, kind)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("where", ["gradient", "accumulated", "unpacked"])
def test_an_error_in_backward_is_raised_and_the_next_backward_works(where: str, sim_process: RankPool) -> None:
    assert run(sim_process, "LATE", sim_jobs.backward_that_fails, where) == [3.0] * 3


MISTAKES = {
    "a side stream reads what the main stream writes": [4.0, 4.0],
    "the main stream reads what a side stream writes": [4.0, 4.0],
    "the main stream writes what a side stream reads": [3.0, 3.0],
    "pinned memory is overwritten before it was copied": [1.0, 1.0],
    "pinned memory is read before the copy has come": [1.0, 1.0],
    "memory is freed while a side stream uses it": [3.0, 3.0],
    "memory of a side stream is freed while the main stream uses it": [3.0, 3.0],
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", MISTAKES)
def test_a_missing_wait_is_an_error(kind: str, policy: str, sim_process: RankPool) -> None:
    assert run(sim_process, policy, sim_jobs.mistake, kind, is_made=False) == MISTAKES[kind]
    with pytest.raises(RankFailed, match=r"RaceError: .* nothing waits in between"):
        run(sim_process, policy, sim_jobs.mistake, kind, is_made=True)


def test_a_host_tensor_where_a_devices_is_meant_is_an_error(sim_process: RankPool) -> None:
    with pytest.raises(RankFailed, match="Expected all tensors to be on the same device"):
        run(sim_process, "LATE", sim_jobs.mixed_devices)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [2, 3])
def test_collectives_bring_what_they_bring_elsewhere(size: int, policy: str, sim_process: RankPool) -> None:
    found = run(sim_process, policy, sim_jobs.collectives, size)
    rows = [[float(at + 10 * rank) for at in range(4)] for rank in range(size)]
    for rank, (diverges, (full, shard, *received, row, total, waves, wave)) in enumerate(found):
        assert diverges
        assert full == rows
        assert shard == [value * sum(range(1, size + 1)) for value in rows[rank]]
        assert received == [[float(rank)] * (peer + 1) for peer in range(size)]
        assert row == total == rows[-1]
        assert waves == [complex(size, sum(range(size)))]
        assert wave == [1 + 0j] * 2


def test_ranks_that_launch_different_collectives_are_told_both_orders(sim_process: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"LaunchOrderError: Rank . launches .* and rank . has launched"):
        run(sim_process, "LATE", sim_jobs.wrong_order)


def test_ranks_that_launch_in_two_communicators_in_different_orders_hang(sim_process: RankPool) -> None:
    """As they may in NCCL, where the first kernels leave no room for the second ones."""
    assert run(sim_process, "LATE", sim_jobs.wrong_order_of_two, is_made=False) == [4.0, 4.0]
    with pytest.raises(RankFailed, match=r"Hang: rank . waits for .*, which stays at all-gather"):
        run(sim_process, "LATE", sim_jobs.wrong_order_of_two, is_made=True)


@pytest.mark.parametrize("in_part", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_never_comes_is_named_and_ranks_go_on_afterwards(
    policy: str, in_part: bool, sim_process: RankPool
) -> None:
    """What the host does when a collective of the device hangs: say so in time, end it, and make new groups."""
    told, _ = run(sim_process, policy, sim_jobs.rank_that_never_comes, in_part=in_part)
    assert "within wait_timeout=0.5 s" in told
    assert "the all-gather of rows" in told
