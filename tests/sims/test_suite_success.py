"""Who says that an episode has succeeded, and whether it can be repeated: asked before anything is measured."""

import warnings

import numpy as np
import pytest
from suite_toys import NestedGoals, PointEnvironment, SilentEnvironment

from robopolicy.core.errors import ConfigError, RobopolicyWarning, SpecError
from robopolicy.core.spec import STATE
from sims.suites.gymnasium_suite import GymnasiumWorld, make_gymnasium_world

SILENT = "suite_toys:SilentEnvironment"


def make(environment=SilentEnvironment, rows=2, **options):
    given = {"horizon": 6, "instruction": "go", "reward": "environment"} | options
    return GymnasiumWorld("toy", environment, rows, **given)


def walk(world, speed=1.0, steps=6):
    world.reset(seeds=range(world.batch_size))
    return world.step(np.full((world.batch_size, steps, 1), speed))


def test_a_world_knows_that_nobody_reports_success():
    assert not make().spec.reports_success
    assert make(PointEnvironment).spec.reports_success
    assert make(success="return >= 1").spec.reports_success


@pytest.mark.parametrize("workers", [0, 1])
def test_success_is_a_function_of_the_observation(workers):
    world = make(success="suite_toys:arrived", workers=workers)
    assert world.spec.success == "suite_toys:arrived"
    step = walk(world)
    assert step.success.all()
    assert step.valid.sum(1).tolist() == [2, 2]
    assert not walk(world, speed=0.1).success.any()
    world.close()


def test_success_is_a_threshold_on_the_return():
    world = make(success="return >= 2.5")
    step = walk(world)
    assert step.success.all()
    assert step.valid.sum(1).tolist() == [3, 3]
    assert walk(world, steps=2).success.tolist() == [False, False]
    assert walk(world, steps=3).success.tolist() == [True, True]  # the return began anew


@pytest.mark.parametrize("success", ["return > 2", "suite_toys:nothing", "nowhere"])
def test_a_success_that_is_none_is_refused(success):
    with pytest.raises(ConfigError):
        make(success=success)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("success", "said"), [("indexes_too_much", "IndexError.*toys.py"), ("says_two", r"\[1\]")])
def test_a_success_function_that_fails_is_named_not_the_environment(success, said, workers):
    world = make(success=f"suite_toys:{success}", workers=workers)
    with pytest.raises(SpecError, match=rf"suite_toys:{success} .*{said}") as failure:
        walk(world)
    assert "observation.state [1]" in str(failure.value)
    assert "environment itself" not in str(failure.value)
    world.close()


def test_an_environment_that_does_not_repeat_is_noticed_and_can_be_seeded():
    def unseeded():
        return SilentEnvironment(unseeded=True)

    with pytest.warns(RobopolicyWarning, match="same seed"):
        assert not make(unseeded).repeats
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world = make(unseeded, seed_globals=True)
        assert make().repeats
    first, again = (world.reset(seeds=[3, 4])[STATE].copy() for _ in range(2))
    assert np.array_equal(first, again)


def test_goals_in_dictionaries_are_summed_up():
    world = make(NestedGoals, reward="progress", reward_scale=1.0)
    step = walk(world, speed=0.1, steps=1)
    assert step.rewards["progress"] == pytest.approx(0.1 * np.sqrt(3), abs=1e-5)


def test_a_module_that_lacks_another_and_a_constructor_that_fails_are_told_apart(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "broken_there.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"needs another one.*not_installed_anywhere"):
        make_gymnasium_world("half_there:X-v0", 1)
    with pytest.raises(ConfigError, match="no licence"):
        make_gymnasium_world("broken_there:X-v0", 1)
    with pytest.raises(ConfigError, match="no module 'absent_there'"):
        make_gymnasium_world("absent_there:X-v0", 1)
    import gymnasium

    def fails(**options):
        raise AssertionError("spec is None\nand more")

    gymnasium.register("Fails-v0", entry_point=fails, max_episode_steps=3)
    with pytest.raises(ConfigError, match=r"could not be made.*AssertionError: spec is None and more"):
        make_gymnasium_world("Fails-v0", 1)
