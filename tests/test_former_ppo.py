"""Recipes with faster PPO: published benchmarks keep the former settings, and recipes derived from them too."""

from pathlib import Path

import pytest

from robopolicy.benchmarks.runs import FORMER_PPO, settings_of
from robopolicy.configuration import compose


@pytest.mark.parametrize("task", FORMER_PPO)
def test_benchmarks_run_the_settings_of_the_published_tables(task: str):
    own, former = compose([f"recipe={task}"]), compose(settings_of(compose([]), Path("runs"), task, 0))
    plain = compose([f"recipe={task}", *FORMER_PPO[task]])
    assert former.finetune == plain.finetune
    assert (former.policy, former.train, former.collect, former.world) == (
        own.policy,
        own.train,
        own.collect,
        own.world,
    )
    for setting in FORMER_PPO[task]:  # one that the recipe has by itself would be one too many
        kept = [each for each in FORMER_PPO[task] if each != setting]
        assert compose([f"recipe={task}", *kept]).finetune != plain.finetune, setting


def test_settings_of_a_user_come_last():
    config = compose(["bench.overrides=['finetune.minibatch=77']"])
    assert compose(settings_of(config, Path("runs"), "push_t", 0)).finetune.minibatch == 77
