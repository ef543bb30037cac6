"""Hydra runs and sweeps whose jobs have several processes. The only file that imports Hydra; nothing imports it.

An app needs one line in its config, `override hydra/callbacks: lightning_zero`, and gets:

- A `summary.json` in each run's folder: its overrides, whether it finished, the value its main function returned, how
  it failed, and what the app itself adds with `update_summary`.
- Sweeps (`-m`) in which each job is a process of its own.
- At the end of a sweep a table (`sweep.csv`, and printed) and a picture (`sweep.png`) of all jobs in its folder.

Note: why a process per job
    Lightning's launcher starts rank 1 by repeating rank 0's command line, and kills rank 0's process when rank 1 fails.
    Inside the sweep's own process that means: rank 1 starts a sweep of its own (the command line has `-m`), the second
    job finds the first one's MASTER_PORT, process group and memory, and one failing rank takes the sweep with it.
    A job that is a process with the job's own command line, environment and session has none of these by construction:
    its ranks repeat the job's command line, and what it leaves behind is killed with its session.
"""

import csv
import json
import logging
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, NamedTuple

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

log = logging.getLogger(__name__)

SUMMARY = "summary.json"
RUNNING, FINISHED, FAILED = "running", "finished", "failed"

BASIC_LAUNCHER = BasicLauncherConf._target_
BASIC_SWEEPER = BasicSweeperConf._target_

# What a launcher of ranks leaves in the environment. A job that inherits it believes to be a rank of another job.
RANK_VARIABLES = frozenset(
    "MASTER_ADDR MASTER_PORT RANK LOCAL_RANK NODE_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE "
    "GROUP_WORLD_SIZE ROLE_WORLD_SIZE PL_GLOBAL_SEED PL_SEED_WORKERS".split()
)
FAILURE = "this rank failed"  # heads the traceback in a rank's log
CONFIG_DIGEST = "LIGHTNING_ZERO_CONFIG_DIGEST"  # from rank 0 to the ranks it starts: what config it resolved

TAIL_LINES = 60  # two chained tracebacks through Lightning
GRACE_S = 10.0  # for a job's processes to end by themselves, once it was interrupted or rank 0 is through


# --- summary.json


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of the run in `folder`; empty when there is none."""
    try:
        return json.loads((folder / SUMMARY).read_text())
    except FileNotFoundError:
        return {}


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Replaces the summary in one move, so that a job killed meanwhile leaves the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{SUMMARY}.partial"
    partial.write_text(json.dumps(summary, indent=2, default=str) + "\n")
    partial.replace(folder / SUMMARY)


def update_summary(folder: Path, **values: Any) -> None:
    """Adds `values` to the summary of the run in `folder`; call it on rank 0.

    The sweep's table has a column for every number and text. Its picture draws ``loss``, ``seconds_per_step``,
    ``memory_bytes`` (category -> bytes) and ``wire_bytes_per_step``.
    """
    write_summary(folder, read_summary(folder) | values)


# --- what happens around a job and a sweep


class SweepCallback(Callback):
    """Hydra's callback: prepares a sweep, records each run, reports at the end.

    Hydra turns an Exception of a callback into a warning, so whatever must stop the program is a SystemExit here.
    """

    def __init__(self) -> None:
        self.replaced: type[Plugin] | None = None  # Hydra's basic launcher, while ours has its place

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        rank = _rank()
        if rank != 0:
            raise SystemExit(
                f"Rank {rank} was about to start a sweep of its own. Start sweeps with `python`, not with torchrun or "
                f"srun: each job starts its own ranks (trainer.devices=...)."
            )
        if config.hydra.launcher._target_ == BASIC_LAUNCHER:  # any other was chosen on purpose
            # Hydra takes launchers only from packages called `hydra_plugins`, and does not find such a package in an
            # editable install. It looks them up in this table, where ours takes the basic one's place for the sweep.
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
        finally:  # whatever becomes of the report
            if failed:
                names = "\n".join(f"  #{job['job']} ({job['folder']}): {' '.join(job['overrides'])}" for job in failed)
                raise SystemExit(f"{len(failed)} of {len(jobs)} jobs failed:\n{names}")

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        _require_the_config_of_rank_zero(config)
        if _rank() == 0:
            write_summary(_folder(config), _opening(config))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        os.environ.pop(CONFIG_DIGEST, None)
        error = job_return._return_value if job_return.status == JobStatus.FAILED else None
        if error is not None:
            _log_to_file(FAILURE, error)
        if _rank() != 0:
            return
        if error is None:
            update_summary(_folder(config), status=FINISHED, return_value=job_return.return_value)
        else:
            update_summary(_folder(config), status=FAILED, error=_tail("".join(traceback.format_exception(error))))


def _opening(config: DictConfig) -> dict[str, Any]:
    number = OmegaConf.select(config, "hydra.job.num", default=None)
    return {"job": number, "overrides": _as_written(config.hydra.overrides.task), "status": RUNNING}


def _as_written(overrides: ListConfig) -> list[str]:
    # Not list(overrides): that would resolve the interpolations in `key=${other}`.
    written = OmegaConf.to_container(overrides, resolve=False)
    assert isinstance(written, list)
    return [str(item) for item in written]


def _folder(config: DictConfig) -> Path:
    return Path(config.hydra.runtime.output_dir)


def _rank() -> int:
    # torchrun's, else Lightning's launcher's (whose ranks beyond the first have only this), else SLURM's.
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def _require_the_config_of_rank_zero(config: DictConfig) -> None:
    """Ends a rank whose config resolved to other values than rank 0's, before it trains something else."""
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
    except OmegaConfBaseException:  # a value that nobody asks for may refer to nothing
        value = OmegaConf.to_container(holder)
    return sha256(repr(value).encode()).hexdigest()[:16]


