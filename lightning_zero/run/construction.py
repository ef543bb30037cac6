"""Builds models that are never whole: parameters are sharded while their module is being built.

Inside `constructing` every rank runs the whole program of one device, on whole tensors, one after another: the same
calls on the same values draw the same random numbers. A parameter that a module registers stays whole for a while. As
soon as more is whole than the largest module that holds parameters directly, the least recently used parameters are
cut into rows, of rank 0's values (as under DDP), and every rank keeps its own. Code that uses such a parameter later
finds it whole again: it is gathered first.

    build    embedding   block.0   block.1   block.2   head        apply(init): embedding   block.0   ...
    whole    embedding   block.0   block.1   block.2   head                     embedding   block.0
    rows                 embedding -------- + block.0 + block.1 + block.2       block.0 ..., head

Each gather and each cut begins with a message in which every rank says what it is doing. So ranks that build different
models raise an error that says so at once, and an exception on one rank reaches all.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple, final
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from lightning_zero.device import point_at
from lightning_zero.run.constructed import ConstructedParameter
from lightning_zero.shards.early import EarlyParameter, early_of, nothing
from lightning_zero.shards.managed import is_plain
from lightning_zero.shards.options import Options
from lightning_zero.shards.slot import no_interception, slot_of
from lightning_zero.stage import STAGES
from lightning_zero.tiers.ledger import Ledger, return_freed_memory
from lightning_zero.torch_private import parameters_in
from lightning_zero.views.intercept import Lent, subclass_of
from lightning_zero.views.lazy import Stored
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.mesh import Mesh

LEAST_BYTES = 2**20  # that may be whole at a time in any model, so that small parameters are cut many at once
MUCH = 4 * 2**20  # bytes; after so many have been freed, memory goes back to the system


class _Statement(NamedTuple):
    """A rank's message before a collective. Parameters have the same numbers on all ranks."""

    doing: str
    free: frozenset[int]  # parameters whose values this rank can free: no view and no graph holds them
    dead: frozenset[int]  # parameters that Python has freed on this rank
    error: str | None = None  # the exception that has ended construction on this rank


@contextmanager
def constructing(*, stage: int, comm: Comm, options: Options | None = None) -> "Iterator[Construction | None]":
    """Shards the parameters of modules that are built inside, if the stage partitions parameters.

        with constructing(stage=3, comm=comm):
            model = Model()
        engine = Engine(model, [optimizer], stage=3, comm=comm)

    Enter it on every rank, and build the same model on each. Between its end and the engine, parameters may still be
    read and edited, by all ranks together.

    Args:
        stage: 0, 1, 2 or 3.
        comm: all ranks.
        options: the engine's.

    Raises:
        RuntimeError: on every rank, when one fails inside, or does something else than the others.
    """
    options = options or Options()
    # Tensor-parallel ranks hold the model whole until torch divides it among them.
    mesh = Mesh.of(comm, options.replicate_size) if options.tensor_parallel_size == 1 else None
    if mesh is None or mesh.shard.size == 1 or not STAGES[stage].parameter:
        yield None
        return
    construction = Construction(mesh, options)
    with construction.watching():
        yield construction


