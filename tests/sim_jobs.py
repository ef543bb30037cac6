"""What runs on the simulated device, in a process of its own; the same jobs run on a GPU."""

import copy
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed import multi_threaded_pg

import lightning_zero.device
from engine_checkpoints import save
from lightning_zero.checkpoint import StoredCheckpoint
from lightning_zero.config import ActivationCheckpointing, Offload
from lightning_zero.device import SideStream, on_host, to_device
from lightning_zero.rehearsal.hollow import Hollow
from lightning_zero.rehearsal.memory import Memory, Phase
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.recompute import Buffers, Recompute, store_for
from lightning_zero.shards import norm
from lightning_zero.shards.offload import Machine
from lightning_zero.tiers.array import ALL, empty
from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import CountingComm, LocalComm
from lightning_zero.wire.native import make_comm
from ranks import PATIENCE
from thread_world import ThreadWorld

SOON = timedelta(seconds=PATIENCE)
OWN_REGION = (
    2**8
)  # bytes; so that the small arrays of these jobs have regions of their own, as large ones have elsewhere


def on_sim(policy: str, job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `job(device, ...)` on the simulated device, whose streams run as the policy of that name says."""
    import frugal
    from sim import device, streams  # not above: torch keeps a device for good

    frugal.take_one_core()  # of this process, whose ranks are threads
    lightning_zero.device._OWN_REGION = OWN_REGION
    os.environ["LIGHTNING_ZERO_ONLY_TCP"] = "1"  # ranks that are threads cannot be told apart by their process
    device.forget()
    streams.State.policy = streams.Policy[policy]
    with device.HostWatch():
        return job(device.DEVICE, *args, **kwargs)


# -- torch alone


def small_training(device: torch.device, *, casts: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler(device.type, enabled=casts)
    losses = []
    for _ in range(3):
        x, y = torch.randn(8, 16).to(device), torch.randint(0, 4, (8,)).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=casts):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], [parameter.detach().cpu() for parameter in model.parameters()]


def gradients_of(device: torch.device, kind: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer: nn.Module
    match kind:
        case "convolution":
            layer, values = (
                nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2)),
                torch.randn(2, 3, 8, 8),
            )
        case "attention":
            layer, values = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 5, 8)
        case _:
            layer, values = nn.Sequential(nn.Embedding(10, 4), nn.GroupNorm(2, 2)), torch.arange(10).view(5, 2)
    layer.to(device)(values.to(device)).square().sum().backward()
    return [parameter.grad.cpu() for parameter in layer.parameters() if parameter.grad is not None]


def backward_that_fails(device: torch.device, where: str) -> list[float]:
    """An error in a hook ends backward, and the next one works."""
    x = torch.ones(3, device=device, requires_grad=True)

    def fails(*_: Any) -> None:
        raise KeyError("on purpose")

    y = x * 2
    with ExitStack() as stack:
        if where == "gradient":
            y.register_hook(fails)
        elif where == "accumulated":
            stack.callback(x.register_post_accumulate_grad_hook(fails).remove)
        else:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, fails):
                y = x * x
        try:
            y.sum().backward()
        except KeyError:
            x.grad = None
    (x * 3).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


# -- mistakes that a real device forgives most of the time


def mistake(device: torch.device, kind: str, *, is_made: bool) -> Any:
    """Does something that needs a wait; without the wait if the mistake `is_made`."""
    from sim import streams

    main, side, x = streams.current_stream(), streams.Stream(), torch.ones(2, device=device)
    waits = not is_made
    match kind:
        case "a side stream reads what the main stream writes":
            x.mul_(3)
            if waits:
                side.wait_stream(main)
            with streams.on(side):
                y = x + 1
                x.record_stream(side)
            main.wait_stream(side)
            return y.tolist()
        case "the main stream reads what a side stream writes":
            side.wait_stream(main)
            with streams.on(side):
                x.mul_(3)
            if waits:
                main.wait_stream(side)
            return (x + 1).tolist()
        case "the main stream writes what a side stream reads":
            side.wait_stream(main)
            with streams.on(side):
                y = x * 3
            if waits:
                main.wait_stream(side)
            x.fill_(9)
            main.wait_stream(side)
            return y.tolist()
        case "pinned memory is overwritten before it was copied":
            host = torch.empty(2, pin_memory=True).fill_(1)
            x.copy_(host, non_blocking=True)
            if waits:
                main.record_event().synchronize()
            host.fill_(7)
            return x.tolist()
        case "pinned memory is read before the copy has come":
            host = torch.empty(2, pin_memory=True).fill_(0)
            host.copy_(x, non_blocking=True)
            if waits:
                main.synchronize()
            return (host + 0).tolist()
        case "memory is freed while a side stream uses it":
            side.wait_stream(main)
            with streams.on(side):
                y = x * 3
            if waits:
                x.record_stream(side)
            del x
            torch.zeros(2, device=device).add_(1)
            main.wait_stream(side)
            return y.tolist()
        case "memory of a side stream is freed while the main stream uses it":
            with streams.on(side):
                z = torch.ones(2, device=device)
            main.wait_stream(side)
            y = z * 3
            del z
            if waits:
                side.wait_stream(main)
            with streams.on(side):
                torch.zeros(2, device=device)
            return y.tolist()
    raise ValueError(kind)


def mixed_devices(device: torch.device) -> None:
    torch.ones(2, device=device) + torch.ones(2)


# -- memory, and copies of it


def pinned_memory(device: torch.device) -> dict[str, Any]:
    """What page-locked memory of an odd size takes, whether a fork copies it, and what is left of it."""
    ledger, place = Ledger(), Place(torch.device("cpu"), Tier.HOST, pinned=True)
    large = ledger.allocate(Category.MASTER, 1001, torch.float32, place)
    small = ledger.allocate(Category.MASTER, 3, torch.float32, place)
    found: dict[str, Any] = {"booked": ledger.tiers[Tier.HOST], "pinned": large.is_pinned() and small.is_pinned()}
    regions = Path("/proc/self/smaps").read_text().split("VmFlags:")
    at = f"{large.data_ptr():x}-"
    found["forks"] = next(
        "dc" not in after.split("\n")[0].split() for before, after in pairwise(regions) if at in before
    )
    large.fill_(1.0)
    on_device = torch.zeros(1001, device=device)
    to_device(on_device, large, stays=True)
    del large  # while the copy may be under way
    found["copied"] = float(on_device.sum())
    ledger.pinned.give_back()
    found["left"] = ledger.tiers[Tier.HOST], Path("/proc/self/maps").read_text().count(at)
    return found


def pinned_memory_without_its_ledger(device: torch.device) -> dict[str, Any]:
    """Page-locked memory that outlives its ledger, and is followed by another, at the same address or not."""
    from sim.memory import REGISTERED

    place = Place(torch.device("cpu"), Tier.HOST, pinned=True)
    found: dict[str, Any] = {"pinned": []}
    before = set(REGISTERED)
    for _ in range(3):
        left = Ledger().allocate(Category.MASTER, 2**18, torch.float32, place)
        found["pinned"].append(left.is_pinned())
        del left
    left_over = REGISTERED.keys() - before
    Ledger().pinned.give_back()
    return found | {"left over": len(left_over), "after": len(left_over & REGISTERED.keys())}


def array_that_is_used_at_once(device: torch.device, first: str, then: str) -> list[float]:
    """An array in pinned memory from or to which a copy is under way (`first`) while it is used again (`then`). Returns
    a value of what has been sent before, of what is sent or read, and of the array."""
    array = empty(Category.MASTER, 256, torch.float32, Place(torch.device("cpu"), Tier.HOST, pinned=True), Ledger())
    array.write(ALL, torch.full((256,), 1.0))
    sent, found, beside = torch.zeros(256, device=device), 0.0, SideStream(device)
    if first == "send":
        array.copy_to(ALL, sent)
    elif first == "send beside compute":
        with beside.after_current():
            array.copy_to(ALL, sent)
    else:
        array.write(ALL, torch.full((256,), 2.0, device=device))
    if then == "send":
        found = array.copy_to(ALL, torch.zeros(256, device=device))[7].item()
    elif then == "read":
        found = array.read()[7].item()
    elif then == "open":
        array.editable().fill_(3.0)
    elif then == "edit":
        with array.edit() as values:
            values.add_(3.0)
    else:
        array.write(ALL, torch.full((256,), 3.0, device=device if then == "write from the device" else "cpu"))
    beside.join()
    return [sent[7].item(), found, array.read()[7].item()]


def array_that_is_only_sent(device: torch.device) -> int:
    """Returns how many copies to the device are still waited for after many, which nothing has written over."""
    array = empty(Category.PARAMETER, 256, torch.float32, Place(torch.device("cpu"), Tier.HOST, pinned=True), Ledger())
    for _ in range(20):
        array.copy_to(ALL, torch.zeros(256, device=device))
    return len(array._leaving)  # type: ignore[attr-defined]  # of an array in memory


def checkpoint_that_is_dropped(device: torch.device) -> float:
    """A kept activation is brought back, and dropped before it has come, as in a backward that fails. Returns a value
    of what takes its memory then."""
    host = Place(torch.device("cpu"), Tier.HOST, pinned=True)
    store = store_for(ActivationCheckpointing("Linear", offload=True), Ledger(), device, host, LocalComm())
    memory = Ledger().allocate(Category.ACTIVATION_CHECKPOINT, 4096, torch.uint8, host).fill_(1)
    target, _ = store.fetch(memory)
    del target
    return float(torch.full((4096,), 2, dtype=torch.uint8, device=device)[7].item())


def input_that_is_edited_after_its_block(device: torch.device) -> tuple[list[float], list[float]]:
    """Returns gradients of a block, and of one whose input is copied to the host, and edited once its call is over."""
    start, found = nn.Linear(64, 64).to(device), []
    for recomputes in (False, True):
        model = nn.Sequential(copy.deepcopy(start))
        if recomputes:
            host = Place(torch.device("cpu"), Tier.HOST, pinned=True)
            policy = ActivationCheckpointing("Linear", offload=True)
            Recompute(model, "Linear", store_for(policy, Ledger(), device, host, LocalComm())).install()
        given = torch.ones(8, 64, device=device)
        loss = model(given).square().sum()
        if recomputes:
            given.zero_()
        loss.backward()
        found.append(model[0].weight.grad.flatten().tolist())
    return found[0], found[1]


class Codebook(nn.Linear):
    """Counts its calls, and keeps a mean of what it has seen, past torch's count of edits."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.data.add_(1)
        self.mean.data.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.mean) * self.mask * self.calls


