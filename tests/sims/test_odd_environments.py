"""`robopolicy check` on odd gymnasium environments: each is read right, or refused in a sentence with the way out."""

import warnings
from dataclasses import replace

import gymnasium
import numpy as np
import odd_environments as odd
import pytest
from gymnasium import spaces
from odd_environments import Odd, acts, box, byte, draws, ends, pays, returns, shows

from robopolicy.configuration import compose
from robopolicy.core.errors import RobopolicyError, RobopolicyWarning
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field
from robopolicy.verbs import check
from robopolicy.verbs.check import world_lines
from sims.experts import NoisyController
from sims.registry import _is_environment, make_world
from sims.suites.environment_class import open_class
from sims.suites.gymnasium_suite import GymnasiumWorld
from sims.suites.layout import observation_layout


def made(environment, rows=2, **options):
    given = {"horizon": 6, "instruction": "go", "own_task": True} | options
    return GymnasiumWorld("odd", environment, rows, **given)


def quietly(environment, rows=2, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RobopolicyWarning)
        return made(environment, rows, **options)


def played(environment, steps=2, rows=2, **options):
    """A world of the environment, and its observation after some steps."""
    world = quietly(environment, rows, **options)
    world.reset(seeds=range(rows))
    step = world.step(np.full((rows, steps, world.spec.action.size), 0.5))
    return world, step


@pytest.fixture(scope="module")
def config():
    return compose([], sections=check.VERB.sections)


@pytest.fixture
def checked(config, monkeypatch):
    def lines(environment, cameras=(), **options):
        monkeypatch.setattr(
            check, "make_world", lambda name, rows, **given: made(environment, rows, **{**options, **given})
        )
        chosen = replace(config, world=replace(config.world, cameras=tuple(cameras)))
        return "\n".join(world_lines(chosen, "odd"))

    return lines


