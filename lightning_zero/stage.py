"""What each ZeRO stage partitions (ZeRO, arXiv 1910.02054, sections 5.1-5.3).

A stage is a row of a table, and only this table knows stages by number. Other code asks `if partition.gradient`, which
says why; it never asks `stage >= 2`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Which of the three model states are sharded (1/N on each rank), not whole on every rank."""

    optimizer: bool = False
    gradient: bool = False
    parameter: bool = False


STAGES: dict[int, Partition] = {
    0: Partition(),
    1: Partition(optimizer=True),
    2: Partition(optimizer=True, gradient=True),
    3: Partition(optimizer=True, gradient=True, parameter=True),
}
