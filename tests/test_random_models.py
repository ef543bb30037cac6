"""Random models under random plans give DDP's numbers (decision 3 of the design): every loss, gradient and weight.

A campaign: RANDOM_MODELS=5000 pytest --timeout=0 tests/test_random_models.py. Otherwise the same few examples, always.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine, Options
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from random_changes import OF_DATA, OF_GRADIENTS, OF_WHAT_TRAINS, trained_by
from random_models import Model, Part, Place, Spec, build, specs
from thread_world import ThreadWorld

STEPS = 3
CAMPAIGN = int(os.environ.get("RANDOM_MODELS", 0))
Micro = Literal["accumulate", "no_sync", "sync"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is trained. Decided by it alone: whether DDP's numbers must come out in every bit."""

    stage: int = 0
    world: int = 2
    replicate_size: int = 1
    bucket_bytes: int = 2**20
    overlap: bool = True
    prefetch: int = 1
    units: tuple[str, ...] | None = None
    accumulation: Literal["sharded", "local"] = "sharded"
    reduce_dtype: torch.dtype | None = None
    earlier_micro_batches: tuple[Micro, ...] = ()  # before the last, which is always reduced
    shares_forward: bool = False  # the micro-batches are several losses of one forward
    loss: Literal["last", "sum", "in turn"] = "last"
    optimizers: int = 1
    adaptive: bool = False  # AdamW
    clip: float | None = None
    set_to_none: bool = True
    bracketed: bool = False  # `engine.backward()` around backwards
    autocast: bool = False
    evaluates: bool = False
    reads_gradients: bool = False
    clears_every: int = 1  # steps; between, gradients add up
    gradient_edit: str | None = None
    data_edit: tuple[str, int] | None = None  # in the last micro-batch; and of which parameter, modulo their number
    regroups: tuple[str | None, ...] = ()  # before each step from the second on
    on_disk: bool = False  # optimizer state and masters

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
        """Hybrid sharding sums in another order, and stage 1 takes an average apart to reduce it a second time."""
        hybrid = self.replicate_size > 1 and self.shard_size > 1
        again = self.partitioned == 1 and ("sync" in self.earlier_micro_batches or self.clears_every > 1)
        return not (hybrid or again)

    def options(self, folder: Path) -> Options:
        return Options(
            offload=Offload("nvme", path=folder) if self.on_disk else None,
            unit_classes=self.units,
            bucket_bytes=self.bucket_bytes,
            prefetch=self.prefetch,
            overlap=self.overlap,
            accumulation=self.accumulation,
            autocast_dtype=torch.bfloat16 if self.autocast else None,
            replicate_size=self.replicate_size,
            reduce_dtype=self.reduce_dtype,
        )

    def make_optimizers(self, model: nn.Module) -> list[Optimizer]:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if "give" in self.regroups:
            trainable = [parameter for number, parameter in enumerate(trainable) if number % 3 < 2]
        shares = [trainable[number :: self.optimizers] for number in range(self.optimizers)]
        if self.adaptive:
            return [torch.optim.AdamW(share, lr=0.01, weight_decay=0.1) for share in shares]
        return [torch.optim.SGD(share, lr=0.05, momentum=0.9, weight_decay=0.01) for share in shares]


