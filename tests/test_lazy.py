"""A tensor whose values are elsewhere: what can be known of it without them, and when they are brought."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.device import HOST
from lightning_zero.shards.extents import Extent
from lightning_zero.tiers.array import ALL, Array
from lightning_zero.tiers.ledger import Place, Tier
from lightning_zero.views.lazy import LazyTensor, OfOneRank, Stored, materialize
from lightning_zero.views.state import RestingState


class Counted(Stored):
    """Ones, which counts how often they are asked for."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__("ones", shape, dtype)
        self.reads = 0

    def whole(self) -> Tensor:
        self.reads += 1
        return torch.ones(self.shape, dtype=self.dtype)

    def read(self, extent: Extent, into: Tensor) -> None:
        self.reads += 1
        into.fill_(1.0)


@pytest.fixture
def source() -> Counted:
    return Counted((3, 4))


def test_metadata_is_known_without_values(source: Counted) -> None:
    lazy = LazyTensor(source)
    assert isinstance(lazy, Tensor)
    assert (lazy.shape, lazy.dtype, lazy.ndim, lazy.numel(), lazy.nbytes) == ((3, 4), torch.float32, 2, 12, 48)
    assert lazy.device.type == "cpu"
    assert (lazy.is_cpu, lazy.is_meta, lazy.is_cuda) == (True, False, False)
    assert not lazy.requires_grad
    assert lazy.is_floating_point()
    assert len(lazy) == 3
    assert (lazy.stride(), lazy.is_contiguous(), lazy.storage_offset(), lazy.get_device()) == ((4, 1), True, 0, -1)
    assert not any((lazy.is_inference(), lazy.is_conj(), lazy.is_neg(), lazy.is_complex()))
    assert "ones" in repr(lazy)
    assert isinstance(lazy.detach(), LazyTensor)
    assert source.reads == 0


@pytest.mark.parametrize(
    "look",
    [
        lambda lazy: lazy + 1,
        lambda lazy: lazy[1:],
        lambda lazy: lazy.half(),
        lambda lazy: lazy.clone(),
        lambda lazy: lazy.cpu(),
        lambda lazy: lazy.numpy(),
        lambda lazy: lazy.tolist(),
        lambda lazy: lazy.sum().item(),
        lambda lazy: torch.cat([lazy, torch.zeros(1, 4)]),
        lambda lazy: copy.deepcopy(lazy),
        lambda lazy: torch.save(lazy, io.BytesIO()),
        lambda lazy: torch.equal(lazy, torch.ones(3, 4)),
        lambda lazy: lazy.data_ptr(),
    ],
)
def test_whoever_looks_at_values_gets_them(look: object, source: Counted) -> None:
    found = look(LazyTensor(source))  # type: ignore[operator]
    assert source.reads == 1
    assert not isinstance(found, LazyTensor)


def test_a_copy_and_a_saved_one_are_plain_tensors(source: Counted) -> None:
    lazy, file = LazyTensor(source), io.BytesIO()
    torch.save({"a": lazy}, file)
    file.seek(0)
    for found in (copy.deepcopy(lazy), torch.load(file)["a"]):
        assert type(found) is Tensor
        assert torch.equal(found, torch.ones(3, 4))


def test_materialize_reaches_into_containers(source: Counted) -> None:
    found = materialize({"a": [LazyTensor(source), 3], "b": (torch.zeros(1), "x")})
    assert torch.equal(found["a"][0], torch.ones(3, 4))
    assert found["a"][1] == 3
    assert found["b"][1] == "x"


def test_loading_reads_each_tensor_once_as_it_comes() -> None:
    module = nn.BatchNorm1d(3)
    sources = {name: Counted(tuple(value.shape), value.dtype) for name, value in module.state_dict().items()}
    module.load_state_dict({name: LazyTensor(source) for name, source in sources.items()})
    assert {source.reads for source in sources.values()} == {1}
    assert all(torch.equal(value, torch.ones_like(value)) for value in module.state_dict().values())


