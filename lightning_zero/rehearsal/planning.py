"""`plan`: rehearses strategies, and finds the fastest ones that fit on a device."""

import copy
import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, final

from lightning_zero.config import ActivationCheckpointing, Checkpoint, Offload, policy_from
from lightning_zero.pl.table import aligned, ranks_told, sized, wrapped
from lightning_zero.rehearsal.cost import Rates
from lightning_zero.rehearsal.rehearsal import Module, Rehearsal, answers_of, rehearse

MARGIN = 0.1  # of the device, left for what a rehearsal does not count
SHOWN = 3  # of the strategies that fit
REFUSALS = (ValueError, NotImplementedError)  # of a strategy that cannot train the model
BUCKETS = (5, 100)  # MiB, beside the default
DEGREES = (2, 4, 8)  # of tensor parallelism
TIE = 0.125  # strategies whose modelled times differ by less count as equally fast


@final
@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy, and what it takes."""

    strategy: Mapping[str, Any]
    rehearsal: Rehearsal
    seconds: float  # of a step, modelled; with tensor parallelism, of steps that see as many samples
    hidden: float  # part of what is sent and moved that runs beside work

    @property
    def device_bytes(self) -> int:
        """The least that a device must have."""
        return int(self.rehearsal.peak.nbytes / (1 - MARGIN))

    @property
    def host_bytes(self) -> int:
        """The least that the host must have for this rank."""
        return max(sum(moment.host.values()) for moment in self.rehearsal.peaks.values())

    @property
    def overrides(self) -> str:
        """The overrides with which an application of Hydra runs it (`docs/hydra.md`), as a shell takes them."""
        return shlex.join(word for name, value in self.strategy.items() for word in _overrides_of(name, value))

    def __str__(self) -> str:
        return f"ZeroStrategy({', '.join(f'{name}={value!r}' for name, value in self.strategy.items())})"


def _overrides_of(name: str, value: Any) -> list[str]:
    """Returns the overrides for one argument. Of a policy, its group says what the policy is without arguments."""
    if name == "stage":
        return [f"strategy=zero{value}"]
    group, plain = _GROUPS.get(name, ("", None))
    policy = None if plain is None else policy_from(type(plain), value, name)
    if policy is None:
        return [f"strategy.{name}={_in_hydra(value)}"]
    given = {one.name: getattr(policy, one.name) for one in fields(policy)}
    others = {one: value for one, value in given.items() if value != getattr(plain, one)}
    return [f"strategy/{name}={group}", *(f"strategy.{name}.{one}={_in_hydra(value)}" for one, value in others.items())]


_GROUPS: Mapping[str, tuple[str, Any]] = {  # of policies: what to choose of the group in `conf`, and what that is
    "offload": ("cpu", Offload("cpu")),
    "activation_checkpointing": ("recompute", ActivationCheckpointing()),
    "checkpoint": ("sharded", Checkpoint()),
}


def _in_hydra(value: Any) -> str:
    """Writes a value as Hydra reads it."""
    if value is None:
        return "null"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, timedelta):
        return str(value.total_seconds())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(_in_hydra, value))}]"
    return str(value)


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """Strategies, simpler ones first. Prints the fastest ones that fit, and why each faster one does not."""

    candidates: tuple[Candidate, ...]
    refused: Mapping[str, str]  # strategies that cannot train the model -> why
    ranks: int
    device_bytes: int
    host_bytes: int | None = None  # for each rank; None: as many as it takes

    def fits(self, candidate: Candidate) -> bool:
        on_host = self.host_bytes is None or candidate.host_bytes <= self.host_bytes
        return on_host and candidate.device_bytes <= self.device_bytes

    @property
    def fitting(self) -> list[Candidate]:
        """Those that fit: the simplest among the fastest, then by their time."""
        found = [candidate for candidate in self.candidates if self.fits(candidate)]
        tie = (1 + TIE) * min((one.seconds for one in found), default=0.0)
        return sorted(found, key=lambda one: max(tie, one.seconds))

    def faster(self, than: Candidate) -> list[Candidate]:
        """Returns those that are faster, and do not fit."""
        return [one for one in self.candidates if not self.fits(one) and one.seconds < than.seconds]

    @property
    def best(self) -> Candidate:
        """The fastest strategy that fits.

        Raises:
            ValueError: if none does; tells the smallest device on which one would.
        """
        if fitting := self.fitting:
            return fitting[0]
        raise ValueError(self._why_nothing_fits)

    @property
    def _why_nothing_fits(self) -> str:
        if not self.candidates:
            return "No strategy trains this model. " + " ".join(f"{one}: {why}" for one, why in self.refused.items())
        least = min(self.candidates, key=lambda one: one.device_bytes)
        host = f" and {sized(least.host_bytes)} of the host" if least.host_bytes else ""
        return (
            f"Nothing fits on {ranks_told(self.ranks)} of {sized(self.device_bytes)}. The smallest device on which "
            f"this model can be trained has {sized(least.device_bytes)}{host}, with {least}. Use more ranks, a smaller "
            "batch, or such a device."
        )

    def __str__(self) -> str:
        fitting = self.fitting[:SHOWN]
        lines = [f"{ranks_told(self.ranks)} of {sized(self.device_bytes)}, {MARGIN:.0%} of which stay free"]
        rows = [["", "on the device", "on the host", "s/step (model)", "hidden"]]
        for number, one in enumerate(fitting, 1):
            rows.append(
                [
                    f"{number}.",
                    sized(one.rehearsal.peak.nbytes),
                    sized(one.host_bytes) if one.host_bytes else "-",
                    f"{one.seconds:.3g}",
                    f"{one.hidden:.0%}",
                ]
            )
        lines += aligned(rows) if fitting else wrapped(self._why_nothing_fits)
        for number, one in enumerate(fitting, 1):
            lines += wrapped(f"{number}. {one}")
            lines.append(f"   {one.overrides}")
        for one in self.faster(fitting[-1]) if fitting else self.candidates:
            told = "faster, but does not fit" if fitting else "does not fit"
            lines += wrapped(f"{told}: {one} takes {self._what_is_too_much(one)}")
        for why in dict.fromkeys(self.refused.values()):
            names = [name for name, reason in self.refused.items() if reason == why]
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines += wrapped(f"cannot be: {names[0]}{others}: {why}")
        return "\n  ".join(lines)

    def _what_is_too_much(self, candidate: Candidate) -> str:
        if candidate.device_bytes > self.device_bytes:
            peak = candidate.rehearsal.peak
            most = max(peak.device, key=lambda name: peak.device[name])
            return f"{sized(peak.nbytes)}, of which {sized(peak.device[most])} are {most}"
        return f"{sized(candidate.host_bytes)} on the host"


def plan(
    module: Module,
    batch: Any,
    *,
    ranks: int,
    device_bytes: int,
    host_bytes: int | None = None,
    host_is_apart: bool = True,
    on_cpu: bool = False,
    rates: Rates | None = None,
    fixed: Mapping[str, Any] | None = None,
    thorough: bool = True,
    divides: bool = True,
    **trainer: Any,
) -> Plan:
    """Rehearses stages 1 to 3 with and without offload and activation checkpointing, and at stage 3 with one and two
    units gathered ahead, then those near the limit with smaller and larger buckets and, where the module divides its
    layers in `configure_model`, with tensor parallelism; and models the time of each.

    Args:
        module: this, `batch` and `host_is_apart` are as `rehearse` takes them.
        ranks: of the run.
        device_bytes: that the device of each rank has; a tenth of it is left free.
        host_bytes: that each rank may use of its host; None: as many as it takes.
        on_cpu: as `rehearse` takes it; one step is computed for all rehearsals.
        rates: of the machine.
        fixed: arguments of `ZeroStrategy` that are not to be chosen.
        thorough: whether offload and recomputation are rehearsed also where something fits without them.
        divides: whether tensor parallelism is tried. It changes which ranks see the same batch.
        trainer: what else the Trainer would be given.

    Raises:
        ValueError: for less than one rank, or a device without memory.
    """
    if ranks < 1 or device_bytes <= 0:
        raise ValueError(f"ranks={ranks} and device_bytes={device_bytes}: write at least 1, and such as 80 * 10**9.")
    fixed = fixed or {}
    known = answers_of(module, batch, **_anew(trainer)) if on_cpu else False
    given: dict[str, Any] = {"ranks": ranks, "device_bytes": device_bytes, "host_is_apart": host_is_apart}
    given |= {"on_cpu": known, "rates": rates}
    made = Plan(candidates=(), refused={}, ranks=ranks, device_bytes=device_bytes, host_bytes=host_bytes)

    def extended(so_far: Plan, strategies: Iterable[dict[str, Any]], refusals: Any = REFUSALS) -> Plan:
        found, refused = [*so_far.candidates], {**so_far.refused}
        for strategy in strategies:
            try:
                one = rehearse(module, batch, strategy, **given, **_anew(trainer))
            except refusals as error:
                refused[str(strategy)] = str(error)
                continue
            timing = one.timing()
            seconds = timing.seconds * strategy.get("tensor_parallel_size", 1)  # so many ranks see the same batch
            found.append(Candidate(strategy=strategy, rehearsal=one, seconds=seconds, hidden=timing.hidden))
        return replace(so_far, candidates=tuple(found), refused=refused)

    for _, strategies in itertools.groupby(_strategies(fixed), key=_spends_time):
        if thorough or not made.fitting:
            made = extended(made, strategies)
    if "bucket_size_mb" not in fixed:
        made = extended(made, _with_other_buckets(made))
    for strategy in _divided(made, ranks) if divides and "tensor_parallel_size" not in fixed else ():
        longer = extended(made, [strategy], (*REFUSALS, RuntimeError))  # torch's: layers that cannot be divided so
        if longer.candidates and longer.candidates[-1].rehearsal.numel == made.candidates[0].rehearsal.numel:
            break  # the module does not divide its layers
        made = longer
    return made


def _anew(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a Trainer is given, with copies of its callbacks: what they count begins anew in each rehearsal."""
    given = trainer.get("callbacks") or ()
    callbacks = [copy.copy(one) for one in (given if isinstance(given, Sequence) else [given])]
    return {**trainer, "callbacks": callbacks} if callbacks else {**trainer}


