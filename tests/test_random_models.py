"""Random models under random plans give DDP's numbers (decision 3 of the design): every loss, gradient and weight.

A campaign: RANDOM_MODELS=5000 pytest --timeout=0 tests/test_random_models.py. Otherwise the same few examples, always.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from torch import Tensor

from random_models import Part, Spec
from random_plans import Plan, Ways, cases
from random_runs import differing, on_all_ranks, on_ranks_that_share, under_ddp, under_the_engine
from ranks import RankPool

CAMPAIGN = int(os.environ.get("RANDOM_MODELS", 0))


def compare(plan: Plan, found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for rank, of_rank in enumerate(found):
        assert differing(of_rank, expected[rank // plan.tensor], is_exact=plan.is_exact) == []


def examples(number: int) -> Callable[..., Any]:
    return settings(
        max_examples=CAMPAIGN or number,
        derandomize=not CAMPAIGN,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@examples(30)
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
    compare(plan, on_all_ranks(under_the_engine, spec, plan), on_all_ranks(under_ddp, spec, plan))


@examples(3)
@given(case=cases(tensor=2))
def test_a_random_model_whose_layers_ranks_share_trains_as_under_ddp(
    case: tuple[Plan, Spec], pool_of: Callable[[int], RankPool]
) -> None:
    plan, spec = case
    found = pool_of(plan.world * plan.tensor).run(on_ranks_that_share, spec, plan)
    compare(plan, found, on_all_ranks(under_ddp, spec, plan))
