"""Factors of variation: what each changes and leaves alone, and that an episode is the same in any batch."""

import mujoco
import numpy as np
import pytest

from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.core.origin import WorldOrigin
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.core.storage import resource
from robopolicy.testing.world import check_world
from sims import registry
from sims.engine import load_model
from sims.physics.native import NativePhysics
from sims.registry import load_task, trusted_options
from sims.variations.physical import objects
from sims.variations.protocol import FACTORS, Variation, only_visible, session_changes, sweep

APPEARANCE = {"colour": 1, "light": 1, "camera": 1, "texture": 1, "distractors": 4}
PHYSICAL = {"size": [0.8, 1.25], "mass": [0.5, 2], "friction": [0.5, 2]}
IMAGE = "observation.images.top"
SEEDS = np.arange(4)


def make_world(name, rows, **options):
    return registry.make_world(name, rows, threads=1, **options)


def played(world, seeds=SEEDS, steps=20, pull=0.0):
    """Return the observations after uniform actions that follow from the seeds; pull: towards the object, if planar."""
    observation = world.reset(seeds=seeds)
    draws = np.stack([np.random.default_rng(seed).uniform(-1, 1, (steps, *world.spec.action.shape)) for seed in seeds])
    frames = []
    for step in range(steps):
        actions = draws[:, step]
        if pull:
            offset = observation[ENVIRONMENT_STATE][:, -1, 9:11]
            actions = np.clip(pull * offset / np.linalg.norm(offset, axis=1, keepdims=True), -1, 1)
        observation = world.step(actions[:, None]).observation
        frames.append(np.concatenate([observation[STATE][:, -1], observation[ENVIRONMENT_STATE][:, -1]], axis=1))
    return np.stack(frames, axis=1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["push_cube", "pick_place"])
def test_worlds_with_variation_keep_every_promise(name):
    options = {"variation": {**APPEARANCE, **PHYSICAL}, "cameras": ("top",), "image_size": 24, "history": 2}
    check_world(lambda rows: make_world(name, rows, **options))


@pytest.mark.parametrize("factor", APPEARANCE)
def test_appearance_changes_images_and_no_motion(factor):
    options = {"cameras": ("top", "front"), "image_size": 48}
    plain = make_world("push_cube", 4, **options)
    before = plain.reset(seeds=SEEDS)
    images = {}
    for value in (0, APPEARANCE[factor]):
        world = make_world("push_cube", 4, variation={factor: value}, **options)
        images[value] = world.reset(seeds=SEEDS)
        np.testing.assert_array_equal(played(world, steps=3), played(plain, steps=3))
        world.close()
    for camera in ("observation.images.top", "observation.images.front"):
        np.testing.assert_array_equal(images[0][camera], before[camera])
        change = images[APPEARANCE[factor]][camera].astype(float) - before[camera]
        changed = np.abs(change).max(axis=(1, 2, 3, 4))
        assert (changed > 10).all(), (factor, camera, changed)
        assert len({change[row].tobytes() for row in range(4)}) == 4, "every episode has its own appearance"
    plain.close()


def test_a_larger_strength_changes_an_episode_in_the_same_direction():
    camera = {}
    for value in (0.5, 1.0):
        model = load_model(load_task("push_cube"))
        own = model.cam_pos.copy()
        look = Variation({"camera": value}, model, "push_cube", 4).looks(np.array([3]))
        assert look is not None
        camera[value] = look[0].model.cam_pos - own
    np.testing.assert_allclose(camera[1.0], 2 * camera[0.5])
    assert 0.01 < np.abs(camera[1.0]).max() <= 0.05
    few, many = (
        Variation({"distractors": count}, load_model(load_task("push_t")), "push_t", 1).looks(np.array([3]))
        for count in (2, 5)
    )
    assert few is not None and many is not None
    assert [len(looks[0].props) for looks in (few, many)] == [2, 5]
    for one, other in zip(few[0].props, many[0].props, strict=False):
        np.testing.assert_array_equal(one.position, other.position)


