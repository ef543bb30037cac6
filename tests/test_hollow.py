"""Tensors whose memory nobody touches behave as others do, but for their values."""

import resource
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from lightning_zero.distributed_private import leave_imagined_world
from lightning_zero.rehearsal import hollow
from lightning_zero.rehearsal.hollow import SMALL, Hollow, NeedsValuesError

LARGE = (256, 1024)  # more than SMALL


def test_a_tensor_larger_than_this_machine_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Hollow():
        layers = [torch.zeros(2**30) + 1 for _ in range(64)]  # 256 GiB
        total = sum(layer.sum() for layer in layers)
    assert isinstance(total, torch.Tensor)
    assert total.shape == ()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


def test_shapes_strides_and_dtypes_are_those_of_torch() -> None:
    def run() -> list[torch.Tensor]:
        x = torch.ones(LARGE)
        half, stacked = x.bfloat16(), torch.stack([x, x.mul(2)])
        return [
            x.t() @ x,
            half * 2.0,
            half + x,
            stacked.permute(2, 0, 1).contiguous(),
            x.t().clone(),
            torch.empty_like(x.t()),
            x.argmax(0),
            *x.topk(5),
            torch.cat([x, x[:3]]),
            nn.functional.layer_norm(x, [1024]).to(torch.float64),
        ]

    expected = run()
    with Hollow():
        found = run()
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_torch_is_asked_once_for_the_shapes_of_what_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hollow, "_SHAPED", {})
    on_meta = hollow._on_meta
    monkeypatch.setattr(hollow, "_on_meta", lambda func, *given: asked.append(str(func)) or on_meta(func, *given))
    with Hollow():
        x, y = torch.empty(LARGE), torch.empty(LARGE)
        for _ in range(3):
            assert (x.sigmoid() + y).t().sigmoid().stride() == (1, 1024)
    # Twice the first one: of columns it has other strides.
    assert Counter(asked) == {"aten.empty.memory_format": 1, "aten.sigmoid.default": 2, "aten.add.Tensor": 1}


def test_numbers_of_other_classes_and_another_default_have_dtypes_of_their_own() -> None:
    def dtypes() -> list[torch.dtype]:
        x = torch.zeros(LARGE, dtype=torch.int8)
        return [one.dtype for one in (torch.full(LARGE, 1), torch.full(LARGE, 1.0), torch.full(LARGE, True), x + 1.0)]

    with Hollow():
        assert dtypes() == [torch.int64, torch.float32, torch.bool, torch.float32]
        torch.set_default_dtype(torch.float64)
        try:
            assert dtypes() == [torch.int64, torch.float64, torch.bool, torch.float64]
        finally:
            torch.set_default_dtype(torch.float32)


def test_what_is_small_and_known_is_computed() -> None:
    with Hollow() as mode:
        small = torch.arange(SMALL // 2)
        assert int(small.sum()) == small.numel() * (small.numel() - 1) // 2
        small[3] = 7
        assert small.tolist()[:5] == [0, 1, 2, 7, 4]
        assert mode.knows(small)
        large = torch.ones(LARGE)
        assert not mode.knows(large)
        small[0] = large.sum()  # from here on nobody knows
        assert not mode.knows(small)


def test_a_collective_of_dtensors_has_one_result_in_memory() -> None:
    """Who waits for it is given what it has returned."""
    made: list[torch.Tensor] = []
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with Hollow(made.append):
            total = all_reduce(torch.ones(LARGE), "sum", dist.group.WORLD)
            assert total.wait().untyped_storage().data_ptr() == made[-1].untyped_storage().data_ptr()
    finally:
        leave_imagined_world()
    assert [one.shape for one in made] == [LARGE, LARGE]


def test_views_share_memory_and_edits_count() -> None:
    with Hollow():
        x = torch.zeros(LARGE)
        view = x[3:].view(-1)
        version = x._version
        view.add_(1)
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert view.data_ptr() == x.data_ptr() + 3 * 1024 * 4
    assert x._version == version + 1


def test_autograd_saves_and_frees_as_ever() -> None:
    made: list[int] = []
    with Hollow(lambda tensor: made.append(tensor.nbytes)):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1))
        model(torch.ones(LARGE)).mean().backward()
    assert all(
        parameter.grad is not None and parameter.grad.shape == parameter.shape for parameter in model.parameters()
    )
    assert made.count(1024 * 1024 * 4) >= 2  # the weight, its gradient


def branches(x: torch.Tensor) -> torch.Tensor:
    picked = x[x > 0]
    return picked * 2 if float(picked.sum()) > 3 else x


def test_code_that_asks_for_values_is_told_what_helps() -> None:
    with Hollow() as mode, mode.asking(), pytest.raises(NeedsValuesError, match=r"knows shapes only.*on_cpu=True"):
        branches(torch.ones(LARGE))


def test_outside_of_the_models_code_an_unknown_value_is_zero() -> None:
    with Hollow():
        assert torch.ones(LARGE).sum().item() == 0
        assert not torch.equal(torch.ones(LARGE), torch.ones(LARGE))


def test_answers_of_a_run_that_computes_are_given_again_each_time() -> None:
    x = torch.zeros(LARGE)
    x[:5] = 1
    with Hollow(computes=True) as computing, computing.asking():
        assert branches(x + 0).shape == (5 * 1024,)
    assert computing.answers == [[((5 * 1024,), torch.float32)], 5 * 1024.0]
    with Hollow(answers=computing.answers) as mode:
        for _ in range(2):
            with mode.asking():
                assert branches(x + 0).shape == (5 * 1024,)
        with mode.asking():
            branches(x + 0)
            with pytest.raises(NeedsValuesError, match="was asked for fewer"):
                branches(x + 0)


def test_a_wrong_shape_is_torchs_own_error() -> None:
    with Hollow() as mode, mode.asking(), pytest.raises(RuntimeError, match=r"reduction dim|cannot be multiplied"):
        torch.ones(LARGE) @ torch.ones(LARGE)