def buffers_edited_through_data(device: torch.device) -> list[tuple[list[float], ...]]:
    """Returns gradients and buffers after two steps of blocks that edit buffers, and of ones that recompute."""
    torch.manual_seed(0)
    start, found = nn.Sequential(Codebook(), Codebook()), []
    for recomputes in (False, True):
        model = copy.deepcopy(start).to(device)
        if recomputes:
            here = Place(device)
            store = store_for(ActivationCheckpointing("Codebook"), Ledger(), device, here, LocalComm())
            Recompute(model, "Codebook", store).install()
        for step in range(2):
            model(torch.arange(32.0).view(4, 8).to(device) + step).square().sum().backward()
        kept = [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
        found.append(tuple(tensor.flatten().tolist() for tensor in kept))
    return found


def bytes_of_unchanged_buffers(device: torch.device) -> list[int]:
    """Returns what copies of buffers take of the device around a call that changes none, and once it has told so."""
    from sim import streams

    module, memory = nn.BatchNorm1d(4096, affine=False).to(device), torch.get_device_module(device).memory_stats
    before, found = memory()["requested_bytes.all.current"], []
    recompute = Recompute(
        nn.Sequential(nn.Linear(1, 1)),
        "Linear",
        store_for(ActivationCheckpointing("Linear"), Ledger(), device, Place(device), LocalComm()),
    )
    first = Buffers(module)
    for step in (lambda: None, lambda: recompute.free_unchanged(first), streams.synchronize):
        step()
        found.append(memory()["requested_bytes.all.current"] - before)
    recompute.free_unchanged(Buffers(nn.Identity()))
    return [*found, memory()["requested_bytes.all.current"] - before]


# -- collectives


def collectives(device: torch.device, size: int) -> list[Any]:
    from sim.group import run_ranks

    def on_rank(rank: int) -> Any:
        comm = make_comm(device, SOON, backend="sim")
        row = torch.arange(4.0, device=device) + 10 * comm.rank
        full = torch.empty(size, 4, device=device)
        gather = comm.all_gather(full, row, "rows", diverges=rank == size - 1)
        gather.wait()
        shard, rows = torch.empty(4, device=device), full * (comm.rank + 1)
        comm.reduce_scatter(shard, rows, rows.new_empty(0), "sum").wait()
        sent = [torch.full((rank + 1,), float(peer), device=device) for peer in range(size)]
        received = [torch.empty(peer + 1, device=device) for peer in range(size)]
        comm.all_to_all(received, sent, "parts")
        comm.broadcast(row, "row", source=size - 1)
        total = comm.all_reduce(row.double(), "total", "max")
        wave = torch.full((2,), complex(1, rank), device=device)
        waves = torch.empty(2 // 2, dtype=torch.complex64, device=device)
        comm.reduce_scatter(waves, torch.stack([wave[:1]] * size), wave.new_empty(0), "waves").wait()
        comm.broadcast(wave, "wave", source=0)
        large = torch.full((2**17,), float(rank + 1))  # on the host
        comm.broadcast(large, "large", source=size - 1)
        assert bool((large == size).all())
        found = [full, shard, *received, row, total, waves, wave]
        return gather.has_divergence(), [tensor.tolist() for tensor in found]

    return run_ranks(size, on_rank)


def wrong_order(device: torch.device) -> None:
    from sim.group import run_ranks

    def on_rank(rank: int) -> None:
        comm = make_comm(device, SOON, backend="sim")
        row, full = torch.ones(2, device=device), torch.ones(2, 2, device=device)
        if rank:
            comm.all_gather(full, row, "rows").wait()
        else:
            comm.reduce_scatter(row, full, full, "rows").wait()

    run_ranks(2, on_rank)


def wrong_order_of_two(device: torch.device, *, is_made: bool) -> list[float]:
    """Two communicators of the same ranks; if the mistake `is_made`, one rank launches in them in another order."""
    from sim import streams
    from sim.group import run_ranks

    def on_rank(rank: int) -> float:
        comm = make_comm(device, SOON, backend="sim")
        comms = [comm, comm.split([range(2)])]
        fulls = {comm: torch.zeros(2, 2, device=device) for comm in comms}
        gathers: list[Any] = []
        for comm in reversed(comms) if rank and is_made else comms:
            gathers = [*gathers, comm.all_gather(fulls[comm], torch.ones(2, device=device), "rows")]
        for gather in gathers:  # not before the second one is launched: only the device keeps them in order
            gather.wait()
        return float(fulls[comms[0]].sum())

    with patch.object(streams, "HANG_S", 0.5):
        return run_ranks(2, on_rank)


def rank_that_never_comes(device: torch.device, *, in_part: bool = False) -> list[str]:
    """Rank 1 leaves out a collective, `in_part` one of another communicator than the one whose limit is asked, and rank
    0 waits for its result. Both then go on with new groups."""
    from sim.group import run_ranks

    def on_rank(rank: int) -> str:
        comm = make_comm(device, timedelta(seconds=0.5), backend="sim")
        told, part = "", comm.split([range(2)]) if in_part else comm
        if rank == 0:
            full = torch.zeros(2, 2, device=device)
            gather = part.all_gather(full, full[0], "rows", diverges=False)
            gather.wait()
            try:
                on_host(full, comm.limit) if in_part else gather.has_divergence()
            except RuntimeError as error:
                told = f"{type(error).__name__}: {error}"
        for each in {comm, part}:
            each.abandon()
        again = make_comm(device, SOON, backend="sim")
        full = torch.zeros(2, 2, device=device)
        again.all_gather(full, torch.ones(2, device=device), "rows").wait()
        assert full.sum().item() == 4.0
        return told

    return run_ranks(2, on_rank)


# -- the engine


class Tower(nn.Module):
    """Blocks, a norm and a tied weight. Without dropout: ranks that are threads draw from one generator."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.enter = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor, without: int | None = None) -> torch.Tensor:
        x = self.enter(tokens)
        for number, block in enumerate(self.blocks):
            if number != without:
                x = x + block(x)
        return nn.functional.linear(self.norm(x), self.enter.weight)


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower()


class Averaging(Tower):
    """Keeps a running mean of what it has seen, and how often, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(11))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor, without: int | None = None) -> torch.Tensor:
        logits = super().forward(tokens, without)
        with torch.no_grad():
            self.mean.lerp_(logits.mean((0, 1)), 0.1)
            self.seen.add_(1)
        return logits - self.mean


