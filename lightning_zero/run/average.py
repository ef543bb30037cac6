"""`Average`: a running average of a model's weights, sharded: each rank averages the part that it owns."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_zero.checkpoint.spread import ModelValues, read_part
from lightning_zero.device import HOST, can_pin, is_host
from lightning_zero.run.engine import Engine
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.local import Box, local_of
from lightning_zero.shards.slot import no_interception, slot_of
from lightning_zero.shards.units import as_written
from lightning_zero.tiers.array import Array, empty
from lightning_zero.tiers.ledger import Category, Place, Tier
from lightning_zero.wire.comm import failing_together

Rule = Callable[[Tensor, Tensor, int], Tensor]  # averaged, current, number of updates before -> averaged


@final
class Average:
    """A running average of an engine's module, as `torch.optim.swa_utils.AveragedModel` computes it. Call every method
    on all ranks alike.

    It begins with the module's values, takes them once more at the first update, and follows a rule from then on. The
    rule works element by element, so shards get the same bits as whole tensors.

    The average of a group, ``(owned,)``, rests where its masters do, and at least in fp32: in two bytes an average
    stands still. Each rank averages its own buffers, whole. A frozen parameter takes no room: it is its own average.

    Args:
        engine: has the module.
        rule: element-wise; what `AveragedModel` calls ``avg_fn``.
        use_buffers: average buffers as well; otherwise an update takes them as they are.
        on_host: keep and update the average in host memory.

    Raises:
        RuntimeError: the same on every rank, when there is no room for it on one.
    """

    def __init__(self, engine: Engine, rule: Rule, *, use_buffers: bool = True, on_host: bool = False) -> None:
        self.updates = 0
        self.is_swapped = False  # the module has the average's values, and this has the module's
        self._engine = engine
        self._rule = rule
        self._use_buffers = use_buffers
        self._on_host = on_host
        self._arrays: dict[ShardGroup, Array] = {}  # the averages
        self._numbers: dict[ShardGroup, int] = {}  # by which `Course.call` gathers them
        self._loaded: Mapping[str, Any] = {}  # until the next update: groups may begin to train after `load`
        engine.catch_up()
        engine.loans.end_all()
        engine.runner.meet_before_collective()
        trained = [group for group in engine.groups if group.kind.trainable]
        with failing_together(engine.mesh.world, "making room for the average of the model"):
            self._begin(trained)
        self._enroll(trained)
        engine.regrouping.listeners.append(self._take_in)
        self._copies = {name: self._copy(buffer) for name, buffer in engine.module.named_buffers()}

    def _take_in(self, groups: Sequence[ShardGroup]) -> None:
        """Averages groups that begin to train. The checkpoint that the run goes on from may have averages of them."""
        self._begin(groups)
        self._enroll(groups)
        self._read(self._loaded, groups, {})

    def _begin(self, groups: Iterable[ShardGroup]) -> None:
        """Begins the average of each group with the group's values."""
        with _writable():
            for group in groups:
                master, place = group.master, _place_for(group, self._on_host)
                array = empty(Category.AVERAGE, master.numel, _wide(master.dtype), place, group.setting.ledger)
                for part in _parts(group, array):
                    array.write(part, master.read(part))
                self._arrays[group] = array

    def _enroll(self, groups: Iterable[ShardGroup]) -> None:
        """Lets each rank call for full averages. All ranks must enroll the same, so not where one has failed."""
        for group in groups:
            if group.is_cut:
                serve = partial(self._serve, group)
                self._numbers[group] = self._engine.runner.rendezvous.serving.enroll(f"average of {group.name}", serve)

    @property
    def _buffers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each buffer of the module with its average. Modules may replace buffers, so these are looked up each time."""
        named = self._engine.module.named_buffers()
        return ((buffer, self._copies[name]) for name, buffer in named if name in self._copies)

    def _copy(self, tensor: Tensor) -> Tensor:
        with _writable():
            made = tensor.detach().clone().to(_wide(tensor.dtype))
        self._engine.ledger.book_tensor(Category.AVERAGE, local_of(made))
        return made

    # -- in training

    def drop_loaded(self) -> None:
        """Forgets what `load` was given: training goes on from here."""
        self._loaded = {}

    def update_parameters(self, _: Module | None = None) -> None:
        """Updates the average with the module's values after a step. Where a group's step is postponed, so is this."""
        self._engine.loans.end_all()
        self.drop_loaded()
        for group in self._arrays:
            update = partial(self._update, group, self.updates)
            if group.has_postponed:
                group.postpone(update, needs_all=group.needs_all)  # after whole tensors have come back
            else:
                update()
        with _writable():
            for buffer, average in self._buffers:
                average.copy_(self._next(average, buffer, self.updates) if self._use_buffers else buffer)
        self.updates += 1

    def _update(self, group: ShardGroup, updates: int) -> None:
        master, array = group.master, self._arrays[group]
        with _writable():
            for part in _parts(group, array):
                with array.edit(part) as average:
                    average.copy_(self._next(average, master.read(part).to(average.device), updates))

    def _next(self, average: Tensor, current: Tensor, updates: int) -> Tensor:
        return self._rule(average, current, updates) if updates else current

    # -- in evaluation

    def swap(self) -> None:
        """Exchanges the values of the module and the average; a second call exchanges them back. Collective.

        One bucket at a time is exchanged, so there is no copy of either. The new values are gathered as after a step.
        """
        engine = self._engine
        engine.catch_up()
        engine.loans.end_all()
        engine.runner.rendezvous.meet_before_collective()  # after it no rank has gathered, or asks for, the old values
        with _writable(), no_interception():
            for group, array in self._arrays.items():
                for part in _parts(group, array):
                    with array.edit(part) as average, group.master.edit(part) as own:
                        _exchange(average, own)
                group.take_masters()
            for buffer, average in self._buffers:
                _exchange(local_of(average), local_of(buffer))
        engine.runner.stepping.publish(engine.groups, engine.groups)
        self.is_swapped = not self.is_swapped

    # -- in checkpoints

    def full(self) -> dict[str, Any]:
        """Returns `module.state_dict()` with the average's values, on the host of every rank. Collective."""
        values = self._values()
        copies = {key: value.clone() for key, value in values.buffers.items()}
        return self._engine.states.full_model(of=values._replace(buffers=copies))

    def spread(self) -> dict[str, Any]:
        """Returns `module.state_dict()` with the average's values, for all ranks to write together."""
        return self._engine.states.spread_model(of=self._values())

    def _values(self) -> ModelValues:
        buffers = {id(buffer): average for buffer, average in self._buffers}
        return ModelValues("average", self._arrays, self._full, self._arrays.__getitem__, buffers)

    def load(self, state: Mapping[str, Any], updates: int) -> None:
        """Loads what `full` or `spread` returned in any run. Each rank reads what it owns. A value stays as it is where
        `state` does not have its name, or has another shape.

        Raises:
            RuntimeError: the same on every rank, when reading fails on one.
        """
        self.updates, self._loaded = updates, state
        self._engine.runner.meet_before_collective()
        self._read(state, self._arrays, self._values().buffers)

    def _read(self, state: Mapping[str, Any], groups: Collection[ShardGroup], buffers: Mapping[int, Tensor]) -> None:
        """Reads the averages of `groups`, and of the buffers with these ids. Collective."""
        if not state:
            return
        with failing_together(self._engine.mesh.world, "reading the average of the model"), _writable():
            for name, own in self._engine.module.state_dict(keep_vars=True).items():
                saved = state.get(as_written(name))
                if not isinstance(saved, Tensor) or saved.shape != own.shape:
                    continue
                slot = slot_of(own) if isinstance(own, Parameter) else None
                if slot is not None and slot.group in groups:
                    part = read_part(saved, slot.local.box, slot.piece.start, slot.piece.stop, HOST)
                    self._arrays[slot.group].write(slot.piece.in_shard, part)
                elif id(own) in buffers:
                    values = local_of(buffers[id(own)])
                    values.copy_(read_part(saved, Box.of(own), 0, values.numel(), HOST).view(values.shape))

    def _full(self, group: ShardGroup) -> Tensor:
        """Returns the full average of a group, ``(N * S,)``. Collective where ranks own parts of it."""
        if not group.is_cut:
            group.catch_up()
            return self._arrays[group].read()
        return self._engine.runner.course.call(self._numbers[group])

    def _serve(self, group: ShardGroup, keep: bool) -> Tensor | None:
        group.catch_up()
        if keep:
            return self._engine.loans.latest.full_array(group, self._arrays[group], "gather average")
        group.pass_by(self._arrays[group], "gather average")
        return None


