"""Training loops written with Fabric, which the tests call on real ranks."""

import threading
import time
import warnings
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn

import lightning_zero.checkpoint.save
import lightning_zero.pl.single_file
from jobs import FEATURES, Classifier, listening, loader, state_of, strategy_from
from lightning_zero import verify
from lightning_zero.checkpoint import CheckpointError
from lightning_zero.checkpoint.shard import ShardReader, write_shard
from lightning_zero.shards.early import early_of
from loop_jobs import FailingSGD
from opened import opened


def fabric(strategy: Any, world: int, precision: str = "32-true", **kwargs: Any) -> Fabric:
    if precision == "16-mixed":  # Lightning would make it bf16 on a CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        kwargs["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    else:
        kwargs["precision"] = precision
    made = Fabric(accelerator="cpu", devices=world, strategy=strategy_from(strategy), **kwargs)
    made.launch()
    return made


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).float(), y)


def whole(made: Fabric, model: Any) -> dict[str, Tensor]:
    return state_of(model.module)


def set_up(made: Fabric, how: str = "setup") -> tuple[Any, Any]:
    """A model and its optimizer; ranks begin with values of their own, and all take those of rank 0."""
    torch.manual_seed(made.global_rank)
    model: Any = Classifier(tied=made._precision.precision != "bf16-true")
    model.frozen.bias.data.add_(made.global_rank)
    if how == "setup":
        return made.setup(model, optimizer_of(model))
    if how.startswith("compiled"):
        return set_up_compiled(made, model, optimizer_of(model), how)
    if how == "optimizer first":
        optimizer = made.setup_optimizers(optimizer_of(model))
        return made.setup_module(model), optimizer
    if how == "evaluated before":
        wrapped = made.setup_module(model).eval()
        with torch.inference_mode():
            wrapped(torch.ones(2, FEATURES))
        wrapped.train()
        return wrapped, made.setup_optimizers(optimizer_of(model))
    wrapped = made.setup_module(model)
    return wrapped, made.setup_optimizers(optimizer_of(model))


def set_up_compiled(made: Fabric, model: Any, optimizer: Any, how: str) -> tuple[Any, Any]:
    """Sets up a model that is compiled in some way. `model.traced` is the number of graphs that were compiled."""

    def compiler(graph: Any, _: Any) -> Any:
        model.traced += 1
        return graph.forward

    torch.compiler.reset()  # what earlier jobs have compiled often enough is not compiled any more
    model.traced = 0
    if how == "compiled after":
        wrapped, optimizer = made.setup(model, optimizer)
        return torch.compile(wrapped, backend=compiler), optimizer
    if how == "compiled in place":
        model.compile(backend=compiler)
        return made.setup(model, optimizer)
    compiled: Any = torch.compile(model, backend=compiler, dynamic=False)
    if how == "compiled, module first":
        return made.setup_module(compiled), made.setup_optimizers(optimizer)
    return made.setup(compiled, optimizer)


def optimizer_of(model: Any) -> Any:
    return model.configure_optimizers()["optimizer"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def train_compiled_blocks(strategy: Any, world: int) -> tuple[list[float], int]:
    """Losses of a few steps of a model that is compiled as a whole; and the number of graphs."""
    made = fabric(strategy, world, "32-true")
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(), Block(), Block())
    model, optimizer = set_up_compiled(made, blocks, torch.optim.SGD(blocks.parameters(), lr=0.1), "compiled")
    losses = []
    for step in range(3):
        loss = model(torch.full((2, FEATURES), 0.1 * (1 + step + made.global_rank))).square().sum()
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    made.strategy.teardown()
    return losses, model.module.traced


