"""Every preset trains a real denoising policy in a real world without an error, and improves a bandit."""

import copy
from dataclasses import replace

import pytest
import torch
from bandit_toys import FIELDS, BanditWorld, ChainPolicy, mean_reward

from robopolicy.core.checkpoints import write_checkpoint
from robopolicy.core.errors import ConfigError
from robopolicy.core.run import RunFolder
from robopolicy.data.record import record
from robopolicy.policies import DenoisingPolicy
from robopolicy.policies.configuration import DenoisingPolicyConfig, Likelihood
from robopolicy.rl.critic import state_critic
from robopolicy.rl.presets import PRESETS, RatioLevel
from robopolicy.rl.registry import Slot, mechanisms
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance
from robopolicy.training.pretrain import regression_batches
from sims.registry import load_task, make_world

CONFIG = FinetuneConfig(
    iterations=30,
    rollout_length=4,
    groups=16,
    group_size=9,
    epochs=4,
    minibatch=128,
    learning_rate=5e-3,
    clip=0.1,
    target_kl=0.1,
    discount=0.9,
    evaluate_every=0,
)
GAUSSIAN_MEANS = {"grpo_guard"}
FROM_SUCCESS = {"w_reinforce", "pacs"}
FROM_OUTCOMES = {"prime", "spear", "igpo", "drpo"}
NEED_TEACHER = {"distillation", "afd"}
BY_MATCHING = {"ac_flow", "afd", "fpo"}
OWN_TESTS = {"spa", "digi_q", "ac_flow", "fpo"}
IMPROVING = [
    name for name in PRESETS if name not in {*FROM_SUCCESS, *GAUSSIAN_MEANS, *FROM_OUTCOMES, *NEED_TEACHER, *OWN_TESTS}
]
"""The others learn from successes, which the bandit's start does not have, or need a denoising policy."""


QUICK = {"dppo", "grpo", "gspo", "remix"}
"""Those of every kind: chains with a critic, groups, episode ratios, replay. The others are slow tests."""


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in IMPROVING]
)
def test_presets_improve_a_bandit(name: str):
    policy = ChainPolicy()
    before = mean_reward(policy, True)["reward"]
    episodes = 36 if name == "gspo" else 0
    torch.manual_seed(0)
    critic = state_critic(FIELDS, 1, width=16)
    # OPRL's rewards fade as the policy approaches what its model prefers, so it is slower.
    iterations = 4 * CONFIG.iterations if name == "oprl" else CONFIG.iterations
    config = replace(CONFIG, algorithm=name, minibatch_episodes=episodes, iterations=iterations)
    finetune(policy, critic, BanditWorld(64), config, seed=0)
    assert mean_reward(policy, True)["reward"] > before / 3


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "w_reinforce",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pacs", "prime", "spear", "igpo", "drpo")),
    ],
)
def test_presets_that_learn_from_outcomes_raise_a_low_success_rate(name: str):
    policy = ChainPolicy()
    finetune(policy, None, BanditWorld(64), replace(CONFIG, algorithm="grpo", iterations=25), seed=0)
    before = mean_reward(policy, False)["success"]
    assert 0.05 < before < 0.3
    config = replace(CONFIG, algorithm=name, minibatch_episodes=36, learning_rate=1e-3)
    finetune(policy, None, BanditWorld(64), config, seed=1)
    assert mean_reward(policy, False)["success"] > 0.5


@pytest.mark.slow
def test_imitating_the_best_by_action_values_raises_the_return():
    policy = ChainPolicy()
    config = replace(CONFIG, iterations=12, algorithm="grpo")
    finetune(policy, None, BanditWorld(64, horizon=1, terminates=True), config, seed=0)
    before = mean_reward(policy, False)
    config = replace(CONFIG, algorithm="digi_q", learning_rate=3e-3)
    finetune(policy, None, BanditWorld(64, horizon=1, terminates=True), config, seed=1)
    after = mean_reward(policy, False)
    assert after["reward"] > 0.8 * before["reward"]  # what temporal differences are made of
    assert after["success"] > before["success"]


