"""`Program`: a training step as data. What user code does, in order, and what the engine does at each of these *uses*.

`placing.make_program` makes it, a pure function of integers: what rests where (`Facts`), and the uses of a step
(`Use`). It needs no tensor, no rank and no clock, so the step of rank 5 of 1024 can be made on a laptop. Where several
things are due at one use, they stand in the order in which the engine does them; ranks that pass the same facts and
uses get the same order of collectives.

A program is a cycle. What is left for later by a step (an offloaded step, a publish that may arrive late) stands at the
use that needs it in the next step, with `lag` 1.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple


class Cause(StrEnum):
    """What user code does, as the engine's hooks see it. In brackets: what `Use.number` is the number of."""

    FORWARD = "forward"  # a forward begins
    UNIT = "unit"  # values of a unit are used (unit): by a module's call, or by autograd in backward
    CALL = "call"  # ranks do something together that is no use of a unit (call), see `Facts.calls`
    READ = "read"  # weights that may be behind a step are read (group)
    BACKWARD = "backward"  # a backward begins
    GRADIENT = "gradient"  # the last gradient of a group is there (group)
    END = "end of backward"  # ... whose gradients are reduced
    KEPT = "end of backward, kept"  # ... whose gradients stay on this rank: a micro-batch that only accumulates
    UNSCALE = "unscale"  # a gradient scaler asks whether gradients have overflowed
    CLIP = "clip"
    LOOK = "look"  # averaged gradients are changed
    MEASURE = "measure"  # ... or measured, each by itself
    READ_GRADIENT = "read gradient"  # a `p.grad` is read, the first one since a backward
    STEP = "step"  # the user calls `optimizer.step` (optimizer)
    STEP_AFTER_CLIP = "step after clip"  # ... with no code of users between clipping and the call
    STEPPED = "stepped"  # the optimizer's own arithmetic is done (optimizer)


class Use(NamedTuple):
    """Something that user code does, and that may need values."""

    cause: Cause
    number: int = 0


class Kind(StrEnum):
    """What the engine does. A collective but for `RESHARD`, `STORE`, `FETCH`, `STEP` and `PUT`."""

    CALL = "call"  # what `Facts.calls` names
    UNSHARD = "unshard"  # all-gathers a unit into a buffer of the arena
    RESHARD = "reshard"  # gives that buffer back
    AGREE = "agree"  # ranks tell each other what they want, and which parameters have a gradient: one small message
    MARK = "mark"  # each rank tells whether it has diverged, or what it has; read where it waits for a reduction
    REDUCE = "reduce"  # reduce-scatters a chunk, in a bucket
    STORE = "store"  # waits for that, and keeps the average
    SUM = "sum"  # sums an average over replicas, and waits for it
    GATHER = "all-gather gradients"  # of a group whose gradients rest whole
    VERDICT = "verdict"  # sums whether gradients have overflowed
    NORM = "norm"  # sums the squares of all gradients
    FETCH = "fetch"  # begins to read a window from where it rests
    STEP = "step"  # the optimizer's arithmetic on what this rank owns
    PUT = "put"  # begins to write a window to where it rests
    COLLECT = "collect"  # sends parts of whole tensors to the ranks that step them
    RETURN = "return"  # sends the parts back
    PUBLISH = "publish"  # all-gathers new values


class Among(StrEnum):
    """Which ranks do an op together; see `mesh.Mesh`."""

    SHARD = ""  # those that share shards
    REPLICAS = "replicas"  # those that hold the same shard
    TENSOR = "tensor-parallel ranks"
    DATA = "data-parallel ranks"  # ... and their replicas, where there are tensor-parallel ranks, too
    WORLD = "all ranks"


LATE = "'"  # marks, in print, an op of `lag` 1
CHUNKED = (Kind.REDUCE, Kind.SUM, Kind.STORE)  # done with each chunk of a group
LOCAL = frozenset({Kind.RESHARD, Kind.STORE, Kind.FETCH, Kind.STEP, Kind.PUT})


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """What a program needs to know of a group on one rank."""

    name: str
    holds: str = ""  # its parameters, in words
    shard: int = 0  # elements of the rank's shard
    chunks: tuple[int, ...] = ()  # elements of one rank in each reduction; none where nothing travels
    itemsize: int = 4  # bytes of an element at rest
    reduced_itemsize: int = 4  # bytes of an element of its gradient
    pool: int = 0  # the buckets that its gradients travel in
    is_full: bool = True  # rests whole on every rank between steps
    is_published: bool = True  # ... of which each has stepped a part