def steps(
    made: Fabric,
    model: Any,
    optimizer: Any,
    *,
    clip: str = "norm",
    norm_type: float = 2.0,
    accumulate: int = 1,
    overflow_at: int = -1,
    step: str = "",
    clips_each: bool = False,
) -> dict[str, list[float]]:
    """An epoch, and a validation in the midst of it. Clips before each step, or after each backward (`clips_each`)."""
    batches = made.setup_dataloaders(loader(shuffle=True))
    told: dict[str, list[float]] = {"losses": [], "norms": [], "val": []}
    for number, batch in enumerate(batches):
        last = (number + 1) % accumulate == 0
        with made.no_backward_sync(model, enabled=not last):
            loss = getattr(model, step)(batch, number) if step else loss_of(model, batch)
            made.backward(loss * float("inf") if number == overflow_at and made.global_rank == 0 else loss)
        told["losses"].append(loss.item())
        if not (last or clips_each):
            continue
        if clip == "norm":
            how: dict[str, Any] = {"norm_type": norm_type, "error_if_nonfinite": overflow_at < 0}
            told["norms"].append(made.clip_gradients(model, optimizer, max_norm=0.3, **how).item())
        elif clip == "value":
            made.clip_gradients(model, optimizer, clip_val=0.01)
        if not last:
            continue
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            model.eval()
            with torch.no_grad():
                told["val"] = [made.all_reduce(loss_of(model, batch)).item() for batch in loader(seed=1)]
            model.train()
    return told


def hooked_between(strategy: Any, world: int) -> dict[str, Tensor]:
    """Two steps, in which hooks on gradients come after the forward, and go after the backward: one through Fabric, and
    one of the loss itself."""
    made = fabric(strategy, world)
    model, optimizer = set_up(made)
    for run, batch in zip([made.backward, Tensor.backward], made.setup_dataloaders(loader()), strict=False):
        loss = loss_of(model, batch)
        with ExitStack() as hooks:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    hooks.callback(parameter.register_post_accumulate_grad_hook(_halve).remove)
            run(loss)
        optimizer.step()
        optimizer.zero_grad()
    found = whole(made, model)
    made.strategy.teardown()
    return found


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None, "the gradient has been taken"
    parameter.grad.mul_(0.5)


def train(strategy: Any, world: int, how: str = "setup", precision: str = "32-true", **kwargs: Any) -> dict[str, Any]:
    made = fabric(strategy, world, precision)
    made.seed_everything(1, verbose=False)
    model, optimizer = set_up(made, how)
    with warnings.catch_warnings(record=True) as warned:
        told = steps(made, model, optimizer, **kwargs)
    found = {**told, "weights": whole(made, model), "warned": [str(one.message) for one in warned]}
    found["state"], found["graphs"] = optimizer.state_dict(), getattr(model.module, "traced", 0)
    found["sent"] = made.strategy.communication_report() if hasattr(made.strategy, "communication_report") else {}
    made.strategy.teardown()
    return found


def save_and_go_on(strategy: Any, world: int, path: Path) -> dict[str, Any]:
    """Trains, saves, and trains on."""
    made = fabric(strategy, world)
    made.seed_everything(1, verbose=False)
    model, optimizer = set_up(made)
    steps(made, model, optimizer, clip="value")
    made.save(path, {"model": model, "optimizer": optimizer, "epoch": 3, "state_dict": model})
    steps(made, model, optimizer, clip="value")
    found = {"weights": whole(made, model), "state": optimizer.state_dict()}
    made.strategy.teardown()
    return found


def save_and_tell(strategy: Any, path: Path, small: int) -> tuple[dict[str, Any], list[str]]:
    """`save_and_go_on`, and what is said of the format where so many bytes are small."""
    with patch.object(lightning_zero.pl.single_file, "SMALL_BYTES", small), listening() as said:
        found = save_and_go_on(strategy, 2, path)
    return found, [message for message in said if "Checkpoints are" in message]


def load_and_save(strategy: Any, path: Path, to: Path) -> None:
    made = fabric(strategy, 2)
    model, optimizer = set_up(made)
    made.load(path, {"model": model, "optimizer": optimizer})
    made.save(to, {"model": model, "optimizer": optimizer})
    made.strategy.teardown()


