"""Activation checkpointing: blocks whose activations are computed again in backward (Chen et al., arXiv 1604.06174).

Torch's own non-reentrant checkpoint recomputes a block, but it is given no inputs. Only a store keeps these, which may
move and divide them (`tiers.activations`). The recomputation may be given other tensors of the same values, strides and
`requires_grad`: gradients flow through the graph of the first forward, and recomputing only fills in the values that
autograd would have saved there.

    forward     keep(arguments) -> call; autograd saves no value
    backward    autograd asks for the first saved value -> fetch(arguments) -> call again, with random numbers and
                autocast (by torch's checkpoint), parameters and buffers (by `Weights`, `Buffers`) as they were

Calls are intercepted around everything that happens to parameters in them, so a recomputation gathers, casts and waits
as a forward does.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_zero.config import ActivationCheckpointing, classes_from
from lightning_zero.device import Late, is_host
from lightning_zero.run.surrounding import Around
from lightning_zero.shards.local import local_of
from lightning_zero.shards.offload import host_of
from lightning_zero.shards.options import Options
from lightning_zero.shards.slot import no_interception
from lightning_zero.shards.units import as_written, find_blocks, modules_in_compiled_regions, scripted
from lightning_zero.tiers.activations import ActivationStore, version_of
from lightning_zero.tiers.ledger import Ledger, Place
from lightning_zero.torch_private import buffers_in, compiled_in, parameters_in, tree_iter
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm

ARGUMENT = "activation_checkpointing: modules"


def recompute_for(
    model: Module, options: Options, device: torch.device, ledger: Ledger, alike: Comm
) -> "Recompute | None":
    """Returns the blocks that `options` ask for, if any; call it before anything else is done to the model. See
    `store_for` for `alike`."""
    policy = options.activation_checkpointing
    if policy is None:
        return None
    store = store_for(policy, ledger, device, host_of(device, options.machine), alike)
    return Recompute(model, policy.modules, store)


def store_for(
    policy: ActivationCheckpointing, ledger: Ledger, device: torch.device, host: Place, alike: Comm
) -> ActivationStore:
    """Returns the store for activation checkpoints, in `host` memory or on the device. `alike` has the ranks with the
    same activations (tensor-parallel ones), which `policy` may partition them over."""
    here = Place(device)
    comm = alike if policy.partition else LocalComm()
    return ActivationStore(ledger, here, host if policy.offload else here, comm, contiguous=policy.contiguous)


@final
class Recompute:
    """The blocks of a model that recompute, from `install` to `remove`.

    A block does not recompute where no gradients are recorded, nor inside another block that does.

    Args:
        model: the model that has the blocks.
        modules: see `ActivationCheckpointing`.
        store: keeps the blocks' inputs.

    Raises:
        ValueError: for modules that are not in the model, or that lie inside of what torch.compile traces.
    """

    def __init__(self, model: Module, modules: Any, store: ActivationStore) -> None:
        self.store = store
        self.chosen = _choose(model, modules)
        self._undo = ExitStack()
        self._is_inside = False  # a call of a block that recomputes
        self._unsure: deque[weakref.ref[Buffers]] = deque()  # of calls, the oldest first; see `free_unchanged`
        device = store.here.device
        # Torch restores the random state of those devices that the arguments of its checkpoint are on.
        with torch.inference_mode(False):
            self._anchors = () if device.type == "cpu" else (torch.empty(0, device=device),)

    def install(self) -> None:
        """Lets the blocks recompute from here on."""
        for module, name in self.chosen.called.items():
            self._undo.callback(Around(module, partial(self.call, name, module)).remove)
        for module, name in self.chosen.asked.items():
            self._ask(module, name)

    def remove(self) -> None:
        """Leaves the blocks as they were before `install`."""
        self._undo.close()

    def _ask(self, module: Module, name: str) -> None:
        """Has a module of transformers checkpoint by itself, with our function in place of torch's."""
        ours = {"gradient_checkpointing": True, "_gradient_checkpointing_func": CheckpointFunction(self, name, module)}
        before = {key: vars(module)[key] for key in ours if key in vars(module)}
        vars(module).update(ours)

        def undo() -> None:
            for key in ours:
                vars(module).pop(key, None)
            vars(module).update(before)

        self._undo.callback(undo)

    def call(self, name: str, module: Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls `function`, a call of the block `module` or a part of one, so that backward computes it again."""
        if self._is_inside or not _records_gradients(module, args, kwargs):
            return function(*args, **kwargs)
        call = _Call(self, name, module, function, (args, kwargs))
        # Torch ends a recomputation by an error, once it has all values: TorchScript would pass on one of its own.
        ends_early = next(scripted(module), None) is None
        with nullcontext() if ends_early else set_checkpoint_early_stop(False):
            return checkpoint(call, *self._anchors, use_reentrant=False)

    def free_unchanged(self, buffers: "Buffers") -> None:
        """Frees copies of `buffers` that a call, now over, has not changed; and those of which a device tells late."""
        buffers.forget_unchanged()
        self._unsure.append(weakref.ref(buffers))
        while self._unsure and ((oldest := self._unsure[0]()) is None or oldest.is_told):
            self._unsure.popleft()
            if oldest is not None:  # its graph lives, and backward may be a while away
                oldest.forget_told()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, which is around a call of a block, blocks do not recompute by themselves."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before


@final
class _Call:
    """One call of a block. Torch calls this object in forward, and again whenever it recomputes."""

    def __init__(self, recompute: Recompute, name: str, module: Module, function: Any, arguments: Any) -> None:
        self._recompute = recompute
        self._name = name
        self._function = function
        self._weights = Weights(module)
        self._buffers = Buffers(module)
        self._kept = recompute.store.keep(name, arguments)
        self._first: Any = arguments  # None once forward has them

    def __call__(self, *_: Tensor) -> Any:
        if self._first is None:
            with self._recompute.inside(), self._weights.as_before(), self._buffers.as_before():
                args, kwargs = self._kept.fetch()
                return self._function(*args, **kwargs)
        (args, kwargs), self._first = self._first, None
        versions = _versions_in(args, kwargs)
        with self._recompute.inside():
            output = self._function(*args, **kwargs)
        self._recompute.store.join()
        self._recompute.free_unchanged(self._buffers)
        if _versions_in(args, kwargs) != versions:
            raise RuntimeError(
                f"{self._name!r} edits its input in place, and could not be computed again from it. Write x = x + y "
                "there in place of x += y, or leave it out of ActivationCheckpointing(modules=...)."
            )
        return output


@final
class Weights:
    """The parameters of a module as a call has found them: `torch.func.functional_call` shows others in their place,
    and is over when the call is computed again."""

    def __init__(self, module: Module) -> None:
        holders = (parameters_in(holder) for holder in module.modules())
        self._found = [(parameters, dict(parameters)) for parameters in holders if parameters]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, the module has what it had then."""
        now = [dict(parameters) for parameters, _ in self._found]
        for parameters, before in self._found:
            _show(parameters, before)
        try:
            yield
        finally:
            for (parameters, _), shown in zip(self._found, now, strict=True):
                _show(parameters, shown)


def _show(held: MutableMapping[str, Any], others: dict[str, Any]) -> None:
    """Gives a module other parameters or buffers in place of those `held`. What has them already is not touched:
    compiled code would be compiled again. Of a scripted module names can be given others, and neither come nor go."""
    if list(held.keys()) != list(others):
        held.clear()
        held.update(others)
    for name, other in others.items():
        if held[name] is not other:
            held[name] = other


@final
class Buffers:
    """The buffers of a module as they were before a call that changes them (the statistics of BatchNorm).

    With torch's checkpoint alone a recomputation would begin with the changed buffers, and change them once more.
    """

    def __init__(self, module: Module) -> None:
        self._before: list[_Before] = []
        self._values: dict[int, Tensor] = {}  # copies, by the buffer's id: a buffer may be in several modules
        self._told: dict[int, Late] = {}  # by the module's id, whether edits that are not counted have changed any
        with torch.no_grad():
            for holder in module.modules():  # also those without buffers: the call may register the first one
                buffers = dict(buffers_in(holder))
                for buffer in buffers.values():
                    if buffer is not None and id(buffer) not in self._values:
                        self._values[id(buffer)] = buffer.clone()
                versions = {name: version_of(buffer) for name, buffer in buffers.items() if buffer is not None}
                self._before.append(_Before(holder, buffers, versions))

    def forget_unchanged(self) -> None:
        """Frees the copies for modules whose buffers the call, which is over, has not changed. Of some it is known once
        the device has told it, as the host does not wait for that: see `forget_told`."""
        found, self._before = self._before, []
        for before in found:
            edited = before.is_changed or before.is_edited(self._values)
            if isinstance(edited, Late):
                self._told[id(before.holder)] = edited
            if edited:
                self._before.append(before)
        self._free()

    @property
    def is_told(self) -> bool:
        return all(told.is_here for told in self._told.values())

    def forget_told(self) -> None:
        """Frees the copies for modules of which the device has told that nothing has changed. Those of which it has not
        told yet are shown in vain, if nothing has."""
        here = {holder: told for holder, told in self._told.items() if told.is_here}
        self._told = {holder: told for holder, told in self._told.items() if holder not in here}
        unchanged = {holder for holder, told in here.items() if not told.read()}
        self._before = [before for before in self._before if id(before.holder) not in unchanged]
        self._free()

    def _free(self) -> None:
        wanted = {id(buffer) for before in self._before for buffer in before.buffers.values()}
        self._values = {key: value for key, value in self._values.items() if key in wanted}

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, the module has copies in place of its buffers, with the values from before the call."""
        self.forget_told()
        now = [dict(buffers_in(before.holder)) for before in self._before]
        with torch.no_grad():
            copies = {key: value.clone() for key, value in self._values.items()}
        for before in self._before:
            shown = {name: copies.get(id(buffer), buffer) for name, buffer in before.buffers.items()}
            _show(buffers_in(before.holder), shown)
        try:
            yield
        finally:
            for before, buffers in zip(self._before, now, strict=True):
                _show(buffers_in(before.holder), buffers)


class _Before(NamedTuple):
    """The buffers that one module had before a call."""

    holder: Module
    buffers: dict[str, Tensor | None]
    versions: dict[str, int]

    @property
    def is_changed(self) -> bool:
        """Whether the module has others now, or some with edits that torch has counted."""
        now = buffers_in(self.holder)
        names = list(now.keys())  # a scripted module cannot be iterated over
        if names != list(self.buffers) or any(now[name] is not self.buffers[name] for name in names):
            return True
        return any(version_of(self.buffers[name]) != version for name, version in self.versions.items())  # type: ignore[arg-type]

    def is_edited(self, values: Mapping[int, Tensor]) -> bool | Late:
        """Whether buffers have others than these `values`. Versions do not tell: torch counts no edits through
        `buffer.data` (of a codebook, say), nor those by its kernels for fake quantization."""
        pairs = [(local_of(one), local_of(values[id(one)])) for one in self.buffers.values() if one is not None]
        here = [pair for pair in pairs if is_host(pair[0].device)]
        away = [pair for pair in pairs if not is_host(pair[0].device)]
        if not all(torch.equal(*pair) for pair in here) or any(mine.layout is not torch.strided for mine, _ in away):
            return True
        with torch.no_grad():
            edited = [_bits(mine).ne(_bits(theirs)).any() for mine, theirs in away]
            return Late(torch.stack(edited).any()) if edited else False


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


@final
class CheckpointFunction:
    """The function that modules of transformers call in place of torch's checkpoint."""

    def __init__(self, recompute: Recompute, name: str, module: Module) -> None:
        self._recompute = recompute
        self._name = name
        self._module = module

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        while isinstance(function, partial):
            function, args, kwargs = function.func, (*function.args, *args), {**function.keywords, **kwargs}
        owner = getattr(function, "__self__", args[0] if args else None)
        module = owner if isinstance(owner, Module) else self._module
        return self._recompute.call(self._name, module, function, args, kwargs)

    def __reduce__(self) -> Any:
        """A copy of the module gets torch's own checkpoint."""
        return partial(checkpoint, use_reentrant=False).__reduce__()


class Chosen(NamedTuple):
    """The modules that recompute, with their names."""

    blocks: list[str]  # all blocks found, by name
    called: dict[Module, str]  # modules whose calls are intercepted
    asked: dict[Module, str]  # modules that can checkpoint by themselves, and the models around them


def _choose(model: Module, modules: Any) -> Chosen:
    blocks = find_blocks(model, classes_from(modules, ARGUMENT), ARGUMENT)
    shells = {inside: shell for shell in model.modules() if (inside := compiled_in(shell)) is not None}
    called = {shells.get(module, module): name for name, module in blocks.items()}
    compiled, traced = modules_in_compiled_regions(model), modules_in_compiled_regions(model, roots=False)
    own = {module: as_written(name) for name, module in model.named_modules() if _checkpoints_by_itself(module)}
    for module, name in (called | own).items():
        if module in (compiled if module in own else traced):
            raise ValueError(
                f"{ARGUMENT}: {name!r} ({type(module).__name__}) lies inside of what torch.compile traces, where its "
                "activations cannot be taken hold of. Compile the blocks themselves, each on its own "
                "(block.compile()), without gradient checkpointing of their own; or leave activation_checkpointing out."
            )
    layers = {module for module in called if _is_layer_of_transformers(module) and module not in compiled}
    asked = {
        module: as_written(name)
        for name, module in model.named_modules()
        if module in own
        or module in layers
        or ("gradient_checkpointing" in vars(module) and not layers.isdisjoint(module.modules()))
    }
    return Chosen(list(blocks), {module: name for module, name in called.items() if module not in layers}, asked)


def _is_layer_of_transformers(module: Module) -> bool:
    """Whether the module is such a layer as transformers checkpoints. When it and the models around it are asked to
    checkpoint, they use no cache of keys and values, which a recomputation would add to once more."""
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _checkpoints_by_itself(module: Module) -> bool:
    """Whether the user has told the module to checkpoint, in the manner of transformers."""
    return bool(vars(module).get("gradient_checkpointing")) and "_gradient_checkpointing_func" in vars(module)


def _records_gradients(module: Module, args: Any, kwargs: Any) -> bool:
    """Whether a call builds a graph, whose saved values could be computed again."""
    if not torch.is_grad_enabled() or not _are_hooks_allowed():
        return False
    with no_interception():
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_iter((args, kwargs))):
            return True
        return any(parameter.requires_grad for parameter in module.parameters())


def _are_hooks_allowed() -> bool:
    """Whether torch lets hooks be set on what autograd saves, as it does not inside some transforms of `torch.func`."""
    try:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return True
    except RuntimeError:
        return False


def _versions_in(args: Any, kwargs: Any) -> list[int]:
    return [version_of(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
