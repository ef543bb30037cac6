"""`Settings`: the checked arguments of `ZeroStrategy`."""

from dataclasses import dataclass
from datetime import timedelta
from typing import final

from lightning_zero.config import at_least, is_switch, one_of
from lightning_zero.shards.options import Options
from lightning_zero.stage import STAGES

UNTIL_CHOSEN = 2  # the stage of a strategy with stage="auto" that evaluates before it has trained


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checked arguments of `ZeroStrategy`, which the strategy of Fabric takes over.

    Raises:
        ValueError: for wrong values, and for offloaded parameters at a stage where they are whole.
    """

    stage: int
    is_open: bool  # the user has left the stage, and what goes with it, to be chosen when a fit begins
    options: Options
    max_skipped_steps: int
    wait_timeout: timedelta
    timeout: timedelta  # of process groups
    sanitize: bool
    start_method: str

    def __post_init__(self) -> None:
        is_switch("sanitize", self.sanitize)
        one_of("start_method", self.start_method, ("popen", "spawn", "fork", "forkserver"))
        at_least("max_skipped_steps", self.max_skipped_steps, 1)
        offload = self.options.offload
        offloads_parameters = offload is not None and offload.parameters is not None
        if offloads_parameters and not self.is_open and not STAGES[self.stage].parameter:
            raise ValueError(
                f"{offload} offloads parameters, which are whole on every rank at stage={self.stage}. Write "
                "stage=3, or leave parameters out."
            )


def refuse_of_trainers(settings: Settings) -> None:
    """Raises NotImplementedError for what Fabric does not have: features of a Trainer alone."""
    if settings.is_open:
        raise NotImplementedError(
            "stage='auto' is there under a Trainer alone, which knows a batch before it trains. Write a stage; "
            "lightning_zero.rehearse(module, batch, stage, ranks=...) tells what each takes."
        )
