"""Which modules form a unit, and which groups their parameters make.

A unit is what is gathered together at stage 3; for the other stages the whole model is one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import Module, Parameter

from lightning_zero.shards.group import Kind

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

# Autocast casts the weights of these modules at each use, so resting in its dtype changes no bit of the result.
CAST_BY_AUTOCAST: tuple[type[Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)

# They look at their children's weights, and leave their fused path where one is not a plain parameter.
FUSED = (nn.TransformerEncoderLayer, nn.MultiheadAttention)

# What stays whole on every rank although parameters are sharded: a gather of it would take longer than it is worth.
# A constant, so what it costs does not grow with the model.
RESIDENT_BYTES = 2**20


@dataclass(frozen=True, eq=False, kw_only=True)
class UnitSpec:
    """Parameters that are gathered together.

    Args:
        name: of the module, for messages; empty for the model itself.
        modules: whose forwards use them.
        parameters: name -> parameter, each in exactly one unit.
        is_leaf: no other unit lies inside; while its modules run, no other unit's do.
    """

    name: str
    modules: tuple[Module, ...]
    parameters: Mapping[str, Parameter]
    is_leaf: bool = True

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters.values())


def whole_model(model: Module) -> list[UnitSpec]:
    """The only unit of the stages that keep parameters in full."""
    return [UnitSpec(name="", modules=(model,), parameters=dict(model.named_parameters()))]


def find_units(model: Module, classes: tuple[type | str, ...] | None) -> list[UnitSpec]:
    """The units of `model`, in the order of its modules.

    Args:
        model: any module; parameters are told apart by identity, so tied ones belong to the first unit that has them.
        classes: module classes (or names of them) to gather together; None picks the elements of `ModuleList`,
            `ModuleDict` and `Sequential` that are made of several modules. What is in no such module is a unit of the
            module that holds it directly.

    Raises:
        ValueError: for a class of which the model has no module.
    """
    if classes is not None:
        for wanted in classes:
            if not any(_is_one_of(module, (wanted,)) for module in model.modules()):
                present = sorted({type(module).__name__ for module in model.modules()})
                raise ValueError(f"units={wanted!r}: the model has no such module. It has {present}.")
    taken: set[int] = set()
    found: list[UnitSpec] = []
    for name, module, recurse in _walk(model, classes):
        own = {
            as_written(f"{name}.{parameter_name}" if name else parameter_name): parameter
            for parameter_name, parameter in module.named_parameters(recurse=recurse)
            if id(parameter) not in taken
        }
        if own:
            taken.update(id(parameter) for parameter in own.values())
            found.append(UnitSpec(name=as_written(name), modules=(module,), parameters=own))
    holders = {module for spec in found for module in spec.modules}
    return [
        UnitSpec(
            name=spec.name,
            modules=spec.modules,
            parameters=spec.parameters,
            is_leaf=not any(inner in holders for inner in spec.modules[0].modules() if inner is not spec.modules[0]),
        )
        for spec in found
    ]


def as_one(specs: Sequence[UnitSpec]) -> UnitSpec:
    """All of them together."""
    return UnitSpec(
        name=specs[0].name if len(specs) == 1 else f"{specs[0].name} to {specs[-1].name}",
        modules=tuple(module for spec in specs for module in spec.modules),
        parameters={name: parameter for spec in specs for name, parameter in spec.parameters.items()},
        is_leaf=all(spec.is_leaf for spec in specs),
    )


def merge_small(specs: Sequence[UnitSpec], nbytes: int) -> list[UnitSpec]:
    """Neighbours in the order of the modules become one unit, of at most `nbytes`: so the number of gathers depends on
    the size of the model, and not on how many modules it is made of."""
    runs: list[list[UnitSpec]] = []
    filled = 0
    for spec in specs:
        if runs and spec.is_leaf and runs[-1][0].is_leaf and filled + spec.nbytes <= nbytes:
            runs[-1].append(spec)
            filled += spec.nbytes
        else:
            runs.append([spec])
            filled = spec.nbytes
    return [as_one(run) for run in runs]


def too_small_to_shard(specs: Sequence[UnitSpec], nbytes: int) -> list[UnitSpec]:
    """Units that stay whole on every rank, of at most `nbytes` altogether: all of a model that is no larger, else what
    modules hold directly around other units, and would have to hold on to while those run."""
    if sum(spec.nbytes for spec in specs) <= nbytes:
        return list(specs)
    resident = []
    for spec in sorted((spec for spec in specs if not spec.is_leaf), key=lambda spec: spec.nbytes):
        nbytes -= spec.nbytes
        if nbytes < 0:
            break
        resident.append(spec)
    return resident


def _walk(model: Module, classes: tuple[type | str, ...] | None) -> Iterator[tuple[str, Module, bool]]:
    """Yields every module that starts a unit, and whether the unit holds the whole subtree or only what it holds."""

    def descend(name: str, module: Module, parent: Module | None) -> Iterator[tuple[str, Module, bool]]:
        wanted = _is_block(module, parent) if classes is None else parent is not None and _is_one_of(module, classes)
        yield name, module, wanted
        if not wanted:
            for child_name, child in module.named_children():
                yield from descend(f"{name}.{child_name}" if name else child_name, child, module)

    yield from descend("", model, None)


def _is_block(module: Module, parent: Module | None) -> bool:
    """An element of a list of modules that is made of several: the layer of a transformer, the block of a ResNet. Or a
    module of torch's that hands its children's weights to one kernel."""
    if isinstance(module, FUSED):
        return True
    if not isinstance(parent, CONTAINERS) or isinstance(module, CONTAINERS):
        return False
    return sum(1 for _ in module.children()) > 0


def _is_one_of(module: Module, classes: tuple[type | str, ...]) -> bool:
    return any(type(module).__name__ == item if isinstance(item, str) else isinstance(module, item) for item in classes)


def as_written(name: str) -> str:
    """A parameter's name without what `torch.compile` adds to it: compiled or not, a model has the same checkpoint."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def modules_in_compiled_regions(model: Module, *, roots: bool = True) -> set[Module]:
    """What `torch.compile` of the model, of a part of it, or of the LightningModule traces through.

    Args:
        model: all of it.
        roots: with the compiled modules themselves; without them only what lies inside, whose calls are traced.
    """
    return {
        inner
        for module in model.modules()
        if type(module).__name__ == "OptimizedModule"
        or module._compiled_call_impl is not None
        or getattr(module, "_compiler_ctx", None) is not None  # Lightning's mark on a compiled LightningModule
        for inner in module.modules()
        if roots or inner not in (module, getattr(module, "_orig_mod", module))
    }


