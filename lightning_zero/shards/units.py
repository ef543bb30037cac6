"""Chooses which modules form a unit, and which groups their parameters make.

At stage 3 the parameters of a unit are gathered together. At the other stages the whole model is one unit.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import Module, Parameter

from lightning_zero.shards.layout import fill
from lightning_zero.shards.local import local_of
from lightning_zero.shards.setting import Kind
from lightning_zero.torch_private import IN_COMPILED, VERSIONS, compiled_in, is_traced, versions_of

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

# These modules read their children's weights, which must be gathered together with their own.
FUSED = (nn.TransformerEncoderLayer, nn.MultiheadAttention)

# Bytes of parameters that stay whole on every rank at stage 3: a gather of them would take longer than it is worth.
# A constant, so that the cost does not grow with the model.
RESIDENT_BYTES = 2**20


@dataclass(frozen=True, eq=False, kw_only=True)
class UnitSpec:
    """Parameters that are gathered together."""

    name: str  # of the module, for messages; empty for the model itself
    modules: tuple[Module, ...]  # whose forwards use the parameters
    parameters: Mapping[str, Parameter]  # by name; each is in exactly one unit
    is_leaf: bool = True  # no other unit lies inside, so no other unit's modules run while its own do

    @property
    def nbytes(self) -> int:
        return sum(local_of(parameter).nbytes for parameter in self.parameters.values())


def whole_model(model: Module) -> list[UnitSpec]:
    """Returns the only unit of the stages that keep parameters in full."""
    return [UnitSpec(name="", modules=(model,), parameters=dict(model.named_parameters()))]


def find_units(model: Module, classes: tuple[type | str, ...] | None) -> list[UnitSpec]:
    """Returns the units of `model` in module order. A tied parameter belongs to the first unit that has it.

    A module of one of `classes` (types or names) is a unit, with all modules inside. None picks the elements of
    `ModuleList`, `ModuleDict` and `Sequential` that are made of several modules. A parameter in no such module belongs
    to a unit of the module that holds it directly. Raises ValueError for a class of which the model has no module.
    """
    _refuse_absent(model, classes, "units")
    taken: set[int] = set()
    found: dict[int, UnitSpec] = {}  # id of the module that holds the parameters -> unit
    for name, module, is_block in _walk("", model, None, classes):
        own = {
            as_written(f"{name}.{parameter_name}" if name else parameter_name): parameter
            for parameter_name, parameter in module.named_parameters(recurse=is_block)
            if id(parameter) not in taken
        }
        if own:
            taken.update(id(parameter) for parameter in own.values())
            found[id(module)] = UnitSpec(name=as_written(name), modules=(module,), parameters=own)
    return [
        replace(spec, is_leaf=sum(id(inner) in found for inner in spec.modules[0].modules()) == 1)
        for spec in found.values()
    ]


def find_blocks(model: Module, classes: tuple[type | str, ...] | None, argument: str) -> dict[str, Module]:
    """Returns the modules inside `model` that are of one of `classes` (None: those that `find_units` picks), by name.

    Each is listed once, by its first name; of nested ones only the outermost. Raises ValueError where there are none;
    `argument` is the name, for messages, of the argument in which the user gave the classes.
    """
    _refuse_absent(model, classes, argument)
    found: dict[Module, str] = {}
    for name, module, is_block in _walk("", model, None, classes):
        if is_block:
            found.setdefault(module, as_written(name))
    if not found:
        present = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"{argument}={'auto' if classes is None else classes!r} finds no block inside the model: an element of a "
            "ModuleList, ModuleDict or Sequential that is made of several modules. Name the classes of its blocks; it "
            f"has {present}."
        )
    return {name: module for module, name in found.items()}


def _refuse_absent(model: Module, classes: tuple[type | str, ...] | None, argument: str) -> None:
    for wanted in classes or ():
        if not any(_is_one_of(module, (wanted,)) for module in model.modules()):
            present = sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(f"{argument}={wanted!r}: the model has no such module. It has {present}.")


def as_one(specs: Sequence[UnitSpec]) -> UnitSpec:
    """Merges units into one."""
    return UnitSpec(
        name=specs[0].name if len(specs) == 1 else f"{specs[0].name} to {specs[-1].name}",
        modules=tuple(module for spec in specs for module in spec.modules),
        parameters={name: parameter for spec in specs for name, parameter in spec.parameters.items()},
        is_leaf=all(spec.is_leaf for spec in specs),
    )


def merge_small(specs: Sequence[UnitSpec], nbytes: int) -> list[UnitSpec]:
    """Merges neighbours into units of at most `nbytes`, so that a model of small modules does not take many gathers."""
    sizes = [spec.nbytes if spec.is_leaf else nbytes + 1 for spec in specs]  # a unit around others stays alone
    return [as_one(specs[run.start : run.stop]) for run in fill(sizes, nbytes)]


def too_small_to_shard(specs: Sequence[UnitSpec], nbytes: int) -> list[UnitSpec]:
    """Returns units, of at most `nbytes` altogether, that stay whole on every rank. These are all units of a model that
    is no larger, otherwise small units around others, which would have to stay gathered while the others run."""
    if sum(spec.nbytes for spec in specs) <= nbytes:
        return list(specs)
    resident = []
    for spec in sorted((spec for spec in specs if not spec.is_leaf), key=lambda spec: spec.nbytes):
        nbytes -= spec.nbytes
        if nbytes < 0:
            break
        resident.append(spec)
    return resident


def scripted(model: Module) -> Iterator[Module]:
    """Yields the modules of TorchScript. Nothing in Python intercepts the calls inside of them."""
    return (module for module in model.modules() if isinstance(module, torch.jit.ScriptModule))


def without_scripted(model: Module, specs: Sequence[UnitSpec]) -> tuple[list[UnitSpec], list[UnitSpec]]:
    """Divides units into those of parameters that no TorchScript reads, and those of parameters that it does.

    The latter must have their values at all times: in a call of an exported method, in a copy, in a file.
    """
    held = {id(parameter) for module in scripted(model) for parameter in module.parameters()}

    def parts(is_held: bool) -> list[UnitSpec]:
        mine = ({name: p for name, p in spec.parameters.items() if (id(p) in held) is is_held} for spec in specs)
        return [replace(spec, parameters=chosen) for spec, chosen in zip(specs, mine, strict=True) if chosen]

    return parts(False), parts(True)


def _walk(
    name: str, module: Module, parent: Module | None, classes: tuple[type | str, ...] | None
) -> Iterator[tuple[str, Module, bool]]:
    """Yields every module that can start a unit, its name first; and whether the unit is a block: the whole subtree,
    whose inner modules are not yielded. Otherwise the unit is what the module holds directly."""
    is_block = _is_block(module, parent) if classes is None else parent is not None and _is_one_of(module, classes)
    yield name, module, is_block
    if not is_block:
        for child_name, child in module.named_children():
            yield from _walk(f"{name}.{child_name}" if name else child_name, child, module, classes)


def _is_block(module: Module, parent: Module | None) -> bool:
    """Whether `module` is an element, made of several modules, of a list of modules (the layer of a transformer, the
    block of a ResNet); or a module of torch's that hands its children's weights to one kernel."""
    is_element = isinstance(parent, CONTAINERS) and not isinstance(module, CONTAINERS)
    return isinstance(module, FUSED) or (is_element and any(True for _ in module.children()))


def _is_one_of(module: Module, classes: tuple[type | str, ...]) -> bool:
    return any(type(module).__name__ == item if isinstance(item, str) else isinstance(module, item) for item in classes)


def as_written(name: str) -> str:
    """Removes from a parameter's name what `torch.compile` adds: compiled or not, a model has the same checkpoint."""
    return name.replace(f"{IN_COMPILED}.", "").removesuffix(f".{IN_COMPILED}")


