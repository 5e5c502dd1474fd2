"""Losses beside the policy's: their values by hand and their gradients by autograd of what the papers state."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn import functional

from robopolicy.core.extras import Extras
from robopolicy.core.policy import Decision, Scores
from robopolicy.core.spec import IMAGE_PREFIX, STATE
from robopolicy.rl import auxiliaries
from robopolicy.rl.context import AuxiliaryInputs, Context
from robopolicy.rl.experimental import auxiliaries as experimental_auxiliaries

MASK = torch.tensor([[True, True, False], [True, False, False]])


@dataclass
class Toy:
    """A policy of fixed scores that also acts, finishes chains and has a loss, as far as a test sets them."""

    scores: Any = None
    decision: Any = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    spec: Any = None
    asked: list[Any] = field(default_factory=list)

    def log_prob(self, observation, latents) -> Scores:
        self.asked.append(latents)
        return self.scores if isinstance(self.scores, Scores) else self.scores(observation, latents)

    def act(self, observation, generator, *, deterministic: bool = False) -> Decision:
        return self.decision if isinstance(self.decision, Decision) else self.decision(observation, generator)

    def reset(self, rows=None) -> None: ...

    def loss(self, batch, generator) -> dict[str, Tensor]:
        self.asked.append(batch)
        return self.losses

    def finish_chain(self, observation, latents: Tensor, next_step: Tensor) -> Tensor:
        return latents * (1 + next_step[:, None, None])


def inputs_of(**changes) -> AuxiliaryInputs:
    given = {
        "observation": {STATE: torch.zeros(2, 1, 1)},
        "latents": {},
        "mask": MASK,
        "scores": Scores(torch.zeros(2, 3), torch.zeros(2, 3)),
        "policy": Toy(),
        "context": Context(torch.Generator().manual_seed(0), iteration=5, iterations=10),
    }
    return AuxiliaryInputs(**(given | changes))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.checks("auxiliaries/kl_base")
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_of_the_kl_to_the_base(estimator: str):
    x = random(2, 3)
    base = Toy(Scores(random(2, 3, seed=1), x))
    logp = (base.scores.logp + x).requires_grad_()
    loss = experimental_auxiliaries.stay_near_base(
        inputs_of(base=base, scores=Scores(logp, x)), weight=0.7, estimator=estimator
    )
    form = {"k1": lambda v: v, "k2": lambda v: v**2 / 2, "k3": lambda v: math.exp(-v) - 1 + v}[estimator]
    expected = [form(value) for value in x[MASK].tolist()]
    assert float(loss.detach()) == pytest.approx(0.7 * sum(expected) / 3)


@pytest.mark.checks("auxiliaries/kl_base")
def test_the_second_estimators_gradient_is_the_kls():
    """Over a whole vocabulary, each word as often as the policy says it."""
    logits, told = random(5).requires_grad_(), random(5, seed=1).log_softmax(-1)
    log_probabilities = logits.log_softmax(-1)
    share = log_probabilities.detach().exp()
    (expected,) = torch.autograd.grad(
        (log_probabilities.exp() * (log_probabilities - told)).sum(), logits, retain_graph=True
    )
    terms = [
        experimental_auxiliaries.stay_near_base(
            inputs_of(
                base=Toy(Scores(told[word].expand(1, 1), share)),
                scores=Scores(log_probabilities[word].expand(1, 1), share),
                mask=torch.ones(1, 1, dtype=torch.bool),
            ),
            weight=1.0,
            estimator="k2",
        )
        for word in range(5)
    ]
    (gradient,) = torch.autograd.grad((share * torch.stack(terms)).sum(), logits)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.checks("auxiliaries/entropy")
def test_the_entropy_bonus_is_minus_the_mean_entropy():
    entropy = random(2, 3).abs().requires_grad_()
    loss = experimental_auxiliaries.entropy_bonus(inputs_of(scores=Scores(entropy, entropy)), weight=0.2)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.2 * float(entropy.detach()[MASK].mean()))
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad, -0.2 / 3 * MASK.double())


@pytest.mark.checks("auxiliaries/velocity")
def test_velocities_are_compared_in_units_of_the_spread():
    mean, base, std = random(2, 3, 4, 2), random(2, 3, 4, 2, seed=1), 0.1 + random(2, 3, 1, 1, seed=2).abs()
    own = Scores(mean[..., 0, 0], mean[..., 0, 0], {"mean": mean, "std": std})
    loss = experimental_auxiliaries.stay_near_velocity(
        inputs_of(scores=own, base=Toy(Scores(mean[..., 0, 0], mean[..., 0, 0], {"mean": base}))), weight=0.3
    )
    distance = ((mean - base) / std).square().mean((-2, -1))
    assert float(loss) == pytest.approx(0.3 * float(distance[MASK].mean()))
    # Twice the KL of Gaussians with this spread, so steps of equal noise stay equally near.
    kl = kl_divergence(Normal(mean, std.expand_as(mean)), Normal(base, std.expand_as(mean))).mean((-2, -1))
    torch.testing.assert_close(distance, 2 * kl)


@pytest.mark.checks("auxiliaries/bc")
def test_cloning_the_base_is_minus_the_likelihood_of_its_decisions():
    logp = random(2, 3).requires_grad_()
    latents = {"x": random(2, 3, seed=1)}
    base = Toy(decision=Decision(torch.zeros(2, 1, 1), latents, logp.detach(), MASK))
    policy = Toy(Scores(logp, logp))
    loss = auxiliaries.imitate_base(inputs_of(base=base, policy=policy), weight=0.4)
    loss.backward()
    assert policy.asked == [latents], "the base's decisions are scored, not the minibatch's"
    assert float(loss.detach()) == pytest.approx(-0.4 * float(logp.detach()[MASK].mean()))
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, -0.4 / 3 * MASK.double())


@pytest.mark.checks("auxiliaries/experts")
def test_experts_are_learned_from_by_the_policys_own_loss():
    batches = [{"number": 1}, {"number": 2}]
    policy = Toy(losses={"actions": torch.tensor([1.0, 3.0]), "stop": torch.tensor([0.5, 0.0])})
    inputs = inputs_of(policy=policy, experts=iter(batches))
    assert [float(auxiliaries.imitate_experts(inputs, weight=0.1)) for _ in batches] == pytest.approx([0.225] * 2)
    assert policy.asked == batches


def speaking(student: Tensor, teacher: Tensor, mask: Tensor = MASK, seed: int = 0) -> AuxiliaryInputs:
    """A student and a teacher with these log-probabilities [n, k, V]."""
    scores = [Scores(each[..., 0], each[..., 0], {"log_probabilities": each}) for each in (student, teacher)]
    context = Context(torch.Generator().manual_seed(seed))
    return inputs_of(scores=scores[0], teacher=Toy(scores[1]), mask=mask, context=context)


@pytest.mark.checks("auxiliaries/distill")
def test_distilling_tokens_is_the_mean_kl_of_the_student_to_the_teacher():
    logits, teacher = random(2, 3, 5).requires_grad_(), random(2, 3, 5, seed=1).log_softmax(-1)
    loss = experimental_auxiliaries.distill(speaking(logits.log_softmax(-1), teacher), weight=0.5)
    divergence = kl_divergence(Categorical(logits=logits), Categorical(logits=teacher))
    (gradient,) = torch.autograd.grad(loss, logits)
    (expected,) = torch.autograd.grad(0.5 * divergence[MASK].mean(), logits)
    torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=1e-6)


@pytest.mark.checks("auxiliaries/distill")
def test_distilling_gaussian_steps_is_their_kl_too():
    mean, told, std = random(2, 3, 4, 2).requires_grad_(), random(2, 3, 4, 2, seed=1), random(2, 3, 1, 1).abs() + 0.1
    scores = Scores(std[..., 0, 0], std[..., 0, 0], {"mean": mean, "std": std})
    teacher = Toy(Scores(std[..., 0, 0], std[..., 0, 0], {"mean": told}))
    loss = experimental_auxiliaries.distill(inputs_of(scores=scores, teacher=teacher), weight=0.5)
    divergence = kl_divergence(Normal(mean, std.expand_as(told)), Normal(told, std.expand_as(told))).mean((-2, -1))
    torch.testing.assert_close(loss, 0.5 * divergence[MASK].mean())


@pytest.mark.checks("auxiliaries/distill")
def test_distilling_gaussian_steps_leaves_out_elements_that_were_not_executed():
    """The first chunk ended after three of its four steps, and nothing of the other's third action was used."""
    mean, told, std = random(2, 3, 4, 2).requires_grad_(), random(2, 3, 4, 2, seed=1), torch.ones(2, 3, 1, 1)
    precision = torch.ones(2, 3, 4, 2)
    precision[0, :, 3], precision[1, :, 2] = 0.0, 0.0
    scores = Scores(std[..., 0, 0], std[..., 0, 0], {"mean": mean, "std": std, "logp_precision": precision})
    teacher = Toy(Scores(std[..., 0, 0], std[..., 0, 0], {"mean": told}))
    loss = experimental_auxiliaries.distill(inputs_of(scores=scores, teacher=teacher))
    squares = 0.5 * (mean - told).square()
    divergence = torch.stack([squares[0][:, [0, 1, 2]], squares[1][:, [0, 1, 3]]]).mean((-2, -1))
    torch.testing.assert_close(loss, divergence[MASK].mean())
    (gradient,) = torch.autograd.grad(loss, mean)
    assert not gradient[precision == 0].any()


