"""`Factor`: one property of a scene that may differ between episodes; `Variation`: the factors of one world.

world.options.variation={colour: 1, mass: [0.5, 2]} sets each factor to one value for all episodes, or to a range from
which every episode draws its own. Draws follow from the episode's seed and the factor's name alone, so they depend
neither on the batch nor on the other factors. A larger strength changes an episode in the same direction. Related:
stable-worldmodel's factors of variation (Maes et al. 2026), LIBERO-Plus (Fei et al. 2025), domain randomisation (Tobin
et al. 2017). Axes: R rows.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import mujoco
import numpy as np

from robopolicy.core.arrays import is_mapping, is_sequence
from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import derive_keys, derive_seed, numpy_generator, uniforms
from robopolicy.core.registry import Registry
from sims.graphics import Look, Prop

OPTION = "variation"
"""Name of the option of a world."""
FACTORS = Registry(
    "factor of variation",
    "robopolicy.variations",
    {
        **{name: f"sims.variations.appearance:{name.capitalize()}" for name in ("colour", "light", "camera")},
        "texture": "sims.variations.appearance:Texture",
        "distractors": "sims.variations.appearance:Distractors",
        **{name: f"sims.variations.physical:{name.capitalize()}" for name in ("size", "mass", "friction")},
    },
)
"""Registry for world.options.variation: a class derived from `Factor`, called as make(model)."""


class Factor:
    """Base class of factors, which changes nothing.

    model: the scene's, for what the factor needs to know of it; it must not be modified in the constructor.
    """

    low: ClassVar[float] = 0.0
    """Smallest value."""
    high: ClassVar[float] = 1.0
    """Largest value."""
    swept: ClassVar[tuple[float, ...]] = (1.0,)
    """Values that are tried if a sweep names none."""
    integer: ClassVar[bool] = False
    """Whether values are numbers of things."""
    physical: ClassVar[bool] = False
    """Whether motion depends on the value; it must then follow from it alone, without random numbers."""
    visible: ClassVar[bool] = True
    """Whether images depend on the value."""
    textures: tuple[int, ...] = ()
    """Textures of the model that `change` modifies, by number."""

    def __init__(self, model: mujoco.MjModel):
        pass

    @classmethod
    def obstacle(cls, model: mujoco.MjModel) -> str:
        """Return the reason why this factor cannot vary in a scene, "" if it can."""
        return ""

    def change(self, model: mujoco.MjModel, value: float, generator: np.random.Generator) -> None:
        """Change the model of one episode in place; `generator` gives the episode's random numbers."""

    def props(self, value: float, generator: np.random.Generator) -> tuple[Prop, ...]:
        """Return geometry that is drawn into the episode's images and touches nothing."""
        return ()

    def place(self, qpos: np.ndarray, values: np.ndarray) -> None:
        """Adapt initial states qpos [R, nq], in place, to the values [R]."""


@dataclass(frozen=True)
class _Drawn:
    """A factor and the range of its values, which are equal for a fixed one."""

    name: str
    factor: Factor
    low: float
    high: float

    def keys(self, seeds: np.ndarray) -> np.ndarray:
        """Return the keys [R] int64 of this factor's random numbers in the episodes with these seeds [R]."""
        return derive_keys(derive_seed(0, f"variation/{self.name}"), seeds)

    def values(self, keys: np.ndarray) -> np.ndarray:
        """Return the values [R] for keys [R]."""
        draws = uniforms(keys, 1)[:, 0]
        if self.factor.integer:
            return self.low + np.floor(draws * (self.high - self.low + 1))
        return self.low + draws * (self.high - self.low)


class Variation:
    """Factors of the episodes of a world with `rows` rows; false without any.

    setting: factor -> value or [low, high]; model: the scene's, to which physical factors of one value are applied in
    place, for any physics engine. scene: its name, for errors. Raises ConfigError on an unknown factor, one that the
    scene cannot vary, and on values outside a factor's limits.
    """

    def __init__(self, setting: Any, model: mujoco.MjModel, scene: str, rows: int):
        bounds = variation_bounds(setting)
        kinds = {name: FACTORS.load(name) for name in bounds}
        for name, kind in kinds.items():
            if reason := kind.obstacle(model):
                raise ConfigError(f"'{scene}' cannot vary {name}: {reason}. Leave it out of world.options.{OPTION}.")
        self._all = [_Drawn(name, kinds[name](model), *bounds[name]) for name in bounds]
        fixed = [each for each in self._all if each.factor.physical and each.low == each.high]
        self._by_episode = [each for each in self._all if each not in fixed]
        self._model = model
        self._scratch = mujoco.MjData(model) if self._all else None
        for each in fixed:
            each.factor.change(model, each.low, numpy_generator(0, OPTION))
        if fixed:
            mujoco.mj_setConst(model, self._scratch)
        self._capacity = 2 * rows
        self._looks: OrderedDict[int, Look] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def physics_by_episode(self) -> bool:
        """Whether episodes differ in their physics, so that every row needs a model of its own."""
        return any(each.factor.physical for each in self._by_episode)

    def values(self, seeds: np.ndarray) -> dict[str, np.ndarray]:
        """Return the value [R] of every factor in the episodes with these seeds [R]."""
        return {each.name: each.values(each.keys(seeds)) for each in self._all}

    def place(self, qpos: np.ndarray, seeds: np.ndarray) -> None:
        """Adapt initial states qpos [R, nq], in place, to the episodes with these seeds [R]."""
        for each in self._all:
            each.factor.place(qpos, each.values(each.keys(seeds)))

    def looks(self, seeds: np.ndarray) -> list[Look] | None:
        """Return the appearance, with the model, of the episodes with these seeds [R]; None if all are the scene's."""
        if not self._by_episode:
            return None
        looks = [self._look(int(seed)) for seed in seeds]
        while len(self._looks) > max(self._capacity, len(seeds)):
            self._looks.popitem(last=False)
        return looks

    def models(self, seeds: np.ndarray) -> list[mujoco.MjModel]:
        """Return the model of each of the episodes with these seeds [R]."""
        return [look.model for look in self.looks(seeds) or ()] or [self._model] * len(seeds)

    def _look(self, seed: int) -> Look:
        if seed in self._looks:
            self._looks.move_to_end(seed)
            return self._looks[seed]
        model = copy.copy(self._model)
        props: tuple[Prop, ...] = ()
        textures: tuple[int, ...] = ()
        for each in self._by_episode:
            key = each.keys(np.array([seed]))
            value = float(each.values(key)[0])
            each.factor.change(model, value, numpy_generator(int(key[0]), "change"))
            props += each.factor.props(value, numpy_generator(int(key[0]), "props"))
            textures += each.factor.textures
        if self.physics_by_episode:
            mujoco.mj_setConst(model, self._scratch)
        self._looks[seed] = Look(model, props, textures)
        return self._looks[seed]


