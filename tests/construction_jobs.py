"""Models that are built in shards, beside the same ones of one device; called on real ranks."""

import contextlib
import copy
import ctypes
import functools
import gc
import io
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import parametrizations

import kind_jobs
import real_jobs
from jobs import Classifier, loader, state_of, trainer
from lightning_zero.run import construction
from lightning_zero.run.construction import constructing
from lightning_zero.run.engine import Engine, Options
from lightning_zero.shards.early import early_of
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.desk import DESK_BYTES
from lightning_zero.wire.native import make_comm
from models import Assorted, assorted
from random_models import Model, Spec
from ranks import PATIENCE

SHORT_WAIT = 2.0  # s, where the other does not come

Make = Callable[[], nn.Module]


@functools.cache
def comm(*, wait_timeout: float = PATIENCE) -> Comm:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return make_comm(torch.device("cpu"), timedelta(seconds=wait_timeout))


# -- what people do when they build a model


class Layers(nn.Module):
    """Enough of them that most rest as rows by the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(11, 11)
        self.layers = nn.ModuleList([nn.Linear(11, 11) for _ in range(5)])
        self.last = nn.Linear(11, 11)


def edited(edit: Callable[[Layers], Any]) -> Make:
    def make() -> nn.Module:
        model = Layers()
        edit(model)
        return model

    return make


def _init_functions(model: Layers) -> None:
    with torch.no_grad():
        nn.init.orthogonal_(model.first.weight)
        nn.init.trunc_normal_(model.layers[1].weight, std=0.3)
        nn.init.eye_(model.layers[3].weight)
        nn.init.sparse_(model.last.weight, 0.5)
        nn.init.uniform_(model.first.bias)


def _through_data(model: Layers) -> None:
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.5)
    model.first.weight.data[3].zero_()
    model.first.weight.data = torch.randn(11, 11)
    model.layers[0].weight.data = model.layers[1].weight.data.clone()


def _applied(model: Layers) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            module.bias.data.fill_(0.25)

    model.apply(init)


def _arithmetic(model: Layers) -> None:
    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            layer.weight.mul_(number + 1).add_(model.first.weight, alpha=0.5)
            layer.weight /= layer.weight.norm()
        model.last.weight.copy_(model.first.weight @ model.layers[0].weight)
        model.last.bias[2:5] = model.first.bias[:3]
        torch.nn.utils.vector_to_parameters(torch.randn(2 * 11 * 12), [*model.first.parameters(), model.last.weight])


def _views_that_are_kept(model: Layers) -> None:
    first, array = model.first.weight.data, model.layers[2].weight.detach().numpy()
    rows = [row for row in model.last.weight.data]  # noqa: C416
    nn.init.normal_(model.layers[4].weight)
    first.fill_(3)
    array[:] = 4
    for number, row in enumerate(rows):
        row.fill_(number)


def _ties(model: Layers) -> None:
    model.last.weight = model.first.weight
    model.layers[4] = model.layers[0]
    nn.init.normal_(model.last.weight)


def _copies(model: Layers) -> None:
    model.more = nn.ModuleList([copy.deepcopy(model.first) for _ in range(4)])
    model.whole = copy.deepcopy(model.layers)
    model.shallow = nn.Linear(11, 11)
    model.shallow.weight = nn.Parameter(model.first.weight.clone())
    nn.init.normal_(model.more[2].weight)


def _replaced(model: Layers) -> None:
    model.layers[0] = nn.Linear(7, 7)
    del model.layers[3]
    model.last.weight = nn.Parameter(torch.randn(11, 11), requires_grad=False)
    model.last.bias = None
    model.register_parameter("extra", nn.Parameter(torch.randn(3, 17)))


def _states(model: Layers) -> None:
    other = Layers()
    model.load_state_dict(other.state_dict())
    model.first.load_state_dict({"weight": torch.ones(11, 11), "bias": torch.ones(11)}, assign=True)


def _pickled(model: Layers) -> None:
    file = io.BytesIO()
    torch.save(model.layers, file)
    file.seek(0)
    model.layers = torch.load(file, weights_only=False)
    nn.init.normal_(model.layers[1].weight)


def _emptied_at_once(model: Layers) -> None:
    with torch.device("meta"):
        model.more = Layers()
    model.more.to_empty(device="cpu")
    for module in model.more.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def _emptied_one_by_one(model: Layers) -> None:
    with torch.device("meta"):
        model.more = Layers()
    for module in model.more.modules():
        if isinstance(module, nn.Linear):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()


def _other_dtypes(model: Layers) -> None:
    model.first.double()
    model.layers.to(torch.bfloat16)
    model.last.half()
    nn.init.normal_(model.layers[2].weight)
    model.to("cpu")


def _frozen(model: Layers) -> None:
    model.layers.requires_grad_(False)
    model.layers[1].weight.requires_grad = True


def _buffers(model: Layers) -> None:
    model.register_buffer("before", model.first.weight.detach().clone())
    model.register_buffer("drawn", torch.randn(4))
    model.register_buffer("unsaved", torch.randn(4), persistent=False)
    model.norm = nn.BatchNorm1d(11)


def _parametrised(model: Layers) -> None:
    parametrizations.weight_norm(model.first)
    parametrizations.orthogonal(model.layers[1])
    parametrizations.spectral_norm(model.layers[2])
    with warnings.catch_warnings(action="ignore"):
        nn.utils.weight_norm(model.layers[3])
    nn.init.normal_(model.first.parametrizations.weight.original1)


def _assigned_storage(model: Layers) -> None:
    with torch.no_grad():
        model.first.weight.set_(torch.randn(11, 11))
        model.last.weight.data = torch.randn(5, 11)
        model.last.weight.set_(torch.zeros(2, 3).normal_())
        model.layers[0].weight.data = model.layers[0].weight.data.t()
        nn.init.normal_(model.layers[0].weight)  # not contiguous: drawn in another order


def _assigned_data(model: Layers) -> None:
    """Of parameters that rest, and have the same values on all ranks by then."""
    spare = nn.Linear(11, 11)
    nn.init.normal_(model.last.weight)
    model.first.weight.data = torch.randn(11, 11)
    model.layers[0].weight.data = spare.weight
    model.layers[2].weight.data = model.layers[2].weight
    model.layers[3].bias.data = torch.randn(3)
    nn.init.normal_(model.last.weight)


def _data_dependent(model: Layers) -> None:
    """Scales each layer by what it makes of a batch (LSUV), and takes a gradient step."""
    batch = torch.randn(8, 11)
    with torch.no_grad():
        for layer in model.layers:
            batch = layer(batch)
            layer.weight.div_(batch.std())
    model.last(model.first(torch.randn(2, 11))).square().mean().backward()
    for parameter in (model.first.weight, model.last.weight):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None
    model.zero_grad()


def _saved_by_a_graph(model: Layers) -> None:
    """Autograd keeps the parameters themselves, while others are used."""
    loss = (model.first.weight * model.last.weight).sum()
    for layer in model.layers:
        nn.init.normal_(layer.weight)
    loss.backward()
    for parameter in (model.first.weight, model.last.weight):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None


def _recurrent(model: Layers) -> None:
    model.lstm = nn.LSTM(11, 5, num_layers=2, bidirectional=True)
    model.attention = nn.MultiheadAttention(12, 3)
    model.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
    model.embedding = nn.Embedding(9, 4, padding_idx=2)


MADE_BEFORE = nn.ModuleList([nn.Linear(11, 11) for _ in range(3)])


def _tiny(model: Layers) -> None:
    """Fewer elements than there are ranks."""
    model.tiny = nn.ParameterList([torch.ones(()), torch.ones(1), torch.ones(2)])
    for parameter in model.tiny:
        nn.init.normal_(parameter)


def _made_before(model: Layers) -> None:
    model.layers = copy.deepcopy(MADE_BEFORE)
    for layer in model.layers:
        layer.reset_parameters()


EDITS = {
    name.removeprefix("_").replace("_", " "): edited(edit)
    for name, edit in list(globals().items())
    if name.startswith("_") and getattr(edit, "__module__", None) == __name__
}
ZOO: dict[str, Make] = {"assorted": Assorted, **EDITS, **real_jobs.MODELS, **kind_jobs.MODULES}


# -- beside one device


@contextlib.contextmanager
def few_bytes() -> Iterator[None]:
    """Small models, too, are cut while they are built."""
    with patch.object(construction, "LEAST_BYTES", 600):
        yield


def facts_of(model: nn.Module) -> dict[str, Any]:
    """What must be as on one device, besides values."""
    ids = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        ids.setdefault(id(parameter), []).append(name)
    return {
        "ties": list(ids.values()),
        "trains": [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
        "shapes": [(name, tuple(parameter.shape), parameter.dtype) for name, parameter in model.named_parameters()],
        "unsaved": {name: buffer.clone() for name, buffer in model.named_buffers()},
    }


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(theirs, Tensor):
        return bool(mine.equal(theirs))
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(_same(mine[key], theirs[key]) for key in theirs)
    return bool(mine == theirs)


def beside_one_device(make: Make, seed: Callable[[int], int] = lambda rank: 7, **options: Any) -> dict[str, Any]:
    """What differs from rank 0's model of one device, and how much was cut while the model was built."""
    ranks = comm()
    torch.manual_seed(seed(0))
    expected = make()
    torch.manual_seed(seed(ranks.rank))
    make()
    state = torch.get_rng_state()
    torch.manual_seed(seed(ranks.rank))
    # Lightning, too, says on which device configure_model makes things
    given = Options(**options)
    with few_bytes(), torch.device("cpu"), constructing(stage=3, comm=ranks, options=given) as made:
        assert made is not None
        model = make()
        early = [early for early in map(early_of, model.parameters()) if early is not None]
        cut = sum(each.row is not None for each in early)
    draws_alike = bool(torch.get_rng_state().equal(state))
    plain = [name for name, parameter in model.named_parameters() if early_of(parameter) is None]
    with few_bytes():
        engine = Engine(model, [], stage=3, comm=ranks, options=given)
    engine.close()
    facts = facts_of(model)
    if seed(1) != seed(0):  # of buffers, as of parameters, rank 0's count
        torch.testing.assert_close(facts["unsaved"], facts_of(expected)["unsaved"], rtol=0, atol=0)
    return {
        "differing": [
            name
            for name, value in expected.state_dict().items()
            if not _same(model.state_dict()[name], value) or model.state_dict()[name].dtype != value.dtype
        ],
        "facts": [name for name, fact in facts_of(expected).items() if not _same(facts[name], fact)],
        "draws alike": draws_alike,
        "cut": cut,
        "of": len(early),
        "plain": plain,
    }


