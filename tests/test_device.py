"""The engine on a device with streams: the CPU's bits, no race, and no wait of the host that is not named here.

The device is the simulated one (`sim`), whose streams run as late as a device may, or side streams at once. On it every
access that no wait orders is an error, so each of these tests is also one of all waits on its way.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import sim
import sim_jobs
import warm
from compare import differing
from cover import name_of, pairwise
from lightning_zero import device
from lightning_zero.config import ActivationCheckpointing, Offload
from lightning_zero.device import to_host, untested
from lightning_zero.rehearsal.memory import Phase
from ranks import RankPool

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(bool(sim.WHY_NOT), reason=sim.WHY_NOT)


def offload_of(tier: str, stage: int, folder: Path) -> Offload | None:
    match tier:
        case "host":
            return Offload("cpu")
        case "host, and parameters":
            return Offload("cpu", parameters="cpu" if stage == 3 else None)
        case "disk":
            return Offload("nvme", path=folder)
    return None


def train(sim_process: RankPool, policy: str, ranks: int, **setting: Any) -> tuple[list[Any], list[Any]]:
    """What each rank has found on the simulated device, and on the CPU."""
    start = sim_jobs.tower()
    (found,) = sim_process.run(sim_jobs.on_sim, policy, sim_jobs.train_on_ranks, ranks, start, **setting)
    return found, on_cpu(ranks, **setting)


@cache
def on_cpu(ranks: int, **setting: Any) -> list[Any]:
    """The reference of all policies."""
    return sim_jobs.train_on_ranks(CPU, ranks, sim_jobs.tower(), **setting)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert differing(mine["weights"], theirs["weights"]) == []


CASES = pairwise(
    [0, 1, 2, 3],
    ["device", "host", "host, and parameters", "disk"],
    ["32-true", "bf16-mixed", "16-mixed"],
    [False, True],
    [1, 2, 4],
    [1, 2],
    ["LATE", "SIDES_AT_ONCE"],
)


@pytest.mark.parametrize(("stage", "tier", "precision", "clips", "ranks", "micro", "policy"), CASES, ids=name_of)
def test_a_training_has_the_cpus_bits(
    stage: int, tier: str, precision: str, clips: bool, ranks: int, micro: int, policy: str, sim_process: RankPool,
    tmp_path: Path,
) -> None:  # fmt: skip
    setting: dict[str, Any] = {"stage": stage, "precision": precision, "clips": clips, "micro": micro}
    assert_same(*train(sim_process, policy, ranks, **setting, offload=offload_of(tier, stage, tmp_path)))


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 2, "step_in_backward": True},
        {"stage": 3, "step_in_backward": True, "offload": Offload("cpu", parameters="cpu")},
        {"stage": 1, "late_publish_bytes": 0},
        {"stage": 2, "late_publish_bytes": 0, "precision": "bf16-mixed", "offload": Offload("cpu", fraction=0.5)},
        {"stage": 3, "accumulation": "local", "micro": 2, "clips": True},
        {"stage": 3, "prefetch": 2, "units": "modules", "overlap": False},
        {"stage": 2, "replicate_size": 2, "ranks": 4, "precision": "bf16-mixed", "clips": True},
        {"stage": 3, "replicate_size": 2, "ranks": 4, "offload": Offload("cpu")},
        {"stage": 3, "granularity": "tensor", "offload": Offload("cpu")},
        {"stage": 2, "reduce_dtype": torch.bfloat16, "precision": "bf16-mixed"},
        {"stage": 3, "param_dtype": torch.bfloat16},
        {"stage": 2, "kernel": "of one kind"},
        {"stage": 3, "activation_checkpointing": ActivationCheckpointing("Sequential", offload=True)},
        {"stage": 1, "activation_checkpointing": ActivationCheckpointing("Sequential", offload=True, contiguous=True)},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["LATE", "SIDES_AT_ONCE"])
def test_each_option_has_the_cpus_bits(policy: str, options: dict[str, Any], sim_process: RankPool) -> None:
    options = dict(options)
    ranks = options.pop("ranks", 2)
    assert_same(*train(sim_process, policy, ranks, **options))


@pytest.mark.parametrize("in_backward", [False, True])
def test_torchs_choice_of_the_kernel_is_still_open_after_a_step_on_the_host(
    in_backward: bool, sim_process: RankPool
) -> None:
    """Else the one that the host takes would be saved, and go to devices for which torch has another."""
    setting = {"stage": 2, "kernel": "torch's choice", "offload": Offload("cpu"), "step_in_backward": in_backward}
    (found,) = sim_process.run(sim_jobs.on_sim, "LATE", sim_jobs.train_on_ranks, 2, sim_jobs.tower(), **setting)
    assert [rank["fused"] for rank in found] == [None, None]


@pytest.mark.parametrize("offload", [Offload("cpu"), Offload("cpu", fraction=0.5)], ids=["all", "half"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_on_the_host_takes_options_that_are_tensors_of_the_device(
    in_backward: bool, offload: Offload, sim_process: RankPool
) -> None:
    """A fused kernel would copy them itself, and read them before they have come; others refuse them."""
    setting = {"kernel": "options on the device", "stage": 2, "step_in_backward": in_backward}
    assert_same(*train(sim_process, "LATE", 2, **setting, offload=offload))


@pytest.mark.parametrize("optimizer", ["AdamW", "NAdam"])
def test_what_a_device_could_capture_is_stepped_on_the_host(optimizer: str, sim_process: RankPool) -> None:
    """There torch refuses `capturable`."""
    setting = {"stage": 2, "optimizer": optimizer, "kernel": "capturable", "offload": Offload("cpu")}
    assert_same(*train(sim_process, "LATE", 2, **setting))


PARTED = ActivationCheckpointing("Sequential", partition=True)
PARTED_AWAY = ActivationCheckpointing("Sequential", partition=True, offload=True)
PARTED_IN_ONE = ActivationCheckpointing("Sequential", partition=True, offload=True, contiguous=True)


@pytest.mark.parametrize(
    ("ranks", "policy", "options"),
    [
        (4, "LATE", {"stage": 3, "precision": "16-mixed", "clips": True}),
        (4, "SIDES_AT_ONCE", {"stage": 3, "offload": Offload("cpu", parameters="cpu")}),
        (4, "SIDES_AT_ONCE", {"stage": 2, "precision": "bf16-mixed", "micro": 2, "clips": True, "replicate_size": 2}),
        (2, "SIDES_AT_ONCE", {"stage": 1, "activation_checkpointing": PARTED}),
        (4, "LATE", {"stage": 3, "activation_checkpointing": PARTED_AWAY}),
        (2, "LATE", {"stage": 2, "activation_checkpointing": PARTED_IN_ONE, "clips": True}),
    ],
    ids=str,
)
def test_blocks_that_are_divided_among_tensor_parallel_ranks_have_the_cpus_bits(
    ranks: int, policy: str, options: dict[str, Any], sim_process: RankPool
) -> None:
    """DTensor's own collectives run on the device, too."""
    assert_same(*train(sim_process, policy, ranks, tensor_parallel_size=2, **options))


