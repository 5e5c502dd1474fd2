"""World in which a formula of signal temporal logic is to be fulfilled, sub-goal by sub-goal at scheduled times.

world.options.stl="F[1,3](x > 1) & F[3,6](x < 0)" replaces a world's rewards and success. Every episode has a schedule,
which gives each sub-goal of the formula its time (`core.subgoals`). `observation.schedule` is added: the sub-goal that
is pursued (one-hot; the last entry: none is left), the time until it is due, and for every sub-goal whether it is still
open and the time until it is due, as fractions of the episode. A policy that reads it is conditioned on time.

Rewards of a control step: `approach`, the decrease of the pursued sub-goal's distance max(0, -margin); `violations`,
minus VIOLATION for every violated invariant; `goals`, 1 for a sub-goal that is met when it is due; one that is not ends
the episode and costs 1. Success: all sub-goals of a branch met at their times and no invariant violated, which implies
the formula. Schedules are drawn uniformly, or, once a value function is known (`choose_by`), mostly by
Metropolis-Hastings while learning, and as the best of CANDIDATES while being judged. Source: TGPO, arXiv:2510.00225,
whose dense rewards by stage these are after. Axes: B row, R selected rows, C chunk step, M sub-goal, I invariant.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.history import initial_window, shift_window
from robopolicy.core.randomness import numpy_generator, uniforms
from robopolicy.core.schedules import best_schedules, draw_schedules, numbers_needed, sample_by_value
from robopolicy.core.spec import IMAGE_PREFIX, Field, Observation
from robopolicy.core.subgoals import START, plan_of
from robopolicy.core.temporal import Specification
from robopolicy.core.world import Rows, Step, World
from robopolicy.core.wrapped_world import WrappedWorld, step_by_step

FORMULA_OPTION, SCHEDULES_OPTION = "stl", "schedules"
"""Names of the options of a world."""
SCHEDULE = "observation.schedule"
"""Key of the sub-goals and their times, [3 M + 2]."""
REWARDS = "approach", "goals", "violations"
VIOLATION = 0.1
UNIFORM_SHARE = 0.2
"""Fraction of learning episodes whose schedule stays uniform."""
CANDIDATES = 64
"""Schedules of which the best by value is taken while being judged."""
KINDS = "critic", "uniform"
"""Who chooses schedules: the critic that is being trained, or nobody; or the folder of a saved critic."""

Values = Callable[[Observation], Array]
"""Values [N] of observations [N, H, ...]."""


@runtime_checkable
class SchedulesByValue(Protocol):
    """A world whose episodes begin with a schedule that a value function chooses, if `by_value`."""

    by_value: bool

    def choose_by(self, value: Values, *, best: bool) -> None:
        """Choose schedules by `value` from now on: the best of several, or samples for learning."""
        ...


def without_schedules(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a world's options without those of schedules; with a formula, success does not end the world's own
    episodes.
    """
    rest = {name: value for name, value in options.items() if name not in (FORMULA_OPTION, SCHEDULES_OPTION)}
    return {**rest, "terminate_on_success": False} if options.get(FORMULA_OPTION) else rest


def with_schedules_of(options: Mapping[str, Any], world: World) -> World:
    """Return `world` with the formula of its options to be fulfilled; the world itself without one.

    Raises ConfigError for a formula without a plan, schedules without a formula or of an unknown kind, and a world with
    cameras.
    """
    text = options.get(FORMULA_OPTION)
    if not text and SCHEDULES_OPTION not in options:
        return world
    try:
        if not text:
            raise ConfigError(f"{SCHEDULES_OPTION} are those of a formula: set world.options.{FORMULA_OPTION}.")
        kind = options.get(SCHEDULES_OPTION, KINDS[0])
        if kind not in KINDS and not Path(str(kind)).is_dir():
            raise ConfigError(f"{SCHEDULES_OPTION}={kind!r} must be {', '.join(KINDS)} or the folder of a critic.")
        if any(key.startswith(IMAGE_PREFIX) for key in world.spec.observation):
            raise ConfigError(f"{FORMULA_OPTION} needs observations that are vectors: set world.cameras=[].")
        return ScheduledWorld(world, str(text), by_value=kind != "uniform")
    except BaseException:
        world.close()
        raise


