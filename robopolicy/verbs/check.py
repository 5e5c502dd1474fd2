"""Checks your own world, policy, world model or mechanism against its interface contract, and reports what it can be
used for.

The target is a checkpoint folder, a world's name, or an import path (package.module:Name) of a world, policy, world
model, controller, fine-tuning mechanism or benchmark. A policy or world model without a checkpoint is built and tested
on twelve episodes of random actions in the configured world; a controller plays them itself. Each failure is described
in one sentence, and the exit status is 1. For a policy checkpoint the check also reports whether it fits the world that
it was trained in, or world=NAME.
"""

import inspect
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.building.policies import choose_device, load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config
from robopolicy.configuration.sections.tools import BenchSection
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError, RobopolicyError, RobopolicyWarning, did_you_mean
from robopolicy.core.file_types import describe_path
from robopolicy.core.policy import ConvertibleToTrainable, Policy
from robopolicy.core.registry import Kinds, is_dotted, load_dotted
from robopolicy.core.spec import Field, Observation, WorldSpec
from robopolicy.core.world import Controller, Renders, Rows, Snapshots, World
from robopolicy.data.formats.format import what_it_is
from robopolicy.data.lerobot_reading import is_dataset
from robopolicy.data.record import record
from robopolicy.policies.loading import build_policy, missing_fps_message
from robopolicy.policies.registry import POLICIES
from robopolicy.rl.registry import CALLED_WITH, Mechanism, declared_at, setting_for
from robopolicy.runs import output, publish
from robopolicy.testing.controller import check_controller
from robopolicy.testing.policy import check_policy
from robopolicy.testing.world import check_world
from robopolicy.testing.world_model import check_world_model
from robopolicy.verbs.bench import Benchmark
from robopolicy.verbs.verb import Verb
from sims.controllers import load_controller
from sims.names import SUITES, WORLDS, suite_of
from sims.registry import make_world
from worldmodels.checkpoint import holds_world_model, load_world_model
from worldmodels.registry import WORLD_MODELS

VERB = Verb(
    summary="Check a custom world, policy, world model, controller or mechanism",
    sections=("run", "world", "check"),
    example="robopolicy check my_package.my_module:MyWorld",
    targets=("check.target",),
    world_from={"check.target": "unassumed"},
)
CHECKED = "robopolicy check takes a checkpoint folder, a world's name or package.module:Name."
EPISODES = 12
WORLD_ALLOWS = "evaluate, collect, finetune, drive and rank in it, and train policies and world models on its data"
MODEL_ALLOWS = "train it (worldmodel.kind), evaluate, finetune, rank and plan in it"


def run(config: Config) -> int:
    """Run the check and print what the target can be used for, or the first violation of its contract."""
    target = config.check.target
    if not target:
        raise ConfigError(
            "No target given. Usage: robopolicy check TARGET (a checkpoint folder or package.module:Name)"
        )
    kind_text, check = checker(config, target)
    try:
        lines = check()
    except AssertionError as error:
        output.print(f"{target} ({kind_text}): contract check failed.\n  {error}", markup=False, soft_wrap=True)
        publish(config, {"target": target, "is": kind_text, "passed": False, "failure": str(error)})
        return 1
    output.print(f"{target} ({kind_text}): contract check passed.", markup=False, soft_wrap=True)
    for line in lines:
        output.print(f"  {line}", markup=False, soft_wrap=True)
    publish(config, {"target": target, "is": kind_text, "passed": True, "allows": lines})
    return 0


