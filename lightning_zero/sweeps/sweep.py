"""Hydra runs and sweeps whose jobs have several processes. No file imports this one: Hydra does.

An app needs one line in its config, `override hydra/callbacks: lightning_zero`, and gets:

- A `summary.json` in each run's folder: its overrides, whether it finished, the value its main function returned, how
  it failed, what `ZeroMonitor` has counted (every Trainer of the app has one), and what the app itself adds with
  `update_summary`.
- Sweeps (`-m`) in which each job is a process of its own.
- At the end of a sweep a table (`sweep.csv`, and printed) and a picture (`sweep.png`) of all jobs in its folder.

Note: why a process per job
    Lightning's launcher starts rank 1 by repeating rank 0's command line, and kills rank 0's process when rank 1 fails.
    If jobs ran in the sweep's own process, rank 1 would start a sweep of its own (the command line has `-m`), the
    second job would find the first one's MASTER_PORT, process group and memory, and a failing rank would end the sweep.
    A job that is a process with its own command line, environment and session has none of these problems: its ranks
    repeat the job's command line, and what it leaves behind is killed with its session.
"""

import json
import logging
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncherConf
from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.plugins.plugin import Plugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightning_zero.pl.monitor import watch_trainers
from lightning_zero.sweeps.session import TAIL_LINES, End, alone_in, run_in_session, sigterm_as_exit
from lightning_zero.sweeps.summary import FAILED, FINISHED, collect, open_summary, read_summary, report, update_summary

log = logging.getLogger(__name__)

BASIC_LAUNCHER = BasicLauncherConf._target_
BASIC_SWEEPER = BasicSweeperConf._target_

# Variables that launchers of ranks set. A job that inherits them would take itself for a rank of another job.
RANK_VARIABLES = frozenset(
    "MASTER_ADDR MASTER_PORT RANK LOCAL_RANK NODE_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE "
    "GROUP_WORLD_SIZE ROLE_WORLD_SIZE PL_GLOBAL_SEED PL_SEED_WORKERS".split()
)
FAILURE = "this rank failed"  # heads the traceback in a rank's log
CONFIG_DIGEST = "LIGHTNING_ZERO_CONFIG_DIGEST"  # variable that tells rank 0's resolved config to the ranks it starts

# --- before and after a job and a sweep


class SweepCallback(Callback):
    """A callback of Hydra that prepares a sweep, records each run, and reports at the end.

    Hydra turns an Exception of a callback into a warning, so this raises SystemExit to stop the program.
    """

    replaced: type[Plugin] | None = None  # Hydra's basic launcher, while ours is in its place
    unwatch: Callable[[], None] = staticmethod(lambda: None)  # ends the monitoring of a job's trainers

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        rank = _rank()
        if rank != 0:
            raise SystemExit(
                f"Rank {rank} was about to start a sweep of its own. Start sweeps with `python`, not with torchrun or "
                f"srun: each job starts its own ranks (trainer.devices=...)."
            )
        if config.hydra.launcher._target_ == BASIC_LAUNCHER:  # the user has chosen any other on purpose
            # Hydra takes launchers only from packages called `hydra_plugins`, and does not find such a package in an
            # editable install. It looks launchers up in this table, so ours replaces the basic one there for the sweep.
            table = Plugins.instance().class_name_to_class
            self.replaced = table[BASIC_LAUNCHER]
            table[BASIC_LAUNCHER] = ProcessLauncher

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        if self.replaced is not None:
            Plugins.instance().class_name_to_class[BASIC_LAUNCHER] = self.replaced
        jobs = collect(Path(config.hydra.sweep.dir))
        failed = [job for job in jobs if job["status"] != FINISHED]
        try:
            report(jobs, Path(config.hydra.sweep.dir))
        finally:  # also when the report fails
            if failed:
                names = "\n".join(f"  #{job['job']} ({job['folder']}): {' '.join(job['overrides'])}" for job in failed)
                raise SystemExit(f"{len(failed)} of {len(jobs)} jobs failed:\n{names}")

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        _require_the_config_of_rank_zero(config)
        folder = Path(config.hydra.runtime.output_dir)
        if _rank() == 0:
            number = OmegaConf.select(config, "hydra.job.num", default=None)
            open_summary(folder, number, _as_written(config.hydra.overrides.task))
        self.unwatch = watch_trainers(partial(update_summary, folder))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        self.unwatch()
        os.environ.pop(CONFIG_DIGEST, None)
        error = job_return._return_value if job_return.status == JobStatus.FAILED else None
        if error is not None:
            _log_to_file(FAILURE, error)
            end = {"status": FAILED, "error": _tail("".join(traceback.format_exception(error)))}
        else:
            end = {"status": FINISHED, "return_value": job_return.return_value}
        if _rank() == 0:
            update_summary(Path(config.hydra.runtime.output_dir), **end)


