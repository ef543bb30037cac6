"""Models that are never whole: parameters are sharded while their module is being built.

Inside `constructing` every rank runs the whole program of one device, on whole tensors, one after another: the same
calls on the same values draw the same random numbers. A parameter that a module registers stays whole for a while; as
soon as more is whole than the largest module that holds parameters directly, those that were used least recently are
cut into rows, rank 0's values (as under DDP), and every rank keeps its own. Who touches one later finds it whole again.

    build    embedding   block.0   block.1   block.2   head        apply(init): embedding   block.0   ...
    whole    embedding   block.0   block.1   block.2   head                     embedding   block.0
    rows                 embedding -------- + block.0 + block.1 + block.2       block.0 ..., head

Each gather and each cut begins with a message in which every rank says what it is doing: ranks that build different
models end in an error that says so at once, and all hear of an exception on one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, final
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from lightning_zero.shards.early import EarlyParameter, early_of, nothing
from lightning_zero.shards.managed import is_plain
from lightning_zero.shards.options import Options
from lightning_zero.shards.slot import no_interception, slot_of
from lightning_zero.stage import STAGES
from lightning_zero.tiers.ledger import Ledger, return_freed_memory
from lightning_zero.views.constructed import ConstructedClasses, ConstructedParameter, Keeper
from lightning_zero.views.intercept import Lent
from lightning_zero.views.lazy import Stored
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.mesh import Mesh

LEAST_BYTES = 2**20  # that may be whole at a time, so that small parameters are cut many at once
MUCH = 4 * 2**20  # bytes that are freed


class _Statement(NamedTuple):
    """What a rank says before a collective."""

    doing: str
    free: frozenset[int]  # numbers of the parameters that nobody looks at
    dead: frozenset[int]  # of those that nobody has any more
    error: str | None = None  # why this rank will not go on


@contextmanager
def constructing(*, stage: int, comm: Comm, options: Options | None = None) -> "Iterator[Construction | None]":
    """Inside, modules are built in shards where the stage partitions parameters; otherwise this does nothing.

        with constructing(stage=3, comm=comm):
            model = Model()
        engine = Engine(model, [optimizer], stage=3, comm=comm)

    Enter it on every rank, and build the same model on each. Between the end and the engine, parameters may still be
    read and edited by all ranks together.

    Args:
        stage: 0, 1, 2 or 3.
        comm: all ranks.
        options: the engine's.

    Raises:
        RuntimeError: on every rank, when one fails inside, or does something else than the others.
    """
    construction = Construction.of(stage, comm, options or Options())
    if construction is None:
        yield None
        return
    with construction.watching():
        yield construction


@final
class Construction(Keeper):
    """The parameters, of modules that are being built, that no engine has taken over yet."""

    def __init__(self, mesh: Mesh, options: Options) -> None:
        self._mesh = mesh
        offload = options.offload
        self._rests_on = None if offload is None or offload.parameters is None else torch.device("cpu")
        self.ledger = Ledger()
        self._classes = ConstructedClasses(self)
        self._made = 0  # parameters so far
        self._whole: dict[EarlyParameter, int] = {}  # bytes of those that are whole, least recently used first
        self._most = LEAST_BYTES  # that may be whole
        self._freed = 0
        self._replaced = _Replaced(self._register)
        self._failed: str | None = None  # why ranks do not go on together

    @classmethod
    def of(cls, stage: int, comm: Comm, options: Options) -> "Construction | None":
        """None where every rank holds the model whole; it does before torch divides it among tensor-parallel ranks."""
        if options.tensor_parallel_size > 1:
            return None
        mesh = Mesh.of(comm, options.replicate_size)
        return cls(mesh, options) if STAGES[stage].parameter and mesh.shard.size > 1 else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, looks after every parameter that a module registers in this thread. A collective at its end."""
        thread = threading.get_ident()

        def look_at(module: Module, name: str, parameter: Parameter) -> None:
            if threading.get_ident() == thread:
                self._register(module, name, parameter)

        def look_inside(_: Module, __: str, module: Module | None) -> None:
            """For what was not registered: in a module that was unpickled, or is a copy of one made before."""
            if module is not None and threading.get_ident() == thread:
                for inner in module.modules():
                    for name, parameter in inner._parameters.items():
                        if parameter is not None and early_of(parameter) is None and not parameter.is_meta:
                            self._register(inner, name, parameter)

        handles = (
            register_module_parameter_registration_hook(look_at),
            register_module_module_registration_hook(look_inside),
        )
        try:
            with self._replaced:
                yield
            self._replaced.look()
            self._end()
        except Exception as error:
            self._tell(error)
            raise
        finally:
            for handle in handles:
                handle.remove()

    # -- parameters come

    def _register(self, module: Module, name: str, parameter: Parameter) -> None:
        if parameter.is_meta:
            self._replaced.expect(module, name, parameter)
            return
        own = {**module._parameters, name: parameter}.values()
        self._most = max(self._most, sum(each.nbytes for each in own if each is not None and _is_built(each)))
        self.watch(parameter, f"{type(module).__name__}.{name}")

    def watch(self, parameter: Parameter, label: str) -> None:
        if early_of(parameter) is None and slot_of(parameter) is None and _is_built(parameter):
            self._take_in(self._note(parameter, label), parameter.nbytes)

    def _take_in(self, early: EarlyParameter, nbytes: int) -> None:
        """Its values were made, and used last."""
        self._whole.pop(early, None)
        self._whole[early] = nbytes
        self._most = max(self._most, nbytes)
        self._make_room(f"makes {early.label}")

    def _note(self, parameter: Parameter, label: str) -> EarlyParameter:
        self._made += 1
        early = EarlyParameter(parameter, self._made, label, self._mesh, self.ledger, self._rests_on)
        parameter.__class__ = self._classes[early.plain_class]
        return early

    def materialize(self, meta: Parameter, device: torch.device) -> Parameter:
        """A parameter as `meta` describes it, without values yet: this rank's row is to be filled."""
        parameter = Parameter(nothing(meta.shape, meta.dtype, device), meta.requires_grad)
        parameter.__class__ = type(meta)
        vars(parameter).update(vars(meta))
        early = self._note(parameter, "Parameter")
        early.rest_as(early.make_row())
        return parameter

    # -- and are used

    def lend(self, parameter: Parameter) -> Lent:
        early = self._bring(parameter)
        early.pins += 1
        return Lent(parameter, parameter, self._take_back)

    def _bring(self, parameter: Parameter) -> EarlyParameter:
        """Its values are here, and were used last."""
        early = early_of(parameter)
        assert early is not None
        nbytes = parameter.nbytes
        if early.is_whole:
            self._whole[early] = self._whole.pop(early, nbytes)
            return early
        self._most = max(self._most, nbytes)
        self._make_room(f"uses {early.label}", nbytes, meets=True)
        early.gather()
        self._whole[early] = nbytes
        return early

    def _take_back(self, loan: Lent, result: Any) -> None:
        early = early_of(loan.tensor)
        assert early is not None
        early.pins -= 1
        early.may_differ |= loan.is_edited or loan.is_visible_in(result)
        self._whole[early] = loan.tensor.nbytes

    def assign(self, parameter: Parameter, values: Tensor) -> None:
        early = early_of(parameter)
        assert early is not None
        if isinstance(values, ConstructedParameter):
            self._bring(values)
        if values is parameter:
            return
        with no_interception():
            parameter.data = values
        early.row, early.may_differ = None, True
        self._take_in(early, parameter.nbytes)

    def load(self, parameter: Parameter, source: Stored) -> None:
        early = early_of(parameter)
        assert early is not None
        if not early.is_whole:
            assert early.row is not None
            source.for_shard(early.extent(source.name), early.row)
            return
        with torch.no_grad(), no_interception():
            parameter.copy_(source.for_loading(parameter))
        early.may_differ = True

    def alias(self, parameter: Parameter) -> Parameter:
        early = self._bring(parameter)
        with no_interception():
            made = Tensor._make_subclass(early.plain_class, parameter.data)
        self.watch(made, "alias")
        return made

    @contextmanager
    def as_made(self, parameter: Parameter) -> Iterator[None]:
        early = self._bring(parameter)
        early.pins += 1
        constructed, parameter.__class__ = type(parameter), early.plain_class
        try:
            yield
        finally:
            parameter.__class__ = constructed
            early.pins -= 1

    # -- and go

    def _make_room(self, doing: str, nbytes: int = 0, *, meets: bool = False) -> None:
        """There is room for `nbytes` more that are whole: what was used least recently is cut. Ranks agree on that,
        because one may still have what others have dropped (Python frees cycles when it comes to it)."""
        if meets or sum(self._whole.values()) + nbytes > self._most:
            self._cut(self._meet(doing), self._most - nbytes)

    def _cut(self, free: frozenset[int], most: int) -> None:
        """Those that are `free` rest as rows, until at most so many bytes are whole."""
        left = sum(self._whole.values())
        for early in list(self._whole):
            if left <= most:
                break
            if early.number in free:
                nbytes = self._whole.pop(early)
                early.release()
                left -= nbytes
                self._freed += nbytes
        if self._freed > MUCH:
            return_freed_memory()
            self._freed = 0

    def _end(self) -> None:
        """All that can rests as rows. What somebody looks at stays as it is, plain."""
        self._cut(self._meet(f"has built a model, with {self._made} parameters"), most=0)
        for early in self._whole:
            early.leave()
        self._whole.clear()
        return_freed_memory()

    def _meet(self, doing: str) -> frozenset[int]:
        """Says what this rank is doing, and hears that all do the same. Returns the numbers of what no rank looks at.
        A collective."""
        dead = frozenset(early.number for early in self._whole if early.parameter is None)
        free = frozenset(early.number for early in self._whole if early.may_leave)
        heard = self._say(_Statement(doing, free, dead))
        gone = frozenset().union(*(statement.dead for statement in heard))
        for early in [early for early in self._whole if early.number in gone]:
            del self._whole[early]
            if early.parameter is not None:
                early.leave()
        return frozenset.intersection(*(statement.free for statement in heard))

    def _say(self, statement: _Statement) -> list[_Statement]:
        if self._failed is not None:
            raise RuntimeError(self._failed)
        try:
            heard = self._mesh.world.host.all_gather_object(statement, "construction")
        except RuntimeError as error:
            self._failed = str(error)
            error.add_note(f"The model is being built in shards; this rank {statement.doing}.")
            raise
        if errors := [f"rank {rank}: {said.error}" for rank, said in enumerate(heard) if said.error is not None]:
            self._failed = f"The model could not be built on {'; '.join(errors)}"
        elif len({said.doing for said in heard}) > 1:
            told = "; ".join(f"rank {rank} {said.doing}" for rank, said in enumerate(heard))
            self._failed = (
                f"Ranks build the model in different ways: {told}. At this stage it is built in shards, and every rank "
                "must run the same code: leave out what depends on the rank (rank 0's values count on all)."
            )
        if self._failed is not None:
            raise RuntimeError(self._failed)
        return heard

    def _tell(self, error: Exception) -> None:
        """The others hear, where they wait for this rank, that it will not come."""
        if self._failed is None:
            with suppress(RuntimeError):
                self._say(_Statement("failed", frozenset(), frozenset(), f"{type(error).__name__}: {error}"))


