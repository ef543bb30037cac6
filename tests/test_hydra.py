"""The config groups: what they compose to, and that they say what the Python signatures say."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError

import warm
from lightning_zero import ActivationCheckpointing, Checkpoint, Offload, ZeroStrategy

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"

# Objects that Lightning's Trainer makes from arguments of its own; no config states them.
UNCONFIGURABLE = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
POLICIES = {"offload": Offload, "activation_checkpointing": ActivationCheckpointing, "checkpoint": Checkpoint}

# What each option of a policy says that its dataclass does not say by default.
OPTION_STATES: dict[tuple[str, str], dict] = {
    ("offload", "cpu"): {"optimizer": "cpu"},
    ("offload", "nvme"): {"optimizer": "nvme", "path": "${hydra:runtime.output_dir}"},
    ("activation_checkpointing", "recompute"): {},
    ("activation_checkpointing", "offload"): {"offload": True},
    ("activation_checkpointing", "partitioned"): {"partition": True},
    ("activation_checkpointing", "partitioned_offload"): {"partition": True, "offload": True},
    ("checkpoint", "sharded"): {},
    ("checkpoint", "background"): {"async_save": True},
    ("checkpoint", "full"): {"format": "full"},
}


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", list(overrides))


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def test_yaml_lists_exactly_the_arguments_of_zero_strategy_with_their_defaults():
    declared = {
        name: parameter.default
        for name, parameter in inspect.signature(ZeroStrategy).parameters.items()
        if name not in UNCONFIGURABLE
    }
    stated = OmegaConf.to_container(composed("strategy=zero").strategy)
    assert stated.pop("_target_") == "lightning_zero.ZeroStrategy"
    assert stated == declared
    assert list(stated) == list(declared), "in the order of the signature"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_states_only_its_difference(stage):
    own = OmegaConf.load(CONF / "strategy" / f"zero{stage}.yaml")
    assert own == {"defaults": ["zero", "_self_"], "stage": stage}
    assert composed(f"strategy=zero{stage}").strategy == {**composed("strategy=zero").strategy, "stage": stage}


@pytest.mark.parametrize(("group", "option"), OPTION_STATES)
def test_a_policy_lists_exactly_the_fields_of_its_dataclass(group, option):
    defaults = {field.name: field.default for field in dataclasses.fields(POLICIES[group])}
    node = composed("strategy=zero", f"strategy/{group}={option}").strategy[group]
    assert OmegaConf.to_container(node) == {**defaults, **OPTION_STATES[group, option]}


def test_every_option_of_a_policy_is_compared_with_its_dataclass():
    shipped = {(group, option) for group in POLICIES for option in options(f"strategy/{group}")}
    assert set(OPTION_STATES) == {(group, option) for group, option in shipped if option != "none"}


@pytest.mark.parametrize("group", POLICIES)
def test_no_policy_is_the_default_and_can_be_swept_over_by_name(group):
    assert composed("strategy=zero3", f"strategy/{group}=none") == composed("strategy=zero3")
    assert composed("strategy=zero3").strategy[group] is None


@pytest.mark.parametrize("option", sorted(set(options("strategy")) - {"auto"}))
def test_every_strategy_can_be_built(option):
    strategy = instantiate(composed(f"strategy={option}").strategy)
    assert type(strategy).__name__ == ("DDPStrategy" if option == "ddp" else "ZeroStrategy")


def test_auto_leaves_the_choice_to_lightning():
    assert composed("strategy=auto").trainer.strategy == "auto"


def test_zero3_offload_is_zero3_with_all_that_can_be_offloaded():
    same = composed("strategy=zero3", "strategy/offload=cpu", "strategy.offload.parameters=cpu")
    assert composed("strategy=zero3_offload") == same


def test_the_documented_command_lines_compose():
    cfg = composed("strategy=zero3", "strategy/offload=cpu", "strategy.bucket_size_mb=64", "trainer.devices=2")
    assert (cfg.strategy.stage, cfg.strategy.offload.optimizer, cfg.strategy.bucket_size_mb) == (3, "cpu", 64)
    assert cfg.trainer.devices == 2
    assert cfg.trainer.strategy == cfg.strategy
    offloaded = composed("strategy=zero2", "strategy/offload=nvme", "strategy.offload.path=/fast/disk").strategy.offload
    assert Offload(**offloaded) == Offload(optimizer="nvme", path="/fast/disk")


@pytest.mark.parametrize("option", ["recompute", "offload"])
def test_activation_checkpointing_composes_with_stage_offload_and_bucket_size(option):
    choices = ("strategy/offload=cpu", f"strategy/activation_checkpointing={option}", "strategy.bucket_size_mb=2")
    strategy = instantiate(
        composed("strategy=zero3", *choices, "strategy.activation_checkpointing.modules=[Block]").strategy
    )
    assert strategy.activation_checkpointing == ActivationCheckpointing(modules=["Block"], offload=option == "offload")
    assert (strategy.stage, strategy.offload) == (3, Offload(optimizer="cpu"))


def test_partitioned_activations_without_tensor_parallelism_are_refused_with_what_to_write():
    with pytest.raises(InstantiationException, match="Write offload=True in place of partition=True"):
        instantiate(composed("strategy=zero2", "strategy/activation_checkpointing=partitioned").strategy)


def test_ddp_composes_without_the_keys_of_zero():
    assert composed("strategy=ddp").strategy == {"_target_": "lightning.pytorch.strategies.DDPStrategy"}
    with pytest.raises(ConfigCompositionException, match="strategy/offload"):
        composed("strategy=ddp", "strategy/offload=cpu")


def test_a_misspelt_key_is_refused():
    with pytest.raises((ConfigCompositionException, ConfigAttributeError)):
        composed("strategy=zero2", "strategy.bucket_size=64")


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_composes(experiment):
    cfg = composed(f"experiment={experiment}")
    assert cfg.trainer.max_steps != composed().trainer.max_steps
    assert cfg.model.get("context") == cfg.data.get("context")


def test_the_slurm_launcher_composes_and_starts_one_task_per_rank():
    overrides = ["hydra/launcher=slurm", "trainer.devices=8", "trainer.num_nodes=2"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", overrides, return_hydra_config=True)
    launcher = cfg.hydra.launcher
    assert launcher._target_.startswith("hydra_plugins.hydra_submitit_launcher.")
    assert (launcher.nodes, launcher.tasks_per_node, launcher.gpus_per_node) == (2, 8, 8)


def test_a_foreign_app_composes_the_groups_from_the_package(tmp_path):
    """As installed: see test_packaging."""
    app = [sys.executable, str(ROOT / "tests" / "foreign_app.py")]
    with warm.starts():
        done = subprocess.run(app, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"class": "ZeroStrategy", "stage": 2}


def test_the_foreign_app_has_the_recipe_of_the_docs():
    (recipe,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "hydra.md").read_text(), flags=re.DOTALL)
    app = (ROOT / "tests" / "foreign_conf" / "app.yaml").read_text()
    assert [line for line in recipe.splitlines() if line not in app.splitlines()] == []


def test_the_help_text_shows_how_to_start():
    with warm.starts():
        command = [sys.executable, "examples/train.py", "--help"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "python examples/train.py -m strategy=ddp,zero1,zero2,zero3 trainer.devices=2" in done.stdout
    for group in ("strategy", *(f"strategy/{policy}" for policy in POLICIES)):
        assert f"{group}: {', '.join(options(group))}\n" in done.stdout
