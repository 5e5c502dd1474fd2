"""Looking ahead: the best candidate is taken, uncertainty can cost or lure, and ended episodes earn nothing more."""

from dataclasses import replace

import numpy as np
import point_world
import pytest
import torch
from point_world import recorded
from torch import Tensor

from robopolicy.core.candidates import majority_mean
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision
from robopolicy.core.spec import STATE, Field, PolicySpec, WorldSpec
from worldmodels.configuration import PlanConfig, RssmConfig
from worldmodels.planning import PlannedPolicy
from worldmodels.protocol import Imagined
from worldmodels.rssm.model import RssmModel

FIELD = {STATE: Field((1,))}
SPEC = WorldSpec("line", FIELD, Field((1,), low=-1.0, high=1.0), 10.0, 100, rewards=("right",))


class Line:
    """A point on a line, paid where it stands; uncertainty grows to the right; the task ends beyond `end`."""

    spec = SPEC

    def __init__(self, end=100.0):
        self.end = end

    def initial(self, context, seeds):
        return {"x": torch.from_numpy(context.last(STATE)[:, 0].astype(np.float32)), "seed": torch.from_numpy(seeds)}

    def imagine(self, latent, actions: Tensor):
        x = latent["x"] + actions[:, 0].float()
        over = x > self.end
        prediction = Imagined({STATE: x[:, None]}, {"right": x}, over, over, x.clamp(min=0))
        return {"x": x, "seed": latent["seed"]}, prediction


class Wanderer:
    """Draws a step of its chunk uniformly; without noise it stays."""

    spec = PolicySpec(FIELD, SPEC.action, 1, 2, 2, 1, 10.0)

    def act(self, observation, generator, *, deterministic=False):
        rows = len(observation[STATE])
        step = torch.zeros(rows, 1, 1) if deterministic else torch.rand(rows, 1, 1, generator=generator) * 2 - 1
        actions = step.expand(rows, 2, 1)
        return Decision(actions, {"step": step}, torch.zeros(rows, 1), torch.ones(rows, 1, dtype=torch.bool))

    def log_prob(self, observation, latents):
        raise NotImplementedError

    def reset(self, rows=None):
        pass

    def save(self, folder):
        pass


def decide(config, end=100.0, value=None, rows=64, deterministic=False):
    planned = PlannedPolicy(Wanderer(), Line(end), config, value)
    observation = {STATE: torch.zeros(rows, 1, 1)}
    decision = planned.act(observation, torch.Generator().manual_seed(0), deterministic=deterministic)
    assert torch.equal(decision.latents["step"], decision.actions[:, :1])
    return float(decision.actions.mean()), planned


def test_the_best_of_the_candidates_is_taken():
    alone, _ = decide(PlanConfig(candidates=1, horizon=2))
    chosen, planned = decide(PlanConfig(candidates=8, horizon=2))
    assert abs(alone) < 0.2 and chosen > 0.7
    assert planned.last_scores.shape == (64, 8)


def test_doubt_costs_or_lures():
    assert decide(PlanConfig(candidates=8, horizon=2, uncertainty=-5.0))[0] < 0.1
    assert decide(PlanConfig(candidates=8, horizon=2, uncertainty=5.0))[0] > 0.7


def test_nothing_is_earned_after_the_end_and_what_lies_beyond_counts_where_it_goes_on():
    def value(observation):
        return 100.0 * observation[STATE][:, -1, 0]

    assert decide(PlanConfig(candidates=16, horizon=2), value=value)[0] > 0.7
    assert decide(PlanConfig(candidates=16, horizon=2), end=0.6, value=value)[0] < 0.3
    assert decide(PlanConfig(candidates=16, horizon=2), value=lambda seen: -value(seen))[0] < -0.7


def test_what_lies_beyond_a_time_limit_is_discounted_by_the_steps_that_were_taken():
    limited = Line()
    limited.spec = replace(SPEC, horizon=3)  # ends in the middle of the second chunk of two steps
    config = PlanConfig(candidates=1, horizon=4, discount=0.5)

    class Rock(Wanderer):
        def act(self, observation, generator, *, deterministic=False):
            return super().act(observation, generator, deterministic=True)

    planned = PlannedPolicy(Rock(), limited, config, value=lambda seen: torch.full((len(seen[STATE]),), 8.0))
    planned.act({STATE: torch.zeros(1, 1, 1)}, torch.Generator())
    assert planned.last_scores.tolist() == [[8.0 * 0.5**3]]


def test_the_sure_choice_is_a_candidate():
    _, planned = decide(PlanConfig(candidates=3, horizon=2), deterministic=True)
    assert float(planned.last_scores[:, 0].abs().max()) == 0.0


def test_aggregates():
    scores = torch.tensor([[0.0, 0.0, 9.0], [9.0, 8.0, 0.0]])
    assert majority_mean(scores).tolist() == [0.0, 8.5]
    with pytest.raises(ConfigError, match="median"):
        PlanConfig(aggregate="medain")
    with pytest.raises(ConfigError, match="candidates"):
        PlanConfig(candidates=0)


def test_what_the_model_sees_is_asked_for_and_missed():
    camera = {"observation.images.top": Field((8, 8, 3), "uint8", 0, 255)}
    seeing = Line()
    seeing.spec = replace(SPEC, observation={**FIELD, **camera})
    planned = PlannedPolicy(Wanderer(), seeing)
    assert planned.spec.cameras == ("top",) and planned.policy.spec.cameras == ()
    with pytest.raises(ConfigError, match=r"observation\.images\.top"):
        planned.act({STATE: torch.zeros(1, 1, 1)}, torch.Generator())


def test_a_model_of_another_task_is_named_as_such():
    for changes, what in (
        (
            {"action": Field((1,), names=("lift",))},
            "Element 0 of actions is 'push' for the policy, but 'lift' for the planning world model",
        ),
        (
            {"observation": {STATE: Field((2,))}},
            "to another task than the policy: its 'observation.state' has shape \\[2\\], but the policy's has \\[1\\]",
        ),
    ):
        policy, model = Wanderer(), Line()
        policy.spec = replace(policy.spec, action=Field((1,), names=("push",)))
        model.spec = replace(SPEC, **changes)
        with pytest.raises(ConfigError, match=what):
            PlannedPolicy(policy, model)


def test_a_policy_that_sees_several_frames_plans_in_a_model_that_reads_actions_between_them():
    episodes = recorded(20)
    model = RssmModel.build(RssmConfig(size="tiny", batch_size=4, length=4), point_world.SPEC, episodes, 0)

    class Onlooker(Wanderer):
        spec = PolicySpec(point_world.SPEC.observation, point_world.SPEC.action, 3, 2, 2, 1, 10.0)

        def act(self, observation, generator, *, deterministic=False):
            decision = super().act(observation, generator, deterministic=deterministic)
            return replace(decision, actions=decision.actions.expand(-1, 2, 2))

    planned = PlannedPolicy(Onlooker(), model, PlanConfig(candidates=2, horizon=4))
    first_observation = {key: value[:5, None].expand(-1, 3, -1) for key, value in episodes.observation.items()}
    chosen = planned.act(first_observation, torch.Generator().manual_seed(0))
    alone = {key: value[:, -1:].expand(-1, 3, -1) * 1.0 for key, value in first_observation.items()}
    alone = {key: torch.cat([value[:, :2] + 5.0, value[:, 2:]], 1) for key, value in alone.items()}
    other = planned.act(alone, torch.Generator().manual_seed(0))
    assert torch.equal(chosen.actions, other.actions)  # what came before, under unknown actions, tells it nothing
