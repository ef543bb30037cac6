"""What ranks expect of the next round, by what came before. Integers only: units 0 to 3, with room for one ahead."""

from collections.abc import Mapping, Sequence

import pytest

from lightning_zero.run import plan_cache
from lightning_zero.run.plan import END, NEXT_BACKWARD, Plan, Residents, make_plan
from lightning_zero.run.plan_cache import NOTHING, Past, PlanCache

GROUPS, PATTERN = 1, 7
FORWARD_BACKWARD = [0, 1, 2, 3, 3, 2, 1, 0, END]
EVALUATION = [0, 1, 2, 3]
# Ranks that meet for a micro-batch do so where the backward of the next one begins.
UP_TO_BACKWARD, FROM_BACKWARD = [*FORWARD_BACKWARD, 0, 1, 2, 3], [3, 2, 1, 0, END]


def plan_of(uses: list[int], complete: Mapping[int, int]) -> Plan:
    return make_plan(uses, range(4), Residents(2), complete, late=False)


def done(uses: Sequence[int], *, failed: bool = False) -> Past:
    """A round with these uses, in which the gradients of a backward are complete at its end."""
    past = Past(begins=(uses[0], END in uses), has_failed=failed) if uses else Past(has_failed=failed)
    for at, use in enumerate(uses):
        if use == END:
            past.note_complete(at, GROUPS)
            past.ended[at] = PATTERN
        past.note(use)
    return past


def learn(plans: PlanCache, *rounds: Sequence[int], agree: bool = True, continues: bool = False) -> None:
    for uses in rounds:
        plans.learn(done(uses), GROUPS, PATTERN, agree=agree, continues=continues)


def expected_uses(plans: PlanCache) -> list[int] | None:
    plan = plans.expected.plan
    return None if plan is None else [step.use for step in plan]


def test_nothing_is_expected_before_a_round_has_come_twice() -> None:
    plans = PlanCache(plan_of)
    assert plans.expected == NOTHING
    learn(plans, FORWARD_BACKWARD)
    assert plans.expected == NOTHING
    learn(plans, FORWARD_BACKWARD)
    assert expected_uses(plans) == FORWARD_BACKWARD


def test_a_plan_ends_where_ranks_ask_each_other_before_they_reduce() -> None:
    """They leave it there, and would take part in the rest of it in vain. Where they have asked is known of each."""
    plans, rounds = PlanCache(plan_of), []
    for asked in (1, 1, 0):
        past = Past(begins=(0, True))
        for at, use in enumerate([0, 1]):
            if at == asked:
                past.note_asked()
            past.note(use)
        past.note_asked()  # before the next reductions
        plans.learn(past, GROUPS, PATTERN, agree=True, continues=False)
        rounds.append((past.digest, past.counts))
    assert expected_uses(plans) == [0]
    assert rounds[0] == rounds[1] != rounds[2]


def test_a_step_is_expected_after_an_evaluation_and_an_evaluation_after_a_step_where_they_took_turns() -> None:
    plans = PlanCache(plan_of)
    learn(plans, *[FORWARD_BACKWARD, EVALUATION] * 2, FORWARD_BACKWARD)
    assert expected_uses(plans) == EVALUATION
    learn(plans, EVALUATION)
    assert expected_uses(plans) == FORWARD_BACKWARD


def test_a_round_that_begins_as_an_earlier_one_is_known_by_its_first_use() -> None:
    plans = PlanCache(plan_of)
    learn(plans, FORWARD_BACKWARD)
    known = plans.beginning(0, enabled=True).plan
    assert known is not None
    assert [step.use for step in known] == FORWARD_BACKWARD
    assert plans.beginning(0, enabled=False) == plans.beginning(1, enabled=True) == NOTHING


def test_a_round_that_ends_while_a_rank_waits_for_its_first_use_is_no_plan_for_another_that_begins_so() -> None:
    plans = PlanCache(plan_of)
    plans.learn(Past(begins=(4, True)), GROUPS, PATTERN, agree=True, continues=False)
    assert plans.beginning(4, enabled=True) == NOTHING


@pytest.mark.parametrize("odd", ["ranks have not agreed", "its backward has failed"])
def test_a_round_is_not_learnt_if(odd: str) -> None:
    plans = PlanCache(plan_of)
    for _ in range(3):
        past = done(FORWARD_BACKWARD, failed=odd == "its backward has failed")
        plans.learn(past, GROUPS, PATTERN, agree=odd != "ranks have not agreed", continues=False)
    assert plans.expected == plans.beginning(0, enabled=True) == NOTHING


def test_micro_batches_that_were_alike_are_expected_as_one_round_with_the_gradients_that_it_goes_by() -> None:
    plans = PlanCache(plan_of)
    for _ in range(2):
        learn(plans, UP_TO_BACKWARD, continues=True)
        learn(plans, FROM_BACKWARD)
    assert expected_uses(plans) == [*UP_TO_BACKWARD, NEXT_BACKWARD, *FROM_BACKWARD]
    assert plans.expected.patterns == {len(FORWARD_BACKWARD) - 1: PATTERN}


def test_micro_batches_in_which_ranks_did_not_agree_stay_rounds_of_their_own() -> None:
    plans = PlanCache(plan_of)
    for _ in range(3):
        learn(plans, UP_TO_BACKWARD, continues=True)
        learn(plans, FROM_BACKWARD, agree=False)
    assert expected_uses(plans) == UP_TO_BACKWARD


def test_plans_are_few_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_LONGEST", 6)
    monkeypatch.setattr(plan_cache, "_MOST_PLANS", 2)
    plans = PlanCache(plan_of)
    learn(plans, [0, 1], [1, 2], [2, 3], [3, 2, 1, 0, 1, 2, 3])
    known = [plans.beginning(number, enabled=False).plan is not None for number in range(4)]
    assert known == [False, True, True, False]


def test_after_groups_were_counted_anew_no_plan_is_left_and_new_ones_are_made() -> None:
    plans = PlanCache(plan_of)
    learn(plans, FORWARD_BACKWARD, FORWARD_BACKWARD)
    plans.clear()
    assert plans.expected == NOTHING
    learn(plans, FORWARD_BACKWARD)
    assert expected_uses(plans) == FORWARD_BACKWARD


def test_a_closed_cache_makes_no_plans() -> None:
    plans = PlanCache(plan_of)
    learn(plans, FORWARD_BACKWARD, FORWARD_BACKWARD)
    plans.close()
    learn(plans, FORWARD_BACKWARD)
    assert plans.expected == NOTHING
