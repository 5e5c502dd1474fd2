"""The ensemble learns a system with a known answer; its world keeps the protocol; its checkpoint is strict."""

import numpy as np
import pytest
import torch

from robopolicy.core.conformance import check_world
from robopolicy.core.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from robopolicy.core.randomness import Generators, uniforms
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field, WorldSpec
from robopolicy.training.fit import FitConfig, fit
from worldmodels import load_world_model, save_world_model
from worldmodels.diagnostics import examine
from worldmodels.ensemble import EnsembleConfig, TransitionData, build_ensemble
from worldmodels.env import ImaginedWorld, Truncation, dataset_starts

GAIN = 0.2
SPEC = WorldSpec(
    name="points",
    observation={
        STATE: Field((2,), names=("x", "y")),
        ENVIRONMENT_STATE: Field((4,), names=("goal_x", "goal_y", "to_goal_x", "to_goal_y")),
    },
    action=Field((2,), low=-1.0, high=1.0),
    fps=10,
    horizon=12,
    rewards=("progress", "success"),
    instructions=("go there",),
)


def transitions(episodes=300, steps=10, seed=0):
    """A point that moves by GAIN times the action; reward is progress to the goal; success within 0.15."""
    generator = torch.Generator().manual_seed(seed)
    rows = {name: [] for name in ("state", "action", "next_state", "reward", "success", "terminated", "episode")}
    for episode in range(episodes):
        position = 2 * torch.rand(2, generator=generator) - 1
        goal = 2 * torch.rand(2, generator=generator) - 1
        for _ in range(steps):
            noisy = 2 * (goal - position) + 0.8 * torch.randn(2, generator=generator)
            action = noisy.clamp(-1, 1)
            after = position + GAIN * action
            state, following = (torch.cat([p, goal, goal - p]) for p in (position, after))
            distance = [(goal - p).norm() for p in (position, after)]
            success = distance[1] < 0.15
            values = (state, action, following, distance[0] - distance[1], success, success, torch.tensor(episode))
            for name, value in zip(rows, values, strict=True):
                rows[name].append(value)
            position = after
            if success:
                break
    return TransitionData(**{name: torch.stack(values) for name, values in rows.items()})


def trained(steps=400, **options):
    torch.set_num_threads(1)
    data = transitions()
    train, held = data.split(0.1, torch.Generator().manual_seed(0))
    config = EnsembleConfig(members=3, width=64, depth=2, head_width=64, **options)
    model = build_ensemble(config, SPEC, train, success_bonus=1.0, seed=0)
    generators = Generators(0)
    fit(model, model.batches(train, generators["batches"]), FitConfig(steps=steps, learning_rate=3e-3), generators)
    model.calibrate_success(held)
    return model, held


@pytest.fixture(scope="module")
def learned():
    return trained()


def world(model, rows, **options):
    def starts(seeds):
        draws = (2 * uniforms(np.asarray(seeds), 4) - 1).astype(np.float32)
        return {STATE: draws[:, :2], ENVIRONMENT_STATE: np.concatenate([draws[:, 2:], draws[:, 2:] - draws[:, :2]], 1)}

    return ImaginedWorld(model, starts, rows, **options)


def test_structure_is_read_off_the_data(learned):
    structure = learned[0].structure
    assert structure.free.tolist() == [0, 1]
    assert structure.constant.tolist() == [2, 3]
    assert structure.derived.tolist() == [4, 5]
    state = torch.tensor([[0.1, 0.2, 0.5, -0.5, 9.0, 9.0]])
    assert torch.allclose(structure.complete(state)[0, 4:], torch.tensor([0.4, -0.7]), atol=1e-4)


def test_it_learns_the_known_dynamics(learned):
    model, held = learned
    figures = examine(model, held, torch.Generator().manual_seed(0))
    assert figures["one_step_error"] < 0.02
    assert figures["shuffled_action_error"] > 0.8
    assert figures["reward_error"] < 0.1
    assert figures["success"]["f1"] > 0.8
    assert figures["open_loop"]["5"]["error"] < 0.3 * figures["open_loop"]["5"]["copy_first_state"]


def test_disagreement_grows_off_the_data(learned):
    model, held = learned

    def uncertainty(state):
        latent = {"state": state, "seed": torch.arange(len(state)), "step": torch.zeros(len(state), dtype=torch.int64)}
        return model.imagine(latent, held.action[: len(state)])[1].uncertainty.mean()

    state = held.state[:200]
    assert uncertainty(state + 5.0) > 3 * uncertainty(state)


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


def test_debounce_wants_success_to_last(learned):
    model = learned[0]
    goal = np.zeros((1, 2), dtype=np.float32)
    at_goal = dataset_starts({STATE: goal, ENVIRONMENT_STATE: np.zeros((1, 4), dtype=np.float32)})
    once, thrice = (ImaginedWorld(model, at_goal, 1, debounce=count) for count in (1, 3))
    once.reset(seeds=[0])
    thrice.reset(seeds=[0])
    actions = np.zeros((1, 4, 2))
    assert once.step(actions).valid.sum() < thrice.step(actions).valid.sum()


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


def test_bad_data_is_refused(learned):
    data = transitions(episodes=4)
    with pytest.raises(NonFiniteError, match="state"):
        TransitionData(**{**data.__dict__, "state": data.state * torch.nan})
    with pytest.raises(DataError, match="another world"):
        build_ensemble(
            EnsembleConfig(), SPEC, TransitionData(**{**data.__dict__, "action": data.action[:, :1]}), 1.0, 0
        )
    with pytest.raises(ConfigError, match="at least 1"):
        EnsembleConfig(members=0)
