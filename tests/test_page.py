"""The page of a rehearsal: one file that needs no network, with the numbers of the rehearsal, whatever modules are
called."""

import itertools
import json
import re
import shutil
import subprocess
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import rehearsal_jobs
from lightning_zero import cli
from lightning_zero.pl.table import sized
from lightning_zero.rehearsal.comparison import Comparison, compare
from lightning_zero.rehearsal.cost import Rates, Work
from lightning_zero.rehearsal.memory import Moment, Phase
from lightning_zero.rehearsal.page import page_of
from lightning_zero.rehearsal.rehearsal import rehearse
from lightning_zero.run.program import Cause, Kind, Op, Program, UnitFacts, Use

HOSTILE = '</script><script>alert("1")</script><b title=\'&amp;'
VOID = {"meta", "input", "br"}
STRATEGY = {"stage": 3, "units": "modules", "offload": {"optimizer": "nvme", "path": "."}}


class Named(rehearsal_jobs.Model):
    """A model with a module that is called like HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(OrderedDict({name: rehearsal_jobs.Block() for name in ("first", HOSTILE)}))


class Page(HTMLParser):
    """What stands on a page. A tag that is closed out of turn is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {}  # by the tag that they stand in
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    @property
    def data(self) -> Any:
        return json.loads(self.texts["script"][0])

    @property
    def script(self) -> str:
        return self.texts["script"][1]


@pytest.fixture(scope="module")
def shown() -> Comparison:
    setting: dict[str, Any] = {"ranks": 4, "device_bytes": 5 * 10**6}
    chosen = rehearse(Named, rehearsal_jobs.batch_of, STRATEGY, **setting)
    return compare(Named, rehearsal_jobs.batch_of, STRATEGY, chosen, **setting)


@pytest.fixture(scope="module")
def text(shown: Comparison) -> str:
    return page_of(shown, f"models:{HOSTILE}")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_it_is_one_file_and_asks_no_server_for_anything(text: str, page: Page) -> None:
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    assert not {name for _, name, _ in page.attributes} & {"src", "href", "srcset", "action", "data"}
    assert not {name for _, name, _ in page.attributes if name.startswith("on")}


def test_names_are_text_whatever_they_are(text: str, page: Page) -> None:
    """That tags are balanced is seen by the parser; a name that is markup would be a third script, or bold."""
    assert page.tags["script"] == 2
    assert page.tags["b"] == sum((tag, name) == ("b", "style") for tag, name, _ in page.attributes)
    assert HOSTILE in "".join(page.texts["h1"])
    assert any(HOSTILE in name for name in page.data["names"])
    assert HOSTILE in "".join(page.texts["pre"])
    assert text.count("<script>") == 1


def test_every_element_that_the_script_asks_for_is_there_once(page: Page) -> None:
    ids = Counter(value for _, name, value in page.attributes if name == "id")
    assert set(ids.values()) == {1}
    called = re.findall(r'(?:find|getElementById)\("([\w-]+)"\)', page.script)
    listed = re.findall(r'\[("[\w", -]+")\]\.map\(find\)', page.script)
    wanted = {*called, *re.findall(r'"([\w-]+)"', " ".join(listed))}
    assert wanted == set(ids)


def test_bytes_are_those_of_the_rehearsals(shown: Comparison, page: Page) -> None:
    cells = page.texts["td"]
    for name in shown.categories:
        row = [sized(one.peak.device.get(name, 0)) for one in shown.stages.values()]
        assert any(cells[at : at + len(row)] == row for at in range(len(cells))), name
    found, chosen = page.data, shown.chosen
    assert len(found["course"]) == len(chosen.course)
    for (phase, place, nbytes), one in zip(found["course"], chosen.course, strict=True):
        assert (found["phases"][phase], found["names"][place]) == (one.phase, one.place)
        assert {name: each for name, each in zip(found["categories"], nbytes, strict=True) if each} == one.device
    assert max(one.nbytes for one in chosen.course) == max(
        chosen.peaks[phase].nbytes for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
    )