def built(name: str) -> dict[str, Any]:
    return beside_one_device(ZOO[name])


def built_at_random(spec: Spec) -> dict[str, Any]:
    return beside_one_device(lambda: Model(spec))


def built_with_other_seeds(name: str, **options: Any) -> dict[str, Any]:
    return beside_one_device(ZOO[name], seed=lambda rank: 100 + rank, **options)


# -- memory

WIDTH = 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)


class Wide(nn.Module):
    """67 MB in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, WIDTH)
        self.blocks = nn.ModuleList(self.make_blocks())
        self.head = nn.Linear(WIDTH, 4096, bias=False)
        self.head.weight = self.embedding.weight

    def make_blocks(self) -> list[nn.Module]:
        return [Block() for _ in range(6)]

    @property
    def units(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks]


class Applied(Wide):
    """As transformers do, once all is there."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self.init)

    def init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(0, 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Copied(Wide):
    def make_blocks(self) -> list[nn.Module]:
        block = Block()
        return [copy.deepcopy(block) for _ in range(6)]


WIDE = {"plain": Wide, "applied": Applied, "copied": Copied}


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


@dataclass
class Peak:
    before: int  # resident bytes
    mapped: int  # of them, of files
    shared: int  # of them, of desks: memory that ranks of one machine share, of a constant size
    nbytes: int = 0  # more than before, at the peak


M_MMAP_THRESHOLD = -3  # of malloc.h


@contextlib.contextmanager
def measuring_peak(since: Peak | None = None) -> Iterator[Peak]:
    # glibc keeps freed blocks of tens of MB for later; with a fixed threshold what is resident is what is live
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000) == 1
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    peak = Peak(_status("VmRSS"), _status("RssFile"), _status("RssShmem")) if since is None else replace(since)
    yield peak
    # Code that ran for the first time, or again after the system had dropped it, stays mapped and is no tensor.
    shared = _status("RssShmem") - peak.shared
    assert shared <= 2**21 + dist.get_world_size() * DESK_BYTES
    peak.nbytes = _status("VmHWM") - peak.before - max(0, _status("RssFile") - peak.mapped) - max(0, shared)
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 32 * 2**20) == 1  # as large as it gets by itself


