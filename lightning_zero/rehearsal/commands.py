"""The commands ``lightning-zero rehearse`` and ``lightning-zero plan``: what they take, and what they print."""

import argparse
import ast
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

MODEL = "the import path of what makes a LightningModule, or a config of Hydra (conf/train.yaml)"

# Each command imports what it needs, so that --help does not wait for torch.


class Training(NamedTuple):
    """What is rehearsed."""

    model: Callable[[], Any]  # makes the LightningModule
    batch: Callable[[], Any]
    strategy: dict[str, Any]  # arguments that are not the defaults
    trainer: dict[str, Any]  # arguments of the Trainer


Compose = Callable[[str, Sequence[str]], Training]  # reads a config, in a layer above this one


def add_plan(one: argparse.ArgumentParser, compose: Compose) -> None:
    """Adds what `run_plan` takes."""
    one.set_defaults(compose=compose, default_of=one.get_default)
    one.usage = (
        "lightning-zero plan --parameters N --ranks RANKS [options]\n"
        "       lightning-zero plan MODEL --batch BATCH --ranks RANKS\n"
        "                           --device-memory SIZE [options]"
    )
    tiers = ("cpu", "nvme")
    # In no exclusive group: argparse takes the value of a misspelt option for MODEL, and would tell of that alone.
    one.add_argument("model", metavar="MODEL", nargs="?", help=f"rehearses it: {MODEL}")
    one.add_argument("--parameters", type=_numel, help="without a model: how many, such as 7e9 or 7B")
    _add_run(one)
    one.add_argument("--host-memory", type=_nbytes, help="with MODEL: of the host for each rank, such as 100GB")
    one.add_argument("--stage", type=int, choices=(1, 2, 3), help="all three by default")
    one.add_argument("--offload", choices=tiers, help="where the optimizer state is kept, and at stages 2, 3 gradients")
    one.add_argument("--offload-parameters", choices=tiers, help="where parameters are kept at stage 3")
    one.add_argument("--replicas", type=_at_least_one, default=1, help="as replicate_size (default 1)")
    one.add_argument("--state-tensors", type=_count, default=2, help="of the optimizer (default 2, as Adam; SGD has 0)")
    one.add_argument("--averages", type=_count, default=0, help="of the weights, as ZeroEMA keeps one (default 0)")


def add_rehearse(one: argparse.ArgumentParser, compose: Compose) -> None:
    """Adds what `run_rehearse` takes."""
    one.set_defaults(compose=compose)
    one.usage = "lightning-zero rehearse MODEL --batch BATCH --ranks RANKS [options]"
    one.add_argument("model", metavar="MODEL", help=MODEL)
    _add_run(one)
    one.add_argument("--rank", type=int, default=0, help="which one rehearses (default 0)")
    one.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="of ZeRO (default 2, or the config's)")
    about = "another argument of ZeroStrategy, such as bucket_size_mb=50 or offload=cpu; may be repeated"
    one.add_argument("--set", action="append", type=_setting, default=[], metavar="NAME=VALUE", help=about)
    one.add_argument("--accumulate", type=_at_least_one, help="micro-batches in a step (default 1)")
    one.add_argument("--clip", type=positive, default=None, help="gradient norm that gradients are clipped to")
    one.add_argument("--program", action="store_true", help="also print what is done at each use of the step")
    one.add_argument("--plot", metavar="OUT.png", help="draw bytes at each stage, over the step, by ranks")
    one.add_argument("--html", metavar="OUT.html", help="write a page with these, what is done when, and the tables")


