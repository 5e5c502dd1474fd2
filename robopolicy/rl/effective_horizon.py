"""Effective horizon: how many decisions ahead greedy play must look, on values of random play, to act optimally.

Q^1 is the value of a decision followed by random ones, Q^{j+1} looks one decision further: Q^{j+1}(s, a) = r + E max_a'
Q^j(s', a'). Where acting greedily on Q^k is optimal, the horizon is H_k = k + log_A(1 / gap^2), with A actions and the
smallest gap of Q^k between the best and the second best action; the effective horizon is the smallest H_k. Online RL
learns tasks with a short one and fails on a long one, because A^H grows with it. `tabular_horizons` is exact; `sqirl`
learns the values of any world from rollouts (shallow Q-iteration), and m rollouts per decision that suffice are the
measured counterpart of 1 / gap^2.

Source: Laidlaw et al., The Effective Horizon Explains Deep RL Performance in Stochastic Environments, arXiv:2312.08369.
Axes: N decision, A candidate action chunk, C control step of a chunk, D action dimension, B row.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.arrays import Array, is_mapping
from robopolicy.core.errors import ConfigError
from robopolicy.core.player import Player
from robopolicy.core.policy import Policy, to_tensors
from robopolicy.core.randomness import derive_seed, episode_seeds, numpy_generator
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Field, Observation, WorldSpec
from robopolicy.core.world import Rows, World
from robopolicy.nn.blocks import perceptron
from robopolicy.nn.configuration import NormalizationMode
from robopolicy.nn.normalizer import Normalizer
from robopolicy.rl.critic import StateFeatures

Vectors = dict[str, Tensor]
"""Observation without images, key -> [N, H, ...]; its `task`, if there are several, is their numbers [N] int64."""
TIE = 1e-9
"""Difference of values below which two actions are equally good."""


@dataclass(frozen=True)
class TabularHorizon:
    """Result for one k: whether every greedy policy on Q^k is optimal, and the smallest gap along greedy play.

    horizon: H_k = k + log_A(1 / gap^2), infinite unless optimal; k where no decision matters.
    """

    k: int
    optimal: bool
    gap: float
    horizon: float


def tabular_horizons(transitions: Array, rewards: Array, start: Array, steps: int) -> list[TabularHorizon]:
    """Return the horizons H_k of a Markov decision process for k = 1..steps, without sampling.

    transitions: [S, A, S] probabilities; rewards: [S, A], whose sums per episode should lie in [0, 1]; start: [S]
    probabilities of the first state; steps: decisions per episode.
    """
    actions = rewards.shape[1]
    best = _look_ahead(transitions, rewards, np.zeros((steps, *rewards.shape)), steps)
    for _ in range(steps - 1):
        best = _look_ahead(transitions, rewards, best, steps)
    values = np.zeros((steps, *rewards.shape))  # Q^1, from the last decision to the first
    for step in reversed(range(steps)):
        after = values[step + 1].mean(-1) if step + 1 < steps else np.zeros(len(rewards))
        values[step] = rewards + transitions @ after
    results: list[TabularHorizon] = []
    for k in range(1, steps + 1):
        optimal, gap = _greedy(transitions, start, values, best)
        cost = 0.0 if math.isinf(gap) else math.log(1 / gap**2, actions)
        results.append(TabularHorizon(k, optimal, gap, k + cost if optimal else math.inf))
        values = _look_ahead(transitions, rewards, values, steps)
    return results


def _look_ahead(transitions: Array, rewards: Array, values: Array, steps: int) -> Array:
    """Return r + E max_a' values, for values [T, S, A]: one step of value iteration at every decision."""
    after = np.concatenate([values[1:].max(-1), np.zeros((1, len(rewards)))])
    return np.stack([rewards + transitions @ after[step] for step in range(steps)])


def _greedy(transitions: Array, start: Array, values: Array, best: Array) -> tuple[bool, float]:
    """Return whether all greedy decisions on values [T, S, A] are optimal by `best`, and their smallest gap."""
    optimal, gap = True, math.inf
    reached = start > 0
    for of_step, best_of_step in zip(values, best, strict=True):
        following = np.zeros(len(start), bool)
        for state in np.flatnonzero(reached):
            greedy = of_step[state] >= of_step[state].max() - TIE
            optimal &= bool((best_of_step[state][greedy] >= best_of_step[state].max() - TIE).all())
            if not greedy.all():
                gap = min(gap, float(of_step[state].max() - of_step[state][~greedy].max()))
            following |= (transitions[state][greedy] > 0).any(0)
        reached = following
    return optimal, gap


Propose = Callable[[Observation], Array]
"""Candidates: observation of B rows -> action chunks [B, A, C, D] in world units, of which random play draws one."""


