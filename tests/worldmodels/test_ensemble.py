"""The ensemble learns a system with a known answer; its world keeps the protocol; its checkpoint is strict."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from point_world import SPEC, recorded

from robopolicy.core.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from robopolicy.core.randomness import Generators, uniforms
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.evaluation.world_model import examine
from robopolicy.testing.world import check_world
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit
from worldmodels import load_world_model, save_world_model
from worldmodels.configuration import EnsembleConfig
from worldmodels.data import recorded_transitions
from worldmodels.ensemble import EnsembleModel
from worldmodels.env import PENALTY, ImaginedWorld, Truncation
from worldmodels.initial_states import context_at, keyframes, recorded_starts
from worldmodels.protocol import Context


def trained(steps=400, power=1, **options):
    torch.set_num_threads(1)
    train, held = recorded(power=power).split(0.1, torch.Generator().manual_seed(0))
    config = EnsembleConfig(members=3, width=64, depth=2, head_width=64, **options)
    model = EnsembleModel.build(config, SPEC, train, seed=0)
    generators = Generators(0)
    fit(model, model.batches(train, generators["batches"]), FitConfig(steps=steps, learning_rate=3e-3), generators)
    model.calibrate(held)
    return model, held


@pytest.fixture(scope="module")
def learned():
    return trained()


def world(model, rows, **options):
    def starts(seeds):
        draws = (2 * uniforms(np.asarray(seeds), 4) - 1).astype(np.float32)[:, None]
        position, goal = draws[..., :2], draws[..., 2:]
        return Context({STATE: position, ENVIRONMENT_STATE: np.concatenate([goal, goal - position], -1)})

    return ImaginedWorld(model, starts, rows, **options)


@pytest.mark.long
def test_structure_is_read_off_the_data(learned):
    structure = learned[0].structure
    assert structure.free.tolist() == [0, 1]
    assert structure.constant.tolist() == [2, 3]
    assert structure.derived.tolist() == [4, 5]
    state = torch.tensor([[0.1, 0.2, 0.5, -0.5, 9.0, 9.0]])
    assert torch.allclose(structure.complete(state)[0, 4:], torch.tensor([0.4, -0.7]), atol=1e-4)


def test_a_robot_answers_small_commands_before_anything_is_learned():
    data = recorded(30)
    model = EnsembleModel.build(EnsembleConfig(members=2, width=16, depth=1, head_width=8), SPEC, data, seed=0)
    transitions = recorded_transitions(data)
    inputs = np.concatenate([transitions.state[:, :2], transitions.action, np.ones((len(transitions), 1))], 1)
    change = (transitions.next_state - transitions.state)[:, :2].numpy()
    fitted = np.linalg.lstsq(inputs.astype(np.float64), change, rcond=None)[0]
    assert np.allclose(model.response, fitted, atol=1e-5)
    state, action = torch.tensor([[0.1, 0.2, 0.5, -0.5, 0.4, -0.7]]), torch.tensor([[0.01, -0.02]])
    after, _ = model.imagine(
        {"state": state, "seed": torch.zeros(1, dtype=int), "step": torch.zeros(1, dtype=int)}, action
    )
    assert torch.allclose((after["state"] - state)[0, :2], 0.2 * action[0], atol=5e-4)
    assert torch.allclose(model.delta_std, torch.tensor(1e-3 * change.std(0)), rtol=1e-3), "nothing is left to learn"
    others = EnsembleModel(model.config, SPEC, model.structure, model.success_bonus, robot=())
    assert others.response.shape == (3, 0) and not others.responded(state, action).any()


def test_weights_of_a_revision_without_a_response_predict_as_they_did():
    model = EnsembleModel.build(EnsembleConfig(members=2, width=16, depth=1, head_width=8), SPEC, recorded(12), seed=0)
    weights = {name: value for name, value in model.state_dict().items() if name != "response"}
    assert model.responded(torch.ones(1, 6), torch.ones(1, 2)).any()
    model.load_state_dict(weights)
    assert not model.responded(torch.ones(1, 6), torch.ones(1, 2)).any()


def test_what_a_linear_answer_leaves_is_learned():
    model, held = trained(power=3)
    data = recorded_transitions(held)
    state, action = (value.expand(3, -1, -1) for value in (data.state, data.action))
    mean, _ = model.predict(state, action)
    left = (data.next_state - data.state)[:, :2] - model.responded(data.state, data.action)
    learned_part = model.delta_mean + model.delta_std * mean.mean(0)
    assert (left - learned_part).square().mean() < 0.1 * left.square().mean()


def test_it_learns_the_known_dynamics(learned):
    model, held = learned
    figures = examine(model, held, torch.Generator().manual_seed(0))
    assert figures["reward_error"] < 0.1
    assert figures["success"]["f1"] > 0.8
    for ahead in ("1", "5"):
        error = figures["open_loop"][ahead][STATE]
        assert error["model"] < 0.3 * error["copy"]
        assert error["shuffled"] > 2 * error["model"]


def test_circles_earn_nothing_where_rewards_are_the_increase_of_a_potential(learned):
    model = learned[0]
    assert model.heads.pays_potential
    corners = torch.tensor([[0.5, 0.0], [0.0, 0.5], [-0.5, 0.0], [0.0, -0.5], [0.5, 0.0]])
    goal = torch.tensor([[0.3, 0.1]]).expand(5, 2)
    states = torch.cat([corners, goal, goal - corners], 1)
    earned = model.heads.progress(states[:-1], torch.zeros(4, 2), states[1:]).detach()
    assert earned.abs().min() > 0.05
    assert float(earned.sum()) == pytest.approx(0, abs=1e-5)


@pytest.mark.long
def test_other_rewards_are_read_off_state_action_and_next_state():
    episodes = recorded()
    cost = -episodes.actions.square().sum(1)
    paid = replace(episodes, rewards={**episodes.rewards, "progress": cost})
    train, held = paid.split(0.1, torch.Generator().manual_seed(0))
    model = EnsembleModel.build(EnsembleConfig(members=2, width=32, depth=2, head_width=32), SPEC, train, seed=0)
    generators = Generators(0)
    fit(model, model.batches(train, generators["batches"]), FitConfig(steps=200, learning_rate=3e-3), generators)
    model.calibrate(held)
    data = recorded_transitions(held)
    progress = model.heads.progress(data.state, data.action, data.next_state)
    assert not model.heads.pays_potential
    assert (progress - data.reward).square().mean() < 0.2 * data.reward.var()


def test_disagreement_grows_off_the_data(learned):
    model, held = learned

    def uncertainty(state):
        latent = {"state": state, "seed": torch.arange(len(state)), "step": torch.zeros(len(state), dtype=torch.int64)}
        return model.imagine(latent, held.actions[: len(state)])[1].uncertainty.mean()

    state = recorded_transitions(held).state[:200]
    assert uncertainty(state + 5.0) > 3 * uncertainty(state)
    quantiles = model.uncertainty_quantiles
    assert quantiles[0] < uncertainty(state) < quantiles[-1] and (quantiles.diff() >= 0).all()


def test_imagined_worlds_conform(learned):
    check_world(lambda rows: world(learned[0], rows), renders=False, tolerance=1e-5)


def test_an_episode_depends_on_its_seed_and_actions_alone(learned):
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 6, 2))
    first, second = world(learned[0], 4), world(learned[0], 2)
    first.reset(seeds=[5, 6, 7, 8])
    second.reset(seeds=[8, 6])
    a, b = first.step(actions), second.step(actions[[3, 1]])
    assert np.allclose(a.trace[STATE][[3, 1]], b.trace[STATE], atol=1e-5)


def test_uncertainty_cuts_imagination_without_ending_the_task(learned):
    cut = world(learned[0], 3, truncation=Truncation(uncertainty=0.0))
    cut.reset(seeds=[1, 2, 3])
    step = cut.step(np.zeros((3, 2, 2)))
    assert step.horizon_end.all() and not step.terminated.any() and not step.truncated.any()
    assert (step.uncertainty[:, 0] > 0).all()


def test_rows_that_have_ended_are_left_alone(learned, monkeypatch):
    asked, generate = [], EnsembleModel.generate
    monkeypatch.setattr(
        EnsembleModel, "generate", lambda self, *given: asked.append(given[1].shape[:2]) or generate(self, *given)
    )
    short, actions = world(learned[0], 3, truncation=Truncation(steps=3)), np.full((3, 2, 2), 0.1)
    short.reset(seeds=[1, 2, 3])
    short.step(actions)
    short.reset(rows=[1], seeds=[4])
    ended = short.step(actions)
    last = short.step(actions)
    assert asked == [(3, 2), (3, 2), (1, 1)]  # rows and steps: nothing behind the end that is known beforehand
    assert last.valid.tolist() == [[False, False], [True, False], [False, False]]
    assert np.array_equal(last.trace[STATE][1, 0], last.trace[STATE][1, 1]) and last.ended.all()
    assert ended.horizon_end.tolist() == [True, False, True]
    assert ended.valid.tolist() == [[True, False], [True, True], [True, False]]
    alone = world(learned[0], 1)
    alone.reset(seeds=[4])
    assert np.allclose(alone.step(actions[:1]).trace[STATE][0], ended.trace[STATE][1], atol=1e-5)
    assert np.array_equal(ended.trace[STATE][0, 0], ended.trace[STATE][0, 1])


def test_chunks_lead_where_single_steps_lead(learned):
    options = {"truncation": Truncation(steps=7, uncertainty=0.08), "history": 3, "debounce": 2}
    whole, single = world(learned[0], 12, **options), world(learned[0], 12, **options)
    for each in (whole, single):
        to_goal = each.reset(seeds=range(12))[ENVIRONMENT_STATE][:, -1:, 2:]
    actions = np.repeat(to_goal, 8, axis=1)  # a gain of 0.2: at the goal after five steps, unless they are far from it
    together, parts = whole.step(actions), [single.step(part) for part in np.split(actions, 8, axis=1)]
    assert np.array_equal(together.valid, np.concatenate([part.valid for part in parts], 1))
    assert 0 < together.valid.mean() < 0.9 and together.success.any() and not together.success.all()
    for name in together.rewards:
        joined = np.concatenate([part.rewards[name] for part in parts], 1)
        assert np.allclose(together.rewards[name], joined, atol=1e-5)
    for key in together.trace:
        assert np.allclose(together.trace[key], np.concatenate([part.trace[key] for part in parts], 1), atol=1e-5)
        assert np.allclose(together.observation[key], parts[-1].observation[key], atol=1e-5)
    for flag in ("success", "terminated", "truncated", "horizon_end"):
        assert np.array_equal(getattr(together, flag), getattr(parts[-1], flag))


def test_doubt_costs_what_the_penalty_says(learned):
    free, priced = world(learned[0], 3), world(learned[0], 3, penalty=2.0)
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 4, 2))
    steps = []
    for each in (free, priced):
        each.reset(seeds=[1, 2, 3])
        steps.append(each.step(actions))
    assert np.allclose(steps[1].rewards[PENALTY], -2.0 * steps[0].uncertainty) and PENALTY in priced.spec.rewards
    assert np.array_equal(steps[0].rewards["progress"], steps[1].rewards["progress"])


def test_imagination_begins_anywhere_in_recorded_episodes(learned):
    model, held = learned
    context = context_at(held, torch.tensor([0, 2]), history=3)
    assert context.observation[STATE].shape == (2, 3, 2) and context.actions.shape == (2, 2, 2)
    assert (context.observation[STATE][0] == held.observation[STATE][0].numpy()).all()
    assert (context.actions[0] == 0).all() and np.array_equal(context.actions[1], held.actions[:2].numpy())
    starts = recorded_starts(held, steps=torch.tensor([5]))
    inside = ImaginedWorld(model, starts, 2, history=2)
    observation = inside.reset(seeds=[0, 1])
    frame = held.observation[STATE][5 + held.episode_of_step[5]].numpy()
    assert (observation[STATE] == frame).all()


def test_debounce_wants_success_to_last(learned):
    model = learned[0]
    frames = {STATE: np.zeros((1, 1, 2), dtype=np.float32), ENVIRONMENT_STATE: np.zeros((1, 1, 4), dtype=np.float32)}

    def at_goal(seeds):
        return Context(frames)

    once, thrice = (ImaginedWorld(model, at_goal, 1, debounce=count) for count in (1, 3))
    once.reset(seeds=[0])
    thrice.reset(seeds=[0])
    actions = np.zeros((1, 4, 2))
    assert once.step(actions).valid.sum() < thrice.step(actions).valid.sum()


@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_where_the_return_decides_it_is_the_imagined_one_of_the_whole_episode(learned, chunk):
    def judged(success, **options):
        model = copy(learned[0])
        model._spec = replace(model.spec, success=success, terminate_on_success=False)
        imagined = world(model, 8, **options)
        to_goal = imagined.reset(seeds=range(8))[ENVIRONMENT_STATE][:, -1:, 2:]
        steps = [imagined.step(np.repeat(to_goal, chunk, axis=1)) for _ in range(-(-12 // chunk))]
        assert not any(step.success.any() for step in steps[:-1])
        return np.sum([step.rewards["progress"].sum(1) for step in steps], axis=0), steps[-1]

    middle = np.median(judged("return >= 0")[0])
    paid, step = judged(f"return >= {middle:.6f}", debounce=3)
    assert np.array_equal(step.success, paid >= middle) and 0 < step.success.sum() < 8
    assert step.truncated.all() and not step.terminated.any()
    cut = judged("return >= -99", truncation=Truncation(steps=12 - chunk))[1] if chunk < 12 else None
    assert cut is None or (cut.horizon_end.all() and not cut.success.any())


def test_checkpoints_round_trip_and_are_strict(learned, tmp_path):
    model = learned[0]
    save_world_model(model, tmp_path / "model")
    loaded = load_world_model(tmp_path / "model")
    worlds = [world(each, 3) for each in (model, loaded)]
    for each in worlds:
        each.reset(seeds=[1, 2, 3])
    actions = np.full((3, 4, 2), 0.5)
    a, b = (each.step(actions) for each in worlds)
    assert np.array_equal(a.trace[STATE], b.trace[STATE])
    assert loaded.spec == model.spec
    (tmp_path / "model" / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_world_model(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"kind": "policy/denoising"}')
    with pytest.raises(CheckpointError, match="not a world model"):
        load_world_model(tmp_path / "model")


def test_bad_data_is_refused():
    data = recorded(episodes=4)
    broken = {**data.observation, STATE: data.observation[STATE] * torch.nan}
    with pytest.raises(NonFiniteError, match="state"):
        recorded_transitions(replace(data, observation=broken))
    with pytest.raises(DataError, match="another world"):
        EnsembleModel.build(EnsembleConfig(), SPEC, replace(data, actions=data.actions[:, :1]), 0)
    with pytest.raises(DataError, match=r"lacks next\.reward"):
        recorded_transitions(replace(data, rewards=None))
    with pytest.raises(DataError, match="leaves none of"):
        data.select([0]).split(0.1, torch.Generator())
    with pytest.raises(ConfigError, match="at least 1"):
        EnsembleConfig(members=0)


def test_keyframes_are_where_successes_make_progress():
    episodes = recorded(12, steps=8, seed=3)
    chosen = keyframes(episodes)
    assert episodes.success is not None and episodes.reward is not None
    won = episodes.success.nonzero()[:, 0]
    assert set(episodes.episode_of_step[chosen].tolist()) == set(won.tolist())
    for episode in won.tolist():
        start, length = int(episodes.starts[episode]), int(episodes.lengths[episode])
        mine = chosen[episodes.episode_of_step[chosen] == episode] - start
        made = episodes.reward[start : start + length].cumsum(0)
        assert mine[0] == 0 and bool((mine.diff() > 0).all())
        for part in (1, 2, 3):
            passes = int((made >= made.max() * part / 4).nonzero()[0, 0])
            assert passes in mine.tolist()
    assert len(recorded_starts(episodes, steps=chosen)(np.arange(5)).observation) == 2
    with pytest.raises(ConfigError, match="recorded rewards"):
        keyframes(replace(episodes, rewards=None))
