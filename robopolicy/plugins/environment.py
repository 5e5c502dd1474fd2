"""`--env.type=robopolicy`: robopolicy's worlds as LeRobot environments."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
from lerobot.envs.configs import EnvConfig

from robopolicy.building.worlds import build_world
from robopolicy.configuration.sections.run import WorldSection
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.core.world import World
from robopolicy.plugins.features import ACTION, feature
from robopolicy.plugins.vector_environment import WorldVectorEnvironment, raw_key


@EnvConfig.register_subclass("robopolicy")
@dataclass
class RobopolicyEnv(EnvConfig):
    """A robopolicy world in LeRobot; all rows of a batch are simulated in parallel, in threads of this process.

    task: any name that world.name takes; cameras, image_size: what observations show (see `core.spec.image_sizes`);
    model: the checkpoint of a world model, for task=worldmodel; options: whatever else the world takes, as
    world.options does; seed: of starts that LeRobot does not seed. fps and features are the world's own. Raises
    ConfigError with the nearest name.
    """

    task: str | None = "push_t"
    cameras: list[str] = field(default_factory=list)
    image_size: int | list[int] | dict[str, list[int]] | None = None
    model: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        world = self._world(1)
        spec = world.spec
        world.close()
        self.fps = round(spec.fps)
        self.features = {ACTION: feature(ACTION, spec.action)}
        self.features_map = {ACTION: ACTION}
        for key, world_field in spec.observation.items():
            name = key if key.startswith(IMAGE_PREFIX) else raw_key(key)
            self.features[name], self.features_map[name] = feature(key, world_field), key

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """Empty: gymnasium does not create robopolicy's worlds."""
        return {}

    def create_envs(
        self, n_envs: int, use_async_envs: bool = False
    ) -> dict[str, dict[int, gymnasium.vector.VectorEnv]]:
        """Return {"robopolicy": {0: one world of `n_envs` rows}}, always in this process."""
        return {self.type: {0: WorldVectorEnvironment(self._world(n_envs))}}

    def _world(self, rows: int) -> World:
        section = WorldSection(
            name=self.task or "",
            batch_size=rows,
            cameras=tuple(self.cameras),
            image_size=self.image_size,
            model=self.model,
            options=self.options,
        )
        return build_world(section, seed=self.seed)
