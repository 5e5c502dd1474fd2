"""Cosmos Policy (arXiv:2601.16163): one video diffusion model that is policy, world model and value function.

No layer is added to the `VideoTransformer`: what is no image becomes a frame of latents. After the present frame come
four frames, in this order: the action chunk, the robot's state at its end, the image at its end, and the value (the
discounted return from the present on). Numbers are scaled to [-1, 1], repeated until the frame is full, and read back
as the mean over their copies. Every frame attends to the earlier ones, so given some of them the next ones are sampled:
the chunk given the present (policy), the future given the chunk as well (world model), the value given all (value
function). Planning samples several chunks, futures of each and values of each future, and takes the best chunk.

Different here: the history is the present frame, repeated; images are predicted as changes from it, and a given chunk
conditions later frames by the video model's own embedding as well; a new embedding per frame says which of the four it
is, and another that it is given; no instructions; more of the policy's rows have much noise. The authors' code learns
the return from the chunk's end on, and aggregates as aggregate=successes does. Axes: N rows, G given and D drawn
frames, C latent channels, P elements of the robot's state, A action dimension.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from robopolicy.core.candidates import AGGREGATED, PlansOverCandidates
from robopolicy.core.checkpoints import load_weights, read_weights, require_format, restoring, write_checkpoint
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.origin import described_origin
from robopolicy.core.policy import Decision, TensorObservation
from robopolicy.core.randomness import normal
from robopolicy.core.regression import Regression
from robopolicy.core.spec import STATE, PolicySpec, WorldSpec, validate_observation
from robopolicy.core.structured import to_plain
from robopolicy.nn import edm
from worldmodels.checkpoint import load_world_model
from worldmodels.configuration import JointVideoConfig
from worldmodels.images.model import PartStage
from worldmodels.registry import saved_configuration
from worldmodels.video.model import VideoModel
from worldmodels.video.networks import Past

SAVED_KIND = "joint_video"
ACTION, POSE = "action", "state"
VIEW, VALUE = "view", "value"
FRAMES = (ACTION, POSE, VIEW, VALUE)
"""Frames after the present one, in the order in which they attend to one another."""
ROLES = {"policy": 0, "world": 1, "value": 3}
"""Role -> number of the first frames that are given; the others are sampled."""
HIGH_NOISE_FRACTION = {"policy": 0.9, "world": 0.3, "value": 0.3}
"""By role, fraction of training rows at noise that is uniform up to the sampler's first level.

The authors' code has .3 for all. Through less noise the mean over its copies tells a chunk, and nothing that is seen is
needed: with .3, 1,000 steps taught small models no chunk at all.
"""
WEIGHTS_OF_VIDEO = "video."
"""Prefix of the video model's weights in a checkpoint."""


