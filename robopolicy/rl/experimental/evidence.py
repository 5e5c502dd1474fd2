"""Experimental credit by contrasting answers, CEPO (arXiv:2605.19436): for steps that the right answer favours more
than a wrong one.

A robot's answer is where an episode ends, and a policy that reads its goal has answers in its context: the goal is set
to where the best success of the group ended, and to where its worst failure did.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.policy import TensorObservation
from robopolicy.core.rollouts import Rollouts, tensor_of
from robopolicy.core.segments import Segments
from robopolicy.core.spec import elements_of
from robopolicy.rl.context import Context, Tools, latents_for_other_policy
from robopolicy.rl.registry import Need, Slot, mechanism


def contrasted(advantage: Tensor, delta: Tensor, share: float, epsilon: float) -> Tensor:
    """Return A ((1 - share) + share w) with w = exp(sign(A) delta) within 1 +- epsilon, shaped as both inputs [...]."""
    weight = (advantage.sign() * delta).clamp(-10, 10).exp().clamp(1 - epsilon, 1 + epsilon)
    return advantage * ((1 - share) + share * weight)


@mechanism(Slot.MODEL, "answers", source="CEPO, arXiv:2605.19436", needs=(Need.GROUPS,), gives=(Need.ANSWER_SCORES,))
class Answers:
    """Log-probabilities of all steps if the goal were where the group's best success ended, or its worst failure.

    goal: names of the goal's elements -> names of the elements that are to reach it, such as {goal_x: cube_x, goal_y:
    cube_y}. Offsets to the goal, named <thing>_to_<element>, move with it. The best success has the highest return,
    the worst failure the lowest. A group without successes has its own goal as the right answer, one without failures
    gets the right answer twice. Adds extras["right_logp"] and ["wrong_logp"] [B, T, K] under the policy before the
    update.
    Raises ConfigError for unknown elements.
    """

    def __init__(self, tools: Tools, *, goal: dict[str, str] | None = None):
        self.tools = tools
        places = elements_of(tools.fields)
        if not goal:
            raise ConfigError(
                "models=[answers] needs the elements of the observation that are the goal, and those that are to reach "
                "it: set options.answers.goal, such as {goal_x: cube_x, goal_y: cube_y}."
            )
        for name in (*goal, *goal.values()):
            if name not in places:
                raise ConfigError(f"options.answers.goal: no element is named '{name}'.{did_you_mean(name, places)}")
        self.reached = [(places[name], places[value]) for name, value in goal.items()]
        self.offsets = [[place for other, place in places.items() if other.endswith(f"_to_{name}")] for name in goal]

    @torch.no_grad()
    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Add the scores."""
        success, returns = rollouts.row_success, rollouts.row_return
        groups = Segments.of(rollouts.group)
        best = _first(groups, -returns, success)
        worst = _first(groups, returns, ~success)
        right_logp = self._logp(self._with_goals(rollouts, best), rollouts)
        wrong_logp = self._logp(self._with_goals(rollouts, worst), rollouts)
        wrong_logp = torch.where((worst >= 0)[:, None, None], wrong_logp, right_logp)
        return rollouts.with_extras(right_logp=right_logp, wrong_logp=wrong_logp)

    def _with_goals(self, rollouts: Rollouts, row: Tensor) -> TensorObservation:
        """Return the observations with each row's goal where episode `row` [B] ended; -1 leaves it as it is."""
        moved_keys = {
            key for (place, _), offsets in zip(self.reached, self.offsets, strict=True) for key, _ in (place, *offsets)
        }
        new_observation = {key: tensor_of(rollouts.observation, key).clone() for key in moved_keys}
        last = (rollouts.alive.sum(1) - 1).clamp(min=0)
        source = row.clamp(min=0)
        for ((key, index), (from_key, from_index)), offsets in zip(self.reached, self.offsets, strict=True):
            ends = tensor_of(rollouts.next_observation, from_key)[source, last[source], -1, from_index]
            before = tensor_of(rollouts.observation, key)[..., index]
            goal = torch.where((row >= 0)[:, None, None], ends[:, None, None].expand_as(before), before)
            new_observation[key][..., index] = goal
            for other_key, other in offsets:
                new_observation[other_key][..., other] += goal - before
        return {**rollouts.observation, **new_observation}

    def _logp(self, observation: Mapping[str, Any], rollouts: Rollouts) -> Tensor:
        """Return log-probabilities [B, T, K] of the rollouts' steps with these observations."""
        alive = rollouts.alive
        with_goals = replace(rollouts, observation=observation, latents=latents_for_other_policy(rollouts.latents))
        logp = self.tools.score(self.tools.policy, with_goals, alive).logp
        return logp.new_zeros(rollouts.mask.shape).index_put((alive,), logp)

    def tree(self) -> dict[str, Any]:
        """Return an empty tree; there is no state."""
        return {}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Do nothing; there is no state."""


def _first(groups: Segments, key: Tensor, counts: Tensor) -> Tensor:
    """Return the row with the smallest `key` [B] among those that count [B] bool in each row's group, [B]; -1 if none
    does.
    """
    is_first = counts & (groups.rank(key, counts) == 0)
    row = torch.arange(len(key), device=key.device).double()
    return groups.minimum(row, is_first, empty=-1.0)[groups.index].long()


@mechanism(Slot.CREDIT, "evidence", source="CEPO, arXiv:2605.19436", needs=(Need.GROUPS, Need.ANSWER_SCORES))
def evidence(
    rollouts: Rollouts,
    advantage: Tensor,
    context: Context,
    *,
    share: float = 0.5,
    epsilon: float = 0.2,
    until: float = 1.0,
) -> Tensor:
    """Credit decisive steps: A ((1 - l) + l w), w = exp(sign(A) delta) within 1 +- epsilon, l from `share` to 0.

    delta: a step's log-probability given the right answer minus that given a wrong one. l falls linearly until this
    fraction of the run (the authors: over 25 updates). Takes and returns A [B, T, K].
    """
    delta = rollouts.extras["right_logp"] - rollouts.extras["wrong_logp"]
    left = max(0.0, 1 - context.share / until) if until > 0 else 0.0
    return contrasted(advantage, delta, share * left, epsilon)
