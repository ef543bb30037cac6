"""What a run tells of itself, and what tells jobs apart."""

import io
import sys
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_zero.sweeps import summary
from lightning_zero.sweeps.summary import (
    SUMMARY,
    collect,
    distinct_labels,
    open_summary,
    read_summary,
    update_summary,
    write_summary,
)


def test_labels_hold_what_tells_jobs_apart():
    overrides = [["strategy=ddp", "seed=1"], ["strategy=zero2", "seed=1"]]
    assert distinct_labels(overrides) == ["strategy=ddp", "strategy=zero2"]
    assert distinct_labels([["seed=1"]]) == ["#0"]
    assert distinct_labels([["a=1", "b=1"], ["a=1", "b=2"], ["a=2", "b=2"]]) == ["a=1 b=1", "a=1 b=2", "a=2 b=2"]


def test_a_summary_is_replaced_in_one_move(tmp_path):
    write_summary(tmp_path, {"loss": 1.0})
    update_summary(tmp_path, loss=0.5, note="x")
    assert read_summary(tmp_path) == {"loss": 0.5, "note": "x"}
    assert [path.name for path in tmp_path.iterdir()] == [SUMMARY]


def test_a_summary_may_be_the_first_file_of_its_folder_and_holds_any_value_as_text(tmp_path):
    open_summary(tmp_path / "a" / "b", 3, ["x=1"])
    assert read_summary(tmp_path / "a" / "b") == {"job": 3, "overrides": ["x=1"], "status": "running"}
    update_summary(tmp_path / "a" / "b", best=Path("best.ckpt"))
    assert read_summary(tmp_path / "a" / "b")["best"] == "best.ckpt"


@pytest.mark.parametrize("content", ["{}", "[1]", "not JSON", '{"loss": 1.0}', '{"job": 7, "status": "done"}'])
def test_other_programs_files_of_that_name_are_passed_over(content, tmp_path):
    write_summary(tmp_path / "0", {"job": 0, "status": "finished", "overrides": []})
    (tmp_path / "0" / "wandb").mkdir()
    (tmp_path / "0" / "wandb" / SUMMARY).write_text(content)
    assert [job["folder"] for job in collect(tmp_path)] == ["0"]


def test_the_picture_shows_activations_among_the_bytes_hatched_where_they_are_on_the_host():
    jobs = [
        {"parameter": 2.0, "activation checkpoint": 3.0},
        {"parameter": 2.0, "activation checkpoint": 0.0, "activation checkpoint (host)": 3.0},
    ]
    panel = Figure().subplots()
    measure = next(one for row in summary.MEASURES for one in row if one.key == "memory_bytes")
    summary._draw_bars(panel, measure, [{"memory_bytes": parts} for parts in jobs], [])
    shown = {bars.get_label(): [bar.get_width() for bar in bars] for bars in panel.containers}
    assert shown == {
        "parameter": [2.0, 2.0],
        "activation checkpoint": [3.0, 0.0],
        "activation checkpoint (host)": [0.0, 3.0],
    }
    assert [text.get_text() for text in panel.get_legend().get_texts()] == list(shown)
    device, host = (bars.patches[0] for bars in panel.containers[1:])
    assert device.get_facecolor() == host.get_facecolor()
    assert (device.get_hatch(), host.get_hatch()) == (None, "///")


def test_jobs_stand_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 2, None, 9):  # None: a run of its own, in a folder of the sweep
        write_summary(tmp_path / f"{number}", {"job": number, "status": "finished", "overrides": []})
    assert [one["job"] for one in collect(tmp_path)] == [2, 9, 10, None]


def test_jobs_of_the_same_number_stand_in_the_order_of_their_folders(tmp_path):
    for name in "abcdefgh":
        write_summary(tmp_path / name, {"job": 0, "status": "finished", "overrides": []})
    assert [one["folder"] for one in collect(tmp_path)] == list("abcdefgh")


def test_overrides_stand_in_the_csv_as_a_shell_takes_them(tmp_path):
    summary.write_csv([{"job": 0, "overrides": ["strategy=ddp", "model.name=a b"]}], tmp_path / "sweep.csv")
    assert (tmp_path / "sweep.csv").read_text().splitlines() == ["job,overrides", "0,strategy=ddp 'model.name=a b'"]


# --- what is shown


