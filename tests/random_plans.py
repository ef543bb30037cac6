"""How a random model is trained, as data that hypothesis draws, shrinks and prints."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from lightning_zero.config import ActivationCheckpointing, Offload
from lightning_zero.run.engine import Options
from lightning_zero.shards.offload import Machine
from random_acts import ACTS, OF_GRADIENTS_LEFT, ONE_AT_A_TIME, Act, Moment
from random_changes import OF_DATA, OF_GRADIENTS, OF_WHAT_TRAINS
from random_models import Part, Spec, specs
from random_optimizers import KINDS, SCHEDULES, TWICE, optimizer_of
from thread_world import ThreadWorld

Micro = Literal["accumulate", "no_sync", "sync"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Ways:
    """Of an engine, what must change no bit."""

    bucket_bytes: int = 2**20
    overlap: bool = True
    prefetch: int = 1
    units: tuple[str, ...] | Literal["merged"] | None = None
    offload: tuple[str | None, str | None, float] = (None, None, 1.0)  # optimizer, parameters, fraction
    granularity: Literal["auto", "element", "block", "tensor"] = "auto"
    publishes_late: bool = False
    steps_in_backward: bool = False
    recomputes: tuple[str, bool, bool] | None = None  # a class, or `Linear`; inputs are offloaded; in one array
    casts: bool = True  # under autocast, weights rest in its dtype
    wire: tuple[str, ...] = ()  # see `ThreadWorld`

    def __repr__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Ways({', '.join(said)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """How a model is trained. Decided by it alone: whether DDP's numbers must come out in every bit."""

    stage: int = 0
    world: int = 2  # ranks that have batches of their own
    tensor: int = 1  # for each of them: ranks that share layers
    replicate_size: int = 1
    ways: Ways = field(default_factory=Ways)
    accumulation: Literal["sharded", "local"] = "sharded"
    reduce_dtype: torch.dtype | None = None
    earlier_micro_batches: tuple[Micro, ...] = ()  # before the last, which is always reduced
    shares_forward: bool = False  # the micro-batches are several losses of one forward
    loss: Literal["last", "sum", "in turn"] = "last"
    kinds: tuple[str, ...] = ("momentum",)  # of optimizers, which take turns at the parameters
    groups: int = 1  # of each optimizer
    holds_frozen: bool = False  # an optimizer has what is frozen, too
    schedule: str | None = None
    closes: bool = False  # micro-batches are in a closure, which each optimizer is given
    clip: tuple[str, float] | None = None
    set_to_none: bool = True
    bracketed: bool = False  # `engine.backward()` around backwards
    autocast: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    scale: float | None = None  # of the loss, at the start
    overflows: tuple[int, int] | None = None  # step and rank, modulo their number, of a gradient that is not finite
    evaluates: bool = False
    reads_gradients: bool = False
    broadcast_buffers: bool = True
    clears_every: int = 1  # steps; between, gradients add up
    gradient_edit: str | None = None
    data_edit: tuple[str, int] | None = None  # in the last micro-batch; and of which parameter, modulo their number
    reads: tuple[str, int] | None = None  # a weight, in the last micro-batch; see `train`
    regroups: tuple[str | None, ...] = ()  # before each step from the second on
    acts: tuple[Act, ...] = ()
    hook: int | None = None  # of a user, on the gradient of this parameter, modulo their number
    takes_turns: bool = False  # of several optimizers, each step calls one
    averages: bool = False  # a running average follows the weights
    fails: int | None = None  # the step in whose last backward all ranks get an error, which users catch

    def __repr__(self) -> str:
        plain = Plan()
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        said = [f"{name}={value!r}" for name, value in own.items() if value != getattr(plain, name)]
        return f"Plan({', '.join(said)})"

    @property
    def shard_size(self) -> int:
        return self.world // self.replicate_size

    @property
    def partitioned(self) -> int:
        """The stage, or 0 where there is nobody to share with."""
        return self.stage if self.shard_size > 1 else 0

    @property
    def averages_first(self) -> bool:
        """Micro-batches are averaged over ranks before they are added."""
        return self.partitioned >= 2

    def is_reduced(self, micro: Micro) -> bool:
        return micro == "sync" or (micro == "accumulate" and self.averages_first and self.accumulation == "sharded")

    @property
    def is_exact(self) -> bool:
        """Ranks that share layers, and hybrid sharding, sum in another order. Stage 1 takes an average apart to reduce
        it a second time."""
        hybrid = self.replicate_size > 1 and self.shard_size > 1
        again = self.partitioned == 1 and ("sync" in self.earlier_micro_batches or self.clears_every > 1)
        return not (hybrid or again or self.tensor > 1)

    def options(self, model: nn.Module, folder: Path) -> Options:
        ways = self.ways
        optimizer, parameters, fraction = ways.offload
        path = folder if "nvme" in ways.offload else None
        offload = Offload(optimizer, parameters=parameters, fraction=fraction, path=path)  # type: ignore[arg-type]
        recomputes = None
        if ways.recomputes is not None:
            name, goes_to_host, in_one = ways.recomputes
            is_there = any(type(module).__name__ == name for module in model.modules())
            blocks = (name if is_there else "Linear",)
            recomputes = ActivationCheckpointing(blocks, offload=goes_to_host, contiguous=in_one)
        return Options(
            offload=offload if optimizer or parameters else None,
            machine=Machine(host_is_apart=True),
            unit_classes=ways.units if isinstance(ways.units, tuple) else None,
            merges_units=ways.units == "merged",
            bucket_bytes=ways.bucket_bytes,
            prefetch=ways.prefetch,
            overlap=ways.overlap,
            accumulation=self.accumulation,
            autocast_dtype=self.autocast if ways.casts else None,
            param_dtype=self.param_dtype,
            tensor_parallel_size=self.tensor,
            replicate_size=self.replicate_size,
            reduce_dtype=self.reduce_dtype,
            broadcast_buffers=self.broadcast_buffers,
            granularity=ways.granularity,
            late_publish_bytes=0 if ways.publishes_late else 2**25,
            step_in_backward=ways.steps_in_backward,
            activation_checkpointing=recomputes,
        )

    def thread_world(self) -> ThreadWorld:
        return ThreadWorld(self.world, **dict.fromkeys(self.ways.wire, True))  # type: ignore[arg-type]

    def make_optimizers(self, model: nn.Module) -> list[Optimizer]:
        given = [parameter for parameter in model.parameters() if parameter.requires_grad or self.holds_frozen]
        if "give" in self.regroups:
            given = [parameter for number, parameter in enumerate(given) if number % 3 < 2]
        count = len(self.kinds)
        return [optimizer_of(kind, given[number::count], self.groups) for number, kind in enumerate(self.kinds)]


