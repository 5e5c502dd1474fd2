"""Learning in the world by critics: who plays when, what is learned from, what is counted, and what a kill leaves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from steps_world import StepsWorld

from robopolicy.building.policies import load_acting
from robopolicy.configuration.sections.act import InferenceSection
from robopolicy.core.errors import ConfigError
from robopolicy.core.player import PolicyActor
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import STATE, TASK, Field
from robopolicy.core.transitions import Transitions
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.engine import with_engine
from robopolicy.policies import load_policy
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.rl.offline.configuration import CalQlConfig, ReBracConfig, RlpdConfig, SacConfig
from robopolicy.rl.offline.interface import Interface
from robopolicy.rl.offline.sac import Cql, Sac
from robopolicy.rl.offline.td3 import ReBrac
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training import online
from robopolicy.training.configuration import OnlineConfig
from robopolicy.training.critics import AgentPolicy, SteeredPolicy, steer
from robopolicy.training.online import Explorer, ReplayBuffer, learn_online, plays_agent, plays_noise, plays_policy

FIELDS, ACTION = {STATE: Field((1,))}, Field((1,), low=-1.0, high=1.0)
CHUNK = 2
SMALL = RlpdConfig(width=16, depth=1, critics=3, discount=0.9)
QUICK = OnlineConfig(steps=120, warmup=40, batch_size=16, evaluate_at=(0, 1, 10), evaluate_every=0, checkpoint_every=1)


def acting(config=SMALL, made=Sac, seed=0) -> AgentPolicy:
    interface = Interface(FIELDS, ACTION, chunk=CHUNK)
    return AgentPolicy(made(config, interface.size, interface.actions, seed), interface, 10.0)


def denoising(kind=PolicyKind.DIFFUSION, seed=0) -> DenoisingPolicy:
    config = DenoisingPolicyConfig(
        kind=kind, chunk=CHUNK, prediction_steps=3, width=16, depth=1, sampling_steps=3, denoising_steps=10
    )
    values = {STATE: torch.linspace(-1, 1, 50)[:, None], "action": torch.linspace(-1, 1, 50)[:, None]}
    return DenoisingPolicy(config, FIELDS, ACTION, fps=10.0, values=values, seed=seed).eval()


def steering(base=None, bound=2.0, **options) -> SteeredPolicy:
    return steer(base or denoising(), SMALL, FIELDS, ("",), bound=bound, seed=0, kind="rlpd", **options)


def always(value):
    """A frozen policy that does the same everywhere."""
    return lambda seen, state, generator: torch.full((len(state), CHUNK), value)


def recorded(count=50):
    draws = torch.Generator().manual_seed(0)
    state, action = torch.rand(count, 1, generator=draws), torch.rand(count, CHUNK, generator=draws)
    over = torch.zeros(count, dtype=torch.bool)
    return Transitions(state + 100, action, torch.zeros(count), state + 100, over, decay=torch.full((count,), 0.81))


def watched(policy, monkeypatch):
    """Note every batch that the agent is given."""
    batches, update = [], policy.agent.update

    def noted(batch, generator):
        batches.append(batch)
        return update(batch, generator)

    monkeypatch.setattr(policy.agent, "update", noted)
    return batches


@pytest.mark.checks("WSRL")
def test_nothing_is_learned_before_the_warm_up_is_full_and_the_frozen_policy_plays_it(monkeypatch):
    policy, world, counts = acting(), StepsWorld(), []
    update = policy.agent.update
    monkeypatch.setattr(policy.agent, "update", lambda *given: counts.append(world.stepped) or update(*given))
    result = learn_online(policy, world, always(0.25), QUICK)
    assert counts and min(counts) >= QUICK.warmup
    decided = np.concatenate([chunk[:, :, 0] for chunk in world.actions])
    before = QUICK.warmup // CHUNK
    assert np.allclose(decided[:before], 0.25), "the warm-up is the frozen policy's"
    assert not np.isclose(decided[before:], 0.25).any(), "what follows is the agent's"
    assert result.updates == len(counts) == (QUICK.steps - QUICK.warmup) // CHUNK + world.batch_size


@pytest.mark.checks("WSRL")
def test_a_warm_up_that_never_ends_changes_nothing():
    policy = acting()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    result = learn_online(policy, StepsWorld(), always(0.25), replace(QUICK, warmup=1000))
    assert result.updates == 0 and result.env_steps == QUICK.steps
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


@pytest.mark.checks("WSRL", "RLPD")
@pytest.mark.parametrize("retain", [0.0, 0.5, 1.0])
def test_the_retained_share_of_every_batch_is_recorded(retain, monkeypatch):
    policy = acting()
    batches = watched(policy, monkeypatch)
    config = replace(QUICK, offline_ratio=retain)
    learn_online(policy, StepsWorld(), always(0.0), config, recorded=recorded(), begins="recorded")
    assert batches
    for batch in batches:
        assert len(batch) == QUICK.batch_size
        assert int((batch.state > 50).sum()) == retain * QUICK.batch_size
        assert batch.decay is not None


def test_recorded_data_that_is_asked_for_must_be_there():
    for asked in ({"config": replace(QUICK, offline_ratio=0.5)}, {"config": QUICK, "begins": "recorded"}):
        with pytest.raises(ConfigError, match="there are none"):
            learn_online(acting(), StepsWorld(), always(0.0), **asked)
    with pytest.raises(ConfigError, match="fractions"):
        OnlineConfig(offline_ratio=1.5)


@pytest.mark.parametrize("steps", [0, 1, 7, 50, 51, 97])
def test_the_budget_is_never_exceeded_and_used_up_to_a_chunk(steps):
    world = StepsWorld(rows=5, horizon=7)
    result = learn_online(acting(), world, always(0.0), replace(QUICK, steps=steps, warmup=10))
    assert result.env_steps <= steps and steps - result.env_steps < CHUNK
    assert len(set(world.played)) >= result.episodes or steps < CHUNK


@pytest.mark.parametrize(("end", "horizon"), [(0.55, 50), (None, 5)])
def test_decisions_are_kept_as_they_were_played(end, horizon, monkeypatch):
    """One row by hand: chunks of 2, of which the last is cut by the end of the task or by the time limit."""
    policy, world, held = acting(), StepsWorld(rows=1, horizon=horizon, end=end, goal=0.0), ReplayBuffer()
    monkeypatch.setattr(online, "ReplayBuffer", lambda: held)
    learn_online(policy, world, always(1.0), replace(QUICK, steps=horizon + 1, warmup=1000))
    data = held.transitions
    last = int(data.episode.eq(0).sum()) - 1
    x = float(data.state[0])
    after = [x := x + 0.2 for _ in range(10)]
    length = horizon if end is None else next(index for index, value in enumerate(after) if value > end) + 1
    paid = [-(value**2) for value in after[:length]]
    executed = length - CHUNK * last
    assert last == (length - 1) // CHUNK
    for place in range(last + 1):
        part = paid[CHUNK * place : CHUNK * place + CHUNK]
        assert float(data.reward[place]) == pytest.approx(sum(0.9**j * r for j, r in enumerate(part)), abs=1e-5)
        assert float(data.decay[place]) == pytest.approx(0.9 ** len(part), abs=1e-6)
    assert float(data.next_state[last]) == pytest.approx(after[length - 1], abs=1e-5)
    assert data.terminated[: last + 1].tolist() == [False] * last + [end is not None], "a time limit is no end"
    value = data.backup(torch.ones(len(data)), 0.9)[last] - data.reward[last]
    assert float(value) == pytest.approx(0.0 if end is not None else 0.9**executed, abs=1e-5)
    if end is None:
        assert bool((data.outcome[: last + 1] == -torch.inf).all()), "a time limit hides the return"
    else:
        assert float(data.outcome[0]) == pytest.approx(sum(0.9**j * r for j, r in enumerate(paid)), abs=1e-5)
    assert data.next_known[: last + 1].tolist() == [True] * last + [False]
    assert torch.equal(data.next_action[:last], data.action[1 : last + 1])


def test_room_for_decisions_grows_and_nothing_is_lost():
    held = ReplayBuffer()
    for turn in range(40):
        state = torch.full((64, 1), float(turn))
        over = torch.zeros(64, dtype=torch.bool)
        paid = {"reward": state[:, 0], "next_state": state, "terminated": over, "success": over}
        held.add(state, state.expand(-1, 2), {**paid, "episode": torch.arange(64), "decay": state[:, 0]})
    assert len(held) == 2560 and held.transitions.state[::64, 0].tolist() == list(range(40))
    again = ReplayBuffer.restored(held.tree(), torch.device("cpu"))
    assert torch.equal(again.transitions.action, held.transitions.action) and len(again) == len(held)


def test_evaluations_show_the_dip_and_are_those_asked_for():
    asked, successes = [], iter([0.5, 0.2, 0.4, 0.6])
    config = replace(QUICK, evaluate_at=(0, 1, 10))

    def evaluate(policy):
        asked.append(policy)
        return {"success": next(successes)}

    result = learn_online(acting(), StepsWorld(), always(0.0), config, evaluate=evaluate)
    assert [record["updates"] for record in result.evaluations] == [0, 1, 10, result.updates]
    assert result.evaluations[0]["env_steps"] >= config.warmup
    assert result.dip() == pytest.approx(0.3)


def test_the_switch_forgets_moments_and_conservatism_unless_it_is_told_not_to():
    for moments, conservative in (("reset", False), ("keep", True)):
        policy = acting(CalQlConfig(width=16, depth=1, discount=0.9, samples=2), Cql)
        data = replace(recorded(), outcome=torch.zeros(50))
        policy.agent.begin(data)
        policy.agent.update(data, torch.Generator().manual_seed(0))
        config = replace(QUICK, moments=moments, conservative=conservative)
        online.switch_to_online(policy.agent, config)
        assert bool(policy.agent.optimisers["critics"].state) is (moments == "keep")
        assert (policy.agent.config.alpha > 0) is conservative
        learn_online(policy, StepsWorld(end=0.4), always(1.0), config, recorded=data, begins="recorded")


@pytest.mark.parametrize(("made", "config"), [(ReBrac, ReBracConfig(width=16, depth=1, discount=0.9))])
def test_agents_that_ask_what_came_next_learn_too(made, config):
    policy = acting(config, made)
    assert learn_online(policy, StepsWorld(), always(0.5), QUICK).updates > 10


def test_the_frozen_policy_goes_on_for_a_share_of_decisions():
    world = StepsWorld()
    learn_online(acting(), world, always(0.25), replace(QUICK, steps=2000, utd_ratio=0.0, base_policy_fraction=0.3))
    decided = np.concatenate([chunk[:, 0, 0] for chunk in world.actions])[QUICK.warmup :]
    assert np.isclose(decided, 0.25).mean() == pytest.approx(0.3, abs=0.06)


class Killed(Exception):
    """What stands for a kill."""


class Dies(StepsWorld):
    """It does so at its n-th chunk."""

    def __init__(self, turns):
        super().__init__()
        self.turns = turns

    def step(self, actions):
        """Step, or die."""
        self.turns -= 1
        if not self.turns:
            raise Killed
        return super().step(actions)


@pytest.mark.parametrize("kind", ["actions", "noise"])
def test_a_run_that_is_killed_ends_bit_for_bit_in_the_same_place(kind, tmp_path):
    # With few updates there are waves without any, which must not depend on a kill either.
    config = replace(QUICK, steps=240, checkpoint_every=2, utd_ratio=0.06 if kind == "noise" else 0.5)

    def run(name, world):
        policy = acting() if kind == "actions" else steering()
        frozen = always(0.25) if kind == "actions" else plays_noise(policy)

        def evaluate(evaluated):
            return {"success": float(evaluated.agent.act(torch.zeros(1, 1)).mean()) / 2 + 0.5}

        return learn_online(policy, world, frozen, config, evaluate=evaluate, run=RunFolder(tmp_path / name))

    whole = run("whole", StepsWorld())
    for turns in (8, 21):
        name = f"broken at {turns}"
        with pytest.raises(Killed):
            run(name, Dies(turns))
        assert run(name, StepsWorld()) == whole
        for file in ("metrics.jsonl", "checkpoint/model.safetensors", "resume/online/trainer.safetensors"):
            assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / name / file).read_bytes(), (name, file)
    assert run("whole", StepsWorld()) == whole, "what is done is not done again"


def test_a_kill_between_the_last_line_of_metrics_and_the_last_resume_point_leaves_one_line(tmp_path, monkeypatch):
    saves, save = [], online.Online.save

    def run(name):
        evaluate = lambda policy: {"success": float(policy.agent.act(torch.zeros(1, 1)).mean()) / 2 + 0.5}  # noqa: E731
        return learn_online(
            acting(), StepsWorld(), always(0.25), QUICK, evaluate=evaluate, run=RunFolder(tmp_path / name)
        )

    monkeypatch.setattr(online.Online, "save", lambda self: saves.append(None) or save(self))
    whole, count = run("whole"), len(saves)

    def dies(self):
        saves.append(None)
        if len(saves) == count:
            raise Killed
        save(self)

    saves.clear()
    monkeypatch.setattr(online.Online, "save", dies)
    with pytest.raises(Killed):
        run("broken")
    assert run("broken") == whole
    assert len({(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "broken")}) == 1


def observation(count=5):
    return {STATE: torch.linspace(-1, 1, count)[:, None, None], TASK: [""] * count}


@pytest.mark.checks("DSRL")
@pytest.mark.parametrize("kind", [PolicyKind.DIFFUSION, PolicyKind.FLOW])
def test_noise_as_the_base_draws_it_is_the_bases_decision(kind):
    base = denoising(kind)
    policy, first_observation = steering(base, bound=8.0), observation()
    expected = base.act(first_observation, torch.Generator().manual_seed(3), deterministic=True).actions
    noise = torch.randn(5, 3, 1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(policy.decide(first_observation, noise), expected)
    flat = policy.interface.to_agent(noise)
    assert float(flat.abs().max()) < 1 and torch.allclose(
        policy.actions_of(first_observation, flat), expected, atol=1e-5
    )
    drawn = plays_noise(policy)(first_observation, torch.zeros(5, 1), torch.Generator().manual_seed(3))
    assert torch.equal(drawn, flat)


@pytest.mark.checks("DSRL")
def test_steering_stays_in_its_box_and_leaves_the_base_alone():
    policy, first_observation = steering(bound=1.5), observation(50)
    assert policy.interface.chunks(torch.ones(1, 3)).flatten().tolist() == [1.5] * 3
    wild = plays_noise(policy)(first_observation, torch.zeros(500, 1), torch.Generator().manual_seed(0))
    assert float(wild.abs().max()) == 1.0, "noise beyond the box is brought to its edge"
    before = {name: value.clone() for name, value in policy.base.state_dict().items()}
    learn_online(policy, StepsWorld(), plays_noise(policy), QUICK)
    assert all(torch.equal(value, before[name]) for name, value in policy.base.state_dict().items())
    assert not any(weight.requires_grad for weight in policy.base.parameters())


def test_a_base_acts_until_it_is_steered():
    base = denoising()
    policy, first_observation = steering(base, steers=False), observation()
    for sure in (False, True):
        own = base.act(first_observation, torch.Generator().manual_seed(1), deterministic=sure).actions
        assert torch.equal(
            policy.act(first_observation, torch.Generator().manual_seed(1), deterministic=sure).actions, own
        )
    policy.enable_agent()
    first, again = (
        policy.act(first_observation, torch.Generator().manual_seed(seed), deterministic=True) for seed in (1, 2)
    )
    assert torch.equal(first.actions, again.actions), "what the agent does without noise is one thing"


@pytest.mark.parametrize("kind", list(PolicyKind))
@pytest.mark.parametrize("steers", [True, False])
def test_an_engine_computes_what_a_steered_policy_does(kind, steers, tmp_path):
    policy, first_observation = steering(denoising(kind), steers=steers), observation()
    policy.save(tmp_path)
    fast = load_acting(InferenceSection("lean"), tmp_path)
    assert isinstance(fast, SteeredPolicy) and fast is not policy
    for sure in (False, True):
        own, lean = (
            each.act(first_observation, torch.Generator().manual_seed(3), deterministic=sure).actions
            for each in (policy, fast)
        )
        assert torch.allclose(own, lean, atol=1e-5), (sure, float((own - lean).abs().max()))
    few = load_acting(
        InferenceSection("lean", sampler="euler" if kind is PolicyKind.FLOW else "ddim", steps=1), tmp_path
    )
    other = few.act(first_observation, torch.Generator().manual_seed(3), deterministic=True).actions
    assert not torch.allclose(other, own, atol=1e-3), "one step is not three"
    assert with_engine(policy, InferenceConfig("reference")) is policy


def test_an_engine_that_cannot_begin_with_given_noise_is_refused():
    with pytest.raises(ConfigError, match="AgentPolicy cannot start from given noise"):
        steering().around(acting())


def test_policies_that_have_no_initial_noise_are_refused():
    with pytest.raises(ConfigError, match="no initial noise"):
        steering(acting())
    with pytest.raises(ConfigError, match="bound"):
        steering(bound=0.0)


@pytest.mark.parametrize("make", [acting, steering, lambda: steering(steers=False)])
def test_both_policies_conform(make):
    assert check_policy(make().eval(), load_policy).level is Level.ACTS


def test_another_policy_plays_in_the_agents_units():
    base, policy = denoising(), acting()
    flat = plays_policy(base, policy)(observation(), torch.zeros(5, 1), torch.Generator().manual_seed(0))
    chunks = base.act(observation(), torch.Generator().manual_seed(0), deterministic=True).actions
    assert torch.allclose(policy.actions_of(observation(), flat), chunks, atol=1e-6)


@pytest.mark.checks("RLPD")
def test_targets_take_the_smallest_of_a_drawn_subset_and_the_actor_climbs_the_mean():
    agent = Sac(replace(SMALL, critics=5, critic_subset=2, temperature=0.5), 1, CHUNK, 0)
    data = recorded()
    twin = torch.Generator().manual_seed(7)
    action, _ = agent.actor.sample(data.next_state, twin)
    chosen = torch.randperm(5, generator=twin)[:2]
    smallest = agent.slow(data.next_state, action)[chosen].amin(0)
    target = agent.target(data, torch.Generator().manual_seed(7))
    assert torch.allclose(target, data.reward + 0.81 * smallest, atol=1e-5), "without entropy_backup"
    with pytest.raises(ConfigError, match="subset"):
        SacConfig(critics=2, critic_subset=3)


@pytest.mark.checks("WSRL")
@pytest.mark.parametrize(("made", "config", "value"), [(Sac, SMALL, 3.5), (Cql, CalQlConfig(width=16, depth=1), 2.5)])
def test_the_actor_of_wsrl_climbs_the_smallest_of_all_critics(made, config, value: float, monkeypatch):
    """Three critics in two states: 1, 2, 3 and 4, 5, 6. Log densities -1 and -3, temperature .5; SAC: the mean."""
    agent = made(replace(config, critics=3, critic_subset=2, temperature=0.5), 1, CHUNK, 0)
    losses: dict[str, float] = {}
    table = torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]])
    monkeypatch.setattr(agent.critics, "forward", lambda state, action: table)
    monkeypatch.setattr(agent, "step", lambda name, loss: losses.update({name: float(loss.detach())}))
    agent.ascend(torch.zeros(2, 1), torch.zeros(2, CHUNK), torch.tensor([-1.0, -3.0]))
    assert losses["actor"] == pytest.approx(0.5 * -2.0 - value)


def test_the_actor_of_sac_moves_every_so_many_critic_steps():
    agent, data = Sac(replace(SMALL, policy_delay=3), 1, CHUNK, 0), recorded()
    moved = []
    for _ in range(6):
        before = [value.clone() for value in agent.actor.parameters()]
        agent.update(data, torch.Generator().manual_seed(0))
        moved.append(any(not torch.equal(old, new) for old, new in zip(before, agent.actor.parameters(), strict=True)))
        other = Sac(replace(SMALL, policy_delay=3), 1, CHUNK, 1)
        other.restore(agent.tree())
        assert other.updates == agent.updates
    assert moved == [False, False, True, False, False, True]


def test_an_explorer_decides_whole_chunks():
    policy = acting()
    explorer = Explorer(policy, plays_agent(policy.agent), online.Generators(0))
    chunk, (state, action) = explorer.choose({STATE: np.zeros((3, 1, 1), np.float32), TASK: np.array([""] * 3)})
    assert chunk.shape == (3, CHUNK, 1) and state.shape == (3, 1) and action.shape == (3, CHUNK)


def does_anything() -> DenoisingPolicy:
    """A policy that imitates any action."""
    policy, draws = denoising(), torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(150):
        first_observation = {STATE: torch.rand(64, 1, 1, generator=draws) * 2 - 1, TASK: [""] * 64}
        actions = (torch.rand(64, 1, 1, generator=draws) * 2 - 1).expand(-1, 3, -1)
        batch = {
            "observation": first_observation,
            "actions": actions,
            "action_valid": torch.ones(64, 3, dtype=torch.bool),
        }
        optimiser.zero_grad()
        policy.loss(batch, draws)["denoising"].mean().backward()
        optimiser.step()
    return policy.eval()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["actions", "noise"])
def test_it_learns(kind):
    config = OnlineConfig(steps=2400, warmup=400, batch_size=64, evaluate_at=(0,), evaluate_every=0)
    agent = RlpdConfig(width=32, critics=2, discount=0.9, learning_rate=3e-3, temperature=0.05)
    world, judging = StepsWorld(rows=8), StepsWorld(rows=64)
    if kind == "actions":
        policy = acting(agent)
        frozen = plays_agent(policy.agent)
    else:
        policy = steer(does_anything(), agent, FIELDS, ("",), bound=3.0, seed=0, kind="rlpd", steers=False)
        frozen = plays_noise(policy)

    def earned(judged):
        player = online.Player(judging, PolicyActor(judged, torch.Generator().manual_seed(0), deterministic=True))
        player.start_batch(np.arange(64))
        return {"return": float(sum(played.step.reward.sum() for played in player)) / 64}

    result = learn_online(policy, world, frozen, config, evaluate=earned)
    before, after = (result.evaluations[place]["deterministic_return"] for place in (0, -1))
    assert before < -1.3 and after > -0.9, (before, after)
