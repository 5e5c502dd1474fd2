"""PPO over denoising steps: it improves a bandit, only with true advantages, and refuses what would ruin a policy."""
# pyright: reportArgumentType=false
# (Toys have the parts of a policy that the trainer reads.)

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bandit_toys import FIELDS, BanditWorld, ChainPolicy, mean_reward

from robopolicy.core.errors import CheckpointError, ConfigError, NonFiniteError, RobopolicyNote
from robopolicy.core.policy import Scores
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.run import RunFolder
from robopolicy.nn.precision import tolerance_in
from robopolicy.rl import coefficients
from robopolicy.rl.algorithm import Algorithm, build_algorithm
from robopolicy.rl.critic import Critic, state_critic
from robopolicy.rl.presets import RatioLevel
from robopolicy.training import update
from robopolicy.training.collection.episodes import StreamCollector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import require_same_scores
from robopolicy.training.finetune import FinetuneResult, finetune
from robopolicy.training.state import load_trainer, save_trainer
from robopolicy.training.update import Learner

CONFIG = FinetuneConfig(
    iterations=40,
    rollout_length=4,
    epochs=4,
    minibatch=128,
    learning_rate=5e-3,
    clip=0.1,
    clip_base=0.1,
    target_kl=0.1,
    discount=0.9,
    evaluate_every=0,
)


def _critic() -> Critic:
    torch.manual_seed(0)
    return state_critic(FIELDS, 1, width=16)


def _tune(config: FinetuneConfig, folder: Path | None = None, policy: ChainPolicy | None = None, **options):
    policy = policy or ChainPolicy()
    world = options.pop("world", None) or BanditWorld(64)
    result: FinetuneResult = finetune(
        policy, _critic(), world, config, None if folder is None else RunFolder(folder), **options
    )
    return policy, result


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"ratio_level": RatioLevel.DECISION_MEAN}, marks=pytest.mark.slow),
        {"scored_steps": 1},
        pytest.param({"auxiliaries": ("bc",), "options": {"bc": {"weight": 0.001}}}, marks=pytest.mark.slow),
    ],
    ids=["step ratios", "one ratio a decision", "random steps", "with a BC term"],
)
def test_a_denoising_bandit_improves(changes: dict):
    before = mean_reward(ChainPolicy(), True)["reward"]
    policy, _ = _tune(replace(CONFIG, **changes))
    after = mean_reward(policy, True)["reward"]
    assert before < -0.3
    assert after > before / 4


def test_shuffled_advantages_do_not_improve(monkeypatch: pytest.MonkeyPatch):
    true_prepare = Algorithm.prepare
    generator = torch.Generator().manual_seed(0)

    def shuffled(self: Algorithm, *arguments) -> Rollouts:
        rollouts = true_prepare(self, *arguments)
        advantage = rollouts.extras["advantage"].flatten(0, 1)
        order = torch.randperm(len(advantage), generator=generator)
        return rollouts.with_extras(advantage=advantage[order].reshape(rollouts.mask.shape))

    monkeypatch.setattr(Algorithm, "prepare", shuffled)
    policy, _ = _tune(CONFIG)
    before, after = mean_reward(ChainPolicy(), True)["reward"], mean_reward(policy, True)["reward"]
    assert after < before / 1.5


@pytest.mark.long
def test_a_strong_bc_term_holds_the_policy_at_its_base():
    free, _ = _tune(replace(CONFIG, iterations=20))
    held, _ = _tune(replace(CONFIG, iterations=20, auxiliaries=("bc",), options={"bc": {"weight": 10.0}}))
    start = ChainPolicy()
    moved = [(policy.first.weight - start.first.weight).norm() for policy in (free, held)]
    assert mean_reward(held, True)["reward"] < mean_reward(free, True)["reward"] - 0.1, moved


def test_critic_warmup_leaves_the_policy_alone_but_not_the_critic(tmp_path: Path):
    policy, _ = _tune(replace(CONFIG, iterations=2, critic_warmup=2), tmp_path)
    assert torch.equal(policy.first.weight, ChainPolicy().first.weight)
    records = RunFolder(tmp_path).metrics()
    assert records[-1]["actor_steps"] == 0
    assert records[-1]["value_loss"] < records[1]["value_loss"]