def averaging_tower() -> Averaging:
    torch.manual_seed(0)
    return Averaging()


class Normed(Tower):
    """Reads weights itself that rest in two bytes."""

    def forward(self, tokens: torch.Tensor, without: int | None = None) -> torch.Tensor:
        x = self.enter(tokens)
        for block in self.blocks:
            weight = block[0].weight  # type: ignore[index]
            x = x + block(nn.functional.linear(x, weight / weight.norm(dim=1, keepdim=True)))  # type: ignore[operator]
        return nn.functional.linear(self.norm(x), self.enter.weight)


def normed_tower() -> Normed:
    torch.manual_seed(0)
    return Normed()


class OfOneKind(torch.optim.Optimizer):
    """Momentum, with kernels for one kind of device."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.device.type != self.kind:
                raise RuntimeError(f"no kernel for {parameter.device.type}")
            if parameter.grad is not None:
                state = self.state[parameter]
                state["momentum"] = state.get("momentum", 0.0) * 0.9 + parameter.grad
                parameter.sub_(state["momentum"] * 0.1)


def train(
    device: torch.device,
    comm: Comm,
    start: nn.Module,
    *,
    stage: int,
    offload: Offload | None = None,
    precision: str = "32-true",
    clips: bool = False,
    micro: int = 1,
    steps: int = 3,
    kernel: str = "fused",
    optimizer: str = "AdamW",
    event: str | None = None,
    path: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A small training, of which `event` happens in the second step; the waits of the host are those of its last."""
    model: Any = copy.deepcopy(start)
    if options.get("tensor_parallel_size", 1) > 1:
        parallelize(model, device, comm.size, options["tensor_parallel_size"])
    frozen = [*model.blocks[0].parameters(), *model.norm.parameters()] if event == "layers are thawed" else []
    for parameter in frozen:
        parameter.requires_grad_(False)
    if kernel == "of one kind":
        made: torch.optim.Optimizer = OfOneKind(model.parameters(), device.type)
    else:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        made = getattr(torch.optim, optimizer)(trained, **_options(device, kernel))
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=dtype is torch.float16)
    if "units" in options:
        options["unit_classes"] = (nn.Linear, nn.Embedding, nn.LayerNorm) if options.pop("units") == "modules" else None
    settings = Options(offload=offload, bucket_bytes=2**11, autocast_dtype=dtype, **options)
    engine = Engine(model, [made], stage=stage, comm=comm, device=device, options=settings)
    data = comm.rank // settings.tensor_parallel_size
    losses, waits = [], _waits()
    for step in range(steps):
        if step == steps - 1:
            waits.clear()
        skipped = None
        if step == 1 and event == "ranks use different modules":
            skipped = data
        elif step == 1 and event == "a rank reads alone" and comm.rank == 1:
            losses.append(model.blocks[1][0].weight.sum().detach())
        elif step == 1 and event == "weights are edited through p.data":
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
        elif step == 1 and event == "weights are summed by users":
            with torch.no_grad():
                for work in [dist.all_reduce(parameter, async_op=True) for parameter in model.parameters()]:
                    work.wait()
        elif step == 1 and event == "layers are thawed":
            for parameter in frozen:
                parameter.requires_grad_(True)
            made.add_param_group({"params": frozen})
        elif step == 1 and event == "a step fails":
            _fail(engine, model, device)
        elif step == 1 and event == "a checkpoint is saved":
            assert path is not None
            save(comm, engine, [made], path)
        made.zero_grad()
        for number in range(micro):
            generator = torch.Generator().manual_seed(100 * step + 10 * number + data)
            tokens = torch.randint(0, 11, (2, 5), generator=generator)
            tokens = tokens.pin_memory().to(device, non_blocking=True) if device.type != "cpu" else tokens
            casts = torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)
            with engine.forward(), casts:
                logits = model(tokens, skipped)
                loss = nn.functional.cross_entropy(logits.view(-1, 11), tokens.view(-1)) / micro
            with engine.backward():
                scaler.scale(loss).backward()
            losses.append(loss.detach())
        if step == 1 and event == "a penalty is not reduced":
            with engine.no_sync(), engine.forward():
                penalty = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
                with engine.backward():
                    penalty.backward()
        if scaler.is_enabled():
            engine.gradients.unscale_(scaler, made)
        if step == 1 and event == "gradients are summed by users":
            works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
            for work in works:
                work.wait()
        if step == 1 and event == "gradients are edited":
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
        if clips:
            engine.gradients.clip_by_norm_(made, 0.1)
        scaler.step(made)
        scaler.update()
        if isinstance(rate := made.param_groups[0].get("lr"), torch.Tensor):
            rate.mul_(0.5)  # as a scheduler does
    engine.catch_up()
    told = dict(waits)
    found = {"losses": [float(loss) for loss in losses], "waits": told, "units": len(engine.loans.cache.units)}
    found["groups"] = len(engine.groups)
    found["fused"] = made.param_groups[0].get("fused")
    engine.close()
    if event == "a checkpoint is saved":
        assert path is not None
        found["saved"] = StoredCheckpoint(path).load()["state_dict"]
    return found | {"weights": {name: _whole(value).detach().cpu() for name, value in model.named_parameters()}}