EVENTS = [
    "ranks use different modules", "a rank reads alone", "a step fails", "a checkpoint is saved", "layers are thawed",
]  # fmt: skip


@pytest.mark.parametrize(
    ("event", "stage", "tier", "precision", "policy"),
    pairwise(
        EVENTS, [3, 2, 1, 0], ["device", "host", "host, and parameters"], ["32-true", "bf16-mixed"],
        ["LATE", "SIDES_AT_ONCE"],
    ),
    ids=name_of,
)  # fmt: skip
def test_what_happens_in_the_middle_has_the_cpus_bits(
    event: str, stage: int, tier: str, precision: str, policy: str, sim_process: RankPool, tmp_path: Path
) -> None:
    setting: dict[str, Any] = {"stage": stage, "precision": precision, "event": event, "path": tmp_path / "saved"}
    found, expected = train(sim_process, policy, 2, **setting, offload=offload_of(tier, stage, tmp_path))
    assert_same(found, expected)
    if event == "a checkpoint is saved":
        assert differing(found[0]["saved"], expected[0]["saved"]) == []


@pytest.mark.parametrize(
    ("event", "division", "stage", "micro", "policy"),
    [
        # One of two tensor-parallel ranks cannot read its part alone.
        (event, "replicate_size" if event == "a rank reads alone" else division, *rest)
        for event, division, *rest in pairwise(
            [None, *EVENTS], ["replicate_size", "tensor_parallel_size"], [3, 2, 1], [1, 3], ["LATE", "SIDES_AT_ONCE"]
        )
    ],
    ids=name_of,
)
def test_ranks_with_several_communicators_launch_collectives_in_one_order(
    event: str | None, division: str, stage: int, micro: int, policy: str, sim_process: RankPool, tmp_path: Path
) -> None:
    """The simulated device runs one at a time, of all communicators: launched in other orders on two ranks, each would
    wait for what stands behind the other."""
    setting: dict[str, Any] = {"stage": stage, "micro": micro, "clips": True, division: 2}
    assert_same(*train(sim_process, policy, 4, **setting, event=event, path=tmp_path / "saved"))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_edits_that_raise_no_version_reach_masters_in_any_tier(
    stage: int, tier: str, ranks: int, sim_process: RankPool, tmp_path: Path
) -> None:
    """As Lightning's averages of weights write them: `p.data.copy_(average)`."""
    setting = {"stage": stage, "event": "weights are edited through p.data"}
    assert_same(*train(sim_process, "LATE", ranks, **setting, offload=offload_of(tier, stage, tmp_path)))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("stage", "tier"), [(0, "device"), (1, "host"), (2, "host"), (2, "disk"), (3, "device")])