def checker(config: Config, target: str) -> tuple[str, Callable[[], list[str]]]:
    """Return the type of `target` in words, and its check, which raises AssertionError or returns what the target
    allows.
    """
    if Path(target).is_dir():
        return checkpoint_checker(config, Path(target))
    if target in POLICIES or target in WORLD_MODELS:
        kinds = POLICIES if target in POLICIES else WORLD_MODELS
        return kind_checker(config, kinds, target)
    if target in WORLDS or suite_of(target) is not None:
        return "a world", partial(world_lines, config, target)
    if not is_dotted(target):
        refuse_file(Path(target))
        suites = ", ".join(suite.form for suite in SUITES)
        nearest = did_you_mean(target, [*POLICIES, *WORLD_MODELS, *WORLDS.names()])
        raise ConfigError(
            f"'{target}' is not a folder, a registered name or an import path (package.module:Name).{nearest} Worlds "
            f"of suites are written {suites}."
        )
    target_object = load_dotted(target, "Target")
    if entries := declared_at(target):
        return "a mechanism", partial(mechanism_lines, entries, target)
    if isinstance(target_object, Benchmark):
        return "a benchmark", partial(benchmark_lines, target_object, target)
    if is_controller(target_object):
        return "a controller", partial(controller_lines, config, target)
    config_of = getattr(target_object, "configuration", None) or (
        target_object if hasattr(target_object, "builds") else None
    )
    if config_of is None:
        return "a world", partial(world_lines, config, target)
    policy_class = load_dotted(target_object.builds, "Target") if hasattr(target_object, "builds") else target_object
    return kind_checker(config, POLICIES if hasattr(policy_class, "act") else WORLD_MODELS, target)


def refuse_file(path: Path) -> None:
    """Raise an error that describes the file at `path` and its use, if there is one."""
    if description := describe_path(path):
        refuse_data(path)
        raise ConfigError(f"{path} is {description}. {CHECKED}")


def refuse_data(path: Path) -> None:
    """Raise an error if `path` contains recorded data, with the command that examines or converts it."""
    places = [path] if path.is_dir() else path.absolute().parents  # a table or a video of a dataset
    dataset = next((folder for folder in places if is_dataset(folder)), None)
    if not (path / "config.json").is_file() and (hint := what_it_is(dataset or path)):
        raise DataError(hint)
    if dataset is not None:
        relation = "is a LeRobotDataset" if dataset == path else f"belongs to the LeRobotDataset {dataset}"
        raise ConfigError(f"{path} {relation}: examine it with robopolicy doctor {shlex.quote(str(dataset))}")


def is_controller(found: Any) -> bool:
    """Check whether an object imported by path creates a controller: a class that only acts, or a function that returns
    one.
    """
    if not isinstance(found, type):
        found = getattr(found, "__annotations__", {}).get("return")
    return found is Controller or (
        callable(getattr(found, "act", None)) and not any(hasattr(found, name) for name in ("spec", "configuration"))
    )


def mechanism_lines(entries: list[Mechanism], target: str) -> list[str]:
    """Check that mechanisms accept the arguments of their slots, and list the settings that select them; raises
    AssertionError otherwise.
    """
    lines: list[str] = []
    for entry in entries:
        arguments = CALLED_WITH[entry.slot]
        try:
            inspect.signature(entry.function).bind(*arguments)
        except TypeError as error:
            raise AssertionError(
                f"The slot {entry.slot.value} calls '{entry.name}' with ({', '.join(arguments)}): {error}. Options "
                "must be keyword-only and have defaults."
            ) from error
        lines += [f"You can fine-tune with it: finetune.{setting_for(entry.slot, target)}. {entry.line}"]
        lines += [f"Option finetune.options.{entry.name}.{key}={value}" for key, value in entry.options.items()]
        lines += [f"It needs: {need.value}." for need in sorted(entry.needs, key=lambda item: item.name)]
    return [*lines, "Only its call signature was checked, not what it computes."]


def benchmark_lines(found: Benchmark, target: str) -> list[str]:
    """Check that a benchmark reads existing settings, and describe how to run it; raises AssertionError otherwise."""
    settings = {item.name for item in fields(BenchSection)} - {"name"}
    unknown_settings = [key for key in found.reads if key not in settings]
    assert not unknown_settings, (
        f"it reads bench.{unknown_settings[0]}, which is not a setting:{did_you_mean(unknown_settings[0], settings)}"
    )
    reads = ", ".join(f"bench.{key}" for key in found.reads) or "no bench setting"
    return [f"You can run it: robopolicy bench {target}. {found.claim}", f"It reads {reads}."]


