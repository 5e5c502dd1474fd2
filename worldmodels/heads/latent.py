"""Reward, success and uncertainty heads on latents; fitted once more after the latents are final.

Heads trained together with the latents see few successes and a moving target. They are therefore refitted afterwards,
on true states and with a fixed fraction of successes (as DiWA, arXiv:2508.03645, trains its classifier on a frozen
latent). This takes seconds instead of minutes and gives a sharp goal boundary, which is what a policy trained in
imagination exploits first. Axes: N rows, V elements of standardised vectors, F summary of the latent, A action
dimension.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.episodes import Episodes
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.returns import PROGRESS, SUCCESS
from robopolicy.nn.blocks import Members, perceptron
from worldmodels.data import BOUND, Standardised
from worldmodels.heads.outputs import (
    BINS,
    calibrated_threshold,
    potential_explains_rewards,
    quantiles_of,
    reward_bins,
    two_hot,
    two_hot_mean,
)
from worldmodels.heads.success import make_success_head
from worldmodels.protocol import Imagined

BATCH = 512
POSITIVE_SHARE = 0.25
"""Fraction of successful steps per batch."""

THUMBNAIL = 4
"""Side length in pixels to which images are averaged as targets of the uncertainty heads."""


@dataclass(frozen=True)
class LatentSteps:
    """Single transitions between two latents.

    before, after: summaries [N, F]; state, next_state: [N, V]; action: [N, A], standardised; change: [N, K], target of
    the uncertainty heads; reward: [N], standardised; success: [N] bool, after the step.
    """

    before: Tensor
    after: Tensor
    state: Tensor
    next_state: Tensor
    action: Tensor
    change: Tensor
    reward: Tensor
    success: Tensor

    def take(self, rows: Tensor) -> "LatentSteps":
        """Select the steps `rows`, by index or mask.

        rows: indices [R], or a mask [N] bool; every field of the result has those rows. For fields with two leading
        axes, [M, T, ...], a mask [M, T] merges them into one.
        """
        return LatentSteps(*(value[rows] for value in self.__dict__.values()))


class LatentHeads(nn.Module):
    """Two-hot reward head, success head, and the heads whose disagreement is the uncertainty (Plan2Explore, Sekar et
    al. 2020, arXiv:2005.05960).

    If there are vectors, and the increase of a learned potential explains rewards as well as the reward head, the
    increase is the reward: moving in circles then earns none.
    """

    bins: Tensor
    change_scale: Tensor
    reward_offset: Tensor
    pays_potential: Tensor

    def __init__(
        self,
        width: int,
        layers: int,
        members: int,
        *,
        elements: int,
        actions: int,
        guessed: int,
        success_head: str = "contrastive",
    ):
        super().__init__()
        # Last weights of zero: before training all bins weigh the same and the reward is 0, as in DreamerV3.
        self.reward = perceptron(width + 2 * elements, width, layers, BINS, scale=0.0)
        self.success = make_success_head(success_head, width + 2 * elements, width, layers)
        self.guesses = Members(members, width + elements + actions, width, 2, guessed)
        self.potential = Members(1, elements, width, 2, 1) if elements else None
        self.register_buffer("bins", reward_bins())
        self.register_buffer("change_scale", torch.ones(elements))
        self.register_buffer("reward_offset", torch.zeros(()))
        self.register_buffer("pays_potential", torch.zeros((), dtype=torch.bool))

    def keep_scales(self, change: Tensor, reward: Tensor) -> None:
        """Store the scale of each element's deviation relative to that of its change, [V], and the reward's mean
        relative to its deviation, [1].
        """
        self.change_scale.copy_(change)
        self.reward_offset.copy_(reward[0])

    def inputs(self, summary: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Return the inputs of the reward and success heads from a summary [..., F] and states [..., V] before and
        after the step: the new state and its change, each standardised.
        """
        change = ((after - before) * self.change_scale).clamp(-BOUND, BOUND)
        return torch.cat([summary, after, change], -1)

    def rewards(self, inputs: Tensor) -> Tensor:
        """Return standardised rewards [...]."""
        return self.increase(inputs) if self.pays_potential else two_hot_mean(self.reward(inputs), self.bins)

    def increase(self, inputs: Tensor) -> Tensor:
        """Return the increase [...] of the potential, as a standardised reward."""
        assert self.potential is not None
        after, change = inputs[..., -2 * len(self.change_scale) :].chunk(2, -1)
        # The state before is recovered from what heads read: change is in deviations of a change, after in the state's.
        states = torch.stack([after - change / self.change_scale, after])
        before, later = self.potential(states.reshape(1, -1, after.shape[-1])).reshape(states.shape[:-1])
        # An increase has no offset in the world's units: circles sum to 0 there, not in standardised rewards.
        return later - before - self.reward_offset

    def choose_reward(self, inputs: Tensor, reward: Tensor) -> None:
        """Use the potential's increase as reward if it explains standardised rewards [N] as well as the reward head."""
        if self.potential is not None:
            predicted = two_hot_mean(self.reward(inputs), self.bins)
            self.pays_potential.fill_(potential_explains_rewards(self.increase(inputs), reward, predicted))

    def losses(self, inputs: Tensor, reward: Tensor, success: Tensor) -> dict[str, Tensor]:
        """Return the cross-entropies [...] of "reward" and "success"."""
        logits = self.reward(inputs).log_softmax(-1)
        edge = functional.binary_cross_entropy_with_logits(self.success(inputs), success.float(), reduction="none")
        return {"reward": -(two_hot(reward, self.bins) * logits).sum(-1), "success": edge}

    def training_losses(self, steps: LatentSteps, generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"reward", "success", "disagreement"} and, where there are vectors, {"potential"}, each [N].

        If there are vectors, the summary is masked in half of the rows, so that heads rely on it only where the state
        is not enough. Every uncertainty head skips its own half of the rows.
        """
        device = steps.reward.device
        summary_mask = torch.rand(len(steps.reward), 1, generator=generator, device=generator.device) < 0.5
        summary = steps.after * summary_mask.to(device) if steps.state.shape[1] else steps.after
        head_inputs = self.inputs(summary, steps.state, steps.next_state)
        losses = self.losses(head_inputs, steps.reward, steps.success) | {
            "success": self.success.loss(head_inputs, steps.success)
        }
        if self.potential is not None:
            losses["potential"] = (self.increase(head_inputs) - steps.reward).square()
        inputs = torch.cat([steps.before, steps.state, steps.action], -1)
        guesses = self.guesses(inputs.expand(len(self.guesses.weights[0]), -1, -1))
        # Weights of 2 on half of the rows have mean 1: the loss is as large as without leaving rows out.
        weight = 2.0 * (torch.rand(guesses.shape[:2], generator=generator, device=generator.device) < 0.5)
        error = (guesses - steps.change).square().mean(-1)
        return {**losses, "disagreement": (error * weight.to(device)).mean(0)}

    def disagreement(self, summary: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """Return the disagreement [N] of the predictions of the next change."""
        inputs = torch.cat([summary, state, action], -1)
        return self.guesses(inputs.expand(len(self.guesses.weights[0]), -1, -1)).std(0, correction=0).mean(-1)


class HeadStage(nn.Module):
    """Fits `heads` on latents of episodes, which `latents` computes once; a `Regression`."""

    def __init__(self, heads: LatentHeads, latents: Callable[[Episodes], LatentSteps]):
        super().__init__()
        self.heads, self._latents = heads, latents

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield {"steps": LatentSteps} indefinitely, a fraction of them successful; the only state is `generator`."""
        steps = self._latents(episodes)
        positive = steps.success.nonzero()[:, 0]
        count = round(POSITIVE_SHARE * BATCH) if len(positive) else 0
        while True:
            draws = torch.rand(BATCH, generator=generator, device=generator.device, dtype=torch.float64)
            draws = draws.to(positive.device)
            rows = (draws * len(steps.reward)).long()
            rows[:count] = positive[(draws[:count] * len(positive)).long()]
            yield {"steps": steps.take(rows)}

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the loss terms, each [N]."""
        return self.heads.training_losses(batch["steps"], generator)


class CalibratedHeads(Standardised):
    """A module whose buffers convert head outputs into rewards, success and a calibrated uncertainty.

    success_bonus: the reward for reaching success. The change is that of the state in one step.
    """

    success_bonus: float
    change_std: Tensor
    reward_mean: Tensor
    reward_std: Tensor
    success_threshold: Tensor
    uncertainty_quantiles: Tensor

    def register_thresholds(self) -> None:
        """Register the buffers that `set_thresholds` fills."""
        self.register_buffer("success_threshold", torch.zeros(()))
        self.register_buffer("uncertainty_quantiles", torch.zeros(101))

    def keep_scales(self, heads: LatentHeads) -> None:
        """Give `heads` the scales of states and rewards, once the statistics are available."""
        heads.keep_scales(self.state_std / self.change_std, self.reward_mean / self.reward_std)

    def standard_reward(self, reward: Tensor) -> Tensor:
        """Standardise rewards [...], given in the world's units."""
        return (reward - self.reward_mean) / self.reward_std

    @torch.no_grad()
    def set_thresholds(
        self, heads: LatentHeads, inputs: Tensor, reward: Tensor, success: Tensor, uncertainty: Tensor
    ) -> None:
        """Calibrate the success threshold, the uncertainty quantiles and the choice of reward head on N held-out steps.

        inputs: [N, F], inputs of the heads; reward: [N], standardised; success: [N] bool; uncertainty: [N].
        """
        heads.choose_reward(inputs, reward)
        self.success_threshold.copy_(calibrated_threshold(heads.success(inputs), success))
        self.uncertainty_quantiles.copy_(quantiles_of(uncertainty))

    def judged(
        self, heads: LatentHeads, inputs: Tensor, observation: Mapping[str, Tensor], uncertainty: Tensor
    ) -> Imagined:
        """Build one imagined step; success terminates the episode if the spec ends episodes at success.

        inputs: [B, F], inputs of the heads; observation: key -> [B, *shape]; uncertainty: [B]. Rewards are returned in
        the world's units.
        """
        success = heads.success(inputs) > self.success_threshold
        rewards = {
            PROGRESS: self.reward_mean + self.reward_std * heads.rewards(inputs),
            SUCCESS: self.success_bonus * success.to(inputs.dtype),
        }
        return Imagined(observation, rewards, success, torch.zeros_like(success), uncertainty)


keep_former_names(__name__, {"Judged": "CalibratedHeads"})
