"""Flow policies: one noisy step among noise-free ones, learned noise, and scores by flow matching."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from robopolicy.core.errors import RobopolicyWarning
from robopolicy.core.policy import to_tensors
from robopolicy.core.randomness import episode_seeds
from robopolicy.nn.configuration import FlowNoise
from robopolicy.policies import DenoisingPolicy, load_policy
from robopolicy.policies.configuration import DenoisingPolicyConfig, Likelihood, PolicyKind
from robopolicy.rl.critic import state_critic
from robopolicy.rl.presets import RatioLevel
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from bandit_toys import ACTION, FIELDS, BanditWorld, mean_reward

FLOW = DenoisingPolicyConfig(
    kind=PolicyKind.FLOW,
    chunk=1,
    prediction_steps=2,
    width=32,
    depth=1,
    sampling_steps=4,
    finetuned_steps=4,
    min_sampling_std=0.0,
    flow_noise_bounds=(0.1, 0.4),
)
MODES = {
    "flow-SDE with one noisy step": replace(FLOW, flow_noise=FlowNoise.SDE, flow_noise_level=0.5, noisy_steps=1),
    "two noisy steps": replace(FLOW, flow_noise_level=0.3, noisy_steps=2),
    "learned noise": replace(FLOW, flow_noise=FlowNoise.LEARNED),
    "flow matching": replace(FLOW, likelihood=Likelihood.MATCHING, matching_samples=6),
    "diffusion matching": replace(
        FLOW, kind=PolicyKind.DIFFUSION, likelihood=Likelihood.MATCHING, min_sampling_std=0.1
    ),
}


def make(config: DenoisingPolicyConfig, prepared: bool = True):
    policy = DenoisingPolicy(config, FIELDS, ACTION, fps=10.0)
    if prepared:
        policy.prepare_finetuning()
    return policy


def observed(rows: int = 16):
    return to_tensors(BanditWorld(rows).reset(seeds=episode_seeds(0, "x", rows)))


@pytest.mark.parametrize("name", MODES)
def test_sampling_and_scoring_agree_to_1e5_and_survive_a_checkpoint(name: str, tmp_path: Path):
    policy, observation = make(MODES[name]), observed()
    decision = policy.act(observation, torch.Generator().manual_seed(0))
    scores = policy.log_prob(observation, decision.latents)
    assert decision.logp.shape == decision.mask.shape == (16, policy.spec.scored_steps)
    difference = torch.where(decision.mask, scores.logp.detach() - decision.logp, 0.0)
    assert float(difference.abs().max()) < 1e-5
    assert scores.logp.requires_grad
    policy.save(tmp_path / "saved")
    again = load_policy(tmp_path / "saved").act(observation, torch.Generator().manual_seed(0))
    assert torch.equal(again.actions, decision.actions)
    assert torch.equal(again.logp, decision.logp)


def test_so_many_random_steps_are_choices_and_the_others_follow_the_ode():
    policy, observation = make(MODES["two noisy steps"]), observed(256)
    decision = policy.act(observation, torch.Generator().manual_seed(0))
    assert decision.mask.sum(1).eq(2).all()
    assert decision.mask.float().mean(0).sub(0.5).abs().max() < 0.15
    scores = policy.log_prob(observation, decision.latents)
    moved = (decision.latents["chain"][:, 1:] - scores.extras["mean"]).detach().abs().amax((2, 3))
    assert float(moved[~decision.mask].max()) < 1e-5  # constant noise does not bend the mean
    assert float(moved[decision.mask].min()) > 0


def test_an_sde_step_is_masked_at_the_clean_end():
    decision = make(MODES["flow-SDE with one noisy step"]).act(observed(64), torch.Generator().manual_seed(0))
    assert decision.mask.sum(1).eq(1).all()
    assert not decision.mask[:, -1].any()


def test_noise_is_learned_within_its_bounds():
    policy, observation = make(MODES["learned noise"]), observed()
    head = policy.network.noise_head
    assert head is not None
    decision = policy.act(observation, torch.Generator().manual_seed(0))
    scores = policy.log_prob(observation, decision.latents)
    assert scores.extras["std"].detach().sub(0.25).abs().max() < 1e-6  # begins in the middle
    scores.logp.sum().backward()
    assert float(head.layers[-1].bias.grad.abs().max()) > 0
    with torch.no_grad():
        head.layers[-1].bias.fill_(100.0)
    with torch.no_grad():
        loud = policy.log_prob(observation, decision.latents)
    assert float(loud.extras["std"].max()) == pytest.approx(0.4)
    assert float(loud.entropy.mean()) > float(scores.entropy.detach().mean())
    assert scores.entropy.requires_grad


def test_deterministic_decisions_are_no_choices():
    for config in MODES.values():
        decision = make(config).act(observed(), torch.Generator().manual_seed(0), deterministic=True)
        assert not decision.mask.any()
        assert not decision.logp.any()


SETTINGS = FinetuneConfig(
    algorithm="grpo",
    iterations=40,
    groups=16,
    group_size=8,
    epochs=4,
    minibatch=256,
    learning_rate=3e-3,
    clip=0.2,
    target_kl=None,
    evaluate_every=0,
)
TRAINED = {
    "flow-SDE with one noisy step": ("flow-SDE with one noisy step", {}),
    "learned noise": ("learned noise", {"ratio_level": RatioLevel.DECISION_MEAN}),
    "FPO": ("flow matching", {"ratio_level": RatioLevel.DECISION_MEAN, "clip": 0.05}),
    "AC-Flow": (
        "flow matching",
        {"algorithm": "ac_flow", "rollout_length": 8, "options": {"velocity": {"weight": 0.01}}},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if name == "FPO" else pytest.param(name, marks=pytest.mark.slow) for name in TRAINED]
)
def test_fine_tuning_improves(name: str):
    mode, changes = TRAINED[name]
    policy = make(MODES[mode])
    before = mean_reward(policy, True)["reward"]
    torch.manual_seed(0)
    critic = state_critic(FIELDS, 1, width=16)
    finetune(policy, critic, BanditWorld(64), replace(SETTINGS, **changes), seed=0)
    assert mean_reward(policy, True)["reward"] > before / 2, before


@pytest.mark.parametrize("name", ["min_sampling_std", "min_logprob_std"])
def test_learned_noise_that_cannot_change_is_noted(name: str):
    """The recipes' minimum, 0.3, is above the upper bound of learned noise: its entropy had no gradient."""
    with pytest.warns(RobopolicyWarning, match=r"its upper bound, 0\.4 .* is not above 0\.5"):
        policy = make(replace(MODES["learned noise"], **{name: 0.5}))
    observation = observed()
    decision = policy.act(observation, torch.Generator().manual_seed(0))
    entropy = policy.log_prob(observation, decision.latents).entropy.sum()
    noise = policy.network.noise_head.layers[-1].weight
    assert torch.autograd.grad(entropy, noise, allow_unused=True)[0].abs().max() == 0
