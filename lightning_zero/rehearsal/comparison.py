"""What the pictures of a rehearsal show: the chosen strategy beside the plain stages, and on more ranks and fewer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from lightning_zero.pl.strategy import ZeroStrategy
from lightning_zero.rehearsal.growth import Scaled, growth_of
from lightning_zero.rehearsal.memory import Other
from lightning_zero.rehearsal.rehearsal import Module, Rehearsal, rehearse
from lightning_zero.tiers.ledger import Category

# By category of bytes on the device, from the bottom of a stack to its top.
COLOURS: dict[str, str] = {
    Category.PARAMETER: "#4477aa",
    Category.GRADIENT: "#ee6677",
    Category.MASTER: "#aa3377",
    Category.OPTIMIZER_STATE: "#228833",
    Category.AVERAGE: "#117766",
    Category.BUCKET: "#aaaaaa",
    Category.GATHERED: "#66ccee",
    Category.ACTIVATION_CHECKPOINT: "#cc7722",
    Other.ACTIVATION: "#ccbb44",
    Other.BUFFER: "#887766",
    Other.TEMPORARY: "#cccccc",
}
OTHER = "#888888"  # of a category that is not one of these


@final
@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A rehearsal beside others."""

    chosen: Rehearsal
    stages: Mapping[str, Rehearsal]  # ``"stage 0"`` to ``"stage 3"``; then the chosen one, unless it is one of these
    growth: tuple[Scaled, ...]  # the chosen strategy on other numbers of ranks, fewest first

    @property
    def categories(self) -> list[str]:
        """Those that are on the device at the peak of any, in the order of `COLOURS`."""
        return in_order(name for one in self.stages.values() for name in one.peak.device)


def in_order(categories: Iterable[str]) -> list[str]:
    """Returns each category once, in the order of `COLOURS`."""
    known = list(COLOURS)
    return sorted(dict.fromkeys(categories), key=lambda name: known.index(name) if name in COLOURS else len(known))


def compare(
    module: Module, batch: Any, strategy: ZeroStrategy | Mapping[str, Any] | int, chosen: Rehearsal, **setting: Any
) -> Comparison:
    """Rehearses the stages, and the chosen strategy on other numbers of ranks.

    Args:
        module: as `rehearse` takes it.
        batch: as `rehearse` takes it.
        strategy: the one that `chosen` was rehearsed with.
        chosen: what was rehearsed before; if it is a plain stage, that is not rehearsed again.
        setting: what `rehearse` was given besides.
    """
    stages = {}
    for stage in range(4):
        plain = {"stage": stage, **_of_the_model(strategy)}
        is_chosen = chosen.strategy == repr(ZeroStrategy(**plain))
        stages[f"stage {stage}"] = chosen if is_chosen else rehearse(module, batch, plain, **setting)
    if all(one is not chosen for one in stages.values()):
        stages[chosen.strategy.removeprefix("ZeroStrategy(").removesuffix(")")] = chosen
    growth = growth_of(module, batch, strategy, chosen, **setting)
    return Comparison(chosen=chosen, stages=stages, growth=growth)


def _of_the_model(strategy: ZeroStrategy | Mapping[str, Any] | int) -> dict[str, Any]:
    """Returns those arguments that are no choice, because the model's own code divides it by them."""
    given = strategy._arguments if isinstance(strategy, ZeroStrategy) else strategy
    size = given.get("tensor_parallel_size", 1) if isinstance(given, Mapping) else 1
    return {"tensor_parallel_size": size} if size > 1 else {}