READ = {
    "two pictures of one name, and depth": (
        odd.TwoOfOneName,
        [
            "observation.state [2] (agent.qpos[0] to [1])",
            "base_camera.rgb (12 x 16, 'sensor_data.base_camera.rgb' of the observation), hand_camera.rgb (8 x 8",
            "'sensor_data.base_camera.depth' [12, 16, 1] int16 is ignored: the bounds of an image must be 0 to 255",
            "state_keys=[sensor_data]",
            "is used as the camera 'hand_camera.rgb'",
        ],
    ),
    "entries called default": (
        lambda: odd.CalledDefault("rgb_array"),
        ["default (rendered at any size), observation.default (8 x 8", "cam.default (8 x 8"],
    ),
    "choices in dictionaries and tuples": (
        odd.Choices,
        [
            "observation.state [17]",
            "'robot.mode' Discrete(3, start=1) is read as 3 numbers, one-hot",
            "'flags' MultiBinary(4) is read as 4 numbers",
            "'dials' MultiDiscrete([2 3]) is read as 5 numbers",
            "'pair.1' Discrete(2) is read as 2",
        ],
    ),
    "what is no number": (
        odd.NoNumbers,
        [
            "'path' is ignored: a Sequence has no fixed size",
            "'scene' is ignored: a Graph",
            "'cell' Discrete(100000) is ignored",
            "'nothing' [0] float32 is ignored: it is empty",
        ],
    ),
    "numbers of all types": (
        odd.Typed,
        [
            "[115]",
            "'table' [2, 2] float64 is read as 4 numbers, row by row",
            "'bodies' [5, 4, 4] float32 is read as 80",
        ],
    ),
    "a stack of numbers": (odd.Stacked, ["'observation' [4, 2] float32 is read as 8 numbers"]),
    "stacks of pictures": (
        odd.StackOfColour,
        [
            "'rgb' [4, 16, 16, 3] uint8 is ignored: a stack of 4 images? Policies have their own history",
            "'gray' [4, 16, 16] uint8 is ignored: a stack of 4 images? Policies have their own history: "
            "register it without the stack, or an image of 4 channels?",
            "'maps' [4, 16, 16] float32 is ignored",
        ],
    ),
    "a float picture": (
        shows(rgb=(box(16, 12, 3, low=0, high=1), 1.0)),
        ["rgb (16 x 12", "0 to 1 becomes 0 to 255", "observation.state [2]"],
    ),
    "a float picture of bytes": (shows(rgb=box(16, 16, 3, low=0, high=255)), ["rgb (16 x 16", "rounded to uint8"]),
    "an int picture": (shows(rgb=box(16, 16, 3, low=0, high=255, dtype=np.int32)), ["rgb (16 x 16"]),
    "a grey picture of two axes": (shows(gray=byte(16, 20)), ["gray (16 x 20"]),
    "a grey picture of one channel": (shows(gray=byte(16, 20, 1)), ["gray (16 x 20"]),
    "a large grey picture of floats": (shows(gray=(box(40, 40, low=0, high=1), 1.0)), ["gray (40 x 40"]),
    "a picture with its channels first": (shows(rgb=byte(3, 10, 20)), ["rgb (10 x 20"]),
    "a picture with opacity": (shows(rgba=byte(10, 20, 4)), ["rgba (10 x 20", "without its fourth channel"]),
    "a mask": (shows(mask=(box(16, 16, 1, low=0, high=1, dtype=np.uint8), 1.0)), ["mask (16 x 16", "0 to 1 becomes"]),
    "classes": (
        shows(ids=(box(16, 16, 1, low=0, high=10, dtype=np.uint8), 10.0)),
        ["'ids' [16, 16, 1] uint8 is ignored"],
    ),
    "a mask of truths": (shows(mask=(box(16, 16, 1, low=0, high=1, dtype=bool), 1.0)), ["mask (16 x 16"]),
    "no metadata": (odd.NoMetadata, ["observation.state [2]"]),
    "depth in m": (shows(depth=(box(48, 48), 2.0)), ["'depth' [48, 48] float32 is ignored", "(depth, classes?)"]),
    "a normalised picture": (shows(rgb=(box(16, 16, 3, low=-1, high=1), 1.0)), ["is ignored", "but these are -1 to 1"]),
    "a flattened picture": (
        returns(lambda place: np.resize(place, 3072).astype(np.float32), box(3072)),
        ["'observation' [3072] float32 is read as 3072 numbers: is it a flattened image?"],
    ),
    "tensors with a leading 1": (odd.Tensors, ["'state' [1, 2] float32 is read as 2", "rgb (8 x 8"]),
    "one buffer for all": (odd.Aliasing, ["rgb (8 x 8"]),
    "actions that are written into": (odd.WritesIntoActions, ["observation.state [2]"]),
    "actions in a row": (odd.RowOfActions, ["Action [2]; -1 to 1"]),
    "named and half bounded actions": (
        odd.NamedActions,
        ["Action [2] (east, north); -1 to inf, 0.5 to 0.5 (not clipped: executed as given, also outside the bounds)"],
    ),
    "unbounded actions": (acts(spaces.Box(-np.inf, np.inf, (3,))), ["Action [3]; -inf to inf"]),
    "an array as reward": (pays(np.array([0.5])), ["Success"]),
    "an int as reward": (pays(1), ["Success"]),
    "ends as numpy truths": (ends(np.array([np.False_])), ["Success"]),
    "no info": (odd.NoInfo, ["not reported; define it with world.options.success or world.options.success_key"]),
    "a reset without options": (odd.NoOptions, ["Success: the environment reports success"]),
    "numbers beyond their bounds": (odd.BeyondItsBounds, ["observation.state [2]"]),
    "a time limit inside": (odd.EndsItself, ["6 per episode"]),
    "its own task": (odd.OwnTask, ["observation.state [2]"]),
    "its own task in every episode": (odd.TaskInInfo, ["observation.state [2]"]),
    "a task that is no text": (odd.TaskObject, ["observation.state [2]"]),
    "LeRobot's own keys": (
        odd.LeRobotsKeys,
        [
            "observation.state [2] (observation.state[0] to [1])",
            "observation.environment_state [2] (observation.environment_state[0] to [1])",
            "image (8 x 8, 'observation.image' of the observation), top (8 x 8, 'observation.images.top' of",
        ],
    ),
    "openpi's keys": (
        odd.Openpis,
        ["observation.state [2] (observation/state[0] to [1])", "image (8 x 8, 'observation/image' of", "top (8 x 8"],
    ),
    "more names than elements": (odd.NamedTooOften, ["element_names (3) are ignored", "action_names has 3 names"]),
    "a success that is never said": (odd.says({"success": None}), ["not reported"]),
    "two successes that differ": (
        odd.says({"is_success": False, "success": True}),
        ["is_success is used; to use the other, set world.options.success_key=success"],
    ),
    "goals of two sizes": (odd.GoalsOfTwoSizes, ["observation.environment_state [5]"]),
    "what cannot be closed": (odd.CannotBeClosed, ["RuntimeError: the window is gone (at "]),
}