def test_an_image_does_not_depend_on_the_row_that_was_drawn_before_it():
    """Textures live in the graphics context, which keeps the last row's."""
    world = make_world("push_cube", 4, variation={"texture": 1, "colour": [0, 1]})
    world.reset(seeds=SEEDS)
    together = world.render(camera="top")
    for row in (3, 0, 2, 1):
        np.testing.assert_array_equal(world.render(rows=[row], camera="top")[0], together[row])
    world.close()


def test_values_follow_from_the_seed_and_the_factor_alone():
    model, seeds = load_model(load_task("push_cube")), np.arange(2000)
    both = Variation({**APPEARANCE, **PHYSICAL, "distractors": [0, 3]}, model, "push_cube", 4).values(seeds)
    alone = Variation({"mass": [0.5, 2]}, model, "push_cube", 1).values(seeds[::-1])
    np.testing.assert_array_equal(alone["mass"][::-1], both["mass"])
    assert both["mass"].min() >= 0.5 and both["mass"].max() <= 2 and abs(both["mass"].mean() - 1.25) < 0.05
    assert abs(np.corrcoef(both["mass"], both["size"])[0, 1]) < 0.1
    counts = np.bincount(both["distractors"].astype(int), minlength=4)
    assert len(counts) == 4 and (np.abs(counts - 500) < 100).all()


@pytest.mark.parametrize("factor", PHYSICAL)
def test_physical_factors_change_motion_and_a_drawn_value_acts_as_a_fixed_one(factor):
    plain = played(make_world("push_cube", 4), steps=40, pull=1.0)
    own = make_world("push_cube", 4, variation={factor: 1})
    np.testing.assert_array_equal(played(own, steps=40, pull=1.0), plain)
    drawn = make_world("push_cube", 4, variation={factor: PHYSICAL[factor]})
    trajectories = played(drawn, steps=40, pull=1.0)
    moved = np.abs(trajectories - plain)[..., 6:8].max(axis=(1, 2))
    assert (moved > 1e-3).all(), "the cube goes another way, in metres"
    for row, value in enumerate(drawn._variation.values(SEEDS)[factor]):
        fixed = make_world("push_cube", 1, variation={factor: float(value)})
        np.testing.assert_array_equal(played(fixed, SEEDS[row : row + 1], steps=40, pull=1.0)[0], trajectories[row])


@pytest.mark.parametrize(
    ("factor", "value", "edits"),
    [
        ("mass", 2.0, {'mass="0.1"': 'mass="0.2"'}),
        (
            "size",
            1.5,
            {
                'size="0.04 0.04 0.04" mass': 'size="0.06 0.06 0.06" mass',
                'size="0.033 0.033 0.001" pos="0 0 0.0405"': 'size="0.0495 0.0495 0.0015" pos="0 0 0.06075"',
            },
        ),
        (
            "friction",
            0.5,
            {
                'friction="0.4 ': 'friction="0.2 ',
                '-0.26 0.26" damping="2"': '-0.26 0.26" damping="1"',
                'damping="0.003"': 'damping="0.0015"',
                "<geom contype": '<geom friction="0.5 0.005 0.0001" contype',
            },
        ),
    ],
)
def test_a_varied_model_is_the_one_that_an_edited_scene_compiles_to(factor, value, edits):
    text = resource("assets", "planar/push_cube.xml").read_text()
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)
    expected, model = mujoco.MjModel.from_xml_string(text), load_model(load_task("push_cube"))
    own = {name: getattr(model, name).copy() for name in ("body_mass", "geom_size", "dof_damping")}
    Variation({factor: value}, model, "push_cube", 1)
    assert any(not np.array_equal(getattr(model, name), array) for name, array in own.items())
    for name in dir(expected):
        array = getattr(expected, name)
        if isinstance(array, np.ndarray) and array.dtype.kind == "f" and name != "geom_user":
            np.testing.assert_allclose(getattr(model, name), array, rtol=1e-9, atol=1e-15, err_msg=name)
    assert model.stat.meaninertia == pytest.approx(expected.stat.meaninertia)


