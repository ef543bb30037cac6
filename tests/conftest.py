from collections.abc import Callable, Iterator

import pytest
import torch

from ranks import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


_POOLS: dict[int, RankPool] = {}


@pytest.fixture(scope="session")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    """`pool_of(world)`: ranks shared by the whole session, started when first asked for."""

    def get(world: int) -> RankPool:
        if world not in _POOLS:
            _POOLS[world] = RankPool(world)
        return _POOLS[world]

    yield get
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()


@pytest.fixture(scope="session")
def two_ranks(pool_of: Callable[[int], RankPool]) -> RankPool:
    return pool_of(2)
