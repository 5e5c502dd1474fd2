"""Registry of worlds: built-in tasks, suites by prefix, other packages by entry point, and custom classes by import
path.

Modules are imported on first use. For valid targets of a name, see `World` in `robopolicy.core.world`, `Task` in
`sims.task`, and any class derived from `gymnasium.Env`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, cast

from robopolicy.core.delayed import with_latency_of, without_latency
from robopolicy.core.errors import (
    CheckpointError,
    ConfigError,
    RobopolicyError,
    SpecError,
    did_you_mean,
    require_extra,
)
from robopolicy.core.faulty import with_faults_of, without_faults
from robopolicy.core.machine import rendering_error_hint
from robopolicy.core.origin import WorldOrigin, check_saved_options, texts
from robopolicy.core.registry import is_dotted, is_trusted, load_dotted, named_arguments, trust_path
from robopolicy.core.scheduled import with_schedules_of, without_schedules
from robopolicy.core.spec import DEFAULT_IMAGE_SIZE, WorldSpec, require_cameras_named
from robopolicy.core.trials import with_trials_of, without_trials
from robopolicy.core.world import Controller, World
from sims.composed import FollowsInOrder
from sims.controllers import NamedController
from sims.instructions import WithPlainInstructions
from sims.names import OURS, SUITES, TASKS, WORLDS, suite_of
from sims.task import Task


def load_task(name: str) -> Task:
    """Load a task by name or import path; raises ConfigError when it is not a task."""
    if name not in WORLDS and not is_dotted(name):
        raise ConfigError(f"There is no task '{name}'.{did_you_mean(name, TASKS.names())}")
    task = _task(name, WORLDS.load(name))
    if task is None:
        raise ConfigError(f"'{name}' is a World, not a Task.")
    return task


def make_world(name: str, batch_size: int, **options: Any) -> World:
    """Build a world of `batch_size` rows by name; options are passed to its constructor (seed, history, cameras, ...).

    name: one of WORLDS; a suite's world, such as "gymnasium:<id>" (any gymnasium environment with continuous actions);
    or an import path. A registered name or an import path refers to one of three things. (1) A `Task`, or a function
    without arguments that returns one (runs on the MuJoCo engine). (2) A class derived from gymnasium.Env (runs in the
    gymnasium suite). (3) A class or function called as make(batch_size, *, seed, history, **options) that returns a
    `World`. cameras and image_size (`core.spec.image_sizes`; one number for all) are passed only when given.
    latency_steps, faults, trial_episodes and stl, for any world: see `core.delayed.with_latency`, `core.faulty`,
    `core.trials` and `core.scheduled`. Raises ConfigError, and SpecError when images are not named as cameras.
    """
    try:
        plain_options = without_schedules(without_trials(without_faults(without_latency(options))))
        inner = _made(name, batch_size, plain_options)
    except Exception as error:
        if text := rendering_error_hint(error):
            raise ConfigError(text) from error
        raise
    world = with_trials_of(options, with_latency_of(options, with_faults_of(options, inner)))
    world = with_schedules_of(options, world)
    try:
        require_cameras_named(world.spec.observation, f"The world '{name}'")
    except SpecError:
        world.close()
        raise
    return world


def _made(name: str, batch_size: int, options: dict[str, Any]) -> World:
    if not isinstance(options.get("env_options") or {}, Mapping):
        raise ConfigError(
            f"world.options.env_options is {options['env_options']!r}, but must be a mapping: set its keys with "
            "world.options.env_options.KEY=VALUE."
        )
    suite = suite_of(name)
    if suite is not None:
        if suite.imports:
            trust_path(name)
        return load_dotted(suite.make, "Suite")(name.removeprefix(suite.prefix), batch_size, **options)
    if name in ("worldmodel", "demonstrations"):
        raise ConfigError(
            f"The world '{name}' is built from files: create it with robopolicy.make_world, or set world.name={name}."
        )
    if name not in WORLDS and not is_dotted(name):
        forms = ", ".join(f"'{suite.form}'" for suite in SUITES)
        raise ConfigError(
            f"There is no world '{name}'.{did_you_mean(name, WORLDS.names())} Outside suites: {forms}. For a custom "
            "world pass its import path, package.module:Name."
        )
    target = WORLDS.load(name)
    task = _task(name, target)
    if task is not None:
        from sims.engine import MujocoWorld

        option_names = [each for each in signature(MujocoWorld).parameters if each not in ("task", "batch_size")]
        _require_known(name, options, option_names)
        return MujocoWorld(task, batch_size, **options)
    if _is_environment(target):
        from sims.suites.environment_class import make_environment_world

        return make_environment_world(name, target, batch_size, **options)
    return _called(name, target, batch_size, options)


def make_saved_world(origin: WorldOrigin, where: Path, batch_size: int, **given: Any) -> World:
    """Build the world recorded in a checkpoint at `where`; given options override the recorded ones.

    A file cannot trigger imports: raises CheckpointError as `require_trusted` and `trusted_options` do.
    """
    require_trusted(origin.name, where, f"world.simulator={origin.name}")
    return make_world(origin.name, batch_size, **{**trusted_options(origin, where, given), **given})


def trusted_options(origin: WorldOrigin, where: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded options of the world that `where` names, except those that are overridden.

    Raises CheckpointError when an option refers to a module that the user has not named in this process, and the errors
    of `check_saved_options`.
    """
    saved_options = {key: value for key, value in origin.options.items() if key not in given}
    if given.get("physics", (engine := origin.options.get("physics", "native"))) != engine:
        saved_options.pop("physics_options", None)  # of the engine that is replaced
    check_saved_options(saved_options, where)
    for key, value in saved_options.items():
        for path in texts(value):
            if is_dotted(path) and not is_trusted(path):
                raise CheckpointError(
                    f"{where} comes from a world with {key}={path}, which is not part of robopolicy. If you trust "
                    f"it, set it yourself: world.options.{key}={path}, or run.plugins=[{path.partition(':')[0]}]."
                )
    return saved_options


