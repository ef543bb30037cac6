"""Saves by ranks that are killed, on disks that fail: the smallest things that save as a Trainer's ranks do.

A *version* is a checkpoint's worth of values that no other version shares, so that a mixture of two is noticed.
"""

import builtins
import contextlib
import ctypes
import fcntl
import importlib
import io
import itertools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.checkpoint import Folder, Saver, StoredCheckpoint
from lightning_zero.checkpoint.draft import Draft
from lightning_zero.shards.extents import Extent
from lightning_zero.views.lazy import LazyTensor, Partial, Range, Spread
from lightning_zero.wire.board import Board
from lightning_zero.wire.comm import Comm
from ranks import CONTEXT, HANGS, PATIENCE, die_with_parent
from thread_world import ThreadWorld

NUMEL = 30_001


# -- what is saved


class Strip(Spread):
    """A flat tensor of which every rank has a strip."""

    def __init__(self, name: str, values: Tensor, rank: int, world: int) -> None:
        super().__init__(name, tuple(values.shape), values.dtype)
        self._values = values
        self._bounds = [at * values.numel() // world for at in (rank, rank + 1)]

    def whole(self) -> Tensor:
        return self._values.clone()

    def pieces(self) -> list[Range]:
        start, stop = self._bounds
        return [Range(Extent.of_whole(self.name, self.shape, start, stop), self._values[start:stop])]


def values_of(version: int) -> dict[str, Tensor]:
    steps = torch.arange(NUMEL)
    return {
        "weight": torch.frac(steps * 0.37 + version),
        "halves": (steps % 97 + 100 * version).bfloat16(),
        "bias": torch.tensor([float(version)] * 11),  # on every rank; rank 0 writes it
    }


def tree_of(version: int, rank: int, world: int) -> dict[str, Any]:
    values = values_of(version)
    spread = {name: LazyTensor(Strip(name, values[name], rank, world)) for name in ("weight", "halves")}
    return {
        "epoch": version,
        "state_dict": {**spread, "bias": values["bias"]},
        "ranks": Partial("ranks", {rank: {"version": version}}),
    }


def version_at(path: Any) -> int | None:
    """The version of the checkpoint at `path`, once every byte of it is known to be right; None for no checkpoint."""
    if not Folder(path).is_checkpoint:
        return None
    checkpoint = StoredCheckpoint(path)
    assert checkpoint.verify() == []
    return version_of(checkpoint.load())


def version_of(tree: dict[str, Any]) -> int:
    version = int(tree["epoch"])
    for name, value in values_of(version).items():
        assert torch.equal(tree["state_dict"][name], value), f"{name} is not of version {version}"
    assert {ranks["version"] for ranks in tree["ranks"].values()} == {version}
    return version


# -- who saves


def save(board: Board, path: Any, version: int, *, in_background: bool = False) -> None:
    """What one rank does."""
    saver = Saver(board, in_background=in_background)
    saver.muster()
    saver.save(tree_of(version, board.rank, board.size), str(path), {"step": version})
    saver.wait()


def save_on_threads(path: Any, version: int, *, world: int = 2, wait_timeout: float = PATIENCE) -> list[str | None]:
    """The error of every rank, or None; ranks are threads of this process."""

    def rank_main(comm: Comm) -> str | None:
        return error_of(lambda: save(comm.board, path, version))

    return ThreadWorld(world, wait_timeout=wait_timeout).run(rank_main)


def error_of(doing: Callable[[], Any]) -> str | None:
    try:
        doing()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Job:
    """Ranks as processes, which all call `function(board, *args)`.

    Args:
        world: number of ranks.
        function: importable.
        args: of it.
        wait_timeout: seconds.
        store_on_rank_0: as without a launcher, so that the store dies with rank 0.
    """

    def __init__(
        self,
        world: int,
        function: Callable[..., Any],
        *args: Any,
        wait_timeout: float = PATIENCE,
        store_on_rank_0: bool = False,
    ) -> None:
        self.store = None if store_on_rank_0 else dist.TCPStore("127.0.0.1", 0, is_master=True)
        ports = CONTEXT.Pipe(duplex=False) if self.store is None else None
        self._pipes, self.processes = [], []
        port = None if self.store is None else self.store.port
        for rank in range(world):
            if rank == 1 and ports is not None:
                port = ports[0].recv()
            mine, theirs = CONTEXT.Pipe(duplex=False)
            tell_port = ports[1] if ports is not None and rank == 0 else None
            process = CONTEXT.Process(
                target=_rank_main,
                args=(rank, world, port, tell_port, wait_timeout, theirs, function, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def wait_until_saving(self) -> None:
        for pipe in self._pipes:
            assert pipe.recv() == "saving"

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def outcomes(self, timeout: float = HANGS) -> list[str | None]:
        """Of every rank its error, None when it had none, or "killed". All must end in `timeout` seconds."""
        deadline = time.monotonic() + timeout
        found: list[str | None] = []
        for rank, pipe in enumerate(self._pipes):
            said: str | None = "saving"
            try:
                while said == "saving":
                    assert pipe.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} hangs"
                    said = pipe.recv()
            except EOFError:
                said = "killed"
            found.append(said)
        for process in self.processes:
            process.kill()
            process.join()
        return found


def _rank_main(
    rank: int,
    world: int,
    port: int | None,
    tell_port: Any,
    wait_timeout: float,
    pipe: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port or 0, is_master=port is None, wait_for_workers=False)
    if tell_port is not None:
        tell_port.send(store.port)
    Board(dist.PrefixStore("start", store), rank, world, timedelta(seconds=PATIENCE)).agree(
        "all are there", {}, lambda _: {}
    )
    board = Board(dist.PrefixStore("job", store), rank, world, timedelta(seconds=wait_timeout))
    pipe.send("saving")
    outcome = error_of(lambda: function(board, *args))
    pipe.send(outcome)
    time.sleep(2 * HANGS)  # until the test kills it: the store lives here, maybe


# -- what happens to them


@contextlib.contextmanager
def disk(
    root: Any,
    before: Callable[[str, Any], None] = lambda *_: None,
    *,
    thread: str = "",
    most_bytes: int | None = None,
) -> Iterator[None]:
    """Inside, `before(call, path)` is called before every call to the system that touches files below `root`.

    Args:
        root: whose files.
        before: may sleep, raise or kill.
        thread: count this one's calls only, by the beginning of its name.
        most_bytes: that one write takes.
    """
    busy = threading.local()

    def is_ours(path: Any, kwargs: dict[str, Any]) -> bool:
        if getattr(busy, "inside", False) or not threading.current_thread().name.startswith(thread):
            return False
        if not isinstance(path, str | os.PathLike):
            return True  # an open file, as in fsync
        return str(path).startswith(str(root)) or kwargs.get("dir_fd") is not None

    def announced(call: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(path: Any, *args: Any, **kwargs: Any) -> Any:
            if is_ours(path, kwargs):
                busy.inside = True  # `before` may use files itself
                try:
                    before(call, path)
                finally:
                    busy.inside = False
            return original(path, *args, **kwargs)

        return wrapper

    class File(io.FileIO):
        def __init__(self, path: Any, mode: str) -> None:
            if is_ours(path, {}):
                before("create", path)
            super().__init__(path, mode)

        def write(self, data: Any) -> int:
            if is_ours(self.name, {}):
                before("write", self.name)
            return super().write(data[:most_bytes])

        def close(self) -> None:
            is_open = not self.closed
            super().close()
            if is_open and is_ours(self.name, {}):
                before("close", self.name)

    calls = [
        *(
            (os, name)
            for name in ("open", "fsync", "mkdir", "rename", "replace", "unlink", "remove", "rmdir", "symlink")
        ),
        *((os, name) for name in ("listdir", "scandir", "stat", "readlink")),
        *((io, "open"), (builtins, "open"), (fcntl, "flock")),
    ]
    originals = [(module, name, getattr(module, name)) for module, name in calls] + [(io, "FileIO", io.FileIO)]
    try:
        for module, name, original in originals:
            setattr(module, name, File if original is io.FileIO else announced(name, original))
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


class Nth:
    """Does something before the call of one number; counts from 0.

    Args:
        number: of the call.
        action: what to do.
        lasts: do it before all later calls, too.
    """

    def __init__(self, number: int | None, action: Callable[[], Any], *, lasts: bool = False) -> None:
        self._number = number  # None: of no call
        self._action = action
        self._lasts = lasts
        self._count = itertools.count()
        self.call: str | None = None  # that was hit
        self.path: str | None = None

    def __call__(self, call: str, path: Any) -> None:
        count = next(self._count)  # in one step, for there are several threads
        if count == self._number:
            self.call, self.path = call, str(path)
        if count == self._number or (self._lasts and self._number is not None and count > self._number):
            self._action()

    @property
    def calls(self) -> int:
        """How many there were. The count ends here."""
        return next(self._count)


def raising(number: int) -> Callable[[], None]:
    def action() -> None:
        raise OSError(number, os.strerror(number))

    return action


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_slowly(board: Board, path: Any, version: int, pause: float, in_background: bool = False) -> None:
    """Every call to the file system takes `pause` seconds, so that kills hit all of them alike."""
    with disk(Path(path).parent, lambda *_: time.sleep(pause)):
        save(board, path, version, in_background=in_background)


class Announced:
    """A store that says before what it tells the other ranks, its beats left out."""

    def __init__(self, store: dist.Store, before: Callable[[str, Any], None]) -> None:
        self._store, self._before = store, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        if not key.startswith("beat/"):
            self._before("set", key)
        self._store.set(key, value)


def save_until_killed(
    board: Board, path: Any, version: int, pause: float, victim: int | None = None, number: int | None = None
) -> None:
    """The victim is killed before that call to the file system or to the store: what others see of a rank is made of
    these. Tells the store how many there were. Each takes `pause` seconds, in which other ranks go on."""
    fate = Nth(number if board.rank == victim else None, kill_this_process)
    store = board._store

    def before(call: str, path: Any) -> None:
        fate(call, path)
        time.sleep(pause)

    board._held.thing = Announced(store, before)  # type: ignore[assignment]
    with disk(Path(path).parent, before):
        save(board, path, version)
    store.set(f"calls/{board.rank}", str(fate.calls))


def save_when_told(board: Board, path: Any, version: int, told: Path) -> None:
    """Stands still in the middle of the save until there is the file `told`."""

    def wait(call: str, _: Any) -> None:
        until = time.monotonic() + HANGS
        while call == "write" and not told.exists() and time.monotonic() < until:
            time.sleep(0.02)

    with disk(Path(path).parent, wait if board.rank == 0 else lambda *_: None):
        save(board, path, version)


def in_bucket(root: Any, function: Callable[..., Any], *args: Any) -> Any:
    """`function` where ``bucket://`` is known."""
    os.environ["BUCKETS"] = str(root)
    importlib.import_module("buckets")
    return function(*args)


def until_call(number: int, root: Any, function: Callable[..., Any], *args: Any) -> None:
    """The process is killed before a call to the file system."""
    with disk(root, Nth(number, kill_this_process)):
        function(*args)


def save_with_limit(path: Any, version: int, limit: int, pipe: Any) -> None:
    """No file may become longer than `limit` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    pipe.send(save_on_threads(path, version))


def save_until_full(folder: Path, pipe: Any) -> None:
    """Saves version after version to a disk of two megabytes until it is full, in a namespace of this process; then
    tells what the ranks said, which versions there are, and whether a save works once one is removed."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_mounts, private = 0x10000000, 0x00020000, (1 << 18) | 0x4000
    is_root = os.geteuid() == 0
    if (
        libc.unshare(new_mounts if is_root else new_mounts | new_user)
        or libc.mount(b"none", b"/", None, private, None)
        or libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, b"size=2m")
    ):
        pipe.send(None)
        return
    said: list[str | None] = []
    version = 0
    while not said or said[0] is None:
        version += 1
        said = save_on_threads(folder / str(version), version)
    again = save_on_threads(folder / "1", version)  # over an older one, too
    there = {path.name: version_at(path) for path in folder.iterdir()}
    Folder(folder / "2").remove()
    after = save_on_threads(folder / str(version), version)
    pipe.send((version, said, again, there, after, version_at(folder / str(version))))


def die_between_commit_and_verdict(board: Board, path: Any, version: int) -> None:
    original = Draft.commit

    def commit_and_die(draft: Draft, manifest: bytes) -> str | None:
        original(draft, manifest)
        kill_this_process()
        return None

    Draft.commit = commit_and_die  # type: ignore[method-assign]
    save(board, path, version)


def die_while_writing(board: Board, path: Any, version: int, victim: int) -> None:
    if board.rank == victim:
        with disk(Path(path).parent, Nth(2, kill_this_process)):
            save(board, path, version)
    save(board, path, version)


def save_one_after_the_other(path: Any, versions: int, removes: bool, told: Path) -> None:
    """To one path, so many versions at least, and until there is the file `told`; takes the checkpoint away in between,
    or not."""
    end = time.monotonic() + HANGS
    for version in itertools.count():
        if version >= versions and (told.exists() or time.monotonic() > end):
            return
        if removes:
            Folder(path).remove()
        assert save_on_threads(path, version) == [None, None]


def remove(path: Any) -> None:
    Folder(path).remove()


def link(path: Any, target: Any) -> None:
    Folder(path).link_to(Folder(target))


# -- the disk, whose power may fail at any moment


def noted(patch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """What is synced to the disk from here on, and what is moved, in order. What is killed alone leaves to the system
    what it has written; where power fails, only what is synced is there."""
    done = list[tuple[str, Path]]()
    fsync = os.fsync

    def synced(handle: int) -> None:
        fsync(handle)
        done.append(("synced", Path(f"/proc/self/fd/{handle}").readlink()))

    def moving(move: Callable[..., None]) -> Callable[..., None]:
        def moved(source: Path, target: Path) -> None:
            move(source, target)
            done.append(("moved", Path(target)))

        return moved

    patch.setattr(os, "fsync", synced)
    for move in ("rename", "replace"):
        patch.setattr(os, move, moving(getattr(os, move)))
    return done