@st.composite
def ways(draw: Any) -> Ways:
    tiers = st.sampled_from([None, None, None, "cpu", "nvme"])
    wires = [(), (), ("learns_late",), ("keeps_order",), ("learns_late", "keeps_order"), ("sanitize",)]
    recomputing = st.tuples(st.sampled_from(["Linear", "Residual", "Mlp", "Running"]), st.booleans(), st.booleans())
    return Ways(
        bucket_bytes=draw(st.sampled_from([2**20, 64, 256, 1024])),
        overlap=draw(st.booleans()),
        prefetch=draw(st.integers(0, 2)),
        units=draw(st.sampled_from([None, ("Linear",), ("Chain",), "merged"])),
        offload=(draw(tiers), draw(tiers), draw(st.sampled_from([1.0, 0.5]))),
        granularity=draw(st.sampled_from(["auto", "auto", "element", "block", "tensor"])),
        publishes_late=draw(st.booleans()),
        recomputes=draw(st.none() | st.none() | recomputing),
        wire=draw(st.sampled_from(wires)),
    )


@st.composite
def acts(draw: Any) -> Act:
    name = draw(st.sampled_from(list(ACTS)))
    moments: tuple[Moment, ...] = ("before forward", "before backward", "before step", "after step")
    if name in OF_GRADIENTS_LEFT:
        moments = ("before step",)
    elif name in ONE_AT_A_TIME:
        moments = ("before forward", "before step", "after step")
    return Act(name, draw(st.sampled_from(moments)), draw(st.integers(0, 2)), draw(st.integers(0, 5)))


