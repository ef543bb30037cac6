"""torch's private interfaces: all that the package uses of torch, and torch has not promised. No other module names
any, but `distributed_private` those of `torch.distributed`.

Each has a text: what it is for, why no public way does the same, and what breaks without it. All of them are in torch
2.11.0, the lowest version that `pyproject.toml` allows, and in 2.13 to 2.15, except where the text says otherwise.
What is missing in another version fails loudly: at import, or in its first use, by its name.

Where a call of the package itself would cost time (in each call of a module, for each parameter of a step), the name
here is torch's own function in C++, or an `attrgetter`, and not a function around it.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack
from operator import attrgetter
from typing import Any, Self

import torch
import torch.utils.checkpoint
from torch import Tensor, UntypedStorage
from torch.autograd.graph import get_gradient_edge
from torch.nn import Module, Parameter
from torch.utils import _python_dispatch, _pytree
from torch.utils.flop_counter import flop_registry as flop_registry

TESTED = "2.11 to 2.15"


def find(place: Any, *names: str) -> Any:
    """Returns what `place` has by the first of these names that is there; several are those of several versions of
    torch.

    Raises:
        ImportError: where it has none of them.
    """
    for name in names:
        if hasattr(place, name):
            return getattr(place, name)
    told = f"{getattr(place, '__name__', type(place).__name__)}.{' or '.join(names)}"
    raise ImportError(
        f"torch {torch.__version__} has no {told}, which lightning_zero needs. It was tested with torch {TESTED}."
    )


# -- memory

storage_key: Callable[[UntypedStorage], int] = attrgetter("_cdata")
"""Tells storages apart, for as long as they are there. (`data_ptr` is 0 for all that have no memory now.) Without it
views of one memory would be booked, and looked for in a buffer, once each. Private: `_cdata`."""

count_users: Callable[[int], int] = find(torch._C, "_storage_Use_Count")
"""Returns how many tensors have the storage of a `storage_key`. Nothing public counts them. Without it buffers of units
could not be used again, as a user may hold a view of one. Private: `_storage_Use_Count`; torch's CUDA graphs use it."""


def is_saved(parameter: Parameter) -> bool:
    """Whether a graph has saved a parameter itself. Nothing public says so. Without it no parameter could be cut while
    a model is built, as a backward may need it. Private: `_use_count`; `torch.utils.swap_tensors` uses it."""
    return int(parameter._use_count()) > 1  # type: ignore[attr-defined]


exchange: Callable[[Tensor, Tensor], None] = find(torch._C, "_swap_tensor_impl")
"""Exchanges what two tensors are below Python. `torch.utils.swap_tensors` also exchanges their attributes and classes,
and refuses tensors that anything refers to weakly. Without it a parameter could not be pointed at the memory of a
device that torch does not know. Private: `_swap_tensor_impl`."""

edits_of: Callable[[Tensor], int] = attrgetter("_version")
"""Returns torch's count of edits of a tensor in place. Nothing public has it. Without it edits by users would be lost,
and those of saved tensors would go unnoticed in backward. Private: `_version`."""

make_wrapper: Callable[..., Any] = find(Tensor, "_make_wrapper_subclass")
"""Makes a tensor of a class that has a shape, a dtype and a device, and no memory. The meta device has no device.
Without it neither gradients in shards nor lazy entries of checkpoints could be tensors. Private:
`_make_wrapper_subclass`."""

multiply_: Callable[[list[Tensor], Tensor], None] = find(torch, "_foreach_mul_")
"""Multiplies tensors by a 0-d tensor in one launch. `torch.nn.utils.clip_grads_with_norm_` chooses the factor by
itself. Without it clipping and unscaling would launch once for each parameter. Private: `_foreach_mul_`."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Returns how an operation is declared: what it writes to, and what it returns. No public tag of operators says so.
Without it edits of gradients in shards by autograd's own functions would be lost, and a rehearsal could not tell a view
from a new tensor. Private: `_schema`."""


def _in_place(*beginnings: str, place: Any = torch) -> set[Any]:
    names = [name for name in dir(place) if name.startswith(beginnings) and not name.endswith("__")]
    return {getattr(place, name) for name in names if name.endswith("_")}


UNVERSIONED = _in_place("_fused_", "_amp_")
"""Functions that edit tensors in place and do not raise their version. They have no public name. Without them steps of
users' own optimizers on lent values would be lost. Private: `_fused_` and `_amp_`, as their names begin."""

FOREACH_IN_PLACE = _in_place("_foreach_") | _in_place("", place=getattr(torch, "foreach", None))
"""Functions that edit lists of tensors in place. They raise the versions of plain tensors, and not that of a DTensor.
Up to torch 2.14 they have no public names; both are in use since. Without them such edits of tensor-parallel parameters
would be lost. Private: `_foreach_`, as their names begin."""

