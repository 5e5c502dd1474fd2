"""Every policy passes `check_policy`, and every broken promise is caught."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from robopolicy.core.policy import Decision
from robopolicy.core.policy_conformance import check_policy
from robopolicy.core.spec import Field
from robopolicy.nn.configuration import DenoiserKind, FlowNoise, ImageEncoderConfig, Prediction
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig, build_policy, load_policy
from robopolicy.policies.configuration import LogpReduction, PolicyKind

FIELDS = {"observation.state": Field((3,)), "observation.environment_state": Field((4,))}
CAMERA = {"observation.images.front": Field((32, 32, 3), "uint8", 0, 255)}
ACTION = Field((2,), low=(-0.5, -2.0), high=(0.5, 2.0))
SMALL = DenoisingPolicyConfig(width=32, depth=2, sampling_steps=5, denoising_steps=20, prediction_steps=4, chunk=2)
IMAGE = ImageEncoderConfig(features=8, channels=(8, 8, 8))


def _policy(config: DenoisingPolicyConfig, fields: dict[str, Field] = FIELDS, steps: int | None = 3) -> DenoisingPolicy:
    generator = torch.Generator().manual_seed(0)
    values = {"action": torch.rand(50, 2, generator=generator) - 0.5}
    values |= {key: torch.randn(50, *field.shape, generator=generator) for key, field in fields.items()}
    policy = build_policy(config, fields, ACTION, fps=10, instructions=("push",), values=values)
    if steps is not None:
        policy.prepare_finetuning(steps)
    return policy


CONFIGS: dict[str, DenoisingPolicyConfig] = {
    "epsilon": SMALL,
    "sample": replace(SMALL, prediction=Prediction.SAMPLE, logp_reduction=LogpReduction.SUM),
    "velocity": replace(SMALL, prediction=Prediction.VELOCITY, clip=None, noise_clip=None, logp_clamp=None),
    "ddpm": replace(SMALL, denoising_steps=5, min_sampling_std=0.0, min_logprob_std=0.05),
    "history": replace(SMALL, history=3),
    "transformer": replace(SMALL, denoiser=DenoiserKind.TRANSFORMER),
    "unet": replace(SMALL, denoiser=DenoiserKind.UNET),
    "flow": replace(SMALL, kind=PolicyKind.FLOW),
    "flow_sde": replace(SMALL, kind=PolicyKind.FLOW, flow_noise=FlowNoise.SDE, flow_noise_level=0.7),
}


@pytest.mark.parametrize("steps", [None, 1, 3, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_denoising_policies_conform(name: str, steps: int | None):
    if steps == 1 and name in ("flow_sde", "ddpm"):
        pytest.skip("their last step has no density")
    check_policy(_policy(CONFIGS[name], steps=steps), load_policy)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("steps", [None, 3])
def test_image_policies_conform(frozen: bool, steps: int | None):
    config = replace(SMALL, history=2, image=replace(IMAGE, frozen=frozen))
    check_policy(_policy(config, {"observation.state": FIELDS["observation.state"]} | CAMERA, steps), load_policy)


class _Broken(DenoisingPolicy):
    """A policy with one broken promise."""

    breakage = ""

    def act(self, observation: Any, generator: torch.Generator, *, deterministic: bool = False) -> Decision:
        decision = super().act(observation, generator, deterministic=deterministic)
        if self.breakage == "range":
            return replace(decision, actions=decision.actions * 100)
        if self.breakage == "global randomness":
            return replace(decision, actions=decision.actions + 1e-4 * torch.rand(()))
        if self.breakage == "dropout" and self.training:
            return replace(decision, actions=decision.actions * 0.9)
        if self.breakage == "shape":
            return replace(decision, actions=decision.actions[:, :1])
        if self.breakage == "score":
            return replace(decision, logp=decision.logp + 1e-3)
        if self.breakage == "mutates":
            observation["observation.state"].zero_()
        if self.breakage == "frozen noise":
            return super().act(observation, torch.Generator().manual_seed(0), deterministic=deterministic)
        return decision

    def log_prob(self, observation: Any, latents: Any) -> Any:
        scores = super().log_prob(observation, latents)
        if self.breakage == "detached":
            return replace(scores, logp=scores.logp.detach())
        if self.breakage == "rows":
            return replace(scores, logp=scores.logp + 1e-3 * torch.arange(len(scores.logp))[:, None] / 100)
        return scores

    def _validate(self, observation: Any) -> None:
        if self.breakage != "unchecked":
            super()._validate(observation)

    def save(self, folder: Path) -> None:
        if self.breakage == "forgets":
            policy = build_policy(self.config, self.fields, self.action, fps=self.fps, instructions=self.instructions)
            policy.prepare_finetuning(self.finetuned_steps)
            policy.save(folder)
        else:
            super().save(folder)


@pytest.mark.parametrize(
    ("breakage", "complaint"),
    [
        ("", None),
        ("range", "out of range"),
        ("global randomness", "global generator"),
        ("dropout", "train and eval"),
        ("shape", "actions"),
        ("score", "differs from act"),
        ("mutates", "changed 'observation.state'"),
        ("frozen noise", "same actions"),
        ("detached", "no gradient"),
        ("rows", "evaluate"),
        ("unchecked", "raised"),
        ("forgets", "decides differently"),
    ],
)
def test_broken_promises_are_caught(breakage: str, complaint: str | None):
    policy = _policy(SMALL)
    policy.__class__ = _Broken
    assert isinstance(policy, _Broken)
    policy.breakage = breakage
    if complaint is None:
        check_policy(policy, load_policy)
    else:
        with pytest.raises(AssertionError, match=complaint):
            check_policy(policy, load_policy)


def test_things_that_are_no_policy_are_refused():
    with pytest.raises(AssertionError, match="lacks a method"):
        check_policy(object())  # type: ignore[arg-type]