@st.composite
def plans(draw: Any, tensor: int) -> Plan:
    world = draw(st.sampled_from([2, 1, 3, 4] if tensor == 1 else [2, 1]))
    changes = st.sampled_from([None, *OF_WHAT_TRAINS])
    plan = Plan(
        world=world,
        tensor=tensor,
        stage=draw(st.integers(0, 3)),
        replicate_size=draw(st.sampled_from([1, 1, *(size for size in range(1, world + 1) if world % size == 0)])),
        ways=draw(ways()),
        accumulation=draw(st.sampled_from(["sharded", "local"])),
        earlier_micro_batches=draw(
            st.lists(st.sampled_from(["accumulate", "accumulate", "no_sync", "sync"]), max_size=2).map(tuple)
        ),
        shares_forward=draw(st.booleans()),
        loss=draw(st.sampled_from(["last", "sum", "in turn"])),
        kinds=("momentum",) * draw(st.integers(1, 2)),
        groups=draw(st.integers(1, 3)),
        holds_frozen=draw(st.booleans()),
        clip=draw(st.sampled_from([None, ("norm", 0.1), ("value", 0.01)])),
        set_to_none=draw(st.sampled_from([True, True, False])),
        bracketed=draw(st.booleans()),
        evaluates=draw(st.booleans()),
        reads_gradients=draw(st.booleans()),
        broadcast_buffers=draw(st.sampled_from([True, True, False])),
        gradient_edit=draw(st.sampled_from([None, None, *OF_GRADIENTS])),
        data_edit=draw(st.sampled_from([None, None, *((name, at) for name in OF_DATA for at in range(6))])),
        reads=draw(st.none() | st.tuples(st.sampled_from(["before", "as it begins", "as it ends"]), st.integers(0, 5))),
        regroups=draw(st.just(()) | st.tuples(changes, changes)),
        acts=draw(st.just(()) | st.lists(acts(), max_size=3).map(tuple)),
        hook=draw(st.none() | st.none() | st.integers(0, 5)),
        takes_turns=draw(st.sampled_from([False, False, True])),
    )
    if plan.stage < 3 and plan.ways.offload[1] is not None:
        plan = replace(plan, ways=replace(plan.ways, offload=(plan.ways.offload[0], None, plan.ways.offload[2])))
    if "give" not in plan.regroups:  # until then, gradients of what no optimizer has are each rank's own
        plan = replace(plan, clears_every=draw(st.sampled_from([1, 1, 1, 2])))
    if not plan.regroups:
        plan = replace(plan, averages=draw(st.sampled_from([False, False, True])))
        plan = replace(plan, schedule=draw(st.sampled_from([None, *SCHEDULES])))
    else:  # what was kept is of another model
        plan = without_acts(plan, "rewind", "reload")
    if plan.ways.recomputes is not None:  # what is computed a second time, is of the edited weights
        plan = replace(plan, data_edit=None)
    if plan.partitioned >= 2 and draw(st.integers(0, 3)) == 3:
        plan = stepping_in_backward(plan)
        plan = closing(plan) if draw(st.booleans()) else plan
    else:
        way = draw(st.sampled_from(["plain", "fails", "closes", "scales"]))
        if way == "fails":
            plan = failing(plan, draw(st.integers(0, 2)))
        elif way == "closes":
            plan = closing(plan)
        elif way == "scales":
            overflows = draw(st.none() | st.tuples(st.integers(0, 2), st.integers(0, 3)))
            plan = scaling(plan, draw(st.sampled_from([2.0**8, 2.0**16])), overflows)
    return with_dtypes(draw, plan) if plan.is_exact else plan


def with_dtypes(draw: Any, plan: Plan) -> Plan:
    """What rounds, or divides by next to nothing: a last bit that differs would become the first."""
    two_bytes = st.sampled_from([torch.bfloat16, torch.float16])
    is_in_one = plan.ways.offload[0] is None or plan.ways.offload[::2] == ("cpu", 1.0)
    may_close_twice = plan.closes and is_in_one and not plan.ways.steps_in_backward  # else it is refused
    kinds = [*KINDS, *(TWICE if may_close_twice else ())]
    plan = replace(
        plan,
        kinds=tuple(draw(st.sampled_from(kinds)) for _ in plan.kinds),
        autocast=draw(st.none() | two_bytes),
        param_dtype=None if plan.averages else draw(st.none() | st.none() | two_bytes),
        ways=replace(plan.ways, casts=draw(st.booleans())),
        reduce_dtype=draw(st.sampled_from([None, None, None, torch.float64, torch.bfloat16])),
    )
    # What stands for DDP makes gradients of that dtype at once, also those that nobody reduces.
    return plan if plan.reduce_dtype is None else without_acts(plan, "differentiate")