def warmed() -> Comm:
    """All ranks, once whatever is imported or made the first time is there."""
    with constructing(stage=3, comm=comm()):
        small = nn.Linear(600, 600)
    Engine(small, [], stage=3, comm=comm()).close()
    return comm()


def resident_bytes(name: str) -> dict[str, int]:
    """What is resident more than before, at the peak, while a model is built and while an engine takes it over."""
    ranks = warmed()
    with measuring_peak() as built, constructing(stage=3, comm=ranks):
        model = WIDE[name]()
    with measuring_peak(since=built) as taken:
        engine = Engine(model, [], stage=3, comm=ranks)
    units = [sum(parameter.nbytes for parameter in unit.parameters()) for unit in model.units]
    units += [units[-1]] * (name == "copied")  # the block that the others are copies of is there at the same time
    found = {"built": built.nbytes, "taken over": taken.nbytes, "model": sum(units), "unit": max(units)}
    engine.close(whole=False)
    return found


def booked_bytes(name: str) -> dict[str, int]:
    """What the rows of a model take while it waits."""
    with few_bytes(), constructing(stage=3, comm=comm()) as made:
        model = ZOO[name]()
    assert made is not None
    whole = sum(parameter.nbytes for parameter in model.parameters() if early_of(parameter) is None)
    live = {str(category): nbytes for category, nbytes in made.ledger.live.items()}
    return {**live, "whole": whole, "model": sum(p.nbytes for p in model.parameters())}


