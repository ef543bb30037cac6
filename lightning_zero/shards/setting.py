"""`Setting`: what all groups of an engine share; `Kind` and `Places`: what parameters of one group share."""

from dataclasses import dataclass, replace

import torch

from lightning_zero.device import SideStream
from lightning_zero.stage import Partition
from lightning_zero.tiers.disk import Disk
from lightning_zero.tiers.ledger import Ledger, Place
from lightning_zero.wire.mesh import Mesh


@dataclass(frozen=True)
class Kind:
    """What the parameters of one group have in common. A group never mixes kinds."""

    declared: torch.dtype  # as the user made them; what the optimizer steps, and what checkpoints hold
    resting: torch.dtype  # of the values between uses, in collectives and in forward
    trainable: bool
    upcasts: bool = False  # users read the declared dtype, though the values rest in another one
    is_offloaded: bool = False  # gradients, masters and optimizer state rest in the tier that was asked for
    is_idle: bool = False  # they train, but were frozen when they were taken over, and none has had a gradient since

    @property
    def is_cast(self) -> bool:
        return self.resting != self.declared

    @property
    def shown(self) -> torch.dtype:
        """The dtype in which users read the values."""
        return self.declared if self.upcasts else self.resting


@dataclass(frozen=True)
class Places:
    """Where the tensors of a group live."""

    gathered: Place  # parameters in use, and gradients in collectives
    parameter: Place  # shards of parameters between uses
    gradient: Place  # averaged gradients
    optimizer: Place  # masters and optimizer state
    state_dtype: torch.dtype | None = None  # in which optimizer state rests; None: the one it is stepped in

    @property
    def without_offload(self) -> "Places":
        """Where what is frozen rests, and what a fraction leaves: of these, only parameters are offloaded."""
        return replace(self, gradient=self.gathered, optimizer=self.gathered, state_dtype=None)

    @property
    def steps_apart(self) -> bool:
        """Whether masters and state are offloaded, or state rests in a narrower dtype: then windows step the group."""
        return self.optimizer != self.gathered or self.state_dtype is not None

    @property
    def steps_on_host(self) -> bool:
        """Whether the host steps what a device trains. No kernel of the host has the bits of the device's; where both
        are one, the step of what is offloaded takes the kernel that it would take without offload."""
        return self.optimizer.device != self.gathered.device

    @property
    def disk(self) -> Disk | None:
        """The offload file, if anything rests on disk."""
        return self.optimizer.disk or self.parameter.disk


@dataclass(frozen=True)
class Setting:
    """What all groups of an engine share."""

    partition: Partition  # what rests as shards
    mesh: Mesh
    ledger: Ledger
    places: Places
    bucket_bytes: int  # largest reduction
    aside: SideStream | None = None  # a device copies and adds here, beside its work; None on the host
    block: int = 1  # elements in a block; pieces consist of whole blocks
    keeps_gradients: bool = True  # averaged gradients stay from backward to the step; else each is stepped at once
