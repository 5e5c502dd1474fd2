"""Random Markov decision processes, what PPO needs to learn them, and what bounds say of it (Laidlaw et al. 2023).

Tables differ in states, actions, decisions, chance and how often they reward. The bounds are those of the paper that
can be computed from a table: k + log_A(1 / gap^2), the effective horizon H, of which greedy learning needs about A^H
episodes, and the covering length, the episodes in which random play meets every decision that it can meet. Source:
arXiv:2304.09853 and arXiv:2312.08369. Axes: S state, A action, T decision, N episode.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.arrays import Array
from robopolicy.nn.blocks import perceptron
from robopolicy.rl.effective_horizon import tabular_horizons

EPISODES = 16
"""Episodes of an iteration of PPO."""
ITERATIONS = 150
LEARNED = 0.99
"""Part of the way from random to optimal play at which a table is learned."""


@dataclass(frozen=True)
class Table:
    """A Markov decision process. transitions: [S, A, S] probabilities; rewards: [S, A]; start: [S] probabilities of the
    first state; steps: decisions of an episode.
    """

    transitions: Array
    rewards: Array
    start: Array
    steps: int

    @property
    def actions(self) -> int:
        """Number of actions."""
        return self.rewards.shape[1]

    def value(self, policy: Array) -> float:
        """Return the expected return of a policy, [T, S, A] probabilities."""
        values = np.zeros(len(self.start))
        for probabilities in policy[::-1]:
            values = ((self.rewards + self.transitions @ values) * probabilities).sum(-1)
        return float(self.start @ values)

    def best_value(self) -> float:
        """Return the expected return of optimal play."""
        values = np.zeros(len(self.start))
        for _ in range(self.steps):
            values = (self.rewards + self.transitions @ values).max(-1)
        return float(self.start @ values)

    def random_policy(self) -> Array:
        """Return random play, [T, S, A]."""
        return np.full((self.steps, *self.rewards.shape), 1 / self.actions)


def random_table(draws: np.random.Generator) -> Table:
    """Return a table of 4 to 16 states, 2 to 4 actions and 3 to 8 decisions, whose best expected return is 1.

    Half have chance. One decision in one state is rewarded by 1, and a share of 0, 10 or 30 % of the others by less.
    """
    size = int(draws.integers(4, 17)), int(draws.integers(2, 5))
    if draws.random() < 0.5:
        transitions = draws.dirichlet(np.full(size[0], 0.1), size)
    else:
        transitions = np.eye(size[0])[draws.integers(size[0], size=size)]
    rewarded = draws.random(size) < draws.choice([0.0, 0.1, 0.3])
    rewards = np.where(rewarded, draws.random(size), 0.0)
    rewards[draws.integers(size[0]), draws.integers(size[1])] = 1.0
    table = Table(transitions, rewards, np.eye(size[0])[0], int(draws.integers(3, 9)))
    best = table.best_value()
    if best - table.value(table.random_policy()) < 1e-3:  # nothing to learn
        return random_table(draws)
    return Table(transitions, rewards / best, table.start, table.steps)


def effective_horizon(table: Table) -> float:
    """Return H log A, the logarithm of A^H."""
    horizons = tabular_horizons(table.transitions, table.rewards, table.start, table.steps)
    return min(each.horizon for each in horizons) * float(np.log(table.actions))


def covering_length(table: Table) -> float:
    """Return the logarithm of 1 / the smallest probability, above 0, of a decision (t, s, a) under random play."""
    state, smallest = table.start, 1.0
    for _ in range(table.steps):
        smallest = min(smallest, float(state[state > 1e-12].min()) / table.actions)
        state = state @ table.transitions.mean(1)
    return float(-np.log(smallest))


def steps_to_learn(table: Table, seed: int) -> float:
    """Return the decisions that PPO plays until its greedy policy is `LEARNED`, infinite if `ITERATIONS` are too few.

    Actor and critic are MLPs of the one-hot state and decision.
    """
    draws = np.random.default_rng(seed)
    states, steps = len(table.start), table.steps
    inputs = torch.eye(states + steps)
    inputs = inputs[None, :states] + inputs[states:, None]  # [T, S, S + T]
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        actor = perceptron(states + steps, 32, 1, table.actions, scale=0.01)
        critic = perceptron(states + steps, 32, 1, 1)
    optimiser = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=5e-3)
    chance = table.value(table.random_policy())
    goal = chance + LEARNED * (table.best_value() - chance)
    for iteration in range(ITERATIONS):
        with torch.no_grad():
            probabilities = cast(Array, actor(inputs).softmax(-1).double().numpy())  # pyright: ignore[reportUnknownMemberType]
            values = cast(Array, critic(inputs)[..., 0].double().numpy())  # pyright: ignore[reportUnknownMemberType]
        if table.value(np.eye(table.actions)[probabilities.argmax(-1)]) >= goal:
            return float(iteration * EPISODES * steps)
        state, action, reward = play(table, probabilities, draws)
        advantage = advantages(reward, values[np.arange(steps)[:, None], state])
        batch = (torch.from_numpy(each) for each in (state, action, advantage))
        update(actor, critic, optimiser, inputs, *batch)
    return float("inf")


def play(table: Table, policy: Array, draws: np.random.Generator) -> tuple[Array, Array, Array]:
    """Return states, actions and rewards, each [T, N], of `EPISODES` episodes of a policy [T, S, A]."""
    state = draws.choice(len(table.start), size=EPISODES, p=table.start)
    states: list[Array] = []
    actions: list[Array] = []
    for probabilities in policy:
        action = drawn(probabilities[state], draws)
        states.append(state)
        actions.append(action)
        state = drawn(table.transitions[state, action], draws)
    return np.stack(states), np.stack(actions), table.rewards[np.stack(states), np.stack(actions)]


def drawn(probabilities: Array, draws: np.random.Generator) -> Array:
    """Return one index [N] by each row of probabilities [N, K]."""
    index = (draws.random((len(probabilities), 1)) > probabilities.cumsum(-1)).sum(-1)
    return np.minimum(index, probabilities.shape[1] - 1)


def advantages(reward: Array, value: Array, trace: float = 0.95) -> Array:
    """Return generalised advantages [T, N] of rewards and values [T, N], without a discount; `trace` is lambda."""
    result = np.zeros_like(reward)
    after, value_after = np.zeros(reward.shape[1]), np.zeros(reward.shape[1])
    for step in reversed(range(len(reward))):
        after = reward[step] + value_after - value[step] + trace * after
        result[step], value_after = after, value[step]
    return result


def update(
    actor: nn.Module, critic: nn.Module, optimiser: torch.optim.Optimizer, inputs: Tensor, *batch: Tensor
) -> None:
    """Take four steps of PPO, clipped at 0.2 and with an entropy bonus of 0.01; batch: states, actions and advantages,
    each [T, N]; inputs: [T, S, D].
    """
    state, action, advantage = batch
    features = inputs[torch.arange(len(state))[:, None], state]
    weight = ((advantage - advantage.mean()) / (advantage.std() + 1e-8)).float()
    with torch.no_grad():
        before = actor(features).log_softmax(-1).gather(-1, action[..., None])[..., 0]
        returns = critic(features)[..., 0] + advantage.float()
    for _ in range(4):
        scores = actor(features).log_softmax(-1)
        ratio = (scores.gather(-1, action[..., None])[..., 0] - before).exp()
        surrogate = torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight).mean()
        entropy = -(scores.exp() * scores).sum(-1).mean()
        loss = 0.5 * (critic(features)[..., 0] - returns).square().mean() - surrogate - 0.01 * entropy
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()  # pyright: ignore[reportUnknownMemberType]
