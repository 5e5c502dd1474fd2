"""Every mechanism runs with what it declares to need and nothing else, or is refused with a reason."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from bandit_toys import ACTION, FIELDS
from seeing_toys import CAMERA, INSTRUCTIONS, SeeingWorld, denoising_policy, token_policy

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, RobopolicyNote
from robopolicy.core.extras import Extras, MissingExtraError
from robopolicy.core.policy import is_condition, to_tensors
from robopolicy.core.randomness import Generators
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.spec import STATE
from robopolicy.policies.configuration import Likelihood, PolicyKind
from robopolicy.rl import registry
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.context import Context
from robopolicy.rl.critic import state_critic
from robopolicy.rl.initial_states import UniformSampler
from robopolicy.rl.registry import Mechanism, Need, Slot, get_mechanism, mechanism, mechanisms
from robopolicy.training.acting import DemonstratingPolicy
from robopolicy.training.collection import EpisodeCollector, make_collector, note_idle_sampler, note_idle_settings
from robopolicy.training.demonstrations import Demonstrations
from robopolicy.training.experience import recompute_log_probs
from robopolicy.training.finetune import FinetuneConfig, finetune
from robopolicy.training.guidance import Guidance
from robopolicy.training.needs import PROVIDERS, READS_IMAGES, Sources, add_extras

CONFIG = FinetuneConfig(
    algorithm="grpo",
    advantage="w_reinforce",
    coefficient="awr",
    weight="step_mean",
    iterations=2,
    rollout_length=2,
    groups=2,
    group_size=2,
    epochs=1,
    minibatch=64,
    learning_rate=1e-3,
    critic_warmup=0,
    evaluate_every=0,
)
"""The base needs nothing: signs of outcomes, weighted regression."""

GIVERS = {
    Need.IMPLICIT: ("prime",),
    Need.VALUES: ("q_ensemble",),
    Need.PREFERENCE: ("discriminator",),
    Need.FLOW_VALUES: ("flow_critic",),
    Need.OWN_TEACHER: ("own_teacher",),
    Need.FIRST_ERRORS: ("q_ensemble", "first_error"),
    Need.BRANCHING_SCORES: ("past_policy",),
    Need.ANSWER_SCORES: ("answers",),
    Need.CHANGES: ("changes",),
    Need.ACTING_POLICY: ("acting_policy",),
}
"""Models, in their order, that satisfy a need."""
BY_MATCHING = {Need.MATCHING, Need.FLOW_VALUES}
NEEDS_TEACHER = {Need.TEACHER, Need.SAME_STEPS, Need.TEACHER_SCORES, Need.TEACHER_OVERLAP, Need.PREFERENCE}
SEVERAL = {Slot.CREDIT, Slot.REWARD, Slot.SELECTION, Slot.AUXILIARY, Slot.CONTROLLER, Slot.MODEL}
REFUSED = {
    "denoising": {Need.CATEGORICAL, Need.FURTHER_TOKENS},
    "tokens": {Need.GAUSSIAN, Need.MEANS, Need.FINISHES, *BY_MATCHING},
}
"""Needs that a kind of policy can never meet."""
REASONS = {
    "entropy, denoising": "entropy is constant",
    "agreement": r"rewards=agreement needs a world whose instructions contain several wordings",
    "shared": r"replay=shared needs options\.shared\.folder",
    "correct": "does not support snapshots",
    "tree_search": "does not support snapshots",
    "prefixes": "does not support snapshots",
    "overlong": "set a limit",
    "procedures, allocator": "does not support snapshots",
    "answers": r"set options\.answers\.goal",
    "changes": r"set options\.changes\.elements",
    "predict_changes, tokens": r"set options\.changes\.elements",
    "evidence": r"set options\.answers\.goal",
    "distill_own": r"set world\.options\.faults, such as \[blackout\], and world\.options\.undisturbed=true",
    "f_imitation, denoising": r"auxiliaries=f_imitation needs a policy that can compute log-probabilities of given",
}
"""Why these are refused here: fixed noise, no paraphrases, snapshots or faults, no folder, denoising by chain."""


def experts() -> Episodes:
    """Four episodes of five steps that go where the state says."""
    state = torch.rand((24, 2), generator=torch.Generator().manual_seed(0)) - 0.5
    actions = state.reshape(4, 6, 2)[:, :5].flatten(0, 1)
    lengths = torch.full((4,), 5)
    return Episodes(FIELDS, ACTION, 10.0, {STATE: state}, actions, lengths, INSTRUCTIONS * 2)


def alone(entry: Mechanism) -> FinetuneConfig:
    """The configuration in which this mechanism stands alone."""
    names: dict = {entry.slot.value: (entry.name,) if entry.slot in SEVERAL else entry.name}
    models = tuple(name for need in GIVERS if need in entry.needs for name in GIVERS[need])
    if Need.BUDGETS in entry.needs:
        names["allocator"] = "budgets"
    if Need.DEMONSTRATED in entry.needs:
        names["allocator"] = "one_chunk"
    if Need.IMITATION in entry.needs:
        names["auxiliaries"] = ("experts",)
    if models:
        names["models"] = models
    needs_groups = bool(entry.needs & {Need.GROUPS, Need.WHOLE_GROUPS} or models == ("prime",))
    chooses = entry.slot in (Slot.SAMPLER, Slot.ALLOCATOR, Slot.HINT) or "allocator" in names
    starts = 4 if chooses or Need.STARTS in entry.needs else 0
    return replace(CONFIG, num_initial_states=starts, group_size=2 if needs_groups else 1, **names)


@pytest.mark.checks("sampler/value")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "value", "num_initial_states": 8}, "sampler=value needs vector fields .* choose another sampler"),
        ({"advantage": "grpo", "max_idle_chunks": 2}, "max_idle_chunks .* shows none: set max_idle_chunks=0"),
    ],
)
def test_what_reads_vectors_is_refused_where_there_are_images_alone(changes: dict, message: str):
    class ImagesAlone(SeeingWorld):
        def observe(self) -> dict:
            return {key: value for key, value in super().observe().items() if key != STATE}

    world = ImagesAlone(4)
    world.spec = replace(world.spec, observation={CAMERA: world.spec.observation[CAMERA]})
    policy = token_policy(world, cameras=True)
    policy.prepare_finetuning()
    with pytest.raises(ConfigError, match=message):
        finetune(policy, None, world, replace(CONFIG, **changes))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:gtpo excludes every episode")
@pytest.mark.parametrize("kind", ["denoising", "tokens"])
@pytest.mark.parametrize("entry", mechanisms(), ids=lambda entry: f"{entry.slot.value}-{entry.name}")
def test_a_mechanism_runs_with_its_declared_needs_alone(entry: Mechanism, kind: str):
    reads_images = bool(entry.needs & READS_IMAGES)
    world = SeeingWorld(4)
    config = alone(entry)
    if Need.WORDINGS in entry.needs or config.allocator == "budgets":
        world.spec = replace(world.spec, paraphrases={INSTRUCTIONS[0]: INSTRUCTIONS[1:]})
    if config.allocator == "budgets":  # which a policy hears in as many wordings of a goal
        config = replace(config, group_size=2, options={"budgets": {"budgets": (0.5, 1.0)}})
    make = denoising_policy if kind == "denoising" else token_policy
    scored = {"likelihood": Likelihood.MATCHING} if entry.needs & BY_MATCHING and kind == "denoising" else {}
    policy = make(world, cameras=reads_images, **scored)
    policy.prepare_finetuning()
    needs_teacher = entry.needs & NEEDS_TEACHER
    teacher = None
    if needs_teacher:
        teacher = make(world, seed=1, cameras=reads_images)
        teacher.prepare_finetuning()
    guidance = Guidance(
        teacher=teacher,
        demonstrations=Demonstrations({}) if Need.DEMONSTRATIONS in entry.needs else None,
        experts=experts() if Need.EXPERTS in entry.needs else None,
    )
    critic = None
    if Need.CRITIC in entry.needs:
        critic = state_critic(world.spec.observation, 1, width=8, instructions=world.spec.instructions)
    if entry.needs & REFUSED[kind]:
        with pytest.raises(ConfigError, match=rf"({'|'.join((entry.name, *(config.models or ())))}) needs "):
            finetune(policy, critic, world, config, guidance=guidance)
        return
    refusals = entry.name, f"{entry.name}, {kind}", f"{entry.name}, {entry.slot.value}"
    refusal = next((REASONS[name] for name in refusals if name in REASONS), None)
    if refusal:
        with pytest.raises(ConfigError, match=refusal):
            finetune(policy, critic, world, config, guidance=guidance)
        return
    result = finetune(policy, critic, world, config, guidance=guidance)
    assert result.iterations == 2
    assert all(bool(parameter.isfinite().all()) for parameter in policy.parameters())


READS = {
    Need.ENTROPY: "entropy",
    Need.BLACKOUT_SCORES: "blackout_logp",
    Need.BLACKOUT_DIVERGENCE: "blackout_divergence",
    Need.CONTRAST_SCORES: "contrast_logp",
    Need.TEACHER_SCORES: "teacher_logp",
    Need.CURRENT_SCORES: "current_logp",
    Need.TEACHER_OVERLAP: "teacher_overlap",
    Need.POSITION: "position",
    Need.GROUP_RATES: "group_rate",
    Need.OUTCOMES: "outcome",
}


@pytest.mark.parametrize("slot", [Slot.ADVANTAGE, Slot.SELECTION, Slot.REWARD, Slot.COEFFICIENT])
def test_what_a_need_stands_for_is_there_in_every_slot(slot: Slot, monkeypatch: pytest.MonkeyPatch):
    assert set(READS) == set(PROVIDERS)
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    finiteness: dict[str, bool] = {}

    def look(rollouts: Rollouts) -> None:
        finiteness.update({name: bool(rollouts.extras[name].isfinite().all()) for name in READS.values()})

    def advantage(rollouts, context):
        look(rollouts)
        return rollouts.reward

    def selection(rollouts, context):
        look(rollouts)
        return torch.ones(len(rollouts.group), dtype=torch.bool)

    def reward(rollouts, context):
        look(rollouts)
        return rollouts

    def coefficient(scored):
        look(scored.rollouts)
        return scored.advantage, {}

    function = {
        Slot.ADVANTAGE: advantage,
        Slot.SELECTION: selection,
        Slot.REWARD: reward,
        Slot.COEFFICIENT: coefficient,
    }[slot]
    mechanism(slot, "looks", needs=tuple(READS))(function)
    world = SeeingWorld(4)
    policy, teacher = denoising_policy(world, cameras=True), denoising_policy(world, seed=1, cameras=True)
    for each in (policy, teacher):
        each.prepare_finetuning()
    config = replace(CONFIG, replay="remix", **{slot.value: ("looks",) if slot in SEVERAL else "looks"})
    finetune(policy, None, world, config, guidance=Guidance(teacher))
    assert finiteness == dict.fromkeys(READS.values(), True)


@pytest.mark.parametrize("need", [Need.BLACKOUT_SCORES, Need.CONTRAST_SCORES])
def test_what_is_compared_is_of_one_policy_though_an_older_one_acted(need: Need, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    world = SeeingWorld(4)
    policy = denoising_policy(world, cameras=True)
    policy.prepare_finetuning()
    moved: list[float] = []

    def advantage(rollouts, context):
        expected, _ = recompute_log_probs(rollouts, policy, INSTRUCTIONS)
        torch.testing.assert_close(rollouts.extras["current_logp"][rollouts.mask], expected[rollouts.mask])
        moved.append(float((expected - rollouts.logp_behaviour)[rollouts.mask].abs().max()))
        return rollouts.reward

    mechanism(Slot.ADVANTAGE, "looks", needs=(need,))(advantage)
    finetune(policy, None, world, replace(CONFIG, advantage="looks", policy_lag=1, iterations=3, learning_rate=0.03))
    assert moved[0] < 1e-5 and moved[-1] > 1e-2


@pytest.mark.checks("credit/vppo")
def test_vppo_selects_and_weighs_by_the_policy_and_not_by_the_noise_that_was_drawn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    world, vppo = SeeingWorld(4), get_mechanism(Slot.CREDIT, "vppo")
    policy = denoising_policy(world, cameras=True)
    policy.prepare_finetuning()
    advantages: list[torch.Tensor] = []

    def advantage(rollouts, context):
        chain = rollouts.latents["chain"].clone()
        chain[:, :, -1] += torch.randn(chain[:, :, -1].shape, generator=torch.Generator().manual_seed(0))
        redrawn = replace(rollouts, latents={**rollouts.latents, "chain": chain})
        redrawn = replace(redrawn, logp_behaviour=recompute_log_probs(redrawn, policy, INSTRUCTIONS)[0])
        assert float((redrawn.logp_behaviour - rollouts.logp_behaviour)[..., -1].abs().max()) > 0.1
        for each in (rollouts, redrawn):
            sources = Sources(policy, None, INSTRUCTIONS, Generators(0), 0)
            given = add_extras(replace(each, extras=Extras()), vppo.needs, sources)
            advantages.append(vppo.function(given, torch.ones_like(given.logp_behaviour), context))
        return rollouts.reward

    mechanism(Slot.ADVANTAGE, "looks", needs=tuple(vppo.needs))(advantage)
    finetune(policy, None, world, replace(CONFIG, advantage="looks", iterations=1))
    assert advantages[0].unique().numel() > 2  # zeros, and the scales of several episodes
    torch.testing.assert_close(advantages[0], advantages[1])


def test_a_misspelt_extra_fails_at_once_and_a_missing_one_says_what_to_declare():
    tensor = torch.zeros(2, 3)
    with pytest.raises(KeyError, match=r"entorpy.*entropy"):
        Extras().adding(entorpy=tensor)
    with pytest.raises(KeyError, match="entorpy"):
        Extras()["entorpy"]
    with pytest.raises(KeyError, match="entorpy"):
        assert "entorpy" in Extras()
    with pytest.raises(MissingExtraError, match="must declare the matching `Need`"):
        Extras(value=tensor)["entropy"]
    assert dict(Extras(value=tensor).map(lambda each: each + 1).items()).keys() == {"value"}


def frozen(policy):
    policy.prepare_finetuning(train_encoder=False)
    return policy


@pytest.mark.parametrize("coefficient", ["opd", "none"])
def test_a_teacher_looks_for_itself_and_not_through_the_students_encoder(coefficient: str):
    """Both encoders are frozen and cache what they make of the images: the teacher's scores are of its own."""
    world = SeeingWorld(4)
    student = frozen(denoising_policy(world, cameras=True))
    teacher = frozen(denoising_policy(world, seed=1, cameras=True))
    expected = []
    plain = teacher.log_prob

    def spy(observation, latents):
        scores = plain(observation, latents)
        own = plain(observation, {name: value for name, value in latents.items() if not is_condition(name)})
        expected.append(torch.equal(scores.logp, own.logp))
        return scores

    teacher.log_prob = spy
    auxiliaries = ("distill",) if coefficient == "none" else ()
    config = replace(CONFIG, coefficient=coefficient, auxiliaries=auxiliaries)
    finetune(student, None, world, config, guidance=Guidance(teacher))
    assert expected and all(expected)