def job(number, strategy, **values):
    own = {"job": number, "status": "finished", "overrides": [f"strategy={strategy}"], "seconds": 7.0}
    kind = {"strategy_class": "DDPStrategy" if strategy == "ddp" else "ZeroStrategy"}
    return own | kind | values


FULL = {
    "loss": 2.5,
    "seconds_per_step": 0.5,
    "memory_bytes": {"parameter": 4e6, "gradient": 0, "optimizer state": 8e6},
    "peak_resident_bytes": 5e8,
    "wire_bytes_per_step": 4e6,
    "parameters": 1_000_000,
    "world_size": 2,
}


def titles(jobs, tmp_path, monkeypatch):
    """Of the panels of the picture, and all that is written in it."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    summary.draw(jobs, distinct_labels([job["overrides"] for job in jobs]), tmp_path / "sweep.png")
    (figure,) = drawn
    texts = [text.get_text() for panel in figure.axes for text in panel.texts]
    return figure.get_suptitle(), [panel.get_title() for panel in figure.axes if isinstance(panel, Axes)], texts


def test_the_picture_has_a_title_ratios_to_ddp_and_time_against_memory(tmp_path, monkeypatch):
    zero = {**FULL, "seconds_per_step": 0.55, "memory_bytes": {"parameter": 4e6, "optimizer state": 2e6}}
    title, panels, texts = titles([job(0, "ddp", **FULL), job(1, "zero2", **zero)], tmp_path, monkeypatch)
    assert title == "1,000,000 parameters on 2 ranks"
    assert panels == [
        "validation loss",
        "seconds per step",
        "at rest on rank 0, MB",
        "sent per step by rank 0, MB",
        "time against memory",
    ]
    assert {"0.55  (1.10 x ddp)", "6  (0.50 x ddp)", "4  (1.00 x ddp)"} <= set(texts)
    assert texts.count("#1") == 1


def test_jobs_are_compared_with_the_ddp_job_of_the_same_other_overrides():
    jobs = [job(n, strategy) for n, strategy in enumerate(("zero2", "ddp", "zero2", "ddp"))]
    for number, one in enumerate(jobs):
        own = [] if number % 2 else ["+strategy.stage=1", "++strategy.prefetch=2"]  # ddp has no such argument
        one["overrides"] = [*one["overrides"], f"data.batch_size={8 if number < 2 else 16}", *own]
    assert summary.baselines_of(jobs) == [1, 1, 3, 3]
    jobs[1]["status"] = "failed"
    assert summary.baselines_of(jobs) == [None, None, 3, 3]


@pytest.mark.parametrize(
    ("values", "panels", "columns"),
    [
        ({"return_value": 0.25}, ["value that the job returned", "seconds of the whole job"], ["returned", "seconds"]),
        ({"return_value": None}, ["seconds of the whole job"], ["seconds"]),
        (
            {"return_value": [1, 2], "metrics": {"val_loss": 3.0}},
            ["val_loss", "seconds of the whole job"],
            ["val_loss"],
        ),
    ],
)
def test_what_nothing_reports_is_not_shown(values, panels, columns, tmp_path, monkeypatch, capsys):
    jobs = [job(0, "ddp", **values), job(1, "zero2", **values)]
    assert titles(jobs, tmp_path, monkeypatch)[1] == panels
    monkeypatch.setenv("COLUMNS", "120")
    summary.print_table(jobs, ["a", "b"])
    printed = capsys.readouterr().out
    assert all(column in printed for column in columns)
    assert "sent" not in printed
    assert "at rest" not in printed


@pytest.mark.parametrize("others", [{"loss": 0.5}, {"loss": float("nan")}, {}], ids=["a number", "NaN", "nothing"])
def test_a_job_that_has_diverged_is_told_so_and_not_as_one_that_has_reported_nothing(
    others, tmp_path, monkeypatch, capsys
):
    texts = []
    monkeypatch.setattr(Axes, "bar_label", lambda panel, bars, told, **_: texts.append(told))
    write_summary(tmp_path / "0", job(0, "ddp", loss=float("nan")))
    write_summary(tmp_path / "1", job(1, "zero2", **others))
    write_summary(tmp_path / "2", job(2, "zero3", loss=float("inf")))
    summary.report(collect(tmp_path), tmp_path)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert "loss" in rows[0]
    column = rows[0].index("loss")
    assert [row[column] for row in rows[1:]] == ["nan", {0.5: "0.5"}.get(others.get("loss"), "nan" if others else "-")]
    told = {0.5: "0.5"}.get(others.get("loss"), "nan" if others else "not reported")
    assert texts[0] == ["nan", told, "inf"]


def test_a_metric_that_is_a_tensor_is_a_number(tmp_path):
    """As `trainer.callback_metrics` has them, and as the job returns one to the sweeper."""
    values = {"return_value": torch.tensor(0.5), "metrics": {"val_loss": numpy.float32(0.25)}, "count": numpy.int64(3)}
    update_summary(tmp_path, **values, weights=torch.ones(2), path=tmp_path)
    assert read_summary(tmp_path) == {
        "return_value": 0.5,
        "metrics": {"val_loss": 0.25},
        "count": 3,
        "weights": "tensor([1., 1.])",
        "path": str(tmp_path),
    }


def drawn(jobs, tmp_path, monkeypatch):
    """The panels of the picture by title, the last one under "last", and the texts in each."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    summary.draw(jobs, [f"job {number}" for number in range(len(jobs))], tmp_path / "sweep.png")
    (figure,) = figures
    panels = {panel.get_title().partition(",")[0]: panel for panel in figure.axes if isinstance(panel, Axes)}
    return panels, {title: [text.get_text() for text in panel.texts] for title, panel in panels.items()}