class Ddp:
    """What DDP does, with unused parameters found, in an engine's clothes: nothing partitioned, nothing overlapped."""

    def __init__(self, module: nn.Module, optimizers: list[Optimizer], plan: Plan, comm: Comm) -> None:
        self.module, self.plan, self.comm = module, plan, comm
        self.reduces = True
        self._is_stale = True  # the buffers
        self._before: dict[nn.Parameter, Tensor | None] | None = None  # gradients of earlier windows of the step
        self._broadcast([*module.parameters(), *module.buffers()])
        self._trained: dict[nn.Parameter, str] = {}
        self._take_in()
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._cast_gradients())
            optimizer.register_step_post_hook(lambda *_: self._restore_gradients())

    def _take_in(self) -> None:
        """What trains by now."""
        newly = {p: name for name, p in self.module.named_parameters() if p.requires_grad and p not in self._trained}
        self._broadcast(list(newly))
        self._trained |= newly
        for parameter in newly:
            parameter.grad_dtype = self._grad_dtype(parameter)

    def _grad_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self.plan.reduce_dtype or torch.promote_types(parameter.dtype, torch.float32)

    def _cast_gradients(self) -> None:
        """To what optimizers step; the sum goes on from the gradients as they are."""
        self._summed = {parameter: parameter.grad for parameter in self._trained}
        for parameter, grad in self._summed.items():
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if grad is None else grad.to(parameter.dtype)

    def _restore_gradients(self) -> None:
        for parameter, grad in self._summed.items():
            parameter.grad = None
            parameter.grad_dtype = self._grad_dtype(parameter)
            parameter.grad = grad

    def _broadcast(self, tensors: list[Any]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                values = tensor.clone()
                self.comm.broadcast(values, "ddp state")
                tensor.copy_(values)

    @contextmanager
    def forward(self, *, reduces: bool) -> Iterator[None]:
        if torch.is_grad_enabled():
            self._take_in()
        if self._is_stale:
            self._broadcast(list(self.module.buffers()))
        yield
        self._is_stale = reduces

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.reduces = False
        yield
        self.reduces = True

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext() if self.plan.is_reduced("accumulate") else self.no_sync()

    @contextmanager
    def backward(self) -> Iterator[None]:
        if self._before is None:
            self._before = {parameter: parameter.grad for parameter in self._trained}
            if self.plan.averages_first:
                for parameter in self._trained:
                    parameter.grad = None
        yield
        if self.reduces:
            for number, parameter in enumerate(self._trained):
                parameter.grad = self._average(parameter, self._before[parameter], f"{number}")
            self._before = None

    def _average(self, parameter: nn.Parameter, before: Tensor | None, name: str) -> Tensor | None:
        grad = parameter.grad
        mine = torch.zeros_like(parameter, dtype=self._grad_dtype(parameter)) if grad is None else grad
        used = self.comm.all_reduce(torch.tensor([grad is not None], dtype=torch.uint8), f"used {name}", "max")
        rows = mine.new_empty(self.comm.size, mine.numel())
        self.comm.all_gather(rows, mine.reshape(-1), f"average {name}").wait()
        if not used.item():
            return before if self.plan.averages_first else None
        total = rows[0].clone()
        for row in rows[1:]:
            total.add_(row)
        average = total.div_(self.comm.size).view_as(parameter)
        return before + average if self.plan.averages_first and before is not None else average

    @property
    def averages(self) -> Any:
        return self

    def clip_by_norm_(self, parameters: Any, max_norm: float) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.stack([grad.double().norm() for grad in gradients]).norm().float()
        for grad in gradients:
            grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def train(model: Model, engine: Any, optimizers: list[Optimizer], plan: Plan, rank: int) -> dict[str, Tensor]:
    """Every loss and, if the plan asks for them, every gradient."""
    seen: dict[str, Tensor] = {}

    def run(place: Place, *, reduces: bool) -> list[Tensor]:
        seed = 100 * place.step + 10 * place.micro + place.rank
        signal = torch.randn(3, model.head.in_features, generator=torch.Generator().manual_seed(seed))
        # As Lightning enters it; the cache would be one for all threads.
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=plan.autocast, cache_enabled=False)
        with engine.forward(reduces=reduces), autocast:
            return model(signal, place)

    losses: list[Tensor] = []
    for step in range(STEPS):
        if (change := dict(enumerate(plan.regroups, 1)).get(step)) is not None:
            OF_WHAT_TRAINS[change](model, optimizers, rank)
        if step % plan.clears_every == 0:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=plan.set_to_none)
        micros: tuple[Micro, ...] = (*plan.earlier_micro_batches, "sync")
        for number, micro in enumerate(micros):
            way = {"accumulate": engine.accumulating, "no_sync": engine.no_sync, "sync": nullcontext}[micro]
            with way():
                if number == 0 or not plan.shares_forward:
                    losses = run(Place(rank, step, number), reduces=micro == "sync")
                total = torch.stack(losses).sum()
                chosen = {"last": losses[-1], "sum": total, "in turn": losses[number % len(losses)]}[plan.loss]
                if plan.data_edit is not None and micro == "sync":
                    parameters = list(model.parameters())
                    OF_DATA[plan.data_edit[0]](parameters[plan.data_edit[1] % len(parameters)])
                with engine.backward() if plan.bracketed or isinstance(engine, Ddp) else nullcontext():
                    chosen.backward(retain_graph=plan.shares_forward and number < len(micros) - 1)
            seen[f"loss {step}.{number}"] = chosen.detach()
        trained = trained_by(optimizers)
        if plan.gradient_edit is not None:
            for parameter in trained:
                if parameter.grad is not None and parameter.numel():
                    OF_GRADIENTS[plan.gradient_edit](parameter.grad)
        if plan.clip is not None:
            engine.averages.clip_by_norm_(trained, plan.clip)
        if plan.reads_gradients:
            for name, parameter in model.named_parameters():
                if parameter in set(trained) and parameter.grad is not None:
                    seen[f"gradient {step} {name}"] = parameter.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        if plan.evaluates:
            model.eval()
            with torch.no_grad():
                # With fresh buffers, as DDP, where the training forward before was the last of its step.
                seen[f"evaluation {step}"] = run(Place(rank, step, 7), reduces=False)[-1]
            model.train()
    return seen