@pytest.mark.parametrize("case", READ)
def test_check_says_how_an_odd_environment_is_read(case, checked):
    environment, texts = READ[case]
    lines = checked(environment, fps=10)
    for each in texts:
        assert each in lines, lines
    assert "[2304]" not in lines and "depth[0]" not in lines


REFUSED = {
    "discrete actions": (acts(spaces.Discrete(4)), {}, "action is an integer choice.*TransformAction"),
    "several discrete actions": (acts(spaces.MultiDiscrete([2, 3])), {}, "is an integer choice.*TransformAction"),
    "switches": (acts(spaces.MultiBinary(3)), {}, "is an integer choice.*TransformAction"),
    "a Box of integers": (acts(spaces.Box(0, 9, (2,), np.int64)), {}, "is an integer choice.*TransformAction"),
    "a tuple of actions": (acts(spaces.Tuple((odd.FREE, odd.FREE))), {}, "several parts.*unflatten"),
    "a dictionary of actions": (acts(spaces.Dict(arm=odd.FREE)), {}, "several parts.*unflatten"),
    "texts as actions": (acts(spaces.Text(5)), {}, "not a vector of numbers.*TransformAction"),
    "no actions": (acts(box(0)), {}, "is empty.*TransformAction"),
    "a picture alone": (odd.PictureAlone, {}, r"only image observations \(pixels\).*world.cameras=\[pixels\]"),
    "nothing to see": (
        returns(lambda place: {}, spaces.Dict()),
        {},
        r"The observation has no usable entry. It is Dict\(\)",
    ),
    "depth alone": (
        returns(lambda place: None, box(48, 48)),
        {},
        r"no usable entry.*\[48, 48\] float32 is ignored.*TransformObs",
    ),
    "a space of its own": (
        returns(lambda place: None, odd.Strange()),
        {},
        "no usable entry.*a Strange has no fixed size",
    ),
    "two entries of one name": (odd.OneName, {}, "the name 'a.b': rename one"),
    "no space": (returns(lambda place: None, None), {}, "declares no observation_space: set it"),
    "no actions declared": (acts(None), {}, "not a vector of numbers, None.*TransformAction"),
    "a text alone": (returns(lambda place: "", spaces.Text(9)), {}, "The observation has no usable entry.*It is Text"),
    "more numbers from time to time": (
        returns(lambda place: np.zeros(2 + int(place[0] > 0), np.float32)),
        {},
        r"declared \[2\], but is \[3\]",
    ),
    "an old reset": (
        odd.OldReset,
        {},
        r"reset takes no seed.*reset\(\*, seed, options\).*with gym's old interface",
    ),
    "what an old reset returns": (odd.OldReturn, {}, r"reset returned one value, \[2\] float32: .*old interface"),
    "an old step": (odd.OldStep, {}, "step returned 4 values: .*old interface"),
    "a wrong shape": (
        returns(lambda place: np.zeros(3, np.float32)),
        {},
        r"'observation' is declared \[2\], but is \[3\] float32: correct the environment's observation_space",
    ),
    "one number for many": (returns(lambda place: np.float32(1)), {}, r"declared \[2\], but is \[\] float32"),
    "texts for numbers": (returns(lambda place: "here"), {}, r"declared \[2\], but is a str"),
    "an entry which is missing": (
        returns(lambda place: {"pos": place}, spaces.Dict(pos=odd.FREE, vel=odd.FREE)),
        {},
        "no entry 'vel', which observation_space declares; it has: pos",
    ),
    "a list for a dictionary": (
        returns(lambda place: [1.0, 2.0], spaces.Dict(pos=odd.FREE)),
        {},
        "no entry 'pos', which observation_space declares; it is a list",
    ),
    "a choice that there is none of": (
        returns(lambda place: 7, spaces.Discrete(3)),
        {},
        r"declared \[3\], but is",
    ),
    "a picture of another size": (
        returns(lambda place: np.zeros((9, 8, 3), np.uint8), byte(8, 8, 3)),
        {"cameras": ("pixels",)},
        r"declared \[8, 8, 3\], but is \[9, 8, 3\] uint8",
    ),
    "a picture from 0 to 1 that is declared as bytes": (
        returns(lambda place: np.full((8, 8, 3), 0.4), byte(8, 8, 3)),
        {"cameras": ("pixels",)},
        "'observation' is declared 0 to 255, but its values range from 0.4 to 0.4: correct",
    ),
    "a picture of bytes that is declared 0 to 1": (
        returns(lambda place: np.full((8, 8, 3), 200.0), box(8, 8, 3, low=0, high=1)),
        {"cameras": ("pixels",)},
        "declared 0 to 1, but its values range from 200 to 200",
    ),
    "an infinite sensor": (odd.Infinite, {}, r"not finite in row\(s\) \[0, 1, 2, 3\]: force\[1\]"),
    "no reward": (
        pays(None),
        {},
        "reward 'reward' in row.* is not finite.*world.options.reward=package.module:function",
    ),
    "several rewards": (pays(np.zeros(3)), {}, "not a single number.*world.options.reward="),
    "a text as reward": (pays("good"), {}, "not a single number.*world.options.reward="),
    "an end that is no truth": (
        ends("soon"),
        {},
        "'terminated' of step is 'soon', which is not True or False: step must return",
    ),
    "a step that fails": (odd.Fails, {}, "failed in step: RuntimeError: the arm has no power .*odd_environments"),
    "a reset that fails": (odd.FailsAtFirst, {}, "failed in reset: FileNotFoundError: scene.xml"),
    "no rate": (odd.Rateless, {}, "set world.options.fps=NUMBER"),
    "two elements of one name": (odd.NamedTwice, {}, "element_names has 'x' twice"),
    "a text for names": (odd.NamedByAText, {}, "action_names is the text 'xy'"),
    "complex numbers": (returns(lambda place: place + 1j), {}, r"declared \[2\], but is \[2\] complex128"),
    "numbers in texts": (returns(lambda place: ["0.5", "1"]), {}, r"declared \[2\], but is a list"),
    "an info that is a list": (odd.says([{"success": True}]), {}, "info a dictionary"),
    "goals of two sizes": (odd.GoalsOfTwoSizes, {"reward": "progress"}, "of the same size"),
    "a reward function that fails": (
        Odd,
        {"reward": "odd_environments:fails_to_pay"},
        r"odd_environments:fails_to_pay' failed: KeyError: 'nothing' .*observation.state \[",
    ),
    "a camera that there is not": (odd.TwoOfOneName, {"cameras": ("rgb",)}, "no camera 'rgb'.*base_camera.rgb"),
    "a reset that ignores seeds": (odd.IgnoresSeeds, {}, "an initial state depends only on its seed"),
    "starts that are all alike": (odd.AlwaysAlike, {}, "draws new initial states each time"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_in_a_sentence_that_says_what_to_do(case, checked):
    environment, options, message = REFUSED[case]
    with pytest.raises((RobopolicyError, AssertionError), match=message) as refusal:
        checked(environment, **options)
    assert len(str(refusal.value)) < 700


def test_a_space_with_bounds_the_wrong_way_round_is_refused():
    class Reversed(Odd):
        action_space = spaces.Box(-1, 1, (2,))

    Reversed.action_space.low = np.array([2.0, -1.0], np.float32)
    with pytest.raises(RobopolicyError, match="lower bounds above its upper bounds"):
        made(Reversed)


@pytest.mark.parametrize(
    ("entry", "most"),
    [
        (byte(16, 16, 3), 255),
        (byte(16, 20), 255),
        (byte(3, 16, 16), 255),
        (byte(16, 16, 4), 255),
        (box(16, 16, 3, low=0, high=1), 1.0),
        (box(3, 16, 16, low=0, high=1, dtype=np.float64), 1.0),
        (box(16, 16, 1, low=0, high=1, dtype=np.float16), 1.0),
        (box(16, 16, 3, low=0, high=255), 255),
        (box(16, 16, 3, low=0, high=255, dtype=np.int64), 255),
        (box(1, 16, 16, 3, low=0, high=255, dtype=np.uint8), 255),
    ],
)
def test_a_picture_has_the_same_colours_however_it_comes(entry, most):
    world, step = played(shows(rgb=(entry, most)), cameras=("rgb",), rows=3)
    images = step.observation["observation.images.rgb"][:, -1]
    place = step.observation[STATE][:, -1, 0]
    assert images.shape[0] == 3 and images.shape[-1] == 3 and images.dtype == np.uint8
    assert np.abs(images[:, 0, 0, 0] - 255 * (0.5 + 0.4 * np.tanh(place))).max() <= 1.5
    assert np.array_equal(world.render(height=8, width=8)[:, 0, 0, 0], images[:, 0, 0, 0])  # it draws no other view


def test_two_pictures_of_one_name_are_two_cameras():
    _, step = played(odd.TwoOfOneName, cameras=("hand_camera.rgb", "base_camera.rgb"))
    shown = {key: value[0, -1] for key, value in step.observation.items() if "images" in key}
    assert {key: int(value.mean()) for key, value in shown.items()} == {
        "observation.images.hand_camera.rgb": 200,
        "observation.images.base_camera.rgb": 60,
    }
    assert step.observation[STATE].shape == (2, 1, 2)


def test_an_entry_called_default_does_not_hide_the_environments_own_view():
    cameras = ("default", "observation.default", "cam.default")
    _, step = played(lambda: odd.CalledDefault("rgb_array"), cameras=cameras, image_size=8)
    levels = {key[19:]: int(value.mean()) for key, value in step.observation.items() if "images" in key}
    assert levels == {"default": 222, "observation.default": 30, "cam.default": 60}


def test_choices_become_ones_and_zeros():
    _, step = played(odd.Choices)
    observation = step.observation[STATE][0, -1]
    names = quietly(odd.Choices).spec.observation[STATE].names
    by_name = dict(zip(names, observation.tolist(), strict=True))
    assert [by_name[f"robot.mode[{index}]"] for index in range(3)] == [0, 0, 1]
    assert [by_name[f"dials[{index}]"] for index in range(5)] == [0, 1, 0, 0, 1]
    assert [by_name[f"flags[{index}]"] for index in range(4)] == [0, 1, 1, 0]
    assert by_name["pair.0[0]"] == pytest.approx(by_name["robot.pos[0]"]) and by_name["pair.1[1]"] == 1


def test_what_is_left_out_can_be_taken_for_numbers():
    space = spaces.Dict(qpos=odd.FREE, cloud=box(50, 50))
    assert observation_layout(space).size == 2
    layout = observation_layout(space, ["cloud"])
    assert layout.size == 2502 and layout.fields[ENVIRONMENT_STATE] == slice(2500, 2502)


def test_rows_that_share_a_buffer_see_their_own():
    world, step = played(odd.Aliasing, cameras=("rgb",), rows=3)
    places = step.observation[STATE][:, -1, 0]
    assert len(set(places.tolist())) == 3
    images = step.observation["observation.images.rgb"][:, -1, 0, 0, 0]
    assert np.abs(images - 255 * (0.5 + 0.4 * np.tanh(places))).max() <= 1.5
    assert np.array_equal(world.render(height=8, width=8)[:, 0, 0, 0], images)


@pytest.mark.parametrize("value", [None, np.zeros(3), "good", float("nan")])
def test_a_reward_that_is_no_number_matters_only_where_it_is_paid(value):
    _, step = played(pays(value), reward="suite_toys:point_potential")
    assert np.isfinite(step.rewards["progress"]).all()


def test_the_task_is_what_the_environment_says_it_is():
    def tasks(environment, rows=4, **options):
        world = quietly(environment, rows, **options)
        return world.reset(seeds=range(rows))["task"].tolist(), world.spec.instructions

    assert tasks(odd.OwnTask) == (["go to the middle"] * 4, ("go to the middle",))
    instructions, known = tasks(odd.TaskInInfo, 30)
    assert set(instructions) == set(known) == {f"go to corner {corner}" for corner in range(4)}
    assert tasks(odd.NoNumbers)[1] == ("bring it to the middle",)
    assert tasks(odd.TaskObject)[1] == ("go",) and tasks(Odd)[1] == ("go",)
    assert tasks(odd.OwnTask, own_task=False) == (["go"] * 4, ("go",))
    world = make_world("odd_environments:OwnTask", 1)
    assert world.spec.instructions == ("go to the middle",)
    assert make_world("odd_environments:OwnTask", 1, instruction="do it").spec.instructions == ("do it",)
    gymnasium.register("OwnTask-v0", entry_point=odd.OwnTask, max_episode_steps=3)
    assert make_world("gymnasium:OwnTask-v0", 1).spec.instructions == ("go to the middle",)


def test_a_time_limit_inside_ends_an_episode_as_one():
    _, step = played(odd.EndsItself, steps=6)
    assert step.truncated.all() and not step.terminated.any() and step.valid.sum(1).tolist() == [3, 3]


def test_what_says_that_it_draws_and_takes_no_render_mode_is_made_without(tmp_path):
    assert isinstance(open_class("odd_environments:NoRenderMode", {}), odd.NoRenderMode)
    gymnasium.register("NoRenderMode-v0", entry_point=odd.NoRenderMode, max_episode_steps=3)
    assert make_world("gymnasium:NoRenderMode-v0", 1).spec.horizon == 3
    with pytest.raises(RobopolicyError, match=r"no time limit: set world.options.horizon=NUMBER.*max_episode_steps"):
        make_world("odd_environments:Endless", 1)
    with pytest.raises(RobopolicyError, match=r"could not be created.*OSError: no licence"):
        make_world("odd_environments:CannotBeMade", 1)


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        (None, "render.. returned a NoneType.*rgb_array"),
        ([np.zeros((8, 8, 3), np.uint8)], "render.. returned a list"),
        (np.zeros((8, 8, 3)), r"renders \[8, 8, 3\] float64: an image must be uint8"),
    ],
)
def test_a_view_that_is_no_picture_is_named(drawn, said):
    world = quietly(lambda: draws(drawn)("rgb_array"))
    world.reset(seeds=[0, 1])
    with pytest.raises(RobopolicyError, match=said):
        world.render()