def labels_of(panel):
    return [label.get_text() for label in panel.get_yticklabels()]


def test_the_first_job_is_on_top_with_its_name_at_the_left_and_its_number_at_the_right(tmp_path, monkeypatch):
    failed = job(1, "zero2", **FULL) | {"status": "failed"}
    panels, _ = drawn([job(0, "ddp", **FULL), failed], tmp_path, monkeypatch)
    assert all(panel.yaxis_inverted() for title, panel in panels.items() if title != "time against memory")
    assert labels_of(panels["validation loss"]) == ["#0 job 0", "#1 job 1 (failed)"]
    assert labels_of(panels["seconds per step"]) == ["#0", "#1"]
    assert list(panels["time against memory"].get_subplotspec().colspan) == [0, 1], "the fifth has a row to itself"
    assert list(panels["seconds per step"].get_subplotspec().colspan) == [1]


def test_what_a_job_has_not_reported_is_said_and_losses_have_no_ratio(tmp_path, monkeypatch):
    less = {name: value for name, value in FULL.items() if name not in ("memory_bytes", "seconds_per_step")}
    timeless = {name: value for name, value in FULL.items() if name != "seconds_per_step"}
    jobs = [job(0, "ddp", **FULL), job(1, "zero2", **less), job(2, "zero2", **timeless)]
    _, texts = drawn(jobs, tmp_path, monkeypatch)
    assert texts["validation loss"] == ["2.5", "2.5", "2.5"]
    assert texts["seconds per step"] == ["0.5", "not reported", "not reported"]
    assert texts["at rest on rank 0"] == ["12", "not reported", "12  (1.00 x ddp)"]
    assert texts["time against memory"] == ["#0"]


def test_a_baseline_that_sends_nothing_has_no_ratio_and_is_named_as_lightning_calls_it(tmp_path, monkeypatch):
    alone = {**FULL, "wire_bytes_per_step": 0, "strategy_class": "SingleDeviceStrategy"}
    _, texts = drawn([job(0, "auto", **alone), job(1, "zero2", **FULL)], tmp_path, monkeypatch)
    assert texts["sent per step by rank 0"] == ["0", "4"]
    assert texts["seconds per step"] == ["0.5", "0.5  (1.00 x auto)"]