def tiled(numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return frames [N, *shape] that repeat numbers [N, D] until they are full; raises ConfigError if D is too many."""
    total = torch.Size(shape).numel()
    size = numbers.shape[1]
    if size > total:
        raise ConfigError(f"{size} numbers do not fit into a frame of {total}: use a smaller chunk, or larger images.")
    return numbers.repeat(1, -(-total // size))[:, :total].reshape(-1, *shape)


def untiled(frames: Tensor, size: int) -> Tensor:
    """Return the numbers [N, size] that `tiled` wrote into frames [N, ...]: the mean over the copies of each."""
    flat = frames.flatten(1)
    place = torch.arange(flat.shape[1], device=flat.device) % size
    sums = flat.new_zeros(len(flat), size).index_add(1, place, flat)
    return sums / place.bincount(minlength=size)


class FrameTags(nn.Module):
    """Embeddings of the four kinds of frame, zero at first, and of a frame that is given instead of noisy."""

    def __init__(self, width: int):
        super().__init__()
        self.kinds = nn.Parameter(torch.zeros(len(FRAMES), width))
        self.given = nn.Parameter(0.02 * torch.randn(width))


class JointVideoPolicy(PlansOverCandidates, nn.Module):
    """A `Policy` that also imagines futures and values of its actions; create it with `build` or `load_policy`.

    It reads the cameras and `observation.state`. It is trained in stages (`Staged`) on data with rewards: the policy on
    successful episodes, world and value on all. Samples of an ODE have no tractable density, so it is not fine-tuned by
    policy gradients.
    """

    view_std: Tensor

    def __init__(self, config: JointVideoConfig, video: VideoModel, seed: int = 0):
        super().__init__()
        self.config, self.video = config, video
        spec = video.spec
        if len(spec.instructions) > 1:
            raise ConfigError(
                f"A joint video model reads no instructions, but '{spec.name}' has {len(spec.instructions)}."
            )
        self.sizes = {ACTION: config.chunk * spec.action.size, POSE: video.reader.pose_size, VALUE: 1}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tags = FrameTags(video.config.sizes.width)
        for name, size in self.sizes.items():
            tiled(torch.zeros(1, size), video.latent)  # raises where it does not fit
            self.register_buffer(f"{name}_low", -torch.ones(size))
            self.register_buffer(f"{name}_high", torch.ones(size))
        self.register_buffer("view_std", torch.ones(video.latent[0], 1, 1))

    @classmethod
    def build(cls, config: JointVideoConfig, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Return a model for the world of `spec`, scaled with the ranges of `episodes`.

        Raises ConfigError when the world has no images or several instructions, or config.model is a model of another
        world or kind; DataError when the data has no rewards.
        """
        if config.model is None:
            video = VideoModel.build(config.video, spec, episodes, seed)
        else:
            video = load_world_model(config.model)
            if not isinstance(video, VideoModel):
                raise ConfigError(
                    f"policy.model={config.model} is a {type(video).__name__}, not a model of kind video."
                )
            fields = {key: field for key, field in video.spec.observation.items() if key in video.reader.images}
            other_keys = [key for key, field in fields.items() if spec.observation.get(key) != field]
            if video.spec.action.size != spec.action.size:
                other_keys.append("action")
            if other_keys:
                raise ConfigError(f"policy.model={config.model} was trained on other data: '{other_keys[0]}' differs.")
        model = cls(config, video.float().train(), seed)
        model._keep_ranges(episodes)
        return model

    @torch.no_grad()
    def _keep_ranges(self, episodes: Episodes) -> None:
        starts = torch.arange(episodes.step_count)
        for name, values in (
            (ACTION, self._chunks(episodes, starts)),
            (POSE, self.video.frame_poses(episodes)),
            (VALUE, self.recorded_returns(episodes)[:, None]),
        ):
            low, high = values.min(0).values, values.max(0).values
            getattr(self, f"{name}_low").copy_(low)
            getattr(self, f"{name}_high").copy_(torch.maximum(high, low + 1e-6))

    # -- training ------------------------------------------------------------------------------------------------

    def stages(self) -> Mapping[str, tuple[Regression, float]]:
        """Training stages: the autoencoder, unless there is one to start from, then all roles together."""
        joint = PartStage(nn.ModuleList([self.video.transformer, self.tags]), self.batches, self.loss), 1.0
        if self.config.model is not None:
            return {"joint": joint}
        return {"autoencoder": self.video.stages()["autoencoder"], "joint": joint}

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """Yield {role: frames} indefinitely: half of the rows train the policy, on successful episodes, a quarter each
        world and value, on all.

        frames: "present" [n, C, height, width], "pose" [n, P], and the four frames [n, 4, C, height, width].
        """
        if self.config.model is None:
            video = self.video.encode_episodes(episodes)
            latents, poses = video.latents, video.poses
        else:
            latents, poses = self.video.frame_latents(episodes), self.video.frame_poses(episodes)
        first_frame = torch.arange(episodes.step_count) + episodes.episode_of_step
        steps_left = (episodes.starts + episodes.lengths)[episodes.episode_of_step] - torch.arange(episodes.step_count)
        after = first_frame + steps_left.clamp(max=self.config.chunk)
        self._keep_view_std(latents, first_frame, after)
        returns, success = self.recorded_returns(episodes), episodes.success
        imitated = torch.ones(len(episodes), dtype=torch.bool) if success is None or not success.any() else success
        rows_of = {
            "policy": imitated[episodes.episode_of_step].nonzero()[:, 0],
            **dict.fromkeys(("world", "value"), torch.arange(episodes.step_count)),
        }
        quarter = self.config.batch_size // 4
        counts = {"policy": self.config.batch_size - 2 * quarter, "world": quarter, "value": quarter}
        device = self.view_std.device
        while True:
            batch: dict[str, Any] = {}
            for role, rows in rows_of.items():
                draws = torch.randint(len(rows), (counts[role],), generator=generator, device=generator.device).cpu()
                steps = rows[draws]
                present, future = first_frame[steps], after[steps]
                numbers = {ACTION: self._chunks(episodes, steps), POSE: poses[future], VALUE: returns[steps][:, None]}
                frames = {name: self._framed(name, value.to(device)) for name, value in numbers.items()}
                frames[VIEW] = (latents[future] - latents[present]).to(device) / self.view_std
                stacked = torch.stack([frames[name] for name in FRAMES], 1)
                batch[role] = {"present": latents[present].to(device), "pose": poses[present].to(device)}
                batch[role]["frames"] = stacked
            yield batch

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {role: [n]}: the weighted denoising error (EDM) of the frames that are not given, averaged."""
        losses = {}
        for role, rows in batch.items():
            given_count = ROLES[role]
            given, memory = rows["frames"][:, :given_count], self._memory(rows["present"], rows["pose"])
            network = self._network(self._extended(memory, rows["present"], given), rows["present"], given)
            error = edm.loss(
                network, rows["frames"][:, given_count:], self.config.edm, generator, HIGH_NOISE_FRACTION[role]
            )
            losses[role] = error.flatten(1).mean(1)
        return losses

    # -- sampling ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def draw(self, memory: Past, present: Tensor, given: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Return the given frames [N, G, C, height, width] and the `count` next ones, sampled, [N, G + count, ...].

        memory: from `_memory`, extended by the given frames; present: [N, C, height, width].
        """
        noise = normal((len(present), count, *self.video.latent), generator, present.device)
        network = self._network(memory, present, given)
        return torch.cat([given, edm.sample(network, noise, self.config.edm, generator)], 1)

    @torch.no_grad()
    def plan(self, present: Tensor, pose: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the best of several action chunks [N, C * A], and all scores [N, candidates], from 0 to 1.

        present: latents [N, C, height, width]; pose: standardised [N, P]. A candidate's score aggregates its
        `futures` times `values` sampled values.
        """
        config, memory = self.config, self._memory(present, pose)
        extended = 0
        frames = present.new_zeros(len(present), 0, *self.video.latent)
        for copies, count in ((config.candidates, 1), (config.futures, 2), (config.values, 1)):
            # Frames that were drawn enter the memory once, and then it is copied.
            memory = self._extended(memory, present, frames, first=extended)
            extended = frames.shape[1]
            memory = [(key.repeat_interleave(copies, 0), value.repeat_interleave(copies, 0)) for key, value in memory]
            present, frames = present.repeat_interleave(copies, 0), frames.repeat_interleave(copies, 0)
            frames = self.draw(memory, present, frames, count, generator)
        values = (1 + untiled(frames[:, FRAMES.index(VALUE)], 1)) / 2
        scores = AGGREGATED[config.aggregate](values.reshape(len(pose), config.candidates, -1))
        chunks = self._numbers(ACTION, frames[:, 0]).reshape(
            len(pose), config.candidates, config.futures * config.values, -1
        )
        return chunks[torch.arange(len(pose)), scores.argmax(1), 0], scores

    # -- Policy --------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> PolicySpec:
        """Reads the cameras and the robot's state and returns `chunk` actions, without log-probabilities."""
        chunk, world = self.config.chunk, self.video.spec
        fields = {
            key: item for key, item in world.observation.items() if key == STATE or key in self.video.reader.images
        }
        return PolicySpec(fields, world.action, 1, chunk, chunk, 0, world.fps, world.instructions)

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Sample an action chunk, or plan one if there are several candidates.

        deterministic has no effect: only the initial noise is random. Actions are [B, C, A], in world units and within
        bounds, without log-probabilities. Raises SpecError when the observation does not match, NonFiniteError on NaN
        or infinity.
        """
        validate_observation(observation, self.spec.observation, history=1)
        device = self.view_std.device
        views = [cast(Tensor, observation[key])[:, -1] for key in self.video.reader.images]
        frames = torch.cat(views, -3).to(device)
        with torch.no_grad():
            present = self.video._encode(frames)
        pose = self._pose(observation, len(present))
        if self.config.candidates > 1:
            flat, _ = self.plan(present, pose, generator)
        else:
            no_frames = present.new_zeros(len(present), 0, *self.video.latent)
            frames = self.draw(self._memory(present, pose), present, no_frames, 1, generator)
            flat = self._numbers(ACTION, frames[:, 0])
        action = self.video.spec.action
        low, high = (torch.as_tensor(bound, device=device) for bound in (action.low, action.high))
        return Decision(flat.reshape(len(flat), self.config.chunk, -1).clamp(low, high))

    def save(self, folder: Path) -> None:
        """Write a checkpoint atomically, with the video model in it."""
        config = to_plain(replace(self.config, model=None, video=self.video.config))
        model = {"config": config, "video": self.video.description()}
        description = {"kind": SAVED_KIND, "spec": self.video.spec.to_json(), "model": model}
        write_checkpoint(folder, {**description, **described_origin(self)}, self)

    @classmethod
    def load(cls, folder: Path, description: Mapping[str, Any], device: torch.device | str = "cpu") -> Self:
        """Load a policy written by `save`; raises CheckpointError if its files are inconsistent."""
        require_format(folder, description)
        weights = load_weights(folder, device)
        with restoring(folder, "a policy"):
            parts = description["model"]
            of_video = {
                name.removeprefix(WEIGHTS_OF_VIDEO): value
                for name, value in weights.items()
                if name.startswith(WEIGHTS_OF_VIDEO)
            }
            video = VideoModel.restore(parts["video"], WorldSpec.from_json(description["spec"]), of_video)
            model = cls(saved_configuration(JointVideoConfig, parts), video)
        return read_weights(model, folder, device, weights).eval()

    # -- frames --------------------------------------------------------------------------------------------------

    def _memory(self, present: Tensor, pose: Tensor) -> Past:
        """Return the keys and values of a history that repeats the latents [N, C, height, width] and pose [N, P]."""
        history = len(self.video.config.history_offsets)
        frames = present[:, None].expand(-1, history, *present.shape[1:])
        reader = self.video.reader
        still = reader.standard("action", torch.zeros(1, self.video.spec.action.size, device=present.device))
        actions = still.expand(len(present), history, -1)
        poses = pose[:, None].expand(-1, history, -1)
        return self.video.transformer.remember(frames, actions, poses, present.new_zeros(frames.shape[:2]))

    def _extended(self, memory: Past, present: Tensor, given: Tensor, first: int = 0) -> Past:
        """Return `memory` with the given frames [N, G, C, height, width] from the `first` on, which later ones see."""
        if first == given.shape[1]:
            return memory
        # What is given has no noise: an embedding says so in the place of its level.
        condition = self._conditions(given)[:, first : given.shape[1]] + self.tags.given
        return self.video.transformer.extend(memory, given[:, first:], present, condition)

    def _network(self, memory: Past, present: Tensor, given: Tensor) -> edm.Network:
        """Return EDM's F over the frames after the `given` ones [N, G, C, height, width], which `memory` contains."""
        transformer, later = self.video.transformer, self._conditions(given)[:, given.shape[1] :]

        def network(scaled: Tensor, label: Tensor) -> Tensor:
            condition = later[:, : scaled.shape[1]] + transformer.level(0.25 + label / 4)[:, None]
            return transformer.denoise(scaled, present, condition, memory)

        return network

    def _conditions(self, given: Tensor) -> Tensor:
        """Return the conditions [N, 4, W] of all frames, without levels of noise."""
        transformer, rows = self.video.transformer, len(given)
        # All frames stand at the slot of the chunk's last frame: their kind tells them apart.
        slot = transformer.slots[transformer.history + min(self.config.chunk, transformer.chunk) - 1]
        unknown = transformer.embedded(
            given.new_zeros(rows, 1, self.video.spec.action.size),
            torch.zeros(rows, 1, dtype=torch.bool, device=given.device),
        )
        effect = self._effect(given[:, 0]) if given.shape[1] else unknown
        return slot + self.tags.kinds + torch.cat([unknown, effect.expand(-1, len(FRAMES) - 1, -1)], 1)

    def _effect(self, frames: Tensor) -> Tensor:
        """Return the video model's embedding [N, 1, W] of the chunks in given action frames [N, C, height, width]."""
        chunks = self._numbers(ACTION, frames).reshape(len(frames), self.config.chunk, -1)
        return self.video.transformer.embedded(self.video.reader.standard("action", chunks), None)[:, -1:]

    def _framed(self, name: str, numbers: Tensor) -> Tensor:
        """Return frames of numbers [N, size], in their units."""
        low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
        return tiled(2 * (numbers - low) / (high - low) - 1, self.video.latent)

    def _numbers(self, name: str, frames: Tensor) -> Tensor:
        """Return the numbers [N, size] of frames [N, C, height, width], in their units."""
        low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
        return low + (untiled(frames, self.sizes[name]) + 1) / 2 * (high - low)

    def _chunks(self, episodes: Episodes, steps: Tensor) -> Tensor:
        """Return the action chunks [n, C * A] at steps [n]; after the end of an episode its last action is repeated."""
        last = (episodes.starts + episodes.lengths - 1)[episodes.episode_of_step[steps]]
        index = (steps[:, None] + torch.arange(self.config.chunk)).minimum(last[:, None])
        return episodes.actions[index].flatten(1)

    def _keep_view_std(self, latents: Tensor, present: Tensor, future: Tensor) -> None:
        """Store the root mean square change of every latent channel over a chunk."""
        sums = torch.zeros(latents.shape[1], dtype=torch.float64)
        for before, after in zip(present.split(2048), future.split(2048), strict=True):
            sums += (latents[after] - latents[before]).square().double().sum((0, 2, 3))
        mean = sums / (len(present) * latents[0, 0].numel())
        self.view_std.copy_(mean.sqrt().clamp_min(1e-6)[:, None, None])

    def _pose(self, observation: TensorObservation, rows: int) -> Tensor:
        """Return the standardised robot state [N, P] of an observation; zeros where the world has none."""
        reader, device = self.video.reader, self.view_std.device
        place = reader.state_vector.slices.get(STATE)
        if place is None:
            return torch.zeros(rows, 1, device=device)
        states = torch.zeros(rows, reader.state_vector.size, device=device)
        states[:, place] = cast(Tensor, observation[STATE])[:, -1].to(device, torch.float32).reshape(rows, -1)
        return reader.poses(states)
