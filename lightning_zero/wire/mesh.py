"""`Mesh`: the ranks of an engine in shard groups, replicas and tensor-parallel groups.

Hybrid sharding divides the model states inside groups of ranks and replicates them across the groups, so that only 1/N
of the gradient crosses between groups. Ranks that share tensor-parallel modules are neighbours. Each is in a shard
group with the ranks that hold the same part of the modules:

    ranks 0 1 2 3 | 4 5 6 7        replicate_size=2: two groups, each with a copy of the model states
          |---|                    tensor: 0 1, 2 3, ..   tensor_parallel_size=2: neighbours share the modules
          0 <-> 2, 1 <-> 3, ..     shard: gather and reduce; N = 2
          0 <-----> 4, 1 <-> 5 ..  replicate: reduced gradients are summed over the groups
          0 2 4 6 | 1 3 5 7        data: each has batches of its own for its part of the modules
"""

import math
from collections import Counter
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from lightning_zero.wire.worlds import once_per_world


@dataclass(frozen=True)
class Mesh:
    """The communicators of this rank. `ZeroStrategy.device_mesh` has the same axes: "replicate", "data_parallel"
    (shard) and "tensor_parallel"."""

    world: Comm  # all ranks
    shard: Comm  # ranks that divide one copy of the model states of their part of the modules
    replicate: Comm  # ranks that hold the same shard, one in each shard group
    tensor: Comm  # ranks that share tensor-parallel modules, neighbours in `world`
    data: Comm  # ranks that hold the same part of the modules: shard groups and their replicas

    @classmethod
    def of(cls, world: Comm, replicate_size: int = 1, tensor_size: int = 1) -> "Mesh":
        """Divides `world`. Collective: call it on every rank. Raises ValueError as `shape_of`."""
        shape = shape_of(world.size, replicate_size, tensor_size)
        replicate, shard, tensor = (_along(world, shape, axis) for axis in range(3))
        if shape[1] == 1:  # nothing is divided: ranks with the same values are one group, as under DDP
            shard, replicate = replicate, LocalComm()
        if replicate.size == 1:
            data = shard
        elif tensor.size == 1:
            data = world
        else:
            data = world.split([range(first, world.size, tensor_size) for first in range(tensor_size)])
        return cls(world, shard, replicate, tensor, data)

    @property
    def tensor_ranks(self) -> list[int]:
        """The ranks in `world` of this rank's tensor-parallel group."""
        start = self.world.rank - self.tensor.rank
        return list(range(start, start + self.tensor.size))

    @property
    def comms(self) -> list[Comm]:
        """All communicators, each once, in the same order in every process."""
        return [*dict.fromkeys([self.world, self.shard, self.replicate, self.tensor, self.data])]

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that left this rank, by operation. Bytes between shard groups ("replicate ...") and between
        tensor-parallel ranks ("tensor_parallel ...", without torch's own) have entries of their own."""
        within = sum((comm.bytes_sent for comm in dict.fromkeys([self.world, self.shard, self.data])), Counter[str]())
        apart = {"replicate": self.replicate, "tensor_parallel": self.tensor}
        return dict(within) | {
            f"{axis} {kind}": sent
            for axis, comm in apart.items()
            for kind, sent in comm.bytes_sent.items()
            if comm is not self.world
        }

    def abandon(self) -> None:
        """See `Comm.abandon`."""
        for comm in self.comms:
            comm.abandon()

    @property
    def seconds_waited(self) -> float:
        """Seconds that this rank has waited for others: communication that computation did not hide. On a GPU these are
        seconds of its stream; on the host they include the time of summing what arrives."""
        clocks = {comm.clock for comm in self.comms}
        return sum(clock.seconds for clock in clocks)


def shape_of(ranks: int, replicate_size: int, tensor_size: int) -> tuple[int, int, int]:
    """Returns the number of ranks along "replicate", "data_parallel" and "tensor_parallel".

    Raises:
        ValueError: if the ranks cannot be divided so.
    """
    if ranks % tensor_size:
        raise ValueError(
            f"tensor_parallel_size={tensor_size} does not divide the {ranks} ranks. Write one of {_divisors(ranks)}."
        )
    left = ranks // tensor_size
    if left % replicate_size:
        among = f"{left} groups of tensor_parallel_size={tensor_size}" if tensor_size > 1 else f"{ranks} ranks"
        raise ValueError(
            f"replicate_size={replicate_size} does not divide the {among}. Write one of {_divisors(left)}."
        )
    return replicate_size, left // replicate_size, tensor_size


def torch_mesh(device: str, shape: tuple[int, int, int]) -> DeviceMesh:
    """Returns torch's mesh of all ranks, of a `shape` from `shape_of`; the same one each time."""
    names = ("replicate", "data_parallel", "tensor_parallel")
    return once_per_world((device, shape), lambda: init_device_mesh(device, shape, mesh_dim_names=names))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _along(world: Comm, shape: tuple[int, int, int], axis: int) -> Comm:
    """Returns the communicator of the ranks that differ from this one only in their coordinate along `axis`."""
    size = shape[axis]
    if size == world.size:
        return world
    if size == 1:
        return LocalComm()
    stride = math.prod(shape[axis + 1 :])
    starts = [rank for rank in range(world.size) if rank // stride % size == 0]
    return world.split([range(start, start + size * stride, stride) for start in starts])