def _options(device: torch.device, kernel: str) -> dict[str, Any]:
    """What an optimizer is told: which kernel it takes, or what it finds on the device."""
    if kernel == "options on the device":
        numbers = [torch.full((), value, device=device) for value in (1e-2, 0.8, 0.9)]
        return {"lr": numbers[0], "betas": tuple(numbers[1:]), "fused": True}
    if kernel == "capturable":
        return {"lr": 1e-2, "foreach": False, "capturable": device.type != "cpu"}
    return {"lr": 1e-2} if kernel == "torch's choice" else {"lr": 1e-2, kernel: True}


def parallelize(model: nn.Module, device: torch.device, ranks: int, size: int) -> None:
    """Divides each block among `size` neighbours: columns of its first matrix, rows of its second one."""
    mesh = init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=("data", "tensor"))
    plan = {"blocks.*.0": ColwiseParallel(), "blocks.*.2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan, src_data_rank=None)  # all ranks have the same values


def _whole(values: torch.Tensor) -> torch.Tensor:
    return values.full_tensor() if isinstance(values, DTensor) else values


def _fail(engine: Engine, model: nn.Module, device: torch.device) -> None:
    """A step that ends in backward, on every rank."""

    def fail(*_: Any) -> None:
        raise ArithmeticError("in the middle")

    hook = model.blocks[1].register_full_backward_hook(fail)  # type: ignore[union-attr]
    with engine.forward():
        loss = model(torch.zeros(2, 5, dtype=torch.int64, device=device)).sum()
    with suppress(ArithmeticError), engine.backward():
        loss.backward()
    hook.remove()


def _waits() -> Any:
    try:
        from sim import streams
    except ImportError:
        return {}
    return streams.this_host().waits


def train_on_ranks(device: torch.device, size: int, start: nn.Module, **kwargs: Any) -> list[dict[str, Any]]:
    """Trains on ranks of the device that are threads; on the host, on such ranks too."""
    if size == 1:
        return [train(device, LocalComm(on_device=device.type != "cpu"), start, **kwargs)]
    if device.type == "cpu":
        with threads_of_torch(size) as joining:
            return ThreadWorld(size).run(lambda comm: joining(comm.rank) or train(device, comm, start, **kwargs))
    from sim.device import HostWatch
    from sim.group import run_ranks

    def on_rank(_: int) -> dict[str, Any]:
        with HostWatch():  # modes are of a thread
            return train(device, make_comm(device, SOON, backend="sim"), start, **kwargs)

    return run_ranks(size, on_rank)


def measured_on_host(device: torch.device, size: int, start: nn.Module, **kwargs: Any) -> int:
    """Trains as above, and returns how many gradients the host has measured."""
    on_host = 0
    norm_of = norm._norm_of

    def note(piece: torch.Tensor, norm_type: float) -> torch.Tensor:
        nonlocal on_host
        on_host += piece.device.type == "cpu" and piece.numel() > 0  # of some a rank has no part
        return norm_of(piece, norm_type)

    with patch.object(norm, "_norm_of", note):
        train_on_ranks(device, size, start, **kwargs)
    return on_host


@contextmanager
def threads_of_torch(size: int) -> Iterator[Callable[[int], None]]:
    """Inside, threads that say their rank are ranks of `torch.distributed` on the host: DTensor has its own groups."""
    world, store = dist.distributed_c10d._world, dist.HashStore()

    def join(rank: int) -> None:
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        dist.init_process_group("threaded", rank=rank, world_size=size, store=store)

    dist.distributed_c10d._world = multi_threaded_pg.ThreadLocalWorld()
    try:
        yield join
    finally:
        dist.distributed_c10d._world = world


def seconds_waited(device: torch.device, start: nn.Module, link: float) -> list[float]:
    """What each rank says that it has waited for others, in simulated seconds, where a link carries so many bytes/s."""
    from sim import streams
    from sim.device import HostWatch
    from sim.group import run_ranks

    def on_rank(_: int) -> float:
        comm = make_comm(device, SOON, backend="sim")
        with HostWatch():
            train(device, comm, start, stage=2, steps=2)
        streams.synchronize()
        return comm.clock.seconds

    streams.State.rates = streams.Rates(flops=1e12, memory=1e12, copies=1e12, link=link, host=1e12)
    return run_ranks(2, on_rank)


IN_A_STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)


