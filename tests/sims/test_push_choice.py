"""Push-choice: the instruction decides, is drawn from the seed or asked for, and shows in `task` alone."""

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.spec import ENVIRONMENT_STATE, TASK
from sims.registry import load_task, make_world
from sims.tasks.push_choice import INSTRUCTIONS, PushChoiceExpert, instructed, potential, succeeded


def play(episodes, instruction=None, told=None):
    """Return success [E] and return [E] of an expert that is told `told(texts)` while `instruction` is in force."""
    world, expert = make_world("push_choice", episodes), PushChoiceExpert()
    options = None if instruction is None else {"task": np.full(episodes, instruction)}
    observation = world.reset(seeds=np.arange(episodes), options=options)
    returns = np.zeros(episodes)
    while True:
        heard = {**observation, TASK: told(observation[TASK])} if told else observation
        step = world.step(expert.act(heard)[:, None])
        observation = step.observation
        returns += step.reward.sum(axis=1)
        if step.ended.all():
            world.close()
            return step.success, returns


def test_the_expert_succeeds_and_earns_a_few_points():
    success, returns = play(200)
    assert success.mean() >= 0.95
    assert 1.0 < returns[success].mean() < 5.0


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_following_another_instruction_fails(shift):
    def other(texts):
        return np.array([INSTRUCTIONS[(INSTRUCTIONS.index(str(text)) + shift) % 4] for text in texts])

    assert play(100, told=other)[0].mean() <= 0.02


def test_doing_always_the_same_succeeds_in_a_quarter():
    success = [play(50, instruction, lambda texts: np.full(len(texts), INSTRUCTIONS[0]))[0] for instruction in range(4)]
    assert success[0].mean() >= 0.95
    assert not np.concatenate(success[1:]).any()


def test_the_instruction_is_drawn_from_the_seed_and_shows_in_the_task_alone():
    world = make_world("push_choice", 400)
    drawn = world.reset(seeds=np.arange(400))
    counts = [int((drawn[TASK] == text).sum()) for text in INSTRUCTIONS]
    assert min(counts) > 70
    starts = []
    for instruction in range(4):
        asked = world.reset(seeds=np.arange(400), options={"task": np.full(400, instruction)})
        assert set(asked[TASK]) == {INSTRUCTIONS[instruction]}
        starts.append({key: value for key, value in asked.items() if key != TASK})
    for key, value in starts[0].items():
        assert all(np.array_equal(value, other[key]) for other in starts[1:])
        assert np.array_equal(value, drawn[key])
    again = world.reset(seeds=np.arange(400), options={"task": np.full(400, -1)})
    assert np.array_equal(again[TASK], drawn[TASK])


def test_asking_for_what_there_is_not_is_refused():
    world = make_world("push_choice", 2)
    for task in ([0], [0, 4], [-2, 0], [0.0, 1.0]):
        with pytest.raises(SpecError, match="task"):
            world.reset(options={"task": np.array(task)})
    with pytest.raises(ConfigError, match="Did you mean 'task'"):
        world.reset(options={"tasks": np.array([0, 0])})


def test_success_and_progress_are_those_of_the_instructed_cube_and_goal():
    environment = np.zeros((4, 30))
    environment[:, 18:22] = [0.3, 0.4, 0.0, 0.5]
    environment[:, 22:30] = [0.02, 0.0, 0.1, 0.0, 0.0, 0.2, 0.0, 0.01]
    observation = {ENVIRONMENT_STATE: environment, TASK: np.array(INSTRUCTIONS)}
    assert succeeded(observation).tolist() == [True, False, False, True]
    assert np.allclose(potential(observation), [-1.2, -2.0, -3.0, -1.1])
    to_cube, _ = instructed(environment[:, None].repeat(3, axis=1), observation[TASK][:, None])
    assert np.allclose(np.linalg.norm(to_cube, axis=-1), 0.5)


def test_names_cover_the_vectors():
    task = load_task("push_choice")
    for field in task.observation.values():
        assert len(field.names) == len(set(field.names)) == field.size
