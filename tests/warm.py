"""Scripts that start with everything imported: importing torch and Lightning takes longer than most jobs of the tests.

    with warm.starts():
        subprocess.run([sys.executable, "examples/train.py", ...])      # or Popen, or what uses them

Within the block `python SCRIPT ...` and `python -m MODULE ...` are forks of a template: a process that has imported
everything and done nothing. They are processes as any other: children of the caller, with an argv, environment, folder,
streams, session and end of their own, and `__main__` is the script. What they start in turn (the jobs of a sweep, the
ranks of a job) are forks of a template too, one per process, which is as untouched as the first.

What they have in common, and processes of a shell have not: the order of sets of strings, and what libraries read from
the environment when they are imported. So one run of examples/train.py and one sweep of the tests start from a shell.
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import os
import pickle
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

TESTS = Path(__file__).parent
PRELOADED = (
    "frugal",
    "hydra.main",
    "lightning_zero",
    "lightning.pytorch",
    "torch.distributed.launcher.api",
    "torch.utils.tensorboard",
)
COMMAND_BYTES = 4096  # of a command line, as /proc shows it
LIBC = ctypes.CDLL(None)
PR_SET_CHILD_SUBREAPER = 36

# What a Popen calls once its pipes are made, and how; `PIPES` are those arguments that it closes in the end.
_execute_child = subprocess.Popen._execute_child
SIGNATURE = inspect.signature(_execute_child)
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class Request(NamedTuple):
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    new_session: bool


class Template:
    """The process that forks others for this one."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def fork(self, request: Request, streams: list[int]) -> int:
        """The id of a new child of this process."""
        _adopt_orphans(True)  # the new process is one, for it is no child of the template
        try:
            socket.send_fds(self.connection, [pickle.dumps(request)], streams)
            pid = self.connection.recv(100)
            assert pid, "the template has died"
            assert self.connection.recv(100) == b"orphaned"
        finally:
            _adopt_orphans(False)
        return int(pid)


def _adopt_orphans(does: bool) -> None:
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0)


# --- who starts processes

_template: Template | None = None


@contextmanager
def starts() -> Iterator[None]:
    """Lets this process start scripts warm."""
    global _template
    if sys.platform == "linux":
        _template = _template or _first_template()
        _patch(_template)
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _execute_child


def _first_template() -> Template:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    become = "import sys; sys.path[0] = sys.argv[1]; import warm; warm.become_template(int(sys.argv[2]))"
    command = [sys.executable, "-c", become, str(TESTS), str(theirs.fileno()), " " * COMMAND_BYTES]
    with theirs:
        subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return Template(ours)


def _patch(template: Template) -> None:
    def execute_child(popen: Any, *positional: Any) -> None:
        given = SIGNATURE.bind(popen, *positional).arguments
        command = [os.fspath(part) for part in given["args"]] if isinstance(given["args"], list | tuple) else []
        if not _is_python(command) or given["preexec_fn"] or given["pass_fds"] or given["shell"]:
            _execute_child(popen, *positional)
            return
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in (given["env"] or os.environ).items()}
        folder = os.fspath(given["cwd"] or Path.cwd())
        request = Request(command[1:], environment, folder, given["start_new_session"])
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        popen.pid = template.fork(request, [number if it == -1 else it for number, it in enumerate(streams)])
        popen._child_created = True
        popen._close_pipe_fds(*(given[name] for name in PIPES))

    subprocess.Popen._execute_child = execute_child


def _is_python(command: list[str]) -> bool:
    """Whether it is `python [-u] SCRIPT ...` or `python [-u] -m MODULE ...`."""
    if not command or command[0] != sys.executable:
        return False
    what = command[2:3] if command[1:2] == ["-u"] else command[1:2]
    return what == ["-m"] or bool(what and not what[0].startswith("-"))


# --- the template, and what it forks


def become_template(requests: int) -> None:
    gc.disable()  # until all is imported, of which nothing is freed
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, all that is shared
    gc.enable()
    _serve(socket.socket(fileno=requests))


def _serve(requests: socket.socket) -> NoReturn:
    """Forks a process per request, for as long as somebody is there to ask."""
    while True:
        message, streams, _, _ = socket.recv_fds(requests, 2**20, 3)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                requests.close()
                while os.getppid() == parent:  # not adopted yet
                    time.sleep(0.001)
                _run(pickle.loads(message), streams)
            requests.send(str(pid).encode())
            os._exit(0)
        for stream in streams:
            os.close(stream)
        os.waitpid(between, 0)
        requests.send(b"orphaned")


def _run(request: Request, streams: list[int]) -> NoReturn:
    """Becomes the process asked for, and ends with it."""
    if request.new_session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # The old one remembers what its file could do, such as to seek.
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    _show([sys.executable, *request.arguments])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _serve(theirs)
    theirs.close()
    _patch(Template(ours))
    code = _code_of(request)
    threading._shutdown()  # the end of an interpreter, but for taking apart each module that was imported
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _code_of(request: Request) -> int:
    """Runs what was asked for as `python` would, and returns the exit code."""
    arguments = request.arguments
    if arguments[0] == "-u":
        arguments = arguments[1:]
        sys.stdout.reconfigure(write_through=True)
    first, *others = arguments
    try:
        if first == "-m":
            sys.argv, sys.path[0] = others, request.folder
            runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = arguments, str(Path(first).resolve().parent)
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _show(command: list[str]) -> None:
    """Lets /proc show `command`, by writing to where the system reads this process's command line."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = "\0".join(command).encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown, len(shown))