@pytest.mark.checks("auxiliaries/distill", "BRTS")
def test_episodes_of_the_teacher_are_distilled_by_the_forward_kl_with_a_weight_of_their_own():
    student, teacher = random(2, 3, 5).log_softmax(-1), random(2, 3, 5, seed=1).log_softmax(-1)
    inputs = speaking(student, teacher)
    inputs = replace(inputs, extras=Extras(helped=torch.tensor([False, True])))
    loss = experimental_auxiliaries.distill(inputs, taught=10.0)
    own, its = Categorical(logits=student), Categorical(logits=teacher)
    distance = torch.stack([kl_divergence(own, its)[0], 10 * kl_divergence(its, own)[1]])
    torch.testing.assert_close(loss, distance[MASK].mean())
    assert (
        loss != experimental_auxiliaries.distill(inputs) == experimental_auxiliaries.distill(speaking(student, teacher))
    )


def tip_scores(student: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """Soft-OR of entropy and KL(student || teacher) of steps [n, V], as in section 6 of the paper."""

    def scaled(values: np.ndarray) -> np.ndarray:
        return (values - values.min()) / (values.max() - values.min())

    p, q = np.exp(student), np.exp(teacher)
    entropy = -(p * np.log(p)).sum(-1) / math.log(p.shape[-1])
    uncertain = scaled(np.minimum(entropy, np.quantile(entropy, 0.98)))
    wrong = scaled((p * np.log(p / q)).sum(-1))
    return uncertain + wrong - uncertain * wrong


def kept_steps(student: Tensor, teacher: Tensor, mask: Tensor, share: float) -> list[int]:
    """The steps that get a gradient, of log-probabilities [n, k, V], as places in the flattened minibatch."""
    leaf = student.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        experimental_auxiliaries.distill(speaking(leaf, teacher, mask), share=share), leaf
    )
    return (gradient.abs().sum(-1) > 0).flatten().nonzero().squeeze(1).tolist()