def test_a_time_limit_is_an_end_where_it_is_said_to_be():
    config = replace(CONFIG, iterations=3)
    ended, _ = _tune(config, world=BanditWorld(64, terminates=True))
    for limit, alike in (("terminate", True), ("truncate", False)):
        policy, _ = _tune(replace(config, time_limit=limit), world=BanditWorld(64))
        assert torch.equal(policy.first.weight, ended.first.weight) is alike


def test_the_kl_target_stops_the_epochs(tmp_path: Path):
    _tune(replace(CONFIG, iterations=3, target_kl=1e-4), tmp_path)
    record = RunFolder(tmp_path).metrics()[-1]
    assert record["kl_stop"] == 1
    assert record["actor_steps"] < 8


def test_a_step_far_beyond_the_kl_target_is_taken_back():
    wild = replace(
        CONFIG, iterations=2, learning_rate=5.0, actor_warmup=1, gradient_clip=1e3, target_kl=1e-3, minibatch=256
    )
    policy, _ = _tune(wild)
    assert torch.equal(policy.first.weight, ChainPolicy().first.weight)
    kept, _ = _tune(replace(wild, target_kl=None))
    assert not torch.equal(kept.first.weight, ChainPolicy().first.weight)


def test_the_first_actor_steps_are_small():
    steps = [_tune(replace(CONFIG, iterations=2, epochs=1, minibatch=256, actor_warmup=count))[0] for count in (1, 50)]
    moved = [float((policy.first.weight - ChainPolicy().first.weight).abs().max().detach()) for policy in steps]
    assert moved[1] == pytest.approx(moved[0] / 50, rel=1e-3)


def test_metrics_and_folders(tmp_path: Path):
    policy, result = _tune(replace(CONFIG, iterations=4, evaluate_every=2), tmp_path, evaluate=mean_reward)
    records = RunFolder(tmp_path).metrics()
    assert [record["iteration"] for record in records] == [0, 1, 2, 3, 4]
    assert result.env_steps == records[-1]["env_steps"] == 4 * 64 * 4
    names = {"success", "return", "kl", "clip_fraction", "explained_variance", "seconds_collect", "seconds_update"}
    assert names <= set(records[-1])
    assert "deterministic_success" in records[0]
    assert "deterministic_success" in records[2]
    assert "stochastic_reward" in records[4]
    assert "deterministic_success" not in records[3]
    for folder in ("base", "last", "checkpoint"):
        assert (tmp_path / folder / "model.safetensors").exists()
    assert torch.equal(ChainPolicy(seed=8).load(tmp_path / "base").first.weight, ChainPolicy().first.weight)
    assert torch.equal(ChainPolicy(seed=8).load(tmp_path / "checkpoint").first.weight, policy.first.weight)


def test_the_best_policy_is_kept_apart_from_the_last(tmp_path: Path):
    successes = iter([0.3, 0.9, 0.5, 0.1])
    calls: list[bool] = []

    def evaluate(policy, deterministic: bool) -> dict[str, float]:
        calls.append(deterministic)
        return {"success": next(successes) if deterministic else 0.0}

    policy, result = _tune(replace(CONFIG, iterations=3, evaluate_every=1), tmp_path, evaluate=evaluate)
    assert calls == [True, False] * 4
    assert result.best["iteration"] == 1
    best, last = (ChainPolicy().load(tmp_path / name) for name in ("checkpoint", "last"))
    assert torch.equal(best.first.weight, policy.first.weight)
    assert not torch.equal(best.first.weight, last.first.weight)


def test_a_run_that_only_harms_returns_the_base(tmp_path: Path):
    successes = iter([0.6, 0.5, 0.1])

    def evaluate(policy, deterministic: bool) -> dict[str, float]:
        return {"success": next(successes) if deterministic else 0.0}

    policy, result = _tune(replace(CONFIG, iterations=2, evaluate_every=1), tmp_path, evaluate=evaluate)
    assert result.best["iteration"] == 0
    assert torch.equal(policy.first.weight, ChainPolicy().first.weight)
    assert torch.equal(ChainPolicy(seed=8).load(tmp_path / "checkpoint").first.weight, policy.first.weight)