def test_parts_of_props_keep_a_frozen_encoder_as_it_is():
    """Decisions keep what the actor's encoder made of the images; the policy scores them as with its own."""
    world = SeeingWorld(8)
    policy = frozen(denoising_policy(world, cameras=True))
    config = replace(CONFIG, props_parts=2, groups=8)
    collector = make_collector(world, policy, build_algorithm(config), config, 0, torch.Generator().manual_seed(0))
    collector.rate = 0.05  # type: ignore[attr-defined]
    rollouts = collector.collect(0)
    cached, _ = recompute_log_probs(rollouts, policy, world.spec.instructions)
    afresh, _ = recompute_log_probs(rollouts, policy, world.spec.instructions, another=True)
    torch.testing.assert_close(cached[rollouts.mask], rollouts.logp_behaviour[rollouts.mask])
    torch.testing.assert_close(cached[rollouts.mask], afresh[rollouts.mask])


def test_means_that_a_likelihood_does_not_keep_are_refused_with_a_reason():
    world = SeeingWorld(4)
    policy = denoising_policy(world, kind=PolicyKind.FLOW, likelihood=Likelihood.MATCHING)
    policy.prepare_finetuning()
    with pytest.raises(ConfigError, match="mean of every denoising step"):
        finetune(policy, None, world, replace(CONFIG, coefficient="grpo_guard"))


