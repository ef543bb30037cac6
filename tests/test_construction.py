"""Models that are built in shards: the values of one device, and never more than a unit of them whole."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import construction_jobs as jobs
import random_models
from compare import assert_same_bits
from ranks import AT_ONCE, RankPool, run_alone


def assert_as_on_one_device(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["differing"] == []
        assert rank["facts"] == []
        assert rank["draws alike"]


@pytest.mark.parametrize("name", jobs.ZOO)
def test_a_model_is_initialised_as_on_one_device(name: str, two_ranks: RankPool) -> None:
    assert_as_on_one_device(two_ranks.run(jobs.built, name))


@pytest.mark.parametrize("name", [*jobs.EDITS, "t5", "recurrent"])
def test_r56_initialisation_that_users_write_is_kept_to_the_bit_on_three_ranks(
    name: str, pool_of: Callable[[int], RankPool]
) -> None:
    """`nn.init`, `p.data.normal_()`, `apply(fn)`, edits after construction, ties, copies, parametrisations."""
    found = pool_of(3).run(jobs.built, name)
    assert_as_on_one_device(found)
    assert all(rank["cut"] >= rank["of"] // 3 for rank in found)  # or the test would say little


@settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
@given(spec=random_models.specs([torch.float32, torch.bfloat16, torch.float64]))
def test_random_models_are_initialised_as_on_one_device(spec: Any, two_ranks: RankPool) -> None:
    assert_as_on_one_device(two_ranks.run(jobs.built_at_random, spec))


@pytest.mark.parametrize(
    "name",
    [
        "assorted",
        "applied",
        "through data",
        "arithmetic",
        "assigned storage",
        "assigned data",
        "buffers",
        "t5",
        "Parametrised",
    ],
)
def test_of_ranks_with_other_seeds_rank_0s_values_count(name: str, two_ranks: RankPool) -> None:
    assert_as_on_one_device(two_ranks.run(jobs.built_with_other_seeds, name))


def test_of_replicas_with_other_seeds_rank_0s_values_count(pool_of: Callable[[int], RankPool]) -> None:
    assert_as_on_one_device(pool_of(4).run(jobs.built_with_other_seeds, "applied", replicate_size=2))


def test_parameters_may_be_used_in_odd_ways(two_ranks: RankPool) -> None:
    for found in two_ranks.run(jobs.used_in_odd_ways):
        assert found == {"strides": ((1, 11), False), "pickled": "a label"}


def test_what_has_no_values_counts_for_nothing_among_what_is_whole(two_ranks: RankPool) -> None:
    assert min(two_ranks.run(jobs.cut_beside_one_without_values)) >= 4  # of six


def test_all_but_what_somebody_looks_at_rests_as_rows_at_the_end(two_ranks: RankPool) -> None:
    for name in ("assorted", "copies", "bert", "t5"):
        found = two_ranks.run(jobs.booked_bytes, name)
        for rank in found:
            assert rank["whole"] == 0
            assert rank["gathered"] == 0
        assert sum(rank["parameter"] for rank in found) == found[0]["model"]
        assert max(rank["parameter"] for rank in found) < 0.55 * found[0]["model"]  # uneven by an element of each


def test_what_is_dropped_while_a_model_is_built_takes_no_memory(two_ranks: RankPool) -> None:
    for rank in two_ranks.run(jobs.dropped_bytes):
        assert rank["rows"] <= 0.6 * rank["model"]


@pytest.mark.parametrize(("use", "gathers"), [("read", 6), ("assigned", 3), ("together", 0)])
def test_what_was_used_last_and_all_of_one_module_stay_whole(use: str, gathers: int, two_ranks: RankPool) -> None:
    assert two_ranks.run(jobs.gathers_of, use) == [gathers] * 2


# -- memory


@pytest.fixture(scope="module", params=[2, 4])
def fresh_ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Where earlier tests have run, malloc has holes: it fills them before it asks the system, and what it has filled
    and freed again stays resident."""
    pool = RankPool(request.param)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", jobs.WIDE)
