"""Random models under random plans give DDP's numbers (decision 3 of the design): every loss, gradient and weight.

A campaign: RANDOM_MODELS=5000 pytest --timeout=0 tests/test_random_models.py. Otherwise the same few examples, always.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from torch import Tensor

from lightning_zero.run.engine import Engine
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from random_ddp import Ddp
from random_models import Model, Part, Spec, build
from random_plans import Plan, Ways, cases
from random_training import Training

CAMPAIGN = int(os.environ.get("RANDOM_MODELS", 0))


def values_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def under_ddp(model: Model, plan: Plan, comm: Comm) -> dict[str, Tensor]:
    optimizers = plan.make_optimizers(model)
    ddp = Ddp(model, optimizers, plan, comm)
    seen = Training(model, ddp, optimizers, plan, comm.rank).take_all_steps()
    return seen | values_of(ddp.full_model())


def under_the_engine(model: Model, plan: Plan, comm: Comm) -> dict[str, Tensor]:
    optimizers = plan.make_optimizers(model)
    with TemporaryDirectory() if "nvme" in plan.ways.offload else nullcontext("") as folder:
        engine = Engine(model, optimizers, stage=plan.stage, comm=comm, options=plan.options(model, Path(folder)))
        seen = Training(model, engine, optimizers, plan, comm.rank).take_all_steps()
        engine.loans.settle()
        weights = engine.states.full_model()
        engine.close()
    assert differing(values_of(model.state_dict()), weights, is_exact=True) == []
    return seen | values_of(weights)


def on_all_ranks(job: Callable[[Model, Plan, Comm], Any], spec: Spec, plan: Plan) -> list[dict[str, Tensor]]:
    """Ranks start from different values, which the first one's must replace."""
    models = [build(spec, seed) for seed in range(plan.world)]
    if plan.world == 1:
        return [job(models[0], plan, LocalComm())]
    return plan.thread_world().run(lambda comm: job(models[comm.rank], plan, comm))


def differing(found: dict[str, Tensor], expected: dict[str, Tensor], *, is_exact: bool) -> list[str]:
    """The names of what is not equal; to 1e-6 where not every bit has to be (gradients, taken at weights that differ
    by that much already, to 1e-5)."""
    assert found.keys() == expected.keys()
    dtypes = [(name, value.dtype, expected[name].dtype) for name, value in found.items()]
    assert [one for one in dtypes if one[1] != one[2]] == []

    def equal(name: str) -> bool:
        tolerance = 0 if is_exact else 1e-5 if name.startswith("gradient") else 1e-6
        return torch.allclose(found[name], expected[name], rtol=tolerance, atol=tolerance, equal_nan=True)

    return [name for name in expected if not equal(name)]


@settings(
    max_examples=CAMPAIGN or 100,
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
            ways=Ways(offload=("nvme", None, 1.0)),
        ),
        Spec(2, ()),
    )
)
@example(
    (Plan(autocast=torch.bfloat16, evaluates=True), Spec(1, (Part("linear"), Part("borrowed", used="ranks in turn"))))
)
@example(
    (
        Plan(stage=1, ways=Ways(bucket_bytes=64), autocast=torch.bfloat16),
        Spec(1, (Part("layer norm", used="even ranks"),)),
    )
)
@example((Plan(stage=3, data_edit=("in place", 3)), Spec(3, (Part("linear", used="ranks in turn"),))))
@example(
    (
        Plan(stage=3, ways=Ways(units=("Chain",)), evaluates=True),
        Spec(1, (Part("residual", children=(Part("borrowed", used="ranks in turn"),), used="even ranks"),)),
    )
)
@example(
    (
        Plan(stage=3, autocast=torch.bfloat16, data_edit=("assigned", 3)),
        Spec(1, (Part("routed", checkpointed=True, used="even ranks"), Part("linear"))),
    )
)
@example(
    (
        Plan(stage=3, ways=Ways(units=("Chain",)), autocast=torch.bfloat16),
        Spec(1, (Part("chain", children=(Part("running"),), used="odd passes"), Part("linear"))),
    )
)
def test_a_random_model_trains_as_under_ddp(case: tuple[Plan, Spec]) -> None:
    plan, spec = case
    expected = on_all_ranks(under_ddp, spec, plan)
    for rank, found in enumerate(on_all_ranks(under_the_engine, spec, plan)):
        assert differing(found, expected[rank], is_exact=plan.is_exact) == []
