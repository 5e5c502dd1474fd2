"""The mechanism that the README of this room writes down runs as it stands there."""

import inspect
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from seeing_toys import SeeingWorld, token_policy

import robopolicy.rl
from robopolicy.core.errors import ConfigError
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.registry import CALLED_WITH, SEVERAL, Slot, mechanisms
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

README = Path(robopolicy.rl.__file__).with_name("README.md").read_text()


def test_the_readmes_mechanism_runs_by_its_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "readme_mechanism.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = FinetuneConfig(
        algorithm="grpo", advantage="readme_mechanism:confident", iterations=1, groups=2, group_size=2, epochs=1,
        minibatch=16, evaluate_every=0,
    )  # fmt: skip
    policy = token_policy(SeeingWorld(4))
    policy.prepare_finetuning()
    assert finetune(policy, None, SeeingWorld(4), config).iterations == 1
    with pytest.raises(ConfigError, match="group_size >= 2"):
        finetune(policy, None, SeeingWorld(4), replace(config, group_size=1))


def test_what_is_in_a_slot_is_called_as_the_slot_says():
    for entry in mechanisms():
        if entry.path.startswith("robopolicy."):
            inspect.signature(entry.function).bind(*CALLED_WITH[entry.slot])
    tuples = {item.name for item in fields(AlgorithmConfig) if "tuple" in str(item.type)}
    assert tuples == {slot.value for slot in SEVERAL}


def test_the_table_has_every_slot():
    assert re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE) == [slot.value for slot in Slot]