@pytest.mark.checks("auxiliaries/distill", "TIP")
def test_tip_keeps_steps_where_the_student_is_uncertain_or_wrong():
    """Steps: sure and alike, sure and wrong, unsure and alike, a little of both, and one that does not count."""
    p = torch.tensor([[0.98, 0.01, 0.01], [0.98, 0.01, 0.01], [0.34, 0.33, 0.33], [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]])
    q = torch.tensor([[0.97, 0.02, 0.01], [0.01, 0.98, 0.01], [0.33, 0.34, 0.33], [0.4, 0.3, 0.3], [1e-9, 0.5, 0.5]])
    student, teacher = p.double().log()[None], q.double().log()[None]
    mask = torch.tensor([[True, True, True, True, False]])
    assert kept_steps(student, teacher, mask, 0.5) == [1, 2]  # a product of both would keep the fourth
    assert kept_steps(student, teacher, mask, 0.9) == [1, 2, 3]  # whole steps: .9 of four are three
    assert len(kept_steps(student, teacher, mask, 0.01)) == 1
    loss = experimental_auxiliaries.distill(speaking(student, teacher, mask), share=0.5)
    assert float(loss) == pytest.approx(float((p * (p / q).log()).sum(-1)[1:3].mean()), rel=1e-5)


@pytest.mark.checks("auxiliaries/distill", "TIP")
@pytest.mark.parametrize("share", [0.1, 0.5, 0.75])
def test_tip_keeps_the_largest_scores_of_the_papers_formula(share: float):
    student, teacher = random(8, 25, 5).log_softmax(-1), (3 * random(8, 25, 5, seed=1)).log_softmax(-1)
    mask = torch.rand(8, 25, generator=torch.Generator().manual_seed(2)) < 0.7
    scores = tip_scores(student[mask].numpy(), teacher[mask].numpy())
    largest = np.argsort(-scores)[: int(share * len(scores))]
    expected = mask.flatten().nonzero().squeeze(1)[torch.tensor(np.sort(largest))]
    assert kept_steps(student, teacher, mask, share) == expected.tolist()


