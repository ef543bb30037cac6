"""Makes `pytorch_lightning` and `lightning_fabric` other names of `lightning.pytorch` and `lightning.fabric`.

The wheels of Lightning contain both as copies with different classes: a `pytorch_lightning.Trainer` takes no strategy,
callback or module of `lightning.pytorch`. Packages that import the old names can train with this strategy once both
names are one package.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import final

OTHER_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def serve_pytorch_lightning() -> None:
    """Makes ``import pytorch_lightning`` give `lightning.pytorch` itself, also for submodules. Call it before anything
    imports the old name:

        import lightning_zero

        lightning_zero.serve_pytorch_lightning()
        from neuralforecast import NeuralForecast

    Raises:
        RuntimeError: when a copy is imported already.
    """
    copies = sorted(filter(_is_copy, OTHER_NAMES))
    if copies:
        raise RuntimeError(
            f"serve_pytorch_lightning() comes too late: somebody has imported {' and '.join(copies)}, whose classes "
            f"are not those of {' and '.join(OTHER_NAMES[name] for name in copies)}. Call it before what imports them."
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def advice() -> str:
    """Returns what to do when a copy is in use, for its error messages that print one of our objects; else nothing."""
    if not _is_copy("pytorch_lightning"):
        return ""
    return (
        " of lightning.pytorch; for pytorch_lightning call lightning_zero.serve_pytorch_lightning() before importing it"
    )


def _is_copy(name: str) -> bool:
    return name in sys.modules and sys.modules[name] is not sys.modules.get(OTHER_NAMES[name])


@final
class _Finder(MetaPathFinder, Loader):
    """Finds a module by its old name, and returns the one of the new name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        head, dot, rest = fullname.partition(".")
        if head not in OTHER_NAMES:
            return None
        real = importlib.util.find_spec(OTHER_NAMES[head] + dot + rest)
        return None if real is None else ModuleSpec(fullname, self, loader_state=real.name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.loader_state)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own spec. It has been executed under its own name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
