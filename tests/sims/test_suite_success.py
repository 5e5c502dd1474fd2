"""Who says that an episode has succeeded, and whether it can be repeated: asked before anything is measured."""

import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from suite_toys import NestedGoals, PaysEnvironment, PointEnvironment, SilentEnvironment

from robopolicy.core.errors import ConfigError, NonFiniteError, RobopolicyWarning, SpecError
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


@pytest.mark.parametrize(
    ("success", "met", "chunk", "workers"),
    [
        ("return >= -10", False, 1, 0),
        ("return >= -10", False, 7, 0),
        ("return >= -10", False, 30, 0),
        ("return >= -30", True, 1, 0),
        ("return>=-3e1", True, 7, 1),
        ("return >= -30", True, 30, 0),
    ],
)
def test_a_return_is_known_where_the_episode_ends_not_before_its_first_bad_step(success, met, chunk, workers):
    """Whoever stands still pays 1 a step for 30 steps: a return of -30, whatever the sum was on the way there."""
    world = make(PaysEnvironment, horizon=30, success=success, workers=workers)
    world.reset(seeds=[0, 1])
    for start in range(0, 30, chunk):
        step = world.step(np.zeros((2, chunk, 1)))
        assert step.success.tolist() == [met and start + chunk >= 30] * 2
    assert step.truncated.all() and not step.terminated.any()  # the limit ended it: success can end nothing early
    world.close()


@pytest.mark.parametrize("terminate", [True, False])
@pytest.mark.parametrize("ends", [{"ends": 6}, {"cut": 6}, {}])
def test_a_penalty_at_the_end_undoes_a_return_that_was_reached(ends, terminate):
    lost, won = (partial(PaysEnvironment, pay, **ends) for pay in ((2, 2, 2, 0, 0, -4), (-4, 0, 2, 2, 2, 4)))
    chosen = {"success": "return >= 5", "terminate_on_success": terminate}
    world = make(lost, **chosen)
    assert not walk(world, steps=5).success.any()
    assert not world.step(np.zeros((2, 1, 1))).success.any()
    step = walk(make(won, **chosen))
    assert step.success.all() and (step.terminated == ("ends" in ends)).all() and step.ended.all()


def test_a_return_begins_anew_with_its_episode_and_is_the_environments_own():
    world = make(partial(PaysEnvironment, (1,)), success="return >= 6", reward="increase")
    for steps, met in ((6, True), (5, False), (6, True)):
        assert (walk(world, steps=steps).success == met).all()
    step = walk(world)
    assert step.rewards["success"].tolist() == [[0, 0, 0, 0, 0, 1]] * 2
    assert not walk(make(partial(PaysEnvironment, (1,)), success="return >= 6.5")).success.any()


def test_where_the_sum_so_far_is_meant_that_is_said():
    step = walk(make(success="return so far >= 2.5"))
    assert step.success.all() and step.terminated.all()
    assert step.valid.sum(1).tolist() == [3, 3]
    assert walk(make(partial(PaysEnvironment, (3, -9)), success="return so far >= 2.5")).valid.sum(1).tolist() == [1, 1]


@pytest.mark.parametrize(("ends", "met"), [({"ends": 4}, True), ({"cut": 4}, False), ({"ends": 9}, False)])
def test_success_can_be_that_the_environment_ends_the_episode(ends, met):
    world = make(partial(PaysEnvironment, **ends), success="terminated")
    assert world.spec.reports_success and "terminate" in world.spec.success
    step = walk(world)
    assert (step.success == met).all() and (step.terminated == met).all()


def says(key, value):
    return lambda count, over: {key: value} if over else {}


def test_success_that_is_said_only_where_it_happens_is_false_elsewhere_with_one_note():
    def only_good(count, over):
        return {"is_success": True} if count == 4 else {}

    won, lost = (
        partial(PaysEnvironment, says=only_good),
        partial(PaysEnvironment, says=lambda count, over: {"other": 1}),
    )
    assert walk(make(won, success_key="is_success")).success.all()
    world = make(lost, success_key="is_success")
    with pytest.warns(RobopolicyWarning, match=r"without 'is_success'.*other.*counts as failure") as notes:
        for _ in range(3):
            step = walk(world)
    assert len(notes) == 1 and not step.success.any() and step.truncated.all()


