"""Tiles: on the host, torch's Adam and its like step large tensors part by part, each of which a cache holds.

They take some ten passes over each tensor, and a piece of a few million elements comes from memory in each of them. Of
a tile the later passes find it in the cache. All elements are stepped as they would be, with the same bits.

Several threads step whole tensors. They wait for each other after each pass, a hundred times as often in tiles, and
where other processes want their cores that takes far longer than memory does. And where the part of a thread ends,
torch rounds elements of two bytes otherwise.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adadelta, Adam, AdamW, NAdam, Optimizer, RAdam

from lightning_zero.device import is_host
from lightning_zero.torch_private import count_modes, lists_of, replace_lists

TILE = 2**19  # bytes of a parameter that are stepped at a time; five to seven such tensors take part in it

# Those that take many passes, and gain a fifth of a step or more. Adamax gains 7 percent, RMSprop, Adagrad and SGD 3.
_TILED = (Adadelta, Adam, AdamW, NAdam, RAdam)
_STEPPING = {kind.__module__ for kind in _TILED}  # the modules of torch that list tensors in order to step them
_NBYTES = attrgetter("nbytes")


@contextmanager
def stepping_in_tiles(optimizer: Optimizer) -> Iterator[None]:
    """Inside, torch's own step of an Adam or its like, or of a class over them, goes tile by tile on the host. A kernel
    that takes one pass, or all tensors at once, is left alone. Neither hooks nor the optimizer's state see tiles, nor
    does who watches operations: a rehearsal would take longer for all of them than for the rest of the model."""
    is_tiled = isinstance(optimizer, _TILED) and torch.get_num_threads() == 1 and not count_modes()
    listed = lists_of(optimizer, *_TILED) if is_tiled else None
    if listed is None:
        yield
        return

    def list_tiles(group: dict[str, Any], *lists: list[Tensor]) -> Any:
        result = listed(group, *lists)
        # torch's compiler calls it, too, and takes what it finds for tensors that stay.
        if sys._getframe(1).f_globals.get("__name__") in _STEPPING:
            _cut(group, lists)
        return result

    replace_lists(optimizer, list_tiles)
    try:
        yield
    finally:
        replace_lists(optimizer, None)


def _cut(group: dict[str, Any], lists: Sequence[list[Tensor]]) -> None:
    """Puts tiles in the place of large tensors. `lists` has the parameters that are stepped, their gradients, and for
    each name their state; a name of which there is none has an empty list."""
    parameters = lists[0]
    if any(group.get(name) for name in ("foreach", "fused", "capturable", "differentiable")):
        return
    if not parameters or not is_host(parameters[0].device) or max(map(_NBYTES, parameters)) <= TILE:
        return
    filled = [each for each in lists if each]
    if any(len(set(map(id, each))) < len(each) for each in filled):  # each sees what those before it have counted
        return
    rows = zip(*filled, strict=True)
    tiled = chain.from_iterable(_tiles(row) if row[0].nbytes > TILE else (row,) for row in rows)
    for each, values in zip(filled, [*zip(*tiled, strict=True)], strict=True):
        each[:] = values


def _tiles(row: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Yields the tiles of a parameter, its gradient and its state. Each has a count of steps to itself, as torch adds
    one to it; that of the first is the parameter's own. The last one alone counts as an edit of the parameter: one that
    an error has left in the middle would pass for stepped."""
    parameter, shape = row[0], row[0].shape
    if not all(_is_count(value) or _is_run(value, shape) for value in row):
        yield row
        return
    each = TILE // parameter.itemsize
    number = -(-parameter.numel() // each)
    parts = [
        value.detach().view(-1).split(each) if value.dim() else (value, *(value.clone() for _ in range(1, number)))
        for value in row
    ]
    parts[0] = *parameter.data.view(-1).split(each)[:-1], parts[0][-1]
    yield from zip(*parts, strict=True)


def _is_count(value: Tensor) -> bool:
    return isinstance(value, Tensor) and not value.dim()


def _is_run(value: Tensor, shape: torch.Size) -> bool:
    """Whether a tensor of this shape is one run of the host's memory."""
    is_plain = type(value) in (Tensor, Parameter) and value.layout is torch.strided and is_host(value.device)
    return is_plain and value.shape == shape and value.is_contiguous()