@dataclass(frozen=True, kw_only=True)
class WindowFacts:
    """What is stepped at once, apart from the user's call: what is offloaded, or stepped as whole tensors."""

    groups: tuple[int, ...]
    is_postponed: bool = False  # stepped when its values are needed
    is_staged: bool = False  # read before it is stepped, and written after
    is_whole: bool = False  # each tensor is stepped by one rank, to which the others send their parts before


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """What an optimizer steps."""

    groups: tuple[int, ...]  # in the order of its parameters
    windows: tuple[WindowFacts, ...] = ()  # in the order in which they are stepped; the user's call steps all else


@dataclass(frozen=True, kw_only=True)
class UnitFacts:
    """What a program needs to know of a unit, which is gathered for each use."""

    name: str
    groups: tuple[int, ...]
    is_leaf: bool = True  # otherwise it has a buffer of its own, and stays


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What rests where on a rank, and the options that say when things are done."""

    groups: tuple[GroupFacts, ...]  # in the order of their numbers
    units: tuple[UnitFacts, ...] = ()
    order: tuple[int, ...] = ()  # groups, in the order in which they are reduced
    optimizers: tuple[OptimizerFacts, ...] = ()
    buckets: tuple[int, ...] = ()  # in each pool
    calls: tuple[str, ...] = ()  # what ranks may do together, beside the units, by number
    of_all: tuple[int, ...] = ()  # calls that replicas do together, which otherwise go their own ways
    publishes: dict[int, int] = field(default_factory=dict)  # call -> the group that it catches up with and publishes
    ranks: int = 1  # that share the shards
    replicas: int = 1  # ranks that hold the same shard
    tensor_ranks: int = 1  # that share tensor-parallel modules
    prefetch: int = 1
    overlaps: bool = True  # reduces while backward goes on
    in_order: bool = False  # a collective waits for those before it (NCCL)
    learns_late: bool = False  # a mark is read one use after its gather (NCCL)
    gathers_gradients: bool = False  # stage 0
    steps_in_backward: bool = False
    publishes_late: bool = False
    spans: bool = True  # a round may span micro-batches, see `rendezvous`
    marks_reductions: bool = False  # ranks start to reduce without asking, and a mark tells if one has diverged
    settles_alone: bool = False  # a rank knows, in a backward, that all ranks reduce, and settles it without them

    def windows_of(self, group: int) -> int:
        """Returns in how many windows a group is stepped apart from the user's call."""
        return sum(window.groups.count(group) for one in self.optimizers for window in one.windows)

    @property
    def may_wait(self) -> bool:
        """Whether a reduction may wait for another rank before backward has ended."""
        wanted = Counter[int]()
        for number in self.order:
            wanted[self.groups[number].pool] += len(self.groups[number].chunks)
        short = any(count > self.buckets[pool] for pool, count in wanted.items() if count)
        return self.steps_in_backward or self.in_order or short

    @property
    def world(self) -> int:
        return self.ranks * self.replicas * self.tensor_ranks

    @property
    def agree(self) -> int:
        """How many ranks tell each other what they want; see `rendezvous`."""
        return self.ranks if self.units else self.ranks * self.replicas

    @property
    def agree_among(self) -> Among:
        return Among.SHARD if self.units else self.among_all

    @property
    def among_all(self) -> Among:
        """Which ranks have batches of their own, shard groups and their replicas."""
        if self.replicas == 1:
            return Among.SHARD
        return Among.WORLD if self.tensor_ranks == 1 else Among.DATA

    @property
    def parts(self) -> bool:
        """Whether replicas go their own ways between two meetings."""
        return bool(self.units) and self.replicas > 1

    def meets_for(self, use: Use) -> bool:
        """Whether ranks meet for a use: a call of all replicas, where these go their own ways."""
        return use.cause is Cause.CALL and self.parts and use.number in self.of_all


@dataclass(frozen=True)
class Op:
    """One thing that the engine does."""

    kind: Kind
    target: int  # unit of `UNSHARD` and `RESHARD`, number of a `CALL`, group of all others; -1: all
    at: int  # the use at which it begins
    part: int = 0  # chunk, or how many windows of the group come before this one
    by: int | None = None  # the use that waits for it; before `at`: in the next step. None: whatever is `after` it
    after: tuple[int, ...] = ()  # numbers of the ops that must be done before it begins
    lag: int = 0  # 1: acts on what the step before has left
    nbytes: int = 0  # that this rank sends
    among: Among = Among.SHARD  # which ranks do it together


