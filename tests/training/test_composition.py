"""Each advantage with each coefficient and each credit: one iteration that ends finite, or a refusal with a reason.

A combination is refused only for what the kind of policy cannot have, and before anything is played. The whole product
is slow; what always runs is a draw of it in which every advantage, coefficient and credit stands at least twice on
tokens and twice on denoising steps.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from rl.made_rollouts import make_rollouts
from seeing_toys import SeeingWorld, denoising_policy, token_policy

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import STATE, Field
from robopolicy.core.world import Step
from robopolicy.policies.configuration import Likelihood
from robopolicy.rl.context import Context
from robopolicy.rl.critic import state_critic
from robopolicy.rl.registry import Mechanism, Need, Slot, mechanisms
from robopolicy.training.collection import WHOLE
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance
from robopolicy.training.update import Learner

CONFIG = FinetuneConfig(
    algorithm="grpo",
    iterations=1,
    rollout_length=2,
    groups=2,
    group_size=3,
    num_initial_states=4,
    epochs=1,
    minibatch=64,
    learning_rate=1e-3,
    critic_warmup=0,
    evaluate_every=0,
)
GIVERS = {
    need: entry.name
    for entry in mechanisms(Slot.MODEL)
    for need in entry.gives
    if entry.name not in ("oprl", "learning_teacher")
}
LACKS = {
    "denoising": {Need.CATEGORICAL, Need.MATCHING, Need.BUDGETS},
    "matching": {Need.CATEGORICAL, Need.MEANS, Need.FINISHES, Need.BUDGETS},
    "tokens": {Need.GAUSSIAN, Need.MEANS, Need.FINISHES, Need.MATCHING, Need.BUDGETS},
}
"""What a kind of policy cannot have: denoising scores its chain, matching the loss it was trained by. Budgets come with
another allocator, in a world with as many wordings (tests/training/test_budgets.py).
"""


class MixedWorld(SeeingWorld):
    """Every other row succeeds, so that the outcomes of every group are mixed, also those of a fresh policy."""

    def __init__(self, batch_size: int):
        super().__init__(batch_size)
        fields = {**self.spec.observation, STATE: Field((2,), names=("x", "y"))}
        self.spec = replace(self.spec, observation=fields)

    def step(self, actions: np.ndarray) -> Step:
        step = super().step(actions)
        return replace(step, success=step.terminated & (np.arange(self.batch_size) % 2 == 0))


@dataclass(frozen=True)
class Combination:
    """kind: of the policy; advantage; other: a coefficient or a credit."""

    kind: str
    advantage: Mechanism
    other: Mechanism

    def __str__(self) -> str:
        return f"{self.kind}-{self.advantage.name}-{self.other.name}"


def ours(slot: Slot) -> list[Mechanism]:
    return [entry for entry in mechanisms(slot) if entry.path.startswith("robopolicy.")]


ADVANTAGES, COEFFICIENTS, CREDITS = map(ours, (Slot.ADVANTAGE, Slot.COEFFICIENT, Slot.CREDIT))
EVERY = [
    Combination(kind, advantage, other)
    for kind, advantage, other in product(("denoising", "tokens"), ADVANTAGES, [*COEFFICIENTS, *CREDITS])
]


def drawn(times: int = 2) -> list[Combination]:
    """Return combinations in which everything stands at least `times` on each kind of policy, the same ones always."""
    draws, cases = random.Random(0), []
    for kind, others in product(("denoising", "tokens"), (COEFFICIENTS, CREDITS)):
        for _ in range(times):
            first, second = draws.sample(ADVANTAGES, len(ADVANTAGES)), draws.sample(others, len(others))
            count = max(len(first), len(second)) if others is COEFFICIENTS else len(second)
            cases += [
                Combination(kind, first[place % len(first)], second[place % len(second)]) for place in range(count)
            ]
    return cases


def configured(needs: frozenset[Need], combination: Combination) -> FinetuneConfig:
    """Return the configuration in which both stand, with the models that they need."""
    models = tuple(GIVERS[need] for need in sorted(needs & set(GIVERS), key=lambda need: need.name))
    other = combination.other
    chosen = (other.name,) if other.slot is Slot.CREDIT else other.name
    options: dict = {"gtpo": {"entropy_limit": 9.0}} if other.name == "gtpo" else {}  # a fresh policy's are above it
    if "answers" in models:
        options["answers"] = {"goal": {"x": "y"}}
    names = {"advantage": combination.advantage.name, other.slot.value: chosen}
    return replace(CONFIG, models=models, options=options, **names)


def needs_of(combination: Combination) -> frozenset[Need]:
    """Return what both need, and the models that give what they need."""
    needs = combination.advantage.needs | combination.other.needs
    given = [entry.needs for entry in ours(Slot.MODEL) if entry.name in {GIVERS.get(need) for need in needs}]
    return needs.union(*given)


def play(combination: Combination, monkeypatch: pytest.MonkeyPatch) -> None:
    needs, kind = needs_of(combination), combination.kind
    reads_images = bool({Need.BLACKOUT_SCORES, Need.BLACKOUT_DIVERGENCE} & needs)
    world = MixedWorld(6)
    changes = {}
    if kind == "denoising" and Need.MATCHING in needs:
        kind, changes = "matching", {"likelihood": Likelihood.MATCHING}
    make = token_policy if kind == "tokens" else denoising_policy
    policy = make(world, cameras=reads_images, **changes)
    policy.prepare_finetuning()
    teacher = make(world, seed=1, cameras=reads_images, **changes)
    teacher.prepare_finetuning()
    critic = state_critic(world.spec.observation, 1, width=8, instructions=world.spec.instructions)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    stats: dict[str, float] = {}
    update = Learner.update

    advantages: list[torch.Tensor] = []

    def spy(self, rollouts, *arguments, **options):
        advantages.append(rollouts.extras["advantage"])
        stats.update(update(self, rollouts, *arguments, **options))
        return stats

    monkeypatch.setattr(Learner, "update", spy)

    def tune():
        finetune(policy, critic, world, configured(needs, combination), guidance=Guidance(teacher))

    if needs & LACKS[kind]:
        with pytest.raises(ConfigError, match=r"(credit|coefficient|advantage|models)=\w+ needs \w+"):
            tune()
        assert not world.seeds_used and not world.calls, "refused after it was played"
        return
    tune()
    assert stats["actor_steps"] > 0
    assert {name: value for name, value in stats.items() if not math.isfinite(value)} == {}
    assert all(bool(parameter.isfinite().all()) for parameter in policy.parameters())
    changed = any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    # Nothing is followed with auxiliary losses alone ("none"), nor where a credit keeps no step with an advantage.
    is_followed = combination.other.name != "none" and any(bool(each.any()) for each in advantages)
    assert changed == is_followed


@pytest.mark.parametrize("entry", ADVANTAGES, ids=lambda entry: entry.name)
def test_who_reads_outcomes_asks_for_whole_episodes(entry: Mechanism):
    """In a stream a row holds several episodes: what comes of the next one says nothing of those before."""
    if entry.needs & WHOLE:
        return
    generator = torch.Generator().manual_seed(0)
    stream = make_rollouts([4, 4, 4], [0, 1, 2], [0.0, 1.0, -1.0])
    stream.terminated[:, 1] = True
    names = ("q", "v", "preference", "advantage_gae", "flow_return")
    extras = {name: torch.randn(stream.shape, generator=generator) for name in names}
    extras |= {
        name: torch.randn(stream.mask.shape, generator=generator) for name in ("flow_value", "teacher_logp", "process")
    }
    stream = replace(stream, whole=False).with_extras(**extras)
    success, reward = stream.success.clone(), {name: value.clone() for name, value in stream.rewards.items()}
    success[:, 2:] = ~success[:, 2:]
    reward["reward"][:, 2:] += 5.0
    other = replace(stream, success=success, rewards=reward)
    advantages = [entry.function(rollouts, Context(generator, memory={})) for rollouts in (stream, other)]
    torch.testing.assert_close(advantages[0], advantages[1])


def test_the_draw_covers_everything_twice():
    count = Counter((each.kind, entry.slot, entry.name) for each in drawn() for entry in (each.advantage, each.other))
    everything = product(("denoising", "tokens"), [*ADVANTAGES, *COEFFICIENTS, *CREDITS])
    assert all(count[kind, entry.slot, entry.name] >= 2 for kind, entry in everything)


@pytest.mark.long
@pytest.mark.parametrize("combination", drawn(), ids=str)
def test_a_draw_of_combinations_runs_or_is_refused(combination: Combination, monkeypatch: pytest.MonkeyPatch):
    play(combination, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("combination", EVERY, ids=str)
def test_every_combination_runs_or_is_refused(combination: Combination, monkeypatch: pytest.MonkeyPatch):
    play(combination, monkeypatch)