def small_policy(world, **changes):
    config = DenoisingPolicyConfig(width=16, depth=1, sampling_steps=3, **changes)
    spec = world.spec
    policy = DenoisingPolicy(config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions)
    policy.prepare_finetuning(2)
    return policy


@pytest.mark.checks("models/subnetwork", "RL-subnetworks")
def test_weights_outside_a_subnetwork_stay_equal_after_the_last_update_with_weight_decay(tmp_path):
    """The other run moved one tensor; the decay of a step here is 1 %."""
    policy = ChainPolicy()
    write_checkpoint(tmp_path / "base", {"kind": "weights"}, policy)
    first = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    other, excluded = copy.deepcopy(policy), [name for name, weight in first.items() if weight.any()][1:]
    moved = next(name for name, weight in first.items() if weight.any())
    with torch.no_grad():
        other.get_parameter(moved).add_(1.0)
    write_checkpoint(tmp_path / "checkpoint", {"kind": "weights"}, other)
    options = {"subnetwork": {"run": str(tmp_path)}}
    config = replace(
        CONFIG, algorithm="grpo", iterations=1, epochs=2, weight_decay=2.0, models=("subnetwork",), options=options
    )
    finetune(policy, None, BanditWorld(16), config, seed=0)
    assert not torch.equal(policy.get_parameter(moved), first[moved])
    assert excluded and all(torch.equal(policy.get_parameter(name), first[name]) for name in excluded)


NOTHING_WITHOUT_SUCCESS = {"spear", "pacs", "prime", "drpo", "digi_q"}
"""No episode succeeds here: four are paid for nothing else, the last warms up for two iterations."""


@pytest.mark.long
@pytest.mark.parametrize("name", PRESETS)
def test_presets_run_on_a_denoising_policy(name: str):
    world = make_world("reach_planar", 8)
    scored = {"likelihood": Likelihood.MATCHING} if name in BY_MATCHING else {}
    policy = small_policy(world, **scored)
    weight = policy.trainable_parameters()[0].detach().clone()
    config = replace(
        CONFIG, algorithm=name, iterations=2, groups=3, group_size=3, epochs=1, critic_warmup=1, branch_at=(1,)
    )
    critic = state_critic(world.spec.observation, 1, width=16)
    teacher = small_policy(world) if name in NEED_TEACHER else None
    if name == "distillation":
        with torch.no_grad():
            for parameter in teacher.trainable_parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    result = finetune(policy, critic, world, config, seed=0, guidance=Guidance(teacher))
    assert result.iterations == 2
    assert result.env_steps > 0
    assert torch.equal(weight, policy.trainable_parameters()[0]) == (name in NOTHING_WITHOUT_SUCCESS)
    assert all(bool(parameter.isfinite().all()) for parameter in policy.parameters())


OTHERS = [
    {"credit": ("seed_grpo",)},
    {"selection": ("roc",)},
    {"selection": ("max_variance", "void_turns")},
    {"auxiliaries": ("kl_base", "bc")},
    {"controllers": ("vcpo",)},
    {"controllers": ("kl_target",)},
    {"rewards": ("success_only", "hurry")},
    {"weight": "duration"},
    {"coefficient": "decoupled_ppo"},
    {"coefficient": "grpo_guard"},
    {"coefficient": "min_pro", "minibatch_episodes": 3},
    {"sampler": "mopps", "num_initial_states": 6},
    {"sampler": "sec", "num_initial_states": 6},
    {"sampler": "prompt_replay", "num_initial_states": 6, "allocator": "knapsack"},
    {"allocator": "dars"},
    {"allocator": "dart", "models": ("success_pool",), "coefficient": "decoupled_ppo", "num_initial_states": 6},
    {"allocator": "shadow_price", "sampler": "group_dro", "num_initial_states": 6},
    {"sampler": "stages", "num_initial_states": 6, "selection": ("distinct_pairs",), "credit": ("by_difficulty",)},
    {"rewards": ("majority_label",), "num_initial_states": 6},
    {"rewards": ("flawed",), "coefficient": "future_ratio", "minibatch_episodes": 3},
    {"ratio_level": RatioLevel.DECISION_MEAN},
    {"models": ("q_ensemble",), "auxiliaries": ("best_of_n", "spo"), "rewards": ("pav",)},
    {"models": ("progress", "prime"), "advantage": "process_rloo"},
    {"replay": "spear"},
    {"replay": "remix", "coefficient": "decoupled_ppo", "minibatch_episodes": 4},
    {"auxiliaries": ("velocity",), "coefficient": "awr"},
    {"coefficient": "mdpo", "controllers": ("linear_decay",)},
    {"ratio_level": RatioLevel.EPISODE_SUM},
]