@pytest.mark.parametrize("name", ["pick_place", "stack"])
def test_resized_cubes_stand_on_the_table(name):
    heights = {}
    for value in (1.0, 1.25, 0.8):
        world = make_world(name, 3, variation={"size": value})
        start = world.reset(seeds=[0, 1, 2])[ENVIRONMENT_STATE][:, -1, 2]
        still = np.zeros((3, 5, *world.spec.action.shape))
        end = world.step(still).observation[ENVIRONMENT_STATE][:, -1, 2]
        assert np.abs(end - start).max() < 1e-4, "it neither falls nor jumps, in metres"
        heights[value] = float(start.mean())
    assert heights[1.25] - heights[1.0] == pytest.approx(0.005) and heights[1.0] - heights[0.8] == pytest.approx(0.004)


def test_objects_are_what_no_actuator_moves():
    names = {name: load_model(load_task(name)) for name in ("tidy", "push_t", "reach_planar")}
    bodies = {name: {model.body(i).name for i in np.flatnonzero(objects(model))} for name, model in names.items()}
    assert bodies["tidy"] == {"drawer", "white_tray", "black_tray", "red", "green", "blue"}
    assert bodies["push_t"] == {"block"} and not bodies["reach_planar"]


def test_an_episode_goes_on_exactly_from_a_snapshot_in_another_world_and_row():
    options = {"variation": {**APPEARANCE, **PHYSICAL}, "cameras": ("top",), "image_size": 32}
    first, second = make_world("push_cube", 4, **options), make_world("push_cube", 3, **options)
    played(first, steps=10, pull=1.0)
    second.reset(seeds=[70, 71, 72])
    restored = second.restore(first.snapshot([2]), [1])
    np.testing.assert_array_equal(restored[IMAGE][1], first.snapshot([2]).arrays[f"history/{IMAGE}"][0])
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 12, 2))
    expected, step = first.step(actions), second.step(actions[[0, 2, 3]])
    for key in (STATE, ENVIRONMENT_STATE):
        np.testing.assert_array_equal(step.trace[key][1], expected.trace[key][2])
    np.testing.assert_array_equal(step.observation[IMAGE][1], expected.observation[IMAGE][2])
    first.close()
    second.close()


class OneModel:
    """An engine without `advance_each`."""

    def __init__(self, model, batch_size, *, threads):
        self._inner = NativePhysics(model, batch_size, threads=threads)

    def advance(self, state, control, every):
        return self._inner.advance(state, control, every)

    def close(self):
        self._inner.close()


def test_an_engine_with_one_model_takes_fixed_physical_values_and_refuses_ranges():
    physics = f"{__name__}:OneModel"
    one = make_world("push_cube", 4, physics=physics, variation={"mass": 2.0, "colour": [0, 1]})
    np.testing.assert_array_equal(played(one), played(make_world("push_cube", 4, variation={"mass": 2.0})))
    with pytest.raises(ConfigError, match=r"physics=.*OneModel simulates all episodes with one model: give each phys"):
        make_world("push_cube", 4, physics=physics, variation={"mass": [1, 2]})


@pytest.mark.parametrize(
    ("variation", "text"),
    [
        ({"color": 1}, r"no factor of variation 'color'. Did you mean 'colour'"),
        ({"colour": 1.5}, r"colour is 1.5, but must be a number from 0 to 1, or a range"),
        ({"mass": [2, 1]}, r"mass is \[2, 1\], but must be a number from 0.05 to 20"),
        ({"mass": "heavy"}, r"mass is 'heavy'"),
        ({"mass": True}, r"mass is True"),
        ({"distractors": 2.5}, r"distractors is 2.5, but must be an integer from 0 to 20"),
        (["colour"], r"world.options.variation is \['colour'\], but must map factors to values, as world.options"),
    ],
)
def test_mistakes_are_one_sentence(variation, text):
    with pytest.raises(ConfigError, match=text):
        make_world("push_cube", 1, variation=variation)