def without_acts(plan: Plan, *names: str) -> Plan:
    return replace(plan, acts=tuple(act for act in plan.acts if act.name not in names))


def stepping_in_backward(plan: Plan) -> Plan:
    """Without what it is refused beside, and what is done before `step`: the step has been."""
    granularity = "auto" if plan.ways.granularity == "tensor" else plan.ways.granularity
    return replace(
        plan,
        acts=tuple(act for act in plan.acts if act.moment != "before step"),
        ways=replace(plan.ways, steps_in_backward=True, granularity=granularity),
        earlier_micro_batches=(),
        kinds=plan.kinds[:1],
        clip=None,
        set_to_none=True,  # there is no gradient that could become zeros, with which a frozen parameter is stepped
        reads_gradients=False,
        gradient_edit=None,
        clears_every=1,
    )


def failing(plan: Plan, step: int) -> Plan:
    """Fails on all ranks alike: an engine hears of a backward from its first gradient, or from `engine.backward()`. The
    error comes at the last gradient, which is the only one of some losses, and where others are frozen."""
    freezes = "freeze" in plan.regroups or any(act.name == "freeze or thaw" for act in plan.acts)
    may_be_first = plan.loss == "in turn" or freezes
    return replace(plan, fails=step, bracketed=plan.bracketed or may_be_first)


def closing(plan: Plan) -> Plan:
    """Without what users do outside of `step` alone."""
    return replace(without_acts(plan, "reload", "step first", "skip"), closes=True, clears_every=1)


def scaling(plan: Plan, scale: float, overflows: tuple[int, int] | None) -> Plan:
    """A scaler's verdict is of its own step alone."""
    return replace(without_acts(plan, "step first"), scale=scale, overflows=overflows, clears_every=1)


def sharing(plan: Plan) -> Plan:
    """Without what a DTensor cannot do, and what is refused beside one."""
    edits = {"gradient_edit": plan.gradient_edit and "whole", "data_edit": None}
    granularity = plan.ways.granularity if plan.ways.granularity in ("auto", "element") else "auto"
    # Whole values are not for the parameters of such a model.
    plan = without_acts(plan, "load", "rewind")
    return replace(plan, **edits, ways=replace(plan.ways, granularity=granularity, wire=()))


@st.composite
def cases(draw: Any, tensor: int = 1) -> tuple[Plan, Spec]:
    """Where bits may differ there is nothing in two bytes, which would make a last bit the eighth."""
    plan = draw(plans(tensor))
    # An average has at least four bytes, and masters are no narrower than what rests.
    has_two = plan.is_exact and not plan.averages and plan.param_dtype is not torch.float16
    two_bytes = [torch.bfloat16] if has_two else []
    spec = draw(specs([torch.float32, torch.float32, torch.float64, *two_bytes]))
    if plan.ways.recomputes is not None:  # torch's own checkpoint changes buffers twice, and a block in it once
        spec = with_parts(spec, lambda part: replace(part, checkpointed=False))
    if tensor > 1:
        plan = sharing(plan)
        shared = st.builds(Part, st.sampled_from(["mlp", "routed"]), size=st.sampled_from([2, 4, 18]))
        spec = replace(spec, trunk=(*spec.trunk, *draw(st.lists(shared, min_size=1, max_size=2))))
    if plan.param_dtype is not None:  # torch's takes no weights in two bytes beside buffers in four
        spec = with_parts(spec, lambda part: replace(part, kind=part.kind.replace("batch norm", "layer norm")))
    return plan, spec


def with_parts(spec: Spec, change: Callable[[Part], Part]) -> Spec:
    def changed(part: Part) -> Part:
        return change(replace(part, children=tuple(map(changed, part.children))))

    return replace(spec, trunk=tuple(map(changed, spec.trunk)))
