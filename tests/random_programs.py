"""Training loops as data: a list of operations on a small model, which hypothesis draws, shrinks and prints.

`random_loops` carries them out.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from random_changes import OF_DATA, OF_GRADIENTS
from random_models import Running

WIDTH = 5
LAYERS = ("mid", "again", "left", "right", "shift", "gate", "spare")  # that may be frozen; `up` always has a gradient


class Net(nn.Module):
    """A tied weight, a scalar, a buffer if `running`, layers that only some forwards use, and one that none does."""

    def __init__(self, *, running: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.up, self.mid, self.again = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if tied:
            self.again.weight = self.mid.weight
        self.left, self.right = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.shift = Running(WIDTH, torch.float32) if running else nn.LayerNorm(WIDTH)
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.spare = nn.Linear(3, 2)

    def forward(self, x: Tensor, way: int) -> Tensor:
        hidden = torch.tanh(self.up(x))
        if way & 8:
            hidden = checkpoint(self.twice, hidden, use_reentrant=False)
        if way & 1:
            hidden = hidden + torch.tanh(self.left(hidden)) * self.gate
        if way & 2:
            hidden = self.shift(hidden)
        if way & 4:
            hidden = torch.tanh(self.right(hidden))
        return self.again(torch.tanh(self.mid(hidden)))

    def twice(self, hidden: Tensor) -> Tensor:
        """What recomputes."""
        return torch.tanh(self.right(torch.tanh(self.mid(hidden))))

    def score(self, x: Tensor, way: int) -> Tensor:
        """Another method that users call in place of forward."""
        return self.right(self(x, way))


class Forward(NamedTuple):
    """A forward and its loss. Each rank goes its own `ways` (modulo their number) through the model."""

    ways: tuple[int, ...] = (7,)
    scores: bool = False


class Read(NamedTuple):
    """`who` is a rank, or None for all."""

    what: str = "weights"
    who: int | None = None


class Backward(NamedTuple):
    """One backward of the sum of losses, or as many as there are `repeats` of the same graph."""

    forwards: tuple[Forward, ...] = (Forward(),)  # or none, of a penalty alone
    syncs: bool = True
    repeats: int = 1
    overflows: bool = False  # on rank 0
    penalty: int | None = None  # on the square of a weight, used outside of a forward
    looks: Read | None = None  # before backward
    inside: str | None = None  # read a weight in a hook of the "forward" of a module, or in "backward" on a tensor's
    only: int | None = None  # asks for the gradients of the parameters before this one, and of one that always has some
    differs: int | None = None  # takes its gradient by `torch.autograd.grad` as well, each rank for itself


class Edit(NamedTuple):
    """Of a gradient: one in `OF_GRADIENTS`, or whole; `which` parameter, modulo their number, or None for all."""

    how: str
    which: int | None = None


class EditWeight(NamedTuple):
    how: str
    which: int


class Clip(NamedTuple):
    how: str  # as Fabric's, or torch's own
    limit: float


class Step(NamedTuple):
    closure: Backward | None = None
    which: int | None = None  # of the optimizers, modulo their number, or all


class ZeroGrad(NamedTuple):
    to_none: bool = True
    which: int | None = None


class Hook(NamedTuple):
    """On the gradient of a weight, from here on."""

    how: str
    which: int


HOOKS = ("halves", "halves what has accumulated", "replaces it", "reads it", "drops it")


class EditState(NamedTuple):
    which: int


class Copy(NamedTuple):
    """A forward of a copy of the model."""


class SaveFile(NamedTuple):
    pass


class LoadFile(NamedTuple):
    pass


class Freeze(NamedTuple):
    layer: str
    thaws: bool = False


class Rate(NamedTuple):
    lr: float


class Evaluate(NamedTuple):
    who: int | None = None


class Whole(NamedTuple):
    """`full_parameters`, with a weight that is written inside, or with none."""

    which: int | None


class Save(NamedTuple):
    pass


class Load(NamedTuple):
    pass


Op = Any


@dataclass(frozen=True)
class Program:
    """What is trained, and how."""

    ops: tuple[Op, ...]
    precision: str = "32-true"
    world: int = 2
    running: bool = False
    optimizers: int = 1
    kind: str = "momentum"
    strategy: dict[str, Any] = field(default_factory=lambda: {"stage": 2})

    @property
    def is_half(self) -> bool:
        return self.precision in ("16-true", "bf16-true")

    @property
    def is_exact(self) -> bool:
        """Whether docs/numerics.md promises the bits of DDP (those of stage 0, in half precision)."""
        averaged = 0  # backwards whose averages are in the gradients
        for op in self.ops:
            if isinstance(op, ZeroGrad) and (op.which is None or self.optimizers == 1):
                averaged = 0
            backward = op.closure if isinstance(op, Step) else op
            if isinstance(backward, Backward):
                times = self.optimizers if isinstance(op, Step) else 1  # each clears its own alone
                averaged = (0 if isinstance(op, Step) else averaged) + times * backward.repeats * backward.syncs
                if averaged > 1 or (averaged and not backward.syncs):
                    return False
            if isinstance(op, Clip) and "norm" in op.how:
                return False
        return self.world == 2

    def tolerance(self) -> float:
        """Relative to the largest value: of two roundings for each operation in what is computed in two bytes, and of
        sums of a hundred terms in fp32."""
        eps = {"16-true": 2.0**-11, "bf16-true": 2.0**-8, "16-mixed": 2.0**-11, "bf16-mixed": 2.0**-8}
        return 2 * (1 + len(self.ops)) * eps.get(self.precision, 100 * 2.0**-24)


def sensible(program: Program) -> Program:
    """Leaves out what a user's loop cannot do, or what is documented to differ."""
    kept: list[Op] = []
    pending, parted, unscaled, graded, saved = False, False, False, False, False
    filed = False  # saved, in a file
    together = False  # ranks go the same ways: a hook reads what is in shards, in the middle of backward
    scales = program.precision == "16-mixed"
    for op in program.ops:
        if pending and isinstance(op, Step | Save | Load | Freeze | Whole | SaveFile | LoadFile | Hook):
            continue  # gradients are each rank's own: they are to be reduced first
        if parted and (isinstance(op, Edit | Clip) or (isinstance(op, Read) and op.what in ("gradients", "norms"))):
            continue  # which of them are None is each rank's own, too
        if isinstance(op, Read) and op.what == "norms" and pending:
            continue
        if parted and isinstance(op, ZeroGrad) and not op.to_none and program.strategy["stage"] == 1:
            continue  # some ranks would read alone what others have written over
        if isinstance(op, Hook) and op.how == "drops it" and scales:
            continue  # there may be none to unscale
        if isinstance(op, Step) and op.closure is None and not graded:
            continue
        if isinstance(op, Step) and op.closure is not None and (scales or not op.closure.syncs):
            continue
        if isinstance(op, Clip) and scales and (unscaled or not graded or pending):
            continue  # a scaler unscales once in a step
        if isinstance(op, Read) and op.what in ("gradients", "norms") and program.strategy["stage"] == 1:
            op = op._replace(who=None)  # after a change, one that reads alone gets an error there
        if (isinstance(op, Load) and not saved) or (isinstance(op, LoadFile) and not filed):
            continue
        filed = filed or isinstance(op, SaveFile)
        if isinstance(op, Step | ZeroGrad) and program.optimizers == 1:
            op = op._replace(which=None)
        if isinstance(op, Evaluate) and op.who is not None and program.running:
            continue  # its broadcast is a collective, as under DDP
        if isinstance(op, Edit) and op.how == "drop" and op.which is None:
            graded = False
        if isinstance(op, Backward) and (together or op.inside == "backward"):
            op = _alike(op)
        elif isinstance(op, Step) and op.closure is not None and (together or op.closure.inside == "backward"):
            op = op._replace(closure=_alike(op.closure))
        together = together or (isinstance(op, Hook) and op.how != "halves")
        if isinstance(op, Backward):
            if unscaled or (op.overflows and not scales):
                op = op._replace(overflows=False)
                if unscaled:
                    continue
            uneven = any(len(set((*one.ways, *one.ways)[: program.world])) > 1 for one in op.forwards)
            pending = not op.syncs
            parted = pending and (parted or uneven)
            graded = True
        if isinstance(op, ZeroGrad) and op.which is None:
            parted = parted and not op.to_none
            pending = pending and parted
            graded = graded and not op.to_none
        if isinstance(op, Step):
            unscaled = False
            graded = True
        unscaled = unscaled or (scales and isinstance(op, Clip))
        saved = saved or isinstance(op, Save)
        kept.append(op)
    return Program(tuple(kept), **{k: v for k, v in vars(program).items() if k != "ops"})


