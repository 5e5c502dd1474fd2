"""What worlds are called: our tasks, those of installed packages, and suites by prefix. Imports nothing heavy."""

from dataclasses import dataclass

from robopolicy.core.registry import Registry

GROUP = "robopolicy.worlds"
OURS = {
    name: f"sims.tasks.{name}:task"
    for name in (
        "push_cube",
        "push_cube_moving",
        "push_choice",
        "push_t",
        "reach_planar",
        "arm_reach",
        "pick_place",
        "stack",
        "tidy",
    )
}
TASKS = Registry("task", "", OURS)
"""Our tasks: functions that return a `Task`."""
WORLDS = Registry("world", GROUP, OURS)
"""Our tasks and the worlds of installed packages; `make_world` says what a name may stand for."""


@dataclass(frozen=True)
class Suite:
    """Worlds with a prefix before their name. form: how a name looks; make: "package.module:function" that is called
    with what follows the prefix, the number of rows, and options; expert: the same for a scripted expert, called with
    what follows the prefix and the world's spec, "" for none; extra: what it needs, as (module, extra).
    """

    prefix: str
    form: str
    make: str
    expert: str = ""
    extra: tuple[str, str] | None = None


SUITES = (
    Suite(
        "metaworld/",
        "metaworld/<task>-v3",
        "sims.suites.metaworld_suite:make_metaworld_world",
        "sims.suites.metaworld_suite:metaworld_expert",
        ("metaworld", "metaworld"),
    ),
    Suite(
        "robosuite/",
        "robosuite/<task>",
        "sims.suites.robosuite_suite:make_robosuite_world",
        "sims.suites.robosuite_suite:robosuite_expert",
        ("robosuite", "robosuite"),
    ),
    Suite(
        "ogbench/",
        "ogbench/<task>-v0",
        "sims.suites.ogbench_suite:make_ogbench_world",
        "sims.suites.ogbench_suite:ogbench_expert",
        ("ogbench", "ogbench"),
    ),
    Suite("gymnasium:", "gymnasium:<id>", "sims.suites.gymnasium_suite:make_gymnasium_world"),
)
"""Every outside suite; the next one is one entry."""


def suite_of(name: str) -> Suite | None:
    """Return the suite that a world's name belongs to, if any."""
    return next((suite for suite in SUITES if name.startswith(suite.prefix)), None)