def controller_lines(config: Config, target: str) -> list[str]:
    """Check a controller in the configured world and play episodes with it."""
    world = build_world(config.world, batch_size=EPISODES, seed=config.run.seed)
    try:
        check_controller(lambda: load_controller(target, world.spec), world)
        success = record(world, load_controller(target, world.spec), np.arange(EPISODES)).success
    finally:
        world.close()
    result_text = "success is not reported" if success is None else f"{success.sum()} of {EPISODES} succeeded"
    return [f"You can collect with it (collect.controller={target}): {result_text}.", tried_in(config)]


def checkpoint_checker(config: Config, folder: Path) -> tuple[str, Callable[[], list[str]]]:
    """Return the check of a policy checkpoint, or of a world model checkpoint, which is only loaded."""
    refuse_data(folder)
    device = choose_device(config.run)
    if holds_world_model(folder):

        def loads() -> list[str]:
            spec = load_world_model(folder, device).spec
            return [f"It loads; it models '{spec.name}'. You can evaluate, finetune, rank and plan in it."]

        return "a world model", loads
    policy = load_at_best(folder, device)
    reload = partial(load_at_best, device=device) if hasattr(policy, "save") else None
    return "a policy", lambda: [
        *check_policy(policy, reload, device=device).lines(),
        *fitting_lines(config, folder, policy, device),
    ]


def fitting_lines(config: Config, folder: Path, policy: Policy, device: torch.device) -> list[str]:
    """Report whether a policy fits the configured world, and what is missing to drive a robot with it."""
    world = config.world.name
    problems = [] if policy.spec.fps else [f"Not ready for a robot: {missing_fps_message(folder)}"]
    if not world:
        return ["To check whether it fits a world, add world=NAME.", *problems]
    try:
        build_world(config.world, policy, batch_size=1, seed=config.run.seed, device=device).close()
    except RobopolicyError as error:
        return [f"It does not fit {world}: {error} To check another world: world=NAME.", *problems]
    return [f"It fits {world}; to check another world: world=NAME.", *problems]


def load_at_best(folder: Path, device: torch.device) -> Policy:
    """Load a policy, in its trainable form if it has one."""
    policy = load_policy(folder, device)
    if isinstance(policy, ConvertibleToTrainable):
        with suppress(ConfigError):
            return policy.to_trainable()
    return policy


def kind_checker(config: Config, kinds: Kinds, target: str) -> tuple[str, Callable[[], list[str]]]:
    """Return the check of a policy or world model class, built with its defaults for the configured world."""
    choice = kinds.configuration(target)()
    device = choose_device(config.run)

    def policy() -> list[str]:
        spec, episodes = played(config)
        built = build_policy(target, choice, spec, episodes, config.run.seed, device)
        lines = check_policy(built, partial(load_policy, device=device), device=device).lines()
        return [*lines, tried_in(config)]

    def model() -> list[str]:
        spec, episodes = played(config)
        check_world_model(kinds.builds(target), choice, spec, episodes)
        return [f"You can {MODEL_ALLOWS}.", tried_in(config)]

    return ("a policy", policy) if kinds is POLICIES else ("a world model", model)


def tried_in(config: Config) -> str:
    """Return a line that names the world in which the target was tested."""
    return f"Tested in {config.world.name}; to test in another world: world=NAME."


class RandomActions:
    """A controller that samples actions uniformly within their bounds; unbounded actions from -1 to 1."""

    def __init__(self, spec: WorldSpec, seed: int):
        size = spec.action.shape
        low, high = np.broadcast_to(spec.action.low, size), np.broadcast_to(spec.action.high, size)
        self._low, self._high = np.where(np.isfinite(low), low, -1.0), np.where(np.isfinite(high), high, 1.0)
        self._generator = np.random.default_rng(seed)

    def reset(self, rows: Rows = None) -> None:
        """Do nothing: this controller has no state."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, A]."""
        rows = len(next(iter(observation.values())))
        return self._generator.uniform(self._low, self._high, (rows, len(self._low)))


