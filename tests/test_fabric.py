"""`Fabric(strategy=ZeroStrategy(...))` beside Fabric's own strategies, on real processes."""

from pathlib import Path
from typing import Any

import pytest

import fabric_jobs
from compare import assert_same_bits
from ranks import RankPool

STAGES = [1, 2, 3]
DDP = "ddp_find_unused_parameters_true"


def assert_same_run(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    assert found["val"] == expected["val"]
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert_same_bits(found["weights"], expected["weights"])
    for index, state in expected["state"]["state"].items():
        assert_same_bits(found["state"]["state"][index], state)


@pytest.fixture(scope="module")
def ddp(two_ranks: RankPool) -> Any:
    """DDP's runs on two ranks, each made once."""
    made: dict[str, Any] = {}

    def get(**kwargs: Any) -> Any:
        key = repr(sorted(kwargs.items()))
        if key not in made:
            made[key] = two_ranks.run(fabric_jobs.train, DDP, 2, **kwargs)
        return made[key]

    return get


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("stage", [0, *STAGES])
def test_two_ranks_equal_fabrics_ddp_bit_for_bit(stage: int, precision: str, two_ranks: RankPool, ddp: Any) -> None:
    kwargs = {"precision": precision, "clip": "value"}
    found = two_ranks.run(fabric_jobs.train, {"stage": stage}, 2, **kwargs)
    for mine, theirs in zip(found, ddp(**kwargs), strict=True):
        assert_same_run(mine, theirs)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_by_norm_and_accumulation_equal_fabrics_ddp(stage: int, two_ranks: RankPool, ddp: Any) -> None:
    for kwargs in ({"clip": "norm"}, {"clip": "none", "accumulate": 3}):
        found = two_ranks.run(fabric_jobs.train, {"stage": stage, "accumulation": "local"}, 2, **kwargs)
        for mine, theirs in zip(found, ddp(**kwargs), strict=True):
            if kwargs["clip"] == "norm":
                assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-6)
                assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
            else:
                assert_same_run(mine, theirs)


@pytest.mark.parametrize("how", ["apart", "optimizer first", "evaluated before"])
def test_module_and_optimizer_are_set_up_in_any_order(how: str, two_ranks: RankPool, ddp: Any) -> None:
    found = two_ranks.run(fabric_jobs.train, {"stage": 3}, 2, how, clip="value")
    for mine, theirs in zip(found, ddp(precision="32-true", clip="value"), strict=True):
        assert_same_run(mine, theirs)


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_equals_a_single_device(stage: int, pool_of: Any) -> None:
    one = pool_of(1)
    (found,) = one.run(fabric_jobs.train, {"stage": stage}, 1, clip="value")
    (expected,) = one.run(fabric_jobs.train, "auto", 1, clip="value")
    assert_same_run(found, expected)


def test_a_checkpoint_goes_on_at_any_stage_on_any_number_of_ranks(
    two_ranks: RankPool, pool_of: Any, tmp_path: Path
) -> None:
    expected = two_ranks.run(fabric_jobs.save_and_go_on, {"stage": 3}, 2, tmp_path / "saved")[0]
    assert (tmp_path / "saved").is_dir()
    for stage, how in ((3, "load"), (1, "load"), (2, "by hand")):
        found = two_ranks.run(fabric_jobs.load_and_go_on, {"stage": stage}, 2, tmp_path / "saved", how)[0]
        assert (found["epoch"], found["others"]) == (3, ["state_dict"])
        assert_same_bits(found["weights"], expected["weights"])
    theirs = two_ranks.run(fabric_jobs.load_and_go_on, DDP, 2, tmp_path / "saved")[0]
    assert_same_bits(theirs["weights"], expected["weights"])
    (alone,) = pool_of(1).run(fabric_jobs.load_and_go_on, {"stage": 2}, 1, tmp_path / "saved")
    assert alone["epoch"] == 3
