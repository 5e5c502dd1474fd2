"""LeRobot's ACT as a policy that learns: a Gaussian around the chunk that it predicts.

ACT (arXiv:2304.13705) is a conditional VAE whose decoder decides on a whole chunk at once, from a latent of zeros: it
has no noise to explore by. Here every element of an executed step gets its own, N(chunk, std), with a standard
deviation of each action element that depends on nothing and learns. So the log-probability of a decision is exact; it
is the mean over the executed C x A elements, as in our denoising policies, so that a clip range fits chunks of any
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
from robopolicy.core.randomness import drawing_from, normal
from robopolicy.core.spec import PolicySpec
from robopolicy.core.world import Rows
from robopolicy.nn.precision import multiplied
from robopolicy.nn.schedules import Normal
from robopolicy.policies.interface import check_chunks, in_range, register_range
from robopolicy.policies.lerobot.configuration import LEAST_STD, LeRobotTuning
from robopolicy.policies.lerobot.features import LeRobotReader
from robopolicy.policies.lerobot.module import LeRobotModule
from robopolicy.policies.network import Condition, freeze
from robopolicy.policies.steps import stood_for

IMAGES = "observation.images"
ACTION, PADDING = "action", "action_is_pad"


class GaussianACT(LeRobotModule):
    """A `core.policy.Trainable` over the weights of a LeRobot policy of type act.

    Its settings' `tuning` says which weights learn (expert: all but the image backbone) and how wide the noise is that
    a fresh policy explores with. record_means: whether decisions hold their means.
    """

    action_low: Tensor
    action_high: Tensor
    lowers_precision = True
    reads_instructions = False

    def __init__(self, policy: LeRobotReader):
        inner: Any = policy.policy
        reading = ("backbone", "vae_encoder")
        parts = inner.model.named_children()
        super().__init__(policy, [part for name, part in parts if not name.startswith(reading)])
        settings, action = policy.settings, policy.spec.action
        if settings.tuning.checkpointing:
            raise ConfigError("checkpointing computes denoising steps again, and act has none: set it to false.")
        log_std = (
            _begins_at(settings.tuning, action.size) if settings.log_std is None else torch.tensor(settings.log_std)
        )
        if len(log_std) != action.size:
            raise ConfigError(f"log_std has {len(log_std)} elements, and the policy's action {action.size}.")
        self.log_std = nn.Parameter(log_std, requires_grad=settings.tuning.learn_std)
        self.record_means = False
        register_range(self, action)

    @property
    def spec(self) -> PolicySpec:
        """What it reads and writes; a decision is one scored step."""
        inner: Any = self.policy
        return replace(self.reader.spec, prediction=inner.config.chunk_size, scored_steps=1)

    @property
    def std(self) -> Tensor:
        """The standard deviations [A] of normalised actions."""
        return self.log_std.clamp_min(math.log(LEAST_STD)).exp()

    @property
    def caches_condition(self) -> bool:
        """Whether decisions keep what the image backbone made of their observation: it is there and does not learn."""
        inner: Any = self.policy
        backbone = getattr(inner.model, "backbone", None)
        return self.tuning.keep_prefix and backbone is not None and not _learns(backbone)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide for every row; latents: "actions" [B, C, A], the normalised actions that were drawn.

        deterministic: LeRobot's own chunk, which is no choice: mask is False and logp zero. With cameras and a frozen
        backbone latents also has what that made of the images; with `record_means`, "mean" [B, 1, C, A]. Raises
        SpecError or NonFiniteError on a bad observation, NonFiniteError rather than returning a non-finite action.
        """
        condition = self.encode(observation)
        normal = self._normal(condition)
        drawn = normal.mean if deterministic else normal.sample(_noise(normal.mean, generator))
        logp = _mean_over_elements(normal.log_prob(drawn), None)
        latents = {"actions": drawn, **(condition if self.caches_condition else {})}
        if self.record_means:
            latents["mean"] = normal.mean[:, None]
        mask = torch.full_like(logp, not deterministic, dtype=torch.bool)
        return Decision(self._in_world(drawn), latents, torch.where(mask, logp, 0.0), mask)

    @torch.no_grad()
    def predict(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Tensor:
        """Return all P steps that a decision predicts, [B, P, A] in the world's units and bounds; `act` executes C.

        Those beyond have no noise; the draws are those of `act`, and it raises as that does.
        """
        chunk = self._chunk(self.encode(observation))
        if not deterministic:
            executed = chunk[:, : self.spec.chunk]
            chunk = torch.cat([executed + self.std * _noise(executed, generator), chunk[:, self.spec.chunk :]], 1)
        return self._in_world(chunk)

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Score recorded decisions, "actions" [N, C, A]: logp and entropy [N, 1], means over the executed elements.

        Optional latents: "executed" [N, C] bool counts the executed steps only; "chosen" [N, k] int64, all 0; what the
        backbone made of images replaces these while it is frozen. extras: mean [N, 1, C, A] and std [1, 1, A]. Raises
        SpecError where actions or observation do not fit.
        """
        drawn, expected = latents["actions"], (self.spec.chunk, self.spec.action.size)
        if tuple(drawn.shape[1:]) != expected:
            raise SpecError(
                f"The actions have shape {list(drawn.shape)}, this policy's are [N, {str(expected)[1:-1]}]."
            )
        kept = {name: value for name, value in latents.items() if is_condition(name)} if self.caches_condition else {}
        normal = self._normal(kept or self.encode(observation))
        logp = _mean_over_elements(normal.log_prob(drawn), latents.get("executed"))
        entropy = normal.entropy().mean().expand(logp.shape)
        if "chosen" in latents:
            logp, entropy = logp.gather(1, latents["chosen"]), entropy.gather(1, latents["chosen"])
        return Scores(logp, entropy, {"mean": normal.mean[:, None], "std": normal.std[None, None]})

    def describe_steps(self) -> dict[str, Any]:
        """See `core.steps.DescribesSteps`; how widely each explores is no part of it."""
        action = self.spec.action.size
        said = {"kind": "one Gaussian around a chunk", "executed steps": self.spec.chunk}
        return said | stood_for(self.executed, action, self.action_low.device)

    def steps_of(self, actions: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the latents [N, ...] with which `act` would have decided on chunks [N, C, A], in the world's units."""
        del generator
        return {"actions": self.normalised(actions.float())}

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return ACT's own loss, {"l1": [N]} and with its VAE {"kl": [N]}, weighted; its dropout is at work.

        batch: "observation" (key -> [N, 1, ...]), "actions" [N, P, A] in the world's units, "action_valid" [N, P] bool
        (padding is not learned). Samples count alike, where LeRobot's mean counts steps that are no padding alike.
        Raises SpecError on wrong shapes, NonFiniteError on NaN or infinity.
        """
        inner: Any = self.policy
        actions, valid = check_chunks(batch, self.spec.prediction, self.spec.action.size)
        wanted = self.normalised(actions.float())
        known = {**self.reader.frames(batch["observation"])[-1], ACTION: wanted, PADDING: ~valid}
        known[IMAGES] = [known[key] for key in inner.config.image_features]
        if not known[IMAGES]:
            del known[IMAGES]  # by whose presence LeRobot tells whether there are cameras
        try:
            inner.model.train()
            with drawing_from(generator, wanted.device):
                chunk, (mean, log_variance) = inner.model(known)
        finally:
            inner.model.eval()
        error, weight = (chunk - wanted).abs().mean(-1), valid.to(chunk.dtype)
        terms = {"l1": (error * weight).sum(-1) / weight.sum(-1).clamp_min(1.0)}
        if mean is not None:
            # KL(N(mean, variance) || N(0, 1)), summed over the elements of ACT's latent.
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
            terms["kl"] = inner.config.kl_weight * divergence
        return terms

    def encode(self, observation: TensorObservation) -> Condition:
        """Return what is read of observations [N, 1, ...]: vectors, and what the backbone makes of images.

        Raises SpecError or NonFiniteError as `validate_observation`.
        """
        inner: Any = self.policy
        frame = self.reader.frames(observation)[-1]
        cameras = tuple(inner.config.image_features)
        seen = {key: inner.model.backbone(frame[key])["feature_map"] for key in cameras}
        return {
            f"{CONDITION}.{key}": seen.get(key, value)
            for key, value in frame.items()
            if key in inner.config.input_features
        }

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Get ready for policy gradients; train_encoder False freezes the image backbone.

        Raises ConfigError for another number of steps than one.
        """
        if steps not in (None, 1):
            raise ConfigError(f"act decides in one step, so {steps} cannot be fine-tuned: leave finetuned_steps=null.")
        if not train_encoder:
            freeze(self.encoder_parameters())

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The weights that an optimiser may change, `log_std` [A] among them where it learns."""
        return [weight for weight in self.parameters() if weight.requires_grad]

    def reset(self, rows: Rows = None) -> None:
        """Nothing is remembered between decisions, of whatever rows [R]."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint of LeRobot's, atomically, with the standard deviations in robopolicy.json beside it."""
        settings, found = self.reader.settings, self.log_std.detach().cpu()
        # Where nothing was learned nothing is said, so that another std can be chosen still.
        learned = settings.log_std is not None or not torch.equal(found, _begins_at(settings.tuning, len(found)))
        log_std = tuple(found.tolist()) if learned else None
        self.write(folder, replace(settings, log_std=log_std, **described_origin(self)))

    def _normal(self, condition: Condition) -> Normal:
        """Return the Gaussian of normalised actions [N, C, A]."""
        return Normal(self._chunk(condition)[:, : self.spec.chunk], self.std)

    def _chunk(self, condition: Condition) -> Tensor:
        """Return the chunk [N, P, A] that ACT predicts, in normalised actions."""
        inner: Any = self.policy
        known: dict[str, Any] = {name.removeprefix(f"{CONDITION}."): value for name, value in condition.items()}
        if inner.config.image_features:
            known[IMAGES] = [known[key] for key in inner.config.image_features]
        model = copy.copy(inner.model)  # shallow: the same weights
        model._modules = {**inner.model._modules, "backbone": _Seen()}
        return multiplied(lambda: model(known)[0], self.log_std.device)

    def _in_world(self, actions: Tensor) -> Tensor:
        return in_range(self.executed(actions), self.action_low, self.action_high)


class _Seen(nn.Module):
    """Stands for an image backbone that has been run already."""

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        return {"feature_map": features}


def _begins_at(tuning: LeRobotTuning, size: int) -> Tensor:
    """Return the logarithms of the standard deviations [size] that exploring begins with."""
    return torch.full((size,), math.log(tuning.std))


def _learns(module: nn.Module) -> bool:
    return any(weight.requires_grad for weight in module.parameters())


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    return normal(like.shape, generator, like.device)


def _mean_over_elements(logp: Tensor, executed: Tensor | None) -> Tensor:
    """Return the mean [N, 1] of log-densities [N, C, A], over the steps of executed [N, C] alone."""
    if executed is None:
        return logp.mean((1, 2))[:, None]
    counted = executed[..., None].to(logp.dtype)
    return (logp * counted).sum((1, 2))[:, None] / (counted.sum((1, 2))[:, None] * logp.shape[-1]).clamp_min(1)
