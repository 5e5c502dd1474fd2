"""Diffusion and flow policies over action chunks with a log-probability per denoising step, as PPO over the chain
requires.

A decision starts from noise x_0 [P, A] and takes K steps; the first K - K' are run by a frozen base copy, the last K'
by the fine-tuned network (DPPO, arXiv:2409.00588). Latents are normalised actions, data in [-1, 1]. `sampler` runs the
chain, `likelihood` computes its log-probability, `network` defines the network interface. There is no dropout outside
the loss, no batch norm and no averaged copy, so `act` and `log_prob` always run the same function.
"""

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self, cast, runtime_checkable

import torch
from torch import Tensor, nn

from robopolicy.core.checkpoints import read_weights, require_format, restoring
from robopolicy.core.errors import ConfigError, RobopolicyWarning, SpecError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.origin import origin_of, remember_origin, remember_renaming, renaming_of
from robopolicy.core.policy import Decision, Policy, Scores, SupportsLora, TensorObservation, is_condition
from robopolicy.core.spec import Field, PolicySpec, WorldSpec, validate_observation
from robopolicy.core.structured import from_plain
from robopolicy.core.world import Rows
from robopolicy.nn.denoisers import draw_counts, given_steps, with_prefix
from robopolicy.nn.normalizer import ACTION, Normalizer, ShowsNormalizers, fit_normalizers
from robopolicy.nn.precision import as_cached, run_in_training_precision
from robopolicy.nn.schedules import Schedule
from robopolicy.policies.abilities import MapsFeatures, is_pretrained
from robopolicy.policies.checkpoint import save_policy, saved_fields
from robopolicy.policies.configuration import DenoisingPolicyConfig, Likelihood, PolicyKind
from robopolicy.policies.interface import check_predicted, in_range, register_range, select_fields
from robopolicy.policies.latents import CustomLatents, executed_slice, latent_size_of, step_errors
from robopolicy.policies.likelihood import (
    chain_scores,
    executed_error,
    matching_latents,
    matching_scores,
    noisy_actions,
    reduce_logp,
)
from robopolicy.policies.network import (
    ChunkNetwork,
    Condition,
    DenoisingNetwork,
    Guided,
    LearnsNoise,
    ReadsInstructions,
    Steps,
    check_condition,
    check_network,
    denoise_in_loss,
    describe_network,
    freeze,
    frozen_base,
    learns_noise,
    repeat_rows,
    restore_network,
    rows_in,
    steps_of,
)
from robopolicy.policies.sampler import (
    Chain,
    NoiseDraws,
    ResumedSteps,
    draw_noise,
    finish_chain,
    how_to_explore,
    make_schedule,
    sample_chain,
    sampled_steps_mask,
    trajectory,
)
from robopolicy.policies.steps import denoising_steps

DENOISING_POLICY = "denoising_policy"
"""Kind name in checkpoints."""


@runtime_checkable
class WritesCheckpoint(Protocol):
    """Optional: a network whose policies are saved in another format than robopolicy's."""

    def write_checkpoint(self, policy: "DenoisingPolicy", folder: Path) -> None:
        """Write the policy of this network to `folder` atomically."""
        ...


