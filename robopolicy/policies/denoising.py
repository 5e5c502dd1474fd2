"""Diffusion and flow policies over action chunks whose denoising steps are scored steps: what PPO in the chain needs.

A decision starts from noise x_0 [P, A] and takes K steps; the first K - K' are run by a frozen base copy, the last K'
by the network that is fine-tuned (DPPO, arXiv:2409.00588). Latents live in normalised actions, data in [-1, 1].
There is no dropout, batch norm or averaged copy inside, so `act` and `log_prob` always run the same function.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError, SpecError, did_you_mean
from robopolicy.core.policy import Decision, Scores, TensorObservation
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Field, PolicySpec, check_finite, validate_observation
from robopolicy.core.world import Rows
from robopolicy.nn.configuration import FlowNoise
from robopolicy.nn.denoisers import make_denoiser
from robopolicy.nn.encoders import ObservationEncoder
from robopolicy.nn.noise import NoiseHead
from robopolicy.nn.normalizer import Normalizer
from robopolicy.nn.schedules import Normal, truncated_noise
from robopolicy.policies.configuration import (
    DenoisingPolicyConfig,
    Likelihood,
    LogpReduction,
    PolicyKind,
)
from robopolicy.policies.matching import matching_latents, matching_loss
from robopolicy.policies.schedule import make_schedule

ACTION = "action"
"""LeRobot's key of the action in data passed to `fit_normalizers`."""


class ChunkNetwork(nn.Module):
    """The weights that act: an observation encoder and a denoiser of chunks."""

    def __init__(self, config: DenoisingPolicyConfig, fields: Mapping[str, Field], action_size: int):
        super().__init__()
        self.encoder = ObservationEncoder(fields, config.history, config.state_normalization, config.image)
        self.denoiser: Any = make_denoiser(
            config.denoiser,
            config.prediction_steps,
            action_size,
            self.encoder.dimension,
            config.width,
            config.depth,
            config.heads,
        )
        self.noise_head: NoiseHead | None = None
        if config.kind is PolicyKind.FLOW and config.flow_noise is FlowNoise.LEARNED:
            low, high = config.flow_noise_bounds
            self.noise_head = NoiseHead(self.encoder.dimension, action_size, max(low, config.min_sampling_std), high)