def _as_written(overrides: ListConfig) -> list[str]:
    # list(overrides) would resolve the interpolations in `key=${other}`.
    written = OmegaConf.to_container(overrides, resolve=False)
    assert isinstance(written, list)
    return [str(item) for item in written]


def _rank() -> int:
    # Set by torchrun, Lightning's launcher and SLURM, in this order. Ranks that Lightning starts have only the second.
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    return int(next((os.environ[name] for name in names if name in os.environ), 0))


def _require_the_config_of_rank_zero(config: DictConfig) -> None:
    """Raises SystemExit on a rank whose config resolved to other values than rank 0's."""
    digests = {str(key): _digest(config, key) for key in config if key != "hydra"}
    expected = os.environ.get(CONFIG_DIGEST)
    if _rank() == 0 or expected is None:
        os.environ[CONFIG_DIGEST] = json.dumps(digests)
        return
    differing = sorted(key for key, _ in set(digests.items()) ^ set(json.loads(expected).items()))
    if differing:
        raise SystemExit(
            f"Rank {_rank()} resolved another config than rank 0, under: {', '.join(differing)}. Look there for values "
            f"that differ from process to process, such as ${{now:...}}, ${{oc.env:...}} or ${{hydra:job.name}}."
        )


def _digest(config: DictConfig, key: Any) -> str:
    holder = OmegaConf.masked_copy(config, key)
    try:
        value = OmegaConf.to_container(holder, resolve=True)
    except OmegaConfBaseException:  # an unused value may refer to nothing
        value = OmegaConf.to_container(holder)
    return sha256(repr(value).encode()).hexdigest()[:16]


def _log_to_file(message: str, error: BaseException) -> None:
    # Not to the console, which gets the traceback from Hydra or from the interpreter.
    trace = (type(error), error, error.__traceback__)
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, message, (), trace)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def _tail(text: str, lines: int = TAIL_LINES) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


# --- one process per job


