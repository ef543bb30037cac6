"""One rank of an imagined world: `ImaginedStrategy`, with a disk that keeps nothing and a world that sends nothing."""

import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, final

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed import init_process_group, is_initialized
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from typing_extensions import override

from lightning_zero.distributed_private import leave_imagined_world
from lightning_zero.pl.strategy import ZeroStrategy
from lightning_zero.rehearsal.cost import Work, work_of
from lightning_zero.rehearsal.hollow import Hollow
from lightning_zero.rehearsal.memory import Memory, Phase
from lightning_zero.run.engine import Engine
from lightning_zero.run.latest import names_of
from lightning_zero.run.program import Cause
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.local import local_of
from lightning_zero.shards.offload import Machine
from lightning_zero.shards.slot import no_interception
from lightning_zero.tiers.disk import Disk, Move
from lightning_zero.tiers.ledger import Ledger
from lightning_zero.torch_private import tree_leaves
from lightning_zero.views.lazy import LazyTensor, Spread
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import CountingComm, LocalComm
from lightning_zero.wire.mesh import Mesh


class Traffic(NamedTuple):
    """What a rank has sent in operations of one kind."""

    calls: int
    nbytes: int


FULL = 2**62  # bytes that the imagined disk has left


@final
class ImaginedDisk(Disk):
    """A disk with room for everything, which keeps nothing. The folder that the user named is on another machine. What
    it is to write stays in memory until somebody waits for it: how soon a thread lets go of it differs from run to run.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(tempfile.gettempdir())

    @property
    @override
    def free_bytes(self) -> int:
        return FULL

    @override
    def _allocate(self, start: int, nbytes: int) -> None:
        pass

    @override
    def begin_read(self, moves: Sequence[Move]) -> "Future[None]":
        return _Held(moves)

    @override
    def begin_write(self, moves: Sequence[Move]) -> "Future[None]":
        self._writes.append(_Held(moves))
        return self._writes[-1]

    @override
    def _move(self, call: Callable[..., int], doing: str, start: int, values: Tensor) -> None:
        pass


class _Held(Future[None]):
    """Holds tensors until it is waited for."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._tensors = tensors

    @override
    def result(self, timeout: float | None = None) -> None:
        self._tensors = None


class Rank:
    """The rank that rehearses: what it is, and what is found out about it."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        *,
        steps: int,
        micro_batches: int = 1,
        host_is_apart: bool = True,
        computes: bool = False,
        answers: list[Any] | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.machine = Machine(host_is_apart=host_is_apart, disk=ImaginedDisk)
        self.memory = Memory(self._current_place, self._whole_gradients)
        self.hollow = Hollow(self.memory.born, self._ran, computes=computes, answers=answers)
        self.outcome: dict[str, Any] = {}  # fields of `Rehearsal` that are known at the end of the last step
        self._micro_batches = micro_batches  # of a step
        self._batches_left = steps * micro_batches
        self._is_in_last = False  # the last step is under way, or over
        self._engine: Engine | None = None
        self._names: dict[int, str] = {}
        self._running: list[Module] = []
        self._before = self._after = (Counter[str](), Counter[str]())  # the last step: see `_sent_by`
        self._work: defaultdict[int, Work] = defaultdict(Work)  # by the use in which it was done, in the last step

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Inside, knows which module runs, and computes nothing."""
        enter = register_module_forward_pre_hook(lambda module, _: self._running.append(module))
        leave = register_module_forward_hook(self._leave_module, always_call=True)
        with enter, leave, self.hollow:
            yield

    def _leave_module(self, *_: Any) -> None:
        self._running.pop()

    def set_up(self, engine: Engine) -> None:
        """Notes that the engine is made."""
        self._engine = engine
        self._names = {id(module): name for name, module in engine.module.named_modules()}

    def begin_batch(self) -> None:
        assert self._engine is not None
        if self._batches_left == self._micro_batches:
            self._is_in_last, self._before = True, _sent_by(self._engine.mesh)
        self._batches_left -= 1
        self.memory.phase = Phase.FORWARD
        self.memory.is_last = self._is_in_last

    def end_step(self) -> None:
        """Notes what was sent so far. At the end of a fit ranks leave the plan of a step that does not come."""
        assert self._engine is not None
        self._after = _sent_by(self._engine.mesh)

    def end_fit(self) -> None:
        """Takes down what the last step has left. What comes after it is no training."""
        engine = self._engine
        if engine is None or not engine.runner.journal.has_step or self.outcome:
            return
        self.memory.phase, self._is_in_last = Phase.SAVE, False
        saved = _save(engine)
        self.memory.phase = Phase.OVER
        calls, nbytes = (after - before for before, after in zip(self._before, self._after, strict=True))
        self.outcome.update(
            numel=sum(local_of(parameter).numel() for parameter in engine.module.parameters()),
            at_rest=engine.bytes_by_category(),
            sent={kind: Traffic(count, nbytes[kind]) for kind, count in calls.items()},
            program=engine.program(),
            saved=saved,
            work=dict(self._work),
        )

    def _ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self._engine is not None and self._is_in_last and (use := self._engine.runner.journal.count):
            self._work[use - 1] += work_of(func, args, kwargs, result)

    def _current_place(self) -> str:
        if self._running:
            module = self._running[-1]
            return self._names.get(id(module)) or type(module).__name__
        engine = self._engine
        if engine is None or (latest := engine.runner.journal.latest) is None:
            return ""
        cause, what = latest
        if cause is Cause.UNIT and isinstance(what, int):
            return engine.loans.cache.units[what].name
        return names_of(what) if isinstance(what, ShardGroup) else str(cause)

    def _whole_gradients(self) -> int:
        """Returns the bytes of gradients that autograd has made, where they are not sharded."""
        if self._engine is None:
            return 0
        gradients = [gradient for gradient in self._engine.runner.reductions.gradients if not gradient.travels]
        with no_interception():
            found = [slot.parameter.grad for gradient in gradients for slot in gradient.group.slots]
        return sum(one.nbytes for one in found if one is not None)


