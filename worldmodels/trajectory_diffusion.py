"""Diffusion of whole trajectories, guided towards a target policy: synthetic on-policy data with consistent dynamics.

One denoiser samples states and actions of a subsequence together, so errors do not compound over steps. At every noise
level, guidance moves only the actions up the gradient of the target policy's likelihood. Source: policy-guided
diffusion, Jackson et al. 2024, arXiv:2404.06356. Deviations: state changes are generated together with states, each
standardised, and the output is the best fit to both. (Errors of states alone are as large as one step's change of slow
elements, which makes them useless for learning dynamics or values.) `StepHeads` predicts rewards and ends (as generated
channels, successes were four times too rare). Constants, angles and derived elements of the state are repaired as in
the ensemble; subsequences that end early repeat their last frame; guidance shifts the denoised actions, not the noisy
ones before denoising.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from einops import rearrange
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.progress import progress
from robopolicy.core.regression import Regression
from robopolicy.core.returns import success_bonus
from robopolicy.core.sequences import SequenceData, Sequences
from robopolicy.core.spec import WorldSpec
from robopolicy.core.transitions import Transitions
from robopolicy.core.vectors import StateVector
from robopolicy.nn import edm
from worldmodels.checkpoint import Described
from worldmodels.configuration import TrajectoryConfig
from worldmodels.data import (
    StateStructure,
    find_structure,
    recorded_transitions,
    register_structure,
    require_fields,
    structure_of,
)
from worldmodels.heads.state import StepHeads

LogProb = Callable[[Tensor, Tensor], Tensor]
"""(states [N, S], actions [N, A] in the world's units) -> log-probability [N] under the target policy."""


class TrajectoryDiffusion(Described[TrajectoryConfig]):
    """A generator of subsequences of `length` steps; create it with `build` or `restore`.

    Channels of a step: standardised state [S] and its change [S], action [A].
    """

    configuration = TrajectoryConfig
    mean: Tensor
    std: Tensor

    def __init__(
        self, config: TrajectoryConfig, spec: WorldSpec, structure: StateStructure, success_bonus: float, seed: int = 0
    ):
        from robopolicy.nn.unet import UNetDenoiser  # imports diffusers, which takes seconds

        super().__init__(config, spec, structure, success_bonus)
        self.state_vector = StateVector.learned(spec)
        self.states, self.actions = self.state_vector.size, spec.action.size
        register_structure(self, structure)
        channels = 2 * self.states + self.actions
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = UNetDenoiser(config.length, channels, 1, config.width, config.depth)
            sizes = self.actions, config.head_width
            self.heads = StepHeads(self.state_vector, *sizes, success_bonus, config.success_head)

    @classmethod
    def build(cls, config: TrajectoryConfig, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Build an untrained generator for `spec`, with structure and statistics from `episodes`.

        Raises DataError when the data's fields differ from the world's, or there are only images.
        """
        vector = StateVector.of(spec)
        require_fields(spec, vector.fields, episodes)
        data = recorded_transitions(episodes, vector)
        structure = find_structure(data.state, data.next_state, vector.names)
        model = cls(config, spec, structure, success_bonus(episodes), seed)
        rows = subsequence_starts(episodes, config.length)
        # Evenly spaced over all episodes: the first 20,000 would show the data's first episodes alone.
        rows = rows[:: max(1, len(rows) // 20_000)]
        steps = model._channels(SequenceData(episodes).cut(rows, 0, config.length))
        with torch.no_grad():
            model.mean.copy_(steps.mean((0, 1)))
            model.std.copy_(steps.std((0, 1), correction=0).clamp_min(1e-6))
        model.heads.fit_statistics(data)
        return model

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """First the denoiser, then the heads."""
        return {"trajectories": (self, 1.0), "heads": (self.heads, 1.0)}

    def calibrate(self, episodes: Episodes) -> None:
        """Calibrate the success threshold and the choice of reward head on held-out episodes."""
        self.heads.calibrate(recorded_transitions(episodes, self.state_vector))

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield standardised subsequences indefinitely; the only state is `generator`."""
        device, data = self.mean.device, SequenceData(episodes)
        rows = subsequence_starts(episodes, self.config.length)
        while True:
            indices = torch.randint(len(rows), (self.config.batch_size,), generator=generator, device=generator.device)
            sequences = data.cut(rows[indices.cpu()], 0, self.config.length)
            yield {"steps": (self._channels(sequences).to(device) - self.mean) / self.std}

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"trajectories": [N]}, EDM's weighted error. batch: "steps" [N, L, 2 S + A], standardised."""
        return {"trajectories": edm.loss(self._network, batch["steps"], self.config.edm, generator).mean((1, 2))}

    def generate(
        self,
        count: int,
        generator: torch.Generator,
        target: LogProb | None = None,
        guidance: float = 1.0,
        *,
        batch_size: int = 256,
    ) -> Tensor:
        """Generate `count` subsequences [count, L, S + A] in the data's units, states and actions.

        target: the policy whose likelihood guides the actions. At denoising step n of N, guidance * guidance_weight(n /
        N) * g / |g| is added to the denoised standardised actions. g is the gradient of the summed log-likelihood with
        respect to them, |g| its norm over the whole subsequence. The last step has no guidance.
        """
        parts = []
        with progress("Generating trajectories", count) as advance:
            for begin in range(0, count, batch_size):
                rows = min(batch_size, count - begin)
                shape = (rows, self.config.length, len(self.mean))
                noise = torch.randn(shape, generator=generator, device=self.mean.device)
                push = None if target is None or guidance == 0 else self._push(target, guidance)
                parts.append(edm.sample(self._network, noise, self.config.edm, generator, push) * self.std + self.mean)
                advance(rows)
        return self._joined(torch.cat(parts))

    @torch.no_grad()
    def transitions(self, steps: Tensor) -> Transitions:
        """Return the transitions of subsequences [N, L, S + A], up to success; rewards include the bonus."""
        state, action = steps.split([self.states, self.actions], -1)
        # The last step has no state after it: L steps are L - 1 transitions.
        before, actions, after = (each.flatten(0, 1) for each in (state[:, :-1], action[:, :-1], state[:, 1:]))
        success = self.heads.succeeded(after)
        reward = self.heads.progress(before, actions, after) + self.heads.bonus * success
        success_steps = success.reshape(len(steps), -1).long()
        # True up to the first success, that step included: before it both sides are 0, at it both are 1.
        valid_mask = (success_steps.cumsum(1) == success_steps).flatten()
        terminated = success[valid_mask]
        return Transitions(
            before[valid_mask], actions[valid_mask], reward[valid_mask], after[valid_mask], terminated, terminated
        ).check()

    def _network(self, scaled: Tensor, label: Tensor) -> Tensor:
        """EDM's F: the label log(sigma) / 4 in [-1.6, 1.2] is mapped to a time in [0, 1]."""
        return self.network(scaled, (label + 2) / 4, scaled.new_zeros(len(scaled), 1))

    def _push(self, target: LogProb, guidance: float) -> edm.Guidance:
        """Return EDM's guidance: the direction of steepest log-likelihood for the actions, at the denoised states."""
        actions = slice(2 * self.states, 2 * self.states + self.actions)

        def push(clean: Tensor, share: float) -> Tensor:
            with torch.enable_grad():
                # Detached: guided is by the slope of the policy's likelihood at what was denoised, not through the
                # denoiser.
                trajectory = (clean * self.std + self.mean).detach()
                action_input = clean[..., actions].detach().requires_grad_()
                raw = action_input * self.std[actions] + self.mean[actions]
                states = rearrange(trajectory[..., : self.states], "n l s -> (n l) s")
                (slope,) = torch.autograd.grad(target(states, rearrange(raw, "n l a -> (n l) a")).sum(), action_input)
            # Only the direction counts: far from what the policy does, the slope itself would be arbitrarily steep.
            unit = slope / (slope.flatten(1).norm(dim=1)[:, None, None] + 1e-8)
            shift = torch.zeros_like(clean)
            shift[..., actions] = guidance * guidance_weight(share) * unit
            return shift

        return push

    def _channels(self, cut: Sequences) -> Tensor:
        """Return [M, L, 2 S + A] in the data's units."""
        state = self.state_vector.pack(cut.frames)
        return torch.cat([state[:, :-1], state.diff(dim=1), cut.actions], -1).float()

    def _joined(self, steps: Tensor) -> Tensor:
        """Return [N, L, S + A] from generated [N, L, 2 S + A]: the states that best fit the generated states and
        changes, both weighted by their standard deviations. Constants are held fixed, angles projected onto the unit
        circle, and derived elements recomputed.
        """
        structure, count = structure_of(self), self.states
        states, change, actions = steps.split([count, count, self.actions], -1)
        # Double precision, as changes may be a thousand times smaller than states and their weights are inverse
        # squares.
        trust, step_trust = (std.double().pow(-2)[:, None] for std in self.std[: 2 * count].split(count))
        # Weighted least squares, element by element: minimise |s - states|^2 / var(s) + |D s - change|^2 / var(change)
        # over whole subsequences s; D takes differences in time. Its normal equations are sides @ s = target.
        identity = torch.eye(self.config.length, dtype=torch.float64, device=steps.device)
        difference = identity.diff(dim=0)
        sides = trust[..., None] * identity + step_trust[..., None] * (difference.T @ difference)
        # The last drawn change leads out of the subsequence, so it constrains none of its states.
        target = trust * states.double().mT + step_trust * (change[:, :-1].double().mT @ difference)
        state = torch.linalg.solve(sides, target[..., None])[..., 0].mT.to(steps.dtype)
        constants = structure.constant
        # A constant has a deviation within the data but none within an episode: its best estimate is the mean of all
        # steps.
        state[..., constants] = states[..., constants].mean(1, keepdim=True)
        return torch.cat([structure.complete(state), actions], -1)


def guidance_weight(share: float) -> Tensor:
    """Return policy-guided diffusion's weight of the guidance, w = 1 - s + 0.3 sin(pi s), a scalar [].

    share: s = n / N, fraction of the denoising that is done, in [0, 1]. The weight falls monotonically from 1 to 0 (its
    slope is -1 + 0.3 pi cos(pi s) < 0), slowly at first, because late guidance would break the dynamics. 0.3 is the
    authors' weight of the sine, which their code evaluates one step later, at (n + 1) / N.
    """
    return 1 - share + 0.3 * torch.sin(torch.tensor(torch.pi * share))


def subsequence_starts(episodes: Episodes, length: int) -> Tensor:
    """Return the steps after which `length` more steps are known: the episode continues, or the task has ended by then.

    They are indices [N] of recorded steps, in ascending order. Raises DataError when there are none.
    """
    remaining = (episodes.starts + episodes.lengths)[episodes.episode_of_step] - torch.arange(episodes.step_count)
    terminated = torch.zeros(len(episodes), dtype=torch.bool) if episodes.terminated is None else episodes.terminated
    rows = ((remaining >= length) | terminated[episodes.episode_of_step]).nonzero()[:, 0]
    if not len(rows):
        raise DataError(f"No episode has {length} steps, or ends the task earlier: use a shorter length.")
    return rows


keep_former_names(__name__, {"beginnings": "subsequence_starts"})