def _alike(op: Backward) -> Backward:
    """All ranks go rank 0's way."""
    return op._replace(forwards=tuple(one._replace(ways=one.ways[:1]) for one in op.forwards))


# -- what hypothesis draws

_ways = st.lists(st.integers(0, 15), min_size=1, max_size=2).map(tuple)
_forwards = st.lists(st.builds(Forward, _ways, st.booleans()), min_size=1, max_size=2).map(tuple)
_who = st.sampled_from([None, None, 0, 1])
_index = st.integers(0, 12)
_reads = st.builds(Read, st.sampled_from(["weights", "sums", "gradients", "norms"]), _who)
_of_a_loss = st.builds(
    Backward,
    _forwards,
    syncs=st.sampled_from([True, True, False]),
    repeats=st.sampled_from([1, 1, 1, 2]),
    overflows=st.booleans(),
    penalty=st.none() | _index,
    looks=st.none() | st.builds(Read, st.sampled_from(["weights", "sums"]), _who),
    inside=st.sampled_from([None, None, None, "forward", "backward"]),
    only=st.none() | st.none() | _index,
    differs=st.none() | st.none() | _index,
)
_of_a_penalty = st.tuples(st.booleans(), _index).map(lambda drawn: Backward((), drawn[0], penalty=drawn[1]))
_backwards = _of_a_loss | _of_a_loss | _of_a_loss | _of_a_penalty
_how_edited = st.sampled_from(["drop", "replace", "scaled copy", *OF_GRADIENTS])
_rare = st.one_of(
    st.builds(Step, _backwards),
    st.builds(Step, st.none(), st.integers(0, 1)),
    st.builds(ZeroGrad, st.booleans(), st.integers(0, 1)),
    st.builds(Hook, st.sampled_from(HOOKS), _index),
    st.builds(EditState, _index),
    st.just(Copy()),
    st.just(SaveFile()),
    st.just(LoadFile()),
    st.builds(Freeze, st.sampled_from(LAYERS), st.booleans()),
    st.builds(Rate, st.sampled_from([0.05, 0.4])),
    st.builds(Whole, st.none() | _index),
    st.just(Save()),
    st.just(Load()),
)
_ops = st.one_of(
    _backwards,
    _reads,
    st.builds(Edit, _how_edited, st.none() | _index),
    st.builds(EditWeight, st.sampled_from(["foreach", "clamp", "from another", *OF_DATA]), _index),
    st.builds(Clip, st.sampled_from(["norm", "value", "torch norm", "torch value"]), st.sampled_from([0.05, 0.5])),
    st.builds(Evaluate, _who),
    st.just(Step()),
    _rare,
)
_usual = st.tuples(_backwards, _ops, st.just(Step()), _ops, st.builds(ZeroGrad, st.sampled_from([True, True, False])))
_phrases = st.lists(_usual | st.tuples(_ops, _ops), min_size=2, max_size=5)


