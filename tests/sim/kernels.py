"""Torch's operators for the device: shapes at once, values when the stream comes to them.

Torch allocates the results of most operators itself, and then calls one with `out`. For the rest, shapes come from the
meta device. Where shapes depend on values, the host waits for the device, as it does on a real one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from . import memory
from .memory import Access, block_of, of_device
from .streams import State, current_stream, host_waits

aten = torch.ops.aten
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
ON_HOST = torch.device("cpu")
DEVICE = torch.device("meta")  # replaced by `device`, which makes it

_set = aten.set_.source_Storage_storage_offset
_index = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}  # take indices from the host


def launch(name: str, work: Callable[[], Any], accesses: list[Access], *, flops: float = 0.0) -> None:
    """Launches `work`, on host memory, on the current stream."""

    def run() -> None:
        with below_torch():
            work()

    cost, rates = 0.0, State.rates
    if rates is not None:
        speed = rates.copies if name == "copy" and not _stays(accesses) else rates.memory
        cost = max(sum(access.high - access.low for access in accesses) / speed, flops / rates.flops)
    current_stream().launch(name, run, accesses, cost=cost)


def _stays(accesses: list[Access]) -> bool:
    """Whether a copy is from the device to the device."""
    return len(accesses) == 2 and all(access.block.stream is not None for access in accesses)


@contextmanager
def below_torch() -> Iterator[None]:
    """Inside, operators are kernels alone: no autograd, no modes, no autocast of whoever has waited."""
    keys = (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastPrivateUse1)
    casts = torch._C.DispatchKeySet(keys[0]) | torch._C.DispatchKeySet(keys[1])
    with (
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableTorchDispatch(),
        torch._C._ExcludeDispatchKeyGuard(casts),
    ):
        yield


def leaves_of(values: Any) -> list[Any]:
    """Returns what is in arguments or results of an operator. They are in lists, tuples and dictionaries at most, and
    there are thousands of them in a small step: torch's own function for all kinds of trees took half of it."""
    found: list[Any] = []
    for value in values.values() if type(values) is dict else values:
        if type(value) in _HOLDERS:
            found += leaves_of(value)
        else:
            found.append(value)
    return found


def mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """Returns arguments or results of an operator with `change(leaf)` in the place of each of these."""
    kind = type(values)
    if kind is dict:
        return {name: mapped(change, value) for name, value in values.items()}
    return kind([mapped(change, value) for value in values]) if kind in _HOLDERS else change(values)


_HOLDERS = {list, tuple, dict}


