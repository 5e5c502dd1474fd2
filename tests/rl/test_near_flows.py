"""AC-Flow (arXiv:2510.18072) and AFD (arXiv:2605.26105): fine-tuning by matching, credited along the flow."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from made_rollouts import make_rollouts, make_scored
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.extras import Extras
from robopolicy.core.policy import Decision, to_tensors
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import STATE, Field
from robopolicy.policies import DenoisingPolicy
from robopolicy.policies.configuration import DenoisingPolicyConfig, Likelihood, PolicyKind
from robopolicy.rl.context import AuxiliaryInputs, Context, Tools
from robopolicy.rl.experimental import coefficients
from robopolicy.rl.experimental.advantages import discriminator, flow_values
from robopolicy.rl.experimental.forward_process import ActingPolicy, acting_velocity
from robopolicy.rl.experimental.side_models import Discriminator, FlowCritic
from robopolicy.rl.objective import policy_loss
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from bandit_toys import ACTION, FIELDS, BanditWorld, mean_reward

MATCHING = DenoisingPolicyConfig(
    kind=PolicyKind.FLOW,
    likelihood=Likelihood.MATCHING,
    matching_samples=4,
    chunk=1,
    prediction_steps=2,
    width=16,
    depth=1,
    sampling_steps=4,
    finetuned_steps=4,
)


def make(**changes) -> DenoisingPolicy:
    policy = DenoisingPolicy(replace(MATCHING, **changes), FIELDS, ACTION, fps=10.0)
    policy.prepare_finetuning()
    return policy


class Interpolating(nn.Module):
    """x_t = (1 - t) a + t noise, of what its latents hold."""

    scored_by_matching = True

    def __init__(self, chunk: int = 2):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.spec = SimpleNamespace(chunk=chunk, action=Field((1,)))

    def noisy_actions(self, latents):
        time = latents["level"][..., None, None]
        return (1 - time) * latents["action"][:, None] + time * latents["noise"], latents["level"]


def tools(policy: nn.Module, teacher=None) -> Tools:
    def observe(rollouts, where):
        return {STATE: rollouts.observation[STATE][where]}

    return Tools(policy, None, teacher, {STATE: Field((3,))}, 1, ("",), observe, lambda *_: None)  # type: ignore[arg-type]


def with_levels(rollouts, levels: int, seed: int = 0):
    """Rollouts whose decisions are scored at so many levels, evenly from 0 to 1, with the recorded actions."""
    draws = torch.Generator().manual_seed(seed)
    rows, length, steps, size = rollouts.actions.shape
    level = torch.linspace(0, 1, levels).expand(rows, length, levels)
    noise = torch.randn((rows, length, levels, steps, size), generator=draws)
    return replace(rollouts, latents={"action": rollouts.actions, "noise": noise, "level": level.clone()})


def context(seed: int = 0, **changes) -> Context:
    return Context(torch.Generator().manual_seed(seed), **changes)


@pytest.mark.checks("models/flow_critic", "advantage/flow_values", "AC-Flow")
@pytest.mark.parametrize("kind", [PolicyKind.FLOW, PolicyKind.DIFFUSION])
def test_noisy_actions_are_those_that_the_loss_is_taken_at(kind: PolicyKind):
    policy = make(kind=kind)
    inputs: list[Tensor] = []
    plain = policy.network.denoise
    observation = to_tensors(BanditWorld(5).reset(seeds=episode_seeds(0, "x", 5)))
    latents = policy.act(observation, torch.Generator().manual_seed(0)).latents
    policy.network.denoise = lambda x, time, condition: inputs.extend((x, time)) or plain(x, time, condition)
    policy.log_prob(observation, latents)
    noisy, time = policy.noisy_actions(latents)
    assert noisy.shape == (5, 4, 2, 2)
    assert torch.equal(noisy.flatten(0, 1), inputs[0])
    assert torch.equal(time.flatten(), inputs[1])
    assert bool(((time >= 0) & (time <= 1)).all())
    if kind is PolicyKind.FLOW:
        by_hand = (1 - time[..., None, None]) * latents["action"][:, None] + time[..., None, None] * latents["noise"]
        torch.testing.assert_close(noisy, by_hand)


@pytest.mark.checks("models/flow_critic", "advantage/flow_values", "AC-Flow")
def test_the_critic_knows_what_a_noisy_action_tells_of_the_return():
    """Actions are +1 or -1 and so are returns: E[R | x_t] = tanh((1 - t) x_t / t^2), all at t = 0, nothing at t = 1."""
    count = 512
    rollouts = make_rollouts([1] * count, list(range(count)), [0.0] * count)
    sign = torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0)
    rollouts.actions[:] = sign[:, None, None, None]
    rollouts.rewards["reward"][:, 0, 1] = sign
    rollouts.observation[STATE][:] = 0
    torch.manual_seed(0)
    model = FlowCritic(tools(Interpolating(chunk=2)), epochs=4, minibatch=256, width=32, rate=1e-2)
    for call in range(30):
        model.annotate(with_levels(rollouts, 9, call), context(call, discount=1.0))
    annotated_rollouts = model.annotate(with_levels(rollouts, 9, 30), context(30, discount=1.0))
    noisy, time = Interpolating().noisy_actions(
        {name: value[:, 0] for name, value in annotated_rollouts.latents.items()}
    )
    # Two numbers a chunk, both of the same sign: their sum is what the noise leaves of it.
    exact = torch.tanh((1 - time) * noisy.sum((2, 3)) / time.square())
    exact[:, 0] = sign
    torch.testing.assert_close(annotated_rollouts.extras["flow_return"][:, 0], sign)  # the spread of returns is 1
    error = (annotated_rollouts.extras["flow_value"][:, 0] - exact).abs().mean(0)
    assert float(error.max()) < 0.35, error
    ignorant = exact[:, :5].abs().mean(0)
    assert float(ignorant.min()) > 0.8  # by how much a critic of states alone, which says 0, is wrong up to t = .5
    assert float(annotated_rollouts.extras["flow_value"][:, 0, -1].abs().mean()) < 0.2


@pytest.mark.checks("models/flow_critic", "advantage/flow_values", "AC-Flow")
def test_returns_by_hand_bootstrap_from_the_noise_end():
    rollouts = make_rollouts([2, 2], [0, 1], [0.0, 0.0])
    rollouts.rewards["reward"][:, 0, 0], rollouts.rewards["reward"][:, 1, 1] = 1.0, 2.0
    rollouts.terminated[1, 1], rollouts.truncated[1, 1] = False, True
    model = FlowCritic(tools(Interpolating()), epochs=0)
    model.values = lambda observation, noisy, time: torch.where(time == 1, 3.0, -99.0)  # type: ignore[method-assign]
    annotated_rollouts = model.annotate(with_levels(rollouts, 3), context(discount=0.5, gae_lambda=0.5))
    # Two steps a decision, so discount .25 from one to the next; the last reward comes a step late, .5 * 2 = 1.
    #   R_1 = 1 (+ .25 * 3 where a time limit cut the episode); R_0 = 1 + .25 (.5 * 3 + .5 R_1)
    scale = float(model.scale.scale)
    after = scale * 3
    last = torch.tensor([1.0, 1.0 + 0.25 * after])
    first = 1 + 0.25 * (0.5 * after + 0.5 * last)
    torch.testing.assert_close(annotated_rollouts.extras["flow_return"] * scale, torch.stack([first, last], 1))
    assert annotated_rollouts.extras["flow_value"][..., :2].unique().tolist() == [-99.0]
    # The running spread: discounted returns from the beginning are 1 and .25 + 1 = 1.25, each twice.
    assert scale == pytest.approx(0.125)


@pytest.mark.checks("models/flow_critic", "advantage/flow_values", "AC-Flow")
def test_advantages_are_returns_minus_values_of_noisy_actions():
    rollouts = make_rollouts([2, 1], [0, 1])
    value = torch.tensor([[[0.0, 1.0], [2.0, 4.0]], [[1.0, 1.0], [9.0, 9.0]]])
    rollouts = rollouts.with_extras(flow_value=value, flow_return=torch.tensor([[1.0, 2.0], [3.0, 9.0]]))
    advantages = flow_values(rollouts, context())
    raw = torch.tensor([1.0, 0.0, 0.0, -2.0, 2.0, 2.0])
    expected = (raw - 0.5) / raw.std(unbiased=False)
    torch.testing.assert_close(advantages[rollouts.mask], expected)
    assert advantages[1, 1].tolist() == [0.0, 0.0]


def scored_with(advantage: Tensor, logp: Tensor):
    rollouts = make_rollouts([1] * len(advantage), [0] * len(advantage), steps=advantage.shape[-1])
    return make_scored(rollouts, logp, advantage)


@pytest.mark.checks("coefficient/clipped_advantage", "AC-Flow")
def test_weights_of_clipped_advantages_by_hand():
    advantage = torch.tensor([-3.0, -1.0, 0.0, 1.0, 5.0], dtype=torch.float64)[:, None, None]
    scored = scored_with(advantage, torch.zeros_like(advantage))
    coefficient, _ = coefficients.clipped_advantage(scored, limit=2.0, temperature=2.0)
    torch.testing.assert_close(
        coefficient.flatten(), torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0], dtype=torch.float64).exp()
    )
    coefficient, _ = coefficients.clipped_advantage(scored, limit=2.0, temperature=0.5, form="positive")
    assert coefficient.flatten().tolist() == [0.0, 0.0, 0.0, 2.0, 4.0]
    with pytest.raises(ConfigError, match=r"clipped_advantage\.form"):
        coefficients.clipped_advantage(scored, form="linear")


@pytest.mark.checks("coefficient/clipped_advantage", "coefficient/negative_aware", "AC-Flow", "AFD")
@pytest.mark.parametrize(("name", "beta"), [("clipped", 0.0), ("aware", 0.1), ("aware", 1.0), ("aware", 3.0)])
def test_gradients_are_those_of_the_papers_matching_losses(name: str, beta: float):
    """On a real flow policy: AC-Flow's weighted loss, and AFD's loss of a positive and a negative prediction."""
    policy, draws = make(), torch.Generator().manual_seed(0)
    observation = to_tensors(BanditWorld(6).reset(seeds=episode_seeds(0, "x", 6)))
    latents = policy.act(observation, draws).latents
    advantage = 3 * torch.randn((6, 1, 4), generator=draws)
    target = policy.schedule.target(
        latents["action"][:, None].expand(latents["noise"].shape).flatten(0, 1), latents["noise"].flatten(0, 1),
        latents["level"].flatten(),
    ).reshape(6, 4, 2, 2)  # fmt: skip

    def error(prediction: Tensor) -> Tensor:
        return (prediction - target)[:, :, :1].square().mean((2, 3))  # one of two steps is executed

    v = policy.log_prob(observation, latents).extras["mean"]
    if name == "clipped":
        loss = (advantage[:, 0].clamp(-2, 2).exp() * error(v)).sum()
    else:
        fixed, weight = v.detach(), (1 + advantage[:, 0].clamp(-2, 2) / 2) / 2
        positive, negative = (1 - beta) * fixed + beta * v, (1 + beta) * fixed - beta * v
        loss = (2 / beta * (weight * error(positive) + (1 - weight) * error(negative)) / 2).sum()
        loss = 2 * loss  # the docstring's factor
    expected = torch.autograd.grad(loss, policy.trainable_parameters(), allow_unused=True)
    logp = policy.log_prob(observation, latents).logp
    scored = scored_with(advantage, logp[:, None])
    function = {"clipped": coefficients.clipped_advantage, "aware": coefficients.negative_aware}[name]
    c, _ = function(scored, limit=2.0)
    surrogate = policy_loss(logp, c[:, 0], torch.ones_like(logp))
    gradients = torch.autograd.grad(surrogate, policy.trainable_parameters(), allow_unused=True)
    for ours, theirs in zip(gradients, expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert any(part is not None and float(part.abs().max()) > 0 for part in expected)


@pytest.mark.checks("auxiliaries/acting_velocity", "DiffusionNFT")
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_the_gradient_is_that_of_the_loss_around_the_policy_that_acted(beta: float):
    """DiffusionNFT's, times limit / beta, of a policy that has moved since; one step of a row is not executed."""
    acted, draws = make(chunk=2), torch.Generator().manual_seed(0)
    observation = to_tensors(BanditWorld(6).reset(seeds=episode_seeds(0, "x", 6)))
    latents = dict(acted.act(observation, draws).latents)
    latents["executed"] = torch.ones(6, 2, dtype=torch.bool)
    latents["executed"][3, 1] = False
    model = ActingPolicy(tools(acted))
    model.annotate(None, context())  # type: ignore[arg-type]
    policy = acted
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=draws))
    advantage, limit = 3 * torch.randn((6, 4), generator=draws), 2.0
    target = policy.schedule.target(
        latents["action"][:, None].expand(latents["noise"].shape).flatten(0, 1), latents["noise"].flatten(0, 1),
        latents["level"].flatten(),
    ).reshape(6, 4, 2, 2)  # fmt: skip

    def error(prediction: Tensor) -> Tensor:
        each = (prediction - target).square().mean(3)
        return torch.where(torch.arange(6)[:, None] == 3, each[..., 0], each.mean(-1))

    v = policy.log_prob(observation, latents).extras["mean"]
    fixed = model.copy.log_prob(observation, latents).extras["mean"].detach()
    assert not torch.allclose(v, fixed, atol=1e-2)
    weight = (1 + advantage.clamp(-limit, limit) / limit) / 2
    positive, negative = (1 - beta) * fixed + beta * v, (1 + beta) * fixed - beta * v
    loss = limit / beta * (weight * error(positive) + (1 - weight) * error(negative)).mean()
    expected = torch.autograd.grad(loss, policy.trainable_parameters(), allow_unused=True)

    scores = policy.log_prob(observation, latents)
    inputs = AuxiliaryInputs(
        observation, latents, torch.ones(6, 4, dtype=torch.bool), scores, policy, context(),
        models={"acting_policy": model}, extras=Extras.of({"advantage": advantage}),
    )  # fmt: skip
    c, _ = coefficients.negative_aware(scored_with(advantage[:, None], scores.logp.detach()[:, None]), limit=limit)
    part = acting_velocity(inputs, beta=beta, limit=limit)
    ours = policy_loss(scores.logp, c[:, 0], torch.full((6, 4), 1 / 24), {"acting_velocity": part})
    gradients = torch.autograd.grad(ours, policy.trainable_parameters(), allow_unused=True)
    for gradient, theirs in zip(gradients, expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(gradient, theirs, atol=1e-5, rtol=1e-4)
    assert any(part is not None and float(part.abs().max()) > 0 for part in expected)


@pytest.mark.checks("models/acting_policy", "DiffusionNFT")
def test_a_run_learns_around_the_policy_that_acted():
    policy = make()
    config = FinetuneConfig(
        algorithm="grpo", coefficient="negative_aware", weight="step_mean", models=("acting_policy",),
        auxiliaries=("acting_velocity",), iterations=2, groups=4, group_size=4, epochs=2, minibatch=16,
        evaluate_every=0, target_kl=None,
    )  # fmt: skip
    finetune(policy, None, BanditWorld(8), config)
    assert all(bool(weight.isfinite().all()) for weight in policy.parameters())
    with pytest.raises(ConfigError, match="likelihood=matching"):
        finetune(make(likelihood=Likelihood.CHAIN, matching_samples=1), None, BanditWorld(8), config)


@pytest.mark.checks("coefficient/negative_aware", "AFD")
def test_what_was_worse_than_the_mean_is_unlearned_as_strongly_as_the_better_is_learned():
    advantage = torch.tensor([-9.0, -1.0, 0.0, 1.0, 9.0])[:, None, None]
    coefficient, _ = coefficients.negative_aware(scored_with(advantage, torch.zeros_like(advantage)))
    assert coefficient.flatten().tolist() == [-5.0, -1.0, 0.0, 1.0, 5.0]


@pytest.mark.checks("models/discriminator", "advantage/discriminator", "AFD")
def test_the_discriminators_difference_becomes_the_log_ratio_of_the_densities():
    """One state, three actions: the teacher takes them with 1/2, 1/4, 1/4, the student with 1/4, 1/4, 1/2."""

    class Teaching(nn.Module):
        def act(self, observation, generator, *, deterministic=False) -> Decision:
            action = torch.tensor([-1.0, -1.0, 0.0, 1.0]).repeat(len(observation[STATE]) // 4)
            return Decision(action[:, None, None].expand(-1, 2, 1))

    count = 64
    rollouts = make_rollouts([1] * count, list(range(count)))
    # All sixteen pairs of a teacher's and a student's action come up equally often.
    mine = torch.tensor([-1.0, 0.0, 1.0, 1.0]).repeat_interleave(4).repeat(count // 16)
    rollouts.actions[:] = mine[:, None, None, None]
    rollouts.observation[STATE][:] = 0
    torch.manual_seed(0)
    model = Discriminator(tools(Interpolating(), Teaching()), epochs=150, minibatch=count, width=16, rate=2e-2, draws=0)
    annotated_rollouts = model.annotate(rollouts, context())
    preference = annotated_rollouts.extras["preference"][:, 0]
    at = [float(preference[mine == action][0]) for action in (-1.0, 0.0, 1.0)]
    # log(p_T / p_S) is log 2, 0, -log 2 for the three; only differences are determined.
    assert at[0] - at[1] == pytest.approx(0.6931, abs=0.05)
    assert at[1] - at[2] == pytest.approx(0.6931, abs=0.05)
    advantage = discriminator(annotated_rollouts, context())[:, 0]
    expected = (preference - preference.mean()) / preference.std(unbiased=False)
    torch.testing.assert_close(advantage, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.checks("models/discriminator", "AFD")
def test_a_chunk_is_compared_with_others_of_its_state_by_the_discriminator():
    """D = 10 s + the sum of a chunk's actions: pairs of one state say nothing of the 10, which must not count."""

    class Acting(nn.Module):
        answers = iter((0.0, 1.0, 0.5, 0.5) * 2)

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))
            self.spec = SimpleNamespace(chunk=2, action=Field((1,)))

        def act(self, observation, generator, *, deterministic=False) -> Decision:
            return Decision(torch.full((len(observation[STATE]), 2, 1), next(self.answers)))

    rollouts = make_rollouts([1, 1, 1, 1], [0, 1, 2, 3])
    rollouts.observation[STATE][:] = torch.tensor([0.0, 0.0, 3.0, 3.0])[:, None, None, None]
    rollouts.actions[:] = torch.tensor([0.0, 1.0, 0.0, 1.0])[:, None, None, None]
    model = Discriminator(tools(Acting(), Acting()), epochs=0)
    model.network.forward = lambda state, action: (10 * state[STATE][:, -1, :1] + action.sum(-1, keepdim=True)).float()
    Acting.answers = iter((9.0, 0.0, 1.0, 0.5, 0.5))  # the teacher's, then four of the student: their mean is .5
    annotated_rollouts = model.annotate(rollouts, context())
    assert annotated_rollouts.extras["preference"][:, 0].tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0])
    assert discriminator(annotated_rollouts, context())[:, 0].tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0])


