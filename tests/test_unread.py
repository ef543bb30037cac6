"""Parameters whose values are still in a checkpoint: who asks gets them, who does not ask reads nothing."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_zero.extents import Extent
from lightning_zero.lazy import LazyTensor, Stored, receiving
from lightning_zero.unread import UnreadParameter, UnreadParameters


class Held(Stored):
    """Counts who reads."""

    def __init__(self, values: Tensor) -> None:
        super().__init__("w", tuple(values.shape), values.dtype)
        self.values = values
        self.reads = 0

    def whole(self) -> Tensor:
        self.reads += 1
        return self.values.clone()

    def read(self, extent: Extent, into: Tensor) -> None:
        raise NotImplementedError


class Marked(Parameter):
    """A user's own kind."""

    def mark(self) -> str:
        return "marked"


def noted(kind: type[Parameter] = Parameter) -> tuple[Parameter, Held, UnreadParameters]:
    parameter, source, unread = kind(torch.zeros(2, 3)), Held(torch.arange(6.0).view(2, 3)), UnreadParameters()
    unread.note(parameter, source)
    return parameter, source, unread


@pytest.mark.parametrize(
    "look",
    [
        lambda p: p.sum(),
        lambda p: p.data.clone(),
        lambda p: p.detach(),
        lambda p: torch.stack([p, p]),
        lambda p: repr(p),
        lambda p: copy.deepcopy(p),
        lambda p: pickle.loads(pickle.dumps(p)),
        lambda p: p.numpy(force=True),
        lambda p: p.is_shared(),
    ],
)
def test_who_looks_at_the_values_has_them_read_once(look: Callable[[Parameter], Any]) -> None:
    parameter, source, unread = noted()
    plain = Parameter(source.values)
    for _ in range(2):
        found, expected = look(parameter), look(plain)
        assert type(found) is type(expected)
        assert repr(found) == repr(expected)
    assert type(parameter) is Parameter
    assert source.reads == 1
    assert unread.take().read == {parameter}


def test_questions_about_metadata_and_optimizers_read_nothing() -> None:
    parameter, source, unread = noted()
    module = nn.Module()
    module.w = parameter
    assert (parameter.shape, parameter.dtype, parameter.device.type) == ((2, 3), torch.float32, "cpu")
    assert parameter.requires_grad
    assert parameter.numel() == 6
    parameter.requires_grad_(False).requires_grad_(True)
    torch.optim.AdamW([{"params": [p for p in module.parameters() if p.requires_grad]}])
    assert isinstance(parameter, UnreadParameter)
    assert source.reads == 0
    sources, read = unread.take()
    assert sources == {parameter: source}
    assert read == set()
    assert type(parameter) is Parameter
    assert not unread


def test_what_is_written_stays_and_is_written_over_what_was_to_be_read() -> None:
    parameter, _, unread = noted()
    with torch.no_grad():
        parameter[0] = 7.0
    assert parameter.tolist() == [[7.0, 7.0, 7.0], [3.0, 4.0, 5.0]]
    assert unread.take().read == {parameter}


def test_it_keeps_what_the_user_gave_it() -> None:
    parameter, source, unread = noted(Marked)
    assert isinstance(parameter, Marked)
    assert isinstance(parameter, UnreadParameter)
    assert parameter.mark() == "marked"
    assert source.reads == 0
    unread.take()
    assert type(parameter) is Marked


def test_what_is_loaded_twice_has_the_second_values() -> None:
    parameter, first, unread = noted()
    second = Held(torch.ones(2, 3))
    with torch.no_grad(), receiving(unread.note):
        parameter.copy_(LazyTensor(second))
    assert parameter.sum().item() == 6
    assert (first.reads, second.reads) == (0, 1)


def test_conversions_of_a_whole_module_read_nothing() -> None:
    parameter, source, unread = noted()
    module = nn.Module()
    module.w = parameter
    with unread.hidden():
        module.bfloat16()
    assert source.reads == 0
    assert parameter.dtype == torch.bfloat16
    assert parameter.sum().item() == 15


@pytest.mark.parametrize(
    "look",
    [
        lambda p: torch.tensor(p),
        lambda p: torch.func.vmap(lambda row: row * 2)(p),
        lambda p: p.as_subclass(torch.Tensor).sum(),
    ],
)
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_what_goes_past_it_finds_nan_and_never_what_was_there_before(look: Callable[[Parameter], Tensor]) -> None:
    parameter, _, _ = noted()
    assert look(parameter).isnan().all()


def test_who_holds_a_view_already_sees_the_new_values() -> None:
    parameter = Parameter(torch.zeros(2, 3))
    view = parameter.data.view(-1)
    unread = UnreadParameters()
    unread.note(parameter, Held(torch.arange(6.0).view(2, 3)))
    assert view.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert unread.take().read == {parameter}


def test_a_read_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, source, _ = noted()
    with monkeypatch.context() as patch:
        patch.setattr(source, "whole", lambda: (_ for _ in ()).throw(OSError("the disk does not answer")))
        for _ in range(2):
            with pytest.raises(OSError, match="the disk does not answer"):
                parameter.sum()
    assert parameter.sum().item() == 15
