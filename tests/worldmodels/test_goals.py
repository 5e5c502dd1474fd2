"""Goals as pictures and states: distances by hand, plans that reach them, and what is refused."""

import dot_world
import numpy as np
import pytest
import torch
from dot_world import IMAGE, SPEC, recorded, spots
from PIL import Image
from point_world import GAIN

from robopolicy.building.planning import load_goal
from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field, WorldSpec
from robopolicy.evaluation.tables import element_table
from robopolicy.evaluation.world_model import element_errors, element_labels
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from sims.registry import load_task
from worldmodels.configuration import EnsembleConfig, LatentEnsembleConfig, PlanConfig
from worldmodels.ensemble import EnsembleModel
from worldmodels.goals import Goal
from worldmodels.initial_states import context_at
from worldmodels.latent_ensemble import LatentEnsembleModel
from worldmodels.mpc import ModelPredictivePolicy, returns_towards
from worldmodels.protocol import Imagined

CONFIG = LatentEnsembleConfig(
    features=8,
    channels=(8, 8, 8),
    batch_size=32,
    encoder_step_ratio=5.0,
    readout_step_ratio=1.5,
    ensemble=EnsembleConfig(members=2, width=32, depth=1, head_width=16),
)


class Plane:
    """A point that an action moves by a tenth, with no reward and an uncertainty of its first coordinate."""

    spec = WorldSpec("plane", {STATE: Field((3,))}, Field((2,), low=-1.0, high=1.0), 10.0, 100, rewards=("nothing",))

    def initial(self, context, seeds):
        return {"x": torch.from_numpy(context.last(STATE).astype(np.float32))}

    def imagine(self, latent, actions):
        x = latent["x"].clone()
        x[:, :2] += 0.1 * actions.float()
        nothing, never = torch.zeros(len(x)), torch.zeros(len(x), dtype=torch.bool)
        return {"x": x}, Imagined({STATE: x}, {"nothing": nothing}, never, never, x[:, 0])


def test_distances_and_returns_by_hand():
    """Two rows with two samples each; the second row has another goal, and one element of it does not matter."""
    model = Plane()
    goal = Goal(model, {STATE: torch.tensor([[1.0, 0.0, float("nan")], [0.0, float("nan"), 2.0]])})
    latent = {"x": torch.zeros(4, 3)}
    sequences = torch.tensor([[[1.0, 0.0]] * 2, [[0.0, 1.0]] * 2, [[1.0, 0.0]] * 2, [[0.0, 1.0]] * 2])
    expected = torch.tensor([0.8**2 / 2, (1 + 0.2**2) / 2, (0.2**2 + 4) / 2, 4 / 2], dtype=torch.float64)
    returns = returns_towards(model, latent, sequences, PlanConfig(kind="cem"), goal, 2)
    assert torch.allclose(returns, -expected, atol=1e-6)
    with pytest.raises(SpecError, match="2 goals for 4 rows"):
        returns_towards(model, latent, sequences, PlanConfig(kind="cem"), goal, 4)
    doubtful = PlanConfig(kind="cem", uncertainty=-1.0, discount=0.5)
    returns = returns_towards(model, latent, sequences, doubtful, goal, 2)
    assert torch.allclose(returns, -expected - torch.tensor([0.2, 0, 0.2, 0], dtype=torch.float64), atol=1e-6)


def test_each_row_plans_for_its_own_goal():
    goals = torch.tensor([[0.6, -0.3, float("nan")], [-0.4, 0.5, float("nan")]])
    planner = ModelPredictivePolicy(Plane(), PlanConfig(kind="cem", horizon=8), goal=Goal(Plane(), {STATE: goals}))
    generator, x = torch.Generator().manual_seed(0), torch.zeros(2, 3)
    for _ in range(16):
        for action in planner.act({STATE: x[:, None]}, generator).actions.unbind(1):
            x[:, :2] += 0.1 * action
    assert ((x - goals)[:, :2].norm(dim=1) < 0.25).all(), x


