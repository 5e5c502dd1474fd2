"""Controllers by dotted path, and the one for FetchPush."""

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import Field, WorldSpec
from sims.controllers import load_controller
from sims.experts import NoisyController
from sims.registry import make_world

SPEC = WorldSpec("toy", {"observation.state": Field((2,))}, Field((2,), low=-1, high=1), fps=10, horizon=5)


class Still:
    def __init__(self, spec):
        self.spec = spec

    def reset(self, rows=None):
        pass

    def act(self, observation):
        return np.zeros((len(observation["observation.state"]), *self.spec.action.shape))


class OptionalSpec(Still):
    def __init__(self, speed=1.0, spec=None):
        super().__init__(spec)
        self.speed = speed


def still():
    return Still(SPEC)


class Stumbles(Still):
    def act(self, observation):
        return observation["observation.sate"]


def broken():
    raise ArithmeticError("no luck")


def needs_two(spec, other):
    return Still(spec)


def not_a_controller():
    return 3


class Decides:
    """A policy, as far as a controller's place can tell."""

    def reset(self, rows=None):
        pass

    def act(self, observation, generator, *, deterministic=False):
        raise NotImplementedError


number = 3


@pytest.mark.parametrize("name", ["Still", "OptionalSpec", "still"])
def test_classes_and_functions_with_or_without_the_spec_make_controllers(name):
    controller = load_controller(f"test_suite_controllers:{name}", SPEC)
    controller.reset()
    assert controller.inner.spec == SPEC
    assert controller.act({"observation.state": np.zeros((3, 1, 2))}).shape == (3, 2)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("test_suite_controllers.Still", "write package.module:name"),
        ("no_such_module:Still", "no module 'no_such_module'.*working directory"),
        ("test_suite_controllers:Stil", "Did you mean 'Still'"),
        ("test_suite_controllers:number", "class, or a function"),
        ("test_suite_controllers:needs_two", "needs the arguments spec, other"),
        ("test_suite_controllers:broken", "ArithmeticError: no luck"),
        ("test_suite_controllers:not_a_controller", "lacks reset and act"),
        ("test_suite_controllers:Decides", r"a policy.*needs generator.*controller.*act\(observation\)"),
    ],
)
def test_bad_paths_say_what_is_wrong(path, text):
    with pytest.raises(ConfigError, match=text):
        load_controller(path, SPEC)


def test_a_controller_that_raises_is_said_with_the_line_in_its_file():
    controller = load_controller("test_suite_controllers:Stumbles", SPEC)
    pattern = r"'test_suite_controllers:Stumbles': act raised KeyError: 'observation.sate' "
    pattern += r"\(.*test_suite_controllers.py, line \d+: return observation\[\"observation.sate\"\]\)"
    with pytest.raises(ConfigError, match=pattern):
        controller.act({"observation.state": np.zeros((3, 1, 2))})
    with pytest.raises(ConfigError, match=pattern):
        NoisyController(controller, 0.1, 0, SPEC.action).act({"observation.state": np.zeros((3, 1, 2))})


def test_a_module_in_the_working_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_own_controller.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    with pytest.raises(ConfigError, match=r"module 'my_own_controller' needs another module.*no_such_dependency"):
        load_controller("my_own_controller:Make", SPEC)


@pytest.mark.long
def test_the_fetch_push_controller_pushes_the_block_to_the_goal():
    pytest.importorskip("gymnasium_robotics")
    world = make_world("gymnasium:FetchPush-v4", 24)
    controller = load_controller("sims.suites.controllers.fetch_push:FetchPushController", world.spec)
    observation = world.reset(seeds=500 + np.arange(24))
    controller.reset()
    total = np.zeros(24)
    for _ in range(world.spec.horizon):
        step = world.step(controller.act(observation)[:, None])
        observation, total = step.observation, total + step.reward[:, 0]
        if step.ended.all():
            break
    assert step.success.mean() >= 0.9
    assert total.mean() > 1.5
    world.close()
