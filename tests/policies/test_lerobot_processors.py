"""A LeRobot checkpoint's processors do what its config.json says, or it is said; adapters merge as the error says."""

import json
import os
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

from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyWarning
from robopolicy.core.spec import STATE
from robopolicy.policies.lerobot.acting import LeRobotPolicy, load_lerobot_policy
from robopolicy.policies.lerobot.checks import PROCESSORS, check_normalisation
from robopolicy.policies.lerobot.statistics import check_acting
from robopolicy.policies.loading import saved_origin

pytestmark = pytest.mark.long

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
    "no normaliser": (BEFORE, without, rf"normalises '{STATE}' by MEAN_STD .*{BEFORE} does not normalise it"),
    "no way back": (AFTER, without, rf"normalises 'action' by MEAN_STD .*{AFTER} does not normalise it"),
    "a feature left out": (
        BEFORE,
        lambda data: normaliser(data)["features"].pop(STATE),
        rf"normalises '{STATE}' by MEAN_STD .*{BEFORE} leaves it unchanged",
    ),
    "a feature not among the chosen": (
        BEFORE,
        lambda data: normaliser(data).update(normalize_observation_keys=[]),
        "leaves it unchanged",
    ),
    "another way back": (
        AFTER,
        lambda data: normaliser(data)["norm_map"].update(ACTION="MIN_MAX"),
        r"'action' is normalised by MEAN_STD in training .* unnormalised by MIN_MAX",
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
    with pytest.raises(CheckpointError, match=r"'action' is normalised with other statistics.*differ in action.mean"):
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
    with pytest.raises(CheckpointError, match="contains an adapter") as caught:
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


def test_what_is_read_cannot_be_renamed_away(whole: Path, tmp_path: Path) -> None:
    """LeRobot would stop at the first decision with a KeyError."""
    state, other = "observation.state", "observation.other"
    refused = {
        "renames 'observation.state' to 'observation.other', but config.json reads": {state: other},
        "renames two observations to 'observation.state'": {"observation.a": state, other: state},
        "has an invalid rename_map": [state],
    }
    for number, (text, pairs) in enumerate(refused.items()):
        with pytest.raises(CheckpointError, match=text):
            load_lerobot_policy(edited(whole, tmp_path / str(number), BEFORE, renaming(pairs)))
    with pytest.warns(RobopolicyWarning, match="renames 'observation.state' to 'observation.old'"):
        check_normalisation(edited(whole, tmp_path / "x", BEFORE, renaming({other: state, state: "observation.old"})))


def renaming(pairs: Any) -> Callable[[dict[str, Any]], None]:
    def renamed(data: dict[str, Any]) -> None:
        (step,) = [each for each in data["steps"] if each["registry_name"] == "rename_observations_processor"]
        step["config"]["rename_map"] = pairs

    return renamed


@pytest.mark.parametrize("changed", [{"n_action_steps": 0}, {"n_action_steps": True}, {"dropout": float("nan")}])
def test_numbers_that_no_policy_has(whole: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    (name,) = changed
    with pytest.raises(CheckpointError, match=name):
        load_lerobot_policy(edited(whole, tmp_path / "odd", "config.json", lambda data: data.update(changed)))


@pytest.mark.parametrize("eps", [-1, 1e30, float("nan"), None])
def test_what_is_added_to_a_divisor_is_small(whole: Path, tmp_path: Path, eps: float | None) -> None:
    def changed(data: dict[str, Any]) -> None:
        (step,) = [each for each in data["steps"] if each["registry_name"] == "normalizer_processor"]
        step["config"]["eps"] = eps

    with pytest.raises(CheckpointError, match="eps"):
        load_lerobot_policy(edited(whole, tmp_path / "eps", BEFORE, changed))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda each: each[:, None], "of shape \\[\\d, 1\\]"),
        (lambda each: each.mean(), "of shape \\[\\]"),
        (lambda each: -each - 1, "negative"),
        (lambda each: each * float("inf"), "NaN or infinite"),
    ],
)
def test_statistics_that_no_data_has(whole: Path, tmp_path: Path, change: Any, text: str) -> None:
    folder = edited(whole, tmp_path / "stats", AFTER, lambda _: None)
    for state in folder.glob("policy_*processor*normalizer*.safetensors"):
        tensors = load_file(state)
        save_file({**tensors, "action.std": change(tensors["action.std"]).contiguous()}, state)
    with pytest.raises(CheckpointError, match=text):
        check_acting(load_lerobot_policy(folder))


@pytest.mark.parametrize("odd", ["folder", "link"])
def test_settings_that_are_no_file_are_not_passed_over(whole: Path, tmp_path: Path, odd: str) -> None:
    folder = edited(whole, tmp_path / "settings", AFTER, lambda _: None)
    place = folder / "robopolicy.json"
    place.mkdir() if odd == "folder" else place.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"robopolicy\.json"):
        load_lerobot_policy(folder)
    with pytest.raises(CheckpointError, match=r"robopolicy\.json"):
        saved_origin(folder)


def test_no_two_elements_have_one_name(whole: Path, tmp_path: Path) -> None:
    folder = edited(whole, tmp_path / "names", AFTER, lambda _: None)
    size = json.loads((folder / "config.json").read_text())["output_features"]["action"]["shape"][0]
    (folder / "robopolicy.json").write_text(json.dumps({"names": {"action": ["x"] * size}}))
    with pytest.raises(ConfigError, match="gives two elements of 'action' the name 'x'"):
        load_lerobot_policy(folder)


@pytest.mark.parametrize("odd", ["pipe", "large"])
def test_a_tokenizers_files_are_looked_at_before_they_are_read(whole: Path, tmp_path: Path, odd: str) -> None:
    """transformers would wait for a pipe for ever, and take many times the bytes of a text in memory."""
    words = tmp_path / "words"
    words.mkdir()
    place = words / "tokenizer.json"
    if odd == "pipe":
        os.mkfifo(place)
    else:
        with place.open("wb") as file:
            file.truncate(2**30)

    def asks(data: dict[str, Any]) -> None:
        data["steps"].append({"registry_name": "tokenizer_processor", "config": {"tokenizer_name": str(words)}})

    text = "is a pipe or device" if odd == "pipe" else "is larger than 134217728 bytes"
    with pytest.raises(CheckpointError, match=rf"sets tokenizer_name=.*tokenizer\.json {text}"):
        load_lerobot_policy(edited(whole, tmp_path / "asking", BEFORE, asks))


def cast(folder: Path, whole: Path, name: str, kind: str) -> LeRobotPolicy:
    def change(data: dict[str, Any]) -> None:
        (step,) = [step for step in data["steps"] if step["registry_name"] == "device_processor"]
        step["config"]["float_dtype"] = kind

    return load_lerobot_policy(edited(whole, folder, name, change))


def test_numbers_that_no_weight_takes_are_refused_and_rounded_actions_said(whole: Path, tmp_path: Path) -> None:
    for kind in ("bfloat16", "half", "float64"):
        policy = cast(tmp_path / kind, whole, BEFORE, kind)
        dtype_name = "float16" if kind == "half" else kind
        with pytest.raises(CheckpointError, match=rf"observations to {dtype_name} .*weights are float32: set float_"):
            check_acting(policy)
    check_acting(cast(tmp_path / "same", whole, BEFORE, "float32"))
    with pytest.warns(RobopolicyWarning, match="rounds actions to bfloat16"):
        check_acting(cast(tmp_path / "after", whole, AFTER, "bfloat16"))
