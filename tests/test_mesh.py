"""Who shares what with whom, and takes whose values."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.run import replicated
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.mesh import Mesh, shape_of
from thread_world import ThreadWorld

SIZES = [(8, 2, 2), (12, 2, 1), (12, 1, 6), (24, 2, 6), (24, 4, 3)]  # ranks, replicas, tensor-parallel ranks


def ranks_in(comm: Comm, rank: int) -> list[int]:
    found = torch.zeros(comm.size, 1, dtype=torch.int64)
    comm.all_gather(found, torch.tensor([rank]), "who is there").wait()
    return found.flatten().tolist()


@pytest.mark.parametrize(("world", "replicas", "tensor_ranks"), SIZES)
def test_tensor_parallel_ranks_are_neighbours_then_those_that_share_shards_then_replicas(
    world: int, replicas: int, tensor_ranks: int
) -> None:
    def rank_main(comm: Comm) -> dict[str, list[int]]:
        mesh = Mesh.of(comm, replicas, tensor_ranks)
        axes = {name: getattr(mesh, name) for name in ("tensor", "shard", "replicate", "data")}
        return {name: ranks_in(axis, comm.rank) for name, axis in axes.items()}

    numbers = torch.arange(world).view(replicas, -1, tensor_ranks)
    for rank, found in enumerate(ThreadWorld(world).run(rank_main)):
        replica, shard, tensor = (int(at) for at in (numbers == rank).nonzero()[0])
        expected = {
            "tensor": numbers[replica, shard],
            "shard": numbers[replica, :, tensor],
            "replicate": numbers[:, shard, tensor],
            "data": numbers[:, :, tensor].flatten(),
        }
        assert found == {name: ranks.tolist() for name, ranks in expected.items()}


def test_what_goes_over_communicators_is_told_in_the_same_order_in_every_process() -> None:
    def rank_main(comm: Comm) -> tuple[list[str], list[str]]:
        mesh = Mesh.of(comm, 2, 2)
        names = ("world", "shard", "replicate", "tensor", "data")
        for name in reversed(names):
            getattr(mesh, name).all_gather(torch.zeros(getattr(mesh, name).size, 1), torch.zeros(1), name).wait()
        mesh.world.all_reduce(torch.zeros(1), "sum")
        order = [name for one in mesh.comms for name in names if getattr(mesh, name) is one]
        return order, [*mesh.bytes_sent]

    found = ThreadWorld(8).run(rank_main)
    kinds = ["all_gather", "all_reduce", "replicate all_gather", "tensor_parallel all_gather"]
    assert found == [(["world", "shard", "replicate", "tensor", "data"], kinds)] * 8


def test_bytes_among_all_ranks_count_once_whatever_they_share() -> None:
    def rank_main(comm: Comm) -> dict[str, int]:
        mesh = Mesh.of(comm, 1, 2)
        assert mesh.tensor is mesh.world
        mesh.tensor.all_gather(torch.zeros(2, 1), torch.zeros(1), "values").wait()
        return mesh.bytes_sent

    assert ThreadWorld(2).run(rank_main) == [{"all_gather": 4}] * 2


def test_seconds_are_those_of_waits_in_every_communicator() -> None:
    def rank_main(comm: Comm) -> float:
        mesh = Mesh.of(comm, 2, 2)
        before = mesh.seconds_waited
        for one in (mesh.world, mesh.shard, mesh.replicate, mesh.tensor, mesh.data):
            one.clock._add(100.0)
        return mesh.seconds_waited - before

    assert ThreadWorld(8).run(rank_main) == [500.0] * 8


def test_replicas_that_do_not_divide_what_tensor_parallelism_leaves_are_told_what_does() -> None:
    told = r"replicate_size=3 does not divide the 4 groups of tensor_parallel_size=2\. Write one of \[1, 2, 4\]\."
    with pytest.raises(ValueError, match=told):
        shape_of(8, 3, 2)


def test_a_part_of_a_tensor_has_the_values_of_the_first_rank_that_holds_it_and_a_whole_one_those_of_rank_0() -> None:
    class Part(Tensor):
        """In the place of a DTensor, which would need process groups."""

    def rank_main(comm: Comm) -> dict[str, Any]:
        module = nn.Module()
        module.register_buffer("whole", torch.full((2,), float(comm.rank)))
        module.register_buffer("part", torch.full((2,), float(comm.rank)).as_subclass(Part))
        replicated.broadcast_states(module, (), Mesh.of(comm, 2, 2))
        return {name: buffer.tolist() for name, buffer in module.named_buffers()}

    with patch.object(replicated, "DTensor", Part):
        found = ThreadWorld(8).run(rank_main)
    assert found == [{"whole": [0.0] * 2, "part": [float(rank % 2)] * 2} for rank in range(8)]