def test_a_copy_reads(source: Counted) -> None:
    module = nn.Linear(4, 3, bias=False)
    module.load_state_dict({"weight": LazyTensor(source)})
    assert torch.equal(module.weight, torch.ones(3, 4))


def test_assigned_to_the_data_of_a_plain_parameter_it_is_refused_by_torch(source: Counted) -> None:
    parameter = nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):  # else a read of it would end the process
        parameter.data = LazyTensor(source)
    parameter.data = LazyTensor(source).clone()
    assert parameter.sum() == 12


def test_another_shape_is_torchs_own_error(source: Counted) -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch for weight.*\[3, 4\].*\[3, 5\]"):
        nn.Linear(5, 3, bias=False).load_state_dict({"weight": LazyTensor(source)})


def edited_by_setting_data(tensor: Tensor) -> None:
    tensor.data = torch.full(tensor.shape, 7.0)


EDITS = {
    "method": lambda tensor: tensor.zero_(),
    "item": lambda tensor: tensor.__setitem__(0, 7.0),
    "slice of an item": lambda tensor: tensor[1][2:].fill_(7.0),
    "operator": lambda tensor: tensor.__imul__(3),
    "view": lambda tensor: tensor.view(-1)[:5].copy_(torch.arange(5.0)),
    "transposed": lambda tensor: tensor.t().add_(torch.arange(3.0)),
    "detached": lambda tensor: tensor.detach().mul_(2),
    "data": lambda tensor: tensor.data.mul_(2),
    "data set": edited_by_setting_data,
    "array": lambda tensor: tensor.numpy().__setitem__(0, 7.0),
    "initialisation": lambda tensor: nn.init.constant_(tensor, 7.0),
    "output": lambda tensor: torch.add(tensor, 1, out=tensor),
    "the same device": lambda tensor: tensor.to("cpu").mul_(2),
    "with itself": lambda tensor: tensor.add_(tensor),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_in_place_is_kept(edit: Callable[[Tensor], Any], inference: bool, source: Counted) -> None:
    lazy, plain = LazyTensor(source), torch.ones(3, 4)
    with torch.inference_mode(inference):
        edit(lazy)
        edit(lazy)
        edit(plain)
        edit(plain)
    assert torch.equal(materialize(lazy), plain)
    assert torch.equal(lazy + 0, plain)
    assert source.reads == 1


def test_an_edited_tensor_is_no_longer_read_from_where_it_was(source: Counted) -> None:
    lazy = LazyTensor(source)
    assert lazy.mul_(2) is lazy
    parameter = nn.Parameter(torch.zeros(3, 4))
    with torch.no_grad():
        parameter.copy_(lazy)
    assert source.reads == 1
    assert torch.equal(parameter, torch.full((3, 4), 2.0))
    copied = materialize(lazy)
    copied.zero_()
    assert torch.equal(materialize(lazy), torch.full((3, 4), 2.0))


def test_edits_through_several_views_that_are_held_are_all_kept(source: Counted) -> None:
    lazy = LazyTensor(source)
    first, last = lazy[0], lazy[2]
    first.zero_()
    last.fill_(3)
    assert materialize(lazy)[:, 0].tolist() == [0, 1, 3]
    assert source.reads == 1


def test_a_copy_has_a_tensor_that_stands_in_two_places_once(source: Counted) -> None:
    lazy = LazyTensor(source)
    copied = copy.deepcopy({"encoder": lazy, "decoder": lazy})
    assert copied["encoder"] is copied["decoder"]


def test_an_edit_of_what_one_rank_writes_is_none_of_what_it_has() -> None:
    """Of its random state, say: a hook may edit the checkpoint that it is given, and training goes on."""
    own = torch.ones(3)
    lazy = LazyTensor(OfOneRank("own", own))
    lazy.zero_()
    assert torch.equal(own, torch.ones(3))
    assert torch.equal(materialize(lazy), torch.zeros(3))


@pytest.mark.parametrize("look", [lambda t: t + 1, lambda t: t.sum().item(), lambda t: t.clone(), copy.deepcopy])
def test_who_only_looks_holds_nothing_in_memory(look: Callable[[Tensor], Any], source: Counted) -> None:
    lazy = LazyTensor(source)
    look(lazy)
    assert lazy.source is source


@pytest.mark.parametrize(
    "edit",
    [
        lambda t: t.resize_(2),
        lambda t: t.unsqueeze_(0),
        lambda t: t.t_(),
        lambda t: setattr(t, "data", torch.zeros(t.shape, dtype=torch.float64)),
    ],
)
def test_an_edit_to_another_shape_or_dtype_says_what_to_write(edit: Callable[[Tensor], Any], source: Counted) -> None:
    with pytest.raises(RuntimeError, match=r"state_dict\[name\] = "):
        edit(LazyTensor(source))


# -- optimizer state that rests elsewhere


class Watched(Array):
    """Six values in half of the bytes, which counts how often they are read."""

    version = 0

    def __init__(self) -> None:
        super().__init__(6, torch.bfloat16, Place(HOST, Tier.HOST))
        self.values, self.reads = torch.arange(6, dtype=torch.bfloat16), 0

    def read(self, part: slice = ALL) -> Tensor:
        self.reads += 1
        return self.values[part].clone()

    def editable(self, part: slice = ALL) -> Tensor:
        return self.read(part)

    def copy_to(self, part: slice, target: Tensor) -> Tensor:
        return target.copy_(self.read(part))

    def write(self, part: slice, values: Tensor) -> None:
        self.values[part] = values


@pytest.fixture
def resting() -> RestingState:
    return RestingState(Watched(), (2, 3), torch.float32)


def reads_of(state: RestingState) -> int:
    assert isinstance(state.array, Watched)
    return state.array.reads


def kept_in(state: RestingState) -> list[float]:
    """What the array has, with no views that anybody holds."""
    assert isinstance(state.array, Watched)
    return state.array.values.tolist()


def test_of_state_that_rests_all_but_the_values_is_known_without_reading_it(resting: RestingState) -> None:
    assert (resting.shape, resting.dtype, resting.numel(), resting.is_cpu) == ((2, 3), torch.float32, 6, True)
    assert resting.detach() is resting
    assert "kept as torch.bfloat16 in the tier" in repr(resting)
    assert reads_of(resting) == 0
    assert resting.sum().item() == 15.0


def test_state_that_rests_keeps_edits_in_place(resting: RestingState) -> None:
    resting.mul_(2)
    assert kept_in(resting) == [0, 2, 4, 6, 8, 10]
    resting[1] = 7.0
    resting.keep_edits()
    assert kept_in(resting) == [0, 2, 4, 7, 7, 7]


def test_state_that_rests_keeps_edits_of_a_view_that_somebody_holds(resting: RestingState) -> None:
    row = resting[0]
    row.fill_(9.0)
    assert resting.sum().item() == 27.0 + 12.0
    resting.keep_edits()
    assert kept_in(resting) == [9, 9, 9, 3, 4, 5]
    resting.array.write(ALL, torch.zeros(6))  # a step, which is seen
    assert resting.count_nonzero() == 0
    resting.keep_edits()  # nothing is lent any more
    assert kept_in(resting) == [0] * 6


def test_copies_of_state_that_rests_are_plain_and_their_own(resting: RestingState) -> None:
    view = resting[0]  # so that the values are lent, and a copy must not be these
    stored = io.BytesIO()
    torch.save(resting, stored)
    stored.seek(0)
    for copied in (copy.deepcopy(resting), torch.load(stored, weights_only=True)):
        assert type(copied) is Tensor
        assert copied.dtype == torch.float32
        copied.zero_()
    assert view.tolist() == [0, 1, 2]
    assert resting.sum().item() == 15.0


def test_state_that_rests_and_is_read_in_an_evaluation_is_edited_after_it(resting: RestingState) -> None:
    with torch.inference_mode():
        assert resting[0].sum().item() == 3.0
    resting.add_(1.0)
    resting.keep_edits()
    assert kept_in(resting) == [1, 2, 3, 4, 5, 6]