def _log_to_file(message: str, error: BaseException) -> None:
    # Into this rank's log alone: the console gets the traceback from Hydra or from the interpreter.
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
    interrupted ones start again in their folders, where they may find a checkpoint to continue from.
    """

    def __init__(self) -> None:
        self.config: DictConfig
        self.context: HydraContext

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.context = hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        jobs = [self._job(list(overrides), initial_job_idx + index) for index, overrides in enumerate(job_overrides)]
        for job in jobs:
            _require_a_folder_of_its_own(job, jobs)
        log.info("Launching %d jobs, each in a process of its own", len(jobs))
        with _sigterm_as_exit():
            return [self._run(job) for job in jobs]

    def _job(self, overrides: list[str], number: int) -> "Job":
        config = self.context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = number
            config.hydra.job.num = number
        with _hydra_config(config):  # for ${hydra:...} in the folder's name
            folder = Path(config.hydra.sweep.dir, _quotable(str(config.hydra.sweep.subdir))).absolute()
        if _quotable(str(folder)) != str(folder):
            raise SystemExit(
                f"hydra.sweep.dir={str(config.hydra.sweep.dir)!r} holds a double quote, a backslash or a dollar sign, "
                f"which Lightning cannot pass to a job's ranks. Write another hydra.sweep.dir."
            )
        return Job(number, overrides, folder, config)

    def _run(self, job: "Job") -> JobReturn:
        label = f"#{job.number} : {' '.join(filter_overrides(job.overrides))}"
        if job.finished():
            log.info("\t%s (skipped: finished earlier)", label)
            return self._returned(job)
        log.info("\t%s", label)
        write_summary(job.folder, _opening(job.config))
        started = time.monotonic()
        end = run_in_session(self._command(job), job_environment(os.environ))
        job.record(end, seconds=time.monotonic() - started)
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        if not job.finished():
            log.error("\t#%d failed, and the sweep goes on. %s", job.number, read_summary(job.folder)["error"])
        return self._returned(job)

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
        # The basic sweeper reads every result and stops the sweep at the first failed one, so it hears of no failure;
        # on_multirun_end does. A sweeper that learns from the results must hear of it.
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
        self.log_bytes_before = {path.name: path.stat().st_size for path in folder.glob("*.log")}

    def finished(self) -> bool:
        summary = read_summary(self.folder)
        return summary.get("status") == FINISHED and summary.get("overrides") == self.task_overrides

    def record(self, end: "End", seconds: float) -> None:
        """Completes the summary by what only the sweep can know: how the process ended."""
        # Rank 0 may have been through before another rank failed.
        failed = end.code != 0 or any(FAILURE in text for text in self._logs().values())
        status = FAILED if failed else FINISHED
        error = {"error": f"{end.describe()}\n{self._last_words(end)}"} if failed else {}
        known = {"job": self.number, "overrides": self.task_overrides, "status": status, "seconds": round(seconds, 1)}
        update_summary(self.folder, **known, **error)

    def _last_words(self, end: "End") -> str:
        """The tracebacks that ranks logged, the last lines of the other ranks, and of stderr if no rank logged any."""
        logs = self._logs()
        failures = {name: text[text.rindex(FAILURE) :] for name, text in logs.items() if FAILURE in text}
        tails = {name: _tail(failures[name]) if name in failures else _tail(logs[name], lines=5) for name in logs}
        if not failures:
            tails["stderr"] = end.stderr_tail
        return "\n".join(f"--- {name}\n{tail}" for name, tail in tails.items() if tail)

    def _logs(self) -> dict[str, str]:
        """What the ranks have logged since this attempt began."""
        written = {path.name: path.read_bytes() for path in sorted(self.folder.glob("*.log"))}
        return {
            name: log[self.log_bytes_before.get(name, 0) :].decode(errors="replace") for name, log in written.items()
        }


def _require_a_folder_of_its_own(job: Job, jobs: Sequence[Job]) -> None:
    """Ends the sweep before its first job when a job's folder is, or was, another job's."""
    others = [other for other in jobs if other is not job and other.folder == job.folder]
    earlier = read_summary(job.folder).get("overrides", job.task_overrides)
    if others or earlier != job.task_overrides:
        owner = others[0].task_overrides if others else earlier
        raise SystemExit(
            f"The folder {job.folder} would hold two jobs: {shlex.join(owner)} and {shlex.join(job.task_overrides)}. "
            f"Write another hydra.sweep.dir, or a hydra.sweep.subdir that tells jobs apart, such as "
            f"hydra.sweep.subdir='${{hydra.job.override_dirname}}'."
        )


class End(NamedTuple):
    """How a process ended."""

    code: int  # its exit code; -N when signal N killed it
    stderr_tail: str

    def describe(self) -> str:
        if self.code < 0:
            return f"Rank 0 was killed by {signal.Signals(-self.code).name}."
        return f"Rank 0 exited with {self.code}."


def run_in_session(command: Sequence[str], environment: Mapping[str, str], grace_s: float = GRACE_S) -> End:
    """Runs `command` in a session of its own, and kills what is left of the session when it ends.

    When it ends well, the other processes of the session have `grace_s` to end as well.
    """
    process = echo = None
    last: deque[bytes] = deque(maxlen=TAIL_LINES)
    try:
        with _signals_deferred():  # one that came between fork and assignment would leave the job to itself
            process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE)
            echo = threading.Thread(target=_echo, args=(process.stderr, last))
            echo.start()
        if process.wait() == 0:
            _await_session(process.pid, grace_s)
    except BaseException:  # the terminal's Ctrl-C, or our SIGTERM, does not reach another session: pass it on
        if process is not None:
            _signal_session(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        raise
    finally:
        if process is not None:
            _signal_session(process.pid, signal.SIGKILL)
            process.wait()
        if echo is not None:
            echo.join()  # its pipe ends with the last process of the session
    return End(process.returncode, b"".join(last).decode(errors="replace").strip())


def _echo(stream: IO[bytes], last: deque[bytes]) -> None:
    with stream:
        for line in stream:
            last.append(line)
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()


def _signal_session(leader: int, number: signal.Signals) -> None:
    # The session's processes are also its one process group: the ranks, and their data loaders' workers.
    with suppress(ProcessLookupError):
        os.killpg(leader, number)


def _await_session(leader: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    with suppress(ProcessLookupError):  # nobody is left
        while time.monotonic() < end:
            os.killpg(leader, 0)
            time.sleep(0.05)


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what tells a process that it is a rank."""
    return {
        name: value
        for name, value in environment.items()
        if name not in RANK_VARIABLES and name != CONFIG_DIGEST and not name.startswith("TORCHELASTIC_")
    }


