"""Diffusion and flow policies over action chunks whose denoising steps are scored steps: what PPO in the chain needs.

A decision starts from noise x_0 [P, A] and takes K steps; the first K - K' are run by a frozen base copy, the last K'
by the network that is fine-tuned (DPPO, arXiv:2409.00588). Latents live in normalised actions, data in [-1, 1].
`sampler` runs the chain, `likelihood` scores it, `network` says what can be inside: no dropout but in the loss, no
batch norm, no averaged copy, so that `act` and `log_prob` always run the same function.
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
from robopolicy.core.origin import origin_of, remember_origin, remember_renaming, renaming_of
from robopolicy.core.policy import Decision, Policy, Scores, TakesAdapters, TensorObservation, is_condition
from robopolicy.core.spec import Field, PolicySpec, WorldSpec, validate_observation
from robopolicy.core.structured import from_plain
from robopolicy.core.world import Rows
from robopolicy.nn.denoisers import draw_counts, given_steps, with_prefix
from robopolicy.nn.normalizer import ACTION, Normalizer, ShowsNormalizers, fit_normalizers
from robopolicy.nn.precision import as_kept, multiplied
from robopolicy.nn.schedules import Schedule
from robopolicy.policies.abilities import MapsFeatures, began_elsewhere
from robopolicy.policies.checkpoint import save_policy, saved_fields
from robopolicy.policies.configuration import DenoisingPolicyConfig, Likelihood, PolicyKind
from robopolicy.policies.interface import check_predicted, in_range, register_range, select_fields
from robopolicy.policies.latents import OwnLatents, executed_part, size_of_latents, step_errors
from robopolicy.policies.likelihood import chain_scores, matching_latents, matching_scores, noisy_actions, reduce_logp
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
    Draws,
    Kept,
    choices,
    draw,
    finish_chain,
    how_to_explore,
    make_schedule,
    sample_chain,
    trajectory,
)
from robopolicy.policies.steps import denoising_steps

DENOISING_POLICY = "denoising_policy"
"""What checkpoints call it."""


@runtime_checkable
class WritesCheckpoint(Protocol):
    """Optional: a network whose policies are kept in another format than ours."""

    def write_checkpoint(self, policy: "DenoisingPolicy", folder: Path) -> None:
        """Write the policy whose network this is to `folder`, atomically."""
        ...


class DenoisingPolicy(nn.Module):
    """A `core.policy.Trainable` that denoises action chunks.

    config: all choices; observation: the fields it may read, by key; action: one control step [A] with its range;
    fps, instructions: of the world it is trained in; values: data that the normalisers are fitted on, key -> [samples,
    *shape], with "action" [samples, A] (None leaves them the identity, which is right only for data that already is in
    [-1, 1]); seed: of the initial weights (global randomness stays untouched); network: somebody else's instead of the
    `ChunkNetwork` that config describes, see `DenoisingNetwork`. record_means: whether decisions hold every step's
    mean. Raises ConfigError when config.observation_keys names an unknown field, `values` lack a field that is
    normalised, or the network lacks something.
    """

    action_low: Tensor
    action_high: Tensor
    lowers_precision = learns_from_condition = True

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
            raise ConfigError(f"kind={config.kind.value} is no denoising policy: make a TokenPolicy or a JointModel.")
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
        if isinstance(network, OwnLatents):
            self.schedule = network.schedule(config)
        self.network: DenoisingNetwork = network
        self._own = (network,) if isinstance(network, OwnLatents) else ()  # a tuple: it is a submodule already
        self.part = executed_part(network, config, action.size)
        self.latent_size = size_of_latents(network, action.size)
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
        """What it reads and writes; steps is K', the number of scored steps."""
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
        """The arguments of `prepare_finetuning`, None before it was called."""
        if not self._prepared:
            return None
        return {"steps": self.finetuned_steps, "train_encoder": self._train_encoder}

    @property
    def reads_instructions(self) -> bool:
        """Whether decisions depend on the instruction; False of somebody else's network that does not say."""
        return isinstance(self.network, ReadsInstructions) and self.network.reads_instructions

    @property
    def first_step(self) -> int:
        """Index in the schedule of the first scored step, K - K'."""
        return self.schedule.steps - self.finetuned_steps

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.action_low.device

    @property
    def own_schedule(self) -> Schedule:
        """The schedule of its steps; see `abilities.Denoises`."""
        return self.schedule

    @property
    def past_steps(self) -> int:
        """How many predicted steps lie before the decision; see `abilities.LearnsPast`."""
        return self.part.first

    @property
    def began_elsewhere(self) -> bool:
        """Whether somebody else trained its network; see `abilities.BeganElsewhere`."""
        return began_elsewhere(self.network)

    def mapping_for(self, world: WorldSpec) -> str:
        """See `abilities.MapsFeatures`; "" where its network reads our names."""
        return self.network.mapping_for(world) if isinstance(self.network, MapsFeatures) else ""

    @property
    def encoder_is_fixed(self) -> bool:
        """Whether the encoder cannot have changed since the base was copied: base and network then encode alike."""
        learns = self._train_encoder and self._encoder_learns
        return not learns and not any(weight.requires_grad for weight in self.network.encoder_parameters())

    @property
    def caches_condition(self) -> bool:
        """Whether decisions keep the encoded observation: it has cameras and its encoder does not change."""
        return all(own.keeps_condition for own in self._own) and len(self.spec.cameras) > 0 and self.encoder_is_fixed

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide for every row; latents: "chain" [B, K'+1, P, A] in normalised actions, noisiest first.

        deterministic: the noise-free sampler (DDIM with eta 0, or the flow's ODE) from random initial noise; its steps
        are no choices, so mask is False and logp zero. With cameras and a fixed encoder, latents also has what it made
        of the observation ("condition" [B, D] of our network), which spares `log_prob` the images; with `record_means`,
        "mean" [B, K', P, A] of every step. Raises SpecError or NonFiniteError on a bad observation, and NonFiniteError
        rather than returning a non-finite action.
        """
        return self._act(observation, generator, deterministic)

    @torch.no_grad()
    def resume(
        self, observation: TensorObservation, latents: Mapping[str, Tensor], count: Tensor, generator: torch.Generator
    ) -> Decision:
        """`act` that keeps the first count[b] steps of latents["chain"] and the initial noise; -1: none. See `Resumes`.

        latents["chain"]: [B, K'+1, P, A], in normalised actions; count: [B] int64. The frozen first K - K' steps are
        not counted: they are kept with the initial noise. Raises ConfigError with likelihood=matching, else what `act`
        raises.
        """
        if self.scored_by_matching:
            raise ConfigError("likelihood=matching keeps no chains to go on from: set branch_sampling_step=null.")
        return self._act(observation, generator, False, Kept(latents["chain"], count))

    @torch.no_grad()
    def predict(
        self,
        observation: TensorObservation,
        generator: torch.Generator,
        *,
        deterministic: bool = False,
        guided: Guided | None = None,
    ) -> Tensor:
        """Return all P steps that a decision predicts, [B, P, A] in the world's units and bounds; `act` executes C.

        The draws are those of `act`. guided: real-time chunking corrects each prediction on its way. Raises as `act`.
        """
        chain, _ = self._chain(observation, self.encode(observation), generator, deterministic, guided=guided)
        return self.to_predictions(chain.final[:, self.part.first :])

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Score recorded chains [N, K'+1, P, A]: logp and entropy [N, K'], reduced over the executed C x A elements.

        The observation is encoded once and all steps run as one batch. Optional latents: "chosen" [N, k] int64 selects
        k of the K' steps per row (logp [N, k]); "executed" [N, C] bool reduces over the executed chunk steps only
        (score the behaviour the same way); "condition" replaces the observation when the encoder is fixed. extras: see
        `chain_scores` and `matching_scores`. Raises SpecError where chain or observation do not fit.
        """
        if self.scored_by_matching:
            condition = self._condition(observation, latents)
            return matching_scores(self.config, self.schedule, self.network, condition, latents, self.part)
        chain = latents["chain"]
        expected = (self.finetuned_steps + 1, *self.noise_shape)
        if tuple(chain.shape[1:]) != expected:
            raise SpecError(f"The chain has shape {list(chain.shape)}, this policy's are [N, {str(expected)[1:-1]}].")
        condition = self._condition(observation, latents)
        return chain_scores(self.config, self.schedule, self.first_step, self.network, condition, latents, self.part)

    def describe_steps(self) -> dict[str, Any]:
        """See `core.steps.DescribesSteps`."""
        meant = self._own[0].to_actions if self._own else self.action_normalizer.inverse
        parts = self.config, self.schedule, self.network, self.first_step
        return denoising_steps(*parts, self.part, self.latent_size, meant)

    @property
    def scored_by_matching(self) -> bool:
        """Whether decisions are scored by minus the denoising loss at random levels (likelihood=matching)."""
        return self.config.likelihood is Likelihood.MATCHING

    def noisy_actions(self, latents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what recorded levels make of normalised actions, [N, n, P, A], and their times [N, n] in [0, 1]."""
        return noisy_actions(self.schedule, latents)

    @torch.no_grad()
    def finish_chain(self, observation: TensorObservation, latents: Tensor, next_step: Tensor) -> Tensor:
        """Return the actions [N, C, A] that noise-free steps make of unfinished latents [N, P, A]; raises as `act`.

        next_step: [N] int64, the scored step 0..K' that each is about to enter; K' means that it is finished.
        """
        steps = steps_of(self.network, self.schedule.times, self.encode(observation))
        return self.to_actions(finish_chain(self.schedule, self.first_step, steps, latents, next_step))

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Predicted steps P and size A of the noise that a decision begins with."""
        return self.config.prediction_steps, self.latent_size

    def trajectory(
        self, observation: TensorObservation, noise: Tensor, through: int | None = None, *, guided: Guided | None = None
    ) -> Tensor:
        """Return the latents [N, K+1, P, A] of the noise-free chain from noise [N, P, A]; see `DecidesFromNoise`."""
        leading, scored = self._steps(observation, self.encode(observation), guided)
        return trajectory(self.schedule, self.first_step, leading, scored, noise, through)

    def to_actions(self, latents: Tensor) -> Tensor:
        """Return what is executed of clean latents [N, P, A], in the world's units and bounds: [N, C, A]."""
        return self.to_predictions(latents[:, self.part.first : self.part.first + self.part.count])

    def to_predictions(self, latents: Tensor) -> Tensor:
        """Return what clean latents [N, P, A] stand for, in the world's units and bounds."""
        meant = self._own[0].to_actions(latents) if self._own else self.action_normalizer.inverse(latents)
        return in_range(meant, self.action_low, self.action_high)

    def encode(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Condition:
        """Return what is made of observations [N, H, ...], by `generator` augmented; SpecError, NonFiniteError."""
        validate_observation(observation, self.fields, history=self.config.history)
        return check_condition(self.network.encode(observation, generator), len(observation[next(iter(self.fields))]))

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"denoising": [N]}: the (squared) error of the prediction, the mean over a sample's noise levels.

        batch: "observation" (key -> [N, H, ...], or what a fixed encoder made of it as latents have it, beside it),
        "actions" [N, P, A] in the world's units, "action_valid" [N, P] bool (padding is not learned, nor is what
        prefix_steps has given). Raises SpecError on wrong shapes.
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
        if most := self.config.prefix_steps:
            count = draw_counts(len(clean), most, self.config.prefix_decay, generator)
            # Given steps enter clean and are no target: the network learns to go on from them.
            noisy = with_prefix(noisy, clean, count.to(clean.device))
            valid = valid & ~given_steps(count.to(valid.device), valid.shape[1])
        given = noisy, times, condition, generator
        prediction = multiplied(lambda: denoise_in_loss(self.network, *given), noisy.device)
        error = step_errors(self.network, self.action.size, prediction, self.schedule.target(clean, noise, level))
        weight = valid.to(error.dtype)
        # The mean over a row's valid steps first: a sample counts once, however much of its chunk is padding.
        return {"denoising": ((error * weight).sum(-1) / weight.sum(-1).clamp_min(1.0)).view(-1, levels).mean(-1)}

    def normalizers(self) -> dict[str, Normalizer]:
        """Return the normalisers by observation key, and the action's under "action"."""
        fields = self.network.normalizers() if isinstance(self.network, ShowsNormalizers) else {}
        return {ACTION: self.action_normalizer, **fields}

    def fit_normalizers(self, values: Mapping[str, Tensor]) -> None:
        """Fit every normaliser on data: values by observation key [samples, *shape] and "action" [samples, A].

        Raises ConfigError when a key is missing or fine-tuning has begun (the base would see other inputs).
        """
        if self._prepared:
            raise ConfigError("The normalisers are fixed once fine-tuning has begun: fit them before pre-training.")
        fit_normalizers(self.normalizers(), values)

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Freeze a base copy, which runs the first K - K' steps; only the last K' = `steps` are trained.

        steps: None for config.finetuned_steps (else half of K); train_encoder False freezes the encoders too. A policy
        that is prepared already, such as a loaded fine-tuned one, goes on with its own base, steps and frozen encoders.
        Raises ConfigError when K' does not fit, when it differs from what the policy was prepared for, or when no step
        among the last K' has a density (an ODE, or K' = 1 of flow-SDE noise).
        """
        total = self.schedule.steps
        if self._prepared:
            if steps not in (None, self.finetuned_steps):
                raise ConfigError(
                    f"This policy is being fine-tuned in its last {self.finetuned_steps} steps, not {steps}: load the "
                    "base policy to start over."
                )
            freeze(() if train_encoder else self.network.encoder_parameters())  # the base's may be others all the same
            return
        count = steps if steps is not None else self.config.finetuned_steps or (total + 1) // 2
        if not 1 <= count <= total:
            raise ConfigError(f"{count} fine-tuned steps do not fit a chain of {total}: choose 1 to {total}.")
        if not self.scored_by_matching and not bool(self.schedule.density[total - count :].any()):
            raise ConfigError(
                f"None of the last {count} steps has noise, so there is nothing to score: "
                f"{'fine-tune more steps, or ' if count < total else ''}{how_to_explore(self.network)}."
            )
        self.base = frozen_base(self.network, count < total)
        self._prepared = True
        self.finetuned_steps, self._train_encoder = count, train_encoder
        if not train_encoder:
            freeze(self.network.encoder_parameters())

    def without_base(self) -> "DenoisingPolicy":
        """Return a policy of this network that takes all steps itself, and whose encoders learn as they once did.

        A fine-tuned policy leaves its frozen base behind so; one that has none is returned as it is.
        """
        if not self._prepared:
            return self
        network = None if type(self.network) is ChunkNetwork else copy.deepcopy(self.network)
        # What fine-tuning froze for its own sake learns again; what the network's maker froze does not.
        if network is not None and self._encoder_learns:
            for weight in network.encoder_parameters():
                weight.requires_grad_(True)
        known: dict[str, Any] = {"fps": self.fps, "instructions": self.instructions, "network": network}
        made = DenoisingPolicy(self.config, self.fields, self.action, **known)
        made.load_state_dict({name: value for name, value in self.state_dict().items() if not name.startswith("base.")})
        remember_origin(made, origin_of(self))
        remember_renaming(made, renaming_of(self))
        return made.to(self.action_low.device)

    def add_lora(self, rank: int) -> None:
        """Freeze the weights and train adapters of this rank; ConfigError where that cannot be."""
        network = self.network
        if not isinstance(network, TakesAdapters):
            raise ConfigError(f"lora_rank={rank}: {type(network).__name__} has no adapters. Leave lora_rank=0.")
        if self.base is not None:
            raise ConfigError("Adapters learn in all denoising steps: leave finetuned_steps=null.")
        network.add_lora(rank)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The weights that an optimiser may change."""
        return [weight for weight in self.network.parameters() if weight.requires_grad]

    def reset(self, rows: Rows = None) -> None:
        """Nothing is remembered between decisions, of whatever rows [R]."""

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, normalisers and base copy included, atomically."""
        if isinstance(self.network, WritesCheckpoint):
            self.network.write_checkpoint(self, folder)
            return
        network = describe_network(self.network)
        own: dict[str, Any] = {} if network is None else {"network": network}
        save_policy(self, folder, kind=DENOISING_POLICY, finetuning=self.finetuning, **own)

    @classmethod
    def load(cls, folder: Path, description: Mapping[str, Any], device: torch.device | str = "cpu") -> Self:
        """Rebuild what `save` wrote; raises CheckpointError where the files do not fit together."""
        require_format(folder, description)
        with restoring(folder, "a policy"):
            observation, action, known = saved_fields(description)
            config = from_plain(DenoisingPolicyConfig, description["config"], "config")
            network = restore_network(description.get("network"), folder)
            policy = cls(config, observation, action, network=network, **known)
            finetuning = description["finetuning"]
            if finetuning is not None:
                policy.prepare_finetuning(finetuning["steps"], train_encoder=finetuning["train_encoder"])
        return read_weights(policy, folder, device)

    def _act(
        self, observation: TensorObservation, generator: torch.Generator, deterministic: bool, kept: Kept | None = None
    ) -> Decision:
        """Encode, draw, run the chain, score it. kept: what is taken over from other chains."""
        condition = self.encode(observation)
        chain, draws = self._chain(observation, condition, generator, deterministic, kept)
        actions = self.to_actions(chain.final)
        latents = self._latents(chain, condition, generator)
        if self.scored_by_matching:
            return self._matched(actions, latents, condition, deterministic)
        mask = choices(self.schedule, self.first_step, draws, kept)
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
        kept: Kept | None = None,
        guided: Guided | None = None,
    ) -> tuple[Chain, Draws]:
        """Draw and run the chain under `condition`, what was made of the observation."""
        config, network = self.config, self.network
        schedule, first = self.schedule, self.first_step
        batch, device = rows_in(condition), next(iter(condition.values())).device
        draws = draw(
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
        leading, scored = self._steps(observation, condition, guided)
        learned_std = None
        if learns_noise(config):
            assert isinstance(network, LearnsNoise)
            learned_std = lambda step: network.noise_std(schedule.times[step : step + 1], condition)[:, 0]  # noqa: E731
        return sample_chain(schedule, first, leading, scored, draws, learned_std=learned_std, kept=kept), draws

    def _matched(
        self, actions: Tensor, latents: dict[str, Tensor], condition: Condition, deterministic: bool
    ) -> Decision:
        """Return a decision scored by matching, where every level counts; a deterministic one is no choice."""
        if deterministic:
            none = torch.zeros(latents["level"].shape, device=actions.device)
            return Decision(actions, latents, none, none.bool())
        logp = matching_scores(self.config, self.schedule, self.network, condition, latents, self.part).logp
        return Decision(actions, latents, logp, torch.ones_like(logp, dtype=torch.bool))

    def _latents(self, chain: Chain, condition: Condition, generator: torch.Generator) -> dict[str, Tensor]:
        """Return what scores a decision again: its chain, or what matching draws for its action."""
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
        """Return who takes the first K - K' steps under `condition`, the encoded observation, and who the others."""
        leading = scored = steps_of(self.network, self.schedule.times, condition)
        if self.first_step and self.base is not None:
            # The frozen base sees the observation with its own encoder, which is the same one unless that learns.
            seen = condition if self.encoder_is_fixed else self.base.encode(observation)
            leading = steps_of(self.base, self.schedule.times, seen)
        return (leading, scored) if guided is None else (guided(leading), guided(scored))

    def _condition(
        self, observation: TensorObservation, latents: Mapping[str, Any], generator: torch.Generator | None = None
    ) -> Condition:
        """Return what was encoded when the latents were recorded, where that still holds, or encode the observation."""
        if self.caches_condition:
            kept = {name: value for name, value in latents.items() if is_condition(name)}
            if kept:
                return as_kept(kept, cast(nn.Module, self.network))
        return self.encode(observation, generator)


@runtime_checkable
class OpensDenoising(Protocol):
    """A policy of another library whose denoising can be looked into once it is taken apart."""

    def opened(self) -> DenoisingPolicy | None:
        """Return a policy over the same weights, None where it does not denoise."""
        ...


def require_denoising(policy: object, otherwise: str) -> DenoisingPolicy:
    """Return `policy`, typed as one that denoises; raises ConfigError, which says `otherwise`, where it is none."""
    if not isinstance(policy, DenoisingPolicy):
        raise ConfigError(otherwise)
    return policy


def score_alike(teacher: Policy, policy: Policy | None) -> None:
    """Let a teacher that was never fine-tuned score the steps that `policy` does, where both denoise in as many."""
    if not (isinstance(teacher, DenoisingPolicy) and isinstance(policy, DenoisingPolicy)):
        return
    if teacher.finetuning is None and teacher.schedule.steps == policy.schedule.steps:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RobopolicyWarning)  # of what is saved: a teacher is not
            teacher.prepare_finetuning(policy.finetuned_steps)
