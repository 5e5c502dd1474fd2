"""Edits of a base policy's chunks (EXPO): formulas against slow references, the buffer, and what is learned."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from seeing_toys import SeeingWorld, denoising_policy
from steps_world import StepsWorld

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.interventions import ActingAgent
from robopolicy.core.player import PolicyActor
from robopolicy.core.policy import to_tensors
from robopolicy.core.randomness import Generators, derive_seed
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import STATE, TASK, Field
from robopolicy.core.transitions import Transitions
from robopolicy.policies import load_policy
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.rl.offline.configuration import CalQlConfig, RlpdConfig, SacConfig
from robopolicy.rl.offline.decisions import recorded_decisions
from robopolicy.rl.offline.edit import Edit, expected_minimum
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training import online
from robopolicy.training.base_imitation import BaseImitation, successful, worth_imitating
from robopolicy.training.configuration import EditOnlineConfig, OnlineConfig
from robopolicy.training.critics import AgentPolicy, interface_of
from robopolicy.training.editing import EditedPolicy, require_sac
from robopolicy.training.online import ReplayBuffer, explores, learn_online
from robopolicy.training.online_methods import EditsChunks, OnlineStart, plays_base

FIELDS, ACTION = {STATE: Field((1,))}, Field((1,), low=-1.0, high=1.0)
CHUNK, COUNT = 2, 3
SMALL = RlpdConfig(width=16, depth=1, critics=4, discount=0.9)
QUICK = OnlineConfig(steps=120, warmup=40, batch_size=16, evaluate_at=(0, 1, 10), evaluate_every=0, checkpoint_every=1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def denoising(seed=0) -> DenoisingPolicy:
    config = DenoisingPolicyConfig(
        chunk=CHUNK, prediction_steps=3, width=16, depth=1, sampling_steps=3, denoising_steps=10
    )
    values = {STATE: torch.linspace(-1, 1, 50)[:, None], "action": torch.linspace(-1, 1, 50)[:, None]}
    return DenoisingPolicy(config, FIELDS, ACTION, fps=10.0, values=values, seed=seed).eval()


def agent_of(config=SMALL, scale=0.3, seed=0) -> Edit:
    return Edit(config, 1, CHUNK, seed, scale)


def edited(config=SMALL, scale=0.3, count=COUNT, acts=False, tuned=0.0, base=None) -> EditedPolicy:
    base = base or denoising()
    interface = interface_of(base, FIELDS, ACTION, ("",))
    policy = EditedPolicy(base, Edit(config, interface.size, interface.actions, 0, scale), interface, count, acts)
    if tuned:
        policy.imitation = BaseImitation(base, interface, policy.learnable, 1e-3, tuned, 16)
    return policy


def observation(count=5):
    return {STATE: torch.linspace(-1, 1, count)[:, None, None], TASK: [""] * count}


def chunks(rows=6, seed=1):
    """Transitions with base chunks in their next states; some end the task."""
    draws = generator(seed)
    state, action, following = (torch.rand(rows, size, generator=draws) * 2 - 1 for size in (1, CHUNK, 1))
    return Transitions(
        state,
        action,
        torch.randn(rows, generator=draws),
        following,
        torch.arange(rows) % 3 == 0,
        decay=torch.full((rows,), 0.81),
        next_candidates=torch.rand(rows, COUNT, CHUNK, generator=draws) * 2 - 1,
    )


@pytest.mark.checks("EXPO")
@pytest.mark.parametrize("subset", [1, 2, 3, 5, None])
def test_the_expected_minimum_is_the_mean_over_all_subsets(subset):
    values = torch.randn(5, 7, generator=generator())
    of = itertools.combinations(range(5), subset or 5)
    expected = torch.stack([values[list(chosen)].amin(0) for chosen in of]).mean(0)
    assert torch.allclose(expected_minimum(values, subset), expected, atol=1e-6)


@torch.no_grad()
@pytest.mark.checks("EXPO")
def test_the_target_is_that_of_the_best_of_base_chunks_and_edits_row_by_row():
    agent, data = agent_of(), chunks()
    agent.slow.members.weights[-1].mul_(100)
    twin = generator(7)
    seen = torch.cat([data.next_state.repeat_interleave(COUNT, 0), data.next_candidates.flatten(0, 1)], 1)
    edits = agent.actor.sample(seen, twin)[0].reshape(-1, COUNT, CHUNK)
    drawn = torch.randperm(4, generator=twin)[:2]
    expected, kinds = [], set()
    for row in range(len(data)):
        best, value = None, -torch.inf
        for edit in (False, True):
            for place in range(COUNT):
                chunk = data.next_candidates[row, place]
                chunk = (chunk + 0.3 * edits[row, place]).clamp(-1, 1) if edit else chunk
                q = agent.slow(data.next_state[row][None], chunk[None])[:, 0]
                score = sum(float(min(q[a], q[b])) for a, b in itertools.combinations(range(4), 2)) / 6
                if score > value:
                    best, value = q[drawn].min(), score
                    kind = edit
        kinds.add(kind)
        following = 0.0 if data.terminated[row] else 0.81 * float(best)
        expected.append(float(data.reward[row]) + following)
    assert kinds == {False, True}, "both base chunks and edits are chosen"
    assert agent.target(data, generator(7)).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.checks("EXPO")
def test_the_edit_actor_climbs_the_mean_of_the_critics_with_entropy():
    """Its loss: E[temperature log pi(e | s, a) - mean_i Q_i(s, a + scale e)]."""
    agent, data, seen = agent_of(), chunks(), {}
    agent.step = lambda name, loss: seen.setdefault(name, loss)
    agent.ascend(data.state, *agent.proposed(data, generator(3)))
    edit, density = agent.actor.sample(torch.cat([data.state, data.action], 1), generator(3))
    q = agent.critics(data.state, (data.action + 0.3 * edit).clamp(-1, 1)).mean(0)
    assert float(seen["actor"].detach()) == pytest.approx(float((0.1 * density - q).detach().mean()), abs=1e-6)
    assert agent.target_entropy == -CHUNK / 2
    temperature = -(agent.log_temperature.exp() * (density - CHUNK / 2)).mean()
    assert float(seen["temperature"].detach()) == pytest.approx(float(temperature.detach()), abs=1e-6)


@torch.no_grad()
def test_edits_are_bounded_and_stay_in_the_range_of_actions():
    agent, base = agent_of(scale=0.25), 2 * torch.rand(200, CHUNK, generator=generator()) - 1
    changed = agent.edited(torch.zeros(200, 1), base, generator())[0]
    assert float((changed - base).abs().max()) <= 0.25 + 1e-6 and float(changed.abs().max()) <= 1
    assert torch.equal(
        agent.edited(torch.zeros(200, 1), base, None)[0], agent.edited(torch.zeros(200, 1), base, None)[0]
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: agent_of(scale=0.0), "edit_scale=0 must be above 0"),
        (lambda: agent_of(replace(SMALL, entropy_backup=True)), "online.agent.entropy_backup=false"),
        (lambda: EditOnlineConfig(edit_scale=3.0), "at most 2"),
        (lambda: edited(count=0), "online.method.candidates=0 must be at least 1"),
        (lambda: require_sac(CalQlConfig()), "use online.agent=rlpd"),
        (lambda: BaseImitation(AgentPolicy(None, None, 1.0), None, (), 1e-3, 1.0, 8), "base_utd_ratio=0"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


def test_without_base_chunks_the_agent_says_what_it_needs():
    for ask in (
        lambda agent: agent.act(torch.zeros(1, 1)),
        lambda agent: agent.value(torch.zeros(1, 1)),
        lambda agent: agent.target(replace(chunks(), next_candidates=None), generator()),
    ):
        with pytest.raises(DataError, match="base policy's chunks"):
            ask(agent_of())


@pytest.mark.checks("EXPO")
def test_what_is_backed_up_was_also_at_hand_to_act(monkeypatch):
    """The candidates stored for a next state are those among which, with their edits, the next chunk was chosen."""
    policy, world, held = edited(), StepsWorld(rows=2), ReplayBuffer()
    offered, explore = [], policy.explore

    def noted(seen, state, draws, proposals):
        offered.append(proposals)
        return explore(seen, state, draws, proposals)

    monkeypatch.setattr(policy, "explore", noted)
    monkeypatch.setattr(online, "ReplayBuffer", lambda: held)
    learn_online(policy, world, plays_base(policy), replace(QUICK, warmup=0, utd_ratio=0.0))
    data = held.transitions
    assert offered[0] is None, "an episode begins with new chunks"
    assert torch.equal(offered[1], data.next_candidates[:2]) and torch.equal(offered[2], data.next_candidates[2:4])
    assert data.next_candidates.shape == (len(data), COUNT, CHUNK)


def test_until_the_agent_acts_it_is_the_base_and_a_frozen_base_stays_as_it_was():
    base = denoising()
    policy = edited(base=base)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    for sure in (True, False):
        own, theirs = (
            each.act(observation(), generator(3), deterministic=sure).actions for each in (policy, denoising())
        )
        assert torch.equal(own, theirs)
    learn_online(policy, StepsWorld(), plays_base(policy), QUICK)
    assert bool(policy.acts)
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    acted = policy.act(observation(), generator(3), deterministic=True).actions
    assert not torch.equal(acted, denoising().act(observation(), generator(3), deterministic=True).actions)


def test_the_policy_conforms_and_its_checkpoint_does_the_same(tmp_path):
    for acts in (True, False):
        assert check_policy(edited(acts=acts).eval(), load_policy).level is Level.ACTS
    policy = edited(acts=True, scale=0.7)
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert isinstance(loaded, EditedPolicy) and loaded.agent.scale == 0.7 and int(loaded.count) == COUNT
    own, theirs = (each.act(observation(), generator(4)).actions for each in (policy, loaded))
    assert torch.equal(own, theirs)


def test_a_base_that_learns_imitates_successful_chunks_and_its_candidates_are_sampled_anew(monkeypatch):
    policy, world, held = edited(tuned=0.5), StepsWorld(end=0.3, goal=0.0), ReplayBuffer()
    monkeypatch.setattr(online, "ReplayBuffer", lambda: held)
    before = {name: value.clone() for name, value in policy.base.state_dict().items()}
    imitated, own_batch = [], BaseImitation.own_batch

    def noted(self, columns, rows):
        imitated.append(rows)
        batch = own_batch(self, columns, rows)
        assert torch.allclose(batch["actions"][:, :CHUNK, 0], columns["action"][rows], atol=1e-6)
        assert batch["action_valid"][:, :CHUNK].all()
        assert torch.equal(batch["action_valid"][:, CHUNK], columns["next_known"][rows])
        assert torch.equal(batch["observation"][STATE][:, -1], columns["state"][rows])
        return batch

    monkeypatch.setattr(BaseImitation, "own_batch", noted)
    result = learn_online(policy, world, lambda seen, state, draws: torch.ones(len(state), CHUNK), QUICK)
    assert result.updates and imitated
    good = successful(held.columns["episode"][: len(held)], held.columns["success"][: len(held)])
    assert set(torch.cat(imitated).tolist()) <= set(good.tolist())
    moved = [name for name, value in policy.base.state_dict().items() if not torch.equal(value, before[name])]
    assert moved and not any(weight.requires_grad for weight in policy.base.parameters())
    alive = ~held.transitions.terminated
    again = {STATE: held.columns[f"next_seen/{STATE}"][: len(held)][alive], TASK: [""] * int(alive.sum())}
    spread = policy.propose(again, generator()).mean(), held.transitions.next_candidates[alive].mean()
    assert float(spread[0]) == pytest.approx(float(spread[1]), abs=0.2)


def test_successful_chunks_are_all_those_of_episodes_that_succeeded():
    episode, success = torch.tensor([0, 1, 0, 2, 1]), torch.tensor([False, False, True, False, False])
    assert successful(episode, success).tolist() == [0, 2]


class Killed(Exception):
    """What stands for a kill."""


class Dies(StepsWorld):
    """It does so at its n-th chunk."""

    def __init__(self, turns):
        super().__init__(end=0.6)
        self.turns = turns

    def step(self, actions):
        """Step, or die."""
        self.turns -= 1
        if not self.turns:
            raise Killed
        return super().step(actions)


@pytest.mark.parametrize("tuned", [0.0, 0.3])
def test_a_run_that_is_killed_ends_bit_for_bit_in_the_same_place(tuned, tmp_path):
    config = replace(QUICK, steps=240, checkpoint_every=2, utd_ratio=0.5, offline_ratio=0.5)

    def run(name, world):
        policy = edited(tuned=tuned)

        def evaluate(judged):
            return {"success": float(judged.act(observation(), generator(1)).actions.mean()) / 2 + 0.5}

        return learn_online(
            policy,
            world,
            plays_base(policy),
            config,
            recorded=chunks(40),
            begins="recorded",
            evaluate=evaluate,
            run=RunFolder(tmp_path / name),
        )

    whole = run("whole", StepsWorld(end=0.6))
    for turns in (8, 21):
        name = f"broken at {turns}"
        with pytest.raises(Killed):
            run(name, Dies(turns))
        assert run(name, StepsWorld(end=0.6)) == whole
        for file in ("metrics.jsonl", "checkpoint/model.safetensors", "resume/online/trainer.safetensors"):
            assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / name / file).read_bytes(), (name, file)


def does_anything() -> DenoisingPolicy:
    """A policy that imitates any action."""
    policy, draws = denoising(), generator()
    optimiser = torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(150):
        actions = (torch.rand(64, 1, 1, generator=draws) * 2 - 1).expand(-1, 3, -1)
        seen = {STATE: torch.rand(64, 1, 1, generator=draws) * 2 - 1, TASK: [""] * 64}
        batch = {"observation": seen, "actions": actions, "action_valid": torch.ones(64, 3, dtype=torch.bool)}
        optimiser.zero_grad()
        policy.loss(batch, draws)["denoising"].mean().backward()
        optimiser.step()
    return policy.eval()


@pytest.mark.slow
def test_it_learns():
    """From a policy that does anything, within 2400 steps, to one that goes where it is paid."""
    config = OnlineConfig(steps=2400, warmup=400, batch_size=64, evaluate_at=(0,), evaluate_every=0)
    agent = SacConfig(
        width=32, depth=1, critics=2, diversity=0.0, discount=0.9, learning_rate=3e-3, temperature=0.05,
        entropy_backup=False,
    )  # fmt: skip
    policy, judging = edited(agent, scale=0.5, base=does_anything()), StepsWorld(rows=64)

    def earned(judged):
        player = online.Player(judging, PolicyActor(judged, generator(), deterministic=True))
        player.start_batch(range(64))
        return {"return": float(sum(played.step.reward.sum() for played in player)) / 64}

    result = learn_online(policy, StepsWorld(rows=8), plays_base(policy), config, evaluate=earned)
    before, after = (result.evaluations[place]["deterministic_return"] for place in (0, -1))
    assert before < -1.3 and after > -0.9, (before, after)


def test_a_policy_in_training_can_be_explored_with_as_it_is_now():
    policy = edited(acts=True)
    frozen = explores(policy.frozen_copy())
    state = policy.interface.state(observation())
    before = frozen(observation(), state, generator(2))
    with torch.no_grad():
        for weight in policy.agent.parameters():
            weight.add_(1.0)
    assert torch.equal(frozen(observation(), state, generator(2)), before)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_critics_see_through_the_encoder_as_it_was_when_they_began(ratio, tmp_path):
    """With instructions and cameras; a base that learns keeps its critics' encoder beside."""
    world = SeeingWorld(4)
    base = denoising_policy(world, cameras=True).eval()
    method = EditsChunks(EditOnlineConfig(candidates=2, base_utd_ratio=ratio))
    section = SimpleNamespace(batch_size=8, pretrain_steps=0, chunk=1)
    begin = OnlineStart(
        base, world.spec, "rlpd", SMALL, section, 0, torch.device("cpu"), lambda: None, lambda agent, data: None
    )
    policy = method.start(begin).policy
    assert policy.interface.feature_size and policy.interface.size == 2 + 2 + policy.interface.feature_size
    config = replace(QUICK, steps=40, warmup=12, evaluate_at=())
    assert learn_online(policy, world, plays_base(policy), config).updates > 10
    policy.save(tmp_path)
    assert (tmp_path / "encoder").exists() == bool(ratio)
    loaded, seen = load_policy(tmp_path), to_tensors(world.reset(seeds=np.arange(4)))
    own, theirs = (each.act(seen, generator(4)).actions for each in (policy, loaded))
    assert torch.allclose(own, theirs, atol=1e-6)


