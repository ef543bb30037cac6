"""Rates that are measured, and what time they make of a step."""

import math
from dataclasses import fields
from unittest.mock import patch

import pytest
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


def test_two_ranks_measure_every_rate_while_they_train() -> None:
    found = calibrate(rehearsal_jobs.Model, rehearsal_jobs.batch_of)
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
