"""What the groups of an engine have in common: what they partition among which ranks, and where its parts live."""

from dataclasses import dataclass

import torch

from lightning_zero.stage import Partition
from lightning_zero.tiers.disk import Disk
from lightning_zero.tiers.ledger import Ledger, Place
from lightning_zero.wire.mesh import Mesh


@dataclass(frozen=True)
class Kind:
    """What the parameters of one group have in common. Groups never mix kinds."""

    declared: torch.dtype  # what the user made, what the optimizer steps and checkpoints hold
    resting: torch.dtype  # what rests, travels and enters forward
    trainable: bool
    is_offloaded: bool = False  # what the optimizer works on rests in the tier that was asked for

    @property
    def is_cast(self) -> bool:
        return self.resting != self.declared


@dataclass(frozen=True)
class Places:
    """Where the parts of a group live."""

    gathered: Place  # parameters while they are used, and gradients while they travel
    parameter: Place  # parameters between uses, where they rest as shards
    gradient: Place  # averaged ones
    optimizer: Place  # masters and optimizer state
    state_dtype: torch.dtype | None = None  # of optimizer state, where it rests in another than it is stepped in

    @property
    def steps_apart(self) -> bool:
        """Whether what is stepped is brought to where, or to the dtype in which, it is."""
        return self.optimizer != self.gathered or self.state_dtype is not None

    @property
    def disk(self) -> Disk | None:
        """The file among the places."""
        return self.optimizer.disk or self.parameter.disk


@dataclass(frozen=True)
class Setting:
    """What every group of an engine shares."""

    partition: Partition  # what rests as shards
    mesh: Mesh
    ledger: Ledger
    places: Places
    bucket_bytes: int  # largest reduction
    as_declared: bool  # users read parameters in their declared dtype where they rest in another one
    aside: torch.cuda.Stream | None = None  # where a device copies and adds up beside its work; None on the host
    block: int = 1  # elements of a parameter that pieces never part
    keeps_gradients: bool = True  # averaged ones, from backward to the step; else they are stepped as they come