def _sent_by(mesh: Mesh) -> tuple[Counter[str], Counter[str]]:
    """Returns the calls and the bytes that a rank has sent so far, by kind of operation."""
    comms = mesh.comms
    return sum((one.calls for one in comms), Counter()), sum((one.bytes_sent for one in comms), Counter())


def _save(engine: Engine) -> int:
    """Reads the tensors that this rank writes to a checkpoint of shards, one after the other as a save does, and
    returns their bytes."""
    model = engine.states.spread_model()
    states = [engine.states.spread_optimizer(optimizer).get("state", {}) for optimizer in engine.optimizers]
    lazy = [leaf.source for leaf in tree_leaves([model, *map(dict, states)]) if isinstance(leaf, LazyTensor)]
    ranges = [piece for source in lazy if isinstance(source, Spread) for piece in source.pieces()]
    return sum(one.read().nbytes for one in ranges)


class WatchedStrategy(ZeroStrategy):
    """`ZeroStrategy` that tells a `Rank` where it is."""

    def __init__(self, played: Rank, *args: Any, **kwargs: Any) -> None:
        self.played = played
        super().__init__(*args, **kwargs)

    @property
    @override
    def device_mesh(self) -> DeviceMesh:
        with self.played.memory.looking_away():  # it has a table of ranks, on the host
            return super().device_mesh

    @override
    def _new_ledger(self) -> Ledger:
        return self.played.memory

    @override
    def _new_engine(self, *args: Any, **kwargs: Any) -> Engine:
        self.played.memory.phase = Phase.SET_UP
        engine = super()._new_engine(*args, **kwargs)
        self.played.set_up(engine)
        return engine

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.played.begin_batch()
        with self.played.hollow.asking():
            return super().training_step(*args, **kwargs)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.played.memory.phase = Phase.BACKWARD
        loss = super().backward(*args, **kwargs)
        self.played.memory.phase = Phase.STEP
        return loss

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        self.played.end_step()
        return result

    @override
    def teardown(self) -> None:
        self.played.end_fit()
        super().teardown()


@final
class ImaginedStrategy(WatchedStrategy):
    """`ZeroStrategy` on a rank of an imagined world."""

    _is_connected = False  # torch's process group is that of the imagined world

    @property
    @override
    def world_size(self) -> int:
        return self.played.ranks

    @property
    @override
    def global_rank(self) -> int:
        return self.played.rank

    @override
    def setup_distributed(self) -> None:
        """Connects to nobody."""

    @override
    def _configure_launcher(self) -> None:
        """Starts nobody."""

    @override
    def _may_parallelize(self, module: LightningModule) -> bool:
        # In a run that chooses its stage there are process groups already. A module that is not divided needs none.
        return super()._may_parallelize(module) and not is_initialized()

    @property
    @override
    def device_mesh(self) -> DeviceMesh:
        if not self._is_connected:
            if is_initialized():
                raise RuntimeError(
                    "The module has configure_model, which asks for the ranks of the run, and torch.distributed is "
                    "already initialised here for others. Rehearse it in a process of its own."
                )
            self._is_connected = True
            # In which nobody else is, and nothing is sent: device meshes and DTensors need one.
            init_process_group("fake", rank=self.played.rank, world_size=self.played.ranks)
            self._undo.callback(leave_imagined_world)
        return super().device_mesh

    @override
    def _ensure_comm(self) -> Comm:
        if self._comm is None:
            rank, ranks, is_device = self.played.rank, self.played.ranks, self.played.machine.host_is_apart is True
            self._comm = CountingComm(rank, ranks, on_device=is_device) if ranks > 1 else LocalComm(on_device=is_device)
        return self._comm

    @override
    def _machine(self) -> Machine:
        return self.played.machine

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._prepare_collective("barrier")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._prepare_collective("broadcast")
        return obj  # all ranks do what this one does

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self._prepare_collective("reduce")
        return tensor

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Tells nobody: there are no other ranks, and whoever rehearses gets the error."""
        self._failure = type(exception)

    @override
    def _close_engine(self) -> None:
        """Leaves the parameters as they are: a whole model would not fit anywhere."""
        if self.engine is not None and not self.engine.closed:
            self.engine.close(whole=False)
