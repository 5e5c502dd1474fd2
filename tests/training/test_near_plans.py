"""Imitation beside reinforcement, averaged policies, who acts, experts as rows, planning in imagined training."""

import copy
import math
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest
import torch
from bandit_toys import BanditWorld, ChainPolicy
from rl.made_rollouts import make_rollouts

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Trainable
from robopolicy.core.randomness import Generators
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import STATE
from robopolicy.policies import TokenConfig, TokenPolicy, TokenPolicyConfig
from robopolicy.policies.token.configuration import TokenDecoding
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.context import Context
from robopolicy.rl.episodes import EpisodePlayer, groups_of
from robopolicy.rl.experimental.replay import ReMix
from robopolicy.rl.registry import Need
from robopolicy.rl.weights import episode_sizes
from robopolicy.training.acting import TeacherSchedule
from robopolicy.training.collection import make_collector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import decisions_at, learning_metrics, recompute_log_probs, with_executed
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import ExpertMixer, Guidance, expert_rollouts
from robopolicy.training.update import Learner, PolicyAverage
from worldmodels.configuration import PlanConfig
from worldmodels.planning import PlannedPolicy
from worldmodels.protocol import Imagined

CONFIG = FinetuneConfig(
    algorithm="grpo",
    weight="step_mean",
    iterations=4,
    groups=3,
    group_size=4,
    epochs=2,
    minibatch=16,
    learning_rate=3e-3,
    actor_warmup=1,
    gradient_clip=1e9,
    target_kl=None,
    evaluate_every=0,
    checkpoint_every=2,
)


def whole_episodes(policy: Trainable, seed: int = 0) -> Rollouts:
    """Six episodes of a policy in two groups, with made-up advantages."""
    world, draws = BanditWorld(6), torch.Generator().manual_seed(seed)
    rollouts = EpisodePlayer(world, policy).play(groups_of([1, 2], 3), draws)
    return rollouts.with_extras(advantage=torch.randn(rollouts.mask.shape, generator=draws))


def gradient_of(learner: Learner, rollouts: Rollouts) -> list[torch.Tensor]:
    """The gradient of the loss that one epoch of one minibatch takes a step along."""
    learner.update(rollouts, Context(torch.Generator().manual_seed(3)), torch.Generator().manual_seed(4), "the test")
    return [parameter.grad.clone() for parameter in learner.parameters if parameter.grad is not None]


def learner_of(policy: Trainable, config: FinetuneConfig, **parts) -> Learner:
    single = replace(config, epochs=1, minibatch=10**6)
    instructions = BanditWorld(1).spec.instructions
    return Learner(policy, None, None, build_algorithm(single), single, instructions, **parts)


