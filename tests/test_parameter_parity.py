"""Parameters in the hands of users, at every stage and in two bytes: edited, copied and borrowed as on one device."""

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from lightning_zero.config import Offload
from lightning_zero.run.parameter import RestingParameter
from lightning_zero.wire.comm import Comm
from models import seeded
from unit_jobs import WIDTH, assert_as_on_one_device, on_engine, state_of, tower, x

STAGES = [0, 1, 2, 3]
DTYPES = [None, torch.bfloat16]  # of autocast; the weights of Linear then rest in it


def pair() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))


def step(model: Any, optimizer: Any, dtype: torch.dtype | None) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
        loss = model(x()).float().square().mean()
    loss.backward()
    optimizer.step()


def multiplied(weight: nn.Parameter) -> None:
    weight.mul_(1.001)  # too little for two bytes to show


def copied_into(weight: nn.Parameter) -> None:
    weight.copy_(torch.eye(WIDTH))


def a_row(weight: nn.Parameter) -> None:
    weight[0] = 0.25


def a_view(weight: nn.Parameter) -> None:
    weight.view(-1)[3:5].zero_()


def initialised(weight: nn.Parameter) -> None:
    nn.init.constant_(weight, 0.3)


def through_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.1, 0.1)


def replaced_data(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.5


def set_to(weight: nn.Parameter) -> None:
    weight.set_(torch.eye(WIDTH))


def with_out(weight: nn.Parameter) -> None:
    torch.add(torch.ones(WIDTH, WIDTH), 0.5, out=weight)


def lerped(weight: nn.Parameter) -> None:
    weight.lerp_(torch.ones(WIDTH, WIDTH), 0.1)


def foreach(weight: nn.Parameter) -> None:
    mine = [weight]
    assert torch._foreach_mul_(mine, 0.5) is mine


def foreach_by_its_public_name(weight: nn.Parameter) -> None:  # since torch 2.15
    assert torch.foreach.mul_((weight,), 0.5)[0] is weight


EDITS = [
    multiplied, copied_into, a_row, a_view, initialised, through_data, replaced_data, set_to, with_out, lerped, foreach,
    *([foreach_by_its_public_name] if hasattr(torch, "foreach") else []),
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_edits_between_steps_persist(
    stage: int, dtype: torch.dtype | None, tier: str, world: int, edit: Any, tmp_path: Path
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for _ in range(2):
            step(model, optimizer, dtype)
            with torch.no_grad():
                edit(model[0].weight)
        step(model, optimizer, dtype)
        return state_of(model, engine)

    offload = Offload("nvme", path=tmp_path) if tier == "disk" else None  # parameters and masters are two things
    assert_as_on_one_device(pair(), act, stage, world=world, autocast_dtype=dtype, offload=offload)


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("stage", STAGES)
def test_data_of_one_parameter_may_be_that_of_another(stage: int, tier: str, tmp_path: Path) -> None:
    """They change places, or one takes the values of the other."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        first, second = model
        for _ in range(2):
            step(model, optimizer, None)
            first.weight.data, second.weight.data = second.weight.data, first.weight.data
            step(model, optimizer, None)
        first.bias.data = second.bias
        first.bias.data = first.bias.data * 2  # or the two would share their memory on one device
        step(model, optimizer, None)
        return state_of(model, engine)

    offload = Offload("nvme", path=tmp_path) if tier == "disk" else None
    assert_as_on_one_device(pair(), act, stage, unit_classes=("Linear",), offload=offload)


class Symmetric(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.triu() + values.triu(1).t()

    def right_inverse(self, values: Tensor) -> Tensor:
        return values.triu()


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_parametrization_comes_and_goes_and_its_weight_is_assigned(stage: int, tier: str, tmp_path: Path) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        changes = [
            lambda: parametrize.register_parametrization(model[0], "weight", Symmetric()),
            lambda: setattr(model[0], "weight", torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)),
            lambda: parametrize.remove_parametrizations(model[0], "weight"),
        ]
        for change in changes:
            step(model, optimizer, None)
            change()
        step(model, optimizer, None)
        return state_of(model, engine)

    offload = Offload("nvme", path=tmp_path) if tier == "disk" else None
    assert_as_on_one_device(pair(), act, stage, unit_classes=("Linear",), offload=offload)


@pytest.mark.parametrize("stage", STAGES)
def test_what_nothing_tells_persists_if_it_is_written_inside_of_full_parameters(stage: int, tmp_path: Path) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for _ in range(2):
            step(model, optimizer, None)
            with nullcontext() if engine is None else engine.full_parameters(write=True):
                model[0].weight.detach().numpy()[1:3] = 0.25
                model[1].weight[0].data.zero_()
        step(model, optimizer, None)
        return state_of(model, engine)

    assert_as_on_one_device(pair(), act, stage, offload=Offload("nvme", path=tmp_path))


@pytest.mark.parametrize(("stage", "tier"), [(3, "memory"), (2, "disk"), (3, "disk")])
def test_steps_that_users_take_themselves_with_a_fused_kernel_persist(stage: int, tier: str, tmp_path: Path) -> None:
    """It raises no version."""
    how = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for _ in range(2):
            step(model, optimizer, None)
            with torch.no_grad():
                torch._fused_sgd_([model[0].weight], [torch.ones(WIDTH, WIDTH)], [], **how, is_first_step=True)
        step(model, optimizer, None)
        return state_of(model, engine)

    offload = Offload("nvme", path=tmp_path) if tier == "disk" else None
    assert_as_on_one_device(pair(), act, stage, offload=offload)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_augmented_assignment_edits_the_parameter(stage: int, dtype: torch.dtype | None) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        step(model, optimizer, dtype)
        with torch.no_grad():
            model[0].weight *= 0.5
            model[0].bias -= 0.01
            model[1].weight += model[0].weight
            assert model[1].bias.mul_(2) is model[1].bias
        step(model, optimizer, dtype)
        return state_of(model, engine)

    assert_as_on_one_device(pair(), act, stage, autocast_dtype=dtype)


class Clamped(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(hidden)


class Renormed(nn.Linear):
    """As EEGNet constrains its weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(hidden)


class Both(nn.Linear):
    """One of its parameters is edited in place, and another one assigned."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        self.bias.data = self.bias.data * 0.9
        return super().forward(hidden)


class Masked(nn.Linear):
    """As a PixelCNN masks its weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.weight.data *= torch.ones(WIDTH, WIDTH).tril()
        return super().forward(hidden)


class Normalised(nn.Linear):
    """Sets its weights by the first batch, as the normalisation of a Glow does."""

    def forward(self, hidden: Tensor) -> Tensor:
        if not getattr(self, "is_set", False):
            self.is_set = True
            self.bias.data.copy_(-hidden.mean(0))
            self.weight.data.copy_(torch.eye(WIDTH))
        return super().forward(super().forward(hidden))


class Bounded(nn.Embedding):
    def __init__(self, *_: int) -> None:
        super().__init__(4, WIDTH, max_norm=0.5)

    def forward(self, _: Tensor) -> Tensor:
        return super().forward(torch.tensor([0, 1, 3]))


@pytest.mark.parametrize("kind", [Clamped, Renormed, Both, Masked, Normalised, Bounded])
@pytest.mark.parametrize("stage", STAGES)
def test_edits_in_a_modules_own_forward_persist(stage: int, kind: Any) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for _ in range(4):
            step(model, optimizer, None)
        return state_of(model, engine)

    start = seeded(lambda: nn.Sequential(kind(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    assert_as_on_one_device(start, act, stage)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_of_the_module_is_a_plain_module(stage: int, dtype: torch.dtype | None) -> None:
    """As averages of weights are kept: the copy works on its own, during training and after it."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        step(model, optimizer, dtype)
        average = copy.deepcopy(model)
        assert all(type(parameter) is nn.Parameter for parameter in average.parameters())
        with torch.no_grad():
            outputs = [average(x())]
            step_result = state_of(average, None)
            with torch.enable_grad():
                step(model, optimizer, dtype)
            outputs.append(average(x()))
            if engine is not None:
                engine.close()
            outputs.append(average(x()))
            outputs.append(model(x()))
        assert type(model[0].weight) is nn.Parameter
        return {f"output {at}": output for at, output in enumerate(outputs)} | step_result

    assert_as_on_one_device(pair(), act, stage, autocast_dtype=dtype)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_two_byte_weights_used_twice_in_one_autocast_change_no_bit(stage: int, world: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(model(x()) + x()).float().square().mean()
            loss.backward()
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage, world=world, autocast_dtype=torch.bfloat16)


TRANSFORMED: dict[str, Callable[[Any], Tensor]] = {
    "layer in vmap": lambda model: torch.vmap(model[0])(x()),
    "layer with other weights in vmap": lambda model: torch.vmap(
        lambda weight: torch.func.functional_call(model[0], {"0.weight": weight}, (x(),))
    )(torch.stack([0.1 * torch.ones(WIDTH, WIDTH), 0.3 * torch.eye(WIDTH)])),
    "weight in vmap": lambda model: torch.vmap(lambda row: model[0][0].weight @ row + model[0][0].bias)(x()),
    "weight in grad": lambda model: torch.func.grad(lambda rows: torch.tanh(rows @ model[0][0].weight).sum())(x()),
    "layer in jacrev": lambda model: torch.vmap(torch.func.jacrev(model[0]))(x()).sum(1),
}


@pytest.mark.parametrize("way", TRANSFORMED)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_in_transforms_of_torch_func_change_no_bit(stage: int, dtype: torch.dtype | None, way: str) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
                hidden = TRANSFORMED[way](model)
                loss = model(hidden.float()).float().square().mean()
            loss.backward()
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(tower(), act, stage, autocast_dtype=dtype)


class Attends(nn.Module):
    """A layer with torch's attention, used twice, whose tokens attend to one another or to others; and a cell."""

    def __init__(self, *, across: bool) -> None:
        super().__init__()
        self.across = across
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.layer(x[None])
        others = tokens.flip(1) if self.across else tokens
        once = self.attention(tokens, others, others)[0]
        again = once.float()
        twice = self.attention(again, others if self.across else again, value=tokens if self.across else again)[0]
        return self.cell(twice[0], self.cell(once[0].to(twice.dtype)))[0]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_two_byte_weights_of_attention_change_no_bit_in_autocast_or_outside_of_it(
    stage: int, across: bool, cached: bool
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        found = {}
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
                loss = model(x(1.0 + step)).float().square().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.eval()
                found[f"outside {step}"] = model(x())
                with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
                    found[f"evaluated {step}"] = model(x())
                model.train()
        return found | state_of(model, engine)

    start = seeded(lambda: Attends(across=across))
    assert_as_on_one_device(start, act, stage, autocast_dtype=torch.bfloat16)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_two_byte_weights_that_are_edited_between_two_forwards_show_it_in_the_second(stage: int, world: int) -> None:
    """Without a backward between them, as in a hook; each has an autocast, with a cache, of its own."""

    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        outputs = {}
        for number in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs[f"{number}"] = model(x()).float().detach()
            with torch.no_grad():
                model[0][0].weight.mul_(0.5)  # of which, at stage 3, rank 1 owns nothing
        return outputs

    assert_as_on_one_device(tower(), act, stage, world=world, autocast_dtype=torch.bfloat16)


class Returns(nn.Module):
    """A stack that uses its first layer once more at its end, when stage 3 has put others in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.layers(x).float())


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_two_uses_in_an_autocast_with_a_cache_are_summed_as_on_one_device(
    stage: int, prefetch: int
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for number in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(model(x(1.0 + number)).float()).float().square().mean()
            loss.backward()
            optimizer.step()
        return state_of(model, engine)

    options = {"autocast_dtype": torch.bfloat16, "prefetch": prefetch}
    assert_as_on_one_device(seeded(Returns), act, stage, **options)


class Looks(nn.Module):
    """Uses layers twice. Between the two, `between` has weights lent, or has their forwards read them as declared."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.layers = tower(3)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)  # saves its weight itself, where a linear layer saves a view
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        if self.between == "hooks of forward hooks":
            return self._through_hooks(x)
        if self.between == "no hooks allowed":
            with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
                return self._twice(x)
        return self._twice(x)

    def _twice(self, x: Tensor) -> Tensor:
        hidden = self.conv(self.layers(x).float().T[None])[0].T.float()
        if self.between == "read":
            hidden = hidden + 0.1 * self.layers[0][0].weight.norm()
        if self.between == "autocast off":
            with torch.autocast("cpu", enabled=False):
                hidden = self.layers[0](hidden)
        return self.conv(self.layers(hidden).float().T[None])[0].T

    def _through_hooks(self, x: Tensor) -> Tensor:
        with ExitStack() as inside:  # the user's pair of saved-tensor hooks, which keep what they are given

            def enter(*_: Any) -> None:
                inside.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))

            handles = [
                self.conv.register_forward_pre_hook(enter),
                self.conv.register_forward_hook(lambda *_: inside.close()),
            ]
            result = self._twice(x)
        for handle in handles:
            handle.remove()
        return result


@pytest.mark.parametrize("between", ["read", "autocast off", "no hooks allowed", "hooks of forward hooks"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_an_autocast_with_a_cache_shares_is_whole_whatever_comes_between_two_uses(
    stage: int, between: str
) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for number in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x(1.0 + number)).float().square().mean()
            loss.backward()
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(seeded(lambda: Looks(between)), act, stage, autocast_dtype=torch.bfloat16)


@pytest.mark.parametrize("stage", STAGES)
def test_two_byte_weights_are_fp32_to_an_autocast_of_another_dtype(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
            return {"output": model(x())}

    assert_as_on_one_device(pair(), act, stage, autocast_dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_reading_in_inference_mode_spoils_no_training(stage: int, dtype: torch.dtype | None) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        with torch.inference_mode():
            model[0].weight.sum()
            model(x())
            if engine is not None:
                engine.loans.end_all()
                engine.loans.cache.discard_all()
            model[1].weight.sum()
        for _ in range(2):
            step(model, optimizer, dtype)
        return state_of(model, engine)

    assert_as_on_one_device(pair(), act, stage, autocast_dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_torchs_helpers_for_parameters_work(stage: int, dtype: torch.dtype | None) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
        scaled = {name: value * 1.5 for name, value in model.named_parameters()}
        torch.func.functional_call(model, scaled, (x(),)).square().mean().backward()
        optimizer.step()
        return state_of(model, engine) | {"vector": vector.detach()}

    assert_as_on_one_device(pair(), act, stage, autocast_dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_after_close_nothing_rests(stage: int, dtype: torch.dtype | None) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm) -> None:
        step(model, optimizer, dtype)
        whole = state_of(model, engine)
        resting = sum(isinstance(parameter, RestingParameter) for parameter in model.parameters())
        assert resting == (4 if dtype or engine.partition.parameter else 0)
        engine.close()
        for name, parameter in model.named_parameters():
            assert type(parameter) is nn.Parameter
            assert parameter.dtype == torch.float32
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
            assert torch.equal(parameter, whole[name])
        before = dict(comm.calls)
        model(x()).sum().backward()
        optimizer.zero_grad()
        assert dict(comm.calls) == before

    on_engine(pair(), act, stage, autocast_dtype=dtype)


class Borrows(nn.Module):
    """Computes with the weights of layers that it does not call, inside of `around`."""

    def __init__(self, around: Callable[[], Any]) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.convs = nn.ModuleList([nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(4)])  # save their weights themselves
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        with self.around():
            for linear, conv in zip(self.linears, self.convs, strict=True):
                x = nn.functional.linear(x, linear.weight, linear.bias).tanh()
                x = nn.functional.conv1d(x.T[None], conv.weight, conv.bias)[0].T.tanh()
        return x


def keeping_what_is_saved() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def without_hooks() -> Any:
    return torch.autograd.graph.disable_saved_tensors_hooks("none here")


@pytest.mark.parametrize("around", [nullcontext, keeping_what_is_saved, without_hooks])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_computed_with_borrowed_weights_has_its_gradients(stage: int, around: Callable[[], Any]) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for number in range(3):
            optimizer.zero_grad()
            with nullcontext() if engine is None or around is without_hooks else engine.forward():  # which sets some
                loss = model(x(1.0 + number)).square().mean()
            loss.backward()
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(seeded(lambda: Borrows(around)), act, stage, prefetch=0)


class Keeps(nn.Module):
    """Keeps a view of a weight that a recomputed block has read, and uses it after other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        views: list[Tensor] = []

        def block(x: Tensor) -> Tensor:
            views.append(self.layers[0].weight.T)
            return (x @ views[-1]).tanh()

        x = checkpoint(block, x, use_reentrant=False)
        for layer in self.layers[1:]:
            x = layer(x)
        return x @ views[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_view_that_a_recomputed_block_has_made_keeps_its_values(stage: int) -> None:
    def act(model: Any, engine: Any, optimizer: Any, comm: Comm | None) -> dict[str, Tensor]:
        for number in range(3):
            optimizer.zero_grad()
            with nullcontext() if engine is None else engine.forward():
                loss = model(x(1.0 + number)).square().mean()
            loss.backward()
            optimizer.step()
        return state_of(model, engine)

    assert_as_on_one_device(seeded(Keeps), act, stage, prefetch=0)