class Bytes(NamedTuple):
    """Of one rank, in one phase or at rest."""

    allocated: int  # most that the device's allocator has given out, in blocks
    requested: int  # as it was asked for
    counted: int  # by the ledger; of a phase, by one that follows all tensors


def bytes_of_training(device: torch.device, size: int, **setting: Any) -> list[dict[str, Bytes]]:
    """What each rank takes in the phases of a last step, and at rest after it."""
    from sim import streams
    from sim.device import HostWatch
    from sim.group import run_ranks

    module = torch.get_device_module(device)
    gc.collect()
    streams.synchronize()

    def on_rank(_: int) -> dict[str, Bytes]:
        comm = make_comm(device, SOON, backend="sim") if size > 1 else LocalComm(on_device=True)
        memory, found = Memory(), dict[str, Bytes]()
        hollow = Hollow(lambda made: memory.born(made) if made.device == device else None, computes=True)
        before = module.memory_stats()

        def taken(which: str, counted: int) -> Bytes:
            now = module.memory_stats()
            kinds = [f"{kind}_bytes.all" for kind in ("allocated", "requested")]
            return Bytes(*(now[f"{kind}.{which}"] - before[f"{kind}.current"] for kind in kinds), counted)

        def enter(phase: Phase) -> None:
            left, memory.phase = memory.phase, phase
            if left in memory.peaks:
                found[left] = taken("peak", memory.peaks[left].nbytes)
            module.reset_peak_memory_stats()

        with HostWatch(), hollow:
            engine = train_layers(comm, device, memory, enter, **setting)
            streams.synchronize()
            resting = sum(nbytes for name, nbytes in engine.bytes_by_category().items() if "(" not in name)
            found["at rest"] = taken("current", resting)
            engine.close()
        return found

    return run_ranks(size, on_rank)


