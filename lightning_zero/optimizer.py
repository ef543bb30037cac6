"""The user's own optimizer, stepping the pieces that this rank owns.

No optimizer is wrapped and no Parameter replaced. For the duration of the step alone `.data` is the piece of the
master and `.grad` its gradient, so the optimizer's state takes the piece's shape and its keys stay the user's
parameters. Hooks on `Optimizer.step` do it, so a step is a step whoever calls it: Lightning, a callback, a bare loop.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.comm import Comm
from lightning_zero.extents import Extent
from lightning_zero.gradient import GradientShard
from lightning_zero.lazy import LazyTensor, Partial, Stored
from lightning_zero.ledger import Category, Ledger
from lightning_zero.spread import WHOLE, OfOneRank, SpreadState, is_first
from lightning_zero.units import as_written

_no_interception = torch._C.DisableTorchFunctionSubclass


@final
class PieceStepper:
    """Swaps one optimizer's parameters to pieces around its step.

    Args:
        optimizer: the user's.
        homes: parameter -> the gradient shard that holds it, and its index there.
        before: called before the swap (values that were lent must be back).
        after: called after it with the shards whose masters may have changed.
        ledger: books the optimizer state.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        homes: Mapping[Parameter, tuple[GradientShard, int]],
        *,
        before: Callable[[], None],
        after: Callable[[list[GradientShard]], None],
        ledger: Ledger,
    ) -> None:
        self.optimizer = optimizer
        self._homes = homes
        self._before = before
        self._after = after
        self._ledger = ledger
        # Integer tables and tensors of their own kind, which `self.parameters()` lists too: they have no gradient.
        self._left_alone = {parameter for parameter in self.parameters if parameter not in homes}
        self._user_grads: dict[Parameter, Tensor | None] | None = None  # p.grad as the user sees it, during a step
        self._classes: dict[Parameter, type[Parameter]] = {}  # plain or resting, to go back to after the step
        self._handles = [
            optimizer.register_step_pre_hook(self._on_step),
            optimizer.register_step_post_hook(lambda *_: self.exit()),
        ]
        self.cut_state()

    def detach(self, *, publish: bool) -> None:
        """Leaves the optimizer alone, with its state in pieces.

        Args:
            publish: finish a step that was interrupted (a collective).
        """
        if publish:
            self.exit()
        for handle in self._handles:
            handle.remove()

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def _stepped(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters if parameter not in self._left_alone]

    def home(self, parameter: Parameter) -> tuple[GradientShard, int]:
        try:
            return self._homes[parameter]
        except KeyError:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not the "
                "module's, or was added after set-up. Give the optimizer the LightningModule's own parameters in "
                "configure_optimizers()."
            ) from None

    def _on_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.enter()
            return None

        def closure_on_full() -> Any:
            self.exit()  # an optimizer may call its closure several times
            result = closure()
            self.enter()
            return result

        if len(args) > 1:
            return (args[0], closure_on_full, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_on_full}

    def enter(self) -> None:
        """From here to `exit` every parameter of the optimizer is its piece."""
        if self._user_grads is not None:
            return
        self._before()
        for parameter in self._stepped:
            shard, index = self.home(parameter)
            shard.adopt(index)
        self._user_grads = {parameter: parameter.grad for parameter in self._stepped}
        for parameter, grad in self._user_grads.items():
            shard, index = self.home(parameter)
            piece = shard.group.piece_of(shard.group.master, index)
            with _no_interception():
                parameter.grad = None
                self._classes[parameter] = type(parameter)
                parameter.__class__ = Parameter
                parameter.data = piece
                set_grad_dtype(parameter, piece.dtype)
                if grad is not None and (piece.numel() or not shard.group.layout.spans[index].numel):
                    parameter.grad = shard.piece(index).to(piece.dtype)

    def exit(self) -> None:
        """Back to full parameters, and out with the new values."""
        grads, self._user_grads = self._user_grads, None
        if grads is None:
            return
        for parameter, grad in grads.items():
            shard, index = self.home(parameter)
            with _no_interception():
                parameter.grad = None
                parameter.data = shard.group.views[index]
                set_grad_dtype(parameter, shard.dtype)
                parameter.grad = grad
                parameter.__class__ = self._classes.pop(parameter)
        # On every rank, whatever it owned: a graph that saved the old values must end in torch's error everywhere.
        increment_version([parameter for parameter, grad in grads.items() if grad is not None])
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._ledger.adopt(Category.OPTIMIZER_STATE, value)
        self._after(list(dict.fromkeys(self.home(parameter)[0] for parameter in grads)))

    # -- state

    def cut_state(self) -> None:
        """Cuts state that exists already (some optimizers make it at construction) to this rank's pieces."""
        whole = _names_of_other_shapes(self.optimizer.state.items())
        for parameter, state in self.optimizer.state.items():
            assert isinstance(parameter, Parameter)
            for name, value in state.items():
                state[name] = self._cut(parameter, name, value, whole)

    def _cut(self, parameter: Parameter, name: str, value: Any, whole: Container[str]) -> Any:
        if not isinstance(value, Tensor):
            return value
        stored = value.source if isinstance(value, LazyTensor) else None
        is_whole = value.shape != parameter.shape or name == "step" or parameter in self._left_alone
        if not parameter.shape and name in whole:  # its moments look like its step count, and like other scalars
            is_whole = True
        if stored is not None and stored.name.endswith(WHOLE):  # nothing has to be guessed by the shape
            is_whole = True
        if is_whole or not self.home(parameter)[0].group.partition.optimizer:
            return value if stored is None else stored.whole()
        shard, index = self.home(parameter)
        piece = shard.group.piece(index)
        if not isinstance(stored, Stored):
            return value.reshape(-1)[piece.start : piece.stop].clone()
        mine = torch.empty(piece.numel, dtype=stored.dtype, device=shard.group.kind.device)
        stored.read(Extent.of_whole(stored.name, stored.shape, piece.start, piece.stop), mine)
        return mine

    def full_state_dict(self, comm: Comm) -> dict[str, Any]:
        """`optimizer.state_dict()` as one device would have it. A collective; every rank gets all of it."""
        local = self.optimizer.state_dict()
        if not local:  # Lightning's stand-in where there is no optimizer
            return local
        described = {
            index: self._describe(self.parameters[index], state)
            for index, state in local["state"].items()
            if self._owns_any(self.parameters[index])  # what was made at construction is there for all, and not stepped
        }
        merged: dict[int, dict[str, Any]] = {}
        for theirs in comm.all_gather_object(described, "optimizer state"):
            for index, state in theirs.items():
                for name, value in state.items():
                    merged.setdefault(index, {}).setdefault(name, value)
        full_state = {
            index: {
                name: self._gather(comm, index, name, value, local["state"].get(index, {}))
                for name, value in merged[index].items()
            }
            for index in sorted(merged)
        }
        return {**local, "state": full_state}

    def _describe(self, parameter: Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of one parameter with a placeholder for each tensor that is cut like the parameter."""
        return {
            name: _Cut(value.dtype) if self._is_cut(parameter, value) else _on_host(value)
            for name, value in state.items()
        }

    def _is_cut(self, parameter: Parameter, value: Any) -> bool:
        if parameter in self._left_alone:
            return False
        shard, index = self.home(parameter)
        if not isinstance(value, Tensor) or not shard.group.partition.optimizer:
            return False
        return value.shape == (shard.group.piece(index).numel,)

    def _gather(self, comm: Comm, index: int, name: str, value: Any, mine: Mapping[str, Any]) -> Any:
        if not isinstance(value, _Cut):
            return value
        shard, at = self.home(self.parameters[index])
        span = shard.group.layout.spans[at]
        piece = shard.group.piece(at)
        contribution = torch.zeros(span.numel, dtype=value.dtype)
        if piece.numel:
            contribution[piece.start : piece.stop] = mine[name].cpu()
        rows = contribution.new_empty((comm.size, span.numel))
        comm.all_gather_host(rows, contribution, f"state {index} {name}").wait()
        pieces = [shard.group.layout.piece(at, rank) for rank in range(comm.size)]
        whole = torch.cat([row[piece.start : piece.stop] for row, piece in zip(rows, pieces, strict=True)])
        return whole.view(span.shape)

    @property
    def parameter_names(self) -> list[str]:
        """Of the parameters, as `state_dict` numbers them; empty for what the engine does not hold."""
        names = []
        for parameter in self.parameters:
            shard, index = self._homes.get(parameter, (None, 0))
            names.append("" if shard is None else as_written(shard.group.layout.spans[index].name))
        return names

    def spread_state_dict(self, name: str, comm: Comm) -> dict[str, Any]:
        """`optimizer.state_dict()` to be written by all ranks together: each has the parameters that it owns any of,
        with a `LazyTensor` for what is cut like its parameter. A collective of a few bytes.

        Args:
            name: of this optimizer, in the names of its tensors.
            comm: the ranks that the parameters are spread over.
        """
        local = self.optimizer.state_dict()
        if not local:
            return local
        whole = set().union(*comm.all_gather_object(self._names_of_whole_state(), "names of whole state"))
        mine: dict[int, dict[str, Any]] = {}
        for index, state in local["state"].items():
            if (parameter := self.parameters[index]) in self._left_alone:
                continue
            shard, at = self.home(parameter)
            group, share = shard.group, shard.group.share(at)
            full_name = f"{name}:{as_written(group.layout.spans[at].name)}"
            mine[index] = {
                key: LazyTensor(SpreadState(f"{full_name}:{key}", group, at, value))
                if isinstance(value, Tensor) and key not in whole
                else _of_one(f"{full_name}:{key}{WHOLE}", value)
                for key, value in state.items()
                if is_first(group, at) or (share.numel and isinstance(value, Tensor) and key not in whole)
            }
        return {**local, "state": Partial(name, mine)}

    def _names_of_whole_state(self) -> set[str]:
        """Names of state tensors that are not cut like their parameters. A piece may have the shape of one by chance,
        so one that fits nowhere else decides for all, on all ranks."""
        found = set()
        for parameter, state in self.optimizer.state.items():
            assert isinstance(parameter, Parameter)
            if parameter in self._left_alone or not self._owns_any(parameter):
                continue
            shard, index = self.home(parameter)
            shape = shard.group.piece_shape(index)
            found |= {name for name, value in state.items() if isinstance(value, Tensor) and value.shape != shape}
        return found

    def refuse_other_groups(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ValueError unless a state is of as many parameters, in the same groups."""
        saved = [len(group["params"]) for group in state_dict.get("param_groups", ())]
        own = [len(group["params"]) for group in self.optimizer.param_groups]
        if saved != own:
            raise ValueError(
                f"The checkpoint's {type(self.optimizer).__name__} has groups of {saved} parameters, and "
                f"configure_optimizers() makes groups of {own}. Resume with the optimizers it was saved with."
            )

    def cut_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Of any strategy's `optimizer.state_dict()` what this rank steps; of stored tensors only that is read."""
        parameters = self.parameters
        whole = _names_of_other_shapes((parameters[at], state) for at, state in state_dict.get("state", {}).items())
        state = {
            index: {name: self._cut(parameters[index], name, value, whole) for name, value in state.items()}
            for index, state in state_dict.get("state", {}).items()
            if self._owns_any(parameters[index])
        }
        return {**state_dict, "state": state}

    def load_cut_state_dict(self, cut: dict[str, Any]) -> None:
        """The optimizer goes on from what `cut_state_dict` gave."""
        self.enter()  # so that torch casts the state to the dtype of the master, not of the resting weight
        try:
            self.optimizer.load_state_dict(cut)
        finally:
            self.exit()

    def _owns_any(self, parameter: Parameter) -> bool:
        if parameter in self._left_alone:
            return True
        shard, index = self.home(parameter)
        return shard.group.piece(index).numel > 0 or not shard.group.layout.spans[index].numel


def _names_of_other_shapes(states: Iterable[tuple[Any, Mapping[str, Any]]]) -> set[str]:
    """Names of state tensors that have, for some parameter, not its shape."""
    return {
        name
        for parameter, state in states
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape != parameter.shape
    }


def _of_one(name: str, value: Any) -> Any:
    return LazyTensor(OfOneRank(name, value)) if isinstance(value, Tensor) else value


class _Cut:
    """Stands for a state tensor of which each rank has its piece."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def set_grad_dtype(parameter: Parameter, dtype: torch.dtype) -> None:
    """Lets `p.grad` have the accumulation dtype where the parameter rests in a narrower one, so that autograd sums
    the gradients of several uses in it too (bit-equal to autocast over fp32 weights)."""
    if parameter.grad_dtype != dtype:
        parameter.grad_dtype = dtype
