"""What messages show of what may be long."""

import pytest

from lightning_zero.wording import few_of


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, ""), (1, "0"), (5, "0, 1, 2, 3, 4"), (6, "0, 1, 2, 3, 4 and 1 more"), (300, "4 and 295 more")],
)
def test_a_message_names_the_first_and_counts_the_others(count: int, told: str) -> None:
    assert few_of(range(count)).endswith(told)
    assert len(few_of(range(count))) < 30