def test_what_seeds_nothing_is_told_so_once_the_global_generators_are_seeded():
    with pytest.warns(RobopolicyWarning, match=r"world.options.seed_globals=true\."):
        made(odd.IgnoresSeeds)
    with pytest.warns(RobopolicyWarning, match=r"neither reset\(seed\) nor .*super\(\).reset\(seed=seed\)"):
        made(odd.IgnoresSeeds, seed_globals=True)


def test_an_environment_of_gym_is_named_as_one():
    base = type("Env", (), {"__module__": "gym.core"})
    with pytest.raises(RobopolicyError, match=r"Old is an environment of the old gym package, .*GymV21CompatibilityV0"):
        _is_environment(type("Old", (base,), {}))
    assert _is_environment(Odd) and not _is_environment(dict) and not _is_environment(len)


@pytest.mark.parametrize(("bound", "said"), [(np.finfo(np.float32).max, "no finite bounds"), (np.inf, "no finite bou")])
def test_the_largest_number_is_no_bound(bound, said):
    world = quietly(acts(spaces.Box(-bound, bound, (2,))))
    assert world.spec.action.low == (-np.inf, -np.inf) and world.spec.action.high == (np.inf, np.inf)
    with pytest.raises(RobopolicyError, match=said):
        NoisyController(StandsStill(), 0.1, 0, world.spec.action)


