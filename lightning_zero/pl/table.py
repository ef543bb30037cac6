"""Plain-text reports of a run: bytes by category beside DDP's, dtypes, what is kept where, settings that bring nothing;
and of the bytes of each stage before there is a model.

They fit into 60 columns and have no colour, because they end up in logs.
"""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from lightning_zero.config import Offload
from lightning_zero.run.engine import Engine
from lightning_zero.run.estimate import states_of, states_under_ddp
from lightning_zero.run.forecast import STATES, Forecast, forecast, states_in
from lightning_zero.shards.early import early_of
from lightning_zero.shards.local import shares_modules
from lightning_zero.shards.units import scripted
from lightning_zero.shards.window import may_fuse
from lightning_zero.stage import STAGES
from lightning_zero.tiers.ledger import Category, Tier

WORTH_TELLING = 2**30  # bytes of a model, from which on users are told that it is whole where it need not be
WIDTH = 60  # columns that every terminal has
SHOWN = 4  # kinds of modules that stay in fp32
DDP = "ddp"


class MemoryReport(dict[str, int]):
    """Bytes by category; prints as a table of those that are not zero."""

    def __str__(self) -> str:
        rows = [[category, sized(nbytes)] for category, nbytes in self.items() if nbytes]
        return "\n".join(aligned([*rows, ["all", sized(sum(self.values()))]]))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def sized(nbytes: float) -> str:
    """Returns bytes in a unit that leaves about three digits: ``"1.23 GB"``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 999.5 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes:.0f} B"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Returns `rows` as lines of columns: the first `left` of them aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])] for row in rows]
    return ["  ".join(line).rstrip() for line in lines]


def wrapped(text: str) -> list[str]:
    """Returns a sentence in lines that fit into the width."""
    return textwrap.wrap(text, WIDTH - 2, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def table_of(
    engine: Engine,
    stage: int,
    averages: Sequence[Mapping[tuple[Category, Tier], int]] = (),
    *,
    can_step_in_backward: bool = False,
) -> str:
    """Returns what is printed at the start of fit: the mesh, the bytes per rank beside DDP's, dtypes, and notes.

    `averages` are the bytes of each average of the model; see `run.average.room_for_average`. The notes recommend
    `step_in_backward` where optimizer state is offloaded, and the Trainer `can_step_in_backward`, because it needs no
    gradients afterwards.
    """
    expected = forecast(engine, engine.optimizers, averages)
    lines = [
        *_mesh_lines(engine, expected),
        *bytes_table(expected.numel, ddp=expected.ddp, here=expected.here),
        *_dtype_lines(engine),
    ]
    for note in _notes(engine, expected, can_step_in_backward):
        lines += wrapped(note)
    return "\n  ".join([f"ZeRO stage {stage} on {ranks_told(engine.mesh.world.size)}", *lines])


def _notes(engine: Engine, expected: Forecast, in_backward: bool) -> list[str]:
    """Returns the sentences below the table; see `table_of`."""
    told = [*_warnings(engine, expected), *_uncast_lines(engine)]
    if engine.parts.assembly.resident:
        told.append(
            f"{engine.parts.assembly.resident:,} stay whole on every rank: gathering them costs more than it saves"
        )
        if any(True for _ in scripted(engine.module)):
            told[-1] += ", or TorchScript reads them past Python"
    if engine.regrouping.imbalance is not None:
        nbytes, work = engine.regrouping.imbalance
        told.append(
            "Optimizers step whole tensors; the rank with most has, beyond the mean, "
            f"{nbytes:.1%} of their bytes and {work:.1%} of the work, if a matrix costs what products of it cost"
        )
    if any(group.setting.block > 1 for group in engine.groups):
        told.append("Pieces that optimizers step part no block of 256 elements")
    told += _offload_lines(engine)
    if in_backward and _would_hide_in_backward(engine):
        told.append(
            "If no hook of yours looks at gradients, ZeroStrategy(step_in_backward=True) hides the offloaded step "
            "behind backward, which is longer than the next forward"
        )
    return told + _recompute_lines(engine)


def ranks_told(size: int) -> str:
    """Returns ``"1 rank"``, ``"2 ranks"`` and so on."""
    return f"{size} rank" + "s" * (size != 1)


def _mesh_lines(engine: Engine, expected: Forecast) -> list[str]:
    mesh, units = engine.mesh, len(engine.loans.cache.units)
    axes = {"replicas": mesh.replicate.size, "shards": mesh.shard.size, "tensor-parallel": mesh.tensor.size}
    shape = " x ".join(f"{size} {axis}" for axis, size in axes.items() if size > 1)
    gathered = f", gathered in {units} units" if units else ""
    return wrapped(
        f"{shape}{'; ' if shape else ''}{expected.numel:,} parameters, groups: {len(engine.groups)}{gathered}"
    )


def bytes_table(numel: int, **reports: Mapping[str, int]) -> list[str]:
    """Returns the bytes of one rank by category, with a column for each report. The last line says how many bytes of
    model states on the device each of `numel` parameters takes."""
    named = list(reports.values())
    categories = [category for category in {**named[-1], **named[0]} if any(report.get(category) for report in named)]

    def row(category: str) -> list[str]:
        return [category, *(sized(report[category]) if report.get(category) else "-" for report in named)]

    rows = [["bytes per rank", *reports], *(row(category) for category in categories if category in STATES)]
    rows.append(["model states", *(sized(states_in(report)) for report in named)])
    rows += [row(category) for category in categories if category not in STATES]
    per = " -> ".join(f"{states_in(report) / max(numel, 1):.1f}" for report in named)
    return [*aligned(rows), f"{per} bytes per parameter"]


def _dtype_lines(engine: Engine) -> list[str]:
    rows = [["elements", "storage", "compute", "reduce", "master"]]
    grads = {gradient.group: gradient.dtype for gradient in engine.runner.reductions.gradients}
    numels: Counter[tuple[torch.dtype, torch.dtype, torch.dtype | None]] = Counter()
    for group in engine.groups:
        numels[group.kind.resting, group.kind.declared, grads.get(group)] += sum(slot.numel for slot in group.slots)
    for (resting, declared, reduce), numel in numels.items():
        cells = (f"{numel:,}", resting, resting, reduce or "-", declared if reduce else "-")
        rows.append([str(cell).removeprefix("torch.") for cell in cells])
    return aligned(rows)


def _uncast_lines(engine: Engine) -> list[str]:
    """Returns which parameters stay in fp32 although autocast's dtype was asked for, and why."""
    asked = str(engine.options.autocast_dtype).removeprefix("torch.")
    lines = [
        f"{uncast.numel:,} stay in float32, not {asked}: {uncast.kind} ({uncast.why})"
        for uncast in engine.parts.assembly.resting.uncast[:SHOWN]
    ]
    if left := sum(uncast.numel for uncast in engine.parts.assembly.resting.uncast[SHOWN:]):
        lines.append(f"{left:,} more do, in other modules")
    return lines