class DenoisingPolicy(nn.Module):
    """A `core.policy.Trainable` that denoises action chunks.

    config: all settings; observation: available fields, by key; action: one control step [A] with its range; fps,
    instructions: of the training world; values: data for fitting the normalisers, key -> [samples, *shape], with
    "action" [samples, A] (None leaves them the identity, correct only for data already in [-1, 1]); seed: of the
    initial weights (global randomness is unaffected); network: custom network instead of the `ChunkNetwork` described
    by config, see `DenoisingNetwork`. record_means: whether decisions store the mean of every step. Raises ConfigError
    when config.observation_keys names an unknown field, `values` lack a normalised field, or the network lacks a
    required method.
    """

    action_low: Tensor
    action_high: Tensor
    lowers_precision = learns_from_condition = memoryless = True

    def __init__(
        self,
        config: DenoisingPolicyConfig,
        observation: Mapping[str, Field],
        action: Field,
        *,
        fps: float,
        instructions: tuple[str, ...] = ("",),
        values: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        network: DenoisingNetwork | None = None,
    ):
        super().__init__()
        if len(action.shape) != 1:
            raise ConfigError(f"A denoising policy needs a vector of actions per control step, not {action.shape}.")
        if config.kind not in (PolicyKind.DIFFUSION, PolicyKind.FLOW):
            raise ConfigError(
                f"kind={config.kind.value} is not a denoising policy: create a TokenPolicy or a JointModel."
            )
        self.config = config
        self.fields = select_fields(config.observation_keys, observation)
        self.action = action
        self.fps = fps
        self.instructions = tuple(instructions)
        self.schedule = make_schedule(config)
        self.action_normalizer = Normalizer(action.shape, config.action_normalization)
        if network is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                network = ChunkNetwork(config, self.fields, action.size, self.instructions)
        check_network(network, config)
        if isinstance(network, CustomLatents):
            self.schedule = network.schedule(config)
        self.network: DenoisingNetwork = network
        self._own = (network,) if isinstance(network, CustomLatents) else ()  # a tuple: it is a submodule already
        self.part = executed_slice(network, config, action.size)
        self.latent_size = latent_size_of(network, action.size)
        self.base: DenoisingNetwork | None = None
        self._prepared = False
        self.finetuned_steps = self.schedule.steps
        self._train_encoder = True
        self._encoder_learns = any(weight.requires_grad for weight in network.encoder_parameters())
        self.record_means = False
        register_range(self, action)
        if values is not None:
            self.fit_normalizers(values)

    @property
    def spec(self) -> PolicySpec:
        """Inputs and outputs; scored_steps is K', the number of steps with log-probabilities."""
        return PolicySpec(
            observation=self.fields,
            action=self.action,
            history=self.config.history,
            chunk=self.config.chunk,
            prediction=self.config.prediction_steps - self.part.first,
            scored_steps=self.config.matching_samples if self.scored_by_matching else self.finetuned_steps,
            fps=self.fps,
            instructions=self.instructions,
        )

    @property
    def finetuning(self) -> dict[str, Any] | None:
        """Arguments of the last `prepare_finetuning`, None before it was called."""
        if not self._prepared:
            return None
        return {"steps": self.finetuned_steps, "train_encoder": self._train_encoder}

    @property
    def reads_instructions(self) -> bool:
        """Whether actions depend on the instruction; False for custom networks that do not declare it."""
        return isinstance(self.network, ReadsInstructions) and self.network.reads_instructions

    @property
    def first_step(self) -> int:
        """Schedule index of the first fine-tuned step, K - K'."""
        return self.schedule.steps - self.finetuned_steps

    @property
    def device(self) -> torch.device:
        """Device of computation."""
        return self.action_low.device

    @property
    def own_schedule(self) -> Schedule:
        """Schedule of the policy's denoising steps; see `abilities.Denoises`."""
        return self.schedule

    @property
    def past_steps(self) -> int:
        """Number of predicted steps before the first executed one; see `abilities.PredictsFromPast`."""
        return self.part.first

    @property
    def is_pretrained(self) -> bool:
        """Whether the policy's network was pretrained elsewhere; see `abilities.IsPretrained`."""
        return is_pretrained(self.network)

    def mapping_for(self, world: WorldSpec) -> str:
        """Implement `abilities.MapsFeatures.mapping_for`; "" if its network uses robopolicy's names."""
        return self.network.mapping_for(world) if isinstance(self.network, MapsFeatures) else ""

    @property
    def encoder_is_fixed(self) -> bool:
        """Whether the encoder has not changed since the base was copied, so that base and network encode
        identically.
        """
        learns = self._train_encoder and self._encoder_learns
        return not learns and not any(weight.requires_grad for weight in self.network.encoder_parameters())

    @property
    def caches_condition(self) -> bool:
        """Whether policy calls cache the encoded observation: the policy has cameras and its encoder is frozen."""
        return (
            all(latent_network.keeps_condition for latent_network in self._own)
            and len(self.spec.cameras) > 0
            and self.encoder_is_fixed
        )

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return a `Decision`, with one action chunk per row; latents: "chain" [B, K'+1, P, A] in normalised actions,
        noisiest first.

        deterministic: the noise-free sampler (DDIM with eta 0, or the flow's ODE) from random initial noise; its steps
        have no density, so mask is False and logp zero. With cameras and a frozen encoder, latents also contain the
        encoded observation ("condition" [B, D] for the built-in network), so that `log_prob` does not need the images;
        with `record_means`, "mean" [B, K', P, A] of every step. Raises SpecError or NonFiniteError on an invalid
        observation, and NonFiniteError rather than returning a non-finite action.
        """
        return self._act(observation, generator, deterministic)

    @torch.no_grad()
    def resume(
        self, observation: TensorObservation, latents: Mapping[str, Tensor], count: Tensor, generator: torch.Generator
    ) -> Decision:
        """Like `act`, but keep the first count[b] steps of latents["chain"] and the initial noise; -1: keep nothing.
        See `Resumes`.

        latents["chain"]: [B, K'+1, P, A], in normalised actions; count: [B] int64. The frozen first K - K' steps are
        not counted: they are kept with the initial noise. Raises ConfigError with likelihood=matching, otherwise the
        errors of `act`.
        """
        if self.scored_by_matching:
            raise ConfigError(
                "likelihood=matching stores no denoising chains to continue from: set branch_sampling_step=null."
            )
        return self._act(observation, generator, False, ResumedSteps(latents["chain"], count))

    @torch.no_grad()
    def predict(
        self,
        observation: TensorObservation,
        generator: torch.Generator,
        *,
        deterministic: bool = False,
        guided: Guided | None = None,
    ) -> Tensor:
        """Return all P predicted steps of a policy call, [B, P, A] in world units and within bounds; `act` executes C.

        Random draws equal those of `act`. guided: real-time chunking corrects each prediction during denoising. Raises
        as `act`.
        """
        chain, _ = self._chain(observation, self.encode(observation), generator, deterministic, guided=guided)
        return self.to_predictions(chain.final[:, self.part.first :])

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Compute log-probabilities of recorded chains [N, K'+1, P, A]: logp and entropy [N, K'], reduced over the
        executed C x A elements.

        The observation is encoded once and all steps run as one batch. Optional latents: "chosen" [N, k] int64 selects
        k of the K' steps per row (logp [N, k]); "executed" [N, C] bool reduces over the executed chunk steps only
        (apply the same to the behaviour policy); "condition" replaces the observation when the encoder is frozen.
        extras: see `chain_scores` and `matching_scores`. Raises SpecError if chain or observation have wrong shapes.
        """
        if self.scored_by_matching:
            condition = self._condition(observation, latents)
            return matching_scores(self.config, self.schedule, self.network, condition, latents, self.part)
        chain = latents["chain"]
        expected = (self.finetuned_steps + 1, *self.noise_shape)
        if tuple(chain.shape[1:]) != expected:
            raise SpecError(
                f"The chain has shape {list(chain.shape)}, but this policy's chains have [N, {str(expected)[1:-1]}]."
            )
        condition = self._condition(observation, latents)
        return chain_scores(self.config, self.schedule, self.first_step, self.network, condition, latents, self.part)

    def steps_of(self, actions: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the latents [N, ...] by which matching scores action chunks [N, C, A] in world units.

        Noises and levels are drawn; predicted steps outside of the chunk repeat its first and its last one. Raises
        ConfigError with likelihood=chain, as many chains lead to the same action.
        """
        if not self.scored_by_matching:
            raise ConfigError("likelihood=chain cannot score given actions: set policy.likelihood=matching.")
        before = self.part.first
        after = self.config.prediction_steps - before - actions.shape[1]
        ends = actions[:, :1].expand(-1, before, -1), actions[:, -1:].expand(-1, after, -1)
        padded = torch.cat([ends[0], actions, ends[1]], 1).float()
        clean = self._own[0].to_latents(padded) if self._own else self.action_normalizer(padded)
        return matching_latents(clean, self.schedule, self.config.matching_samples, generator)

    def describe_steps(self) -> dict[str, Any]:
        """Implement `core.steps.DescribesSteps.describe_steps`."""
        to_actions = self._own[0].to_actions if self._own else self.action_normalizer.inverse
        parts = self.config, self.schedule, self.network, self.first_step
        return denoising_steps(*parts, self.part, self.latent_size, to_actions)

    @property
    def scored_by_matching(self) -> bool:
        """Whether log-probabilities are minus the denoising loss at random noise levels (likelihood=matching)."""
        return self.config.likelihood is Likelihood.MATCHING

    def noisy_actions(self, latents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return normalised actions noised at the recorded levels, [N, n, P, A], and their times [N, n] in [0, 1]."""
        return noisy_actions(self.schedule, latents)

    def prediction_error(self, first: Tensor, second: Tensor, latents: Mapping[str, Tensor]) -> Tensor:
        """Return the mean squared difference of two predictions [N, n, P, A] over the executed actions, [N, n].

        latents: of the decisions, as for `log_prob`.
        """
        return executed_error(first - second, latents, self.part)

    @torch.no_grad()
    def finish_chain(self, observation: TensorObservation, latents: Tensor, next_step: Tensor) -> Tensor:
        """Return the actions [N, C, A] obtained by noise-free steps from unfinished latents [N, P, A]; raises as `act`.

        next_step: [N] int64, the fine-tuned step 0..K' that each row enters next; K' means that it is finished.
        """
        steps = steps_of(self.network, self.schedule.times, self.encode(observation))
        return self.to_actions(finish_chain(self.schedule, self.first_step, steps, latents, next_step))

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Number of predicted steps P and action size A of a policy call's initial noise."""
        return self.config.prediction_steps, self.latent_size

    def trajectory(
        self, observation: TensorObservation, noise: Tensor, through: int | None = None, *, guided: Guided | None = None
    ) -> Tensor:
        """Return the latents [N, K+1, P, A] of the noise-free chain from noise [N, P, A]; see `DecidesFromNoise`."""
        leading, network_steps = self._steps(observation, self.encode(observation), guided)
        return trajectory(self.schedule, self.first_step, leading, network_steps, noise, through)

    def to_actions(self, latents: Tensor) -> Tensor:
        """Convert clean latents [N, P, A] to executed actions [N, C, A], in world units and within bounds."""
        return self.to_predictions(latents[:, self.part.first : self.part.first + self.part.count])

    def to_predictions(self, latents: Tensor) -> Tensor:
        """Convert clean latents [N, P, A] to world units, within bounds."""
        actions = self._own[0].to_actions(latents) if self._own else self.action_normalizer.inverse(latents)
        return in_range(actions, self.action_low, self.action_high)

    def encode(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Condition:
        """Encode observations [N, H, ...], augmented if `generator` is given; raises SpecError or NonFiniteError."""
        validate_observation(observation, self.fields, history=self.config.history)
        return check_condition(self.network.encode(observation, generator), len(observation[next(iter(self.fields))]))

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"denoising": [N]}: the (squared) prediction error, averaged over a sample's noise levels.

        batch: "observation" (key -> [N, H, ...], optionally with the cached features of a frozen encoder), "actions"
        [N, P, A] in world units, "action_valid" [N, P] bool (padding is ignored, as are steps given by prefix_steps).
        Raises SpecError on wrong shapes.
        """
        actions, valid = check_predicted(batch, self.config.prediction_steps, self.part.first, self.action.size)
        clean = self._own[0].to_latents(actions.float()) if self._own else self.action_normalizer(actions.float())
        levels = self.config.levels_per_sample
        # Several levels of a sample share its encoded observation, whose reading is most of the work.
        clean, valid = clean.repeat_interleave(levels, 0), valid.repeat_interleave(levels, 0)
        # A pretrained network goes on learning at the levels at which it has learned.
        level = (self._own or (self.schedule,))[0].levels(len(clean), generator).to(clean.device)
        noise = torch.randn(clean.shape, generator=generator, device=generator.device).to(clean.device)
        condition = repeat_rows(self._condition(batch["observation"], batch, generator), levels)
        noisy, times = self.schedule.corrupt(clean, noise, level), self.schedule.level_times(level)
        if prefix_limit := self.config.prefix_steps:
            count = draw_counts(len(clean), prefix_limit, self.config.prefix_decay, generator)
            # Given steps enter clean and are no target: the network learns to go on from them.
            noisy = with_prefix(noisy, clean, count.to(clean.device))
            valid = valid & ~given_steps(count.to(valid.device), valid.shape[1])
        inputs = noisy, times, condition, generator
        prediction = run_in_training_precision(lambda: denoise_in_loss(self.network, *inputs), noisy.device)
        error = step_errors(self.network, self.action.size, prediction, self.schedule.target(clean, noise, level))
        weight = valid.to(error.dtype)
        # The mean over a row's valid steps first: a sample counts once, however much of its chunk is padding.
        return {"denoising": ((error * weight).sum(-1) / weight.sum(-1).clamp_min(1.0)).view(-1, levels).mean(-1)}

    def normalizers(self) -> dict[str, Normalizer]:
        """Return the normalisers by observation key, and the action normaliser under "action"."""
        fields = self.network.normalizers() if isinstance(self.network, ShowsNormalizers) else {}
        return {ACTION: self.action_normalizer, **fields}

    def fit_normalizers(self, values: Mapping[str, Tensor]) -> None:
        """Fit every normaliser on data: values by observation key [samples, *shape] and "action" [samples, A].

        Raises ConfigError when a key is missing or fine-tuning has started (the base would get different inputs).
        """
        if self._prepared:
            raise ConfigError("The normalisers are fixed after fine-tuning has started: fit them before pre-training.")
        fit_normalizers(self.normalizers(), values)

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Freeze a base copy for the first K - K' steps; only the last K' = `steps` are trained.

        steps: None for config.finetuned_steps (else half of K); train_encoder False freezes the encoders too. A policy
        that is already prepared, such as a loaded fine-tuned one, keeps its own base, steps and frozen encoders. Raises
        ConfigError when K' is out of range or differs from the existing one, or when no step among the last K' has a
        density (an ODE, or K' = 1 of flow-SDE noise).
        """
        total = self.schedule.steps
        if self._prepared:
            if steps not in (None, self.finetuned_steps):
                raise ConfigError(
                    f"This policy is fine-tuned in its last {self.finetuned_steps} steps, not {steps}: load the base "
                    "policy to start over."
                )
            freeze(() if train_encoder else self.network.encoder_parameters())  # the base's may be others all the same
            return
        count = steps if steps is not None else self.config.finetuned_steps or (total + 1) // 2
        if not 1 <= count <= total:
            raise ConfigError(f"finetuned_steps={count} exceeds the chain of {total} steps: choose 1 to {total}.")
        if not self.scored_by_matching and not bool(self.schedule.density[total - count :].any()):
            raise ConfigError(
                f"None of the last {count} denoising steps has noise, so no log-probability is defined: "
                f"{'fine-tune more steps, or ' if count < total else ''}{how_to_explore(self.network)}."
            )
        self.base = frozen_base(self.network, count < total)
        self._prepared = True
        self.finetuned_steps, self._train_encoder = count, train_encoder
        if not train_encoder:
            freeze(self.network.encoder_parameters())

    def without_base(self) -> "DenoisingPolicy":
        """Return a policy whose network takes all steps, with the original trainability of its encoders.

        This removes the frozen base of a fine-tuned policy; a policy without one is returned unchanged.
        """
        if not self._prepared:
            return self
        network = None if type(self.network) is ChunkNetwork else copy.deepcopy(self.network)
        # What fine-tuning froze for its own sake learns again; what the network's maker froze does not.
        if network is not None and self._encoder_learns:
            for weight in network.encoder_parameters():
                weight.requires_grad_(True)
        metadata: dict[str, Any] = {"fps": self.fps, "instructions": self.instructions, "network": network}
        policy = DenoisingPolicy(self.config, self.fields, self.action, **metadata)
        policy.load_state_dict(
            {name: value for name, value in self.state_dict().items() if not name.startswith("base.")}
        )
        remember_origin(policy, origin_of(self))
        remember_renaming(policy, renaming_of(self))
        return policy.to(self.action_low.device)

    def add_lora(self, rank: int) -> None:
        """Freeze the weights and train LoRA adapters of this rank; ConfigError when this is not supported."""
        network = self.network
        if not isinstance(network, SupportsLora):
            raise ConfigError(
                f"lora_rank={rank}: {type(network).__name__} does not support LoRA adapters. Set lora_rank=0."
            )
        if self.base is not None:
            raise ConfigError("Adapters train all denoising steps: set finetuned_steps=null.")
        network.add_lora(rank)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Weights that an optimiser may change."""
        return [weight for weight in self.network.parameters() if weight.requires_grad]

    def reset(self, rows: Rows = None) -> None:
        """No memory between policy calls for any rows [R]."""

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, including normalisers and base copy, atomically."""
        if isinstance(self.network, WritesCheckpoint):
            self.network.write_checkpoint(self, folder)
            return
        network = describe_network(self.network)
        extras: dict[str, Any] = {} if network is None else {"network": network}
        save_policy(self, folder, kind=DENOISING_POLICY, finetuning=self.finetuning, **extras)

    @classmethod
    def load(cls, folder: Path, description: Mapping[str, Any], device: torch.device | str = "cpu") -> Self:
        """Load what `save` wrote; raises CheckpointError when the files are inconsistent."""
        require_format(folder, description)
        with restoring(folder, "a policy"):
            observation, action, metadata = saved_fields(description)
            config = from_plain(DenoisingPolicyConfig, description["config"], "config")
            network = restore_network(description.get("network"), folder)
            policy = cls(config, observation, action, network=network, **metadata)
            finetuning = description["finetuning"]
            if finetuning is not None:
                policy.prepare_finetuning(finetuning["steps"], train_encoder=finetuning["train_encoder"])
        return read_weights(policy, folder, device)

    def _act(
        self,
        observation: TensorObservation,
        generator: torch.Generator,
        deterministic: bool,
        kept: ResumedSteps | None = None,
    ) -> Decision:
        """Encode, draw noise, run the chain and compute its log-probability. kept: latents taken from earlier
        chains.
        """
        condition = self.encode(observation)
        chain, draws = self._chain(observation, condition, generator, deterministic, kept)
        actions = self.to_actions(chain.final)
        latents = self._latents(chain, condition, generator)
        if self.scored_by_matching:
            return self._matched(actions, latents, condition, deterministic)
        mask = sampled_steps_mask(self.schedule, self.first_step, draws, kept)
        logp = torch.zeros(mask.shape, device=actions.device)
        if not deterministic:
            # By the very Gaussians that were sampled from: before an update `log_prob` gives the same numbers.
            logp, _ = reduce_logp(self.config, chain.normal, chain.latents[:, 1:], None, self.part)
        return Decision(actions, latents, logp, mask)

    def _chain(
        self,
        observation: TensorObservation,
        condition: Condition,
        generator: torch.Generator,
        deterministic: bool,
        kept: ResumedSteps | None = None,
        guided: Guided | None = None,
    ) -> tuple[Chain, NoiseDraws]:
        """Draw noise and run the chain under `condition`, the encoded observation."""
        config, network = self.config, self.network
        schedule, first = self.schedule, self.first_step
        batch, device = rows_in(condition), next(iter(condition.values())).device
        draws = draw_noise(
            schedule,
            (batch, *self.noise_shape),
            generator,
            device,
            noisy=not deterministic and not self.scored_by_matching,
            noise_clip=config.noise_clip,
            scored=slice(first, None),
            noisy_steps=config.noisy_steps,
            explored=self.part.size,
        )
        leading, network_steps = self._steps(observation, condition, guided)
        learned_std = None
        if learns_noise(config):
            assert isinstance(network, LearnsNoise)
            learned_std = lambda step: network.noise_std(schedule.times[step : step + 1], condition)[:, 0]  # noqa: E731
        return sample_chain(schedule, first, leading, network_steps, draws, learned_std=learned_std, kept=kept), draws

    def _matched(
        self, actions: Tensor, latents: dict[str, Tensor], condition: Condition, deterministic: bool
    ) -> Decision:
        """Return a `Decision` with log-probabilities by matching over all levels; a deterministic one has none."""
        if deterministic:
            none = torch.zeros(latents["level"].shape, device=actions.device)
            return Decision(actions, latents, none, none.bool())
        logp = matching_scores(self.config, self.schedule, self.network, condition, latents, self.part).logp
        return Decision(actions, latents, logp, torch.ones_like(logp, dtype=torch.bool))

    def _latents(self, chain: Chain, condition: Condition, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the latents for recomputing log-probabilities: the chain, or the draws of matching for its action."""
        if self.scored_by_matching:
            latents = matching_latents(chain.final, self.schedule, self.config.matching_samples, generator)
        else:
            latents = {"chain": chain.latents}
        if self.caches_condition:
            latents |= condition
        if self.record_means and not self.scored_by_matching:
            latents["mean"] = chain.normal.mean
        return latents

    def _steps(
        self, observation: TensorObservation, condition: Condition, guided: Guided | None = None
    ) -> tuple[Steps, Steps]:
        """Return the networks for the first K - K' steps and for the others under `condition`, the encoded
        observation.
        """
        leading = network_steps = steps_of(self.network, self.schedule.times, condition)
        if self.first_step and self.base is not None:
            # The frozen base sees the observation with its own encoder, which is the same one unless that learns.
            base_condition = condition if self.encoder_is_fixed else self.base.encode(observation)
            leading = steps_of(self.base, self.schedule.times, base_condition)
        return (leading, network_steps) if guided is None else (guided(leading), guided(network_steps))

    def _condition(
        self, observation: TensorObservation, latents: Mapping[str, Any], generator: torch.Generator | None = None
    ) -> Condition:
        """Return the cached condition of recorded latents if it is still valid, otherwise encode the observation."""
        if self.caches_condition:
            cached_condition = {name: value for name, value in latents.items() if is_condition(name)}
            if cached_condition:
                return as_cached(cached_condition, cast(nn.Module, self.network))
        return self.encode(observation, generator)


@runtime_checkable
class OpensDenoising(Protocol):
    """A policy of another library whose denoising chain becomes accessible after conversion."""

    def opened(self) -> DenoisingPolicy | None:
        """Return a denoising policy over the same weights, None if it does not denoise."""
        ...


def require_denoising(policy: object, otherwise: str) -> DenoisingPolicy:
    """Return `policy` typed as a denoising policy; raises ConfigError with the text `otherwise` if it is none."""
    if not isinstance(policy, DenoisingPolicy):
        raise ConfigError(otherwise)
    return policy


def share_scored_steps(teacher: Policy, policy: Policy | None) -> None:
    """Set up a teacher without fine-tuning to compute log-probabilities of the same steps as `policy`, if their step
    counts match.
    """
    if not (isinstance(teacher, DenoisingPolicy) and isinstance(policy, DenoisingPolicy)):
        return
    if teacher.finetuning is None and teacher.schedule.steps == policy.schedule.steps:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RobopolicyWarning)  # of what is saved: a teacher is not
            teacher.prepare_finetuning(policy.finetuned_steps)


keep_former_names(__name__, {"score_alike": "share_scored_steps"})
