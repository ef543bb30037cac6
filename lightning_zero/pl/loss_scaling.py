"""Loss scaling of fp16: steps whose gradients overflow are skipped and counted. Lightning's plugin for a Trainer does
the rest (`precision`); under Fabric, `LossScaling` does."""

from typing import Any, final

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_zero.run.averages import Averages
from lightning_zero.shards.norm import Overflow
from lightning_zero.torch_private import scaling_of
from lightning_zero.wording import few_of


@final
class SkippedSteps:
    """Counts optimizer steps that were skipped because a gradient overflowed in fp16, and ends a run that skips more
    than `most` in a row."""

    def __init__(self, most: int = 20) -> None:
        self.total = 0  # since training began, in whatever run
        self._most = most
        self._in_a_row: list[str] = []  # up to now, each in words

    def note(self, step: int, overflow: Overflow | None, scaler: Any, loss: float | None = None) -> None:
        """Takes note of a step, which was skipped if a gradient overflowed on any rank. Warns if it was.

        Raises:
            RuntimeError: for more than `most` skipped steps in a row.
        """
        if overflow is None or not overflow.ranks:
            self._in_a_row.clear()
            return
        names, scale = overflow.parameters, scaler.get_scale()
        seen = "" if loss is None else f"loss {loss}, "
        self._in_a_row.append(f"step {step}: {seen}non-finite gradients on ranks {overflow.ranks} in {few_of(names)}")
        self.total += 1
        rank_zero_warn(f"Skipped an optimizer step, {self._in_a_row[-1]}. The loss scale is {scale:g}.")
        if len(self._in_a_row) > self._most:
            told = "\n  ".join(self._in_a_row)
            raise RuntimeError(
                f"{len(self._in_a_row)} optimizer steps in a row overflowed in fp16 (max_skipped_steps={self._most}):\n"
                f"  {told}\nThe loss scale is {scale:g}. Look at the parameters named above, lower the learning rate, "
                "or use precision='bf16-mixed'."
            )


@final
class LossScaling:
    """Unscales gradients under Fabric, once between two steps: when they are clipped, or else in the step."""

    def __init__(self, max_skipped_steps: int) -> None:
        self.skipped = SkippedSteps(max_skipped_steps)
        self._overflows: dict[Optimizer, Overflow] = {}  # of gradients that are unscaled, and not stepped yet

    def unscale(self, scaler: Any, optimizer: Optimizer, averages: Averages) -> None:
        """Unscales the gradients of an optimizer, unless they are already. See `Averages.unscale_`, which leaves
        nothing to unscale to the scaler itself. Collective."""
        if scaling_of(scaler, optimizer)["stage"] is OptState.READY:
            self._overflows[optimizer] = averages.unscale_(scaler, optimizer)

    def note_step(self, step: int, optimizer: Optimizer, scaler: Any) -> None:
        """Takes note of a step; see `SkippedSteps.note`."""
        self.skipped.note(step, self._overflows.pop(optimizer, None), scaler)