@final
class Construction:
    """The parameters of modules that are being built, until an engine takes them over."""

    def __init__(self, mesh: Mesh, options: Options) -> None:
        self._mesh = mesh
        self._thread = threading.get_ident()  # builds the model; modules of other threads are no part of it
        offload = options.offload
        self._rests_on = None if offload is None or offload.parameters is None else torch.device("cpu")
        self.ledger = Ledger()
        self._class_for = cache(partial(subclass_of, base=ConstructedParameter, keeper=self))  # of a plain one
        self._made = 0  # number of parameters so far
        self._whole: dict[EarlyParameter, int] = {}  # bytes of parameters that are whole, least recently used first
        self._most = LEAST_BYTES  # bytes that may be whole
        self._freed = 0  # bytes since memory last went back to the system
        self._replaced = _Replaced(self._register)
        self._failed: str | None = None  # the error that every further message raises

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, watches every parameter that a module registers. Collective at its end."""
        handles = (
            register_module_parameter_registration_hook(self._register),
            register_module_module_registration_hook(self._look_inside),
        )
        try:
            with self._replaced:
                yield
            self._replaced.look()
            self._end()
        except Exception as error:
            with suppress(RuntimeError):  # the others wait to hear from this rank, unless they have failed as well
                self._say(_Statement("failed", frozenset(), frozenset(), f"{type(error).__name__}: {error}"))
            raise
        finally:
            for handle in handles:
                handle.remove()

    # -- parameters are made

    def _look_inside(self, _: Module, __: str, module: Module | None) -> None:
        """Finds parameters that were never registered: of an unpickled module, or a copy of one made before."""
        if module is None or threading.get_ident() != self._thread:
            return
        for inner in module.modules():
            for name, parameter in parameters_in(inner).items():
                if parameter is not None and early_of(parameter) is None and not parameter.is_meta:
                    self._register(inner, name, parameter)

    def _register(self, module: Module, name: str, parameter: Parameter) -> None:
        if threading.get_ident() != self._thread:
            return
        if parameter.is_meta:
            self._replaced.expect(module, name, parameter)
            return
        own = {**parameters_in(module), name: parameter}.values()
        self._most = max(self._most, sum(each.nbytes for each in own if each is not None and _is_built(each)))
        self.watch(parameter, f"{type(module).__name__}.{name}")

    def watch(self, parameter: Parameter, label: str) -> None:
        """Takes charge of one more parameter; `label` is for messages."""
        if early_of(parameter) is None and slot_of(parameter) is None and _is_built(parameter):
            self._take_in(self._note(parameter, label), parameter.nbytes)

    def _take_in(self, early: EarlyParameter, nbytes: int) -> None:
        """Counts a parameter as whole and most recently used, and makes room for it."""
        self._whole.pop(early, None)
        self._whole[early] = nbytes
        self._most = max(self._most, nbytes)
        self._make_room(f"makes {early.label}")

    def _note(self, parameter: Parameter, label: str) -> EarlyParameter:
        self._made += 1
        early = EarlyParameter(parameter, self._made, label, self._mesh, self.ledger, self._rests_on)
        parameter.__class__ = self._class_for(early.plain_class)
        return early

    def materialize(self, meta: Parameter, device: torch.device) -> Parameter:
        """Returns a parameter as `meta` describes it, sharded; the caller fills this rank's row."""
        parameter = parameter_like(meta, nothing(meta.shape, meta.dtype, device))
        early = self._note(parameter, "Parameter")
        early.rest_as(early.make_row())
        return parameter

    # -- parameters are used

    def lend(self, parameter: Parameter) -> Lent:
        """Lends the values to one call."""
        early = self._bring(parameter)
        early.pins += 1
        return Lent(parameter, parameter, self._take_back)

    def _bring(self, parameter: Parameter) -> EarlyParameter:
        """Gathers a parameter where it is not whole, and counts it as most recently used."""
        early = _early(parameter)
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
        early = _early(loan.tensor)
        early.pins -= 1
        early.may_differ |= loan.is_edited or loan.is_visible_in(result)
        self._whole[early] = loan.tensor.nbytes

    def assign(self, parameter: Parameter, values: Tensor) -> None:
        """Does ``parameter.data = values``, which may be of another shape, dtype and device."""
        early = _early(parameter)
        if isinstance(values, ConstructedParameter):
            self._bring(values)
        with no_interception():
            point_at(parameter, values)
        early.row, early.may_differ = None, True
        self._take_in(early, parameter.nbytes)

    def load(self, parameter: Parameter, source: Stored) -> None:
        """Gives the parameter values of its shape from a file."""
        early = _early(parameter)
        if not early.is_whole:
            assert early.row is not None
            source.for_shard(early.extent(source.name), early.row)
            return
        with torch.no_grad(), no_interception():
            parameter.copy_(source.for_loading(parameter))
        early.may_differ = True

    def alias(self, parameter: Parameter) -> Parameter:
        """Returns a second parameter over the same memory."""
        self._bring(parameter)
        with no_interception():
            made = Parameter(parameter.data, requires_grad=False)
        self.watch(made, "alias")
        return made

    @contextmanager
    def loading(self, module: Module) -> Iterator[None]:
        """Around a `load_state_dict` of the model. Meets the others when it begins and when it has ended: else a rank
        that looks at the model meanwhile would wait for those that have gone on. Collective."""

        def begin(*_: Any) -> None:  # in a hook, as users override `load_state_dict`
            self._meet("loads a state dict into the model")

        handle = module.register_load_state_dict_pre_hook(begin)
        try:
            yield
        finally:
            handle.remove()
            self._meet("has loaded a state dict into the model")

    @contextmanager
    def as_made(self, parameter: Parameter) -> Iterator[None]:
        """Inside, the parameter has its values, and the class that the user gave it."""
        early = self._bring(parameter)
        early.pins += 1
        constructed, parameter.__class__ = type(parameter), early.plain_class
        try:
            yield
        finally:
            parameter.__class__ = constructed
            early.pins -= 1

    # -- parameters are cut

    def _make_room(self, doing: str, nbytes: int = 0, *, meets: bool = False) -> None:
        """Cuts the least recently used parameters, until there is room for `nbytes` more that are whole. Ranks agree on
        what they cut, because one may still have what others have freed: Python frees cycles at any time."""
        if meets or sum(self._whole.values()) + nbytes > self._most:
            self._cut(self._meet(doing), self._most - nbytes)

    def _cut(self, free: frozenset[int], most: int) -> None:
        """Cuts parameters among the `free` ones into rows, until at most `most` bytes are whole."""
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
        """Cuts all parameters that can be cut. Those with values in use are plain from here on, and stay whole."""
        self._cut(self._meet(f"has built a model, with {self._made} parameters"), most=0)
        for early in self._whole:
            early.leave()
        self._whole.clear()
        return_freed_memory()

    def _meet(self, doing: str) -> frozenset[int]:
        """Checks that all ranks are doing the same. Returns the numbers of parameters that all can free. Collective."""
        dead = frozenset(early.number for early in self._whole if early.parameter is None)
        free = frozenset(early.number for early in self._whole if early.may_leave)
        heard = self._say(_Statement(doing, free, dead))
        gone = frozenset().union(*(statement.dead for statement in heard))
        for early in [early for early in self._whole if early.number in gone]:  # a rank without it cannot gather it
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


