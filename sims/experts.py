"""Demonstrations of several quality levels: a scripted expert with a specified amount of noise on its actions."""

import warnings
from dataclasses import dataclass

import numpy as np

from robopolicy.core.errors import ConfigError, RobopolicyWarning, did_you_mean
from robopolicy.core.randomness import derive_keys, uniforms
from robopolicy.core.spec import Field, Observation
from robopolicy.core.world import Controller, Rows, begin_episodes


@dataclass(frozen=True)
class Noise:
    """Action noise of an expert.

    gaussian: standard deviation of white noise on every action, as a fraction of half the action range; random:
    fraction of control steps in spells of one uniformly random action; hold: control steps per spell. Raises
    ConfigError when one of them is out of range.
    """

    gaussian: float = 0.0
    random: float = 0.0
    hold: int = 5

    def __post_init__(self) -> None:
        if not 0 <= self.gaussian < np.inf or not 0 <= self.random < 1 or self.hold < 1:
            raise ConfigError(f"Noise needs gaussian >= 0, 0 <= random < 1 and hold >= 1, but got {self}.")


NOISE_LEVELS: dict[str, Noise] = {
    "none": Noise(),
    "low": Noise(gaussian=0.15),
    "medium": Noise(gaussian=0.3, random=0.3),
    "high": Noise(gaussian=0.5, random=0.7),
    "random": Noise(gaussian=0.5, random=0.98),
}
"""Levels by name, from the pure expert down to nearly random behaviour."""


COMPARED, SMALL = 5, 0.01
"""Number of control steps after which a controller's actions are compared with their range, and the fraction considered
small.
"""


def noise_level(name: str) -> Noise:
    """Return one of NOISE_LEVELS by name. Raises ConfigError on an unknown name."""
    if name not in NOISE_LEVELS:
        raise ConfigError(f"There is no noise level '{name}'.{did_you_mean(name, NOISE_LEVELS)}")
    return NOISE_LEVELS[name]


class NoisyController:
    """A controller with `noise` (a Noise, or the gaussian level alone) added to its actions, within their range.

    action_field: the world's action, whose bounds must be finite when there is noise; seed: seed of the noise. Noise
    depends on the episode's seed (passed to `begin`) and its control step, not on the row or its neighbours; before
    `begin`, it depends on the row. Raises ConfigError when a bound is infinite.
    """

    def __init__(self, controller: Controller, noise: Noise | float, seed: int, action_field: Field):
        self._controller = controller
        self._noise = noise if isinstance(noise, Noise) else Noise(gaussian=float(noise))
        self._low = np.broadcast_to(np.asarray(action_field.low, dtype=np.float64), action_field.shape)
        self._high = np.broadcast_to(np.asarray(action_field.high, dtype=np.float64), action_field.shape)
        self._disturbs = self._noise.gaussian > 0 or self._noise.random > 0
        if self._disturbs and not (np.isfinite(self._low).all() and np.isfinite(self._high).all()):
            raise ConfigError(
                "Noise is scaled by the action range, and this action has no finite bounds: set low and high, or "
                "disable noise, noise=[none]."
            )
        self._seed = seed
        self._acted = 0
        self._largest = np.zeros(action_field.shape)
        self._held = np.zeros((0, *action_field.shape))
        self._episodes = self._step = self._spell = np.zeros(0, dtype=np.int64)

    def reset(self, rows: Rows = None) -> None:
        """End the noise spells of `rows` [R], None for all, and reset the wrapped controller."""
        self._controller.reset(rows)
        if len(self._spell):
            self._spell[slice(None) if rows is None else np.asarray(rows)] = 0

    def begin(self, seeds: np.ndarray, rows: Rows = None) -> None:
        """Start the noise of episodes with `seeds` [R] in `rows` [R], None for all, at their first control step."""
        begin_episodes(self._controller, seeds, rows)
        if rows is None:
            self._start(len(seeds))
        index = slice(None) if rows is None else np.asarray(rows)
        self._episodes[index], self._step[index] = seeds, 0

    def _start(self, rows: int) -> None:
        """Allocate this number of rows, each with its index as episode seed."""
        self._episodes = np.arange(rows)
        self._step = np.zeros(rows, np.int64)
        self._spell = np.zeros(rows, np.int64)
        self._held = np.zeros((rows, *self._held.shape[1:]))

    def _compare(self, actions: np.ndarray) -> None:
        """Warn once when the action range, which scales the noise, is much larger than the actions [B, A]."""
        middle, half = 0.5 * (self._low + self._high), 0.5 * (self._high - self._low)
        self._largest = np.maximum(self._largest, np.abs(actions - middle).max(0))
        self._acted += 1
        if self._acted == COMPARED and self._largest.any() and (self._largest < SMALL * half).all():
            warnings.warn(
                f"Noise is scaled by the action range, {self._low.min():g} to {self._high.max():g}, but the "
                f"controller uses at most {float((self._largest / half).max()):.2g} of it, so the noise is larger "
                "than its actions. If these bounds are not the true ones, disable noise (noise=[none]) or declare "
                "the true bounds.",
                RobopolicyWarning,
                stacklevel=3,
            )

    def act(self, observation: Observation) -> np.ndarray:
        """Return noisy actions [B, A] for an observation [B, H, ...], in the world's units."""
        from scipy.special import ndtri  # half a second to import: who disturbs an expert, pays

        actions = self._controller.act(observation)
        if not self._disturbs:
            return np.asarray(actions, dtype=np.float64)
        self._compare(actions)
        noise, size = self._noise, int(np.prod(actions.shape[1:]))
        if len(self._spell) != len(actions):
            self._start(len(actions))
        draws = uniforms(derive_keys(self._seed, self._episodes, self._step), 2 * size + 1)
        self._step += 1
        chances, random = draws[:, 0], draws[:, 1 : size + 1].reshape(actions.shape)
        normal = ndtri(np.maximum(draws[:, size + 1 :], 2.0**-54)).reshape(actions.shape)
        noisy = actions + noise.gaussian * 0.5 * (self._high - self._low) * normal
        random_actions = self._low + (self._high - self._low) * random
        # A free row starts a spell with the chance that makes `random` the long-run share of steps in spells.
        chance = noise.random / (noise.random + noise.hold * (1.0 - noise.random))
        begin = (self._spell == 0) & (chances < chance)
        self._held = np.where(begin[:, None], random_actions, self._held)
        self._spell = np.where(begin, noise.hold, self._spell)
        noisy = np.where(self._spell[:, None] > 0, self._held, noisy)
        self._spell = np.maximum(self._spell - 1, 0)
        # Noise stays within the bounds; a controller that goes beyond them knows why.
        return np.clip(noisy, np.minimum(self._low, actions), np.maximum(self._high, actions))