def test_growth_is_told_for_each_number_of_ranks(shown: Comparison, page: Page) -> None:
    cells = page.texts["td"]
    for one in shown.growth:
        assert one.batches is not None
        row = [sized(one.rehearsal.peak.nbytes), f"{one.seconds:.3g}", f"{one.batches:.3g}", f"{one.throughput:.3g}"]
        assert any(cells[at : at + len(row)] == row for at in range(len(cells))), one.ranks
    dots = [value for tag, name, value in page.attributes if (tag, name) == ("i", "title") and "rank" in value]
    told = [f"{one.seconds:.3g}" for one in shown.growth]
    assert [dot.rpartition(": ")[2] for dot in dots][len(told) : 2 * len(told)] == told


def test_bars_are_as_long_as_what_they_stand_for(shown: Comparison, page: Page) -> None:
    widths = [
        float(re.findall(r"width:([\d.]+)%", value)[0])
        for tag, name, value in page.attributes
        if (tag, name) == ("i", "style") and "width" in value
    ]
    device_bytes = shown.chosen.device_bytes
    assert device_bytes is not None
    longest = max(device_bytes, *(one.peak.nbytes for one in shown.stages.values()))
    nbytes = [
        one.peak.device[name] for one in shown.stages.values() for name in shown.categories if name in one.peak.device
    ]
    assert widths == [pytest.approx(100 * each / longest, abs=1e-3) for each in nbytes]


def test_every_use_and_op_of_the_program_is_on_its_lane_when_the_model_of_time_says(
    shown: Comparison, page: Page
) -> None:
    found, program = page.data, shown.chosen.program
    timing = shown.chosen.timing(Rates())
    assert found["ns"] == round(timing.seconds * 1e9)
    rows = dict(zip(found["rowNames"], found["rows"], strict=True))

    def named(row: str) -> list[str]:
        return [found["names"][span[2]] for span in rows[row]]

    assert named("compute") == [name.strip() for name in program.names]
    assert sum(map(len, rows.values())) == len(program.uses) + len(program.ops)
    told = Counter(program.told([op]) for op in program.ops)
    assert Counter(named("at once") + named("link") + named("host")) == told
    assert Counter(named("host")) == Counter(
        program.told([op]) for op in program.ops if op.kind in (Kind.FETCH, Kind.PUT)
    )
    assert rows["host"]
    assert sum(span[3] for span in rows["link"]) == program.bytes_sent
    assert sum(span[1] - span[0] for span in rows["compute"]) == pytest.approx(timing.compute * 1e9, abs=len(told))
    for spans in rows.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    parts = [(found["phases"][phase], begin, end) for phase, begin, end in found["parts"]]
    assert [phase for phase, *_ in parts] == ["forward", "backward", "step"]
    assert [parts[0][1], parts[-1][2]] == [0, found["ns"]]


def test_it_says_by_whose_rates_times_are_modelled(shown: Comparison, text: str) -> None:
    measured = Rates(flops=3e12)
    other = page_of(replace(shown, chosen=replace(shown.chosen, rates=measured)), "measured")
    assert ("about an A100" in text, "about an A100" in other) == (True, False)
    assert str(measured) in other


def test_what_is_printed_stands_on_it(shown: Comparison, page: Page) -> None:
    assert page.texts["pre"] == [str(shown.chosen), str(shown.chosen.program)]


def test_a_model_that_tensor_parallel_ranks_divide_is_divided_at_every_stage() -> None:
    """Ranks that the strategy cannot be on are left out."""
    strategy, setting = {"stage": 2, "tensor_parallel_size": 2}, {"ranks": 4, "steps": 1}
    chosen = rehearse(rehearsal_jobs.Divided, rehearsal_jobs.batch_of, strategy, **setting)
    found = compare(rehearsal_jobs.Divided, rehearsal_jobs.batch_of, strategy, chosen, **setting)
    assert {one.numel for one in found.stages.values()} == {chosen.numel}
    assert list(found.stages) == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert found.stages["stage 2"] is chosen
    assert [one.ranks for one in found.growth] == [4, 8, 64, 1024]


def test_the_command_line_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.html"
    arguments = ["rehearsal_jobs:Model", "--batch", "4x16:int64", "--ranks", "2", "--html", str(out)]
    assert cli.main(["rehearse", *arguments]) == 0
    assert str(out) in capsys.readouterr().out
    assert "What a step of rehearsal_jobs:Model takes" in Page(out.read_text()).texts["h1"]


# --- the script

has_node = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's script here")
DOM = Path(__file__).parent / "page_dom.js"