def test_a_base_is_copied_only_where_it_is_declared(monkeypatch: pytest.MonkeyPatch):
    world = SeeingWorld(4)
    copied = []
    plain = copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda value, *rest: copied.append(type(value)) or plain(value, *rest))
    for auxiliaries, expected in ((("experts",), False), (("kl_base",), True)):
        policy = token_policy(world)
        policy.prepare_finetuning()
        copied.clear()
        try:
            finetune(policy, None, world, replace(CONFIG, auxiliaries=auxiliaries))
        except ConfigError:
            assert auxiliaries == ("experts",)
        assert (type(policy) in copied) == expected


def test_a_group_is_played_in_all_words_of_its_goal(monkeypatch: pytest.MonkeyPatch):
    world = SeeingWorld(4)
    world.spec = replace(world.spec, paraphrases={INSTRUCTIONS[0]: INSTRUCTIONS[1:]})
    requested, plain = [], world.reset

    def reset(rows=None, seeds=None, options=None):
        requested.append((list(seeds), options["task"].tolist()))
        return plain(rows, seeds, options)

    monkeypatch.setattr(world, "reset", reset)
    policy = token_policy(world)
    policy.prepare_finetuning()
    config = replace(CONFIG, iterations=1, num_initial_states=4, rewards=("agreement",))
    finetune(policy, None, world, config)
    seeds, tasks = requested[0]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert sorted(tasks[:2]) == sorted(tasks[2:]) == [0, 1]


