"""Models as data: a tree of `Part`s that hypothesis draws, shrinks and prints, and the module that it describes."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models import seeded

Usage = Literal["always", "never", "odd passes", "even ranks", "ranks in turn"]


class Place(NamedTuple):
    """Which forward this is."""

    rank: int
    step: int
    micro: int

    def reaches(self, usage: Usage) -> bool:
        return {
            "always": True,
            "never": False,
            "odd passes": (self.step + self.micro) % 2 == 1,
            "even ranks": self.rank % 2 == 0,
            "ranks in turn": (self.rank + self.step) % 2 == 0,
        }[usage]


@dataclass(frozen=True, repr=False)
class Part:
    """A module of the tree. Its repr leaves out what is as by default.

    Args:
        kind: see `LEAVES` and `CONTAINERS`.
        children: of a container.
        size: elements of a direct parameter (None: 0-d), or inner width.
        earlier: which of the layers before it a tied, borrowed or repeated one goes back to, modulo their number.
        dtype: its parameters are made in it.
        frozen: requires no gradients.
        checkpointed: recomputed in backward.
        used: in which forwards.
    """

    kind: str
    children: tuple["Part", ...] = ()
    size: int | None = 3
    earlier: int = 0
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    checkpointed: bool = False
    used: Usage = "always"

    def __repr__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return f"Part({', '.join([repr(self.kind), *said])})"


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, dtype=dtype), nn.Linear(inner, width, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(hidden))))


class Scale(nn.Module):
    """Has a direct parameter of any shape, empty ones included."""

    def __init__(self, size: int | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(() if size is None else (size,), dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * (1 + 0.1 * self.scale.sum())


class Large(nn.Module):
    """Its parameter is stepped in tiles, where shards are whole; as shards of two ranks, just not."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(401, 503, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * (1 + 0.1 * torch.tanh(self.scale[:3, :7].sum() + self.scale.square().mean()))


class Running(nn.Module):
    """A buffer that every training forward changes and reads."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(width, dtype=dtype))
        self.register_buffer("mean", torch.randn(width, dtype=dtype))
        self.mean: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(hidden.mean(0).to(self.mean.dtype), 0.25)
        return torch.tanh(hidden - self.mean + self.shift)


class Routed(nn.Module):
    """Leaves an auxiliary loss behind."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, width, dtype=dtype), nn.Linear(width, 1, dtype=dtype)
        self.auxiliary: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.auxiliary = _loss(self.gate(hidden))
        return torch.tanh(self.up(hidden))


class Borrowing(nn.Module):
    """Reads the weight of a module that is not inside it."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.owner[0].weight)


def dtype_of(module: nn.Module) -> torch.dtype:
    """That of its parameters, to which its input is cast."""
    return next((module.owner[0] if isinstance(module, Borrowing) else module).parameters()).dtype


class Container(nn.Module):
    def __init__(self, parts: tuple[Part, ...], modules: list[nn.Module]) -> None:
        super().__init__()
        self.parts, self.inner = parts, nn.ModuleList(modules)

    def outputs(self, hidden: Tensor, place: Place, *, follow: bool) -> list[Tensor]:
        """What each used part makes: of its predecessor's output (`follow`), or of the input."""
        made: list[Tensor] = []
        for part, module in zip(self.parts, self.inner, strict=True):
            if place.reaches(part.used):
                made.append(self._call(part, module, made[-1] if follow and made else hidden, place))
        return made

    @staticmethod
    def _call(part: Part, module: nn.Module, hidden: Tensor, place: Place) -> Tensor:
        inputs = (hidden, place) if isinstance(module, Container) else (hidden.to(dtype_of(module)),)
        if part.checkpointed and torch.is_grad_enabled():
            return checkpoint(module, *inputs, use_reentrant=False)
        return module(*inputs)


class Chain(Container):
    def forward(self, hidden: Tensor, place: Place) -> Tensor:
        return [hidden, *self.outputs(hidden, place, follow=True)][-1]


class Residual(Container):
    def forward(self, hidden: Tensor, place: Place) -> Tensor:
        return (hidden + [hidden, *self.outputs(hidden, place, follow=True)][-1]) / 2


class Fork(Container):
    def forward(self, hidden: Tensor, place: Place) -> Tensor:
        return sum(self.outputs(hidden, place, follow=False), start=hidden) / (1 + len(self.inner))


