"""Rates that are measured, and what time they make of a step."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

import rehearsal_jobs
from lightning_zero import cli
from lightning_zero.device import HOST
from lightning_zero.rehearsal import calibration
from lightning_zero.rehearsal.calibration import calibrate
from lightning_zero.rehearsal.cost import Rates
from lightning_zero.rehearsal.rehearsal import rehearse
from lightning_zero.wire.comm import Work
from lightning_zero.wire.local import CountingComm

MODEL = ["rehearsal_jobs:Model", "--batch", "4x16:int64", "--ranks", "2"]


def test_two_ranks_measure_every_rate_while_they_train(tmp_path: Path) -> None:
    mark = rehearsal_jobs.Marks(tmp_path / "begun")
    found = calibrate(rehearsal_jobs.Model, rehearsal_jobs.batch_of, callbacks=[mark])
    assert mark.path.exists()
    for one in fields(Rates):
        value = getattr(found, one.name)
        # No machine is slower, and no processor is faster. Whether they are right is a benchmark's matter.
        assert value is True if one.name == "shares" else math.isfinite(value), one.name
    assert 1e6 < found.flops < 1e14
    assert 1e6 < found.memory < 1e13
    assert 1e6 < found.link < 1e13
    assert 1e6 < found.host < 1e13
    assert 0 < found.latency < 1
    told = rehearse(rehearsal_jobs.Model, rehearsal_jobs.batch_of, 2, ranks=2, rates=found)
    assert told.timing().hidden == pytest.approx(0, abs=1e-9)  # ranks copy with the cores that compute
    assert f"modelled: {told.timing()}" in " ".join(str(told).split())


def test_the_rates_of_a_link_that_is_known_are_found() -> None:
    comm, now = CountingComm(0, 3), [0.0]

    def takes(full: Tensor) -> Work:
        now[0] += 0.5 + (full.nbytes - full[0].nbytes) / 1e6
        return Work()

    gather, reduce = lambda full, *_: takes(full), lambda _, full, *__: takes(full)
    with patch.object(comm, "all_gather", gather), patch.object(comm, "reduce_scatter", reduce):
        link, latency = calibration._rates_of(comm, HOST, lambda: now[0])
    assert link == pytest.approx(1e6, rel=1e-3)
    assert latency == pytest.approx(0.5, rel=1e-3)


def test_where_more_bytes_take_no_longer_the_rate_of_a_link_is_finite() -> None:
    comm, now = CountingComm(0, 2), [0.0]

    def takes(*_: Any) -> Work:
        now[0] += 0.5
        return Work()

    with patch.object(comm, "all_gather", takes), patch.object(comm, "reduce_scatter", takes):
        link, _ = calibration._rates_of(comm, HOST, lambda: now[0])
    assert link == pytest.approx(4 * calibration.NUMEL / (calibration.LEAST * 0.5))


def test_the_first_of_several_calls_is_not_timed() -> None:
    now, took = [0.0], [100.0]

    def do() -> None:
        now[0] += took.pop() if took else 1.0

    assert calibration._seconds_of(do, lambda: now[0]) == 1.0


@pytest.mark.parametrize(("seconds", "calculating"), [(3e-3, 2e-3), (1.01e-3, calibration.LEAST * 1.01e-3)])
def test_operations_of_the_last_steps_are_timed_and_what_calculates_beside_its_bytes(
    seconds: float, calculating: float
) -> None:
    one, played = torch.ones(64, 64), calibration.Timed(0, 2)
    add, multiply = torch.ops.aten.add.Tensor, torch.ops.aten.mm.default

    def ran(func: Any, took: float) -> None:
        played.hollow.took = took
        played._ran(func, (one, one), {}, func(one, one))

    with patch.object(calibration.Rank, "_ran"):
        ran(add, 7.0)  # at set-up
        played._engine, played._batches_left = Mock(), calibration.COUNTED
        ran(add, 8.0)  # in a step that only warms up
        played._batches_left = calibration.COUNTED - 1
        ran(add, 1e-3)
        ran(multiply, seconds)
    assert played.memory_rate == pytest.approx(3 * one.nbytes / 1e-3)
    assert played.flops_rate == pytest.approx(2 * 64**3 / calculating)


def test_one_rank_alone_cannot_calibrate() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        calibrate(rehearsal_jobs.Model, rehearsal_jobs.batch_of, ranks=1)


def test_the_command_line_takes_rates_and_refuses_unknown_ones(capsys: pytest.CaptureFixture[str]) -> None:
    def seconds_with(*arguments: str) -> float:
        assert cli.main(["rehearse", *MODEL, *arguments]) == 0
        told = " ".join(capsys.readouterr().out.split())
        return float(told.partition("modelled: ")[2].split()[0])

    assert seconds_with("--rate", "link=1e3", "--rate", "latency=0") > 1e3 * seconds_with("--rate", "link=1e9")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["rehearse", *MODEL, "--rate", "lnk=1"])
    assert "--rate has no lnk" in capsys.readouterr().err
