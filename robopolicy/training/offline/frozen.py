"""Improvers that leave the policy frozen: DSRL steers its noise, IDQL selects among its action chunks.

DSRL, Wagenmaker et al. 2025, arXiv:2506.15799 (noise-aliased, DSRL-NA). A critic of actions, Q(s, a), is fitted to the
data. The frozen policy maps noise w to the chunk pi(s, w), so Q^W(s, w) = Q(s, pi(s, w)) can be computed for any noise,
and an actor over noise is trained to maximise it. Deviations: Q is the given critic, whose targets do not follow the
actor (the paper backs up pi(s', w') with the actor's w'); and a fraction of the noise samples is the actor's own, so
that Q^W is accurate there.

IDQL, Hansen-Estruch et al. 2023, arXiv:2304.10573: an expectile critic (offline.agent=iql), a policy that imitates the
data, and the argmax of Q over its samples. Deviation: the number of samples is not fixed by the user. The argmax over
many samples selects errors of the critic, so every round increases the number beyond that of the last accepted round,
and the gate decides whether the critic is reliable enough for it.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Policy, TensorObservation, Trainable
from robopolicy.core.randomness import Generators
from robopolicy.nn.optimisers import require_finite, set_learning_rate
from robopolicy.rl.offline.configuration import RlpdConfig
from robopolicy.rl.offline.decisions import frame_states, observations_at
from robopolicy.rl.offline.sac import Sac
from robopolicy.training.critics import BestOfPolicy, SteeredPolicy, steer
from robopolicy.training.offline.configuration import DsrlConfig, IdqlConfig
from robopolicy.training.offline.improvers import OfflineContext, chosen_decisions


class Dsrl:
    """Improver with the settings `DsrlConfig`, which describes the method."""

    def __init__(self, config: DsrlConfig):
        self.config = config

    def wrap(self, policy: Policy, lesson: OfflineContext, seed: int) -> Trainable:
        """Return the policy as the base of a steered policy whose steering is still off; see `Wraps`."""
        config, spec = self.config, policy.spec
        settings = RlpdConfig(
            width=config.width,
            depth=config.depth,
            critics=config.critics,
            critic_subset=None,
            learning_rate=config.learning_rate,
            temperature=0.1,
        )
        steered_policy = steer(
            policy,
            settings,
            spec.observation,
            spec.instructions,
            bound=config.noise_bound,
            seed=seed,
            kind="rlpd",
            steers=False,
        )
        return cast(Trainable, steered_policy)  # the rounds copy, save and restore it, and it learns here alone

    def prepare(self, policy: Trainable) -> None:
        """Do nothing; raises ConfigError for a policy that was not wrapped."""
        if not isinstance(policy, SteeredPolicy):
            raise ConfigError(f"dsrl changes a SteeredPolicy, not a {type(policy).__name__}: wrap() creates one.")

    def improve(
        self, policy: Trainable, lesson: OfflineContext, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Distil the critic of actions into one of noise and let the actor maximise it; see `Improver`."""
        steering = cast(SteeredPolicy, policy)
        config = self.config
        data = lesson.data
        agent, view = cast(Sac, steering.agent), steering.interface
        # Values of noise are distilled from the lesson's critic: they are discounted as those are.
        agent.config = replace(agent.config, discount=lesson.critic.discount)
        for optimiser in agent.optimisers.values():
            set_learning_rate(optimiser, config.learning_rate * step)
        states = frame_states(lesson.episodes, view)
        # Only before it steers: moving statistics would change what the noise critics have learned.
        if not bool(steering.steers):
            agent.fit_statistics(states[data.frame])
        keys = list(dict.fromkeys((*steering.spec.observation, *lesson.interface.keys)))
        draws = generators["observations"]
        losses: list[Tensor] = []
        for _ in range(config.steps):
            rows = torch.randint(len(data), (config.batch_size,), generator=draws, device=draws.device)
            rows = rows.to(states.device)
            observation = observations_at(lesson.episodes, data.frame[rows], steering.spec.history, keys)
            state = states[data.frame[rows]]
            noise = sample_noise(steering, state, config.actor_noise_fraction, generators["noise"])
            worth = noise_values(steering, lesson, observation, data.transitions.state[rows], noise)
            # No backup and no target network: Q^W(s, w) = Q(s, pi(s, w)) is known for any w.
            loss = (agent.critics(state, noise) - worth).square().mean(1).sum()
            require_finite("the loss", loss.detach(), where)
            agent.step("critics", loss)
            agent.climb(state, generators["climb"])
            losses.append(loss.detach())
        steering.enable_agent()
        gain = float(self._gain(steering, lesson, states, keys, generators))
        return {"loss": float(torch.stack(losses).mean()), "gain": gain}

    def _gain(
        self, policy: SteeredPolicy, lesson: OfflineContext, states: Tensor, keys: list[str], generators: Generators
    ) -> Tensor:
        """Return the mean gain [] in the critic's value of the actor's noise over normal noise."""
        data, count = lesson.data, min(1024, len(lesson.data))
        rows = torch.linspace(0, len(data) - 1, count, device=states.device).long()
        observation = observations_at(lesson.episodes, data.frame[rows], policy.spec.history, keys)
        state = states[data.frame[rows]]
        normal = sample_noise(policy, state, 0.0, generators["gain"])
        own_values, normal_values = (
            noise_values(policy, lesson, observation, data.transitions.state[rows], noise)
            for noise in (policy.agent.act(state), normal)
        )
        return (own_values - normal_values).mean()


