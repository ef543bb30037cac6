"""Saves and restores the random state of a rank: that of Python, numpy, torch and its device."""

import hashlib
import random
from typing import Any

import numpy
import torch

from lightning_zero.device import HOST, is_host, module_of
from lightning_zero.wire.comm import Comm


def capture(device: torch.device) -> dict[str, Any]:
    """Returns the state of every random generator of this process, as tensors and plain values."""
    version, words, gauss = random.getstate()
    mersenne = numpy.random.get_state(legacy=False)
    state = {
        "python": torch.tensor(words, device=HOST),
        "python_rest": [version, gauss],
        "numpy": torch.from_numpy(mersenne["state"]["key"].astype("int64")),
        "numpy_rest": [int(mersenne["state"]["pos"]), int(mersenne["has_gauss"]), float(mersenne["gauss"])],
        "torch": torch.get_rng_state(),
    }
    if not is_host(device):
        state[device.type] = module_of(device).get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Restores what `capture` returned. Ignores the state of a device on a rank that has another kind."""
    version, gauss = state["python_rest"]
    random.setstate((version, tuple(state["python"].tolist()), gauss))
    numpy.random.set_state(("MT19937", state["numpy"].numpy().astype("uint32"), *state["numpy_rest"]))
    torch.set_rng_state(state["torch"])
    if not is_host(device) and device.type in state:
        module_of(device).set_rng_state(state[device.type], device)


def share(comm: Comm, device: torch.device) -> None:
    """Gives every rank the random state of the first, so that ranks that share modules draw the same values for what
    each of them holds whole. Collective: call it on every rank."""
    if comm.size > 1:
        first, *_ = comm.all_gather_object(None if comm.rank else capture(device), "random state")
        if first is not None:  # as it is where all ranks are imagined to do what this one does
            restore(first, device)


def derive(*key: int) -> None:
    """Seeds every random generator from a hash of the arguments, for ranks without a saved state."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "little")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
