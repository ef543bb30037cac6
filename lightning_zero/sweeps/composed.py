"""`composed`: what a Hydra config says of a training, so that it can be rehearsed."""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from lightning_zero import ZeroStrategy
from lightning_zero.pl.automatic import beside_defaults
from lightning_zero.rehearsal.choosing import OF_TRAINER, batch_from
from lightning_zero.rehearsal.commands import Training

PARTS = ("model", "data", "strategy")


def composed(path: str, overrides: Sequence[str]) -> Training:
    """Composes a config with the nodes `model`, `data`, `strategy` and, if it is there, `trainer`, as
    `examples/train.py` takes it, or as Hydra leaves it in ``.hydra/config.yaml`` of a job. The batch is the first items
    of the training data.

    Args:
        path: of the YAML file.
        overrides: as Hydra takes them: ``strategy=zero3``, ``model.width=1024``.

    Raises:
        ValueError: for a config that Hydra cannot compose, one without these nodes, or another strategy.
    """
    file = Path(path).resolve()
    try:
        with initialize_config_dir(str(file.parent), version_base="1.3"):
            given = [*overrides, "hydra.runtime.output_dir=."]
            config = compose(file.stem, given, return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        if missing := [part for part in PARTS if config.get(part) is None]:
            raise ValueError(f"{path} has no {', '.join(missing)}. A rehearsal takes a config with {', '.join(PARTS)}.")
        strategy = config.strategy if isinstance(config.strategy, str) else instantiate(config.strategy)
        trainer = {name: config.trainer[name] for name in OF_TRAINER if name in (config.get("trainer") or {})}
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        told = str(error).partition("\nConfig search path")[0].strip()  # where Hydra looked is no help
        raise ValueError(f"{path} cannot be composed: {told}") from error
    if not isinstance(strategy, ZeroStrategy):
        raise ValueError(f"The strategy of {path} is a {type(strategy).__name__}. Write --override strategy=zero2.")
    written = {"stage": strategy.stage, **beside_defaults(ZeroStrategy, strategy._arguments)}
    return Training(partial(_made, config.model), partial(_first_batch, config.data), written, trainer)


def _made(node: Any) -> Any:
    """Returns what Hydra makes of `node`; raises the error of what cannot be imported or made, and where it stands."""
    try:
        return instantiate(node)
    except InstantiationException as error:
        cause = error.__cause__ or error  # Hydra's own words for what does not import ask for a variable of Hydra's
        place = str(error).rpartition("\nfull_key: ")[2]
        raise ValueError(f"{place} cannot be made: {cause}") from error


@cache
def _first_batch(node: Any) -> Any:
    data = _made(node)
    data.prepare_data()
    data.setup("fit")
    return batch_from(data.train_dataloader())