def played(config: Config) -> tuple[WorldSpec, Episodes]:
    """Return the configured world's spec and twelve episodes of random actions in it."""
    world = build_world(config.world, batch_size=EPISODES, seed=config.run.seed)
    episodes = record(world, RandomActions(world.spec, config.run.seed), np.arange(EPISODES))
    world.close()
    return world.spec, episodes


def works(call: Callable[[], object]) -> bool:
    """Return whether a call of an optional world method succeeds: adapters may only know when called."""
    try:
        call()
    except RobopolicyError:
        return False
    return True


def world_lines(config: Config, name: str) -> list[str]:
    """Check a world: the protocols that it claims to implement, and whether equal seeds repeat bit by bit."""
    options: dict[str, Any] = {"seed": config.run.seed, "history": 2, **config.world.options}
    if config.world.cameras:
        size = config.world.image_size
        options |= {"cameras": config.world.cameras, **({} if size is None else {"image_size": size})}
    worlds: list[World] = []

    def make(rows: int) -> World:
        worlds.append(make_world(name, rows, **options))
        return worlds[-1]

    with collected_notes() as notes:
        try:
            first = make(1)
            first.reset()
            snapshots = isinstance(first, Snapshots) and works(first.snapshot)
            renders = isinstance(first, Renders) and works(first.render)
            check_world(make, snapshots=snapshots, renders=renders)
        finally:
            for world in worlds:
                world.close()
    abilities = f"Snapshots: {'yes' if snapshots else 'no'}. Rendering: {'yes' if renders else 'no'}."
    cameras: Mapping[str, str] = getattr(first, "available_cameras", {})
    listing = ", ".join(f"{camera} ({description})" for camera, description in cameras.items())
    camera_lines = [f"Cameras: {listing}. Select one with world.cameras=[NAME]."] if listing else []
    return [
        f"You can {WORLD_ALLOWS}.",
        *spec_lines(first.spec),
        *camera_lines,
        abilities,
        *(f"Note: {text}" for text in notes),
    ]


@contextmanager
def collected_notes() -> Iterator[list[str]]:
    """Collect the texts of robopolicy's warnings, each once; if the body raises, they are issued as warnings."""
    texts: list[str] = []
    previous_hook = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if not issubclass(category, RobopolicyWarning):
            previous_hook(message, category, *rest)
        elif str(message) not in texts:
            texts.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", RobopolicyWarning)
        warnings.showwarning = show
        try:
            yield texts
        except BaseException:
            for text in texts:
                previous_hook(RobopolicyWarning(text), RobopolicyWarning, __file__, 0)
            raise


def spec_lines(spec: WorldSpec) -> list[str]:
    """Describe a world's observations, actions and success criterion: what is needed to write a controller for it."""
    field_lines = [f"Observation {key} {described(field)}" for key, field in spec.observation.items()]
    low, high = (np.broadcast_to(limit, spec.action.shape) for limit in (spec.action.low, spec.action.high))
    limits = [f"{lowest:g} to {highest:g}" for lowest, highest in zip(low, high, strict=True)]
    bounds = ", ".join(limits if len(set(limits)) > 1 else limits[:1])
    beyond = "" if spec.clips_actions else " (not clipped: executed as given, also outside the bounds)"
    action_line = (
        f"Action {described(spec.action)}; {bounds}{beyond}; {spec.fps:g} control steps per second, "
        f"{spec.horizon} per episode"
    )
    criterion = (
        spec.success or "reported by the world"
        if spec.reports_success
        else "not reported; define it with world.options.success or world.options.success_key"
    )
    return [*field_lines, action_line, f"Success: {criterion.removesuffix('.')}."]


def described(field: Field) -> str:
    """Return shape, unit and element names of a field; names that differ only by an index are given as a range."""
    names: list[str] = []
    for base, group in groupby(field.names, lambda name: name.partition("[")[0]):
        members = list(group)
        index = members[-1].removeprefix(base)
        names += [f"{members[0]} to {index}"] if index and len(members) > 1 else members
    parts = [str(list(field.shape)), f" ({', '.join(names)})" if names else "", f", {field.unit}" if field.unit else ""]
    return "".join(parts)