@final
class _Replaced(TorchFunctionMode):
    """Finds the parameters that replace those on the meta device: `Module.to_empty` does not register them."""

    def __init__(self, register: Callable[[Module, str, Parameter], None]) -> None:
        super().__init__()
        self._register = register
        self._places: dict[int, list[tuple[ref[Module], str]]] = {}  # id of a meta parameter -> modules, and its names
        self._due: list[tuple[ref[Module], str]] = []  # places where another parameter is about to be put

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
        """Registers the parameters that have been put into their places."""
        due, self._due = self._due, []
        for place, name in due:
            if (module := place()) is None or (parameter := parameters_in(module).get(name)) is None:
                continue
            if parameter.is_meta:
                self._due.append((place, name))
            else:
                self._register(module, name, parameter)


def parameter_like(meta: Parameter, values: Tensor) -> Parameter:
    """Returns a parameter of these values with the class and the attributes of `meta`, by which users may know it."""
    made = Parameter(values, meta.requires_grad)
    made.__class__ = type(meta)
    vars(made).update(vars(meta))
    return made


def _early(parameter: Tensor) -> EarlyParameter:
    early = early_of(parameter)
    assert early is not None
    return early


def _is_built(parameter: Parameter) -> bool:
    """Whether the parameter is of an ordinary kind, and has values. A DTensor on a mesh of one rank has a tensor inside
    of it, which the engine takes over."""
    is_ordinary = is_plain(parameter) and not isinstance(parameter, DTensor)
    return is_ordinary and not parameter.is_meta and parameter.numel() > 0
