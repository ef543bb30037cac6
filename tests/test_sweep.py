"""Sweeps of real two-rank jobs: folders, failures, leftovers, resuming."""

import copy
import csv
import json
import logging
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import lightning as L
import pytest
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from omegaconf import OmegaConf

import warm
from lightning_zero.sweeps import sweep
from lightning_zero.sweeps.session import End, alone_in
from lightning_zero.sweeps.summary import SUMMARY, read_summary, update_summary, write_summary

ROOT = Path(__file__).resolve().parents[1]
APP = ROOT / "tests" / "sweep_app.py"


class Done(NamedTuple):
    code: int
    output: str


# Lanes of pytest-xdist have a width of their own.
FIXED = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "120"}


def run_app(*arguments: str, environment: dict[str, str] | None = None, from_shell: bool = False) -> Done:
    variables = {**os.environ, **FIXED, **(environment or {})}
    command = [sys.executable, str(APP), *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with nullcontext() if from_shell else warm.starts():
        done = subprocess.run(command, env=variables, text=True, timeout=600, **streams)
    return Done(done.returncode, done.stdout)


def job_folders(sweep_dir: Path) -> list[Path]:
    return sorted(path.parent for path in sweep_dir.rglob(SUMMARY))


def processes_that_mention(text: str) -> list[str]:
    """Command lines of the living processes, this one's relatives or not, that have `text` in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended meanwhile
            continue
        if text in command:
            found.append(command)
    return found


# --- R23: one folder per job, one config, one log per rank, and overrides survive

NOTE = "a = b, 'c d' [e]"


@pytest.fixture(scope="module")
def two_jobs(tmp_path_factory) -> tuple[Path, Done]:
    sweep_dir = tmp_path_factory.mktemp("two jobs = one sweep")
    arguments = ("-m", "strategy=ddp,zero2", rf"note='{NOTE.replace(chr(39), chr(92) + chr(39))}'", "numbers=[1,2]")
    folders = (f"hydra.sweep.dir='{sweep_dir}'", "hydra.sweep.subdir=${hydra.job.override_dirname}")
    # A rank of some other job started this shell, by the look of it.
    leftovers = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "7", "NODE_RANK": "0"}
    return sweep_dir, run_app(*arguments, *folders, environment=leftovers)


def test_r23_a_sweep_has_one_folder_per_job_with_one_config_and_one_log_per_rank(two_jobs):
    sweep_dir, done = two_jobs
    assert done.code == 0, done.output
    assert len(job_folders(sweep_dir)) == 2
    for folder in job_folders(sweep_dir):
        assert sorted(path.name for path in folder.iterdir()) == [".hydra", "rank_0.log", "rank_1.log", "summary.json"]
    assert len(list(sweep_dir.rglob("config.yaml"))) == 2
    assert len(list(sweep_dir.rglob("multirun.yaml"))) == 1, "child ranks started no sweep"


def test_r23_overrides_with_equals_signs_spaces_quotes_and_lists_survive(two_jobs):
    sweep_dir, _ = two_jobs
    for folder, strategy in zip(job_folders(sweep_dir), ("DDPStrategy", "ZeroStrategy"), strict=True):
        assert "=" in folder.name
        cfg = OmegaConf.load(folder / ".hydra" / "config.yaml")
        assert (cfg.note, cfg.numbers) == (NOTE, [1, 2])
        assert cfg.strategy._target_.endswith(strategy)
        summary = read_summary(folder)  # what the job itself saw, on two ranks of the same config
        assert (summary["note"], summary["numbers"], summary["status"]) == (NOTE, [1, 2], "finished")


def test_r59_the_sweeping_process_is_as_before_its_jobs(two_jobs):
    sweep_dir, _ = two_jobs
    probe = json.loads((sweep_dir / "probe.json").read_text())
    assert probe["left open"] == []
    assert probe["before"] == probe["after"]
    assert processes_that_mention(str(sweep_dir)) == []


def test_a_sweep_ends_with_a_table_and_a_picture_of_all_jobs(two_jobs):
    sweep_dir, done = two_jobs
    with (sweep_dir / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["job"] for row in rows] == ["0", "1"]
    assert all(float(row["loss"]) > 0 and row["status"] == "finished" for row in rows)
    assert (sweep_dir / "sweep.png").read_bytes().startswith(b"\x89PNG")
    table = done.output[done.output.rindex("5 parameters on 2 ranks") :]
    assert "strategy=ddp" in table
    assert "strategy=zero2" in table
    assert table.count("finished") == 2


def test_a_job_is_told_beside_ddp_without_a_word_of_its_own(two_jobs):
    """The app reports its loss alone; its trainer has a monitor all the same."""
    sweep_dir, _ = two_jobs
    ddp, zero = (read_summary(folder) for folder in job_folders(sweep_dir))
    assert (ddp["strategy_class"], zero["strategy_class"]) == ("DDPStrategy", "ZeroStrategy")
    assert (ddp["stage"], zero["stage"]) == (None, 2)
    assert ddp["wire_bytes_per_step"] == 2 * 5 * 4 // 2
    for summary in (ddp, zero):
        assert (summary["parameters"], summary["world_size"], summary["steps"]) == (5, 2, 4)
        assert summary["seconds_per_step"] > 0
        assert summary["peak_resident_bytes"] > 1e8
        assert summary["memory_bytes"]["parameter"] > 0


# --- a foreign app, which has the recipe of docs/hydra.md and nothing else


def test_a_foreign_apps_sweep_ends_with_a_full_table_and_picture_and_has_a_log_per_rank(tmp_path):
    app = [sys.executable, str(ROOT / "tests" / "foreign_app.py"), "-m", "strategy=ddp,zero2", "fits=true"]
    environment = {**os.environ, **FIXED}
    with warm.starts():
        done = subprocess.run(
            [*app, "trainer.devices=2", f"hydra.sweep.dir={tmp_path}"],
            env=environment, cwd=tmp_path, text=True, timeout=600, capture_output=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert row["return_value"] == "0.5"
        assert float(row["seconds_per_step"]) > 0
        assert int(row["wire_bytes_per_step"]) > 0
        assert int(row["memory_bytes.optimizer state"]) > 0
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    _, head, *_ = done.stdout[done.stdout.rindex("70,002 parameters on 2 ranks") :].splitlines()
    assert head.split() == ["#", "job", "status", "returned", "s/step", "at", "rest", "peak", "sent"]
    for folder in job_folders(tmp_path):
        assert sorted(path.name for path in folder.glob("*.log")) == ["rank_0.log", "rank_1.log"]


# --- failing jobs

FAIL = ["rank_1_raises", "nobody", "rank_0_is_killed", "rank_1_is_killed"]


@pytest.fixture(scope="module")
def failing_jobs(tmp_path_factory) -> tuple[Path, list[str], Done]:
    sweep_dir = tmp_path_factory.mktemp("failing")
    arguments = ["-m", f"repaired={sweep_dir / 'repaired'}", f"hydra.sweep.dir={sweep_dir}"]
    return sweep_dir, arguments, run_app(*arguments, f"fail={','.join(FAIL)}")


def test_a_failing_job_is_recorded_with_its_traceback_and_the_sweep_goes_on(failing_jobs):
    sweep_dir, _, _ = failing_jobs
    summaries = [read_summary(sweep_dir / str(number)) for number in range(4)]
    assert [summary["status"] for summary in summaries] == ["failed", "finished", "failed", "failed"]
    raised, _, zero_killed, one_killed = (summary.get("error", "") for summary in summaries)
    assert "ValueError: rank 1 was asked to fail" in raised
    assert "--- rank_1.log\n" in raised
    assert zero_killed.startswith("Rank 0 was killed by SIGKILL")
    # Whoever notices first ends rank 0: Lightning, which looks every five seconds, or the lost connection.
    assert re.search("terminated with code -9|Rank 1 died", one_killed), one_killed


def test_a_sweep_with_failed_jobs_exits_non_zero_and_names_them(failing_jobs):
    _, _, done = failing_jobs
    assert done.code == 1
    tail = done.output[done.output.index("3 of 4 jobs failed:") :]
    assert all(f"fail={name}" in tail for name in FAIL if name != "nobody")
    assert "fail=nobody" not in tail


def test_r59_failing_jobs_leave_nothing_behind(failing_jobs):
    sweep_dir, _, _ = failing_jobs
    probe = json.loads((sweep_dir / "probe.json").read_text())
    assert probe["left open"] == []
    assert probe["before"] == probe["after"]
    assert processes_that_mention(str(sweep_dir)) == []


def test_r59_a_resumed_sweep_skips_finished_jobs_and_runs_the_others_again(failing_jobs):
    sweep_dir, arguments, _ = failing_jobs
    log_of_the_finished = (sweep_dir / "1" / "rank_0.log").stat().st_mtime_ns
    (sweep_dir / "repaired").touch()
    again = "fail=rank_1_raises,nobody"  # jobs 0 and 1; 2 and 3 stay as they are
    done = run_app(*arguments, again, from_shell=True)
    assert done.output.count("skipped: finished earlier") == 1
    assert (sweep_dir / "1" / "rank_0.log").stat().st_mtime_ns == log_of_the_finished
    summaries = [read_summary(sweep_dir / str(number)) for number in range(4)]
    assert [summary["status"] for summary in summaries] == ["finished", "finished", "failed", "failed"]
    assert "error" not in summaries[0]
    assert "2 of 4 jobs failed:" in done.output


# --- errors that name what was found and what to write


def test_a_folder_that_holds_another_job_is_refused_before_any_job_starts(tmp_path):
    write_summary(tmp_path / "1", {"job": 1, "overrides": ["note=other"], "status": "finished"})
    done = run_app("-m", "note=x,y", f"hydra.sweep.dir={tmp_path}")
    assert done.code == 1
    assert "would hold two jobs: note=other and note=y" in done.output
    assert "Write another hydra.sweep.dir" in done.output
    assert not (tmp_path / "0").exists()


def test_a_rank_starts_no_sweep(tmp_path):
    done = run_app("-m", "note=x,y", f"hydra.sweep.dir={tmp_path}", environment={"RANK": "1", "LOCAL_RANK": "1"})
    assert done.code == 1
    assert "Rank 1 was about to start a sweep of its own. Start sweeps with `python`" in done.output
    assert list(tmp_path.iterdir()) == []


def test_r23_a_rank_whose_config_differs_from_rank_zeros_is_stopped(monkeypatch):
    callback = sweep.SweepCallback()
    config = OmegaConf.create({"hydra": {}, "same": 1, "differs": {"device": "${oc.env:LOCAL_RANK,0}"}})
    monkeypatch.setenv(sweep.CONFIG_DIGEST, "")
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    sweep._require_the_config_of_rank_zero(config)  # rank 0, which leaves its digest to the ranks it starts
    assert os.environ[sweep.CONFIG_DIGEST]
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match="Rank 1 resolved another config than rank 0, under: differs"):
        callback.on_job_start(config)
    monkeypatch.setenv("RANK", "9")  # of torchrun: the second one on its machine
    with pytest.raises(SystemExit, match="Rank 9 resolved"):
        callback.on_job_start(config)


def test_what_refers_to_nothing_and_hydras_own_config_stop_no_rank(no_rank, monkeypatch):
    own = {"folder": "${oc.env:LOCAL_RANK,0}"}
    config = OmegaConf.create({"hydra": own, "unused": "${nowhere}", "same": 1})
    sweep._require_the_config_of_rank_zero(config)
    monkeypatch.setenv("LOCAL_RANK", "1")
    sweep._require_the_config_of_rank_zero(config)
    with pytest.raises(SystemExit, match="under: unused"):
        sweep._require_the_config_of_rank_zero(OmegaConf.merge(config, {"unused": "${elsewhere}"}))


# --- what a job says of itself


@pytest.fixture
def no_rank(monkeypatch):
    """This process is no rank of anything."""
    monkeypatch.setenv(sweep.CONFIG_DIGEST, "")
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", sweep.CONFIG_DIGEST):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def log_file(tmp_path):
    handler = logging.FileHandler(tmp_path / "rank.log")
    logging.getLogger().addHandler(handler)
    yield tmp_path / "rank.log"
    logging.getLogger().removeHandler(handler)
    handler.close()


def run_job(folder, status, value):
    """As Hydra runs one, without the function: it returns or raises `value`."""
    callback, made = sweep.SweepCallback(), L.Trainer.__init__
    hydra = {"runtime": {"output_dir": str(folder)}, "overrides": {"task": ["a=${b}"]}, "job": {"num": 4}}
    config = OmegaConf.create({"hydra": hydra, "b": 1})
    callback.on_job_start(config)
    assert L.Trainer.__init__ is not made, "trainers are monitored"
    returned = JobReturn(status=status)
    returned.return_value = value
    callback.on_job_end(config, returned)
    assert L.Trainer.__init__ is made
    assert sweep.CONFIG_DIGEST not in os.environ, "which a job that is started next would take for its own"


def test_a_job_tells_what_it_has_returned(tmp_path, no_rank, log_file):
    run_job(tmp_path, JobStatus.COMPLETED, 0.5)
    expected = {"job": 4, "overrides": ["a=${b}"], "status": "finished", "return_value": 0.5}
    assert read_summary(tmp_path) == expected
    assert log_file.read_text() == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_logs_how_it_failed_and_rank_zero_tells_it(rank, tmp_path, no_rank, log_file, monkeypatch, caplog):
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    run_job(tmp_path, JobStatus.FAILED, ValueError("so much for that"))
    assert log_file.read_text().startswith(sweep.FAILURE)
    assert log_file.read_text().endswith("ValueError: so much for that\n")
    told = read_summary(tmp_path)
    assert (told["status"], told["error"]) == ("failed", "ValueError: so much for that") if rank == 0 else told == {}
    assert caplog.records == [], "and no console, which has the traceback from Hydra"


# --- a job's process


def test_a_job_that_another_sweep_runs_is_waited_for_and_run_again_only_if_it_failed_there(tmp_path, monkeypatch):
    launcher, started, told = sweep.ProcessLauncher(), [], threading.Event()
    launcher.config = OmegaConf.create({"hydra": {"sweeper": {"_target_": sweep.BASIC_SWEEPER}}})
    monkeypatch.setattr(launcher, "_run_anew", started.append)
    for status in ("finished", "failed"):
        folder = tmp_path / status
        job = sweep.Job(0, ["a=1"], folder, OmegaConf.create({"hydra": {"overrides": {"task": ["a=1"]}}}))
        with ThreadPoolExecutor() as pool:
            with alone_in(folder, lambda: pytest.fail("nobody else is there yet")):
                told.clear()
                monkeypatch.setattr(sweep.log, "info", lambda text, *_: told.set() if "waiting" in text else None)
                second = pool.submit(launcher._run_job, job)
                assert told.wait(60), "the second sweep has found the job at work"
                assert started == []
                write_summary(folder, {"overrides": ["a=1"], "status": status})
            second.result(60)
        assert started == ([] if status == "finished" else [job])


def config_of_hydra(sweep_dir, subdir):
    config = OmegaConf.create({"hydra": HydraConf})
    config.hydra.sweep.dir, config.hydra.sweep.subdir = str(sweep_dir), subdir
    return config


def launcher_for(config):
    launcher = sweep.ProcessLauncher()
    loader = SimpleNamespace(load_sweep_config=lambda master, overrides: copy.deepcopy(config))
    launcher.setup(hydra_context=SimpleNamespace(config_loader=loader), task_function=print, config=config)
    return launcher


def test_a_jobs_folder_is_one_that_can_be_told_to_its_ranks(tmp_path):
    setup_globals()
    job = launcher_for(config_of_hydra(tmp_path, 'a "$x" \\ ${hydra:job.num}'))._job(["a=1"], 7)
    assert job.folder == tmp_path / "a '_x' _ 7"
    assert (job.number, job.config.hydra.job.id) == (7, "7")
    assert not HydraConfig.initialized(), "the sweep's own config is back"
    with pytest.raises(SystemExit, match="holds a double quote, a backslash or a dollar sign"):
        launcher_for(config_of_hydra(tmp_path / '"', "0"))._job([], 0)


def test_two_jobs_of_one_sweep_are_not_put_into_one_folder(tmp_path, monkeypatch):
    config = config_of_hydra(tmp_path, "same")
    config.hydra.hydra_logging = {}
    launcher = launcher_for(config)
    monkeypatch.setattr(sweep, "configure_log", lambda *_: None)
    monkeypatch.setattr(launcher, "_run_job", lambda job: pytest.fail("a job was started"))
    with pytest.raises(SystemExit, match=r"hydra.sweep.subdir that tells jobs apart"):
        launcher.launch([["a=1"], ["a=2"]], 0)


def test_a_job_is_started_by_the_sweeps_own_command_with_its_overrides_and_its_folder(tmp_path, monkeypatch):
    config = config_of_hydra(tmp_path, "0")
    config.hydra.overrides.hydra = ["hydra.mode=MULTIRUN", "hydra.verbose=true"]
    launcher = launcher_for(config)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [str(APP), "-m", "-cn", "other", "a=1,2"])
    assert launcher._command(launcher._job(["a=1"], 3)) == [
        *(sys.executable, str(APP), "--config-name", "other", "hydra.verbose=true", "a=1"),
        *(f'hydra.run.dir="{tmp_path}/0"', "hydra.job.num=3", "hydra.job.id=3", "hydra.mode=RUN"),
    ]
    monkeypatch.setattr(sys, "argv", ["-c"])
    with pytest.raises(SystemExit, match="'-c' is no script"):
        sweep.program()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="package.app"))
    assert sweep.program() == [sys.executable, "-m", "package.app"]


def test_a_failed_job_tells_tracebacks_and_last_lines_of_this_attempt_alone(tmp_path):
    config = OmegaConf.create({"hydra": {"overrides": {"task": ["a=1"]}}})
    (tmp_path / "rank_0.log").write_text(f"{sweep.FAILURE}\nValueError: of before\n")
    job = sweep.Job(0, ["a=1"], tmp_path, config)
    job.begin()
    job.complete_summary(End(0, ""), seconds=1.23)
    told = {"job": 0, "overrides": ["a=1"], "seconds": 1.2}
    assert read_summary(tmp_path) == {**told, "status": "finished"}
    with (tmp_path / "rank_0.log").open("a") as file:
        file.write("".join(f"line {number}\n" for number in range(9)))
    (tmp_path / "rank_1.log").touch()
    job.complete_summary(End(2, "no such file"), seconds=1.23)
    lines = "\n".join(f"line {number}" for number in range(4, 9))
    error = f"Rank 0 exited with 2.\n--- rank_0.log\n{lines}\n--- stderr\nno such file"
    assert read_summary(tmp_path) == {**told, "status": "failed", "error": error}


def test_only_a_job_of_the_same_overrides_counts_as_finished(tmp_path):
    config = OmegaConf.create({"hydra": {"overrides": {"task": ["a=1"]}}})
    for overrides, is_finished in ((["a=1"], True), (["a=2"], False)):
        write_summary(tmp_path, {"overrides": overrides, "status": "finished"})
        assert sweep.Job(0, ["a=1"], tmp_path, config).finished() == is_finished


def test_failed_jobs_are_named_where_the_table_fails_too(tmp_path, monkeypatch):
    write_summary(tmp_path / "0", {"job": 0, "overrides": ["a=1"], "status": "finished"})
    write_summary(tmp_path / "1", {"job": 1, "overrides": ["a=2"], "status": "running"})  # it was killed
    monkeypatch.setattr(sweep, "report", Mock(side_effect=OSError("no room")))
    with pytest.raises(SystemExit, match=r"1 of 2 jobs failed:\n  #1 \(1\): a=2"):
        sweep.SweepCallback().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))


def test_a_job_is_failed_when_a_rank_fails_after_rank_zero_was_through(tmp_path):
    job = sweep.Job(0, ["a=1"], tmp_path, OmegaConf.create({"hydra": {"overrides": {"task": ["a=1"]}}}))
    job.begin()
    write_summary(tmp_path, {"status": "finished"})
    (tmp_path / "rank_1.log").write_text(f"Epoch 0\n[ERROR] - {sweep.FAILURE}\nTraceback ...\nValueError: late")
    job.complete_summary(End(0, ""), seconds=1.0)
    summary = read_summary(tmp_path)
    assert (summary["status"], job.finished()) == ("failed", False)
    assert summary["error"].endswith("ValueError: late")
    assert "Epoch 0" not in summary["error"]


def test_a_jobs_environment_holds_nothing_of_another_jobs_ranks():
    leftovers = {"LOCAL_RANK": "1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "PL_GLOBAL_SEED": "1"}
    leftovers[sweep.CONFIG_DIGEST] = "{}"
    assert sweep.job_environment({"PATH": "/bin", **leftovers}) == {"PATH": "/bin"}


def test_a_job_composes_the_config_that_the_sweep_composes():
    arguments = ["-m", "--config-name", "other", "-cd", "more configs", "a=1", "b='x y'"]
    assert sweep._config_flags(arguments) == ["--config-name", "other", "--config-dir", "more configs"]


def test_a_sweeper_that_learns_from_results_hears_of_failures(tmp_path):
    launcher = sweep.ProcessLauncher()
    launcher.config = OmegaConf.create({"hydra": {"sweeper": {"_target_": "hydra_plugins.optuna.Sweeper"}}})
    job = sweep.Job(0, ["a=1"], tmp_path, OmegaConf.create({"hydra": {"overrides": {"task": ["a=1"]}}}))
    write_summary(tmp_path, {"overrides": ["a=1"], "status": "finished", "return_value": 0.25})
    assert launcher._returned(job).return_value == 0.25
    update_summary(tmp_path, status="failed", error="Rank 0 exited with 1.")
    with pytest.raises(RuntimeError, match="Rank 0 exited with 1"):
        _ = launcher._returned(job).return_value
    launcher.config.hydra.sweeper._target_ = sweep.BASIC_SWEEPER
    assert launcher._returned(job).return_value == 0.25, "the basic sweeper would stop"


def test_only_hydras_basic_launcher_is_replaced_and_only_for_the_sweep(tmp_path):
    table = Plugins.instance().class_name_to_class
    basic = table[sweep.BASIC_LAUNCHER]
    callback = sweep.SweepCallback()
    callback.on_multirun_start(OmegaConf.create({"hydra": {"launcher": {"_target_": "some.SlurmLauncher"}}}))
    assert table[sweep.BASIC_LAUNCHER] is basic
    hydra = {"launcher": {"_target_": sweep.BASIC_LAUNCHER}, "sweep": {"dir": str(tmp_path)}}
    config = OmegaConf.create({"hydra": hydra})
    callback.on_multirun_start(config)
    launcher = Plugins.instance().instantiate_launcher(hydra_context=None, task_function=print, config=config)
    assert isinstance(launcher, sweep.ProcessLauncher)
    callback.on_multirun_end(config)
    assert table[sweep.BASIC_LAUNCHER] is basic
