"""World names: built-in tasks, those of installed packages, and suites by prefix. Imports no heavy dependencies."""

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
"""Built-in tasks: functions that return a `Task`."""
WORLDS = Registry("world", GROUP, {**OURS, "pusht": "sims.suites.pusht_world:PushTWorld"})
"""Built-in tasks, the original Push-T, and the worlds of installed packages; see `make_world` for all name forms."""


@dataclass(frozen=True)
class Suite:
    """A suite of worlds with a common name prefix. form: form of a name; make: "package.module:function", called with
    the name after the prefix, the number of rows, and options; expert: the same for a scripted expert, called with the
    name after the prefix and the world's spec, "" for none; extra: required extra, as (module, extra); imports: whether
    a name may contain a module that is imported, "module:id".
    """

    prefix: str
    form: str
    make: str
    expert: str = ""
    extra: tuple[str, str] | None = None
    imports: bool = False


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
    Suite(
        "libero/",
        "libero/<suite>[:<task>]",
        "sims.suites.libero_suite:make_libero_world",
        "sims.suites.controllers.libero:LiberoExpert",
        ("libero", "libero"),
    ),
    Suite("gymnasium:", "gymnasium:<id>", "sims.suites.gymnasium_suite:make_gymnasium_world", imports=True),
)
"""All external suites; a new one is one more entry."""


def suite_of(name: str) -> Suite | None:
    """Return the suite that a world's name belongs to, if any."""
    return next((suite for suite in SUITES if name.startswith(suite.prefix)), None)