def program() -> list[str]:
    """How this Python program was started, without its arguments.

    Raises:
        SystemExit: when it was not started from a file or a module, so that it cannot be started again.
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
    """Those of Hydra's own command-line flags that say which config an app composes."""
    parsed = get_args_parser().parse_args(arguments)
    flags = [
        ("--config-name", parsed.config_name),
        ("--config-path", parsed.config_path),
        ("--config-dir", parsed.config_dir),
    ]
    return [item for flag, value in flags if value is not None for item in (flag, value)]


def _quotable(path: str) -> str:
    # Lightning gives the folder to the other ranks as `hydra.run.dir="..."`, without escaping anything.
    return path.translate({ord('"'): "'", ord("\\"): "_", ord("$"): "_"})


@contextmanager
def _hydra_config(config: DictConfig) -> Iterator[None]:
    state = Singleton.get_state()
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        Singleton.set_state(state)


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Lets SIGTERM unwind the stack, so that the running job is ended too."""
    with _handling({signal.SIGTERM}, lambda number, _: sys.exit(128 + number)):
        yield


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Delivers SIGINT and SIGTERM when the block is done, not within it."""
    pending: list[int] = []
    with _handling({signal.SIGINT, signal.SIGTERM}, lambda number, _: pending.append(number)):
        yield
    for number in pending:
        signal.raise_signal(number)


