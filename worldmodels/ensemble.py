"""An ensemble of Gaussian dynamics models, with learned reward and success heads (PETS, Chua 2018; MOPO, Yu 2020).

All members are one batched tensor. Each predicts mean and variance of the change of the free state elements; each
imagined step uses a random member. Uncertainty is the disagreement of the members' means. Deviations from MOPO: rewards
and success come from `StepHeads` instead of extra outputs; members differ by initial weights and minibatches, not by
bootstrapped data sets; all members are used as elites; a robot's own vector changes by a least-squares fit on itself
and the action, and the networks predict what that leaves. Actuators follow commands almost linearly, and a network that
has to learn it errs by as much as a slow policy moves, which then stands still in imagination.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.episodes import Episodes
from robopolicy.core.regression import Regression
from robopolicy.core.returns import PROGRESS, SUCCESS, success_bonus
from robopolicy.core.spec import STATE, Field, WorldSpec
from robopolicy.core.transitions import Transitions
from robopolicy.core.vectors import StateVector
from robopolicy.nn.blocks import Members
from worldmodels.checkpoint import Described
from worldmodels.configuration import MAX_LOGVAR, MIN_LOGVAR, EnsembleConfig
from worldmodels.data import (
    TOLERANCE,
    Standardised,
    StateStructure,
    find_structure,
    means_and_deviations,
    recorded_transitions,
    register_structure,
    require_fields,
    structure_of,
)
from worldmodels.goals import only_varying
from worldmodels.heads.goal import pairs_of
from worldmodels.heads.outputs import quantiles_of
from worldmodels.heads.state import StepHeads, success_batch
from worldmodels.protocol import Context, Imagined, Latent, counters, uniforms_of
from worldmodels.rollouts import RolloutStage

ROUNDING = 1e-6
"""Part of an element's change, in standard deviations, that counts as none."""