def load_and_go_on(strategy: Any, world: int, path: Path, how: str = "load") -> dict[str, Any]:
    """Goes on from what was saved, in a model of other values."""
    made = fabric(strategy, world)
    made.seed_everything(7, verbose=False)
    model, optimizer = set_up(made, how="apart")
    if how == "load":
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        left = made.load(path, state)
        epoch, others = state["epoch"], sorted(left)
    else:  # by hand, from what every rank has read whole
        saved = made.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch, others = saved["epoch"], ["state_dict"]
    made.seed_everything(1, verbose=False)
    steps(made, model, optimizer, clip="value")
    found = {"weights": whole(made, model), "state": optimizer.state_dict(), "epoch": epoch, "others": others}
    made.strategy.teardown()
    return found


def load_and_leave(strategy: Any, path: Path) -> tuple[list[str], list[tuple[torch.Size, torch.Size]]]:
    """Files of a checkpoint that are open once it is loaded. And after teardown, where optimizers load what they load
    without this package: shapes of their state, each beside that of its parameter."""
    made = fabric(strategy, 2)
    model, optimizer = set_up(made)
    steps(made, model, optimizer, clip="none")
    made.save(path, {"model": model, "optimizer": optimizer})
    made.load(path, {"model": model, "optimizer": optimizer})
    left = [what for what in opened() if str(path) in what]
    whole_state = made.strategy.get_optimizer_state(optimizer.optimizer)
    made.strategy.teardown()
    optimizer.load_state_dict(whole_state)
    states = ((parameter, state) for parameter, state in optimizer.optimizer.state.items())
    shapes = [(value.shape, p.shape) for p, state in states for value in state.values() if torch.is_tensor(value)]
    return left, [(own, theirs) for own, theirs in shapes if own]


class EditsWhatItLoads(nn.Sequential):
    """Goes on to use and change parameters in `load_state_dict`, once they are loaded, and looks at one on rank 0
    alone; or fails."""

    fails = False

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        left = super().load_state_dict(state, strict=strict, assign=assign)
        if self.fails:
            raise RuntimeError("this is another model")
        with torch.no_grad():
            torch._foreach_mul_([self[0].weight, self[2].weight], 0.5)
            held = [parameter.data for parameter in self.parameters()]
            for values in held:
                values.mul_(2)
            self[0].weight.copy_(state["0.bias"])  # broadcast
            self[2].bias.fill_(self[2].weight.sum().item())
            self[4].weight.data = self[4].weight.data + 1
            self[0].bias.fill_(self(torch.ones(1, 6)).sum().item())
        if torch.distributed.get_rank() == 0:
            self.seen = self[4].bias.sum().item()
        return left


def load_into_a_model_that_edits(strategy: Any, path: Path, precision: str, fails: bool) -> dict[str, Tensor]:
    """Saves, takes a step, loads what was saved into the same model, and goes on, also if that has failed."""
    made = fabric(strategy, 2, precision)
    made.seed_everything(1, verbose=False)
    model: Any = EditsWhatItLoads()
    model, optimizer = made.setup(model, torch.optim.AdamW(model.parameters(), 0.1))
    for step in range(3):
        if step == 1:
            made.save(path, {"model": model})
        elif step == 2:
            model.module.fails = fails
            with pytest.raises(RuntimeError, match="another model") if fails else nullcontext():
                made.load(path, {"model": model})
        made.backward(model(torch.ones(2, 6) * (1 + made.global_rank)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    loaded = {**whole(made, model), "seen": torch.tensor(getattr(model.module, "seen", 0.0))}
    made.strategy.teardown()
    return loaded


def load_where_rank_1_cannot_read(strategy: Any, path: Path) -> str:
    made = fabric(strategy, 2)
    model: Any = made.setup(nn.Linear(6, 6))
    made.save(path, {"model": model})
    read, fails = ShardReader.read, OSError("the disk is gone")
    with (
        pytest.raises(RuntimeError) as caught,
        patch.object(ShardReader, "read", read if made.global_rank == 0 else Mock(side_effect=fails)),
    ):
        made.load(path, {"model": model})
    made.load(path, {"model": model})  # nothing is left of the error
    made.strategy.teardown()
    return str(caught.value)


def load_what_is_damaged_where_nobody_reads(strategy: Any, path: Path) -> str:
    made = fabric(strategy, 2)
    model: Any = made.setup(nn.Linear(6, 6))
    made.save(path, {"model": model})
    if made.global_rank == 0:
        shard = next(path.glob("*.safetensors"))
        raw = bytearray(shard.read_bytes())
        raw[40] ^= 4  # in its header, which says again where each tensor is
        shard.write_bytes(raw)
    made.barrier()
    with pytest.raises(RuntimeError) as caught:
        made.load(path, {"model": model})
    made.strategy.teardown()
    return str(caught.value)


def two_models(strategy: Any, world: int) -> dict[str, Any]:
    """A generator and its critic, each with an optimizer; the generator's loss goes through the critic."""
    made = fabric(strategy, world)
    made.seed_everything(1, verbose=False)
    generator = nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, FEATURES))
    critic = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 1))
    generator, for_generator = made.setup(generator, torch.optim.AdamW(generator.parameters(), 0.01))
    critic, for_critic = made.setup(critic, torch.optim.SGD(critic.parameters(), 0.1, momentum=0.9))
    losses = []
    for x, _ in made.setup_dataloaders(loader()):
        true = critic(torch.cat([x, generator(x.flip(0)).detach()])).view(2, -1)
        loss = (true[1] - true[0]).mean() + true.square().mean()
        made.backward(loss)
        for_critic.step()
        for_critic.zero_grad()
        false = critic(generator(x.flip(0))).square().mean()
        made.backward(false)
        for_generator.step()
        for_generator.zero_grad()
        for_critic.zero_grad()
        losses += [loss.item(), false.item()]
    found = {"losses": losses, "generator": whole(made, generator), "critic": whole(made, critic)}
    found["gathered"] = made.all_gather(torch.tensor(made.global_rank)).tolist()
    found["told"] = made.broadcast(made.global_rank, src=1)
    if isinstance(strategy, dict):
        found["sent"] = made.strategy.communication_report(), dict(made.strategy._ensure_comm().bytes_sent)
    made.strategy.teardown()
    return found