def test_states_are_compared_in_standard_deviations():
    data = dot_world.recorded(20)
    model = EnsembleModel.build(EnsembleConfig(members=2, width=8, depth=1, head_width=8), SPEC, data, 0)
    start = context_at(data, data.starts[:5], 1)
    latent = model.initial(start, np.arange(5))
    wanted = data.observation[STATE][40:41]
    _, outcome = model.imagine(latent, torch.zeros(5, 2))
    distance = Goal(model, {STATE: wanted}).distance(latent, outcome, 5)
    deviation = data.transitions(model.state_vector).state[:, model.state_vector.slices[STATE]].std(0, correction=0)
    present = torch.from_numpy(start.last(STATE))
    assert torch.allclose(distance, ((present - wanted) / deviation).square().mean(1), rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "config"),
    [(EnsembleModel, EnsembleConfig(members=2, width=8, depth=1, head_width=8)), (LatentEnsembleModel, CONFIG)],
)
def test_what_never_varied_in_the_data_counts_for_nothing_in_a_goal(kind, config):
    data = dot_world.recorded(20)
    data.observation[STATE][:, 1] = 0.25
    model = kind.build(config, SPEC, data, 0)
    if kind is LatentEnsembleModel:
        next(iter(model.latent_batches(data, torch.Generator())))  # keeps the statistics of latents
    goal = Goal(model, {STATE: torch.tensor([[0.3, 0.3]])})
    assert goal.targets[STATE].isnan().tolist() == [[False, True]]
    with pytest.raises(ConfigError, match="not null and varied"):
        Goal(model, {STATE: torch.tensor([[float("nan"), 0.3]])})


@pytest.fixture(scope="module")
def learned():
    torch.set_num_threads(1)
    data = recorded(60)
    model = LatentEnsembleModel.build(CONFIG, SPEC, data, 0)
    fit_stages(model, data, FitConfig(steps=250, learning_rate=3e-3), Generators(0))
    model.calibrate(data)
    return model.eval()


@pytest.mark.long
@pytest.mark.parametrize("by", ["picture", "state"])
def test_plans_reach_what_a_picture_or_a_state_shows(learned, by):
    """Each row's goal is the last recorded frame of an episode, from whose first frame it starts."""
    data = recorded(8, seed=3)
    begin = data.frame_starts
    last = begin + data.lengths
    place, target = data.observation[STATE][begin], data.observation[ENVIRONMENT_STATE][begin][:, :2]
    wanted = data.observation[STATE][last]
    fields = {IMAGE: data.observation[IMAGE][last]} if by == "picture" else {STATE: wanted}
    planner = ModelPredictivePolicy(learned, PlanConfig(kind="cem", horizon=6), goal=Goal(learned, fields))
    generator, before = torch.Generator().manual_seed(0), (place - wanted).norm(dim=1)
    for _ in range(8):
        frame = torch.stack([spots(place), spots(target), torch.full((8, 16, 16), 0.2)], -1)
        observation = {STATE: place[:, None], IMAGE: (255 * frame).to(torch.uint8)[:, None]}
        for action in planner.act(observation, generator).actions.unbind(1):
            place = place + GAIN * action.clamp(-1, 1)
    after = (place - wanted).norm(dim=1)
    assert float(after.mean()) < 0.6 * float(before.mean()), (before, after)


@pytest.mark.long
def test_goals_of_read_vectors_are_standardised(learned):
    data = recorded(20, seed=4)
    latent = learned.initial(context_at(data, data.starts[:6], 1), np.arange(6))
    wanted = torch.full((1, 4), float("nan"))
    wanted[0, 2:] = 0.0  # the point lies on its goal
    readout = learned.readout
    assert readout is not None
    place = readout.vector.slices[ENVIRONMENT_STATE]
    values = learned.read(latent, (ENVIRONMENT_STATE,))[ENVIRONMENT_STATE]
    expected = (values / readout.deviations[place])[:, 2:].square().mean(1)
    _, outcome = learned.imagine(latent, torch.zeros(6, 2))
    assert torch.allclose(Goal(learned, {ENVIRONMENT_STATE: wanted}).distance(latent, outcome, 6), expected, rtol=1e-4)
    recorded_deviation = data.observation[ENVIRONMENT_STATE].std(0)
    ratio = readout.deviations[place] / recorded_deviation
    assert torch.allclose(ratio[:2], torch.ones(2), rtol=0.3)  # the goal, which is read
    assert bool(((ratio[2:] > 0.5) & (ratio[2:] < 2)).all())  # the way to it, computed


