"""Every two features that go together are in one of these runs, each beside its reference on real ranks."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pair_jobs
import pairs
from compare import differing
from ranks import RankPool

ROOT = Path(__file__).parent.parent
CASES = pairs.cases()


def assert_alike(found: dict[str, Any], expected: dict[str, Any], case: pairs.Case) -> None:
    """To the bit where the docs promise bits, and else to their rounding: 1e-6 in four bytes. In two, losses keep 8
    bits, and weights a sixteenth of a step."""
    if case.is_exact:
        assert found["losses"] == expected["losses"]
        assert found["evaluated"] == expected["evaluated"]
        assert differing(found["weights"], expected["weights"]) == []
        return
    relative, absolute = (1e-6, 1e-6) if case.precision == "32-true" else (2 * 2.0**-8, pair_jobs.LR / 16)
    for part in ("losses", "evaluated"):
        assert found[part] == pytest.approx(expected[part], rel=relative)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=relative, atol=absolute, msg=name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_features_that_meet_train_as_the_reference(
    case: pairs.Case, pool_of: Callable[[int], RankPool], tmp_path: Path
) -> None:
    for leg in pair_jobs.legs_of(case):
        expected = pool_of(leg.data).run(
            pair_jobs.train, case, pair_jobs.Leg(leg.epochs, leg.data), tmp_path, is_ours=False
        )
        found = pool_of(leg.world).run(pair_jobs.train, case, leg, tmp_path, is_ours=True)
        for rank, mine in enumerate(found):
            assert_alike(mine, expected[rank // leg.tensor], case)


# -- docs/pairs.md

PAGE = ROOT / "docs" / "pairs.md"


def cell_of(one: str, other: str) -> str:
    """What the table has for two features: whether a run has any of the one with any of the other, and why not all."""
    together = [
        (first, second) for first, second in itertools.product(pairs.NAMED[one], pairs.NAMED[other]) if first != second
    ]
    marks = set().union(*(pairs.marks_of(*pair) for pair in together))
    runs = any(not pairs.clash(*pair) for pair in together)
    return " ".join([*(["●"] if runs else []), *sorted(marks)])


def table() -> str:
    names = list(pairs.NAMED)
    lines = ["| | | " + " | ".join(str(number) for number in range(1, len(names))) + " |"]
    lines.append("|---|---|" + "---|" * (len(names) - 1))
    for row, name in enumerate(names):
        cells = [cell_of(names[column], name) if column < row else "" for column in range(len(names) - 1)]
        lines.append(f"| {row + 1} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_every_two_features_are_in_one_run_or_clash() -> None:
    met = set().union(*(case.pairs for case in CASES))
    for one, other in itertools.combinations(pairs.FEATURES, 2):
        if one.name != other.name or pairs.clash(one, other):
            assert (frozenset([one, other]) in met) != pairs.clash(one, other), (one, other)


def test_every_feature_is_in_a_run_of_each_stage_that_can_have_it() -> None:
    for feature, stage in itertools.product(pairs.FEATURES, pairs.AXES["stage"]):
        if feature.name != "stage":
            meets = any(case.stage == stage and feature in case.used for case in CASES)
            assert meets != pairs.clash(feature, pairs.Feature("stage", stage)), (feature, stage)


def test_the_table_is_of_these_runs() -> None:
    assert table() in PAGE.read_text(), f"write in {PAGE}:\n{table()}"


def test_the_page_says_of_every_mark_what_holds_it_and_names_tests_that_are_there() -> None:
    page = PAGE.read_text()
    marks = {clash.mark for clash in pairs.CLASHES if clash.mark}
    assert set(re.findall(r"^- \*\*(\w)\*\*: .*\.$", page.replace("\n  ", " "), re.MULTILINE)) == marks
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(named) > 40
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), f"{file}::{name}"
    for one, other in re.findall(r"^\| (\d+) \S (\d+) \|", page, re.MULTILINE):
        assert 1 <= int(one) < int(other) <= len(pairs.NAMED)
