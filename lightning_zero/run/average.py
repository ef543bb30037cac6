"""`Average`: a running average of a model's weights, of which each rank has that of the part it owns."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_zero.run.engine import Engine
from lightning_zero.run.spread import ModelValues
from lightning_zero.run.states import failing_together
from lightning_zero.shards.group import ShardGroup, publish
from lightning_zero.shards.local import Box, local_of
from lightning_zero.shards.slot import no_interception, slot_of
from lightning_zero.shards.units import as_written
from lightning_zero.tiers.array import Array, empty
from lightning_zero.tiers.ledger import Category, Place, Tier
from lightning_zero.views.lazy import LazyTensor, Stored

Rule = Callable[[Tensor, Tensor, int], Tensor]  # averaged, current, number of updates before -> averaged


@final
class Average:
    """As `torch.optim.swa_utils.AveragedModel`, of an engine's module: it begins with the module's values, takes them
    once more at the first update, and follows a rule from then on. Element by element, so what holds of whole tensors
    holds of shards, to the bit. All ranks call the same.

    It rests where the masters do, ``(owned,)`` for each group and at least in fp32: in two bytes an average stands
    still. Each rank averages its own buffers, whole. What is frozen takes no room: it is its own average.

    Args:
        engine: whose module.
        rule: element-wise; what `AveragedModel` calls ``avg_fn``.
        use_buffers: buffers are averaged as well; else an update takes them as they are.
        on_host: rests in host memory, and is updated there.

    Raises:
        RuntimeError: on every rank the same, when there is no room for it on one.
    """

    def __init__(self, engine: Engine, rule: Rule, *, use_buffers: bool = True, on_host: bool = False) -> None:
        self.updates = 0
        self.is_swapped = False  # the module has the average's values, and this has the module's
        self._engine = engine
        self._rule = rule
        engine.catch_up()
        engine.loans.settle()
        with failing_together(engine.mesh.world, "making room for the average of the model"), _writable():
            trained = [group for group in engine.groups if group.kind.trainable]
            self._arrays = {group: self._begin(group, on_host) for group in trained}
        self._numbers = {group: self._enroll(group) for group in trained if group.is_cut}
        self._on_host = on_host
        engine.regrouping.listeners.append(self._take_in)
        self._use_buffers = use_buffers
        self._copies = {name: self._copy(buffer) for name, buffer in engine.module.named_buffers()}
        self._served: Tensor | None = None
        self._loaded: Mapping[str, Any] = {}  # until training goes on: the saved run's groups may be made meanwhile

    def _take_in(self, groups: Sequence[ShardGroup]) -> None:
        """What begins to train is no longer its own average; in a run that goes on it has one already."""
        for group in groups:
            with _writable():
                self._arrays[group] = self._begin(group, self._on_host)
            if group.is_cut:
                self._numbers[group] = self._enroll(group)
        self._read(self._loaded, groups)

    def _enroll(self, group: ShardGroup) -> int:
        return self._engine.rendezvous.enroll(f"average of {group.name}", partial(self._serve, group))

    def _begin(self, group: ShardGroup, on_host: bool) -> Array:
        master, place = group.master, _place_for(group, on_host)
        array = empty(Category.AVERAGE, master.numel, _wide(master.dtype), place, group.setting.ledger)
        for part in _parts(group, array):
            array.write(part, master.read(part))
        return array

    @property
    def _buffers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Those that are there now, as modules may replace them, each with its average."""
        named = self._engine.module.named_buffers()
        return ((buffer.detach(), self._copies[name]) for name, buffer in named if name in self._copies)

    def _copy(self, tensor: Tensor) -> Tensor:
        with _writable():
            made = tensor.detach().clone().to(_wide(tensor.dtype))
        self._engine.ledger.adopt(Category.AVERAGE, local_of(made))
        return made

    # -- in training

    def begin(self) -> None:
        """Training goes on from here: what `load` was given is not looked at again."""
        self._loaded = {}

    def update_parameters(self, _: Module | None = None) -> None:
        """Takes in what the module has now, after a step; of what is offloaded, when that step is taken."""
        self._engine.loans.settle()
        self.begin()
        for group in self._arrays:
            update = partial(self._update, group, self.updates)
            if group.has_postponed:
                group.postpone(update, needs_all=group.needs_all)
            else:
                update()
        with _writable():
            for buffer, average in self._buffers:
                average.copy_(self._next(average, buffer, self.updates) if self._use_buffers else buffer)
        self.updates += 1

    def _update(self, group: ShardGroup, updates: int) -> None:
        master, array = group.rest.master, self._arrays[group]  # not `group.master`: its steps are being taken
        with _writable():
            for part in _parts(group, array):
                with array.edit(part) as average:
                    average.copy_(self._next(average, master.read(part).to(average.device), updates))

    def _next(self, average: Tensor, current: Tensor, updates: int) -> Tensor:
        return self._rule(average, current, updates) if updates else current

    # -- in evaluation

    def swap(self) -> None:
        """The module takes the average's values, and gives its own in exchange; called again, they are back. No copy
        is made of either: a bucket at a time changes places, and is sent as after a step."""
        engine = self._engine
        engine.catch_up()
        engine.loans.settle()
        engine.rendezvous.meet_before_collective()  # nobody wants, or has gathered, what is not valid any more
        with _writable(), no_interception():
            for group, array in self._arrays.items():
                for part in _parts(group, array):
                    with array.edit(part) as average, group.master.edit(part) as own:
                        _exchange(average, own)
                group.take_masters()
            for buffer, average in self._buffers:
                _exchange(local_of(average), local_of(buffer))
        publish(engine.groups)
        self.is_swapped = not self.is_swapped

    # -- in checkpoints

    def full(self) -> dict[str, Any]:
        """`module.state_dict()` with the average's values, on the host of every rank. A collective."""
        values = self._values()
        copies = {key: value.clone() for key, value in values.buffers.items()}
        return self._engine.states.full_model(copy=True, of=values._replace(buffers=copies))

    def spread(self) -> dict[str, Any]:
        """The same, to be written by all ranks together."""
        self._engine.loans.catch_up_all()
        return self._engine.states.spread_model(of=self._values())

    def _values(self) -> ModelValues:
        named = self._engine.module.named_buffers()
        buffers = {id(buffer): self._copies[name] for name, buffer in named if name in self._copies}
        return ModelValues("average", self._arrays, self._full, self._owned, buffers)

    def load(self, state: Mapping[str, Any], updates: int) -> None:
        """Goes on from what `full` or `spread` gave, in whatever run that was; each rank reads what it owns. Names that
        are not in `state`, and tensors that have another shape there, stay as they are.

        Raises:
            RuntimeError: on every rank the same, when reading fails on one.
        """
        self.updates, self._loaded = updates, state
        self._read(state, self._arrays, self._values().buffers)

    def _read(
        self, state: Mapping[str, Any], groups: Collection[ShardGroup], buffers: Mapping[int, Tensor] | None = None
    ) -> None:
        if not state:
            return
        with failing_together(self._engine.mesh.world, "reading the average of the model"), _writable():
            for name, own in self._engine.module.state_dict(keep_vars=True).items():
                saved = state.get(as_written(name))
                if isinstance(saved, Tensor) and saved.shape == own.shape:
                    self._load(own, saved, groups, (buffers or {}).get(id(own)))

    def _load(self, own: Tensor, saved: Tensor, groups: Collection[ShardGroup], copy: Tensor | None) -> None:
        slot = slot_of(own) if isinstance(own, Parameter) else None
        if copy is None and (slot is None or slot.group not in groups):
            return
        box, start, stop = Box.of(own), 0, local_of(own).numel()
        if slot is not None:
            box, start, stop = slot.local.box, slot.piece.start, slot.piece.stop
        if not isinstance(saved, LazyTensor):
            part = box.part(saved).reshape(-1)[start:stop]
        elif isinstance(saved.source, Stored):
            extent = box.extent(saved.source.name, start, stop)
            part = torch.empty(extent.numel, dtype=saved.dtype)
            saved.source.read(extent, part)
        else:
            part = box.part(saved.source.whole()).reshape(-1)[start:stop]
        if slot is not None:
            self._arrays[slot.group].write(slot.piece.in_shard, part)
        elif copy is not None:
            local_of(copy).copy_(part.view(local_of(copy).shape))

    def _owned(self, group: ShardGroup) -> Array:
        group.catch_up()
        return self._arrays[group]

    def _full(self, group: ShardGroup) -> Tensor:
        """Of a group, ``(N * S,)``. A collective where ranks own parts of it."""
        if not group.is_cut:
            return self._owned(group).read()
        self._engine.rendezvous.call(self._numbers[group])
        full, self._served = self._served, None
        assert full is not None
        return full

    def _serve(self, group: ShardGroup, keep: bool) -> None:
        if keep:
            self._served = self._engine.loans.gather(group, self._owned(group), "gather average")
        else:
            group.pass_by(self._owned(group), "gather average")


