"""Groups that grow after they were played: by a teacher from its own start or from a first error, and by a search."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from bandit_toys import SavesRows
from seeing_toys import SeeingWorld, denoising_policy, token_policy

from robopolicy.core.errors import ConfigError
from robopolicy.core.world import Snapshot
from robopolicy.nn.micro_batches import scores_of
from robopolicy.nn.sharing import load_trainable_state, trainable_state
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.context import Context, Tools
from robopolicy.training.acting import TakesOver
from robopolicy.training.collection import make_collector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.demonstrations import Demonstrations
from robopolicy.training.experience import decisions_at, episode_metrics, recompute_log_probs
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance

CONFIG = FinetuneConfig(
    algorithm="grpo", iterations=2, groups=3, group_size=4, num_initial_states=6, epochs=1, minibatch=64,
    evaluate_every=0, learning_rate=1e-3,
)  # fmt: skip
CORRECTED = replace(
    CONFIG, allocator="correct", models=("q_ensemble",), options={"correct": {"drop": 0.01, "share": 0.5}}
)
BEST = replace(
    CONFIG, allocator="teacher_rollouts", selection=("best_teacher_rollout",), coefficient="none",
    auxiliaries=("distill",), options={"distill": {"taught": 10.0}, "teacher_rollouts": {"samples": 3}},
)  # fmt: skip
SEARCHED = replace(
    CONFIG, allocator="tree_search", coefficient="siblings", weight="constant",
    options={"siblings": {"pairs": "values", "smooth": True}, "tree_search": {"rounds": 3}},
)  # fmt: skip
GUIDED = replace(
    SEARCHED, models=("step_preference",), advantage="w_reinforce", coefficient=None,
    options={"tree_search": {"bound": "uct", "guided": 1.0}, "step_preference": {"rounds": 4}},
)  # fmt: skip
PROCEDURES = replace(
    CONFIG, iterations=3, models=("past_policy",), allocator="procedures", rewards=("procedure_scale",),
    advantage="procedures", coefficient="future_ratio",
)  # fmt: skip
DIVIDED = replace(CONFIG, allocator="prefixes", advantage="tree_po", models=("q_ensemble",))
ALONE = SEARCHED, DIVIDED, GUIDED, PROCEDURES
"""Without a teacher."""


class SavedWorld(SavesRows, SeeingWorld):
    """The same, with rows that can be saved."""


def pair_of(make, world):
    policies = make(world), make(world, seed=1)
    for each in policies:
        each.prepare_finetuning()
    return policies


def collected(make, config: FinetuneConfig, values=None, demonstrations=None):
    world = SavedWorld(8)
    policy, teacher = pair_of(make, world)
    draws = torch.Generator().manual_seed(0)
    acting = None if config in ALONE else lambda learner: TakesOver(learner, teacher)
    collector = make_collector(
        world, policy, build_algorithm(config), config, 0, draws, demonstrations, acting, values=values
    )
    return collector.collect(0), policy, teacher, world.spec.instructions


@pytest.mark.checks("allocator/correct", "SCOPE-stepwise")
@pytest.mark.parametrize("make", [denoising_policy, token_policy])
def test_corrections_share_the_students_beginning_and_are_scored_as_its_own(make):
    """The value falls after the second decision of every episode: all failures are wrong there."""
    table = torch.tensor([0.9, 0.9, 0.1])
    rollouts, policy, teacher, texts = collected(
        make, CORRECTED, lambda rollouts: table[: rollouts.shape[1]].expand(rollouts.shape)
    )
    helped = rollouts.extras["helped"][:, 0]
    failures = (~helped & ~rollouts.row_success).sum()
    assert 0 < int(helped.sum()) <= int(failures) and int(helped.sum()) <= 2 * 3
    assert (rollouts.parent[helped] >= 0).all() and (rollouts.branch_decision[helped] == 1).all()
    assert not rollouts.row_success[rollouts.parent[helped]].any(), "failures are corrected"
    assert not rollouts.mask[helped, 0].any(), "the beginning is scored where it was played"
    logp = recompute_log_probs(rollouts, policy, texts)[0]
    torch.testing.assert_close(
        logp[rollouts.mask], rollouts.logp_behaviour[rollouts.mask].float(), atol=1e-4, rtol=1e-4
    )
    taught = recompute_log_probs(rollouts, teacher, texts)[0][rollouts.mask & helped[:, None, None]]
    assert taught.mean() > logp[rollouts.mask & helped[:, None, None]].mean(), "the teacher chose them"
    assert len(rollouts.unaided.group) == 12 and episode_metrics(rollouts.unaided)["episodes"] == 12


@pytest.mark.checks("allocator/teacher_rollouts", "BRTS")
@pytest.mark.parametrize("make", [denoising_policy, token_policy])
def test_a_teacher_plays_several_episodes_of_every_group(make):
    rollouts, policy, _, texts = collected(make, BEST)
    helped = rollouts.extras["helped"][:, 0]
    assert helped.tolist() == [False] * 12 + [True] * 9
    assert rollouts.group.bincount().tolist() == [7, 7, 7]
    assert torch.equal(rollouts.extras["start"][helped][:, 0].unique(), rollouts.extras["start"][:, 0].unique())
    logp = recompute_log_probs(rollouts, policy, texts)[0]
    torch.testing.assert_close(
        logp[rollouts.mask], rollouts.logp_behaviour[rollouts.mask].float(), atol=1e-4, rtol=1e-4
    )


@pytest.mark.checks("allocator/guided_teacher_rollouts", "BRTS")
def test_a_teacher_that_fails_is_guided_and_only_right_ones_stay(monkeypatch: pytest.MonkeyPatch):
    """Near the end of a demonstration one decision is left, in which the first world row alone succeeds."""
    plain = SavedWorld.step

    def step(self, actions):
        result, first = plain(self, actions), np.arange(self.batch_size) == 0
        return replace(result, success=result.terminated & (self.late & first))

    def restore(self, snapshot, rows=None):
        self.late[np.asarray(rows)] = True
        return plain_restore(self, snapshot, rows)

    plain_restore = SavedWorld.restore
    monkeypatch.setattr(SavedWorld, "late", np.zeros(8, dtype=bool), raising=False)
    monkeypatch.setattr(SavedWorld, "step", step)
    monkeypatch.setattr(SavedWorld, "restore", restore)
    shown = [Snapshot({"context": np.zeros((1, 2)), "time": np.array([time])}) for time in range(3)]
    config = replace(
        BEST, allocator="guided_teacher_rollouts",
        options={"distill": {"taught": 10.0}, "guided_teacher_rollouts": {"samples": 2, "depth": 0.9}},
    )  # fmt: skip
    rollouts, *_ = collected(token_policy, config, demonstrations=Demonstrations(dict.fromkeys(range(6), shown)))
    helped = rollouts.extras["helped"][:, 0]
    assert helped.tolist() == [False] * 12 + [True] * 7, "two of each group, and one of three guided ones"
    assert rollouts.row_success.tolist() == [False] * 18 + [True]
    assert rollouts.alive.sum(1).tolist() == [3] * 18 + [1]


@pytest.mark.long
@pytest.mark.checks("BRTS", "SCOPE-stepwise", "MCTS-DPO", "TRACE", "rStar-Math", "APPO")
@pytest.mark.parametrize(
    "config",
    [CORRECTED, BEST, SEARCHED, DIVIDED, GUIDED, PROCEDURES],
    ids=["corrected", "best", "searched", "divided", "guided", "procedures"],
)
@pytest.mark.parametrize("make", [denoising_policy, token_policy])
def test_a_run_learns_from_grown_groups(make, config: FinetuneConfig):
    world = SavedWorld(8)
    policy, teacher = pair_of(make, world)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    finetune(policy, None, world, config, guidance=Guidance(None if config in ALONE else teacher))
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


@pytest.mark.checks("allocator/tree_search", "MCTS-DPO")
def test_every_round_of_a_search_adds_an_episode_to_every_group():
    rollouts, *_ = collected(denoising_policy, SEARCHED)
    assert rollouts.group.bincount().tolist() == [7, 7, 7]
    helped = rollouts.extras["helped"][:, 0]
    assert int(helped.sum()) == 9 and (rollouts.branch_decision[helped] >= 1).all()


@pytest.mark.checks("allocator/prefixes", "TRACE")
def test_as_many_episodes_are_played_as_in_equal_groups_of_them():
    """From the values on: all states before the second chunk of failures would almost surely succeed."""
    table = torch.tensor([0.1, 0.99, 0.1])
    rollouts, *_ = collected(denoising_policy, DIVIDED, lambda each: table[: each.shape[1]].expand(each.shape))
    helped = rollouts.extras["helped"][:, 0]
    assert helped.tolist() == [False] * 6 + [True] * 6
    assert (rollouts.branch_decision[helped] == 1).sum() >= 3 and (rollouts.parent[helped] >= 0).all()


def test_what_excludes_growth_is_refused():
    world = SavedWorld(8)
    policy, teacher = pair_of(token_policy, world)
    for changes in ({"branch_at": (1,)}, {"shards": 2}, {"staleness": 1}, {"overprovision": 0.5}):
        with pytest.raises(ConfigError, match=f"set {next(iter(changes))}="):
            finetune(policy, None, world, replace(SEARCHED, **changes))
    with pytest.raises(ConfigError, match="does not support snapshots"):
        finetune(policy, None, SeeingWorld(8), SEARCHED)
    with pytest.raises(ConfigError, match="teacher_episode_fraction=0"):
        finetune(policy, None, world, replace(BEST, teacher_episode_fraction=0.5), guidance=Guidance(teacher))
    with pytest.raises(ConfigError, match="Use a teacher of the same"):
        TakesOver(policy, denoising_policy(world))


@pytest.mark.checks("models/past_policy", "allocator/procedures", "APPO")
@pytest.mark.parametrize("make", [denoising_policy, token_policy])
def test_branches_begin_where_the_last_update_made_the_rest_likelier(make):
    """The past policy is that before the update: while both are equal all scores are 0, then they are not."""
    world = SavedWorld(8)
    policy, other = pair_of(make, world)
    algorithm = build_algorithm(PROCEDURES)
    tools = Tools(
        policy, None, None, world.spec.observation, 1, world.spec.instructions,
        lambda rollouts, where: decisions_at(rollouts, where, world.spec.instructions)[0],
        lambda each, rollouts, where: scores_of(each, *decisions_at(rollouts, where, world.spec.instructions)),
    )  # fmt: skip
    model = algorithm.models["past_policy"](tools)
    draws = torch.Generator().manual_seed(0)
    collector = make_collector(world, policy, algorithm, PROCEDURES, 0, draws, values=model.chunk_scores)
    first = collector.collect(0)
    assert not model.chunk_scores(first).any() and (first.branch_decision <= 0).all()
    assert first.group.bincount().tolist() == [4, 4, 4]
    model.annotate(first, Context(draws))
    load_trainable_state(policy, trainable_state(other))
    second = collector.collect(1)
    branched = second.branch_decision > 0
    assert branched.any() and second.extras["helped"][branched].all()
    scores = model.annotate(second, Context(draws)).extras["branching_score"]
    chosen = scores[second.parent[branched], second.branch_decision[branched] - 1]
    assert (chosen > 0).all() and not scores[branched].any()
    assert not model.chunk_scores(second).any(), "it has become the policy that acted"
