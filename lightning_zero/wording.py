"""How messages word what may be long."""

from collections.abc import Iterable

FEW = 5


def few_of(words: Iterable[object]) -> str:
    """Returns the first words, and how many more there are: ``a, b and 40 more``. A model has hundreds of parameters,
    and a message that names all of them hides what it says."""
    shown = [str(word) for word in words]
    return ", ".join(shown[:FEW]) + (f" and {len(shown) - FEW} more" if len(shown) > FEW else "")
