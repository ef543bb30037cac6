"""`States`: what checkpoints hold of an engine: the model's and the optimizers' states, taken and given back.

*Full* states are those that one device would have; *spread* ones are lazy entries that all ranks write together.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero.group import ShardGroup
from lightning_zero.lazy import LazyTensor, Stored
from lightning_zero.mesh import Mesh
from lightning_zero.optimizer import PieceStepper
from lightning_zero.rendezvous import Rendezvous
from lightning_zero.spread import SpreadParameter
from lightning_zero.units import as_written


@final
class States:
    """Those of one module and its optimizers. All ranks call the same.

    Args:
        module: that the groups are of.
        groups: of its parameters.
        steppers: of the optimizers, in order.
        mesh: the ranks.
        rendezvous: ended before the optimizers' collectives.
    """

    def __init__(
        self,
        module: Module,
        groups: Sequence[ShardGroup],
        steppers: Mapping[Optimizer, PieceStepper],
        mesh: Mesh,
        rendezvous: Rendezvous,
    ) -> None:
        self._module = module
        self._groups = groups
        self._steppers = steppers
        self._mesh = mesh
        self._rendezvous = rendezvous

    # -- of the model

    def full_model(self, *, copy: bool) -> dict[str, Any]:
        """`module.state_dict()` with whole values in their declared dtypes. A collective.

        Args:
            copy: give every entry storage of its own; a view would drag its whole group into a file.
        """
        state = self._module.state_dict(keep_vars=True)
        grouped = {id(parameter) for group in self._groups for parameter in group.parameters}
        names: dict[int, list[str]] = {}  # a tied parameter has several
        for name, value in state.items():
            names.setdefault(id(value), []).append(name)
            if isinstance(value, Tensor) and id(value) not in grouped:
                state[name] = value.detach().clone() if copy else value.detach()
        for group in self._groups:
            if any(id(parameter) in names for parameter in group.parameters):
                for parameter, whole in zip(group.parameters, group.whole_values(copy=copy), strict=True):
                    state.update(dict.fromkeys(names.get(id(parameter), ()), whole))
        return {as_written(name): value for name, value in state.items()}

    def spread_model(self) -> dict[str, Any]:
        """`module.state_dict()` to be written by all ranks together: a `LazyTensor` for every parameter of a group."""
        lazy = {
            id(parameter): LazyTensor(SpreadParameter(group, index))
            for group in self._groups
            for index, parameter in enumerate(group.parameters)
        }
        state = self._module.state_dict(keep_vars=True)
        for name, value in state.items():
            if id(value) in lazy:
                state[name] = lazy[id(value)]
            elif isinstance(value, Tensor):
                state[name] = value.detach()
        return {as_written(name): value for name, value in state.items()}

    def load_model(
        self, stored: Mapping[Parameter, Stored], verify: Callable[[], None], *, read: Container[Parameter] = ()
    ) -> None:
        """Parameters take the values of a checkpoint; each rank reads what it owns. A collective.

        Args:
            stored: where the values of the module's parameters are.
            verify: checks this rank's share of what is not read.
            read: those of `stored` whose values were read, and perhaps edited, before there was an engine. They stay as
                they are, if they were read on rank 0, which all ranks start from.

        Raises:
            RuntimeError: on every rank the same, when reading fails on one.
        """
        world = self._mesh.world
        own = set(self._module.parameters())  # what users have put in the place of others is not in the checkpoint
        is_read = torch.tensor([p in read or p not in own for p in stored], dtype=torch.uint8)
        world.broadcast(is_read, "read before")
        stored = {parameter: stored[parameter] for parameter, was in zip(stored, is_read, strict=True) if not was}
        grouped = {parameter for group in self._groups for parameter in group.parameters}
        rest = [parameter for parameter in stored if parameter not in grouped]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), self._failing_together("reading the model"):
            for group in self._groups:
                group.load({at: stored[p] for at, p in enumerate(group.parameters) if p in stored})
            for parameter in rest if world.rank == 0 else []:
                parameter.copy_(stored[parameter].whole())
            verify()
        with torch.no_grad():
            for group in self._groups:
                group.release()
                group.publish_loaded()
            for number, parameter in enumerate(rest):  # every rank holds all of them
                values = parameter.detach().contiguous()
                world.broadcast(values, f"loaded {number}")
                parameter.copy_(values)

    # -- of the optimizers; these work after the engine was closed, too

    def full_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """`optimizer.state_dict()` as one device would have it. A collective."""
        with self._rendezvous.ended():
            return self._steppers[optimizer].full_state_dict(self._mesh.shard)

    def spread_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """The same, to be written by all ranks together; see `PieceStepper.spread_state_dict`."""
        name = f"optimizer {list(self._steppers).index(optimizer)}"
        with self._rendezvous.ended():
            return self._steppers[optimizer].spread_state_dict(name, self._mesh.shard)

    @property
    def optimizer_parameters(self) -> list[list[str]]:
        """Of each optimizer, the names of its parameters in order."""
        return [stepper.parameter_names for stepper in self._steppers.values()]

    def load_optimizers(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Optimizers take the states of any strategy's checkpoint, in order. A collective.

        Raises:
            ValueError: when an optimizer has other groups of parameters.
            RuntimeError: on every rank the same, when reading fails on one.
        """
        steppers = list(self._steppers.values())
        for stepper, state in zip(steppers, state_dicts, strict=True):
            stepper.refuse_other_groups(state)
        with self._failing_together("reading the optimizers"):
            cut = [stepper.cut_state_dict(state) for stepper, state in zip(steppers, state_dicts, strict=True)]
        for stepper, state in zip(steppers, cut, strict=True):
            stepper.load_cut_state_dict(state)

    @contextmanager
    def _failing_together(self, doing: str) -> Iterator[None]:
        """What fails on one rank inside fails on all; nothing inside may wait for other ranks."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        told = self._mesh.world.all_gather_object(None if failed is None else str(failed), doing)
        for rank, reason in enumerate(told):
            if reason is not None:
                raise RuntimeError(f"rank {rank}, {doing}: {reason}") from failed