def values_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def under_ddp(model: Model, plan: Plan, comm: Comm) -> dict[str, Tensor]:
    optimizers = plan.make_optimizers(model)
    seen = train(model, Ddp(model, optimizers, plan, comm), optimizers, plan, comm.rank)
    return seen | values_of(model.state_dict())


def under_the_engine(model: Model, plan: Plan, comm: Comm) -> dict[str, Tensor]:
    optimizers = plan.make_optimizers(model)
    with TemporaryDirectory() if plan.on_disk else nullcontext("") as folder:
        engine = Engine(model, optimizers, stage=plan.stage, comm=comm, options=plan.options(Path(folder)))
        seen = train(model, engine, optimizers, plan, comm.rank)
        engine.loans.settle()
        weights = engine.states.full_model()
        engine.close()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    return seen | values_of(weights)


def on_all_ranks(job: Callable[[Model, Plan, Comm], Any], spec: Spec, plan: Plan) -> list[dict[str, Tensor]]:
    """Ranks start from different values, which the first one's must replace."""
    models = [build(spec, seed) for seed in range(plan.world)]
    if plan.world == 1:
        return [job(models[0], plan, LocalComm())]
    return ThreadWorld(plan.world).run(lambda comm: job(models[comm.rank], plan, comm))


def differing(found: dict[str, Tensor], expected: dict[str, Tensor], *, is_exact: bool) -> list[str]:
    """The names of what is not equal; to 1e-6 where not every bit has to be (gradients, taken at weights that differ
    by that much already, to 1e-5)."""
    assert found.keys() == expected.keys()
    assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in expected.items()}

    def equal(name: str) -> bool:
        tolerance = 1e-5 if name.startswith("gradient") else 1e-6
        one, other = found[name], expected[name]
        return torch.equal(one, other) if is_exact else torch.allclose(one, other, rtol=tolerance, atol=tolerance)

    return [name for name in expected if not equal(name)]


