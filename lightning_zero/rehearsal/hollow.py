"""`Hollow`: runs PyTorch code for the shapes, the lifetimes and the order of its tensors, without computing them.

A large tensor that is made inside is *hollow*: it has its memory, which nobody touches, so that the system never
backs it with pages. Its address, storage, views and version are those of any other tensor, and code that shares
memory, counts edits or frees storages works on it as it does in training. What is small and made of values that are
there is computed: messages between ranks, step counts, masks.
"""

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, final

import torch
from torch import Tensor

from lightning_zero.device import HOST
from lightning_zero.torch_private import TorchDispatchMode, is_faking, schema_of, storage_key, tree_map_only

SMALL = 2**14  # elements; an operation on known values with a result of at most so many is computed
MOST_SHAPED = 10_000  # entries of `_SHAPED`

_SHAPED: dict[Any, Any] = {}  # operation, with what it is told -> its results, on the meta device

# Change the shape or the memory of a tensor, and none of its values.
_RESHAPES = {
    "set_", "resize_", "resize_as_", "as_strided_", "t_", "transpose_", "swapaxes_", "swapdims_", "unsqueeze_",
    "squeeze_", "detach_", "rename_", "record_stream",
}  # fmt: skip
# Return what shares the memory of an argument, though they are not declared as views: it would be counted twice.
_SHARES = {"_unsafe_view", "wait_tensor", "_wrap_tensor_autograd"}
# Return a number or a truth that depends on values.
_NUMBERS = {"_local_scalar_dense", "item"}
_READS = _NUMBERS | {"equal", "is_nonzero", "allclose"}
_REDUCES = {torch.ops.aten.any.default, torch.ops.aten.all.default, torch.ops.aten.clone.default}
# Of arguments that are no tensors; the classes too, as 1, 1.0 and True are equal.
_COMPARED = int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format
_LISTS, _NESTED = (list, tuple), (list, tuple, dict)  # what arguments and results of operations are made of
_CHECKS = {"_assert_async", "_assert_scalar", "_functional_assert_async"}


class NeedsValuesError(RuntimeError):
    """The code asks for values of tensors, which a rehearsal does not compute."""


class _Kind(Enum):
    """What is to be done with an operation."""

    PASS = auto()  # done as it is: it returns views, or changes shape or memory of a tensor and none of its values
    READ = auto()  # returns a number or a truth that depends on values
    CHECK = auto()
    WRITE = auto()  # to its arguments
    MAKE = auto()  # new tensors
    TELL = auto()  # a shape or a dtype; or marks a place for a profiler


