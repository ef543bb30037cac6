"""Finds the package `lightning_zero.conf` in a clone, where it is the folder `conf` beside this package. A wheel has it
inside this package, and Python finds it without help."""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent


class ConfBeside(MetaPathFinder):
    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname != f"{PACKAGE.name}.conf":
            return None
        return PathFinder.find_spec(fullname, [str(PACKAGE.parent)])


def install() -> None:
    if not (PACKAGE / "conf").is_dir():
        sys.meta_path.append(ConfBeside())