def renamed(state: Mapping[str, Any], name_of: Callable[[str], str] = as_written) -> OrderedDict[str, Any]:
    """Renames the entries of a `Module.state_dict`, and of the module versions that torch keeps beside them."""
    made: Any = OrderedDict((name_of(name), value) for name, value in state.items())
    if (versions := versions_of(state)) is not None:
        setattr(made, VERSIONS, OrderedDict((name_of(name), version) for name, version in versions.items()))
    return made


def modules_in_compiled_regions(model: Module, *, roots: bool = True) -> set[Module]:
    """Returns the modules that TorchScript holds, or that `torch.compile` (of the model, of a part of it, or of the
    LightningModule) traces. Without `roots` leaves out compiled modules: their own calls lie outside of the traces."""
    return {
        inner
        for module in model.modules()
        if is_traced(module)
        for inner in module.modules()
        if roots or inner not in (module, compiled_in(module))
    }


def split_by_kind(
    parameters: Mapping[str, Parameter],
    trainable: set[int],
    resting: Mapping[int, torch.dtype],
    offloaded: set[int],
    *,
    as_declared: bool,
) -> dict[Kind, dict[str, Parameter]]:
    """Groups parameters by their kind. `trainable` and `offloaded` are ids of parameters; `resting` has, by id, the
    dtype of each parameter that rests in another one than its own; users read those `as_declared`, or as they rest."""
    kinds: dict[Kind, dict[str, Parameter]] = {}
    for name, parameter in parameters.items():
        rests_in = resting.get(id(parameter), parameter.dtype)
        trains = id(parameter) in trainable
        kind = Kind(
            declared=parameter.dtype,
            resting=rests_in,
            trainable=trains,
            upcasts=as_declared and rests_in != parameter.dtype,
            is_offloaded=id(parameter) in offloaded,
            is_idle=trains and not parameter.requires_grad,
        )
        kinds.setdefault(kind, {})[name] = parameter
    return kinds


def fill_buckets(parameters: Mapping[str, Parameter], bucket_numel: int) -> list[dict[str, Parameter]]:
    """Divides parameters, last first (the order in which backward reaches them), into runs of at most one bucket. A
    larger parameter makes a run of its own, and is reduced in chunks."""
    items = list(parameters.items())[::-1]
    sizes = [local_of(parameter).numel() for _, parameter in items]
    return [dict(items[run.start : run.stop]) for run in fill(sizes, bucket_numel)]