@pytest.mark.long
@pytest.mark.parametrize(
    "changes", OTHERS, ids=lambda changes: "-".join(f"{key}={value}" for key, value in changes.items())
)
def test_mechanisms_compose(changes: dict):
    world = make_world("reach_planar", 8)
    policy = small_policy(world)
    config = replace(CONFIG, algorithm="grpo", iterations=4, groups=3, group_size=4, epochs=1, **changes)
    result = finetune(policy, None, world, config, seed=0)
    assert result.iterations == 4
    assert all(bool(parameter.isfinite().all()) for parameter in policy.parameters())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"algorithm": "dppo"}, "needs a critic"),
        ({"algorithm": "grpo", "group_size": 1}, "group_size >= 2"),
        ({"algorithm": "grpo", "coefficient": "dcpo"}, "categorical"),
        ({"algorithm": "grpo", "credit": ("top_entropy",)}, "categorical"),
        ({"algorithm": "grpo", "credit": ("vppo",)}, "camera images"),
        ({"algorithm": "grpo", "ratio_level": RatioLevel.ACTION_MEAN}, "single actions"),
        ({"algorithm": "grpo", "options": {"grpo": {"epsilom": 1}}}, "epsilon"),
        ({"algorithm": "grpo", "options": {"gae": {}}}, "not part of this algorithm"),
    ],
)
def test_combinations_that_cannot_work_are_refused(changes: dict, text: str):
    world = make_world("reach_planar", 4)
    config = replace(CONFIG, iterations=1, groups=1, group_size=2 if "group_size" not in changes else 1)
    with pytest.raises(ConfigError, match=text):
        finetune(small_policy(world), None, world, replace(config, **changes), seed=0)


def test_experts_are_imitated_on_the_side_and_a_resumed_run_ends_the_same(tmp_path):
    world = make_world("reach_planar", 8)
    expert = record(world, load_task("reach_planar").expert(), range(16), generator=torch.Generator())
    config = replace(CONFIG, algorithm="grpo", coefficient="none", auxiliaries=("experts",), groups=2, group_size=2)
    config = replace(config, learning_rate=2e-3, checkpoint_every=3, options={"experts": {"weight": 1.0}})
    batch = next(regression_batches(small_policy(world), expert, 256, torch.Generator().manual_seed(5)))

    def error(policy) -> float:
        with torch.no_grad():
            return float(policy.loss(batch, torch.Generator().manual_seed(6))["denoising"].mean())

    before, finals, policy = error(small_policy(world)), [], None
    for path, parts in (("whole", (6,)), ("parts", (3, 6))):
        for iterations in parts:
            policy = small_policy(world)
            chosen = replace(config, iterations=iterations)
            finetune(policy, None, world, chosen, RunFolder(tmp_path / path), seed=0, guidance=Guidance(experts=expert))
        finals.append(policy.state_dict())
    assert error(policy) < 0.9 * before
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    with pytest.raises(ConfigError, match="episodes of experts"):
        finetune(small_policy(world), None, world, config, seed=0)


def test_every_mechanism_says_what_it_does_and_where_it_is_from():
    for entry in mechanisms():
        assert entry.line.endswith((".", "]")), entry.name
        assert entry.source, entry.name
    assert len(mechanisms(Slot.ADVANTAGE)) >= 15