METADATA = {
    *(find(Tensor, name).__get__ for name in ("_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks")),
    find(Tensor, "_is_view"),
    find(Tensor, "_backward_hooks").__set__,
    *([find(Tensor, "names").__get__] if hasattr(Tensor, "names") else []),  # public; torch 2.13 has it no more
}
"""What torch asks tensors that needs no values. Intercepted calls go by the function, whatever its name. Without them
each such question would gather a parameter. Private: `_base`, `_backward_hooks`, `_is_view`, and some of above and
below."""


tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_iter, tree_leaves = _pytree.tree_iter, _pytree.tree_leaves
tree_map, tree_map_only = _pytree.tree_map, _pytree.tree_map_only
"""Walk through containers of tensors as torch itself does, through those that packages have registered with it, too. Up
to torch 2.15 they have no public name. Without them tensors in outputs of transformers would be overlooked. Private:
`_pytree`."""


# -- autograd

backward_number: Callable[[], int] = find(torch._C, "_current_graph_task_id")
"""Returns the number of the backward that runs in this thread, -1 for none. Hooks are not told. Without it a look at a
graph could not be told from a backward. Private: `_current_graph_task_id`; `torch.autograd.graph` uses it."""

_executes: Callable[[Any], bool] = find(torch._C, "_will_engine_execute_node")


def accumulates(parameter: Parameter) -> bool:
    """Whether the backward that runs in this thread will accumulate a gradient of a parameter. Hooks are not told.
    Without it ranks would wait for others to end a backward where one alone has called `torch.autograd.grad` in its
    forward. Private: `_will_engine_execute_node`."""
    try:
        return _executes(get_gradient_edge(parameter).node)
    except RuntimeError:  # `torch.autograd.grad` is asked for its gradient, and returns it
        return False


innermost_saved_hooks: Callable[[bool], tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None] = find(
    torch._C._autograd, "_top_saved_tensors_default_hooks"
)
"""Returns the pair of hooks that would be called now; pass False. torch calls only one pair, and nothing public has it.
Without it activation checkpointing and offloading by others would end inside of our hooks. Private:
`_top_saved_tensors_default_hooks`."""


def hide_behind(pack: Any, outer: Any) -> None:
    """Has torch's selective checkpoint overlook a hook on saved tensors: for it, `outer` (the pair around it, or None)
    are the innermost. It asks since torch 2.15, and nothing public answers. Without it torch would warn of hooks that
    no user has set, and what it keeps itself would be counted as saved by a checkpoint around. Private:
    `_checkpoint_internal`, `_user_hooks`."""
    pack._checkpoint_internal, pack._user_hooks = True, outer


call_after_backward: Callable[[Callable[[], None]], None] = find(
    torch.autograd.Variable._execution_engine, "queue_callback"
)
"""Has the backward that runs in this thread call a function when it ends. Hooks know no end. Without it the last
gradients of a backward that users call themselves would not be reduced. Private: `_execution_engine`; torch's FSDP uses
it."""


def put_last(hooks: Iterable[tuple[Parameter, int]]) -> None:
    """Has each of these hooks, a parameter and the number that its `register_post_accumulate_grad_hook` has returned,
    be called after all others of its parameter. torch calls hooks in the order that they came in. Without it hooks that
    users add later would edit a gradient that has been taken. Private: `_post_accumulate_grad_hooks`."""
    for parameter, number in hooks:
        known: Any = parameter._post_accumulate_grad_hooks
        if next(reversed(known)) != number:
            known[number] = known.pop(number)  # not move_to_end: autograd goes by the order of the plain dict


tracing_state: Callable[[], Any] = find(torch._C, "_get_tracing_state")
"""Returns what `torch.jit.trace` has traced so far, None if it does not trace. `torch.jit.is_tracing` only says
whether. Without it gathers would be part of the traced model. Private: `_get_tracing_state`."""

set_tracing_state: Callable[[Any], None] = find(torch._C, "_set_tracing_state")
"""Ends a trace, or continues it. `torch.jit` has no public pause. Without it gathers would be part of the traced model.
Private: `_set_tracing_state`."""


# -- modules

parameters_in: Callable[[Module], MutableMapping[str, Parameter | None]] = attrgetter("_parameters")
"""Returns the parameters of a module alone, by name, as it keeps them: an attribute in front of one changes nothing
here. `named_parameters` is slower, and its result cannot be written to. Without it a weight that is shown in another
dtype could not be told from one that has been replaced. Private: `_parameters`."""

