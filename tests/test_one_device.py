"""One rank beside one device: what Lightning's own tests ask of a trainer, done with both, and all of it compared."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import one_device_jobs as jobs

LIFE = [partial(jobs.hooks_in_a_life, by_hand=by_hand) for by_hand in (False, True)]


def differences(found: Any, expected: Any, place: str = "") -> list[str]:
    """Where two results differ: in class, order, or any bit."""
    if type(found) is not type(expected):
        return [f"{place}: {found!r:.200}, not {expected!r:.200}"]
    if isinstance(expected, Tensor):
        same = found.dtype == expected.dtype and found.equal(expected)
        return [] if same else [f"{place}: {found}, not {expected}"]
    if isinstance(expected, Mapping):
        if list(found) != list(expected):
            return [f"{place}: {list(found)}, not {list(expected)}"]
        return [line for key in expected for line in differences(found[key], expected[key], f"{place}/{key}")]
    if isinstance(expected, list | tuple):
        pairs = enumerate(zip(found, expected, strict=False))
        lines = [line for number, pair in pairs for line in differences(*pair, f"{place}/{number}")][:3]
        return lines if len(found) == len(expected) else [*lines, f"{place}: {len(found)} long, not {len(expected)}"]
    return [] if found == expected else [f"{place}: {found!r:.200}, not {expected!r:.200}"]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "do",
    [
        *LIFE,
        jobs.runs_by_flags,
        jobs.files_of_checkpoints,
        jobs.runs_that_end_early,
        jobs.steps_of_every_kind,
        jobs.versions_of_modules,
        jobs.left_by_a_fit,
    ],
    ids=lambda do: getattr(do, "__name__", None) or f"hooks_{'by_hand' if do.keywords['by_hand'] else 'automatic'}",
)
def test_one_rank_does_what_one_device_does(
    do: Callable[..., Any], stage: int, pool_of: Any, tmp_path: Path, expected_of: Callable[..., Any]
) -> None:
    mine = pool_of(1).run(do, {"stage": stage, "checkpoint": "full"}, tmp_path / "mine")[0]
    assert differences(mine, expected_of(do)) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_folders_of_shards_tell_modules_of_which_version_they_were(
    stage: int, pool_of: Any, tmp_path: Path, expected_of: Callable[..., Any]
) -> None:
    mine = pool_of(1).run(jobs.versions_of_modules, {"stage": stage}, tmp_path)[0]
    assert differences(mine, expected_of(jobs.versions_of_modules)) == []


@pytest.fixture(scope="module")
def expected_of(pool_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """What a job gives on one device, once for all stages."""
    known: dict[str, Any] = {}

    def get(do: Callable[..., Any]) -> Any:
        key = repr(do) if isinstance(do, partial) else do.__name__
        if key not in known:
            known[key] = pool_of(1).run(do, "auto", tmp_path_factory.mktemp("expected"))[0]
        return known[key]

    return get
