"""Processors without statistics: refused where a policy shall learn, filled in where there is data."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_lerobot_policies import FRONT, SIZE, act_config, diffusion_config, save, statistics

from robopolicy.building.policies import load_trainable
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyWarning, SpecError
from robopolicy.core.examples import example_observation
from robopolicy.core.spec import WorldSpec
from robopolicy.policies.lerobot.acting import FromLeRobot, load_lerobot_policy
from robopolicy.policies.lerobot.configuration import LeRobotStart, LeRobotTuning
from robopolicy.policies.lerobot.statistics import fill_in, missing_statistics

pytestmark = pytest.mark.long


def bare(config: Any, folder: Path, known: dict | None = None) -> Path:
    """Save a policy with processors that know nothing of any data, or no other statistics than `known`."""
    from lerobot.policies.factory import make_pre_post_processors

    return save(config, folder, processors=make_pre_post_processors(config, dataset_stats=known))


def episodes_for(policy: Any) -> Episodes:
    draws, count = torch.Generator().manual_seed(0), 20
    fields = dict(policy.spec.observation)
    observation = {
        key: torch.randint(256, (count + 2, *field.shape), generator=draws, dtype=torch.uint8)
        if key == FRONT
        else 30 + 10 * torch.randn(count + 2, *field.shape, generator=draws)
        for key, field in fields.items()
    }
    actions = 100 + 50 * torch.randn(count, 2, generator=draws)
    return Episodes(fields, policy.spec.action, 10.0, observation, actions, torch.tensor([8, 12]), ("", ""))


def test_a_policy_that_shall_learn_is_refused_without_them(tmp_path):
    folder = bare(act_config(), tmp_path / "act")
    assert "action" in missing_statistics(load_lerobot_policy(folder))
    with pytest.raises(ConfigError, match=r"lack the statistics of .*action.*train DATASET policy.kind=lerobot"):
        load_trainable(folder, LeRobotTuning())
    assert missing_statistics(load_lerobot_policy(save(act_config(), tmp_path / "whole"))) == ()


@pytest.mark.parametrize("cameras", [(), (FRONT,)])
def test_data_fills_them_in_and_they_are_saved(cameras, tmp_path):
    folder = bare(diffusion_config(cameras=cameras), tmp_path / "bare")
    episodes = episodes_for(load_lerobot_policy(folder))
    spec = WorldSpec("toy", episodes.observation_fields, episodes.action_field, 10.0, 12)
    with pytest.warns(RobopolicyWarning, match=r"lacked statistics of .*action.*: the data's statistics are used now"):
        policy = FromLeRobot.build(LeRobotStart(folder), spec, episodes, 0)
    policy.save(tmp_path / "saved")
    again = load_lerobot_policy(tmp_path / "saved")
    assert missing_statistics(again) == ()
    (normaliser,) = [step for step in again.preprocess.steps if hasattr(step, "norm_map")]
    mean, std = episodes.actions.mean(0).numpy(), episodes.actions.std(0, correction=0).numpy()
    assert normaliser.stats["action"]["mean"] == pytest.approx(mean, rel=1e-4)
    assert normaliser.stats["action"]["std"] == pytest.approx(std, rel=1e-4)
    if cameras:
        pixels = episodes.observation[FRONT].float() / 255
        assert normaliser.stats[FRONT]["mean"].reshape(3) == pytest.approx(pixels.mean((0, 1, 2)).numpy(), rel=1e-4)
        assert normaliser.stats[FRONT]["mean"].reshape(3, 1, 1).shape == (3, 1, 1) and pixels.shape[1] == SIZE


def test_what_is_there_stays(tmp_path, recwarn):
    folder = save(diffusion_config(), tmp_path / "whole")
    before = load_lerobot_policy(folder)
    spec = WorldSpec("toy", before.spec.observation, before.spec.action, 10.0, 12)
    FromLeRobot.build(LeRobotStart(folder), spec, episodes_for(before), 0)
    assert not [each for each in recwarn if "statistics" in str(each.message)]


def test_data_without_such_a_field_is_refused(tmp_path):
    folder = bare(diffusion_config(), tmp_path / "bare")
    episodes = episodes_for(load_lerobot_policy(folder))
    key = next(iter(episodes.observation))
    fewer = {name: value for name, value in episodes.observation.items() if name != key}
    fields = {name: value for name, value in episodes.observation_fields.items() if name != key}
    lesser = Episodes(fields, episodes.action_field, 10.0, fewer, episodes.actions, episodes.lengths, episodes.tasks)
    spec = WorldSpec("toy", fields, episodes.action_field, 10.0, 12)
    with pytest.raises(
        SpecError, match=f"The data does not match the inputs of .*bare. The policy reads the field '{key}'"
    ):
        FromLeRobot.build(LeRobotStart(folder), spec, lesser, 0)
    with pytest.raises(ConfigError, match=f"the data has no '{key}'"):
        fill_in(load_lerobot_policy(folder), lesser)


def test_acting_without_them_is_said(tmp_path):
    policy = load_lerobot_policy(bare(act_config(), tmp_path / "act"))
    observation = example_observation(policy.spec, 2, torch.Generator().manual_seed(0))
    with pytest.warns(RobopolicyWarning, match=r"lack the statistics of .*action.*most likely not as it was trained"):
        policy.act(observation, torch.Generator())


def test_those_of_another_robot_are_none(tmp_path):
    config = act_config()
    known = statistics(config.input_features or {}, config.output_features or {})
    known["action"] = {name: torch.ones(7) for name in known["action"]}
    folder = bare(config, tmp_path / "act", known)
    policy = load_lerobot_policy(folder)
    message = r"normalise 'action' with statistics of shape \[7\] \(mean\), but its config.json declares \[2\]"
    with pytest.raises(CheckpointError, match=message):
        policy.act(example_observation(policy.spec, 2, torch.Generator().manual_seed(0)), torch.Generator())
    with pytest.raises(CheckpointError, match=message):
        load_trainable(folder, LeRobotTuning())


def test_others_than_those_that_normalise_are_none(tmp_path):
    """As of data recorded before LeRobot took quantiles, by which pi05 and others normalise."""
    from lerobot.configs.types import NormalizationMode

    config = act_config()
    config.normalization_mapping = dict.fromkeys(("STATE", "ENV", "ACTION"), NormalizationMode.QUANTILES)
    known = statistics(config.input_features or {}, config.output_features or {})
    folder = bare(config, tmp_path / "act", known)
    policy = load_lerobot_policy(folder)
    assert "action" in missing_statistics(policy)
    with pytest.raises(ConfigError, match=r"lack the statistics of .*action.*\(q01, q99\).*train DATASET"):
        policy.act(example_observation(policy.spec, 2, torch.Generator().manual_seed(0)), torch.Generator())
    with pytest.raises(ConfigError, match=r"lack the statistics of .*\(q01, q99\)"):
        load_trainable(folder, LeRobotTuning())
    with pytest.warns(RobopolicyWarning, match="the data's statistics are used now"):
        fill_in(policy, episodes_for(policy))
    assert missing_statistics(policy) == ()
    assert (
        policy.act(example_observation(policy.spec, 2, torch.Generator()), torch.Generator()).actions.isfinite().all()
    )