@pytest.mark.checks("auxiliaries/distill", "TIP")
def test_tip_chooses_gaussian_steps_by_the_distance_to_the_teacher_and_equal_ones_by_place():
    mean = torch.tensor([0.0, 1.0, 2.0])[None, :, None, None].expand(1, 3, 4, 2)
    std, told = torch.ones(1, 3, 1, 1), torch.zeros(1, 3, 4, 2)
    scores = Scores(std[..., 0, 0], std[..., 0, 0], {"mean": mean, "std": std})
    teacher = Toy(Scores(std[..., 0, 0], std[..., 0, 0], {"mean": told}))
    inputs = inputs_of(scores=scores, teacher=teacher, mask=torch.ones(1, 3, dtype=torch.bool))
    assert float(experimental_auxiliaries.distill(inputs, share=0.34)) == pytest.approx(2.0)  # 2^2 / 2, of one step
    same = torch.zeros(1, 4, 3).log_softmax(-1)
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert float(experimental_auxiliaries.distill(speaking(same, same, mask), share=0.5)) == 0.0
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    assert float(experimental_auxiliaries.distill(speaking(same, same, nothing), share=0.5)) == 0.0


class ByLength:
    """Values actions by their sum and states by a number."""

    def __init__(self, state: float):
        self.state = state

    def values(self, observation) -> Tensor:
        return torch.full((len(observation[STATE]),), self.state, dtype=torch.float64)

    def action_values(self, observation, actions: Tensor) -> Tensor:
        return actions.sum((1, 2)) * observation[STATE][:, 0, 0]

    def annotate(self, rollouts, context): ...

    def tree(self): ...

    def restore(self, tree): ...


