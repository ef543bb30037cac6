"""The program of a step says what the engine does in it, at each use, in order."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import program_checks
import program_jobs
import watched
from lightning_zero.config import Offload
from lightning_zero.run.placing import make_program
from lightning_zero.run.program import Among, Cause, Facts, GroupFacts, Kind, OptimizerFacts, UnitFacts, Use
from ranks import RankPool
from unit_jobs import on_engine, tower, x

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "many buckets": {"bucket_bytes": 2**20},
    "clipped": {"clips": True},
    "clipped, and stepped at once": {"clips": True, "at_once": True},
    "three micro-batches": {"micros": 3},
    "three micro-batches, all buckets at once": {"micros": 3, "bucket_bytes": 2**20},
    "clipped after two of four micro-batches": {"micros": 4, "clips_after": 2},
    "three micro-batches on the rank": {"micros": 3, "accumulation": "local"},
    "no overlap": {"overlap": False},
    "no prefetch": {"prefetch": 0},
    "two ahead": {"prefetch": 2},
    "published late": {"late_publish_bytes": 0},
    "published late, clipped, two micro-batches": {"late_publish_bytes": 0, "clips": True, "micros": 2},
    "64 ranks": {"world": 64},
    "one rank": {"world": 1},
    "two replicas": {"world": 4, "replicate_size": 2},
    "two replicas, few buckets": {"world": 4, "replicate_size": 2, "bucket_bytes": 2**10},
    "four replicas, clipped, two micro-batches": {"world": 16, "replicate_size": 4, "clips": True, "micros": 2},
    "buffers, three micro-batches": {"buffers": True, "micros": 3},
    "in order": {"in_order": True},
    "in order, buffers, three micro-batches": {"in_order": True, "buffers": True, "micros": 3},
    "in order, buffers, three micro-batches on the rank": {
        "in_order": True,
        "buffers": True,
        "micros": 3,
        "accumulation": "local",
    },
    "buffers, two replicas": {"buffers": True, "world": 4, "replicate_size": 2},
    "buffers, two replicas, three micro-batches": {"buffers": True, "world": 4, "replicate_size": 2, "micros": 3},
    "buffers, two replicas, two micro-batches on the rank": {
        "buffers": True,
        "world": 4,
        "replicate_size": 2,
        "micros": 2,
        "accumulation": "local",
    },
    "buffers, tensor-parallel, two replicas, two micro-batches": {
        "buffers": True,
        "world": 8,
        "tensor_parallel_size": 2,
        "replicate_size": 2,
        "micros": 2,
    },
    "replicas of everything": {"world": 4, "replicate_size": 4},
    "tensor-parallel": {"world": 4, "tensor_parallel_size": 2},
    "tensor-parallel, three micro-batches": {"world": 4, "tensor_parallel_size": 2, "micros": 3},
    "tensor-parallel, three micro-batches, prefetch": {
        "world": 4,
        "tensor_parallel_size": 2,
        "micros": 3,
        "prefetch": 6,
        "bucket_bytes": 2**20,
    },
    "tensor-parallel, clipped, two replicas": {
        "world": 8,
        "tensor_parallel_size": 2,
        "replicate_size": 2,
        "clips": True,
        "micros": 2,
    },
    "tensor-parallel ranks alone": {"world": 2, "tensor_parallel_size": 2, "clips": True},
    "scaled": {"scales": True},
    "scaled and clipped, tensor-parallel": {"scales": True, "clips": True, "world": 4, "tensor_parallel_size": 2},
    "some frozen": {"frozen": 2},
    "some frozen, clipped, two micro-batches": {"frozen": 2, "clips": True, "micros": 2},
    "some frozen, published late": {"frozen": 2, "late_publish_bytes": 0},
}
LOOKS: dict[str, dict[str, Any]] = {
    "whether there are any": {"looks": program_jobs.ask_for_gradients},
    "one, and another one": {"looks": lambda engine: [program_jobs.read_gradient(engine) for _ in range(2)]},
    "one, then clipped": {"looks": program_jobs.read_gradient, "clips": True},
    "the norm of each": {"looks": lambda engine: engine.gradients.norms()},
    "the norm of each, scaled and clipped": {
        "looks": lambda engine: engine.gradients.norms(),
        "scales": True,
        "clips": True,
    },
    "one after two of four micro-batches": {"looks": program_jobs.read_gradient, "micros": 4, "looks_after": 2},
    "whether there are any, after the first of three": {
        "looks": program_jobs.ask_for_gradients,
        "micros": 3,
        "looks_after": 1,
    },
    "one, few buckets": {"looks": program_jobs.read_gradient, "bucket_bytes": 2**20, "micros": 2},
    "one, two replicas": {"looks": program_jobs.read_gradient, "world": 4, "replicate_size": 2},
    "one, frozen layers": {"looks": program_jobs.read_gradient, "frozen": 2},
}
OFFLOADED: dict[str, dict[str, Any]] = {
    "host": {"optimizer": "cpu"},
    "disk": {"optimizer": "nvme"},
    "half of it on disk": {"optimizer": "nvme", "fraction": 0.5},
    "host, in two bytes": {"optimizer": "cpu", "state_dtype": torch.bfloat16},
}


def assert_does_what_it_says(program: Any, recorder: program_jobs.Recorder) -> None:
    program_checks.check(program)
    said = program_jobs.in_names(program)
    assert len(said) == len(recorder.done)
    for use, says, does in zip(program.uses, said, recorder.done, strict=True):
        assert program_jobs.split(says) == program_jobs.split(does), f"at {use}, of\n{program}"
    assert program.bytes_sent == recorder.bytes_sent


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_engine_does_what_the_program_says(case: str, stage: int) -> None:
    assert_does_what_it_says(*program_jobs.train(program_jobs.tower(6), stage=stage, **CASES[case]))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", LOOKS)
def test_the_engine_does_what_the_program_says_where_users_look_at_gradients(case: str, stage: int) -> None:
    assert_does_what_it_says(*program_jobs.train(program_jobs.tower(6), stage=stage, **LOOKS[case]))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("tier", OFFLOADED)
def test_the_engine_takes_offloaded_steps_where_the_program_says(
    tier: str, frozen: int, clips: bool, stage: int, tmp_path: Path
) -> None:
    settings = OFFLOADED[tier] | ({"path": tmp_path} if "nvme" in OFFLOADED[tier].values() else {})
    offload = Offload(**settings)
    found = program_jobs.train(program_jobs.tower(5), stage=stage, clips=clips, frozen=frozen, offload=offload)
    assert_does_what_it_says(*found)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tier", [None, "cpu", "nvme"])
def test_the_engine_steps_whole_tensors_where_the_program_says(tier: str | None, stage: int, tmp_path: Path) -> None:
    offload = None if tier is None else Offload(tier, path=tmp_path if tier == "nvme" else None)
    found = program_jobs.train(program_jobs.tower(4), stage=stage, granularity="tensor", offload=offload, clips=True)
    assert_does_what_it_says(*found)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"step_in_backward": True}, {"granularity": "tensor"}])
def test_the_engine_does_what_the_program_says_beside_frozen_layers(options: dict[str, Any], stage: int) -> None:
    if stage > 1 or "step_in_backward" not in options:
        found = program_jobs.train(program_jobs.tower(5), stage=stage, frozen=2, **options)
        assert_does_what_it_says(*found)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("tier", [None, *OFFLOADED])
def test_the_engine_steps_in_backward_where_the_program_says(tier: str | None, stage: int, tmp_path: Path) -> None:
    settings = {} if tier is None else OFFLOADED[tier] | ({"path": tmp_path} if "disk" in tier else {})
    offload = Offload(**settings) if settings else None
    found = program_jobs.train(program_jobs.tower(5), stage=stage, step_in_backward=True, offload=offload)
    assert_does_what_it_says(*found)


@pytest.mark.parametrize(
    ("stage", "options"),
    [*((stage, {}) for stage in (1, 2, 3)), *((stage, {"step_in_backward": True}) for stage in (2, 3))],
)
def test_the_engine_does_what_the_program_says_beside_layers_that_no_optimizer_has(
    stage: int, options: dict[str, Any]
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*parameters][:-4])

    assert_does_what_it_says(*program_jobs.train(program_jobs.tower(5), stage=stage, make=make, **options))


RANKS = [2, 8, 64, 1024]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_travels_in_a_step_is_what_the_paper_says_and_nothing_else_grows_with_ranks(stage: int) -> None:
    """2, 2 and 3 times the parameters, times (N-1)/N (ZeRO, section 7.2). At stage 3 three units are gathered once: the
    two that forward has used last, and the first one, whose weight no gradient needs."""
    layers, width = 5, 256
    layer = 4 * width**2  # bytes
    train, tower = program_jobs.train, program_jobs.tower
    made = {
        ranks: train(tower(layers, width, bias=False), stage=stage, world=ranks, bucket_bytes=layer)[0]
        for ranks in RANKS
    }
    volume = 3 * layers - 3 if stage == 3 else 2 * layers
    for ranks, program in made.items():
        assert program.bytes_sent * ranks == volume * layer * (ranks - 1)
        assert [op.kind for op in program.ops] == [op.kind for op in made[2].ops]


@given(model=program_checks.models())
@settings(max_examples=600, deadline=None, derandomize=True)
def test_no_program_reads_what_is_not_there_or_loses_what_is(model: Any) -> None:
    program_checks.check(make_program(*model))


@given(model=program_checks.models())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_program_prints_each_of_its_ops(model: Any) -> None:
    program = make_program(*model)
    told = str(program)
    assert all(str(op.kind) in told for op in program.ops if op.kind is not Kind.CALL)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("when", ["before backward", "before the step"])
def test_a_program_has_what_follows_an_evaluation_in_the_middle_of_a_step(when: str, clips: bool) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> Any:
        for evaluates in (False, True):
            with engine.forward():
                loss = model(x()).square().mean()
            if evaluates and when == "before backward":
                evaluate(model, engine)
            with engine.backward():
                loss.backward()
            if evaluates and when == "before the step":
                evaluate(model, engine)
            if clips:
                engine.gradients.clip_by_norm_(optimizer, 0.1)
            optimizer.step()
            programs.append(engine.program())

    def evaluate(model: Any, engine: Any) -> None:
        with torch.no_grad(), engine.forward():
            model(x())

    programs: list[Any] = []
    on_engine(tower(), act, 2, world=1)
    plain, evaluated = programs
    assert evaluated.uses == plain.uses
    program_checks.check(evaluated)


def test_the_program_of_each_engine_that_trains_in_a_test_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(watched, "check", found.append)
    monkeypatch.setattr(watched, "_checked", set())

    def act(model: Any, engine: Any, optimizer: Any, comm: Any) -> Any:
        with engine.forward():
            loss = model(x()).square().mean()
        with engine.backward():
            loss.backward()
        optimizer.step()
        return engine.program()

    assert found == on_engine(tower(), act, 2, world=1)


@pytest.mark.parametrize("strategy", [{"stage": 1}, {"stage": 3, "units": "modules"}])
def test_a_strategy_tells_the_program_of_its_last_step_in_fit_and_after_it(
    strategy: dict[str, Any], two_ranks: RankPool
) -> None:
    first, second = two_ranks.run(program_jobs.fit_and_ask, strategy)
    assert "Train one step first" in first["before"]
    assert first["in"] == first["after"]
    assert first["after"].collectives == second["after"].collectives
    causes = [use.cause for use in first["after"].uses]
    assert causes[0] is Cause.FORWARD
    assert causes[-3:] == [Cause.CLIP, Cause.STEP_AFTER_CLIP, Cause.STEPPED]
    program_checks.check(first["after"])


def test_a_strategy_of_fabric_tells_the_program_of_a_module(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(program_jobs.train_with_fabric, {"stage": 2})
    program_checks.check(first)
    assert first.collectives == second.collectives
    assert first.messages == 1


def test_replicas_meet_for_a_call_of_all_of_them_and_for_no_other() -> None:
    group = GroupFacts(
        name="g",
        holds="",
        shard=1,
        chunks=(1,),
        itemsize=4,
        reduced_itemsize=4,
        pool=0,
        is_full=False,
        is_published=True,
    )
    facts = Facts(
        groups=(group,),
        units=(UnitFacts(name="u", groups=(0,)),),
        order=(0,),
        optimizers=(OptimizerFacts(groups=(0,)),),
        buckets=(1,),
        calls=("buffers", "the gradient of u"),
        of_all=(0,),
        ranks=2,
        replicas=2,
    )
    causes = [
        (Cause.FORWARD, 0),
        (Cause.CALL, 0),
        (Cause.UNIT, 0),
        (Cause.BACKWARD, 0),
        (Cause.UNIT, 0),
        (Cause.END, 0),
    ]
    causes += [(Cause.CALL, 1), (Cause.STEP, 0), (Cause.STEPPED, 0)]
    program = make_program(facts, [Use(*each) for each in causes])
    assert [(op.kind, op.among) for op in program.at(1)] == [
        (Kind.MARK, Among.REPLICAS),  # whether they have begun to reduce
        (Kind.MARK, Among.REPLICAS),  # that they meet
        (Kind.AGREE, Among.SHARD),
        (Kind.AGREE, Among.REPLICAS),
        (Kind.CALL, Among.WORLD),
    ]
    assert [(op.kind, op.among) for op in program.at(6)] == [(Kind.CALL, Among.SHARD)]
