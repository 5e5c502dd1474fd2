"""Shared control: operators, alarms that call them, and the queue between robots and operators."""

from robopolicy.core.registry import Registry

OPERATORS = Registry(
    "operator",
    "robopolicy.operators",
    {
        "expert": "robopolicy.operators.operator:ScriptedOperator",
        "lerobot": "robopolicy.operators.lerobot:LeRobotOperator",
        "browser": "robopolicy.operators.axes:AxesOperator",
    },
)
"""Registry for collect.correct.operator and drive.operator: a class, called with a `Site` and its own options."""