def test_r36_a_rank_never_holds_more_than_its_share_and_the_largest_unit(name: str, fresh_ranks: RankPool) -> None:
    """While the model is built and while an engine takes it over; what is resident, with 10 % on top."""
    for rank in fresh_ranks.run(jobs.resident_bytes, name):
        most = 1.1 * (rank["model"] / fresh_ranks.world + rank["unit"])
        assert most < 0.8 * rank["model"]
        assert rank["model"] / fresh_ranks.world < rank["built"] <= most
        assert rank["taken over"] <= most


def test_values_that_were_only_read_are_not_sent_again(two_ranks: RankPool) -> None:
    assert two_ranks.run(jobs.all_to_alls_of_reads) == [0, 0]


@pytest.mark.parametrize("how", jobs.UNREGISTERED)
def test_parameters_that_no_module_has_registered_rest_as_rows_too(how: str, two_ranks: RankPool) -> None:
    for then, at_end in two_ranks.run(jobs.unregistered, how):
        assert len(then) < 7  # of 14
        assert at_end == []


def test_at_the_end_a_parameter_is_plain_if_somebody_holds_its_values(two_ranks: RankPool) -> None:
    for held, rests in two_ranks.run(jobs.class_of_what_is_held):
        assert held == "torch.nn.parameter"
        assert rests != held


def test_a_dtensor_on_a_mesh_of_one_rank_stays_one_until_the_engine_takes_over(two_ranks: RankPool) -> None:
    assert two_ranks.run(jobs.with_dtensors_of_one_rank) == [{"is as made": True, "same": True}] * 2


@pytest.mark.parametrize("what", ["module", "view"])
def test_a_rank_may_hold_and_use_what_the_others_have_dropped(what: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(jobs.hold_on_one_rank, what) == ["", ""]


# -- what goes wrong


@pytest.mark.parametrize("name", jobs.WRONG)
def test_ranks_that_part_end_at_once_in_one_error(name: str, two_ranks: RankPool) -> None:
    found = two_ranks.run(jobs.go_wrong, name)
    for rank in found:
        assert rank["seconds"] < AT_ONCE
        assert rank["again"] == ""
    if name.startswith("fails"):
        assert found[1]["told"] == "ValueError: no such vocabulary"
        assert "could not be built on rank 1: ValueError: no such vocabulary" in found[0]["told"]
        return
    told = {"builds another": "(11, 10)", "builds more": "has built a model, with 10 parameters"}
    for rank in found:
        assert "Ranks build the model in different ways" in rank["told"]
        assert "leave out what depends on the rank" in rank["told"]
        assert told.get(name, "uses Linear.weight (11, 11)") in rank["told"]


def test_a_rank_that_does_not_come_ends_the_others_in_time() -> None:
    results, _ = run_alone(2, jobs.is_late_on_one)
    told, seconds = results[0]
    assert "RankTimeoutError" in told
    assert "The model is being built in shards; this rank has built a model" in told or "this rank makes" in told
    assert seconds < AT_ONCE


def test_what_is_left_on_the_meta_device_is_named(two_ranks: RankPool) -> None:
    for told in two_ranks.run(jobs.left_on_meta):
        names = "0.weight, 0.bias, 1.weight, 1.bias, 1.running_mean and 2 more"
        assert f"{names} are on the meta device" in told
        assert "load_pretrained(path)" in told


# -- where, and when


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2)])
def test_where_the_model_is_whole_anyway_it_is_built_as_ever(
    world: int, stage: int, pool_of: Callable[[int], RankPool]
) -> None:
    assert pool_of(world).run(jobs.classes_at, stage) == [{"torch.nn.parameter"}] * world


def test_no_hook_is_left_behind(two_ranks: RankPool) -> None:
    assert two_ranks.run(jobs.hooks_left) == [0, 0]


def test_before_there_is_an_engine_all_ranks_may_read_and_edit(two_ranks: RankPool) -> None:
    for found in two_ranks.run(jobs.read_between):
        assert found == {"norms": True, "weights": [], "gone": True}


def test_optimizers_are_made_without_values(two_ranks: RankPool) -> None:
    assert two_ranks.run(jobs.calls_of_optimizers) == [0, 0]


def test_a_state_dict_has_whole_values(two_ranks: RankPool) -> None:
    expected = jobs.assorted().state_dict()
    for found in two_ranks.run(jobs.state_in_shards):
        assert_same_bits(found, expected)


# -- under Trainer


