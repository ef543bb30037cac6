"""Which weights autocast casts at each use: those may rest in its dtype, and no bit of the result changes.

Each such weight is held by one module, and is read by the forward of one module: its own, or that of the attention
around it. `run/module_hooks.py` shows it there as it rests.
"""

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.nn import Module, Parameter, RNNBase
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_zero.shards.local import local_of
from lightning_zero.shards.units import FUSED, modules_in_compiled_regions
from lightning_zero.torch_private import has_call_hooks, parameters_in

_OWN = ("weight", "bias")
_OF_CELL = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_OF_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
_UNCAST_OF_ATTENTION = ("bias_k", "bias_v")  # they are appended to keys and values as they are

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CELLS = (nn.RNNCell, nn.LSTMCell, nn.GRUCell)

# In one call of these modules' own forward, autocast casts each of these weights once. Not so in `RNNBase`: where no
# kernel takes the whole sequence, each time step casts anew, and gradients of all steps are summed in fp32. Nor in
# Bilinear, which computes in fp32 on a GPU.
CAST_BY_AUTOCAST: dict[type[Module], tuple[str, ...]] = {
    nn.Linear: _OWN,
    **dict.fromkeys(CONVOLUTIONS, _OWN),
    **dict.fromkeys(CELLS, _OF_CELL),
    nn.MultiheadAttention: _OF_ATTENTION,
}
_OF_OTHERS = {"transformers.pytorch_utils.Conv1D": _OWN}  # by name: the package may not be there, and takes long

# Their forward hands weights of modules inside to one kernel, in evaluation, and leaves that path where one of them is
# no plain tensor.
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerEncoder)


@final
@dataclass(frozen=True, eq=False)
class Reader:
    """A module whose forward reads weights that rest in autocast's dtype."""

    module: Module
    weights: tuple[tuple[Module, str], ...]  # the module that holds each, and its name there
    casts: bool = True  # this forward is the one that autocast casts them in; otherwise only a kernel may want them

    @property
    def parameters(self) -> list[tuple[Module, str, Parameter]]:
        """The weights: the module that holds each, its name there, and the parameter."""
        return [(holder, name, getattr(holder, name)) for holder, name in self.weights]

    @property
    def tries_kernel(self) -> bool:
        """Whether torch may hand the weights to one kernel in a call now: then they must be plain tensors in the
        declared dtype. That is in evaluation, in an attention or a layer around it, unless autocast is on for GPUs."""
        module = self.module
        if module.training or (self.casts and type(module) is not nn.MultiheadAttention) or torch.is_autocast_enabled():
            return False
        if not self.casts and any(map(has_call_hooks, module.modules())):
            return False
        return not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()))

    def cut_weights(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Collection[str]:
        """Returns the names of weights that a call cuts before it uses them: those of an attention whose queries, keys
        and values are not one tensor."""
        if type(self.module) is not nn.MultiheadAttention:
            return ()
        given = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
        is_self = given.get("query") is given.get("key") is given.get("value")
        return () if is_self else ("in_proj_weight", "in_proj_bias")


def _names_cast(kind: type[Module]) -> tuple[str, ...]:
    name = f"{kind.__module__}.{kind.__qualname__}"
    return CAST_BY_AUTOCAST[kind] if kind in CAST_BY_AUTOCAST else _OF_OTHERS.get(name, ())


def _projections(model: Module) -> dict[Module, Module]:
    """Returns the output projection of each attention, with the attention, which reads its weights and never calls
    it."""
    attentions = [module for module in model.modules() if type(module) is nn.MultiheadAttention]
    found = [(each.out_proj, each) for each in attentions if type(each.out_proj) is NonDynamicallyQuantizableLinear]
    times = Counter(projection for projection, _ in found)
    return {projection: attention for projection, attention in found if times[projection] == 1}


def why_not_cast(model: Module, trainable: Container[int] | None = None) -> dict[Module, str | None]:
    """Returns, for every module, why its weights may not rest in autocast's dtype; None where they may. With
    `trainable`, ids of parameters, only weights that train may.

    Weights may not in compiled regions: a graph casts by itself, and our cast would break the graph. Nor in layers of a
    class over torch's, whose forward may read them in any way.
    """
    projections, compiled = _projections(model), modules_in_compiled_regions(model)
    layers = [module for module in model.modules() if isinstance(module, FUSED)]
    others = [layer for layer in layers if type(layer) not in FUSED or "forward" in vars(layer)]
    in_others = {inner for layer in others for inner in layer.modules()}
    holders = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))

    def why(module: Module) -> str | None:
        own, reader = list(module.parameters(recurse=False)), projections.get(module, module)
        is_known = any(map(_names_cast, type(module).__mro__))
        names = _OWN if module in projections else _names_cast(type(module))
        also = _UNCAST_OF_ATTENTION if names is _OF_ATTENTION else ()
        reasons = {
            "autocast casts them anew at each time step": isinstance(module, RNNBase),
            "autocast does not cast its weights": not is_known,
            "its forward is not torch's own": not names or "forward" in vars(reader),
            "torch.compile or TorchScript traces it": reader in compiled or module in compiled,
            "the forward of a layer around it is not torch's own": module in in_others,
            "hooks compute its weights": not set(parameters_in(module).keys()) <= {*names, *also},
            "modules share its weights": any(holders[id(parameter)] > 1 for parameter in own),
            "it is made in another dtype": any(parameter.dtype != torch.float32 for parameter in own),
            "a DTensor shows one dtype": any(local_of(parameter) is not parameter for parameter in own),
            "it does not train": trainable is not None and any(id(parameter) not in trainable for parameter in own),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    return {module: why(module) for module in model.modules()}


def readers_of(model: Module, reasons: Mapping[Module, str | None]) -> list[Reader]:
    """Returns who reads the weights that may be cast, by what `why_not_cast` has returned."""
    projections = _projections(model)
    held: dict[Module, list[tuple[Module, str]]] = {}  # by the module that holds them
    read: dict[Module, list[tuple[Module, str]]] = {}  # by the one that reads them
    for module, why in reasons.items():
        names = _OWN if module in projections else _names_cast(type(module))
        own = parameters_in(module)
        weights = [(module, name) for name in names if why is None and own.get(name) is not None]
        if weights:
            held[module] = weights
            read.setdefault(projections.get(module, module), []).extend(weights)
    readers = [Reader(module, tuple(weights)) for module, weights in read.items()]
    for module in (module for module in model.modules() if type(module) in _LAYERS):
        layers = module.layers[:1] if isinstance(module, nn.TransformerEncoder) else [module]  # it looks at the first
        inside = [weight for layer in layers for inner in layer.modules() for weight in held.get(inner, ())]
        if inside:
            readers.append(Reader(module, tuple(inside), casts=False))
    return readers
