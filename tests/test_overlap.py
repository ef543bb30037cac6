"""Communication runs beside computation: measured on real ranks, whose link takes a known time for each byte."""

import pytest

import overlap_jobs as jobs
from ranks import RankPool

HIDDEN = 0.8  # of min(communication, computation), at least
TOLERANCE = 0.15  # of a step, between what the model says and what is measured


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_r63_four_fifths_of_a_slow_link_are_hidden_as_the_model_says(stage: int, two_ranks: RankPool) -> None:
    """Of 24 layers the ends cannot be hidden: what is sent before the first computes, and after the last has. That is a
    twentieth. All times but the engine's own are slept, so a busy machine changes them little."""
    # Layers that are sent, for a forward's time each: 2 or 3 times all; backward finds the last two still gathered.
    layers_sent = {1: 2 * jobs.LAYERS, 2: 2 * jobs.LAYERS, 3: 3 * jobs.LAYERS - 2}[stage]
    for found in two_ranks.run(jobs.seconds_of_steps, stage, HIDDEN):
        sent, computed = layers_sent * found["forward"], 3 * jobs.LAYERS * found["forward"]
        assert found["sent"] == pytest.approx(sent)
        assert found["computed"] == pytest.approx(computed)
        assert found["communication"] >= 0.95 * sent
        assert found["computation"] >= 0.95 * computed
        assert jobs.hidden_in(found) >= HIDDEN, found
        assert found["model"] == pytest.approx(found["both"] - found["neither"], rel=TOLERANCE)
