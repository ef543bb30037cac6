"""`Memory`: the bytes of a rank at each moment of a rehearsal, and what made the most of them."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import final

from torch import Tensor, UntypedStorage
from typing_extensions import override

from lightning_zero.run.program import Cause, Program
from lightning_zero.tiers.ledger import Category, Ledger, Tier
from lightning_zero.torch_private import storage_key


class Phase(StrEnum):
    """A part of training, by which a rehearsal tells its peaks apart."""

    BUILD = "build"  # the module is made
    SET_UP = "set-up"
    FIRST = "first steps"  # the optimizer makes its state, and ranks learn what follows what
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    SAVE = "save"  # a checkpoint of shards is read from the device
    OVER = "over"


class Other(StrEnum):
    """The memory of what torch and user code make, which the ledger of an engine does not have."""

    MODULE = "module as built"  # on the host, until the engine takes it over
    BUFFER = "buffers and batches"
    ACTIVATION = "activations"  # made in forward, and kept for backward
    TEMPORARY = "temporary"


def phases_of(program: Program) -> list[Phase]:
    """Returns the phase of each use of a step. Between two micro-batches, and after the last one, that is `STEP`."""
    phases, phase = [], Phase.STEP
    for cause, _ in program.uses:
        if cause not in _ANYWHERE:
            phase = {Cause.FORWARD: Phase.FORWARD, Cause.BACKWARD: Phase.BACKWARD}.get(cause, Phase.STEP)
        phases.append(phase)
    return phases


# Uses that may be in any phase.
_ANYWHERE = (Cause.UNIT, Cause.CALL, Cause.READ, Cause.GRADIENT, Cause.LOOK, Cause.MEASURE, Cause.READ_GRADIENT)
_MADE_IN = {Phase.BUILD: Other.BUFFER, Phase.SET_UP: Other.BUFFER, Phase.FORWARD: Other.ACTIVATION}


@dataclass(frozen=True)
class Moment:
    """The bytes of a rank at one moment."""

    phase: Phase
    place: str  # the module, or the use, in which the last of them were made
    device: Mapping[str, int]  # by category
    host: Mapping[str, int]
    disk: Mapping[str, int]

    @cached_property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())


@final
class Memory(Ledger):
    """A ledger that also follows the storages of all other tensors that are made. `born` is told of each.

    Args:
        place: names where the rank is.
        whole_gradients: returns the bytes of gradients that autograd has made, and keeps.
    """

    def __init__(self, place: Callable[[], str] = str, whole_gradients: Callable[[], int] = int) -> None:
        super().__init__()
        self.peaks: dict[Phase, Moment] = {}  # the moment of each phase with most bytes on the device
        self._place = place
        self._whole_gradients = whole_gradients
        self.course: list[Moment] = []  # of the last step: the one with most bytes on the device at each place
        self._most_here = 0  # bytes at the last of these
        self._gradients = 0  # what `whole_gradients` has said last
        self.is_last = False  # the step under way is the last one
        self._phase = Phase.BUILD
        self._made: Counter[Phase] = Counter()  # live bytes beside the ledger, by the phase in which they were made
        # Of these, by `storage_key`.
        self._sizes: dict[int, tuple[Phase, int, weakref.ref[UntypedStorage] | None]] = {}

    @property
    def phase(self) -> Phase:
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._look()
        self._phase = phase

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Inside, tensors that are made do not count, as they are in host memory wherever the rank computes."""
        phase, self._phase = self._phase, Phase.OVER
        try:
            yield
        finally:
            self._phase = phase

    def born(self, tensor: Tensor) -> None:
        """Notes a tensor that was just made."""
        # What came before is looked at now, and not when it came: the ledger books some of it in between.
        self._look()
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._sizes and self._phase is not Phase.OVER and not self.has_booked(storage):
            nbytes = storage.nbytes()
            self._sizes[key] = self._phase, nbytes, weakref.ref(storage, lambda _: self._died(key))
            self._made[self._phase] += nbytes

    def _died(self, key: int) -> None:
        # A gradient that dies may still be that of its parameter, which nobody must ask for it.
        self._look(may_ask=False)
        self._leave_out(key)

    def _leave_out(self, key: int) -> None:
        phase, nbytes, _ = self._sizes.pop(key, (Phase.OVER, 0, None))
        self._made[phase] -= nbytes

    @override
    def book(self, category: Category, tier: Tier, nbytes: int, owner: object) -> None:
        if isinstance(owner, UntypedStorage):
            self._leave_out(storage_key(owner))  # else it would count twice
        super().book(category, tier, nbytes, owner)

    @override
    def _add(self, category: Category, tier: Tier, nbytes: int) -> None:
        if nbytes < 0:  # what dies may have been booked since the last look
            self._look(may_ask=False)
        super()._add(category, tier, nbytes)

    @property
    def _is_built(self) -> bool:
        """Whether what was made in `BUILD` is on the host: it moves to the device when the engine is set up."""
        return self._phase in (Phase.BUILD, Phase.SET_UP)

    def _look(self, *, may_ask: bool = True) -> None:
        """Keeps this moment, if its phase has never had more bytes on the device. `may_ask`: for gradients."""
        if self._phase is Phase.OVER:
            return
        total = self.tiers[Tier.DEVICE] + self._made.total() - (self._made[Phase.BUILD] if self._is_built else 0)
        is_step = self._phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
        if is_step and self.is_last:
            self._keep_moment(self._place(), total, may_ask)
        part = Phase.FIRST if is_step and not self.is_last else self._phase
        if part not in self.peaks or total > self.peaks[part].nbytes:
            self.peaks[part] = self._now(may_ask)

    def _keep_moment(self, place: str, total: int, may_ask: bool) -> None:
        """Keeps this moment of the last step, if it is the first one at its place or the one with most bytes there."""
        is_same = bool(self.course) and (self.course[-1].phase, self.course[-1].place) == (self._phase, place)
        if is_same and total <= self._most_here:
            return
        self.course[len(self.course) - is_same :] = [self._now(may_ask)]
        self._most_here = total

    def _now(self, may_ask: bool) -> Moment:
        """Returns this moment, with the gradients of now, or of when they were asked for last."""
        tiers: dict[Tier, Counter[str]] = {tier: Counter() for tier in Tier}
        for (category, tier), nbytes in self.live_in.items():
            tiers[tier][category] += nbytes
        device = tiers[Tier.DEVICE]
        for phase, nbytes in self._made.items():
            if phase is Phase.BUILD and self._is_built:
                tiers[Tier.HOST][Other.MODULE] += nbytes
            else:
                device[_MADE_IN.get(phase, Other.TEMPORARY)] += nbytes
        self._gradients = self._whole_gradients() if may_ask else self._gradients
        gradients = min(self._gradients, device[Other.TEMPORARY])
        device[Category.GRADIENT] += gradients
        device[Other.TEMPORARY] -= gradients
        found = {tier: {str(name): nbytes for name, nbytes in there.items() if nbytes} for tier, there in tiers.items()}
        return Moment(self._phase, self._place(), found[Tier.DEVICE], found[Tier.HOST], found[Tier.DISK])