def test_what_was_best_in_another_world_is_forgotten(tmp_path: Path):
    successes, asked = iter([0.9, 0.8, 0.3, 0.4]), []

    def evaluate(policy, deterministic: bool) -> dict[str, float]:
        return {"success": next(successes) if deterministic else 0.0}

    def refreshed(iteration: int, policy) -> bool:
        asked.append(iteration)
        return iteration == 1

    config = replace(CONFIG, iterations=3, evaluate_every=1, checkpoint_every=1)
    _, result = _tune(config, tmp_path, evaluate=evaluate, after_checkpoint=refreshed)
    assert asked == [1, 2]
    assert result.best["iteration"] == 3 and result.best["deterministic_success"] == 0.4


def test_what_was_measured_for_real_compares_when_the_imagined_world_changes(tmp_path: Path):
    figures = iter([{"success": 0.5, "score": 0.3}, {"success": 0.6, "score": 0.8}, {"success": 0.9, "score": 0.4}])

    def evaluate(policy, deterministic: bool) -> dict[str, float]:
        return next(figures) if deterministic else {"success": 0.0}

    config = replace(CONFIG, iterations=2, evaluate_every=1, checkpoint_every=1)
    _, result = _tune(config, tmp_path, evaluate=evaluate, after_checkpoint=lambda iteration, policy: True)
    assert result.best["iteration"] == 1 and result.best["deterministic_score"] == 0.8


def test_it_stops_at_the_target(tmp_path: Path):
    config = replace(CONFIG, evaluate_every=5, target_success=0.5)
    _, result = _tune(config, tmp_path, evaluate=mean_reward)
    assert result.reached_target
    assert result.iterations < CONFIG.iterations
    assert result.best["deterministic_success"] >= 0.5


def test_chunks_cut_by_the_end_of_an_episode_and_tasks_are_handled():
    _, result = _tune(
        replace(CONFIG, iterations=2), policy=ChainPolicy(chunk=3), world=BanditWorld(8, horizon=4, with_task=True)
    )
    assert result.env_steps == 2 * 8 * (3 + 1 + 3 + 1)


def test_a_policy_that_scores_itself_differently_is_refused():
    policy = ChainPolicy()
    policy.offset = 1e-3
    with pytest.raises(RuntimeError, match="recomputed log-probabilities differ"):
        _tune(CONFIG, policy=policy)


@pytest.mark.parametrize(
    ("apart", "size", "categorical", "refused"),
    [
        (3e-5, 1.0, False, True),  # a Gaussian step is scored from the prediction that it was drawn with
        (3e-5, 1.0, True, False),  # a token comes out of a transformer that rounds by the number of rows
        (3e-5, 50.0, False, False),  # a sum over many elements is rounded in proportion
        (5e-4, 1.0, True, True),
        (5e-3, 5.0, True, True),
    ],
)
def test_how_far_scores_may_be_apart_depends_on_their_kind_and_size(
    apart: float, size: float, categorical: bool, refused: bool
):
    class Scoring(ChainPolicy):
        def log_prob(self, observation, latents):
            scores = super().log_prob(observation, latents)
            return Scores(torch.full_like(scores.logp, size + apart), scores.entropy)

    world, policy = BanditWorld(8), Scoring()
    rollouts = StreamCollector(world, policy, 2, 0, torch.Generator()).collect(0)
    rollouts = replace(rollouts, logp_behaviour=torch.full_like(rollouts.logp_behaviour, size))
    allowed = tolerance_in("fp32", CONFIG.ratio_tolerance, categorical)
    if refused:
        with pytest.raises(RuntimeError, match=r"set ratio_tolerance=\d"):
            require_same_scores(rollouts, policy, 0, world.spec.instructions, allowed, "a test")
    else:
        require_same_scores(rollouts, policy, 0, world.spec.instructions, allowed, "a test")


def test_random_units_need_a_policy_that_can_score_them():
    policy = ChainPolicy()
    policy.chooses_steps = False
    with pytest.raises(ConfigError, match="scored_steps=0"):
        _tune(replace(CONFIG, scored_steps=1), policy=policy)


@pytest.mark.parametrize(
    "changes",
    [
        {"ratio_level": RatioLevel.DECISION_SUM},
        {"ratio_level": RatioLevel.ACTION_MEAN},
        {"coefficient": "dpo", "minibatch_episodes": 8, "group_size": 2},
    ],
)
def test_all_steps_are_scored_where_they_count_together(changes):
    config = replace(CONFIG, iterations=1, groups=4, **changes)
    with pytest.warns(RobopolicyNote, match="scored_steps=1 is not used: .* all"):
        few, _ = _tune(replace(config, scored_steps=1))
    every, _ = _tune(config)
    for name, weight in every.state_dict().items():
        assert torch.equal(weight, few.state_dict()[name]), name


