"""Sweeps of real two-rank jobs: folders, failures, leftovers, resuming."""

import csv
import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
from hydra.core.plugins import Plugins
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


def test_a_job_is_failed_when_a_rank_fails_after_rank_zero_was_through(tmp_path):
    job = sweep.Job(0, ["a=1"], tmp_path, OmegaConf.create({"hydra": {"overrides": {"task": ["a=1"]}}}))
    job.begin()
    write_summary(tmp_path, {"status": "finished"})
    (tmp_path / "rank_1.log").write_text(f"[ERROR] - {sweep.FAILURE}\nTraceback ...\nValueError: late")
    job.complete_summary(End(0, ""), seconds=1.0)
    summary = read_summary(tmp_path)
    assert (summary["status"], job.finished()) == ("failed", False)
    assert summary["error"].endswith("ValueError: late")


def test_a_jobs_environment_holds_nothing_of_another_jobs_ranks():
    leftovers = {"LOCAL_RANK": "1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "PL_GLOBAL_SEED": "1"}
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