def host_view(tensor: Tensor) -> Tensor:
    """Returns the memory of a tensor of the device as a host tensor."""
    made = torch.empty(0, dtype=tensor.dtype, device=ON_HOST)
    storage = block_of(tensor).memory.untyped_storage()
    return _set.redispatch(CPU, made, storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def empty_strided(size: Any, stride: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    reach = sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1 if all(size) else 0
    storage = memory.HEAP.take(reach * dtype.itemsize, DEVICE)
    return _set.redispatch(CPU, torch._C._acc.create_empty_tensor((0,), dtype), storage, 0, size, stride)


# -- operators that torch does not take apart any further


def empty(size: Any, dtype: torch.dtype | None = None, memory_format: Any = None, **_: Any) -> Tensor:
    like = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
    return empty_strided(like.size(), like.stride(), dtype)


def resize(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    """Only as torch uses it, for an `out` without elements."""
    made = empty(size, tensor.dtype)
    _set.redispatch(CPU, tensor, made.untyped_storage(), 0, made.size(), made.stride())
    return tensor


def record_stream(tensor: Tensor, stream: Any) -> None:
    block = block_of(tensor)
    if stream.stream_id != block.stream.stream_id:  # type: ignore[union-attr]
        block.users.add(type(block.stream).known[stream.stream_id])  # type: ignore[union-attr]


def item(tensor: Tensor) -> Any:
    found: list[Any] = []
    view, read = host_view(tensor), aten._local_scalar_dense.default
    launch("item", lambda: found.append(read.redispatch(CPU, view)), [Access(block_of(tensor), tensor, writes=False)])
    _wait("item")
    return found[0]


def _wait(why: str) -> None:
    host_waits(current_stream().record_event(), why)


def copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies as CUDA does. Only between pinned memory and the device, as it is, can a copy run while the host goes on;
    pageable memory is read when the copy is launched."""
    is_plain = source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()
    accesses, is_direct = [], True
    for tensor, writes in ((source, False), (target, True)):
        is_direct &= of_device(tensor) or (is_plain and memory.is_pinned(tensor))
        if of_device(tensor) or memory.is_pinned(tensor):
            accesses.append(Access(block_of(tensor), tensor, writes=writes))
    read = host_view(source) if of_device(source) else source.detach() if is_direct else source.detach().clone()
    write = host_view(target) if of_device(target) else target.detach()
    if not of_device(source) and not is_direct and memory.is_pinned(source):
        memory.host_touches(source, "copy", writes=False)
        accesses.pop(0)
    waits = not (of_device(source) and of_device(target)) and (
        not non_blocking or (not is_direct and not of_device(target))
    )
    arrives_late = not of_device(target) and not waits and current_stream().queue
    if arrives_late and not block_of(target).is_in_use:  # what the host reads too early is NaN
        write.view(-1).view(torch.uint8).fill_(memory.POISON)
    launch("copy", lambda: aten.copy_.default.redispatch(CPU, write, read), accesses)
    if waits:
        _wait("copy to the host" if of_device(source) else "copy from pageable memory")
    return target


def dropout(values: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """As the host does it: the mask is what values are multiplied by."""
    noise = torch.empty_like(values).bernoulli_(1 - p).div_(1 - p) if train else torch.ones_like(values)
    return values * noise, noise


def dropout_backward(grad: Tensor, noise: Tensor, scale: float) -> Tensor:
    return grad * noise


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.empty.memory_format: empty,
    aten.empty_strided.default: empty_strided,
    aten._copy_from.default: copy,
    aten.resize_.default: resize,
    aten.record_stream.default: record_stream,
    aten._local_scalar_dense.default: item,
    aten.native_dropout.default: dropout,
    aten.native_dropout_backward.default: dropout_backward,
}


# -- all others


class _Schema(NamedTuple):
    is_view: bool
    written: tuple[int | str, ...]  # arguments that the operator writes to, by position or keyword
    returned: tuple[int | str | None, ...]  # for each result, the argument that it is; None: a new tensor
    takes_numbers: tuple[int, ...]  # positions where a number may stand for a tensor


@cache
def schema_of(op: Any) -> _Schema:
    written, numbers = {}, []
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written[argument.name if argument.kwarg_only else place] = argument.alias_info.before_set
        if isinstance(argument.type, torch.TensorType):
            numbers.append(place)
    aliases = [result.alias_info for result in op._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases) or op.overloadpacket is aten.set_
    returned = [
        None if alias is None else next((key for key, names in written.items() if names & alias.before_set), None)
        for alias in aliases
    ]
    return _Schema(is_view, tuple(written), tuple(returned), tuple(numbers))


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Does an operator of torch for tensors of the device."""
    if op in SPECIAL:
        return SPECIAL[op](*args, **kwargs)
    schema = schema_of(op)
    if schema.is_view:
        return op.redispatch(CPU, *args, **kwargs)
    given = {key: args[key] if isinstance(key, int) else kwargs[key] for key in schema.written}
    written = {id(leaf) for leaf in leaves_of(given) if of_device(leaf)}
    accesses: list[Access] = []

    def on_host(leaf: Any) -> Any:
        if of_device(leaf):
            accesses.append(Access(block_of(leaf), leaf, writes=id(leaf) in written))
            return host_view(leaf)
        if isinstance(leaf, Tensor):
            if leaf.dim() and op._schema.name not in _index:
                raise RuntimeError(f"Expected all tensors to be on the same device, but {op} got one of {leaf.device}.")
            return leaf.detach().clone()
        return ON_HOST if isinstance(leaf, torch.device) else leaf

    host_args, host_kwargs = mapped(on_host, args), mapped(on_host, kwargs)
    # A number in place of a tensor is a Python number here, which `redispatch` would not take.
    has_number = any(
        place < len(args) and isinstance(args[place], int | float | complex) for place in schema.takes_numbers
    )
    call = op if has_number else lambda *a, **k: op.redispatch(CPU, *a, **k)

    def kernel() -> Any:
        return call(*host_args, **host_kwargs)

    if torch.Tag.nondeterministic_seeded in op.tags:
        kernel = _drawing_now(op, kernel, host_args, host_kwargs)
    _fit_out(op, schema, args, kwargs, host_args, host_kwargs, accesses)
    results = [given[key] for key in schema.returned if key is not None]
    flops = _flops_of(op, host_args, host_kwargs, results)
    if len(results) == len(schema.returned):
        launch(str(op), kernel, accesses, flops=flops)
        return results[0] if len(results) == 1 else (tuple(results) or None)
    return _with_new_results(op, kernel, host_args, host_kwargs, accesses)


def _fit_out(op: Any, schema: _Schema, args: Any, kwargs: Any, host_args: Any, host_kwargs: Any, accesses: Any) -> None:
    """Gives an `out` without elements the shape of the result."""
    names = [key for key in schema.written if isinstance(key, str)]
    if not any(of_device(kwargs[name]) and not kwargs[name].numel() for name in names):
        return
    told = op(*_on_meta(host_args), **_on_meta(host_kwargs))
    for want, name in zip(leaves_of([told]), names, strict=False):
        if want.size() != kwargs[name].size():
            resize(kwargs[name], want.size())
            host_kwargs[name] = host_view(kwargs[name])
            accesses.append(Access(block_of(kwargs[name]), kwargs[name], writes=True))


def _with_new_results(op: Any, kernel: Any, host_args: Any, host_kwargs: Any, accesses: list[Access]) -> Any:
    found: list[Any] = []
    try:
        told = op(*_on_meta(host_args), **_on_meta(host_kwargs))
        if not all(isinstance(leaf, Tensor) for leaf in leaves_of([told])):
            raise NotImplementedError
        if op is aten.native_layer_norm.default:  # meta has the dtype of statistics that CUDA has
            weight, values = host_args[2], host_args[0]
            dtype = values.dtype if weight is None or weight.dtype == values.dtype else torch.float32
            told = (told[0], *(statistics.to(dtype) for statistics in told[1:]))
    except Exception:  # the shapes depend on values
        launch(str(op), lambda: found.append(kernel()), accesses)
        _wait(str(op))
        told = found[0]

    def alike(leaf: Any) -> Any:
        return empty_strided(leaf.size(), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf

    made = mapped(alike, told)
    leaves = [leaf for leaf in leaves_of([made]) if of_device(leaf)]
    views = [host_view(leaf) for leaf in leaves]

    def run() -> None:
        values = leaves_of([found[0] if found else kernel()])
        for into, value in zip(views, [value for value in values if isinstance(value, Tensor)], strict=True):
            aten.copy_.default.redispatch(CPU, into, value)

    flops = _flops_of(op, host_args, host_kwargs, views)
    launch(str(op), run, accesses + [Access(block_of(leaf), leaf, writes=True) for leaf in leaves], flops=flops)
    return made


def _flops_of(op: Any, args: Any, kwargs: Any, results: Any) -> float:
    count = flop_registry.get(op.overloadpacket) if State.rates is not None else None
    if count is None:
        return 0.0
    out = results[0] if results else None
    return float(count(*args, **{name: value for name, value in kwargs.items() if name != "out"}, out_val=out))


def _on_meta(values: Any) -> Any:
    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    return mapped(of, values)


def _drawing_now(op: Any, kernel: Callable[[], Any], host_args: Any, host_kwargs: Any) -> Callable[[], Any]:
    """Has a kernel draw the random numbers that the host would draw now, whenever it runs."""
    generators = [leaf for leaf in leaves_of([host_args, host_kwargs]) if isinstance(leaf, torch.Generator)]
    source = generators[0] if generators else torch.default_generator
    state = source.get_state()

    def zeros(leaf: Any) -> Any:
        return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf

    op.redispatch(CPU, *mapped(zeros, host_args), **mapped(zeros, host_kwargs))  # draws as many

    def run() -> Any:
        now = source.get_state()
        source.set_state(state)
        try:
            return kernel()
        finally:
            source.set_state(now)

    return run
