"""Recovery, correction and learning from them with a real arm: what an operator does, and what is kept of it."""

import numpy as np
import pytest
import torch

from robopolicy.core.interventions import Segment, imitated_in_words, imitation_mask
from robopolicy.core.policy import Decision
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, PolicySpec
from robopolicy.data.configuration import CorrectConfig
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.data.record import record_corrected
from sims import arm, grasping
from sims.registry import make_expert, make_world
from sims.task import newest

pytestmark = pytest.mark.long


class Fumbles:
    """Lowers the hand where it is, with closing jaws: it never grasps anything."""

    def __init__(self, world):
        fields, action = world.spec.observation, world.spec.action
        self.spec = PolicySpec(fields, action, 1, 4, 4, 0, world.spec.fps)

    def reset(self, rows=None):
        pass

    def act(self, observation, generator, deterministic=False):
        rows = len(observation[STATE])
        none = torch.zeros(rows, 0)
        return Decision(torch.tensor([0.0, 0.0, -0.5, -1.0]).expand(rows, 4, 4), {}, none, none.bool())


@pytest.mark.checks("RaC")
@pytest.mark.parametrize("name", ["pick_place", "stack"])
def test_an_arm_that_fumbles_is_brought_back_does_it_and_what_it_fumbled_is_not_imitated(name, tmp_path):
    world = make_world(name, 4)
    expert, config = make_expert(name, world.spec), CorrectConfig(max_policy_steps=12, recover_steps=20)
    data = record_corrected(world, Fumbles(world), expert, range(4), config, generator=torch.Generator())
    assert float(data.success.float().mean()) > 0.8
    for row in range(len(data)):
        one = data.select([row])
        kinds = one.segment.tolist()
        assert kinds == sorted(kinds) and kinds.count(Segment.AUTONOMOUS) == 12  # own, recovering, correcting
        recovering = kinds.count(Segment.RECOVER)
        assert 2 <= recovering <= 10 and kinds.count(Segment.CORRECT) > 5
        back = {key: value[12 + recovering].numpy()[None, None] for key, value in one.observation.items()}
        parts = arm.parts(newest(back, STATE))
        assert expert.recovered(back)[0] and parts["gripper"][0] > grasping.RELEASED
        assert parts["tip"][0, 2] > newest(back, ENVIRONMENT_STATE)[0, grasping.CUBE][2] + 0.04
        before = {key: value[12].numpy()[None, None] for key, value in one.observation.items()}
        assert not expert.recovered(before)[0]
    assert np.array_equal(imitation_mask(data), data.segment > 0)
    write_dataset(data, tmp_path)
    stored = read_dataset(tmp_path)
    assert torch.equal(stored.segment, data.segment) and torch.equal(stored.actor, data.actor)
    shares = {"recover": 0.25, "correct": 0.75}
    assert imitated_in_words(stored, shares=shares) == "Samples by kind of step: recover 25%, correct 75%"
    world.close()