def room_for_average(engine: Engine, *, on_host: bool = False) -> dict[tuple[Category, Tier], int]:
    """Bytes that an `Average` of the engine's model will take on this rank, by tier."""
    room: Counter[tuple[Category, Tier]] = Counter()
    for group in (group for group in engine.groups if group.kind.trainable):
        master, tier = group.rest.master, _place_for(group, on_host).tier
        room[Category.AVERAGE, tier] += master.numel * _wide(master.dtype).itemsize
    for buffer in map(local_of, engine.module.buffers()):
        room[Category.AVERAGE, Tier.DEVICE] += buffer.numel() * _wide(buffer.dtype).itemsize
    return room


def _place_for(group: ShardGroup, on_host: bool) -> Place:
    """Where the average of a group rests: beside what is averaged, or on the host."""
    place = group.rest.master.place
    if on_host and place.tier is Tier.DEVICE and place.device.type != "cpu":
        return Place(torch.device("cpu"), Tier.HOST, pinned=True)
    return place


def _wide(dtype: torch.dtype) -> torch.dtype:
    is_rounded = dtype.is_floating_point or dtype.is_complex
    return torch.promote_types(dtype, torch.float32) if is_rounded else dtype


@contextmanager
def _writable() -> Iterator[None]:
    """Around changes in place, which may be made in the middle of an evaluation, and are not differentiated."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _parts(group: ShardGroup, array: Array) -> Iterator[slice]:
    """Of what this rank owns, a bucket at a time."""
    step = max(group.setting.bucket_bytes // array.dtype.itemsize, 1)
    for start in range(0, array.numel, step):
        yield slice(start, min(start + step, array.numel))


def _exchange(one: Tensor, other: Tensor) -> None:
    held = one.clone()
    one.copy_(other)
    other.copy_(held)
