"""`Mesh`: the ranks of an engine by their role.

Hybrid sharding divides the model states inside groups of neighbours and replicates them across the groups, so that
only 1/N of the gradient crosses between groups:

    ranks 0 1 2 3 | 4 5 6 7        replicate_size=2: two shard groups of N = 4
          |-----|   |-----|        shard: gather and reduce inside
          0 <-----> 4, 1 <-> 5 ..  replicate: what each reduced is summed over the groups
"""

from dataclasses import dataclass

from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm


@dataclass(frozen=True)
class Mesh:
    """See the module's docstring; the axes "data_parallel" (shard) and "replicate" of `ZeroStrategy.device_mesh`."""

    world: Comm  # all ranks
    shard: Comm  # those that divide one copy of the model states among them, neighbours in `world`
    replicate: Comm  # those that hold the same shard, one of each shard group

    @classmethod
    def of(cls, world: Comm, replicate_size: int) -> "Mesh":
        """Divides `world` into `replicate_size` shard groups, which must come out of one size."""
        if world.size % replicate_size:
            fitting = [size for size in range(1, world.size + 1) if world.size % size == 0]
            raise ValueError(
                f"replicate_size={replicate_size} does not divide the {world.size} ranks. Write one of {fitting}."
            )
        size = world.size // replicate_size
        if replicate_size == 1 or size == 1:
            return cls(world, world, LocalComm())
        groups = [range(start, start + size) for start in range(0, world.size, size)]
        peers = [range(place, world.size, size) for place in range(size)]
        return cls(world, world.split(groups), world.split(peers))

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that left this rank, by operation; those between shard groups apart."""
        within = self.world.bytes_sent if self.shard is self.world else self.world.bytes_sent + self.shard.bytes_sent
        return dict(within) | {f"replicate {kind}": sent for kind, sent in self.replicate.bytes_sent.items()}
