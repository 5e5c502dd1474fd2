"""A LeRobot checkpoint's processors do what its config.json says, or it is said; adapters merge as the error says."""

import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_lerobot_policies import act_config, save

from robopolicy.core.errors import CheckpointError, RobopolicyWarning
from robopolicy.core.spec import STATE
from robopolicy.policies.lerobot import load_lerobot_policy
from robopolicy.policies.lerobot_processors import PROCESSORS, check_normalisation

BEFORE, AFTER = PROCESSORS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(act_config(), tmp_path_factory.mktemp("act") / "whole")


def edited(whole: Path, folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Copy a checkpoint with one JSON file changed in place."""
    shutil.copytree(whole, folder)
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))
    return folder


def normaliser(data: dict[str, Any]) -> dict[str, Any]:
    (step,) = [step for step in data["steps"] if "normalizer" in step["registry_name"]]
    return step["config"]


def without(data: dict[str, Any]) -> None:
    data["steps"] = [step for step in data["steps"] if "normalizer" not in step["registry_name"]]


def twice(data: dict[str, Any]) -> None:
    data["steps"] += [step for step in data["steps"] if "normalizer" in step["registry_name"]]


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "no normaliser": (BEFORE, without, rf"normalises '{STATE}' by MEAN_STD .*{BEFORE} has no step that does"),
    "no way back": (AFTER, without, rf"normalises 'action' by MEAN_STD .*{AFTER} has no step that does"),
    "a feature left out": (
        BEFORE,
        lambda data: normaliser(data)["features"].pop(STATE),
        rf"normalises '{STATE}' by MEAN_STD .*{BEFORE} leaves it as it is",
    ),
    "a feature not among the chosen": (
        BEFORE,
        lambda data: normaliser(data).update(normalize_observation_keys=[]),
        "leaves it as it is",
    ),
    "another way back": (
        AFTER,
        lambda data: normaliser(data)["norm_map"].update(ACTION="MIN_MAX"),
        r"'action' is normalised by MEAN_STD in training .* brought back by MIN_MAX",
    ),
    "twice": (BEFORE, twice, "normalises 2 times"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_processors_that_do_not_normalise_what_config_says_are_refused(fault: str, whole: Path, tmp_path: Path) -> None:
    name, change, text = REFUSED[fault]
    with pytest.raises(CheckpointError, match=text):
        check_normalisation(edited(whole, tmp_path / "bad", name, change))


def test_another_way_on_both_sides_is_noted_and_a_whole_checkpoint_is_not(whole: Path, tmp_path: Path) -> None:
    load_lerobot_policy(whole)

    def quantiles(data: dict[str, Any]) -> None:
        data["normalization_mapping"].update(STATE="MIN_MAX", ACTION="MIN_MAX")

    folder = edited(whole, tmp_path / "other", "config.json", quantiles)
    with pytest.warns(RobopolicyWarning, match=rf"config.json normalises '{STATE}' by MIN_MAX .*{BEFORE} by MEAN_STD"):
        load_lerobot_policy(folder)


def test_other_statistics_on_the_way_back_and_names_that_nobody_reads(whole: Path, tmp_path: Path) -> None:
    folder = edited(whole, tmp_path / "stats", AFTER, lambda _: None)
    (state,) = folder.glob("policy_postprocessor*unnormalizer*.safetensors")
    tensors = load_file(state)
    save_file({**tensors, "action.mean": tensors["action.mean"] + 1}, state)
    with pytest.raises(CheckpointError, match=r"'action' is normalised by other statistics.*differ in action.mean"):
        check_normalisation(folder)

    def renamed(data: dict[str, Any]) -> None:
        (step,) = [each for each in data["steps"] if each["registry_name"] == "rename_observations_processor"]
        step["config"]["rename_map"] = {"observation.arm": "observation.arms"}

    folder = edited(whole, tmp_path / "names", BEFORE, renamed)
    with pytest.warns(
        RobopolicyWarning, match="renames 'observation.arm' to 'observation.arms', which config.json doe"
    ):
        check_normalisation(folder)


def test_an_adapter_is_merged_as_the_error_says(whole: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from lerobot.policies.factory import get_policy_class

    adapted: Any = get_policy_class("act").from_pretrained(whole)
    adapted.config.pretrained_path = whole
    adapted = adapted.wrap_with_peft(peft.LoraConfig(r=2, target_modules=["action_head"], init_lora_weights=False))
    folder = edited(whole, tmp_path / "adapter", "config.json", lambda data: data.update(use_peft=True))
    (folder / "model.safetensors").unlink()
    adapted.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="holds an adapter") as caught:
        load_lerobot_policy(folder)
    (code,) = re.findall(r"in Python: (.*?); and copy", str(caught.value))
    told = {"BASE": whole, "MERGED": tmp_path / "merged"}
    for name, path in told.items():
        code = code.replace(f"'{name}'", f"'{path}'")
    (tmp_path / "merge.py").write_text(code)
    runpy.run_path(str(tmp_path / "merge.py"))
    for file in folder.glob("policy_*processor*"):
        shutil.copy(file, told["MERGED"])
    merged, base = load_lerobot_policy(told["MERGED"]), load_lerobot_policy(whole)
    weights = {name: value for name, value in base.policy.state_dict().items() if "action_head" in name}
    assert not torch.equal(merged.policy.state_dict()["model.action_head.weight"], weights["model.action_head.weight"])
