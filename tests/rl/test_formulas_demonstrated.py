"""Losses on demonstrated actions that a policy can score, and judges of rollouts: hand tables and derivatives."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from made_rollouts import make_rollouts
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Scores, recovers_latents
from robopolicy.core.spec import STATE, Field
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.policies.configuration import Likelihood, PolicyKind
from robopolicy.rl.context import AuxiliaryInputs, Context
from robopolicy.rl.experimental import demonstrated, distillation, judges

SPEC = SimpleNamespace(chunk=2, categorical=True, steps_per_action=1, scored_steps=2)


class Speaker:
    """Says the same distribution of 3 tokens at both steps, and recovers tokens from actions."""

    spec = SPEC

    def __init__(self, logits: Tensor):
        self.logits = logits

    def steps_of(self, actions: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {"tokens": actions[..., 0].long()}

    def log_prob(self, observation, latents) -> Scores:
        logp = self.logits.log_softmax(-1).expand(*latents["tokens"].shape, 3)
        chosen = logp.gather(-1, latents["tokens"][..., None]).squeeze(-1)
        return Scores(chosen, chosen, {"log_probabilities": logp})


def inputs_of(policy, base=None) -> AuxiliaryInputs:
    """Experts who say token 0, and nothing after the first step."""
    batch = {"observation": {}, "actions": torch.zeros(1, 3, 1), "action_valid": torch.tensor([[True, False, False]])}
    empty = torch.zeros(1, 2)
    context = Context(torch.Generator().manual_seed(0))
    return AuxiliaryInputs(
        {}, {}, empty.bool(), Scores(empty, empty), policy, context, base=base, experts=iter([batch] * 9)
    )


@pytest.mark.checks("auxiliaries/one_step", "OTR")
def test_imitation_by_one_token_rollouts_is_weighed_by_the_tokens_probability():
    """p = .5, .3, .2, the first is demonstrated, beta = -.1: the gradient by logits is -1.1 * .5 (e - p)."""
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().requires_grad_()
    loss = demonstrated.one_step(inputs_of(Speaker(logits)), weight=2.0, draws=200_000, beta=-0.1)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient / 2).tolist() == pytest.approx([-0.275, 0.165, 0.11], abs=0.004)


@pytest.mark.checks("auxiliaries/f_imitation", "SFT-DPO-unified")
@pytest.mark.parametrize(
    ("form", "values", "slopes"),
    [
        ("total_variation", (0, 0.5, 1), (1, 1, 1)),
        ("pearson", (0, 0.4375, 0.75), (1, 0.75, 0.5)),
        ("hellinger", (0, 0.3333, 0.5), (1, 0.4444, 0.25)),
        ("jensen_shannon", (0, 0.3318, 0.4899), (1, 0.4353, 0.2254)),
    ],
)
def test_the_pull_of_a_demonstration_falls_the_further_it_has_risen(form: str, values, slopes):
    reward = torch.tensor([0.0, 0.5, 1.0], requires_grad=True)
    phi = demonstrated.FORMS[form](reward)
    assert phi.tolist() == pytest.approx(values, abs=1e-4)
    (slope,) = torch.autograd.grad(phi.sum(), reward)
    assert slope.tolist() == pytest.approx(slopes, abs=1e-4)


@pytest.mark.checks("auxiliaries/f_imitation")
def test_the_loss_reads_the_log_ratio_to_the_base_and_is_held_where_it_would_end():
    base = Speaker(torch.tensor([0.4, 0.4, 0.2]).log())
    for probability, clamped in ((0.6, False), (0.1, True)):
        logits = torch.tensor([probability, 0.9 - probability, 0.1]).log().requires_grad_()
        inputs = inputs_of(Speaker(logits), base)
        loss = demonstrated.f_imitation(inputs, weight=0.5, divergence="hellinger", beta=2.0)
        r = max(-0.5, 2 * math.log(probability / 0.4))
        assert float(loss.detach()) == pytest.approx(-0.5 / 2 * r / (1 + r), rel=1e-5)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert bool(gradient.any()) != clamped
    with pytest.raises(ConfigError, match=r"f_imitation\.divergence=kl"):
        demonstrated.f_imitation(inputs_of(base, base), divergence="kl")


@pytest.mark.checks("auxiliaries/f_imitation")
def test_a_denoising_policy_scores_given_actions_by_matching_alone():
    fields, action = {"state": Field((2,))}, Field((1,), low=-2.0, high=2.0)
    config = DenoisingPolicyConfig(kind=PolicyKind.FLOW, width=16, depth=1, likelihood=Likelihood.MATCHING)
    policy = DenoisingPolicy(config, fields, action, fps=10.0)
    chunk = policy.spec.chunk
    actions = torch.linspace(-1, 1, chunk)[None, :, None]
    latents = policy.steps_of(actions, torch.Generator().manual_seed(0))
    assert recovers_latents(policy)
    torch.testing.assert_close(policy.to_actions(latents["action"]), actions)
    scores = policy.log_prob({"state": torch.zeros(1, config.history, 2)}, latents)
    assert scores.logp.shape == (1, policy.spec.scored_steps) and bool(scores.logp.isfinite().all())
    by_chain = DenoisingPolicy(replace(config, likelihood=Likelihood.CHAIN), fields, action, fps=10.0)
    assert not recovers_latents(by_chain)
    with pytest.raises(ConfigError, match=r"policy\.likelihood=matching"):
        by_chain.steps_of(actions, torch.Generator())


@pytest.mark.checks("models/rollout_judge", "SPARK", "RISE")
def test_a_judge_learns_from_pairs_in_mixed_groups_and_from_single_verdicts():
    success = torch.tensor([True, False, True, True, False])
    group = torch.tensor([0, 0, 1, 1, 2])
    logits = torch.tensor([0.6, -0.4, 0.0, 0.3, 0.0])
    entropy = [math.log1p(math.exp(-x)) for x in (0.6, 0.4, 0.0, 0.3, 0.0)]
    pair = math.log1p(math.exp(-1.0))  # of margin 1
    assert pair == pytest.approx(0.3133, abs=1e-4) and entropy[2] == pytest.approx(0.6931, abs=1e-4)
    expected = (0.3 * sum(entropy[:2]) + sum(entropy[2:])) / 5 + 0.7 * 2 / 5 * pair
    assert float(judges.judge_loss(logits, success, group, 0.7, 32)) == pytest.approx(expected, rel=1e-5)
    alone = judges.judge_loss(logits[2:], success[2:], group[2:], 0.7, 32)
    assert float(alone) == pytest.approx(sum(entropy[2:]) / 3, rel=1e-5)
    four = torch.tensor([True, True, True, False])
    drawn = judges.judge_loss(torch.tensor([0.0, 1.0, -1.0, 0.0]), four, torch.zeros(4), 1.0, 2)  # of 3 pairs two
    assert float(drawn) == pytest.approx((math.log(2) + pair) / 2, rel=1e-5)


@pytest.mark.checks("models/step_preference", "rStar-Math")
def test_the_best_siblings_are_paired_with_the_worst():
    """A fork at the second chunk into four rows; and two roots of another group that end alike."""
    rollouts = make_rollouts(
        [3, 3, 3, 3, 1, 1], [0, 0, 0, 0, 1, 1], [0.0, 1.0, 0.5, -0.5, 1.0, 1.0],
        parent=[-1, 0, 0, 0, -1, -1], branch_decision=[-1, 1, 1, 1, -1, -1],
    )  # fmt: skip
    good, bad = judges.sibling_pairs(rollouts, 2)
    assert [(tuple(a), tuple(b)) for a, b in zip(good.tolist(), bad.tolist(), strict=True)] == [
        ((1, 1), (0, 1)), ((1, 1), (3, 1)), ((2, 1), (0, 1)), ((2, 1), (3, 1)),
    ]  # fmt: skip
    one_good, one_bad = judges.sibling_pairs(rollouts, 1)
    assert one_good.tolist() == [[1, 1]] and one_bad.tolist() == [[3, 1]]
    margins = torch.tensor([0.4, 0.9])
    assert torch.nn.functional.softplus(-margins).tolist() == pytest.approx([0.5130, 0.3412], abs=1e-4)


@pytest.mark.checks("models/step_preference")
def test_it_learns_which_chunk_of_a_state_leads_further():
    torch.manual_seed(0)
    returns = [float(row % 2) for row in range(40)]
    rollouts = make_rollouts([1] * 40, [row // 2 for row in range(40)], returns)
    actions = torch.where(torch.tensor(returns)[:, None, None, None] > 0, 1.0, -1.0) * torch.ones(40, 1, 2, 1)
    rollouts = replace(rollouts, actions=actions)
    policy = SimpleNamespace(
        spec=SimpleNamespace(chunk=2, action=Field((1,))), parameters=lambda: iter([torch.zeros(1)])
    )
    tools = SimpleNamespace(policy=policy, fields={STATE: Field((3,))}, history=1, instructions=("",))
    model = judges.StepPreference(tools, epochs=40)  # type: ignore[arg-type]
    context = Context(torch.Generator().manual_seed(0), figures={})
    preference = model.annotate(rollouts, context).extras["preference"][:, 0]
    assert context.figures["sibling_pairs"] == 20
    assert bool((preference[1::2] > preference[::2] + 0.5).all())
    assert model.chunk_scores(rollouts)[:, 0].tolist() == pytest.approx(preference.tanh().tolist())
    staged = judges.StepPreference(tools, rounds=2)  # type: ignore[arg-type]
    changes = []
    for iteration in range(6):
        before = staged.chunk_scores(rollouts)
        staged.annotate(rollouts, replace(context, iteration=iteration, iterations=6))
        changes.append(not torch.equal(before, staged.chunk_scores(rollouts)))
    assert changes == [True, False, False, True, False, False], "once in each half of the run"


@pytest.mark.checks("models/teacher_chunks", "OmniOPD")
def test_chunks_are_scored_by_the_likeness_of_what_the_teacher_would_do():
    likeness = torch.tensor([[1.0], [math.exp(-0.5)]])
    assert float(judges.likeness_score(likeness, 0.5)) == pytest.approx(0.7022, abs=1e-4)
    assert float(judges.likeness_score(likeness[:0], 0.5)) == 0.5


@pytest.mark.checks("models/teacher_chunks")
def test_only_peaks_of_surprise_are_compared_with_the_teacher():
    rollouts = make_rollouts([5, 3], [0, 0], steps=1)
    surprise = torch.tensor([[1.0, 3.0, 2.0, 0.5, 0.9], [0.1, 2.5, 0.2, 9.0, 9.0]], dtype=torch.float64)
    rollouts = replace(rollouts, logp_behaviour=-surprise[..., None])
    assert judges.surprising_chunks(rollouts, 1.0).nonzero().tolist() == [[0, 1], [0, 4], [1, 1]]
    assert judges.surprising_chunks(rollouts, 0.3).nonzero().tolist() == [[0, 1], [1, 1]]
    teacher = SimpleNamespace(act=lambda observation, draws: SimpleNamespace(actions=torch.zeros(2, 2, 1)))
    tools = SimpleNamespace(teacher=teacher, observe=lambda rollouts, where: {})
    judge = judges.TeacherChunks(tools, share=0.3, samples=3)  # type: ignore[arg-type]
    preference = judge.annotate(rollouts, Context(torch.Generator())).extras["preference"]
    spread = rollouts.actions[rollouts.valid].std(0, unbiased=False)
    scores = []
    for row in (0, 1):
        like = math.exp(-0.5 * float((rollouts.actions[row, 1] / spread).square().mean()))
        scores.append((0.5 + 3 * like) / 4)
    assert preference[:, 1].tolist() == pytest.approx(scores)
    assert preference[0, 0].tolist() == pytest.approx(sum(scores) / 2)


@pytest.mark.checks("models/learning_teacher", "VPD")
def test_a_learning_teacher_parts_successes_from_failures_at_their_middle():
    """Log-ratio sums 2 and -1 with beta .1: r = .2 and -.1, delta .05, twice .6210, and a pull of .0463 per unit."""
    total = torch.tensor([2.0, -1.0], dtype=torch.float64, requires_grad=True)
    rollouts = make_rollouts([1, 1], [0, 0], [1.0, 0.0])
    teacher = object.__new__(judges.LearningTeacher)
    reward = 0.1 * total
    teacher.delta = float(judges.middle_of(reward.detach(), rollouts.row_success))
    assert teacher.delta == pytest.approx(0.05)
    loss = 2 * teacher.loss(reward, rollouts)
    assert float(loss.detach()) == pytest.approx(1.2419, abs=1e-4)
    (gradient,) = torch.autograd.grad(loss, total)
    assert gradient.tolist() == pytest.approx([-0.0463, 0.0463], abs=1e-4)
    assert float(judges.middle_of(reward.detach(), torch.tensor([True, True]))) == pytest.approx(0.05)


@pytest.mark.checks("models/learning_teacher")
def test_it_learns_in_some_iterations_only_and_against_the_policy_of_now():
    """One step with one number a row: the policy and its copy say N(theta x)."""
    values = torch.tensor([1.0, -1.0, 2.0, -2.0])
    rollouts = make_rollouts([1] * 4, [0] * 4, [1.0, 0.0, 1.0, 0.0], steps=1)

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.theta = torch.nn.Parameter(torch.tensor(0.0))

    policy = Line()

    def score(model, rows, where) -> Scores:
        logp = (model.theta * rows.latents["x"][..., 0])[where][:, None]
        return Scores(logp, logp)

    rollouts = replace(rollouts, latents={"x": values[:, None, None]})
    tools = SimpleNamespace(policy=policy, base=None, score=score)
    teacher = judges.LearningTeacher(tools, every=2, rate=0.1, momentum=0.0)  # type: ignore[arg-type]
    draws = torch.Generator().manual_seed(0)
    idle = teacher.annotate(rollouts, Context(draws, iteration=1)).extras["process"]
    assert not idle.any()
    process = teacher.annotate(rollouts, Context(draws, iteration=2)).extras["process"].flatten()
    theta = float(teacher.network.theta.detach())
    assert theta > 0 and process.tolist() == pytest.approx((0.1 * theta * values).tolist())
    with torch.no_grad():
        policy.theta.fill_(theta)
    assert not teacher.annotate(rollouts, Context(draws, iteration=3)).extras["process"].any(), "the policy is there"
    other = judges.LearningTeacher(tools, every=2)  # type: ignore[arg-type]
    other.restore(teacher.tree())
    assert other.delta == teacher.delta


@pytest.mark.checks("advantage/process_gap", "VPD")
def test_the_gap_to_a_learning_teacher_is_its_process_reward_over_beta():
    process = torch.tensor([0.2, -0.9])[:, None, None].expand(2, 2, 2)
    rollouts = make_rollouts([2, 1], [0, 0]).with_extras(process=process)
    advantage = distillation.process_gap(rollouts, Context(torch.Generator()))
    assert advantage[rollouts.mask].tolist() == pytest.approx([2.0] * 4 + [-5.0] * 2)
    assert not advantage[~rollouts.mask].any()
