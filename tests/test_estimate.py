"""What `lightning-zero plan` counts is what an engine holds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.config import Offload
from lightning_zero.run.average import room_for_average
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.estimate import PRECISIONS, states_of, states_under_ddp
from lightning_zero.run.forecast import forecast
from lightning_zero.shards.offload import Machine
from lightning_zero.tiers.ledger import Category
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import CountingComm, LocalComm

CASTS = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
OFFLOADS = [None, {"optimizer": "cpu"}, {"optimizer": "nvme"}, {"optimizer": "cpu", "state_dtype": "bf16"}]
AT_STAGE_3 = [{"parameters": "cpu"}, {"optimizer": "cpu", "parameters": "cpu"}]
AT_STAGE_3 += [{"optimizer": "nvme", "parameters": "cpu"}, {"optimizer": "cpu", "fraction": 0.5}]
AT_STAGE_3 += [{"optimizer": "cpu", "fraction": 0.5, "state_dtype": "bf16"}]


def counted(stage: int, ranks: int, precision: str, offload: Offload | None, averages: int = 0, **options: Any) -> Any:
    """What an engine of that many ranks says of itself, and of ddp; of two matrices that divide evenly."""
    comm: Comm = CountingComm(0, ranks) if ranks > 1 else LocalComm()
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).to(DTYPES.get(precision))
    optimizer = torch.optim.AdamW(module.parameters())
    machine = Machine(host_is_apart=True)
    given = Options(autocast_dtype=CASTS.get(precision), offload=offload, machine=machine, **options)
    engine = Engine(module, [optimizer], stage=stage, comm=comm, options=given)
    found = forecast(engine, [optimizer], averages * [room_for_average(engine)])
    engine.close(whole=False)
    besides = (Category.BUCKET, Category.GATHERED)
    here = {name: nbytes for name, nbytes in found.here.items() if nbytes and name.split(" (")[0] not in besides}
    return found.numel, here, found.ddp


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 8])
def test_it_counts_what_an_engine_holds(ranks: int, stage: int, precision: str, tmp_path: Path) -> None:
    for averages, given in enumerate([*OFFLOADS, *(AT_STAGE_3 if stage == 3 else [])]):
        path = {"path": tmp_path} if given and "nvme" in given.values() else {}
        offload = Offload(**given, **path) if given else None
        setting = {"precision": precision, "averages": averages}
        numel, here, ddp = counted(stage, ranks, offload=offload, **setting)
        assert states_of(numel, stage=stage, ranks=ranks, offload=offload, **setting) == here, given
        assert states_under_ddp(numel, **setting) == ddp


def test_replicas_divide_nothing_between_them() -> None:
    numel, here, _ = counted(3, 8, "bf16-mixed", None, replicate_size=2)
    assert states_of(numel, stage=3, ranks=8, precision="bf16-mixed", replicate_size=2) == here
    with pytest.raises(ValueError, match="8 ranks cannot be divided into 3 replicas"):
        states_of(numel, stage=3, ranks=8, replicate_size=3)


def test_ranks_have_room_for_what_does_not_divide_evenly() -> None:
    assert states_of(10, stage=3, ranks=3)[Category.PARAMETER] == 4 * 4


@pytest.mark.parametrize(("stage", "per_parameter"), [(1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)])
def test_the_papers_figure_1_comes_out_but_for_gradients_in_fp32(stage: int, per_parameter: float) -> None:
    """7.5B parameters on 64 ranks (section 5): 31.4, 16.6, 1.9 GB with gradients of two bytes; here they have four."""
    psi = 7_500_000_000
    found = sum(states_of(psi, stage=stage, ranks=64, precision="bf16-mixed").values())
    assert found - 2 * psi / (64 if stage > 1 else 1) == pytest.approx(psi * per_parameter, rel=1e-6)


def test_parameters_are_offloaded_at_stage_3_alone() -> None:
    with pytest.raises(ValueError, match="offload them at stage 3"):
        states_of(100, stage=2, ranks=2, offload=Offload(parameters="cpu"))
