"""`States`: what checkpoints hold of an engine: the model's and the optimizers' states, taken and given back.

*Full* states are those that one device would have; *spread* ones are lazy entries that all ranks write together.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_zero.run.loans import Loans
from lightning_zero.run.optimizer_state import OptimizerState
from lightning_zero.run.spread import ModelValues, SpreadParameter, SpreadPart
from lightning_zero.shards.group import publish
from lightning_zero.shards.local import whole_of
from lightning_zero.shards.optimizer import PieceStepper
from lightning_zero.shards.units import renamed
from lightning_zero.views.lazy import LazyTensor
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.mesh import Mesh

HOST = torch.device("cpu")


@final
class States:
    """Those of one module and its optimizers, in order. All ranks call the same.

    State that optimizers have made at construction is cut to this rank's pieces.
    """

    def __init__(self, module: Module, steppers: Mapping[Optimizer, PieceStepper], mesh: Mesh, loans: Loans) -> None:
        self._module = module
        self._groups = loans.groups
        self._optimizers = {optimizer: OptimizerState(stepper, mesh.shard) for optimizer, stepper in steppers.items()}
        self._mesh = mesh
        self._loans = loans
        self._rendezvous = loans.rendezvous
        self._own = ModelValues("model", loans.groups, loans.declared, lambda group: group.master, {})
        for state in self._optimizers.values():
            state.cut_in_place()

    # -- of the model

    def full_model(self, *, copy: bool, of: ModelValues | None = None) -> dict[str, Any]:
        """`module.state_dict()` with whole values in their declared dtypes. A collective. What rests as shards is
        copied to the host: a whole model may not fit on the device, and one group at a time does.

        Args:
            copy: give every entry storage of its own; a view would drag its whole group into a file.
            of: other values than the model's own; never there in full, these are copied to the host.
        """
        self._rendezvous.meet_before_collective()
        whole = dict((of or self._own).buffers)
        for group in self._groups:
            values = of if of is not None and group in of.groups else self._own
            full = values.full(group)
            stays_full = group.stays_full and values is self._own
            device = group.setting.places.gathered.device if stays_full else HOST
            for slot in group.slots:
                view = slot.view(full)
                if slot.local.is_divided:
                    view = slot.local.gathered(view).to(device)
                elif copy or not stays_full:
                    view = slot.whole(view, device)
                whole[id(slot.parameter)] = view
        state = self._model_with(whole, copy=copy)
        for name, value in state.items():
            state[name] = whole_of(value)
        return state

    def spread_model(self, of: ModelValues | None = None, *, key: str | None = None) -> dict[str, Any]:
        """`module.state_dict()` to be written by all ranks together: a `LazyTensor` for every parameter of a group.

        Args:
            of: see `full_model`.
            key: the entry of the checkpoint, where one holds several models.
        """
        values = of or self._own
        if key is not None:
            values = values._replace(name=f"{values.name}:{key}")
        lazy: dict[int, Tensor] = {
            id(slot.parameter): LazyTensor(SpreadParameter(slot, values if group in values.groups else self._own))
            for group in self._groups
            for slot in group.slots
        }
        state = self._model_with({**values.buffers, **lazy}, copy=False)
        for name, value in state.items():
            if isinstance(value, DTensor):
                state[name] = LazyTensor(SpreadPart(f"{values.name}:{name}", value, self._mesh))
        return state

    def _model_with(self, values: Mapping[int, Tensor], *, copy: bool) -> dict[str, Any]:
        """`module.state_dict()` with other values for parameters, by id."""
        takes = inspect.signature(self._module.state_dict).parameters
        # Lightning passes nothing, so users may override it without arguments: then it reads, and values are whole.
        finds = "keep_vars" in takes or any(one.kind is one.VAR_KEYWORD for one in takes.values())
        state = renamed(self._module.state_dict(keep_vars=True) if finds else self._module.state_dict())
        for name, own in state.items():
            value = values.get(id(own), own)  # a tied parameter has several names
            if value is own and isinstance(own, Tensor):
                value = own.detach().clone() if copy else own.detach()
            state[name] = value
        return state

    def load_noted(self, verify: Callable[[], None]) -> None:
        """After `module.load_state_dict` with lazy entries, of which parameters have only noted where they are: each
        rank reads what it owns, and lets `verify` check its share of the rest. A collective.

        Raises:
            RuntimeError: on every rank the same, when reading fails on one.
        """
        self._loans.catch_up_all()
        self._loans.settle()  # copies that are lent are of what was there before
        with failing_together(self._mesh.world, "reading the model"):
            self._loans.read_noted()
            verify()
        self._rendezvous.meet_before_collective()  # what is gathered is stale
        publish(self._groups)

    def spread_others(self, checkpoint: dict[str, Any], *, full: bool) -> dict[str, Any]:
        """A checkpoint with what users have put into it of tensors that tensor-parallel ranks share (a copy of the
        model, averaged): to be written by all ranks together, or `full`."""
        made: dict[int, Tensor] = {}  # by id: what stands in two places is one tensor

        def spread(tensor: DTensor) -> Tensor:
            if id(tensor) not in made:
                source = SpreadPart(f"shared {len(made)}", tensor, self._mesh)
                made[id(tensor)] = source.whole() if full else LazyTensor(source)
            return made[id(tensor)]

        spread_all: dict[str, Any] = tree_map_only(DTensor, spread, checkpoint)
        return spread_all

    # -- of the optimizers; these work after the engine was closed, too

    def full_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """`optimizer.state_dict()` as one device would have it. A collective."""
        self._rendezvous.meet_before_collective()
        return self._optimizers[optimizer].full()

    def spread_optimizer(self, optimizer: Optimizer, key: str | None = None) -> dict[str, Any]:
        """The same, to be written by all ranks together under a name of its own (its place, or `key`); see
        `OptimizerState.spread`."""
        self._rendezvous.meet_before_collective()
        name = list(self._optimizers).index(optimizer) if key is None else key
        return self._optimizers[optimizer].spread(f"optimizer {name}")

    @property
    def optimizer_parameters(self) -> list[list[str]]:
        """Of each optimizer, the names of its parameters in order."""
        return [state.parameter_names for state in self._optimizers.values()]

    def load_optimizers(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Optimizers take the states of any strategy's checkpoint, in order. A collective.

        Raises:
            ValueError: when an optimizer has other groups of parameters.
            RuntimeError: on every rank the same, when reading fails on one.
        """
        self._load(list(zip(self._optimizers.values(), state_dicts, strict=True)))

    def load_optimizer(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """As `load_optimizers`, for one of them."""
        self._load([(self._optimizers[optimizer], state_dict)])

    def _load(self, pairs: Sequence[tuple[OptimizerState, Mapping[str, Any]]]) -> None:
        for state, saved in pairs:
            state.refuse_other_groups(saved)
        with failing_together(self._mesh.world, "reading the optimizers"):
            for state, saved in pairs:
                state.load(saved)


@contextmanager
def failing_together(comm: Comm, doing: str) -> Iterator[None]:
    """What fails on one rank inside, `doing` something, fails on all; nothing inside may wait for other ranks."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    for rank, reason in enumerate(comm.all_gather_object(None if failed is None else str(failed), doing)):
        if reason is not None:
            raise RuntimeError(f"rank {rank}, {doing}: {reason}") from failed