@contextmanager
def _handling(numbers: set[signal.Signals], handler: Callable[[int, Any], Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


# --- the report of a sweep


def collect(sweep_dir: Path) -> list[dict[str, Any]]:
    """The summaries of all jobs in a sweep's folder, in the order of the jobs, each with its folder's name."""
    folders = [path.parent for path in sweep_dir.rglob(SUMMARY)]
    found = [read_summary(folder) | {"folder": str(folder.relative_to(sweep_dir))} for folder in folders]
    return sorted(found, key=lambda job: (job["job"] is None, job["job"], job["folder"]))


def report(jobs: Sequence[Mapping[str, Any]], sweep_dir: Path) -> None:
    """Writes `sweep.csv` and `sweep.png` and prints the table."""
    if not jobs:
        return
    labels = distinct_labels([job["overrides"] for job in jobs])
    write_csv(jobs, sweep_dir / "sweep.csv")
    draw(jobs, labels, sweep_dir / "sweep.png")
    print_table(jobs, labels)
    log.info("Table and picture: %s, %s", sweep_dir / "sweep.csv", sweep_dir / "sweep.png")


def distinct_labels(overrides: Sequence[Sequence[str]]) -> list[str]:
    """What tells each job from the others: its overrides without those that all jobs have."""
    common = set(overrides[0]).intersection(*overrides)
    return [" ".join(item for item in own if item not in common) or f"#{index}" for index, own in enumerate(overrides)]


def write_csv(jobs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One row per job; a column for each value any job has, nested ones as `memory_bytes.gradient`."""
    rows = [_flattened(job) for job in jobs]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def _flattened(job: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in job.items():
        if isinstance(value, Mapping):
            row |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            row[key] = shlex.join(map(str, value)) if isinstance(value, list) else value
    return row


def memory_total(job: Mapping[str, Any]) -> int | None:
    """Bytes resting on a rank, all categories together."""
    return sum(job["memory_bytes"].values()) if job.get("memory_bytes") else None


def print_table(jobs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> None:
    """Prints loss, time, memory and bytes of all jobs."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("#", title="sweep")
    table.add_column("job", min_width=14, overflow="fold")
    for name in ("status", "loss", "s/step", "rest MB", "peak MB", "sent MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for job, label in zip(jobs, labels, strict=True):
        table.add_row(
            str(job["job"]),
            Text(label),
            Text(job["status"], style="green" if job["status"] == FINISHED else "red"),
            _shown(job.get("loss"), digits=4),
            _shown(job.get("seconds_per_step"), digits=4),
            _shown(memory_total(job), unit=1e6, digits=2),
            _shown(job.get("peak_resident_bytes"), unit=1e6, digits=0),
            _shown(job.get("wire_bytes_per_step"), unit=1e6, digits=2),
        )
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console = Console(width=120)
    console.print(table)


def _shown(value: float | None, *, digits: int, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def draw(jobs: Sequence[Mapping[str, Any]], labels: Sequence[str], path: Path) -> None:
    """Draws four panels, one bar per job in each: loss, seconds per step, resting memory by category, bytes sent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2.2 + 0.9 * len(jobs)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharey=True)
    endings = ["" if job["status"] == FINISHED else f" ({job['status']})" for job in jobs]
    names = [label + ending for label, ending in zip(labels, endings, strict=True)]
    _bars(panels[0, 0], names, "validation loss", [job.get("loss") for job in jobs])
    _bars(panels[0, 1], names, "seconds per step", [job.get("seconds_per_step") for job in jobs])
    _stacked_bars(panels[1, 0], names, "MB resting on rank 0", [job.get("memory_bytes") or {} for job in jobs])
    sent = [job.get("wire_bytes_per_step") for job in jobs]
    _bars(panels[1, 1], names, "MB sent per step by rank 0", [None if size is None else size / 1e6 for size in sent])
    panels[0, 0].invert_yaxis()  # the first job on top; the panels share the axis
    figure.savefig(path, dpi=110)


def _bars(panel: Any, names: Sequence[str], title: str, values: Sequence[float | None]) -> None:
    bars = panel.barh(range(len(names)), [value or 0.0 for value in values], color="tab:blue")
    panel.bar_label(bars, ["not reported" if value is None else f"{value:.4g}" for value in values], padding=3)
    _finish_panel(panel, names, title)


def _stacked_bars(panel: Any, names: Sequence[str], title: str, parts: Sequence[Mapping[str, float]]) -> None:
    lefts = [0.0] * len(names)
    for category in dict.fromkeys(category for part in parts for category in part):
        widths = [part.get(category, 0) / 1e6 for part in parts]
        panel.barh(range(len(names)), widths, left=lefts, label=category)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for row, (part, right) in enumerate(zip(parts, lefts, strict=True)):
        panel.text(right, row, f" {right:.4g}" if part else " not reported", va="center")
    if any(parts):
        panel.legend(fontsize="small", ncols=3, loc="upper left", bbox_to_anchor=(0.0, -0.1))
    _finish_panel(panel, names, title)


def _finish_panel(panel: Any, names: Sequence[str], title: str) -> None:
    panel.set_title(title)
    panel.set_yticks(range(len(names)), names)
    right = panel.dataLim.x1
    panel.set_xlim(0, 1.25 * right if 0 < right < math.inf else 1.0)  # room for the numbers
