"""Features of a run, which of them do not go together, and few runs in which every two of the others meet.

`docs/pairs.md` shows the pairs as a table; `test_pairs.py` holds both together.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from cover import covering


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a run uses. The first value of each field is a run without the feature."""

    stage: Literal[3, 2, 1] = 3
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "param_dtype"] = "32-true"
    tensor_parallel: Literal[False, True] = False
    accumulation: Literal[None, "local", "no_sync", "sharded"] = None
    diverges: Literal[False, True] = False  # ranks use different modules, and leave some out
    offload: Literal[None, "cpu", "nvme", "parameters", "fraction"] = None
    edits: Literal[None, "weights", "gradients", "data"] = None  # by users, in each step
    resume: Literal[None, "same", "other"] = None  # on how many ranks
    hybrid: Literal[False, True] = False
    recomputes: Literal[None, "plain", "offload", "contiguous", "partition"] = None
    compiles: Literal[False, True] = False
    loop: Literal["automatic", "manual", "fabric"] = "automatic"
    optimizers: Literal[1, 2] = 1
    step_in_backward: Literal[False, True] = False
    whole_tensors: Literal[False, True] = False  # are stepped
    clip: Literal[None, "value", "norm"] = None
    constructs: Literal[False, True] = False  # in `configure_model`: never whole at stage 3
    averages: Literal[False, True] = False  # weights
    evaluates_unevenly: Literal[False, True] = False

    def __str__(self) -> str:
        used = [
            f"{name} {value}" if name == "stage" else name if value is True else str(value) for name, value in self.used
        ]
        return ", ".join(used)

    @property
    def used(self) -> list["Feature"]:
        found = [Feature(field.name, getattr(self, field.name)) for field in fields(self)]
        return [feature for feature in found if feature.is_used]

    @property
    def pairs(self) -> set[frozenset["Feature"]]:
        return {frozenset(pair) for pair in itertools.combinations(self.used, 2)}

    @property
    def is_exact(self) -> bool:
        """Whether `docs/numerics.md` promises the bits of the reference."""
        return ROUNDING.isdisjoint(self.used)


class Feature(NamedTuple):
    name: str
    value: Any

    @property
    def is_used(self) -> bool:
        return bool(self.value != AXES[self.name][0])


AXES: dict[str, tuple[Any, ...]] = {field.name: field.type.__args__ for field in fields(Case)}  # type: ignore[union-attr]
FEATURES = [Feature(name, value) for name, values in AXES.items() for value in values if Feature(name, value).is_used]


def _of(name: str) -> list[Feature]:
    return [feature for feature in FEATURES if feature.name == name]


class Clash(NamedTuple):
    """Features that are not used together: any of `values` of one, any of `others` of the other; () is all of them."""

    one: str
    values: Sequence[Any]
    other: str
    others: Sequence[Any]
    mark: str  # what `docs/pairs.md` says of it

    def is_of(self, one: Feature, other: Feature) -> bool:
        return any(
            (first.name, second.name) == (self.one, self.other)
            and (first.value in self.values if self.values else first.is_used)
            and (second.value in self.others if self.others else second.is_used)
            for first, second in ((one, other), (other, one))
        )


CLASHES = [
    Clash("step_in_backward", (), "stage", [1], ""),
    Clash("offload", ["parameters"], "stage", [1, 2], ""),
    Clash("recomputes", ["partition"], "tensor_parallel", [False], ""),
    Clash("optimizers", (), "loop", ["automatic"], ""),
    Clash("accumulation", ["no_sync"], "loop", ["automatic"], ""),
    Clash("step_in_backward", (), "precision", ["16-mixed"], "a"),
    Clash("step_in_backward", (), "accumulation", (), "a"),
    Clash("step_in_backward", (), "edits", ["gradients"], "a"),
    Clash("step_in_backward", (), "loop", ["manual"], "a"),
    Clash("step_in_backward", (), "optimizers", (), "a"),
    Clash("step_in_backward", (), "whole_tensors", (), "a"),
    Clash("step_in_backward", (), "clip", (), "a"),
    Clash("tensor_parallel", (), "precision", ["param_dtype"], "b"),
    Clash("tensor_parallel", (), "whole_tensors", (), "b"),
    Clash("recomputes", ["partition"], "precision", ["param_dtype"], "b"),
    Clash("recomputes", ["partition"], "whole_tensors", (), "b"),
    Clash("averages", (), "loop", ["fabric"], "c"),
    Clash("accumulation", ["local", "sharded"], "loop", ["manual"], "d"),
    Clash("loop", ["manual"], "loop", ["fabric"], "e"),
]


