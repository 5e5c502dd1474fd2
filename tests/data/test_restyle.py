"""Another look, the same motion: images change, states do not, and other worlds' episodes are refused."""

from dataclasses import replace

import numpy as np
import pytest

from robopolicy.core.errors import DataError
from robopolicy.core.spec import STATE
from robopolicy.data.record import record
from robopolicy.data.restyle import restyled
from sims.registry import load_task, make_world

IMAGE = "observation.images.top"


def look(style, rows=3):
    return make_world("push_cube", rows, cameras=("top",), image_size=32, threads=1, style=style)


@pytest.fixture(scope="module")
def episodes():
    world = look(0)
    return record(world, load_task("push_cube").expert(), np.arange(5))


@pytest.mark.long
@pytest.mark.checks("Sword")
def test_only_the_look_changes(episodes):
    again = restyled(look(0), episodes)
    assert np.array_equal(again.observation[IMAGE], episodes.observation[IMAGE])
    first, second = (restyled(look(style, rows), episodes) for style, rows in ((1, 3), (2, 2)))
    for other in (first, second):
        assert np.array_equal(other.observation[STATE], episodes.observation[STATE])
        change = (other.observation[IMAGE].float() - episodes.observation[IMAGE].float()).abs().mean()
        assert float(change) > 5
    assert not np.array_equal(first.observation[IMAGE], second.observation[IMAGE])
    repeated = restyled(look(1, 5), episodes)
    assert np.array_equal(repeated.observation[IMAGE], first.observation[IMAGE])


def test_physics_is_the_same_in_every_style():
    worlds = [make_world("push_cube", 2, threads=1, style=style) for style in (0, 7)]
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 10, 2))
    states = []
    for world in worlds:
        world.reset(seeds=[1, 2])
        states.append(world.step(actions).observation[STATE])
    assert np.array_equal(*states)


def test_what_cannot_be_filmed_again_is_refused(episodes):
    with pytest.raises(DataError, match="seeds"):
        restyled(look(1), replace(episodes, seeds=None))
    with pytest.raises(DataError, match="cameras"):
        restyled(make_world("push_cube", 3, threads=1), episodes)
    with pytest.raises(DataError, match="another world"):
        restyled(look(1), replace(episodes, seeds=episodes.seeds + 1))