class ProcessLauncher(Launcher):
    """Runs the jobs of a sweep one after the other, each in a process, an environment and a session of its own.

    Finished jobs are skipped when the sweep is started again in the same folder (`hydra.sweep.dir`); failed or
    interrupted ones start again in their folders, where they may find a checkpoint to continue from. A job that another
    sweep is running in the same folder is waited for: two at once would write over each other's files.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.context = hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        jobs = [self._job(list(overrides), initial_job_idx + index) for index, overrides in enumerate(job_overrides)]
        for job in jobs:  # before any starts, refuse two jobs in one folder, and a folder of another job
            earlier = read_summary(job.folder).get("overrides", job.task_overrides)
            owners = [other.task_overrides for other in jobs if other is not job and other.folder == job.folder]
            if owners or earlier != job.task_overrides:
                both = f"{shlex.join(owners[0] if owners else earlier)} and {shlex.join(job.task_overrides)}"
                raise SystemExit(
                    f"The folder {job.folder} would hold two jobs: {both}. Write another hydra.sweep.dir, or a "
                    "hydra.sweep.subdir that tells jobs apart, such as "
                    "hydra.sweep.subdir='${hydra.job.override_dirname}'."
                )
        log.info("Launching %d jobs, each in a process of its own", len(jobs))
        with sigterm_as_exit():
            return [self._run_job(job) for job in jobs]

    def _job(self, overrides: list[str], number: int) -> "Job":
        config = self.context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        state = Singleton.get_state()
        HydraConfig.instance().set_config(config)  # for ${hydra:...} in the folder's name
        try:
            folder = Path(config.hydra.sweep.dir, _quotable(str(config.hydra.sweep.subdir))).absolute()
        finally:
            Singleton.set_state(state)
        if _quotable(str(folder)) != str(folder):
            raise SystemExit(
                f"hydra.sweep.dir={str(config.hydra.sweep.dir)!r} holds a double quote, a backslash or a dollar sign, "
                f"which Lightning cannot pass to a job's ranks. Write another hydra.sweep.dir."
            )
        return Job(number, overrides, folder, config)

    def _run_job(self, job: "Job") -> JobReturn:
        label = f"#{job.number} : {' '.join(filter_overrides(job.overrides))}"
        with alone_in(job.folder, lambda: log.info("\t%s (another sweep runs it: waiting)", label)):
            if job.finished():
                log.info("\t%s (skipped: finished earlier)", label)
            else:
                log.info("\t%s", label)
                self._run_anew(job)
        return self._returned(job)

    def _run_anew(self, job: "Job") -> None:
        job.begin()
        started = time.monotonic()
        end = run_in_session(self._command(job), job_environment(os.environ))
        job.complete_summary(end, seconds=time.monotonic() - started)
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        if not job.finished():
            log.error("\t#%d failed, and the sweep goes on. %s", job.number, read_summary(job.folder)["error"])

    def _command(self, job: "Job") -> list[str]:
        overrides = [*_as_written(self.config.hydra.overrides.hydra), *job.overrides]
        kept = [item for item in overrides if not item.startswith("hydra.mode=")]
        identity = [f'hydra.run.dir="{job.folder}"', f"hydra.job.num={job.number}", f"hydra.job.id={job.number}"]
        return [*program(), *_config_flags(sys.argv[1:]), *kept, *identity, "hydra.mode=RUN"]

    def _returned(self, job: "Job") -> JobReturn:
        summary = read_summary(job.folder)
        returned = JobReturn(overrides=job.overrides, cfg=job.config, hydra_cfg=job.config, working_dir=str(job.folder))
        returned.status = JobStatus.COMPLETED
        returned.return_value = summary.get("return_value")
        # The basic sweeper would stop the sweep at the first failed result, so it is told of none; `on_multirun_end`
        # reports the failures. A sweeper that learns from results must be told.
        if summary["status"] != FINISHED and self.config.hydra.sweeper._target_ != BASIC_SWEEPER:
            returned.status = JobStatus.FAILED
            returned.return_value = RuntimeError(summary["error"])
        return returned


class Job:
    """One job of a sweep: its number, its overrides and its folder."""

    def __init__(self, number: int, overrides: list[str], folder: Path, config: DictConfig) -> None:
        self.number = number
        self.overrides = overrides
        self.task_overrides = _as_written(config.hydra.overrides.task)
        self.folder = folder
        self.config = config
        self.log_bytes_before: dict[str, int] = {}  # of earlier attempts, by the name of the file

    def begin(self) -> None:
        """Writes the first summary of an attempt, and notes what earlier ones have logged."""
        self.log_bytes_before = {path.name: path.stat().st_size for path in self.folder.glob("*.log")}
        open_summary(self.folder, self.number, self.task_overrides)

    def finished(self) -> bool:
        summary = read_summary(self.folder)
        return summary.get("status") == FINISHED and summary.get("overrides") == self.task_overrides

    def complete_summary(self, end: End, seconds: float) -> None:
        """Completes the summary with how the process ended, which only the sweep knows."""
        logs = {  # since this attempt began
            path.name: path.read_bytes()[self.log_bytes_before.get(path.name, 0) :].decode(errors="replace")
            for path in sorted(self.folder.glob("*.log"))
        }
        failures = {name: text[text.rindex(FAILURE) :] for name, text in logs.items() if FAILURE in text}
        known: dict[str, Any] = {"job": self.number, "overrides": self.task_overrides, "seconds": round(seconds, 1)}
        if end.code == 0 and not failures:  # another rank may have failed after rank 0 ended well
            update_summary(self.folder, **known, status=FINISHED)
            return
        # Tracebacks of the ranks that logged one, last lines of the other ranks, and of stderr if no rank logged one.
        tails = {name: _tail(failures[name]) if name in failures else _tail(logs[name], lines=5) for name in logs}
        if not failures:
            tails["stderr"] = end.stderr_tail
        told = [end.describe(), *(f"--- {name}\n{tail}" for name, tail in tails.items() if tail)]
        update_summary(self.folder, **known, status=FAILED, error="\n".join(told))


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns `environment` without the variables that tell a process that it is a rank."""
    strange = {name for name in environment if name.startswith("TORCHELASTIC_")} | RANK_VARIABLES | {CONFIG_DIGEST}
    return {name: value for name, value in environment.items() if name not in strange}


def program() -> list[str]:
    """Returns the command that started this Python program, without its arguments.

    Raises:
        SystemExit: when the program was not started from a file or a module, so that it cannot be started again.
    """
    import __main__

    if __main__.__spec__ is not None:
        return [sys.executable, "-m", __main__.__spec__.name]
    script = Path(sys.argv[0]).absolute()
    if not script.is_file():
        raise SystemExit(
            f"A sweep starts each job as `python SCRIPT ...`, but {sys.argv[0]!r} is no script. Use a file."
        )
    return [sys.executable, str(script)]


def _config_flags(arguments: Sequence[str]) -> list[str]:
    """Returns those of Hydra's command-line flags that say which config an app composes."""
    parsed = get_args_parser().parse_args(arguments)
    given = {"name": parsed.config_name, "path": parsed.config_path, "dir": parsed.config_dir}
    return [item for what, value in given.items() if value is not None for item in (f"--config-{what}", value)]


def _quotable(path: str) -> str:
    # Lightning passes the folder to the other ranks as `hydra.run.dir="..."`, and escapes nothing.
    return path.translate({ord('"'): "'", ord("\\"): "_", ord("$"): "_"})
