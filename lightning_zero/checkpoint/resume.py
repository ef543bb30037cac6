"""Resumes a fit: its random state and counters, and `load_state_dict` for modules."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_zero.checkpoint import randomness
from lightning_zero.shards.local import Box, as_dtensor
from lightning_zero.shards.units import as_written, renamed
from lightning_zero.torch_private import buffers_in, parameters_in, versions_of
from lightning_zero.views.lazy import LazyTensor, OfOneRank, Partial, Source, Stored, materialize
from lightning_zero.wire.comm import Comm

KEY = "lightning_zero"  # of `ResumeEntry` in a checkpoint
_Left: Any = type(Module().load_state_dict({}))  # a class that torch does not export
PARAMETERS = "optimizer_parameters"  # in it: for each optimizer, the names of the parameters that its state numbers


@final
@dataclass(frozen=True)
class ResumeEntry:
    """Writes and reads a checkpoint's entry `KEY` on one rank: the state of the run without model and optimizers."""

    rank: int
    world: int  # number of ranks
    tensor: int  # number of neighbouring ranks that share modules by tensor parallelism, and draw the same values
    device: torch.device  # its random state is saved, too
    tell: Callable[[str], None]  # called with messages for the user

    def capture(
        self, step: int, parameters: list[list[str]], comm: Comm | None = None, **counters: Any
    ) -> dict[str, Any]:
        """Returns the entry of a checkpoint after `step` optimizer steps, with `PARAMETERS` and plain `counters`.

        With `comm` it has the random states of all ranks, for a file that one rank writes: collective then. Without it
        each rank has its own state there, and writes that.
        """
        states = randomness.capture(self.device)
        random: Any
        if comm is None:
            mine = {
                name: LazyTensor(OfOneRank(f"rank {self.rank}:{name}", value)) if isinstance(value, Tensor) else value
                for name, value in states.items()
            }
            random = Partial("random", {self.rank: mine})
        else:
            random = dict(enumerate(comm.all_gather_object(states, "random state")))
        return {
            "world": self.world,
            "tensor_parallel_size": self.tensor,
            "step": step,
            "seed": int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())),
            "random": random,
            PARAMETERS: parameters,
            **counters,
        }

    def restore_random(self, saved: Mapping[str, Any]) -> None:
        """Restores this rank's random state. If the number of ranks, or of those that share modules, is another one
        than in the checkpoint, every rank gets a new state."""
        then, now = (saved["world"], saved.get("tensor_parallel_size", 1)), (self.world, self.tensor)
        if then == now:
            randomness.restore(materialize(saved["random"][self.rank]), self.device)
            return
        randomness.derive(saved["seed"], saved["step"], self.rank // self.tensor)
        told = f"The checkpoint is of {_ranks(*then)}, and there are {_ranks(*now)}"
        self.tell(f"{told}: each takes a new random state, made of seed, step and rank.")


def _ranks(number: int, tensor: int) -> str:
    return f"{number} ranks" if tensor == 1 else f"{number} ranks (tensor_parallel_size={tensor})"


class Incompatible(NamedTuple):
    """Keys that a checkpoint and a module do not have in common, or not with the same shape."""

    missing: list[str]  # only in the module
    unexpected: list[str]  # only in the checkpoint
    reshaped: list[str]

    def __str__(self) -> str:
        told = f"missing in the checkpoint {self.missing}, unexpected in it {self.unexpected}"
        return f"{told}, of another shape {self.reshaped}"


def load_state_dict(module: Module, state: Mapping[str, Any], *, strict: bool) -> Incompatible:
    """Calls `module.load_state_dict`, hooks included. A compiled model loads the state of a plain one, and the reverse.

    Lazy entries are read one by one, as they are copied into the module. Entries that do not match are an error of
    torch's own if `strict`; otherwise the module's stay as they are.
    """
    own = Module.state_dict(module, keep_vars=True)  # without the user's override, and without reading values
    names = {as_written(name): name for name in [*(versions_of(own) or ()), *own]}
    state = renamed(state, lambda name: names.get(as_written(name), name))
    state.update({name: _placed(value, own.get(name)) for name, value in state.items()})
    reshaped = [] if strict else [name for name in state if _shape(own.get(name)) not in (None, _shape(state[name]))]
    for name in reshaped:
        del state[name]
    with module.register_load_state_dict_post_hook(lambda loaded, _: _fill_assigned(loaded)):
        left = module.load_state_dict(state, strict=strict)
    if not isinstance(left, _Left):  # overridden, or mocked: Lightning asks for no return value
        return Incompatible([], [], reshaped)
    missing = [name for name in left.missing_keys if name not in reshaped]
    return Incompatible(missing, list(left.unexpected_keys), reshaped)


def _placed(value: Any, own: Any) -> Any:
    """Returns `value`, or this rank's part of it where tensor-parallel ranks share the module's own tensor."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if isinstance(value, LazyTensor):
        if isinstance(value.source, Stored):
            return value  # only this rank's part is read, later
        value = value.source.whole()
    return value if value.shape != own.shape else as_dtensor(Box.of(own).part(value), own)


def _fill_assigned(module: Module) -> None:
    """Replaces lazy tensors in a module, whose own `load_state_dict` said ``assign=True``, by their values."""
    made: dict[Source, Tensor] = {}  # so that tied parameters stay tied
    for inner in module.modules():
        parameters = parameters_in(inner)
        for name, lazy in [*parameters.items(), *buffers_in(inner).items()]:
            if isinstance(lazy, LazyTensor):
                if lazy.source not in made:
                    values = lazy.source.whole()
                    made[lazy.source] = Parameter(values, lazy.requires_grad) if name in parameters else values
                setattr(inner, name, made[lazy.source])


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
