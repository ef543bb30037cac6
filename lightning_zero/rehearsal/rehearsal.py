"""`rehearse`: takes training steps of one rank among any number, without computing or sending anything."""

import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, cast, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from lightning_zero.checkpoint.tree import dtype_named
from lightning_zero.device import HOST
from lightning_zero.pl.strategy import ZeroStrategy
from lightning_zero.pl.table import aligned, ranks_told, sized, wrapped
from lightning_zero.rehearsal.cost import Rates, Timing, Work, timing_of
from lightning_zero.rehearsal.imagined import ImaginedStrategy, Rank, Traffic
from lightning_zero.rehearsal.memory import Moment, Phase
from lightning_zero.run.program import Program

STEPS = 3  # the first one makes the optimizer's state, and the second one learns what follows
LOUD = ("lightning.pytorch", "lightning.fabric", "lightning_zero")


Answers = list[Any]  # what a model has asked for in a step that was computed; they serve any number of rehearsals
Module = pl.LightningModule | Callable[[], pl.LightningModule] | str


@final
@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a training step takes on one rank. Prints as tables."""

    strategy: str  # as the user would write it
    rank: int
    ranks: int
    numel: int  # parameters of the model; with tensor parallelism, of this rank's part of it
    at_rest: Mapping[str, int]  # bytes between steps by category, as `ZeroStrategy.memory_report` has them in training
    peaks: Mapping[Phase, Moment]  # the moment of each phase with most bytes on the device
    course: tuple[Moment, ...]  # of the last step: the one with most bytes at each place, one after the other
    sent: Mapping[str, Traffic]  # by this rank in one step, by kind of operation
    saved: int  # bytes of tensors that this rank writes into a checkpoint of shards
    program: Program  # the step as data
    work: Mapping[int, Work]  # of the last step, by the use of `program` in which it was done
    device_bytes: int | None = None  # that a device has
    rates: Rates = Rates()  # noqa: RUF009  # of the machine, by which time is modelled; it is frozen

    @property
    def peak(self) -> Moment:
        """The moment with most bytes on the device."""
        return max(reversed([*self.peaks.values()]), key=lambda moment: moment.nbytes)

    @property
    def fits(self) -> bool:
        """Whether the device has that much; true if nothing is known of the device."""
        return self.device_bytes is None or self.peak.nbytes <= self.device_bytes

    def timing(self, rates: Rates | None = None) -> Timing:
        """Returns how long a step would take on a machine of these rates: a model, and no measurement."""
        return timing_of(self.program, self.work, rates or self.rates)

    def __str__(self) -> str:
        peaks = {phase: moment for phase, moment in self.peaks.items() if phase is not Phase.BUILD}
        names = list(dict.fromkeys(name for moment in peaks.values() for name in moment.device))
        head = ["on the device", *peaks, "at rest"]
        rows = [
            [name, *(_size(moment.device.get(name, 0)) for moment in peaks.values()), _size(self.at_rest.get(name, 0))]
            for name in names
        ]
        resting = sum(nbytes for name, nbytes in self.at_rest.items() if not name.endswith(("(host)", "(disk)")))
        rows.append(["all", *(sized(moment.nbytes) for moment in peaks.values()), sized(resting)])
        for tier in ("host", "disk"):
            there = [sum(getattr(moment, tier).values()) for moment in peaks.values()]
            resting = sum(nbytes for name, nbytes in self.at_rest.items() if name.endswith(f"({tier})"))
            if any(there) or resting:
                rows.append([f"on the {tier}", *map(_size, there), _size(resting)])
        sent = [[kind, f"{calls:,}", sized(nbytes)] for kind, (calls, nbytes) in self.sent.items()]
        peak = self.peak
        phase = next(phase for phase, moment in self.peaks.items() if moment is peak)
        place = "" if not peak.place else ", at its beginning" if peak.place == phase else f", at {peak.place}"
        judged = ""
        if self.device_bytes is not None:
            left = self.device_bytes - peak.nbytes
            judged = f", {sized(abs(left))} {'less' if left >= 0 else 'MORE'} than the device has"
        lines = [
            f"{self.strategy} on {ranks_told(self.ranks)}, rank {self.rank}: {self.numel:,} parameters",
            *aligned([head, *rows]),
            "",
            *wrapped(f"Most in {phase}{place}: {sized(peak.nbytes)}{judged}"),
            "",
            *aligned([["sent in a step", "times", "bytes"], *sent]),
            "",
            f"written to a checkpoint of shards: {sized(self.saved)}",
            *wrapped(f"modelled: {self.timing()}"),
        ]
        return "\n  ".join(lines).replace("\n  \n", "\n\n")


def rehearse(
    module: Module,
    batch: Any,
    strategy: ZeroStrategy | Mapping[str, Any] | int = 2,
    *,
    ranks: int = 1,
    rank: int = 0,
    device_bytes: int | None = None,
    host_is_apart: bool = True,
    on_cpu: bool | Answers = False,
    steps: int = STEPS,
    rates: Rates | None = None,
    **trainer: Any,
) -> Rehearsal:
    """Takes three training steps of one rank of a run, and returns what they take. Nothing is computed and nothing is
    sent, and what tensors hold is never touched: the engine, Lightning's loop and the optimizers run as they are, on
    tensors whose memory the system never backs. So a step of a trillion parameters on 1024 ranks fits on a laptop.

    The bytes are those of all tensors that are alive. A device needs a little more: its context, the work space of its
    libraries, and what its allocator cannot use (`docs/rehearsal.md`).

    Args:
        module: a LightningModule, which stays as it is; or what makes one, which is better for a large model: a
            callable without arguments, or the import path of one, such as ``"package.module:Model"``.
        batch: one batch of training, on this machine; or a callable that makes it.
        strategy: the strategy that would train, its arguments, or a stage.
        ranks: of the run.
        rank: which of them.
        device_bytes: how many the device has, to be told whether they suffice.
        host_is_apart: whether the device is a GPU, so that host memory is another tier, and that what is sent is sent
            beside its work.
        on_cpu: whether one step is first computed for real on one rank, here, to know the values that the model's own
            code asks for. The model and its activations must fit into memory. Or what `answers_of` found before.
        steps: how many are taken, of which the last one is told; one is enough for what rests between steps.
        rates: of the machine, by which the time of a step is modelled; about those of an A100 by default.
        trainer: what else the Trainer would be given: ``precision``, ``accumulate_grad_batches``,
            ``gradient_clip_val``.

    Raises:
        ValueError: for less than one rank, a rank that is none of them, a strategy that refuses the model, or a model
            that takes no step.
        NeedsValuesError: if the model's control flow asks for values of tensors.
        ImportError: for a path that does not import.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: write at least one rank.")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} is none of the {ranks} ranks. Write one of 0 to {ranks - 1}.")
    known = answers_of(module, batch, **trainer) if on_cpu is True else on_cpu
    played = Rank(
        rank,
        ranks,
        steps=steps,
        micro_batches=trainer.get("accumulate_grad_batches", 1),
        host_is_apart=host_is_apart,
        answers=None if known is False else known,
    )
    imagined = _imagined(strategy, played)
    with quiet(), isolated(), played.tracking():
        train(module, batch, imagined, steps, **trainer)
    if not played.outcome:
        raise ValueError("No step was taken: training_step has returned nothing, or no optimizer was stepped.")
    return Rehearsal(
        strategy=repr(imagined).replace(type(imagined).__name__, ZeroStrategy.__name__, 1),
        rank=rank,
        ranks=ranks,
        peaks=played.memory.peaks,
        course=tuple(played.memory.course),
        device_bytes=device_bytes,
        rates=rates or Rates(),
        **played.outcome,
    )


