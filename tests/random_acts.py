"""What users do in the middle of training beside it, each in one step, on every rank alike."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import torch

from random_changes import trained_by

Moment = Literal["before forward", "before backward", "before step", "after step"]  # of the last micro-batch


class Act(NamedTuple):
    """What is done, when, in which step, and with which parameter, modulo their number."""

    name: str
    moment: Moment
    step: int
    which: int


def _parameter(training: Any, which: int) -> Any:
    parameters = list(training.model.parameters())
    return parameters[which % len(parameters)]


def _edit(training: Any, which: int) -> None:
    with torch.no_grad():
        _parameter(training, which).mul_(0.75)


def _edit_whole(training: Any, which: int) -> None:
    with training.engine.full_parameters(write=True), torch.no_grad():
        _parameter(training, which).add_(0.125)


def _all(training: Any) -> dict[str, torch.Tensor]:
    training.engine.loans.end_all()  # as a save does
    return {name: value.detach().clone() for name, value in training.engine.states.full_model().items()}


def _read_all(training: Any, which: int) -> None:
    training.seen |= {f"all {training.step} {name}": value for name, value in _all(training).items()}


def _evaluate(training: Any, which: int) -> None:
    training.evaluate(f"evaluation in {training.step}")


def _differentiate(training: Any, which: int) -> None:
    """A gradient that is nobody's `p.grad`."""
    training.model.eval()
    loss = training.run(8, reduces=False)[-1]
    (grad,) = torch.autograd.grad(loss, [training.model.gain])
    training.model.train()
    training.seen[f"differentiated {training.step}"] = grad


def _reload(training: Any, which: int) -> None:
    """What an optimizer has kept, through its state dict."""
    for optimizer in training.optimizers:
        state = deepcopy(training.engine.states.full_optimizer(optimizer))  # ranks that are threads share its numbers
        training.engine.states.load_optimizer(optimizer, state)


def _rewind(training: Any, which: int) -> None:
    """The weights of the first such act, at the others."""
    training.model.load_state_dict(training.kept.setdefault("model", _all(training)))


def _load(training: Any, which: int) -> None:
    state = {name: 0.75 * value if value.is_floating_point() else value for name, value in _all(training).items()}
    training.model.load_state_dict(state)


def _freeze_or_thaw(training: Any, which: int) -> None:
    """A parameter that an optimizer has, but not the one that every loss needs."""
    trained = [parameter for parameter in trained_by(training.optimizers) if parameter is not training.model.gain]
    if trained:
        parameter = trained[which % len(trained)]
        parameter.requires_grad_(not parameter.requires_grad)


def _slow_down(training: Any, which: int) -> None:
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


def _skip(training: Any, which: int) -> None:
    training.steps_now = False


def _step_first(training: Any, which: int) -> None:
    """A step more, with the same gradients."""
    training.optimizers[which % len(training.optimizers)].step()


def _drop_gradient(training: Any, which: int) -> None:
    trained = trained_by(training.optimizers)
    trained[which % len(trained)].grad = None


def _drop_gradients(training: Any, which: int) -> None:
    training.model.zero_grad()


ACTS: dict[str, Callable[[Any, int], None]] = {
    "edit": _edit,
    "edit whole": _edit_whole,
    "read all": _read_all,
    "evaluate": _evaluate,
    "differentiate": _differentiate,
    "reload": _reload,
    "rewind": _rewind,
    "load": _load,
    "freeze or thaw": _freeze_or_thaw,
    "slow down": _slow_down,
    "skip": _skip,
    "step first": _step_first,
    "drop gradient": _drop_gradient,
    "drop gradients": _drop_gradients,
}
OF_GRADIENTS_LEFT = ("skip", "step first", "drop gradient", "drop gradients")  # before the step
# Not between forward and backward: autograd refuses it.
ONE_AT_A_TIME = ("edit", "edit whole", "evaluate", "rewind", "load", "freeze or thaw")
