"""GRAPE in the trainer: a reference that is frozen for a round, pairs that outlive a kill, learning from disk alone."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from bandit_toys import FIELDS, BanditWorld, ChainPolicy, mean_reward, run_apart
from learning.lock_world import ChoicePolicy, LockWorld, success_of
from mortal_runs import GRAPE, train_pairs

from robopolicy.building.guidance import load_guidance
from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import STATE, Field
from robopolicy.core.stages import HasStages
from robopolicy.policies import DenoisingPolicy
from robopolicy.policies.configuration import DenoisingPolicyConfig, FlowNoise, PolicyKind
from robopolicy.rl.critic import state_critic
from robopolicy.rl.preferences import read_pairs
from robopolicy.training.experience import recompute_log_probs
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance
from robopolicy.training.update import Learner
from sims.registry import make_world

pytestmark = pytest.mark.long

CONFIG = replace(GRAPE, learning_rate=1e-2, actor_warmup=1)


@pytest.mark.checks("GRAPE")
@pytest.mark.parametrize(("refresh", "since"), [(1, [0, 1, 2, 3, 4]), (3, [0, 0, 0, 3, 3]), (0, [0, 0, 0, 0, 0])])
def test_the_reference_is_the_policy_as_its_round_began(
    refresh: int, since: list[int], monkeypatch: pytest.MonkeyPatch
):
    before: list[dict[str, torch.Tensor]] = []
    update, compared = Learner.update, []

    def spy(self, rollouts, *arguments, **options):
        before.append({name: value.clone() for name, value in self.policy.state_dict().items()})
        reference = ChainPolicy()
        reference.load_state_dict(before[since[len(before) - 1]])
        expected = torch.where(rollouts.mask, recompute_log_probs(rollouts, reference, ("", ""))[0], 0.0)
        logp_reference = torch.where(rollouts.mask, rollouts.extras["reference_logp"], 0.0)
        torch.testing.assert_close(logp_reference, expected)
        compared.append(float(expected.abs().sum()))
        stats = update(self, rollouts, *arguments, **options)
        again = torch.where(rollouts.mask, recompute_log_probs(rollouts, self.base, ("", ""))[0], 0.0)
        torch.testing.assert_close(again, expected)  # learning has not moved it
        return stats

    monkeypatch.setattr(Learner, "update", spy)
    config = replace(CONFIG, options={"preferences": {"refresh": refresh}})
    finetune(ChainPolicy(), None, BanditWorld(24), config, seed=0)
    assert len(compared) == 5
    assert min(compared) > 0
    weights = [state["second.bias"] for state in before]
    assert all(not torch.equal(first, then) for first, then in pairwise(weights))


@pytest.mark.checks("GRAPE", "replay/preferences")
def test_pairs_and_reference_survive_a_kill_byte_for_byte(tmp_path: Path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_pairs(whole, kill_at=0)
    # Four calls an iteration: in the fourth, after the checkpoint of the second
    assert run_apart(train_pairs, broken, kill_at=15) == -9
    assert (
        0
        < len(read_pairs(broken / "preferences").rollouts.group)
        < len(read_pairs(whole / "preferences").rollouts.group)
    )
    train_pairs(broken, kill_at=0)
    files = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    assert {Path("preferences/preferences.json"), Path("preferences/preferences.safetensors")} <= set(files)
    assert files == [path.relative_to(broken) for path in sorted(broken.rglob("*")) if path.is_file()]
    for file in files:
        if file.name != "metrics.jsonl":
            assert (whole / file).read_bytes() == (broken / file).read_bytes(), file


LOCK = replace(
    CONFIG,
    iterations=30,
    groups=32,
    group_size=8,
    minibatch_episodes=32,
    checkpoint_every=30,
    options={"gcpg": {"own": 0.0}},
)
"""Only success is paid: ranked by likelihood too, groups that fail would teach to fail as the policy does already."""


def opened(seed: int, world: LockWorld | None = None, run: RunFolder | None = None, pairs=None, **changes) -> float:
    """Success on locks of length 4 after GRAPE from scratch."""
    policy = ChoicePolicy(seed=seed)
    config = replace(LOCK, **changes)
    finetune(policy, None, world or LockWorld(64), config, run, seed=seed, guidance=Guidance(pairs=pairs))
    return success_of(policy)


@pytest.mark.checks("GRAPE")
def test_it_learns_from_its_own_pairs_and_unlearns_from_swapped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = success_of(ChoicePolicy(seed=0))
    assert opened(0, run=RunFolder(tmp_path)) > before + 0.5

    class Untouched(LockWorld):
        def step(self, actions):
            raise AssertionError("stored pairs are learned from without playing")

    pairs = read_pairs(tmp_path / "preferences")
    assert opened(1, Untouched(64), pairs=pairs) > before + 0.5
    assert opened(1, Untouched(64), pairs=pairs, algorithm="dpo", options={}) > before + 0.5  # follows verdicts as well
    verdict = pairs.rollouts.extras["preferred"]
    swapped = replace(pairs, rollouts=pairs.rollouts.with_extras(preferred=-verdict))
    assert opened(1, Untouched(64), pairs=swapped) < before / 2


@pytest.mark.checks("GRAPE")
def test_a_denoising_chain_improves_and_with_the_ranking_upside_down_gets_worse():
    def after(sign: float) -> float:
        policy = ChainPolicy()
        ranking = {"own": 0.0, "external": sign, "success": 5 * sign}
        config = replace(CONFIG, iterations=15, groups=16, group_size=8, minibatch_episodes=64, learning_rate=5e-3)
        finetune(policy, None, BanditWorld(64), replace(config, target_kl=0.1, options={"gcpg": ranking}), seed=0)
        return mean_reward(policy, True)["reward"]

    before = mean_reward(ChainPolicy(), True)["reward"]
    assert after(1.0) > before / 10
    assert after(-1.0) < 3 * before


def test_learning_from_stored_pairs_is_resumed(tmp_path: Path):
    opened(0, run=RunFolder(tmp_path / "played"), iterations=4)
    pairs = read_pairs(tmp_path / "played" / "preferences")
    for path, parts in (("whole", (6,)), ("parts", (3, 6))):
        for iterations in parts:
            run = RunFolder(tmp_path / path)
            opened(1, run=run, pairs=pairs, iterations=iterations, groups=9, checkpoint_every=3)
    for part in ("checkpoint", "resume"):
        for file in (tmp_path / "whole" / part).iterdir():
            assert file.read_bytes() == (tmp_path / "parts" / part / file.name).read_bytes(), file
    records = RunFolder(tmp_path / "whole").metrics()
    assert records[-1]["env_steps"] == 0
    assert records[-1]["pairs"] > 0
    assert not (tmp_path / "whole" / "preferences").exists()


def test_the_verb_reads_the_pairs_that_finetune_pairs_names(tmp_path: Path):
    opened(0, run=RunFolder(tmp_path), iterations=2)
    config = compose(["recipe=reach_planar", f"finetune.preference_pairs={tmp_path / 'preferences'}"])
    pairs = load_guidance(config, make_world("reach_planar", 1)).pairs
    assert pairs is not None
    assert torch.equal(pairs.rollouts.actions, read_pairs(tmp_path / "preferences").rollouts.actions)


def test_stored_pairs_of_another_policy_are_refused(tmp_path: Path):
    opened(0, run=RunFolder(tmp_path), iterations=2)
    pairs = Guidance(pairs=read_pairs(tmp_path / "preferences"))
    with pytest.raises(DataError, match="does not have"):
        finetune(ChainPolicy(), None, BanditWorld(4), CONFIG, guidance=pairs)
    pairs = Guidance(pairs=replace(read_pairs(tmp_path / "preferences"), instructions=("go left",)))
    with pytest.raises(
        DataError, match=r"action chunks have 1 steps of dimension 1, the policy's have 1 steps of dimension 2"
    ):
        finetune(ChainPolicy(steps=1), None, BanditWorld(4), CONFIG, guidance=pairs)
    with pytest.raises(DataError, match="have 1 denoising steps with log-probabilities, the policy has 2"):
        finetune(ChainPolicy(), None, BanditWorld(4), CONFIG, guidance=pairs)
    other = LockWorld(4)
    other.spec = replace(other.spec, observation={STATE: Field((9,))}, instructions=("go left",))
    narrow = ChoicePolicy()
    narrow.spec = replace(narrow.spec, observation=other.spec.observation)
    with pytest.raises(DataError, match=r"'observation.state' in the stored pairs: \(1, 14\); in the policy: \(1, 9\)"):
        finetune(narrow, None, other, CONFIG, guidance=pairs)
    with pytest.raises(ConfigError, match="collects no rollouts: set policy_lag=0 and overprovision=0"):
        finetune(narrow, None, LockWorld(4), replace(CONFIG, policy_lag=1, overprovision=0.5), guidance=pairs)
    critic = state_critic(FIELDS, 1, width=8)
    with pytest.raises(ConfigError, match="compares the episodes of a group, such as grape"):
        finetune(ChainPolicy(), critic, BanditWorld(4), replace(CONFIG, algorithm="ppo"), guidance=pairs)


@pytest.mark.checks("GRAPE")
def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="group_size >= 2"):
        finetune(ChainPolicy(), None, BanditWorld(4), replace(CONFIG, group_size=1))
    world = make_world("reach_planar", 4)
    still = DenoisingPolicyConfig(
        kind=PolicyKind.FLOW, flow_noise=FlowNoise.ODE, min_sampling_std=0.0, width=8, depth=1
    )
    policy = DenoisingPolicy(still, world.spec.observation, world.spec.action, fps=world.spec.fps)
    with pytest.raises(ConfigError, match="flow_noise"):
        policy.prepare_finetuning()
    with pytest.raises(ConfigError, match="defines no stages"):
        quiet = DenoisingPolicy(
            replace(still, flow_noise=FlowNoise.CONSTANT), world.spec.observation, world.spec.action, fps=10.0
        )
        quiet.prepare_finetuning()
        config = replace(CONFIG, options={"gcpg": {"stages": "task"}}, groups=1, group_size=2)
        finetune(quiet, None, world, config)


def test_push_cube_says_what_its_stages_are():
    world = make_world("push_cube", 8)
    assert isinstance(world, HasStages)
    assert [stage.name for stage in world.stages] == ["reach the cube", "push it to the goal"]
    config = DenoisingPolicyConfig(width=8, depth=1, sampling_steps=3)
    policy = DenoisingPolicy(config, world.spec.observation, world.spec.action, fps=world.spec.fps)
    policy.prepare_finetuning()
    chosen = replace(CONFIG, iterations=1, groups=2, options={"gcpg": {"stages": "task", "own": 0.0, "success": 0.0}})
    assert finetune(policy, None, world, chosen).iterations == 1
