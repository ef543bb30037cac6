"""What a run tells of itself, and what tells jobs apart."""

import pytest
from matplotlib.figure import Figure

from lightning_zero.sweeps import summary
from lightning_zero.sweeps.summary import SUMMARY, collect, distinct_labels, read_summary, update_summary, write_summary


def test_labels_hold_what_tells_jobs_apart():
    overrides = [["strategy=ddp", "seed=1"], ["strategy=zero2", "seed=1"]]
    assert distinct_labels(overrides) == ["strategy=ddp", "strategy=zero2"]
    assert distinct_labels([["seed=1"]]) == ["#0"]


def test_a_summary_is_replaced_in_one_move(tmp_path):
    write_summary(tmp_path, {"loss": 1.0})
    update_summary(tmp_path, loss=0.5, note="x")
    assert read_summary(tmp_path) == {"loss": 0.5, "note": "x"}
    assert [path.name for path in tmp_path.iterdir()] == [SUMMARY]


@pytest.mark.parametrize("content", ["{}", "[1]", "not JSON", '{"loss": 1.0}'])
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
    summary._stack_bars(panel, jobs)
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