def test_of_recordings_demonstrations_and_interventions_are_imitated():
    """Two episodes of three steps: the policy's own until an intervention at the end, and one that failed."""
    human, own = int(ActingAgent.HUMAN), int(ActingAgent.POLICY)
    episodes = Episodes(
        observation_fields=FIELDS,
        action_field=ACTION,
        fps=10.0,
        observation={STATE: torch.zeros(8, 1)},
        actions=torch.zeros(6, 1),
        lengths=torch.tensor([3, 3]),
        tasks=("", ""),
        rewards={"success": torch.zeros(6)},
        step_success=torch.tensor([False, False, True, False, False, False]),
        terminated=torch.tensor([True, False]),
        final_known=torch.ones(2, dtype=torch.bool),
        actor=torch.tensor([own, own, human, own, own, own]),
        segment=torch.tensor([0, 0, 2, 0, 0, 0]),
    )
    interface = interface_of(denoising(), FIELDS, ACTION, ("",), chunk=1)
    decisions = recorded_decisions(episodes, interface, 0.9)
    assert decisions.step[worth_imitating(decisions)].tolist() == [2]
    unknown = replace(episodes, actor=None, segment=None)
    decisions = recorded_decisions(unknown, interface, 0.9)
    assert decisions.step[worth_imitating(decisions)].tolist() == [0, 1, 2]