def test_what_is_added_to_an_average_and_not_reduced_reaches_it_in_any_tier(
    stage: int, tier: str, ranks: int, sim_process: RankPool, tmp_path: Path
) -> None:
    setting = {"stage": stage, "event": "a penalty is not reduced", "offload": offload_of(tier, stage, tmp_path)}
    assert_same(*train(sim_process, "LATE", ranks, **setting))


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_collective_of_users_may_still_write_to_a_gradient_when_its_call_is_over(
    stage: int, tier: str, sim_process: RankPool, tmp_path: Path
) -> None:
    setting = {"stage": stage, "event": "gradients are summed by users", "offload": offload_of(tier, stage, tmp_path)}
    assert_same(*train(sim_process, "LATE", 2, **setting))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_collective_of_users_may_still_write_to_weights_when_its_call_is_over(
    stage: int, precision: str, sim_process: RankPool
) -> None:
    setting = {"stage": stage, "event": "weights are summed by users", "precision": precision}
    assert_same(*train(sim_process, "LATE", 2, **setting))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_edits_of_dtensors_that_raise_no_version_reach_masters_on_the_host(stage: int, sim_process: RankPool) -> None:
    setting = {"stage": stage, "event": "weights are edited through p.data", "tensor_parallel_size": 2}
    assert_same(*train(sim_process, "LATE", 2, **setting, offload=Offload("cpu")))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_a_steady_step_the_host_waits_for_nothing_but_the_verdict_of_a_scaler(
    stage: int, clips: bool, precision: str, sim_process: RankPool
) -> None:
    setting = {"stage": stage, "clips": clips, "precision": precision, "steps": 5}
    (found,) = sim_process.run(sim_jobs.on_sim, "LATE", sim_jobs.train_on_ranks, 2, sim_jobs.tower(), **setting)
    expected = {"look again in shards/norm.py:overflow": 1} if precision == "16-mixed" else {}
    for each in found:
        if stage == 3:  # whether a rank has left the plan, which comes with gathers that the device has done by then
            asked = each["waits"].pop("look again in wire/native.py:has_divergence")
            assert 0 < asked <= 2 * each["units"]  # in forward and in backward
        assert each["waits"] == expected