def built_inside(strategy: Any, world: int) -> dict[str, Any]:
    """A model that is built by `init_module`."""
    made = fabric(strategy, world)
    made.seed_everything(1, verbose=False)
    with made.init_module():
        model = Classifier()
    in_shards = early_of(model.net[0].weight) is not None
    model, optimizer = made.setup(model, optimizer_of(model))
    told = steps(made, model, optimizer, clip="value")
    found = {**told, "in_shards": in_shards, "weights": whole(made, model), "state": optimizer.state_dict()}
    if isinstance(strategy, dict):
        found["memory"] = dict(made.strategy.memory_report())
    made.strategy.teardown()
    return found


def overflows(strategy: Any, world: int) -> dict[str, Any]:
    """An fp16 step that one rank overflows in."""
    made = fabric(strategy, world, "16-mixed")
    made.seed_everything(1, verbose=False)
    model, optimizer = set_up(made)
    told = steps(made, model, optimizer, clip="value", overflow_at=2)
    found = {**told, "weights": whole(made, model), "skipped": getattr(made.strategy, "skipped_steps", 1)}
    made.strategy.teardown()
    return found


def save_beside(strategy: Any, world: int, path: Path) -> dict[str, Any]:
    """What was trained, and saved without its biases."""
    made = fabric(strategy, world)
    made.seed_everything(1, verbose=False)
    model, optimizer = set_up(made)
    steps(made, model, optimizer, clip="value")
    state = {"state_dict": model, "optimizer": optimizer, "weights": model, "pytorch-lightning_version": L.__version__}
    made.save(path, state, filter={"weights": lambda name, _: not name.endswith("bias")})
    found = {"weights": whole(made, model), "state": optimizer.state_dict()["state"]}
    found["steps"] = max(int(state["step"]) for state in found["state"].values())
    made.strategy.teardown()
    return found


