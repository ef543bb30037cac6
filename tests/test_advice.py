"""What is said when memory runs out."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn

import advice_jobs as jobs
import sim
import sim_jobs
import warm
from lightning_zero import Offload
from lightning_zero.config import ActivationCheckpointing
from lightning_zero.device import HOST
from lightning_zero.pl import advice
from lightning_zero.pl.advice import (
    BESIDE,
    Held,
    Option,
    _stages_of,
    advice_for,
    advise,
    asked_bytes,
    asked_for,
    bytes_beside,
    command_for,
    held_by,
    host_options_of,
    is_out_of_memory,
    memory_of,
    options_beside_ddp,
    options_of,
    tell_once,
)
from lightning_zero.run.average import Average
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.forecast import bytes_to_rest
from lightning_zero.shards.offload import Machine
from lightning_zero.tiers.ledger import Category, Tier
from lightning_zero.wire.comm import Comm, RankTimeoutError
from models import seeded
from monitor_jobs import listening
from ranks import RankPool, run_alone
from thread_world import ThreadWorld

BF16 = torch.bfloat16
DDP = "ddp_find_unused_parameters_true"
APART = Machine(host_is_apart=True)  # as beside a GPU
ROUNDING = 0.02  # padding of shards, and what AdamW counts for each parameter


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def begin(comm: Comm, stage: int, width: int = 192, **options: Any) -> Engine:
    module = seeded(lambda: nn.Sequential(*(Block(width) for _ in range(6))))
    made = Options(**{"machine": APART, "merges_units": True, **options})
    return Engine(module, [torch.optim.AdamW(module.parameters())], stage=stage, comm=comm, options=made)


def train(engine: Engine, *, autocast: bool = False) -> None:
    with engine.forward(), torch.autocast("cpu", dtype=BF16, enabled=autocast):
        loss = engine.module(torch.ones(2, engine.module[0].up.in_features)).float().square().mean()  # type: ignore[index]
    with engine.backward():
        loss.backward()
    engine.optimizers[0].step()


def options_on(ranks: int, stage: int, *, steps: int = 1, width: int = 192, **options: Any) -> tuple[dict, int]:
    """Options of rank 0 by what is to be written, and the bytes that it has on the device at rest."""

    def job(comm: Comm) -> tuple[list[Option], int]:
        engine = begin(comm, stage, width, **options)
        for _ in range(steps):
            train(engine, autocast="autocast_dtype" in options)
        found = options_of(engine, stage, bytes_to_rest(engine, engine.optimizers, HOST), 10**6)
        return found, sum(nbytes for name, nbytes in engine.bytes_by_category().items() if "(" not in name)

    found, held = ThreadWorld(ranks).run(job)[0]
    return {option.write: option for option in found}, held


# --- bytes


CPU = Offload(optimizer="cpu")
ADVISED = [
    (0, {}, "stage=1", 1, {}),
    (0, {}, "stage=2", 2, {}),
    (1, {}, "stage=2", 2, {}),
    (1, {}, "stage=3", 3, {}),
    (2, {}, "stage=3", 3, {}),
    (2, {"autocast_dtype": BF16}, "stage=3", 3, {}),
    (1, {}, "offload=Offload(optimizer='cpu')", 1, {"offload": CPU}),
    (2, {}, "offload=Offload(optimizer='cpu')", 2, {"offload": CPU}),
    (2, {"autocast_dtype": BF16}, "offload=Offload(optimizer='cpu')", 2, {"offload": CPU}),
    (3, {}, "offload=Offload(optimizer='cpu')", 3, {"offload": CPU}),
    (2, {"offload": Offload(optimizer="cpu", fraction=0.5)}, "Offload(fraction=1)", 2, {"offload": CPU}),
    (
        3,
        {"offload": CPU},
        "Offload(parameters='cpu')",
        3,
        {"offload": Offload(optimizer="cpu", parameters="cpu")},
    ),
    (3, {"prefetch": 2}, "prefetch=0", 3, {"prefetch": 0}),
    (2, {"width": 512, "bucket_bytes": 2**22}, "bucket_size_mb=", 2, {}),
    (3, {"width": 512, "bucket_bytes": 2**22}, "bucket_size_mb=", 3, {}),
]


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("stage", "given", "advice", "then", "change"), ADVISED)
def test_what_an_option_frees_is_what_the_run_with_it_has_less_at_rest(
    stage: int, given: dict, advice: str, then: int, change: dict, steps: int
) -> None:
    """Before the first step, too, when half of it is still to come."""
    options, held = options_on(2, stage, steps=steps, **given)
    (option,) = (found for write, found in options.items() if write.startswith(advice))
    if steps == 0:
        _, held = options_on(2, stage, **given)
    if advice.startswith("bucket"):
        change = {"bucket_bytes": round(float(option.write.partition("=")[2]) * 2**20)}
    _, left = options_on(2, then, **{**given, **change})
    assert not option.is_most
    assert held - left == pytest.approx(option.nbytes, rel=ROUNDING)


def test_an_average_is_divided_and_offloaded_with_the_optimizers_state() -> None:
    def job(comm: Comm) -> tuple[dict[str, int], int]:
        engine = begin(comm, 1)
        average = Average(engine, get_ema_avg_fn(0.9))
        options = options_of(engine, 1, bytes_to_rest(engine, engine.optimizers, HOST), 7)
        assert not average.updates
        return {option.write: option.nbytes for option in options}, sum(p.numel() for p in engine.module.parameters())

    options, psi = ThreadWorld(2).run(job)[0]
    assert options["offload=Offload(optimizer='cpu')"] == pytest.approx(12 * psi / 2, rel=ROUNDING)


def test_what_was_asked_for_is_read_to_its_last_digit() -> None:
    told = "Tried to allocate {} . GPU 0 has a total capacity of 79.14 GiB"
    for text, nbytes in (("1.50 GiB", 3 * 2**29), ("512 bytes", 512), ("0.25 KiB", 256)):
        assert asked_bytes(torch.OutOfMemoryError(told.format(text))) == nbytes


def test_ranks_that_share_all_modules_are_told_of_twice_as_many() -> None:
    mesh = SimpleNamespace(shard=SimpleNamespace(size=1), world=SimpleNamespace(size=4))
    engine: Any = SimpleNamespace(mesh=mesh)
    assert [option.write for option in _stages_of(engine, 1, {})] == ["Trainer(devices=8) and stage=3"]


def test_on_one_rank_a_second_one_frees_half() -> None:
    options, held = options_on(1, 2)
    assert options["Trainer(devices=2) and stage=3"].nbytes == pytest.approx(held / 2, rel=ROUNDING)


def test_only_what_is_not_on_yet_is_advised() -> None:
    everything = Offload(optimizer="cpu", parameters="cpu")
    on = {"offload": everything, "activation_checkpointing": ActivationCheckpointing(), "prefetch": 0}
    options, _ = options_on(2, 3, **on)
    assert {*options} == {"half the batch with twice the accumulate_grad_batches"}
    assert options["half the batch with twice the accumulate_grad_batches"].nbytes == 10**6 // 2
    options, _ = options_on(2, 3, **{**on, "activation_checkpointing": None})
    assert options["activation_checkpointing=True"] == Option("activation_checkpointing=True", 10**6, is_most=True)


def test_a_stage_that_would_be_refused_is_not_advised() -> None:
    options, _ = options_on(2, 1, unit_classes=("Absent",))
    assert "stage=2" in options
    assert "stage=3" not in options


def test_where_host_and_device_are_one_memory_state_goes_to_disk() -> None:
    options, _ = options_on(2, 2, machine=Machine())
    assert "offload=Offload(optimizer='nvme', path=...)" in options


def test_where_no_backward_follows_only_a_smaller_batch_has_less_activations() -> None:
    def job(comm: Comm) -> list[Option]:
        return options_of(begin(comm, 3), 3, {}, 10**6, trains=False)

    *others, last = ThreadWorld(2).run(job)[0]
    assert last == Option("a smaller batch", 10**6, is_most=True)
    assert all(option.nbytes <= 0 or "=" in option.write for option in others)
    assert not any("activation" in option.write or "half" in option.write for option in others)


def test_beside_ddp_state_and_averages_can_be_divided_or_offloaded() -> None:
    under_ddp = {Category.OPTIMIZER_STATE: 800, Category.AVERAGE: 400, Category.GRADIENT: 400, Category.PARAMETER: 400}
    for ranks, told, freed in ((1, "2 ranks", 1000), (4, "4 ranks", 1500)):
        divided, offloaded, smaller = options_beside_ddp(under_ddp, ranks, 7)
        assert divided == Option(f"strategy='zero_stage_3' on {told}", freed)
        assert offloaded.nbytes == 1200
        assert (smaller.nbytes, smaller.is_most) == (7, True)


def test_a_model_without_blocks_is_not_told_to_recompute_them() -> None:
    def job(comm: Comm) -> list[Option]:
        module = nn.Linear(4, 4)
        engine = Engine(module, [torch.optim.AdamW(module.parameters())], stage=2, comm=comm)
        return options_of(engine, 2, {}, 8)

    assert not any("activation" in option.write for option in ThreadWorld(2).run(job)[0])


def test_where_the_host_runs_out_beside_a_device_what_is_offloaded_goes_to_disk() -> None:
    def job(comm: Comm) -> tuple[list[Option], int]:
        engine = begin(comm, 2, offload=CPU)
        train(engine)
        return host_options_of(engine, engine.bytes_by_category()), engine.ledger.tiers[Tier.HOST]

    (disk, kept), there = ThreadWorld(2).run(job)[0]
    assert disk == Option("Offload(optimizer='nvme', path=...)", there)
    assert kept.nbytes == 0


def test_where_the_host_runs_out_parameters_and_activations_that_are_there_count() -> None:
    def job(comm: Comm) -> list[Option]:
        offload = Offload(optimizer="cpu", parameters="cpu")
        engine = begin(comm, 3, offload=offload, activation_checkpointing=ActivationCheckpointing(offload=True))
        train(engine)
        held = {"parameter (host)": 10, "activation checkpoint (host)": 20, "parameter": 1, "activation checkpoint": 2}
        return host_options_of(engine, held)

    _, parameters, kept = ThreadWorld(2).run(job)[0]
    assert parameters == Option("Offload(parameters='nvme', path=...)", 10)
    assert kept.nbytes == 20


def test_of_what_is_held_beside_categories_those_of_the_other_memory_are_no_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(advice, "resident_bytes", lambda: 100)
    booked = {"parameter": 10, "master (host)": 30}
    assert bytes_beside(booked, HOST, HOST) == 90
    assert bytes_beside(booked, torch.device("cuda"), HOST) == 70
    assert bytes_beside({"parameter": 1000}, HOST, HOST) == 0


# --- what has grown


def test_what_has_grown_is_told_beside_what_rested_after_the_last_step() -> None:
    def job(comm: Comm) -> list[dict[str, int]]:
        engine = begin(comm, 1, activation_checkpointing=ActivationCheckpointing())
        grown = [engine.bytes_grown()]
        for _ in range(2):
            with engine.forward():
                loss = engine.module(torch.ones(2, 192)).square().mean()
            grown.append(engine.bytes_grown())
            with engine.backward():
                loss.backward()
            grown.append(engine.bytes_grown())
            engine.optimizers[0].step()
            grown.append(engine.bytes_grown())
        return [{name: nbytes for name, nbytes in each.items() if nbytes > 0} for each in grown]

    set_up, forward, backward, rests, *second = ThreadWorld(2).run(job)[0]
    kept = {"activation checkpoint": 6 * 2 * 192 * 4}  # the input of each block
    assert set_up == rests == {}
    assert forward == second[0] == kept
    assert backward == second[1] == second[2] == {}


def test_gradients_of_a_single_rank_have_grown_in_the_first_backward_alone() -> None:
    def job(comm: Comm) -> list[int]:
        engine, grown = begin(comm, 2), []
        for _ in range(2):
            with engine.forward():
                loss = engine.module(torch.ones(2, 192)).square().mean()
            with engine.backward():
                loss.backward()
            grown.append(engine.bytes_grown()[Category.GRADIENT])
            engine.optimizers[0].step()
        return [*grown, sum(p.nbytes for p in engine.module.parameters())]

    first, later, whole = ThreadWorld(1).run(job)[0]
    assert (first, later) == (whole, 0)


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_that_has_failed_anywhere_still_knows_what_it_holds(stage: int, where: str) -> None:
    def fail(engine: Engine) -> None:
        blocks: Any = engine.module
        with engine.forward():
            x = blocks[:3](torch.ones(2, 192))
            if where == "forward":
                raise MemoryError
            loss = blocks[3:](jobs.Fails.apply(x) if where == "backward" else x).square().mean()
        with engine.backward():
            loss.backward()
        with engine.runner.step(engine.optimizers[0]), engine.runner.stepping.step(engine.optimizers[0]):
            raise MemoryError

    def job(comm: Comm) -> tuple[Held, list[Option]]:
        engine = begin(comm, stage)
        train(engine)
        with pytest.raises(MemoryError):
            fail(engine)
        held = held_by([engine], HOST, HOST, 0)
        return held, options_of(engine, stage, held.planned, 10)

    for held, options in ThreadWorld(2).run(job):
        states = held.by_category[Category.OPTIMIZER_STATE]
        assert held.planned[Category.OPTIMIZER_STATE] == states > 0
        moved = states + (held.planned[Category.GRADIENT] if stage > 1 else 0)
        assert Option("offload=Offload(optimizer='cpu')", moved) in options
        assert held.grown[Category.OPTIMIZER_STATE] == held.grown[Category.PARAMETER] == 0


@pytest.mark.skipif(bool(sim.WHY_NOT), reason=sim.WHY_NOT)
def test_nothing_is_allocated_on_a_device_that_has_run_out(sim_process: RankPool) -> None:
    (found,) = sim_process.run(sim_jobs.on_sim, "LATE", jobs.held_on_a_full_device)
    assert found["allocated"] == 0
    assert found["beside"] == found["activations"] > 0
    assert "optimizer state" in found["planned"]


# --- errors


def test_an_optimizers_own_request_counts_as_its_state() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    parameter.grad = torch.ones(2)

    def zeros_like(*_: Any, **__: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros_like", zeros_like)
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
    assert is_out_of_memory(caught.value)
    told = advice_for(caught.value, "here", Held({Category.PARAMETER: 8}, {}, 0), [], "-")
    assert "grew most: optimizer state, by 4.1 kB" in told
    assert "frees most: a smaller batch" in told


@pytest.mark.parametrize("where", ["hook", "step"])
def test_a_request_in_hooks_or_in_a_step_that_is_not_torchs_counts_as_no_state(where: str) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise MemoryError

    kind = Own if where == "step" else torch.optim.SGD
    optimizer = kind([nn.Parameter(torch.ones(2))], lr=0.1)
    if where == "hook":
        optimizer.register_step_pre_hook(jobs._raise)
    with pytest.raises(MemoryError) as caught:
        optimizer.step()
    assert asked_for(caught.value) == BESIDE


def test_five_lines_set_what_is_held_beside_what_is_to_come_and_name_three_options() -> None:
    held = Held(
        {"parameter": 2 * 10**9, "bucket": 10**8},
        {BESIDE: 60 * 10**9, "bucket": 10**7},
        61 * 10**9,
        planned={"parameter": 2 * 10**9, "optimizer state": 4 * 10**9},
        total=80 * 10**9,
    )
    options = [
        Option("small", 1),
        Option("second", 10**9),
        Option("most", 10**10, is_most=True),
        Option("third", 10**8),
        Option("none", -5),
    ]
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has ...")
    assert advice_for(error, "on rank 1, in step 2", held, options, "do this").splitlines() == [
        "Out of memory on rank 1, in step 2: 1.07 GB more were asked for",
        f"  grew most: {BESIDE}, by 61.1 GB",
        "  holds parameter 2 GB, bucket 100 MB, optimizer state 0 B of 4 GB to come; 61 GB beside them, of 80 GB",
        "  frees most: most (at most 10 GB), second (1 GB), third (100 MB)",
        "  to try without a GPU: do this",
    ]


def test_the_command_names_a_model_that_can_be_imported() -> None:
    assert command_for(jobs.Greedy(), 4, HOST) == (
        "lightning-zero plan advice_jobs:Greedy --batch ... --ranks 4 --device-memory ..."
    )
    local = type("Local", (nn.Module,), {"__qualname__": "f.<locals>.Local"})()
    assert command_for(local, 4, HOST).startswith("lightning-zero plan MODEL ")


def test_other_errors_are_no_business_of_it() -> None:
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(MemoryError())
    lost = RankTimeoutError("Rank 1 failed (OutOfMemoryError: CUDA out of memory)", "key")
    assert not is_out_of_memory(lost), "that rank has told it"


def test_whose_memory_has_run_out_is_told_by_the_error() -> None:
    gpu = torch.device("cuda", 0)
    assert memory_of(torch.OutOfMemoryError("CUDA out of memory"), gpu) == gpu
    assert memory_of(RuntimeError("CUDA error: out of memory"), gpu) == gpu
    assert memory_of(RuntimeError("DefaultCPUAllocator: can't allocate memory"), gpu) == HOST
    assert memory_of(MemoryError(), gpu) == HOST


def test_at_set_up_two_lines_say_what_to_try() -> None:
    strategy = Mock(_engines=[Mock(closed=True)], root_device=HOST, world_size=2)
    assert advise(strategy, MemoryError(), "on rank 0, in step 0", jobs.Greedy()).splitlines() == [
        "Out of memory on rank 0, in step 0, at set-up",
        "  to try without a GPU: lightning-zero plan advice_jobs:Greedy --batch ... --ranks 2 --device-memory ...",
    ]


def test_advice_is_given_once_and_raises_nothing() -> None:
    error = MemoryError()
    with listening(jobs.LOGGER) as said:
        for _ in range(2):
            tell_once(error, lambda: "advice")
        tell_once(MemoryError(), lambda: str(1 / 0))
    assert said == ["advice"]


# --- whole runs


@pytest.mark.parametrize(("strategy", "asked"), [({"stage": 1}, True), ({"stage": 2}, False), (DDP, True)])
def test_five_lines_say_what_has_grown_and_what_frees_most(strategy: Any, asked: bool, two_ranks: RankPool) -> None:
    for rank, run in enumerate(two_ranks.run(jobs.run_out, strategy, asked=asked)):
        assert "can't allocate memory" in run["error"]
        (said,) = run["said"]
        lines = said.splitlines()
        assert len(lines) == 5
        assert lines[0] == f"Out of memory on rank {rank}, in step 1: 1,000 TB more were asked for"
        assert lines[1].startswith(f"  grew most: {BESIDE}, by 1,000 TB")
        assert lines[2].startswith("  holds parameter ")
        assert lines[3].startswith("  frees most: ")
        assert lines[4].endswith("plan advice_jobs:Greedy --batch ... --ranks 2 --device-memory ...")


def test_ranks_that_meet_a_limit_of_the_system_say_that_activations_have_grown() -> None:
    runs, errors = run_alone(2, jobs.fit_in_limited_memory, {"stage": 2})
    assert errors == [None, None]
    for rank, run in enumerate(runs):
        assert run["kind"] is RuntimeError
        assert "can't allocate memory" in run["error"]
        assert run["steps"] == 1
        (said,) = run["said"]
        assert said.startswith(f"Out of memory on rank {rank}, in step 1: 16.8 MB more were asked for\n")
        grown = float(said.partition(f"grew most: {BESIDE}, by ")[2].split(" MB")[0])
        assert 0.5 * jobs.SPARE < grown * 1e6 < 1.5 * jobs.SPARE
        assert f"frees most: activation_checkpointing=True (at most {grown:.3g} MB), half the batch" in said


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "step"])
@pytest.mark.parametrize("stage", [2, 3])
def test_under_fabric_it_is_said_of_an_error_that_ends_the_process(stage: int, where: str, two_ranks: RankPool) -> None:
    for rank, run in enumerate(two_ranks.run(jobs.loop_that_runs_out, {"stage": stage}, where)):
        assert run["caught"] == [], "user code may go on"
        (said,) = run["said"]
        assert said.startswith(f"Out of memory on rank {rank}, in step 1\n")
        assert run["printed"].splitlines()[-1].removeprefix(f"[rank{rank}]: ") == "MemoryError"


def test_of_several_strategies_the_newest_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one may be that of a run which has ended, and would tell of that."""
    asked: list[str] = []

    class Asked:
        def __init__(self, name: str) -> None:
            self.name = name

        def advise_on(self, error: BaseException) -> None:
            asked.append(self.name)

    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    kept = [Asked("older"), Asked("newer")]
    for adviser in kept:
        advice.advise_on_uncaught(adviser)
    sys.excepthook(MemoryError, MemoryError(), None)
    assert asked == ["newer", "older"]


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
import torch, advice_jobs, fabric_jobs
from torch.utils.data import DataLoader
{run}
"""
FIT = """
advice_jobs.trainer({'stage': 2}, 1).fit(advice_jobs.Deep(), DataLoader(advice_jobs.batches(), batch_size=None))
"""
FABRIC = """
made = fabric_jobs.fabric({'stage': 2}, 1)
model, optimizer = fabric_jobs.set_up(made)
torch.empty(10**15, dtype=torch.uint8)
"""


@pytest.mark.parametrize("run", [FIT, FABRIC], ids=["Trainer", "Fabric"])
def test_it_comes_before_the_traceback_which_is_that_of_the_error(run: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), run=run.strip()))
    with warm.starts():
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    lines = [line.removeprefix("[rank0]: ") for line in done.stderr.splitlines()]
    assert sum(line.startswith("Out of memory") for line in lines) == 1
    told = next(at for at, line in enumerate(lines) if line.startswith("Out of memory"))
    raised = lines.index("Traceback (most recent call last):")
    assert told < raised
    assert lines[told + 4].startswith("  to try without a GPU: ")
    assert lines[-1].startswith("RuntimeError: ")
    assert "can't allocate memory" in lines[-1]