buffers_in: Callable[[Module], MutableMapping[str, Tensor | None]] = attrgetter("_buffers")
"""Returns the buffers of a module alone, as `parameters_in` does. Without it a block that recomputes would count a
batch twice in its running statistics. Private: `_buffers`."""


def saved_tensors_in(module: Module) -> Iterator[tuple[MutableMapping[str, Any], str, Tensor]]:
    """Yields the tensors that a checkpoint has of a module alone: where each is kept, its name there, and the tensor. A
    `state_dict` would read their values, and call users' hooks. Without it pretrained weights could not be read into a
    model that is built in shards. Private: `_non_persistent_buffers_set`."""
    for tensors in (parameters_in(module), buffers_in(module)):
        for name, tensor in tensors.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield tensors, name, tensor


def moves_by_itself(module: Module) -> bool:
    """Whether a class moves its tensors in a way of its own. Classes override no public method to do so. Without it
    recurrent layers would keep pointers to memory that is gone. Private: `_apply`."""
    return type(module)._apply is not Module._apply


def call_of(module: Module) -> Callable[..., Any]:
    """Returns what a call of a module does, with all its hooks. `module.__call__` would be what `replace_call` has put
    in. Without it hooks of users would not be called. Private: `_call_impl`, `_compiled_call_impl`."""
    return module._compiled_call_impl or module._call_impl


