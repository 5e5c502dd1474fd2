"""Every known suite through check, collect, train, evaluate and doctor, by its world's name alone."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest

from robopolicy.cli import main
from robopolicy.core.spec import STATE
from robopolicy.data.lerobot_reading import read_dataset

WORLDS = {
    "libero/libero_object:0": "libero",
    "libero/libero_10:5": "libero",
    "libero/libero_goal_swap:0": "libero",
    "pusht": "gym_pusht",
    "gymnasium:gym_pusht/PushT-v0": "gym_pusht",
    "robosuite/Lift": "robosuite",
    "robosuite/PickPlaceCan": "robosuite",
    "robosuite/NutAssemblySquare": "robosuite",
    "metaworld/push-v3": "metaworld",
    "metaworld/drawer-open-v3": "metaworld",
    "gymnasium:gym_aloha/AlohaInsertion-v0": "gym_aloha",
    "gymnasium:gym_aloha/AlohaTransferCube-v0": "gym_aloha",
    "ogbench/cube-single-v0": "ogbench",
    "ogbench/scene-v0": "ogbench",
    "gymnasium:gym_hil/PandaPickCube-v0": "gym_hil",
    "gymnasium:gym_hil/PandaArrangeBoxes-v0": "gym_hil",
    "gymnasium:lerobot_env_so101/SO101PickCube-v0": "lerobot_env_so101",
    "gymnasium:lerobot_env_so101/SO101PickPlace-v0": "lerobot_env_so101",
}
"""Names -> the module that they need."""
WITHOUT_EXPERT = ("gymnasium:",)
TINY = (
    "policy.width=16",
    "policy.depth=1",
    "policy.sampling_steps=1",
    "train.fit.steps=2",
    "train.evaluate_episodes=0",
)


def wander(spec):
    """Return a controller that draws each action from the middle tenth of its range."""
    return Wander(spec)


class Wander:
    def __init__(self, spec):
        self._low, self._high = np.array(spec.action.low), np.array(spec.action.high)
        self._generator = np.random.default_rng(0)

    def reset(self, rows=None):
        pass

    def act(self, observation):
        share = self._generator.uniform(0.45, 0.55, (len(observation[STATE]), len(self._low)))
        return self._low + share * (self._high - self._low)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("name", WORLDS)
def test_one_line_each(name, tmp_path):
    if find_spec(WORLDS[name]) is None:
        pytest.skip(f"{WORLDS[name]} is not installed")
    sys.modules.setdefault("test_suites_in_one_line", sys.modules[__name__])
    assert main(["check", name, "world.options.horizon=8"]) == 0

    world = [f"world.name={name}", "world.options.horizon=16", "world.batch_size=2", f"run.root={tmp_path}"]
    controller = ["collect.controller=test_suites_in_one_line:wander"] if name.startswith(WITHOUT_EXPERT) else []
    assert main(["collect", *world, *controller, "collect.episodes=4", "collect.noise=[none]"]) == 0
    (dataset,) = tmp_path.glob("collect/**/dataset")
    episodes = read_dataset(dataset)
    assert len(episodes) == 4 and episodes.success is not None
    assert all(episodes.tasks)

    assert main(["train", *world, *TINY]) == 0
    (checkpoint,) = tmp_path.glob("train/**/checkpoint")
    assert main(["evaluate", str(checkpoint), *world[1:], "evaluate.episodes=2", "evaluate.videos=0"]) == 0
    assert main(["doctor", str(dataset), f"doctor.policy={checkpoint}", *world[1:]]) in (0, 1)
