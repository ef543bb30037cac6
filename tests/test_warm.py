"""Scripts that start warm are processes as any other."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import warm
from opened import opened

SCRIPT = """
import json, os, subprocess, sys
me = {
    "argv": sys.argv,
    "path": sys.path[0],
    "name": __name__,
    "cwd": os.getcwd(),
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid(),
    "shown": open("/proc/self/cmdline").read().strip("\\0").split("\\0"),
    "marked": hasattr(os, "marked"),
    "is warm": "lightning" in sys.modules,
}
os.marked = True
print(json.dumps(me), flush=True)
print("said", file=sys.stderr, flush=True)
command = sys.stdin.read().split()
if command:
    started = subprocess.Popen([sys.executable, *command], stdin=subprocess.DEVNULL)
    assert started.wait() == 7
    print(os.getpid())
sys.exit(7)
"""


def script(folder: Path) -> str:
    path = folder / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*arguments: str, stdin: str = "", **options: object) -> tuple[int, list, str]:
    """Its exit code, what it printed as Python values, and what it said."""
    command = [sys.executable, *arguments]
    with warm.starts():
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=600, **options)
    values = {"true": True, "false": False}
    return done.returncode, [eval(line, values) for line in done.stdout.splitlines()], done.stderr


def test_a_script_has_arguments_folder_environment_streams_and_an_end_of_its_own(tmp_path: Path) -> None:
    path = script(tmp_path)
    code, (told,), said = run(path, "a b", cwd=tmp_path, env={"ONLY": "this"}, start_new_session=True)
    assert (code, said) == (7, "said\n")
    assert told["argv"] == [path, "a b"]
    assert (told["path"], told["name"], told["cwd"]) == (str(tmp_path), "__main__", str(tmp_path))
    assert told["environment"] == {"ONLY": "this"}
    assert (told["parent"], told["leads"], told["is warm"]) == (os.getpid(), True, True)
    assert told["shown"] == [sys.executable, path, "a b"]


def test_a_module_is_run_from_the_folder(tmp_path: Path) -> None:
    path = script(tmp_path)
    code, (told,), _ = run("-m", "script", "x", cwd=tmp_path)
    assert code == 7
    assert told["argv"] == [path, "x"]
    assert (told["path"], told["name"], told["is warm"]) == (str(tmp_path), "__main__", True)
    assert run("-u", path, "x")[1][0]["argv"] == [path, "x"]  # as torchrun starts ranks


def test_what_a_script_starts_is_its_child_and_as_untouched_as_itself(tmp_path: Path) -> None:
    path = script(tmp_path)
    _, (first, second, pid), _ = run(path, stdin=path)
    assert (second["parent"], first["parent"]) == (pid, os.getpid())
    assert (first["marked"], second["marked"], second["is warm"]) == (False, False, True)
    assert run(path)[1][0]["marked"] is False


def test_other_programs_start_as_ever_and_so_does_everything_outside_the_block(tmp_path: Path) -> None:
    path = script(tmp_path)
    with warm.starts():
        assert subprocess.run(["echo", "x"], capture_output=True).stdout == b"x\n"
        given = subprocess.run([sys.executable, "-S", path], input="", capture_output=True, text=True)
    assert '"is warm": false' in given.stdout
    outside = subprocess.run([sys.executable, path], input="", capture_output=True, text=True)
    assert '"is warm": false' in outside.stdout


def test_how_a_script_ended_is_told(tmp_path: Path) -> None:
    ends = {
        "": (0, ""),
        "raise SystemExit('advice')": (1, "advice\n"),
        "import atexit, sys; atexit.register(print, 'late', file=sys.stderr)": (0, "late\n"),
        f"import os; os.kill(os.getpid(), {signal.SIGKILL})": (-signal.SIGKILL, ""),
    }
    for number, (source, expected) in enumerate(ends.items()):
        (tmp_path / f"{number}.py").write_text(source)
        code, _, said = run(str(tmp_path / f"{number}.py"))
        assert (code, said) == expected
    (tmp_path / "wrong.py").write_text("1 / 0")
    code, _, said = run(str(tmp_path / "wrong.py"))
    assert code == 1
    assert said.endswith("ZeroDivisionError: division by zero\n")


def test_a_template_ends_with_its_process_and_leaves_no_file_open(tmp_path: Path) -> None:
    name = f"{tmp_path.name}-{os.getpid()}-only.py"
    (tmp_path / name).touch()
    run(str(tmp_path / name))
    before = opened()
    run(str(tmp_path / name))
    assert sorted(opened() - before) == []
    until = time.monotonic() + 30
    while any(name in command for command in commands()):
        assert time.monotonic() < until
        time.sleep(0.05)


def commands() -> list[str]:
    """Of all living processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text(errors="replace"))
        except OSError:  # ended meanwhile
            continue
    return found
