"""Writes a rehearsal as a page: one file, which needs no network and nothing beside a browser.

`page.html` has a place for each of what is made here. Bars, the course of memory and tables are plain HTML and SVG, and
can be read without scripts. `page.js` tells what is at a place of the course, and lays out the lanes, of which it draws
what is in view: a step may have thousands of uses.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lightning_zero.pl.table import ranks_told, sized
from lightning_zero.rehearsal.comparison import COLOURS, OTHER, Comparison, Scaled, in_order
from lightning_zero.rehearsal.cost import Lane, Rates, Span
from lightning_zero.rehearsal.memory import Phase, phases_of
from lightning_zero.rehearsal.rehearsal import Rehearsal
from lightning_zero.run.program import Program

ABOVE = 1.1  # how much higher than its highest value a drawing is
FAR = 4  # a device that has more than so many times what is shown is told of, and not drawn
HEIGHT = 1000  # of a drawing, in its own units
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
# What the lanes' rows are called. What takes the device no time has a row of its own, or it would be hidden by work.
ROWS = ("compute", "at once", "link", "host")


def write_page(path: str | os.PathLike[str], shown: Comparison, name: str) -> None:
    """Writes the page of a model called `name` to the file `path`, which is overwritten. Raises OSError if it cannot be
    written."""
    Path(path).write_text(page_of(shown, name), encoding="utf-8")


def page_of(shown: Comparison, name: str) -> str:
    """Returns the page as HTML; see `write_page`."""
    chosen, room = shown.chosen, files(__package__)
    html, css, js = (room.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    return Template(html).substitute(
        css=css,
        js=js,
        name=escape(name),
        strategy=escape(chosen.strategy),
        ranks=ranks_told(chosen.ranks),
        rank=chosen.rank,
        numel=f"{chosen.numel:,}",
        most=sized(chosen.peak.nbytes),
        has="" if chosen.device_bytes is None else f", and the device has {sized(chosen.device_bytes)}",
        height=HEIGHT,
        printed=escape(str(chosen)),
        program=escape(str(chosen.program)),
        data=json.dumps(data_of(chosen), separators=(",", ":")).replace("<", "\\u003c"),  # no name may end the element
        **_peaks(shown),
        **_course(chosen),
        **_growth(shown.growth),
        **_lanes(chosen),
    )


# -- bytes by category


def _peaks(shown: Comparison) -> dict[str, str]:
    """Returns a bar for each stage, and the same as a table."""
    totals = {name: one.peak.nbytes for name, one in shown.stages.items()}
    limit = shown.chosen.device_bytes
    is_near = limit is not None and limit <= FAR * max(totals.values())
    full = max(*totals.values(), limit if limit is not None and is_near else 0, 1)
    bars = "".join(
        f"<p{' class=chosen' if one is shown.chosen else ''}><span>{escape(name)}</span>"
        f"<span>{sized(totals[name])}</span></p>"
        f'<div class="bar" aria-hidden="true">{_segments(one.peak.device, shown.categories, full)}'
        + (f'<b style="left:{100 * limit / full:.3f}%"></b>' if limit is not None and is_near else "")
        + "</div>"
        for name, one in shown.stages.items()
    )
    has = "" if limit is None else f" The device has {sized(limit)}{' (dashed)' if is_near else ''}."
    rows = [
        [name, *(sized(one.peak.device.get(name, 0)) for one in shown.stages.values())] for name in shown.categories
    ]
    rows.append(["all", *map(sized, totals.values())])
    table = _table(["on the device", *totals], rows)
    return {"limit": has, "bars": bars, "peaks_legend": _legend(shown.categories), "peaks_table": table}


def _segments(device: Mapping[str, int], categories: Sequence[str], full: int) -> str:
    return "".join(
        f'<i style="width:{100 * device[name] / full:.3f}%;background:{COLOURS.get(name, OTHER)}" '
        f'title="{escape(name)}: {sized(device[name])}"></i>'
        for name in categories
        if device.get(name)
    )


def _legend(categories: Iterable[str]) -> str:
    items = (f'<li><i style="background:{COLOURS.get(name, OTHER)}"></i>{escape(name)}</li>' for name in categories)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


# -- bytes over the step


def _course(chosen: Rehearsal) -> dict[str, Any]:
    """Returns bytes by category, stacked, from the first place in the step to the last."""
    course, most = chosen.course, ABOVE * max([1, *(one.nbytes for one in chosen.course)])
    names = in_order(name for one in course for name in one.device)
    axis, lines = _scale(most, len(course), sized)
    # What lies on top is drawn first, down to the ground, and what lies below is drawn over it.
    areas = "".join(
        f'<path d="{_outline([sum(one.device.get(each, 0) for each in names[: at + 1]) for one in course], most)}" '
        f'fill="{COLOURS.get(names[at], OTHER)}"/>'
        for at in reversed(range(len(names)))
    )
    bands = "".join(
        f'<span class="{phase}" style="left:{100 * begin / len(course):.3f}%;'
        f'width:{100 * (end - begin) / len(course):.3f}%">{phase}</span>'
        for phase, begin, end in _stretches([one.phase for one in course])
    )
    return {
        "course_legend": _legend(names),
        "course_axis": axis,
        "course_phases": bands,
        "course_areas": lines + areas,
        "course_width": max(1, len(course)),
        "course_last": max(0, len(course) - 1),
        "course_top": max(range(len(course)), key=lambda at: course[at].nbytes, default=0),
    }


def _up(value: float, most: float) -> int:
    return round(HEIGHT - HEIGHT * value / most)


def _outline(heights: Sequence[int], most: float) -> str:
    """Returns the path of an area with steps; heights that do not change need no letters."""
    path, before = [f"M0,{HEIGHT}"], HEIGHT
    for at, height in enumerate(heights):
        if (up := _up(height, most)) != before:
            path.append(f"H{at}V{up}")
            before = up
    return "".join(path) + f"H{len(heights)}V{HEIGHT}Z"


def _scale(most: float, width: int, told: Callable[[float], str]) -> tuple[str, str]:
    """Returns three to six round numbers up to `most`, which is more than zero, and a line across a drawing at each."""
    power = 10.0 ** math.floor(math.log10(most))
    every = next(step * power for step in (0.2, 0.5, 1, 2) if most / (step * power) < 6)
    marks = [every * at for at in range(1, int(most / every) + 1)]
    axis = "".join(f'<span style="bottom:{100 * mark / most:.2f}%">{told(mark)}</span>' for mark in marks)
    lines = "".join(
        f'<path d="M0,{_up(mark, most)}H{width}" stroke="var(--line)" vector-effect="non-scaling-stroke"/>'
        for mark in marks
    )
    return axis, lines


def _stretches(phases: Sequence[Phase]) -> list[tuple[Phase, int, int]]:
    """Returns where each phase begins and ends; with micro-batches there are several of one kind."""
    begins = [at for at, phase in enumerate(phases) if at == 0 or phases[at - 1] is not phase]
    return [
        (phases[begin], begin, end) for begin, end in zip(begins, [*begins[1:], len(phases)], strict=True) if phases
    ]


# -- on more ranks and fewer


def _growth(growth: Sequence[Scaled]) -> dict[str, str]:
    """Returns bytes, seconds and, where the device is known, throughput by the number of ranks."""
    panels = {
        "most bytes on the device": _by_ranks({one.ranks: one.rehearsal.peak.nbytes for one in growth}, sized),
        "seconds per step, modelled": _by_ranks({one.ranks: one.seconds for one in growth}, _digits),
    }
    head = ["ranks", "on the device", "s/step (model)"]
    rows = [[f"{one.ranks:,}", sized(one.rehearsal.peak.nbytes), _digits(one.seconds)] for one in growth]
    grown = {one.ranks: one.throughput for one in growth if one.throughput is not None}
    told = ""
    if grown:
        panels["batches per second of a rank that has filled its device, modelled"] = _by_ranks(grown, _digits)
        head += ["batches that fit", "batches/s of a rank (model)"]
        for row, one in zip(rows, growth, strict=True):
            row += ["-" if one.throughput is None else _digits(each or 0) for each in (one.batches, one.throughput)]
        told = (
            " Memory that more ranks free can hold a larger batch, so that less of a step is sending: then each rank "
            "does more in a second, and the run grows faster than its ranks. In this model what forward and backward "
            "make, and their work, grow as the batch does, and a tenth of the device stays free."
        )
    drawn = "".join(f"<div><h3>{title}</h3>{panel}</div>" for title, panel in panels.items())
    return {"panels": drawn, "filled": told, "growth_table": _table(head, rows)}


def _digits(value: float) -> str:
    return f"{value:.3g}"


def _by_ranks(values: Mapping[int, float], told: Callable[[float], str]) -> str:
    """Returns a line over the number of ranks, which doubles from step to step of the axis."""
    most = ABOVE * max(values.values()) or 1
    first, last = math.log2(min(values)), math.log2(max(values))
    places = {ranks: (math.log2(ranks) - first) / max(1, last - first) for ranks in values}
    axis, lines = _scale(most, HEIGHT, told)
    line = "L".join(f"{round(HEIGHT * places[ranks])},{_up(value, most)}" for ranks, value in values.items())
    dots = "".join(
        f'<i style="left:{100 * places[ranks]:.2f}%;bottom:{100 * value / most:.2f}%" '
        f'title="{ranks_told(ranks)}: {told(value)}"></i>'
        for ranks, value in values.items()
    )
    ranks_axis = "".join(f'<span style="left:{100 * places[ranks]:.2f}%">{ranks:,}</span>' for ranks in values)
    return (
        f'<div class="chart small" aria-hidden="true"><div class="axis">{axis}</div><div class="plot">'
        f'<svg viewBox="0 0 {HEIGHT} {HEIGHT}" preserveAspectRatio="none">{lines}<path d="M{line}" fill="none" '
        f'stroke="var(--accent)" stroke-width="2" vector-effect="non-scaling-stroke"/></svg>{dots}</div>'
        f'<div class="below ranks">{ranks_axis}</div></div>'
    )


# -- lanes


def _lanes(chosen: Rehearsal) -> dict[str, str]:
    timing = chosen.timing()
    seconds = {
        "a step": timing.seconds,
        "computing": timing.compute,
        "sending": timing.sent,
        "moving to and from the host": timing.moved,
        "waiting": timing.waited,
    }
    table = _table(["modelled", "seconds"], [[name, _digits(each)] for name, each in seconds.items()])
    rates = "the rates of about an A100" if chosen.rates == Rates() else escape(str(chosen.rates))
    return {"rates": rates, "seconds_table": table}


def data_of(chosen: Rehearsal) -> dict[str, Any]:
    """Returns what the script reads. Times are in ns, `names` and `phases` are referred to by their numbers."""
    program, timing = chosen.program, chosen.timing()
    numbers: dict[str, int] = {}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    uses = [name.strip() for name in program.names]
    rows: dict[str, list[list[int]]] = {row: [] for row in ROWS}
    for span in timing.spans:
        op = None if span.op is None else program.ops[span.op]
        name = uses[span.use] if op is None else program.told([op])
        waiting = -1 if op is None or op.by is None else number(uses[op.by])
        times = [round(span.begin * 1e9), round(span.end * 1e9)]
        on_device = "compute" if op is None else "at once"
        rows[on_device if span.lane is Lane.DEVICE else span.lane].append([*times, number(name), span.nbytes, waiting])
    categories = in_order(name for one in chosen.course for name in one.device)
    course = [
        [PHASES.index(one.phase), number(one.place), [one.device.get(name, 0) for name in categories]]
        for one in chosen.course
    ]
    return {
        "ns": round(timing.seconds * 1e9),
        "phases": PHASES,
        "parts": _parts(program, timing.spans, timing.seconds),
        "rowNames": list(ROWS),
        "rows": list(rows.values()),
        "categories": categories,
        "course": course,
        "names": list(numbers),
    }


def _parts(program: Program, spans: Iterable[Span], seconds: float) -> list[list[int]]:
    """Returns the phases of the step: number, begin and end in ns."""
    begins: dict[int, float] = {}  # of what begins first at each use
    for span in spans:
        begins[span.use] = min(span.begin, begins.get(span.use, span.begin))
    times = [*(round(begins[use] * 1e9) for use in range(len(program.uses))), round(seconds * 1e9)]
    return [[PHASES.index(phase), times[begin], times[end]] for phase, begin, end in _stretches(phases_of(program))]