class EnsembleModel(Described[EnsembleConfig], Standardised):
    """A `LearnedModel` of the non-image fields of `spec`; create it with `build` or `load_world_model`.

    success_bonus: the reward for reaching success; the spec's reward terms are ("progress", "success"); robot: elements
    of the state that are the robot's own, by default those of observation.state.
    """

    configuration = EnsembleConfig
    context = 1

    delta_mean: Tensor
    delta_std: Tensor
    robot: Tensor
    robot_free: Tensor
    response: Tensor
    uncertainty_quantiles: Tensor

    def __init__(
        self,
        config: EnsembleConfig,
        spec: WorldSpec,
        structure: StateStructure,
        success_bonus: float,
        seed: int = 0,
        robot: Sequence[int] | None = None,
    ):
        super().__init__(config, spec, structure, success_bonus)
        self.state_vector = StateVector.learned(spec)
        fields = {key: field for key, field in spec.observation.items() if key in self.state_vector.fields}
        # history=1: the model sees single frames; `ImaginedWorld` stacks the history that a policy reads.
        self._spec = replace(spec, observation=fields, rewards=(PROGRESS, SUCCESS), history=1)
        register_structure(self, structure)
        states = self.state_vector.size
        actions = spec.action.size
        free = len(structure.free)
        # Weights follow from `seed` alone, and the global generator stands where it stood: what is built before or
        # after this model does not change with it.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.dynamics = Members(config.members, states + actions, config.width, config.depth, 2 * free)
            by_potential = config.success == "potential"
            self.heads = StepHeads(
                self.state_vector, actions, config.head_width, success_bonus, config.success_head, by_potential
            )
        self.max_logvar = nn.Parameter(torch.full((free,), MAX_LOGVAR))
        self.min_logvar = nn.Parameter(torch.full((free,), MIN_LOGVAR))
        self.register_statistics(state=states, action=actions, delta=free)
        if robot is None:
            robot = range(states)[self.state_vector.slices.get(STATE, slice(0))]
        moving = structure.free.tolist()
        columns = [moving.index(element) for element in robot if element in moving]
        self.register_buffer("robot", torch.tensor(list(robot), dtype=torch.long), persistent=False)
        self.register_buffer("robot_free", torch.tensor(columns, dtype=torch.long), persistent=False)
        self.register_buffer("response", torch.zeros(len(robot) + actions + 1, len(columns)))
        self.register_load_state_dict_pre_hook(_without_response)
        self.register_buffer("uncertainty_quantiles", torch.zeros(101))

    @classmethod
    def build(cls, config: EnsembleConfig, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Build an untrained ensemble for `spec`, with structure and statistics from `episodes`.

        Raises DataError when the data's fields differ from the world's, or there are only images.
        """
        vector = StateVector.of(spec)
        require_fields(spec, vector.fields, episodes)
        data = recorded_transitions(episodes, vector)
        structure = find_structure(data.state, data.next_state, vector.names)
        model = cls(config, spec, structure, success_bonus(episodes), seed)
        model.fit_statistics(data)
        return model

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """Dynamics, reward and success are fitted together, on single steps; then, if configured, the dynamics through
        their own predictions.
        """
        stages: dict[str, tuple[Regression, float]] = {"ensemble": (self, 1.0)}
        if self.config.rollout_step_ratio:
            stages["rollouts"] = RolloutStage(self), self.config.rollout_step_ratio
        return stages

    @property
    def spec(self) -> WorldSpec:
        """Spec of the imitated world, with the predicted reward terms."""
        return self._spec

    @property
    def structure(self) -> StateStructure:
        """Structure of the state's elements."""
        return structure_of(self)

    @torch.no_grad()
    def fit_statistics(self, data: Transitions) -> None:
        """Fit the robot's response, and the standardisation of inputs and of what is left to predict: means and
        deviations [S], [A] and [F] over the steps.
        """
        change = (data.next_state - data.state)[:, self.structure.free.to(data.state.device)]
        if len(self.robot_free):
            inputs = self._response_inputs(data.state, data.action).double()
            target = change[:, self.robot_free.to(change.device)].double()
            weights = torch.linalg.lstsq(inputs, target).solution
            # What the fit leaves of a zero depends on how the machine adds up.
            share = weights.abs() * inputs.square().mean(0).sqrt()[:, None] / target.std(0).clamp_min(1e-9)
            self.response.copy_(torch.where(share < ROUNDING, 0.0, weights))
        left = change - self.responded(data.state, data.action)
        self.keep_statistics(means_and_deviations({"state": data.state, "action": data.action, "delta": left}))
        # What is exactly linear leaves rounding errors, which are not worth learning.
        self.delta_std.clamp_min_(TOLERANCE * change.std(0, correction=0).to(self.delta_std.device))
        self.heads.fit_statistics(data)

    def _response_inputs(self, state: Tensor, action: Tensor) -> Tensor:
        return torch.cat([state[..., self.robot.to(state.device)], action, torch.ones_like(action[..., :1])], -1)

    def responded(self, state: Tensor, action: Tensor) -> Tensor:
        """Return the linear part [..., F] of the change of the free elements, in the world's units: that of the robot's
        own elements, from states [..., S] and actions [..., A]; 0 for others.
        """
        part = self._response_inputs(state, action) @ self.response.to(state.device)
        change = part.new_zeros(*part.shape[:-1], len(self.delta_mean))
        change[..., self.robot_free.to(state.device)] = part
        return change

    def remainder(self, state: Tensor, action: Tensor, after: Tensor) -> Tensor:
        """Return the standardised change [..., F] of the free elements beyond `responded`, from states [..., S] to
        those after.
        """
        return self.standard("delta", (after - state)[..., self.structure.free] - self.responded(state, action))

    def advanced(self, state: Tensor, action: Tensor, remainder: Tensor) -> Tensor:
        """Return states [..., S] one step later, from actions [..., A] and the standardised remainder [..., F]."""
        change = torch.addcmul(self.delta_mean, self.delta_std, remainder) + self.responded(state, action)
        # The change is added to the state before, so constants keep their value bit by bit.
        structure = self.structure
        return structure.complete(state.index_add(-1, structure.free, change))

    def predict(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return standardised mean and log-variance [M, N, F] of the change of the free elements beyond `responded`."""
        x = torch.cat([self.standard("state", state), self.standard("action", action)], -1)
        mean, logvar = self.dynamics(x).chunk(2, -1)
        return mean, self._bounded(logvar)

    def loss(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"dynamics", "reward", "potential", "success"}: each [N].

        batch: state, action, next_state [M, N, ...] for the members; reward [M, N]; success_state [N, S] and
        success_label [N] for the success head.
        """
        state = batch["state"]
        action = batch["action"]
        after = batch["next_state"]
        likelihood = self.likelihood(*self.predict(state, action), self.remainder(state, action, after))
        # The heads are no ensemble: they learn from the rows of the first member.
        first = {name: value[0] for name, value in batch.items() if not name.startswith("success")}
        success_rows = {name: value for name, value in batch.items() if name.startswith("success")}
        return {"dynamics": likelihood, **self.heads.loss(first | success_rows, generator)}

    def likelihood(self, mean: Tensor, logvar: Tensor, target: Tensor) -> Tensor:
        """Return the negative beta-likelihood [N], a mean over members, of standardised changes [M, N, F] under means
        and log-variances [M, N, F], plus the term that pulls the bounds of the log-variance together.
        """
        # beta-NLL: the weight, an element's own detached variance, undoes the 1 / variance by which the likelihood
        # would neglect what is uncertain; the bounds are pulled together, or they would only ever widen.
        error = (mean - target).square()
        likelihood = ((error * (-logvar).exp() + logvar) * (self.config.beta * logvar.detach()).exp()).mean(-1)
        bounds = 0.01 * (self.max_logvar - self.min_logvar).mean()
        return likelihood.mean(0) + bounds

    def rows(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of rows N of a batch for `loss`, tensors [M, N, ...] or [N, ...]."""
        return len(batch["success_label"])

    def divided(self, batch: Mapping[str, Tensor], own: slice) -> dict[str, Tensor]:
        """Return the rows `own` of a batch for `loss`: n of N, in tensors [M, n, ...] or [n, ...]."""
        return {name: value[own] if name.startswith("success") else value[:, own] for name, value in batch.items()}

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        """Yield training batches indefinitely; each member samples its own steps, and the only state is `generator`.

        Batches for `loss`, in the world's units: state and next_state [M, N, S], action [M, N, A], reward [M, N],
        success_state [N, S], success_label [N] bool, and where a potential decides success the outputs of
        `pairs_of`; for M members and N = config.batch_size. Raises DataError when rewards, success or final frames are
        missing.
        """
        data = recorded_transitions(episodes, self.state_vector)
        config, device = self.config, self.state_mean.device
        successes = data.won.nonzero()[:, 0]
        while True:
            shape, generator_device = (config.members, config.batch_size), generator.device
            rows = torch.randint(len(data), shape, generator=generator, device=generator_device).cpu()
            batch = {name: getattr(data, name)[rows] for name in ("state", "action", "next_state", "reward")}
            batch |= success_batch(data, rows[0], successes, config.positive_fraction, generator)
            if config.success == "potential":
                batch |= pairs_of(data, rows[0], generator)
            yield {name: value.to(device) for name, value in batch.items()}

    @torch.no_grad()
    def calibrate(self, episodes: Episodes) -> None:
        """Calibrate the success threshold, the uncertainty quantiles and the choice of reward head on held-out
        episodes.
        """
        data, device = recorded_transitions(episodes, self.state_vector), self.state_mean.device
        self.heads.calibrate(data)
        disagreements = []
        for state, action in zip(data.state.split(8192), data.action.split(8192), strict=True):
            inputs = self.standard("state", state.to(device)), self.standard("action", action.to(device))
            disagreements.append(_disagreement(self._outputs(*inputs).chunk(2, -1)[0]))
        self.uncertainty_quantiles.copy_(quantiles_of(torch.cat(disagreements)))

    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the latent: the state vector, the episode's seed and the number of the next step.

        state: [R, S], in the world's units; seed, step: [R] int64, as `seeds` [R].
        """
        present = {key: context.last(key) for key in self.state_vector.keys}
        state = torch.from_numpy(self.state_vector.pack(present)).to(self.state_mean.device)
        return {"state": state, **counters(seeds, state.device)}

    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Advance every row by one control step with actions [B, A], in the world's units; see `generate`."""
        latent, outcomes = self.generate(latent, actions[:, None])
        return latent, outcomes[0]

    @torch.no_grad()
    def generate(self, latent: Latent, actions: Tensor) -> tuple[Latent, list[Imagined]]:
        """Advance every row by T steps, each with a random member; success terminates the episode if the spec ends
        episodes at success.

        actions: [B, T, A], in the world's units. The uncertainty [B] is in standard deviations of a step's change. Only
        the next state depends on the previous one; rewards, success and uncertainty of all steps are computed together.
        """
        actions = actions.to(latent["state"].dtype).transpose(0, 1)
        members, noise = self._draws(latent, len(actions))
        path = [latent["state"]]
        means = []
        rows = torch.arange(actions.shape[1], device=actions.device)
        for step, action in enumerate(self.standard("action", actions)):
            output = self._outputs(self.standard("state", path[-1]), action)
            mean, logvar = output.chunk(2, -1)
            # Each row draws its member anew at every step (PETS calls this TS1), so that the bias of one member does
            # not add up along a rollout.
            sample = mean[members[step], rows]
            if self.config.sample:
                deviation = (0.5 * self._bounded(logvar[members[step], rows])).exp()
                sample = sample + deviation * noise[step]
            path.append(self.advanced(path[-1], actions[step], sample))
            means.append(mean)
        states = torch.stack(path)
        progress, success = self.heads.judge(states, actions)
        # Never terminated by itself: success ends an episode, once the world around the model has debounced it.
        bonus, never = self.success_bonus * success.to(states.dtype), torch.zeros_like(success)
        fields, doubt = self.state_vector.unpack(states[1:]), _disagreement(torch.stack(means, 1))
        outcomes = [
            Imagined(
                {key: fields[key][step] for key in self._spec.observation},
                {PROGRESS: progress[step], SUCCESS: bonus[step]},
                success[step],
                never[step],
                doubt[step],
            )
            for step in range(len(actions))
        ]
        return {"state": states[-1], "seed": latent["seed"], "step": latent["step"] + len(actions)}, outcomes

    @property
    def goal_fields(self) -> Mapping[str, Field]:
        """Fields in which a goal may be given: those of the state."""
        return self.state_vector.fields

    def goal_targets(self, goal: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the standardised elements of G goals, key -> [G, D], from key -> [G, *shape]; see `ComparesGoals`."""
        places = self.state_vector.slices
        mean, std = self.state_mean.cpu(), self.state_std.cpu()
        return {
            key: only_varying((value.flatten(1).float().cpu() - mean[place]) / std[place], std[place])
            for key, value in goal.items()
            for place in (places[key],)
        }

    def goal_values(self, latent: Latent, keys: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the standardised elements of latents, key -> [B, D]; see `ComparesGoals`."""
        standard = (latent["state"] - self.state_mean) / self.state_std
        return {key: standard[:, self.state_vector.slices[key]] for key in keys}

    def _outputs(self, state: Tensor, action: Tensor) -> Tensor:
        """Return every member's outputs for the same standardised rows, [M, N, 2 F]: means, unbounded log-variances."""
        return self.dynamics(torch.cat([state, action], -1).expand(self.config.members, -1, -1))

    def _bounded(self, logvar: Tensor) -> Tensor:
        """Return log-variances [..., F] within soft, learned bounds (PETS): far from the data, an unbounded variance
        would be arbitrary and its likelihood could diverge.
        """
        # max - softplus(max - x) is about x far below the bound and never above it; the second line mirrors this at
        # the lower bound. A clamp would have no gradient beyond the bounds, and the bounds themselves would not learn.
        logvar = self.max_logvar - functional.softplus(self.max_logvar - logvar)
        return self.min_logvar + functional.softplus(logvar - self.min_logvar)

    def _draws(self, latent: Latent, steps: int) -> tuple[Tensor, Tensor]:
        """Return member indices [T, B] and standard normal noise [T, B, F] of the next T = `steps` steps.

        Both depend only on each row's seed and step; without sampling there is no noise, F = 0.
        """
        from scipy.special import ndtri  # who imagines with noise, pays for its import

        # The counters that single steps would have: a chunk imagined at once draws what `imagine` draws in turn.
        step = latent["step"] + torch.arange(steps, device=latent["step"].device)[:, None]
        counts = {"seed": latent["seed"].repeat(steps), "step": step.flatten()}
        draws = uniforms_of(counts, 1 + len(self.structure.free) * self.config.sample).reshape(*step.shape, -1)
        members = torch.from_numpy((draws[..., 0] * self.config.members).astype(np.int64))
        # ndtri inverts the normal distribution's cumulative one: uniforms become standard normal numbers.
        noise = torch.from_numpy(ndtri(np.clip(draws[..., 1:], 1e-9, 1 - 1e-9)).astype(np.float32))
        return members.to(step.device), noise.to(step.device)


def _without_response(model: nn.Module, weights: dict[str, Any], prefix: str, *others: Any) -> None:
    """Complete weights of an earlier revision, whose networks predict all of the change."""
    weights.setdefault(f"{prefix}response", torch.zeros_like(model.get_buffer("response")))


def _disagreement(mean: Tensor) -> Tensor:
    """Return the disagreement [...] of the members' means [M, ..., F]."""
    # Population deviation: with one member it is 0, where the sample deviation would be NaN.
    return mean.std(0, correction=0).mean(-1)
