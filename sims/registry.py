"""Worlds by name: our tasks run on the native engine; `metaworld/<task>-v3` and `gymnasium:<id>` go to the suites."""

import importlib
from collections.abc import Callable
from typing import Any

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.world import World
from sims.task import Task


def _task(module: str) -> Callable[[], Task]:
    return lambda: importlib.import_module(f"sims.tasks.{module}").task()


TASKS: dict[str, Callable[[], Task]] = {
    name: _task(name)
    for name in ("push_cube", "push_choice", "push_t", "reach_planar", "arm_reach", "pick_place", "stack")
}
"""Task name -> function that loads and returns it."""

METAWORLD, GYMNASIUM = "metaworld/", "gymnasium:"


def load_task(name: str) -> Task:
    """Return one of our tasks by name."""
    if name not in TASKS:
        raise ConfigError(f"There is no task '{name}'.{did_you_mean(name, TASKS)}")
    return TASKS[name]()


def make_world(name: str, batch_size: int, **options: Any) -> World:
    """Return a world of `batch_size` rows by name; options go to its constructor (seed, history, cameras, ...).

    Names: one of TASKS; "metaworld/<task>-v3" (extra `metaworld`); "gymnasium:<id>" (any gymnasium environment with
    continuous actions).
    """
    if name.startswith(METAWORLD):
        suite = importlib.import_module("sims.suites.metaworld_suite")
        return suite.make_metaworld_world(name.removeprefix(METAWORLD), batch_size, **options)
    if name.startswith(GYMNASIUM):
        suite = importlib.import_module("sims.suites.gymnasium_suite")
        return suite.make_gymnasium_world(name.removeprefix(GYMNASIUM), batch_size, **options)
    if name not in TASKS:
        raise ConfigError(
            f"There is no world '{name}'.{did_you_mean(name, TASKS)} Outside suites: 'metaworld/<task>-v3', "
            "'gymnasium:<id>'."
        )
    from sims.engine import MujocoWorld

    return MujocoWorld(TASKS[name](), batch_size, **options)
