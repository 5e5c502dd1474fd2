"""Real-time chunking: its weights, its correction against closed forms and LeRobot's, and what it does to a policy."""

import math

import pytest
import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import STATE, Field
from robopolicy.inference.chunking import Delay, RunningPlan, with_chunking
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.engine import with_engine
from robopolicy.inference.rtc import (
    Guidance,
    GuidedSteps,
    Mask,
    continue_plan,
    guidance_gains,
    noise_levels,
    prefix_weights,
)
from robopolicy.nn.configuration import DenoiserKind, Prediction
from robopolicy.nn.denoisers import draw_counts, with_prefix
from robopolicy.nn.schedules import DiffusionSchedule, FlowSchedule, NoiseSchedule
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig, load_policy
from robopolicy.policies.configuration import PolicyKind
from robopolicy.training.configuration import DistillConfig
from robopolicy.training.distill import Distillation

ROWS, STEPS, SIZE = 3, 4, 2


def test_the_weights_are_those_of_the_paper():
    # P = 8, s = 2, d = 2: c = (6 - i) / 5 = .8, .6, .4, .2 for i = 2 ... 5.
    falling = [c * (math.exp(c) - 1) / (math.e - 1) for c in (0.8, 0.6, 0.4, 0.2)]
    assert prefix_weights(2, 6, 8).tolist() == pytest.approx([1, 1, *falling, 0, 0])
    assert falling == pytest.approx([0.5706, 0.2871, 0.1145, 0.0258], abs=1e-4)
    assert prefix_weights(2, 6, 8, Mask.LINEAR).tolist() == pytest.approx([1, 1, 0.8, 0.6, 0.4, 0.2, 0, 0])
    assert prefix_weights(2, 6, 8, Mask.ZEROS).tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert prefix_weights(2, 6, 8, Mask.ONES).tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert prefix_weights(3, 3, 5).tolist() == [1, 1, 1, 0, 0]  # a delay of the whole overlap
    assert prefix_weights(0, 0, 3).tolist() == [0, 0, 0]