def rehearsed_training(size: int, rank: int, **setting: Any) -> dict[Phase, int]:
    """Most bytes that a rehearsal of that training has on the device in each phase of its last step."""
    comm = CountingComm(rank, size, on_device=True) if size > 1 else LocalComm(on_device=True)
    memory = Memory()

    def enter(phase: Phase) -> None:
        memory.phase = phase

    with Hollow(memory.born):
        machine = Machine(host_is_apart=True)
        train_layers(comm, torch.device("cpu"), memory, enter, machine=machine, **setting).close(whole=False)
    return {phase: memory.peaks[phase].nbytes for phase in IN_A_STEP}


def train_layers(
    comm: Comm,
    device: torch.device,
    memory: Memory,
    enter: Callable[[Phase], None],
    *,
    stage: int,
    precision: str = "32-true",
    **options: Any,
) -> Engine:
    """Three steps of some layers, whose activations are a third of what they have in parameters."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    made = torch.optim.AdamW(model.parameters(), fused=True)
    dtype = {"bf16-mixed": torch.bfloat16}.get(precision)
    settings = Options(bucket_bytes=2**17, autocast_dtype=dtype, unit_classes=(nn.Linear,), replicate_size=1, **options)
    enter(Phase.SET_UP)
    engine = Engine(model, [made], stage=stage, comm=comm, device=device, options=settings, ledger=memory)
    for step in range(3):
        enter(Phase.FORWARD)
        memory.is_last = step == 2
        casts = torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)
        with engine.forward(), casts:
            loss = model(torch.ones(64, 256, device=device)).square().mean()
        enter(Phase.BACKWARD)
        with engine.backward():
            loss.backward()
        enter(Phase.STEP)
        made.step()
        del loss
    engine.catch_up()
    enter(Phase.OVER)
    return engine
