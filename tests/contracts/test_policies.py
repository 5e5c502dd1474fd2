"""Every policy passes `check_policy`, and every broken promise is caught."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from robopolicy.core.policy import Decision, Scores
from robopolicy.core.spec import Field, PolicySpec, validate_observation
from robopolicy.nn.configuration import DenoiserKind, FlowNoise, ImageEncoderConfig, Prediction
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig, load_policy
from robopolicy.policies.configuration import LogpReduction, PolicyKind
from robopolicy.testing.policy import Level, PolicyReport, check_policy

FIELDS = {"observation.state": Field((3,)), "observation.environment_state": Field((4,))}
CAMERA = {"observation.images.front": Field((32, 32, 3), "uint8", 0, 255)}
ACTION = Field((2,), low=(-0.5, -2.0), high=(0.5, 2.0))
SMALL = DenoisingPolicyConfig(width=32, depth=2, sampling_steps=5, denoising_steps=20, prediction_steps=4, chunk=2)
IMAGE = ImageEncoderConfig(features=8, channels=(8, 8, 8))


def _policy(config: DenoisingPolicyConfig, fields: dict[str, Field] = FIELDS, steps: int | None = 3) -> DenoisingPolicy:
    generator = torch.Generator().manual_seed(0)
    values = {"action": torch.rand(50, 2, generator=generator) - 0.5}
    values |= {key: torch.randn(50, *field.shape, generator=generator) for key, field in fields.items()}
    policy = DenoisingPolicy(config, fields, ACTION, fps=10, instructions=("push",), values=values)
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
    report = check_policy(_policy(CONFIGS[name], steps=steps), load_policy, level=Level.TRAINS)
    assert report == PolicyReport(Level.TRAINS)


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
        if self.breakage == "noise of the batch":
            own = torch.Generator().manual_seed(int(torch.randint(2**31, (), generator=generator)))
            return replace(decision, actions=decision.actions * torch.rand(len(decision.actions), 1, 1, generator=own))
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

    def loss(self, batch: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
        losses = super().loss(batch, generator)
        if self.breakage == "mean loss":
            return {name: value.mean() for name, value in losses.items()}
        if self.breakage == "loss without gradient":
            return {name: value.detach() for name, value in losses.items()}
        if self.breakage == "loss at random":
            return {name: value + torch.rand(()) for name, value in losses.items()}
        return losses

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        if self.breakage == "trains nothing":
            return []
        if self.breakage == "trains a stranger":
            return [torch.nn.Parameter(torch.zeros(2))]
        return super().trainable_parameters()

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        if self.breakage == "does not resume":
            return None
        return super().load_state_dict(state_dict, *args, **options)

    def __deepcopy__(self, memory: dict) -> Any:
        other = self.__class__.__new__(self.__class__)
        other.__dict__ = copy.copy(self.__dict__)
        other.__dict__["_modules"] = {
            name: module if self.breakage == "shares weights" else copy.deepcopy(module, memory)
            for name, module in self._modules.items()
        }
        return other

    def encode(self, observation: Any, generator: torch.Generator | None = None) -> Any:
        if self.breakage == "unchecked":
            return self.network.encode(observation, generator)
        return super().encode(observation, generator)

    def save(self, folder: Path) -> None:
        if self.breakage == "forgets":
            policy = DenoisingPolicy(
                self.config, self.fields, self.action, fps=self.fps, instructions=self.instructions
            )
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
        ("mutates", "modified 'observation.state'"),
        ("frozen noise", "same actions"),
        ("noise of the batch", "depend on the other rows.*robopolicy.core.randomness"),
        ("detached", "no gradient"),
        ("rows", "log_prob"),
        ("unchecked", "raised"),
        ("forgets", "acts differently"),
        ("mean loss", r"not \[N\]"),
        ("loss without gradient", "loss has no gradient"),
        ("loss at random", "global generator"),
        ("trains nothing", r"trainable_parameters\(\) is empty"),
        ("trains a stranger", "not among parameters"),
        ("does not resume", "does not restore the actions"),
        ("shares weights", "changes the policy that it was copied from"),
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


class _Scored:
    """Half of a denoising policy: it acts and scores, and is neither trained nor saved."""

    def __init__(self, inner: DenoisingPolicy):
        self.inner, self.spec = inner, inner.spec

    def act(self, observation: Any, generator: torch.Generator, *, deterministic: bool = False) -> Decision:
        return self.inner.act(observation, generator, deterministic=deterministic)

    def log_prob(self, observation: Any, latents: Any) -> Scores:
        return self.inner.log_prob(observation, latents)

    def reset(self, rows: Any = None) -> None: ...


class _Plain:
    """A policy with a queue: it decides four steps, hands them out one by one and says nothing about itself."""

    spec = PolicySpec(FIELDS, ACTION, 1, 1, 1, 0, 10.0)

    def __init__(self) -> None:
        self.queue: list[torch.Tensor] = []

    def act(self, observation: Any, generator: torch.Generator, *, deterministic: bool = False) -> Decision:
        validate_observation(observation, self.spec.observation, history=1)
        if not self.queue:
            state = observation["observation.state"][:, -1, :1].clamp(-0.5, 0.5)
            self.queue = [(step + 1) * 0.25 * state.expand(-1, 2)[:, None] for step in range(4)]
        return Decision(self.queue.pop(0))

    def reset(self, rows: Any = None) -> None:
        self.queue = []


def test_what_finetune_cannot_use_is_not_passed_as_trainable():
    scored = _Scored(_policy(SMALL))
    report = check_policy(scored)
    assert report.level is Level.SCORES and "prepare_finetuning" in report.lacks and "loss" in report.lacks
    with pytest.raises(AssertionError, match=r"for the level trains it lacks parameters, .*prepare_finetuning, save"):
        check_policy(scored, level=Level.TRAINS)
    no, yes = report.lines()[-1], report.lines()[0]
    assert no.startswith("trains: no, it lacks parameters") and yes.startswith("acts: yes") and "evaluate" in yes


def test_a_plain_policy_with_a_queue_acts():
    report = check_policy(_Plain())
    assert report == PolicyReport(Level.ACTS, ("log_prob",))
    assert report.lines()[1:] == ["scores: no, it lacks log_prob.", "trains: no."]
    with pytest.raises(AssertionError, match="for the level scores it lacks log_prob"):
        check_policy(_Plain(), level=Level.SCORES)
    assert check_policy(_policy(SMALL), level=Level.ACTS).level is Level.ACTS


def test_things_that_are_no_policy_are_refused():
    with pytest.raises(AssertionError, match="lacks a method"):
        check_policy(object())  # type: ignore[arg-type]