@pytest.mark.checks("auxiliaries/best_of_n")
def test_the_best_of_several_decisions_is_imitated_where_it_beats_the_state():
    state = torch.tensor([1.0, -1.0, 0.01], dtype=torch.float64)[:, None, None]
    chunks = random(12, 2, 1)  # four candidates of three states, candidate after candidate

    def act(observation, generator) -> Decision:
        mask = torch.ones(12, 2, dtype=torch.bool)
        return Decision(chunks, {"chunk": chunks, "owner": observation[STATE]}, torch.zeros(12, 2), mask)

    theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def log_prob(observation, latents) -> Scores:
        torch.testing.assert_close(latents["owner"], observation[STATE])  # each state is given its own candidate
        logp = Normal(theta, 1.0).log_prob(latents["chunk"].squeeze(-1))
        return Scores(logp, logp)

    inputs = inputs_of(
        observation={STATE: state}, policy=Toy(log_prob, act), models={"values": ByLength(0.1)}, mask=torch.ones(3, 2)
    )
    loss = experimental_auxiliaries.best_of_n(inputs, candidates=4, weight=0.5, warmup=0)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(0)).tolist()
    terms = []
    for place, row in enumerate(order):
        own = chunks[place::3]  # drawn for this state, in the order of the states chosen
        worth = own.sum((1, 2)) * float(state[row])
        if float(worth.max()) > 0.1:
            terms.append(Normal(theta, 1.0).log_prob(own[int(worth.argmax())].squeeze(-1)))
    assert len(terms) == 2, "of the third state no decision is worth more than the state"
    expected = -0.5 * torch.cat(terms).sum() / chunks[:3].flatten().numel()  # all three states count
    torch.testing.assert_close(loss, expected, atol=1e-7, rtol=1e-6)
    (gradient,) = torch.autograd.grad(loss, theta)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, theta)[0], atol=1e-7, rtol=1e-6)
    assert float(experimental_auxiliaries.best_of_n(inputs, warmup=9)) == 0


@pytest.mark.checks("auxiliaries/spo")
@pytest.mark.parametrize("sampled", [3, 1])
def test_step_preferences_equal_a_slow_reference(sampled: int):
    """Normal steps around theta x; children are judged by what they lead to, and the base is the frozen reference.

    sampled: of the chain's steps for the minibatch's ratios; preferences are over all steps.
    """
    count, steps, children = 4, 3, 5
    chain, std = random(count, steps + 1, 2, 1), 0.3 * torch.ones(count, 1, 1, 1, dtype=torch.float64)
    theta = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)

    def normal(scale) -> Any:
        def log_prob(observation, latents) -> Scores:
            here = latents["chain"].gather(1, latents["chosen"][..., None, None].expand(-1, 1, 2, 1))
            mean = scale * here
            weight = torch.tensor([1.0, 0.0]).reshape(1, 1, 2, 1).expand(mean.shape)  # of two steps one is executed
            return Scores(
                mean[..., 0, 0], mean[..., 0, 0], {"mean": mean, "std": std[: len(mean)], "logp_precision": weight}
            )

        return log_prob

    state = 0.05 * torch.tensor([1.0, 1.0, -2.0, 1e-3], dtype=torch.float64)[:, None, None]  # what differs is small
    inputs = inputs_of(
        observation={STATE: state},
        latents={"chain": chain},
        mask=torch.ones(count, sampled, dtype=torch.bool),
        policy=Toy(normal(theta)),
        base=Toy(normal(0.85)),
        models={"values": ByLength(0.0)},
    )
    loss = experimental_auxiliaries.step_preferences(
        inputs, children=children, beta=4.0, clip=0.2, gap=0.3, weight=0.5, warmup=0
    )

    draws = torch.Generator().manual_seed(0)
    rows = torch.randperm(count, generator=draws)
    step = torch.randint(steps, (count,), generator=draws)
    noise = torch.randn((children, count, 2, 1), generator=draws).double()
    start = chain[rows, step]
    drawn = 0.9 * start + 0.3 * noise
    worth = (drawn * (2 + step[:, None, None])).sum((2, 3)) * state[rows, 0, 0]
    spread = float((worth - worth.mean(0)).square().mean().sqrt()) + 1e-6  # among the children of a state
    terms = []
    for place in range(count):
        best, worst = int(worth[:, place].argmax()), int(worth[:, place].argmin())
        pair = (worth[[best, worst], place] / spread).softmax(0)
        if float(pair[0] - pair[1]) <= 0.3:
            continue
        ratio = []
        for child in (best, worst):
            own, base = (
                Normal(scale * start[place], 0.3).log_prob(drawn[child, place].detach())[0].mean()
                for scale in (theta, 0.85)
            )
            ratio.append((own - base).clamp(math.log(0.8), math.log(1.2)))
        terms.append(-functional.logsigmoid(4.0 * (ratio[0] - ratio[1])))
    assert 0 < len(terms) < count, "a state whose children are worth alike says nothing"
    expected = 0.5 * torch.stack(terms).mean()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)
    (gradient,) = torch.autograd.grad(loss, theta)
    assert float(gradient) != 0
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, theta)[0], atol=1e-6, rtol=1e-5)