class Affine:
    """`Steps` whose clean estimate is x M + m: that of Gaussian data, where M is symmetric, and of no other."""

    def __init__(self, schedule: NoiseSchedule, seed: int = 0):
        draws, size = torch.Generator().manual_seed(seed), STEPS * SIZE
        self.schedule = schedule
        self.matrix = 0.4 * torch.randn(size, size, generator=draws)
        self.offset = torch.randn(size, generator=draws)

    def clean(self, x: Tensor) -> Tensor:
        return (x.flatten(1) @ self.matrix + self.offset).view(x.shape)

    def one(self, x: Tensor, step: int) -> Tensor:
        a, b = self.schedule.table[step, :2]
        return (self.clean(x) - a * x) / b

    def several(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        return torch.stack([self.one(x[:, k], k) for k in range(x.shape[1])], 1)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def guidance(**settings) -> Guidance:
    weights = torch.tensor([1.0, 0.6, 0.2, 0.0]).expand(ROWS, -1)[..., None]
    return Guidance(**{"target": drawn(2, ROWS, STEPS, SIZE), "weights": weights, "strongest": 5.0, **settings})


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_flow_is_corrected_by_the_papers_formula(step: int):
    schedule = FlowSchedule(5)
    steps, guided = Affine(schedule), guidance()
    x = drawn(1, ROWS, STEPS, SIZE)
    # The paper's time is 0 at noise; its velocity points to the data, ours away from it. J = M.
    tau = 1 - step_time(schedule, step)
    r2 = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
    weight = min(5.0, (1 - tau) / (tau * r2) if tau else math.inf)
    error = guided.weights * (guided.target - steps.clean(x))
    pull = (error.flatten(1) @ steps.matrix.T).view(x.shape)
    velocity = -steps.one(x, step) + weight * pull
    assert torch.allclose(GuidedSteps(steps, schedule, guided).one(x, step), -velocity, atol=2e-5)


def step_time(schedule: NoiseSchedule, step: int) -> float:
    return float(schedule.times[step])


@pytest.mark.parametrize("prediction", list(Prediction))
@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_diffusion_is_corrected_by_its_posteriors_closed_form(prediction: Prediction, step: int):
    """clean + (1 - alpha) / sqrt(alpha) r^-2 M^T W error, r^2 = 1 - alpha (unit variance), unless beta bounds it."""
    schedule = DiffusionSchedule(100, 7, prediction, clip=None)
    steps, guided = Affine(schedule), guidance(strongest=1e9)
    x = drawn(1, ROWS, STEPS, SIZE)
    alpha = schedule.alphas[round(step_time(schedule, step) * 100) - 1]
    error = guided.weights * (guided.target - steps.clean(x))
    r2 = 1 - alpha
    expected = steps.clean(x) + (1 - alpha) / alpha.sqrt() / r2 * (error.flatten(1) @ steps.matrix.T).view(x.shape)
    estimate = schedule.clean_estimate(x, GuidedSteps(steps, schedule, guided).one(x, step), step)
    assert torch.allclose(estimate, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    bounded = schedule.clean_estimate(x, GuidedSteps(steps, schedule, guidance(strongest=0.01)).one(x, step), step)
    assert (bounded - steps.clean(x)).norm() < 0.1 * (expected - steps.clean(x)).norm()


def test_a_diffusion_is_the_flow_of_the_same_noise():
    """One network of x / (signal + noise): both chains are corrected to the same clean estimate, beta included."""
    flow, diffusion = FlowSchedule(4), DiffusionSchedule(100, 4)
    levels = noise_levels(diffusion)
    step = 1
    signal, noise = levels[step].tolist()
    flow.times[step] = noise / (signal + noise)
    flow.table[step, 1] = flow.deterministic_table[step, 1] = -flow.times[step]
    x = drawn(1, ROWS, STEPS, SIZE)
    of_flow, of_diffusion = Affine(flow), Affine(diffusion)
    of_diffusion.matrix = of_flow.matrix / (signal + noise)
    for strongest in (0.5, 1e9):
        guided = guidance(strongest=strongest)
        one = flow.clean_estimate(x, GuidedSteps(of_flow, flow, guided).one(x, step), step)
        scaled = (signal + noise) * x
        other = GuidedSteps(of_diffusion, diffusion, guided).one(scaled, step)
        assert torch.allclose(one, diffusion.clean_estimate(scaled, other, step), atol=1e-4)


def test_gains_are_finite_where_only_noise_is_left():
    assert guidance_gains(torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64), 5.0).tolist() == [5.0, 0.0]


@pytest.mark.parametrize("step", [0, 2, 4])
@pytest.mark.parametrize("beta", [10.0, 1.5])
def test_without_the_jacobian_it_is_lerobots(step: int, beta: float):
    rtc = pytest.importorskip("lerobot.policies.rtc.modeling_rtc")
    from lerobot.configs import RTCAttentionSchedule
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

    schedule, delay, overlap = FlowSchedule(5), 1, 3
    steps, x, left = Affine(schedule), drawn(1, ROWS, STEPS, SIZE), drawn(2, ROWS, STEPS - 1, SIZE)
    config = RTCConfig(prefix_attention_schedule=RTCAttentionSchedule.EXP, max_guidance_weight=beta)
    theirs = rtc.RTCProcessor(config).denoise_step(
        x, left, delay, schedule.times[step], lambda latents: steps.one(latents, step), execution_horizon=overlap
    )
    target = torch.nn.functional.pad(left, (0, 0, 0, 1))
    weights = prefix_weights(delay, overlap, STEPS).expand(ROWS, -1)[..., None]
    ours = GuidedSteps(steps, schedule, Guidance(target, weights, beta, jacobian=False)).one(x, step)
    assert torch.allclose(ours, theirs, atol=1e-5)
    with_jacobian = GuidedSteps(steps, schedule, Guidance(target, weights, beta)).one(x, step)
    assert not torch.allclose(with_jacobian, theirs, atol=1e-2)


def made(kind: PolicyKind, **settings) -> DenoisingPolicy:
    config = DenoisingPolicyConfig(
        kind=kind, width=48, depth=2, sampling_steps=6, denoising_steps=30, chunk=4, prediction_steps=8, **settings
    )
    return DenoisingPolicy(config, {STATE: Field((1,))}, Field((1,), low=-1.0, high=1.0), fps=10)


@pytest.mark.parametrize("kind", [PolicyKind.FLOW, PolicyKind.DIFFUSION])
@pytest.mark.parametrize("name", ["rtc", "lerobot_rtc"])
def test_where_nothing_overlaps_the_plan_is_the_unguided_one(kind: PolicyKind, name: str):
    policy = made(kind)
    delayed = with_chunking(policy, name, Delay(2))
    observation = {STATE: drawn(3, ROWS, 1, 1)}
    draws = torch.Generator().manual_seed(0)
    delayed.reset()
    delayed.act(observation, draws)
    delayed.reset([0, 2])  # their episodes begin: only row 1 has a plan to go on with
    before = draws.get_state()
    guided = delayed.act(observation, draws).actions
    draws.set_state(before)
    free = policy.predict(observation, draws)
    assert torch.equal(guided[[0, 2], 2:], free[[0, 2], :2])
    assert not torch.allclose(guided[1, 2:], free[1, 2:4], atol=1e-3)
    assert all(weight.grad is None for weight in policy.parameters())


def trained(policy: DenoisingPolicy, draws: torch.Generator, steps: int = 250) -> DenoisingPolicy:
    """Two ways around an obstacle, up or down."""
    optimiser = torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(steps):
        way = torch.randint(2, (64, 1, 1), generator=draws) * 2.0 - 1
        actions = 0.6 * way + 0.05 * torch.randn(64, 8, 1, generator=draws)
        batch = {"observation": {STATE: torch.zeros(64, 1, 1)}, "actions": actions.clamp(-1, 1)}
        loss = policy.loss({**batch, "action_valid": torch.ones(64, 8, dtype=torch.bool)}, draws)["denoising"].mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return policy


def border(policy: DenoisingPolicy, name: str, draws: torch.Generator) -> tuple[float, float]:
    """Return how often the second plan takes the other way than the first, and the mean jump between them."""
    observation, delayed = {STATE: torch.zeros(256, 1, 1)}, with_chunking(policy, name, Delay(2))
    delayed.reset()
    delayed.act(observation, draws, deterministic=True)
    chunk = delayed.act(
        observation, draws, deterministic=True
    ).actions  # two steps of the first plan, two of the second
    assert 0.3 < float((chunk[:, 0] > 0).float().mean()) < 0.7
    crossed = (chunk[:, 1].sign() != chunk[:, 2].sign()).float().mean()
    return float(crossed), float((chunk[:, 2] - chunk[:, 1]).abs().mean())


@pytest.mark.parametrize("kind", [PolicyKind.FLOW, PolicyKind.DIFFUSION])
def test_a_trained_policy_goes_on_as_it_began(kind: PolicyKind):
    """A new plan chosen blindly crosses over every other time."""
    draws = torch.Generator().manual_seed(0)
    policy = trained(made(kind), draws)
    (crossed_blindly, jump_blindly), (crossed, jump) = (border(policy, name, draws) for name in ("prefetch", "rtc"))
    assert crossed_blindly > 0.35 and crossed < 0.5 * crossed_blindly
    assert jump < 0.5 * jump_blindly


def test_a_policy_that_was_trained_to_continue_does_so_unguided():
    draws = torch.Generator().manual_seed(0)
    policy = trained(made(PolicyKind.FLOW, prefix_steps=2), draws)
    (crossed_blindly, jump_blindly), (crossed, jump) = (
        border(policy, name, draws) for name in ("prefetch", "trained_rtc")
    )
    assert crossed_blindly > 0.35 and crossed < 0.25 * crossed_blindly
    assert jump < 0.5 * jump_blindly


@pytest.mark.long
@pytest.mark.parametrize("steps", [1, 2])
def test_what_is_distilled_from_it_continues_too(steps: int):
    draws = torch.Generator().manual_seed(0)
    teacher = trained(made(PolicyKind.FLOW, prefix_steps=2), draws)
    lesson, observation = Distillation(teacher, DistillConfig(steps=steps)), {STATE: torch.zeros(128, 1, 1)}
    optimiser = torch.optim.Adam(lesson.parameters(), 3e-3)
    for _ in range(200):
        optimiser.zero_grad()
        lesson.loss({"observation": observation}, draws)["distance"].mean().backward()
        optimiser.step()
    rest = torch.tensor([0.6, -0.6]).repeat_interleave(4).view(2, 4, 1).repeat(32, 1, 1)
    underway, observation = RunningPlan(rest, torch.ones(64, dtype=torch.int64), 2, 4), {STATE: torch.zeros(64, 1, 1)}
    behind = [
        continue_plan(each, observation, torch.Generator().manual_seed(3), underway, deterministic=True)[:, 2:]
        for each in (teacher, lesson.student)
    ]
    assert (behind[0] - behind[1]).square().mean().sqrt() < 0.08  # .24 and .12 where it was never given any


def test_steps_that_are_given_stay_in_the_plan_as_they_were_given():
    """A robot that is answered sooner than it expected executes some of them."""
    policy = trained(made(PolicyKind.FLOW, prefix_steps=3), torch.Generator().manual_seed(0), steps=20)
    rest = torch.tensor([[0.6, 0.5, 0.4, 0.3], [-0.6, -0.5, -0.4, -0.3]])[..., None]
    underway = RunningPlan(rest, torch.tensor([1, 0]), delay=3, chunk=4)
    observation, draws = {STATE: torch.zeros(2, 1, 1)}, torch.Generator().manual_seed(0)
    plan = continue_plan(policy, observation, draws, underway, deterministic=True)
    assert torch.equal(plan[0, :3], rest[0, :3]) and not torch.allclose(plan[0, 3], rest[0, 3])
    free = policy.predict(observation, torch.Generator().manual_seed(0), deterministic=True)
    assert torch.equal(plan[1], free[1])  # nothing is underway there


@pytest.mark.parametrize("denoiser", list(DenoiserKind))
def test_given_steps_are_taken_as_they_are_and_cost_nothing(denoiser: DenoiserKind, tmp_path):
    policy = made(PolicyKind.FLOW, prefix_steps=3, denoiser=denoiser)
    x, clean, count = drawn(1, ROWS, 8, 1), drawn(2, ROWS, 8, 1), torch.tensor([0, 1, 3])
    told = with_prefix(x, clean, count)
    assert torch.equal(told[..., 1].sum(1), count.float())
    assert torch.equal(told[0, :, 0], x[0, :, 0]) and torch.equal(told[2, :3, 0], clean[2, :3, 0])
    assert torch.equal(told[2, 3:, 0], x[2, 3:, 0])
    observation = policy.encode({STATE: torch.zeros(ROWS, 1, 1)})
    predict = lambda latents: policy.network.denoise(latents, torch.full((ROWS,), 0.5), observation)  # noqa: E731
    assert predict(told).shape == (ROWS, 8, 1)
    assert torch.equal(predict(x), predict(with_prefix(x, clean, torch.zeros_like(count))))  # nothing is given
    # Only the first step is valid, and it is given in three of four samples: those have nothing to learn.
    valid = torch.zeros(400, 8, dtype=torch.bool)
    valid[:, 0] = True
    batch = {"observation": {STATE: torch.zeros(400, 1, 1)}, "actions": torch.zeros(400, 8, 1), "action_valid": valid}
    losses = policy.loss(batch, torch.Generator().manual_seed(0))["denoising"]
    assert 0.68 < float((losses == 0).float().mean()) < 0.82
    policy.save(tmp_path / "policy")
    again = load_policy(tmp_path / "policy")
    acting = [each.act({STATE: torch.zeros(2, 1, 1)}, torch.Generator().manual_seed(0)) for each in (policy, again)]
    assert torch.equal(acting[0].actions, acting[1].actions)


def test_long_prefixes_are_as_rare_as_they_are_said_to_be():
    draws = torch.Generator().manual_seed(0)
    for decay, expected in ((0.0, [0.25] * 4), (1.0, [0.6439, 0.2369, 0.0871, 0.0321])):  # exp(-n) / 1.5530
        counts = torch.bincount(draw_counts(100_000, 3, decay, draws), minlength=4) / 100_000
        torch.testing.assert_close(counts, torch.tensor(expected), atol=0.005, rtol=0)
    same = [
        torch.randint(4, (9,), generator=torch.Generator().manual_seed(1)),
        draw_counts(9, 3, 0.0, draws.manual_seed(1)),
    ]
    assert torch.equal(*same)  # what was trained without it is trained the same
    # Only the first step is valid: what is learned is what gives none of it.
    valid = torch.zeros(400, 8, dtype=torch.bool)
    valid[:, 0] = True
    batch = {"observation": {STATE: torch.zeros(400, 1, 1)}, "actions": torch.zeros(400, 8, 1), "action_valid": valid}
    losses = made(PolicyKind.FLOW, prefix_steps=3, prefix_decay=1.0).loss(batch, draws)["denoising"]
    assert 0.28 < float((losses == 0).float().mean()) < 0.44


def test_what_was_not_trained_to_continue_is_refused():
    with pytest.raises(ConfigError, match="prefix_steps=2 or more"):
        with_chunking(made(PolicyKind.FLOW, prefix_steps=1), "trained_rtc", Delay(2))
    with pytest.raises(ConfigError, match="must be from 0 to 4"):
        made(PolicyKind.FLOW, prefix_steps=5)
    with pytest.raises(ConfigError, match="prefix_decay=-1"):
        made(PolicyKind.FLOW, prefix_steps=2, prefix_decay=-1.0)


@pytest.mark.parametrize("chunking", ["trained_rtc", "rtc"])
def test_a_policy_that_an_engine_computes_is_refused_for_that(chunking: str):
    """Not because it had learned nothing: it has."""
    lean = with_engine(made(PolicyKind.FLOW, prefix_steps=2), InferenceConfig("lean"))
    with pytest.raises(ConfigError, match=r"this is a LeanDenoising: .* set engine=reference"):
        with_chunking(lean, chunking, Delay(2))