def save_a_module_itself(strategy: Any, path: Path) -> dict[str, Tensor]:
    """What `module.state_dict()` is of a model whose parameters rest as shards, and which is pickled."""
    made = fabric(strategy, 2)
    model: Any = made.setup(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
    made.save(path, {"model": model, "net": [model.module]})
    found = whole(made, model)
    made.strategy.teardown()
    return found


def bytes_to_load(strategy: Any, path: Path) -> int:
    """How many bytes this rank reads of its checkpoint, to go on from it."""
    made = fabric(strategy, 2)
    model: Any = nn.Linear(700, 700)
    model, optimizer = made.setup(model, torch.optim.AdamW(model.parameters()))
    made.backward(model(torch.ones(1, 700)).sum())
    optimizer.step()
    made.save(path, {"model": model, "optimizer": optimizer})
    readers: dict[int, ShardReader] = {}
    close = ShardReader.close

    def note(reader: ShardReader) -> None:
        readers[id(reader)] = reader
        close(reader)

    with patch.object(ShardReader, "close", note):
        made.load(path, {"model": model, "optimizer": optimizer})
    made.strategy.teardown()
    return sum(reader.bytes_read for reader in readers.values())


def refusals(world: int) -> dict[str, str]:
    """What is said to those who set up too little, or clip what is not finite."""
    made = fabric({"stage": 3}, world)
    told = {}
    stranger = made.setup_optimizers(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    model, optimizer = set_up(made)
    made.backward(model(torch.ones(2, FEATURES)).sum() * float("nan"))
    attempts = {
        "stranger": stranger.step,
        "nan": lambda: made.clip_gradients(model, optimizer, max_norm=1.0),
        "second": lambda: made.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1)),
        "anew": lambda: fabric({"stage": 3}, world).setup(model.module, optimizer_of(model.module)),
        "both": lambda: one_optimizer_for_two_models(fabric({"stage": 3}, world)),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except (RuntimeError, ValueError) as error:
            told[name] = str(error)
    with made.strategy.full_parameters(model):  # as Fabric has wrapped it
        told["shapes"] = str([tuple(parameter.shape) for parameter in model.parameters()])
    made.strategy.teardown()
    return told


def one_optimizer_for_two_models(made: Fabric) -> None:
    first, second = (made.setup_module(nn.Linear(3, 3)) for _ in range(2))
    made.setup_optimizers(torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1))
    first(torch.ones(2, 3))


def averages_in_a_copy(strategy: Any, path: Path) -> dict[str, Any]:
    """Trains beside an average of the weights: a copy of what Fabric has wrapped, evaluated, saved and loaded."""
    made = fabric(strategy, 2)
    made.seed_everything(1, verbose=False)
    block = Block()
    model, optimizer = made.setup(block, torch.optim.AdamW(block.parameters(), 0.1))
    average, seen = deepcopy(model), []
    for step in range(4):
        if step == 2:
            made.save(path, {"model": model, "average": average})
        made.backward(model(torch.full((2, FEATURES), 0.1 * (1 + step + made.global_rank))).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)
            with made.no_backward_sync(average):
                seen.append(average(torch.ones(1, FEATURES)).sum().item())
    made.load(path, {"average": average})
    found = {"weights": whole(made, model), "average": whole(made, average), "seen": seen}
    made.strategy.teardown()
    return found


def copies_before_the_first_forward(strategy: Any, world: int) -> dict[str, Tensor]:
    """What a user finds who copies a module that was set up, and whose ranks had values of their own before."""
    made = fabric(strategy, world)
    torch.manual_seed(made.global_rank)
    module = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4))
    module[1].running_mean.add_(made.global_rank)  # type: ignore[union-attr, operator]
    copied = deepcopy(made.setup_module(module).module)
    made.strategy.teardown()
    return copied.state_dict()


def beside_what_is_set_up(strategy: Any, world: int, path: Path) -> dict[str, Any]:
    """What Fabric does with a model and an optimizer that were never set up, beside a model that trains."""
    made = fabric(strategy, world)
    model, optimizer = set_up(made)
    made.seed_everything(1, verbose=False)
    other, again = nn.Linear(3, 2), nn.Linear(3, 2)
    own, fresh = (torch.optim.Adam(module.parameters(), lr=0.1) for module in (other, again))
    other(torch.ones(2, 3)).square().sum().backward()
    found: dict[str, Any] = {"clipped": [made.clip_gradients(other, own, max_norm=0.1), other.weight.grad.clone()]}
    own.step()
    made.save(path, {"model": model, "optimizer": optimizer, "other": other, "own": own})
    made.load(path, {"model": model, "optimizer": optimizer, "other": again, "own": fresh})
    found |= {"states": [own.state_dict()["state"], fresh.state_dict()["state"]]}
    found["weights"] = [other.state_dict(), again.state_dict()]
    made.strategy.teardown()
    return found