@final
class _Replaced(TorchFunctionMode):
    """Sees how parameters on the meta device are replaced by ones with memory: `Module.to_empty` registers none."""

    def __init__(self, register: Callable[[Module, str, Parameter], None]) -> None:
        super().__init__()
        self._register = register
        self._places: dict[int, list[tuple[ref[Module], str]]] = {}  # id of one on the meta device -> where it stands
        self._due: list[tuple[ref[Module], str]] = []  # where another one will stand

    def expect(self, module: Module, name: str, parameter: Parameter) -> None:
        self._places.setdefault(id(parameter), []).append((ref(module), name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._due:
            self.look()
        made = func(*args, **(kwargs or {}))
        if func is torch.empty_like and id(args[0]) in self._places and not made.is_meta:
            self._due += self._places[id(args[0])]
        return made

    def look(self) -> None:
        """Registers those that are there now."""
        due, self._due = self._due, []
        for place, name in due:
            module = place()
            parameter = None if module is None else module._parameters.get(name)
            if module is None or parameter is None:
                continue
            if parameter.is_meta:
                self._due.append((place, name))
            else:
                self._register(module, name, parameter)


def _is_built(parameter: Parameter) -> bool:
    """Whether it is an ordinary parameter that has values."""
    return not is_lazy(parameter) and is_plain(parameter) and not parameter.is_meta and parameter.numel() > 0
