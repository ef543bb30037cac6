"""Importing it has every engine of this process checked when it is closed: the program of its last step must hold what
holds of any (`program_checks`)."""

from typing import Any

from lightning_zero.run.engine import Engine
from program_checks import check

LONGEST = 2000  # uses; a longer program takes as long to check as tests take
_checked: set[tuple[Any, ...]] = set()
_close = Engine.close


def check_program(engine: Engine) -> None:
    """Checks what an engine says of its last step, if it has ended one, and no other has said the same."""
    if not engine.runner.journal.has_step or (engine.closed and engine._facts_at_close is None):  # it has failed
        return
    program = engine.program()
    seen = program.facts, program.uses
    if len(program.uses) <= LONGEST and str(seen) not in _checked:
        check(program)
        _checked.add(str(seen))  # now: what fails is to fail again where hypothesis looks for a smaller example


def _close_and_check(self: Engine, **kwargs: Any) -> None:
    was_closed = self.closed
    _close(self, **kwargs)
    if not was_closed:
        check_program(self)


Engine.close = _close_and_check  # type: ignore[method-assign]