def test_recorded_chunks_get_candidates_of_the_base_at_what_followed():
    base, method = denoising(), EditsChunks(EditOnlineConfig(candidates=COUNT))
    policy, steps = edited(base=base), 12
    draws = generator()
    episodes = Episodes(
        observation_fields=FIELDS,
        action_field=ACTION,
        fps=10.0,
        observation={STATE: torch.rand(steps + 1, 1, generator=draws)},
        actions=torch.rand(steps, 1, generator=draws),
        lengths=torch.tensor([steps]),
        tasks=("",),
        rewards={"success": torch.zeros(steps)},
        step_success=torch.ones(steps, dtype=torch.bool),
        terminated=torch.tensor([True]),
        final_known=torch.ones(1, dtype=torch.bool),
    )
    data = method.recorded(policy, episodes, SimpleNamespace(seed=0, device=torch.device("cpu")))
    assert data.next_candidates.shape == (len(data), COUNT, CHUNK)
    twin = Generators(derive_seed(0, "online/recorded candidates"))["propose"]
    expected = base.act(
        {STATE: data.next_state.repeat_interleave(COUNT, 0)[:, None], TASK: [""] * COUNT * len(data)}, twin
    ).actions
    assert torch.allclose(data.next_candidates.flatten(0, 1), expected[..., 0], atol=1e-5)
    before = policy.agent.critics.members.weights[0].clone()
    figures = policy.agent.update(data.draw(16, draws), draws)
    assert 0 <= float(figures["edited"]) <= 1 and not torch.equal(policy.agent.critics.members.weights[0], before)
