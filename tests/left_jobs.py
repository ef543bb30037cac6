"""Whole Trainer runs, and what they leave behind: on real ranks, beside ddp."""

import copy
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import GradClipAlgorithmType, grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

import jobs
from jobs import Classifier, listening, loader, state_of, trainer
from lightning_zero import ZeroStrategy
from lightning_zero.wire.comm import RankTimeoutError
from ranks import PATIENCE, SHORT

# -- a signal


class Signalled(Classifier):
    """SIGTERM comes to some ranks, once, at one place of a run."""

    def __init__(self, place: str, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.place, self.ranks = place, ranks

    def at(self, place: str) -> None:
        if place == self.place and self.global_rank in self.ranks:
            self.place = ""
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_start(self) -> None:
        self.at("start")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.at(f"step {batch_idx}")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.at(f"sanity check {batch_idx}" if self.trainer.sanity_checking else f"validation {batch_idx}")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.at(f"test {batch_idx}")

    def on_train_epoch_end(self) -> None:
        self.at("epoch end")

    def on_train_end(self) -> None:
        self.at("train end")


class SignalledByHand(Signalled):
    """Manual optimization, with steps that return None and do nothing."""

    def __init__(self, place: str, ranks: tuple[int, ...]) -> None:
        super().__init__(place, ranks)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.at(f"nothing {batch_idx}")
        if batch_idx < 2:
            self.manual_backward(self.loss(batch))
            self.optimizers().step()


def run_until_signalled(
    strategy: Any, place: str, ranks: tuple[int, ...], folder: Path, **kwargs: Any
) -> dict[str, Any]:
    """How a run ends, and where."""
    L.seed_everything(1, verbose=False)
    before = signal.getsignal(signal.SIGTERM)
    model = (SignalledByHand if "nothing" in place else Signalled)(place, ranks)
    run = trainer(strategy, 2, default_root_dir=folder, limit_val_batches=1.0, **kwargs)
    ended = "returned"
    try:
        if "test" in place:
            run.test(model, loader(), verbose=False)
        else:
            run.fit(model, loader(), loader(seed=1))
    except SystemExit as leaving:
        ended = f"{type(leaving).__name__} {leaving.code}"
    return {
        "ended": ended,
        "step": run.global_step,
        "batches": run.fit_loop.epoch_loop.batch_progress.total.ready,
        "received": run.received_sigterm,
        "handler_is_back": signal.getsignal(signal.SIGTERM) == before,
    }


def said_when_stopped(folder: Path, **kwargs: Any) -> tuple[dict[str, Any], list[str]]:
    """How a run ends whose second rank is told to stop in its third step, and what the first one says of it."""
    with listening() as said:
        ended = run_until_signalled({"stage": 3}, "step 2", (1,), folder, **kwargs)
    return ended, [message for message in said if "Told to stop" in message]


# -- the trainer, its callbacks, its strategy


class Own(L.Callback):
    pass


class Lists(L.Callback):
    """Notes which callbacks there are."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
        self.seen.append(names_of(run))

    def teardown(self, run: L.Trainer, *_: Any, **__: Any) -> None:
        self.seen.append(names_of(run))


def names_of(run: L.Trainer) -> list[str]:
    return [type(callback).__name__ for callback in run.callbacks]  # type: ignore[attr-defined]


class Configures(Classifier):
    def configure_callbacks(self) -> Any:
        return [Own()]


def callbacks_of_two_fits(strategy: Any) -> list[list[str]]:
    noted = Lists()
    run = trainer(strategy, 2, callbacks=[noted], max_epochs=1)
    for epochs in (1, 2):
        run.fit_loop.max_epochs = epochs
        run.fit(Configures(), loader(samples=16))
        noted.seen.append(names_of(run))
    return noted.seen


def fit_two_trainers(strategies: Any, folder: Path) -> dict[str, Any]:
    """Two trainers, with one strategy object or two, and then the first one again."""
    models, runs = [], []
    for number, strategy in enumerate(strategies):
        L.seed_everything(1, verbose=False)
        models.append(Classifier(lr=0.1 / (number + 1)))
        runs.append(trainer(strategy, 2, precision="bf16-mixed"))
    for model, run in zip(models, runs, strict=True):
        run.fit(model, loader())
    tested = runs[0].test(models[1], loader(seed=1), verbose=False)
    runs[0].save_checkpoint(place := folder / f"{len(set(map(id, strategies)))}.ckpt")
    return {
        "weights": [state_of(model) for model in models],
        "tested": tested,
        "saved": jobs.read_checkpoint(place)["state_dict"],
        "strategies": [repr(run.strategy) for run in runs],
    }


def fit_with_one_strategy_object(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[bool]]:
    """Two trainers that are given one strategy object, two that are given one each, and whether others share it."""
    shared = OfAUser("a word")
    found = fit_two_trainers([shared, shared], folder)
    expected = fit_two_trainers([OfAUser("a word"), OfAUser("a word")], folder)
    others = [trainer(shared, 2).strategy for _ in range(2)]
    return found, expected, [one is shared or one.word != "a word" for one in others]


class KeepsOptimizer(Classifier):
    """One optimizer serves every fit."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        trainable = [p for p in self.parameters() if p.requires_grad]
        self.kept = [getattr(torch.optim, kind)(trainable, lr=0.01)]

    def configure_optimizers(self) -> Any:
        return self.kept[0]


def whole_state(run: L.Trainer) -> dict[str, Any]:
    whole: Any = getattr(run.strategy, "full_optimizer_state", run.optimizers[0].state_dict)
    return copy.deepcopy(whole())


def fit_in_turn(strategies: list[Any], kind: str, folder: Path, loads: bool) -> dict[str, Any]:
    """Fits with one optimizer, one after the other, and what is saved after the last one. If the user `loads`, whole
    state is loaded between two fits."""
    L.seed_everything(1, verbose=False)
    model, found = KeepsOptimizer(kind), list[Any]()
    for strategy in strategies:
        if loads and found:
            model.kept[0].load_state_dict(copy.deepcopy(found[-1]))
        run = trainer(strategy, 2, max_epochs=1)
        run.fit(model, loader(samples=16))
        found.append(whole_state(run))
    path = place_of(strategies[-1], folder)
    run.save_checkpoint(path)
    saved = jobs.read_checkpoint(path)["optimizer_states"][0]["state"]
    return {"losses": model.losses, "weights": state_of(model), "states": found, "saved": copy.deepcopy(saved)}


def load_after_fit(stage: int, folder: Path) -> str | None:
    """What a save says where whole state was loaded after fit."""
    model = KeepsOptimizer("AdamW")
    run = trainer({"stage": stage}, 2)
    run.fit(model, loader(samples=16))
    model.kept[0].load_state_dict(whole_state(run))
    return error_of(lambda: run.save_checkpoint(folder / "loaded.ckpt"))


class LoadsPieces(KeepsOptimizer):
    """Loads a state at one place."""

    def __init__(self, state: Any, place: str) -> None:
        super().__init__("AdamW")
        self.loaded, self.place = [state], place

    def load_at(self, place: str) -> None:
        if place == self.place:
            self.kept[0].load_state_dict(self.loaded[0])

    def configure_optimizers(self) -> Any:
        self.load_at("configure_optimizers")
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.load_at("on_train_start")


def load_pieces_of_rank_0(place: str) -> str | None:
    """The error of a fit whose optimizer gets what rank 0's `state_dict()` was in an earlier one."""
    model = KeepsOptimizer("AdamW")
    run = trainer({"stage": 2}, 2)
    run.fit(model, loader(samples=16))
    pieces = run.strategy.broadcast(copy.deepcopy(model.kept[0].state_dict()))
    again = trainer({"stage": 2, "wait_timeout": SHORT}, 2)
    return error_of(lambda: again.fit(LoadsPieces(pieces, place), loader(samples=16)))


class OfAUser(ZeroStrategy):
    """Takes an argument of its own, and passes others on."""

    def __init__(self, word: str) -> None:
        self.word = word
        super().__init__(3, units="modules", wait_timeout=PATIENCE, checkpoint="sharded")


class LoadsWithoutAWord(Classifier):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> None:  # type: ignore[override]
        super().load_state_dict(state_dict, strict=strict, assign=assign)


def place_of(strategy: Any, folder: Path) -> Path:
    return folder / f"{strategy['stage'] if isinstance(strategy, dict) else strategy}.ckpt"


def resume_without_a_word(strategy: Any, folder: Path) -> list[float]:
    path = place_of(strategy, folder)
    L.seed_everything(1, verbose=False)
    run = trainer(strategy, 2)
    run.fit(LoadsWithoutAWord(), loader(samples=16))
    run.save_checkpoint(path)
    L.seed_everything(2, verbose=False)
    model = LoadsWithoutAWord()
    trainer(strategy, 2, max_epochs=2).fit(model, loader(samples=16), ckpt_path=path)
    return model.losses


def resume_with_a_mock(strategy: Any, folder: Path) -> list[Any]:
    """A mock in place of `load_state_dict`, as Lightning's own tests have it: its calls."""
    path, calls = place_of(strategy, folder), []
    run = trainer(strategy, 2)
    run.fit(Classifier(), loader(samples=16))
    run.save_checkpoint(path)
    for strict in (None, True, False):
        model = Classifier()
        model.strict_loading, model.load_state_dict = strict, Mock()  # type: ignore[assignment, method-assign]
        trainer(strategy, 2, max_epochs=2).fit(model, loader(samples=16), ckpt_path=path)
        trainer(strategy, 2).test(model, loader(samples=16), ckpt_path=path, verbose=False)
        calls.append([call.kwargs for call in model.load_state_dict.mock_calls])
    return calls


def go_on_from_the_last(strategy: Any, folder: Path, link: bool | str) -> list[Any]:
    """Three fits in one folder, each from the last checkpoint of the one before: its path, and what is kept."""
    folder, found = place_of(strategy, folder).with_suffix(""), []
    for epochs in (1, 2, 3):
        L.seed_everything(1, verbose=False)
        saver = ModelCheckpoint(folder, filename="{epoch}", save_last=link)  # type: ignore[arg-type]
        run = trainer(strategy, 2, max_epochs=epochs, callbacks=[saver], enable_checkpointing=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"\.fit\(ckpt_path=\"last\"\) is set")  # by the first
            run.fit(Classifier(), loader(samples=16), ckpt_path="last")
        run.strategy.barrier()
        resumed = None if run.ckpt_path is None else Path(run.ckpt_path).name
        found.append((resumed, run.global_step, sorted(path.name for path in folder.iterdir())))
        run.strategy.barrier()
    return found


def look_for_what_is_missing(strategy: Any, folder: Path) -> list[str | None]:
    path, model, run = folder / "nothing.ckpt", Classifier(), trainer(strategy, 2)
    ways = [run.fit, run.validate, run.test, run.predict]
    told = [error_of(lambda way=way: way(model, loader(), ckpt_path=path)) for way in ways]  # type: ignore[misc]
    return [None if one is None else one.partition(": ")[2] for one in told]


class Pickles(L.Callback):
    """Copies everything in mid-training; a copy of the model computes with its own values."""

    def __init__(self) -> None:
        self.outputs: list[float] = []

    def on_train_batch_end(self, run: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if run.global_step == 2:
            copy_of_all(run, module)
            other = pickle.loads(pickle.dumps(module)), copy.deepcopy(module)
            for each in other:
                with torch.no_grad():
                    each.net[4].weight.zero_()
                    each.net[4].bias.fill_(0.5)
                    self.outputs.append(each(next(iter(loader()))[0]).sum().item())


def copy_of_all(run: L.Trainer, module: L.LightningModule) -> L.Trainer:
    for each in (run.strategy, run.callbacks, module, run.optimizers, run.fit_loop):  # type: ignore[attr-defined]
        pickle.loads(pickle.dumps(each))
        copy.deepcopy(each)
    pickle.loads(pickle.dumps(run))
    return copy.deepcopy(run)


def copy_during_and_after(strategy: Any) -> Any:
    L.seed_everything(1, verbose=False)
    model, pickles = Classifier(), Pickles()
    run = trainer(strategy, 2, max_steps=4, callbacks=[pickles])
    run.fit(model, loader(), loader(seed=1))
    other = copy_of_all(run, model)
    loss = other.validate(copy.deepcopy(model), loader(seed=1), verbose=False)[0]["val_loss"]
    return model.losses, pickles.outputs, loss


def left_after_fit(strategy: Any, folder: Path, precision: str) -> dict[str, Any]:
    """What is there after fit, and still works."""
    path, before = place_of(strategy, folder), set(threading.enumerate())
    L.seed_everything(1, verbose=False)
    model = Classifier()
    run = trainer(strategy, 2, precision=precision)
    run.fit(model, loader(samples=16))
    found = {
        "dtypes": {name: (p.dtype, p.grad_dtype) for name, p in model.named_parameters()},
        "threads": sorted(thread.name for thread in threading.enumerate() if thread not in before),
        "grads": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "classes": {type(p.grad).__name__ for p in model.parameters()} | {type(p).__name__ for p in model.parameters()},
    }
    batch = next(iter(loader()))
    model.eval()
    found["predicted"] = run.strategy.predict_step(batch, 0).detach()
    model.zero_grad()
    loss: Any = run.strategy.training_step(batch, 0)
    loss.backward()
    found["gradient"] = model.net[0].weight.grad.clone()
    run.save_checkpoint(path)
    weights = state_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    run._checkpoint_connector.restore(path)
    found["restored"] = all(torch.equal(value, weights[name]) for name, value in state_of(model).items())
    run.fit_loop.max_epochs = 2
    run.fit(model, loader(samples=16), ckpt_path=path)
    return {**found, "losses": model.losses}


def by_hand_after_fit(strategy: Any, precision: str) -> list[Any]:
    """Backward, clipping and steps that a user calls once the run is over."""
    L.seed_everything(1, verbose=False)
    model, found = Classifier(), []
    run = trainer(strategy, 2, precision=precision)
    run.fit(model, loader(samples=16))
    plugin, optimizer, batch = run.precision_plugin, run.optimizers[0], next(iter(loader()))
    model.automatic_optimization = False
    ways: list[Callable[[Tensor], Any]] = [
        lambda loss: loss.backward(),
        lambda loss: model.manual_backward(loss),
        lambda loss: run.strategy.backward(loss, None),
        lambda loss: plugin.clip_gradients(optimizer, 1e-3),
        lambda loss: plugin.clip_gradients(optimizer, 1e-4, GradClipAlgorithmType.VALUE),
    ]
    for way in ways:
        way(model.loss(batch))
        found.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
    model.zero_grad()
    plain = torch.optim.SGD(model.parameters(), 0.1)
    run.strategy.optimizer_step(plain, lambda: model.manual_backward(model.loss(batch)))
    return [*found, state_of(model)]


# -- errors


class Fails(Classifier):
    """Raises on all ranks alike."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.place == "forward" and batch_idx == 2:
            raise ValueError("all ranks have had enough")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.place == "backward" and self.global_step == 2:
            raise ValueError("all ranks have had enough")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.place == "validation" and not self.trainer.sanity_checking:
            raise ValueError("all ranks have had enough")


class FailsInside(nn.Module):
    def __init__(self, inner: nn.Module, calls: list[int]) -> None:
        super().__init__()
        self.inner, self.calls = inner, calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        if len(self.calls) == 3:
            raise ValueError("all ranks have had enough")
        return self.inner(x)


def go_on_after_an_error(strategy: Any, place: str) -> dict[str, Any]:
    """As in a notebook: the model is read, used, and trained again, by the same trainer."""
    L.seed_everything(1, verbose=False)
    model = Fails(place)
    if place == "inside":
        model.net[3] = FailsInside(model.net[3], [])
    run = trainer(strategy, 2)
    batches, others = loader(samples=24), loader(seed=1, samples=16)  # the third of three steps may fail
    said = error_of(lambda: run.fit(model, batches, others))
    weights, model.place = state_of(model), ""
    output = model(next(iter(loader()))[0]).detach()
    tested = run.test(model, loader(seed=2, samples=16), verbose=False)[0]["test_loss"]
    run.fit(model, batches, others)
    comm: Any = getattr(run.strategy, "_comm", None)
    is_blamed = comm is not None and comm._torch_store.check([f"lost/{comm.rank}"])  # for what comes after it, too
    found = {"said": said, "weights": weights, "output": output, "tested": tested, "losses": model.losses}
    return {**found, "is_blamed": is_blamed}


def error_of(function: Callable[[], Any]) -> str | None:
    try:
        function()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


# -- ranks that do other things


class Uneven(Classifier):
    """Rank 1 has two training batches less, or none; with a length or without."""

    def __init__(self, batches: tuple[int, int], has_length: bool) -> None:
        super().__init__()
        self.batches, self.has_length = batches, has_length

    def train_dataloader(self) -> Any:
        batches = list(loader())[: self.batches[self.global_rank]]
        return DataLoader(batches if self.has_length else Stream(batches), batch_size=None)


class Stream(IterableDataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def fit_unevenly(strategy: Any, batches: tuple[int, int], has_length: bool) -> str | None:
    run = trainer(strategy, 2, use_distributed_sampler=False)
    return error_of(lambda: run.fit(Uneven(batches, has_length)))


class OnOneRank(Classifier):
    """Rank 0 alone calls a collective of the strategy."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0 and self.global_step == 2:
            strategy: Any = self.trainer.strategy
            getattr(strategy, self.name)(*(() if self.name == "barrier" else (torch.ones(1),)))


def call_on_one_rank(strategy: Any, name: str) -> list[str]:
    run = trainer(strategy, 2)
    try:
        run.fit(OnOneRank(name), loader())
    except RankTimeoutError as error:
        return [str(error), *error.__notes__]
    return []


class ReadsAndMeasures(Classifier):
    """Rank 0 reads all weights after backward; then all ranks read all gradients."""

    def on_after_backward(self) -> None:
        if self.global_rank == 0:
            self.seen = [parameter.detach().norm().item() for parameter in self.parameters()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))


def read_and_measure(strategy: Any) -> Any:
    L.seed_everything(1, verbose=False)
    model = ReadsAndMeasures()
    trainer(strategy, 2, max_steps=3).fit(model, loader())
    return model.losses, model.norms


class UnevenlyEvaluated(Classifier):
    """Rank 1 evaluates two batches more, and a metric of torchmetrics is synchronised at the end, past the strategy."""

    def __init__(self, batches: tuple[int, int]) -> None:
        super().__init__()
        self.batches, self.mean = batches, MeanMetric()

    def val_dataloader(self) -> Any:
        return DataLoader(Stream(list(loader(seed=1))[: self.batches[self.global_rank]]), batch_size=None)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(self.loss(batch))
        self.log("mean", self.mean, on_epoch=True)


def validate_unevenly(strategy: Any, batches: tuple[int, int]) -> float:
    L.seed_everything(1, verbose=False)
    run = trainer(strategy, 2, use_distributed_sampler=False, limit_val_batches=1.0)
    return float(run.validate(UnevenlyEvaluated(batches), verbose=False)[0]["mean"])


def validate_nothing_on_rank_0(strategy: Any) -> str | None:
    return error_of(lambda: validate_unevenly(strategy, (0, 4)))


class Traced(Classifier):
    """As TensorBoardLogger(log_graph=True) does it: rank 0 alone runs a module under torch's tracer."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:
            x = next(iter(loader()))[0]
            traced = torch.jit.trace(self.net[0], x, check_trace=False)
            self.outputs.append(traced(x).norm().item())


def trace_on_rank_0(strategy: Any) -> Any:
    L.seed_everything(1, verbose=False)
    model = Traced()
    trainer(strategy, 2, max_steps=3).fit(model, loader())
    return model.losses, model.outputs


class Leaves(Classifier):
    """Rank 1 raises, or its process is killed, at one place of its third step or of what follows it."""

    def __init__(self, place: str, how: str) -> None:
        super().__init__()
        self.place, self.how = place, how

    def at(self, place: str, batch_idx: int = 2) -> None:
        if place == self.place and batch_idx == 2 and self.global_rank == 1:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("rank 1 has had enough")

    def train_dataloader(self) -> Any:
        for number, batch in enumerate(list(loader())[:6]):
            self.at("loader", number)
            yield batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.at("forward", batch_idx)
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda _: self.at("backward", batch_idx))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.at("step", self.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.at("validation", batch_idx)
        super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.at("epoch end")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.at("save")


def leave(strategy: Any, place: str, how: str, folder: Path) -> tuple[str | None, float]:
    """The error, and how long the run took; s."""
    started = time.monotonic()
    run = trainer(strategy, 2, default_root_dir=folder, enable_checkpointing=True, limit_val_batches=1.0)
    return error_of(lambda: run.fit(Leaves(place, how), None, loader(seed=1))), time.monotonic() - started