# -- what goes wrong


def _timed(build: Callable[[int], Any], **waits: float) -> tuple[str, float]:
    start = time.monotonic()
    try:
        with few_bytes(), constructing(stage=3, comm=comm(**waits)):
            build(comm(**waits).rank)
    except Exception as error:
        told = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        return told, time.monotonic() - start
    return "", time.monotonic() - start


def _fails_on_one(rank: int) -> None:
    model = Layers()
    if rank == 1:
        raise ValueError("no such vocabulary")
    nn.init.normal_(model.first.weight)
    Layers()


def _fails_at_the_end_on_one(rank: int) -> None:
    Layers()
    if rank == 1:
        raise ValueError("no such vocabulary")


def _builds_another(rank: int) -> None:
    for _ in range(5):
        nn.Linear(10, 10 + rank)


def _builds_more(rank: int) -> None:
    for _ in range(5 + 5 * rank):
        nn.Linear(10, 10)


def _reads_on_one(rank: int) -> None:
    model = Layers()
    if rank == 0:
        print(model.first.weight)


def _initialises_on_one(rank: int) -> None:
    model = Layers()
    if rank == 0:
        nn.init.normal_(model.first.weight)
    nn.init.normal_(model.layers[0].weight)


WRONG = {
    name.removeprefix("_").replace("_", " "): function
    for name, function in list(globals().items())
    if name.startswith(("_fails", "_builds", "_reads", "_initialises"))
}


def go_wrong(name: str) -> dict[str, Any]:
    """How it ends on this rank, and that the next model is built."""
    told, seconds = _timed(WRONG[name])
    again, _ = _timed(lambda rank: Layers())
    return {"told": told, "seconds": seconds, "again": again}


def is_late_on_one() -> tuple[str, float]:
    def build(rank: int) -> None:
        Layers()
        time.sleep(3 * SHORT_WAIT * rank)
        Layers()

    return _timed(build, wait_timeout=SHORT_WAIT)


# -- where there is nothing to do


