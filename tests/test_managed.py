"""Which parameters of a module the engine takes over, and which it cannot: before any of them is in shards."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD

from lightning_zero.shards.managed import are_all_in, foreign_parameters, managed_parameters


class Holds(nn.Module):
    """Has these tensors: parameters as they are, and others as buffers."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            (self.register_parameter if isinstance(tensor, Parameter) else self.register_buffer)(name, tensor)  # type: ignore[operator]


def frozen(values: Tensor) -> Parameter:
    return Parameter(values, requires_grad=False)


def taken(module: nn.Module, *, trains: bool = True) -> list[str]:
    """The names of the parameters that the engine takes over."""
    optimizers = [SGD(module.parameters())] if trains else []
    managed = managed_parameters(module, optimizers, ())
    return [name for name, parameter in module.named_parameters() if any(parameter is one for one in managed)]


def test_a_buffer_on_the_meta_device_is_refused_by_its_name() -> None:
    module = Holds(weight=Parameter(torch.ones(2)), mean=torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match=r"^mean are on the meta device"):
        taken(module)


def test_parameters_in_the_memory_of_a_larger_one_are_refused_whatever_lies_before_them_in_it() -> None:
    memory = torch.zeros(100)
    module = Holds(large=frozen(memory), small=frozen(memory[10:20]), trained=Parameter(memory[50:60]))
    with pytest.raises(ValueError, match=r"^Parameters '\w+' and 'trained' are two that share their memory"):
        managed_parameters(module, [SGD([module.trained])], ())


@pytest.mark.parametrize("start", [0, 10])
def test_a_buffer_in_the_memory_of_a_parameter_is_told_as_the_buffer_wherever_it_begins(start: int) -> None:
    memory = torch.zeros(100)
    module = Holds(trained=Parameter(memory[start : start + 20]), kept=memory[10 - start :])
    with pytest.raises(ValueError, match=r"^Parameter 'trained' trains, and buffer 'kept' is in the same memory"):
        taken(module)


def test_a_model_that_is_only_evaluated_may_have_buffers_in_the_memory_of_parameters() -> None:
    memory = torch.zeros(100)
    assert taken(Holds(weight=Parameter(memory), kept=memory[10:]), trains=False) == ["weight"]


def test_tensors_without_elements_share_no_memory() -> None:
    module = Holds(one=Parameter(torch.ones(3, 0)), other=Parameter(torch.ones(3, 0)), kept=torch.ones(3, 0))
    assert taken(module) == ["one", "other"]


def test_a_buffer_that_is_sparse_has_no_memory_to_share() -> None:
    assert taken(Holds(weight=Parameter(torch.ones(2)), mask=torch.eye(2).to_sparse())) == ["weight"]


class Functions(Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Dispatches(Parameter):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    "parameter",
    [
        Functions(torch.ones(2), requires_grad=False),
        torch.Tensor._make_subclass(Dispatches, torch.ones(2), False),
        frozen(torch.eye(2).to_sparse()),
    ],
    ids=["overrides functions", "overrides operations", "sparse"],
)
def test_a_frozen_parameter_of_its_own_kind_is_left_to_the_user(parameter: Parameter) -> None:
    module = Holds(weight=Parameter(torch.ones(2)), own=parameter)
    assert managed_parameters(module, [SGD([module.weight])], ()) == [module.weight]
    assert [*foreign_parameters(module)] == ["own"]


def test_a_parameter_that_a_module_does_without_is_none_that_is_new() -> None:
    module = nn.Linear(2, 2, bias=False)
    assert are_all_in(module, {id(module.weight)})
    assert not are_all_in(module, set())
