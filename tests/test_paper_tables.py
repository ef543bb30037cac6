"""The tables of the ZeRO paper come out of rehearsals of the engine: its memory, its largest models, its volumes.

Their model is a stack of Linears without biases, because the paper counts Psi parameters that are all alike: each rests
in two bytes, with a master. A real GPT has some that autocast reads in fp32, which rest in four bytes and have no
master, and small tensors, which are padded; the last test says how much that is.
"""

import functools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))

import paper  # noqa: E402
import paper_largest  # noqa: E402
from gpt import Block  # noqa: E402
from lightning_zero import ActivationCheckpointing  # noqa: E402
from lightning_zero.rehearsal.memory import Phase  # noqa: E402
from lightning_zero.rehearsal.rehearsal import Rehearsal  # noqa: E402
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


# --- section 6.1 and 8: activation checkpoints that tensor-parallel ranks divide (P_a)

DEPTH = 3
WHOLE, PARTED = (ActivationCheckpointing(modules={Block}, partition=partition) for partition in (False, True))


def scale_of(tensor_ranks: int) -> paper_largest.Scale:
    return paper_largest.Scale(width=256, context=128, batch=4, tensor_ranks=tensor_ranks, data_ranks=2)


@functools.cache
def checkpointed(tensor_ranks: int, *, parted: bool) -> Rehearsal:
    return paper_largest.rehearsed(DEPTH, 1, PARTED if parted else WHOLE, scale_of(tensor_ranks))


def input_of(scale: paper_largest.Scale) -> int:
    """Elements of what a block is given: batch x sequence x hidden size."""
    return scale.batch * scale.context * scale.width


@pytest.mark.parametrize("tensor_ranks", [2, 4])
def test_a_rank_keeps_its_part_of_an_activation_checkpoint_under_p_a(tensor_ranks: int) -> None:
    """Exactly 1/MP. The paper's "33 GB" (100B, section 6.1) are 33.55 billion elements, which take 67 GB."""
    whole, parts = (
        checkpointed(tensor_ranks, parted=parted).peaks[Phase.FORWARD].device[Category.ACTIVATION_CHECKPOINT]
        for parted in (False, True)
    )
    assert whole == DEPTH * input_of(scale_of(tensor_ranks)) * 2
    assert parts * tensor_ranks == whole


class Messages(TorchDispatchMode):
    """Counts elements that DTensor's layers sum over tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.summed: Counter[tuple[int, ...]] = Counter()  # by shape

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.summed[tuple(args[0].shape)] += args[0].numel()
        return func(*args, **(kwargs or {}))


def sums_of_a_block(checkpointing: ActivationCheckpointing | None, scale: paper_largest.Scale) -> int:
    """Returns elements that one more block sums over tensor-parallel ranks, in inputs of blocks."""
    found = []
    for depth in (1, 2):
        with Messages() as messages:
            paper_largest.rehearsed(depth, 1, checkpointing, scale, steps=1)
        found.append(messages.summed.total())
    inputs, rest = divmod(found[1] - found[0], input_of(scale))
    assert not rest
    return inputs


@pytest.mark.parametrize("tensor_ranks", [2, 4])
def test_p_a_sends_one_all_gather_for_each_block_a_twelfth_of_what_the_paper_counts_beside_it(
    tensor_ranks: int,
) -> None:
    """Section 8. An all-reduce sends its message twice. Forward and backward have two each, and recomputation as many
    as forward: twelve messages. Torch ends recomputation when backward has what it needs, before the last all-reduce:
    that makes ten here, of which P_a's is the tenth part, and not less."""
    scale = scale_of(tensor_ranks)
    (calls, nbytes), (more_calls, more) = (
        checkpointed(tensor_ranks, parted=parted).sent["all_gather"] for parted in (False, True)
    )
    assert more_calls - calls == DEPTH
    # Of N parts a rank sends N-1; the paper counts N.
    sent = (more - nbytes) // 2 * tensor_ranks // (tensor_ranks - 1) // DEPTH
    assert sent == input_of(scale)
    plain, recomputing = (sums_of_a_block(checkpointing, scale) for checkpointing in (None, WHOLE))
    assert plain == 4
    forward = plain // 2
    assert 2 * (plain + forward) == 12
    assert recomputing == plain + forward - 1


# --- table 3 and figure 6


def test_the_largest_models_of_c1_to_c5_are_in_the_papers_order() -> None:
    """With 32 GB, on 400 ranks. None is smaller than the paper's, whose devices hold more than is counted here."""
    found = {name: paper_largest.largest_rehearsed(how) for name, how in paper_largest.PAPER.items()}
    order = ["C1", "C3", "C2", "C4", "C5"]
    assert sorted(found, key=lambda name: found[name].billions) == order
    assert sorted(order, key=lambda name: paper_largest.PAPER[name].billions) == order
    assert len({one.depth for one in found.values()}) == len(order)
    for name, one in found.items():
        assert one.billions >= paper_largest.PAPER[name].billions


@pytest.mark.parametrize("name", ["C1", "C4"])
def test_each_block_takes_as_much_as_another(name: str) -> None:
    """What the largest models are found with."""
    how = paper_largest.PAPER[name]
    depths = *paper_largest.DEPTHS, 12
    few, many, more = (paper_largest.configured(how, depth).peak.nbytes for depth in depths)
    assert more - many == pytest.approx(many - few, rel=1e-3)