@pytest.mark.long
def test_the_readouts_errors_are_told_by_element_and_in_mm(learned):
    data = recorded(30, seed=7)
    errors = element_errors(learned, data, 25, (0, 1, 3))
    errors = {name: row for name, row in errors.items() if name.startswith(ENVIRONMENT_STATE)}
    assert len(errors) == 4
    begin = data.starts[:25]
    latent = learned.initial(context_at(data, begin, 1), begin.numpy())
    for step in range(4):
        if step:
            latent, _ = learned.imagine(latent, data.actions[begin + (data.lengths[:25] - 1).clamp_max(step - 1)])
        if step in (0, 1, 3):
            alive = data.lengths[:25] >= step
            first = data.frame_starts[:25][alive]
            truth = data.observation[ENVIRONMENT_STATE][first + step]
            held = (data.observation[ENVIRONMENT_STATE][first] - truth).square().mean(0).sqrt()
            read = learned.read(latent, (ENVIRONMENT_STATE,))[ENVIRONMENT_STATE][alive]
            expected = (read - truth).square().mean(0).sqrt()
            for row, value, copied in zip(errors.values(), expected, held, strict=True):
                assert row[str(step)]["model"] == pytest.approx(float(value), rel=1e-4)
                assert row[str(step)]["copy"] == pytest.approx(float(copied), rel=1e-4)
    header, rows = element_table(errors)
    assert header == ["element", "0 steps", "1 steps", "3 steps"] and len(rows) == 4
    field = Field((3,), unit="x, y: m; turn: rad", names=("x", "y", "turn"))
    assert element_labels("state", field) == [
        ("state x, mm", 1000.0),
        ("state y, mm", 1000.0),
        ("state turn, rad", 1.0),
    ]
    assert element_labels("state", Field((1,))) == [("state 0", 1.0)]
    turning = Field((3,), unit="rad/s", names=("turn_cos", "turn_sin", "turn_velocity"))
    labels = [label for label, _ in element_labels("state", turning)]
    assert labels == ["state turn_cos", "state turn_sin", "state turn_velocity, rad/s"]
    cube = load_task("push_cube").observation[ENVIRONMENT_STATE]
    in_mm = [label.split()[1].rstrip(",") for label, scale in element_labels("state", cube) if scale == 1000]
    places = [f"{name}_{axis}" for name in ("cube", "goal", "pusher_to_cube", "cube_to_goal") for axis in "xy"]
    assert in_mm == places
    held = load_task("pick_place").observation[ENVIRONMENT_STATE]
    assert [label.split()[1].rstrip(",") for label, scale in element_labels("state", held) if scale == 1000] == [
        f"{name}_{axis}" for name in ("cube", "tip_to_cube", "cube_to_goal", "goal") for axis in "xyz"
    ]


def test_a_picture_is_read_from_a_file_in_the_cameras_size(tmp_path):
    data = recorded(4)
    model = LatentEnsembleModel.build(CONFIG, SPEC, data, 0)
    image = data.observation[IMAGE][3].numpy()
    Image.fromarray(image.repeat(2, 0).repeat(2, 1)).save(tmp_path / "goal.png")
    config = PlanConfig(kind="cem", goal={IMAGE: str(tmp_path / "goal.png"), STATE: [0.5, None]})
    goal = load_goal(config, model)
    assert goal is not None
    own = Goal(model, {IMAGE: data.observation[IMAGE][3:4], STATE: torch.tensor([[0.5, float("nan")]])})
    assert torch.equal(goal.targets[IMAGE], own.targets[IMAGE])
    assert torch.equal(goal.targets[STATE].isnan(), torch.tensor([[False, True]]))
    assert load_goal(PlanConfig(kind="cem"), model) is None
    (tmp_path / "text.png").write_text("no picture")
    for value, text in (
        ({IMAGE: str(tmp_path / "text.png")}, "could not be read as a PNG or JPEG"),
        ({IMAGE: str(tmp_path / "none.png")}, "could not be read as a PNG or JPEG"),
        ({STATE: [1.0]}, r"has shape \[1\], but the world's has \[2\]"),
        ({STATE: "goal"}, "could not be read"),
        ({STATE: {"x": 1}}, "must be the path of a picture, or a list of numbers"),
        ({"observation.stat": [1.0, 2.0]}, r"compares goals by .*Did you mean 'observation\.state'"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_goal(PlanConfig(kind="cem", goal=value), model)
    for settings in ({}, {"kind": "cem", "objective": "a:b"}):
        with pytest.raises(ConfigError, match=r"plan\.goal needs plan\.kind=cem"):
            PlanConfig(goal={STATE: [0.0, 0.0]}, **settings)
