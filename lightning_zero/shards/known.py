"""`KnownState`: what a step has shown of an optimizer's state."""

import itertools
from collections.abc import Iterable
from typing import final
from weakref import WeakValueDictionary

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.shards.moment import state_of, wrapped_in
from lightning_zero.shards.slot import Slot
from lightning_zero.shards.staging import StateElsewhere
from lightning_zero.tiers.composed import is_composed, plain_parts
from lightning_zero.tiers.ledger import Category, Ledger, Tier


@final
class KnownState:
    """Books the state tensors of an optimizer, and tells by their names how they are divided."""

    def __init__(self, optimizer: Optimizer, ledger: Ledger) -> None:
        self._optimizer = optimizer
        self._ledger = ledger
        self.cut: dict[str, bool] = {}  # whether it is cut as its parameter is
        self.by_block: dict[str, bool] = {}  # whether it has one entry for each block of its parameter
        self._noted: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by id

    def is_cut(self, name: str) -> bool:
        return self.cut.get(name, False)

    def note(self, stepped: Iterable[Slot], left_alone: Iterable[Parameter]) -> None:
        """Books what a step has made, also of parameters that the engine leaves alone, and notes for each name whether
        it is cut. A piece may have the shape of a whole tensor by chance, so one tensor that does not fit decides for
        its name."""
        known, optimizers = set(self.cut), wrapped_in(self._optimizer)
        slots = ((slot.parameter, slot) for slot in stepped)
        for parameter, slot in itertools.chain(((parameter, None) for parameter in left_alone), slots):
            for name, value in itertools.chain(*(state_of(one, parameter).items() for one in optimizers)):
                if not isinstance(value, Tensor) or isinstance(value, StateElsewhere):
                    continue
                if self._noted.get(id(value)) is value:
                    continue  # as nearly all are after the first step
                self._noted[id(value)] = value
                self._book(value, slot)
                # Of a parameter that is a single number anything single has the shape: a count of steps, too.
                if name not in known and slot is not None and slot.steps_any and slot.state_shape:
                    fits = value.shape == slot.state_shape and not is_composed(value)
                    self.cut[name] = self.cut.get(name, True) and fits
                    blocks = range(slot.blocks)[slot.own_blocks] if slot.has_blocks else ()
                    self.by_block[name] = self.by_block.get(name, True) and value.shape == (len(blocks),)

    def _book(self, value: Tensor, slot: Slot | None) -> None:
        tier = Tier.DEVICE if slot is None else slot.group.master.place.tier
        # State of a parameter on disk is in host memory until it is written, and stays there if it is small.
        tier = Tier.HOST if tier is Tier.DISK else tier
        for part in plain_parts(value):
            self._ledger.book_tensor(Category.OPTIMIZER_STATE, part, tier)