def classes_at(stage: int) -> set[str]:
    """Of parameters while their model is being built."""
    with constructing(stage=stage, comm=comm()) as made:
        assert made is None
        return {type(parameter).__module__ for parameter in Layers().parameters()}


def hooks_left() -> int:
    """Global hooks of torch after a model was built, and after one failed."""
    for build in (lambda rank: Layers(), _fails_on_one):
        _timed(build)
    return len(torch.nn.modules.module._global_parameter_registration_hooks)


def left_on_meta() -> str:
    with constructing(stage=3, comm=comm()), torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    try:
        Engine(model, [], stage=3, comm=comm())
    except ValueError as error:
        return str(error)
    return ""


def read_between() -> dict[str, Any]:
    """Between the end of the context and the engine, all ranks may read and edit."""
    torch.manual_seed(1)
    expected = Layers()
    torch.manual_seed(1)
    with few_bytes(), constructing(stage=3, comm=comm()):
        model = Layers()
    for edited in (model, expected):
        with torch.no_grad():
            edited.first.weight.mul_(2)
        edited.last.half()
    norms, expected_norms = ([float(p.float().norm()) for p in each.parameters()] for each in (model, expected))
    for edited, rank in ((model, comm().rank), (expected, 0)):  # of edits that differ rank 0's count
        edited.layers[1].weight.data = torch.full((11, 11), 1.0 + rank).triu().t()
    engine = Engine(model, [], stage=3, comm=comm())
    state = engine.states.full_model()
    engine.close()
    return {
        "norms": norms == expected_norms,
        "weights": [name for name, value in expected.state_dict().items() if not _same(state[name], value)],
        "gone": all(early_of(parameter) is None for parameter in model.parameters()),
    }


def calls_of_optimizers() -> int:
    """Collectives that it takes to make optimizers, and to ask for everything but values."""
    with few_bytes(), constructing(stage=3, comm=comm()):
        model = Layers()
    before = sum(comm().calls.values())
    torch.optim.AdamW(model.parameters(), fused=True)
    torch.optim.SGD([{"params": [parameter]} for parameter in model.parameters()], momentum=0.9)
    for parameter in model.parameters():
        assert parameter.shape == torch.Size(parameter.size())
        assert parameter.is_contiguous()
        assert parameter.stride() == torch.empty(parameter.shape).stride()
        assert isinstance(parameter, nn.Parameter)
        assert parameter.dtype == torch.float32
        assert parameter.nbytes == 4 * torch.numel(parameter)
        parameter.requires_grad_(False)
    return sum(comm().calls.values()) - before


def gathers_of(use: str) -> int:
    """All-gathers while a model is built, in which what is used last, or together, stays whole."""
    with patch.object(construction, "LEAST_BYTES", 1200), constructing(stage=3, comm=comm()):
        model = nn.LSTM(11, 11) if use == "together" else Layers()
        before = comm().calls["all_gather"]
        if isinstance(model, nn.LSTM):
            for _ in range(3):
                model.reset_parameters()
            return comm().calls["all_gather"] - before
        weight = model.first.weight
        if use == "read":
            for layer in model.layers:
                assert weight.norm() > 0
                nn.init.normal_(layer.weight)
        else:
            nn.init.normal_(weight)
            nn.init.normal_(model.layers[0].weight)
            weight.data = torch.randn(11, 11)
            nn.init.normal_(model.layers[1].weight)
            assert weight.norm() > 0
        return comm().calls["all_gather"] - before


def all_to_alls_of_reads() -> int:
    """By which ranks take rank 0's values, while values that are nobody's edits are read again and again."""
    with few_bytes(), constructing(stage=3, comm=comm()):
        model = Layers()
        before = [float(p.norm()) for p in model.parameters()]
        made = comm().calls["all_to_all"]
        assert [float(p.norm()) for p in model.parameters()] == before
        return comm().calls["all_to_all"] - made


def _copied() -> nn.Module:
    return copy.deepcopy(Layers())


def _emptied() -> nn.Module:
    with torch.device("meta"):
        model = Layers()
    return model.to_empty(device="cpu")