def room_for_average(engine: Engine, *, on_host: bool = False) -> dict[tuple[Category, Tier], int]:
    """Returns the bytes that an `Average` of the engine's model will take on this rank, by tier."""
    room: Counter[tuple[Category, Tier]] = Counter()
    for group in (group for group in engine.groups if group.kind.trainable):
        master, tier = group.master, _place_for(group, on_host).tier
        room[Category.AVERAGE, tier] += master.numel * _wide(master.dtype).itemsize
    for buffer in map(local_of, engine.module.buffers()):
        room[Category.AVERAGE, Tier.DEVICE] += buffer.numel() * _wide(buffer.dtype).itemsize
    return room


def _place_for(group: ShardGroup, on_host: bool) -> Place:
    """Returns where the average of a group rests: beside the masters, or on the host."""
    place = group.master.place
    if on_host and place.tier is Tier.DEVICE and not is_host(place.device):
        return Place(HOST, Tier.HOST, pinned=can_pin(place.device.type), limit=place.limit)
    return place


def _wide(dtype: torch.dtype) -> torch.dtype:
    is_rounded = dtype.is_floating_point or dtype.is_complex
    return torch.promote_types(dtype, torch.float32) if is_rounded else dtype


@contextmanager
def _writable() -> Iterator[None]:
    """Allows in-place edits inside, without gradients, also in the middle of an evaluation in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _parts(group: ShardGroup, array: Array) -> Iterator[slice]:
    """Yields the parts of what this rank owns, a bucket at a time."""
    step = max(group.setting.bucket_bytes // array.dtype.itemsize, 1)
    for start in range(0, array.numel, step):
        yield slice(start, min(start + step, array.numel))


def _exchange(one: Tensor, other: Tensor) -> None:
    held = one.clone()
    one.copy_(other)
    other.copy_(held)
