"""Published packages, unchanged, beside DDP on two real ranks: `make test-clients`, which installs them, and not
`make test`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import client_jobs
import darts_jobs
import gluonts_jobs
import lightly_jobs
import litgpt_jobs
import tabular_jobs
from compare import assert_same_bits
from lightning_zero.shards.units import RESIDENT_BYTES
from ranks import RankFailed, RankPool

DDP = "ddp_find_unused_parameters_true"
STAGES = [1, 2, 3]


def assert_as_ddp(ranks: RankPool, folder: Path, job: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Losses of every step and rank, weights after fit and after a resume, and what a loaded checkpoint predicts."""
    expected = ranks.run(job, DDP, folder / "ddp", *args)
    assert all(of_rank["steps"] >= 9 for of_rank in expected)
    for stage in STAGES:
        found = ranks.run(job, {"stage": stage, **options}, folder / str(stage), *args)
        for mine, theirs in zip(found, expected, strict=True):
            tensors = {name: value for name, value in theirs.items() if isinstance(value, dict)}
            for name in tensors:
                assert_same_bits(mine.pop(name), tensors[name])
            assert_same_bits(mine, {name: theirs[name] for name in theirs.keys() - tensors.keys()})


@pytest.mark.parametrize("checkpoint", ["sharded", "full"])
def test_chemprop_trains_resumes_and_loads_as_under_ddp(checkpoint: str, two_ranks: RankPool, tmp_path: Path) -> None:
    """A sharded checkpoint is consolidated first, as chemprop opens one file."""
    assert_as_ddp(two_ranks, tmp_path, client_jobs.fit_chemprop, checkpoint=checkpoint)