def _warnings(engine: Engine, expected: Forecast) -> list[str]:
    """Returns a sentence for each setting that brings nothing."""
    options, mesh, told = engine.options, engine.mesh, []
    here, ddp = (
        sum(nbytes for category, nbytes in report.items() if "(" not in category)  # those on the device
        for report in (expected.here, expected.ddp)
    )
    data_ranks = mesh.world.size // mesh.tensor.size
    if data_ranks == 1 and mesh.tensor.size > 1:
        if shares_modules(engine.module):  # otherwise `fitting.warn_of_undivided` has said what is wrong
            told.append(
                f"All {mesh.world.size} ranks share the same modules, and a stage has no others to divide over: every "
                f"stage is the same here. Trainer(devices={2 * mesh.world.size}) or more divides"
            )
    elif data_ranks == 1:
        told.append("One rank divides nothing: every stage is the same here. Trainer(devices=2) or more divides")
    elif options.replicate_size == data_ranks:
        told.append(
            f"replicate_size={options.replicate_size} is all ranks: nothing is sharded. Leave it out, or lower it"
        )
    elif engine.partition.optimizer and here >= ddp:
        told.append(
            f"The model is so small that buckets outweigh what is saved: ddp takes {sized(ddp)}, this {sized(here)}"
        )
    moved = any(tier in category for category in expected.here for tier in ("(host)", "(disk)"))
    if options.offload is not None and not moved:
        on = "the model is in host memory already" if engine.device.type == "cpu" else "nothing that it names is here"
        told.append(f"Offload moves nothing: {on}")
    return told