@final
class _Operation:
    """How an operation of torch is declared: see `_operation_of`."""

    def __init__(self, func: Any) -> None:
        self.func, schema = func, schema_of(func)
        self.returns = len(schema.returns)
        self.writes_to = [
            (number, one.name)
            for number, one in enumerate(schema.arguments)
            if one.alias_info is not None and one.alias_info.is_write
        ]
        self.has_dynamic_shape = torch.Tag.dynamic_output_shape in func.tags
        self.is_pointwise = torch.Tag.pointwise in func.tags
        self.reduces = func in _REDUCES
        self.kind = self._kind_of(func, schema)

    def _kind_of(self, func: Any, schema: Any) -> _Kind:
        name = schema.name.rpartition("::")[2]
        is_view = not self.writes_to and any(one.alias_info is not None for one in schema.returns)
        if is_view or name in _RESHAPES | _SHARES:
            return _Kind.PASS
        if name in _READS:
            return _Kind.READ
        if name in _CHECKS:
            return _Kind.CHECK
        if self.writes_to:
            return _Kind.WRITE
        return _Kind.MAKE if any("Tensor" in str(one.type) for one in schema.returns) else _Kind.TELL

    def written(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Returns the arguments that it writes to."""
        return tensors_in([args[at] if at < len(args) else kwargs.get(name) for at, name in self.writes_to])


@final
class Hollow(TorchDispatchMode):
    """While entered, computes only small tensors whose values it knows.

    Args:
        born: called with every tensor that is made.
        ran: called with every operation but views: what it is, its arguments, and what it returns.
        computes: everything is computed as ever. `born` and `ran` are called all the same, and `answers` gets what
            code in `asking` asks for and a mode that does not compute would not know.
        answers: of a run that has computed: what code in `asking` gets, each time from the first one on.
    """

    def __init__(
        self,
        born: Callable[[Tensor], None] = lambda _: None,
        ran: Callable[[Any, Any, Any, Any], None] = lambda *_: None,
        *,
        computes: bool = False,
        answers: list[Any] | None = None,
    ) -> None:
        super().__init__()
        self._born = born
        self._ran = ran
        self._computes = computes
        self.answers: list[Any] = [] if answers is None else answers
        self._can_answer = answers is not None
        self._left: Iterator[Any] = iter(())  # the answers that have not been given in this `asking`
        # Storages whose values are not known, by `storage_key`.
        self._unknown: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._is_asking = False
        self.clock: Callable[[], float] = time.perf_counter
        self.took = 0.0  # seconds of the last operation that was computed

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Inside, code that asks for values that are not known gets an answer, or a `NeedsValuesError`. Outside it gets
        zero: that is the package's own code, and torch's, which goes on with any number."""
        self._is_asking, self._left = True, iter(self.answers)
        try:
            yield
        finally:
            self._is_asking = False

    def knows(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor are there."""
        return not tensor.is_meta and _key(tensor) not in self._unknown

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_faking():
            return func(*args, **kwargs)
        if any(one.__torch_dispatch__ is not Tensor.__torch_dispatch__ for one in types):
            return NotImplemented  # the class says first what it is made of
        operation = _operation_of(func)
        kind = operation.kind
        if kind is _Kind.PASS:
            return func(*args, **kwargs)
        given, known = tensors_in((args, kwargs)), True
        for one in given:  # a third of what a rehearsal takes is this method
            if one.is_meta or one.layout is not torch.strided:
                return func(*args, **kwargs)
            known = known and self.knows(one)
        if kind is _Kind.READ or kind is _Kind.CHECK:
            return self._on_read(operation, args, kwargs, known)
        if self._computes:
            result = self._compute(operation, args, kwargs, given, known)
        elif kind is _Kind.WRITE:
            result = self._on_write(operation, args, kwargs, given, known)
        else:
            result = self._on_make(operation, args, kwargs, given, known)
        self._ran(func, args, kwargs, result)
        return result

    def _on_read(self, operation: _Operation, args: Any, kwargs: Any, known: bool) -> Any:
        func = operation.func
        if known or self._computes:
            found = func(*args, **kwargs)
            if not known and self._is_asking:
                self.answers.append(found)
            return found
        if operation.kind is _Kind.CHECK:
            return None
        if self._is_asking:
            return self._answer(f"The model asks for the values of a tensor ({func}), which may decide what it does.")
        return 0 if schema_of(func).name.rpartition("::")[2] in _NUMBERS else False

    def _answer(self, question: str) -> Any:
        """Returns what was found where everything was computed."""
        for answer in self._left:
            return answer
        raise NeedsValuesError(
            f"{question} A rehearsal knows shapes only. "
            + ("The run on the CPU was asked for fewer." if self._can_answer else "Rehearse it with on_cpu=True.")
        )

    def _compute(self, operation: _Operation, args: Any, kwargs: Any, given: list[Tensor], known: bool) -> Any:
        """Does an operation, and keeps in mind what would be known otherwise."""
        begun = self.clock()
        result = operation.func(*args, **kwargs)
        self.took = self.clock() - begun
        made, written = tensors_in(result), operation.written(args, kwargs)
        if not known and self._is_asking and operation.has_dynamic_shape:
            self.answers.append([(tuple(one.shape), one.dtype) for one in made])
        if not (known and _are_small(given) and _are_small(made)):
            for one in (*made, *written):
                self._forget(one)
        if not written:
            self._note_born(result)
        return result

    def _on_write(self, operation: _Operation, args: Any, kwargs: Any, given: list[Tensor], known: bool) -> Any:
        if known and _are_small(given):
            return operation.func(*args, **kwargs)
        written = operation.written(args, kwargs)
        if "out" in kwargs and not kwargs["out"].numel():  # takes the shape of the result
            meta_args, meta_kwargs = tree_map_only(Tensor, _as_meta, (args, kwargs))
            operation.func(*meta_args, **meta_kwargs)
            kwargs["out"].resize_(meta_kwargs["out"].shape)
        for one in written:
            self._forget(one)
        returned = written[: operation.returns]
        return returned[0] if len(returned) == 1 else tuple(returned) if operation.returns else None

    def _on_make(self, operation: _Operation, args: Any, kwargs: Any, given: list[Tensor], known: bool) -> Any:
        func, device = operation.func, kwargs.get("device")
        is_meta = device is not None and torch.device(device).type == "meta"
        if is_meta or operation.kind is _Kind.TELL:
            return func(*args, **kwargs)
        if operation.has_dynamic_shape:
            if known:
                return self._note_born(func(*args, **kwargs))
            shapes = self._answer(f"The shape of what {func} returns depends on values.")
            made = [self._hollow(torch.empty(shape, dtype=dtype, device="meta")) for shape, dtype in shapes]
            return made[0] if len(made) == 1 else tuple(made)
        if known and _stays_small(operation, given):
            return self._note_born(func(*args, **kwargs))
        try:
            shaped = _shaped(func, args, kwargs)
        except NotImplementedError as error:
            if known:
                return self._note_born(func(*args, **kwargs))
            raise NeedsValuesError(f"{func} cannot tell the shape of its result without values: {error}") from error
        if known and _are_small(given) and _are_small(tensors_in(shaped)):
            return self._note_born(func(*args, **kwargs))
        return self._hollow(shaped)

    def _hollow(self, shaped: Any) -> Any:
        """Returns the results of an operation with memory, of those that it has on the meta device."""
        if not isinstance(shaped, Tensor):
            return type(shaped)(map(self._hollow, shaped)) if isinstance(shaped, _LISTS) else shaped
        made = torch.empty_strided(shaped.size(), shaped.stride(), dtype=shaped.dtype, device=HOST)
        self._forget(made)
        self._born(made)
        return made

    def _note_born(self, result: Any) -> Any:
        for one in tensors_in(result):
            self._born(one)
        return result

    def _forget(self, tensor: Tensor) -> None:
        """Notes that the values of a tensor are not known any more."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._unknown:
            self._unknown[key] = weakref.ref(storage, lambda _: self._unknown.pop(key))


@functools.cache
def _operation_of(func: Any) -> _Operation:
    """Returns how an operation is declared, which is looked up once: a large model runs millions of them."""
    return _Operation(func)


def _key(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _shaped(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what an operation returns, on the meta device. The layers of a model, its steps and the runs of a plan
    ask for the same again and again, and torch takes longer to tell than all the rest of the operation. Operations of
    others than ATen may do more than tell (collectives: who counts them wants to see each)."""
    key = _told((args, kwargs), {}) if func.namespace == "aten" else None
    if key is None:
        return _on_meta(func, args, kwargs)
    key = func, key, torch.get_default_dtype()
    shaped = _SHAPED.get(key)
    if shaped is None:
        shaped = _on_meta(func, args, kwargs)
        if len(_SHAPED) >= MOST_SHAPED:
            _SHAPED.clear()
        _SHAPED[key] = shaped
    return shaped


def _told(value: Any, seen: dict[int, int]) -> Any:
    """Returns what the shapes of results depend on, of a value among the arguments of an operation; None if that may be
    more than can be compared. `seen`: tensors so far, of which one may be given twice."""
    if isinstance(value, Tensor):
        return seen.setdefault(id(value), len(seen)), value.size(), value.stride(), value.dtype
    if isinstance(value, _LISTS):
        told = [_told(one, seen) for one in value]
        return None if None in told else tuple(told)
    if isinstance(value, dict):
        told = [_told(one, seen) for one in value.values()]
        return None if None in told else (*value, *told)
    return (type(value), value) if isinstance(value, _COMPARED) else None


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    metas: dict[int, Tensor] = {}

    def as_meta(tensor: Tensor) -> Tensor:  # one that is given twice stays the same
        return metas.setdefault(id(tensor), _as_meta(tensor))

    meta_args, meta_kwargs = tree_map_only(Tensor, as_meta, (args, kwargs))
    if "device" in meta_kwargs or not metas:
        meta_kwargs = {**meta_kwargs, "device": torch.device("meta")}
    if meta_kwargs.get("pin_memory"):
        meta_kwargs["pin_memory"] = False
    return func(*meta_args, **meta_kwargs)


def _as_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _are_small(tensors: Iterable[Tensor]) -> bool:
    return all(one.numel() <= SMALL for one in tensors)


def _stays_small(operation: _Operation, given: list[Tensor]) -> bool:
    """Whether the result is certainly small: then its shape need not be asked for first, which takes longer than the
    operation itself. Most of these are in the messages of ranks."""
    is_element_wise = operation.is_pointwise and len({one.shape for one in given if one.dim()}) == 1
    return (is_element_wise or operation.reduces) and _are_small(given)


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors in arguments or results of an operation, which are lists and tuples at most."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, _LISTS) else ():
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, _NESTED):
            found += tensors_in(item)
    return found
