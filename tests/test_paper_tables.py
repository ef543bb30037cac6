"""The tables of the ZeRO paper come out of rehearsals of the engine: its memory, its largest models, its volumes.

Their model is a stack of Linears without biases, because the paper counts Psi parameters that are all alike: each rests
in two bytes, with a master. A real GPT has some that autocast reads in fp32, which rest in four bytes and have no
master, and small tensors, which are padded; the last test says how much that is.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))

import paper  # noqa: E402
from lightning_zero.tiers.ledger import Category  # noqa: E402

BILLION = 10**9
# Beside those of 7.5B. The others are in proportion to those, which these show.
REHEARSED = {("128B", 1, 1024), ("128B", 2, 1024), ("128B", 3, 64), ("1T", 3, 1024)}
CELLS = [(model, stage, ranks) for model in paper.MODELS for stage in (1, 2, 3) for ranks in paper.TABLE_1]


@pytest.mark.parametrize(("model", "stage", "ranks"), CELLS)
def test_table_1_comes_out_in_every_digit(model: str, stage: int, ranks: int) -> None:
    """The paper rounds the column of 7.5B, and truncates the others: 4187.5 GB are printed as 4187."""
    printed = paper.TABLE_1[ranks][model][stage - 1]
    rehearses = model == "7.5B" or (model, stage, ranks) in REHEARSED
    nbytes = paper.cell(model, stage, ranks, rehearses=rehearses)
    assert paper.as_printed(nbytes, printed, truncates=model != "7.5B") == printed


@pytest.mark.parametrize("model", ["128B", "1T"])
def test_states_are_in_proportion_to_parameters(model: str) -> None:
    """But for padding: of each tensor up to 64 bytes for each rank."""
    for name, stage, ranks in REHEARSED:
        if name == model:
            found, expected = (paper.cell(model, stage, ranks, rehearses=told) for told in (True, False))
            assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_are_those_of_the_paper_to_the_byte_but_for_the_counters_of_steps(stage: int) -> None:
    """2 + 2 + 12 bytes per parameter; nothing is padded on 4 ranks."""
    found, ranks = paper.stack_of(paper.MODELS["7.5B"], stage, 4), 4
    divided = [ranks if stage >= least else 1 for least in (3, 2, 1, 1)]
    names = [Category.PARAMETER, Category.GRADIENT, Category.MASTER, Category.OPTIMIZER_STATE]
    tensors = 5
    counters = [0, 0, 0, 4 * tensors]
    for name, each, by, more in zip(names, (2, 2, 4, 8), divided, counters, strict=True):
        assert found.at_rest[name] == each * found.numel // by + more, name


def test_figure_1_comes_out() -> None:
    for stage, printed in enumerate(paper.FIGURE_1):
        nbytes = paper.total(paper.stack_of(paper.MODELS["7.5B"], stage, 64))
        assert paper.as_printed(nbytes, printed, truncates=False) == printed


@pytest.mark.parametrize("tensor_ranks", paper.TABLE_2)
def test_table_2_comes_out_to_one_of_its_last_digit(tensor_ranks: int) -> None:
    """The paper truncates the first row, and multiplies it: 122.3B parameters are printed as 121.6B."""
    for stage, printed in enumerate(paper.TABLE_2[tensor_ranks]):
        told, first = paper.Size.of(printed), paper.Size.of(paper.TABLE_2[1][stage])
        ours = paper.largest(stage) * tensor_ranks
        assert abs(ours - told.numel) <= max(told.digit, first.digit * tensor_ranks)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_table_2_says_fits_into_32_gb_and_a_little_more_does_not(stage: int) -> None:
    """At stage 3 it is 128B parameters, which take 32 GB in Table 1 too."""
    told = int(paper.Size.of(paper.TABLE_2[1][stage]).numel)
    more = told + BILLION // 10
    ours = [paper.total(paper.stack_of(numel, stage, paper.DATA_RANKS)) for numel in (told, more)]
    slack = 1e-6  # the 2B of stage 0 take all of it, beside padding and the counters of steps
    assert ours[0] <= paper.DEVICE_BYTES * (1 + slack) < ours[1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_parameter_costs_2_2_2_and_3_elements_on_the_wire(stage: int) -> None:
    """Section 7. At stage 3 three layers are gathered once: the two that forward has used last are still there in
    backward, and nothing wants the first one there."""
    once = 3 if stage == 3 else 0
    for depth in (6, 7):
        assert paper.sent(stage, depth) == (paper.VOLUMES[stage] * depth - once) * paper.LAYER


@pytest.mark.parametrize(("stage", "most"), [(1, 0.0005), (2, 0.001), (3, 0.001)])
def test_a_gpt_holds_the_same_but_for_what_rests_in_fp32(stage: int, most: float) -> None:
    found, stack = paper.gpt_of(8192, 9, stage, 64), paper.stack_of(paper.MODELS["7.5B"], stage, 64)
    ratio = (paper.total(found) / found.numel) / (paper.total(stack) / stack.numel)
    assert 0 < abs(ratio - 1) < most