# What `docs/pairs.md` calls them, in its order.
NAMED: dict[str, list[Feature]] = {
    "precision": _of("precision"),
    "tensor parallelism": _of("tensor_parallel"),
    "accumulation": _of("accumulation"),
    "ranks that use different modules": _of("diverges"),
    "offload": _of("offload"),
    "edits by users": _of("edits"),
    "resume": _of("resume"),
    "hybrid sharding": _of("hybrid"),
    "activation checkpointing": _of("recomputes"),
    "`torch.compile`": _of("compiles"),
    "several optimizers, manual optimization": [Feature("optimizers", 2), Feature("loop", "manual")],
    "`step_in_backward`": _of("step_in_backward"),
    "optimizers of whole tensors": _of("whole_tensors"),
    "clipping": _of("clip"),
    "models that are never whole": _of("constructs"),
    "averages of weights": _of("averages"),
    "uneven evaluation": _of("evaluates_unevenly"),
    "Fabric": [Feature("loop", "fabric")],
}


def marks_of(one: Feature, other: Feature) -> set[str]:
    """Why they are not used together; empty if they are."""
    return {each.mark for each in CLASHES if each.is_of(one, other)}


def clash(one: Feature, other: Feature) -> bool:
    return bool(marks_of(one, other))


TENSOR_PARALLEL = {Feature("tensor_parallel", True), Feature("recomputes", "partition")}
# With these, sums go in another order than in the reference.
ROUNDING = {Feature("accumulation", "sharded"), Feature("hybrid", True), Feature("clip", "norm"), *TENSOR_PARALLEL}


def _rows(axes: dict[str, list[Feature]], is_wanted: Callable[[Feature, Feature], bool]) -> list[Case]:
    # Four ranks that are replicas and tensor-parallel have nothing to shard.
    undivided = [{Feature("hybrid", True), other} for other in FEATURES if other in TENSOR_PARALLEL]

    def clash_here(one: Feature, other: Feature) -> bool:
        return {one, other} in undivided or clash(one, other)

    def matters(one: Feature, other: Feature) -> bool:
        return one.is_used and other.is_used and is_wanted(one, other)

    rows = covering(list(axes.values()), clash_here, matters)
    return [Case(**{feature.name: feature.value for feature in row}) for row in rows]


def cases() -> list[Case]:
    features = {name: [Feature(name, value) for value in values] for name, values in AXES.items()}
    # All pairs that give the reference's bits.
    exact = {name: [feature for feature in of_one if feature not in ROUNDING] for name, of_one in features.items()}
    found = _rows(exact, lambda one, other: True)
    # All others, in four bytes, as their tolerance is smaller there.
    in_four = {**features, "precision": features["precision"][:1]}
    found += _rows(in_four, lambda one, other: one in ROUNDING or other in ROUNDING)
    found.append(Case(tensor_parallel=True, hybrid=True, recomputes="partition"))
    # And those two, in few runs.
    for precision in AXES["precision"][1:]:
        found.append(Case(precision=precision, hybrid=True, accumulation="sharded", clip="norm"))
        if precision != "param_dtype":
            found.append(Case(precision=precision, tensor_parallel=True, recomputes="partition"))
    return found
