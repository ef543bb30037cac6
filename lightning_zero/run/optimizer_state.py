"""`OptimizerState`: gathers an optimizer's state from the pieces that ranks step, and cuts a loaded one into them."""

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.checkpoint.spread import WHOLE, SpreadBlocks, SpreadState, read_part
from lightning_zero.device import HOST
from lightning_zero.run.pieces import places, refuse_pieces
from lightning_zero.shards.local import Box, local_of
from lightning_zero.shards.moment import wrapped_in
from lightning_zero.shards.optimizer import PieceStepper
from lightning_zero.shards.slot import Slot
from lightning_zero.shards.trial import LEFT_IN_PIECES, is_single, large_in, nested_in
from lightning_zero.shards.units import as_written
from lightning_zero.shards.written import Written
from lightning_zero.tiers.composed import is_composed
from lightning_zero.torch_private import tree_map_only
from lightning_zero.views.lazy import LazyTensor, OfOneRank, Partial, materialize
from lightning_zero.wire.comm import Comm

States = Sequence[tuple[Parameter, dict[str, Any]]]  # by parameter


@final
class OptimizerState:
    """The state of one optimizer, whose parameters are sharded over the ranks of `comm`."""

    def __init__(self, stepper: PieceStepper, comm: Comm) -> None:
        self._stepper = stepper
        self._comm = comm

    @property
    def parameter_names(self) -> list[str]:
        """Names of the parameters, as `state_dict` numbers them; empty for one that the engine does not hold."""
        slots = map(self._slot, self._stepper.parameters)
        return ["" if slot is None else as_written(slot.name) for slot in slots]

    def _slot(self, parameter: Parameter) -> Slot | None:
        """Returns None for a parameter that the engine does not hold: every rank has, and steps, all of it."""
        return self._stepper.slot(parameter) if self._stepper.holds(parameter) else None

    def _steps_any(self, parameter: Parameter) -> bool:
        slot = self._slot(parameter)
        return slot is None or slot.steps_any

    def _is_in_pieces(self, index: int) -> bool:
        """Whether ranks each step a part of the parameter with this number."""
        slot = self._slot(self._stepper.parameters[index])
        return slot is not None and slot.stepper is None

    def _per(self, slot: Slot | None, name: str, value: Any) -> int:
        """Returns how many elements of the parameter one element of the entry stands for: 1 where the entry is cut as
        the parameter is, a block's size where it has an element for each block, 0 where it is not cut."""
        if slot is None or not isinstance(value, Tensor):
            return 0
        if self._stepper.known.cut.get(name, False):
            return 1
        return slot.group.setting.block if slot.has_blocks and self._stepper.known.by_block.get(name, False) else 0

    def _taken(self) -> tuple[dict[str, Any], dict[Any, Any]]:
        """Returns `optimizer.state_dict()`, and those entries of its state that belong to no parameter, which rank 0
        saves for all. Collective.

        Raises:
            RuntimeError: on every rank, when there are tensors outside of the state of single parameters, or in
                containers in it, of parameters that are stepped in pieces: whether these are whole or made of pieces
                cannot be told. After fit, when users have loaded whole state: nothing cuts it any more.
        """
        if LEFT_IN_PIECES in vars(self._stepper.optimizer) and self._has_whole_anywhere():
            raise RuntimeError(
                f"{type(self._stepper.optimizer).__name__} was given whole state after fit had ended, which this "
                "strategy does not save. Save optimizer.state_dict() yourself, or load the state in another fit."
            )
        local = self._stepper.optimizer.state_dict()
        state = local.get("state", {})
        others = {key: value for key, value in state.items() if not _is_index(key)}
        more = {key: value for key, value in local.items() if key not in ("state", "param_groups")}
        strange = [f"a key of the type {type(key).__name__}" for key in others if not isinstance(key, str)]
        in_pieces = [state[index] for index in state if _is_index(index) and self._is_in_pieces(index)]
        nested = itertools.chain(*map(nested_in, in_pieces))
        large = {key: value for key, value in others.items() if not is_single(value)}  # a count may be a tensor
        unclear = [*large_in(more), *large_in(large), *strange]
        self._agree_on_cuts(dict.fromkeys(nested, True) | dict.fromkeys(unclear, False))
        return local, others

    def _agree_on_cuts(self, unclear: Mapping[str, bool]) -> None:
        """Agrees with all ranks on which entries are cut, and refuses what is `unclear` on any rank. Of each of that it
        is said whether it would be clear of whole tensors. Collective.

        On a rank that owns little, a whole tensor may have the shape of a piece by chance: such a rank takes it for
        cut, until a rank on which the shapes differ says otherwise.
        """
        known = (self._stepper.known.cut, self._stepper.known.by_block)
        told = (copy.deepcopy(known), unclear)
        for theirs, unclear_there in self._comm.all_gather_object(told, "cuts of optimizer state"):
            for mine, of_rank in zip(known, theirs, strict=True):
                mine.update({name: mine.get(name, True) and fits for name, fits in of_rank.items()})
            if unclear_there and any(slot.group.is_cut or slot.local.is_divided for slot in self._stepper.slots):
                raise RuntimeError(
                    f"{type(self._stepper.optimizer).__name__}.state_dict() has {', '.join(sorted(unclear_there))}, "
                    "which is no entry of one parameter's state: whether ranks have parts of it cannot be told, and "
                    "it cannot be saved. Keep tensors in state[p][name] itself, and have state_dict() return 'state' "
                    "and 'param_groups'" + ("; or write granularity='tensor'." if all(unclear_there.values()) else ".")
                )

    # -- to checkpoints

    def full(self) -> dict[str, Any]:
        """Returns `optimizer.state_dict()` as one device would have it, all of it on every rank. Collective."""
        if not self._stepper.optimizer.state_dict():  # Lightning's stand-in where there is no optimizer
            return {}
        local, others = self._taken()
        parameters = self._stepper.parameters
        described = {
            index: {name: self._described(self._slot(parameters[index]), name, value) for name, value in state.items()}
            for index, state in local.get("state", {}).items()
            # State that was made at construction is on every rank, also on those that do not step the parameter.
            if index not in others and self._steps_any(parameters[index])
        }
        merged = defaultdict[int, dict[str, Any]](dict)
        for theirs in self._comm.all_gather_object(described, "optimizer state"):
            for index, state in theirs.items():
                for name, value in state.items():
                    merged[index].setdefault(name, value)
        full = {
            index: {
                name: self._gathered(parameters[index], name, value, local["state"].get(index, {}))
                for name, value in merged[index].items()
            }
            for index in sorted(merged)
        }
        return {**local, "state": {**others, **full}} if "state" in local else local

    def _described(self, slot: Slot | None, name: str, value: Any) -> Any:
        """Returns what other ranks need to know of an entry: a `_Cut`, or the value itself where it is not cut."""
        per = self._per(slot, name, value)
        return _Cut(value.dtype, per) if per else _on_host(value)

    def _gathered(self, parameter: Parameter, name: str, value: Any, mine: Mapping[str, Any]) -> Any:
        """Returns the whole entry that `_described` gave as `value`; `mine` is this rank's state. Collective."""
        if not isinstance(value, _Cut):
            return value
        slot = self._stepper.slot(parameter)
        group, purpose = slot.group, f"state {slot.name} {name}"
        if not group.is_cut:
            return _on_host(slot.local.gathered(mine[name]))
        device = group.places.gathered.device
        if slot.stepper is not None:
            whole = torch.empty(slot.shape, dtype=value.dtype, device=device)
            if slot.steps_any:
                whole.copy_(mine[name])
            self._comm.broadcast(whole, purpose, slot.stepper)
            return _on_host(whole)
        of = group.layout.slice_of(slot.index)
        rows = torch.zeros(group.layout.ranks, of.width // value.per, dtype=value.dtype, device=device)
        own = rows[self._comm.rank]
        if slot.piece.numel:
            start = (slot.piece.shard_start - of.shard_start) // value.per
            own[start : start - (-slot.piece.numel // value.per)] = mine[name]
        self._comm.all_gather(rows, own, purpose).wait()
        start = (slot.offset - of.start) // value.per
        if value.per > 1:
            return rows.view(-1)[start : start + slot.blocks].to("cpu", copy=True)
        local = rows.view(-1)[start : start + slot.numel].view(slot.shape)
        return slot.local.gathered(local).to("cpu", copy=True)

    def spread(self, name: str) -> dict[str, Any]:
        """Returns `optimizer.state_dict()` for all ranks to write together under `name`. Collective, of a few bytes.

        Each rank has the state of those parameters that it owns any part of, with a `LazyTensor` for each tensor.
        """
        if not self._stepper.optimizer.state_dict():
            return {}
        local, others = self._taken()
        if "state" not in local:
            return local
        mine: dict[Any, Any] = {} if self._comm.rank else dict(others)
        for index, state in local["state"].items():
            if index in others:
                continue
            slot = self._slot(self._stepper.parameters[index])
            if slot is None or not slot.steps_any:
                continue
            mine[index], written = {}, Written(slot)
            for key, value in state.items():
                full_name, per = f"{name}:{as_written(slot.name)}:{key}", self._per(slot, key, value)
                if per == 1:
                    if written.is_first_of_state or written.state.numel:
                        mine[index][key] = LazyTensor(SpreadState(full_name, slot, value))
                elif per:
                    if written.is_first_copy and slot.piece.numel:
                        mine[index][key] = LazyTensor(SpreadBlocks(full_name, slot, value))
                elif written.is_first_of_state:
                    is_tensor = isinstance(value, Tensor) and not is_composed(value)
                    mine[index][key] = LazyTensor(OfOneRank(full_name + WHOLE, value)) if is_tensor else value
        return {**local, "state": Partial(name, mine)}

    # -- from checkpoints

    def refuse_other_groups(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ValueError unless a state is of as many parameters, in the same groups."""
        saved = [len(group["params"]) for group in state_dict.get("param_groups", ())]
        own = [len(group["params"]) for group in self._stepper.optimizer.param_groups]
        if saved != own:
            raise ValueError(
                f"The checkpoint's {type(self._stepper.optimizer).__name__} has groups of {saved} parameters, and "
                f"there are groups of {own} now. Resume with the optimizers it was saved with."
            )

    def refuse_strange_pieces(self) -> None:
        """Raises ValueError where user code has loaded pieces: of which rank, and how they were cut, cannot be told."""
        if LEFT_IN_PIECES not in vars(self._stepper.optimizer):
            self._refuse_pieces(self._made())

    def begin(self) -> None:
        """Cuts state that exists already to this rank's pieces: some optimizers make it at construction, users may have
        loaded it, and an earlier engine may have left its own pieces. Collective."""
        left: OptimizerState | None = vars(self._stepper.optimizer).pop(LEFT_IN_PIECES, None)
        if left is None or left._has_whole_anywhere():
            self._cut_in_place()
        elif self._is_cut_as(left):
            self._stepper.known.cut.update(left._stepper.known.cut)
            self._stepper.known.by_block.update(left._stepper.known.by_block)
            self._put(self._stepper.optimizer.state_dict(), lambda _, __, value: value)
        else:
            self.load(left.full())

    def leave(self) -> None:
        """Leaves its pieces in the optimizer: an engine that follows goes on with them."""
        with suppress(RuntimeError):  # a parameter is not the module's, which has ended the run
            slots = self._stepper.slots
            if any(slot.group.is_cut or slot.local.is_divided or slot.stepper is not None for slot in slots):
                vars(self._stepper.optimizer)[LEFT_IN_PIECES] = self

    def _made(self) -> States:
        """Returns the state that the optimizer has, by parameter."""
        return [(key, state) for key, state in self._stepper.optimizer.state.items() if isinstance(key, Parameter)]

    def _refuse_pieces(self, states: States, *, but_own: bool = False) -> None:
        of_slots = [(self._slot(parameter), state) for parameter, state in states]
        refuse_pieces(self._stepper.optimizer, of_slots, but_own=but_own)

    def _has_whole_anywhere(self) -> bool:
        """Whether user code has loaded whole state since the pieces were left. Collective, as on the rank that steps a
        whole tensor nothing tells."""
        own = any(self._is_whole(*entry) for entry in self._stepper.optimizer.state.items())
        return any(self._comm.all_gather_object(own, "state that was left"))

    def _is_cut_as(self, other: "OptimizerState") -> bool:
        """Whether every rank has the pieces that it has in `other`; the same on all ranks."""
        return all(places(self._slot(one)) == places(other._slot(one)) for one in self._stepper.parameters)

    def _cut_in_place(self) -> None:
        """Cuts whole state to this rank's pieces."""
        states = self._made()
        differing = self._note_shapes(states)
        for parameter, state in states:
            slot = self._slot(parameter)
            for name, value in state.items():
                cut = self._cut(parameter, name, value, differing)
                if slot is not None and isinstance(cut, Tensor) and cut.dim():
                    cut = cut.to(slot.group.places.optimizer.device)
                state[name] = cut

    def cut_loaded(self, _: Optimizer) -> None:
        """Cuts the state to this rank's pieces, if user code has just loaded one as a single device has it."""
        if self._stepper.is_stepping:  # `load` calls the optimizer, with what it has cut
            return
        self._refuse_pieces(self._made(), but_own=True)
        if any(self._is_whole(key, state) for key, state in self._stepper.optimizer.state.items()):
            self._cut_in_place()

    def _is_whole(self, key: Any, state: Any) -> bool:
        """Whether state of a parameter has a tensor of its shape, where this rank's has another one: of a part, or of
        all in one row. Of a parameter that is a single number nothing can be told: a count of steps is one, too."""
        slot = self._slot(key) if isinstance(key, Parameter) else None
        if slot is None or not slot.numel:
            return False
        whole, known = slot.local.box.whole, self._stepper.known.cut
        if slot.steps_any and slot.state_shape == whole:
            return False
        may_be_cut = [value for name, value in state.items() if isinstance(value, Tensor) and known.get(name, True)]
        return bool(whole) and any(tuple(value.shape) == whole for value in may_be_cut)

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Loads any strategy's `optimizer.state_dict()`. Reads only those elements of stored tensors that this rank
        steps, and one window at a time where state rests on disk."""
        saved, parameters = _by_index(state_dict), self._stepper.parameters
        states = [(parameters[index], state) for index, state in saved.items()]
        self._refuse_pieces(states)
        differing = self._note_shapes(states)
        self._put(state_dict, lambda parameter, name, value: self._cut(parameter, name, value, differing))

    def _put(self, state_dict: Mapping[str, Any], cut: Callable[[Parameter, str, Any], Any]) -> None:
        """Has the optimizer load a state, of whose entries this rank takes what `cut` returns."""
        parameters, optimizer, saved = self._stepper.parameters, self._stepper.optimizer, _by_index(state_dict)
        others = {key: materialize(value) for key, value in state_dict.get("state", {}).items() if key not in saved}
        left = set(saved)
        loaded: list[Mapping[Any, Any]] = []  # the state so far of the optimizer, and of those that it wraps
        for slots in self._stepper.loading():  # shows pieces, so that torch casts the state to the master's dtype
            mine = {slot.parameter for slot in slots}
            now = {index for index in left if parameters[index] in mine or not self._stepper.holds(parameters[index])}
            left -= now
            own = {
                index: {name: cut(parameters[index], name, value) for name, value in saved[index].items()}
                for index in sorted(now)
            }
            state = {"state": {**others, **own}} if "state" in state_dict else {}
            # The method of the class: on the object, Fabric's strategy has put one in its place that calls this one.
            type(optimizer).load_state_dict(optimizer, {**state_dict, **state})
            for one, before in zip(wrapped_in(optimizer), loaded, strict=False):
                one.state.update(before)
            loaded = [one.state for one in wrapped_in(optimizer)]

    def _note_shapes(self, states: States) -> set[str]:
        """Notes which entries have, for every parameter, an element for each block.

        Returns names of entries whose shape is, for some parameter, not the parameter's.
        """
        differing: set[str] = set()
        by_block = self._stepper.known.by_block
        for parameter, state in states:
            slot = self._slot(parameter)
            for name, value in state.items():
                is_tensor = isinstance(value, Tensor)
                if is_tensor and value.shape != parameter.shape:
                    differing.add(name)
                if slot is not None and slot.has_blocks:
                    fits = is_tensor and tuple(value.shape) == (slot.blocks,)
                    by_block[name] = by_block.get(name, True) and fits
        return differing

    def _cut(self, parameter: Parameter, name: str, value: Any, differing: Container[str]) -> Any:
        """Returns this rank's part of an entry. Our own checkpoints name an entry by whether it is cut; in others its
        shape has to tell. `differing` is what `_note_shapes` returned."""
        if not isinstance(value, Tensor):  # perhaps a list of them, of an optimizer that steps whole tensors
            if self._steps_any(parameter):
                return materialize(value)
            return tree_map_only(Tensor, lambda tensor: torch.empty(0, dtype=tensor.dtype, device=HOST), value)
        if is_composed(value):
            return value if self._steps_any(parameter) else torch.empty(0, dtype=value.dtype, device=HOST)
        stored, slot = value.source if isinstance(value, LazyTensor) else None, self._slot(parameter)
        shape = tuple(parameter.shape) if slot is None else slot.local.box.whole  # a parameter may be its piece now
        is_whole = tuple(value.shape) != shape or name == "step"
        # For a scalar parameter, moments and step counts have one shape: the shapes for other parameters tell.
        is_whole |= not shape and name in differing
        is_whole |= stored is not None and stored.name.endswith(WHOLE)
        if slot is not None:
            self._stepper.known.cut[name] = self._stepper.known.cut.get(name, True) and not is_whole
            device = slot.group.places.optimizer.device
            if not slot.steps_any and (value.dim() or not is_whole):
                return torch.empty(0, dtype=value.dtype, device=device)
            if is_whole and self._per(slot, name, value):
                return read_part(value, Box.of(value), slot.own_blocks.start, slot.own_blocks.stop, device)
            if not is_whole and (slot.group.is_cut or slot.local.is_divided):
                part = read_part(value, slot.local.box, slot.state_piece.start, slot.state_piece.stop, device)
                return part.view(slot.state_shape)
        return local_of(value) if stored is None else stored.whole()


def _by_index(state_dict: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Returns the state of single parameters, by their numbers."""
    return {index: state for index, state in state_dict.get("state", {}).items() if _is_index(index)}


def _is_index(key: Any) -> bool:
    """Whether a key of the state is a parameter's number in `state_dict`."""
    return isinstance(key, int) and not isinstance(key, bool)


class _Cut(NamedTuple):
    """Stands for a state tensor of which each rank has a part; see `OptimizerState._per`."""

    dtype: torch.dtype
    per: int


def _on_host(value: Any) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value