def assert_trained_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert_same_bits(mine["weights"], theirs["weights"])


@pytest.mark.parametrize(
    ("stage", "precision"), [(3, "32-true"), (3, "bf16-mixed"), (3, "16-mixed"), (1, "32-true"), (2, "bf16-mixed")]
)
def test_training_equals_that_of_a_model_built_outside(stage: int, precision: str, two_ranks: RankPool) -> None:
    found = two_ranks.run(jobs.fit, jobs.Inside, {"stage": stage}, precision)
    expected = two_ranks.run(jobs.fit, jobs.Outside, {"stage": stage}, precision)
    assert_trained_alike(found, expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["evaluated"] == theirs["evaluated"]
        assert mine["random"].equal(theirs["random"])
        assert (mine["early"] > 10) == (stage == 3)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_model_built_in_another_dtype_trains_as_at_stage_2(precision: str, two_ranks: RankPool) -> None:
    """Lightning has configure_model make parameters in it, where a constructor's are converted."""
    runs = [two_ranks.run(jobs.fit, jobs.Inside, {"stage": stage}, precision) for stage in (3, 2)]
    assert_trained_alike(*runs)


def test_r36_fit_says_that_a_large_model_is_whole_first_where_it_need_not_be(two_ranks: RankPool) -> None:
    told = "GB of the model are whole on every rank first: what configure_model() builds never is"
    for kind, stage, says in ((jobs.Outside, 3, True), (jobs.Inside, 3, False), (jobs.Outside, 2, False)):
        for said in two_ranks.run(jobs.what_fit_says, kind, {"stage": stage}):
            assert f"ZeRO stage {stage} on 2 ranks" in said
            assert (told in said) == says


def test_one_rank_trains_as_ever(pool_of: Callable[[int], RankPool]) -> None:
    runs = [pool_of(1).run(jobs.fit, jobs.Inside, strategy) for strategy in ({"stage": 3}, "auto")]
    assert_trained_alike(*runs)


@pytest.mark.parametrize(
    "strategy",
    [{"offload": {"optimizer": "cpu", "parameters": "cpu"}}, {"replicate_size": 2}, {"units": "auto"}],
    ids=["offload", "replicated", "what stays whole"],
)
def test_it_composes_with(strategy: dict[str, Any], two_ranks: RankPool) -> None:
    runs = [two_ranks.run(jobs.fit, kind, {"stage": 3, **strategy}) for kind in (jobs.Inside, jobs.Outside)]
    assert_trained_alike(*runs)


def test_hybrid_sharding_builds_in_shard_groups(pool_of: Callable[[int], RankPool]) -> None:
    strategy = {"stage": 3, "replicate_size": 2}
    runs = [pool_of(4).run(jobs.fit, kind, strategy) for kind in (jobs.Inside, jobs.Outside)]
    assert_trained_alike(*runs)
    assert all(one["losses"] != other["losses"] for one, other in itertools.pairwise(runs[0]))


def test_a_run_goes_on_in_a_model_built_in_shards(two_ranks: RankPool, tmp_path: Path) -> None:
    found = two_ranks.run(jobs.fit_and_resume, (jobs.Inside, jobs.Outside), {"stage": 3}, tmp_path / "run.ckpt")
    inside, outside = ([rank[number] for rank in found] for number in range(2))
    assert_trained_alike(inside, outside)


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_rank_that_looks_while_a_checkpoint_is_loaded_ends_fit_on_all(when: str, tmp_path: Path) -> None:
    results, errors = run_alone(2, jobs.look_while_loading_on_rank_0, when, tmp_path / "run.ckpt")
    assert errors == [None, None]
    for told in results:
        assert "rank 0 uses Linear.weight" in told
        assert f"rank 1 {'loads' if when == 'before' else 'has loaded'} a state dict into the model" in told
        assert "every rank must run the same code: leave out what depends on the rank" in told


def test_an_exception_in_configure_model_on_one_rank_ends_fit_on_all() -> None:
    results, errors = run_alone(2, jobs.fails_in_configure_model)
    assert errors == [None, None]
    assert "no such vocabulary" in results[0][0]
    assert "no such vocabulary" in results[1][0]
    assert all(seconds < AT_ONCE for _, seconds in results)  # nobody has waited for the other
