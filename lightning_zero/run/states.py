"""`States`: takes the states of an engine's model and optimizers for checkpoints, and loads them.

A *full* state is what one device would have. A *spread* state holds lazy entries, which all ranks write together.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.checkpoint.spread import ModelValues, SpreadParameter, SpreadPart
from lightning_zero.device import HOST
from lightning_zero.run.loans import Loans
from lightning_zero.run.optimizer_state import OptimizerState
from lightning_zero.shards.local import whole_of
from lightning_zero.shards.moment import wrapped_in
from lightning_zero.shards.optimizer import PieceStepper
from lightning_zero.shards.units import renamed
from lightning_zero.torch_private import tree_map_only
from lightning_zero.views.lazy import LazyTensor
from lightning_zero.wire.comm import failing_together
from lightning_zero.wire.mesh import Mesh


@final
class States:
    """The states of one module and its optimizers, in order. Call every method on all ranks alike.

    The constructor cuts state that optimizers have already to this rank's pieces.
    """

    def __init__(self, module: Module, steppers: Mapping[Optimizer, PieceStepper], mesh: Mesh, loans: Loans) -> None:
        self._module = module
        self._groups = loans.groups
        self._optimizers = {optimizer: OptimizerState(stepper, mesh.shard) for optimizer, stepper in steppers.items()}
        self._mesh = mesh
        self._loans = loans
        self._runner = loans.runner
        self._own = ModelValues("model", loans.groups, loans.latest.declared, lambda group: group.master, {})
        if any(optimizer.state for optimizer in self._optimizers):  # as users give it to all ranks, or to none
            with failing_together(mesh.world, "taking over the optimizers' states"):
                for state in self._optimizers.values():
                    state.refuse_strange_pieces()
        for state in self._optimizers.values():
            state.begin()
        self._hooks = [
            one.register_load_state_dict_post_hook(state.cut_loaded)
            for optimizer, state in self._optimizers.items()
            for one in wrapped_in(optimizer)  # wrappers may have what they wrap load, and do nothing else
        ]

    def leave(self, *, whole: bool) -> None:
        """Leaves the optimizers to the user: what they load from here on stays as it is. Unless ranks are gone (not
        `whole`), the next engine goes on with their states."""
        for hook in self._hooks:
            hook.remove()
        for state in self._optimizers.values() if whole else ():
            state.leave()

    # -- the model

    def full_model(self, of: ModelValues | None = None) -> dict[str, Any]:
        """Returns `module.state_dict()` with whole values in their declared dtypes. Collective. Every entry has storage
        of its own: a file would hold all of a group for each view of it. Values that rest as shards are copied to the
        host: a whole model may not fit on the device, but one group at a time does.

        Args:
            of: values to return in place of the model's own; they are always copied to the host.
        """
        self._runner.meet_before_collective()
        values = of or self._own
        whole = dict(values.buffers)
        for group in self._groups:
            source = values if group in values.groups else self._own
            full = source.full(group)
            stays_full = group.stays_full and source is self._own
            device = group.places.gathered.device if stays_full else HOST
            for slot in group.slots:
                local, view = slot.local, slot.view(full)
                made = local.gathered(view).to(device) if local.is_divided else local.copied(view, device)
                whole[id(slot.parameter)] = made
        state = self._model_with(whole, copy=True)
        for name, value in state.items():
            state[name] = whole_of(value)
        return state

    def spread_model(self, of: ModelValues | None = None, *, key: str | None = None) -> dict[str, Any]:
        """Returns `module.state_dict()` for all ranks to write together: each parameter of a group is a `LazyTensor`.

        Args:
            of: see `full_model`.
            key: the model's entry in a checkpoint that holds several models.
        """
        self._runner.stepping.recover()
        values = of or self._own
        if key is not None:
            values = values._replace(name=f"{values.name}:{key}")
        for group in self._groups:
            group.catch_up()  # here, where all ranks are, and not as one of them writes
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
        """Returns `module.state_dict()` with `values` (by id) in place of parameters and buffers."""
        # Lightning passes no argument, so a user's override may take none. It then reads the parameters, whose values
        # in its result are whole, and none of them is found by its id.
        takes = inspect.signature(self._module.state_dict).parameters
        finds = "keep_vars" in takes or any(one.kind is one.VAR_KEYWORD for one in takes.values())
        state = renamed(self._module.state_dict(keep_vars=True) if finds else self._module.state_dict())
        for name, own in state.items():
            value = values.get(id(own), own)  # a tied parameter has several names
            if value is own and isinstance(own, Tensor):
                value = own.detach().clone() if copy else own.detach()
            state[name] = value
        return state

    @contextmanager
    def loading(self, verify: Callable[[], None]) -> Iterator[None]:
        """Surrounds `module.load_state_dict` on every rank. Lazy entries are only noted inside. At the end, also of a
        load that fails, each rank reads what it owns, and `verify` checks its share of the rest of the checkpoint.

        Raises:
            RuntimeError: on every rank, when one fails to load or to read.
        """
        self._runner.stepping.recover()
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        self._loans.loading.read_all()
        self._loans.latest.catch_up_all()
        self._runner.meet_before_collective()  # serves ranks that still look at what they load
        self._loans.end_all(all_here=True)  # a rank that looked alone would not ask again, and be ahead
        try:
            with failing_together(self._mesh.world, "reading the model"):
                unread = self._loans.loading.take_error()
                if failed is not None:
                    raise failed
                if unread is not None:
                    raise unread
                verify()
        except RuntimeError:
            if failed is not None:
                raise failed from None
            raise

    def spread_others(self, checkpoint: dict[str, Any], *, full: bool) -> dict[str, Any]:
        """Returns the checkpoint with other tensors in place of the DTensors that users have put into it (an averaged
        copy of the model, for example): lazy ones that all ranks write together, or whole ones if `full`."""
        made: dict[int, Tensor] = {}  # by id: a tensor that stands in two places is written once

        def spread(tensor: DTensor) -> Tensor:
            if id(tensor) not in made:
                source = SpreadPart(f"shared {len(made)}", tensor, self._mesh)
                made[id(tensor)] = source.whole() if full else LazyTensor(source)
            return made[id(tensor)]

        return tree_map_only(DTensor, spread, checkpoint)

    # -- the optimizers, also after the engine is closed

    def full_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns `optimizer.state_dict()` as one device would have it. Collective."""
        self._runner.meet_before_collective()
        return self._optimizers[optimizer].full()

    def spread_optimizer(self, optimizer: Optimizer, key: str | None = None) -> dict[str, Any]:
        """Returns `optimizer.state_dict()` for all ranks to write together, under a name of its own: its place among
        the optimizers, or `key`. Collective. See `OptimizerState.spread`."""
        self._runner.meet_before_collective()
        name = list(self._optimizers).index(optimizer) if key is None else key
        return self._optimizers[optimizer].spread(f"optimizer {name}")

    @property
    def optimizer_parameters(self) -> list[list[str]]:
        """The names of each optimizer's parameters, in order."""
        return [state.parameter_names for state in self._optimizers.values()]

    def load_optimizers(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Loads states of any strategy's checkpoint into the optimizers, in order. Collective.

        Raises:
            ValueError: when an optimizer has other groups of parameters.
            RuntimeError: the same on every rank, when reading fails on one.
        """
        self._load(list(zip(self._optimizers.values(), state_dicts, strict=True)))

    def load_optimizer(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of one optimizer; see `load_optimizers`. Collective."""
        self._load([(self._optimizers[optimizer], state_dict)])

    def _load(self, pairs: Sequence[tuple[OptimizerState, Mapping[str, Any]]]) -> None:
        for state, saved in pairs:
            state.refuse_other_groups(saved)
        self._runner.stepping.recover()
        self._loans.latest.catch_up_all()  # a postponed step belongs to the state before
        if self._groups and not self._groups[0].is_freed:  # after fit parameters are whole, and hold their own values
            self._runner.meet_before_collective()  # serves ranks that still read the values before users' edits
            self._loans.end_all(all_here=True)  # keeps them: on the way out, masters overwrite what was edited
        with failing_together(self._mesh.world, "reading the optimizers"):
            for state, saved in pairs:
                state.load(saved)