CONFIG = FinetuneConfig(
    iterations=2, rollout_length=2, groups=2, group_size=2, epochs=1, minibatch=64, critic_warmup=1,
    evaluate_every=0, checkpoint_every=1, target_kl=None,
)  # fmt: skip


def started(name: str, policy: DenoisingPolicy, folder: Path | None = None, **changes) -> DenoisingPolicy:
    guidance = Guidance(make() if name == "afd" else None)
    run = None if folder is None else RunFolder(folder)
    finetune(policy, None, BanditWorld(8), replace(CONFIG, algorithm=name, **changes), run, guidance=guidance)
    return policy


@pytest.mark.checks("models/flow_critic", "coefficient/negative_aware", "AC-Flow", "AFD")
@pytest.mark.parametrize("name", ["ac_flow", "afd", "fpo"])
def test_a_policy_that_is_not_trained_by_matching_is_refused_and_told_the_setting(name: str):
    with pytest.raises(
        ConfigError, match=r"needs log-probabilities computed by denoising the action itself .*likelihood=matching"
    ):
        started(name, make(likelihood=Likelihood.CHAIN))


@pytest.mark.parametrize(("changes", "text"), [
    ({"auxiliaries": ("spo",), "models": ("q_ensemble",)}, "partial denoising chain .*likelihood=chain"),
    ({"coefficient": "grpo_guard"}, "mean of every denoising step under the acting policy .*likelihood=chain"),
])  # fmt: skip
def test_what_needs_a_chain_is_refused_where_decisions_are_scored_by_matching(changes: dict, text: str):
    with pytest.raises(ConfigError, match=text):
        started("grpo", make(), **changes)


