"""Whether each optimizer steps pieces, pieces of whole blocks, or whole tensors."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from lightning_zero.shards.options import Options
from lightning_zero.shards.probe import BLOCK, BY_ALL, BY_BLOCK, BY_CHANCE, BY_RANKS, BY_TENSOR, NESTED, NOTHING, find

FITS = (None, BY_BLOCK, BY_TENSOR, NESTED)  # for these reasons, it steps some part of parameters rightly


class Stepped(NamedTuple):
    """How much of a parameter optimizers step at a time."""

    whole: list[Optimizer]  # those that step whole tensors
    block: int  # elements of a parameter that pieces never divide, for all optimizers; 1 where none steps blocks


def choose_stepped(
    optimizers: Sequence[Optimizer], options: Options, is_divided: bool, device: torch.device
) -> Stepped:
    """Chooses what each optimizer steps, by `options.granularity` and by what it looks at. It steps on `device`.

    Warns where an optimizer steps less than it looks at, as the user has asked, or where trying it could not tell.
    Raises ValueError for an optimizer that no granularity suits, for one that steps blocks or whole tensors of which
    tensor-parallel ranks have parts (`is_divided`), and for one that steps whole tensors with `step_in_backward`.
    """
    whole, blocked, asked = [], [], options.granularity
    for optimizer in optimizers:
        found, kind = find(optimizer, device), type(optimizer).__name__
        reason = found.why_not_in_pieces
        if asked == "tensor" or (asked == "auto" and reason in (BY_TENSOR, NESTED)):
            whole.append(optimizer)
        elif asked == "block" or (asked == "auto" and reason == BY_BLOCK):
            blocked.append(optimizer)
        if reason == BY_RANKS and asked != "element":
            raise ValueError(_why_not_among_ranks(kind))
        if asked == "auto" and reason in FITS and found.goes_by_loss:
            raise ValueError(_why_not_by_loss(kind))
        if asked != "element" and reason in FITS and found.acts_before_closure:
            raise ValueError(_why_not_before_closure(kind))
        if reason == BY_CHANCE:
            _warn_or_refuse_chance(kind, asked)
        elif reason == NESTED and asked in ("element", "block"):
            told = f"{kind} {NESTED}: in pieces, which granularity={asked!r} asks for, it trains, and cannot be saved"
            warnings.warn(f"{told}. granularity='auto' steps whole tensors.", stacklevel=2)
        elif reason is not None and (asked == "element" or (asked == "block" and reason != BY_BLOCK)):
            told = f"{kind} {reason}, and steps pieces: not DDP's numbers. granularity='auto' gives it what it needs"
            warnings.warn(f"{told}; granularity={asked!r} was asked for.", stacklevel=2)
        elif reason == NOTHING and asked == "auto":
            warnings.warn(
                f"{kind} {NOTHING}: whether it looks at whole ones is not known, and it steps pieces. If it looks at "
                "whole ones, write granularity='tensor'.",
                stacklevel=2,
            )
        elif reason not in (None, BY_TENSOR, BY_BLOCK, NESTED) and not (asked == "tensor" and reason != BY_ALL):
            knows = "or, if you know that it looks at one tensor at a time, granularity='tensor'; "
            raise ValueError(
                f"{kind} {reason}, and each rank steps only a part of its parameters: the result would be wrong. Use "
                f"stage=0, or another optimizer; {'' if asked == 'tensor' else knows}or, if you call methods of its "
                "own that look at them all, and never its step (first_step and second_step of a SAM), "
                "granularity='element'."
            )
    if is_divided and (whole or blocked):
        raise ValueError(
            f"{type((whole + blocked)[0]).__name__} steps whole {'tensors' if whole else 'blocks'}, which "
            "tensor-parallel ranks have parts of: not yet. Use an element-wise optimizer (AdamW, SGD, RMSprop, ...), "
            "or no tensor parallelism."
        )
    if whole and options.step_in_backward:
        raise ValueError(
            f"{type(whole[0]).__name__} steps whole tensors, which travel to the rank that steps them: not in the "
            "middle of a backward, where ranks wait for each other's gradients. Leave step_in_backward=True out."
        )
    return Stepped(whole, BLOCK if blocked else 1)


def _why_not_among_ranks(kind: str) -> str:
    return (
        f"{kind} {BY_RANKS}, which step other parts of the parameters here, or other ones: it would mix them. "
        "Gradients are averaged before the step, and its work is divided among the ranks, so leave both out of it "
        "(torch.optim.Muon needs neither), or use stage=0; or, if what it asks is none of that, granularity='element'."
    )


def _why_not_by_loss(kind: str) -> str:
    return (
        f"{kind} goes by the loss that its closure returns, which is another one on each rank: here each would step "
        "its parts by its own, and under DDP ranks train apart. Use stage=0, or another optimizer; or, if the loss is "
        "the same on every rank, or step() is given no closure, granularity='tensor' (or 'element', if it steps each "
        "element by itself)."
    )


def _why_not_before_closure(kind: str) -> str:
    return (
        f"{kind} changes weights, or makes state of them, before it calls its closure, in which parameters are whole: "
        "they become what this rank steps only then. Use stage=0, or a class whose step begins with the closure "
        "(schedulefree has one beside each ...Closure)."
    )


def _warn_or_refuse_chance(kind: str, granularity: str) -> None:
    """Says what an optimizer that draws random numbers comes to. Raises ValueError unless the user has asked for it."""
    if granularity == "auto":
        raise ValueError(
            f"{kind} {BY_CHANCE}, for the parameters in turn. Each rank steps only a part of them, and would draw "
            "other numbers for it than DDP's ranks draw: the result would not be DDP's. Use stage=0, or an optimizer "
            "that draws none; or, if any numbers of that kind will do, granularity='tensor' (each rank draws its own "
            "for the tensors that it steps) or 'element' (for its pieces)."
        )
    what = {"tensor": "tensors", "block": "blocks", "element": "pieces"}[granularity]
    warnings.warn(
        f"{kind} {BY_CHANCE}: each rank draws its own for the {what} that it steps. These are not DDP's numbers; "
        f"granularity={granularity!r} was asked for.",
        stacklevel=3,
    )