def primitives(action: Field, hold: int) -> Array:
    """Return fixed candidates [A, hold, D]: constant actions, held for `hold` control steps.

    Up to three dimensions: every combination of low, middle and high. Beyond: the middle, and one dimension at a time
    at its low or high end, which is 2D + 1. Raises ConfigError where the actions have no bounds.
    """
    low, high = (np.broadcast_to(np.asarray(side, float), action.shape).ravel() for side in (action.low, action.high))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ConfigError(
            "This world's actions have no bounds, so none can be held: set analyze.policy=CHECKPOINT, whose actions "
            "are then tried."
        )
    middle = (low + high) / 2
    if action.size <= 3:
        sides = np.array(list(itertools.product((0, 1, 2), repeat=action.size)))
        constant = np.stack([low, middle, high])[sides, np.arange(action.size)]
    else:
        axes = np.eye(action.size, dtype=bool)
        ends = [np.where(axis, side, middle) for axis in axes for side in (low, high)]
        constant = np.stack([middle, *ends])
    return np.repeat(constant[:, None], hold, 1).reshape(-1, hold, *action.shape)


def fixed(candidates: Array) -> Propose:
    """Propose the same chunks [A, C, D] in every state."""
    return lambda observation: np.broadcast_to(candidates, (len(next(iter(observation.values()))), *candidates.shape))


def sampled(policy: Policy, count: int, generator: torch.Generator) -> Propose:
    """Propose `count` chunks that the policy samples in each state, so random play is the policy's own."""

    @torch.no_grad()
    def propose(observation: Observation) -> Array:
        repeated = {
            key: [text for text in value for _ in range(count)] if key == TASK else np.repeat(value, count, 0)
            for key, value in observation.items()
        }
        actions = policy.act(to_tensors(repeated, generator.device), generator).actions  # pyright: ignore[reportArgumentType]
        chunks = actions.reshape(-1, count, *actions.shape[1:]).double().cpu()
        return cast(Array, chunks.numpy())  # pyright: ignore[reportUnknownMemberType]

    return propose


@dataclass(frozen=True)
class Experience:
    """N decisions: what a value function is fitted to.

    observation, next_observation: key -> [N, H, ...]; step [N]: number of the decision in its episode; chunk [N, C*D];
    reward [N]: summed over the chunk; outcome [N]: rewards from this decision to the episode's end; ended [N] bool;
    next_candidates [N, A, C*D].
    """

    observation: Vectors
    step: Tensor
    chunk: Tensor
    reward: Tensor
    outcome: Tensor
    ended: Tensor
    next_observation: Vectors
    next_candidates: Tensor

    @staticmethod
    def join(parts: Sequence["Experience"]) -> "Experience":
        """Concatenate decisions."""
        joined: dict[str, Any] = {}
        for name in Experience.__dataclass_fields__:
            values = [getattr(part, name) for part in parts]
            first: Any = values[0]
            joined[name] = (
                {key: torch.cat([value[key] for value in values]) for key in first}
                if is_mapping(first)
                else torch.cat(values)
            )
        return Experience(**joined)


class ValueFunction(Protocol):
    """Q(observation, number of the decision, action chunk)."""

    def __call__(self, observation: Vectors, step: Tensor, chunks: Tensor) -> Tensor:
        """Return values [N, A] for observations [N, H, ...], steps [N] and chunks [N, A, C*D]."""
        ...


Regress = Callable[[Experience, Tensor, ValueFunction | None], ValueFunction]
"""Fit a value function to decisions and their targets [N]; the last one fitted to the same kind of target, if any, is
where it may begin."""


@dataclass(frozen=True)
class Found:
    """What `sqirl` learned: outcomes of greedy play on seeds of its own and of the random play that it began with.

    success, returns: [E] of greedy play; random_success, random_returns: [m]; steps: control steps that learning took.
    """

    k: int
    rollouts: int
    candidates: int
    success: Array
    returns: Array
    random_success: Array
    random_returns: Array
    steps: int

    @property
    def horizon(self) -> float:
        """k + log_A(m): the measured horizon if greedy play solves the task."""
        return measured_horizon(self.k, self.rollouts, self.candidates)


def measured_horizon(k: int, rollouts: int, candidates: int) -> float:
    """Return k + log_A(m), for m rollouts per decision and A candidates."""
    return k + math.log(rollouts, candidates)