def test_numbers_that_are_all_zero_are_drawn_without_a_warning(tmp_path, monkeypatch):
    nothing = {"loss": 0.0, "seconds_per_step": 0.0, "memory_bytes": {"": 0}, "wire_bytes_per_step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, texts = drawn([job(0, "ddp", **nothing)], tmp_path, monkeypatch)
    assert texts["validation loss"] == texts["sent per step by rank 0"] == ["0"]


def test_numbers_that_are_none_are_shown_as_what_they_are_and_zero_is_a_number(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    losses = [float("nan"), float("inf"), 0.0]
    summary.print_table([job(number, "zero2", loss=loss) for number, loss in enumerate(losses)], ["a", "b", "c"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[3] for row in rows] == ["nan", "inf", "0"]


@pytest.mark.parametrize(
    ("jobs", "title"),
    [
        ([{"world_size": 1}], "1 rank"),
        ([{"world_size": 1}, {"world_size": 4}, {"world_size": 2}], "1 to 4 ranks"),
        ([{"parameters": 1000, "world_size": 2}, {}], "1,000 parameters on 2 ranks"),
        ([{"parameters": None}], "sweep"),
    ],
)
def test_the_title_tells_sizes_as_far_as_they_are_known(jobs, title):
    assert summary.title_of(jobs) == title


def test_jobs_without_a_number_make_a_table_and_no_picture(tmp_path, capsys):
    jobs = [job(0, "ddp", status="failed", seconds=None), job(1, "zero2", status="failed", seconds=None)]
    summary.report(jobs, tmp_path)
    assert capsys.readouterr().out.count("failed") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.csv"]


def test_60_columns_without_colour_are_enough(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    summary.print_table([job(0, "ddp", **FULL), job(1, "zero2", **FULL)], ["strategy=ddp", "strategy=zero2"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    summary.print_table([job(0, "ddp", **FULL), job(1, "zero2")], ["strategy=ddp", "strategy=zero2"])
    assert capsys.readouterr().out.splitlines()[-1] == "#1 strategy=zero2: finished", "and nothing that it lacks"
    assert lines[0] == "1,000,000 parameters on 2 ranks"
    assert lines[1] == "#0 strategy=ddp: finished"
    assert lines[2].startswith("    loss 2.5, s/step 0.5, at rest 12 MB,")
    assert "\x1b" not in "".join(lines)


def test_the_table_has_a_line_per_job_and_numbers_under_their_names(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    summary.print_table([job(0, "ddp", **FULL), job(1, "zero2")], ["strategy=ddp", "strategy=zero2"])
    assert capsys.readouterr().out.splitlines() == [
        "1,000,000 parameters on 2 ranks",
        "#  job               status  loss  s/step  at rest    peak  sent",
        "0  strategy=ddp    finished   2.5     0.5    12 MB  500 MB  4 MB",
        "1  strategy=zero2  finished     -       -        -       -     -",
    ]


def test_a_unit_is_that_of_the_largest_sum_and_not_of_its_parts():
    (measure,) = (one for row in summary.MEASURES for one in row if one.key == "memory_bytes")
    jobs = [job(0, "ddp", memory_bytes={"parameter": 6e5, "gradient": 6e5}), job(1, "zero2", memory_bytes={})]
    assert summary.scale_of(measure, jobs) == (1e6, "MB")
    assert summary.scale_of(measure, [job(0, "ddp", memory_bytes={"parameter": 1e6})]) == (1e6, "MB")
    assert summary.scale_of(measure, [job(0, "ddp", memory_bytes={"": 0})]) == (1.0, "B")


def test_a_stream_that_is_not_utf_8_and_a_machine_without_rich_have_the_table(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", printed)
    summary.print_table([job(0, "ddp")], ["name=naïve"])
    printed.seek(0)
    assert "name=na\\xefve" in printed.read()


def test_jobs_that_cost_the_same_share_a_label_in_the_picture(tmp_path, monkeypatch):
    jobs = [job(n, "zero2", **FULL) for n in range(3)]
    jobs[2] |= {"seconds_per_step": 1.0}
    texts = titles(jobs, tmp_path, monkeypatch)[2]
    assert {"#0, #1", "#2"} <= set(texts)


def test_without_matplotlib_there_is_a_table_and_a_line_that_says_what_to_install(
    tmp_path, monkeypatch, caplog, capsys
):
    class NotInstalled:
        @staticmethod
        def find_spec(name, *_):
            if name == "matplotlib":
                raise ModuleNotFoundError("No module named 'matplotlib'", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled, *sys.meta_path])
    caplog.set_level("INFO")
    summary.report([job(0, "ddp", **FULL)], tmp_path)
    assert caplog.messages == [
        "No picture: matplotlib is not installed (pip install 'lightning-zero[plots]')",
        f"Table: {tmp_path / 'sweep.csv'}",
    ]
    assert "finished" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.csv"]