@pytest.mark.checks("TempSamp-R1")
def test_a_teacher_plays_some_episodes_that_are_scored_as_own_ones():
    world = SeeingWorld(4)
    policy, teacher = token_policy(world), denoising_policy(world, seed=1)
    for each in (policy, teacher):
        each.prepare_finetuning()
    mixed, observation = DemonstratingPolicy(policy, teacher, 0.5), to_tensors(world.reset(seeds=range(4)))
    decision = mixed.act(observation, torch.Generator().manual_seed(0))
    own = policy.act(observation, torch.Generator().manual_seed(0))
    assert torch.equal(decision.actions[::2], own.actions[::2]) and torch.equal(decision.logp[::2], own.logp[::2])
    told = decision.actions[1::2]
    assert not torch.equal(told, own.actions[1::2])
    tokens = policy.steps_of(told, torch.Generator())["tokens"]
    assert torch.equal(decision.latents["tokens"][1::2], tokens) and bool(decision.mask.all())
    torch.testing.assert_close(decision.logp, policy.log_prob(observation, decision.latents).logp)
    config = replace(CONFIG, iterations=1, group_size=2, advantage="grpo", teacher_episode_fraction=0.5)
    assert finetune(policy, None, world, config, guidance=Guidance(teacher)).iterations == 1
    with pytest.raises(ConfigError, match="cannot compute log-probabilities of the teacher's actions"):
        finetune(teacher, None, world, config, guidance=Guidance(teacher))
    with pytest.raises(ConfigError, match="needs a teacher"):
        finetune(policy, None, world, config)
    with pytest.raises(ConfigError, match=r"0\.2 of 4 rows .* Raise num_envs to at least 5"):
        finetune(policy, None, world, replace(config, teacher_episode_fraction=0.2), guidance=Guidance(teacher))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_initial_states": 2}, "plays all num_initial_states=2 with groups=2"),
        ({"num_initial_states": 0}, "every iteration has new initial states"),
        ({"num_initial_states": 8, "algorithm": "dppo", "advantage": None}, "learns from streams"),
    ],
)
def test_a_sampler_that_has_nothing_to_choose_says_so(changes: dict, reason: str):
    config = replace(CONFIG, advantage="grpo", sampler="sec")
    changed = replace(config, **changes)
    with pytest.warns(RobopolicyNote, match=f"sampler=sec has nothing to choose, since .*{reason}"):
        note_idle_sampler(build_algorithm(changed), changed)