def _add_run(one: argparse.ArgumentParser) -> None:
    """Adds what `rehearse` and `plan` have in common."""
    precisions = "32-true bf16-mixed 16-mixed bf16-true 16-true 64-true".split()
    batch = "one batch: an import path, or shapes, such as 8x1024:int64,8:int64 (float32 without a dtype)"
    one.add_argument("--batch", help=batch)
    one.add_argument("--arg", action="append", type=_setting, default=[], metavar="NAME=VALUE", help="of the model")
    one.add_argument("--ranks", type=_at_least_one, required=True, help="processes, one for each GPU")
    one.add_argument("--device-memory", type=_nbytes, help="of one device, such as 80GB or 80GiB")
    one.add_argument("--precision", choices=precisions, help="as the Trainer has it (default 32-true)")
    about = "of the machine, for the time that is modelled: flops=300e12, memory, link, host in bytes/s, latency in s"
    one.add_argument("--rate", action="append", type=_setting, default=[], metavar="NAME=VALUE", help=about)
    about = "measure the rates in some steps of two ranks on this machine's processors"
    one.add_argument("--calibrate", action="store_true", help=about)
    about = "of a config, as Hydra takes it, such as strategy=zero3 or model.width=1024; may be repeated"
    one.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help=about)
    about = "first compute one step here, to answer what the model's code asks for"
    one.add_argument("--on-cpu", action="store_true", help=about)


def _rates_from(options: argparse.Namespace, training: Training) -> Any:
    """Returns the rates by which time is modelled."""
    from dataclasses import fields, replace

    from lightning_zero.rehearsal.calibration import calibrate
    from lightning_zero.rehearsal.cost import Rates

    rates, given = Rates(), dict(options.rate)
    if unknown := set(given) - {one.name for one in fields(Rates)}:
        options.refuse(f"--rate has no {', '.join(sorted(unknown))}; rates are those of {rates}")
    if options.calibrate:
        rates = calibrate(training.model, training.batch, precision=training.trainer.get("precision"))
        print(rates)
    return replace(rates, **given)


def run_plan(options: argparse.Namespace) -> bool:
    """Prints a plan, and returns whether nothing fits."""
    of_model = "batch arg device_memory host_memory on_cpu rate calibrate override".split()
    of_number = "offload offload_parameters state_tensors averages".split()
    if (options.model is None) == (options.parameters is None):
        options.refuse("write either MODEL or --parameters")
    chosen, others = ("MODEL", of_number) if options.model is not None else ("--parameters", of_model)
    for name in others:
        if getattr(options, name) != options.default_of(name):
            options.refuse(f"--{name.replace('_', '-')} has nothing to do with {chosen}")
    if options.model is not None:
        return _plan_model(options)
    from lightning_zero.config import Offload
    from lightning_zero.pl.table import plan_text

    tiers = {"optimizer": options.offload, "parameters": options.offload_parameters}
    setting = {"precision": options.precision or "32-true", "ranks": options.ranks, "replicate_size": options.replicas}
    try:
        setting["offload"] = Offload(**tiers, path="." if "nvme" in tiers.values() else None)
        stages = (1, 2, 3) if options.stage is None else (options.stage,)
        setting |= {"state_tensors": options.state_tensors, "averages": options.averages}
        print(plan_text(int(options.parameters), stages, **setting))
    except ValueError as error:
        options.refuse(str(error))
    return False


def _plan_model(options: argparse.Namespace) -> bool:
    from lightning_zero.rehearsal.planning import plan

    if options.device_memory is None:
        options.refuse("plan MODEL needs --device-memory, such as --device-memory 80GB")
    fixed = _written(stage=options.stage, replicate_size=None if options.replicas == 1 else options.replicas)
    with _refusing(options):
        training = _training(options)
        open_to_choice = ("stage", "offload", "prefetch", "activation_checkpointing", "bucket_size_mb")
        fixed = {name: value for name, value in training.strategy.items() if name not in open_to_choice} | fixed
        found = plan(
            training.model,
            training.batch,
            rates=_rates_from(options, training),
            ranks=options.ranks,
            device_bytes=options.device_memory,
            host_bytes=options.host_memory,
            fixed=fixed,
            on_cpu=options.on_cpu,
            **training.trainer,
        )
        print(found)
    return not found.fitting