@pytest.mark.checks("models/flow_critic", "advantage/flow_values", "AC-Flow")
def test_the_policy_waits_until_the_critic_of_noisy_actions_is_warm():
    before = [weight.detach().clone() for weight in make().trainable_parameters()]
    waited = started("ac_flow", make(), iterations=1).trainable_parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, waited, strict=True))
    moved = started("ac_flow", make()).trainable_parameters()
    assert not all(torch.equal(a, b) for a, b in zip(before, moved, strict=True))


@pytest.mark.checks("models/flow_critic", "AC-Flow")
def test_a_resumed_run_ends_the_same(tmp_path: Path):
    whole = started("ac_flow", make(), tmp_path / "whole", iterations=3)
    started("ac_flow", make(), tmp_path / "parts", iterations=2)
    again = started("ac_flow", make(), tmp_path / "parts", iterations=3)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.checks("AFD")
def test_a_student_comes_to_act_like_a_teacher_of_which_it_sees_actions_alone():
    class Teacher:
        spec = make().spec

        def act(self, observation, generator, *, deterministic=False) -> Decision:
            return Decision(observation[STATE][:, -1:].float() + torch.tensor([0.5, -0.5]))

        def reset(self, rows=None) -> None:
            pass

    policy = make(width=32)
    before = mean_reward(policy, True)["reward"]  # minus the squared distance from what the teacher does
    config = replace(CONFIG, algorithm="afd", iterations=30, rollout_length=8, epochs=4, minibatch=256)
    config = replace(config, learning_rate=1e-3, target_kl=0.1)
    finetune(policy, None, BanditWorld(64), config, guidance=Guidance(Teacher()))  # type: ignore[arg-type]
    assert mean_reward(policy, True)["reward"] > before / 2