def opened(page: Page, *events: tuple[str, str, dict[str, Any]], width: int = 1000) -> Any:
    """What the page shows in a browser after the events, in as much of one as the script asks for."""
    given = {"script": page.script, "data": page.texts["script"][0], "width": width, "events": events}
    done = subprocess.run(["node", DOM], input=json.dumps(given), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def pressed(*keys: str) -> Iterable[tuple[str, str, dict[str, Any]]]:
    return [("view", "keydown", {"key": key}) for key in keys]


@has_node
def test_lanes_are_drawn_without_overlap_and_names_appear_when_there_is_room(page: Page) -> None:
    whole, near = opened(page), opened(page, *[("nearer", "click", {})] * 5)
    assert whole["rows"] == ["compute", "at once", "link", "host"]
    assert float(near["strip"]["width"][:-2]) == 32 * float(whole["strip"]["width"][:-2])
    assert any(block["text"].startswith("unshard") for block in near["blocks"])
    for found in (whole, near):
        tops = {block["top"] for block in found["blocks"] if block["className"].startswith("block")}
        for top in tops:
            row = [
                (float(one["left"][:-2]), float(one["width"][:-2])) for one in found["blocks"] if one.get("top") == top
            ]
            assert all(left + width <= after + 3.01 for (left, width), (after, _) in itertools.pairwise(row))


@has_node
def test_keys_go_from_one_to_the_next_and_tell_what_it_is(shown: Comparison, page: Page) -> None:
    names = shown.chosen.program.names
    found = opened(page, *pressed("ArrowRight", "ArrowRight"))
    assert found["lanes"].startswith(f"compute: {names[2].strip()}; begins at ")
    assert opened(page, *pressed("End"))["lanes"].startswith("compute: stepped;")
    assert opened(page, *pressed("ArrowDown", "ArrowDown", "ArrowDown"))["lanes"].startswith("host: fetch")
    assert sum("here" in block["className"] for block in found["blocks"]) == 1


@has_node
def test_a_place_of_the_course_is_told_with_what_is_there(shown: Comparison, page: Page) -> None:
    course = shown.chosen.course
    first = opened(page, ("course-plot", "pointermove", {"clientX": 0.5}))["course"]
    assert first.startswith(f"{course[0].phase}, {course[0].place}: {sized(course[0].nbytes)} (")
    at = max(range(len(course)), key=lambda number: course[number].nbytes)
    most = opened(page, ("course-at", "input", {"value": str(at)}))["course"]
    assert most.startswith(f"{course[at].phase}, {course[at].place}: {sized(course[at].nbytes)} (")
    for name, nbytes in course[at].device.items():
        assert f"{name} {sized(nbytes)}" in most


@pytest.fixture(scope="module")
def long_page(shown: Comparison) -> str:
    """Of a step with 6000 uses of units, and as many gathers."""
    facts = replace(
        shown.chosen.program.facts, units=tuple(UnitFacts(name=f"layers.{at}", groups=(0,)) for at in range(3000))
    )
    there = [Use(Cause.UNIT, at) for at in range(3000)]
    uses = (Use(Cause.FORWARD), *there, Use(Cause.BACKWARD), *reversed(there), Use(Cause.STEP))
    ops = tuple(
        Op(Kind.UNSHARD, use.number, at=at, by=at, nbytes=10**6)
        for at, use in enumerate(uses)
        if use.cause is Cause.UNIT
    )
    work = {at: Work(flops=10**10, nbytes=10**7) for at in range(len(uses))}
    course = tuple(
        Moment(Phase.FORWARD, f"layers.{at}", {"parameter": 10**9, "activations": at * 10**6}, {}, {})
        for at in range(6000)
    )
    chosen = replace(shown.chosen, program=Program(facts, uses, ops), work=work, course=course)
    return page_of(replace(shown, chosen=chosen), "large")


def test_a_step_of_thousands_of_uses_is_a_page_of_a_few_megabytes(long_page: str) -> None:
    assert len(long_page) < 3 * 10**6


@has_node
def test_of_thousands_of_uses_no_more_is_drawn_than_can_be_seen(long_page: str) -> None:
    page = Page(long_page)
    for events in ([], [("nearer", "click", {})] * 8):
        blocks = [one for one in opened(page, *events)["blocks"] if one["className"].startswith("block")]
        assert 2 < len(blocks) < 2 * 1000 / 3 + 10
