"""Two dictionaries of tensors, to the bit."""

from collections.abc import Mapping
from typing import Any

import torch


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Names of what differs in dtype, shape or value."""
    assert found.keys() == expected.keys()
    pairs = {name: (torch.as_tensor(found[name]), torch.as_tensor(expected[name])) for name in expected}
    return [name for name, (mine, theirs) in pairs.items() if mine.dtype != theirs.dtype or not mine.equal(theirs)]


def assert_same_bits(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert differing(found, expected) == []