def test_a_scene_says_what_it_cannot_vary():
    for factor in PHYSICAL:
        with pytest.raises(ConfigError, match=f"'reach_planar' cannot vary {factor}: no body of its scene moves with"):
            make_world("reach_planar", 1, variation={factor: 1})
    assert make_world("reach_planar", 1, variation=None).spec == make_world("reach_planar", 1, variation={}).spec
    left_out = make_world("reach_planar", 1, variation={"mass": None})
    left_out.reset()
    assert "variation" not in left_out.snapshot().arrays


def test_sweeps_name_their_variations():
    assert list(sweep(["colour", "mass"], "x")) == ["colour 1", "mass 0.5", "mass 2"]
    assert sweep({"mass": [0.5, [1, 2]], "colour": 0.5}, "x") == {
        "mass 0.5": {"mass": 0.5},
        "mass 1 to 2": {"mass": [1, 2]},
        "colour 0.5": {"colour": 0.5},
    }
    assert sweep(None, "x") == {}
    assert only_visible(sweep(["colour", "mass", "size", "light"], "x")) == ["colour", "light"]
    with pytest.raises(ConfigError, match=r"evaluate.variations is 'colour', but must be a list of factors"):
        sweep("colour", "evaluate.variations")
    with pytest.raises(ConfigError, match=r"no factor of variation 'weight'"):
        sweep(["weight"], "evaluate.variations")


def test_a_checkpoint_does_not_choose_a_factor_that_the_user_has_not_named():
    for options in ({"variation": {"strange.module:Factor": 1}}, {"faults": {"strange.module:Factor": {}}}):
        with pytest.raises(CheckpointError, match=r"=strange.module:Factor, which is not part of robopolicy"):
            trusted_options(WorldOrigin("push_t", options), "checkpoint", {})
    options = {"variation": {"mass": [0.5, 2]}}
    assert trusted_options(WorldOrigin("push_t", options), "checkpoint", {}) == options
    assert set(FACTORS.ours) == {*APPEARANCE, *PHYSICAL}


@pytest.mark.parametrize("factor", ["gravity", "outside_robotics.factors:Gravity"])
def test_a_factor_of_another_package(factor):
    pytest.importorskip("outside_robotics", reason="install it with: pip install -e tests/outside")
    world = make_world("pick_place", 2, variation={factor: [0, 0.5]})
    models = world._variation.models(SEEDS[:2])
    values = world._variation.values(SEEDS[:2])[factor]
    np.testing.assert_allclose([model.opt.gravity[2] for model in models], -9.81 * values)
    assert not np.array_equal(played(world, SEEDS[:2]), played(make_world("pick_place", 2), SEEDS[:2]))


@pytest.mark.checks("GS-LTS")
def test_sessions_change_one_factor_more_and_keep_what_changed_before():
    names = ["light", "distractors", "mass"]
    sessions = list(session_changes(names, "evaluate.variations", 20, seed=7).items())
    before = {}
    for number, (label, variation) in enumerate(sessions, 1):
        (factor,) = [name for name in variation if label == f"session {number}: {name} {variation[name]:g}"]
        assert {**before, factor: variation[factor]} == variation
        before = variation
    assert set(before) == set(names)
    values = {name: [variation[name] for _, variation in sessions if name in variation] for name in names}
    assert all(0.5 <= value <= 2 for value in values["mass"]) and all(0 <= value <= 1 for value in values["light"])
    assert all(isinstance(value, int) and 0 <= value <= 4 for value in values["distractors"])
    assert sessions == list(session_changes(names, "evaluate.variations", 20, seed=7).items())
    assert sessions[:3] == list(session_changes(names, "evaluate.variations", 3, seed=7).items())
    assert sessions != list(session_changes(names, "evaluate.variations", 20, seed=8).items())
    given = session_changes({"mass": [0.9, 1.1]}, "evaluate.variations", 3, seed=0)
    assert all(0.9 <= variation["mass"] <= 1.1 for variation in given.values())
    for wrong in (None, [], "mass", {"mass": [2, 1]}, ["weight"]):
        with pytest.raises(ConfigError):
            session_changes(wrong, "evaluate.variations", 1, seed=0)