def train(
    module: Module,
    batch: Any,
    strategy: ZeroStrategy,
    steps: int,
    *,
    devices: int = 1,
    accelerator: str = "cpu",
    **trainer: Any,
) -> None:
    """Trains with the same batch again and again, and with nothing beside it."""
    batches = [batch() if callable(batch) else batch] * (steps * trainer.get("accumulate_grad_batches", 1))
    pl.Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **trainer,
    ).fit(_made(module), DataLoader(cast(Any, batches), batch_size=None))


def answers_of(module: Module, batch: Any, **trainer: Any) -> Answers:
    """Computes one step on one rank, and returns what the model has asked for that a rehearsal does not know. The
    arguments are those of `rehearse`."""
    played = Rank(0, 1, steps=1, computes=True)
    computing = ImaginedStrategy(played, 0)
    one_batch = {name: value for name, value in trainer.items() if name != "accumulate_grad_batches"}
    with quiet(), isolated(), played.tracking():
        train(module, batch, computing, 1, **one_batch)
    return played.hollow.answers


def _imagined(strategy: ZeroStrategy | Mapping[str, Any] | int, played: Rank) -> ImaginedStrategy:
    if not isinstance(strategy, ZeroStrategy):  # one that the user knows tells what is wrong with the arguments
        strategy = ZeroStrategy(strategy) if isinstance(strategy, int) else ZeroStrategy(**strategy)
    if strategy._settings.is_open:
        raise ValueError("stage='auto' is what a rehearsal helps to choose. Write a stage, or have `plan` choose.")
    return ImaginedStrategy(played, **strategy._arguments)


