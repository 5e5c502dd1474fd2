"""CEPO: the weights by hand, and answers in the context of a policy that reads its goal."""

import math
from dataclasses import replace

import pytest
import torch
from made_rollouts import make_rollouts

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Scores
from robopolicy.core.spec import STATE, Field
from robopolicy.rl.context import Context, Tools
from robopolicy.rl.experimental.evidence import Answers, evidence

FIELDS = {STATE: Field((3,), names=("x", "goal", "x_to_goal"))}
CONTEXT = Context(torch.Generator())


@pytest.mark.checks("credit/evidence", "CEPO")
def test_weights_by_hand():
    """eps .2, share .5: A 2, d ln 2: 2.2; A -1, d ln 2: -.9; A 2, d ln .9: 1.9; A 1, d .1: 1.0526; l .5, .4, 0."""
    rollouts = make_rollouts([2], [0], [1.0])
    delta = torch.tensor([[[math.log(2), math.log(2)], [math.log(0.9), 0.1]]])
    rollouts = rollouts.with_extras(right_logp=delta - 1.0, wrong_logp=torch.full_like(delta, -1.0))
    advantage = torch.tensor([[[2.0, -1.0], [2.0, 1.0]]])
    expected = torch.tensor([[[2.2, -0.9], [1.9, 1.0526]]])
    torch.testing.assert_close(evidence(rollouts, advantage, CONTEXT), expected, atol=1e-4, rtol=0)
    faded = evidence(rollouts, advantage, replace(CONTEXT, iteration=5, iterations=50), until=0.5)
    torch.testing.assert_close(faded[0, 0, 0], torch.tensor(2 * (0.6 + 0.4 * 1.2)))
    for iteration in (25, 40):
        later = evidence(rollouts, advantage, replace(CONTEXT, iteration=iteration, iterations=50), until=0.5)
        assert torch.equal(later, advantage)


def tools() -> Tools:
    """A policy whose log-probability of a step is -(goal read) - 10 (offset read)."""

    def score(policy, rollouts, where):
        assert not any("condition" in name for name in rollouts.latents)
        seen = rollouts.observation[STATE][where][:, -1]
        logp = (-seen[:, 1] - 10 * seen[:, 2])[:, None].expand(-1, 2)
        return Scores(logp, logp)

    return Tools(None, None, None, FIELDS, 1, ("",), None, score)  # type: ignore[arg-type]


@pytest.mark.checks("models/answers", "CEPO")
def test_the_goal_is_where_the_best_success_and_the_worst_failure_ended():
    """Group 0: successes of return 1 and 2, failures of 0 and -1. Group 1 has no success, group 2 no failure."""
    rollouts = make_rollouts([2, 1, 2, 1, 1, 2], [0, 0, 0, 0, 1, 2], [1.0, 2.0, 0.0, -1.0, 0.0, 1.0])
    state, after = rollouts.observation[STATE], rollouts.next_observation[STATE]
    state[...] = torch.tensor([0.5, 3.0, 2.5])  # at .5, the goal is at 3
    for row, end in enumerate((7.0, 4.0, 8.0, 1.0, 6.0, 5.0)):
        after[row, :, :, 0] = 99.0
        after[row, int(rollouts.alive[row].sum()) - 1, :, 0] = end
    scored = Answers(tools(), goal={"goal": "x"}).annotate(rollouts, CONTEXT)
    right, wrong = (scored.extras[name] for name in ("right_logp", "wrong_logp"))

    def logp(goal: float) -> float:
        return -goal - 10 * (2.5 + goal - 3.0)

    assert right[:, 0, 0].tolist() == pytest.approx([logp(4.0)] * 4 + [logp(3.0), logp(5.0)])
    assert wrong[:, 0, 0].tolist() == pytest.approx([logp(1.0)] * 4 + [logp(6.0), logp(5.0)])
    assert (right[~rollouts.alive] == 0).all() and (wrong[5] == right[5]).all()
    assert torch.equal(scored.observation[STATE], state), "the rollouts keep their goal"


@pytest.mark.checks("models/answers", "CEPO")
def test_elements_are_named():
    with pytest.raises(ConfigError, match=r"set options\.answers\.goal"):
        Answers(tools())
    with pytest.raises(ConfigError, match="no element is named 'goal_x'"):
        Answers(tools(), goal={"goal_x": "x"})
