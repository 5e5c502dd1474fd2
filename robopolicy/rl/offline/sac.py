"""Soft actor-critic and the agents of its family: SAC-N, EDAC, RAVL's agent, and conservative Q-learning with Cal-QL.

Sources: SAC, Haarnoja et al. 2018, arXiv:1812.05905; EDAC, An et al. 2021, arXiv:2110.01548; RAVL, Sims et al. 2024,
arXiv:2402.12527, which uses it on imagined rollouts. With critics=2 and diversity=0 it is plain SAC, as used by MBPO
and MOPO.
"""

import copy
import math
from typing import Any, cast

import torch
from torch import Tensor

from robopolicy.core.errors import DataError
from robopolicy.core.transitions import Transitions
from robopolicy.nn.blocks import follow
from robopolicy.rl.offline.agent import Actor, Critics, OfflineAgent
from robopolicy.rl.offline.configuration import CqlConfig, MdpoConfig, SacConfig


class Sac(OfflineAgent):
    """Offline RL agent; actions are in [-1, 1]."""

    def __init__(self, config: SacConfig, state: int, action: int, seed: int):
        super().__init__()
        self.config, self.updates = config, 0
        with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
            self.actor = self.new_actor(state, action)
            self.critics = Critics(config.critics, state, action, config.width, config.depth, config.layer_norm)
        self.slow = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = torch.nn.Parameter(torch.tensor(float(config.temperature)).log())
        self.target_entropy = -float(action) if config.target_entropy is None else config.target_entropy
        slower = config.learning_rate if config.actor_learning_rate is None else config.actor_learning_rate
        self.optimisers = {
            "actor": torch.optim.Adam(self.actor.parameters(), slower),
            "critics": torch.optim.Adam(self.critics.parameters(), config.learning_rate),
            "temperature": torch.optim.Adam([self.log_temperature], slower),
        }

    def new_actor(self, state: int, action: int) -> Actor:
        """Return an actor for states of S and actions of A elements."""
        return Actor(state, action, self.config.width, self.config.depth)

    def fit_statistics(self, state: Tensor) -> None:
        """Fit the state standardisation of all networks on states [N, S]."""
        for part in (self.actor, self.critics, self.slow):
            part.state.fit(state)

    def target(self, batch: Transitions, generator: torch.Generator) -> Tensor:
        """Return r + discount (1 - terminated) (min_N Q(s', a') - temperature log pi(a'|s')), [B].

        Without `entropy_backup` the densities are omitted; with `subset` the minimum is over that number of the N
        critics.
        """
        with torch.no_grad():
            action, density = self.actor.sample(batch.next_state, generator)
            value = self.smallest(self.slow(batch.next_state, action), generator)
            if self.config.entropy_backup:
                value = value - self.log_temperature.exp() * density
            return batch.backup(value, self.config.discount)

    def smallest(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Return the minimum [B] of `critic_subset` random critics' values, of all without it; values: [N, B]."""
        if self.config.critic_subset is not None:
            order = torch.randperm(len(values), generator=generator, device=generator.device)
            values = values[order[: self.config.critic_subset].to(values.device)]
        return values.min(0).values

    def climbed(self, values: Tensor) -> Tensor:
        """Return the values [B] that the actor maximises, of critics' values [N, B]: their mean with `critic_subset`,
        else their minimum.
        """
        return values.min(0).values if self.config.critic_subset is None else values.mean(0)

    def regulariser(
        self, batch: Transitions, values: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the critics' loss in addition to their squared errors, [], and metrics by name, scalars.

        values: Q [N, B] of the batch's actions. Here it is EDAC's penalty; it uses no random numbers.
        """
        agreement = torch.zeros((), device=values.device)
        if self.config.diversity and self.config.critics > 1:
            agreement = gradient_agreement(self.critics, batch.state, batch.action)
        return self.config.diversity * agreement, {"agreement": agreement.detach()}

    def update(self, batch: Transitions, generator: torch.Generator) -> dict[str, Tensor]:
        """Take one step of the critics, and every `delay` updates one of actor and temperature; returns metrics by
        name, scalars.

        batch: B transitions, states [B, S] and actions [B, A] in [-1, 1].
        """
        target = self.target(batch, generator)
        values = self.critics(batch.state, batch.action)
        critic_loss = (values - target).square().mean(1).sum()
        regulariser, figures = self.regulariser(batch, values, generator)
        self.step("critics", critic_loss + regulariser)
        self.updates += 1
        climbed: dict[str, Tensor] = {}
        if self.updates % self.config.policy_delay == 0:
            climbed["entropy"] = self.ascend(batch.state, *self.proposed(batch, generator))
        follow(self.slow, self.critics, self.config.tau)
        return {
            "critic_loss": critic_loss.detach(),
            **figures,
            "value": values.detach().mean(),
            "value_spread": values.detach().std(0, correction=0).mean(),
            "target": target.mean(),
            **climbed,
            "temperature": self.log_temperature.detach().exp(),
        }

    def proposed(self, batch: Transitions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the actor's actions [B, A] at the batch's states, with gradients, and their log densities [B]."""
        return self.actor.sample(batch.state, generator)

    def climb(self, state: Tensor, generator: torch.Generator) -> Tensor:
        """Take one step of actor and temperature in states [B, S]; returns the actor's entropy there, []."""
        return self.ascend(state, *self.actor.sample(state, generator))

    def ascend(self, state: Tensor, action: Tensor, density: Tensor) -> Tensor:
        """Take one step of actor and temperature by its actions [B, A], with gradients, in states [B, S] and their log
        densities [B]; returns the entropy, [].
        """
        value = self.climbed(self.critics(state, action))
        # E[temperature log pi - Q]: the temperature has a loss of its own below.
        self.step("actor", (self.log_temperature.exp().detach() * density - value).mean())
        if self.config.learn_temperature:
            # The temperature rises while the entropy, -density, is below its target.
            self.step("temperature", -(self.log_temperature.exp() * (density + self.target_entropy).detach()).mean())
        return -density.detach().mean()

    @torch.no_grad()
    def value(self, state: Tensor) -> Tensor:
        """Return the value [B] of acting without noise: the minimum Q."""
        return self.critics(state, self.actor(state)).min(0).values

    @torch.no_grad()
    def act(self, state: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return actions [B, A]; without noise if generator is None."""
        return self.actor(state) if generator is None else self.actor.sample(state, generator)[0]

    def tree(self) -> dict[str, Any]:
        """Return a copy of weights and moments, and the number of updates."""
        return {**super().tree(), "updates": self.updates}

    def restore(self, tree: dict[str, Any]) -> None:
        """Restore the state from `tree`."""
        super().restore(tree)
        self.updates = int(tree.get("updates", 0))  # earlier versions did not count, and had no delay


class Mdpo(Sac):
    """SAC that stays near its previous policy instead of a uniform one; actions are in [-1, 1].

    The actor minimises E[KL(pi || pi_k) / t_k - Q(s, a)] over recorded states and its own actions for `mirror_steps`
    updates, then pi_k becomes a copy of it: mirror descent, whose exact step is pi_k exp(t_k Q). With a uniform pi_k it
    is SAC. Source: the off-policy form of MDPO, Tomar et al. 2020, arXiv:2005.09814, with a constant t_k.
    """

    config: MdpoConfig

    def __init__(self, config: MdpoConfig, state: int, action: int, seed: int):
        super().__init__(config, state, action, seed)
        self.previous = copy.deepcopy(self.actor).requires_grad_(False)

    def fit_statistics(self, state: Tensor) -> None:
        """Fit the state standardisation of all networks on states [N, S]."""
        super().fit_statistics(state)
        self.previous.state.fit(state)

    def ascend(self, state: Tensor, action: Tensor, density: Tensor) -> Tensor:
        """Take one step of the actor by its actions [B, A], with gradients, in states [B, S] and their log densities
        [B]; returns the entropy, [].
        """
        if (self.updates // self.config.policy_delay) % self.config.mirror_steps == 0:
            self.previous.load_state_dict(self.actor.state_dict())
        value = self.climbed(self.critics(state, action))
        divergence = density - self.previous.log_prob(state, action)
        self.step("actor", (self.log_temperature.exp().detach() * divergence - value).mean())
        return -density.detach().mean()


def gradient_agreement(critics: Critics, state: Tensor, action: Tensor) -> Tensor:
    """Compute EDAC's penalty: the mean over states of sum_{i != j} cos(grad_a Q_i, grad_a Q_j) / (N - 1).

    Critics with the same action gradients act as a single critic, and their minimum is no lower bound. state: [B, S];
    action: [B, A]; N >= 2 critics. Returns a scalar with gradients to the critics.
    """
    count = critics.count
    actions = action.expand(count, -1, -1).detach().requires_grad_()
    # Each critic has its own copy of the actions, so the sum's gradient is every critic's own.
    (slope,) = torch.autograd.grad(critics(state, actions).sum(), actions, create_graph=True)
    length = cast(Tensor, slope.norm(dim=-1, keepdim=True))  # pyright: ignore[reportUnknownMemberType]
    direction = slope / (length + 1e-10)
    cosines = torch.einsum("nbd,mbd->bnm", direction, direction)
    off_diagonal = cosines.sum((1, 2)) - cosines.diagonal(dim1=1, dim2=2).sum(1)
    return (off_diagonal / (count - 1)).mean()


class Cql(Sac):
    """Conservative Q-learning: SAC whose Q values are lowered outside the data; actions are in [-1, 1].

    Sources: CQL(H), Kumar et al. 2020, arXiv:2006.04779, with importance-weighted samples and a fixed weight; Cal-QL,
    Nakamoto et al. 2023, arXiv:2303.05479. Omitted: the Lagrangian that tunes the weight, and the maximum over next
    actions.

    With `calibrated`, the Q of the actor's samples is bounded below by the recorded return from the state, if known.
    After a time limit it is unknown (`outcome` is minus infinity), and nothing is calibrated there.
    """

    config: CqlConfig

    def begin(self, data: Transitions) -> None:
        """Implement `OfflineAgent.begin`; raises DataError for Cal-QL if no outcome [N] is known."""
        super().begin(data)
        if self.config.calibrated and not bool(recorded_outcome(data).isfinite().any()):
            raise DataError("Cal-QL needs recorded returns, but a time limit truncated every episode: use CQL.")

    def climbed(self, values: Tensor) -> Tensor:
        """Return the minimum [B] of critics' values [N, B], with `critic_subset` too: WSRL, as in its authors' code."""
        return values.min(0).values

    def regulariser(
        self, batch: Transitions, values: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return alpha times the sum over critics of the mean conservative gap, [], and metrics by name, scalars.

        values: Q [N, B] of the batch's actions. SAC's own regulariser (none by default) is added.
        """
        penalty, figures = super().regulariser(batch, values, generator)
        if not self.config.alpha:
            return penalty, figures
        count, samples = len(batch), self.config.samples
        with torch.no_grad():
            shape = (samples, *batch.action.shape)
            uniform = 2 * torch.rand(shape, generator=generator, device=batch.action.device) - 1
            current_actions, here_density = self.actor.sample_several(batch.state, samples, generator)
            next_actions, ahead_density = self.actor.sample_several(batch.next_state, samples, generator)
            # The box has volume 2^A.
            density = torch.full((samples, count), -batch.action.shape[1] * math.log(2.0), device=values.device)
            density = torch.cat([density, here_density, ahead_density])
        actions = torch.cat([uniform, current_actions, next_actions])
        # Every sample is judged in the state at hand, those of the next state's policy too.
        states = batch.state.expand(3 * samples, -1, -1).flatten(0, 1)
        sampled = self.critics(states, actions.flatten(0, 1)).unflatten(1, (3 * samples, count))
        if self.config.calibrated:
            data_return = recorded_outcome(batch)
            figures["calibrated"] = (sampled.detach()[:, samples:] < data_return).float().mean()
            # Calibrated are the actor's own actions; uniform ones are pushed down as in CQL.
            sampled = torch.cat([sampled[:, :samples], torch.maximum(sampled[:, samples:], data_return)], 1)
        # log integral exp Q, by importance sampling; the logarithm of the number of samples has no gradient.
        gap = (sampled - density).logsumexp(1) - values
        return penalty + self.config.alpha * gap.mean(1).sum(), {**figures, "conservative_gap": gap.detach().mean()}


def recorded_outcome(batch: Transitions) -> Tensor:
    """Return `outcome` [N]; raises DataError if it is not recorded."""
    if batch.outcome is None:
        raise DataError("Cal-QL needs recorded returns, and these transitions lack `outcome`.")
    return batch.outcome