def _made(module: Module) -> pl.LightningModule:
    """Returns a module of which nobody else knows."""
    if isinstance(module, pl.LightningModule):
        return copy.deepcopy(module)
    make = found_at(module) if isinstance(module, str) else module
    made = make()
    if not isinstance(made, pl.LightningModule):
        raise TypeError(f"{module!r} makes a {type(made).__name__}. Name what makes a LightningModule.")
    return made


def found_at(path: str) -> Any:
    """Returns what stands at an import path: ``"package.module:Name"`` or ``"package.module.Name"``.

    Raises:
        ImportError: if nothing does.
    """
    try:
        found = resolve_name(path)
        if isinstance(found, ModuleType):
            raise ImportError("it is a module")
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(f"{path!r} cannot be imported: {error}. Write it as 'package.module:Name'.") from error
    return found


def batch_like(text: str) -> Callable[[], Any]:
    """Returns what makes a batch of what a command line says: an import path, or shapes such as
    ``"8x1024:int64,8"``, of which several are a tuple.

    Raises:
        ValueError: for what is neither.
        ImportError: for a path that does not import.
    """
    parts = [re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+))?", part) for part in text.split(",")]
    shapes = [(tuple(map(int, part[1].split("x"))), dtype_named(part[2] or "float32")) for part in parts if part]
    if len(shapes) == len(parts):
        made = tuple(partial(torch.zeros, shape, dtype=dtype, device=HOST) for shape, dtype in shapes)
        return made[0] if len(made) == 1 else lambda: tuple(make() for make in made)
    if not re.fullmatch(r"[A-Za-z_][\w.]*[:.]\w+", text):
        raise ValueError(f"{text!r} is no batch. Write shapes, such as 8x1024:int64,8:int64, or an import path.")
    found = found_at(text)
    return found if callable(found) else lambda: found


@contextmanager
def isolated() -> Iterator[None]:
    """Leaves random numbers as they were, also after an error, as Lightning's `isolate_rng` does not."""
    states = isolate_rng()
    states.__enter__()
    try:
        yield
    finally:
        states.__exit__(None, None, None)


@contextmanager
def quiet() -> Iterator[None]:
    """Leaves out what Lightning and the strategy tell of a run that does not take place."""
    with warnings.catch_warnings(), ExitStack() as undo:
        warnings.simplefilter("ignore")
        for logger in map(logging.getLogger, LOUD):
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


def _size(nbytes: int) -> str:
    return sized(nbytes) if nbytes else "-"