def variation_bounds(setting: Any) -> dict[str, tuple[float, float]]:
    """Return the lowest and highest value of every factor of world.options.variation; {} for null.

    Factors that are null are left out. Raises ConfigError on an unknown factor and on values outside its limits.
    """
    example = f"world.options.{OPTION}={{colour: 1, mass: [0.5, 2]}}"
    if setting is None:
        return {}
    if not is_mapping(setting):
        raise ConfigError(f"world.options.{OPTION} is {setting!r}, but must map factors to values, as {example} does.")
    bounds: dict[str, tuple[float, float]] = {}
    for name, value in setting.items():
        kind = _kind(str(name))
        if value is None:
            continue
        ends: tuple[Any, ...] = (value, value) if isinstance(value, str) or not is_sequence(value) else tuple(value)
        if len(ends) != 2 or not all(_is_number(end, kind) for end in ends) or not ends[0] <= ends[1]:
            raise ConfigError(
                f"world.options.{OPTION}: {name} is {value!r}, but must be {_limits(kind)}, or a range [low, high] of "
                f"two, as in {example}."
            )
        bounds[str(name)] = float(ends[0]), float(ends[1])
    return bounds


def sweep(setting: Any, name: str) -> dict[str, dict[str, Any]]:
    """Return the variations of a sweep by their labels, each with one factor.

    setting: a list of factors, of which each has usual values, or a mapping of factors to a value or a list of values,
    each of which may be a range [low, high]; null for none. name: the setting's, for errors. Raises ConfigError as
    `variation_bounds` does.
    """
    if setting is None:
        return {}
    if not is_mapping(setting):
        setting = {str(factor): list(_kind(str(factor)).swept) for factor in _listed(setting, name)}
    variations: dict[str, dict[str, Any]] = {}
    for factor, values in setting.items():
        for value in [values] if isinstance(values, str) or not is_sequence(values) else values:
            low, high = variation_bounds({factor: value}).get(str(factor), (0.0, 0.0))
            text = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            variations[f"{factor} {text}"] = {str(factor): value}
    return variations


def only_visible(variations: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the factors of variations, as of `sweep`, that change nothing but images."""
    return list(dict.fromkeys(name for each in variations.values() for name in each if not _kind(name).physical))


def session_changes(setting: Any, name: str, count: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return the variations of `count` sessions of a robot's service by their labels: each changes one factor more.

    A session draws one of the factors and its new value, from `seed` alone, and keeps all earlier changes (after the
    scene changes of GS-LTS, arXiv:2503.17733). setting: a list of factors, whose usual values bound the draws, or a
    mapping of factors to a value or a range [low, high]; name: the setting's, for errors. Raises ConfigError as
    `variation_bounds` does, and without factors.
    """
    if not is_mapping(setting):
        factors = {str(factor): _kind(str(factor)) for factor in _listed(setting, name)}
        # The usual values are far from the scene as it is: one is an end of the range, two are both ends.
        setting = {
            factor: [min(kind.swept) if len(kind.swept) > 1 else kind.low, max(kind.swept)]
            for factor, kind in factors.items()
        }
    bounds = variation_bounds(setting)
    if not bounds:
        raise ConfigError(f"Sessions change factors of variation: list them, {name}=[light,mass].")
    random, present = numpy_generator(seed, "sessions"), dict[str, Any]()
    sessions: dict[str, dict[str, Any]] = {}
    for number in range(1, count + 1):
        factor = list(bounds)[random.integers(len(bounds))]
        low, high = bounds[factor]
        value = random.uniform(low, high)
        present = {**present, factor: round(value) if _kind(factor).integer else round(value, 3)}
        sessions[f"session {number}: {factor} {present[factor]:g}"] = present
    return sessions


def _listed(setting: Any, name: str) -> Any:
    """Return a list of factors; raises ConfigError for anything else."""
    if setting is not None and (isinstance(setting, str) or not is_sequence(setting)):
        raise ConfigError(f"{name} is {setting!r}, but must be a list of factors, such as [colour,mass].")
    return setting or ()


def _kind(name: str) -> type[Factor]:
    kind = FACTORS.load(name)
    if not (isinstance(kind, type) and issubclass(kind, Factor)):
        raise ConfigError(f"The factor '{name}' is no class derived from sims.variations.protocol.Factor.")
    return kind


def _is_number(value: Any, kind: type[Factor]) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and kind.low <= value <= kind.high
    return is_number and (not kind.integer or value == int(value))


def _limits(kind: type[Factor]) -> str:
    return f"{'an integer' if kind.integer else 'a number'} from {kind.low:g} to {kind.high:g}"