def replace_call(module: Module, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Has calls of a module go to `call`, as `module.compile` does, and returns what they went to; None is the module's
    own code. torch's layers leave their fast path for hooks, compilers trace them, and copies have them. Without it
    units could not be gathered before they are called. Private: `_compiled_call_impl`."""
    before = module._compiled_call_impl
    module._compiled_call_impl = call
    return before


def compiled_in(module: Module) -> Module | None:
    """Returns the module that ``torch.compile(model)`` has put into `module`; None if that is no such shell. torch
    exports no class for them. Without it blocks of compiled models would not be found. Private: `_orig_mod`."""
    is_shell = type(module).__name__ == "OptimizedModule"
    return module._orig_mod if is_shell else None  # type: ignore[return-value]


IN_COMPILED = "_orig_mod"
"""What `torch.compile` adds to the names of parameters. `state_dict` has it. Without it compiled models would have
other checkpoints than plain ones. Private: `_orig_mod`."""


def is_traced(module: Module) -> bool:
    """Whether `torch.compile` or TorchScript traces calls of a module: all of it, in place, or Lightning's mark on a
    compiled LightningModule (which is here because no layer below `pl` knows Lightning). No public function says so.
    Without it graphs would break in hooks. Private: `_compiled_call_impl`, `_compiler_ctx`."""
    return (
        compiled_in(module) is not None
        or isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or vars(module).get("_compiler_ctx") is not None
    )


def has_call_hooks(module: Module) -> bool:
    """Whether users have put hooks on the calls of a module. Nothing public lists them. Without it weights would be
    made ready for a kernel that torch does not use. Private: `_forward_hooks`, `_forward_pre_hooks`."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


VERSIONS = "_metadata"
"""Attribute of a `state_dict` with the versions of modules. torch documents it, and has no function for it. Without it
modules would load old entries wrongly, or not those of other versions. Private: `_metadata`."""


def versions_of(state: Any) -> MutableMapping[str, Any] | None:
    """Returns what `VERSIONS` of a `state_dict` has. A plain dictionary has none. Without it checkpoints would lose
    them. Private: `_metadata`."""
    return getattr(state, "__dict__", {}).get(VERSIONS)


# -- optimizers

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer with the hooks around its steps. They can be added, and not listed. Without it a trial
step would call users' hooks. Private: `_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`."""

OPTIMIZER_HOOKS = {*STEP_HOOKS, "_optimizer_load_state_dict_post_hooks"}
"""Attributes of an optimizer with the hooks that an engine adds. Without it an optimizer that lacks one of them would
fail when it is taken over. Private: `STEP_HOOKS`, `_optimizer_load_state_dict_post_hooks`."""


def complete(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer the hooks that it lacks, and its class those around `step`, as those do whose class does not
    call torch's constructor (timm's Lookahead). torch does it to one that is unpickled, and nothing else does. Without
    it such an optimizer could not be trained with. Private: see `OPTIMIZER_HOOKS`."""
    if not (vars(optimizer).keys() >= OPTIMIZER_HOOKS and getattr(type(optimizer).step, "hooked", False)):
        torch.optim.Optimizer.__setstate__(optimizer, {})


def put_innermost(optimizer: torch.optim.Optimizer, before: int, after: int) -> None:
    """Has two hooks on the steps of an optimizer, by the numbers that their registration has returned, be called next
    to the step: one after all others before it, one before all others after it. torch calls hooks in the order that
    they came in. Without it users' hooks would find parts of parameters and gradients. Private: see `STEP_HOOKS`."""
    first, then = (vars(optimizer)[name] for name in STEP_HOOKS)
    first.move_to_end(before)
    then.move_to_end(after, last=False)


def lists_of(optimizer: torch.optim.Optimizer, *kinds: type[torch.optim.Optimizer]) -> Callable[..., Any] | None:
    """Returns the method by which a step lists its tensors: `(group, parameters, gradients, *state)`, of which it fills
    the lists; None if it is not that of one of these classes of torch's. Nothing public comes between the hooks of an
    optimizer and its arithmetic. Without it steps on the host would wait for memory. Private: `_init_group`."""
    found: Callable[..., Any] = optimizer._init_group  # type: ignore[attr-defined]
    theirs = [kind._init_group for kind in kinds]  # type: ignore[attr-defined]  # torch's compiler replaces them
    return found if getattr(found, "__func__", None) in theirs else None


def replace_lists(optimizer: torch.optim.Optimizer, method: Callable[..., Any] | None) -> None:
    """Has a step call `method` in place of what `lists_of` has returned; None puts that back. Without it see there.
    Private: `_init_group`."""
    if method is None:
        del optimizer._init_group  # type: ignore[attr-defined]
    else:
        optimizer._init_group = method  # type: ignore[attr-defined]


_outside_functions: Callable[[], AbstractContextManager[None]] = find(torch._C, "_DisableFuncTorch")
count_modes: Callable[[], int] = find(torch._C, "_len_torch_dispatch_stack")
"""Returns how many dispatch modes get the operations of this thread. Nothing public counts them. Without it a step in
tiles would look like hundreds of steps to them. Private: `_len_torch_dispatch_stack`."""


def outside_transforms() -> AbstractContextManager[Any]:
    """Leaves what transforms users' operations and is under way, for a while: `torch.func`, and torch's selective
    activation checkpoint, which expects the same operations when it computes again. Nothing public does. Without it a
    step that is taken when `torch.func.grad` reads a parameter would make optimizer state of its tensors, and crash; a
    gather would be an error in a selective checkpoint. Private: `_DisableFuncTorch`, `_len_torch_dispatch_stack`."""
    return _OutsideSelection() if count_modes() else _outside_functions()


class _OutsideSelection(ExitStack):
    """Private: `_get_current_dispatch_mode_stack`, `_pop_mode`, `_push_mode`; and `_CachingTorchDispatchMode`,
    `_CachedTorchDispatchMode`, the modes of the selective checkpoint. Without them see `outside_transforms`."""

    def __enter__(self) -> Self:
        self.enter_context(_outside_functions())
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        first = next((at for at, mode in enumerate(modes) if isinstance(mode, _SELECTIVE)), len(modes))
        for mode in reversed(modes[first:]):
            _python_dispatch._pop_mode()
            self.callback(_python_dispatch._push_mode, mode)
        for mode in modes[first:]:
            if not isinstance(mode, _SELECTIVE):
                _python_dispatch._push_mode(mode)
                self.callback(_python_dispatch._pop_mode)
        return self


_SELECTIVE = tuple(
    find(torch.utils.checkpoint, name) for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
)


is_wrapped: Callable[[Tensor], bool] = find(torch._C._functorch, "is_functorch_wrapped_tensor")
"""Whether a tensor is one of a transform of `torch.func`, and has no memory of its own. Nothing public says so. Without
it weights could not be read in a transform. Private: `_functorch`."""


def scaling_of(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns what a scaler knows of an optimizer in this step. Only its own methods write it, from the gradients of
    this rank alone. Without it ranks would disagree on whether to step. Private: `_per_optimizer_states`."""
    return scaler._per_optimizer_states[id(optimizer)]


# -- files


def save_to(archive: Any, tree: Any, pickling: Any) -> None:
    """Does what `torch.save` does, with a writer and a pickler of our own: `archive` has a method `write_record`,
    `pickling` a class `Pickler`. `torch.save` takes values from memory alone. Without it a checkpoint would have to fit
    into memory to become one file. Private: `torch.serialization._save`."""
    torch.serialization._save(tree, archive, pickling, 2, False)


# -- rehearsals

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Gets every operation of torch below autograd. It has no public name, though torch documents it. Without it nothing
could be rehearsed. Private: `_python_dispatch`."""


def is_faking() -> bool:
    """Whether torch itself runs operations for their shapes now, as DTensor does to choose a placement. Nothing public
    says so. Without it a rehearsal would answer in torch's place. Private: `_get_dispatch_mode`,
    `_TorchDispatchModeKey`."""
    return _mode_of(_FAKE) is not None


_mode_of, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
