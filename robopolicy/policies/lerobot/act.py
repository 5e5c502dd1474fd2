"""Trainable LeRobot ACT: a Gaussian policy around its predicted chunk.

ACT (arXiv:2304.13705) is a conditional VAE whose decoder predicts a whole chunk at once from a zero latent, without
exploration noise. Here every element of an executed step gets independent noise, N(chunk, std), with a learned,
state-independent standard deviation per action element. The log-probability of a decision is therefore exact; it is the
mean over the executed C x A elements, as in the built-in denoising policies, so that one clip range fits chunks of any
length. Axes: N row, B row of an observation, P predicted step, C executed step, A action dimension.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.origin import described_origin
from robopolicy.core.policy import CONDITION, Decision, Scores, TensorObservation, is_condition
from robopolicy.core.randomness import normal, use_generator
from robopolicy.core.spec import PolicySpec
from robopolicy.core.world import Rows
from robopolicy.nn.precision import run_in_training_precision
from robopolicy.nn.schedules import Normal
from robopolicy.policies.interface import check_chunks, in_range, register_range
from robopolicy.policies.lerobot.configuration import LEAST_STD, LeRobotTuning
from robopolicy.policies.lerobot.features import LeRobotReader
from robopolicy.policies.lerobot.module import LeRobotModule
from robopolicy.policies.network import Condition, freeze
from robopolicy.policies.steps import probed_actions

IMAGES = "observation.images"
ACTION, PADDING = "action", "action_is_pad"


class GaussianACT(LeRobotModule):
    """A `core.policy.Trainable` over the weights of a LeRobot policy of type act.

    The setting `tuning` selects the trainable weights (expert: all but the image backbone) and the initial exploration
    noise. record_means: whether decisions store their means.
    """

    action_low: Tensor
    action_high: Tensor
    lowers_precision = memoryless = True
    reads_instructions = False

    def __init__(self, policy: LeRobotReader):
        inner: Any = policy.policy
        reading = ("backbone", "vae_encoder")
        parts = inner.model.named_children()
        super().__init__(policy, [part for name, part in parts if not name.startswith(reading)])
        settings, action = policy.settings, policy.spec.action
        if settings.tuning.gradient_checkpointing:
            raise ConfigError("gradient_checkpointing recomputes denoising steps, and act has none: set it to false.")
        log_std = (
            _begins_at(settings.tuning, action.size) if settings.log_std is None else torch.tensor(settings.log_std)
        )
        if len(log_std) != action.size:
            raise ConfigError(f"log_std has {len(log_std)} elements, but the policy's action has {action.size}.")
        self.log_std = nn.Parameter(log_std, requires_grad=settings.tuning.learn_std)
        self.record_means = False
        register_range(self, action)

    @property
    def spec(self) -> PolicySpec:
        """Inputs and outputs; an action chunk has one step with a log-probability."""
        inner: Any = self.policy
        return replace(self.reader.spec, prediction=inner.config.chunk_size, scored_steps=1)

    @property
    def std(self) -> Tensor:
        """Standard deviations [A] of normalised actions."""
        return self.log_std.clamp_min(math.log(LEAST_STD)).exp()

    @property
    def caches_condition(self) -> bool:
        """Whether policy calls cache the features of the image backbone: it exists and is frozen."""
        inner: Any = self.policy
        backbone = getattr(inner.model, "backbone", None)
        return self.tuning.cache_encoder_outputs and backbone is not None and not _learns(backbone)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return a `Decision`, with one action chunk per row; latents: "actions" [B, C, A], the sampled normalised
        actions.

        deterministic: LeRobot's own chunk, without log-probability: mask is False and logp zero. With cameras and a
        frozen backbone, latents also contain the image features; with `record_means`, "mean" [B, 1, C, A]. Raises
        SpecError or NonFiniteError on an invalid observation, NonFiniteError rather than returning a non-finite action.
        """
        condition = self.encode(observation)
        normal = self._normal(condition)
        sample = normal.mean if deterministic else normal.sample(_noise(normal.mean, generator))
        logp = _mean_over_elements(normal.log_prob(sample), None)
        latents = {"actions": sample, **(condition if self.caches_condition else {})}
        if self.record_means:
            latents["mean"] = normal.mean[:, None]
        mask = torch.full_like(logp, not deterministic, dtype=torch.bool)
        return Decision(self._in_world(sample), latents, torch.where(mask, logp, 0.0), mask)

    @torch.no_grad()
    def predict(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Tensor:
        """Return all P predicted steps of a policy call, [B, P, A] in world units and within bounds; `act` executes C.

        Steps beyond C have no noise; random draws and errors are those of `act`.
        """
        chunk = self._chunk(self.encode(observation))
        if not deterministic:
            executed_steps = chunk[:, : self.spec.chunk]
            chunk = torch.cat(
                [executed_steps + self.std * _noise(executed_steps, generator), chunk[:, self.spec.chunk :]], 1
            )
        return self._in_world(chunk)

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Compute log-probabilities of recorded actions [N, C, A]: logp and entropy [N, 1], means over the executed
        elements.

        Optional latents: "executed" [N, C] bool restricts to the executed steps; "chosen" [N, k] int64, all 0; cached
        image features replace the images while the backbone is frozen. extras: mean [N, 1, C, A], std [1, 1, A] and
        logp_precision [N, 1, C, A], see `policies.likelihood.logp_precision`.
        Raises SpecError if actions or observation have wrong shapes.
        """
        recorded_actions, expected = latents["actions"], (self.spec.chunk, self.spec.action.size)
        if tuple(recorded_actions.shape[1:]) != expected:
            raise SpecError(
                f"The actions have shape {list(recorded_actions.shape)}, but this policy's actions have [N, "
                f"{str(expected)[1:-1]}]."
            )
        cached_condition = (
            {name: value for name, value in latents.items() if is_condition(name)} if self.caches_condition else {}
        )
        normal = self._normal(cached_condition or self.encode(observation))
        logp = _mean_over_elements(normal.log_prob(recorded_actions), latents.get("executed"))
        entropy = normal.entropy().mean().expand(logp.shape)
        if "chosen" in latents:
            logp, entropy = logp.gather(1, latents["chosen"]), entropy.gather(1, latents["chosen"])
        mask = latents.get("executed", torch.ones_like(recorded_actions[..., 0]))[..., None].expand(normal.mean.shape)
        precision = mask / mask.sum((1, 2), keepdim=True).clamp_min(1) / normal.std.square()
        extras = {"mean": normal.mean, "std": normal.std[None], "logp_precision": precision}
        return Scores(logp, entropy, {name: value[:, None] for name, value in extras.items()})

    def describe_steps(self) -> dict[str, Any]:
        """Implement `core.steps.DescribesSteps.describe_steps`; the exploration std is not included."""
        action = self.spec.action.size
        description = {"kind": "one Gaussian around a chunk", "executed steps": self.spec.chunk}
        return description | probed_actions(self.executed, action, self.action_low.device)

    def steps_of(self, actions: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the latents [N, ...] with which `act` would have produced chunks [N, C, A] in world units."""
        del generator
        return {"actions": self.normalised(actions.float())}

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return ACT's own loss, {"l1": [N]} and with its VAE {"kl": [N]}, weighted; dropout is active.

        batch: "observation" (key -> [N, 1, ...]), "actions" [N, P, A] in world units, "action_valid" [N, P] bool
        (padding is ignored). Samples are weighted equally, whereas LeRobot's mean weights valid steps equally. Raises
        SpecError on wrong shapes, NonFiniteError on NaN or infinity.
        """
        inner: Any = self.policy
        actions, valid = check_chunks(batch, self.spec.prediction, self.spec.action.size)
        target = self.normalised(actions.float())
        inputs = {**self.reader.frames(batch["observation"])[-1], ACTION: target, PADDING: ~valid}
        inputs[IMAGES] = [inputs[key] for key in inner.config.image_features]
        if not inputs[IMAGES]:
            del inputs[IMAGES]  # by whose presence LeRobot tells whether there are cameras
        try:
            inner.model.train()
            with use_generator(generator, target.device):
                chunk, (mean, log_variance) = inner.model(inputs)
        finally:
            inner.model.eval()
        error, weight = (chunk - target).abs().mean(-1), valid.to(chunk.dtype)
        terms = {"l1": (error * weight).sum(-1) / weight.sum(-1).clamp_min(1.0)}
        if mean is not None:
            # KL(N(mean, variance) || N(0, 1)), summed over the elements of ACT's latent.
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
            terms["kl"] = inner.config.kl_weight * divergence
        return terms

    def encode(self, observation: TensorObservation) -> Condition:
        """Encode observations [N, 1, ...]: normalised vectors, and features of the image backbone.

        Raises SpecError or NonFiniteError as `validate_observation`.
        """
        inner: Any = self.policy
        frame = self.reader.frames(observation)[-1]
        cameras = tuple(inner.config.image_features)
        feature_maps = {key: inner.model.backbone(frame[key])["feature_map"] for key in cameras}
        return {
            f"{CONDITION}.{key}": feature_maps.get(key, value)
            for key, value in frame.items()
            if key in inner.config.input_features
        }

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Prepare for policy gradients; train_encoder False freezes the image backbone.

        Raises ConfigError when `steps` is not one.
        """
        if steps not in (None, 1):
            raise ConfigError(
                f"act has no denoising steps, so {steps} steps cannot be fine-tuned: set finetuned_steps=null."
            )
        if not train_encoder:
            freeze(self.encoder_parameters())

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Weights that an optimiser may change, including `log_std` [A] if it is trainable."""
        return [weight for weight in self.parameters() if weight.requires_grad]

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; no row [R] has state between policy calls."""

    def save(self, folder: Path) -> None:
        """Write a LeRobot checkpoint atomically, with the standard deviations in robopolicy.json next to it."""
        settings, std_values = self.reader.settings, self.log_std.detach().cpu()
        # Where nothing was learned nothing is said, so that another std can be chosen still.
        was_trained = settings.log_std is not None or not torch.equal(
            std_values, _begins_at(settings.tuning, len(std_values))
        )
        log_std = tuple(std_values.tolist()) if was_trained else None
        self.write(folder, replace(settings, log_std=log_std, **described_origin(self)))

    def _normal(self, condition: Condition) -> Normal:
        """Return the Gaussian of normalised actions [N, C, A]."""
        return Normal(self._chunk(condition)[:, : self.spec.chunk], self.std)

    def _chunk(self, condition: Condition) -> Tensor:
        """Return the chunk [N, P, A] that ACT predicts, in normalised actions."""
        inner: Any = self.policy
        inputs: dict[str, Any] = {name.removeprefix(f"{CONDITION}."): value for name, value in condition.items()}
        if inner.config.image_features:
            inputs[IMAGES] = [inputs[key] for key in inner.config.image_features]
        model = copy.copy(inner.model)  # shallow: the same weights
        model._modules = {**inner.model._modules, "backbone": _Seen()}
        return run_in_training_precision(lambda: model(inputs)[0], self.log_std.device)

    def _in_world(self, actions: Tensor) -> Tensor:
        return in_range(self.executed(actions), self.action_low, self.action_high)


class _Seen(nn.Module):
    """Stands in for an image backbone whose features are already computed."""

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        return {"feature_map": features}


def _begins_at(tuning: LeRobotTuning, size: int) -> Tensor:
    """Return the logarithms of the initial exploration standard deviations [size]."""
    return torch.full((size,), math.log(tuning.exploration_std))


def _learns(module: nn.Module) -> bool:
    return any(weight.requires_grad for weight in module.parameters())


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    return normal(like.shape, generator, like.device)


def _mean_over_elements(logp: Tensor, executed: Tensor | None) -> Tensor:
    """Return the mean [N, 1] of log-densities [N, C, A] over the steps in executed [N, C]."""
    if executed is None:
        return logp.mean((1, 2))[:, None]
    weight = executed[..., None].to(logp.dtype)
    return (logp * weight).sum((1, 2))[:, None] / (weight.sum((1, 2))[:, None] * logp.shape[-1]).clamp_min(1)
