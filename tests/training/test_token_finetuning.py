"""Every preset and mechanism that makes sense for tokens trains a language-conditioned token policy in a real world."""

from dataclasses import replace

import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import to_tensors
from robopolicy.core.run import RunFolder
from robopolicy.policies import TokenConfig, TokenPolicy, TokenPolicyConfig
from robopolicy.policies.token.configuration import TokenDecoding
from robopolicy.rl.critic import state_critic
from robopolicy.rl.presets import PRESETS, RatioLevel
from robopolicy.rl.registry import Slot, mechanisms
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.demonstrations import demonstrate
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance
from sims.registry import load_task, make_world

pytestmark = pytest.mark.long

CONFIG = FinetuneConfig(
    algorithm="grpo",
    iterations=3,
    rollout_length=3,
    groups=2,
    group_size=3,
    epochs=1,
    minibatch=64,
    learning_rate=1e-3,
    target_kl=None,
    evaluate_every=0,
)
FOR_CHAINS = {"dppo", "grpo_guard", "ac_flow", "afd", "fpo"}
"""What discounts along a chain, needs the means of its steps or denoises actions."""


def token_policy(world, seed: int = 0, **token):
    spec = world.spec
    config = TokenPolicyConfig(token=TokenConfig(width=16, depth=1, heads=2, feed_forward=16, bins=5, **token))
    return TokenPolicy(config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions, seed=seed)


def tune(config: FinetuneConfig, world=None, policy=None, **options):
    world = world or make_world("push_choice", 6)
    policy = policy or token_policy(world)
    policy.prepare_finetuning()
    critic = state_critic(world.spec.observation, 1, width=16, instructions=world.spec.instructions)
    result = finetune(policy, critic, world, config, **options)
    assert result.iterations == config.iterations
    assert all(bool(parameter.isfinite().all()) for parameter in policy.parameters())
    return policy


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in FOR_CHAINS])
def test_presets(name: str):
    world = make_world("push_choice", 6)
    policy = token_policy(world)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    teacher = token_policy(world, seed=1) if name == "distillation" else None
    tune(replace(CONFIG, algorithm=name, branch_at=(1,)), world, policy, guidance=Guidance(teacher))
    changed = any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert changed or name in ("spear", "drpo")  # which learn from success, or from both outcomes in a group


OTHERS = [
    {"credit": ("top_entropy", "gtpo"), "options": {"gtpo": {"entropy_limit": 3.0}}},
    {"credit": ("d3s_steps", "empg")},
    {"credit": ("seed_grpo",), "coefficient": "hapo"},
    {"credit": ("instruction_contrast",)},
    {"coefficient": "dcpo", "advantage": "sas", "num_initial_states": 6},
    {"advantage": "risk_po"},
    {"coefficient": "bapo", "controllers": ("vcpo",), "policy_lag": 1},
    {"coefficient": "decoupled_ppo", "replay": "remix"},
    {"auxiliaries": ("entropy", "kl_base", "bc")},
    {"models": ("q_ensemble",), "auxiliaries": ("best_of_n",), "rewards": ("pav",)},
    {"ratio_level": RatioLevel.ACTION_MEAN, "advantage": "rank_grpo"},
    {"ratio_level": RatioLevel.DECISION_SUM},
    {"advantage": "branch_grpo", "branch_at": (1,), "branch_sampling_step": 4},
    {"advantage": "tree_po", "branch_at": (0, 2), "branch_width": 2},
    {"sampler": "sec", "num_initial_states": 8},
    {"sampler": "mopps", "num_initial_states": 8, "allocator": "knapsack"},
    {"overprovision": 0.5, "coefficient": "decoupled_ppo"},
]


@pytest.mark.parametrize("changes", OTHERS, ids=lambda changes: "-".join(map(str, changes.values())))
def test_mechanisms_compose(changes: dict):
    tune(replace(CONFIG, **changes))


def test_masked_decoding_is_fine_tuned_along_its_own_trajectory():
    world = make_world("push_choice", 6)
    tune(CONFIG, world, token_policy(world, decoding=TokenDecoding.MASKED))


