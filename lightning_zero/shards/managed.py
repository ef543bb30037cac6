"""Tells which parameters of a module the engine takes over, which of them train, and which cannot be sharded."""

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_zero.shards.early import class_of, early_of
from lightning_zero.shards.local import local_of, refuse_other_meshes
from lightning_zero.shards.moment import wrapped_in
from lightning_zero.shards.slot import slot_of
from lightning_zero.torch_private import complete, parameters_in
from lightning_zero.wording import few_of


def trainable_of(managed: Sequence[Parameter], optimizers: Sequence[Optimizer]) -> set[int]:
    """Returns the ids of parameters that train: an optimizer has them, or they require a gradient. So a parameter that
    is frozen only for a while stays in its group."""
    stepped = _stepped_by(optimizers)
    return {id(parameter) for parameter in managed if _trains(parameter, stepped)} if optimizers else set()


def _stepped_by(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _trains(parameter: Tensor, stepped: Container[int]) -> bool:
    is_asked_for = parameter.requires_grad or id(parameter) in stepped
    return is_asked_for and (parameter.is_floating_point() or parameter.is_complex())


def managed_parameters(module: Module, optimizers: Sequence[Optimizer], tensor_ranks: Sequence[int]) -> list[Parameter]:
    """Returns the parameters that the engine takes over, each once: torch's own kind, and DTensors over `tensor_ranks`.
    Raises ValueError for parameters and optimizers that cannot be trained in shards."""
    _refuse_without_values(module)
    named = dict(module.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    for number, optimizer in enumerate(optimizers):
        # Asked of the type: some wrappers (LARSWrapper of solo-learn) only say that `__class__` is torch's.
        if not issubclass(type(optimizer), Optimizer) or not hasattr(optimizer, "defaults"):
            raise ValueError(
                f"Optimizer {number} ({type(optimizer).__name__}) cannot be given torch's hooks, in which its "
                "parameters become what this rank owns. Derive it from torch.optim.Optimizer, and have __init__ call "
                "super().__init__(params, defaults) first."
            )
        for one in wrapped_in(optimizer):
            complete(one)
        for parameter in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
            if id(parameter) not in known:
                raise ValueError(
                    f"Optimizer {number} ({type(optimizer).__name__}) has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not the module's. Give it parameters of the LightningModule "
                    "(self.parameters()), and register what it should train as a submodule or nn.Parameter."
                )
    for name, parameter in named.items():
        if slot_of(parameter) is not None:
            raise ValueError(
                f"Parameter {name!r} is in shards since an earlier run. If that was under Fabric, end it first: "
                "fabric.strategy.teardown(). If it ended with an error, what other ranks had of it is lost. Make the "
                "model anew, and go on from a checkpoint: fit(model, ckpt_path=...)."
            )
        refuse_other_meshes(name, parameter, tensor_ranks)
        if not is_plain(parameter) and parameter.requires_grad:
            raise ValueError(
                f"Parameter {name!r} is a {type(parameter).__name__}, a tensor of its own kind, and trains: it cannot "
                "be sharded. Freeze it (requires_grad_(False)), or make it a torch.nn.Parameter."
            )
    managed = {name: parameter for name, parameter in named.items() if is_plain(parameter)}
    buffers = dict(module.named_buffers()) if optimizers else {}
    _refuse_shared_memory({**managed, **buffers}, _stepped_by(optimizers))
    return list(managed.values())


def _refuse_without_values(module: Module) -> None:
    """Raises ValueError for lazy parameters, and for tensors on the meta device."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"Parameter {name!r} has no shape yet (a lazy module). Run one forward before fit.")
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    if names := [name for name, tensor in tensors if tensor.is_meta]:
        raise ValueError(
            f"{few_of(names)} are on the meta device, and have no values. Give them some in configure_model(): "
            "strategy.load_pretrained(path), or of each module to_empty(device=..., recurse=False) and "
            "reset_parameters()."
        )


def _refuse_shared_memory(tensors: Mapping[str, Tensor], stepped: Container[int]) -> None:
    """Raises ValueError for a parameter that trains, and another one, or a buffer, in the same memory, or in a part of
    it: sharded, they would silently become independent. `stepped` are ids of those that optimizers have."""
    runs = [(*_run_of(tensor), name) for name, tensor in tensors.items() if _has_run(tensor)]
    end, before, device = 0, "", ""
    for kind, start, stop, name in sorted(runs, key=lambda run: run[:2]):
        if kind == device and start < end and any(_trains(tensors[one], stepped) for one in (before, name)):
            first, second = sorted((before, name), key=lambda one: not isinstance(tensors[one], Parameter))
            _refuse_pair(first, second, is_parameter=isinstance(tensors[second], Parameter))
        if kind != device or stop > end:
            end, before, device = stop, name, kind


def _has_run(tensor: Tensor) -> bool:
    """Whether a tensor has memory of torch's own kind. An early parameter has memory of its own."""
    is_known = isinstance(tensor, Parameter) or (type(tensor) is Tensor and tensor.layout is torch.strided)
    return is_known and tensor.numel() > 0 and early_of(tensor) is None


def _run_of(tensor: Tensor) -> tuple[str, int, int]:
    """Returns the device of a tensor, and the addresses between which all memory is the tensor's. Of one with gaps,
    where others may lie, that is its first element."""
    values = local_of(tensor)
    pairs = zip(values.shape, values.stride(), strict=True)
    is_dense = 1 + sum((size - 1) * stride for size, stride in pairs) == values.numel()
    numel = values.numel() if is_dense else 1
    return str(values.device), values.data_ptr(), values.data_ptr() + numel * values.itemsize


def _refuse_pair(first: str, second: str, *, is_parameter: bool) -> None:
    """Raises ValueError for a parameter and a second one, or a buffer unless the second `is_parameter`."""
    if is_parameter:
        raise ValueError(
            f"Parameters {first!r} and {second!r} are two that share their memory, and sharded they would part. Make "
            "them one (decoder.weight = encoder.weight), or give each its own values (.data.clone())."
        )
    raise ValueError(
        f"Parameter {first!r} trains, and buffer {second!r} is in the same memory: sharded they would part. Give the "
        "buffer its own values (.data.clone()), or read the parameter where you use it."
    )


def foreign_parameters(module: Module) -> dict[str, Parameter]:
    """Returns quantised tensors and others of their own kind. Every rank keeps them whole, as the user made them."""
    return {name: parameter for name, parameter in module.named_parameters() if not is_plain(parameter)}


def is_plain(parameter: Parameter) -> bool:
    """Whether a parameter is an ordinary tensor, whose class overrides no operation, as that of lazy ones does; or a
    DTensor of such tensors."""
    kind = class_of(parameter)
    if isinstance(parameter, DTensor):
        return True
    return (
        kind.__torch_function__ is Parameter.__torch_function__
        and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
        and parameter.layout == torch.strided
        and not parameter.is_quantized
    )


def are_all_in(module: Module, ids: set[int]) -> bool:
    """Whether all parameters of a module have their ids there. Asked in every step, and so without names."""
    tables = map(parameters_in, module.modules())
    return ids.issuperset(id(parameter) for own in tables for parameter in own.values() if parameter is not None)


def newly_trainable(module: Module, optimizers: Iterable[Optimizer], trained: Container[int]) -> dict[str, Parameter]:
    """Returns, by name, the parameters that train and whose ids are not in `trained`."""
    others = {name: parameter for name, parameter in module.named_parameters() if id(parameter) not in trained}
    stepped = _stepped_by(optimizers) if others else set()
    return {
        name: parameter
        for name, parameter in others.items()
        if _trains(parameter, stepped) and (slot_of(parameter) is not None or is_plain(parameter))
    }