def _replaced_unseen() -> nn.Module:
    with torch.device("meta"):
        model = Layers()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                values = torch.empty_like(parameter, device="cpu").fill_(1)
                module._parameters[name] = nn.Parameter(values)
    return model


class Shared(Layers):
    def __init__(self) -> None:
        super().__init__()
        for layer in (*self.layers, self.last):
            layer.weight = self.first.weight


def _emptied_of_one_weight() -> nn.Module:
    """Of which every module makes its own."""
    with torch.device("meta"):
        model = Shared()
    return model.to_empty(device="cpu")


UNREGISTERED = {
    "copied": _copied,
    "emptied": _emptied,
    "emptied of one weight": _emptied_of_one_weight,
    "replaced": _replaced_unseen,
}


def unregistered(how: str) -> tuple[list[str], list[str]]:
    """Parameters of which torch tells nobody that they are there. Returns those that are whole once most of the model
    is there, and at the end."""

    def whole() -> list[str]:
        early = {name: early_of(parameter) for name, parameter in model.named_parameters()}
        return [name for name, each in early.items() if each is None or each.row is None]

    with few_bytes(), constructing(stage=3, comm=comm()):
        model = UNREGISTERED[how]()
        then = whole()
    return then, whole()


class Labelled(nn.Parameter):
    """Travels as the name of its class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, ("a label" if type(self) is Labelled else f"{type(self)}",)


def used_in_odd_ways() -> dict[str, Any]:
    """What users see of parameters that are being built, in places that a parameter seldom stands in."""
    with few_bytes(), constructing(stage=3, comm=comm()):
        model = Layers()
        model.first.weight.data = torch.ones(7, 11).t()
        model.label = Labelled(torch.ones(3))
        return {
            "strides": (model.first.weight.stride(), model.first.weight.is_contiguous()),
            "pickled": pickle.loads(pickle.dumps(model.label)),
        }


def cut_beside_one_without_values() -> int:
    """Parameters that are cut while a module of the model is as large as the model, and on the meta device."""
    with few_bytes(), constructing(stage=3, comm=comm()):
        holder = nn.Module()
        holder.large = nn.Parameter(torch.empty(1000, 1000, device="meta"))
        holder.small = nn.Parameter(torch.ones(4))
        layers = [nn.Linear(11, 11) for _ in range(6)]
        early = [early_of(layer.weight) for layer in layers]
        return sum(each is not None and each.row is not None for each in early)


def hold_on_one_rank(what: str) -> str:
    """Rank 0 holds, and uses, a module that the other has dropped, or a view of values that both have."""

    def build(rank: int) -> None:
        made = nn.Linear(11, 11)
        held = made.weight if what == "module" else made.weight.data
        both = [made] if what == "view" else []
        if rank:
            del held
        del made
        nn.Linear(11, 11)
        if rank == 0:
            assert held.norm() > 0
        for _ in range(5):
            nn.Linear(11, 11)
        for layer in both:
            assert layer.weight.norm() > 0

    return _timed(build)[0]


def with_dtensors_of_one_rank() -> dict[str, Any]:
    """As `parallelize_module` makes them of a mesh without tensor-parallel ranks."""
    with few_bytes(), constructing(stage=3, comm=comm()):
        torch.manual_seed(0)
        model = Layers()
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "tensor"))["tensor"]
        expected = model.first.weight.detach().clone()
        model.first.weight = nn.Parameter(distribute_tensor(expected, mesh, [Shard(0)]))
        nn.init.normal_(model.last.weight)
    made = type(model.first.weight) is DTensor
    whole = Engine(model, [], stage=3, comm=comm()).states.full_model()["first.weight"]
    return {"is as made": made, "same": whole.equal(expected)}


def class_of_what_is_held() -> list[str]:
    """Of two weights at the end, if somebody holds a view of the first."""
    with few_bytes(), constructing(stage=3, comm=comm()):
        model = Layers()
        held = model.first.weight.detach()
    assert held.norm() > 0
    return [type(layer.weight).__module__ for layer in (model.first, model.last)]


def dropped_bytes() -> dict[str, int]:
    """Bytes of rows while most of what was built is dropped again."""
    with few_bytes(), constructing(stage=3, comm=comm()) as made:
        assert made is not None
        for _ in range(20):
            model = Layers()
    live = dict(made.ledger.live)
    return {"rows": sum(live.values()), "model": sum(parameter.nbytes for parameter in model.parameters())}


# -- under Trainer


class Inside(Classifier):
    """Makes in configure_model what `Classifier` makes in its constructor."""

    def __init__(self, folder: Path | None = None) -> None:
        L.LightningModule.__init__(self)
        self.save_hyperparameters({"lr": 1e-2})
        self.losses, self.norms = [], []
        self.folder = folder
        self.seen: dict[str, Any] = {}

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        made = Classifier()
        for name, child in made.named_children():
            self.add_module(name, child)
        self.temperature = made.temperature
        nn.init.normal_(self.net[0].weight)
        self.seen["early"] = sum(early_of(parameter) is not None for parameter in self.parameters())


class Outside(Classifier):
    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.net[0].weight)


def fit(kind: type[Classifier], strategy: Any, precision: str = "32-true", **kwargs: Any) -> dict[str, Any]:
    """Ranks start from other seeds."""
    with few_bytes():
        L.seed_everything(1 + int(os.environ["RANK"]), verbose=False)
        model = kind()
        run = trainer(strategy, int(os.environ["WORLD_SIZE"]), precision=precision)
        run.validate(model, loader(seed=1), verbose=False)
        evaluated = float(run.callback_metrics["val_loss"])
        run.fit(model, loader(samples=32), **kwargs)
        run.strategy.barrier()
    return {
        "losses": model.losses,
        "evaluated": evaluated,
        "weights": state_of(model),
        "random": torch.get_rng_state(),
        "early": getattr(model, "seen", {}).get("early", 0),
    }


def what_fit_says(kind: type[Classifier], strategy: Any) -> str:
    said: list[str] = []
    listening = patch("lightning_zero.pl.sharded_strategy.rank_zero_info", said.append)
    with few_bytes(), listening, patch("lightning_zero.pl.table.WORTH_TELLING", 2000):
        trainer(strategy, 2, max_steps=1, enable_model_summary=True).fit(kind(), loader())
    return "\n".join(said)


def fit_and_resume(kinds: Sequence[type[Classifier]], strategy: Any, path: Path) -> list[dict[str, Any]]:
    """From the checkpoint of a run to others, of one model each."""
    found = []
    with few_bytes():
        L.seed_everything(1, verbose=False)
        run = trainer(strategy, 2)
        run.fit(Outside(), loader(samples=32))
        run.save_checkpoint(path)
        run.strategy.barrier()
        for kind in kinds:
            L.seed_everything(5, verbose=False)
            model = kind()
            trainer(strategy, 2, max_epochs=2).fit(model, loader(samples=32), ckpt_path=path)
            found.append({"losses": model.losses, "weights": state_of(model)})
    return found


def look_while_loading_on_rank_0(when: str, path: Path) -> str:
    class Looks(Inside):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            self.look("before")
            left = super().load_state_dict(*args, **kwargs)
            self.look("after")
            return left

        def look(self, now: str) -> None:
            if now == when and self.global_rank == 0:
                self.net[0].weight.norm().item()

    try:
        fit_and_resume([Looks], {"stage": 3}, path)
    except RuntimeError as error:
        return str(error)
    return ""


def fails_in_configure_model() -> tuple[str, float]:
    class Fails(Inside):
        def configure_model(self) -> None:
            super().configure_model()
            if self.global_rank == 1:
                raise ValueError("no such vocabulary")

    start = time.monotonic()
    try:
        with few_bytes():
            trainer({"stage": 3, "wait_timeout": PATIENCE}, 2).fit(Fails(), loader())
    except Exception as error:
        told = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        return told, time.monotonic() - start
    return "", 0.0


def state_in_shards() -> dict[str, Tensor]:
    """What stands in a checkpoint of a model that was built in shards and never trained."""
    with few_bytes(), constructing(stage=3, comm=comm()):
        model = assorted()
    return {name: value.clone() for name, value in model.state_dict().items()}