@pytest.mark.checks("auxiliaries/masked_preference", "OPA-DPO")
def test_pictures_are_preferred_to_masked_pictures():
    """D .5 on the picture and .2 on a black one, beta .1: .6783 times .2 for each of the better chunks."""
    camera = IMAGE_PREFIX + "front"

    def policy_of(seen: Tensor, masked: Tensor) -> Toy:
        def answer(observation, latents) -> Scores:
            logp = seen if bool(observation[camera].any()) else masked
            return Scores(logp, torch.zeros(2, 3))

        return Toy(answer)

    theta = torch.tensor(1.0, requires_grad=True)
    own, reference = torch.tensor([[0.4, 0.5, 9.0], [0.4, 9.0, 9.0]]), torch.tensor([[0.1, 0.3, 0.0], [0.1, 0.0, 0.0]])
    inputs = inputs_of(
        observation={camera: torch.ones(2, 1, 8, 8, 3)},
        scores=Scores(own * theta, torch.zeros(2, 3)),
        policy=policy_of(own, torch.full((2, 3), 0.2) * theta),
        base=policy_of(reference, torch.full((2, 3), 0.1)),
        extras=Extras().adding(advantage=torch.tensor([[1.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])),
    )
    loss = auxiliaries_of_pictures(inputs)
    assert float(loss.detach()) == pytest.approx(0.2 * 0.6783 / 2, abs=1e-4)
    (gradient,) = torch.autograd.grad(loss, theta)
    # both views are learned: own log-probabilities .9 on the picture, .4 on the black one
    assert float(gradient) == pytest.approx(-0.2 * 0.1 * (0.9 - 0.4) * (1 - 1 / (1 + math.exp(-0.03))) / 2, abs=1e-5)


def auxiliaries_of_pictures(inputs: AuxiliaryInputs) -> Tensor:
    """All patches are black."""
    return experimental_auxiliaries.masked_preference(inputs, share=1.0)


@pytest.mark.checks("auxiliaries/kl_by_difficulty", "CLPO")
def test_the_pull_to_the_base_is_half_where_the_policy_fails():
    """x = 1: exp(-1) - 1 + 1 = .3679 a step; the group of the first chunk fails: 2 and 1 steps."""
    base = Toy(Scores(torch.zeros(2, 3), torch.zeros(2, 3)))
    inputs = inputs_of(
        base=base, scores=Scores(torch.ones(2, 3), torch.zeros(2, 3)),
        extras=Extras().adding(group_rate=torch.tensor([0.3, 0.4])),
    )  # fmt: skip
    loss = experimental_auxiliaries.stay_near_where_easy(inputs, weight=1.0)
    assert float(loss) == pytest.approx(0.3679 * (2 * 0.5 + 1) / 3, abs=1e-4)
    plain = experimental_auxiliaries.stay_near_base(inputs, weight=1.0)
    assert float(experimental_auxiliaries.stay_near_where_easy(inputs, weight=1.0, factor=1.0)) == float(plain)
