"""gym-aloha's environments with the poses of their objects, and with images only where someone asks for them.

This module runs inside worker processes, so neither it nor its imports load torch.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from robopolicy.core.errors import ConfigError, did_you_mean, require_extra


class AlohaStates(gymnasium.Wrapper):
    """An environment of gym-aloha that observes its arms and the poses of its objects.

    agent_pos: joints of both arms [14], rad, and grippers from 0 (closed) to 1 (open); environment_state: position and
    quaternion w, x, y, z of each object [7 or 14]. The package itself draws three images of 640 x 480 in every step, in
    which alone the objects are seen; here `painter` draws them, at any size, when they are needed. Targets far from the
    joints let the simulation diverge, which is an error there; here it ends the episode, which has failed.
    """

    state_keys = ("agent_pos",)

    def __init__(self, environment: gymnasium.Env):
        super().__init__(environment)
        inner: Any = environment.unwrapped
        task, physics = inner._env.task, inner._env.physics

        def states(of: Any) -> dict[str, np.ndarray]:
            return {"agent_pos": task.get_qpos(of), "environment_state": task.get_env_state(of)}

        task.get_observation = states
        inner._format_raw_obs = dict
        shapes = {name: value.shape for name, value in states(physics).items()}
        self.observation_space = spaces.Dict(
            {name: spaces.Box(-np.inf, np.inf, shape) for name, shape in shapes.items()}
        )
        self.painter = AlohaPainter(physics)
        self._diverged = require_extra("dm_control.rl.control", "aloha").PhysicsError
        self._seen: dict[str, np.ndarray] = {}

    def reset(self, **options: Any) -> tuple[dict, dict]:
        """Start an episode; options: `seed`."""
        self._seen, info = self.env.reset(**options)
        return self._seen, info

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        """Run a control step towards the joints and grippers in `action` [14]."""
        try:
            self._seen, reward, *ends, info = self.env.step(action)
        except self._diverged:
            return self._seen, 0.0, True, False, {"is_success": False}
        return self._seen, float(reward), ends[0], ends[1], info


class AlohaPainter:
    """Images of a scene, as dm_control draws them; "default" is the camera above the table, `top`."""

    def __init__(self, physics: Any):
        self._physics = physics
        self.names = ("default", *(physics.model.id2name(index, "camera") for index in range(physics.model.ncam)))

    def image(self, camera: str, height: int, width: int) -> np.ndarray:
        """Return uint8 [height, width, 3]; raises ConfigError on an unknown camera."""
        if camera not in self.names:
            raise ConfigError(f"ALOHA has no camera '{camera}'.{did_you_mean(camera, self.names)}")
        view = "top" if camera == "default" else camera
        return self._physics.render(height=height, width=width, camera_id=view)

    def close(self) -> None:
        """Free graphics and physics."""
        self._physics.free()
