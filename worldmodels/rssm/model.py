"""A recurrent state-space model of vectors and images (DreamerV3, Hafner et al. 2023, arXiv:2301.04104).

The state of an episode is deterministic units and a categorical sample. A posterior reads frames, a prior predicts
them; imagination follows the prior. Deviations from DreamerV3: (1) The initial state is a function of the first frame,
and training subsequences start anywhere including episode starts, so one frame suffices and a burn-in of several is
used. (2) Vectors are carried together with the latent and decoded as changes, standardised with data statistics and
clipped instead of symlog; constants are copied and derived elements recomputed as in the ensemble. (3) The posterior
reads a random fraction of a subsequence's frames and the prior predicts the others, so imagination is trained on its
own predictions. Longer blind spans (PlaNet's overshooting, arXiv:1811.04551) were tested and dropped. Recorded actions
correlate with true positions, the model learns to infer the state from them, and a policy trained in it exploits that.
(Pushing a cube, one such policy: 55 % success in reality, 87 % imagined; 59 % with a model trained on a fraction of the
frames, with equal heads.) (4) Heads are refitted on the finished latents. There is no continuation head: episodes end
by success or time limit.

Axes: M subsequences of T + 1 frames with T actions between them, V elements of all vector fields.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from robopolicy.core.episodes import Episodes
from robopolicy.core.regression import Regression
from robopolicy.core.returns import PROGRESS, SUCCESS, success_bonus
from robopolicy.core.sequences import SequenceData, Sequences
from robopolicy.core.spec import IMAGE_PREFIX, WorldSpec
from robopolicy.core.vectors import StateVector
from worldmodels.checkpoint import Described
from worldmodels.configuration import FREE_NATS, REPRESENTATION_SCALE, START_SHARE, SUCCESS_SHARE, RssmConfig
from worldmodels.data import BOUND, StateStructure, read_statistics, register_structure, structure_of
from worldmodels.heads.latent import THUMBNAIL, CalibratedHeads, HeadStage, LatentHeads, LatentSteps
from worldmodels.protocol import Context, Imagined, Latent, counters, uniforms_of
from worldmodels.rssm.dynamics import LatentDynamics, Unrolled, balanced_divergence, draw

HEAD_STEPS = 200_000
"""Maximum number of steps whose latents the heads are refitted on."""


class RssmModel(Described[RssmConfig], CalibratedHeads):
    """A `LearnedModel` of the fields of `spec`, vectors and images; create it with `build` or `load_world_model`.

    success_bonus: the reward for reaching success; the spec's reward terms are ("progress", "success").
    """

    configuration = RssmConfig
    spread: Tensor

    def __init__(
        self, config: RssmConfig, spec: WorldSpec, structure: StateStructure, success_bonus: float, seed: int = 0
    ):
        super().__init__(config, spec, structure, success_bonus)
        self._spec = replace(spec, rewards=(PROGRESS, SUCCESS), history=1)
        self.images = {key: item for key, item in spec.observation.items() if key.startswith(IMAGE_PREFIX)}
        self.state_vector = StateVector.learned(spec)
        register_structure(self, structure)
        elements, actions = self.state_vector.size, spec.action.size
        free = len(structure.free)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.dynamics = LatentDynamics(config, elements, actions, free, self.images)
            predicted_size = free + 3 * THUMBNAIL**2 * len(self.images)
            sizes = config.networks.hidden, config.layers, config.members
            about = {"elements": elements, "actions": actions, "guessed": predicted_size}
            self.heads = LatentHeads(*sizes, **about, success_head=config.success_head)
        self.register_statistics(state=elements, action=actions, change=elements, reward=1)
        self.register_buffer("spread", torch.zeros(free, elements))
        self.register_thresholds()

    @classmethod
    def build(cls, config: RssmConfig, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Build an untrained model of the world of `spec`, with structure and statistics from `episodes`.

        Raises DataError when the data's fields differ from the world's, NonFiniteError when the data is not finite.
        """
        structure, statistics = read_statistics(spec, episodes)
        model = cls(config, spec, structure, success_bonus(episodes), seed)
        model.keep_statistics(statistics)
        model.spread.copy_(_spread(structure, model.state_std, model.change_std))
        model.keep_scales(model.heads)
        return model

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """First all parts, then the heads alone on the final latents."""
        return {"latents": (self, 1.0), "heads": (HeadStage(self.heads, self.latent_steps), 1.0)}

    @property
    def context(self) -> int:
        """Number of context frames that the posterior reads before imagination starts; one is enough."""
        return self.config.burn_in

    @property
    def spec(self) -> WorldSpec:
        """Spec of the imitated world, with the predicted reward terms."""
        return self._spec

    @property
    def structure(self) -> StateStructure:
        """Structure of the state's elements."""
        return structure_of(self)

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield {"subsequence": Sequences, "seen": [M, T + 1] bool} indefinitely; the only state is `generator`.

        Subsequences have burn_in frames followed by `length` more. They start at any step, so success is equally likely
        at every position. A fraction starts with its episode; half of these reach back before it, as contexts do.
        """
        data, config = SequenceData(episodes, tuple(self._spec.observation)), self.config
        count = config.batch_size
        past = config.burn_in - 1
        frames = config.burn_in + config.length
        start_count, success_count = round(START_SHARE * count), round(SUCCESS_SHARE * count)
        padded = start_count // 2
        assert episodes.step_success is not None
        success_steps = episodes.step_success.nonzero()[:, 0]
        starts = episodes.starts
        lengths = episodes.lengths
        size = (count, frames + 4)
        while True:
            # One draw of fixed size holds all randomness of a batch: the generator moves alike whatever is used of it.
            # In double precision, because the 24 bits of a float would miss steps of a long dataset.
            draws = torch.rand(size, generator=generator, device=generator.device, dtype=torch.float64).cpu()
            steps = (draws[:, 0] * len(data)).long()
            indices = (draws[:start_count, 1] * len(episodes)).long()
            steps[:start_count] = starts[indices]
            steps[:padded] += (draws[:start_count, 2] * lengths[indices].clamp(max=past)).long()[:padded]
            if len(success_steps):
                indices = success_steps[
                    (draws[start_count : start_count + success_count, 1] * len(success_steps)).long()
                ]
                back = (draws[start_count : start_count + success_count, 2] * (frames - 1)).long()
                # The success may be at any place of the subsequence, which must not begin before its episode.
                steps[start_count : start_count + success_count] = (indices - back).maximum(
                    starts[episodes.episode_of_step[indices]]
                )
            # Padded ones are cut around a step at or a little after the episode's start, so that frames before it
            # repeat the first one, as in a context that reaches back before an episode.
            parts = data.cut(steps[:padded], past, config.length), data.cut(steps[padded:], 0, frames - 1)
            # The first 1 to burn_in frames are always read, like the context of an imagined episode.
            prefix = 1 + (draws[:, 3:4] * config.burn_in).long()
            seen_mask = (draws[:, 4:] < config.observed_fraction) | (torch.arange(frames) < prefix)
            device = self.spread.device
            yield {"subsequence": _concatenated(*parts).to(device), "seen": seen_mask.to(device)}

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the scaled loss terms, each [M].

        "vector": Huber errors of the free elements in standard deviations of their changes, summed; "image": squared
        errors, summed over pixels; "dynamics", "representation": nats; "reward", "success": cross-entropies where the
        previous frame was observed. Frames outside of the episode do not count.
        """
        subsequence = batch["subsequence"]
        seen_mask = batch["seen"]
        config = self.config
        rows, length = subsequence.valid.shape
        valid_mask = torch.cat([subsequence.valid[:, :1], subsequence.valid], 1).float()
        state = self.vector(subsequence.frames)
        shape = length + 1, rows, config.networks.stochastic
        latents = self.follow(
            state, subsequence, seen_mask, torch.rand(shape, generator=generator, device=generator.device)
        )
        # Errors count in deviations of a step's change: in the state's, slow elements would cost next to nothing.
        error = ((latents.decoded - state)[:, 1:] * (self.state_std / self.change_std))[..., self.structure.free]
        vector = functional.smooth_l1_loss(error, torch.zeros_like(error), reduction="none").sum(-1)
        dynamics, representation = balanced_divergence(latents.posterior, latents.prior, FREE_NATS)
        # Heads read the state as imagination carries it, and must not bend it towards what is easy to judge.
        state_input = latents.state.detach()
        inputs = self.heads.inputs(latents.summary[:, 1:], state_input[:, :-1], state_input[:, 1:])
        heads = self.heads.losses(inputs, self.standard_reward(subsequence.reward), subsequence.success)
        # Behind an unseen frame the prior guesses: which of several futures came true cannot be known.
        judged_mask = subsequence.valid * seen_mask[:, :-1]
        result = {
            "vector": _masked(vector, valid_mask[:, 1:]),
            "dynamics": _masked(dynamics, valid_mask),
            "representation": REPRESENTATION_SCALE * _masked(representation, valid_mask),
            "reward": config.reward_scale * _masked(heads["reward"], judged_mask),
            "success": _masked(heads["success"], judged_mask),
        }
        if self.images:
            result["image"] = self._image_loss(subsequence, latents, valid_mask, generator)
        return result

    def _image_loss(
        self, subsequence: Sequences, latents: Unrolled, known: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the squared error [M], summed over pixels, of a sample of frames of every subsequence."""
        order = torch.randperm(known.shape[1], generator=generator, device=generator.device)
        # Images cost most of a training step, and single frames already say whether the latent holds them.
        indices = order[: self.config.images].to(known.device)
        flat = rearrange(latents.summary[:, indices], "m t f -> (m t) f")
        total = torch.zeros_like(known[:, indices])
        for key in self.images:
            target = rearrange(subsequence.frames[key][:, indices], "m t h w c -> (m t) h w c").float() / 255
            error = (self.dynamics.image(key, flat) - target).square().sum((1, 2, 3))
            total = total + error.unflatten(0, total.shape)
        return _masked(total, known[:, indices])

    def vector(self, frames: Mapping[str, Tensor]) -> Tensor:
        """Return the standardised state vectors [M, T, V] of frames, key -> [M, T, *shape]."""
        return self.standard("state", self.state_vector.pack(frames))

    def follow(self, state: Tensor, subsequence: Sequences, seen: Tensor, draws: Tensor) -> Unrolled:
        """Return the latents of subsequences with vectors `state` [M, T + 1, V]; see `LatentDynamics.unroll`."""
        embedding = self.dynamics.embed(state, subsequence.frames)
        actions = self.standard("action", subsequence.actions)
        return self.dynamics.unroll(state, embedding, actions, seen, draws.to(state.device), self.spread)

    @torch.no_grad()
    def latent_steps(self, episodes: Episodes) -> LatentSteps:
        """Return up to HEAD_STEPS steps of `episodes` as latents after observing every frame; the result is
        deterministic.
        """
        data, length = SequenceData(episodes, tuple(self._spec.observation)), self.config.length
        place = torch.arange(len(data)) - episodes.starts[episodes.episode_of_step]
        # Subsequences side by side from each episode's start: every step is in exactly one.
        first = (place % length == 0).nonzero()[:, 0]
        generator = torch.Generator().manual_seed(0)
        first = first[torch.randperm(len(first), generator=generator)[: -(-HEAD_STEPS // length)]]
        parts = []
        for part in first.split(256):
            subsequence = data.cut(part, 0, length).to(self.spread.device)
            state = self.vector(subsequence.frames)
            seen_mask = torch.ones(state.shape[:2], dtype=torch.bool, device=state.device)
            draws = torch.rand(length + 1, len(part), self.config.networks.stochastic, generator=generator)
            latents = self.follow(state, subsequence, seen_mask, draws)
            steps = LatentSteps(
                latents.summary[:, :-1],
                latents.summary[:, 1:],
                state[:, :-1],
                state[:, 1:],
                self.standard("action", subsequence.actions),
                self._guessed(state, subsequence.frames),
                self.standard_reward(subsequence.reward),
                subsequence.success,
            )
            parts.append(steps.take(subsequence.valid))
        return LatentSteps(
            *(torch.cat(values) for values in zip(*(part.__dict__.values() for part in parts), strict=True))
        )

    def _guessed(self, state: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        """Return the targets of the uncertainty heads, [M, T, K]: changes of vectors, coarse next images."""
        change = (state[:, 1:] - state[:, :-1]) * (self.state_std / self.change_std)
        parts = [change[..., self.structure.free].clamp(-BOUND, BOUND)]
        for key in self.images:
            pixels = rearrange(frames[key][:, 1:], "m t h w c -> (m t) c h w").float() / 127.5 - 1
            coarse = functional.adaptive_avg_pool2d(pixels, THUMBNAIL)
            parts.append(rearrange(coarse, "(m t) c h w -> m t (c h w)", m=len(state)))
        return torch.cat(parts, -1)

    @torch.no_grad()
    def calibrate(self, episodes: Episodes) -> None:
        """Calibrate the success threshold, the uncertainty quantiles and the choice of reward head on held-out
        episodes.
        """
        steps = self.latent_steps(episodes)
        inputs = self.heads.inputs(steps.after, steps.state, steps.next_state)
        uncertainty = self.heads.disagreement(steps.before, steps.state, steps.action)
        self.set_thresholds(self.heads, inputs, steps.reward, steps.success, uncertainty)

    @torch.no_grad()
    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the latent after the context's frames: deter [R, D], sample [R, S] class indices, state [R, V] in the
        world's units, the episode's seed and the number of the next step.
        """
        device = self.spread.device
        rows = len(seeds)
        context = context.connected()
        arrays = {key: np.ascontiguousarray(context.observation[key]) for key in self._spec.observation}
        frames = {key: torch.from_numpy(value).to(device) for key, value in arrays.items()}
        latent = {
            "state": self.state_vector.pack({key: value[:, -1] for key, value in frames.items()}),
            **counters(seeds, device),
        }
        state = self.vector(frames)
        count = state.shape[1]
        past_actions = np.zeros((rows, 0, self._spec.action.size)) if count == 1 else context.actions
        actions = self.standard("action", torch.from_numpy(np.asarray(past_actions, dtype=np.float32)).to(device))
        # Frames of the context have the step numbers -T to -1: no imagined step draws from their numbers.
        draws = [self._draws({**latent, "step": latent["step"] - count + index}) for index in range(count)]
        seen_mask = torch.ones(rows, count, dtype=torch.bool, device=device)
        embedding = self.dynamics.embed(state, frames)
        latents = self.dynamics.unroll(state, embedding, actions, seen_mask, torch.stack(draws), self.spread)
        # Class indices instead of one-hot rows: a latent, and each snapshot of it, is smaller by C.
        sample = rearrange(latents.sample[:, -1], "r (s c) -> r s c", c=self.config.networks.classes).argmax(-1)
        return {"deter": latents.deter[:, -1], "sample": sample, **latent}

    @torch.no_grad()
    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Advance every row with a sample of the prior; success terminates the episode if the spec ends episodes at
        success.

        actions: [B, A], in the world's units; the next latent has the shapes of that from `initial`.
        """
        state = self.standard("state", latent["state"])
        action, sample = self.standard("action", actions.to(state.dtype)), self._one_hot(latent["sample"])
        uncertainty = self.heads.disagreement(self.dynamics.summary(latent["deter"], sample), state, action)
        deter = self.dynamics.step(latent["deter"], sample, state, action)
        prior = self.dynamics.core.prior(deter)
        classes = draw(prior, self._draws(latent)) if self.config.sample else prior.argmax(-1)
        summary = self.dynamics.summary(deter, self._one_hot(classes))
        decoded = self.dynamics.advance(summary, state, self.spread)
        after, free = latent["state"].clone(), self.structure.free
        # Only free elements are decoded; constants stay as they were, bit by bit, and derived ones follow below.
        after[:, free] = (self.state_mean + self.state_std * decoded)[:, free]
        after = self.structure.complete(after)
        inputs = self.heads.inputs(summary, state, self.standard("state", after))
        outcome = self.judged(self.heads, inputs, self._observation(after, summary), uncertainty)
        next_latent = {
            "deter": deter,
            "sample": classes,
            "state": after,
            "seed": latent["seed"],
            "step": latent["step"] + 1,
        }
        return next_latent, outcome

    def _observation(self, state: Tensor, summary: Tensor) -> dict[str, Tensor]:
        """Return the observations of states [B, V] and summaries [B, F], key -> [B, *shape]."""
        observation = self.state_vector.unpack(state)
        for key in self.images:
            observation[key] = (255 * self.dynamics.image(key, summary)).round().to(torch.uint8)
        return {key: observation[key] for key in self._spec.observation}

    def _one_hot(self, sample: Tensor) -> Tensor:
        return functional.one_hot(sample, self.config.networks.classes).flatten(1).to(self.spread.dtype)

    def _draws(self, latent: Latent) -> Tensor:
        """Return uniforms [B, S], which depend only on each row's seed and step."""
        draws = uniforms_of(latent, self.config.networks.stochastic).astype(np.float32)
        return torch.from_numpy(draws).to(latent["seed"].device)


def _spread(structure: StateStructure, state_std: Tensor, change_std: Tensor) -> Tensor:
    """Return the effect [free, V] of changes of the free elements, in their standard deviations, on standardised
    states: derived elements move with their sources.
    """
    spread = torch.zeros(len(structure.free), len(state_std))
    spread[torch.arange(len(spread)), structure.free] = 1.0
    if len(structure.derived):
        # derived = source @ weights + bias: a unit change of a free element moves it by that element's weights.
        spread[:, structure.derived] = spread[:, structure.source] @ structure.weights
    return spread * change_std[structure.free, None] / state_std


def _masked(value: Tensor, mask: Tensor) -> Tensor:
    """Return per-row values [M] whose mean equals the mean of values [M, T] where the mask is 1."""
    return (value * mask).sum(1) * (len(mask) / mask.sum().clamp_min(1))


def _concatenated(first: Sequences, second: Sequences) -> Sequences:
    """Join subsequences of one length."""
    frames = {key: torch.cat([value, second.frames[key]]) for key, value in first.frames.items()}
    names = [name for name in first.__dict__ if name != "frames"]
    return Sequences(frames, **{name: torch.cat([getattr(first, name), getattr(second, name)]) for name in names})
