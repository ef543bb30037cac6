"""Lightning's own readers and LightningCLI, which know the strategy and its folders; on two ranks."""

import shutil
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import call as calls

import cli_app
import lightning_zero
from compare import assert_same_bits
from lightning_zero.pl.interop import exists_or_is_saved
from ranks import RankPool

BY_CLASS = ("--trainer.strategy.class_path=lightning_zero.ZeroStrategy", "--trainer.strategy.init_args.stage=3")
TWO = "--trainer.devices=2"


def test_lightning_cli_runs_the_strategy_by_name_by_class_and_from_yaml(two_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "zero.yaml").write_text(
        "trainer:\n  devices: 2\n  strategy:\n    class_path: lightning_zero.ZeroStrategy\n"
        "    init_args: {stage: 1, checkpoint: {format: full}}\n"
    )
    expected = two_ranks.run(cli_app.run, tmp_path, "fit", TWO, "--trainer.strategy=ddp")[0]
    ways = {
        2: (TWO, "--trainer.strategy=zero_stage_2"),
        3: (TWO, *BY_CLASS, "--trainer.strategy.init_args.units=modules"),
        1: (f"--config={tmp_path / 'zero.yaml'}",),
    }
    for stage, arguments in ways.items():
        found = two_ranks.run(cli_app.run, tmp_path / str(stage), "fit", *arguments)[0]
        assert found["stage"] == stage
        assert_same_bits(found["weights"], expected["weights"])
    saved = yaml.safe_load((tmp_path / "3" / "config.yaml").read_text())
    assert saved["trainer"]["strategy"]["init_args"]["units"] == "modules"
    again = two_ranks.run(cli_app.run, tmp_path / "again", "fit", f"--config={tmp_path / '3' / 'config.yaml'}")[0]
    assert_same_bits(again["weights"], expected["weights"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lightning_cli_leaves_the_same_files_beside_checkpoints_in_a_folder_of_ones_own(
    stage: int, two_ranks: RankPool, tmp_path: Path, folder_of_ddp: Path
) -> None:
    expected = two_ranks.once(cli_app.texts_beside_checkpoints, folder_of_ddp, "ddp")
    assert expected[0].keys() == {"config.yaml", "hparams.yaml"}
    assert two_ranks.run(cli_app.texts_beside_checkpoints, tmp_path, f"zero_stage_{stage}") == expected


@pytest.fixture(scope="module")
def folder_of_ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


def test_lightning_cli_takes_hyperparameters_from_a_folder_as_from_a_file(two_ranks: RankPool, tmp_path: Path) -> None:
    saved = tmp_path / "saved.ckpt"
    for checkpoint in ("null", "sharded"):
        how = (*BY_CLASS, f"--trainer.strategy.init_args.checkpoint={checkpoint}")
        two_ranks.run(cli_app.run, tmp_path, "fit", TWO, *how, "--model.hidden=9")
        assert saved.is_dir() == (checkpoint == "sharded")
        for strategy in ("zero_stage_2", "ddp"):
            arguments = (TWO, f"--trainer.strategy={strategy}", f"--ckpt_path={saved}")
            for found in two_ranks.run(cli_app.run, tmp_path, "test", *arguments):
                assert found["hidden"] == 9
        (saved.unlink if saved.is_file() else partial(shutil.rmtree, saved))()


def test_a_mock_of_a_trainer_has_callbacks_and_checkpoints_as_without_this_package(tmp_path: Path) -> None:
    trainer, callback, saver = MagicMock(), Mock(), ModelCheckpoint(tmp_path)
    trainer.callbacks = [callback]
    trainer.strategy.broadcast = trainer.strategy.reduce_boolean_decision = lambda found, **_: found
    calls._call_callback_hooks(trainer, "on_train_start")
    callback.on_train_start.assert_called_once_with(trainer, trainer.lightning_module)
    assert not saver.file_exists(tmp_path / "a.ckpt", trainer)
    (tmp_path / "last.ckpt").touch()
    assert saver._find_last_checkpoints(trainer) == {str(tmp_path / "last.ckpt")}


def test_a_path_is_taken_as_soon_as_a_save_to_it_is_under_way(tmp_path: Path) -> None:
    """In the background: another ModelCheckpoint chooses another name, as it does where the file is there."""
    strategy, saver = lightning_zero.ZeroStrategy(), ModelCheckpoint(tmp_path)
    path, trainer = tmp_path / "a.ckpt", Mock(strategy=strategy)
    strategy._keeper = Mock(is_latest=lambda other: other == str(path))
    assert saver.file_exists(path, trainer)
    assert not exists_or_is_saved(lambda *_: False, saver, tmp_path / "b.ckpt", trainer)


def test_a_mock_of_a_logger_uploads_nothing_that_users_are_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    lightning_zero.ZeroStrategy()._warn_of_loggers([Mock()])
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]


def test_lightning_cli_prints_arguments_and_their_help(tmp_path: Path) -> None:
    short = ("--trainer.strategy.init_args.offload=cpu", "--trainer.strategy.init_args.checkpoint=full")
    config = yaml.safe_load(cli_app.printed(tmp_path, "fit", *BY_CLASS, *short, "--print_config"))
    arguments = config["trainer"]["strategy"]["init_args"]
    assert (arguments["stage"], arguments["offload"], arguments["checkpoint"]) == (3, "cpu", "full")
    told = cli_app.printed(tmp_path, "fit", "--trainer.strategy.help=lightning_zero.ZeroStrategy")
    assert "--trainer.strategy.step_in_backward {true,false}" in told
    assert "see `Offload`" in told
