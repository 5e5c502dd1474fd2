"""A gymnasium environment that nobody registered: a ball on a plane rolls to a hole. No MuJoCo."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


class BallEnvironment(gymnasium.Env):
    """Velocity in, position out; success once the ball is in the hole."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "render_fps": 10}
    observation_space = spaces.Dict(
        {"agent_pos": spaces.Box(-2.0, 2.0, (2,)), "desired_goal": spaces.Box(-2.0, 2.0, (2,))}
    )
    action_space = spaces.Box(-1.0, 1.0, (2,))

    def __init__(self, hole: float = 0.1):
        self.hole = hole

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict[str, np.ndarray], dict]:
        """Place ball and hole."""
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1, 1, 2), self.np_random.uniform(-1, 1, 2)
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict]:
        """Roll for a tenth of a second."""
        before = np.linalg.norm(self.position - self.goal)
        self.position = np.clip(self.position + 0.15 * np.asarray(action), -2, 2)
        after = np.linalg.norm(self.position - self.goal)
        won = bool(after < self.hole)
        return self._observe(), float(before - after), won, False, {"is_success": won}

    def _observe(self) -> dict[str, np.ndarray]:
        return {"agent_pos": self.position.copy(), "desired_goal": self.goal.copy()}