@pytest.mark.parametrize(
    "changes", [{"num_initial_states": 8}, {"num_initial_states": 2, "sampler": "stages"}, {"sampler": None}]
)
def test_a_sampler_that_chooses_says_nothing(changes: dict):
    config = replace(CONFIG, **{"advantage": "grpo", "sampler": "sec", **changes})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        note_idle_sampler(build_algorithm(config), config)


@pytest.mark.parametrize("starts", [0, 4])
def test_without_a_pool_nothing_is_believed_of_a_places_initial_state(starts: int):
    """Place 0 of a batch is another initial state in the next one: what it did says nothing."""
    world, config = SeeingWorld(4), replace(CONFIG, advantage="grpo", num_initial_states=starts)
    policy, algorithm = token_policy(world), build_algorithm(config)
    policy.prepare_finetuning()
    collector = make_collector(world, policy, algorithm, config, 0, torch.Generator().manual_seed(0))
    assert isinstance(collector, EpisodeCollector) and isinstance(collector.sampler, UniformSampler)
    rollouts = collector.collect(0)
    collector.observe(rollouts, algorithm.prepare(rollouts, Context(torch.Generator())))
    assert len(collector.sampler.counts) == (2 if starts else 0)


@pytest.mark.checks("controllers/imitation_mix")
def test_a_mix_with_imitation_needs_imitation():
    """Else nine tenths of the loss would be missing at first."""
    policy = token_policy(world := SeeingWorld(4))
    policy.prepare_finetuning()
    guidance = Guidance(experts=experts())
    with pytest.raises(ConfigError, match=r"controllers=imitation_mix needs .*auxiliaries=\[experts\]"):
        finetune(policy, None, world, replace(CONFIG, controllers=("imitation_mix",)), guidance=guidance)


