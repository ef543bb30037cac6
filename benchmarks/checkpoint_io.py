"""Saving and loading the same bytes: `torch.save`, torch.distributed.checkpoint (DCP) and lightning_zero, in one run.

    python benchmarks/checkpoint_io.py --mb 400 --rounds 5

The bytes are parameters in fp32 and AdamW's two states of them. Whoever saves has them on the host already, so only the
way to the disk and back is timed:

    torch        one process: `torch.save` of everything; `torch.load`, then a copy into the tensors that are there
    dcp          every rank: `dcp.save` of an FSDP2 model and its optimizer; `dcp.load` into them
    zero         every rank: a sharded checkpoint with a checksum for every 8 KiB, written, and compared on reading
    zero-nocrc   the same with `zlib.crc32` patched to return 0 (here only): what checksums cost
    zero-async   saved in the background

Contestants take turns, round after round. Figures are medians, and the best round: other work on the machine
only takes away. A save ends when all is on the disk: every file is synced (`os.fsync`; DCP does by default, for torch
this benchmark does), and by torch's contestant and zero the folder's names. Before a load the kernel is asked to forget
the files (`posix_fadvise`), so that they come from the disk as far as it obeys. ``--dir /dev/shm`` shows what is left
without a disk.
"""

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from lightning_zero.checkpoint import Saver, StoredCheckpoint
from lightning_zero.shards.extents import Extent
from lightning_zero.views.lazy import LazyTensor, Range, Spread
from lightning_zero.wire.native import make_comm

NAMES = ["torch", "dcp", "zero", "zero-nocrc", "zero-async"]
WIDTH = 1000  # of a layer, which has 12 MB with its states