@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_a_steady_step_the_host_waits_for_no_buffers_of_rank_0(
    stage: int, micro: int, sim_process: RankPool
) -> None:
    """Neither where ranks have asked each other before they reduce, between two forwards."""
    setting: dict[str, Any] = {"stage": stage, "micro": micro, "steps": 5}
    start = sim_jobs.averaging_tower()
    (found,) = sim_process.run(sim_jobs.on_sim, "LATE", sim_jobs.train_on_ranks, 2, start, **setting)
    for mine, theirs in zip(found, sim_jobs.train_on_ranks(CPU, 2, start, **setting), strict=True):
        assert [wait for wait in mine["waits"] if "has_divergence" not in wait] == []
        assert mine["losses"] == theirs["losses"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_for_edits_of_weights_that_rest_in_two_bytes_the_host_waits_twice_for_all_of_a_group(
    stage: int, sim_process: RankPool
) -> None:
    """A module reads them itself, and might have edited what it was lent."""
    setting: dict[str, Any] = {"stage": stage, "precision": "bf16-mixed", "steps": 5}
    start = sim_jobs.normed_tower()
    (found,) = sim_process.run(sim_jobs.on_sim, "LATE", sim_jobs.train_on_ranks, 2, start, **setting)
    for mine, theirs in zip(found, sim_jobs.train_on_ranks(CPU, 2, start, **setting), strict=True):
        waits = {wait: times for wait, times in mine["waits"].items() if "has_divergence" not in wait}
        assert {*waits} == {"synchronize in shards/edits.py:_differ"}
        assert sum(waits.values()) <= 2 * mine["groups"]
        assert mine["losses"] == theirs["losses"]


CHANGES = {"none": {}, "an edit": {"event": "gradients are edited"}, "an average that is added to": {"micro": 2}}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_gradients_that_leave_the_device_are_measured_there_unless_they_change_on_the_host(
    tier: str, change: str, sim_process: RankPool, tmp_path: Path
) -> None:
    setting = {"stage": 2, "clips": True, "offload": offload_of(tier, 2, tmp_path), **CHANGES[change]}
    start = sim_jobs.tower()
    (on_host,) = sim_process.run(sim_jobs.on_sim, "LATE", sim_jobs.measured_on_host, 2, start, **setting)
    assert bool(on_host) == (change != "none")
    assert_same(*train(sim_process, "LATE", 2, **setting))


@pytest.mark.parametrize("first", ["send", "send beside compute", "write"])
@pytest.mark.parametrize("then", ["send", "read", "open", "edit", "write from the host", "write from the device"])
def test_an_array_is_not_used_before_copies_from_and_to_it_are_over(
    first: str, then: str, sim_process: RankPool
) -> None:
    (found,) = sim_process.run(sim_jobs.on_sim, "LATE", sim_jobs.array_that_is_used_at_once, first, then)
    before = 2.0 if first == "write" else 1.0
    after = {"send": before, "read": before, "open": 3.0, "edit": before + 3.0}.get(then, 3.0)
    assert found == [0.0 if first == "write" else 1.0, before if then in ("send", "read") else 0.0, after]


@pytest.mark.parametrize("policy", ["LATE", "SIDES_AT_ONCE"])
def test_copies_of_what_nobody_edits_are_forgotten_when_they_are_over(policy: str, sim_process: RankPool) -> None:
    (found,) = sim_process.run(sim_jobs.on_sim, policy, sim_jobs.array_that_is_only_sent)
    assert found <= 2


def test_memory_of_a_checkpoint_that_is_dropped_on_its_way_is_not_used_before_it_has_come(
    sim_process: RankPool,
) -> None:
    assert sim_process.run(sim_jobs.on_sim, "LATE", sim_jobs.checkpoint_that_is_dropped) == [2.0]


@pytest.mark.parametrize("policy", ["LATE", "SIDES_AT_ONCE"])
def test_an_input_may_be_edited_once_the_block_is_over_that_recomputes_from_a_copy(
    policy: str, sim_process: RankPool
) -> None:
    ((expected, found),) = sim_process.run(sim_jobs.on_sim, policy, sim_jobs.input_that_is_edited_after_its_block)
    assert found == expected


@pytest.mark.parametrize("policy", ["LATE", "SIDES_AT_ONCE"])
def test_a_block_that_recomputes_edits_buffers_once_also_through_their_data(policy: str, sim_process: RankPool) -> None:
    ((expected, found),) = sim_process.run(sim_jobs.on_sim, policy, sim_jobs.buffers_edited_through_data)
    assert found == expected


def test_copies_of_buffers_that_a_block_has_not_changed_are_freed_once_the_device_has_told_so(
    sim_process: RankPool,
) -> None:
    (found,) = sim_process.run(sim_jobs.on_sim, "LATE", sim_jobs.bytes_of_unchanged_buffers)
    copied = 2 * 4 * 4096 + 8
    assert found[0] == copied
    assert found[1] >= copied  # nobody waits for the device
    assert found[-1] == 0


@pytest.mark.parametrize("policy", ["LATE", "SIDES_AT_ONCE"])
def test_pinned_memory_has_its_own_size_is_not_copied_by_a_fork_and_goes_back(
    policy: str, sim_process: RankPool
) -> None:
    (found,) = sim_process.run(sim_jobs.on_sim, policy, sim_jobs.pinned_memory)
    assert found == {"booked": 4004 + 16, "pinned": True, "forks": False, "copied": 1001.0, "left": (16, 0)}


def test_pinned_memory_that_outlives_its_ledger_is_given_back_by_the_next(sim_process: RankPool) -> None:
    """The system would give the address of what it takes back to the next one, which the device has already."""
    (found,) = sim_process.run(sim_jobs.on_sim, "LATE", sim_jobs.pinned_memory_without_its_ledger)
    assert found == {"pinned": [True] * 3, "left over": 3, "after": 0}


def test_seconds_that_ranks_wait_are_those_of_the_device(sim_process: RankPool) -> None:
    """Not those in which the host launches the waits: links that are a thousand times slower are waited for as long."""
    start = sim_jobs.tower()
    slow, fast = (
        min(sim_process.run(sim_jobs.on_sim, "LATE", sim_jobs.seconds_waited, start, link)[0]) for link in (1e3, 1e6)
    )
    sent = 2 * sum(
        parameter.nbytes for parameter in start.parameters()
    )  # two steps, of which each rank sends half twice
    assert sent / 2e3 < slow < 2 * sent / 1e3  # some is sent while nobody waits, and some is sent beside: set-up
    assert slow == pytest.approx(1000 * fast, rel=0.2)


FROM_HOST = ActivationCheckpointing("Linear", offload=True)
TAKEN: list[tuple[int, dict[str, Any]]] = [
    (1, {"stage": 2, "offload": Offload("cpu")}),
    (2, {"stage": 0}),
    (2, {"stage": 1, "precision": "bf16-mixed"}),
    (2, {"stage": 1, "offload": Offload("cpu")}),
    (2, {"stage": 2}),
    (2, {"stage": 2, "activation_checkpointing": FROM_HOST}),
    (2, {"stage": 2, "offload": Offload("cpu"), "precision": "bf16-mixed"}),
    (2, {"stage": 3}),
    (2, {"stage": 3, "offload": Offload("cpu"), "precision": "bf16-mixed"}),
    (2, {"stage": 3, "offload": Offload("cpu", parameters="cpu")}),
]


def taken(sim_process: RankPool, ranks: int, setting: dict[str, Any]) -> list[dict[str, sim_jobs.Bytes]]:
    """What each rank has taken on the simulated device."""
    (found,) = sim_process.once(sim_jobs.on_sim, "LATE", sim_jobs.bytes_of_training, ranks, **setting)
    return found


@pytest.mark.parametrize(("ranks", "setting"), TAKEN, ids=str)
def test_the_ledger_has_what_the_device_has_given_out(
    ranks: int, setting: dict[str, Any], sim_process: RankPool
) -> None:
    for each in taken(sim_process, ranks, setting):
        assert each["at rest"].counted == pytest.approx(each["at rest"].allocated, rel=0.03)


@pytest.mark.parametrize(("ranks", "setting"), TAKEN, ids=str)
def test_the_peak_of_each_phase_is_what_the_device_has_given_out_at_most(
    ranks: int, setting: dict[str, Any], sim_process: RankPool
) -> None:
    """The ledger of an engine has what is the package's own. This one follows all tensors, as in a rehearsal: also
    activations, what operations make in between, and the batch. It is right to the byte, but for what blocks of the
    device are larger; and so is a rehearsal, which computes nothing and has no device."""
    for rank, each in enumerate(taken(sim_process, ranks, setting)):
        rehearsed = sim_jobs.rehearsed_training(ranks, rank, **setting)
        for phase in sim_jobs.IN_A_STEP:
            allocated, requested, counted = each[phase]
            assert counted == requested, phase
            assert counted == pytest.approx(allocated, rel=0.03), phase
            # Messages between ranks lie on the host, which a rehearsal does not tell from the device.
            messages = 1024 if phase is Phase.STEP else 0
            assert 0 <= rehearsed[phase] - requested <= messages, phase


def traced(folder: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """The spans of a step on the simulated device, and what is printed of it."""
    command = [sys.executable, "benchmarks/trace.py", "--folder", str(folder), *options]
    root = Path(__file__).parents[1]
    with warm.starts():
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "trace.json").read_text())["traceEvents"], done.stdout


