"""Joint diffusion model: policy, world model and value function in one, with planning (Cosmos Policy).

It models the joint distribution of four variables, called frames: state, action chunk, future (the change of the state
by the end of the chunk) and value (the Monte-Carlo return). Given some of them it samples the others: actions given the
state (policy), the future given state and action (world model), the value given all three. Planning samples several
action chunks, futures of each and values of each future, and takes the best action chunk.
In Cosmos Policy latent video frames carry actions, proprioception and values; here a frame is a token of a small
transformer, and states are the world's vector fields (no images). Axes: N row, S state dimension, C chunk step, A
action dimension, n or M rows of a training batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from robopolicy.core.candidates import AGGREGATED, PlansOverCandidates
from robopolicy.core.checkpoints import read_weights, require_format, restoring, write_checkpoint
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.origin import described_origin
from robopolicy.core.policy import Decision, TensorObservation
from robopolicy.core.randomness import normal
from robopolicy.core.regression import Regression
from robopolicy.core.sequences import SequenceData
from robopolicy.core.spec import PolicySpec, WorldSpec, validate_observation
from robopolicy.core.structured import from_plain, to_plain
from robopolicy.core.vectors import StateVector
from robopolicy.nn import edm
from robopolicy.nn.blocks import TimeEmbedding
from robopolicy.policies.configuration import FUTURES, JointConfig

SAVED_KIND = "joint"
STATE, ACTION = "state", "action"
FUTURE, VALUE = "future", "value"
FRAMES = (STATE, ACTION, FUTURE, VALUE)
ROLES = {"policy": (STATE,), "world": (STATE, ACTION), "value": (STATE, ACTION, FUTURE)}
"""Role -> frames that it is conditioned on; all other frames are sampled."""


class JointModel(PlansOverCandidates, nn.Module):
    """A `Policy` that also predicts futures and values of its actions; create it with `build` or `load_policy`.

    It is not a `ScoredPolicy`: samples of an ODE have no tractable density here, so it plans instead of being
    fine-tuned by policy gradients. It is trained in stages (`Staged`).
    """

    def __init__(self, config: JointConfig, spec: WorldSpec, seed: int = 0):
        super().__init__()
        self.config, self.world = config, spec
        self.state_vector = StateVector.learned(spec)
        if not self.state_vector.size or len(spec.instructions) > 1:
            raise ConfigError(
                f"A joint model reads vectors and no instructions, but '{spec.name}' has "
                f"{len(self.state_vector.fields)} vector fields and {len(spec.instructions)} instructions."
            )
        states = self.state_vector.size
        self.sizes = {STATE: states, ACTION: config.chunk * spec.action.size, FUTURE: states, VALUE: 1}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.read = nn.ModuleDict({name: nn.Linear(size, config.width) for name, size in self.sizes.items()})
            self.write = nn.ModuleDict({name: nn.Linear(config.width, size) for name, size in self.sizes.items()})
            self.place = nn.Parameter(0.02 * torch.randn(len(FRAMES), config.width))
            self.given = nn.Parameter(0.02 * torch.randn(config.width))
            self.time = TimeEmbedding(config.width)
            layer = nn.TransformerEncoderLayer(
                config.width, config.heads, 2 * config.width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.body = nn.TransformerEncoder(layer, config.depth, nn.LayerNorm(config.width), False)
        for name, size in self.sizes.items():
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))

    @classmethod
    def build(cls, config: JointConfig, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Return an untrained model for the world of `spec`, normalised with the statistics of `episodes`.

        Raises ConfigError when the world has no vector fields or several instructions; DataError when the data has no
        rewards, or states or actions differ in size from the world's.
        """
        model = cls(config, spec, seed)
        # Evenly spaced over all episodes; this number is enough for means and deviations.
        rows = torch.arange(episodes.step_count)[:: max(1, episodes.step_count // 20_000)]
        for name, value in model._frames(episodes, rows).items():
            if value.shape[1] != model.sizes[name]:
                raise DataError(
                    f"The data's {name} has {value.shape[1]} elements, but the world '{spec.name}' has "
                    f"{model.sizes[name]}."
                )
            getattr(model, f"{name}_mean").copy_(value.mean(0))
            getattr(model, f"{name}_std").copy_(value.std(0, correction=0).clamp_min(1e-4))
        return model

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """A single stage that trains all roles jointly."""
        return {"joint": (self, 1.0)}

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield {"role": frames} indefinitely; the policy role uses successful episodes, the other roles all.

        frames: name -> [n, size], standardised, where n is the role's fraction of the batch. Raises DataError when the
        data has no rewards.
        """
        config, success = self.config, episodes.success
        cloned = torch.ones(len(episodes), dtype=torch.bool) if success is None or not bool(success.any()) else success
        cloned_steps = cloned[episodes.episode_of_step].nonzero()[:, 0]
        all_steps = torch.arange(episodes.step_count)
        count = round(config.policy_fraction * config.batch_size)
        role_count = max(1, (config.batch_size - count) // 2)
        data, returns = SequenceData(episodes, self.state_vector.keys), self.recorded_returns(episodes)
        while True:
            batch: dict[str, Any] = {}
            for role, rows, size in (
                ("policy", cloned_steps, count),
                ("world", all_steps, role_count),
                ("value", all_steps, role_count),
            ):
                indices = torch.randint(len(rows), (size,), generator=generator, device=generator.device).cpu()
                batch[role] = self._standard(self._cut(data, returns, rows[indices]))
            yield batch

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {role: [n]}: the weighted denoising error (EDM) of the sampled frames, averaged over frames."""
        losses = {}
        for role, frames in batch.items():
            noisy_names = [name for name in FRAMES if name not in ROLES[role]]
            clean = torch.cat([frames[name] for name in noisy_names], 1)
            network = self._network({name: frames[name] for name in ROLES[role]}, noisy_names)
            error = edm.loss(network, clean, self.config.edm, generator)
            # Frames count alike: without the split a state of many elements would drown the value's single one.
            parts = error.split([self.sizes[name] for name in noisy_names], 1)
            losses[role] = torch.stack([part.mean(1) for part in parts]).mean(0)
        return losses

    @torch.no_grad()
    def draw(self, given: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Sample the missing frames, [N, size] each; given and sampled ones are in the data's units."""
        clean_frames = self._standard(given)
        missing_names = [name for name in FRAMES if name not in given]
        shape = len(next(iter(clean_frames.values()))), sum(self.sizes[name] for name in missing_names)
        noise = normal(shape, generator, self.place.device)
        samples = edm.sample(self._network(clean_frames, missing_names), noise, self.config.edm, generator)
        parts = samples.split([self.sizes[name] for name in missing_names], 1)
        return {
            name: part * getattr(self, f"{name}_std") + getattr(self, f"{name}_mean")
            for name, part in zip(missing_names, parts, strict=True)
        }

    @torch.no_grad()
    def plan(self, state: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the best of several action chunks [N, C * A] for states [N, S], and all scores [N, candidates].

        A candidate's score aggregates `values` sampled values of each of its FUTURES sampled futures.
        """
        config = self.config
        many = state.repeat_interleave(config.candidates, 0)
        action = self.draw({STATE: many}, generator)[ACTION]
        futures = {name: value.repeat_interleave(FUTURES, 0) for name, value in ((STATE, many), (ACTION, action))}
        futures[FUTURE] = self.draw(futures, generator)[FUTURE]
        repeated_frames = {name: value.repeat_interleave(config.values, 0) for name, value in futures.items()}
        value = self.draw(repeated_frames, generator)[VALUE][:, 0]
        scores = AGGREGATED[config.aggregate](value.reshape(len(state), config.candidates, -1))
        # Candidates of a state lie side by side in the rows of `action`.
        best = scores.argmax(1) + torch.arange(len(state), device=scores.device) * config.candidates
        return action[best], scores

    # -- Policy --------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> PolicySpec:
        """Reads the world's vector fields and returns `chunk` actions, without log-probabilities."""
        chunk, world = self.config.chunk, self.world
        return PolicySpec(self.state_vector.fields, world.action, 1, chunk, chunk, 0, world.fps, world.instructions)

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Sample an action chunk, or plan one if there are several candidates.

        deterministic has no effect: only the initial noise is random. Actions are [B, C, A], in world units and within
        bounds, without log-probabilities. Raises SpecError when the observation does not match, NonFiniteError on NaN
        or infinity.
        """
        validate_observation(observation, self.spec.observation, history=1)
        state = self.state_vector.pack(observation)[:, -1]
        if self.config.candidates > 1:
            flat, _ = self.plan(state, generator)
        else:
            flat = self.draw({STATE: state}, generator)[ACTION]
        actions = flat.reshape(len(state), self.config.chunk, -1)
        low, high = (
            torch.as_tensor(bound, device=flat.device) for bound in (self.world.action.low, self.world.action.high)
        )
        return Decision(actions.clamp(low, high))

    def save(self, folder: Path) -> None:
        """Write a checkpoint atomically."""
        description = {"kind": SAVED_KIND, "spec": self.world.to_json(), "model": {"config": to_plain(self.config)}}
        write_checkpoint(folder, {**description, **described_origin(self)}, self)

    @classmethod
    def load(cls, folder: Path, description: Mapping[str, Any], device: torch.device | str = "cpu") -> Self:
        """Load a policy written by `save`; raises CheckpointError if its files are inconsistent."""
        require_format(folder, description)
        with restoring(folder, "a policy"):
            config = from_plain(JointConfig, description["model"]["config"], "config")
            model = cls(config, WorldSpec.from_json(description["spec"]))
        return read_weights(model, folder, device).eval()

    # -- frames --------------------------------------------------------------------------------------------------

    def _network(self, given: Mapping[str, Tensor], drawn: Sequence[str]) -> edm.Network:
        """Return EDM's network F that denoises the concatenated frames `drawn`, given the standardised frames
        `given`.
        """
        sizes = [self.sizes[name] for name in drawn]

        def network(scaled: Tensor, label: Tensor) -> Tensor:
            noisy = dict(zip(drawn, scaled.split(sizes, 1), strict=True))
            noise_level = self.time((label + 2) / 4)  # EDM's label, log(sigma) / 4, as a time in [0, 1]
            tokens = []
            for place, name in enumerate(FRAMES):
                is_given = name in given
                token = self.read[name](given[name] if is_given else noisy[name]) + self.place[place]
                # A given frame has no noise: an embedding says so in the place of its level.
                tokens.append(token + (self.given if is_given else noise_level))
            tokens_out = self.body(torch.stack(tokens, 1))
            return torch.cat([self.write[name](tokens_out[:, FRAMES.index(name)]) for name in drawn], 1)

        return network

    def _frames(self, episodes: Episodes, rows: Tensor) -> dict[str, Tensor]:
        return self._cut(SequenceData(episodes, self.state_vector.keys), self.recorded_returns(episodes), rows)

    def _cut(self, data: SequenceData, returns: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Return the frames of chunks that start at steps `rows` [M]; after the end of an episode its last frame is
        repeated.
        """
        sequences = data.cut(rows, 0, self.config.chunk)
        state = self.state_vector.pack(sequences.frames)
        change, value = state[:, -1] - state[:, 0], returns[rows][:, None]
        return {STATE: state[:, 0], ACTION: sequences.actions.flatten(1), FUTURE: change, VALUE: value}

    def _standard(self, frames: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = self.place.device
        return {
            name: (value.to(device) - getattr(self, f"{name}_mean")) / getattr(self, f"{name}_std")
            for name, value in frames.items()
        }