def main() -> int:
    options = parse()
    if options.child:
        measure(options)
        return 0
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="checkpoint_io-") as folder:
        if not run_ranks(Path(folder), options):
            return 1
        rounds = json.loads((Path(folder) / "found.json").read_text())
    table = {name: summarize(name, rounds) for name in options.contestants}
    show(table, rounds[0]["nbytes"], options)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"setting": setting(options), "table": table, "rounds": rounds}, indent=2) + "\n"
    )
    print(f"written to {options.json}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=400, help="of parameters and states, of all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contestants", type=lambda text: text.split(","), default=NAMES)
    parser.add_argument("--dir", type=Path, default=Path("outputs"), help="where to write; nothing stays there")
    parser.add_argument("--json", type=Path, default=Path("outputs/checkpoint_io.json"))
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for all of it")
    parser.add_argument("--child", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.contestants) - set(NAMES):
        parser.error(f"--contestants has {sorted(unknown)}; write some of {','.join(NAMES)}")
    return options


# --- the parent: the ranks, and what they found ---


def run_ranks(folder: Path, options: argparse.Namespace) -> bool:
    """Starts the ranks, and tells whether all ended well."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    command = [sys.executable, __file__, "--child", str(folder), "--mb", str(options.mb)]
    command += ["--rounds", str(options.rounds), "--contestants", ",".join(options.contestants)]
    shared = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **shared}
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in range(options.ranks)]
    deadline = time.monotonic() + options.timeout
    try:
        for number, rank in enumerate(ranks):
            if code := rank.wait(max(deadline - time.monotonic(), 0.1)):
                print(f"rank {number} ended with {code}")
                return False
        return True
    except subprocess.TimeoutExpired:
        print(f"no end after {options.timeout:.0f} s")
        return False
    finally:
        for rank in ranks:
            rank.kill()


def summarize(name: str, rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the rounds, the best of them, and `x_torch`: the median of the ratios within each round."""
    table = {"blocks": statistics.median(row[name]["blocks"] for row in rounds)}
    for key in ("save", "load"):
        table[key] = statistics.median(row[name][key] for row in rounds)
        table[f"best_{key}"] = min(row[name][key] for row in rounds)
        if "torch" in rounds[0]:
            table[f"{key}_x_torch"] = statistics.median(row[name][key] / row["torch"][key] for row in rounds)
    return table


def setting(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "mb": options.mb,
        "ranks": options.ranks,
        "rounds": options.rounds,
        "dir": str(options.dir.resolve()),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def show(table: dict[str, dict[str, float]], nbytes: int, options: argparse.Namespace) -> None:
    print(f"\n{setting(options)}\n")
    columns = ("s", "best", "MB/s", "x torch")
    print(f"{'':<12}{'save':>8}{'':>28}{'load':>8}")
    print(f"{'':<12}" + "".join(f"{column:>9}" for column in (*columns, *columns, "blocks s")))
    for name, row in table.items():
        cells = []
        for key in ("save", "load"):
            cells += [f"{row[key]:.3f}", f"{row[f'best_{key}']:.3f}", f"{nbytes / row[key] / 1e6:.0f}"]
            cells += [f"{row[f'{key}_x_torch']:.2f}" if f"{key}_x_torch" in row else ""]
        print(f"{name:<12}" + "".join(f"{cell:>9}" for cell in (*cells, f"{row['blocks']:.3f}")))
    print("x torch: median of the ratios within rounds; blocks: until the call that saves returns")


# --- the child: one rank ---


class Contestant(NamedTuple):
    save: Callable[[Path], Callable[[], None]]  # returns what waits until the save is complete
    load: Callable[[Path], None]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def measure(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    states = States(round(options.mb * 1e6 / (3 * 4 * WIDTH**2)))
    contestants = contestants_for(states)
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        rounds.append({"nbytes": states.nbytes})
        at = number % len(options.contestants)
        for name in options.contestants[at:] + options.contestants[:at]:  # nobody always comes after the same one
            place = options.child / f"{name}-{number}"
            found = run(contestants[name], place, states)
            rounds[-1][name] = found
            if is_first:
                shutil.rmtree(place, ignore_errors=True)
                place.unlink(missing_ok=True)
                print(f"round {number + 1}/{options.rounds}  {name:<11}", end="")
                print(f"save {found['save']:.3f} s, load {found['load']:.3f} s", flush=True)
    if is_first:
        (options.child / "found.json").write_text(json.dumps(rounds))
    dist.barrier()
    dist.destroy_process_group()


def run(contestant: Contestant, place: Path, states: "States") -> dict[str, float]:
    """Seconds, from when all ranks begin until all have ended."""
    with contestant.around():
        states.fill()
        os.sync()  # what was written and deleted before is nobody's to pay for
        dist.barrier()
        began = time.perf_counter()
        wait = contestant.save(place)
        blocks = seconds_of_slowest(began)
        wait()
        save = seconds_of_slowest(began)
        states.clear()
        forget(place)
        dist.barrier()
        began = time.perf_counter()
        contestant.load(place)
        load = seconds_of_slowest(began)
        states.check()
    return {"blocks": blocks, "save": save, "load": load}


def seconds_of_slowest(began: float) -> float:
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def forget(place: Path) -> None:
    """Asks the kernel to drop what it holds of the files, which are on the disk."""
    if dist.get_rank() == 0:
        for path in place.rglob("*") if place.is_dir() else [place]:
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
    dist.barrier()


class States:
    """An FSDP2 model with its optimizer: this rank's part of everything, and on rank 0 beside it the whole."""

    def __init__(self, layers: int) -> None:
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.sharded: Any = dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))
        self.settings = self.sharded["optimizer"]["param_groups"]
        self.shards: dict[str, Tensor] = {name: values.to_local() for name, values in self.sharded["model"].items()}
        for name, state in self.sharded["optimizer"]["state"].items():
            self.shards |= {f"{name}.{kind}": state[kind].to_local() for kind in ("exp_avg", "exp_avg_sq")}
        self.full = {name: torch.empty(WIDTH, WIDTH) for name in self.shards} if dist.get_rank() == 0 else {}
        self.nbytes = len(self.shards) * 4 * WIDTH**2

    def fill(self) -> None:
        """Every tensor with a number of its own."""
        for tensors in (self.shards, self.full):
            for number, tensor in enumerate(tensors.values()):
                tensor.fill_(_of(number))

    def clear(self) -> None:
        for tensor in (*self.shards.values(), *self.full.values()):
            tensor.zero_()

    def check(self) -> None:
        """That the shards are full again, or rank 0's whole tensors."""
        tensors = self.shards if all(tensor.any() for tensor in self.shards.values()) else self.full
        assert tensors or dist.get_rank()
        assert all(torch.all(tensor == _of(number)) for number, tensor in enumerate(tensors.values()))


def _of(number: int) -> float:
    return 1.0 + number + dist.get_rank() / 2


def contestants_for(states: States) -> dict[str, Contestant]:
    def torch_save(path: Path) -> Callable[[], None]:
        if states.full:
            with path.open("wb") as file:
                torch.save({"state": states.full, "param_groups": states.settings}, file)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(path.parent)
        return lambda: None

    def torch_load(path: Path) -> None:
        if states.full:
            for name, values in torch.load(path, weights_only=True)["state"].items():
                states.full[name].copy_(values)

    def dcp_save(path: Path) -> Callable[[], None]:
        dcp.save(states.sharded, checkpoint_id=path)
        return lambda: None

    comm = make_comm(torch.device("cpu"), timedelta(seconds=60))
    saver, saver_in_background = Saver(comm.board), Saver(comm.board, in_background=True)

    def zero_save(path: Path, saver: Saver = saver) -> Callable[[], None]:
        tree = {
            "state": {name: LazyTensor(Rows(name, shard)) for name, shard in states.shards.items()},
            "param_groups": states.settings,
        }
        saver.save(tree, str(path), {"step": 0})
        return saver.wait

    def zero_load(path: Path) -> None:
        checkpoint = StoredCheckpoint(path)
        for name, lazy in checkpoint.tree()["state"].items():
            shard = states.shards[name]
            lazy.source.read(Rows(name, shard).extent, shard.view(-1))
        checkpoint.verify_rest(dist.get_rank(), dist.get_world_size())
        checkpoint.close()

    return {
        "torch": Contestant(torch_save, torch_load),
        "dcp": Contestant(dcp_save, lambda path: dcp.load(states.sharded, checkpoint_id=path)),
        "zero": Contestant(zero_save, zero_load),
        "zero-nocrc": Contestant(zero_save, zero_load, lambda: mock.patch.object(zlib, "crc32", no_checksum)),
        "zero-async": Contestant(lambda path: zero_save(path, saver_in_background), zero_load),
    }


class Rows(Spread):
    """The rows of a matrix that FSDP2 gave to this rank."""

    def __init__(self, name: str, shard: Tensor) -> None:
        super().__init__(f"model:{name}", (WIDTH, WIDTH), shard.dtype)  # what a resume reads by range
        first = dist.get_rank() * -(-WIDTH // dist.get_world_size())
        self.extent = Extent.of_whole(self.name, self.shape, first * WIDTH, first * WIDTH + shard.numel())
        self._shard = shard

    def whole(self) -> Tensor:
        raise NotImplementedError

    def pieces(self) -> list[Range]:
        return [Range(self.extent, self._shard.view(-1))]


def no_checksum(data: Any, value: int = 0) -> int:
    return 0


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
