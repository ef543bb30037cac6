"""A random training under an engine and under what DDP does, on ranks that are threads or processes."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_zero.run.engine import Engine
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from random_ddp import Ddp
from random_models import Mlp, Model, Routed, Spec, build
from random_plans import Plan
from random_training import Training
from tensor_jobs import mesh_of, start, whole


def values_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole(value.detach()).clone() for name, value in state.items()}


def under_ddp(model: Model, plan: Plan, comm: Comm) -> dict[str, Tensor]:
    optimizers = plan.make_optimizers(model)
    ddp = Ddp(model, optimizers, plan, comm)
    seen = Training(model, ddp, optimizers, plan, comm.rank).take_all_steps()
    return values_of(seen | ddp.full_model())


def under_the_engine(model: Model, plan: Plan, comm: Comm) -> dict[str, Tensor]:
    optimizers = plan.make_optimizers(model)
    with TemporaryDirectory() if "nvme" in plan.ways.offload else nullcontext("") as folder:
        engine = Engine(model, optimizers, stage=plan.stage, comm=comm, options=plan.options(model, Path(folder)))
        seen = Training(model, engine, optimizers, plan, comm.rank // plan.tensor).take_all_steps()
        engine.loans.end_all()
        weights = values_of(engine.states.full_model())
        engine.close()
    assert differing(values_of(model.state_dict()), weights, is_exact=True) == []
    return values_of(seen) | weights


def on_all_ranks(job: Callable[[Model, Plan, Comm], Any], spec: Spec, plan: Plan) -> list[dict[str, Tensor]]:
    """Threads. Ranks start from different values, which the first one's must replace."""
    models = [build(spec, seed) for seed in range(plan.world)]
    if plan.world == 1:
        return [job(models[0], plan, LocalComm())]
    return plan.thread_world().run(lambda comm: job(models[comm.rank], plan, comm))


def on_ranks_that_share(spec: Spec, plan: Plan) -> dict[str, Tensor]:
    """On each of several processes: torch's DTensor needs process groups. They share what divides evenly."""
    comm, mesh = start(), mesh_of(plan.tensor)["tensor_parallel"]
    model = build(spec, comm.rank // plan.tensor)
    for module in [*model.modules()]:
        inner = module.up.out_features if isinstance(module, Mlp | Routed) else 0
        if not inner or inner % plan.tensor:
            continue
        if isinstance(module, Mlp):
            parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            parallelize_module(module, mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
    return under_the_engine(model, plan, comm)


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