@pytest.mark.checks("allocator/knapsack")
def test_observed_rates_need_a_sampler_that_counts():
    world, options = SeeingWorld(4), {"knapsack": {"surplus": True}}
    config = replace(CONFIG, advantage="grpo", num_initial_states=8, allocator="knapsack", options=options)
    policy = token_policy(world)
    policy.prepare_finetuning()

    def collector(sampler: str):
        algorithm = build_algorithm(changed := replace(config, sampler=sampler))
        return make_collector(world, policy, algorithm, changed, 0, torch.Generator().manual_seed(0))

    assert isinstance(collector("mopps"), EpisodeCollector)
    with pytest.raises(ConfigError, match="ValueSampler predicts rates without counting"):
        collector("value")


@pytest.mark.parametrize("name", ["knapsack", "mixed", "shadow_price", "dart"])
def test_allocators_by_predicted_rates_need_initial_states_that_recur(name: str):
    policy = token_policy(world := SeeingWorld(4))
    policy.prepare_finetuning()
    with pytest.raises(ConfigError, match=rf"allocator={name}.* needs a pool of initial states"):
        finetune(policy, None, world, replace(CONFIG, advantage="grpo", allocator=name))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("branch_by", "arpo"),
        ("branch_at", (2,)),
        ("overprovision", 0.5),
        ("allocator", "dars"),
        ("num_initial_states", 64),
    ],
)
def test_a_setting_of_whole_episodes_says_where_it_has_no_effect(setting, value):
    streams = replace(FinetuneConfig(), **{setting: value})
    with pytest.warns(RobopolicyNote, match=f"{setting}=.* has no effect.*algorithm=grpo"):
        note_idle_settings(build_algorithm(streams), streams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = replace(FinetuneConfig(), algorithm="grpo", **{setting: value})
        note_idle_settings(build_algorithm(groups), groups)
        note_idle_settings(build_algorithm(FinetuneConfig()), FinetuneConfig())