def test_a_step_is_drawn_with_its_lanes(tmp_path: Path) -> None:
    events, told = traced(tmp_path, "--ways", "2,3+cpu", "--blocks", "2", "--width", "16")
    lanes = {way: {event["tid"] for event in events if event["pid"] == f"{way}: rank 0"} for way in ("2", "3+cpu")}
    assert all({"host", "compute", "communication", "beside compute"} <= found for found in lanes.values())
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    assert all(lane in told for lane in ("host", "compute", "communication"))


def test_gradients_of_one_rank_leave_for_the_host_beside_compute(tmp_path: Path) -> None:
    events, _ = traced(tmp_path, "--ranks", "1", "--ways", "2+cpu", "--blocks", "6", "--width", "64")
    computes, copies = ([event for event in events if event["tid"] == lane] for lane in ("compute", "beside compute"))
    ends = [(one["ts"], one["ts"] + one["dur"]) for one in computes]
    hidden = sum(
        max(0, min(one["ts"] + one["dur"], end) - max(one["ts"], begin)) for one in copies for begin, end in ends
    )
    assert hidden > 0.5 * sum(one["dur"] for one in copies) > 0


def test_a_device_that_was_never_tried_is_told_in_one_line() -> None:
    assert untested(torch.device("cpu")) is untested(torch.device("cuda", 1)) is None
    assert "never tried on 'xpu' devices" in str(untested(torch.device("xpu")))


def test_a_copy_to_the_host_by_way_of_a_second_tensor_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch copies from that tensor to the target at once, whatever has arrived in it."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(device, "has_streams", lambda _: True)
    monkeypatch.setattr(device, "record", lambda _: Mock(query=lambda: False))
    source = torch.ones(4, 3)
    assert not to_host(torch.zeros(4, 3), source).is_over
    for target in (torch.zeros(4, 3, dtype=torch.float64), torch.zeros(3, 4).t(), torch.zeros(2, 4, 3)):
        assert to_host(target, source).is_over
        assert bool((target == 1).all())
    assert to_host(torch.zeros(3, 4), source.t()).is_over
