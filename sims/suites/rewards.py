"""Reward terms of external environments, vectorised: the environment's reward, or progress plus a bonus."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from robopolicy.core.errors import ConfigError, NonFiniteError, SpecError
from robopolicy.core.registry import load_dotted
from sims.suites.environment import GOAL_KEYS, Description
from sims.suites.success import place_of

ENVIRONMENT = "environment"
PROGRESS = "progress"
INCREASE = "increase"
Potential = Callable[[Mapping[str, np.ndarray]], np.ndarray]
"""Observation arrays [..., n] by key -> [...]."""


@dataclass(frozen=True)
class Reward:
    """Reward terms of a control step; dense: name of the per-step term.

    potential: the dense term is its increase (so idling or finishing has no penalty); None: the environment's own
    reward times `scale`. bonus: given once, when the episode first succeeds, as the term "success".
    """

    dense: str
    potential: Potential | None = None
    bonus: float = 0.0
    scale: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the terms."""
        return (self.dense, "success") if self.bonus else (self.dense,)

    def terms(
        self, own: np.ndarray, path: Mapping[str, np.ndarray], first: np.ndarray, valid: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return terms [B, C].

        own: the environment's [B, C]; path: observations [B, C + 1, n], starting with the one before the chunk, read
        when there is a potential; first: [B, C] steps of first success; valid: [B, C], the executed control steps;
        others have reward 0. Raises SpecError when the potential's shape is not [B, C + 1], NonFiniteError when a
        reward is NaN or infinite.
        """
        dense = self.scale * own
        if self.potential is not None:
            potential = np.asarray(self.potential(path), dtype=np.float64)
            if potential.shape != (own.shape[0], own.shape[1] + 1):
                raise SpecError(
                    f"The reward function returned shape {potential.shape} for observations [{own.shape[0]}, "
                    f"{own.shape[1] + 1}, n]: it must return one number per observation, [..., n] -> [...]."
                )
            dense = np.diff(potential, axis=1)
        dense = np.where(valid, dense, 0.0)
        if not np.isfinite(dense).all():
            bad_rows = np.flatnonzero(~np.isfinite(dense).all(axis=1))[:5].tolist()
            raise NonFiniteError(
                f"The reward '{self.dense}' in row(s) {bad_rows} is not finite: the environment (or your potential) "
                "returned NaN, infinity or not a single number. To compute rewards from observations instead, set "
                "world.options.reward=package.module:function."
            )
        terms = {self.dense: dense}
        if self.bonus:
            terms["success"] = np.where(first & valid, self.bonus, 0.0)
        return terms


def choose_reward(choice: str | Reward | None, scale: float, description: Description) -> Reward:
    """Return the reward selected by a configuration.

    "progress": decrease of the distance from achieved to desired goal times `scale`, plus 1 at success; needs an
    environment with goals. "environment": its own reward. "increase": the increase of its own reward, which the rows
    report instead, times `scale`, plus 1 at success. "package.module:function": a potential, called with a dictionary
    of observation arrays [..., n] and returning [...]; the reward is its increase times `scale`, plus 1 at success.
    None: "progress" when there are goals, else "environment". Raises ConfigError when the function cannot be imported
    or called, and on "progress" without goals.
    """
    if isinstance(choice, Reward):
        return choice
    if choice is None:
        choice = PROGRESS if description.is_goal_environment else ENVIRONMENT
    if choice == ENVIRONMENT:
        return Reward("reward")
    if choice == INCREASE:
        return Reward("progress", bonus=1.0, scale=scale)
    if choice == PROGRESS:
        return Reward("progress", goal_potential(description, scale), 1.0)
    function = load_dotted(choice, "Reward function")
    if not callable(function):
        raise ConfigError(f"Reward function '{choice}' is {function!r}, which cannot be called.")

    def potential(path: Mapping[str, np.ndarray]) -> np.ndarray:
        try:
            return scale * np.asarray(function(path), dtype=np.float64)
        except Exception as error:
            shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in path.items())
            raise SpecError(
                f"The reward function '{choice}' failed: {type(error).__name__}: {error} (at {place_of(error)}). It "
                f"is called with the observations of many steps, a dictionary of arrays: {shapes}."
            ) from error

    return Reward("progress", potential, 1.0)


def goal_potential(description: Description, scale: float) -> Potential:
    """Return minus the Euclidean distance between achieved and desired goal, times `scale`.

    The potential takes observation arrays [..., n] by key and returns [...]; the distance is in the goals' unit, for
    most environments m. Raises ConfigError when the environment has no goals.
    """
    if not description.is_goal_environment:
        raise ConfigError(
            "reward=progress needs observations with achieved_goal and desired_goal of the same size, which this "
            "environment lacks: use world.options.reward=environment, or a custom potential, "
            "world.options.reward=package.module:function."
        )
    achieved, desired = (_elements(description, goal) for goal in GOAL_KEYS)

    def potential(path: Mapping[str, np.ndarray]) -> np.ndarray:
        (key_a, columns_a), (key_d, columns_d) = achieved, desired
        difference = path[key_a][..., columns_a].astype(np.float64) - path[key_d][..., columns_d]
        return -scale * np.linalg.norm(difference, axis=-1)

    return potential


def _elements(description: Description, entry: str) -> tuple[str, np.ndarray]:
    """Return the field that contains an observation entry, and the entry's columns in it."""
    for key, names in description.layout.names.items():
        columns = np.flatnonzero([name.startswith((f"{entry}[", f"{entry}.")) for name in names])  # or nested
        if len(columns):
            return key, columns
    raise ConfigError(f"The observation has no entry '{entry}'.")
