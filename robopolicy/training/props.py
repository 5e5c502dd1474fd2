"""PROPS: collect on-policy data with less sampling error, by steering away from what has been sampled too often.

An iteration's data comes in parts. After each part a copy of the policy learns to make what was drawn so far a little
less likely, and plays the next part: what is rare in the data so far comes up more. All parts together look more like
the policy's distribution than as many independent samples do, and are learned from as if they had been drawn from it.

Source: Corrado & Hanna 2023, arXiv:2311.08290 (proximal robust on-policy sampling). On denoising chains the steps are
the transition densities of all steps (the paper has Gaussian heads).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts, concatenate
from robopolicy.core.world import World
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.weights import step_mean
from robopolicy.training.asynchronous import copy_for_collecting
from robopolicy.training.collection import Collector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import decisions_at, rescored
from robopolicy.training.state import clip_gradients


def sampling_error_loss(log_ratio: Tensor, mask: Tensor, epsilon: float, kl_weight: float) -> Tensor:
    """Return mean(max(r, clip(r, 1 - eps, 1 + eps))) + kl_weight * mean(r log r - r + 1) over masked steps, a scalar.

    r: the sampling policy's probability over the policy's. It has no gradient below 1 - eps: no step is pushed further.
    """
    ratio = log_ratio.exp()
    surrogate = torch.max(ratio, ratio.clamp(1 - epsilon, 1 + epsilon))
    divergence = ratio * log_ratio - ratio + 1
    return (step_mean(mask) * torch.where(mask, surrogate + kl_weight * divergence, 0.0)).sum()


class PropsCollector:
    """Collects each iteration's rollouts in `parts`, the later ones with an adjusted copy of the policy.

    rate, epochs, epsilon, kl_weight, kl_stop: of the adjustment, which starts from the policy anew for each part.
    """

    def __init__(
        self,
        collector: Collector,
        policy: Any,
        generator: torch.Generator,
        parts: int,
        *,
        rate: float = 1e-4,
        epochs: int = 4,
        epsilon: float = 0.1,
        kl_weight: float = 0.1,
        kl_stop: float = 0.03,
        minibatch: int = 2048,
    ):
        self.collector, self.policy, self.generator, self.parts = collector, policy, generator, parts
        self.instructions = collector.world.spec.instructions
        self.rate, self.epochs, self.epsilon, self.minibatch = rate, epochs, epsilon, minibatch
        self.kl_weight, self.kl_stop = kl_weight, kl_stop

    def publish(self, policy: Any, version: int) -> None:
        """Nothing to do: the policy is read when it is needed."""

    def close(self) -> None:
        """Nothing runs."""

    def collect(self, iteration: int) -> Rollouts:
        """Return all parts of an iteration, scored by the policy itself."""
        sampler = self.collector.policy
        played: list[Rollouts] = []
        for part in range(self.parts):
            sampler.load_state_dict(self.policy.state_dict())  # type: ignore[attr-defined]
            if played:
                self._adjust(sampler, played, self.generator)
            found = self.collector.collect(iteration * self.parts + part, self.generator, iteration)
            played.append(self._as_own(found))
        return concatenate(played)

    def _adjust(self, sampler: Any, played: list[Rollouts], draws: torch.Generator) -> None:
        """Make what was played less likely under the sampler, within a trust region."""
        sampler.requires_grad_(True)
        optimiser = torch.optim.Adam(list(sampler.trainable_parameters()), lr=self.rate)
        flat = [rollouts.flat() for rollouts in played]
        for _ in range(self.epochs):
            for rollouts in flat:
                live = rollouts.played.squeeze(1).nonzero().squeeze(1)
                for index in live[torch.randperm(len(live), generator=draws, device=draws.device)].split(
                    self.minibatch
                ):
                    part = rollouts.take(index)
                    everywhere = torch.ones_like(part.alive)
                    logp = sampler.log_prob(*decisions_at(part, everywhere, self.instructions)).logp
                    mask, log_ratio = part.mask[:, 0], (logp - part.logp_behaviour[:, 0]).clamp(-3, 3)
                    divergence = torch.where(mask, log_ratio.detach().expm1() - log_ratio.detach(), 0.0)
                    if float(divergence.sum(-1).mean()) > self.kl_stop:
                        sampler.requires_grad_(False)
                        return
                    loss = sampling_error_loss(log_ratio, mask, self.epsilon, self.kl_weight)
                    optimiser.zero_grad(set_to_none=True)
                    loss.backward()
                    clip_gradients(list(sampler.trainable_parameters()), 1.0, "adjusting the sampling policy")
                    optimiser.step()
        sampler.requires_grad_(False)

    def _as_own(self, rollouts: Rollouts) -> Rollouts:
        """Score what the sampler played with the policy: it is learned from as the policy's own."""
        logp, _ = rescored(rollouts, self.policy, self.instructions)
        return replace(rollouts, logp_behaviour=torch.where(rollouts.mask, logp, 0.0))

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Tell the sampler of starts what came of them."""
        self.collector.observe(collected, prepared)

    def restart(self) -> None:
        """Begin with fresh episodes at the next call."""
        self.collector.restart()

    def tree(self) -> dict[str, Any]:
        """Return the sampler's state."""
        return self.collector.tree()

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on from `tree`."""
        self.collector.restore(tree)


def props_collector(
    world: World, policy: Any, algorithm: Algorithm, config: FinetuneConfig, seed: int, generator: torch.Generator
) -> PropsCollector:
    """Return a collector whose parts make up config's groups or decisions."""
    parts = config.props
    share = replace(
        config, groups=max(1, config.groups // parts), rollout_length=max(1, config.rollout_length // parts)
    )
    return PropsCollector(
        Collector(world, copy_for_collecting(policy), algorithm, share, seed), policy, generator, parts
    )
