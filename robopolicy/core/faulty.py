"""World with planted faults: in a share of the episodes one begins, at a step that follows from the episode's seed.

world.options.faults=[slip,latency] selects faults (`robopolicy.core.faults`), with options as a mapping,
world.options.faults={latency:{steps:4}}; world.options.fault_rate is the share of episodes with a fault. Reward and
success are those of the true state. world.options.undisturbed=true shows every field also as it is without the fault,
for a teacher that sees more than the policy. Axes: B row, R selected rows, E episode, C chunk step, T frame, H history
frame.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from robopolicy.core.action_bounds import clip_if_bounded
from robopolicy.core.arrays import Array, is_mapping, is_sequence
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.faults import FAULTS, Fault, Onset
from robopolicy.core.randomness import derive_keys, derive_seed, numpy_generator, uniforms
from robopolicy.core.registry import named_arguments, require_types
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Observation, validate_actions
from robopolicy.core.world import Rows, Snapshots, Step, World
from robopolicy.core.wrapped_world import WrappedSnapshots, WrappedWorld, join_steps

FAULTS_OPTION, RATE_OPTION = "faults", "fault_rate"
UNDISTURBED_OPTION = "undisturbed"
"""Names of the options of a world."""
UNDISTURBED = "_undisturbed"
"""End of the keys of fields as they are without the fault, which a world with undisturbed=true shows too."""
OPTIONS = (FAULTS_OPTION, RATE_OPTION, UNDISTURBED_OPTION)
DEFAULT_RATE = 0.8
"""Share of episodes with a fault."""
WINDOW = (0.05, 0.4)
"""Earliest and latest begin of a fault, as shares of the time limit: most episodes are then still running."""
NO_FAULT = "no fault"
"""Name of the episodes without a fault, in tables."""
NEVER = -(10**9)
"""`Onset.since` in rows without the fault."""


@dataclass(frozen=True)
class FaultPlan:
    """Faults of E episodes. names: fault of each episode, "" for none; begins: [E] int64, control steps before it."""

    names: tuple[str, ...]
    begins: Array


@runtime_checkable
class PlantsFaults(Protocol):
    """A world whose episodes may have faults."""

    def fault_plan(self, seeds: Array) -> FaultPlan:
        """Return the faults of the episodes with these seeds [E]."""
        ...


def fault_plan(world: object, seeds: Array) -> FaultPlan | None:
    """Return the faults of the episodes with these seeds [E] in a world or one of those that it wraps; None without
    faults.
    """
    inner: Any = world
    while not isinstance(inner, PlantsFaults):
        if not hasattr(inner, "world"):
            return None
        inner = inner.world
    return inner.fault_plan(seeds)


def without_faults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a world's options without those of faults."""
    return {name: value for name, value in options.items() if name not in OPTIONS}


def with_faults_of(options: Mapping[str, Any], world: World) -> World:
    """Return `world` with the faults in its options; the world itself for none.

    Raises ConfigError for an unknown fault or option, for a rate outside 0 to 1, and when the world cannot have a
    fault.
    """
    setting: Any = options.get(FAULTS_OPTION)
    rate: Any = options.get(RATE_OPTION, DEFAULT_RATE)
    if not setting:
        for name in (RATE_OPTION, UNDISTURBED_OPTION):
            if name in options:
                raise ConfigError(f"world.options.{name} needs faults: set world.options.faults=[latency].")
        return world
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ConfigError(f"world.options.fault_rate={rate} must be a share of the episodes, from 0 to 1.")
    undisturbed: Any = options.get(UNDISTURBED_OPTION, False)
    if not isinstance(undisturbed, bool):
        raise ConfigError(f"world.options.undisturbed={undisturbed} must be true or false.")
    if not is_mapping(setting) and (isinstance(setting, str) or not is_sequence(setting)):
        raise ConfigError(f"world.options.faults={setting} must be a list of faults, such as [{', '.join(FAULTS)}].")
    settings: dict[str, Any] = dict(setting) if is_mapping(setting) else {str(name): {} for name in setting}
    try:
        faults = {name: _made(name, world, given or {}) for name, given in settings.items()}
    except BaseException:
        world.close()
        raise
    kind = FaultySnapshots if isinstance(world, Snapshots) else FaultyWorld
    return kind(world, faults, float(rate), int(options.get("seed", 0)), undisturbed=undisturbed)