def sqirl(
    world: World, propose: Propose, regress: Regress, *, k: int, rollouts: int, episodes: int, seed: int = 0
) -> Found:
    """Learn to act greedily on Q^k and return the outcome of `episodes` greedy episodes.

    For every decision t of an episode: play `rollouts` episodes, greedy before t and random from t on; fit Q^1 to the
    returns of all decisions so far that were followed by random ones, and Q^2 to Q^k by the recursion; act greedily on
    this Q^k at decision t from now on. World and candidates must agree on the action's size.
    """
    actor = Greedy(propose, numpy_generator(seed, f"sqirl/{k}/{rollouts}"), world.spec.instructions)
    parts: list[Experience] = []
    functions: list[ValueFunction | None] = [None] * k
    steps, first = 0, None
    while True:
        decision = len(actor.values)
        part = _play(world, actor, episode_seeds(seed, f"sqirl/{decision}", rollouts), decision)
        steps += part.steps
        first = first or part
        if part.experience is None:  # every episode ended earlier
            break
        parts.append(part.experience)
        data = Experience.join(parts)
        functions[0] = regress(data, data.outcome, functions[0])
        for depth in range(1, k):
            before = functions[depth - 1]
            assert before is not None
            following = before(data.next_observation, data.step + 1, data.next_candidates).amax(-1)
            functions[depth] = regress(data, data.reward + torch.where(data.ended, 0.0, following), functions[depth])
        last = functions[-1]
        assert last is not None
        actor.values.append(last)
        if len(actor.values) * data.chunk.shape[-1] >= world.spec.horizon * world.spec.action.size:
            break
    greedy = _play(world, actor, episode_seeds(seed, "greedy", episodes), None)
    return Found(k, rollouts, actor.count, greedy.success, greedy.returns, first.success, first.returns, steps)


class Greedy:
    """An actor that takes the best candidate at the decisions that have a value function and a random one after them.

    values: one function per decision of an episode. Batches of episodes begin together.
    """

    def __init__(self, propose: Propose, random: np.random.Generator, instructions: tuple[str, ...] = ("",)):
        self.propose, self.random = propose, random
        self.instructions = instructions
        self.values: list[ValueFunction] = []
        self.decision = self.count = 0

    def reset(self, rows: Rows = None) -> None:
        """Begin new episodes in all rows [B]."""
        self.decision = 0

    def tensors(self, observation: Observation) -> Vectors:
        """Return an observation's arrays [B, H, ...] without images, and its instructions as their numbers [B]."""
        vectors = {key: value for key, value in observation.items() if key != TASK and not key.startswith(IMAGE_PREFIX)}
        tensors = cast(Vectors, to_tensors(vectors))
        if len(self.instructions) > 1:
            tensors[TASK] = torch.tensor([self.instructions.index(str(text)) for text in observation[TASK]])
        return tensors

    def choose(self, observation: Observation) -> tuple[Array, tuple[Vectors, Tensor, Array]]:
        """Return the next chunk [B, C, D], and: the observation, the candidates [B, A, C*D] and the index taken [B]."""
        candidates = self.propose(observation)
        rows, self.count = candidates.shape[:2]
        tensors = self.tensors(observation)
        flat = torch.tensor(candidates.reshape(rows, self.count, -1), dtype=torch.float32)
        if self.decision < len(self.values):
            value = self.values[self.decision](tensors, torch.full((rows,), self.decision), flat)
            values = cast(Array, value.numpy())  # pyright: ignore[reportUnknownMemberType]
            ties = values >= values.max(-1, keepdims=True) - TIE
            index = (ties * self.random.random(values.shape)).argmax(-1)
        else:
            index = self.random.integers(self.count, size=rows)
        self.decision += 1
        return candidates[np.arange(rows), index].astype(np.float64), (tensors, flat, index)


@dataclass(frozen=True)
class _Played:
    """Outcomes [E] of episodes, their control steps, and the decisions from `since` on, None if there are none."""

    success: Array
    returns: Array
    steps: int
    experience: Experience | None


def _play(world: World, actor: Greedy, seeds: Array, since: int | None) -> _Played:
    """Play one episode per seed; since: the first decision to keep, None keeps none."""
    success, returns = np.zeros(len(seeds), bool), np.zeros(len(seeds))
    steps, parts = 0, list[Experience]()
    player = Player(world, actor)
    for begin in range(0, len(seeds), world.batch_size):
        count = min(world.batch_size, len(seeds) - begin)
        player.start_batch(seeds[begin : begin + count])
        episodes = slice(begin, begin + count)
        columns: list[dict[str, Any]] = []
        for number, played_step in enumerate(player):
            reward = (played_step.step.reward * played_step.step.valid).sum(-1)
            steps += int(played_step.step.valid[played_step.running].sum())
            returns[episodes] += np.where(played_step.running, reward, 0.0)[:count]
            success[episodes] |= (played_step.step.success & played_step.running)[:count]
            if since is not None and number >= since:
                observation, candidates, index = played_step.info
                columns.append({
                    "observation": observation, "step": number, "candidates": candidates, "chosen": index,
                    "reward": np.where(played_step.running, reward, 0.0), "running": played_step.running,
                    "ended": played_step.step.ended, "next_observation": actor.tensors(played_step.step.observation),
                })  # fmt: skip
        if columns:
            parts.append(_experience(columns))
    return _Played(success, returns, steps, Experience.join(parts) if parts else None)