def run_rehearse(options: argparse.Namespace) -> bool:
    """Prints a rehearsal, and returns whether the device has too little memory."""
    from lightning_zero.rehearsal.rehearsal import answers_of, rehearse

    given: dict[str, Any] = {"ranks": options.ranks, "rank": options.rank, "device_bytes": options.device_memory}
    with _refusing(options):
        training = _training(options)
        trainer = training.trainer | _written(
            accumulate_grad_batches=options.accumulate, gradient_clip_val=options.clip
        )
        if options.on_cpu:
            given["on_cpu"] = answers_of(training.model, training.batch, **trainer)
        given |= {"rates": _rates_from(options, training), **trainer}
        strategy = {"stage": 2, **training.strategy, **_written(stage=options.stage), **dict(options.set)}
        found = rehearse(training.model, training.batch, strategy, **given)
        print(found)
        if options.program:
            print(f"\n{found.program}")
        if options.plot or options.html:
            from lightning_zero.rehearsal.comparison import compare
            from lightning_zero.rehearsal.page import write_page
            from lightning_zero.rehearsal.picture import draw

            shown = compare(training.model, training.batch, strategy, found, **given)
            if options.plot:
                draw(options.plot, shown)
            if options.html:
                write_page(options.html, shown, options.model)
            print("", *filter(None, (options.plot, options.html)), sep="\n  ")
    return not found.fits


@contextmanager
def _refusing(options: argparse.Namespace) -> Iterator[None]:
    """Says what is wrong with a model, a batch or a setting in one line."""
    try:
        yield
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        options.refuse(f"{type(error).__name__}: {str(error).strip()}")


def _written(**values: Any) -> dict[str, Any]:
    """Returns those that the command line has."""
    return {name: value for name, value in values.items() if value is not None}


def _training(options: argparse.Namespace) -> Training:
    from lightning_zero.rehearsal.rehearsal import batch_like, found_at

    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: a model of one's own lies here
    precision = _written(precision=options.precision)
    if options.model.endswith((".yaml", ".yml")):
        if options.arg:
            options.refuse("--arg is for an import path; of a config, --override model.NAME=VALUE")
        found = options.compose(options.model, options.override)
        batch = found.batch if options.batch is None else batch_like(options.batch)
        return found._replace(batch=batch, trainer=found.trainer | precision)
    if options.override:
        options.refuse("--override is for a config; of an import path, --arg NAME=VALUE")
    if options.batch is None:
        options.refuse("a rehearsal needs --batch: an import path, or shapes, such as --batch 8x1024:int64")
    return Training(partial(found_at(options.model), **dict(options.arg)), batch_like(options.batch), {}, precision)


def _setting(text: str) -> tuple[str, Any]:
    """Reads ``name=value``; the value as Python writes it, or a text."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text} is not of the form NAME=VALUE")
    with suppress(ValueError, SyntaxError):
        return name, ast.literal_eval(value)
    return name, value


def _nbytes(text: str) -> int:
    """Reads a size with its unit, such as ``80GB`` or ``1.5 TiB``."""
    found = re.fullmatch(r"([0-9.e+]+)\s*([KMGT])(i?)B", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size with a unit, such as 80GB or 80GiB")
    return int(positive(found[1]) * (1024 if found[3] else 1000) ** (1 + "KMGT".index(found[2].upper())))


def positive(text: str) -> float:
    """Reads a finite number above 0."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text} is not a positive number")


def _count(text: str, least: int = 0) -> int:
    """Reads a whole number, `least` or more."""
    with suppress(ValueError):
        if (value := int(text)) >= least:
            return value
    raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")


_at_least_one = partial(_count, least=1)


def _numel(text: str) -> float:
    """Reads a number of parameters, such as ``7e9``, ``7B`` or ``350M``."""
    size = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    return positive(text) if size is None else positive(text[:-1]) * size