def test_an_environment_that_turns_out_to_say_success_is_noticed():
    world = make(partial(PaysEnvironment, says=says("is_success", True)), horizon=6)
    assert not world.spec.reports_success
    with pytest.warns(RobopolicyWarning, match="world.options.success_key=is_success"):
        walk(make(partial(PaysEnvironment, says=says("is_success", True), cut=6)))


@pytest.mark.parametrize(
    "value", [True, np.True_, 1, 1.0, np.array([True]), np.float32(1), torch.tensor(True), torch.tensor([1.0])]
)
def test_success_may_be_any_truth(value):
    environment = partial(PaysEnvironment, cut=5, says=says("won", value))
    assert walk(make(environment, success_key="won")).success.all()
    nested = partial(PaysEnvironment, cut=5, says=says("final", {"won": value}))
    assert walk(make(nested, success_key="final.won")).success.all()


@pytest.mark.parametrize("value", ["False", "yes", 0.3, 2, float("nan"), np.array([True, False]), {"won": True}, []])
def test_success_that_is_no_truth_is_refused(value):
    world = make(partial(PaysEnvironment, cut=5, says=says("is_success", value)), success_key="is_success")
    with pytest.raises(SpecError, match=r"info\['is_success'\] is .*True or False.*world.options.success"):
        walk(world)


@pytest.mark.parametrize("reward", ["environment", "suite_toys:point_potential"])
def test_a_return_of_rewards_that_are_no_numbers_is_no_return(reward):
    world = make(partial(PaysEnvironment, (1, float("nan"), 1)), success="return >= 1", reward=reward)
    with pytest.raises(NonFiniteError, match=r"reward"):
        walk(world)


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


def test_rows_that_draw_from_global_generators_do_not_draw_from_one_another():
    class Slips(SilentEnvironment):
        def step(self, action):
            slipped = np.random.normal() + random.random()  # noqa: NPY002
            return super().step(action + np.float32(slipped))

    def places(seeds):
        world = make(Slips, rows=len(seeds), seed_globals=True)
        world.reset(seeds=seeds)
        return world.step(np.zeros((len(seeds), 4, 1))).trace[STATE][..., 0]

    state = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    together = places([3, 4, 5])
    for row, seed in enumerate((3, 4, 5)):
        np.testing.assert_array_equal(places([seed])[0], together[row])
    assert len(np.unique(np.diff(together, axis=1))) == together[:, 1:].size
    assert random.getstate() == state[0] and np.array_equal(np.random.get_state()[1], state[1])  # noqa: NPY002


def test_goals_in_dictionaries_are_summed_up():
    world = make(NestedGoals, reward="progress", reward_scale=1.0)
    step = walk(world, speed=0.1, steps=1)
    assert step.rewards["progress"] == pytest.approx(0.1 * np.sqrt(3), abs=1e-5)


def test_a_module_that_lacks_another_and_a_constructor_that_fails_are_told_apart(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "broken_there.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"needs another module.*not_installed_anywhere"):
        make_gymnasium_world("half_there:X-v0", 1)
    with pytest.raises(ConfigError, match="no licence"):
        make_gymnasium_world("broken_there:X-v0", 1)
    with pytest.raises(ConfigError, match="no module 'absent_there'"):
        make_gymnasium_world("absent_there:X-v0", 1)
    import gymnasium

    def fails(**options):
        raise AssertionError("spec is None\nand more")

    gymnasium.register("Fails-v0", entry_point=fails, max_episode_steps=3)
    with pytest.raises(ConfigError, match=r"could not be created.*AssertionError: spec is None and more"):
        make_gymnasium_world("Fails-v0", 1)
