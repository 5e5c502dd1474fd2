"""What a frozen encoder makes of pictures is computed once a step of the data, and nothing is learned otherwise."""

from dataclasses import replace

import pytest
import torch
from seeing_toys import CAMERA, INSTRUCTIONS, SIZE, SeeingWorld, denoising_policy, token_policy

from robopolicy.cli import main
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import STATE
from robopolicy.training.configuration import FitConfig, PretrainConfig
from robopolicy.training.pretrain import AT_ONCE, imitate, plan_conditions, pretrain, read_once


@pytest.fixture(scope="module")
def episodes():
    spec, draws = SeeingWorld(1).spec, torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (160, SIZE, SIZE, 3), generator=draws, dtype=torch.uint8)
    observation = {STATE: torch.rand(160, 2, generator=draws), CAMERA: pictures}
    actions, lengths = torch.rand(120, 2, generator=draws), torch.full((40,), 3)
    return Episodes(spec.observation, spec.action, 10.0, observation, actions, lengths, INSTRUCTIONS * 20)


def frozen():
    policy = denoising_policy(SeeingWorld(2), cameras=True, text_encoder="words")
    policy.prepare_finetuning(2, train_encoder=False)
    return policy


@pytest.mark.parametrize("labelled", [False, True])
def test_what_is_learned_is_the_same(episodes, labelled, monkeypatch):
    data = replace(episodes, labels=episodes.actions_ahead(2)) if labelled else episodes
    learned, read = [], []
    for keep in (False, True):
        policy = frozen()
        encode = policy.network.encode  # counted
        monkeypatch.setattr(
            policy.network, "encode", lambda *given, encode=encode, keep=keep: (read.append(keep), encode(*given))[1]
        )
        config = PretrainConfig(batch_size=16, fit=FitConfig(steps=30, learning_rate=0.01), cache_encoder_outputs=keep)
        result = pretrain(policy, data, config)
        learned.append([*policy.state_dict().values(), torch.tensor(result.losses["denoising"])])
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*learned, strict=True))
    assert read.count(False) == 30
    assert read.count(True) == -(-data.step_count // AT_ONCE)


def test_parts_that_come_one_after_another_are_read_once_and_taught_as_a_whole(episodes):
    config = PretrainConfig(batch_size=16, fit=FitConfig(steps=30, learning_rate=0.01), cache_encoder_outputs=True)
    whole, in_parts, read = frozen(), frozen(), []
    imitate(whole, [episodes], config, Generators(3), None, "whole")
    first, second, third = (episodes.select(range(*span)) for span in ((0, 13), (13, 14), (14, 40)))
    imitate(frozen(), [first, second], config, Generators(3), None, "first", read)
    kept = [part["condition"] for part in read]
    assert [len(each) for each in kept] == [39, 3]
    imitate(in_parts, [first, second, third], config, Generators(3), None, "all", read)
    assert [part["condition"] is before for part, before in zip(read[:2], kept, strict=True)] == [True, True]
    assert [len(part["condition"]) for part in read] == [39, 3, 78]
    told, begun = (torch.cat([each.flatten() for each in policy.parameters()]) for policy in (in_parts, frozen()))
    assert torch.allclose(told, torch.cat([each.flatten() for each in whole.parameters()]), atol=1e-5)
    assert not torch.allclose(told, begun, atol=1e-2)


def test_an_encoder_that_learns_is_refused(episodes):
    for policy in (denoising_policy(SeeingWorld(2), cameras=True), token_policy(SeeingWorld(2), cameras=True)):
        with pytest.raises(
            ConfigError, match="cache_encoder_outputs=true caches the outputs of a frozen image encoder"
        ):
            read_once(policy, episodes)


def test_what_does_not_fit_into_memory_is_refused_before_it_is_computed(episodes, monkeypatch):
    monkeypatch.setattr("robopolicy.training.pretrain.free_memory", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"of each of 120 steps, .* and 0.001 MB are free"):
        read_once(frozen(), episodes)


def test_what_it_will_take_is_said_and_refused_before_anything_is_played(episodes, monkeypatch):
    policy = frozen()
    each = sum(value[0].nbytes for value in read_once(policy, episodes).values())
    assert plan_conditions(policy, episodes, 10**6).endswith(f"steps are cached: {each} MB.")
    monkeypatch.setattr("robopolicy.training.pretrain.free_memory", lambda device: 10**6 * each - 1)
    with pytest.raises(ConfigError, match=r"of each of 1000000 steps, .* leave it false, or take fewer episodes"):
        plan_conditions(policy, episodes, 10**6)


def test_policies_that_learn_in_stages_refuse_it(tmp_path, capsys):
    made = ["collect.episodes=3", "world=reach_planar", f"run.root={tmp_path}", "world.batch_size=3"]
    assert main(["collect", *made]) == 0
    given = ["train", "policy.kind=joint", "train.cache_encoder_outputs=true", "train.evaluate_episodes=0"]
    assert main([*given, "world=reach_planar", f"run.root={tmp_path}"]) == 2
    assert "train.cache_encoder_outputs=True" in capsys.readouterr().err