class Model(nn.Module):
    """A parameter of its own, a tree, and losses that read the tree's output at every depth of the trunk."""

    def __init__(self, spec: "Spec") -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(()))
        self.trunk = Builder(spec.width).container(Chain, spec.trunk)
        self.head = nn.Linear(spec.width, 1)
        self.more: nn.Linear | None = None  # may be made later

    def forward(self, signal: Tensor, place: Place) -> list[Tensor]:
        """The losses of this pass; the last is of the whole."""
        auxiliary = [module for module in self.modules() if isinstance(module, Routed)]
        for module in auxiliary:
            module.auxiliary = None
        hidden = signal * self.gain
        reached = [hidden, *self.trunk.outputs(hidden, place, follow=True)]
        losses = [_loss(one) for one in reached[:-1]]
        extra = [module.auxiliary for module in auxiliary if module.auxiliary is not None]
        last = reached[-1]
        for module in [self.head] if self.more is None else [self.more, self.head]:
            last = module(last.to(dtype_of(module)))
        return [*losses, sum(extra, start=_loss(last))]


def _loss(output: Tensor) -> Tensor:
    """Bounded, so that no training diverges, and a difference is not multiplied."""
    return torch.tanh(output.float()).square().mean()


class Builder:
    """Makes modules of parts, and remembers those that later parts may go back to."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.layers: list[nn.Linear] = []
        self.repeatable: list[nn.Module] = []

    def container(self, kind: type[Container], parts: tuple[Part, ...]) -> Container:
        return kind(parts, [self.make(part) for part in parts])

    def make(self, part: Part) -> nn.Module:
        if part.kind in CONTAINERS:
            module: nn.Module = self.container(CONTAINERS[part.kind], part.children)
        elif part.kind == "repeated" and self.repeatable:
            return self.repeatable[part.earlier % len(self.repeatable)]
        elif part.kind in ("tied", "borrowed") and self.layers:
            owner = self.layers[part.earlier % len(self.layers)]
            if part.kind == "borrowed":
                return Borrowing(owner)
            module = nn.Linear(self.width, self.width, dtype=owner.weight.dtype)
            module.weight = owner.weight
            return module
        else:
            module = LEAVES.get(part.kind, LEAVES["linear"])(self.width, part)
            self.repeatable.append(module)
            if isinstance(module, nn.Linear):
                self.layers.append(module)
        if part.frozen:
            module.requires_grad_(False)
        return module


CONTAINERS: dict[str, type[Container]] = {"chain": Chain, "residual": Residual, "fork": Fork}

# A generous epsilon: else a batch without variance multiplies rounding by 300.
LEAVES: dict[str, Callable[[int, Part], nn.Module]] = {
    "linear": lambda width, part: nn.Linear(width, width, dtype=part.dtype),
    "mlp": lambda width, part: Mlp(width, part.size or 0, part.dtype),
    "scale": lambda width, part: Scale(part.size, part.dtype),
    "running": lambda width, part: Running(width, part.dtype),
    "large": lambda width, part: Large(part.dtype),
    "routed": lambda width, part: Routed(width, part.dtype),
    "layer norm": lambda width, part: nn.LayerNorm(width, eps=0.1, dtype=part.dtype),
    "batch norm": lambda width, part: nn.BatchNorm1d(width, eps=0.1, dtype=part.dtype),
}
GOING_BACK = ["tied", "borrowed", "repeated"]


@dataclass(frozen=True)
class Spec:
    """A `Model`: its width, and the parts of its trunk."""

    width: int
    trunk: tuple[Part, ...]


def build(spec: Spec, seed: int) -> Model:
    return seeded(lambda: Model(spec), seed)


def specs(dtypes: list[torch.dtype]) -> st.SearchStrategy[Spec]:
    usage = st.sampled_from(Usage.__args__)  # type: ignore[attr-defined]
    traits: dict[str, st.SearchStrategy[Any]] = {
        "dtype": st.sampled_from(dtypes),
        "frozen": st.sampled_from([False, False, False, True]),
        "checkpointed": st.booleans(),
        "used": st.sampled_from(["always", "always"]) | usage,
    }
    sizes = st.sampled_from([3, None, 0, 1, 2, 17])
    small = [kind for kind in LEAVES if kind != "large"]
    new = st.builds(Part, st.sampled_from([*small, *small, *small, "large"]), size=sizes, **traits)
    old = st.builds(Part, st.sampled_from(GOING_BACK), earlier=st.integers(0, 3), **traits)

    def within(parts: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
        several = st.lists(parts, max_size=3).map(tuple)
        return st.builds(Part, st.sampled_from(list(CONTAINERS)), children=several, **traits)

    trees = st.recursive(new | old, within, max_leaves=6)
    return st.builds(Spec, st.sampled_from([3, 1, 2, 8]), st.lists(trees, max_size=4).map(tuple))