def clips_through_the_strategy(strategy: Any, world: int) -> list[float]:
    """Norms before and after `fabric.strategy` has clipped, which was given what `fabric.setup` had returned."""
    made = fabric(strategy, world)
    made.seed_everything(1, verbose=False)
    model, optimizer = set_up(made)
    made.backward(model(torch.ones(2, FEATURES)).square().sum())
    before = made.strategy.clip_gradients_norm(model, optimizer, max_norm=0.1)
    after = made.strategy.clip_gradients_norm(model, optimizer, max_norm=1.0)
    made.strategy.clip_gradients_value(model, optimizer, clip_val=1e-4)
    largest = max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)
    return [before.item(), after.item(), largest.item()]


def shapes_where_an_error_is_caught(strategy: Any, world: int) -> list[list[torch.Size]]:
    """With those of a model that does not train."""
    made, module = fabric(strategy, world), nn.Linear(FEATURES, FEATURES)
    inner = FailingSGD(module.parameters())
    model, optimizer = made.setup(module, inner)
    made.backward(model(torch.ones(2, FEATURES)).sum())
    inner.fails_after = 0
    with pytest.raises(ArithmeticError):
        optimizer.step()
    shapes = [[parameter.shape for parameter in model.parameters()], [p.grad.shape for p in model.parameters()]]
    return [*shapes, [parameter.shape for parameter in nn.Linear(FEATURES, FEATURES).parameters()]]


def evaluates_alone(stage: int, wait_timeout: float) -> float:
    """The loss of two models in a row, after rank 0 has used the second one alone."""
    made = fabric({"stage": stage, "wait_timeout": wait_timeout}, 2)
    models = []
    for _ in range(2):
        module = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
        models.append(made.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))[0])
    x = torch.ones(2, FEATURES)
    if made.global_rank == 0:
        with torch.no_grad():
            models[1](x)
    return float(models[1](models[0](x)).sum())


def overwrites_while_it_saves(strategy: Any, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights when they were saved in the background, and what is loaded after they have changed."""
    made = fabric(strategy, 2)
    model, optimizer = set_up(made)
    before = whole(made, model)
    made.save(path, {"model": model, "optimizer": optimizer})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    made.load(path, {"model": model, "optimizer": optimizer})
    loaded = whole(made, model)
    made.strategy.teardown()
    return before, loaded


def tears_down_while_it_saves(strategy: Any, path: Path) -> list[str]:
    """What is wrong with a checkpoint when a teardown has ended that came in the midst of its save."""
    made = fabric(strategy, 2)
    model, optimizer = set_up(made)
    goes_on = threading.Event()

    def write_late(*args: Any, **kwargs: Any) -> Any:
        goes_on.wait()
        return write_shard(*args, **kwargs)

    with patch.object(lightning_zero.checkpoint.save, "write_shard", write_late):
        made.save(path, {"model": model, "optimizer": optimizer})
        threading.Timer(0.1, goes_on.set).start()
        made.strategy.teardown()
        return verify(path)


def fails_while_it_saves(strategy: Any, path: Path) -> dict[str, str]:
    """What this rank hears of a save in the background that fails on rank 1."""
    made = fabric(strategy, 2)
    model, optimizer = set_up(made)
    states = {"model": model, "optimizer": optimizer}
    full = OSError("disk full") if made.global_rank == 1 else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with patch.object(lightning_zero.checkpoint.save, "write_shard", side_effect=full, wraps=write_shard):
            made.save(path, states)
            while made.global_rank == 0 and not made.strategy._checkpoints.saver.has_failed:
                time.sleep(0.01)
            made.barrier()
    with pytest.raises(CheckpointError) as raised:
        made.save(path, states)
    made.save(path, states)
    made.strategy.teardown()
    return {"warned": "".join(str(each.message) for each in caught), "raised": str(raised.value)}
