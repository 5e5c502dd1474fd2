"""A teacher scores only what it would have meant by the same latents: others are refused, with what differs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from bandit_toys import ChainPolicy

from robopolicy.core.errors import ConfigError
from robopolicy.core.steps import difference_of_steps
from robopolicy.nn.configuration import ActionTokens, FlowNoise, Prediction, Spacing
from robopolicy.policies.configuration import DenoisingPolicyConfig, Likelihood, PolicyKind
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.token.configuration import TokenConfig, TokenPolicyConfig
from robopolicy.policies.token.policy import TokenPolicy
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance
from sims.registry import make_world

CONFIG = FinetuneConfig(
    algorithm="distillation", iterations=1, groups=1, group_size=2, minibatch=8, epochs=1, evaluate_every=0
)
SMALL: dict[str, Any] = {"width": 8, "depth": 1, "sampling_steps": 4, "denoising_steps": 20}
FLOW = DenoisingPolicyConfig(kind=PolicyKind.FLOW, **SMALL)
DIFFUSION = DenoisingPolicyConfig(kind=PolicyKind.DIFFUSION, **SMALL)
TOKENS = TokenPolicyConfig(token=TokenConfig(bins=9, width=8, depth=1, heads=2, feed_forward=8))


def made(config: DenoisingPolicyConfig | TokenPolicyConfig, seed: int = 1, span: float = 1.0, steps: int | None = None):
    """A policy for reach_planar whose actions were fitted on [-span, span]."""
    spec = make_world("reach_planar", 1).spec
    ends = torch.tensor([-1.0, 1.0])
    values = {key: torch.stack([end.expand(field.shape) for end in ends]) for key, field in spec.observation.items()}
    values["action"] = span * torch.stack([end.expand(spec.action.shape) for end in ends])
    build: Callable[..., Any] = TokenPolicy if isinstance(config, TokenPolicyConfig) else DenoisingPolicy
    about = {"fps": spec.fps, "instructions": spec.instructions}
    policy = build(config, spec.observation, spec.action, **about, values=values, seed=seed)
    policy.prepare_finetuning(steps)
    return policy


def taught(student: Any, teacher: Any, **changes: Any) -> int:
    return finetune(
        student, None, make_world("reach_planar", 4), replace(CONFIG, **changes), guidance=Guidance(teacher)
    ).iterations


@pytest.mark.parametrize(
    ("own", "its", "given", "said"),
    [
        (FLOW, FLOW, {"span": 0.5}, r"values -0.5 and 0.5: -?0.25, the policy's: -?0.5\."),
        (
            FLOW,
            DIFFUSION,
            {},
            "kind: diffusion, log-probabilities by chain, the policy's: flow, log-probabilities by chain",
        ),
        (FLOW, replace(FLOW, sampling_steps=8), {"steps": 2}, "noise levels: 0.25, the policy's: 0.5"),
        (FLOW, replace(FLOW, flow_noise=FlowNoise.SDE), {}, "weight of the clean estimate"),
        (FLOW, replace(FLOW, flow_noise_level=0.2), {}, "standard deviations: 0.2, the policy's: 0.1"),
        (FLOW, replace(FLOW, clip=None), {}, "bound on the clean estimate: none, the policy's: 1.0"),
        (FLOW, replace(FLOW, chunk=2), {}, "executed steps: 2, the policy's: 4"),
        (DIFFUSION, replace(DIFFUSION, timestep_spacing=Spacing.TRAILING), {}, "noise levels"),
        (TOKENS, replace(TOKENS, token=replace(TOKENS.token, bins=17)), {}, "vocabulary: 17, the policy's: 9"),
        (TOKENS, TOKENS, {"span": 0.5}, r"values -0.5 and 0.5: -?0.25, the policy's: -?0.5\."),
        (
            TOKENS,
            replace(TOKENS, token=replace(TOKENS.token, actions=ActionTokens.FREQUENCIES)),
            {},
            "kind: tokens, freq",
        ),
        (FLOW, TOKENS, {}, "kind: tokens, bins"),
    ],
)
def test_a_teacher_of_other_steps_is_refused_with_the_difference(own, its, given, said):
    for changes in ({}, {"algorithm": "ppo", "advantage": "grpo", "coefficient": "none", "auxiliaries": ("distill",)}):
        with pytest.raises(ConfigError, match=f"(?s){said}.*auxiliaries=.dagger."):
            taught(made(own), made(its, seed=2, **given), **changes)


@pytest.mark.parametrize(
    ("own", "its"),
    [
        (FLOW, FLOW),
        (DIFFUSION, replace(DIFFUSION, prediction=Prediction.EPSILON, width=16)),  # it comes to a clean action as well
        (
            replace(FLOW, likelihood=Likelihood.MATCHING),
            replace(FLOW, likelihood=Likelihood.MATCHING, sampling_steps=8),
        ),
        (TOKENS, replace(TOKENS, token=replace(TOKENS.token, width=16, temperature=2.0))),
    ],
)
def test_a_teacher_of_the_same_steps_is_heard(own, its):
    assert taught(made(own), made(its, seed=2)) == 1


def test_any_teacher_is_imitated_in_what_it_does():
    imitated: dict[str, Any] = {"advantage": "grpo", "coefficient": "none", "auxiliaries": ("dagger",)}
    for teacher in (made(FLOW, span=0.5), made(TOKENS)):
        assert taught(made(FLOW), teacher, algorithm="ppo", **imitated) == 1


def test_policies_that_do_not_describe_their_steps_are_compared_by_number():
    assert difference_of_steps(ChainPolicy(), ChainPolicy(seed=1)) == ""
    assert (
        difference_of_steps(ChainPolicy(), ChainPolicy(steps=3))
        == "its number of steps with log-probabilities: 3, the policy's: 2"
    )
    assert difference_of_steps(ChainPolicy(), made(FLOW)).startswith("ChainPolicy does not describe")
    assert difference_of_steps(made(FLOW), ChainPolicy()).startswith("ChainPolicy does not describe")
