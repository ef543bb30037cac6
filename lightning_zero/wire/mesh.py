"""`Mesh`: the ranks of an engine by their role.

Hybrid sharding divides the model states inside groups of ranks and replicates them across the groups, so that only 1/N
of the gradient crosses between groups. Ranks that share tensor-parallel modules are neighbours; each is in a shard
group with those that hold the same part of the modules:

    ranks 0 1 2 3 | 4 5 6 7        replicate_size=2: two groups, each with a copy of the model states
          |---|                    tensor: 0 1, 2 3, ..   tensor_parallel_size=2: neighbours share the modules
          0 <-> 2, 1 <-> 3, ..     shard: gather and reduce; N = 2
          0 <-----> 4, 1 <-> 5 ..  replicate: what each reduced is summed over the groups
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_zero.wire.comm import Comm
from lightning_zero.wire.gloo import once_per_world
from lightning_zero.wire.local import LocalComm


@dataclass(frozen=True)
class Mesh:
    """See the module's docstring; the axes "data_parallel" (shard), "replicate" and "tensor_parallel" of
    `ZeroStrategy.device_mesh`."""

    world: Comm  # all ranks
    shard: Comm  # those that divide one copy of the model states, of their part of the modules, among them
    replicate: Comm  # those that hold the same shard, one of each group of shards
    tensor: Comm  # those that share tensor-parallel modules, neighbours in `world`

    @classmethod
    def of(cls, world: Comm, replicate_size: int = 1, tensor_size: int = 1) -> "Mesh":
        """Divides `world`.

        Raises:
            ValueError: when the ranks do not come out even.
        """
        shape = shape_of(world.size, replicate_size, tensor_size)
        replicate, shard, tensor = (_along(world, shape, axis) for axis in range(3))
        if shape[1] == 1:  # nothing is divided: those with the same values are one group, as under DDP
            shard, replicate = replicate, LocalComm()
        return cls(world, shard, replicate, tensor)

    @property
    def tensor_ranks(self) -> list[int]:
        """Those of the tensor-parallel group, in `world`."""
        start = self.world.rank - self.tensor.rank
        return list(range(start, start + self.tensor.size))

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that left this rank, by operation; those between shard groups, and between tensor-parallel ranks (but
        for what torch sends), apart."""
        within = self.world.bytes_sent if self.shard is self.world else self.world.bytes_sent + self.shard.bytes_sent
        apart = {"replicate": self.replicate, "tensor_parallel": self.tensor}
        return dict(within) | {
            f"{axis} {kind}": sent
            for axis, comm in apart.items()
            for kind, sent in comm.bytes_sent.items()
            if comm is not self.world
        }

    @property
    def seconds_waited(self) -> float:
        """What this rank has waited for others: communication that no work has hidden. On GPUs what their streams
        have; on the host, where ranks sum what arrives, with the sums."""
        clocks = {id(comm.clock): comm.clock for comm in (self.world, self.shard, self.replicate, self.tensor)}
        return sum(clock.seconds for clock in clocks.values())


def shape_of(ranks: int, replicate_size: int, tensor_size: int) -> tuple[int, int, int]:
    """How many ranks there are along "replicate", "data_parallel" and "tensor_parallel".

    Raises:
        ValueError: when they do not come out even.
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
    """The ranks as torch's mesh, of a `shape_of` them; the same one each time."""
    names = ("replicate", "data_parallel", "tensor_parallel")
    return once_per_world((device, shape), lambda: init_device_mesh(device, shape, mesh_dim_names=names))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _along(world: Comm, shape: Sequence[int], axis: int) -> Comm:
    """Those that differ from this rank in their place along one axis alone."""
    size = shape[axis]
    if size in (1, world.size):
        return world if size == world.size else LocalComm()
    stride = 1
    for inner in shape[axis + 1 :]:
        stride *= inner
    starts = [rank for rank in range(world.size) if rank // stride % size == 0]
    return world.split([range(start, start + size * stride, stride) for start in starts])