def _made(name: str, world: World, options: Any) -> Fault:
    make = FAULTS.load(name)
    if not is_mapping(options):
        raise ConfigError(f"world.options.faults.{name}={options} must be a mapping of options.")
    known = [each for each in named_arguments(make) if each != "world"]
    for option in options:
        if option not in known:
            listing = f"It has {', '.join(known)}." if known else "It has none."
            raise ConfigError(f"The fault {name} has no option '{option}'.{did_you_mean(option, known)} {listing}")
    require_types(make, options, f"world.options.faults.{name}.")
    fault = make(world, **options)
    if not isinstance(fault, Fault):
        raise ConfigError(f"The fault '{name}' is {type(fault).__name__}: derive it from robopolicy.core.faults.Fault.")
    return fault


class FaultyWorld(WrappedWorld):
    """A `World` with faults; create it with `with_faults_of`.

    faults: by name; rate: share of episodes with one of them; seed: of the generator of episode seeds when `reset` is
    given none; undisturbed: show every field also as it is without the fault, under its key + UNDISTURBED.
    """

    def __init__(self, world: World, faults: Mapping[str, Fault], rate: float, seed: int, *, undisturbed: bool = False):
        fields = dict(world.spec.observation)
        if undisturbed:
            fields |= {key + UNDISTURBED: field for key, field in fields.items()}
        super().__init__(world, replace(world.spec, observation=fields))
        self.undisturbed = undisturbed
        self.faults, self.rate = dict(faults), rate
        self._draws = numpy_generator(seed, f"faults/{world.spec.name}/episode_seeds")
        rows = world.batch_size
        self._kind, self._begin = np.full(rows, -1, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        self._keys, self._steps = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        self._ended = np.zeros(rows, dtype=bool)

    def _planned(self, seeds: Array) -> tuple[Array, Array]:
        """Return the place of each episode's fault, -1 for none, and the control step at which it begins, [E] each."""
        draws = uniforms(derive_keys(derive_seed(0, "faults"), np.asarray(seeds)), 3)
        kind = np.floor(draws[:, 1] * len(self.faults)).astype(np.int64)
        horizon = self.spec.horizon
        first = max(1, round(WINDOW[0] * horizon))
        count = max(1, round(WINDOW[1] * horizon) - first + 1)
        begin = first + np.floor(draws[:, 2] * count).astype(np.int64)
        return np.where(draws[:, 0] < self.rate, kind, -1), begin

    def fault_plan(self, seeds: Array) -> FaultPlan:
        """Return the faults of the episodes with these seeds [E]; those of shorter episodes never begin."""
        kind, begin = self._planned(seeds)
        names = ("", *self.faults)
        return FaultPlan(tuple(names[int(place) + 1] for place in cast(list[int], kind.tolist())), begin)

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | Array | None = None, options: Mapping[str, Any] | None = None
    ) -> Observation:
        """Start new episodes in `rows` [R]; see `World.reset`."""
        index = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        seeds = self._draws.integers(0, 2**31, len(index)) if seeds is None else np.asarray(seeds, dtype=np.int64)
        observation = self.world.reset(rows, seeds, options)
        self._kind[index], self._begin[index] = self._planned(seeds)
        self._keys[index] = derive_keys(derive_seed(0, "fault draws"), seeds)
        self._steps[index], self._ended[index] = 0, False
        for fault in self.faults.values():
            for array in fault.arrays.values():
                array[index] = 0
        self._see(observation, self._steps[:, None], index)
        return self._shown(observation)

    def step(self, actions: Array) -> Step:
        """Execute a chunk [B, C, A] with the faults that act on it; raises as the world does."""
        actions = np.asarray(actions, dtype=np.float64)
        validate_actions(actions, self.spec.action, self.batch_size)
        actions = clip_if_bounded(self.spec, actions)
        control_steps = self._steps[:, None] + np.arange(actions.shape[1])
        cuts: set[int] = set()
        for place, fault in enumerate(self.faults.values()):
            onset = self._onset(place, control_steps)
            actions = fault.act(actions, onset)
            disturbed = fault.disturbs(onset.since) & ~self._ended[:, None]
            cuts |= {int(step) for step in np.flatnonzero(disturbed.any(axis=0))}
        steps: list[Step] = []
        for begin, end in pairwise(sorted({0, *cuts, actions.shape[1]})):
            if begin in cuts:
                self._disturb()
            steps.append(self._advance(actions[:, begin:end]))
        step = join_steps(steps)
        return replace(step, observation=self._shown(step.observation))

    def _disturb(self) -> None:
        """Disturb the state of the rows whose fault does so before their next control step."""
        for place, fault in enumerate(self.faults.values()):
            since = self._onset(place, self._steps[:, None]).since
            rows = np.flatnonzero(fault.disturbs(since)[:, 0] & ~self._ended)
            if len(rows):
                fault.disturb(rows, self._keys[rows])

    def _advance(self, actions: Array) -> Step:
        """Execute actions [B, c, A] and return the step with the trace as it is observed."""
        step = self.world.step(actions)
        frames = self._steps[:, None] + np.cumsum(step.valid, axis=1)
        self._steps, self._ended = frames[:, -1].copy(), step.ended.copy()
        self._see(step.trace, frames)
        return replace(step, trace=self._observed(step.trace, frames))

    def _onset(self, place: int, steps: Array) -> Onset:
        """Return when the fault number `place` acts at control steps or frames [B, T]."""
        since = np.where((self._kind == place)[:, None], steps - self._begin[:, None], NEVER)
        return Onset(since, self._keys)

    def _see(self, observation: Observation, frames: Array, rows: Array | None = None) -> None:
        """Pass new frames [B, T] to the faults: the last T frames of the observation; rows: those that are new, [R]."""
        known = np.full(self.batch_size, rows is None)
        known[rows] = True
        for place, fault in enumerate(self.faults.values()):
            onset = self._onset(place, frames)
            onset = replace(onset, since=np.where(known[:, None], onset.since, NEVER))
            for key, value in observation.items():
                if key != TASK and not key.startswith(IMAGE_PREFIX):
                    fault.see(key, value[:, -frames.shape[1] :], onset)

    def _shown(self, observation: Observation) -> Observation:
        """Return histories [B, H, ...] as they are observed."""
        age = np.arange(self.spec.history - 1, -1, -1)
        return self._observed(observation, np.maximum(self._steps[:, None] - age, 0))

    def _observed(self, observation: Observation, frames: Array) -> Observation:
        """Return fields [B, T, *shape] of these frames [B, T] as the faults show them."""
        shown = dict(observation)
        for place, fault in enumerate(self.faults.values()):
            onset = self._onset(place, frames)
            for key in shown:
                if key != TASK:
                    shown[key] = fault.show(key, shown[key], onset)
        if not self.undisturbed:
            return shown
        return shown | {key + UNDISTURBED: value for key, value in observation.items() if key != TASK}


class FaultySnapshots(FaultyWorld, WrappedSnapshots):
    """A `FaultyWorld` that supports `Snapshots`; they include the plan and the memory of the faults."""

    prefix = "faults/"

    @property
    def origin(self) -> str:
        """Implement `WrappedSnapshots.origin`."""
        return f"a world with {FAULTS_OPTION}=[{', '.join(self.faults)}]"

    @property
    def own_arrays(self) -> dict[str, Array]:
        """Implement `WrappedSnapshots.own_arrays`: arrays [B, ...]."""
        own = {"kind": self._kind, "begin": self._begin, "keys": self._keys, "steps": self._steps, "ended": self._ended}
        memory = {
            f"{place}/{name}": array
            for place, fault in enumerate(self.faults.values())
            for name, array in fault.arrays.items()
        }
        return {**own, **memory}

    def restored(self, observation: Observation, rows: Array) -> Observation:
        """Implement `WrappedSnapshots.restored`; rows: [R] -> [B, H, ...]."""
        return self._shown(observation)
