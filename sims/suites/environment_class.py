"""A class derived from gymnasium.Env as a world, whether registered with gymnasium or not.

This module runs inside worker processes, so neither it nor its imports load torch before a world is created.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import gymnasium

from robopolicy.core.errors import ConfigError
from robopolicy.core.registry import load_dotted
from robopolicy.core.world import World
from sims.suites.environment import takes_render_mode


def make_environment_world(
    name: str,
    kind: type[gymnasium.Env],
    batch_size: int,
    *,
    horizon: int | None = None,
    instruction: str | None = None,
    env_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> World:
    """Build a world called `name` of `batch_size` environments of class `kind`.

    horizon: control steps until the time limit, default the class's `max_episode_steps`; instruction: default the task
    that the environment reports, or the words of the class's name; env_options: its keyword arguments; options: of
    `GymnasiumWorld`. Raises ConfigError.
    """
    from sims.suites.gymnasium_suite import GymnasiumWorld, check_options, words

    check_options(options, make_environment_world)
    limit = horizon if horizon is not None else getattr(kind, "max_episode_steps", None)
    if limit is None:
        raise ConfigError(
            f"'{name}' has no time limit: set world.options.horizon=NUMBER of control steps (in Python: "
            "horizon=NUMBER), or add an attribute max_episode_steps to the class."
        )
    return GymnasiumWorld(
        name,
        partial(open_class, f"{kind.__module__}:{kind.__qualname__}", dict(env_options or {})),
        batch_size,
        horizon=limit,
        instruction=words(kind.__name__) if instruction is None else instruction,
        **{"own_task": instruction is None, **options},
    )


def open_class(path: str, env_options: Mapping[str, Any]) -> gymnasium.Env:
    """Create one environment of the class at an import path; raises ConfigError when its constructor fails."""
    kind = load_dotted(path, "Environment")
    metadata = getattr(kind, "metadata", None)  # a property of wrappers, which their objects alone can say
    modes = metadata.get("render_modes", ()) if isinstance(metadata, Mapping) else ()
    images = {"render_mode": "rgb_array"} if "rgb_array" in modes and takes_render_mode(kind) else {}
    try:
        return kind(**{**images, **env_options})
    except Exception as error:
        raise ConfigError(
            f"'{path}' could not be created with the options {dict(env_options)}: {type(error).__name__}: {error}"
        ) from error
