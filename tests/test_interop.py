"""Lightning's own readers and LightningCLI, which know the strategy and its folders; on two ranks."""

import shutil
from functools import partial
from pathlib import Path

import yaml

import cli_app
from compare import assert_same_bits
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


def test_lightning_cli_prints_arguments_and_their_help(tmp_path: Path) -> None:
    short = ("--trainer.strategy.init_args.offload=cpu", "--trainer.strategy.init_args.checkpoint=full")
    config = yaml.safe_load(cli_app.printed(tmp_path, "fit", *BY_CLASS, *short, "--print_config"))
    arguments = config["trainer"]["strategy"]["init_args"]
    assert (arguments["stage"], arguments["offload"], arguments["checkpoint"]) == (3, "cpu", "full")
    told = cli_app.printed(tmp_path, "fit", "--trainer.strategy.help=lightning_zero.ZeroStrategy")
    assert "--trainer.strategy.step_in_backward {true,false}" in told
    assert "see `Offload`" in told