def require_trusted(name: str, where: object, way_out: str) -> None:
    """Raise CheckpointError when the world named by `where` refers to an untrusted module. Trusted modules are built
    in, installed under robopolicy's entry points, or named by the user in this process; way_out: how to name it.
    """
    suite = suite_of(name)
    module = name.removeprefix(suite.prefix).rpartition(":")[0] if suite is not None and suite.imports else ""
    foreign = bool(module) if suite is not None else is_dotted(name)
    if foreign and not is_trusted(name) and not (module and is_trusted(module)):
        raise CheckpointError(
            f"{where} comes from the world '{name}', which is not part of robopolicy. If you trust it, set it "
            f"yourself: {way_out}."
        )


def make_expert(name: str, spec: WorldSpec) -> Controller | None:
    """Build the scripted expert of the world `name`, or return None when it has none.

    A world's class or function has one if its attribute `expert`, called with the spec, returns it.

    Raises ConfigError when a suite's extra is not installed or an import path is invalid.
    """
    suite = suite_of(name)
    if suite is not None:
        if suite.extra is not None:
            require_extra(*suite.extra)
        return load_dotted(suite.expert, "Expert")(name.removeprefix(suite.prefix), spec) if suite.expert else None
    target: Any = WORLDS.load(name) if name in WORLDS or is_dotted(name) else None
    task = _task(name, target)
    if task is None:
        build = getattr(target, "expert", None)
        return cast(Controller, build(spec)) if callable(build) else None
    expert = NamedController(task.expert(), name) if is_dotted(name) else task.expert()
    expert = WithPlainInstructions(expert, task.paraphrases) if task.paraphrases else expert
    return FollowsInOrder(expert, task) if task.compositions else expert


def _require_known(name: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError, suggesting the closest name, on an option that the world `name` does not have."""
    for option in options:
        if option not in known:
            raise ConfigError(
                f"World '{name}' has no option '{option}'.{did_you_mean(option, known)} Known options: "
                f"{', '.join(known)}."
            )


def _task(name: str, found: Any) -> Task | None:
    """Return the task that a registered object is or builds, under the name by which it can be loaded again."""
    if not isinstance(found, Task):
        if isinstance(found, type) or not callable(found) or any(named_arguments(found).values()):
            return None
        found = found()
    if not isinstance(found, Task):
        return None
    return found if name in OURS else dataclasses.replace(found, name=name)


def _is_environment(found: Any) -> bool:
    """Return whether this is a gymnasium environment class; raises ConfigError for a class of the older gym package."""
    packages = {base.__module__.split(".")[0] for base in getattr(found, "__mro__", ()) if base.__name__ == "Env"}
    if "gym" in packages and "gymnasium" not in packages:
        raise ConfigError(
            f"{found.__name__} is an environment of the old gym package, which gymnasium has replaced: derive it "
            "from gymnasium.Env, or register it with gymnasium in a wrapper, shimmy.GymV21CompatibilityV0(env=...)."
        )
    if any(base.__name__ == "VectorEnv" for base in getattr(found, "__mro__", ())):
        raise ConfigError(
            f"{found.__name__} steps several environments at once: use the class or id of a single environment, of "
            "which world.batch_size=NUMBER creates several."
        )
    return "gymnasium" in packages


def _called(name: str, make: Any, batch_size: int, options: dict[str, Any]) -> World:
    if not callable(make):
        raise ConfigError(f"World '{name}' is {make!r}: it must be a class, a function, a Task or a gymnasium.Env.")
    try:
        known = list(named_arguments(make))[1:]
        if "seed" in known and all(each.kind is not each.VAR_KEYWORD for each in signature(make).parameters.values()):
            _require_known(name, options, known)
        if options.get("cameras") and "image_size" not in options and named_arguments(make).get("image_size"):
            options = {**options, "image_size": DEFAULT_IMAGE_SIZE[0]}  # a world that has no size of its own
        world: Any = make(batch_size, **options)
    except RobopolicyError:
        raise
    except Exception as error:
        raise ConfigError(
            f"World '{name}' could not be created: {type(error).__name__}: {error}. It is called as "
            f"{getattr(make, '__name__', 'make')}({batch_size}, {', '.join(options)})."
        ) from error
    missing_parts = [part for part in ("spec", "batch_size", "reset", "step", "close") if not hasattr(world, part)]
    if missing_parts:
        raise ConfigError(
            f"World '{name}' returned {type(world).__name__}, which lacks {', '.join(missing_parts)}: see World in "
            "robopolicy/core/world.py, and run `robopolicy check`."
        )
    return cast(World, world)