def _spends_time(strategy: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns what a strategy saves memory by that costs time whatever the model: each is slower than without it."""
    return strategy.get("activation_checkpointing"), strategy.get("offload")


def _divided(made: Plan, ranks: int) -> Iterator[dict[str, Any]]:
    """Yields the fastest strategy that fits, and the one that takes the least, with tensor parallelism."""
    least = min(made.candidates, key=lambda one: one.device_bytes, default=None)
    near = [*made.fitting[:1], *([] if least is None else [least])]
    for one, degree in itertools.product({id(one): one for one in near}.values(), DEGREES):
        if ranks % degree == 0:
            yield {**one.strategy, "tensor_parallel_size": degree}


def _with_other_buckets(made: Plan) -> Iterator[dict[str, Any]]:
    """Yields strategies for which other buckets may decide: the fastest that fits, the one that takes the least, and
    those that are faster and nearly fit."""
    fitting, by_need = made.fitting[:1], sorted(made.candidates, key=lambda one: one.device_bytes)
    nearly = [one for one in by_need if fitting and one in made.faster(fitting[0])]
    near = {id(one): one.strategy for one in (*fitting, *by_need[:1], *nearly[:1])}
    for strategy, bucket in itertools.product(near.values(), BUCKETS):
        yield {**strategy, "bucket_size_mb": bucket}


def _strategies(fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the arguments of strategies, simpler ones first: of two that take the same time, the first one counts."""
    yielded: list[dict[str, Any]] = []
    offloads: list[dict[str, str]] = [{}, {"optimizer": "cpu"}, {"optimizer": "cpu", "parameters": "cpu"}]
    for recomputes, offload, stage, prefetch in itertools.product((False, True), offloads, (1, 2, 3), (1, 2)):
        if stage < 3 and (prefetch > 1 or "parameters" in offload):
            continue
        chosen: dict[str, Any] = {"stage": stage}
        chosen |= {"prefetch": prefetch} if prefetch > 1 else {}
        chosen |= {"offload": offload} if offload else {}
        chosen |= {"activation_checkpointing": True} if recomputes else {}
        strategy = chosen | dict(fixed)
        # Two that differ only in what is fixed are one.
        if all(chosen.get(name, value) == value for name, value in fixed.items()) and strategy not in yielded:
            yielded.append(strategy)
            yield strategy
