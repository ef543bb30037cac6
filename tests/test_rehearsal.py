"""What a rehearsal says of a training is what that training takes, to the byte."""

import itertools
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rehearsal_jobs
from lightning_zero import Offload, ZeroEMA, ZeroStrategy, cli
from lightning_zero.rehearsal import planning
from lightning_zero.rehearsal.cost import Rates
from lightning_zero.rehearsal.hollow import NeedsValuesError
from lightning_zero.rehearsal.imagined import ImaginedDisk
from lightning_zero.rehearsal.memory import Memory, Moment, Other, Phase
from lightning_zero.rehearsal.planning import TIE, Candidate, Plan, plan
from lightning_zero.rehearsal.rehearsal import Rehearsal, rehearse
from older import HELD_BY_BARRIERS, WRONG_INDICES
from ranks import RankPool

FIXED = {"bucket_size_mb": 1}
UNITS = {"units": "modules"}  # a small model stays whole at stage 3 otherwise

STATES = ["parameter", "gradient", "master", "optimizer state"]

LAST = 4 * rehearsal_jobs.WORDS * rehearsal_jobs.WIDTH // 2  # bytes of a rank's part of the embedding, of two

_LOGITS = 4 * 4 * rehearsal_jobs.LENGTH * rehearsal_jobs.WORDS  # bytes
# By two threads, of the largest collective of `InSequence` each: what comes out, and what one of two ranks puts in.
HELD = 2 * (_LOGITS + _LOGITS // 2)


def rehearsed(
    strategy: dict[str, Any],
    ranks: int,
    rank: int = 0,
    make: type[rehearsal_jobs.Model] = rehearsal_jobs.Model,
    **trainer: Any,
) -> Rehearsal:
    return rehearse(
        make,
        rehearsal_jobs.batch_of,
        strategy,
        ranks=ranks,
        rank=rank,
        host_is_apart=False,
        **trainer,
    )


def without_small(device: Mapping[str, int]) -> dict[str, int]:
    return {name: nbytes for name, nbytes in device.items() if name != Other.BUFFER}


def without_barriers(moment: Moment) -> Moment:
    held = {Other.BUFFER: HELD_BY_BARRIERS}
    return replace(moment, device={name: nbytes - held.get(name, 0) for name, nbytes in moment.device.items()})


def assert_told(found: list[dict[str, Any]], strategy: dict[str, Any], ranks: int, **trainer: Any) -> None:
    for rank in {0, ranks - 1}:
        assert_rank_told(found[rank], strategy, ranks, rank, **trainer)


def assert_rank_told(real: dict[str, Any], strategy: dict[str, Any], ranks: int, rank: int, **trainer: Any) -> None:
    told = rehearsed(strategy, ranks, rank, **trainer)
    assert told.at_rest == real["at_rest"]
    assert told.sent == real["sent"]
    assert str(told.program) == real["program"]
    assert told.saved == real["saved"]
    for phase, found in real["peaks"].items():
        moment = without_barriers(found)
        if strategy.get("step_in_backward") and phase is Phase.STEP:
            # The wire still holds the average that it was the last to write.
            assert 0 <= moment.nbytes - told.peaks[phase].nbytes <= LAST, phase
        elif trainer.get("make") is rehearsal_jobs.InSequence and phase is not Phase.SET_UP:
            # Threads of gloo's may still hold what a collective of DTensor's was given, and what it has returned.
            assert 0 <= moment.nbytes - told.peaks[phase].nbytes <= HELD, phase
        elif phase is Phase.SET_UP:  # small tensors of real messages come and go
            assert without_small(told.peaks[phase].device) == without_small(moment.device), phase
        else:
            assert told.peaks[phase] == moment, phase


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (4, 2), (4, 3)])
def test_bytes_messages_and_program_are_those_of_real_ranks(
    ranks: int, stage: int, pool_of: Callable[[int], RankPool]
) -> None:
    strategy = {"stage": stage, **(UNITS if stage == 3 else {})}
    assert_told(pool_of(ranks).run(rehearsal_jobs.train, strategy, ranks), strategy, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_a_model_half_of_which_is_frozen_are_those_of_real_ranks(
    ranks: int, stage: int, pool_of: Callable[[int], RankPool]
) -> None:
    strategy, make = {"stage": stage, **(UNITS if stage == 3 else {})}, rehearsal_jobs.HalfFrozen
    assert_told(pool_of(ranks).run(rehearsal_jobs.train, strategy, ranks, make), strategy, ranks, make=make)


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped": ({"stage": 2}, {"gradient_clip_val": 0.1}),
    "micro-batches": ({"stage": 3, **UNITS}, {"accumulate_grad_batches": 2}),
    "local micro-batches": ({"stage": 2, "accumulation": "local"}, {"accumulate_grad_batches": 2}),
    "two bytes": ({"stage": 3, **UNITS}, {"precision": "bf16-mixed"}),
    "small buckets": ({"stage": 1, "bucket_size_mb": 0.01}, {}),
    "optimizer on the host": ({"stage": 2, "offload": "cpu"}, {"precision": "bf16-mixed"}),
    "everything on disk": ({"stage": 3, **UNITS, "offload": {"optimizer": "nvme", "parameters": "nvme"}}, {}),
    "stepped in backward": ({"stage": 3, **UNITS, "step_in_backward": True}, {}),
    "recomputed": ({"stage": 3, **UNITS, "activation_checkpointing": True}, {}),
    "activations on the host": ({"stage": 2, "activation_checkpointing": {"offload": True}}, {}),
    "replicas": ({"stage": 3, **UNITS, "replicate_size": 2}, {}),
    "half frozen, on disk": ({"stage": 2, "offload": {"optimizer": "nvme"}}, {"make": rehearsal_jobs.HalfFrozen}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_options_take_what_they_take_on_real_ranks(setting: str, two_ranks: RankPool, tmp_path: Path) -> None:
    strategy, trainer = SETTINGS[setting]
    if "nvme" in str(strategy):
        strategy = {**strategy, "offload": {**strategy["offload"], "path": str(tmp_path)}}
    assert_told(two_ranks.run(rehearsal_jobs.train, strategy, 2, **trainer), strategy, 2, **trainer)


@pytest.mark.parametrize("make", [rehearsal_jobs.Divided, rehearsal_jobs.InSequence])
@pytest.mark.parametrize("stage", [2, 3])
def test_tensor_parallel_ranks_take_what_they_take(
    stage: int, make: type[rehearsal_jobs.Model], pool_of: Callable[[int], RankPool]
) -> None:
    strategy = {"stage": stage, **(UNITS if stage == 3 else {}), "tensor_parallel_size": 2}
    assert_told(pool_of(4).run(rehearsal_jobs.train, strategy, 4, make), strategy, 4, make=make)


def test_a_device_keeps_gradients_until_they_are_packed_beside_its_work() -> None:
    on_host, apart = (
        rehearse(rehearsal_jobs.Model, rehearsal_jobs.batch_of, {"stage": 3, **UNITS}, ranks=2, host_is_apart=is_apart)
        for is_apart in (False, True)
    )
    assert apart.at_rest == on_host.at_rest
    assert apart.peaks[Phase.FORWARD] == on_host.peaks[Phase.FORWARD]
    last = apart.peaks[Phase.STEP].nbytes - on_host.peaks[Phase.STEP].nbytes  # those of the last groups
    assert LAST <= last < apart.at_rest["gradient"]


def test_a_step_has_what_all_of_its_micro_batches_send() -> None:
    one, three = (rehearsed({"stage": 2}, 2, accumulate_grad_batches=micro) for micro in (1, 3))
    assert three.sent["reduce_scatter"].calls == 3 * one.sent["reduce_scatter"].calls
    assert three.sent["reduce_scatter"].nbytes == 3 * one.sent["reduce_scatter"].nbytes


def test_a_rank_of_thousands_takes_seconds_and_has_its_part() -> None:
    few, many = (rehearsed({"stage": 3, **UNITS}, ranks) for ranks in (64, 4096))
    assert many.at_rest["optimizer state"] < few.at_rest["optimizer state"] / 8  # pieces are padded
    assert few.sent["reduce_scatter"].calls == many.sent["reduce_scatter"].calls


def test_a_module_of_the_users_stays_as_it_is() -> None:
    model = rehearsal_jobs.Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    rehearse(model, rehearsal_jobs.batch_of(), ZeroStrategy(stage=3), ranks=2)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Undecided(rehearsal_jobs.Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss > 0 else loss


def test_a_model_that_asks_for_values_is_answered_by_a_step_on_the_cpu() -> None:
    with pytest.raises(NeedsValuesError, match="on_cpu=True"):
        rehearse(Undecided, rehearsal_jobs.batch_of, 2, ranks=2)
    told = rehearse(Undecided, rehearsal_jobs.batch_of, 2, ranks=2, on_cpu=True)
    assert told.at_rest == rehearse(rehearsal_jobs.Model, rehearsal_jobs.batch_of, 2, ranks=2).at_rest


def test_the_table_says_what_made_the_peak_and_whether_it_fits() -> None:
    told = rehearse(rehearsal_jobs.Model, rehearsal_jobs.batch_of, 2, ranks=2, device_bytes=2 * 10**6)
    assert not told.fits
    assert re.search(r"Most in \w+.*: 2\.\d+ MB, [\d.]+ kB MORE than the device has", " ".join(str(told).split()))
    assert str(told).startswith("ZeroStrategy(stage=2) on 2 ranks, rank 0: 136,896 parameters\n")


SMALL = (rehearsal_jobs.Small, rehearsal_jobs.batch_of)


@pytest.fixture(scope="module")
def everything() -> Plan:
    """Where all fits."""
    return plan(*SMALL, ranks=4, device_bytes=10**9)


def test_a_plan_has_the_fastest_that_fits_first_and_tells_why_faster_ones_do_not(everything: Plan) -> None:
    tie = (1 + TIE) * min(one.seconds for one in everything.candidates)
    equal = [one for one in everything.candidates if one.seconds <= tie]  # simpler ones come first
    assert everything.fitting[: len(equal)] == equal
    seconds = [one.seconds for one in everything.fitting[len(equal) :]]
    assert seconds == sorted(seconds)
    assert "strategy=zero" in str(everything)
    needed = sorted(one.device_bytes for one in everything.candidates)
    tight = replace(everything, device_bytes=needed[0])
    assert tight.best.device_bytes == needed[0]
    assert ("faster, but does not fit" in str(tight)) == bool(tight.faster(tight.best))
    with pytest.raises(ValueError, match="The smallest device on which this model can be trained has"):
        replace(everything, device_bytes=needed[0] - 1).best  # noqa: B018


def test_a_plan_tries_other_buckets_near_the_limit_and_offload_only_where_it_must_if_it_is_in_a_hurry(
    everything: Plan,
) -> None:
    assert {5, 100} == {one.strategy.get("bucket_size_mb") for one in everything.candidates} - {None}
    fixed = plan(*SMALL, ranks=4, device_bytes=10**9, fixed=FIXED, thorough=False)
    assert {5, 100}.isdisjoint(one.strategy.get("bucket_size_mb") for one in fixed.candidates)
    quick = plan(*SMALL, ranks=4, device_bytes=10**9, thorough=False)
    assert quick.best.strategy == everything.best.strategy
    assert [one for one in everything.candidates if "offload" in one.strategy]
    assert not [one for one in quick.candidates if "offload" in one.strategy]
    least = min(one.device_bytes for one in quick.candidates)
    assert "offload" in plan(*SMALL, ranks=4, device_bytes=least - 1, thorough=False).best.strategy


def test_a_plan_tries_tensor_parallelism_where_the_module_divides_its_layers() -> None:
    def degrees_of(make: type[rehearsal_jobs.Model], **kwargs: Any) -> set[int]:
        given = {"ranks": 8, "device_bytes": 10**9, "fixed": {"stage": 2, **FIXED}, "thorough": False, **kwargs}
        found = plan(make, rehearsal_jobs.batch_of, **given)
        assert not [why for why in found.refused.values() if "ranks" in why], "of 6 ranks no 4 are a part"
        tried = [(one.strategy.get("tensor_parallel_size", 1), one) for one in found.candidates]
        assert all(one.seconds == degree * one.rehearsal.timing().seconds for degree, one in tried), "as many samples"
        return {degree for degree, _ in tried}

    assert degrees_of(rehearsal_jobs.SmallDivided) == {1, 2, 4, 8}
    assert degrees_of(rehearsal_jobs.SmallDivided, divides=False) == {1}
    assert degrees_of(rehearsal_jobs.Small) == {1}
    assert degrees_of(rehearsal_jobs.SmallDivided, ranks=6) == {1, 2}

    class Four(rehearsal_jobs.SmallDivided):
        def configure_model(self) -> None:
            super().configure_model()
            if self.device_mesh is not None and self.device_mesh["tensor_parallel"].size() > 4:
                raise RuntimeError("shape '[4, 16, -1, 16]' is invalid")

    assert degrees_of(Four) == {1, 2, 4}


def test_what_a_model_sends_by_itself_takes_its_time() -> None:
    told = rehearsed({"tensor_parallel_size": 2}, 4, make=rehearsal_jobs.Divided)
    # In each of three blocks the outputs of one layer are added in forward, and the gradients of another's inputs.
    assert sum(work.messages for work in told.work.values()) == 2 * 3
    activations = 4 * rehearsal_jobs.LENGTH * rehearsal_jobs.WIDTH * 4
    assert sum(work.sent for work in told.work.values()) == 2 * 3 * 2 * activations
    slow, fast = (told.timing(Rates(link=link)).seconds for link in (1e6, 1e12))
    assert slow - fast > 2 * 3 * 2 * activations / 1e6


MODEL = ["rehearsal_jobs:Small", "--batch", "4x16:int64", "--ranks", "2"]


def test_the_command_line_rehearses_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rehearse", *MODEL, "--set", "bucket_size_mb=1", "--plot", str(tmp_path / "a.png")]) == 0
    assert "Most in" in capsys.readouterr().out
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert cli.main(["rehearse", *MODEL, "--device-memory", "100KB", "--program"]) == 1
    assert "publish #0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no.such:Model", *MODEL[1:]], "'no.such:Model' cannot be imported"),
        ([*MODEL, "--device-memory", "80"], "80 is not a size with a unit, such as 80GB"),
        ([*MODEL[:4], "0"], "argument --ranks: 0 is not a whole number of at least 1"),
        ([*MODEL, "--rank", "2"], "rank=2 is none of the 2 ranks. Write one of 0 to 1."),
        ([*MODEL[:2], "4y16", *MODEL[3:]], "'4y16' is no batch"),
        ([*MODEL[:2], "4x16:float32", *MODEL[3:]], WRONG_INDICES),
        ([*MODEL, "--set", "stages=3"], "ZeroStrategy has no argument 'stages'"),
        ([MODEL[0], *MODEL[3:]], "a rehearsal needs --batch"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["rehearse", *arguments])
    assert told in capsys.readouterr().err


class Drawn(L.LightningModule):
    """Layers of all kinds, some of them frozen."""

    def __init__(self, layers: list[tuple[str, int, bool]]) -> None:
        super().__init__()
        made: list[nn.Module] = [nn.Embedding(100, layers[0][1])]
        for (kind, width, frozen), (_, following, _) in zip(layers, [*layers[1:], layers[0]], strict=True):
            after = {"plain": nn.Identity(), "norm": nn.LayerNorm(following), "bias": nn.Linear(following, following)}
            block = nn.Sequential(nn.Linear(width, following, bias=False), after[kind])
            made.append(block.requires_grad_(not frozen))
        self.layers = nn.Sequential(*made)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.layers(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Frozen ones that an optimizer had would travel in buckets, whose size they choose, too: they may train later.
        return torch.optim.AdamW(one for one in self.parameters() if one.requires_grad)


LAYERS = st.tuples(st.sampled_from(["plain", "norm", "bias"]), st.integers(100, 300), st.booleans())


@given(
    layers=st.lists(LAYERS, min_size=1, max_size=4),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    stage=st.sampled_from([1, 2, 3]),
    two_bytes=st.booleans(),
    reduces_two_bytes=st.booleans(),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_what_rests_falls_or_stays_from_stage_to_stage_and_with_twice_the_ranks(
    layers: list[tuple[str, int, bool]], ranks: int, stage: int, two_bytes: bool, reduces_two_bytes: bool
) -> None:
    """But for padding: a rank's part of each tensor is a multiple of 64 bytes in the dtype in which it rests."""

    def at_rest(stage: int, ranks: int) -> int:
        strategy = {"stage": stage, **(UNITS if stage == 3 else {})}
        if reduces_two_bytes:
            strategy["reduce_dtype"] = "bfloat16"
        precision = "bf16-mixed" if two_bytes else "32-true"
        told = rehearse(
            lambda: Drawn(layers), lambda: torch.arange(4), strategy, ranks=ranks, steps=1, precision=precision
        )
        return sum(told.at_rest.get(name, 0) for name in STATES)

    tensors = sum(1 for _ in Drawn(layers).parameters())
    padding = tensors * 2 * ranks * (64 // 2) * 16  # elements, and the most bytes that one has in all its states
    found = [at_rest(stage, ranks) for stage in range(4)]
    for before, after in itertools.pairwise(found):
        assert after <= before + padding
    assert at_rest(stage, 2 * ranks) <= found[stage] + padding
    if ranks > 1:
        assert found[3] < found[2] < found[1] < found[0]


def test_layers_divided_among_one_rank_train_at_stage_3(pool_of: Callable[[int], RankPool]) -> None:
    strategy = {"stage": 3, **UNITS}
    made = (strategy, 2, rehearsal_jobs.Divided)
    assert_told(pool_of(2).run(rehearsal_jobs.train, *made), strategy, 2, make=rehearsal_jobs.Divided)


def test_a_save_needs_what_rests_and_one_tensor_at_a_time(tmp_path: Path) -> None:
    setting = {"optimizer": "nvme", "path": str(tmp_path)}
    told = rehearse(rehearsal_jobs.Deep, rehearsal_jobs.deep_batch_of, {"stage": 2, "offload": setting}, ranks=2)
    save, largest, batch = told.peaks[Phase.SAVE], 4 * 1024 * 1024, rehearsal_jobs.deep_batch_of().nbytes
    resting = sum(nbytes for name, nbytes in told.at_rest.items() if not name.endswith((" (host)", " (disk)")))
    assert save.nbytes == resting + batch + largest  # which was read from the disk
    assert told.saved > 50 * largest
    assert " save " in str(told).splitlines()[1]


def test_what_is_on_its_way_to_the_disk_counts_until_somebody_waits_for_it() -> None:
    disk, ended = ImaginedDisk("there"), []
    for begin in (disk.begin_write, disk.begin_read):
        values = torch.ones(4)
        weakref.finalize(values.untyped_storage(), ended.append, begin.__name__)
        moving = begin([(0, values)])
        del values
        assert ended == []
        moving.result()
        assert ended.pop() == begin.__name__


class Alike(rehearsal_jobs.Small):
    """Layers of equal size."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()


def test_state_that_a_first_step_has_made_counts_while_it_is_written() -> None:
    """Where two windows take as much of the device, what the one before leaves to be written is told."""
    offload, layer = Offload("nvme", path="there"), 64 * 64 + 64
    told = rehearse(Alike, torch.ones(4, 64), {"stage": 1, "offload": offload, "bucket_size_mb": 0.02})
    counts = 4 * 2 * 6  # bytes of the steps of all parameters
    assert 0 <= told.peaks[Phase.FIRST].host["optimizer state"] - 2 * 4 * layer <= counts


def test_of_each_phase_the_moment_with_most_bytes_on_the_device_is_kept() -> None:
    asked: list[int] = []
    memory = Memory(whole_gradients=lambda: asked.append(0) or 1000)
    module = torch.zeros(100)
    memory.born(module)
    memory.phase = Phase.SET_UP
    for numel in (10, 2):  # one after the other
        buffer = torch.zeros(numel)
        memory.born(buffer)
        del buffer
    memory.phase = Phase.OVER
    assert memory.peaks[Phase.SET_UP].device == {Other.BUFFER: 40}
    assert memory.peaks[Phase.SET_UP].host == {Other.MODULE: 400}
    del module
    memory.is_last, memory.phase = True, Phase.BACKWARD
    made = torch.zeros(10)
    memory.born(made)
    asked.clear()
    del made  # it may be the gradient of a parameter, which nobody is to ask for it now
    assert asked == []
    assert memory.peaks[Phase.BACKWARD].device == {"gradient": 40}, "no more of what was made than there is"
    with pytest.raises(ZeroDivisionError), memory.looking_away():
        raise ZeroDivisionError
    assert memory.phase is Phase.BACKWARD


def test_a_first_step_gathers_as_often_as_those_that_follow_a_plan() -> None:
    """Backward runs without gradients, as an evaluation does: a unit that it uses again begins no other batch."""
    first, last = (
        rehearse(rehearsal_jobs.Model, rehearsal_jobs.batch_of, {"stage": 3, **UNITS}, ranks=2, steps=steps)
        for steps in (1, 3)
    )
    assert first.sent["all_gather"].nbytes <= last.sent["all_gather"].nbytes
    assert Phase.FIRST in last.peaks, "what comes before the last step has a peak of its own"
    assert Phase.FIRST not in first.peaks


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*MODEL, "--device-memory", "1GB", "--offload", "cpu"], "--offload has nothing to do with MODEL"),
        (
            ["--parameters", "7e9", "--ranks", "8", "--host-memory", "1GB"],
            "--host-memory has nothing to do with",
        ),
        (MODEL, "plan MODEL needs --device-memory"),
    ],
)
def test_a_plan_refuses_what_it_would_not_heed(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", *arguments])
    assert told in capsys.readouterr().err


def test_a_plan_of_a_model_is_for_the_replicas_and_the_memory_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = dict[str, Any]()
    monkeypatch.setattr(planning, "plan", lambda *_, **arguments: given.update(arguments) or Mock(fitting=[1]))
    assert cli.main(["plan", *MODEL, "--device-memory", "1.5GiB", "--host-memory", "2GB", "--replicas", "2"]) == 0
    assert given["fixed"] == {"replicate_size": 2}
    assert (given["device_bytes"], given["host_bytes"]) == (3 * 2**29, 2 * 10**9)


def test_a_rehearsal_is_of_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="ranks=0: write at least one rank"):
        rehearse(rehearsal_jobs.Model, rehearsal_jobs.batch_of, ranks=0)


@pytest.mark.parametrize("ranks_and_bytes", [(0, 10**9), (8, 0)])
def test_a_plan_is_for_at_least_one_rank_and_a_device_with_memory(ranks_and_bytes: tuple[int, int]) -> None:
    ranks, nbytes = ranks_and_bytes
    with pytest.raises(ValueError, match=f"ranks={ranks} and device_bytes={nbytes}: write at least 1"):
        plan(rehearsal_jobs.Model, rehearsal_jobs.batch_of, ranks=ranks, device_bytes=nbytes)


def test_a_plan_rehearses_nothing_twice_when_an_argument_is_fixed() -> None:
    told = plan(
        *SMALL,
        ranks=2,
        device_bytes=10**9,
        fixed={"stage": 2, "offload": "cpu", "activation_checkpointing": False},
    )
    one, *others = told.candidates
    assert [other.strategy.get("bucket_size_mb") for other in others] == [5, 100]
    assert one.overrides == "strategy=zero2 strategy/offload=cpu strategy.activation_checkpointing=False"


def test_a_tenth_of_the_smallest_device_that_is_told_stays_free() -> None:
    candidate = Candidate(strategy={}, rehearsal=Mock(peak=Mock(nbytes=9000)), seconds=1.0, hidden=0.0)
    assert candidate.device_bytes == 10_000


def test_a_plan_rehearses_with_all_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    told, given = rehearsed({"stage": 2}, 2), list[dict[str, Any]]()
    monkeypatch.setattr(planning, "rehearse", lambda *_, **arguments: given.append(arguments) or told)
    monkeypatch.setattr(planning, "answers_of", lambda *_, **trainer: ["yes", trainer])
    trainer = {"precision": "bf16-mixed"}
    means: dict[str, Any] = {"ranks": 2, "device_bytes": 10**9, "host_is_apart": False, "rates": Rates(link=1.0)}
    plan(rehearsal_jobs.Model, rehearsal_jobs.batch_of, on_cpu=True, **means, **trainer)
    assert given
    assert given == [{**means, "on_cpu": ["yes", trainer], **trainer}] * len(given)
    assert not [one for one in planning._strategies({}) if one["stage"] < 3 and "prefetch" in one], "the same twice"


def test_what_callbacks_count_begins_anew_in_each_rehearsal_of_a_plan() -> None:
    average = ZeroEMA(decay=0.5)
    given: dict[str, Any] = {"ranks": 2, "device_bytes": 10**9, "fixed": FIXED, "thorough": False, "divides": False}
    found = plan(*SMALL, callbacks=[average], **given)
    assert len(found.candidates) > 1
    assert len({one.rehearsal.at_rest["average"] for one in found.candidates}) == 1
    assert found.best.rehearsal.at_rest["average"] > 0
    assert average._latest_update_step == 0


def taking(seconds: float, *moments: Moment, stage: int = 2) -> Candidate:
    peaks = {moment.phase: moment for moment in moments}
    told = Mock(peak=max(moments, key=lambda moment: moment.nbytes), peaks=peaks)
    return Candidate(strategy={"stage": stage}, rehearsal=told, seconds=seconds, hidden=0.0)


def test_a_strategy_fits_where_its_device_and_its_host_do_in_every_phase() -> None:
    step = Moment(Phase.STEP, "", {"activations": 900}, {"optimizer state": 50}, {})
    save = Moment(Phase.SAVE, "", {"activations": 100}, {"optimizer state": 80}, {})
    one = taking(1.0, step, save)
    whys = {"stage 1": "too old", "stage 3": "too new", "stage 0": "too old", "stage -1": "too old"}
    made = Plan(candidates=(one,), refused=whys, ranks=2, device_bytes=1000, host_bytes=80)
    assert made.best is one
    for limits, told in (
        ({}, "cannot be: stage 1 and 2 more: too old cannot be: stage 3: too new"),
        ({"host_bytes": 79}, "ZeroStrategy(stage=2) takes 80 B on the host"),
        ({"device_bytes": 999}, "ZeroStrategy(stage=2) takes 900 B, of which 900 B are activations"),
    ):
        assert told in " ".join(str(replace(made, **limits)).split())


def test_other_buckets_are_tried_for_the_fastest_the_least_and_what_is_faster_and_nearly_fits() -> None:
    def of(stage: int, seconds: float, nbytes: int) -> Candidate:
        return taking(seconds, Moment(Phase.STEP, "", {"activations": nbytes}, {}, {}), stage=stage)

    candidates = of(0, 1.0, 3000), of(1, 2.0, 1000), of(2, 3.0, 900), of(3, 4.0, 500)
    made = Plan(candidates=candidates, refused={}, ranks=2, device_bytes=1000)
    assert [one["stage"] for one in planning._with_other_buckets(made)] == [2, 2, 3, 3, 1, 1]