class ScheduledWorld(WrappedWorld):
    """A `World` that asks for a formula; create it with `with_schedules_of`.

    text: the formula; by_value: whether `choose_by` has an effect; seed: of the episodes' seeds when `reset` is given
    none.
    """

    def __init__(self, world: World, text: str, *, by_value: bool = True, seed: int = 0):
        spec = world.spec
        self.specification = Specification(text, spec.observation, spec.fps)
        self.plan = plan_of(self.specification, spec.horizon)
        goals, rows = len(self.plan.goals), world.batch_size
        names = [f"pursues_{place}" for place in range(goals)] + ["done", "due"]
        names += [f"open_{place}" for place in range(goals)] + [f"due_{place}" for place in range(goals)]
        fields = {**spec.observation, SCHEDULE: Field((3 * goals + 2,), names=tuple(names))}
        own_spec = replace(
            spec, observation=fields, rewards=REWARDS, success=f"It fulfils {text}.", reports_success=True
        )
        super().__init__(world, replace(own_spec, terminate_on_success=True))
        self._random = numpy_generator(seed, "schedules")
        self.by_value = by_value
        self._value: Values | None = None
        self._best = False
        self.times = np.zeros((rows, goals), np.int64)
        self._clock = np.zeros(rows, np.int64)
        self._met = np.zeros((rows, goals), bool)
        self._violated = np.zeros(rows, bool)
        self._over = np.zeros(rows, bool)
        self._won = np.zeros(rows, bool)
        self._distance = np.zeros((rows, goals))
        self._window = np.zeros((rows, spec.history, 3 * goals + 2), np.float32)

    def choose_by(self, value: Values, *, best: bool) -> None:
        """Implement `SchedulesByValue.choose_by`."""
        if self.by_value:
            self._value, self._best = value, best

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | Array | None = None, options: Mapping[str, Any] | None = None
    ) -> Observation:
        """Start new episodes in `rows` [R], one seed each; see `World.reset`."""
        index = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        seeds = self._random.integers(2**50, size=len(index)) if seeds is None else np.asarray(seeds)
        observation = self.world.reset(rows, seeds, options)
        for flags in (self._met, self._violated, self._over, self._won, self._clock):
            flags[index] = 0
        self.times[index] = self._scheduled(observation, index, seeds)
        first = {key: np.asarray(observation[key])[:, -1:] for key in self.world.spec.observation}
        self._distance[index] = self._far(first)[index]
        self._violated[index] = self._violations(first)[index] > 0
        self._window[index] = initial_window(self._frame()[index, None], self.spec.history)
        return self._seen(observation)

    def step(self, actions: Array) -> Step:
        """Execute a chunk [B, C, A]; raises as the world does."""
        return step_by_step(self, actions, self._control)

    def _control(self, action: Array) -> Step:
        """Execute one control step [B, 1, A]."""
        step = self.world.step(action)
        runs = step.valid[:, 0] & ~self._over
        self._clock += runs
        frames = {key: step.trace[key] for key in self.world.spec.observation}
        far = self._far(frames)
        # One more column: nothing is approached where no sub-goal is left.
        nearer = np.pad(self._distance - far, ((0, 0), (0, 1)))
        approach = nearer[np.arange(self.batch_size), _first_due(self.times, self._met)]
        violations = self._violations(frames)
        due = (self.times == self._clock[:, None]) & ~self._met & runs[:, None]
        reached = due & (far <= 0)
        missed = (due & ~reached).any(axis=1)
        self._met |= reached
        self._distance = np.where(runs[:, None], far, self._distance)
        self._violated |= runs & (violations > 0)
        last = np.maximum(self.times.max(axis=1), self.plan.spans(self.times)[1].max(axis=1, initial=0))
        finished = runs & ~missed & (self._clock >= last)
        self._won |= finished & ~self._violated
        self._over |= runs & (missed | finished | step.ended)
        self._window = shift_window(self._window, self._frame()[:, None], runs.astype(int))
        rewards = {
            "approach": approach,
            "goals": reached.sum(axis=1) - 1.0 * missed,
            "violations": -VIOLATION * violations,
        }
        return replace(
            step,
            observation=self._seen(step.observation),
            trace={**step.trace, SCHEDULE: self._window[:, -1:].copy()},
            rewards={name: np.where(runs, reward, 0.0)[:, None] for name, reward in rewards.items()},
            valid=runs[:, None],
            terminated=self._over.copy(),
            truncated=np.zeros_like(self._over),
            success=self._won.copy(),
        )

    # -- schedules -----------------------------------------------------------------------------------------------------

    def _scheduled(self, observation: Observation, index: Array, seeds: Array) -> Array:
        """Return the schedules [R, M] of new episodes in rows `index`, by their seeds [R]."""
        plan, goals = self.plan, len(self.plan.goals)
        numbers = uniforms(seeds, 2 + goals)
        branch = (numbers[:, 0] * plan.branches).astype(np.int64)
        candidates = np.stack([draw_schedules(plan, place, numbers[:, 2:]) for place in range(plan.branches)], axis=1)
        times = candidates[np.arange(len(seeds)), branch]
        if self._value is None:
            return times
        starts = {key: np.asarray(value)[index] for key, value in observation.items()}
        if self._best:
            draws = uniforms(seeds + 1, CANDIDATES * goals).reshape(len(seeds), CANDIDATES, goals)
            return best_schedules(plan, lambda several: self._values(starts, several), draws)
        draws = uniforms(seeds + 1, numbers_needed(plan))
        by_value = sample_by_value(plan, lambda several: self._values(starts, several), draws)
        return np.where(numbers[:, 1:2] < UNIFORM_SHARE, times, by_value)

    def _values(self, observation: Observation, times: Array) -> Array:
        """Return the values [R, N] of schedules [R, N, M] at the begin of episodes, for observations [R, H, ...]."""
        assert self._value is not None
        count = times.shape[1]
        repeated = {key: np.repeat(value, count, axis=0) for key, value in observation.items()}
        flat = times.reshape(-1, times.shape[-1])
        frame = self._frame_of(flat, np.zeros(len(flat), np.int64), np.zeros(flat.shape, bool))
        repeated[SCHEDULE] = np.repeat(frame[:, None], self.spec.history, axis=1)
        return self._value(repeated).reshape(times.shape[:2])

    # -- margins -------------------------------------------------------------------------------------------------------

    def _far(self, frames: Mapping[str, Array]) -> Array:
        """Return the distance max(0, -margin) [B, M] from every sub-goal in the frames [B, 1, ...]."""
        margins = [
            np.zeros(self.batch_size)
            if goal.formula is None
            else self.specification.margins(goal.formula, frames, 1)[:, 0]
            for goal in self.plan.goals
        ]
        return np.maximum(0.0, -np.stack(margins, axis=1))

    def _violations(self, frames: Mapping[str, Array]) -> Array:
        """Return the number [B] of invariants that hold now and are violated in the frames [B, 1, ...]."""
        first, last = self.plan.spans(self.times)
        now = self._clock[:, None]
        active = (now >= first) & (now <= last)
        count = np.zeros(self.batch_size)
        for place, each in enumerate(self.plan.invariants):
            count += active[:, place] & (self.specification.margins(each.formula, frames, 1)[:, 0] < 0)
        return count

    # -- what a policy reads -------------------------------------------------------------------------------------------

    def _frame(self) -> Array:
        """Return the frame of the schedules now, [B, 3 M + 2]."""
        return self._frame_of(self.times, self._clock, self._met)

    def _frame_of(self, times: Array, clock: Array, met: Array) -> Array:
        """Return the frame, [N, 3 M + 2], of schedules [N, M] at the times `clock` [N], with sub-goals `met` [N, M]."""
        goals = times.shape[1]
        pursued = _first_due(times, met)
        still_open = (times != START) & ~met
        until = np.where(still_open, times - clock[:, None], 0) / self.plan.horizon
        next_due = np.where(pursued < goals, until[np.arange(len(times)), np.minimum(pursued, goals - 1)], 0.0)
        parts = np.eye(goals + 1)[pursued], next_due[:, None], still_open, until
        return np.concatenate(parts, axis=1).astype(np.float32)

    def _seen(self, observation: Observation) -> Observation:
        return {**observation, SCHEDULE: self._window.copy()}


def _first_due(times: Array, met: Array) -> Array:
    """Return the open sub-goal [N] of times [N, M] that is due first, of equals the first; M where none is left."""
    latest = np.iinfo(np.int64).max
    due = np.where((times != START) & ~met, times, latest)
    return np.where(due.min(axis=1) == latest, times.shape[1], due.argmin(axis=1))