@dataclass(frozen=True)
class Program:
    """The uses of a step, and its ops in the order in which they begin."""

    facts: Facts
    uses: tuple[Use, ...]
    ops: tuple[Op, ...]

    def at(self, use: int) -> list[Op]:
        """Returns the ops that begin at a use."""
        return [op for op in self.ops if op.at == use]

    @property
    def collectives(self) -> list[Op]:
        return [op for op in self.ops if op.kind not in LOCAL]

    @property
    def messages(self) -> int:
        """How many small messages of the host ranks wait for, in one step."""
        return sum(op.kind is Kind.AGREE for op in self.ops)

    @property
    def bytes_sent(self) -> int:
        """Bytes of parameters and gradients that this rank sends in one step."""
        return sum(op.nbytes for op in self.ops)

    def __str__(self) -> str:
        """Returns which parameters the `#` numbers are, and a line for each use at which anything happens. A prime
        marks what the step before has left."""
        begins: defaultdict[int, list[Op]] = defaultdict(list)
        waits: defaultdict[int, list[Op]] = defaultdict(list)
        for op in self.ops:
            begins[op.at].append(op)
            if op.by is not None and op.by != op.at:
                waits[op.by].append(op)
        rows = []
        for number, (use, name) in enumerate(zip(self.uses, self.names, strict=True)):
            does, awaits = self.told(begins[number]), self.told(waits[number])
            if does or awaits or use.cause in (Cause.FORWARD, Cause.BACKWARD):
                told = [does, f"waits: {awaits}" if awaits else ""]
                rows.append((name, "; ".join(filter(None, told))))
        width = max((len(name) for name, _ in rows), default=0)
        lines = [f"{name:{width}} | {told}".rstrip(" |") for name, told in rows]
        named = {op.target for op in self.ops if self._label_of(op).startswith("#")}
        legend = [f"#{number} is {self.facts.groups[number].holds}" for number in sorted(named)]
        return "\n".join([*legend, *lines])

    @property
    def names(self) -> list[str]:
        """What each use is called in print: indented but for those that a step has in any model."""
        names, micro = [], -1
        for use in self.uses:
            micro += use.cause is Cause.FORWARD
            names.append(self._name(use, micro))
        return names

    def _name(self, use: Use, micro: int) -> str:
        if use.cause is Cause.UNIT:
            return f"  {self.facts.units[use.number].name or 'model'}"
        if use.cause in (Cause.GRADIENT, Cause.READ):
            return f"  {use.cause} {self._label(use.number)}"
        if use.cause is Cause.CALL:
            return f"  {self.facts.calls[use.number]}"
        is_pass = use.cause in (Cause.FORWARD, Cause.BACKWARD)
        return f"{use.cause} {micro}" if is_pass and self.micro_batches > 1 else str(use.cause)

    def told(self, ops: Iterable[Op]) -> str:
        """Returns what ops do, as it is printed."""
        told = []
        for (kind, lag, among), alike in groupby(ops, lambda op: (op.kind, op.lag, op.among)):
            labels = ", ".join(filter(None, map(self._label_of, alike)))
            told.append(" ".join(filter(None, [f"{kind}{LATE * lag}", labels, among and f"among {among}"])))
        return "; ".join(told)

    def _label_of(self, op: Op) -> str:
        if op.kind in (Kind.UNSHARD, Kind.RESHARD):
            return self.facts.units[op.target].name or "model"
        if op.target < 0 or op.kind is Kind.CALL:
            return ""
        group = self.facts.groups[op.target]
        parts = len(group.chunks) if op.kind in CHUNKED else self.facts.windows_of(op.target)
        is_part = parts > 1 and op.kind in (*CHUNKED, Kind.FETCH, Kind.STEP, Kind.PUT)
        return f"{self._label(op.target)}{f'[{op.part}]' if is_part else ''}"

    def _label(self, group: int) -> str:
        """Returns the name of a unit for its only group, and the number of any other group."""
        return next((unit.name for unit in self.facts.units if unit.groups == (group,) and unit.name), f"#{group}")

    @property
    def micro_batches(self) -> int:
        return sum(use.cause is Cause.FORWARD for use in self.uses)
