"""The paper's five configurations, small: the largest models under a limit are in the paper's order."""

import subprocess
import sys
from pathlib import Path

import pytest

import warm

PAPER = Path(__file__).parent.parent / "examples" / "paper.py"


@pytest.mark.timeout(600)  # half a minute where nothing else runs: fifteen trainings of four ranks
def test_the_largest_models_under_a_limit_of_memory_are_in_the_papers_order(tmp_path: Path) -> None:
    options = "tables=false largest.run=true largest.limit_mb=4 largest.batch=16 largest.context=64"
    command = [sys.executable, str(PAPER), *options.split(), f"hydra.run.dir={tmp_path}"]
    with warm.starts():
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line[:1] == "C"]
    blocks = {row[0]: int(row[4]) for row in rows}
    assert list(blocks) == ["C1", "C2", "C3", "C4", "C5"]
    assert 0 < blocks["C1"] < blocks["C3"] < blocks["C2"] < blocks["C4"] < blocks["C5"]
