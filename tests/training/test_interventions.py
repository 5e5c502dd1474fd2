"""Operators who intervene while a policy learns online: what is executed, what is stored, what is learned from."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from steps_world import StepsWorld
from test_online import QUICK, acting, always, recorded, steering, watched

from robopolicy.cli import main
from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import STATE
from robopolicy.operators.configuration import AssistConfig
from robopolicy.operators.operated_world import OperatedWorld
from robopolicy.operators.operator import ScriptedOperator, Site
from robopolicy.training import online
from robopolicy.training.online import learn_online


class Pushes:
    """A controller that adds as much as it can."""

    def reset(self, rows=None): ...

    def act(self, observation):
        return np.ones((len(observation[STATE]), 1))


def operated(rows=4, end=None, **options) -> OperatedWorld:
    world = StepsWorld(rows, end=end)
    operator = ScriptedOperator(Site(world.spec.action, world.spec.fps, rows, Pushes))
    return OperatedWorld(world, operator, AssistConfig(**options))


def test_operators_act_step_by_step_where_an_alarm_called_them():
    world = operated(2, max_policy_steps=3, operator_steps=2)
    world.reset(seeds=np.array([1, 2]))
    plan = np.full((2, 2, 1), -0.5)
    for expected, helped in (
        ([-0.5, -0.5], [False, False]),
        ([-0.5, 1.0], [False, True]),
        ([1.0, -0.5], [True, False]),  # the policy goes on with the present chunk
    ):
        step = world.step(plan)
        assert world.executed[:, :, 0].tolist() == [expected] * 2 and world.operated.tolist() == [helped] * 2
        assert step.valid.shape == step.reward.shape == (2, 2) and step.trace[STATE].shape == (2, 2, 1)
    assert step.truncated.all() and world.world.steps.tolist() == [6, 6]
    done = np.concatenate([each[:, :, 0] for each in world.world.actions], axis=1)
    assert done.tolist() == [[-0.5, -0.5, -0.5, 1.0, 1.0, -0.5]] * 2
    world.reset(seeds=np.array([3, 4]))
    world.step(plan)
    assert not world.operated.any()  # an episode begins with the policy
    with pytest.raises(SpecError, match="seeds"):
        world.reset()


def test_an_ended_row_frees_its_operator_for_the_next_in_the_queue():
    world = operated(3, end=0.55, max_policy_steps=1, operators=1)
    world.reset(seeds=np.arange(3))
    world.world.x[:] = [0.3, 0.3, -5.0]
    plan = np.zeros((3, 1, 1))
    acted = []
    for _ in range(6):
        world.step(plan)
        acted.append(world.operated[:, 0].nonzero()[0].tolist())
    assert acted == [[], [0], [0], [1], [1], [2]]


@pytest.mark.parametrize("data", [None, recorded()])
def test_what_operators_did_is_stored_as_own_action_and_drawn_as_demonstration(data, monkeypatch):
    policy, world = acting(), operated(max_policy_steps=2)
    batches = watched(policy, monkeypatch)
    kept = []
    add = online.ReplayBuffer.add

    def noted(self, state, action, played):
        kept.append((action.clone(), played[online.INTERVENED].clone()))
        return add(self, state, action, played)

    monkeypatch.setattr(online.ReplayBuffer, "add", noted)
    config = replace(QUICK, offline_ratio=0.5)
    learn_online(policy, world, always(-0.25), config, recorded=data)
    actions, helped = (torch.cat(parts) for parts in zip(*kept, strict=True))
    assert 0.4 < helped.float().mean() < 0.8  # two chunks of three
    assert (actions[helped] == 1.0).all() and not (actions[~helped] == 1.0).all(1).any()
    assert batches
    for batch in batches:
        half = batch.action[8:]
        from_data = batch.state[8:, 0] > 50
        assert (half[~from_data] == 1.0).all() and len(batch.action) == 16
        assert not from_data.any() if data is None else True
    shares = [float((batch.state[8:, 0] > 50).float().mean()) for batch in batches]
    assert (0.0 < np.mean(shares) < 1.0) if data is not None else max(shares) == 0


def test_a_killed_run_goes_on_to_the_same_result(tmp_path):
    class StopError(Exception): ...

    def run(folder, stop_at=None):
        policy, world = acting(), operated(max_policy_steps=2)
        seen = []

        def evaluate(each):
            seen.append(1)
            if stop_at is not None and len(seen) == stop_at:
                raise StopError
            return {"success": 0.0}

        config = replace(QUICK, offline_ratio=0.5, evaluate_at=(0, 20))
        try:
            learn_online(policy, world, always(0.0), config, evaluate=evaluate, run=RunFolder(folder))
        except StopError:
            return None
        return torch.cat([each.flatten() for each in policy.agent.parameters()])

    whole = run(tmp_path / "whole")
    assert run(tmp_path / "killed", stop_at=2) is None
    assert torch.equal(whole, run(tmp_path / "killed"))
    lines = [RunFolder(tmp_path / name).metrics() for name in ("whole", "killed")]
    first, second = ([each["intervened"] for each in part if "intervened" in each] for part in lines)
    assert first == second and 0.4 < np.mean(first) < 0.8  # an operator acts in two chunks of three


def test_noise_is_nothing_that_an_operator_can_do():
    with pytest.raises(ConfigError, match="actions or edit"):
        learn_online(steering(), operated(max_policy_steps=2), always(0.0), QUICK)


@pytest.mark.long
def test_the_verb_learns_with_operators_and_without_recorded_data(tmp_path, capsys):
    root = [f"run.root={tmp_path}", "run.threads=1", "world=reach_planar"]
    few = ["online.steps=600", "online.warmup=200", "online.num_envs=8", "online.evaluate_episodes=8"]
    few += ["online.evaluate_at=[]", "online.agent.width=16", "online.batch_size=16", "online.policy=null"]
    assert main(["online", *root, *few, "online.method=actions", "online.assist.no_progress_steps=3"]) == 0
    helped = ["online.assist.max_policy_steps=4", "online.offline_ratio=0.5", "run.name=half"]
    assert main(["online", *root, *few, "online.method=actions", *helped]) == 0
    assert main(["online", *root, *few, "online.assist.max_policy_steps=4"]) == 2
    assert "operators act in the world" in capsys.readouterr().err