def modules_cast_by_autocast(model: Module) -> list[Module]:
    """Modules whose weights may rest in autocast's dtype: `forward` is torch's own, no other module holds a weight.

    Not in compiled regions: a graph casts by itself, and ours would break it. Not in torch's transformer layers: their
    fused path hands the weights to one kernel, and is taken for plain parameters only.
    """
    others = modules_in_compiled_regions(model)
    for module in model.modules():
        if isinstance(module, FUSED):
            others.update(module.modules())
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return [
        module
        for module in model.modules()
        if type(module) in CAST_BY_AUTOCAST
        and module not in others
        and "forward" not in vars(module)
        and module._parameters.keys() <= {"weight", "bias"}  # what hooks compute weights from stays as declared
        and all(
            holders[id(parameter)] == 1 and parameter.dtype == torch.float32
            for parameter in module.parameters(recurse=False)
        )
    ]


def split_by_kind(
    parameters: Mapping[str, Parameter], trainable: set[int], resting: Mapping[int, torch.dtype]
) -> dict[Kind, dict[str, Parameter]]:
    """Parameters by dtype and whether they train.

    Args:
        parameters: name -> parameter.
        trainable: ids of the parameters that receive gradients.
        resting: id -> dtype in which that parameter rests, where it is not its own.
    """
    kinds: dict[Kind, dict[str, Parameter]] = {}
    for name, parameter in parameters.items():
        rests_in = resting.get(id(parameter), parameter.dtype)
        kind = Kind(parameter.dtype, rests_in, id(parameter) in trainable)
        kinds.setdefault(kind, {})[name] = parameter
    return kinds


def fill_buckets(parameters: Mapping[str, Parameter], bucket_numel: int) -> list[dict[str, Parameter]]:
    """Cuts parameters, last first (the order in which backward reaches them), into runs of at most one bucket.

    One that is larger than a bucket makes a run of its own, which travels in slices.
    """
    runs: list[dict[str, Parameter]] = []
    filled = bucket_numel
    for name, parameter in reversed(list(parameters.items())):
        if not runs or filled + parameter.numel() > bucket_numel:
            runs.append({})
            filled = 0
        runs[-1][name] = parameter
        filled += parameter.numel()
    return runs