@pytest.mark.parametrize("auxiliary", ["dagger", "distill"])
def test_a_student_comes_nearer_to_its_teacher(auxiliary: str):
    world = make_world("push_choice", 6)
    teacher, student = token_policy(world, seed=1), token_policy(world, seed=2)
    with torch.no_grad():
        teacher.head.weight.mul_(20)

    def distance() -> float:
        """KL at the student's own steps: from the student as distill minimises it, to it as dagger does."""
        observation = to_tensors(world.reset(seeds=range(6)))
        decision = student.act(observation, torch.Generator().manual_seed(0))
        with torch.no_grad():
            told, own = (
                each.log_prob(observation, decision.latents).extras["log_probabilities"] for each in (teacher, student)
            )
        p, q = (own, told) if auxiliary == "distill" else (told, own)
        return float((p.exp() * (p - q)).sum(-1).mean())

    before = distance()
    options = {auxiliary: {"weight": 1.0}} | ({"distill": {"share": 0.5}} if auxiliary == "distill" else {})
    config = replace(CONFIG, coefficient="none", auxiliaries=(auxiliary,), iterations=12, epochs=4, options=options)
    tune(replace(config, learning_rate=5e-3), world, student, guidance=Guidance(teacher))
    assert distance() < 0.8 * before


def test_hints_begin_in_the_experts_states_and_survive_a_resume(tmp_path):
    world = make_world("push_choice", 6)
    seeds, tasks = list(range(4)), [0, 1, 2, 3]
    demonstrations = demonstrate(world, load_task("push_choice").expert(), seeds, tasks)
    assert set(demonstrations.states) <= set(seeds)
    assert len(demonstrations.states) >= 3
    state, share = demonstrations.state(next(iter(demonstrations.states)), 0.6)
    assert state is not None
    assert 0.4 < share <= 0.6
    for hint in ("ad_hint", "guide", "pivot"):
        steady = {"ad_hint": {"fades": 1e30}} if hint == "ad_hint" else {}  # no schedule over a number of iterations
        config = replace(CONFIG, hint=hint, num_initial_states=4, groups=3, checkpoint_every=2, options=steady)
        finals = []
        for path, parts in (("whole", (4,)), ("parts", (2, 4))):
            for iterations in parts:
                policy = token_policy(world)
                run = RunFolder(tmp_path / hint / path)
                tune(
                    replace(config, iterations=iterations),
                    world,
                    policy,
                    run=run,
                    guidance=Guidance(demonstrations=demonstrations),
                )
            finals.append(policy.state_dict())
        assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


@pytest.mark.parametrize("changes", [{"algorithm": "spear"}, {"algorithm": "prime"}, {"models": ("q_ensemble",)}])
def test_models_and_replay_survive_a_resume(changes: dict, tmp_path):
    world = make_world("push_choice", 6)
    config = replace(CONFIG, checkpoint_every=2, rewards=(), **changes)
    finals = []
    for path, parts in (("whole", (4,)), ("parts", (2, 4))):
        for iterations in parts:
            policy = token_policy(world)
            tune(replace(config, iterations=iterations), world, policy, run=RunFolder(tmp_path / path))
        finals.append(policy.state_dict())
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"algorithm": "dppo"}, "Gaussians"),
        ({"algorithm": "grpo_guard"}, "the mean of every denoising step"),
        ({"algorithm": "distillation"}, "teacher"),
        ({"advantage": "process_rloo"}, "rewards every step"),
        ({"advantage": "q_values"}, "action values"),
        ({"hint": "pivot"}, "demonstrated states"),
        ({"auxiliaries": ("spo",), "models": ("q_ensemble",)}, "partial denoising chain"),
    ],
)
def test_combinations_that_cannot_work_are_refused(changes: dict, text: str):
    with pytest.raises(ConfigError, match=text):
        tune(replace(CONFIG, **changes))


def test_every_slot_is_listed():
    assert {entry.slot for entry in mechanisms()} == set(Slot)