@pytest.mark.parametrize("name", ["DeepAR", "TemporalFusionTransformer"])
def test_pytorch_forecasting_trains_resumes_and_loads_as_under_ddp(
    name: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    assert_as_ddp(two_ranks, tmp_path, client_jobs.fit_forecaster, name)


# -- with models that are large enough to be in shards at stage 3, as their users' are, and with the defaults of users

LOCAL = [{"stage": stage, "accumulation": "local"} for stage in STAGES]  # adds up micro-batches as ddp does
BY_NAME = [f"zero_stage_{stage}" for stage in STAGES]
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


def stages_beside_ddp(
    ranks: RankPool, folder: Path, job: Callable[..., Any], *args: Any, strategies: list[Any], ddp: Any = "ddp"
) -> tuple[list[Any], list[list[Any]]]:
    """What `ddp` gives, which gives it twice, and what each stage gives, which had parameters in shards at stage 3."""
    expected, again = (ranks.run(job, ddp, folder / name, *args) for name in ("ddp", "again"))
    for mine, theirs in zip(again, expected, strict=True):
        assert_same(mine, theirs)
    found = [ranks.run(job, each, folder / str(stage), *args) for stage, each in zip(STAGES, strategies, strict=True)]
    assert all(of_rank.pop("in shards") == 0 for of_rank in expected)
    held = [{of_rank.pop("in shards") for of_rank in of_stage} for of_stage in found]
    assert held[:2] == [{0}, {0}]
    assert min(held[2]) > RESIDENT_BYTES
    return expected, found


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """To the bit: numbers and arrays, and each dictionary of tensors."""
    tensors = {name for name, value in theirs.items() if isinstance(value, dict)}
    for name in tensors:
        assert_same_bits(mine[name], theirs[name])
    assert_same_bits(*({name: of[name] for name in of.keys() - tensors} for of in (mine, theirs)))


def assert_bits_of_ddp(*args: Any, **kwargs: Any) -> None:
    expected, found = stages_beside_ddp(*args, **kwargs)
    for of_stage in found:
        for mine, theirs in zip(of_stage, expected, strict=True):
            assert_same(mine, theirs)


NUDGE = 1e-6  # relative; the norm of a clipping is `ddp`'s to so much


def assert_rounds_beside_ddp(
    ranks: RankPool, folder: Path, job: Callable[..., Any], args: Callable[[float], tuple[Any, ...]], clip: float,
    *, ddp: Any = "ddp", **kwargs: Any,
) -> None:  # fmt: skip
    """Where gradients are clipped by their norm, losses are no farther from those of `ddp` than ten times as far as
    these move when `clip` is a millionth larger: how fast that grows is the model's. A norm that is wrong by a
    thousandth is a hundred times outside. The stages among themselves are equal to the bit, to the end."""
    expected, found = stages_beside_ddp(ranks, folder, job, *args(clip), ddp=ddp, **kwargs)
    nudged = ranks.run(job, ddp, folder / "nudged", *args(clip * (1 + NUDGE)))
    for mine, theirs, beside in zip(found[0], expected, nudged, strict=True):
        allowed = 0.0
        for loss, of_ddp, of_nudged in zip(mine["losses"], theirs["losses"], beside["losses"], strict=True):
            allowed = max(allowed, 10 * abs(of_nudged - of_ddp), NUDGE * abs(of_ddp))
            assert abs(loss - of_ddp) <= allowed
    for of_stage in found[1:]:
        for mine, first in zip(of_stage, found[0], strict=True):
            assert_same(mine, first)


def assert_refused_by_ddp(ranks: RankPool, why: str, job: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(RankFailed, match=why):
        ranks.run(job, "ddp", *args)


def test_darts_nbeats_has_the_bits_of_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    """Also after its best checkpoint was loaded, which darts does by `torch.load`, trusting no class, and after a fit
    that went on from its last one."""
    assert_bits_of_ddp(two_ranks, tmp_path, darts_jobs.fit, "NBEATS", BY_VALUE, strategies=BY_NAME)


def test_darts_tft_accumulates_to_the_bits_of_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    options = {**BY_VALUE, "accumulate_grad_batches": 2}
    assert_bits_of_ddp(two_ranks, tmp_path, darts_jobs.fit, "TFT", options, strategies=LOCAL)


# ddp's wrapper writes into every buffer, and darts has one whose rows share their memory.
WITHOUT_BUFFERS = {"broadcast_buffers": False}


def test_darts_transformer_which_ddp_refuses_has_its_bits_without_buffers(two_ranks: RankPool, tmp_path: Path) -> None:
    args = (two_ranks, tmp_path, darts_jobs.fit, "Transformer", BY_VALUE)
    assert_bits_of_ddp(*args, strategies=BY_NAME, ddp=WITHOUT_BUFFERS)
    assert_refused_by_ddp(two_ranks, "single memory location", darts_jobs.fit, tmp_path / "plain", "Transformer", {})


def test_darts_transformer_clipped_by_norm_rounds_beside_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    args = (two_ranks, tmp_path, darts_jobs.fit, lambda norm: ("Transformer", {"gradient_clip_val": norm}))
    assert_rounds_beside_ddp(*args, 0.1, strategies=BY_NAME, ddp=WITHOUT_BUFFERS)


def test_gluonts_deepar_has_the_bits_of_ddp_and_loads_its_best_checkpoint(two_ranks: RankPool, tmp_path: Path) -> None:
    """By `torch.load(path, weights_only=True)`, on every rank."""
    assert_bits_of_ddp(two_ranks, tmp_path, gluonts_jobs.fit_deepar, {}, strategies=BY_NAME)


def test_gluonts_deepar_accumulates_to_the_bits_of_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    options = {**BY_VALUE, "accumulate_grad_batches": 2}
    assert_bits_of_ddp(two_ranks, tmp_path, gluonts_jobs.fit_deepar, options, strategies=LOCAL)


@pytest.mark.parametrize("name", ["SimCLR", "DINO"])
def test_lightly_has_the_bits_of_ddp(name: str, two_ranks: RankPool, tmp_path: Path) -> None:
    """Negatives of all ranks (SimCLR); a teacher made of the student's weights in each step, and gradients that are
    set to None after backward (DINO)."""
    assert_bits_of_ddp(two_ranks, tmp_path, lightly_jobs.fit, name, BY_VALUE, strategies=BY_NAME)


def test_lightly_compiled_has_the_bits_of_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    assert_bits_of_ddp(two_ranks, tmp_path, lightly_jobs.fit, "SimCLR", BY_VALUE, True, strategies=BY_NAME)


def test_lightly_accumulates_to_the_bits_of_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2}
    assert_bits_of_ddp(two_ranks, tmp_path, lightly_jobs.fit, "SimCLR", options, strategies=LOCAL)


def test_lightly_clipped_by_norm_rounds_beside_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    """The step is SGD's, which is as long as its gradients."""
    args = (two_ranks, tmp_path, lightly_jobs.fit, lambda norm: ("SimCLR", {"gradient_clip_val": norm}))
    assert_rounds_beside_ddp(*args, 0.1, strategies=BY_NAME)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_litgpt_pretrains_and_accumulates_to_the_bits_of_ddp(tied: bool, two_ranks: RankPool, tmp_path: Path) -> None:
    """Gradients are clipped by a norm that they do not reach. litgpt compiles: here without kernels of the compiler's
    own, which round otherwise where graphs end elsewhere."""
    assert_bits_of_ddp(two_ranks, tmp_path, litgpt_jobs.pretrain, tied, 2, 1e9, strategies=BY_NAME)


def test_litgpt_compiled_rounds_beside_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    """At stage 3 the compiled model is one graph for each block."""
    expected, found = stages_beside_ddp(
        two_ranks, tmp_path, litgpt_jobs.pretrain, False, 2, 1e9, True, strategies=BY_NAME
    )
    for of_stage in found:
        for mine, theirs in zip(of_stage, expected, strict=True):
            assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
            assert min(mine["graphs"], theirs["graphs"]) > 0


def test_litgpt_clipped_by_norm_rounds_beside_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    def clipped(norm: float) -> tuple[Any, ...]:
        return True, 2, norm

    assert_rounds_beside_ddp(two_ranks, tmp_path, litgpt_jobs.pretrain, clipped, 0.1, strategies=BY_NAME)


def test_pytorch_tabular_which_crashes_under_ddp_has_the_bits_of_ddp_that_finds_what_is_unused(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    """With the best weights, which `load_best` has read from one file, as the package does on rank 0."""
    args = (two_ranks, tmp_path, tabular_jobs.fit_transformer, {})
    assert_bits_of_ddp(*args, strategies=BY_NAME, ddp=DDP)
    assert_refused_by_ddp(two_ranks, "not used in producing the loss", args[2], tmp_path / "plain", {})


def test_pytorch_tabular_clipped_by_norm_rounds_beside_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    args = (two_ranks, tmp_path, tabular_jobs.fit_transformer, lambda norm: ({"gradient_clip_val": norm},))
    assert_rounds_beside_ddp(*args, 0.5, strategies=BY_NAME, ddp=DDP)