@torch.no_grad()
def noise_values(
    policy: SteeredPolicy, lesson: OfflineContext, seen: TensorObservation, state: Tensor, noise: Tensor
) -> Tensor:
    """Return Q^W(s, w) = min Q(s, pi(s, w)) [n] of flat noise [n, W] in [-1, 1].

    seen: observations [n, H, ...] that the base reads; state: [n, S], the input of the critic of actions.
    """
    action = lesson.interface.to_agent(policy.actions_of(seen, noise))
    return lesson.critic.action_values(state, action).amin(0)


def sample_noise(policy: SteeredPolicy, state: Tensor, own: float, generator: torch.Generator) -> Tensor:
    """Sample flat noise [n, W] for states [n, S]: standard normal scaled to the bounds, with fraction `own` from the
    actor.
    """
    shape = policy.base.noise_shape
    normal = torch.randn((len(state), *shape), generator=generator, device=generator.device).to(state.device)
    noise = policy.interface.to_agent(normal)
    if not own:
        return noise
    agent_noise = policy.agent.act(state, generator)
    use_agent = torch.rand((len(state), 1), generator=generator, device=generator.device).to(state.device) < own
    return torch.where(use_agent, agent_noise, noise)


LOOKED_AT = 1024
"""Number of recorded observations on which the log reports the gain of selection, by the critic itself."""


class Idql:
    """Improver with the settings `IdqlConfig`, which describes the method."""

    def __init__(self, config: IdqlConfig):
        self.config = config

    def wrap(self, policy: Policy, lesson: OfflineContext, seed: int) -> Trainable:
        """Return the policy as the base of one that will select among chunks by the prefitted critic; see `Wraps`."""
        best_of_policy = BestOfPolicy(policy, lesson.critic, lesson.interface, 1)
        return cast(Trainable, best_of_policy)  # the rounds copy, save and restore it, and nothing of it learns

    def prepare(self, policy: Trainable) -> None:
        """Do nothing; raises ConfigError for a policy that was not wrapped."""
        if not isinstance(policy, BestOfPolicy):
            raise ConfigError(f"idql changes a BestOfPolicy, not a {type(policy).__name__}: wrap() creates one.")

    def improve(
        self, policy: Trainable, lesson: OfflineContext, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Increase the number of sampled chunks; see `Improver`. step: fraction of the configured increment."""
        choosing, data = cast(BestOfPolicy, policy), lesson.data
        now = int(choosing.count)
        further = self.config.candidates - 1 if now == 1 else now
        choosing.count.fill_(now + max(1, round(step * further)))
        frames = data.frame[:: max(1, len(data) // LOOKED_AT)][:LOOKED_AT]
        _, gain = chosen_decisions(choosing.base, lesson, frames, int(choosing.count), generators)
        return {"candidates": float(choosing.count), "gain": gain}


keep_former_names(__name__, {"drawn_noise": "sample_noise"})
