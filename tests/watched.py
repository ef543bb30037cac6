"""With the environment variable CHECK_PROGRAMS=1, importing it has every engine of this process checked when it is
closed: the program of its last step must hold what holds of any (`program_checks`). `make test-device` sets it."""

import os
from typing import Any

from lightning_zero.run.engine import Engine
from program_checks import check

LONGEST = 2000  # uses; a longer program takes as long to check as tests take
_checked: set[tuple[Any, ...]] = set()
_close = Engine.close


def _check_and_close(self: Engine, **kwargs: Any) -> None:
    has_ended = not self.closed and self.journal.has_step
    _close(self, **kwargs)
    if not has_ended or self._facts_at_close is None:  # it has failed
        return
    program = self.program()
    seen = program.facts.groups, program.uses
    if len(program.uses) <= LONGEST and seen not in _checked:
        _checked.add(seen)
        check(program)


if os.environ.get("CHECK_PROGRAMS") == "1":
    Engine.close = _check_and_close  # type: ignore[method-assign]