@st.composite
def programs(draw: Any) -> Program:
    precision = draw(st.sampled_from(["32-true", "16-mixed", "16-true", "bf16-true", "bf16-mixed"]))
    world = draw(st.sampled_from([2, 2, 2, 4]))
    options: dict[str, Any] = {
        "stage": draw(st.integers(1, 3)),
        "bucket_size_mb": draw(st.sampled_from([0.0001, 25.0])),
        "overlap": draw(st.booleans()),
        "offload": draw(st.sampled_from([None, None, "cpu", {"optimizer": "cpu", "parameters": "cpu"}])),
        "units": draw(st.sampled_from(["modules", "auto"])),
        "prefetch": draw(st.integers(0, 2)),
    }
    if draw(st.integers(0, 3)) == 3:
        options["activation_checkpointing"] = {"modules": "torch.nn.Linear"}
    if world == 4:
        options["replicate_size"] = draw(st.sampled_from([2, 2, 1, 4]))
    if isinstance(options["offload"], dict) and options["stage"] < 3:
        options["offload"] = "cpu"
    return sensible(
        Program(
            ops=sum(draw(_phrases), start=()),
            precision=precision,
            world=world,
            running=draw(st.booleans()),
            optimizers=1 if precision == "16-mixed" else draw(st.integers(1, 2)),
            kind=draw(st.sampled_from(["momentum", "sgd", "adam"])),
            strategy={name: value for name, value in options.items() if value is not None},
        )
    )


def differing(program: Program, found: dict[str, Tensor], expected: dict[str, Tensor], of: str) -> list[str]:
    """Names of what is not equal to that `of` a reference, in every bit or within the tolerance. In half precision the
    bits are those of stage 0: there gradients accumulate in fp32."""
    is_exact, same_dtypes = (program.is_exact, True) if (of == "stage 0") == program.is_half else (False, False)
    if found.keys() != expected.keys():
        return [f"only one has {name}" for name in found.keys() ^ expected.keys()]

    def equal(one: Tensor, other: Tensor) -> bool:
        if (same_dtypes and one.dtype != other.dtype) or one.shape != other.shape:
            return False
        one, other = one.double(), other.double()
        finite = other[other.isfinite()]
        scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        tolerance = 0.0 if is_exact else program.tolerance() * scale
        return torch.allclose(one, other, rtol=0, atol=tolerance, equal_nan=True)

    return [name for name in expected if not equal(found[name], expected[name])]