class DenoisingPolicy(nn.Module):
    """A `core.policy.Policy` that denoises action chunks; make one with `build_policy` or `load_policy`.

    config: all choices; observation: the fields it may read, by key; action: one control step [A] with its range;
    fps, instructions: of the world it is trained in; seed: of the initial weights (global randomness stays untouched).
    Raises ConfigError when config.observation_keys names a field that does not exist.
    """

    action_low: Tensor
    action_high: Tensor

    def __init__(
        self,
        config: DenoisingPolicyConfig,
        observation: Mapping[str, Field],
        action: Field,
        *,
        fps: float,
        instructions: tuple[str, ...] = ("",),
        seed: int = 0,
    ):
        super().__init__()
        if len(action.shape) != 1:
            raise ConfigError(f"A denoising policy needs a vector of actions per control step, not {action.shape}.")
        if config.kind not in (PolicyKind.DIFFUSION, PolicyKind.FLOW):
            raise ConfigError(
                f"policy.kind={config.kind.value} is no denoising policy: build it with build_token_policy, or as a "
                "worldmodels.joint.JointModel."
            )
        self.config = config
        self.fields = select_fields(config.observation_keys, observation)
        self.action = action
        self.fps = fps
        self.instructions = tuple(instructions)
        self.schedule = make_schedule(config)
        self.action_normalizer = Normalizer(action.shape, config.action_normalization)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = ChunkNetwork(config, self.fields, action.size)
        self.base: ChunkNetwork | None = None
        self.finetuned_steps = self.schedule.steps
        self._train_encoder = True
        self.keep_means = False
        for name, bound in (("action_low", action.low), ("action_high", action.high)):
            values = torch.tensor(bound, dtype=torch.float32).expand(action.shape).clone()
            self.register_buffer(name, values, persistent=False)

    @property
    def spec(self) -> PolicySpec:
        """What it reads and writes; steps is K', the number of scored steps."""
        return PolicySpec(
            observation=self.fields,
            action=self.action,
            history=self.config.history,
            chunk=self.config.chunk,
            prediction=self.config.prediction_steps,
            scored_steps=self.config.matching_samples if self._matching else self.finetuned_steps,
            fps=self.fps,
            instructions=self.instructions,
        )

    @property
    def finetuning(self) -> dict[str, Any] | None:
        """The arguments of `prepare_finetuning`, None before it was called."""
        if self.base is None:
            return None
        return {"steps": self.finetuned_steps, "train_encoder": self._train_encoder}

    @property
    def _matching(self) -> bool:
        """Whether decisions are scored by minus the denoising loss at random levels (see `matching`)."""
        return self.config.likelihood is Likelihood.MATCHING

    @property
    def first_step(self) -> int:
        """Index in the schedule of the first scored step, K - K'."""
        return self.schedule.steps - self.finetuned_steps

    @property
    def caches_condition(self) -> bool:
        """Whether decisions keep the encoded observation: it has cameras and its encoder is not trained."""
        encoder = self.network.encoder
        return len(encoder.cameras) > 0 and not any(weight.requires_grad for weight in encoder.parameters())

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide for every row; latents: "chain" [B, K'+1, P, A] in normalised actions, noisiest first.

        deterministic: the noise-free sampler (DDIM with eta 0, or the flow's ODE) from random initial noise; its steps
        are no choices, so mask is False and logp zero. With a frozen image encoder, latents also holds "condition"
        [B, D], which spares `log_prob` the images; with `keep_means`, "mean" [B, K', P, A] of every step. Raises
        SpecError or NonFiniteError on a bad observation, and NonFiniteError rather than returning a non-finite action.
        """
        return self._act(self.network, observation, generator, deterministic)

    @torch.no_grad()
    def resume(
        self, observation: TensorObservation, latents: Mapping[str, Tensor], count: Tensor, generator: torch.Generator
    ) -> Decision:
        """`act` that keeps the first count[b] steps of latents["chain"] and the initial noise; -1: none. See `Resumes`.

        The frozen first K - K' steps are no steps: they are kept with the initial noise.
        """
        if self._matching:
            raise ConfigError(
                "policy.likelihood=matching keeps no chains to go on from: set finetune.branch_sampling_step=null."
            )
        return self._act(self.network, observation, generator, False, (latents["chain"], count))

    @torch.no_grad()
    def base_act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """`act` with the untouched base policy in every step; logp is under the base. See `act`."""
        return self._act(self.base or self.network, observation, generator, deterministic)

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Score recorded chains [N, K'+1, P, A]: logp and entropy [N, K'], reduced over the executed C x A elements.

        The observation is encoded once and all steps run as one batch. Optional latents: "chosen" [N, k] int64 selects
        k of the K' steps per row (logp [N, k]); "executed" [N, C] bool reduces over the executed chunk steps only
        (score the behaviour the same way); "condition" [N, D] replaces the observation when the encoder is frozen.
        extras: mean [N, K', P, A], std (broadcastable), logp_clamped and clean_clipped [N, K']: the fractions of
        elements whose gradient a clamp zeroed.
        """
        return self._log_prob(self.network, observation, latents)

    @torch.no_grad()
    def base_log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """`evaluate` under the frozen base policy, without gradient."""
        return self._log_prob(self.base or self.network, observation, latents)

    @torch.no_grad()
    def finish(self, observation: TensorObservation, latents: Tensor, begun: Tensor) -> Tensor:
        """Return the actions [N, C, A] that noise-free steps make of latents [N, P, A] about to enter step `begun` [N].

        begun: 0..K' counts the scored steps, K' are finished latents.
        """
        self._validate(observation)
        network, first = self.network, self.first_step
        features = self._features(network, network.encoder(observation))
        x = latents
        for step in range(self.finetuned_steps):
            prediction = network.denoiser.denoise(x, features[0][first + step], features[1])
            after = self.schedule.transition(x, prediction, first + step, deterministic=True).mean
            x = torch.where((begun <= step)[:, None, None], after, x)
        return self._actions(x)

    def encode(self, observation: TensorObservation) -> Tensor:
        """Return the condition [N, D] that the denoiser sees, e.g. as the input of a critic."""
        self._validate(observation)
        return self.network.encoder(observation)

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"denoising": [N]}: the squared error of the prediction at one random noise level per sample.

        batch: "observation" (key -> [N, H, ...]), "actions" [N, P, A] in the world's units, "action_valid" [N, P] bool
        (padding is not learned). Raises SpecError on wrong shapes.
        """
        observation, actions, valid = batch["observation"], batch["actions"], batch["action_valid"]
        self._validate(observation)
        expected = (self.config.prediction_steps, self.action.size)
        if tuple(actions.shape[1:]) != expected or tuple(valid.shape) != tuple(actions.shape[:2]):
            raise SpecError(
                f"Actions {list(actions.shape)} with action_valid {list(valid.shape)}: the policy learns chunks "
                f"[N, {expected[0]}, {expected[1]}] with action_valid [N, {expected[0]}]."
            )
        check_finite("actions", actions)
        clean = self.action_normalizer(actions.float())
        level = self.schedule.levels(len(clean), generator).to(clean.device)
        noise = torch.randn(clean.shape, generator=generator, device=generator.device).to(clean.device)
        condition = self.network.encoder(observation, generator)
        noisy = self.schedule.corrupt(clean, noise, level)
        prediction = self.network.denoiser(noisy, self.schedule.level_times(level), condition)
        error = (prediction - self.schedule.target(clean, noise, level)).square().mean(-1)
        weight = valid.to(error.dtype)
        return {"denoising": (error * weight).sum(-1) / weight.sum(-1).clamp_min(1.0)}

    def fit_normalizers(self, values: Mapping[str, Tensor]) -> None:
        """Fit every normaliser on data: values by observation key [samples, *shape] and "action" [samples, A].

        Raises ConfigError when a key is missing or fine-tuning has begun (the base would see other inputs).
        """
        if self.base is not None:
            raise ConfigError("The normalisers are fixed once fine-tuning has begun: fit them before pre-training.")
        normalizers = {key: self.network.encoder.normalizer(key) for key in self._vector_keys()}
        for key, normalizer in {ACTION: self.action_normalizer, **normalizers}.items():
            if key not in values:
                raise ConfigError(f"No data to normalise '{key}' with.{did_you_mean(key, values)}")
            normalizer.fit(values[key])

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Freeze a base copy, which runs the first K - K' steps; only the last K' = `steps` are trained.

        steps: None for config.finetuned_steps (else half of K); train_encoder False freezes the encoders too. A policy
        that is prepared already, such as a loaded fine-tuned one, goes on with its own base and steps.
        Raises ConfigError when K' does not fit, when it differs from what the policy was prepared for, or when no step
        among the last K' has a density (an ODE, or K' = 1 of flow-SDE noise).
        """
        total = self.schedule.steps
        if self.base is not None:
            if steps not in (None, self.finetuned_steps):
                raise ConfigError(
                    f"This policy is being fine-tuned in its last {self.finetuned_steps} steps, not {steps}: load the "
                    "base policy to start over."
                )
            return
        count = steps if steps is not None else self.config.finetuned_steps or (total + 1) // 2
        if not 1 <= count <= total:
            raise ConfigError(f"{count} fine-tuned steps do not fit a chain of {total}: choose 1 to {total}.")
        if not self._matching and not bool(self.schedule.density[total - count :].any()):
            raise ConfigError(
                f"None of the last {count} steps has noise, so there is nothing to score: fine-tune more steps, "
                "set flow_noise=constant, or raise eta or min_sampling_std."
            )
        self.base = copy.deepcopy(self.network).requires_grad_(False)
        self.finetuned_steps = count
        self._train_encoder = train_encoder
        if not train_encoder:
            self.network.encoder.requires_grad_(False)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The weights that an optimiser may change."""
        return [weight for weight in self.network.parameters() if weight.requires_grad]

    def reset(self, rows: Rows = None) -> None:
        """Nothing is remembered between decisions."""

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, normalisers and base copy included, atomically."""
        from robopolicy.policies.checkpoint import save_denoising_policy

        save_denoising_policy(self, folder)

    def _vector_keys(self) -> list[str]:
        return [key for key in self.fields if not key.startswith(IMAGE_PREFIX)]

    def _validate(self, observation: TensorObservation) -> None:
        validate_observation(observation, self.fields, history=self.config.history)

    def _act(
        self,
        network: ChunkNetwork,
        observation: TensorObservation,
        generator: torch.Generator,
        deterministic: bool,
        kept: tuple[Tensor, Tensor] | None = None,
    ) -> Decision:
        self._validate(observation)
        config, schedule, first = self.config, self.schedule, self.first_step
        leading = (self.base or network) if first else network
        condition = network.encoder(observation)
        batch, device = len(condition), condition.device
        shape = (batch, config.prediction_steps, self.action.size)
        x = torch.randn(shape, generator=generator, device=generator.device).to(device)
        noise, quiet = None, None
        if not deterministic and not self._matching:
            noise = truncated_noise((schedule.steps, *shape), config.noise_clip, generator).to(device)
            quiet = self._quiet_steps(batch, generator, device)
        features = self._features(leading, leading.encoder(observation) if leading is not network else condition)
        chain, means, stds = [x], [], []
        for step in range(schedule.steps):
            if step == first:
                features = features if leading is network else self._features(network, condition)
                if kept is not None:
                    x = torch.where((kept[1] >= 0)[:, None, None], kept[0][:, 0], x)
                chain = [x]
            acting = leading if step < first else network
            prediction = acting.denoiser.denoise(x, features[0][step], features[1])
            normal = schedule.transition(x, prediction, step, deterministic=noise is None)
            if step >= first and network.noise_head is not None:
                normal = Normal(normal.mean, network.noise_head(condition, schedule.times[step : step + 1])[:, 0])
            after = normal.mean if noise is None else normal.sample(noise[step])
            if quiet is not None and step >= first:
                still = schedule.transition(x, prediction, step, deterministic=True).mean
                after = torch.where(quiet[:, step - first, None, None], still, after)
            if kept is not None and step >= first:
                after = torch.where((kept[1] > step - first)[:, None, None], kept[0][:, step - first + 1], after)
            x = after
            if step >= first:
                chain.append(x)
                means.append(normal.mean)
                stds.append(normal.std)
        actions = self._actions(x)
        latents = {"chain": torch.stack(chain, 1)}
        if self._matching:
            latents = matching_latents(x, self.schedule, config.matching_samples, generator)
        if self.caches_condition:
            latents["condition"] = condition
        if self.keep_means and not self._matching:
            latents["mean"] = torch.stack(means, 1)
        density = schedule.density[first:].expand(batch, -1)
        if self._matching:
            density = torch.ones((batch, config.matching_samples), dtype=torch.bool, device=device)
        if deterministic:
            return Decision(actions, latents, torch.zeros(density.shape, device=device), torch.zeros_like(density))
        if self._matching:
            return Decision(actions, latents, self._match(network, condition, latents).logp, density)
        if quiet is not None:
            density = density & ~quiet
        if kept is not None:
            density = density & (torch.arange(density.shape[1], device=device) >= kept[1][:, None])
        std = schedule.table[first:, 4][:, None, None] if network.noise_head is None else torch.stack(stds, 1)
        logp, _ = self._score(Normal(torch.stack(means, 1), std), latents["chain"][:, 1:], None)
        return Decision(actions, latents, logp, density.clone())

    def _actions(self, x: Tensor) -> Tensor:
        """Return what is executed of clean latents [N, P, A], in the world's units and bounds: [N, C, A]."""
        actions = self.action_normalizer.inverse(x[:, : self.config.chunk])
        actions = torch.minimum(torch.maximum(actions, self.action_low), self.action_high)
        check_finite("actions", actions)
        return actions

    def _quiet_steps(self, batch: int, generator: torch.Generator, device: torch.device) -> Tensor | None:
        """Return which of the scored steps follow the noise-free sampler, [B, K'] bool; None: none of them."""
        count, dense = self.config.noisy_steps, self.schedule.density[self.first_step :]
        if count is None or count >= int(dense.sum()):
            return None
        draw = torch.rand((batch, len(dense)), generator=generator, device=generator.device).to(device)
        noisy = torch.where(dense, draw, -1.0).topk(count, dim=1).indices
        return torch.ones((batch, len(dense)), dtype=torch.bool, device=device).scatter(1, noisy, False)

    def _match(self, network: ChunkNetwork, condition: Tensor, latents: Mapping[str, Tensor]) -> Scores:
        loss, prediction = matching_loss(network.denoiser, self.schedule, condition, latents, self.config.chunk)
        extras = {"mean": prediction, "std": torch.ones((), device=loss.device).expand(1, 1, 1, 1)}
        return Scores(-loss, torch.zeros_like(loss), extras)

    def _features(self, network: ChunkNetwork, condition: Tensor) -> tuple[Tensor, Tensor]:
        denoiser = network.denoiser
        return denoiser.encode_time(self.schedule.times), denoiser.encode_condition(condition)

    def _log_prob(self, network: ChunkNetwork, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        if self._matching:
            if self.caches_condition and "condition" in latents:
                return self._match(network, latents["condition"], latents)
            self._validate(observation)
            return self._match(network, network.encoder(observation), latents)
        chain, first = latents["chain"], self.first_step
        expected = (self.finetuned_steps + 1, self.config.prediction_steps, self.action.size)
        if tuple(chain.shape[1:]) != expected:
            raise SpecError(f"The chain has shape {list(chain.shape)}, this policy's are [N, {str(expected)[1:-1]}].")
        if self.caches_condition and "condition" in latents:
            condition = latents["condition"]
        else:
            self._validate(observation)
            condition = network.encoder(observation)
        times_at = self.schedule.times[first:]
        times = network.denoiser.encode_time(times_at)
        step: Tensor | slice = slice(first, None)
        x, after = chain[:, :-1], chain[:, 1:]
        if "chosen" in latents:
            chosen = latents["chosen"]
            rows = torch.arange(len(chain), device=chain.device)[:, None]
            x, after, times, step = chain[rows, chosen], chain[rows, chosen + 1], times[chosen], chosen + first
            times_at = times_at[chosen]
        features = network.denoiser.encode_condition(condition)[:, None]
        prediction = network.denoiser.denoise(x, times, features)
        normal = self.schedule.transition(x, prediction, step)
        if network.noise_head is not None:
            normal = Normal(normal.mean, network.noise_head(condition, times_at))
        logp, clamped = self._score(normal, after, latents.get("executed"))
        entropy = normal.entropy(self.config.min_logprob_std).mean((-2, -1)).expand(logp.shape)
        if self.config.logp_reduction is LogpReduction.SUM:
            entropy = entropy * self.config.chunk * self.action.size
        with torch.no_grad():
            clipped = torch.zeros_like(clamped)
            if self.schedule.clip is not None:
                estimate = self.schedule.clean_estimate(x, prediction, step)[..., : self.config.chunk, :]
                clipped = (estimate.abs() > self.schedule.clip).float().mean((-2, -1))
        extras = {"mean": normal.mean, "std": normal.std, "logp_clamped": clamped, "clean_clipped": clipped}
        return Scores(logp, entropy, extras)

    def _score(self, normal: Normal, value: Tensor, executed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Reduce the log-density of latents [N, K, P, A] to [N, K]; also the fraction of clamped elements."""
        chunk = self.config.chunk
        part = Normal(normal.mean[..., :chunk, :], normal.std)
        element = part.log_prob(value[..., :chunk, :], self.config.min_logprob_std)
        clamped = torch.zeros(element.shape[:-2], device=element.device)
        if self.config.logp_clamp is not None:
            low, high = self.config.logp_clamp
            with torch.no_grad():
                clamped = ((element < low) | (element > high)).float().mean((-2, -1))
            element = element.clamp(low, high)
        if executed is None:
            total = element.sum((-2, -1))
            count: Tensor | int = chunk * self.action.size
        else:
            total = (element * executed[:, None, :, None]).sum((-2, -1))
            count = (executed.sum(-1, keepdim=True) * self.action.size).clamp_min(1)
        return (total / count if self.config.logp_reduction is LogpReduction.MEAN else total), clamped


def select_fields(keys: tuple[str, ...], observation: Mapping[str, Field]) -> dict[str, Field]:
    """Return the fields that `keys` name, all but the instruction for (); raises ConfigError for unknown ones."""
    known = {key: spec for key, spec in observation.items() if key != TASK}
    for key in keys:
        if key not in known:
            raise ConfigError(
                f"observation_keys names '{key}', which is no field of the world.{did_you_mean(key, known)}"
            )
    return {key: known[key] for key in (keys or known)}


def build_policy(
    config: DenoisingPolicyConfig,
    observation: Mapping[str, Field],
    action: Field,
    *,
    fps: float,
    instructions: tuple[str, ...] = ("",),
    values: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> DenoisingPolicy:
    """Return a fresh policy for a world's fields, its normalisers fitted on data.

    observation, action, fps, instructions: as in `WorldSpec`; values: key -> [samples, *shape], with "action"
    [samples, A]; None leaves the normalisers the identity, which is right only for data that already is in [-1, 1].
    """
    policy = DenoisingPolicy(config, observation, action, fps=fps, instructions=instructions, seed=seed)
    if values is not None:
        policy.fit_normalizers(values)
    return policy