class StandsStill:
    def reset(self, rows=None):
        pass

    def act(self, observation):
        return np.full((2, 2), 0.5)


def test_noise_of_a_range_that_is_a_formality_is_noticed():
    def played(bound, steps=8):
        controller = NoisyController(StandsStill(), 0.1, 0, Field((2,), low=-bound, high=bound))
        for _ in range(steps):
            controller.act({})

    with pytest.warns(
        RobopolicyWarning, match=r"-1e\+06 to 1e\+06.*at most 5e-07 of it, so the noise is larger.*\(noise=\[none\]"
    ):
        played(1e6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        played(2.0)


@pytest.mark.parametrize("rate", [0, -5, float("nan"), "fast"])
def test_a_rate_that_is_none_is_asked_for(rate):
    with pytest.raises(RobopolicyError, match=r"above 0\) is unknown: set world.options.fps=NUMBER"):
        made(odd.rated(rate))
    assert quietly(odd.rated("30")).spec.fps == 30 and quietly(odd.rated(rate), fps=4).spec.fps == 4


WRONG_TYPES = {
    "horizon": [2.5, "12", True],
    "history": [1.5, "two"],
    "clip_actions": ["no", "maybe"],
    "terminate_on_success": ["off"],
    "fps": ["fast", float("nan"), -2.0],
    "workers": [-1, 1.5],
    "state_keys": ["qpos"],
    "reward_scale": [float("inf"), "ten"],
    "instruction": [3],
    "seed": ["abc"],
    "success_key": [True],
}


@pytest.mark.parametrize(("option", "value"), [(key, value) for key, values in WRONG_TYPES.items() for value in values])
def test_an_option_of_another_type_is_refused_by_name(option, value):
    with pytest.raises(RobopolicyError, match=rf"world.options.{option}\b"):
        make_world("odd_environments:Odd", 1, **{option: value})


def test_options_of_tasks_have_types_too():
    for option, value in {"terminate_on_success": "no", "threads": "abc", "style": 1.5, "history": "two"}.items():
        with pytest.raises(RobopolicyError, match=rf"world.options.{option} is {value!r}, which is not"):
            make_world("reach_planar", 1, **{option: value})
    with pytest.raises(RobopolicyError, match=r"env_options is 'abc', but must be a mapping: set its keys"):
        make_world("odd_environments:Odd", 1, env_options="abc")


def test_classes_of_wrappers_are_made_and_those_of_several_environments_named():
    assert make_world("odd_environments:Wrapped", 1).spec.horizon == 6
    with pytest.raises(RobopolicyError, match=r"Several steps several environments at once: .*world.batch_size=NUMBER"):
        make_world("odd_environments:Several", 1)
    with pytest.raises(RobopolicyError, match=r"horizon=0 \(set world.options.horizon=NUMBER\)"):
        made(Odd, horizon=0)


def test_a_camera_is_found_by_the_name_that_it_had_before():
    assert quietly(odd.Openpis, cameras=("observation_image",)).spec.observation["observation.images.observation_image"]


def test_an_unknown_id_says_what_to_do_first_and_lists_a_handful():
    with pytest.raises(RobopolicyError) as refusal:
        make_world("gymnasium:zzzzzz", 1)
    text = str(refusal.value)
    assert text.index("put that package first") < text.index("most similar") and len(text) < 350
