"""An optimizer's state as checkpoints hold it, taken from the pieces that ranks step and given back to them."""

import copy
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.run.spread import WHOLE, SpreadBlocks, SpreadState
from lightning_zero.shards.extents import Extent
from lightning_zero.shards.local import local_of
from lightning_zero.shards.moment import wrapped_in
from lightning_zero.shards.optimizer import PieceStepper
from lightning_zero.shards.slot import Slot
from lightning_zero.shards.units import as_written
from lightning_zero.tiers.composed import is_composed
from lightning_zero.views.lazy import LazyTensor, OfOneRank, Partial, Stored, materialize
from lightning_zero.wire.comm import Comm


@final
class OptimizerState:
    """The state of one optimizer, whose parameters are spread over the ranks of `comm`."""

    def __init__(self, stepper: PieceStepper, comm: Comm) -> None:
        self._stepper = stepper
        self._comm = comm

    @property
    def parameter_names(self) -> list[str]:
        """Of the parameters, as `state_dict` numbers them; empty for what the engine does not hold."""
        slots = map(self._slot, self._stepper.parameters)
        return ["" if slot is None else as_written(slot.name) for slot in slots]

    def _slot(self, parameter: Parameter) -> Slot | None:
        """None for what the engine does not hold: every rank has, and steps, all of it."""
        return self._stepper.slot(parameter) if self._stepper.holds(parameter) else None

    def _steps_any(self, parameter: Parameter) -> bool:
        slot = self._slot(parameter)
        return slot is None or slot.steps_any

    def _is_cut(self, parameter: Parameter, name: str, value: Any) -> bool:
        """Whether each rank has its part of this entry."""
        return isinstance(value, Tensor) and self._stepper.holds(parameter) and self._stepper.cut.get(name, False)

    def _is_by_block(self, parameter: Parameter, name: str, value: Any) -> bool:
        """Whether each rank has the entries of its blocks; of what is one block the whole is cut already."""
        is_held = isinstance(value, Tensor) and self._stepper.holds(parameter)
        return is_held and self._stepper.slot(parameter).has_blocks and self._stepper.by_block.get(name, False)

    def _taken(self) -> tuple[dict[str, Any], dict[Any, Any]]:
        """`optimizer.state_dict()`, and of its state what is not of a parameter, which rank 0 has for all. A
        collective.

        Raises:
            RuntimeError: on every rank, when it has tensors outside of what it keeps for each parameter: these may be
                whole or made of pieces, and nobody can tell.
        """
        local = self._stepper.optimizer.state_dict()
        state = local.get("state", {})
        others = {key: value for key, value in state.items() if not _is_index(key)}
        more = {key: value for key, value in local.items() if key not in ("state", "param_groups")}
        self._agree_on_cuts([*_large_in(more), *_large_in(others), *_strange_among(others)])
        return local, others

    def _agree_on_cuts(self, unclear: list[str]) -> None:
        """A rank that owns little may take a tensor that is whole for one that is cut: any other rank knows better.
        What is `unclear` on one is refused by all."""
        known = (self._stepper.cut, self._stepper.by_block)
        told = (copy.deepcopy(known), unclear)
        for theirs, unclear_there in self._comm.all_gather_object(told, "cuts of optimizer state"):
            for mine, of_rank in zip(known, theirs, strict=True):
                mine.update({name: mine.get(name, True) and fits for name, fits in of_rank.items()})
            if unclear_there and self._is_any_cut:
                raise RuntimeError(
                    f"{type(self._stepper.optimizer).__name__}.state_dict() has {', '.join(sorted(unclear_there))}, "
                    "which is no state of one parameter: whether ranks have parts of it cannot be told, and it cannot "
                    "be saved. Keep tensors in state[p][name], and have state_dict() return 'state' and 'param_groups'."
                )

    @property
    def _is_any_cut(self) -> bool:
        return any(slot.group.is_cut or slot.local.is_divided for slot in self._stepper.slots)

    # -- taken

    def full(self) -> dict[str, Any]:
        """`optimizer.state_dict()` as one device would have it. A collective; every rank gets all of it."""
        if not self._stepper.optimizer.state_dict():  # Lightning's stand-in where there is no optimizer
            return {}
        local, others = self._taken()
        parameters = self._stepper.parameters
        described = {
            index: {name: self._described(parameters[index], name, value) for name, value in state.items()}
            for index, state in local.get("state", {}).items()
            # What was made at construction is there for all, and not stepped.
            if index not in others and self._steps_any(parameters[index])
        }
        merged: dict[int, dict[str, Any]] = {}
        for theirs in self._comm.all_gather_object(described, "optimizer state"):
            for index, state in theirs.items():
                for name, value in state.items():
                    merged.setdefault(index, {}).setdefault(name, value)
        full = {
            index: {
                name: self._whole(parameters[index], name, value, local["state"].get(index, {}))
                for name, value in merged[index].items()
            }
            for index in sorted(merged)
        }
        return {**local, "state": {**others, **full}} if "state" in local else local

    def _described(self, parameter: Parameter, name: str, value: Any) -> Any:
        if self._is_cut(parameter, name, value):
            return _Cut(value.dtype)
        if self._is_by_block(parameter, name, value):
            return _Cut(value.dtype, per=self._stepper.slot(parameter).group.setting.block)
        return _on_host(value)

    def _whole(self, parameter: Parameter, name: str, value: Any, mine: Mapping[str, Any]) -> Any:
        """An entry on every rank, put together slice by slice of what ranks own."""
        if not isinstance(value, _Cut):
            return value
        slot = self._stepper.slot(parameter)
        group = slot.group
        if not group.is_cut:
            return _on_host(slot.local.gathered(mine[name]))
        if slot.stepper is not None:
            whole = torch.empty(slot.shape, dtype=value.dtype, device=group.places.gathered.device)
            if slot.steps_any:
                whole.copy_(mine[name])
            self._comm.broadcast(whole, f"state {slot.name} {name}", slot.stepper)
            return _on_host(whole)
        of = group.layout.slice_of(slot.index)
        device = group.places.gathered.device
        rows = torch.zeros(group.layout.ranks, of.width // value.per, dtype=value.dtype, device=device)
        if slot.piece.numel:
            at = (slot.piece.shard_start - of.shard_start) // value.per
            rows[self._comm.rank, at : at - (-slot.piece.numel // value.per)] = mine[name]
        self._comm.all_gather(rows, rows[self._comm.rank], f"state {slot.name} {name}").wait()
        start = (slot.offset - of.start) // value.per
        if value.per > 1:
            return rows.view(-1)[start : start + slot.blocks].to("cpu", copy=True)
        local = rows.view(-1)[start : start + slot.numel].view(slot.shape)
        return slot.local.gathered(local).to("cpu", copy=True)

    def spread(self, name: str) -> dict[str, Any]:
        """`optimizer.state_dict()` to be written by all ranks together, under a name of this optimizer: each has the
        parameters that it owns any of, with a `LazyTensor` for each tensor. A collective of a few bytes."""
        if not self._stepper.optimizer.state_dict():
            return {}
        local, others = self._taken()
        if "state" not in local:
            return local
        mine: dict[Any, Any] = {} if self._comm.rank else dict(others)
        for index, state in local["state"].items():
            if index in others:
                continue
            parameter = self._stepper.parameters[index]
            slot = self._slot(parameter)
            if slot is None or not (state or slot.steps_any):  # looking at `state[p]` has made an empty entry
                continue
            mine[index] = {}
            for key, value in state.items():
                is_cut, full_name = self._is_cut(parameter, key, value), f"{name}:{as_written(slot.name)}:{key}"
                if is_cut and (slot.writes_state_once or slot.state_share.numel):
                    mine[index][key] = LazyTensor(SpreadState(full_name, slot, value))
                elif self._is_by_block(parameter, key, value):
                    if slot.is_first_copy and slot.piece.numel:
                        mine[index][key] = LazyTensor(SpreadBlocks(full_name, slot, value))
                elif slot.writes_state_once:
                    is_tensor = isinstance(value, Tensor) and not is_composed(value)
                    mine[index][key] = LazyTensor(OfOneRank(full_name + WHOLE, value)) if is_tensor else value
        return {**local, "state": Partial(name, mine)}

    # -- given back

    def refuse_other_groups(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ValueError unless a state is of as many parameters, in the same groups."""
        saved = [len(group["params"]) for group in state_dict.get("param_groups", ())]
        own = [len(group["params"]) for group in self._stepper.optimizer.param_groups]
        if saved != own:
            raise ValueError(
                f"The checkpoint's {type(self._stepper.optimizer).__name__} has groups of {saved} parameters, and "
                f"there are groups of {own} now. Resume with the optimizers it was saved with."
            )

    def cut_in_place(self) -> None:
        """Cuts state that exists already (some optimizers make it at construction) to this rank's pieces."""
        made = self._stepper.optimizer.state
        states = {key: state for key, state in made.items() if isinstance(key, Parameter)}
        whole = _names_of_other_shapes(states.items())
        self._note_blocks(states.items())
        for parameter, state in states.items():
            for name, value in state.items():
                cut, slot = self._cut(parameter, name, value, whole), self._slot(parameter)
                is_piece = slot is not None and isinstance(cut, Tensor) and cut.dim()
                state[name] = cut.to(slot.group.places.optimizer.device) if is_piece and slot is not None else cut

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """The optimizer goes on from any strategy's `optimizer.state_dict()`. Of stored tensors only that is read which
        this rank steps, and of what rests on disk a window at a time."""
        parameters, optimizer = self._stepper.parameters, self._stepper.optimizer
        saved = {index: state for index, state in state_dict.get("state", {}).items() if _is_index(index)}
        others = {key: materialize(value) for key, value in state_dict.get("state", {}).items() if key not in saved}
        whole = _names_of_other_shapes((parameters[index], state) for index, state in saved.items())
        self._note_blocks((parameters[index], state) for index, state in saved.items())
        left = {index for index in saved if self._steps_any(parameters[index])}
        loaded: list[Mapping[Any, Any]] = []  # by the optimizer, and those that it wraps
        for slots in self._stepper.loading():  # so that torch casts the state to the dtype of the master
            mine = {slot.parameter for slot in slots}
            now = {index for index in left if parameters[index] in mine or not self._stepper.holds(parameters[index])}
            left -= now
            cut = {
                index: {name: self._cut(parameters[index], name, value, whole) for name, value in saved[index].items()}
                for index in sorted(now)
            }
            state = {"state": {**others, **cut}} if "state" in state_dict else {}
            # Past what Fabric's strategy has put into its place, which calls this.
            type(optimizer).load_state_dict(optimizer, {**state_dict, **state})
            for one, before in zip(wrapped_in(optimizer), loaded, strict=False):
                one.state.update(before)
            loaded = [one.state for one in wrapped_in(optimizer)]

    def _note_blocks(self, states: Iterable[tuple[Any, Mapping[str, Any]]]) -> None:
        """Notes which state tensors have, of every parameter, one entry for each block."""
        by_block = self._stepper.by_block
        for parameter, state in states:
            slot = self._slot(parameter)
            for name, value in state.items() if slot is not None and slot.has_blocks else ():
                fits = isinstance(value, Tensor) and tuple(value.shape) == (slot.blocks,)  # type: ignore[union-attr]
                by_block[name] = by_block.get(name, True) and fits

    def _cut(self, parameter: Parameter, name: str, value: Any, whole: Container[str]) -> Any:
        """This rank's part of an entry. The checkpoint says whether it is cut; of others' the shape has to tell."""
        if not isinstance(value, Tensor) or is_composed(value):
            return value
        stored, slot = value.source if isinstance(value, LazyTensor) else None, self._slot(parameter)
        shape = tuple(parameter.shape) if slot is None else slot.local.box.whole  # a parameter may be its piece now
        is_whole = tuple(value.shape) != shape or name == "step"
        is_whole |= not shape and name in whole  # moments that look like a step count, and like other scalars
        is_whole |= stored is not None and stored.name.endswith(WHOLE)
        if slot is not None:
            self._stepper.cut[name] = self._stepper.cut.get(name, True) and not is_whole
        if slot is not None and is_whole and self._is_by_block(parameter, name, value):
            return self._own_blocks(slot, value, stored)
        if slot is None or is_whole or not (slot.group.is_cut or slot.local.is_divided):
            return local_of(value) if stored is None else stored.whole()
        piece, shape, box = slot.state_piece, slot.state_shape if slot.steps_any else (0,), slot.local.box
        if not isinstance(stored, Stored):
            return box.part(value).reshape(-1)[piece.start : piece.stop].clone().view(shape)
        mine = torch.empty(piece.numel, dtype=stored.dtype, device=slot.group.places.optimizer.device)
        stored.read(box.extent(stored.name, piece.start, piece.stop), mine)
        return mine.view(shape)

    @staticmethod
    def _own_blocks(slot: Slot, value: Tensor, stored: Any) -> Tensor:
        """Of what has one entry for each block, those of this rank's piece."""
        own = slot.own_blocks
        if not isinstance(stored, Stored):
            return value[own].clone()
        mine = torch.empty(own.stop - own.start, dtype=stored.dtype, device=slot.group.places.optimizer.device)
        stored.read(Extent.of_whole(stored.name, (slot.blocks,), own.start, own.stop), mine)
        return mine


def _names_of_other_shapes(states: Iterable[tuple[Any, Mapping[str, Any]]]) -> set[str]:
    """Names of state tensors that have, for some parameter, not its shape."""
    return {
        name
        for parameter, state in states
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape != parameter.shape
    }


def _is_index(key: Any) -> bool:
    """Of a parameter, as `state_dict` numbers them."""
    return isinstance(key, int) and not isinstance(key, bool)


def _large_in(tree: Any, place: str = "") -> list[str]:
    """Where tensors with dimensions are."""
    if isinstance(tree, Tensor):
        return [repr(place)] if tree.dim() else []
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        return [found for key, value in items for found in _large_in(value, f"{place}.{key}".lstrip("."))]
    return []


def _strange_among(keys: Iterable[Any]) -> list[str]:
    return [f"a key of the type {type(key).__name__}" for key in keys if not isinstance(key, str)]


class _Cut(NamedTuple):
    """Stands for a state tensor of which each rank has its piece, one entry `per` so many elements of the parameter."""

    dtype: torch.dtype
    per: int = 1


def _on_host(value: Any) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value
