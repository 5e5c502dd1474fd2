"""Elements of vector fields are found by their names, and only neighbours in order."""

import pytest

from robopolicy.core.errors import SpecError
from robopolicy.core.spec import ENVIRONMENT_STATE
from sims.registry import load_task
from sims.task import elements, vector_field


def test_elements_are_where_their_names_say():
    field = vector_field("x y turn z", "m")
    assert elements(field, "x y") == slice(0, 2)
    assert elements(field, "turn") == slice(2, 3)
    assert elements(field, "y turn z") == slice(1, 4)
    for wrong in ("y x", "x turn", "yaw", "", "z q"):
        with pytest.raises(SpecError, match="not adjacent"):
            elements(field, wrong)


@pytest.mark.parametrize("name", ["pick_place", "stack"])
def test_tasks_that_carry_a_cube_name_it_alike(name):
    from sims import grasping

    field = load_task(name).observation[ENVIRONMENT_STATE]
    assert field.names[: len(grasping.CUBE_NAMES.split())] == tuple(grasping.CUBE_NAMES.split())
    assert elements(field, "cube_to_goal_x cube_to_goal_y cube_to_goal_z") == grasping.TO_GOAL