def _offload_lines(engine: Engine) -> list[str]:
    """Returns what is offloaded, where to, and how it is stepped."""
    offload = engine.options.offload
    if offload is None:
        return []
    kept = {"cpu": "in host memory", "nvme": f"on disk ({offload.path})"}
    lines = []
    if offload.parameters is not None:
        lines.append(f"Parameters are kept {kept[offload.parameters]} between uses")
    if offload.optimizer is not None:
        groups = [(optimizer, group) for optimizer in engine.optimizers for group in optimizer.param_groups]
        is_open = any(may_fuse(optimizer, group) for optimizer, group in groups)
        fuses = is_open and engine.parts.setting.places.steps_on_host
        kernel = "torch's fused kernel" if fuses else "the optimizer's own kernels"
        when = "when its values are wanted"
        if engine.options.step_in_backward:
            when = "in backward"
        elif engine.runner.stepping.serial_because:
            when = f"in each call of step: {engine.runner.stepping.serial_because}"
        dtype = offload.state_torch_dtype
        narrow = "" if dtype is None else f", rounded to {dtype}"
        lines.append(
            f"Optimizer state of {_offloaded_numel(engine):,} elements is kept {kept[offload.optimizer]}{narrow}, and "
            f"is stepped by {kernel}, {when}"
        )
        betas = {beta for _, group in groups for beta in group.get("betas", ())}
        # ``beta * average`` of these may be rounded up to the average again.
        stuck = sorted(beta for beta in betas if dtype is not None and 1 - beta <= torch.finfo(dtype).eps / 2)
        if stuck:
            lines.append(f"Averages with beta {', '.join(map(str, stuck))} cannot fall there: write 0.99 or less")
    return lines


def _offloaded_numel(engine: Engine) -> int:
    """Returns the number of elements whose optimizer state is offloaded."""
    return sum(slot.numel for group in engine.groups if group.kind.is_offloaded for slot in group.slots)


def _would_hide_in_backward(engine: Engine) -> bool:
    """Whether an offloaded step, which waits for the next forward, could be taken in backward."""
    return (
        _offloaded_numel(engine) > 0
        and not engine.runner.stepping.serial_because
        and engine.partition.gradient
        and len(engine.optimizers) == 1
        and engine.regrouping.imbalance is None  # whole tensors are exchanged after backward
        and not engine.options.step_in_backward
    )


def told_of_whole(module: Module, builder: str) -> str | None:
    """Returns what to say of a large model that is to rest as shards, and that every rank has built whole; `builder`
    would have built it in shards."""
    nbytes = sum(parameter.nbytes for parameter in module.parameters() if early_of(parameter) is None)
    if nbytes <= WORTH_TELLING:
        return None
    return f"{nbytes / 1e9:.1f} GB of the model are whole on every rank first: what {builder} builds never is"


def _recompute_lines(engine: Engine) -> list[str]:
    """Returns which blocks recompute, and where their inputs are kept."""
    policy = engine.options.activation_checkpointing
    if policy is None or engine.parts.recompute is None:
        return []
    kept = "in host memory" if policy.offload else "on the device"
    how = (", each rank's part of it" if policy.partition else "") + (", in one array" if policy.contiguous else "")
    blocks = engine.parts.recompute.chosen.blocks
    return [
        f"{len(blocks)} blocks ({blocks[0]}, ...) compute activations again in backward; "
        f"their input is kept {kept}{how}"
    ]


def plans_for(numel: int, stages: Sequence[int], **setting: Any) -> dict[str, Mapping[str, int]]:
    """Returns bytes by category under ``"ddp"``, ``"stage 1"`` and so on.

    `setting` has arguments of `states_of`, which may raise ValueError. Where stages are compared, those below 3 offload
    no parameters.
    """
    common = {name: setting[name] for name in ("precision", "state_tensors", "averages") if name in setting}
    offload: Offload | None = setting.pop("offload", None)
    plans = {DDP: states_under_ddp(numel, **common)}
    for stage in stages:
        here = offload
        if offload is not None and len(stages) > 1 and not STAGES[stage].parameter:
            here = Offload(optimizer=offload.optimizer, path=offload.path if offload.optimizer == "nvme" else None)
        plans[f"stage {stage}"] = states_of(numel, stage=stage, offload=here, **setting)
    return plans


def plan_text(numel: int, stages: Sequence[int], **setting: Any) -> str:
    """Returns a table of `plans_for`, and notes on what it leaves out."""
    plans = plans_for(numel, stages, **setting)
    precision = setting.get("precision", "32-true")
    head = f"{numel:,} parameters, {setting['ranks']} ranks, {precision}"
    beside = (
        "Beside these: a few buckets of at most 25 MiB, at stage 3 room for two of the largest units, and "
        "activations, which no stage divides. "
    )
    if precision.endswith("-mixed"):
        beside += "Under *-mixed all weights count as those of Linear and Conv; others stay in 4 bytes. "
    beside += "The table at the start of fit has the true numbers."
    return "\n  ".join([head, *bytes_table(numel, **plans), *wrapped(beside)])