@pytest.mark.parametrize("scored", [0, 4])
def test_chosen_steps_are_in_the_order_of_the_chain(scored: int):
    """Of ten steps four or seven are noisy, and steps are chosen among these: ties of topk come in any order."""
    learner = learner_of(ChainPolicy(), replace(CONFIG, scored_steps=scored))
    noisy = torch.tensor([[0, 1, 0, 1, 1, 0, 0, 1, 0, 0], [1, 1, 0, 1, 0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    rollouts = make_rollouts([1, 1], [0, 0], steps=10)
    learner.sampling_steps, learner.most = 10, 7
    steps, subset = learner._choose_steps(replace(rollouts, mask=noisy[:, None]), torch.Generator().manual_seed(0))
    assert subset and steps.shape == (2, 1, scored or 7) and bool((steps.diff(dim=-1) > 0).all())
    assert bool(noisy[1].gather(0, steps[1, 0]).all())
    assert set(noisy[0].nonzero().flatten().tolist()) <= set(steps[0, 0].tolist())


@pytest.mark.checks("controllers/imitation_mix", "DataMind")
def test_the_loss_is_the_mix_of_imitation_and_reinforcement():
    policy = ChainPolicy(seed=1)
    rollouts = whole_episodes(policy)
    batch = {"observation": {STATE: torch.rand(5, 1, 2)}, "actions": torch.rand(5, 1, 2)}
    config = replace(CONFIG, auxiliaries=("experts",), options={"experts": {"weight": 1.0}})

    def gradient(**knobs: float) -> list[torch.Tensor]:
        learner = learner_of(copy.deepcopy(policy), config, experts=repeat(batch))
        learner.knobs.update(knobs)
        return gradient_of(learner, rollouts)

    imitation = gradient(experts_scale=1.0, rl_scale=0.0)
    reinforcement = gradient(experts_scale=0.0, rl_scale=1.0)
    for mixed, a, b in zip(gradient(experts_scale=0.7, rl_scale=0.3), imitation, reinforcement, strict=True):
        assert float(a.abs().max()) > 0
        assert float(b.abs().max()) > 0
        torch.testing.assert_close(mixed, 0.7 * a + 0.3 * b)


@pytest.mark.checks("Missing-Old-Logits")
def test_the_average_of_policies_weighs_each_by_its_age():
    policy = ChainPolicy(seed=0)
    average, decay = PolicyAverage(policy, 0.8), 0.8
    past = [[weight.detach().clone() for weight in policy.parameters()]]
    for number in range(1, 6):
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
        past.append([weight.detach().clone() for weight in policy.parameters()])
        average.update(policy)
    shares = torch.tensor([decay ** (5 - number) for number in range(6)])
    for place, mean in enumerate(average.policy.parameters()):
        slow = sum(share * weights[place] for share, weights in zip(shares / shares.sum(), past, strict=True))
        torch.testing.assert_close(mean, slow)
    before = [mean.clone() for mean in average.policy.parameters()]
    average.update(policy)
    assert not torch.equal(before[0], next(iter(average.policy.parameters())))
    average.take_back()
    assert all(torch.equal(a, b) for a, b in zip(before, average.policy.parameters(), strict=True))


@pytest.mark.checks("Missing-Old-Logits", "coefficient/decoupled_ppo")
def test_clipping_around_the_average_is_the_gradient_of_the_decoupled_surrogate():
    actor, policy = ChainPolicy(seed=1), ChainPolicy(seed=1)
    rollouts = whole_episodes(actor)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
    config = replace(CONFIG, proximal_policy="average", coefficient="decoupled_ppo", clip=0.05)
    learner = learner_of(policy, config)
    assert learner.average is not None
    learner.average.restore({"total": 1.0, "policy": actor.state_dict()})
    learner.average.update(policy)  # halfway between the two

    observation, latents = decisions_at(rollouts, rollouts.alive, BanditWorld(1).spec.instructions)
    mine = copy.deepcopy(policy)
    logp, proximal = mine.log_prob(observation, latents).logp, learner.average.log_prob(observation, latents)
    behaviour, advantage = rollouts.logp_behaviour[rollouts.alive], rollouts.extras["advantage"][rollouts.alive]
    ratio, weight = (logp - proximal).exp(), (proximal - behaviour).exp()
    assert bool((ratio > 1.05).any() & (ratio < 0.95).any())
    surrogate = torch.minimum(ratio * weight * advantage, ratio.clamp(0.95, 1.05) * weight * advantage).mean()
    expected = torch.autograd.grad(-surrogate, list(mine.parameters()))
    for gradient, slow in zip(gradient_of(learner, rollouts), expected, strict=True):
        torch.testing.assert_close(gradient, slow, atol=1e-6, rtol=1e-4)


def tuned(config: FinetuneConfig, run: Path | None = None, guidance: Guidance | None = None) -> dict[str, torch.Tensor]:
    policy = ChainPolicy()
    folder = None if run is None else RunFolder(run)
    finetune(policy, None, BanditWorld(12), config, folder, guidance=guidance or Guidance())
    return dict(policy.state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.checks("Missing-Old-Logits")
def test_stale_decisions_are_clipped_around_what_the_configuration_says_and_averages_survive_a_resume(tmp_path):
    stale = replace(CONFIG, coefficient="decoupled_ppo", policy_lag=2, clip=0.02, learning_rate=1e-2)
    around = {name: tuned(replace(stale, proximal_policy=name), tmp_path / name) for name in ("current", "behaviour")}
    assert not same(around["current"], around["behaviour"])
    average = replace(stale, proximal_policy="average", proximal_decay=0.8)
    whole = tuned(average)
    assert not same(whole, around["current"])
    tuned(replace(average, iterations=2), tmp_path / "parts")
    assert same(whole, tuned(average, tmp_path / "parts"))


@pytest.mark.checks("controllers/vcpo", "VCPO")
@pytest.mark.parametrize("proximal", ["current", "behaviour", "average"])
def test_vcpo_sees_old_data_whatever_the_clip_is_around(proximal: str, tmp_path: Path):
    stale = replace(CONFIG, policy_lag=2, learning_rate=1e-1, proximal_policy=proximal)
    scaled = tuned(replace(stale, controllers=("vcpo",)), tmp_path)
    sizes = [row.get("sequence_ess", 1.0) for row in RunFolder(tmp_path).metrics()[1:]]
    assert sizes[0] == 1.0 and all(0 < size < 0.99 for size in sizes[1:])
    assert not same(scaled, tuned(stale))


def test_what_a_mechanism_compares_with_is_no_effective_sample_size():
    """Replayed rows of instruction_contrast have the scores of the iteration in which they were played."""
    rollouts = make_rollouts([1, 1], [0, 0])
    current = rollouts.logp_behaviour + torch.tensor([0.0, 1.0])[:, None, None]
    rollouts = rollouts.with_extras(advantage=torch.ones(rollouts.mask.shape), current_logp=current)
    assert "sequence_ess" not in learning_metrics(rollouts, frozenset({Need.CONTRAST_SCORES}))
    assert 0 < learning_metrics(rollouts, frozenset({Need.SEQUENCE_RATIOS}))["sequence_ess"] < 0.9


class Pointing:
    """A teacher that always points to one place."""

    def __init__(self, chunk: int = 1, place: float = 0.25):
        self.spec = replace(ChainPolicy(chunk=chunk).spec, scored_steps=0)
        self.place = place

    def act(self, observation, generator, *, deterministic=False) -> Decision:
        return Decision(torch.full((len(observation[STATE]), self.spec.chunk, 2), self.place))

    def reset(self, rows=None) -> None:
        pass


@pytest.mark.checks("DAgger-LM")
def test_teacher_and_learner_take_turns_at_random_and_the_teacher_less_and_less():
    turns = TeacherSchedule(Pointing(), first=0.8, until=0.5)
    learner, observation = ChainPolicy(), {STATE: torch.zeros(4000, 1, 2)}
    for done, share in ((0.0, 0.8), (0.125, 0.6), (0.25, 0.4), (0.375, 0.2), (0.5, 0.0), (0.9, 0.0)):
        turns.begin(done)
        decision = turns(learner).act(observation, torch.Generator().manual_seed(0))
        alone = learner.act(observation, torch.Generator().manual_seed(0))
        taught = decision.latents["taught"]
        assert float(taught.float().mean()) == pytest.approx(share, abs=0.03)
        assert bool((decision.actions[taught] == 0.25).all())
        assert torch.equal(decision.actions[~taught], alone.actions[~taught])
        assert torch.equal(decision.mask, ~taught[:, None].expand(decision.mask.shape))
        assert torch.equal(decision.logp[~taught], alone.logp[~taught])
    with pytest.raises(ConfigError, match="teacher_fraction"):
        turns(ChainPolicy(chunk=2))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.checks("DAgger-LM")
def test_what_the_teacher_does_is_played_but_no_choice_of_the_learners(algorithm: str):
    turns, policy, config = TeacherSchedule(Pointing(), 0.5, 0.5), ChainPolicy(), replace(CONFIG, algorithm=algorithm)
    draws = torch.Generator().manual_seed(0)
    collector = make_collector(BanditWorld(12), policy, build_algorithm(config), config, 0, draws, acting=turns)
    rollouts = collector.collect(0)
    taught = rollouts.extras["taught"]
    assert 0.3 < float(taught[rollouts.alive].float().mean()) < 0.7
    assert bool((rollouts.actions[taught] == 0.25).all())
    assert not bool(rollouts.mask[taught].any())
    assert torch.equal(rollouts.played, rollouts.alive)


@pytest.mark.checks("auxiliaries/dagger", "DAgger-LM")
def test_dagger_is_the_learners_own_loss_on_the_teachers_labels_of_every_state():
    policy, rollouts = ChainPolicy(seed=2), whole_episodes(ChainPolicy(seed=1))
    config = replace(CONFIG, coefficient="none", auxiliaries=("dagger",), options={"dagger": {"weight": 0.5}})
    state = rollouts.observation[STATE][rollouts.alive]
    state = state[torch.randperm(len(state), generator=torch.Generator().manual_seed(4))]  # as minibatches are drawn
    mine = copy.deepcopy(policy)
    labels = {"observation": {STATE: state}, "actions": torch.full((len(state), 1, 2), 0.25)}
    slow = 0.5 * mine.loss(labels, torch.Generator().manual_seed(3))["imitation"].mean()
    expected = torch.autograd.grad(slow, list(mine.parameters()))
    gradients = gradient_of(learner_of(policy, config, teacher=Pointing()), rollouts)
    for mean, one in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mean, one, atol=1e-6, rtol=1e-4)


@pytest.mark.checks("DAgger-LM")
def test_the_whole_of_dagger_comes_to_its_teacher_and_survives_a_resume(tmp_path):
    config = replace(
        CONFIG,
        coefficient="none",
        auxiliaries=("dagger",),
        replay="aggregate",
        teacher_fraction=0.9,
        iterations=6,
        learning_rate=3e-2,
    )
    guidance = Guidance(Pointing())
    whole = tuned(config, guidance=guidance)
    steady = replace(config, teacher_decay_fraction=1e9, iterations=3, checkpoint_every=1)  # no schedule along the run
    tuned(replace(steady, iterations=2), tmp_path / "parts", guidance)
    assert same(tuned(steady, guidance=guidance), tuned(steady, tmp_path / "parts", guidance))
    policy = ChainPolicy()
    policy.load_state_dict(whole)
    observation = {STATE: torch.rand(64, 1, 2, generator=torch.Generator().manual_seed(0)) * 0.4 - 0.2}
    start, end = (
        each.act(observation, torch.Generator().manual_seed(1), deterministic=True).actions - 0.25
        for each in (ChainPolicy(), policy)
    )
    assert float(end.abs().mean()) < 0.3 * float(start.abs().mean())
    with pytest.raises(ConfigError, match="needs a teacher"):
        tuned(config)


class Guessing:
    """A model of the bandit whose uncertainty is how far to the right an action points."""

    def __init__(self):
        self.spec = replace(BanditWorld(1).spec, rewards=("reward",))

    def initial(self, context, seeds):
        return {"place": torch.from_numpy(context.last(STATE).astype("float32")), "seed": torch.from_numpy(seeds)}

    def imagine(self, latent, actions):
        over = torch.zeros(len(actions), dtype=torch.bool)
        observation = {STATE: latent["place"]}
        return latent, Imagined(
            observation, {"reward": torch.zeros(len(actions))}, over, over, actions[:, 0].float().exp()
        )


@pytest.mark.checks("COPlanner")
def test_imagined_rollouts_avoid_what_the_model_does_not_know_and_exploration_seeks_it():
    def right(uncertainty: float | None) -> tuple[float, Rollouts]:
        policy, config = ChainPolicy(std=0.5), replace(CONFIG, groups=8)
        plan = None if uncertainty is None else PlanConfig(8, 2, uncertainty=uncertainty)
        acting = None if plan is None else lambda learner: PlannedPolicy(learner, Guessing(), plan)
        draws, world = torch.Generator().manual_seed(0), BanditWorld(12)
        algorithm, acts = build_algorithm(config), Guidance(acting=acting).who_acts(None)
        rollouts = make_collector(world, policy, algorithm, config, 0, draws, acting=acts).collect(0)
        scores = policy.log_prob(*decisions_at(rollouts, rollouts.alive, world.spec.instructions)).logp
        torch.testing.assert_close(scores, rollouts.logp_behaviour[rollouts.alive])  # still the policy's own decisions
        return float(rollouts.actions[rollouts.alive][..., 0].mean()), rollouts

    cautious, alone, curious = (right(uncertainty)[0] for uncertainty in (-1.0, None, 1.0))
    assert cautious < alone - 0.4
    assert curious > alone + 0.4


@pytest.mark.checks("COPlanner")
def test_a_plan_is_worth_its_discounted_rewards_and_uncertainties():
    first = torch.tensor([[0.1, 0.0], [0.3, 0.0]])
    config = PlanConfig(2, 3, discount=0.9, uncertainty=-0.5)

    class Steady:
        spec = ChainPolicy().spec

        def act(self, observation, generator, *, deterministic=False) -> Decision:
            rows = len(observation[STATE])
            return Decision(first.repeat(rows // 2, 1)[:, None])

        def reset(self, rows=None) -> None:
            pass

    planned = PlannedPolicy(Steady(), Guessing(), config)
    planned.act({STATE: torch.zeros(1, 1, 2)}, torch.Generator().manual_seed(0))
    slow = [-0.5 * math.exp(step) * (1 + 0.9 + 0.81) for step in (0.1, 0.3)]
    assert planned.last_scores[0].tolist() == pytest.approx(slow, rel=1e-5)


def speaking(chunk: int = 2, decoding: TokenDecoding = TokenDecoding.CAUSAL) -> TokenPolicy:
    """The smallest token policy for the bandit."""
    token = TokenConfig(width=8, depth=1, heads=2, feed_forward=8, bins=5, decoding=decoding, decode_steps=2)
    spec = BanditWorld(1).spec
    config = TokenPolicyConfig(chunk=chunk, token=token)
    policy = TokenPolicy(config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions)
    policy.prepare_finetuning()
    return policy


def recorded(played: Rollouts, world: BanditWorld) -> Episodes:
    """The same episodes as a recording has them; the bandit shows one state for the whole of an episode."""
    spec, lengths = world.spec, played.duration.sum(1)
    success = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    success[lengths.cumsum(0) - 1] = played.success.any(1)
    return Episodes(
        observation_fields=dict(spec.observation),
        action_field=spec.action,
        fps=spec.fps,
        observation={STATE: played.observation[STATE][:, 0, -1].repeat_interleave(lengths + 1, 0)},
        actions=played.actions[played.valid].clamp(-1, 1),
        lengths=lengths,
        tasks=tuple(spec.instructions[task] for task in played.task[:, 0].tolist()),
        rewards={name: value[played.valid] for name, value in played.rewards.items()},
        step_success=success,
        terminated=played.terminated.any(1),
        final_known=torch.ones(len(lengths), dtype=torch.bool),
    )


@pytest.mark.checks("DynaWeb")
def test_own_episodes_told_back_are_the_rollouts_they_came_from():
    world, policy = BanditWorld(6, horizon=3, with_task=True), speaking()
    played = EpisodePlayer(world, policy).play(groups_of([1, 2], 3), torch.Generator().manual_seed(0))
    played = with_executed(played, policy, world.spec.instructions)
    told = expert_rollouts(policy, recorded(played, world), torch.arange(6), world.spec.instructions, torch.Generator())
    assert told.shape == played.shape == (6, 2)
    for name in ("valid", "mask", "terminated", "truncated", "success", "task"):
        assert torch.equal(getattr(told, name), getattr(played, name)), name
    assert torch.equal(told.latents["tokens"][:, 0], played.latents["tokens"][:, 0])
    assert torch.equal(told.latents["executed"], played.latents["executed"])
    torch.testing.assert_close(told.actions[told.valid], played.actions[told.valid])
    torch.testing.assert_close(told.rewards["reward"], torch.where(played.valid, played.rewards["reward"], 0.0))
    torch.testing.assert_close(told.observation[STATE], played.observation[STATE])
    scores = recompute_log_probs(told, policy, world.spec.instructions)[0]
    torch.testing.assert_close(scores, torch.where(played.mask, played.logp_behaviour, 0.0), atol=1e-5, rtol=1e-5)


@pytest.mark.checks("DynaWeb")
@pytest.mark.parametrize("decoding", list(TokenDecoding))
def test_experts_join_the_rollouts_with_advantages_by_their_returns_and_ratios_of_one(decoding: TokenDecoding):
    world, policy = BanditWorld(6, horizon=4, with_task=True), speaking(decoding=decoding)
    draws = torch.Generator().manual_seed(0)
    own = EpisodePlayer(world, policy).play(groups_of([1, 2], 3), draws)
    own = own.with_extras(advantage=torch.randn(own.mask.shape, generator=draws), **episode_sizes(own.mask))
    experts = aiming_episodes()
    rows = ExpertMixer(policy, experts, world.spec.instructions, 0.5, torch.Generator().manual_seed(1))
    mixed = rows.beside(own.without(following=True), Context(draws, iteration=7))
    assert len(mixed.group) == 9
    torch.testing.assert_close(mixed.extras["advantage"][:6], own.extras["advantage"])
    returns = mixed.row_return
    slow = (returns[6:] - returns.mean()) / (returns.std(unbiased=False) + 1e-6)
    expected = slow[:, None, None].expand(mixed.mask[6:].shape)
    torch.testing.assert_close(mixed.extras["advantage"][6:], expected)
    assert bool((slow > 0).all())
    assert mixed.group[6:].tolist() == [2, 3, 4]
    assert {tuple(row) for row in mixed.actions[6:].flatten(1).tolist()} <= {
        tuple(row) for row in experts.actions.reshape(4, -1).tolist()
    }
    scores = recompute_log_probs(mixed, policy, world.spec.instructions)[0]
    torch.testing.assert_close(scores[6:], mixed.logp_behaviour[6:].float())
    assert bool((mixed.policy_version[6:] == 7).all())
    with pytest.raises(ConfigError, match="cannot compute log-probabilities"):
        ExpertMixer(ChainPolicy(), experts, world.spec.instructions, 0.5, draws)


def aiming_episodes() -> Episodes:
    """Four episodes of four steps that go where the bandit pays most."""
    context = 0.2 * torch.rand(4, 1, 2, generator=torch.Generator().manual_seed(0)) - 0.1
    actions = (context + torch.tensor([0.5, -0.5])).expand(4, 4, 2)
    spec = BanditWorld(1).spec
    return Episodes(
        spec.observation,
        spec.action,
        spec.fps,
        {STATE: context.expand(4, 5, 2).reshape(20, 2)},
        actions.reshape(16, 2),
        torch.full((4,), 4),
        spec.instructions * 2,
        rewards={"reward": torch.zeros(16)},
        step_success=torch.ones(16, dtype=torch.bool),
    )


@pytest.mark.checks("DynaWeb")
def test_a_token_policy_learns_from_experts_rows_and_goes_on_after_a_kill(tmp_path):
    config = replace(CONFIG, expert_episode_fraction=0.5, iterations=4, learning_rate=1e-2)

    def tuned_tokens(section: FinetuneConfig, run: Path | None = None) -> TokenPolicy:
        policy, folder = speaking(), None if run is None else RunFolder(run)
        world = BanditWorld(12, with_task=True)
        finetune(policy, None, world, section, folder, guidance=Guidance(experts=aiming_episodes()))
        return policy

    def likelihood(policy: TokenPolicy) -> float:
        instructions = BanditWorld(1).spec.instructions
        told = expert_rollouts(policy, aiming_episodes(), torch.arange(4), instructions, torch.Generator())
        return float(recompute_log_probs(told, policy, instructions)[0].mean())

    whole = tuned_tokens(config)
    assert likelihood(whole) > likelihood(tuned_tokens(replace(config, expert_episode_fraction=0.0))) + 0.05
    tuned_tokens(replace(config, iterations=2), tmp_path)
    assert same(dict(whole.state_dict()), dict(tuned_tokens(config, tmp_path).state_dict()))
    streams = build_algorithm(replace(config, algorithm="ppo", advantage="gae"))
    with pytest.raises(ConfigError, match="complete episodes"):
        Guidance(experts=aiming_episodes()).expert_rows(whole, (), 0.5, streams, Generators(0))


@pytest.mark.checks("auxiliaries/kl_convex", "ReMix")
def test_the_convex_penalty_lies_between_the_base_and_the_policy_before_the_update():
    before, policy, base = ChainPolicy(seed=1), ChainPolicy(seed=2), ChainPolicy(seed=3)
    rollouts = whole_episodes(before)
    options = {"kl_convex": {"weight": 0.2, "base": 0.3}}
    config = replace(CONFIG, coefficient="none", auxiliaries=("kl_convex",), options=options)
    learner = learner_of(policy, config)
    learner.base = base
    observation, latents = decisions_at(rollouts, rollouts.alive, BanditWorld(1).spec.instructions)
    mine = copy.deepcopy(policy)
    logp, penalty = mine.log_prob(observation, latents).logp, torch.zeros(())
    for share, other in (
        (0.3, base.log_prob(observation, latents).logp),
        (0.7, rollouts.logp_behaviour[rollouts.alive]),
    ):
        ratio = (other.detach() - logp).clamp(-10, 10).exp()
        penalty = penalty + 0.2 * share * (ratio - 1 - ratio.log()).mean()
    expected = torch.autograd.grad(penalty, list(mine.parameters()))
    for gradient, slow in zip(gradient_of(learner, rollouts), expected, strict=True):
        torch.testing.assert_close(gradient, slow, atol=1e-6, rtol=1e-4)


class Breaking(BanditWorld):
    """The bandit, which breaks after so many steps of the world."""

    def __init__(self, batch_size: int, steps: int):
        super().__init__(batch_size)
        self.steps = steps

    def step(self, actions):
        if self.calls == self.steps:
            raise RuntimeError("broken")
        return super().step(actions)


@pytest.mark.checks("replay/remix", "ReMix")
def test_remix_makes_the_policy_its_base_once_and_goes_on_on_policy_after_a_kill_too(tmp_path):
    replay = ReMix(until=0.5)
    now = [replay.reincarnates(Context(torch.Generator(), iteration=number, iterations=5)) for number in range(5)]
    assert now == [False, False, False, True, False]
    strong = {"kl_convex": {"weight": 1.0, "base": 1.0}, "remix": {"until": 0.5}}
    config = replace(CONFIG, algorithm="remix", options=strong, checkpoint_every=1, learning_rate=2e-2)
    whole = tuned(config)
    kept = {**strong, "remix": {"until": 0.5, "reincarnate": False}}
    assert not same(whole, tuned(replace(config, options=kept)))
    with pytest.raises(RuntimeError, match="broken"):
        finetune(ChainPolicy(), None, Breaking(12, 14), config, RunFolder(tmp_path))  # in the last of four iterations
    assert same(whole, tuned(config, tmp_path))


@pytest.mark.checks("auxiliaries/intervene", "InT")
@pytest.mark.parametrize("prefix", [0.0, None, 0.5])
def test_the_teacher_is_imitated_at_first_errors_and_the_student_before_them(prefix: float | None):
    policy, rollouts = ChainPolicy(seed=2), whole_episodes(ChainPolicy(seed=1))
    wrong = torch.zeros_like(rollouts.alive)
    wrong[::2, 1] = True
    own = torch.zeros_like(wrong)
    own[::2, 0] = True
    rollouts = rollouts.with_extras(first_error=wrong & rollouts.alive, before_error=own & rollouts.alive)
    options = {} if prefix is None else {"intervene": {"prefix": prefix}}
    config = replace(
        CONFIG,
        coefficient="none",
        models=("q_ensemble", "first_error"),
        auxiliaries=("intervene",),
        options=options,
    )
    order = torch.randperm(int(rollouts.alive.sum()), generator=torch.Generator().manual_seed(4))
    state, is_wrong = (each[rollouts.alive][order] for each in (rollouts.observation[STATE], wrong))
    mine = copy.deepcopy(policy)
    labels = {"observation": {STATE: state}, "actions": torch.full((len(state), 1, 2), 0.25)}
    losses = mine.loss(labels, torch.Generator().manual_seed(3))["imitation"]
    slow = losses[is_wrong].sum() / len(losses)
    logp = mine.log_prob(*decisions_at(rollouts, rollouts.alive, BanditWorld(1).spec.instructions)).logp
    weight = 1.0 if prefix is None else prefix  # a mean over all sampled steps, those of other chunks count as 0
    slow = slow - weight * logp[own[rollouts.alive]].sum() / logp.numel()
    expected = torch.autograd.grad(slow, list(mine.parameters()))
    gradients = gradient_of(learner_of(policy, config, teacher=Pointing()), rollouts)
    for mean, one in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mean, one, atol=1e-6, rtol=1e-4)
