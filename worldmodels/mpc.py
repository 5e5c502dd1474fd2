"""Model predictive control: optimise an action sequence in a world model, execute its beginning, and plan again.

Sources: the cross-entropy method (Rubinstein 1999), as used for planning by PlaNet, Hafner et al. 2019,
arXiv:1811.04551; iCEM, Pinneri et al. 2020, arXiv:2008.06389 (coloured noise, kept elites, fewer samples in later
rounds); MPPI, Williams et al. 2017, arXiv:1707.02342. Axes: B row, N sample, T planned control step, C executed control
step, A action dimension.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.action_bounds import bounds_of
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.randomness import integers, normal
from robopolicy.core.registry import Registry, load_dotted, named_arguments, require_types
from robopolicy.core.spec import PolicySpec
from robopolicy.core.world import Rows
from worldmodels.configuration import PlanConfig
from worldmodels.goals import Goal
from worldmodels.planning import context_of, require_same_task
from worldmodels.protocol import ChunkModel, Context, DecoderFree, Latent, WorldModel, fields_read

PLANNERS = Registry(
    "planner",
    "robopolicy.planners",
    {
        "cem": "worldmodels.mpc:CrossEntropy",
        "icem": "worldmodels.mpc:ImprovedCrossEntropy",
        "mppi": "worldmodels.mpc:PathIntegral",
    },
)
"""Registry for plan.kind: classes of `Planner`, constructed with plan.options."""

Objective = Callable[[Mapping[str, Tensor]], Tensor]
"""Frames [n, *shape] by key -> potential [n], float64 on the CPU; higher is better."""


@dataclass(frozen=True)
class Problem:
    """What a planner solves for B rows at once.

    score: sequences [B, N, T, A] in world units -> their imagined returns [B, N]; low, high: bounds of an action, [A]
    each; start: [B, T, A], the rest of the previous plan, or the middle of the range; fresh: [B] bool, rows without a
    previous plan; proposals: [B, P, T, A], sequences of a policy, P may be 0; replan: C, control steps between plans.
    """

    score: Callable[[Tensor], Tensor]
    low: Tensor
    high: Tensor
    start: Tensor
    fresh: Tensor
    proposals: Tensor
    replan: int
    generator: torch.Generator

    @property
    def half(self) -> Tensor:
        """Half of the range of every action element, [A]."""
        return (self.high - self.low) / 2

    def clip(self, sequences: Tensor) -> Tensor:
        """Return sequences [..., A] within the bounds."""
        return torch.minimum(torch.maximum(sequences, self.low), self.high)

    def held_noise(self, count: int, hold: int) -> Tensor:
        """Draw standard normal noise [B, count, T, A] that stays the same for `hold` control steps at a time."""
        rows, steps, size = self.start.shape
        noise = normal((rows, count, -(-steps // hold), size), self.generator, self.start.device)
        return noise.repeat_interleave(hold, 2)[:, :, :steps]

    def coloured_noise(self, count: int, exponent: float) -> Tensor:
        """Draw noise [B, count, T, A] of unit variance whose power falls with frequency to minus `exponent`
        (Timmer and Koenig 1995; 0 is white).
        """
        rows, steps, size = self.start.shape
        scale, deviation = spectrum(steps, exponent)
        parts = normal((rows, count, size, len(scale), 2), self.generator, self.start.device)
        parts = parts * torch.tensor(scale, dtype=parts.dtype, device=parts.device)[:, None]
        edges = [0, -1] if steps % 2 == 0 else [0]  # real, with the power of both parts
        parts[..., edges, 0] *= 2**0.5
        parts[..., edges, 1] = 0.0
        return torch.fft.irfft(torch.view_as_complex(parts), n=steps).transpose(2, 3) / deviation


def spectrum(steps: int, exponent: float) -> tuple[np.ndarray, float]:
    """Return amplitudes of the frequencies of `steps` samples [steps // 2 + 1], and the deviation of their signal."""
    frequencies = np.fft.rfftfreq(steps)
    frequencies[0] = frequencies[1] if len(frequencies) > 1 else 1.0
    scale = frequencies ** (-exponent / 2)
    # Every frequency but the first and, for even numbers of steps, the last stands for itself and its conjugate.
    power = np.full(len(scale), 4.0)
    power[[0, -1] if steps % 2 == 0 else 0] = 2.0
    return scale, float(np.sqrt((power * scale**2).sum()) / steps)


class Planner(Protocol):
    """Optimises action sequences; one per policy, so it may remember what its rows did."""

    def plan(self, problem: Problem) -> Tensor:
        """Return the sequence to execute for every row, [B, T, A], within the bounds."""
        ...


class CrossEntropy:
    """CEM: fit a Gaussian to the best samples, several times, and execute its mean.

    samples: N, in every round; rounds: number of fits; elites: best samples that it is fitted to; std: deviation of the
    first round, as a share of half the range; hold: control steps for which a sample's noise stays the same.
    """

    def __init__(self, samples: int = 64, rounds: int = 3, elites: int = 8, std: float = 0.5, hold: int = 2):
        _require_sizes(samples, rounds, elites, std, hold)
        self.samples, self.rounds = samples, rounds
        self.elites, self.std = elites, std
        self.hold = hold

    def plan(self, problem: Problem) -> Tensor:
        """Implement `Planner.plan`: return [B, T, A]."""
        mean, std = problem.start, (self.std * problem.half).expand_as(problem.start)
        for number in range(self.rounds):
            noise = problem.held_noise(self.samples, self.hold)
            sequences = problem.clip(mean[:, None] + std[:, None] * noise)
            sequences[:, 0] = mean
            if number == 0:
                sequences = torch.cat([sequences, problem.proposals], 1)
            elites, _ = best_sequences(sequences, problem.score(sequences), self.elites)
            mean, std = elites.mean(1), elites.std(1, correction=0)
        return mean


class ImprovedCrossEntropy:
    """iCEM: CEM with coloured noise, elites kept between rounds and plans, fewer samples in later rounds, a slowly
    moving mean, and the best sequence so far as the result.

    samples, rounds, elites, std: as of CEM; colour: exponent of the noise's spectrum; keep: share of the elites that is
    kept; decay: factor by which a round has fewer samples than the one before; momentum: share of the previous mean and
    deviation in the new ones.
    """

    def __init__(
        self,
        samples: int = 64,
        rounds: int = 3,
        elites: int = 8,
        std: float = 0.5,
        colour: float = 2.0,
        keep: float = 0.3,
        decay: float = 1.25,
        momentum: float = 0.1,
    ):
        _require_sizes(samples, rounds, elites, std, 1)
        if not 0 <= keep <= 1 or decay < 1 or not 0 <= momentum < 1:
            raise ConfigError(f"plan.options: keep={keep}, decay={decay} and momentum={momentum} are out of range.")
        self.samples, self.rounds = samples, rounds
        self.elites, self.std = elites, std
        self.colour, self.num_kept = colour, int(keep * elites)
        self.decay, self.momentum = decay, momentum
        self._elites = torch.zeros(0)

    def plan(self, problem: Problem) -> Tensor:
        """Implement `Planner.plan`: return [B, T, A]."""
        mean, std = problem.start, (self.std * problem.half).expand_as(problem.start)
        kept_elites = self._shifted(problem)
        best, best_score = mean, torch.full(problem.fresh.shape, -torch.inf, device=mean.device)
        for number in range(self.rounds):
            count = max(int(self.samples * self.decay**-number), 2 * self.elites)
            noise = problem.coloured_noise(count, self.colour)
            sequences = problem.clip(mean[:, None] + std[:, None] * noise)
            if number == 0:
                sequences = torch.cat([sequences, problem.proposals], 1)
            if number == self.rounds - 1:
                sequences[:, 0] = mean
            sequences = torch.cat([sequences, kept_elites], 1)
            elites, scores = best_sequences(sequences, problem.score(sequences), self.elites)
            better = scores[:, 0] > best_score
            best = torch.where(better[:, None, None], elites[:, 0], best)
            best_score = torch.where(better, scores[:, 0], best_score)
            mean = self.momentum * mean + (1 - self.momentum) * elites.mean(1)
            std = self.momentum * std + (1 - self.momentum) * elites.std(1, correction=0)
            kept_elites = elites[:, : self.num_kept]
        self._elites = kept_elites
        return best

    def _shifted(self, problem: Problem) -> Tensor:
        """Return the elites of the previous plan [B, K, T, A], moved on by the executed steps; in rows without one, its
        start.
        """
        start = problem.start[:, None].expand(-1, self.num_kept, -1, -1)
        if self._elites.shape != start.shape:
            return start
        return torch.where(problem.fresh[:, None, None, None], start, shifted(self._elites, problem.replan, 2))


class PathIntegral:
    """MPPI: move the mean to the samples' average, weighted by the exponential of their returns.

    samples, rounds, std, hold: as of CEM, with a deviation that stays; temperature: of the weights, in standard
    deviations of a row's returns (in the paper a constant in units of the cost, which depends on the task).
    """

    def __init__(self, samples: int = 64, rounds: int = 3, std: float = 0.3, hold: int = 2, temperature: float = 0.3):
        _require_sizes(samples, rounds, 1, std, hold)
        if not temperature > 0:
            raise ConfigError(f"plan.options: temperature={temperature} must be more than 0.")
        self.samples, self.rounds = samples, rounds
        self.std, self.hold = std, hold
        self.temperature = temperature

    def plan(self, problem: Problem) -> Tensor:
        """Implement `Planner.plan`: return [B, T, A]."""
        mean = problem.start
        for number in range(self.rounds):
            noise = problem.held_noise(self.samples, self.hold)
            sequences = problem.clip(mean[:, None] + self.std * problem.half * noise)
            sequences[:, 0] = mean
            if number == 0:
                sequences = torch.cat([sequences, problem.proposals], 1)
            mean = (path_weights(problem.score(sequences), self.temperature)[..., None, None] * sequences).sum(1)
        return mean


def best_sequences(sequences: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best of the sequences [B, N, T, A] by their scores [B, N], best first: [B, count, T, A], and
    their scores [B, count].
    """
    top = scores.topk(min(count, scores.shape[1]), 1)
    return sequences.gather(1, top.indices[..., None, None].expand(-1, -1, *sequences.shape[2:])), top.values


def path_weights(scores: Tensor, temperature: float) -> Tensor:
    """Return weights [B, N] that sum to 1, in proportion to exp(score / (temperature * deviation of the row))."""
    deviation = scores.std(1, correction=0, keepdim=True).clamp_min(1e-8)
    return torch.softmax((scores - scores.amax(1, keepdim=True)) / (temperature * deviation), 1)


def shifted(sequences: Tensor, steps: int, axis: int) -> Tensor:
    """Return sequences [..., T, A] without their first `steps` along `axis`, that of T; the last is repeated."""
    length = sequences.shape[axis]
    index = torch.arange(length, device=sequences.device).add(steps).clamp_max(length - 1)
    return sequences.index_select(axis, index)


def imagined_returns(
    model: WorldModel,
    latent: Latent,
    sequences: Tensor,
    config: PlanConfig,
    objective: Objective | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Return the discounted returns [n] of action sequences [n, T, A] from the latents [n, ...].

    Rewards are the model's, or increases of `objective`, whose value at the latents is `first` [n], and
    config.uncertainty per unit of the model's uncertainty. Nothing is paid after a predicted end of the task.
    """
    total = torch.zeros(len(sequences), dtype=torch.float64)
    running, before = torch.ones(len(sequences), dtype=torch.bool), first
    for number, step in enumerate(_steps(model, latent, sequences)):
        if objective is None:
            reward = torch.stack([each.double().cpu() for each in step.rewards.values()]).sum(0)
        else:
            assert before is not None  # else the first action would be paid for making the rest look better
            potential = objective(step.observation)
            reward, before = potential - before, potential
        reward += config.uncertainty * step.uncertainty.double().cpu()
        total += torch.where(running, config.discount**number * reward, 0.0)
        running &= ~step.terminated.cpu()
        if not running.any():
            break
    return total


def returns_towards(
    model: WorldModel, latent: Latent, sequences: Tensor, config: PlanConfig, goal: Goal, rows: int
) -> Tensor:
    """Return minus the distance [n] to `goal` at the end of action sequences [n, T, A] from the latents [n, ...], plus
    the discounted config.uncertainty per unit of the model's uncertainty; rewards and predicted ends do not count.

    rows: whose samples, equally many, follow one another in n.
    """
    if isinstance(model, ChunkModel):
        latent, outcomes = model.generate(latent, sequences)
    else:
        outcomes = []
        for number in range(sequences.shape[1]):
            latent, outcome = model.imagine(latent, sequences[:, number])
            outcomes.append(outcome)
    doubts = torch.stack([outcome.uncertainty.double().cpu() for outcome in outcomes])
    weights = config.discount ** torch.arange(len(outcomes), dtype=torch.float64)
    return config.uncertainty * (weights @ doubts) - goal.distance(latent, outcomes[-1], rows).double()


def _steps(model: WorldModel, latent: Latent, sequences: Tensor) -> Any:
    if isinstance(model, ChunkModel):
        yield from model.generate(latent, sequences)[1]
        return
    for number in range(sequences.shape[1]):
        latent, step = model.imagine(latent, sequences[:, number])
        yield step


class ModelPredictivePolicy(nn.Module):
    """A `Policy` that optimises its actions in a world model; `policy`, if given, proposes some of the sequences.

    It remembers the rest of every row's plan, from which the next one starts, unless `remembers` is false: where rows
    are no episodes, as in a policy server. Samples of one row imagine with the same noise. goal: what sequences should
    lead to, instead of the model's rewards; it may be replaced between decisions. Raises ConfigError when the model's
    actions are unbounded, for unknown options, and when the model belongs to another task than the policy.
    """

    def __init__(
        self,
        model: WorldModel,
        config: PlanConfig | None = None,
        policy: Policy | None = None,
        goal: Goal | None = None,
        remembers: bool = True,
    ):
        super().__init__()
        self.remembers = remembers
        self.config = config = config or PlanConfig(kind="cem", horizon=16)
        self.model, self.policy = model, policy
        if policy is not None:
            require_same_task(policy, model)
        low, high = (torch.tensor(bound, dtype=torch.float32) for bound in bounds_of(model.spec.action))
        if not (low.isfinite().all() and high.isfinite().all()):
            raise ConfigError(f"plan.kind={config.kind} draws actions from their range, but these are unbounded.")
        self.low, self.high = low, high
        self.replan = min(config.replan, config.horizon)
        self.planner = make_planner(config)
        self.goal = goal
        self.objective = load_objective(config.objective, model) if config.objective else None
        self._plan, self._fresh = torch.zeros(0), torch.zeros(0, dtype=torch.bool)

    @property
    def spec(self) -> PolicySpec:
        """Spec of the policy plus the model's inputs; without a policy, the model's."""
        fields, world = fields_read(self.model), self.model.spec
        horizon = self.config.horizon
        if self.policy is None:
            return PolicySpec(
                dict(fields), world.action, 1, self.replan, horizon, 0, float(world.fps), world.instructions
            )
        spec = self.policy.spec
        inputs = {**spec.observation, **fields}
        return replace(spec, observation=inputs, chunk=self.replan, prediction=horizon, scored_steps=0)

    def reset(self, rows: Rows = None) -> None:
        """Forget the plans of the rows [R], None for all."""
        if len(self._fresh):  # else nothing was planned yet
            self._fresh[slice(None) if rows is None else rows] = True
        if self.policy is not None:
            self.policy.reset(rows)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the first C steps of the best plan, [B, C, A]; both modes draw samples.

        Raises ConfigError when the observation lacks a field that the model reads.
        """
        context = context_of(self.model, observation)
        rows = len(context)
        shape = rows, self.config.horizon, len(self.low)
        if self._plan.shape != shape or not self.remembers:
            self._plan, self._fresh = torch.zeros(shape), torch.ones(rows, dtype=torch.bool)
        middle = ((self.low + self.high) / 2).expand(shape)
        start = torch.where(self._fresh[:, None, None], middle, shifted(self._plan, self.replan, 1))
        seeds = integers(2**62, (rows,), generator).cpu().numpy()
        first_latent = self.model.initial(context, seeds)
        potential = None if self.objective is None else self.objective(self._present(context, first_latent))

        def score(sequences: Tensor) -> Tensor:
            count = sequences.shape[1]
            first = None if potential is None else potential.repeat_interleave(count)
            latent = {name: value.repeat_interleave(count, 0) for name, value in first_latent.items()}
            flat = sequences.flatten(0, 1)
            if self.goal is not None:
                returns = returns_towards(self.model, latent, flat, self.config, self.goal, rows)
            else:
                returns = imagined_returns(self.model, latent, flat, self.config, self.objective, first)
            return returns.reshape(rows, count)

        proposals = self._proposals(observation, generator, start, deterministic)
        problem = Problem(score, self.low, self.high, start, self._fresh.clone(), proposals, self.replan, generator)
        self._plan = self.planner.plan(problem).float()
        self._fresh[:] = False
        return Decision(self._plan[:, : self.replan].clone())

    def _present(self, context: Context, latent: Latent) -> Mapping[str, Tensor]:
        """Return the present frame as the model would imagine it, key -> [B, *shape]."""
        if isinstance(self.model, DecoderFree):
            return self.model.show(latent)
        device = next(iter(latent.values())).device
        return {key: torch.from_numpy(context.last(key)).to(device) for key in self.model.spec.observation}

    def _proposals(
        self, observation: TensorObservation, generator: torch.Generator, start: Tensor, deterministic: bool
    ) -> Tensor:
        """Return the policy's chunk, followed by the rest of `start`: [B, 1, T, A], or no sequence without a policy."""
        if self.policy is None:
            return start[:, None][:, :0]
        chunk = self.policy.act(observation, generator, deterministic=deterministic).actions.cpu().float()
        chunk = chunk[:, : start.shape[1]]
        return torch.cat([chunk, start[:, chunk.shape[1] :]], 1)[:, None]


def load_objective(path: str, model: WorldModel) -> Objective:
    """Return the potential at an import path, as [n] float64 on the CPU.

    Raises ConfigError when there is none, and, where it is called, when it reads what `model` does not imagine or does
    not return one number for each of the frames.
    """
    objective = load_dotted(path, "Objective of planning")

    def potential(frames: Mapping[str, Tensor]) -> Tensor:
        rows = len(next(iter(frames.values())))
        try:
            values = torch.as_tensor(objective(frames))
        except KeyError as error:
            if error.args and error.args[0] in frames:
                raise
            raise ConfigError(
                f"plan.objective={path} reads {error}, but the model of '{model.spec.name}' imagines "
                f"{', '.join(frames)}: use one of these, or a model that imagines more."
            ) from error
        if values.shape != (rows,):
            raise ConfigError(
                f"plan.objective={path} returned shape {list(values.shape)} for {rows} frames: it must return one "
                f"number each, [{rows}]."
            )
        return values.double().cpu()

    return potential


def make_planner(config: PlanConfig) -> Planner:
    """Return the planner of plan.kind; raises ConfigError for unknown kinds and options."""
    make = PLANNERS.load(config.kind)
    names = named_arguments(make)
    for name in config.options:
        if name not in names:
            raise ConfigError(f"plan.kind={config.kind} has no option '{name}'.{did_you_mean(name, names)}")
    require_types(make, config.options, "plan.options.")
    return make(**config.options)


def _require_sizes(samples: int, rounds: int, elites: int, std: float, hold: int) -> None:
    if min(samples, rounds, elites, hold) < 1 or elites > samples or not std > 0:
        raise ConfigError(
            f"plan.options: samples={samples}, rounds={rounds}, elites={elites} and hold={hold} must be at least 1, "
            f"elites at most samples, and std={std} above 0."
        )