def _experience(columns: list[dict[str, Any]]) -> Experience:
    """Turn the decisions of one batch of episodes, in order, into rows: those of running episodes."""
    outcome = np.cumsum([column["reward"] for column in columns][::-1], 0)[::-1]
    parts: list[Experience] = []
    for place, column in enumerate(columns):
        rows = torch.tensor(np.flatnonzero(column["running"]))
        following = columns[min(place + 1, len(columns) - 1)]["candidates"]  # of the last: all ended
        candidates = column["candidates"][torch.arange(len(column["chosen"])), torch.tensor(column["chosen"])]
        parts.append(
            Experience(
                observation=_rows(column["observation"], rows),
                step=torch.full((len(rows),), column["step"]),
                chunk=candidates[rows],
                reward=torch.tensor(column["reward"], dtype=torch.float32)[rows],
                outcome=torch.tensor(outcome[place].copy(), dtype=torch.float32)[rows],
                ended=torch.tensor(column["ended"])[rows],
                next_observation=_rows(column["next_observation"], rows),
                next_candidates=following[rows],
            )
        )
    return Experience.join(parts)


def _rows(observation: Vectors, rows: Tensor) -> Vectors:
    """Select rows of an observation's arrays."""
    return {key: value[rows] for key, value in observation.items()}


class QNetwork(nn.Module):
    """Q of a state, the decision's number and an action chunk: an MLP on standardised inputs; values in reward units.

    spec: of the world, whose vector fields and instructions are read; decisions: most per episode; chunk: numbers in a
    chunk.
    """

    def __init__(self, spec: WorldSpec, decisions: int, chunk: int, width: int = 128):
        super().__init__()
        self.encoder = StateFeatures(spec.observation, spec.history, spec.instructions)
        self.chunks = Normalizer((chunk,), NormalizationMode.MEAN_STD)
        self.targets = Normalizer((1,), NormalizationMode.MEAN_STD)
        self.decisions = decisions
        self.layers = perceptron(self.encoder.features + 1 + chunk, width, 2, 1)

    def fit(self, data: Experience, targets: Tensor, updates: int, generator: torch.Generator) -> "QNetwork":
        """Standardise, then minimise the squared error to targets [N] by Adam on random batches; return itself."""
        self.encoder.fit(data.observation)
        self.chunks.fit(data.chunk)
        self.targets.fit(targets[:, None])
        optimiser = torch.optim.Adam(self.layers.parameters(), lr=1e-3, fused=True)
        inputs, labels = self._inputs(data.observation, data.step, data.chunk), self.targets(targets[:, None])
        for _ in range(updates):
            index = torch.randint(len(targets), (256,), generator=generator)
            loss = (self.layers(inputs[index]) - labels[index]).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()  # pyright: ignore[reportUnknownMemberType]
        return self

    def _inputs(self, observation: Vectors, step: Tensor, chunk: Tensor) -> Tensor:
        """Return the MLP's inputs, for chunks [N, C*D] or [N, A, C*D]."""
        state = torch.cat([self.encoder(observation), step[:, None] / self.decisions], -1)
        if chunk.ndim == 3:
            state = state[:, None].expand(-1, chunk.shape[1], -1)
        return torch.cat([state, self.chunks(chunk)], -1).detach()

    @torch.no_grad()
    def forward(self, observation: Vectors, step: Tensor, chunks: Tensor) -> Tensor:
        """Return values [N, A]."""
        return self.targets.inverse(self.layers(self._inputs(observation, step, chunks))).squeeze(-1)


def network_regression(spec: WorldSpec, decisions: int, seed: int = 0, updates: int = 300) -> Regress:
    """Return a `Regress` that fits a `QNetwork`, beginning with the weights of the one before."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "sqirl/network"))

    def regress(data: Experience, targets: Tensor, before: ValueFunction | None) -> QNetwork:
        if isinstance(before, QNetwork):
            network = copy.deepcopy(before)
        else:
            with torch.random.fork_rng():  # pyright: ignore[reportUnknownMemberType]
                torch.manual_seed(derive_seed(seed, "sqirl/weights"))  # pyright: ignore[reportUnknownMemberType]
                network = QNetwork(spec, decisions, data.chunk.shape[-1])
        return network.fit(data, targets, updates, generator)

    return regress