def without_clip(scored, *, width: float = 0.3):
    """Another package's coefficient, with a width of its own."""
    return scored.ratio.clamp(max=1 + width) * scored.advantage, {}


def with_clip(scored):
    """Another package's coefficient, which looks at the run's width in a function of its own."""
    return coefficients.ppo(*within(scored), 0.1), {}


def within(scored):
    return scored.log_ratio, scored.advantage, scored.clip_low


@pytest.mark.parametrize(
    ("coefficient", "options", "is_noted"),
    [
        ("cispo", {}, True),
        ("rec", {}, True),
        ("bapo", {}, True),
        ("none", {}, True),
        (f"{__name__}:without_clip", {}, True),
        ("ppo", {"low": 0.1, "high": 0.3}, True),
        ("ppo", {"low": 0.1}, False),
        ("decoupled_ppo", {}, False),
        (f"{__name__}:with_clip", {}, False),
    ],
)
def test_a_clip_range_that_the_coefficient_does_not_read_is_noted(coefficient: str, options: dict, is_noted: bool):
    named = {coefficient.rpartition(":")[2]: options} if options else {}
    config = replace(
        CONFIG, iterations=1, clip=0.2, clip_base=None, coefficient=coefficient, options=named, critic_warmup=0
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _tune(replace(config, clip_base=0.05, clip_high=0.4))
        texts = [str(each.message) for each in caught if "no effect" in str(each.message)]
        assert len(texts) == is_noted, texts
        assert all(text.startswith("clip_base=0.05, clip_high=0.4: no effect on the policy") for text in texts)
        caught.clear()
        _tune(config)
        assert not [each for each in caught if "no effect" in str(each.message)], "at the defaults there is none"


class OneNoisyStep(ChainPolicy):
    """Of each decision one step, drawn at random, is a choice."""

    def __init__(self, chooses_steps: bool):
        super().__init__()
        self.chooses_steps, self.asked = chooses_steps, list[tuple[int, ...]]()

    def act(self, observation, generator, *, deterministic=False):
        decision = super().act(observation, generator, deterministic=deterministic)
        noisy = torch.randint(decision.mask.shape[1], (len(decision.mask),), generator=generator)
        return replace(decision, mask=decision.mask & (torch.arange(decision.mask.shape[1]) == noisy[:, None]))

    def log_prob(self, observation, latents):
        scores = super().log_prob(observation, latents)
        if torch.is_grad_enabled():
            self.asked.append(tuple(scores.logp.shape[1:]))
        return scores


@pytest.mark.parametrize("changes", [{}, {"scored_steps": 1}], ids=["all", "random"])
def test_steps_that_are_no_choice_are_not_scored_and_nothing_else_changes(changes):
    short = replace(CONFIG, iterations=3, critic_warmup=0, target_kl=None)
    chooser, result = _tune(replace(short, **changes), policy=OneNoisyStep(True))
    every, same = _tune(short, policy=OneNoisyStep(False))
    total = chooser.spec.scored_steps
    assert set(chooser.asked) == {(1,)} and set(every.asked) == {(total,)} and total > 1
    assert same.env_steps == result.env_steps
    if not changes:  # a random order draws numbers of its own
        for mine, theirs in zip(chooser.parameters(), every.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)
    untouched = ChainPolicy()
    assert not torch.equal(chooser.first.weight, untouched.first.weight)


def test_a_non_finite_action_is_named_and_never_sent():
    policy, world = ChainPolicy(), BanditWorld(8)
    policy.poison = True
    with pytest.raises(NonFiniteError, match=r"actions.*fine-tuning iteration 1"):
        _tune(CONFIG, policy=policy, world=world)
    assert world.calls == 0


def test_a_non_finite_gradient_never_becomes_a_weight(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coefficients, "ppo", lambda log_ratio, *rest: torch.full_like(log_ratio, torch.nan))
    policy = ChainPolicy()
    with pytest.raises(NonFiniteError, match="policy loss is not finite at fine-tuning iteration 2"):
        _tune(CONFIG, policy=policy)
    assert torch.equal(policy.first.weight, ChainPolicy().first.weight)


def test_non_finite_values_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(update, "value_loss", lambda *rest: torch.tensor(torch.nan, requires_grad=True))
    with pytest.raises(NonFiniteError, match="value loss is not finite at fine-tuning iteration 1"):
        _tune(CONFIG)


def test_bad_configurations_are_refused():
    for changes in ({"iterations": 0}, {"discount": 1.5}, {"clip": 0.0}, {"gae_lambda": -1.0}):
        with pytest.raises(ConfigError):
            replace(CONFIG, **changes)


@pytest.mark.parametrize("file", ["trainer.json", "trainer.safetensors"])
def test_a_corrupt_resume_point_is_an_error_not_a_fresh_start(tmp_path: Path, file: str):
    _tune(replace(CONFIG, iterations=1), tmp_path)
    (tmp_path / "resume" / file).write_bytes(b"{")
    with pytest.raises(CheckpointError, match="corrupt"):
        _tune(replace(CONFIG, iterations=1), tmp_path)


def test_a_state_of_another_version_is_told(tmp_path: Path):
    _tune(replace(CONFIG, iterations=1), tmp_path)
    tree = load_trainer(RunFolder(tmp_path).resume_point)
    assert tree is not None
    save_trainer(RunFolder(tmp_path).resume_point, {key: tree[key] for key in tree if key != "course"})
    with pytest.raises(CheckpointError, match=r"another version .*course"):
        _tune(replace(CONFIG, iterations=2), tmp_path)
    older = {**tree, "config": {key: value for key, value in tree["config"].items() if key != "clip"} | {"cut": 0.2}}
    save_trainer(RunFolder(tmp_path).resume_point, older)
    with pytest.raises(CheckpointError, match=r"another version .*clip, cut"):
        _tune(replace(CONFIG, iterations=2), tmp_path)


def test_a_state_of_before_a_setting_became_a_constant_goes_on_unless_it_differs(tmp_path: Path):
    _tune(replace(CONFIG, iterations=1), tmp_path)
    tree = load_trainer(RunFolder(tmp_path).resume_point)
    assert tree is not None
    save_trainer(RunFolder(tmp_path).resume_point, {**tree, "config": {**tree["config"], "log_ratio_clamp": 5.0}})
    with pytest.raises(ConfigError, match=r"'finetune\.log_ratio_clamp' is 5\.0: it is fixed at 3\.0"):
        _tune(replace(CONFIG, iterations=2), tmp_path)
    save_trainer(RunFolder(tmp_path).resume_point, {**tree, "config": {**tree["config"], "log_ratio_clamp": 3.0}})
    _tune(replace(CONFIG, iterations=2), tmp_path)
    assert RunFolder(tmp_path).metrics()[-1]["iteration"] == 2


def test_a_resumed_run_must_have_the_same_configuration(tmp_path: Path):
    _tune(replace(CONFIG, iterations=1), tmp_path)
    with pytest.raises(ConfigError, match=r"learning_rate was 0\.005, now 0\.1"):
        _tune(replace(CONFIG, iterations=1, learning_rate=0.1), tmp_path)


@pytest.mark.checks("DAPO")
def test_ratios_may_rise_further_than_they_may_fall(monkeypatch: pytest.MonkeyPatch):
    """DAPO's clip-higher: 0.2 below and 0.28 above reach the coefficient."""
    config = FinetuneConfig(algorithm="grpo", clip=0.2, clip_high=0.28, groups=4, group_size=4, iterations=1)
    policy = ChainPolicy()
    learner = Learner(policy, None, None, build_algorithm(config), config, ("",))
    torch.testing.assert_close(learner.clip_low, torch.full((2,), 0.2))
    torch.testing.assert_close(learner.clip_high, torch.full((2,), 0.28))
    bounds: list[tuple[float, float]] = []
    ppo = coefficients.ppo

    def spy(log_ratio, advantage, low, high, *others):
        bounds.append((float(low.min()), float(high.max())))
        return ppo(log_ratio, advantage, low, high, *others)

    monkeypatch.setattr(coefficients, "ppo", spy)
    finetune(policy, None, BanditWorld(16), replace(config, evaluate_every=0))
    assert bounds and all(each == (pytest.approx(0.2), pytest.approx(0.28)) for each in bounds)
