"""Images: sharp, shadow-free, showing the goal; asked for by row, camera and size."""

import os
import subprocess
import sys

import numpy as np
import pytest

from sims.registry import make_world


@pytest.mark.parametrize("name", ["push_cube", "push_t", "reach_planar"])
def test_images_show_the_scene_from_each_camera(name):
    world = make_world(name, 2)
    world.reset(seeds=[0, 1])
    top, front = world.render(camera="top"), world.render(camera="front")
    for image in (top, front):
        assert image.shape == (2, 240, 240, 3)
        assert image.std() > 10
    assert not np.array_equal(top[0], top[1])
    assert not np.array_equal(top[0], front[0])
    assert np.array_equal(world.render(), top)
    world.close()


def test_the_goal_can_be_seen():
    world = make_world("push_cube", 1)
    world.reset(seeds=[0])
    before = world.render()
    moved = world.snapshot()
    moved.arrays["goal"][:] += 0.1
    world.restore(moved)
    assert not np.array_equal(before, world.render())
    world.close()


def test_rendering_changes_nothing_and_a_closed_world_can_be_reopened_by_size():
    world, twin = make_world("push_cube", 2), make_world("push_cube", 2)
    for one in (world, twin):
        one.reset(seeds=[3, 4])
    world.render(height=33, width=65)
    actions = np.ones((2, 4, 2))
    first, second = world.step(actions), twin.step(actions)
    assert np.array_equal(first.observation["observation.state"], second.observation["observation.state"])
    world.close()
    twin.close()


@pytest.mark.long
def test_a_program_that_forgets_to_close_its_world_ends_without_noise():
    program = (
        "from sims.registry import make_world\n"
        "world = make_world('push_cube', 1)\n"
        "world.reset()\n"
        "print(world.render(height=24, width=24).shape)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "(1, 24, 24, 3)"
    assert result.stderr == ""


@pytest.mark.parametrize(("chosen", "said"), [("bogus", "invalid value"), ("osmesa", "NoneType")])
def test_graphics_that_there_are_not_end_in_a_sentence(chosen, said):
    """MuJoCo fails as it is imported, in a way of its own for every library."""
    code = f"""if True:
        import os
        from ctypes.util import find_library
        from robopolicy.core.errors import ConfigError
        from sims.registry import make_world
        if find_library("OSMesa"):
            raise SystemExit("MUJOCO_GL={chosen}: {said}")
        make_world("push_cube", 1)
        """
    environment = {**os.environ, "MUJOCO_GL": chosen}
    environment.pop("PYOPENGL_PLATFORM", None)  # which MuJoCo sets where it has rendered in this process
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert f"MUJOCO_GL={chosen}: " in last and said in last
