"""What a fit goes on from besides tensors of the model: random state and counters; and how a module is loaded."""

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
from lightning_zero.views.lazy import LazyTensor, OfOneRank, Partial, Source, Stored, materialize

KEY = "lightning_zero"  # of the checkpoint's entry
PARAMETERS = "optimizer_parameters"  # in it: of each optimizer, the names of the parameters that its state numbers


@final
@dataclass(frozen=True)
class ResumeEntry:
    """The checkpoint's entry `KEY`, as one rank writes and reads it: what it was of the run besides tensors."""

    rank: int
    world: int  # number of ranks
    tensor: int  # how many of them, neighbours, share modules, and draw the same
    device: torch.device  # whose generator is saved too
    tell: Callable[[str], None]  # called with what the user should know

    def capture(self, step: int, parameters: list[list[str]], **counters: Any) -> dict[str, Any]:
        """The entry of a checkpoint after `step` optimizer steps, with plain `counters`; every rank adds its own random
        state. For `parameters` see `PARAMETERS`."""
        mine = {
            name: LazyTensor(OfOneRank(f"rank {self.rank}:{name}", value)) if isinstance(value, Tensor) else value
            for name, value in randomness.capture(self.device).items()
        }
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
        entry = {
            "world": self.world,
            "tensor_parallel_size": self.tensor,
            "step": step,
            "seed": seed,
            "random": Partial("random", {self.rank: mine}),
        }
        return {**entry, PARAMETERS: parameters, **counters}

    def restore_random(self, saved: Mapping[str, Any]) -> None:
        """The random state that this rank had; where there are more or fewer ranks now, or others share modules, a new
        one for each."""
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
    """Keys that a checkpoint and a module do not share, or not in one shape."""

    missing: list[str]  # in the checkpoint
    unexpected: list[str]  # in the checkpoint
    reshaped: list[str]

    def __str__(self) -> str:
        told = f"missing in the checkpoint {self.missing}, unexpected in it {self.unexpected}"
        return f"{told}, of another shape {self.reshaped}"


def load_state_dict(module: Module, state: Mapping[str, Any], *, strict: bool) -> Incompatible:
    """`module.load_state_dict`, with all that users do in its hooks; a compiled model and its plain one are alike.

    Lazy entries are read one by one, as they are copied into the module. What does not match is an error of torch's
    own if `strict`; otherwise it is left as it is.
    """
    own = Module.state_dict(module, keep_vars=True)  # without the user's override, and without a look at values
    names = {as_written(name): name for name in [*vars(own).get("_metadata", ()), *own]}
    state = renamed(state, lambda name: names.get(as_written(name), name))
    state.update({name: _placed(value, own.get(name)) for name, value in state.items()})
    reshaped = [] if strict else [name for name in state if _shape(own.get(name)) not in (None, _shape(state[name]))]
    for name in reshaped:
        del state[name]
    filling = module.register_load_state_dict_post_hook(lambda loaded, _: _fill_assigned(loaded))
    try:
        left = module.load_state_dict(state, strict=strict)
    finally:
        filling.remove()
    if left is None:  # overridden without a return value, which Lightning does not ask for
        return Incompatible([], [], reshaped)
    missing = [name for name in left.missing_keys if name not in reshaped]
    return Incompatible(missing, list(left.unexpected_keys), reshaped)


def _placed(value: Any, own: Any) -> Any:
    """Of a whole tensor what this rank has, where tensor-parallel ranks share the module's own."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if isinstance(value, LazyTensor):
        if isinstance(value.source, Stored):
            return value  # its part is read where it is needed
        value = value.source.whole()
    return value if value.shape != own.shape else as_dtensor(Box.of(own).part(value), own)


def _fill_assigned(module: Module) -> None:
    """A module that overrides `load_state_dict` may say ``assign=True``: then its parameters are lazy tensors."""
    made: dict[Source, Tensor] = {}  # tied ones are one
    for inner in module.modules():
        for name, lazy in [*inner._parameters.items(), *inner._buffers.items()]:
            if isinstance(lazy, LazyTensor):
                if lazy.source not in made:
                    values = lazy.source.whole()
                    made[lazy.source] = Parameter(values, lazy.requires_grad) if name in inner._parameters else values
                setattr(inner, name, made[lazy.source])


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