@st.composite
def plans(draw: Any) -> Plan:
    world = draw(st.sampled_from([2, 1, 3, 4]))
    changes = st.sampled_from([None, *OF_WHAT_TRAINS])
    plan = Plan(
        world=world,
        stage=draw(st.integers(0, 3)),
        replicate_size=draw(st.sampled_from([1, 1, *(size for size in range(1, world + 1) if world % size == 0)])),
        bucket_bytes=draw(st.sampled_from([2**20, 64, 256, 1024])),
        overlap=draw(st.booleans()),
        prefetch=draw(st.integers(0, 2)),
        units=draw(st.sampled_from([None, ("Linear",), ("Chain",)])),
        accumulation=draw(st.sampled_from(["sharded", "local"])),
        earlier_micro_batches=draw(
            st.lists(st.sampled_from(["accumulate", "accumulate", "no_sync", "sync"]), max_size=2).map(tuple)
        ),
        shares_forward=draw(st.booleans()),
        loss=draw(st.sampled_from(["last", "sum", "in turn"])),
        optimizers=draw(st.integers(1, 2)),
        clip=draw(st.sampled_from([None, 0.1])),
        set_to_none=draw(st.sampled_from([True, True, False])),
        bracketed=draw(st.booleans()),
        evaluates=draw(st.booleans()),
        reads_gradients=draw(st.booleans()),
        gradient_edit=draw(st.sampled_from([None, None, *OF_GRADIENTS])),
        data_edit=draw(st.sampled_from([None, None, *((name, at) for name in OF_DATA for at in range(6))])),
        regroups=draw(st.just(()) | st.tuples(changes, changes)),
        on_disk=draw(st.sampled_from([False, False, False, True])),
    )
    if "give" not in plan.regroups:  # until then, gradients of what no optimizer has are each rank's own
        plan = replace(plan, clears_every=draw(st.sampled_from([1, 1, 1, 2])))
    if not plan.is_exact:
        return plan
    return replace(
        plan,
        adaptive=draw(st.booleans()),
        autocast=draw(st.booleans()),
        reduce_dtype=draw(st.sampled_from([None, None, None, torch.float64, torch.bfloat16])),
    )


@st.composite
def cases(draw: Any) -> tuple[Plan, Spec]:
    """Where bits may differ there is nothing in two bytes, which would make a last bit the eighth."""
    plan = draw(plans())
    two_bytes = [torch.bfloat16] if plan.is_exact else []
    return plan, draw(specs([torch.float32, torch.float32, torch.float64, *two_bytes]))


@settings(
    max_examples=CAMPAIGN or 130,
    derandomize=not CAMPAIGN,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases())
@example((Plan(stage=3, loss="in turn", evaluates=True), Spec(1, (Part("linear", used="ranks in turn"),))))
@example(
    (
        Plan(
            stage=2,
            world=1,
            accumulation="local",
            earlier_micro_batches=("accumulate",),
            clears_every=2,
            on_disk=True,
        ),
        Spec(2, ()),
    )
)
@example((Plan(autocast=True, evaluates=True), Spec(1, (Part("linear"), Part("borrowed", used="ranks in turn")))))
@example((Plan(stage=1, bucket_bytes=64, autocast=True), Spec(1, (Part("layer norm", used="even ranks"),))))
@example((Plan(stage=3, data_edit=("in place", 3)), Spec(3, (Part("linear", used="ranks in turn"),))))
@example(
    (
        Plan(stage=3, units=("Chain",), evaluates=True),
        Spec(1, (Part("residual", children=(Part("borrowed", used="ranks in turn"),), used="even ranks"),)),
    )
)
@example(
    (
        Plan(stage=3, autocast=True, data_edit=("assigned", 3)),
        Spec(1, (Part("routed", checkpointed=True, used="even ranks"), Part("linear"))),
    )
)
@example(
    (
        Plan(stage=3, units=("Chain",), autocast=True),
        Spec(1, (Part("chain", children=(Part("running"),), used="odd passes"), Part("linear"))),
    )
)
def test_a_random_model_trains_as_under_ddp(case: tuple[Plan, Spec]) -> None:
    plan, spec = case
    expected = on_all_ranks(under_ddp, spec, plan)
    for rank, found in enumerate(on_all_ranks(under_the_engine, spec, plan)):
        assert differing(found, expected[rank], is_exact=plan.is_exact) == []
