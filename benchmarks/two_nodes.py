"""What crosses the link between two nodes, counted by the kernel, beside what the strategy says that it sends.

    python benchmarks/two_nodes.py --size small --ways ddp,3,3:hybrid

Two network namespaces of this machine stand for two nodes, with a link of 1 Gbit/s and 10 ms between them (`tc`);
each runs `torchrun --nnodes=2` with two ranks. ":hybrid" shards inside a node (`replicate_size=2`). Bytes are those
that the kernel has sent over the link in the measured steps, headers and all. Linux, as root; says why where it cannot.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmark_models import SIZES, model_of

NODES = 2
RANKS = 2  # of a node
LINK = "zero"  # the interface in either namespace
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # inside the namespaces alone
HYBRID = ":hybrid"
QUEUES = {  # what the link is like -> what `tc` is told; the first that the kernel has
    "1 Gbit/s and 10 ms": "netem rate 1gbit delay 10ms limit 100000",  # packets: the default drops some
    "1 Gbit/s and no delay": "tbf rate 1gbit burst 256kb latency 50ms",
}


class NotAllowedError(Exception):
    """This machine makes no namespaces for us."""


def main() -> int:
    options = parse()
    if options.child:
        train(options)
        return 0
    try:
        with two_nodes() as nodes:
            found = {way: run(way, nodes.names, options) for way in options.ways}
    except NotAllowedError as error:
        print(f"Skipped: two network namespaces and a link between them cannot be made here. {error}")
        return 0
    numel = SIZES[options.size].parameters
    print(f"{numel / 1e6:.1f} million parameters, {NODES} nodes of {RANKS} ranks, {options.steps} steps")
    print(nodes.link)
    for way, row in found.items():
        per_parameter = row["crossed"] / numel
        told = f"{way:<10}{row['seconds']:>8.2f} s/step{row['crossed'] / 1e6:>9.1f} MB/step from a node"
        said = f", said {row['said'] / 1e6:.1f} MB: {row['crossed'] / row['said']:.3f} x" if row["said"] else ""
        print(f"{told}{per_parameter:>7.2f} bytes per parameter{said}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["ddp", "3", f"3{HYBRID}"])
    parser.add_argument("--steps", type=int, default=3, help="measured ones, after two others")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one way may take")
    parser.add_argument("--child", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- two nodes ---


class Nodes(NamedTuple):
    names: list[str]
    link: str  # what it is like


def ip(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NotAllowedError(f"`{words[0]}` is not installed.") from error
    if done.returncode:
        raise NotAllowedError(f"`{' '.join(words)}` says: {done.stderr.strip() or done.returncode}")


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Names of two namespaces, with a link between them, which end with this."""
    nodes = [f"zero{os.getpid()}-{number}" for number in range(NODES)]
    with ExitStack() as undo:
        for node in nodes:
            ip("ip", "netns", "add", node)
            undo.callback(ip, "ip", "netns", "del", node)  # and its end of the link
        pair = ("name", LINK, "netns", nodes[0], "type", "veth", "peer", "name", LINK, "netns", nodes[1])
        ip("ip", "link", "add", *pair)
        for node, address in zip(nodes, ADDRESSES, strict=True):
            ip("ip", "-n", node, "addr", "add", f"{address}/24", "dev", LINK)
            ip("ip", "-n", node, "link", "set", LINK, "up")
            ip("ip", "-n", node, "link", "set", "lo", "up")
        yield Nodes(nodes, shaped(nodes))


def shaped(nodes: list[str]) -> str:
    """Makes the link as slow as one between nodes, as far as this kernel can; says how slow."""
    refused = ""
    for told, queue in QUEUES.items():
        try:
            for node in nodes:
                ip("tc", "-n", node, "qdisc", "add", "dev", LINK, "root", *queue.split())
        except NotAllowedError as error:
            refused = f" ({error})"
        else:
            return f"{told}{refused}"
    return f"a link as it is{refused}"


def run(way: str, nodes: list[str], options: argparse.Namespace) -> dict[str, float]:
    """What left a node in a step, the most of the two; and what its ranks say that they have sent to other nodes."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        processes = []
        for number, node in enumerate(nodes):
            command = ["ip", "netns", "exec", node, sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}"]
            command += [f"--node-rank={number}", f"--nproc-per-node={RANKS}", f"--master-addr={ADDRESSES[0]}"]
            command += [__file__, "--child", folder, "--ways", way, "--size", options.size]
            environment = {"OMP_NUM_THREADS": "1", **os.environ, "GLOO_SOCKET_IFNAME": LINK}
            output = undo.enter_context((Path(folder) / f"{number}.log").open("w+"))
            command += ["--steps", str(options.steps)]
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            undo.callback(process.wait)
            undo.callback(process.terminate)
            processes.append((process, output))
        end = time.monotonic() + options.timeout
        for process, output in processes:
            if process.wait(max(1.0, end - time.monotonic())):
                output.seek(0)
                raise RuntimeError(f"{way} ended with {process.returncode}:\n{output.read()[-3000:]}")
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
    of_nodes = [ranks[first : first + RANKS] for first in range(0, NODES * RANKS, RANKS)]
    return {
        "seconds": max(rank["seconds"] for rank in ranks),
        "crossed": max(node[0]["crossed"] for node in of_nodes),
        "said": max(sum(rank["said"] for rank in node) for node in of_nodes),
    }


# --- a rank ---


class Meter(L.Callback):
    """Per measured step, on each rank: seconds, bytes that its node's kernel sent, bytes that it says it sent."""

    def __init__(self, first: int, steps: int) -> None:
        self.first, self.last = first, first + steps
        self.found: dict[str, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step not in (self.first, self.last):
            return
        trainer.strategy.barrier()  # nothing is on its way
        report: dict[str, int] = getattr(trainer.strategy, "communication_report", dict)()
        between = sum(sent for kind, sent in report.items() if kind.startswith("replicate "))
        now = {"seconds": time.monotonic(), "crossed": sent_over_link(), "said": between}
        trainer.strategy.barrier()
        steps = self.last - self.first
        self.found = {name: (now[name] - before) / steps for name, before in self.found.items()} or now


class Model(L.LightningModule):
    def __init__(self, size: str) -> None:
        super().__init__()
        self.model = model_of(SIZES[size])

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        tokens = batch[0]
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def sent_over_link() -> float:
    """Bytes, headers and all, since the link is there."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    fields = next(line for line in lines if line.strip().startswith(f"{LINK}:")).partition(":")[2].split()
    return float(fields[8])


def train(options: argparse.Namespace) -> None:
    from lightning_zero import ZeroStrategy

    (way,) = options.ways
    size, stage = SIZES[options.size], way.removesuffix(HYBRID)
    copies = NODES if way.endswith(HYBRID) else 1
    L.seed_everything(1, verbose=False)
    warm_up = 2
    samples = size.batch * NODES * RANKS * (warm_up + options.steps)
    tokens = torch.randint(0, size.vocabulary, (samples, size.length + 1))
    meter = Meter(warm_up, options.steps)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        num_nodes=NODES,
        max_epochs=1,
        strategy="ddp" if stage == "ddp" else ZeroStrategy(stage=int(stage), replicate_size=copies),
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(options.size), DataLoader(TensorDataset(tokens), batch_size=size.batch))
    (options.child / f"rank-{trainer.global_rank}.json").write_text(json.dumps(meter.found))


if __name__ == "__main__":
    raise SystemExit(main())
